"""A whole decoder with and without the transform: logits, and what keeps the fused layer from being taken."""

import pytest
import torch

from mini_infer.interfaces import ModelConfig
from mini_infer.layers import DecoderConfig, DecoderForCausalLM, Linear, RotaryEmbedding
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.testing.batches import bind_caches, block_tables, pack_batch, run
from mini_infer_plugins.cpu_kernels.decoder_layer import DecoderLayerForward
from mini_infer_plugins.cpu_kernels.few_rows import FewRows

SHAPES = {
    "llama": {},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "query and key norms": {"qk_norm": True},
    "odd sizes": {"hidden_size": 37, "intermediate_size": 21, "vocab_size": 53},
}


def decoder(shape: str = "llama", dtype: torch.dtype = torch.float32) -> DecoderForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_heads": 6, "num_kv_heads": 2}
    rest = {"head_dim": 16, "rms_norm_eps": 1e-5, "sliding_windows": (None, None), "dtype": dtype}
    config = DecoderConfig(**{**sizes, **rest, "tied_embeddings": True, **SHAPES[shape]})
    model = DecoderForCausalLM(config, RotaryEmbedding(10000 ** -torch.linspace(0, 1, 8), 64, dtype=dtype))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model


def transform(model: DecoderForCausalLM) -> None:
    FewRows().apply(model, ModelConfig({}, model.config.dtype, "cpu", 64, model.config.vocab_size))


def steps(model: DecoderForCausalLM, prompts: tuple[int, ...] = (5, 9, 3)) -> torch.Tensor:
    """Logits of prompts together and of a decode step behind them."""
    backends = bind_caches(model, ReferenceAttention)
    tables = block_tables([length + 1 for length in prompts], 4, 64)
    ids = torch.randint(0, 53, (sum(prompts) + len(prompts),), generator=torch.Generator().manual_seed(1)).tolist()
    parts = []
    for rows in ([(n, n) for n in prompts], [(1, n + 1) for n in prompts]):
        tokens = [[ids.pop() for _ in range(count)] for count, _ in rows]
        parts.append(run(model, backends, pack_batch(rows, tables, 4, token_ids=tokens)))
    return torch.cat(parts)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_equal(shape: str, dtype: torch.dtype) -> None:
    model = decoder(shape, dtype)
    expected = steps(model)
    transform(model)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(steps(model), expected, rtol=0, atol=tolerance * expected.std().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_give_the_bits_of_their_operators(dtype: torch.dtype) -> None:
    fused, single = decoder(dtype=dtype), decoder(dtype=dtype)
    transform(fused)
    transform(single)
    for layer in single.model.layers:
        assert isinstance(layer.forward, DecoderLayerForward)
        del layer.forward
    prompts = (3, 2, 4)  # few enough rows for both
    assert torch.equal(steps(fused, prompts), steps(single, prompts))


def test_a_later_transform_is_heard() -> None:
    class Doubled(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    def double(model: DecoderForCausalLM) -> None:
        old = model.model.layers[1].mlp.down_proj
        new = Doubled(old.in_features, old.out_features, dtype=old.weight.dtype)
        new.weight.data.copy_(old.weight)
        model.model.layers[1].mlp.down_proj = new  # type: ignore[assignment]

    plain, both = decoder(), decoder()
    double(plain)
    expected = steps(plain)
    transform(both)
    double(both)
    torch.testing.assert_close(steps(both), expected, rtol=0, atol=1e-5 * expected.std().item())
    assert (expected - steps(decoder())).abs().max() > expected.std() / 10, "the test's own change must show"
