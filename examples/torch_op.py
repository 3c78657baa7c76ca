"""A Numba kernel as a PyTorch op: squared ReLU, y = max(x, 0)^2 (lessons/howto/torch_op.md)."""

# [start:op]
import numpy as np
import torch
from numba import cuda, float32

from xtrain.kernels.primitives import load1, store1
from xtrain.kernels.runtime.launch import empty_like, launch, on_host
from xtrain.torch import register_op

BLOCK = 256


def relu_squared_ref(x):
    return np.square(np.maximum(x, 0))


@cuda.jit
def relu_squared_kernel(y, x):
    """Grid ceil(n / BLOCK), block BLOCK. One element per thread; bf16 arrives as uint16."""
    i = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
    if i < y.size:
        v = max(load1(x, i), float32(0.0))
        store1(y, i, v * v)


def relu_squared_fwd(x):
    if on_host(x):
        return relu_squared_ref(x)
    y = empty_like(x)
    launch(relu_squared_kernel, -(-x.size // BLOCK), BLOCK, y.reshape(-1), x.reshape(-1))
    return y


relu_squared = register_op(
    "example::relu_squared(Tensor x) -> Tensor y",
    relu_squared_fwd,
    fake=torch.empty_like,
    backward=lambda dy, x: {"x": 2 * x.relu() * dy},
)
# [end:op]
