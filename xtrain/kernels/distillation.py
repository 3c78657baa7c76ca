"""Distillation: cross-entropy, and the KL between a teacher and the logits.   logits: (N, P)

The teacher is given by the log-probabilities t_k of its K most likely tokens. All other tokens are
one more category, the rest r, in both distributions: s is the softmax of the logits, s_r = 1 -
sum_k s_k. So both are distributions over K + 1 categories, and the KL is never negative.

    forward    kl = sum_c t_c (log t_c - log s_c)        (covers what the teacher may say)
    reverse    kl = sum_c s_c (log s_c - log t_c)        (avoids what the teacher would not say)
    loss_n     (1 - w) cross-entropy + w kl              (w: the weight)

With g_c = d kl / d log s_c, and log s_c by the logits x_v: [v in c] s_v / s_c - s_v:

    d kl / d x_v = s_v A  + [v is token k] B_k,    A = g_r / s_r - sum_c g_c,   B_k = g_k - s_k g_r / s_r
    forward    g_c = -t_c
    reverse    g_c = s_c (d_c + 1),   d_c = log s_c - log t_c

So the gradient is that of cross-entropy with one factor per row, (1 - w) + w A in place of 1, and K + 1
elements that are corrected: the tokens k by w B_k, the target by w A. Three launches more than
cross-entropy: the logsumexp, the K numbers of each row, the corrections. A rest is at least REST: it is
a difference from 1, which float32 knows to 10^-7. Where s_r is REST, it is a constant, and g_r is 0.
Bytes moved: logits read twice and written once, 3 N P elements.
"""

import math

import numpy as np

from ..device import Array
from .cross_entropy import IGNORE, check_targets_on_host, cross_entropy
from .primitives.ptx import load1, store1
from .runtime.compiler import cuda, float32, int64
from .runtime.launch import FLOATS, check, check_array, check_ids, empty, launch, on_host, wide

BLOCK = 128  # rows of a block: one thread each
REST = 1e-6


# ----------------------------------------------------------------------------- reference
def distillation_ref(
    logits_NP, targets_N, ids_NK, teacher_NK, vocab_size, inv_count_1, weight, reverse=False
):
    """Return loss (N,), and the gradient (N, P) of inv_count sum(loss). The logits stay."""
    x_NV = logits_NP[:, :vocab_size]
    counted_N = targets_N != IGNORE
    rows_N = np.arange(len(x_NV))
    target_N = np.where(counted_N, targets_N, 0)
    top_N = x_NV.max(1)
    lse_N = np.log(np.exp(x_NV - top_N[:, None]).sum(1)) + top_N
    s_NV = np.exp(x_NV - lse_N[:, None])
    log_s_NK = np.take_along_axis(x_NV, ids_NK.astype(np.int64), 1) - lse_N[:, None]
    s_NK = np.exp(log_s_NK)
    t_NK = np.exp(teacher_NK)
    rest_N = 1 - s_NK.sum(1)
    s_rest_N = np.maximum(rest_N, REST)
    t_rest_N = np.maximum(1 - t_NK.sum(1), REST)
    d_NK = log_s_NK - teacher_NK
    d_rest_N = np.log(s_rest_N) - np.log(t_rest_N)
    if reverse:
        kl_N = (s_NK * d_NK).sum(1) + s_rest_N * d_rest_N
        g_NK = s_NK * (d_NK + 1)
        g_rest_N = s_rest_N * (d_rest_N + 1)
    else:
        kl_N = -(t_NK * d_NK).sum(1) - t_rest_N * d_rest_N
        g_NK = -t_NK
        g_rest_N = -t_rest_N
    g_rest_N = np.where(rest_N > REST, g_rest_N, 0)
    a_N = g_rest_N / s_rest_N - g_NK.sum(1) - g_rest_N
    b_NK = g_NK - s_NK * (g_rest_N / s_rest_N)[:, None]
    cross_N = lse_N - x_NV[rows_N, target_N]
    loss_N = np.where(counted_N, (1 - weight) * cross_N + weight * kl_N, 0)
    d_NP = np.zeros_like(logits_NP)
    d_NP[:, :vocab_size] = s_NV * (1 - weight + weight * a_N)[:, None]
    d_NP[rows_N, target_N] -= 1 - weight
    np.add.at(d_NP, (rows_N[:, None], ids_NK), weight * b_NK)
    d_NP *= inv_count_1
    d_NP[~counted_N] = 0
    return loss_N, d_NP


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def distillation_rows_kernel(
    kl_N, factors_N, adds_NK, logits, lse_N, targets_N, ids_NK, teacher_NK, inv_count_1, P, weight, reverse
):  # fmt: skip
    """Grid ceil(N / BLOCK), block BLOCK. Thread n owns row n: its KL, its factor, its B_k.

    logits: flat (N P).
    factors: inv_count ((1 - w) + w A).  adds: inv_count w B_k.
    """
    n = int64(cuda.grid(1))
    if n >= targets_N.shape[0]:
        return
    K = ids_NK.shape[1]
    if targets_N[n] == IGNORE:
        kl_N[n] = float32(0.0)
        factors_N[n] = float32(0.0)
        for k in range(K):
            adds_NK[n, k] = float32(0.0)
        return
    lse = lse_N[n]
    kl = float32(0.0)
    s_sum = float32(0.0)
    t_sum = float32(0.0)
    g_sum = float32(0.0)
    for k in range(K):
        log_s = load1(logits, n * P + int64(ids_NK[n, k])) - lse
        s = math.exp(log_s)
        t = math.exp(teacher_NK[n, k])
        d = log_s - teacher_NK[n, k]
        s_sum += s
        t_sum += t
        if reverse:
            kl += s * d
            g_sum += s * (d + float32(1.0))
        else:
            kl -= t * d
            g_sum -= t
    s_rest = max(float32(1.0) - s_sum, float32(REST))
    t_rest = max(float32(1.0) - t_sum, float32(REST))
    d_rest = math.log(s_rest) - math.log(t_rest)
    g_rest = -t_rest
    if reverse:
        g_rest = s_rest * (d_rest + float32(1.0))
        kl += s_rest * d_rest
    else:
        kl -= t_rest * d_rest
    if float32(1.0) - s_sum <= float32(REST):
        g_rest = float32(0.0)
    share = g_rest / s_rest
    w = float32(weight)
    inv_count = inv_count_1[0]
    kl_N[n] = kl
    factors_N[n] = inv_count * (float32(1.0) - w + w * (share - g_sum - g_rest))
    for k in range(K):
        log_s = load1(logits, n * P + int64(ids_NK[n, k])) - lse
        s = math.exp(log_s)
        g = -math.exp(teacher_NK[n, k])
        if reverse:
            g = s * (log_s - teacher_NK[n, k] + float32(1.0))
        adds_NK[n, k] = inv_count * w * (g - s * share)


