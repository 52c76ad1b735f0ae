"""Qwen3: a Llama whose queries and keys are normalised head by head before they are rotated (arXiv 2505.09388).

Contract: logits equal transformers' ``Qwen3ForCausalLM`` on the same checkpoint, sliding-window layers included.
"""

from typing import TYPE_CHECKING, ClassVar

from mini_infer.layers.decoder_adapter import DecoderAdapter, HFConfig, read_decoder_config

if TYPE_CHECKING:
    from mini_infer.interfaces import ModelConfig
    from mini_infer.layers import DecoderConfig


class Qwen3Adapter(DecoderAdapter):
    """Serves ``Qwen3ForCausalLM``."""

    name: ClassVar[str] = "qwen3"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)

    def decoder_config(self, config: "ModelConfig") -> "DecoderConfig":
        reader = HFConfig(config.hf)
        bias = reader.flag("attention_bias")
        return read_decoder_config(
            config,
            sliding_windows=reader.layer_windows(),
            head_dim=128,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
        )
