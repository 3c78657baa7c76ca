"""The sum of a block, as a tree. It has a race: which line needs a barrier after it?"""

import numpy as np

from xtrain.simulator import cuda, types


@cuda.jit
def block_sum(total, x):
    partial = cuda.shared.array(128, types.float32)
    i = cuda.threadIdx.x
    partial[i] = x[i]
    cuda.syncthreads()
    half = 64
    while half > 0:
        if i < half:
            other = partial[i + half]
            partial[i] += other
        half //= 2
    if i == 0:
        total[0] = partial[0]


x = np.arange(128, dtype=np.float32)
total = np.zeros(1, np.float32)
block_sum[1, 128](total, x)
print("sum:", total[0])
assert total[0] == x.sum()
