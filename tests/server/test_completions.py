"""``/v1/completions``: prompts, echo, logprobs, choices, streams."""

import json
from typing import Any

import pytest
from tests.core.fake_engine import FakeEngine
from tests.server.serving import Served, error_of, serving

from mini_infer.testing.tokenizers import sentencepiece_tokenizer
from mini_infer.text.hf_tokenizer import HFTokenizer


def test_the_shape_of_an_answer(server: Served) -> None:
    answer = server.complete(prompt="hx", script="yo", max_tokens=9).json()
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-") and isinstance(answer["created"], int)
    assert answer["choices"] == [{"index": 0, "text": "yo", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["total_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hi", ["hi"]),
        (["hi", "yo"], ["hi", "yo"]),
        ([104, 105], ["hi"]),
        ([[104], [105]], ["h", "i"]),
        ([[104, 105]], ["hi"]),
    ],
)
def test_four_ways_to_give_prompts(server: Served, prompt: Any, texts: list[str]) -> None:
    choices = server.complete(prompt=prompt).json()["choices"]
    assert [choice["text"] for choice in choices] == texts


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(server: Served) -> None:
    prompts = ["ab", "cd", "ef"]
    answer = server.complete(prompt=prompts, n=2).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    alone = [choice["text"] for prompt in prompts for choice in server.complete(prompt=prompt, n=2).json()["choices"]]
    assert [choice["text"] for choice in answer["choices"]] == alone
    assert answer["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
def test_sixteen_tokens_unless_asked(server: Served, given: dict[str, Any]) -> None:
    answer = server.complete(script="x" * 40, **given).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_as_many_tokens_as_fit(server: Served) -> None:
    answer = server.complete(prompt=[1] * 120, script="x" * 60, max_tokens=50).json()
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"


def test_echo_gives_the_prompt_as_it_was_written(server: Served) -> None:
    prompt = "a  b<|u|>c\n"
    assert server.complete(prompt=prompt, echo=True, script="x").json()["choices"][0]["text"] == prompt + "x"
    assert server.complete(prompt=[104, 105], echo=True, script="x").json()["choices"][0]["text"] == "hix"
    assert server.complete(prompt="ab", echo=True, max_tokens=0).json()["choices"][0]["text"] == "ab"


def test_logprobs(server: Served) -> None:
    found = server.complete(script="ab", logprobs=2).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b", "<|stop|>"]
    assert found["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert found["top_logprobs"][:2] == [{"a": -0.5, "b": -0.25}, {"b": -0.5, "c": -0.25}]
    assert found["text_offset"] == [0, 1, 2]


def test_the_token_that_stands_there_is_always_among_the_top(server: Served) -> None:
    found = server.complete(script="a", logprobs=0).json()["choices"][0]["logprobs"]
    assert found["top_logprobs"][0] == {"a": -0.5}


def test_broken_characters_are_told_apart(server: Served) -> None:
    found = server.complete(script=list("é".encode()), logprobs=1).json()["choices"][0]["logprobs"]
    assert found["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert found["text_offset"][:2] == [0, 0]


def test_echoed_logprobs_begin_with_null_and_cover_every_position(server: Served) -> None:
    body = {"prompt": "hello there", "echo": True, "logprobs": 1, "max_tokens": 1, "script": "x"}
    choice = server.complete(**body).json()["choices"][0]
    found = choice["logprobs"]
    num_prompt = len(server.llm.frontend.request("hello there", server.llm.frontend.sampling_params()).prompt_token_ids)
    assert {len(values) for values in found.values()} == {num_prompt + 1}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert None not in found["token_logprobs"][1:]
    assert "".join(found["tokens"]) == choice["text"] == "hello therex"
    starts = [choice["text"][o:] for o in found["text_offset"]]
    assert all(start.startswith(token) for start, token in zip(starts, found["tokens"], strict=True))


def test_scoring_alone(server: Served) -> None:
    choice = server.complete(prompt="hello", echo=True, logprobs=1, max_tokens=0).json()["choices"][0]
    assert choice["text"] == "hello" and "".join(choice["logprobs"]["tokens"]) == "hello"


def test_a_stream_gives_the_same_as_the_whole(server: Served) -> None:
    body = {"prompt": ["hello", "there"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 12}
    whole = server.complete(**body).json()
    texts = [""] * 4
    lists: list[dict[str, list[Any]]] = [{} for _ in range(4)]
    finishes: dict[int, str] = {}
    for event in server.events(**body):
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in finishes
            texts[index] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                lists[index].setdefault(name, []).extend(values)
            if choice["finish_reason"]:
                finishes[index] = choice["finish_reason"]
    for choice in whole["choices"]:
        index = choice["index"]
        assert (texts[index], lists[index]) == (choice["text"], choice["logprobs"])
        assert finishes[index] == choice["finish_reason"]


def test_usage_in_streams(server: Served) -> None:
    assert all("usage" not in event for event in server.events(prompt="a", script="xy"))
    events = server.events(prompt="a", script="xy", stream_options={"include_usage": True})
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3
    events = server.events(prompt="a", script="xy", stream_options={"continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


def test_bos_makes_an_empty_prompt_possible() -> None:
    with serving(tokenizer=HFTokenizer(sentencepiece_tokenizer().hf())) as server:
        answer = server.complete(prompt="", script=[5]).json()
        assert answer["usage"]["prompt_tokens"] == 1


def test_without_a_tokenizer_token_ids_work() -> None:
    with serving(FakeEngine(lambda request: [7, 8, 9]), tokenizer=None) as server:
        answer = server.complete(prompt=[1, 2], max_tokens=3, logprobs=0).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:7", "token_id:8", "token_id:9"]
        assert error_of(server.complete(prompt="text"))["param"] == "prompt"
        assert server.chat().status_code == 400


def test_extensions_reach_the_engine(server: Served) -> None:
    asked = {
        "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [7], "include_stop_str_in_output": True, "seed": -5, "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": {"5": 100}, "top_p": 0.0, "temperature": 2, "stop": "zz",
    }  # fmt: skip
    server.complete(script="abcd", priority=-3, deadline_ms=10, cache_salt="s", **asked)
    request = server.engine.added[-1]
    for name in ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "seed", "top_p", "temperature"):
        assert getattr(request.params, name) == asked[name], name
    assert request.params.stop_token_ids == (7,) and request.params.logit_bias == {5: 100.0}
    assert request.params.stop_strings == ("zz",) and request.params.include_stop_str_in_output
    assert (request.priority, request.deadline_ms, request.cache_salt) == (-3, 10.0, "s")


def test_unknown_and_personal_fields_pass(server: Served) -> None:
    answer = server.complete(script="x", user="me", metadata={"a": 1}, store=True, whatever=[[1]])
    assert answer.status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_what_fails_in_the_engine_is_500(server: Served, streamed: bool) -> None:
    from mini_infer.messages import TokenDelta

    advance = server.engine._advance

    def fail(request_id: str) -> TokenDelta:
        del server.engine.requests[request_id]
        return TokenDelta(request_id=request_id, finish_reason="error", error="its logits were not finite")

    server.engine._advance = fail  # type: ignore[method-assign]
    try:
        response = server.complete(stream=streamed)
    finally:
        server.engine._advance = advance  # type: ignore[method-assign]
    assert response.status_code == 500
    assert error_of(response)["message"] == "its logits were not finite"


def test_what_fails_amid_a_stream_is_an_event(server: Served) -> None:
    from mini_infer.messages import TokenDelta

    advance = server.engine._advance
    steps = []

    def fail(request_id: str) -> TokenDelta:
        steps.append(request_id)
        if len(steps) < 3:
            return advance(request_id)
        del server.engine.requests[request_id]
        return TokenDelta(request_id=request_id, finish_reason="error", error="its logits were not finite")

    server.engine._advance = fail  # type: ignore[method-assign]
    try:
        response = server.complete(stream=True, script="abcdef")
    finally:
        server.engine._advance = advance  # type: ignore[method-assign]
    assert response.status_code == 200
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["message"] == "its logits were not finite"


def test_a_refusal_of_the_engine_is_400_also_for_streams(server: Served) -> None:
    from mini_infer import RequestError

    server.engine.refuse = RequestError("no such thing", param="script", code="bad")
    try:
        for streamed in (False, True):
            response = server.complete(prompt=["a", "b"], stream=streamed)
            assert response.status_code == 400 and error_of(response)["param"] == "script"
    finally:
        server.engine.refuse = None
