"""From the packed QKV product to attention's q, k, v: split, QK-norm (Henry et al. 2020) and RoPE.

    qkv: (N, P), P = (H + 2G) D    columns: H query heads, G key heads, G value heads
    q: (N, H, D)    k, v: (N, G, D)    rstd: (N, A), A = H + G

This is rmsnorm.py over heads, then rope.py. With head x of q (k likewise), weight w, position p:

    forward    xhat = x r,  r = 1 / sqrt(mean_d(x^2) + eps)      u = xhat w      q = M(p) u
    backward   du = M(-p) dq                       a rotation's inverse is its transpose (rope.py)
               dw = sum over tokens and heads of du xhat
               dx = r (g - xhat mean_d(g xhat)),  g = du w                            (rmsnorm.py)

v is copied. Without weights (Llama) only the rotation remains: u = x.
We save r and read qkv again in backward; u and xhat never exist in memory.
Bytes moved, forward: read qkv, write q, k, v. Backward: read dq, dk, dv and the q, k part of qkv,
write dqkv.

dw is summed in two stages without atomics, as in rmsnorm.py: every warp adds up its heads in its
own row of shared memory, a block writes the sum of its warps as one row of `partial`, then those
rows are added in order.
"""

import math

import numpy as np
from numba import cuda, float32, int64

from ..device import Array
from ._launch import check, check_array, empty, launch, on_host
from ._reduce import add_column_sums, warp_sum
from .rope import check_tables, position_of, positions_for, rope_ref

WARPS = 8  # a block is 8 heads of one token, a warp each
MAX_D = 256  # widest head: the sums for dw take WARPS * MAX_D floats of shared memory
PARTIALS = (
    528  # blocks of the backward: 4 on each of an H200's 132 multiprocessors; rows of `partial`
)


# ----------------------------------------------------------------------------- reference
def qk_norm_rope_ref(qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G, positions_N, eps):
    """-> q (N, H, D), k, v (N, G, D), rstd (N, H + G) or None without weights"""
    N, D = qkv_NP.shape[0], 2 * cos_PR.shape[1]
    x_NXD = qkv_NP.reshape(N, H + 2 * G, D)
    u_NAD, rstd_NA = x_NXD[:, : H + G], None
    if q_w_D is not None:
        mean_NA = np.einsum("nad,nad->na", u_NAD, u_NAD) / D
        rstd_NA = 1 / np.sqrt(mean_NA + qkv_NP.dtype.type(eps))
        u_NAD = u_NAD * rstd_NA[..., None]
        u_NAD *= _per_head(q_w_D, k_w_D, H, G)
    q_NHD, k_NGD = (
        rope_ref(u, cos_PR, sin_PR, positions_N, out=np.empty(u.shape, u.dtype))
        for u in (u_NAD[:, :H], u_NAD[:, H:])
    )
    return q_NHD, k_NGD, x_NXD[:, H + G :].copy(), rstd_NA


def qk_norm_rope_bwd_ref(
    dq_NHD, dk_NGD, dv_NGD, qkv_NP, q_w_D, k_w_D, rstd_NA, cos_PR, sin_PR, positions_N
):
    """-> dqkv (N, P), dq_w (D,), dk_w (D,); the last two None without weights"""
    (N, H, D), G = dq_NHD.shape, dk_NGD.shape[1]
    dqkv_NP = np.empty_like(qkv_NP)
    dx_NXD = dqkv_NP.reshape(N, H + 2 * G, D)
    du_NAD = dx_NXD[:, : H + G]  # turned into dx in place
    rope_ref(dq_NHD, cos_PR, sin_PR, positions_N, -1, out=du_NAD[:, :H])
    rope_ref(dk_NGD, cos_PR, sin_PR, positions_N, -1, out=du_NAD[:, H:])
    dx_NXD[:, H + G :] = dv_NGD
    if q_w_D is None:
        return dqkv_NP, None, None
    xhat_NAD = qkv_NP.reshape(N, H + 2 * G, D)[:, : H + G] * rstd_NA[..., None]
    dq_w_D = np.einsum("nhd,nhd->d", du_NAD[:, :H], xhat_NAD[:, :H])
    dk_w_D = np.einsum("ngd,ngd->d", du_NAD[:, H:], xhat_NAD[:, H:])
    du_NAD *= _per_head(q_w_D, k_w_D, H, G)  # now g
    xhat_NAD *= np.einsum("nad,nad->na", du_NAD, xhat_NAD)[..., None] / D
    du_NAD -= xhat_NAD
    du_NAD *= rstd_NA[..., None]
    return dqkv_NP, dq_w_D, dk_w_D


