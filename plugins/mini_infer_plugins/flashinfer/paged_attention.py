"""FlashInferAttention: attention by FlashInfer's paged wrappers (Ye et al., arXiv 2501.01005).

Contract: a step is planned once, on the host, from its lengths there, and the plan serves all layers of equal heads and
scale. Rows of one token run in the decode wrapper, on tensor cores, the others in the prefill wrapper. The cache is
that of the core's reference, which FlashInfer calls NHD::

    kv_cache  [2, num_blocks, block_size, num_kv_heads, head_dim]
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from mini_infer.errors import PluginError, in_one_line
from mini_infer.interfaces import AttentionBackend, AttentionCapabilities

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.interfaces import BatchLimits, ForwardBatch, KVCacheSpec
    from mini_infer.layers import Attention

_WORKSPACE_BYTES = 384 << 20  # partial results of long sequences that are split over the card


@dataclass(frozen=True, slots=True)
class Pages:
    """Rows' blocks as FlashInfer wants them.

    Attributes:
        indptr: [num_rows + 1] int32 on the host, where each row's blocks begin in ``indices``.
        indices: int32 block ids on the device, row by row.
        last_page_len: [num_rows] int32 on the host, tokens in each row's last block.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    def rows(self, start: int, stop: int) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """The three of some rows alone."""
        indptr = self.indptr[start : stop + 1]
        return indptr - indptr[0], self.indices[int(indptr[0]) : int(indptr[-1])], self.last_page_len[start:stop]


class FlashInferAttention(AttentionBackend):
    """See the module."""

    name: ClassVar[str] = "flashinfer"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        devices=("cuda",),
        dtypes=("bfloat16", "float16"),
        kinds=("full", "sliding"),
        head_dims=(64, 128, 256),
        needs_host_lengths=True,
    )
    kernels: ClassVar[str] = "fa2"
    lowest_capability: ClassVar[tuple[int, int]] = (8, 0)

    def __init__(self, spec: "KVCacheSpec", device: str, block_size: int) -> None:
        super().__init__(spec, device, block_size)
        self._wrappers: dict[tuple[int, float], tuple[Any, Any]] = {}  # (decode, prefill) by query heads and scale
        self._num_decode_rows = 0
        self._planned: torch.cuda.Event | None = None

    @classmethod
    def unavailable(cls, spec: "KVCacheSpec", device: str) -> str | None:
        if find_spec("flashinfer") is None:
            return "it needs flashinfer-python: pip install 'mini-infer[flashinfer]'"
        if torch.cuda.get_device_capability(device) < cls.lowest_capability:
            return f"its kernels '{cls.kernels}' need compute capability {'.'.join(map(str, cls.lowest_capability))}"
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)

    def bind(self, layer: "Attention") -> None:
        self._wrappers[layer.num_heads, layer.scale] = (None, None)

    def buffers(self, limits: "BatchLimits") -> None:
        """Make wrappers that share a workspace, and have their kernels compiled where they never were."""
        import flashinfer

        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        for key in self._wrappers:
            self._wrappers[key] = (
                flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2"),
                flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=self.kernels),
            )
        table = torch.zeros(2, limits.max_blocks_per_row, dtype=torch.int32, device=self.device)
        try:
            self._plan([1, 1], [1, 1], table, 1)
        except (RuntimeError, OSError) as e:
            raise PluginError(f"flashinfer cannot compile its kernels, which takes nvcc: {in_one_line(e)}") from e

    def prepare(self, batch: "ForwardBatch") -> None:
        shape = batch.shape
        num_decode_rows = shape.num_decode_rows if shape.decode_query_len == 1 else 0
        self._plan(batch.query_lens_host, batch.seq_lens_host, batch.block_table, num_decode_rows)

    def _plan(
        self, query_lens: "Sequence[int]", seq_lens: "Sequence[int]", block_table: torch.Tensor, num_decode_rows: int
    ) -> None:
        """Plan a step whose first rows have one token each."""
        if self._planned is not None:
            self._planned.synchronize()  # plans are copied from pinned memory that the next one reuses
        spec, dtype, num_rows = self.spec, getattr(torch, self.spec.dtype), len(query_lens)
        pages = self._pages(seq_lens, block_table)
        starts = torch.from_numpy(np.cumsum([0, *query_lens[num_decode_rows:]], dtype=np.int32))
        for (num_heads, scale), (decode, prefill) in self._wrappers.items():
            sizes = num_heads, spec.num_kv_heads, spec.head_dim, self.block_size
            common = {
                "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
                "sm_scale": scale,
                "q_data_type": dtype,
                "kv_data_type": dtype,
            }
            if num_decode_rows:
                decode.plan(*pages.rows(0, num_decode_rows), *sizes, **common)
            if num_decode_rows < num_rows:
                prefill.plan(starts, *pages.rows(num_decode_rows, num_rows), *sizes, causal=True, **common)
        self._num_decode_rows = num_decode_rows
        if block_table.is_cuda:
            self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._planned.record()

    def _pages(self, seq_lens: "Sequence[int]", block_table: torch.Tensor) -> Pages:
        lens = np.asarray(seq_lens, dtype=np.int64)
        counts = -(-lens // self.block_size)
        ends = np.cumsum(counts)
        rows = np.repeat(np.arange(len(lens)), counts)
        at = torch.from_numpy(rows * block_table.shape[1] + np.arange(ends[-1]) - (ends - counts)[rows])
        if block_table.is_cuda:
            at = at.pin_memory().to(block_table.device, non_blocking=True)
        return Pages(
            torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            block_table.reshape(-1).index_select(0, at),
            torch.from_numpy(((lens - 1) % self.block_size + 1).astype(np.int32)),
        )

    def write_kv(
        self,
        layer: "Attention",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: "ForwardBatch",
    ) -> torch.Tensor:
        for cache, numbers in zip(layer.kv_cache, (key, value), strict=True):
            cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, numbers)
        return query

    def attend(
        self, layer: "Attention", query: torch.Tensor, batch: "ForwardBatch", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        query, caches, split = query.contiguous(), tuple(layer.kv_cache), self._num_decode_rows
        decode, prefill = self._wrappers[layer.num_heads, layer.scale]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
        if split:
            decode.run(query[:split], caches, out=out[:split])
        if split < batch.shape.num_rows:
            prefill.run(query[split:], caches, out=out[split:])
        return out


class FlashInferAttention3(FlashInferAttention):
    """With FlashInfer's FlashAttention-3 for rows of several tokens."""

    kernels: ClassVar[str] = "fa3"
    lowest_capability: ClassVar[tuple[int, int]] = (9, 0)
