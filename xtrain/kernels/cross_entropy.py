"""Cross-entropy over a padded vocabulary, with its gradient.   logits: (N, P)   targets: (N,)

    forward    loss_n = logsumexp_v(x_v) - x_target
                      = log(sum_v exp(x_v - m)) + (m - x_target),   m = max_v x_v
    backward   d logsumexp / dx_v is the softmax p_v, so with L = inv_count sum_n loss_n
               dL/dx_v = inv_count (p_v - [v == target])

inv_count is 1 / (number of targets that count) of the whole optimizer step, so the gradients of its
micro-batches simply add up. It may also be one number per row: dL/d(loss_n) of a loss that is not a
mean (reinforcement learning).
A row with target -100 (IGNORE) has loss 0 and gradient 0. Columns from vocab_size on are padding:
they are not part of the softmax, and their gradient is exactly 0.

Forward and backward are one launch, and nothing is saved: the gradient overwrites the logits,
float32 or bf16. m and the sum come from one pass (see softmax.py), which also keeps as much of the
row in shared memory as fits: all of GPT-2's 50304 columns in bf16, half of them in float32. Only
the rest is read twice, mostly from L2.
Where another kernel computes the gradient (fp8.py), forward saves each row's logsumexp l, and p_v =
exp(x_v - l), with the absolute rounding error of l as its relative error.
Bytes moved: logits read and written once, 2 N P elements.

In bf16 a multiprocessor of an H200 has time for about 28 instructions per element in both passes
together, so exp(x - m) is computed as exp2((x - m) log2 e): two multiplications and one
instruction, accurate to two units in the last place. The sum over rows runs in one block in a fixed
order: the same bits in every run, without atomics.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from ..device import Array
from ..simulator import SimArray
from .primitives.ptx import device, kernel, load1, store1
from .primitives.reduce import MAX_WARPS, block_max, block_sum
from .primitives.rows import aligned_rows
from .primitives.tensor_cores import exp2, fmax
from .primitives.words import WORD_OPS, elements_per_vector
from .runtime.compiler import cuda, float32, int64, types, uint32
from .runtime.cost import declare_cost
from .runtime.launch import (
    FLOATS,
    check,
    check_array,
    check_ids,
    empty,
    gpu_attribute,
    launch,
    on_host,
    wide,
)
from .softmax import LOG2E, LOWEST, online_softmax

IGNORE = -100  # a target that does not count, as in PyTorch and Hugging Face
BLOCK = 512  # of the naive kernel


@dataclass(frozen=True)
class LossPlan:
    """How the kernel in use is launched."""

    threads: int  # per block
    blocks_per_sm: int
    register_rounds: int  # rounds of a row that stay in registers


# By the number of logits in 16 bytes: 8 for bf16, 4 for float32. With the part of a row that fits
# into shared memory, the bf16 plan holds all of GPT-2's 50304 columns on chip: nothing is read
# twice.
PLANS = {
    8: LossPlan(threads=384, blocks_per_sm=3, register_rounds=1),
    4: LossPlan(threads=512, blocks_per_sm=2, register_rounds=3),
}
UNROLL = 4  # chunks that a thread loads before it uses the first: 64 bytes
SUM_BLOCK = 1024  # one block sums all rows, with the maximum number of threads


# ----------------------------------------------------------------------------- reference
def _ignored_and_invalid(targets_N, vocab_size):
    ignored_N = targets_N == IGNORE
    outside_N = (targets_N < 0) | (targets_N >= vocab_size)
    return ignored_N, outside_N & ~ignored_N


def cross_entropy_ref(
    logits_NP, targets_N, vocab_size, inv_count_1, with_gradient=True, lse_N=None
):
    """Return loss (N,), and the gradient, which overwrites the logits, or None.

    An invalid target gives NaN.
    lse_N: becomes each row's logsumexp, if given.
    """
    ignored_N, wrong_N = _ignored_and_invalid(targets_N, vocab_size)
    n = np.arange(targets_N.size)
    target_N = np.where(ignored_N | wrong_N, 0, targets_N)
    x_NV = logits_NP[:, :vocab_size]
    m_N = x_NV.max(1)
    if with_gradient:
        x_NV -= m_N[:, None]
    else:
        x_NV = x_NV - m_N[:, None]
    loss_N = -x_NV[n, target_N]
    np.exp(x_NV, out=x_NV)
    sum_N = np.einsum("nv->n", x_NV)
    log_N = np.log(sum_N)
    loss_N += log_N
    if lse_N is not None:
        lse_N[...] = log_N + m_N
    loss_N[ignored_N] = 0
    loss_N[wrong_N] = np.nan
    if not with_gradient:
        return loss_N, None
    x_NV *= (inv_count_1 / sum_N)[:, None]
    x_NV[n, target_N] -= inv_count_1  # one for all rows, or one per row
    x_NV[ignored_N] = 0
    x_NV[wrong_N] = np.nan
    logits_NP[:, vocab_size:] = 0
    return loss_N, logits_NP


def logits_gradient_ref(logits_NP, targets_N, lse_N, vocab_size, inv_count_1):
    """Return the gradient (N, P) from each row's logsumexp. The logits stay.

    An invalid target gives NaN.
    """
    ignored_N, wrong_N = _ignored_and_invalid(targets_N, vocab_size)
    d_NP = np.zeros_like(logits_NP)
    d_NV = d_NP[:, :vocab_size]
    np.subtract(logits_NP[:, :vocab_size], lse_N[:, None], out=d_NV)
    np.exp(d_NV, out=d_NV)
    d_NV[np.arange(targets_N.size), np.where(ignored_N | wrong_N, 0, targets_N)] -= 1
    d_NV *= inv_count_1[:, None]  # one for all rows, or one per row
    d_NV[ignored_N] = 0
    d_NV[wrong_N] = np.nan
    return d_NP


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def cross_entropy_naive_kernel(
    loss_N, logits_NP, targets_N, inv_count_1, vocab_size, with_gradient
):
    """Grid N, block BLOCK. Block n owns row n, thread tid the columns tid, tid + BLOCK, ...

    The maths in its simplest form, float32 only: four bytes per access, every logit read twice.
    """
    n = int64(cuda.blockIdx.x)
    tid = cuda.threadIdx.x
    P = logits_NP.shape[1]
    partial = cuda.shared.array(MAX_WARPS, float32)
    target = int64(targets_N[n])
    used = vocab_size if target != IGNORE else 0  # an ignored row is not read
    m, total = LOWEST, float32(0.0)
    for v in range(tid, used, BLOCK):
        m, total = online_softmax(logits_NP[n, v], m, total)
    at_target = float32(math.nan)  # for an invalid target
    if target >= 0 and target < used:
        # Read before the barriers below: after them the thread that owns the column overwrites it.
        at_target = logits_NP[n, target]
    top = block_max(m, partial)
    total = block_sum(total * math.exp(m - top), partial)
    if tid == 0:
        loss_N[n] = math.log(total) + (top - at_target) if used > 0 else float32(0.0)
    if with_gradient:
        inv_count = inv_count_1[min(n, inv_count_1.size - 1)]
        factor = inv_count / total if target >= 0 and target < used else float32(math.nan)
        for v in range(tid, used, BLOCK):
            d = math.exp(logits_NP[n, v] - top) * factor
            logits_NP[n, v] = d - inv_count if v == target else d
        for v in range(used + tid, P, BLOCK):
            logits_NP[n, v] = float32(0.0)


def _make_chunk_ops(vec, aligned):
    """Return load_words, add_chunk and store_grad, for chunks of vec logits."""
    load_vector = WORD_OPS[vec].load
    store_vector = WORD_OPS[vec].store
    unpack = WORD_OPS[vec].unpack
    pack = WORD_OPS[vec].pack

    @device
    def load_words(words, logits, first, c, end):
        """Load the chunk at column c; where rows are not aligned, no columns from `end` on."""
        if aligned:
            load_vector(words, logits, first + c)
        else:
            x = cuda.local.array(vec, float32)
            for j in range(vec):
                x[j] = load1(logits, first + c + j) if c + j < end else LOWEST
            pack(words, x, logits)

    @device
    def add_chunk(words, logits, m, total):
        """Add one chunk; return the new maximum and the new sum of exp(logit - maximum)."""
        x = cuda.local.array(vec, float32)
        top = m
        unpack(x, words, logits)
        for j in range(vec):
            top = fmax(top, x[j])
        total *= exp2((m - top) * float32(LOG2E))
        for j in range(vec):
            total += exp2((x[j] - top) * float32(LOG2E))
        return top, total

    @device
    def store_grad(logits, first, c, end, used, words, top, factor):
        """Overwrite the chunk at column c with softmax times factor, from `used` on with zeros."""
        x = cuda.local.array(vec, float32)
        if c < used:
            unpack(x, words, logits)
        for j in range(vec):
            p = exp2((x[j] - top) * float32(LOG2E)) * factor if c + j < used else float32(0.0)
            x[j] = p
        if aligned:
            pack(words, x, logits)
            store_vector(logits, first + c, words)
        else:
            for j in range(vec):
                if c + j < end:
                    store1(logits, first + c + j, x[j])

    return load_words, add_chunk, store_grad


def _make_read_row(vec, plan, load_words, add_chunk):
    """Return read_row, the first pass of the kernel in use."""
    REGISTER_ROUNDS = plan.register_rounds
    STRIDE = plan.threads * vec
    ROUND = UNROLL * STRIDE
    unpack = WORD_OPS[vec].unpack
    pack = WORD_OPS[vec].pack
    store_shared = WORD_OPS[vec].store_shared

    @device
    def read_row(x_RUW, smem_row, logits, first, used, full_end, reg_begin, smem_end):
        """Return this thread's largest logit, and its sum of exp(logit - largest).

        Keeps the row on chip as far as it fits.
        """
        v = cuda.threadIdx.x * vec
        m, total = LOWEST, float32(0.0)
        x = cuda.local.array(vec, float32)
        for c in range(full_end + v, used, STRIDE):
            load_words(x_RUW[0, 0], logits, first, c, used)
            unpack(x, x_RUW[0, 0], logits)
            for j in range(vec):  # padding is not part of the softmax
                x[j] = x[j] if c + j < used else LOWEST
            pack(x_RUW[0, 0], x, logits)
            store_shared(smem_row, smem_end + c - full_end, x_RUW[0, 0])
            m, total = add_chunk(x_RUW[0, 0], logits, m, total)
        for base in range(v, smem_end, ROUND):
            for u in range(UNROLL):  # load a whole round before using its first chunk
                load_words(x_RUW[0, u], logits, first, base + u * STRIDE, used)
            for u in range(UNROLL):
                store_shared(smem_row, base + u * STRIDE, x_RUW[0, u])
                m, total = add_chunk(x_RUW[0, u], logits, m, total)
        for base in range(smem_end + v, reg_begin, ROUND):
            for u in range(UNROLL):
                load_words(x_RUW[0, u], logits, first, base + u * STRIDE, used)
            for u in range(UNROLL):
                m, total = add_chunk(x_RUW[0, u], logits, m, total)
        for h in range(REGISTER_ROUNDS):
            base = reg_begin + h * ROUND + v
            if base < full_end:
                for u in range(UNROLL):
                    load_words(x_RUW[h, u], logits, first, base + u * STRIDE, used)
                for u in range(UNROLL):
                    m, total = add_chunk(x_RUW[h, u], logits, m, total)
        return m, total

    return read_row


def _make_write_row(vec, plan, load_words, store_grad):
    """Return write_row, the second pass of the kernel in use."""
    REGISTER_ROUNDS = plan.register_rounds
    STRIDE = plan.threads * vec
    ROUND = UNROLL * STRIDE
    load_shared = WORD_OPS[vec].load_shared

    @device
    def write_row(
        x_RUW, smem_row, logits, first, P, used, full_end, reg_begin, smem_end, top, factor
    ):
        """Overwrite the row with its gradient: registers, then global, then shared memory."""
        v = cuda.threadIdx.x * vec
        for h in range(REGISTER_ROUNDS):
            base = reg_begin + h * ROUND + v
            if base < full_end:
                for u in range(UNROLL):
                    c = base + u * STRIDE
                    store_grad(logits, first, c, P, full_end, x_RUW[h, u], top, factor)
        for base in range(reg_begin - ROUND + v, smem_end + v - 1, -ROUND):
            for u in range(UNROLL):
                load_words(x_RUW[0, u], logits, first, base + u * STRIDE, used)
            for u in range(UNROLL):
                store_grad(logits, first, base + u * STRIDE, P, full_end, x_RUW[0, u], top, factor)
        for base in range(v, smem_end, ROUND):
            for u in range(UNROLL):
                load_shared(x_RUW[0, u], smem_row, base + u * STRIDE)
            for u in range(UNROLL):
                store_grad(logits, first, base + u * STRIDE, P, full_end, x_RUW[0, u], top, factor)
        for c in range(full_end + v, P, STRIDE):
            if c < used:
                load_shared(x_RUW[0, 0], smem_row, smem_end + c - full_end)
            store_grad(logits, first, c, P, used, x_RUW[0, 0], top, factor)

    return write_row


@functools.cache
def make_cross_entropy_kernel(vec, aligned, plan: LossPlan):
    """Return the kernel in use.

    vec: logits in 16 bytes.
    aligned: every row starts at a multiple of 16 bytes.

    A block reads its row in rounds of UNROLL chunks per thread. The columns after the last whole
    round and the first `smem_end` columns stay in shared memory, the last REGISTER_ROUNDS rounds in
    registers. The others, if any, are read again in `write_row`, the most recent first: those are
    still in L2.
    """
    BLOCK = plan.threads
    REGISTER_ROUNDS = plan.register_rounds
    ROUND = UNROLL * plan.threads * vec
    ELEMENT = types.uint16 if vec == 8 else types.float32
    load_words, add_chunk, store_grad = _make_chunk_ops(vec, aligned)
    read_row = _make_read_row(vec, plan, load_words, add_chunk)
    write_row = _make_write_row(vec, plan, load_words, store_grad)

    @kernel(BLOCK, plan.blocks_per_sm)
    def cross_entropy_kernel(
        loss_N, lse_N, logits, targets_N, inv_count_1, P, vocab_size, smem_end, gradient
    ):
        """Grid N, block BLOCK. Block n owns row n, thread tid the chunks tid, tid + BLOCK, ...

        logits: flat (N P).
        lse: logsumexp of each row; the array of loss, which is written after it, if not needed.
        gradient: whether to write it.
        Shared memory: the first `smem_end` columns and those after the last whole round.
        """
        n = int64(cuda.blockIdx.x)
        tid = cuda.threadIdx.x
        scratch = cuda.shared.array(MAX_WARPS, float32)
        # A thread reads only what it has written itself: no barrier is needed.
        smem_row = cuda.shared.array(0, ELEMENT)
        x_RUW = cuda.local.array((REGISTER_ROUNDS, UNROLL, 4), uint32)
        # This load overlaps with reading the row; ignored rows are read too.
        target = int64(targets_N[n])
        full_end = vocab_size // ROUND * ROUND
        # Columns from here to full_end stay in registers.
        reg_begin = full_end - REGISTER_ROUNDS * ROUND if full_end > REGISTER_ROUNDS * ROUND else 0
        smem_end = smem_end if smem_end < reg_begin else reg_begin
        m, total = read_row(
            x_RUW, smem_row, logits, n * P, vocab_size, full_end, reg_begin, smem_end
        )
        in_vocabulary = target >= 0 and target < vocab_size
        counted = target != IGNORE
        at_target = load1(logits, n * P + target) if in_vocabulary else float32(math.nan)
        top = block_max(m, scratch)
        total = block_sum(total * exp2((m - top) * float32(LOG2E)), scratch)
        if tid == 0:
            lse_N[n] = math.log(total) + top
            loss_N[n] = math.log(total) + (top - at_target) if counted else float32(0.0)
        if gradient:
            used = vocab_size
            inv_count = inv_count_1[min(n, inv_count_1.size - 1)]
            if not counted:
                used = full_end = reg_begin = smem_end = 0  # zeros everywhere
            factor = inv_count / total if in_vocabulary else float32(math.nan)
            write_row(
                x_RUW, smem_row, logits, n * P, P, used, full_end, reg_begin, smem_end, top, factor
            )
            # The thread that has written the column of the target corrects it.
            if in_vocabulary and target // vec % BLOCK == tid:
                p = exp2((at_target - top) * float32(LOG2E)) * factor
                store1(logits, n * P + target, p - inv_count)

    declare_cost(cross_entropy_kernel, in_place=("logits",))
    return cross_entropy_kernel


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
    """Grid 1, block SUM_BLOCK.

    The barrier counts, in integers: no rounding for any number of targets.
    """
    tid = cuda.threadIdx.x
    N = targets_N.shape[0]
    count = int64(0)
    # Every thread makes the same iterations: there is a barrier inside.
    for start in range(0, N, SUM_BLOCK):
        n = start + tid
        counted = 0
        if n < N and int64(targets_N[n]) != IGNORE:
            counted = 1
        count += cuda.syncthreads_count(counted)
    if tid == 0:
        inv_count_1[0] = float32(1.0) / float32(count) if count > 0 else float32(0.0)


# ----------------------------------------------------------------------------- launchers
def cross_entropy(
    logits_NP: Array,
    targets_N: Array,
    vocab_size: int,
    inv_count_1: Array | None,
    with_gradient: bool = True,
    out_N: Array | None = None,
    lse_N: Array | None = None,
) -> tuple[Array, Array | None]:
    """Return loss (N,) float32, and the gradient, which **overwrites the logits**, or None.

    The gradient is that of inv_count sum(loss).

    logits: (N, P >= vocab_size) float32 or bf16.
    targets: (N,) integers.
    inv_count: (1,) float32, see count_targets; or (N,), one factor per row, for the gradient of
        sum(inv_count loss).
    with_gradient: False leaves the logits unchanged; then inv_count may be None.
    out_N: the array that becomes the loss.
    lse_N: (N,) float32, becomes the logsumexp of each row, also of rows whose target is -100.

    A target that is neither in [0, vocab_size) nor -100 raises ValueError on the CPU; on a GPU,
    where the check would have to synchronize, loss and gradient of that row are NaN.
    """
    check_array("cross_entropy", "logits", logits_NP, (None, None), FLOATS)
    N, P = logits_NP.shape
    _check_targets("cross_entropy", targets_N, N)
    check(0 < vocab_size <= P, f"cross_entropy: vocabulary {vocab_size}, logits {logits_NP.shape}")
    if inv_count_1 is None:
        check(not with_gradient, "cross_entropy: the gradient needs inv_count")
        inv_count_1 = empty(logits_NP, 1, np.float32)  # a kernel argument cannot be None
    per_row = getattr(inv_count_1, "shape", None) == (N,)
    check_array("cross_entropy", "inv_count", inv_count_1, (N,) if per_row else (1,))
    if out_N is not None:
        check_array("cross_entropy", "loss", out_N, (N,))
    if lse_N is not None:
        check_array("cross_entropy", "lse", lse_N, (N,))
    gradient_NP = logits_NP if with_gradient else None
    if on_host(logits_NP, targets_N, inv_count_1):
        check_targets_on_host(targets_N, vocab_size)
        options = inv_count_1, with_gradient, lse_N
        loss_N, d_NP = cross_entropy_ref(wide(logits_NP), targets_N, vocab_size, *options)
        if with_gradient and d_NP is not logits_NP:
            logits_NP[...] = d_NP
        if out_N is None:
            return loss_N, gradient_NP
        out_N[...] = loss_N
        return out_N, gradient_NP
    loss_N = empty(logits_NP, N, np.float32) if out_N is None else out_N
    logits = logits_NP.reshape(-1)
    vec = elements_per_vector(logits)
    plan = PLANS[vec]
    ce_kernel = make_cross_entropy_kernel(vec, aligned_rows(P, logits), plan)
    shared = shared_columns(vocab_size, vec, plan, shared_bytes(logits, plan.blocks_per_sm))
    arrays = (loss_N, loss_N if lse_N is None else lse_N, logits, targets_N, inv_count_1)
    scalars = (P, vocab_size, shared.columns, with_gradient)
    launch(ce_kernel, N, plan.threads, *arrays, *scalars, shared=shared.nbytes)
    return loss_N, gradient_NP


@dataclass(frozen=True)
class SharedColumns:
    """The part of a row that stays in shared memory."""

    columns: int  # the first ones of the row, whole rounds
    nbytes: int  # of those, and of the columns after the last whole round


def shared_columns(vocab_size: int, vec: int, plan: LossPlan, nbytes: int) -> SharedColumns:
    """Return how much of a row stays in nbytes of shared memory. vec: logits in 16 bytes."""
    round_columns = UNROLL * plan.threads * vec
    round_bytes = UNROLL * plan.threads * 16
    tail_bytes = -(-(vocab_size % round_columns) // vec) * 16
    rounds_that_fit = (nbytes - tail_bytes) // round_bytes
    rounds = min(vocab_size // round_columns - plan.register_rounds, rounds_that_fit)
    columns = max(rounds, 0) * round_columns
    return SharedColumns(columns, columns // vec * 16 + tail_bytes)


def shared_bytes(x: Array, blocks_per_sm: int) -> int:
    """Return the dynamic shared memory that each of `blocks_per_sm` resident blocks can use."""
    if isinstance(x, SimArray):
        block = 232448
        multiprocessor = 233472
    else:
        block = gpu_attribute(x.device.id, "MaxSharedMemoryPerBlockOptin")
        multiprocessor = gpu_attribute(x.device.id, "MaxSharedMemoryPerMultiprocessor")
    # The driver reserves 1024 bytes per block; `scratch` is static.
    return min(block, multiprocessor // blocks_per_sm - 1024) - 4 * MAX_WARPS


def row_sum(x_N: Array) -> Array:
    """Return the sum of x (N,) float32, (1,), added in a fixed order."""
    check_array("row_sum", "x", x_N, (None,))
    if on_host(x_N):
        return x_N.sum(keepdims=True)
    out_1 = empty(x_N, 1)
    launch(row_sum_kernel, 1, SUM_BLOCK, out_1, x_N, out_1, False)
    return out_1


def mean_loss(loss_N: Array, inv_count_1: Array) -> Array:
    """Return inv_count sum(loss), (1,), in one launch and a fixed order.

    loss: (N,), inv_count: (1,), both float32.
    """
    check_array("mean_loss", "inv_count", inv_count_1, (1,))
    check_array("row_sum", "x", loss_N, (None,))
    if on_host(loss_N, inv_count_1):
        return loss_N.sum(keepdims=True) * inv_count_1.astype(loss_N.dtype)
    out_1 = empty(loss_N, 1)
    launch(row_sum_kernel, 1, SUM_BLOCK, out_1, loss_N, inv_count_1, True)
    return out_1


def count_targets(targets_N: Array) -> Array:
    """Return 1 / (the number of targets that are not -100), (1,) float32, on their device.

    targets: (N,) integers. 0 if all are -100, so that loss and gradient are 0 and not NaN.
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


def check_targets_on_host(targets_N: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError if a target is neither in [0, vocab_size) nor -100."""
    _, wrong_N = _ignored_and_invalid(targets_N, vocab_size)
    if wrong_N.any():
        n = int(wrong_N.argmax())
        raise ValueError(
            f"cross_entropy: target {targets_N[n]} in row {n} is neither in [0, {vocab_size}) "
            f"nor {IGNORE}"
        )
