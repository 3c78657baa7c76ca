"""A bias of a linear layer: y = x w^T + b.   b: (O,)   y, dy: (N, O)

    forward    every row of y is b, in y's dtype, before the matrix product, which adds to it
               (beta = 1 in gemm.py): the sum is in float32, and y is rounded once more
    backward   db = sum_n dy

y and dy are float32 or bf16, b and db float32. The sum over rows is that of a norm weight's
gradient (add_column_sums in primitives/column_sums.py): a fixed order, no atomics. In a product of few
rows gemv.py adds b itself, in float32.
Bytes moved, forward: write y, which the product then reads. Backward: read dy. Both are small next
to the product.
"""

import functools

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
from .runtime.launch import FLOATS, check_array, launch, on_host, wide


# ----------------------------------------------------------------------------- reference
def fill_rows_ref(y_NO, b_O):
    """Set every row of y to b, in place."""
    y_NO[...] = b_O


def bias_bwd_ref(dy_NO):
    """Return db (O,)."""
    return dy_NO.sum(0)


# ----------------------------------------------------------------------------- kernel
@functools.cache
def make_fill_rows_kernel(O, vectorized):  # noqa: E741
    """Return the kernel for rows of O columns.

    vectorized: 16-byte accesses, see can_vectorize_rows.
    """
    row_and_column, gap = make_row_and_column(O)

    @kernel(BLOCK)
    def fill_rows_kernel(y, b_O, N):
        """Grid blocks_for_rows(N, O), block BLOCK. y: flat (N O)."""
        b = cuda.local.array(CHUNK, float32)
        n, o = row_and_column()
        if n < N:
            load(b, b_O, o, gap, O, vectorized)
            store(y, n * O + o, gap, n * O + O, b, vectorized)

    return fill_rows_kernel


# ----------------------------------------------------------------------------- launchers
def fill_rows(y_NO: Array, b_O: Array) -> None:
    """Set every row of y (N, O), float32 or bf16, contiguous, to b (O,), float32."""
    check_array("bias", "y", y_NO, (None, None), FLOATS)
    N, O = y_NO.shape  # noqa: E741
    check_array("bias", "b", b_O, (O,))
    if on_host(y_NO, b_O):
        fill_rows_ref(y_NO, b_O)
    elif N and O:
        y = y_NO.reshape(-1)
        fill = make_fill_rows_kernel(O, can_vectorize_rows(O, y, b_O))
        launch(fill, blocks_for_rows(N, O), BLOCK, y, b_O, N)


def bias_bwd(dy_NO: Array, db_O: Array) -> None:
    """Add the sum over the rows of dy (N, O), float32 or bf16, to db (O,), float32.

    The same bits in every run.
    """
    check_array("bias backward", "dy", dy_NO, (None, None), FLOATS, strided=True)
    check_array("bias backward", "db", db_O, (dy_NO.shape[1],))
    if on_host(dy_NO, db_O):
        db_O += bias_bwd_ref(wide(dy_NO)).astype(db_O.dtype, copy=False)
    elif dy_NO.size:
        add_column_sums(dy_NO if dy_NO.flags.c_contiguous else dy_NO.copy(), db_O)
