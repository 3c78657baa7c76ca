"""A transposed tile. Correct, and slow: each read of a column meets one bank of shared memory."""

import numpy as np

from xtrain.simulator import check, cuda, types

ROW = 32  # 33 puts the elements of a column into different banks


@cuda.jit
def transpose(y, x):
    tile = cuda.shared.array((32, ROW), types.float32)
    column = cuda.threadIdx.x
    for row in range(cuda.threadIdx.y, 32, cuda.blockDim.y):
        tile[row, column] = x[row, column]
    cuda.syncthreads()
    for row in range(cuda.threadIdx.y, 32, cuda.blockDim.y):
        y[row, column] = tile[column, row]


x = np.arange(1024, dtype=np.float32).reshape(32, 32)
y = np.zeros_like(x)
slow = check(transpose, 1, (32, 4), y, x, enable={"bank_conflict"})
np.testing.assert_array_equal(y, x.T)
for finding in slow:
    raise finding
