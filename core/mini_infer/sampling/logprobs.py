"""Log-probabilities of tokens: over the full width of the raw logits, before any mask, penalty or temperature.

Contract: one float32 log-softmax a row, from which every number is read, so a token has the same log-probability as the
token drawn and among the most likely ones. The most likely are ordered by falling logit, among equals by rising id.
Everything is packed into one tensor on the device (``pack_logprobs``), so one transfer brings a step's answer, when it
suits the caller; ``unpack_logprobs`` reads it on the host.
"""

from typing import TYPE_CHECKING

import torch

from mini_infer.plan import TokenLogprobs
from mini_infer.sampling.truncation import most_likely

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCK = 1 << 25  # elements of float32 temporaries at once (128 MiB): scoring a prompt may bring thousands of rows


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: "Sequence[int]") -> list[TokenLogprobs]:
    """Log-probability, rank and most likely tokens of each row.

    Args:
        logits: [num_rows, vocab_size], raw, any floating dtype; not changed.
        token_ids: [num_rows] int64, the token of interest in each row.
        num_top: [num_rows] on the host, how many most likely tokens each row lists.
    """
    if not num_top:
        return []
    return unpack_logprobs(pack_logprobs(logits, token_ids, max(num_top)), num_top)


def pack_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """What ``unpack_logprobs`` reads: [num_rows, 3 + 2 * num_top] float64 on the logits' device.

    Columns: token id, its log-probability, its rank, ids of the most likely tokens, their log-probabilities (ids and
    float32 are exact in float64).
    """
    num_top = min(num_top, logits.shape[1])
    step = max(1, _BLOCK // logits.shape[1])
    blocks = [slice(first, first + step) for first in range(0, logits.shape[0], step)]
    return torch.cat([_pack_block(logits[block], token_ids[block], num_top) for block in blocks])


def _pack_block(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    logits = logits.float()
    logprobs = logits.log_softmax(dim=1)
    chosen = token_ids[:, None]
    rank = (logits > logits.gather(1, chosen)).sum(dim=1, keepdim=True) + 1
    columns = [chosen, logprobs.gather(1, chosen), rank]
    if num_top:
        top_ids, _ = most_likely(logits, num_top)
        columns += [top_ids, logprobs.gather(1, top_ids)]
    return torch.cat([column.to(torch.float64) for column in columns], dim=1)


def unpack_logprobs(packed: torch.Tensor, num_top: "Sequence[int]") -> list[TokenLogprobs]:
    """One ``TokenLogprobs`` a row of ``pack_logprobs``'s tensor, each with its own number of most likely tokens."""
    widest = (packed.shape[1] - 3) // 2
    answers = []
    for row, count in zip(packed.tolist(), num_top, strict=True):
        top = zip(map(int, row[3 : 3 + min(count, widest)]), row[3 + widest :], strict=False)
        answers.append(TokenLogprobs(token_id=int(row[0]), logprob=row[1], rank=int(row[2]), top=list(top)))
    return answers
