"""Order, victim and chunks by settings: who is chosen, what is said, what is refused; the core's victim policies."""

from typing import Any

import pytest
from tests.core.fake_plugins import plugin

from mini_infer.errors import ConfigError, PluginError
from mini_infer.interfaces import VictimPolicy
from mini_infer.plugins import hookimpl
from mini_infer.reference.scheduler import (
    ArrivalOrder,
    ComposedScheduler,
    LastArrived,
    WholePrompts,
    first_come_first_served,
)
from mini_infer.reference.victims import LeastProgress, LongestRemaining
from mini_infer.testing import make_engine
from mini_infer.testing.contracts import scheduler_suite
from mini_infer.testing.contracts.scheduler import FakeRequest

TestLongestRemaining = scheduler_suite(lambda: ComposedScheduler(ArrivalOrder(), LongestRemaining(), WholePrompts()))
TestLeastProgress = scheduler_suite(lambda: ComposedScheduler(ArrivalOrder(), LeastProgress(), WholePrompts()))


class Backwards(ArrivalOrder):
    name = "backwards"


class Sideways(ArrivalOrder):
    name = "sideways"


def offering(name: str, *policies: Any) -> Any:
    return plugin(name, implementation=hookimpl(specname="scheduling_policies")(lambda context: list(policies)))


def whole(name: str) -> Any:
    implementation = hookimpl(specname="scheduler")(lambda context: first_come_first_served())
    return plugin(name, implementation=implementation)


def choices(*plugins: Any, **engine: Any) -> dict[str, Any]:
    return {choice.name: choice for choice in make_engine("toy", plugins=plugins, **engine).choices}


def test_auto_takes_the_first_offered_and_names_the_others() -> None:
    order = choices(offering("a", Backwards()), offering("b", Sideways()))["engine.order"]
    assert order.chosen == "backwards"
    assert dict(order.rejected) == {
        "sideways": "backwards comes first in the order of plugins",
        "arrival": "used where it is named",
    }


def test_with_no_plugin_it_is_the_core_s() -> None:
    made = choices()
    assert [made[f"engine.{key}"].chosen for key in ("order", "victim", "chunks")] == [
        ArrivalOrder.name,
        LastArrived.name,
        WholePrompts.name,
    ]


def test_a_named_policy_is_used_and_is_no_choice() -> None:
    built = make_engine(
        "toy", plugins=[offering("a", Backwards(), Sideways())], order="sideways", victim="least-progress"
    )
    scheduler = built.engine._planner.scheduler
    assert isinstance(scheduler, ComposedScheduler)
    assert isinstance(scheduler._order, Sideways) and isinstance(scheduler._victim, LeastProgress)
    assert not {"engine.order", "engine.victim"} & {choice.name for choice in built.choices}


def test_a_whole_scheduler_replaces_all_and_says_so() -> None:
    (choice,) = [each for name, each in choices(offering("a", Backwards()), whole("b")).items() if name == "scheduler"]
    assert choice.chosen == "b" and choice.rejected == (("backwards", "'b' replaces order, victim and chunks"),)
    with pytest.raises(ConfigError, match=r"engine.order has no effect: plugin 'b' brings a whole scheduler"):
        choices(offering("a", Backwards()), whole("b"), order="backwards")


def test_what_is_not_on_offer_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"engine.victim: no enabled plugin offers 'last-arived'; did you mean 'last-"
    ):
        choices(victim="last-arived")
    with pytest.raises(PluginError, match=r"ArrivalOrder needs a name of its own for engine.order, not 'arrival'"):
        choices(offering("a", ArrivalOrder()))


def fake(name: str, arrival: float, to_come: int, computed: int, preemptions: int = 0) -> FakeRequest:
    made = FakeRequest(name, arrival, 10, to_come, 0, None, None, running=computed > 0, num_computed=computed)
    made.num_preemptions = preemptions
    return made


@pytest.mark.parametrize(
    ("policy", "victim"), [(LastArrived(), "late"), (LongestRemaining(), "long"), (LeastProgress(), "fresh")]
)
def test_who_yields(policy: VictimPolicy, victim: str) -> None:
    asker, long = fake("asker", 0.0, 5, 9), fake("long", 1.0, 50, 8)
    fresh, late = fake("fresh", 2.0, 6, 1), fake("late", 3.0, 7, 7)
    often = fake("often", 2.5, 90, 6, LongestRemaining.MOST_PREEMPTIONS)
    assert policy.victim(asker, [asker, long, often, fresh, late]).request_id == victim
