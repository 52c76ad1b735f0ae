"""GGUF tensors under Hugging Face's names and in its order of rows.

Contract: every tensor that the model needs comes exactly once; a missing or unknown one is a ``ConfigError`` that
names it. llama.cpp reorders the rows of Q and K of Llama models so that RoPE turns neighbouring numbers; that is
undone here, without rounding.

    a head's rows in GGUF           0 1 2 3 4 5 ...        pairs that RoPE turns: (0, 1), (2, 3), ...
    the same rows for Hugging Face  0 2 4 ... 1 3 5 ...    pairs that RoPE turns: (i, i + head_dim / 2)

Source: ``LlamaModel.permute`` in llama.cpp's conversion script, inverted.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import numpy.typing as npt
    import torch

    from mini_infer_models.gguf.reader import GGUFFile

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})  # part of config.json


def hf_tensors(file: GGUFFile, config: Mapping[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Pairs of Hugging Face name and tensor, one at a time, each in memory of its own.

    Args:
        file: an open file of a supported architecture.
        config: as ``model_config`` returns it. For ``qwen2`` made of a file without QKV biases, zeros are added.
        dtype: of the tensors; the file's values are rounded to it once.

    Raises:
        ConfigError: a tensor is unknown or missing.
    """
    import torch

    names = {hf_name(name, file): name for name in file.tensor_names if name not in _NOT_WEIGHTS}
    if missing := sorted(_required(config) - names.keys()):
        raise ConfigError(f"{file.path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    for new_name, name in names.items():
        values = file.tensor(name)
        if file.architecture == "llama" and name.startswith("blk.") and (".attn_q." in name or ".attn_k." in name):
            num_heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
            values = unpermuted(values, num_heads)
        yield new_name, torch.from_numpy(values).to(dtype)
    if config["model_type"] == "qwen2":
        for name, num_rows in _qkv_biases(config):
            if name not in names:
                yield name, torch.zeros(num_rows, dtype=dtype)


def hf_name(name: str, file: GGUFFile) -> str:
    """What Hugging Face calls a tensor of llama.cpp.

    Raises:
        ConfigError: it belongs to no model of the supported families.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        raise ConfigError(f"{file.path}: tensor {name} belongs to no {file.architecture} model that is known here")
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def unpermuted(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows [num_heads * head_dim, ...] of Q or K from llama.cpp's order to Hugging Face's."""
    import numpy as np

    by_pair = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(values.shape)


def _required(config: Mapping[str, Any]) -> set[str]:
    names = {name for name in _OUTSIDE.values() if name != "lm_head.weight" or not config["tie_word_embeddings"]}
    for layer in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{part}.weight" for part in _IN_LAYER.values()}
    return names


def _qkv_biases(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    rows = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "k_proj": config["num_key_value_heads"] * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    for layer in range(config["num_hidden_layers"]):
        for part, num_rows in rows.items():
            yield f"model.layers.{layer}.self_attn.{part}.bias", num_rows
