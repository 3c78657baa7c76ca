"""From the packed QKV product to attention's q, k, v: split, QK-norm (Henry et al. 2020) and RoPE.

    qkv: (N, P), P = (H + 2G) D    columns: H query heads, G key heads, G value heads
    q: (N, H, D)    k, v: (N, G, D)    rstd: (N, A), A = H + G

This is rmsnorm.py over heads, then rope.py. With head x of q (k likewise), weight w, position p:

    forward    xhat = x r,  r = 1 / sqrt(mean_d(x^2) + eps)      u = xhat w      q = M(p) u
    backward   du = M(-p) dq                       a rotation's inverse is its transpose (rope.py)
               dw = sum over tokens and heads of du xhat
               dx = r (g - xhat mean_d(g xhat)),  g = du w                            (rmsnorm.py)

v stays where it is: a view of qkv, whose rows lie P elements apart. Likewise attention's backward writes dv into the
packed gradient, and what is left to do here are the columns of q and k.
Without weights (Llama) only the rotation remains: u = x.
We save r and read qkv again in backward; u and xhat never exist in memory.
qkv, q, k are float32 or bf16; weights, tables, r and all arithmetic are float32.
Bytes moved, forward: read q and k of qkv, write q, k. Backward: read dq, dk, q and k of qkv, write those of dqkv.

dw is summed in two stages without atomics, as in rmsnorm.py: a thread adds up its heads over many tokens, a
block writes the sum of its threads as one row of `partial`, then those rows are added in order.
"""

import functools
import math

import numpy as np
from numba import cuda, float32, int32, int64, uint32
from numba.cuda.libdevice import rsqrtf

from ..device import Array
from .primitives.flat import on_16_bytes
from .primitives.heads import head_plan, make_head_ops
from .primitives.ptx import device, kernel, let_next_start, load1, store1
from .primitives.reduce import add_column_sums, warp_sum
from .primitives.words import each_of
from .rope import angle, check_tables, cycle, position_of, positions_for, rope_ref
from .runtime.cost import declare_cost
from .runtime.launch import FLOATS, can_overlap, check, check_array, empty, launch, on_host, wide

WARPS = 8  # of a block of the plain kernels: 8 heads of one token, a warp each
MAX_D = 256  # widest head: the sums for dw take WARPS * MAX_D floats of shared memory
PARTIALS = 528  # blocks of their backward: 4 on each of an H200's 132 multiprocessors
FWD_THREADS = BWD_THREADS = 96  # of a block of the kernels in use, about
FWD_RESIDENT = 30  # warps of their forward on a multiprocessor
RESIDENT = {4: 20, 8: 18}  # warps of their backward on a multiprocessor, for chunks of 4 and 8
MULTIPROCESSORS = 132  # of an H200


# ----------------------------------------------------------------------------- reference
def qk_norm_rope_ref(qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G, positions_N, eps):
    """-> q (N, H, D), k (N, G, D), rstd (N, H + G) or None without weights"""
    N, D = qkv_NP.shape[0], 2 * cos_PR.shape[1]
    u_NAD, rstd_NA = qkv_NP.reshape(N, H + 2 * G, D)[:, : H + G], None
    if q_w_D is not None:
        mean_NA = np.einsum("nad,nad->na", u_NAD, u_NAD) / D
        rstd_NA = 1 / np.sqrt(mean_NA + qkv_NP.dtype.type(eps))
        u_NAD = u_NAD * rstd_NA[..., None]
        u_NAD *= _per_head(q_w_D, k_w_D, H, G)
    q_NHD, k_NGD = (
        rope_ref(u, cos_PR, sin_PR, positions_N, out=np.empty(u.shape, u.dtype))
        for u in (u_NAD[:, :H], u_NAD[:, H:])
    )
    return q_NHD, k_NGD, rstd_NA


