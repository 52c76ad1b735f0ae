"""Attention of steps with prompts on Hopper: one warp fetches, two groups of four warps multiply (16 bits, Gluon).

As FlashAttention-3 does it (Shah et al., arXiv 2407.08608), over blocks of any size. A *tile* is 128 rows of queries
against all keys that they see, from the last on, ``BLOCK_N`` keys a step::

    prompt rows    128 consecutive queries of one query head          decode rows    all query heads of one KV head

    fetch    | next tile | queries | keys, values | keys, values | ...              | next tile | queries | keys ...
    attend   |                     | scores 0 | scores 1, softmax 0 | values 0 ...       | values n | store |
                                     (two groups, 64 rows each, take turns)

Contract: programs take tiles from a counter, which the last one sets back to zero; tiles that begin with the longest
rows are taken first. Keys and values behind a row's end may hold anything: keys are masked, values put to zero.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TILE = gl.constexpr(128)
HALF = gl.constexpr(64)  # of a tile's rows, one group's; and of a row's bytes, what one swizzled copy takes
BLOCK_N = gl.constexpr(128)  # keys a step
STAGES = gl.constexpr(2)  # steps on their way
ABOUT = gl.constexpr(8)  # numbers that ``attend`` wants to know of a tile


@triton.jit(do_not_specialize=["decode_rows", "rows", "tiles"])
def step_sizes_kernel(step_sizes, decode_rows, rows, tiles):
    """One program: the numbers that ``prompts_kernel`` reads."""
    tl.store(step_sizes, decode_rows)
    tl.store(step_sizes + 1, rows)
    tl.store(step_sizes + 2, tiles)


@gluon.jit
def tell(about, index: gl.constexpr, value):
    """``fetch`` writes one of a tile's numbers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    about.slice(index, 1).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def told(about, index: gl.constexpr):
    """``attend`` reads it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(about.slice(index, 1).load(layout), 0)


@gluon.jit
def find_pages(table, first, last, PAGES: gl.constexpr):
    """The blocks of a step's keys; behind the row's last one that one again."""
    found = (gl.load(table + gl.minimum(first, last)),)
    for page in gl.static_range(1, PAGES):
        found = found + (gl.load(table + gl.minimum(first + page, last)),)  # noqa: RUF005 (Gluon)
    return found


@gluon.jit
def copy_in(
    pages,
    smem,
    ready,
    found,
    head,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PAGES: gl.constexpr,
):
    """A step's keys of a head, or its values: block by block, and by what one swizzled copy takes."""
    mbarrier.expect(ready, BLOCK_N * HEAD_DIM * 2)
    for page in gl.static_range(PAGES):
        for part in gl.static_range(HEAD_DIM // HALF):
            to = smem.slice(page * BLOCK_SIZE, BLOCK_SIZE, 0).slice(part * HALF, HALF, 1)
            at = [(found[page] * KV_HEADS + head) * BLOCK_SIZE, part * HALF]
            tma.async_copy_global_to_shared(pages, at, ready, to)


@gluon.jit
def fetch(
    queries,
    rows,
    pages,
    smem,
    block_table,
    seq_lens,
    cu_seqlens_q,
    counter,
    sizes,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """One warp: takes tiles, says what they are, and copies queries, keys and values in."""
    q_smem, k_smem, v_smem, about, about_ready, about_free, q_ready, q_free, k_ready, k_free, v_ready, v_free = smem
    table_stride, num_blocks, step_sizes = sizes
    num_decode_rows, num_rows = gl.load(step_sizes), gl.load(step_sizes + 1)
    prompt_tiles = gl.load(step_sizes + 2)
    GROUP: gl.constexpr = HEADS // KV_HEADS
    PAGES: gl.constexpr = BLOCK_N // BLOCK_SIZE
    values = num_blocks * KV_HEADS  # heads' blocks before the first of values
    taken = 0
    step = 0
    tile = gl.atomic_add(counter, 1)
    while tile < prompt_tiles * HEADS + num_decode_rows * KV_HEADS:
        packed = tile >= prompt_tiles * HEADS
        decode = tile - prompt_tiles * HEADS
        row = decode // KV_HEADS
        kv_head = decode % KV_HEADS
        head = kv_head * GROUP
        first_query = 0
        if not packed:
            head = tile % HEADS
            kv_head = head // GROUP
            place = prompt_tiles - 1 - tile // HEADS
            base = gl.load(cu_seqlens_q + num_decode_rows)
            # The row whose tiles hold this one: the last with (tokens before it) // TILE + (rows before it) <= place.
            low = num_decode_rows
            high = num_rows
            while low < high:
                middle = (low + high) // 2
                before = (gl.load(cu_seqlens_q + middle) - base) // TILE + middle - num_decode_rows
                if before <= place:
                    low = middle + 1
                else:
                    high = middle
            row = low - 1
            first_query = (place - ((gl.load(cu_seqlens_q + row) - base) // TILE + row - num_decode_rows)) * TILE
        start = gl.load(cu_seqlens_q + row)
        query_len = gl.load(cu_seqlens_q + row + 1) - start
        seq_len = gl.load(seq_lens + row)
        position = seq_len - query_len + first_query
        last = gl.minimum(position + TILE, seq_len)
        valid = gl.minimum(query_len - first_query, TILE)
        if packed:
            valid = GROUP
        first_block = 0
        if WINDOW > 0:
            first_block = gl.maximum(position - WINDOW + 1, 0) // BLOCK_N
        last_block = (last + BLOCK_N - 1) // BLOCK_N
        if (valid > 0) & (last > 0):
            slot = taken % 2
            mbarrier.wait(about_free.index(slot), taken // 2 & 1 ^ 1)
            note = about.index(slot)
            tell(note, 0, last_block - first_block)
            tell(note, 1, last_block)
            tell(note, 2, position)
            tell(note, 3, packed.to(gl.int32))
            tell(note, 4, valid)
            tell(note, 5, seq_len)
            tell(note, 6, start + first_query)
            tell(note, 7, head)
            mbarrier.arrive(about_ready.index(slot), count=1)
            mbarrier.wait(q_free, taken & 1 ^ 1)
            mbarrier.expect(q_ready, TILE * HEAD_DIM * 2)
            for half in gl.static_range(2):
                if packed:
                    at = [start * HEADS + head + half * HALF, 0]
                    tma.async_copy_global_to_shared(rows, at, q_ready, q_smem.index(half))
                else:
                    at = [start + first_query + half * HALF, head * HEAD_DIM]
                    tma.async_copy_global_to_shared(queries, at, q_ready, q_smem.index(half))
            table = block_table + row.to(gl.int64) * table_stride
            last_page = (seq_len - 1) // BLOCK_SIZE
            found = find_pages(table, (last_block - 1) * PAGES, last_page, PAGES)
            stage, phase = step % STAGES, step // STAGES & 1 ^ 1
            mbarrier.wait(k_free.index(stage), phase)
            copy_in(
                pages, k_smem.index(stage), k_ready.index(stage), found, kv_head,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, PAGES,
            )  # fmt: skip
            for j in range(1, last_block - first_block):
                # In the order in which they are wanted: the next keys, then these values.
                following = find_pages(table, (last_block - 1 - j) * PAGES, last_page, PAGES)
                before, before_phase = step % STAGES, step // STAGES & 1 ^ 1
                step += 1
                stage, phase = step % STAGES, step // STAGES & 1 ^ 1
                mbarrier.wait(k_free.index(stage), phase)
                copy_in(
                    pages, k_smem.index(stage), k_ready.index(stage), following, kv_head,
                    KV_HEADS, HEAD_DIM, BLOCK_SIZE, PAGES,
                )  # fmt: skip
                mbarrier.wait(v_free.index(before), before_phase)
                copy_in(
                    pages, v_smem.index(before), v_ready.index(before), found, values + kv_head,
                    KV_HEADS, HEAD_DIM, BLOCK_SIZE, PAGES,
                )  # fmt: skip
                found = following
            stage, phase = step % STAGES, step // STAGES & 1 ^ 1
            mbarrier.wait(v_free.index(stage), phase)
            copy_in(
                pages, v_smem.index(stage), v_ready.index(stage), found, values + kv_head,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, PAGES,
            )  # fmt: skip
            step += 1
            taken += 1
        tile = gl.atomic_add(counter, 1)
    mbarrier.wait(about_free.index(taken % 2), taken // 2 & 1 ^ 1)
    tell(about.index(taken % 2), 0, 0)
    mbarrier.arrive(about_ready.index(taken % 2), count=1)
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:  # nobody takes a tile any more
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def masked(scores, block, first_position, positions, WINDOW: gl.constexpr):
    """-inf where a query does not see a key; most blocks are seen by all."""
    edge = (block + 1) * BLOCK_N > first_position + 1
    if WINDOW > 0:
        edge = edge | (block * BLOCK_N <= first_position + HALF - WINDOW)
    if edge:
        key = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
        seen = key[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > positions[:, None] - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def attend(
    INDEX: gl.constexpr,
    smem,
    turns,
    cleaned,
    out,
    scale,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Four warps: half a tile's rows. The groups take turns, so that one multiplies while the other exponentiates."""
    q_smem, k_smem, v_smem, about, about_ready, about_free, q_ready, q_free, k_ready, k_free, v_ready, v_free = smem
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ANSWER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ANSWER, k_width=2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    mine: gl.constexpr = gl.SliceLayout(1, SCORES)
    dtype: gl.constexpr = out.dtype.element_ty
    q = q_smem.index(INDEX)
    nothing = gl.zeros([HALF, BLOCK_N], gl.float32, SCORES)
    taken = 0
    step = 0
    cleanings = 0
    mbarrier.wait(about_ready.index(0), 0)
    num_steps = told(about.index(0), 0)
    while num_steps > 0:
        note = about.index(taken % 2)
        block = told(note, 1) - 1
        packed = told(note, 3)
        position = told(note, 2)
        valid = told(note, 4)
        seq_len = told(note, 5)
        token = told(note, 6)
        head = told(note, 7)
        mbarrier.arrive(about_free.index(taken % 2), count=1)
        first_position = position + (1 - packed) * INDEX * HALF
        positions = first_position + (1 - packed) * gl.arange(0, HALF, mine)

        mbarrier.wait(q_ready, taken & 1)
        mbarrier.wait(k_ready.index(step % STAGES), step // STAGES & 1)
        mbarrier.wait(turns.index(INDEX), step & 1)
        s = warpgroup_mma(q, k_smem.index(step % STAGES).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.arrive(turns.index(1 - INDEX), count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(step % STAGES), count=1)
        s = masked(s, block, first_position, positions, WINDOW)
        most = gl.max(s, 1)
        base = gl.where(most == float("-inf"), 0.0, most * scale)
        p = gl.exp2(s * scale - base[:, None])
        total = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(dtype), WEIGHTS)
        acc = gl.zeros([HALF, HEAD_DIM], gl.float32, ANSWER)
        if (block + 1) * BLOCK_N > seq_len:
            half = v_smem.index(step % STAGES).slice(INDEX * BLOCK_N // 2, BLOCK_N // 2, 0)
            key = block * BLOCK_N + INDEX * BLOCK_N // 2 + gl.arange(0, BLOCK_N // 2, gl.SliceLayout(1, WIDE))
            mbarrier.wait(v_ready.index(step % STAGES), step // STAGES & 1)
            values = half.load(WIDE)
            half.store(gl.where((key < seq_len)[:, None], values, gl.zeros_like(values)))
            fence_async_shared()
            mbarrier.arrive(cleaned, count=1)
            mbarrier.wait(cleaned, cleanings & 1)
            cleanings += 1
        for _ in range(1, num_steps):
            before = step % STAGES
            before_phase = step // STAGES & 1
            step += 1
            block -= 1
            mbarrier.wait(k_ready.index(step % STAGES), step // STAGES & 1)
            mbarrier.wait(turns.index(INDEX), step & 1)
            s = warpgroup_mma(q, k_smem.index(step % STAGES).permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(before), before_phase)
            acc = warpgroup_mma(weights, v_smem.index(before), acc, is_async=True)
            mbarrier.arrive(turns.index(1 - INDEX), count=1)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_free.index(step % STAGES), count=1)
            s = masked(s, block, first_position, positions, WINDOW)
            higher = gl.maximum(most, gl.max(s, 1))
            base = gl.where(higher == float("-inf"), 0.0, higher * scale)
            shrink = gl.exp2(most * scale - base)
            most = higher
            p = gl.exp2(s * scale - base[:, None])
            total = total * shrink + gl.sum(p, 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(before), count=1)
            weights = gl.convert_layout(p.to(dtype), WEIGHTS)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ANSWER))[:, None]
        mbarrier.arrive(q_free, count=1)
        mbarrier.wait(v_ready.index(step % STAGES), step // STAGES & 1)
        acc = warpgroup_mma(weights, v_smem.index(step % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(step % STAGES), count=1)
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, ANSWER))[:, None]
        result = gl.convert_layout(acc.to(dtype), WIDE)
        m = INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(1, WIDE))
        dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, WIDE))
        row_stride = packed + (1 - packed) * HEADS
        at = (token * HEADS + head).to(gl.int64) + m * row_stride
        gl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result, mask=(m < valid)[:, None])
        step += 1
        taken += 1
        mbarrier.wait(about_ready.index(taken % 2), taken // 2 & 1)
        num_steps = told(about.index(taken % 2), 0)


@gluon.jit(do_not_specialize=["num_blocks", "table_stride"])
def prompts_kernel(
    queries,
    rows,
    pages,
    out,
    block_table,
    seq_lens,
    cu_seqlens_q,
    counter,
    scale,
    step_sizes,
    table_stride,
    num_blocks,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """As many programs as processors. What depends on the step's rows is read on the device, for graphs of any rows.

    ``queries`` describes tiles [HALF, HEAD_DIM] of [num_tokens, HEADS * HEAD_DIM], ``rows`` the same of [num_tokens *
    HEADS, HEAD_DIM], ``pages`` tiles [BLOCK_SIZE, HALF] of the cache as [2 * num_blocks * KV_HEADS * BLOCK_SIZE,
    HEAD_DIM]. ``step_sizes`` is [decode rows of one query each, which come first; all rows; prompts' tokens // TILE +
    their rows].
    """
    dtype: gl.constexpr = out.dtype.element_ty
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, HALF, HEAD_DIM], queries.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    about = gl.allocate_shared_memory(gl.int32, [2, ABOUT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    about_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    about_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_free = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    cleaned = gl.allocate_shared_memory(gl.int64, [1], barrier)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    mbarrier.init(cleaned, count=2)
    for i in gl.static_range(2):
        mbarrier.init(about_ready.index(i), count=1)
        mbarrier.init(about_free.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    mbarrier.arrive(turns.index(0), count=1)
    smem = (
        q_smem, k_smem, v_smem, about, about_ready, about_free, q_ready, q_free, k_ready, k_free, v_ready, v_free,
    )  # fmt: skip
    sizes = (table_stride, num_blocks, step_sizes)
    gl.warp_specialize(
        [
            (attend, (0, smem, turns, cleaned, out, scale, HEADS, HEAD_DIM, WINDOW)),
            (attend, (1, smem, turns, cleaned, out, scale, HEADS, HEAD_DIM, WINDOW)),
            (
                fetch,
                (
                    queries, rows, pages, smem, block_table, seq_lens, cu_seqlens_q, counter, sizes,
                    HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
