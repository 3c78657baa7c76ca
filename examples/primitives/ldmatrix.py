"""ldmatrix: a warp loads four 8 x 8 matrices from shared memory, here transposed."""

import numpy as np
from numba import cuda, uint16, uint32

from xtrain.kernels.primitives import ldmatrix_trans

STRIDE = 24  # elements from row to row: 48 bytes, so the 8 rows of a matrix share no bank
TILE = 16 * STRIDE


@cuda.jit
def transpose_kernel(y, x):
    """Grid 1, block 32. x: (16, 16) bf16 as uint16. y: its transpose as (16, 8) pairs, uint32."""
    smem = cuda.shared.array(TILE, uint16)
    matrices = cuda.local.array(4, uint32)
    lane = cuda.threadIdx.x
    for row in range(lane // 16, 16, 2):
        smem[row * STRIDE + lane % 16] = x[row, lane % 16]
    cuda.syncthreads()
    # Lane 8 m + r names row r of matrix m; matrix m has rows from 8 (m % 2), columns from 8 (m // 2)
    start = (lane % 16) * STRIDE + 8 * (lane // 16)
    ldmatrix_trans(matrices, smem, start, 0, 0)
    # Lane 4 g + t receives row g of the transposed matrices, columns 2 t and 2 t + 1
    for m in range(4):
        y[8 * (m // 2) + lane // 4, 4 * (m % 2) + lane % 4] = matrices[m]


def main():
    x = np.arange(256, dtype=np.uint16).reshape(16, 16)
    y = np.zeros((16, 8), np.uint32)
    transpose_kernel[1, 32](y, x)
    assert (y.view(np.uint16) == x.T).all()
    print("y = x.T, 16 x 16")


if __name__ == "__main__":
    main()
