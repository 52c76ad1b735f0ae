"""What has come for requests that somebody waits for, in one event loop.

Contract: deltas of one choice come in order; those that are ready come together. ``abort`` never awaits.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mini_infer.frontend.text_request import TextRequest
    from mini_infer.outputs import Delta, RequestOutput


class AsyncStream:
    """One or more requests on their way; whoever holds it awaits ``ready`` until ``finished``, or calls ``abort``.

    Deltas of several requests come mixed; each names its own.

    Args:
        requests: those waited for.
        abort: ends one of them.
    """

    def __init__(self, requests: Sequence[TextRequest], abort: Callable[[TextRequest], None]) -> None:
        self.requests = requests
        self._abort = abort
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether every choice has ended and every delta was taken."""
        return not self._deltas and all(request.finished for request in self.requests)

    async def ready(self) -> list[Delta]:
        """The deltas that have arrived, at least one unless it is finished.

        Raises:
            RequestError: the engine refused the request.
            EngineError: the engine failed.
        """
        while not self._deltas and self._error is None and not self.finished:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas

    async def outputs(self) -> list[RequestOutput]:
        """Wait for the end of all; their answers."""
        try:
            while not self.finished:
                await self.ready()
        finally:
            self.abort()
        return [request.output() for request in self.requests]

    def abort(self) -> None:
        """End what is still open; its last deltas say ``abort``. Nothing happens if nothing is."""
        for request in self.requests:
            self._abort(request)

    def push(self, delta: Delta) -> None:
        """As ``Listener.push``."""
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """As ``Listener.fail``."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
