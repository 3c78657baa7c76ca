"""Tiles of bf16 in shared memory, and their products in the registers of one warp.

A tile has rows of D elements and starts in shared memory at a multiple of 256 bytes, for D = 256 of
512: of a row, so that left_lane's exclusive-or stays in it. ldmatrix reads the same 16-byte chunk of
8 rows at a time. If the rows were stored one after the other, all 8
chunks would be in the same banks of shared memory (rows of 128 bytes), and the reads would be
serialized. So chunk c of row r is stored at index c ^ r (swizzling); D = 64:

    row 0    c0 c1 c2 c3 c4 c5 c6 c7      c0 of rows 0..7 is now at 8 different indices,
    row 1    c1 c0 c3 c2 c5 c4 c7 c6      which cover all banks once:
    row 2    c2 c3 c0 c1 c6 c7 c4 c5      one read instead of eight
    ...

An accumulator is a register array (MT, NT, 4): MT x NT tiles of 16 x 8 floats, as mma_bf16 has
them. Of tile (m, n), lane 4 g + t holds

    acc[m, n, 2 r + c]    row 16 m + 8 r + g, column 8 n + 2 t + c           r, c in {0, 1}

Rounded to pairs of bf16 it is, register by register, the left operand of another product (`pack`):
the softmax of the scores multiplies the values without moving between lanes. With MT = 2 a warp
reads each right operand once for 32 rows; with MT = 1, 16 rows, reading shared memory takes longer
than multiplying.
"""

import functools

from ..runtime.compiler import cuda, float32, uint32
from .ptx import device
from .tensor_cores import (
    cp_async16,
    cp_async_commit,
    ldmatrix,
    ldmatrix_trans,
    load16_shared,
    mma_bf16,
    pack_bf16,
    store16,
    store_pair_shared,
)

CHUNK = 8  # elements in 16 bytes
WIDTHS = (16, 32, 64, 128, 256)


@functools.cache
def make_chunk_offset(D):
    """Return chunk_offset(row, chunk): the start of a chunk, in elements from that of the tile."""
    CHUNKS = D // CHUNK
    SHIFT = {16: 2, 32: 1}.get(D, 0)  # all banks once, 128 bytes, are 4 rows of 16 or 2 of 32
    MASK = min(CHUNKS, 8) - 1

    @device
    def chunk_offset(row, chunk):
        return row * D + ((chunk ^ ((row >> SHIFT) & MASK)) << 3)

    return chunk_offset


