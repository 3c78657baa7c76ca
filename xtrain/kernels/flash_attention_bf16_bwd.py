"""FlashAttention-2 on tensor cores, backward. No atomics: every gradient is summed by one warp, in a fixed order.

    dQ kernel       a block owns BM queries and walks over the keys          s, dp, dq: 3 products per tile
    dK, dV kernel   a block owns BN keys and walks over the queries          s, dp, dv, dk: 4 products

Scores are computed twice; atomics on dQ would save that, and give other bits in every run.

The dQ kernel runs first. It also finds delta = rowsum(dO O), which both need, in the registers where it uses it.

The dK, dV kernel works on the transposes, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are born where the tensor
core wants a left operand. Both sums at once, for 32 keys at D = 128, would take 256 registers; with 16 keys, reading
shared memory takes longer than multiplying. So two warps share 32 keys: one sums dV, the other dK, and each does two of
the four products.

    the dV warp     S^T = K Q^T       P^T = exp(S^T - lse) -> shared memory     |       dV = dV + P^T dO
    the dK warp     dP^T = V dO^T     dP^T - delta                              |       dK = dK + (P^T (dP^T - delta)) Q
                                                                             barrier
P^T goes from lane to lane, packed: both warps hold the same elements of a tile in the same lanes.
"""

import functools

from numba import cuda, float32, int32, int64, uint16, uint32

from ._ptx import device, kernel, load8, store1
from ._reduce import FULL
from ._tensor_cores import (
    commit_copies,
    copy4_async,
    exp2,
    high_bf16,
    load2_shared,
    load16_shared,
    low_bf16,
    pack_bf16,
    store16_shared,
    wait_copies,
    warp_id,
)
from ._tiles import make_copy, make_products, make_registers, make_store
from .flash_attention_bf16 import LOG2E, NEG_INF, make_hide_keys


def dq_shared_bytes(D, config) -> int:
    BM, BN = config[:2]
    return 2 * D * (2 * BM + 4 * BN)


def dkdv_shared_bytes(D, config) -> int:
    BN, BM = config[:2]
    return 2 * (D * (2 * BN + 4 * BM) + BN * BM + 8 * BM)


