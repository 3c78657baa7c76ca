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

import math

import numpy as np
from numba import cuda, float32, int64

from ..device import Array
from ._launch import check_array, empty, empty_like, launch, on_host
from ._reduce import MAX_WARPS, add_column_sums, block_sum, warp_sum

BLOCK = 256  # 8 warps: enough loads in flight for C = 4096, no idle warps at C = 256
NARROW = 1024  # up to here one warp per row is faster: no barrier, 8 rows per block
WARPS = BLOCK // 32
PARTIALS = 528  # 4 blocks on each of an H200's 132 multiprocessors; also the rows of `partial`


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
def rmsnorm_fwd_kernel(y_NC, rstd_N, x_NC, w_C, eps):
    """Grid N, block BLOCK. Block n owns row n; thread tid owns columns tid, tid + BLOCK, ..."""
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


@cuda.jit
def rmsnorm_fwd_warp_kernel(y_NC, rstd_N, x_NC, w_C, eps):
    """Grid ceil(N / WARPS), block BLOCK. A warp owns a row, so a shuffle replaces the barriers."""
    n = int64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x % 32
    if n >= x_NC.shape[0]:  # the same for the whole warp: no lane is missing from the shuffles
        return
    C = x_NC.shape[1]
    acc = float32(0.0)
    for c in range(lane, C, 32):
        acc += x_NC[n, c] * x_NC[n, c]
    rstd = float32(1.0) / math.sqrt(warp_sum(acc) / float32(C) + eps)
    if lane == 0:
        rstd_N[n] = rstd
    for c in range(lane, C, 32):
        y_NC[n, c] = x_NC[n, c] * rstd * w_C[c]


@cuda.jit
def rmsnorm_bwd_kernel(dx_NC, partial_PC, dy_NC, skip_NC, x_NC, w_C, rstd_N, add_skip):
    """Grid P <= PARTIALS, block BLOCK. Block p owns rows p, p + P, ...; dw of those rows goes to partial_PC[p].

    add_skip: also add skip_NC, the gradient that reaches x around the norm (see residual.py).
    Dynamic shared memory: C floats; each is touched by one thread only, so no barrier guards them.
    """
    p, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
    N, C = x_NC.shape
    partial = cuda.shared.array(MAX_WARPS, float32)
    dw_C = cuda.shared.array(0, float32)
    for c in range(tid, C, BLOCK):
        dw_C[c] = float32(0.0)
    for n in range(p, N, cuda.gridDim.x):
        rstd = rstd_N[n]
        acc = float32(0.0)
        for c in range(tid, C, BLOCK):
            acc += dy_NC[n, c] * w_C[c] * x_NC[n, c]
        mean = block_sum(acc, partial) * rstd / float32(C)  # of g xhat
        for c in range(tid, C, BLOCK):
            xhat = x_NC[n, c] * rstd
            dx = rstd * (dy_NC[n, c] * w_C[c] - xhat * mean)
            if add_skip:
                dx += skip_NC[n, c]
            dw_C[c] += dy_NC[n, c] * xhat
            dx_NC[n, c] = dx
    for c in range(tid, C, BLOCK):
        partial_PC[p, c] = dw_C[c]


# ----------------------------------------------------------------------------- launchers
def rmsnorm_fwd(x_NC: Array, w_C: Array, eps: float) -> tuple[Array, Array]:
    """x (N, C), w (C,) float32 -> y (N, C), rstd (N,). Raises ValueError or TypeError on other shapes or types."""
    N, C = x_NC.shape
    check_array("rmsnorm", "x", x_NC, (N, C))
    check_array("rmsnorm", "w", w_C, (C,))
    if on_host(x_NC, w_C):
        return rmsnorm_ref(x_NC, w_C, eps)
    y_NC, rstd_N = empty_like(x_NC), empty(x_NC, N)
    if C <= NARROW:
        kernel, grid = rmsnorm_fwd_warp_kernel, -(-N // WARPS)
    else:
        kernel, grid = rmsnorm_fwd_kernel, N
    launch(kernel, grid, BLOCK, y_NC, rstd_N, x_NC, w_C, np.float32(eps))
    return y_NC, rstd_N


def rmsnorm_bwd(
    dy_NC: Array, x_NC: Array, w_C: Array, rstd_N: Array, dw_C: Array, skip_NC: Array | None = None
) -> Array:
    """-> dx (N, C), with skip added if given. Adds dw to dw_C (C,)."""
    N, C = x_NC.shape
    check_array("rmsnorm backward", "dy", dy_NC, (N, C))
    check_array("rmsnorm backward", "dw", dw_C, (C,))
    if on_host(dy_NC, x_NC, w_C, rstd_N, dw_C):
        dx_NC, dw = rmsnorm_bwd_ref(dy_NC, x_NC, w_C, rstd_N)
        dw_C += dw
        return dx_NC if skip_NC is None else dx_NC + skip_NC
    dx_NC = empty_like(x_NC)
    P = min(N, PARTIALS)
    partial_PC = empty(x_NC, (P, C))
    skip = dy_NC if skip_NC is None else skip_NC  # a kernel takes no None
    check_array("rmsnorm backward", "skip", skip, (N, C))
    arrays = (dx_NC, partial_PC, dy_NC, skip, x_NC, w_C, rstd_N)
    launch(rmsnorm_bwd_kernel, P, BLOCK, *arrays, skip_NC is not None, shared=4 * C)
    if P:
        add_column_sums(dw_C, partial_PC)
    return dx_NC
