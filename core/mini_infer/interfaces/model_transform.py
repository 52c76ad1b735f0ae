"""ModelTransform: rewrites the built module (quantise, fuse, shard) before caches are bound."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import nn

    from mini_infer.interfaces.model import ModelConfig


class ModelTransform(ABC):
    """Applied in settings order, after the weights are loaded and before attention backends bind."""

    name: ClassVar[str]

    @abstractmethod
    def apply(self, module: "nn.Module", config: "ModelConfig") -> "nn.Module":
        """The rewritten module; in place is fine.

        Raises:
            ConfigError: it cannot honour its settings on this model or device; never a silent no-op.
        """
