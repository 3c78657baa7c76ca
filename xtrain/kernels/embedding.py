"""Embedding: look up the rows of a table.   ids: (N,) integers in [0, V)   w: (V, C)   x: (N, C)

    forward    x[n] = w[ids[n]]
    backward   x = P w with P[n, v] = 1 if ids[n] == v else 0, so dw = P^T dx:
               dw[v] = sum of dx[n] over the n with ids[n] == v

Only the ids are saved. Bytes moved, forward: read the rows of w that occur, write N rows. Backward:
read dx, read and write the rows of dw that occur.

The difficulty is the sum in the backward: thousands of positions may hold the same token. Atomic
additions would be simple, but float addition is not associative and atomics run in any order, so
the bits would differ from run to run. Instead

    sort    the positions by (token, n), from the ids alone: this is the plan. It uses integers, so
            the order in which threads run does not matter. A radix sort of two digits: a token is
            high T + low, T a power of two. `split` orders tiles of TILE_IDS ids by their high
            digit; then each block of `sort` collects one high digit from all tiles and orders it by
            the low digit.
            ids   7 2 7 2 7 9          plan   n      1 3 | 0 2 4 | 5
                                              token  2 2 | 7 7 7 | 9
    sum     a thread owns 8 columns of a segment, up to SEGMENT neighbouring positions of one token,
            and adds their rows in order. A token that occurs more often has several segments, whose
            sums go to `partial`.
    join    the segments of such a token are added in order.

So the terms of a token's sum are always added in the same order, independent of the rest of the
batch; up to SEGMENT occurrences it is the order of n. No thread adds more than SEGMENT rows, even
if all tokens are the same.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from ..device import Array
from .primitives.flat import (
    BLOCK,
    CHUNK,
    QUAD,
    blocks_for_rows,
    can_vectorize_rows,
    load,
    make_row_and_column,
    position,
    store,
)
from .primitives.ptx import device, kernel, load1, store1, wait_for_previous
from .primitives.reduce import FULL, warp_sum
from .runtime.compiler import boolean, cuda, float32, int32, int64, uint32
from .runtime.cost import declare_cost
from .runtime.launch import (
    FLOATS,
    can_overlap,
    check,
    check_array,
    check_ids,
    dtype_name,
    empty,
    launch,
    on_host,
)

NAN = float32(math.nan)
IN_FLIGHT = 4  # rows that a thread loads before it uses the first
# blocks per multiprocessor: without this bound the compiler saves registers by loading row after
# row
MIN_BLOCKS = 4

TILE_IDS = 1024  # ids per block of `split`
SHARED = 12288  # 32-bit integers in the 48 KB of shared memory that a sorting block may have
VALUES = 4096  # of a digit, at most

SEGMENT = 32  # rows that one thread adds up at most
SLICES = CHUNK  # into which `join` divides the segments of a token
JOIN_SEGMENTS = 8  # positions that a block looks at there
JOIN_GAP = 32 * QUAD  # between the two quads of a thread there


# ----------------------------------------------------------------------------- reference
def embedding_ref(ids_N, w_VC):
    """Return the rows w[ids] (N, C)."""
    return w_VC[ids_N]


def embedding_bwd_ref(dx_NC, ids_N, V):
    """Return dw (V, C), in float32 for bf16 dx."""
    dw_VC = np.zeros((V, dx_NC.shape[1]), np.result_type(dx_NC.dtype, np.float32))
    np.add.at(dw_VC, ids_N, dx_NC)  # in the order of n
    return dw_VC


# ----------------------------------------------------------------------------- forward
@functools.cache
def make_fwd_kernel(C, vectorized):
    """Return the forward kernel for rows of C columns.

    vectorized: 16-byte accesses, see can_vectorize_rows.
    """
    row_and_column, gap = make_row_and_column(C)

    @kernel(BLOCK, MIN_BLOCKS)
    def embedding_fwd_kernel(x, ids_N, w, V):
        """Grid blocks_for_rows(ceil(N / IN_FLIGHT), C), block BLOCK.

        A thread copies 8 columns of IN_FLIGHT rows. x: flat (N C), w: flat (V C). An id outside the
        table gives NaN.
        """
        rows = cuda.local.array((IN_FLIGHT, CHUNK), float32)
        in_table = cuda.local.array(IN_FLIGHT, boolean)
        group, c = row_and_column()
        first = group * IN_FLIGHT
        N = ids_N.size
        if first >= N:
            return
        for a in range(IN_FLIGHT):  # unconditional loads, so that all are in flight at once
            v = int64(ids_N[first + a if first + a < N else N - 1])
            in_table[a] = v >= 0 and v < V
            i = v * C if in_table[a] else int64(0)
            load(rows[a], w, i + c, gap, i + C, vectorized)
        for a in range(IN_FLIGHT):
            if first + a < N:
                for j in range(CHUNK):
                    rows[a, j] = rows[a, j] if in_table[a] else NAN
                i = (first + a) * C
                store(x, i + c, gap, i + C, rows[a], vectorized)

    # of the table only the rows that occur
    declare_cost(embedding_fwd_kernel, nbytes=lambda x, ids_N, w, V: 2 * x.nbytes + ids_N.nbytes)
    return embedding_fwd_kernel


# ----------------------------------------------------------------------------- backward, naive
@cuda.jit
def embedding_bwd_naive_kernel(dw_VC, dx_NC, ids_N):
    """Grid (V, ceil(C / BLOCK)), block BLOCK. One thread per element of dw: V C N steps."""
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
    """Return T, the number of values of a digit: a power of two with T^2 >= 4 V.

    The high digit uses at most a quarter of them. Raises ValueError for a table of more than 4
    million rows.
    """
    T = 32
    while T * T < 4 * V:
        T *= 2
    limit = VALUES**2 // 4
    check(T <= VALUES, f"embedding backward: the table has {V} rows, at most {limit} are supported")
    return T


def sorting_warps(T: int) -> int:
    """Return the warps of a block that sorts by digits of T values: a power of two.

    Shared memory has a counter per warp and value, a sum per warp, and the T + 1 starts of the
    values.
    """
    fit = (SHARED - T - 1) // (T + 1)
    return 1 << min(32, fit).bit_length() - 1


@device
def next_destination(counts, warp_base, digit):
    """Return the index to which this lane's element goes, and advance the counts.

    It is its digit's count, plus the number of lower lanes with the same digit.
    warp_base: start of this warp's counts.
    digit: -1: the lane has no element. All lanes must call it.
    """
    same = cuda.match_any_sync(FULL, digit)  # the lanes with the same digit
    rank = cuda.popc(same & uint32((1 << cuda.laneid) - 1))
    i = uint32(warp_base + digit)
    destination = counts[i] + rank if digit >= 0 else 0
    cuda.syncwarp()  # all lanes have read the counts
    if digit >= 0 and rank == 0:
        counts[i] += cuda.popc(same)
    cuda.syncwarp()  # the counts are ready for the next call
    return destination


def make_scan(T):
    """Return scan, which computes the prefix sum of a block's counts of digits with T values."""
    WARPS = sorting_warps(T)
    OWNERS = min(T, 32 * WARPS)  # threads that own digits: whole warps
    OWN = T // OWNERS  # digits of each

    @device
    def scan(first_E, counts, below_W):
        """Replace the counts of elements per warp and digit by the index of the first element.

        first_E (T + 1): start of each digit, and the end.
        below_W (WARPS): their sum is the number of elements before.
        """
        tid = uint32(cuda.threadIdx.x)
        lane = cuda.laneid
        count = cuda.local.array(WARPS, int32)
        own_count = inclusive = p = int32(0)
        if tid < OWNERS:
            for i in range(OWN * WARPS):
                own_count += counts[uint32(i % WARPS * T + tid * OWN + i // WARPS)]
            inclusive = own_count  # over the warp's threads, up to this one
            for step in (1, 2, 4, 8, 16):
                other = cuda.shfl_up_sync(FULL, inclusive, step)
                inclusive += other if lane >= step else 0
            p = warp_sum(below_W[lane] if lane < WARPS else 0) + inclusive - own_count
        cuda.syncthreads()  # below_W is read: its memory is reused
        if tid < OWNERS and lane == 31:
            below_W[tid >> uint32(5)] = inclusive
        cuda.syncthreads()  # every warp's sum is written
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
        cuda.syncthreads()  # first_E and counts are written

    return scan


@functools.cache
def make_split_kernel(T):
    """Return the first pass of the sort, for digits of T values."""
    WARPS = sorting_warps(T)
    SHIFT = T.bit_length() - 1
    EDGES = T + 1
    scan = make_scan(T)
    COUNTS = WARPS * T
    ROUNDS = TILE_IDS // (32 * WARPS)

    @kernel(32 * WARPS)
    def embedding_split_kernel(split_n, first_IE, ids_N, V):
        """Grid ceil(N / TILE_IDS), block 32 WARPS.

        Orders the ids of a tile by their high digit, then by n.

        split_n: (n within the tile) T + low digit.
        first_IE: start of each high digit in each tile, and the end. Ids outside the table are
        skipped.
        """
        counts = cuda.shared.array(COUNTS, int32)
        below_W = cuda.shared.array(WARPS, int32)
        first_E = cuda.shared.array(EDGES, int32)
        high = cuda.local.array(ROUNDS, int32)
        n_and_low = cuda.local.array(ROUNDS, int32)
        tid = cuda.threadIdx.x
        tile = int64(cuda.blockIdx.x)
        warp_base = (tid >> 5) * T  # start of the warp's counts
        for k in range(T // 32):
            counts[uint32(warp_base + cuda.laneid + 32 * k)] = 0
        if tid < WARPS:
            below_W[tid] = 0
        cuda.syncwarp()  # the warp's counts are zero
        for k in range(ROUNDS):
            n = (tid >> 5) * (32 * ROUNDS) + 32 * k + cuda.laneid
            i = tile * TILE_IDS + n
            token = int64(ids_N[i if i < ids_N.size else 0])
            in_table = i < ids_N.size and token >= 0 and token < V
            high[k] = token >> SHIFT if in_table else -1
            n_and_low[k] = n * T + (token & (T - 1))
            if in_table:
                cuda.atomic.add(counts, uint32(warp_base + high[k]), 1)
        cuda.syncthreads()  # all counts are there
        scan(first_E, counts, below_W)
        for k in range(ROUNDS):
            destination = next_destination(counts, warp_base, high[k])
            if high[k] >= 0:
                split_n[tile * TILE_IDS + destination] = n_and_low[k]
        for e in range(tid, EDGES, 32 * WARPS):
            first_IE[tile, e] = first_E[e]

    return embedding_split_kernel


@functools.cache
def make_sort_kernel(T):
    """Return the second pass of the sort, for digits of T values."""
    WARPS = sorting_warps(T)
    SHIFT = T.bit_length() - 1
    EDGES = T + 1
    scan = make_scan(T)
    COUNTS = WARPS * T

    @kernel(32 * WARPS)
    def embedding_sort_kernel(plan_N4, split_n, first_IE):
        """Grid ceil(V / T), block 32 WARPS.

        Block h collects high digit h from all tiles and orders it by the low digit.

        plan[p] = n, token, first, last: in sorted order, positions first .. last - 1 hold this
        token.
        After the last token, first is -1.
        """
        counts = cuda.shared.array(COUNTS, int32)
        below_W = cuda.shared.array(WARPS, int32)
        first_E = cuda.shared.array(EDGES, int32)
        tid, h = cuda.threadIdx.x, cuda.blockIdx.x
        warp = tid >> 5
        tiles = first_IE.shape[0]
        N = plan_N4.shape[0]
        warp_base = warp * T
        for k in range(T // 32):
            counts[uint32(warp_base + cuda.laneid + 32 * k)] = 0
        cuda.syncwarp()  # the warp's counts are zero
        tiles_per_warp = (tiles + WARPS - 1) // WARPS  # neighbouring tiles: the order of n
        begin = warp * tiles_per_warp
        end = begin + tiles_per_warp if begin + tiles_per_warp < tiles else tiles
        below = int32(0)
        for tile in range(begin, end):
            first, last = first_IE[tile, h], first_IE[tile, h + 1]
            below += first
            for i in range(first + cuda.laneid, last, 32):
                low = split_n[tile * TILE_IDS + i] & (T - 1)
                cuda.atomic.add(counts, uint32(warp_base + low), 1)
        if cuda.laneid == 0:
            below_W[warp] = below
        cuda.syncthreads()  # all counts are there
        scan(first_E, counts, below_W)
        for tile in range(begin, end):
            first, last = first_IE[tile, h], first_IE[tile, h + 1]
            # All lanes of a warp iterate together.
            for i in range(first + cuda.laneid, last + cuda.laneid, 32):
                n_and_low = split_n[tile * TILE_IDS + (i if i < last else last - 1)]
                low = int32(n_and_low & (T - 1)) if i < last else int32(-1)
                p = next_destination(counts, warp_base, low)
                if i < last:
                    plan_N4[p, 0] = tile * TILE_IDS + (n_and_low >> SHIFT)
                    plan_N4[p, 1] = h * T + low
                    plan_N4[p, 2] = first_E[low]
                    plan_N4[p, 3] = first_E[low + 1]
        if h == cuda.gridDim.x - 1:  # the rest of the plan belongs to no token
            for p in range(first_E[T] + tid, N, 32 * WARPS):
                plan_N4[p, 2] = -1

    declare_cost(embedding_sort_kernel, nbytes=lambda *_: None)  # it depends on the ids
    return embedding_sort_kernel


# --------------------------------------------------------------------------- backward: sum and join
@device
def partial_row(first, segment):
    """Return the row of `partial` for a segment of the token whose positions start at `first`.

    One token may end and another may start within SEGMENT neighbouring positions. So first segments
    have separate rows, the even ones.
    """
    return 2 * (first // SEGMENT + segment) + (1 if segment > 0 else 0)


@functools.cache
def make_bwd_kernel(C, vectorized):
    """Return the kernel that sums segments, for rows of C columns.

    vectorized: 16-byte accesses, see can_vectorize_rows.
    """
    row_and_column, gap = make_row_and_column(C)

    @kernel(BLOCK, MIN_BLOCKS)
    def embedding_bwd_kernel(dw, partial, dx, plan_N4):
        """Grid blocks_for_rows(N, C), block BLOCK.

        A thread owns 8 columns of position p of the plan, if a segment starts there.
        dw: flat (V C), dx: flat (N C), partial: flat (rows, C).

        Latency dominates, so loads are issued early: the whole plan entry, then the first row and
        dw, then IN_FLIGHT rows at once. 32-bit numbers save registers.
        """
        acc = cuda.local.array(CHUNK, float32)
        old = cuda.local.array(CHUNK, float32)
        rows = cuda.local.array((IN_FLIGHT, CHUNK), float32)
        p, c = row_and_column()
        if p >= plan_N4.shape[0]:
            return
        p = uint32(p)
        n = plan_N4[p, 0]
        token = plan_N4[p, 1]
        first = plan_N4[p, 2]
        last = plan_N4[p, 3]
        # only first can be negative; testing all four keeps the loads together
        if (n | token | first | last) < 0:
            return
        if uint32(p - uint32(first)) % uint32(SEGMENT) != 0:
            return
        single_segment = last - first <= SEGMENT
        if single_segment:
            i = int64(token) * C
            load(old, dw, i + c, gap, i + C, vectorized)
        i = int64(n) * C
        load(acc, dx, i + c, gap, i + C, vectorized)
        count = int32(SEGMENT if p + SEGMENT < last else last - p)
        for q in range(int32(1), count, int32(IN_FLIGHT)):  # most tokens occur once: no loop
            for a in range(IN_FLIGHT):  # unconditional loads, so that all are in flight at once
                step = q + a if q + a < count else count - 1
                i = int64(plan_N4[uint32(p + step), 0]) * C
                load(rows[a], dx, i + c, gap, i + C, vectorized)
            for a in range(IN_FLIGHT):
                for j in range(CHUNK):
                    acc[j] += rows[a, j] if q + a < count else float32(0.0)
        if single_segment:
            i = int64(token) * C
            for j in range(CHUNK):
                acc[j] += old[j]
            store(dw, i + c, gap, i + C, acc, vectorized)
        else:
            i = partial_row(int64(first), (int64(p) - first) // SEGMENT) * C
            store(partial, i + c, gap, i + C, acc, vectorized)

    declare_cost(embedding_bwd_kernel, nbytes=lambda *_: None)  # it depends on the ids
    return embedding_bwd_kernel


@functools.cache
def make_join_kernel(C, vectorized, overlap):
    """Return the kernel that adds the segments of a token.

    overlap: it waits for the previous kernel itself (runtime/overlap.py).
    """

    @kernel(32 * SLICES)
    def embedding_join_kernel(dw, partial, plan_N4):
        """Grid (ceil(N / (JOIN_SEGMENTS SEGMENT)), ceil(C / 256)), block (32, SLICES).

        Adds to dw the sum of the segments of each token that has several. Such a token covers a
        position that is a multiple of SEGMENT; the block that owns the first of these joins it. A
        block owns
        JOIN_SEGMENTS such positions and 256 columns. Slice y adds segments y, y + SLICES, ...; then
        the slices are added.
        """
        tile = cuda.shared.array((SLICES, CHUNK, 32), float32)
        acc = cuda.local.array(CHUNK, float32)
        rows = cuda.local.array((IN_FLIGHT, CHUNK), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        c = cuda.blockIdx.y * (2 * JOIN_GAP) + x * QUAD
        inside = vectorized and c + JOIN_GAP + QUAD <= C
        if overlap:
            wait_for_previous()
        p0 = int64(cuda.blockIdx.x) * (JOIN_SEGMENTS * SEGMENT)
        p = p0 + x * SEGMENT
        joins = False
        if x < JOIN_SEGMENTS and p < plan_N4.shape[0]:
            first, last = plan_N4[p, 2], plan_N4[p, 3]
            joins = first >= 0 and last - first > SEGMENT and p - first < SEGMENT
        joined = cuda.ballot_sync(FULL, joins)  # the same in all warps
        for k in range(JOIN_SEGMENTS):
            if joined & (1 << k):
                p = p0 + k * SEGMENT
                token = int64(plan_N4[p, 1])
                first = int64(plan_N4[p, 2])
                last = plan_N4[p, 3]
                segments = (last - first + SEGMENT - 1) // SEGMENT
                for j in range(CHUNK):
                    acc[j] = float32(0.0)
                for q in range(y, segments, IN_FLIGHT * SLICES):
                    for a in range(IN_FLIGHT):
                        segment = q + a * SLICES
                        i = partial_row(first, segment if segment < segments else q) * C
                        load(rows[a], partial, i + c, JOIN_GAP, i + C, inside)
                    for a in range(IN_FLIGHT):
                        for j in range(CHUNK):
                            acc[j] += rows[a, j] if q + a * SLICES < segments else float32(0.0)
                for j in range(CHUNK):
                    tile[y, j, x] = acc[j]
                cuda.syncthreads()  # the sums of all slices are written
                column = position(c, JOIN_GAP, y)  # SLICES = CHUNK: one warp per register
                if column < C:
                    total = float32(0.0)
                    for s in range(SLICES):
                        total += tile[s, y, x]
                    store1(dw, token * C + column, load1(dw, token * C + column) + total)
                cuda.syncthreads()  # the tile is free for the next token

    declare_cost(embedding_join_kernel, nbytes=lambda *_: None)  # it depends on the ids
    return embedding_join_kernel


# ----------------------------------------------------------------------------- launchers
@dataclass(frozen=True)
class EmbeddingPlan:
    """The result of embedding_plan for N ids and a table of V rows.

    The backward kernels use its entries as unchecked indices, so embedding_bwd accepts no other
    type.
    """

    order_N4: Array  # int32, as embedding_sort_kernel writes it
    V: int


def embedding_fwd(ids_N: Array, w_VC: Array, dtype=None) -> Array:
    """Return the rows of w (V, C) for ids (N,): x (N, C) in `dtype`, by default that of w.

    ids: any integer dtype; w: float32 or bf16. An id outside [0, V) raises ValueError on the CPU;
    on the GPU, where the check would need a copy, it gives a row of NaN.
    """
    check_array("embedding", "w", w_VC, (None, None), FLOATS)
    dtype = np.dtype(w_VC.dtype if dtype is None else dtype)
    if _check_ids(ids_N, w_VC.shape[0], w_VC):
        return embedding_ref(ids_N, w_VC).astype(dtype, copy=False)
    check(dtype_name(dtype) in FLOATS, f"embedding: to {dtype}, expected float32 or bfloat16")
    N = ids_N.size
    V, C = w_VC.shape
    check(V > 0, f"embedding: the table has shape {w_VC.shape}")
    x_NC = empty(w_VC, (N, C), dtype)
    if N and C:
        x = x_NC.reshape(-1)
        w = w_VC.reshape(-1)
        fwd_kernel = make_fwd_kernel(C, can_vectorize_rows(C, x, w))
        launch(fwd_kernel, blocks_for_rows(-(-N // IN_FLIGHT), C), BLOCK, x, ids_N, w, V)
    return x_NC


def embedding_plan(ids_N: Array, V: int) -> EmbeddingPlan | None:
    """Return the plan of the backward for ids (N,) and a table of V rows.

    None on the CPU, which does not need one. It depends only on the ids, so it can be computed
    before the gradient exists. Raises ValueError as embedding_bwd does, on the CPU not for an id
    outside the table: embedding_fwd does.
    """
    if on_host(ids_N):
        return None
    _check_ids(ids_N, V)
    N = ids_N.size
    T = digit_values(V)
    plan_N4 = empty(ids_N, (N, 4), np.int32)
    tiles = -(-N // TILE_IDS)
    split_n = empty(ids_N, tiles * TILE_IDS, np.int32)
    first_IE = empty(ids_N, (tiles, T + 1), np.int32)
    threads = 32 * sorting_warps(T)
    if N:
        launch(make_split_kernel(T), tiles, threads, split_n, first_IE, ids_N, V)
        launch(make_sort_kernel(T), -(-V // T), threads, plan_N4, split_n, first_IE)
    return EmbeddingPlan(plan_N4, V)


def embedding_bwd(
    dx_NC: Array, ids_N: Array, dw_VC: Array, plan: EmbeddingPlan | None = None
) -> None:
    """Add the gradient to dw (V, C): dx (N, C) and dw float32 or bf16, ids (N,).

    The same bits in every run; in bf16 rounded once. Rows whose id does not occur stay unchanged.
    plan: the result of embedding_plan for these ids; None: it is computed here.
    An id outside [0, V) raises ValueError on the CPU; on the GPU it is ignored.
    """
    check_array("embedding backward", "dw", dw_VC, (None, None), FLOATS)
    V, C = dw_VC.shape
    N = ids_N.size
    check_array("embedding backward", "dx", dx_NC, (N, C), FLOATS)
    if not isinstance(plan, EmbeddingPlan | None):
        kind = type(plan).__name__
        raise TypeError(f"embedding backward: plan is {kind}, pass the result of embedding_plan")
    if _check_ids(ids_N, V, dx_NC, dw_VC):
        np.add(dw_VC, embedding_bwd_ref(dx_NC, ids_N, V), out=dw_VC, casting="unsafe")
        return
    if not (N and V and C):
        return
    if plan is None:
        plan = embedding_plan(ids_N, V)
    assert plan is not None  # the arrays are on a GPU
    check(plan.V == V, f"embedding backward: the plan is for {plan.V} rows, dw has {V}")
    plan_N4 = plan.order_N4
    check_array("embedding backward", "plan", plan_N4, (N, 4), ("int32",))
    partial = empty(dw_VC, 2 * -(-N // SEGMENT) * C, np.float32)
    dw = dw_VC.reshape(-1)
    dx = dx_NC.reshape(-1)
    vectorized = can_vectorize_rows(C, dw, dx, partial)
    launch(make_bwd_kernel(C, vectorized), blocks_for_rows(N, C), BLOCK, dw, partial, dx, plan_N4)
    grid = (-(-N // (JOIN_SEGMENTS * SEGMENT)), -(-C // (2 * JOIN_GAP)))
    overlap = can_overlap(dw)
    join_kernel = make_join_kernel(C, vectorized, overlap)
    launch(join_kernel, grid, (32, SLICES), dw, partial, plan_N4, overlap=overlap)


def _check_ids(ids_N, V, *others):
    """Return True if all arrays are NumPy arrays; then every id is checked."""
    check_ids("embedding", "ids", ids_N)
    check_array("embedding", "ids", ids_N, (None,), (dtype_name(ids_N.dtype),))
    if not on_host(ids_N, *others):
        return False
    outside = np.flatnonzero((ids_N < 0) | (ids_N >= V))
    if not outside.size:
        return True
    n = int(outside[0])
    raise ValueError(f"embedding: id {ids_N[n]} at position {n} is outside the table of {V} rows")
