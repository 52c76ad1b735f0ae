"""Probe: an executor whose copies between tiers take two steps."""

from collections import deque
from collections.abc import Iterator

from msgspec.structs import replace

from mini_infer.interfaces import Copy, Executor, LateInputs, PendingOutput, StepPlan
from mini_infer.plugins import hookimpl


class SlowCopies(Executor):
    """Holds each plan's copies back for two steps; workers report them with the step that runs them."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.max_in_flight = inner, inner.max_in_flight
        self.held: deque[list[Copy]] = deque([[], []])
        self.num_promoted = self.num_demoted = 0

    def start(self, worker: object) -> None:
        self.inner.start(worker)

    def forward(self, plan: StepPlan) -> None:
        self.held.append(plan.copies)
        due = self.held.popleft()
        self.num_promoted += sum(copy.target.tier == "device" for copy in due)
        self.num_demoted += sum(copy.source.tier == "device" for copy in due)
        self.inner.forward(replace(plan, copies=due))

    def sample(self, late: LateInputs) -> PendingOutput:
        return self.inner.sample(late)


class Probe:
    name = "slow-copies"
    api_version = 0

    @hookimpl(wrapper=True)
    def executor(self, context: object) -> Iterator[None]:
        self.made = SlowCopies((yield))
        return self.made