def _per_head(q_w_D, k_w_D, H, G):
    """-> (A, D): the weight of every head"""
    return np.concatenate(
        [np.broadcast_to(q_w_D, (H, q_w_D.size)), np.broadcast_to(k_w_D, (G, k_w_D.size))]
    )


# ----------------------------------------------------------------------------- kernels
@cuda.jit(device=True)
def norm_rotate_head(y_NXD, rstd_NA, qkv_NP, w_D, cos_PR, sin_PR, n, a, h, p, eps, normalise):
    """One warp: head a of token n, normalised and turned to position p, becomes y[n, h]."""
    lane = cuda.threadIdx.x
    R = cos_PR.shape[1]
    first = a * (2 * R)  # column of qkv
    rstd = float32(1.0)
    if normalise:
        acc = float32(0.0)
        for d in range(lane, 2 * R, 32):
            acc += qkv_NP[n, first + d] * qkv_NP[n, first + d]
        rstd = float32(1.0) / math.sqrt(warp_sum(acc) / float32(2 * R) + eps)
        if lane == 0:
            rstd_NA[n, a] = rstd  # kept for backward
    for r in range(lane, R, 32):
        u1, u2 = qkv_NP[n, first + r], qkv_NP[n, first + r + R]
        if normalise:
            u1 *= rstd * w_D[r]
            u2 *= rstd * w_D[r + R]
        c, s = cos_PR[p, r], sin_PR[p, r]
        y_NXD[n, h, r] = u1 * c - u2 * s
        y_NXD[n, h, r + R] = u2 * c + u1 * s


@cuda.jit
def qk_norm_rope_fwd_kernel(
    q_NHD, k_NGD, v_NGD, rstd_NA, qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, positions_N,
    T, eps, normalise,
):  # fmt: skip
    """Grid (N, ceil((H + 2G) / WARPS)), block (32, WARPS). A warp owns one head of one token."""
    n, lane = int64(cuda.blockIdx.x), cuda.threadIdx.x
    a = cuda.blockIdx.y * WARPS + cuda.threadIdx.y  # heads of q, then of k, then of v
    H, G, D = q_NHD.shape[1], k_NGD.shape[1], q_NHD.shape[2]
    p = position_of(n, positions_N, T)
    if a < H:
        norm_rotate_head(q_NHD, rstd_NA, qkv_NP, q_w_D, cos_PR, sin_PR, n, a, a, p, eps, normalise)
    elif a < H + G:
        h = a - H
        norm_rotate_head(k_NGD, rstd_NA, qkv_NP, k_w_D, cos_PR, sin_PR, n, a, h, p, eps, normalise)
    elif a < H + 2 * G:
        for d in range(lane, D, 32):
            v_NGD[n, a - H - G, d] = qkv_NP[n, a * D + d]


@cuda.jit(device=True)
def norm_rotate_head_bwd(
    dqkv_NP, dw_WD, dy_NXD, qkv_NP, w_D, rstd_NA, cos_PR, sin_PR, n, a, h, p, normalise
):
    """One warp: dy[n, h] turned back, then through the norm of head a. Adds to its row of dw."""
    lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
    R = cos_PR.shape[1]
    first = a * (2 * R)
    rstd, mean = float32(0.0), float32(0.0)
    if normalise:
        rstd = rstd_NA[n, a]
        acc = float32(0.0)
        for r in range(lane, R, 32):
            c, s = cos_PR[p, r], sin_PR[p, r]
            dy1, dy2 = dy_NXD[n, h, r], dy_NXD[n, h, r + R]
            acc += (dy1 * c + dy2 * s) * w_D[r] * qkv_NP[n, first + r]
            acc += (dy2 * c - dy1 * s) * w_D[r + R] * qkv_NP[n, first + r + R]
        mean = warp_sum(acc) * rstd / float32(2 * R)  # of g xhat
    for r in range(lane, R, 32):
        c, s = cos_PR[p, r], sin_PR[p, r]
        dy1, dy2 = dy_NXD[n, h, r], dy_NXD[n, h, r + R]
        du1, du2 = dy1 * c + dy2 * s, dy2 * c - dy1 * s
        if normalise:
            xhat1, xhat2 = qkv_NP[n, first + r] * rstd, qkv_NP[n, first + r + R] * rstd
            dw_WD[warp, r] += du1 * xhat1
            dw_WD[warp, r + R] += du2 * xhat2
            du1 = rstd * (du1 * w_D[r] - xhat1 * mean)
            du2 = rstd * (du2 * w_D[r + R] - xhat2 * mean)
        dqkv_NP[n, first + r] = du1
        dqkv_NP[n, first + r + R] = du2


