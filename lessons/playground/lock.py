"""A lock of which one fence is missing: the next block may not see the new total."""

import numpy as np

from xtrain.simulator import cuda


@cuda.jit
def locked_sum(total, lock, x):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    cuda.threadfence()  # acquire: see what the last owner wrote
    before = total[0]
    total[0] = before + x[cuda.blockIdx.x]

    cuda.atomic.exch(lock, 0, 0)


x = np.arange(4, dtype=np.int32)
total = np.zeros(1, np.int32)
lock = np.zeros(1, np.int32)
locked_sum[4, 1](total, lock, x)
print("sum:", total[0])
assert total[0] == x.sum()
