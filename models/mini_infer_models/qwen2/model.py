"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values (arXiv 2407.10671, 2412.15115).

Contract: logits equal transformers' ``Qwen2ForCausalLM`` on the same checkpoint, sliding-window layers included.
"""

from typing import TYPE_CHECKING, ClassVar

from mini_infer.layers.decoder_adapter import DecoderAdapter, HFConfig, read_decoder_config

if TYPE_CHECKING:
    from mini_infer.interfaces import ModelConfig
    from mini_infer.layers import DecoderConfig


class Qwen2Adapter(DecoderAdapter):
    """Serves ``Qwen2ForCausalLM``."""

    name: ClassVar[str] = "qwen2"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)

    def decoder_config(self, config: "ModelConfig") -> "DecoderConfig":
        return read_decoder_config(config, sliding_windows=HFConfig(config.hf).layer_windows(), qkv_bias=True)
