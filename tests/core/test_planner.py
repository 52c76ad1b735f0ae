"""The core's half of scheduling: what a scheduler may wish, what shortage does, and that work never stands still."""

from collections.abc import Callable, Sequence

import pytest

from mini_infer.engine.kv_manager import KVManager
from mini_infer.engine.planner import Planner, RequestTable
from mini_infer.engine.request import Request, Status
from mini_infer.errors import PluginError
from mini_infer.interfaces import RequestView, SamplingParams, Schedule, Scheduler, SchedulerView, Wish
from mini_infer.messages import EngineRequest
from mini_infer.reference.cache_policy import FreeAtOnce
from mini_infer.reference.scheduler import first_come_first_served

BLOCK = 4


def make_request(name: str, num_prompt: int, arrival: float, max_tokens: int = 8) -> Request:
    spec = EngineRequest(
        request_id=name, prompt_token_ids=list(range(num_prompt)), params=SamplingParams(max_tokens=max_tokens)
    )
    return Request(spec, arrival=arrival, deadline=None, token_ids=list(spec.prompt_token_ids))


def make_planner(
    scheduler: Scheduler, prompts: Sequence[int], *, num_blocks: int = 16, budget: int = 32, max_num_seqs: int = 4
) -> Planner:
    table = RequestTable(free_slots=list(range(max_num_seqs - 1, -1, -1)))
    for index, num_prompt in enumerate(prompts):
        table.wait(make_request(f"r{index}", num_prompt, arrival=float(index)))
    return Planner(scheduler, KVManager(num_blocks, BLOCK, FreeAtOnce()), table, budget, max_num_seqs)


def read(planner: Planner, requests: Sequence[Request], step_id: int) -> None:
    """As the engine does once a step was read: each request that sampled has one more token."""
    for request in requests:
        launched = request.land()
        request.num_computed_tokens += launched.num_tokens
        if launched.samples:
            request.token_ids.append(7)
    planner.kv.launched_step = step_id
    planner.kv.complete(step_id)


class Scripted(Scheduler):
    """Wishes what a function says; the latest candidate yields."""

    def __init__(self, wishes: Callable[[SchedulerView], Sequence[Wish]], wake_at: float | None = None) -> None:
        self.wishes = wishes
        self.wake_at = wake_at

    def schedule(self, view: SchedulerView) -> Schedule:
        return Schedule(self.wishes(view), self.wake_at)

    def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
        return candidates[-1] if candidates else asker


BAD_WISHES: dict[str, tuple[Callable[[SchedulerView], list[Wish]], str]] = {
    "over budget": (lambda v: [Wish(v.waiting[0], 20), Wish(v.waiting[1], 20)], "over its budget"),
    "twice": (lambda v: [Wish(v.waiting[0], 1), Wish(v.waiting[0], 1)], "twice"),
    "nothing": (lambda v: [Wish(v.waiting[0], 0)], "wished 0 tokens"),
    "more than is to do": (lambda v: [Wish(v.waiting[0], 21)], "wished 21 tokens"),
    "drafts that nobody offered": (lambda v: [Wish(v.waiting[0], 20, 1)], "wished 1 drafts"),
    "a stranger": (lambda v: [Wish(make_request("stranger", 3, 0.0).view, 3)], "not on offer"),
    "too many requests": (lambda v: [Wish(r, 1) for r in v.waiting], "would run 5 requests"),
    "standing still": (lambda v: [], "with nothing under way"),
}


@pytest.mark.parametrize("wrong", BAD_WISHES)
def test_a_wish_against_the_rules_is_a_plugin_error(wrong: str) -> None:
    wishes, message = BAD_WISHES[wrong]
    planner = make_planner(Scripted(wishes), [20] * 5, num_blocks=64)
    with pytest.raises(PluginError, match=message):
        planner.plan(1, 0.0, 0)


def test_holding_work_back_needs_a_time_to_wake() -> None:
    planner = make_planner(Scripted(lambda v: [], wake_at=3.0), [5])
    assert planner.plan(1, 0.0, 0) is None
    assert planner.wake_at == 3.0


