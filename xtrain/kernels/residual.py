"""Residual addition and RMSNorm in one pass.   x, r: (N, C)   w: (C,)   h, y: (N, C)

    forward    h = x + r        y = rmsnorm(h) w        (rmsnorm.py)
    backward   h goes two ways: on along the residual stream, and through the norm. The gradients
               add up,
               dh_total = dh + J^T dy,  with J^T dy the dx of rmsnorm.py
               and dx = dr = dh_total, because h = x + r has slope one in both.

So the backward is RMSNorm's with one more addend, and one array is the gradient of x and of r.
We save h, which the next block needs anyway, and rstd (N floats).
Bytes moved, forward: read x and r, write h and y, 4 N C elements; two kernels would move one more
N C, reading h back. Backward: read dh, dy and h, write dx.
"""

import math

import numpy as np
from numba import cuda, float32, int64

from ..device import Array
from ._launch import check_array, empty, empty_like, launch, on_host
from ._reduce import MAX_WARPS, block_sum, warp_sum
from .rmsnorm import BLOCK, NARROW, WARPS, rmsnorm_bwd, rmsnorm_bwd_ref, rmsnorm_ref


# ----------------------------------------------------------------------------- reference
def residual_rmsnorm_ref(x_NC, r_NC, w_C, eps):
    """-> h (N, C), y (N, C), rstd (N,)"""
    h_NC = x_NC + r_NC
    return h_NC, *rmsnorm_ref(h_NC, w_C, eps)


def residual_rmsnorm_bwd_ref(dh_NC, dy_NC, h_NC, w_C, rstd_N):
    """-> dx (N, C), which is dr too, and dw (C,). dh may be None."""
    dx_NC, dw_C = rmsnorm_bwd_ref(dy_NC, h_NC, w_C, rstd_N)
    return dx_NC if dh_NC is None else dx_NC + dh_NC, dw_C


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def residual_rmsnorm_fwd_kernel(h_NC, y_NC, rstd_N, x_NC, r_NC, w_C, eps):
    """Grid N, block BLOCK. Block n owns row n; thread tid owns columns tid, tid + BLOCK, ..."""
    n, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
    C = x_NC.shape[1]
    partial = cuda.shared.array(MAX_WARPS, float32)
    acc = float32(0.0)
    for c in range(tid, C, BLOCK):
        h = x_NC[n, c] + r_NC[n, c]
        h_NC[n, c] = h
        acc += h * h
    rstd = float32(1.0) / math.sqrt(block_sum(acc, partial) / float32(C) + eps)
    if tid == 0:
        rstd_N[n] = rstd  # kept for backward
    for c in range(tid, C, BLOCK):  # a thread reads back only what it wrote itself, from the cache
        y_NC[n, c] = h_NC[n, c] * rstd * w_C[c]


@cuda.jit
def residual_rmsnorm_fwd_warp_kernel(h_NC, y_NC, rstd_N, x_NC, r_NC, w_C, eps):
    """Grid ceil(N / WARPS), block BLOCK. A warp owns a row, so a shuffle replaces the barriers."""
    n = int64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x % 32
    if n >= x_NC.shape[0]:  # the same for the whole warp: no lane is missing from the shuffles
        return
    C = x_NC.shape[1]
    acc = float32(0.0)
    for c in range(lane, C, 32):
        h = x_NC[n, c] + r_NC[n, c]
        h_NC[n, c] = h
        acc += h * h
    rstd = float32(1.0) / math.sqrt(warp_sum(acc) / float32(C) + eps)
    if lane == 0:
        rstd_N[n] = rstd
    for c in range(lane, C, 32):
        y_NC[n, c] = h_NC[n, c] * rstd * w_C[c]


# ----------------------------------------------------------------------------- launchers
def residual_rmsnorm_fwd(
    x_NC: Array, r_NC: Array, w_C: Array, eps: float
) -> tuple[Array, Array, Array]:
    """x, r (N, C), w (C,) float32 -> h = x + r (N, C), y = rmsnorm(h) w (N, C), rstd (N,)"""
    check_array("residual_rmsnorm", "x", x_NC, (None, None))
    N, C = x_NC.shape
    check_array("residual_rmsnorm", "r", r_NC, (N, C))
    check_array("residual_rmsnorm", "w", w_C, (C,))
    if on_host(x_NC, r_NC, w_C):
        return residual_rmsnorm_ref(x_NC, r_NC, w_C, eps)
    h_NC, y_NC, rstd_N = empty_like(x_NC), empty_like(x_NC), empty(x_NC, N)
    if C <= NARROW:
        kernel, grid = residual_rmsnorm_fwd_warp_kernel, -(-N // WARPS)
    else:
        kernel, grid = residual_rmsnorm_fwd_kernel, N
    launch(kernel, grid, BLOCK, h_NC, y_NC, rstd_N, x_NC, r_NC, w_C, np.float32(eps))
    return h_NC, y_NC, rstd_N


def residual_rmsnorm_bwd(
    dh_NC: Array | None, dy_NC: Array, h_NC: Array, w_C: Array, rstd_N: Array, dw_C: Array
) -> Array:
    """-> dx (N, C), the gradient of x and of r. Adds dw to dw_C (C,).

    dh is the gradient that reaches h along the residual stream; None if h was not used further.
    """
    return rmsnorm_bwd(dy_NC, h_NC, w_C, rstd_N, dw_C, skip_NC=dh_NC)
