"""Routing of tokens to experts.   logits x: (N, E)   experts: (N, K)   weights w: (N, K)

    forward    p = softmax(x); experts: the K largest x_e, in order of falling x_e; w_k = p_{e_k},
               or renormalized w_k = p_{e_k} / sum_j p_{e_j}, the softmax of the chosen logits
    backward   both are softmaxes, over all experts or over the chosen ones, so with g_e = dw_k for
               the chosen e = e_k and 0 for the others, and u_e = p_e, or renormalized w_k or 0:
               dx_e = u_e (g_e - sum_k dw_k w_k)

With a bias b (E,) the K largest p_e + b_e are chosen, but b does not change the weights: it is
moved after each step so that the experts get equally many tokens (Wang et al. 2024). If the p of
all that it chooses are 0, so are the renormalized weights. The choice has no gradient. Of equal
scores the lower expert comes first, on every device; NaN counts as the lowest score, so K different
experts are chosen in any case, and the weights are NaN.

Two terms of the training loss, with c_e the number of pairs of expert e, a constant:

    balance    a E sum_e (c_e / N) mean_n(p_ne)      a K if all experts get equally many tokens and
               probability (Fedus et al. 2021; for one layer that of transformers)
    z          b mean_n(lse_n^2),  lse = log sum_e exp(x_e): keeps logits small (Zoph et al. 2022)
    gradient   with q_e = a E c_e / N^2:
               dx_e = p_e (q_e - sum_j q_j p_j) + 2 b lse p_e / N

A warp owns a row, and a lane the experts lane, lane + 32, ..., in registers: E <= 1024, K <= 32.
Computed in float32, sums in a fixed order. Bytes moved: each array once.
"""

import functools
import math

import numpy as np

from ...device import Array
from ..cross_entropy import row_sum
from ..primitives.ptx import device, kernel, let_next_start, load1, store1, wait_for_previous
from ..primitives.reduce import FULL, NEG_INF, warp_max, warp_sum
from ..runtime.compiler import cuda, float32, int32, int64, uint32
from ..runtime.launch import (
    FLOATS,
    can_overlap,
    check,
    check_array,
    empty,
    empty_like,
    launch,
    on_host,
    wide,
)
from .expert_order import MOST_EXPERTS

BLOCK = 256  # 8 rows
WARPS = BLOCK // 32
MOST_CHOSEN = 32  # lane k writes the k-th expert
NONE = int32(2**31 - 1)  # no expert: larger than all


# ----------------------------------------------------------------------------- reference
def softmax_ref(x_NE):
    """Return softmax (N, E) and log-sum-exp (N, 1) of each row."""
    m_N1 = x_NE.max(1, keepdims=True)
    p_NE = np.exp(x_NE - m_N1)
    total_N1 = p_NE.sum(1, keepdims=True)
    return p_NE / total_N1, m_N1 + np.log(total_N1)


def routing_ref(x_NE, K, renormalized, bias_E=None):
    """Return experts (N, K) int32 and weights (N, K)."""
    p_NE, _ = softmax_ref(x_NE)
    scores_NE = x_NE if bias_E is None else p_NE + bias_E
    scores_NE = np.where(np.isnan(scores_NE), -np.inf, scores_NE)
    experts_NK = np.argsort(-scores_NE, 1, kind="stable")[:, :K]
    weights_NK = np.take_along_axis(p_NE, experts_NK, 1)
    if renormalized:
        total_N1 = weights_NK.sum(1, keepdims=True)
        weights_NK /= np.where(total_N1 == 0, 1, total_N1).astype(total_N1.dtype)
    return experts_NK.astype(np.int32), weights_NK


def routing_bwd_ref(dweights_NK, x_NE, experts_NK, weights_NK, renormalized):
    """Return dx (N, E)."""
    g_NE = np.zeros_like(x_NE)
    np.put_along_axis(g_NE, experts_NK, dweights_NK, 1)
    if renormalized:
        u_NE = np.zeros_like(x_NE)
        np.put_along_axis(u_NE, experts_NK, weights_NK, 1)
    else:
        u_NE, _ = softmax_ref(x_NE)
    return u_NE * (g_NE - (dweights_NK * weights_NK).sum(1, keepdims=True))


def router_loss_ref(x_NE, counts_E, balance, z):
    """Return the sum of both terms, (1,)."""
    N, E = x_NE.shape
    p_NE, lse_N1 = softmax_ref(x_NE)
    terms_N = (p_NE * counts_E).sum(1) * (balance * E / N**2) + lse_N1[:, 0] ** 2 * (z / N)
    return terms_N.sum(keepdims=True).astype(x_NE.dtype)


