"""Resolves the setting ``plugins``, loads what is enabled, and asks the hooks while an engine is built.

Contract: one manager per engine and nothing global, so engines with different plugins live in one process. Only
enabled plugins are imported, plus model families and weight loaders when a model asks for one and none is named.
What is enabled works or the engine does not start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mini_infer.build_context import BuildContext
from mini_infer.errors import ConfigError, PluginError, PluginNotFoundError
from mini_infer.plugin_system.contract import Plugin, check_relations, load_plugin
from mini_infer.plugin_system.hooks import PluginHooks
from mini_infer.plugin_system.index import PluginIndex, discover
from mini_infer.plugin_system.sets import PLUGIN_SETS
from mini_infer.suggestions import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pydantic import BaseModel

    from mini_infer.interfaces import ModelAdapter, WeightLoader
    from mini_infer.settings import Settings


@dataclass(frozen=True, slots=True)
class Resolution:
    """Which plugins the settings enable on a device.

    Attributes:
        enabled: names in hook order, each with why it is enabled.
        left_out: names that the settings would enable but for ``without``, each with what left it out.
    """

    enabled: dict[str, str]
    left_out: dict[str, str]


def resolve(settings: Settings, device: str, index: PluginIndex) -> Resolution:
    """Turns the settings ``plugins`` and ``without`` into plugin names; imports nothing.

    Raises:
        PluginNotFoundError: a name is neither a plugin nor a set, or a set has nothing for the device; one line each.
    """
    problems: list[str] = []

    def members(entry: str, key: str) -> tuple[str, ...]:
        return _members(entry, device, index, problems.append, f"{settings.source_of(key)}: {key}")

    out = {name: entry for entry in settings.without for name in members(entry, "without")}
    enabled: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for entry in settings.plugins:
        for name in members(entry, "plugins"):
            why = f"named in plugins ({settings.source_of('plugins')})" if entry == name else f"in the set '{entry}'"
            if name in out:
                left_out[name] = f"left out by without = ['{out[name]}'] ({settings.source_of('without')})"
            else:
                enabled.setdefault(name, why)
    if problems:
        raise PluginNotFoundError("\n".join(problems))
    return Resolution(enabled, left_out)


class PluginManager:
    """The plugins of one engine.

    Attributes:
        index: all plugins there are.
        resolution: which are enabled, and why.
        plugins: the loaded ones in hook order.
        plugin_settings: the checked ``Settings`` of each loaded plugin that has one, by plugin name.
        answered: for each hook of one answer asked so far, the plugin that answered, or "core".
        notes: what a user may want to know and no error is, for the log of the start.
    """

    def __init__(self, settings: Settings, *, device: str, modules: Iterable[Any] = ()) -> None:
        """Loads and checks all enabled plugins.

        Args:
            settings: the engine's.
            device: the device resolved, such as ``"cuda:0"``.
            modules: plugins that the caller holds already, which settings name like any other.

        Raises:
            PluginError: a plugin is unknown, broken, in conflict, or lacks what it requires.
            ConfigError: a table ``[plugin.<name>]`` is wrong.
        """
        self.settings = settings
        self.device = device
        self.index = discover(settings.plugin_dirs, modules)
        self.resolution = resolve(settings, device, self.index)
        self.plugins = [load_plugin(self.index.get(name)) for name in self.resolution.enabled]
        check_relations(self.plugins)
        self.answered: dict[str, str] = {}
        self.notes: list[str] = [f"plugin '{name}' is {why}" for name, why in self.resolution.left_out.items()]
        self.plugin_settings: dict[str, BaseModel] = {}
        self._check_tables()
        self._hooks = PluginHooks(self.plugins)
        self._models: PluginHooks | None = None

    def context(self, *, dtype: str, log: Callable[[str], None]) -> BuildContext:
        """Returns the argument for all hooks of this engine."""
        return BuildContext(self.settings, self.device, dtype, log, self.plugin_settings)

    def one(self, hook: str, context: BuildContext, default: Callable[[], Any]) -> Any:
        """Returns the answer to a hook of one answer; ``default`` makes the core's reference where no plugin answers.

        Raises:
            PluginConflictError: two plugins answered.
            PluginLoadError: a plugin failed, or answered with the wrong type.
        """
        answer, self.answered[hook] = self._hooks.one(hook, context, default)
        return answer

    def many(self, hook: str, context: BuildContext) -> list[Any]:
        """Returns all answers to a list hook, in the order of the setting ``plugins``.

        Raises:
            PluginLoadError: a plugin failed, or answered with the wrong type.
        """
        return self._hooks.many(hook, context)

    def model_adapters(self, context: BuildContext) -> Sequence[ModelAdapter]:
        """Returns the model families of the enabled plugins, or, where none of those brings one, of all installed."""
        return self.many("model_adapters", context) or self.models(context).many("model_adapters", context)

    def weight_loaders(self, context: BuildContext) -> Sequence[WeightLoader]:
        """Returns the weight loaders of the enabled plugins, or, where none of those brings one, of all installed."""
        return self.many("weight_loaders", context) or self.models(context).many("weight_loaders", context)

    def models(self, context: BuildContext) -> PluginHooks:
        """Loads, once, all installed model families and weight loaders that are not named.

        One that is broken is passed over with a line in the log, for nobody asked for it.
        """
        if self._models is None:
            loaded = []
            for name in self.index.model_names():
                if name in self.resolution.enabled or name in self.settings.without:
                    continue
                try:
                    plugin = load_plugin(self.index.get(name))
                    self._read_table(plugin)
                except PluginError as e:
                    context.log(f"passed over: {e}")
                else:
                    loaded.append(plugin)
            self._models = PluginHooks(loaded)
        return self._models

    def _check_tables(self) -> None:
        """Validates each enabled plugin's table, and that every table belongs to a plugin there is."""
        problems: list[str] = []
        for name in self.settings.plugin:
            source = self.settings.source_of(f"plugin.{name}")
            if name not in self.index:
                problems.append(f"{source}: unknown key 'plugin.{name}'{did_you_mean(name, self.index.names())}")
            elif name not in self.resolution.enabled and name not in self.index.model_names():
                self.notes.append(f"{source}: the table 'plugin.{name}' has no effect: that plugin is not enabled")
        for plugin in self.plugins:
            try:
                self._read_table(plugin)
            except ConfigError as e:
                problems.append(str(e))
        if problems:
            raise ConfigError("\n".join(problems))

    def _read_table(self, plugin: Plugin) -> None:
        from pydantic import ValidationError

        from mini_infer.settings.errors import error_lines
        from mini_infer.settings.sources import read_texts

        key = f"plugin.{plugin.name}"
        table = self.settings.plugin.get(plugin.name, {})
        if plugin.settings_model is None:
            if table:
                raise ConfigError(f"{self.settings.source_of(key)}: {plugin.source} has no settings")
            return
        values = read_texts(table, plugin.settings_model, key, self.settings.sources)
        try:
            self.plugin_settings[plugin.name] = plugin.settings_model(**values)
        except ValidationError as e:
            lines = error_lines(e, plugin.settings_model, self.settings.sources, key)
            raise ConfigError("\n".join(lines)) from e


def _members(
    entry: str, device: str, index: PluginIndex, complain: Callable[[str], None], where: str
) -> tuple[str, ...]:
    """The plugin names that one entry of ``plugins`` or ``without`` stands for."""
    if entry in index:
        return (entry,)
    if entry not in PLUGIN_SETS:
        hint = did_you_mean(entry, [*index.names(), *PLUGIN_SETS])
        complain(f"{where}: no plugin '{entry}' is installed{hint}")
        return ()
    members = PLUGIN_SETS[entry].members.get(device.partition(":")[0], ())
    if not members and entry != "default":
        complain(f"{where}: the set '{entry}' has no plugin for {device}")
    return members
