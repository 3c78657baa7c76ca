"""FlashAttention-2 on tensor cores, forward: what flash_attention.py says, in bf16 with float32 sums.

A block owns BM queries of one head, a warp 16 MT of them. K and V pass through shared memory in tiles of BN keys, two
stages deep: while the warps work on one tile, the next is on its way. Per tile, a warp

    scores = Q K^T                      tensor cores; operands by ldmatrix
    hides what lies in the future       only in tiles that the diagonal or the end of the keys cuts
    p = exp2(scores - max)              in registers; the row's lanes share max by two shuffles
    acc = acc + p V                     p is already where the tensor core wants its left operand (_tiles.py)

Tiles whose keys all lie in the future of all queries are never touched. Within a head the block with the most keys
starts first, so that the short ones fill the end.

exp(x) is exp2(x log2 e), and the scale goes into the same fused multiply-add: one instruction per score before exp2.
When a row's maximum grows by less than SLACK, the old one stays: p is then above 1, at most 2^SLACK, which harms
neither bf16 nor the sums, and acc need not be rescaled. The result is divided by the sum in the end anyway.
"""

import functools
import math

from numba import cuda, float32, int32, int64, uint16, uint32

from ._ptx import device, kernel, store1
from ._reduce import FULL
from ._tensor_cores import commit_copies, exp2, fmax, log2, wait_copies, warp_id
from ._tiles import make_copy, make_products, make_registers, make_store

LOG2E, LN2 = float32(math.log2(math.e)), float32(math.log(2))
NEG_INF = float32(-math.inf)
LOWEST = float32(-1e30)  # the first maximum; with -inf, -inf - -inf would be NaN
SLACK = float32(8.0)


def fwd_shared_bytes(D, config) -> int:
    BM, BN = config[:2]
    return 2 * D * (BM + 4 * BN)


@functools.cache
def make_hide_keys(MT, NT, CAUSAL):
    """-> hide_keys(scores, t0, n0, S, past): -inf where a key (column, from n0 on) may not be seen by a query (row,
    from t0 on): it is later than query + past, or it is beyond the last of S keys.
    """

    @device
    def hide_keys(scores, t0, n0, S, past):
        lane = cuda.threadIdx.x & 31
        for m in range(MT):
            for r in range(2):
                last = S - 1
                if CAUSAL:
                    last = min(last, t0 + 16 * m + 8 * r + (lane >> 2) + past)
                last = int32(last - n0 - 2 * (lane & 3))
                for n in range(NT):
                    for c in range(2):
                        if int32(8 * n + c) > last:
                            scores[m, n, 2 * r + c] = NEG_INF

    return hide_keys


@functools.cache
def make_softmax(MT, NT, ND):
    """The online softmax of a warp's 16 MT rows: see flash_attention.py. scale includes log2 e.

    add_scores(scores, acc, top, total, scale)      scores become p; acc, top and total follow a new maximum
    finish(total)                                   total over the four lanes of a row
    """

    @device
    def add_scores(scores, acc, top, total, scale):
        new = cuda.local.array((MT, 2), float32)
        growth = float32(0.0)
        for m in range(MT):
            for r in range(2):
                x = fmax(scores[m, 0, 2 * r], scores[m, 0, 2 * r + 1])
                for n in range(1, NT):
                    x = fmax(x, fmax(scores[m, n, 2 * r], scores[m, n, 2 * r + 1]))
                x = fmax(x, cuda.shfl_xor_sync(FULL, x, 1))
                new[m, r] = fmax(x, cuda.shfl_xor_sync(FULL, x, 2))
                growth = fmax(growth, new[m, r] - top[m, r])
        if cuda.any_sync(FULL, growth * scale > SLACK):
            for m in range(MT):
                for r in range(2):
                    x = fmax(top[m, r], new[m, r])
                    shrink = exp2((top[m, r] - x) * scale)
                    top[m, r] = x
                    total[m, r] *= shrink
                    for n in range(ND):
                        acc[m, n, 2 * r] *= shrink
                        acc[m, n, 2 * r + 1] *= shrink
        for m in range(MT):
            for r in range(2):
                shift = top[m, r] * scale
                for n in range(NT):
                    for c in range(2):
                        p = exp2(scores[m, n, 2 * r + c] * scale - shift)
                        scores[m, n, 2 * r + c] = p
                        total[m, r] += p

    @device
    def finish(total):
        for m in range(MT):
            for r in range(2):
                total[m, r] += cuda.shfl_xor_sync(FULL, total[m, r], 1)
                total[m, r] += cuda.shfl_xor_sync(FULL, total[m, r], 2)

    return add_scores, finish


