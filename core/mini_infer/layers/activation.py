"""The gate of a gated MLP.

Contract: no parameters and no state; a transform may replace the module by a fused one.
"""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """silu(gate) * up (SwiGLU: Shazeer, arXiv 2002.05202)."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 * size], gate first -> [..., size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
