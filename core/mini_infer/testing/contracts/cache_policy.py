"""The contract of ``CachePolicy``: it answers what is asked, about the blocks it is asked of, and can lose nothing.

The core's own block books, with no model behind them, are run through random lives of requests that share prompts, with
copies that are slow and sometimes fail; every answer of the policy is checked, and the books after each move. Then real
engines, with hardly a block to spare, must give each request its own tokens: those that it gets with nothing kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from random import Random
from typing import TYPE_CHECKING, ClassVar

import pytest

from mini_infer.engine.kv_manager import KVManager
from mini_infer.engine.request import Request
from mini_infer.interfaces import BlockKey, CachedBlock, CachePolicy, CacheView, Demote, Promote, SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.plan import DEVICE_TIER
from mini_infer.testing.contracts.engines import check_engines
from mini_infer.testing.contracts.scheduler import no_other_clock
from mini_infer.testing.slow_copies import SlowCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mini_infer.plan import Copy

BLOCK = 4


def cache_policy_suite(
    make: Callable[[], CachePolicy], *, num_traffics: int = 6, device: str = "cpu"
) -> type[CachePolicySuite]:
    """Tests of a cache policy: ``TestMine = cache_policy_suite(MyPolicy)``.

    Args:
        make: a fresh one; called for each engine.
        num_traffics: random traffics through real engines, and as many with slow copies.
        device: where those run.
    """
    attributes = {"make": staticmethod(make), "num_traffics": num_traffics, "device": device}
    return type("CachePolicySuite", (CachePolicySuite,), attributes)


class Checked(CachePolicy):
    """The policy, its answers checked on the way."""

    def __init__(self, inner: CachePolicy) -> None:
        self.inner = inner
        self.reuses = inner.reuses

    def tiers(self) -> Mapping[str, int]:
        tiers = self.inner.tiers()
        assert isinstance(tiers, Mapping), f"tiers() gave {tiers!r}, not a mapping of names to sizes"
        assert DEVICE_TIER not in tiers, "the device's blocks are the core's: tiers() names further ones"
        for tier, size in tiers.items():
            assert isinstance(tier, str) and type(size) is int and size > 0, f"a tier {tier!r} of {size!r} blocks"
        return tiers

    def keep(self, block: CachedBlock) -> bool:
        assert self.reuses, "a policy that reuses nothing is asked to keep a block"
        kept = self.inner.keep(block)
        assert isinstance(kept, bool), f"keep() gave {kept!r}"
        return kept

    def touch(self, keys: Iterable[BlockKey]) -> None:
        self.inner.touch(keys)

    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        offered = list(cached)
        chosen = self.inner.evict(tier, cached, count)
        assert list(cached) == offered, "evict() changed what it was offered"
        assert len(chosen) >= count, f"evict() chose {len(chosen)} blocks where {count} were asked for"
        assert len(set(chosen)) == len(chosen), "evict() chose a block twice"
        assert set(chosen) <= set(offered), "evict() chose a block that was not on offer"
        return chosen

    def arrived(self, tier: str, key: BlockKey) -> None:
        self.inner.arrived(tier, key)

    def gone(self, tier: str, key: BlockKey) -> None:
        self.inner.gone(tier, key)

    def wishes(self, view: CacheView) -> Sequence[Demote | Promote]:
        wishes = list(self.inner.wishes(view))
        for wish in wishes:
            known = isinstance(wish, Demote | Promote) and wish.tier in view.num_total and wish.tier != DEVICE_TIER
            assert known, f"wishes() gave {wish!r}; the policy's tiers are {sorted(self.inner.tiers())}"
        return wishes


class Books:
    """The core's block books and requests that come and go; a step is one move of one of them."""

    def __init__(self, policy: CachePolicy, seed: int) -> None:
        self.rng = Random(seed)
        self.kv = KVManager(self.rng.randint(6, 24), BLOCK, Checked(policy))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.copies: list[tuple[int, Copy]] = []  # when each ends
        self.stems = [[self.rng.randrange(50) for _ in range(20)] for _ in range(3)]
        self.now = 0

    def arrive(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.randint(1, 20)] + [rng.randrange(50) for _ in range(rng.randint(0, 3))]
        params = SamplingParams(max_tokens=8, prompt_logprobs=rng.choice([None, None, None, 0]))
        salt = rng.choice([None, None, "tenant"])
        spec = EngineRequest(request_id=f"{self.now}", prompt_token_ids=prompt, params=params, cache_salt=salt)
        self.waiting.append(Request(spec, arrival=float(self.now), deadline=None, token_ids=list(prompt)))

    def admit(self) -> None:
        """A waiting request takes its hit, and runs if there is room for it."""
        request = self.rng.choice(self.waiting)
        if self.kv.is_loading(request):
            return
        self.kv.attach(request)
        if self.kv.grow(request, len(request.token_ids)) is None:
            self.kv.release(request)
            request.num_computed_tokens = 0
            return
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed_tokens = len(request.token_ids)
        self.kv.commit(request)

    def decode(self) -> None:
        request = self.rng.choice(self.running)
        if self.kv.grow(request, len(request.token_ids) + 1) is None:
            self.leave(request, again=True)
            return
        request.token_ids.append(self.rng.randrange(50))
        request.num_computed_tokens += 1
        self.kv.commit(request)

    def leave(self, request: Request, *, again: bool) -> None:
        """A request ends, or starts over."""
        self.running.remove(request)
        self.kv.release(request)
        request.num_computed_tokens = 0
        if again:
            self.waiting.append(request)

    def move(self) -> None:
        """One random thing happens."""
        self.now += 1
        for copy in self.kv.copies(self.waiting, float(self.now)):
            self.copies.append((self.now + self.rng.randint(0, 3), copy))
        for when, copy in list(self.copies):
            if when <= self.now:
                self.copies.remove((when, copy))
                self.kv.end_copy(copy.copy_id, done=self.rng.random() < 0.9)
        if self.rng.random() < 0.3 or not (self.waiting or self.running):
            self.arrive()
        elif self.waiting and (self.rng.random() < 0.4 or not self.running):
            self.admit()
        elif self.running and self.rng.random() < 0.7:
            self.decode()
        elif self.running:
            self.leave(self.rng.choice(self.running), again=self.rng.random() < 0.2)
        self.kv.check_integrity([*self.waiting, *self.running])


