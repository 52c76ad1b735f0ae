"""Each family's logits against transformers' own model on the same random checkpoint, over paged blocks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelAdapter
from mini_infer.model.config import make_model_config, read_hf_config
from mini_infer.model.loading import choose_adapter, load_module
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.testing.batches import bind_caches, block_tables, pack_batch, run
from mini_infer.testing.dense import DenseModel
from mini_infer.testing.models import random_tensors, save_shards, tensor_shapes, tiny_checkpoint, tiny_config
from mini_infer_models.llama.model import LlamaAdapter
from mini_infer_models.qwen2.model import Qwen2Adapter
from mini_infer_models.qwen3.model import Qwen3Adapter
from mini_infer_models.safetensors.loader import SafetensorsLoader

ADAPTERS: list[ModelAdapter] = [LlamaAdapter(), Qwen2Adapter(), Qwen3Adapter()]
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head dim": ("llama", {"head_dim": 24, "num_attention_heads": 4}),
    "llama all heads": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "llama theta": ("llama", {"rope_theta": 500000.0}),
    "llama linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama llama3": (
        "llama",
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 1e5, "original_max_position_embeddings": 64}},
    ),
    "llama yarn": (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "mistral": ("llama", MISTRAL),
    "mistral window": ("llama", {**MISTRAL, "sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows": ("qwen2", {**WINDOWS, "max_window_layers": 1}),
    "qwen2 layer types": ("qwen2", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2 yarn": ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "qwen3 windows": ("qwen3", {**WINDOWS, "max_window_layers": 0}),
}


def load(folder: Path, device: str = "cpu") -> nn.Module:
    config = make_model_config(read_hf_config(folder), device=device, dtype="float32", path=folder)
    adapter = choose_adapter(ADAPTERS, config.hf)
    adapter.check(config)
    return load_module(adapter, SafetensorsLoader(), folder, config)


def theirs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 320, (count,), generator=generator).tolist()


def assert_same_logits(ours: torch.Tensor, other: torch.Tensor) -> None:
    assert ((ours - other).abs().max() / other.abs().max()).item() < 1e-5
    assert other.std() > 0.5  # a model that says nothing would prove nothing


def two_steps(
    module: nn.Module, first: list[int], second: list[int], device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two sequences: the first whole but for one token, then that one beside the second's last part."""
    tables = block_tables([len(first), len(second)], 4, 64)
    backends = bind_caches(module, ReferenceAttention, device=device)
    n, m = len(first) - 1, len(second) // 2
    batch = pack_batch([(n, n), (m, m)], tables, 4, token_ids=[first[:n], second[:m]], device=device)
    before = run(module, backends, batch)
    rows = [(1, len(first)), (len(second) - m, len(second))]
    batch = pack_batch(rows, tables, 4, token_ids=[first[n:], second[m:]], num_padding_rows=2, device=device)
    after = run(module, backends, batch)
    assert after.isfinite().all()
    before, after = before.cpu(), after.cpu()
    return torch.cat((before[:n], after[:1])), torch.cat((before[n:], after[1 : len(second) - m + 1]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", OPTIONS)
def test_logits_equal_transformers(case: str, device: str, tmp_path: Path) -> None:
    family, overrides = OPTIONS[case]
    folder = tiny_checkpoint(tmp_path, family, seed=1, num_shards=2, **overrides)
    first, second = tokens(41, seed=2), tokens(23, seed=3)
    ours = two_steps(load(folder, device), first, second, device)
    assert_same_logits(ours[0], theirs(folder, first))
    assert_same_logits(ours[1], theirs(folder, second))


@pytest.mark.parametrize("case", ["llama biases", "qwen2 tied", "qwen2 windows", "qwen3"])
def test_the_dense_reference_agrees(case: str, tmp_path: Path) -> None:
    family, overrides = OPTIONS[case]
    folder = tiny_checkpoint(tmp_path, family, **overrides)
    ids = tokens(41, seed=2)
    assert_same_logits(DenseModel(folder).logits(ids), theirs(folder, ids))


def rewritten(folder: Path, change: Any) -> Path:
    """A Llama checkpoint whose tensors went through ``change``."""
    config = tiny_config("llama")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_shards(folder, change(random_tensors(tensor_shapes(config), 1, 0.3)))
    return folder


def test_names_without_prefix_and_frequencies_that_can_be_computed(tmp_path: Path) -> None:
    def bare(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        old = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()} | old

    ids = tokens(9, seed=4)
    plain = load(tiny_checkpoint(tmp_path / "plain", "llama", seed=1))
    renamed = load(rewritten(tmp_path / "bare", bare))
    assert torch.equal(two_steps(plain, ids, ids)[0], two_steps(renamed, ids, ids)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks 1 of 21 tensors: model.layers.1.mlp.up_proj.we"),
        (lambda t: t.update({"model.layers.2.x.weight": torch.ones(1)}), r"model.layers.2.x.weight has no place in"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(3, 5)}),
            r"model.layers.0.self_attn.k_proj.weight has shape \[3, 5\], but config.json asks for \[32, 64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64).long()}),
            "norm.weight holds int64, which is no",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            "lm_head.weight holds float8_e4m3fn, which is no plain weight",
        ),
    ],
)
def test_tensors_that_do_not_fit(change: Any, message: str, tmp_path: Path) -> None:
    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        change(tensors)
        return tensors

    with pytest.raises(ConfigError, match=message):
        load(rewritten(tmp_path, changed))


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "RoPE type 'longrope' is unknown"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ("llama", {"hidden_size": None}, "config.json has no hidden_size"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be a whole number above 0, not 0"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is more than any model has"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0, not 'small'"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta must be a number above 0, not inf"),
        ("llama", {"architectures": 5}, "architectures must be a list of names, not 5"),
        ("llama", {"architectures": [5]}, r"architectures must be a list of names, not \[5\]"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures must be a list of names, not 'Llama"),
        ("llama", {"architectures": ["Two\nLines"]}, "^architecture Two Lines is not supported"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\) is not supported"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types names 1 layers of 2"),
        ("qwen2", {"layer_types": ["linear_attention"] * 2}, "layer type 'linear_attention' is not supported"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "but no sliding window is in use"),
        ("qwen3", {"architectures": ["Qwen9ForCausalLM"]}, "architecture Qwen9ForCausalLM is not supported; supported"),
    ],
)
def test_configs_that_cannot_be_honoured(family: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config = make_model_config(tiny_config(family, **overrides), device="cpu")
        choose_adapter(ADAPTERS, config.hf).check(config)
