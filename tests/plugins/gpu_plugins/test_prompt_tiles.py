"""``prompts_kernel``, which no interpreter runs, on a Hopper GPU: against PyTorch in float32, over blocks with NaN past
their ends, programs taking tiles again and again."""

from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mini_infer.forward_batch import ForwardBatch
from mini_infer.interfaces import KVCacheSpec
from mini_infer.testing.batches import block_tables, pack_batch

pytestmark = pytest.mark.gpu
TOLERANCE = 2e-2  # bfloat16 outputs of numbers of standard deviation 1


@dataclass
class Case:
    """Rows of (tokens in this step, tokens before)."""

    rows: list[tuple[int, int]]
    heads: int = 28
    kv_heads: int = 4
    dim: int = 128
    block_size: int = 16
    window: int | None = None
    dtype: str = "bfloat16"


class Rows:
    """A case's numbers on the card, and the kernel over them."""

    def __init__(self, case: Case) -> None:
        from mini_infer_plugins.triton_attention.prompt_tiles import find_prompt_tiles

        torch.manual_seed(0)
        self.case = case
        size, self.lens = case.block_size, [sum(row) for row in case.rows]
        num_blocks = 1 + sum(-(-length // size) for length in self.lens)
        self.tables = block_tables(self.lens, size, num_blocks)
        shape = (2, num_blocks, case.kv_heads, size, case.dim)
        self.cache = torch.randn(shape, device="cuda", dtype=getattr(torch, case.dtype))
        for length, table in zip(self.lens, self.tables, strict=True):
            self.cache[:, table[-1], :, (length - 1) % size + 1 :] = torch.nan
        self.cache[:, 0] = torch.nan
        kind: Any = "full" if case.window is None else "sliding"
        spec = KVCacheSpec(kind, case.kv_heads, case.dim, case.dim, case.dtype, case.window)
        found = find_prompt_tiles(spec, "cuda:0", size)
        if found is None:
            pytest.skip("no Hopper")
        self.tiles = found

    def batch(self, num_padding_tokens: int = 0) -> ForwardBatch:
        width = max(map(len, self.tables))
        padded = [table + [0] * (width - len(table)) for table in self.tables]
        rows = [(new, length) for (new, _), length in zip(self.case.rows, self.lens, strict=True)]
        if num_padding_tokens:
            rows.append((num_padding_tokens, num_padding_tokens))
            padded.append([0] * width)
        return pack_batch(rows, padded, self.case.block_size, device="cuda")

    def numbers(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (batch.shape.num_tokens, self.case.heads, self.case.dim)
        query = torch.randn(shape, device="cuda", dtype=self.cache.dtype)
        return query, torch.full_like(query, 7.0)

    def attend(self, query: torch.Tensor, out: torch.Tensor, batch: ForwardBatch) -> None:
        layer: Any = SimpleNamespace(kv_cache=self.cache, scale=self.case.dim**-0.5)
        self.tiles(layer, query, out, batch)

    def error(self, query: torch.Tensor, out: torch.Tensor) -> float:
        worst, start = 0.0, 0
        for (new, _), table, length in zip(self.case.rows, self.tables, self.lens, strict=True):
            asked = expected(self.case, query[start : start + new], self.cache, table, length)
            worst = max(worst, (out[start : start + new].float() - asked).abs().max().item())
            start += new
        return worst


def run(case: Case) -> float:
    """The largest error, the kernel launched three times."""
    rows = Rows(case)
    batch = rows.batch()
    query, out = rows.numbers(batch)
    rows.tiles.prepare(batch.shape)
    for _ in range(3):
        rows.attend(query, out, batch)
    assert rows.tiles._counter.tolist() == [0, 0]
    return rows.error(query, out)


def expected(case: Case, query: torch.Tensor, cache: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
    """[tokens, heads, dim] of one row."""
    pairs = cache[:, table].permute(0, 1, 3, 2, 4).flatten(1, 2)[:, :length].float()
    keys, values = pairs.transpose(1, 2).repeat_interleave(case.heads // case.kv_heads, 1)
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * case.dim**-0.5
    position = torch.arange(length - len(query), length, device="cuda")[:, None]
    key = torch.arange(length, device="cuda")
    seen = key <= position
    if case.window is not None:
        seen &= key > position - case.window
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1)


SHAPES: dict[str, list[tuple[int, int]]] = {
    "a prompt": [(1024, 0)],
    "a short prompt": [(5, 0)],
    "prompts": [(1, 0), (5, 0), (130, 0), (128, 0), (64, 0), (300, 0), (1000, 0), (7, 0)],
    "chunks": [(300, 700), (500, 1300), (128, 128)],
    "decodes and a chunk": [(1, before) for before in (300, 17, 0, 127, 128, 129, 2000)] + [(505, 3000), (30, 15)],
}


@pytest.mark.parametrize("window", [None, 100, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_windows(shape: str, window: int | None) -> None:
    assert run(Case(SHAPES[shape], window=window)) < TOLERANCE


@pytest.mark.parametrize(
    "more",
    [
        {"block_size": 32},
        {"block_size": 64},
        {"block_size": 128},
        {"heads": 12, "kv_heads": 2, "dim": 64},
        {"heads": 8, "kv_heads": 8, "dtype": "float16"},
        {"heads": 64, "kv_heads": 1},
    ],
    ids=str,
)
def test_blocks_heads_and_dtypes(more: dict[str, Any]) -> None:
    assert run(Case([(1, 700), (1, 1300), (300, 50), (77, 128)], **more)) < TOLERANCE


@pytest.mark.parametrize("seed", range(10))
def test_random_rows(seed: int) -> None:
    rng = Random(seed)
    decodes, prompts = rng.randint(0, 30), rng.randint(1, 20)
    rows = [(1, rng.choice([0, 1, 15, 127, rng.randint(0, 900)])) for _ in range(decodes)]
    rows += [
        (rng.choice([2, 100, 127, 128, 129, rng.randint(2, 700)]), rng.choice([0, 0, 15, 300])) for _ in range(prompts)
    ]
    assert run(Case(rows)) < TOLERANCE


def test_a_graph_serves_other_rows_of_as_many_tokens() -> None:
    """Captured over one prompt, replayed over others, and over rows that end with padding on the null block."""
    rows = Rows(Case([(1, 30), (1, 900), (200, 10), (150, 0)]))
    batch = rows.batch(num_padding_tokens=160)
    query, out = rows.numbers(batch)
    alone = pack_batch([(512, 512)], [[0] * 32], 16, device="cuda")
    fields = ("cu_seqlens_q", "seq_lens", "block_table")
    width = max(alone.block_table.shape[1], batch.block_table.shape[1])
    sizes: dict[str, tuple[int, ...]] = {"cu_seqlens_q": (9,), "seq_lens": (8,), "block_table": (8, width)}
    fixed = {name: torch.zeros(sizes[name], dtype=torch.int32, device="cuda") for name in fields}

    def put(made: ForwardBatch) -> ForwardBatch:
        for name in fields:
            found = getattr(made, name)
            fixed[name][tuple(map(slice, found.shape))] = found
        return replace(made, **fixed)

    captured = put(alone)
    rows.tiles.prepare(alone.shape)
    rows.attend(query, out, captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.attend(query, out, captured)
    put(batch)
    rows.tiles.prepare(batch.shape)
    graph.replay()
    assert rows.error(query, out) < TOLERANCE
