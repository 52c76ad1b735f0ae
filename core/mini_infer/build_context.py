"""What a hook is told when the engine is built.

Contract: one context per engine; it holds everything that a hook may read or share, so hooks need no globals.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

from mini_infer.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import BaseModel

    from mini_infer.settings import Settings

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The one argument of every hook.

    Attributes:
        settings: the whole settings of this engine.
        device: the device resolved, such as ``"cpu"`` or ``"cuda:0"``; never ``"auto"``.
        dtype: the activations' type resolved, such as ``"float32"``; only for the hooks that find the model, which
            decides it, as set.
        log: writes one line to the log of the start.
        plugin_settings: the checked ``Settings`` of each enabled plugin, by plugin name.
        objects: what plugins share between their hooks; see ``shared``.
    """

    settings: Settings
    device: str
    dtype: str
    log: Callable[[str], None]
    plugin_settings: Mapping[str, BaseModel]
    objects: dict[str, Any] = field(default_factory=dict, repr=False)

    def shared(self, plugin: str, make: Callable[[], S]) -> S:
        """Returns the one object of this engine that several hooks of a plugin need; the first caller makes it."""
        if plugin not in self.objects:
            self.objects[plugin] = make()
        found: S = self.objects[plugin]
        return found

    @overload
    def settings_of(self, plugin: str) -> BaseModel: ...

    @overload
    def settings_of(self, plugin: str, model: type[S]) -> S: ...

    def settings_of(self, plugin: str, model: type[Any] | None = None) -> Any:
        """Returns the checked settings of one enabled plugin, usually the caller's own.

        Args:
            plugin: the plugin's name.
            model: the plugin's ``Settings`` class, for a type checker's sake.

        Raises:
            PluginError: no enabled plugin has that name and a ``Settings`` class.
        """
        if plugin not in self.plugin_settings:
            known = ", ".join(sorted(self.plugin_settings)) or "none"
            raise PluginError(f"no enabled plugin {plugin!r} has settings; those that have: {known}")
        found = self.plugin_settings[plugin]
        if model is not None and not isinstance(found, model):
            raise PluginError(f"the settings of plugin {plugin!r} are {type(found).__name__}, not {model.__name__}")
        return found
