"""FlashAttention-2 on tensor cores, forward: what flash_attention.py says, in bf16 with float32 sums.

A block owns BM queries of one head, a warp 16 MT of them. K and V pass through shared memory in tiles of BN keys, two
stages deep: while the warps work on one tile, the next is on its way. Per tile, a warp

    scores = Q K^T                      tensor cores, operands by ldmatrix
    hides what lies in the future       only in tiles that the diagonal or the end of the keys cuts
    p = exp2(scores - top)              in registers; the four lanes of a row share its maximum by two shuffles
    acc = acc + p V                     p is already where the tensor core wants its left operand (_tiles.py)

A warp skips tiles whose keys all lie in the future of its queries; the block never loads those that all warps skip.
A warp whose queries lie beyond T does nothing but help to copy.

With a causal mask blocks are unequal: the last queries see all keys, the first ones a tile. Blocks start in the order of
their index: of the grid (heads side by side, tiles, how often), x runs fastest and z slowest. One head side by side: its
tiles come one after the other, long blocks run beside short ones and share keys and values in cache; but the last head
starts with its longest tile when there is little else left to do, and most of the GPU waits for it. Many heads side by
side: the long tiles of all of them come first, and short ones fill the end. flash_attention.make_grid chooses.

exp(x) is exp2(x log2 e), and the scale goes into the same fused multiply-add: one instruction per score before exp2.
When a row's maximum grows by less than SLACK, the old one stays: p is then above 1, at most 2^SLACK, which harms
neither bf16 nor the sums, and acc need not be rescaled. The result is divided by the sum in the end anyway.
"""

import functools
import math

from numba import cuda, float32, int32, int64, uint16, uint32

from ..primitives.ptx import device, kernel, store1
from ..primitives.reduce import FULL
from ..primitives.tensor_cores import exp2, fmax, log2, wait_copies, warp_id
from ..primitives.tiles import (
    make_add_product,
    make_copy,
    make_copy_two,
    make_fill,
    make_scores,
    make_store,
)
from ..runtime.cost import attention_flops, declare_cost

LOG2E, LN2 = float32(math.log2(math.e)), float32(math.log(2))
NEG_INF = float32(-math.inf)
LOWEST = float32(-1e30)  # the first maximum; with -inf, -inf - -inf would be NaN
SLACK = float32(8.0)


def fwd_shared_bytes(D, config) -> int:
    BM, BN = config[:2]
    return 2 * D * (BM + 4 * BN)  # Q, two stages of K and V


@functools.cache
def make_hide_keys(MT, NT, CAUSAL):
    """-> hide_keys(s, t0, n0, S, past): -inf where a key (column, from n0 on) may not be seen by a query (row, from t0
    on): it is later than query + past, or it is beyond the last of S keys. Most tiles have none.
    """
    BN = 8 * NT

    @device
    def hide_keys(s, t0, n0, S, past):
        if n0 + BN > S or (CAUSAL and n0 + BN > t0 + past + 1):
            lane = cuda.threadIdx.x & 31
            for m in range(MT):
                for r in range(2):
                    last = int32(t0 + 16 * m + 8 * r + (lane >> 2) + past)
                    if not CAUSAL or last >= S:
                        last = int32(S - 1)
                    last = int32(last - n0 - 2 * (lane & 3))
                    for n in range(NT):
                        for c in range(2):
                            if int32(8 * n + c) > last:
                                s[m, n, 2 * r + c] = NEG_INF

    return hide_keys


@functools.cache
def make_softmax(MT, NT, ND):
    """-> add_scores(s, acc, top, total, scale): scores become p; acc, top and total follow when a maximum grows.

    top, total (MT, 2): the rows' maxima, and this lane's share of their sums. scale includes log2 e.
    """

    @device
    def add_scores(s, acc, top, total, scale):
        new = cuda.local.array((MT, 2), float32)
        growth = float32(0.0)
        for m in range(MT):
            for r in range(2):
                x = fmax(s[m, 0, 2 * r], s[m, 0, 2 * r + 1])
                for n in range(1, NT):
                    x = fmax(x, fmax(s[m, n, 2 * r], s[m, n, 2 * r + 1]))
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
                        p = exp2(s[m, n, 2 * r + c] * scale - shift)
                        s[m, n, 2 * r + c] = p
                        total[m, r] += p

    return add_scores


