"""From the setting ``model`` to a ``ModelConfig``: where the checkpoint lies and what its config.json says.

Contract: config.json is read as plain JSON, transformers is not needed. All that can be wrong (no such folder, no such
model on the Hub, unreadable or incomplete config) is a ``ConfigError`` of one line that says what to do.
"""

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError
from mini_infer.interfaces.model import ModelConfig

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_METADATA = ("*.json", "*.jinja", "*.txt", "*.model")
_DTYPES = ("float32", "bfloat16", "float16")


def locate_model(model: str, *, revision: str | None = None, offline: bool = False, weights: bool = True) -> Path:
    """The local folder or file that the setting ``model`` names, fetched from the Hub if need be.

    Args:
        model: a folder, a .gguf file, or a Hub id such as ``Qwen/Qwen2.5-7B-Instruct``.
        revision: branch, tag or commit on the Hub.
        offline: take what an earlier download left, and ask no server.
        weights: False fetches config and tokenizer only.

    Raises:
        ConfigError: there is no such thing, or the Hub refuses.
    """
    try:
        path = Path(model).expanduser()
        if path.exists():
            if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return path
    except (OSError, RuntimeError) as error:  # no permission, too long a name, no such user
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"model folder {model:.200} cannot be read: {reason}") from error
    if model.endswith(".gguf"):
        raise ConfigError(f"model file {model} does not exist; check the path")
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise ConfigError(
            f"model folder {model} does not exist; give the folder that holds config.json, a .gguf file, "
            "or a Hub id such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    return _fetch(model, revision, offline, weights)


def _fetch(model: str, revision: str | None, offline: bool, weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            local_files_only=offline,
            allow_patterns=[*_METADATA, *(["*.safetensors"] if weights else [])],
            ignore_patterns=["*/*", "consolidated*"],
            etag_timeout=5,
        )
    except errors.GatedRepoError as error:
        raise ConfigError(f"model {model} is gated: accept its terms on the Hub, then `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"model {model} has no revision {revision}; set engine.revision to one that it has"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(f"model {model} is neither a folder here nor on the Hub; check the name") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        reason = "engine.offline is set" if offline else "the Hub cannot be reached"
        raise ConfigError(
            f"model {model}{at} is not on this machine and {reason}; download it or give a folder"
        ) from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(f"model {model}{at} cannot be fetched from the Hub: {_first_line(error)}") from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json's content, a nested ``text_config`` lifted to the top.

    Raises:
        ConfigError: there is none, or it is no JSON object.
    """
    file = folder / CONFIG
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is no model folder: it has no {CONFIG}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return flatten_hf_config(content)


def flatten_hf_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the keys of ``text_config``, where there is one, at the top; ``architectures`` stays the outer."""
    text = content.get("text_config")
    if not isinstance(text, Mapping):
        return dict(content)
    outer = {key: value for key, value in content.items() if key != "text_config"}
    return {**outer, **text, **({"architectures": outer["architectures"]} if "architectures" in outer else {})}


def make_model_config(
    hf: Mapping[str, Any], *, device: str, dtype: str = "auto", path: Path | None = None
) -> ModelConfig:
    """Resolve a checkpoint's description.

    Args:
        hf: config.json's content, flattened.
        device: torch device string.
        dtype: the setting ``engine.dtype``.
        path: where the checkpoint lies.

    Raises:
        ConfigError: a key is missing or its value wrong.
    """
    from mini_infer.layers.rope_scaling import scaled_max_position_embeddings

    vocab_size = hf.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"{CONFIG}: vocab_size must be a whole number above 0, not {vocab_size!r}")
    return ModelConfig(
        hf=hf,
        dtype=resolve_dtype(dtype, hf, device),
        device=device,
        max_position_embeddings=scaled_max_position_embeddings(hf),
        vocab_size=vocab_size,
        path=None if path is None else str(path),
    )


def resolve_dtype(dtype: str, hf: Mapping[str, Any], device: str) -> "torch.dtype":
    """The dtype of weights and activations.

    "auto" is float32 on a CPU, where it is the faster one for prompts, and else the checkpoint's own (bfloat16 if its
    config names none).

    Raises:
        ConfigError: it is none of float32, bfloat16, float16.
    """
    import torch

    name = dtype
    if dtype == "auto":
        own = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
        name = "float32" if device == "cpu" else str(own).removeprefix("torch.")
    if name not in _DTYPES:
        where = f"{CONFIG}: dtype" if dtype == "auto" else "engine.dtype"
        raise ConfigError(f"{where} {name!r} is not supported; set engine.dtype to one of {', '.join(_DTYPES)}")
    found: torch.dtype = getattr(torch, name)
    return found
