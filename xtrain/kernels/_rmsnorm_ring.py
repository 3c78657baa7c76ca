"""The backward of rmsnorm.py for bf16, with rows on their way in shared memory (_rings.py).

The same maths as rmsnorm_bwd_kernel. There a thread holds the next row in registers, and half of what it can hold is taken
by that; here `stages` - 1 rows of dy, x and skip are under way, and the registers are free for more warps.
"""

import functools
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32

from ._ptx import device, kernel, let_next_start
from ._reduce import MAX_WARPS
from ._rings import (
    start_copy4,
    start_copy4_once,
    start_copy8,
    start_copy8_once,
    take4,
    take8,
)
from ._rows import make_row_ops, row_plan
from ._tensor_cores import commit_copies, wait_copies
from ._words import pack4, store_words4_shared

SPARE = 4096  # bytes of a multiprocessor's shared memory for other things than rings


class Ring(NamedTuple):
    """See tune_rows.py in bench/."""

    stages: int = 3  # rows of a thread, one of which it deals with
    warps: int = 16  # on a multiprocessor
    columns: int = 24  # of a thread
    spread: bool = (
        True  # the last, incomplete round of rows is shared out among all multiprocessors
    )
    once: bool = False  # inputs leave the second-level cache first


def ring_plan(C, each, sizes, add_skip, ring, shared):
    """row_plan with bytes of shared memory, stages and blocks per multiprocessor; None if no two rows fit.

    sizes: bytes of an element of dy (and skip) and of x. shared: bytes that a multiprocessor has.
    """
    plan = row_plan(C, each, ring.warps, ring.columns)
    plan.blocks = max(ring.warps // (plan.W * plan.R), 1)
    plan.words = tuple(each * size // 4 for size in (*sizes, sizes[0]))  # of a chunk of dy, x, skip
    stage = sum(plan.words[: 3 if add_skip else 2]) * plan.STEPS * plan.THREADS * 4
    plan.stage = stage // 4
    plan.stages = min(ring.stages, (shared - SPARE) // plan.blocks // stage)
    sums = plan.R * plan.STEPS * 32 * each * 4 if plan.R > 1 else 0
    plan.bytes = max(plan.stages * stage, sums)
    return plan if plan.stages >= 2 and plan.bytes * plan.blocks <= shared - SPARE else None


@functools.cache
def make_ring_kernel(C, each, sizes, add_skip, overlap, again, ring, shared):
    """For aligned rows. -> kernel and plan, or None twice"""
    plan = ring_plan(C, each, sizes, add_skip, ring, shared)
    if plan is None:
        return None, None
    ops = make_row_ops(C, each, True, ring.warps, ring.columns)
    load, store, unpack, total, place = ops.load, ops.store, ops.unpack, ops.total, ops.place
    R, STEPS, STRIDE, THREADS, INVERSE = ops.R, ops.STEPS, ops.STRIDE, ops.THREADS, 1 / C
    STAGES, STAGE, WIDTH, FULL = plan.stages, plan.stage, STEPS * STRIDE, C % STRIDE == 0
    AHEAD, WAIT, SPREAD = STAGES - 1, STAGES - 2, ring.spread
    (A, B, _), COLUMN = plan.words, STEPS * THREADS  # words of a chunk of dy and of x
    SIZES, BASES = plan.words, (0, COLUMN * A, COLUMN * (A + B))
    copies = (start_copy8_once, start_copy4_once) if ring.once else (start_copy8, start_copy4)
    copy, take = (copies[0], take8) if each == 8 else (copies[1], take4)

    @device
    def slot(stage, array, s):
        """Where the thread's chunk s lies. array: 0 dy, 1 x, 2 skip"""
        return stage * STAGE + BASES[array] + (s * THREADS + cuda.threadIdx.x) * SIZES[array]

    @device
    def begin(smem, stage, dy, skip, x, n, N, column):
        """Row n is on its way to `stage`. One group of copies, even where there is no row."""
        if n < N:
            for s in range(STEPS):
                if FULL or column + s * STRIDE < C:
                    i = n * C + (column + s * STRIDE)
                    copy(smem, slot(stage, 0, s), dy, i)
                    copy(smem, slot(stage, 1, s), x, i)
                    if add_skip:
                        copy(smem, slot(stage, 2, s), skip, i)
        commit_copies()

    @device
    def come(values_E, smem, stage, array, s, x, column):
        words = cuda.local.array(each, uint32)
        if FULL or column + s * STRIDE < C:
            take(words, smem, slot(stage, array, s), x)
        else:
            for j in range(each):
                words[j] = uint32(0)
        unpack(values_E, words, x)

    @device
    def add_rows(out, first, sums_SC, tile):
        """_rows.py's, in the memory of the rings"""
        tid = cuda.threadIdx.x
        if R == 1:
            for s in range(STEPS):
                store(out, first, tid * each + s * STRIDE, sums_SC[s])
        else:
            words, at = cuda.local.array(4, uint32), (tid >> 5) * WIDTH + (tid & 31) * each
            cuda.syncthreads()  # all rings are at rest
            for s in range(STEPS):
                for part in range(0, each, 4):
                    pack4(words, sums_SC[s, part : part + 4], tile)
                    store_words4_shared(tile, at + s * STRIDE + part, words)
            cuda.syncthreads()
            for c in range(tid, C, THREADS):
                acc = float32(0.0)
                for row in range(R):  # always in this order: same bits every run
                    acc += tile[row * WIDTH + c]
                out[first + c] = acc

    @kernel(THREADS, plan.blocks)
    def rmsnorm_bwd_ring_kernel(dx, partial, dy, skip, x, w_C, rstd_N):
        """Grid P, block THREADS. Block p owns R rows of every P R: p R, ... or, spread, p, p + P, ...

        dx, dy, skip, x: flat (N C). partial: flat (P C), block p writes row p.
        """
        row, column = place()
        smem = cuda.shared.array(0, float32)
        scratch = cuda.shared.array(MAX_WARPS, float32)
        g_SE = cuda.local.array((STEPS, each), float32)
        xhat_SE = cuda.local.array((STEPS, each), float32)
        dw_SE, w = cuda.local.array((STEPS, each), float32), cuda.local.array(each, float32)
        y = cuda.local.array(each, float32)
        for s in range(STEPS):
            for j in range(each):
                dw_SE[s, j] = float32(0.0)
        N, step = int32(rstd_N.size), int32(cuda.gridDim.x * R)
        if SPREAD:
            n = int32(cuda.blockIdx.x + row * cuda.gridDim.x)
        else:
            n = int32(cuda.blockIdx.x * R + row)
        for k in range(AHEAD):
            begin(smem, k, dy, skip, x, n + k * int64(step), N, column)
        next_rstd, stage, free = rstd_N[n] if n < N else float32(0.0), int32(0), int32(AHEAD)
        while n < N:
            rstd, acc = next_rstd, float32(0.0)
            wait_copies(WAIT)
            begin(smem, free, dy, skip, x, n + AHEAD * int64(step), N, column)
            next_rstd = rstd_N[n + step] if n + step < N else float32(0.0)
            for s in range(STEPS):
                come(g_SE[s], smem, stage, 0, s, dy, column)
                come(xhat_SE[s], smem, stage, 1, s, x, column)
                load(w, w_C, 0, column + s * STRIDE)
                if again:
                    for j in range(each):
                        y[j] = xhat_SE[s, j] * (rstd * w[j])
                    store(dy, n * C, column + s * STRIDE, y)
                for j in range(each):
                    xhat_SE[s, j] *= rstd
                    dw_SE[s, j] += g_SE[s, j] * xhat_SE[s, j]
                    g_SE[s, j] *= w[j]
                    acc += g_SE[s, j] * xhat_SE[s, j]
            mean = total(acc, scratch) * float32(INVERSE)
            for s in range(STEPS):
                for j in range(each):
                    g_SE[s, j] = rstd * (g_SE[s, j] - xhat_SE[s, j] * mean)
                if add_skip:
                    come(w, smem, stage, 2, s, skip, column)
                    for j in range(each):
                        g_SE[s, j] += w[j]
                store(dx, n * C, column + s * STRIDE, g_SE[s])
            free, stage = stage, int32(stage + 1 if stage + 1 < STAGES else 0)
            n = int32(n + step)
        wait_copies(0)
        if overlap:
            let_next_start()  # add_column_sums
        add_rows(partial, int64(cuda.blockIdx.x) * C, dw_SE, smem)

    return rmsnorm_bwd_ring_kernel, plan
