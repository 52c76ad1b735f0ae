"""The reference: what any request must get, alone, uncached, recomputed in full for every token.

Contract: shares no code with the engine. The model is ``dense.DenseModel``, the sampler ``reference_sampler``, the ends
of a request are written down here once more. For the checkpoints of ``testing.models`` in float32.

The rule of equality: an engine's logits differ from the reference's by rounding. Where tokens first differ, the
reference's margin between the two, noise included, must be under 1e-5 of the logits' standard deviation; the request is
then cut there and counted (``Equality``): at most one in a thousand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from mini_infer.testing.dense import DenseModel
from mini_infer.testing.reference_sampler import Draw, draw

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from mini_infer.messages import EngineRequest
    from mini_infer.plan import TokenLogprobs
    from mini_infer.testing.engines import EngineOutput

MARGIN = 1e-5
"""Of the logits' standard deviation: closer calls may fall either way."""
CUTS_PER_REQUEST = 1e-3
LOGPROB_TOLERANCE = 1e-4
_CACHED_SEQUENCES = 512


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """What a request gets.

    Attributes:
        token_ids: its output, the token that ended it among them.
        finish_reason: ``stop`` or ``length``.
        stop_token_id: the token that ended it, if one did.
        logprobs: [num_output, vocab_size], over the raw logits.
        prompt_logprobs: [num_prompt - 1, vocab_size]; row i is about the prompt's token i + 1.
    """

    token_ids: list[int]
    finish_reason: str
    stop_token_id: int | None
    logprobs: NDArray[np.float64]
    prompt_logprobs: NDArray[np.float64]


