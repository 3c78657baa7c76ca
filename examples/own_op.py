"""Squared ReLU (So et al. 2021), the activation of a plain MLP.   x, y: any shape

    forward    y = max(x, 0)^2
    backward   dy/dx = 2 max(x, 0), so   dx = 2 max(x, 0) dy

Bytes moved, forward: read x, write y. Backward: read x and dy, write dx. Memory traffic alone determines the speed: see
kernels/primitives/flat.py.
"""

# [start:imports]
import numpy as np
from numba import cuda, float32

from xtrain.device import Array
from xtrain.kernels.primitives.flat import (
    BLOCK,
    CHUNK,
    GAP,
    STEPS,
    STRIDE,
    can_vectorize,
    first_element,
    launch_flat,
    load,
    store,
)
from xtrain.kernels.primitives.ptx import device, kernel
from xtrain.kernels.runtime.launch import FLOATS, check_array, empty_like, on_host
from xtrain.nn.autograd import Function

# [end:imports]


# [start:reference]
def relu_squared_ref(x):
    return np.square(np.maximum(x, 0))


def relu_squared_bwd_ref(dy, x):
    return 2 * np.maximum(x, 0) * dy


# [end:reference]


# [start:naive]
@cuda.jit
def relu_squared_fwd_naive_kernel(y_n, x_n):
    """Grid ceil(n / BLOCK), block BLOCK. One element per thread."""
    i = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
    if i < y_n.size:
        v = x_n[i] if x_n[i] > float32(0.0) else float32(0.0)
        y_n[i] = v * v


# [end:naive]


# [start:kernels]
@device
def positive(v):
    return v if v > float32(0.0) else float32(0.0)


@device
def fwd_chunks(y_n, x_n, first, vectorized):
    x = cuda.local.array((STEPS, CHUNK), float32)
    n = y_n.size
    for s in range(STEPS):  # all loads before the first store, so that all are in flight
        load(x[s], x_n, first + s * STRIDE, GAP, n, vectorized)
    for s in range(STEPS):
        for j in range(CHUNK):
            v = positive(x[s, j])
            x[s, j] = v * v
        store(y_n, first + s * STRIDE, GAP, n, x[s], vectorized)


@kernel(BLOCK)
def relu_squared_fwd_kernel(y_n, x_n, aligned):
    """Grid ceil(n / TILE), block BLOCK."""
    first = first_element()
    if can_vectorize(first, y_n.size, aligned):
        fwd_chunks(y_n, x_n, first, True)
    else:
        fwd_chunks(y_n, x_n, first, False)


@device
def bwd_chunks(dx_n, dy_n, x_n, first, vectorized):
    x = cuda.local.array((STEPS, CHUNK), float32)
    d = cuda.local.array((STEPS, CHUNK), float32)
    n = dx_n.size
    for s in range(STEPS):
        load(x[s], x_n, first + s * STRIDE, GAP, n, vectorized)
        load(d[s], dy_n, first + s * STRIDE, GAP, n, vectorized)
    for s in range(STEPS):
        for j in range(CHUNK):
            d[s, j] *= float32(2.0) * positive(x[s, j])
        store(dx_n, first + s * STRIDE, GAP, n, d[s], vectorized)


@kernel(BLOCK)
def relu_squared_bwd_kernel(dx_n, dy_n, x_n, aligned):
    """Grid ceil(n / TILE), block BLOCK."""
    first = first_element()
    if can_vectorize(first, dx_n.size, aligned):
        bwd_chunks(dx_n, dy_n, x_n, first, True)
    else:
        bwd_chunks(dx_n, dy_n, x_n, first, False)


# [end:kernels]


# [start:launchers]
def relu_squared_fwd(x: Array) -> Array:
    """x float32 or bf16 of any shape -> max(x, 0)^2"""
    check_array("relu_squared", "x", x, x.shape, FLOATS)
    if on_host(x):
        return relu_squared_ref(x)
    y = empty_like(x)
    launch_flat(relu_squared_fwd_kernel, y, x)
    return y


def relu_squared_bwd(dy: Array, x: Array) -> Array:
    """-> dx of x's shape and type."""
    check_array("relu_squared backward", "x", x, x.shape, FLOATS)
    check_array("relu_squared backward", "dy", dy, x.shape, (x.dtype.name,))
    if on_host(dy, x):
        return relu_squared_bwd_ref(dy, x)
    dx = empty_like(x)
    launch_flat(relu_squared_bwd_kernel, dx, dy, x)
    return dx


# [end:launchers]


# [start:function]
class ReLUSquared(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save(x)
        return relu_squared_fwd(x)

    @staticmethod
    def backward(ctx, dy):
        return relu_squared_bwd(dy, *ctx.saved)


relu_squared = ReLUSquared.apply
# [end:function]
