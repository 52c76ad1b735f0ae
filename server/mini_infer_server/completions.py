"""``/v1/completions``: its prompts, and the shapes of its answers.

Contract: as OpenAI's legacy API. ``echo`` puts the prompt before the text, as the client wrote it; with ``logprobs``
its tokens come first in every list, the very first one with null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from mini_infer_server.answers import AnswerHead, Usage, event
from mini_infer_server.errors import APIError
from mini_infer_server.token_text import TokenText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.frontend.text_request import TextRequest
    from mini_infer.outputs import CompletionOutput, Delta, PositionLogprobs
    from mini_infer.text.tokenizer import Tokenizer
    from mini_infer_server.requests import CompletionRequest


class Logprobs(msgspec.Struct):
    """Four lists, one entry a token each."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class Choice(msgspec.Struct):
    """One answer of several, or its part of a chunk."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, tag_field="object", tag="text_completion"):
    """The whole answer, or one event of a stream."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None


def read_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request: one text, several, one list of token ids, or several.

    Raises:
        APIError: it is none of these, or empty.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _bad_prompt("a text, a list of texts, a list of token ids or a list of such lists, and not empty")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if not all(isinstance(item, list) and all(type(i) is int for i in item) for item in prompt):
        raise _bad_prompt("all texts, or all token ids, or all lists of token ids")
    return list(prompt)


class CompletionForm:
    """The answer to one completion request."""

    def __init__(
        self, request: CompletionRequest, requests: Sequence[TextRequest], model: str, tokenizer: Tokenizer | None
    ) -> None:
        options = request.stream_options
        self._head = AnswerHead("cmpl-", model, requests)
        self._tokenizer, self._tokens = tokenizer, TokenText(tokenizer)
        self._include_usage = bool(options and (options.include_usage or options.continuous_usage_stats))
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._num_top = request.logprobs
        n = len(requests[0].engine_requests)
        echoes = {r.request_id: self._echo_text(r) for r in requests} if request.echo else {}
        self._echoes = [_Echo(r, echoes.get(r.request_id, "")) for r in requests for _ in range(n)]

    def event(self, delta: Delta) -> bytes:
        """As ``Form.event``."""
        index = self._head.stream(delta)
        echo = self._echoes[index]
        if delta.prompt_logprobs is not None:
            echo.positions += delta.prompt_logprobs
        if not (delta.text or delta.token_ids or delta.finish_reason):
            return b""
        logprobs = self._logprobs(echo, delta.token_ids, delta.logprobs, delta.text_offsets)
        text = delta.text if echo.sent else echo.text + delta.text
        echo.sent = True
        if not (text or logprobs or delta.finish_reason):
            return b""
        usage: Usage | UnsetType | None = UNSET
        if self._include_usage:
            usage = self._head.usage() if self._usage_always else None
        return event(self._completion([Choice(index, text, logprobs, delta.finish_reason)], usage))

    def closing(self) -> bytes:
        """As ``Form.closing``."""
        return event(self._completion([], self._head.usage())) if self._include_usage else b""

    def whole(self) -> Completion:
        """As ``Form.whole``."""
        choices: list[Choice] = []
        for request in self._head.requests:
            output = request.output()
            for choice in output.outputs:
                echo = self._echoes[len(choices)]
                echo.positions = output.prompt_logprobs or []
                choices.append(self._choice(len(choices), echo, choice))
        return self._completion(choices, self._head.usage())

    def _completion(self, choices: list[Choice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._head.id, self._head.created, self._head.model, choices, usage)

    def _choice(self, index: int, echo: _Echo, choice: CompletionOutput) -> Choice:
        logprobs = self._logprobs(echo, choice.token_ids, choice.logprobs, choice.text_offsets)
        return Choice(index, echo.text + choice.text, logprobs, choice.finish_reason)

    def _logprobs(
        self,
        echo: _Echo,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs] | None,
        offsets: Sequence[int] | None,
    ) -> Logprobs | None:
        if positions is None or offsets is None:
            return None
        all_ids = list(token_ids)
        all_positions: list[PositionLogprobs | None] = list(positions)
        all_offsets = [len(echo.text) + offset for offset in offsets]
        if echo.positions and not echo.sent:
            all_ids[:0] = echo.request.prompt_token_ids
            all_positions[:0] = echo.positions
            all_offsets[:0] = self._prompt_offsets(echo)
        return Logprobs(
            text_offset=all_offsets,
            token_logprobs=[None if p is None else p[i].logprob for i, p in zip(all_ids, all_positions, strict=True)],
            tokens=[self._text(token_id) for token_id in all_ids],
            top_logprobs=[None if p is None else self._top(p) for p in all_positions],
        )

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """The most likely tokens, and the one that stands there."""
        return {self._text(token_id): item.logprob for token_id, item in position.items()}

    def _text(self, token_id: int) -> str:
        return self._tokens.text(token_id, "bytes:")

    def _echo_text(self, request: TextRequest) -> str:
        if request.prompt is not None:
            return request.prompt
        return "" if self._tokenizer is None else self._tokenizer.decode(request.prompt_token_ids)

    def _prompt_offsets(self, echo: _Echo) -> list[int]:
        if self._tokenizer is None:
            return [0] * len(echo.request.prompt_token_ids)
        detokenizer, offset, offsets = self._tokenizer.detokenizer(), 0, []
        for token_id in echo.request.prompt_token_ids:
            offsets.append(min(offset, len(echo.text)))
            offset += len(detokenizer.push(token_id))
        return offsets


class _Echo:
    """The prompt's part in one choice."""

    def __init__(self, request: TextRequest, text: str) -> None:
        self.request = request
        self.text = text
        self.positions: list[PositionLogprobs | None] = []
        self.sent = False


def _bad_prompt(right: str) -> APIError:
    return APIError(400, f"prompt must be {right}", param="prompt")
