"""Probe: an executor that answers one step late, and to which every message comes over a wire."""

import msgspec

from mini_infer.interfaces import Executor, LateInputs, StepOutput, StepPlan
from mini_infer.plugins import hookimpl


def over_the_wire(message):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


class LateStep:
    """A step that runs when the next one is launched, or when its answer is waited for."""

    def __init__(self, inner: Executor, plan: StepPlan) -> None:
        self.inner, self.plan, self.late = inner, plan, None
        self.outcome = None

    def run(self) -> bool:
        if self.outcome is not None:
            return False
        try:
            self.inner.forward(over_the_wire(self.plan))
            pending = None if self.late is None else self.inner.sample(over_the_wire(self.late))
            self.outcome = StepOutput(self.plan.step_id, []) if pending is None else over_the_wire(pending.result())
        except Exception as error:
            self.outcome = error
        return True

    def result(self) -> StepOutput:
        self.run()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class LateExecutor(Executor):
    max_in_flight = 2

    def __init__(self, inner: Executor) -> None:
        self.inner, self.step = inner, None
        self.num_late = 0

    def start(self, worker) -> None:
        self.inner.start(worker)

    def forward(self, plan: StepPlan) -> None:
        if self.step is not None:
            self.num_late += self.step.run()
        self.step = LateStep(self.inner, plan)

    def sample(self, late: LateInputs) -> LateStep:
        self.step.late = late
        return self.step


class Probe:
    name = "late-executor"
    api_version = 0

    def __init__(self) -> None:
        self.executors = []

    @hookimpl(wrapper=True)
    def executor(self, context):
        self.executors.append(LateExecutor((yield)))
        return self.executors[-1]
