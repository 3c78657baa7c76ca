"""Cross-entropy over a padded vocabulary, with its gradient.   logits: (N, P)   targets: (N,)

    forward    loss_n = logsumexp_v(x_v) - x_target
                      = log(sum_v exp(x_v - m)) + (m - x_target),   m = max_v x_v
    backward   d logsumexp / dx_v is the softmax p_v, so with L = inv_count sum_n loss_n
               dL/dx_v = inv_count (p_v - [v == target])

inv_count is 1 / (number of targets that count) over the whole optimizer step, so the gradients of
its micro-batches simply add up. A row whose target is -100 (IGNORE) has loss 0 and gradient 0.
Columns from vocab_size on are padding: not part of the softmax, their gradient is exactly 0.

Both ways in one launch, and nothing is saved: the gradient is written over the logits. m and the
sum come from one pass (see softmax.py). Bytes moved: logits read twice, the second time partly from
the cache, and written once. The sum over rows runs in a fixed order in one block: the same bits
every run, without atomics.
"""

import math

import numpy as np
from numba import cuda, float32, int64

from ..device import Array
from ._launch import check, check_array, check_ids, empty, launch, on_host
from ._reduce import MAX_WARPS, block_max, block_sum
from .softmax import LOWEST, online_softmax

IGNORE = -100  # a target that does not count, as in PyTorch and Hugging Face
BLOCK = 512  # few long rows in flight: the second read of a row still finds part of it in L2
SUM_BLOCK = 1024  # one block adds up all rows: as many threads as it can have


# ----------------------------------------------------------------------------- reference
def cross_entropy_ref(logits_NP, targets_N, vocab_size, inv_count_1, with_gradient=True):
    """-> loss (N,), and the gradient in place of the logits or None. A wrong target gives NaN."""
    ignored_N = targets_N == IGNORE
    wrong_N = ~ignored_N & ((targets_N < 0) | (targets_N >= vocab_size))
    n, target_N = np.arange(targets_N.size), np.where(ignored_N | wrong_N, 0, targets_N)
    x_NV = logits_NP[:, :vocab_size]
    if with_gradient:
        x_NV -= x_NV.max(1, keepdims=True)
    else:
        x_NV = x_NV - x_NV.max(1, keepdims=True)
    loss_N = -x_NV[n, target_N]
    np.exp(x_NV, out=x_NV)
    sum_N = np.einsum("nv->n", x_NV)
    loss_N += np.log(sum_N)
    loss_N[ignored_N] = 0
    loss_N[wrong_N] = np.nan
    if not with_gradient:
        return loss_N, None
    x_NV *= (inv_count_1[0] / sum_N)[:, None]
    x_NV[n, target_N] -= inv_count_1[0]
    x_NV[ignored_N] = 0
    x_NV[wrong_N] = np.nan
    logits_NP[:, vocab_size:] = 0
    return loss_N, logits_NP


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def cross_entropy_kernel(loss_N, logits_NP, targets_N, inv_count_1, vocab_size, with_gradient):
    """Grid N, block BLOCK. Block n owns row n, thread tid the columns tid, tid + BLOCK, ..."""
    n, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
    P = logits_NP.shape[1]
    partial = cuda.shared.array(MAX_WARPS, float32)
    target = int64(targets_N[n])
    used = vocab_size if target != IGNORE else 0  # an ignored row is not read
    m, total = LOWEST, float32(0.0)
    for v in range(tid, used, BLOCK):
        m, total = online_softmax(logits_NP[n, v], m, total)
    at_target = float32(math.nan)  # of a target that does not exist
    if target >= 0 and target < used:
        at_target = logits_NP[
            n, target
        ]  # before the barriers below, after which its owner overwrites it
    top = block_max(m, partial)
    total = block_sum(total * math.exp(m - top), partial)
    if tid == 0:
        loss_N[n] = math.log(total) + (top - at_target) if used > 0 else float32(0.0)
    if with_gradient:
        inv_count = inv_count_1[0]
        factor = inv_count / total if target >= 0 and target < used else float32(math.nan)
        for v in range(tid, used, BLOCK):
            d = math.exp(logits_NP[n, v] - top) * factor
            logits_NP[n, v] = d - inv_count if v == target else d
        for v in range(used + tid, P, BLOCK):
            logits_NP[n, v] = float32(0.0)


@cuda.jit
def row_sum_kernel(out_1, x_N, scale_1, scaled):
    """Grid 1, block SUM_BLOCK. out = sum of x, times scale_1[0] if scaled."""
    tid = cuda.threadIdx.x
    partial = cuda.shared.array(MAX_WARPS, float32)
    acc = float32(0.0)
    for n in range(tid, x_N.shape[0], SUM_BLOCK):
        acc += x_N[n]
    total = block_sum(acc, partial)
    if tid == 0:
        out_1[0] = total * scale_1[0] if scaled else total