def qk_norm_rope_bwd_ref(
    dqkv_NP, dq_NHD, dk_NGD, qkv_NP, q_w_D, k_w_D, rstd_NA, cos_PR, sin_PR, positions_N
):
    """Fills the columns of q and k of dqkv (N, P). -> dq_w (D,), dk_w (D,), both None without weights"""
    (N, H, D), G = dq_NHD.shape, dk_NGD.shape[1]
    du_NAD = dqkv_NP.reshape(N, H + 2 * G, D)[:, : H + G]  # turned into dx in place
    rope_ref(dq_NHD, cos_PR, sin_PR, positions_N, -1, out=du_NAD[:, :H])
    rope_ref(dk_NGD, cos_PR, sin_PR, positions_N, -1, out=du_NAD[:, H:])
    if q_w_D is None:
        return None, None
    xhat_NAD = qkv_NP.reshape(N, H + 2 * G, D)[:, : H + G] * rstd_NA[..., None]
    dq_w_D = np.einsum("nhd,nhd->d", du_NAD[:, :H], xhat_NAD[:, :H])
    dk_w_D = np.einsum("ngd,ngd->d", du_NAD[:, H:], xhat_NAD[:, H:])
    du_NAD *= _per_head(q_w_D, k_w_D, H, G)  # now g
    xhat_NAD *= np.einsum("nad,nad->na", du_NAD, xhat_NAD)[..., None] / D
    du_NAD -= xhat_NAD
    du_NAD *= rstd_NA[..., None]
    return dq_w_D, dk_w_D


def _per_head(q_w_D, k_w_D, H, G):
    """-> (A, D): the weight of every head"""
    return np.concatenate(
        [np.broadcast_to(q_w_D, (H, q_w_D.size)), np.broadcast_to(k_w_D, (G, k_w_D.size))]
    )


# ----------------------------------------------------------------------------- kernels for heads of any width
@cuda.jit
def qk_norm_rope_fwd_warp_kernel(
    q, k, rstd_NA, qkv, q_w_D, k_w_D, cos_PR, sin_PR, positions_N, H, G, T, eps, normalise
):
    """Grid (N, ceil((H + G) / WARPS)), block (32, WARPS). A warp owns one head of one token.

    q, k, qkv: flat. The maths in its plainest form, two or four bytes at a time.
    """
    n, lane, R = int64(cuda.blockIdx.x), cuda.threadIdx.x, cos_PR.shape[1]
    a, D = cuda.blockIdx.y * WARPS + cuda.threadIdx.y, 2 * R  # heads of q, then of k
    x = (n * (H + 2 * G) + a) * D  # where the head begins in qkv
    if a < H + G:
        out, w_D, y = (q, q_w_D, (n * H + a) * D) if a < H else (k, k_w_D, (n * G + a - H) * D)
        p, rstd = position_of(n, positions_N, T, cos_PR.shape[0]), float32(1.0)
        if normalise:
            acc = float32(0.0)
            for d in range(lane, D, 32):
                acc += load1(qkv, x + d) * load1(qkv, x + d)
            rstd = float32(1.0) / math.sqrt(warp_sum(acc) / float32(D) + eps)
            if lane == 0:
                rstd_NA[n, a] = rstd  # kept for backward
        for r in range(lane, R, 32):
            u1, u2 = load1(qkv, x + r), load1(qkv, x + r + R)
            if normalise:
                u1 *= rstd * w_D[r]
                u2 *= rstd * w_D[r + R]
            c, s = angle(cos_PR, sin_PR, p, r)
            store1(out, y + r, u1 * c - u2 * s)
            store1(out, y + r + R, u2 * c + u1 * s)


