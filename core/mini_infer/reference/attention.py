"""ReferenceAttention: attention over paged caches in plain PyTorch, on any device; what other backends are held to.

Contract: every kind of ``KVCacheSpec`` and every mixture of rows; the scores, their softmax and the sum are float32
whatever the dtype. No cache slot that a row may not see has any effect, be it NaN. Lengths on the host serve as upper
bounds only, so drafts may be accepted on the device.

The rows of a step are cut into *segments*, each one padded computation: neighbouring rows of equal query length (all
decode rows, say), or a stretch of one long prompt. The blocks of a segment are gathered, and what must not be seen is
set to zero, before PyTorch's own attention runs::

    rows           d0 d1 d2   p3 (query 700)         p4 (query 3)
    query lens      1  1  1   [ 512 ][ 188 ]         3
    segments       [   0   ]  [  1  ][  2  ]        [ 3 ]
"""

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from mini_infer.interfaces.attention import AttentionBackend, AttentionCapabilities

if TYPE_CHECKING:
    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces.model import KVCacheSpec
    from mini_infer.layers.attention import Attention

_STRETCH = 512  # queries of one prompt in a segment
_PADDED = 1 << 25  # numbers that a segment of several rows gathers, and mask numbers that it has, at most
_KEPT = 1 << 20  # mask numbers of a segment that are kept for all layers


