"""FlashAttention-3 for prompts, where a build of it is installed (Shah et al., arXiv 2407.08608).

Contract: the builds differ in how they are called; what this module gives is one function over packed rows and blocks.
"""

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from mini_infer.interfaces import KVCacheSpec


class FlashAttention(Protocol):
    """Causal attention of packed rows over paged keys and values."""

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        block_table: torch.Tensor | None,
        scale: float,
        window: int,
    ) -> None:
        """Write ``out`` [num_tokens, num_heads, head_dim] of the rows' tokens.

        Args:
            query: [num_tokens, num_heads, head_dim], rotated.
            keys: [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last; without ``block_table``
                [num_tokens, num_kv_heads, head_dim], laid out like ``query``.
            values: as ``keys``.
            out: as ``query``; tokens of other rows stay as they are.
            cu_seqlens_q: [num_rows + 1] int32, where each row's tokens begin.
            seq_lens: [num_rows] int32.
            max_query_len: of any row.
            max_seq_len: of any row.
            block_table: [num_rows, width] int32, or None if rows have no keys but those of this step.
            scale: on the scores.
            window: keys to the left that a query sees, or -1 for all.
        """


def find_flash_attention(spec: "KVCacheSpec", device: str) -> FlashAttention | None:
    """The installed build's function, or None if there is none or it cannot serve this cache."""
    if torch.cuda.get_device_capability(device)[0] != 9 or spec.dtype == "float32" or spec.head_dim % 8:
        return None
    try:
        import vfa3
    except ImportError:
        return None
    return _of_vllm(vfa3.fwd)


def _of_vllm(fwd: Any) -> FlashAttention:
    """The kernels of vLLM's build alone."""

    def call(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        block_table: torch.Tensor | None,
        scale: float,
        window: int,
    ) -> None:
        paged = block_table is not None
        fwd(
            query, keys, values, None, None, None, out,
            cu_seqlens_q, None if paged else cu_seqlens_q, None, None, seq_lens if paged else None,
            max_query_len, max_seq_len, block_table, None, None, None, None, None, None, None, None,
            scale, True, window, -1 if window < 0 else 0, 0.0, True, None, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip

    return call
