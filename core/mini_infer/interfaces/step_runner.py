"""StepRunner: wraps the forward pass (device graphs, torch.compile)."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mini_infer.forward_batch import ForwardBatch, StepShape
    from mini_infer.interfaces.attention import BatchLimits


class StepRunner(ABC):
    """Chooses a step's padded shape and runs the model on it."""

    def limits(self, limits: "BatchLimits") -> "BatchLimits":
        """Enlarge the bounds of the fixed buffers if the buckets need it."""
        return limits

    @abstractmethod
    def shape(self, shape: "StepShape") -> "StepShape":
        """The bucket for a step of this exact shape: at least as many rows and tokens, before metadata is built.

        Rows added are padding: one token each, on the null block, so ``num_tokens`` grows by at least ``num_rows``'s
        growth. Further tokens belong to the last padding row; without one, ``num_tokens`` must stay.
        """

    @abstractmethod
    def run(self, forward: "Callable[[ForwardBatch], torch.Tensor]", batch: "ForwardBatch") -> "torch.Tensor":
        """Hidden states [batch.shape.num_tokens, hidden_size] of ``forward(batch)``, replayed or run."""
