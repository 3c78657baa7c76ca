"""RMSNorm (Zhang & Sennrich 2019).   x: (N, C)   w: (C,)   y: (N, C)

    forward    r = 1 / sqrt(mean_c(x^2) + eps)        y = x r w
    backward   with xhat = x r  and  g = dy w:
               dr/dx_c = -r^3 x_c / C, so
               dx = r g + (sum_c g x) dr/dx = r (g - xhat mean_c(g xhat))
               dw = sum_n(dy xhat)

We save r (N floats) and recompute xhat: 1/C of the memory for one multiply.
Bytes moved, forward: read x, write y. Backward: read x and dy, write dx. This op is bound by memory bandwidth.
QK-norm is the same op over heads: rows are (token, head) pairs and C is the head width.

dw is a sum over all N rows. Atomics would add in a different order every run, so it is done in two stages:
every block adds up its own rows into one row of `partial`, then the columns of `partial` are added in order.
"""

import functools
import math

import numpy as np
from numba import cuda, float32, int64

from ..device import Array
from ._launch import FLOATS, check_array, empty, empty_like, launch, on_host
from ._ptx import kernel
from ._reduce import MAX_WARPS, add_column_sums, block_sum
from ._rows import COLUMNS, make_row_ops

BLOCK = 256  # of the naive kernel: 8 warps
PARTIALS = 264  # two blocks on each of an H200's 132 multiprocessors; also the rows of `partial`


# ----------------------------------------------------------------------------- reference
def rmsnorm_ref(x_NC, w_C, eps):
    """-> y (N, C), rstd (N,)"""
    rstd_N = 1 / np.sqrt(np.einsum("nc,nc->n", x_NC, x_NC) / x_NC.shape[1] + x_NC.dtype.type(eps))
    return x_NC * rstd_N[:, None] * w_C, rstd_N


def rmsnorm_bwd_ref(dy_NC, x_NC, w_C, rstd_N):
    """-> dx (N, C), dw (C,)"""
    xhat_NC = x_NC * rstd_N[:, None]
    g_NC = dy_NC * w_C
    mean_N = np.einsum("nc,nc->n", g_NC, xhat_NC) / x_NC.shape[1]
    dx_NC = rstd_N[:, None] * (g_NC - xhat_NC * mean_N[:, None])
    return dx_NC, np.einsum("nc,nc->c", dy_NC, xhat_NC)


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def rmsnorm_fwd_naive_kernel(y_NC, rstd_N, x_NC, w_C, eps):
    """Grid N, block BLOCK. Block n owns row n; thread tid owns columns tid, tid + BLOCK, ...

    The maths in its plainest form. It reads x twice, four bytes at a time, and reaches half of what memory can give.
    """
    n, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
    C = x_NC.shape[1]
    partial = cuda.shared.array(MAX_WARPS, float32)
    acc = float32(0.0)
    for c in range(tid, C, BLOCK):  # neighbouring threads read neighbouring columns
        acc += x_NC[n, c] * x_NC[n, c]
    rstd = float32(1.0) / math.sqrt(block_sum(acc, partial) / float32(C) + eps)
    if tid == 0:
        rstd_N[n] = rstd  # kept for backward
    for c in range(tid, C, BLOCK):
        y_NC[n, c] = x_NC[n, c] * rstd * w_C[c]


@functools.cache
def make_fwd_kernel(C):
    """The kernel in use: the row stays in registers between the sum and the product. See _rows.py."""
    ops = make_row_ops(C)
    load, store, total, place = ops.load, ops.store, ops.total, ops.place
    R, STEPS, STRIDE = ops.R, ops.STEPS, ops.STRIDE

    @kernel(ops.THREADS)
    def rmsnorm_fwd_kernel(y, rstd_N, x, w_C, eps):
        """Grid ceil(N / R), block THREADS. x, y: flat (N C)."""
        row, column = place()
        n = int64(cuda.blockIdx.x) * R + row
        if n >= rstd_N.size:  # the same for all threads of a row: nobody is missing from the sum
            return
        partial = cuda.shared.array(MAX_WARPS, float32)
        x_SC = cuda.local.array((STEPS, COLUMNS), float32)
        w = cuda.local.array(COLUMNS, float32)
        acc = float32(0.0)
        for s in range(STEPS):
            load(x_SC[s], x, n * C, column + s * STRIDE)
            for j in range(COLUMNS):
                acc += x_SC[s, j] * x_SC[s, j]
        rstd = float32(1.0) / math.sqrt(total(acc, partial) / float32(C) + eps)
        if column == 0:
            rstd_N[n] = rstd
        for s in range(STEPS):
            load(w, w_C, 0, column + s * STRIDE)
            for j in range(COLUMNS):
                x_SC[s, j] *= rstd * w[j]
            store(y, n * C, column + s * STRIDE, x_SC[s])

    return rmsnorm_fwd_kernel, ops


