"""A GGUF file: its metadata, and its tensors as float32.

Contract: values are those of the file, bit for bit those of ``gguf.dequantize``. What is handed out lies in memory of
its own: nothing refers to the mapped file afterwards. Whatever is wrong with a file is a ``ConfigError`` that names it.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, read with the ``gguf`` package, which is imported
when a file is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFReader


class GGUFFile:
    """One opened file.

    Args:
        path: the file.

    Attributes:
        tensor_names: as llama.cpp calls them, in the order of the file.

    Raises:
        ConfigError: it is missing, not GGUF, cut short, or the ``gguf`` package is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = open_reader(path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        except ImportError as error:
            raise ConfigError(f"{path}: reading GGUF files needs: pip install 'mini-infer[gguf]'") from error
        except OSError as error:
            raise ConfigError(f"cannot open {path}: {error.strerror or error}") from error
        except Exception as error:  # the reader checks little: a broken file fails wherever it does not fit
            raise ConfigError(f"{path} is no whole GGUF file (broken or cut short): {error}") from error
        self._fields = reader.fields
        self.tensor_names = tuple(self._tensors)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family, such as ``llama``; it also prefixes the family's keys."""
        return str(self.require("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: int, float, bool, str or a list of them."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """As ``get``; a missing key is a ``ConfigError``."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path} has no metadata key '{key}'")
        return value

    def model_value(self, key: str, default: Any = None) -> Any:
        """The family's own value of ``key``, such as ``block_count``."""
        return self.get(f"{self.architecture}.{key}", default)

    def require_model_value(self, key: str) -> Any:
        """As ``model_value``; a missing key is a ``ConfigError``."""
        return self.require(f"{self.architecture}.{key}")

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, the slowest dimension first (llama.cpp lists the fastest first)."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's values [*shape] in float32, dequantised, in memory of their own."""
        import numpy as np
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except Exception as error:
            raise ConfigError(
                f"{self.path}: tensor {name} of type {tensor.tensor_type.name} cannot be dequantised: {error}"
            ) from error
        return np.array(values, dtype=np.float32, copy=True).reshape(self.shape(name))


def open_reader(path: Path) -> GGUFReader:
    """The reader of the ``gguf`` package, made quick; it keeps the file mapped."""
    import numpy as np
    from gguf import GGUFReader

    class QuickReader(GGUFReader):
        """Four times as fast on a vocabulary: each of its slices would otherwise be a new ``numpy.memmap``."""

        @property  # type: ignore[override]
        def data(self) -> npt.NDArray[np.uint8]:
            return self._data

        @data.setter
        def data(self, mapped: npt.NDArray[np.uint8]) -> None:
            self._data = mapped.view(np.ndarray)

    return QuickReader(path)
