"""The Triton kernels: write keys and values, attend with the sequence split over programs, merge, attend in long rows.

Layout of one layer's cache, so that a head's block is contiguous::

    kv_cache [2, num_blocks, num_kv_heads, block_size, head_dim]

All query heads of one KV head are packed into one tile (grouped-query attention reads keys once)::

    tile row m = (query q = m // GROUP, head h = m % GROUP)        GROUP = query heads a KV head
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rotated(pointer, table, position, dims, HEAD_DIM: tl.constexpr, ROPE: tl.constexpr, mask):
    """A vector or tile of heads, rotated by its position; ``table`` is [max_len, 2, head_dim] of (cos, -sin | sin)."""
    x = tl.load(pointer + dims, mask=mask, other=0.0).to(tl.float32)
    if ROPE:
        half = tl.load(pointer + (dims + HEAD_DIM // 2) % HEAD_DIM, mask=mask, other=0.0).to(tl.float32)
        angle = table + position * 2 * HEAD_DIM + dims
        cos = tl.load(angle, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(angle + HEAD_DIM, mask=mask, other=0.0).to(tl.float32)
        x = x * cos + half * sin
    return x


@triton.jit
def write_kv_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    positions,
    table,
    key_stride,
    value_stride,
    num_blocks,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token and KV head. With PDL it starts while the kernel before it ends."""
    token, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    mask = dims < HEAD_DIM
    slot = tl.load(slot_mapping + token)
    position = tl.load(positions + token)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    k = rotated(key + token * key_stride + head * HEAD_DIM, table, position, dims, HEAD_DIM, ROPE, mask)
    v = tl.load(value + token * value_stride + head * HEAD_DIM + dims, mask=mask, other=0.0)
    place = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    size = num_blocks.to(tl.int64) * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    at = kv_cache + place.to(tl.int64) * HEAD_DIM + dims
    tl.store(at, k.to(kv_cache.dtype.element_ty), mask=mask)
    tl.store(at + size, v.to(kv_cache.dtype.element_ty), mask=mask)


