"""``LLM``: scripts' view of the engine, over a fake one and over the toy model."""

import io
import subprocess
import sys
import threading
from typing import Any

import pytest
from tests.core.fake_engine import EOS, FakeEngine, fake_built, spell

import mini_infer
from mini_infer import LLM, EngineError, RequestError, SamplingParams
from mini_infer.testing.engines import assert_idle, assert_same_tokens, make_llm

CHAT = [{"role": "user", "content": "hi"}]


def scripted(engine: FakeEngine) -> LLM:
    return LLM.from_engine(fake_built(engine, extensions=["script"]))  # type: ignore[arg-type]


def playing(text: str, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "extensions": {"script": spell(text)}, **params})


def test_answers_come_in_the_order_of_the_prompts() -> None:
    llm = scripted(FakeEngine())
    outs = llm.generate(["a", [98, 99]], [playing("one"), playing("three")])
    assert [out.outputs[0].text for out in outs] == ["one", "three"]
    assert [out.prompt for out in outs] == ["a", None]
    assert outs[1].prompt_token_ids == [98, 99]
    assert all(out.finished and out.outputs[0].finish_reason == "stop" for out in outs)
    assert outs[0].metrics.latency is not None and outs[0].metrics.time_to_first_token is not None


@pytest.mark.parametrize(("prompts", "count"), [("ab", 1), ([97, 98], 1), (["ab"], 1), ([[97], [98]], 2), ([], 0)])
def test_one_prompt_or_several(prompts: Any, count: int) -> None:
    assert len(scripted(FakeEngine()).generate(prompts, playing("x"))) == count


def test_the_same_params_object_may_repeat() -> None:
    params = playing("x")
    assert len(scripted(FakeEngine()).generate(["a", "b"], [params, params])) == 2


def test_as_many_params_as_prompts() -> None:
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        scripted(FakeEngine()).generate(["a", "b"], [playing("x")])


def test_one_wrong_request_runs_nothing() -> None:
    engine = FakeEngine()
    with pytest.raises(RequestError):
        scripted(engine).generate(["a", [1] * 500])
    assert engine.added == [] and engine.num_steps == 0


def test_a_request_that_the_engine_refuses_leaves_nothing_behind() -> None:
    engine = FakeEngine()
    llm = scripted(engine)
    engine.refuse = RequestError("not today")
    with pytest.raises(RequestError, match="not today"):
        llm.generate(["a", "b"])
    engine.refuse = None
    assert llm.generate("a", playing("x"))[0].outputs[0].text == "x"


