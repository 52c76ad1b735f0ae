"""The noise of sampling: one function of (seed, token id, position, choice), the same on every device.

Contract: x_t = argmax over v of (l_t(v) / T + g), with g = -ln(-ln u), u = (w + 1/2) / 2^32, and w the first word of
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) with::

    key      seed, low word                seed, high word
    counter  token id      t (index in prompt + output)      choice (0 is the same as n = 1)      0

So a token's noise depends on neither the batch, the row, the step, nor on which other tokens are candidates, and may
be computed for a few candidates only. The words are exact integers. Torch has no unsigned 64-bit arithmetic, so words
ride in int64: products wrap as unsigned ones do, and what the arithmetic right shift smears is masked away. u and both
logarithms are float64 (u, of 33 bits, is exact and never 0 or 1) and g is rounded to float32 once, at the end: float64
logarithms of different libraries may differ in their last bit, which float32 all but never shows. Of all 2^32 words, a
Xeon and an H200 gave one g that differs, by one unit in the last place.
"""

import secrets

import numpy as np
import torch

NOISE_MAX = 22.8739  # no g is larger: -ln(-ln(1 - 2^-33)) = 33 ln 2 = 22.87386

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9  # golden ratio
_WEYL_1 = 0xBB67AE85  # square root of 3, minus 1
_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10
_NUM_BROADCAST_ROUNDS = 3

# Lanes per block: on a CPU a thread's temporaries stay in its L2 cache; on a GPU they stay small beside the logits.
_CPU_BLOCK = 1 << 15
_GPU_BLOCK = 1 << 22

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def derive_seed(seed: int | None) -> int:
    """The unsigned 64-bit seed of a request: a client's signed one in two's complement, or a fresh secret one."""
    return secrets.randbits(64) if seed is None else seed % (1 << 64)


def as_int64(seed: int) -> int:
    """An unsigned 64-bit seed as the signed value that an int64 tensor can hold (two's complement)."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10: four 32-bit words of output for each counter and key. Tensors int64, broadcast."""
    x0, x1, x2, x3 = _rounds(counter, key, _NUM_ROUNDS)
    return x0, x1 & _WORD, x2, x3 & _WORD


def uniform(
    seeds: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor
) -> torch.Tensor:
    """u in (0, 1), float64, for arguments int64 that broadcast with each other.

    Args:
        seeds: unsigned 64-bit seeds in two's complement.
        token_ids: 0 <= id < 2^32.
        positions: t, the index in prompt + output of the token to be drawn.
        choices: which of a request's ``n`` choices.
    """
    key = (seeds & _WORD, (seeds >> 32) & _WORD)
    word = _rounds((token_ids, positions, choices, torch.zeros_like(choices)), key, _NUM_ROUNDS)[0]
    return word.to(torch.float64).add_(0.5).mul_(2.0**-32)


def gumbel(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    *,
    vocab_size: int | None = None,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """g [num_rows, num_candidates] float32, of every token below ``vocab_size`` or of ``token_ids``.

    Args:
        seeds: [num_rows] int64, as for ``uniform``.
        positions: [num_rows] int64.
        choices: [num_rows] int64.
        vocab_size: number of candidates, ids 0, 1, 2, ...; or
        token_ids: [num_rows, num_candidates] or [1, num_candidates] int64.
    """
    if token_ids is None:
        token_ids = torch.arange(vocab_size or 0, device=seeds.device)[None]
    num_rows, num_candidates = seeds.shape[0], token_ids.shape[1]
    block = _GPU_BLOCK if seeds.device.type == "cuda" else _CPU_BLOCK * torch.get_num_threads()
    width = max(1, min(num_candidates, block))
    height = max(1, block // width)
    noise = torch.empty((num_rows, num_candidates), dtype=torch.float32, device=seeds.device)
    for top in range(0, num_rows, height):
        rows = slice(top, top + height)
        seed, position, choice = seeds[rows, None], positions[rows, None], choices[rows, None]
        for left in range(0, num_candidates, width):
            columns = slice(left, left + width)
            ids = token_ids[:, columns] if token_ids.shape[0] == 1 else token_ids[rows, columns]
            noise[rows, columns] = uniform(seed, ids, position, choice).log_().neg_().log_().neg_()
    return noise


def _rounds(counter: Words, key: tuple[torch.Tensor, torch.Tensor], num_rounds: int) -> Words:
    """Philox rounds. Words 1 and 3 come back with bits above the 32nd: they are only ever xored and then masked.

    While operands are small they keep their own shapes: with token ids [1, n] and the rest [m, 1], two of the first
    three rounds cost next to nothing. The others run in place in five buffers.
    """
    x0, x1, x2, x3 = counter
    key0, key1 = key
    for _ in range(_NUM_BROADCAST_ROUNDS):
        product0, product1 = x0 * _MULTIPLIER_0, x2 * _MULTIPLIER_1
        x0, x2 = ((product1 >> 32) ^ (x1 ^ key0)) & _WORD, ((product0 >> 32) ^ (x3 ^ key1)) & _WORD
        x1, x3 = product1, product0
        key0, key1 = (key0 + _WEYL_0) & _WORD, (key1 + _WEYL_1) & _WORD
    shape = np.broadcast_shapes(x0.shape, x1.shape, x2.shape, x3.shape)
    x0, x1, x2, x3 = (x.expand(shape).contiguous() for x in (x0, x1, x2, x3))
    high = torch.empty_like(x0)
    for _ in range(num_rounds - _NUM_BROADCAST_ROUNDS):
        product0, product1 = x0.mul_(_MULTIPLIER_0), x2.mul_(_MULTIPLIER_1)
        x0 = x1.bitwise_xor_(torch.bitwise_right_shift(product1, 32, out=high)).bitwise_xor_(key0).bitwise_and_(_WORD)
        x2 = x3.bitwise_xor_(torch.bitwise_right_shift(product0, 32, out=high)).bitwise_xor_(key1).bitwise_and_(_WORD)
        x1, x3 = product1, product0
        key0, key1 = (key0 + _WEYL_0) & _WORD, (key1 + _WEYL_1) & _WORD
    return x0, x1, x2, x3
