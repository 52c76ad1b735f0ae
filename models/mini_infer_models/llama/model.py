"""Llama 1 to 3.x, and Mistral, which differs by its sliding window only (Touvron et al., arXiv 2302.13971, 2307.09288).

Contract: logits equal transformers' ``LlamaForCausalLM`` and ``MistralForCausalLM`` on the same checkpoint.
"""

from typing import TYPE_CHECKING, ClassVar

from mini_infer.layers.decoder_adapter import DecoderAdapter, HFConfig, read_decoder_config

if TYPE_CHECKING:
    from mini_infer.interfaces import ModelConfig
    from mini_infer.layers import DecoderConfig

MISTRAL = "MistralForCausalLM"


class LlamaAdapter(DecoderAdapter):
    """Serves ``LlamaForCausalLM`` and ``MistralForCausalLM``."""

    name: ClassVar[str] = "llama"
    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", MISTRAL)

    def decoder_config(self, config: "ModelConfig") -> "DecoderConfig":
        reader = HFConfig(config.hf)
        if MISTRAL in config.hf.get("architectures", ()):
            return read_decoder_config(config, sliding_windows=(reader.window(),) * reader.size("num_hidden_layers"))
        bias = reader.flag("attention_bias")
        return read_decoder_config(config, qkv_bias=bias, o_bias=bias, mlp_bias=reader.flag("mlp_bias"))
