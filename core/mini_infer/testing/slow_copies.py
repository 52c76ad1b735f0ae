"""An executor around the executor whose copies between tiers take two steps, as copies beside a running device do.

Contract: a plan's copies run two plans later, and are reported by the step that runs them; meanwhile the core must
leave both ends alone. ``SlowCopies`` is also the plugin that puts itself there, one object an engine. No entry point.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mini_infer.interfaces.executor import Executor, PendingOutput
from mini_infer.plan import DEVICE_TIER, Copy, LateInputs, StepPlan
from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from collections.abc import Generator

    from mini_infer.interfaces import StepWorker


class SlowCopies(Executor):
    """Holds copies back.

    Attributes:
        num_demoted, num_promoted: copies from and to the device that have run.
    """

    name = "slow-copies"
    api_version = 0

    def __init__(self) -> None:
        self._held: deque[list[Copy]] = deque([[], []])
        self.num_demoted = self.num_promoted = 0

    @hookimpl(wrapper=True)
    def executor(self, context: object) -> Generator[None, Executor, Executor]:
        self._inner = yield
        self.max_in_flight = self._inner.max_in_flight
        return self

    def start(self, worker: StepWorker) -> None:
        self._inner.start(worker)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def forward(self, plan: StepPlan) -> None:
        from msgspec.structs import replace

        self._held.append(plan.copies)
        due = self._held.popleft()
        self.num_demoted += sum(copy.source.tier == DEVICE_TIER for copy in due)
        self.num_promoted += sum(copy.target.tier == DEVICE_TIER for copy in due)
        self._inner.forward(replace(plan, copies=due))

    def sample(self, late: LateInputs) -> PendingOutput:
        return self._inner.sample(late)
