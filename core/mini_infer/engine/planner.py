"""From a scheduler's wishes to a step's plan: check, allocate, preempt. The core's half of scheduling.

Contract: a policy decides order and amounts only. Wishes are taken in order; where blocks run out, drafts are trimmed
first, then the scheduler names victims until the wish fits or the asker yields. Shortage is never an error; a wish
that breaks the rules is a ``PluginError``. Waiting work that nothing will ever move is a ``PluginError`` too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_infer.engine.asking import Asking
from mini_infer.engine.kv_manager import KVManager
from mini_infer.engine.request import Request, Status
from mini_infer.errors import PluginError
from mini_infer.interfaces.scheduler import RequestView, Scheduler, SchedulerView, Wish
from mini_infer.plan import Grant, NewRow, StepPlan


@dataclass(slots=True)
class RequestTable:
    """All live requests. ``waiting`` is in order of arrival; ``running`` in order of admission."""

    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    free_slots: list[int] = field(default_factory=list)
    released_slots: list[int] = field(default_factory=list)  # told to the workers with the next plan

    def wait(self, request: Request) -> None:
        """Put a request into the queue, at its place by arrival."""
        index = len(self.waiting)
        while index and self.waiting[index - 1].arrival > request.arrival:
            index -= 1
        self.waiting.insert(index, request)

    def run(self, request: Request) -> None:
        """Move a waiting request to the running ones and give it a slot."""
        self.waiting.remove(request)
        self.running.append(request)
        request.slot = self.free_slots.pop()
        request.status = Status.RUNNING

    def stop(self, request: Request) -> None:
        """Take a running request's slot away."""
        self.running.remove(request)
        self.released_slots.append(request.slot)
        self.free_slots.append(request.slot)
        request.slot = -1


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    budget: int
    grants: list[tuple[Request, Grant]] = field(default_factory=list)
    new: list[NewRow] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    _granted: set[int] = field(default_factory=set)

    def grant(self, request: Request, grant: Grant) -> None:
        self.grants.append((request, grant))
        self._granted.add(id(request))

    def granted(self, request: Request) -> bool:
        return id(request) in self._granted