# The compiler (numba-cuda 0.30) unrolls the loops over planes and keeps addresses for trips that a narrow head never makes:
# 236 registers on sm_90, so that one block would fill a multiprocessor. With this limit four fit.
@cuda.jit(max_registers=64)
def qk_norm_rope_bwd_warp_kernel(
    dqkv, partial_IE, dq, dk, qkv, q_w_D, k_w_D, rstd_NA, cos_PR, sin_PR, positions_N, N, H, G, T,
    normalise,
):  # fmt: skip
    """Grid (b, ceil((H + G) / WARPS)), block (32, WARPS). A warp owns a head of every b-th token, and a row of dw_WD.

    The block's share of dw goes to one row of partial, E = 2D columns: q's, then k's.
    """
    lane, warp, R = cuda.threadIdx.x, cuda.threadIdx.y, cos_PR.shape[1]
    D, low = 2 * R, cuda.blockIdx.y * WARPS
    a = low + warp
    dw_WD = cuda.shared.array((WARPS, MAX_D), float32)
    for d in range(lane, D, 32):
        dw_WD[warp, d] = float32(0.0)
    cuda.syncwarp()  # from here on each element has one owner, the lane of its plane
    for n in range(int64(cuda.blockIdx.x), N, cuda.gridDim.x):
        x = (n * (H + 2 * G) + a) * D
        if a < H + G:
            dy, w_D, y = (dq, q_w_D, (n * H + a) * D) if a < H else (dk, k_w_D, (n * G + a - H) * D)
            p, rstd, mean = (
                position_of(n, positions_N, T, cos_PR.shape[0]),
                float32(0.0),
                float32(0.0),
            )
            if normalise:
                rstd, acc = rstd_NA[n, a], float32(0.0)
                for r in range(lane, R, 32):
                    c, s = angle(cos_PR, sin_PR, p, r)
                    dy1, dy2 = load1(dy, y + r), load1(dy, y + r + R)
                    acc += (dy1 * c + dy2 * s) * w_D[r] * load1(qkv, x + r)
                    acc += (dy2 * c - dy1 * s) * w_D[r + R] * load1(qkv, x + r + R)
                mean = warp_sum(acc) * rstd / float32(D)  # of g xhat
            for r in range(lane, R, 32):
                c, s = angle(cos_PR, sin_PR, p, r)
                dy1, dy2 = load1(dy, y + r), load1(dy, y + r + R)
                du1, du2 = dy1 * c + dy2 * s, dy2 * c - dy1 * s
                if normalise:
                    xhat1, xhat2 = load1(qkv, x + r) * rstd, load1(qkv, x + r + R) * rstd
                    dw_WD[warp, r] += du1 * xhat1
                    dw_WD[warp, r + R] += du2 * xhat2
                    du1 = rstd * (du1 * w_D[r] - xhat1 * mean)
                    du2 = rstd * (du2 * w_D[r + R] - xhat2 * mean)
                store1(dqkv, x + r, du1)
                store1(dqkv, x + r + R, du2)
    cuda.syncthreads()  # every warp's sums are there
    if normalise:
        i = cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x
        for d in range(warp * 32 + lane, D, WARPS * 32):
            total_q, total_k = float32(0.0), float32(0.0)
            for w in range(WARPS):  # always in this order: same bits every run
                if low + w < H:
                    total_q += dw_WD[w, d]
                else:  # warps without a head have added nothing
                    total_k += dw_WD[w, d]
            partial_IE[i, d] = total_q
            partial_IE[i, D + d] = total_k


