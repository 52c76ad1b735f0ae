"""``/v1/chat/completions``: the shapes of its answers.

Contract: as OpenAI's. A stream opens each choice with its role, sends text as it becomes certain, and closes each
choice with exactly one chunk that has a ``finish_reason``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from mini_infer_server.answers import AnswerHead, Usage, event

if TYPE_CHECKING:
    from mini_infer.frontend.text_request import TextRequest
    from mini_infer.outputs import CompletionOutput, Delta, PositionLogprobs
    from mini_infer_server.requests import ChatRequest
    from mini_infer_server.token_text import TokenText


class TopLogprob(msgspec.Struct):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """A token of the answer, and the likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class Message(msgspec.Struct):
    """The assistant's turn."""

    role: str
    content: str
    refusal: None = None


class Choice(msgspec.Struct):
    """One answer of several."""

    index: int
    message: Message
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    """The whole answer."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: None = None


class DeltaMessage(msgspec.Struct):
    """What a chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """One choice's part of a chunk."""

    index: int
    delta: DeltaMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None


class ChatForm:
    """The answer to one chat request."""

    def __init__(self, request: ChatRequest, text_request: TextRequest, model: str, tokens: TokenText) -> None:
        options = request.stream_options
        self._head = AnswerHead("chatcmpl-", model, [text_request])
        self._tokens = tokens
        self._num_top = request.top_logprobs or 0
        self._include_usage = bool(options and (options.include_usage or options.continuous_usage_stats))
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._opened: set[int] = set()

    def event(self, delta: Delta) -> bytes:
        """As ``Form.event``."""
        self._head.stream(delta)
        events = b""
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            events = self._chunk(ChunkChoice(delta.index, DeltaMessage(role="assistant", content="")))
        if delta.text or delta.logprobs:
            logprobs = self._logprobs(delta.logprobs)
            events += self._chunk(ChunkChoice(delta.index, DeltaMessage(content=delta.text), logprobs))
        if delta.finish_reason is not None:
            events += self._chunk(ChunkChoice(delta.index, DeltaMessage(), None, delta.finish_reason))
        return events

    def closing(self) -> bytes:
        """As ``Form.closing``."""
        if not self._include_usage:
            return b""
        head = self._head
        return event(ChatChunk(head.id, head.created, head.model, [], head.usage()))

    def whole(self) -> ChatCompletion:
        """As ``Form.whole``."""
        head = self._head
        choices = [self._choice(choice) for choice in head.requests[0].output().outputs]
        return ChatCompletion(head.id, head.created, head.model, choices, head.usage())

    def _chunk(self, choice: ChunkChoice) -> bytes:
        head = self._head
        usage: Usage | UnsetType | None = UNSET
        if self._include_usage:
            usage = head.usage() if self._usage_always else None
        return event(ChatChunk(head.id, head.created, head.model, [choice], usage))

    def _choice(self, choice: CompletionOutput) -> Choice:
        logprobs = self._logprobs(choice.logprobs)
        return Choice(choice.index, Message("assistant", choice.text), logprobs, choice.finish_reason)

    def _logprobs(self, positions: list[PositionLogprobs] | None) -> ChoiceLogprobs | None:
        return None if positions is None else ChoiceLogprobs([self._token(position) for position in positions])

    def _token(self, position: PositionLogprobs) -> TokenLogprob:
        best = sorted(position.items(), key=lambda item: item[1].rank)[: self._num_top]
        top = [TopLogprob(self._tokens.text(i), item.logprob, self._bytes(i)) for i, item in best]
        token_id, own = next(iter(position.items()))
        return TokenLogprob(self._tokens.text(token_id), own.logprob, self._bytes(token_id), top)

    def _bytes(self, token_id: int) -> list[int] | None:
        data = self._tokens.bytes(token_id)
        return None if data is None else list(data)