@dataclass(frozen=True, slots=True)
class Masks:
    """What the queries of a segment may see.

    Attributes:
        hidden: [num_rows, slots, 1, 1] bool, slots that no query of the row may see.
        bias: [num_rows, 1, queries, slots] float32, added to scores: 0, or minus infinity for what a query may not see.
    """

    hidden: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of equal query length, computed together.

    Attributes:
        start, stop: its tokens in the packed batch.
        blocks: [num_rows, width], the blocks to gather.
        lens: [num_rows, 1] int32, what each row's last query here sees, itself counted.
        masks: for all layers; None to make them again for each, as those of a long prompt are large.
    """

    start: int
    stop: int
    blocks: torch.Tensor
    lens: torch.Tensor
    masks: Masks | None


class ReferenceAttention(AttentionBackend):
    """The core's own backend.

    Caches are [2, num_blocks, block_size, num_kv_heads, head_dim] (keys, values), and for latent specs
    [num_blocks, block_size, num_kv_heads, head_dim].
    """

    name: ClassVar[str] = "reference"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        devices=("cpu", "cuda"),
        dtypes=("float32", "bfloat16", "float16"),
        kinds=("full", "sliding", "latent"),
    )

    def __init__(self, spec: "KVCacheSpec", device: str, block_size: int) -> None:
        super().__init__(spec, device, block_size)
        self._segments: list[Segment] = []
        self._num_tokens = 0

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        shape = (num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)
        return shape if self.spec.kind == "latent" else (2, *shape)

    def prepare(self, batch: "ForwardBatch") -> None:
        """Cut the step into segments; tokens behind the last row that the host knows are padding."""
        self._segments = []
        self._num_tokens = 0
        row = 0
        for query_len, run in groupby(batch.query_lens_host):
            stop_row = row + len(list(run))
            numbers = max(batch.seq_lens_host[row:stop_row]) * max(self.spec.numbers_per_token, query_len)
            limit = 1 if query_len > _STRETCH else max(1, _PADDED // max(1, numbers))
            while row < stop_row:
                count = min(stop_row - row, limit)
                self._add_rows(batch, row, count, query_len)
                row += count

    def _add_rows(self, batch: "ForwardBatch", row: int, count: int, query_len: int) -> None:
        """Segments for ``count`` rows from ``row`` on; a long prompt, being alone, in several stretches."""
        seq_len = max(batch.seq_lens_host[row : row + count])
        for first in range(0, query_len, _STRETCH):
            queries = min(_STRETCH, query_len - first)
            later = query_len - first - queries  # queries of the row that come after this stretch
            width = min(-(-max(seq_len - later, 1) // self.block_size), batch.block_table.shape[1])
            blocks = batch.block_table[row : row + count, :width]
            lens = batch.seq_lens[row : row + count, None] - later
            small = count * queries * width * self.block_size <= _KEPT
            masks = self._masks(blocks, lens, queries) if small else None
            start, self._num_tokens = self._num_tokens, self._num_tokens + count * queries
            self._segments.append(Segment(start, self._num_tokens, blocks, lens, masks))

    def _masks(self, blocks: torch.Tensor, lens: torch.Tensor, queries: int) -> Masks:
        slots = torch.arange(blocks.shape[1] * self.block_size, device=lens.device)
        own = lens[:, :, None] + torch.arange(-queries, 0, device=lens.device)[:, None]  # [num_rows, queries, 1]
        own = own.clamp(0, len(slots) - 1)  # padding may be longer than its table, or of length 0
        unseen = slots > own
        hidden = slots >= lens
        if self.spec.sliding_window is not None:
            unseen |= slots <= own - self.spec.sliding_window
            hidden |= slots <= lens - queries - self.spec.sliding_window
        hidden |= (blocks == 0).repeat_interleave(self.block_size, dim=1)  # nothing real is in the null block
        bias = torch.zeros(unseen.shape, dtype=torch.float32, device=lens.device).masked_fill_(unseen, -torch.inf)
        return Masks(hidden[:, :, None, None], bias.unsqueeze(1))

    def write_kv(
        self,
        layer: "Attention",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: "ForwardBatch",
    ) -> torch.Tensor:
        if self.spec.kind == "latent":
            self._write(layer.kv_cache, key, batch.slot_mapping)
        else:
            self._write(layer.kv_cache[0], key, batch.slot_mapping)
            self._write(layer.kv_cache[1], value, batch.slot_mapping)
        return query

    def _write(self, cache: torch.Tensor, numbers: torch.Tensor, slots: torch.Tensor) -> None:
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, numbers.to(cache.dtype))

    def attend(
        self, layer: "Attention", query: torch.Tensor, batch: "ForwardBatch", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            out = query.new_empty(query.shape[0], layer.num_heads, self.spec.v_head_dim)
        out.zero_()
        for segment in self._segments:
            q = query[segment.start : segment.stop].float().reshape(segment.blocks.shape[0], -1, *query.shape[1:])
            masks = segment.masks or self._masks(segment.blocks, segment.lens, q.shape[1])
            key = self._gather(layer, 0, segment, masks)
            latent = self.spec.kind == "latent"
            value = key[..., : self.spec.v_head_dim] if latent else self._gather(layer, 1, segment, masks)
            out[segment.start : segment.stop] = self._attend(q, key, value, masks.bias, layer.scale).flatten(0, 1)
        return out

    def _gather(self, layer: "Attention", which: int, segment: Segment, masks: Masks) -> torch.Tensor:
        """[num_rows, slots, num_kv_heads, head_dim] float32: a copy of the segment's blocks, unseen slots zero."""
        cache = layer.kv_cache if self.spec.kind == "latent" else layer.kv_cache[which]
        found = cache.index_select(0, segment.blocks.flatten()).float()
        return found.view(segment.blocks.shape[0], -1, *cache.shape[2:]).masked_fill_(masks.hidden, 0)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[num_rows, queries, num_heads, head_dim] -> [num_rows, queries, num_heads, v_head_dim]."""
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if query.shape[1] == 1:  # the query heads that share a key head take the place of queries: one product for all
            q = query.view(query.shape[0], self.spec.num_kv_heads, -1, query.shape[-1])
            out = F.scaled_dot_product_attention(q, key, value, attn_mask=bias, scale=scale)
            return out.flatten(1, 2).unsqueeze(1)
        q = query.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=bias, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)
