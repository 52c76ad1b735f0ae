"""Tiny random checkpoints of each model family, without transformers.

Contract: the same arguments give the same file, byte for byte. Weights have a standard deviation of 0.3 unless told
otherwise, for at the usual 0.02 a wholly wrong cache block often leaves the next token as it was.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "toy": "ToyForCausalLM",
}

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 319,
    "bos_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": False},
    "toy": {"layer_kinds": ["full", "latent"], "sliding_window": 8, "rope_dim": 4},
}


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The content of config.json of a model small enough for tests.

    Args:
        family: ``llama``, ``qwen2``, ``qwen3``, or ``toy`` (see ``toy_model``).
        overrides: keys of config.json to set; None takes a key away.
    """
    if family not in FAMILIES:
        raise ValueError(f"no tiny model {family!r}; there are {', '.join(FAMILIES)}")
    config = {"architectures": [FAMILIES[family]], "model_type": family, **_COMMON, **_OWN[family], **overrides}
    return {key: value for key, value in config.items() if value is not None}


def tiny_checkpoint(
    path: str | Path,
    family: str = "llama",
    seed: int = 0,
    std: float = 0.3,
    *,
    num_shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write a folder with config.json and random safetensors weights.

    Args:
        path: the folder, made if it is not there.
        family: as for ``tiny_config``.
        seed: of the weights.
        std: of the weights; norms are 1 + 0.1 times as much noise.
        num_shards: files; more than one brings an index.
        overrides: keys of config.json, as for ``tiny_config``.

    Returns:
        The folder.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_shards(folder, random_tensors(tensor_shapes(config), seed, std, config["torch_dtype"]), num_shards)
    return folder


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in the checkpoint of a ``tiny_config``."""
    if config["model_type"] == "toy":
        from mini_infer.testing.toy_model import toy_shapes

        return toy_shapes(config)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    qwen2 = config["model_type"] == "qwen2"
    qkv_bias = qwen2 or config.get("attention_bias", False)
    o_bias, mlp_bias = not qwen2 and qkv_bias, config.get("mlp_bias", False)
    projections = {
        "self_attn.q_proj": (q, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, q, o_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns, bias) in projections.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int, std: float, dtype: str = "float32"
) -> dict[str, torch.Tensor]:
    """Normal noise for each name; vectors called weight, which are norms, lie around 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator) * std
        norm = len(shape) == 1 and name.endswith("weight")
        tensors[name] = (1 + 0.1 * noise if norm else noise).to(getattr(torch, dtype))
    return tensors


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    """Write ``model.safetensors``, or as many shards and their index."""
    from safetensors.torch import save_file

    if num_shards == 1:
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = names[shard::num_shards]
        save_file({name: tensors[name] for name in held}, str(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
