"""SwiGLU (Shazeer 2020) over one packed array, and SiLU alone.   gu: (N, 2F)   y: (N, F)

gu is the output of one matrix product: columns 0..F-1 hold gate, columns F..2F-1 hold up.

    forward    s = sigmoid(g) = 1 / (1 + exp(-g))        silu(g) = g s        y = silu(gate) up
    backward   ds/dg = s (1 - s), so
               silu'(g) = s + g s (1 - s) = s + silu(g) (1 - s)
               dgate = dy up silu'(gate)                 dup = dy silu(gate)

The sigmoid needs no saved copy: s is recomputed from the gate, and everything else follows from s.
For a gate below -88 exp(-g) overflows to infinity, and 1 / (1 + infinity) is the right 0.

y is not kept for the matrix product that follows, whose backward needs it: our backward has all of its factors in
registers and writes it again, to the same bits, over dy.

Bytes moved, forward: read gu, write y, 3 N F elements. Backward: read gu and dy, write dgu, 5 N F, and y, 6 N F.
In bf16 the arithmetic is no longer free: an H200 moves 6 bytes in the time of about 40 instructions. A division that
rounds correctly takes 10 of them, and a branch, so that elements wait for one another; fast_fdividef takes 5 and errs by
two units in the last place.
"""

import functools
import math

import numpy as np
from numba import cuda, float32, int64
from numba.cuda.libdevice import fast_fdividef

from ..device import Array
from .primitives.flat import (
    BLOCK,
    EACH,
    GAP,
    STEPS,
    STRIDE,
    blocks_for_rows,
    first_element,
    is_whole,
    launch_flat,
    load,
    make_place,
    store,
    whole_rows,
)
from .primitives.ptx import device, kernel
from .runtime.cost import declare_cost
from .runtime.launch import FLOATS, check, check_array, empty, empty_like, launch, on_host, wide


# ----------------------------------------------------------------------------- reference
def sigmoid_ref(x):
    """-> a new array. Every step writes over it: on a CPU memory is what takes the time."""
    s = np.negative(x, out=np.empty_like(x))
    with np.errstate(over="ignore"):
        np.exp(s, out=s)
    s += 1
    return np.divide(1, s, out=s)


def silu_ref(x):
    """-> x sigmoid(x)"""
    s = sigmoid_ref(x)
    s *= x
    return s


def silu_bwd_ref(dy, x):
    """-> dx = dy s (1 + x (1 - s)),  s = sigmoid(x)"""
    s = sigmoid_ref(x)
    dx = 1 - s
    dx *= x * s
    dx += s
    dx *= dy
    return dx


def swiglu_ref(gu_N2F):
    """gu (N, 2F) = [g, u] -> silu(g) u  (N, F)"""
    F = gu_N2F.shape[1] // 2
    y_NF = silu_ref(gu_N2F[:, :F])
    y_NF *= gu_N2F[:, F:]
    return y_NF


def swiglu_bwd_ref(dy_NF, gu_N2F, again=False):
    """-> dgu (N, 2F). again: y in place of dy."""
    F = dy_NF.shape[1]
    gate_NF, up_NF = gu_N2F[:, :F], gu_N2F[:, F:]
    dgu_N2F = np.empty_like(gu_N2F)
    dgate_NF, dup_NF = dgu_N2F[:, :F], dgu_N2F[:, F:]
    s_NF = sigmoid_ref(gate_NF)
    np.multiply(gate_NF, s_NF, out=dup_NF)  # silu(gate)
    np.subtract(1, s_NF, out=dgate_NF)
    dgate_NF *= dup_NF
    dgate_NF += s_NF  # silu'(gate)
    dgate_NF *= up_NF
    dgate_NF *= dy_NF
    if again:
        np.multiply(dup_NF, up_NF, out=s_NF)
    dup_NF *= dy_NF
    if again:
        dy_NF[...] = s_NF
    return dgu_N2F


# ----------------------------------------------------------------------------- kernels
@device
def sigmoid(x):
    return fast_fdividef(float32(1.0), float32(1.0) + math.exp(-x))


