"""FlashAttention-2 for compute capability 9.0: dK and dV. See flash_attention_hopper_bwd.py.

A block owns keys; queries, dO and their statistics stream. Scores are computed transposed, S^T = K
Q^T, so P^T and dS^T already have the layout of a left operand; lse and delta then belong to
columns, and are read from shared memory.

Shared memory: barriers | OWN of (K | V) | STAGES of Q | STAGES of dO | STAGES of statistics.
Results leave through the buffers of K and V.
"""

import functools
from dataclasses import dataclass

from ..primitives.hopper import (
    PANEL,
    SM_90A,
    acquire_map,
    along_rows,
    bar_sync,
    down_rows,
    load_floats,
    make_descriptor,
    make_hold,
    make_setmaxnreg,
    make_wgmma,
    make_wgmma_wait,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
    shared_base,
    tma_load,
    tma_load_row,
)
from ..primitives.hopper_tiles import PANEL_ROW, find_tile, make_store, registers, split
from ..primitives.ptx import device, kernel, wait_for_previous
from ..primitives.tensor_cores import exp2, opaque, warp_id
from ..runtime.compiler import cuda, float32, int32, int64, uint32, uint64
from .flash_attention_hopper_parts import (
    HEADER,
    LOG2E,
    NEXT_TILE,
    SIDE,
    TILE_FULL,
    declare_mapped_cost,
    leave,
    make_barriers,
    make_elements,
    make_own,
    next_tile,
)
from .flash_attention_hopper_table import HopperTiles
from .key_bounds import make_last_query

OUT = 4  # the map of dK, then that of dV
STATISTICS = 6  # the map of the statistics


# -------------------------------------------------------------------------- layout of shared memory
@dataclass(frozen=True)
class QueryLayout:
    """Byte offsets in a block's shared memory."""

    k: int  # the owned tile of K, then V, then those of the next owned tile
    v: int
    q: int  # the ring of Q
    do: int  # the ring of dO
    statistics: int  # the ring of lse log2 e and delta
    total: int  # bytes of shared memory
    full: int  # barriers of the stages
    free: int


@functools.cache
def query_layout(D: int, tiles: HopperTiles) -> QueryLayout:
    """Return the layout for heads of width D"""
    stages = tiles.stages
    own = tiles.rows * D * 2
    ring = tiles.step * D * 2
    q = HEADER + 2 * tiles.own * own
    do = q + stages * ring
    statistics = do + stages * ring
    total = statistics + stages * 8 * tiles.step
    full = NEXT_TILE * tiles.own
    return QueryLayout(HEADER, HEADER + own, q, do, statistics, total, full, full + 8 * stages)


def dkdv_shared_bytes(D: int, tiles: HopperTiles) -> int:
    """Bytes of shared memory of the dK, dV kernel."""
    return query_layout(D, tiles).total


