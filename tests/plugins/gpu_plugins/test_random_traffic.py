"""Any traffic gets its own tokens whatever GPU plugins are on: each alone, pairs, all together, in both loops.

Float32 against the dense reference on a CPU, by the rule of equality (``mini_infer.testing.reference``). An engine
serves several traffics, one after another, so what one leaves behind would reach the next.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mini_infer.interfaces import SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.testing import assert_idle, make_engine, run_engine, tiny_model
from mini_infer.testing.engines import scratch_folder
from mini_infer.testing.models import tiny_checkpoint
from mini_infer.testing.reference import Equality, reference_of
from mini_infer.testing.traffic import MAX_MODEL_LEN, Traffic, random_traffic

FULL = os.environ.get("MINI_INFER_TEST_FULL") == "1"
NUM_TRAFFICS = {"cpu": 1, "cuda": 25 if FULL else 3}
"""For each engine."""
VOCAB_SIZE, BLOCK_SIZE = 256, 16
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TIGHT: list[dict[str, Any]] = [
    {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 4},
    {"max_num_seqs": 5, "max_num_batched_tokens": 7, "num_kv_blocks": 4},
]
"""The longest request takes three blocks."""

TRITON, FUSED, DRAWS, GRAPHS, CHUNKS = (
    "triton-attention",
    "fused-kernels",
    "device-sampler",
    "cuda-graphs",
    "chunked-prefill",
)
ON_GPU = [
    (),
    (TRITON,),
    (FUSED,),
    (DRAWS,),
    (GRAPHS,),
    (CHUNKS,),
    (TRITON, GRAPHS),
    (TRITON, FUSED),
    (FUSED, GRAPHS),
    (GRAPHS, CHUNKS),
    (TRITON, FUSED, DRAWS, GRAPHS),
    (TRITON, FUSED, DRAWS, GRAPHS, CHUNKS),
]
ON_CPU = [(), (CHUNKS,), ("cpu-attention", "cpu-kernels", CHUNKS)]


def cases(on_gpu: Sequence[tuple[str, ...]], on_cpu: Sequence[tuple[str, ...]] = ON_CPU) -> Any:
    """Parameters ``device`` and ``plugins``."""
    named = [("cpu", plugins) for plugins in on_cpu] + [("cuda", plugins) for plugins in on_gpu]
    marks = {"cpu": [], "cuda": [pytest.mark.gpu]}
    return pytest.mark.parametrize(
        ("device", "plugins"),
        [pytest.param(*case, marks=marks[case[0]], id=f"{case[0]}-{'+'.join(case[1]) or 'plain'}") for case in named],
    )


@pytest.fixture(autouse=True)
def needs_triton(request: pytest.FixtureRequest) -> None:
    plugins = request.getfixturevalue("plugins") if "plugins" in request.fixturenames else ()
    if {TRITON, FUSED, DRAWS} & set(plugins) and find_spec("triton") is None:
        pytest.skip("triton is not installed")


@cache
def equality_of(model: Path, valid_vocab: int | None = None) -> Equality:
    """One a model, so that calls too close to tell are counted over all tests."""
    return Equality(reference_of(model, valid_vocab))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@cases(ON_GPU)
def test_random_traffic(device: str, plugins: tuple[str, ...], family: str, overlap: bool) -> None:
    model = tiny_model(family, **SIZES)
    num_preemptions = 0
    for index, limits in enumerate(TIGHT):
        engine = make_engine(
            model,
            plugins=list(plugins),
            device=device,
            dtype="float32",
            overlap=overlap,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            **limits,
        ).engine
        for seed in range(index, NUM_TRAFFICS[device] * len(TIGHT), len(TIGHT)):
            traffic = random_traffic(Random(seed), VOCAB_SIZE)
            outputs = run_engine(engine, traffic.requests, traffic.arrivals, traffic.aborts)
            equality_of(model).check(traffic.requests, outputs)
            assert_idle(engine)
        num_preemptions += engine.stats().num_preemptions
        engine.shutdown()
    assert num_preemptions, "nobody was ever preempted: the engines were not tight"


# -- tokens that nobody may draw ---------------------------------------------------------------------------------------

SOME_ON_GPU = [(), (TRITON, GRAPHS), (DRAWS,), (TRITON, FUSED, DRAWS, GRAPHS, CHUNKS)]


@cases(SOME_ON_GPU)
def test_ids_that_the_tokenizer_does_not_know_are_never_drawn(device: str, plugins: tuple[str, ...]) -> None:
    """The tokenizer of a tiny model knows 320 of 384 ids."""
    model = tiny_model("qwen2")
    rng = Random(0)
    requests = [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=rng.choices(range(320), k=rng.randint(1, 40)),
            params=SamplingParams(temperature=rng.choice([0.0, 0.0, 2.0]), max_tokens=20, ignore_eos=True),
            seed=index,
        )
        for index in range(16)
    ]
    built = make_engine(
        model,
        plugins=list(plugins),
        device=device,
        dtype="float32",
        skip_tokenizer=False,
        max_model_len=64,
        max_num_seqs=8,
        num_kv_blocks=32,
    )
    outputs = run_engine(built.engine, requests)
    equality_of(model, 320).check(requests, outputs)
    assert all(token < 320 for output in outputs.values() for token in output.token_ids)


# -- a row that is not a number ----------------------------------------------------------------------------------------

SICK_TOKEN = 7


@cache
def sick_model() -> Path:
    """Whoever has token 7 in the prompt gets logits that are not a number."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(scratch_folder() / "sick", "llama", **SIZES)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][SICK_TOKEN] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_sick_ones(rng: Random) -> tuple[Traffic, set[str]]:
    """A random traffic in which nobody draws token 7 and every third request has it in the prompt."""
    import msgspec

    traffic = random_traffic(rng, VOCAB_SIZE)
    requests, sick = [], set()
    for index, request in enumerate(traffic.requests):
        prompt = [token if token != SICK_TOKEN else 8 for token in request.prompt_token_ids]
        if index % 3 == 1:
            prompt[rng.randrange(len(prompt))] = SICK_TOKEN
            sick.add(request.request_id)
        params = msgspec.structs.replace(
            request.params,
            logit_bias={SICK_TOKEN: -100},
            max_tokens=request.params.max_tokens or 1,
            prompt_logprobs=None,
        )
        requests.append(msgspec.structs.replace(request, prompt_token_ids=prompt, params=params))
    return replace(traffic, requests=requests, aborts={}), sick


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@cases(SOME_ON_GPU)
def test_what_is_not_a_number_stays_in_its_row(device: str, plugins: tuple[str, ...], dtype: str) -> None:
    """Beside others in a step, and in blocks that others get afterwards; with FlashAttention where it is installed."""
    engine = make_engine(
        sick_model(),
        plugins=list(plugins),
        device=device,
        dtype=dtype,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        **TIGHT[0] | {"num_kv_blocks": 9},
    ).engine
    num_sick = 0
    for seed in range(2 * NUM_TRAFFICS[device]):
        traffic, sick = with_sick_ones(Random(seed))
        outputs = run_engine(engine, traffic.requests, traffic.arrivals)
        assert_idle(engine)
        healthy = [request for request in traffic.requests if request.request_id not in sick]
        for name in sick:
            assert (outputs[name].finish_reason, outputs[name].token_ids) == ("error", []), name
        if dtype == "float32":
            equality_of(sick_model()).check(healthy, outputs)
        for request in healthy:
            output = outputs[request.request_id]
            assert output.error is None and output.token_ids, request
            assert all(abs(given.logprob) < 1e4 for given in output.logprobs), request
        num_sick += len(sick)
    assert num_sick
