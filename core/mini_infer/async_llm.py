"""``AsyncLLM``: many requests at once from one event loop, on an engine in another thread or process.

Contract: whoever stops waiting (cancelled, broken out of the loop, timed out) has aborted the request by the time the
cancellation is through, without awaiting anything. Answers to one request come in order; ready ones come together.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from mini_infer.errors import EngineError, RequestError
from mini_infer.frontend import NO_OPTIONS, Frontend, RequestBook, RequestOptions
from mini_infer.frontend.async_stream import AsyncStream
from mini_infer.llm import settings_of_arguments
from mini_infer.messages import EngineStats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from mini_infer.frontend.text_request import TextRequest
    from mini_infer.outputs import Delta, RequestOutput
    from mini_infer.sampling_params import SamplingParams
    from mini_infer.serving.engine_client import EngineClient, EngineInfo, Outputs
    from mini_infer.settings import Settings


class AsyncLLM:
    """The asynchronous engine.

    Args:
        model: a Hugging Face id, a local folder, a ``.gguf`` file or ``"demo"``.
        config: a settings file.
        client: where the engine runs; by default it is built from the settings, in a thread of this process.
        seed: where the seeds of unseeded requests are drawn from, with a ``client``.
        settings: further settings by name, such as ``plugins=[...]`` or ``engine={"max_model_len": 2048}``.

    Use it as ``async with AsyncLLM(...) as llm``, or call ``start`` and ``close``.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Path | None = None,
        client: EngineClient | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        if client is None:
            resolved = settings_of_arguments(model, config, settings)
            client, seed = _in_thread(resolved), resolved.engine.seed
        self._client = client
        self._seed = seed
        self._book = RequestBook()
        self._info: EngineInfo | None = None
        self._frontend: Frontend | None = None
        self._dead: str | None = None
        self.stats = EngineStats()
        """The engine's state after its last step."""
        self.last_sign_of_life = time.monotonic()
        """When the engine was last heard of, on ``time.monotonic``."""
        self.death: asyncio.Event = asyncio.Event()
        """Set when the engine has died."""

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> EngineInfo:
        """Build the engine. A second call only returns what the first did.

        Raises:
            MiniInferError: it cannot be built.
        """
        if self._info is None:
            self._info = await self._client.start(self)
            self._frontend = Frontend(self._info.facts, self._info.tokenizer, self._info.generation, seed=self._seed)
            self.last_sign_of_life = time.monotonic()
        return self._info

    async def close(self) -> None:
        """End the engine; open requests fail with ``EngineError``."""
        self._bury("the engine was closed")
        await self._client.stop()

    @property
    def frontend(self) -> Frontend:
        """The text half.

        Raises:
            EngineError: not started.
        """
        if self._frontend is None:
            raise EngineError("not started: use `async with AsyncLLM(...) as llm`, or await llm.start()")
        return self._frontend

    @property
    def obituary(self) -> str | None:
        """Why requests are not taken any more; None while they are."""
        return self._dead

    @property
    def alive(self) -> bool:
        """Whether requests can be taken."""
        return self._frontend is not None and self._dead is None

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[TextRequest]) -> AsyncStream:
        """Send checked requests to the engine. The holder of the stream must see it to its end, or abort it.

        Raises:
            RequestError: an id is in use, or the request cannot be sent.
            EngineError: the engine is gone.
        """
        if self._dead is not None:
            raise EngineError(self._dead)
        stream = AsyncStream(requests, self.abort_request)
        entered: list[TextRequest] = []
        try:
            for request in requests:
                self._book.enter(request, stream)
                entered.append(request)
            self._client.submit([choice for request in requests for choice in request.engine_requests])
        except RequestError:
            for request in entered:
                self._book.leave(request)
            raise
        return stream

    def stream(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> AsyncIterator[Delta]:
        """The answer to one prompt, piece by piece. Leaving the loop aborts the request.

        Raises:
            RequestError: the prompt or the parameters do not suit this model.
            EngineError: the engine failed.
        """
        return self._stream(self._request(prompt, sampling_params, request_id, options))

    def stream_chat(
        self,
        messages: object,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
        **template: Any,
    ) -> AsyncIterator[Delta]:
        """The assistant's next turn, piece by piece. As ``stream`` and ``chat``."""
        return self._stream(self._chat_request(messages, sampling_params, request_id, options, template))

    async def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> RequestOutput:
        """The answer to one prompt, whole. Raises as ``stream`` does."""
        request = self._request(prompt, sampling_params, request_id, options)
        return (await self.submit([request]).outputs())[0]

    async def chat(
        self,
        messages: object,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
        **template: Any,
    ) -> RequestOutput:
        """The assistant's next turn, whole; by default as long as there is room. Raises as ``stream`` does."""
        request = self._chat_request(messages, sampling_params, request_id, options, template)
        return (await self.submit([request]).outputs())[0]

    def _request(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
    ) -> TextRequest:
        params = self.frontend.sampling_params() if params is None else params
        return self.frontend.request(prompt, params, request_id=request_id, options=options)

    def _chat_request(
        self,
        messages: object,
        params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
        template: Mapping[str, Any],
    ) -> TextRequest:
        params = self.frontend.sampling_params(max_tokens=None) if params is None else params
        return self.frontend.chat_request(messages, params, request_id=request_id, options=options, **template)

    async def _stream(self, request: TextRequest) -> AsyncIterator[Delta]:
        stream = self.submit([request])
        try:
            while not stream.finished:
                for delta in await stream.ready():
                    yield delta
        finally:
            stream.abort()

    def abort(self, request_id: str) -> None:
        """End a request by its id; its last deltas say ``abort``. Unknown and ended ones are ignored."""
        request = self._book.find(request_id)
        if request is not None:
            self.abort_request(request)

    def abort_request(self, request: TextRequest) -> None:
        """As ``abort``."""
        ids = self._book.abort(request)
        if ids and self._dead is None:
            self._client.abort(ids)

    # -- the engine's side --------------------------------------------------------------------------------------------

    def outputs(self, outputs: Outputs) -> None:
        """As ``Subscriber.outputs``."""
        self.stats = outputs.stats
        self.last_sign_of_life = time.monotonic()
        ended = self._book.dispatch(outputs.deltas)
        for rejection in outputs.rejections:
            error = RequestError(rejection.message, param=rejection.param, code=rejection.code)
            ended += self._book.reject(rejection.request_id, error)
        if ended:
            self._client.abort(ended)

    def died(self, reason: str) -> None:
        """As ``Subscriber.died``."""
        self._bury(f"the engine died: {reason}")
        self.death.set()

    def _bury(self, reason: str) -> None:
        if self._dead is None:
            self._dead = reason
            self._book.fail_all(EngineError(reason))


def _in_thread(settings: Settings) -> EngineClient:
    from mini_infer.build import build_engine
    from mini_infer.serving.engine_thread import ThreadClient

    return ThreadClient(lambda: build_engine(settings))