@functools.cache
def make_bwd_kernel(C, add_skip):
    """dx and this block's share of dw in one pass over dy and x.

    add_skip: also add `skip`, the gradient that reaches x around the norm (see residual.py).
    """
    ops = make_row_ops(C)
    load, store, total, place = ops.load, ops.store, ops.total, ops.place
    R, STEPS, STRIDE = ops.R, ops.STEPS, ops.STRIDE

    @kernel(ops.THREADS)
    def rmsnorm_bwd_kernel(dx, partial_PC, dy, skip, x, w_C, rstd_N):
        """Grid P, block THREADS. Block p owns rows p R, (p + P) R, ... and writes R rows of partial_PC."""
        row, column = place()
        partial = cuda.shared.array(MAX_WARPS, float32)
        dw_SC = cuda.local.array((STEPS, COLUMNS), float32)
        g_SC = cuda.local.array((STEPS, COLUMNS), float32)
        xhat_SC = cuda.local.array((STEPS, COLUMNS), float32)
        w = cuda.local.array(COLUMNS, float32)
        for s in range(STEPS):
            for j in range(COLUMNS):
                dw_SC[s, j] = float32(0.0)
        p = int64(cuda.blockIdx.x) * R + row
        for n in range(p, rstd_N.size, int64(cuda.gridDim.x) * R):
            rstd = rstd_N[n]
            acc = float32(0.0)
            for s in range(STEPS):
                c = column + s * STRIDE
                load(g_SC[s], dy, n * C, c)
                load(xhat_SC[s], x, n * C, c)
                load(w, w_C, 0, c)
                for j in range(COLUMNS):
                    xhat_SC[s, j] *= rstd
                    dw_SC[s, j] += g_SC[s, j] * xhat_SC[s, j]
                    g_SC[s, j] *= w[j]
                    acc += g_SC[s, j] * xhat_SC[s, j]
            mean = total(acc, partial) / float32(C)
            for s in range(STEPS):
                c = column + s * STRIDE
                for j in range(COLUMNS):
                    g_SC[s, j] = rstd * (g_SC[s, j] - xhat_SC[s, j] * mean)
                if add_skip:
                    load(w, skip, n * C, c)
                    for j in range(COLUMNS):
                        g_SC[s, j] += w[j]
                store(dx, n * C, c, g_SC[s])
        for s in range(STEPS):
            store(partial_PC, p * C, column + s * STRIDE, dw_SC[s])

    return rmsnorm_bwd_kernel, ops


# ----------------------------------------------------------------------------- launchers
def rmsnorm_fwd(x_NC: Array, w_C: Array, eps: float) -> tuple[Array, Array]:
    """x (N, C) float32 or bf16, w (C,) -> y (N, C) like x, rstd (N,) float32.

    Raises ValueError or TypeError on other shapes or types.
    """
    N, C = x_NC.shape
    check_array("rmsnorm", "x", x_NC, (N, C), FLOATS)
    check_array("rmsnorm", "w", w_C, (C,), FLOATS)
    if on_host(x_NC, w_C):
        return rmsnorm_ref(x_NC, w_C, eps)
    y_NC, rstd_N = empty_like(x_NC), empty(x_NC, N, np.float32)
    fwd_kernel, ops = make_fwd_kernel(C)
    launch(
        fwd_kernel,
        -(-N // ops.R),
        ops.THREADS,
        y_NC.ravel(),
        rstd_N,
        x_NC.ravel(),
        w_C,
        np.float32(eps),
    )
    return y_NC, rstd_N


def rmsnorm_bwd(
    dy_NC: Array, x_NC: Array, w_C: Array, rstd_N: Array, dw_C: Array, skip_NC: Array | None = None
) -> Array:
    """-> dx (N, C), with skip added if given. Adds dw to dw_C (C,) float32."""
    N, C = x_NC.shape
    check_array("rmsnorm backward", "dy", dy_NC, (N, C), FLOATS)
    check_array("rmsnorm backward", "dw", dw_C, (C,))
    if on_host(dy_NC, x_NC, w_C, rstd_N, dw_C):
        dx_NC, dw = rmsnorm_bwd_ref(dy_NC, x_NC, w_C, rstd_N)
        dw_C += dw
        return dx_NC if skip_NC is None else dx_NC + skip_NC
    if skip_NC is not None:
        check_array("rmsnorm backward", "skip", skip_NC, (N, C), FLOATS)
    bwd_kernel, ops = make_bwd_kernel(C, skip_NC is not None)
    dx_NC = empty_like(x_NC)
    P = min(-(-N // ops.R), PARTIALS)
    partial_PC = empty(x_NC, (P * ops.R, C), np.float32)
    skip = dy_NC if skip_NC is None else skip_NC  # a kernel takes no None
    flat = (a.ravel() for a in (dx_NC, partial_PC, dy_NC, skip, x_NC))
    launch(bwd_kernel, P, ops.THREADS, *flat, w_C, rstd_N)
    if P:
        add_column_sums(dw_C, partial_PC)
    return dx_NC
