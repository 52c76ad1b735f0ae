"""An engine that plays given tokens, for tests of everything in front of it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mini_infer.messages import EngineRequest, EngineStats, FinishReason, ModelFacts, TokenDelta
from mini_infer.model.generation_config import GenerationConfig
from mini_infer.plan import TokenLogprobs
from mini_infer.testing.tokenizers import byte_tokenizer
from mini_infer.text.tokenizer_wire import TokenizerState

if TYPE_CHECKING:
    from mini_infer.errors import RequestError
    from mini_infer.text.tokenizer import Tokenizer

EOS = 319
Script = Callable[[EngineRequest], Sequence[int]]


def spell(text: str) -> list[int]:
    """T1's tokens of a text, one a byte."""
    return list(text.encode())


def echo_script(request: EngineRequest) -> list[int]:
    """The prompt, shifted by the choice, then EOS."""
    return [(token + request.choice) % 317 for token in request.prompt_token_ids] + [EOS]


class FakeEngine:
    """Gives each request ``per_step`` tokens of its script a step; EOS and the length end it."""

    def __init__(self, script: Script = echo_script, *, per_step: int = 1, step_seconds: float = 0.0) -> None:
        self.script, self.per_step, self.step_seconds = script, per_step, step_seconds
        self.requests: dict[str, tuple[EngineRequest, deque[int], int]] = {}
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.refuse: RequestError | None = None
        self.fail_with: Exception | None = None
        self.num_steps = 0
        self.closed = False

    def add_request(self, request: EngineRequest) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.added.append(request)
        given = request.params.extensions.get("script")
        tokens = [*given, EOS] if given is not None else self.script(request)
        self.requests[request.request_id] = (request, deque(tokens), 0)

    def abort(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self.requests)

    def wake_at(self) -> float | None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(step_id=self.num_steps, num_running=len(self.requests), num_aborted=len(self.aborted))

    def shutdown(self) -> None:
        self.closed = True

    def step(self) -> list[TokenDelta]:
        if self.fail_with is not None:
            raise self.fail_with
        self.num_steps += 1
        time.sleep(self.step_seconds)
        return [self._advance(request_id) for request_id in list(self.requests)]

    def _advance(self, request_id: str) -> TokenDelta:
        request, script, done = self.requests[request_id]
        params = request.params
        tokens: list[int] = []
        finish: FinishReason | None = None
        stop: int | None = None
        assert params.max_tokens is not None
        while finish is None and len(tokens) < self.per_step and done < params.max_tokens:
            token = script.popleft()
            tokens.append(token)
            done += 1
            ends = (token in request.eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids
            if ends and done >= params.min_tokens:
                finish, stop = "stop", token
        if finish is None and (done >= params.max_tokens or not script):
            finish = "length"
        self.requests[request_id] = (request, script, done)
        if finish is not None:
            del self.requests[request_id]
        prompt = request.prompt_token_ids[1:] if done == len(tokens) and params.prompt_logprobs is not None else []
        return TokenDelta(
            request_id=request_id,
            token_ids=tokens,
            logprobs=[_logprobs(t, params.logprobs) for t in tokens] if params.logprobs is not None else [],
            prompt_logprobs=[_logprobs(t, params.prompt_logprobs or 0) for t in prompt],
            finish_reason=finish,
            stop_token_id=stop,
        )


def _logprobs(token: int, count: int) -> TokenLogprobs:
    """The token is the second most likely; the next ids are the others."""
    top = [(token + 1, -0.25), (token, -0.5), (token + 2, -4.0), (token + 3, -5.0), (token + 4, -6.0)]
    return TokenLogprobs(token, -0.5, 2, top[:count])


def quick_tokenizer() -> "Tokenizer":
    """T1, without the seconds that transformers takes to be imported."""
    made = byte_tokenizer()
    special = dict(made.special_tokens)
    return TokenizerState(made.backend.to_str(), made.chat_template, special, EOS, None).open()


@dataclass
class FakeBuilt:
    """As ``BuiltEngine``."""

    engine: Any
    facts: ModelFacts
    tokenizer: Any
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    choices: list[Any] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


def fake_built(engine: FakeEngine | None = None, tokenizer: Any = "byte", **facts: Any) -> FakeBuilt:
    """A built engine over ``engine``, of the shape of the test bench's model "tiny"."""
    shape = {"name": "tiny", "vocab_size": 384, "max_model_len": 128, "max_tokens_in_pool": 1024, **facts}
    if tokenizer == "byte":
        tokenizer = quick_tokenizer()
    return FakeBuilt(engine or FakeEngine(), ModelFacts(**shape), tokenizer)
