"""A request between text and tokens: what the engine was asked, and what its tokens mean as text.

Contract: ``take`` gets a choice's ``TokenDelta``s in order and gives deltas of text. A token comes out together with
its text: while a stop string may be starting, its tokens wait too. Tokens after a stop string are discarded.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mini_infer.outputs import (
    MOST_UNLIKELY,
    CompletionOutput,
    Delta,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from mini_infer.text.stop import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.messages import EngineRequest, FinishReason, TokenDelta
    from mini_infer.plan import TokenLogprobs
    from mini_infer.sampling_params import SamplingParams
    from mini_infer.text.detokenizer import Detokenizer
    from mini_infer.text.tokenizer import Tokenizer


class TextRequest:
    """One prompt and its ``n`` choices; made by ``Frontend``, which has checked everything.

    Attributes:
        request_id: the client's or a drawn one.
        prompt: its text, if it came as text.
        prompt_token_ids: as the model sees it.
        params: as asked, ``max_tokens`` clamped.
        engine_requests: one a choice; their ids are ``<request_id>-<choice>``.
    """

    def __init__(
        self,
        prompt: str | None,
        params: SamplingParams,
        engine_requests: Sequence[EngineRequest],
        *,
        request_id: str,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = engine_requests[0].prompt_token_ids
        self.params = params
        self.engine_requests = engine_requests
        self.metrics = RequestMetrics(time.monotonic())
        self.num_cached_tokens = 0
        self._choices = [_Choice(self, index, tokenizer) for index in range(len(engine_requests))]
        self._num_open = len(self._choices)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    def take(self, index: int, new: TokenDelta) -> Delta | None:
        """New tokens of choice ``index``; what they made certain, if anything.

        A delta that ends the choice while ``new`` does not means: the engine is to be told to abort it.
        """
        if self._choices[index].finish_reason is not None:
            return None
        if index == 0:
            self.num_cached_tokens = max(self.num_cached_tokens, new.num_cached_tokens)
        if new.token_ids and self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
        return self._noted(self._choices[index].take(new))

    def abort(self) -> list[Delta]:
        """End every open choice; their last deltas."""
        ended = [choice.end("abort") for choice in self._choices if choice.finish_reason is None]
        for delta in ended:
            self._noted(delta)
        return ended

    def output(self) -> RequestOutput:
        """The answer as far as it has come."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._choices[0].prompt_logprobs,
            outputs=[choice.output() for choice in self._choices],
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )

    def num_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(len(choice.token_ids) for choice in self._choices)

    def _noted(self, delta: Delta | None) -> Delta | None:
        if delta is not None and delta.finish_reason is not None:
            self._num_open -= 1
            if self._num_open == 0:
                self.metrics.finished_time = time.monotonic()
        return delta


class _Token(NamedTuple):
    """A token whose text is not out yet: where its text starts and ends, in characters of the choice's text."""

    token_id: int
    logprobs: PositionLogprobs | None
    start: int
    end: int


