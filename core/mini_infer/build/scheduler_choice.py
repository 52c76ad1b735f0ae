"""Which scheduler runs: a plugin's whole one, or an order, a victim and a chunk policy put together.

Contract: ``engine.order``, ``engine.victim`` and ``engine.chunks`` name a policy that the core or an enabled plugin
offers; "auto" takes the first plugin's, in the order of ``plugins``, and the core's reference where none offers one.
Every policy that is offered and not used is named with the reason.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mini_infer.choices import Choice
from mini_infer.errors import ConfigError, PluginError
from mini_infer.interfaces.scheduler import ChunkPolicy, OrderPolicy, Scheduler, SchedulingPolicy, VictimPolicy
from mini_infer.reference.scheduler import ArrivalOrder, ComposedScheduler, LastArrived, WholePrompts
from mini_infer.reference.victims import LeastProgress, LongestRemaining
from mini_infer.suggestions import did_you_mean

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.plugin_system.manager import PluginManager
    from mini_infer.settings.schema import EngineSettings


def choose_scheduler(manager: "PluginManager", context: "BuildContext") -> tuple[Scheduler, list[Choice]]:
    """The engine's scheduler, and what was chosen for it.

    Raises:
        ConfigError: a setting names no policy on offer, or one beside a plugin that brings a whole scheduler.
        PluginError: a plugin failed, or offers a policy without a name or with another's.
    """
    engine, offered = context.settings.engine, manager.many("scheduling_policies", context)
    order, order_choice = _choose(OrderPolicy, "order", engine, [*offered, ArrivalOrder()], ArrivalOrder.name)
    victims = [*offered, LastArrived(), LongestRemaining(), LeastProgress()]
    victim, victim_choice = _choose(VictimPolicy, "victim", engine, victims, LastArrived.name)
    chunks, chunks_choice = _choose(ChunkPolicy, "chunks", engine, [*offered, WholePrompts()], WholePrompts.name)
    scheduler: Scheduler = manager.one("scheduler", context, lambda: ComposedScheduler(order, victim, chunks))
    whole = manager.answered["scheduler"]
    if whole == "core":
        return scheduler, [choice for choice in (order_choice, victim_choice, chunks_choice) if choice]
    for key in ("order", "victim", "chunks"):
        if getattr(engine, key) != "auto":
            raise ConfigError(f"engine.{key} has no effect: plugin '{whole}' brings a whole scheduler")
    unused = tuple((policy.name, f"'{whole}' replaces order, victim and chunks") for policy in offered)
    return scheduler, [Choice("scheduler", whole, "a plugin that brings a whole scheduler", unused)]


def _choose(
    kind: type[Any], key: str, engine: "EngineSettings", policies: Sequence[SchedulingPolicy], reference: str
) -> tuple[Any, Choice | None]:
    """The policy of one kind that ``engine.<key>`` asks for; a ``Choice`` where that is "auto"."""
    by_name: dict[str, SchedulingPolicy] = {}
    for policy in policies:
        if not isinstance(policy, kind):
            continue
        if not policy.name or policy.name in by_name or policy.name == "auto":
            raise PluginError(f"{type(policy).__name__} needs a name of its own for engine.{key}, not {policy.name!r}")
        by_name[policy.name] = policy
    wanted = getattr(engine, key)
    if wanted != "auto":
        if wanted not in by_name:
            hint = did_you_mean(wanted, by_name) or f"; there are {', '.join(by_name)}"
            raise ConfigError(f"engine.{key}: no enabled plugin offers '{wanted}'{hint}")
        return by_name[wanted], None
    names = list(by_name)
    offered = names[: names.index(reference)]
    chosen = offered[0] if offered else reference
    reason = "first that an enabled plugin offers" if offered else "no enabled plugin offers another"
    why_not = {name: f"{chosen} comes first in the order of plugins" for name in offered}
    rejected = tuple((name, why_not.get(name, "used where it is named")) for name in names if name != chosen)
    return by_name[chosen], Choice(f"engine.{key}", chosen, reason, rejected)
