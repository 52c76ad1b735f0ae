"""Rotary embeddings against transformers', for every scaling and both spellings of config.json."""

from typing import Any

import pytest
import torch

from mini_infer.errors import ConfigError
from mini_infer.layers import RotaryEmbedding, rope_from_config
from mini_infer.layers.rope_scaling import scaled_max_position_embeddings

HEAD_DIM, LENGTH, MAX_LEN = 32, 128, 512
BASE = {"max_position_embeddings": LENGTH, "hidden_size": 128, "num_attention_heads": 4}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "llama3 wide": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32, "high_freq_factor": 8.0},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn betas": {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn attention factor": {"rope_type": "yarn", **YARN, "attention_factor": 0.7},
    "yarn mscale": {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn untruncated": {"rope_type": "yarn", **YARN, "truncate": False},
}


def spelt(scaling: dict[str, Any], spelling: str, theta: float) -> dict[str, Any]:
    if spelling == "rope_parameters":
        return {**BASE, "rope_parameters": {**scaling, "rope_theta": theta}}
    kind = "type" if spelling == "type" else "rope_type"
    rest = {key: value for key, value in scaling.items() if key != "rope_type"}
    return {**BASE, "rope_theta": theta, "rope_scaling": {kind: scaling["rope_type"], **rest}}


def theirs(hf: dict[str, Any], query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    import copy

    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    rotary = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(hf)))
    cos, sin = rotary(query, positions[None])
    rotated = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    return [tensor[0].transpose(0, 1) for tensor in rotated]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(MAX_LEN, 4, HEAD_DIM, generator=generator).to(dtype)
    key = torch.randn(MAX_LEN, 2, HEAD_DIM, generator=generator).to(dtype)
    return query, key, torch.arange(MAX_LEN)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_equals_transformers(scaling: str, spelling: str) -> None:
    hf = spelt(SCALINGS[scaling], spelling, theta=50_000.0)
    query, key, positions = inputs()
    rotary = rope_from_config(hf, HEAD_DIM, MAX_LEN, dtype=torch.float32)
    ours = rotary(query, key, positions)
    for mine, other in zip(ours, theirs(hf, query, key, positions), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=2e-6)


def test_dynamic_is_that_of_the_longest_sequence_served() -> None:
    """transformers gives the same once a sequence is so long; below the trained length nothing is stretched."""
    hf = spelt(SCALINGS["dynamic"], "rope_parameters", 10_000.0)
    query, key, _ = inputs()
    some = torch.tensor([3, 1, 77])
    long = rope_from_config(hf, HEAD_DIM, MAX_LEN, dtype=torch.float32)
    both = theirs(hf, query[:4], key[:4], torch.tensor([3, 1, 77, MAX_LEN - 1]))
    torch.testing.assert_close(long(query[:3], key[:3], some)[0], both[0][:3], rtol=1e-6, atol=2e-6)
    short = rope_from_config(hf, HEAD_DIM, LENGTH, dtype=torch.float32)
    plain = rope_from_config({**BASE, "rope_theta": 10_000.0}, HEAD_DIM, LENGTH, dtype=torch.float32)
    assert torch.equal(short.table, plain.table)


def test_bfloat16_is_within_its_rounding() -> None:
    hf = spelt(SCALINGS["default"], "rope_type", 10_000.0)
    query, key, positions = inputs(torch.bfloat16)
    mine = rope_from_config(hf, HEAD_DIM, MAX_LEN, dtype=torch.bfloat16)(query, key, positions)
    for ours, other in zip(mine, theirs(hf, query, key, positions), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, other, rtol=2e-2, atol=3e-2)


def test_absent_settings_are_the_plain_kind() -> None:
    plain = rope_from_config({**BASE}, HEAD_DIM, 16, dtype=torch.float32)
    named = rope_from_config({**BASE, "rope_theta": 10_000.0, "rope_scaling": None}, HEAD_DIM, 16, dtype=torch.float32)
    assert torch.equal(plain.table, named.table)


def test_the_table_follows_the_module() -> None:
    hf = spelt(SCALINGS["yarn"], "rope_type", 10_000.0)
    direct = rope_from_config(hf, HEAD_DIM, 16, dtype=torch.float32)
    with torch.device("meta"):
        made: RotaryEmbedding = rope_from_config(hf, HEAD_DIM, 16, dtype=torch.float32)
    assert made.table.is_meta
    made.to_empty(device="cpu")
    assert torch.equal(made.table, direct.table)
    made.to_empty(device="cpu")
    assert torch.equal(made.table, direct.table)
    made.to(torch.bfloat16)
    assert torch.equal(made.table, direct.table.bfloat16())
    assert not made.state_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "RoPE type 'longrope' is unknown; known: default, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a number above 0, not None"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor must be a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "must be flat"),
        ({"rope_theta": 0}, "rope_theta must be a number above 0, not 0"),
    ],
)
def test_what_we_would_ignore_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_from_config({**BASE, **changes}, HEAD_DIM, 16, dtype=torch.float32)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [("default", 128), ("linear", 320), ("dynamic", 512), ("llama3", 128), ("yarn", 512)],
)
def test_longest_sequence(scaling: str, longest: int) -> None:
    assert scaled_max_position_embeddings(spelt(SCALINGS[scaling], "rope_type", 10_000.0)) == longest
