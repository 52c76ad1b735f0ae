"""Each native operator against the core's layer, and what the transform leaves alone."""

import ctypes
import resource

import pytest
import torch
from torch import nn

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelConfig
from mini_infer.layers import Linear, LMHead, RMSNorm, SiluAndMul, VocabParallelEmbedding
from mini_infer_plugins.cpu_kernels.few_rows import FewRows
from mini_infer_plugins.cpu_kernels.memory import keep_freed_memory
from mini_infer_plugins.cpu_kernels.native import native_build

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]


def config(dtype: torch.dtype, device: str = "cpu") -> ModelConfig:
    return ModelConfig(hf={}, dtype=dtype, device=device, max_position_embeddings=64, vocab_size=64)


def filled(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


def expect_equal(layer: nn.Module, *args: torch.Tensor) -> None:
    """What the layer gives before the transform and after it."""
    before = layer(*args)
    FewRows().apply(layer, config(args[0].dtype))
    after = layer(*args)
    tolerance = TOLERANCE[args[0].dtype]
    for expected, found in zip(*((x if isinstance(x, tuple) else (x,)) for x in (before, after)), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 12, 13, 32, 33])
@pytest.mark.parametrize(("k", "outs"), [(576, 960), (64, 7), (37, 61), (5, 1), (1, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: torch.dtype, rows: int, k: int, outs: int, bias: bool) -> None:
    torch.manual_seed(0)
    if rows == 0:
        layer = filled(Linear(k, outs, bias, dtype=dtype))
        FewRows().apply(layer, config(dtype))
        assert layer(torch.empty(0, k, dtype=dtype)).shape == (0, outs)
        return
    expect_equal(filled(Linear(k, outs, bias, dtype=dtype)), torch.randn(rows, k).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_a_view_and_of_more_dimensions(dtype: torch.dtype) -> None:
    expect_equal(filled(Linear(48, 31, dtype=dtype)), torch.randn(3, 2, 96).to(dtype)[..., ::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tied_lm_head_follows_its_embedding(dtype: torch.dtype) -> None:
    embedding = VocabParallelEmbedding(100, 64, dtype=dtype)
    head = LMHead(64, 100, embedding, dtype=dtype)
    FewRows().apply(head, config(dtype))
    embedding.weight = nn.Parameter(torch.randn(100, 64).to(dtype), requires_grad=False)
    x = torch.randn(2, 64).to(dtype)
    torch.testing.assert_close(head(x), x @ embedding.weight.T, rtol=1e-2, atol=1e-1 if dtype is DTYPES[1] else 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 64, 37, 3])
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_norm(dtype: torch.dtype, size: int, rows: int) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, rows, size).to(dtype)
    expect_equal(filled(RMSNorm(size, 1e-5, dtype=dtype)), x)
    expect_equal(filled(RMSNorm(size, 1e-5, dtype=dtype)), x, residual)
    heads = torch.randn(rows, 5, 2 * size).to(dtype)[:, 1:3, :size]  # as a norm of queries gets them
    expect_equal(filled(RMSNorm(size, 1e-5, dtype=dtype)), heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1536, 24, 5])
def test_gate(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(7, 2 * size) * 10
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -88.5])
    expect_equal(SiluAndMul(), gate_up.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_any_batch_and_with_any_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = filled(Linear(576, 97, True, dtype=dtype))
    FewRows().apply(layer, config(dtype))
    x = torch.randn(12, 576).to(dtype)
    together = layer(x)
    for count in (1, 2, 5):
        assert torch.equal(layer(x[:count]), together[:count])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(layer(x), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_a_row_stays_in_it_and_is_not_hidden(dtype: torch.dtype) -> None:
    model = nn.Sequential(RMSNorm(64, 1e-5, dtype=dtype), Linear(64, 64, dtype=dtype), SiluAndMul())
    filled(model)
    FewRows().apply(model, config(dtype))
    x = torch.randn(3, 64).to(dtype)
    x[1, 5] = torch.nan
    assert model(x).isnan().all(1).tolist() == [False, True, False]
    assert model(x)[[0, 2]].isfinite().all()


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    class Quantised(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0 + 7

    model = nn.Sequential(Quantised(8, 8, dtype=torch.float32), RMSNorm(8, 1e-5, dtype=torch.float32))
    FewRows().apply(filled(model), config(torch.float32))
    assert torch.equal(model[0](torch.randn(2, 8)), torch.full((2, 8), 7.0))


def test_what_cannot_be_honoured_is_refused() -> None:
    layer = Linear(8, 8, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"not torch\.float16 on cpu"):
        FewRows().apply(layer, config(torch.float16))
    with pytest.raises(ConfigError, match="on cuda:0"):
        FewRows().apply(layer, config(torch.float32, "cuda:0"))


def test_what_was_replaced_is_said() -> None:
    lines: list[str] = []
    FewRows(lines.append).apply(nn.ReLU(), config(torch.float32))
    FewRows(lines.append).apply(Linear(8, 8, dtype=torch.float32), config(torch.float32))
    assert "cpu-kernels: 0 layers of ReLU are known" in lines
    assert "cpu-kernels: 1 layers of Linear native for steps of up to 32 rows" in lines


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another allocator than glibc's")
def test_what_a_step_frees_serves_the_next() -> None:
    assert keep_freed_memory()

    def faults_of_a_step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(1 << 21).add(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults_of_a_step()
    assert min(faults_of_a_step() for _ in range(5)) < 100, "16 MiB are 4096 pages"


def test_weights_that_native_code_cannot_read_are_left_to_pytorch() -> None:
    half = filled(Linear(8, 8, dtype=torch.float16))
    wide = filled(Linear(8, 8, dtype=torch.float32))
    wide.weight = nn.Parameter(torch.randn(8, 8).T, requires_grad=False)
    for layer, dtype in ((half, torch.float16), (wide, torch.float32)):
        x = torch.randn(2, 8).to(dtype)
        expected = layer(x)
        FewRows().apply(layer, config(torch.float32))
        assert torch.equal(layer(x), expected)


def test_plain_layers_compute_until_the_file_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = filled(nn.Sequential(RMSNorm(64, 1e-5, dtype=DTYPES[0]), Linear(64, 64, dtype=DTYPES[0]), SiluAndMul()))
    x = torch.randn(3, 64)
    expected = model(x)
    FewRows().apply(model, config(DTYPES[0]))
    monkeypatch.setattr(native_build(), "library", None)
    assert torch.equal(model(x), expected)


def test_bfloat16_without_units_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer_plugins.cpu_kernels.layers.multiplies_bfloat16", lambda: False)
    torch.manual_seed(0)
    expect_equal(filled(Linear(64, 48, True, dtype=torch.bfloat16)), torch.randn(40, 64).bfloat16())
