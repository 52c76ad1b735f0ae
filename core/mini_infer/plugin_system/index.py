"""What plugins there are: entry points, plain files, and modules that are already imported.

Contract: nothing of a plugin is imported before ``PluginSource.load``. One name may have several sources; that is an
error only for a name that is used.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError, PluginConflictError, PluginLoadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib.metadata import Distribution, EntryPoint

PLUGIN_GROUP = "mini_infer"
# Model families and weight loaders: found without being named, since the model asks for them.
MODEL_GROUP = "mini_infer.models"


@dataclass(frozen=True, slots=True)
class PluginSource:
    """Where one plugin comes from.

    Attributes:
        name: what settings call it.
        origin: module name or file, for people.
        is_model: a model family or weight loader that need not be named.
        found: the entry point, the file, or the module itself.
    """

    name: str
    origin: str
    is_model: bool
    found: EntryPoint | Path | Any

    @property
    def installed(self) -> Distribution | None:
        """The distribution that brings it, if one does."""
        return getattr(self.found, "dist", None) if not isinstance(self.found, Path) else None

    @property
    def distribution(self) -> str:
        """The distribution's name, or the file, or "in memory"."""
        if self.installed is not None:
            return str(self.installed.name)
        return self.origin if isinstance(self.found, Path) else "in memory"

    @property
    def version(self) -> str:
        """The distribution's version, or nothing."""
        return "" if self.installed is None else str(self.installed.version)

    def __str__(self) -> str:
        return f"plugin '{self.name}' ({' '.join(filter(None, [self.distribution, self.version]))})"

    def load(self) -> Any:
        """Imports and returns the plugin's module; whatever the import raises goes through."""
        if isinstance(self.found, Path):
            return _import_file(self.found)
        return self.found.load() if self.installed is not None else self.found


@dataclass(frozen=True, slots=True)
class PluginIndex:
    """All plugins that could be enabled, by name."""

    sources: Mapping[str, tuple[PluginSource, ...]]

    def __contains__(self, name: str) -> bool:
        return name in self.sources

    def names(self) -> list[str]:
        return sorted(self.sources)

    def model_names(self) -> list[str]:
        """Names of the model families and weight loaders that need not be named."""
        return [name for name in self.names() if self.sources[name][0].is_model]

    def get(self, name: str) -> PluginSource:
        """Returns the one source of a known name.

        Raises:
            PluginConflictError: several distributions or files bring it.
        """
        first, *others = self.sources[name]
        if others:
            places = ", ".join(f"{source.distribution} {source.version}".strip() for source in (first, *others))
            raise PluginConflictError(f"plugin '{name}' comes from several places ({places}): remove all but one")
        return first


def discover(plugin_dirs: Iterable[str], modules: Iterable[Any] = ()) -> PluginIndex:
    """Finds all plugins without importing any.

    Args:
        plugin_dirs: folders; each ``.py`` file in one that does not begin with ``_`` is a plugin of the file's name.
        modules: plugins that the caller holds already (tests, notebooks), each with a ``name``.

    Raises:
        ConfigError: a folder of ``plugin_dirs`` is missing.
        PluginLoadError: one of ``modules`` has no name.
    """
    sources = [
        PluginSource(point.name, point.module, group == MODEL_GROUP, point)
        for group in (PLUGIN_GROUP, MODEL_GROUP)
        for point in entry_points(group=group)
    ]
    for folder in map(Path, plugin_dirs):
        if not os.access(folder, os.R_OK | os.X_OK) or not folder.is_dir():
            raise ConfigError(f"plugin_dirs: there is no folder '{folder}' that can be read")
        for path in sorted(folder.glob("[!_]*.py")):
            sources.append(PluginSource(path.stem.replace("_", "-"), str(path), False, path))
    for module in modules:
        origin = getattr(module, "__name__", type(module).__name__)
        if not isinstance(getattr(module, "name", None), str):
            raise PluginLoadError(f"plugin '{origin}' (in memory) cannot be used: it has no 'name'")
        sources.append(PluginSource(module.name, origin, False, module))
    by_name: dict[str, tuple[PluginSource, ...]] = {}
    for source in sources:
        by_name[source.name] = (*by_name.get(source.name, ()), source)
    return PluginIndex(MappingProxyType(by_name))


def _import_file(path: Path) -> Any:
    """Runs a plugin file anew: each engine has its own module, and an edited file takes effect."""
    name = f"mini_infer_plugin_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look up annotations there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
