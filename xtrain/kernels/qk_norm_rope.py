"""From the packed QKV product to attention's q, k, v: split, QK-norm (Henry et al. 2020) and RoPE.

    qkv: (N, P), P = (H + 2G) D    columns: H query heads, then G key heads, then G value heads
    q: (N, H, D)    k, v: (N, G, D)    rstd: (N, A), A = H + G

This is rmsnorm.py over heads, then rope.py. With head x of q (k likewise), weight w, position p:

    forward    xhat = x r,  r = 1 / sqrt(mean_d(x^2) + eps)      u = xhat w      q = M(p) u
    backward   du = M(-p) dq                       a rotation's inverse is its transpose (rope.py)
               dw = sum over tokens and heads of du xhat
               dx = r (g - xhat mean_d(g xhat)),  g = du w                            (rmsnorm.py)

v is a view of qkv, with rows P elements apart. In the same way attention's backward writes dv into
the packed gradient, and the backward here computes only the columns of q and k.
Without weights (Llama) only the rotation remains: u = x.
We save r and read qkv again in the backward pass; u and xhat are never written to memory.
qkv, q, k are float32 or bf16; weights, tables, r and all arithmetic are float32.
Bytes moved, forward: read q and k of qkv, write q, k. Backward: read dq, dk, q and k of qkv, write
those of dqkv.

dw is summed in two stages without atomics, as in rmsnorm.py: a thread sums its heads over many
tokens, a block writes the sum of its threads as one row of `partial`, and these rows are added in
order.
"""

import functools
import math
from typing import Any

import numpy as np

from ..device import Array
from .primitives.column_sums import add_column_sums
from .primitives.flat import on_16_bytes
from .primitives.heads import HeadKernel, head_plan, make_add_heads, make_head_ops
from .primitives.ptx import device, kernel, let_next_start, load1, store1
from .primitives.reduce import warp_sum
from .primitives.words import elements_per_vector
from .rope import angle, check_tables, cycle, position_of, positions_for, rope_ref
from .runtime.compiler import cuda, float32, int32, int64, rsqrtf, uint32
from .runtime.cost import declare_cost
from .runtime.launch import (
    FLOATS,
    as_float32,
    can_overlap,
    check,
    check_array,
    dtype_name,
    empty,
    launch,
    on_host,
    wide,
)

# The plain kernels, for heads of any width
WARPS = 8  # per block: 8 heads of one token, one warp each
MAX_D = 256  # widest head: the sums for dw take WARPS * MAX_D floats of shared memory
PARTIALS = 528  # blocks of the backward: 4 on each of an H200's 132 multiprocessors
# The kernels in use
FWD_THREADS = BWD_THREADS = 96  # per block, approximately
FWD_RESIDENT = 30  # warps of the forward per multiprocessor
RESIDENT = {4: 20, 8: 18}  # warps of the backward per multiprocessor, by the elements of a chunk
MULTIPROCESSORS = 132  # of an H200


# ----------------------------------------------------------------------------- reference
def qk_norm_rope_ref(qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G, positions_N, eps):
    """Return q (N, H, D), k (N, G, D), and rstd (N, H + G), None without weights."""
    N = qkv_NP.shape[0]
    D = 2 * cos_PR.shape[1]
    u_NAD = qkv_NP.reshape(N, H + 2 * G, D)[:, : H + G]
    rstd_NA = None
    if q_w_D is not None:
        mean_NA = np.einsum("nad,nad->na", u_NAD, u_NAD) / D
        rstd_NA = 1 / np.sqrt(mean_NA + qkv_NP.dtype.type(eps))
        u_NAD = u_NAD * rstd_NA[..., None]
        u_NAD *= _per_head(q_w_D, k_w_D, H, G)
    q_NHD = np.empty((N, H, D), u_NAD.dtype)
    k_NGD = np.empty((N, G, D), u_NAD.dtype)
    rope_ref(u_NAD[:, :H], cos_PR, sin_PR, positions_N, out=q_NHD)
    rope_ref(u_NAD[:, H:], cos_PR, sin_PR, positions_N, out=k_NGD)
    return q_NHD, k_NGD, rstd_NA


