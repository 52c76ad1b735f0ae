"""FusedLayer: a decoder layer in few launches.

One row of input (a lone decode): seven launches, each weight read once by our own kernel, norms, gate and residual
inside it::

    [norm, QKV] -> [RoPE, KV write] -> [attention, merge] -> [O, residual]
                -> [norm, gate and up, SiLU] -> [down, residual]

More rows: cuBLAS for the products, one kernel for add and norm, one for the gate; with ``few_rows`` our own products
for up to ``FEW_ROWS``, the gate inside one and sums left to the kernel that adds and norms.

Contract: the layer's numbers up to rounding. Layers whose parts are not the plain ones (quantised, sharded, with
``qk_norm`` or an MLP bias) are left alone; the start log says how many were replaced.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
import triton

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelTransform
from mini_infer.layers import Linear, RMSNorm
from mini_infer.layers.decoder import DecoderForCausalLM, DecoderLayer
from mini_infer_plugins.fused_kernels.kernels import (
    add_norm_kernel,
    few_rows_kernel,
    one_row_kernel,
    silu_and_mul_kernel,
)

if TYPE_CHECKING:
    from torch import nn

    from mini_infer.interfaces import ForwardBatch, ModelConfig


def one_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: RMSNorm | None = None,
    residual: torch.Tensor | None = None,
    gate: bool = False,
) -> torch.Tensor:
    """[1, K] times [N, K] -> [1, N]; with ``gate`` [1, N / 2]."""
    k = x.shape[1]
    n = weight.shape[0] // (2 if gate else 1)
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    block, warps = _tiling(n, k, gate)
    pdl = _launches_early(x)
    one_row_kernel[(n,)](
        x, weight, x if bias is None else bias, x if norm is None else norm.weight, x if residual is None else residual,
        out, 0.0 if norm is None else norm.eps, n, K=k, NORM=norm is not None, BIAS=bias is not None, GATE=gate,
        RESIDUAL=residual is not None, BLOCK_K=block, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _tiling(n: int, k: int, gate: bool) -> tuple[int, int]:
    """Columns a step and warps of ``one_row_kernel``, by measurement on an H200 (README)."""
    if k > 4096:
        return 512, 8
    if gate and k <= 2048:
        return 512, 2
    return (1024, 2) if n <= 8192 and not gate else (triton.next_power_of_2(k), 4)


FEW_ROWS = 64
"""Most rows of ``few_rows``; from there on a product is bound by arithmetic, and cuBLAS is faster."""


def few_rows(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, gate: bool = False, sums: bool = False
) -> torch.Tensor:
    """[M, K] times [N, K] -> [M, N], with ``gate`` [M, N / 2]; M is at most ``FEW_ROWS``.

    With ``sums`` the answer may be float32 [S, M, N], still to be summed over S, as ``add_norm`` does.
    """
    m, k = x.shape
    n = weight.shape[0] // (2 if gate else 1)
    block_m = max(16, triton.next_power_of_2(m))
    block_n, block_k, splits, warps, stages = _few_rows_tiling(n, gate, sums, x.element_size())
    shape, dtype = ((splits, m, n), torch.float32) if splits > 1 else ((m, n), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    pdl = _launches_early(x)
    few_rows_kernel[(triton.cdiv(n, block_n), splits)](
        x, weight, x if bias is None else bias, out, m, n, x.stride(0),
        K=k, BIAS=bias is not None, GATE=gate, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32", PDL=pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _few_rows_tiling(n: int, gate: bool, sums: bool, element_size: int) -> tuple[int, int, int, int, int]:
    """Outputs and columns of a program's step, programs an output, warps, steps on their way."""
    if element_size == 4:
        return 32, 32, 1, 4, 2
    tiles = triton.cdiv(n, 64)
    if tiles >= 132:
        return 64, 128, 1, 4, 3 if gate else 4
    if sums:
        return 64, 128, max(1, 264 // tiles), 4, 4
    return 32, 128, 1, 4, 4


def add_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """x + residual, normalised, and the sum itself; all [num_tokens, size], but x may be ``few_rows``'s sums."""
    rows, k = x.shape[-2:]
    splits = x.shape[0] if x.dim() == 3 else 1
    out = torch.empty(rows, k, dtype=norm.weight.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    pdl = splits > 1 and _launches_early(x)  # cuBLAS's kernels on either side would not make use of it
    add_norm_kernel[(rows,)](
        x, x if residual is None else residual, norm.weight, total, out, norm.eps, rows * k,
        K=k, PADDED_K=triton.next_power_of_2(k), ADD=residual is not None, SPLITS=splits, PDL=pdl,
        num_warps=8 if k > 2048 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return out, total


@cache
def _has_early_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _launches_early(x: torch.Tensor) -> bool:
    """Whether kernels are launched while the one before them ends (programmatic dependent launch)."""
    return _has_early_launch(x.device)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]."""
    rows, width = gate_up.shape
    out = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    silu_and_mul_kernel[(rows, triton.cdiv(width // 2, 1024))](gate_up, out, width // 2, BLOCK=1024, num_warps=4)
    return out


class FusedLayer:
    """``DecoderLayer.forward``."""

    def __init__(self, layer: DecoderLayer, most_few_rows: int = 0) -> None:
        self._layer = layer
        self._most_few_rows = most_few_rows

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: "ForwardBatch"
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the layer's own; for one row the first result is the whole sum and nothing is left to add."""
        layer, attention, mlp = self._layer, self._layer.self_attn, self._layer.mlp
        qkv_proj, o_proj = attention.qkv_proj, attention.o_proj
        if x.shape[0] == 1:
            stream = x if residual is None else x + residual
            qkv = one_row(stream, qkv_proj.weight, bias=qkv_proj.bias, norm=layer.input_layernorm)
            heads = attention.attn(*qkv_proj.split(qkv), batch).flatten(1)
            stream = one_row(heads, o_proj.weight, residual=stream)
            inner = one_row(stream, mlp.gate_up_proj.weight, norm=layer.post_attention_layernorm, gate=True)
            return one_row(inner, mlp.down_proj.weight, residual=stream), None
        x, residual = add_norm(x, residual, layer.input_layernorm)
        few = x.shape[0] <= self._most_few_rows
        qkv = few_rows(x, qkv_proj.weight, bias=qkv_proj.bias) if few else F.linear(x, qkv_proj.weight, qkv_proj.bias)
        x = attention.attn(*qkv_proj.split(qkv), batch).flatten(1)
        if layer.is_last and batch.shape.last_only:
            x, residual = batch.last_tokens(x, residual)
        if x.shape[0] > self._most_few_rows:
            x, residual = add_norm(F.linear(x, o_proj.weight), residual, layer.post_attention_layernorm)
            return F.linear(silu_and_mul(F.linear(x, mlp.gate_up_proj.weight)), mlp.down_proj.weight), residual
        x, residual = add_norm(few_rows(x, o_proj.weight, sums=True), residual, layer.post_attention_layernorm)
        return few_rows(few_rows(x, mlp.gate_up_proj.weight, gate=True), mlp.down_proj.weight, sums=True), residual


class FusedKernels(ModelTransform):
    """Replaces the ``forward`` of plain decoder layers, of the final norm and of the logits' product.

    Args:
        log: gets a line that says what was replaced.
        few_rows: products of 2 to ``FEW_ROWS`` rows by our own kernel.
    """

    name: ClassVar[str] = "fused-kernels"

    def __init__(self, log: Callable[[str], None], *, few_rows: bool = False) -> None:
        self._log = log
        self._most_few_rows = FEW_ROWS if few_rows else 0

    def apply(self, module: "nn.Module", config: "ModelConfig") -> "nn.Module":
        if not config.device.startswith("cuda"):
            raise ConfigError(f"plugin fused-kernels runs on a GPU, not on {config.device}: leave it out")
        if not isinstance(module, DecoderForCausalLM):
            self._log(f"fused-kernels: {type(module).__name__} is no plain decoder and runs as it is")
            return module
        layers = [layer for layer in module.model.layers if isinstance(layer, DecoderLayer)]
        plain = [layer for layer in layers if _is_plain(layer)]
        if len(plain) < len(layers):  # one row's stream has a form of its own between layers: all are fused, or none
            others = len(layers) - len(plain)
            self._log(f"fused-kernels: {others} of {len(layers)} decoder layers are not plain; the model runs as it is")
            return module
        self._log(f"fused-kernels: {len(layers)} decoder layers replaced")
        for layer in plain:
            vars(layer)["forward"] = FusedLayer(layer, self._most_few_rows)
        norm, head, most_few_rows = module.model.norm, module.lm_head, self._most_few_rows

        def final_norm(x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            return add_norm(x, residual, norm)

        def logits(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                return one_row(x, head.matrix)
            return few_rows(x, head.matrix) if x.shape[0] <= most_few_rows else F.linear(x, head.matrix)

        vars(norm)["forward"] = final_norm
        vars(head)["forward"] = logits
        return module


def _is_plain(layer: DecoderLayer) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    matrices = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    plain = all(
        isinstance(m, Linear) and type(m).forward is Linear.forward and "forward" not in vars(m) for m in matrices
    )
    biased = any(m.bias is not None for m in matrices[1:])
    return plain and not biased and attention.q_norm is None
