"""uvicorn's HTTP protocol, for clients that close one half of their connection.

A client that is done sending may shut down its write side and still wait for the answer; one that has left closes both.
To us both look the same (the end of input) until something is sent: a closed peer answers with a reset.

Contract: on end of input while an answer is due, the connection stays open; ``100 Continue``, which every client skips,
is sent to find out; after a reset the application gets ``http.disconnect`` within ``CHECK_SECONDS``. Once the answer is
out the connection closes. TLS connections, which have no half-close, behave as uvicorn's.
"""

from __future__ import annotations

import select
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CHECK_SECONDS = 0.01
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfCloseProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._half_closed = False

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection (True) if an answer to a whole request is due."""
        if not self._answering() or self.cycle.more_body or self.scheme == "https":
            return None
        self._half_closed = True
        if not self.cycle.response_started:
            self.transport.write(_PROBE)
        self.loop.call_later(CHECK_SECONDS, self._check)
        return True

    def on_response_complete(self) -> None:
        """Nothing more can come from a half-closed client."""
        super().on_response_complete()
        if self._half_closed and not self._answering():
            self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _check(self) -> None:
        if self.transport.is_closing() or not self._answering():
            return
        if self._was_reset():
            self.transport.abort()
        else:
            self.loop.call_later(CHECK_SECONDS, self._check)

    def _was_reset(self) -> bool:
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        return bool(poll.poll(0))  # only errors and hang-ups are reported
