"""DoRA (Liu et al. 2024): each column of a product is scaled.   y, z: (N, O)   m, c, bias: (O,)

    forward    y = z (m c) + bias      z = x v^T, v = w + f b a the adapted matrix, m trained
               c_o = 1 / |v_o|         a constant of the gradient, as in the paper
    backward   dz = dy (m c)           dm_o = c_o sum_n dy_no z_no

v never exists: with p = a w^T (r, O) and q = a a^T b^T (r, O)

    |v_o|^2 = |w_o|^2 + f sum_r b_or (2 p_ro + f q_ro)

y and z are float32 or bf16, everything else float32. The sum over rows is that of a bias's gradient.
Bytes moved, forward: read z, write y. Backward: read dy and z, write dz and their product in
float32, and read that.
"""

import functools
import math

import numpy as np

from ..device import Array
from .primitives.column_sums import add_column_sums
from .primitives.flat import (
    BLOCK,
    CHUNK,
    blocks_for_rows,
    can_vectorize_rows,
    load,
    make_row_and_column,
    store,
)
from .primitives.ptx import kernel
from .runtime.compiler import cuda, float32
from .runtime.launch import FLOATS, check_array, empty, empty_like, launch, on_host, wide

TINY = 1e-30  # of |v_o|^2, at least: the product is 0 where v_o is


# ----------------------------------------------------------------------------- reference
def inverse_norms_ref(w2_O, p_rO, q_rO, b_Or, factor):
    """Return c (O,)."""
    v2_O = w2_O + factor * (b_Or.T * (2 * p_rO + factor * q_rO)).sum(0)
    return 1 / np.sqrt(np.maximum(v2_O, TINY))


def scale_columns_ref(z_NO, m_O, c_O, bias_O=None):
    """Return y (N, O)."""
    y_NO = z_NO * (m_O * c_O)
    return y_NO if bias_O is None else y_NO + bias_O


def scale_columns_bwd_ref(dy_NO, z_NO, m_O, c_O):
    """Return dz (N, O), dm (O,)."""
    return dy_NO * (m_O * c_O), (dy_NO * z_NO * c_O).sum(0)


# ----------------------------------------------------------------------------- kernels
@kernel(BLOCK)
def inverse_norms_kernel(c_O, w2_O, p_rO, q_rO, b_Or, factor):
    """Grid ceil(O / BLOCK), block BLOCK. A thread owns a row of v."""
    o = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
    if o < c_O.shape[0]:
        f = float32(factor)
        v2 = w2_O[o]
        for r in range(b_Or.shape[1]):
            v2 += f * b_Or[o, r] * (float32(2.0) * p_rO[r, o] + f * q_rO[r, o])
        c_O[o] = float32(1.0) / math.sqrt(max(v2, float32(TINY)))


@functools.cache
def make_scale_columns_kernel(O, vectorized, has_bias):  # noqa: E741
    """Return the kernel for rows of O columns.

    vectorized: 16-byte accesses, see can_vectorize_rows.
    """
    row_and_column, gap = make_row_and_column(O)

    @kernel(BLOCK)
    def scale_columns_kernel(y, z, m_O, c_O, bias_O, N):
        """Grid blocks_for_rows(N, O), block BLOCK. y, z: flat (N O). bias: m without one."""
        x = cuda.local.array(CHUNK, float32)
        m = cuda.local.array(CHUNK, float32)
        c = cuda.local.array(CHUNK, float32)
        n, o = row_and_column()
        if n < N:
            load(x, z, n * O + o, gap, n * O + O, vectorized)
            load(m, m_O, o, gap, O, vectorized)
            load(c, c_O, o, gap, O, vectorized)
            for j in range(CHUNK):
                x[j] = x[j] * (m[j] * c[j])
            if has_bias:
                load(m, bias_O, o, gap, O, vectorized)
                for j in range(CHUNK):
                    x[j] = x[j] + m[j]
            store(y, n * O + o, gap, n * O + O, x, vectorized)

    return scale_columns_kernel


