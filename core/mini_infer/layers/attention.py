"""The attention layer: the one place where a model meets paged caches.

RoPE belongs here (unless the backend fuses it), so that a model family states it once and every backend gets rotated
queries and keys. The core binds ``backend`` and ``kv_cache`` after all model transforms; a layer that is not bound
cannot run.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces.attention import AttentionBackend
    from mini_infer.interfaces.model import KVCacheSpec
    from mini_infer.layers.rotary import RotaryEmbedding


class Attention(nn.Module):
    """Causal attention over a paged cache.

    Args:
        num_heads: query heads on this rank.
        spec: what it keeps of a token.
        scale: factor on the scores, usually head_dim ** -0.5.
        rotary: rotates queries and keys by position; None if the model has done so or has no RoPE.
    """

    backend: "AttentionBackend"
    kv_cache: torch.Tensor

    def __init__(
        self, num_heads: int, spec: "KVCacheSpec", scale: float, rotary: "RotaryEmbedding | None" = None
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.spec = spec
        self.scale = scale
        self.rotary = rotary

    def bind(self, backend: "AttentionBackend", kv_cache: torch.Tensor) -> None:
        """Give the layer its backend and its cache tensor."""
        self.backend = backend
        self.kv_cache = kv_cache
        backend.bind(self)

    def unbind(self) -> None:
        """Let go of both."""
        del self.backend, self.kv_cache

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: "ForwardBatch"
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend.

        Args:
            query: [num_tokens, num_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim].
            value: [num_tokens, num_kv_heads, v_head_dim].
            batch: the step's.

        Returns:
            [num_tokens, num_heads, v_head_dim].
        """
        if self.rotary is not None and not self.backend.capabilities.fuses_rope:
            query, key = self.rotary(query, key, batch.positions)
        query = self.backend.write_kv(self, query, key, value, batch)
        if batch.around_attention is not None:
            return batch.around_attention(self, query)
        return self.backend.attend(self, query, batch)