@functools.cache
def make_queries(BM, BN, CAUSAL, KIND):
    """Return first_query, end_query, row_bounds: the queries that see the keys n0 ... n0 + BN - 1

    first_query(n0, past)           the beginning of the first tile of BM queries that sees key n0
    end_query(last, i, n0, T, S)    the end of those that see the last key
    row_bounds(hi, last, i, row, w0, T, S) -> last query that sees key w0; hi[r]: that of the lane's
    keys `row`, row + 8
    """
    last_query = make_last_query(KIND)

    @device
    def first_query(n0, past):
        first = int32(0)
        if CAUSAL and n0 > past:
            first = int32(uint32(n0 - past) // uint32(BM) * BM)
        return first

    @device
    def end_query(last, i, n0, T, S):
        return int32(last_query(last, i, min(n0 + BN, S) - 1, T, S - T) + 1)

    @device
    def row_bounds(hi, last, i, row, w0, T, S):
        if KIND == 0:
            return int32(T)
        for r in range(2):
            hi[r] = last_query(last, i, min(row + 8 * r, S - 1), T, S - T)
        return last_query(last, i, min(w0, S - 1), T, S - T)

    return first_query, end_query, row_bounds


@functools.cache
def make_query_producer(D: int, CAUSAL: bool, tiles: HopperTiles, KIND: int):
    """Return produce(base, maps, last, counter, T, S, B, G, group, together): the producer thread.
    Maps: see make_dkdv_kernel"""
    BM = tiles.step
    BN = tiles.rows
    STAGES = tiles.stages
    OWN = tiles.own
    PANELS = D // PANEL
    layout = query_layout(D, tiles)
    TILE_BYTES = BN * D * 2
    RING = BM * D * 2
    STATS = 8 * BM
    OWN_PANEL, RING_PANEL = BN * PANEL_ROW, BM * PANEL_ROW
    K = layout.k
    V = layout.v
    Q = layout.q
    DO = layout.do
    ROWS = layout.statistics
    STAGE_FULL, STAGE_FREE = layout.full, layout.free
    first_query, end_query, _ = make_queries(BM, BN, CAUSAL, KIND)
    offer_tile = make_own(OWN).offer

    @device
    def load_own(to, full, maps, n0, g, b):
        mbarrier_arrive_expect_tx(full, 2 * TILE_BYTES)
        for p in range(PANELS):
            tma_load(to + K + p * OWN_PANEL, maps, 1, full, PANEL * p, n0, g, b)
            tma_load(to + V + p * OWN_PANEL, maps, 2, full, PANEL * p, n0, g, b)

    @device
    def load_stage(base, stage, maps, m0, h, b, plane):
        full = base + STAGE_FULL + 8 * stage
        q, do = base + Q + stage * RING, base + DO + stage * RING
        mbarrier_arrive_expect_tx(full, 2 * RING + STATS)
        for p in range(PANELS):
            tma_load(q + p * RING_PANEL, maps, 0, full, PANEL * p, m0, h, b)
        tma_load_row(base + ROWS + stage * STATS, maps, STATISTICS, full, 2 * m0, plane)
        for p in range(PANELS):
            tma_load(do + p * RING_PANEL, maps, 3, full, PANEL * p, m0, h, b)

    @device
    def produce(base, maps, last, counter, T, S, B, G, group, together):
        blocks_n = (S + BN - 1) // BN
        planes = B * G
        for i in range(4):
            acquire_map(maps, i)
        acquire_map(maps, STATISTICS)
        it = uint32(0)
        done = uint32(0)
        tile = int32(cuda.blockIdx.x)
        while tile < blocks_n * planes:
            n, bg = find_tile(tile, blocks_n, planes, together)
            n0 = int32(n * BN)
            b, g = split(bg, G)
            first = first_query(n0, S - T)
            stop = end_query(last, int64(b) * int64(S), n0, T, S)
            barriers = offer_tile(base, done, tile)
            to = base + 2 * TILE_BYTES * (done % OWN)
            load_own(to, barriers + TILE_FULL, maps, n0, g, b)
            h = int32(g * group)
            end = int32(g * group + group)
            before = int32((bg - g) * group)  # planes of Q of the earlier sequences
            while h < end:
                m0 = first
                while opaque(m0) < stop:
                    stage = it % STAGES
                    mbarrier_wait(base + STAGE_FREE + 8 * stage, ((it // STAGES) & 1) ^ 1)
                    load_stage(base, stage, maps, m0, h, b, before + h)
                    it += uint32(1)
                    m0 = int32(m0 + BM)
                h = int32(h + 1)
            done += uint32(1)
            tile = next_tile(counter)
        mbarrier_arrive_expect_tx(offer_tile(base, done, tile) + TILE_FULL, 0)
        leave(counter)
        wait_for_previous()  # a kernel that waits for this one must also wait for dQ

    return produce


@functools.cache
def make_column_steps(BM):
    """Return weights(s, rows, scale), score_gradients(s, dp, rows): make_gradient_steps on
    transposed accumulators.

    rows: the address in shared memory of the columns' lse log2 e (weights) or delta
    (score_gradients).
    """
    GROUPS = BM // 8

    @device
    def weights(s, rows, scale):
        shift = cuda.local.array(2, float32)
        for n in range(GROUPS):
            load_floats(shift, rows + 8 * SIDE * (n // 2) + 32 * (n % 2))
            for j in range(4):
                s[4 * n + j] = exp2(s[4 * n + j] * scale - shift[j % 2])

    @device
    def score_gradients(s, dp, rows):
        drop = cuda.local.array(2, float32)
        for n in range(GROUPS):
            load_floats(drop, rows + 8 * SIDE * (n // 2) + 32 * (n % 2))
            for j in range(4):
                s[4 * n + j] *= dp[4 * n + j] - drop[j % 2]

    return weights, score_gradients


@functools.cache
def make_dkdv_consumer(D: int, CAUSAL: bool, tiles: HopperTiles, KIND: int):
    """Return consume(base, maps, last, T, S, B, G, group, together, scale): the dK, dV work of a
    consumer warpgroup"""
    BM = tiles.step
    BN = tiles.rows
    STAGES = tiles.stages
    OWN = tiles.own
    RING = BM * D * 2
    STATS = 8 * BM
    OWN_BYTES = 2 * BN * D * 2
    await_tile, free_tile = make_own(OWN).wait, make_own(OWN).free
    UNEVEN = CAUSAL and tiles.warpgroups > 1  # a block's warpgroups see different queries
    KV_PANEL, Q_PANEL = BN * PANEL_ROW, BM * PANEL_ROW
    S_SIZE = BM // 2
    A_SIZE = BM // 4
    OUT_SIZE = D // 2
    layout = query_layout(D, tiles)
    K = layout.k
    V = layout.v
    Q = layout.q
    DO = layout.do
    ROWS = layout.statistics
    STAGE_FULL, STAGE_FREE = layout.full, layout.free
    scores = make_wgmma(BM, along_rows(D, KV_PANEL), along_rows(D, Q_PANEL))
    add = make_wgmma(D, None, down_rows(BM), b_rows=True, accumulate=True)
    wait_s = make_wgmma_wait(BM, 1)
    wait_out = make_wgmma_wait(D, 0)
    hold_s = make_hold(BM)
    descriptor = make_descriptor(Q_PANEL)
    first_query, end_query, row_bounds = make_queries(BM, BN, CAUSAL, KIND)
    weights, score_gradients = make_column_steps(BM)
    elements = make_elements(BM)
    clear = make_elements(D).clear
    pack = elements.pack
    hide_before = elements.hide_before
    hide_above = elements.hide_above
    store_rows, stores_done = make_store(D)

    @device
    def store_both(to, dk, dv, factor, maps, scale, warp, w0, bg, G):
        """Store the results through the warpgroup's rows of K and V, which are no longer needed."""
        bar_sync(1 + (warp >> 2), 128)  # all its warps have finished with them
        b, g = split(bg, G)
        row = w0 + 16 * (warp & 3)
        at = to + warp * (16 * PANEL_ROW)
        factor[0] = float32(1.0)
        factor[1] = float32(1.0)
        store_rows(dv, factor, at + V, KV_PANEL, maps, OUT + 1, 0, row, g, b)
        factor[0], factor[1] = scale, scale
        store_rows(dk, factor, at + K, KV_PANEL, maps, OUT, 0, row, g, b)
        stores_done()

    @device
    def consume(base, maps, last, T, S, B, G, group, together, scale):
        warp = warp_id()
        lane = int32(cuda.threadIdx.x & 31)
        blocks_n = (S + BN - 1) // BN
        past = S - T
        s = cuda.local.array(S_SIZE, float32)
        dp = cuda.local.array(S_SIZE, float32)
        a = cuda.local.array(A_SIZE, uint32)  # P^T, then dS^T
        dk = cuda.local.array(OUT_SIZE, float32)
        dv = cuda.local.array(OUT_SIZE, float32)
        factor = cuda.local.array(2, float32)
        hi = cuda.local.array(2, int32)
        if lane == 0:
            acquire_map(maps, OUT)
            acquire_map(maps, OUT + 1)
        it = uint32(0)
        done = uint32(0)
        while True:
            tile = await_tile(base, done)
            if tile >= blocks_n * B * G:
                break
            n, bg = find_tile(tile, blocks_n, B * G, together)
            w0 = int32(n * BN + 64 * (warp >> 2))  # this warpgroup's first key
            row = w0 + 16 * (warp & 3) + (lane >> 2)
            first = first_query(n * BN, past)
            of_b = int64(split(bg, G)[0]) * int64(S)  # where its keys begin in the bounds
            stop = end_query(last, of_b, int32(n * BN), T, S)
            # in tiles that end after `least`, a key may not be seen by all queries
            least = row_bounds(hi, last, of_b, row, w0, T, S)
            m0 = first
            k = descriptor(base + K + OWN_BYTES * (done % OWN) + (warp >> 2) * (64 * PANEL_ROW))
            v = k + uint64((V - K) >> 4)
            clear(dk)
            clear(dv)
            # pending: dK's product with stage `before` is in flight
            before = uint32(0)
            pending = int32(0)
            for _ in range(group * ((stop - first + BM - 1) // BM)):
                stage = it % STAGES
                phase = (it // STAGES) & 1
                q = descriptor(base + Q + stage * RING)
                do = q + uint64((DO - Q) >> 4)
                rows = base + ROWS + stage * STATS + 8 * (lane & 3)
                mbarrier_wait(base + STAGE_FULL + 8 * stage, phase)
                if UNEVEN and m0 + (BM - 1) + past < w0:  # no query sees these keys
                    wait_out(dk)
                    cuda.syncwarp()  # all lanes have seen this phase
                    if pending > 0:
                        mbarrier_arrive(base + STAGE_FREE + 8 * before)
                    mbarrier_arrive(base + STAGE_FREE + 8 * stage)
                    pending = int32(0)
                else:
                    scores(s, k, q)
                    scores(dp, v, do)
                    wait_s(s)  # and the products with dO and Q of the previous tile
                    if pending > 0:
                        cuda.syncwarp()  # all lanes have read its statistics
                        mbarrier_arrive(base + STAGE_FREE + 8 * before)
                    if CAUSAL and m0 + past < w0 + 63:
                        hide_before(s, row - past - m0 - 2 * (lane & 3))
                    if KIND != 0 and m0 + (BM - 1) > least:
                        hide_above(s, hi, m0 + 2 * (lane & 3))
                    weights(s, rows, scale * LOG2E)
                    pack(a, s)
                    add(dv, a, do)
                    wait_s(dp)
                    score_gradients(s, dp, rows + 4 * SIDE)
                    hold_s(s)
                    # already complete: it keeps the compiler from moving the wait before the
                    # arithmetic
                    mbarrier_wait(base + STAGE_FULL + 8 * stage, phase)
                    wait_out(dv)  # then `a` may be written again
                    pack(a, s)
                    add(dk, a, q)
                    before = stage
                    pending = int32(1)
                it += uint32(1)
                m0 = int32(m0 + BM)
                if m0 >= stop:
                    m0 = first
            wait_out(dk)
            cuda.syncwarp()
            if pending > 0:
                mbarrier_arrive(base + STAGE_FREE + 8 * before)
            # opaque: values derived from it are not kept in registers during the loop
            done = uint32(opaque(int32(done)))
            to = base + OWN_BYTES * (done % OWN)
            store_both(to, dk, dv, factor, maps, scale, warp, w0, bg, G)
            free_tile(base, done)
            done += uint32(1)

    return consume


@functools.cache
def make_dkdv_kernel(D: int, CAUSAL: bool, tiles: HopperTiles, KIND: int = 0):
    """Return the dK, dV kernel for heads of width D; launch_tiles starts it."""
    WGS = tiles.warpgroups
    PER_SM = tiles.blocks
    layout = query_layout(D, tiles)
    CONSUMERS = 128 * WGS
    THREADS = 128 * (WGS + 1)
    FEW, MANY = registers(WGS, PER_SM, 24 if D == 128 else 0)
    FULLS = tuple(layout.full + 8 * i for i in range(tiles.stages))
    FREES = tuple(layout.free + 8 * i for i in range(tiles.stages))
    set_up = make_barriers(4 * WGS, tiles.own, FULLS, FREES)
    produce = make_query_producer(D, CAUSAL, tiles, KIND)
    consume = make_dkdv_consumer(D, CAUSAL, tiles, KIND)
    fewer_registers = make_setmaxnreg(FEW, False)
    more_registers = make_setmaxnreg(MANY, True)

    @kernel(THREADS, PER_SM, **SM_90A)
    def flash_attention_hopper_dkdv_kernel(maps, last, counter, T, S, B, G, group, together, scale):
        """Maps of Q, K, V, dO, dK, dV, the statistics. last: of key_bounds.py, flat. The other
        arguments: see make_fwd_kernel."""
        base = shared_base()
        set_up(base)
        if warp_id() >= 4 * WGS:
            fewer_registers()
            if cuda.threadIdx.x == CONSUMERS:
                produce(base, maps, last, counter, T, S, B, G, group, together)
        else:
            more_registers()
            consume(base, maps, last, T, S, B, G, group, together, scale)

    declare_mapped_cost(flash_attention_hopper_dkdv_kernel, 4, CAUSAL, KIND)
    return flash_attention_hopper_dkdv_kernel
