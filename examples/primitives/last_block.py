"""Cross-block merging: the last of several blocks adds what all of them have written, in one launch."""

import numpy as np
from numba import cuda, float32, int32

from xtrain.kernels.primitives import arrive_last, block_sum

BLOCK = 64


@cuda.jit
def sum_kernel(total, partial, counters, x):
    """Grid any, block BLOCK. total: (1,) float32, the sum of x. partial: a float32 per block.

    counters: one zero, int32. It is zero again after the launch, for the next one.
    """
    warps = cuda.shared.array(32, float32)
    last = cuda.shared.array(1, int32)
    v = float32(0.0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        v += x[i]
    v = block_sum(v, warps)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x] = v
    if arrive_last(counters, 0, cuda.gridDim.x, last) and cuda.threadIdx.x == 0:
        v = float32(0.0)
        for b in range(cuda.gridDim.x):  # in the order of the blocks: the same bits every run
            v += partial[b]
        total[0] = v


def main():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    total = np.zeros(1, np.float32)
    counters = np.zeros(1, np.int32)
    sum_kernel[5, BLOCK](total, np.zeros(5, np.float32), counters, x)
    np.testing.assert_allclose(total[0], x.sum(), rtol=1e-4)
    assert counters[0] == 0
    print("the sum of", x.size, "numbers by 5 blocks")


if __name__ == "__main__":
    main()