class _Choice:
    """One choice: tokens in, text out."""

    def __init__(self, request: TextRequest, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self._request, self._index, self._params, self._tokenizer = request, index, params, tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens, prompt_token_ids=request.prompt_token_ids
            )
        self._stops = StopMatcher(params.stop_strings, include_stop_str_in_output=params.include_stop_str_in_output)
        self._held: deque[_Token] = deque()
        self._num_pushed = 0  # tokens
        self._num_decoded = 0  # characters
        self._num_given = 0  # characters
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._text_offsets: list[int] = []
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._error: str | None = None

    def take(self, new: TokenDelta) -> Delta | None:
        text = ""
        last = len(new.token_ids) - 1
        for i, token_id in enumerate(new.token_ids):
            shown = not (i == last and new.finish_reason == "stop") or self._params.include_stop_str_in_output
            text += self._push(token_id, new.logprobs[i] if new.logprobs else None, shown)
            if self._stops.matched is not None:
                break
        finish = new.finish_reason
        if finish is not None and self._stops.matched is None:
            text += self._flush()
        self._error = new.error
        if self._stops.matched is not None:
            finish, self._stop_reason = "stop", self._stops.matched
        elif finish == "stop" and new.stop_token_id in self._params.stop_token_ids:
            self._stop_reason = new.stop_token_id
        return self._delta(text, finish, self._prompt_part(new.prompt_logprobs))

    def end(self, reason: FinishReason) -> Delta:
        """End now; what was held back comes out."""
        delta = self._delta(self._flush(), reason, None)
        assert delta is not None  # it has a finish reason
        return delta

    def output(self) -> CompletionOutput:
        logprobs = self.logprobs
        return CompletionOutput(
            index=self._index,
            text="".join(self._text),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=logprobs,
            text_offsets=None if logprobs is None else self._text_offsets,
            cumulative_logprob=None if logprobs is None else sum(next(iter(p.values())).logprob for p in logprobs),
            error=self._error,
        )

    def _push(self, token_id: int, logprobs: TokenLogprobs | None, shown: bool) -> str:
        self._num_pushed += 1
        piece = self._detokenizer.push(token_id) if shown and self._detokenizer is not None else ""
        start, self._num_decoded = self._num_decoded, self._num_decoded + len(piece)
        # Before min_tokens a stop string does nothing, so it does not even see the text.
        given = self._stops.push(piece) if self._num_pushed >= self._params.min_tokens else piece
        self._num_given += len(given)
        self._held.append(_Token(token_id, self._position(logprobs), start, self._num_decoded))
        return given

    def _flush(self) -> str:
        tail = self._detokenizer.flush() if self._detokenizer is not None else ""
        self._num_decoded += len(tail)
        text = self._stops.push(tail) if self._num_pushed >= self._params.min_tokens else tail
        text += self._stops.flush()
        self._num_given += len(text)
        return text

    def _delta(
        self, text: str, finish: FinishReason | None, prompt_logprobs: list[PositionLogprobs | None] | None
    ) -> Delta | None:
        ready: list[_Token] = []
        while self._held and (finish is not None or self._held[0].end <= self._num_given):
            ready.append(self._held.popleft())
        if not ready and not text and finish is None and prompt_logprobs is None:
            return None
        delta = Delta(
            request_id=self._request.request_id,
            index=self._index,
            text=text,
            token_ids=[token.token_id for token in ready],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
            num_cached_tokens=self._request.num_cached_tokens,
        )
        if self.logprobs is not None:
            delta.logprobs = [token.logprobs or {} for token in ready]
            delta.text_offsets = [min(token.start, self._num_given) for token in ready]
            self.logprobs += delta.logprobs
            self._text_offsets += delta.text_offsets
        if finish is not None:
            self.finish_reason = finish
            delta.stop_reason, delta.error = self._stop_reason, self._error
        self._text.append(text)
        self.token_ids += delta.token_ids
        return delta

    def _prompt_part(self, new: Sequence[TokenLogprobs]) -> list[PositionLogprobs | None] | None:
        if not new and (self._params.prompt_logprobs is None or self.prompt_logprobs is not None):
            return None
        part: list[PositionLogprobs | None] = [self._position(item) for item in new]
        if self.prompt_logprobs is None:
            part.insert(0, None)  # nothing predicts the first token
            self.prompt_logprobs = []
        self.prompt_logprobs += part
        return part

    def _position(self, item: TokenLogprobs | None) -> PositionLogprobs | None:
        """The token first, then the most likely ones; a token's number is the same float wherever it stands."""
        if item is None:
            return None
        text = self._tokenizer.token_text if self._tokenizer is not None else lambda _: None
        rank = next((i for i, (top_id, _) in enumerate(item.top, 1) if top_id == item.token_id), item.rank)
        position = {item.token_id: Logprob(max(item.logprob, MOST_UNLIKELY), rank, text(item.token_id))}
        for i, (top_id, value) in enumerate(item.top, 1):
            if top_id != item.token_id:
                position[top_id] = Logprob(max(value, MOST_UNLIKELY), i, text(top_id))
        return position
