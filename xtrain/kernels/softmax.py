"""Causal softmax of attention scores, with scale and mask.   s, p, dp, ds: (A, R, S)

A is the batch of attention's matrix products (sequence, key head). Its R = rep T rows are rep query
heads of T positions each, so row i has position t = i % T. It attends to the keys s <= t + (S - T):
with S > T the first S - T keys are a past that every row sees.

    forward    p_s = exp(scale s_s - m) / sum_j exp(scale s_j - m),   m = max_j scale s_j
    backward   dp_j/ds_s = scale p_j ([j == s] - p_s): the sum over j is one number for the row,
               ds_s = scale p_s (dp_s - sum_j dp_j p_j)

The maximum and the sums run over the visible keys; masked p and ds are exactly 0. Subtracting m
changes nothing in exact arithmetic and keeps exp from overflowing. m and the sum are computed in
one pass (Milakov & Gimelshein 2018): when a larger score appears, the sum so far is multiplied by
exp(old m - new m). scale s is rounded before m is subtracted (fmul_rn): a fused operation would
give another value than the one whose maximum is m.
Bytes moved: the visible half of s (backward: of dp and p) is read, every row is written completely.
"""

import functools
import math

import numpy as np

from ..device import Array
from .primitives.flat import on_16_bytes
from .primitives.ptx import device, kernel, load4, store4
from .primitives.reduce import MAX_WARPS, block_max, block_sum, warp_max, warp_sum
from .primitives.rows import make_sharing, row_plan
from .primitives.tensor_cores import exp2, fmax
from .runtime.compiler import cuda, float32, fmul_rn, int32, int64
from .runtime.cost import declare_cost
from .runtime.launch import as_float32, check, check_array, dtype_name, launch, on_host

BLOCK = 256
WARPS = BLOCK // 32
# Keys. Up to here one warp per row: no barrier is needed, and the row stays in the L1 cache.
NARROW = 1024
WIDEST = 16384  # keys of the kernels that keep a row in registers
VEC_SIZE = 4  # float32 of one 16-byte access
LOG2E = math.log2(math.e)  # exp(x) = exp2(x log2 e), and exp2 is one instruction
LOWEST = float32(-3.4028235e38)  # the first maximum; with -inf, -inf - -inf would be NaN


# ----------------------------------------------------------------------------- reference
def causal_softmax_ref(s_ARS, T, scale, causal=True):
    """Turn s (A, R, S) into p in place, and return it."""
    S = s_ARS.shape[2]
    x = s_ARS.reshape(-1, T, S)  # a view
    x *= x.dtype.type(scale)
    if causal:
        x += np.where(np.tri(T, S, S - T, dtype=bool), x.dtype.type(0), x.dtype.type(-np.inf))
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    x *= 1 / np.einsum("nts->nt", x)[..., None]
    return s_ARS


def causal_softmax_bwd_ref(dp_ARS, p_ARS, T, scale, causal=True):
    """Turn dp (A, R, S) into ds in place, and return it. The mask needs no code: p is 0 there."""
    ds_ARS = dp_ARS
    ds_ARS -= np.einsum("ars,ars->ar", dp_ARS, p_ARS)[..., None]
    ds_ARS *= p_ARS
    ds_ARS *= ds_ARS.dtype.type(scale)
    return ds_ARS


def _bytes_moved(*args):
    """Return the bytes of the arrays of a launch: the result counts also where it overwrites."""
    return sum(a.nbytes for a in args if not isinstance(a, np.generic))


# ---------------------------------------------------------------------------- kernels for any width
@cuda.jit(device=True)
def online_softmax(x, m, total):
    """Add one score x; return the new maximum and the new sum of exp(score - maximum)."""
    if x > m:
        return x, total * math.exp(m - x) + float32(1.0)
    return m, total + math.exp(x - m)


@cuda.jit(device=True)
def visible_keys(row, T, S, causal):
    """Return the number of keys that this row attends to, counted from the first."""
    if causal:
        return row % T + (S - T) + 1
    return S


