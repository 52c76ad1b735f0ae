"""What comes back to a user: whole answers and streamed pieces, named as vLLM's offline users know them.

Contract: ``token_ids`` and ``logprobs`` are aligned one to one and hold every token that counts, the one that ended
the answer among them; ``text`` is cut at stop strings and never holds half a character. The deltas of a choice, joined
in order, are its ``CompletionOutput``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from mini_infer.messages import FinishReason

MOST_UNLIKELY = -9999.0
"""Stands for a log-probability of minus infinity, which JSON cannot write."""


class Logprob(msgspec.Struct, frozen=True):
    """One token's log-probability at one position, over the full width of the logits, before any masking.

    Attributes:
        logprob: natural logarithm.
        rank: 1 is the most likely.
        decoded_token: the token's own text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""The token at a position first, then the most likely ones there, best first, as many as were asked for."""


class Delta(msgspec.Struct, kw_only=True):
    """What became certain of one choice.

    Attributes:
        request_id: the request's.
        index: which of its ``n`` choices, from 0.
        text: new text; may be empty while a stop string or a character is incomplete.
        token_ids: new tokens.
        logprobs: one a new token, if asked for.
        text_offsets: where each new token starts in the choice's text, if logprobs were asked for.
        prompt_logprobs: for the next positions of the prompt, if asked for; the first position has None.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``, on the last delta of the choice only.
        stop_reason: the stop string, or the id from ``stop_token_ids``, that ended it; None for EOS.
        num_cached_tokens: tokens of the prompt that were not computed again.
        error: one plain line when ``finish_reason`` is ``error``.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] | None = None
    text_offsets: list[int] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice, whole or as far as it has come. Attributes as those of ``Delta``.

    ``cumulative_logprob`` is the sum over ``token_ids``, if logprobs were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[PositionLogprobs] | None = None
    text_offsets: list[int] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of ``time.monotonic``."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end of the last choice."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """An answer.

    Attributes:
        request_id: the request's.
        prompt: the prompt's text; None if token ids were given.
        prompt_token_ids: the prompt as the model saw it.
        prompt_logprobs: one a position of the prompt, None for the first; None if not asked for.
        outputs: the ``n`` choices.
        num_cached_tokens: tokens of the prompt that were not computed again.
        metrics: when things happened.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.outputs)
