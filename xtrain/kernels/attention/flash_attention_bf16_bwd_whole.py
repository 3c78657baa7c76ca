"""FlashAttention-2 on tensor cores, backward of short sequences: a block holds the whole sequence
and computes scores once.

flash_attention.choose_whole selects this kernel for D <= 32 if all keys and queries fit into one
block and there are at least half as many key heads as multiprocessors. It replaces the two kernels
for sequences of any length (flash_attention_bf16_bwd.py), which compute S and dP twice: dQ is a sum
over keys, dK and dV are sums over queries, and no block there has both. Five products instead of
seven:

    block           one key head: its K and V stay in shared memory, dK and dV in registers
    warp            32 of the keys; loops over the queries, 16 at a time
                    S, dP, dV, dK: 4 products
    all warps       after each 64 queries: dQ = dS K over all keys               the fifth

dS passes through shared memory in bf16, the precision in which a product reads it anyway. A warp
writes dS^T, rows of keys; ldmatrix_trans reads rows of queries.

Two barriers per 64 queries: after the first, the queries and their statistics have arrived; after
the second, dS is complete. With a causal mask the warps of late keys have little work; they wait at
the second barrier, and another block of the same multiprocessor runs.
"""

import functools
from dataclasses import dataclass

from ..primitives.ptx import device, kernel, load1, load8
from ..primitives.tensor_cores import (
    commit_copies,
    ldmatrix_trans,
    load16_shared,
    mma_bf16,
    opaque,
    pack_bf16,
    store16,
    store_pair_shared,
    wait_copies,
    warp_id,
)
from ..primitives.tiles import (
    CHUNK,
    make_add_slab,
    make_chunk_offset,
    make_copy,
    make_copy_two,
    make_fill,
    make_left_lane,
    make_pack,
    make_scores,
    make_store,
)
from ..runtime.compiler import cuda, float32, int32, int64, uint16, uint32
from ..runtime.cost import attention_flops, declare_cost
from .flash_attention_bf16 import LOG2E, NEG_INF
from .flash_attention_bf16_bwd import make_column_gradients

# keys of a warp; queries between two barriers; queries of one product
ROWS = 32
BM = 64
STEP = 16
WIDTHS = (16, 32)  # of a head; wider ones need too many registers
MIN_KEYS = 48  # with fewer keys the two kernels are faster


@dataclass(frozen=True)
class WholeTiles:
    """The size of a block."""

    keys: int  # of a block, at least as many as a sequence has keys and queries; also its threads
    blocks: int  # that a multiprocessor must hold at once


TILES = WholeTiles(keys=256, blocks=2)


def whole_shared_bytes(D: int, tiles: WholeTiles) -> int:
    """Bytes of shared memory: K, V; dS; two stages of Q, dO; lse, delta."""
    BN = tiles.keys
    return 2 * (2 * BN * D + BN * BM + 4 * BM * D) + 8 * BN


