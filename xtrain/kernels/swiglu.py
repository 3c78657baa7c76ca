"""SwiGLU (Shazeer 2020) over one packed array, and SiLU alone.   gu: (N, 2F)   y: (N, F)

gu is the output of one matrix product: columns 0..F-1 hold gate, columns F..2F-1 hold up.

    forward    s = sigmoid(g) = 1 / (1 + exp(-g))        silu(g) = g s        y = silu(gate) up
    backward   ds/dg = s (1 - s), so
               silu'(g) = s + g s (1 - s) = s (1 + g (1 - s))
               dgate = dy up silu'(gate)                 dup = dy silu(gate)

The sigmoid needs no saved copy: s is recomputed from the gate, and everything else follows from s.
exp(-g) overflows for a very negative g, so both cases are written with e = exp(-|g|) <= 1:
s = 1 / (1 + e) for g >= 0, and multiplied through by exp(g), s = e / (1 + e) for g < 0.

Bytes moved, forward: read gu, write y, 3 N F elements. Backward: read gu and dy, write dgu, 5 N F.
"""

import math

import numpy as np
from numba import cuda, float32, int64

from ..device import Array
from ._launch import check, check_array, empty, empty_like, launch, on_host

BLOCK = 256
EACH = 4  # neighbouring elements of a thread: as in elementwise.py
TILE = BLOCK * EACH


# ----------------------------------------------------------------------------- reference
def sigmoid_ref(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def silu_ref(x):
    return x * sigmoid_ref(x)


def silu_bwd_ref(dy, x):
    s = sigmoid_ref(x)
    return dy * (s * (1 + x * (1 - s)))


def swiglu_ref(gu_N2F):
    F = gu_N2F.shape[1] // 2
    return silu_ref(gu_N2F[:, :F]) * gu_N2F[:, F:]


def swiglu_bwd_ref(dy_NF, gu_N2F):
    F = dy_NF.shape[1]
    gate_NF, up_NF = gu_N2F[:, :F], gu_N2F[:, F:]
    return np.concatenate([silu_bwd_ref(dy_NF * up_NF, gate_NF), dy_NF * silu_ref(gate_NF)], axis=1)


# ----------------------------------------------------------------------------- kernels
@cuda.jit(device=True)
def sigmoid(x):
    e = math.exp(-abs(x))
    return (float32(1.0) if x >= float32(0.0) else e) / (float32(1.0) + e)


@cuda.jit(device=True)
def silu_slope(x, s):
    """silu'(x), given s = sigmoid(x)."""
    return s * (float32(1.0) + x * (float32(1.0) - s))


@cuda.jit
def silu_fwd_kernel(y_n, x_n):
    """Grid ceil(n / TILE), block BLOCK."""
    first = (int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x) * EACH
    for j in range(EACH):
        i = first + j
        if i < x_n.size:
            y_n[i] = x_n[i] * sigmoid(x_n[i])


@cuda.jit
def silu_bwd_kernel(dx_n, dy_n, x_n):
    """Grid ceil(n / TILE), block BLOCK."""
    first = (int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x) * EACH
    for j in range(EACH):
        i = first + j
        if i < x_n.size:
            dx_n[i] = dy_n[i] * silu_slope(x_n[i], sigmoid(x_n[i]))


@cuda.jit
def swiglu_fwd_kernel(y_NF, gu_N2F):
    """Grid (N, ceil(F / TILE)), block BLOCK. Block (n, k) owns TILE columns of row n."""
    n, F = int64(cuda.blockIdx.x), y_NF.shape[1]
    first = cuda.blockIdx.y * TILE + cuda.threadIdx.x * EACH
    for j in range(EACH):
        f = first + j
        if f < F:
            gate = gu_N2F[n, f]
            y_NF[n, f] = gate * sigmoid(gate) * gu_N2F[n, F + f]


@cuda.jit
def swiglu_bwd_kernel(dgu_N2F, dy_NF, gu_N2F):
    """Grid (N, ceil(F / TILE)), block BLOCK. A thread writes the two halves of its columns."""
    n, F = int64(cuda.blockIdx.x), dy_NF.shape[1]
    first = cuda.blockIdx.y * TILE + cuda.threadIdx.x * EACH
    for j in range(EACH):
        f = first + j
        if f < F:
            gate, dy = gu_N2F[n, f], dy_NF[n, f]
            s = sigmoid(gate)
            dgu_N2F[n, f] = dy * gu_N2F[n, F + f] * silu_slope(gate, s)
            dgu_N2F[n, F + f] = dy * (gate * s)


# ----------------------------------------------------------------------------- launchers
def swiglu_fwd(gu_N2F: Array) -> Array:
    """gu (N, 2F) float32, gate before up -> y (N, F). ValueError for an odd width."""
    check_array("swiglu", "gu", gu_N2F, (None, None))
    N, F2 = gu_N2F.shape
    check(F2 % 2 == 0, f"swiglu: gu has {F2} columns, expected gate and up of equal width")
    if on_host(gu_N2F):
        return swiglu_ref(gu_N2F)
    F = F2 // 2
    y_NF = empty(gu_N2F, (N, F))
    launch(swiglu_fwd_kernel, (N, -(-F // TILE)), BLOCK, y_NF, gu_N2F)
    return y_NF


def swiglu_bwd(dy_NF: Array, gu_N2F: Array) -> Array:
    """-> dgu (N, 2F)"""
    check_array("swiglu backward", "dy", dy_NF, (None, None))
    N, F = dy_NF.shape
    check_array("swiglu backward", "gu", gu_N2F, (N, 2 * F))
    if on_host(dy_NF, gu_N2F):
        return swiglu_bwd_ref(dy_NF, gu_N2F)
    dgu_N2F = empty_like(gu_N2F)
    launch(swiglu_bwd_kernel, (N, -(-F // TILE)), BLOCK, dgu_N2F, dy_NF, gu_N2F)
    return dgu_N2F


def silu_fwd(x: Array) -> Array:
    """x float32 of any shape -> silu(x)"""
    check_array("silu", "x", x, x.shape)
    if on_host(x):
        return silu_ref(x)
    y = empty_like(x)
    launch(silu_fwd_kernel, -(-x.size // TILE), BLOCK, y.reshape(-1), x.reshape(-1))
    return y


def silu_bwd(dy: Array, x: Array) -> Array:
    """-> dx, the shape of x"""
    check_array("silu backward", "x", x, x.shape)
    check_array("silu backward", "dy", dy, x.shape)
    if on_host(dy, x):
        return silu_bwd_ref(dy, x)
    dx = empty_like(x)
    flat = (dx.reshape(-1), dy.reshape(-1), x.reshape(-1))
    launch(silu_bwd_kernel, -(-x.size // TILE), BLOCK, *flat)
    return dx
