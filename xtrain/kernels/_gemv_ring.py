"""gemv.py on tensor cores once more: weights come through a ring in shared memory.

The arithmetic, its order and so the bits are those of _gemv_tensor.py, whose kernels hold the weights under way in registers.
There are few of those, and a kernel that uses them all keeps the next one off its multiprocessor. Here a block has `stages`
steps of weights under way in shared memory, asked for before it waits for its input. Two such kernels fit a multiprocessor
side by side, and while one ends and its sums travel to the next, memory is not idle: it fills the ring of the one after that.

A thread multiplies just the 16 bytes that it asked for itself, so the ring needs no barriers: cp.async has groups per thread.
x, rounded to bf16, lies behind the ring, written once by the warp that reads it.
"""

import functools

from numba import cuda, float32, int64, uint16, uint32

from ._gemv_tensor import CHUNK, MAX_ROWS, TILE, make_finish, make_multiply, make_reduce
from ._ptx import device, kernel, let_next_start, load8, wait_for_previous
from ._reduce import FULL
from ._tensor_cores import commit_copies, copy16_async, pack_bf16, wait_copies
from ._words import load_words8, load_words8_shared, store_words8_shared

THREADS_BESIDE = (
    768  # of a multiprocessor, that the compiler must make room for: blocks of three kernels
)


