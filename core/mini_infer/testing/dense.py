"""The tiny models once more, as plainly as can be: whole sequences, no cache, no batch, no layer of the core.

Contract: shares no code with the engine; what this gives is what any traffic through the engine must give. For the
checkpoints of ``testing.models`` in float32 with plain RoPE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class DenseModel:
    """Logits of whole sequences.

    Args:
        folder: of a ``tiny_checkpoint``.
    """

    def __init__(self, folder: str | Path) -> None:
        from safetensors.torch import load_file

        self.config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
        self.tensors: Mapping[str, torch.Tensor] = {
            name.removeprefix("model."): tensor.float()
            for file in sorted(Path(folder).glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[len(token_ids), vocab_size] float32, what follows each token."""
        x = self.tensors["embed_tokens.weight"][torch.tensor(token_ids)]
        kinds = self.config.get("layer_kinds") or ["decoder"] * self.config["num_hidden_layers"]
        for index, kind in enumerate(kinds):
            layer = f"layers.{index}."
            if kind == "decoder":
                window = self._window(index)
                x = x + self._attention(layer + "self_attn.", self._norm(x, layer + "input_layernorm"), window)
                x = x + self._mlp(layer + "mlp.", self._norm(x, layer + "post_attention_layernorm"))
            elif kind == "latent":
                x = x + self._latent(layer, self._norm(x, layer + "norm"))
            else:
                window = self.config["sliding_window"] if kind == "sliding" else None
                x = x + self._attention(layer, self._norm(x, layer + "norm"), window)
        head = self.tensors.get("lm_head.weight", self.tensors["embed_tokens.weight"])
        return self._norm(x, "norm") @ head.T

    def _window(self, layer: int) -> int | None:
        """Of Qwen's layers from ``max_window_layers`` on, where ``use_sliding_window`` is set."""
        sliding = self.config.get("use_sliding_window") and layer >= self.config["max_window_layers"]
        return self.config["sliding_window"] if sliding else None

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensors[name + ".weight"].T
        return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.tensors[name + ".weight"] * (x * scale)

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.silu(self._linear(x, name + "gate_proj"))
        return self._linear(gate * self._linear(x, name + "up_proj"), name + "down_proj")

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim], each token by its index."""
        half = x.shape[-1] // 2
        inv_freq = 1.0 / self.config["rope_theta"] ** (torch.arange(half, dtype=torch.float32) / half)
        angle = (torch.arange(x.shape[0], dtype=torch.float32)[:, None] * inv_freq)[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1
        )

    def _attention(self, name: str, x: torch.Tensor, window: int | None) -> torch.Tensor:
        heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        query, key, value = (self._linear(x, f"{name}{part}_proj").view(x.shape[0], -1, dim) for part in "qkv")
        if name + "q_norm.weight" in self.tensors:
            query, key = self._norm(query, name + "q_norm"), self._norm(key, name + "k_norm")
        repeats = heads // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (self._rotate(key), value))
        return self._linear(_attend(self._rotate(query), key, value, window), name + "o_proj")

    def _latent(self, name: str, x: torch.Tensor) -> torch.Tensor:
        dim, split = self.config["head_dim"], self.config["head_dim"] - self.config["rope_dim"]
        query = self._linear(x, name + "query_proj").view(x.shape[0], -1, dim)
        key = self._linear(x, name + "latent_proj")[:, None]
        query, key = (torch.cat((t[..., :split], self._rotate(t[..., split:])), dim=-1) for t in (query, key))
        key = key.expand_as(query)
        return self._linear(_attend(query, key, key[..., :split], None), name + "o_proj")


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention of one sequence: [tokens, heads, dim] each -> [tokens, heads * value dim]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    distance = torch.arange(query.shape[0])[:, None] - torch.arange(query.shape[0])
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
