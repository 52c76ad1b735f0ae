"""torch-compile changes no token: float32 traffic against the dense reference, alone and beside other plugins.

An engine serves many traffics: compiling is what takes long. Each must do with the three graphs that it has at its
start.
"""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch._dynamo.utils import counters

from mini_infer.engine import Engine
from mini_infer.interfaces import BatchLimits, StepShape
from mini_infer.testing import assert_idle, make_engine, run_engine, tiny_model
from mini_infer.testing.reference import Equality, reference_of
from mini_infer.testing.traffic import MAX_MODEL_LEN, random_traffic
from mini_infer_plugins.torch_compile.compiled_step import CompiledStepRunner, _Graph
from mini_infer_plugins.torch_compile.opaque_attention import Step

FULL = os.environ.get("MINI_INFER_TEST_FULL") == "1"
NUM_TRAFFICS = 200 if FULL else 12
VOCAB_SIZE = 256
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2}
TOY = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "head_dim": 8, "layer_kinds": ["sliding", "latent", "full"]}
TIGHT: dict[str, Any] = {"block_size": 16, "num_kv_blocks": 5, "max_num_seqs": 5, "max_num_batched_tokens": 24}

COMPILE, NATIVE, CHUNKS, TRITON = "torch-compile", "cpu-attention", "chunked-prefill", "triton-attention"
ON_CPU = [(COMPILE,), (NATIVE, COMPILE, CHUNKS)]
ON_GPU = [(COMPILE,), (TRITON, COMPILE), (TRITON, "device-sampler", COMPILE, CHUNKS)]


@pytest.fixture(autouse=True)
def no_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that raises fails the test, although an engine would run it again."""

    def give_up(engine: Engine, error: Exception) -> None:
        raise error

    monkeypatch.setattr(Engine, "_isolate", give_up)


@cache
def equality_of(model: Path) -> Equality:
    return Equality(reference_of(model))


def check(model: Path, plugins: tuple[str, ...], num_traffics: int, **settings: Any) -> None:
    before = counters["stats"]["unique_graphs"]
    engine = make_engine(
        model, plugins=list(plugins), dtype="float32", max_model_len=MAX_MODEL_LEN, **TIGHT | settings
    ).engine
    for seed in range(num_traffics):
        traffic = random_traffic(Random(seed), VOCAB_SIZE)
        outputs = run_engine(engine, traffic.requests, traffic.arrivals, traffic.aborts)
        equality_of(model).check(traffic.requests, outputs)
        assert_idle(engine)
    assert engine.stats().num_preemptions, "nobody was ever preempted: the engine was not tight"
    assert counters["stats"]["unique_graphs"] == before + 3


def named(plugins: tuple[str, ...]) -> str:
    return "+".join(plugins)


@pytest.mark.parametrize("plugins", ON_CPU, ids=named)
def test_random_traffic(plugins: tuple[str, ...]) -> None:
    check(tiny_model("qwen3", **SIZES), plugins, NUM_TRAFFICS, device="cpu")


@pytest.mark.full
@pytest.mark.parametrize("plugins", [*ON_CPU, (NATIVE, COMPILE), (COMPILE, CHUNKS)], ids=named)
@pytest.mark.parametrize(("family", "sizes"), [("llama", SIZES), ("qwen2", SIZES), ("toy", TOY)])
def test_random_traffic_of_other_models(family: str, sizes: dict[str, Any], plugins: tuple[str, ...]) -> None:
    """The toy has a KV group for each kind of cache, and no layer that the core's decoders are made of."""
    settings = {"num_kv_blocks": 9} if family == "toy" else {}
    for overlap in (False, True):
        check(tiny_model(family, **sizes), plugins, NUM_TRAFFICS, device="cpu", overlap=overlap, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("plugins", ON_GPU, ids=named)
def test_random_traffic_on_a_gpu(plugins: tuple[str, ...], overlap: bool) -> None:
    """Heads of 16, the fewest that Triton multiplies."""
    model = tiny_model("qwen3", **SIZES | {"hidden_size": 64, "head_dim": 16})
    check(model, plugins, NUM_TRAFFICS, device="cuda", overlap=overlap)


# -- faults that the traffic must find; without Inductor, which they do not need ---------------------------------------


@pytest.fixture
def padded_and_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has a row of padding, and graphs run operator by operator."""

    def limits(self: CompiledStepRunner, limits: BatchLimits) -> BatchLimits:
        return replace(limits, max_num_rows=limits.max_num_rows + 1, max_num_tokens=limits.max_num_tokens + 1)

    def shape(self: CompiledStepRunner, shape: StepShape) -> StepShape:
        return replace(shape, num_rows=shape.num_rows + 1, num_tokens=shape.num_tokens + 1, last_only=False)

    monkeypatch.setattr(CompiledStepRunner, "limits", limits)
    monkeypatch.setattr(CompiledStepRunner, "shape", shape)
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: graph.forward)


def run_padded() -> None:
    check(tiny_model("qwen3", **SIZES), (COMPILE,), 4, device="cpu")


@pytest.mark.usefixtures("padded_and_traced")
def test_padding_changes_no_token() -> None:
    run_padded()


run_graph = _Graph.__call__


def padding_in_front(graph: _Graph, step: Step) -> torch.Tensor:
    batch = step.batch
    batch = replace(batch, input_ids=batch.input_ids.roll(1), positions=batch.positions.roll(1))
    return run_graph(graph, replace(step, batch=batch))


def padding_written_over_a_token(graph: _Graph, step: Step) -> torch.Tensor:
    batch = replace(step.batch, slot_mapping=step.batch.slot_mapping.roll(1))
    return run_graph(graph, replace(step, batch=batch))


def slots_of_an_earlier_step(graph: _Graph, step: Step) -> torch.Tensor:
    """As if the compiler had taken them for constants."""
    batch = step.batch
    slots = EARLIER.setdefault(graph, {}).setdefault(batch.shape.num_tokens, batch.slot_mapping.clone())
    return run_graph(graph, replace(step, batch=replace(batch, slot_mapping=slots)))


EARLIER: WeakKeyDictionary[_Graph, dict[int, torch.Tensor]] = WeakKeyDictionary()


@pytest.mark.usefixtures("padded_and_traced")
@pytest.mark.parametrize("fault", [padding_in_front, padding_written_over_a_token, slots_of_an_earlier_step])
def test_a_planted_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Graph, "__call__", fault)
    with pytest.raises(AssertionError):
        run_padded()
