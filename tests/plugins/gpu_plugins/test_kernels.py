"""The Triton kernels in Triton's interpreter, against PyTorch: ``make test-kernels``. No GPU is needed."""

import os
from types import SimpleNamespace

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by make test-kernels, which has triton interpret them", allow_module_level=True)

import torch
import torch.nn.functional as F
from tests.plugins.flash_attention.fake_libraries import CONTENT

from mini_infer.flash_attention import FlashAttention, _kernels_of_3
from mini_infer.interfaces import BatchLimits, KVCacheSpec
from mini_infer.layers import Attention, RMSNorm
from mini_infer.layers.rotary import RotaryEmbedding
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.sampling.greedy import greedy
from mini_infer.testing.batches import block_tables, pack_batch
from mini_infer_plugins.device_sampler.sampler import DeviceSampler
from mini_infer_plugins.fused_kernels import layer
from mini_infer_plugins.fused_kernels.layer import add_norm, few_rows, one_row, silu_and_mul
from mini_infer_plugins.triton_attention.paged_attention import TritonAttention, _Fresh


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def norm_of(size: int) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, dtype=torch.float32)
    norm.weight.data.normal_()
    return norm


# -- fused-kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n"), [(64, 24), (100, 7), (4200, 5)])
@pytest.mark.parametrize("normed", [False, True])
def test_one_row(k: int, n: int, normed: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias, residual = torch.randn(1, k), torch.randn(n, k), torch.randn(n), torch.randn(1, n)
    norm = norm_of(k) if normed else None
    inner = x if norm is None else norm(x)
    close(one_row(x, weight, bias=bias, norm=norm), F.linear(inner, weight, bias))
    close(one_row(x, weight, residual=residual, norm=norm), F.linear(inner, weight) + residual)


@pytest.mark.parametrize("k", [64, 100])
def test_one_row_with_a_gate(k: int) -> None:
    torch.manual_seed(0)
    x, weight, norm = torch.randn(1, k), torch.randn(2 * 9, k), norm_of(k)
    gate, up = F.linear(norm(x), weight).chunk(2, dim=1)
    close(one_row(x, weight, norm=norm, gate=True), F.silu(gate) * up)


@pytest.mark.parametrize("rows", [2, 16, 17, 33, 64, 100])
@pytest.mark.parametrize(("k", "n"), [(160, 96), (300, 48), (36, 5)])
def test_few_rows(rows: int, k: int, n: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 2 * k)[:, :k], torch.randn(2 * n, k)
    product = F.linear(x, weight)
    close(few_rows(x, weight), product)
    close(few_rows(x, weight, gate=True), F.silu(product[:, :n]) * product[:, n:])


def test_add_and_norm_of_sums() -> None:
    torch.manual_seed(0)
    sums, residual, norm = torch.randn(4, 3, 96), torch.randn(3, 96), norm_of(96)
    out, total = add_norm(sums, residual, norm)
    close(total, sums.sum(0) + residual)
    close(out, norm(total))


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_few_rows_with_programs_that_share_an_output(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_few_rows_tiling", lambda *shape: (32, 32, splits, 2))
    x, weight = torch.randn(5, 200), torch.randn(40, 200)
    sums = few_rows(x, weight, sums=True)
    assert sums.shape == (splits, 5, 40)
    close(sums.sum(0), F.linear(x, weight))


@pytest.mark.parametrize("size", [64, 100])
def test_add_and_norm(size: int) -> None:
    torch.manual_seed(0)
    x, residual, norm = torch.randn(3, size), torch.randn(3, size), norm_of(size)
    out, total = add_norm(x, residual, norm)
    close(total, x + residual)
    close(out, norm(x + residual))
    out, total = add_norm(x, None, norm)
    assert total is x
    close(out, norm(x))


def test_gate() -> None:
    gate_up = torch.randn(3, 2 * 1100)
    gate, up = gate_up.chunk(2, dim=1)
    close(silu_and_mul(gate_up), F.silu(gate) * up)


# -- device-sampler ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("vocab_size", [5, 1024, 5000])
def test_greedy(rows: int, vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-9, 9, (rows, vocab_size)).float()  # many ties
    for row, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        if row < rows - 1:
            logits[row, torch.randint(vocab_size, ())] = value
    for invalid in (None, torch.tensor([0, vocab_size - 1])):
        tokens, ok = DeviceSampler().greedy(logits.clone(), invalid)
        expected, expected_ok = greedy(logits.clone(), invalid)
        assert torch.equal(ok, expected_ok)
        assert torch.equal(tokens[ok], expected[ok])


# -- triton-attention --------------------------------------------------------------------------------------------------

DECODES = [(1, 9), (1, 1), (1, 70), (1, 33)]
VERIFIES = [(3, 9), (3, 40), (3, 3)]
PROMPTS = [(5, 5), (17, 40), (1, 1)]
MIXED = [(1, 9), (1, 20), (6, 30), (20, 20)]


@pytest.mark.parametrize("rows", [DECODES, VERIFIES, PROMPTS, MIXED], ids=["decode", "verify", "prompts", "mixed"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 16), (6, 2, 32), (2, 2, 80)])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("flash", [False, True], ids=["", "with-flash-attention"])
def test_attention(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, window: int | None, flash: bool
) -> None:
    torch.manual_seed(0)
    kind = "full" if window is None else "sliding"
    spec = KVCacheSpec(kind, kv_heads, dim, dim, "float32", window)
    num_blocks = 1 + sum(-(-length // 16) for _, length in rows)
    batch = pack_batch(rows, block_tables([length for _, length in rows], 16, num_blocks), 16)
    tokens = batch.shape.num_tokens
    query = torch.randn(tokens, heads, dim)
    key, value = torch.randn(2, tokens, kv_heads, dim)
    history = torch.randn(2, num_blocks, kv_heads, 16, dim)
    answers, caches = [], []
    for backend_type in (TritonAttention, ReferenceAttention):
        backend = backend_type(spec, "cpu", 16)
        if flash and isinstance(backend, TritonAttention):
            backend._flash = FlashAttention(_kernels_of_3(SimpleNamespace(**CONTENT["vfa3"])))
        attention = Attention(
            heads,
            spec,
            dim**-0.5,
            RotaryEmbedding(10_000.0 ** -(torch.arange(0, dim, 2) / dim), 128, dtype=torch.float32),
        )
        cache = history.clone() if backend_type is TritonAttention else history.transpose(2, 3).contiguous()
        attention.bind(backend, cache)
        backend.buffers(BatchLimits(len(rows), tokens, batch.block_table.shape[1], 16))
        backend.prepare(batch)
        answers.append(attention(query.clone(), key.clone(), value.clone(), batch))
        caches.append(cache if backend_type is ReferenceAttention else cache.transpose(2, 3))
    close(*answers)
    close(*caches)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_no_prompt_beside_it(value: float) -> None:
    """FlashAttention multiplies whole tiles: values of the next prompt, weighted with zero, must be finite."""
    torch.manual_seed(0)
    spec = KVCacheSpec("full", 2, 16, 16, "float32")
    backend = TritonAttention(spec, "cpu", 16)
    backend._flash = FlashAttention(_kernels_of_3(SimpleNamespace(**CONTENT["vfa3"])))
    attention = Attention(4, spec, 0.3)
    attention.bind(backend, torch.zeros(backend.kv_cache_shape(4)))
    batch = pack_batch([(3, 3), (4, 4)], block_tables([3, 4], 16, 4), 16)
    backend.buffers(BatchLimits(2, 7, 1, 16))
    query, key, values = torch.randn(7, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    values[4, 1, 5] = value
    fresh = backend.write_kv(attention, query, key, values, batch)
    assert isinstance(fresh, _Fresh)
    assert fresh.value.isfinite().all()
    assert torch.equal(fresh.key.isnan().all(2).nonzero(), torch.tensor([[4, 1]]))
    assert attention.kv_cache.isfinite().logical_not().sum() == 1  # as it was
    finite = backend.attend(attention, fresh, batch).isfinite().all(2).all(1)
    assert finite.tolist() == [True] * 4 + [False] * 3
