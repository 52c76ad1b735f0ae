"""TritonAttention: grouped-query attention over paged blocks, decode with the sequence split over the card.

Contract: uniform rows (decode, verify) run in ``decode_kernel`` on a grid that depends on the step's shape alone, so a
device graph of that shape stays valid at any length. Steps with prompts run on Hopper in 16 bits in ``prompts_kernel``,
whole prompts in FlashAttention-3 where a build of it is installed; elsewhere in it or in ``long_rows_kernel``. RoPE is
fused into the kernel that writes keys and values, which in a decode step is attention's own. Float32 is computed in
IEEE float32.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import triton

from mini_infer.flash_attention import find_flash_attention
from mini_infer.interfaces import AttentionBackend, AttentionCapabilities
from mini_infer_plugins.triton_attention.kernels import (
    decode_kernel,
    long_rows_kernel,
    longest_first_kernel,
    merge_kernel,
    write_kv_kernel,
)
from mini_infer_plugins.triton_attention.prompt_tiles import find_prompt_tiles

if TYPE_CHECKING:
    from mini_infer.interfaces import BatchLimits, ForwardBatch, GraphSupport, KVCacheSpec
    from mini_infer.layers import Attention

_LOG2_E = 1.4426950408889634
_MOST_SPLITS = 64
_MOST_TILE_ROWS = 64  # query heads times queries of a uniform row that one tile holds


@dataclass(frozen=True, slots=True)
class _FlashStep:
    """What FlashAttention wants to know of a step on the host."""

    batch: "ForwardBatch"
    fresh: bool  # all rows are whole prompts, whose keys and values are all in this step
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class _Unwritten:
    """A decode step as it was projected: the kernel that reads the cache writes it too."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Fresh:
    """A step of whole prompts, query and key rotated: the cache need not be read (see ``write_kv_kernel``)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class TritonAttention(AttentionBackend):
    """See the module."""

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        devices=("cuda",),
        dtypes=("float32", "bfloat16", "float16"),
        kinds=("full", "sliding"),
        head_dims=(16, 32, 64, 80, 96, 128, 256),
        block_sizes=(16, 32, 64, 128),
        graphs="verify",
        fuses_rope=True,
    )

    def __init__(self, spec: "KVCacheSpec", device: str, block_size: int) -> None:
        super().__init__(spec, device, block_size)
        self._padded_dim = triton.next_power_of_2(spec.head_dim)
        self._precision = "ieee" if spec.dtype == "float32" else "tf32"
        on_gpu = device.startswith("cuda")
        self._flash = find_flash_attention(spec, device) if on_gpu else None
        self._flash_step: _FlashStep | None = None  # of the step at work
        self._tiles = find_prompt_tiles(spec, device, block_size)
        self._pdl = on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)  # launched while the last one ends
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4

    @property
    def graphs(self) -> "GraphSupport":
        """See ``AttentionBackend.graphs``."""
        return self.capabilities.graphs if self._tiles is None else "mixed"

    @classmethod
    def unavailable(cls, spec: "KVCacheSpec", device: str) -> str | None:
        if device.startswith("cuda") and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0"
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.spec.num_kv_heads, self.block_size, self.spec.head_dim)

    def buffers(self, limits: "BatchLimits") -> None:
        # Splits times rows is bounded by what fills the card a few times over, so one scratch serves every shape.
        cells = max(limits.max_num_rows * 2, self._num_processors * 8) * self.spec.num_kv_heads * _MOST_TILE_ROWS
        self._scratch = torch.empty(cells * self._padded_dim, dtype=torch.float32, device=self.device)
        self._scratch_lse = torch.empty(cells, dtype=torch.float32, device=self.device)
        self._order = torch.zeros(limits.max_num_rows, dtype=torch.int32, device=self.device)

    def prepare(self, batch: "ForwardBatch") -> None:
        rows = batch.shape.num_decode_rows
        if self._tiles is not None and rows < batch.shape.num_rows:
            self._tiles.prepare(batch.shape)
        in_one_launch = rows < batch.shape.num_rows and (self._flash is not None or self._tiles is not None)
        if rows and not in_one_launch and self.num_splits(rows) == 1:
            longest_first_kernel[(triton.cdiv(rows, 32),)](
                batch.seq_lens, self._order, rows, BLOCK=32, PADDED_ROWS=triton.next_power_of_2(rows), num_warps=4
            )

    def write_kv(
        self,
        layer: "Attention",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: "ForwardBatch",
    ) -> "torch.Tensor | _Unwritten | _Fresh":
        decodes = self._num_decode_rows(layer, batch) == batch.shape.num_rows and batch.shape.decode_query_len == 1
        if decodes and batch.around_attention is None:
            return _Unwritten(query, key, value)
        step = self._flash_step_of(layer, batch)
        kept = (
            torch.empty(2, *key.shape, dtype=key.dtype, device=key.device) if step is not None and step.fresh else None
        )
        query = self._write(layer, query, key, value, batch, kept)
        return query if kept is None else _Fresh(query, *kept)

    def attend(
        self,
        layer: "Attention",
        query: "torch.Tensor | _Unwritten | _Fresh",
        batch: "ForwardBatch",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        unwritten = query if isinstance(query, _Unwritten) else None
        fresh = query if isinstance(query, _Fresh) else None
        query = query if isinstance(query, torch.Tensor) else query.query
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
        step = self._flash_step_of(layer, batch)
        if step is not None:
            self._with_flash(layer, query, out, step, fresh)
            return out
        num_decode_rows = self._num_decode_rows(layer, batch)
        if self._tiles is not None and num_decode_rows < batch.shape.num_rows:
            self._tiles(layer, query, out, batch)
            return out
        if num_decode_rows:
            self._decode(layer, query, out, batch, num_decode_rows, unwritten)
        if num_decode_rows < batch.shape.num_rows:
            self._long_rows(layer, query, out, batch, num_decode_rows)
        return out

    def num_splits(self, num_rows: int) -> int:
        """Programs a row and KV head, by the step's shape alone: enough to even out rows of different lengths."""
        programs = num_rows * self.spec.num_kv_heads
        return max(1, min(_MOST_SPLITS, 15 * self._num_processors // (4 * programs)))

    def _num_decode_rows(self, layer: "Attention", batch: "ForwardBatch") -> int:
        """Leading rows that the decode kernel runs."""
        fits = self._group(layer) * batch.shape.decode_query_len <= _MOST_TILE_ROWS
        return batch.shape.num_decode_rows if fits else 0

    def _flash_step_of(self, layer: "Attention", batch: "ForwardBatch") -> _FlashStep | None:
        """What FlashAttention needs of a step that it runs: one that is not uniform rows alone."""
        if self._flash is None or self._num_decode_rows(layer, batch) == batch.shape.num_rows:
            return None
        known = self._flash_step
        if known is None or known.batch is not batch:
            in_a_graph = batch.shape.gives == "logits" or batch.around_attention is not None
            most = batch.block_table.shape[1] * self.block_size
            known = self._flash_step = _FlashStep(
                batch=batch,
                fresh=not in_a_graph and batch.seq_lens_host == batch.query_lens_host,
                max_seq_len=most if in_a_graph else max(batch.seq_lens_host),
            )
        return known if known.fresh or self._tiles is None else None

    def _write(
        self,
        layer: "Attention",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: "ForwardBatch",
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        """The query as it is attended with, rotated; keys and values are in the cache, and in ``kept`` if given."""
        num_tokens, heads, dim = query.shape
        kv_heads, rotary = self.spec.num_kv_heads, layer.rotary
        rotated = query if rotary is None else query.new_empty(query.shape)
        kept_key, kept_value = (key, value) if kept is None else kept
        write_kv_kernel[(num_tokens,)](
            query, key, value, layer.kv_cache, batch.slot_mapping, batch.positions,
            query if rotary is None else rotary.table, rotated, kept_key, kept_value,
            query.stride(0), key.stride(0), value.stride(0), layer.kv_cache.shape[1],
            NUM_HEADS=heads, PADDED_HEADS=triton.next_power_of_2(heads), NUM_KV_HEADS=kv_heads,
            PADDED_KV_HEADS=triton.next_power_of_2(kv_heads), HEAD_DIM=dim, BLOCK_SIZE=self.block_size,
            PADDED_DIM=self._padded_dim, ROPE=rotary is not None, KEEPS=kept is not None,
            PDL=self._pdl, num_warps=4, launch_pdl=self._pdl,
        )  # fmt: skip
        return rotated

    def _with_flash(
        self, layer: "Attention", query: torch.Tensor, out: torch.Tensor, step: _FlashStep, fresh: _Fresh | None
    ) -> None:
        """All rows by FlashAttention, over the blocks or, whole prompts, beside them.

        Uniform rows among them too: one launch a layer more would cost the host more than it saves the device.
        """
        assert self._flash is not None
        batch = step.batch
        keys, values = layer.kv_cache.transpose(2, 3) if fresh is None else (fresh.key, fresh.value)
        self._flash(
            query,
            keys,
            values,
            out,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            max_query_len=batch.shape.max_query_len,
            max_seq_len=step.max_seq_len,
            block_table=batch.block_table if fresh is None else None,
            scale=layer.scale,
            window=-1 if self.spec.sliding_window is None else self.spec.sliding_window - 1,
        )

    def _decode(
        self,
        layer: "Attention",
        query: torch.Tensor,
        out: torch.Tensor,
        batch: "ForwardBatch",
        rows: int,
        unwritten: _Unwritten | None,
    ) -> None:
        query_len, heads, group = batch.shape.decode_query_len, self.spec.num_kv_heads, self._group(layer)
        splits = self.num_splits(rows)
        block_m = max(16, triton.next_power_of_2(group * query_len))
        block_n, warps, stages = self._tiling(rows * heads * splits)
        rotary = None if unwritten is None else layer.rotary
        key, value = (query, query) if unwritten is None else (unwritten.key, unwritten.value)
        decode_kernel[(heads, rows, splits)](
            query, key, value, layer.kv_cache, batch.slot_mapping, batch.block_table, batch.seq_lens, self._order,
            query if rotary is None else rotary.table,
            self._scratch, self._scratch_lse, out, layer.scale * _LOG2_E,
            query.stride(0), key.stride(0), value.stride(0), batch.block_table.stride(0), layer.kv_cache.shape[1],
            NUM_SPLITS=splits, QUERY_LEN=query_len, WRITES=unwritten is not None, ROPE=rotary is not None,
            ORDERED=splits == 1, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
            **self._shape_of(group),
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(rows, heads, group * query_len)](
                self._scratch, self._scratch_lse, out,
                NUM_SPLITS=splits, PADDED_SPLITS=triton.next_power_of_2(splits), QUERY_LEN=query_len, GROUP=group,
                NUM_KV_HEADS=heads, HEAD_DIM=self.spec.head_dim, PADDED_DIM=self._padded_dim, BLOCK_M=block_m,
                PDL=self._pdl, num_warps=1, launch_pdl=self._pdl,
            )  # fmt: skip

    def _tiling(self, programs: int) -> tuple[int, int, int]:
        """Keys a step of a decode program, warps, and the compiler's stages; by measurement (README).

        Many small programs a processor: their block numbers, keys and values are three journeys to memory one after
        the other, which only other programs' work can hide, or, where there are few programs, more steps on their way;
        where lengths differ there are few in the end. Two stages more are one step more.
        """
        if self._padded_dim > 128 or self.spec.dtype == "float32":
            return 32, 4, 3
        processors = self._num_processors
        return 32, 1, 5 if programs < 6 * processors else 7 if programs < 7.6 * processors else 3

    def _long_rows(
        self, layer: "Attention", query: torch.Tensor, out: torch.Tensor, batch: "ForwardBatch", first: int
    ) -> None:
        num_rows, group = batch.shape.num_rows - first, self._group(layer)
        num_tokens = batch.shape.num_tokens - first * batch.shape.decode_query_len
        block_m = max(16 if self.spec.dtype == "float32" else 64, triton.next_power_of_2(group))
        block_n = 32 if self._padded_dim > 128 or self.spec.dtype == "float32" else 64
        tiles = num_tokens // (block_m // group) + num_rows
        long_rows_kernel[(tiles, self.spec.num_kv_heads)](
            query, layer.kv_cache, batch.block_table, batch.seq_lens, batch.cu_seqlens_q, out, layer.scale * _LOG2_E,
            query.stride(0), batch.block_table.stride(0), layer.kv_cache.shape[1], first, num_rows,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=3, **self._shape_of(group),
        )  # fmt: skip

    def _group(self, layer: "Attention") -> int:
        """Query heads a KV head."""
        return layer.num_heads // self.spec.num_kv_heads

    def _shape_of(self, group: int) -> dict[str, int | str]:
        return {
            "GROUP": group,
            "NUM_KV_HEADS": self.spec.num_kv_heads,
            "HEAD_DIM": self.spec.head_dim,
            "PADDED_DIM": self._padded_dim,
            "BLOCK_SIZE": self.block_size,
            "WINDOW": self.spec.sliding_window or 0,
            "PRECISION": self._precision,
        }
