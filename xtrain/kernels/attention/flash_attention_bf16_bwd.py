"""FlashAttention-2 on tensor cores, backward. No atomics: every gradient is summed by one warp, in
a fixed order.

    dQ kernel       a block owns BM queries and loops over the keys       S, dP, dQ: 3 products
    dK, dV kernel   a block owns BN keys and loops over the queries       S, dP, dV, dK: 4 products

S and dP are computed twice. Atomics on dQ would avoid that, but give different bits in every run.

The dQ kernel runs first. It also computes delta = rowsum(dO O), which both kernels need, in the
registers where it uses it.

The dK, dV kernel works on the transposes, S^T = K Q^T and dP^T = V dO^T, so P^T and dS^T already
have the layout of a left operand. For D = 128 and 256, flash_attention_bf16_bwd_d128.py divides this work
between two warps.
"""

import functools
from typing import NamedTuple

from ...device import Array
from ..primitives.ptx import device, kernel, load1, load8, store1
from ..primitives.reduce import FULL
from ..primitives.tensor_cores import (
    cp_async4,
    cp_async_commit,
    cp_async_wait,
    exp2,
    load2_shared,
    opaque,
    warp_id,
)
from ..primitives.tiles import (
    make_add_product,
    make_copy,
    make_copy_two,
    make_fill,
    make_scores,
    make_store,
)
from ..runtime.compiler import cuda, float32, int32, int64, uint16
from ..runtime.cost import attention_flops, declare_cost
from .flash_attention_bf16 import LOG2E, NEG_INF, make_hide_early, make_hide_keys
from .flash_attention_table import Tiles
from .key_bounds import make_first_key, make_last_query


def dq_shared_bytes(D: int, tiles: Tiles) -> int:
    """Bytes of shared memory of the dQ kernel: Q, dO, two stages of K and V."""
    return 2 * D * (2 * tiles.BM + 4 * tiles.BN)


