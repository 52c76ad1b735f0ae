"""Every error that a client can get, in OpenAI's shape.

Contract: the body is ``{"error": {"message", "type", "param", "code"}}`` whatever went wrong, on every route. Texts are
our own; nothing of a traceback leaves the process. Only errors that are not the client's are logged.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Response
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException

from mini_infer.errors import EngineError, RequestError

if TYPE_CHECKING:
    from litestar import Request

logger = logging.getLogger("mini_infer.server")

_BAD_REQUEST = "invalid_request_error"
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "service_unavailable"}


class ErrorFields(msgspec.Struct):
    """What is wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """An error as it is sent."""

    error: ErrorFields


class APIError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what is wrong and what would be right.
        param: the request field at fault.
        code: a stable word for programs.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """The answer's body."""
        kind = _KINDS.get(self.status) or (_BAD_REQUEST if self.status < 500 else "server_error")
        return msgspec.json.encode(ErrorBody(ErrorFields(str(self), kind, self.param, self.code)))


def as_api_error(error: Exception) -> APIError:
    """How an exception is told to the client."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        return APIError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, EngineError):
        return APIError(503, str(error), code="engine_unavailable")
    logger.error("an error of the server's own", exc_info=error)
    return APIError(500, "the server failed on this request; its log says why", code="internal_error")


def on_exception(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Litestar's exception handler for everything."""
    found = _of_litestar(request, error) if isinstance(error, HTTPException) else as_api_error(error)
    return Response(found.body(), status_code=found.status, media_type="application/json", headers=found.headers)


def _of_litestar(request: Request[Any, Any, Any], error: HTTPException) -> APIError:
    status = error.status_code
    if isinstance(error, NotFoundException):
        return APIError(404, f"no such route: {request.method} {request.url.path}", code="unknown_url")
    if isinstance(error, MethodNotAllowedException):
        allowed = error.headers or {}
        return APIError(
            405, f"{request.url.path} does not take {request.method}", code="method_not_allowed", headers=dict(allowed)
        )
    if status == 413:
        return APIError(413, "the request body is too large", code="body_too_large")
    if status >= 500:
        return as_api_error(error)
    return APIError(status, str(error.detail), headers=dict(error.headers) if error.headers else None)
