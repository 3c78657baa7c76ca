"""What a block of gemv_chain.py does: the rows of x, in shared memory, and the chains."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ...device import Array
from ..primitives.ptx import device, store1, store4_shared
from ..primitives.reduce import warp_sum
from ..primitives.rows import make_row_ops
from ..primitives.tensor_cores import (
    cp_async16,
    cp_async_commit,
    cp_async_wait,
    ldmatrix,
    low_bf16,
    mma_bf16,
    opaque,
    pack_bf16,
    warp_id,
)
from ..primitives.words import WORD_OPS
from ..runtime.compiler import cuda, float32, int32, int64, rsqrtf, uint32
from ..swiglu import sigmoid
from .gemv_operands import TILE

WARPS = 8  # of a block: so many rows of a norm at a time
THREADS = 32 * WARPS
COPYING = 4  # of these warps, the last ones, copy w; the others copy x
MAX_CHAINS = WARPS - COPYING
VEC = 4  # columns of a chunk of a norm: elements_per_vector of a float32 x (residual.py)
# elements between the rows of x, or of a piece: 8 rows then begin in different banks (ldmatrix)
PAD = 8
load_words2_shared = WORD_OPS[2].load_shared


@dataclass(frozen=True)
class Config:
    """How the work is divided. Does not change the result."""

    chains: int  # tiles of a block at a time, a warp for each
    columns: int  # of a piece of w
    stages: int  # pieces in the ring


@dataclass(frozen=True)
class Variant:
    """What a kernel computes and what it may assume."""

    norm: bool  # x is RMS-normalized
    add: bool  # delta is added to x first, and the sum written to h
    swiglu: bool
    half: bool  # y is bf16
    overlap: bool  # the kernel may start before the previous one has ended
    ready: bool  # the weights may be read before the previous kernel has ended

    @property
    def parts(self) -> int:
        """Return how many times 16 rows of w a warp multiplies at a time: M."""
        return 2 if self.swiglu else 1


class Weights(NamedTuple):
    """What x is multiplied by. All arrays are flat."""

    w: Array
    F: int  # columns of y


class Copy(NamedTuple):
    """A thread's part of the copy of a piece of w. The piece begins at column k."""

    source: int  # in w
    left: int  # rows of w from there on; less than one beyond the last tile
    k: int


