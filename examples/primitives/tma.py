"""TMA: one thread copies a 64 x 64 tile to shared memory and from there to another tensor.

Compute capability 9.0.
"""

import ml_dtypes
import numpy as np
from numba import cuda

from xtrain.device import cupy
from xtrain.kernels.primitives import (
    SHARED_ALIGNMENT,
    SM_90A,
    acquire_map,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    shared_base,
    tensor_maps,
    tma_load,
    tma_store,
    tma_store_commit,
    tma_store_wait,
)
from xtrain.simulator import sim

TILE = 64  # rows and columns: the columns of a box are always 64, 128 bytes
TILE_BYTES = TILE * TILE * 2
SHARED = SHARED_ALIGNMENT + TILE_BYTES  # the barrier, then the tile


@cuda.jit(**SM_90A)
def copy_kernel(maps):
    """Grid (rows / TILE, columns / TILE), block 32. maps: of y and of x (1, rows, 1, columns)."""
    barrier = shared_base()
    tile = barrier + SHARED_ALIGNMENT
    column = TILE * cuda.blockIdx.y
    row = TILE * cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        mbarrier_init(barrier, 1)
        mbarrier_init_fence()
        acquire_map(maps, 0)
        acquire_map(maps, 1)
        mbarrier_arrive_expect_tx(barrier, TILE_BYTES)  # a box: zeros beyond the end count too
        tma_load(tile, maps, 1, barrier, column, row, 0, 0)
        mbarrier_wait(barrier, 0)  # the tile has arrived
        tma_store(maps, 0, tile, column, row, 0, 0)
        tma_store_commit()
        tma_store_wait()  # before the block ends, its shared memory has been read


def main():
    new = cupy().asarray if cupy() else sim  # the arrays of a GPU, or of the simulator
    x = np.random.default_rng(0).standard_normal((1, 100, 1, 128)).astype(ml_dtypes.bfloat16)
    x = new(x.view(np.uint16))
    y = new(np.zeros((1, 100, 1, 128), np.uint16))
    maps = tensor_maps((y, TILE), (x, TILE))
    copy_kernel[(2, 2), 32, 0, SHARED](maps)
    assert (y == x).all()
    print("copied 100 x 128 in boxes of 64 x 64")


if __name__ == "__main__":
    main()
