"""The operands of gemv_tensor_cores.py: what its kernels may assume, and how they load w and x."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ...device import Array
from ..four_bits import FOUR_BITS
from ..primitives.codes import load_codes16
from ..primitives.ptx import device, load8, store8, store8_shared
from ..primitives.reduce import FULL
from ..primitives.tensor_cores import high_bf16, low_bf16, opaque, pack_bf16
from ..primitives.words import load_words8, load_words8_shared, store_words8_shared
from ..runtime.compiler import cuda, float32, int64, uint32
from .gemv_four_bits import make_load_four

MAX_ROWS = 8  # columns of one tensor-core tile
MAX_ROWS_QUANTIZED = 4 * MAX_ROWS
TILE = 16  # rows of w that a block multiplies at a time
CHUNK = 32  # columns of w in bf16 that a warp multiplies at a time: 8 for each of 4 lanes
CHUNK_QUANTIZED = 2 * CHUNK
CHUNK_FOUR_BITS = 4 * CHUNK
# elements between the rows of x in shared memory: 4 lanes of two rows have no bank conflicts
PAD = 32
PAD_QUANTIZED = 8  # the same where a lane has 16 columns and reads 8 of them at a time
MOST_SHARED = 99 << 10  # bytes that a block may use on every GPU since compute capability 8.0
MOST_SUMS = 8704  # bytes of a block's sums, with 16 warps or with swiglu and 8
ROWS_AT_ONCE = 4  # of x that a thread loads


def chunk_columns(quantized: str) -> int:
    """Return the columns of a chunk, of weights of this kind: "" if they are not quantized."""
    if quantized in FOUR_BITS:
        return CHUNK_FOUR_BITS
    return CHUNK_QUANTIZED if quantized else CHUNK


def pad_of(quantized: str) -> int:
    """Return the elements between the rows of x in shared memory."""
    return PAD_QUANTIZED if quantized and quantized not in FOUR_BITS else PAD


def shared_bytes(N: int, K: int, quantized: str = "") -> int:
    """Return bytes of shared memory for N rows of x"""
    return 2 * N * (K + pad_of(quantized))


@dataclass(frozen=True)
class Config:
    """How the work is divided. `warps` and `chunks` change the order of additions; `blocks` does
    not change the result."""

    warps: int  # of a block
    chunks: int  # of w in flight per warp
    blocks: int  # per multiprocessor
    stage: bool = True  # x passes through shared memory, if it fits


def staged(K: int, config: Config, quantized: str = "") -> bool:
    """Return True if up to MAX_ROWS of x pass through shared memory. Does not depend on their
    number, so a row's bits do not either."""
    return config.stage and shared_bytes(MAX_ROWS, K, quantized) + MOST_SUMS <= MOST_SHARED


@dataclass(frozen=True)
class Variant:
    """What a kernel computes and what it may assume."""

    norm: bool  # x is RMS-normalized
    add: bool  # delta is added to x first, and the sum written to h
    half: bool  # x is bf16 and used unchanged
    swiglu: bool
    bias: bool  # b is added to the product
    overlap: bool  # the kernel may start before the previous one has ended
    ready: bool  # the weights may be read before the previous kernel has ended
    once: bool  # a block has one tile and loads all of it at once
    staged: bool  # x passes through shared memory
    quantized: str = ""  # the weights are codes of this kind
    groups: int = 1  # of 8 rows of x; above 1, x is bf16 in memory, and there is no norm
    tiles: int = 1  # of 16 rows of w, which a block multiplies with the same x; with swiglu 1

    @property
    def parts(self) -> int:
        """Return how many times 16 rows of w a block multiplies at a time: M."""
        return 2 if self.swiglu else self.tiles

    @property
    def four_bits(self) -> bool:
        return self.quantized in FOUR_BITS

    @property
    def words(self) -> int:
        """Return the words of a chunk in a lane: 16 bytes, and the scales of a chunk of four bits."""
        return 5 if self.four_bits else 4

    @property
    def steps(self) -> int:
        """Return the products of a chunk."""
        return chunk_columns(self.quantized) // 16


class Rows(NamedTuple):
    """The rows of x, and what happens to them before the product. All arrays are flat."""

    x: Array
    delta: Array  # added to x, if variant.add
    h: Array  # x + delta
    norm_w: Array
    N: int


class Weights(NamedTuple):
    """What x is multiplied by. All arrays are flat."""

    w: Array
    scale: Array  # of the rows of quantized weights
    groups: Array  # with codes of four bits: the scales of their groups
    b: Array
    F: int  # columns of y


class Shared(NamedTuple):
    """The shared memory of a block."""

    sums: Array  # sums_size(...) floats
    squares: Array  # of a warp and a row: WARPS MAX_ROWS floats
    x: Array  # shared_bytes(...) if variant.staged


class Share(NamedTuple):
    """The tiles of a block: first, first + blocks, ..."""

    first: int
    blocks: int  # of the grid


