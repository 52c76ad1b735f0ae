"""The reference ``Scheduler``: first come, first served, whole prompts; made of three small policies.

``ComposedScheduler`` is what plugins build on: an order, a victim and a chunk policy are a scheduler.
"""

from collections.abc import Sequence

from mini_infer.interfaces.scheduler import (
    ChunkPolicy,
    OrderPolicy,
    RequestView,
    Schedule,
    Scheduler,
    SchedulerView,
    VictimPolicy,
    Wish,
)


class ArrivalOrder(OrderPolicy):
    """First come, first served."""

    name = "arrival"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """As they came."""
        return waiting


class LastArrived(VictimPolicy):
    """Whoever came last yields; the asker itself if nobody came after it."""

    name = "last-arrived"

    def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
        """The latest of all."""
        latest = max(candidates, key=lambda r: r.arrival, default=asker)
        return latest if latest.running and latest.arrival > asker.arrival else asker


class WholePrompts(ChunkPolicy):
    """A prompt runs in one step; only one that no step could hold is cut."""

    name = "whole-prompts"

    def chunk(self, request: RequestView, budget_left: int, view: SchedulerView) -> int:
        """All, or nothing if it has to wait for a step with more room."""
        to_do = request.num_tokens_to_do
        if to_do <= budget_left:
            return to_do
        return budget_left if to_do > view.token_budget else 0


class ComposedScheduler(Scheduler):
    """Running requests first, then waiting ones by ``order``, each as many tokens as ``chunk`` says.

    Decoding requests come before prompts that are under way, and drafts are taken as far as the budget goes. A waiting
    request that gets nothing ends the step's admissions, so that nobody is overtaken for want of room, unless ``chunk``
    lets others pass. Where ``order`` ranks running requests too, it decides who is served first when blocks run out.
    """

    def __init__(self, order: OrderPolicy, victim: VictimPolicy, chunk: ChunkPolicy) -> None:
        self._order = order
        self._victim = victim
        self._chunk = chunk

    def schedule(self, view: SchedulerView) -> Schedule:
        """See ``Scheduler.schedule``."""
        for policy in (self._order, self._victim, self._chunk):
            policy.begin_step(view)
        budget = view.token_budget
        wishes: list[Wish] = []
        for request in sorted(view.running, key=lambda r: r.num_tokens_to_do > 1):
            num_tokens = self._chunk.chunk(request, budget, view) if request.num_tokens_to_do > 1 else min(1, budget)
            if num_tokens:
                num_drafts = min(request.num_drafts_offered, budget - num_tokens)
                wishes.append(Wish(request, num_tokens, num_drafts))
                budget -= num_tokens + num_drafts
        room = view.max_num_seqs - view.num_running
        for request in self._order.order(view.waiting, view.now):
            num_tokens = self._chunk.chunk(request, budget, view) if room and budget else 0
            if num_tokens:
                wishes.append(Wish(request, num_tokens))
                budget -= num_tokens
                room -= 1
            elif not (room and budget and self._chunk.lets_pass):
                break
        if self._order.ranks_running and len(wishes) > 1:
            ranked = self._order.order([wish.request for wish in wishes], view.now)
            rank = {id(request): position for position, request in enumerate(ranked)}
            wishes.sort(key=lambda wish: rank[id(wish.request)])
        return Schedule(wishes)

    def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
        """See ``Scheduler.victim``."""
        return self._victim.victim(asker, candidates)


def first_come_first_served() -> ComposedScheduler:
    """The scheduler of an engine with no scheduler plugin."""
    return ComposedScheduler(ArrivalOrder(), LastArrived(), WholePrompts())
