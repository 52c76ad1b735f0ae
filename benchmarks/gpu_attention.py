"""Decode and prefill attention alone: ours, FlashAttention-3 where a build of it is installed, PyTorch's for prefill.

Caches of over a gigabyte in turn, so that the L2 serves nothing; decode in CUDA graphs on every side.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

DECODE = ((1, 1024), (1, 4096), (1, 32_768), (8, 4096), (64, 1024), (64, 4096), (64, 16_384), (256, 1024), (256, 4096))
PREFILL = (1024, 8192)
HEADS, KV_HEADS, DIM, BLOCK = 28, 4, 128, 16
_TOTAL_BYTES = 1.2e9


def decode_cells() -> dict[str, dict[str, float]]:
    """Microseconds by cell and engine; ``limit`` is the time to read the keys and values at 4.3 TB/s."""
    import torch

    cells = {}
    for rows, length in DECODE:
        blocks = -(-length // BLOCK)
        layer_bytes = rows * blocks * BLOCK * KV_HEADS * DIM * 4
        layers = max(2, min(28, int(_TOTAL_BYTES // layer_bytes) + 1))
        shape = (2, rows * blocks + 1, KV_HEADS, BLOCK, DIM)
        caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
        table = (torch.randperm(rows * blocks, device="cuda") + 1).to(torch.int32).view(rows, blocks)
        query = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        lens = torch.full((rows,), length, device="cuda", dtype=torch.int32)
        cell = {"ours": graph_time(_ours(query, caches, table, lens, length)) / layers}
        flash = _flash(query, caches, table, lens, length)
        if flash is not None:
            cell["flash-attention-3"] = graph_time(flash) / layers
        cell["limit"] = rows * length * KV_HEADS * DIM * 4 / 4.3e6
        cells[f"{rows} x {length}"] = cell
    return cells


def prefill_cells() -> dict[str, dict[str, float]]:
    """Microseconds of one causal prompt by length and engine; ours is the Triton kernel, FlashAttention left out."""
    import torch
    import torch.nn.functional as F

    cells = {}
    for length in PREFILL:
        blocks = length // BLOCK
        cache = torch.randn(2, blocks + 1, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
        table = torch.arange(1, blocks + 1, device="cuda", dtype=torch.int32).view(1, -1)
        query = torch.randn(length, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        lens = torch.full((1,), length, device="cuda", dtype=torch.int32)
        key, value = torch.randn(2, 1, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
        turned = query.transpose(0, 1)[None].contiguous()
        cell = {"ours": event_time(_ours(query, [cache], table, lens, length, flash=False))}
        flash = _flash(query, [cache], table, lens, length)
        if flash is not None:
            cell["flash-attention-3"] = event_time(flash)
        cell["torch"] = event_time(
            lambda q=turned, k=key, v=value: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        )
        cells[f"prompt {length}"] = cell
    return cells


def _ours(query: Any, caches: Any, table: Any, lens: Any, length: int, *, flash: bool = True) -> Callable[[], Any]:
    import torch

    from mini_infer.forward_batch import ForwardBatch, StepShape
    from mini_infer.interfaces import BatchLimits, KVCacheSpec
    from mini_infer_plugins.triton_attention.paged_attention import TritonAttention

    rows, tokens = table.shape[0], query.shape[0]
    each = tokens // rows
    spec = KVCacheSpec(kind="full", num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=DIM, dtype="bfloat16")
    backend = TritonAttention(spec, "cuda:0", BLOCK)
    if not flash:
        backend._flash = None
    backend.buffers(BatchLimits(max(rows, 256), max(tokens, 256), table.shape[1], BLOCK))
    rope = torch.randn(length, 2, DIM, device="cuda")
    batch = ForwardBatch(
        shape=StepShape.of([each] * rows, each if each == 1 else 0),
        input_ids=lens,
        positions=torch.arange(length - each, length, device="cuda").repeat(rows),
        slot_mapping=lens,
        cu_seqlens_q=torch.arange(0, tokens + 1, each, device="cuda", dtype=torch.int32),
        seq_lens=lens,
        block_table=table,
        query_lens_host=[each] * rows,
        seq_lens_host=[length] * rows,
    )
    layers: list[Any] = [
        SimpleNamespace(kv_cache=cache, num_heads=HEADS, scale=DIM**-0.5, rotary=SimpleNamespace(table=rope))
        for cache in caches
    ]
    return lambda: [backend.attend(layer, query, batch) for layer in layers]


def _flash(query: Any, caches: Any, table: Any, lens: Any, length: int) -> Callable[[], Any] | None:
    import torch

    from mini_infer.interfaces import KVCacheSpec
    from mini_infer_plugins.triton_attention.flash import find_flash_attention

    spec = KVCacheSpec(kind="full", num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=DIM, dtype="bfloat16")
    attend = find_flash_attention(spec, "cuda:0")
    if attend is None:
        return None
    rows, tokens = table.shape[0], query.shape[0]
    cu_seqlens = torch.arange(0, tokens + 1, tokens // rows, device="cuda", dtype=torch.int32)
    pairs = [cache.transpose(2, 3) for cache in caches]
    out = torch.empty_like(query)

    def run() -> None:
        for keys, values in pairs:
            attend(
                query,
                keys,
                values,
                out,
                cu_seqlens_q=cu_seqlens,
                seq_lens=lens,
                max_query_len=tokens // rows,
                max_seq_len=length,
                block_table=table,
                scale=DIM**-0.5,
                window=-1,
            )

    return run


def graph_time(work: Callable[[], Any]) -> float:
    """Microseconds of one replay."""
    import torch

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return event_time(graph.replay)


def event_time(work: Callable[[], Any], repeats: int = 5) -> float:
    """Microseconds, best of three."""
    import torch

    work()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / repeats)
    return best * 1e3
