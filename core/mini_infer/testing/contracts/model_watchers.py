"""What stands around a model in its contract suite: a loader that gives tensors, a backend and a batch that watch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mini_infer.interfaces import ModelConfig, WeightLoader
from mini_infer.reference.attention import ReferenceAttention

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import nn

    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.layers import Attention


class Given(WeightLoader):
    """Tensors from a list, into parameters that are not a number before."""

    name = "given"

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.tensors = list(tensors)

    def accepts(self, path: Path) -> bool:
        return True

    def weights(self, path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors

    def fill(self, module: nn.Module, config: ModelConfig) -> bool:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(torch.nan)
        return False


class Watching(ReferenceAttention):
    """Checks what a layer hands over against what it declared."""

    def write_kv(
        self, layer: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        spec, num_tokens = layer.spec, batch.shape.num_tokens
        wants = (num_tokens, spec.num_kv_heads, spec.head_dim)
        assert key.shape == wants, f"keys are {tuple(key.shape)}; {spec} and {num_tokens} tokens make {wants}"
        if spec.kind != "latent":
            wants = (num_tokens, spec.num_kv_heads, spec.v_head_dim)
            assert value.shape == wants, f"values are {tuple(value.shape)}; {spec} and {num_tokens} tokens make {wants}"
        assert str(key.dtype).removeprefix("torch.") == spec.dtype, f"keys are {key.dtype}, declared {spec.dtype}"
        return super().write_kv(layer, query, key, value, batch)

    def attend(
        self, layer: Attention, query: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        wants = (batch.shape.num_tokens, layer.num_heads, layer.spec.head_dim)
        assert query.shape == wants, f"queries are {tuple(query.shape)}, not {wants}"
        return super().attend(layer, query, batch, out)


class Sealed:
    """A batch that only attention layers may open; its shape is for models that leave tokens out."""

    def __init__(self, batch: ForwardBatch, *, shows_shape: bool) -> None:
        self._batch = batch
        self._shows_shape = shows_shape

    def __getattr__(self, name: str) -> Any:
        if name == "shape" and self._shows_shape:
            return self._batch.shape
        raise AssertionError(f"the model looked into the batch ({name}): it may only hand it to its Attention layers")
