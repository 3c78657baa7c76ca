"""Exponential moving average of the weights.   e, w: (n,)

    e = e + rest (w - e)                          rest = 1 - decay

A factor of NaN skips the step (skip_nonfinite.py): e stays unchanged. Every operation rounds once,
as in adamw.py, so the kernel equals its float32 reference bit for bit.

The decay grows with the step t, which counts from 0: min(decay, (1 + t) / (10 + t)), as in
TensorFlow and diffusers. With a constant decay the random weights of the start would stay in the
average for thousands of steps.
Bytes moved: read e and w, write e: 12 per element.
"""

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
from .primitives.ptx import kernel
from .runtime.compiler import cuda, fadd_rn, float32, fmul_rn, fsub_rn
from .runtime.cost import declare_cost
from .runtime.launch import check_array, on_host


def averaging_rest(decay: float, t: int) -> float:
    """Return 1 - the decay of step t, which counts from 0."""
    return 1 - min(decay, (1 + t) / (10 + t))


def moving_average_ref(e_n, w_n, factor_1, rest_1):
    """Update e in place, in its dtype."""
    if factor_1[0] == factor_1[0]:
        e_n += e_n.dtype.type(rest_1[0]) * (w_n - e_n)


@kernel(BLOCK)
def moving_average_kernel(e_n, w_n, factor_1, rest_1, aligned):
    """Grid ceil(n / TILE), block BLOCK."""
    e = cuda.local.array((STEPS, CHUNK), float32)
    w = cuda.local.array((STEPS, CHUNK), float32)
    first = first_element()
    n = e_n.size
    factor = factor_1[0]
    rest = rest_1[0]
    vectorized = can_vectorize(first, n, aligned)
    for s in range(STEPS):  # all loads before the first store, so that all are in flight
        load(e[s], e_n, first + s * STRIDE, GAP, n, vectorized)
        load(w[s], w_n, first + s * STRIDE, GAP, n, vectorized)
    if factor == factor:  # False for NaN
        for s in range(STEPS):
            for j in range(CHUNK):
                e[s, j] = fadd_rn(e[s, j], fmul_rn(rest, fsub_rn(w[s, j], e[s, j])))
            store(e_n, first + s * STRIDE, GAP, n, e[s], vectorized)


declare_cost(moving_average_kernel, in_place=("e_n",))


def moving_average(e_n: Array, w_n: Array, factor_1: Array, rest_1: Array) -> None:
    """Add rest (w - e) to e, in place. e, w: (n,) float32.

    factor: (1,) float32, NaN to skip.
    rest: (1,) float32, on the device of e.
    """
    check_array("moving_average", "e", e_n, (None,))
    check_array("moving_average", "w", w_n, e_n.shape)
    check_array("moving_average", "factor", factor_1, (1,))
    check_array("moving_average", "rest", rest_1, (1,))
    if on_host(e_n, w_n, factor_1, rest_1):
        moving_average_ref(e_n, w_n, factor_1, rest_1)
    else:
        launch_flat(moving_average_kernel, e_n, w_n, others=(factor_1, rest_1))
