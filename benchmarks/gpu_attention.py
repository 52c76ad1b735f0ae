"""Decode and prefill attention alone: ours, FlashAttention-3 where a build of it is installed, PyTorch's for prefill.

CUDA graphs on every side. Decode reads caches of over a gigabyte in turn, so that the L2 serves nothing.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

DECODE = ((1, 1024), (1, 4096), (1, 32_768), (8, 4096), (64, 1024), (64, 4096), (64, 16_384), (256, 1024), (256, 4096))
RAGGED = ((35, 900, 1800), (64, 800, 1700), (86, 700, 1600), (118, 700, 1600), (193, 400, 1350), (256, 100, 1030))
"""Rows and their shortest and longest: what a batch of requests of 100 to 1,024 tokens in and out goes through."""

PREFILL = (1024, 8192)
TILINGS = [(keys, warps, stages) for keys in (16, 32, 64) for warps in (1, 2) for stages in (3, 5, 7)]
HEADS, KV_HEADS, DIM, BLOCK = 28, 4, 128, 16
_TOTAL_BYTES = 1.2e9
_PREFILLS = 8  # in one graph

Cell = tuple[str, dict[str, float]]


def cells(*, prefill: bool) -> Iterator[Cell]:
    """Name of a cell, and microseconds by engine; ``limit`` is the time to read keys and values at 4.3 TB/s."""
    for name, lens in _decode_rows():
        decode = Decode(lens)
        cell = {"ours": decode.ours()}
        flash = decode.flash()
        if flash is not None:
            cell["flash-attention-3"] = flash
        cell["limit"] = decode.limit
        yield name, cell
    if prefill:
        yield from _prefill_cells()


def tiling_cells() -> Iterator[Cell]:
    """Microseconds of a decode step by keys a step, warps and the compiler's stages; ``chosen`` is the backend's."""
    for name, lens in _decode_rows():
        decode = Decode(lens)
        cell = {"chosen": decode.ours()}
        for tiling in TILINGS:
            cell["/".join(map(str, tiling))] = decode.ours(tiling)
        yield name, cell


def _decode_rows() -> Iterator[tuple[str, list[int]]]:
    for rows, length in DECODE:
        yield f"{rows} x {length}", [length] * rows
    for rows, shortest, longest in RAGGED:
        rng = random.Random(rows)
        yield f"{rows} of {shortest}-{longest}", [rng.randint(shortest, longest) for _ in range(rows)]


class Decode:
    """Rows of one query each over several layers' caches.

    Args:
        lens: of the rows, their new token counted.
    """

    def __init__(self, lens: Sequence[int]) -> None:
        import torch

        self._lens = list(lens)
        self._table, num_blocks = _scattered(lens)
        layer_bytes = num_blocks * BLOCK * KV_HEADS * DIM * 4
        count = max(2, min(28, int(_TOTAL_BYTES // layer_bytes) + 1))
        shape = (2, num_blocks + 1, KV_HEADS, BLOCK, DIM)
        self._caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        self._query = torch.randn(len(lens), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.limit = sum(lens) * KV_HEADS * DIM * 4 / 4.3e6

    def ours(self, tiling: tuple[int, int, int] | None = None) -> float:
        """Microseconds a layer, in a tiling of one's own."""
        return graph_time(_ours(self._query, self._caches, self._table, self._lens, tiling=tiling)) / len(self._caches)

    def flash(self) -> float | None:
        """The same of FlashAttention-3."""
        work = _flash(self._query, self._caches, self._table, self._lens)
        return None if work is None else graph_time(work) / len(self._caches)


def _scattered(lens: Sequence[int]) -> tuple[Any, int]:
    """A block table whose blocks lie anywhere, and their number."""
    import torch

    counts = [-(-length // BLOCK) for length in lens]
    blocks = (torch.randperm(sum(counts), device="cuda") + 1).to(torch.int32).split(counts)
    return torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True), sum(counts)


def _prefill_cells() -> Iterator[Cell]:
    """One causal prompt over its blocks; ours is our own kernel, FlashAttention left out."""
    import torch
    import torch.nn.functional as F

    for length in PREFILL:
        blocks = length // BLOCK
        cache = torch.randn(2, blocks + 1, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
        table = torch.arange(1, blocks + 1, device="cuda", dtype=torch.int32).view(1, -1)
        query = torch.randn(length, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        key, value = torch.randn(2, 1, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
        turned = query.transpose(0, 1)[None].contiguous()
        times = [cache] * _PREFILLS
        cell = {"ours": graph_time(_ours(query, times, table, [length], flash=False)) / _PREFILLS}
        flash = _flash(query, times, table, [length])
        if flash is not None:
            cell["flash-attention-3"] = graph_time(flash) / _PREFILLS

        def torchs(q: Any = turned, k: Any = key, v: Any = value) -> Any:
            return [F.scaled_dot_product_attention(q, k, v, is_causal=True) for _ in range(_PREFILLS)]

        cell["torch"] = graph_time(torchs) / _PREFILLS
        yield f"prompt {length}", cell


def _ours(
    query: Any,
    caches: Any,
    table: Any,
    lens: Sequence[int],
    *,
    flash: bool = True,
    tiling: tuple[int, int, int] | None = None,
) -> Callable[[], Any]:
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
    if tiling is not None:
        backend._tiling = lambda programs: tiling  # type: ignore[method-assign]
    backend.buffers(BatchLimits(max(rows, 256), max(tokens, 256), table.shape[1], BLOCK))
    rope = torch.randn(max(lens), 2, DIM, device="cuda")
    seq_lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
    batch = ForwardBatch(
        shape=StepShape.of([each] * rows, each if each == 1 else 0),
        input_ids=seq_lens,
        positions=torch.cat([torch.arange(length - each, length, device="cuda") for length in lens]),
        slot_mapping=seq_lens,
        cu_seqlens_q=torch.arange(0, tokens + 1, each, device="cuda", dtype=torch.int32),
        seq_lens=seq_lens,
        block_table=table,
        query_lens_host=[each] * rows,
        seq_lens_host=list(lens),
    )
    layers: list[Any] = [
        SimpleNamespace(kv_cache=cache, num_heads=HEADS, scale=DIM**-0.5, rotary=SimpleNamespace(table=rope))
        for cache in caches
    ]
    backend.prepare(batch)
    return lambda: [backend.attend(layer, query, batch) for layer in layers]


def _flash(query: Any, caches: Any, table: Any, lens: Sequence[int]) -> Callable[[], Any] | None:
    import torch

    from mini_infer.flash_attention import find_flash_attention
    from mini_infer.interfaces import KVCacheSpec

    spec = KVCacheSpec(kind="full", num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=DIM, dtype="bfloat16")
    attend = find_flash_attention(spec, "cuda:0")
    if attend is None:
        return None
    rows, tokens = table.shape[0], query.shape[0]
    cu_seqlens = torch.arange(0, tokens + 1, tokens // rows, device="cuda", dtype=torch.int32)
    seq_lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
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
                seq_lens=seq_lens,
                max_query_len=tokens // rows,
                max_seq_len=max(lens),
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
