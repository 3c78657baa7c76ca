"""SwiGLU and GeGLU (Shazeer 2020) on one packed array, and SiLU alone.   gu: (N, 2F)   y: (N, F)

gu is the output of one matrix product: columns 0..F-1 are gate, columns F..2F-1 are up.

    forward    s = sigmoid(g) = 1 / (1 + exp(-g))        silu(g) = g s        y = silu(gate) up
    backward   ds/dg = s (1 - s), so
               silu'(g) = s + g s (1 - s) = s + silu(g) (1 - s)
               dgate = dy up silu'(gate)                 dup = dy silu(gate)

The sigmoid is not saved: s is recomputed from the gate, and everything else follows from s.
GeGLU (Gemma) has GELU in place of SiLU, in the form with tanh (Hendrycks & Gimpel 2016). As
(1 + tanh(z)) / 2 = sigmoid(2z), it is the same maths with another argument of the sigmoid:

    gelu(g) = g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) = g s
    s = sigmoid(q)      q(g) = g (a + b g^2)      a = sqrt(8 / pi)      b = 0.044715 a
    gelu'(g) = s + gelu(g) (1 - s) q'(g)          q'(g) = a + 3 b g^2

For a gate below -88 exp(-g) overflows to infinity, and 1 / (1 + infinity) is 0, the correct result.

The backward of the next matrix product needs y, but y is not saved either: the backward of SwiGLU
has all factors of y in registers, recomputes it to the same bits and overwrites dy with it.

Bytes moved, forward: read gu, write y, 3 N F elements. Backward: read gu and dy, write dgu, 5 N F,
and y, 6 N F.
In bf16 the arithmetic is no longer negligible: an H200 moves 6 bytes in the time of about 40
instructions. A correctly rounded division takes 10 of them and a branch, which makes elements wait
for each other; fast_fdividef takes 5, with an error of two units in the last place.
"""

import functools
import math

import numpy as np

from ..device import Array
from .primitives.flat import (
    BLOCK,
    CHUNK,
    GAP,
    STEPS,
    STRIDE,
    blocks_for_rows,
    can_vectorize,
    can_vectorize_rows,
    first_element,
    launch_flat,
    load,
    make_row_and_column,
    store,
)
from .primitives.ptx import device, kernel
from .runtime.compiler import cuda, fast_fdividef, float32, int64
from .runtime.cost import declare_cost
from .runtime.launch import (
    FLOATS,
    check,
    check_array,
    dtype_name,
    empty,
    empty_like,
    launch,
    on_host,
    wide,
)

GELU_A = (8 / math.pi) ** 0.5
GELU_B = 0.044715 * GELU_A


# ----------------------------------------------------------------------------- reference
def sigmoid_ref(x):
    """Return sigmoid(x), a new array.

    Every step works in place, because memory traffic determines the time on a CPU.
    """
    s = np.negative(x, out=np.empty_like(x))
    with np.errstate(over="ignore"):
        np.exp(s, out=s)
    s += 1
    return np.divide(1, s, out=s)


def silu_ref(x):
    """Return x sigmoid(x)."""
    s = sigmoid_ref(x)
    s *= x
    return s


def silu_bwd_ref(dy, x):
    """Return dx = dy s (1 + x (1 - s)),  s = sigmoid(x)."""
    s = sigmoid_ref(x)
    dx = 1 - s
    dx *= x * s
    dx += s
    dx *= dy
    return dx


def gate_ref(gate_NF, gelu):
    """Return s, the factor of gate in silu(gate) or gelu(gate), a new array."""
    if not gelu:
        return sigmoid_ref(gate_NF)
    return sigmoid_ref(gate_NF * (GELU_A + GELU_B * gate_NF * gate_NF))


def swiglu_ref(gu_N2F, gelu=False):
    """Return silu(g) u (N, F) for gu (N, 2F) = [g, u]; or gelu(g) u."""
    F = gu_N2F.shape[1] // 2
    y_NF = gate_ref(gu_N2F[:, :F], gelu)
    y_NF *= gu_N2F[:, :F]
    y_NF *= gu_N2F[:, F:]
    return y_NF


def swiglu_bwd_ref(dy_NF, gu_N2F, recompute_y=False, gelu=False):
    """Return dgu (N, 2F). recompute_y: overwrite dy with y."""
    F = dy_NF.shape[1]
    gate_NF = gu_N2F[:, :F]
    up_NF = gu_N2F[:, F:]
    dgu_N2F = np.empty_like(gu_N2F)
    dgate_NF = dgu_N2F[:, :F]
    dup_NF = dgu_N2F[:, F:]
    s_NF = gate_ref(gate_NF, gelu)
    np.multiply(gate_NF, s_NF, out=dup_NF)  # silu(gate)
    np.subtract(1, s_NF, out=dgate_NF)
    dgate_NF *= dup_NF
    if gelu:
        dgate_NF *= GELU_A + 3 * GELU_B * gate_NF * gate_NF
    dgate_NF += s_NF  # silu'(gate)
    dgate_NF *= up_NF
    dgate_NF *= dy_NF
    if recompute_y:
        np.multiply(dup_NF, up_NF, out=s_NF)
    dup_NF *= dy_NF
    if recompute_y:
        dy_NF[...] = s_NF
    return dgu_N2F


