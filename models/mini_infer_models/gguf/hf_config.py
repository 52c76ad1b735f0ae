"""GGUF metadata as Hugging Face's config.json and generation_config.json.

Contract: the result describes the same model to transformers and to this engine, or there is a ``ConfigError`` that
names the key which cannot be honoured: nothing is guessed silently.

Source: the keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; RoPE of Llama 3.1 as transformers
defines it (``rope_type: llama3``), which llama.cpp stores as one factor a frequency in ``rope_freqs.weight``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError

if TYPE_CHECKING:
    from mini_infer_models.gguf.reader import GGUFFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""The families that can be read, and what Hugging Face calls their models."""

_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def model_config(file: GGUFFile, family: str, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``.

    Args:
        file: an open file of a supported architecture.
        family: ``llama`` or ``qwen2``.
        dtype: of the weights in the new folder, such as ``float32``.
    """
    hidden_size = int(file.require_model_value("embedding_length"))
    num_heads = int(file.require_model_value("attention.head_count"))
    head_dim = int(file.model_value("attention.key_length", hidden_size // num_heads))
    if (rotary := file.model_value("rope.dimension_count", head_dim)) != head_dim:
        raise ConfigError(f"{file.path}: rope.dimension_count {rotary} is not the head size {head_dim}")
    if file.model_value("expert_count", 0):
        raise ConfigError(f"{file.path}: mixtures of experts (expert_count) are not supported")
    context_length = int(file.require_model_value("context_length"))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(file.require_model_value("feed_forward_length")),
        "num_hidden_layers": int(file.require_model_value("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(file.model_value("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "vocab_size": file.shape("token_embd.weight")[0],
        "max_position_embeddings": context_length,
        "rms_norm_eps": _short(file.require_model_value("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(file.model_value("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    if scaling := _rope_scaling(file, context_length, head_dim, config["rope_theta"]):
        config["rope_scaling"] = scaling
    return {key: value for key, value in config.items() if value is not None}


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The content of ``generation_config.json``: every id that ends a text (end of text, of turn, of message)."""
    eos = list(dict.fromkeys(int(value) for key in _EOS_KEYS if (value := file.get(key)) is not None))
    config: dict[str, Any] = {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _rope_scaling(file: GGUFFile, context_length: int, head_dim: int, theta: float) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensor_names:
        return _llama3_scaling(file, head_dim, theta)
    kind = file.model_value("rope.scaling.type", "none")
    factor = file.model_value("rope.scaling.factor", file.model_value("rope.scale_linear"))
    if kind == "none" and factor is None:
        return None
    if kind in ("linear", "none"):
        return {"rope_type": "linear", "factor": _short(factor)}
    if kind == "yarn":
        original = file.model_value("rope.scaling.original_context_length", context_length)
        return {"rope_type": "yarn", "factor": _short(factor), "original_max_position_embeddings": int(original)}
    raise ConfigError(f"{file.path}: rope.scaling.type '{kind}' is not supported (linear and yarn are)")


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Find the parameters of Llama 3.1's scaling, of which the file holds only the outcome, and prove them right."""
    import numpy as np

    stored = file.tensor("rope_freqs.weight")
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelength - low) / (high - low)
    blended = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(wavelength > original / low, factor, np.where(wavelength < original / high, 1.0, blended))
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ConfigError(f"{file.path}: rope_freqs.weight is not the RoPE scaling of Llama 3.1")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _short(value: float) -> float:
    """A float32 as it was once written: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))
