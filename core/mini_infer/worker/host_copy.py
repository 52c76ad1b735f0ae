"""HostCopy: tensors on their way from the device to the host."""

from collections.abc import Sequence

import torch


class HostCopy:
    """Copies that are launched now, behind the work that makes their sources, and waited for later.

    Work launched afterwards is not waited for, so the host can read one step while the device runs the next.

    Args:
        tensors: of one device; none at all to wait for the work launched so far.
        device: theirs.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: str) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if device.startswith("cuda"):
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, in the order given."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
