"""64 threads hand their numbers to the left, four times."""

import numpy as np

from xtrain.simulator import cuda


@cuda.jit
def rotate(x):
    i = cuda.threadIdx.x
    for turn in range(4):
        right = x[(i + 1) % 64]

        x[i] = right
        cuda.syncthreads()


x = np.arange(64, dtype=np.int32)
rotate[1, 64](x)
print(x)
assert x[0] == 4 and x[63] == 3
