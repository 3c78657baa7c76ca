"""SwiGLU of the rows of experts, times their weights.   gu: (M, 2F)   w: (N, K)   y: (M, F)

The output of a mixture is sum_k w_k D_k a_k, with a = silu(gate) up and the down projection D of
the k-th expert. We compute it as sum_k D_k (w_k a_k): then the backward needs only gu.

    forward    y_m = w_m a_m, where slot m holds pair n K + k and w_m = w[n, k]; 0 for padding
    backward   with g = dL/dy, which arrives as (dL/dout) D:
               dw_m = sum_f g a        dgate = (w g) up silu'(gate)        dup = (w g) silu(gate)

See swiglu.py for silu'. The backward overwrites g with y, the bits of the forward, for the weight
gradient of D. A warp owns a row: it adds dw in a fixed order. Unused tiles are neither read nor
written. Bytes moved: 3 and 6 M F elements, as for SwiGLU.
"""

import functools

import numpy as np

from ...device import Array
from ..primitives.flat import CHUNK, QUAD, on_16_bytes, store
from ..primitives.flat import load as load_chunk
from ..primitives.ptx import device, kernel
from ..primitives.reduce import warp_sum
from ..runtime.compiler import cuda, float32, int64
from ..runtime.cost import declare_cost
from ..runtime.launch import (
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
from ..swiglu import sigmoid, swiglu_bwd_ref, swiglu_ref
from .expert_order import TILE, ExpertOrder

BLOCK = 256  # 8 rows
WARPS = BLOCK // 32
GAP = 32 * QUAD  # between the two quads of a lane
WIDE = 32 * CHUNK  # columns of a warp at a time


# ----------------------------------------------------------------------------- reference
def slot_weights_ref(weights_NK, pairs_M):
    """Return the weight of each slot, (M, 1); 0 for padding."""
    w_M = np.where(pairs_M >= 0, weights_NK.reshape(-1)[pairs_M], 0)
    return w_M.astype(weights_NK.dtype)[:, None]


def expert_swiglu_ref(gu_M2F, weights_NK, pairs_M):
    """Return y (M, F)."""
    return swiglu_ref(gu_M2F) * slot_weights_ref(weights_NK, pairs_M)


def expert_swiglu_bwd_ref(g_MF, gu_M2F, weights_NK, pairs_M):
    """Return dgu (M, 2F), dw (N, K), y (M, F)."""
    w_M1 = slot_weights_ref(weights_NK, pairs_M)
    a_MF = swiglu_ref(gu_M2F)
    used = pairs_M >= 0
    dw_P = np.empty(weights_NK.size, a_MF.dtype)
    dw_P[pairs_M[used]] = np.einsum("mf,mf->m", g_MF[used], a_MF[used])
    return swiglu_bwd_ref(g_MF * w_M1, gu_M2F), dw_P.reshape(weights_NK.shape), a_MF * w_M1


# ----------------------------------------------------------------------------- kernels
@functools.cache
def make_expert_swiglu_kernel(F, aligned):
    """Return the forward kernel for rows of F columns. aligned: rows start at 16 bytes."""
    BODY = F // WIDE * WIDE if aligned else 0  # columns in 16-byte accesses

    @device
    def columns(y, gu, m, c, w, vectorized):
        gate = cuda.local.array(CHUNK, float32)
        up = cuda.local.array(CHUNK, float32)
        row = m * (2 * F)
        load_chunk(gate, gu, row + c, GAP, row + F, vectorized)
        load_chunk(up, gu, row + F + c, GAP, row + 2 * F, vectorized)
        for j in range(CHUNK):
            gate[j] = gate[j] * sigmoid(gate[j]) * up[j] * w
        store(y, m * F + c, GAP, m * F + F, gate, vectorized)

    @kernel(BLOCK)
    def expert_swiglu_kernel(y, gu, weights_P, pairs_M, experts_T):
        """Grid ceil(M / WARPS), block BLOCK. y: flat (M F), gu: flat (M 2F)."""
        m = int64(cuda.blockIdx.x) * WARPS + (cuda.threadIdx.x >> 5)
        if m >= pairs_M.size or experts_T[m // TILE] < 0:
            return
        pair = pairs_M[m]
        w = weights_P[pair] if pair >= 0 else float32(0.0)
        first = int64(cuda.laneid) * QUAD
        for c in range(0, BODY, WIDE):
            columns(y, gu, m, first + c, w, True)
        for c in range(BODY, F, WIDE):
            columns(y, gu, m, first + c, w, False)

    return expert_swiglu_kernel


@functools.cache
def make_expert_swiglu_bwd_kernel(F, aligned):
    """Return the backward kernel for rows of F columns. aligned: rows start at 16 bytes."""
    BODY = F // WIDE * WIDE if aligned else 0

    @device
    def columns(dgu, g, gu, m, c, w, vectorized):
        """Compute the gradients of a lane's columns; return their part of dw."""
        gate = cuda.local.array(CHUNK, float32)
        up = cuda.local.array(CHUNK, float32)
        d = cuda.local.array(CHUNK, float32)
        row = m * (2 * F)
        load_chunk(gate, gu, row + c, GAP, row + F, vectorized)
        load_chunk(up, gu, row + F + c, GAP, row + 2 * F, vectorized)
        load_chunk(d, g, m * F + c, GAP, m * F + F, vectorized)
        dw = float32(0.0)
        for j in range(CHUNK):
            s = sigmoid(gate[j])
            silu = gate[j] * s
            a = silu * up[j]
            dw += d[j] * a
            d[j] *= w
            gate[j] = d[j] * up[j] * (s + silu * (float32(1.0) - s))
            up[j] = d[j] * silu
            d[j] = a * w
        store(dgu, row + c, GAP, row + F, gate, vectorized)
        store(dgu, row + F + c, GAP, row + 2 * F, up, vectorized)
        store(g, m * F + c, GAP, m * F + F, d, vectorized)
        return dw

    @kernel(BLOCK)
    def expert_swiglu_bwd_kernel(dgu, dweights_P, g, gu, weights_P, pairs_M, experts_T):
        """Grid ceil(M / WARPS), block BLOCK. g: flat (M F), gu, dgu: flat (M 2F)."""
        m = int64(cuda.blockIdx.x) * WARPS + (cuda.threadIdx.x >> 5)
        if m >= pairs_M.size or experts_T[m // TILE] < 0:  # the same for the whole warp
            return
        pair = pairs_M[m]
        w = weights_P[pair] if pair >= 0 else float32(0.0)
        first = int64(cuda.laneid) * QUAD
        dw = float32(0.0)
        for c in range(0, BODY, WIDE):
            dw += columns(dgu, g, gu, m, first + c, w, True)
        for c in range(BODY, F, WIDE):
            dw += columns(dgu, g, gu, m, first + c, w, False)
        dw = warp_sum(dw)
        if cuda.laneid == 0 and pair >= 0:
            dweights_P[pair] = dw

    declare_cost(expert_swiglu_bwd_kernel, in_place=("g",))
    return expert_swiglu_bwd_kernel


# ----------------------------------------------------------------------------- launchers
def expert_swiglu(gu_M2F: Array, weights_NK: Array, order: ExpertOrder) -> Array:
    """Return y (M, F) in the dtype of gu (M, 2F), float32 or bf16, gate before up.

    weights: (N, K) float32. On a GPU unused tiles are not written. Raises ValueError for an odd
    width.
    """
    M, F = _check("expert_swiglu", gu_M2F, weights_NK, order)
    if on_host(gu_M2F, weights_NK, *order):
        y_MF = expert_swiglu_ref(wide(gu_M2F), weights_NK, order.pairs_M)
        return y_MF.astype(gu_M2F.dtype, copy=False)
    y_MF = empty(gu_M2F, (M, F))
    arrays = y_MF.reshape(-1), gu_M2F.reshape(-1), weights_NK.reshape(-1)
    fwd_kernel = make_expert_swiglu_kernel(F, _aligned(F, y_MF, gu_M2F))
    launch(fwd_kernel, -(-M // WARPS), BLOCK, *arrays, order.pairs_M, order.experts_T)
    return y_MF


def expert_swiglu_bwd(
    g_MF: Array, gu_M2F: Array, weights_NK: Array, order: ExpertOrder
) -> tuple[Array, Array]:
    """Return dgu (M, 2F), and dweights (N, K) float32; **overwrite g (M, F) with y**.

    g, gu: both float32 or both bf16. Two runs give the same bits.
    """
    op = "expert_swiglu backward"
    M, F = _check(op, gu_M2F, weights_NK, order)
    check_array(op, "g", g_MF, (M, F), (dtype_name(gu_M2F.dtype),))
    if on_host(g_MF, gu_M2F, weights_NK, *order):
        given = wide(g_MF), wide(gu_M2F), weights_NK, order.pairs_M
        dgu_M2F, dweights_NK, g_MF[...] = expert_swiglu_bwd_ref(*given)
        return dgu_M2F.astype(gu_M2F.dtype, copy=False), dweights_NK
    dgu_M2F = empty_like(gu_M2F)
    dweights_NK = empty_like(weights_NK)
    aligned = _aligned(F, g_MF, gu_M2F, dgu_M2F)
    arrays = (dgu_M2F, dweights_NK, g_MF, gu_M2F, weights_NK)
    flat = [a.reshape(-1) for a in arrays]
    bwd_kernel = make_expert_swiglu_bwd_kernel(F, aligned)
    launch(bwd_kernel, -(-M // WARPS), BLOCK, *flat, order.pairs_M, order.experts_T)
    return dgu_M2F, dweights_NK


def _check(op, gu_M2F, weights_NK, order):
    """Check the arrays of both launchers. Return M, F."""
    check_array(op, "gu", gu_M2F, (order.pairs_M.size, None), FLOATS)
    M, F2 = gu_M2F.shape
    check(F2 % 2 == 0, f"{op}: gu has {F2} columns, expected gate and up of equal width")
    check_array(op, "weights", weights_NK, order.slots_NK.shape)
    return M, F2 // 2


def _aligned(F, *arrays):
    return F % QUAD == 0 and on_16_bytes(*arrays)
