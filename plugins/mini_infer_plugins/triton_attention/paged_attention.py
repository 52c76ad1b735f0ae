"""TritonAttention: grouped-query attention over paged blocks, decode with the sequence split over the card.

Contract: uniform rows (decode, verify) run in ``decode_kernel`` on a grid that depends on the step's shape alone, so a
device graph of that shape stays valid at any length; other rows run in ``long_rows_kernel``. RoPE is fused into the
write of the keys and the read of the queries. Float32 is computed in IEEE float32.
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
    write_token_kernel,
)

if TYPE_CHECKING:
    from mini_infer.interfaces import BatchLimits, ForwardBatch, KVCacheSpec
    from mini_infer.layers import Attention

_LOG2_E = 1.4426950408889634
_MOST_SPLITS = 64
_MOST_TILE_ROWS = 64  # query heads times queries of a uniform row that one tile holds


@dataclass(frozen=True, slots=True)
class _LongRows:
    """The rows of a step that are not uniform, and what FlashAttention wants to know of them."""

    batch: "ForwardBatch"
    first: int
    fresh: bool  # all are whole prompts, whose keys and values are all in this step
    max_seq_len: int
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Unwritten:
    """What ``write_kv`` leaves to ``attend``, which writes in the same kernel that reads."""

    layer: "Attention"
    batch: "ForwardBatch"
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
        self._long: _LongRows | None = None  # of the step at work
        self._unwritten: _Unwritten | None = None
        self._pdl = on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)  # launched while the last one ends
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4

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
        self._order = torch.zeros(limits.max_num_rows, dtype=torch.int32, device=self.device)
        self._scratch_lse = torch.empty(cells, dtype=torch.float32, device=self.device)

    def prepare(self, batch: "ForwardBatch") -> None:
        rows = batch.shape.num_decode_rows
        if rows and self.num_splits(rows) == 1:
            longest_first_kernel[(triton.cdiv(rows, 32),)](
                batch.seq_lens, self._order, rows, BLOCK=32, PADDED_ROWS=triton.next_power_of_2(rows), num_warps=4
            )

    def write_kv(self, layer: "Attention", key: torch.Tensor, value: torch.Tensor, batch: "ForwardBatch") -> None:
        unwritten = _Unwritten(layer, batch, key, value)
        if batch.around_attention is None:
            self._unwritten = unwritten
        else:  # ``attend`` runs outside the graph that this is captured in
            self._write(unwritten)

    def attend(self, layer: "Attention", query: torch.Tensor, batch: "ForwardBatch") -> torch.Tensor:
        new, self._unwritten = self._unwritten, None
        if new is not None and (new.layer is not layer or new.batch is not batch):
            self._write(new)
            new = None
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        group = layer.num_heads // self.spec.num_kv_heads
        num_decode_rows = self._num_decode_rows(layer, batch)
        long_rows = self._long_rows_of(layer, batch) if self._flash is not None else None
        if long_rows is not None:
            self._with_flash(layer, query, out, batch, long_rows, new)
            return out
        if new is not None and (num_decode_rows < batch.shape.num_rows or batch.shape.decode_query_len > 1):
            self._write(new)
            new = None
        if num_decode_rows:
            self._decode(layer, query, out, batch, group, num_decode_rows, new=new)
        if num_decode_rows < batch.shape.num_rows:
            self._long_rows(layer, query, out, batch, group, num_decode_rows)
        return out

    def num_splits(self, num_rows: int) -> int:
        """Programs a row and KV head: enough to fill the card twice, by the step's shape alone."""
        programs = num_rows * self.spec.num_kv_heads
        return max(1, min(_MOST_SPLITS, 2 * self._num_processors // programs))

    def _num_decode_rows(self, layer: "Attention", batch: "ForwardBatch") -> int:
        """Leading rows that the decode kernel runs."""
        group = layer.num_heads // self.spec.num_kv_heads
        return batch.shape.num_decode_rows if group * batch.shape.decode_query_len <= _MOST_TILE_ROWS else 0

    def _long_rows_of(self, layer: "Attention", batch: "ForwardBatch") -> "_LongRows | None":
        """The other rows, if there are any; worked out once a step."""
        first = self._num_decode_rows(layer, batch)
        if first == batch.shape.num_rows:
            return None
        known = self._long
        if known is None or known.batch is not batch or known.first != first:
            known = self._long = _LongRows(
                batch=batch,
                first=first,
                fresh=batch.around_attention is None and batch.seq_lens_host[first:] == batch.query_lens_host[first:],
                max_seq_len=max(batch.seq_lens_host[first:]),
                cu_seqlens_q=batch.cu_seqlens_q[first:],
                seq_lens=batch.seq_lens[first:],
                block_table=batch.block_table[first:],
            )
        return known

    def _write(self, new: "_Unwritten") -> None:
        layer, batch, key, value = new.layer, new.batch, new.key, new.value
        rotary = layer.rotary
        write_kv_kernel[(batch.shape.num_tokens, self.spec.num_kv_heads)](
            key, value, layer.kv_cache, batch.slot_mapping, batch.positions, key if rotary is None else rotary.table,
            key.stride(0), value.stride(0), layer.kv_cache.shape[1],
            NUM_KV_HEADS=self.spec.num_kv_heads, HEAD_DIM=self.spec.head_dim, BLOCK_SIZE=self.block_size,
            PADDED_DIM=self._padded_dim, ROPE=rotary is not None, PDL=self._pdl, num_warps=1, launch_pdl=self._pdl,
        )  # fmt: skip

    def _with_flash(
        self,
        layer: "Attention",
        query: torch.Tensor,
        out: torch.Tensor,
        batch: "ForwardBatch",
        long_rows: "_LongRows",
        new: "_Unwritten | None",
    ) -> None:
        """Uniform rows by our kernel, the others by FlashAttention over the same blocks."""
        assert self._flash is not None
        fresh = long_rows.fresh and new is not None
        key, value = (query, query) if new is None else (new.key, new.value)
        if layer.rotary is not None:
            query, key = self._rotate_and_write(layer, query, batch, layer.rotary.table, new, keeps_key=fresh)
        elif new is not None:
            self._write(new)
        if long_rows.first:
            group = layer.num_heads // self.spec.num_kv_heads
            self._decode(layer, query, out, batch, group, long_rows.first, rotated=True)
        keys, values = (key, value) if fresh else layer.kv_cache.transpose(2, 3)
        self._flash(
            query,
            keys,
            values,
            out,
            cu_seqlens_q=long_rows.cu_seqlens_q,
            seq_lens=long_rows.seq_lens,
            max_query_len=batch.shape.max_query_len,
            max_seq_len=long_rows.max_seq_len,
            block_table=None if fresh else long_rows.block_table,
            scale=layer.scale,
            window=-1 if self.spec.sliding_window is None else self.spec.sliding_window - 1,
        )

    def _rotate_and_write(
        self,
        layer: "Attention",
        query: torch.Tensor,
        batch: "ForwardBatch",
        table: torch.Tensor,
        new: "_Unwritten | None",
        *,
        keeps_key: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, rotated, and with ``keeps_key`` the new keys, rotated; what is new is in the cache afterwards."""
        num_tokens, heads, dim = query.shape
        kv_heads = self.spec.num_kv_heads
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        key, value = (query, query) if new is None else (new.key, new.value)
        rotated_key = torch.empty(key.shape, dtype=key.dtype, device=key.device) if keeps_key else key
        write_token_kernel[(num_tokens,)](
            query, key, value, layer.kv_cache, batch.slot_mapping, batch.positions, table,
            out, rotated_key, query.stride(0), key.stride(0), value.stride(0), layer.kv_cache.shape[1],
            NUM_HEADS=heads, PADDED_HEADS=triton.next_power_of_2(heads), NUM_KV_HEADS=kv_heads,
            PADDED_KV_HEADS=triton.next_power_of_2(kv_heads), HEAD_DIM=dim, BLOCK_SIZE=self.block_size,
            PADDED_DIM=self._padded_dim, WRITES=new is not None, KEEPS_KEY=keeps_key, num_warps=4,
        )  # fmt: skip
        return out, rotated_key

    def _decode(
        self,
        layer: "Attention",
        query: torch.Tensor,
        out: torch.Tensor,
        batch: "ForwardBatch",
        group: int,
        rows: int,
        *,
        rotated: bool = False,
        new: "_Unwritten | None" = None,
    ) -> None:
        query_len, heads = batch.shape.decode_query_len, self.spec.num_kv_heads
        splits = self.num_splits(rows)
        block_m = max(16, triton.next_power_of_2(group * query_len))
        block_n, warps, stages = self._tiling()
        rotary = None if rotated else layer.rotary
        key, value = (query, query) if new is None else (new.key, new.value)
        decode_kernel[(heads, rows, splits)](
            query, key, value, layer.kv_cache, batch.slot_mapping, batch.block_table, batch.seq_lens, self._order,
            query if rotary is None else rotary.table,
            self._scratch, self._scratch_lse, out, layer.scale * _LOG2_E,
            query.stride(0), key.stride(0), value.stride(0), batch.block_table.stride(0), layer.kv_cache.shape[1],
            NUM_SPLITS=splits, QUERY_LEN=query_len, WRITES=new is not None, BLOCK_M=block_m, BLOCK_N=block_n,
            ORDERED=splits == 1, num_warps=warps, num_stages=stages, **self._shape_of(group, rotary is not None),
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(rows, heads, group * query_len)](
                self._scratch, self._scratch_lse, out,
                NUM_SPLITS=splits, PADDED_SPLITS=triton.next_power_of_2(splits), QUERY_LEN=query_len, GROUP=group,
                NUM_KV_HEADS=heads, HEAD_DIM=self.spec.head_dim, PADDED_DIM=self._padded_dim, BLOCK_M=block_m,
                PDL=self._pdl, num_warps=1, launch_pdl=self._pdl,
            )  # fmt: skip

    def _tiling(self) -> tuple[int, int, int]:
        """Keys a step of a decode program, warps, and steps on their way; by measurement (README).

        Many small programs a processor: their block numbers, keys and values are three journeys to memory one after
        the other, which only other programs' work can hide.
        """
        return (32, 4, 3) if self._padded_dim > 128 or self.spec.dtype == "float32" else (32, 1, 5)

    def _long_rows(
        self, layer: "Attention", query: torch.Tensor, out: torch.Tensor, batch: "ForwardBatch", group: int, first: int
    ) -> None:
        num_rows = batch.shape.num_rows - first
        num_tokens = batch.shape.num_tokens - first * batch.shape.decode_query_len
        block_m = max(16 if self.spec.dtype == "float32" else 64, triton.next_power_of_2(group))
        block_n = 32 if self._padded_dim > 128 or self.spec.dtype == "float32" else 64
        tiles = num_tokens // (block_m // group) + num_rows
        rotary = layer.rotary
        long_rows_kernel[(tiles, self.spec.num_kv_heads)](
            query, layer.kv_cache, batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
            query if rotary is None else rotary.table, out, layer.scale * _LOG2_E,
            query.stride(0), batch.block_table.stride(0), layer.kv_cache.shape[1], first, num_rows,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=3,
            **self._shape_of(group, rotary is not None),
        )  # fmt: skip

    def _shape_of(self, group: int, rope: bool) -> dict[str, int | bool | str]:
        return {
            "GROUP": group,
            "NUM_KV_HEADS": self.spec.num_kv_heads,
            "HEAD_DIM": self.spec.head_dim,
            "PADDED_DIM": self._padded_dim,
            "BLOCK_SIZE": self.block_size,
            "WINDOW": self.spec.sliding_window or 0,
            "ROPE": rope,
            "PRECISION": self._precision,
        }
