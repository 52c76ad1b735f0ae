"""The server on a real socket of this process, over a fake engine."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from tests.core.fake_engine import FakeEngine, fake_built, spell

from mini_infer import AsyncLLM
from mini_infer.serving.engine_thread import ThreadClient
from mini_infer_server.app import create_app
from mini_infer_server.half_close import HalfCloseProtocol


@dataclass
class Served:
    """A running server."""

    port: int
    engine: FakeEngine
    llm: AsyncLLM
    http: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=_playing({"prompt": "a", **body}))

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.http.post("/v1/chat/completions", json=_playing({"messages": messages, **body}))

    def events(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end well."""
        response = self.http.post(path, json=_playing({"stream": True, **body}))
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def chat_events(self, **body: Any) -> list[dict[str, Any]]:
        return self.events("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})

    def connect(self, method: str, path: str, body: dict[str, Any] | None = None) -> socket.socket:
        """A raw connection on which a request was sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(raw_request(method, path, _playing(body or {})))
        return connection


def raw_request(method: str, path: str, body: dict[str, Any]) -> bytes:
    """A request as it goes over the wire."""
    data = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"]
    assert "Traceback" not in error["message"]
    return dict(error)


def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something to come true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.002)


@contextlib.contextmanager
def serving(
    engine: FakeEngine | None = None, tokenizer: Any = "byte", app: Any = None, **facts: Any
) -> Iterator[Served]:
    """A server over ``engine``; every request may bring a ``script``."""
    engine = engine or FakeEngine()
    built: Any = fake_built(engine, tokenizer, **{"extensions": ["script"], **facts})
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    llm = AsyncLLM(client=ThreadClient(lambda: built))
    found: list[uvicorn.Server] = []

    async def run() -> None:
        async with llm:
            config = uvicorn.Config(create_app(llm, **(app or {})), http=HalfCloseProtocol, log_level="warning")
            found.append(uvicorn.Server(config))
            await found[0].serve(sockets=[sock])

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    until(lambda: bool(found) and found[0].started)
    port = sock.getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            yield Served(port, engine, llm, http)
    finally:
        found[0].should_exit = True
        thread.join()


def _playing(body: dict[str, Any]) -> dict[str, Any]:
    """``script`` may be written as text."""
    script = body.get("script")
    return {**body, "script": spell(script)} if isinstance(script, str) else body
