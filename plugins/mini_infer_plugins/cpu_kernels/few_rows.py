"""FewRows: the transform that makes a model's layers run in native.cpp while a step has few rows.

Contract: the layers stay the objects that the model made, with their weights, ``slots`` and ``load``; only their
``forward`` is another. Layers whose class has a ``forward`` of its own (quantised, summed over ranks) are left alone.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelTransform
from mini_infer.layers import Linear, LMHead, RMSNorm, SiluAndMul
from mini_infer.layers.decoder import DecoderLayer
from mini_infer_plugins.cpu_kernels.decoder_layer import DecoderLayerForward
from mini_infer_plugins.cpu_kernels.layers import GateForward, LinearForward, NormForward
from mini_infer_plugins.cpu_kernels.native import native_build

if TYPE_CHECKING:
    from mini_infer.interfaces import ModelConfig

_DTYPES = (torch.float32, torch.bfloat16)


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
    if isinstance(layer, DecoderLayer) and forward is DecoderLayer.forward:
        return DecoderLayerForward(layer)
    return None
