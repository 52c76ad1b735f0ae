"""Which drafts stand: draft d_t exactly if it is x_t, the token that would have been drawn there without it.

Contract: the first x_t that differs from its draft, or the one after the last draft, ends the step. As x_t is one
function of (seed, logits, history), the output is the same with any proposer and with none, and nothing need be known
of how a draft came about. All of it runs on the device; the host learns the result when it reads the step's output::

    drafts       d1   d2   d3              (-1 is no draft: it never stands)
    sampled      x1   x2   x3   x4         x2 was drawn as if d1 were output, x3 as if d1 d2 were, ...
    equal        yes  no   yes
    emitted      x1   x2   -1   -1         num_accepted = 1, last_token = x2
"""

from typing import TYPE_CHECKING

import torch

from mini_infer.sampling.state import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence


def accept(tokens: torch.Tensor, drafts: "Sequence[Sequence[int]]") -> tuple[torch.Tensor, torch.Tensor]:
    """Compare what was drawn with what was drafted on the host; the rows are those of ``SamplingRows``, in order.

    Args:
        tokens: [num_positions] int64, drawn: 1 + its drafts for each request, one after another.
        drafts: each request's drafts.

    Returns:
        As ``accept_matrix``.
    """
    sampled = pad_rows(tokens, [1 + len(d) for d in drafts])
    width = sampled.shape[1] - 1
    padded = to_device([t for d in drafts for t in (*d, *[-1] * (width - len(d)))], torch.int64, tokens.device)
    return accept_matrix(sampled, padded.view(len(drafts), width))


def accept_matrix(sampled: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare what was drawn with what was drafted, drafts on the device.

    Args:
        sampled: [num_rows, width] int64, x at the sampled position and after each draft; -1 padded.
        drafts: [num_rows, width - 1] int64, -1 padded.

    Returns:
        ``emitted`` [num_rows, width] int64, the accepted drafts and the token drawn after them, then -1; and
        ``num_accepted`` [num_rows] int64. ``last_tokens`` picks the drawn one.
    """
    stands = (drafts == sampled[:, :-1]) & (drafts >= 0)
    num_accepted = stands.to(torch.int64).cumprod(dim=1).sum(dim=1)
    columns = torch.arange(sampled.shape[1], device=sampled.device)
    return sampled.masked_fill(columns > num_accepted[:, None], -1), num_accepted


def last_tokens(emitted: torch.Tensor, num_accepted: torch.Tensor) -> torch.Tensor:
    """[num_rows] int64, the token that each row drew after its accepted drafts."""
    return emitted.gather(1, num_accepted[:, None])[:, 0]


def pad_rows(values: torch.Tensor, lengths: "Sequence[int]", width: int | None = None) -> torch.Tensor:
    """A flat tensor of consecutive runs as a matrix [num_rows, width], -1 padded.

    Tokens drawn come one after another, 1 + drafts for each request (``SamplingRows``); ``accept`` wants a row each.

    Args:
        values: [sum(lengths)] int64.
        lengths: [num_rows] on the host, 0 and more.
        width: columns; the longest row if None.
    """
    longest = max(lengths, default=0)
    width = longest if width is None else width
    if all(length == width for length in lengths):
        return values.view(len(lengths), width)
    cells = [row * width + column for row, length in enumerate(lengths) for column in range(length)]
    matrix = torch.full((len(lengths) * width,), -1, dtype=torch.int64, device=values.device)
    matrix[to_device(cells, torch.int64, values.device)] = values
    return matrix.view(len(lengths), width)
