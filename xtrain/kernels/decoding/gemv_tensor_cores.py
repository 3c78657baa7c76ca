"""gemv.py on tensor cores: bf16 weights, up to 8 rows of x.

An mma turns 16 rows of w and 8 of x into 16 x 8 sums, so one kernel serves all N, and what a row of x gets does not depend on
the others. Lane 4 g + t reads 16 neighbouring bytes of rows g and g + 8 of w straight into the operand of mma_bf16, and the
same columns of row g of x: a product's inner index may run in any order if both operands have the same one.

    chunk    32 columns of a tile, 16 rows: lanes t = 0..3 read columns 0..7, 8..15, 16..23, 24..31
             step 0 multiplies the first 4 of each lane, step 1 its last 4

The warps of a block share the columns of a tile of 16 rows, and add up in the order of the warps. Weights of the next
chunks, or of the next tile, are under way while those before are multiplied. The first weights are asked for before the
kernel waits for its input (wait_for_previous in _ptx.py) if they are known to be there. A block that has one tile of 2048
columns or less asks for all of it at once: then nothing is left to do but wait. Any other block first puts x, times the norm
weight, into shared memory, if it fits: fetched chunk by chunk, x would cost a trip to the second-level cache for each.
x is rounded to bf16 after the norm weight, before r; sums, r and everything after are float32.
"""

import functools
from typing import NamedTuple

from numba import cuda, float32, int64, uint16, uint32
from numba.cuda.libdevice import rsqrtf

from ..primitives.ptx import (
    device,
    kernel,
    let_next_start,
    load1,
    load8,
    prefetch_run,
    store1,
    store8_shared,
    wait_for_previous,
)
from ..primitives.reduce import FULL, warp_sum
from ..primitives.tensor_cores import mma_bf16, pack_bf16
from ..primitives.words import load_words8, load_words8_shared, store_words8_shared
from ..swiglu import sigmoid

MAX_ROWS = 8  # columns of one tensor-core tile
TILE = 16  # rows of w that a block multiplies at a time
CHUNK = 32  # columns of w that a warp multiplies at a time: 8 for each of 4 lanes
AT_ONCE = 8  # chunks of w that a warp asks for when they are all it needs
MOST_OF_16 = 11  # the same with 16 warps and x in shared memory: their registers hold no more
MULTIPROCESSORS = 132  # of an H200. Another number changes the speed only
PAD = 32  # elements between the rows of x in shared memory: 4 lanes of two rows meet no bank twice
MOST_SHARED = 99 << 10  # bytes: what a block may have on every card since compute capability 8.0
MOST_SUMS = 8704  # bytes of a block's sums, with 16 warps or with swiglu and 8
ROWS_AT_ONCE = 4  # of x that a thread asks for
PIECE = 1024  # elements that a thread asks for at once to come nearer


def shared_bytes(N: int, K: int) -> int:
    """of N rows of x"""
    return 2 * N * (K + PAD)


class Config(NamedTuple):
    """How the work is divided; warps and chunks change the order of additions, blocks no bit."""

    warps: int
    chunks: int  # of w under way per warp
    blocks: int  # per multiprocessor
    stage: bool = True  # x goes through shared memory, if it fits


def staged(K: int, config: Config) -> bool:
    """Does x go through shared memory? For all numbers of rows alike, so that a row does not depend on them."""
    return config.stage and shared_bytes(MAX_ROWS, K) + MOST_SUMS <= MOST_SHARED