@cuda.jit
def swiglu_fwd_naive_kernel(y_NF, gu_N2F):
    """Grid (N, ceil(F / BLOCK)), block BLOCK. A thread per element of y: the maths, four bytes at a time."""
    n, F = int64(cuda.blockIdx.x), y_NF.shape[1]
    f = cuda.blockIdx.y * BLOCK + cuda.threadIdx.x
    if f < F:
        gate = gu_N2F[n, f]
        y_NF[n, f] = gate * sigmoid(gate) * gu_N2F[n, F + f]


@functools.cache
def make_swiglu_fwd_kernel(F, whole):
    place, gap = make_place(F)

    @kernel(BLOCK)
    def swiglu_fwd_kernel(y, gu, N):
        """Grid blocks_for_rows(N, F), block BLOCK. y: flat (N F), gu: flat (N 2F)."""
        gate = cuda.local.array(EACH, float32)
        up = cuda.local.array(EACH, float32)
        n, f = place()
        if n >= N:
            return
        row = n * (2 * F)  # where gate begins; up begins F later
        load(gate, gu, row + f, gap, row + F, whole)
        load(up, gu, row + F + f, gap, row + 2 * F, whole)
        for j in range(EACH):
            gate[j] = gate[j] * sigmoid(gate[j]) * up[j]
        store(y, n * F + f, gap, n * F + F, gate, whole)

    return swiglu_fwd_kernel


@functools.cache
def make_swiglu_bwd_kernel(F, whole, again=False):
    """again: the kernel that also writes y, over dy."""
    place, gap = make_place(F)

    @device
    def columns(dgu, dy, gu, N):
        """A thread writes the two halves of its columns."""
        gate = cuda.local.array(EACH, float32)
        up = cuda.local.array(EACH, float32)
        d = cuda.local.array(EACH, float32)
        n, f = place()
        if n >= N:
            return
        row = n * (2 * F)
        load(gate, gu, row + f, gap, row + F, whole)
        load(up, gu, row + F + f, gap, row + 2 * F, whole)
        load(d, dy, n * F + f, gap, n * F + F, whole)
        for j in range(EACH):
            s = sigmoid(gate[j])
            silu = gate[j] * s
            y, dup = silu * up[j], d[j] * silu
            gate[j] = d[j] * up[j] * (s + silu * (float32(1.0) - s))
            up[j], d[j] = dup, y
        store(dgu, row + f, gap, row + F, gate, whole)
        store(dgu, row + F + f, gap, row + 2 * F, up, whole)
        if again:
            store(dy, n * F + f, gap, n * F + F, d, whole)

    @kernel(BLOCK)
    def swiglu_bwd_kernel(dgu, dy, gu, N):
        """Grid blocks_for_rows(N, F), block BLOCK. dy: flat (N F), gu, dgu: flat (N 2F)."""
        columns(dgu, dy, gu, N)

    @kernel(BLOCK)
    def swiglu_bwd_again_kernel(dgu, dy, gu, N):
        columns(dgu, dy, gu, N)

    declare_cost(swiglu_bwd_again_kernel, in_place=("dy",))
    return swiglu_bwd_again_kernel if again else swiglu_bwd_kernel


@device
def silu_fwd_chunks(y_n, x_n, first, whole):
    x = cuda.local.array((STEPS, EACH), float32)
    n = y_n.size
    for s in range(STEPS):
        load(x[s], x_n, first + s * STRIDE, GAP, n, whole)
    for s in range(STEPS):
        for j in range(EACH):
            x[s, j] *= sigmoid(x[s, j])
        store(y_n, first + s * STRIDE, GAP, n, x[s], whole)


@kernel(BLOCK)
def silu_fwd_kernel(y_n, x_n, aligned):
    """Grid ceil(n / TILE), block BLOCK."""
    first = first_element()
    if is_whole(first, y_n.size, aligned):
        silu_fwd_chunks(y_n, x_n, first, True)
    else:
        silu_fwd_chunks(y_n, x_n, first, False)


