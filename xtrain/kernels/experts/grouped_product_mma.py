"""Grouped products in bf16 for compute capability 8.0 and up: mma.sync. See grouped_product.py.

A block computes 128 x 64 elements of one expert's result; each of its 4 warps 32 rows of them in
registers. Steps of BK = 64 terms of both operands pass through shared memory in panels of 64
elements, swizzled as tiles.py says; cp.async brings the next step while this one is multiplied. An
operand that is not transposed is a panel of its rows, 64 terms each; a transposed one is 64 terms
as the rows of panels of 64 columns, which ldmatrix transposes.

A sum is one chain of mma m16n8k16 over the terms in groups of 16.
"""

import functools

from ...device import Array
from ..primitives.ptx import device, kernel
from ..primitives.tensor_cores import (
    cp_async16,
    cp_async_commit,
    cp_async_wait,
    ldmatrix,
    ldmatrix_trans,
    mma_bf16,
)
from ..primitives.tiles import CHUNK, make_chunk_offset, make_fill, make_left_lane
from ..primitives.words import WORD_OPS
from ..runtime.compiler import cuda, float32, int32, int64, uint16, uint32
from .expert_order import TILE, ExpertOrder
from .grouped_product_tiled import (
    Product,
    declare_product_cost,
    launch_tiles,
    make_is_other,
    make_starts,
)

BM = TILE  # rows of a block's tile
BN = 64  # columns: one panel
BK = 64  # terms of a step
WARPS = BM // 32
THREADS = 32 * WARPS
MT = 2  # tiles of 16 rows of a warp
NT = BN // 8
STEP = (BM + BN) * BK  # elements of both operands
STAGES = 2
SHARED = 2 * STAGES * STEP  # bytes: 48 KB


