"""Every wrong request: the status, OpenAI's shape, the field at fault; and nothing of it reaches the engine."""

import json
import socket
from typing import Any

import httpx
import pytest
from tests.server.serving import Served, error_of, serving

JSON = {"content-type": "application/json"}


def check(server: Served, response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["param"] == param, error
    return error


@pytest.fixture
def idle(server: Served) -> Any:
    """The server; the engine must have been asked nothing."""
    before = len(server.engine.added)
    yield server
    assert len(server.engine.added) == before


NULL_FREE: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True),
    ("n", 0), ("n", -1), ("n", 129), ("n", 1.0), ("n", 10**30),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", True), ("temperature", 1e300),
    ("top_p", 1.1), ("top_p", -0.1), ("top_k", -2), ("top_k", 1.0), ("min_p", 1.1), ("min_p", -1),
    ("repetition_penalty", 0), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
    ("seed", 2**64), ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", True), ("seed", "7"),
    ("stop", [""]), ("stop", ["a"] * 5), ("stop", 5), ("stop", [1]), ("stop", ""),
    ("stop_token_ids", [384]), ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", 5),
    ("logit_bias", {"384": 5}), ("logit_bias", {"350": 1}), ("logit_bias", {"-1": 5}), ("logit_bias", {"1" * 13: 5}),
    ("logit_bias", {"abc": 5}), ("logit_bias", {"1" * 5000: 5}), ("logit_bias", {"5": 101}), ("logit_bias", {"5": "x"}),
    ("logit_bias", {str(i): 1 for i in range(5000)}), ("logit_bias", []), ("logit_bias", {"05": 1}),
    ("logit_bias", {"٣": 1}), ("logit_bias", {"-0": 1}), ("logit_bias", {" 5": 1}),
    ("min_tokens", -1), ("ignore_eos", 1), ("include_stop_str_in_output", "yes"),
    ("priority", 2**40), ("priority", 1.0), ("deadline_ms", 0), ("deadline_ms", -1), ("deadline_ms", "soon"),
    ("cache_salt", 5), ("model", 5), ("stream", "yes"), ("stream", 1), ("stream_options", {"include_usage": 5}),
    ("stream_options", {"include_usage": True}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), NULL_FREE, ids=[f"{f}={str(v)[:20]}" for f, v in NULL_FREE])
def test_wrong_values_in_both_apis(idle: Served, field: str, value: Any) -> None:
    check(idle, idle.complete(**{field: value}), 400, field)
    check(idle, idle.chat(**{field: value}), 400, field)
    if field not in ("stream", "stream_options"):
        check(idle, idle.complete(**{field: value}, stream=True), 400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("logprobs", 6), ("logprobs", -1), ("logprobs", True), ("suffix", "x"), ("best_of", 2), ("echo", 1)],
)
def test_wrong_values_of_completions(idle: Served, field: str, value: Any) -> None:
    check(idle, idle.complete(**{field: value}), 400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_logprobs", 21), ("top_logprobs", -1), ("max_completion_tokens", 0), ("max_completion_tokens", "5")],
)
def test_wrong_values_of_chats(idle: Served, field: str, value: Any) -> None:
    check(idle, idle.chat(logprobs=True, **{field: value}), 400, field)


def test_top_logprobs_need_logprobs(idle: Served) -> None:
    check(idle, idle.chat(top_logprobs=2), 400, "top_logprobs")
    check(idle, idle.chat(logprobs=5), 400, "logprobs")


@pytest.mark.parametrize(
    "value",
    [{"top_p": 0.0}, {"top_p": 1.0}, {"top_k": -1}, {"top_k": 0}, {"top_k": 10**30}, {"min_p": 0}, {"min_p": 1},
     {"temperature": 0}, {"temperature": 1e-7}, {"temperature": 2}, {"seed": 2**63 - 1}, {"seed": -(2**63)},
     {"seed": 0}, {"seed": None}, {"n": None}, {"stop": []}, {"stop": None}, {"logit_bias": {}}, {"best_of": 1},
     {"min_tokens": 10**30}, {"max_tokens": 10**30}],
)  # fmt: skip
def test_edge_values_that_are_right(server: Served, value: dict[str, Any]) -> None:
    assert server.complete(script="a", **value).status_code == 200


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["aa", ""], ["a", [1]], [1, "a"], [[1], "a"], [[-1]], [384], [350], [True], [1.0], [[1.5]],
     [[[1]]], None, 5, {"a": 1}, [10**30], [[10**30]], [2, -1]],
    ids=str,
)  # fmt: skip
def test_wrong_prompts(idle: Served, prompt: Any) -> None:
    check(idle, idle.complete(prompt=prompt), 400, "prompt")


def test_a_missing_prompt_and_missing_messages(idle: Served) -> None:
    check(idle, idle.http.post("/v1/completions", json={}), 400, "prompt")
    check(idle, idle.http.post("/v1/chat/completions", json={}), 400, "messages")


@pytest.mark.parametrize("prompt", [[1] * 200, [1] * 128, ["a", [1] * 200][1], "word " * 300_000])
def test_too_long(idle: Served, prompt: Any) -> None:
    error = check(idle, idle.complete(prompt=prompt), 400, "prompt")
    assert error["code"] == "context_length_exceeded" and "128" in error["message"]


def test_a_batch_with_one_too_long_runs_nothing(idle: Served) -> None:
    check(idle, idle.complete(prompt=[[1], [1] * 200, [2]]), 400, "prompt")


