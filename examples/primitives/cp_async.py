"""cp.async: copies from global to shared memory that arrive while the thread computes."""

import ml_dtypes
import numpy as np
from numba import cuda, float32, uint16

from xtrain.kernels.primitives import (
    cp_async16,
    cp_async_commit,
    cp_async_wait,
    load8_shared,
)

STAGES = 3  # rows in shared memory
IN_FLIGHT = STAGES - 2  # groups that may be in flight when a row is read
WIDTH = 256  # columns: 8 of each of 32 lanes
RING = STAGES * WIDTH


@cuda.jit
def sum_rows_kernel(y, x, rows):
    """Grid 1, block 32. y: (WIDTH,) float32, the sum of the rows of x: flat (rows WIDTH), bf16."""
    ring = cuda.shared.array(RING, uint16)
    values = cuda.local.array(8, float32)
    total = cuda.local.array(8, float32)
    first = 8 * cuda.threadIdx.x
    for j in range(8):
        total[j] = float32(0.0)
    for row in range(STAGES - 1):
        cp_async16(ring, row * WIDTH + first, x, row * WIDTH + first, row < rows)
        cp_async_commit()
    for row in range(rows):
        cp_async_wait(IN_FLIGHT)  # this row has arrived; the argument must be one constant
        load8_shared(values, ring, row % STAGES * WIDTH + first)  # what this lane copied
        ahead = row + STAGES - 1
        cp_async16(ring, ahead % STAGES * WIDTH + first, x, ahead * WIDTH + first, ahead < rows)
        cp_async_commit()  # also a group without bytes, so that the count in flight is the same
        for j in range(8):
            total[j] += values[j]
    for j in range(8):
        y[first + j] = total[j]


def main():
    x = np.random.default_rng(0).standard_normal((7, WIDTH)).astype(ml_dtypes.bfloat16)
    y = np.zeros(WIDTH, np.float32)
    sum_rows_kernel[1, 32](y, x.reshape(-1).view(np.uint16), np.int32(len(x)))
    np.testing.assert_allclose(y, x.astype(np.float32).sum(0), atol=1e-5)
    print("the sum of", len(x), "rows")


if __name__ == "__main__":
    main()
