"""The order of rows by expert: a stable sort with padding.   experts: (N, K) -> ExpertOrder

A pair is a token n and one of its K experts, number n K + k. The products need the rows of each
expert next to each other, and beginning at a multiple of TILE, so that a tile of a product has one
expert:

    experts  2 0 | 2 1 | 0 2 | 2 1     pairs  1 4 . . | 3 7 . . | 0 2 5 6        (TILE = 4)
                                       tiles     0    |    1    |    2
                                       first  0 4 8 12                   .: padding, -1

The number of slots M depends on N, K and E alone: sum_e ceil(c_e / TILE) TILE is at most
N K + min(E, N K) (TILE - 1), whatever the counts c_e. So one CUDA graph serves every routing, and
no count reaches the host. Tiles behind those of the last expert are unused, -1.

    count   a block counts the pairs of each expert among BLOCK_PAIRS neighbouring pairs
    scan    one block computes the prefix sums of each expert's counts over the blocks, and the
            first slots of the experts
    place   the blocks of `count` read their pairs again: a pair's slot is the expert's first, plus
            the pairs of that expert in blocks, warps and lanes before it

All numbers are integers, so threads may run in any order: the slots of an expert are in the order
of pairs. Bytes moved: 2 N K + N K + M integers, a small part of the rows that are moved later.
"""

import functools
from typing import NamedTuple

import numpy as np

from ...device import Array
from ..embedding import next_destination
from ..primitives.ptx import device, kernel
from ..primitives.reduce import FULL
from ..runtime.compiler import cuda, int32, int64, uint32
from ..runtime.cost import declare_cost
from ..runtime.launch import check, check_array, empty, launch, on_host

TILE = 128  # slots: the rows of a tile of grouped_product.py
BLOCK = 256  # threads
WARPS = BLOCK // 32
BLOCK_PAIRS = 1024  # pairs of a block, 4 per thread: even small batches have several blocks
ROUNDS = BLOCK_PAIRS // BLOCK
SCAN_BLOCK = 1024
SCAN_WARPS = SCAN_BLOCK // 32
UNUSED = -1  # a tile without an expert: its rows of a product are zeros
OTHER = -2  # a tile of an expert whose matrix this launch does not have: it leaves the rows alone
MOST_EXPERTS = 1024  # a counter per expert and warp takes 32 KB of shared memory


class ExpertOrder(NamedTuple):
    """Which expert computes which row. All arrays int32, on one device.

    pairs_M: the pair n K + k of each slot; -1: padding.
    slots_NK: the slot of each pair.
    experts_T: the expert of each tile of TILE slots, or UNUSED; of experts_between also OTHER.
    first_E: (E + 1,) the first slot of each expert, a multiple of TILE, and the end.
    counts_E: the pairs of each expert.
    """

    pairs_M: Array
    slots_NK: Array
    experts_T: Array
    first_E: Array
    counts_E: Array


def slots_of(N: int, K: int, E: int) -> int:
    """Return M, the number of slots for N tokens with K of E experts each: a multiple of TILE."""
    return (N * K + min(E, N * K) * (TILE - 1)) // TILE * TILE


