"""Root-mean-square normalisation, with the residual sum that usually comes before it.

Contract: bit for bit what transformers' Llama, Qwen2 and Qwen3 norms give: the mean in float32, the quotient rounded to
the input's dtype, and only then the weight (Zhang and Sennrich, arXiv 1910.07467).
"""

from collections.abc import Iterator
from typing import overload

import torch
import torch.nn.functional as F
from torch import nn

from mini_infer.layers.linear import Slot, copy_exactly, empty_parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Args:
        size: numbers in the last dimension.
        eps: added to the mean.
        dtype: of the weight.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight: torch.Tensor = empty_parameter(size, dtype=dtype)

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    @overload
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise ``x``, or the sum of ``x`` and ``residual``.

        Args:
            x: [..., size].
            residual: of the same shape, added first.

        Returns:
            The normalised tensor; with a residual, that and the sum, the residual of what follows.
        """
        if residual is None:
            return self._norm(x)
        residual = x + residual
        return self._norm(residual), residual

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.rms_norm(x, (self.size,), None, self.eps) * self.weight

    def slots(self) -> Iterator[Slot]:
        """What ``load`` must be called for."""
        yield "weight", ""

    def load(self, tensor: torch.Tensor, part: str = "", parameter: str = "weight") -> None:
        """Copy the checkpoint's [size]; ValueError if it has another shape."""
        copy_exactly(self.weight, tensor)

    def extra_repr(self) -> str:
        return f"size={self.size}, eps={self.eps}"