def qk_norm_rope_bwd_ref(
    dqkv_NP, dq_NHD, dk_NGD, qkv_NP, q_w_D, k_w_D, rstd_NA, cos_PR, sin_PR, positions_N
):
    """Fill the columns of q and k of dqkv (N, P); return dq_w (D,), dk_w (D,).

    Both are None without weights.
    """
    N, H, D = dq_NHD.shape
    G = dk_NGD.shape[1]
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
    """Return the weight of every head, (A, D)."""
    return np.concatenate([np.tile(q_w_D, (H, 1)), np.tile(k_w_D, (G, 1))])


# ------------------------------------------------------------------- kernels for heads of any width
@cuda.jit
def qk_norm_rope_fwd_warp_kernel(
    q, k, rstd_NA, qkv, q_w_D, k_w_D, cos_PR, sin_PR, positions_N, H, G, T, eps, normalise
):
    """Grid (N, ceil((H + G) / WARPS)), block (32, WARPS). A warp owns one head of one token.

    q, k, qkv: flat. The maths in its simplest form, two or four bytes per access.
    """
    n = int64(cuda.blockIdx.x)
    lane = cuda.threadIdx.x
    R = cos_PR.shape[1]
    # a: the heads of q, then those of k
    a = cuda.blockIdx.y * WARPS + cuda.threadIdx.y
    D = 2 * R
    x = (n * (H + 2 * G) + a) * D  # start of the head in qkv
    if a < H + G:
        out, w_D, y = (q, q_w_D, (n * H + a) * D) if a < H else (k, k_w_D, (n * G + a - H) * D)
        p = position_of(n, positions_N, T, cos_PR.shape[0])
        rstd = float32(1.0)
        if normalise:
            acc = float32(0.0)
            for d in range(lane, D, 32):
                acc += load1(qkv, x + d) * load1(qkv, x + d)
            rstd = float32(1.0) / math.sqrt(warp_sum(acc) / float32(D) + eps)
            if lane == 0:
                rstd_NA[n, a] = rstd  # saved for backward
        for r in range(lane, R, 32):
            u1, u2 = load1(qkv, x + r), load1(qkv, x + r + R)
            if normalise:
                u1 *= rstd * load1(w_D, r)
                u2 *= rstd * load1(w_D, r + R)
            c, s = angle(cos_PR, sin_PR, p, r)
            store1(out, y + r, u1 * c - u2 * s)
            store1(out, y + r + R, u2 * c + u1 * s)


# The compiler (numba-cuda 0.30) unrolls the loops over planes and keeps addresses for iterations
# that a narrow head never executes: 236 registers on sm_90, so one block would fill a
# multiprocessor. With this limit four blocks fit.
BWD_WARP_OPTIONS: dict[str, Any] = {"max_registers": 64}