@cuda.jit
def distillation_add_kernel(
    loss_N, logits, kl_N, factors_N, adds_NK, targets_N, ids_NK, inv_count_1, P, weight, gradient
):
    """Grid ceil(N / BLOCK), block BLOCK. Thread n owns row n: loss, and corrections of the gradient.

    logits: flat (N P), the gradient of cross-entropy with the factors; untouched without gradient.
    """
    n = int64(cuda.grid(1))
    if n >= targets_N.shape[0]:
        return
    target = int64(targets_N[n])
    if target == IGNORE:
        return
    w = float32(weight)
    loss_N[n] = (float32(1.0) - w) * loss_N[n] + w * kl_N[n]
    if gradient:
        for k in range(ids_NK.shape[1]):
            at = n * P + int64(ids_NK[n, k])
            store1(logits, at, load1(logits, at) + adds_NK[n, k])
        if target >= 0:
            at = n * P + target
            more = factors_N[n] - inv_count_1[0] * (float32(1.0) - w)
            store1(logits, at, load1(logits, at) + more)


# ----------------------------------------------------------------------------- launcher
def distillation(
    logits_NP: Array,
    targets_N: Array,
    ids_NK: Array,
    teacher_NK: Array,
    vocab_size: int,
    inv_count_1: Array,
    weight: float,
    reverse: bool = False,
    with_gradient: bool = True,
    out_N: Array | None = None,
) -> tuple[Array, Array | None]:
    """Return loss (N,) float32, and the gradient of inv_count sum(loss), which **overwrites the
    logits**, or None.

    logits (N, P >= vocab_size), float32 or bf16. targets: (N,) integers, -100 counts nothing.
    ids: (N, K) int32, tokens of the teacher, each once in a row and less than vocab_size.
    teacher: (N, K) float32, their log-probabilities.
    inv_count: (1,) float32, see cross_entropy.count_targets.
    weight: of the KL, 0 to 1.  reverse: see above.
    out_N: the array that becomes the loss.
    Errors as in cross_entropy.
    """
    op = "distillation"
    check_array(op, "logits", logits_NP, (None, None), FLOATS)
    N, P = logits_NP.shape
    check(targets_N.shape == (N,), f"{op}: targets have shape {targets_N.shape}, expected ({N},)")
    check_ids(op, "targets", targets_N)
    check(0 < vocab_size <= P, f"{op}: vocabulary {vocab_size}, logits {logits_NP.shape}")
    check_array(op, "ids", ids_NK, (N, None), ("int32",))
    K = ids_NK.shape[1]
    check(0 < K <= vocab_size, f"{op}: {K} tokens of the teacher, the vocabulary has {vocab_size}")
    check_array(op, "teacher", teacher_NK, (N, K), ("float32", "float64"))
    check_array(op, "inv_count", inv_count_1, (1,))
    check(0 <= weight <= 1, f"{op}: weight {weight}, expected 0 to 1")
    if on_host(logits_NP, targets_N, ids_NK, teacher_NK, inv_count_1):
        check_targets_on_host(targets_N, vocab_size)
        loss_N, d_NP = distillation_ref(
            wide(logits_NP), targets_N, ids_NK, teacher_NK, vocab_size, inv_count_1, weight, reverse
        )
        if out_N is None:
            out_N = empty(logits_NP, N, loss_N.dtype)
        out_N[...] = loss_N
        if with_gradient:
            logits_NP[...] = d_NP
        return out_N, logits_NP if with_gradient else None
    loss_N = empty(logits_NP, N, np.float32) if out_N is None else out_N
    lse_N, kl_N, factors_N = (empty(logits_NP, N, np.float32) for _ in range(3))
    adds_NK = empty(logits_NP, (N, K), np.float32)
    logits = logits_NP.reshape(-1)
    grid = -(-N // BLOCK)
    cross_entropy(logits_NP, targets_N, vocab_size, None, False, loss_N, lse_N)
    rows = (kl_N, factors_N, adds_NK, logits, lse_N, targets_N, ids_NK, teacher_NK, inv_count_1)
    launch(distillation_rows_kernel, grid, BLOCK, *rows, P, weight, reverse)
    if with_gradient:
        cross_entropy(logits_NP, targets_N, vocab_size, factors_N, True, loss_N)
    adds = (loss_N, logits, kl_N, factors_N, adds_NK, targets_N, ids_NK, inv_count_1)
    launch(distillation_add_kernel, grid, BLOCK, *adds, P, weight, with_gradient)
    return loss_N, logits_NP if with_gradient else None
