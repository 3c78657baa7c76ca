"""Cross-entropy over a padded vocabulary, with its gradient.   logits: (N, P)   targets: (N,)

    forward    loss_n = logsumexp_v(x_v) - x_target
                      = log(sum_v exp(x_v - m)) + (m - x_target),   m = max_v x_v
    backward   d logsumexp / dx_v is the softmax p_v, so with L = inv_count sum_n loss_n
               dL/dx_v = inv_count (p_v - [v == target])

inv_count is 1 / (number of targets that count) over the whole optimizer step, so the gradients of
its micro-batches simply add up. A row whose target is -100 (IGNORE) has loss 0 and gradient 0.
Columns from vocab_size on are padding: not part of the softmax, their gradient is exactly 0.

Both ways in one launch, and nothing is saved: the gradient is written over the logits, float32 or
bf16. m and the sum come from one pass (see softmax.py), which also puts as much of the row as fits
into shared memory: GPT-2's 50304 columns in bf16, half of them in float32. Only the rest is read
twice, and mostly from L2. Bytes moved: logits read and written once, 2 N P elements.

In bf16 a multiprocessor of an H200 has time for about 28 instructions per element and both passes,
so exp(x - m) is exp2((x - m) log2 e): two multiplications and one instruction, exact to two units in
the last place. The sum over rows runs in a fixed order in one block: the same bits every run, without
atomics.
"""

import functools
import math

import numpy as np
from numba import cuda, float32, int64, types, uint32

from ..device import Array, cupy
from ..simulator import SimArray
from .primitives.ptx import device, kernel, load1, store1
from .primitives.reduce import MAX_WARPS, block_max, block_sum
from .primitives.rows import aligned_rows
from .primitives.tensor_cores import exp2, fmax
from .primitives.words import (
    each_of,
    load_words4,
    load_words4_shared,
    load_words8,
    load_words8_shared,
    pack4,
    pack8,
    store_words4,
    store_words4_shared,
    store_words8,
    store_words8_shared,
    unpack4,
    unpack8,
)
from .runtime.cost import declare_cost
from .runtime.launch import FLOATS, check, check_array, check_ids, empty, launch, on_host, wide
from .softmax import LOG2E, LOWEST, online_softmax

IGNORE = -100  # a target that does not count, as in PyTorch and Hugging Face
BLOCK = 512  # of the naive kernel
# For bf16 and float32: threads of a block, blocks on a multiprocessor, rounds of a row that stay in registers. With what
# fits into shared memory that is all of GPT-2's 50304 columns: nothing is read twice.
PLANS = {8: (384, 3, 1), 4: (512, 2, 3)}
UNROLL = 4  # chunks that a thread asks for before it looks at the first: 64 bytes
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
def cross_entropy_naive_kernel(
    loss_N, logits_NP, targets_N, inv_count_1, vocab_size, with_gradient
):
    """Grid N, block BLOCK. Block n owns row n, thread tid the columns tid, tid + BLOCK, ...

    The maths in its plainest form, float32 only: four bytes at a time, every logit read twice.
    """
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


