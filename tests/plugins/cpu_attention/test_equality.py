"""CpuAttention against the core's reference and against a dense computation that knows nothing of blocks."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from mini_infer.forward_batch import ForwardBatch, StepShape
from mini_infer.interfaces import AttentionBackend, KVCacheSpec
from mini_infer.layers import Attention, RotaryEmbedding
from mini_infer.reference.attention import ReferenceAttention
from mini_infer_plugins.cpu_attention.native import native_build
from mini_infer_plugins.cpu_attention.paged_attention import CpuAttention

MODULE = "mini_infer_plugins.cpu_attention.paged_attention"
MAX_LEN = 512
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


class _NeverBuilt:
    library = None
    status = "never built"
    failed = False

    def start(self) -> None:
        return


@pytest.fixture(params=["native", "plain", "mixed"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All rows in native.cpp, all through PyTorch, or long rows through PyTorch."""
    if request.param == "plain":
        monkeypatch.setattr(f"{MODULE}.native_build", _NeverBuilt)
        return "plain"
    build = native_build()
    build.start()
    build.wait()
    if build.failed:
        pytest.skip(build.status)
    longest = 4 if request.param == "mixed" else MAX_LEN
    monkeypatch.setattr(f"{MODULE}.longest_native_query", lambda dtype: longest)
    return str(request.param)


@dataclass
class Row:
    keys: torch.Tensor  # [seq_len, num_kv_heads, head_dim]
    values: torch.Tensor
    query_len: int


