"""An engine in a thread of this process, behind ``EngineClient``.

Contract: the engine is built, stepped and shut down in that one thread; the subscriber is called in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from typing import TYPE_CHECKING

from mini_infer.errors import EngineError, MiniInferError, in_one_line
from mini_infer.serving.engine_client import Abort, Command, EngineInfo, Stop, Submit, serve_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mini_infer.build import BuiltEngine
    from mini_infer.messages import EngineRequest
    from mini_infer.serving.engine_client import Outputs, Subscriber


class ThreadClient:
    """Runs the engine that ``build`` makes.

    Args:
        build: called in the engine's thread.
    """

    def __init__(self, build: Callable[[], BuiltEngine]) -> None:
        self._build = build
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self, subscriber: Subscriber) -> EngineInfo:
        """As ``EngineClient.start``."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(loop, ready, subscriber), name="mini-infer-engine", daemon=True
        )
        self._thread.start()
        return await ready

    def submit(self, requests: list[EngineRequest]) -> None:
        """As ``EngineClient.submit``."""
        self._commands.put(Submit(requests))

    def abort(self, request_ids: list[str]) -> None:
        """As ``EngineClient.abort``."""
        self._commands.put(Abort(request_ids))

    async def stop(self) -> None:
        """As ``EngineClient.stop``."""
        self._commands.put(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[EngineInfo], subscriber: Subscriber) -> None:
        def tell(call: Callable[..., object], *args: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(call, *args)

        def send(outputs: Outputs) -> None:
            tell(subscriber.outputs, outputs)

        try:
            built = self._build()
        except Exception as error:
            tell(_fail, ready, error)
            return
        info = EngineInfo(built.facts, built.tokenizer, built.generation, [str(line) for line in built.log])
        tell(_succeed, ready, info)
        try:
            serve_engine(built.engine, self._receive, send)
        except Exception as error:
            tell(subscriber.died, in_one_line(error))
        finally:
            built.engine.shutdown()

    def _receive(self, timeout: float) -> Sequence[Command]:
        commands: list[Command] = []
        with contextlib.suppress(queue.Empty):
            commands.append(self._commands.get(timeout > 0, timeout))
            while True:
                commands.append(self._commands.get_nowait())
        return commands


def _succeed(ready: asyncio.Future[EngineInfo], info: EngineInfo) -> None:
    if not ready.done():  # whoever waited may have been cancelled
        ready.set_result(info)


def _fail(ready: asyncio.Future[EngineInfo], error: Exception) -> None:
    if not ready.done():
        known = isinstance(error, MiniInferError)
        ready.set_exception(error if known else EngineError(f"the engine could not be built: {error}"))
