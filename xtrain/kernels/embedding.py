"""Embedding: look up rows of a table.   ids: (N,) integers in [0, V)   w: (V, C)   x: (N, C)

    forward    x[n] = w[ids[n]]
    backward   x = P w with P[n, v] = 1 if ids[n] == v else 0, so dw = P^T dx:
               dw[v] = sum of dx[n] over the n with ids[n] == v

Nothing is saved but the ids. Bytes moved, forward: read the rows of w that occur, write N rows. Backward: read dx, read
and write the rows of dw that occur.

The sum in the backward is the difficulty: thousands of positions may hold the same token. Atomic additions would be
short to write, but float addition is not associative and atomics come in any order: other bits every run. Instead

    sort    the positions by (token, n): a plan, from the ids alone. Integers, so nothing depends on who comes first.
            A radix sort of two digits: a token is high T + low, T a power of two. `split` orders tiles of TILE_IDS ids
            by their high digit; then a block of `sort` takes one high digit from all tiles and orders it by the low.
            ids   7 2 7 2 7 9          plan   n      1 3 | 0 2 4 | 5
                                              token  2 2 | 7 7 7 | 9
    sum     a thread owns 8 columns of up to PIECE neighbouring positions of one token and adds their rows in order.
            A token that occurs more often has several pieces, whose sums go to `partial`.
    join    the pieces of such a token are added, in order.

So a token's sum is always added in the same order, whatever else is in the batch; up to PIECE occurrences it is the order
of n. And no thread adds more than PIECE rows, even when all tokens are the same.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numba import boolean, cuda, float32, int32, int64, uint32

from ..device import Array
from .primitives.flat import (
    BLOCK,
    EACH,
    QUAD,
    blocks_for_rows,
    load,
    make_place,
    position,
    store,
    whole_rows,
)
from .primitives.ptx import device, kernel, wait_for_previous
from .primitives.reduce import FULL, warp_sum
from .runtime.cost import declare_cost
from .runtime.launch import (
    FLOATS,
    can_overlap,
    check,
    check_array,
    check_ids,
    empty,
    launch,
    on_host,
)

NAN = float32(math.nan)
AHEAD = 4  # rows under way before the first is used
MIN_BLOCKS = 4  # per multiprocessor: without this promise the compiler saves registers by loading row after row

TILE_IDS = 1024  # ids of one block of `split`
COUNTS = 8192  # of a sorting block, at most: one per warp and value of a digit; 32 KB

PIECE = 32  # rows that one thread adds up at most
SLICES = EACH  # of the pieces, when they are joined
JOIN_LOOK = 8  # positions that a block looks at there
JOIN_GAP = 32 * QUAD  # between the two quads of a thread there


# ----------------------------------------------------------------------------- reference
def embedding_ref(ids_N, w_VC):
    """-> the rows w[ids] (N, C)"""
    return w_VC[ids_N]


def embedding_bwd_ref(dx_NC, ids_N, V):
    """-> dw (V, C), of bf16 in float32"""
    dw_VC = np.zeros((V, dx_NC.shape[1]), np.result_type(dx_NC.dtype, np.float32))
    np.add.at(dw_VC, ids_N, dx_NC)  # in the order of n
    return dw_VC


# ----------------------------------------------------------------------------- forward
@functools.cache
def make_fwd_kernel(C, whole):
    place, gap = make_place(C)

    @kernel(BLOCK, MIN_BLOCKS)
    def embedding_fwd_kernel(x, ids_N, w, V):
        """Grid blocks_for_rows(ceil(N / AHEAD), C), block BLOCK. A thread copies 8 columns of AHEAD rows.

        x: flat (N C), w: flat (V C). An id outside the table gives NaN.
        """
        rows = cuda.local.array((AHEAD, EACH), float32)
        known = cuda.local.array(AHEAD, boolean)
        g, c = place()
        first, N = g * AHEAD, ids_N.size
        if first >= N:
            return
        for a in range(AHEAD):  # without a condition, so that all are under way at once
            v = int64(ids_N[first + a if first + a < N else N - 1])
            known[a] = v >= 0 and v < V
            i = v * C if known[a] else int64(0)
            load(rows[a], w, i + c, gap, i + C, whole)
        for a in range(AHEAD):
            if first + a < N:
                for j in range(EACH):
                    rows[a, j] = rows[a, j] if known[a] else NAN
                i = (first + a) * C
                store(x, i + c, gap, i + C, rows[a], whole)

    # of the table only the rows that occur
    declare_cost(embedding_fwd_kernel, nbytes=lambda x, ids_N, w, V: 2 * x.nbytes + ids_N.nbytes)
    return embedding_fwd_kernel


# ----------------------------------------------------------------------------- backward, plainly
@cuda.jit
def embedding_bwd_naive_kernel(dw_VC, dx_NC, ids_N):
    """Grid (V, ceil(C / BLOCK)), block BLOCK. A thread per element of dw: V C N steps."""
    v = int64(cuda.blockIdx.x)
    c = cuda.blockIdx.y * BLOCK + cuda.threadIdx.x
    if c < dw_VC.shape[1]:
        acc = float32(0.0)
        for n in range(ids_N.size):
            if int64(ids_N[n]) == v:
                acc += dx_NC[n, c]
        dw_VC[v, c] += acc


# ----------------------------------------------------------------------------- backward: sort
def digit_values(V: int) -> int:
    """How many values a digit has: a power of two. Two digits tell V tokens apart, the high one with a quarter of them.

    Raises ValueError for a table of more than 16 million rows.
    """
    T = 32
    while T * T < 4 * V:
        T *= 2
    check(T <= COUNTS, f"embedding backward: a table of {V} rows, {COUNTS**2 // 4} at most")
    return T


def sorting_warps(T: int) -> int:
    """Of a block that counts digits of T values."""
    return min(32, COUNTS // T)


@device
def next_place(counts, mine, digit):
    """Where this lane's element goes: its digit's count, plus the lanes below with the same digit. The count moves on.

    mine: where this warp's counts begin. digit -1: no element. All lanes must call.
    """
    same = cuda.match_any_sync(FULL, digit)  # the lanes that hold the same digit
    rank = cuda.popc(same & uint32((1 << cuda.laneid) - 1))
    i = uint32(mine + digit)
    place = counts[i] + rank if digit >= 0 else 0
    cuda.syncwarp()  # everybody has read the counts
    if digit >= 0 and rank == 0:
        counts[i] += cuda.popc(same)
    cuda.syncwarp()  # the counts are those of the next call
    return place


def make_scan(T):
    WARPS = sorting_warps(T)
    OWNERS = min(T, 32 * WARPS)  # threads that own digits: whole warps
    OWN = T // OWNERS  # digits of each

    @device
    def scan(first_E, counts, below_W):
        """counts: how many elements each warp has of each digit. Becomes: where the first of them goes.

        first_E (T + 1): where each digit begins, and the end. below_W (WARPS): what comes before, a part per warp.
        """
        tid, lane = uint32(cuda.threadIdx.x), cuda.laneid
        count = cuda.local.array(WARPS, int32)
        mine = upto = p = int32(0)
        if tid < OWNERS:
            for i in range(OWN * WARPS):
                mine += counts[uint32(i % WARPS * T + tid * OWN + i // WARPS)]
            upto = mine  # of this warp's threads, up to this one
            for step in (1, 2, 4, 8, 16):
                other = cuda.shfl_up_sync(FULL, upto, step)
                upto += other if lane >= step else 0
            p = warp_sum(below_W[lane] if lane < WARPS else 0) + upto - mine
        cuda.syncthreads()  # below is read: its memory is used again
        if tid < OWNERS and lane == 31:
            below_W[tid >> uint32(5)] = upto
        cuda.syncthreads()  # every warp's sum is there
        if tid < OWNERS:
            for w in range(OWNERS // 32):
                p += below_W[w] if w < tid >> uint32(5) else 0
            for digit in range(tid * OWN, tid * OWN + OWN):
                first_E[digit] = p
                for w in range(WARPS):
                    count[w] = counts[uint32(w * T + digit)]
                for w in range(WARPS):
                    counts[uint32(w * T + digit)] = p
                    p += count[w]
            if tid == OWNERS - 1:
                first_E[T] = p
        cuda.syncthreads()  # all of it is written

    return scan


@functools.cache
def make_split_kernel(T):
    WARPS, SHIFT, EDGES, scan = sorting_warps(T), T.bit_length() - 1, T + 1, make_scan(T)
    ROUNDS = TILE_IDS // (32 * WARPS)

    @kernel(32 * WARPS)
    def embedding_split_kernel(split_n, first_IE, ids_N, V):
        """Grid ceil(N / TILE_IDS), block 32 WARPS. Orders the ids of a tile by their high digit, and by n.

        split_n: (n within the tile) T + low digit. first_IE: where each high digit begins in each tile, and the end.
        Ids outside the table are left out.
        """
        counts = cuda.shared.array(COUNTS, int32)
        below_W = cuda.shared.array(WARPS, int32)
        first_E = cuda.shared.array(EDGES, int32)
        high = cuda.local.array(ROUNDS, int32)
        rest = cuda.local.array(ROUNDS, int32)
        tid, tile = cuda.threadIdx.x, int64(cuda.blockIdx.x)
        mine = (tid >> 5) * T  # where the warp's own counts begin
        for k in range(T // 32):
            counts[uint32(mine + cuda.laneid + 32 * k)] = 0
        if tid < WARPS:
            below_W[tid] = 0
        cuda.syncwarp()  # the warp's counts are zero
        for k in range(ROUNDS):
            n = (tid >> 5) * (32 * ROUNDS) + 32 * k + cuda.laneid
            i = tile * TILE_IDS + n
            token = int64(ids_N[i if i < ids_N.size else 0])
            known = i < ids_N.size and token >= 0 and token < V
            high[k] = token >> SHIFT if known else -1
            rest[k] = n * T + (token & (T - 1))
            if known:
                cuda.atomic.add(counts, uint32(mine + high[k]), 1)
        cuda.syncthreads()  # all counts are there
        scan(first_E, counts, below_W)
        for k in range(ROUNDS):
            place = next_place(counts, mine, high[k])
            if high[k] >= 0:
                split_n[tile * TILE_IDS + place] = rest[k]
        for e in range(tid, EDGES, 32 * WARPS):
            first_IE[tile, e] = first_E[e]

    return embedding_split_kernel


@functools.cache
def make_sort_kernel(T):
    WARPS, SHIFT, EDGES, scan = sorting_warps(T), T.bit_length() - 1, T + 1, make_scan(T)

    @kernel(32 * WARPS)
    def embedding_sort_kernel(plan_N4, split_n, first_IE):
        """Grid ceil(V / T), block 32 WARPS. Block h takes high digit h from all tiles and orders it by the low digit.

        plan[p] = n, token, first, last: in sorted order the positions first .. last - 1 hold this token. After those
        of all tokens, first is -1.
        """
        counts = cuda.shared.array(COUNTS, int32)
        below_W = cuda.shared.array(WARPS, int32)
        first_E = cuda.shared.array(EDGES, int32)
        tid, h = cuda.threadIdx.x, cuda.blockIdx.x
        warp, tiles, N = tid >> 5, first_IE.shape[0], plan_N4.shape[0]
        mine = warp * T
        for k in range(T // 32):
            counts[uint32(mine + cuda.laneid + 32 * k)] = 0
        cuda.syncwarp()  # the warp's counts are zero
        part = (tiles + WARPS - 1) // WARPS  # neighbouring tiles: the order of n
        begin = warp * part
        end = begin + part if begin + part < tiles else tiles
        below = int32(0)
        for tile in range(begin, end):
            first, last = first_IE[tile, h], first_IE[tile, h + 1]
            below += first
            for i in range(first + cuda.laneid, last, 32):
                low = split_n[tile * TILE_IDS + i] & (T - 1)
                cuda.atomic.add(counts, uint32(mine + low), 1)
        if cuda.laneid == 0:
            below_W[warp] = below
        cuda.syncthreads()  # all counts are there
        scan(first_E, counts, below_W)
        for tile in range(begin, end):
            first, last = first_IE[tile, h], first_IE[tile, h + 1]
            for i in range(first + cuda.laneid, last + cuda.laneid, 32):  # in step: whole warps
                rest = split_n[tile * TILE_IDS + (i if i < last else last - 1)]
                low = int32(rest & (T - 1)) if i < last else int32(-1)
                p = next_place(counts, mine, low)
                if i < last:
                    plan_N4[p, 0] = tile * TILE_IDS + (rest >> SHIFT)
                    plan_N4[p, 1] = h * T + low
                    plan_N4[p, 2] = first_E[low]
                    plan_N4[p, 3] = first_E[low + 1]
        if h == cuda.gridDim.x - 1:  # what is left of the plan belongs to no token
            for p in range(first_E[T] + tid, N, 32 * WARPS):
                plan_N4[p, 2] = -1

    declare_cost(embedding_sort_kernel, nbytes=lambda *_: None)  # it depends on the ids
    return embedding_sort_kernel


# ----------------------------------------------------------------------------- backward: sum and join
@device
def slot(first, piece):
    """The row of `partial` for a piece of the token that begins at `first`.

    Two tokens may share PIECE neighbouring positions: one ends there, another begins. So first pieces have rows of
    their own, the even ones.
    """
    return 2 * (first // PIECE + piece) + (1 if piece > 0 else 0)


@functools.cache
def make_bwd_kernel(C, whole):
    place, gap = make_place(C)

    @kernel(BLOCK, MIN_BLOCKS)
    def embedding_bwd_kernel(dw, partial, dx, plan_N4):
        """Grid blocks_for_rows(N, C), block BLOCK. Position p of the plan, if a piece begins there; 8 columns.

        dw: flat (V C), dx: flat (N C), partial: flat (slots, C). A thread waits for memory, so it asks early: for all
        of the plan, then for its first row and dw, then for AHEAD rows at once. Numbers are short to save registers.
        """
        acc = cuda.local.array(EACH, float32)
        old = cuda.local.array(EACH, float32)
        rows = cuda.local.array((AHEAD, EACH), float32)
        p, c = place()
        if p >= plan_N4.shape[0]:
            return
        p = uint32(p)
        n, token, first, last = plan_N4[p, 0], plan_N4[p, 1], plan_N4[p, 2], plan_N4[p, 3]
        if (n | token | first | last) < 0:  # first is; a sum of all keeps the loads together
            return
        if uint32(p - uint32(first)) % uint32(PIECE) != 0:
            return
        alone = last - first <= PIECE
        if alone:
            i = int64(token) * C
            load(old, dw, i + c, gap, i + C, whole)
        i = int64(n) * C
        load(acc, dx, i + c, gap, i + C, whole)
        count = int32(PIECE if p + PIECE < last else last - p)
        for q in range(int32(1), count, int32(AHEAD)):  # most tokens occur once: no loop
            for a in range(AHEAD):  # without a condition, so that all are under way at once
                step = q + a if q + a < count else count - 1
                i = int64(plan_N4[uint32(p + step), 0]) * C
                load(rows[a], dx, i + c, gap, i + C, whole)
            for a in range(AHEAD):
                for j in range(EACH):
                    acc[j] += rows[a, j] if q + a < count else float32(0.0)
        if alone:
            i = int64(token) * C
            for j in range(EACH):
                acc[j] += old[j]
            store(dw, i + c, gap, i + C, acc, whole)
        else:
            i = slot(int64(first), (int64(p) - first) // PIECE) * C
            store(partial, i + c, gap, i + C, acc, whole)

    declare_cost(embedding_bwd_kernel, nbytes=lambda *_: None)  # it depends on the ids
    return embedding_bwd_kernel


@functools.cache
def make_join_kernel(C, whole, overlap):
    @kernel(32 * SLICES)
    def embedding_join_kernel(dw, partial, plan_N4):
        """Grid (ceil(N / (JOIN_LOOK PIECE)), ceil(C / 256)), block (32, SLICES). dw += the pieces of tokens with several.

        Such a token covers a position that is a multiple of PIECE; whoever looks at the first of these joins it. A block
        looks at JOIN_LOOK, and owns 256 columns. Slice y adds pieces y, y + SLICES, ...; then the slices are added.
        """
        tile = cuda.shared.array((SLICES, EACH, 32), float32)
        acc = cuda.local.array(EACH, float32)
        parts = cuda.local.array((AHEAD, EACH), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        c = cuda.blockIdx.y * (2 * JOIN_GAP) + x * QUAD
        inside = whole and c + JOIN_GAP + QUAD <= C
        if overlap:
            wait_for_previous()
        p0 = int64(cuda.blockIdx.x) * (JOIN_LOOK * PIECE)
        p = p0 + x * PIECE
        joins = False
        if x < JOIN_LOOK and p < plan_N4.shape[0]:
            first, last = plan_N4[p, 2], plan_N4[p, 3]
            joins = first >= 0 and last - first > PIECE and p - first < PIECE
        found = cuda.ballot_sync(FULL, joins)  # the same in all warps
        for k in range(JOIN_LOOK):
            if found & (1 << k):
                p = p0 + k * PIECE
                token, first, last = int64(plan_N4[p, 1]), int64(plan_N4[p, 2]), plan_N4[p, 3]
                pieces = (last - first + PIECE - 1) // PIECE
                for j in range(EACH):
                    acc[j] = float32(0.0)
                for q in range(y, pieces, AHEAD * SLICES):
                    for a in range(AHEAD):
                        piece = q + a * SLICES
                        i = slot(first, piece if piece < pieces else q) * C
                        load(parts[a], partial, i + c, JOIN_GAP, i + C, inside)
                    for a in range(AHEAD):
                        for j in range(EACH):
                            acc[j] += parts[a, j] if q + a * SLICES < pieces else float32(0.0)
                for j in range(EACH):
                    tile[y, j, x] = acc[j]
                cuda.syncthreads()  # the sums of all slices are there
                column = position(c, JOIN_GAP, y)  # SLICES = EACH: a warp per register
                if column < C:
                    total = float32(0.0)
                    for s in range(SLICES):
                        total += tile[s, y, x]
                    dw[token * C + column] += total
                cuda.syncthreads()  # the tile is free for the next token

    declare_cost(embedding_join_kernel, nbytes=lambda *_: None)  # it depends on the ids
    return embedding_join_kernel


# ----------------------------------------------------------------------------- launchers
@dataclass(frozen=True)
class Plan:
    """What embedding_plan makes of N ids for a table of V rows. The kernels of the backward read and write where it says, so
    embedding_bwd takes nothing else.
    """

    order_N4: Array  # int32, as embedding_sort_kernel writes it
    V: int


def embedding_fwd(ids_N: Array, w_VC: Array, dtype=None) -> Array:
    """ids (N,) of any integer type, w (V, C) float32 or bf16 -> x (N, C) in `dtype`, by default that of w.

    An id outside [0, V): ValueError on the CPU; a row of NaN on the GPU (looking costs a copy).
    """
    check_array("embedding", "w", w_VC, (None, None), FLOATS)
    dtype = np.dtype(w_VC.dtype if dtype is None else dtype)
    if _check_ids(ids_N, w_VC.shape[0], w_VC):
        return embedding_ref(ids_N, w_VC).astype(dtype, copy=False)
    check(dtype.name in FLOATS, f"embedding: to {dtype}, expected float32 or bfloat16")
    N, (V, C) = ids_N.size, w_VC.shape
    check(V > 0, f"embedding: the table has shape {w_VC.shape}")
    x_NC = empty(w_VC, (N, C), dtype)
    if N and C:
        x, w = x_NC.reshape(-1), w_VC.reshape(-1)
        fwd_kernel = make_fwd_kernel(C, whole_rows(C, x, w))
        launch(fwd_kernel, blocks_for_rows(-(-N // AHEAD), C), BLOCK, x, ids_N, w, V)
    return x_NC


def embedding_plan(ids_N: Array, V: int) -> Plan | None:
    """The plan of the backward for ids (N,) and a table of V rows. None on the CPU, which needs none.

    It depends on the ids alone, so it can be made while there is no gradient yet. ValueError as in embedding_bwd.
    """
    if _check_ids(ids_N, V):
        return None
    N, T = ids_N.size, digit_values(V)
    plan_N4, tiles = empty(ids_N, (N, 4), np.int32), -(-N // TILE_IDS)
    split_n, first_IE = (empty(ids_N, n, np.int32) for n in (tiles * TILE_IDS, (tiles, T + 1)))
    threads = 32 * sorting_warps(T)
    if N:
        launch(make_split_kernel(T), tiles, threads, split_n, first_IE, ids_N, V)
        launch(make_sort_kernel(T), -(-V // T), threads, plan_N4, split_n, first_IE)
    return Plan(plan_N4, V)


def embedding_bwd(dx_NC: Array, ids_N: Array, dw_VC: Array, plan: Plan | None = None) -> None:
    """dx (N, C) float32 or bf16, ids (N,). Adds dw to dw_VC (V, C) float32. Same bits every run.

    plan: what embedding_plan says of these ids; by default it is made here. Rows whose id does not occur are left alone.
    An id outside [0, V): ValueError on the CPU; on the GPU it adds nothing.
    """
    check_array("embedding backward", "dw", dw_VC, (None, None))
    V, C = dw_VC.shape
    N = ids_N.size
    check_array("embedding backward", "dx", dx_NC, (N, C), FLOATS)
    if not isinstance(plan, Plan | None):
        kind = type(plan).__name__
        raise TypeError(f"embedding backward: plan is {kind}, pass what embedding_plan gives")
    if _check_ids(ids_N, V, dx_NC, dw_VC):
        dw_VC += embedding_bwd_ref(dx_NC, ids_N, V)
        return
    if not (N and V and C):
        return
    plan = embedding_plan(ids_N, V) if plan is None else plan
    check(plan.V == V, f"embedding backward: a plan for {plan.V} rows, dw has {V}")
    plan_N4 = plan.order_N4
    check_array("embedding backward", "plan", plan_N4, (N, 4), ("int32",))
    partial = empty(dw_VC, 2 * -(-N // PIECE) * C)
    dw, dx = dw_VC.reshape(-1), dx_NC.reshape(-1)
    whole = whole_rows(C, dw, dx, partial)
    launch(make_bwd_kernel(C, whole), blocks_for_rows(N, C), BLOCK, dw, partial, dx, plan_N4)
    grid = (-(-N // (JOIN_LOOK * PIECE)), -(-C // (2 * JOIN_GAP)))
    overlap = can_overlap(dw)
    join_kernel = make_join_kernel(C, whole, overlap)
    launch(join_kernel, grid, (32, SLICES), dw, partial, plan_N4, overlap=overlap)


def _check_ids(ids_N, V, *others):
    """-> True: all on the host, and every id was looked at."""
    check_ids("embedding", "ids", ids_N)
    check_array("embedding", "ids", ids_N, (None,), (ids_N.dtype.name,))
    if not on_host(ids_N, *others):
        return False
    outside = np.flatnonzero((ids_N < 0) | (ids_N >= V))
    if outside.size:
        n = int(outside[0])
        raise ValueError(
            f"embedding: id {ids_N[n]} at position {n} is outside the table of {V} rows"
        )
    return True
