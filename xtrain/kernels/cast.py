"""float32 to bfloat16 and back.

A bfloat16 is the upper half of a float32: sign, the same 8 exponent bits, 7 of 23 fraction bits. So

    widening   bits << 16: exact, every bfloat16 is a float32
    narrowing  keep the upper half, rounded to nearest, ties to even. With b the 32 bits:
               (b + 0x7FFF + (bit 16 of b)) >> 16
               A lower half of 0x8000 is a tie: with bit 16 added it carries upwards exactly when
               the kept half is odd. A carry out of the fraction raises the exponent, which is the
               right result, up to infinity. A NaN could be carried away or lose its last fraction
               bit, so it becomes sign | 0x7FC0.

    backward   rounding is a staircase, flat almost everywhere; its slope is taken as that of the
               line it follows, one: dy is cast back.

The kernels see the bits as uint32 and uint16 and do integer arithmetic only.
Bytes moved: 6 per element.
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
    """Grid ceil(n / TILE), block BLOCK. x: float32 seen as uint32. y: bfloat16 seen as uint16."""
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
    """Grid ceil(n / TILE), block BLOCK. x: bfloat16 seen as uint16. y: float32 seen as uint32."""
    first = (int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x) * EACH
    for j in range(EACH):
        i = first + j
        if i < x_n.size:
            y_n[i] = int64(x_n[i]) << 16


# ----------------------------------------------------------------------------- launcher
def cast_fwd(x: Array, dtype) -> Array:
    """x float32 or bfloat16 of any shape -> a copy in `dtype`, one of the two.

    x itself if that is its dtype already. Another dtype of x: TypeError; of the result: ValueError.
    """
    dtype = np.dtype(dtype)
    check_array("cast", "x", x, x.shape, ("float32", "bfloat16"))
    if x.dtype == dtype:
        return x
    host = on_host(x)
    known = dtype in (np.float32, BFLOAT16) or (host and dtype == np.float64)  # gradcheck needs it
    check(known, f"cast: to {dtype}, expected float32 or bfloat16")
    if host:
        return cast_ref(x, dtype)
    y = empty(x, x.shape, dtype)
    kernel = narrow_kernel if dtype == BFLOAT16 else widen_kernel
    launch(kernel, -(-x.size // TILE), BLOCK, _bits(y), _bits(x))
    return y


def _bits(x):
    """x as one run of unsigned integers of its width; a view."""
    return x.reshape(-1).view(np.uint32 if x.dtype == np.float32 else np.uint16)
