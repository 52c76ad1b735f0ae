"""A GGUF file into a plain Hugging Face folder, once.

Contract: the folder appears whole or not at all, and holds config.json, generation_config.json, tokenizer.json,
tokenizer_config.json (with the chat template) and model.safetensors, which transformers and this engine load alike.
The weights are those of ``gguf.dequantize``, rounded once to the dtype asked for.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError
from mini_infer_models.gguf.hf_config import ARCHITECTURES, generation_config, model_config
from mini_infer_models.gguf.hf_tokenizer import build_tokenizer, tokenizer_config
from mini_infer_models.gguf.hf_weights import hf_tensors
from mini_infer_models.gguf.reader import GGUFFile

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = ("float32", "bfloat16")
WEIGHTS = "model.safetensors"
FORMAT_VERSION = 1
"""Of the folder's content; raised when the same file would be converted otherwise."""


def convert_gguf(path: Path, out_dir: Path, family: str | None = None, dtype: str = "float32") -> Path:
    """Write the folder, unless it is there already.

    Args:
        path: the GGUF file.
        out_dir: the folder to make. It is written beside itself and renamed: of two processes that convert at once,
            both succeed and one result is kept.
        family: ``llama`` or ``qwen2``; None for the file's own. A Llama file makes a valid ``qwen2`` folder, with QKV
            biases of zero and the same logits.
        dtype: ``float32`` or ``bfloat16``.

    Returns:
        ``out_dir``.

    Raises:
        ConfigError: the file is broken or of an unsupported kind, the family does not suit it, or the folder cannot
            be written.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not '{dtype}'")
    if _is_whole(out_dir):
        return out_dir
    file = GGUFFile(path)
    family = _family(file, family)
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    except OSError as error:
        raise ConfigError(f"cannot write {out_dir}: {error.strerror or error}") from error
    try:
        _write(file, building, family, dtype)
        building.rename(out_dir)
    except OSError as error:
        if not _is_whole(out_dir):  # else another process was faster
            raise ConfigError(f"cannot write {out_dir}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return out_dir


def _is_whole(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def _family(file: GGUFFile, family: str | None) -> str:
    own = file.architecture
    if own not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{file.path}: the architecture '{own}' is not supported (supported: {known})")
    if family is None or family == own:
        return own
    if (own, family) != ("llama", "qwen2"):
        raise ConfigError(f"{file.path} is a {own} model and cannot become '{family}'")
    return family


def _write(file: GGUFFile, folder: Path, family: str, dtype: str) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    config = model_config(file, family, dtype)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(file))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file))
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    tensors = dict(hf_tensors(file, config, getattr(torch, dtype)))
    try:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # such as a full disk
        raise OSError(str(error)) from error
    folder.chmod(0o755)  # temporary folders and safetensors are for their owner only, model folders are for all
    (folder / WEIGHTS).chmod(0o644)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
