"""A histogram: each block counts in shared memory, then adds its counts to the result."""

import numpy as np

from xtrain.simulator import cuda, types

BINS = 16


@cuda.jit
def histogram(counts, values):
    mine = cuda.shared.array(BINS, types.int32)
    t = cuda.threadIdx.x
    if t < BINS:
        mine[t] = 0
    cuda.syncthreads()

    i = cuda.grid(1)
    if i < values.size:
        # Without the atomic, two threads would read the same count and one addition would be lost.
        cuda.atomic.add(mine, values[i], 1)
    cuda.syncthreads()

    if t < BINS:
        cuda.atomic.add(counts, t, mine[t])


values = np.random.default_rng(0).binomial(BINS - 1, 0.4, 250).astype(np.int32)
counts = np.zeros(BINS, np.int32)
histogram[4, 64](counts, values)
print(counts)
np.testing.assert_array_equal(counts, np.bincount(values, minlength=BINS))
