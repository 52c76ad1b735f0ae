"""What linear layers, norms and gates do instead: native.cpp for few rows, PyTorch for many.

Contract: each object is a layer's ``forward``, with its arguments and results. Until native.cpp is built the layer's
own code runs. Up to how many rows a product is native, by measurement (README)::

    rows of x            1 ...... 12 ...... 32 ..................
    float32              native             F.linear
    bfloat16             native             F.linear in float32, faster than PyTorch's own product without special units
    bfloat16 with units  native   F.linear
"""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F

from mini_infer.layers import RMSNorm, SiluAndMul
from mini_infer.native_build import multiplies_bfloat16
from mini_infer_plugins.cpu_kernels.matrix import BlockCount, Matrix
from mini_infer_plugins.cpu_kernels.native import native_build

DTYPES = (torch.float32, torch.bfloat16)
"""What native.cpp knows."""

_MOST_ROWS = 32
_MOST_ROWS_BESIDE_UNITS = 12


def most_rows(dtype: torch.dtype) -> int:
    """Up to how many rows native.cpp's product is the faster one."""
    return _MOST_ROWS_BESIDE_UNITS if dtype is torch.bfloat16 and multiplies_bfloat16() else _MOST_ROWS


def fits(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether native.cpp can read ``weight`` for inputs of ``dtype``."""
    return weight.dtype is dtype and dtype in DTYPES and weight.is_contiguous()


class LinearForward:
    """``Linear.forward`` and ``LMHead.forward``.

    Args:
        weight: gives [out_features, in_features], wherever it is kept now.
        bias: [out_features] or None.
        blocks: where weights that are blocks are counted; None not to look for them.
    """

    def __init__(
        self, weight: Callable[[], torch.Tensor], bias: torch.Tensor | None, blocks: BlockCount | None = None
    ) -> None:
        self._build = native_build()
        self._weight = weight
        self._bias = bias
        self._blocks = blocks
        self._matrix: Matrix | None = None  # not looked at yet

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        weight, native = self._weight(), self._build.library
        outs, k = weight.shape
        rows = x.numel() // k
        if native is None or rows > most_rows(x.dtype) or not fits(weight, x.dtype):
            return _torch_linear(x, weight, self._bias)
        matrix = self.matrix(native)
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], outs, dtype=x.dtype)
        args = ctypes.byref(matrix.args)
        native.linear(args, x.dtype is torch.bfloat16, x.data_ptr(), y.data_ptr(), rows, torch.get_num_threads())
        return y

    def matrix(self, native: ctypes.CDLL) -> Matrix:
        """The weight as native.cpp reads it, looked at once for all who use it."""
        weight, matrix = self._weight(), self._matrix
        if matrix is None or not matrix.is_of(weight):
            matrix = self._matrix = Matrix(native, weight, self._bias, self._blocks)
        return matrix


class NormForward:
    """``RMSNorm.forward``, the sum with the residual in the same pass."""

    def __init__(self, layer: RMSNorm) -> None:
        self._build = native_build()
        self._layer = layer

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[..., size] -> [..., size]; with a residual also the sum."""
        layer, native = self._layer, self._build.library
        if native is None or not fits(layer.weight, x.dtype):
            return type(layer).forward(layer, x) if residual is None else type(layer).forward(layer, x, residual)
        x = x.contiguous()
        y = torch.empty_like(x)
        total = residual_at = total_at = None
        if residual is not None:
            residual, total = residual.contiguous(), torch.empty_like(x)
            residual_at, total_at = residual.data_ptr(), total.data_ptr()
        native.add_rms_norm(
            x.dtype is torch.bfloat16,
            *(x.data_ptr(), residual_at, layer.weight.data_ptr(), total_at, y.data_ptr()),
            *(x.numel() // layer.size, layer.size, layer.eps, torch.get_num_threads()),
        )
        return y if total is None else (y, total)


class GateForward:
    """``SiluAndMul.forward``."""

    def __init__(self, layer: SiluAndMul) -> None:
        self._build = native_build()
        self._layer = layer

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 * size] -> [..., size]."""
        native = self._build.library
        if native is None or gate_up.dtype not in DTYPES:
            return type(self._layer).forward(self._layer, gate_up)
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        y = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype)
        rows = y.numel() // size
        bf16 = y.dtype is torch.bfloat16
        native.silu_and_mul(bf16, gate_up.data_ptr(), y.data_ptr(), rows, size, torch.get_num_threads())
        return y


def _torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.numel() // x.shape[-1]
    if x.dtype is torch.bfloat16 and rows > _MOST_ROWS and not multiplies_bfloat16():
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)