@cuda.jit(**BWD_WARP_OPTIONS)
def qk_norm_rope_bwd_warp_kernel(
    dqkv,
    partial_IE,
    dq,
    dk,
    qkv,
    q_w_D,
    k_w_D,
    rstd_NA,
    cos_PR,
    sin_PR,
    positions_N,
    N,
    H,
    G,
    T,
    normalise,
):
    """Grid (b, ceil((H + G) / WARPS)), block (32, WARPS).

    A warp owns a head of every b-th token, and a row of dw_WD. The block writes its sum for dw to
    one row of partial, E = 2D columns: dq_w, then dk_w.
    """
    lane = cuda.threadIdx.x
    warp = cuda.threadIdx.y
    R = cos_PR.shape[1]
    D = 2 * R
    first_head = cuda.blockIdx.y * WARPS
    a = first_head + warp
    dw_WD = cuda.shared.array((WARPS, MAX_D), float32)
    for d in range(lane, D, 32):
        dw_WD[warp, d] = float32(0.0)
    cuda.syncwarp()  # from here on one lane owns each element: that of its plane
    for n in range(int64(cuda.blockIdx.x), N, cuda.gridDim.x):
        x = (n * (H + 2 * G) + a) * D
        if a < H + G:
            dy, w_D, y = (dq, q_w_D, (n * H + a) * D) if a < H else (dk, k_w_D, (n * G + a - H) * D)
            p = position_of(n, positions_N, T, cos_PR.shape[0])
            rstd, mean = float32(0.0), float32(0.0)
            if normalise:
                rstd = rstd_NA[n, a]
                acc = float32(0.0)
                for r in range(lane, R, 32):
                    c, s = angle(cos_PR, sin_PR, p, r)
                    dy1, dy2 = load1(dy, y + r), load1(dy, y + r + R)
                    acc += (dy1 * c + dy2 * s) * load1(w_D, r) * load1(qkv, x + r)
                    acc += (dy2 * c - dy1 * s) * load1(w_D, r + R) * load1(qkv, x + r + R)
                mean = warp_sum(acc) * rstd / float32(D)  # of g xhat
            for r in range(lane, R, 32):
                c, s = angle(cos_PR, sin_PR, p, r)
                dy1, dy2 = load1(dy, y + r), load1(dy, y + r + R)
                du1, du2 = dy1 * c + dy2 * s, dy2 * c - dy1 * s
                if normalise:
                    xhat1, xhat2 = load1(qkv, x + r) * rstd, load1(qkv, x + r + R) * rstd
                    dw_WD[warp, r] += du1 * xhat1
                    dw_WD[warp, r + R] += du2 * xhat2
                    du1 = rstd * (du1 * load1(w_D, r) - xhat1 * mean)
                    du2 = rstd * (du2 * load1(w_D, r + R) - xhat2 * mean)
                store1(dqkv, x + r, du1)
                store1(dqkv, x + r + R, du2)
    cuda.syncthreads()  # every warp's sums are written
    if normalise:
        i = cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x
        for d in range(warp * 32 + lane, D, WARPS * 32):
            total_q, total_k = float32(0.0), float32(0.0)
            for w in range(WARPS):  # a fixed order: the same bits every run
                if first_head + w < H:
                    total_q += dw_WD[w, d]
                else:  # includes warps without a head: their sums are zero
                    total_k += dw_WD[w, d]
            partial_IE[i, d] = total_q
            partial_IE[i, D + d] = total_k


