"""The sum of a warp without memory: lanes read each other's registers."""

import numpy as np

from xtrain.simulator import cuda, types


@cuda.jit
def warp_sums(totals, x):
    lane = cuda.threadIdx.x % 32
    warp = cuda.threadIdx.x // 32
    value = x[cuda.threadIdx.x]
    distance = 16
    while distance > 0:
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, distance)
        distance //= 2
    if lane == 0:
        totals[warp] = types.int32(value)


x = np.arange(64, dtype=np.int32)
totals = np.zeros(2, np.int32)
warp_sums[1, 64](totals, x)
print(totals)
np.testing.assert_array_equal(totals, x.reshape(2, 32).sum(1))