# ----------------------------------------------------------------------------- dQ
@functools.cache
def make_delta(D, MT):
    """-> load_delta(delta, do, o, first, stride, valid): rowsum(dO O) of a warp's 16 MT rows, in all lanes of a row."""
    CHUNKS = D // 8
    STEPS = -(-CHUNKS // 4)

    @device
    def load_delta(delta, do, o, first, stride, valid):
        lane = cuda.threadIdx.x & 31
        x, y = cuda.local.array(8, float32), cuda.local.array(8, float32)
        for m in range(MT):
            for r in range(2):
                row = 16 * m + 8 * r + (lane >> 2)
                dot = float32(0.0)
                for j in range(STEPS):
                    chunk = 4 * j + (lane & 3)
                    if row < valid and chunk < CHUNKS:
                        load8(x, do, first + row * stride + 8 * chunk)
                        load8(y, o, first + row * stride + 8 * chunk)
                        for e in range(8):
                            dot += x[e] * y[e]
                dot += cuda.shfl_xor_sync(FULL, dot, 1)
                delta[m, r] = dot + cuda.shfl_xor_sync(FULL, dot, 2)

    return load_delta


@functools.cache
def make_ds(MT, NT):
    """-> score_gradients(s, dp, shift, delta, scale): s = exp2(s scale - shift) (dp - delta), a row at a time"""

    @device
    def score_gradients(s, dp, shift, delta, scale):
        for m in range(MT):
            for n in range(NT):
                for i in range(4):
                    p = exp2(s[m, n, i] * scale - shift[m, i // 2])
                    s[m, n, i] = p * (dp[m, n, i] - delta[m, i // 2])

    return score_gradients


@functools.cache
def make_dq_kernel(D, CAUSAL, config):
    """config: (BM, BN, warps, blocks per multiprocessor)"""
    BM, BN, WARPS, MIN_BLOCKS = config
    THREADS, ROWS = 32 * WARPS, BM // WARPS
    MT, NT, ND = ROWS // 16, BN // 8, D // 8
    Q, DO, K, V, STAGE = 0, BM * D, 2 * BM * D, (2 * BM + BN) * D, 2 * BN * D
    copy_q, copy_kv, store_dq = make_copy(D, BM, THREADS), make_copy(D, BN, THREADS), make_store(D, MT)
    products, hide_keys = make_products(D, MT, NT), make_hide_keys(MT, NT, CAUSAL)
    add_abt, add_pb = products.add_abt, products.add_pb
    zero_s, zero_q = make_registers(MT, NT).zero, make_registers(MT, ND).zero
    scale_rows, load_delta, score_gradients = make_registers(MT, ND).scale_rows, make_delta(D, MT), make_ds(MT, NT)

    @kernel(THREADS, MIN_BLOCKS)
    def flash_attention_dq_kernel(
        dq, delta_BHT, do, q, k, v, o, lse_BHT, T, S, H, group, q_row, kv_row, scale
    ):
        """Grid (ceil(T / BM), B H). Writes delta too. q_row, kv_row: elements between positions of q; of k and v."""
        smem = cuda.shared.array(0, uint16)
        warp, lane, bh = warp_id(), cuda.threadIdx.x & 31, cuda.blockIdx.y
        b, h, past = int64(bh // H), bh % H, S - T
        q0 = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * BM  # most keys first
        w0 = q0 + warp * ROWS
        kv = b * S * kv_row + h // group * D
        row0, row = (b * T * H + h) * D, H * D  # of o, dO and dQ
        s, dp = cuda.local.array((MT, NT, 4), float32), cuda.local.array((MT, NT, 4), float32)
        acc = cuda.local.array((MT, ND, 4), float32)
        shift, delta = cuda.local.array((MT, 2), float32), cuda.local.array((MT, 2), float32)
        zero_q(acc)
        copy_q(smem, Q, q, (b * T + q0) * q_row + h * D, q_row, T - q0)
        copy_q(smem, DO, do, row0 + q0 * row, row, T - q0)
        copy_kv(smem, K, k, kv, kv_row, S)
        copy_kv(smem, V, v, kv, kv_row, S)
        commit_copies()
        load_delta(delta, do, o, row0 + w0 * row, row, T - w0)
        for m in range(MT):
            for r in range(2):
                t = w0 + 16 * m + 8 * r + (lane >> 2)
                shift[m, r] = lse_BHT[int64(bh) * T + t] * LOG2E if t < T else float32(0.0)
                if t < T and lane & 3 == 0:
                    store1(delta_BHT, int64(bh) * T + t, delta[m, r])
        end = min(q0 + BM + past, S) if CAUSAL else S
        stage = 0
        for n0 in range(0, end, BN):
            wait_copies(0)
            cuda.syncthreads()  # this tile is here, and everybody has left the one before
            if n0 + BN < end:
                after = kv + (n0 + BN) * kv_row
                copy_kv(smem, K + STAGE - stage, k, after, kv_row, S - n0 - BN)
                copy_kv(smem, V + STAGE - stage, v, after, kv_row, S - n0 - BN)
                commit_copies()
            if not CAUSAL or n0 < w0 + ROWS + past:  # else: all in this warp's future
                zero_s(s)
                add_abt(s, smem, Q + warp * ROWS * D, K + stage)
                if n0 + BN > S or (CAUSAL and n0 + BN > w0 + past + 1):
                    hide_keys(s, w0, n0, S, past)
                zero_s(dp)
                add_abt(dp, smem, DO + warp * ROWS * D, V + stage)
                score_gradients(s, dp, shift, delta, scale * LOG2E)
                add_pb(acc, s, smem, K + stage)
            stage = STAGE - stage
        for m in range(MT):
            for r in range(2):
                shift[m, r] = scale
        scale_rows(acc, shift)
        store_dq(acc, smem, Q + warp * ROWS * D, dq, row0 + w0 * row, row, T - w0)

    return flash_attention_dq_kernel


# ----------------------------------------------------------------------------- dK, dV
@functools.cache
def make_pair(MT, NT, CAUSAL):
    """What the two warps of a pair do between their products, on transposed tiles (rows: keys, columns: queries).

    weights(s, fp, smem, at, stats, lse, n0, t0, past, scale)       dV warp: fp = packed P^T, also written to smem
    differences(s, stats, delta)                                    dK warp: s = dP^T - delta
    gradients(s, fp, smem, at)                                      dK warp: fp = packed P^T (dP^T - delta)
    """
    NP, pack = NT // 2, make_registers(MT, NT).pack

    @device
    def hide_past(s, n0, t0, past):
        """-inf where a query (column, from t0 on) does not see a key (row, from n0 on)"""
        lane = cuda.threadIdx.x & 31
        for m in range(MT):
            for r in range(2):
                first = int32(n0 + 16 * m + 8 * r + (lane >> 2) - past - t0 - 2 * (lane & 3))
                for n in range(NT):
                    for c in range(2):
                        if int32(8 * n + c) < first:
                            s[m, n, 2 * r + c] = NEG_INF

    @device
    def weights(s, stats, lse, scale):
        lane = cuda.threadIdx.x & 31
        x = cuda.local.array(2, float32)
        for n in range(NT):
            load2_shared(x, stats, lse + 8 * n + 2 * (lane & 3))
            for c in range(2):
                shift = x[c] * LOG2E
                for m in range(MT):
                    for r in range(2):
                        s[m, n, 2 * r + c] = exp2(s[m, n, 2 * r + c] * scale - shift)

    @device
    def differences(s, stats, delta):
        lane = cuda.threadIdx.x & 31
        x = cuda.local.array(2, float32)
        for n in range(NT):
            load2_shared(x, stats, delta + 8 * n + 2 * (lane & 3))
            for m in range(MT):
                for i in range(4):
                    s[m, n, i] -= x[i % 2]

    @device
    def send(s, smem, at):
        """s, packed, to the same lane of the other warp"""
        lane = cuda.threadIdx.x & 31
        fp = cuda.local.array((MT, 4), uint32)
        for k in range(NP):
            pack(fp, s, k)
            for m in range(MT):
                store16_shared(smem, at + ((k * MT + m) * 32 + lane) * 8, fp[m])

    @device
    def receive(fp, smem, at, k):
        lane = cuda.threadIdx.x & 31
        for m in range(MT):
            load16_shared(fp[m], smem, at + ((k * MT + m) * 32 + lane) * 8)

    @device
    def multiply(fp, s, k):
        """fp = packed fp s, columns 16 k to 16 k + 15 of s"""
        for m in range(MT):
            for i in range(4):
                n, r = 2 * k + i // 2, i % 2
                low = low_bf16(fp[m, i]) * s[m, n, 2 * r]
                high = high_bf16(fp[m, i]) * s[m, n, 2 * r + 1]
                fp[m, i] = pack_bf16(low, high)

    return hide_past, weights, differences, send, receive, multiply


@functools.cache
def make_copy_queries(D, BM, THREADS):
    """-> copy_queries(...): a block begins to copy BM rows of Q and dO and their lse and delta."""
    copy_rows = make_copy(D, BM, THREADS)
    assert THREADS >= 2 * BM

    @device
    def copy_queries(smem, q_at, do_at, q, do, q_first, do_first, q_row, do_row, stats, at, lse, delta, i, valid):
        tid = cuda.threadIdx.x
        copy_rows(smem, q_at, q, q_first, q_row, valid)
        copy_rows(smem, do_at, do, do_first, do_row, valid)
        if tid < BM:
            copy4_async(stats, at + tid, lse, i + tid, tid < valid)
        elif tid < 2 * BM:
            copy4_async(stats, at + tid, delta, i + tid - BM, tid - BM < valid)
        commit_copies()

    return copy_queries


@functools.cache
def make_dkdv_kernel(D, CAUSAL, config):
    """config: (BN, BM, warps, keep K and V in registers?, blocks per multiprocessor)"""
    BN, BM, WARPS, REGISTERS, MIN_BLOCKS = config
    THREADS, PAIRS = 32 * WARPS, WARPS // 2
    ROWS = BN // PAIRS
    MT, NT, NP, ND, KS = ROWS // 16, BM // 8, BM // 16, D // 8, D // 16
    K, V, Q, DO, STAGE = 0, BN * D, 2 * BN * D, (2 * BN + BM) * D, 2 * BM * D
    SENT, STATS = (2 * BN + 4 * BM) * D, ((2 * BN + 4 * BM) * D + BN * BM) // 2  # STATS: in floats
    copy_kv, copy_queries = make_copy(D, BN, THREADS), make_copy_queries(D, BM, THREADS)
    products, store_rows = make_products(D, MT, NT), make_store(D, MT)
    load_rows, add_abt, add_rbt, add_slab = products.load_rows, products.add_abt, products.add_rbt, products.add_slab
    zero_s, zero_rows = make_registers(MT, NT).zero, make_registers(MT, ND).zero
    scale_rows = make_registers(MT, ND).scale_rows
    hide_past, weights, differences, send, receive, multiply = make_pair(MT, NT, CAUSAL)

    @kernel(THREADS, MIN_BLOCKS)
    def flash_attention_dkdv_kernel(
        dk, dv, do, q, k, v, lse, delta, T, S, H, group, q_row, kv_row, scale
    ):
        """Grid (ceil(S / BN), B G). Warps w and w + PAIRS share ROWS keys."""
        smem, stats = cuda.shared.array(0, uint16), cuda.shared.array(0, float32)  # the same memory
        warp, G, past = warp_id(), H // group, S - T
        b, g = int64(cuda.blockIdx.y // G), cuda.blockIdx.y % G
        is_k, mine = warp >= PAIRS, warp % PAIRS * ROWS
        n0 = cuda.blockIdx.x * BN
        w0 = n0 + mine  # this warp's first key
        own = (V if is_k else K) + mine * D
        left, right = (DO, Q) if is_k else (Q, DO)
        sent = SENT + mine * BM
        s, acc = cuda.local.array((MT, NT, 4), float32), cuda.local.array((MT, ND, 4), float32)
        fp, fo = cuda.local.array((MT, 4), uint32), cuda.local.array((KS, MT, 4), uint32)
        unit = cuda.local.array((MT, 2), float32)
        zero_rows(acc)
        first = max(n0 - past, 0) // BM * BM if CAUSAL else 0  # the first tile of queries that sees a key
        h, t0 = g * group, first
        kv = (b * S + n0) * kv_row + g * D
        copy_kv(smem, K, k, kv, kv_row, S - n0)
        copy_kv(smem, V, v, kv, kv_row, S - n0)
        copy_queries(smem, Q, DO, q, do, (b * T + t0) * q_row + h * D, ((b * T + t0) * H + h) * D, q_row, H * D,
                     stats, STATS, lse, delta, (b * H + h) * T + t0, T - t0)
        if REGISTERS:
            wait_copies(0)
            cuda.syncthreads()
            load_rows(fo, smem, own)
        stage = 0
        for _ in range(group * ((T - first + BM - 1) // BM)):
            wait_copies(0)
            cuda.syncthreads()  # this tile is here, and everybody has left the one before
            next_h, next_t = h, t0 + BM
            if next_t >= T:
                next_h, next_t = h + 1, first
            other = STAGE - stage
            if next_h < (g + 1) * group:
                copy_queries(smem, Q + other, DO + other, q, do, (b * T + next_t) * q_row + next_h * D,
                             ((b * T + next_t) * H + next_h) * D, q_row, H * D, stats,
                             STATS + (2 * BM if other else 0), lse, delta, (b * H + next_h) * T + next_t, T - next_t)
            visible = not CAUSAL or t0 + BM + past > w0  # else: all queries come before our keys
            statistics = STATS + (2 * BM if stage else 0)
            if visible:
                zero_s(s)
                if REGISTERS:
                    add_rbt(s, fo, smem, left + stage)
                else:
                    add_abt(s, smem, own, left + stage)
                if is_k:
                    differences(s, stats, statistics + BM)
                else:
                    if CAUSAL and t0 + past < w0 + ROWS - 1:
                        hide_past(s, w0, t0, past)
                    weights(s, stats, statistics, scale * LOG2E)
                    send(s, smem, sent)
            cuda.syncthreads()  # P^T is there
            if visible:
                for k in range(NP):
                    receive(fp, smem, sent, k)
                    if is_k:
                        multiply(fp, s, k)
                    add_slab(acc, fp, smem, right + stage, k)
            h, t0, stage = next_h, next_t, other
        for m in range(MT):
            for r in range(2):
                unit[m, r] = scale if is_k else float32(1.0)
        scale_rows(acc, unit)
        row = G * D
        store_rows(acc, smem, own, dk if is_k else dv, (b * S + w0) * row + g * D, row, S - w0)

    return flash_attention_dkdv_kernel
