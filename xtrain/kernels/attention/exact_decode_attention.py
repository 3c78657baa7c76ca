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
cache: the block computes them when an item begins, writes them to the cache and into the tile. With
rows of one sequence (`previous`) it also computes those of the earlier rows, and writes them into its
tiles only: no block reads from the cache what another one of the launch writes.

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
    store_pair_shared,
    warp_id,
)
from ..primitives.tiles import CHUNK, make_chunk_offset, make_left_lane, make_scores
from ..runtime.compiler import cuda, float32, int32, int64, uint16, uint32
from ..runtime.launch import can_overlap, check, launch, multiprocessors
from .decode_attention_parts import count_earlier
from .exact_decode_attention_parts import (
    MOST_HEADS,
    STAGES,
    Batch,
    Inputs,
    Item,
    make_earlier_heads,
    make_new_heads,
)
from .flash_attention_hopper_table import EXACT_STEP

LOG2E = float32(math.log2(math.e))
LOWEST = float32(-1e30)  # initial maximum; with -inf, -inf - -inf would be NaN
NAN = np.float32(np.nan)
AHEAD = STAGES - 2  # tiles that may be in flight when one is computed
BLOCKS = {64: 3, 128: 1}  # per multiprocessor, by D: as many as shared memory holds
PAD = 8  # floats between the rows of P in float32
# Words of a small array. The dynamic shared memory begins behind the static arrays, and ldmatrix's
# tiles need a multiple of 256 bytes (tiles.py): so every static array is one.
ROUNDED = 64


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
    copy_tile(smem, stage, k, v, entries, pages, n0, item, old)
        start to copy keys and values n0 .. n0 + BN - 1 into a stage; zeros from key `old` on and
        for those before the first key. entries: of look_up
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
    def copy_tile(smem, stage, k, v, entries, pages, n0, item, old):
        tid = int32(cuda.threadIdx.x) - 2 * BN
        row = int32(tid // CHUNKS)  # of 8 rows
        chunk = int32(tid % CHUNKS)
        target = int32(stage * STAGE + chunk_offset(row, chunk))
        for i in range(PASSES):
            source = start_of(entries[i], n0 + 16 * i + row, pages) + chunk * CHUNK
            for half in range(2):
                key = int32(n0 + 16 * i + 8 * half + row)
                inside = key < old and key >= item.lo
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
def make_exact_kernel(D, S, GROUP, normalise, overlap, ready, WINDOW=0, RELATED=False):
    """Return the kernel. Launch with threads(D) and shared_bytes(D).

    S: tokens of a block of the cache.  GROUP: H / G.  normalise: QK-norm.
    overlap: the kernel may start before the previous one has ended.
    ready: lengths, tables and the cache may be read before that.
    RELATED: rows may be successive tokens of one sequence.
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
    earlier_heads = make_earlier_heads(D, GROUP, normalise)
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
    def first_new(batch, item):
        """Return the first position whose key is computed in this launch."""
        if RELATED and item.t > 0:
            return int32(item.t - count_earlier(batch.previous, item.b, item.t))
        return item.t

    @device
    def copy_all(smem, shared, k, v, batch, first, end, step):
        """What the last warps do: copy the tiles of all items, STAGES - 1 ahead of the products."""
        entries = cuda.local.array(PASSES, uint32)
        number = first
        item = item_of(min(number, int32(end - 1)), batch, CHUNKS)
        pages = pages_of(batch, item)
        n0 = int32(item.t // BN * BN)
        old = first_new(batch, item)
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
                copy_tile(smem, stage, k, v, entries, pages, n0, item, old)
                copied = int32(copied + 1)
                n0 = int32(n0 - BN)
                if n0 + BN <= item.lo or n0 < 0:
                    number = next_busy(int32(number + step), end, step, batch)
                    if number < end:
                        item = item_of(number, batch, CHUNKS)
                        pages = pages_of(batch, item)
                        n0 = int32(item.t // BN * BN)
                        old = first_new(batch, item)
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
            old = first_new(batch, item)
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
                if RELATED and old < item.t and old < n0 + BN:
                    earlier_heads(smem, stage, inputs, item, batch, n0, old)
                    bar_sync(1, THREADS)  # these keys and values
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
        o, k, v, qkv, lengths_B, tables, previous_B, q_w_D, k_w_D, cos, sin, B, G, M, R, eps, scale
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
        batch = Batch(lengths_B, tables, previous_B, int32(B), int32(G), int32(M), int32(R))
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
    o_BC,
    qkv_BP,
    k_RGSD,
    v_RGSD,
    lengths_B,
    tables_BM,
    cos,
    sin,
    weights,
    eps,
    scale,
    ready,
    window,
    previous_B,
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
    variant = D, S, group, bool(weights), overlap, ready, window
    exact_kernel = make_exact_kernel(*variant, previous_B is not None)
    q_w, k_w = weights or (cos, cos)  # a kernel argument must not be None
    items = B * G * -(-group // MOST_HEADS)
    grid = min(items, BLOCKS[D] * multiprocessors(qkv_BP))
    arrays = [x.reshape(-1) for x in (o_BC, k_RGSD, v_RGSD, qkv_BP)]
    previous = lengths_B if previous_B is None else previous_B
    arrays += [lengths_B, tables_BM.reshape(-1), previous, q_w, k_w, cos, sin]
    scalars = B, G, tables_BM.shape[1], R, np.float32(eps), np.float32(scale)
    block = threads(D)
    launch(exact_kernel, grid, block, *arrays, *scalars, shared=shared_bytes(D), overlap=overlap)
    return o_BC
