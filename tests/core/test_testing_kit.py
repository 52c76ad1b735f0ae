"""The kit that third parties test with: the script model, engines on tiny models, the reference, the pytest plugin."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from mini_infer import LLM, SamplingParams
from mini_infer.errors import ConfigError, RequestError
from mini_infer.messages import EngineRequest
from mini_infer.plan import Grant, LateInputs, NewRow, StepPlan
from mini_infer.testing.engines import EngineOutput, assert_same_tokens, make_engine, run_engine
from mini_infer.testing.engines import tiny_model as tiny_folder
from mini_infer.testing.plan_check import BrokenPlanError, PlanCheck
from mini_infer.testing.reference import Equality, Reference, end_of, reference_generate, reference_of
from mini_infer.testing.tokenizers import byte_tokenizer
from mini_infer.testing.traffic import random_traffic

MakeLLM = Callable[..., LLM]


# -- the model "script" ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"temperature": 2.0, "seed": 3}, {"top_p": 0.5, "top_k": 2}]
)
def test_a_script_is_played_and_then_ends(make_llm: MakeLLM, params: dict[str, Any]) -> None:
    llm = make_llm("script")
    script = byte_tokenizer().backend.encode("naïve 😀 text").ids
    asked = SamplingParams(max_tokens=60, extensions={"script": script}, **params)
    output, other = llm.generate(["go", [7] * 40], asked)
    assert output.outputs[0].token_ids == other.outputs[0].token_ids == [*script, 319]
    assert output.outputs[0].text == "naïve 😀 text" and output.outputs[0].finish_reason == "stop"


def test_scripts_survive_preemption_and_do_not_mix(make_llm: MakeLLM) -> None:
    llm = make_llm("script", block_size=4, num_kv_blocks=12, max_num_seqs=4, max_num_batched_tokens=8)
    scripts = [[10 + i] * (3 + 5 * i) for i in range(6)]
    each = [SamplingParams(max_tokens=30, extensions={"script": script}) for script in scripts]
    outputs = llm.generate([[1, 2, 3]] * 6, each)
    assert [output.outputs[0].token_ids for output in outputs] == [[*script, 319] for script in scripts]
    assert llm.built.engine.stats().num_preemptions > 0


def test_without_a_script_there_is_only_the_end(make_llm: MakeLLM) -> None:
    assert make_llm("script").generate("hello")[0].outputs[0].token_ids == [319]


@pytest.mark.parametrize("script", [[384], [-1], [True], "abc", 7, [1.5]])
def test_a_malformed_script_is_refused(make_llm: MakeLLM, script: object) -> None:
    with pytest.raises(RequestError, match="list of token ids") as refused:
        make_llm("script").generate("hello", SamplingParams(extensions={"script": script}))
    assert refused.value.param == "script"


def test_a_script_is_for_the_script_model_only(make_llm: MakeLLM) -> None:
    with pytest.raises(RequestError, match="script"):
        make_llm("toy", plugins=["testing"]).generate("hello", SamplingParams(extensions={"script": [1]}))


def test_step_ms_slows_a_step() -> None:
    from mini_infer.testing.plugin import Settings

    assert Settings().step_ms == 0.0
    engine = make_engine("script", plugin={"testing": {"step_ms": 20.0}}).engine
    started = engine.stats().step_id
    request = EngineRequest(
        request_id="a", prompt_token_ids=[1], params=SamplingParams(max_tokens=3, extensions={"script": [5] * 9})
    )
    assert run_engine(engine, [request])["a"].token_ids == [5, 5, 5]
    assert engine.stats().step_id == started + 3


# -- engines on tiny models --------------------------------------------------------------------------------------------


def test_tiny_models_are_made_once_and_are_what_was_asked(tiny_model: Callable[..., Path]) -> None:
    assert tiny_model("toy") == tiny_model("toy") != tiny_model("toy", seed=1)
    config = msgspec.json.decode((tiny_model("toy", hidden_size=32) / "config.json").read_bytes())
    assert (config["hidden_size"], config["vocab_size"], config["eos_token_id"]) == (32, 384, 319)


def test_ids_without_a_token_are_never_sampled_but_have_logprobs(make_llm: MakeLLM) -> None:
    llm = make_llm("toy")
    prompt = list(range(40))
    output = llm.generate([prompt], SamplingParams(max_tokens=40, seed=2, temperature=2.0, logprobs=20))[0].outputs[0]
    listed = {token for position in output.logprobs or [] for token in position}
    assert max(output.token_ids) < 320 <= max(listed)
    request = EngineRequest(
        request_id="a", prompt_token_ids=prompt, params=SamplingParams(max_tokens=40, temperature=2.0), seed=2,
        eos_token_ids=[319],
    )  # fmt: skip
    reference = reference_of(tiny_folder("toy"), valid_vocab=320)
    assert reference.generate(request).token_ids == output.token_ids


def test_engines_read_neither_file_nor_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mini-infer.toml").write_text("[engine]\nblock_size = 4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINI_INFER_ENGINE__BLOCK_SIZE", "8")
    assert any("blocks of 16 " in line for line in make_engine("toy").log)


def test_same_tokens_says_where_they_part() -> None:
    same = [[1, 2, 3], [4]]
    assert_same_tokens(same, [[1, 2, 3], [4]])
    assert_same_tokens({"a": EngineOutput("a", [1, 2])}, {"a": [1, 2]})
    with pytest.raises(AssertionError, match="answer 0 differs from token 2"):
        assert_same_tokens(same, [[1, 2, 4], [4]])
    with pytest.raises(AssertionError, match="answer 1 differs from token 1"):
        assert_same_tokens(same, [[1, 2, 3], [4, 5]])
    with pytest.raises(AssertionError, match="cannot be compared"):
        assert_same_tokens(same, [[1, 2, 3]])


def test_same_tokens_takes_the_answers_of_an_llm(make_llm: MakeLLM) -> None:
    llm = make_llm("toy")
    params = SamplingParams(n=2, seed=1, max_tokens=6)
    first, second = llm.generate(["a", "b"], params), llm.generate(["a", "b"], params)
    assert_same_tokens(first, second)
    with pytest.raises(AssertionError, match=r"answer 0\.0 differs"):
        assert_same_tokens(first, second[::-1])


def test_the_pytest_plugin_loads_no_torch() -> None:
    code = (
        "import sys, mini_infer.testing.pytest_plugin as p; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_named_model_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="scrip"):
        make_engine("scrip")


# -- the reference -----------------------------------------------------------------------------------------------------


def tiny_request(**params: Any) -> EngineRequest:
    given = {"max_tokens": 8, "temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1, **params}
    return EngineRequest(request_id="a", prompt_token_ids=[5, 6, 7], params=SamplingParams(**given), seed=3)


def test_both_ways_of_asking_the_reference_agree() -> None:
    """Drawing token by token, and checking given tokens in one pass."""
    folder, request = tiny_folder("toy"), tiny_request()
    outputs = run_engine(make_engine("toy").engine, [request])
    assert outputs["a"].token_ids == reference_generate(folder, request).token_ids
    equality = Equality(reference_of(folder))
    equality.check([request], outputs)
    assert (equality.num_requests, equality.num_cuts) == (1, 0)


def output_of(request: EngineRequest) -> EngineOutput:
    return run_engine(make_engine("toy").engine, [request])["a"]


def change_logprobs(**changes: Any) -> Callable[[EngineOutput], None]:
    def change(output: EngineOutput) -> None:
        output.logprobs[0] = msgspec.structs.replace(output.logprobs[0], **changes)

    return change


WRONG: dict[str, tuple[Callable[[EngineOutput], None], str]] = {
    "a token": (lambda o: o.token_ids.__setitem__(3, (o.token_ids[3] + 1) % 384), "as token 3 of 8"),
    "one too few": (lambda o: (o.token_ids.pop(), o.logprobs.pop()), "after 7 tokens"),
    "one too many": (lambda o: (o.token_ids.append(1), o.logprobs.append(o.logprobs[0])), "token"),
    "the reason": (lambda o: setattr(o, "finish_reason", "stop"), "ended with"),
    "an error": (lambda o: setattr(o, "finish_reason", "error"), "ended with error"),
    "no logprobs": (lambda o: o.logprobs.clear(), "has 0 logprobs"),
    "a logprob": (change_logprobs(logprob=-1.0), "not -1.0"),
    "a rank": (change_logprobs(rank=384), "rank 384"),
    "the most likely": (change_logprobs(top=[]), "most likely"),
    "prompt logprobs": (lambda o: o.prompt_logprobs.pop(), "has 1 prompt logprobs, not 2"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_the_check_finds_what_is_wrong(what: str) -> None:
    request = tiny_request()
    output = output_of(request)
    spoil, message = WRONG[what]
    spoil(output)
    with pytest.raises(AssertionError, match=message):
        reference_of(tiny_folder("toy")).check(request, output)


def test_a_call_too_close_to_tell_is_cut_and_counted() -> None:
    request, reference = (
        tiny_request(temperature=0.0, logprobs=None, prompt_logprobs=None),
        Reference(tiny_folder("toy")),
    )
    output = output_of(request)

    def tied(token_ids: Any) -> Any:
        """The two most likely tokens of each position as good as equal."""
        logits = exact(token_ids).copy()
        for row in logits:
            first, second = np.argsort(row)[::-1][:2]
            row[second] = np.nextafter(row[first], np.float32(-1e9))
        return logits

    exact, reference._logits_of = reference._logits_of, tied  # type: ignore[assignment]
    raw = reference.logits([*request.prompt_token_ids, *output.token_ids[:-1]])[2:]
    output.token_ids[4] = int(np.argsort(raw[4])[::-1][1])
    assert reference.check(request, output)
    equality = Equality(reference)
    equality.check([request], {"a": output})  # one in a thousand, rounded up
    with pytest.raises(AssertionError, match="2 of 2 requests had to be cut"):
        equality.check([request], {"a": output})


def test_where_a_request_ends() -> None:
    request = tiny_request(max_tokens=4, min_tokens=2, stop_token_ids=[9])
    request = msgspec.structs.replace(request, eos_token_ids=[8])
    assert end_of(request, [9]) == (None, None)
    assert end_of(request, [1, 9]) == ("stop", 9)
    assert end_of(request, [1, 2, 8]) == ("stop", 8)
    assert end_of(request, [1, 2, 3, 4]) == ("length", None)
    deaf = msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, ignore_eos=True))
    assert end_of(deaf, [1, 2, 8]) == (None, None)
    assert end_of(deaf, [1, 2, 9]) == ("stop", 9)
    assert end_of(tiny_request(max_tokens=0), []) == ("length", None)


def test_a_traffic_is_a_function_of_its_random_numbers() -> None:

    assert (
        repr(random_traffic(Random(3), 256))
        == repr(random_traffic(Random(3), 256))
        != repr(random_traffic(Random(4), 256))
    )


# -- the check of plans ------------------------------------------------------------------------------------------------


class Nothing:
    max_in_flight = 2

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, late: LateInputs) -> None: ...


def row(slot: int, **more: Any) -> NewRow:
    given = {"token_ids": [1] * 9, "num_prompt_tokens": 9, "num_computed_tokens": 0, "block_ids": [], "seed": 0, **more}
    return NewRow(slot=slot, params=SamplingParams(), choice=0, **given)


FIRST = StepPlan(1, [Grant(0, 5, False, [3, 4])], [row(0)])
BROKEN_PLANS = {
    "is in use": StepPlan(2, [Grant(1, 4, True, [4])], [row(1)]),
    "is in use, but": StepPlan(2, [Grant(0, 4, True, [3])], [row(0)], released=[0]),
    "null block": StepPlan(2, [Grant(0, 4, True, [0])]),
    "has room for 8 tokens, not 9": StepPlan(2, [Grant(0, 4, True)]),
    "has a request already": StepPlan(2, [Grant(0, 4, True)], [row(0)]),
    "has no request": StepPlan(2, [Grant(2, 1, True)]),
    "two rows": StepPlan(2, [Grant(0, 1, True), Grant(0, 1, True)]),
    "comes after": StepPlan(1, []),
}


@pytest.mark.parametrize("breach", BROKEN_PLANS)
def test_a_broken_plan_is_found(breach: str) -> None:
    check = PlanCheck(Nothing(), block_size=4)  # type: ignore[arg-type]
    check.forward(FIRST)
    check.sample(LateInputs())
    with pytest.raises(BrokenPlanError, match=breach.removesuffix(", but")):
        check.forward(BROKEN_PLANS[breach])
