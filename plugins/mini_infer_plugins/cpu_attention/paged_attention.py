"""CpuAttention: attention of a packed batch over paged blocks in one native call a layer, long prompts through PyTorch.

Contract: rows of up to ``longest_native_query`` queries run in native.cpp, where each row's numbers depend on that row
alone. Longer ones, and all rows while the native file is still being built or cannot be, are gathered and handed to
PyTorch's own attention row by row. Both read and write the same cache, so a request may start on one path and go on
along the other::

    kv_cache  [2, num_blocks, num_kv_heads, head_dim * block_size]
              keys:   head_dim x block_size, transposed, so that scores of a block's slots fill one register
              values: block_size x head_dim

RoPE is fused into the write and the read.
"""

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from mini_infer.interfaces import AttentionBackend, AttentionCapabilities
from mini_infer.native_build import multiplies_bfloat16
from mini_infer_plugins.cpu_attention.native import BatchArgs, LayerArgs, native_build

if TYPE_CHECKING:
    from mini_infer.interfaces import ForwardBatch, KVCacheSpec
    from mini_infer.layers import Attention

_STRETCH = 512  # queries of one long row that share a mask
_EVERYTHING = 1 << 40  # a window that hides nothing


def longest_native_query(dtype: str) -> int:
    """Up to how many queries of a row native.cpp is the faster one, by measurement (README)."""
    return 64 if dtype == "bfloat16" and multiplies_bfloat16() else 2048


@dataclass(frozen=True, slots=True)
class PlainRow:
    """A row that PyTorch computes.

    Attributes:
        start, stop: its tokens in the packed batch.
        seq_len: tokens of its sequence.
        first: position of the first key that it needs, a block's start.
        blocks: [num_blocks] int64 from there on; None for a padding row.
    """

    start: int
    stop: int
    seq_len: int
    first: int
    blocks: torch.Tensor | None