@cuda.jit
def count_targets_kernel(inv_count_1, targets_N):
    """Grid 1, block SUM_BLOCK. The barrier itself counts: no rounding, however many targets."""
    tid = cuda.threadIdx.x
    N = targets_N.shape[0]
    count = int64(0)
    for start in range(0, N, SUM_BLOCK):  # the same trips for every thread: it holds a barrier
        n = start + tid
        counts = 0
        if n < N and int64(targets_N[n]) != IGNORE:
            counts = 1
        count += cuda.syncthreads_count(counts)
    if tid == 0:
        inv_count_1[0] = float32(1.0) / float32(count) if count > 0 else float32(0.0)


# ----------------------------------------------------------------------------- launchers
def cross_entropy(
    logits_NP: Array,
    targets_N: Array,
    vocab_size: int,
    inv_count_1: Array | None,
    with_gradient: bool = True,
) -> tuple[Array, Array | None]:
    """logits (N, P >= vocab_size) float32, targets (N,) whole numbers -> loss (N,) and the gradient
    of inv_count sum(loss), **written over the logits**.

    with_gradient=False leaves the logits alone and returns None for the gradient; inv_count may
    then be None. A target that is neither in [0, vocab_size) nor -100: ValueError on the CPU; on a
    GPU, where looking would mean waiting, loss and gradient of that row are NaN.
    """
    N, P = logits_NP.shape
    check_array("cross_entropy", "logits", logits_NP, (N, P))
    _check_targets("cross_entropy", targets_N, N)
    check(0 < vocab_size <= P, f"cross_entropy: vocabulary {vocab_size}, logits {logits_NP.shape}")
    if inv_count_1 is None:
        check(not with_gradient, "cross_entropy: the gradient needs inv_count")
        inv_count_1 = empty(logits_NP, 1)  # a kernel takes no None
    check_array("cross_entropy", "inv_count", inv_count_1, (1,))
    if on_host(logits_NP, targets_N, inv_count_1):
        _refuse_wrong(targets_N, vocab_size)
        return cross_entropy_ref(logits_NP, targets_N, vocab_size, inv_count_1, with_gradient)
    loss_N = empty(logits_NP, N)
    arrays = (loss_N, logits_NP, targets_N, inv_count_1)
    launch(cross_entropy_kernel, N, BLOCK, *arrays, vocab_size, with_gradient)
    return loss_N, logits_NP if with_gradient else None


def row_sum(x_N: Array) -> Array:
    """x (N,) float32 -> its sum, (1,), always added in the same order."""
    return _row_sum(x_N, None)


def mean_loss(loss_N: Array, inv_count_1: Array) -> Array:
    """-> inv_count sum(loss), (1,), in one launch."""
    check_array("mean_loss", "inv_count", inv_count_1, (1,))
    return _row_sum(loss_N, inv_count_1)


def _row_sum(x_N, scale_1):
    check_array("row_sum", "x", x_N, (None,))
    scaled = scale_1 is not None
    if on_host(x_N, scale_1 if scaled else x_N):
        total_1 = x_N.sum(keepdims=True)
        return total_1 * scale_1.astype(x_N.dtype) if scaled else total_1
    out_1 = empty(x_N, 1)
    launch(row_sum_kernel, 1, SUM_BLOCK, out_1, x_N, scale_1 if scaled else out_1, scaled)
    return out_1


def count_targets(targets_N: Array) -> Array:
    """targets (N,) whole numbers -> 1 / (how many are not -100), (1,) float32, where they live.

    Without a single one it is 0, so that loss and gradient are 0 and not NaN.
    """
    _check_targets("count_targets", targets_N, targets_N.shape[0])
    if on_host(targets_N):
        count = np.count_nonzero(targets_N != IGNORE)
        return np.array([1 / count if count else 0], np.float32)
    inv_count_1 = empty(targets_N, 1, np.float32)
    launch(count_targets_kernel, 1, SUM_BLOCK, inv_count_1, targets_N)
    return inv_count_1


def _check_targets(op, targets_N, N):
    check(targets_N.shape == (N,), f"{op}: targets have shape {targets_N.shape}, expected ({N},)")
    check_ids(op, "targets", targets_N)


def _refuse_wrong(targets_N, vocab_size):
    wrong_N = ((targets_N < 0) | (targets_N >= vocab_size)) & (targets_N != IGNORE)
    if wrong_N.any():
        n = int(wrong_N.argmax())
        raise ValueError(
            f"cross_entropy: target {targets_N[n]} in row {n} is neither in [0, {vocab_size}) "
            f"nor {IGNORE}"
        )
