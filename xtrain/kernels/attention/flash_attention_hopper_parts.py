"""What the FlashAttention kernels for compute capability 9.0 share: who takes which tile, who loads, masks, output rows.

A block is one producer thread and WGS consumer warpgroups. The producer streams tiles by TMA into a ring of stages in shared
memory; a consumer warpgroup owns 64 rows of the result. Two mbarriers hand a stage over: FULL (the bytes have come) and FREE
(every warp has done with it). Each is waited for by the parity of its phase: a stage is used for the (i // STAGES)-th time, so
FULL's phase has that parity, and FREE's the other, which passes the first time round. The tiles that a block owns, OWN at a
time, are handed over in the same way: with OWN = 2 the next one's operands come while this one's results leave.

Blocks are as many as the GPU holds at a time. Each takes the next tile from a counter in global memory when it is free; so long
tiles (the last queries of a causal mask) start first and short ones fill the end. No sum runs across tiles: whoever computes one,
the bits are the same.
"""

import functools
import math

from numba import cuda, float32, int32, uint32

from ..primitives.hopper import (
    PANEL,
    acquire_map,
    commit_stores,
    fence_async,
    load_tile,
    mbar_arrive,
    mbar_expect,
    mbar_init,
    mbar_init_fence,
    mbar_wait,
    post,
    read_post,
    store_shared,
    store_tile,
    wait_stores,
)
from ..primitives.ptx import device, wait_for_previous
from ..primitives.reduce import FULL
from ..primitives.tensor_cores import opaque, pack_bf16
from ..primitives.tensor_maps import tensors_of
from ..runtime.cost import attention_flops, declare_cost, distinct_bytes

LOG2E, LN2 = float32(math.log2(math.e)), float32(math.log(2))
NEG_INF = float32(-math.inf)
LOWEST = float32(-1e30)  # the first maximum; with -inf, -inf - -inf would be NaN
HEADER = 1024  # bytes before the first tile: barriers, the number of the tile in work
TILE_FULL, TILE_FREE, TILE = 0, 8, 16  # a tile that the block owns: its barriers, its number
NEXT_TILE = 24  # those of another one; after the last, the barriers of the stages, 8 bytes each
SIDE = 16  # rows of lse log2 e, then SIDE of delta, then the next of lse log2 e: statistics for backward
PANEL_ROW = 128  # bytes of a row of a panel


def registers(warpgroups: int, per_sm: int, producer: int = 0) -> tuple[int, int]:
    """-> registers of a producer's and of a consumer's thread: together no more than the launch gives the block.

    (A setmaxnreg that asks for more waits for ever.) A launch gives all threads alike, in eights.
    """
    producer = producer or (32 if warpgroups == 3 else 40)
    alike = 65536 // (128 * (warpgroups + 1) * per_sm) // 8 * 8
    consumer = (alike * (warpgroups + 1) - producer) // warpgroups // 8 * 8
    return producer, min(consumer, 240)


def declare_mapped_cost(kernel, products: int, causal: bool) -> None:
    """For kernels whose first argument are the tensor maps of Q, K, ...: they move every mapped tensor once, and multiply
    `products` matrices of T x S x D for each head."""

    def nbytes(maps, *rest):
        return distinct_bytes(maps, *rest) + sum(size for _, size in tensors_of(maps))

    def flops(maps, *_):
        (D, H, T, B), (_, _, S, _) = (dims for dims, _ in tensors_of(maps)[:2])
        return attention_flops(products, B * T * H * D, T, S, causal)

    declare_cost(kernel, nbytes=nbytes, flops=flops)