@functools.cache
def make_operands(K, NORM, HALF, M, WARPS, U):
    """-> load_w(words (U, M, 2, 4), w, tile, step, F): this warp's chunks step U .. step U + U - 1 of 16 M rows
    load_x(fx (U, 2, 2), x, norm_w, step, N) -> this lane's sum of squares
    take_x(fx, x_s, step, N): the same from shared memory

    A warp has U neighbouring chunks at a time; beyond the last one there are zeros. HALF: x is bf16 as it is.
    """
    CHUNKS = K // CHUNK
    WHOLE = CHUNKS % (WARPS * U) == 0

    @device
    def chunk_of(step, u, warp):
        return (step * WARPS + warp) * U + u

    @device
    def load_w(words, w, tile, step, F):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        for u in range(U):
            c = chunk_of(step, u, warp)
            for m in range(M):
                for r in range(2):
                    o = tile * TILE + 8 * r + (lane >> 2)
                    o = (o if o < F else F - 1) + m * F
                    if WHOLE or c < CHUNKS:
                        load_words8(words[u, m, r], w, o * K + c * CHUNK + 8 * (lane & 3))
                    else:
                        for j in range(4):
                            words[u, m, r, j] = uint32(0)

    @device
    def load_x(fx, x, norm_w, step, N):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        n, squares = int64(lane >> 2), float32(0.0)
        words, x_8 = cuda.local.array(4, uint32), cuda.local.array(8, float32)
        nw_8 = cuda.local.array(8, float32)
        for u in range(U):
            c = chunk_of(step, u, warp)
            k = c * CHUNK + 8 * (lane & 3)
            for j in range(4):
                words[j] = uint32(0)
            if n < N and (WHOLE or c < CHUNKS):
                if HALF:
                    load_words8(words, x, n * K + k)
                else:
                    load8(x_8, x, n * K + k)
                    if NORM:
                        load8(nw_8, norm_w, k)
                        for j in range(8):
                            squares += x_8[j] * x_8[j]
                            x_8[j] *= nw_8[j]
                    for j in range(4):
                        words[j] = pack_bf16(x_8[2 * j], x_8[2 * j + 1])
            for j in range(4):
                fx[u, j // 2, j % 2] = words[j]
        return squares

    @device
    def take_x(fx, x_s, step, N):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        n, words = lane >> 2, cuda.local.array(4, uint32)
        for u in range(U):
            c = chunk_of(step, u, warp)
            for j in range(4):
                words[j] = uint32(0)
            if n < N and (WHOLE or c < CHUNKS):
                load_words8_shared(words, x_s, n * (K + PAD) + c * CHUNK + 8 * (lane & 3))
            for j in range(4):
                fx[u, j // 2, j % 2] = words[j]

    return load_w, load_x, take_x


@functools.cache
def make_stage(K, NORM, HALF, THREADS):
    """-> stage(x_s, squares_s, x, norm_w, N): x to shared memory as mma_bf16 takes it, the warps' sums of squares to squares_s

    What becomes of a row does not depend on how many there are.
    """

    @device
    def stage(x_s, squares_s, x, norm_w, N):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        x_R8, w_8 = cuda.local.array((ROWS_AT_ONCE, 8), float32), cuda.local.array(8, float32)
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
                for i in range(ROWS_AT_ONCE):
                    at = (low + i) * (K + PAD) + k
                    if low + i < N:
                        if HALF:
                            store_words8_shared(x_s, at, words_R4[i])
                        else:
                            if NORM:
                                for j in range(8):
                                    squares_R[i] += x_R8[i, j] * x_R8[i, j]
                                    x_R8[i, j] *= w_8[j]
                            store8_shared(x_s, at, x_R8[i])
            if NORM:
                for i in range(ROWS_AT_ONCE):
                    total = warp_sum(squares_R[i])
                    if lane == 0:
                        squares_s[warp * MAX_ROWS + low + i] = total

    return stage


@functools.cache
def make_reduce(M, WARPS):
    """-> put(s (M, 4), sums): a warp's tile to shared memory; total(sums, m, row, n): over the warps, in their order"""
    SIZE = M * TILE * MAX_ROWS

    @device
    def put(s, sums):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        for m in range(M):
            for i in range(4):
                row, n = (lane >> 2) + 8 * (i >> 1), 2 * (lane & 3) + (i & 1)
                sums[warp * SIZE + (m * TILE + row) * MAX_ROWS + n] = s[m, i]

    @device
    def total(sums, m, row, n):
        acc = float32(0.0)
        for warp in range(WARPS):
            acc += sums[warp * SIZE + (m * TILE + row) * MAX_ROWS + n]
        return acc

    return put, total


@functools.cache
def make_multiply(M, U):
    """-> multiply(s (M, 4), words, fx): s += U chunks of w times x
    take(words, next_words), take_fx(fx, next_fx): the next become these
    """

    @device
    def multiply(s, words, fx):
        fa = cuda.local.array(4, uint32)
        for u in range(U):
            for m in range(M):
                for i in range(2):
                    for j in range(4):
                        fa[j] = words[u, m, j % 2, 2 * i + j // 2]
                    mma_bf16(s[m], fa, fx[u, i])

    @device
    def take(words, next_words):
        for u in range(U):
            for m in range(M):
                for r in range(2):
                    for i in range(4):
                        words[u, m, r, i] = next_words[u, m, r, i]

    @device
    def take_fx(fx, next_fx):
        for u in range(U):
            for i in range(4):
                fx[u, i // 2, i % 2] = next_fx[u, i // 2, i % 2]

    return multiply, take, take_fx


@functools.cache
def make_finish(K, NORM, SWIGLU, RESIDUAL, WARPS):
    """A thread owns EACH of the 16 x 8 elements of a tile of y.
    -> add_later(added (EACH,), residual, tile, N, F): asks for what finish will add
    finish(y, added, sums, squares_s, tile, N, F, eps)
    """
    total, THREADS = make_reduce(2 if SWIGLU else 1, WARPS)[1], 32 * WARPS
    EACH = -(-TILE * MAX_ROWS // THREADS)

    @device
    def add_later(added, residual, tile, N, F):
        for j in range(EACH):
            i = cuda.threadIdx.x + j * THREADS
            n, o = i // TILE, tile * TILE + i % TILE
            added[j] = float32(0.0)
            if RESIDUAL and n < N and o < F:
                added[j] = load1(residual, n * F + o)

    @device
    def finish(y, added, sums, squares_s, tile, N, F, eps):
        for j in range(EACH):
            i = cuda.threadIdx.x + j * THREADS
            n, row = i // TILE, i % TILE
            if n < N and tile * TILE + row < F:
                r = float32(1.0)
                if NORM:
                    acc = float32(0.0)
                    for warp in range(WARPS):
                        acc += squares_s[warp * MAX_ROWS + n]
                    r = rsqrtf(acc * float32(1 / K) + eps)
                value = total(sums, 0, row, n) * r
                if SWIGLU:
                    value *= sigmoid(value) * (total(sums, 1, row, n) * r)
                store1(y, n * F + tile * TILE + row, value + added[j])

    return add_later, finish, EACH


@device
def bring_nearer(w, share):
    """The block asks for its share of w to come into the second-level cache."""
    first = int64(cuda.blockIdx.x) * share
    end = first + share if first + share < w.size else int64(w.size)
    for i in range(first + cuda.threadIdx.x * PIECE, end, cuda.blockDim.x * PIECE):
        prefetch_run(w, i, end - i if end - i < PIECE else int64(PIECE))


@functools.cache
def make_tensor_kernel(
    K, NORM, HALF, SWIGLU, RESIDUAL, overlap, ready, once, STAGED, config, follow=False
):
    """HALF: x is bf16, and taken as it is. ready: so are the weights. once: a block has one tile, and asks for all of it at
    once. STAGED: x goes through shared memory. follow: there are next weights.
    """
    WARPS, U, BLOCKS, _ = config
    M, SQUARES = 2 if SWIGLU else 1, WARPS * MAX_ROWS
    STEPS, SUMS = -(-(K // CHUNK) // (WARPS * U)), WARPS * M * TILE * MAX_ROWS
    load_w, load_x, take_x = make_operands(K, NORM, HALF, M, WARPS, U)
    (multiply, take, take_fx), put = make_multiply(M, U), make_reduce(M, WARPS)[0]
    add_later, finish, EACH = make_finish(K, NORM, SWIGLU, RESIDUAL, WARPS)
    stage = make_stage(K, NORM, HALF, 32 * WARPS)

    @kernel(32 * WARPS, BLOCKS)
    def gemv_tensor_kernel(y, x, w, norm_w, residual, next_w, N, F, share, eps):
        """Grid: any number of blocks; block p deals with tiles p, p + grid, ... All arrays flat. F: columns of y.
        share: elements of next_w that a block brings nearer. Dynamic shared memory: shared_bytes(N, K) if STAGED.
        """
        sums, squares_s = cuda.shared.array(SUMS, float32), cuda.shared.array(SQUARES, float32)
        x_s = cuda.shared.array(0, uint16)
        words = cuda.local.array((U, M, 2, 4), uint32)
        next_words = cuda.local.array((U, M, 2, 4), uint32)
        fx, next_fx = cuda.local.array((U, 2, 2), uint32), cuda.local.array((U, 2, 2), uint32)
        s, added = cuda.local.array((M, 4), float32), cuda.local.array(EACH, float32)
        first, grid, lane = int64(cuda.blockIdx.x), int64(cuda.gridDim.x), cuda.threadIdx.x & 31
        squares = float32(0.0)
        if overlap:
            let_next_start()
        if ready:
            load_w(words, w, first, 0, F)
            if NORM and overlap:
                bring_nearer(norm_w, PIECE)
            if overlap and follow:
                bring_nearer(next_w, share)
        if overlap:
            wait_for_previous()
        if not ready:
            load_w(words, w, first, 0, F)
        if STAGED:
            stage(x_s, squares_s, x, norm_w, N)
            cuda.syncthreads()  # x is there
        else:
            squares = load_x(fx, x, norm_w, 0, N)
        for tile in range(first, (F + TILE - 1) // TILE, grid):
            add_later(added, residual, tile, N, F)
            for m in range(M):
                for j in range(4):
                    s[m, j] = float32(0.0)
            for step in range(STEPS):
                following = tile if step + 1 < STEPS else tile + grid
                more = not once and following * TILE < F
                if more:
                    load_w(next_words, w, following, (step + 1) % STEPS, F)
                if STAGED:
                    take_x(fx, x_s, step, N)
                elif more:
                    new = load_x(next_fx, x, norm_w, (step + 1) % STEPS, N)
                    squares += new if following == first else float32(0.0)
                multiply(s, words, fx)
                if more:
                    take(words, next_words)
                    if not STAGED:
                        take_fx(fx, next_fx)
            put(s, sums)
            if NORM and not STAGED and tile == first:
                squares += cuda.shfl_xor_sync(FULL, squares, 1)
                squares += cuda.shfl_xor_sync(FULL, squares, 2)
                if lane & 3 == 0:
                    squares_s[(cuda.threadIdx.x >> 5) * MAX_ROWS + (lane >> 2)] = squares
            cuda.syncthreads()
            finish(y, added, sums, squares_s, tile, N, F, eps)
            cuda.syncthreads()  # the sums have been read

    return gemv_tensor_kernel


# ----------------------------------------------------------------------------- measured
def choose(K: int, F: int, swiglu: bool, norm: bool) -> Config:
    """For weights of K columns, y of F. Measured on one H200 with bench/tune_decode.py, Llama of 1.1 B parameters.

    What counts is how many bytes of w are under way. A narrow tile is asked for at once if a block has but one, a wide one is
    read by as many warps as a block may have. With more to do (gate/up, lm_head), small blocks: one ends while its neighbours
    go on, and the next kernel finds room.
    """
    chunks, tiles = K // CHUNK, -(-F // TILE)
    if not (swiglu or norm) and tiles <= MULTIPROCESSORS and K > 8 * AT_ONCE * CHUNK:
        each = -(-chunks // 16)
        return Config(16, each if each <= MOST_OF_16 else 4, 1)
    much = swiglu or (norm and tiles > 2 * MULTIPROCESSORS)
    warps = min(4 if much else 16 if norm else 8, chunks)
    each = -(-chunks // warps)
    if swiglu or norm:
        return Config(warps, min(4, each), 3 if swiglu else 4 if much else 1)
    once = each <= AT_ONCE and tiles <= 2 * MULTIPROCESSORS
    return Config(warps, each if once else min(4, each), 2, not once)  # more would spill
