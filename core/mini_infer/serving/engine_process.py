"""An engine in a process of its own: the process itself, and the client that starts it.

::

    server process                        engine process (a fresh interpreter, no fork)
    ProcessClient ── socket pair ── main: Start -> build -> Ready | Failed
                  Submit, Abort, Stop ->  serve_engine
                  <- Outputs, Died        exits when the socket closes, so it never outlives its parent

Contract: what passes is msgspec over a local socket. A build that fails comes back as the same error class with the
same line. If the engine dies the subscriber is told once, with the reason. Signals that end a group (Ctrl-C, SIGTERM
from a service manager) are left to the parent, which stops the engine after its requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from mini_infer import errors
from mini_infer.errors import ConfigError, DeviceError, EngineError, MiniInferError, in_one_line
from mini_infer.messages import ModelFacts  # noqa: TC001 (msgspec reads it)
from mini_infer.serving.engine_client import Abort, Command, Outputs, Stop, Submit, serve_engine
from mini_infer.serving.frames import FrameReader, frame
from mini_infer.text.tokenizer_wire import TokenizerState

if TYPE_CHECKING:
    from collections.abc import Sequence

_RECEIVE_BYTES = 2**18


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Build the engine of these settings (``Settings.to_json``)."""

    settings: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine answers requests. ``generation`` holds the fields of the model's generation config."""

    facts: ModelFacts
    tokenizer: TokenizerState | None
    generation: dict[str, Any]
    log: list[str]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be built: the name of an error class, and its line."""

    kind: str
    message: str

    def error(self) -> MiniInferError:
        """The error to raise here."""
        known = getattr(errors, self.kind, None)
        is_ours = isinstance(known, type) and issubclass(known, MiniInferError)
        return known(self.message) if is_ours else EngineError(self.message)  # type: ignore[misc]


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The engine failed and is about to exit."""

    reason: str


FromEngine = Ready | Failed | Outputs | Died
ToEngine = Start | Submit | Abort | Stop


def main() -> int:
    """The engine process; its socket's descriptor is the first argument."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(sock,), name="parent-watch", daemon=True).start()
    inbox = _Inbox(sock)
    start = inbox.first()
    try:
        return _run(sock, inbox, start)
    except ConnectionError:  # the parent is gone
        return 1


def _run(sock: socket.socket, inbox: _Inbox, start: Start) -> int:
    from mini_infer.build import build_engine
    from mini_infer.settings import Settings

    try:
        built = build_engine(Settings.from_json(start.settings))
        _refuse_extensions(built.extensions)
        tokenizer = None if built.tokenizer is None else TokenizerState.of(built.tokenizer)
        ready = Ready(built.facts, tokenizer, dataclasses.asdict(built.generation), built.log)
    except Exception as error:
        if not isinstance(error, MiniInferError):
            traceback.print_exc()
        sock.sendall(frame(Failed(type(error).__name__, str(error) or type(error).__name__)))
        return 2
    try:
        sock.sendall(frame(ready))
        serve_engine(built.engine, inbox.receive, lambda outputs: sock.sendall(frame(outputs)))
    except ConnectionError:
        raise
    except DeviceError as error:
        sock.sendall(frame(Died(in_one_line(error))))
        os._exit(1)  # what libraries release at exit would fail on this device, and abort in many lines
    except Exception as error:
        traceback.print_exc()
        sock.sendall(frame(Died(in_one_line(error))))
        return 1
    built.engine.shutdown()
    return 0


def _refuse_extensions(extensions: Sequence[Any]) -> None:
    # They belong to the API's process, which does not make them yet; left out in silence they would be missed.
    if extensions:
        names = ", ".join(extension.name for extension in extensions)
        raise ConfigError(f"server extensions cannot be served yet: leave out the plugin that brings {names}")


class _Inbox:
    """The commands on the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)

    def first(self) -> Start:
        """Wait for the settings."""
        while True:
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                sys.exit(1)
            for message in self._reader.feed(data):
                assert isinstance(message, Start)
                return message

    def receive(self, timeout: float) -> Sequence[Command]:
        """As ``serve_engine`` asks for; the end of the stream is ``Stop``."""
        if timeout > 0:
            select.select([self._sock], [], [], timeout)
        commands: list[Command] = []
        with contextlib.suppress(BlockingIOError):
            while data := self._sock.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT):
                commands += [message for message in self._reader.feed(data) if not isinstance(message, Start)]
            commands.append(Stop())
        return commands


def _exit_with_parent(sock: socket.socket) -> None:
    """End this process when the other side of the socket closes, whatever the engine is doing."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