@functools.cache
def make_fwd_kernel(D, CAUSAL, config):
    """config: (BM, BN, warps, keep Q in registers?, blocks per multiprocessor)"""
    BM, BN, WARPS, Q_REGISTERS, MIN_BLOCKS = config
    THREADS, ROWS = 32 * WARPS, BM // WARPS
    MT, NT, ND, KS = ROWS // 16, BN // 8, D // 8, D // 16
    Q, K, V, STAGE = 0, BM * D, (BM + BN) * D, 2 * BN * D  # places in shared memory
    copy_q, copy_kv, store_o = make_copy(D, BM, THREADS), make_copy(D, BN, THREADS), make_store(D, MT)
    hide_keys, products = make_hide_keys(MT, NT, CAUSAL), make_products(D, MT, NT)
    load_rows, add_abt, add_rbt = products.load_rows, products.add_abt, products.add_rbt
    add_pb, zero_s = products.add_pb, make_registers(MT, NT).zero
    zero_o, scale_rows = make_registers(MT, ND).zero, make_registers(MT, ND).scale_rows
    add_scores, finish = make_softmax(MT, NT, ND)

    @kernel(THREADS, MIN_BLOCKS)
    def flash_attention_fwd_kernel(o, lse, q, k, v, T, S, H, group, q_row, kv_row, scale):
        """Grid (ceil(T / BM), B H). q_row, kv_row: elements from one position to the next; all arrays are flat."""
        smem = cuda.shared.array(0, uint16)
        warp, lane, bh = warp_id(), cuda.threadIdx.x & 31, cuda.blockIdx.y
        b, h, past = int64(bh // H), bh % H, S - T
        q0 = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * BM
        w0 = q0 + warp * ROWS  # this warp's first query
        kv = b * S * kv_row + h // group * D
        scores, acc = cuda.local.array((MT, NT, 4), float32), cuda.local.array((MT, ND, 4), float32)
        top, total = cuda.local.array((MT, 2), float32), cuda.local.array((MT, 2), float32)
        fq = cuda.local.array((KS, MT, 4), uint32)
        zero_o(acc)
        for m in range(MT):
            for r in range(2):
                top[m, r], total[m, r] = LOWEST, float32(0.0)
        n0 = ((min(q0 + BM + past, S) if CAUSAL else S) - 1) // BN * BN  # from the diagonal to key 0
        copy_q(smem, Q, q, (b * T + q0) * q_row + h * D, q_row, T - q0)
        copy_kv(smem, K, k, kv + n0 * kv_row, kv_row, S - n0)
        copy_kv(smem, V, v, kv + n0 * kv_row, kv_row, S - n0)
        commit_copies()
        if Q_REGISTERS:
            wait_copies(0)
            cuda.syncthreads()
            load_rows(fq, smem, Q + warp * ROWS * D)
        stage = 0
        while n0 >= 0:
            wait_copies(0)
            cuda.syncthreads()  # this tile is here, and everybody has left the one before
            if n0 > 0:
                before = kv + (n0 - BN) * kv_row
                copy_kv(smem, K + STAGE - stage, k, before, kv_row, BN)
                copy_kv(smem, V + STAGE - stage, v, before, kv_row, BN)
                commit_copies()
            if not CAUSAL or n0 < w0 + ROWS + past:  # else: all in this warp's future
                zero_s(scores)
                if Q_REGISTERS:
                    add_rbt(scores, fq, smem, K + stage)
                else:
                    add_abt(scores, smem, Q + warp * ROWS * D, K + stage)
                if n0 + BN > S or (CAUSAL and n0 + BN > w0 + past + 1):
                    hide_keys(scores, w0, n0, S, past)
                add_scores(scores, acc, top, total, scale * LOG2E)
                add_pb(acc, scores, smem, V + stage)
            stage = STAGE - stage
            n0 -= BN
        finish(total)
        for m in range(MT):
            for r in range(2):
                t = w0 + 16 * m + 8 * r + (lane >> 2)
                if t < T and lane & 3 == 0:
                    log_sum = top[m, r] * scale * LOG2E + log2(total[m, r])
                    store1(lse, int64(bh) * T + t, log_sum * LN2)
                total[m, r] = float32(1.0) / total[m, r]
        scale_rows(acc, total)
        first = ((b * T + w0) * H + h) * D
        store_o(acc, smem, Q + warp * ROWS * D, o, first, H * D, T - w0)

    return flash_attention_fwd_kernel
