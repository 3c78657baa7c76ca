"""Swap the two middle axes of four: (B, T, H, D) <-> (B, H, T, D), in both directions the same kernel.

    y[b, j, i, d] = x[b, i, j, d]        backward: the same op on dy, since the swap is its own inverse

Matrix products over heads want the rows of one head together; everything else keeps BTHD, where splitting heads is
a view. Rows of D floats move whole, so reads and writes are both coalesced. Bytes moved: read x, write y.
"""

import numpy as np
from numba import cuda, int64

from ..device import Array
from ._launch import check_array, empty, launch, on_host

WARPS = 8  # rows of a block: 256 threads, one warp per row of D
MAX_GRID = 65535  # the hardware's limit in y and z; larger arrays are walked in strides


# ----------------------------------------------------------------------------- reference
def swap_heads_ref(x_BXYD):
    """-> (B, Y, X, D), always a copy"""
    return np.swapaxes(x_BXYD, 1, 2).copy()


# ----------------------------------------------------------------------------- kernel
@cuda.jit
def swap_heads_kernel(y_BYXD, x_BXYD):
    """Grid (X, tiles of Y, B), block (32, WARPS). Warp (i, j) of sequence b moves one row of D."""
    i, lane = int64(cuda.blockIdx.x), cuda.threadIdx.x
    B, _, Y, D = x_BXYD.shape
    for b in range(cuda.blockIdx.z, B, cuda.gridDim.z):
        for j in range(cuda.blockIdx.y * WARPS + cuda.threadIdx.y, Y, cuda.gridDim.y * WARPS):
            for d in range(lane, D, 32):
                y_BYXD[b, j, i, d] = x_BXYD[b, i, j, d]


# ----------------------------------------------------------------------------- launcher
def swap_heads(x_BXYD: Array) -> Array:
    """x (B, X, Y, D) float32, contiguous -> y (B, Y, X, D), contiguous and never a view of x."""
    check_array("swap_heads", "x", x_BXYD, (None,) * 4)
    if on_host(x_BXYD):
        return swap_heads_ref(x_BXYD)
    B, X, Y, D = x_BXYD.shape
    y_BYXD = empty(x_BXYD, (B, Y, X, D))
    grid = (X, min(-(-Y // WARPS), MAX_GRID), min(B, MAX_GRID))
    launch(swap_heads_kernel, grid, (32, WARPS), y_BYXD, x_BXYD)
    return y_BYXD
