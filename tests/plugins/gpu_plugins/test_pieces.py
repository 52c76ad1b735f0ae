"""Capturing a step with prompts, whole or in pieces: what is run before, what is left when it fails.

The graphs here are fakes.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mini_infer.forward_batch import ForwardBatch, StepShape
from mini_infer.interfaces import BatchLimits
from mini_infer_plugins.cuda_graphs import graphs as whole
from mini_infer_plugins.cuda_graphs import pieces
from mini_infer_plugins.cuda_graphs.graphs import CudaGraphRunner
from mini_infer_plugins.cuda_graphs.pieces import Answers, PieceGraphs

SPEC = SimpleNamespace(v_head_dim=4)


class Layer:
    """An attention layer that doubles its query, as its own backend."""

    num_heads, spec = 2, SPEC

    def __init__(self) -> None:
        self.backend, self.batches = self, list[ForwardBatch]()

    def attend(
        self, layer: "Layer", query: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.batches.append(batch)
        return query * 2 if out is None else torch.mul(query, 2, out=out)


class Graphs:
    """Stands in for ``torch.cuda``: one capture at a time, as on one stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capturing = False

    def CUDAGraph(self) -> "Graphs":  # noqa: N802
        return self

    def capture_begin(self, pool: object) -> None:
        assert not self.capturing
        self.capturing = True
        self.log.append("begin")

    def capture_end(self) -> None:
        if not self.capturing:
            raise RuntimeError("no capture is going on")
        self.capturing = False
        self.log.append("end")

    @contextmanager
    def graph(self, graph: "Graphs", pool: object) -> Iterator[None]:
        self.capture_begin(pool)
        yield
        self.capture_end()

    def pool(self) -> object:
        return self

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    fake = Graphs()
    for name, value in (
        ("CUDAGraph", fake.CUDAGraph),
        ("graph", fake.graph),
        ("synchronize", lambda: None),
        ("stream", nullcontext),
        ("graph_pool_handle", object),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(pieces, "_capture_stream", lambda: None)
    for module in (pieces, whole):
        monkeypatch.setattr(module, "unowned", lambda tensor: tensor)
    return fake


def batch() -> ForwardBatch:
    nothing = torch.zeros(0)
    return ForwardBatch(StepShape(1, 3, 0, 0, 3), *[nothing] * 6, [3], [3])


def test_the_variant_that_is_captured_runs_once_before(graphs: Graphs) -> None:
    layer, variants, plain = Layer(), list[Any](), batch()

    def forward(given: ForwardBatch) -> torch.Tensor:
        variants.append((graphs.capturing, given.around_attention is None))
        assert given.around_attention is not None
        return given.around_attention(layer, torch.ones(3, 2, 4)) + 1

    captured = PieceGraphs(forward, plain, None, Answers(), 8)
    assert variants == [(False, False), (True, False)]
    assert layer.batches == [plain]  # attention is launched between graphs, so it never meets a capture
    captured.replay(plain)
    assert graphs.log == ["begin", "end", "begin", "end", "replay", "replay"]
    assert layer.batches == [plain, plain]


@pytest.mark.parametrize("after", [0, 1], ids=["in the first piece", "in the second"])
def test_a_failure_leaves_no_capture_behind(graphs: Graphs, after: int) -> None:
    layer = Layer()

    def forward(given: ForwardBatch) -> torch.Tensor:
        assert given.around_attention is not None
        for _ in range(after):
            given.around_attention(layer, torch.ones(3, 2, 4))
        if graphs.capturing:
            raise ValueError("cannot be captured")
        return torch.ones(3)

    with pytest.raises(ValueError, match="cannot be captured"):
        PieceGraphs(forward, batch(), None, Answers(), 8)
    assert not graphs.capturing


def test_a_capture_that_cannot_be_ended_tells_the_first_error(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(given: ForwardBatch) -> torch.Tensor:
        if graphs.capturing:
            graphs.capturing = False  # the device has ended it
            raise ValueError("cannot be captured")
        return torch.ones(3)

    with pytest.raises(ValueError, match="cannot be captured"):
        PieceGraphs(forward, batch(), None, Answers(), 8)


@pytest.mark.gpu
def test_the_stream_captures_again_after_a_failure() -> None:
    layer, plain = Layer(), batch()
    where = torch.ones(3, 2, 4, device="cuda")

    def forward(given: ForwardBatch) -> torch.Tensor:
        assert given.around_attention is not None
        out = given.around_attention(layer, where * 1.5)
        if fails and torch.cuda.is_current_stream_capturing():
            raise ValueError("cannot be captured")
        return out + 1

    fails = True
    with pytest.raises(ValueError, match="cannot be captured"):
        PieceGraphs(forward, plain, None, Answers(), 8)
    assert not torch.cuda.is_current_stream_capturing()
    fails = False
    out = PieceGraphs(forward, plain, None, Answers(), 8).replay(plain)
    assert torch.equal(out, torch.full_like(out, 4.0))


@pytest.mark.parametrize("support", ["verify", "mixed"])
def test_a_step_with_prompts_is_one_graph_where_attention_allows_it(graphs: Graphs, support: str) -> None:
    layer, plain = Layer(), batch()
    runner = CudaGraphRunner([], [3])
    runner.bind([SimpleNamespace(name="any", graphs=support)])  # type: ignore[list-item]
    runner.limits(BatchLimits(4, 3, 4, 16))

    def forward(given: ForwardBatch) -> torch.Tensor:
        assert given.around_attention is not None
        return given.around_attention(layer, torch.ones(3, 2, 4)) + 1

    runner.run(forward, plain)
    if support == "mixed":
        assert graphs.log == ["begin", "end", "replay"]
        # Captured, too, attention must see that the graph will serve rows of other lengths.
        assert [b.around_attention is None for b in layer.batches] == [False, False]
    else:
        assert graphs.log == ["begin", "end", "begin", "end", "replay", "replay"]
        assert [b.around_attention is None for b in layer.batches] == [True, True]
