"""How fast each pair of a rotary embedding turns, from config.json.

Contract: known types are default, linear, dynamic (NTK), llama3 and yarn, with the numbers of transformers in float32;
any other is a ``ConfigError``, as are parameters that we would have to ignore.

``dynamic`` depends on a sequence's length in transformers, which so rotates old keys and new ones by different angles;
that has no meaning for a batch, or for a cache that others share. Here its length is ``max_len``, the longest sequence
that this engine serves: what transformers gives for a sequence of that length.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mini_infer.errors import ConfigError

Rope = Mapping[str, Any]


def rope_frequencies(hf: Mapping[str, Any], head_dim: int, max_len: int) -> tuple[torch.Tensor, float]:
    """Radians a position, [head_dim / 2] float32 on the CPU, and the factor on cosine and sine."""
    if head_dim % 2:
        raise ConfigError(f"config.json: RoPE needs an even head_dim, not {head_dim}")
    rope = rope_parameters(hf)
    return _TYPES[rope["rope_type"]](rope, head_dim, max_len)


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's RoPE settings in the one spelling that the rest of this module reads.

    Both spellings are understood: ``rope_theta`` with ``rope_scaling`` (and its ``type``), and ``rope_parameters``.
    Given both, ``rope_scaling`` wins, as in transformers. ``original_max_position_embeddings`` is always set.
    """
    raw = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(raw, Mapping) or any(isinstance(value, Mapping) for value in raw.values()):
        raise ConfigError("config.json: a RoPE for each kind of layer is not supported; rope_parameters must be flat")
    rope = dict(raw)
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] not in _TYPES:
        raise ConfigError(f"config.json: RoPE type {rope['rope_type']!r} is unknown; known: {', '.join(_TYPES)}")
    rope.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    if (partial := rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))) not in (None, 1, 1.0):
        raise ConfigError(f"config.json: partial_rotary_factor {partial} is not supported; only 1 is")
    length = hf.get("max_position_embeddings")
    rope.setdefault("max_position_embeddings", length)
    if "original_max_position_embeddings" in hf:
        rope["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    rope.setdefault("original_max_position_embeddings", length)
    return rope


def scaled_max_position_embeddings(hf: Mapping[str, Any]) -> int:
    """Longest sequence that the checkpoint serves, its RoPE scaling counted.

    ``max_position_embeddings`` is the unstretched length for linear and dynamic; for yarn the stretched one follows
    from the original length; for llama3 it is stretched already.
    """
    length = _number(hf, "max_position_embeddings")
    rope = rope_parameters(hf)
    if rope["rope_type"] in ("linear", "dynamic"):
        length *= _number(rope, "factor")
    elif rope["rope_type"] == "yarn":
        length = max(length, _number(rope, "original_max_position_embeddings") * _yarn_factor(rope))
    return int(length)


def _number(settings: Mapping[str, Any], key: str) -> float:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {key} must be a number above 0, not {value!r}")
    return value


def _default(rope: Rope, dim: int, max_len: int) -> tuple[torch.Tensor, float]:
    return _inverse_frequencies(_number(rope, "rope_theta"), dim), 1.0


def _inverse_frequencies(base: float, dim: int) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return 1.0 / (base**exponents)


def _linear(rope: Rope, dim: int, max_len: int) -> tuple[torch.Tensor, float]:
    """Positions divided by ``factor`` (Chen et al., arXiv 2306.15595)."""
    return _default(rope, dim, max_len)[0] / _number(rope, "factor"), 1.0


def _dynamic(rope: Rope, dim: int, max_len: int) -> tuple[torch.Tensor, float]:
    """A larger base for sequences beyond the trained length, here always that of ``max_len``."""
    factor, trained = _number(rope, "factor"), _number(rope, "max_position_embeddings")
    growth = factor * max(max_len, trained) / trained - (factor - 1)
    return _inverse_frequencies(_number(rope, "rope_theta") * growth ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: Rope, dim: int, max_len: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: low frequencies divided by ``factor``, high ones kept, those between interpolated."""
    inv_freq = _default(rope, dim, max_len)[0]
    factor, trained = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > trained / low, inv_freq / factor, inv_freq)
    smooth = (trained / wavelength - low) / (high - low)
    between = ~(wavelength < trained / high) & ~(wavelength > trained / low)
    return torch.where(between, (1 - smooth) * stretched / factor + smooth * stretched, stretched), 1.0


def _yarn(rope: Rope, dim: int, max_len: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., arXiv 2309.00071): interpolate slow pairs, keep fast ones, scale cosine and sine."""
    base, factor = _number(rope, "rope_theta"), _yarn_factor(rope)
    trained = _number(rope, "original_max_position_embeddings")

    def pair_of(rotations: float) -> float:  # the pair that turns so often within the trained length
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, _yarn_scaling(rope, factor)


def _yarn_factor(rope: Rope) -> float:
    if rope.get("factor") is None:
        return _number(rope, "max_position_embeddings") / _number(rope, "original_max_position_embeddings")
    return _number(rope, "factor")


def _yarn_scaling(rope: Rope, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return mscale(1)


_TYPES: dict[str, Callable[[Rope, int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
