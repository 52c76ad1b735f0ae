"""The core stands alone: its tests run while the other three packages cannot be imported."""

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from tests.core.fake_plugins import FakeDistributions

OTHERS = ("mini_infer_plugins", "mini_infer_models", "mini_infer_server")


class Refuser:
    """A finder that refuses the packages around the core."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"tests/core runs without '{name}'", name=name)
        return None


@pytest.fixture(autouse=True)
def core_only() -> Iterator[None]:
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in OTHERS}
    refuser = Refuser()
    sys.meta_path.insert(0, refuser)
    yield
    sys.meta_path.remove(refuser)
    sys.modules.update(hidden)


@pytest.fixture
def distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDistributions]:
    """Distributions with plugins, gone again after the test."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield FakeDistributions(folder)
    for name in set(sys.modules) - before:
        if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
