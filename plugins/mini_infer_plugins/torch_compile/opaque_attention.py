"""OpaqueAttention: attention as one operator that the compiler does not look into.

::

    compiled   ... QKV, rotate ─> mini_infer::paged_attention(query, key, value, layer) ─> O, MLP, ...
    as it is                      layer.backend.write_kv, layer.backend.attend, with the step's own batch

Contract: a backend is called with the very arguments of a step that is not compiled. What it keeps (caches, metadata)
the compiler never sees; the order of its calls follows from each layer's input, which depends on the layer before.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch

from mini_infer.errors import PluginError
from mini_infer.interfaces import ForwardBatch, ModelTransform
from mini_infer.layers import Attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from mini_infer.interfaces import ModelConfig

# An operator gets tensors and numbers only: layers go by number, and the batch of the step that runs is found here.
_numbers = count()
_layers: WeakValueDictionary[int, Attention] = WeakValueDictionary()
_batch: ContextVar[ForwardBatch | None] = ContextVar("batch", default=None)


class OpaqueAttention(ModelTransform):
    """See the module."""

    name: ClassVar[str] = "torch-compile"

    def apply(self, module: "nn.Module", config: "ModelConfig") -> "nn.Module":
        for layer in module.modules():
            if isinstance(layer, Attention):
                forward: Any = _opaque(layer)
                layer.forward = forward  # type: ignore[method-assign]
        return module


@contextmanager
def compiled_step(batch: ForwardBatch) -> "Iterator[None]":
    """While it is open, attention serves ``batch``, and a model that runs without being compiled is a PluginError."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


def _opaque(layer: Attention) -> "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ForwardBatch], torch.Tensor]":
    """``layer.forward``, with what follows RoPE as one operator."""
    number = next(_numbers)
    _layers[number] = layer

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            if _batch.get() is not None:
                raise PluginError("torch-compile: torch.compile did nothing; is TORCHDYNAMO_DISABLE set?")
            return Attention.forward(layer, query, key, value, batch)
        if layer.rotary is not None and not layer.backend.capabilities.fuses_rope:
            query, key = layer.rotary(query, key, batch.positions)
        out: torch.Tensor = paged_attention(query, key, value, number, layer.spec.v_head_dim)
        return out

    return forward


@torch.library.custom_op("mini_infer::paged_attention", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def paged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, v_head_dim: int
) -> torch.Tensor:
    """[num_tokens, num_heads, v_head_dim] of one ``Attention`` layer, RoPE excepted, over the batch of the step."""
    batch, attention = _batch.get(), _layers[layer]
    assert batch is not None, "compiled_step is open"
    attention.backend.write_kv(attention, key, value, batch)
    return attention.backend.attend(attention, query, batch)


@paged_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, v_head_dim: int) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], v_head_dim)