@functools.cache
def make_load(WIDTH: int, TRANSPOSED: bool):
    """Return load(smem, a, x, start, first, end, k, terms): start to copy a step of an operand.

    a: where it begins in shared memory. WIDTH: rows or columns of the tile; first: the first of
    them, of `end`. Beyond `end` and beyond the terms: zeros.
    """
    chunk_offset = make_chunk_offset(BK)
    CHUNKS = WIDTH * BK // CHUNK
    PER_ROW = BK // CHUNK

    @device
    def load(smem, a, x, start, first, end, k, terms):
        for j in range(CHUNKS // THREADS):
            n = int32(cuda.threadIdx.x) + j * THREADS
            row = n // PER_ROW % BK
            chunk = n % PER_ROW
            panel = n // (PER_ROW * BK)
            if TRANSPOSED:
                t = k + row
                i = first + panel * BK + chunk * CHUNK
                at = start + int64(t) * end + i
            else:
                t = k + chunk * CHUNK
                i = first + panel * BK + row
                at = start + int64(i) * terms + t
            to = a + panel * (BK * BK) + chunk_offset(row, chunk)
            cp_async16(smem, to, x, at, i < end and t < terms)

    return load


@functools.cache
def make_multiply(product: Product):
    """Return multiply(acc, smem, a, b): a warp adds one step to its 32 x 64 sums."""
    chunk_offset = make_chunk_offset(BK)
    left_lane = make_left_lane(BK)
    LEFT_TRANSPOSED = product.left_transposed
    RIGHT_TRANSPOSED = product.right_transposed

    @device
    def multiply(acc, smem, a, b):
        lane = int32(cuda.threadIdx.x & 31)
        warp = int32(cuda.threadIdx.x >> 5)
        fa = cuda.local.array((MT, 4), uint32)
        fb = cuda.local.array((2, 2), uint32)
        other_lane = chunk_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)
        for k in range(BK // 16):
            for m in range(MT):
                if LEFT_TRANSPOSED:  # a panel has the columns of two warps
                    panel = a + (warp >> 1) * (BK * BK)
                    flip = 32 * (warp & 1) + 16 * m
                    ldmatrix_trans(fa[m], smem, panel + other_lane, flip, 16 * k * BK)
                else:
                    rows = a + warp * (32 * BK)
                    ldmatrix(fa[m], smem, rows + left_lane(), 16 * k, 16 * m * BK)
            for n in range(NT // 2):
                if RIGHT_TRANSPOSED:
                    ldmatrix_trans(fb, smem, b + left_lane(), 16 * n, 16 * k * BK)
                else:
                    ldmatrix(fb, smem, b + other_lane, 16 * k, 16 * n * BK)
                for m in range(MT):
                    mma_bf16(acc[m, 2 * n], fa[m], fb[0])
                    mma_bf16(acc[m, 2 * n + 1], fa[m], fb[1])

    return multiply


@functools.cache
def make_store(ACCUMULATE: bool):
    """Return store(out, acc, start, row, column, rows, columns): a lane's elements, = or +=."""
    words_of = WORD_OPS[2]
    load_words = words_of.load
    store_words = words_of.store
    unpack = words_of.unpack
    pack = words_of.pack

    @device
    def store(out, acc, start, row, column, rows, columns):
        lane = int32(cuda.threadIdx.x & 31)
        row += 32 * int32(cuda.threadIdx.x >> 5) + (lane >> 2)
        column += 2 * (lane & 3)
        pair = cuda.local.array(2, float32)
        words = cuda.local.array(2, uint32)
        for m in range(MT):
            for n in range(NT):
                for r in range(2):
                    y = row + 16 * m + 8 * r
                    x = column + 8 * n
                    if y < rows and x < columns:
                        at = start + int64(y) * columns + x
                        pair[0] = float32(0.0)
                        pair[1] = float32(0.0)
                        if ACCUMULATE:
                            load_words(words, out, at)
                            unpack(pair, words, out)
                        for c in range(2):
                            pair[c] += acc[m, n, 2 * r + c]
                        pack(words, pair, out)
                        store_words(out, at, words)

    return store


@functools.cache
def make_kernel(product: Product, ACCUMULATE: bool = False):
    """Return the kernel of a product; launch_product starts it. ACCUMULATE: add to the result."""
    starts = make_starts(product, BM)
    is_other = make_is_other(product, BM)
    load_left = make_load(BM, product.left_transposed)
    load_right = make_load(BN, product.right_transposed)
    multiply = make_multiply(product)
    store = make_store(ACCUMULATE)
    clear = make_fill(MT, NT)[0]

    @kernel(THREADS)
    def grouped_product_mma_kernel(out, left, right, experts, first, counts, rows, columns, K):
        """The grid and the arguments are those of grouped_product_tiled.py's kernel."""
        smem = cuda.shared.array(0, uint16)
        acc = cuda.local.array((MT, NT, 4), float32)
        if is_other(experts):
            return
        row = int32(cuda.blockIdx.y * BM)
        column = int32(cuda.blockIdx.x * BN)
        left_start, right_start, start, terms = starts((experts, first, counts), rows, columns, K)
        clear(acc)
        for step in range(-1, (terms + BK - 1) // BK):
            k = (step + 1) * BK
            if k < terms:  # the step after this one
                a = ((step + 1) & 1) * STEP
                load_left(smem, a, left, left_start, row, rows, k, terms)
                load_right(smem, a + BM * BK, right, right_start, column, columns, k, terms)
            cp_async_commit()
            if step >= 0:
                cp_async_wait(1)
                cuda.syncthreads()  # this step has arrived for all threads
                a = (step & 1) * STEP
                multiply(acc, smem, a, a + BM * BK)
                cuda.syncthreads()  # and has been read
        store(out, acc, start, row, column, rows, columns)

    declare_product_cost(grouped_product_mma_kernel, product, ACCUMULATE)
    return grouped_product_mma_kernel


def launch_product(
    product: Product,
    out: Array,
    left: Array,
    right: Array,
    order: ExpertOrder,
    accumulate: bool = False,
) -> None:
    """Fill `out` with y, dx or dw, or add to it. left: x or dy. right: w, or x for DW."""
    made = make_kernel(product, accumulate)
    launch_tiles(made, THREADS, (BM, BN), out, left, right, order, shared=SHARED)
