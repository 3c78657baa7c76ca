"""wgmma: 128 threads multiply two 64 x 64 tiles that TMA has brought, S = Q K^T.

Compute capability 9.0.
"""

import ml_dtypes
import numpy as np
from numba import cuda, float32

from xtrain.device import cupy
from xtrain.kernels.primitives import (
    SHARED_ALIGNMENT,
    SM_90A,
    WARPGROUP,
    acquire_map,
    along_rows,
    make_descriptor,
    make_wgmma,
    make_wgmma_wait,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    shared_base,
    tensor_maps,
    tma_load,
)
from xtrain.simulator import sim

D = 64  # columns of q and k: one panel
TILE_BYTES = 64 * D * 2
Q = SHARED_ALIGNMENT  # byte of the tile in shared memory; the barrier is at 0
K = Q + TILE_BYTES
SHARED = K + TILE_BYTES

describe = make_descriptor(TILE_BYTES)
multiply = make_wgmma(64, along_rows(D, TILE_BYTES), along_rows(D, TILE_BYTES))
wait_for_product = make_wgmma_wait(64, 0)


@cuda.jit(**SM_90A)
def scores_kernel(s, maps):
    """Grid 1, block 128. s: (64, 64) float32. maps: of q and k, both (1, 64, 1, 64) bf16."""
    acc = cuda.local.array(32, float32)
    base = shared_base()
    thread = cuda.threadIdx.x
    if thread == 0:
        mbarrier_init(base, 1)
        mbarrier_init_fence()
    cuda.syncthreads()
    if thread == 0:
        acquire_map(maps, 0)
        acquire_map(maps, 1)
        mbarrier_arrive_expect_tx(base, 2 * TILE_BYTES)
        tma_load(base + Q, maps, 0, base, 0, 0, 0, 0)
        tma_load(base + K, maps, 1, base, 0, 0, 0, 0)
    mbarrier_wait(base, 0)
    multiply(acc, describe(base + Q), describe(base + K))
    wait_for_product(acc)
    row = 16 * (thread // 32) + thread % 32 // 4
    for j in range(8):
        for i in range(4):
            s[row + 8 * (i // 2), 8 * j + 2 * (thread % 4) + i % 2] = acc[4 * j + i]


def main():
    new = cupy().asarray if cupy() else sim  # the arrays of a GPU, or of the simulator
    q, k = np.random.default_rng(0).standard_normal((2, 64, D)).astype(ml_dtypes.bfloat16)
    tiles = [new(x.view(np.uint16).reshape(1, 64, 1, D)) for x in (q, k)]
    maps = tensor_maps((tiles[0], 64), (tiles[1], 64))
    s = np.zeros((64, 64), np.float32)
    scores_kernel[1, WARPGROUP, 0, SHARED](s, maps)
    np.testing.assert_allclose(s, q.astype(np.float32) @ k.astype(np.float32).T, atol=1e-4)
    print("S = Q K^T, 64 x 64 x 64, by one warpgroup")


if __name__ == "__main__":
    main()
