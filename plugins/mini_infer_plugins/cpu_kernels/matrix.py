"""Matrix: a weight as native.cpp reads it, and as blocks of 4 or 8 bits where it is exactly that.

Files of quantised weights give float32 numbers that are scale * integer + least within each block of 32. Such a matrix
is kept as blocks beside its float32 form: products of few rows, which are bound by reading weights, read the blocks and
give the same bits; products of many rows, which are bound by arithmetic, take the float32 form.

Contract: a matrix is looked at once. Copying other numbers into a weight that was found to be blocks is not noticed.
"""

import ctypes
from collections import Counter
from collections.abc import Callable

import torch

from mini_infer_plugins.cpu_kernels.native import MatrixArgs

_BLOCK = 32


class BlockCount:
    """Matrices looked at, for one line that says what they were.

    Args:
        num_matrices: after so many the line is said.
        log: gets it.
    """

    def __init__(self, num_matrices: int, log: Callable[[str], None]) -> None:
        self._left, self._log = num_matrices, log
        self._bits: Counter[int] = Counter()
        self._num_bytes = 0

    def add(self, bits: int, num_bytes: int) -> None:
        """A matrix was looked at."""
        self._left -= 1
        self._bits[bits] += 1
        self._num_bytes += num_bytes
        if self._left == 0 and self._num_bytes:
            self._log(
                f"cpu-kernels: {self._bits[4]} matrices are exactly blocks of 4 bits, {self._bits[8]} of 8 bits; "
                f"steps of few rows read their {self._num_bytes >> 20} MiB"
            )


class Matrix:
    """One weight.

    Args:
        library: the native library.
        weight: [outs, k], contiguous, float32 or bfloat16.
        bias: [outs] or None.
        blocks: where it is counted if it is blocks; None not to look.

    Attributes:
        args: what native.cpp takes.
        bits: 4 or 8 if it is blocks, else 0.
    """

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None, blocks: "BlockCount | None"
    ) -> None:
        self._weight, self._bias = weight, bias  # args hold their addresses
        self._blocks, self.bits = (None, 0) if blocks is None else _pack(library, weight)
        if blocks is not None:
            blocks.add(self.bits, 0 if self._blocks is None else self._blocks.numel())
        self.args = MatrixArgs(
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if self._blocks is None else self._blocks.data_ptr(),
            *weight.shape,
            self.bits,
        )

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether it was made of this tensor's memory."""
        return self._weight.data_ptr() == weight.data_ptr()


def _pack(library: ctypes.CDLL, weight: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    if weight.dtype is not torch.float32 or weight.shape[1] % _BLOCK:
        return None, 0
    count = weight.numel() // _BLOCK
    for bits in (4, 8):
        # The first row decides for most matrices that are no blocks.
        for some in (weight.shape[1] // _BLOCK, count):
            packed = torch.empty(some * library.block_bytes(bits), dtype=torch.uint8)
            if not library.pack(bits, weight.data_ptr(), some, packed.data_ptr(), torch.get_num_threads()):
                break
        else:
            return packed, bits
    return None, 0