class Reference:
    """One model's answers.

    Args:
        folder: of a ``tiny_checkpoint``.
        valid_vocab: ids from here on are unknown to the tokenizer and never drawn; None if there is no tokenizer.
    """

    def __init__(self, folder: str | Path, valid_vocab: int | None = None) -> None:
        self._model = DenseModel(folder)
        self._valid_vocab = valid_vocab
        self._logits_of = lru_cache(_CACHED_SEQUENCES)(self._compute)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """[len(token_ids), vocab_size], what follows each token."""
        return self._logits_of(tuple(token_ids))

    def _compute(self, token_ids: tuple[int, ...]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._model.logits(token_ids).numpy()
        return logits

    def generate(self, request: EngineRequest) -> ReferenceOutput:
        """Draw a request's tokens one by one, recomputing everything for each."""
        output: list[int] = []
        rows: list[NDArray[np.float64]] = []
        reason, stop_id = end_of(request, output)
        while reason is None:
            row = self.logits([*request.prompt_token_ids, *output])[-1]
            rows.append(log_softmax(row))
            output.append(self._draw(request, row, output).token_id)
            reason, stop_id = end_of(request, output)
        prompt_rows = log_softmax(self.logits(request.prompt_token_ids)[:-1])
        return ReferenceOutput(output, reason, stop_id, np.array(rows), prompt_rows)

    def check(self, request: EngineRequest, output: EngineOutput) -> bool:
        """Compare an engine's answer; an aborted one is compared as far as it goes.

        Given the tokens, one pass over the whole sequence gives what a pass for each token would.

        Returns:
            Whether it had to be cut at a call too close to tell.

        Raises:
            AssertionError: it is wrong; the message says where.
        """
        prompt, tokens = request.prompt_token_ids, output.token_ids
        ended = output.finish_reason, output.stop_token_id
        assert ended[0] in ("stop", "length", "abort"), _say(request, f"ended with {ended[0]}: {output.error}")
        logits = self.logits([*prompt, *tokens[:-1]])
        self._check_prompt(request, output, logits)
        if not self._check_tokens(request, output, logits[len(prompt) - 1 :]):
            return True
        for index in range(len(tokens)):
            reason = end_of(request, tokens[:index])[0]
            assert reason is None, _say(request, f"went on behind token {index - 1}, which ends it: {reason}")
        expected = end_of(request, tokens)
        assert ended[0] == "abort" or ended == expected, _say(
            request, f"ended with {ended}, not {expected}, after {len(tokens)} tokens"
        )
        return False

    def _check_tokens(self, request: EngineRequest, output: EngineOutput, raw: NDArray[np.float32]) -> bool:
        """False if it has to be cut."""
        tokens, num_top = output.token_ids, request.params.logprobs
        expected = 0 if num_top is None else len(tokens)
        got = len(output.logprobs)
        assert got == expected, _say(request, f"has {got} logprobs, not {expected}")
        for index, token in enumerate(tokens):
            drawn = self._draw(request, raw[index], tokens[:index])
            if drawn.token_id != token:
                lead = _lead(drawn, token) / float(raw[index].std())
                assert lead < MARGIN, _say(
                    request,
                    f"drew {token} as token {index} of {len(tokens)}, not {drawn.token_id}, which leads by {lead:.3g} "
                    "standard deviations of the logits",
                )
                return False
            if num_top is not None:
                check_logprobs(log_softmax(raw[index]), token, num_top, output.logprobs[index])
        return True

    def _check_prompt(self, request: EngineRequest, output: EngineOutput, logits: NDArray[np.float32]) -> None:
        prompt, count = request.prompt_token_ids, request.params.prompt_logprobs
        complete = output.finish_reason != "abort" or output.token_ids
        expected = len(prompt) - 1 if count is not None else 0
        got = len(output.prompt_logprobs)
        assert got == expected or (got < expected and not complete), _say(
            request, f"has {got} prompt logprobs, not {expected}"
        )
        for index, given in enumerate(output.prompt_logprobs):
            check_logprobs(log_softmax(logits[index]), prompt[index + 1], count or 0, given)

    def _draw(self, request: EngineRequest, row: NDArray[np.float32], output: Sequence[int]) -> Draw:
        history = [*request.prompt_token_ids, *output]
        num_prompt = len(request.prompt_token_ids)
        return draw(
            row, history, num_prompt, request.params, request.seed, len(history), request.choice, self._valid_vocab
        )


@cache
def _reference(folder: str, valid_vocab: int | None) -> Reference:
    return Reference(folder, valid_vocab)


def reference_of(folder: str | Path, valid_vocab: int | None = None) -> Reference:
    """The ``Reference`` of a folder, one a process."""
    return _reference(str(folder), valid_vocab)


def reference_generate(folder: str | Path, request: EngineRequest) -> ReferenceOutput:
    """What ``request`` gets from the model in ``folder``."""
    return reference_of(folder).generate(request)


@dataclass(slots=True)
class Equality:
    """Compares answers with a reference, and counts.

    Attributes:
        num_requests: compared.
        num_cuts: of them cut at a call too close to tell.
    """

    reference: Reference
    num_requests: int = 0
    num_cuts: int = 0

    def check(self, requests: Sequence[EngineRequest], outputs: Mapping[str, EngineOutput]) -> None:
        """Compare the answer to each request.

        Raises:
            AssertionError: one is wrong.
        """
        for request in requests:
            self.num_requests += 1
            self.num_cuts += self.reference.check(request, outputs[request.request_id])
        self.check_cuts()

    def check_cuts(self) -> None:
        """Raises: AssertionError: more than one request in a thousand had to be cut."""
        allowed = math.ceil(self.num_requests * CUTS_PER_REQUEST)
        assert self.num_cuts <= allowed, f"{self.num_cuts} of {self.num_requests} requests had to be cut"


def end_of(request: EngineRequest, output: Sequence[int]) -> tuple[str | None, int | None]:
    """Why a request with this output has ended, and the token that ended it; (None, None) if it goes on."""
    params = request.params
    assert params.max_tokens is not None
    if output and len(output) >= params.min_tokens:
        last = output[-1]
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
        if last in ends:
            return "stop", last
    return ("length", None) if len(output) >= params.max_tokens else (None, None)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def check_logprobs(row: NDArray[np.float64], token: int, num_top: int, given: TokenLogprobs) -> None:
    """Compare one position's log-probabilities with the reference's row [vocab_size], within 1e-4.

    Raises:
        AssertionError: one is wrong, or the list of most likely tokens is.
    """
    assert given.token_id == token, f"the log-probability is that of token {given.token_id}, not {token}"
    _close(given.logprob, row[token], f"token {token}")
    highest = 1 + int((row > row[token] + LOGPROB_TOLERANCE).sum())
    lowest = int((row >= row[token] - LOGPROB_TOLERANCE).sum())
    assert highest <= given.rank <= lowest, f"token {token} has rank {given.rank}, not {highest} to {lowest}"
    ids = [token_id for token_id, _ in given.top]
    assert len(ids) == len(set(ids)) == min(num_top, len(row)), f"{num_top} most likely tokens were asked for: {ids}"
    best = np.sort(row)[::-1]
    for place, (token_id, logprob) in enumerate(given.top):
        _close(logprob, row[token_id], f"token {token_id}")
        _close(logprob, best[place], f"the most likely token at place {place + 1}")


def _close(given: float, expected: float, what: str) -> None:
    assert abs(given - expected) <= LOGPROB_TOLERANCE, f"{what} has log-probability {expected:.6f}, not {given:.6f}"


def _lead(drawn: Draw, other: int) -> float:
    """By how much the drawn token beats another, noise and the limits of top-k, top-p and min-p counted."""
    return min(float(drawn.scores[drawn.token_id] - drawn.scores[other]), drawn.slack)


def _say(request: EngineRequest, what: str) -> str:
    return f"request {request.request_id} {what}\n  {request}"
