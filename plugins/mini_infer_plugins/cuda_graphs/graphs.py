"""CudaGraphRunner: decode and verify steps replayed as one graph for each batch-size bucket.

Contract: a step of uniform rows is padded to the next bucket with rows on the null block; its graph reads the fixed
buffers that the core fills, so replay needs nothing but their contents. Other steps run as they are. Tokens are those
without graphs.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mini_infer.forward_batch import StepShape
from mini_infer.interfaces import StepRunner

if TYPE_CHECKING:
    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces import AttentionBackend, BatchLimits


class CudaGraphRunner(StepRunner):
    """Captures decode steps before the first request; wider ones (verify) when they are first met.

    Each capture follows one plain run, which compiles its kernels.

    Args:
        buckets: batch sizes that have graphs.
        log: gets a line if nothing can be captured.
    """

    def __init__(self, buckets: Sequence[int], log: Callable[[str], None] = lambda line: None) -> None:
        self._all_buckets = sorted(buckets)
        self._buckets = self._all_buckets
        self._max_num_tokens = self._all_buckets[-1] if buckets else 0
        self._log = log
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None

    def bind(self, backends: "Sequence[AttentionBackend]") -> None:
        unable = ", ".join(b.name for b in backends if b.capabilities.graphs == "none")
        if unable:
            self._log(f"cuda-graphs: attention '{unable}' cannot be captured; steps are launched kernel by kernel")
            self._all_buckets = self._buckets = []

    def limits(self, limits: "BatchLimits") -> "BatchLimits":
        if not self._all_buckets:
            return limits
        top = min(bisect_left(self._all_buckets, limits.max_num_rows), len(self._all_buckets) - 1)
        self._buckets = self._all_buckets[: top + 1]
        self._max_num_tokens = max(self._buckets[-1], limits.max_num_tokens)
        max_num_rows = max(self._buckets[-1], limits.max_num_rows)
        return replace(limits, max_num_rows=max_num_rows, max_num_tokens=self._max_num_tokens)

    def rehearsals(self) -> "Sequence[StepShape]":
        return [
            StepShape.of([1] * rows, 1) for rows in reversed(self._buckets)
        ]  # the largest makes room for the others

    def shape(self, shape: "StepShape") -> "StepShape":
        rows = self._bucket(shape)
        return shape if rows is None else replace(shape, num_rows=rows, num_tokens=rows * shape.decode_query_len)

    def _bucket(self, shape: "StepShape") -> int | None:
        """The rows of the graph that a step of this shape runs in, if there is one."""
        if shape.gives != "logits" or not self._buckets or shape.num_rows > self._buckets[-1]:
            return None
        rows = self._buckets[bisect_left(self._buckets, shape.num_rows)]
        return rows if rows * shape.decode_query_len <= self._max_num_tokens else None

    def run(self, forward: "Callable[[ForwardBatch], torch.Tensor]", batch: "ForwardBatch") -> torch.Tensor:
        shape = batch.shape
        if self._bucket(shape) != shape.num_rows:
            return forward(batch)
        key = (shape.num_rows, shape.decode_query_len)
        if key not in self._graphs:
            return self._capture(key, forward, batch)
        graph, out = self._graphs[key]
        graph.replay()
        return out

    def _capture(
        self, key: tuple[int, int], forward: "Callable[[ForwardBatch], torch.Tensor]", batch: "ForwardBatch"
    ) -> torch.Tensor:
        forward(batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = forward(batch)
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph, out
        graph.replay()
        return out
