"""The Triton kernels: each step of drawing, for all rows at once, with every row cut into parts that fill the card.

Contract: the reference's tokens. z = (l - max l) / T and every comparison are the reference's own float32 operations,
rounded as they are (launch with ``enable_fp_fusion=False``); probabilities are summed as the same integers; the noise
is the same. A token's *place* is one integer that orders tokens as truncation does (falling z, among equals rising id),
so what top-k and top-p leave is "every place from a cut on", ties at the boundary and all::

    place    FLOOR's bits - |z|'s bits (31) | last id - id (22)       below 0 where z < FLOOR: such a token never wins

    best_of_part            max l and its lowest id, of each part      greedy rows: best_of_row, and done
    penalise, bias          before that, if any row has them
    cut_kernels             top-k and top-p, if any row has them: the place from which on tokens are kept
    draw_from_part          z + g of all tokens that may be drawn, roughly
    draw_from_row           z + g exactly, of the few blocks that hold the largest

Numbers that change from step to step, and the alignment of what is cut out of an upload, cause no new compilation.
"""

import triton
import triton.language as tl

# The most likely token, z = 0, scores at least -ln(33 ln 2) = -3.13; no noise is above 33 ln 2 = 22.88.
FLOOR = tl.constexpr(-27.0)
FLOOR_BITS = tl.constexpr(0x41D80000)
ID_BITS = tl.constexpr(22)
LAST_ID = tl.constexpr((1 << 22) - 1)
LARGEST = tl.constexpr(3.4028234663852886e38)

SCORE_ERROR = tl.constexpr(1e-3)  # more than ``rough_gumbel`` is off


# -- the most likely token ---------------------------------------------------------------------------------------------


