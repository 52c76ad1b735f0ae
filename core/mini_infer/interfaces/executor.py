"""Executor: where plans run (in this process, on several ranks, on other machines)."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mini_infer.plan import LateInputs, StepOutput, StepPlan


class PendingOutput(Protocol):
    """A step whose answer may not be there yet."""

    def result(self) -> "StepOutput":
        """Wait for the answer.

        Raises:
            EngineError: the device or a worker is lost.
        """


class StepWorker(Protocol):
    """What runs steps on one device; ``mini_infer.worker.Worker`` is the core's."""

    def forward(self, plan: "StepPlan") -> None:
        """Apply the plan to the slots, order its copies, run the model."""

    def sample(self, late: "LateInputs") -> PendingOutput:
        """Draw from that forward pass."""


class Executor(ABC):
    """Runs plans in the order given.

    A step is ``forward``, ``sample``, and ``result`` of what that gave. What goes wrong in a step may be raised by any
    of its three: an ``EngineError`` ends the engine, any other exception makes it run the step's requests again, each
    alone. A step whose ``forward`` or ``sample`` raised is given up: no ``sample`` follows, and its answer is not
    waited for. But each copy of each plan, of those given up too, is reported exactly once, done or failed, with its
    step's answer or a later one; until then the core leaves both ends alone. A plan without rows or copies asks for
    just that.
    """

    max_in_flight: int = 1
    """Steps that may be launched before the first is read; with 2 or more the engine takes its overlapped loop."""

    @abstractmethod
    def start(self, worker: "StepWorker") -> None:
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
