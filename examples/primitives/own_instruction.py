"""An instruction that xtrain does not have: dp4a, four products of int8 and their sum."""

import numpy as np
from numba import cuda, int32, uint32

from xtrain.kernels.primitives import instruction
from xtrain.simulator import simulates

# [start:own]
dp4a = instruction(
    "dp4a",
    "dp4a.s32.s32 $0, $1, $2, $3;",
    int32,
    doc="""Return c plus the sum of the products of the four int8 of a and b. "dp4a" """,
    pure=True,
    a=uint32,
    b=uint32,
    c=int32,
)


@simulates(dp4a)
def simulated_dp4a(thread, site, a, b, c):
    a, b = (np.array([x], np.uint32).view(np.int8).astype(np.int32) for x in (a, b))
    return np.int32(c + (a * b).sum())


# [end:own]


@cuda.jit
def dot_kernel(y, a, b):
    """Grid 1, block len(y). y[i] = the product of row i of a and b: int8, (n, 4 K) as (n, K) uint32."""
    i = cuda.threadIdx.x
    total = int32(0)
    for k in range(a.shape[1]):
        total = dp4a(a[i, k], b[i, k], total)
    y[i] = total


def main():
    a, b = np.random.default_rng(0).integers(-128, 128, (2, 32, 64)).astype(np.int8)
    y = np.zeros(32, np.int32)
    dot_kernel[1, 32](y, a.view(np.uint32), b.view(np.uint32))
    assert (y == (a.astype(np.int32) * b).sum(1)).all()
    print("32 products of 64 int8")


if __name__ == "__main__":
    main()
