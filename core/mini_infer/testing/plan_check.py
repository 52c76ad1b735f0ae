"""The plugin ``plan-check``: an executor around the executor that proves every plan before it runs.

Contract: knows the plans and answers only, none of the engine's own books. A block that a plan hands out is in no other
request's table and in no step that has not been read; each slot has one request; a request's tokens fit its blocks; the
null block is never handed out. A breach is an ``EngineError``, which ends the engine. ``make_engine`` puts it around
every engine. No entry point; importing it imports nothing heavy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mini_infer.errors import EngineError
from mini_infer.interfaces.executor import Executor, PendingOutput
from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from collections.abc import Generator

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import StepWorker
    from mini_infer.plan import Grant, LateInputs, StepOutput, StepPlan

name = "plan-check"
api_version = 0

DEFAULT_BLOCK_SIZE = 16


class BrokenPlanError(EngineError):
    """A plan that no engine may make."""


@dataclass(slots=True)
class _Row:
    """What the plans so far say of a slot."""

    blocks: list[int]
    num_tokens: int  # whose KV is in them, at most


@dataclass(slots=True)
class _Step:
    """A step that was launched and has not been read."""

    plan: StepPlan
    rows: list[_Row]
    blocks: set[int] = field(default_factory=set)  # that it reads or writes
    sampled: bool = False


class PlanCheck(Executor):
    """Checks, then passes on.

    Args:
        inner: runs the plans.
        block_size: tokens a block.
    """

    def __init__(self, inner: Executor, block_size: int) -> None:
        self.max_in_flight = inner.max_in_flight
        self._inner = inner
        self._block_size = block_size
        self._rows: dict[int, _Row] = {}  # by slot
        self._unread: list[_Step] = []
        self._last_step_id = 0

    def start(self, worker: StepWorker) -> None:
        self._inner.start(worker)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def forward(self, plan: StepPlan) -> None:
        if self._unread and not self._unread[-1].sampled:
            self._unread.pop()  # given up between its two halves
        step = self._check(plan)
        self._inner.forward(plan)
        self._unread.append(step)  # one that raises here is not read

    def sample(self, late: LateInputs) -> PendingOutput:
        step = self._unread[-1]
        try:
            pending = self._inner.sample(late)
        except BaseException:
            self._unread.remove(step)
            raise
        step.sampled = True
        return _Pending(self, step, pending)

    def read(self, step: _Step, pending: PendingOutput) -> StepOutput:
        """The step's answer, which says how many drafts stand."""
        _require(
            step is self._unread[0], f"step {step.plan.step_id} is read before step {self._unread[0].plan.step_id}"
        )
        self._unread.remove(step)
        output = pending.result()
        for row, grant, answer in zip(step.rows, step.plan.grants, output.rows, strict=True):
            row.num_tokens -= len(grant.draft_token_ids) - max(len(answer.token_ids) - 1, 0)
        return output

    def _check(self, plan: StepPlan) -> _Step:
        _require(plan.step_id > self._last_step_id, f"step {plan.step_id} comes after step {self._last_step_id}")
        self._last_step_id = plan.step_id
        for slot in plan.released:
            self._rows.pop(slot, None)
        for new in plan.new:
            _require(new.slot not in self._rows, f"slot {new.slot} has a request already")
            self._rows[new.slot] = _Row(list(new.block_ids), new.num_computed_tokens)
        slots = Counter(grant.slot for grant in plan.grants)
        _require(all(count == 1 for count in slots.values()), f"a slot has two rows in one step: {slots}")
        taken = {block for row in self._rows.values() for block in row.blocks}
        taken |= {block for step in self._unread for block in step.blocks}
        step = _Step(plan, [self._grow(grant, taken) for grant in plan.grants])
        step.blocks = {block for row in step.rows for block in row.blocks}
        return step

    def _grow(self, grant: Grant, taken: set[int]) -> _Row:
        _require(grant.slot in self._rows, f"slot {grant.slot} has no request")
        row = self._rows[grant.slot]
        for block in grant.new_block_ids:
            _require(block > 0, f"the null block is handed to slot {grant.slot}")
            _require(block not in taken, f"block {block} is handed to slot {grant.slot}, but is in use")
            taken.add(block)
            row.blocks.append(block)
        row.num_tokens += grant.num_tokens + len(grant.draft_token_ids)
        room = len(row.blocks) * self._block_size
        _require(row.num_tokens <= room, f"slot {grant.slot} has room for {room} tokens, not {row.num_tokens}")
        return row


@dataclass(frozen=True, slots=True)
class _Pending:
    check: PlanCheck
    step: _Step
    inner: PendingOutput

    def result(self) -> StepOutput:
        return self.check.read(self.step, self.inner)


def _require(holds: bool, breach: str) -> None:
    if not holds:
        raise BrokenPlanError(f"broken plan: {breach}")


@hookimpl(wrapper=True)
def executor(context: BuildContext) -> Generator[None, Executor, Executor]:
    inner = yield
    return PlanCheck(inner, context.settings.engine.block_size or DEFAULT_BLOCK_SIZE)
