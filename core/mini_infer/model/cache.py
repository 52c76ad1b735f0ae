"""Where converted models lie in the user's cache.

Contract: a folder's name follows from the source file's content, what was made of it and by which version of the
converter; so a folder that is there can be used as it is, and the same file elsewhere shares it.

    $XDG_CACHE_HOME or ~/.cache
    └── mini-infer/converted/
        └── SmolLM2-135M-Instruct.Q4_1-3f9c2b71d0aa/
            └── v1-llama-float32/
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from mini_infer.errors import ConfigError

_SAMPLE_BYTES = 2**20


def cache_root() -> Path:
    """The engine's own folder in the user's cache; it may not exist yet.

    Raises:
        ConfigError: the user has no home.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored (XDG Base Directory Specification 0.8).
    if given and Path(given).is_absolute():
        return Path(given) / "mini-infer"
    try:
        return Path.home() / ".cache" / "mini-infer"
    except RuntimeError as error:
        raise ConfigError("no home folder to keep a cache in: set HOME or XDG_CACHE_HOME") from error


def converted_folder(source: Path, variant: str, version: int) -> Path:
    """The place for what a converter makes of a file; it may not exist yet.

    Args:
        source: the file.
        variant: what is made of it, such as ``llama-float32``.
        version: of the converter's output; raise it when the same file would be converted otherwise.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        digest = _digest(source)
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror or error}") from error
    return cache_root() / "converted" / f"{source.stem}-{digest}" / f"v{version}-{variant}"


def _digest(path: Path) -> str:
    """Of size, start and end: metadata and the last weights. Reading all of a large model would take a minute."""
    size = path.stat().st_size
    content = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        content.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        content.update(file.read(_SAMPLE_BYTES))
    return content.hexdigest()[:12]
