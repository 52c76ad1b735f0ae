"""The native build: in the background, once, never half, and never silent."""

import ctypes
import shutil
import sys
import threading
from pathlib import Path

import pytest

from mini_infer.native_build import NativeBuild

SOURCE = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "mini-infer" / "native"


def build_of(folder: Path, source: str = SOURCE, answer: str = "42") -> NativeBuild:
    (folder / "answer.h").write_text(f"#define ANSWER {answer}\n")
    (folder / "answer.cpp").write_text(source)
    return NativeBuild("answer", folder / "answer.cpp", [folder / "answer.h"], declare)


def declare(library: ctypes.CDLL) -> None:
    library.answer.restype = ctypes.c_int


def finished(build: NativeBuild) -> NativeBuild:
    build.start()
    build.wait()
    return build


@needs_compiler
def test_it_is_built_once_and_found_again(tmp_path: Path, cache_folder: Path) -> None:
    first = finished(build_of(tmp_path))
    assert first.library is not None and first.library.answer() == 42
    assert first.status.startswith("native kernels (built with ")
    second = build_of(tmp_path)
    second.start()
    assert second.library is not None, "what was built before is there without waiting"
    assert second.status == "native kernels (built before)"
    assert [file.suffix for file in cache_folder.iterdir()] == [".so"], "nothing is left of the build"


@needs_compiler
def test_a_changed_header_is_another_library(tmp_path: Path, cache_folder: Path) -> None:
    finished(build_of(tmp_path))
    changed = finished(build_of(tmp_path, answer="43"))
    assert changed.library is not None and changed.library.answer() == 43
    assert len(list(cache_folder.iterdir())) == 2


@needs_compiler
def test_a_compiler_error_is_said(tmp_path: Path, cache_folder: Path) -> None:
    lines: list[str] = []
    build = build_of(tmp_path, source="#error no such luck\n")
    build.start(lines.append)
    build.wait()
    assert build.failed and build.library is None
    assert "no such luck" in build.status and "plain PyTorch instead" in build.status
    assert lines == [lines[0], f"answer: {build.status}"] and "being built in the background" in lines[0]
    assert not list(cache_folder.iterdir())


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    lines: list[str] = []
    build = build_of(tmp_path)
    build.start(lines.append)
    assert build.failed
    assert lines == [
        "answer: no native kernels, plain PyTorch instead: no C++ compiler was found (install g++, or set CXX)"
    ]


def slow_compiler(folder: Path, gate: Path) -> Path:
    """A compiler that waits until ``gate`` is there."""
    script = folder / "slow-compiler"
    script.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, sys, time\n"
        f"while '--version' not in sys.argv and not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
        "os.execvp('g++', ['g++', *sys.argv[1:]])\n"
    )
    script.chmod(0o755)
    return script


@needs_compiler
def test_the_start_does_not_wait_for_the_compiler(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("CXX", str(slow_compiler(tmp_path, gate)))
    build = build_of(tmp_path)
    build.start()
    assert build.library is None and not build.failed and "being built in the background" in build.status
    assert not list(cache_folder.glob("*.so")), "nothing half written has the final name"
    gate.touch()
    build.wait()
    assert build.library is not None and build.library.answer() == 42


@needs_compiler
def test_many_may_start_at_once(tmp_path: Path) -> None:
    build = build_of(tmp_path)
    others = [build_of(tmp_path) for _ in range(3)]
    threads = [threading.Thread(target=finished, args=(b,)) for b in (build, build, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(b.library is not None and b.library.answer() == 42 for b in (build, *others))


@needs_compiler
def test_a_library_that_everybody_may_write_is_not_loaded(tmp_path: Path, cache_folder: Path) -> None:
    finished(build_of(tmp_path))
    next(cache_folder.glob("*.so")).chmod(0o777)
    build = finished(build_of(tmp_path))
    assert build.failed and "can be written by everybody" in build.status


def test_a_cache_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    build = finished(build_of(tmp_path))
    assert build.failed and "plain PyTorch instead" in build.status


def test_no_home_is_said_and_a_relative_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path / "home")
    finished(build_of(tmp_path))
    assert not (tmp_path / "relative").exists()

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", homeless)
    build = finished(build_of(tmp_path))
    assert build.failed and "plain PyTorch instead: no home folder" in build.status
