"""The front end's side of an engine process: starts it, talks to it, notices its end.

Contract: as ``EngineClient``. The process is started fresh (no fork), gets its settings over the socket, and is gone
when ``stop`` returns.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, cast

from mini_infer.errors import EngineError, RequestError
from mini_infer.model.generation_config import GenerationConfig
from mini_infer.serving.engine_client import Abort, EngineInfo, Outputs, Stop, Submit
from mini_infer.serving.engine_process import Died, Failed, FromEngine, Ready, Start
from mini_infer.serving.frames import FrameReader, frame

if TYPE_CHECKING:
    import msgspec

    from mini_infer.messages import EngineRequest
    from mini_infer.serving.engine_client import Subscriber
    from mini_infer.settings import Settings

STOP_SECONDS = 10.0
"""An engine that has not ended this long after ``Stop`` is killed."""


class ProcessClient:
    """Runs the engine of some settings in a process of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: _Wire | None = None
        self._built = False

    @property
    def pid(self) -> int | None:
        """The engine's process id, once it was started."""
        return None if self._process is None else self._process.pid

    async def start(self, subscriber: Subscriber) -> EngineInfo:
        """As ``EngineClient.start``."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: the working directory is no place to import from, as for the installed command.
            command = [sys.executable, "-P", "-m", "mini_infer.serving.engine_process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        wire = _Wire(subscriber, self._process)
        await loop.create_unix_connection(lambda: wire, sock=ours)
        self._wire = wire
        wire.send(Start(self._settings.to_json()))
        ready = await wire.ready
        self._built = True
        return EngineInfo(
            facts=ready.facts,
            tokenizer=None if ready.tokenizer is None else await asyncio.to_thread(ready.tokenizer.open),
            generation=GenerationConfig(
                **{**ready.generation, "eos_token_ids": tuple(ready.generation["eos_token_ids"])}
            ),
            log=ready.log,
        )

    def submit(self, requests: list[EngineRequest]) -> None:
        """As ``EngineClient.submit``.

        Raises:
            RequestError: an extension's value cannot be sent.
        """
        try:
            self._send(Submit(requests))
        except (OverflowError, TypeError, ValueError) as error:
            raise RequestError(f"the request cannot be passed to the engine: {error}") from error

    def abort(self, request_ids: list[str]) -> None:
        """As ``EngineClient.abort``."""
        self._send(Abort(request_ids))

    async def stop(self) -> None:
        """As ``EngineClient.stop``."""
        if self._process is None:
            return
        if self._wire is not None:
            self._wire.stopping = True
            self._send(Stop())
        if not self._built:  # it would not listen before it has loaded
            self._process.kill()
        try:
            await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._wire is not None:
            self._wire.close()

    def _send(self, message: msgspec.Struct) -> None:
        if self._wire is not None:
            self._wire.send(message)


class _Wire(asyncio.Protocol):
    """The socket: frames in, frames out."""

    def __init__(self, subscriber: Subscriber, process: subprocess.Popen[bytes]) -> None:
        self._subscriber = subscriber
        self._process = process
        self._reader: FrameReader[FromEngine] = FrameReader(FromEngine)
        self._transport: asyncio.Transport | None = None
        self._reason: str | None = None
        self._burial: asyncio.Task[None] | None = None
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.stopping = False

    def send(self, message: msgspec.Struct) -> None:
        """Send now; nothing happens once the engine is gone."""
        data = frame(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the socket."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except EngineError as error:
            self._reason = str(error)
            self.close()
            return
        for message in messages:
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.stopping:
            self._burial = asyncio.get_running_loop().create_task(self._bury())

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._subscriber.outputs(message)
        elif isinstance(message, Died):
            self._reason = message.reason
        elif not self.ready.done():
            if isinstance(message, Failed):
                self.stopping = True
                self.ready.set_exception(message.error())
            else:
                self.ready.set_result(message)

    async def _bury(self) -> None:
        """The socket closed unasked: say why, as well as can be known."""
        try:
            code = await asyncio.to_thread(self._process.wait, 1.0)
        except subprocess.TimeoutExpired:  # it lives, but we do not understand each other
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason = self._reason or f"its process {ended}"
        if self.ready.done():
            self._subscriber.died(reason)
        else:
            self.ready.set_exception(EngineError(f"the engine could not be built: {reason}"))