def test_a_prompt_that_the_pool_cannot_hold() -> None:
    with serving(max_tokens_in_pool=64) as server:
        error = check(server, server.complete(prompt=[1] * 80), 400, "prompt")
        assert "80" in error["message"] and "64" in error["message"]
        assert server.complete(script="a").status_code == 200


def test_the_longest_prompt_that_fits(server: Served) -> None:
    answer = server.complete(prompt=[1] * 127, script="abc").json()
    assert answer["usage"]["completion_tokens"] == 1


# -- bodies -----------------------------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    return b'{"prompt": "a", "x": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"5", b'"a"', b"{", b"{}x", b"{'a': 1}", b'{"temperature": NaN}', b'{"top_p": Infinity}',
     b'{"temperature": 1e999}', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', nested(65), nested(2000)],
    ids=lambda body: body[:24],
)  # fmt: skip
def test_bodies_that_are_no_request(idle: Served, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = idle.http.post(path, content=body, headers=JSON)
        assert response.status_code == 400, response.text
        error_of(response)


@pytest.mark.parametrize("field", ["modalities", "script"])
def test_numbers_that_no_float_can_hold(idle: Served, field: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "{field}": [1e999]}}'
    check(idle, idle.http.post("/v1/chat/completions", content=body, headers=JSON), 400, field)


def test_deep_but_not_too_deep(server: Served) -> None:
    assert server.http.post("/v1/completions", content=nested(63), headers=JSON).status_code == 200
    brackets = json.dumps({"prompt": "a", "max_tokens": 1, "x": "[" * 500})
    assert server.http.post("/v1/completions", content=brackets, headers=JSON).status_code == 200


def test_the_last_of_duplicate_keys_wins(server: Served) -> None:
    body = b'{"prompt": "a", "max_tokens": 5, "max_tokens": 1, "script": [97, 97, 97]}'
    answer = server.http.post("/v1/completions", content=body, headers=JSON).json()
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_other_content_types(idle: Served, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    check(idle, idle.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers), 415)


def test_other_encodings(idle: Served) -> None:
    check(idle, idle.http.post("/v1/completions", content=b"{}", headers={**JSON, "content-encoding": "gzip"}), 415)


def test_a_charset_is_fine(server: Served) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    assert server.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_bodies_that_are_too_large(idle: Served) -> None:
    check(idle, idle.http.post("/v1/completions", content=b" " * 10_000_001, headers=JSON), 413)

    def chunks() -> Any:
        for _ in range(11):
            yield b" " * 1_000_000

    check(idle, idle.http.post("/v1/completions", content=chunks(), headers=JSON), 413)


# -- models, routes, keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nope", "", "tiny ", "x" * 5000])
def test_another_model(idle: Served, name: str) -> None:
    for response in (idle.complete(model=name), idle.chat(model=name)):
        assert check(idle, response, 404, "model")["code"] == "model_not_found"


@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": "tiny"}])
def test_the_served_model(server: Served, given: dict[str, Any]) -> None:
    assert server.complete(script="a", **given).json()["model"] == "tiny"


def test_models_are_listed(server: Served) -> None:
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["tiny"]
    assert server.http.get("/v1/models/tiny").json() == listed["data"][0]
    assert check(server, server.http.get("/v1/models/a/b"), 404, "model")["code"] == "model_not_found"


def test_a_served_name_may_hold_slashes() -> None:
    with serving(app={"model": "org/name"}) as server:
        assert server.http.get("/v1/models/org/name").json()["id"] == "org/name"
        assert server.complete(model="org/name", script="a").json()["model"] == "org/name"
        check(server, server.complete(model="tiny"), 404, "model")


def test_other_routes_and_methods(idle: Served) -> None:
    check(idle, idle.http.get("/nope"), 404)
    check(idle, idle.http.post("/v1/nope", json={}), 404)
    response = idle.http.get("/v1/completions")
    check(idle, response, 405)
    assert "POST" in response.headers["allow"]
    check(idle, idle.http.delete("/v1/models"), 405)


def test_version(server: Served) -> None:
    assert server.http.get("/version").json()["version"]


def test_keys() -> None:
    with serving(app={"api_keys": ["one", "two"]}) as server:
        for headers in (
            {},
            {"authorization": "Bearer three"},
            {"authorization": "one"},
            {"authorization": "Basic one"},
        ):
            error = check(server, server.http.get("/v1/models", headers=headers), 401)
            assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error"
        check(server, server.complete(), 401)
        for key in ("one", "two"):
            answer = server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        assert server.http.get("/health").status_code == 200


def test_good_and_bad_requests_on_one_connection(server: Served) -> None:
    with httpx.Client(base_url=server.url, limits=httpx.Limits(max_connections=1)) as one:
        for i in range(10):
            body = {"prompt": "a", "script": [97 + i]} if i % 2 else {"prompt": "a", "n": 0}
            response = one.post("/v1/completions", json=body)
            assert response.status_code == (200 if i % 2 else 400)
            if i % 2:
                assert response.json()["choices"][0]["text"] == chr(97 + i)


def test_bytes_that_are_no_http(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_an_error_of_our_own_says_nothing_of_itself(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("a secret of the server")

    monkeypatch.setattr("mini_infer_server.routes.completion_params", broken)
    error = check(server, server.complete(), 500)
    assert "secret" not in error["message"] and error["type"] == "server_error"


def test_one_bad_request_leaves_its_neighbour_alone() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from tests.core.fake_engine import FakeEngine

    with serving(FakeEngine(step_seconds=0.002)) as server, ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(lambda: server.complete(script="x" * 60, max_tokens=60))
        for field, value in NULL_FREE:
            server.chat(**{field: value})
        assert neighbour.result().json()["choices"][0]["text"] == "x" * 60