@functools.cache
def make_row_of_w(SWIGLU):
    """Return row_of_w(o, m, F): the row of w of row o of a tile's first 16, in its m-th 16 rows.

    Beyond the last row it is that one.
    """

    @device
    def row_of_w(o, m, F):
        if SWIGLU:
            return (o if o < F else F - 1) + m * F
        o += m * TILE
        return o if o < F else F - 1

    return row_of_w


@functools.cache
def make_operands(K, variant, config):
    """Return load_w, load_x, load_staged_x, load_groups, exists: the operands of mma_bf16.

    load_w(words (U, M, 2, variant.words), weights, tile, step)
        this warp's chunks step U .. step U + U - 1 of 16 M rows of w
    load_x(fx (U, E / 4, 2), rows, step, share)
        the same chunks of x; returns this lane's sum of squares
    load_staged_x(fx, x_s, step, N)
        the same chunks of x from shared memory
    load_groups(fx (GROUPS, 2, 2), x, warp, lane, step, u, e, N)
        fx[group] = 8 columns per lane, from its column e on, of chunk u of rows 8 group, ... of x,
        which is bf16 and used unchanged
    exists(step, u, warp)
        True if the warp has chunk u of a step
    A warp has U adjacent chunks at a time; chunks beyond the last one are zeros, and rows of x
    beyond the last one are that one: their results are not read.
    With variant.add, the blocks share the work of writing x + delta to h.
    """
    NORM = variant.norm
    ADD = variant.add
    HALF = variant.half
    TILES = variant.tiles
    GROUPS = variant.groups
    M = variant.parts
    WARPS = config.warps
    U = config.chunks
    WIDTH = chunk_columns(variant.quantized)
    FOUR_BITS = variant.four_bits
    E = WIDTH // 4  # columns of a lane in a chunk
    # of a lane's columns, those of 8 codes of four bits follow each other, else all of them
    BETWEEN_LANES = 8 if FOUR_BITS else E
    BETWEEN = 4 if FOUR_BITS else 1
    X_PAD = pad_of(variant.quantized)
    CHUNKS = -(-K // WIDTH)
    FULL_CHUNKS = K % WIDTH == 0
    load_words = load_codes16 if variant.quantized else load_words8
    EVEN = CHUNKS % (WARPS * U) == 0  # all warps have chunks in every step
    WHOLE = CHUNKS // (WARPS * U)  # steps in which they have
    row_of_w = make_row_of_w(variant.swiglu)

    @device
    def chunk_of(step, u, warp):
        return (step * WARPS + warp) * U + u

    @device
    def exists(step, u, warp):
        return EVEN or step < WHOLE or chunk_of(step, u, warp) < CHUNKS

    @device
    def column(c, lane, e):
        """Return the column of x of a lane's column e, a multiple of 8, of chunk c."""
        return c * WIDTH + BETWEEN_LANES * (lane & 3) + BETWEEN * e

    @device
    def load_w(words, weights, tile, step):
        # else the addresses of all tiles occupy registers all the time
        tid = opaque(cuda.threadIdx.x)
        warp, lane = tid >> 5, tid & 31
        for u in range(U):
            c = chunk_of(step, u, warp)
            for m in range(M):
                for r in range(2):
                    o = row_of_w(tile * TILES * TILE + 8 * r + (lane >> 2), m, weights.F)
                    if exists(step, u, warp):
                        load_words(words[u, m, r], weights.w, o * K + c * WIDTH + E * (lane & 3))
                    else:
                        for j in range(4):
                            words[u, m, r, j] = uint32(0)
            # no instruction: the compiler keeps the loads in the order of their use, before the
            # products
            cuda.syncwarp()

    @device
    def load_x(fx, rows, step, share):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        row = lane >> 2
        squares = float32(0.0)
        n = int64(row) if row < rows.N else rows.N - 1
        words = cuda.local.array(4, uint32)
        x_8 = cuda.local.array(8, float32)
        nw_8 = cuda.local.array(8, float32)
        delta_4 = cuda.local.array(4, uint32)
        for u in range(U):
            c = chunk_of(step, u, warp)
            for e in range(0, E, 8):
                k = column(c, lane, e)
                if not (exists(step, u, warp) and (FULL_CHUNKS or k < K)):
                    for j in range(4):
                        words[j] = uint32(0)
                elif HALF:
                    load_words8(words, rows.x, n * K + k)
                else:
                    load8(x_8, rows.x, n * K + k)
                    if ADD:
                        load_words8(delta_4, rows.delta, n * K + k)
                        for j in range(4):
                            x_8[2 * j] += low_bf16(delta_4[j])
                            x_8[2 * j + 1] += high_bf16(delta_4[j])
                        if row < rows.N and uint32(c) % uint32(share.blocks) == uint32(share.first):
                            store8(rows.h, n * K + k, x_8)
                    if NORM:
                        load8(nw_8, rows.norm_w, k)
                        for j in range(8):
                            squares += x_8[j] * x_8[j]
                            x_8[j] *= nw_8[j]
                    for j in range(4):
                        words[j] = pack_bf16(x_8[2 * j], x_8[2 * j + 1])
                for j in range(4):
                    fx[u, e // 4 + j // 2, j % 2] = words[j]
        return squares

    @device
    def load_staged_x(fx, x_s, step, N):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        n = lane >> 2
        words = cuda.local.array(4, uint32)
        n = n if n < N else N - 1
        for u in range(U):
            c = chunk_of(step, u, warp)
            for e in range(0, E, 8):
                k = column(c, lane, e)
                if exists(step, u, warp) and (FULL_CHUNKS or k < K):
                    load_words8_shared(words, x_s, n * (K + X_PAD) + k)
                else:
                    for j in range(4):
                        words[j] = uint32(0)
                for j in range(4):
                    fx[u, e // 4 + j // 2, j % 2] = words[j]

    @device
    def load_groups(fx, x, warp, lane, step, u, e, N):
        words = cuda.local.array(4, uint32)
        row = lane >> 2
        c = chunk_of(step, u, warp)
        # the addresses of all groups and chunks are constants away from one
        first = int64(row) * K + BETWEEN_LANES * (lane & 3)
        inside = FULL_CHUNKS or column(c, lane, e) < K
        for group in range(GROUPS):
            for j in range(4):
                words[j] = uint32(0)
            if row < N - 8 * group and inside:
                load_words8(words, x, first + (8 * group * K + c * WIDTH + BETWEEN * e))
            for j in range(4):
                fx[group, j // 2, j % 2] = words[j]

    if FOUR_BITS:
        load_w = make_load_four(CHUNKS, M, U, TILE, chunk_of, exists)
    return load_w, load_x, load_staged_x, load_groups, exists


@functools.cache
def make_stage(K, variant, config):
    """Return stage(shared, rows, share): copy x to shared memory, in bf16, and sum the squares.

    shared.squares receives the sums of the warps. With variant.add, the blocks share the work of
    writing x + delta to h. The result for a row does not depend on the number of rows.
    """
    NORM = variant.norm
    ADD = variant.add
    HALF = variant.half
    THREADS = 32 * config.warps
    SHARE = 256  # columns: what a warp handles at a time
    X_PAD = pad_of(variant.quantized)

    @device
    def stage(shared, rows, share):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        x_R8 = cuda.local.array((ROWS_AT_ONCE, 8), float32)
        w_8 = cuda.local.array(8, float32)
        delta_R4 = cuda.local.array((ROWS_AT_ONCE, 4), uint32)
        words_R4 = cuda.local.array((ROWS_AT_ONCE, 4), uint32)
        squares_R = cuda.local.array(ROWS_AT_ONCE, float32)
        for low in range(0, rows.N, ROWS_AT_ONCE):
            for i in range(ROWS_AT_ONCE):
                squares_R[i] = float32(0.0)
            for k in range(8 * cuda.threadIdx.x, K, 8 * THREADS):
                if NORM:
                    load8(w_8, rows.norm_w, k)
                for i in range(ROWS_AT_ONCE):
                    if low + i < rows.N:
                        if HALF:
                            load_words8(words_R4[i], rows.x, int64(low + i) * K + k)
                        else:
                            load8(x_R8[i], rows.x, int64(low + i) * K + k)
                            if ADD:
                                load_words8(delta_R4[i], rows.delta, int64(low + i) * K + k)
                turn = k // SHARE
                while (
                    ADD and turn >= share.blocks
                ):  # the remainder without a division: usually no step
                    turn -= share.blocks
                mine = ADD and turn == share.first
                for i in range(ROWS_AT_ONCE):
                    at = (low + i) * (K + X_PAD) + k
                    if low + i < rows.N:
                        if HALF:
                            store_words8_shared(shared.x, at, words_R4[i])
                        else:
                            if ADD:
                                for j in range(4):
                                    x_R8[i, 2 * j] += low_bf16(delta_R4[i, j])
                                    x_R8[i, 2 * j + 1] += high_bf16(delta_R4[i, j])
                                if mine:
                                    store8(rows.h, int64(low + i) * K + k, x_R8[i])
                            if NORM:
                                for j in range(8):
                                    squares_R[i] += x_R8[i, j] * x_R8[i, j]
                                    x_R8[i, j] *= w_8[j]
                            store8_shared(shared.x, at, x_R8[i])
            if NORM:
                for j in range(5):  # of all rows: a shuffle does not wait for another row's
                    for i in range(ROWS_AT_ONCE):
                        squares_R[i] += cuda.shfl_xor_sync(FULL, squares_R[i], 16 >> j)
                if lane == 0:
                    for i in range(ROWS_AT_ONCE):
                        shared.squares[warp * MAX_ROWS + low + i] = squares_R[i]

    return stage
