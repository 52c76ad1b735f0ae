"""The layers alone: merging and sharding at load, norms to the bit, tied logits, materialising from the meta device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mini_infer.errors import ConfigError
from mini_infer.layers import (
    ColumnParallelLinear,
    LMHead,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
    load_weights,
)
from mini_infer.parallel import ParallelContext

F32 = torch.float32


def ranks(world_size: int) -> list[ParallelContext]:
    return [ParallelContext(rank, world_size) for rank in range(world_size)]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_column_parallel_slices_join_to_the_whole(world_size: int) -> None:
    weight, bias, x = noise(12, 8), noise(12), noise(3, 8)
    outs = []
    for parallel in ranks(world_size):
        layer = ColumnParallelLinear(8, 12, bias=True, dtype=F32, parallel=parallel)
        layer.load(weight)
        layer.load(bias, parameter="bias")
        outs.append(layer(x))
    torch.testing.assert_close(torch.cat(outs, -1), F.linear(x, weight, bias))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_row_parallel_summands_add_to_the_whole(world_size: int) -> None:
    weight, bias, x = noise(12, 8), noise(12), noise(3, 8)
    total = torch.zeros(3, 12)
    for parallel, part in zip(ranks(world_size), x.chunk(world_size, -1), strict=True):
        layer = RowParallelLinear(8, 12, bias=True, dtype=F32, parallel=parallel)
        layer.load(weight)
        layer.load(bias, parameter="bias")
        total += layer(part)
    torch.testing.assert_close(total, F.linear(x, weight, bias))


@pytest.mark.parametrize(("world_size", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1), (2, 4), (1, 1)])
def test_qkv_gives_each_rank_the_heads_it_needs(world_size: int, kv_heads: int) -> None:
    heads, head_dim, hidden = 8, 4, 6
    q, k, v = noise(heads * head_dim, hidden), noise(kv_heads * head_dim, hidden), noise(kv_heads * head_dim, hidden)
    x = noise(5, hidden)
    whole = [F.linear(x, w).view(5, -1, head_dim) for w in (q, k, v)]
    for parallel in ranks(world_size):
        layer = QKVParallelLinear(hidden, heads, kv_heads, head_dim, dtype=F32, parallel=parallel)
        for part, weight in zip("qkv", (q, k, v), strict=True):
            layer.load(weight, part)
        query, key, value = layer.split(layer(x))
        first = parallel.rank * layer.num_heads
        torch.testing.assert_close(query, whole[0][:, first : first + layer.num_heads])
        group = heads // kv_heads
        mine = sorted({head // group for head in range(first, first + layer.num_heads)})
        torch.testing.assert_close(key, whole[1][:, mine])
        torch.testing.assert_close(value, whole[2][:, mine])


def test_gate_and_up_are_one_product() -> None:
    gate, up, x = noise(6, 4), noise(6, 4), noise(3, 4)
    layer = MergedColumnParallelLinear(4, {"gate": 6, "up": 6}, dtype=F32)
    layer.load(up, "up")
    layer.load(gate, "gate")
    assert list(layer.slots()) == [("weight", "gate"), ("weight", "up")]
    torch.testing.assert_close(SiluAndMul()(layer(x)), F.silu(F.linear(x, gate)) * F.linear(x, up))


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_key_value_heads \(3\) cannot be split over 2 ranks"):
        QKVParallelLinear(8, 6, 3, 4, dtype=F32, parallel=ParallelContext(0, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (5, 3, 64)])
def test_norm_equals_transformers_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs, ours = LlamaRMSNorm(64, eps=1e-5).to(dtype), RMSNorm(64, 1e-5, dtype=dtype)
    weight, x, residual = (1 + noise(64)).to(dtype), (3 * noise(*shape)).to(dtype), noise(*shape, 1)[..., 0].to(dtype)
    theirs.weight.data.copy_(weight)
    ours.load(weight)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
        normed, total = ours(x, residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, theirs(x + residual))


@pytest.mark.parametrize("world_size", [1, 2])
def test_embedding_and_logits_split_the_vocabulary(world_size: int) -> None:
    table, ids = noise(10, 4), torch.tensor([0, 9, 4, 5])
    vectors, logits = torch.zeros(4, 4), []
    for parallel in ranks(world_size):
        embedding = VocabParallelEmbedding(10, 4, dtype=F32, parallel=parallel)
        embedding.load(table)
        vectors += embedding(ids)
        logits.append(LMHead(4, 10, embedding, dtype=F32, parallel=parallel)(table[:2]))
    assert torch.equal(vectors, table[ids])
    torch.testing.assert_close(torch.cat(logits, -1), table[:2] @ table.T)


class Tiny(nn.Module):
    """A tied model of two layers, to load into."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(10, 4, dtype=F32)
        self.qkv_proj = QKVParallelLinear(4, 2, 1, 2, bias=True, dtype=F32)
        self.norm = RMSNorm(4, 1e-6, dtype=F32)
        self.lm_head = LMHead(4, 10, self.embed_tokens, dtype=F32)


def tiny_tensors() -> dict[str, torch.Tensor]:
    return {
        "embed_tokens.weight": noise(10, 4),
        "q_proj.weight": noise(4, 4),
        "k_proj.weight": noise(2, 4),
        "v_proj.weight": noise(2, 4),
        "q_proj.bias": noise(4),
        "k_proj.bias": noise(2),
        "v_proj.bias": noise(2),
        "norm.weight": noise(4),
    }


def materialised() -> Tiny:
    with torch.device("meta"):
        module = Tiny()
    assert {p.device.type for p in module.parameters()} == {"meta"}
    return module.to_empty(device="cpu")


def test_a_module_made_on_meta_loads_and_stays_tied() -> None:
    module, tensors = materialised(), tiny_tensors()
    load_weights(module, tensors.items(), prefix="")
    assert "lm_head.weight" not in dict(module.named_parameters())
    assert torch.equal(module.qkv_proj.weight, torch.cat([tensors[f"{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(module.lm_head.matrix, tensors["embed_tokens.weight"])
    module.to(torch.bfloat16)
    assert module.lm_head(noise(1, 4).bfloat16()).dtype == torch.bfloat16


def load_changed(**changes: torch.Tensor | None) -> None:
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in {**tiny_tensors(), **named}.items() if tensor is not None}
    load_weights(materialised(), kept.items(), prefix="")


def test_loading_names_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"lacks 1 of 8 tensors: k_proj\.bias$"):
        load_changed(k_proj__bias=None)
    with pytest.raises(ConfigError, match=r"tensor extra\.weight has no place in Tiny"):
        load_changed(extra__weight=noise(1))
    with pytest.raises(ConfigError, match=r"tensor k_proj\.weight has shape \[3, 4\], .* asks for \[2, 4\]"):
        load_changed(k_proj__weight=noise(3, 4))
    with pytest.raises(ConfigError, match=r"tensor norm\.weight has shape \[1\], .* asks for \[4\]"):
        load_changed(norm__weight=noise(1))
    with pytest.raises(ConfigError, match=r"holds the tensor norm\.weight twice"):
        load_weights(materialised(), [*tiny_tensors().items(), ("norm.weight", noise(4))], prefix="")
    load_changed(rotary_emb__inv_freq=noise(2))
