"""Common parts of the FlashAttention kernels for compute capability 9.0: scheduling of tiles,
loads, masks, stores of results.

A block is one producer thread and WGS consumer warpgroups. The producer streams tiles by TMA into a
ring of stages in shared memory; a consumer warpgroup owns 64 rows of the result. Two mbarriers
synchronize each stage: FULL (the bytes have arrived) and FREE (every warp has finished with it). A
wait names the parity of a barrier's phase. Iteration i uses its stage for the (i // STAGES)-th
time: FULL is waited for with the parity of that number, FREE with the opposite one, so the first
round of the ring does not wait. The tiles that a block owns, OWN at a time, are synchronized in the
same way: with OWN = 2, the next tile's operands load while this tile's results are stored.

A launch starts as many blocks as the GPU holds at once. Each block takes the next tile from a
counter in global memory when it is idle; so long tiles (the last queries of a causal mask) start
first and short ones fill the end. No sum runs across tiles, so the result does not depend on which
block computes a tile.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from ..primitives.hopper import (
    PANEL,
    acquire_map,
    bar_sync,
    clear_shared,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
    post,
    read_post,
    tma_load,
)
from ..primitives.hopper_tiles import PANEL_ROW, find_tile, make_set_up, split
from ..primitives.ptx import device, wait_for_previous
from ..primitives.reduce import FULL
from ..primitives.tensor_cores import opaque, pack_bf16
from ..primitives.tma import tensors_of
from ..runtime.compiler import cuda, float32, int32, int64, uint32
from ..runtime.cost import attention_flops, declare_cost, distinct_bytes
from .flash_attention_hopper_sequences import make_sequences
from .flash_attention_hopper_table import HopperTiles
from .key_bounds import make_first_key

LOG2E = float32(math.log2(math.e))
LN2 = float32(math.log(2))
NEG_INF = float32(-math.inf)
LOWEST = float32(-1e30)  # initial maximum; with -inf, -inf - -inf would be NaN
HEADER = 1024  # bytes before the first tile: barriers, the numbers of the owned tiles
# byte offsets of an owned tile's barriers and of its number
TILE_FULL = 0
TILE_FREE = 8
TILE = 16
# bytes from one owned tile's entry to the next; after the last: barriers of the stages, 8 bytes
# each
NEXT_TILE = 24
# statistics for backward alternate: SIDE rows of lse log2 e, SIDE rows of delta, the next SIDE of
# lse log2 e
SIDE = 16


def declare_mapped_cost(kernel, products: int, causal: bool, window: int = 0) -> None:
    """Declare the cost of a kernel whose first argument is the tensor maps of Q, K, ....

    It moves every mapped tensor once and multiplies `products` matrices of T x S x D per head.
    """

    def nbytes(maps, *rest):
        return distinct_bytes(maps, *rest) + sum(size for _, size in tensors_of(maps))

    def flops(maps, *_):
        (D, H, T, B), (_, _, S, _) = (dims for dims, _ in tensors_of(maps)[:2])
        return attention_flops(products, B * T * H * D, T, S, causal, window)

    declare_cost(kernel, nbytes=nbytes, flops=flops)


# ------------------------------------------------------------------ which block computes which tile
@device
def next_tile(counter):
    """Return the next tile for a block that is free. Block b begins with tile b. counter: two zeros
    before the launch"""
    return int32(cuda.gridDim.x + cuda.atomic.add(counter, 0, 1))


@device
def leave(counter):
    """The last block to finish resets the counter for the next launch."""
    cuda.threadfence()
    if cuda.atomic.add(counter, 1, 1) == cuda.gridDim.x - 1:
        cuda.threadfence()  # the additions of all blocks to counter[0] come before its reset
        cuda.atomic.exch(counter, 0, 0)
        cuda.atomic.exch(counter, 1, 0)


@dataclass(frozen=True)
class OwnedTiles:
    """Device functions that pass a block's tiles from the producer to the consumers. done: number
    of tiles before this one

    offer(base, done, tile) -> address of its barriers
        the producer waits for a free buffer and writes the tile's number
    wait(base, done)           a consumer waits for the tile's operands -> the tile's number
    free(base, done)           a warp has finished with the tile's operands
    """

    offer: Callable
    wait: Callable
    free: Callable


@functools.cache
def make_own(OWN: int) -> OwnedTiles:
    """Return the functions for OWN buffers in shared memory"""

    @device
    def offer_tile(base, done, tile):
        barriers = base + NEXT_TILE * (done % OWN)
        mbarrier_wait(barriers + TILE_FREE, ((done // OWN) & 1) ^ 1)
        post(barriers + TILE, tile)  # consumers read it after TILE_FULL
        return barriers

    @device
    def await_tile(base, done):
        barriers = base + NEXT_TILE * (done % OWN)
        mbarrier_wait(barriers + TILE_FULL, (done // OWN) & 1)
        return cuda.shfl_sync(FULL, read_post(barriers + TILE), 0)

    @device
    def free_tile(base, done):
        mbarrier_arrive(base + NEXT_TILE * (done % OWN) + TILE_FREE)

    return OwnedTiles(offer_tile, await_tile, free_tile)


@functools.cache
def make_barriers(ARRIVALS, OWN, FULLS, FREES):
    """Return set_up(base): one thread initializes the block's barriers. FULLS, FREES: byte offsets
    of those of the stages"""
    own_fulls = tuple(NEXT_TILE * i + TILE_FULL for i in range(OWN))
    own_frees = tuple(NEXT_TILE * i + TILE_FREE for i in range(OWN))
    return make_set_up(ARRIVALS, own_fulls + FULLS, own_frees + FREES)


# ------------------------------------------------ forward and dQ: a block owns queries, keys stream
@dataclass(frozen=True)
class KeyLayout:
    """Byte offsets in a block's shared memory, forward and dQ."""

    q: int  # the owned tile of Q (and dO), then the next owned tile
    out: int  # the output on its way to global memory
    k: int  # the ring of K
    v: int  # the ring of V
    total: int  # bytes of shared memory
    k_full: int  # barriers of the stages
    k_free: int
    v_full: int
    v_free: int


