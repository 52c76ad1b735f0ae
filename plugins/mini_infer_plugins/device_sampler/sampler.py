"""DeviceSampler: the reference's tokens, with greedy rows drawn in one reading of the logits.

Contract: no host synchronisation. Tokens are the reference's: ties go to the lowest id, and bfloat16 logits compare as
the float32 numbers that they are.
"""

import torch
import triton

from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer_plugins.device_sampler.kernels import best_of_part_kernel, best_of_row_kernel

_BLOCK = 1024
_PROGRAMS = 1024  # that keep a large card busy


class DeviceSampler(ReferenceSampler):
    """See the module."""

    def __init__(self) -> None:
        self._invalid: tuple[torch.Tensor, torch.Tensor] | None = None  # ids, and the mask made of them

    def greedy(self, logits: torch.Tensor, invalid_token_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Sampler.greedy``."""
        rows, vocab_size = logits.shape
        parts = max(1, min(triton.cdiv(vocab_size, _BLOCK), triton.cdiv(_PROGRAMS, rows)))
        part_size = triton.cdiv(triton.cdiv(vocab_size, parts), _BLOCK) * _BLOCK
        parts = triton.cdiv(vocab_size, part_size)

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=logits.device)

        best, best_id = empty(rows, parts, dtype=torch.float32), empty(rows, parts, dtype=torch.int32)
        fine = empty(rows, parts, dtype=torch.int32)
        tokens, ok = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.bool)
        mask = None if invalid_token_ids is None else self._mask(invalid_token_ids, vocab_size)
        best_of_part_kernel[(rows, parts)](
            logits, logits if mask is None else mask, best, best_id, fine, logits.stride(0), vocab_size, part_size,
            INVALID=mask is not None, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        best_of_row_kernel[(rows,)](
            best, best_id, fine, tokens, ok, parts, vocab_size, PADDED_PARTS=triton.next_power_of_2(parts), num_warps=1
        )
        return tokens, ok

    def _mask(self, invalid_token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """[vocab_size] uint8, made once."""
        known = self._invalid
        if known is None or known[0] is not invalid_token_ids or len(known[1]) != vocab_size:
            mask = torch.zeros(vocab_size, dtype=torch.uint8, device=invalid_token_ids.device)
            known = self._invalid = invalid_token_ids, mask.index_fill_(0, invalid_token_ids, 1)
        return known[1]
