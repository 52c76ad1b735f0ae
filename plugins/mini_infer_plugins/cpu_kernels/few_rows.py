"""FewRows: the transform that makes a model's layers run in native.cpp while a step has few rows.

Contract: the layers stay the objects that the model made, with their weights, ``slots`` and ``load``; only their
``forward`` is another. Layers whose class has a ``forward`` of its own (quantised, summed over ranks) are left alone.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelTransform
from mini_infer.layers import Linear, LMHead, RMSNorm, SiluAndMul
from mini_infer.layers.decoder import DecoderLayer
from mini_infer_plugins.cpu_kernels.decoder_layer import DecoderLayerForward
from mini_infer_plugins.cpu_kernels.layers import DTYPES, GateForward, LinearForward, NormForward, most_rows
from mini_infer_plugins.cpu_kernels.matrix import BlockCount
from mini_infer_plugins.cpu_kernels.memory import KEPT, keep_freed_memory
from mini_infer_plugins.cpu_kernels.native import native_build

if TYPE_CHECKING:
    from mini_infer.interfaces import ModelConfig


logger = logging.getLogger("mini_infer")


class FewRows(ModelTransform):
    """See the module.

    Args:
        log: gets a line that says what was replaced.
        blocks: read weights that are exactly blocks of 4 or 8 bits as such.
    """

    name: ClassVar[str] = "cpu-kernels"

    def __init__(self, log: Callable[[str], None] = lambda line: None, *, blocks: bool = True) -> None:
        self._log = log
        self._looks_for_blocks = blocks

    def apply(self, module: nn.Module, config: "ModelConfig") -> nn.Module:
        if config.device != "cpu" or config.dtype not in DTYPES:
            raise ConfigError(
                f"plugin 'cpu-kernels' speeds up float32 and bfloat16 on a CPU, not {config.dtype} on {config.device}"
            )
        native_build().start(self._log)
        num_matrices = sum(isinstance(layer, Linear | LMHead) for layer in module.modules())
        blocks = BlockCount(num_matrices, logger.info) if self._looks_for_blocks else None  # the start log is over then
        forwards = {
            layer: forward for layer in module.modules() if (forward := _forward_for(layer, blocks)) is not None
        }
        for layer, forward in forwards.items():
            layer.forward = forward
        if keep_freed_memory():
            self._log(f"cpu-kernels: the allocator keeps up to {KEPT >> 20} MiB that a step frees for the next")
        rows = f"native for steps of up to {most_rows(config.dtype)} rows"
        self._log(f"cpu-kernels: {len(forwards)} layers of {type(module).__name__} {rows if forwards else 'are known'}")
        return module


def _forward_for(layer: nn.Module, blocks: BlockCount | None) -> Callable[..., object] | None:
    """The replacement, if the layer's class computes what this file knows."""
    forward = type(layer).forward
    if isinstance(layer, LMHead) and forward is LMHead.forward:
        return LinearForward(lambda: layer.matrix, None, blocks)
    if isinstance(layer, Linear) and forward is Linear.forward:
        return LinearForward(lambda: layer.weight, layer.bias, blocks)
    if isinstance(layer, RMSNorm) and forward is RMSNorm.forward:
        return NormForward(layer)
    if isinstance(layer, SiluAndMul) and forward is SiluAndMul.forward:
        return GateForward(layer)
    if isinstance(layer, DecoderLayer) and forward is DecoderLayer.forward:
        return DecoderLayerForward(layer, blocks)
    return None
