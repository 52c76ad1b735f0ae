"""PieceGraphs: a step with prompts, replayed as one graph between any two attentions.

Attention over rows of any lengths cannot be one fixed graph; everything else depends on the number of tokens alone::

    [embed, norm, QKV, KV write] ─> attention ─> [O, MLP, norm, QKV, KV write] ─> attention ─> ... ─> [O, MLP, norm]
              graph 0              as it is                 graph 1              as it is               graph N

Contract: attention reads what the graph before it wrote at fixed addresses; its answer is copied to where the next
graph reads. Tokens are those without graphs.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.layers import Attention

_INTEGERS = {2: "<i2", 4: "<i4"}  # by bytes; bfloat16 has no name there


@dataclass(frozen=True, slots=True)
class _Piece:
    graph: torch.cuda.CUDAGraph
    layer: "Attention"
    query: torch.Tensor  # where the graph leaves it
    out: torch.Tensor  # where the next graph reads


class Answers:
    """Buffers for attention's answers: each is read by the next graph before the next layer's is written."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def of(self, layer: "Attention", query: torch.Tensor, max_num_tokens: int) -> torch.Tensor:
        """[max_num_tokens, num_heads, v_head_dim], always the same for layers of one shape."""
        key = layer.num_heads, layer.spec.v_head_dim, query.dtype
        if key not in self._buffers:
            shape = (max_num_tokens, layer.num_heads, layer.spec.v_head_dim)
            self._buffers[key] = torch.zeros(shape, dtype=query.dtype, device=query.device)
        return self._buffers[key]


class PieceGraphs:
    """The graphs of one number of tokens.

    Args:
        forward: as ``StepRunner.run`` gets it.
        batch: of the shape to capture.
        pool: memory shared by all graphs; None for a new one.
        answers: where attention's answers go, shared by all layers and all numbers of tokens.
        max_num_tokens: largest number of tokens that will have graphs.
    """

    def __init__(
        self,
        forward: "Callable[[ForwardBatch], torch.Tensor]",
        batch: "ForwardBatch",
        pool: Any,
        answers: "Answers",
        max_num_tokens: int,
    ) -> None:
        self._pieces: list[_Piece] = []
        self._answers, self._max_num_tokens = answers, max_num_tokens
        self._pool = pool or torch.cuda.graph_pool_handle()
        # Compiles what has to be: of the variant that is captured, and attention as it is launched between graphs.
        forward(replace(batch, around_attention=lambda layer, query: layer.backend.attend(layer, query, batch)))
        torch.cuda.synchronize()
        with torch.cuda.stream(_capture_stream()):
            self._begin()
            try:
                out = forward(replace(batch, around_attention=self._cut))
            except BaseException:
                with suppress(RuntimeError):  # what failed says why
                    self._graph.capture_end()
                raise
            self._last = self._graph
            self._last.capture_end()
        self._out = unowned(out)
        torch.cuda.synchronize()

    @property
    def pool(self) -> Any:
        """The memory pool."""
        return self._pool

    def replay(self, batch: "ForwardBatch") -> torch.Tensor:
        """Run a step of the captured number of tokens."""
        for piece in self._pieces:
            piece.graph.replay()
            piece.layer.backend.attend(piece.layer, piece.query, batch, piece.out)
        self._last.replay()
        return self._out

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def _cut(self, layer: "Attention", query: torch.Tensor) -> torch.Tensor:
        """Attention's turn while the model is being captured: this piece ends, the next begins."""
        self._graph.capture_end()
        out = self._answers.of(layer, query, self._max_num_tokens)[: query.shape[0]]
        # Held without ownership, so that later pieces may use the memory again, as they do when replayed.
        self._pieces.append(_Piece(self._graph, layer, unowned(query), out))
        self._begin()
        return out


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all captures, for cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class _Address:
    """A tensor's memory as NumPy's CUDA array interface describes it, without keeping it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": _INTEGERS[size],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, held without keeping it: a graph's pool may give it to what is captured later."""
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)
