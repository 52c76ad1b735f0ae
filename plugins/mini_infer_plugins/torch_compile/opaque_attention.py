"""OpaqueAttention: attention as one operator that the compiler does not look into.

::

    compiled   ... QKV, rotate ─> mini_infer::paged_attention(query, key, value, layer) ─> O, MLP, ...
    as it is                      layer.backend.write_kv, layer.backend.attend, with the step's own batch

Contract: a backend is called with the very arguments of a step that is not compiled. What it keeps (caches, metadata)
the compiler never sees; the order of its calls follows from each layer's input, which depends on the layer before.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from mini_infer.errors import PluginError
from mini_infer.interfaces import ForwardBatch, ModelTransform
from mini_infer.layers import Attention

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import nn

    from mini_infer.interfaces import AttentionBackend, ModelConfig

_indices: WeakKeyDictionary[Attention, int] = WeakKeyDictionary()
"""Each layer's place in its model. An operator gets tensors and numbers only, and the compiler finds a graph of an
earlier start again if the numbers are the same."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the operator needs of the step that runs: its batch, and its model's layers by place."""

    batch: ForwardBatch
    layers: "Mapping[int, Attention]"


_step: ContextVar[Step | None] = ContextVar("step", default=None)


class OpaqueAttention(ModelTransform):
    """See the module."""

    name: ClassVar[str] = "torch-compile"

    def apply(self, module: "nn.Module", config: "ModelConfig") -> "nn.Module":
        layers = (layer for layer in module.modules() if isinstance(layer, Attention))
        for index, layer in enumerate(layers):
            _indices[layer] = index
            forward: Any = _opaque(layer, index)
            layer.forward = forward  # type: ignore[method-assign]
        return module


def layers_of(backends: "Collection[AttentionBackend]") -> "Mapping[int, Attention]":
    """The opaque layers that are bound to these backends, by their place in the model."""
    return {index: layer for layer, index in _indices.items() if getattr(layer, "backend", None) in backends}


@contextmanager
def compiled_step(step: Step) -> "Iterator[None]":
    """While it is open, attention serves ``step``, and a model that runs without being compiled is a PluginError."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _opaque(
    layer: Attention, index: int
) -> "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ForwardBatch], torch.Tensor]":
    """``layer.forward``, with what follows RoPE as one operator."""

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            if _step.get() is not None:
                raise PluginError("torch-compile: torch.compile did nothing; is TORCHDYNAMO_DISABLE set?")
            return Attention.forward(layer, query, key, value, batch)
        if layer.rotary is not None and not layer.backend.capabilities.fuses_rope:
            query, key = layer.rotary(query, key, batch.positions)
        out: torch.Tensor = paged_attention(query, key, value, index, layer.spec.v_head_dim)
        return out

    return forward


@torch.library.custom_op("mini_infer::paged_attention", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def paged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, v_head_dim: int
) -> torch.Tensor:
    """[num_tokens, num_heads, v_head_dim] of one ``Attention`` layer, RoPE excepted, over the batch of the step."""
    step = _step.get()
    assert step is not None, "compiled_step is open"
    attention = step.layers[layer]
    query = attention.backend.write_kv(attention, query, key, value, step.batch)
    return attention.backend.attend(attention, query, step.batch)


@paged_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, v_head_dim: int) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], v_head_dim)