# ----------------------------------------------------------------- between global and shared memory
@functools.cache
def make_copy(D, ROWS, THREADS):
    """Return copy_tile(smem, a, x, first, stride, valid): a block starts to copy ROWS rows.

    Row r comes from x[first + r stride] and goes into the tile at smem[a]; rows from `valid` on
    become zeros. Neighbouring threads copy neighbouring chunks, so whole rows are read at once.
    """
    chunk_offset = make_chunk_offset(D)
    CHUNKS = D // CHUNK
    STEP = THREADS // CHUNKS  # rows that the block copies at a time
    STEPS = -(-ROWS // STEP)
    SAME = STEP % 8 == 0  # the swizzle is the same in each step
    assert THREADS & (THREADS - 1) == 0

    @device
    def copy_tile(smem, a, x, first, stride, valid):
        tid = cuda.threadIdx.x & (THREADS - 1)  # the same value, but the compiler learns its range
        row = tid // CHUNKS
        chunk = tid % CHUNKS
        target = a + chunk_offset(row, chunk)
        source = first + row * stride + chunk * CHUNK
        for i in range(STEPS):
            if ROWS % STEP == 0 or row + i * STEP < ROWS:
                inside = row + i * STEP < valid
                to = target + i * STEP * D
                if not SAME:
                    to = a + chunk_offset(row + i * STEP, chunk)
                cp_async16(smem, to, x, source + i * STEP * stride, inside)

    return copy_tile


@functools.cache
def make_copy_two(D, ROWS, THREADS):
    """Return copy_two, which copies a tile of K and one of V as one group, see make_copy.

    They are adjacent in shared memory.
    """
    copy_tile = make_copy(D, ROWS, THREADS)

    @device
    def copy_two(smem, a, x, x_first, x_stride, y, y_first, y_stride, valid):
        copy_tile(smem, a, x, x_first, x_stride, valid)
        copy_tile(smem, a + ROWS * D, y, y_first, y_stride, valid)
        cp_async_commit()

    return copy_two


@functools.cache
def make_store(D, MT):
    """Return store_tile(acc, smem, a, x, first, stride, valid): a warp writes 16 MT rows as bf16.

    They pass through the warp's own rows of a tile in shared memory that is no longer needed, so
    that global memory is written 16 bytes at a time.
    """
    chunk_offset = make_chunk_offset(D)
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
                    store_pair_shared(smem, a + chunk_offset(row, n) + 2 * (lane & 3), pair)
        cuda.syncwarp()  # the rows are complete
        for i in range(MT * CHUNKS // 2):
            row = (32 * i + lane) // CHUNKS
            chunk = (32 * i + lane) % CHUNKS
            load16_shared(registers, smem, a + chunk_offset(row, chunk))
            if row < valid:
                store16(x, first + row * stride + chunk * CHUNK, registers)

    return store_tile


# ----------------------------------------------------------------------------- in registers
@functools.cache
def make_fill(MT, NT):
    """Return clear(acc (MT, NT, 4)), fill(rows (MT, 2), value), scale_rows(acc, factors (MT, 2))"""

    @device
    def clear(acc):
        for m in range(MT):
            for n in range(NT):
                for i in range(4):
                    acc[m, n, i] = float32(0.0)

    @device
    def fill(rows, value):
        for m in range(MT):
            for r in range(2):
                rows[m, r] = value

    @device
    def scale_rows(acc, factors):
        for m in range(MT):
            for n in range(NT):
                for i in range(4):
                    acc[m, n, i] *= factors[m, i // 2]

    return clear, fill, scale_rows


@functools.cache
def make_pack(MT):
    """Return pack(fa, acc, k): columns 16 k to 16 k + 15 of acc become a left operand.

    They are two adjacent tiles, fa is (MT, 4).
    """

    @device
    def pack(fa, acc, k):
        for m in range(MT):
            for i in range(4):
                n = 2 * k + i // 2
                r = i % 2
                fa[m, i] = pack_bf16(acc[m, n, 2 * r], acc[m, n, 2 * r + 1])

    return pack


@functools.cache
def make_left_lane(D):
    """Return left_lane(): the offset of this lane's row in a 16 x 16 left operand.

    Also in a transposed right operand. Columns 16 k to 16 k + 15 are at this offset ^ 16 k: the
    swizzle changes no other bits. So a product needs one address, one exclusive-or per 16 columns,
    and constants.
    """
    chunk_offset = make_chunk_offset(D)

    @device
    def left_lane():
        lane = cuda.threadIdx.x & 31
        return chunk_offset(lane & 15, lane >> 4)

    return left_lane


@functools.cache
def make_scores(D, MT, NT):
    """Return load_rows, scores_of, scores: products of tiles, s (MT, NT, 4) = A B^T.

    A has 16 MT rows, B has 8 NT.

    load_rows(fa, smem, a)     loads the rows of the tile at a into registers fa (D / 16, MT, 4)
    scores_of(s, fa, smem, b)  with A in fa
    scores(s, smem, a, b)      with A in shared memory
    """
    chunk_offset = make_chunk_offset(D)
    left_lane = make_left_lane(D)
    clear = make_fill(MT, NT)[0]
    KS = D // 16

    @device
    def load_slice(fa, smem, a, k):
        for m in range(MT):
            ldmatrix(fa[m], smem, a + left_lane(), 16 * k, 16 * m * D)

    @device
    def add_slice(s, fa, smem, b, k):
        """Add the product of columns 16 k to 16 k + 15 of both factors."""
        lane = cuda.threadIdx.x & 31
        fb = cuda.local.array((2, 2), uint32)
        right_lane = chunk_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)
        for n in range(NT // 2):  # the four 8 x 8 matrices: rows 16 n, + 8; columns 16 k, + 8
            ldmatrix(fb, smem, b + right_lane, 16 * k, 16 * n * D)
            for m in range(MT):
                mma_bf16(s[m, 2 * n], fa[m], fb[0])
                mma_bf16(s[m, 2 * n + 1], fa[m], fb[1])

    @device
    def load_rows(fa, smem, a):
        for k in range(KS):
            load_slice(fa[k], smem, a, k)

    @device
    def scores_of(s, fa, smem, b):
        clear(s)
        for k in range(KS):
            add_slice(s, fa[k], smem, b, k)

    @device
    def scores(s, smem, a, b):
        fa = cuda.local.array((MT, 4), uint32)
        clear(s)
        for k in range(KS):
            load_slice(fa, smem, a, k)
            add_slice(s, fa, smem, b, k)

    return load_rows, scores_of, scores


@functools.cache
def make_add_slab(D, MT):
    """Return add_slab(rows, fa, smem, b, k): rows (MT, D / 8, 4) += A B.

    A (16 MT, 16) is packed in fa, B is rows 16 k to 16 k + 15 of the tile at b.
    """
    left_lane = make_left_lane(D)
    KS = D // 16

    @device
    def add_slab(rows, fa, smem, b, k):
        fb = cuda.local.array((2, 2), uint32)
        for n in range(KS):
            ldmatrix_trans(fb, smem, b + left_lane(), 16 * n, 16 * k * D)
            for m in range(MT):
                mma_bf16(rows[m, 2 * n], fa[m], fb[0])
                mma_bf16(rows[m, 2 * n + 1], fa[m], fb[1])

    return add_slab


@functools.cache
def make_add_product(D, MT, NT):
    """Return add_product(rows, p, smem, b): rows (MT, D / 8, 4) += P B.

    P (MT, NT, 4) is rounded to bf16, B is the 8 NT rows at b.
    """
    pack = make_pack(MT)
    add_slab = make_add_slab(D, MT)

    @device
    def add_product(rows, p, smem, b):
        fa = cuda.local.array((MT, 4), uint32)
        for k in range(NT // 2):
            pack(fa, p, k)
            add_slab(rows, fa, smem, b, k)

    return add_product
