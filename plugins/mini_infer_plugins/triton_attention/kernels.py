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
def written(
    key,
    value,
    kv_cache,
    num_blocks,
    slot,
    head,
    table,
    position,
    dims,
    mask,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Write a token's key, rotated, and value into the cache and return both as the cache has them.

    Of one head, or of a tile of heads [heads, 1] with ``dims`` [1, dims]; ``key`` and ``value`` point to the token.
    """
    k = rotated(key + head * HEAD_DIM, table, position, dims, HEAD_DIM, ROPE, mask).to(kv_cache.dtype.element_ty)
    v = tl.load(value + head * HEAD_DIM + dims, mask=mask, other=0.0).to(kv_cache.dtype.element_ty)
    place = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    at = kv_cache + place.to(tl.int64) * HEAD_DIM + dims
    tl.store(at, k, mask=mask)
    tl.store(at + num_blocks.to(tl.int64) * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, v, mask=mask)
    return k, v


@triton.jit(do_not_specialize=["num_blocks"])  # a 1 would have no type
def write_kv_kernel(
    query,
    key,
    value,
    kv_cache,
    slot_mapping,
    positions,
    table,
    rotated_query,
    kept_key,
    kept_value,
    query_stride,
    key_stride,
    value_stride,
    num_blocks,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    KEEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token: its keys, rotated, and values into the cache, its queries, rotated, into ``rotated_query``.

    With ``KEEPS`` keys and values go to ``kept_key`` and ``kept_value`` too; all are contiguous [num_tokens, heads,
    head_dim]. What multiplies whole tiles of these meets values of the next prompt, weighted with zero, which for a
    value that is not finite is not zero: such a value is kept as 0, and its key as NaN, so that its own prompt is
    spoilt and no other. With PDL the kernel starts while the one before it ends.
    """
    token = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slot_mapping + token), tl.load(positions + token)
    dims = tl.arange(0, PADDED_DIM)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if ROPE:
        head = tl.arange(0, PADDED_HEADS)[:, None]
        mask = (head < NUM_HEADS) & (dims < HEAD_DIM)
        q = rotated(query + token * query_stride + head * HEAD_DIM, table, position, dims, HEAD_DIM, True, mask)
        at = rotated_query + (token * NUM_HEADS + head) * HEAD_DIM + dims
        tl.store(at, q.to(rotated_query.dtype.element_ty), mask=mask)
    head = tl.arange(0, PADDED_KV_HEADS)[:, None]
    mask = (head < NUM_KV_HEADS) & (dims < HEAD_DIM)
    k, v = written(
        key + token * key_stride, value + token * value_stride, kv_cache, num_blocks, slot, head, table, position,
        dims, mask, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, ROPE,
    )  # fmt: skip
    if KEEPS:
        finite = tl.abs(v.to(tl.float32)) < float("inf")
        spoilt = tl.min(finite.to(tl.int32), 1)[:, None] == 0
        at = (token * NUM_KV_HEADS + head) * HEAD_DIM + dims
        tl.store(kept_key + at, tl.where(spoilt, float("nan"), k).to(k.dtype), mask=mask)
        tl.store(kept_value + at, tl.where(finite, v, 0.0).to(v.dtype), mask=mask)


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
    acc,
    total,
    most,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax of a tile of queries over cached keys ``first`` to ``last``, going on from a state.

    The state is (sum of weighted values, sum of weights, maximum of scores); keys from ``seq_len`` on do not exist.
    """
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
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


@triton.jit(do_not_specialize=["num_rows"])
def longest_first_kernel(seq_lens, order, num_rows, BLOCK: tl.constexpr, PADDED_ROWS: tl.constexpr):
    """Row indices by falling length, each row's place counted: what takes long must not begin last."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    all_rows = tl.arange(0, PADDED_ROWS)
    length = tl.load(seq_lens + mine, mask=mine < num_rows, other=0)[:, None]
    lengths = tl.load(seq_lens + all_rows, mask=all_rows < num_rows, other=-1)[None, :]
    before = (lengths > length) | ((lengths == length) & (all_rows[None, :] < mine[:, None]))
    tl.store(order + tl.sum(before.to(tl.int32), 1), mine, mask=mine < num_rows)


@triton.jit(do_not_specialize=["num_blocks"])  # a 1 would have no type
def decode_kernel(
    query,
    key,
    value,
    kv_cache,
    slot_mapping,
    block_table,
    seq_lens,
    order,
    table,
    partial,
    partial_lse,
    out,
    scale,
    query_stride,
    key_stride,
    value_stride,
    table_stride,
    num_blocks,
    NUM_SPLITS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    WRITES: tl.constexpr,
    ORDERED: tl.constexpr,
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

    Rows are taken as they come, or (``ORDERED``) as ``longest_first_kernel`` has ordered them.

    With ``WRITES`` (rows of one query) the row's new key and value are not in the cache yet: the first split's program
    writes them there and begins its softmax with them; all programs read what was there before. ``ROPE`` is theirs and
    the query's, which comes rotated otherwise.

    It is not launched early as its neighbours are: the large share of each processor's memory that it takes for itself
    would be taken from the matrix products on either side (a step was 20% slower).
    """
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ORDERED:
        row = tl.load(order + row)
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

    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    size = num_blocks.to(tl.int64) * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if WRITES:
        if split == 0:
            k, v = written(
                key + row.to(tl.int64) * key_stride, value + row.to(tl.int64) * value_stride, kv_cache, num_blocks,
                tl.load(slot_mapping + row), head, table, tl.maximum(seq_len - 1, 0).to(tl.int64), dims,
                dims < HEAD_DIM, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, ROPE,
            )  # fmt: skip
            most = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
            total = tl.full([BLOCK_M], 1.0, tl.float32)
            acc = acc + v.to(tl.float32)[None, :]
        seq_len = seq_len - 1
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(seq_len - (QUERY_LEN - WRITES) - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(seq_len - lowest, BLOCK_N), NUM_SPLITS) * BLOCK_N
    first = lowest + split * share
    last = tl.minimum(first + share, seq_len)
    acc, total, most = attend_tile(
        q, kv_cache, size, block_table + row.to(tl.int64) * table_stride, head, first, last, seq_len, query_position,
        scale, acc, total, most, WINDOW, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, PRECISION,
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


@triton.jit(do_not_specialize=["num_blocks", "first_row", "num_rows"])  # else some steps would wait for a compiler
def long_rows_kernel(
    query,
    kv_cache,
    block_table,
    seq_lens,
    cu_seqlens_q,
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
    q = tl.load(q_at + dims[None, :], mask=mask, other=0.0)

    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(seq_len - query_len + first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    last = tl.minimum(seq_len - query_len + first_query + QUERIES, seq_len)
    size = num_blocks.to(tl.int64) * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    acc, total, _ = attend_tile(
        q, kv_cache, size, block_table + row.to(tl.int64) * table_stride, head, lowest, last, seq_len, query_position,
        scale, acc, total, most, WINDOW, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, PRECISION,
    )  # fmt: skip
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    at = out + (token.to(tl.int64) * NUM_KV_HEADS * GROUP + head_q)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)
