"""The Triton kernels of top-k and top-p: for each row the place from which on tokens are kept, with nothing sorted.

Contract: the cut is the highest place from which on there is enough weight: k tokens, or p of the probability that is
left, in the reference's fixed point. Rounds of float32 sums only say where to look::

    weigh_pivots            the weight from 16 pivots of z on; again between two of them, until few tokens are left
    gather                  the places of those few; the exact weight of all tokens, and of those above the few
    find_cut                one of the few, bit by bit; if they turn out to be the wrong ones, one of all
"""

import triton
import triton.language as tl

from mini_infer_plugins.device_sampler.kernels import FLOOR, FLOOR_BITS, ID_BITS, best_of, place_of, scale, scaled

PLACE_BITS = tl.constexpr(53)
FIXED_POINT = tl.constexpr(2.0**34)  # the weight of z = 0; weights are integers
TO_INTEGER = tl.constexpr(1.5 * 2.0**52)  # added and taken away again, it rounds a float64 to an integer, ties to even

NUM_ROUNDS = tl.constexpr(3)
NUM_PIVOTS = tl.constexpr(16)
SUM_ERROR = tl.constexpr(1e-5)  # relative, more than float32 sums of one sign are off


@triton.jit
def limit_of(limits, slot, temperature, vocab_size, MASS: tl.constexpr):
    """A row's p or k, and whether it is on."""
    limit = tl.load(limits + slot)
    return limit, (limit < (1.0 if MASS else vocab_size)) & (temperature > 0)


@triton.jit
def weight_at(place, MASS: tl.constexpr):
    """What a token adds to a sum: its probability in fixed point, or 1. int64, 0 below place 0."""
    weight = (place >= 0).to(tl.int64)
    if MASS:
        magnitude = -(tl.maximum(place, 0) >> ID_BITS).to(tl.int32) + FLOOR_BITS
        z = -magnitude.to(tl.float32, bitcast=True)
        weight *= ((tl.exp(z.to(tl.float64)) * FIXED_POINT + TO_INTEGER) - TO_INTEGER).to(tl.int64)
    return weight


@triton.jit
def pivots_between(low, high):
    return low + (high - low) * (tl.arange(0, NUM_PIVOTS).to(tl.float32) / NUM_PIVOTS)


