"""FlashAttention-2 for compute capability 9.0, forward: the algorithm of flash_attention.py with
wgmma, TMA, specialized warps.

As in flash_attention_bf16.py, a tile of queries loops over tiles of keys;
flash_attention_hopper_parts.py describes producer and consumers. Per tile of BN keys, a consumer
warpgroup (64 queries) computes

    S = Q K^T       wgmma, both operands from shared memory
    p = exp2(S scale - top)             in registers
    O = O + p V     wgmma, p from registers: a packed accumulator already has the layout of a left
                    operand

and overlaps them: the tensor cores run S of tile i + 1 and p V of tile i while the exponentials of
tile i + 1 are computed (Shah et al. 2024, "FlashAttention-3", section 3.2).

Shared memory: barriers | OWN of Q | O on its way out | STAGES of K | STAGES of V.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

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
from ..primitives.ptx import device, kernel, let_next_start, store1, wait_for_previous
from ..primitives.reduce import FULL
from ..primitives.tensor_cores import exp2, fmax, log2, warp_id
from ..primitives.tma import tensor_maps, tensors_of, tile_counter
from ..runtime.compiler import cuda, float32, int32, int64, uint32
from ..runtime.cost import declare_cost
from ..runtime.invariance import is_batch_invariant
from ..runtime.launch import can_overlap, launch
from .flash_attention_hopper_parts import (
    LN2,
    LOG2E,
    LOWEST,
    declare_mapped_cost,
    key_layout,
    make_barriers,
    make_clear_tail,
    make_elements,
    make_key_producer,
    make_keys,
    make_own,
    make_skip,
)
from .flash_attention_hopper_sequences import INVALID, VALID, make_sequences
from .flash_attention_hopper_table import TABLE, HopperPlan, HopperTiles, exact_plan
from .key_bounds import UNBOUNDED, KeyBounds

WIDTHS = (64, 128)  # of heads. 32 would need panels of 64 bytes and their swizzle
OUT = 3  # the map of O
NAN = float32(np.nan)


def fwd_shared_bytes(D: int, tiles: HopperTiles) -> int:
    """Bytes of shared memory of the forward kernel."""
    return key_layout(D, tiles, 1).total


@functools.cache
def make_softmax(D, BN):
    """Return softmax(s, top, total, shrink, scale), rescale(o, shrink): one tile of the online
    softmax.

    s becomes exp2(scale (s - new top)); shrink becomes the factor by which earlier sums and O must
    be multiplied. scale includes log2 e.
    """
    GROUPS, O_GROUPS = BN // 8, D // 8

    @device
    def softmax(s, top, total, shrink, scale):
        maxima = cuda.local.array(4, float32)
        sums = cuda.local.array(4, float32)
        shift = cuda.local.array(2, float32)
        for j in range(4):
            maxima[j] = s[j]
            sums[j] = float32(0.0)
        for n in range(1, GROUPS):
            for j in range(4):
                maxima[j] = fmax(maxima[j], s[4 * n + j])
        for r in range(2):
            x = fmax(maxima[2 * r], maxima[2 * r + 1])
            x = fmax(x, cuda.shfl_xor_sync(FULL, x, 1))
            x = fmax(x, cuda.shfl_xor_sync(FULL, x, 2))
            x = fmax(x, top[r])
            shrink[r] = exp2((top[r] - x) * scale)
            top[r] = x
            shift[r] = x * scale
        for n in range(GROUPS):
            for j in range(4):
                p = exp2(s[4 * n + j] * scale - shift[j // 2])
                s[4 * n + j] = p
                sums[j] += p
        for r in range(2):
            total[r] = total[r] * shrink[r] + (sums[2 * r] + sums[2 * r + 1])

    @device
    def rescale(o, shrink):
        for n in range(O_GROUPS):
            for j in range(4):
                o[4 * n + j] *= shrink[j // 2]

    return softmax, rescale


@device
def finish_rows(top, total, factor, scale, lse, i, row, T, write):
    """If `write`, write lse[i + row] and lse[i + row + 8]; factor becomes 1 / total."""
    for r in range(2):
        x = total[r]
        x += cuda.shfl_xor_sync(FULL, x, 1)
        x += cuda.shfl_xor_sync(FULL, x, 2)
        factor[r] = float32(1.0) / x
        if write and row + 8 * r < T and cuda.threadIdx.x & 3 == 0:
            store1(lse, i + row + 8 * r, (top[r] * scale + log2(x)) * LN2)


class Head(NamedTuple):
    """Where a consumer writes the results of a head."""

    T: int
    first: int  # position of the sequence's first query in the batch
    batch: int
    h: int
    H: int


@functools.cache
def make_consumer(D: int, CAUSAL: bool, tiles: HopperTiles, PAGE: int, KIND: int):
    """Return consume(base, maps, written, bounds, where, T, B, H, together, scale): the forward's
    work of a consumer warpgroup

    where, PAGE: see make_sequences. bounds, KIND: see key_bounds.py. T: queries of the longest
    sequence.
    written: lse; with PAGE, o itself: a sequence's last rows are written by threads, because the
    copy engine would write 16, into the next sequence.
    """
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
    P_SIZE = BN // 4
    O_SIZE = D // 2
    layout = key_layout(D, tiles, 1)
    Q, O, K, V = layout.q, layout.out, layout.k, layout.v  # noqa: E741
    K_FULL = layout.k_full
    K_FREE = layout.k_free
    V_FULL = layout.v_full
    V_FREE = layout.v_free
    scores = make_wgmma(BN, along_rows(D, Q_PANEL), along_rows(D, KV_PANEL))
    add_pv = make_wgmma(D, None, down_rows(BN), b_rows=True, accumulate=True)
    wait_s_but_one = make_wgmma_wait(BN, 1)
    wait_s = make_wgmma_wait(BN, 0)
    wait_o = make_wgmma_wait(D, 0)
    hold_s = make_hold(BN)
    descriptor = make_descriptor(KV_PANEL)
    key_blocks, first_block, row_bounds = make_keys(BM, BN, CAUSAL, KIND)
    softmax, rescale = make_softmax(D, BN)
    await_tile, free_tile = make_own(OWN).wait, make_own(OWN).free
    elements = make_elements(BN)
    clear = make_elements(D).clear
    pack = elements.pack
    hide_after = elements.hide_after
    hide_below = elements.hide_below
    skip = make_skip(D, CAUSAL, tiles, 1)
    store_rows, stores_done = make_store(D)
    sequences = make_sequences(BN, PAGE)
    PAGED = PAGE > 0
    GROUPS = D // 8
    size = sequences.size
    check = sequences.check
    clear_tail = make_clear_tail(D, tiles, PAGE)

    @device
    def begin(o, top, total):
        clear(o)
        for r in range(2):
            top[r] = LOWEST
            total[r] = float32(0.0)

    @device
    def store(base, o, factor, maps, warp, w0, head, written):
        stores_done()  # of the previous tile
        at = base + O + warp * (16 * PANEL_ROW)
        row = w0 + 16 * (warp & 3)
        if not PAGED or row + 16 <= head.T:
            store_rows(o, factor, at, Q_PANEL, maps, OUT, 0, head.first + row, head.h, head.batch)
        else:
            lane = int32(cuda.threadIdx.x & 31)
            for r in range(2):
                t = row + (lane >> 2) + 8 * r
                if t < head.T:
                    i = ((int64(head.first) + t) * head.H + head.h) * D + 2 * (lane & 3)
                    for n in range(GROUPS):
                        for c in range(2):
                            store1(written, i + 8 * n + c, o[4 * n + 2 * r + c] * factor[r])

    @device
    def consume(base, maps, written, bounds, where, longest, B, H, together, scale):
        warp = warp_id()
        lane = int32(cuda.threadIdx.x & 31)
        blocks_m = (longest + BM - 1) // BM
        column = 2 * (lane & 3)
        s = cuda.local.array(S_SIZE, float32)
        o = cuda.local.array(O_SIZE, float32)
        p = cuda.local.array(P_SIZE, uint32)
        top = cuda.local.array(2, float32)
        total = cuda.local.array(2, float32)
        shrink = cuda.local.array(2, float32)
        lo = cuda.local.array(2, int32)
        if lane == 0:
            acquire_map(maps, OUT)
        it = uint32(0)
        done = uint32(0)
        while True:
            tile = await_tile(base, done)
            if tile >= blocks_m * B * H:
                break
            m, bh = find_tile(tile, blocks_m, B * H, together)
            q0 = int32((blocks_m - 1 - m) * BM)
            w0 = q0 + 64 * (warp >> 2)  # this warpgroup's first query
            row = w0 + 16 * (warp & 3) + (lane >> 2)  # this lane's rows: row, row + 8
            b, h = split(bh, H)
            T, S, first, batch, state = size(where, b)
            past = S - T
            blocks = key_blocks(q0, T, S)
            if PAGED:
                end = int32(blocks * BN)  # of the keys that this block sees
                state = check(where, b, S if end > S else end, state)
                if end > S:
                    clear_tail(base, it, end - BN, S)
            of_b = int64(b) * int64(T)  # where its queries begin in the bounds
            begin_block = first_block(bounds, of_b, q0, T, S)
            it, blocks = skip(base, it, blocks, begin_block, w0, T, S)
            # in blocks that begin before `max_lo`, a row may not see all keys
            max_lo = row_bounds(lo, bounds, of_b, row, w0, T, S)
            q = descriptor(base + Q + QUERIES * (done % OWN) + (warp >> 2) * (64 * PANEL_ROW))
            n0 = int32((blocks - 1) * BN)  # key blocks run from the diagonal down to the first key
            begin(o, top, total)
            stage = it % STAGES
            phase = (it // STAGES) & 1
            mbarrier_wait(base + K_FULL + 8 * stage, phase)
            scores(s, q, descriptor(base + K + stage * RING))
            wait_s(s)
            mbarrier_arrive(base + K_FREE + 8 * stage)
            hide_after(s, (row + past if CAUSAL else S - 1) - n0 - column, ROW_STEP)
            if KIND != 0 and n0 < max_lo:
                hide_below(s, lo, n0 + column)
            softmax(s, top, total, shrink, scale)
            pack(p, s)
            mbarrier_wait(base + V_FULL + 8 * stage, phase)
            for _ in range(begin_block + 1, blocks):
                before = stage
                it += uint32(1)
                n0 = int32(n0 - BN)
                stage = it % STAGES
                phase = (it // STAGES) & 1
                mbarrier_wait(base + K_FULL + 8 * stage, phase)
                scores(s, q, descriptor(base + K + stage * RING))
                add_pv(o, p, descriptor(base + V + before * RING))
                wait_s_but_one(s)
                mbarrier_arrive(base + K_FREE + 8 * stage)
                if CAUSAL and n0 + BN - 1 > w0 + past:
                    hide_after(s, row + past - n0 - column, ROW_STEP)
                if KIND != 0 and n0 < max_lo:
                    hide_below(s, lo, n0 + column)
                softmax(s, top, total, shrink, scale)
                hold_s(s)
                # this wait also keeps the compiler from moving wait_o before the exponentials
                mbarrier_wait(base + V_FULL + 8 * stage, phase)
                wait_o(o)
                mbarrier_arrive(base + V_FREE + 8 * before)
                rescale(o, shrink)
                pack(p, s)
            free_tile(base, done)
            add_pv(o, p, descriptor(base + V + stage * RING))
            wait_o(o)
            mbarrier_arrive(base + V_FREE + 8 * stage)
            it += uint32(1)
            done += uint32(1)

            start = int64(bh) * int64(T)
            finish_rows(top, total, shrink, scale, written, start, row, T, not PAGED)
            if state != VALID:
                clear(o)
                for r in range(2):
                    shrink[r] = NAN if state == INVALID else float32(0.0)
            store(base, o, shrink, maps, warp, w0, Head(T, first, batch, h, H), written)
        stores_done()

    return consume


@functools.cache
def make_block(D: int, CAUSAL: bool, tiles: HopperTiles, PAGE: int, KIND: int):
    """Return block(maps, written, counter, bounds, where, T, B, H, group, together, scale): the
    forward's work of a thread block"""
    WGS = tiles.warpgroups
    PER_SM = tiles.blocks
    layout = key_layout(D, tiles, 1)
    CONSUMERS = 128 * WGS
    FEW, MANY = registers(WGS, PER_SM)
    stages = range(tiles.stages)
    FULLS = tuple(at + 8 * i for at in (layout.k_full, layout.v_full) for i in stages)
    FREES = tuple(at + 8 * i for at in (layout.k_free, layout.v_free) for i in stages)
    set_up = make_barriers(4 * WGS, tiles.own, FULLS, FREES)
    produce = make_key_producer(D, CAUSAL, tiles, 1, PAGE, KIND)
    consume = make_consumer(D, CAUSAL, tiles, PAGE, KIND)
    fewer_registers = make_setmaxnreg(FEW, False)
    more_registers = make_setmaxnreg(MANY, True)

    @device
    def block(maps, written, counter, bounds, where, T, B, H, group, together, scale):
        base = shared_base()
        set_up(base)
        wait_for_previous()
        let_next_start()
        if warp_id() >= 4 * WGS:
            fewer_registers()
            if cuda.threadIdx.x == CONSUMERS:
                produce(base, maps, counter, bounds, where, T, B, H, group, together)
        else:
            more_registers()
            consume(base, maps, written, bounds, where, T, B, H, together, scale * LOG2E)

    return block