# ----------------------------------------------------------------------------- kernels in use: 16 bytes at a time
@functools.cache
def make_fwd_kernel(H, G, D, each, normalise, given):
    """-> kernel and plan, see _heads.py; None twice: this shape does not fit.

    A thread owns its part of one head of q or k, of one token. given: positions are, else they are n % T.
    """
    A, X = H + G, H + 2 * G
    plan = head_plan(A, D, each, FWD_THREADS)
    if plan is None:
        return None, None
    ops, TOKENS = make_head_ops(A, D, each, plan), plan.tokens
    place, load, load_angles, fetch, put = ops.place, ops.load, ops.load_angles, ops.fetch, ops.put
    unpack, pack, turn, total = ops.unpack, ops.pack, ops.turn, ops.total
    R, INVERSE = D // 2, 1 / D

    @kernel(plan.THREADS, FWD_RESIDENT * 32 // plan.THREADS)
    def qk_norm_rope_fwd_kernel(
        q, k, rstd, qkv, q_w_D, k_w_D, cos_PR, sin_PR, positions_N, N, T, eps
    ):
        """Grid (ceil(N / TOKENS), parts), block THREADS. All arrays flat."""
        cos, sin = cuda.local.array(each, float32), cuda.local.array(each, float32)
        x_2E, x_2W = cuda.local.array((2, each), float32), cuda.local.array((2, 4), uint32)
        w, acc, scale = cuda.local.array(each, float32), float32(0.0), float32(1.0)
        token, slot, r = place()
        mine, end, a = int32(cuda.blockIdx.x * TOKENS + token), int32(N), int32(slot)
        live = mine < end and a < A  # a thread without a head repeats one, and stores nothing
        n, a = int64(mine if mine < end else end - 1), int32(a if a < A else A - 1)
        out, w_D, heads, h = (q, q_w_D, H, a) if a < H else (k, k_w_D, G, a - H)
        if given:
            p = position_of(n, positions_N, T, cos_PR.shape[0] // R)
            load_angles(cos, sin, cos_PR, sin_PR, p, r)
        else:
            p = cycle(n, T)
            load(cos, cos_PR, p * R + r)
            load(sin, sin_PR, p * R + r)
        cuda.syncwarp()  # without it the compiler asks for the angles when it has summed up the squares
        fetch(x_2W, qkv, (n * X + a) * D + r)
        unpack(x_2E, x_2W, qkv)
        if normalise:
            for i in range(2):
                for j in range(each):
                    acc += x_2E[i, j] * x_2E[i, j]
            scale = rsqrtf(total(acc) * float32(INVERSE) + eps)
            for i in range(2):
                load(w, w_D, r + i * R)
                for j in range(each):
                    x_2E[i, j] *= scale * w[j]
        turn(x_2E, cos, sin)
        pack(x_2W, x_2E, qkv)
        if live:
            put(out, (n * heads + h) * D + r, x_2W)
            if normalise and r == 0:
                rstd[n * A + a] = scale  # kept for backward

    # v is not touched: of qkv the kernel reads as many bytes as it writes to q and k
    declare_cost(qk_norm_rope_fwd_kernel, sized_like={"qkv": ("q", "k")})
    return qk_norm_rope_fwd_kernel, plan


@functools.cache
def make_bwd_kernel(H, G, D, each, normalise, given, overlap):
    """A thread owns its part of one head of q or k, of every so many tokens, and adds up dw in registers. As soon as it has
    unpacked a head it asks for that of its next token. given: positions are, else they are n % T.
    """
    A, X = H + G, H + 2 * G
    plan = head_plan(A, D, each, BWD_THREADS)
    if plan is None:
        return None, None
    ops, TOKENS, HEADS, S = make_head_ops(A, D, each, plan), plan.tokens, plan.heads, plan.S
    place, load, load_angles, fetch, put = ops.place, ops.load, ops.load_angles, ops.fetch, ops.put
    unpack, pack, turn_back, total = ops.unpack, ops.pack, ops.turn_back, ops.total
    R, INVERSE, THREADS, TILE = D // 2, 1 / D, plan.THREADS, 2 * each * plan.THREADS
    plan.blocks = max(RESIDENT[each] * 32 // THREADS, 1)  # on a multiprocessor

    @device
    def backward_of_norm(d_2E, x_2E, dw_2E, w_2E, rstd):
        """d_2E, the gradient of u, becomes that of x. Adds to dw_2E. xhat = r x is never formed: r goes into du first."""
        acc = float32(0.0)
        for i in range(2):
            for j in range(each):
                d_2E[i, j] *= rstd  # r du
                dw_2E[i, j] += d_2E[i, j] * x_2E[i, j]
                d_2E[i, j] *= w_2E[i, j]  # r g
                acc += d_2E[i, j] * x_2E[i, j]
        mean = total(acc) * (rstd * rstd * float32(INVERSE))  # r^2 mean(r g x)
        for i in range(2):
            for j in range(each):
                d_2E[i, j] -= x_2E[i, j] * mean

    @device
    def add_heads(partial, at, dw_2E, tile):
        """partial[at : at + 2D] = the block's sums of dw, of its query heads and of its key heads"""
        tid, low = cuda.threadIdx.x, cuda.blockIdx.y * HEADS
        for i in range(2):
            for j in range(each):
                tile[(i * each + j) * THREADS + tid] = dw_2E[i, j]
        cuda.syncthreads()  # every thread's sums are there
        for d in range(tid, D, THREADS):
            first = (d // R * each + d % each) * THREADS + d % R // each
            total_q, total_k = float32(0.0), float32(0.0)
            for k in range(TOKENS * HEADS):  # in this order: same bits every run
                if low + k % HEADS < H:
                    total_q += tile[first + k * S]
                else:  # threads without a head have added nothing
                    total_k += tile[first + k * S]
            partial[at + d] = total_q
            partial[at + D + d] = total_k

    @kernel(THREADS, plan.blocks)
    def qk_norm_rope_bwd_kernel(
        dqkv, partial, dq, dk, qkv, q_w_D, k_w_D, rstd, cos_PR, sin_PR, positions_N, N, T
    ):
        """Grid (B, parts), block THREADS. Block b owns tokens b TOKENS, ..., then those B TOKENS further. Arrays flat.

        partial: (parts B, 2D), a block's sums for q_w, then for k_w.
        """
        cos, sin = cuda.local.array(each, float32), cuda.local.array(each, float32)
        d_2E, x_2E = cuda.local.array((2, each), float32), cuda.local.array((2, each), float32)
        dw_2E, w_2E = cuda.local.array((2, each), float32), cuda.local.array((2, each), float32)
        d_2W, x_2W = cuda.local.array((2, 4), uint32), cuda.local.array((2, 4), uint32)
        new_2W = cuda.local.array((2, 4), uint32)
        for i in range(2):
            for j in range(each):
                dw_2E[i, j] = float32(0.0)
        token, slot, r = place()
        a = int32(
            slot if slot < A else A - 1
        )  # a thread without a head repeats one, and stores nothing
        dy, w_D, heads, h = (dq, q_w_D, H, a) if a < H else (dk, k_w_D, G, a - H)
        step, end, scale = int32(cuda.gridDim.x * TOKENS), int32(N), float32(0.0)
        mine = int32(cuda.blockIdx.x * TOKENS + token)  # as are mine + step, ...
        first, has_head = int32(cuda.blockIdx.x * TOKENS), slot < A
        n = int32(mine if mine < end else end - 1)
        at_d, at_x = (int64(n) * heads + h) * D + r, (int64(n) * X + a) * D + r
        p = int32(position_of(n, positions_N, T, cos_PR.shape[0] // R))
        jump = int32(0) if given else int32(cycle(step, T))
        fetch(d_2W, dy, at_d)
        if normalise:
            fetch(x_2W, qkv, at_x)
            scale = rstd[int64(n) * A + a]
            for i in range(2):
                load(w_2E[i], w_D, r + i * R)
        load_angles(cos, sin, cos_PR, sin_PR, p, r)
        while first < end:
            here, live = at_x, mine < end and has_head
            rstd_now = scale if live else float32(0.0)  # 0 adds nothing to dw
            first, mine = int32(first + step), int32(mine + step)
            go = step if mine < end else int32(0)  # at the end the last token again
            n = int32(n + go)
            at_d += int64(go) * int32(heads * D)
            at_x += int64(go) * int32(X * D)
            unpack(d_2E, d_2W, dy)
            fetch(d_2W, dy, at_d)
            if normalise:
                unpack(x_2E, x_2W, qkv)
                fetch(x_2W, qkv, at_x)
                scale = rstd[int64(n) * A + a]
            cuda.syncwarp()  # or the compiler moves the asking behind the arithmetic
            turn_back(d_2E, cos, sin)
            if normalise:
                backward_of_norm(d_2E, x_2E, dw_2E, w_2E, rstd_now)
            if given:
                p = int32(position_of(n, positions_N, T, cos_PR.shape[0] // R))
                load_angles(cos, sin, cos_PR, sin_PR, p, r)
            else:
                p = int32(p + jump)
                p = int32(p - T if p >= T else p)
                load(cos, cos_PR, p * R + r)
                load(sin, sin_PR, p * R + r)
            pack(new_2W, d_2E, dqkv)
            if live:
                put(dqkv, here, new_2W)
        if normalise:
            if overlap:
                let_next_start()  # add_column_sums
            block = int64(cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
            add_heads(partial, block * (2 * D), dw_2E, cuda.shared.array(TILE, float32))

    heads = ("dq", "dk")  # v's part of the packed arrays is not touched
    declare_cost(qk_norm_rope_bwd_kernel, sized_like={"dqkv": heads, "qkv": heads})
    return qk_norm_rope_bwd_kernel, plan


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
    """qkv (N, (H + 2G) D) float32 or bf16, contiguous -> q (N, H, D), k, v (N, G, D) like it, rstd (N, H + G) float32.

    v is a view of qkv: its heads lie side by side, its rows (H + 2G) D elements apart.
    q_w, k_w (D,), or both None: no norm, and rstd is None. Row n stands at position n % T, or at
    positions_N[n], which must lie in the tables (ValueError on the CPU; on a GPU q and k of such a row are NaN).
    Raises ValueError or TypeError on other shapes or types.
    """
    N, D = _check("qk_norm_rope", qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G)
    positions, T = positions_for("qk_norm_rope", qkv_NP, cos_PR, positions_N, T)
    normalise = q_w_D is not None
    weights = (q_w_D, k_w_D) if normalise else ()
    if on_host(qkv_NP, cos_PR, sin_PR, positions, *weights):
        tables = cos_PR, sin_PR, H, G, positions
        *qk, rstd = qk_norm_rope_ref(wide(qkv_NP), q_w_D, k_w_D, *tables, eps)
        q, k = (x.astype(qkv_NP.dtype, copy=False) for x in qk)
        return q, k, values_of(qkv_NP, H, G, D), rstd
    q, k = (empty(qkv_NP, (N, heads, D)) for heads in (H, G))
    rstd = empty(qkv_NP, (N, H + G), np.float32) if normalise else None
    rstd_given = rstd if normalise else cos_PR  # a kernel takes no None
    q_w, k_w = weights or (cos_PR.reshape(-1),) * 2
    flat = [x.reshape(-1) for x in (q, k, rstd_given, qkv_NP, q_w, k_w, cos_PR, sin_PR)]
    fwd_kernel, plan = make_fwd_kernel(H, G, D, each_of(qkv_NP), normalise, T == 0)
    eps = np.float32(eps)
    if plan and on_16_bytes(*flat):
        grid = (-(-N // plan.tokens), plan.parts)
        launch(fwd_kernel, grid, plan.THREADS, *flat, positions, N, T, eps)
    else:
        arrays = (*flat[:2], rstd_given, flat[3], q_w, k_w, cos_PR, sin_PR, positions)
        grid = (N, -(-(H + G) // WARPS))
        launch(qk_norm_rope_fwd_warp_kernel, grid, (32, WARPS), *arrays, H, G, T, eps, normalise)
    return q, k, values_of(qkv_NP, H, G, D), rstd


def values_of(packed_NP: Array, H: int, G: int, D: int) -> Array:
    """The view (N, G, D) of the value heads, the last columns of (N, (H + 2G) D)."""
    return packed_NP.reshape(packed_NP.shape[0], H + 2 * G, D)[:, H + G :]


def qk_norm_rope_bwd(
    dqkv_NP: Array,
    dq_NHD: Array,
    dk_NGD: Array,
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
) -> None:
    """Fills the columns of q and k of dqkv (N, (H + 2G) D); those of v, which attention's backward writes, stay as they are.

    Adds to dq_w, dk_w (D,); without weights these and rstd are None.
    """
    op = "qk_norm_rope backward"
    N, D = _check(op, qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G)
    check_array(op, "dqkv", dqkv_NP, qkv_NP.shape, (qkv_NP.dtype.name,))
    for name, d, heads in (("dq", dq_NHD, H), ("dk", dk_NGD, G)):
        check_array(op, name, d, (N, heads, D), (qkv_NP.dtype.name,))
    normalise = q_w_D is not None
    norm = (q_w_D, k_w_D, rstd_NA, dq_w_D, dk_w_D) if normalise else ()
    shapes = {"rstd": (N, H + G), "dq_w": (D,), "dk_w": (D,)}
    for name, x in zip(shapes, norm[2:]):
        check_array(op, name, x, shapes[name])
    positions, T = positions_for(op, qkv_NP, cos_PR, positions_N, T)
    gradients, tables = (dqkv_NP, dq_NHD, dk_NGD), (cos_PR, sin_PR, positions)
    if on_host(*gradients, qkv_NP, *tables, *norm):
        into, *inputs = map(wide, (*gradients, qkv_NP))
        dq_w, dk_w = qk_norm_rope_bwd_ref(into, *inputs, q_w_D, k_w_D, rstd_NA, *tables)
        if into is not dqkv_NP:
            dqkv_NP[...] = into
        if normalise:
            dq_w_D += dq_w
            dk_w_D += dk_w
        return
    q_w, k_w, rstd = norm[:3] or (cos_PR.reshape(-1), cos_PR.reshape(-1), cos_PR)  # no None
    flat = [x.reshape(-1) for x in (*gradients, qkv_NP)]
    variant = normalise, T == 0, can_overlap(qkv_NP)
    bwd_kernel, plan = make_bwd_kernel(H, G, D, each_of(qkv_NP), *variant)
    fast = plan is not None and on_16_bytes(*flat, q_w, k_w, cos_PR, sin_PR)
    parts = plan.parts if fast else -(-(H + G) // WARPS)
    most = plan.blocks * MULTIPROCESSORS // parts if fast else -(-PARTIALS // parts)
    grid = (min(-(-N // plan.tokens) if fast else N, max(most, 1)), parts)
    partial = empty(qkv_NP, (grid[0] * parts, 2 * D), np.float32)
    if fast:
        arrays = (*flat[1:], q_w, k_w, rstd.reshape(-1), *(t.reshape(-1) for t in tables))
        launch(bwd_kernel, grid, plan.THREADS, flat[0], partial.reshape(-1), *arrays, N, T)
    else:
        arrays = (*flat[1:], q_w, k_w, rstd, *tables, N, H, G, T, normalise)
        launch(qk_norm_rope_bwd_warp_kernel, grid, (32, WARPS), flat[0], partial, *arrays)
    if normalise and N:
        add_column_sums(partial, dq_w_D, dk_w_D)


def _check(op, qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G):
    check_array(op, "cos", cos_PR, (None, None))
    D = 2 * cos_PR.shape[1]
    check_tables(op, cos_PR, sin_PR, D)
    check(0 < D <= MAX_D, f"{op}: head width {D}, expected 2 to {MAX_D}")
    check(H > 0 and G > 0, f"{op}: {H} query heads and {G} key heads, expected at least one")
    check_array(op, "qkv", qkv_NP, (None, (H + 2 * G) * D), FLOATS)
    check((q_w_D is None) == (k_w_D is None), f"{op}: give both norm weights or none")
    if q_w_D is not None:
        check_array(op, "q_w", q_w_D, (D,))
        check_array(op, "k_w", k_w_D, (D,))
    return qkv_NP.shape[0], D
