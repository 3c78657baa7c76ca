"""mma.sync: a warp multiplies two bf16 matrices on the tensor cores, C (16, 8) = A (16, 16) B^T."""

import ml_dtypes
import numpy as np
from numba import cuda, float32, uint32

from xtrain.kernels.primitives import mma_bf16


# [start:kernel]
@cuda.jit
def multiply_kernel(c, a, b):
    """Grid 1, block 32. c: (16, 8) float32. a, b: (16, 8) and (8, 8) pairs of bf16 as uint32.

    Lane 4 g + t holds pair t or t + 4 of row g or g + 8: the docstring of mma_bf16 has the layout.
    """
    fa = cuda.local.array(4, uint32)
    fb = cuda.local.array(2, uint32)
    acc = cuda.local.array(4, float32)
    g = cuda.threadIdx.x // 4
    t = cuda.threadIdx.x % 4
    for i in range(4):
        fa[i] = a[g + 8 * (i % 2), t + 4 * (i // 2)]
        acc[i] = float32(0.0)
    for i in range(2):
        fb[i] = b[g, t + 4 * i]
    mma_bf16(acc, fa, fb)  # acc += A B^T; a longer row of A calls it for every 16 columns
    for i in range(4):
        c[g + 8 * (i // 2), 2 * t + i % 2] = acc[i]


# [end:kernel]


def main():
    random = np.random.default_rng(0)
    a = random.standard_normal((16, 16)).astype(ml_dtypes.bfloat16)
    b = random.standard_normal((8, 16)).astype(ml_dtypes.bfloat16)
    c = np.zeros((16, 8), np.float32)
    multiply_kernel[1, 32](c, a.view(np.uint32), b.view(np.uint32))
    np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32).T, atol=1e-5)
    print("C = A B^T on the tensor cores")


if __name__ == "__main__":
    main()
