"""Clients that leave: the work stops, whatever the request was doing; and those who only seem to leave."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.core.fake_engine import FakeEngine
from tests.server.serving import Served, raw_request, serving, until

STEP = 0.01


@pytest.fixture
def slow() -> Iterator[Served]:
    with serving(FakeEngine(step_seconds=STEP), max_model_len=2048) as server:
        yield server
        until(lambda: not server.engine.has_work())
        assert server.http.get("/health").status_code == 200
        assert len(server.llm._book) == 0


def asked(**body: Any) -> dict[str, Any]:
    return {"prompt": "a", "script": "x" * 1000, "max_tokens": 1000, **body}


def running(server: Served, count: int = 1) -> None:
    until(lambda: len(server.engine.requests) == count)
    steps = server.engine.num_steps
    until(lambda: server.engine.num_steps >= steps + 3)


@pytest.mark.parametrize("streamed", [False, True])
def test_closing_the_socket_ends_the_work(slow: Served, streamed: bool) -> None:
    connection = slow.connect("POST", "/v1/completions", asked(stream=streamed))
    running(slow)
    connection.close()
    steps = slow.engine.num_steps
    until(lambda: len(slow.engine.aborted) == 1)
    assert slow.engine.num_steps - steps < 20


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reset_ends_the_work(slow: Served, streamed: bool) -> None:
    connection = slow.connect("POST", "/v1/completions", asked(stream=streamed))
    running(slow)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    until(lambda: len(slow.engine.aborted) == 1)


def test_every_choice_and_prompt_ends(slow: Served) -> None:
    connection = slow.connect("POST", "/v1/completions", asked(prompt=["a", "b"], n=3))
    running(slow, 6)
    connection.close()
    until(lambda: len(slow.engine.aborted) == 6)


def test_leaving_before_the_first_token() -> None:
    engine = FakeEngine(step_seconds=STEP)
    silent = threading.Event()
    advance = engine._advance

    def wait(request_id: str) -> Any:
        from mini_infer.messages import TokenDelta

        return advance(request_id) if silent.is_set() else TokenDelta(request_id=request_id)

    engine._advance = wait  # type: ignore[method-assign]
    with serving(engine) as server:
        for streamed in (False, True):
            connection = server.connect("POST", "/v1/completions", asked(stream=streamed, max_tokens=9))
            running(server)
            connection.close()
            until(lambda: not engine.has_work())
        assert len(engine.aborted) == 2
        silent.set()
        assert server.complete(script="a").status_code == 200


def test_fifty_at_once(slow: Served) -> None:
    connections = [slow.connect("POST", "/v1/completions", asked(stream=i % 2 == 0)) for i in range(50)]
    running(slow, 50)
    for connection in connections:
        connection.close()
    until(lambda: len(slow.engine.aborted) == 50)


@pytest.mark.parametrize("streamed", [False, True])
def test_half_a_connection_still_gets_its_answer(slow: Served, streamed: bool) -> None:
    connection = slow.connect("POST", "/v1/completions", asked(script="x" * 20 + "end", stream=streamed))
    running(slow)
    connection.shutdown(socket.SHUT_WR)
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    head, _, body = data.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    if streamed:
        assert body.count(b'"text":"x"') == 20 and b"[DONE]" in body
    else:
        assert json.loads(body)["choices"][0]["text"] == "x" * 20 + "end"
    assert slow.engine.aborted == []


def test_half_a_request_is_none(slow: Served) -> None:
    with socket.create_connection(("127.0.0.1", slow.port), timeout=5) as connection:
        connection.sendall(raw_request("POST", "/v1/completions", asked())[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert slow.engine.added == []


def test_a_client_that_does_not_read_slows_nobody(slow: Served) -> None:
    slow.engine.step_seconds = 0.0
    lazy = [slow.connect("POST", "/v1/completions", asked(stream=True, n=4)) for _ in range(4)]
    start = time.monotonic()
    assert slow.complete(script="hello").json()["choices"][0]["text"] == "hello"
    assert time.monotonic() - start < 5
    for connection in lazy:
        connection.close()


def test_the_next_request_on_the_connection_is_served(slow: Served) -> None:
    request = raw_request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
    with socket.create_connection(("127.0.0.1", slow.port), timeout=5) as connection:
        connection.sendall(request * 3)  # pipelined
        connection.shutdown(socket.SHUT_WR)
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
    assert data.count(b"HTTP/1.1 200 OK") == 3