@cuda.jit
def causal_softmax_fwd_warp_kernel(p_NS, s_NS, T, scale, causal):
    """Grid ceil(N / WARPS), block BLOCK, N = A R. A warp owns a row, lane l keys l, l + 32, ...

    p may be s.
    """
    n = int64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x % 32
    N, S = s_NS.shape
    if n >= N:  # the same for the whole warp, so no lane is missing in the shuffles
        return
    visible = visible_keys(n, T, S, causal)
    m, total = LOWEST, float32(0.0)
    for s in range(lane, visible, 32):
        m, total = online_softmax(fmul_rn(scale, s_NS[n, s]), m, total)
    top = warp_max(m)
    inverse = float32(1.0) / warp_sum(total * math.exp(m - top))
    for s in range(lane, visible, 32):  # a lane overwrites only what it has read itself
        p_NS[n, s] = math.exp(fmul_rn(scale, s_NS[n, s]) - top) * inverse
    for s in range(visible + lane, S, 32):
        p_NS[n, s] = float32(0.0)


@cuda.jit
def causal_softmax_fwd_kernel(p_NS, s_NS, T, scale, causal):
    """Grid N, block BLOCK. Block n owns row n, thread tid the keys tid, tid + BLOCK, ...

    p may be s.
    """
    n = int64(cuda.blockIdx.x)
    tid = cuda.threadIdx.x
    S = s_NS.shape[1]
    partial = cuda.shared.array(MAX_WARPS, float32)
    visible = visible_keys(n, T, S, causal)
    m, total = LOWEST, float32(0.0)
    for s in range(tid, visible, BLOCK):
        m, total = online_softmax(fmul_rn(scale, s_NS[n, s]), m, total)
    top = block_max(m, partial)
    inverse = float32(1.0) / block_sum(total * math.exp(m - top), partial)
    for s in range(tid, visible, BLOCK):
        p_NS[n, s] = math.exp(fmul_rn(scale, s_NS[n, s]) - top) * inverse
    for s in range(visible + tid, S, BLOCK):
        p_NS[n, s] = float32(0.0)


@cuda.jit
def causal_softmax_bwd_warp_kernel(ds_NS, dp_NS, p_NS, T, scale, causal):
    """Grid ceil(N / WARPS), block BLOCK. A warp owns a row; dp is not read where it is masked.

    ds may be dp.
    """
    n = int64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x % 32
    N, S = p_NS.shape
    if n >= N:
        return
    visible = visible_keys(n, T, S, causal)
    acc = float32(0.0)
    for s in range(lane, visible, 32):
        acc += dp_NS[n, s] * p_NS[n, s]
    dot = warp_sum(acc)
    for s in range(lane, visible, 32):
        ds_NS[n, s] = scale * p_NS[n, s] * (dp_NS[n, s] - dot)
    for s in range(visible + lane, S, 32):
        ds_NS[n, s] = float32(0.0)


@cuda.jit
def causal_softmax_bwd_kernel(ds_NS, dp_NS, p_NS, T, scale, causal):
    """Grid N, block BLOCK. Block n owns row n. ds may be dp."""
    n = int64(cuda.blockIdx.x)
    tid = cuda.threadIdx.x
    S = p_NS.shape[1]
    partial = cuda.shared.array(MAX_WARPS, float32)
    visible = visible_keys(n, T, S, causal)
    acc = float32(0.0)
    for s in range(tid, visible, BLOCK):
        acc += dp_NS[n, s] * p_NS[n, s]
    dot = block_sum(acc, partial)
    for s in range(tid, visible, BLOCK):
        ds_NS[n, s] = scale * p_NS[n, s] * (dp_NS[n, s] - dot)
    for s in range(visible + tid, S, BLOCK):
        ds_NS[n, s] = float32(0.0)


# ------------------------------------------------------------- kernels in use: the row in registers
def make_largest(W):
    """Return largest(v, partial), the maximum of v over the W warps of a row."""

    @device
    def largest(v, partial):
        if W == 1:
            return warp_max(v)
        return block_max(v, partial)

    return largest


