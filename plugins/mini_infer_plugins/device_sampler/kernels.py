"""The Triton kernels: one reading of the logits gives each row's most likely token and whether all are finite.

Each row is cut into parts, so that a few rows fill the card::

    logits [num_rows, vocab_size]    | part 0 | part 1 | ... |    best_of_part: value, id, all finite
                                                                  best_of_row:  the best of the parts
"""

import triton
import triton.language as tl


@triton.jit
def best_of_part_kernel(
    logits, invalid, best, best_id, fine, stride, vocab_size, part_size, INVALID: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row and part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * part_size
    last = tl.minimum(first + part_size, vocab_size)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    where = first + lane
    all_fine = tl.full([BLOCK], 1, tl.int32)
    for start in range(first, last, BLOCK):
        ids = start + lane
        exists = ids < last
        value = tl.load(logits + row * stride + ids, mask=exists, other=0.0).to(tl.float32)
        all_fine &= (tl.abs(value) < float("inf")).to(tl.int32)
        value = tl.where(exists, value, float("-inf"))
        if INVALID:
            value = tl.where(tl.load(invalid + ids, mask=exists, other=0) != 0, float("-inf"), value)
        better = value > top
        top = tl.where(better, value, top)
        where = tl.where(better, ids, where)
    highest = tl.max(top, 0)
    at = row * tl.num_programs(1) + part
    tl.store(best + at, highest)
    tl.store(best_id + at, tl.min(tl.where(top == highest, where, vocab_size), 0))
    tl.store(fine + at, tl.min(all_fine, 0))


@triton.jit
def best_of_row_kernel(best, best_id, fine, tokens, ok, num_parts, vocab_size, PADDED_PARTS: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED_PARTS)
    exists = part < num_parts
    value = tl.load(best + row * num_parts + part, mask=exists, other=float("-inf"))
    ids = tl.load(best_id + row * num_parts + part, mask=exists, other=vocab_size)
    tl.store(tokens + row, tl.min(tl.where(value == tl.max(value, 0), ids, vocab_size), 0).to(tl.int64))
    tl.store(ok + row, tl.min(tl.load(fine + row * num_parts + part, mask=exists, other=1), 0) != 0)
