"""The ``openai`` library against the server: synchronous, asynchronous, streamed, and its errors."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.core.fake_engine import FakeEngine, spell
from tests.server.serving import Served, serving

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def playing(text: str) -> dict[str, Any]:
    return {"script": spell(text)}


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=playing("hello"))
    assert answer.choices[0].message.content == "hello" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 6


def test_chat_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=playing("hey😀"),
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hey😀"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8


def test_the_helper_that_collects_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, extra_body=playing("hello")) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == "hello"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, extra_body=playing("hi")
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    assert [entry.token for entry in found.content] == ["h", "i", "<|stop|>"]
    assert found.content[0].top_logprobs[1].logprob == found.content[0].logprob


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], echo=True, logprobs=1, max_tokens=2)
    assert [choice.text[:2] for choice in answer.choices] == ["ab", "cd"]
    stream = client.completions.create(model="tiny", prompt=[[97, 98]], stream=True, max_tokens=2)
    assert "".join(chunk.choices[0].text for chunk in stream) == "ab"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=0)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES, stream=True)
    assert missing.value.code == "model_not_found"


async def test_asynchronous(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=playing("hello"))
        assert answer.choices[0].message.content == "hello"
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, extra_body=playing("hello")
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"


def test_an_error_amid_a_stream_is_raised() -> None:
    engine = FakeEngine(step_seconds=0.02)
    with serving(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, extra_body=playing("x" * 90)
        )
        next(iter(stream))
        engine.fail_with = RuntimeError("the card fell out")
        with pytest.raises(openai.APIError, match="the card fell out"):
            list(stream)
        with pytest.raises(openai.InternalServerError):
            client.with_options(max_retries=0).models.with_raw_response.list()
            client.with_options(max_retries=0).chat.completions.create(model="tiny", messages=MESSAGES)
        assert server.http.get("/health").status_code == 503
