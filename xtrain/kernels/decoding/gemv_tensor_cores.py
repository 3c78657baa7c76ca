"""gemv.py on tensor cores: weights in bf16, up to 8 rows of x, or of one byte, up to 32 rows.

One mma multiplies 16 rows of w with 8 rows of x, so one kernel serves all N, and a row's result does not depend on the
others. Lane 4 g + t reads 16 contiguous bytes of rows g and g + 8 of w directly into the operand of mma_bf16, and the same
columns of row g of x: the inner index of a product may have any order if both operands have the same one.

    chunk    32 columns of a tile, 16 rows: lanes t = 0..3 read columns 0..7, 8..15, 16..23, 24..31
             step 0 multiplies the first 4 of each lane, step 1 its last 4

Quantized weights (quantize.py) are the same with twice as many columns: the 16 bytes of a lane are 16 of them, a chunk is 64
columns and four steps. Just before a step its codes become bf16, exactly (primitives/codes.py), and the scale of a row of w
multiplies its sum at the end; it is loaded with the first weights, because a load at the end would only be waited for. A GEMM
would need a dequantized copy, so more than 8 rows of x are multiplied here too, in up to four groups of 8 rows, by the same order
of additions, and a lane reads its columns of x where it needs them. Every block then reads all of x, so it may multiply several
tiles of w by what it has read (Variant.tiles).

The warps of a block share the columns of a tile of 16 rows; their sums are added in the order of the warps. The weights of the
next chunks, or of the next tile, are loaded while the current ones are multiplied, into the other one of two sets of registers,
which change their roles with every step. The first weights are loaded before the
kernel waits for its input (wait_for_previous in primitives/ptx.py) if they are known to be ready. A block that has one tile of
at most 2048 columns loads all of it at once. Any other block first copies x, times the norm weight, to shared memory, if it
fits: loaded chunk by chunk, x would cost an access to the L2 cache per chunk.
x is rounded to bf16 after the norm weight, before r; sums, r and everything after are float32.
"""

import functools
from dataclasses import dataclass

from ..primitives.codes import BF16_UNIT, codes_to_bf16, load_codes16
from ..primitives.ptx import (
    device,
    kernel,
    let_next_start,
    load8,
    prefetch_run,
    store1,
    store8,
    store8_shared,
    wait_for_previous,
)
from ..primitives.reduce import FULL
from ..primitives.tensor_cores import high_bf16, low_bf16, mma_bf16, opaque, pack_bf16
from ..primitives.words import load_words8, load_words8_shared, store_words8_shared
from ..runtime.compiler import cuda, float32, int64, rsqrtf, uint16, uint32, uint64
from ..swiglu import sigmoid

MAX_ROWS = 8  # columns of one tensor-core tile
MAX_ROWS_QUANTIZED = 4 * MAX_ROWS
TILE = 16  # rows of w that a block multiplies at a time
CHUNK = 32  # columns of w in bf16 that a warp multiplies at a time: 8 for each of 4 lanes
CHUNK_QUANTIZED = 2 * CHUNK
AT_ONCE = 8  # chunks of w that a warp loads at once if they are all it needs
MOST_OF_16 = 11  # the same with 16 warps and x in shared memory: their registers hold no more
MULTIPROCESSORS = 132  # of an H200; on other GPUs this number affects only the speed
PAD = 32  # elements between the rows of x in shared memory: 4 lanes of two rows have no bank conflicts
PAD_QUANTIZED = 8  # the same where a lane has 16 columns and reads 8 of them at a time
MOST_SHARED = 99 << 10  # bytes that a block may use on every GPU since compute capability 8.0
MOST_SUMS = 8704  # bytes of a block's sums, with 16 warps or with swiglu and 8
ROWS_AT_ONCE = 4  # of x that a thread loads
PREFETCH = 1024  # elements of one prefetch instruction


def shared_bytes(N: int, K: int, quantized: bool = False) -> int:
    """-> bytes of shared memory for N rows of x"""
    return 2 * N * (K + (PAD_QUANTIZED if quantized else PAD))


