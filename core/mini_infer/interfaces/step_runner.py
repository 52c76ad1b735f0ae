"""StepRunner: wraps the forward pass (device graphs, torch.compile)."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from mini_infer.forward_batch import ForwardBatch, StepShape
    from mini_infer.interfaces.attention import AttentionBackend, BatchLimits


class StepRunner(ABC):
    """Chooses a step's padded shape and runs the model on it."""

    def limits(self, limits: "BatchLimits") -> "BatchLimits":
        """Enlarge the bounds of the fixed buffers if the buckets need it."""
        return limits

    def bind(self, backends: "Sequence[AttentionBackend]") -> None:
        """Called once, before the first step, with the backend of each KV group. Nothing by default.

        Their ``capabilities.graphs`` say which steps may be captured. In those a backend reads tensors at fixed
        addresses only, so a replay may hand the model the batch of the step that was captured.

        Raises:
            ConfigError: it cannot run with one of them.
        """
        return

    def reserve_bytes(self, step_bytes: int, num_tokens: int) -> int:
        """Bytes of the device that it keeps beside what a plain run takes and gives back.

        Asked on a GPU, before ``bind``.

        Args:
            step_bytes: measured, what the largest plain run takes at its peak.
            num_tokens: of that run.
        """
        return 0

    def rehearsals(self) -> "Sequence[StepShape]":
        """Shapes to be run once before the first request, on padding rows, so that no request waits for a capture.

        Uniform ones are ``num_rows`` rows of ``decode_query_len`` tokens; any other is as few rows as hold
        ``num_tokens``. Empty by default.
        """
        return ()

    @abstractmethod
    def shape(self, shape: "StepShape") -> "StepShape":
        """The bucket for a step of this exact shape: at least as many rows and tokens, before metadata is built.

        Only ``num_rows`` and ``num_tokens`` of the answer count, and ``last_only`` if it is made false; the core works
        out the rest. Rows added are padding on the null block. The tokens added are spread evenly over them, at least
        one and at most a sequence's length each; with no row added ``num_tokens`` stays.
        """

    @abstractmethod
    def run(self, forward: "Callable[[ForwardBatch], torch.Tensor]", batch: "ForwardBatch") -> "torch.Tensor":
        """What ``forward(batch)`` gives, replayed or run; ``batch.shape.gives`` says what that is."""
