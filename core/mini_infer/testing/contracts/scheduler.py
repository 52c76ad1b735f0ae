"""The contract of ``Scheduler``: wishes that the core can grant, progress, and no clock but the view's.

A small world takes an engine's place: requests arrive, are granted tokens, decode, are offered drafts and end, in views
that look like an engine's. Every wish is checked against the rules, whoever could run does in the end, and the same
world gives the same wishes twice. Then real engines, hardly large enough, must give each request its own tokens.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, ClassVar

import pytest

from mini_infer.interfaces import RequestView, Scheduler, SchedulerView, Wish
from mini_infer.testing.contracts.engines import check_engines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_STEPS = 2_000
STEP_SECONDS = 0.05


def scheduler_suite(
    make: Callable[[], Scheduler], *, num_traffics: int = 6, device: str = "cpu"
) -> type[SchedulerSuite]:
    """Tests of a scheduler: ``TestMine = scheduler_suite(MyScheduler)``.

    Args:
        make: a fresh one; called for each test.
        num_traffics: random traffics through real engines.
        device: where those run.
    """
    attributes = {"make": staticmethod(make), "num_traffics": num_traffics, "device": device}
    return type("SchedulerSuite", (SchedulerSuite,), attributes)


@dataclass(eq=False)
class FakeRequest:
    """A ``RequestView`` of a request that exists in a ``World`` only."""

    request_id: str
    arrival: float
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    deadline: float | None
    tenant: str | None
    num_hit_tokens: int = 0  # while it waits
    running: bool = False
    num_output_tokens: int = 0
    num_computed: int = 0
    num_blocks: int = 0
    num_drafts_offered: int = 0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_tokens_to_do(self) -> int:
        return self.num_tokens - (self.num_computed if self.running else self.num_hit_tokens)


@dataclass
class World:
    """Requests, time and limits; what an engine does with wishes, in a few lines."""

    rng: Random
    budget: int
    max_num_seqs: int
    now: float = 100.0
    waiting: list[FakeRequest] = field(default_factory=list)
    running: list[FakeRequest] = field(default_factory=list)
    log: list[list[tuple[str, int, int]]] = field(default_factory=list)

    @classmethod
    def random(cls, seed: int) -> World:
        rng = Random(seed)
        return cls(rng, budget=rng.choice([1, 4, 16, 64]), max_num_seqs=rng.choice([1, 2, 5, 16]))

    def arrive(self, count: int) -> None:
        for _ in range(count):
            rng, number = self.rng, len(self.waiting) + len(self.running) + sum(map(len, self.log))
            prompt = rng.randint(1, 40)
            self.waiting.append(
                FakeRequest(
                    request_id=f"{number}-{rng.random()}",
                    arrival=self.now,
                    num_prompt_tokens=prompt,
                    max_tokens=rng.randint(1, 12),
                    priority=rng.randint(-2, 2),
                    deadline=rng.choice([None, self.now + 5 * rng.random()]),
                    tenant=rng.choice([None, "a", "b"]),
                    num_hit_tokens=rng.choice([0, 0, prompt // 2]),
                )
            )

    def view(self) -> SchedulerView:
        for request in self.running:
            decodes = request.num_tokens_to_do == 1
            request.num_drafts_offered = self.rng.choice([0, 0, 3]) if decodes else 0
        return SchedulerView(
            now=self.now,
            token_budget=self.budget,
            max_num_seqs=self.max_num_seqs,
            block_size=4,
            num_free_blocks=10_000,
            num_evictable_blocks=0,
            num_running=len(self.running),
            running=list(self.running),
            waiting=list(self.waiting),
            num_in_flight=0,
        )

    def step(self, scheduler: Scheduler) -> None:
        """Ask, check, grant."""
        view = self.view()
        offered = [*view.running, *view.waiting]
        schedule = scheduler.schedule(view)
        assert [*view.running, *view.waiting] == offered, "the scheduler changed the view's lists"
        wishes = list(schedule.wishes)
        check_wishes(wishes, view)
        asleep = schedule.wake_at is not None and schedule.wake_at > self.now
        assert wishes or asleep or not offered, (
            f"nothing was wished for {len(view.running)} running and {len(view.waiting)} waiting requests with "
            f"{view.token_budget} tokens of budget, and wake_at is {schedule.wake_at} at {self.now}"
        )
        self.log.append([(w.request.request_id, w.num_tokens, w.num_drafts) for w in wishes])
        for wish in wishes:
            self.grant(wish)
        self.now = max(self.now + STEP_SECONDS, schedule.wake_at or 0.0) if not wishes else self.now + STEP_SECONDS

    def grant(self, wish: Wish) -> None:
        request = wish.request
        assert isinstance(request, FakeRequest)
        if not request.running:
            self.waiting.remove(request)
            self.running.append(request)
            request.running, request.num_computed, request.num_hit_tokens = True, request.num_hit_tokens, 0
        request.num_computed += wish.num_tokens
        if request.num_computed == request.num_tokens:
            accepted = self.rng.randint(0, wish.num_drafts)
            request.num_computed += accepted
            request.num_output_tokens += 1 + accepted
        request.num_blocks = -(-request.num_computed // 4)
        if request.num_output_tokens >= request.max_tokens:
            self.running.remove(request)


def check_wishes(wishes: Sequence[Wish], view: SchedulerView) -> None:
    """Raise an ``AssertionError`` that says which rule was broken."""
    offered: list[RequestView] = [*view.running, *view.waiting]
    seen: list[RequestView] = []
    for wish in wishes:
        assert any(wish.request is request for request in offered), "a wish names a request that was not on offer"
        assert not any(wish.request is request for request in seen), f"{wish.request.request_id} has two wishes"
        seen.append(wish.request)
        to_do = wish.request.num_tokens_to_do
        assert 1 <= wish.num_tokens <= to_do, f"{wish.num_tokens} tokens wished for a request with {to_do} to do"
        most = wish.request.num_drafts_offered if wish.num_tokens == to_do else 0
        assert 0 <= wish.num_drafts <= most, f"{wish.num_drafts} drafts wished where {most} may be"
    total = sum(wish.num_tokens + wish.num_drafts for wish in wishes)
    assert total <= view.token_budget, f"{total} tokens wished with a budget of {view.token_budget}"
    num_running = view.num_running + sum(not wish.request.running for wish in wishes)
    assert num_running <= view.max_num_seqs, f"{num_running} requests would run, {view.max_num_seqs} may"


@contextmanager
def no_other_clock() -> Iterator[None]:
    """Whoever asks the operating system for the time meanwhile, in this thread, fails."""
    tested = threading.get_ident()

    def refusing(clock: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            if threading.get_ident() == tested:
                raise AssertionError("a policy read a clock: the only one that it may read is the view's now")
            return clock()

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns"):
            patch.setattr(time, name, refusing(getattr(time, name)))
        yield


class SchedulerSuite:
    """The tests; ``scheduler_suite`` fills in what they are about."""

    num_traffics: ClassVar[int]
    device: ClassVar[str]

    @staticmethod
    def make() -> Scheduler:
        raise NotImplementedError

    @staticmethod
    def live(world: World, scheduler: Scheduler, num_waves: int = 12) -> World:
        """Waves of requests, then until all have ended."""
        with no_other_clock():
            for _ in range(num_waves):
                world.arrive(world.rng.choice([0, 1, 2, 6]))
                for _ in range(world.rng.randint(0, 3)):
                    world.step(scheduler)
            for _ in range(MAX_STEPS):
                if not world.running and not world.waiting:
                    return world
                world.step(scheduler)
        left = [request.request_id for request in (*world.running, *world.waiting)]
        raise AssertionError(f"{len(left)} requests never ended although there was room: {left[:5]}")

    @pytest.mark.parametrize("seed", range(12))
    def test_wishes_keep_the_rules_and_everybody_ends(self, seed: int) -> None:
        self.live(World.random(seed), self.make())

    @pytest.mark.parametrize("seed", range(4))
    def test_the_same_views_give_the_same_wishes(self, seed: int) -> None:
        """A replay of what was recorded must schedule as the engine did."""
        first, second = (self.live(World.random(seed), self.make()) for _ in range(2))
        assert first.log == second.log, "two runs of the same requests were scheduled differently"

    def test_an_idle_engine_is_no_trouble(self) -> None:
        world = World.random(0)
        assert not list(self.make().schedule(world.view()).wishes)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_victim_is_one_of_the_candidates(self, seed: int) -> None:
        world, scheduler = World.random(seed), self.make()
        world.budget, world.max_num_seqs = 64, 8
        world.arrive(12)
        for _ in range(30):
            with no_other_clock():
                world.step(scheduler)
                if not world.running:
                    world.arrive(4)
                    continue
                candidates = world.rng.sample(world.running, world.rng.randint(1, len(world.running)))
                for asker in (candidates[0], *world.waiting[:1]):
                    offered: list[RequestView] = list(candidates)
                    victim = scheduler.victim(asker, offered)
                    assert offered == candidates, "the scheduler changed the candidates"
                    allowed = any(victim is request for request in (*candidates, asker))
                    assert allowed, "the victim is neither a candidate nor the asker"
                if world.waiting:
                    alone = scheduler.victim(world.waiting[0], [])
                    assert alone is world.waiting[0], "with no candidate only the asker can yield"

    def test_tokens_are_those_of_each_request_alone(self) -> None:
        """Engines with hardly a block to spare, both loops; first come, first served gives the same tokens."""
        seen = check_engines("scheduler", self.make, self.num_traffics, device=self.device)
        assert seen["preempted"], "no request was ever preempted: the engines were too large to show anything"
