"""Swap the two middle axes of four: (B, T, H, D) <-> (B, H, T, D), both ways the same kernel.

    forward    y[b, j, i, d] = x[b, i, j, d]
    backward   the same op on dy: the swap is its own inverse

Matrix products over heads want the rows of one head together; everything else keeps BTHD, where
splitting heads is a view. Rows of D floats move whole, so reads and writes are both coalesced.
Bytes moved: read x, write y.
"""

import numpy as np
from numba import cuda, int64

from ..device import Array
from ._launch import check, check_array, empty, launch, on_host

WARPS = 8  # rows of D in a block, one warp each
MAX_GRID_Y = 65535  # the hardware's limit


# ----------------------------------------------------------------------------- reference
def swap_heads_ref(x_BXYD):
    """-> (B, Y, X, D), always a copy"""
    return np.swapaxes(x_BXYD, 1, 2).copy()


# ----------------------------------------------------------------------------- kernel
@cuda.jit
def swap_heads_kernel(y_BYXD, x_BXYD):
    """Grid (B X, ceil(Y / WARPS)), block (32, WARPS). A warp moves row (b, i, j) of D floats."""
    row, lane = int64(cuda.blockIdx.x), cuda.threadIdx.x
    _, X, Y, D = x_BXYD.shape
    b, i = row // X, row % X
    j = cuda.blockIdx.y * WARPS + cuda.threadIdx.y
    if j < Y:
        for d in range(lane, D, 32):
            y_BYXD[b, j, i, d] = x_BXYD[b, i, j, d]


# ----------------------------------------------------------------------------- launcher
def swap_heads(x_BXYD: Array) -> Array:
    """x (B, X, Y, D) float32, contiguous -> y (B, Y, X, D), contiguous and never a view of x.

    Raises ValueError or TypeError on another shape or type.
    """
    check_array("swap_heads", "x", x_BXYD, (None,) * 4)
    if on_host(x_BXYD):
        return swap_heads_ref(x_BXYD)
    B, X, Y, D = x_BXYD.shape
    y_BYXD = empty(x_BXYD, (B, Y, X, D))
    tiles = -(-Y // WARPS)
    check(tiles <= MAX_GRID_Y, f"swap_heads: axis 2 of {x_BXYD.shape} is too long for one launch")
    launch(swap_heads_kernel, (B * X, tiles), (32, WARPS), y_BYXD, x_BXYD)
    return y_BYXD