# The compiler (numba-cuda 0.30) unrolls the loops over planes and keeps addresses for trips that a
# narrow head never makes: 236 registers on sm_90, so that one block would fill a multiprocessor.
# With the limit those addresses spill, and four blocks fit.
@cuda.jit(max_registers=64)
def qk_norm_rope_bwd_kernel(
    dqkv_NP, partial_q_ID, partial_k_ID, dq_NHD, dk_NGD, dv_NGD, qkv_NP, q_w_D, k_w_D, rstd_NA,
    cos_PR, sin_PR, positions_N, T, normalise,
):  # fmt: skip
    """Grid (b, ceil((H + 2G) / WARPS)), block (32, WARPS). A warp owns a head of every b-th token.

    The block's share of dw goes to one row of the partials.
    """
    lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
    N = qkv_NP.shape[0]
    H, G, D = dq_NHD.shape[1], dk_NGD.shape[1], dq_NHD.shape[2]
    dw_WD = cuda.shared.array((WARPS, MAX_D), float32)
    for d in range(lane, D, 32):
        dw_WD[warp, d] = float32(0.0)
    cuda.syncwarp()  # from here on each element has one owner, the lane of its plane
    first = cuda.blockIdx.y * WARPS
    a = first + warp
    for n in range(int64(cuda.blockIdx.x), N, cuda.gridDim.x):
        p = position_of(n, positions_N, T)
        if a < H:
            norm_rotate_head_bwd(
                dqkv_NP, dw_WD, dq_NHD, qkv_NP, q_w_D, rstd_NA, cos_PR, sin_PR,
                n, a, a, p, normalise,
            )  # fmt: skip
        elif a < H + G:
            norm_rotate_head_bwd(
                dqkv_NP, dw_WD, dk_NGD, qkv_NP, k_w_D, rstd_NA, cos_PR, sin_PR,
                n, a, a - H, p, normalise,
            )  # fmt: skip
        elif a < H + 2 * G:
            for d in range(lane, D, 32):
                dqkv_NP[n, a * D + d] = dv_NGD[n, a - H - G, d]
    cuda.syncthreads()  # every warp's sums are there
    if normalise:
        i = cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x
        for d in range(warp * 32 + lane, D, WARPS * 32):
            total_q, total_k = float32(0.0), float32(0.0)
            for w in range(WARPS):  # always in this order: same bits every run
                if first + w < H:
                    total_q += dw_WD[w, d]
                else:  # warps of v have added nothing
                    total_k += dw_WD[w, d]
            partial_q_ID[i, d] = total_q
            partial_k_ID[i, d] = total_k