@triton.jit
def best_of_part_kernel(
    logits, invalid, best, best_id, fine, lowest, stride, vocab_size, part_size,
    INVALID: tl.constexpr, DRAW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row and part. ``DRAW`` gives the lowest logit too, and writes -inf for invalid tokens."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * part_size
    last = tl.minimum(first + part_size, vocab_size)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    where = first + lane
    bottom = tl.full([BLOCK], float("inf"), tl.float32)
    all_fine = tl.full([BLOCK], 1, tl.int32)
    for start in range(first, last, BLOCK):
        ids = start + lane
        exists = ids < last
        value = tl.load(logits + row * stride + ids, mask=exists, other=0.0).to(tl.float32)
        all_fine &= (tl.abs(value) < float("inf")).to(tl.int32)
        value = tl.where(exists, value, float("-inf"))
        if INVALID:
            hidden = tl.load(invalid + ids, mask=exists, other=0) != 0
            value = tl.where(hidden, float("-inf"), value)
            if DRAW:
                tl.store(logits + row * stride + ids, value, mask=hidden)
        better = value > top
        top = tl.where(better, value, top)
        where = tl.where(better, ids, where)
        if DRAW:
            bottom = tl.where((value > float("-inf")) & (value < bottom), value, bottom)
    highest = tl.max(top, 0)
    at = row * tl.num_programs(1) + part
    tl.store(best + at, highest)
    tl.store(best_id + at, tl.min(tl.where(top == highest, where, vocab_size), 0))
    tl.store(fine + at, tl.min(all_fine, 0))
    if DRAW:
        tl.store(lowest + at, tl.min(bottom, 0))


@triton.jit
def best_of(best, best_id, row, num_parts, vocab_size, PADDED_PARTS: tl.constexpr):
    """Max l of a row and the lowest id that has it."""
    part = tl.arange(0, PADDED_PARTS)
    exists = part < num_parts
    value = tl.load(best + row * num_parts + part, mask=exists, other=float("-inf"))
    ids = tl.load(best_id + row * num_parts + part, mask=exists, other=vocab_size)
    highest = tl.max(value, 0)
    return highest, tl.min(tl.where(value == highest, ids, vocab_size), 0)


@triton.jit(do_not_specialize=["num_parts"])
def best_of_row_kernel(best, best_id, fine, tokens, ok, num_parts, vocab_size, PADDED_PARTS: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    _, token = best_of(best, best_id, row, num_parts, vocab_size, PADDED_PARTS)
    tl.store(tokens + row, token.to(tl.int64))
    part = tl.arange(0, PADDED_PARTS)
    tl.store(ok + row, tl.min(tl.load(fine + row * num_parts + part, mask=part < num_parts, other=1), 0) != 0)


# -- penalties and bias, in place --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_drafts", "draft_stride"], do_not_specialize_on_alignment=["slots", "drafts"])
def penalise_kernel(
    logits, slots, drafts, repetition, presence, frequency, output_counts, prompt_mask,
    stride, draft_stride, num_drafts, vocab_size, part_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row and part; rows without penalties end at once."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    by_repetition = tl.load(repetition + slot)
    by_presence, by_frequency = tl.load(presence + slot), tl.load(frequency + slot)
    if (by_repetition != 1.0) | (by_presence != 0.0) | (by_frequency != 0.0):
        first = part * part_size
        last = tl.minimum(first + part_size, vocab_size)
        for start in range(first, last, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            exists = ids < last
            count = tl.load(output_counts + slot * vocab_size + ids, mask=exists, other=0)
            for index in range(num_drafts):
                count += (ids == tl.load(drafts + row * draft_stride + index)).to(tl.int32)
            seen = (count > 0) | (tl.load(prompt_mask + slot * vocab_size + ids, mask=exists, other=0) != 0)
            value = tl.load(logits + row * stride + ids, mask=seen, other=0.0)
            value = tl.where(value > 0, tl.div_rn(value, by_repetition), value * by_repetition)
            value -= count.to(tl.float32) * by_frequency
            value -= tl.minimum(count, 1).to(tl.float32) * by_presence
            tl.store(logits + row * stride + ids, value, mask=seen & exists)


@triton.jit
def bias_kernel(logits, slots, bias_ids, bias_values, stride, WIDTH: tl.constexpr):
    """One program a row. What pads a slot's bias is 0."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(slots + row) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(bias_values + at)
    token = logits + row * stride + tl.load(bias_ids + at)
    tl.store(token, tl.load(token, mask=value != 0.0, other=0.0) + value, mask=value != 0.0)


# -- what a token is worth ---------------------------------------------------------------------------------------------


@triton.jit
def scale(value, highest, temperature):
    """z = (l - max l) / T."""
    return tl.div_rn(value - tl.minimum(tl.maximum(highest, -LARGEST), LARGEST), temperature)


@triton.jit
def scaled(logits, ids, last, highest, temperature):
    """z of some tokens; -inf from ``last`` on."""
    return scale(tl.load(logits + ids, mask=ids < last, other=float("-inf")), highest, temperature)


@triton.jit
def place_of(z, ids):
    """See the module."""
    magnitude = tl.abs(z).to(tl.int32, bitcast=True)
    return ((-magnitude + FLOOR_BITS).to(tl.int64) << ID_BITS) | (ids ^ LAST_ID)


# -- the token ---------------------------------------------------------------------------------------------------------


@triton.jit
def word_of(ids, seed, position, choice):
    """The word that a token's noise is made of: uint32, as ``mini_infer.sampling.noise`` has it.

    ``tl.philox`` gives the same; there each product takes two multiplications, of its high word and of its low word.
    """
    x0, x1, x2, x3 = ids.to(tl.uint32), position.to(tl.uint32), choice.to(tl.uint32), choice.to(tl.uint32) * 0
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        product0, product1 = x0.to(tl.uint64) * 0xD2511F53, x2.to(tl.uint64) * 0xCD9E8D57
        x0, x2 = (product1 >> 32).to(tl.uint32) ^ x1 ^ key0, (product0 >> 32).to(tl.uint32) ^ x3 ^ key1
        x1, x3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    return x0


@triton.jit
def exact_gumbel(word):
    """g, as the reference computes it."""
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(u))).to(tl.float32)


@triton.jit
def rough_gumbel(word):
    """g in float32, off by less than SCORE_ERROR: near 1, where float32 cannot tell u apart, by way of 1 - u."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    minus_log = tl.where(rest < 0.02, rest * (1 + rest * (0.5 + rest * 0.33333334)), -tl.log(u))
    return -tl.log(minus_log)


@triton.jit
def least_scaled(min_p):
    """The least z that min-p leaves; -inf if it is off."""
    least = float("-inf")
    if min_p > 0:
        least = tl.log(min_p.to(tl.float64)).to(tl.float32)
    return least


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["slots", "positions"])
def draw_from_part_kernel(
    logits, slots, positions, temperatures, min_p, seeds, choices, best, best_id, cuts, rough, stride, vocab_size,
    part_size, num_parts, num_blocks, CUT: tl.constexpr, BLOCK: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """One program a row and part: for each block of tokens, about the largest z + g of those that may be drawn."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    if temperature > 0:
        highest, _ = best_of(best, best_id, row, num_parts, vocab_size, PADDED_PARTS)
        least = least_scaled(tl.load(min_p + slot))
        cut = tl.load(cuts + row) if CUT else 0
        seed, position, choice = tl.load(seeds + slot), tl.load(positions + row), tl.load(choices + slot)
        last = tl.minimum((part + 1) * part_size, vocab_size)
        for start in range(part * part_size, last, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            z = scaled(logits + row * stride, ids, last, highest, temperature)
            z = tl.where((place_of(z, ids) >= cut) & (z >= least), z, float("-inf"))
            top = tl.max(z, 0)
            if top >= FLOOR:
                top = tl.max(z + rough_gumbel(word_of(ids, seed, position, choice)), 0)
            tl.store(rough + row * num_blocks + start // BLOCK, top)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["slots", "positions"])
def draw_from_row_kernel(
    logits, slots, positions, temperatures, min_p, seeds, choices, best, best_id, cuts, rough, tokens, stride,
    vocab_size, num_parts, num_blocks,
    CUT: tl.constexpr, BLOCK: tl.constexpr, PADDED_PARTS: tl.constexpr, PADDED_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program a row: the token with the largest z + g; where T is 0 or nothing may be drawn, the most likely."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    highest, token = best_of(best, best_id, row, num_parts, vocab_size, PADDED_PARTS)
    if temperature > 0:
        least = least_scaled(tl.load(min_p + slot))
        cut = tl.load(cuts + row) if CUT else 0
        seed, position, choice = tl.load(seeds + slot), tl.load(positions + row), tl.load(choices + slot)
        index = tl.arange(0, PADDED_BLOCKS)
        about = tl.load(rough + row * num_blocks + index, mask=index < num_blocks, other=float("-inf"))
        could_win = (about >= tl.max(about, 0) - SCORE_ERROR) & (about > float("-inf"))
        block = tl.min(tl.where(could_win, index, num_blocks), 0)
        score = float("-inf")
        while block < num_blocks:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            z = scaled(logits + row * stride, ids, vocab_size, highest, temperature)
            may_be_drawn = (place_of(z, ids) >= cut) & (z >= least)
            noisy = tl.where(may_be_drawn, z + exact_gumbel(word_of(ids, seed, position, choice)), float("-inf"))
            top = tl.max(noisy, 0)
            token = tl.where(top > score, tl.min(tl.where(noisy == top, ids, vocab_size), 0), token)
            score = tl.maximum(top, score)
            block = tl.min(tl.where(could_win & (index > block), index, num_blocks), 0)
    tl.store(tokens + row, token.to(tl.int64))
