"""Rotary position embedding (RoFormer, arXiv 2104.09864) over packed tokens.

Contract: pairs are (x[i], x[i + head_dim / 2]), as in Hugging Face checkpoints. In float32 the numbers are those of
transformers. The angles come from ``rope_scaling``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mini_infer.layers.rope_scaling import rope_frequencies


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions.

    One object may serve all layers. Its table is computed on the CPU, the same on every device, and follows the module
    when that is materialised, moved or cast.

    Args:
        inv_freq: [head_dim / 2] float32 on the CPU, radians a position.
        max_len: positions in the table.
        scaling: factor on cosine and sine (YaRN's attention factor).
        dtype: of queries and keys, and so of the table.
    """

    table: torch.Tensor  # [max_len, 2, 1, head_dim]: (cos, cos), then (-sin, sin)

    def __init__(self, inv_freq: torch.Tensor, max_len: int, scaling: float = 1.0, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.inv_freq = inv_freq
        self.max_len = max_len
        self.scaling = scaling
        self.register_buffer("table", self._make_table(torch.empty(0).device, dtype), persistent=False)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated copies.

        Args:
            query: [num_tokens, num_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim].
            positions: [num_tokens] int64, below ``max_len``.
        """
        cos, sin = self.table.index_select(0, positions).unbind(1)  # [num_tokens, 1, head_dim] each
        half = query.shape[-1] // 2
        return (
            torch.addcmul(query * cos, query.roll(half, -1), sin),
            torch.addcmul(key * cos, key.roll(half, -1), sin),
        )

    def _make_table(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if device.type == "meta":
            return torch.empty(self.max_len, 2, 1, 2 * self.inv_freq.numel(), dtype=dtype, device=device)
        angles = torch.arange(self.max_len, dtype=torch.float32, device="cpu")[:, None] * self.inv_freq
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        return table.unsqueeze(2).to(device, dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """Compute the table anew where ``to``, ``to_empty`` and their like would move it: it is no checkpoint's."""
        probe = fn(torch.empty(0, dtype=self.table.dtype, device=self.table.device))
        if (probe.device, probe.dtype) != (self.table.device, self.table.dtype):
            self.table = self._make_table(probe.device, probe.dtype)
        return self

    def extra_repr(self) -> str:
        return f"head_dim={2 * self.inv_freq.numel()}, max_len={self.max_len}, scaling={self.scaling}"


def rope_from_config(hf: Mapping[str, Any], head_dim: int, max_len: int, *, dtype: torch.dtype) -> RotaryEmbedding:
    """The embedding that a checkpoint's config.json asks for.

    Args:
        hf: config.json's content.
        head_dim: numbers of a head that are rotated.
        max_len: the longest sequence that will be served.
        dtype: of queries and keys.

    Raises:
        ConfigError: naming the type or parameter that is unknown, missing or out of range.
    """
    inv_freq, scaling = rope_frequencies(hf, head_dim, max_len)
    return RotaryEmbedding(inv_freq, max_len, scaling, dtype=dtype)
