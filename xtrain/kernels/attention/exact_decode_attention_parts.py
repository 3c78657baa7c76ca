"""The new heads of exact_decode_attention.py: QK-norm and RoPE of an item's queries, and of the keys that
the launch computes."""

import functools
from typing import NamedTuple

from ...device import Array
from ..primitives.heads import head_plan, make_head_ops
from ..primitives.ptx import device
from ..primitives.tensor_cores import store16, store16_shared
from ..primitives.tiles import CHUNK, make_chunk_offset
from ..primitives.words import load_words8
from ..runtime.compiler import cuda, float32, int32, int64, rsqrtf, uint32
from .decode_attention_parts import earlier_row
from .flash_attention_hopper_table import EXACT_STEP

STAGES = 3  # 128 KB of keys and values in flight per multiprocessor at D = 128
MOST_HEADS = 16  # query heads of an item: the rows of a tensor-core tile


class Batch(NamedTuple):
    """The rows of a launch and where their tokens are."""

    lengths: Array
    tables: Array  # (B, M), flat
    previous: Array  # row of the token before that of each row, if it is in the launch
    B: int
    G: int
    M: int
    R: int  # blocks of the cache


class Item(NamedTuple):
    """The queries h0, h0 + 1, ... of one key head of one sequence."""

    b: int
    g: int
    h0: int
    t: int  # position of the new token; -1: idle
    lo: int  # the first key that it sees


class Inputs(NamedTuple):
    """What the heads of the new tokens are computed from, flat."""

    qkv: Array
    q_w: Array  # of QK-norm
    k_w: Array
    cos: Array
    sin: Array
    eps: float