@device
def silu_bwd_chunks(dx_n, dy_n, x_n, first, whole):
    x = cuda.local.array((STEPS, EACH), float32)
    d = cuda.local.array((STEPS, EACH), float32)
    n = dx_n.size
    for s in range(STEPS):
        load(x[s], x_n, first + s * STRIDE, GAP, n, whole)
        load(d[s], dy_n, first + s * STRIDE, GAP, n, whole)
    for s in range(STEPS):
        for j in range(EACH):
            sig = sigmoid(x[s, j])
            d[s, j] *= sig + x[s, j] * sig * (float32(1.0) - sig)
        store(dx_n, first + s * STRIDE, GAP, n, d[s], whole)


@kernel(BLOCK)
def silu_bwd_kernel(dx_n, dy_n, x_n, aligned):
    """Grid ceil(n / TILE), block BLOCK."""
    first = first_element()
    if is_whole(first, dx_n.size, aligned):
        silu_bwd_chunks(dx_n, dy_n, x_n, first, True)
    else:
        silu_bwd_chunks(dx_n, dy_n, x_n, first, False)


# ----------------------------------------------------------------------------- launchers
def swiglu_fwd(gu_N2F: Array) -> Array:
    """gu (N, 2F) float32 or bf16, gate before up -> y (N, F) like gu. ValueError for an odd width."""
    check_array("swiglu", "gu", gu_N2F, (None, None), FLOATS)
    N, F2 = gu_N2F.shape
    check(F2 % 2 == 0, f"swiglu: gu has {F2} columns, expected gate and up of equal width")
    if on_host(gu_N2F):
        return swiglu_ref(wide(gu_N2F)).astype(gu_N2F.dtype, copy=False)
    F = F2 // 2
    y_NF = empty(gu_N2F, (N, F))
    _launch_rows(make_swiglu_fwd_kernel, N, F, y_NF, gu_N2F)
    return y_NF


def swiglu_bwd(dy_NF: Array, gu_N2F: Array, again: bool = False) -> Array:
    """dy (N, F), gu (N, 2F), both float32 or both bf16 -> dgu (N, 2F)

    again: compute y again too, the bits of swiglu_fwd(gu), **written over dy**.
    """
    check_array("swiglu backward", "dy", dy_NF, (None, None), FLOATS)
    N, F = dy_NF.shape
    check_array("swiglu backward", "gu", gu_N2F, (N, 2 * F), (dy_NF.dtype.name,))
    if on_host(dy_NF, gu_N2F):
        dy = wide(dy_NF)
        dgu_N2F = swiglu_bwd_ref(dy, wide(gu_N2F), again)
        if again and dy is not dy_NF:
            dy_NF[...] = dy
        return dgu_N2F.astype(gu_N2F.dtype, copy=False)
    dgu_N2F = empty_like(gu_N2F)
    make_kernel = functools.partial(make_swiglu_bwd_kernel, again=bool(again))
    _launch_rows(make_kernel, N, F, dgu_N2F, dy_NF, gu_N2F)
    return dgu_N2F


def _launch_rows(make_kernel, N, F, *arrays):
    if N and F:
        runs = [a.reshape(-1) for a in arrays]
        launch(make_kernel(F, whole_rows(F, *runs)), blocks_for_rows(N, F), BLOCK, *runs, N)


def silu_fwd(x: Array) -> Array:
    """x float32 or bf16 of any shape -> silu(x)"""
    check_array("silu", "x", x, x.shape, FLOATS)
    if on_host(x):
        return silu_ref(wide(x)).astype(x.dtype, copy=False)
    y = empty_like(x)
    launch_flat(silu_fwd_kernel, y, x)
    return y


def silu_bwd(dy: Array, x: Array) -> Array:
    """-> dx, the shape of x"""
    check_array("silu backward", "x", x, x.shape, FLOATS)
    check_array("silu backward", "dy", dy, x.shape, (x.dtype.name,))
    if on_host(dy, x):
        return silu_bwd_ref(wide(dy), wide(x)).astype(x.dtype, copy=False)
    dx = empty_like(x)
    launch_flat(silu_bwd_kernel, dx, dy, x)
    return dx