@functools.cache
def make_fwd_kernel(W, STEPS, R):
    """Return the forward kernel for rows of a multiple of 4 keys.

    S is not a compile-time constant: it grows during generation.
    """
    row_and_column, total = make_sharing(VEC_SIZE, W)
    largest = make_largest(W)
    STRIDE = 32 * W * VEC_SIZE

    @kernel(32 * W * R)
    def causal_softmax_fwd_row_kernel(p, s, N, S, T, scale, causal):
        """Grid ceil(N / R), block 32 W R. p, s: flat (N S). p may be s."""
        row, column = row_and_column()
        n = int64(cuda.blockIdx.x) * R + row
        if n >= N:  # the same for all threads of a row
            return
        partial = cuda.shared.array(MAX_WARPS, float32)
        x_KE = cuda.local.array((STEPS, VEC_SIZE), float32)
        visible = visible_keys(n, T, S, causal)
        for k in range(STEPS):
            if column + k * STRIDE < visible:
                load4(x_KE[k], s, n * S + column + k * STRIDE)
        m = LOWEST
        for k in range(STEPS):
            seen = int32(visible - column - k * STRIDE)
            for j in range(VEC_SIZE):
                x_KE[k, j] = scale * x_KE[k, j] if j < seen else LOWEST
                m = fmax(m, x_KE[k, j])
        top = largest(m, partial)
        acc = float32(0.0)
        for k in range(STEPS):
            for j in range(VEC_SIZE):
                x_KE[k, j] = exp2((x_KE[k, j] - top) * float32(LOG2E))  # 0 where masked
                acc += x_KE[k, j]
        inverse = float32(1.0) / total(acc, partial)
        for k in range(STEPS):
            if column + k * STRIDE < S:
                for j in range(VEC_SIZE):
                    x_KE[k, j] *= inverse
                store4(p, n * S + column + k * STRIDE, x_KE[k])

    declare_cost(causal_softmax_fwd_row_kernel, nbytes=_bytes_moved)
    return causal_softmax_fwd_row_kernel


@functools.cache
def make_bwd_kernel(W, STEPS, R):
    """Return the backward kernel for rows of a multiple of 4 keys."""
    row_and_column, total = make_sharing(VEC_SIZE, W)
    STRIDE = 32 * W * VEC_SIZE

    @kernel(32 * W * R)
    def causal_softmax_bwd_row_kernel(ds, dp, p, N, S, T, scale, causal):
        """Grid ceil(N / R), block 32 W R. ds, dp, p: flat (N S). ds may be dp.

        Where p is masked it is 0, and so is ds.
        """
        row, column = row_and_column()
        n = int64(cuda.blockIdx.x) * R + row
        if n >= N:
            return
        partial = cuda.shared.array(MAX_WARPS, float32)
        d_KE = cuda.local.array((STEPS, VEC_SIZE), float32)
        p_KE = cuda.local.array((STEPS, VEC_SIZE), float32)
        visible = visible_keys(n, T, S, causal)
        for k in range(STEPS):
            if column + k * STRIDE < visible:
                load4(d_KE[k], dp, n * S + column + k * STRIDE)
                load4(p_KE[k], p, n * S + column + k * STRIDE)
            else:
                for j in range(VEC_SIZE):
                    d_KE[k, j] = p_KE[k, j] = float32(0.0)
        acc = float32(0.0)
        for k in range(STEPS):
            for j in range(VEC_SIZE):
                acc += d_KE[k, j] * p_KE[k, j]
        dot = total(acc, partial)
        for k in range(STEPS):
            if column + k * STRIDE < S:
                for j in range(VEC_SIZE):
                    d_KE[k, j] = scale * p_KE[k, j] * (d_KE[k, j] - dot)
                store4(ds, n * S + column + k * STRIDE, d_KE[k])

    declare_cost(causal_softmax_bwd_row_kernel, nbytes=_bytes_moved)
    return causal_softmax_bwd_row_kernel


