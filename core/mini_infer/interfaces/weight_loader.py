"""WeightLoader: a checkpoint's config and tensors from some format. Never a pickle."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mini_infer.interfaces.model import ModelConfig


class WeightLoader(ABC):
    """One weight format."""

    name: ClassVar[str]
    """What ``engine.load_format`` calls it."""

    def locate(self, model: str) -> Path | None:
        """Where the model lies that the setting ``model`` calls by a name of this loader's own; None for others."""
        return None

    @abstractmethod
    def accepts(self, path: Path) -> bool:
        """Whether ``path`` (a folder or file) holds weights of this format. Reads names only."""

    def prepare(self, path: Path) -> Path:
        """The folder that holds config.json and the tokenizer (a converted copy where the format needs one)."""
        return path

    @abstractmethod
    def weights(self, path: Path, config: "ModelConfig") -> Iterator[tuple[str, "torch.Tensor"]]:
        """(Hugging Face name, tensor on the CPU in its stored dtype) one at a time.

        Raises:
            ConfigError: a file is missing or truncated; file and tensor are named.
        """

    def fill(self, module: "nn.Module", config: "ModelConfig") -> bool:
        """Set the parameters of the built module in place, where they are, instead of bringing ``weights``.

        Returns:
            Whether it did; with True, ``weights`` is not asked. For formats without a checkpoint, such as random ones.
        """
        return False

    def hf_config(self, path: Path) -> Mapping[str, Any] | None:
        """``config.json``'s content if the format carries its own; None to read the file in ``prepare(path)``."""
        return None
