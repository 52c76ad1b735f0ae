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
    from collections.abc import Generator, Mapping, Sequence

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import StepWorker
    from mini_infer.plan import Grant, LateInputs, NewRow, StepOutput, StepPlan

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
        in_use = {block for row in self._rows.values() for block in row.blocks}
        in_use |= {block for step in self._unread for block in step.blocks}
        handed: dict[int, tuple[_Row, int]] = {}  # block -> the row that gets it, and its place there
        for new in plan.new:
            _require(new.slot not in self._rows, f"slot {new.slot} has a request already")
            num_hits = new.num_computed_tokens // self._block_size
            row = self._rows[new.slot] = _Row(list(new.block_ids[:num_hits]), new.num_computed_tokens)
            self._hand(row, new.slot, new.block_ids[num_hits:], in_use, handed)
        slots = Counter(grant.slot for grant in plan.grants)
        _require(all(count == 1 for count in slots.values()), f"a slot has two rows in one step: {slots}")
        step = _Step(plan, [self._grow(grant, in_use, handed) for grant in plan.grants])
        for new in plan.new:
            self._check_hits(new, handed)
        step.blocks = {block for row in step.rows for block in row.blocks}
        return step

    def _grow(self, grant: Grant, in_use: set[int], handed: dict[int, tuple[_Row, int]]) -> _Row:
        _require(grant.slot in self._rows, f"slot {grant.slot} has no request")
        row = self._rows[grant.slot]
        self._hand(row, grant.slot, grant.new_block_ids, in_use, handed)
        row.num_tokens += grant.num_tokens + len(grant.draft_token_ids)
        room = len(row.blocks) * self._block_size
        _require(row.num_tokens <= room, f"slot {grant.slot} has room for {room} tokens, not {row.num_tokens}")
        return row

    def _hand(
        self, row: _Row, slot: int, blocks: Sequence[int], in_use: set[int], handed: dict[int, tuple[_Row, int]]
    ) -> None:
        for block in blocks:
            _require(block > 0, f"the null block is handed to slot {slot}")
            _require(
                block not in in_use and block not in handed, f"block {block} is handed to slot {slot}, but is in use"
            )
            handed[block] = row, len(row.blocks)
            row.blocks.append(block)

    def _check_hits(self, new: NewRow, handed: Mapping[int, tuple[_Row, int]]) -> None:
        """What a row takes for computed is filled by this step at the latest."""
        for place, block in enumerate(new.block_ids[: new.num_computed_tokens // self._block_size]):
            if block in handed:
                row, its_place = handed[block]
                full = its_place == place and row.num_tokens >= (place + 1) * self._block_size
                _require(full, f"slot {new.slot} shares block {block}, which this step does not fill")


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
