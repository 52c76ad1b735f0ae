"""DecoderLayerForward: all of a decoder layer but its attention in two native calls, for steps of few rows.

Calling a layer's operators one by one from Python takes about 100 microseconds, a tenth of a step of one row::

    x, residual ─> [ add, norm, QKV ] ─> attention ─> [ O, add, norm, gate and up, SiLU, down ] ─> x, residual

Contract: the numbers are those of the same native operators called one by one. The layer's parts are looked at once, at
its first step, when all transforms are done: if any is not a plain one (quantised, summed over ranks), the layer's own
code runs, and each plain part is native by itself. Weights keep their addresses from then on.
"""

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import nn

from mini_infer.layers import Linear, RMSNorm, SiluAndMul
from mini_infer.layers.decoder import DecoderLayer
from mini_infer_plugins.cpu_kernels.layers import GateForward, LinearForward, NormForward, fits, most_rows
from mini_infer_plugins.cpu_kernels.matrix import BlockCount, Matrix
from mini_infer_plugins.cpu_kernels.native import DecoderLayerArgs, native_build

if TYPE_CHECKING:
    from mini_infer.interfaces import ForwardBatch


class DecoderLayerForward:
    """``DecoderLayer.forward``."""

    def __init__(self, layer: DecoderLayer, blocks: BlockCount | None = None) -> None:
        self._build = native_build()
        self._layer = layer
        self._blocks = blocks
        self._matrices: list[Matrix] = []  # what args point to
        self._args: DecoderLayerArgs | None = None
        self._most_rows: int | None = None  # not looked at yet

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: "ForwardBatch"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens, hidden_size] twice, as the layer's own ``forward``."""
        layer, native, rows = self._layer, self._build.library, x.shape[0]
        if self._most_rows is None and native is not None:
            self._args = self._plain_args(native, x.dtype)
            self._most_rows = most_rows(x.dtype) if self._args is not None else 0
        if native is None or self._args is None or self._most_rows is None or rows > self._most_rows:
            return type(layer).forward(layer, x, residual, batch)
        threads, args = torch.get_num_threads(), ctypes.byref(self._args)
        x = x.contiguous()
        qkv = torch.empty(rows, self._args.qkv.outs, dtype=x.dtype)
        if residual is None:
            total, residual_at = x, None
        else:
            residual = residual.contiguous()
            total, residual_at = torch.empty_like(x), residual.data_ptr()
        native.before_attention(args, x.data_ptr(), residual_at, total.data_ptr(), qkv.data_ptr(), rows, threads)
        attention = layer.self_attn
        query, key, value = attention.qkv_proj.split(qkv)
        if attention.q_norm is not None and attention.k_norm is not None:
            query, key = attention.q_norm(query), attention.k_norm(key)
        heads = attention.attn(query, key, value, batch).flatten(1)
        if layer.is_last and batch.shape.last_only:
            heads, total = batch.last_tokens(heads, total)
        heads, rows = heads.contiguous(), heads.shape[0]
        y, new_total = torch.empty_like(total), torch.empty_like(total)
        native.after_attention(
            args, heads.data_ptr(), total.data_ptr(), new_total.data_ptr(), y.data_ptr(), rows, threads
        )
        return y, new_total

    def _plain_args(self, native: ctypes.CDLL, dtype: torch.dtype) -> DecoderLayerArgs | None:
        """The layer's weights, if all its parts compute what this file knows."""
        layer = self._layer
        attention, mlp = layer.self_attn, layer.mlp
        matrices = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        plain = (
            all(_is_plain(m, Linear, LinearForward) for m in matrices)
            and all(_is_plain(norm, RMSNorm, NormForward) for norm in norms)
            and _is_plain(mlp.act, SiluAndMul, GateForward)
            and all(fits(parameter, dtype) for part in (*matrices, *norms) for parameter in part.parameters())
        )
        if not plain:
            return None
        self._matrices = [self._matrix(native, m) for m in matrices]
        return DecoderLayerArgs(
            *(matrix.args for matrix in self._matrices),
            *(norm.weight.data_ptr() for norm in norms),
            *(norm.eps for norm in norms),
            dtype is torch.bfloat16,
        )

    def _matrix(self, native: ctypes.CDLL, part: Linear) -> Matrix:
        """The one that the part's own forward reads: a step of many rows may end in products of few."""
        own = vars(part).get("forward")
        if isinstance(own, LinearForward):
            return own.matrix(native)
        return Matrix(native, part.weight, part.bias, self._blocks)


def _is_plain(part: nn.Module, known: type[nn.Module], ours: type) -> bool:
    """Whether ``part`` computes what ``known`` does, by its own code or by this plugin's."""
    own = vars(part).get("forward")
    return isinstance(part, known) and type(part).forward is known.forward and (own is None or isinstance(own, ours))
