"""How requests that were checked become an HTTP answer, whole or as a stream of events.

Contract: a stream begins with the first tokens, so whatever fails before is a real HTTP error; what fails later is an
event ``data: {"error": ...}``, the last one. When the client leaves, its requests are aborted, streamed or not; when
the answer ends for any reason, nothing of it is left in the engine (``end_with_answer``).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from litestar import Response
from litestar.response import Stream

from mini_infer_server.errors import APIError, as_api_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from litestar import Request
    from litestar.types import ASGIApp, Receive, Scope, Send

    from mini_infer.async_llm import AsyncLLM
    from mini_infer.frontend.async_stream import AsyncStream
    from mini_infer.frontend.text_request import TextRequest
    from mini_infer.outputs import Delta

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_STREAM_OF_REQUEST = "mini_infer.stream"

_encode = msgspec.json.Encoder().encode


def event(message: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % _encode(message)


class PromptDetails(msgspec.Struct):
    """Tokens of the prompts that a cache spared."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens; prompts are counted once whatever ``n`` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class AnswerHead:
    """What every object of one answer carries, and where its choices stand.

    Attributes:
        id: of the answer, ``prefix`` and a drawn word.
        created: seconds since the epoch.
        model: the served name.
        requests: one a prompt; choice k of prompt p has index ``p * n + k``.
    """

    def __init__(self, prefix: str, model: str, requests: Sequence[TextRequest]) -> None:
        self.id = f"{prefix}{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model
        self.requests = requests
        self._bases = {r.request_id: i * len(r.engine_requests) for i, r in enumerate(requests)}
        self._num_streamed = 0

    def stream(self, delta: Delta) -> int:
        """Count a delta that is streamed; the index of its choice."""
        self._num_streamed += len(delta.token_ids)
        return self._bases[delta.request_id] + delta.index

    def usage(self) -> Usage:
        """Tokens streamed so far; all of them if nothing is."""
        prompts = sum(len(request.prompt_token_ids) for request in self.requests)
        generated = self._num_streamed or sum(request.num_tokens() for request in self.requests)
        cached = sum(request.num_cached_tokens for request in self.requests)
        return Usage(prompts, generated, prompts + generated, PromptDetails(cached))


class Form(Protocol):
    """The shape of one endpoint's answer."""

    def event(self, delta: Delta) -> bytes:
        """The events of one delta; may be empty."""

    def closing(self) -> bytes:
        """The events after the last delta, ``DONE`` apart."""

    def whole(self) -> msgspec.Struct:
        """The answer in one object."""


async def answer(
    request: Request[Any, Any, Any], llm: AsyncLLM, requests: Sequence[TextRequest], form: Form, *, streamed: bool
) -> Stream | Response[bytes]:
    """Run requests and answer with them.

    Raises:
        APIError, MiniInferError: before the first byte.
    """
    stream = llm.submit(requests)
    request.scope["state"][_STREAM_OF_REQUEST] = stream
    async with _abort_when_client_leaves(request, stream):
        first = await _ready(stream)
        if not streamed:
            while not stream.finished:
                await _ready(stream)
    if streamed:
        return Stream(_events(stream, form, first), media_type="text/event-stream", headers=STREAM_HEADERS)
    return Response(_encode(form.whole()), media_type="application/json")


def end_with_answer(app: ASGIApp) -> ASGIApp:
    """Middleware: whatever ends an answer (disconnect, error, shutdown) also ends its requests."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            stream: AsyncStream | None = scope.get("state", {}).pop(_STREAM_OF_REQUEST, None)
            if stream is not None:
                stream.abort()

    return wrapped


async def _ready(stream: AsyncStream) -> list[Delta]:
    deltas = await stream.ready()
    for delta in deltas:
        if delta.finish_reason == "error":
            raise APIError(500, delta.error or "the request failed in the engine", code="generation_error")
        if delta.finish_reason == "abort":
            raise APIError(503, "the request was aborted", code="aborted")
    return deltas


async def _events(stream: AsyncStream, form: Form, deltas: Iterable[Delta]) -> AsyncIterator[bytes]:
    try:
        yield b"".join(map(form.event, deltas))
        while not stream.finished:
            data = b"".join(map(form.event, await _ready(stream)))
            if data:
                yield data
        yield form.closing() + DONE
    except Exception as error:  # the status is sent: all that is left is to say it in the stream
        yield b"data: %b\n\n" % as_api_error(error).body()


@contextlib.asynccontextmanager
async def _abort_when_client_leaves(request: Request[Any, Any, Any], stream: AsyncStream) -> AsyncIterator[None]:
    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        stream.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
