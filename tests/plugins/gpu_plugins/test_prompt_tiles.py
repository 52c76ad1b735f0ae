"""``prompts_kernel``, which no interpreter runs, on a Hopper GPU: against PyTorch in float32, over blocks with NaN past
their ends, programs taking tiles again and again."""

from dataclasses import dataclass
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


def run(case: Case) -> float:
    """The largest error, the kernel launched three times."""
    from mini_infer_plugins.triton_attention.prompt_tiles import find_prompt_tiles

    torch.manual_seed(0)
    dtype, size = getattr(torch, case.dtype), case.block_size
    lens = [sum(row) for row in case.rows]
    num_blocks = 1 + sum(-(-length // size) for length in lens)
    tables = block_tables(lens, size, num_blocks)
    cache = torch.randn(2, num_blocks, case.kv_heads, size, case.dim, device="cuda", dtype=dtype)
    for length, table in zip(lens, tables, strict=True):
        cache[:, table[-1], :, (length - 1) % size + 1 :] = torch.nan
    cache[:, 0] = torch.nan
    width = max(map(len, tables))
    padded = [table + [0] * (width - len(table)) for table in tables]
    rows = [(new, length) for (new, _), length in zip(case.rows, lens, strict=True)]
    batch = pack_batch(rows, padded, size, device="cuda")
    kind: Any = "full" if case.window is None else "sliding"
    spec = KVCacheSpec(kind, case.kv_heads, case.dim, case.dim, case.dtype, case.window)
    tiles = find_prompt_tiles(spec, "cuda:0", size)
    if tiles is None:
        pytest.skip("no Hopper")
    query = torch.randn(batch.shape.num_tokens, case.heads, case.dim, device="cuda", dtype=dtype)
    out = torch.full_like(query, 7.0)
    layer: Any = SimpleNamespace(kv_cache=cache, scale=case.dim**-0.5)
    for _ in range(3):
        tiles(layer, query, out, batch)
    assert tiles._counter.tolist() == [0, 0]
    return max(
        (out[start : start + new].float() - expected(case, query[start : start + new], cache, table, length))
        .abs()
        .max()
        for start, (new, length), table in zip(starts(batch), rows, tables, strict=True)
    ).item()


def starts(batch: ForwardBatch) -> list[int]:
    return [int(start) for start in batch.cu_seqlens_q.tolist()[:-1]]


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