@functools.cache
def key_layout(D: int, tiles: HopperTiles, queries: int) -> KeyLayout:
    """queries: 1 if a block owns a tile of Q (forward), 2 if it owns one of Q and one of dO, which
    follows Q."""
    stages = tiles.stages
    own = tiles.rows * D * 2
    ring = tiles.step * D * 2
    out = HEADER + tiles.own * queries * own
    k = out + own
    v = k + stages * ring
    barriers = (NEXT_TILE * tiles.own + 8 * stages * i for i in range(4))
    return KeyLayout(HEADER, out, k, v, v + stages * ring, *barriers)


@functools.cache
def make_keys(BM, BN, CAUSAL, KIND=0):
    """Return key_blocks, first_block, row_bounds: the BM queries from q0 on see the blocks
    first_block .. key_blocks - 1 of BN keys

    key_blocks(q0, T, S), first_block(first, i, q0, T, S): the last query sees the latest key, the
    first one the earliest row_bounds(lo, first, i, row, w0, T, S) -> first key that query w0 + 63
    sees; lo[r]: that of the lane's rows `row`, row + 8
    """
    first_key = make_first_key(KIND)

    @device
    def key_blocks(q0, T, S):
        end = S
        if CAUSAL and q0 + BM < T:
            end = q0 + BM + S - T
        return int32(uint32(end + BN - 1) // uint32(BN))

    @device
    def first_block(first, i, q0, T, S):
        if KIND == 0:
            return int32(0)
        return int32(uint32(first_key(first, i, q0, S - T)) // uint32(BN))

    @device
    def row_bounds(lo, first, i, row, w0, T, S):
        if KIND == 0:
            return int32(0)
        for r in range(2):
            lo[r] = first_key(first, i, min(row + 8 * r, T - 1), S - T)
        return first_key(first, i, min(w0 + 63, T - 1), S - T)

    return key_blocks, first_block, row_bounds


@functools.cache
def make_skip(D: int, CAUSAL: bool, tiles: HopperTiles, QUERIES: int):
    """Return skip(base, it, blocks, begin, w0, T, S) -> (it, blocks) without the last blocks, which
    this warpgroup does not see.

    The warpgroup owns the queries w0 ... w0 + 63; `begin` is the first of the blocks. It frees the
    stages of the skipped blocks without reading them.
    """
    BN = tiles.step
    STAGES = tiles.stages
    layout = key_layout(D, tiles, QUERIES)
    K_FULL = layout.k_full
    K_FREE = layout.k_free
    V_FULL = layout.v_full
    V_FREE = layout.v_free

    @device
    def skip(base, it, blocks, begin, w0, T, S):
        last = int32(S - 1)  # the last key that is visible
        if CAUSAL:
            last = int32(w0 + 63 + S - T)
        if w0 >= T:  # the warpgroup has no queries
            last = int32(0)
        while (blocks - 1) * BN > last and blocks - 1 > begin:
            stage = it % STAGES
            phase = (it // STAGES) & 1
            mbarrier_wait(base + K_FULL + 8 * stage, phase)
            mbarrier_wait(base + V_FULL + 8 * stage, phase)
            cuda.syncwarp()  # all lanes have seen this phase
            mbarrier_arrive(base + K_FREE + 8 * stage)
            mbarrier_arrive(base + V_FREE + 8 * stage)
            it += uint32(1)
            blocks = int32(blocks - 1)
        return it, blocks

    return skip


@functools.cache
def make_key_producer(
    D: int, CAUSAL: bool, tiles: HopperTiles, QUERIES: int, PAGE: int = 0, KIND: int = 0
):
    """Return produce(base, maps, counter, bounds, where, T, B, H, group, together): the producer
    thread of forward and dQ.

    where, PAGE: see make_sequences. bounds, KIND: see key_bounds.py. T: queries of the longest
    sequence.

    QUERIES: 1 loads Q (map 0), 2 also dO (map 3). Maps 1 and 2: K and V. With OWN = 2, the first
    keys of the next tile are requested before its buffer is free.
    """
    BM = tiles.rows
    BN = tiles.step
    STAGES = tiles.stages
    OWN = tiles.own
    EARLY = OWN > 1
    PANELS = D // PANEL
    ROWS, RING = BM * D * 2, BN * D * 2  # bytes
    OWN_PANEL, RING_PANEL = BM * PANEL_ROW, BN * PANEL_ROW
    layout = key_layout(D, tiles, QUERIES)
    Q = layout.q
    K = layout.k
    V = layout.v
    K_FULL = layout.k_full
    K_FREE = layout.k_free
    V_FULL = layout.v_full
    V_FREE = layout.v_free
    key_blocks, first_block, _ = make_keys(BM, BN, CAUSAL, KIND)
    offer_tile = make_own(OWN).offer
    sequences = make_sequences(BN, PAGE)
    BOX = sequences.BOX
    size = sequences.size
    look_up = sequences.look_up
    place = sequences.place
    BOXES = BN // BOX

    @device
    def load_own(to, full, maps, row, h, b):
        mbarrier_arrive_expect_tx(full, QUERIES * ROWS)
        for p in range(PANELS):
            tma_load(to + p * OWN_PANEL, maps, 0, full, PANEL * p, row, h, b)
            if QUERIES == 2:
                tma_load(to + ROWS + p * OWN_PANEL, maps, 3, full, PANEL * p, row, h, b)

    @device
    def load_keys(ring, full, free, maps, i, it, n0, g, b, entries, where):
        stage = it % STAGES
        mbarrier_wait(free + 8 * stage, ((it // STAGES) & 1) ^ 1)
        full = full + 8 * stage
        to = ring + stage * RING
        mbarrier_arrive_expect_tx(full, RING)
        for j in range(BOXES):
            row, head, batch = place(entries, j, where, b, g, n0)
            for p in range(PANELS):
                at = to + p * RING_PANEL + j * (BOX * PANEL_ROW)
                tma_load(at, maps, i, full, PANEL * p, row, head, batch)

    @device
    def produce(base, maps, counter, bounds, where, T, B, H, group, together):
        blocks_m = (T + BM - 1) // BM
        planes = B * H
        for i in range(2 + QUERIES):
            acquire_map(maps, i)
        it = uint32(0)
        done = uint32(0)
        tile = int32(cuda.blockIdx.x)
        entries = cuda.local.array(
            BOXES, uint32
        )  # blocks of the tile of keys n0, and of the next one
        next_entries = cuda.local.array(BOXES, uint32)
        k, v = base + K, base + V
        while tile < blocks_m * planes:
            m, bh = find_tile(tile, blocks_m, planes, together)
            q0 = int32((blocks_m - 1 - m) * BM)
            b, h = split(bh, H)
            g = split(h, group)[0]
            mine, S, first, batch, state = size(where, b)
            if q0 < mine:
                n0 = int32((key_blocks(q0, mine, S) - 1) * BN)
                begin = int32(first_block(bounds, int64(b) * int64(T), q0, mine, S) * BN)
                look_up(entries, where, b, n0, S, state)
                if EARLY:
                    load_keys(
                        k, base + K_FULL, base + K_FREE, maps, 1, it, n0, g, b, entries, where
                    )
                barriers = offer_tile(base, done, tile)
                to = base + Q + QUERIES * ROWS * (done % OWN)
                load_own(to, barriers + TILE_FULL, maps, first + q0, h, batch)
                if not EARLY:
                    load_keys(
                        k, base + K_FULL, base + K_FREE, maps, 1, it, n0, g, b, entries, where
                    )
                while opaque(n0) >= begin:
                    # arrives while V's stage is waited for
                    look_up(next_entries, where, b, n0 - BN, S, state)
                    load_keys(
                        v, base + V_FULL, base + V_FREE, maps, 2, it, n0, g, b, entries, where
                    )
                    it += uint32(1)
                    n0 = int32(n0 - BN)
                    for i in range(BOXES):
                        entries[i] = next_entries[i]
                    if n0 >= begin:
                        load_keys(
                            k, base + K_FULL, base + K_FREE, maps, 1, it, n0, g, b, entries, where
                        )
                done += uint32(1)
            wait_for_previous()  # the previous kernel may be this one, with the same counter
            tile = next_tile(counter)
        offered = offer_tile(base, done, tile)
        mbarrier_arrive_expect_tx(offered + TILE_FULL, 0)  # no more tiles: consumers stop
        leave(counter)

    return produce


@functools.cache
def make_clear_tail(D: int, tiles: HopperTiles, PAGE: int):
    """Return clear_tail(base, it, n0, S): all consumers zero the rows of V behind the last key, S -
    1, in the tile of keys n0.

    A block of a cache keeps there what earlier sequences left, and 0 NaN is NaN. `it`: the
    iteration that brings the tile.
    """
    BN = tiles.step
    STAGES = tiles.stages
    CONSUMERS = 128 * tiles.warpgroups
    CHUNKS = D // 8
    layout = key_layout(D, tiles, 1)
    RING = BN * D * 2
    PANEL_BYTES = BN * PANEL_ROW
    BOX = math.gcd(BN, PAGE)
    V = layout.v
    V_FULL = layout.v_full

    @device
    def clear_tail(base, it, n0, S):
        stage = it % STAGES
        phase = (it // STAGES) & 1
        first = int32(S - n0)
        end = int32((S + BOX - 1) // BOX * BOX - n0)
        end = min(end, int32(BN))
        mbarrier_wait(base + V_FULL + 8 * stage, phase)
        for i in range(int32(cuda.threadIdx.x), (end - first) * CHUNKS, CONSUMERS):
            row = first + i // CHUNKS
            chunk = i % CHUNKS
            at = (chunk // 8) * PANEL_BYTES + row * PANEL_ROW + (chunk % 8) * 16
            clear_shared(uint32(base + V + stage * RING + at))
        fence_proxy_async()  # the products read what these threads have written
        bar_sync(1, CONSUMERS)

    return clear_tail


# ----------------------------------------------------------------------------- in registers
@dataclass(frozen=True)
class Elements:
    """Device functions on an accumulator; primitives/hopper.py shows which elements a lane holds.

    clear(acc)                          zeros
    pack(a, acc)                        acc in bf16, as a left operand
    hide_after(s, last, row_step)
        -inf in columns after `last`; in the lane's second row, after last + row_step
    hide_before(s, first)
        -inf in columns before `first`; in the lane's second row, before first + 8
    hide_below(s, lo, at)               -inf in columns before lo[r] - at; r: the lane's row
    hide_above(s, hi, at)               -inf in columns after hi[r] - at
    Columns are counted from the lane's first one.
    """

    clear: Callable
    pack: Callable
    hide_after: Callable
    hide_before: Callable
    hide_below: Callable
    hide_above: Callable


@functools.cache
def make_elements(COLUMNS: int) -> Elements:
    """Return the functions for an accumulator of COLUMNS columns"""
    SIZE, GROUPS = COLUMNS // 2, COLUMNS // 8

    @device
    def clear(acc):
        for i in range(SIZE):
            acc[i] = float32(0.0)

    @device
    def pack(a, acc):
        for i in range(SIZE // 2):
            a[i] = pack_bf16(acc[2 * i], acc[2 * i + 1])

    @device
    def hide_after(s, last, row_step):
        for n in range(GROUPS):
            for r in range(2):
                for c in range(2):
                    i = 4 * n + 2 * r + c
                    s[i] = cuda.selp(int32(8 * n + c) > int32(last + row_step * r), NEG_INF, s[i])

    @device
    def hide_before(s, first):
        for n in range(GROUPS):
            for r in range(2):
                for c in range(2):
                    i = 4 * n + 2 * r + c
                    s[i] = cuda.selp(int32(8 * n + c) < int32(first + 8 * r), NEG_INF, s[i])

    @device
    def hide_below(s, lo, at):
        for n in range(GROUPS):
            for r in range(2):
                for c in range(2):
                    i = 4 * n + 2 * r + c
                    s[i] = cuda.selp(int32(8 * n + c) < int32(lo[r] - at), NEG_INF, s[i])

    @device
    def hide_above(s, hi, at):
        for n in range(GROUPS):
            for r in range(2):
                for c in range(2):
                    i = 4 * n + 2 * r + c
                    s[i] = cuda.selp(int32(8 * n + c) > int32(hi[r] - at), NEG_INF, s[i])

    return Elements(clear, pack, hide_after, hide_before, hide_below, hide_above)