def router_loss_bwd_ref(dloss_1, x_NE, counts_E, balance, z):
    """Return dx (N, E)."""
    N, E = x_NE.shape
    p_NE, lse_N1 = softmax_ref(x_NE)
    q_E = counts_E * (balance * E / N**2)
    d_NE = q_E - (p_NE * q_E).sum(1, keepdims=True) + lse_N1 * (2 * z / N)
    return (dloss_1 * p_NE * d_NE).astype(x_NE.dtype)


# ----------------------------------------------------------------------------- kernels
def make_softmax(E):
    """Return read(x_S, logits, n), softmax(p_S), and the experts of a lane, S."""
    STEPS = -(-E // 32)

    @device
    def read(x_S, logits, n):
        """Set x_S to the logits of this lane's experts in row n, -inf beyond the last."""
        for s in range(STEPS):
            e = cuda.laneid + 32 * s
            x_S[s] = load1(logits, n * E + e) if e < E else NEG_INF

    @device
    def softmax(p_S):
        """Replace a row's logits by the probabilities, 0 beyond the last. Return log-sum-exp."""
        m = NEG_INF
        for s in range(STEPS):
            m = p_S[s] if p_S[s] > m else m
        m = warp_max(m)
        total = float32(0.0)
        for s in range(STEPS):
            p_S[s] = math.exp(p_S[s] - m) if cuda.laneid + 32 * s < E else float32(0.0)
            total += p_S[s]
        total = warp_sum(total)
        inverse = float32(1.0) / total
        for s in range(STEPS):
            p_S[s] *= inverse
        return m + math.log(total)

    return read, softmax, STEPS


def make_choose(E, K, renormalized, biased):
    """Return read of make_softmax, choose(experts_NK, weights_NK, n, p_S, bias_E), and S.

    biased: with bias_E.
    """
    read, softmax, STEPS = make_softmax(E)

    @device
    def choose(experts_NK, weights_NK, n, p_S, bias_E):
        """Write the K experts of row n and their weights, by one warp. p_S: what `read` sets."""
        score_S = cuda.local.array(STEPS, float32)
        lane = int32(cuda.laneid)
        for s in range(STEPS):
            score_S[s] = p_S[s]
        softmax(p_S)
        free = uint32(0)  # bit s: this lane's expert s exists, and has not been chosen
        for s in range(STEPS):
            e = lane + 32 * s
            if e < E:
                free |= uint32(1) << uint32(s)
                if biased:
                    score_S[s] = p_S[s] + bias_E[e]
            score = score_S[s]
            score_S[s] = score if score == score else NEG_INF  # not NaN
        total = float32(0.0)
        own_expert = NONE  # of the K, what this lane writes
        own_p = float32(0.0)
        for k in range(K):
            best = NEG_INF
            expert = NONE
            p = float32(0.0)
            for s in range(STEPS):
                if (free >> uint32(s)) & uint32(1) and (score_S[s] > best or expert == NONE):
                    best = score_S[s]
                    expert = int32(lane + 32 * s)
                    p = p_S[s]
            for step in (16, 8, 4, 2, 1):
                other = cuda.shfl_xor_sync(FULL, best, step)
                other_expert = cuda.shfl_xor_sync(FULL, expert, step)
                other_p = cuda.shfl_xor_sync(FULL, p, step)
                if other > best or (other == best and other_expert < expert):
                    best = other
                    expert = other_expert
                    p = other_p
            if (expert & 31) == lane:
                free &= ~(uint32(1) << uint32(expert >> 5))
            if lane == k:
                own_expert = expert
                own_p = p
            total += p
        if not renormalized or total == float32(0.0):
            total = float32(1.0)
        if lane < K:
            experts_NK[n, lane] = own_expert
            weights_NK[n, lane] = own_p / total

    return read, choose, STEPS


@functools.cache
def make_routing_kernel(E, K, renormalized, biased, overlap):
    """Return the kernel that chooses K of E experts.

    biased: with bias_E.
    overlap: it waits for the previous kernel of the stream itself (runtime/overlap.py).
    """
    read, choose, STEPS = make_choose(E, K, renormalized, biased)

    @kernel(BLOCK)
    def routing_kernel(experts_NK, weights_NK, logits, bias_E):
        """Grid ceil(N / WARPS), block BLOCK. logits: flat (N E)."""
        p_S = cuda.local.array(STEPS, float32)
        n = int64(cuda.blockIdx.x) * WARPS + (cuda.threadIdx.x >> 5)
        if overlap:
            wait_for_previous()
            let_next_start()
        if n >= experts_NK.shape[0]:  # the same for the whole warp
            return
        read(p_S, logits, n)
        choose(experts_NK, weights_NK, n, p_S, bias_E)

    return routing_kernel


@functools.cache
def make_routing_bwd_kernel(E, K, renormalized):
    """Return the kernel of the gradient of the logits."""
    read, softmax, STEPS = make_softmax(E)

    @kernel(BLOCK)
    def routing_bwd_kernel(dlogits, dweights_NK, logits, experts_NK, weights_NK):
        """Grid ceil(N / WARPS), block BLOCK. dlogits, logits: flat (N E)."""
        u_S = cuda.local.array(STEPS, float32)
        n = int64(cuda.blockIdx.x) * WARPS + (cuda.threadIdx.x >> 5)
        lane = int32(cuda.laneid)
        if n >= experts_NK.shape[0]:  # the same for the whole warp
            return
        if not renormalized:
            read(u_S, logits, n)
            softmax(u_S)
        dot = float32(0.0)
        for k in range(K):
            dot += dweights_NK[n, k] * weights_NK[n, k]
        for s in range(STEPS):
            e = lane + 32 * s
            u = float32(0.0) if renormalized else u_S[s]
            g = float32(0.0)
            for k in range(K):
                if experts_NK[n, k] == e:
                    u = weights_NK[n, k]
                    g = dweights_NK[n, k]
            if e < E:
                store1(dlogits, n * E + e, u * (g - dot))

    return routing_bwd_kernel


@functools.cache
def make_router_loss_kernel(E):
    """Return the kernel of both terms of the loss, for each row."""
    read, softmax, STEPS = make_softmax(E)

    @kernel(BLOCK)
    def router_loss_kernel(terms_N, logits, counts_E, balance, z):
        """Grid ceil(N / WARPS), block BLOCK. balance: a E / N^2. z: b / N."""
        p_S = cuda.local.array(STEPS, float32)
        n = int64(cuda.blockIdx.x) * WARPS + (cuda.threadIdx.x >> 5)
        if n >= terms_N.size:  # the same for the whole warp
            return
        read(p_S, logits, n)
        lse = softmax(p_S)
        acc = float32(0.0)
        for s in range(STEPS):
            e = cuda.laneid + 32 * s
            if e < E:
                acc += p_S[s] * float32(counts_E[e])
        acc = warp_sum(acc)
        if cuda.laneid == 0:
            terms_N[n] = acc * balance + lse * lse * z

    return router_loss_kernel


@functools.cache
def make_router_loss_bwd_kernel(E):
    """Return the kernel of the gradient of both terms."""
    read, softmax, STEPS = make_softmax(E)

    @kernel(BLOCK)
    def router_loss_bwd_kernel(dlogits, dloss_1, logits, counts_E, balance, z, N):
        """Grid ceil(N / WARPS), block BLOCK. balance: a E / N^2. z: b / N."""
        p_S = cuda.local.array(STEPS, float32)
        n = int64(cuda.blockIdx.x) * WARPS + (cuda.threadIdx.x >> 5)
        if n >= N:  # the same for the whole warp
            return
        read(p_S, logits, n)
        lse = softmax(p_S)
        acc = float32(0.0)
        for s in range(STEPS):
            e = cuda.laneid + 32 * s
            if e < E:
                acc += p_S[s] * (balance * float32(counts_E[e]))
        acc = warp_sum(acc) - float32(2.0) * lse * z
        for s in range(STEPS):
            e = cuda.laneid + 32 * s
            if e < E:
                d = dloss_1[0] * p_S[s] * (balance * float32(counts_E[e]) - acc)
                store1(dlogits, n * E + e, d)

    return router_loss_bwd_kernel


# ----------------------------------------------------------------------------- launchers
def routing(
    logits_NE: Array, K: int, renormalized: bool = False, bias_E: Array | None = None
) -> tuple[Array, Array]:
    """Return experts (N, K) int32, in order of falling scores, and weights (N, K) float32.

    logits: (N, E) float32 or bf16. bias: (E,) float32; it chooses, but does not weight.
    Raises ValueError unless 1 <= K <= E; for more than 1024 experts, or 32 of a token.
    """
    check_array("routing", "logits", logits_NE, (None, None), FLOATS)
    N, E = logits_NE.shape
    check(0 < E <= MOST_EXPERTS, f"routing: {E} experts, 1 to {MOST_EXPERTS} are supported")
    most = min(E, MOST_CHOSEN)
    check(0 < K <= most, f"routing: {K} of {E} experts for each token, 1 to {most} are supported")
    if bias_E is not None:
        check_array("routing", "bias", bias_E, (E,))
    if on_host(logits_NE):
        return routing_ref(wide(logits_NE), K, renormalized, bias_E)
    experts_NK = empty(logits_NE, (N, K), np.int32)
    weights_NK = empty(logits_NE, (N, K), np.float32)
    biased = bias_E is not None
    overlap = can_overlap(logits_NE)
    routing_kernel = make_routing_kernel(E, K, bool(renormalized), biased, overlap)
    arrays = (experts_NK, weights_NK, logits_NE.reshape(-1))
    # a kernel argument cannot be None
    last = bias_E if biased else weights_NK
    launch(routing_kernel, -(-N // WARPS), BLOCK, *arrays, last, overlap=overlap)
    return experts_NK, weights_NK


def routing_bwd(
    dweights_NK: Array,
    logits_NE: Array,
    experts_NK: Array,
    weights_NK: Array,
    renormalized: bool = False,
) -> Array:
    """Return the gradient of the logits (N, E), in their dtype.

    dweights: (N, K) float32. The others: those of `routing`.
    """
    op = "routing backward"
    check_array(op, "logits", logits_NE, (None, None), FLOATS)
    N, E = logits_NE.shape
    check_array(op, "experts", experts_NK, (N, None), ("int32",))
    check_array(op, "weights", weights_NK, experts_NK.shape)
    check_array(op, "dweights", dweights_NK, experts_NK.shape)
    arrays = dweights_NK, logits_NE, experts_NK, weights_NK
    if on_host(*arrays):
        dx_NE = routing_bwd_ref(dweights_NK, wide(logits_NE), *arrays[2:], renormalized)
        return dx_NE.astype(logits_NE.dtype, copy=False)
    dlogits_NE = empty_like(logits_NE)
    bwd_kernel = make_routing_bwd_kernel(E, experts_NK.shape[1], bool(renormalized))
    flat = (dlogits_NE.reshape(-1), dweights_NK, logits_NE.reshape(-1))
    launch(bwd_kernel, -(-N // WARPS), BLOCK, *flat, experts_NK, weights_NK)
    return dlogits_NE


def router_loss(logits_NE: Array, counts_E: Array, balance: float, z: float) -> Array:
    """Return the balance loss times `balance`, plus the z-loss times `z`, (1,) float32.

    logits: (N, E) float32 or bf16. counts: (E,) int32, the pairs of each expert (ExpertOrder).
    """
    N, E = _check_loss("router_loss", logits_NE, counts_E)
    if on_host(logits_NE, counts_E):
        return router_loss_ref(wide(logits_NE), counts_E, balance, z)
    terms_N = empty(logits_NE, N, np.float32)
    factors = np.float32(balance * E / N**2), np.float32(z / N)
    arrays = terms_N, logits_NE.reshape(-1), counts_E
    launch(make_router_loss_kernel(E), -(-N // WARPS), BLOCK, *arrays, *factors)
    return row_sum(terms_N)


def router_loss_bwd(
    dloss_1: Array, logits_NE: Array, counts_E: Array, balance: float, z: float
) -> Array:
    """Return the gradient of the logits (N, E), in their dtype. dloss: (1,) float32."""
    N, E = _check_loss("router_loss backward", logits_NE, counts_E)
    check_array("router_loss backward", "dloss", dloss_1, (1,))
    if on_host(dloss_1, logits_NE, counts_E):
        dx_NE = router_loss_bwd_ref(dloss_1, wide(logits_NE), counts_E, balance, z)
        return dx_NE.astype(logits_NE.dtype, copy=False)
    dlogits_NE = empty_like(logits_NE)
    factors = np.float32(balance * E / N**2), np.float32(z / N)
    arrays = dlogits_NE.reshape(-1), dloss_1, logits_NE.reshape(-1), counts_E
    launch(make_router_loss_bwd_kernel(E), -(-N // WARPS), BLOCK, *arrays, *factors, N)
    return dlogits_NE


def _check_loss(op, logits_NE, counts_E):
    """Check both arrays. Return N, E."""
    check_array(op, "logits", logits_NE, (None, None), FLOATS)
    N, E = logits_NE.shape
    check(N > 0 and E <= MOST_EXPERTS, f"{op}: logits have shape {logits_NE.shape}")
    check_array(op, "counts", counts_E, (E,), ("int32",))
    return N, E