def test_a_victim_that_was_not_on_offer_is_a_plugin_error() -> None:
    class Confused(Scripted):
        def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
            return make_request("stranger", 3, 0.0).view

    planner = make_planner(Confused(lambda v: [Wish(r, r.num_tokens_to_do) for r in v.waiting]), [16, 16], num_blocks=4)
    with pytest.raises(PluginError, match="victim that was not on offer"):
        planner.plan(1, 0.0, 0)


def test_uniform_rows_come_first_and_plans_are_differences() -> None:
    planner = make_planner(first_come_first_served(), [6, 3])
    plan, requests = planner.plan(1, 0.0, 0) or pytest.fail("nothing planned")
    assert [(new.slot, len(new.token_ids)) for new in plan.new] == [(0, 6), (1, 3)]
    assert [grant.num_tokens for grant in plan.grants] == [6, 3]
    read(planner, requests, 1)
    planner.table.wait(make_request("late", 5, arrival=9.0))
    plan, requests = planner.plan(2, 0.0, 0) or pytest.fail("nothing planned")
    assert [(grant.slot, grant.num_tokens) for grant in plan.grants] == [(0, 1), (1, 1), (2, 5)]
    assert len(plan.new) == 1, "requests that the workers know are not sent again"
    assert [len(grant.new_block_ids) for grant in plan.grants] == [0, 0, 0], "a new row brings its blocks itself"


def test_a_prompt_longer_than_any_step_is_cut() -> None:
    planner = make_planner(first_come_first_served(), [20], budget=8)
    counts = []
    for step_id in (1, 2, 3):
        plan, requests = planner.plan(step_id, 0.0, 0) or pytest.fail("nothing planned")
        counts.append((plan.grants[0].num_tokens, plan.grants[0].samples))
        read(planner, requests, step_id)
    assert counts == [(8, False), (8, False), (4, True)]


def test_on_shortage_the_latest_yields_and_starts_over() -> None:
    planner = make_planner(first_come_first_served(), [8, 8], num_blocks=4)
    plan, (first, second) = planner.plan(1, 0.0, 0) or pytest.fail("nothing planned")
    read(planner, [first, second], 1)
    plan, requests = planner.plan(2, 0.0, 0) or pytest.fail("nothing planned")
    assert requests == [first] and planner.preempted == [second]
    assert second.status is Status.WAITING and second.num_computed_tokens == 0 and second.block_ids == []
    assert second.token_ids[-1] == 7, "its tokens stay"
    assert plan.released == [1]
    planner.kv.check_integrity([first, second])


def test_blocks_of_a_step_in_flight_are_waited_for_not_taken() -> None:
    """With a step unread, what a victim gives back retires; nobody else is preempted for the same shortage."""
    planner = make_planner(first_come_first_served(), [4, 4, 4], num_blocks=3, max_num_seqs=3)
    _, requests = planner.plan(1, 0.0, 0) or pytest.fail("nothing planned")
    planner.kv.launched_step = 1  # launched, not read
    assert planner.plan(2, 0.0, 1) is None
    assert planner.preempted == [requests[2]]
    assert planner.kv.device.num_retiring == 1
    planner.kv.check_integrity(requests)


def test_drafts_are_trimmed_before_anybody_is_preempted() -> None:
    planner = make_planner(first_come_first_served(), [6], num_blocks=2)
    _, (request,) = planner.plan(1, 0.0, 0) or pytest.fail("nothing planned")
    read(planner, [request], 1)
    request.draft_token_ids = [1, 2, 3, 4]  # 7 tokens known: with 4 drafts it would need a third block
    plan, _ = planner.plan(2, 0.0, 0) or pytest.fail("nothing planned")
    assert plan.grants[0].draft_token_ids == [1]
    assert planner.preempted == []


def test_a_preempted_request_waits_in_its_old_place() -> None:
    planner = make_planner(first_come_first_served(), [4, 4, 4])
    first, second, third = planner.table.waiting
    planner.table.run(second)
    planner.preempt(second)
    assert planner.table.waiting == [first, second, third]
