"""Tiles of bf16 in shared memory, and their products in the registers of one warp.

A tile has rows of D elements and lies in shared memory from element `a` on, a multiple of 8 rows. ldmatrix reads the
same 16-byte chunk of 8 rows at a time. Were the rows simply one below the other, all 8 chunks would lie in the same
banks of shared memory (rows of 128 bytes) and be read one after the other. So chunk c of row r is kept at c ^ r, D = 64:

    row 0    c0 c1 c2 c3 c4 c5 c6 c7      c0 of rows 0..7 now lies in 8 different places,
    row 1    c1 c0 c3 c2 c5 c4 c7 c6      which are all the banks once:
    row 2    c2 c3 c0 c1 c6 c7 c4 c5      one read instead of eight
    ...

An accumulator is a register array (MT, NT, 4): MT x NT tiles of 16 x 8 floats, as mma_bf16 has them. Lane 4 g + t holds
of tile (m, n)

    acc[m, n, 2 r + c]    row 16 m + 8 r + g, column 8 n + 2 t + c           r, c in {0, 1}

Rounded to pairs of bf16 it is, register by register, the left operand of another product (`pack`): scores become the
factor of the values without leaving the lane. A packed operand is (depth / 16, MT, 4). MT = 2 reads every right operand
once for 32 rows, and MT = 1 once for 16: with 16 rows, reading shared memory takes longer than multiplying.
"""

import functools
from types import SimpleNamespace

from numba import cuda, float32, uint32

from ._ptx import device
from ._tensor_cores import (
    copy16_async,
    ldmatrix,
    ldmatrix_trans,
    load16_shared,
    mma_bf16,
    pack_bf16,
    store16,
    store_pair_shared,
)

CHUNK = 8  # elements in 16 bytes
WIDTHS = (16, 32, 64, 128)


@functools.cache
def make_place(D):
    """-> place(row, chunk): where a chunk begins, in elements from the tile's begin"""
    CHUNKS = D // CHUNK
    SHIFT = {16: 2, 32: 1}.get(D, 0)  # 128 bytes, all banks once, are 4 rows of 16 or 2 of 32
    MASK = min(CHUNKS, 8) - 1

    @device
    def place(row, chunk):
        return row * D + ((chunk ^ ((row >> SHIFT) & MASK)) << 3)

    return place


