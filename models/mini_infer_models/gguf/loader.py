"""Loading ``.gguf`` files: converted once into the user's cache, read from there.

Contract: the file is never read twice for the same family and dtype, for reading GGUF's metadata takes seconds.
"""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelConfig, WeightLoader
from mini_infer.model.cache import converted_folder
from mini_infer_models.gguf.convert import FORMAT_VERSION, WEIGHTS, convert_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def converted(path: Path, family: str, dtype: str) -> Path:
    """The folder made of a GGUF file, in the user's cache.

    Args:
        path: the file.
        family: ``llama``, ``qwen2``, or ``auto`` for the file's own.
        dtype: ``float32`` or ``bfloat16``.

    Raises:
        ConfigError: as ``convert_gguf``.
    """
    folder = converted_folder(path, f"{family}-{dtype}", FORMAT_VERSION)
    return convert_gguf(path, folder, None if family == "auto" else family, dtype)


class GGUFLoader(WeightLoader):
    """``load_format = "gguf"``.

    Args:
        family: as ``converted`` takes it.
        dtype: of the engine's activations; the folder is made in bfloat16 for bfloat16, else in float32.
    """

    name: ClassVar[str] = "gguf"

    def __init__(self, family: str = "auto", dtype: str = "float32") -> None:
        self._family = family
        self._dtype = "bfloat16" if dtype == "bfloat16" else "float32"

    def accepts(self, path: Path) -> bool:
        return path.suffix == ".gguf"

    def prepare(self, path: Path) -> Path:
        return converted(path, self._family, self._dtype)

    def weights(self, path: Path, config: ModelConfig) -> "Iterator[tuple[str, torch.Tensor]]":
        from safetensors import SafetensorError, safe_open

        file = self.prepare(path) / WEIGHTS
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                tensor_names = opened.keys()
                for tensor_name in tensor_names:
                    yield tensor_name, opened.get_tensor(tensor_name).clone()  # else it would map the file
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged ({error}): delete its folder, it is made anew") from error