@functools.cache
def make_fwd_kernel(D: int, CAUSAL: bool, tiles: HopperTiles, KIND: int = 0):
    """Return the forward kernel for heads of width D; launch_tiles starts it."""
    block = make_block(D, CAUSAL, tiles, 0, KIND)

    @kernel(128 * (tiles.warpgroups + 1), tiles.blocks, **SM_90A)
    def flash_attention_hopper_fwd_kernel(
        maps, lse, first, counter, T, S, B, H, group, together, scale
    ):
        """Grid: any. maps: tensor maps of Q, K, V, O as (B, heads, positions, D); lse (B H T);
        first: see key_bounds.py;
        counter: two zeros, zeros again at the end; together: see find_tile. The order in which
        blocks take tiles does not change the result.
        """
        block(maps, lse, counter, first, (T, S), T, B, H, group, together, scale)

    declare_mapped_cost(flash_attention_hopper_fwd_kernel, 2, CAUSAL, KIND)
    return flash_attention_hopper_fwd_kernel


@functools.cache
def make_paged_kernel(D: int, PAGE: int, tiles: HopperTiles, WINDOW: int = 0):
    """Return the forward kernel for packed queries and the keys of a paged cache; launch_tiles
    starts it."""
    block = make_block(D, True, tiles, PAGE, WINDOW)

    @kernel(128 * (tiles.warpgroups + 1), tiles.blocks, **SM_90A)
    def context_attention_hopper_kernel(
        maps, o, edges, history, tables, counter, T, S, A, H, group, together, N, R, M, scale
    ):
        """Grid: any. maps: of Q, K, V, O: Q and O as (1, N, H, D), the cache as (R, G PAGE, 1, D);
        tables: flat. T: queries of the longest sequence. S: keys that fit into a table.
        """
        where = edges, history, tables, N, R, M
        block(maps, o, counter, edges, where, T, A, H, group, together, scale)

    declare_cost(
        context_attention_hopper_kernel,
        nbytes=lambda maps, o, *_: sum(size for _, size in tensors_of(maps)),
    )
    return context_attention_hopper_kernel


