"""FusedLayer: a decoder layer in few launches.

One row of input (a lone decode): seven launches, each weight read once by our own kernel, norms, gate and residual
inside it::

    [norm, QKV] -> [RoPE, KV write] -> [attention, merge] -> [O, residual]
                -> [norm, gate and up, SiLU] -> [down, residual]

More rows: one kernel for add and norm; up to ``FEW_ROWS`` (and ``FULL_ROWS``) products of our own, the gate inside one,
sums left to add and norm; else cuBLAS's, with a kernel for the gate, up to ``HALVED_ROWS`` with two halves left to sum.

Contract: the layer's numbers up to rounding. Layers whose parts are not the plain ones (quantised, sharded, with
``qk_norm`` or an MLP bias) are left alone; the start log says how many were replaced.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

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
"""Most rows of a product by ``few_rows``; beyond, cuBLAS's tiles that are no power of two divide the card better."""

FULL_ROWS = range(112, 129)
"""The same where ``add_norm`` follows: rows that fill the next power of two, whose sums are left to it."""

HALVED_ROWS = 384
"""Most rows of cuBLAS's product of two halves where ``add_norm`` follows; beyond, its own choice is as good."""


def few_rows(x: torch.Tensor, weight: torch.Tensor, *, gate: bool = False, sums: bool = False) -> torch.Tensor:
    """[M, K] times [N, K] -> [M, N], with ``gate`` [M, N / 2]; M is at most 128.

    With ``sums`` the answer may be float32 [S, M, N], still to be summed over S, as ``add_norm`` does.
    """
    m, k = x.shape
    n = weight.shape[0] // (2 if gate else 1)
    block_m = max(16, triton.next_power_of_2(m))
    block_n, block_k, splits, stages = _few_rows_tiling(n, k, sums, x.element_size())
    shape, dtype = ((splits, m, n), torch.float32) if splits > 1 else ((m, n), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    pdl = _launches_early(x)
    few_rows_kernel[(triton.cdiv(n, block_n), splits)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]), TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        out, m, n, k, GATE=gate, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32", PDL=pdl,
        num_warps=4, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _few_rows_tiling(n: int, k: int, sums: bool, element_size: int) -> tuple[int, int, int, int]:
    """Outputs and columns of a program's step, programs an output, steps on their way; by measurement (README)."""
    if element_size == 4:
        block_n, block_k, stages = 32, 32, 2
    else:
        block_n, block_k, stages = 64, 128, 4
    tiles = triton.cdiv(n, block_n)
    splits = min(triton.cdiv(112, tiles), max(1, k // (4 * block_k))) if sums else 1
    return block_n, block_k, splits, stages


def halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[M, K] times [N, K] -> float32 [2, M, N], still to be summed, in 16 bits and even K.

    One batched product: cuBLAS would split it too, and launch a kernel for the sum.
    """
    (m, k), n = x.shape, weight.shape[0]
    left, right = x.view(m, 2, k // 2).transpose(0, 1), weight.view(n, 2, k // 2).permute(1, 2, 0)
    return torch.bmm(left, right, out_dtype=torch.float32)


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
    silu_and_mul_kernel[(rows, triton.cdiv(width // 2, 2048))](gate_up, out, width // 2, BLOCK=2048, num_warps=8)
    return out


class FusedLayer:
    """``DecoderLayer.forward``."""

    def __init__(self, layer: DecoderLayer) -> None:
        self._layer = layer

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
        qkv = F.linear(x, qkv_proj.weight, qkv_proj.bias)
        x = attention.attn(*qkv_proj.split(qkv), batch).flatten(1)
        if layer.is_last and batch.shape.last_only:
            x, residual = batch.last_tokens(x, residual)
        x, residual = add_norm(_summed(x, o_proj.weight), residual, layer.post_attention_layernorm)
        return _summed(_gated(x, mlp.gate_up_proj.weight), mlp.down_proj.weight), residual


def _summed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product for ``add_norm``."""
    if _serves(x, FEW_ROWS) or (_serves(x, FULL_ROWS[-1]) and x.shape[0] in FULL_ROWS):
        return few_rows(x, weight, sums=True)
    in_halves = _serves(x, HALVED_ROWS) and x.element_size() == 2 and x.shape[1] % 16 == 0
    return halves(x, weight) if in_halves else F.linear(x, weight)


def _gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return few_rows(x, weight, gate=True) if _serves(x, FEW_ROWS) else silu_and_mul(F.linear(x, weight))


def _serves(x: torch.Tensor, most_rows: int) -> bool:
    """Whether ``few_rows`` takes the rows; the card's descriptors want rows of a multiple of 16 bytes."""
    return _launches_early(x) and x.shape[0] <= most_rows and x.shape[1] * x.element_size() % 16 == 0


class FusedKernels(ModelTransform):
    """Replaces the ``forward`` of plain decoder layers, of the final norm and of the logits' product.

    Args:
        log: gets a line that says what was replaced.
    """

    name: ClassVar[str] = "fused-kernels"

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log

    def apply(self, module: "nn.Module", config: "ModelConfig") -> "nn.Module":
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
            vars(layer)["forward"] = FusedLayer(layer)
        norm, head = module.model.norm, module.lm_head

        def final_norm(x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            return add_norm(x, residual, norm)

        def logits(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                return one_row(x, head.matrix)
            return few_rows(x, head.matrix) if _serves(x, FEW_ROWS) else F.linear(x, head.matrix)

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