@functools.cache
def make_copy(D, ROWS, THREADS):
    """-> copy_tile(smem, a, x, first, stride, valid): a block begins to copy ROWS rows into a tile.

    Row r comes from x[first + r stride]; rows from `valid` on become zeros. Neighbouring threads copy neighbouring
    chunks: whole rows are read at once.
    """
    place = make_place(D)
    CHUNKS = D // CHUNK
    STEP = THREADS // CHUNKS  # rows that the block copies at a time
    STEPS = -(-ROWS // STEP)
    assert STEP % 8 == 0  # then the swizzle is the same in each step

    @device
    def copy_tile(smem, a, x, first, stride, valid):
        row, chunk = cuda.threadIdx.x // CHUNKS, cuda.threadIdx.x % CHUNKS
        to, source = a + place(row, chunk), first + row * stride + chunk * CHUNK
        for i in range(STEPS):
            if ROWS % STEP == 0 or row + i * STEP < ROWS:
                valid_row = row + i * STEP < valid
                copy16_async(smem, to + i * STEP * D, x, source + i * STEP * stride, valid_row)

    return copy_tile


@functools.cache
def make_store(D, MT):
    """-> store_tile(acc, smem, a, x, first, stride, valid): a warp writes its 16 MT rows as bf16.

    They go through the warp's own rows of a tile that nobody reads any more, so that global memory is written
    16 bytes at a time.
    """
    place = make_place(D)
    CHUNKS = D // CHUNK

    @device
    def store_tile(acc, smem, a, x, first, stride, valid):
        lane = cuda.threadIdx.x & 31
        registers = cuda.local.array(4, uint32)
        cuda.syncwarp()  # the other lanes have read these rows
        for m in range(MT):
            for r in range(2):
                row = 16 * m + 8 * r + (lane >> 2)
                for n in range(CHUNKS):
                    pair = pack_bf16(acc[m, n, 2 * r], acc[m, n, 2 * r + 1])
                    store_pair_shared(smem, a + place(row, n) + 2 * (lane & 3), pair)
        cuda.syncwarp()  # the rows are whole
        for i in range(MT * CHUNKS // 2):
            row, chunk = (32 * i + lane) // CHUNKS, (32 * i + lane) % CHUNKS
            load16_shared(registers, smem, a + place(row, chunk))
            if row < valid:
                store16(x, first + row * stride + chunk * CHUNK, registers)

    return store_tile


@functools.cache
def make_registers(MT, NT):
    """Accumulators (MT, NT, 4) without products: zero(acc), pack(fa, acc, k), scale_rows(acc, factor (MT, 2))"""

    @device
    def zero(acc):
        for m in range(MT):
            for n in range(NT):
                for i in range(4):
                    acc[m, n, i] = float32(0.0)

    @device
    def pack(fa, acc, k):
        """fa (MT, 4) = columns 16 k to 16 k + 15 of acc: two tiles side by side"""
        for m in range(MT):
            for i in range(4):
                n, r = 2 * k + i // 2, i % 2
                fa[m, i] = pack_bf16(acc[m, n, 2 * r], acc[m, n, 2 * r + 1])

    @device
    def scale_rows(acc, factor):
        for m in range(MT):
            for n in range(NT):
                for i in range(4):
                    acc[m, n, i] *= factor[m, i // 2]

    return SimpleNamespace(zero=zero, pack=pack, scale_rows=scale_rows)


@functools.cache
def make_products(D, MT, NT):
    """Products of one warp, for accumulators scores (MT, NT, 4) and rows (MT, D / 8, 4). Tiles are D wide.

    load_rows(fa, smem, a)              fa = 16 MT rows of a tile, packed
    add_abt(scores, smem, a, b)         scores += A B^T: 16 MT rows of one tile with 8 NT rows of another
    add_rbt(scores, fa, smem, b)        the same, A in registers
    add_slab(rows, fa, smem, b, k)      rows += A B: 16 columns of A in registers, packed; rows 16 k, ... of a tile
    add_pb(rows, scores, smem, b)       rows += scores B, B 8 NT rows of a tile
    """
    place, KS, pack = make_place(D), D // 16, make_registers(MT, NT).pack

    @device
    def load_rows(fa, smem, a):
        lane = cuda.threadIdx.x & 31
        for k in range(KS):
            for m in range(MT):
                ldmatrix(fa[k, m], smem, a + 16 * m * D + place(lane & 15, 2 * k + (lane >> 4)))

    @device
    def add_slice(scores, fa, smem, b, k):
        """Columns 16 k to 16 k + 15 of both factors"""
        lane = cuda.threadIdx.x & 31
        fb = cuda.local.array((2, 2), uint32)
        row = (lane & 7) + ((lane >> 4) << 3)
        for n in range(NT // 2):  # the four 8 x 8 matrices: rows 16 n, + 8; columns 16 k, + 8
            ldmatrix(fb, smem, b + 16 * n * D + place(row, 2 * k + ((lane >> 3) & 1)))
            for m in range(MT):
                mma_bf16(scores[m, 2 * n], fa[m], fb[0])
                mma_bf16(scores[m, 2 * n + 1], fa[m], fb[1])

    @device
    def add_abt(scores, smem, a, b):
        lane = cuda.threadIdx.x & 31
        fa = cuda.local.array((MT, 4), uint32)
        for k in range(KS):
            for m in range(MT):
                ldmatrix(fa[m], smem, a + 16 * m * D + place(lane & 15, 2 * k + (lane >> 4)))
            add_slice(scores, fa, smem, b, k)

    @device
    def add_rbt(scores, fa, smem, b):
        for k in range(KS):
            add_slice(scores, fa[k], smem, b, k)

    @device
    def add_slab(rows, fa, smem, b, k):
        """rows += A B, A (16 MT, 16) in registers, B the rows 16 k to 16 k + 15 of a tile"""
        lane = cuda.threadIdx.x & 31
        fb = cuda.local.array((2, 2), uint32)
        for n in range(KS):
            ldmatrix_trans(fb, smem, b + 16 * k * D + place(lane & 15, 2 * n + (lane >> 4)))
            for m in range(MT):
                mma_bf16(rows[m, 2 * n], fa[m], fb[0])
                mma_bf16(rows[m, 2 * n + 1], fa[m], fb[1])

    @device
    def add_pb(rows, scores, smem, b):
        fa = cuda.local.array((MT, 4), uint32)
        for k in range(NT // 2):
            pack(fa, scores, k)
            add_slab(rows, fa, smem, b, k)

    return SimpleNamespace(load_rows=load_rows, add_abt=add_abt, add_rbt=add_rbt, add_slab=add_slab, add_pb=add_pb)
