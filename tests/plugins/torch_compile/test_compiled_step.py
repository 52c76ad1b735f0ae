"""What CompiledStepRunner compiles and when, and what it says when it cannot."""

from random import Random
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from mini_infer.errors import ConfigError, PluginConflictError, PluginError
from mini_infer.interfaces import BatchLimits, ModelConfig, ModelTransform, SamplingParams, StepShape
from mini_infer.messages import EngineRequest
from mini_infer.plugins import hookimpl
from mini_infer.testing import make_engine, run_engine, tiny_model
from mini_infer_plugins.torch_compile.compiled_step import CompiledStepRunner

SIZES = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 1}


@pytest.fixture
def only_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run operator by operator, without Inductor."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: graph.forward)


def engine(*plugins: Any, **settings: Any) -> Any:
    model = tiny_model("llama", **SIZES)
    return make_engine(model, plugins=plugins, device="cpu", max_model_len=32, max_num_seqs=4, **settings)


def requests(count: int) -> list[EngineRequest]:
    rng = Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return [
        EngineRequest(request_id=str(i), prompt_token_ids=rng.choices(range(200), k=i + 2), params=params)
        for i in range(count)
    ]


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_shapes() -> None:
    """No step but a decode of one row has one token, and every token of a step with prompts gets its hidden state."""
    runner = CompiledStepRunner()
    limits = runner.limits(BatchLimits(max_num_rows=1, max_num_tokens=1, max_blocks_per_row=4, block_size=4))
    assert (limits.max_num_rows, limits.max_num_tokens) == (2, 2)
    for query_lens, decode_query_len, rows, tokens in (
        ([1], 1, 1, 1),
        ([4], 4, 1, 4),
        ([1, 1, 1], 1, 3, 3),
        ([1], 0, 2, 2),
        ([7], 0, 1, 7),
        ([1, 7], 1, 2, 8),
    ):
        shape = runner.shape(StepShape.of(query_lens, decode_query_len, last_only=True))
        assert (shape.num_rows, shape.num_tokens, shape.last_only) == (rows, tokens, False)


@pytest.mark.usefixtures("only_traced")
def test_all_is_compiled_before_the_first_request() -> None:
    before = num_graphs()
    built = engine("torch-compile")
    assert num_graphs() == before + 3
    assert any(line.startswith("rehearsed 3 steps") for line in built.log)
    run_engine(built.engine, requests(4))
    assert num_graphs() == before + 3


@pytest.mark.usefixtures("only_traced")
def test_without_rehearsals_a_graph_is_compiled_when_it_is_first_needed() -> None:
    before = num_graphs()
    built = engine("torch-compile", plugin={"torch-compile": {"rehearse": False}})
    assert num_graphs() == before
    run_engine(built.engine, requests(1))
    assert num_graphs() == before + 2
    run_engine(built.engine, requests(3))
    assert num_graphs() == before + 3


@pytest.mark.usefixtures("only_traced")
def test_engines_of_one_process_do_not_count_together() -> None:
    """Dynamo gives up on a function that it has compiled too often."""
    before = num_graphs()
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            run_engine(engine("torch-compile").engine, requests(1))
    assert num_graphs() == before + 6


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suppress", [False, True])
def test_a_compiler_that_fails_is_one_plain_error(suppress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where Dynamo has been told to run the model uncompiled instead."""

    def fail(graph: Any, inputs: Any, options: Any) -> Any:
        raise RuntimeError("no g++")

    monkeypatch.setattr(torch._inductor, "compile", fail)
    expected = pytest.raises(PluginError, match=r"^torch-compile cannot compile this model: .*no g\+\+")
    with torch._dynamo.config.patch(suppress_errors=suppress), expected as caught:
        engine("torch-compile")
    assert "\n" not in str(caught.value) and "TORCHDYNAMO_VERBOSE" not in str(caught.value)


class Unseeable(ModelTransform):
    """An operator whose code cannot be compiled."""

    name = "unseeable"
    api_version = 0

    def apply(self, module: torch.nn.Module, config: ModelConfig) -> torch.nn.Module:
        norm = module.model.norm
        plain = norm.forward

        def forward(x: torch.Tensor, residual: torch.Tensor) -> Any:
            if x.sum().item() > 1e30:
                raise ConfigError("never")
            return plain(x, residual)

        norm.forward = forward
        return module

    @hookimpl
    def model_transforms(self, context: object) -> list[ModelTransform]:
        return [self]


@pytest.mark.usefixtures("only_traced")
def test_a_model_that_cannot_be_compiled_whole_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"^torch-compile cannot compile this model: "):
        engine("torch-compile", Unseeable())


@pytest.mark.usefixtures("only_traced")
def test_a_compiler_that_is_turned_off_is_an_error() -> None:
    with torch._dynamo.config.patch(disable=True), pytest.raises(PluginError, match=r"torch\.compile did nothing"):
        engine("torch-compile")


@pytest.mark.usefixtures("only_traced")
def test_a_second_graph_of_a_kind_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that the compiler made for two tokens only: here because nobody said that the number changes."""
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", lambda tensor, index: None)
    built = engine("torch-compile")
    with pytest.raises(PluginError, match="does not fit the graph"):
        run_engine(built.engine, requests(4))


@pytest.mark.parametrize("other", ["cuda-graphs", "cpu-kernels"])  # fused-kernels provides what the second does
def test_what_it_cannot_run_with(other: str) -> None:
    with pytest.raises(PluginConflictError, match="torch-compile"):
        engine("torch-compile", other)
