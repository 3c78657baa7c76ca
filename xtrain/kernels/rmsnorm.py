"""RMSNorm (Zhang & Sennrich 2019).   x: (N, C)   w: (C,)   y: (N, C)

    forward    r = 1 / sqrt(mean_c(x^2) + eps)        y = x r w
    backward   with xhat = x r  and  g = dy w:
               dr/dx_c = -r^3 x_c / C, so
               dx = r g + (sum_c g x) dr/dx = r (g - xhat mean_c(g xhat))
               dw = sum_n(dy xhat)

We save r (N floats) and recompute xhat: 1/C of the memory for one multiply.
Bytes moved, forward: read x, write y. Backward: read x and dy, write dx. Memory bandwidth bounds
this op.
QK-norm is the same op over heads: rows are (token, head) pairs and C is the head width.

dw is a sum over all N rows. Atomics would add in a different order in every run, so the sum has two
stages: every block sums its rows into one row of `partial`, then the columns of `partial` are added
in order.

The kernels accept bf16 x with float32 w, and compute in float32. In bf16 the arithmetic is no
longer negligible: 4 bytes per element leave time for about 28 instructions (H200). So 1 / C is a
compile-time constant, and 1 / sqrt is one instruction (rsqrtf, accurate to two units in the last
place).
"""

import functools
import math

import numpy as np

from ..device import Array
from .primitives.column_sums import add_column_sums
from .primitives.flat import on_16_bytes
from .primitives.ptx import kernel, let_next_start
from .primitives.reduce import MAX_WARPS, block_sum
from .primitives.rows import RowKernel, aligned_rows, make_row_ops, row_plan
from .primitives.words import elements_per_vector
from .runtime.compiler import cuda, float32, int32, int64, rsqrtf, uint32
from .runtime.cost import declare_cost
from .runtime.launch import (
    FLOATS,
    as_float32,
    can_overlap,
    check,
    check_array,
    dtype_name,
    empty,
    empty_like,
    launch,
    on_host,
    wide,
)

BLOCK = 256  # of the naive kernel: 8 warps
# The backward keeps x, dy and dw of a row in registers while it loads the next row.
BWD_COLUMNS = 24  # of a thread
RESIDENT = 16  # warps per multiprocessor, the maximum with 128 registers per thread
# The maximum with 168 registers per thread: more than 16 columns per thread and a float32 next row
# need that many.
RESIDENT_WIDE = 12
MULTIPROCESSORS = (
    132  # an H200's; another number changes the order of the sum for dw, and the speed
)


# ----------------------------------------------------------------------------- reference
def rmsnorm_ref(x_NC, w_C, eps):
    """Return y (N, C), rstd (N,)."""
    rstd_N = 1 / np.sqrt(np.einsum("nc,nc->n", x_NC, x_NC) / x_NC.shape[1] + x_NC.dtype.type(eps))
    return x_NC * rstd_N[:, None] * w_C, rstd_N


def rmsnorm_bwd_ref(dy_NC, x_NC, w_C, rstd_N):
    """Return dx (N, C), dw (C,)."""
    xhat_NC = x_NC * rstd_N[:, None]
    g_NC = dy_NC * w_C
    mean_N = np.einsum("nc,nc->n", g_NC, xhat_NC) / x_NC.shape[1]
    dx_NC = rstd_N[:, None] * (g_NC - xhat_NC * mean_N[:, None])
    return dx_NC, np.einsum("nc,nc->c", dy_NC, xhat_NC)


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def rmsnorm_fwd_naive_kernel(y_NC, rstd_N, x_NC, w_C, eps):
    """Grid N, block BLOCK. Block n owns row n; thread tid owns columns tid, tid + BLOCK, ...

    The maths in its simplest form. It reads x twice, four bytes per access, and reaches half of the
    memory bandwidth.
    """
    n = int64(cuda.blockIdx.x)
    tid = cuda.threadIdx.x
    C = x_NC.shape[1]
    partial = cuda.shared.array(MAX_WARPS, float32)
    acc = float32(0.0)
    for c in range(tid, C, BLOCK):  # neighbouring threads read neighbouring columns
        acc += x_NC[n, c] * x_NC[n, c]
    rstd = float32(1.0) / math.sqrt(block_sum(acc, partial) / float32(C) + eps)
    if tid == 0:
        rstd_N[n] = rstd  # saved for backward
    for c in range(tid, C, BLOCK):
        y_NC[n, c] = x_NC[n, c] * rstd * w_C[c]