# ----------------------------------------------------------------------------- the rows of x
@functools.cache
def make_stage_norm(K, variant, X):
    """Return load_norm_w and stage: this block's h, normalized, in bf16, at smem[X].

    load_norm_w(w_SE, norm_w, pair)               the norm weight at the columns of a pair
    stage(smem, partial, rows, w_SE, share, eps)  w_SE: of this warp's first pair
    Pair n W + v is the work of warp v on row n in residual.py and rmsnorm.py. The last pair whose
    squares a warp has added is the first that it normalizes, still in registers; any other is read
    again.
    """
    ADD = variant.add
    ops = make_row_ops(K, VEC, True)
    load = ops.load
    load_words = ops.load_words
    unpack = ops.unpack
    store = ops.store
    W = ops.W
    STEPS = ops.STEPS
    STRIDE = ops.STRIDE
    FULL = K % STRIDE == 0
    ROUNDS = W > 1  # a warp may have several pairs
    INVERSE = 1 / K

    @device
    def first_column(pair):
        return (pair % W * 32 + (cuda.threadIdx.x & 31)) * VEC

    @device
    def load_norm_w(w_SE, norm_w, pair):
        column = first_column(pair)
        for s in range(STEPS):
            load(w_SE[s], norm_w, 0, column + s * STRIDE)

    @device
    def load_h(h_SE, rows, pair):
        row = int64(pair // W) * K
        column = first_column(pair)
        delta_SW = cuda.local.array((STEPS, VEC), uint32)
        delta = cuda.local.array(VEC, float32)
        for s in range(STEPS):
            load(h_SE[s], rows.x, row, column + s * STRIDE)
        if ADD:
            for s in range(STEPS):
                load_words(delta_SW[s], rows.delta, row, column + s * STRIDE)
            for s in range(STEPS):
                unpack(delta, delta_SW[s], rows.delta)
                for j in range(VEC):
                    h_SE[s, j] += delta[j]

    @device
    def add_squares(h_SE, partial, rows, share, pair):
        load_h(h_SE, rows, pair)
        acc = float32(0.0)
        for s in range(STEPS):
            for j in range(VEC):
                acc += h_SE[s, j] * h_SE[s, j]
        if ADD and uint32(pair) % uint32(share.blocks) == uint32(share.first):
            for s in range(STEPS):
                store(rows.h, int64(pair // W) * K, first_column(pair) + s * STRIDE, h_SE[s])
        acc = warp_sum(acc)
        if cuda.threadIdx.x & 31 == 0:
            partial[pair] = acc

    @device
    def normalize(smem, h_SE, w_SE, partial, pair, eps):
        lane = cuda.threadIdx.x & 31
        n = pair // W
        acc = partial[pair]
        if W > 1:  # as block_sum
            acc = warp_sum(partial[n * W + lane] if lane < W else float32(0.0))
        rstd = rsqrtf(acc * float32(INVERSE) + eps)
        column = first_column(pair)
        for s in range(STEPS):
            for j in range(VEC):
                h_SE[s, j] *= rstd * w_SE[s, j]
            if FULL or column + s * STRIDE < K:
                store4_shared(smem, X + n * (K + PAD) + column + s * STRIDE, h_SE[s])

    @device
    def stage(smem, partial, rows, w_SE, share, eps):
        warp = cuda.threadIdx.x >> 5
        h_SE = cuda.local.array((STEPS, VEC), float32)
        rounds = (rows.N * W + WARPS - 1 - warp) // WARPS
        for r in range(rounds):
            add_squares(h_SE, partial, rows, share, warp + (rounds - 1 - r) * WARPS)
        cuda.syncthreads()  # all sums are written
        if rounds > 0:
            normalize(smem, h_SE, w_SE, partial, warp, eps)
        if ROUNDS:
            for r in range(1, rounds):
                pair = warp + r * WARPS
                load_norm_w(w_SE, rows.norm_w, pair)
                load_h(h_SE, rows, pair)
                normalize(smem, h_SE, w_SE, partial, pair, eps)

    return load_norm_w, stage


@functools.cache
def make_stage_copy(K, X):
    """Return stage(smem, rows): copy x, which is bf16, to smem[X].

    By the warps that do not copy w: a thread can wait for its last copies only together with all
    before them.
    """
    AT_ONCE = 32 * (WARPS - COPYING) * 8  # elements

    @device
    def stage(smem, rows):
        if cuda.threadIdx.x < 32 * (WARPS - COPYING):
            for i in range(8 * cuda.threadIdx.x, rows.N * K, AT_ONCE):
                n = uint32(i) // uint32(K)
                cp_async16(smem, X + i + n * PAD, rows.x, i, True)
            cp_async_commit()
            cp_async_wait(0)

    return stage


# ----------------------------------------------------------------------------- the product
def piece_size(config: Config, parts: int) -> int:
    """Return the elements of shared memory of a piece: 16 rows of w for each chain."""
    return config.chains * parts * TILE * (config.columns + PAD)


@functools.cache
def make_copy_piece(K, M, config):
    """Return first_copy, next_copy and copy_piece, for the warps that copy w.

    first_copy(share, F)                 the first piece of the first tiles of a block
    next_copy(copy, share)               the piece after it
    copy_piece(smem, to, copy, share, w) start it; one beyond the last tile becomes zeros
    """
    COLUMNS = config.columns
    CHAINS = config.chains
    CHUNKS = COLUMNS // 8  # of 16 bytes, in a row
    STRIDE = COLUMNS + PAD
    COPIERS = min(32 * COPYING, TILE * CHUNKS)  # threads
    ROWS = COPIERS // CHUNKS  # that they copy at a time

    @device
    def thread_of():
        return int64(cuda.threadIdx.x) - 32 * (WARPS - COPYING)

    @device
    def first_copy(share, F):
        tid = thread_of()
        row = share.first * TILE + tid // CHUNKS
        return Copy(row * K + tid % CHUNKS * 8, F - row, int64(0))

    @device
    def next_copy(copy, share):
        source = copy.source + COLUMNS
        left = copy.left
        k = copy.k + COLUMNS
        if k == K:
            rows = share.blocks * (CHAINS * TILE)
            source += (rows - 1) * K
            left -= rows
            k = int64(0)
        return Copy(source, left, k)

    @device
    def copy_piece(smem, to, copy, share, weights):
        tid = thread_of()
        if tid < COPIERS:
            target = to + tid // CHUNKS * STRIDE + tid % CHUNKS * 8
            for chain in range(CHAINS):
                first = share.blocks * (chain * TILE)
                for m in range(M):
                    for i in range(0, TILE, ROWS):
                        at = target + ((chain * M + m) * TILE + i) * STRIDE
                        source = copy.source + (first + m * weights.F + i) * K
                        cp_async16(smem, at, weights.w, source, first + i < copy.left)
        cp_async_commit()

    return first_copy, next_copy, copy_piece


@functools.cache
def make_multiply(M, config):
    """Return load_step and multiply_half, for a warp with a chain.

    load_step(fa, fb, smem, at, x, j)    the operands of 16 columns: fa[j M + m], fb[j]
    multiply_half(s, fa, fb, next_fa, next_fb, smem, at, x)
        add the product of half a piece to the chains, in the order of K, and load the operands of
        the next half meanwhile
    """
    STRIDE = config.columns + PAD
    STEPS = config.columns // 32  # of 16 columns, in half a piece

    @device
    def load_step(fa, fb, smem, at, x, j):
        word = cuda.local.array(1, uint32)
        for m in range(M):
            ldmatrix(fa[j * M + m], smem, at, 0, m * TILE * STRIDE + 16 * j)
        for r in range(2):
            load_words2_shared(word, smem, x + (16 * j + 8 * r))
            fb[j, r] = word[0]

    @device
    def multiply_half(s, fa, fb, next_fa, next_fb, smem, at, x):
        for j in range(STEPS):
            for m in range(M):
                mma_bf16(s[m], fa[j * M + m], fb[j])
            load_step(next_fa, next_fb, smem, at, x, j)

    return load_step, multiply_half


@functools.cache
def make_finish(variant):
    """Return start_tile and finish.

    start_tile(s (M, 4))                   chains begin at 0
    finish(y, s, weights, tile, N)         SwiGLU; write a tile of 16 x 8 of y
    """
    M = variant.parts
    SWIGLU = variant.swiglu
    HALF = variant.half

    @device
    def rounded(v):
        """Return v as y's dtype represents it."""
        return low_bf16(pack_bf16(v, v)) if HALF else v

    @device
    def start_tile(s):
        for m in range(M):
            for i in range(4):
                s[m, i] = float32(0.0)

    @device
    def finish(y, s, weights, tile, N):
        lane = cuda.threadIdx.x & 31
        for i in range(4):
            o = tile * TILE + (lane >> 2) + 8 * (i >> 1)
            n = 2 * (lane & 3) + (i & 1)
            if n < N and o < weights.F:
                v = rounded(s[0, i])
                if SWIGLU:
                    v = v * sigmoid(v) * rounded(s[1, i])
                store1(y, n * weights.F + o, v)

    return start_tile, finish


@functools.cache
def make_product(K, variant, config, X):
    """Return fill_ring and product.

    fill_ring(smem, weights, share)            start the first copies; returns the next one
    product(y, smem, rows, weights, share, copy)    multiply and write the tiles of a block
    copy: from fill_ring, in the warps that copy w.
    """
    M = variant.parts
    COLUMNS = config.columns
    CHAINS = config.chains
    STAGES = config.stages
    PIECE = piece_size(config, M)
    STEPS = COLUMNS // 32
    OPERANDS = STEPS * M
    HALF = COLUMNS // 2
    RING = STAGES * PIECE
    # pieces that may be in flight when the first has arrived, and when the next has
    AFTER_FIRST = STAGES - 1
    AFTER_NEXT = STAGES - 2
    first_copy, next_copy, copy_piece = make_copy_piece(K, M, config)
    load_step, multiply_half = make_multiply(M, config)
    start_tile, finish = make_finish(variant)

    @device
    def fill_ring(smem, weights, share):
        copy = first_copy(share, weights.F)
        for i in range(opaque(STAGES)):
            copy_piece(smem, i * PIECE, copy, share, weights)
            copy = next_copy(copy, share)
        return copy

    @device
    def product(y, smem, rows, weights, share, copy):
        warp, lane = warp_id(), cuda.threadIdx.x & 31
        copies = warp >= WARPS - COPYING
        multiplies = warp < CHAINS
        s = cuda.local.array((M, 4), float32)
        fa = cuda.local.array((OPERANDS, 4), uint32)
        fb = cuda.local.array((STEPS, 2), uint32)
        next_fa = cuda.local.array((OPERANDS, 4), uint32)
        next_fb = cuda.local.array((STEPS, 2), uint32)
        # this lane's row of the operands, in the first piece and in x; rows of x beyond the last
        # one are that one, and their results are not written
        w_at = (warp * M * TILE + (lane & 15)) * (COLUMNS + PAD) + (lane >> 4) * 8
        n = lane >> 2
        n = n if n < rows.N else rows.N - 1
        x_at = X + n * (K + PAD) + 2 * (lane & 3)
        tile = share.first + warp * share.blocks
        first_tile = share.first  # of the block: the same in all threads
        piece = int32(0)
        k = int32(0)
        if copies:
            cp_async_wait(AFTER_FIRST)
        cuda.syncthreads()  # x and the first piece are in shared memory
        if multiplies:
            start_tile(s)
            for j in range(STEPS):
                load_step(fa, fb, smem, w_at, x_at, j)
        while first_tile * TILE < weights.F:
            this_piece = piece
            this_k = k
            piece = int32(piece + PIECE)
            if piece == RING:
                piece = int32(0)
            k = int32(k + COLUMNS)
            last = k == K
            if last:
                k = int32(0)
                first_tile += share.blocks * CHAINS
            if multiplies:
                at = w_at + this_piece + HALF
                x = x_at + this_k + HALF
                multiply_half(s, fa, fb, next_fa, next_fb, smem, at, x)
            elif copies:
                cp_async_wait(AFTER_NEXT)
            cuda.syncthreads()  # the next piece has arrived; all warps have read this one
            if multiplies:
                multiply_half(s, next_fa, next_fb, fa, fb, smem, w_at + piece, x_at + k)
                if last:
                    finish(y, s, weights, tile, rows.N)
                    tile += share.blocks * CHAINS
                    start_tile(s)
            elif copies:
                copy_piece(smem, this_piece, copy, share, weights)
                copy = next_copy(copy, share)
        if copies:
            cp_async_wait(0)

    return fill_ring, product
