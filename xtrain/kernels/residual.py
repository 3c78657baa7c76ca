"""Residual addition and RMSNorm in one pass.   x, r: (N, C)   w: (C,)   h, y: (N, C)

    forward    h = x + r        y = rmsnorm(h) w        (rmsnorm.py)
    backward   h has two uses: the residual stream and the norm. Their gradients add up:
               dh_total = dh + J^T dy,  with J^T dy the dx of rmsnorm.py
               and dx = dr = dh_total, because h = x + r has slope one in both.

So the backward is that of RMSNorm with one more addend, and one array is the gradient of x and of
r.
We save h, which the next block needs anyway, and rstd (N floats).
Bytes moved, forward: read x and r, write h and y, 4 N C elements; two kernels would also read h
back, 5 N C elements. Backward: read dh, dy and h, write dx.
"""

import functools

import numpy as np

from ..device import Array
from .primitives.flat import on_16_bytes
from .primitives.ptx import kernel, let_next_start, wait_for_previous
from .primitives.reduce import MAX_WARPS
from .primitives.rows import MAX_COLUMNS, MIN_WARPS, RowKernel, aligned_rows, make_row_ops
from .primitives.words import elements_per_vector
from .rmsnorm import rmsnorm_bwd, rmsnorm_bwd_ref, rmsnorm_ref
from .runtime.compiler import cuda, float32, int64, rsqrtf
from .runtime.invariance import is_batch_invariant
from .runtime.launch import (
    FLOATS,
    as_float32,
    can_overlap,
    check,
    check_array,
    empty,
    empty_like,
    launch,
    on_host,
    wide,
)


# ----------------------------------------------------------------------------- reference
def residual_rmsnorm_ref(x_NC, r_NC, w_C, eps):
    """Return h (N, C), y (N, C), rstd (N,)."""
    h_NC = x_NC + r_NC
    return h_NC, *rmsnorm_ref(h_NC, w_C, eps)


def residual_rmsnorm_bwd_ref(dh_NC, dy_NC, h_NC, w_C, rstd_N):
    """Return dx (N, C), which is also dr, and dw (C,). dh may be None."""
    dx_NC, dw_C = rmsnorm_bwd_ref(dy_NC, h_NC, w_C, rstd_N)
    return dx_NC if dh_NC is None else dx_NC + dh_NC, dw_C


# ----------------------------------------------------------------------------- kernels
FEW = 264  # rows: two per multiprocessor of an H200
FEW_COLUMNS = 4  # of a thread with so few rows: only more threads hide the latency of memory


@functools.cache
def make_fwd_kernel(C, vec, aligned, few=False, spread=False, overlap=False):
    """Return the forward kernel of rmsnorm.py with an addition in front.

    few: there are at most FEW rows, as in a decoding step: more threads add up a row.
    spread: there are, and the order of the sum must be that of many rows.
    """
    columns = max(vec, FEW_COLUMNS) if few else MAX_COLUMNS
    ops = make_row_ops(C, vec, aligned, warps=1 if spread else MIN_WARPS, columns=columns)
    early = few or spread
    load = ops.load
    store = ops.store
    total = ops.total
    row_and_column = ops.row_and_column
    R = ops.R
    STEPS = ops.STEPS
    STRIDE = ops.STRIDE
    INVERSE = 1 / C

    @kernel(ops.THREADS)
    def residual_rmsnorm_fwd_kernel(h, y, rstd_N, x, r, w_C, eps):
        """Grid ceil(N / R), block THREADS. x, r, h, y: flat (N C)."""
        row, column = row_and_column()
        n = int64(cuda.blockIdx.x) * R + row
        w_SE = cuda.local.array((STEPS, vec), float32)
        if overlap:
            wait_for_previous()
            let_next_start()
        if n >= rstd_N.size:  # the same for all threads of a row, so none is missing in the sum
            return
        scratch = cuda.shared.array(MAX_WARPS, float32)
        h_SE = cuda.local.array((STEPS, vec), float32)
        r_SE = cuda.local.array((STEPS, vec), float32)
        acc = float32(0.0)
        for s in range(STEPS):
            load(h_SE[s], x, n * C, column + s * STRIDE)
            load(r_SE[s], r, n * C, column + s * STRIDE)
            if early:
                load(w_SE[s], w_C, 0, column + s * STRIDE)
        for s in range(STEPS):
            for j in range(vec):
                h_SE[s, j] += r_SE[s, j]
                acc += h_SE[s, j] * h_SE[s, j]
            store(h, n * C, column + s * STRIDE, h_SE[s])
        rstd = rsqrtf(total(acc, scratch) * float32(INVERSE) + eps)
        if column == 0:
            rstd_N[n] = rstd  # saved for backward
        for s in range(STEPS):
            if not early:
                load(w_SE[s], w_C, 0, column + s * STRIDE)
            for j in range(vec):
                h_SE[s, j] *= rstd * w_SE[s, j]
            store(y, n * C, column + s * STRIDE, h_SE[s])

    return RowKernel(residual_rmsnorm_fwd_kernel, ops)


