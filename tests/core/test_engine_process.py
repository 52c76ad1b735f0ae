"""An engine in a process of its own: frames, a real start, failures on the way, and a clean end."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer import AsyncLLM, EngineError, RequestError, SamplingParams
from mini_infer.messages import EngineRequest, EngineStats, TokenDelta
from mini_infer.plan import TokenLogprobs
from mini_infer.serving.engine_client import Abort, Outputs, Rejection, Stop, Submit
from mini_infer.serving.engine_process import Died, Failed
from mini_infer.serving.engine_process_client import ProcessClient
from mini_infer.serving.frames import FrameReader, frame
from mini_infer.settings import EngineSettings, Settings
from mini_infer.testing.engines import tiny_model

# -- frames -----------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(
    n=2, stop=["a", "b"], logit_bias={5: -100.0}, stop_token_ids=[1], extensions={"x": [1, {"y": None}]}
)
REQUEST = EngineRequest(request_id="r-0", prompt_token_ids=[1, 2], params=PARAMS, seed=2**64 - 1, deadline_ms=0.5)
DELTA = TokenDelta(
    request_id="r-0", token_ids=[1], logprobs=[TokenLogprobs(1, -0.5, 1, [(1, -0.5)])], finish_reason="stop"
)
MESSAGES: list[Any] = [
    Submit([REQUEST]),
    Abort(["r-0", "é"]),
    Stop(),
    Outputs([DELTA], EngineStats(step_id=3), [Rejection("r-1", "no", "param")]),
    Died("why"),
]
ANY = Submit | Abort | Stop | Outputs | Died


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.integers(1, 60))
def test_frames_survive_any_cutting(messages: list[Any], size: int) -> None:
    wire = b"".join(map(frame, messages))
    reader: FrameReader[Any] = FrameReader(ANY)
    assert [m for i in range(0, len(wire), size) for m in reader.feed(wire[i : i + size])] == messages


@pytest.mark.parametrize("wire", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", frame(Stop())[:4] + b"\x80" * 99])
def test_what_is_no_message_is_an_error(wire: bytes) -> None:
    reader: FrameReader[Any] = FrameReader(ANY)
    with pytest.raises(EngineError):
        reader.feed(wire)


@pytest.mark.parametrize("kind", ["ConfigError", "PluginNotFoundError", "KeyError", "nonsense", "RequestError"])
def test_a_failure_keeps_its_class_if_it_is_ours(kind: str) -> None:
    error = Failed(kind, "one line").error()
    assert str(error) == "one line"
    assert type(error).__name__ == kind or isinstance(error, EngineError)


# -- the process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The toy model, as a plugin in a folder."""
    (tmp_path / "toy.py").write_text("from mini_infer.testing.toy_plugin import *\n")
    return Settings(
        model=str(tiny_model("toy")),
        plugins=("toy",),
        plugin_dirs=(str(tmp_path),),
        engine=EngineSettings(max_model_len=256, num_threads=1, num_kv_blocks=64),
    )


def is_gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_an_engine_process_from_start_to_end(settings: Settings) -> None:
    client = ProcessClient(settings)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, n=2, logprobs=1, ignore_eos=True)
    async with AsyncLLM(client=client) as llm:
        assert llm.frontend.facts.max_model_len == 256 and llm.frontend.tokenizer is not None
        once, again = await asyncio.gather(*(llm.generate([1, 2, 3], params) for _ in range(2)))
        assert [c.token_ids for c in once.outputs] == [c.token_ids for c in again.outputs]
        assert all(len(c.token_ids) == 12 and c.logprobs is not None for c in once.outputs)
        text = await llm.generate("hello", SamplingParams(max_tokens=4))
        assert text.prompt_token_ids == llm.frontend.tokenizer.encode("hello")

        with pytest.raises(RequestError):
            await llm.generate([5000])
        stream = llm.stream([1], SamplingParams(max_tokens=200, ignore_eos=True), request_id="long")
        await anext(stream)
        llm.abort("long")
        assert [delta async for delta in stream][-1].finish_reason == "abort"
        async with asyncio.timeout(10):
            while llm.stats.num_running or not llm.stats.num_aborted:
                await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="cannot be passed"):
            client.submit([msgspec.structs.replace(REQUEST, params=SamplingParams(extensions={"x": 2**70}))])
        assert llm.alive
    assert is_gone(client.pid)


async def test_a_start_that_is_given_up_leaves_no_process(settings: Settings) -> None:
    client = ProcessClient(settings)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), AsyncLLM(client=client):
            pass
    assert is_gone(client.pid)
