"""16-byte accesses: a thread loads 8 bf16 in one instruction, and stores them in one."""

import ml_dtypes
import numpy as np
from numba import cuda, float32

from xtrain.kernels.primitives import load8, store8

BLOCK = 128


# [start:kernel]
@cuda.jit
def double_kernel(y, x):
    """Grid ceil(n / 8 / BLOCK), block BLOCK. x, y: n float32 or bf16, n a multiple of 8."""
    values = cuda.local.array(8, float32)
    i = 8 * (cuda.blockIdx.x * BLOCK + cuda.threadIdx.x)
    if i < x.size:
        load8(values, x, i)  # float32: two accesses
        for j in range(8):
            values[j] *= float32(2.0)
        store8(y, i, values)  # rounded to nearest even


# [end:kernel]


def main():
    x = np.random.default_rng(0).standard_normal(1024).astype(ml_dtypes.bfloat16)
    y = np.zeros_like(x)
    double_kernel[1, BLOCK](y.view(np.uint16), x.view(np.uint16))
    assert (y == x + x).all()
    print("y = 2 x for", x.size, "bf16")


if __name__ == "__main__":
    main()
