"""What every result says of where it came from: commit, versions, hardware."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("mini-infer", "torch", "transformers", "triton", "vllm", "numpy")


def provenance() -> dict[str, Any]:
    """Commit, versions of packages, processor or card.

    The commit has a ``+`` if the tree is changed; where there is no repository (a copy of the tree on another machine)
    it is what ``MINI_INFER_COMMIT`` says.
    """
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "hardware": _hardware(),
    }


def _commit() -> str:
    head = _git("rev-parse", "--short", "HEAD")
    if head:
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    return os.environ.get("MINI_INFER_COMMIT", "unknown")


def _git(*arguments: str) -> str:
    """What git says of the tree that this file is in; nothing where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware() -> dict[str, Any]:
    info: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.machine()}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        values = {key.strip(): value.strip() for key, value in fields.items()}
        flags = values.get("flags", "").split()
        info["cpu"] = values.get("model name", "unknown")
        info["simd"] = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    import torch

    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name(0)
        info["cuda"] = torch.version.cuda
    return info
