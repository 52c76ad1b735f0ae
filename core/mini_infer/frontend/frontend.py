"""The text half of an engine: prompts and chats become checked ``EngineRequest``s, tokens become text again.

Contract: a ``Frontend`` holds no state of requests and never changes after it is made; ``LLM``, ``AsyncLLM`` and the
server all use it. A request is checked wholly before any of it reaches the engine. ``RequestBook`` is the one place
that knows which requests are open.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from mini_infer.errors import RequestError
from mini_infer.frontend.request_check import RequestCheck
from mini_infer.frontend.text_request import TextRequest
from mini_infer.messages import EngineRequest
from mini_infer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mini_infer.messages import ModelFacts, TokenDelta
    from mini_infer.model.generation_config import GenerationConfig
    from mini_infer.outputs import Delta
    from mini_infer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request says to the scheduler and the cache, not to the sampler. As in ``EngineRequest``."""

    priority: int = 0
    deadline_ms: float | None = None
    tenant: str | None = None
    cache_salt: str | None = None


NO_OPTIONS = RequestOptions()


class Frontend:
    """Makes requests for one engine.

    Args:
        facts: what the engine can take.
        tokenizer: None works on token ids alone.
        generation: the model's own end tokens and default sampling.
        seed: where the seeds of unseeded requests are drawn from; None is the system's randomness.
    """

    def __init__(
        self, facts: ModelFacts, tokenizer: Tokenizer | None, generation: GenerationConfig, *, seed: int | None = None
    ) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.generation = generation
        self._check = RequestCheck(facts, tokenizer)
        of_tokenizer = () if tokenizer is None else tokenizer.eos_token_ids
        self._eos_token_ids = list(dict.fromkeys([*generation.eos_token_ids, *of_tokenizer]))
        self._draw = secrets.randbits if seed is None else random.Random(seed).getrandbits

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters as given, the model's own defaults (generation_config.json) for the rest.

        Raises:
            RequestError: a value is out of its range.
        """
        return SamplingParams(**{**self.generation.sampling, **given})

    def request(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> TextRequest:
        """A request for a prompt; text is tokenised as the model's tokenizer does by default, BOS and all.

        Raises:
            RequestError: the prompt, or what is asked of it, does not suit this model.
        """
        text, token_ids = self._token_ids(prompt)
        return self._make(text, token_ids, params, "prompt", request_id, options)

    def chat_request(
        self,
        messages: object,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
        **template: Any,
    ) -> TextRequest:
        """A request for the assistant's next turn; ``template`` goes to ``Tokenizer.apply_chat_template``.

        Raises:
            RequestError: as ``request``, or the chat template does not take the messages.
        """
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer, and this model has none", param="messages")
        token_ids = self.tokenizer.apply_chat_template(messages, **template)
        return self._make(None, token_ids, params, "messages", request_id, options)

    def _token_ids(self, prompt: str | Sequence[int] | Mapping[str, Any]) -> tuple[str | None, list[int]]:
        given: Any = prompt
        text = None
        if isinstance(prompt, Mapping):
            text = given = prompt.get("prompt")
            if "prompt_token_ids" in prompt:
                given = prompt["prompt_token_ids"]
        if isinstance(given, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: give token ids", param="prompt")
            return given, self._check.encode(self.tokenizer, given, "prompt")
        tolist = getattr(given, "tolist", None)  # arrays and tensors
        ids = given if tolist is None else tolist()
        if not isinstance(ids, Sequence) or isinstance(ids, bytes):
            raise RequestError(
                f"a prompt must be text or a list of token ids, not {type(given).__name__}", param="prompt"
            )
        return text, list(ids)

    def _make(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        param: str,
        request_id: str | None,
        options: RequestOptions,
    ) -> TextRequest:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}", param="params")
        self._check.prompt(token_ids, param)
        self._check.params(params, self.tokenizer)
        max_tokens = self._check.room(len(token_ids), params.max_tokens, param)
        # Cut to what can matter, so that every number fits a message.
        params = msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            top_k=min(params.top_k, self.facts.vocab_size),
        )
        request_id = request_id or secrets.token_hex(8)
        seed = self._draw(64) if params.seed is None else params.seed % 2**64
        choices = [
            EngineRequest(
                request_id=f"{request_id}-{choice}",
                prompt_token_ids=token_ids,
                params=params,
                eos_token_ids=self._eos_token_ids,
                seed=seed,
                choice=choice,
                priority=options.priority,
                deadline_ms=options.deadline_ms,
                tenant=options.tenant,
                cache_salt=options.cache_salt,
            )
            for choice in range(params.n)
        ]
        return TextRequest(text, params, choices, request_id=request_id, tokenizer=self.tokenizer)


class Listener(Protocol):
    """Who waits for a request."""

    def push(self, delta: Delta) -> None:
        """Something became certain."""

    def fail(self, error: Exception) -> None:
        """The request ends here."""


class RequestBook:
    """The open requests, by the engine's ids. Not for several threads at once."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[TextRequest, int, Listener]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, request: TextRequest, listener: Listener) -> None:
        """Take up a request before it is sent to the engine.

        Raises:
            RequestError: its id is that of an open request.
        """
        if any(choice.request_id in self._open for choice in request.engine_requests):
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        for index, choice in enumerate(request.engine_requests):
            self._open[choice.request_id] = (request, index, listener)

    def dispatch(self, deltas: Iterable[TokenDelta]) -> list[str]:
        """Give tokens to those who wait; return the engine's ids that a stop string ended, to be aborted there."""
        ended: list[str] = []
        for new in deltas:
            entry = self._open.get(new.request_id)
            if entry is None:  # aborted meanwhile
                continue
            request, index, listener = entry
            delta = request.take(index, new)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                del self._open[new.request_id]
                if new.finish_reason is None:
                    ended.append(new.request_id)
            listener.push(delta)
        return ended

    def leave(self, request: TextRequest) -> list[str]:
        """Forget a request; the engine's ids of its choices that were open, to be aborted there."""
        ids = [choice.request_id for choice in request.engine_requests]
        mine = [i for i in ids if i in self._open and self._open[i][0] is request]
        for engine_id in mine:
            del self._open[engine_id]
        return mine

    def abort(self, request: TextRequest) -> list[str]:
        """As ``leave``, and whoever waits is told: the last deltas say ``abort``."""
        listeners = [listener for open_request, _, listener in self._open.values() if open_request is request]
        mine = self.leave(request)
        if mine:
            for delta in request.abort():
                listeners[0].push(delta)
        return mine

    def reject(self, engine_id: str, error: Exception) -> list[str]:
        """As ``leave``, for the request that a choice belongs to; whoever waits gets ``error``."""
        entry = self._open.get(engine_id)
        if entry is None:
            return []
        request, _, listener = entry
        listener.fail(error)
        return self.leave(request)

    def find(self, request_id: str) -> TextRequest | None:
        """The open request of that id."""
        return next((request for request, _, _ in self._open.values() if request.request_id == request_id), None)

    def fail_all(self, error: Exception) -> None:
        """The engine is gone: every request ends."""
        listeners = {id(listener): listener for _, _, listener in self._open.values()}
        self._open.clear()
        for listener in listeners.values():
            listener.fail(error)