class Planner:
    """Asks the scheduler and makes the plan.

    Args:
        scheduler: the policy.
        kv: blocks.
        table: requests; changed here (admission, preemption).
        token_budget: most tokens a step, drafts counted.
        max_num_seqs: most running requests.
    """

    def __init__(
        self, scheduler: Scheduler, kv: KVManager, table: RequestTable, token_budget: int, max_num_seqs: int
    ) -> None:
        self.scheduler = scheduler
        self._asking = Asking("scheduler", scheduler)
        self.kv = kv
        self.table = table
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.wake_at: float | None = None
        self.preempted: list[Request] = []  # in the last plan
        self._short = False  # a wish waits for blocks that copies hold: no more copies until it has them

    def plan(self, step_id: int, now: float, num_in_flight: int) -> tuple[StepPlan, list[Request]] | None:
        """The next step and its requests in the plan's row order, or None if there is nothing to run or to wait for."""
        idle = not (self.table.waiting or self.table.running)  # copies under way come to their end, and that is all
        copies = [] if self._short or idle else self.kv.copies(self.table.waiting, now)
        view = self._view(now, num_in_flight)
        step = _Step(self.token_budget)
        self.wake_at, self._short = None, False
        if view.running or view.waiting:
            with self._asking:
                schedule = self.scheduler.schedule(view)
                self.wake_at = schedule.wake_at
                requests = self._check(schedule.wishes, view)
            for wish, request in zip(schedule.wishes, requests, strict=True):
                self._grant(step, request, wish)
        self.preempted = step.preempted
        polls = self.kv.copying and not num_in_flight  # an empty plan, whose answer says which copies are done
        if not step.grants and not copies and not polls:
            self._check_progress(view, step)
            return None
        # Uniform rows (decode, verify) first, then prompts; the sort is stable, so importance decides within each.
        step.grants.sort(key=lambda pair: not (pair[1].num_tokens == 1 and pair[1].samples))
        plan = StepPlan(
            step_id=step_id,
            grants=[grant for _, grant in step.grants],
            new=step.new,
            released=self.table.released_slots,
            copies=copies,
        )
        self.table.released_slots = []
        requests = [request for request, _ in step.grants]
        for request, grant in step.grants:
            request.launch(grant)
        return plan, requests

    def preempt(self, request: Request) -> None:
        """Make a running request start over: its blocks and slot go, its tokens stay."""
        self.kv.release(request)
        self.table.stop(request)
        request.start_over()
        self.table.wait(request)

    def _view(self, now: float, num_in_flight: int) -> SchedulerView:
        running = [r for r in self.table.running if r.view.offer() > 0]
        waiting = [r for r in self.table.waiting if not r.in_flight and not self.kv.is_loading(r)]
        suspects = [r for r in running + waiting if r.suspect]
        if suspects:
            alone = self._isolated(suspects)
            running, waiting = [r for r in running if r is alone], [r for r in waiting if r is alone]
        for request in waiting:
            request.view.offer(len(self.kv.match(request)) * self.kv.block_size)
        return SchedulerView(
            now=now,
            token_budget=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            block_size=self.kv.block_size,
            num_free_blocks=self.kv.device.num_free,
            num_evictable_blocks=self.kv.num_evictable,
            num_running=len(self.table.running),
            running=[r.view for r in running],
            waiting=[r.view for r in waiting],
            num_in_flight=num_in_flight,
        )

    def _isolated(self, suspects: list[Request]) -> Request:
        """A step raised: each of its requests runs alone once, in the whole pool, so that the culprit shows itself."""
        for request in [r for r in self.table.running if r is not suspects[0]]:
            self.preempt(request)
        return suspects[0]

    def _check(self, wishes: Sequence[Wish], view: SchedulerView) -> list[Request]:
        """The requests that the wishes name.

        Raises:
            PluginError: a wish is double, over budget, to an unoffered request, or of an impossible size.
        """
        offered = {id(v) for v in (*view.running, *view.waiting)}
        by_view = {k: r for r in (*self.table.running, *self.table.waiting) if (k := id(r.view)) in offered}
        name = type(self.scheduler).__name__
        requests = []
        budget, num_running = self.token_budget, len(self.table.running)
        for wish in wishes:
            request = by_view.pop(id(wish.request), None)
            if request is None:
                raise PluginError(f"scheduler {name} wished for a request that is not on offer, or twice for one")
            to_do = request.view.num_tokens_to_do
            if not 1 <= wish.num_tokens <= to_do:
                raise PluginError(f"scheduler {name} wished {wish.num_tokens} tokens for {request.view!r}")
            if not 0 <= wish.num_drafts <= (len(request.draft_token_ids) if wish.num_tokens == to_do else 0):
                raise PluginError(f"scheduler {name} wished {wish.num_drafts} drafts for {request.view!r}")
            budget -= wish.num_tokens + wish.num_drafts
            num_running += request.status is Status.WAITING
            requests.append(request)
        if budget < 0:
            raise PluginError(f"scheduler {name} went {-budget} tokens over its budget of {self.token_budget}")
        if num_running > self.max_num_seqs:
            raise PluginError(f"scheduler {name} would run {num_running} requests; max_num_seqs is {self.max_num_seqs}")
        return requests

    def _grant(self, step: _Step, request: Request, wish: Wish) -> None:
        if step.preempted and any(request is other for other in step.preempted):
            return  # it yielded to somebody more important in this very step
        enters = request.status is Status.WAITING
        if enters:
            self.kv.attach(request)
            request.view.offer()  # the hit may have shrunk since it was offered
        to_do = request.view.num_tokens_to_do
        num_tokens = min(wish.num_tokens, to_do)
        first_new = len(request.block_ids)
        drafts = self._make_room(step, request, num_tokens, wish.num_drafts)
        if drafts is None:
            if enters:
                self.kv.release(request)
                request.num_computed_tokens = 0
            return
        if enters:
            self._admit(step, request)
            first_new = len(request.block_ids)
        grant = Grant(
            slot=request.slot,
            num_tokens=num_tokens,
            samples=num_tokens == to_do and request.max_tokens > 0,
            new_block_ids=request.block_ids[first_new:],
            draft_token_ids=request.draft_token_ids[:drafts],
        )
        step.grant(request, grant)
        if num_tokens > 1:
            self.kv.expect(request, request.num_launched_tokens + num_tokens)

    def _admit(self, step: _Step, request: Request) -> None:
        self.table.run(request)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.num_prompt_logprobs = 0
        request.awaited_copies.clear()
        row = NewRow(
            slot=request.slot,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=list(request.block_ids),
            params=request.spec.params,
            seed=request.spec.seed,
            choice=request.spec.choice,
        )
        step.new.append(row)

    def _make_room(self, step: _Step, request: Request, num_tokens: int, num_drafts: int) -> int | None:
        """Blocks for the wish, with as many of its drafts as fit; None if the asker yields or has to wait."""
        base = request.max_launched_tokens + num_tokens
        if base + num_drafts <= len(request.block_ids) * self.kv.block_size:
            return num_drafts  # nearly every step of nearly every request
        while self.kv.grow(request, base + num_drafts) is None:
            if num_drafts:
                num_drafts -= 1
                continue
            shortage = self.kv.num_missing(request, base) - self.kv.device.num_free - self.kv.num_evictable
            if shortage <= self.kv.num_settling:
                self._short = self.kv.copying
                return None  # enough blocks come free with the steps and copies under way: nobody need yield
            candidates = [r for r in self.table.running if not step.granted(r)]
            victim = self._victim(request, candidates)
            if victim is not request or request.status is Status.RUNNING:
                self.preempt(victim)
                step.preempted.append(victim)
            if victim is request:
                return None
        return num_drafts

    def _victim(self, asker: Request, candidates: list[Request]) -> Request:
        by_view: dict[int, Request] = {id(r.view): r for r in (*candidates, asker)}
        views: list[RequestView] = [r.view for r in candidates]
        with self._asking:
            chosen = self.scheduler.victim(asker.view, views)
        if id(chosen) not in by_view:
            raise PluginError(f"scheduler {type(self.scheduler).__name__} named a victim that was not on offer")
        return by_view[id(chosen)]

    def _check_progress(self, view: SchedulerView, step: _Step) -> None:
        moves = view.num_in_flight or step.preempted or self.wake_at is not None
        offered = len(view.running) + len(view.waiting)
        if offered and not moves:
            name = type(self.scheduler).__name__
            raise PluginError(f"scheduler {name} left all {offered} requests where they are, with nothing under way")
