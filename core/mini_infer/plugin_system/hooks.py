"""Calls the hooks of a fixed list of plugins through pluggy and checks every answer.

Contract: answers come in the order of the plugins given; an answer of the wrong type, an exception in a hook and two
answers to a hook of one answer are ``PluginError``s that name the plugin. Wrappers see what the others answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from mini_infer import hookspecs, interfaces
from mini_infer.errors import MiniInferError, PluginConflictError, PluginLoadError, in_one_line
from mini_infer.plugin_system.contract import refusal
from mini_infer.suggestions import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mini_infer.build_context import BuildContext
    from mini_infer.plugin_system.contract import Plugin
    from mini_infer.plugin_system.index import PluginSource

_ANSWERS: dict[str, tuple[type, ...]] = {
    "scheduler": (interfaces.Scheduler,),
    "cache_policy": (interfaces.CachePolicy,),
    "sampler": (interfaces.Sampler,),
    "executor": (interfaces.Executor,),
    "step_runner": (interfaces.StepRunner,),
    "proposer": (interfaces.Proposer,),
    "model_adapters": (interfaces.ModelAdapter,),
    "weight_loaders": (interfaces.WeightLoader,),
    "attention_backends": (interfaces.AttentionBackend,),
    "scheduling_policies": (interfaces.OrderPolicy, interfaces.VictimPolicy, interfaces.ChunkPolicy),
    "logits_processors": (interfaces.LogitsProcessor, interfaces.LateLogitsProcessor),
    "model_transforms": (interfaces.ModelTransform,),
    "extensions": (interfaces.Observer, interfaces.ServerExtension),
}


class PluginHooks:
    """The hooks of an engine's plugins."""

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        """Registers the plugins' hook implementations.

        Raises:
            PluginLoadError: an implementation has an unknown name or argument.
        """
        self._plugins = {plugin.name: plugin for plugin in plugins}
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        for plugin in reversed(plugins):  # pluggy calls the last registered first
            try:
                self._pluggy.register(plugin.module, name=plugin.name)
            except pluggy.PluginValidationError as e:
                raise refusal(plugin.source, str(e)) from e
        self._check_pending()

    def one(self, hook: str, context: BuildContext, default: Callable[[], Any]) -> tuple[Any, str]:
        """Returns the one answer, or what ``default`` makes, and the name of the plugin that gave it, or "core".

        Raises:
            PluginConflictError: two plugins answered.
            PluginLoadError: a plugin raised, or answered with something else than the hook's interface.
        """
        answers = [(plugin, answer) for plugin, answer in self._answers(hook, context) if answer is not None]
        if len(answers) > 1:
            both = " and ".join(str(plugin.source) for plugin, _ in answers)
            raise PluginConflictError(f"{both} each bring a {hook}, and there is exactly one: leave one of them out")
        for plugin, answer in answers:
            _check(hook, answer, plugin.source)
        answer, name = (answers[0][1], answers[0][0].name) if answers else (default(), "core")
        wrappers = self._wrappers(hook)
        if not wrappers:
            return answer, name
        wrapped = self._wrapped(hook, context, [answer], wrappers)
        if answer is not None or wrapped is not None:
            _check(hook, wrapped, wrappers[0].source)
        return wrapped, name

    def many(self, hook: str, context: BuildContext) -> list[Any]:
        """Returns all answers of a list hook, joined in the plugins' order.

        Raises:
            PluginLoadError: a plugin raised, or answered with something else than a sequence of the hook's interface.
        """
        answers = self._answers(hook, context)
        for plugin, answer in answers:
            _check_list(hook, answer, plugin.source)
        lists = [answer for _, answer in answers]
        wrappers = self._wrappers(hook)
        if wrappers:
            lists = self._wrapped(hook, context, lists, wrappers)
            for answer in lists if isinstance(lists, list | tuple) else [lists]:
                _check_list(hook, answer, wrappers[0].source)
        return [item for answer in lists for item in answer]

    def _answers(self, hook: str, context: BuildContext) -> list[tuple[Plugin, Any]]:
        """Calls each plain implementation by itself, so that an error and a conflict have a name."""
        answers = []
        for implementation in reversed(getattr(self._pluggy.hook, hook).get_hookimpls()):
            if implementation.wrapper or implementation.hookwrapper:
                continue
            plugin = self._plugins[implementation.plugin_name]
            try:
                answer = implementation.function(*[context for _ in implementation.argnames])
            except MiniInferError:
                raise
            except Exception as e:
                raise refusal(plugin.source, f"its hook '{hook}' failed: {type(e).__name__}: {e}") from e
            answers.append((plugin, answer))
        return answers

    def _wrappers(self, hook: str) -> list[Plugin]:
        """The plugins that wrap a hook, the outermost first."""
        implementations = reversed(getattr(self._pluggy.hook, hook).get_hookimpls())
        return [self._plugins[each.plugin_name] for each in implementations if each.wrapper or each.hookwrapper]

    def _wrapped(self, hook: str, context: BuildContext, answers: list[Any], wrappers: list[Plugin]) -> Any:
        """Runs the hook's wrappers around the answers, which stand in for their implementations."""
        others = [plugin.module for plugin in self._plugins.values() if plugin not in wrappers]
        stand_ins = [lambda answer=answer: answer for answer in reversed(answers)]
        try:
            return self._pluggy.subset_hook_caller(hook, others).call_extra(stand_ins, {"context": context})
        except MiniInferError:
            raise
        except Exception as e:
            names = ", ".join(plugin.name for plugin in wrappers)
            raise PluginLoadError(f"a wrapper of hook '{hook}' failed ({names}): {in_one_line(e)}") from e

    def _check_pending(self) -> None:
        for name, caller in vars(self._pluggy.hook).items():
            if name.startswith("_") or caller.has_spec():
                continue
            for implementation in caller.get_hookimpls():
                plugin = self._plugins[implementation.plugin_name]
                hint = did_you_mean(name, _ANSWERS)
                raise refusal(plugin.source, f"there is no hook '{name}'{hint}")


def _check_list(hook: str, answer: Any, source: PluginSource) -> None:
    if not isinstance(answer, list | tuple):
        raise refusal(source, f"its hook '{hook}' must return a list, not {answer!r}")
    for item in answer:
        _check(hook, item, source)


def _check(hook: str, answer: Any, source: PluginSource) -> None:
    expected = _ANSWERS[hook]
    if hook == "attention_backends":  # the one hook that answers with classes
        fits = isinstance(answer, type) and issubclass(answer, expected)
    else:
        fits = isinstance(answer, expected)
    if not fits:
        names = " or ".join(kind.__name__ for kind in expected)
        raise refusal(source, f"its hook '{hook}' must answer with {names}, not {answer!r}")
