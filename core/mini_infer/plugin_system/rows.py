"""What ``mini-infer plugins`` tells of each plugin there is.

Contract: only enabled plugins are imported, and one that cannot be used is a row with its reason, not an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_infer.errors import PluginError
from mini_infer.plugin_system.contract import load_plugin
from mini_infer.plugin_system.index import discover
from mini_infer.plugin_system.manager import resolve

if TYPE_CHECKING:
    from mini_infer.plugin_system.index import PluginIndex
    from mini_infer.plugin_system.manager import Resolution
    from mini_infer.settings import Settings


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One plugin.

    Attributes:
        name: what settings call it.
        version: of its distribution; empty for a plain file.
        source: its distribution, or its file.
        provides: capabilities; empty unless enabled, for nobody else is asked.
        enabled: whether the settings enable it and it can be used.
        why: why it is enabled, or why not.
    """

    name: str
    version: str
    source: str
    provides: tuple[str, ...]
    enabled: bool
    why: str


def describe_plugins(settings: Settings, device: str) -> list[PluginRow]:
    """Returns a row for each plugin: the enabled ones in hook order, then the others by name.

    Raises:
        PluginNotFoundError: the settings name a plugin that is not there.
    """
    index = discover(settings.plugin_dirs)
    resolution = resolve(settings, device, index)
    others = [name for name in index.names() if name not in resolution.enabled]
    return [_row(name, index, resolution) for name in [*resolution.enabled, *others]]


def _row(name: str, index: PluginIndex, resolution: Resolution) -> PluginRow:
    first = index.sources[name][0]
    provides: tuple[str, ...] = ()
    enabled = name in resolution.enabled
    if enabled:
        why = resolution.enabled[name]
        try:
            provides = load_plugin(index.get(name)).provides
        except PluginError as e:
            enabled, why = False, str(e)
    elif name in resolution.left_out:
        why = resolution.left_out[name]
    elif first.is_model:
        why = "used when a model asks for it"
    else:
        why = "not named in plugins"
    return PluginRow(name, first.version, first.distribution, provides, enabled, why)
