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

from mini_infer.errors import ConfigError
from mini_infer.interfaces import StepRunner

if TYPE_CHECKING:
    from mini_infer.forward_batch import ForwardBatch, StepShape
    from mini_infer.interfaces import AttentionBackend, BatchLimits


class CudaGraphRunner(StepRunner):
    """Captures a bucket when it is first met, after one plain run that compiles its kernels.

    Args:
        buckets: batch sizes that have graphs.
    """

    def __init__(self, buckets: Sequence[int]) -> None:
        self._buckets = sorted(buckets)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None

    def bind(self, backends: "Sequence[AttentionBackend]") -> None:
        unable = ", ".join(b.name for b in backends if b.capabilities.graphs == "none")
        if unable:
            raise ConfigError(f"plugin cuda-graphs cannot capture attention '{unable}': choose another or leave it out")

    def limits(self, limits: "BatchLimits") -> "BatchLimits":
        top = self._buckets[min(bisect_left(self._buckets, limits.max_num_rows), len(self._buckets) - 1)]
        return replace(limits, max_num_rows=max(top, limits.max_num_rows))

    def shape(self, shape: "StepShape") -> "StepShape":
        if shape.num_decode_rows != shape.num_rows or shape.num_rows > self._buckets[-1]:
            return shape
        rows = self._buckets[bisect_left(self._buckets, shape.num_rows)]
        return replace(shape, num_rows=rows, num_tokens=rows * shape.decode_query_len)

    def run(self, forward: "Callable[[ForwardBatch], torch.Tensor]", batch: "ForwardBatch") -> torch.Tensor:
        shape = batch.shape
        if shape.num_decode_rows != shape.num_rows or shape.num_rows not in self._buckets:
            return forward(batch)
        key = (shape.num_rows, shape.decode_query_len)
        if key not in self._graphs:
            return self._capture(key, forward, batch)
        graph, hidden = self._graphs[key]
        graph.replay()
        return hidden

    def _capture(
        self, key: tuple[int, int], forward: "Callable[[ForwardBatch], torch.Tensor]", batch: "ForwardBatch"
    ) -> torch.Tensor:
        forward(batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = forward(batch)
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph, hidden
        graph.replay()
        return hidden
