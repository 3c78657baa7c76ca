"""FlashAttention-2 for compute capability 9.0, backward. No atomics on data: every gradient is
summed by one warpgroup.

    statistics      delta = rowsum(dO O), and lse log2 e; 16 rows of each alternate, so one copy
                    brings both
    dQ kernel       a block owns queries, keys stream; 3 products
                    S = Q K^T    dP = dO V^T    dQ += dS K
    dK, dV kernel   a block owns keys, queries stream; 4 products
                    S^T = K Q^T  dP^T = V dO^T  dV += P^T dO  dK += dS^T Q

with P = exp2(S scale log2 e - lse log2 e) and dS = P (dP - delta). P and dS go from accumulators to
left operands in registers; K, Q and dO are read from the same tiles in shared memory, plain for one
product and transposed for the other.

The dK, dV kernel is in flash_attention_hopper_dkdv.py. Shared memory of dQ: barriers | OWN of (Q |
dO) | dQ on its way out | STAGES of K | STAGES of V.
"""

import functools
from dataclasses import dataclass

import numpy as np

from ...device import Array
from ..primitives.hopper import (
    SM_90A,
    acquire_map,
    along_rows,
    down_rows,
    make_descriptor,
    make_hold,
    make_setmaxnreg,
    make_wgmma,
    make_wgmma_wait,
    mbarrier_arrive,
    mbarrier_wait,
    shared_base,
)
from ..primitives.hopper_tiles import PANEL_ROW, find_tile, make_store, registers, split
from ..primitives.ptx import device, kernel, let_next_start, load1, load8, store1, wait_for_previous
from ..primitives.reduce import FULL
from ..primitives.tensor_cores import exp2, warp_id
from ..primitives.tma import tensor_maps
from ..runtime.compiler import cuda, float32, int32, int64, uint32, uint64
from ..runtime.launch import can_overlap, empty, launch
from .flash_attention_hopper import Gpu, Work, choose, launch_tiles
from .flash_attention_hopper_dkdv import dkdv_shared_bytes, make_dkdv_kernel
from .flash_attention_hopper_parts import (
    LOG2E,
    SIDE,
    declare_mapped_cost,
    key_layout,
    make_barriers,
    make_elements,
    make_key_producer,
    make_keys,
    make_own,
    make_skip,
)
from .flash_attention_hopper_table import HopperPlan, HopperTiles
from .key_bounds import UNBOUNDED, KeyBounds

PAD = 128  # the rows of a head's statistics are a multiple of this; no tile of queries is larger
NO_WEIGHT = float32(1e30)  # lse of the padding: exp2(s - 1e30) is 0
OUT = 4  # the map of dQ
# of the statistics kernel
THREADS = 256
ROWS_PER_THREAD = 1


# ----------------------------------------------------------------------------- delta and lse
@device
def statistics_at(start, row):
    """Return the index of a row's lse log2 e; its delta is SIDE elements further. start: first row
    of its head"""
    return 2 * (start + (row & -SIDE)) + (row & (SIDE - 1))


