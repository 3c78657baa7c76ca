"""Causal softmax over attention scores, in place, scale and mask inside.   s, p, dp, ds: (A, R, S)

A is the batch of attention's matrix products (sequence, key head). Its R = rep T rows are rep query
heads of T positions each, so row i stands at position t = i % T. It sees the keys s <= t + (S - T):
with S > T the first S - T keys are a past that everybody sees.

    forward    p_s = exp(scale s_s - m) / sum_j exp(scale s_j - m),   m = max_j scale s_j
    backward   dp_j/ds_s = scale p_j ([j == s] - p_s): the sum over j is one number for the row,
               ds_s = scale p_s (dp_s - sum_j dp_j p_j)

max and sums run over the visible keys; masked p and ds are exactly 0. Subtracting m changes nothing
in exact arithmetic and keeps exp from overflowing. m and the sum are found in one pass (Milakov &
Gimelshein 2018): when a larger score appears, the sum so far is multiplied by exp(old m - new m).
Bytes moved: the visible half of s (backward: of dp and p) is read, every row is written whole.
"""

import math

import numpy as np
from numba import cuda, float32, int64

from ..device import Array
from ._launch import check, check_array, launch, on_host
from ._reduce import MAX_WARPS, block_max, block_sum, warp_max, warp_sum

BLOCK = 256
WARPS = BLOCK // 32
NARROW = 1024  # keys; up to here one warp per row: no barrier, and the row stays in the L1 cache
LOWEST = float32(-3.4028235e38)  # the first maximum; with -inf, -inf - -inf would be NaN


# ----------------------------------------------------------------------------- reference
def causal_softmax_ref(s_ARS, T, scale, causal=True):
    """In place: s becomes p. -> p (A, R, S)"""
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
    """In place: dp becomes ds. -> ds (A, R, S). The mask needs no care: p is 0 there."""
    ds_ARS = dp_ARS
    ds_ARS -= np.einsum("ars,ars->ar", dp_ARS, p_ARS)[..., None]
    ds_ARS *= p_ARS
    ds_ARS *= ds_ARS.dtype.type(scale)
    return ds_ARS


# ----------------------------------------------------------------------------- kernels
@cuda.jit(device=True)
def online_softmax(x, m, total):
    """One more score x. -> the new maximum, and the sum of exp(score - maximum) so far."""
    if x > m:
        return x, total * math.exp(m - x) + float32(1.0)
    return m, total + math.exp(x - m)


@cuda.jit(device=True)
def visible_keys(row, T, S, causal):
    """How many keys this row sees, from the first on."""
    if causal:
        return row % T + (S - T) + 1
    return S


@cuda.jit
def causal_softmax_fwd_warp_kernel(s_NS, T, scale, causal):
    """Grid ceil(N / WARPS), block BLOCK, N = A R. A warp owns a row, lane l keys l, l + 32, ..."""
    n = int64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x % 32
    N, S = s_NS.shape
    if n >= N:  # the same for the whole warp: no lane is missing from the shuffles
        return
    visible = visible_keys(n, T, S, causal)
    m, total = LOWEST, float32(0.0)
    for s in range(lane, visible, 32):
        m, total = online_softmax(scale * s_NS[n, s], m, total)
    top = warp_max(m)
    inverse = float32(1.0) / warp_sum(total * math.exp(m - top))
    for s in range(lane, visible, 32):  # each lane overwrites what it alone has read
        s_NS[n, s] = math.exp(scale * s_NS[n, s] - top) * inverse
    for s in range(visible + lane, S, 32):
        s_NS[n, s] = float32(0.0)