class CpuAttention(AttentionBackend):
    """See the module."""

    name: ClassVar[str] = "cpu"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        devices=("cpu",), dtypes=("float32", "bfloat16"), kinds=("full", "sliding"), fuses_rope=True
    )

    def __init__(self, spec: "KVCacheSpec", device: str, block_size: int) -> None:
        super().__init__(spec, device, block_size)
        self._build = native_build()
        self._build.start()
        self._layers: dict[Attention, LayerArgs] = {}
        self._native: ctypes.CDLL | None = None
        self._batch = BatchArgs()
        self._plain: list[PlainRow] = []

    @classmethod
    def unavailable(cls, spec: "KVCacheSpec", device: str) -> str | None:
        build = native_build()
        build.start()
        return build.status if build.failed else None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.spec.num_kv_heads, self.spec.head_dim * self.block_size)

    def bind(self, layer: "Attention") -> None:
        keys, values = layer.kv_cache
        self._layers[layer] = LayerArgs(
            keys.data_ptr(),
            values.data_ptr(),
            layer.rotary.table.data_ptr() if layer.rotary is not None else None,
            self.spec.dtype == "bfloat16",
            layer.num_heads,
            self.spec.num_kv_heads,
            self.spec.head_dim,
            self.block_size,
            self._window,
            layer.scale,
        )

    @property
    def _window(self) -> int:
        return self.spec.sliding_window or _EVERYTHING

    def prepare(self, batch: "ForwardBatch") -> None:
        self._native = self._build.library  # a library that has just been built is taken between two steps
        longest = longest_native_query(self.spec.dtype) if self._native is not None else 0
        self._plain = self._plain_rows(batch, longest) if batch.shape.max_query_len > longest else []
        self._batch = BatchArgs(
            batch.slot_mapping.data_ptr(),
            batch.positions.data_ptr(),
            batch.block_table.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.cu_seqlens_q.data_ptr(),
            batch.block_table.stride(0),
            batch.shape.num_rows,
            batch.shape.num_tokens,
            longest,
            torch.get_num_threads(),
        )

    def _plain_rows(self, batch: "ForwardBatch", longest: int) -> list[PlainRow]:
        """Rows of more than ``longest`` queries."""
        rows: list[PlainRow] = []
        bounds = batch.cu_seqlens_q.tolist()
        for row, seq_len in enumerate(batch.seq_lens.tolist()):
            start, stop = bounds[row], bounds[row + 1]
            if stop - start <= longest:
                continue
            first = max(0, seq_len - (stop - start) - self._window + 1) // self.block_size
            blocks = batch.block_table[row, first : -(-seq_len // self.block_size)].long()
            real = seq_len >= stop - start and bool(blocks[-1])  # padding lies in the null block
            rows.append(PlainRow(start, stop, seq_len, first * self.block_size, blocks if real else None))
        return rows

    def write_kv(
        self,
        layer: "Attention",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: "ForwardBatch",
    ) -> torch.Tensor:
        if self._native is not None:
            args = ctypes.byref(self._batch), ctypes.byref(self._layers[layer])
            key, value = _packed(key), _packed(value)
            self._native.write_kv(*args, key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0))
            return query
        if layer.rotary is not None:
            _, key = layer.rotary(key[:, :1], key, batch.positions)
        keys, values = self._views(layer)
        block, offset = batch.slot_mapping // self.block_size, batch.slot_mapping % self.block_size
        keys[block, :, :, offset] = key
        values[block, :, offset] = value
        return query

    def attend(
        self, layer: "Attention", query: torch.Tensor, batch: "ForwardBatch", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype) if out is None else out
        if self._native is not None:
            args = ctypes.byref(self._batch), ctypes.byref(self._layers[layer])
            query = _packed(query)
            self._native.attend(*args, query.data_ptr(), query.stride(0), out.data_ptr())
        if self._plain:
            self._attend_plain(layer, query, batch, out)
        return out

    def _attend_plain(self, layer: "Attention", query: torch.Tensor, batch: "ForwardBatch", out: torch.Tensor) -> None:
        for row in self._plain:
            if row.blocks is None:
                out[row.start : row.stop] = 0
                continue
            q = query[row.start : row.stop]
            if layer.rotary is not None:
                q, _ = layer.rotary(q, q[:, :1], batch.positions[row.start : row.stop])
            key, value = self._gather(layer, row)
            if q.dtype is torch.bfloat16 and not multiplies_bfloat16():
                q, key, value = q.float(), key.float(), value.float()  # PyTorch's own product is slower than that
            found = self._attend_row(q.transpose(0, 1), key, value, layer.scale)
            out[row.start : row.stop] = found.transpose(0, 1)
        if self._native is None:
            out[self._plain[-1].stop :] = 0

    def _attend_row(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """[num_heads, queries, head_dim] over [num_kv_heads, keys, head_dim] -> [num_heads, queries, head_dim]."""
        queries, keys = query.shape[1], key.shape[1]
        query, key, value = query[None], key[None], value[None]
        if queries == keys <= self._window:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)[0]
        parts = []
        slots = torch.arange(keys)
        for start in range(0, queries, _STRETCH):
            q = query[:, :, start : start + _STRETCH]
            last = torch.arange(start, start + q.shape[2])[:, None] + keys - queries
            seen = (slots <= last) & (slots > last - self._window)
            parts.append(F.scaled_dot_product_attention(q, key, value, attn_mask=seen, scale=scale, enable_gqa=True)[0])
        return torch.cat(parts, dim=1)

    def _gather(self, layer: "Attention", row: PlainRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values from ``row.first`` to the sequence's end, [num_kv_heads, keys, head_dim] each."""
        keys, values = self._views(layer)
        assert row.blocks is not None
        count = row.seq_len - row.first
        key = keys[row.blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :count]
        value = values[row.blocks].transpose(0, 1).flatten(1, 2)[:, :count]
        return key, value

    def _views(self, layer: "Attention") -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_blocks, num_kv_heads, head_dim, block_size], values with the last two the other way round."""
        shape = (layer.kv_cache.shape[1], self.spec.num_kv_heads)
        keys = layer.kv_cache[0].view(*shape, self.spec.head_dim, self.block_size)
        values = layer.kv_cache[1].view(*shape, self.block_size, self.spec.head_dim)
        return keys, values


def _packed(heads: torch.Tensor) -> torch.Tensor:
    """[num_tokens, heads, head_dim] whose heads lie one after another; only tokens may be further apart."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
