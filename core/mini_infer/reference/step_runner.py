"""The reference ``StepRunner``: no padding, no graphs."""

from typing import TYPE_CHECKING

from mini_infer.interfaces.step_runner import StepRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mini_infer.forward_batch import ForwardBatch, StepShape


class PlainStepRunner(StepRunner):
    """Runs the model as it is, on the step as it is."""

    def shape(self, shape: "StepShape") -> "StepShape":
        """The exact shape."""
        return shape

    def run(self, forward: "Callable[[ForwardBatch], torch.Tensor]", batch: "ForwardBatch") -> "torch.Tensor":
        """One call."""
        return forward(batch)
