"""Triton kernels of a decoder layer outside attention.

``few_rows_kernel`` multiplies 2 to 128 rows, with each weight read once; where a product has few outputs, several
programs share an output and leave partial sums, which ``add_norm_kernel`` adds up on its way::

    W [N, K]     a program takes BLOCK_N rows (with GATE as many of up as of gate) and a K / SPLITS of the columns

``one_row_kernel`` is a matrix-vector product that reads each weight once and does what stands before and after it::

    out[n] = sum over k of x[k] * W[n, k]       NORM: x normalised on the fly (1/rms is one number, so it is applied to
                                                the sum); then bias, SiLU gate (GATE: gate rows, then up rows), residual
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def one_row_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    eps,
    N,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program an output (with GATE one gate row and one up row).

    With PDL it starts while the kernel before it ends: weights depend on nobody, so the first of them are fetched
    before the wait.
    """
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    row = weight + n * K
    up_row = weight + (n + N) * K
    w = tl.load(row + k, mask=k < K, other=0.0, eviction_policy="evict_first")
    u = w
    if GATE:
        u = tl.load(up_row + k, mask=k < K, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for start in tl.static_range(0, K, BLOCK_K):
        mask = start + k < K
        if start > 0:
            w = tl.load(row + start + k, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATE:
                u = tl.load(up_row + start + k, mask=mask, other=0.0, eviction_policy="evict_first")
        xs = tl.load(x + start + k, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            squares += xs * xs
            xs = xs * tl.load(norm_weight + start + k, mask=mask, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * xs
        if GATE:
            up += u.to(tl.float32) * xs
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y = tl.sum(acc, 0) * factor
    if BIAS:
        y += tl.load(bias + n).to(tl.float32)
    if GATE:
        y = y * tl.sigmoid(y) * (tl.sum(up, 0) * factor)
    if RESIDUAL:
        y += tl.load(residual + n).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["M"])  # else a first step of so many rows would wait for a compiler
def few_rows_kernel(
    x,
    weight,
    out,
    M,
    N,
    K,
    GATE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program BLOCK_N outputs of all rows, and a share of the columns; ``out`` is [SPLITS, M, N].

    ``x`` and ``weight`` are descriptors of tiles [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K]; past their ends is zero.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for k in range(split * share, tl.minimum(split * share + share, K), BLOCK_K):
        w = weight.load([tile * BLOCK_N, k])
        xs = x.load([0, k]).T
        acc = tl.dot(w, xs, acc, input_precision=PRECISION)
        if GATE:
            u = weight.load([tile * BLOCK_N + N, k])
            up = tl.dot(u, xs, up, input_precision=PRECISION)
    in_n, in_m = n < N, m < M
    if GATE:
        acc = acc * tl.sigmoid(acc) * up
    to = out + (split * M + m[None, :]).to(tl.int64) * N + n[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=in_m[None, :] & in_n[:, None])


@triton.jit
def add_norm_kernel(
    x,
    residual,
    weight,
    total,
    out,
    eps,
    x_size,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: total = x + residual, out = total normalised. x [SPLITS, rows, K] is summed first."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, PADDED_K)
    mask = k < K
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * K + k, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(x + split * x_size + row * K + k, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * K + k, mask=mask, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + row * K + k, value, mask=mask)
        value = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / K + eps)
    g = tl.load(weight + k, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * K + k, ((value * factor).to(out.dtype.element_ty) * g).to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul_kernel(gate_up, out, K, BLOCK: tl.constexpr):
    """One program a row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < K
    g = tl.load(gate_up + row * 2 * K + k, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * K + K + k, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * K + k, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=mask)
