"""Add and scale, element by element, on arrays of any shape.

    add      y = a + b          da = db = dy
    add_into a += b             accumulates the gradients of a tensor that is used more than once
    scale    y = factor x       dx = factor dy

Every backward is one of these ops. Each element is rounded once, so the kernels equal the
references bit for bit, also in bf16, where both compute in float32. Transfers per element: two
reads and one write for add, one read and one write for scale. Memory traffic alone determines the
speed; primitives/flat.py explains how the elements are moved.
"""

import numpy as np

from ..device import Array
from .primitives.flat import (
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
from .primitives.ptx import device, kernel
from .runtime.compiler import cuda, float32, int64
from .runtime.cost import declare_cost, distinct_bytes
from .runtime.launch import FLOATS, as_float32, check_array, dtype_name, empty_like, on_host


# ----------------------------------------------------------------------------- reference
def add_ref(a, b):
    """Return a + b, with the dtype of a."""
    return a + b


def scale_ref(x, factor):
    """Return factor x, with the dtype of x."""
    if dtype_name(x.dtype) == "bfloat16":  # the factor is not rounded to 8 bits
        return scale_ref(x.astype(np.float32), factor).astype(x.dtype)
    return x * x.dtype.type(factor)


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def add_naive_kernel(y_n, a_n, b_n):
    """Grid ceil(n / BLOCK), block BLOCK.

    One element per thread, 4 bytes per access: 0.79 of the speed of a copy.
    """
    i = int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x
    if i < y_n.size:
        y_n[i] = a_n[i] + b_n[i]


@device
def add_chunks(y_n, a_n, b_n, first, vectorized):
    """Set y to a + b on the thread's chunks."""
    a = cuda.local.array((STEPS, CHUNK), float32)
    b = cuda.local.array((STEPS, CHUNK), float32)
    n = y_n.size
    for s in range(STEPS):  # all loads before the first store, so that all are in flight
        load(a[s], a_n, first + s * STRIDE, GAP, n, vectorized)
        load(b[s], b_n, first + s * STRIDE, GAP, n, vectorized)
    for s in range(STEPS):
        for j in range(CHUNK):
            a[s, j] += b[s, j]
        store(y_n, first + s * STRIDE, GAP, n, a[s], vectorized)


@kernel(BLOCK)
def add_kernel(y_n, a_n, b_n, aligned):
    """Grid ceil(n / TILE), block BLOCK.

    y may be a: the thread that reads an element also writes it.
    """
    first = first_element()
    if can_vectorize(first, y_n.size, aligned):
        add_chunks(y_n, a_n, b_n, first, True)
    else:
        add_chunks(y_n, a_n, b_n, first, False)


@device
def scale_chunks(y_n, x_n, factor, first, vectorized):
    """Set y to factor x on the thread's chunks."""
    x = cuda.local.array((STEPS, CHUNK), float32)
    n = y_n.size
    for s in range(STEPS):
        load(x[s], x_n, first + s * STRIDE, GAP, n, vectorized)
    for s in range(STEPS):
        for j in range(CHUNK):
            x[s, j] *= factor
        store(y_n, first + s * STRIDE, GAP, n, x[s], vectorized)


@kernel(BLOCK)
def scale_kernel(y_n, x_n, factor, aligned):
    """Grid ceil(n / TILE), block BLOCK."""
    first = first_element()
    if can_vectorize(first, y_n.size, aligned):
        scale_chunks(y_n, x_n, factor, first, True)
    else:
        scale_chunks(y_n, x_n, factor, first, False)


@kernel(BLOCK)
def scale_into_kernel(x_n, factor_1, aligned):
    """Grid ceil(n / TILE), block BLOCK.

    The factor is read on the device, without a copy to the host. 1, the usual one, costs no pass
    over x.
    """
    first = first_element()
    factor = factor_1[0]
    if factor == float32(1.0):
        return
    if can_vectorize(first, x_n.size, aligned):
        scale_chunks(x_n, x_n, factor, first, True)
    else:
        scale_chunks(x_n, x_n, factor, first, False)


def _add_bytes(y_n, a_n, b_n, *_):
    """Count the bytes of add_kernel: y may be a, which is then read and overwritten."""
    in_place = y_n.data.ptr == a_n.data.ptr
    return distinct_bytes(y_n, a_n, b_n) + in_place * y_n.nbytes


declare_cost(add_kernel, nbytes=_add_bytes)
declare_cost(scale_into_kernel, in_place=("x_n",))


# ----------------------------------------------------------------------------- launchers
def add_fwd(a: Array, b: Array) -> Array:
    """Return a + b, both float32 or both bf16, same shape.

    Any strides: a gradient may be a slice of a packed array.
    """
    a = _contiguous(a)
    b = _contiguous(b)
    check_two("add", a, b)
    if on_host(a, b):
        return add_ref(a, b)
    y = empty_like(a)
    launch_flat(add_kernel, y, a, b)
    return y


def _contiguous(x):
    return x if x.flags.c_contiguous else x.copy()


def add_into(a: Array, b: Array) -> None:
    """Add b to a in place, both float32 or both bf16, same shape, contiguous."""
    check_two("add_into", a, b)
    if on_host(a, b):
        a += b
    else:
        launch_flat(add_kernel, a, a, b)


def check_two(op: str, a: Array, b: Array) -> None:
    """Raise ValueError or TypeError unless a and b have the same shape and dtype.

    Both must be contiguous floats.
    """
    check_array(op, "a", a, a.shape, FLOATS)
    check_array(op, "b", b, a.shape, (dtype_name(a.dtype),))


def scale_fwd(x: Array, factor: float) -> Array:
    """Return factor * x, with the dtype of x: float32 or bf16, any shape, contiguous.

    factor: a Python float.
    """
    check_array("scale", "x", x, x.shape, FLOATS)
    if on_host(x):
        return scale_ref(x, factor)
    y = empty_like(x)
    launch_flat(scale_kernel, y, x, others=(as_float32(factor),))
    return y


def scale_into(x: Array, factor_1: Array) -> None:
    """Multiply x in place, float32 or bf16, contiguous.

    factor: a float32 array of one element, on the device of x.
    """
    check_array("scale_into", "x", x, x.shape, FLOATS)
    factor_1 = factor_1.reshape(-1)
    check_array("scale_into", "factor", factor_1, (1,))
    if on_host(x, factor_1):
        x[...] = scale_ref(x, factor_1[0])
    else:
        launch_flat(scale_into_kernel, x, others=(factor_1,))
