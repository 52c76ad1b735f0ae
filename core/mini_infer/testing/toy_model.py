"""ToyAdapter: a small attention model made of core layers, with a KV group for each kind of cache that a test asks for.

Contract: ``architectures = ["ToyForCausalLM"]``; config.json's ``layer_kinds`` lists each layer's cache: ``full``,
``sliding`` (of ``sliding_window`` tokens) or ``latent``. Layers are pre-norm attention without an MLP. A latent layer
keeps one vector a token, as DeepSeek's MLA does::

    latent vector   [ value: head_dim - rope_dim ][ rotated key: rope_dim ]      all of it is the key
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from mini_infer.errors import ConfigError
from mini_infer.interfaces import CausalLM, KVCacheSpec, ModelAdapter, ModelConfig, WeightLoader
from mini_infer.layers import (
    Attention,
    Linear,
    LMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    load_weights,
    rope_from_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from mini_infer.forward_batch import ForwardBatch

KINDS = ("full", "sliding", "latent")


class ToyAdapter(ModelAdapter):
    """Serves ``ToyForCausalLM``."""

    name: ClassVar[str] = "toy"
    architectures: ClassVar[tuple[str, ...]] = ("ToyForCausalLM",)

    def check(self, config: ModelConfig) -> None:
        for kind in config.hf["layer_kinds"]:
            if kind not in KINDS:
                raise ConfigError(f"config.json: layer_kinds has {kind!r}; known: {', '.join(KINDS)}")

    def build(self, config: ModelConfig) -> nn.Module:
        return ToyForCausalLM(config)

    def load(self, module: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_weights(module, weights)


class ToyForCausalLM(nn.Module, CausalLM):
    """Embedding, attention layers, norm, logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hf, dtype = config.hf, config.dtype
        self.embed_tokens = VocabParallelEmbedding(hf["vocab_size"], hf["hidden_size"], dtype=dtype)
        self.layers = nn.ModuleList(
            ToyLatentLayer(config) if kind == "latent" else ToyLayer(config, kind) for kind in hf["layer_kinds"]
        )
        self.norm = RMSNorm(hf["hidden_size"], hf["rms_norm_eps"], dtype=dtype)
        self.lm_head = LMHead(hf["hidden_size"], hf["vocab_size"], dtype=dtype)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, positions, batch)
        hidden: torch.Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


class ToyLayer(nn.Module):
    """Grouped-query attention over keys and values of all tokens, or of the last few."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        hf, dtype = config.hf, config.dtype
        heads, kv_heads, head_dim = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
        sliding = kind == "sliding"
        spec = KVCacheSpec(
            kind="sliding" if sliding else "full",
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            dtype=_name(dtype),
            sliding_window=hf["sliding_window"] if sliding else None,
        )
        self.norm = RMSNorm(hf["hidden_size"], hf["rms_norm_eps"], dtype=dtype)
        self.qkv_proj = QKVParallelLinear(hf["hidden_size"], heads, kv_heads, head_dim, dtype=dtype)
        self.attn = Attention(heads, spec, head_dim**-0.5, _rotary(config, head_dim))
        self.o_proj = RowParallelLinear(heads * head_dim, hf["hidden_size"], dtype=dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same, the residual added."""
        query, key, value = self.qkv_proj.split(self.qkv_proj(self.norm(x)))
        out: torch.Tensor = x + self.o_proj(self.attn(query, key, value, batch).flatten(1))
        return out


class ToyLatentLayer(nn.Module):
    """Attention whose keys and values are one shared vector a token; rotated here, not by ``Attention``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hf, dtype = config.hf, config.dtype
        heads, head_dim, rope_dim = hf["num_attention_heads"], hf["head_dim"], hf["rope_dim"]
        self.value_dim = head_dim - rope_dim
        spec = KVCacheSpec("latent", 1, head_dim, self.value_dim, _name(dtype))
        self.norm = RMSNorm(hf["hidden_size"], hf["rms_norm_eps"], dtype=dtype)
        self.query_proj = Linear(hf["hidden_size"], heads * head_dim, dtype=dtype)
        self.latent_proj = Linear(hf["hidden_size"], head_dim, dtype=dtype)
        self.rotary = _rotary(config, rope_dim)
        self.attn = Attention(heads, spec, head_dim**-0.5)
        self.o_proj = RowParallelLinear(heads * self.value_dim, hf["hidden_size"], dtype=dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same, the residual added."""
        normed = self.norm(x)
        query = self.query_proj(normed).view(x.shape[0], self.attn.num_heads, -1)
        key = self.latent_proj(normed).view(x.shape[0], 1, -1)
        split = self.value_dim
        turned_query, turned_key = self.rotary(query[..., split:], key[..., split:], positions)
        query = torch.cat((query[..., :split], turned_query), dim=-1)
        key = torch.cat((key[..., :split], turned_key), dim=-1)
        out: torch.Tensor = x + self.o_proj(self.attn(query, key, key[..., :split], batch).flatten(1))
        return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rotary(config: ModelConfig, dim: int) -> RotaryEmbedding:
    return rope_from_config(config.hf, dim, config.max_position_embeddings, dtype=config.dtype)


def toy_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in a toy checkpoint."""
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, value_dim = config["head_dim"], config["head_dim"] - config["rope_dim"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer, kind in enumerate(config["layer_kinds"]):
        sizes: dict[str, tuple[int, ...]] = {
            "norm": (hidden,),
            "q_proj": (heads * head_dim, hidden),
            "k_proj": (kv * head_dim, hidden),
            "v_proj": (kv * head_dim, hidden),
            "o_proj": (hidden, heads * head_dim),
        }
        if kind == "latent":
            sizes = {
                "norm": (hidden,),
                "query_proj": (heads * head_dim, hidden),
                "latent_proj": (head_dim, hidden),
                "o_proj": (hidden, heads * value_dim),
            }
        shapes |= {f"layers.{layer}.{name}.weight": size for name, size in sizes.items()}
    return {**shapes, "norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


class ToyLoader(WeightLoader):
    """The weights of one safetensors file, without checks: those of model families are in packages of their own."""

    name: ClassVar[str] = "toy"

    def accepts(self, path: Path) -> bool:
        return (path / "model.safetensors").is_file()

    def weights(self, path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors.torch import load_file

        yield from load_file(path / "model.safetensors").items()
