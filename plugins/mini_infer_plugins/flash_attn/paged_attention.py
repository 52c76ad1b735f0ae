"""FlashAttnBackend: all attention through FlashAttention, whichever build is there (``mini_infer.flash_attention``).

Contract: uniform rows (decode, verify) are one call, the others another, both over the block tables. Lengths are read
on the device alone and the bound that the host gives is the table's width, so a device graph of a step of uniform rows
stays valid at any length. The cache is that of the core's reference::

    kv_cache  [2, num_blocks, block_size, num_kv_heads, head_dim]
"""

from typing import TYPE_CHECKING, ClassVar

import torch

from mini_infer.errors import ConfigError
from mini_infer.flash_attention import find_build, misfit
from mini_infer.interfaces import AttentionBackend, AttentionCapabilities

if TYPE_CHECKING:
    from collections.abc import Callable

    from mini_infer.interfaces import ForwardBatch, KVCacheSpec
    from mini_infer.layers import Attention


class FlashAttnBackend(AttentionBackend):
    """With a build that takes blocks of any size.

    Blocks that are multiples of a kernel's tile (64 tokens and more) would be fetched whole: what lies past a
    sequence's end, be it NaN, would be multiplied by zero, which leaves it NaN (Dao-AILab/flash-attention#2374). So
    whole prompts go through the blocks too: packed keys of one row would be fetched with the next row's.
    """

    name: ClassVar[str] = "flash-attn"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        devices=("cuda",),
        dtypes=("bfloat16", "float16"),
        kinds=("full", "sliding"),
        block_sizes=(16, 32),
        graphs="verify",
    )

    def __init__(self, spec: "KVCacheSpec", device: str, block_size: int) -> None:
        super().__init__(spec, device, block_size)
        self._flash = find_build(device).load()
        self._window = -1 if spec.sliding_window is None else spec.sliding_window - 1

    @classmethod
    def unavailable(cls, spec: "KVCacheSpec", device: str) -> str | None:
        try:
            find_build(device)
        except ConfigError as e:
            return str(e)
        return misfit(spec)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)

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
        shape = batch.shape
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
        rows, tokens = shape.num_decode_rows, shape.num_decode_rows * shape.decode_query_len
        if rows:
            uniform = slice(0, rows)
            self._call(layer, query[:tokens], out[:tokens], batch, uniform, shape.decode_query_len, uniform=True)
        if rows < shape.num_rows:
            self._call(layer, query, out, batch, slice(rows, shape.num_rows), shape.max_query_len)
        return out

    def _call(
        self,
        layer: "Attention",
        query: torch.Tensor,
        out: torch.Tensor,
        batch: "ForwardBatch",
        rows: slice,
        max_query_len: int,
        *,
        uniform: bool = False,
    ) -> None:
        keys, values = layer.kv_cache
        self._flash(
            query,
            keys,
            values,
            out,
            cu_seqlens_q=batch.cu_seqlens_q[rows.start : rows.stop + 1],
            seq_lens=batch.seq_lens[rows],
            max_query_len=max_query_len,
            max_seq_len=batch.block_table.shape[1] * self.block_size,
            block_table=batch.block_table[rows],
            scale=layer.scale,
            window=self._window,
            uniform=uniform,
        )


class FlashAttnInLargeBlocks(FlashAttnBackend):
    """With flash-attn 2, which takes blocks of a multiple of 256 tokens."""

    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        devices=("cuda",),
        dtypes=("bfloat16", "float16"),
        kinds=("full", "sliding"),
        block_sizes=(256, 512),
        graphs="verify",
    )


def backend_for(device: str, log: "Callable[[str], None]") -> type[FlashAttnBackend]:
    """The backend for the build that is installed for a device.

    Raises:
        ConfigError: that build is broken.
    """
    if not device.startswith("cuda"):
        return FlashAttnBackend
    try:
        build = find_build(device)
    except ConfigError:
        return FlashAttnBackend  # whose ``unavailable`` says the same
    build.load()
    log(f"flash-attn: {build}")
    return FlashAttnBackend if build.block_multiple == 1 else FlashAttnInLargeBlocks
