"""Weights that are blocks: recognised exactly, and multiplied to the bits of the float32 matrix."""

import numpy as np
import pytest
import torch

from mini_infer.interfaces import ModelConfig, SamplingParams
from mini_infer.layers import Linear, LMHead
from mini_infer.messages import EngineRequest
from mini_infer.testing import make_engine, run_engine
from mini_infer_plugins.cpu_kernels.few_rows import FewRows
from mini_infer_plugins.cpu_kernels.matrix import BlockCount, Matrix
from mini_infer_plugins.cpu_kernels.native import native_build

gguf = pytest.importorskip("gguf")


def quantised(outs: int, k: int, kind: str, scale: float = 0.05) -> torch.Tensor:
    """[outs, k] float32, what a GGUF file of this kind gives."""
    kind_id = gguf.GGMLQuantizationType[kind]
    plain = np.random.default_rng(0).normal(0, scale, (outs, k)).astype(np.float32)
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(plain, kind_id), kind_id).copy())


def looked_at(weight: torch.Tensor) -> Matrix:
    return Matrix(native_build().library, weight, None, BlockCount(1, lambda line: None))


@pytest.mark.parametrize("scale", [1e-4, 0.05, 30.0])
@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8), ("Q5_0", 0), ("F16", 0)])
def test_what_is_recognised(kind: str, bits: int, scale: float) -> None:
    assert looked_at(quantised(40, 576, kind, scale)).bits == bits


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_scales_below_the_normal_numbers_of_half_precision(kind: str) -> None:
    assert looked_at(quantised(40, 576, kind, 1e-7)).bits in (4, 8)  # few numbers are left: 8 bits may be 4


def test_a_single_number_that_is_no_block_is_seen() -> None:
    weight = quantised(8, 64, "Q4_1")
    weight[7, 63] = torch.nextafter(weight[7, 63], torch.tensor(9.0))
    assert looked_at(weight).bits == 0
    for value in (float("nan"), float("inf")):
        weight[7, 63] = value
        assert looked_at(weight).bits == 0


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_blocks_of_one_number(value: float) -> None:
    assert looked_at(torch.full((3, 64), value)).bits == 4


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16, 31, 32])
@pytest.mark.parametrize(("k", "outs"), [(576, 61), (32, 7), (96, 1), (1536, 40)])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_bits_are_those_of_the_float32_matrix(kind: str, rows: int, k: int, outs: int, threads: int) -> None:
    torch.manual_seed(0)
    layers = []
    for blocks in (True, False):
        layer = Linear(k, outs, True, dtype=torch.float32)
        layer.weight.data.copy_(quantised(outs, k, kind))
        layer.bias.data.copy_(torch.arange(outs) / 7)
        config = ModelConfig(hf={}, dtype=torch.float32, device="cpu", max_position_embeddings=64, vocab_size=64)
        layers.append(FewRows(blocks=blocks).apply(layer, config))
    x = torch.randn(rows, k)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        as_blocks, plain = (layer(x) for layer in layers)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(as_blocks, plain)
    assert layers[0].forward._matrix.bits and not layers[1].forward._matrix.bits


def test_what_was_found_is_said_once_all_are_known() -> None:
    said: list[str] = []
    count = BlockCount(2, said.append)
    library = native_build().library
    Matrix(library, quantised(64, 64, "Q4_1"), None, count)
    assert not said
    Matrix(library, quantised(4096, 512, "Q8_0"), None, count)
    assert said == [
        "cpu-kernels: 1 matrices are exactly blocks of 4 bits, 1 of 8 bits; steps of few rows read their 2 MiB"
    ]


def test_each_matrix_of_a_model_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer of a step of many rows multiplies few by itself; steps of few rows multiply a layer at once."""
    seen: list[int] = []

    def add(count: BlockCount, bits: int, num_bytes: int) -> None:
        seen.append(bits)

    monkeypatch.setattr(BlockCount, "add", add)
    engine = make_engine("llama", plugins=["cpu-kernels"], plugin={"cpu-kernels": {"wait": True}}).engine
    params = SamplingParams(max_tokens=4)
    for name, num_tokens in (("few", 3), ("many", 60), ("few again", 3)):
        run_engine(engine, [EngineRequest(request_id=name, prompt_token_ids=[1] * num_tokens, params=params, seed=0)])
    worker = engine._executor._inner._worker
    assert len(seen) == sum(isinstance(layer, Linear | LMHead) for layer in worker._parts.model.modules())
