"""float32 to bfloat16 and back.

A bfloat16 is the upper half of a float32: sign, the same 8 exponent bits, 7 of 23 fraction bits. So

    widening   bits << 16: exact, every bfloat16 is a float32
    narrowing  keep the upper half, rounded to nearest, ties to even. With b the 32 bits:
               (b + 0x7FFF + (bit 16 of b)) >> 16
               A lower half of 0x8000 is a tie: with bit 16 added it carries exactly when the kept
               half is odd. A carry out of the fraction increments the exponent, which is the
               correct result, up to infinity. A carry could turn a NaN into another value, and
               narrowing
               could drop its last fraction bit, so a NaN becomes sign | 0x7FC0.

    backward   rounding is a step function with derivative zero almost everywhere. We use the slope
               of the line that it follows, one: dy is cast back.

The naive kernel does the integer arithmetic above. The kernel in use leaves it to the instruction
that narrows two numbers at once (store4 in primitives/ptx.py). It gives the same bits, except that
it drops the sign of a NaN, which restore_nan_signs puts back. Bytes moved: 6 per element.
"""

import math

import ml_dtypes
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
    position,
    store,
)
from .primitives.ptx import device, kernel
from .runtime.compiler import cuda, float32, int64
from .runtime.launch import FLOATS, check, check_array, dtype_name, empty, on_host

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


# ----------------------------------------------------------------------------- reference
def cast_ref(x, dtype):
    """Return x in another dtype; to bf16: rounded to nearest, ties to even."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN stays NaN, 3.4e38 becomes infinity
        return x.astype(dtype)


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def narrow_naive_kernel(y_n, x_n):
    """Grid ceil(n / BLOCK), block BLOCK.

    x: float32, viewed as uint32. y: bfloat16, viewed as uint16.
    """
    i = int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x
    if i < y_n.size:
        bits = int64(x_n[i])
        if (bits & 0x7FFFFFFF) > 0x7F800000:  # NaN: all exponent bits and some fraction bits
            y_n[i] = (bits >> 16) & 0x8000 | 0x7FC0
        else:
            y_n[i] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@device
def restore_nan_signs(y_n, x, i, n):
    """Restore the signs of the NaNs of a chunk. Kernels see a bfloat16 array as uint16."""
    has_nan = False
    for j in range(CHUNK):
        has_nan |= x[j] != x[j]
    if has_nan:
        for j in range(CHUNK):
            element = position(i, GAP, j)
            if x[j] != x[j] and element < n:
                y_n[element] = 0xFFC0 if math.copysign(float32(1.0), x[j]) < 0 else 0x7FC0


@device
def cast_chunks(y_n, x_n, first, narrows, vectorized):
    """Convert the thread's chunks. narrows: to bf16."""
    x = cuda.local.array((STEPS, CHUNK), float32)
    n = y_n.size
    for s in range(STEPS):
        load(x[s], x_n, first + s * STRIDE, GAP, n, vectorized)
    for s in range(STEPS):
        i = first + s * STRIDE
        store(y_n, i, GAP, n, x[s], vectorized)
        if narrows:
            restore_nan_signs(y_n, x[s], i, n)


@kernel(BLOCK)
def narrow_kernel(y_n, x_n, aligned):
    """Grid ceil(n / TILE), block BLOCK. x: float32, y: bfloat16."""
    first = first_element()
    if can_vectorize(first, y_n.size, aligned):
        cast_chunks(y_n, x_n, first, True, True)
    else:
        cast_chunks(y_n, x_n, first, True, False)


@kernel(BLOCK)
def widen_kernel(y_n, x_n, aligned):
    """Grid ceil(n / TILE), block BLOCK. x: bfloat16, y: float32."""
    first = first_element()
    if can_vectorize(first, y_n.size, aligned):
        cast_chunks(y_n, x_n, first, False, True)
    else:
        cast_chunks(y_n, x_n, first, False, False)


# ----------------------------------------------------------------------------- launcher
def cast_fwd(x: Array, dtype) -> Array:
    """Return a copy of x, float32 or bfloat16, in `dtype`, one of the two.

    Any shape. Returns x itself if it has that dtype already. Raises TypeError for another dtype of
    x, ValueError for another `dtype` or a non-contiguous x.
    """
    dtype = np.dtype(dtype)
    check_array("cast", "x", x, x.shape, FLOATS)
    if x.dtype == dtype:
        return x
    host = on_host(x)
    supported = dtype in (np.float32, BFLOAT16)
    supported |= host and dtype == np.float64  # gradcheck needs it
    check(supported, f"cast: to {dtype}, expected float32 or bfloat16")
    if host:
        return cast_ref(x, dtype)
    y = empty(x, x.shape, dtype)
    _launch_cast(y, x)
    return y


def cast_into(y: Array, x: Array) -> None:
    """Set y to x, where one is float32 and the other bfloat16. Same shape, both contiguous."""
    check_array("cast_into", "x", x, x.shape, FLOATS)
    other = [name for name in FLOATS if name != dtype_name(x.dtype)]
    check_array("cast_into", "y", y, x.shape, other)
    if on_host(y, x):
        y[...] = cast_ref(x, y.dtype)
    else:
        _launch_cast(y, x)


def _launch_cast(y, x):
    launch_flat(narrow_kernel if y.dtype == BFLOAT16 else widen_kernel, y, x)