# ----------------------------------------------------------------------------- reference
def expert_order_ref(experts_NK, E):
    """Return the ExpertOrder of experts (N, K)."""
    N, K = experts_NK.shape
    expert_P = experts_NK.reshape(-1)
    counts_E = np.bincount(expert_P, minlength=E)
    first_E = np.zeros(E + 1, np.int64)
    np.cumsum(-(-counts_E // TILE) * TILE, out=first_E[1:])
    sorted_P = np.argsort(expert_P, kind="stable")
    before_E = np.cumsum(counts_E) - counts_E  # pairs of lower experts
    slots = np.arange(N * K) + (first_E[:-1] - before_E)[expert_P[sorted_P]]
    pairs_M = np.full(slots_of(N, K, E), -1)
    pairs_M[slots] = sorted_P
    slots_P = np.empty(N * K, np.int64)
    slots_P[sorted_P] = slots
    experts_T = np.full(pairs_M.size // TILE, -1)
    experts_T[: first_E[-1] // TILE] = np.repeat(np.arange(E), np.diff(first_E) // TILE)
    arrays = pairs_M, slots_P.reshape(N, K), experts_T, first_E, counts_E
    return ExpertOrder(*(a.astype(np.int32) for a in arrays))


# ----------------------------------------------------------------------------- kernels
@device
def inclusive_sum(v, lane):
    """Return the sum of v over the lanes up to this one."""
    for step in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(FULL, v, step)
        v += other if lane >= step else 0
    return v


@functools.cache
def make_count_kernel(E):
    """Return the kernel that counts pairs, for E experts."""

    @kernel(BLOCK)
    def expert_count_kernel(counts_EB, pairs_M, expert_P):
        """Grid B = ceil(P / BLOCK_PAIRS), block BLOCK. Also makes every slot padding, -1."""
        counts = cuda.shared.array(E, int32)
        tid = cuda.threadIdx.x
        block = int64(cuda.blockIdx.x)
        for e in range(tid, E, BLOCK):
            counts[e] = 0
        for m in range(block * BLOCK + tid, pairs_M.size, int64(cuda.gridDim.x) * BLOCK):
            pairs_M[m] = -1
        cuda.syncthreads()  # the counts are zero
        for k in range(ROUNDS):
            p = block * BLOCK_PAIRS + k * BLOCK + tid
            e = expert_P[p] if p < expert_P.size else int32(-1)
            if e >= 0 and e < E:
                cuda.atomic.add(counts, e, 1)
        cuda.syncthreads()  # all pairs are counted
        for e in range(tid, E, BLOCK):
            counts_EB[e, block] = counts[e]

    return expert_count_kernel


@functools.cache
def make_scan_kernel(E):
    """Return the kernel that turns counts into positions, for E experts."""
    EDGES = E + 1

    @kernel(SCAN_BLOCK)
    def expert_scan_kernel(counts_EB, first_E, counts_E, experts_T):
        """Grid 1, block SCAN_BLOCK.

        counts_EB: becomes the number of pairs of the expert in the blocks before.
        """
        first = cuda.shared.array(EDGES, int32)
        tid = cuda.threadIdx.x
        lane = int32(tid & 31)
        B = counts_EB.shape[1]
        for e in range(tid >> 5, E, SCAN_WARPS):  # a warp owns experts, a lane blocks
            total = int32(0)
            for b in range(lane, B + lane, 32):  # all lanes iterate together
                count = counts_EB[e, b] if b < B else int32(0)
                inclusive = inclusive_sum(count, lane)
                if b < B:
                    counts_EB[e, b] = total + (inclusive - count)
                total += cuda.shfl_sync(FULL, inclusive, 31)
            if lane == 0:
                counts_E[e] = total
                first[e] = (total + (TILE - 1)) // TILE * TILE
        cuda.syncthreads()  # the slots of every expert are known
        if tid < 32:
            total = int32(0)
            for e in range(lane, E + lane, 32):
                count = first[e] if e < E else int32(0)
                inclusive = inclusive_sum(count, lane)
                if e < E:  # a lane overwrites only what it has read itself
                    first[e] = total + inclusive - count
                total += cuda.shfl_sync(FULL, inclusive, 31)
            if lane == 0:
                first[E] = total
        cuda.syncthreads()  # the first slots are known
        for e in range(tid, EDGES, SCAN_BLOCK):
            first_E[e] = first[e]
        for t in range(tid, experts_T.size, SCAN_BLOCK):
            low, high = (
                int32(0),
                int32(E),
            )  # the last expert whose first slot is not behind the tile
            while high - low > 1:
                middle = (low + high) >> 1
                if first[middle] <= t * TILE:
                    low = middle
                else:
                    high = middle
            experts_T[t] = low if t * TILE < first[E] else -1

    return expert_scan_kernel


@functools.cache
def make_place_kernel(E):
    """Return the kernel that gives each pair its slot, for E experts."""
    COUNTS = WARPS * E
    WARP_PAIRS = BLOCK_PAIRS // WARPS

    @kernel(BLOCK)
    def expert_place_kernel(pairs_M, slots_P, expert_P, before_EB, first_E):
        """Grid B = ceil(P / BLOCK_PAIRS), block BLOCK. A warp owns neighbouring pairs.

        before_EB: what expert_scan_kernel has written.
        """
        counts = cuda.shared.array(COUNTS, int32)
        experts = cuda.local.array(ROUNDS, int32)
        tid = cuda.threadIdx.x
        block = int64(cuda.blockIdx.x)
        warp_base = (tid >> 5) * E  # start of the warp's counts
        first_pair = block * BLOCK_PAIRS + (tid >> 5) * WARP_PAIRS + (tid & 31)
        for i in range(tid, COUNTS, BLOCK):
            counts[i] = 0
        cuda.syncthreads()  # the counts are zero
        for k in range(ROUNDS):
            p = first_pair + k * 32
            e = expert_P[p] if p < expert_P.size else int32(-1)
            experts[k] = e if e >= 0 and e < E else int32(-1)
            if experts[k] >= 0:
                cuda.atomic.add(counts, uint32(warp_base + experts[k]), 1)
        cuda.syncthreads()  # all pairs are counted
        for e in range(tid, E, BLOCK):
            slot = first_E[e] + before_EB[e, block]
            for w in range(WARPS):
                count = counts[w * E + e]
                counts[w * E + e] = slot
                slot += count
        cuda.syncthreads()  # the counts are the warps' next slots
        for k in range(ROUNDS):
            slot = next_destination(counts, warp_base, experts[k])
            p = first_pair + k * 32
            if experts[k] >= 0:
                pairs_M[slot] = p
            if p < expert_P.size:
                slots_P[p] = slot if experts[k] >= 0 else -1

    declare_cost(expert_place_kernel, sized_like={"pairs_M": ("slots_P",)})
    return expert_place_kernel


@kernel(BLOCK)
def experts_between_kernel(between_T, experts_T, first, last):
    """Grid ceil(T / BLOCK), block BLOCK. One thread per tile."""
    t = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
    if t < experts_T.size:
        e = experts_T[t]
        if e >= first and e < last:
            between_T[t] = e - first
        else:
            between_T[t] = UNUSED if e < 0 and first == 0 else OTHER


# ----------------------------------------------------------------------------- launchers
def experts_between(order: ExpertOrder, first: int, last: int) -> ExpertOrder:
    """Return the order, on a GPU, for a product with the matrices of experts first ... last - 1.

    They are the experts 0, 1, ... of it. Unused tiles belong to the product with expert 0.
    """
    between_T = empty(order.experts_T, order.experts_T.shape)
    grid = -(-between_T.size // BLOCK)
    limits = map(np.int32, (first, last))
    launch(experts_between_kernel, grid, BLOCK, between_T, order.experts_T, *limits)
    return order._replace(
        experts_T=between_T,
        first_E=order.first_E[first : last + 1],
        counts_E=order.counts_E[first:last],
    )


def expert_order(experts_NK: Array, E: int) -> ExpertOrder:
    """Return the order of the pairs of experts (N, K) int32, each in [0, E).

    An expert outside raises ValueError on the CPU; on a GPU its pair gets slot -1. Raises
    ValueError for more than 1024 experts.
    """
    check_array("expert_order", "experts", experts_NK, (None, None), ("int32",))
    N, K = experts_NK.shape
    check(0 < E <= MOST_EXPERTS, f"expert_order: {E} experts, 1 to {MOST_EXPERTS} are supported")
    if on_host(experts_NK):
        outside = (experts_NK < 0) | (experts_NK >= E)
        check(
            not outside.any(),
            f"expert_order: expert {experts_NK[outside][:1]} is not one of {E}",
        )
        return expert_order_ref(experts_NK, E)
    new = functools.partial(empty, experts_NK, dtype=np.int32)
    M = slots_of(N, K, E)
    order = ExpertOrder(new(M), new((N, K)), new(M // TILE), new(E + 1), new(E))
    expert_P = experts_NK.reshape(-1)
    B = -(-N * K // BLOCK_PAIRS)
    counts_EB = new((E, B))
    launch(make_count_kernel(E), B, BLOCK, counts_EB, order.pairs_M, expert_P)
    scanned = order.first_E, order.counts_E, order.experts_T
    launch(make_scan_kernel(E), 1, SCAN_BLOCK, counts_EB, *scanned)
    slots_P = order.slots_NK.reshape(-1)
    place = order.pairs_M, slots_P, expert_P, counts_EB, order.first_E
    launch(make_place_kernel(E), B, BLOCK, *place)
    return order