class CachePolicySuite:
    """The tests; ``cache_policy_suite`` fills in what they are about."""

    num_traffics: ClassVar[int]
    device: ClassVar[str]

    @staticmethod
    def make() -> CachePolicy:
        raise NotImplementedError

    @pytest.mark.parametrize("seed", range(8))
    def test_every_answer_is_one_that_was_asked_for(self, seed: int) -> None:
        books = Books(self.make(), seed)
        with no_other_clock():
            for _ in range(300):
                books.move()

    def test_its_tiers_never_change(self) -> None:
        policy = self.make()
        assert dict(policy.tiers()) == dict(policy.tiers()) == dict(self.make().tiers())

    def test_a_block_that_it_never_heard_of_may_go(self) -> None:
        """A request failed, so that what its blocks hold is not to be trusted."""
        policy = self.make()
        for tier in (DEVICE_TIER, *policy.tiers()):
            policy.gone(tier, b"unknown")

    def test_tokens_are_those_of_each_request_alone(self) -> None:
        """Engines with hardly a block to spare, both loops; keeping nothing gives the same tokens."""
        seen = check_engines("cache_policy", self.make, self.num_traffics, device=self.device)
        assert seen["preempted"], "no request was ever preempted: the engines were too large to show anything"

    def test_so_they_are_when_copies_take_their_time(self) -> None:
        if not self.make().tiers():
            pytest.skip("it has no further tier")
        check_engines("cache_policy", self.make, self.num_traffics, plugins=[SlowCopies], device=self.device)
