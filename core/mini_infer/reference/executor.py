"""The reference ``Executor``: one worker, in the engine's own thread."""

from typing import TYPE_CHECKING

import torch

from mini_infer.errors import EngineError
from mini_infer.interfaces.executor import Executor, PendingOutput

if TYPE_CHECKING:
    from mini_infer.interfaces.executor import StepWorker
    from mini_infer.plan import LateInputs, StepOutput, StepPlan


class InlineExecutor(Executor):
    """Runs plans where the engine runs. On a GPU two steps may be in flight; on a CPU there is nothing to overlap."""

    def __init__(self, max_in_flight: int = 1) -> None:
        self.max_in_flight = max_in_flight
        self._worker: StepWorker | None = None

    def start(self, worker: "StepWorker") -> None:
        """See ``Executor.start``."""
        self._worker = worker

    def forward(self, plan: "StepPlan") -> None:
        """See ``Executor.forward``."""
        assert self._worker is not None, "start comes first"
        try:
            self._worker.forward(plan)
        except torch.AcceleratorError as error:
            raise _device_lost(error) from error

    def sample(self, late: "LateInputs") -> PendingOutput:
        """See ``Executor.sample``."""
        assert self._worker is not None, "start comes first"
        try:
            return _Pending(self._worker.sample(late))
        except torch.AcceleratorError as error:
            raise _device_lost(error) from error


class _Pending:
    def __init__(self, step: PendingOutput) -> None:
        self._step = step

    def result(self) -> "StepOutput":
        try:
            return self._step.result()
        except torch.AcceleratorError as error:
            raise _device_lost(error) from error


def _device_lost(error: Exception) -> EngineError:
    return EngineError(f"the device failed: {error}")