@functools.cache
def make_scale_columns_bwd_kernel(O, vectorized):  # noqa: E741
    """Return the kernel for rows of O columns, as above."""
    row_and_column, gap = make_row_and_column(O)

    @kernel(BLOCK)
    def scale_columns_bwd_kernel(dz, terms, dy, z, m_O, c_O, N):
        """Grid blocks_for_rows(N, O), block BLOCK. terms: of dm, flat (N O), as dz, dy and z."""
        d = cuda.local.array(CHUNK, float32)
        x = cuda.local.array(CHUNK, float32)
        m = cuda.local.array(CHUNK, float32)
        c = cuda.local.array(CHUNK, float32)
        n, o = row_and_column()
        if n < N:
            first = n * O + o
            end = n * O + O
            load(d, dy, first, gap, end, vectorized)
            load(x, z, first, gap, end, vectorized)
            load(m, m_O, o, gap, O, vectorized)
            load(c, c_O, o, gap, O, vectorized)
            for j in range(CHUNK):
                x[j] = d[j] * x[j] * c[j]
                d[j] = d[j] * (m[j] * c[j])
            store(dz, first, gap, end, d, vectorized)
            store(terms, first, gap, end, x, vectorized)

    return scale_columns_bwd_kernel


# ----------------------------------------------------------------------------- launchers
def inverse_norms(
    c_O: Array, w2_O: Array, p_rO: Array, q_rO: Array, b_Or: Array, factor: float
) -> None:
    """Set c (O,) to 1 / the norm of each row of w + factor b a.

    w2 (O,): the squared norms of w's rows. p, q (r, O): a w^T and a a^T b^T. All float32.
    """
    check_array("dora", "c", c_O, (None,))
    O = len(c_O)  # noqa: E741
    check_array("dora", "w2", w2_O, (O,))
    check_array("dora", "b", b_Or, (O, None))
    for name, x in (("p", p_rO), ("q", q_rO)):
        check_array("dora", name, x, b_Or.shape[::-1])
    if on_host(c_O, w2_O, p_rO, q_rO, b_Or):
        c_O[...] = inverse_norms_ref(w2_O, p_rO, q_rO, b_Or, c_O.dtype.type(factor))
    elif O:
        grid = -(-O // BLOCK)
        launch(inverse_norms_kernel, grid, BLOCK, c_O, w2_O, p_rO, q_rO, b_Or, float(factor))


def scale_columns(z_NO: Array, m_O: Array, c_O: Array, bias_O: Array | None = None) -> Array:
    """Return z m c + bias, (N, O) like z: float32 or bf16, contiguous. m, c, bias: float32."""
    check_array("dora", "z", z_NO, (None, None), FLOATS)
    N, O = z_NO.shape  # noqa: E741
    vectors = [m_O, c_O] if bias_O is None else [m_O, c_O, bias_O]
    for x in vectors:
        check_array("dora", "m, c or bias", x, (O,))
    if on_host(z_NO, *vectors):
        return scale_columns_ref(wide(z_NO), *vectors).astype(z_NO.dtype, copy=False)
    y_NO = empty_like(z_NO)
    if N and O:
        y, z = y_NO.reshape(-1), z_NO.reshape(-1)
        vectorized = can_vectorize_rows(O, y, z, *vectors)
        scale = make_scale_columns_kernel(O, vectorized, bias_O is not None)
        launch(scale, blocks_for_rows(N, O), BLOCK, y, z, m_O, c_O, vectors[-1], N)
    return y_NO


def scale_columns_bwd(dy_NO: Array, z_NO: Array, m_O: Array, c_O: Array, dm_O: Array) -> Array:
    """Return dz (N, O), like dy, and add to dm (O,) float32. Arguments as in scale_columns.

    The same bits in every run.
    """
    check_array("dora backward", "dy", dy_NO, (None, None), FLOATS)
    check_array("dora backward", "z", z_NO, dy_NO.shape, FLOATS)
    N, O = dy_NO.shape  # noqa: E741
    for x in (m_O, c_O, dm_O):
        check_array("dora backward", "m, c or dm", x, (O,))
    if on_host(dy_NO, z_NO, m_O, c_O, dm_O):
        dz_NO, of_m_O = scale_columns_bwd_ref(wide(dy_NO), wide(z_NO), m_O, c_O)
        dm_O += of_m_O.astype(dm_O.dtype, copy=False)
        return dz_NO.astype(dy_NO.dtype, copy=False)
    dz_NO = empty_like(dy_NO)
    if N and O:
        terms_NO = empty(dy_NO, (N, O), np.float32)
        flat = [x.reshape(-1) for x in (dz_NO, terms_NO, dy_NO, z_NO)]
        scale = make_scale_columns_bwd_kernel(O, can_vectorize_rows(O, *flat, m_O, c_O))
        launch(scale, blocks_for_rows(N, O), BLOCK, *flat, m_O, c_O, N)
        add_column_sums(terms_NO, dm_O)
    return dz_NO