# ----------------------------------------------------------------------------- kernels
@device
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), with the fast division."""
    return fast_fdividef(float32(1.0), float32(1.0) + math.exp(-x))


@device
def gelu_sigmoid(x):
    """Return s of GELU."""
    return sigmoid(x * (float32(GELU_A) + float32(GELU_B) * x * x))


@cuda.jit
def swiglu_fwd_naive_kernel(y_NF, gu_N2F):
    """Grid (N, ceil(F / BLOCK)), block BLOCK.

    One thread per element of y: the maths, four bytes per access.
    """
    n = int64(cuda.blockIdx.x)
    F = y_NF.shape[1]
    f = cuda.blockIdx.y * BLOCK + cuda.threadIdx.x
    if f < F:
        gate = gu_N2F[n, f]
        y_NF[n, f] = gate * sigmoid(gate) * gu_N2F[n, F + f]


@functools.cache
def make_swiglu_fwd_kernel(F, vectorized, gelu=False):
    """Return the forward kernel for rows of F columns.

    vectorized: 16-byte accesses, see can_vectorize_rows. gelu: GeGLU.
    """
    row_and_column, gap = make_row_and_column(F)
    factor = gelu_sigmoid if gelu else sigmoid

    @kernel(BLOCK)
    def swiglu_fwd_kernel(y, gu, N):
        """Grid blocks_for_rows(N, F), block BLOCK. y: flat (N F), gu: flat (N 2F)."""
        gate = cuda.local.array(CHUNK, float32)
        up = cuda.local.array(CHUNK, float32)
        n, f = row_and_column()
        if n >= N:
            return
        row = n * (2 * F)  # start of gate; up starts F elements later
        load(gate, gu, row + f, gap, row + F, vectorized)
        load(up, gu, row + F + f, gap, row + 2 * F, vectorized)
        for j in range(CHUNK):
            gate[j] = gate[j] * factor(gate[j]) * up[j]
        store(y, n * F + f, gap, n * F + F, gate, vectorized)

    return swiglu_fwd_kernel


@functools.cache
def make_swiglu_bwd_kernel(F, vectorized, recompute_y=False, gelu=False):
    """Return the backward kernel for rows of F columns.

    recompute_y: the kernel that also overwrites dy with y. gelu: GeGLU.
    """
    row_and_column, gap = make_row_and_column(F)
    factor = gelu_sigmoid if gelu else sigmoid

    @device
    def columns(dgu, dy, gu, N):
        """Compute both gradients of a thread's columns."""
        gate = cuda.local.array(CHUNK, float32)
        up = cuda.local.array(CHUNK, float32)
        d = cuda.local.array(CHUNK, float32)
        n, f = row_and_column()
        if n >= N:
            return
        row = n * (2 * F)
        load(gate, gu, row + f, gap, row + F, vectorized)
        load(up, gu, row + F + f, gap, row + 2 * F, vectorized)
        load(d, dy, n * F + f, gap, n * F + F, vectorized)
        for j in range(CHUNK):
            s = factor(gate[j])
            silu = gate[j] * s
            y = silu * up[j]
            dup = d[j] * silu
            change = silu * (float32(1.0) - s)
            if gelu:
                change *= float32(GELU_A) + float32(3 * GELU_B) * gate[j] * gate[j]
            gate[j] = d[j] * up[j] * (s + change)
            up[j] = dup
            d[j] = y
        store(dgu, row + f, gap, row + F, gate, vectorized)
        store(dgu, row + F + f, gap, row + 2 * F, up, vectorized)
        if recompute_y:
            store(dy, n * F + f, gap, n * F + F, d, vectorized)

    @kernel(BLOCK)
    def swiglu_bwd_kernel(dgu, dy, gu, N):
        """Grid blocks_for_rows(N, F), block BLOCK. dy: flat (N F), gu, dgu: flat (N 2F)."""
        columns(dgu, dy, gu, N)

    @kernel(BLOCK)
    def swiglu_bwd_again_kernel(dgu, dy, gu, N):
        """Grid as swiglu_bwd_kernel; also overwrites dy with y.

        It has another name, so that profiles tell them apart.
        """
        columns(dgu, dy, gu, N)

    declare_cost(swiglu_bwd_again_kernel, in_place=("dy",))
    return swiglu_bwd_again_kernel if recompute_y else swiglu_bwd_kernel


@device
def silu_fwd_chunks(y_n, x_n, first, vectorized):
    """Set y to silu(x) on the thread's chunks."""
    x = cuda.local.array((STEPS, CHUNK), float32)
    n = y_n.size
    for s in range(STEPS):
        load(x[s], x_n, first + s * STRIDE, GAP, n, vectorized)
    for s in range(STEPS):
        for j in range(CHUNK):
            x[s, j] *= sigmoid(x[s, j])
        store(y_n, first + s * STRIDE, GAP, n, x[s], vectorized)


