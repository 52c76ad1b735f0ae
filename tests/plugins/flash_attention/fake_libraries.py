"""Stand-ins for FlashAttention's builds and FlashInfer: their signatures and what they refuse, computed in float64.

Signatures and checks are those of flash-attn 2.8.3, of FlashAttention-3's ``flash_attn_interface``, of the operator
``fwd`` of vLLM's build of it, and of flashinfer-python 0.6.14. What a row may not see is never read; what nobody asked
for is NaN.
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool, window: tuple[int, int]
) -> torch.Tensor:
    """One row: [queries, heads, dim] over [keys, kv_heads, dim], the last query at the last key."""
    if len(keys) == 0:
        return torch.zeros_like(query)
    group = query.shape[1] // keys.shape[1]
    left, right = window[0], 0 if causal else window[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    key_at = torch.arange(len(keys))
    query_at = torch.arange(len(query))[:, None] + len(keys) - len(query)
    seen = torch.ones(len(query), len(keys), dtype=torch.bool)
    if left >= 0:
        seen &= key_at >= query_at - left
    if right >= 0:
        seen &= key_at <= query_at + right
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~seen.any(1, keepdim=True), 0.0)  # a query that sees nothing gets zeros
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def pages(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` keys of a row out of [blocks, block_size, heads, dim]."""
    return torch.cat([cache[int(block)] for block in table[: -(-length // cache.shape[1])]] or [cache[0, :0]])[:length]


def packed(
    query: torch.Tensor,
    starts: torch.Tensor,
    rows: list[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    causal: bool,
    window: tuple[int, int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.full_like(query, torch.nan) if out is None else out
    for row, (keys, values) in enumerate(rows):
        tokens = slice(int(starts[row]), int(starts[row + 1]))
        out[tokens] = attend(query[tokens], keys, values, scale, causal, window)
    return out


def check_starts(starts: torch.Tensor, longest: int) -> None:
    assert starts.dtype == torch.int32 and starts.is_contiguous()
    assert int(starts.diff().max()) <= longest, "max_seqlen is no bound"


def check_table(table: torch.Tensor, num_rows: int) -> None:
    assert table.dtype == torch.int32 and table.stride(-1) == 1 and len(table) == num_rows


def check_last_dimension(*tensors: torch.Tensor) -> None:
    assert all(tensor.stride(-1) == 1 for tensor in tensors), "must have contiguous last dimension"


# -- FlashAttention-3's kernels alone ----------------------------------------------------------------------------------


def fwd(
    q: Any, k: Any, v: Any, k_new: Any, v_new: Any, q_v: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    cu_seqlens_k_new: Any, seqused_q: Any, seqused_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, page_table: Any,
    kv_batch_idx: Any, leftpad_k: Any, rotary_cos: Any, rotary_sin: Any, seqlens_rotary: Any, q_descale: Any,
    k_descale: Any, v_descale: Any, softmax_scale: float, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, is_rotary_interleaved: bool, scheduler_metadata: Any, num_splits: int,
    pack_gqa: Any, sm_margin: int, s_aux: Any, cp_world_size: int, cp_rank: int, cp_tot_seqused_k: Any,
) -> list[torch.Tensor]:  # fmt: skip
    unused = [k_new, v_new, q_v, cu_seqlens_k_new, seqused_q, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin]
    unused += [seqlens_rotary, q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa, s_aux, cp_tot_seqused_k]
    assert all(each is None for each in unused)
    assert (softcap, num_splits, sm_margin, cp_world_size, cp_rank) == (0.0, 0, 0, 1, 0)
    found = _version_3(
        q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, page_table, softmax_scale,
        is_causal, (window_size_left, window_size_right),
    )  # fmt: skip
    return [found, torch.zeros(())]


def _version_3(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, max_seqlen_q: int,
    max_seqlen_k: int | None, page_table: Any, scale: float, causal: bool, window: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    check_starts(cu_seqlens_q, max_seqlen_q)
    check_last_dimension(q, k, v)
    num_rows = len(cu_seqlens_q) - 1
    if page_table is None:
        assert max_seqlen_k is not None and seqused_k is None
        check_starts(cu_seqlens_k, max_seqlen_k)
        bounds = cu_seqlens_k.tolist()
        rows = [(k[a:b], v[a:b]) for a, b in pairwise(bounds)]
    else:
        assert cu_seqlens_k is None, "If cu_seqlens_k is passed in, then page table is not supported"
        check_table(page_table, num_rows)
        assert seqused_k.dtype == torch.int32 and seqused_k.is_contiguous() and seqused_k.shape == (num_rows,)
        capacity = page_table.shape[1] * k.shape[1] if max_seqlen_k is None else max_seqlen_k
        assert int(seqused_k.max()) <= capacity
        lens = seqused_k.tolist()
        rows = [(pages(k, page_table[i], n), pages(v, page_table[i], n)) for i, n in enumerate(lens)]
    return packed(q, cu_seqlens_q, rows, scale, causal, window, out)


# -- FlashAttention-3 --------------------------------------------------------------------------------------------------


def varlen_3(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Any = None, seqused_k: Any = None, softmax_scale: float | None = None, causal: bool = False,
    qv: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: Any = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert softmax_scale is not None
    return _version_3(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, None, softmax_scale, causal,
        window_size,
    )  # fmt: skip


def with_kvcache_3(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 0, pack_gqa: Any = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert softmax_scale is not None and max_seqlen_q is not None and page_table is not None
    return _version_3(
        q, k_cache, v_cache, None, cu_seqlens_q, None, cache_seqlens, max_seqlen_q, None, page_table, softmax_scale,
        causal, window_size,
    )  # fmt: skip


def varlen_3_beta(*args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As early versions answered: with the log-sum-exp beside the output."""
    return varlen_3(*args, **named), torch.zeros(())


# -- flash-attn 2 ------------------------------------------------------------------------------------------------------


def check_version_2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: Any, num_rows: int) -> None:
    check_last_dimension(q, k, v)
    assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if block_table is not None:
        check_table(block_table, num_rows)
        if k.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")


def varlen_2(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> torch.Tensor:  # fmt: skip
    assert softmax_scale is not None
    num_rows = len(cu_seqlens_q) - 1
    check_version_2(q, k, v, block_table, num_rows)
    check_starts(cu_seqlens_q, max_seqlen_q)
    check_starts(cu_seqlens_k, max_seqlen_k)
    bounds = cu_seqlens_k.tolist()
    if block_table is None:
        rows = [(k[a:b], v[a:b]) for a, b in pairwise(bounds)]
    else:
        lens = [b - a for a, b in pairwise(bounds)]
        rows = [(pages(k, block_table[i], n), pages(v, block_table[i], n)) for i, n in enumerate(lens)]
    return packed(q, cu_seqlens_q, rows, softmax_scale, causal, window_size)


def with_kvcache_2(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, block_table: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert softmax_scale is not None and block_table is not None
    num_rows, num_queries = q.shape[:2]
    check_version_2(q, k_cache, v_cache, block_table, num_rows)
    assert cache_seqlens.dtype == torch.int32
    lens = cache_seqlens.tolist()
    rows = [(pages(k_cache, block_table[i], n), pages(v_cache, block_table[i], n)) for i, n in enumerate(lens)]
    starts = torch.arange(0, num_rows * num_queries + 1, num_queries, dtype=torch.int32)
    return packed(q.flatten(0, 1), starts, rows, softmax_scale, causal, window_size).view(q.shape)


# -- FlashInfer --------------------------------------------------------------------------------------------------------


class Paged:
    """What both wrappers do: a plan, then as many runs as there are layers."""

    def _plan(
        self, qo_indptr: Any, indptr: Any, indices: Any, last_page_len: Any, sizes: tuple[int, int, int, int],
        sm_scale: float | None, window_left: int, q_data_type: Any, kv_data_type: Any, causal: bool,
    ) -> None:  # fmt: skip
        for tensor in (qo_indptr, indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32
        assert qo_indptr.device.type == indptr.device.type == last_page_len.device.type == "cpu", "a device sync"
        assert int(qo_indptr[0]) == int(indptr[0]) == 0 and int(indptr[-1]) == len(indices)
        assert len(qo_indptr) == len(indptr) == len(last_page_len) + 1
        assert sm_scale is not None and q_data_type == kv_data_type
        assert bool((last_page_len >= 1).all()) and bool((last_page_len <= sizes[3]).all())
        self._planned = (qo_indptr, indptr.tolist(), indices.clone(), last_page_len.tolist(), sizes)
        self._scale, self._window, self._causal, self._dtype = sm_scale, window_left, causal, q_data_type

    def run(self, q: Any, paged_kv_cache: Any, *, out: Any = None) -> torch.Tensor:
        qo_indptr, indptr, indices, last, (num_heads, num_kv_heads, head_dim, page_size) = self._planned
        keys, values = paged_kv_cache
        assert q.dtype == keys.dtype == self._dtype and q.is_contiguous()
        assert q.shape == (int(qo_indptr[-1]), num_heads, head_dim), "q.shape[0] does not match qo_indptr[-1]"
        assert keys.shape[1:] == values.shape[1:] == (page_size, num_kv_heads, head_dim)
        rows = []
        for row, tokens in enumerate(last):
            first, end = indptr[row], indptr[row + 1]
            length = (end - first - 1) * page_size + tokens
            rows.append(tuple(pages(x, indices[first:end], length) for x in (keys, values)))
        found = packed(q, qo_indptr, rows, self._scale, self._causal, (self._window, -1))
        return found if out is None else out.copy_(found)


class BatchDecodeWithPagedKVCacheWrapper(Paged):
    def __init__(
        self, float_workspace_buffer: Any, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None, backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8 and not use_cuda_graph

    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int, *, pos_encoding_mode: str = "NONE", window_left: int = -1, logits_soft_cap: Any = None,
        q_data_type: Any = "float16", kv_data_type: Any = None, o_data_type: Any = None, sm_scale: Any = None,
    ) -> None:  # fmt: skip
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self._plan(
            starts, indptr, indices, last_page_len, sizes, sm_scale, window_left, q_data_type, kv_data_type, False
        )


class BatchPrefillWithPagedKVCacheWrapper(Paged):
    def __init__(
        self, float_workspace_buffer: Any, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None, paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None, custom_mask_buf: Any = None, mask_indptr_buf: Any = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None,
    ) -> None:  # fmt: skip
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8 and not use_cuda_graph
        assert backend in ("fa2", "fa3")

    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: Any = None,
        custom_mask: Any = None, packed_custom_mask: Any = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, sm_scale: Any = None, window_left: int = -1, logits_soft_cap: Any = None,
        rope_scale: Any = None, rope_theta: Any = None, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes, sm_scale, window_left,
            q_data_type, kv_data_type, causal,
        )  # fmt: skip


CONTENT: dict[str, dict[str, Any]] = {
    "vfa3": {"fwd": fwd},
    "flash_attn_interface": {"flash_attn_varlen_func": varlen_3, "flash_attn_with_kvcache": with_kvcache_3},
    "flash_attn": {"flash_attn_varlen_func": varlen_2, "flash_attn_with_kvcache": with_kvcache_2},
    "flashinfer": {
        "BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper,
        "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
    },
}


def only(*names: str) -> dict[str, ModuleType | None]:
    """What ``sys.modules`` has to hold so that these libraries are installed and the others are not."""
    modules: dict[str, ModuleType | None] = dict.fromkeys(CONTENT)
    for name in names:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(CONTENT[name])
        modules[name] = module
    return modules