@functools.cache
def make_statistics(D, BN):
    """Return statistics(stats, at, lse, do, o, first, stride, i, T): stats[at + t] = lse, stats[at
    + BN + t] = delta of query t

    delta = rowsum(dO O). One thread per query; queries from T on get zeros.
    """

    @device
    def statistics(stats, at, lse, do, o, first, stride, i, T):
        t = int32(cuda.threadIdx.x)
        x = cuda.local.array(8, float32)
        y = cuda.local.array(8, float32)
        norm = float32(0.0)
        dot = float32(0.0)
        if t < T:
            norm = load1(lse, i + t)
            for chunk in range(D // CHUNK):
                load8(x, do, first + t * stride + CHUNK * chunk)
                load8(y, o, first + t * stride + CHUNK * chunk)
                for e in range(CHUNK):
                    dot += x[e] * y[e]
        stats[uint32(at + t)] = norm  # unsigned: no check for negative indices
        stats[uint32(at + BN + t)] = dot

    return statistics


@functools.cache
def make_mask(CAUSAL):
    """Return hide, last_key, first_query: query t sees key s if s < S and, with CAUSAL, s <= t +
    past.

    hide(s, n0, t0, S, past)        on transposed tiles, -inf where query t0 + column does not see key
                                    n0 + row
    last_key(t0, S, past)           end of the keys that the BM queries from t0 on see, rounded up to a
                                    multiple of BM
    first_query(n0, T, S, past)     the first t0 whose last_key is above n0; T if there is none
    """

    @device
    def hide(s, n0, t0, S, past):
        lane = cuda.threadIdx.x & 31
        for m in range(ROWS // 16):
            for r in range(2):
                key = int32(n0 + 16 * m + 8 * r + (lane >> 2))
                first = int32(key - past - t0 if CAUSAL else 0)  # first column that sees it
                if key >= S:
                    first = int32(STEP)
                first = int32(first - 2 * (lane & 3))
                for n in range(STEP // 8):
                    for c in range(2):
                        if int32(8 * n + c) < first:
                            s[m, n, 2 * r + c] = NEG_INF

    @device
    def last_key(t0, S, past):
        end = int32((S + BM - 1) & -BM)
        return int32(min(end, t0 + BM + ((past + BM - 1) & -BM)) if CAUSAL else end)

    @device
    def first_query(n0, T, S, past):
        if n0 >= int32((S + BM - 1) & -BM):
            return T
        return int32(max((n0 & -BM) - ((past + BM - 1) & -BM), 0) if CAUSAL else 0)

    return hide, last_key, first_query


place_ds = make_chunk_offset(BM)


@device
def store_gradients(ds, smem, a, chunk):
    """Store a warp's dS^T (32 keys, 16 queries), packed as a left operand, in its rows from `a` on.
    chunk: of the first query"""
    lane = cuda.threadIdx.x & 31
    for m in range(ROWS // 16):
        for r in range(2):
            row = 16 * m + 8 * r + (lane >> 2)
            for n in range(STEP // 8):
                at = a + place_ds(row, chunk + n) + 2 * (lane & 3)
                store_pair_shared(smem, at, ds[m, 2 * n + r])


@functools.cache
def make_sum_keys(D):
    """Return sum_keys(acc, smem, ds, m, n, end): acc[0] (2, 4) = channels 16 n ... of dQ for
    queries 16 m ..., over keys below `end`

    K begins at 0, dS^T at ds. Two interleaved sums, each of every other 16 keys, so a product need
    not wait for the previous one.
    """
    left_lane = make_left_lane(D)
    clear = make_fill(2, 2)[0]

    @device
    def sum_keys(acc, smem, ds, m, n, end):
        lane = cuda.threadIdx.x & 31
        fa = cuda.local.array((2, 4), uint32)
        fb = cuda.local.array((2, 4), uint32)
        clear(acc)
        a = int32(ds + place_ds((lane & 7) + ((lane >> 4) << 3), 2 * m + ((lane >> 3) & 1)))
        b = int32(left_lane() ^ (16 * n))
        k = int32(0)
        while k < end:
            for j in range(2):
                for i in range(2):
                    ldmatrix_trans(fa[i], smem, a, 0, (32 * j + 16 * i) * BM)
                    ldmatrix_trans(fb[i], smem, b, 0, (32 * j + 16 * i) * D)
                for i in range(2):
                    mma_bf16(acc[i, 0], fa[i], fb[i])
                    mma_bf16(acc[i, 1], fa[i], fb[i, 2:])
            a = int32(a + 64 * BM)
            b = int32(b + 64 * D)
            k = int32(k + 64)
        for j in range(2):
            for e in range(4):
                acc[0, j, e] += acc[1, j, e]

    return sum_keys


@functools.cache
def make_store_dq(D):
    """Return store_dq(acc, smem, a, dq, first, stride, m, n, valid, scale): write 16 queries, 16
    channels of dQ

    They pass through shared memory, over the tile of Q at `a`, which is no longer needed.
    """
    chunk_offset = make_chunk_offset(D)

    @device
    def store_dq(acc, smem, a, dq, first, stride, m, n, valid, scale):
        lane = cuda.threadIdx.x & 31
        registers = cuda.local.array(4, uint32)
        for r in range(2):
            for j in range(2):
                pair = pack_bf16(acc[0, j, 2 * r] * scale, acc[0, j, 2 * r + 1] * scale)
                at = a + chunk_offset(16 * m + 8 * r + (lane >> 2), 2 * n + j)
                store_pair_shared(smem, at + 2 * (lane & 3), pair)
        cuda.syncwarp()
        row, chunk = 16 * m + (lane >> 1), 2 * n + (lane & 1)
        load16_shared(registers, smem, a + chunk_offset(row, chunk))
        if row < valid:
            store16(dq, first + row * stride + CHUNK * chunk, registers)

    return store_dq


@functools.cache
def make_whole_kernel(D: int, CAUSAL: bool, tiles: WholeTiles):
    """Return the kernel that computes dQ, dK and dV. Launch with tiles.keys threads and
    whole_shared_bytes(D, tiles)."""
    BN, MIN_BLOCKS = tiles.keys, tiles.blocks
    THREADS = BN
    WARPS = BN // ROWS
    MT = ROWS // 16
    NT = STEP // 8
    ND = D // 8
    # K is at 0
    V = BN * D
    DS = 2 * BN * D
    STAGES = 2 * BN * D + BN * BM
    STAGE = 2 * BM * D
    LSE = (STAGES + 2 * STAGE) // 2  # in floats
    # dQ of 64 queries in tiles of 16 x 16
    DELTA = LSE + BN
    DQ_TILES = BM // 16 * (D // 16)
    copy_q = make_copy(D, BM, THREADS)
    copy_kv = make_copy_two(D, BN, THREADS)
    scores, (hide, last_key, first_query) = make_scores(D, MT, NT)[2], make_mask(CAUSAL)
    weights, subtract, multiply = make_column_gradients(MT, NT)
    pack = make_pack(MT)
    add_slab = make_add_slab(D, MT)
    statistics = make_statistics(D, BN)
    sum_keys = make_sum_keys(D)
    store_dq = make_store_dq(D)
    store_rows, (clear, fill, scale_rows) = make_store(D, MT), make_fill(MT, ND)

    @kernel(THREADS, MIN_BLOCKS)
    def flash_attention_whole_kernel(
        dq, dk, dv, do, q, k, v, o, lse, T, S, H, group, q_row, k_row, v_row, dv_row, scale
    ):
        """Grid (G, B). T, S <= BN. A block loops over the query heads of its group in order."""
        # the same bytes
        smem = cuda.shared.array(0, uint16)
        stats = cuda.shared.array(0, float32)
        g = int32(cuda.blockIdx.x)
        b = int64(cuda.blockIdx.y)
        G = int32(cuda.gridDim.x)
        warp = warp_id()
        past = int32(S - T)
        row = int32(H * D)
        # Warps are assigned to the four schedulers in turn, and early keys have the most queries:
        # pair them with late ones.
        slab = int32(warp if warp < WARPS // 2 else WARPS + WARPS // 2 - 1 - warp)
        # this warp's first key; in smem
        w0 = int32(slab * ROWS)
        mine = int32(slab * ROWS * D)
        seen = first_query(w0, T, S, past)
        # queries below `hidden` do not see all of this warp's keys
        hidden = int32(w0 + ROWS - 1 - past if CAUSAL else 0)
        if w0 + ROWS > S:
            hidden = T
        s = cuda.local.array((MT, NT, 4), float32)
        dp = cuda.local.array((MT, NT, 4), float32)
        acc_k = cuda.local.array((MT, ND, 4), float32)
        acc_v = cuda.local.array((MT, ND, 4), float32)
        left = cuda.local.array((MT, 4), uint32)
        acc_q = cuda.local.array((2, 2, 4), float32)
        factors = cuda.local.array((MT, 2), float32)
        clear(acc_k)
        clear(acc_v)
        h = int32(g * group)
        t0 = int32(0)
        end = int32((g + 1) * group)
        now = int32(STAGES)
        other = int32(STAGES + STAGE)
        first = (b * T * H + h) * D
        copy_kv(smem, 0, k, b * S * k_row + g * D, k_row, v, b * S * v_row + g * D, v_row, S)
        copy_q(smem, now, q, b * T * q_row + h * D, q_row, T)
        copy_q(smem, now + BM * D, do, first, row, T)
        commit_copies()
        statistics(stats, LSE, lse, do, o, first, row, (b * H + h) * T, T)
        while h < end:
            wait_copies(0)
            # these queries have arrived; all warps have left dS and the previous stage
            cuda.syncthreads()
            next_h = h
            next_t = int32(t0 + BM)
            if next_t >= T:
                next_h = int32(h + 1)
                next_t = int32(0)
            next_first = ((b * T + next_t) * H + next_h) * D
            if next_h < end:
                at = (b * T + next_t) * q_row + next_h * D
                copy_q(smem, other, q, at, q_row, int32(T - next_t))
                copy_q(smem, other + BM * D, do, next_first, row, int32(T - next_t))
                commit_copies()
            t = int32(max(t0, seen))
            stop = int32(min(t0 + BM, T))
            while t < stop:
                here = int32(now + (t - t0) * D)
                scores(s, smem, mine, here)
                scores(dp, smem, V + mine, here + BM * D)
                if t < hidden:
                    hide(s, w0, t, S, past)
                weights(s, stats, LSE + t, scale * LOG2E)
                subtract(dp, stats, DELTA + t)
                pack(left, s, 0)
                multiply(s, dp)
                add_slab(acc_v, left, smem, here + BM * D, 0)
                pack(left, s, 0)
                store_gradients(left, smem, DS + w0 * BM, int32((t - t0) >> 3))
                add_slab(acc_k, left, smem, here, 0)
                t = int32(t + STEP)
            cuda.syncthreads()  # dS is complete
            tile = warp
            stop = last_key(t0, S, past)
            while tile < DQ_TILES:
                m, n = tile & 3, tile >> 2
                if t0 + 16 * m < T:
                    sum_keys(acc_q, smem, DS, m, n, stop)
                    store_dq(acc_q, smem, now, dq, first, row, m, n, int32(T - t0), scale)
                tile = int32(tile + WARPS)
            if next_h > h and next_h < end:
                statistics(stats, LSE, lse, do, o, next_first, row, (b * H + next_h) * T, T)
            h, t0, first, now, other = next_h, next_t, next_first, other, now
        cuda.syncthreads()  # all warps have finished reading K
        fill(factors, scale)
        scale_rows(acc_k, factors)
        # otherwise the addresses of both results are computed early and spilled
        at = opaque(dv_row)
        store_rows(acc_v, smem, V + mine, dv, (b * S + w0) * at + g * D, at, S - w0)
        at = opaque(int32(G * D))
        store_rows(acc_k, smem, mine, dk, (b * S + w0) * at + g * D, at, S - w0)

    declare_cost(
        flash_attention_whole_kernel,
        sized_like={"dv": ("dk",), "v": ("dk",)},
        flops=lambda dq, dk, dv, do, q, k, v, o, lse, T, S, *_: attention_flops(
            5, dq.size, T, S, CAUSAL
        ),
    )
    return flash_attention_whole_kernel
