"""Builds a plugin's C++ file once a machine, beside the start, and loads it with ctypes.

Contract: ``start`` never waits for a compiler. A library that was built before is loaded at once; otherwise a thread
compiles it while the engine starts, and who wants it takes the plain path until ``library`` is there. What happened is
never silent: ``status`` says it in words, and ``log`` gets a line. Nothing half written is ever loaded: the compiler
writes a file of its own, which is renamed when it is whole.

    $XDG_CACHE_HOME/mini-infer/native/<name>-<hash of sources, flags, compiler's version, CPU's features>.so

The file is compiled for this very CPU (``-march=native``), hence the features in the key. OpenMP is torch's own copy:
two of them in one process would fight over the cores.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from mini_infer.errors import ConfigError
from mini_infer.model.cache import cache_root

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
_MINUTES = 5  # after which a compiler is given up
_BUILD_FOLDER = ".build-"


class NativeBuild:
    """One C++ file as a library.

    Args:
        name: the library's file name starts with it.
        source: the file to compile; its functions are ``extern "C"``.
        headers: what it includes from beside it or from elsewhere in the package; part of the key.
        prepare: declares the functions' types on the loaded library before anyone sees it.
    """

    def __init__(
        self,
        name: str,
        source: Path,
        headers: Sequence[Path] = (),
        prepare: Callable[[ctypes.CDLL], None] = lambda library: None,
    ) -> None:
        self.name = name
        self.source = source
        self.headers = tuple(headers)
        self.library: ctypes.CDLL | None = None
        self.status = "not started"
        self.failed = False
        self._prepare = prepare
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, log: Callable[[str], None] = lambda line: None) -> None:
        """Load the library if it was built before, else build it in the background. Later calls do nothing."""
        with self._lock:
            if self.status == "not started":
                self._start(log)

    def _start(self, log: Callable[[str], None]) -> None:
        try:
            compiler = _compiler()
            target = _cache_folder() / f"{self.name}-{self._key(compiler)}.so"
            if target.exists():
                self._load(target, "built before")
            else:
                self.status = f"being built in the background with {compiler}; plain PyTorch until then"
                self._thread = threading.Thread(target=self._build, args=(compiler, target, log), daemon=True)
        except (OSError, RuntimeError, ConfigError, subprocess.SubprocessError) as e:
            self._fail(e)
        log(f"{self.name}: {self.status}")
        if self._thread is not None:
            self._thread.start()

    def wait(self) -> None:
        """Return when the library is there or has failed."""
        if self._thread is not None:
            self._thread.join()

    def _build(self, compiler: str, target: Path, log: Callable[[str], None]) -> None:
        try:
            _remove_abandoned(target.parent)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=_BUILD_FOLDER) as folder:
                built = Path(folder) / "library.so"
                note = self._compile(compiler, built)
                built.replace(target)
            self._load(target, f"built with {compiler}{note}")
        except (OSError, RuntimeError, subprocess.SubprocessError) as e:
            self._fail(e)
        log(f"{self.name}: {self.status}")

    def _compile(self, compiler: str, built: Path) -> str:
        """Compile with OpenMP, or else for one thread; returns what to add to the status."""
        include = {f"-I{header.parent}" for header in self.headers}
        polite = ["nice"] if shutil.which("nice") else []  # the start comes first
        command = [*polite, compiler, *_FLAGS, _native_flag(), *sorted(include), str(self.source), "-o", str(built)]
        openmp = _torch_openmp()
        attempts: list[tuple[list[str], str]] = [([], ", for one thread: no OpenMP that torch uses was found")]
        if openmp is not None:
            # By path, and first: the loader finds that name in the process already, torch's own copy.
            attempts.insert(0, (["-fopenmp", str(openmp)], ""))
        error = ""
        for extra, note in attempts:
            done = subprocess.run([*command, *extra], capture_output=True, text=True, timeout=60 * _MINUTES)
            if done.returncode == 0:
                return note
            error = error or done.stderr.strip()
        raise RuntimeError(f"{compiler} failed: {error.splitlines()[0] if error else 'no message'}")

    def _load(self, target: Path, how: str) -> None:
        _expect_private(target)
        library = ctypes.CDLL(str(target))
        self._prepare(library)
        self.status = f"native kernels ({how})"
        self.library = library

    def _fail(self, error: Exception) -> None:
        self.failed = True
        self.status = f"no native kernels, plain PyTorch instead: {error}"

    def _key(self, compiler: str) -> str:
        digest = hashlib.sha256()
        for file in (self.source, *self.headers):
            digest.update(file.read_bytes())
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
        for part in (*_FLAGS, _native_flag(), str(_torch_openmp()), version, _cpu_features()):
            digest.update(part.encode() + b"\0")
        return digest.hexdigest()[:24]


@cache
def multiplies_bfloat16() -> bool:
    """Whether the CPU has units for bfloat16 products (AMX, AVX-512 BF16, Arm's BF16), which PyTorch uses."""
    return bool(set(_cpu_features().split()) & {"amx_bf16", "avx512_bf16", "bf16"})


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if shutil.which(name):
            return name
    raise RuntimeError("no C++ compiler was found (install g++, or set CXX)")


def _native_flag() -> str:
    return "-mcpu=native" if platform.machine().lower() in {"aarch64", "arm64"} else "-march=native"


def _cpu_features() -> str:
    """What ``-march=native`` depends on, in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    told = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(told)})) or f"{platform.uname()}"


def _torch_openmp() -> Path | None:
    """The OpenMP runtime that torch brought, if it brought one."""
    import torch

    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return found[0] if found else None


def _cache_folder() -> Path:
    folder = cache_root() / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _expect_private(folder)
    return folder


def _remove_abandoned(folder: Path) -> None:
    """Build folders of processes that ended before their compiler did."""
    for found in folder.glob(f"{_BUILD_FOLDER}*"):
        if time.time() - found.stat().st_mtime > 60 * _MINUTES:
            shutil.rmtree(found, ignore_errors=True)


def _expect_private(path: Path) -> None:
    """What lies there is run: nobody else may have written it."""
    found = path.stat()
    if hasattr(os, "getuid") and (found.st_uid not in (os.getuid(), 0) or found.st_mode & stat.S_IWOTH):
        raise RuntimeError(f"{path} belongs to somebody else or can be written by everybody: remove it")
