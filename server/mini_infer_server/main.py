"""``mini-infer serve``: the engine in a process of its own, the API in this one.

Contract: the port is reserved before anything is loaded, and answers only once the model does. SIGTERM and Ctrl-C let
running answers finish (``DRAIN_SECONDS`` at most) and end both processes. If the engine dies, clients get errors and
``/health`` 503 for ``MOURNING_SECONDS``; then ``serve`` raises ``EngineError``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from mini_infer.async_llm import AsyncLLM
from mini_infer.errors import ConfigError, EngineError
from mini_infer.serving.engine_process_client import ProcessClient
from mini_infer_server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Callable

    from litestar import Litestar

    from mini_infer.settings import ServerSettings, Settings

DRAIN_SECONDS = 20
MOURNING_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 75
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(settings: Settings) -> None:
    """Serve until a signal ends it.

    Raises:
        MiniInferError: it cannot start, or the engine died.
    """
    with bind(settings.server.host, settings.server.port) as sock:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(_serve(settings, sock))
        except (asyncio.CancelledError, KeyboardInterrupt):  # a signal while the model was loading
            return


def bind(host: str, port: int) -> socket.socket:
    """Reserve a port; nobody can connect to it yet.

    Raises:
        ConfigError: it cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"server.host = {host!r}: no such address ({error.strerror})") from error
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _no_port(host, port, error) from error
    return sock


async def _serve(settings: Settings, sock: socket.socket) -> None:
    llm = AsyncLLM(client=ProcessClient(settings), seed=settings.engine.seed)
    try:
        with _cancelled_by_signals():
            info = await llm.start()
            for line in info.log:
                _say(line)
            await warm_up(llm)
        server = settings.server
        app = create_app(
            llm, model=server.served_model_name, api_keys=server.api_keys, max_body_bytes=server.max_body_bytes
        )
        await _run(app, llm, sock, server)
    finally:
        await llm.close()


async def warm_up(llm: AsyncLLM) -> None:
    """One token, so that the model has answered before anybody is told that it does.

    Raises:
        EngineError: it does not answer.
    """
    frontend = llm.frontend
    token_id = 0 if frontend.tokenizer is None else next(iter(frontend.tokenizer.valid_ids))
    output = await llm.generate([token_id], frontend.sampling_params(max_tokens=1))
    choice = output.outputs[0]
    if choice.finish_reason == "error":
        raise EngineError(f"the model does not answer: {choice.error}")


async def _run(app: Litestar, llm: AsyncLLM, sock: socket.socket, settings: ServerSettings) -> None:
    port = sock.getsockname()[1]
    try:
        sock.listen(2048)
    except OSError as error:  # somebody else was given the port meanwhile
        raise _no_port(settings.host, port, error) from error
    config = uvicorn.Config(
        app,
        http=_protocol(),
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    server = _Server(config, lambda: _announce(llm, settings, port))
    mourner = asyncio.create_task(_end_after_death(llm, server))
    # uvicorn raises the signal that ended it once more; by then nothing is left to do.
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    try:
        await server.serve(sockets=[sock])
    finally:
        mourner.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
    if llm.death.is_set():
        raise EngineError(f"{llm.obituary}; the server has ended")


class _Server(uvicorn.Server):
    """Says when it is up."""

    def __init__(self, config: uvicorn.Config, up: Callable[[], None]) -> None:
        super().__init__(config)
        self._up = up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up()


async def _end_after_death(llm: AsyncLLM, server: uvicorn.Server) -> None:
    await llm.death.wait()
    await asyncio.sleep(MOURNING_SECONDS)
    server.should_exit = True


def _announce(llm: AsyncLLM, settings: ServerSettings, port: int) -> None:
    frontend = llm.frontend
    model = settings.served_model_name or frontend.facts.name
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    url = f"http://{host}:{port}"
    _say(f"{model} answers at {url} (OpenAI API under {url}/v1). Try:")
    _say(f"  {example(url, model, frontend.tokenizer, with_key=bool(settings.api_keys))}")


def example(url: str, model: str, tokenizer: Any, *, with_key: bool) -> str:
    """A command that streams an answer of this model."""
    body: dict[str, Any] = {"model": model}
    question = "What is the capital of France?"
    if tokenizer is not None and tokenizer.has_chat_template:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": question}]
    else:
        path, body["prompt"] = "completions", [1, 2, 3] if tokenizer is None else question
    body |= {"temperature": 0, "stream": True}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if with_key else ""
    return f"curl -N {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"


@contextlib.contextmanager
def _cancelled_by_signals() -> Any:
    """While the model loads a signal cancels this task, which ends the engine's process too."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in _SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def _protocol() -> Any:
    try:
        from mini_infer_server.half_close import HalfCloseProtocol
    except ModuleNotFoundError:  # no httptools: uvicorn's own choice
        return "auto"
    return HalfCloseProtocol


def _no_port(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} of {host} is in use: stop what listens there, or choose another with --port")
    return ConfigError(f"port {port} of {host} cannot be used: {error.strerror}")


def _say(line: str) -> None:
    print(line, flush=True)
