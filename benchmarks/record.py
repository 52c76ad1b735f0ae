"""What every result says of where it came from: commit, versions, hardware."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = ("mini-infer", "torch", "transformers", "triton", "vllm", "numpy")


def provenance() -> dict[str, Any]:
    """Commit, versions of packages, processor or card.

    The commit has a ``+`` if the tree is changed; where there is no repository it is ``MINI_INFER_COMMIT``.
    """
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "hardware": _hardware(),
    }


def _commit() -> str:
    root = Path(__file__).parent.parent
    if given := os.environ.get("MINI_INFER_COMMIT"):
        return given

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


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
    return info
