"""Probe: an executor with three steps in flight that raises at random, between a step's two halves and after them."""

from collections.abc import Iterator
from random import Random

from msgspec.structs import replace

from mini_infer.interfaces import Executor, LateInputs, PendingOutput, StepOutput, StepPlan, StepWorker
from mini_infer.plugins import hookimpl


class FaultyStep:
    def __init__(self, executor: "FaultyExecutor", pending: PendingOutput) -> None:
        self.executor, self.pending = executor, pending

    def result(self) -> StepOutput:
        output = self.pending.result()
        copies_done = self.executor.unreported + output.copies_done
        self.executor.unreported = copies_done
        self.executor.perhaps_raise()
        self.executor.unreported = []
        return replace(output, copies_done=copies_done)  # whatever fails, each copy is reported once


class FaultyExecutor(Executor):
    max_in_flight = 3

    def __init__(self, inner: Executor, rng: Random) -> None:
        self.inner, self.rng = inner, rng
        self.unreported: list[int] = []
        self.has_rows = False
        self.num_faults = 0

    def perhaps_raise(self) -> None:
        if self.has_rows and self.rng.random() < 0.02:
            self.num_faults += 1
            raise ValueError("a fault that comes and goes")

    def start(self, worker: StepWorker) -> None:
        self.inner.start(worker)

    def forward(self, plan: StepPlan) -> None:
        self.has_rows = bool(plan.grants)
        self.inner.forward(plan)
        self.perhaps_raise()

    def sample(self, late: LateInputs) -> PendingOutput:
        self.perhaps_raise()
        return FaultyStep(self, self.inner.sample(late))


class Probe:
    name, api_version = "faulty-executor", 0

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    @hookimpl(wrapper=True)
    def executor(self, context: object) -> Iterator[None]:
        self.made = FaultyExecutor((yield), self.rng)
        return self.made
