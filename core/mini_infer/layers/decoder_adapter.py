"""What model families of the one common decoder share: reading config.json, building, loading.

Contract: a family that is ``layers.DecoderForCausalLM`` writes ``decoder_config`` only. Defaults for absent keys are
those of transformers; a key that we would have to ignore for right answers is a ``ConfigError``, naming it.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError
from mini_infer.interfaces.model import ModelAdapter, ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mini_infer.layers.decoder import DecoderConfig

MAX_LAYERS = 1000


@dataclass(frozen=True, slots=True)
class HFConfig:
    """Checked reading of config.json's content."""

    hf: Mapping[str, Any]

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; without ``default`` it must be there."""
        value = self.hf.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(f"config.json has no {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json: {key} must be a whole number above 0, not {value!r}")
        return value

    def layers(self) -> int:
        """``num_hidden_layers``."""
        layers = self.size("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise ConfigError(f"config.json: num_hidden_layers {layers} is more than any model has ({MAX_LAYERS})")
        return layers

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0."""
        value = self.hf.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"config.json: {key} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.hf.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} must be true or false, not {value!r}")
        return default if value is None else value

    def require(self, key: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Raise ConfigError unless the key's value is one of ``allowed``."""
        value = self.hf.get(key, default)
        if value not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise ConfigError(f"config.json: {key} {value!r} is not supported; supported: {choices}")

    def window(self) -> int | None:
        """``sliding_window``: absent it is 4096, as in transformers, and null is none."""
        return None if self.hf.get("sliding_window", 4096) is None else self.size("sliding_window", 4096)

    def layer_windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window as Qwen's configs state it, None for full attention."""
        layers = self.layers()
        window = self.window() if self.flag("use_sliding_window") else None
        kinds = self.hf.get("layer_types")
        if kinds is None:
            first = self.size("max_window_layers", 28) if self.hf.get("max_window_layers") != 0 else 0
            return tuple(None if index < first else window for index in range(layers))
        if len(kinds) != layers:
            raise ConfigError(f"config.json: layer_types names {len(kinds)} layers of {layers}")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(f"config.json: layer type {kind!r} is not supported")
            if kind == "sliding_attention" and window is None:
                raise ConfigError("config.json: layer_types has sliding_attention, but no sliding window is in use")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class DecoderAdapter(ModelAdapter):
    """A model family made of ``layers.DecoderForCausalLM``."""

    @abstractmethod
    def decoder_config(self, config: ModelConfig) -> "DecoderConfig":
        """The decoder that a checkpoint's config describes.

        Raises:
            ConfigError: naming the key of config.json and its value.
        """

    def check(self, config: ModelConfig) -> None:
        from mini_infer.layers.rope_scaling import rope_frequencies

        reader = HFConfig(config.hf)
        reader.require("hidden_act", ("silu",), "silu")
        if config.hf.get("quantization_config"):
            method = config.hf["quantization_config"].get("quant_method")
            raise ConfigError(f"config.json: quantization_config ({method}) is not supported by {self.name}")
        shape = self.decoder_config(config)
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads {shape.num_heads} is no multiple of "
                f"num_key_value_heads {shape.num_kv_heads}"
            )
        rope_frequencies(config.hf, shape.head_dim, config.max_position_embeddings)

    def build(self, config: ModelConfig) -> "nn.Module":
        from mini_infer.layers.decoder import DecoderForCausalLM
        from mini_infer.layers.rotary import rope_from_config

        shape = self.decoder_config(config)
        rotary = rope_from_config(config.hf, shape.head_dim, config.max_position_embeddings, dtype=config.dtype)
        return DecoderForCausalLM(shape, rotary)

    def load(self, module: "nn.Module", weights: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        from mini_infer.layers.decoder import DecoderForCausalLM

        if not isinstance(module, DecoderForCausalLM):
            raise TypeError(f"{self.name} loads the module that it built, not {type(module).__name__}")
        module.load(weights)


def read_decoder_config(
    config: ModelConfig,
    *,
    sliding_windows: tuple[int | None, ...] | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> "DecoderConfig":
    """Sizes that all families spell alike, with what the family adds.

    Args:
        config: the checkpoint's.
        sliding_windows: one a layer; None for full attention everywhere.
        head_dim: taken where config.json names none; None for hidden_size / num_attention_heads.
        qkv_bias: see ``DecoderConfig``, as for the others.
    """
    from mini_infer.layers.decoder import DecoderConfig

    reader = HFConfig(config.hf)
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    return DecoderConfig(
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=reader.size("num_key_value_heads", num_heads),
        head_dim=reader.size("head_dim", head_dim or hidden_size // num_heads),
        rms_norm_eps=reader.positive("rms_norm_eps", 1e-6),
        sliding_windows=sliding_windows or (None,) * reader.layers(),
        dtype=config.dtype,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tied_embeddings=reader.flag("tie_word_embeddings"),
    )