@cuda.jit
def causal_softmax_fwd_kernel(s_NS, T, scale, causal):
    """Grid N, block BLOCK. Block n owns row n, thread tid the keys tid, tid + BLOCK, ..."""
    n, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
    S = s_NS.shape[1]
    partial = cuda.shared.array(MAX_WARPS, float32)
    visible = visible_keys(n, T, S, causal)
    m, total = LOWEST, float32(0.0)
    for s in range(tid, visible, BLOCK):
        m, total = online_softmax(scale * s_NS[n, s], m, total)
    top = block_max(m, partial)
    inverse = float32(1.0) / block_sum(total * math.exp(m - top), partial)
    for s in range(tid, visible, BLOCK):
        s_NS[n, s] = math.exp(scale * s_NS[n, s] - top) * inverse
    for s in range(visible + tid, S, BLOCK):
        s_NS[n, s] = float32(0.0)


@cuda.jit
def causal_softmax_bwd_warp_kernel(dp_NS, p_NS, T, scale, causal):
    """Grid ceil(N / WARPS), block BLOCK. A warp owns a row; dp is not read where it is masked."""
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
        dp_NS[n, s] = scale * p_NS[n, s] * (dp_NS[n, s] - dot)
    for s in range(visible + lane, S, 32):
        dp_NS[n, s] = float32(0.0)


@cuda.jit
def causal_softmax_bwd_kernel(dp_NS, p_NS, T, scale, causal):
    """Grid N, block BLOCK. Block n owns row n."""
    n, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
    S = p_NS.shape[1]
    partial = cuda.shared.array(MAX_WARPS, float32)
    visible = visible_keys(n, T, S, causal)
    acc = float32(0.0)
    for s in range(tid, visible, BLOCK):
        acc += dp_NS[n, s] * p_NS[n, s]
    dot = block_sum(acc, partial)
    for s in range(tid, visible, BLOCK):
        dp_NS[n, s] = scale * p_NS[n, s] * (dp_NS[n, s] - dot)
    for s in range(visible + tid, S, BLOCK):
        dp_NS[n, s] = float32(0.0)


# ----------------------------------------------------------------------------- launchers
def causal_softmax_fwd(s_ARS: Array, T: int, scale: float, causal: bool = True) -> Array:
    """s (A, R, S) float32, contiguous -> p, written over s. causal=False: every key is visible.

    Raises ValueError when R is not a multiple of T, or when causal rows would see no key (S < T).
    """
    _check("softmax", "s", s_ARS, T, causal)
    if on_host(s_ARS):
        return causal_softmax_ref(s_ARS, T, scale, causal) if s_ARS.size else s_ARS
    kernels = causal_softmax_fwd_warp_kernel, causal_softmax_fwd_kernel
    _launch_rows(kernels, (s_ARS,), T, scale, causal)
    return s_ARS


def causal_softmax_bwd(
    dp_ARS: Array, p_ARS: Array, T: int, scale: float, causal: bool = True
) -> Array:
    """dp, p (A, R, S) -> ds, written over dp. Masked dp may be anything finite."""
    _check("softmax backward", "p", p_ARS, T, causal)
    check_array("softmax backward", "dp", dp_ARS, p_ARS.shape)
    if on_host(dp_ARS, p_ARS):
        return causal_softmax_bwd_ref(dp_ARS, p_ARS, T, scale, causal)
    kernels = causal_softmax_bwd_warp_kernel, causal_softmax_bwd_kernel
    _launch_rows(kernels, (dp_ARS, p_ARS), T, scale, causal)
    return dp_ARS


def _check(op, name, x_ARS, T, causal):
    check_array(op, name, x_ARS, (None, None, None))
    R, S = x_ARS.shape[1:]
    check(T > 0 and R % T == 0, f"{op}: {R} rows are not whole query heads of T = {T} positions")
    check(not causal or S >= T, f"{op}: {T} causal positions need at least {T} keys, got {S}")


def _launch_rows(kernels, arrays, T, scale, causal):
    A, R, S = arrays[0].shape
    N = A * R
    kernel, grid = (kernels[0], -(-N // WARPS)) if S <= NARROW else (kernels[1], N)
    rows = [x.reshape(N, S) for x in arrays]
    launch(kernel, grid, BLOCK, *rows, T, np.float32(scale), causal)
