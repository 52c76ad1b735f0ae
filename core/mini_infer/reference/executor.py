"""The reference ``Executor``: one worker, in the engine's own thread."""

from typing import TYPE_CHECKING

from mini_infer.errors import DeviceError
from mini_infer.gpu import device_fault
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
        except Exception as error:
            _expect_device_alive(error)
            raise

    def sample(self, late: "LateInputs") -> PendingOutput:
        """See ``Executor.sample``."""
        assert self._worker is not None, "start comes first"
        try:
            return _Pending(self._worker.sample(late))
        except Exception as error:
            _expect_device_alive(error)
            raise


class _Pending:
    def __init__(self, step: PendingOutput) -> None:
        self._step = step

    def result(self) -> "StepOutput":
        try:
            return self._step.result()
        except Exception as error:
            _expect_device_alive(error)
            raise


def _expect_device_alive(error: Exception) -> None:
    fault = device_fault(error)
    if fault is not None:
        hint = "start again; should it come back, CUDA_LAUNCH_BLOCKING=1 tells which kernel it was"
        raise DeviceError(f"the device failed: {fault}: {hint}") from error
