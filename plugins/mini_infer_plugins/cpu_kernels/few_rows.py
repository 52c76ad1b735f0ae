"""FewRows: linear layers, norms and gates that run in native.cpp while a step has few rows.

Contract: the layers stay the objects that the model made, with their weights, ``slots`` and ``load``; only their
``forward`` is another. Layers whose class has a ``forward`` of its own (quantised, summed over ranks) are
left alone. Until native.cpp is built, and for many rows, PyTorch computes::

    rows of x          1 ........ 32 ..................
    float32            native     F.linear
    bfloat16           native     F.linear in float32: PyTorch's own product is slower than that without special units
    bfloat16, units    native 12  F.linear
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelTransform
from mini_infer.layers import Linear, LMHead, RMSNorm, SiluAndMul
from mini_infer_plugins.cpu_kernels.native import multiplies_bfloat16, native_build

if TYPE_CHECKING:
    from mini_infer.interfaces import ModelConfig

_DTYPES = (torch.float32, torch.bfloat16)
_MOST_ROWS = 32  # for which the product in native.cpp is faster, by measurement (README)
_MOST_ROWS_BESIDE_BF16_UNITS = 12


class FewRows(ModelTransform):
    """See the module."""

    name: ClassVar[str] = "cpu-kernels"

    def apply(self, module: nn.Module, config: "ModelConfig") -> nn.Module:
        if config.device != "cpu" or config.dtype not in _DTYPES:
            raise ConfigError(
                f"plugin 'cpu-kernels' speeds up float32 and bfloat16 on a CPU, not {config.dtype} on {config.device}"
            )
        native_build().start()
        replaced = 0
        for layer in module.modules():
            forward = _forward_for(layer)
            if forward is not None:
                layer.forward = forward
                replaced += 1
        if not replaced:
            raise ConfigError(f"plugin 'cpu-kernels' knows no layer of {type(module).__name__}: leave it out")
        return module


class LinearForward:
    """``Linear.forward`` and ``LMHead.forward``.

    Args:
        weight: gives [out_features, in_features], wherever it is kept now.
        bias: [out_features] or None.
    """

    def __init__(self, weight: Callable[[], torch.Tensor], bias: torch.Tensor | None) -> None:
        self._build = native_build()
        self._weight = weight
        self._bias = bias
        self._units = multiplies_bfloat16()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        weight, native = self._weight(), self._build.library
        outs, k = weight.shape
        rows = x.numel() // k
        bf16 = x.dtype is torch.bfloat16
        if native is None or rows > (_MOST_ROWS_BESIDE_BF16_UNITS if bf16 and self._units else _MOST_ROWS):
            if bf16 and not self._units and rows > _MOST_ROWS:
                bias = None if self._bias is None else self._bias.float()
                return F.linear(x.float(), weight.float(), bias).to(x.dtype)
            return F.linear(x, weight, self._bias)
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], outs, dtype=x.dtype)
        bias_at = None if self._bias is None else self._bias.data_ptr()
        native.linear(
            bf16, x.data_ptr(), weight.data_ptr(), bias_at, y.data_ptr(), rows, outs, k, torch.get_num_threads()
        )
        return y


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
        if native is None:
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
        if native is None:
            return type(self._layer).forward(self._layer, gate_up)
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        y = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype)
        rows = y.numel() // size
        bf16 = y.dtype is torch.bfloat16
        native.silu_and_mul(bf16, gate_up.data_ptr(), y.data_ptr(), rows, size, torch.get_num_threads())
        return y


def _forward_for(layer: nn.Module) -> Callable[..., object] | None:
    """The replacement, if the layer's class computes what this file knows."""
    forward = type(layer).forward
    if isinstance(layer, LMHead) and forward is LMHead.forward:
        return LinearForward(lambda: layer.matrix, None)
    if isinstance(layer, Linear) and forward is Linear.forward:
        return LinearForward(lambda: layer.weight, layer.bias)
    if isinstance(layer, RMSNorm) and forward is RMSNorm.forward:
        return NormForward(layer)
    if isinstance(layer, SiluAndMul) and forward is SiluAndMul.forward:
        return GateForward(layer)
    return None
