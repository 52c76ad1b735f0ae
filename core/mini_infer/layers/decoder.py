"""The pre-norm decoder that Llama, Mistral, Qwen2 and Qwen3 are: one module, told apart by ``DecoderConfig``.

Contract: submodules carry the checkpoint's names, but for ``qkv_proj`` and ``gate_up_proj``, which are merged::

    model.embed_tokens
    model.layers.N.input_layernorm   self_attn.{qkv_proj, q_norm, k_norm, attn, o_proj}
                   post_attention_layernorm   mlp.{gate_up_proj, act, down_proj}
    model.norm   lm_head

Each norm adds the residual that the layer before left, so that one fused operator can do both.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from mini_infer.interfaces.model import CausalLM, KVCacheSpec
from mini_infer.layers.activation import SiluAndMul
from mini_infer.layers.attention import Attention
from mini_infer.layers.embedding import LMHead, VocabParallelEmbedding
from mini_infer.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from mini_infer.layers.loading import load_weights
from mini_infer.layers.norm import RMSNorm
from mini_infer.layers.rotary import RotaryEmbedding
from mini_infer.parallel import SINGLE, ParallelContext

if TYPE_CHECKING:
    from mini_infer.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What tells one decoder from another. Sizes are the whole model's.

    Attributes:
        sliding_windows: a layer's window in tokens, the query's own counted, or None for full attention; one a layer.
        qkv_bias: biases on queries, keys and values.
        o_bias: bias on the attention's output.
        mlp_bias: biases in the MLP.
        qk_norm: queries and keys are normalised head by head before they are rotated.
        tied_embeddings: the logits' matrix is the embedding's.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    sliding_windows: tuple[int | None, ...]
    dtype: torch.dtype
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False

    def kv_cache_spec(self, layer: int, num_kv_heads: int) -> KVCacheSpec:
        """What ``layer`` keeps of a token on a rank with so many key and value heads."""
        window = self.sliding_windows[layer]
        return KVCacheSpec(
            kind="full" if window is None else "sliding",
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            sliding_window=window,
        )


class DecoderAttention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245) with merged projections."""

    def __init__(self, config: DecoderConfig, layer: int, rotary: RotaryEmbedding, parallel: ParallelContext) -> None:
        super().__init__()
        sizes = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
        self.qkv_proj = QKVParallelLinear(*sizes, config.qkv_bias, dtype=config.dtype, parallel=parallel)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=config.dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=config.dtype)
        spec = config.kv_cache_spec(layer, self.qkv_proj.num_kv_heads)
        self.attn = Attention(self.qkv_proj.num_heads, spec, config.head_dim**-0.5, rotary)
        width = config.num_heads * config.head_dim
        self.o_proj = RowParallelLinear(width, config.hidden_size, config.o_bias, dtype=config.dtype, parallel=parallel)

    def forward(self, x: torch.Tensor, batch: "ForwardBatch") -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        query, key, value = self.qkv_proj.split(self.qkv_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        out: torch.Tensor = self.o_proj(self.attn(query, key, value, batch).flatten(1))
        return out


class GatedMLP(nn.Module):
    """SwiGLU with gate and up merged."""

    def __init__(self, config: DecoderConfig, parallel: ParallelContext) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, {"gate": inner, "up": inner}, bias, dtype=config.dtype, parallel=parallel
        )
        self.act = SiluAndMul()
        self.down_proj = RowParallelLinear(inner, hidden, bias, dtype=config.dtype, parallel=parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        out: torch.Tensor = self.down_proj(self.act(self.gate_up_proj(x)))
        return out


class DecoderLayer(nn.Module):
    """Attention, then MLP, each after a norm and with a residual around it.

    Attributes:
        is_last: with ``batch.shape.last_only`` it leaves all but each row's last token out of its MLP.
    """

    def __init__(self, config: DecoderConfig, layer: int, rotary: RotaryEmbedding, parallel: ParallelContext) -> None:
        super().__init__()
        self.is_last = layer == len(config.sliding_windows) - 1
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=config.dtype)
        self.self_attn = DecoderAttention(config, layer, rotary, parallel)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=config.dtype)
        self.mlp = GatedMLP(config, parallel)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: "ForwardBatch"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer adds, and the residual to add it to; both [num_tokens, hidden_size], or of the tokens kept."""
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, batch)
        if self.is_last and batch.shape.last_only:
            x, residual = batch.last_tokens(x, residual)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class DecoderModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: DecoderConfig, rotary: RotaryEmbedding, parallel: ParallelContext) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, dtype=config.dtype, parallel=parallel
        )
        layers = range(len(config.sliding_windows))
        self.layers = nn.ModuleList(DecoderLayer(config, i, rotary, parallel) for i in layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=config.dtype)

    def forward(self, input_ids: torch.Tensor, batch: "ForwardBatch") -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]."""
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return hidden


class DecoderForCausalLM(nn.Module, CausalLM):
    """A decoder with its logits.

    Args:
        config: the decoder's shape.
        rotary: shared by all layers.
        parallel: this rank.
    """

    leaves_out: ClassVar[bool] = True

    def __init__(self, config: DecoderConfig, rotary: RotaryEmbedding, parallel: ParallelContext = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModel(config, rotary, parallel)
        tied_to = self.model.embed_tokens if config.tied_embeddings else None
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied_to, dtype=config.dtype, parallel=parallel)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: "ForwardBatch") -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids, batch)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from a checkpoint; ConfigError as ``load_weights`` says."""
        ignored = ("rotary_emb.inv_freq", *(("lm_head.weight",) if self.config.tied_embeddings else ()))
        load_weights(self, weights, ignored=ignored)