@functools.cache
def make_finish(MT, ND):
    """-> finish(acc, top, total, scale, lse, i, valid): acc becomes o; lse[i], lse[i + 1], ... are written, `valid` of
    them.
    """
    scale_rows = make_fill(MT, ND)[2]

    @device
    def finish(acc, top, total, scale, lse, i, valid):
        lane = cuda.threadIdx.x & 31
        for m in range(MT):
            for r in range(2):
                total[m, r] += cuda.shfl_xor_sync(FULL, total[m, r], 1)
                total[m, r] += cuda.shfl_xor_sync(FULL, total[m, r], 2)
                row = 16 * m + 8 * r + (lane >> 2)
                if row < valid and lane & 3 == 0:
                    store1(lse, i + row, (top[m, r] * scale + log2(total[m, r])) * LN2)
                total[m, r] = float32(1.0) / total[m, r]
        scale_rows(acc, total)

    return finish


@functools.cache
def make_fwd_kernel(D, CAUSAL, config):
    """config: (BM, BN, warps, blocks per multiprocessor, keep Q in registers?)"""
    BM, BN, WARPS, MIN_BLOCKS, Q_REGISTERS = config
    THREADS, ROWS = 32 * WARPS, BM // WARPS
    MT, NT, ND, KS = ROWS // 16, BN // 8, D // 8, D // 16
    KV, STAGE = BM * D, 2 * BN * D  # Q is at 0; the stages of K and V are behind it
    copy_q, copy_kv = make_copy(D, BM, THREADS), make_copy_two(D, BN, THREADS)
    load_rows, scores_of, scores = make_scores(D, MT, NT)
    hide_keys, add_scores = make_hide_keys(MT, NT, CAUSAL), make_softmax(MT, NT, ND)
    add_product, finish = make_add_product(D, MT, NT), make_finish(MT, ND)
    store_o, (clear, fill, _) = make_store(D, MT), make_fill(MT, ND)

    @kernel(THREADS, MIN_BLOCKS)
    def flash_attention_fwd_kernel(o, lse, q, k, v, T, S, H, group, q_row, k_row, v_row, scale):
        """Grid (side, ceil(T / BM), ceil(B H / side)). All arrays flat; q_row, k_row, v_row: elements between positions."""
        smem = cuda.shared.array(0, uint16)
        bh = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        if bh * T >= lse.size:  # there is no such head
            return
        warp, past, b, h = warp_id(), int32(S - T), int64(bh // H), bh % H
        q0 = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * BM)
        w0, mine = int32(q0 + warp * ROWS), int32(warp * ROWS * D)  # its rows: in T, in smem
        head = h // group * D
        s, acc = cuda.local.array((MT, NT, 4), float32), cuda.local.array((MT, ND, 4), float32)
        top, total = cuda.local.array((MT, 2), float32), cuda.local.array((MT, 2), float32)
        fq = cuda.local.array((KS, MT, 4), uint32)
        clear(acc)
        fill(top, LOWEST)
        fill(total, float32(0.0))
        end = int32(q0 + BM + past if CAUSAL and q0 + BM < T else S)
        n0 = int32((end - 1) // BN * BN)  # from the diagonal down to key 0
        visible = int32((w0 + ROWS + past if CAUSAL else S) if w0 < T else 0)  # up to here
        copy_q(smem, 0, q, (b * T + q0) * q_row + h * D, q_row, T - q0)
        at_k, at_v = (b * S + n0) * k_row + head, (b * S + n0) * v_row + head
        copy_kv(smem, KV, k, at_k, k_row, v, at_v, v_row, S - n0)
        if Q_REGISTERS:
            wait_copies(0)
            cuda.syncthreads()
            load_rows(fq, smem, mine)
        now = int32(KV)
        while n0 >= 0:
            wait_copies(0)
            cuda.syncthreads()  # this tile is here, and everybody has left the one before
            other = int32(2 * KV + STAGE - now)
            if n0 > 0:
                # the same addresses in two ways: for each kind of kernel the one with which no register is spilled
                if Q_REGISTERS:
                    n = b * S + int32(n0 - BN)
                    at_k, at_v = n * k_row + head, n * v_row + head
                else:
                    at_k, at_v = at_k - BN * k_row, at_v - BN * v_row
                copy_kv(smem, other, k, at_k, k_row, v, at_v, v_row, BN)
            if n0 < visible:
                if Q_REGISTERS:
                    scores_of(s, fq, smem, now)
                else:
                    scores(s, smem, mine, now)
                hide_keys(s, w0, n0, S, past)
                add_scores(s, acc, top, total, scale * LOG2E)
                add_product(acc, s, smem, now + BN * D)
            n0, now = int32(n0 - BN), other
        finish(acc, top, total, scale * LOG2E, lse, int64(bh) * T + w0, T - w0)
        store_o(acc, smem, mine, o, ((b * T + w0) * H + h) * D, H * D, T - w0)

    declare_cost(
        flash_attention_fwd_kernel,
        sized_like={"v": ("k",)},
        flops=lambda o, lse, q, k, v, T, S, *_: attention_flops(2, o.size, T, S, CAUSAL),
    )
    return flash_attention_fwd_kernel
