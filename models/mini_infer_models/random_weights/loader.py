"""Weights out of a generator, for benchmarks of any shape: only config.json is read.

Contract: each parameter is drawn where it lies, on its own device and in its own dtype, so a model that fits is filled
at the device's speed. The same seed, device kind and module give the same weights. Vectors called ``weight`` are norms
and become 1; all else is normal noise. With ``uniform`` every number, norms too, is even noise.
"""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelConfig, WeightLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn


class RandomLoader(WeightLoader):
    """``load_format = "random"``.

    Args:
        std: standard deviation of weights and biases.
        seed: of the generator.
        uniform: above 0, all parameters are drawn evenly between its negative and itself, and ``std`` is not used.
    """

    name: ClassVar[str] = "random"

    def __init__(self, std: float = 0.02, seed: int = 0, uniform: float = 0.0) -> None:
        self._std = std
        self._seed = seed
        self._uniform = uniform

    def accepts(self, path: Path) -> bool:
        """Never by itself: weights are random only where the settings say so."""
        return False

    def weights(self, path: Path, config: ModelConfig) -> "Iterator[tuple[str, torch.Tensor]]":
        raise ConfigError("random weights have no checkpoint: they are set in place by `fill`")

    def fill(self, module: "nn.Module", config: ModelConfig) -> bool:
        import torch

        generator = torch.Generator(device=config.device).manual_seed(self._seed)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if self._uniform:
                    parameter.uniform_(-self._uniform, self._uniform, generator=generator)
                elif parameter.dim() == 1 and name.endswith("weight"):
                    parameter.fill_(1)
                else:
                    parameter.normal_(std=self._std, generator=generator)
        return True
