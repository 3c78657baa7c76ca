"""FlashAttention-2 on tensor cores, forward: the algorithm of flash_attention.py in bf16 with
float32 sums.

A block owns BM queries of one head, a warp 16 MT of them. K and V pass through shared memory in
tiles of BN keys, with two
stages: while the warps compute on one tile, the next one is being copied. For each tile, a warp
computes

    scores = Q K^T                      tensor cores, operands loaded by ldmatrix
    masks keys that are not visible     only in tiles that the diagonal or the end of the keys cuts
    p = exp2(scores - top)              in registers; the four lanes of a row share its maximum by
                                        two shuffles
    acc = acc + p V                     p already has the layout of a left operand
                                        (primitives/tiles.py)

A warp skips tiles whose keys all lie in the future of its queries; the block does not load tiles
that all its warps skip, nor those before the first key that its first query sees (key_bounds.py). A
warp whose queries all lie beyond T only helps to copy.

With a causal mask, blocks are unequal: the last queries see all keys, the first ones one tile.
Blocks start in the order of their index in the grid (heads in x, blocks of a head, rounds): x runs
fastest, z slowest. With one head in x, the blocks of a head start one after another; long blocks
run next to short ones and share keys and values in the cache. But the last head starts with its
longest block when little other work is left, and most of the GPU waits for it. With many heads in
x, the long blocks of all heads start first, and short ones fill the end. flash_attention.make_grid
decides.

exp(x) is computed as exp2(x log2 e), and the scale goes into the same fused multiply-add: one
instruction per score before exp2. If a row's maximum grows by less than SLACK, the old one is kept:
p is then above 1, at most 2^SLACK, which harms neither bf16 nor the sums, and acc need not be
rescaled. The result is divided by the sum at the end anyway.
"""

import functools
import math

from ..primitives.ptx import device, kernel, store1
from ..primitives.reduce import FULL
from ..primitives.tensor_cores import cp_async_wait, exp2, fmax, log2, warp_id
from ..primitives.tiles import (
    make_add_product,
    make_copy,
    make_copy_two,
    make_fill,
    make_scores,
    make_store,
)
from ..runtime.compiler import cuda, float32, int32, int64, uint16, uint32
from ..runtime.cost import attention_flops, declare_cost
from .flash_attention_table import Tiles
from .key_bounds import make_first_key

LOG2E = float32(math.log2(math.e))
LN2 = float32(math.log(2))
NEG_INF = float32(-math.inf)
LOWEST = float32(-1e30)  # initial maximum; with -inf, -inf - -inf would be NaN
SLACK = float32(8.0)


def fwd_shared_bytes(D: int, tiles: Tiles) -> int:
    """Bytes of shared memory of the forward kernel: Q, two stages of K and V."""
    return 2 * D * (tiles.BM + 4 * tiles.BN)


