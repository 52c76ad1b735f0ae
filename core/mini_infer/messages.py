"""What passes between a front end (text, clients) and the engine (tokens): msgspec messages, never a pickle.

One ``EngineRequest`` is one choice: a request with ``n = 3`` is three of them, equal but for id and ``choice``.
"""

from typing import Literal

import msgspec

from mini_infer.plan import TokenLogprobs
from mini_infer.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: token ids in range, room for at least what it asks.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one.
        params: ``max_tokens`` is set (clamped to the room left); ``n`` is ignored here.
        eos_token_ids: end the request unless ``params.ignore_eos``.
        seed: unsigned 64 bits; drawn by the front end if the client gave none, so that all choices share it.
        choice: which of the ``n``, from 0.
        priority: lower is more urgent.
        deadline_ms: milliseconds from arrival, for schedulers that know deadlines.
        tenant: whose request, for fair shares.
        cache_salt: requests of different salts never share cached blocks.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    seed: int = 0
    choice: int = 0
    priority: int = 0
    deadline_ms: float | None = None
    tenant: str | None = None
    cache_salt: str | None = None


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New tokens of one request after a step.

    Attributes:
        token_ids: new ones; the one that ended the request (EOS, stop id) is among them.
        logprobs: one a new token, when asked for.
        prompt_logprobs: for prompt positions 1.. that became known with this delta, when asked for, in order.
        finish_reason: set on the last delta.
        stop_token_id: the token that ended it, if one did.
        num_cached_tokens: prompt tokens that a prefix hit spared (own blocks after preemption not counted).
        error: one plain line when ``finish_reason`` is ``error``.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state after a step, for statistics lines and /health."""

    step_id: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    num_preemptions: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end needs to know of the built engine to check requests."""

    name: str
    vocab_size: int  # width of the logits
    max_model_len: int
    max_tokens_in_pool: int  # most tokens that one request can hold; a longer prompt is refused
    extensions: list[str] = []  # names of logits processors that take ``SamplingParams.extensions``
