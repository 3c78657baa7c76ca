"""Sums and maxima over a warp (32 threads) and over a block.

A warp needs no shared memory, a block one float per warp. A butterfly of exclusive-or shuffles
leaves the result in every lane. The order of the additions is fixed, so the same input gives the
same bits. Every thread of the warp or block must call these functions: no thread may return before
them, and a block must be a whole number of warps.
"""

import functools
import math

from ..runtime.compiler import cuda, float32, int64
from ..runtime.launch import can_overlap, launch
from .ptx import kernel, load1, wait_for_previous

FULL = 0xFFFFFFFF  # all 32 lanes take part
MAX_WARPS = 32  # a block has at most 1024 threads
NEG_INF = float32(-math.inf)


@cuda.jit(device=True)
def warp_sum(v):
    """Return the sum of v over the 32 lanes, in every lane."""
    for step in (16, 8, 4, 2, 1):
        v += cuda.shfl_xor_sync(FULL, v, step)
    return v


@cuda.jit(device=True)
def warp_max(v):
    """Return the maximum of v over the 32 lanes, in every lane."""
    for step in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(FULL, v, step)
        v = v if v > other else other
    return v


@cuda.jit(device=True)
def block_sum(v, partial):
    """Return the sum of v over the block, in every thread.

    partial: MAX_WARPS floats of shared memory.
    """
    tid = cuda.threadIdx.x
    lane = tid % 32
    warp = tid // 32
    v = warp_sum(v)
    cuda.syncthreads()  # the previous use of `partial` is over
    if lane == 0:
        partial[warp] = v
    cuda.syncthreads()  # every warp's sum is written
    v = partial[lane] if lane < cuda.blockDim.x // 32 else float32(0.0)
    return warp_sum(v)


@cuda.jit(device=True)
def block_max(v, partial):
    """Return the maximum of v over the block, in every thread.

    partial: MAX_WARPS floats of shared memory.
    """
    tid = cuda.threadIdx.x
    lane = tid % 32
    warp = tid // 32
    v = warp_max(v)
    cuda.syncthreads()  # the previous use of `partial` is over
    if lane == 0:
        partial[warp] = v
    cuda.syncthreads()  # every warp's maximum is written
    v = partial[lane] if lane < cuda.blockDim.x // 32 else NEG_INF
    return warp_max(v)


# ----------------------------------------------------------------------------- sums of columns
SECTOR = 32  # bytes of a row that a block reads: one sector of memory
WARPS = 32  # that share the rows: few rows each, because latency of memory dominates
IN_FLIGHT = 8  # rows that a thread loads before it adds the first


@functools.cache
def make_add_column_sums_kernel(COLUMNS, overlap):
    """Return the kernel whose blocks own COLUMNS columns.

    overlap: it waits for the previous kernel of the stream itself (runtime/overlap.py).
    """
    ROWS_PER_WARP = 32 // COLUMNS  # rows that a warp reads at a time

    @kernel(32 * WARPS)
    def add_column_sums_kernel(out_C, second_C, terms, P, C):
        """Grid ceil(C / COLUMNS), block (COLUMNS, 32 / COLUMNS, up to WARPS).

        out_C[c] += sum over p of terms[p, c]. terms: flat (P C). C: columns of out, then of second.
        """
        tile = cuda.shared.array((WARPS, COLUMNS), float32)
        rows = cuda.local.array(IN_FLIGHT, float32)
        column = cuda.threadIdx.x
        warp = cuda.threadIdx.z
        warps = cuda.blockDim.z
        c = cuda.blockIdx.x * COLUMNS + column
        if overlap:
            wait_for_previous()
        acc, old = float32(0.0), float32(0.0)
        first = cuda.threadIdx.y == 0 and warp == 0 and c < C
        if first:  # the load overlaps with the sums below
            old = out_C[c] if c < out_C.size else second_C[c - out_C.size]
        p = warp * ROWS_PER_WARP + cuda.threadIdx.y
        while p < P and c < C:
            for a in range(IN_FLIGHT):  # unconditional loads, so that all are in flight at once
                q = p + a * ROWS_PER_WARP * warps
                rows[a] = load1(terms, int64(q if q < P else p) * C + c)
            for a in range(IN_FLIGHT):
                acc += rows[a] if p + a * ROWS_PER_WARP * warps < P else float32(0.0)
            p += IN_FLIGHT * ROWS_PER_WARP * warps
        step = COLUMNS
        while step < 32:  # the lanes of the same column
            acc += cuda.shfl_xor_sync(FULL, acc, step)
            step *= 2
        if cuda.threadIdx.y == 0:
            tile[warp, column] = acc
        cuda.syncthreads()
        if first:
            total = float32(0.0)
            for i in range(warps):  # a fixed order: the same bits every run
                total += tile[i, column]
            if c < out_C.size:
                out_C[c] = old + total
            else:
                second_C[c - out_C.size] = old + total

    return add_column_sums_kernel


def add_column_sums(x_PC, out_C, second_C=None) -> None:
    """Add the sums of the columns of x (P, C) to out (C,), without atomics.

    The gradient of a bias, or the second stage of that of a norm weight. x: float32 or bf16, out:
    float32.
    second: another gradient, for the columns of x after those of out.
    """
    P, C = x_PC.shape
    columns = SECTOR // x_PC.itemsize
    rows = 32 // columns
    block = columns, rows, min(WARPS, -(-P // rows))
    if second_C is None:
        second_C = out_C  # a kernel argument cannot be None
    overlap = can_overlap(x_PC)
    sums_kernel = make_add_column_sums_kernel(columns, overlap)
    grid = -(-C // columns)
    launch(sums_kernel, grid, block, out_C, second_C, x_PC.reshape(-1), P, C, overlap=overlap)
