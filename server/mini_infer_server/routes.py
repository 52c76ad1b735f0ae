"""The endpoints.

Contract: each handler checks all of a request before the engine hears of it, and answers 200 or an ``APIError``.
"""

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from litestar import Request, Response, get, post
from litestar.di import NamedDependency
from litestar.exceptions import InternalServerException
from litestar.params import FromPath
from litestar.response import Stream

from mini_infer_server.answers import answer
from mini_infer_server.chat import ChatForm
from mini_infer_server.completions import CompletionForm, read_prompts
from mini_infer_server.errors import APIError
from mini_infer_server.requests import check_headers
from mini_infer_server.sampling import chat_params, completion_params, request_options
from mini_infer_server.service import Service

if TYPE_CHECKING:
    from litestar.connection import ASGIConnection
    from litestar.handlers import BaseRouteHandler

T = TypeVar("T")

HttpRequest = Request[Any, Any, Any]

OFF_LOOP_BYTES = 32_768
"""Bodies larger than this are tokenised outside the event loop, so that streams go on meanwhile."""


class ModelCard(msgspec.Struct, tag_field="object", tag="model"):
    """One model as ``/v1/models`` lists it."""

    id: str
    created: int
    max_model_len: int
    owned_by: str = "mini-infer"


class ModelList(msgspec.Struct, tag_field="object", tag="list"):
    """The models served here."""

    data: list[ModelCard]


def needs_key(connection: "ASGIConnection[Any, Any, Any, Any]", _: "BaseRouteHandler") -> None:
    """Guard: a request without an accepted key goes no further."""
    connection.app.state.service.check_key(connection.headers.get("authorization"))


@post("/v1/chat/completions", status_code=200, guards=[needs_key])
async def chat_completions(request: HttpRequest, service: NamedDependency[Service]) -> Stream | Response[bytes]:
    """The assistant's next turn in a chat."""
    body = await _body(request)
    asked, others = service.chat_decoder.decode(body)
    service.check_model(asked.model)
    if asked.messages is None:
        raise APIError(400, "messages is required", param="messages")
    frontend = service.llm.frontend
    params = chat_params(asked, others, frontend)
    options = request_options(asked)
    made = await _checked(body, lambda: frontend.chat_request(asked.messages, params, options=options))
    form = ChatForm(asked, made, service.model, service.tokens)
    return await answer(request, service.llm, [made], form, streamed=bool(asked.stream))


@post("/v1/completions", status_code=200, guards=[needs_key])
async def completions(request: HttpRequest, service: NamedDependency[Service]) -> Stream | Response[bytes]:
    """The continuation of one or more prompts."""
    body = await _body(request)
    asked, others = service.completion_decoder.decode(body)
    service.check_model(asked.model)
    frontend = service.llm.frontend
    prompts = read_prompts(asked.prompt)
    params = completion_params(asked, others, frontend)
    options = request_options(asked)
    made = await _checked(body, lambda: [frontend.request(prompt, params, options=options) for prompt in prompts])
    form = CompletionForm(asked, made, service.model, frontend.tokenizer)
    return await answer(request, service.llm, made, form, streamed=bool(asked.stream))


@get("/v1/models", guards=[needs_key])
async def models(service: NamedDependency[Service]) -> Response[bytes]:
    """The models served here."""
    return _json(ModelList([_card(service)]))


@get("/v1/models/{model_id:path}", guards=[needs_key])
async def model(model_id: FromPath[str], service: NamedDependency[Service]) -> Response[bytes]:
    """One model."""
    service.check_model(str(model_id).removeprefix("/"))
    return _json(_card(service))


@get("/health")
async def health(service: NamedDependency[Service]) -> Response[bytes]:
    """200 while the engine lives and was heard of lately, else 503."""
    if not service.healthy:
        raise APIError(503, "the engine does not answer", code="engine_unavailable")
    return _json({"status": "ok"})


@get("/version")
async def server_version() -> Response[bytes]:
    """The version of Mini-Infer."""
    return _json({"version": version("mini-infer")})


ROUTES = [chat_completions, completions, models, model, health, server_version]


def _card(service: NamedDependency[Service]) -> ModelCard:
    return ModelCard(service.model, service.created, service.llm.frontend.facts.max_model_len)


def _json(value: Any) -> Response[bytes]:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _body(request: HttpRequest) -> bytes:
    check_headers(request.headers)
    try:
        return await request.body()
    except InternalServerException as error:
        raise APIError(400, "the body did not come to its end") from error


async def _checked(body: bytes, make: Callable[[], T]) -> T:
    """Tokenise and check; aside of the event loop if it may take long."""
    return make() if len(body) < OFF_LOOP_BYTES else await asyncio.to_thread(make)