def stage_elements(D: int, BM: int) -> int:
    """Elements (2 bytes) of a stage: Q, dO, and in float32 lse and delta, of BM queries.

    Rounded up to where a tile may begin: primitives/tiles.py says why.
    """
    unit = max(128, D)
    return 2 * BM * D + -(-4 * BM // unit) * unit


def dkdv_shared_bytes(D: int, tiles: Tiles) -> int:
    """Bytes of shared memory of the dK, dV kernel: K, V, two stages of queries."""
    return 2 * (2 * tiles.BN * D + 2 * stage_elements(D, tiles.BM))


# ----------------------------------------------------------------------------- dQ
@functools.cache
def make_statistics(D, MT):
    """Return statistics(shift, delta, do, o, first, stride, lse, out, i, valid): the statistics of
    a warp's 16 MT rows.

    shift = lse log2 e and delta = rowsum(dO O), both in all lanes of a row; delta is also written
    to out[i], out[i + 1], ... The rows of do and o begin at `first`, `stride` elements apart;
    `valid` of them exist.
    """
    CHUNKS = D // 8
    STEPS = -(-CHUNKS // 4)

    @device
    def statistics(shift, delta, do, o, first, stride, lse, out, i, valid):
        lane = cuda.threadIdx.x & 31
        x = cuda.local.array(8, float32)
        y = cuda.local.array(8, float32)
        for m in range(MT):
            for r in range(2):
                row = 16 * m + 8 * r + (lane >> 2)
                dot = float32(0.0)
                for j in range(STEPS):  # the four lanes of a row read neighbouring chunks
                    chunk = 4 * j + (lane & 3)
                    if row < valid and chunk < CHUNKS:
                        load8(x, do, first + row * stride + 8 * chunk)
                        load8(y, o, first + row * stride + 8 * chunk)
                        for e in range(8):
                            dot += x[e] * y[e]
                dot += cuda.shfl_xor_sync(FULL, dot, 1)
                dot += cuda.shfl_xor_sync(FULL, dot, 2)
                shift[m, r] = float32(0.0)
                delta[m, r] = dot
                if row < valid:
                    shift[m, r] = load1(lse, i + row) * LOG2E
                    if lane & 3 == 0:
                        store1(out, i + row, dot)

    return statistics


@functools.cache
def make_row_gradients(MT, NT):
    """Return row_gradients(s, dp, shift, delta, scale): s becomes ds = p (dp - delta), p = exp2(s
    scale
    - shift)"""

    @device
    def row_gradients(s, dp, shift, delta, scale):
        for m in range(MT):
            for n in range(NT):
                for i in range(4):
                    p = exp2(s[m, n, i] * scale - shift[m, i // 2])
                    s[m, n, i] = p * (dp[m, n, i] - delta[m, i // 2])

    return row_gradients


@functools.cache
def make_dq_kernel(D: int, CAUSAL: bool, tiles: Tiles, KIND: int = 0):
    """Return the dQ kernel for heads of width D. Launch with 32 * tiles.warps threads and
    dq_shared_bytes(D, tiles)."""
    BM = tiles.BM
    BN = tiles.BN
    WARPS = tiles.warps
    MIN_BLOCKS = tiles.blocks
    THREADS = 32 * WARPS
    ROWS = BM // WARPS
    MT = ROWS // 16
    NT = BN // 8
    ND = D // 8
    # Q is at 0
    DO = BM * D
    KV = 2 * BM * D
    STAGE = 2 * BN * D
    copy_q = make_copy(D, BM, THREADS)
    copy_kv = make_copy_two(D, BN, THREADS)
    statistics = make_statistics(D, MT)
    scores = make_scores(D, MT, NT)[2]
    hide_keys = make_hide_keys(MT, NT, CAUSAL)
    row_gradients = make_row_gradients(MT, NT)
    add_product = make_add_product(D, MT, NT)
    store_dq = make_store(D, MT)
    first_key = make_first_key(KIND)
    first_keys, hide_early = make_hide_early(MT, NT, KIND)
    clear, fill, scale_rows = make_fill(MT, ND)

    @kernel(THREADS, MIN_BLOCKS)
    def flash_attention_dq_kernel(
        dq, delta_BHT, do, q, k, v, o, lse_BHT, first_BT, T, S, H, group, q_row, k_row, v_row, scale
    ):
        """Grid (heads in x, ceil(T / BM), ceil(B H / heads in x)). Also writes delta. Arguments:
        see make_fwd_kernel."""
        smem = cuda.shared.array(0, uint16)
        bh = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        if bh * T >= lse_BHT.size:
            return
        warp = warp_id()
        past = int32(S - T)
        b = int64(bh // H)
        h = bh % H
        q0 = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * BM)  # most keys first
        w0 = int32(q0 + warp * ROWS)
        mine = int32(warp * ROWS * D)
        head = h // group * D
        # of o, dO and dQ
        row = H * D
        first = (b * T * H + h) * D
        s = cuda.local.array((MT, NT, 4), float32)
        dp = cuda.local.array((MT, NT, 4), float32)
        shift = cuda.local.array((MT, 2), float32)
        delta = cuda.local.array((MT, 2), float32)
        acc = cuda.local.array((MT, ND, 4), float32)
        lo = cuda.local.array((MT, 2), int32)
        clear(acc)
        n0 = int32(first_key(first_BT, b * T, q0, past) // BN * BN)
        max_lo = first_keys(lo, first_BT, b * T, w0, T, past)
        copy_q(smem, 0, q, (b * T + q0) * q_row + h * D, q_row, T - q0)
        copy_q(smem, DO, do, first + q0 * row, row, T - q0)
        k0, v0 = b * S * k_row + head, b * S * v_row + head
        copy_kv(smem, KV, k, k0 + n0 * k_row, k_row, v, v0 + n0 * v_row, v_row, S - n0)
        i = int64(bh) * T + w0
        valid = T - w0
        statistics(shift, delta, do, o, first + w0 * row, row, lse_BHT, delta_BHT, i, valid)
        end = int32(q0 + BM + past if CAUSAL and q0 + BM < T else S)
        # end of the keys that this warp sees
        visible = int32((w0 + ROWS + past if CAUSAL else S) if w0 < T else 0)
        now = int32(KV)
        other = int32(KV + STAGE)
        while n0 < end:
            cp_async_wait(0)
            cuda.syncthreads()  # this tile has arrived; all warps have left the previous one
            if n0 + BN < end:
                n = n0 + BN
                copy_kv(smem, other, k, k0 + n * k_row, k_row, v, v0 + n * v_row, v_row, S - n)
            if n0 < visible:
                scores(s, smem, mine, now)
                hide_keys(s, w0, n0, S, past)
                hide_early(s, lo, max_lo, n0)
                scores(dp, smem, DO + mine, now + BN * D)
                row_gradients(s, dp, shift, delta, scale * LOG2E)
                add_product(acc, s, smem, now)
            n0, now, other = int32(n0 + BN), other, now
        fill(shift, scale)
        scale_rows(acc, shift)
        store_dq(acc, smem, mine, dq, first + w0 * row, row, T - w0)

    declare_cost(
        flash_attention_dq_kernel,
        sized_like={"v": ("k",)},
        flops=lambda dq, delta, do, q, k, v, o, lse, first, T, S, *_: attention_flops(
            3, dq.size, T, S, CAUSAL, KIND
        ),
    )
    return flash_attention_dq_kernel


# ----------------------------------------------------------------------------- dK, dV
class Queries(NamedTuple):
    """What dK and dV read of the queries, flat."""

    q: Array
    do: Array
    lse: Array
    delta: Array
    T: int
    H: int
    q_row: int  # elements between the rows of q


@functools.cache
def make_copy_queries(D, BM, THREADS):
    """Return copy_queries(smem, stats, stage, queries, b, h, t0).

    The block starts to copy BM rows of Q and dO of a head, and their statistics, into a stage.
    """
    copy_rows = make_copy(D, BM, THREADS)
    assert THREADS >= 2 * BM

    @device
    def copy_queries(smem, stats, stage, queries, b, h, t0):
        tid = cuda.threadIdx.x
        T = queries.T
        H = queries.H
        row = queries.q_row
        valid = T - t0
        copy_rows(smem, stage, queries.q, (b * T + t0) * row + h * D, row, valid)
        copy_rows(smem, stage + BM * D, queries.do, ((b * T + t0) * H + h) * D, H * D, valid)
        # at: in floats
        at = stage // 2 + BM * D
        i = (b * H + h) * T + t0
        if tid < BM:
            cp_async4(stats, at + tid, queries.lse, i + tid, tid < valid)
        elif tid < 2 * BM:
            cp_async4(stats, at + tid, queries.delta, i + tid - BM, tid - BM < valid)
        cp_async_commit()

    return copy_queries


@functools.cache
def make_hide_past(MT, NT, CAUSAL):
    """Return hide_past(s, n0, t0, past): on transposed tiles, -inf where query t0 + column does not
    see key n0 + row."""
    LAST = 16 * MT - 1

    @device
    def hide_past(s, n0, t0, past):
        if CAUSAL and t0 + past < n0 + LAST:
            lane = cuda.threadIdx.x & 31
            for m in range(MT):
                for r in range(2):
                    key = n0 + 16 * m + 8 * r + (lane >> 2)
                    first = int32(key - past - t0 - 2 * (lane & 3))
                    for n in range(NT):
                        for c in range(2):
                            if int32(8 * n + c) < first:
                                s[m, n, 2 * r + c] = NEG_INF

    return hide_past


@functools.cache
def make_hide_late(MT, NT, KIND):
    """Return last_queries, hide_late: the upper bounds of a warp's 16 MT keys, on transposed tiles

    last_queries(hi, last, i, s0, T, S, past) -> the smallest  hi (MT, 2) = the last query that sees
    each key, from key s0 on
    hide_late(s, hi, least, t0)
        -inf where query t0 + column comes after it. least: the smallest of hi
    """
    last_query = make_last_query(KIND)

    @device
    def last_queries(hi, last, i, s0, T, S, past):
        if KIND == 0:
            return int32(T)
        lane = cuda.threadIdx.x & 31
        for m in range(MT):
            for r in range(2):
                key = int32(s0 + 16 * m + 8 * r + (lane >> 2))
                hi[m, r] = last_query(last, i, min(key, int32(S - 1)), T, past)
        return last_query(last, i, min(int32(s0), int32(S - 1)), T, past)

    @device
    def hide_late(s, hi, least, t0):
        if KIND != 0 and t0 + 8 * NT - 1 > least:
            lane = cuda.threadIdx.x & 31
            for m in range(MT):
                for r in range(2):
                    here = int32(hi[m, r] - t0 - 2 * (lane & 3))
                    for n in range(NT):
                        for c in range(2):
                            if int32(8 * n + c) > here:
                                s[m, n, 2 * r + c] = NEG_INF

    return last_queries, hide_late


@functools.cache
def make_column_gradients(MT, NT):
    """Return weights, subtract, multiply: elementwise on transposed tiles; stats[at + column] is
    the column's lse or delta.

    weights(s, stats, at, scale)        s becomes p = exp2(s scale - lse log2 e)
    subtract(dp, stats, at)             dp becomes dp - delta
    multiply(s, dp)                     s becomes s dp
    """

    @device
    def weights(s, stats, at, scale):
        lse = cuda.local.array(2, float32)
        for n in range(NT):
            load2_shared(lse, stats, at + 8 * n + 2 * (cuda.threadIdx.x & 3))
            for c in range(2):
                shift = lse[c] * LOG2E
                for m in range(MT):
                    for r in range(2):
                        s[m, n, 2 * r + c] = exp2(s[m, n, 2 * r + c] * scale - shift)

    @device
    def subtract(dp, stats, at):
        delta = cuda.local.array(2, float32)
        for n in range(NT):
            load2_shared(delta, stats, at + 8 * n + 2 * (cuda.threadIdx.x & 3))
            for m in range(MT):
                for i in range(4):
                    dp[m, n, i] -= delta[i % 2]

    @device
    def multiply(s, dp):
        for m in range(MT):
            for n in range(NT):
                for i in range(4):
                    s[m, n, i] *= dp[m, n, i]

    return weights, subtract, multiply


@functools.cache
def make_dkdv_kernel(D: int, CAUSAL: bool, tiles: Tiles, KIND: int = 0):
    """Return the dK, dV kernel for heads of width D. Launch with 32 * tiles.warps threads and
    dkdv_shared_bytes(D, tiles)."""
    BM = tiles.BM
    BN = tiles.BN
    WARPS = tiles.warps
    MIN_BLOCKS = tiles.blocks
    THREADS = 32 * WARPS
    ROWS = BN // WARPS
    MT = ROWS // 16
    NT = BM // 8
    ND = D // 8
    # K is at 0
    V = BN * D
    STAGES = 2 * BN * D
    STAGE = stage_elements(D, BM)
    # in a stage, in floats
    LSE = BM * D
    DELTA = BM * D + BM
    copy_kv = make_copy_two(D, BN, THREADS)
    copy_queries = make_copy_queries(D, BM, THREADS)
    scores = make_scores(D, MT, NT)[2]
    hide_past = make_hide_past(MT, NT, CAUSAL)
    weights, subtract, multiply = make_column_gradients(MT, NT)
    last_query = make_last_query(KIND)
    last_queries, hide_late = make_hide_late(MT, NT, KIND)
    add_product = make_add_product(D, MT, NT)
    store_rows = make_store(D, MT)
    clear, fill, scale_rows = make_fill(MT, ND)

    @kernel(THREADS, MIN_BLOCKS)
    def flash_attention_dkdv_kernel(
        dk, dv, do, q, k, v, lse, delta, last, T, S, H, group, q_row, k_row, v_row, dv_row, scale
    ):
        """Grid (heads in x, ceil(S / BN), ceil(B G / heads in x)). A block loops over the query
        heads of its group in order."""
        # the same bytes
        smem = cuda.shared.array(0, uint16)
        stats = cuda.shared.array(0, float32)
        bg = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        G = int32(H // group)
        if bg * S * D >= dk.size:
            return
        warp = warp_id()
        past = int32(S - T)
        b = int64(bg // G)
        g = bg % G
        n0 = int32(cuda.blockIdx.y * BN)
        mine = int32(warp * ROWS * D)
        w0 = int32(n0 + warp * ROWS)  # this warp's first key
        s = cuda.local.array((MT, NT, 4), float32)
        dp = cuda.local.array((MT, NT, 4), float32)
        acc_k = cuda.local.array((MT, ND, 4), float32)
        acc_v = cuda.local.array((MT, ND, 4), float32)
        factors = cuda.local.array((MT, 2), float32)
        hi = cuda.local.array((MT, 2), int32)
        clear(acc_k)
        clear(acc_v)
        # first tile that sees a key
        first = int32((n0 - past) // BM * BM if CAUSAL and n0 > past else 0)
        # end of the queries that see a key
        stop = int32(last_query(last, b * S, min(int32(n0 + BN), S) - 1, T, past) + 1)
        least = last_queries(hi, last, b * S, w0, T, S, past)
        # first query tile that this warp needs
        visible = int32((w0 - past - BM + 1 if CAUSAL else 0) if w0 < S else T)
        h = int32(g * group)
        t0 = first
        end = int32((g + 1) * group)
        now = int32(STAGES)
        other = int32(STAGES + STAGE)
        k0 = (b * S + n0) * k_row + g * D
        v0 = (b * S + n0) * v_row + g * D
        copy_kv(smem, 0, k, k0, k_row, v, v0, v_row, S - n0)
        queries = Queries(q, do, lse, delta, T, H, q_row)
        copy_queries(smem, stats, now, queries, b, h, t0)
        while h < end:
            cp_async_wait(0)
            cuda.syncthreads()  # this tile has arrived; all warps have left the previous one
            next_h, next_t = (h, int32(t0 + BM)) if t0 + BM < stop else (int32(h + 1), first)
            if next_h < end:
                copy_queries(smem, stats, other, queries, b, next_h, next_t)
            if t0 >= visible:
                scores(s, smem, mine, now)
                hide_past(s, w0, t0, past)
                hide_late(s, hi, least, t0)
                weights(s, stats, now // 2 + LSE, scale * LOG2E)
                add_product(acc_v, s, smem, now + BM * D)
                scores(dp, smem, V + mine, now + BM * D)
                subtract(dp, stats, now // 2 + DELTA)
                multiply(s, dp)
                add_product(acc_k, s, smem, now)
            h, t0, now, other = next_h, next_t, other, now
        fill(factors, scale)
        scale_rows(acc_k, factors)
        # otherwise the addresses of both results are computed early and spilled
        row = opaque(dv_row)
        store_rows(acc_v, smem, V + mine, dv, (b * S + w0) * row + g * D, row, S - w0)
        row = opaque(int32(G * D))
        store_rows(acc_k, smem, mine, dk, (b * S + w0) * row + g * D, row, S - w0)

    declare_cost(
        flash_attention_dkdv_kernel,
        sized_like={"dv": ("dk",), "v": ("dk",)},
        flops=lambda dk, dv, do, q, k, v, lse, delta, last, T, S, *_: attention_flops(
            4, do.size, T, S, CAUSAL, KIND
        ),
    )
    return flash_attention_dkdv_kernel