@functools.cache
def make_cross_entropy_kernel(each, aligned, BLOCK, BLOCKS, HELD):
    """The kernel in use. each: logits in 16 bytes. aligned: every row begins at a multiple of 16 bytes.

    A block reads its row in rounds of UNROLL chunks per thread. What is left after the last whole round and the first
    `near` columns stay in shared memory, the last HELD rounds in registers. The others, if any, are read again in
    `write_row`, the latest first: those are still in L2.
    """
    STRIDE = BLOCK * each
    ROUND = UNROLL * STRIDE
    ELEMENT = types.uint16 if each == 8 else types.float32
    if each == 8:
        fetch_n, put_n, unpack, pack = load_words8, store_words8, unpack8, pack8
        keep, recall = store_words8_shared, load_words8_shared
    else:
        fetch_n, put_n, unpack, pack = load_words4, store_words4, unpack4, pack4
        keep, recall = store_words4_shared, load_words4_shared

    @device
    def fetch(words, logits, first, c, end):
        """words = the chunk at column c. When rows are not aligned, columns from `end` on are not read."""
        if aligned:
            fetch_n(words, logits, first + c)
        else:
            x = cuda.local.array(each, float32)
            for j in range(each):
                x[j] = load1(logits, first + c + j) if c + j < end else LOWEST
            pack(words, x, logits)

    @device
    def add(words, logits, m, total):
        """One more chunk. -> the new maximum, and the sum of exp(logit - maximum) so far."""
        x, top = cuda.local.array(each, float32), m
        unpack(x, words, logits)
        for j in range(each):
            top = fmax(top, x[j])
        total *= exp2((m - top) * float32(LOG2E))
        for j in range(each):
            total += exp2((x[j] - top) * float32(LOG2E))
        return top, total

    @device
    def put(logits, first, c, end, used, words, top, factor):
        """The softmax times factor over the chunk at column c; zeros from column `used` on."""
        x = cuda.local.array(each, float32)
        if c < used:
            unpack(x, words, logits)
        for j in range(each):
            p = exp2((x[j] - top) * float32(LOG2E)) * factor if c + j < used else float32(0.0)
            x[j] = p
        if aligned:
            pack(words, x, logits)
            put_n(logits, first + c, words)
        else:
            for j in range(each):
                if c + j < end:
                    store1(logits, first + c + j, x[j])

    @device
    def read_row(x_HUW, row, logits, first, used, whole, far, near):
        """-> this thread's largest logit, and its sum of exp(logit - largest)"""
        v, m, total = cuda.threadIdx.x * each, LOWEST, float32(0.0)
        x = cuda.local.array(each, float32)
        for c in range(whole + v, used, STRIDE):
            fetch(x_HUW[0, 0], logits, first, c, used)
            unpack(x, x_HUW[0, 0], logits)
            for j in range(each):  # padding is not part of the softmax
                x[j] = x[j] if c + j < used else LOWEST
            pack(x_HUW[0, 0], x, logits)
            keep(row, near + c - whole, x_HUW[0, 0])
            m, total = add(x_HUW[0, 0], logits, m, total)
        for base in range(v, near, ROUND):
            for u in range(UNROLL):  # ask for a round, then look at the first chunk
                fetch(x_HUW[0, u], logits, first, base + u * STRIDE, used)
            for u in range(UNROLL):
                keep(row, base + u * STRIDE, x_HUW[0, u])
                m, total = add(x_HUW[0, u], logits, m, total)
        for base in range(near + v, far, ROUND):
            for u in range(UNROLL):
                fetch(x_HUW[0, u], logits, first, base + u * STRIDE, used)
            for u in range(UNROLL):
                m, total = add(x_HUW[0, u], logits, m, total)
        for h in range(HELD):
            base = far + h * ROUND + v
            if base < whole:
                for u in range(UNROLL):
                    fetch(x_HUW[h, u], logits, first, base + u * STRIDE, used)
                for u in range(UNROLL):
                    m, total = add(x_HUW[h, u], logits, m, total)
        return m, total

    @device
    def write_row(x_HUW, row, logits, first, P, used, whole, far, near, top, factor):
        v = cuda.threadIdx.x * each
        for h in range(HELD):
            base = far + h * ROUND + v
            if base < whole:
                for u in range(UNROLL):
                    put(logits, first, base + u * STRIDE, P, whole, x_HUW[h, u], top, factor)
        for base in range(far - ROUND + v, near + v - 1, -ROUND):
            for u in range(UNROLL):
                fetch(x_HUW[0, u], logits, first, base + u * STRIDE, used)
            for u in range(UNROLL):
                put(logits, first, base + u * STRIDE, P, whole, x_HUW[0, u], top, factor)
        for base in range(v, near, ROUND):
            for u in range(UNROLL):
                recall(x_HUW[0, u], row, base + u * STRIDE)
            for u in range(UNROLL):
                put(logits, first, base + u * STRIDE, P, whole, x_HUW[0, u], top, factor)
        for c in range(whole + v, P, STRIDE):
            if c < used:
                recall(x_HUW[0, 0], row, near + c - whole)
            put(logits, first, c, P, used, x_HUW[0, 0], top, factor)

    @kernel(BLOCK, BLOCKS)
    def cross_entropy_kernel(loss_N, logits, targets_N, inv_count_1, P, vocab_size, near, gradient):
        """Grid N, block BLOCK. Block n owns row n, thread tid the chunks tid, tid + BLOCK, ... logits: flat (N P).

        Shared memory: `near` columns and those after the last whole round. gradient: write it.
        """
        n, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
        scratch = cuda.shared.array(MAX_WARPS, float32)
        row = cuda.shared.array(0, ELEMENT)  # a thread reads only what it has written: no barrier
        x_HUW = cuda.local.array((HELD, UNROLL, 4), uint32)
        target = int64(targets_N[n])  # comes while the row is read, also of an ignored one
        whole = vocab_size // ROUND * ROUND
        far = (
            whole - HELD * ROUND if whole > HELD * ROUND else 0
        )  # from here on they stay in registers
        near = near if near < far else far
        m, total = read_row(x_HUW, row, logits, n * P, vocab_size, whole, far, near)
        exists, counts = target >= 0 and target < vocab_size, target != IGNORE
        at_target = load1(logits, n * P + target) if exists else float32(math.nan)
        top = block_max(m, scratch)
        total = block_sum(total * exp2((m - top) * float32(LOG2E)), scratch)
        if tid == 0:
            loss_N[n] = math.log(total) + (top - at_target) if counts else float32(0.0)
        if gradient:
            used, inv_count = vocab_size, inv_count_1[0]
            if not counts:
                used = whole = far = near = 0  # zeros everywhere
            factor = inv_count / total if exists else float32(math.nan)
            write_row(x_HUW, row, logits, n * P, P, used, whole, far, near, top, factor)
            if exists and target // each % BLOCK == tid:  # who has written there now corrects it
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
    out_N: Array | None = None,
) -> tuple[Array, Array | None]:
    """logits (N, P >= vocab_size) float32 or bf16, targets (N,) whole numbers -> loss (N,) float32 (in
    out_N if given) and the gradient of inv_count sum(loss), **written over the logits**.

    with_gradient=False leaves the logits alone and returns None for the gradient; inv_count may
    then be None. A target that is neither in [0, vocab_size) nor -100: ValueError on the CPU; on a
    GPU, where looking would mean waiting, loss and gradient of that row are NaN.
    """
    check_array("cross_entropy", "logits", logits_NP, (None, None), FLOATS)
    N, P = logits_NP.shape
    _check_targets("cross_entropy", targets_N, N)
    check(0 < vocab_size <= P, f"cross_entropy: vocabulary {vocab_size}, logits {logits_NP.shape}")
    if inv_count_1 is None:
        check(not with_gradient, "cross_entropy: the gradient needs inv_count")
        inv_count_1 = empty(logits_NP, 1, np.float32)  # a kernel takes no None
    check_array("cross_entropy", "inv_count", inv_count_1, (1,))
    if out_N is not None:
        check_array("cross_entropy", "loss", out_N, (N,))
    if on_host(logits_NP, targets_N, inv_count_1):
        refuse_wrong(targets_N, vocab_size)
        given = targets_N, vocab_size, inv_count_1, with_gradient
        loss_N, d_NP = cross_entropy_ref(wide(logits_NP), *given)
        if with_gradient and d_NP is not logits_NP:
            logits_NP[...] = d_NP
        if out_N is not None:
            out_N[...] = loss_N
        return loss_N if out_N is None else out_N, logits_NP if with_gradient else None
    loss_N = empty(logits_NP, N, np.float32) if out_N is None else out_N
    logits = logits_NP.reshape(-1)
    each = each_of(logits)
    block, blocks, held = PLANS[each]
    ce_kernel = make_cross_entropy_kernel(each, aligned_rows(P, logits), block, blocks, held)
    near, shared = shared_plan(vocab_size, each, block, held, shared_bytes(logits, blocks))
    arrays = (loss_N, logits, targets_N, inv_count_1)
    launch(ce_kernel, N, block, *arrays, P, vocab_size, near, with_gradient, shared=shared)
    return loss_N, logits_NP if with_gradient else None