# ----------------------------------------------------------------------------- launchers
def qk_norm_rope_fwd(
    qkv_NP: Array,
    q_w_D: Array | None,
    k_w_D: Array | None,
    cos_PR: Array,
    sin_PR: Array,
    H: int,
    G: int,
    T: int,
    eps: float,
    positions_N: Array | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """qkv (N, (H + 2G) D) float32, contiguous -> q (N, H, D), k, v (N, G, D), rstd (N, H + G).

    q_w, k_w (D,), or both None: no norm, and rstd is None. Row n stands at position n % T, or at
    positions_N[n], which must lie in the tables (looked at on the CPU only).
    Raises ValueError or TypeError on other shapes or types.
    """
    op, N, D = "qk_norm_rope", qkv_NP.shape[0], 2 * cos_PR.shape[1]
    _check(op, qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G)
    positions, T = positions_for(op, qkv_NP, cos_PR, positions_N, T)
    normalise = q_w_D is not None
    weights = (q_w_D, k_w_D) if normalise else ()
    if on_host(qkv_NP, cos_PR, sin_PR, positions, *weights):
        return qk_norm_rope_ref(qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G, positions, eps)
    q, k, v = (empty(qkv_NP, (N, heads, D)) for heads in (H, G, G))
    rstd = empty(qkv_NP, (N, H + G)) if normalise else None
    unused = q.reshape(-1)  # a kernel takes no None
    q_w, k_w = weights or (unused, unused)
    arrays = (q, k, v, rstd if normalise else qkv_NP, qkv_NP, q_w, k_w, cos_PR, sin_PR, positions)
    grid = (N, -(-(H + 2 * G) // WARPS))
    launch(qk_norm_rope_fwd_kernel, grid, (32, WARPS), *arrays, T, np.float32(eps), normalise)
    return q, k, v, rstd


def qk_norm_rope_bwd(
    dq_NHD: Array,
    dk_NGD: Array,
    dv_NGD: Array,
    qkv_NP: Array,
    q_w_D: Array | None,
    k_w_D: Array | None,
    rstd_NA: Array | None,
    cos_PR: Array,
    sin_PR: Array,
    H: int,
    G: int,
    T: int,
    dq_w_D: Array | None,
    dk_w_D: Array | None,
    positions_N: Array | None = None,
) -> Array:
    """-> dqkv (N, (H + 2G) D). Adds to dq_w, dk_w (D,); without weights these and rstd are None."""
    op, N, D = "qk_norm_rope backward", qkv_NP.shape[0], 2 * cos_PR.shape[1]
    _check(op, qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G)
    for name, d, heads in (("dq", dq_NHD, H), ("dk", dk_NGD, G), ("dv", dv_NGD, G)):
        check_array(op, name, d, (N, heads, D))
    normalise = q_w_D is not None
    norm = (q_w_D, k_w_D, rstd_NA, dq_w_D, dk_w_D) if normalise else ()
    if normalise:
        check_array(op, "rstd", rstd_NA, (N, H + G))
        check_array(op, "dq_w", dq_w_D, (D,))
        check_array(op, "dk_w", dk_w_D, (D,))
    positions, T = positions_for(op, qkv_NP, cos_PR, positions_N, T)
    if on_host(dq_NHD, dk_NGD, dv_NGD, qkv_NP, cos_PR, sin_PR, positions, *norm):
        inputs = (dq_NHD, dk_NGD, dv_NGD, qkv_NP, q_w_D, k_w_D, rstd_NA, cos_PR, sin_PR, positions)
        dqkv_NP, dq_w, dk_w = qk_norm_rope_bwd_ref(*inputs)
        if normalise:
            dq_w_D += dq_w
            dk_w_D += dk_w
        return dqkv_NP
    dqkv_NP = empty(qkv_NP, qkv_NP.shape)
    tiles = -(-(H + 2 * G) // WARPS)
    grid = (min(N, -(-PARTIALS // tiles)), tiles)
    rows = grid[0] * tiles
    partials = [empty(qkv_NP, (rows, D)) for _ in range(2)] if normalise else [qkv_NP] * 2
    unused = qkv_NP.reshape(-1)  # a kernel takes no None
    q_w, k_w, rstd = norm[:3] or (unused, unused, qkv_NP)
    arrays = (dq_NHD, dk_NGD, dv_NGD, qkv_NP, q_w, k_w, rstd, cos_PR, sin_PR, positions)
    launch(qk_norm_rope_bwd_kernel, grid, (32, WARPS), dqkv_NP, *partials, *arrays, T, normalise)
    if normalise and rows:
        add_column_sums(dq_w_D, partials[0])
        add_column_sums(dk_w_D, partials[1])
    return dqkv_NP


def _check(op, qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G):
    D = 2 * cos_PR.shape[1]
    check_tables(op, cos_PR, sin_PR, D)
    check(D <= MAX_D, f"{op}: head width {D} is larger than {MAX_D}")
    check_array(op, "qkv", qkv_NP, (None, (H + 2 * G) * D))
    check((q_w_D is None) == (k_w_D is None), f"{op}: give both norm weights or none")
    if q_w_D is not None:
        check_array(op, "q_w", q_w_D, (D,))
        check_array(op, "k_w", k_w_D, (D,))
