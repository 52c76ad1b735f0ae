"""Executor: where plans run (in this process, on several ranks, on other machines)."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mini_infer.plan import LateInputs, StepOutput, StepPlan
    from mini_infer.worker import Worker


class PendingOutput(Protocol):
    """A step whose answer may not be there yet."""

    def result(self) -> "StepOutput":
        """Wait for the answer.

        Raises:
            EngineError: the device or a worker is lost.
        """


class Executor(ABC):
    """Runs plans in the order given. ``forward`` and ``sample`` alternate, once each a step."""

    max_in_flight: int = 1
    """Steps that may be launched before the first is read; 2 makes the engine take its overlapped loop."""

    @abstractmethod
    def start(self, worker: "Worker") -> None:
        """Take over the worker that the engine built for this process."""

    @abstractmethod
    def forward(self, plan: "StepPlan") -> None:
        """Launch the step: apply the plan to the workers' state, run the model and the copies due."""

    @abstractmethod
    def sample(self, late: "LateInputs") -> PendingOutput:
        """Launch drawing tokens from the last forward pass."""

    def shutdown(self) -> None:
        """Release workers. Nothing by default."""
        return