@pytest.mark.parametrize(
    "prompts",
    [None, 5, {1, 2}, b"ab", [b"ab"], [None], ["a", 5], {}, {"prompt": None}, {"prompt_token_ids": None},
     {"prompt_token_ids": 5}],
    ids=str,
)  # fmt: skip
def test_what_is_no_prompt(prompts: Any) -> None:
    with pytest.raises(RequestError, match="must be text"):
        scripted(FakeEngine()).generate(prompts)


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "hi"}, [], [5]], ids=str)
def test_what_is_no_chat(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        scripted(FakeEngine()).chat(messages)


def test_n_choices() -> None:
    engine = FakeEngine(lambda request: [97 + request.choice, EOS])
    out = LLM.from_engine(fake_built(engine)).generate("a", SamplingParams(n=3))[0]  # type: ignore[arg-type]
    assert [(c.index, c.text) for c in out.outputs] == [(0, "a"), (1, "b"), (2, "c")]


def test_chat_has_all_the_room_and_takes_several_chats() -> None:
    llm = scripted(FakeEngine())
    assert llm.chat(CHAT)[0].outputs[0].finish_reason == "stop"
    assert len(llm.chat([CHAT, CHAT])) == 2
    with pytest.raises(RequestError):
        llm.chat([])


def test_a_stream_gives_what_generate_gives() -> None:
    llm = scripted(FakeEngine())
    deltas = list(llm.stream("a", playing("hello😀")))
    assert "".join(delta.text for delta in deltas) == "hello😀"
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "stop"


def test_a_wrong_stream_is_refused_before_it_is_read() -> None:
    with pytest.raises(RequestError):
        scripted(FakeEngine()).stream("")


def test_generate_while_streams_are_open() -> None:
    llm = scripted(FakeEngine())
    first, second = llm.stream("a", playing("first")), llm.stream("b", playing("second"))
    head = next(first).text + next(second).text
    assert llm.generate("c", playing("between"))[0].outputs[0].text == "between"
    assert head == "fs"
    assert "".join(d.text for d in second) == "econd"
    assert "".join(d.text for d in first) == "irst"


def test_a_closed_stream_is_aborted() -> None:
    engine = FakeEngine()
    stream = scripted(engine).stream("a", playing("a long answer"))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(engine.aborted) == 1 and not engine.has_work()


def test_a_stop_string_ends_the_work_in_the_engine() -> None:
    engine = FakeEngine()
    out = scripted(engine).generate("a", playing("a long answer", stop=["long"]))[0]
    assert out.outputs[0].text == "a " and len(engine.aborted) == 1


def test_an_interrupted_generate_aborts_its_requests() -> None:
    engine = FakeEngine()
    llm = scripted(engine)
    engine.fail_with = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"])
    assert len(engine.aborted) == 2


def test_a_dead_engine_fails_everybody() -> None:
    engine = FakeEngine()
    llm = scripted(engine)
    stream = llm.stream("a", playing("abc"))
    next(stream)
    engine.fail_with = EngineError("the device is lost")
    with pytest.raises(EngineError, match="the device is lost"):
        llm.generate("b")
    with pytest.raises(EngineError, match="the device is lost"):
        next(stream)
    with pytest.raises(EngineError, match="the device is lost"):
        llm.generate("c")


def test_close_is_final_and_may_be_repeated() -> None:
    engine = FakeEngine()
    with scripted(engine) as llm:
        stream = llm.stream("a", playing("abc"))
        next(stream)
    llm.close()
    assert engine.closed
    for use in (lambda: next(stream), lambda: llm.generate("a")):
        with pytest.raises(EngineError, match="closed"):
            use()


def test_calls_from_several_threads_take_turns() -> None:
    llm = scripted(FakeEngine(step_seconds=0.001))
    texts = [f"answer {i}" for i in range(8)]
    found: dict[str, str] = {}

    def work(text: str) -> None:
        found[text] = llm.generate("a", playing(text))[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {text: text for text in texts}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_shown_on_terminals_only(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    scripted(FakeEngine(step_seconds=0.01)).generate("a", playing("a few tokens"))
    assert bool(stderr.getvalue()) == terminal


# -- over a real engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy() -> LLM:
    return make_llm("toy", max_model_len=128)


def test_alone_batched_and_streamed_tokens_are_the_same(toy: LLM) -> None:
    prompts = [[5, 6, 7], list(range(40)), [300]]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, n=2, ignore_eos=True)
    together = toy.generate(prompts, params)
    assert_same_tokens(together, [toy.generate([prompt], params)[0] for prompt in prompts])
    for prompt, whole in zip(prompts, together, strict=True):
        streamed: dict[int, list[int]] = {0: [], 1: []}
        for delta in toy.stream(prompt, params):
            streamed[delta.index] += delta.token_ids
        assert streamed == {choice.index: choice.token_ids for choice in whole.outputs}
    assert_idle(toy.built.engine)


def test_choice_0_is_the_answer_of_n_1(toy: LLM) -> None:
    one, three = (toy.generate([1, 2], SamplingParams(seed=9, n=n, max_tokens=8))[0] for n in (1, 3))
    assert one.outputs[0].token_ids == three.outputs[0].token_ids
    assert three.outputs[1].token_ids != three.outputs[0].token_ids


def test_prompt_logprobs_cover_the_prompt(toy: LLM) -> None:
    out = toy.generate([1, 2, 3, 4], SamplingParams(max_tokens=1, prompt_logprobs=2, logprobs=2))[0]
    assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
    assert [next(iter(p)) for p in out.prompt_logprobs[1:] if p] == [2, 3, 4]
    scored = toy.generate([1, 2, 3, 4], SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
    assert scored.outputs[0].token_ids == [] and scored.outputs[0].finish_reason == "length"
    assert scored.prompt_logprobs == out.prompt_logprobs


def test_ended_by_a_stop_string_or_closed_nothing_is_held(toy: LLM) -> None:
    plain = toy.generate([1, 2], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))[0].outputs[0]
    stop = next(char for char in plain.text if char.strip())
    cut = toy.generate([1, 2], SamplingParams(max_tokens=20, temperature=0, stop=stop, ignore_eos=True))[0].outputs[0]
    assert cut.text == plain.text.partition(stop)[0] and cut.finish_reason == "stop"
    stream = toy.stream([1, 2], SamplingParams(max_tokens=20))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    toy.generate([1], SamplingParams(max_tokens=1))
    assert_idle(toy.built.engine)


# -- the package ------------------------------------------------------------------------------------------------------


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_brings_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'tokenizers', 'rich', 'pydantic', 'litestar', 'jinja2', 'numpy')"
    names = "LLM, AsyncLLM, SamplingParams, RequestError, RequestOutput"
    code = f"import sys; from mini_infer import {names}; print([m for m in {heavy} if m in sys.modules])"
    assert run(code).strip() == "[]"


@pytest.mark.parametrize("name", mini_infer.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(mini_infer, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="LMM"):
        _ = mini_infer.LMM
