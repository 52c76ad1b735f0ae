"""``LLM``: the engine in this thread, for scripts. Names are those of vLLM's offline API.

Contract: nothing runs between calls; whoever waits for tokens makes the engine's steps, for all open requests alike. A
call with one wrong request runs nothing. Calls from several threads take turns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_infer.errors import EngineError, MiniInferError, RequestError
from mini_infer.frontend import NO_OPTIONS, Frontend, RequestBook, RequestOptions
from mini_infer.progress import generation_progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from mini_infer.build import BuiltEngine
    from mini_infer.frontend.text_request import TextRequest
    from mini_infer.outputs import Delta, RequestOutput
    from mini_infer.sampling_params import SamplingParams
    from mini_infer.settings import Settings


def settings_of_arguments(model: str | None, config: str | Path | None, given: Mapping[str, Any]) -> Settings:
    """The settings that ``LLM(...)`` and ``AsyncLLM(...)`` mean; arguments stand above environment and file.

    Raises:
        ConfigError: a setting is wrong.
    """
    from mini_infer.settings import load_settings

    return load_settings(
        config=None if config is None else Path(config), arguments={"model": model, **given}, argument_source="argument"
    )


class LLM:
    """An engine for scripts.

    Args:
        model: a Hugging Face id, a local folder, a ``.gguf`` file or ``"demo"``.
        config: a settings file.
        settings: further settings by name, such as ``plugins=["default", "ngram"]`` or
            ``engine={"max_model_len": 2048}``.

    Raises:
        MiniInferError: the engine cannot be built.
    """

    def __init__(self, model: str | None = None, *, config: str | Path | None = None, **settings: Any) -> None:
        from mini_infer.build import build_engine

        resolved = settings_of_arguments(model, config, settings)
        self._take(build_engine(resolved), seed=resolved.engine.seed)

    @classmethod
    def from_engine(cls, built: BuiltEngine, *, seed: int | None = None) -> LLM:
        """An ``LLM`` over an engine that was built already."""
        llm = cls.__new__(cls)
        llm._take(built, seed=seed)
        return llm

    def _take(self, built: BuiltEngine, *, seed: int | None) -> None:
        self.built = built
        self.frontend = Frontend(built.facts, built.tokenizer, built.generation, seed=seed)
        self._engine = built.engine
        self._book = RequestBook()
        self._lock = threading.RLock()
        self._closed: str | None = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the engine; open streams fail. Nothing happens the second time."""
        with self._lock:
            if self._closed is None:
                self._bury("the engine was closed")
                self._engine.shutdown()

    # -- answers ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions = NO_OPTIONS,
    ) -> list[RequestOutput]:
        """The answers to prompts, in their order.

        Args:
            prompts: one or a list of: text (tokenised with the tokenizer's default special tokens), token ids,
                ``{"prompt": text}``, ``{"prompt_token_ids": ids}``.
            sampling_params: one for all, or one a prompt; by default the model's own (generation_config.json).
            options: priority, deadline and the like, for all.

        Raises:
            RequestError: a prompt or its parameters do not suit this model; nothing was run.
            EngineError: the engine failed.
        """
        prompts = _listed(prompts)
        each = self._params_of_each(sampling_params, len(prompts), self.frontend.sampling_params)
        return self._run(
            [self.frontend.request(p, params, options=options) for p, params in zip(prompts, each, strict=True)]
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions = NO_OPTIONS,
        **template: Any,
    ) -> list[RequestOutput]:
        """The assistant's next turn in one chat, or in each of a list of chats.

        Args:
            messages: OpenAI messages, ``[{"role": "user", "content": "..."}]``, or a list of such lists.
            sampling_params: as in ``generate``; by default the model's own, as long as there is room.
            options: as in ``generate``.
            template: passed to ``Tokenizer.apply_chat_template``, such as ``tools``.

        Raises:
            RequestError: as ``generate``, or the chat template does not take the messages.
        """
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping)
        chats: Sequence[Any] = messages if several else [messages]
        each = self._params_of_each(sampling_params, len(chats), lambda: self.frontend.sampling_params(max_tokens=None))
        return self._run(
            [
                self.frontend.chat_request(chat, params, options=options, **template)
                for chat, params in zip(chats, each, strict=True)
            ]
        )

    def stream(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = NO_OPTIONS,
    ) -> Iterator[Delta]:
        """The answer to one prompt, piece by piece; it starts with the first piece asked for.

        Closing the iterator aborts the request. Raises as ``generate`` does, errors of the request at once.
        """
        params = self.frontend.sampling_params() if sampling_params is None else sampling_params
        return self._stream(self.frontend.request(prompt, params, options=options))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = NO_OPTIONS,
        **template: Any,
    ) -> Iterator[Delta]:
        """The assistant's next turn, piece by piece; arguments as in ``chat``, the rest as ``stream``."""
        params = self.frontend.sampling_params(max_tokens=None) if sampling_params is None else sampling_params
        return self._stream(self.frontend.chat_request(messages, params, options=options, **template))

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _run(self, requests: list[TextRequest]) -> list[RequestOutput]:
        inbox = _Inbox()
        try:
            self._submit(requests, inbox)
            with generation_progress(len(requests)) as progress:
                while not all(request.finished for request in requests):
                    self._step(inbox)
                    inbox.deltas.clear()
                    progress(requests)
        finally:
            self._abort(requests)
        return [request.output() for request in requests]

    def _stream(self, request: TextRequest) -> Iterator[Delta]:
        inbox = _Inbox()
        try:
            self._submit([request], inbox)
            while inbox.deltas or not request.finished:
                if inbox.deltas:
                    yield inbox.deltas.popleft()
                else:
                    self._step(inbox)
        finally:
            self._abort([request])

    def _submit(self, requests: list[TextRequest], inbox: _Inbox) -> None:
        with self._lock:
            if self._closed is not None:
                raise EngineError(self._closed)
            for request in requests:
                self._book.enter(request, inbox)
            for request in requests:
                for choice in request.engine_requests:
                    self._engine.add_request(choice)

    def _step(self, inbox: _Inbox) -> None:
        """One step of the engine, for everybody; or none if others have brought what ``inbox`` waits for."""
        with self._lock:
            if inbox.deltas:
                return
            if inbox.error is not None:
                raise inbox.error
            try:
                deltas = self._engine.step()
            except MiniInferError as error:
                self._bury(str(error))
                raise
            for engine_id in self._book.dispatch(deltas):
                self._engine.abort(engine_id)
            wake_at = None if deltas else self._engine.wake_at()
        if wake_at is not None:
            time.sleep(max(0.0, wake_at - time.monotonic()))

    def _abort(self, requests: list[TextRequest]) -> None:
        with self._lock:
            for request in requests:
                for engine_id in self._book.leave(request):
                    self._engine.abort(engine_id)

    def _bury(self, reason: str) -> None:
        self._closed = reason
        self._book.fail_all(EngineError(reason))

    @staticmethod
    def _params_of_each(
        given: SamplingParams | Sequence[SamplingParams] | None, count: int, default: Any
    ) -> Sequence[SamplingParams]:
        if given is None:
            return [default()] * count
        if not isinstance(given, Sequence):
            return [given] * count
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts: give one, or one a prompt")
        return given


class _Inbox:
    """What has come for one call."""

    def __init__(self) -> None:
        self.deltas: deque[Delta] = deque()
        self.error: Exception | None = None

    def push(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def fail(self, error: Exception) -> None:
        self.error = error


def _listed(prompts: str | Mapping[str, Any] | Sequence[Any]) -> Sequence[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    tolist = getattr(prompts, "tolist", None)  # arrays and tensors
    listed: Any = prompts if tolist is None else tolist()
    if not isinstance(listed, Sequence) or isinstance(listed, bytes):
        raise RequestError(f"prompts must be text, token ids, or a list of them, not {type(prompts).__name__}")
    return [listed] if len(listed) > 0 and isinstance(listed[0], int) else listed
