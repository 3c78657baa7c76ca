"""Add and scale, element by element, on arrays of any shape.

    add      y = a + b          da = db = dy
    add_into a += b             how a gradient that is used twice accumulates
    scale    y = factor x       dx = factor dy

Every backward is one of these ops again. An array of any shape is read as one run of n elements,
and a thread owns EACH neighbours. Bytes moved, per element: two reads and a write for add, one read
and a write for scale.
"""

import numpy as np
from numba import cuda, int64

from ..device import Array
from ._launch import check_array, empty_like, launch, on_host

BLOCK = 256
EACH = 4  # four neighbours per thread: 3.9 of the 4.2 TB/s that a copy reaches on an H200; one: 2.4
TILE = BLOCK * EACH


# ----------------------------------------------------------------------------- reference
def add_ref(a, b):
    return a + b


def scale_ref(x, factor):
    return x * x.dtype.type(factor)


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def add_kernel(y_n, a_n, b_n):
    """Grid ceil(n / TILE), block BLOCK. y may be a: one thread reads and writes an element."""
    first = (int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x) * EACH
    for j in range(EACH):
        i = first + j
        if i < y_n.size:
            y_n[i] = a_n[i] + b_n[i]


@cuda.jit
def scale_kernel(y_n, x_n, factor):
    """Grid ceil(n / TILE), block BLOCK."""
    first = (int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x) * EACH
    for j in range(EACH):
        i = first + j
        if i < y_n.size:
            y_n[i] = x_n[i] * factor


@cuda.jit
def scale_into_kernel(x_n, factor_1):
    """Grid ceil(n / TILE), block BLOCK. The factor is read on the device: no copy to the host."""
    first = (int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x) * EACH
    factor = factor_1[0]
    for j in range(EACH):
        i = first + j
        if i < x_n.size:
            x_n[i] = x_n[i] * factor


# ----------------------------------------------------------------------------- launchers
def add_fwd(a: Array, b: Array) -> Array:
    """a + b, both float32 of one shape."""
    check_array("add", "a", a, a.shape)
    check_array("add", "b", b, a.shape)
    if on_host(a, b):
        return add_ref(a, b)
    y = empty_like(a)
    _launch_flat(add_kernel, y, a, b)
    return y


def add_into(a: Array, b: Array) -> None:
    """a += b in place, both float32 of one shape."""
    check_array("add_into", "a", a, a.shape)
    check_array("add_into", "b", b, a.shape)
    if on_host(a, b):
        a += b
    else:
        _launch_flat(add_kernel, a, a, b)


def scale_fwd(x: Array, factor: float) -> Array:
    """factor * x, x float32 of any shape, factor a Python float."""
    check_array("scale", "x", x, x.shape)
    if on_host(x):
        return scale_ref(x, factor)
    y = empty_like(x)
    _launch_flat(scale_kernel, y, x, scalar=np.float32(factor))
    return y


def scale_into(x: Array, factor_1: Array) -> None:
    """x *= factor in place; the factor is an array of one element in the place where x is."""
    check_array("scale_into", "x", x, x.shape)
    factor_1 = factor_1.reshape(-1)
    check_array("scale_into", "factor", factor_1, (1,))
    if on_host(x, factor_1):
        x *= factor_1[0]
    else:
        x_n = x.reshape(-1)
        launch(scale_into_kernel, -(-x_n.size // TILE), BLOCK, x_n, factor_1)


def _launch_flat(kernel, *arrays, scalar=None):
    """Launch on the arrays read as runs of n elements; they are contiguous, so these are views."""
    flat = [a.reshape(-1) for a in arrays]
    scalars = () if scalar is None else (scalar,)
    launch(kernel, -(-flat[0].size // TILE), BLOCK, *flat, *scalars)
