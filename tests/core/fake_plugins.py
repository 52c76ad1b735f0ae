"""Distributions, plugin modules and stub answers for tests of the plugin manager, made on the spot."""

from pathlib import Path
from types import ModuleType
from typing import Any

from mini_infer.plugins import hookimpl


class FakeDistributions:
    """Installs distributions with plugins into a folder on ``sys.path``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self, distribution: str, plugins: dict[str, str], *, group: str = "mini_infer", metadata: str = ""
    ) -> None:
        """Adds a distribution, version 1.2, whose plugins are given as name → module source."""
        info = self.folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n{metadata}")
        points = [f"[{group}]"]
        for name, source in plugins.items():
            module = f"{distribution}_{name}".replace("-", "_")
            self.folder.joinpath(f"{module}.py").write_text(source)
            points.append(f"{name} = {module}")
        info.joinpath("entry_points.txt").write_text("\n".join(points))


def plugin(name: str, **attributes: Any) -> ModuleType:
    """A plugin module in memory."""
    module = ModuleType(name.replace("-", "_"))
    vars(module).update(name=name, api_version=0, **attributes)
    return module


def answering(hook: str, answer: Any) -> ModuleType:
    """A plugin whose hook gives that answer."""

    def implementation(context: Any) -> Any:
        return answer

    return plugin(hook.replace("_", "-"), implementation=hookimpl(specname=hook)(implementation))


def stub(interface: type) -> Any:
    """A subclass of an interface whose abstract methods are there and do nothing."""
    methods = {name: lambda *_args, **_named: None for name in interface.__abstractmethods__}  # type: ignore[attr-defined]
    return type(f"Stub{interface.__name__}", (interface,), {"name": "stub", **methods})