@triton.jit
def attend_tile(
    q,
    kv_cache,
    size,
    blocks,
    head,
    first,
    last,
    seq_len,
    query_position,
    scale,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax of a tile of queries over keys ``first`` to ``last``: (sum of weighted values, sum, maximum)."""
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        exists = n < seq_len
        block = tl.load(blocks + n // BLOCK_SIZE, mask=exists, other=0)
        row = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + n % BLOCK_SIZE
        at = kv_cache + row.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        valid = exists[:, None] & in_head[None, :]
        k = tl.load(at, mask=valid, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = (n[None, :] <= query_position[:, None]) & exists[None, :]
        if WINDOW > 0:
            seen = seen & (n[None, :] > query_position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        v = tl.load(at + size, mask=valid, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(p, 1)
        most = new_most
    return acc, total, most


@triton.jit
def decode_kernel(
    query,
    kv_cache,
    block_table,
    seq_lens,
    table,
    partial,
    partial_lse,
    out,
    scale,
    query_stride,
    table_stride,
    num_blocks,
    NUM_SPLITS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a row, KV head and split: rows of ``QUERY_LEN`` queries each (decode, verify).

    It is not launched early as its neighbours are: the large share of each processor's memory that it takes for itself
    would be taken from the matrix products on either side (a step was 20% slower).
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    query_position = seq_len - QUERY_LEN + m // GROUP
    valid_m = m < QUERY_LEN * GROUP
    token = row * QUERY_LEN + m // GROUP
    head_q = head * GROUP + m % GROUP
    mask = valid_m[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = query + token.to(tl.int64)[:, None] * query_stride + head_q[:, None] * HEAD_DIM
    position = tl.maximum(query_position, 0).to(tl.int64)[:, None]
    q = rotated(q_at, table, position, dims[None, :], HEAD_DIM, ROPE, mask).to(kv_cache.dtype.element_ty)

    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(seq_len - QUERY_LEN - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(seq_len - lowest, BLOCK_N), NUM_SPLITS) * BLOCK_N
    first = lowest + split * share
    last = tl.minimum(first + share, seq_len)
    size = num_blocks.to(tl.int64) * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    acc, total, most = attend_tile(
        q, kv_cache, size, block_table + row.to(tl.int64) * table_stride, head, first, last, seq_len, query_position,
        scale, WINDOW, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    safe = tl.where(total > 0.0, total, 1.0)
    result = acc / safe[:, None]
    if NUM_SPLITS == 1:
        at = out + (token.to(tl.int64) * NUM_KV_HEADS * GROUP + head_q)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=mask)
    else:
        cell = ((row * NUM_KV_HEADS + head) * NUM_SPLITS + split) * BLOCK_M + m
        tl.store(partial + cell.to(tl.int64)[:, None] * PADDED_DIM + dims[None, :], result)
        tl.store(partial_lse + cell, tl.where(total > 0.0, most + tl.log2(safe), float("-inf")))


@triton.jit
def merge_kernel(
    partial,
    partial_lse,
    out,
    NUM_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row, KV head and tile row: the splits' results, weighted by their sums."""
    row, head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    split = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    cell = ((row * NUM_KV_HEADS + head) * NUM_SPLITS + split) * BLOCK_M + m
    exists = split < NUM_SPLITS
    lse = tl.load(partial_lse + cell, mask=exists, other=float("-inf"))
    most = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(most == float("-inf"), 0.0, most))
    parts = tl.load(partial + cell.to(tl.int64)[:, None] * PADDED_DIM + dims[None, :], mask=exists[:, None], other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    token, head_q = row * QUERY_LEN + m // GROUP, head * GROUP + m % GROUP
    at = out + (token.to(tl.int64) * NUM_KV_HEADS * GROUP + head_q) * HEAD_DIM + dims
    tl.store(at, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def long_rows_kernel(
    query,
    kv_cache,
    block_table,
    seq_lens,
    cu_seqlens_q,
    table,
    out,
    scale,
    query_stride,
    table_stride,
    num_blocks,
    first_row,
    num_rows,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a tile of some row's queries and KV head. Tiles are counted row by row, one spare for each row."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    tile, head = tl.program_id(0), tl.program_id(1)
    base = tl.load(cu_seqlens_q + first_row)
    # The row whose tiles hold this one: the last with (tokens before it) // QUERIES + (rows before it) <= tile.
    low, high = 0, num_rows
    while low < high:
        middle = (low + high) // 2
        before = (tl.load(cu_seqlens_q + first_row + middle) - base) // QUERIES + middle
        if before <= tile:
            low = middle + 1
        else:
            high = middle
    row = first_row + low - 1
    start = tl.load(cu_seqlens_q + row)
    query_len = tl.load(cu_seqlens_q + row + 1) - start
    first_query = (tile - ((start - base) // QUERIES + low - 1)) * QUERIES
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + row)
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    q_index = first_query + m // GROUP
    valid_m = (m < QUERIES * GROUP) & (q_index < query_len)
    query_position = seq_len - query_len + q_index
    token = start + q_index
    head_q = head * GROUP + m % GROUP
    mask = valid_m[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = query + token.to(tl.int64)[:, None] * query_stride + head_q[:, None] * HEAD_DIM
    position = tl.maximum(query_position, 0).to(tl.int64)[:, None]
    q = rotated(q_at, table, position, dims[None, :], HEAD_DIM, ROPE, mask).to(kv_cache.dtype.element_ty)

    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(seq_len - query_len + first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    last = tl.minimum(seq_len - query_len + first_query + QUERIES, seq_len)
    size = num_blocks.to(tl.int64) * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    acc, total, _ = attend_tile(
        q, kv_cache, size, block_table + row.to(tl.int64) * table_stride, head, lowest, last, seq_len, query_position,
        scale, WINDOW, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    at = out + (token.to(tl.int64) * NUM_KV_HEADS * GROUP + head_q)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotate_kernel(
    x,
    out,
    positions,
    table,
    x_stride,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """One program a token: all its heads, rotated, into a contiguous [num_tokens, heads, dim]."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    dims = tl.arange(0, PADDED_DIM)[None, :]
    mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    at = x + token * x_stride + heads * HEAD_DIM
    turned = rotated(at, table, tl.load(positions + token), dims, HEAD_DIM, True, mask)
    to = out + (token * NUM_HEADS + heads) * HEAD_DIM + dims
    tl.store(to, turned.to(out.dtype.element_ty), mask=mask)
