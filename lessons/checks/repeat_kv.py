"""The first version of grouped-query attention: copy every key head once for each of its query heads.

The library's attention kernels do not copy heads; they read a key head once for all of its queries. Lesson 18 says what the
copies cost, and bench/bench_kernels.py measures them.
"""

import numpy as np

from xtrain.device import Array
from xtrain.kernels.primitives.ptx import load1, store1
from xtrain.kernels.runtime.compiler import cuda, int64
from xtrain.kernels.runtime.launch import FLOATS, check, check_array, empty, launch, on_host

BLOCK = 256  # threads


def repeat_kv_ref(x_RGSD, repeats):
    """repeat_kv in NumPy -> (R, G repeats, S, D): heads 0, 0, ..., 1, 1, ..."""
    return np.repeat(x_RGSD, repeats, axis=1)


@cuda.jit
def repeat_kv_kernel(y, x, repeats, head):
    """Grid (ceil(head / BLOCK), R G repeats), block BLOCK. x, y: flat; head: S D elements. y's head i is x's i // repeats."""
    i = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
    to = int64(cuda.blockIdx.y)
    if i < head:
        store1(y, to * head + i, load1(x, to // repeats * head + i))


def repeat_kv(x_RGSD: Array, repeats: int) -> Array:
    """x (R, G, S, D) float32 or bf16 -> (R, G repeats, S, D), each head `repeats` times in a row.

    Raises ValueError or TypeError if x has another shape or dtype, or if there are too many heads for one launch.
    """
    check_array("repeat_kv", "x", x_RGSD, (None,) * 4, FLOATS)
    check(repeats > 0, f"repeat_kv: {repeats} repeats, expected at least one")
    R, G, S, D = x_RGSD.shape
    check(R * G * repeats < 2**16, f"repeat_kv: {R * G * repeats} heads, at most 65535")
    if on_host(x_RGSD):
        return repeat_kv_ref(x_RGSD, repeats)
    y = empty(x_RGSD, (R, G * repeats, S, D))
    grid = (-(-S * D // BLOCK), R * G * repeats)
    launch(repeat_kv_kernel, grid, BLOCK, y.reshape(-1), x_RGSD.reshape(-1), repeats, S * D)
    return y
