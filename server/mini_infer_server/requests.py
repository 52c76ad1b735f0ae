"""The bodies that clients send, and how bytes become them.

Contract: JSON is taken strictly (no ``"5"`` or ``true`` for an integer, no ``1.0`` either, nothing after the end, at
most 64 levels deep, the last of duplicate keys wins); null is the same as leaving a field out. Unknown fields pass.
What is wrong is an ``APIError`` that names the field.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from mini_infer_server.errors import APIError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_DEPTH = 64

R = TypeVar("R", bound="SamplingFields")

# A string (skipped as a whole), or a bracket outside of strings.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]', re.DOTALL)
_FIELD = re.compile(r" - at `(?:key in )?\$\.(\w+)")


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and text completions share: OpenAI's fields, then our extensions."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """The body of ``/v1/chat/completions``. ``messages`` is checked where it is rendered."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of ``/v1/completions``."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class BodyDecoder:
    """Bytes to one kind of request."""

    def __init__(self, kind: type[R]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._known = {field.encode_name for field in msgspec.structs.fields(kind)}

    def decode(self, body: bytes) -> tuple[Any, Mapping[str, msgspec.Raw]]:
        """The request, and the fields that its struct does not know, undecoded.

        Raises:
            APIError: it is no such request.
        """
        if _depth_may_exceed(body):
            raise APIError(400, f"the body is nested deeper than {MAX_DEPTH} levels", code="json_too_deep")
        try:
            request = self._decoder.decode(body)
            others = {name: raw for name, raw in self._fields.decode(body).items() if name not in self._known}
        except msgspec.ValidationError as error:
            found = _FIELD.search(str(error))
            raise APIError(
                400, _plain(str(error)), param=None if found is None else found[1], code="invalid_type"
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise APIError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
        return request, others


def check_headers(headers: Mapping[str, str]) -> None:
    """Only plain JSON is taken.

    Raises:
        APIError: 415.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        said = f"not {kind}" if kind else "and the header is missing"
        raise APIError(415, f"Content-Type must be application/json, {said}", code="unsupported_media_type")
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise APIError(415, "send the body without Content-Encoding", code="unsupported_content_encoding")


def _depth_may_exceed(body: bytes) -> bool:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        symbol = match[0]
        if symbol in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif symbol in b"]}":
            depth -= 1
    return False


def _plain(message: str) -> str:
    """msgspec's words: ``Expected `int | null`, got `str` - at `$.n``` as ``n: expected int or null, got str``."""
    what, _, place = message.partition(" - at ")
    what = what.replace("`", "").replace(" | ", " or ")
    field = place.strip("`").removeprefix("key in ").removeprefix("$").lstrip(".")
    return f"{field}: {what[:1].lower()}{what[1:]}" if field else f"the body: {what[:1].lower()}{what[1:]}"
