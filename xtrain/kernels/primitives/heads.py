"""Heads of D columns in registers, for the kernels that rotate them: rope.py, qk_norm_rope.py.

    plane r        columns r and R + r of a head, R = D / 2: the pair that a rotation mixes
    chunk          vec neighbouring columns, 16 bytes: 8 in bf16, 4 in float32
    S threads      share a head, S = R / vec. Thread s holds planes s vec, ..., (s + 1) vec - 1: two
                   chunks, so a rotation needs no data of another thread
    block          `heads` heads of `tokens` tokens, rounded up to whole warps; the threads of a
                   head are neighbours

    bf16, D = 32:  columns   0..7  8..15 | 16..23  24..31
                   thread      0     1   |   0       1

Other widths (R not a multiple of a chunk, or S not a power of two) have plain kernels with one
thread per plane.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..runtime.compiler import cuda, float32, int64, uint32
from .ptx import device, load4, load8
from .reduce import FULL
from .words import WORD_OPS

MAX_THREADS = 512  # of a block
SPLIT_THREADS = 256  # of a block, if the heads of one token take more than MAX_THREADS
NAN = np.float32(np.nan)


@dataclass(frozen=True)
class HeadPlan:
    """How the threads of a block share heads, see the file's docstring."""

    S: int  # threads per head
    heads: int  # heads of a token in one block
    tokens: int  # tokens per block
    head_blocks: int  # blocks that share the heads of a token; the last one may have fewer heads
    THREADS: int  # per block


@dataclass(frozen=True)
class HeadKernel:
    """A compiled variant of a kernel over heads, and what its launcher needs to choose the grid."""

    kernel: Callable
    plan: HeadPlan
    blocks_per_sm: int = 1  # resident blocks that the kernel's registers allow