@functools.cache
def make_fwd_kernel(C, vec, aligned):
    """Return the kernel in use: the row stays in registers between the sum and the product.

    See primitives/rows.py.
    """
    ops = make_row_ops(C, vec, aligned)
    load = ops.load
    store = ops.store
    total = ops.total
    row_and_column = ops.row_and_column
    R = ops.R
    STEPS = ops.STEPS
    STRIDE = ops.STRIDE
    INVERSE = 1 / C

    @kernel(ops.THREADS)
    def rmsnorm_fwd_kernel(y, rstd_N, x, w_C, eps):
        """Grid ceil(N / R), block THREADS. x, y: flat (N C)."""
        row, column = row_and_column()
        n = int64(cuda.blockIdx.x) * R + row
        if n >= rstd_N.size:  # the same for all threads of a row, so none is missing in the sum
            return
        scratch = cuda.shared.array(MAX_WARPS, float32)
        x_SE = cuda.local.array((STEPS, vec), float32)
        w = cuda.local.array(vec, float32)
        acc = float32(0.0)
        for s in range(STEPS):
            load(x_SE[s], x, n * C, column + s * STRIDE)
        for s in range(STEPS):
            for j in range(vec):
                acc += x_SE[s, j] * x_SE[s, j]
        rstd = rsqrtf(total(acc, scratch) * float32(INVERSE) + eps)
        if column == 0:
            rstd_N[n] = rstd
        for s in range(STEPS):
            load(w, w_C, 0, column + s * STRIDE)
            for j in range(vec):
                x_SE[s, j] *= rstd * w[j]
            store(y, n * C, column + s * STRIDE, x_SE[s])

    return RowKernel(rmsnorm_fwd_kernel, ops)