@functools.cache
def make_hide_keys(MT, NT, CAUSAL):
    """Return hide_keys(s, t0, n0, S, past): set scores to -inf where the query may not see the key.

    Row i is query t0 + i, column j key n0 + j. Masked are keys later than query + past (causal),
    and keys from S on. Most tiles need no mask.
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
def make_hide_early(MT, NT, KIND):
    """Return first_keys, hide_early: the lower bounds of a warp's 16 MT rows

    first_keys(lo, first, i, t0, T, past) -> the largest
        lo (MT, 2) = the first key that each row sees, from query t0 on
    hide_early(s, lo, max_lo, n0)
        set scores of keys before it to -inf. n0: the tile's first key. max_lo: the largest of lo
    """
    first_key = make_first_key(KIND)

    @device
    def first_keys(lo, first, i, t0, T, past):
        if KIND == 0:
            return int32(0)
        lane = cuda.threadIdx.x & 31
        for m in range(MT):
            for r in range(2):
                row = int32(t0 + 16 * m + 8 * r + (lane >> 2))
                lo[m, r] = first_key(first, i, min(row, int32(T - 1)), past)
        return first_key(first, i, min(int32(t0 + 16 * MT - 1), int32(T - 1)), past)

    @device
    def hide_early(s, lo, max_lo, n0):
        if KIND != 0 and n0 < max_lo:
            lane = cuda.threadIdx.x & 31
            for m in range(MT):
                for r in range(2):
                    here = int32(lo[m, r] - n0 - 2 * (lane & 3))
                    for n in range(NT):
                        for c in range(2):
                            if int32(8 * n + c) < here:
                                s[m, n, 2 * r + c] = NEG_INF

    return first_keys, hide_early


@functools.cache
def make_softmax(MT, NT, ND):
    """Return add_scores(s, acc, top, total, scale): one tile of the online softmax.

    s becomes p; where a maximum grows by more than SLACK, top is updated and acc and total are
    rescaled. top, total (MT, 2): maxima of the rows, and this lane's share of their sums. scale
    includes log2 e.
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
                    # a row's bits do not depend on the other rows of its warp
                    grows = (new[m, r] - top[m, r]) * scale > SLACK
                    x = new[m, r] if grows else top[m, r]
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
    """Return finish(acc, top, total, scale, lse, i, valid): acc becomes o; writes lse[i], ...,
    lse[i + valid - 1]."""
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
def make_fwd_kernel(D: int, CAUSAL: bool, tiles: Tiles, KIND: int = 0):
    """Return the forward kernel for heads of width D. Launch with 32 * tiles.warps threads and
    fwd_shared_bytes(D, tiles).

    KIND: of the bounds in key_bounds.py.
    """
    BM = tiles.BM
    BN = tiles.BN
    WARPS = tiles.warps
    MIN_BLOCKS = tiles.blocks
    Q_REGISTERS = tiles.q_in_registers
    THREADS = 32 * WARPS
    ROWS = BM // WARPS
    MT = ROWS // 16
    NT = BN // 8
    ND = D // 8
    KS = D // 16
    # Q is at 0; the stages of K and V are behind it
    KV = BM * D
    STAGE = 2 * BN * D
    copy_q = make_copy(D, BM, THREADS)
    copy_kv = make_copy_two(D, BN, THREADS)
    load_rows, scores_of, scores = make_scores(D, MT, NT)
    hide_keys = make_hide_keys(MT, NT, CAUSAL)
    add_scores = make_softmax(MT, NT, ND)
    first_key = make_first_key(KIND)
    first_keys, hide_early = make_hide_early(MT, NT, KIND)
    add_product = make_add_product(D, MT, NT)
    finish = make_finish(MT, ND)
    store_o = make_store(D, MT)
    clear, fill, _ = make_fill(MT, ND)

    @kernel(THREADS, MIN_BLOCKS)
    def flash_attention_fwd_kernel(
        o, lse, q, k, v, first, T, S, H, group, q_row, k_row, v_row, scale
    ):
        """Grid (heads in x, ceil(T / BM), ceil(B H / heads in x)). All arrays flat; q_row, k_row,
        v_row: elements between positions of q, k, v. group: query heads per key head. first: of
        key_bounds.py.
        """
        smem = cuda.shared.array(0, uint16)
        bh = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        if bh * T >= lse.size:  # heads in x need not divide B H
            return
        warp = warp_id()
        past = int32(S - T)
        b = int64(bh // H)
        h = bh % H
        q0 = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * BM)
        # this warp's first row: in T, in smem
        w0 = int32(q0 + warp * ROWS)
        mine = int32(warp * ROWS * D)
        head = h // group * D
        s = cuda.local.array((MT, NT, 4), float32)
        acc = cuda.local.array((MT, ND, 4), float32)
        top = cuda.local.array((MT, 2), float32)
        total = cuda.local.array((MT, 2), float32)
        fq = cuda.local.array((KS, MT, 4), uint32)
        lo = cuda.local.array((MT, 2), int32)
        clear(acc)
        fill(top, LOWEST)
        fill(total, float32(0.0))
        end = int32(q0 + BM + past if CAUSAL and q0 + BM < T else S)
        n0 = int32((end - 1) // BN * BN)  # tiles run from the diagonal down to the first key
        begin = first_key(first, b * T, q0, past)
        max_lo = first_keys(lo, first, b * T, w0, T, past)
        # end of the keys that this warp sees
        visible = int32((w0 + ROWS + past if CAUSAL else S) if w0 < T else 0)
        copy_q(smem, 0, q, (b * T + q0) * q_row + h * D, q_row, T - q0)
        at_k = (b * S + n0) * k_row + head
        at_v = (b * S + n0) * v_row + head
        copy_kv(smem, KV, k, at_k, k_row, v, at_v, v_row, S - n0)
        if Q_REGISTERS:
            cp_async_wait(0)
            cuda.syncthreads()
            load_rows(fq, smem, mine)
        now = int32(KV)
        while n0 + BN > begin:
            cp_async_wait(0)
            cuda.syncthreads()  # this tile has arrived; all warps have left the previous one
            other = int32(2 * KV + STAGE - now)
            if n0 > begin:
                # two ways to compute the same addresses: each variant uses the one that spills no
                # register
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
                hide_early(s, lo, max_lo, n0)
                add_scores(s, acc, top, total, scale * LOG2E)
                add_product(acc, s, smem, now + BN * D)
            n0 = int32(n0 - BN)
            now = other
        finish(acc, top, total, scale * LOG2E, lse, int64(bh) * T + w0, T - w0)
        store_o(acc, smem, mine, o, ((b * T + w0) * H + h) * D, H * D, T - w0)

    declare_cost(
        flash_attention_fwd_kernel,
        sized_like={"v": ("k",)},
        flops=lambda o, lse, q, k, v, first, T, S, *_: attention_flops(
            2, o.size, T, S, CAUSAL, KIND
        ),
    )
    return flash_attention_fwd_kernel