@functools.cache
def make_statistics_kernel(D: int, TURNS: int = ROWS_PER_THREAD) -> tuple:
    """Return (kernel, rows of a block). TURNS: rows of a thread"""
    LANES = D // 8  # threads that share a row
    STEP = THREADS // LANES
    ROWS = TURNS * STEP
    HALVINGS = LANES.bit_length() - 1

    @kernel(THREADS)
    def flash_attention_statistics_kernel(stats, o, do, lse, T, PADDED, H):
        """Grid (PADDED / ROWS, B H). o, do (B T H D), lse (B H T); stats (B H PADDED / SIDE, 2,
        SIDE). LANES threads share a row. A thread loads all its TURNS rows before it uses the first
        one.
        """
        wait_for_previous()
        let_next_start()
        tid = int32(cuda.threadIdx.x)
        bh = int64(cuda.blockIdx.y)
        first = int32(cuda.blockIdx.x * ROWS + tid // LANES)
        lane = tid % LANES
        x = cuda.local.array((TURNS, 8), float32)
        y = cuda.local.array((TURNS, 8), float32)
        b, h = split(int32(cuda.blockIdx.y), H)
        for turn in range(TURNS):
            row = first + turn * STEP
            # selp instead of a branch: with a branch, each row is waited for before the next is
            # loaded
            row = cuda.selp(row < T, row, T - 1)
            i = ((int64(b) * T + row) * H + h) * D + 8 * lane
            load8(x[turn], o, i)
            load8(y[turn], do, i)
        for turn in range(TURNS):
            row = first + turn * STEP
            dot = float32(0.0)
            for e in range(8):
                dot += x[turn, e] * y[turn, e]
            for i in range(HALVINGS):
                dot += cuda.shfl_xor_sync(FULL, dot, 1 << i)
            if lane == 0 and row < PADDED:
                shift = NO_WEIGHT
                if row < T:
                    shift = load1(lse, bh * T + row) * LOG2E
                i = statistics_at(bh * PADDED, row)
                store1(stats, i, shift)
                store1(stats, i + SIDE, dot)

    return flash_attention_statistics_kernel, ROWS


# ----------------------------------------------------------------------------- dQ
def dq_shared_bytes(D: int, tiles: HopperTiles) -> int:
    """Bytes of shared memory of the dQ kernel."""
    return key_layout(D, tiles, 2).total


@functools.cache
def make_gradient_steps(N):
    """Return weights, score_gradients: elementwise on 64 x N accumulators; shift = lse log2 e and
    delta of the lane's two rows.

    weights(s, shift, scale)        s becomes p = exp2(s scale - shift)
    score_gradients(s, dp, delta)   s becomes s (dp - delta)
    """
    GROUPS = N // 8

    @device
    def weights(s, shift, scale):
        for n in range(GROUPS):
            for j in range(4):
                s[4 * n + j] = exp2(s[4 * n + j] * scale - shift[j // 2])

    @device
    def score_gradients(s, dp, delta):
        for n in range(GROUPS):
            for j in range(4):
                s[4 * n + j] *= dp[4 * n + j] - delta[j // 2]

    return weights, score_gradients


@functools.cache
def make_dq_consumer(D: int, CAUSAL: bool, tiles: HopperTiles, KIND: int):
    """Return consume(base, maps, stats, first, T, S, PADDED, B, H, together, scale): the dQ work of
    a consumer warpgroup"""
    BM = tiles.rows
    BN = tiles.step
    STAGES = tiles.stages
    OWN = tiles.own
    RING = BN * D * 2
    ROW_STEP = 8 if CAUSAL else 0
    Q_PANEL = BM * PANEL_ROW
    KV_PANEL = BN * PANEL_ROW
    QUERIES = BM * D * 2
    S_SIZE = BN // 2
    A_SIZE = BN // 4
    OUT_SIZE = D // 2
    layout = key_layout(D, tiles, 2)
    Q = layout.q
    DQ = layout.out
    K = layout.k
    V = layout.v
    K_FULL = layout.k_full
    K_FREE = layout.k_free
    V_FULL = layout.v_full
    V_FREE = layout.v_free
    scores = make_wgmma(BN, along_rows(D, Q_PANEL), along_rows(D, KV_PANEL))
    add_ds_k = make_wgmma(D, None, down_rows(BN), b_rows=True, accumulate=True)
    wait_s_but_one = make_wgmma_wait(BN, 1)
    wait_s = make_wgmma_wait(BN, 0)
    wait_dq = make_wgmma_wait(D, 0)
    hold_s = make_hold(BN)
    descriptor = make_descriptor(KV_PANEL)
    key_blocks, first_block, row_bounds = make_keys(BM, BN, CAUSAL, KIND)
    weights, score_gradients = make_gradient_steps(BN)
    await_tile, free_tile = make_own(OWN).wait, make_own(OWN).free
    elements = make_elements(BN)
    clear = make_elements(D).clear
    pack = elements.pack
    hide_after = elements.hide_after
    hide_below = elements.hide_below
    skip = make_skip(D, CAUSAL, tiles, 2)
    store_rows, stores_done = make_store(D)

    @device
    def load_rows(shift, drop, stats, start, row, PADDED):
        for r in range(2):
            i = int32(row + 8 * r)
            if i >= PADDED:  # not a query: the row is not stored
                i = int32(PADDED - 1)
            shift[r] = load1(stats, statistics_at(start, i))
            drop[r] = load1(stats, statistics_at(start, i) + SIDE)

    @device
    def store(base, dq, factor, maps, warp, w0, bh, H):
        stores_done()  # of the previous tile
        b, h = split(bh, H)
        at = base + DQ + warp * (16 * PANEL_ROW)
        store_rows(dq, factor, at, Q_PANEL, maps, OUT, 0, w0 + 16 * (warp & 3), h, b)

    @device
    def consume(base, maps, stats, first, T, S, PADDED, B, H, together, scale):
        warp = warp_id()
        lane = int32(cuda.threadIdx.x & 31)
        blocks_m = (T + BM - 1) // BM
        past = S - T
        column = 2 * (lane & 3)
        s = cuda.local.array(S_SIZE, float32)
        dp = cuda.local.array(S_SIZE, float32)
        ds = cuda.local.array(A_SIZE, uint32)
        dq = cuda.local.array(OUT_SIZE, float32)
        shift = cuda.local.array(2, float32)
        drop = cuda.local.array(2, float32)
        lo = cuda.local.array(2, int32)
        if lane == 0:
            acquire_map(maps, OUT)
        wait_for_previous()  # for the statistics. Q, K, V and dO are older
        let_next_start()
        it = uint32(0)
        done = uint32(0)
        while True:
            tile = await_tile(base, done)
            if tile >= blocks_m * B * H:
                break
            m, bh = find_tile(tile, blocks_m, B * H, together)
            q0 = int32((blocks_m - 1 - m) * BM)
            w0 = q0 + 64 * (warp >> 2)
            row = w0 + 16 * (warp & 3) + (lane >> 2)
            of_b = int64(split(bh, H)[0]) * int64(T)  # where its queries begin in the bounds
            begin = first_block(first, of_b, q0, T, S)
            it, blocks = skip(base, it, key_blocks(q0, T, S), begin, w0, T, S)
            max_lo = row_bounds(lo, first, of_b, row, w0, T, S)
            q = descriptor(base + Q + 2 * QUERIES * (done % OWN) + (warp >> 2) * (64 * PANEL_ROW))
            do = q + uint64(QUERIES >> 4)
            n0 = int32((blocks - 1) * BN)
            clear(dq)
            load_rows(shift, drop, stats, int64(bh) * int64(PADDED), row, PADDED)
            before = uint32(0)
            for i in range(blocks - begin):
                stage = it % STAGES
                phase = (it // STAGES) & 1
                mbarrier_wait(base + K_FULL + 8 * stage, phase)
                scores(s, q, descriptor(base + K + stage * RING))
                mbarrier_wait(base + V_FULL + 8 * stage, phase)
                scores(dp, do, descriptor(base + V + stage * RING))
                wait_s_but_one(s)  # and the dQ product of the previous key block
                if i > 0:
                    mbarrier_arrive(base + K_FREE + 8 * before)
                if n0 + BN - 1 > (w0 + past if CAUSAL else S - 1):
                    hide_after(s, (row + past if CAUSAL else S - 1) - n0 - column, ROW_STEP)
                if KIND != 0 and n0 < max_lo:
                    hide_below(s, lo, n0 + column)
                weights(s, shift, scale * LOG2E)
                hold_s(s)
                # already complete: it keeps the compiler from moving the wait before the
                # exponentials
                mbarrier_wait(base + V_FULL + 8 * stage, phase)
                wait_s(dp)
                mbarrier_arrive(base + V_FREE + 8 * stage)
                score_gradients(s, dp, drop)
                pack(ds, s)
                add_ds_k(dq, ds, descriptor(base + K + stage * RING))
                before = stage
                it += uint32(1)
                n0 = int32(n0 - BN)
            free_tile(base, done)
            wait_dq(dq)
            mbarrier_arrive(base + K_FREE + 8 * before)
            done += uint32(1)
            shift[0], shift[1] = scale, scale
            store(base, dq, shift, maps, warp, w0, bh, H)
        stores_done()

    return consume


@functools.cache
def make_dq_kernel(D: int, CAUSAL: bool, tiles: HopperTiles, KIND: int = 0):
    """Return the dQ kernel for heads of width D; launch_tiles starts it."""
    WGS = tiles.warpgroups
    PER_SM = tiles.blocks
    layout = key_layout(D, tiles, 2)
    CONSUMERS = 128 * WGS
    THREADS = 128 * (WGS + 1)
    FEW, MANY = registers(WGS, PER_SM)
    stages = range(tiles.stages)
    FULLS = tuple(at + 8 * i for at in (layout.k_full, layout.v_full) for i in stages)
    FREES = tuple(at + 8 * i for at in (layout.k_free, layout.v_free) for i in stages)
    set_up = make_barriers(4 * WGS, tiles.own, FULLS, FREES)
    produce = make_key_producer(D, CAUSAL, tiles, 2, KIND=KIND)
    consume = make_dq_consumer(D, CAUSAL, tiles, KIND)
    fewer_registers = make_setmaxnreg(FEW, False)
    more_registers = make_setmaxnreg(MANY, True)

    @kernel(THREADS, PER_SM, **SM_90A)
    def flash_attention_hopper_dq_kernel(
        maps, stats, first, counter, T, S, B, H, group, together, PADDED, scale
    ):
        """Maps of Q, K, V, dO, dQ. The other arguments: see make_fwd_kernel and
        make_statistics_kernel."""
        base = shared_base()
        set_up(base)
        if warp_id() >= 4 * WGS:
            fewer_registers()
            if cuda.threadIdx.x == CONSUMERS:
                produce(base, maps, counter, first, (T, S), T, B, H, group, together)
        else:
            more_registers()
            consume(base, maps, stats, first, T, S, PADDED, B, H, together, scale)

    declare_mapped_cost(flash_attention_hopper_dq_kernel, 3, CAUSAL, KIND)
    return flash_attention_hopper_dq_kernel


# ----------------------------------------------------------------------------- launching
@dataclass(frozen=True)
class Statistics:
    """lse log2 e and delta of every query, in the layout of statistics_at."""

    array: Array  # (B H, 2 padded) float32
    padded: int  # rows of a head, a multiple of PAD


def compute_statistics(
    do: Array, o: Array, lse_BHT: Array, turns: int = ROWS_PER_THREAD
) -> Statistics:
    """do, o (B, T, H, D): contiguous bf16; lse (B, H, T) float32. turns: rows of a thread"""
    B, T, H, D = o.shape
    padded = -(-T // PAD) * PAD
    stats = empty(lse_BHT, (B * H, 2 * padded))
    kernel, rows = make_statistics_kernel(D, turns)
    flat = o.reshape(-1), do.reshape(-1), lse_BHT.reshape(-1)
    sizes = [np.int32(n) for n in (T, padded, H)]
    grid = (-(-padded // rows), B * H)
    overlap = can_overlap(o)
    launch(kernel, grid, THREADS, stats.reshape(-1), *flat, *sizes, overlap=overlap)
    return Statistics(stats, padded)


def fill_dq(
    dq, stats: Statistics, do, q, k, v, scale, causal, gpu: Gpu, plan: HopperPlan, bounds=UNBOUNDED
) -> None:
    """Fill dq (B, T, H, D)."""
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    tiles = plan.tiles
    rows = plan.tiles.rows
    step = plan.tiles.step
    maps = tensor_maps((q, rows), (k, step), (v, step), (do, rows), (dq, 16))
    kernel = make_dq_kernel(D, causal, tiles, bounds.kind)
    shared = dq_shared_bytes(D, tiles)
    work = Work(T, S, B, H, H // G, -(-T // rows), 4 * S * D)
    rows_of_stats = stats.array.reshape(-1)
    arrays = rows_of_stats, bounds.first(rows_of_stats)
    scalars = np.int32(stats.padded), np.float32(scale)
    launch_tiles(kernel, shared, plan, work, gpu, maps, arrays, *scalars)


def fill_dkdv(
    dk,
    dv,
    stats: Statistics,
    do,
    q,
    k,
    v,
    scale,
    causal,
    gpu: Gpu,
    plan: HopperPlan,
    bounds=UNBOUNDED,
) -> None:
    """Fill dk and dv (B, S, G, D)."""
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    tiles = plan.tiles
    rows = plan.tiles.rows
    step = plan.tiles.step
    group = H // G
    inputs = ((q, step), (k, rows), (v, rows), (do, step))
    outputs = ((dk, 16), (dv, 16))
    maps = tensor_maps(*inputs, *outputs, (stats.array, 2 * step))
    kernel = make_dkdv_kernel(D, causal, tiles, bounds.kind)
    shared = dkdv_shared_bytes(D, tiles)
    work = Work(T, S, B, G, group, -(-S // rows), 4 * T * D * group)
    launch_tiles(kernel, shared, plan, work, gpu, maps, (bounds.last(maps),), np.float32(scale))


def backward(
    gradients: tuple[Array, Array, Array],
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse_BHT: Array,
    scale: float,
    causal: bool,
    gpu: Gpu,
    bounds: KeyBounds = UNBOUNDED,
) -> None:
    """Fill gradients = (dq, dk, dv). do, o: contiguous. q, k, v: see
    flash_attention_hopper.forward"""
    dq, dk, dv = gradients
    T, D = q.shape[1], q.shape[3]
    stats = compute_statistics(do, o, lse_BHT)
    fill_dq(dq, stats, do, q, k, v, scale, causal, gpu, choose("dq", D, T, causal), bounds)
    plan = choose("dkdv", D, T, causal)
    fill_dkdv(dk, dv, stats, do, q, k, v, scale, causal, gpu, plan, bounds)