@functools.cache
def make_bwd_kernel(C, vec, aligned, add_skip, overlap, recompute_y=False):
    """Return the kernel that computes dx and a block's sum for dw in one pass over dy and x.

    A block loads the next row while it computes the current one.
    add_skip: also add `skip`, the gradient that reaches x around the norm (see residual.py).
    overlap: let add_column_sums start early.
    recompute_y: also write y over dy, with the roundings of the forward pass.
    """
    is_wide = vec < 8 and row_plan(C, vec, 1, BWD_COLUMNS).STEPS * vec > 16
    warps = RESIDENT_WIDE if is_wide else RESIDENT
    # All warps in one block if possible: then their sums for dw are added on chip, and `partial`
    # has few rows.
    ops = make_row_ops(C, vec, aligned, warps, BWD_COLUMNS)
    blocks_per_sm = max(warps // (ops.W * ops.R), 1)
    load = ops.load
    store = ops.store
    load_words = ops.load_words
    unpack = ops.unpack
    total = ops.total
    row_and_column = ops.row_and_column
    add_rows = ops.add_rows
    R = ops.R
    STEPS = ops.STEPS
    STRIDE = ops.STRIDE
    INVERSE = 1 / C
    SCRATCH = ops.SCRATCH

    @kernel(ops.THREADS, blocks_per_sm)
    def rmsnorm_bwd_kernel(dx, partial, dy, skip, x, w_C, rstd_N):
        """Grid P, block THREADS. Block p owns rows p R, ..., p R + R - 1, then (p + P) R, ...

        dx, dy, skip, x: flat (N C). partial: flat (P C); block p writes row p.
        """
        row, column = row_and_column()
        scratch = cuda.shared.array(SCRATCH, float32, alignment=16)
        dy_SW = cuda.local.array((STEPS, vec), uint32)
        x_SW = cuda.local.array((STEPS, vec), uint32)
        skip_SW = cuda.local.array((STEPS, vec), uint32)
        g_SE = cuda.local.array((STEPS, vec), float32)
        x_SE = cuda.local.array((STEPS, vec), float32)
        dw_SE = cuda.local.array((STEPS, vec), float32)
        w = cuda.local.array(vec, float32)
        for s in range(STEPS):
            for j in range(vec):
                dw_SE[s, j] = float32(0.0)
        N = int32(rstd_N.size)
        n = int32(cuda.blockIdx.x * R + row)
        step = int32(cuda.gridDim.x * R)
        next_rstd = float32(0.0)
        if n < N:
            next_rstd = rstd_N[n]
            for s in range(STEPS):
                load_words(dy_SW[s], dy, n * C, column + s * STRIDE)
                load_words(x_SW[s], x, n * C, column + s * STRIDE)
        while n < N:
            rstd = next_rstd
            acc = float32(0.0)
            for s in range(STEPS):
                unpack(g_SE[s], dy_SW[s], dy)
                unpack(x_SE[s], x_SW[s], x)
            after = int32(n + step if n + step < N else n)  # after the last row, load it again
            next_rstd = rstd_N[after]
            for s in range(STEPS):
                load_words(dy_SW[s], dy, after * C, column + s * STRIDE)
                load_words(x_SW[s], x, after * C, column + s * STRIDE)
            cuda.syncwarp()  # keeps the compiler from moving the loads behind the arithmetic
            if add_skip:
                for s in range(STEPS):
                    load_words(skip_SW[s], skip, n * C, column + s * STRIDE)
            for s in range(STEPS):
                load(w, w_C, 0, column + s * STRIDE)
                if recompute_y:
                    y = cuda.local.array(vec, float32)
                    for j in range(vec):
                        y[j] = x_SE[s, j] * (rstd * w[j])
                    store(dy, n * C, column + s * STRIDE, y)
                for j in range(vec):
                    g_SE[s, j] *= rstd  # r dy
                    dw_SE[s, j] += g_SE[s, j] * x_SE[s, j]
                    g_SE[s, j] *= w[j]  # r g
                    acc += g_SE[s, j] * x_SE[s, j]
            mean = total(acc, scratch) * (rstd * rstd * float32(INVERSE))  # r^2 mean(r g x)
            for s in range(STEPS):
                for j in range(vec):
                    g_SE[s, j] -= x_SE[s, j] * mean
                if add_skip:
                    unpack(w, skip_SW[s], skip)
                    for j in range(vec):
                        g_SE[s, j] += w[j]
                store(dx, n * C, column + s * STRIDE, g_SE[s])
            n = int32(n + step)
        if overlap:
            let_next_start()  # the next kernel: add_column_sums
        add_rows(partial, int64(cuda.blockIdx.x) * C, dw_SE, scratch)

    if recompute_y:
        declare_cost(rmsnorm_bwd_kernel, in_place=("dy",))
    return RowKernel(rmsnorm_bwd_kernel, ops, blocks_per_sm)


# ----------------------------------------------------------------------------- launchers
def rmsnorm_fwd(x_NC: Array, w_C: Array, eps: float, dtype=None) -> tuple[Array, Array]:
    """Return y (N, C) in `dtype`, by default that of x, and rstd (N,) float32.

    x: (N, C), w: (C,), float32 or bf16.
    """
    check_array("rmsnorm", "x", x_NC, (None, None), FLOATS)
    N, C = x_NC.shape
    check_array("rmsnorm", "w", w_C, (C,), FLOATS)
    check(C > 0, f"rmsnorm: rows of {C} columns have no mean")
    if on_host(x_NC, w_C):
        y_NC, rstd_N = rmsnorm_ref(wide(x_NC), wide(w_C), eps)
        return y_NC.astype(x_NC.dtype if dtype is None else dtype, copy=False), rstd_N
    y_NC = empty(x_NC, (N, C), dtype)
    rstd_N = empty(x_NC, N, np.float32)
    aligned = aligned_rows(C, x_NC, y_NC) and on_16_bytes(w_C)
    fwd = make_fwd_kernel(C, elements_per_vector(x_NC, y_NC), aligned)
    y = y_NC.reshape(-1)
    x = x_NC.reshape(-1)
    plan = fwd.plan
    launch(fwd.kernel, -(-N // plan.R), plan.THREADS, y, rstd_N, x, w_C, as_float32(eps))
    return y_NC, rstd_N


def rmsnorm_bwd(
    dy_NC: Array,
    x_NC: Array,
    w_C: Array,
    rstd_N: Array,
    dw_C: Array,
    skip_NC: Array | None = None,
    recompute_y: bool = False,
    add: bool = True,
) -> Array:
    """Return dx (N, C) in the dtype of dy, plus `skip` if given; add dw to dw_C (C,) float32.

    dy, x: (N, C), w: (C,), rstd: (N,). x may have another dtype than dy.
    add: False: dw_C, float32 or bf16, becomes dw.
    skip: (N, C), like dy: the gradient that reaches x around the norm.
    recompute_y: also **overwrite dy with y**; for float32 x these are the bits that the forward
    pass gave in dy's dtype. Two runs give the same bits.
    """
    op = "rmsnorm backward"
    check_array(op, "x", x_NC, (None, None), FLOATS)
    N, C = x_NC.shape
    check_array(op, "dy", dy_NC, (N, C), FLOATS)
    check_array(op, "w", w_C, (C,), FLOATS)
    check_array(op, "rstd", rstd_N, (N,))
    check_array(op, "dw", dw_C, (C,), FLOATS[:1] if add else FLOATS)
    if skip_NC is not None:
        check_array(op, "skip", skip_NC, (N, C), (dtype_name(dy_NC.dtype),))
    check(C > 0, f"{op}: rows of {C} columns have no mean")
    if on_host(dy_NC, x_NC, w_C, rstd_N, dw_C):
        x = wide(x_NC)
        w = wide(w_C)
        dx_NC, dw = rmsnorm_bwd_ref(wide(dy_NC), x, w, rstd_N)
        dw_C[...] = dw_C + dw if add else dw
        if recompute_y:
            dy_NC[...] = x * rstd_N[:, None] * w
        if skip_NC is not None:
            dx_NC = dx_NC + skip_NC
        return dx_NC.astype(dy_NC.dtype, copy=False)
    dx_NC = empty_like(dy_NC)
    skip = dy_NC if skip_NC is None else skip_NC  # a kernel argument cannot be None
    arrays = (dy_NC, skip, x_NC)
    aligned = aligned_rows(C, dx_NC, *arrays) and on_16_bytes(w_C)
    options = (skip_NC is not None, can_overlap(x_NC), bool(recompute_y))
    bwd = make_bwd_kernel(C, elements_per_vector(*arrays), aligned, *options)
    P = min(-(-N // bwd.plan.R), MULTIPROCESSORS * bwd.blocks_per_sm)
    partial_PC = empty(x_NC, (P, C), np.float32)
    flat = (a.reshape(-1) for a in (dx_NC, partial_PC, *arrays))
    launch(bwd.kernel, P, bwd.plan.THREADS, *flat, w_C, rstd_N)
    if P or not add:
        add_column_sums(partial_PC, dw_C, add=add)
    return dx_NC
