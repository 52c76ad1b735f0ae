"""``AsyncLLM`` over an engine in a thread, and what a client of an engine process is told."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.core.fake_engine import FakeEngine, fake_built, spell

from mini_infer import AsyncLLM, ConfigError, EngineError, RequestError, SamplingParams
from mini_infer.serving.engine_thread import ThreadClient

Scripted = Callable[[FakeEngine], Awaitable[AsyncLLM]]


@pytest.fixture
async def start() -> AsyncIterator[Scripted]:
    opened: list[AsyncLLM] = []

    async def open_llm(engine: FakeEngine) -> AsyncLLM:
        built: Any = fake_built(engine, extensions=["script"])
        llm = AsyncLLM(client=ThreadClient(lambda: built))
        opened.append(llm)
        await llm.start()
        return llm

    yield open_llm
    for llm in opened:
        await llm.close()


def playing(text: str, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "extensions": {"script": spell(text)}, **params})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.002)


async def test_many_requests_at_once(start: Scripted) -> None:
    llm = await start(FakeEngine())
    outs = await asyncio.gather(*(llm.generate("a", playing(f"answer {i}")) for i in range(20)))
    assert [out.outputs[0].text for out in outs] == [f"answer {i}" for i in range(20)]


async def test_a_stream(start: Scripted) -> None:
    llm = await start(FakeEngine())
    deltas = [delta async for delta in llm.stream("a", playing("hello"), request_id="mine")]
    assert "".join(delta.text for delta in deltas) == "hello"
    assert {delta.request_id for delta in deltas} == {"mine"} and deltas[-1].finish_reason == "stop"


async def test_chat(start: Scripted) -> None:
    llm = await start(FakeEngine())
    out = await llm.chat([{"role": "user", "content": "hi"}], playing("hello"))
    assert out.outputs[0].text == "hello"


async def test_leaving_the_loop_aborts(start: Scripted) -> None:
    engine = FakeEngine(step_seconds=0.02)
    llm = await start(engine)
    stream = llm.stream("a", playing("x" * 90))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: len(engine.aborted) == 1)


async def test_cancelling_the_consumer_aborts_without_awaiting(start: Scripted) -> None:
    engine = FakeEngine(step_seconds=0.02)
    llm = await start(engine)
    task = asyncio.create_task(llm.generate("a", playing("x" * 90)))
    await until(lambda: len(engine.added) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(llm._book) == 0  # at once, before anything else ran
    await until(lambda: len(engine.aborted) == 1)


async def test_abort_by_id_ends_the_stream_with_what_was_held(start: Scripted) -> None:
    engine = FakeEngine(step_seconds=0.02)
    llm = await start(engine)
    deltas = []
    async for delta in llm.stream("a", playing("x" * 90), request_id="mine"):
        deltas.append(delta)
        if len(deltas) == 3:
            llm.abort("mine")
            llm.abort("mine")
            llm.abort("unknown")
    assert deltas[-1].finish_reason == "abort"
    await until(lambda: engine.aborted == ["mine-0"])


async def test_an_id_in_use_is_refused(start: Scripted) -> None:
    llm = await start(FakeEngine(step_seconds=0.02))
    stream = llm.stream("a", playing("x" * 90), request_id="mine")
    await anext(stream)
    with pytest.raises(RequestError, match="in use"):
        await llm.generate("a", request_id="mine")
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_wrong_request_is_refused_at_once(start: Scripted) -> None:
    engine = FakeEngine()
    llm = await start(engine)
    with pytest.raises(RequestError):
        await llm.generate([500])
    assert engine.added == []


async def test_the_engine_may_refuse_later(start: Scripted) -> None:
    engine = FakeEngine()
    llm = await start(engine)
    engine.refuse = RequestError("no such thing", param="script", code="bad_script")
    with pytest.raises(RequestError, match="no such thing") as caught:
        await llm.generate("a", SamplingParams(n=2))
    assert (caught.value.param, caught.value.code) == ("script", "bad_script")
    engine.refuse = None
    assert (await llm.generate("a", playing("ok"))).outputs[0].text == "ok"


async def test_a_stop_string_ends_the_work_in_the_engine(start: Scripted) -> None:
    engine = FakeEngine(step_seconds=0.02)
    llm = await start(engine)
    out = await llm.generate("a", playing("go klmnop" + "x" * 80, stop=["klm"]))
    assert out.outputs[0].text == "go "
    await until(lambda: len(engine.aborted) == 1)


async def test_the_engines_death_reaches_everybody(start: Scripted) -> None:
    engine = FakeEngine(step_seconds=0.05)  # slow enough that no answer ends before the engine does
    llm = await start(engine)
    waiting = [asyncio.create_task(llm.generate("a", playing("x" * 90))) for _ in range(3)]
    await until(lambda: len(engine.added) == 3)
    engine.fail_with = RuntimeError("the card fell out")
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, EngineError) and "the card fell out" in str(result)
    assert not llm.alive and llm.death.is_set()
    with pytest.raises(EngineError, match="the card fell out"):
        await llm.generate("a")
    await until(lambda: engine.closed)  # by its own thread, which has told everybody before


async def test_a_failed_build_raises_where_it_was_started() -> None:
    def build() -> Any:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        async with AsyncLLM(client=ThreadClient(build)):
            pass


async def test_an_idle_engine_says_that_it_lives(start: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer.serving.engine_client.HEARTBEAT_SECONDS", 0.01)
    llm = await start(FakeEngine())
    asked = time.monotonic()
    await until(lambda: llm.last_sign_of_life > asked)


async def test_close_fails_what_is_open(start: Scripted) -> None:
    engine = FakeEngine(step_seconds=0.02)
    llm = await start(engine)
    task = asyncio.create_task(llm.generate("a", playing("x" * 90)))
    await until(lambda: len(engine.added) == 1)
    await llm.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    assert engine.closed


async def test_unstarted() -> None:
    with pytest.raises(EngineError, match="not started"):
        await AsyncLLM(client=ThreadClient(lambda: fake_built())).generate("a")  # type: ignore[arg-type, return-value]
