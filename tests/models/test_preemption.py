"""A request that is made to start over loses nothing: tokens, text, logprobs and usage are those of its lone run.

The pool has 7 blocks of 16. Prompts of 34 tokens with 35 new ones need 5 blocks each, so of two one must yield.
"""

from collections.abc import Callable
from typing import Any

import pytest

from mini_infer import LLM, SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.testing.engines import assert_idle, assert_same_tokens, make_engine, run_engine, tiny_model
from mini_infer.testing.reference import Equality, reference_of
from mini_infer.testing.tokenizers import byte_tokenizer

MakeLLM = Callable[..., LLM]
TIGHT: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 7, "max_num_batched_tokens": 32}
PROMPTS = [[(7 * i + 11 * which) % 319 for i in range(34)] for which in range(3)]

VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.4, "frequency_penalty": 1.0, "presence_penalty": -0.5},
    "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "bias": {"temperature": 1.0, "logit_bias": {5: 3.0, 9: -100.0}, "top_p": 0.9},
    "min tokens": {"temperature": 0.0, "min_tokens": 30, "stop_token_ids": list(range(40))},
}


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_preempted_requests_get_the_tokens_of_their_lone_runs(variant: str, count: int, overlap: bool) -> None:
    model = tiny_model("llama")
    params = SamplingParams(max_tokens=35, **VARIANTS[variant])
    requests = [
        EngineRequest(request_id=f"r{i}", prompt_token_ids=PROMPTS[i], params=params, seed=i) for i in range(count)
    ]
    engine = make_engine(model, overlap=overlap, **TIGHT).engine
    outputs = run_engine(engine, requests)
    Equality(reference_of(model)).check(requests, outputs)
    assert engine.stats().num_preemptions >= count - 1
    assert all(output.num_cached_tokens == 0 for output in outputs.values()), "its own blocks are no cache hit"
    assert_idle(engine)


def test_answers_are_those_of_an_engine_with_room(make_llm: MakeLLM) -> None:
    """Text too, and every choice."""
    params = SamplingParams(max_tokens=35, n=2, temperature=1.0, seed=4)
    tight, roomy = make_llm("llama", **TIGHT), make_llm("llama", max_model_len=128)
    got, expected = tight.generate(PROMPTS, params), roomy.generate(PROMPTS, params)
    assert tight.built.engine.stats().num_preemptions > 0 == roomy.built.engine.stats().num_preemptions
    assert_same_tokens(got, expected)
    assert [c.text for output in got for c in output.outputs] == [c.text for o in expected for c in o.outputs]


def test_a_stream_has_neither_gap_nor_repeat(make_llm: MakeLLM) -> None:
    llm = make_llm("llama", **TIGHT)
    params = SamplingParams(max_tokens=35, temperature=0.0, ignore_eos=True)
    streams = [llm.stream(prompt, params) for prompt in PROMPTS]
    deltas: list[list[Any]] = [[] for _ in streams]
    still = set(range(len(streams)))
    while still:
        for index in sorted(still):
            delta = next(streams[index], None)
            if delta is None:
                still.remove(index)
            else:
                deltas[index].append(delta)
    assert llm.built.engine.stats().num_preemptions > 0
    for prompt, parts in zip(PROMPTS, deltas, strict=True):
        alone = make_llm("llama", max_model_len=128).generate([prompt], params)[0].outputs[0]
        assert [token for part in parts for token in part.token_ids] == alone.token_ids
        assert "".join(part.text for part in parts) == alone.text


def test_a_stop_string_half_matched_at_preemption(make_llm: MakeLLM) -> None:
    """Scripts whose stop string begins at every token in turn, so that some are preempted in its midst."""
    ids = byte_tokenizer().backend.encode("klmnop").ids
    llm = make_llm("script", **{**TIGHT, "block_size": 4, "num_kv_blocks": 30, "max_num_seqs": 8})
    each = [
        SamplingParams(max_tokens=60, stop=["klmnop"], extensions={"script": [97] * lead + ids[:-1] + [*ids, 98, 98]})
        for lead in range(24)
    ]
    outputs = llm.generate([[1] * (9 + i % 5) for i in range(len(each))], each)
    assert llm.built.engine.stats().num_preemptions >= 4
    for lead, output in enumerate(outputs):
        choice = output.outputs[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("a" * lead + "klmn", "stop", "klmnop")
