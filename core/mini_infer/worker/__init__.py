"""The device's half of a step: slots, inputs, the forward pass, the answer."""

from mini_infer.worker.worker import Worker, WorkerParts

__all__ = ["Worker", "WorkerParts"]