def ring_bytes(N: int, K: int, swiglu: bool, config) -> int:
    """Dynamic shared memory of a block"""
    ring = config.stages * config.warps * config.chunks * (2 if swiglu else 1) * TILE * CHUNK
    return 2 * (ring + -(-K // CHUNK) * CHUNK * N)


@functools.cache
def make_ring(K, M, WARPS, U, STAGES):
    """-> ask(ring, w, tile, step, slot, F): this warp's chunks (step WARPS + warp) U + u of 16 M rows, into a slot
    fetch(words (U, M, 2, 4), ring, slot)
    """
    CHUNKS, THREADS = K // CHUNK, 32 * WARPS
    SLOT = U * M * 2 * THREADS * 8

    @device
    def ask(ring, w, tile, step, slot, F):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        to = slot * SLOT + cuda.threadIdx.x * 8
        for u in range(U):
            c = (step * WARPS + warp) * U + u
            inside = c < CHUNKS
            k = (c if inside else CHUNKS - 1) * CHUNK + 8 * (lane & 3)
            for m in range(M):
                for r in range(2):
                    o = tile * TILE + 8 * r + (lane >> 2)
                    o = (o if o < F else F - 1) + m * F
                    place = to + ((u * M + m) * 2 + r) * THREADS * 8
                    copy16_async(ring, place, w, o * K + k, inside)

    @device
    def fetch(words, ring, slot):
        at = slot * SLOT + cuda.threadIdx.x * 8
        for u in range(U):
            for m in range(M):
                for r in range(2):
                    place = at + ((u * M + m) * 2 + r) * THREADS * 8
                    load_words8_shared(words[u, m, r], ring, place)

    return ask, fetch, STAGES * SLOT


@functools.cache
def make_inputs(K, NORM, HALF, WARPS, U, BASE):
    """-> put_x(ring, x, norm_w, N) -> this lane's sum of squares: a warp writes its chunks of x, as bf16, from BASE on
    fetch_x(fx (U, 2, 2), ring, step, N)

    Columns of y beyond N get a row of x again; nobody looks at them.
    """
    CHUNKS = K // CHUNK
    STEPS = -(-CHUNKS // (WARPS * U))
    WHOLE = CHUNKS % (WARPS * U) == 0

    @device
    def put_x(ring, x, norm_w, N):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        n, squares = int64(lane >> 2), float32(0.0)
        n = n if n < N else N - 1
        words, x_8 = cuda.local.array((U, 4), uint32), cuda.local.array((U, 8), float32)
        nw_8 = cuda.local.array((U, 8), float32)
        for step in range(STEPS):
            some = float32(0.0)
            for u in range(U):  # ask for all
                c = (step * WARPS + warp) * U + u
                k = (c if c < CHUNKS else CHUNKS - 1) * CHUNK + 8 * (lane & 3)
                if HALF:
                    load_words8(words[u], x, n * K + k)
                else:
                    load8(x_8[u], x, n * K + k)
                    if NORM:
                        load8(nw_8[u], norm_w, k)
            for u in range(U):
                c = (step * WARPS + warp) * U + u
                if not HALF:
                    for j in range(8 if NORM else 0):
                        square = x_8[u, j] * x_8[u, j]
                        some += square if WHOLE or c < CHUNKS else float32(0.0)
                        x_8[u, j] *= nw_8[u, j]
                    for j in range(4):
                        words[u, j] = pack_bf16(x_8[u, 2 * j], x_8[u, 2 * j + 1])
                if c < CHUNKS and (lane >> 2) < N:
                    store_words8_shared(ring, BASE + (c * N + n) * CHUNK + 8 * (lane & 3), words[u])
            squares += some  # added up as in _gemv_tensor.py
        cuda.syncwarp()  # the chunks of the warp are there, for all its lanes
        return squares

    @device
    def fetch_x(fx, ring, step, N):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        n, words = int64(lane >> 2), cuda.local.array(4, uint32)
        n = n if n < N else N - 1
        for u in range(U):
            c = (step * WARPS + warp) * U + u
            for j in range(4):
                words[j] = uint32(0)
            if WHOLE or c < CHUNKS:
                load_words8_shared(words, ring, BASE + (c * N + n) * CHUNK + 8 * (lane & 3))
            for j in range(4):
                fx[u, j // 2, j % 2] = words[j]

    return put_x, fetch_x


@functools.cache
def make_ring_kernel(K, NORM, HALF, SWIGLU, RESIDUAL, overlap, ready, config):
    """The flags are those of make_tensor_kernel."""
    WARPS, U, BLOCKS, _, EARLY, _, STAGES = config
    M, SQUARES, LEFT = 2 if SWIGLU else 1, WARPS * MAX_ROWS, STAGES - 1
    STEPS, SUMS = -(-(K // CHUNK) // (WARPS * U)), WARPS * M * TILE * MAX_ROWS
    ask, fetch, BASE = make_ring(K, M, WARPS, U, STAGES)
    put_x, fetch_x = make_inputs(K, NORM, HALF, WARPS, U, BASE)
    multiply, put = make_multiply(M, U)[0], make_reduce(M, WARPS)[0]
    add_later, finish, EACH = make_finish(K, NORM, SWIGLU, RESIDUAL, WARPS)

    @kernel(32 * WARPS, max(BLOCKS, THREADS_BESIDE // (32 * WARPS)))
    def gemv_ring_kernel(y, x, w, norm_w, residual, N, F, eps):
        """Grid: any number of blocks; block p deals with tiles p, p + grid, ... All arrays flat. F: columns of y."""
        ring = cuda.shared.array(0, uint16)
        sums, squares_s = cuda.shared.array(SUMS, float32), cuda.shared.array(SQUARES, float32)
        words, fx = cuda.local.array((U, M, 2, 4), uint32), cuda.local.array((U, 2, 2), uint32)
        s, added = cuda.local.array((M, 4), float32), cuda.local.array(EACH, float32)
        first, grid, lane = int64(cuda.blockIdx.x), int64(cuda.gridDim.x), cuda.threadIdx.x & 31
        if overlap and EARLY == 1:
            let_next_start()
        if overlap and not ready:
            wait_for_previous()
        asked, step_asked, slot = first, 0, 0  # what comes next into the ring, and where
        for i in range(STAGES):
            if asked * TILE < F:
                ask(ring, w, asked, step_asked, i, F)
            commit_copies()
            step_asked += 1
            if step_asked == STEPS:
                asked, step_asked = asked + grid, 0
        if overlap and ready:
            wait_for_previous()
        if overlap and EARLY == 0:
            let_next_start()
        squares = put_x(ring, x, norm_w, N)
        if NORM:
            squares += cuda.shfl_xor_sync(FULL, squares, 1)
            squares += cuda.shfl_xor_sync(FULL, squares, 2)
            if lane & 3 == 0:
                squares_s[(cuda.threadIdx.x >> 5) * MAX_ROWS + (lane >> 2)] = squares
        for tile in range(first, (F + TILE - 1) // TILE, grid):
            add_later(added, residual, tile, N, F)
            for m in range(M):
                for j in range(4):
                    s[m, j] = float32(0.0)
            for step in range(STEPS):
                wait_copies(LEFT)
                fetch(words, ring, slot)
                fetch_x(fx, ring, step, N)
                multiply(s, words, fx)
                if asked * TILE < F:  # the slot has been read
                    ask(ring, w, asked, step_asked, slot, F)
                    step_asked += 1
                    if step_asked == STEPS:
                        asked, step_asked = asked + grid, 0
                commit_copies()
                if overlap and EARLY == 2 and asked * TILE >= F:
                    let_next_start()  # saying so again does nothing
                slot = slot + 1 if slot + 1 < STAGES else 0
            put(s, sums)
            cuda.syncthreads()
            finish(y, added, sums, squares_s, tile, N, F, eps)
            cuda.syncthreads()  # the sums have been read

    return gemv_ring_kernel