def head_plan(X: int, D: int, vec: int, threads: int) -> HeadPlan | None:
    """Return the plan for X heads of D columns; None if the shape does not fit.

    threads: of a block, approximately.
    """
    S = D // (2 * vec)
    if D % (2 * vec) or S not in (1, 2, 4, 8, 16, 32) or X < 1:
        return None
    heads = X if X * S <= MAX_THREADS else SPLIT_THREADS // S
    tokens = max((threads + heads * S // 2) // (heads * S), 1)
    block = -(-heads * S * tokens // 32) * 32
    return HeadPlan(S, heads, tokens, head_blocks=-(-X // heads), THREADS=block)


@dataclass(frozen=True)
class HeadOps:
    """The device functions that make_head_ops returns. E = vec.

    x_2E: the two chunks of a thread, (2, E) float32 registers.
    x_2W: the same as (2, 4) words (words.py).
    """

    # () -> token within the block, head, first plane. head >= X: the thread has no head
    token_head_plane: Callable
    load: Callable  # (registers, x, i): registers[0:E] = x[i : i + E]
    # (cos, sin, cos_PR, sin_PR, p, r): of position p, from plane r on; NaN where p is -1
    load_angles: Callable
    load_words: Callable  # (x_2W, x, i): the chunks at x[i] and x[i + R]
    store_words: Callable  # (x, i, x_2W): the reverse of load_words
    unpack: Callable  # (x_2E, x_2W, x): words -> float32, by the dtype of x
    pack: Callable  # (x_2W, x_2E, x): the reverse of unpack
    # (x_2E, cos, sin): in place, (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin).
    rotate: Callable
    rotate_back: Callable  # (x_2E, cos, sin): the inverse of rotate
    total: Callable  # (v) -> the sum of v over the S threads of a head, in each of them


def make_head_ops(X: int, D: int, vec: int, plan: HeadPlan) -> HeadOps:
    """Return the device functions for X heads of D columns, shared among threads as `plan` says."""
    S = plan.S
    HEADS = plan.heads
    TOKENS = plan.tokens
    R = D // 2
    TOKEN_THREADS = HEADS * S
    SHIFT = S.bit_length() - 1
    load_n = load8 if vec == 8 else load4
    load_vector = WORD_OPS[vec].load
    store_vector = WORD_OPS[vec].store
    unpack_n = WORD_OPS[vec].unpack
    pack_n = WORD_OPS[vec].pack

    @device
    def token_head_plane():
        tid = uint32(cuda.threadIdx.x)
        token = tid // uint32(TOKEN_THREADS)
        token_thread = int64(tid - token * uint32(TOKEN_THREADS))
        head = int64(cuda.blockIdx.y) * HEADS + (token_thread >> SHIFT)
        head = head if token < TOKENS else int64(X)
        return int64(token), head, (token_thread & (S - 1)) * vec

    @device
    def load(registers, x, i):
        load_n(registers, x, i)

    @device
    def load_angles(cos, sin, cos_PR, sin_PR, p, r):
        if p >= 0:
            load_n(cos, cos_PR, p * R + r)
            load_n(sin, sin_PR, p * R + r)
        else:
            for j in range(vec):
                cos[j] = NAN
                sin[j] = NAN

    @device
    def load_words(x_2W, x, i):
        load_vector(x_2W[0], x, i)
        load_vector(x_2W[1], x, i + R)

    @device
    def store_words(x, i, x_2W):
        store_vector(x, i, x_2W[0])
        store_vector(x, i + R, x_2W[1])

    @device
    def unpack(x_2E, x_2W, x):
        unpack_n(x_2E[0], x_2W[0], x)
        unpack_n(x_2E[1], x_2W[1], x)

    @device
    def pack(x_2W, x_2E, x):
        pack_n(x_2W[0], x_2E[0], x)
        pack_n(x_2W[1], x_2E[1], x)

    @device
    def rotate(x_2E, cos, sin):
        for j in range(vec):
            x1, x2 = x_2E[0, j], x_2E[1, j]
            x_2E[0, j] = x1 * cos[j] - x2 * sin[j]
            x_2E[1, j] = x2 * cos[j] + x1 * sin[j]

    @device
    def rotate_back(x_2E, cos, sin):
        for j in range(vec):
            x1, x2 = x_2E[0, j], x_2E[1, j]
            x_2E[0, j] = x1 * cos[j] + x2 * sin[j]
            x_2E[1, j] = x2 * cos[j] - x1 * sin[j]

    @device
    def total(v):
        for i in range(SHIFT):
            v += cuda.shfl_xor_sync(FULL, v, 1 << i)
        return v

    return HeadOps(
        token_head_plane=token_head_plane,
        load=load,
        load_angles=load_angles,
        load_words=load_words,
        store_words=store_words,
        unpack=unpack,
        pack=pack,
        rotate=rotate,
        rotate_back=rotate_back,
        total=total,
    )


def make_add_heads(H: int, D: int, vec: int, plan: HeadPlan):
    """Return add_heads, which sums over the heads of a block: query heads (the first H), key heads.

    add_heads(partial, row, dw_2E, tile): partial[row : row + D] = the sum of dw_2E over the query
    heads, partial[row + D : row + 2 D] = that over the key heads. tile: 2 vec THREADS floats of
    shared memory.
    """
    TOKENS = plan.tokens
    HEADS = plan.heads
    S = plan.S
    R = D // 2
    THREADS = plan.THREADS

    @device
    def add_heads(partial, row, dw_2E, tile):
        tid = cuda.threadIdx.x
        first_head = cuda.blockIdx.y * HEADS
        for i in range(2):
            for j in range(vec):
                tile[(i * vec + j) * THREADS + tid] = dw_2E[i, j]
        cuda.syncthreads()  # every thread's sums are written
        for d in range(tid, D, THREADS):
            first = (d // R * vec + d % vec) * THREADS + d % R // vec
            total_q, total_k = float32(0.0), float32(0.0)
            for k in range(TOKENS * HEADS):  # a fixed order: the same bits every run
                if first_head + k % HEADS < H:
                    total_q += tile[first + k * S]
                else:  # includes threads without a head: their sums are zero
                    total_k += tile[first + k * S]
            partial[row + d] = total_q
            partial[row + D + d] = total_k

    return add_heads
