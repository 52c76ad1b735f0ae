"""The Litestar application.

Contract: everything it works with is an argument; two applications live in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide

from mini_infer_server.answers import end_with_answer
from mini_infer_server.errors import on_exception
from mini_infer_server.routes import ROUTES
from mini_infer_server.service import Service

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.async_llm import AsyncLLM
    from mini_infer.interfaces import ServerExtension

MAX_BODY_BYTES = 10_000_000


def create_app(
    llm: AsyncLLM,
    *,
    model: str | None = None,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    extensions: Sequence[ServerExtension] = (),
) -> Litestar:
    """The OpenAI API over a started ``AsyncLLM``.

    Args:
        llm: the engine.
        model: the name that clients use; by default the engine's own.
        api_keys: accepted bearer tokens; none lets everybody in.
        max_body_bytes: longer bodies are refused with 413.
        extensions: may change the application's configuration, in order.
    """
    service = Service(llm, model or llm.frontend.facts.name, api_keys)
    return Litestar(
        route_handlers=ROUTES,
        dependencies={"service": Provide(lambda: service, sync_to_thread=False)},
        state=State({"service": service}),
        middleware=[end_with_answer],
        exception_handlers={Exception: on_exception},
        request_max_body_size=max_body_bytes,
        on_app_init=[extension.configure for extension in extensions],
        openapi_config=None,
        logging_config=None,
    )
