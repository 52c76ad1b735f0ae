"""Probe: policies that keep the contract and are otherwise as erratic as can be. They may be slow, never wrong."""

from collections.abc import Collection, Iterable, Sequence
from random import Random

from mini_infer.interfaces import (
    BlockKey,
    CachedBlock,
    CachePolicy,
    CacheView,
    Demote,
    Promote,
    RequestView,
    Schedule,
    Scheduler,
    SchedulerView,
    Wish,
)
from mini_infer.plugins import hookimpl


class ChaoticScheduler(Scheduler):
    """Any amounts for anybody in any order, and every other victim is a random one."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def schedule(self, view: SchedulerView) -> Schedule:
        wishes: list[Wish] = []
        budget, room = view.token_budget, view.max_num_seqs - view.num_running
        requests = self.rng.sample([*view.running, *view.waiting], len(view.running) + len(view.waiting))
        if not view.num_in_flight:  # something must move: a running request can always have room, or make some
            requests.sort(key=lambda request: request is not (view.running or view.waiting)[0])
        for request in requests:
            must = request is requests[0] and not view.num_in_flight
            if budget == 0 or (not request.running and room == 0) or (self.rng.random() < 0.2 and not must):
                continue
            most = min(budget, request.num_tokens_to_do)
            num_tokens = self.rng.choice([most, self.rng.randint(1, most)])
            offered = request.num_drafts_offered if num_tokens == request.num_tokens_to_do else 0
            num_drafts = self.rng.randint(0, min(offered, budget - num_tokens))
            wishes.append(Wish(request, num_tokens, num_drafts))
            budget -= num_tokens + num_drafts
            room -= not request.running
        return Schedule(wishes)

    def victim(self, asker: RequestView, candidates: Sequence[RequestView]) -> RequestView:
        everybody = [*candidates, asker]
        return self.rng.choice([*everybody, *[max(everybody, key=lambda request: request.arrival)] * len(everybody)])


class ChaoticCache(CachePolicy):
    """Keeps, evicts and moves at random, whatever it has ever heard of."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.known = rng, set[BlockKey]()
        self.sizes = {"host": rng.randint(1, 8), "disk": rng.randint(1, 8)}

    def tiers(self) -> dict[str, int]:
        return self.sizes

    def keep(self, block: CachedBlock) -> bool:
        self.known.add(block.key)
        return self.rng.random() < 0.9

    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        return self.rng.sample(list(cached), count)

    def wishes(self, view: CacheView) -> list[Demote | Promote]:
        wanted: Iterable = self.rng.sample(view.wanted, self.rng.randint(0, len(view.wanted)))
        keys = self.rng.sample(sorted(self.known), min(3, len(self.known)))
        tier = self.rng.choice(list(self.sizes))
        moves = [Promote(*found) for found in wanted]
        return moves + [self.rng.choice([Demote, Promote])(key, tier) for key in keys if self.rng.random() < 0.4]


class Probe:
    name = "chaos"
    api_version = 0

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    @hookimpl
    def scheduler(self, context: object) -> Scheduler:
        return ChaoticScheduler(self.rng)

    @hookimpl
    def cache_policy(self, context: object) -> CachePolicy:
        return ChaoticCache(self.rng)
