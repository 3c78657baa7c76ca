"""A matrix product in tiles: each element of a and b is read from global memory once per tile."""

import numpy as np

from xtrain.simulator import cuda, types

TILE = 8


@cuda.jit
def product(c, a, b):
    a_tile = cuda.shared.array((TILE, TILE), types.float32)
    b_tile = cuda.shared.array((TILE, TILE), types.float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    row = cuda.blockIdx.y * TILE + ty
    column = cuda.blockIdx.x * TILE + tx
    total = types.float32(0)
    for first in range(0, a.shape[1], TILE):
        a_tile[ty, tx] = a[row, first + tx]
        b_tile[ty, tx] = b[first + ty, column]
        cuda.syncthreads()
        for k in range(TILE):
            total += a_tile[ty, k] * b_tile[k, tx]
        cuda.syncthreads()  # the next tile overwrites this one
    c[row, column] = total


random = np.random.default_rng(0)
a = random.standard_normal((16, 24)).astype(np.float32)
b = random.standard_normal((24, 16)).astype(np.float32)
c = np.zeros((16, 16), np.float32)
product[(2, 2), (TILE, TILE)](c, a, b)
print("largest error:", np.abs(c - a @ b).max())
np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-5)