# ----------------------------------------------------------------------------- launching
@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that a grid depends on."""

    multiprocessors: int
    l2_bytes: int  # of the L2 cache


@dataclass(frozen=True)
class Work:
    """The tiles of a launch. A plane is one head of one sequence."""

    T: int
    S: int
    B: int
    heads: int  # H if blocks own queries, G if they own keys
    group: int  # query heads per key head
    tiles: int  # of a plane
    plane_bytes: int  # that the tiles of one plane read together

    @property
    def planes(self) -> int:
        """Heads times sequences."""
        return self.B * self.heads


def choose(kind: str, D: int, T: int, causal: bool) -> HopperPlan:
    """Return the tuned plan for heads of width D and T queries. kind: "fwd", "dq" or "dkdv".

    In batch-invariant mode the causal forward has tiles of a fixed number of keys.
    """
    if kind == "fwd" and causal and is_batch_invariant():
        return exact_plan(D, T)
    rows = TABLE[kind, D, causal].items()
    return next(plan for longest, plan in rows if longest is None or longest >= T)


def launch_tiles(
    kernel,
    shared: int,
    plan: HopperPlan,
    work: Work,
    gpu: Gpu,
    maps: Array,
    arrays: tuple,
    *scalars,
) -> None:
    """Start a kernel on as many blocks as the GPU holds at once; they compute all tiles of `work`.

    shared: bytes of shared memory. Kernel arguments: maps, arrays, a tile counter, the sizes of
    `work`, scalars.
    """
    tiles, planes = plan.tiles, work.planes
    grid = min(work.tiles * planes, gpu.multiprocessors * tiles.blocks)
    fitting = gpu.l2_bytes // 2 // max(work.plane_bytes, 1)
    together = max(1, min(planes, plan.planes or fitting))
    sizes = work.T, work.S, work.B, work.heads, work.group, together
    counter = tile_counter(maps, kernel.py_func.__name__)
    args = maps, *arrays, counter, *map(np.int32, sizes), *scalars
    block = 128 * (tiles.warpgroups + 1)
    overlap = can_overlap(maps)
    launch(kernel, grid, block, *args, shared=shared, overlap=overlap)


def forward(
    o_BTHD: Array,
    lse_BHT: Array,
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    causal: bool,
    gpu: Gpu,
    bounds: KeyBounds = UNBOUNDED,
) -> None:
    """Fill o and lse. q, k, v: arrays that a tensor map can describe
    (primitives.tma.mappable)."""
    plan = choose("fwd", q.shape[3], q.shape[1], causal)
    fill_o(o_BTHD, lse_BHT, q, k, v, scale, causal, gpu, plan, bounds)


def fill_o(
    o_BTHD, lse_BHT, q, k, v, scale, causal, gpu, plan: HopperPlan, bounds=UNBOUNDED
) -> None:
    """`forward` with a given plan."""
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    tiles = plan.tiles
    maps = tensor_maps((q, tiles.rows), (k, tiles.step), (v, tiles.step), (o_BTHD, 16))
    kernel = make_fwd_kernel(D, causal, tiles, bounds.kind)
    work = Work(T, S, B, H, H // G, -(-T // tiles.rows), 4 * S * D)
    lse = lse_BHT.reshape(-1)
    shared = fwd_shared_bytes(D, tiles)
    arrays = lse, bounds.first(lse)
    launch_tiles(kernel, shared, plan, work, gpu, maps, arrays, np.float32(scale))


def paged_forward(
    o_NHD: Array,
    q_NHD: Array,
    k_RGSD: Array,
    v_RGSD: Array,
    edges_E: Array,
    history_A: Array,
    tables_AM: Array,
    longest: int,
    scale: float,
    gpu: Gpu,
    window: int = 0,
) -> None:
    """Fill o: context_attention.py's arrays in bf16, contiguous.

    The tile of keys is always that of the longest prompts, so the order of additions depends on
    nothing but a key's position.
    """
    N, H, D = q_NHD.shape
    R, G, S, _ = k_RGSD.shape
    A, M = tables_AM.shape
    if longest == 0:
        return
    plan = choose("fwd", D, 2**31, True)
    tiles = plan.tiles
    box = math.gcd(plan.tiles.step, S)
    q, o = (x.reshape(1, N, H, D) for x in (q_NHD, o_NHD))
    k, v = (x.reshape(R, G * S, 1, D) for x in (k_RGSD, v_RGSD))
    maps = tensor_maps((q, tiles.rows), (k, box), (v, box), (o, 16))
    work = Work(longest, M * S, A, H, H // G, -(-longest // tiles.rows), 4 * M * S * D)
    arrays = o_NHD.reshape(-1), edges_E, history_A, tables_AM.reshape(-1)
    scalars = *map(np.int32, (N, R, M)), np.float32(scale)
    kernel = make_paged_kernel(D, S, tiles, window)
    shared = fwd_shared_bytes(D, tiles)
    launch_tiles(kernel, shared, plan, work, gpu, maps, arrays, *scalars)
