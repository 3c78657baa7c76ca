"""Rows of tokens to rows of experts, and back.   x: (N, C)   y: (M, C), see expert_order.py

    gather   y[m] = x[n] where slot m holds a pair n K + k; 0 where it holds padding
    sum      x[n] = sum over k of y[slot of n K + k], in float32, in the order of k

Each is the backward of the other. Unused tiles are neither read nor written. Bytes moved: N K rows
of the larger array, N of the smaller (which comes from L2 the other K - 1 times).
"""

import functools

import numpy as np

from ...device import Array
from ..primitives.flat import (
    BLOCK,
    CHUNK,
    blocks_for_rows,
    can_vectorize_rows,
    load,
    make_row_and_column,
    store,
)
from ..primitives.ptx import kernel
from ..runtime.compiler import cuda, float32, int64
from ..runtime.cost import declare_cost
from ..runtime.launch import FLOATS, check_array, empty, launch, on_host, wide
from .expert_order import TILE, ExpertOrder


# ----------------------------------------------------------------------------- reference
def gather_rows_ref(x_NC, pairs_M, K):
    """Return y (M, C)."""
    y_MC = np.zeros((pairs_M.size, x_NC.shape[1]), x_NC.dtype)
    used = pairs_M >= 0
    y_MC[used] = x_NC[pairs_M[used] // K]
    return y_MC


def sum_rows_ref(y_MC, slots_NK):
    """Return x (N, C)."""
    x_NC = y_MC[slots_NK[:, 0]]
    for k in range(1, slots_NK.shape[1]):
        x_NC += y_MC[slots_NK[:, k]]
    return x_NC


# ----------------------------------------------------------------------------- kernels
@functools.cache
def make_gather_rows_kernel(C, K, vectorized):
    """Return the kernel for rows of C columns, K slots a token.

    vectorized: 16-byte accesses, see can_vectorize_rows.
    """
    row_and_column, gap = make_row_and_column(C)

    @kernel(BLOCK)
    def gather_rows_kernel(y, x, pairs_M, experts_T):
        """Grid blocks_for_rows(M, C), block BLOCK. y: flat (M C), x: flat (N C)."""
        row = cuda.local.array(CHUNK, float32)
        m, c = row_and_column()
        if m >= pairs_M.size or experts_T[m // TILE] < 0:
            return
        pair = pairs_M[m]
        if pair < 0:
            for j in range(CHUNK):
                row[j] = float32(0.0)
        else:
            i = int64(pair // K) * C
            load(row, x, i + c, gap, i + C, vectorized)
        store(y, m * C + c, gap, m * C + C, row, vectorized)

    declare_cost(gather_rows_kernel, nbytes=lambda y, x, *_: y.nbytes + x.nbytes)
    return gather_rows_kernel


@functools.cache
def make_sum_rows_kernel(C, K, vectorized):
    """Return the kernel for rows of C columns, K slots a token.

    vectorized: 16-byte accesses, see can_vectorize_rows.
    """
    row_and_column, gap = make_row_and_column(C)

    @kernel(BLOCK)
    def sum_rows_kernel(x, y, slots_NK):
        """Grid blocks_for_rows(N, C), block BLOCK. x: flat (N C), y: flat (M C).

        A pair without a slot makes its row NaN.
        """
        acc = cuda.local.array(CHUNK, float32)
        row = cuda.local.array(CHUNK, float32)
        n, c = row_and_column()
        if n >= slots_NK.shape[0]:
            return
        lowest = slots_NK[n, 0]
        for k in range(K):
            slot = slots_NK[n, k]
            lowest = slot if slot < lowest else lowest
            i = int64(slot if slot >= 0 else 0) * C
            load(row, y, i + c, gap, i + C, vectorized)
            for j in range(CHUNK):
                acc[j] = row[j] if k == 0 else acc[j] + row[j]
        if lowest < 0:
            for j in range(CHUNK):
                acc[j] = float32(np.nan)
        store(x, n * C + c, gap, n * C + C, acc, vectorized)

    declare_cost(sum_rows_kernel, nbytes=lambda x, y, slots: (slots.shape[1] + 1) * x.nbytes)
    return sum_rows_kernel


# ----------------------------------------------------------------------------- launchers
def gather_rows(x_NC: Array, order: ExpertOrder) -> Array:
    """Return y (M, C): x (N, C), float32 or bf16, in the order of experts; padding is 0.

    On a GPU unused tiles are not written.
    """
    check_array("gather_rows", "slots", order.slots_NK, (None, None), ("int32",))
    N, K = order.slots_NK.shape
    check_array("gather_rows", "x", x_NC, (N, None), FLOATS)
    if on_host(x_NC, *order):
        return gather_rows_ref(x_NC, order.pairs_M, K)
    M = order.pairs_M.size
    C = x_NC.shape[1]
    y_MC = empty(x_NC, (M, C))
    y, x = y_MC.reshape(-1), x_NC.reshape(-1)
    if C:
        gather_kernel = make_gather_rows_kernel(C, K, can_vectorize_rows(C, y, x))
        where = order.pairs_M, order.experts_T
        launch(gather_kernel, blocks_for_rows(M, C), BLOCK, y, x, *where)
    return y_MC


def sum_rows(y_MC: Array, order: ExpertOrder) -> Array:
    """Return x (N, C), the sums of the K rows of each token in y (M, C), float32 or bf16."""
    check_array("sum_rows", "slots", order.slots_NK, (None, None), ("int32",))
    N, K = order.slots_NK.shape
    check_array("sum_rows", "y", y_MC, (order.pairs_M.size, None), FLOATS)
    if on_host(y_MC, *order):
        return sum_rows_ref(wide(y_MC), order.slots_NK).astype(y_MC.dtype, copy=False)
    C = y_MC.shape[1]
    x_NC = empty(y_MC, (N, C))
    x, y = x_NC.reshape(-1), y_MC.reshape(-1)
    if C:
        sum_kernel = make_sum_rows_kernel(C, K, can_vectorize_rows(C, y, x))
        launch(sum_kernel, blocks_for_rows(N, C), BLOCK, x, y, order.slots_NK)
    return x_NC
