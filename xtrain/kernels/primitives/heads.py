"""Heads of D columns in registers, for kernels that rotate them: rope.py, qk_norm_rope.py.

    plane r        columns r and R + r of a head, R = D / 2: the pair that a rotation mixes
    chunk          `vec_size` neighbouring columns, 16 bytes: 8 in bf16, 4 in float32
    S = R / each   threads share a head. Thread s holds planes s each, ..., s each + each - 1: two chunks, so that a
                   rotation needs no other thread
    block          `heads` heads of `tokens` tokens, filled up to whole warps; the threads of a head are neighbours

    bf16, D = 32:  columns   0..7  8..15 | 16..23  24..31
                   thread      0     1   |   0       1

Widths that do not fit (R no multiple of a chunk, S no power of two) have plain kernels, a thread per plane.
"""

from types import SimpleNamespace

import numpy as np
from numba import cuda, int64, uint32

from .ptx import device, load4, load8
from .reduce import FULL
from .words import (
    load_words4,
    load_words8,
    pack4,
    pack8,
    store_words4,
    store_words8,
    unpack4,
    unpack8,
)

MAX_THREADS = 512  # of a block
SPLIT_THREADS = 256  # of a block when the heads of a token take more than that
NAN = np.float32(np.nan)


def head_plan(X: int, D: int, vec_size: int, threads: int) -> SimpleNamespace | None:
    """How blocks of about `threads` threads share X heads of D columns. None: this shape does not fit.

    parts: blocks that share the heads of a token, `heads` each (the last one may have fewer).
    """
    S = D // (2 * vec_size)
    if D % (2 * vec_size) or S not in (1, 2, 4, 8, 16, 32) or X < 1:
        return None
    heads = X if X * S <= MAX_THREADS else SPLIT_THREADS // S
    tokens = max((threads + heads * S // 2) // (heads * S), 1)
    block = -(-heads * S * tokens // 32) * 32
    return SimpleNamespace(S=S, heads=heads, tokens=tokens, parts=-(-X // heads), THREADS=block)


def make_head_ops(X: int, D: int, vec_size: int, plan: SimpleNamespace) -> SimpleNamespace:
    """-> device functions. x_2E: a thread's two chunks of a head, (2, each) registers; x_2W: as (2, 4) words (_words.py).

    place()                     -> token within the block, head, first plane; head X or more: this thread has none
    load(registers, x, i)       registers[0:each] = x[i : i + each]
    load_angles(cos, sin, cos_PR, sin_PR, p, r)   those of position p, of the planes from r on; NaN where p is -1
    fetch(x_2W, x, i)           the chunks at x[i] and x[i + R]
    unpack(x_2E, x_2W, x)       what they mean
    pack(x_2W, x_2E, x)         the other way
    put(x, i, x_2W)             fetch the other way
    turn(x_2E, cos, sin)        in place: the plane (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin)
    turn_back(x_2E, cos, sin)   the inverse
    total(v)                    sum of v over the S threads of a head, in each of them
    """
    S, HEADS, TOKENS = plan.S, plan.heads, plan.tokens
    R, TOKEN_THREADS, SHIFT = D // 2, plan.heads * plan.S, plan.S.bit_length() - 1
    load_n = load8 if vec_size == 8 else load4
    load_vector, store_vector = (
        (load_words8, store_words8) if vec_size == 8 else (load_words4, store_words4)
    )
    unpack_n, pack_n = (unpack8, pack8) if vec_size == 8 else (unpack4, pack4)

    @device
    def token_head_plane():
        tid = uint32(cuda.threadIdx.x)
        token = tid // uint32(TOKEN_THREADS)
        token_thread = int64(tid - token * uint32(TOKEN_THREADS))
        head = int64(cuda.blockIdx.y) * HEADS + (token_thread >> SHIFT)
        return (
            int64(token),
            head if token < TOKENS else int64(X),
            (token_thread & (S - 1)) * vec_size,
        )

    @device
    def load(registers, x, i):
        load_n(registers, x, i)

    @device
    def load_angles(cos, sin, cos_PR, sin_PR, p, r):
        if p >= 0:
            load_n(cos, cos_PR, p * R + r)
            load_n(sin, sin_PR, p * R + r)
        else:
            for j in range(vec_size):
                cos[j], sin[j] = NAN, NAN

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
        for j in range(vec_size):
            x1, x2 = x_2E[0, j], x_2E[1, j]
            x_2E[0, j] = x1 * cos[j] - x2 * sin[j]
            x_2E[1, j] = x2 * cos[j] + x1 * sin[j]

    @device
    def rotate_back(x_2E, cos, sin):
        for j in range(vec_size):
            x1, x2 = x_2E[0, j], x_2E[1, j]
            x_2E[0, j] = x1 * cos[j] + x2 * sin[j]
            x_2E[1, j] = x2 * cos[j] - x1 * sin[j]

    @device
    def total(v):
        for i in range(SHIFT):
            v += cuda.shfl_xor_sync(FULL, v, 1 << i)
        return v

    functions = dict(
        token_head_plane=token_head_plane,
        load=load,
        load_words=load_words,
        store_words=store_words,
        unpack=unpack,
        pack=pack,
    )
    functions |= dict(load_angles=load_angles, rotate=rotate, rotate_back=rotate_back, total=total)
    return SimpleNamespace(**functions)
