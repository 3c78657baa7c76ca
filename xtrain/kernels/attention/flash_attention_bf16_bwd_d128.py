"""dK and dV for wide heads: a pair of warps shares 2 BN / warps keys; one warp sums dV, the other
dK.

flash_attention.py uses this kernel instead of the dK, dV kernel of flash_attention_bf16_bwd.py for
D = 128 and 256. There, one warp sums both: for 32 keys that needs 256 registers of a lane for the sums
alone, and with only 16 keys per warp, reading shared memory takes longer than multiplying
(primitives/tiles.py). Divided between two warps, each does two of the four products per tile of
queries:

    the dV warp, tile i         S^T = K Q^T       P^T = exp(S^T - lse) -> shared memory
                                dV = dV + P^T dO
    the dK warp, tile i - 1     dP^T = V dO^T     dS^T = P^T (dP^T - delta)
                                dK = dK + dS^T Q

The dK warp is one tile behind, so one barrier per tile is enough: what the dV warp of tile i writes
is read after the barrier of tile i + 1. Therefore there are three stages of Q and dO (old, now, and
the one being copied) and two of P^T. P^T is passed packed, from lane to the same lane: both warps
hold the same elements of a tile in the same lanes.
"""

import functools

from ..primitives.ptx import device, kernel
from ..primitives.tensor_cores import (
    cp_async_wait,
    high_bf16,
    load16_shared,
    low_bf16,
    pack_bf16,
    store16_shared,
    warp_id,
)
from ..primitives.tiles import (
    make_add_slab,
    make_copy_two,
    make_fill,
    make_pack,
    make_scores,
    make_store,
)
from ..runtime.compiler import cuda, float32, int32, int64, uint16, uint32
from ..runtime.cost import attention_flops, declare_cost
from .flash_attention_bf16 import LOG2E
from .flash_attention_bf16_bwd import (
    Queries,
    make_column_gradients,
    make_copy_queries,
    make_hide_late,
    make_hide_past,
    stage_elements,
)
from .flash_attention_table import Tiles
from .key_bounds import make_last_query

NEVER = -(2**31)  # a query position before all others


def dkdv_d128_shared_bytes(D: int, tiles: Tiles) -> int:
    """Bytes of shared memory: K, V; two stages of P^T; three stages of queries."""
    BM, BN = tiles.BM, tiles.BN
    return 2 * (2 * BN * D + 2 * BN * BM + 3 * stage_elements(D, BM))


