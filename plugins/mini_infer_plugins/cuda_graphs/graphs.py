"""CudaGraphRunner: steps replayed as one graph each; steps with prompts, where attention forbids, as one between two.

Contract: a step is padded with rows on the null block to the next bucket, or to a larger one that is faster; graphs
read the fixed buffers that the core fills, so replay needs nothing but their contents. Steps larger than any bucket run
as they are. Tokens are those without graphs. What a graph gave is good until the next one runs, which the same stream
runs after all that reads it.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mini_infer.forward_batch import StepShape
from mini_infer.interfaces import StepRunner
from mini_infer_plugins.cuda_graphs.pieces import Answers, PieceGraphs, unowned

if TYPE_CHECKING:
    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces import AttentionBackend, BatchLimits
    from mini_infer.layers import Attention


_MIXED = 0  # in the place of a decode or verify step's tokens a row


class CudaGraphRunner(StepRunner):
    """Captures decode steps and steps with prompts before the first request; verify steps when they are first met.

    Each capture follows one plain run, which compiles its kernels.

    Args:
        batch_sizes: of decode and verify steps that have graphs.
        num_tokens: of steps with prompts that have graphs.
        log: gets a line if decode steps cannot be captured whole.
    """

    def __init__(
        self, batch_sizes: Sequence[int], num_tokens: Sequence[int], log: Callable[[str], None] = lambda line: None
    ) -> None:
        self._batch_sizes = sorted(batch_sizes)
        self._num_tokens = sorted(num_tokens)
        self._log = log
        self._captures_verify, self._captures_mixed = True, False
        self._max_num_tokens = self._longest_row = 0
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._seconds: dict[int, float] = {}  # of a decode step, by rows
        self._fastest: dict[int, int] = {}  # where to pad such a bucket to
        self._pieces: dict[int, PieceGraphs] = {}
        self._answers = Answers()
        self._pool: Any = None

    def bind(self, backends: "Sequence[AttentionBackend]") -> None:
        unable = ", ".join(b.name for b in backends if b.graphs == "none")
        if unable:
            self._log(f"cuda-graphs: attention '{unable}' cannot be captured, so only steps with prompts have graphs")
            self._batch_sizes = []
        self._captures_verify = all(b.graphs != "decode" for b in backends)
        self._captures_mixed = all(b.graphs == "mixed" for b in backends)

    def limits(self, limits: "BatchLimits") -> "BatchLimits":
        self._batch_sizes = _up_to(self._batch_sizes, limits.max_num_rows)
        self._num_tokens = _up_to(self._num_tokens, limits.max_num_tokens)
        self._max_num_tokens = max([limits.max_num_tokens, *self._batch_sizes[-1:], *self._num_tokens[-1:]])
        self._longest_row = (limits.max_blocks_per_row - 1) * limits.block_size + 1
        padding_rows = -(-self._num_tokens[-1] // self._longest_row) if self._num_tokens else 0
        max_num_rows = max([limits.max_num_rows + padding_rows, *self._batch_sizes[-1:]])
        return replace(limits, max_num_rows=max_num_rows, max_num_tokens=self._max_num_tokens)

    def reserve_bytes(self, step_bytes: int, num_tokens: int) -> int:
        # All graphs share one pool, which is as large as the largest of them.
        largest = max([0, *self._batch_sizes, *self._num_tokens])
        return step_bytes * min(largest, num_tokens) // num_tokens

    def rehearsals(self) -> "Sequence[StepShape]":
        # From the largest on: the others find room in what it leaves.
        prompts = [StepShape(1, num_tokens, 0, 0, num_tokens) for num_tokens in reversed(self._num_tokens)]
        return [*prompts, *(StepShape.of([1] * rows, 1) for rows in reversed(self._batch_sizes))]

    def shape(self, shape: "StepShape") -> "StepShape":
        rows = self._rows_for(shape)
        if rows is not None:
            return replace(shape, num_rows=rows, num_tokens=rows * shape.decode_query_len)
        num_tokens = self._tokens_for(shape)
        if num_tokens is None:
            return shape
        padding_rows = -(-(num_tokens - shape.num_tokens) // self._longest_row)
        return replace(shape, num_rows=shape.num_rows + padding_rows, num_tokens=num_tokens, last_only=False)

    def run(self, forward: "Callable[[ForwardBatch], torch.Tensor]", batch: "ForwardBatch") -> torch.Tensor:
        shape = batch.shape
        if self._rows_for(shape) == shape.num_rows:
            return self._run_whole((shape.num_rows, shape.decode_query_len), forward, batch)
        if self._tokens_for(shape) == shape.num_tokens and not shape.last_only:
            if self._captures_mixed:
                return self._run_whole((shape.num_tokens, _MIXED), forward, for_rows_of_any_lengths(batch))
            return self._run_in_pieces(shape.num_tokens, forward, batch)
        return forward(batch)

    def _rows_for(self, shape: "StepShape") -> int | None:
        """Rows of the graph that a step of this shape runs in whole, if there is one."""
        rows = _next(self._batch_sizes, shape.num_rows) if shape.gives == "logits" else None
        if rows is not None and shape.decode_query_len == 1:
            rows = self._fastest.get(rows, rows)
        if rows is None or rows * shape.decode_query_len > self._max_num_tokens:
            return None
        return rows if self._captures_verify or shape.decode_query_len == 1 else None

    def _tokens_for(self, shape: "StepShape") -> int | None:
        """Tokens of the graphs that a step of this shape runs in piece by piece, if there are any."""
        return None if shape.gives == "logits" else _next(self._num_tokens, shape.num_tokens)

    def _run_whole(
        self, key: tuple[int, int], forward: "Callable[[ForwardBatch], torch.Tensor]", batch: "ForwardBatch"
    ) -> torch.Tensor:
        if key not in self._graphs:
            forward(batch)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                out = forward(batch)
            self._pool = self._pool or graph.pool()
            self._graphs[key] = graph, unowned(out)  # else each graph kept its own logits
            if key[1] == 1:
                self._seconds[key[0]] = _seconds_of(graph)
                self._fastest = {rows: fastest_from(rows, self._seconds) for rows in self._seconds}
        graph, out = self._graphs[key]
        graph.replay()
        return out

    def _run_in_pieces(
        self, num_tokens: int, forward: "Callable[[ForwardBatch], torch.Tensor]", batch: "ForwardBatch"
    ) -> torch.Tensor:
        if num_tokens not in self._pieces:
            self._pieces[num_tokens] = PieceGraphs(forward, batch, self._pool, self._answers, self._num_tokens[-1])
            self._pool = self._pieces[num_tokens].pool
        return self._pieces[num_tokens].replay(batch)


def for_rows_of_any_lengths(batch: "ForwardBatch") -> "ForwardBatch":
    """The batch to capture: attention that sees ``around_attention`` takes nothing from this step's own lengths."""

    def attend(layer: "Attention", query: torch.Tensor) -> torch.Tensor:
        return layer.backend.attend(layer, query, captured)

    captured = replace(batch, around_attention=attend)
    return captured


def fastest_from(rows: int, seconds: Mapping[int, float]) -> int:
    """Where to pad a bucket of ``rows`` to: a larger one if its step takes clearly less time.

    A library of matrix products has better kernels for some numbers of rows than for others.

    Args:
        rows: a key of ``seconds``.
        seconds: of one step, by rows.
    """
    best = rows
    for more, taken in sorted(seconds.items()):
        if more > rows and taken < 0.99 * seconds[best]:
            best = more
    return best


def _seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay, the fastest of three."""
    found: list[float] = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return min(found)


def _up_to(buckets: list[int], most: int) -> list[int]:
    """The buckets that sizes up to ``most`` fall into."""
    return buckets[: bisect_left(buckets, most) + 1]


def _next(buckets: list[int], size: int) -> int | None:
    """The bucket that ``size`` falls into; None if all are smaller."""
    index = bisect_left(buckets, size)
    return buckets[index] if index < len(buckets) else None