@kernel(BLOCK)
def silu_fwd_kernel(y_n, x_n, aligned):
    """Grid ceil(n / TILE), block BLOCK."""
    first = first_element()
    if can_vectorize(first, y_n.size, aligned):
        silu_fwd_chunks(y_n, x_n, first, True)
    else:
        silu_fwd_chunks(y_n, x_n, first, False)


@device
def silu_bwd_chunks(dx_n, dy_n, x_n, first, vectorized):
    """Set dx to dy silu'(x) on the thread's chunks."""
    x = cuda.local.array((STEPS, CHUNK), float32)
    d = cuda.local.array((STEPS, CHUNK), float32)
    n = dx_n.size
    for s in range(STEPS):
        load(x[s], x_n, first + s * STRIDE, GAP, n, vectorized)
        load(d[s], dy_n, first + s * STRIDE, GAP, n, vectorized)
    for s in range(STEPS):
        for j in range(CHUNK):
            sig = sigmoid(x[s, j])
            d[s, j] *= sig + x[s, j] * sig * (float32(1.0) - sig)
        store(dx_n, first + s * STRIDE, GAP, n, d[s], vectorized)


@kernel(BLOCK)
def silu_bwd_kernel(dx_n, dy_n, x_n, aligned):
    """Grid ceil(n / TILE), block BLOCK."""
    first = first_element()
    if can_vectorize(first, dx_n.size, aligned):
        silu_bwd_chunks(dx_n, dy_n, x_n, first, True)
    else:
        silu_bwd_chunks(dx_n, dy_n, x_n, first, False)


# ----------------------------------------------------------------------------- launchers
def swiglu_fwd(gu_N2F: Array, gelu: bool = False) -> Array:
    """Return y (N, F) in the dtype of gu (N, 2F), float32 or bf16, gate before up.

    gelu: GeGLU. Raises ValueError for an odd width.
    """
    check_array("swiglu", "gu", gu_N2F, (None, None), FLOATS)
    N, F2 = gu_N2F.shape
    check(F2 % 2 == 0, f"swiglu: gu has {F2} columns, expected gate and up of equal width")
    if on_host(gu_N2F):
        return swiglu_ref(wide(gu_N2F), gelu).astype(gu_N2F.dtype, copy=False)
    F = F2 // 2
    y_NF = empty(gu_N2F, (N, F))
    make_kernel = functools.partial(make_swiglu_fwd_kernel, gelu=bool(gelu))
    _launch_rows(make_kernel, N, F, y_NF, gu_N2F)
    return y_NF


def swiglu_bwd(dy_NF: Array, gu_N2F: Array, recompute_y: bool = False, gelu: bool = False) -> Array:
    """Return dgu (N, 2F); dy: (N, F), gu: (N, 2F), both float32 or both bf16.

    recompute_y: also **overwrite dy with y**, the bits of swiglu_fwd(gu, gelu). gelu: GeGLU.
    """
    check_array("swiglu backward", "dy", dy_NF, (None, None), FLOATS)
    N, F = dy_NF.shape
    check_array("swiglu backward", "gu", gu_N2F, (N, 2 * F), (dtype_name(dy_NF.dtype),))
    if on_host(dy_NF, gu_N2F):
        dy = wide(dy_NF)
        dgu_N2F = swiglu_bwd_ref(dy, wide(gu_N2F), recompute_y, gelu)
        if recompute_y and dy is not dy_NF:
            dy_NF[...] = dy
        return dgu_N2F.astype(gu_N2F.dtype, copy=False)
    dgu_N2F = empty_like(gu_N2F)
    make_kernel = functools.partial(
        make_swiglu_bwd_kernel, recompute_y=bool(recompute_y), gelu=bool(gelu)
    )
    _launch_rows(make_kernel, N, F, dgu_N2F, dy_NF, gu_N2F)
    return dgu_N2F


def _launch_rows(make_kernel, N, F, *arrays):
    if N and F:
        runs = [a.reshape(-1) for a in arrays]
        launch(make_kernel(F, can_vectorize_rows(F, *runs)), blocks_for_rows(N, F), BLOCK, *runs, N)


def silu_fwd(x: Array) -> Array:
    """Return silu(x) with the shape and dtype of x, float32 or bf16, any shape, contiguous."""
    check_array("silu", "x", x, x.shape, FLOATS)
    if on_host(x):
        return silu_ref(wide(x)).astype(x.dtype, copy=False)
    y = empty_like(x)
    launch_flat(silu_fwd_kernel, y, x)
    return y


def silu_bwd(dy: Array, x: Array) -> Array:
    """Return dx like x; dy, x: same shape and dtype, contiguous."""
    check_array("silu backward", "x", x, x.shape, FLOATS)
    check_array("silu backward", "dy", dy, x.shape, (dtype_name(x.dtype),))
    if on_host(dy, x):
        return silu_bwd_ref(wide(dy), wide(x)).astype(x.dtype, copy=False)
    dx = empty_like(x)
    launch_flat(silu_bwd_kernel, dx, dy, x)
    return dx
