"""softmax of each row: a warp per row finds the maximum, then the sum."""

import math

import numpy as np

from xtrain.simulator import cuda, types


@cuda.jit
def softmax(y, x):
    row = cuda.blockIdx.x
    lane = cuda.threadIdx.x
    largest = types.float32(-math.inf)
    for c in range(lane, x.shape[1], 32):
        largest = max(largest, x[row, c])
    for mask in (16, 8, 4, 2, 1):
        largest = max(largest, cuda.shfl_xor_sync(0xFFFFFFFF, largest, mask))

    total = types.float32(0)
    for c in range(lane, x.shape[1], 32):
        total += math.exp(x[row, c] - largest)
    for mask in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, mask)

    for c in range(lane, x.shape[1], 32):
        y[row, c] = math.exp(x[row, c] - largest) / total


x = np.random.default_rng(0).standard_normal((3, 100)).astype(np.float32)
y = np.zeros_like(x)
softmax[3, 32](y, x)
right = np.exp(x - x.max(1, keepdims=True))
right /= right.sum(1, keepdims=True)
print("sums of the rows:", y.sum(1))
np.testing.assert_allclose(y, right, rtol=1e-5)
