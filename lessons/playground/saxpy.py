"""saxpy, y = a x + y: one thread for each element."""

import numpy as np

from xtrain.simulator import cuda


@cuda.jit
def saxpy(y, a, x):
    i = cuda.grid(1)  # blockIdx.x * blockDim.x + threadIdx.x
    if i < y.size:  # the last block is longer than the rest of y
        y[i] = a * x[i] + y[i]


x = np.linspace(0, 1, 100, dtype=np.float32)
y = np.ones(100, np.float32)
right = np.float32(2) * x + y

saxpy[4, 32](y, np.float32(2), x)
np.testing.assert_array_equal(y, right)
print("100 elements, 128 threads: correct")
