"""Everything that can be decided without weights: what ``serve --dry-run`` and ``config explain`` show.

Contract: nothing here loads weights or reserves memory; each "auto" that is resolved leaves a ``Choice``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mini_infer.build.attention_choice import choose_backend
from mini_infer.build.device import expect_dtype, resolve_device
from mini_infer.build.scheduler_choice import choose_scheduler
from mini_infer.choices import Choice
from mini_infer.errors import ConfigError
from mini_infer.model.checkpoint import FoundCheckpoint, attention_layers, find_checkpoint
from mini_infer.plugin_system.manager import PluginManager
from mini_infer.reference.executor import InlineExecutor

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import AttentionBackend, Executor, KVCacheSpec, Proposer, Scheduler
    from mini_infer.settings import Settings


@dataclass(frozen=True, slots=True)
class Composition:
    """An engine on paper.

    Attributes:
        settings: as given.
        manager: the plugins.
        context: what every hook is told.
        found: the checkpoint.
        backends: the attention backend of each KV group.
        executor: not started.
        scheduler: a plugin's whole one, or three policies put together.
        overlap: whether the next step is launched before the last is read.
        choices: for each "auto" resolved so far.
        log: the start log so far.
    """

    settings: "Settings"
    manager: PluginManager
    context: "BuildContext"
    found: FoundCheckpoint
    backends: "dict[KVCacheSpec, type[AttentionBackend]]"
    executor: "Executor"
    scheduler: "Scheduler"
    overlap: bool
    choices: list[Choice]
    log: list[str]

    def check_lengths(self, proposer: "Proposer | None") -> None:
        """Refuse drafts accepted on the device beside a backend that reads lengths on the host.

        Raises:
            ConfigError: naming the backends.
        """
        names = ", ".join(b.name for b in self.backends.values() if b.capabilities.needs_host_lengths)
        if self.overlap and proposer is not None and names:
            raise ConfigError(f"engine.overlap with drafts leaves lengths on the device, which {names} cannot use")


def compose(settings: "Settings", modules: Sequence[Any] = ()) -> Composition:
    """Resolve device, plugins, checkpoint, attention and executor.

    Args:
        settings: resolved settings.
        modules: plugin modules that the caller holds already.

    Raises:
        ConfigError: settings and model do not fit together.
        PluginError: a plugin cannot be used.
    """
    log: list[str] = []
    if settings.engine.num_threads is not None:
        torch.set_num_threads(settings.engine.num_threads)
    device, choice = resolve_device(settings.engine.device)
    manager = PluginManager(settings, device=device, modules=modules)
    log += manager.notes
    found = find_checkpoint(settings, manager, manager.context(dtype=settings.engine.dtype, log=log.append))
    expect_dtype(found.dtype_name, device)
    context = manager.context(dtype=found.dtype_name, log=log.append)
    choices = [c for c in (choice, *found.choices) if c is not None]
    offered = manager.many("attention_backends", context)
    backends: dict[KVCacheSpec, type[AttentionBackend]] = {}
    for layer in attention_layers(found.on_paper()):
        if layer.spec not in backends:
            backends[layer.spec], choice = choose_backend(settings.engine.attention, offered, layer.spec, device)
            choices.append(choice)
    executor, overlap, choice = _choose_overlap(settings, manager, context)
    choices += [choice] if choice else []
    scheduler, scheduling = choose_scheduler(manager, context)
    choices += scheduling
    return Composition(settings, manager, context, found, backends, executor, scheduler, overlap, choices, log)


def _choose_overlap(
    settings: "Settings", manager: PluginManager, context: "BuildContext"
) -> "tuple[Executor, bool, Choice | None]":
    """The executor, whether two steps may be in flight, and why."""
    setting, on_cpu = settings.engine.overlap, context.device == "cpu"
    steps = 2 if setting is True or not on_cpu else 1
    executor: Executor = manager.one("executor", context, lambda: InlineExecutor(steps))
    overlap = executor.max_in_flight > 1 and setting is not False
    if setting is True and not overlap:
        raise ConfigError(f"engine.overlap: {type(executor).__name__} runs one step at a time; set it to false")
    if setting != "auto":
        return executor, overlap, None
    if overlap:
        reason = f"{type(executor).__name__} holds {executor.max_in_flight} steps in flight"
        return executor, True, Choice("engine.overlap", "true", reason, (("false", "the device would wait"),))
    reason = "host and device are the same CPU" if on_cpu else f"{type(executor).__name__} runs one step at a time"
    return executor, False, Choice("engine.overlap", "false", reason, (("true", "there is nothing to overlap"),))