@dataclass
class Case:
    """A step whose rows have earlier tokens, with padding rows behind."""

    spec: KVCacheSpec
    num_heads: int
    block_size: int
    rows: list[Row]
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    block_table: torch.Tensor
    rotary: RotaryEmbedding | None
    padding: int

    @property
    def scale(self) -> float:
        return self.spec.head_dim**-0.5

    def batch(self, query_lens: list[int], seq_lens: list[int], padding: int) -> ForwardBatch:
        rows = len(query_lens)
        positions = [p for q, s in zip(query_lens, seq_lens, strict=True) for p in range(s - q, s)]
        row_of = [i for i, q in enumerate(query_lens) for _ in range(q)]
        slots = [
            int(self.block_table[i, p // self.block_size]) * self.block_size + p % self.block_size
            for i, p in zip(row_of, positions, strict=True)
        ]
        all_lens = query_lens + [1] * padding
        return ForwardBatch(
            shape=StepShape(rows + padding, len(positions) + padding, 0, 0, max(all_lens)),
            input_ids=torch.zeros(len(positions) + padding, dtype=torch.int64),
            positions=torch.tensor(positions + [0] * padding),
            slot_mapping=torch.tensor(slots + [0] * padding),
            cu_seqlens_q=torch.tensor([0, *all_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens + [1] * padding, dtype=torch.int32),
            block_table=torch.cat((self.block_table, torch.zeros(padding, self.block_table.shape[1]).int())),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """Earlier tokens are written in a step of their own; every slot that nothing wrote holds NaN."""
        layer = Attention(self.num_heads, self.spec, self.scale, self.rotary)
        num_blocks = int(self.block_table.max()) + 1
        layer.bind(backend, torch.full(backend.kv_cache_shape(num_blocks), torch.nan, dtype=self.query.dtype))
        before = [(i, row) for i, row in enumerate(self.rows) if len(row.keys) > row.query_len]
        if before:
            lens = [len(row.keys) - row.query_len for _, row in before]
            table = self.block_table[[i for i, _ in before]]
            earlier = replace(self, block_table=table).batch(lens, lens, 0)
            backend.prepare(earlier)
            keys = torch.cat([row.keys[:n] for (_, row), n in zip(before, lens, strict=True)])
            values = torch.cat([row.values[:n] for (_, row), n in zip(before, lens, strict=True)])
            layer(torch.zeros(len(keys), *self.query.shape[1:], dtype=self.query.dtype), keys, values, earlier)
        lens = [row.query_len for row in self.rows]
        batch = self.batch(lens, [len(row.keys) for row in self.rows], self.padding)
        pad = torch.randn(self.padding, *self.rows[0].keys.shape[1:], dtype=self.query.dtype)
        keys = torch.cat([row.keys[-row.query_len :] for row in self.rows] + [pad])
        values = torch.cat([row.values[-row.query_len :] for row in self.rows] + [pad])
        query = torch.cat((self.query, torch.randn(self.padding, *self.query.shape[1:], dtype=self.query.dtype)))
        backend.prepare(batch)
        # Views of one product with gaps between tokens, as a merged projection gives them.
        merged = torch.cat((query.flatten(1), keys.flatten(1), values.flatten(1)), dim=1)
        heads = merged.view(len(query), -1, self.spec.head_dim)
        return layer(*heads.split([self.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads], dim=1), batch)

    def dense(self) -> torch.Tensor:
        """Row by row in float64, with no cache."""
        parts, start = [], 0
        for row in self.rows:
            seq_len, window = len(row.keys), self.spec.sliding_window or MAX_LEN
            q = self.query[start : start + row.query_len]
            start += row.query_len
            at = torch.arange(seq_len)
            k = row.keys
            if self.rotary is not None:
                q, _ = self.rotary(q, q, at[-row.query_len :])
                _, k = self.rotary(k, k, at)
            k, v = (x.double().repeat_interleave(self.num_heads // self.spec.num_kv_heads, 1) for x in (k, row.values))
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.scale
            last = at[-row.query_len :, None]
            scores = scores.masked_fill((at > last) | (at <= last - window), -torch.inf)
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return torch.cat(parts).to(self.query.dtype)


def make_case(
    seed: int,
    *,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    window: int | None = None,
    lens: list[tuple[int, int]] | None = None,
    rope: bool = True,
    padding: int = 2,
) -> Case:
    """Random rows; ``lens`` are (query_len, seq_len)."""
    rng, torch_dtype = random.Random(seed), getattr(torch, dtype)
    torch.manual_seed(seed)
    if lens is None:
        lens = [(1, rng.randint(1, 70)) for _ in range(3)]
        lens += [(q, q + rng.choice([0, 0, 5, 40])) for q in (rng.randint(2, 40) for _ in range(2))]
    spec = KVCacheSpec("full" if window is None else "sliding", heads[1], head_dim, head_dim, dtype, window)
    counts = [-(-seq_len // block_size) for _, seq_len in lens]
    ids = list(range(1, sum(counts) + 1))
    rng.shuffle(ids)
    table = torch.zeros(len(lens), max(counts) + 2, dtype=torch.int32)
    for i, count in enumerate(counts):
        table[i, :count] = torch.tensor([ids.pop() for _ in range(count)])
    shape = (heads[1], head_dim)
    rows = [Row(torch.randn(s, *shape).to(torch_dtype), torch.randn(s, *shape).to(torch_dtype), q) for q, s in lens]
    query = torch.randn(sum(q for q, _ in lens), heads[0], head_dim).to(torch_dtype)
    inv_freq = 10000 ** -torch.linspace(0, 1, head_dim // 2)
    rotary = RotaryEmbedding(inv_freq, MAX_LEN, dtype=torch_dtype) if rope and head_dim % 2 == 0 else None
    return Case(spec, heads[0], block_size, rows, query, table, rotary, padding)


def cpu(case: Case) -> CpuAttention:
    return CpuAttention(case.spec, "cpu", case.block_size)


def expect_equal(case: Case) -> None:
    found = case.run(cpu(case))
    assert found.isfinite().all(), "padding may be anything but must be finite"
    found = found[: len(case.query)]
    tolerance = TOLERANCE[case.spec.dtype]
    reference = case.run(ReferenceAttention(case.spec, "cpu", case.block_size))[: len(case.query)]
    torch.testing.assert_close(found, case.dense(), rtol=0, atol=tolerance)
    torch.testing.assert_close(found, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((9, 3), 64), ((4, 4), 16), ((7, 1), 80), ((5, 5), 12), ((6, 2), 7), ((14, 2), 128), ((3, 1), 256), ((40, 1), 24)],
)
def test_shapes(path: str, heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    expect_equal(make_case(1, heads=heads, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1, 7, 50])
def test_random_batches(path: str, seed: int, dtype: str, window: int | None) -> None:
    expect_equal(make_case(seed, dtype=dtype, window=window, block_size=(8, 16, 32, 5)[seed % 4], rope=seed % 2 == 0))


def test_padding_that_no_row_covers_and_rows_of_no_length(path: str) -> None:
    case = make_case(3)
    backend = cpu(case)
    layer = Attention(case.num_heads, case.spec, case.scale)
    layer.bind(backend, torch.full(backend.kv_cache_shape(4), torch.nan))
    batch = ForwardBatch(
        shape=StepShape(3, 7, 0, 0, 3),
        input_ids=torch.zeros(7, dtype=torch.int64),
        positions=torch.zeros(7, dtype=torch.int64),
        slot_mapping=torch.zeros(7, dtype=torch.int64),
        cu_seqlens_q=torch.tensor([0, 1, 2, 5], dtype=torch.int32),
        seq_lens=torch.tensor([0, 40, 1], dtype=torch.int32),  # the second claims tokens in the null block
        block_table=torch.zeros(3, 4, dtype=torch.int32),
        query_lens_host=[1, 1, 3],
        seq_lens_host=[0, 40, 1],
    )
    backend.prepare(batch)
    key = torch.randn(7, case.spec.num_kv_heads, case.spec.head_dim)
    assert layer(torch.randn(7, case.num_heads, case.spec.head_dim), key, key, batch).isfinite().all()


def only(case: Case, rows: list[int]) -> Case:
    """The same rows by themselves."""
    starts = torch.tensor([0, *(row.query_len for row in case.rows)]).cumsum(0).tolist()
    query = torch.cat([case.query[starts[i] : starts[i + 1]] for i in rows])
    return replace(case, rows=[case.rows[i] for i in rows], query=query, block_table=case.block_table[rows], padding=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_the_same_bits_in_any_batch_and_with_any_threads(path: str, dtype: str) -> None:
    if path == "plain":
        pytest.skip("PyTorch's own attention rounds by shape")
    case = make_case(5, dtype=dtype)
    together = case.run(cpu(case))
    for i, row in enumerate(case.rows):
        start = sum(r.query_len for r in case.rows[:i])
        alone = only(case, [i])
        assert torch.equal(together[start : start + row.query_len], alone.run(cpu(alone)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(together, case.run(cpu(case)))
    finally:
        torch.set_num_threads(threads)


def test_a_prompt_is_the_same_bits_whole_and_token_by_token(path: str) -> None:
    if path != "native":
        pytest.skip("PyTorch's own attention rounds by shape")
    whole = make_case(7, lens=[(33, 33)], padding=0)
    found = whole.run(cpu(whole))
    row = whole.rows[0]
    for i in range(33):
        history = Row(row.keys[: i + 1], row.values[: i + 1], 1)
        one = replace(whole, rows=[history], query=whole.query[i : i + 1])
        assert torch.equal(one.run(cpu(one))[0], found[i])


def test_nan_of_a_row_stays_in_it(path: str) -> None:
    case = make_case(8, lens=[(1, 20), (1, 30), (6, 6)])
    case.rows[1].values[:] = torch.nan
    found = case.run(cpu(case)).isfinite().flatten(1).all(1)
    assert found.tolist() == [True, False, *[True] * 6, True, True]


def test_bfloat16_without_units_for_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.multiplies_bfloat16", lambda: False)
    expect_equal(make_case(10, dtype="bfloat16"))


def test_a_request_may_go_on_natively_after_a_plain_start(monkeypatch: pytest.MonkeyPatch) -> None:
    build = native_build()
    build.start()
    build.wait()
    if build.failed:
        pytest.skip(build.status)
    case = make_case(9, lens=[(1, 50), (5, 40)])
    backend = cpu(case)
    real_prepare = backend.prepare
    steps = iter([None, build.library])

    def prepare(batch: ForwardBatch) -> None:
        monkeypatch.setattr(build, "library", next(steps))
        real_prepare(batch)

    monkeypatch.setattr(backend, "prepare", prepare)
    found = case.run(backend)[: len(case.query)]
    torch.testing.assert_close(found, case.dense(), rtol=0, atol=1e-5)