# --------------------------------------------------------------- kernels in use: 16 bytes at a time
@functools.cache
def make_fwd_kernel(H, G, D, vec, normalise, positions_given):
    """Return the forward kernel and its plan; None if the shape does not fit.

    A thread owns two chunks of one head of q or k, of one token, see primitives/heads.py.
    positions_given: read positions_N, else use n % T.
    """
    A = H + G
    X = H + 2 * G
    plan = head_plan(A, D, vec, FWD_THREADS)
    if plan is None:
        return None
    ops = make_head_ops(A, D, vec, plan)
    TOKENS = plan.tokens
    token_head_plane = ops.token_head_plane
    load = ops.load
    load_angles = ops.load_angles
    load_words = ops.load_words
    store_words = ops.store_words
    unpack = ops.unpack
    pack = ops.pack
    rotate = ops.rotate
    total = ops.total
    R = D // 2
    INVERSE = 1 / D

    @kernel(plan.THREADS, FWD_RESIDENT * 32 // plan.THREADS)
    def qk_norm_rope_fwd_kernel(
        q, k, rstd, qkv, q_w_D, k_w_D, cos_PR, sin_PR, positions_N, N, T, eps
    ):
        """Grid (ceil(N / TOKENS), head_blocks), block THREADS. All arrays flat."""
        cos = cuda.local.array(vec, float32)
        sin = cuda.local.array(vec, float32)
        x_2E = cuda.local.array((2, vec), float32)
        x_2W = cuda.local.array((2, 4), uint32)
        w = cuda.local.array(vec, float32)
        acc = float32(0.0)
        scale = float32(1.0)
        token, head, r = token_head_plane()
        mine = int32(cuda.blockIdx.x * TOKENS + token)
        end = int32(N)
        a = int32(head)
        # A thread without a head computes a copy of the last one and stores nothing.
        active = mine < end and a < A
        n = int64(mine if mine < end else end - 1)
        a = int32(a if a < A else A - 1)
        out, w_D, heads, h = (q, q_w_D, H, a) if a < H else (k, k_w_D, G, a - H)
        if positions_given:
            p = position_of(n, positions_N, T, cos_PR.shape[0] // R)
            load_angles(cos, sin, cos_PR, sin_PR, p, r)
        else:
            p = cycle(n, T)
            load(cos, cos_PR, p * R + r)
            load(sin, sin_PR, p * R + r)
        cuda.syncwarp()  # keeps the compiler from loading the angles only after the sum of squares
        load_words(x_2W, qkv, (n * X + a) * D + r)
        unpack(x_2E, x_2W, qkv)
        if normalise:
            for i in range(2):
                for j in range(vec):
                    acc += x_2E[i, j] * x_2E[i, j]
            scale = rsqrtf(total(acc) * float32(INVERSE) + eps)
            for i in range(2):
                load(w, w_D, r + i * R)
                for j in range(vec):
                    x_2E[i, j] *= scale * w[j]
        rotate(x_2E, cos, sin)
        pack(x_2W, x_2E, qkv)
        if active:
            store_words(out, (n * heads + h) * D + r, x_2W)
            if normalise and r == 0:
                rstd[n * A + a] = scale  # saved for backward

    # v is not touched: of qkv the kernel reads as many bytes as it writes to q and k
    declare_cost(qk_norm_rope_fwd_kernel, sized_like={"qkv": ("q", "k")})
    return HeadKernel(qk_norm_rope_fwd_kernel, plan)


def _make_backward_of_norm(D, vec, total):
    """Return the device function that goes back through the norm of a head."""
    INVERSE = 1 / D

    @device
    def backward_of_norm(d_2E, x_2E, dw_2E, w_2E, rstd):
        """Turn du in d_2E into dx, and add to dw_2E.

        xhat = r x is never computed: du is multiplied by r first.
        """
        acc = float32(0.0)
        for i in range(2):
            for j in range(vec):
                d_2E[i, j] *= rstd  # r du
                dw_2E[i, j] += d_2E[i, j] * x_2E[i, j]
                d_2E[i, j] *= w_2E[i, j]  # r g
                acc += d_2E[i, j] * x_2E[i, j]
        mean = total(acc) * (rstd * rstd * float32(INVERSE))  # r^2 mean(r g x)
        for i in range(2):
            for j in range(vec):
                d_2E[i, j] -= x_2E[i, j] * mean

    return backward_of_norm


@functools.cache
def make_bwd_kernel(H, G, D, vec, normalise, positions_given, overlap):
    """Return the backward kernel and its plan; None if the shape does not fit.

    A thread owns two chunks of one head of q or k, of every B TOKENS-th token, and sums dw in
    registers, see primitives/heads.py. As soon as it has unpacked a head it issues the loads for
    its next token.
    positions_given: read positions_N, else use n % T.
    overlap: let add_column_sums start early.
    """
    A = H + G
    X = H + 2 * G
    plan = head_plan(A, D, vec, BWD_THREADS)
    if plan is None:
        return None
    ops = make_head_ops(A, D, vec, plan)
    TOKENS = plan.tokens
    token_head_plane = ops.token_head_plane
    load = ops.load
    load_angles = ops.load_angles
    load_words = ops.load_words
    store_words = ops.store_words
    unpack = ops.unpack
    pack = ops.pack
    rotate_back = ops.rotate_back
    R = D // 2
    THREADS = plan.THREADS
    TILE = 2 * vec * plan.THREADS
    blocks_per_sm = max(RESIDENT[vec] * 32 // THREADS, 1)
    backward_of_norm = _make_backward_of_norm(D, vec, ops.total)
    add_heads = make_add_heads(H, D, vec, plan)

    @kernel(THREADS, blocks_per_sm)
    def qk_norm_rope_bwd_kernel(
        dqkv, partial, dq, dk, qkv, q_w_D, k_w_D, rstd, cos_PR, sin_PR, positions_N, N, T
    ):
        """Grid (B, head_blocks), block THREADS.

        Block b owns tokens b TOKENS, ..., then those B TOKENS further on. All arrays flat.
        partial: (head_blocks B, 2D), a block's sums for dq_w, then for dk_w.
        """
        cos = cuda.local.array(vec, float32)
        sin = cuda.local.array(vec, float32)
        d_2E = cuda.local.array((2, vec), float32)
        x_2E = cuda.local.array((2, vec), float32)
        dw_2E = cuda.local.array((2, vec), float32)
        w_2E = cuda.local.array((2, vec), float32)
        d_2W = cuda.local.array((2, 4), uint32)
        x_2W = cuda.local.array((2, 4), uint32)
        new_2W = cuda.local.array((2, 4), uint32)
        for i in range(2):
            for j in range(vec):
                dw_2E[i, j] = float32(0.0)
        token, head, r = token_head_plane()
        # A thread without a head computes a copy of the last one and stores nothing.
        a = int32(head if head < A else A - 1)
        dy, w_D, heads, h = (dq, q_w_D, H, a) if a < H else (dk, k_w_D, G, a - H)
        step = int32(cuda.gridDim.x * TOKENS)
        end = int32(N)
        scale = float32(0.0)
        mine = int32(cuda.blockIdx.x * TOKENS + token)  # then mine + step, ...
        first = int32(cuda.blockIdx.x * TOKENS)
        has_head = head < A
        n = int32(mine if mine < end else end - 1)
        d_start, x_start = (int64(n) * heads + h) * D + r, (int64(n) * X + a) * D + r
        p = int32(position_of(n, positions_N, T, cos_PR.shape[0] // R))
        jump = int32(0) if positions_given else int32(cycle(step, T))
        load_words(d_2W, dy, d_start)
        if normalise:
            load_words(x_2W, qkv, x_start)
            scale = rstd[int64(n) * A + a]
            for i in range(2):
                load(w_2E[i], w_D, r + i * R)
        load_angles(cos, sin, cos_PR, sin_PR, p, r)
        while first < end:
            current = x_start
            active = mine < end and has_head
            rstd_now = scale if active else float32(0.0)  # 0 adds nothing to dw
            first, mine = int32(first + step), int32(mine + step)
            advance = step if mine < end else int32(0)  # after the last token, load it again
            n = int32(n + advance)
            d_start += int64(advance) * int32(heads * D)
            x_start += int64(advance) * int32(X * D)
            unpack(d_2E, d_2W, dy)
            load_words(d_2W, dy, d_start)
            if normalise:
                unpack(x_2E, x_2W, qkv)
                load_words(x_2W, qkv, x_start)
                scale = rstd[int64(n) * A + a]
            cuda.syncwarp()  # keeps the compiler from moving the loads behind the arithmetic
            rotate_back(d_2E, cos, sin)
            if normalise:
                backward_of_norm(d_2E, x_2E, dw_2E, w_2E, rstd_now)
            if positions_given:
                p = int32(position_of(n, positions_N, T, cos_PR.shape[0] // R))
                load_angles(cos, sin, cos_PR, sin_PR, p, r)
            else:
                p = int32(p + jump)
                p = int32(p - T if p >= T else p)
                load(cos, cos_PR, p * R + r)
                load(sin, sin_PR, p * R + r)
            pack(new_2W, d_2E, dqkv)
            if active:
                store_words(dqkv, current, new_2W)
        if normalise:
            if overlap:
                let_next_start()  # the next kernel: add_column_sums
            block = int64(cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
            add_heads(partial, block * (2 * D), dw_2E, cuda.shared.array(TILE, float32))

    heads = ("dq", "dk")  # v's part of the packed arrays is not touched
    declare_cost(qk_norm_rope_bwd_kernel, sized_like={"dqkv": heads, "qkv": heads})
    return HeadKernel(qk_norm_rope_bwd_kernel, plan, blocks_per_sm)


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
    """Split packed QKV, normalise q and k per head, and rotate them.

    Returns q (N, H, D) and k, v (N, G, D) with the dtype of qkv, and rstd (N, H + G) float32, None
    without weights. v is a view of qkv: its heads are contiguous, its rows (H + 2G) D elements
    apart.

    qkv: (N, (H + 2G) D) float32 or bf16, contiguous. With G = 0 it holds the query heads alone.
    q_w, k_w: (D,) float32 or bf16, or both None: no norm.
    cos, sin: (P, D / 2) float32.
    positions: row n has position n % T, or positions_N[n] if given.

    A position outside the tables raises ValueError on the CPU; on a GPU, where the check would have
    to synchronize, q and k of that row are NaN.
    """
    N, D = _check("qk_norm_rope", qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G)
    positions, T = positions_for("qk_norm_rope", qkv_NP, cos_PR, positions_N, T)
    normalise = q_w_D is not None
    weights: tuple[Array, ...] = (q_w_D, k_w_D) if normalise else ()
    if on_host(qkv_NP, cos_PR, sin_PR, positions, *weights):
        tables = cos_PR, sin_PR, H, G, positions
        q_w, k_w = [wide(w) for w in weights] or (None, None)
        *qk, rstd = qk_norm_rope_ref(wide(qkv_NP), q_w, k_w, *tables, eps)
        q, k = (x.astype(qkv_NP.dtype, copy=False) for x in qk)
        return q, k, values_of(qkv_NP, H, G, D), rstd
    q = empty(qkv_NP, (N, H, D))
    k = empty(qkv_NP, (N, G, D))
    rstd = empty(qkv_NP, (N, H + G), np.float32) if normalise else None
    # a kernel argument cannot be None
    rstd_or_unused: Array = cos_PR if rstd is None else rstd
    q_w, k_w = weights or (cos_PR.reshape(-1), cos_PR.reshape(-1))
    flat = [x.reshape(-1) for x in (q, k, rstd_or_unused, qkv_NP, q_w, k_w, cos_PR, sin_PR)]
    fwd = make_fwd_kernel(H, G, D, elements_per_vector(qkv_NP), normalise, T == 0)
    if fwd is not None and on_16_bytes(*flat):
        grid = (-(-N // fwd.plan.tokens), fwd.plan.head_blocks)
        launch(fwd.kernel, grid, fwd.plan.THREADS, *flat, positions, N, T, as_float32(eps))
    else:
        arrays = (*flat[:2], rstd_or_unused, flat[3], q_w, k_w, cos_PR, sin_PR, positions)
        grid = (N, -(-(H + G) // WARPS))
        scalars = (H, G, T, as_float32(eps), normalise)
        launch(qk_norm_rope_fwd_warp_kernel, grid, (32, WARPS), *arrays, *scalars)
    return q, k, values_of(qkv_NP, H, G, D), rstd


def values_of(packed_NP: Array, H: int, G: int, D: int) -> Array:
    """Return the view (N, G, D) of the value heads, the last columns of packed (N, (H + 2G) D)."""
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
    add: bool = True,
) -> None:
    """Write the columns of q and k of dqkv, and add to dq_w and dk_w.

    dqkv, qkv: (N, (H + 2G) D), dq: (N, H, D), dk: (N, G, D), one dtype. The columns of v stay
        unchanged: attention's backward writes them.
    rstd: (N, H + G), dq_w, dk_w: (D,), float32; all None without weights.
    add: False: dq_w and dk_w, of one dtype, float32 or bf16, become the gradients.
    The other arguments as in the forward. Two runs give the same bits.
    """
    op = "qk_norm_rope backward"
    N, D = _check(op, qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G)
    check_array(op, "dqkv", dqkv_NP, qkv_NP.shape, (dtype_name(qkv_NP.dtype),))
    check_array(op, "dq", dq_NHD, (N, H, D), (dtype_name(qkv_NP.dtype),))
    check_array(op, "dk", dk_NGD, (N, G, D), (dtype_name(qkv_NP.dtype),))
    normalise = q_w_D is not None
    norm: Any = ()
    if normalise:
        norm = (q_w_D, k_w_D, rstd_NA, dq_w_D, dk_w_D)
        check_array(op, "rstd", rstd_NA, (N, H + G))
        check_array(op, "dq_w", dq_w_D, (D,), FLOATS[:1] if add else FLOATS)
        check_array(op, "dk_w", dk_w_D, (D,), (dtype_name(norm[3].dtype),))
    positions, T = positions_for(op, qkv_NP, cos_PR, positions_N, T)
    gradients = (dqkv_NP, dq_NHD, dk_NGD)
    tables = (cos_PR, sin_PR, positions)
    if on_host(*gradients, qkv_NP, *tables, *norm):
        dqkv, dq, dk, qkv = map(wide, (*gradients, qkv_NP))
        q_w, k_w = [wide(w) for w in norm[:2]] or (None, None)
        dq_w, dk_w = qk_norm_rope_bwd_ref(dqkv, dq, dk, qkv, q_w, k_w, rstd_NA, *tables)
        if dqkv is not dqkv_NP:
            dqkv_NP[...] = dqkv
        if normalise:
            for sums, dw in zip(norm[3:], (dq_w, dk_w)):
                sums[...] = sums + dw if add else dw
        return
    q_w, k_w, rstd = norm[:3] or (cos_PR.reshape(-1), cos_PR.reshape(-1), cos_PR)  # no None
    flat = [x.reshape(-1) for x in (*gradients, qkv_NP)]
    variant = normalise, T == 0, can_overlap(qkv_NP)
    bwd = make_bwd_kernel(H, G, D, elements_per_vector(qkv_NP), *variant)
    if bwd is not None and on_16_bytes(*flat, q_w, k_w, cos_PR, sin_PR):
        plan = bwd.plan
        head_blocks = bwd.plan.head_blocks
        resident = max(bwd.blocks_per_sm * MULTIPROCESSORS // head_blocks, 1)
        grid = (min(-(-N // plan.tokens), resident), head_blocks)
        partial = empty(qkv_NP, (grid[0] * head_blocks, 2 * D), np.float32)
        arrays = (*flat[1:], q_w, k_w, rstd.reshape(-1), *(t.reshape(-1) for t in tables))
        launch(bwd.kernel, grid, plan.THREADS, flat[0], partial.reshape(-1), *arrays, N, T)
    else:
        head_blocks = -(-(H + G) // WARPS)
        grid = (min(N, max(-(-PARTIALS // head_blocks), 1)), head_blocks)
        partial = empty(qkv_NP, (grid[0] * head_blocks, 2 * D), np.float32)
        arrays = (*flat[1:], q_w, k_w, rstd, *tables, N, H, G, T, normalise)
        launch(qk_norm_rope_bwd_warp_kernel, grid, (32, WARPS), flat[0], partial, *arrays)
    if normalise and (N or not add):
        add_column_sums(partial, dq_w_D, dk_w_D, add)


def _check(op, qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G):
    check_array(op, "cos", cos_PR, (None, None))
    D = 2 * cos_PR.shape[1]
    check_tables(op, cos_PR, sin_PR, D)
    check(0 < D <= MAX_D, f"{op}: head width {D}, expected 2 to {MAX_D}")
    check(H > 0 and G >= 0, f"{op}: {H} query heads and {G} key heads, expected at least one")
    check_array(op, "qkv", qkv_NP, (None, (H + 2 * G) * D), FLOATS)
    check((q_w_D is None) == (k_w_D is None), f"{op}: give both norm weights or none")
    if q_w_D is not None:
        check_array(op, "q_w", q_w_D, (D,), FLOATS)
        check_array(op, "k_w", k_w_D, (D,), (dtype_name(q_w_D.dtype),))
    return qkv_NP.shape[0], D