@functools.cache
def make_new_heads(D, GROUP, NORMALISE):
    """Return new_heads(smem, stage, k, v, inputs, item, G, row, to, exists).

    It writes the item's queries to shared memory, and the new key and value to row `row` of the
    stage and, if `exists`, to the cache from element `to` on.
    """
    BN = EXACT_STEP[D]
    THREADS = 2 * BN
    STAGE = 2 * BN * D
    Q = STAGES * STAGE
    R = D // 2
    CHUNKS = D // CHUNK
    HEADS = min(GROUP, MOST_HEADS)
    SHARE = head_plan(1, D, CHUNK, 32).S  # threads of a head
    ops = make_head_ops(1, D, CHUNK, head_plan(1, D, CHUNK, 32))
    load = ops.load
    load_words = ops.load_words
    unpack = ops.unpack
    pack = ops.pack
    rotate = ops.rotate
    total = ops.total
    chunk_offset = make_chunk_offset(D)
    INVERSE = 1 / D

    @device
    def new_heads(smem, stage, k, v, inputs, item, G, row, to, exists):
        tid = int32(cuda.threadIdx.x)
        cos = cuda.local.array(CHUNK, float32)
        sin = cuda.local.array(CHUNK, float32)
        w_2E = cuda.local.array((2, CHUNK), float32)
        x_2E = cuda.local.array((2, CHUNK), float32)
        x_2W = cuda.local.array((2, 4), uint32)
        value = cuda.local.array(4, uint32)
        unit = int32(tid // SHARE)  # the item's query heads, then the key head
        r = int32((tid % SHARE) * CHUNK)
        token = int64(item.b) * ((GROUP + 2) * G)
        live = unit < HEADS and item.h0 + unit < GROUP
        is_key = unit == HEADS
        a = int32(item.g * GROUP + item.h0 + unit)
        if not live:
            a = int32(G * GROUP + item.g)
        load_words(x_2W, inputs.qkv, (token + a) * D + r)
        writes_value = tid >= THREADS - CHUNKS
        if writes_value:
            at = (token + G * (GROUP + 1) + item.g) * D + (tid - (THREADS - CHUNKS)) * CHUNK
            load_words8(value, inputs.qkv, at)
        load(cos, inputs.cos, int64(item.t) * R + r)
        load(sin, inputs.sin, int64(item.t) * R + r)
        if NORMALISE:
            for i in range(2):
                if live:
                    load(w_2E[i], inputs.q_w, r + i * R)
                else:
                    load(w_2E[i], inputs.k_w, r + i * R)
        cuda.syncwarp()  # no instruction: all loads are in flight before the first is used
        unpack(x_2E, x_2W, inputs.qkv)
        if NORMALISE:
            acc = float32(0.0)
            for i in range(2):
                for j in range(CHUNK):
                    acc += x_2E[i, j] * x_2E[i, j]
            scale = rsqrtf(total(acc) * float32(INVERSE) + inputs.eps)
            for i in range(2):
                for j in range(CHUNK):
                    x_2E[i, j] *= scale * w_2E[i, j]
        rotate(x_2E, cos, sin)
        pack(x_2W, x_2E, inputs.qkv)
        if live:
            for i in range(2):
                store16_shared(smem, Q + chunk_offset(unit, (r + i * R) // CHUNK), x_2W[i])
        if is_key:
            for i in range(2):
                chunk = (r + i * R) // CHUNK
                store16_shared(smem, stage * STAGE + chunk_offset(row, chunk), x_2W[i])
                if exists:
                    store16(k, to + r + i * R, x_2W[i])
        if writes_value:
            chunk = tid - (THREADS - CHUNKS)
            store16_shared(smem, stage * STAGE + BN * D + chunk_offset(row, chunk), value)
            if exists:
                store16(v, to + chunk * CHUNK, value)

    return new_heads


@functools.cache
def make_earlier_heads(D, GROUP, NORMALISE):
    """Return earlier_heads(smem, stage, inputs, item, batch, n0, old).

    It writes the keys old .. item.t - 1 that the tile of keys n0, n0 + 1, ... has to a stage, and
    their values: those of tokens that are in the launch, too. Their own blocks write them to the
    cache.
    """
    BN = EXACT_STEP[D]
    THREADS = 2 * BN
    STAGE = 2 * BN * D
    R = D // 2
    CHUNKS = D // CHUNK
    SHARE = head_plan(1, D, CHUNK, 32).S  # threads of a head
    KEYS = THREADS // SHARE  # at a time
    ops = make_head_ops(1, D, CHUNK, head_plan(1, D, CHUNK, 32))
    load = ops.load
    load_words = ops.load_words
    unpack = ops.unpack
    pack = ops.pack
    rotate = ops.rotate
    total = ops.total
    chunk_offset = make_chunk_offset(D)
    INVERSE = 1 / D

    @device
    def earlier_heads(smem, stage, inputs, item, batch, n0, old):
        tid = int32(cuda.threadIdx.x)
        cos = cuda.local.array(CHUNK, float32)
        sin = cuda.local.array(CHUNK, float32)
        w_2E = cuda.local.array((2, CHUNK), float32)
        x_2E = cuda.local.array((2, CHUNK), float32)
        x_2W = cuda.local.array((2, 4), uint32)
        value = cuda.local.array(4, uint32)
        r = int32((tid % SHARE) * CHUNK)
        width = int64((GROUP + 2) * batch.G)  # heads of a row
        low = int32(max(old, n0))
        end = int32(min(item.t, n0 + BN))
        for first in range(low, end, KEYS):  # the same for all threads of a warp, which share sums
            p = int32(first + tid // SHARE)
            inside = p < end
            p = int32(min(p, int32(end - 1)))
            row = earlier_row(batch.previous, item.b, int32(item.t - p))
            head = width * row + batch.G * GROUP + item.g
            load_words(x_2W, inputs.qkv, head * D + r)
            load(cos, inputs.cos, int64(p) * R + r)
            load(sin, inputs.sin, int64(p) * R + r)
            unpack(x_2E, x_2W, inputs.qkv)
            if NORMALISE:
                for i in range(2):
                    load(w_2E[i], inputs.k_w, r + i * R)
                acc = float32(0.0)
                for i in range(2):
                    for j in range(CHUNK):
                        acc += x_2E[i, j] * x_2E[i, j]
                scale = rsqrtf(total(acc) * float32(INVERSE) + inputs.eps)
                for i in range(2):
                    for j in range(CHUNK):
                        x_2E[i, j] *= scale * w_2E[i, j]
            rotate(x_2E, cos, sin)
            pack(x_2W, x_2E, inputs.qkv)
            if inside:
                for i in range(2):
                    chunk = (r + i * R) // CHUNK
                    store16_shared(smem, stage * STAGE + chunk_offset(p - n0, chunk), x_2W[i])
        for i in range(tid, (end - low) * CHUNKS, THREADS):
            p = int32(low + i // CHUNKS)
            row = earlier_row(batch.previous, item.b, int32(item.t - p))
            head = width * row + batch.G * (GROUP + 1) + item.g
            load_words8(value, inputs.qkv, head * D + (i % CHUNKS) * CHUNK)
            to = stage * STAGE + BN * D + chunk_offset(p - n0, i % CHUNKS)
            store16_shared(smem, to, value)

    return earlier_heads
