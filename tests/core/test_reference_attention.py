"""The reference backend against dense attention of one row at a time, over caches poisoned with NaN."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.interfaces import KVCacheSpec
from mini_infer.layers import Attention
from mini_infer.reference import attention as reference_attention
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.testing.batches import block_tables, pack_batch

NUM_BLOCKS = 80
SPECS = {
    "full": KVCacheSpec("full", 2, 8, 8, "float32"),
    "sliding": KVCacheSpec("sliding", 2, 8, 8, "float32", sliding_window=5),
    "latent": KVCacheSpec("latent", 1, 12, 8, "float32"),
}


class Rows:
    """Random keys and values of whole sequences, and what dense attention makes of them."""

    def __init__(self, spec: KVCacheSpec, group: int, rows: list[tuple[int, int]], seed: int = 0) -> None:
        self.spec, self.rows = spec, rows
        self.heads = group * spec.num_kv_heads
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> torch.Tensor:
            return 2 * torch.randn(shape, generator=generator)

        self.query = [noise(count, self.heads, spec.head_dim) for count, _ in rows]
        self.key = [noise(length, spec.num_kv_heads, spec.head_dim) for _, length in rows]
        self.value = [noise(length, spec.num_kv_heads, spec.v_head_dim) for _, length in rows]
        if spec.kind == "latent":
            self.value = [key[..., : spec.v_head_dim] for key in self.key]

    def dense(self, index: int, scale: float) -> torch.Tensor:
        """[queries, heads, v_head_dim] float64, by loops."""
        query, key, value = (t[index].double() for t in (self.query, self.key, self.value))
        count, length = self.rows[index]
        window = self.spec.sliding_window or length
        out = torch.empty(count, self.heads, self.spec.v_head_dim, dtype=torch.float64)
        for i in range(count):
            position = length - count + i
            seen = slice(max(0, position - window + 1), position + 1)
            for head in range(self.heads):
                kv_head = head * self.spec.num_kv_heads // self.heads
                weights = torch.softmax(key[seen, kv_head] @ query[i, head] * scale, dim=0)
                out[i, head] = weights @ value[seen, kv_head]
        return out


def attend(
    rows: Rows,
    *,
    block_size: int = 4,
    num_padding_rows: int = 0,
    host_slack: int = 0,
    dtype: torch.dtype = torch.float32,
    poison: float = float("nan"),
    device: str = "cpu",
) -> torch.Tensor:
    """Write each row's past, then this step's tokens, and attend: [num_tokens, heads, v_head_dim]."""
    spec = replace(rows.spec, dtype=str(dtype).removeprefix("torch."))
    backend = ReferenceAttention(spec, device, block_size)
    layer = Attention(rows.heads, spec, scale=0.3)
    layer.bind(backend, torch.full(backend.kv_cache_shape(NUM_BLOCKS), poison, dtype=dtype, device=device))
    tables = block_tables([length for _, length in rows.rows], block_size, NUM_BLOCKS)
    for (count, length), table, *kv in zip(rows.rows, tables, rows.key, rows.value, strict=True):
        if past := length - count:
            batch = pack_batch([(past, past)], [table], block_size, device=device)
            key, value = (tensor[:past].to(device, dtype) for tensor in kv)
            backend.write_kv(layer, key, key, value, batch)
    batch = pack_batch(rows.rows, tables, block_size, num_padding_rows=num_padding_rows, device=device)
    batch = replace(batch, seq_lens_host=[length + host_slack for length in batch.seq_lens_host])

    def packed(tensors: list[torch.Tensor]) -> torch.Tensor:
        fresh = [t[len(t) - count :] for t, (count, _) in zip(tensors, rows.rows, strict=True)]
        return torch.cat([*fresh, torch.ones(num_padding_rows, *tensors[0].shape[1:])]).to(device, dtype)

    backend.prepare(batch)
    return layer(packed(rows.query), packed(rows.key), packed(rows.value), batch).cpu()


def assert_dense(rows: Rows, out: torch.Tensor, tolerance: float = 1e-5) -> None:
    start = 0
    for index, (count, _) in enumerate(rows.rows):
        torch.testing.assert_close(
            out[start : start + count].double(), rows.dense(index, 0.3), rtol=tolerance, atol=tolerance
        )
        start += count
    assert out.isfinite().all()


row = st.integers(0, 25).flatmap(lambda past: st.integers(1, 12).map(lambda count: (count, past + count)))
decodes = st.integers(1, 30).map(lambda length: (1, length))


@given(
    kind=st.sampled_from(sorted(SPECS)),
    group=st.integers(1, 3),
    rows=st.tuples(st.lists(decodes, max_size=5), st.lists(row, max_size=3)).map(lambda r: r[0] + r[1]).filter(bool),
    block_size=st.sampled_from([1, 4, 16]),
    num_padding_rows=st.integers(0, 3),
    host_slack=st.sampled_from([0, 3]),
    stretch=st.sampled_from([2, 5, 512]),
    padded=st.sampled_from([1, 1 << 25]),
)
def test_equals_dense_attention(
    kind: str,
    group: int,
    rows: list[tuple[int, int]],
    block_size: int,
    num_padding_rows: int,
    host_slack: int,
    stretch: int,
    padded: int,
) -> None:
    rows = [(count, min(length, NUM_BLOCKS // len(rows) * block_size - block_size)) for count, length in rows]
    rows = [(min(count, length), length) for count, length in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_attention, "_STRETCH", stretch)
        patch.setattr(reference_attention, "_PADDED", padded)
        patch.setattr(reference_attention, "_KEPT", padded)
        made = Rows(SPECS[kind], group, rows)
        out = attend(made, block_size=block_size, num_padding_rows=num_padding_rows, host_slack=host_slack)
    assert_dense(made, out)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("kind", sorted(SPECS))
def test_each_dtype_and_device(kind: str, dtype: torch.dtype, tolerance: float, device: str) -> None:
    rows = Rows(SPECS[kind], 2, [(1, 9), (1, 30), (7, 20)])
    out = attend(rows, dtype=dtype, device=device, num_padding_rows=2)
    assert out.dtype == dtype
    assert_dense(rows, out, tolerance)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1e30])
def test_nothing_unseen_has_an_effect(poison: float) -> None:
    rows = Rows(SPECS["sliding"], 2, [(1, 9), (1, 30), (4, 20)])
    assert torch.equal(attend(rows, poison=poison, num_padding_rows=2), attend(rows, poison=0.0, num_padding_rows=2))


def test_blocks_behind_a_window_may_be_given_back() -> None:
    """A sliding row's early blocks become the null block, full of NaN."""
    rows, block_size = Rows(SPECS["sliding"], 2, [(1, 20)]), 4
    backend = ReferenceAttention(rows.spec, "cpu", block_size)
    layer = Attention(rows.heads, rows.spec, scale=0.3)
    layer.bind(backend, torch.full(backend.kv_cache_shape(NUM_BLOCKS), torch.nan))
    tables = block_tables([20], block_size, NUM_BLOCKS)
    backend.write_kv(layer, rows.query[0], rows.key[0], rows.value[0], pack_batch([(20, 20)], tables, block_size))
    batch = pack_batch([(1, 20)], [[0, 0, 0, *tables[0][3:]]], block_size)
    backend.prepare(batch)
    assert_dense(rows, backend.attend(layer, rows.query[0], batch))


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_padding_rows_of_any_length_are_finite(kind: str) -> None:
    spec = SPECS[kind]
    backend = ReferenceAttention(spec, "cpu", 4)
    layer = Attention(2, spec, scale=0.3)
    layer.bind(backend, torch.full(backend.kv_cache_shape(4), torch.nan))
    padding = pack_batch([(37, 37)], [[0] * 10], 4)
    narrow = replace(padding, block_table=padding.block_table[:, :3])
    empty = replace(pack_batch([(1, 1)], [[0]], 4), seq_lens=torch.zeros(1, dtype=torch.int32), seq_lens_host=[0])
    for batch in (padding, narrow, empty):
        backend.prepare(batch)
        assert backend.attend(layer, torch.ones(batch.shape.num_tokens, 2, 8), batch).isfinite().all()


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_the_cache_has_the_promised_size(kind: str) -> None:
    spec = SPECS[kind]
    shape = ReferenceAttention(spec, "cpu", 16).kv_cache_shape(7)
    assert torch.empty(shape, device="meta").numel() == 7 * 16 * spec.numbers_per_token
