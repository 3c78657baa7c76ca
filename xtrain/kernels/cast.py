"""float32 to bfloat16 and back.

A bfloat16 is the upper half of a float32: sign, the same 8 exponent bits, 7 of 23 fraction bits. So

    widening   bits << 16: exact, every bfloat16 is a float32
    narrowing  keep the upper half, rounded to nearest, ties to even. With b the 32 bits:
               (b + 0x7FFF + (bit 16 of b)) >> 16
               The lower half 0x8000 is the tie: with bit 16 added it carries upwards exactly when the kept half is
               odd. A carry out of the fraction raises the exponent, which is the right result, up to infinity.
               A NaN could be carried away or lose its last fraction bit, so it becomes sign | 0x7FC0.

    backward   rounding is flat almost everywhere; as everyone does we take its slope as one: dy is cast back.

The kernels see the bits as uint32 and uint16, and do integer arithmetic only. Bytes moved: 6 per element.
"""

import ml_dtypes
import numpy as np
from numba import cuda, int64

from ..device import Array
from ._launch import check, check_array, empty, launch, on_host

BLOCK = 256
EACH = 4  # neighbouring elements of a thread: as in elementwise.py
TILE = BLOCK * EACH
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


# ----------------------------------------------------------------------------- reference
def cast_ref(x, dtype):
    with np.errstate(invalid="ignore", over="ignore"):  # NaN stays NaN, 3.4e38 becomes infinity
        return x.astype(dtype)


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def narrow_kernel(y_n, x_n):
    """Grid ceil(n / TILE), block BLOCK. x: bits of float32 as uint32. y: bits of bfloat16 as uint16."""
    first = (int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x) * EACH
    for j in range(EACH):
        i = first + j
        if i < x_n.size:
            bits = int64(x_n[i])
            if (bits & 0x7FFFFFFF) > 0x7F800000:  # NaN: all exponent bits and some fraction bits
                y_n[i] = (bits >> 16) & 0x8000 | 0x7FC0
            else:
                y_n[i] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@cuda.jit
def widen_kernel(y_n, x_n):
    """Grid ceil(n / TILE), block BLOCK. x: bits of bfloat16 as uint16. y: bits of float32 as uint32."""
    first = (int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x) * EACH
    for j in range(EACH):
        i = first + j
        if i < x_n.size:
            y_n[i] = int64(x_n[i]) << 16


# ----------------------------------------------------------------------------- launcher
def cast_fwd(x: Array, dtype) -> Array:
    """x float32 or bfloat16 of any shape -> a copy in `dtype` (float32 or bfloat16); x itself if it has it already."""
    dtype = np.dtype(dtype)
    check_array("cast", "x", x, x.shape, ("float32", "bfloat16"))
    if x.dtype == dtype:
        return x
    check(dtype in (np.float32, BFLOAT16), f"cast: to {dtype}, expected float32 or bfloat16")
    if on_host(x):
        return cast_ref(x, dtype)
    y = empty(x, x.shape, dtype)
    kernel = narrow_kernel if dtype == BFLOAT16 else widen_kernel
    launch(kernel, -(-x.size // TILE), BLOCK, _bits(y), _bits(x))
    return y


def _bits(x):
    """x as one run of unsigned integers of its width; a view."""
    return x.reshape(-1).view(np.uint32 if x.dtype == np.float32 else np.uint16)