def shared_plan(vocab_size: int, each: int, block: int, held: int, nbytes: int) -> tuple[int, int]:
    """-> columns of a row that stay in nbytes of shared memory, whole rounds; bytes they and the rest of the row take"""
    columns = UNROLL * block * each  # of a round
    rest = -(-(vocab_size % columns) // each) * 16
    rounds = min(vocab_size // columns - held, (nbytes - rest) // (UNROLL * block * 16))
    near = max(rounds, 0) * columns
    return near, near // each * 16 + rest


def shared_bytes(x: Array, blocks: int) -> int:
    """How much of it each of so many blocks on a multiprocessor can have."""
    block, multiprocessor = (232448, 233472) if isinstance(x, SimArray) else _limits(x.device.id)
    return (
        min(block, multiprocessor // blocks - 1024) - 4 * MAX_WARPS
    )  # 1024: the driver's; scratch


@functools.cache
def _limits(device):
    attributes = cupy().cuda.Device(device).attributes
    return [attributes[f"MaxSharedMemoryPer{of}"] for of in ("BlockOptin", "Multiprocessor")]


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


def refuse_wrong(targets_N: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError when a target is neither in [0, vocab_size) nor -100."""
    wrong_N = ((targets_N < 0) | (targets_N >= vocab_size)) & (targets_N != IGNORE)
    if wrong_N.any():
        n = int(wrong_N.argmax())
        raise ValueError(
            f"cross_entropy: target {targets_N[n]} in row {n} is neither in [0, {vocab_size}) "
            f"nor {IGNORE}"
        )