@dataclass(frozen=True)
class Config:
    """How the work is divided. `warps` and `chunks` change the order of additions; `blocks` does not change the result."""

    warps: int  # of a block
    chunks: int  # of w in flight per warp
    blocks: int  # per multiprocessor
    stage: bool = True  # x passes through shared memory, if it fits


def staged(K: int, config: Config, quantized: bool = False) -> bool:
    """True if up to MAX_ROWS of x pass through shared memory. Does not depend on their number, so a row's bits do not either."""
    return config.stage and shared_bytes(MAX_ROWS, K, quantized) + MOST_SUMS <= MOST_SHARED


@functools.cache
def make_row_of_w(SWIGLU):
    """-> row_of_w(o, m, F): the row of w of row o of a tile's first 16, in its m-th 16 rows; beyond the last row: that one"""

    @device
    def row_of_w(o, m, F):
        if SWIGLU:
            return (o if o < F else F - 1) + m * F
        o += m * TILE
        return o if o < F else F - 1

    return row_of_w


@functools.cache
def make_operands(K, NORM, ADD, HALF, SWIGLU, TILES, WARPS, U, QUANTIZED, GROUPS):
    """-> load_w, load_x, load_staged_x, load_groups: operands of mma_bf16; exists(step, u, warp): there is chunk u of a step

    load_w(words (U, M, 2, 4), w, tile, step, F)    this warp's chunks step U .. step U + U - 1 of 16 M rows: M = TILES, or 2 with
                                                    SWIGLU
    load_x(fx (U, E / 4, 2), h, x, delta, norm_w, step, share, shares, N)
                                                    the same chunks of x -> this lane's sum of squares
    load_staged_x(fx, x_s, step, N)                 the same chunks of x from shared memory
    load_groups(fx (GROUPS, 2, 2), x, warp, lane, step, u, e, N)
                                                    fx[group] = 8 columns per lane, from its column e on, of chunk u of rows
                                                    8 group, ... of x, which is bf16 and used unchanged
    A warp has U adjacent chunks at a time; chunks beyond the last one are zeros, and rows of x beyond the last one are that one:
    their results are not read. HALF: x is bf16 and used unchanged.
    ADD: delta, in bf16, is added to x, and the blocks share the work of writing the sum to h: share number `share` of `shares`.
    """
    # E: columns of a lane in a chunk
    M = 2 if SWIGLU else TILES
    E = 16 if QUANTIZED else 8
    WIDTH = 4 * E
    X_PAD = PAD_QUANTIZED if QUANTIZED else PAD
    CHUNKS = K // WIDTH
    load_words = load_codes16 if QUANTIZED else load_words8
    EVEN = CHUNKS % (WARPS * U) == 0  # all warps have chunks in every step
    WHOLE = CHUNKS // (WARPS * U)  # steps in which they have
    row_of_w = make_row_of_w(SWIGLU)

    @device
    def chunk_of(step, u, warp):
        return (step * WARPS + warp) * U + u

    @device
    def exists(step, u, warp):
        return EVEN or step < WHOLE or chunk_of(step, u, warp) < CHUNKS

    @device
    def load_w(words, w, tile, step, F):
        tid = opaque(
            cuda.threadIdx.x
        )  # else the addresses of all tiles occupy registers all the time
        warp, lane = tid >> 5, tid & 31
        for u in range(U):
            c = chunk_of(step, u, warp)
            for m in range(M):
                for r in range(2):
                    o = row_of_w(tile * TILES * TILE + 8 * r + (lane >> 2), m, F)
                    if exists(step, u, warp):
                        load_words(words[u, m, r], w, o * K + c * WIDTH + E * (lane & 3))
                    else:
                        for j in range(4):
                            words[u, m, r, j] = uint32(0)
            cuda.syncwarp()  # no instruction: the compiler keeps the loads in the order of their use, before the products

    @device
    def load_x(fx, h, x, delta, norm_w, step, share, shares, N):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        row = lane >> 2
        squares = float32(0.0)
        n = int64(row) if row < N else N - 1
        words = cuda.local.array(4, uint32)
        x_8 = cuda.local.array(8, float32)
        nw_8 = cuda.local.array(8, float32)
        delta_4 = cuda.local.array(4, uint32)
        for u in range(U):
            c = chunk_of(step, u, warp)
            for e in range(0, E, 8):
                k = c * WIDTH + E * (lane & 3) + e
                if not exists(step, u, warp):
                    for j in range(4):
                        words[j] = uint32(0)
                elif HALF:
                    load_words8(words, x, n * K + k)
                else:
                    load8(x_8, x, n * K + k)
                    if ADD:
                        load_words8(delta_4, delta, n * K + k)
                        for j in range(4):
                            x_8[2 * j] += low_bf16(delta_4[j])
                            x_8[2 * j + 1] += high_bf16(delta_4[j])
                        if row < N and uint32(c) % uint32(shares) == uint32(share):
                            store8(h, n * K + k, x_8)
                    if NORM:
                        load8(nw_8, norm_w, k)
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
                k = c * WIDTH + E * (lane & 3) + e
                if exists(step, u, warp):
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
        first = int64(row) * K + E * (lane & 3)
        for group in range(GROUPS):
            for j in range(4):
                words[j] = uint32(0)
            if row < N - 8 * group:
                load_words8(words, x, first + (8 * group * K + c * WIDTH + e))
            for j in range(4):
                fx[group, j // 2, j % 2] = words[j]

    return load_w, load_x, load_staged_x, load_groups, exists


@functools.cache
def make_stage(K, NORM, ADD, HALF, THREADS, QUANTIZED):
    """-> stage(x_s, squares_s, h, x, delta, norm_w, share, shares, N): x goes to shared memory, in bf16, and the warps' sums of
    squares to squares_s

    ADD: as in make_operands. The result for a row does not depend on the number of rows.
    """
    SHARE = 256  # columns: what a warp handles at a time
    X_PAD = PAD_QUANTIZED if QUANTIZED else PAD

    @device
    def stage(x_s, squares_s, h, x, delta, norm_w, share, shares, N):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        x_R8 = cuda.local.array((ROWS_AT_ONCE, 8), float32)
        w_8 = cuda.local.array(8, float32)
        delta_R4 = cuda.local.array((ROWS_AT_ONCE, 4), uint32)
        words_R4 = cuda.local.array((ROWS_AT_ONCE, 4), uint32)
        squares_R = cuda.local.array(ROWS_AT_ONCE, float32)
        for low in range(0, N, ROWS_AT_ONCE):
            for i in range(ROWS_AT_ONCE):
                squares_R[i] = float32(0.0)
            for k in range(8 * cuda.threadIdx.x, K, 8 * THREADS):
                if NORM:
                    load8(w_8, norm_w, k)
                for i in range(ROWS_AT_ONCE):
                    if low + i < N:
                        if HALF:
                            load_words8(words_R4[i], x, int64(low + i) * K + k)
                        else:
                            load8(x_R8[i], x, int64(low + i) * K + k)
                            if ADD:
                                load_words8(delta_R4[i], delta, int64(low + i) * K + k)
                turn = k // SHARE
                while ADD and turn >= shares:  # the remainder, without a division: usually no step
                    turn -= shares
                mine = ADD and turn == share
                for i in range(ROWS_AT_ONCE):
                    at = (low + i) * (K + X_PAD) + k
                    if low + i < N:
                        if HALF:
                            store_words8_shared(x_s, at, words_R4[i])
                        else:
                            if ADD:
                                for j in range(4):
                                    x_R8[i, 2 * j] += low_bf16(delta_R4[i, j])
                                    x_R8[i, 2 * j + 1] += high_bf16(delta_R4[i, j])
                                if mine:
                                    store8(h, int64(low + i) * K + k, x_R8[i])
                            if NORM:
                                for j in range(8):
                                    squares_R[i] += x_R8[i, j] * x_R8[i, j]
                                    x_R8[i, j] *= w_8[j]
                            store8_shared(x_s, at, x_R8[i])
            if NORM:
                for j in range(5):  # of all rows: a shuffle does not wait for another row's
                    for i in range(ROWS_AT_ONCE):
                        squares_R[i] += cuda.shfl_xor_sync(FULL, squares_R[i], 16 >> j)
                if lane == 0:
                    for i in range(ROWS_AT_ONCE):
                        squares_s[warp * MAX_ROWS + low + i] = squares_R[i]

    return stage


@functools.cache
def make_reduce(M, WARPS, GROUPS):
    """-> store_sums(s (GROUPS M, 4), sums, tid): write a warp's tiles to shared memory
    total(sums, m, row, n): add the warps in order
    """
    COLUMNS = GROUPS * MAX_ROWS
    SIZE = M * TILE * COLUMNS

    @device
    def store_sums(s, sums, tid):
        warp, lane = tid >> 5, tid & 31
        # unsigned: no test for a negative index.  64 bits: the other indices are constants away from it
        first = uint64(warp * SIZE + (lane >> 2) * COLUMNS + 2 * (lane & 3))
        for group in range(GROUPS):
            for m in range(M):
                for i in range(4):
                    at = (m * TILE + 8 * (i >> 1)) * COLUMNS + 8 * group + (i & 1)
                    sums[first + uint64(at)] = s[group * M + m, i]

    @device
    def total(sums, m, row, n):
        acc = float32(0.0)
        first = uint64(row * COLUMNS + n)
        for warp in range(WARPS):
            acc += sums[first + uint64(warp * SIZE + m * TILE * COLUMNS)]
        return acc

    return store_sums, total


@functools.cache
def make_multiply(M, U, QUANTIZED, GROUPS, load_groups, exists):
    """-> multiply(s (M, 4), words, fx, w): s += U chunks of w times x.  w: for its dtype
    multiply_groups(s (GROUPS M, 4), words, x, step, N, w): the same for all rows of x, which it reads itself
    copy_words(words, next_words), copy_fx(fx, next_fx)
    """
    STEPS = 4 if QUANTIZED else 2  # of a chunk

    @device
    def operand(fa, words, u, m, i, w):
        if QUANTIZED:
            pairs = cuda.local.array(2, uint32)
            for r in range(2):
                codes_to_bf16(pairs, words[u, m, r, i], w)
                for j in range(2):
                    fa[r + 2 * j] = pairs[j]
        else:
            for j in range(4):
                fa[j] = words[u, m, j % 2, 2 * i + j // 2]

    @device
    def multiply(s, words, fx, w):
        fa = cuda.local.array(4, uint32)
        for u in range(U):
            for m in range(M):
                for i in range(STEPS):
                    operand(fa, words, u, m, i, w)
                    mma_bf16(s[m], fa, fx[u, i])

    @device
    def multiply_groups(s, words, x, step, N, w):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        fa = cuda.local.array(4, uint32)
        fx = cuda.local.array((GROUPS, 2, 2), uint32)
        for u in range(U):
            if exists(step, u, warp):
                for first in range(0, STEPS, 2):
                    load_groups(fx, x, warp, lane, step, u, 4 * first, N)
                    for m in range(M):
                        for i in range(2):
                            operand(fa, words, u, m, first + i, w)
                            for group in range(GROUPS):
                                mma_bf16(s[group * M + m], fa, fx[group, i])

    @device
    def copy_words(words, next_words):
        for u in range(U):
            for m in range(M):
                for r in range(2):
                    for i in range(4):
                        words[u, m, r, i] = next_words[u, m, r, i]

    @device
    def copy_fx(fx, next_fx):
        for u in range(U):
            for i in range(2 * STEPS):
                fx[u, i // 2, i % 2] = next_fx[u, i // 2, i % 2]

    return multiply, multiply_groups, copy_words, copy_fx


@functools.cache
def make_finish(K, NORM, SWIGLU, TILES, BIAS, WARPS, QUANTIZED, GROUPS):
    """-> load_scales(scales (M,), scale, tile, F): those of the rows of w that this thread finishes; unquantized: nothing
    finish(y, sums, squares_s, scales, b, tile, N, F, eps, tid): apply scale, r, b and SwiGLU to a tile of 16 TILES x 8 GROUPS
    elements, and write y
    """
    M = 2 if SWIGLU else TILES
    THREADS = 32 * WARPS
    total = make_reduce(M, WARPS, GROUPS)[1]
    row_of_w = make_row_of_w(SWIGLU)
    EACH = -(-TILE * MAX_ROWS * GROUPS // THREADS)

    @device
    def load_scales(scales, scale, tile, F):
        if QUANTIZED:
            o = tile * TILES * TILE + (cuda.threadIdx.x & TILE - 1)
            for m in range(M):
                scales[m] = scale[row_of_w(o, m, F)] * float32(BF16_UNIT)

    @device
    def finish(y, sums, squares_s, scales, b, tile, N, F, eps, tid):
        row = tid & TILE - 1
        for j in range(EACH):
            n = (tid >> 4) + j * (THREADS // TILE)  # tid // TILE, for any sign
            r = float32(1.0)
            if NORM and n < N:
                acc = float32(0.0)
                for warp in range(WARPS):
                    acc += squares_s[uint64(n) + uint64(warp * MAX_ROWS)]
                r = rsqrtf(acc * float32(1 / K) + eps)
            for m in range(TILES):
                o = (tile * TILES + m) * TILE + row
                if n < N and o < F:
                    value = total(sums, m, row, n) * r
                    if QUANTIZED:
                        value *= scales[m]
                    if BIAS:
                        value += b[o]
                    if SWIGLU:
                        up = total(sums, 1, row, n) * r
                        if QUANTIZED:
                            up *= scales[1]
                        if BIAS:
                            up += b[F + o]
                        value *= sigmoid(value) * up
                    store1(y, n * F + o, value)

    return load_scales, finish


@device
def prefetch_start(w):
    """The block prefetches its part of the first elements of w into the L2 cache."""
    i = int64(cuda.blockIdx.x) * PREFETCH
    if i < w.size and cuda.threadIdx.x == 0:
        prefetch_run(w, i, w.size - i if w.size - i < PREFETCH else int64(PREFETCH))


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
    quantized: bool = False  # the weights are codes, with a scale per row
    groups: int = 1  # of 8 rows of x; above 1, x is bf16 in memory, and there is no norm
    tiles: int = 1  # of 16 rows of w, which a block multiplies with the same x; with swiglu 1


def make_product(K: int, variant: Variant, config: Config):
    """-> load_first, product: what a block does before and after it waits for its input

    load_first(words (U, M, 2, 4), scales (M,), w, scale, first, F)
                                                      the first weights of tile `first`, and the scales of its rows;
                                                      U = config.chunks, M = variant.tiles, or 2 with swiglu
    product(y, h, x, ..., words, scales, sums, squares_s, x_s, first, grid, N, F, eps)
                                                      tiles first, first + grid, ... of y; the block also writes this share of h
    sums: sums_size(...) floats of shared memory.  squares_s: WARPS MAX_ROWS.  x_s: shared_bytes(...), if variant.staged.
    """
    NORM = variant.norm
    ADD = variant.add
    HALF = variant.half
    SWIGLU = variant.swiglu
    once = variant.once
    STAGED = variant.staged
    WARPS = config.warps
    U = config.chunks
    QUANTIZED = variant.quantized
    GROUPS = variant.groups
    TILES = variant.tiles
    M = 2 if SWIGLU else TILES
    X_STEPS = 4 if QUANTIZED else 2
    SUMS, SPAN = GROUPS * M, TILES * TILE
    CHUNKS = K // (CHUNK_QUANTIZED if QUANTIZED else CHUNK)
    STEPS = -(-CHUNKS // (WARPS * U))
    PAIRS = STEPS // 2
    ODD = STEPS % 2 == 1
    operands = make_operands(K, NORM, ADD, HALF, SWIGLU, TILES, WARPS, U, QUANTIZED, GROUPS)
    load_w, load_x, load_staged_x, load_groups, exists = operands
    products = make_multiply(M, U, QUANTIZED, GROUPS, load_groups, exists)
    multiply_staged, multiply_groups, copy_words, copy_fx = products
    store_sums = make_reduce(M, WARPS, GROUPS)[0]
    load_scales, finish = make_finish(
        K, NORM, SWIGLU, TILES, variant.bias, WARPS, QUANTIZED, GROUPS
    )
    stage = make_stage(K, NORM, ADD, HALF, 32 * WARPS, QUANTIZED)
    DIRECT = not STAGED and GROUPS == 1  # x is loaded together with w

    @device
    def load_first(words, scales, w, scale, first, F):
        load_w(words, w, first, 0, F)
        load_scales(scales, scale, first, F)

    @device
    def load(words, fx, h, x, delta, w, norm_w, tile, step, first, grid, N, F):
        """-> this lane's squares of the x that it loads, 0 if they have been counted"""
        load_w(words, w, tile, step, F)
        squares = float32(0.0)
        if DIRECT:
            squares = load_x(fx, h, x, delta, norm_w, step, first, grid, N)
        return squares if tile == first else float32(0.0)

    @device
    def multiply(s, words, fx, x, x_s, step, N, w):
        if STAGED:
            load_staged_x(fx, x_s, step, N)
        if GROUPS == 1:
            multiply_staged(s, words, fx, w)
        else:
            multiply_groups(s, words, x, step, N, w)

    @device
    def product(
        y,
        h,
        x,
        delta,
        w,
        norm_w,
        scale,
        b,
        words,
        scales,
        sums,
        squares_s,
        x_s,
        first,
        grid,
        N,
        F,
        eps,
    ):
        """After an even number of steps both sets of registers have their first roles again, so nothing is copied."""
        tid = cuda.threadIdx.x
        next_words = cuda.local.array((U, M, 2, 4), uint32)
        fx = cuda.local.array((U, X_STEPS, 2), uint32)
        next_fx = cuda.local.array((U, X_STEPS, 2), uint32)
        s = cuda.local.array((SUMS, 4), float32)
        squares = float32(0.0)
        if STAGED:
            stage(x_s, squares_s, h, x, delta, norm_w, first, grid, N)
            cuda.syncthreads()  # x is in shared memory
        elif DIRECT:
            squares = load_x(fx, h, x, delta, norm_w, 0, first, grid, N)
        tile = first
        while tile * SPAN < F:  # a range would divide by grid
            more = not once and (tile + grid) * SPAN < F
            if tile != first:
                load_scales(scales, scale, tile, F)
            for m in range(SUMS):
                for j in range(4):
                    s[m, j] = float32(0.0)
            for pair in range(PAIRS):
                step = 2 * pair
                squares += load(
                    next_words, next_fx, h, x, delta, w, norm_w, tile, step + 1, first, grid, N, F
                )
                multiply(s, words, fx, x, x_s, step, N, w)
                if ODD or step + 2 < STEPS:
                    squares += load(
                        words, fx, h, x, delta, w, norm_w, tile, step + 2, first, grid, N, F
                    )
                elif more:
                    load(words, fx, h, x, delta, w, norm_w, tile + grid, 0, first, grid, N, F)
                multiply(s, next_words, next_fx, x, x_s, step + 1, N, w)
            if ODD:
                if more:
                    load(
                        next_words,
                        next_fx,
                        h,
                        x,
                        delta,
                        w,
                        norm_w,
                        tile + grid,
                        0,
                        first,
                        grid,
                        N,
                        F,
                    )
                multiply(s, words, fx, x, x_s, STEPS - 1, N, w)
                if more:
                    copy_words(words, next_words)
                    if DIRECT:
                        copy_fx(fx, next_fx)
            store_sums(s, sums, tid)
            if NORM and not STAGED and tile == first:
                squares += cuda.shfl_xor_sync(FULL, squares, 1)
                squares += cuda.shfl_xor_sync(FULL, squares, 2)
                if tid & 3 == 0:
                    squares_s[(tid >> 5) * MAX_ROWS + ((tid & 31) >> 2)] = squares
            cuda.syncthreads()
            finish(y, sums, squares_s, scales, b, tile, N, F, eps, tid)
            if once:
                break
            cuda.syncthreads()  # the sums have been read
            tile += grid

    return load_first, product


def sums_size(variant: Variant, config: Config) -> int:
    """-> floats of shared memory for the sums of a block"""
    return (
        config.warps * (2 if variant.swiglu else variant.tiles) * TILE * MAX_ROWS * variant.groups
    )


@functools.cache
def make_tensor_kernel(K: int, variant: Variant, config: Config):
    """-> the kernel for weights of K columns.

    Launch with 32 * config.warps threads and, if variant.staged, shared_bytes(N, K, variant.quantized) of shared memory.
    """
    NORM = variant.norm
    overlap = variant.overlap
    ready = variant.ready
    WARPS = config.warps
    U = config.chunks
    BLOCKS = config.blocks
    GROUPS = variant.groups
    M = 2 if variant.swiglu else variant.tiles
    SUMS = sums_size(variant, config)
    SQUARES = WARPS * MAX_ROWS
    load_first, product = make_product(K, variant, config)

    @kernel(
        32 * WARPS, BLOCKS if GROUPS == 1 else 1
    )  # more groups need more registers (with 16 warps, 4 groups spill some 7)
    def gemv_tensor_kernel(y, h, x, delta, w, norm_w, scale, b, N, F, eps):
        """Grid: any number of blocks; block p computes tiles p, p + grid, ... All arrays flat. F: columns of y.

        scale: of the rows of quantized weights.
        """
        sums = cuda.shared.array(SUMS, float32)
        squares_s = cuda.shared.array(SQUARES, float32)
        x_s = cuda.shared.array(0, uint16)
        words = cuda.local.array((U, M, 2, 4), uint32)
        scales = cuda.local.array(M, float32)
        first = int64(cuda.blockIdx.x)
        grid = int64(cuda.gridDim.x)
        if overlap:
            let_next_start()
        if ready:
            load_first(words, scales, w, scale, first, F)
            if NORM and overlap:
                prefetch_start(norm_w)
        if overlap:
            wait_for_previous()
        if not ready:
            load_first(words, scales, w, scale, first, F)
        product(
            y,
            h,
            x,
            delta,
            w,
            norm_w,
            scale,
            b,
            words,
            scales,
            sums,
            squares_s,
            x_s,
            first,
            grid,
            N,
            F,
            eps,
        )

    return gemv_tensor_kernel


# ----------------------------------------------------------------------------- the tuned configuration
def choose(K: int, F: int, swiglu: bool, norm: bool, quantized: bool = False) -> Config:
    """-> the configuration for weights of K columns and F columns of y. Measured on one H200 with bench/tune_decode.py, in bf16.

    The number of bytes of w in flight decides. A block with a single narrow tile loads it at once; a wide tile is read by as
    many warps as a block may have. Large products (gate/up, lm_head) use small blocks: when one ends, the next kernel can
    start while its neighbours still run.
    """
    chunks = K // (CHUNK_QUANTIZED if quantized else CHUNK)
    tiles = -(-F // TILE)
    # a chunk of codes has as many bytes of w, but twice the columns of x, whose registers hold fewer chunks then
    at_once, most_of_16 = (AT_ONCE // 2, 4) if quantized else (AT_ONCE, MOST_OF_16)
    if not (swiglu or norm) and tiles <= MULTIPROCESSORS and chunks > 8 * at_once:
        each = -(-chunks // 16)
        return Config(16, each if each <= most_of_16 else min(4, -(-each // 2)), 1)
    large = swiglu or (norm and tiles > 2 * MULTIPROCESSORS)
    warps = min(4 if large else 16 if norm else 8, chunks)
    each = -(-chunks // warps)
    if swiglu or norm:
        return Config(warps, min(4, each), 3 if swiglu else 4 if large else 1)
    once = each <= at_once and tiles <= 2 * MULTIPROCESSORS
    # more chunks would spill registers
    return Config(warps, each if once else min(4, each), 2, not once)
