"""From a request's fields to ``SamplingParams``: ranges of the OpenAI API, defaults, extensions.

Contract: a field that was left out takes the model's own default; every refusal is an error with the client's field
name; a field that we know and cannot honour is refused, never ignored.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from mini_infer.frontend import RequestOptions
from mini_infer.sampling_params import MAX_LOGPROBS
from mini_infer_server.errors import APIError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mini_infer.frontend import Frontend
    from mini_infer.sampling_params import SamplingParams
    from mini_infer_server.requests import ChatRequest, CompletionRequest, SamplingFields

COMPLETION_MAX_TOKENS = 16
"""Of a text completion that asks for no number."""

MAX_COMPLETION_LOGPROBS = 5
MAX_TEMPERATURE = 2.0

_TAKEN_AS_THEY_ARE = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
)  # fmt: skip
_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,17}")
_CHAT_REFUSED = (
    "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "audio", "web_search_options",
    "reasoning_effort", "verbosity",
)  # fmt: skip
"""Fields of the chat API that would change the answer and that this server cannot honour yet."""


def chat_params(request: ChatRequest, others: Mapping[str, msgspec.Raw], frontend: Frontend) -> SamplingParams:
    """The parameters of a chat completion.

    Raises:
        APIError, RequestError: a field is wrong or not supported.
    """
    for name in _CHAT_REFUSED:
        if not _is_null(others.get(name)):
            raise _unsupported(name)
    _refuse_formats(request.response_format, others.get("modalities"))
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
        _check_range("top_logprobs", logprobs, MAX_LOGPROBS)
    elif request.top_logprobs is not None:
        raise APIError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    both = {"max_completion_tokens": request.max_completion_tokens, "max_tokens": request.max_tokens}
    field, max_tokens = next(((f, v) for f, v in both.items() if v is not None), ("max_tokens", None))
    _check_max_tokens(field, max_tokens, least=1)
    return _params(request, others, frontend, max_tokens=max_tokens, logprobs=logprobs)


def completion_params(
    request: CompletionRequest, others: Mapping[str, msgspec.Raw], frontend: Frontend
) -> SamplingParams:
    """The parameters of a text completion.

    Raises:
        APIError, RequestError: a field is wrong or not supported.
    """
    if request.suffix:
        raise _unsupported("suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise APIError(400, "best_of is not supported: leave it out", param="best_of", code="unsupported_field")
    if request.logprobs is not None:
        _check_range("logprobs", request.logprobs, MAX_COMPLETION_LOGPROBS)
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    _check_max_tokens("max_tokens", max_tokens, least=0 if request.echo else 1)
    scored = request.logprobs if request.echo else None
    return _params(request, others, frontend, max_tokens=max_tokens, logprobs=request.logprobs, prompt_logprobs=scored)


def request_options(request: SamplingFields, tenant: str | None = None) -> RequestOptions:
    """What the scheduler and the cache are told.

    Raises:
        APIError: out of range.
    """
    if request.priority is not None and not -(2**31) <= request.priority < 2**31:
        raise APIError(400, "priority must be an integer of 32 bits; lower is more urgent", param="priority")
    if request.deadline_ms is not None and not 0 < request.deadline_ms < 1e12:
        raise APIError(400, "deadline_ms must be a positive number of milliseconds", param="deadline_ms")
    return RequestOptions(request.priority or 0, request.deadline_ms, tenant, request.cache_salt)


def _params(
    request: SamplingFields, others: Mapping[str, msgspec.Raw], frontend: Frontend, **given: Any
) -> SamplingParams:
    if request.temperature is not None and request.temperature > MAX_TEMPERATURE:
        raise APIError(400, f"temperature must be from 0 to {MAX_TEMPERATURE:g}", param="temperature")
    if request.stream_options is not None and not request.stream:
        raise APIError(400, "stream_options needs stream: true", param="stream_options")
    values = {name: getattr(request, name) for name in _TAKEN_AS_THEY_ARE}
    given |= {name: value for name, value in values.items() if value is not None}
    if request.logit_bias:
        given["logit_bias"] = {_token_id(key): value for key, value in request.logit_bias.items()}
    given["extensions"] = _extensions(others, frontend)
    return frontend.sampling_params(**given)


def _extensions(others: Mapping[str, msgspec.Raw], frontend: Frontend) -> dict[str, Any]:
    """The fields that logits processors in use take, under the processor's name."""
    if not _is_null(others.get("script")) and "script" not in frontend.facts.extensions:
        raise APIError(400, "script is for the model 'script' alone", param="script", code="unsupported_field")
    taken = [name for name in frontend.facts.extensions if not _is_null(others.get(name))]
    return {name: _decoded(name, others[name]) for name in taken}


def _decoded(name: str, raw: msgspec.Raw | None) -> Any:
    try:
        return msgspec.json.decode(raw or b"null")
    except msgspec.DecodeError as error:  # valid JSON, but for a number that no float can hold
        raise APIError(400, f"{name}: {str(error).partition(' - at ')[0]}", param=name, code="invalid_type") from error


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise APIError(400, f"logit_bias must map token ids, not {key!r:.40}", param="logit_bias")
    return int(key)


def _refuse_formats(response_format: Any, modalities: msgspec.Raw | None) -> None:
    if response_format is not None:
        kind = response_format.get("type") if isinstance(response_format, dict) else None
        if kind != "text":
            raise APIError(
                400,
                f"response_format of type {kind!r:.40} is not supported: only text is",
                param="response_format",
                code="unsupported_field",
            )
    if not _is_null(modalities) and _decoded("modalities", modalities) != ["text"]:
        raise _unsupported("modalities")


def _check_max_tokens(field: str, value: int | None, *, least: int) -> None:
    if value is not None and value < least:
        hint = " (0 only with echo: true)" if field == "max_tokens" and value == 0 else ""
        raise APIError(400, f"{field} must be at least {least}, not {value}{hint}", param=field)


def _check_range(field: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise APIError(400, f"{field} must be from 0 to {most}, not {value}", param=field)


def _is_null(raw: msgspec.Raw | None) -> bool:
    return raw is None or bytes(raw) == b"null"


def _unsupported(name: str) -> APIError:
    return APIError(400, f"{name} is not supported by this server", param=name, code="unsupported_field")