# ----------------------------------------------------------------------------- launchers
def residual_rmsnorm_fwd(
    x_NC: Array, r_NC: Array, w_C: Array, eps: float
) -> tuple[Array, Array, Array]:
    """Return h = x + r in the dtype of x, y = rmsnorm(h) w in that of r, and rstd (N,) float32.

    x, r: (N, C), w: (C,), float32 or bf16. In bf16 training the residual stream x, h stays float32,
    so that it is not rounded in every layer.
    """
    check_array("residual_rmsnorm", "x", x_NC, (None, None), FLOATS)
    N, C = x_NC.shape
    check_array("residual_rmsnorm", "r", r_NC, (N, C), FLOATS)
    check_array("residual_rmsnorm", "w", w_C, (C,), FLOATS)
    check(C > 0, f"residual_rmsnorm: rows of {C} columns have no mean")
    if on_host(x_NC, r_NC, w_C):
        h_NC, y_NC, rstd_N = residual_rmsnorm_ref(wide(x_NC), wide(r_NC), wide(w_C), eps)
        h_NC = h_NC.astype(x_NC.dtype, copy=False)
        return h_NC, y_NC.astype(r_NC.dtype, copy=False), rstd_N
    h_NC = empty_like(x_NC)
    y_NC = empty_like(r_NC)
    rstd_N = empty(x_NC, N, np.float32)
    aligned = aligned_rows(C, h_NC, y_NC, x_NC, r_NC) and on_16_bytes(w_C)
    few = N <= FEW
    exact = is_batch_invariant()
    overlap = few and can_overlap(x_NC)
    variant = few and not exact, few and exact, overlap
    fwd = make_fwd_kernel(C, elements_per_vector(x_NC, r_NC), aligned, *variant)
    h, y, x, r = (a.reshape(-1) for a in (h_NC, y_NC, x_NC, r_NC))
    arguments = (h, y, rstd_N, x, r, w_C, as_float32(eps))
    launch(fwd.kernel, -(-N // fwd.plan.R), fwd.plan.THREADS, *arguments, overlap=overlap)
    return h_NC, y_NC, rstd_N


def residual_rmsnorm_bwd(
    dh_NC: Array | None,
    dy_NC: Array,
    h_NC: Array,
    w_C: Array,
    rstd_N: Array,
    dw_C: Array,
    recompute_y: bool = False,
    add: bool = True,
) -> Array:
    """Return dx (N, C) in the dtype of dy: the gradient of x and of r.

    Adds dw to dw_C (C,) float32; add: as in rmsnorm_bwd. dy, h: (N, C), w: (C,), rstd: (N,).
    dh: (N, C), like dy: the gradient of h through the residual stream; None if h has no other use.
    recompute_y: also **overwrite dy with y**, so that the matrix product that uses y need not save
    it.
    """
    return rmsnorm_bwd(dy_NC, h_NC, w_C, rstd_N, dw_C, dh_NC, recompute_y, add)
