"""Top-k, top-p and min-p: which tokens of a row may be drawn.

Contract, for one row of scaled logits z = (l - max l) / T, tokens ordered by falling z and, among equals, rising id:

1. top-k keeps the first k.
2. top-p (Holtzman et al., arXiv 1904.09751) keeps, of the distribution over what is left, the shortest prefix whose
   probability reaches p, and always the first token: p = 0 keeps that one alone, p = 1 all.
3. min-p (arXiv 2407.01082) drops tokens with z < ln(min_p), that is, less likely than min_p times the most likely;
   min_p = 1 keeps ties with it only.

The order is that of transformers and vLLM. Probabilities are summed in fixed point (integers, held exactly by float64):
such sums do not depend on their order, so a row keeps the same tokens in any batch, on any device, however many
candidates were looked at beside its own.
"""

import torch
from torch.nn.functional import pad

_FIXED_POINT = 2.0**34  # the weight of the most likely token; float64 sums 2^19 tokens of it exactly
_MAX_BLOCK = 64


def truncate(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, *, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most likely tokens of each row and which of them may be drawn.

    Args:
        scaled: [num_rows, vocab_size] float32, z.
        top_k: [num_rows] int64; ``vocab_size`` is off.
        top_p: [num_rows] float64; 1 is off.
        min_p: [num_rows] float32; 0 is off.
        num_candidates: how many tokens to look at.

    Returns:
        ``token_ids`` [num_rows, num_candidates] int64, ``values`` of the same shape, z of each, -inf if it may not be
        drawn, and ``complete`` [num_rows] bool: whether no token beyond the candidates might be drawn.
    """
    vocab_size = scaled.shape[1]
    token_ids, values = most_likely(scaled, num_candidates)
    in_top_k = torch.arange(num_candidates, device=scaled.device) < top_k[:, None]
    weights = _weights(values) * in_top_k
    up_to = weights.cumsum(dim=1)
    total = up_to[:, -1]
    if num_candidates < vocab_size:
        total = torch.where(top_k < vocab_size, total, _weights(scaled).sum(dim=1))
    # Rounded down, three of ten equal tokens reach 0.3 although 0.3 is no binary fraction.
    needed = torch.where(top_p < 1.0, (top_p * total).floor_(), torch.inf)[:, None]
    keep = (up_to - weights < needed) & in_top_k & (values >= min_p.log()[:, None])
    keep[:, 0] = True
    complete = (top_k <= num_candidates) | ((top_k == vocab_size) & (up_to[:, -1] >= needed[:, 0]))
    return token_ids, values.masked_fill_(~keep, -torch.inf), complete


def most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and values [num_rows, count] of the largest float32 scores, falling; among equals the lower id first.

    The vocabulary is cut into blocks. The ``count`` largest tokens are in the ``count`` blocks with the largest maxima:
    each of these holds a token that goes before every token of the other blocks. So few tokens are ever sorted.
    """
    num_rows, vocab_size = scores.shape
    if count == vocab_size:
        values, token_ids = scores.sort(dim=1, descending=True, stable=True)
        return token_ids, values
    width = min(_MAX_BLOCK, vocab_size // (4 * count))
    if width < 2:
        return _top(scores, torch.arange(vocab_size, device=scores.device).expand_as(scores), count)
    num_blocks = -(-vocab_size // width)
    scores = pad(scores, (0, num_blocks * width - vocab_size), value=-torch.inf)
    maxima = scores.reshape(num_rows, num_blocks, width).amax(dim=2)
    blocks, _ = _top(maxima, torch.arange(num_blocks, device=scores.device).expand_as(maxima), count)
    token_ids = (blocks[:, :, None] * width + torch.arange(width, device=scores.device)).view(num_rows, count * width)
    return _top(scores.gather(1, token_ids), token_ids, count)


def _top(values: torch.Tensor, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and values [num_rows, count] of the largest float32 ``values``; among equals the lower id first."""
    # One int64 each, value in the high word, falling id in the low one: all differ, so top-k has one answer.
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that compare as the floats do
    keys = (ordered.to(torch.int64) << 32).bitwise_or_(0xFFFFFFFF - ids)
    where = keys.topk(count, dim=1).indices
    return ids.gather(1, where), values.gather(1, where)


def _weights(scaled: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities in fixed point, float64 with integer values."""
    return scaled.to(torch.float64).exp_().mul_(_FIXED_POINT).round_()
