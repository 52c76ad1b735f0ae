"""How a front end and an engine talk when they do not share a thread: commands one way, outputs the other.

::

    front end  ── Submit, Abort, Stop ──>  serve_engine (one thread, or a process of its own)
               <── Outputs ──────────────

Contract: the messages are msgspec structs, so a queue and a socket carry the same. ``serve_engine`` is the only caller
of its engine. Every submitted request ends with a last delta or a rejection, unless the engine dies.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from mini_infer import garbage
from mini_infer.errors import RequestError
from mini_infer.messages import EngineRequest, EngineStats, TokenDelta  # noqa: TC001 (msgspec reads them)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mini_infer.engine import Engine
    from mini_infer.messages import ModelFacts
    from mini_infer.model.generation_config import GenerationConfig
    from mini_infer.text.tokenizer import Tokenizer

HEARTBEAT_SECONDS = 1.0
"""An idle engine says that it lives this often."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run these."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End these now; unknown ids are ignored."""

    request_ids: list[str]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the engine."""


Command = Submit | Abort | Stop


class Rejection(msgspec.Struct, frozen=True):
    """The engine refused a request: a ``RequestError`` on its way back."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """A step's deltas, refused requests, and how the engine stands."""

    deltas: list[TokenDelta]
    stats: EngineStats
    rejections: list[Rejection] = []


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end gets of a built engine."""

    facts: ModelFacts
    tokenizer: Tokenizer | None
    generation: GenerationConfig
    log: Sequence[str] = ()


class Subscriber(Protocol):
    """Who gets the outputs; called in the event loop of ``EngineClient.start``."""

    def outputs(self, outputs: Outputs) -> None:
        """After a step, or as a sign of life."""

    def died(self, reason: str) -> None:
        """The engine is gone, for that one-line reason. Nothing follows."""


class EngineClient(Protocol):
    """An engine elsewhere. All calls from one event loop."""

    async def start(self, subscriber: Subscriber) -> EngineInfo:
        """Build the engine and wait until it is ready.

        Raises:
            MiniInferError: it could not be built.
        """

    def submit(self, requests: list[EngineRequest]) -> None:
        """Run these; answers come to the subscriber."""

    def abort(self, request_ids: list[str]) -> None:
        """End these now."""

    async def stop(self) -> None:
        """End the engine and wait for its end. May be called twice."""


def serve_engine(
    engine: Engine, receive: Callable[[float], Sequence[Command]], send: Callable[[Outputs], None]
) -> None:
    """Run an engine until ``Stop``.

    Args:
        engine: called from this thread only.
        receive: the commands that have arrived; waits up to so many seconds for the first, 0 for not at all.
        send: takes each step's outputs.
    """
    last_sent = time.monotonic()
    with garbage.frozen():
        while True:
            rejections: list[Rejection] = []
            for command in receive(_patience(engine)):
                if isinstance(command, Stop):
                    return
                rejections += _obey(engine, command)
            deltas = engine.step() if engine.has_work() else []
            now = time.monotonic()
            if deltas or rejections or now - last_sent >= HEARTBEAT_SECONDS:
                send(Outputs(deltas, engine.stats(), rejections))
                last_sent = now


def _patience(engine: Engine) -> float:
    if not engine.has_work():
        return HEARTBEAT_SECONDS
    wake_at = engine.wake_at()
    return 0.0 if wake_at is None else min(max(wake_at - time.monotonic(), 0.0), HEARTBEAT_SECONDS)


def _obey(engine: Engine, command: Submit | Abort) -> list[Rejection]:
    if isinstance(command, Abort):
        for request_id in command.request_ids:
            engine.abort(request_id)
        return []
    rejections = []
    for request in command.requests:
        try:
            engine.add_request(request)
        except RequestError as error:
            rejections.append(Rejection(request.request_id, str(error), error.param, error.code))
    return rejections
