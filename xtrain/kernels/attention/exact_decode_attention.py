"""One new token per sequence with the bits of training's forward, for batch-invariant mode on compute
capability 9.0: QK-norm, RoPE, append to the cache, attention.

Arguments and result are those of decode_attention.py. Its sums are divided into splits that are
merged; here they are added in the order of flash_attention_hopper.py, whose tile of queries walks
the tiles of BN keys from the diagonal down to the first key. That order has two schedules:

    training    one warpgroup has 64 queries and all channels, and computes one tile after the other
    decoding    a block has the queries of one key head of one sequence. The products with the keys
                of a tile are divided among its warps by keys, because their sums run over channels;
                those with the values by channels, because their sums run over keys

Each float32 number goes through the same operations in both:

    s_j         one chain of tensor-core instructions, 16 channels after the other
    m'          max(m, s_j of the tile), which has no order
    p_j         exp2(s_j scale - m' scale)
    l'          l exp2(m - m') + (sum of p_j over even j + sum over odd j), for the four residues of
                j // 2 modulo 4, which are four lanes of a warp; these are added at the end
    acc'        acc exp2(m - m'), to which one chain of instructions adds p_j v_j, 16 keys after the
                other; p_j is rounded to bf16

wgmma and mma.sync compute the same bits for the same 16 terms and accumulator (measured: one H200,
D = 64 and 128). QK-norm and RoPE are the operations of qk_norm_rope.py, in its order.

A block is persistent and takes items (sequence, key head) i, i + grid, ... The tiles of all its
items pass through a ring of STAGES stages in shared memory, so copies run ahead from one item to
the next. Its last warps only copy: the others' products wait for each other, and instructions
between them would take longer than the products. The new token's key and value are not yet in the
cache: the block computes them when an item begins, writes them to the cache and into the tile.

Shared memory: STAGES of (K, V) | Q | P in bf16.
Bytes moved: as decode_attention.py.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from ...device import Array
from ..decoding.kv_cache import Pages, make_block_table
from ..primitives.flat import on_16_bytes
from ..primitives.heads import head_plan, make_head_ops
from ..primitives.hopper import bar_sync
from ..primitives.ptx import device, kernel, let_next_start, store1, wait_for_previous
from ..primitives.reduce import FULL, NEG_INF
from ..primitives.tensor_cores import (
    cp_async16,
    cp_async_commit,
    cp_async_wait,
    exp2,
    fmax,
    ldmatrix,
    ldmatrix_trans,
    mma_bf16,
    pack_bf16,
    store16,
    store16_shared,
    store_pair_shared,
    warp_id,
)
from ..primitives.tiles import CHUNK, make_chunk_offset, make_left_lane, make_scores
from ..primitives.words import load_words8
from ..runtime.compiler import cuda, float32, int32, int64, rsqrtf, uint16, uint32
from ..runtime.launch import can_overlap, check, launch, multiprocessors
from .flash_attention_hopper_table import EXACT_STEP

LOG2E = float32(math.log2(math.e))
LOWEST = float32(-1e30)  # initial maximum; with -inf, -inf - -inf would be NaN
NAN = np.float32(np.nan)
STAGES = 3  # 128 KB of keys and values in flight per multiprocessor at D = 128
AHEAD = STAGES - 2  # tiles that may be in flight when one is computed
BLOCKS = {64: 3, 128: 1}  # per multiprocessor, by D: as many as shared memory holds
MOST_HEADS = 16  # query heads of an item: the rows of a tensor-core tile
PAD = 8  # floats between the rows of P in float32
# Words of a small array. The dynamic shared memory begins behind the static arrays, and ldmatrix's
# tiles need a multiple of 256 bytes (tiles.py): so every static array is one.
ROUNDED = 64


class Batch(NamedTuple):
    """The rows of a launch and where their tokens are."""

    lengths: Array
    tables: Array  # (B, M), flat
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


def threads(D: int) -> int:
    """Return the threads of a block: those that compute and, after them, those that copy."""
    return 3 * EXACT_STEP[D]


class Shared(NamedTuple):
    """The static arrays in shared memory."""

    p: Array  # (MOST_HEADS, BN + PAD): the weights of a tile in float32
    maxima: Array  # (WARPS, MOST_HEADS)
    factors: Array  # of each head
    exists: Array  # of each stage: whether its blocks exist
    own: Array  # of each stage: the block of the new token


def shared_bytes(D: int) -> int:
    """Return the bytes of shared memory of a block, without its static arrays."""
    BN = EXACT_STEP[D]
    return 2 * (STAGES * 2 * BN * D + MOST_HEADS * D + MOST_HEADS * BN)


@functools.cache
def make_tiles(D, S, WINDOW):
    """Return item_of, look_up, copy_tile, exist: which keys a block needs, and how they come.

    item_of(number, batch, chunks) -> Item
    look_up(entries, pages, n0, item)
        entries[i] = that of the table for keys n0 + 16 i, ...; 0 where none is needed
    copy_tile(smem, stage, k, v, entries, pages, n0, item)
        start to copy keys and values n0 .. n0 + BN - 1 into a stage; zeros for the new token's and
        those before the first key. entries: of look_up
    exist(entries, pages)
        whether all these blocks exist
    """
    BN = EXACT_STEP[D]
    PASSES = BN // 16
    CHUNKS = D // CHUNK
    STAGE = 2 * BN * D
    chunk_offset = make_chunk_offset(D)
    entry_of, start_of = make_block_table(S, D)

    @device
    def item_of(number, batch, chunks):
        row = int32(uint32(number) // uint32(chunks))
        h0 = int32((number - row * chunks) * MOST_HEADS)
        b = int32(uint32(row) // uint32(batch.G))
        g = int32(row - b * batch.G)
        t = int32(batch.lengths[b])
        if t < 0 or t >= batch.M * S:
            t = int32(-1)
        lo = int32(0)
        if WINDOW:
            lo = int32(max(t + 1 - WINDOW, 0))
        return Item(b, g, h0, t, lo)

    @device
    def look_up(entries, pages, n0, item):
        for i in range(PASSES):
            first = int32(n0 + 16 * i)
            entries[i] = uint32(0)
            if first <= item.t and first + 15 >= item.lo:
                entries[i] = entry_of(pages, first)

    @device
    def copy_tile(smem, stage, k, v, entries, pages, n0, item):
        tid = int32(cuda.threadIdx.x) - 2 * BN
        row = int32(tid // CHUNKS)  # of 8 rows
        chunk = int32(tid % CHUNKS)
        target = int32(stage * STAGE + chunk_offset(row, chunk))
        for i in range(PASSES):
            source = start_of(entries[i], n0 + 16 * i + row, pages) + chunk * CHUNK
            for half in range(2):
                key = int32(n0 + 16 * i + 8 * half + row)
                inside = key < item.t and key >= item.lo
                to = target + (16 * i + 8 * half) * D
                at = source + 8 * half * D
                cp_async16(smem, to, k, at, inside)
                cp_async16(smem, to + BN * D, v, at, inside)

    @device
    def exist(entries, pages):
        worst = uint32(0)
        for i in range(PASSES):
            worst = max(entries[i], worst)
        return worst < pages.blocks

    return item_of, look_up, copy_tile, exist


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
def make_tile_sums(D, GROUP):
    """Return the steps of a tile of keys: warp w has keys 16 w, ... and channels 16 w, ....

    scores(s, maxima, smem, stage, fq, n0, item)
        s = the products of this warp's keys; maxima receives the largest of each head
    weights(s, maxima, p_s, smem, top, shrink, scale)
        s becomes p, in shared memory in float32 and bf16
    add_values(acc, smem, stage, shrink)
        acc, this warp's channels, is rescaled and p v added
    add_weights(total, p_s, row, shrink) -> the new sum of a lane of row `row`
    """
    BN = EXACT_STEP[D]
    WARPS = BN // 16
    STAGE = 2 * BN * D
    P = STAGES * STAGE + MOST_HEADS * D
    HALVES = 1 if GROUP <= 8 else 2  # of 8 rows of a tile that have heads
    WIDTH = BN + PAD
    _, scores_of, _ = make_scores(D, 1, 2)
    left_lane = make_left_lane(D)
    p_lane = make_left_lane(BN)
    p_offset = make_chunk_offset(BN)

    @device
    def scores(s, maxima, smem, stage, fq, n0, item):
        warp = warp_id()
        lane = int32(cuda.threadIdx.x & 31)
        scores_of(s, fq, smem, stage * STAGE + warp * (16 * D))
        key = int32(n0 + 16 * warp + 2 * (lane & 3))
        for n in range(2):
            for i in range(4):
                mine = int32(key + 8 * n + (i & 1))
                if mine > item.t or mine < item.lo:
                    s[0, n, i] = NEG_INF
        for r in range(HALVES):
            x = fmax(
                fmax(s[0, 0, 2 * r], s[0, 0, 2 * r + 1]), fmax(s[0, 1, 2 * r], s[0, 1, 2 * r + 1])
            )
            x = fmax(x, cuda.shfl_xor_sync(FULL, x, 1))
            x = fmax(x, cuda.shfl_xor_sync(FULL, x, 2))
            if lane & 3 == 0:
                maxima[warp * MOST_HEADS + 8 * r + (lane >> 2)] = x

    @device
    def weights(s, maxima, p_s, smem, top, shrink, scale):
        warp = warp_id()
        lane = int32(cuda.threadIdx.x & 31)
        g = lane >> 2
        column = int32(16 * warp + 2 * (lane & 3))
        for r in range(HALVES):
            row = int32(8 * r + g)
            x = top[r]
            for i in range(WARPS):
                x = fmax(x, maxima[i * MOST_HEADS + row])
            shrink[r] = exp2((top[r] - x) * scale)
            top[r] = x
            shift = x * scale
            for n in range(2):
                for c in range(2):
                    p = exp2(s[0, n, 2 * r + c] * scale - shift)
                    s[0, n, 2 * r + c] = p
                    p_s[row * WIDTH + column + 8 * n + c] = p
                pair = pack_bf16(s[0, n, 2 * r], s[0, n, 2 * r + 1])
                at = P + p_offset(row, 2 * warp + n) + 2 * (lane & 3)
                store_pair_shared(smem, at, pair)

    @device
    def add_values(acc, smem, stage, shrink):
        warp = warp_id()
        fa = cuda.local.array(4, uint32)
        fb = cuda.local.array((2, 2), uint32)
        for n in range(2):
            for i in range(4):
                if i < 2 * HALVES:
                    acc[n, i] *= shrink[i // 2]
        values = stage * STAGE + BN * D + left_lane()
        for k in range(BN // 16):
            ldmatrix(fa, smem, P + p_lane(), 16 * k, 0)
            ldmatrix_trans(fb, smem, values, 16 * warp, 16 * k * D)
            mma_bf16(acc[0], fa, fb[0])
            mma_bf16(acc[1], fa, fb[1])

    @device
    def add_weights(total, p_s, row, shrink):
        first = row * WIDTH + 2 * (int32(cuda.threadIdx.x) & 3)
        even = float32(0.0)
        odd = float32(0.0)
        for n in range(BN // 8):
            even += p_s[first + 8 * n]
            odd += p_s[first + 8 * n + 1]
        return total * shrink + (even + odd)

    return scores, weights, add_values, add_weights


@functools.cache
def make_exact_kernel(D, S, GROUP, normalise, overlap, ready, WINDOW=0):
    """Return the kernel. Launch with threads(D) and shared_bytes(D).

    S: tokens of a block of the cache.  GROUP: H / G.  normalise: QK-norm.
    overlap: the kernel may start before the previous one has ended.
    ready: lengths, tables and the cache may be read before that.
    """
    BN = EXACT_STEP[D]
    WARPS = BN // 16
    THREADS = 32 * WARPS
    STAGE = 2 * BN * D
    Q = STAGES * STAGE
    HALVES = 1 if GROUP <= 8 else 2
    CHUNKS = -(-GROUP // MOST_HEADS)
    KS = D // 16
    PASSES = BN // 16
    ALL = threads(D)  # THREADS compute, the others copy
    MAXIMA = WARPS * MOST_HEADS
    WEIGHTS = MOST_HEADS * (BN + PAD)
    PADDING = MOST_HEADS * (D + BN)
    item_of, look_up, copy_tile, exist = make_tiles(D, S, WINDOW)
    new_heads = make_new_heads(D, GROUP, normalise)
    scores, weights, add_values, add_weights = make_tile_sums(D, GROUP)
    load_rows, _, _ = make_scores(D, 1, 2)
    _, start_of = make_block_table(S, D)

    @device
    def pages_of(batch, item):
        first = uint32(uint32(item.b) * uint32(batch.M))
        stride = uint32(uint32(batch.G) * uint32(S * D))
        head = uint32(uint32(item.g) * uint32(S * D))
        return Pages(batch.tables, first, uint32(batch.R), stride, head)

    @device
    def store_idle(o, batch, item):
        """The rows of an idle sequence are zeros."""
        out = (int64(item.b) * batch.G + item.g) * GROUP * D
        for j in range(int32(cuda.threadIdx.x), GROUP * D, THREADS):
            store1(o, out + j, float32(0.0))

    @device
    def store_result(o, acc, factors, batch, item):
        warp = warp_id()
        lane = int32(cuda.threadIdx.x & 31)
        for r in range(HALVES):
            head = int32(item.h0 + 8 * r + (lane >> 2))
            if head < GROUP:
                row = (int64(item.b) * batch.G + item.g) * GROUP + head
                factor = factors[8 * r + (lane >> 2)]
                for n in range(2):
                    for c in range(2):
                        d = 16 * warp + 8 * n + 2 * (lane & 3) + c
                        store1(o, row * D + d, acc[n, 2 * r + c] * factor)

    @device
    def next_busy(number, end, step, batch):
        """Return the first item from `number` on that is not idle; at least `end` if none is."""
        while number < end and item_of(number, batch, CHUNKS).t < 0:
            number = int32(number + step)
        return number

    @device
    def copy_all(smem, shared, k, v, batch, first, end, step):
        """What the last warps do: copy the tiles of all items, STAGES - 1 ahead of the products."""
        entries = cuda.local.array(PASSES, uint32)
        number = first
        item = item_of(min(number, int32(end - 1)), batch, CHUNKS)
        pages = pages_of(batch, item)
        n0 = int32(item.t // BN * BN)
        copied = int32(0)
        turn = int32(1 - STAGES)  # the tile that is computed; before tile 0, none
        if number < end:
            look_up(entries, pages, n0, item)
        while number < end or turn < copied:
            if turn >= 0:
                cp_async_wait(AHEAD)
                bar_sync(2, ALL)  # the tile has arrived, and the one before has been read
            if number < end:
                stage = copied % STAGES
                if cuda.threadIdx.x == THREADS:
                    shared.exists[stage] = int32(exist(entries, pages))
                    for i in range(PASSES):
                        if 16 * i <= item.t - n0:
                            shared.own[stage] = entries[i]
                copy_tile(smem, stage, k, v, entries, pages, n0, item)
                copied = int32(copied + 1)
                n0 = int32(n0 - BN)
                if n0 + BN <= item.lo or n0 < 0:
                    number = next_busy(int32(number + step), end, step, batch)
                    if number < end:
                        item = item_of(number, batch, CHUNKS)
                        pages = pages_of(batch, item)
                        n0 = int32(item.t // BN * BN)
                if number < end:
                    look_up(entries, pages, n0, item)
            cp_async_commit()
            turn = int32(turn + 1)

    @device
    def compute_all(o, smem, shared, k, v, inputs, batch, first, end, step, scale):
        """What the other warps do: the products of all items."""
        warp = warp_id()
        lane = int32(cuda.threadIdx.x & 31)
        fq = cuda.local.array((KS, 1, 4), uint32)
        s = cuda.local.array((1, 2, 4), float32)
        acc = cuda.local.array((2, 4), float32)
        top = cuda.local.array(2, float32)
        shrink = cuda.local.array(2, float32)
        number = first
        stage = int32(0)
        while number < end:
            item = item_of(number, batch, CHUNKS)
            pages = pages_of(batch, item)
            n0 = int32(item.t // BN * BN)
            exists = True
            total = float32(0.0)
            for n in range(2):
                for i in range(4):
                    acc[n, i] = float32(0.0)
            for r in range(2):
                top[r] = LOWEST
                shrink[r] = float32(0.0)
            begins = True
            while n0 >= 0 and n0 + BN > item.lo:
                bar_sync(2, ALL)  # the tile has arrived, and the one before has been read
                if begins:
                    own = shared.own[stage]
                    to = start_of(own, item.t, pages)
                    written = own < pages.blocks and item.h0 == 0
                    new_heads(smem, stage, k, v, inputs, item, batch.G, item.t - n0, to, written)
                    bar_sync(1, THREADS)  # the queries, the new key and value
                    load_rows(fq, smem, Q)
                    begins = False
                exists = exists and shared.exists[stage] != 0
                scores(s, shared.maxima, smem, stage, fq, n0, item)
                bar_sync(1, THREADS)  # the maxima of all warps
                weights(s, shared.maxima, shared.p, smem, top, shrink, scale)
                bar_sync(1, THREADS)  # p of all keys
                add_values(acc, smem, stage, shrink)
                if warp < HALVES:
                    mine = cuda.selp(warp == 0, shrink[0], shrink[1])
                    total = add_weights(total, shared.p, 8 * warp + (lane >> 2), mine)
                n0 = int32(n0 - BN)
                stage = int32(stage + 1 if stage < STAGES - 1 else 0)
            if warp < HALVES:
                x = total
                x += cuda.shfl_xor_sync(FULL, x, 1)
                x += cuda.shfl_xor_sync(FULL, x, 2)
                if lane & 3 == 0:
                    shared.factors[8 * warp + (lane >> 2)] = float32(1.0) / x if exists else NAN
            bar_sync(1, THREADS)  # the factors of all heads
            store_result(o, acc, shared.factors, batch, item)
            number = next_busy(int32(number + step), end, step, batch)

    @kernel(ALL, BLOCKS[D])
    def exact_decode_attention_kernel(
        o, k, v, qkv, lengths_B, tables, q_w_D, k_w_D, cos, sin, B, G, M, R, eps, scale
    ):
        """Compute items p, p + grid, ... with block p of any number. All arrays flat."""
        smem = cuda.shared.array(0, uint16)
        p_s = cuda.shared.array(WEIGHTS, float32)
        maxima_s = cuda.shared.array(MAXIMA, float32)
        factors_s = cuda.shared.array(ROUNDED, float32)
        exists_s = cuda.shared.array(ROUNDED, int32)
        own_s = cuda.shared.array(ROUNDED, uint32)
        shared = Shared(p_s, maxima_s, factors_s, exists_s, own_s)
        tid = int32(cuda.threadIdx.x)
        batch = Batch(lengths_B, tables, int32(B), int32(G), int32(M), int32(R))
        inputs = Inputs(qkv, q_w_D, k_w_D, cos, sin, eps)
        if overlap:
            let_next_start()
            if not ready:
                wait_for_previous()
        step = int32(cuda.gridDim.x)
        end = int32(batch.B * batch.G * CHUNKS)
        first = next_busy(int32(cuda.blockIdx.x), end, step, batch)
        if tid >= THREADS:
            copy_all(smem, shared, k, v, batch, first, end, step)
        else:
            for i in range(tid, PADDING, THREADS):
                smem[Q + i] = uint16(0)  # the rows of absent heads
            if overlap and ready:
                wait_for_previous()  # it produces qkv
            compute_all(o, smem, shared, k, v, inputs, batch, first, end, step, scale * LOG2E)
        for i in range(int32(cuda.blockIdx.x), end, step):
            item = item_of(i, batch, CHUNKS)
            if item.t < 0 and item.h0 == 0 and tid < THREADS:
                store_idle(o, batch, item)

    return exact_decode_attention_kernel


def exact_decode_attention(
    o_BC, qkv_BP, k_RGSD, v_RGSD, lengths_B, tables_BM, cos, sin, weights, eps, scale, ready, window
) -> Array:
    """Fill o (B, H D) on a GPU. Arguments as in decode_attention, which has checked them.

    cos, sin: flat. weights: of QK-norm, () without.
    """
    R, G, S, D = k_RGSD.shape
    B, P = qkv_BP.shape
    H = P // D - 2 * G
    check(on_16_bytes(qkv_BP, cos, sin, *weights), "decode_attention: unaligned arrays")
    overlap = can_overlap(qkv_BP)
    group = H // G
    exact_kernel = make_exact_kernel(D, S, group, bool(weights), overlap, ready, window)
    q_w, k_w = weights or (cos, cos)  # a kernel argument must not be None
    items = B * G * -(-group // MOST_HEADS)
    grid = min(items, BLOCKS[D] * multiprocessors(qkv_BP))
    arrays = [x.reshape(-1) for x in (o_BC, k_RGSD, v_RGSD, qkv_BP)]
    arrays += [lengths_B, tables_BM.reshape(-1), q_w, k_w, cos, sin]
    scalars = B, G, tables_BM.shape[1], R, np.float32(eps), np.float32(scale)
    block = threads(D)
    launch(exact_kernel, grid, block, *arrays, *scalars, shared=shared_bytes(D), overlap=overlap)
    return o_BC
