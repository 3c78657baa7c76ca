"""Prefix sums of a block (Hillis and Steele): in round n, add what is 2^n places to the left."""

import numpy as np

from xtrain.simulator import cuda, types


@cuda.jit
def scan(y, x):
    sums = cuda.shared.array(64, types.int32)
    i = cuda.threadIdx.x
    sums[i] = x[i]
    cuda.syncthreads()
    distance = 1
    while distance < 64:
        left = 0
        if i >= distance:
            left = sums[i - distance]
        cuda.syncthreads()  # every thread has read: now they may write
        sums[i] += left
        cuda.syncthreads()  # every thread has written: now they may read
        distance *= 2
    y[i] = sums[i]


x = np.random.default_rng(0).integers(0, 10, 64).astype(np.int32)
y = np.zeros_like(x)
scan[1, 64](y, x)
print(y)
np.testing.assert_array_equal(y, np.cumsum(x))
