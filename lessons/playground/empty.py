"""An empty kernel: 64 threads that do nothing yet."""

import numpy as np

from xtrain.simulator import cuda


@cuda.jit
def kernel(y, x):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = x[i]


x = np.arange(64, dtype=np.float32)
y = np.zeros_like(x)
kernel[2, 32](y, x)
print(y)