@functools.cache
def make_add_weights(D, MT, NT):
    """Return add_weights, add_gradients: the second product of both warps, over NT / 2 slabs of 16
    queries. P^T is at smem[at].

    add_weights(dv, p, smem, do, at)        dV warp: dv += P^T dO
    add_gradients(dk, dp, smem, q, at)      dK warp: dk += (P^T dP^T) Q
    """
    pack = make_pack(MT)
    add_slab = make_add_slab(D, MT)

    @device
    def add_weights(dv, p, smem, do, at):
        fp = cuda.local.array((MT, 4), uint32)
        lane = cuda.threadIdx.x & 31
        for k in range(NT // 2):
            pack(fp, p, k)
            for m in range(MT):
                store16_shared(smem, at + ((k * MT + m) * 32 + lane) * 8, fp[m])
            add_slab(dv, fp, smem, do, k)

    @device
    def add_gradients(dk, dp, smem, q, at):
        fp = cuda.local.array((MT, 4), uint32)
        lane = cuda.threadIdx.x & 31
        for k in range(NT // 2):
            for m in range(MT):
                load16_shared(fp[m], smem, at + ((k * MT + m) * 32 + lane) * 8)
                for i in range(4):
                    n = 2 * k + i // 2
                    r = i % 2
                    low = low_bf16(fp[m, i]) * dp[m, n, 2 * r]
                    high = high_bf16(fp[m, i]) * dp[m, n, 2 * r + 1]
                    fp[m, i] = pack_bf16(low, high)
            add_slab(dk, fp, smem, q, k)

    return add_weights, add_gradients


@functools.cache
def make_dkdv_d128_kernel(D: int, CAUSAL: bool, tiles: Tiles, KIND: int = 0):
    """Return the dK, dV kernel for wide heads. Launch with 32 * tiles.warps threads and
    dkdv_d128_shared_bytes(D, tiles)."""
    BM = tiles.BM
    BN = tiles.BN
    WARPS = tiles.warps
    MIN_BLOCKS = tiles.blocks
    THREADS = 32 * WARPS
    PAIRS = WARPS // 2
    ROWS = 2 * BN // WARPS
    MT = ROWS // 16
    NT = BM // 8
    ND = D // 8
    # K is at 0
    V = BN * D
    WEIGHTS = 2 * BN * D
    STAGES = 2 * BN * (D + BM)
    STAGE = stage_elements(D, BM)
    LSE = BM * D
    DELTA = BM * D + BM
    copy_kv = make_copy_two(D, BN, THREADS)
    copy_queries = make_copy_queries(D, BM, THREADS)
    scores = make_scores(D, MT, NT)[2]
    hide_past = make_hide_past(MT, NT, CAUSAL)
    last_query = make_last_query(KIND)
    last_queries, hide_late = make_hide_late(MT, NT, KIND)
    weights, subtract, _ = make_column_gradients(MT, NT)
    add_weights, add_gradients = make_add_weights(D, MT, NT)
    store_rows = make_store(D, MT)
    clear, fill, scale_rows = make_fill(MT, ND)

    @kernel(THREADS, MIN_BLOCKS)
    def flash_attention_dkdv_d128_kernel(
        dk, dv, do, q, k, v, lse, delta, last, T, S, H, group, q_row, k_row, v_row, dv_row, scale
    ):
        """Grid (heads in x, ceil(S / BN), ceil(B G / heads in x)). Warps w (dV) and w + PAIRS (dK)
        share ROWS keys."""
        # the same bytes
        smem = cuda.shared.array(0, uint16)
        stats = cuda.shared.array(0, float32)
        bg = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        G = int32(H // group)
        if bg * S * D >= dk.size:
            return
        warp = warp_id()
        past = int32(S - T)
        n0 = int32(cuda.blockIdx.y * BN)
        b = int64(bg // G)
        g = bg % G
        is_k = warp >= PAIRS
        pair = warp % PAIRS
        w0 = int32(n0 + pair * ROWS)
        own = int32((V if is_k else 0) + pair * ROWS * D)
        s = cuda.local.array((MT, NT, 4), float32)
        acc = cuda.local.array((MT, ND, 4), float32)
        factors = cuda.local.array((MT, 2), float32)
        hi = cuda.local.array((MT, 2), int32)
        clear(acc)
        # first tile that sees a key
        first = int32((n0 - past) // BM * BM if CAUSAL and n0 > past else 0)
        # end of the queries that see a key
        stop = int32(last_query(last, b * S, min(int32(n0 + BN), S) - 1, T, past) + 1)
        least = last_queries(hi, last, b * S, w0, T, S, past)
        visible = int32((w0 - past - BM + 1 if CAUSAL else 0) if w0 < S else T)
        h = int32(g * group)
        t0 = first
        old_t = int32(NEVER)
        end = int32((g + 1) * group)
        old = int32(STAGES)
        now = int32(STAGES + STAGE)
        new = int32(STAGES + 2 * STAGE)
        written = int32(WEIGHTS + pair * ROWS * BM)
        read = int32(WEIGHTS + (BN + pair * ROWS) * BM)
        k0 = (b * S + n0) * k_row + g * D
        v0 = (b * S + n0) * v_row + g * D
        copy_kv(smem, 0, k, k0, k_row, v, v0, v_row, S - n0)
        queries = Queries(q, do, lse, delta, T, H, q_row)
        copy_queries(smem, stats, now, queries, b, h, t0)
        while True:
            cp_async_wait(0)
            # this tile and P^T of the previous one have arrived; all left the oldest
            cuda.syncthreads()
            next_h, next_t = (h, int32(t0 + BM)) if t0 + BM < stop else (int32(h + 1), first)
            if next_h < end:
                copy_queries(smem, stats, new, queries, b, next_h, next_t)
            if is_k and old_t >= visible:
                scores(s, smem, own, old + BM * D)
                subtract(s, stats, old // 2 + DELTA)
                add_gradients(acc, s, smem, old, read)
            if not is_k and h < end and t0 >= visible:
                scores(s, smem, own, now)
                hide_past(s, w0, t0, past)
                hide_late(s, hi, least, t0)
                weights(s, stats, now // 2 + LSE, scale * LOG2E)
                add_weights(acc, s, smem, now + BM * D, written)
            if h == end:  # the last iteration is for the dK warps alone
                break
            h, t0, old_t = next_h, next_t, t0
            old, now, new, written, read = now, new, old, read, written
        fill(factors, scale if is_k else float32(1.0))
        scale_rows(acc, factors)
        row = G * D if is_k else dv_row
        store_rows(acc, smem, own, dk if is_k else dv, (b * S + w0) * row + g * D, row, S - w0)

    declare_cost(
        flash_attention_dkdv_d128_kernel,
        sized_like={"dv": ("dk",), "v": ("dk",)},
        flops=lambda dk, dv, do, q, k, v, lse, delta, last, T, S, *_: attention_flops(
            4, do.size, T, S, CAUSAL, KIND
        ),
    )
    return flash_attention_dkdv_d128_kernel