for any_width in (
    causal_softmax_fwd_warp_kernel,
    causal_softmax_fwd_kernel,
    causal_softmax_bwd_warp_kernel,
    causal_softmax_bwd_kernel,
):
    declare_cost(any_width, nbytes=_bytes_moved)


# ----------------------------------------------------------------------------- launchers
def causal_softmax_fwd(
    s_ARS: Array, T: int, scale: float, causal: bool = True, p_ARS: Array | None = None
) -> Array:
    """Return p; s: (A, R, S) float32, contiguous.

    T: positions per query head.
    scale: multiplies s.
    causal: False: every key is visible.
    p_ARS: the array that becomes p; None: s, which is overwritten.
    Raises ValueError if R is not a multiple of T, or if causal rows would see no key (S < T).
    """
    _check("softmax", "s", s_ARS, T, causal)
    p_ARS = _result("softmax", "p", s_ARS, p_ARS)
    if on_host(s_ARS, p_ARS):
        if p_ARS is not s_ARS:
            p_ARS[...] = s_ARS
        return causal_softmax_ref(p_ARS, T, scale, causal) if p_ARS.size else p_ARS
    kernels = make_fwd_kernel, causal_softmax_fwd_warp_kernel, causal_softmax_fwd_kernel
    _launch_rows(*kernels, (p_ARS, s_ARS), T, scale, causal)
    return p_ARS


def causal_softmax_bwd(
    dp_ARS: Array,
    p_ARS: Array,
    T: int,
    scale: float,
    causal: bool = True,
    ds_ARS: Array | None = None,
) -> Array:
    """Return ds; dp, p: (A, R, S) float32, contiguous.

    Masked elements of dp may have any finite value.
    ds_ARS: the array that becomes ds; None: dp, which is overwritten.
    T, scale, causal and the errors as in causal_softmax_fwd.
    """
    op = "softmax backward"
    _check(op, "p", p_ARS, T, causal)
    check_array(op, "dp", dp_ARS, p_ARS.shape)
    ds_ARS = _result(op, "ds", dp_ARS, ds_ARS)
    if on_host(dp_ARS, p_ARS, ds_ARS):
        if ds_ARS is not dp_ARS:
            ds_ARS[...] = dp_ARS
        return causal_softmax_bwd_ref(ds_ARS, p_ARS, T, scale, causal)
    kernels = make_bwd_kernel, causal_softmax_bwd_warp_kernel, causal_softmax_bwd_kernel
    _launch_rows(*kernels, (ds_ARS, dp_ARS, p_ARS), T, scale, causal)
    return ds_ARS


def _result(op, name, x_ARS, result_ARS):
    """Return where the result goes: the given array, checked, or x itself."""
    if result_ARS is None:
        return x_ARS
    check_array(op, name, result_ARS, x_ARS.shape, (dtype_name(x_ARS.dtype),))
    return result_ARS


def _check(op, name, x_ARS, T, causal):
    check_array(op, name, x_ARS, (None, None, None))
    R, S = x_ARS.shape[1:]
    whole = R == T == 0 or (T > 0 and R % T == 0)
    check(whole, f"{op}: {R} rows are not whole query heads of T = {T} positions")
    check(not causal or S >= T, f"{op}: {T} causal positions need at least {T} keys, got {S}")


def _launch_rows(make_kernel, warp_kernel, block_kernel, arrays, T, scale, causal):
    A, R, S = arrays[0].shape
    N = A * R
    scale = as_float32(scale)
    if S % VEC_SIZE == 0 and 0 < S <= WIDEST and on_16_bytes(*arrays):
        plan = row_plan(S, VEC_SIZE)
        row_kernel = make_kernel(plan.W, plan.STEPS, plan.R)
        flat = [x.reshape(-1) for x in arrays]
        launch(row_kernel, -(-N // plan.R), plan.THREADS, *flat, N, S, T, scale, causal)
        return
    rows = [x.reshape(N, S) for x in arrays]
    if S <= NARROW:
        launch(warp_kernel, -(-N // WARPS), BLOCK, *rows, T, scale, causal)
    else:
        launch(block_kernel, N, BLOCK, *rows, T, scale, causal)
