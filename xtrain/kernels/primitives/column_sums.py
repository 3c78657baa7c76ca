"""Sums of columns, added to a gradient: of a bias, or the second stage of that of a norm weight."""

import functools

from ..runtime.compiler import cuda, float32, int64
from ..runtime.launch import can_overlap, launch
from .ptx import kernel, load1, store1, wait_for_previous
from .reduce import FULL

SECTOR = 32  # bytes of a row that a block reads: one sector of memory
WARPS = 32  # that share the rows: few rows each, because latency of memory dominates
IN_FLIGHT = 8  # rows that a thread loads before it adds the first


@functools.cache
def make_add_column_sums_kernel(COLUMNS, overlap, add=True):
    """Return the kernel whose blocks own COLUMNS columns.

    overlap: it waits for the previous kernel of the stream itself (runtime/overlap.py).
    add: add to out, or overwrite it.
    """
    ROWS_PER_WARP = 32 // COLUMNS  # rows that a warp reads at a time

    @kernel(32 * WARPS)
    def add_column_sums_kernel(out_C, second_C, terms, P, C):
        """Grid ceil(C / COLUMNS), block (COLUMNS, 32 / COLUMNS, up to WARPS).

        out_C[c] += sum over p of terms[p, c], or = without add. terms: flat (P C). C: columns of
        out, then of second.
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
        if add and first:  # the load overlaps with the sums below
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
                store1(out_C, c, old + total)
            else:
                store1(second_C, c - out_C.size, old + total)

    return add_column_sums_kernel


def add_column_sums(x_PC, out_C, second_C=None, add=True) -> None:
    """Add the sums of the columns of x (P, C) to out (C,), or set out to them if not add.

    The gradient of a bias, or the second stage of that of a norm weight, without atomics. x:
    float32 or bf16, out: float32; if not add, also bf16.
    second: another gradient, for the columns of x after those of out.
    """
    P, C = x_PC.shape
    columns = SECTOR // x_PC.itemsize
    rows = 32 // columns
    block = columns, rows, min(WARPS, max(-(-P // rows), 1))
    if second_C is None:
        second_C = out_C  # a kernel argument cannot be None
    overlap = can_overlap(x_PC)
    sums_kernel = make_add_column_sums_kernel(columns, overlap, add)
    grid = -(-C // columns)
    launch(sums_kernel, grid, block, out_C, second_C, x_PC.reshape(-1), P, C, overlap=overlap)
