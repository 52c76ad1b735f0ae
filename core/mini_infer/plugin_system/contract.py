"""The contract of a plugin module, checked when it is loaded and against the other enabled plugins.

Contract: every breach is an error that names the plugin, its distribution and version, and the reason; none is a
warning, for an engine that runs without a plugin that was asked for is a surprise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Any

from mini_infer.errors import PluginConflictError, PluginLoadError
from mini_infer.interfaces import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

    from mini_infer.plugin_system.index import PluginSource

# What the core's reference attention gives without any plugin.
CORE_PROVIDES = frozenset({"paged-kv", "multi-token-verify"})


@dataclass(frozen=True, slots=True)
class Plugin:
    """A loaded plugin, its attributes checked."""

    source: PluginSource
    module: Any
    settings_model: type[BaseModel] | None
    requires: tuple[str, ...]
    conflicts: tuple[str, ...]
    provides: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def is_called(self) -> frozenset[str]:
        """Its own name and all that it provides: what ``requires`` and ``conflicts`` of others speak of."""
        return frozenset({self.name, *self.provides})


def load_plugin(source: PluginSource) -> Plugin:
    """Imports a plugin and checks what it declares.

    Raises:
        PluginLoadError: it cannot be imported, lacks an extra, or breaks the contract.
    """
    try:
        module = source.load()
    except Exception as e:
        raise refusal(source, f"its import failed: {type(e).__name__}: {e}") from e
    if getattr(module, "name", None) != source.name:
        raise refusal(source, f"it calls itself {getattr(module, 'name', None)!r}; 'name' must be '{source.name}'")
    if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", source.name) is None:
        raise refusal(source, "a name is lower-case letters and digits with single dashes between")
    version = getattr(module, "api_version", None)
    if version != API_VERSION:
        raise refusal(source, f"it is written for api_version {version}; this engine has {API_VERSION}")
    extra = getattr(module, "extra", None)
    if extra is not None:
        _check_extra(source, extra)
    missing = getattr(module, "missing", None)
    lack = missing() if missing is not None else None
    if lack is not None:
        raise refusal(source, lack)
    return Plugin(
        source,
        module,
        _settings_model(source, module),
        requires=_words(source, module, "requires"),
        conflicts=_words(source, module, "conflicts"),
        provides=_words(source, module, "provides"),
    )


def check_relations(plugins: Sequence[Plugin]) -> None:
    """Checks ``requires`` and ``conflicts`` among all enabled plugins.

    Raises:
        PluginConflictError: one line for each breach.
    """
    lines = []
    for plugin in plugins:
        others = [other for other in plugins if other is not plugin]
        for wanted in plugin.requires:
            if wanted not in CORE_PROVIDES and not any(wanted in other.is_called for other in others):
                lines.append(f"{plugin.source} requires '{wanted}', which no enabled plugin is or provides")
        for other in others:
            for word in sorted(other.is_called.intersection(plugin.conflicts)):
                lines.append(f"{plugin.source} conflicts with {other.source} over '{word}': leave one of them out")
    if lines:
        raise PluginConflictError("\n".join(lines))


def refusal(source: PluginSource, reason: str) -> PluginLoadError:
    """Returns the error that says why a plugin cannot be used."""
    return PluginLoadError(f"{source} cannot be used: {' '.join(reason.split())}")


def _settings_model(source: PluginSource, module: Any) -> type[BaseModel] | None:
    from pydantic import BaseModel

    model = getattr(module, "Settings", None)
    if model is None:
        return None
    if not (isinstance(model, type) and issubclass(model, BaseModel)) or model.model_config.get("extra") != "forbid":
        raise refusal(source, "its 'Settings' must be a pydantic model with extra='forbid'")
    return model


def _words(source: PluginSource, module: Any, attribute: str) -> tuple[str, ...]:
    words = getattr(module, attribute, ())
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise refusal(source, f"its '{attribute}' must be a tuple of names, not {words!r}")
    return tuple(words)


def _check_extra(source: PluginSource, extra: str) -> None:
    """Refuses a plugin whose extra's distributions are not all installed, read from its distribution's metadata."""
    from packaging.requirements import Requirement

    missing = []
    for text in (source.installed.requires or []) if source.installed is not None else []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.marker.evaluate({"extra": extra}) and not _satisfied(requirement.name, requirement.specifier):
            missing.append(f"{requirement.name}{requirement.specifier}")
    if missing:
        what = f"it needs {', '.join(missing)}: pip install '{source.distribution}[{extra}]'"
        raise refusal(source, what)


def _satisfied(name: str, specifier: Any) -> bool:
    try:
        return bool(specifier.contains(distribution(name).version, prereleases=True))
    except PackageNotFoundError:
        return False