# ----------------------------------------------------------------------------- who does which tile
@device
def split(i, n):
    """-> i // n, i % n of numbers that are not negative; unsigned, a division of 32 bits is enough"""
    quotient = int32(uint32(i) // uint32(n))
    return quotient, int32(i - quotient * n)


@device
def find_tile(tile, blocks, planes, together):
    """Number of a tile -> (block, plane): block 0 of `together` planes, then their block 1 ..., then the next planes.

    So what the blocks at work read at one time fits the second-level cache.
    """
    turn, rest = split(tile, together * blocks)
    width = planes - turn * together
    if width > together:
        width = together
    block, plane = split(rest, width)
    return block, turn * together + plane


@device
def next_tile(counter):
    """Block b begins with tile b; whoever is free takes the next one. counter: two zeros"""
    return int32(cuda.gridDim.x + cuda.atomic.add(counter, 0, 1))


@device
def leave(counter):
    """The last block to leave sets the counter back, for the next launch."""
    cuda.threadfence()
    if cuda.atomic.add(counter, 1, 1) == cuda.gridDim.x - 1:
        cuda.atomic.exch(counter, 0, 0)
        cuda.atomic.exch(counter, 1, 0)


@functools.cache
def make_own(OWN):
    """A block's tiles, of which OWN have a place in its shared memory. done: how many came before

    offer_tile(base, done, tile)    the producer waits for a place and writes the number there -> address of its barriers
    await_tile(base, done)          -> the number, when the tile's operands are there
    free_tile(base, done)           a warp has done with its place
    """

    @device
    def offer_tile(base, done, tile):
        barriers = base + NEXT_TILE * (done % OWN)
        mbar_wait(barriers + TILE_FREE, ((done // OWN) & 1) ^ 1)
        post(barriers + TILE, tile)  # consumers read it after TILE_FULL
        return barriers

    @device
    def await_tile(base, done):
        barriers = base + NEXT_TILE * (done % OWN)
        mbar_wait(barriers + TILE_FULL, (done // OWN) & 1)
        return cuda.shfl_sync(FULL, read_post(barriers + TILE), 0)

    @device
    def free_tile(base, done):
        mbar_arrive(base + NEXT_TILE * (done % OWN) + TILE_FREE)

    return offer_tile, await_tile, free_tile


@functools.cache
def make_barriers(ARRIVALS, OWN, FULLS, FREES):
    """-> set_up(base): one thread makes the block's barriers. FULLS, FREES: where those of the stages lie"""
    N = len(FULLS)

    @device
    def set_up(base):
        if cuda.threadIdx.x == 0:
            for i in range(OWN):
                mbar_init(base + NEXT_TILE * i + TILE_FULL, 1)
                mbar_init(base + NEXT_TILE * i + TILE_FREE, ARRIVALS)
            for i in range(N):
                mbar_init(base + FULLS[i], 1)
                mbar_init(base + FREES[i], ARRIVALS)
            mbar_init_fence()
        cuda.syncthreads()

    return set_up


# ----------------------------------------------------------------------------- forward and dQ: queries own, keys pass
@functools.cache
def make_layout(D, config, queries):
    """-> (bytes of: Q (and dO), the output, the ring of K, the ring of V, all), where stage barriers lie

    queries: 1, or 2 if a tile is one of Q and one of dO. (dO follows Q, the next tile's Q follows both.)
    """
    BN, WGS, STAGES, _, OWN = config
    own, ring = 64 * WGS * D * 2, BN * D * 2
    out = HEADER + OWN * queries * own
    k = out + own
    v = k + STAGES * ring
    k_full, k_free, v_full, v_free = (NEXT_TILE * OWN + 8 * STAGES * i for i in range(4))
    return HEADER, out, k, v, v + STAGES * ring, (k_full, k_free, v_full, v_free)


@functools.cache
def make_keys(BM, BN, CAUSAL):
    """-> key_blocks(q0, T, S): blocks of BN keys that the BM queries from q0 on see. The last query sees the most."""

    @device
    def key_blocks(q0, T, S):
        end = S
        if CAUSAL and q0 + BM < T:
            end = q0 + BM + S - T
        return int32(uint32(end + BN - 1) // uint32(BN))

    return key_blocks


@functools.cache
def make_skip(D, CAUSAL, config, QUERIES):
    """-> skip(base, it, blocks, w0, T, S): (it, blocks) without the last blocks of keys, those that no query of the warpgroup
    sees which owns rows w0 ... w0 + 63: their stages are given back as they are.
    """
    BN, _, STAGES = config[:3]
    K_FULL, K_FREE, V_FULL, V_FREE = make_layout(D, config, QUERIES)[5]

    @device
    def skip(base, it, blocks, w0, T, S):
        last = int32(S - 1)  # the last key that counts
        if CAUSAL:
            last = int32(w0 + 63 + S - T)
        if w0 >= T:  # no queries at all
            last = int32(0)
        while (blocks - 1) * BN > last:
            stage, phase = it % STAGES, (it // STAGES) & 1
            mbar_wait(base + K_FULL + 8 * stage, phase)
            mbar_wait(base + V_FULL + 8 * stage, phase)
            cuda.syncwarp()  # all lanes have seen this phase
            mbar_arrive(base + K_FREE + 8 * stage)
            mbar_arrive(base + V_FREE + 8 * stage)
            it += uint32(1)
            blocks = int32(blocks - 1)
        return it, blocks

    return skip


@functools.cache
def make_key_producer(D, CAUSAL, config, QUERIES):
    """-> produce(base, maps, counter, T, S, B, H, group, together): the producer thread of forward and dQ.

    QUERIES: tiles of queries that a block owns: Q (map 0), and dO (map 3). Maps 1 and 2: K and V. Where two tiles have a
    place, the first keys of the next are asked for before its place is free.
    """
    BN, WGS, STAGES, _, OWN = config
    EARLY = OWN > 1
    BM, PANELS = 64 * WGS, D // PANEL
    ROWS, RING = BM * D * 2, BN * D * 2  # bytes
    OWN_PANEL, RING_PANEL = BM * PANEL_ROW, BN * PANEL_ROW
    Q, _, K, V, _, (K_FULL, K_FREE, V_FULL, V_FREE) = make_layout(D, config, QUERIES)
    key_blocks, offer_tile = make_keys(BM, BN, CAUSAL), make_own(OWN)[0]

    @device
    def load_own(to, full, maps, q0, h, b):
        mbar_expect(full, QUERIES * ROWS)
        for p in range(PANELS):
            load_tile(to + p * OWN_PANEL, maps, 0, full, PANEL * p, q0, h, b)
            if QUERIES == 2:
                load_tile(to + ROWS + p * OWN_PANEL, maps, 3, full, PANEL * p, q0, h, b)

    @device
    def load_keys(ring, full, free, maps, i, it, n0, g, b):
        stage = it % STAGES
        mbar_wait(free + 8 * stage, ((it // STAGES) & 1) ^ 1)
        full, to = full + 8 * stage, ring + stage * RING
        mbar_expect(full, RING)
        for p in range(PANELS):
            load_tile(to + p * RING_PANEL, maps, i, full, PANEL * p, n0, g, b)

    @device
    def produce(base, maps, counter, T, S, B, H, group, together):
        blocks_m, planes = (T + BM - 1) // BM, B * H
        for i in range(2 + QUERIES):
            acquire_map(maps, i)
        it, done, tile = uint32(0), uint32(0), int32(cuda.blockIdx.x)
        while tile < blocks_m * planes:
            m, bh = find_tile(tile, blocks_m, planes, together)
            q0, (b, h) = int32((blocks_m - 1 - m) * BM), split(bh, H)
            g = split(h, group)[0]
            n0 = int32((key_blocks(q0, T, S) - 1) * BN)
            k, v = base + K, base + V
            if EARLY:
                load_keys(k, base + K_FULL, base + K_FREE, maps, 1, it, n0, g, b)
            barriers = offer_tile(base, done, tile)
            place = base + Q + QUERIES * ROWS * (done % OWN)
            load_own(place, barriers + TILE_FULL, maps, q0, h, b)
            if not EARLY:
                load_keys(k, base + K_FULL, base + K_FREE, maps, 1, it, n0, g, b)
            while opaque(n0) >= 0:
                load_keys(v, base + V_FULL, base + V_FREE, maps, 2, it, n0, g, b)
                it += uint32(1)
                n0 = int32(n0 - BN)
                if n0 >= 0:
                    load_keys(k, base + K_FULL, base + K_FREE, maps, 1, it, n0, g, b)
            done += uint32(1)
            wait_for_previous()  # it may be this kernel, with the same counter
            tile = next_tile(counter)
        mbar_expect(offer_tile(base, done, tile) + TILE_FULL, 0)  # there is none: consumers stop
        leave(counter)

    return produce


# ----------------------------------------------------------------------------- in registers
@functools.cache
def make_elements(COLUMNS):
    """On an accumulator of COLUMNS columns (see _hopper.py): clear, pack, hide_after, hide_before"""
    SIZE, GROUPS = COLUMNS // 2, COLUMNS // 8

    @device
    def clear(acc):
        for i in range(SIZE):
            acc[i] = float32(0.0)

    @device
    def pack(a, acc):
        """acc in bf16, as a left operand"""
        for i in range(SIZE // 2):
            a[i] = pack_bf16(acc[2 * i], acc[2 * i + 1])

    @device
    def hide_after(s, last, row_step):
        """-inf in columns after `last`, in the lane's second row after last + row_step; both from its first column on"""
        for n in range(GROUPS):
            for r in range(2):
                for c in range(2):
                    i = 4 * n + 2 * r + c
                    s[i] = cuda.selp(int32(8 * n + c) > int32(last + row_step * r), NEG_INF, s[i])

    @device
    def hide_before(s, first):
        """-inf in columns before `first`, in the lane's second row, 8 further, before first + 8"""
        for n in range(GROUPS):
            for r in range(2):
                for c in range(2):
                    i = 4 * n + 2 * r + c
                    s[i] = cuda.selp(int32(8 * n + c) < int32(first + 8 * r), NEG_INF, s[i])

    return clear, pack, hide_after, hide_before


@functools.cache
def make_store(D):
    """Results leave through shared memory, a warp's 16 rows at a time.

    store_rows(acc, factor, at, panel, maps, i, row, h, b)  bf16(acc factor[half]) of the 16 rows -> shared addresses from
                                                            `at`, panels `panel` apart -> rows from `row` on of map i
    stores_done()                                           the shared rows may be written again
    """
    PANELS = D // PANEL

    @device
    def store_rows(acc, factor, at, panel, maps, i, row, h, b):
        lane = int32(cuda.threadIdx.x & 31)
        g = lane >> 2
        at = uint32(
            opaque(int32(at))
        )  # else its addresses are worked out, and spilled, before the loop
        for p in range(PANELS):
            for n in range(8):
                for r in range(2):
                    j = 32 * p + 4 * n + 2 * r
                    place = PANEL_ROW * (g + 8 * r) + ((n ^ g) << 4) + 4 * (lane & 3)
                    pair = pack_bf16(acc[j] * factor[r], acc[j + 1] * factor[r])
                    store_shared(at + p * panel + place, pair)
        fence_async()
        cuda.syncwarp()
        if lane == 0:
            for p in range(PANELS):
                store_tile(maps, i, at + p * panel, PANEL * p, row, h, b)
            commit_stores()

    @device
    def stores_done():
        if cuda.threadIdx.x & 31 == 0:
            wait_stores()
        cuda.syncwarp()

    return store_rows, stores_done