@triton.jit
def bracket(
    sums, limit, few, low, row, num_rows, num_parts, num_rounds, MASS: tl.constexpr, ROOM: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """What that many rounds tell of z of the last token kept: it is in [low, high), and whether few tokens are.

    Float32 sums may mislead, which costs time, not truth: ``find_cut`` checks. Once tokens are few, there are no sums.
    """
    part = tl.arange(0, PADDED_PARTS)[:, None]
    pivot = tl.arange(0, NUM_PIVOTS)[None, :]
    high, needed = tl.full([], 1.0, tl.float32), limit.to(tl.float32)
    from_low, from_high = tl.full([], float("inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for index in range(num_rounds):
        if few == 0:
            at = ((index * num_rows + row) * num_parts + part) * NUM_PIVOTS + pivot
            weight = tl.sum(tl.load(sums + at, mask=part < num_parts, other=0.0), 0)  # from each pivot on
            if index == 0:
                from_low = tl.max(weight, 0)
                if MASS:  # p = 0 wants the most likely token
                    needed = tl.maximum(needed * from_low, 1.0 / FIXED_POINT)
            pivots = pivots_between(low, high)
            enough, short = weight >= needed * (1 + SUM_ERROR), weight < needed * (1 - SUM_ERROR)
            low = tl.max(tl.where(enough, pivots, low), 0)
            high = tl.min(tl.where(short, pivots, high), 0)
            from_low = tl.min(tl.where(enough, weight, from_low), 0)
            from_high = tl.max(tl.where(short, weight, from_high), 0)
            each_at_least = tl.exp(low) if MASS else 1.0
            few = (from_low - from_high <= ROOM * each_at_least).to(tl.int32)
    return low, high, few


@triton.jit
def first_bracket(
    lowest, top_k, slot, row, highest, temperature, num_parts, MASS: tl.constexpr, ROOM: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """The least z of a row, and whether so few tokens are left that there is nothing to narrow."""
    part = tl.arange(0, PADDED_PARTS)
    bottom = tl.min(tl.load(lowest + row * num_parts + part, mask=part < num_parts, other=float("inf")), 0)
    few = (tl.load(top_k + slot) <= ROOM).to(tl.int32) if MASS else 0
    return tl.maximum(scale(bottom, highest, temperature), FLOOR), few


@triton.jit(do_not_specialize=["num_rows", "num_parts", "num_rounds"], do_not_specialize_on_alignment=["slots"])
def weigh_pivots_kernel(
    logits, slots, temperatures, limits, top_k, best, best_id, cuts, lowest, sums, stride, vocab_size, part_size,
    num_rows, num_parts, num_rounds,
    MASS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """One program a row and part: the weight from each pivot on, pivots between the bounds of the rounds before."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    limit, on = limit_of(limits, slot, temperature, vocab_size, MASS)
    if on:
        highest, _ = best_of(best, best_id, row, num_parts, vocab_size, PADDED_PARTS)
        low, few = first_bracket(lowest, top_k, slot, row, highest, temperature, num_parts, MASS, ROOM, PADDED_PARTS)
        low, high, few = bracket(sums, limit, few, low, row, num_rows, num_parts, num_rounds, MASS, ROOM, PADDED_PARTS)
        if few == 0:
            pivots = pivots_between(low, high)
            cut = tl.load(cuts + row)
            last = tl.minimum((part + 1) * part_size, vocab_size)
            total = tl.zeros([NUM_PIVOTS, BLOCK], tl.float32)
            for start in range(part * part_size, last, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                z = scaled(logits + row * stride, ids, last, highest, temperature)
                z = tl.where(place_of(z, ids) >= cut, z, float("-inf"))
                weight = tl.exp(z) if MASS else tl.full([BLOCK], 1.0, tl.float32)
                total += tl.where(z[None, :] >= pivots[:, None], weight[None, :], 0.0)
            at = ((num_rounds * num_rows + row) * num_parts + part) * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS)
            tl.store(sums + at, tl.sum(total, 1))


@triton.jit(do_not_specialize=["num_rows", "num_parts"], do_not_specialize_on_alignment=["slots"])
def gather_kernel(
    logits, slots, temperatures, limits, top_k, best, best_id, cuts, lowest, sums, places, num_places, totals, above,
    stride, vocab_size, part_size, num_rows, num_parts,
    MASS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """One program a row and part: the places between the bounds, as many as there is room for, in any order; and the
    exact weight of all tokens and of those above the bounds."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    limit, on = limit_of(limits, slot, temperature, vocab_size, MASS)
    if on:
        highest, _ = best_of(best, best_id, row, num_parts, vocab_size, PADDED_PARTS)
        low, few = first_bracket(lowest, top_k, slot, row, highest, temperature, num_parts, MASS, ROOM, PADDED_PARTS)
        low, high, _ = bracket(sums, limit, few, low, row, num_rows, num_parts, NUM_ROUNDS, MASS, ROOM, PADDED_PARTS)
        cut = tl.load(cuts + row)
        last = tl.minimum((part + 1) * part_size, vocab_size)
        total, total_above = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        for start in range(part * part_size, last, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            z = scaled(logits + row * stride, ids, last, highest, temperature)
            place = place_of(z, ids)
            place = tl.where(place >= cut, place, -1)
            weight = weight_at(place, MASS)
            total += weight
            total_above += tl.where(z >= high, weight, 0)
            inside = ((place >= 0) & (z >= low) & (z < high)).to(tl.int32)
            count = tl.sum(inside, 0)
            if count > 0:
                at = tl.atomic_add(num_places + row, count, sem="relaxed") + tl.cumsum(inside, 0) - 1
                tl.store(places + row * ROOM + at, place, mask=(inside != 0) & (at < ROOM))
        tl.store(totals + row * num_parts + part, tl.sum(total, 0))
        tl.store(above + row * num_parts + part, tl.sum(total_above, 0))


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["slots"])
def find_cut_kernel(
    logits, slots, temperatures, limits, top_k, best, best_id, cuts, places, num_places, totals, above, stride,
    vocab_size, num_parts, MASS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """One program a row: the highest cut from which on there is enough weight, bit by bit.

    If the places gathered are too many, or not those around the cut, all of the row's are looked at for each bit.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    limit, on = limit_of(limits, slot, temperature, vocab_size, MASS)
    if on:
        part = tl.arange(0, PADDED_PARTS)
        total = tl.sum(tl.load(totals + row * num_parts + part, mask=part < num_parts, other=0), 0)
        known = tl.sum(tl.load(above + row * num_parts + part, mask=part < num_parts, other=0), 0)
        needed = tl.floor(limit * total.to(tl.float64)).to(tl.int64) if MASS else limit
        needed = tl.maximum(needed, 1)  # the most likely token always stays
        if total > needed:
            old_cut = tl.load(cuts + row)
            one = tl.full([], 1, tl.int64)
            cut, step = one * 0, one << (PLACE_BITS - 1)
            index = tl.arange(0, ROOM)
            count = tl.load(num_places + row)
            place = tl.load(places + row * ROOM + index, mask=index < count, other=-1)
            weight = weight_at(place, MASS)
            if (count <= ROOM) & (known < needed) & (known + tl.sum(weight, 0) >= needed):
                for _ in range(PLACE_BITS):
                    higher = cut | step
                    enough = known + tl.sum(tl.where(place >= higher, weight, 0), 0) >= needed
                    cut, step = tl.where(enough, higher, cut), step >> 1
            else:
                highest, _ = best_of(best, best_id, row, num_parts, vocab_size, PADDED_PARTS)
                for _ in range(PLACE_BITS):
                    higher = cut | step
                    from_here = tl.zeros([BLOCK], tl.int64)
                    for start in range(0, vocab_size, BLOCK):
                        ids = start + tl.arange(0, BLOCK)
                        z = scaled(logits + row * stride, ids, vocab_size, highest, temperature)
                        each = place_of(z, ids)
                        from_here += weight_at(tl.where(each >= tl.maximum(higher, old_cut), each, -1), MASS)
                    cut, step = tl.where(tl.sum(from_here, 0) >= needed, higher, cut), step >> 1
            tl.store(cuts + row, tl.maximum(cut, old_cut))
