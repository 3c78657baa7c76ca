"""Swap the two middle axes of four: (B, T, H, D) <-> (B, H, T, D), both ways the same kernel.

    forward    y[b, j, i, d] = x[b, i, j, d]
    backward   the same op on dy: the swap is its own inverse

Matrix products over heads want the rows of one head together; everything else keeps BTHD, where
splitting heads is a view. Rows of D numbers move whole, so reads and writes are both coalesced.
Bytes moved: read x, write y. The numbers are float32 or bf16; their bits are copied.
"""

import functools

import numpy as np
from numba import cuda, int64, uint32

from ..device import Array
from ._flat import on_16_bytes
from ._launch import FLOATS, check, check_array, empty, launch, on_host
from ._ptx import kernel
from ._words import each_of, load_words4, load_words8, store_words4, store_words8

WARPS = 8  # of the plain kernel: rows of D in a block, one warp each
MAX_GRID_Y = 65535  # the hardware's limit
BLOCK = 256  # of the kernel in use: a thread per 16 bytes


# ----------------------------------------------------------------------------- reference
def swap_heads_ref(x_BXYD):
    """-> (B, Y, X, D), always a copy"""
    return np.swapaxes(x_BXYD, 1, 2).copy()


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def swap_heads_plain_kernel(y_BYXD, x_BXYD):
    """Grid (B X, ceil(Y / WARPS)), block (32, WARPS). A warp moves row (b, i, j) of D numbers, for any D."""
    row, lane = int64(cuda.blockIdx.x), cuda.threadIdx.x
    _, X, Y, D = x_BXYD.shape
    b, i = row // X, row % X
    j = cuda.blockIdx.y * WARPS + cuda.threadIdx.y
    if j < Y:
        for d in range(lane, D, 32):
            y_BYXD[b, j, i, d] = x_BXYD[b, i, j, d]


@functools.cache
def make_swap_kernel(D, each):
    """The kernel in use: 16 bytes, `each` numbers, at a time. D is a constant, so that dividing by it is cheap."""
    CHUNKS = D // each  # of a row
    fetch, put = (load_words8, store_words8) if each == 8 else (load_words4, store_words4)

    @kernel(BLOCK)
    def swap_heads_kernel(y, x, X, Y, chunks):
        """Grid ceil(chunks / BLOCK), block BLOCK. A thread moves one chunk of x. x, y: flat."""
        k = uint32(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x)
        if k < chunks:
            words = cuda.local.array(4, uint32)
            fetch(words, x, int64(k) * each)
            row, chunk = k // uint32(CHUNKS), k % uint32(CHUNKS)  # row (b, i, j) of x
            bi, j = row // uint32(Y), row % uint32(Y)
            b, i = bi // uint32(X), bi % uint32(X)
            put(y, (((int64(b) * Y + j) * X + i) * CHUNKS + chunk) * each, words)

    return swap_heads_kernel


# ----------------------------------------------------------------------------- launcher
def swap_heads(x_BXYD: Array) -> Array:
    """x (B, X, Y, D) float32 or bf16, contiguous -> y (B, Y, X, D), contiguous and never a view of x.

    Raises ValueError or TypeError on another shape or type.
    """
    check_array("swap_heads", "x", x_BXYD, (None,) * 4, FLOATS)
    if on_host(x_BXYD):
        return swap_heads_ref(x_BXYD)
    B, X, Y, D = x_BXYD.shape
    y_BYXD = empty(x_BXYD, (B, Y, X, D))
    each = each_of(x_BXYD)
    if D % each == 0 and on_16_bytes(x_BXYD, y_BYXD) and 0 < x_BXYD.size < 2**31 * each:
        chunks, y, x = x_BXYD.size // each, y_BYXD.reshape(-1), x_BXYD.reshape(-1)
        launch(make_swap_kernel(D, each), -(-chunks // BLOCK), BLOCK, y, x, X, Y, chunks)
    else:
        tiles = -(-Y // WARPS)
        check(
            tiles <= MAX_GRID_Y, f"swap_heads: axis 2 of {x_BXYD.shape} is too long for one launch"
        )
        launch(swap_heads_plain_kernel, (B * X, tiles), (32, WARPS), y_BYXD, x_BXYD)
    return y_BYXD
