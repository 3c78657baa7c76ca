"""The loop over the keys of decode_attention.py in two versions: without tensor cores (read this
one first) and with them.

Both attend to keys lo .. hi - 1 of one key head with all its query heads at once, so a key is read
once, and write each warp's m, l and acc (decode_attention_parts.py) to shared memory. Neither
copies keys or values to shared memory: a warp owns whole tiles of keys, and no other warp needs
them.

    pages      where the keys are (kv_cache.Pages); a tile of 16 keys lies in one block
A table's entry takes as long to arrive as the keys that it points to, so it is loaded one tile
ahead. If an entry is not a block of the cache, the warp's l becomes NaN, and so does o.

On tensor cores, 16 keys at a time. The left operand of mma_bf16 has 16 rows, the right one 8
columns. There are 16 keys and often at most 8 query heads, so both products are transposed: S^T = K
q^T and O^T = V^T P^T. The inner index of a product may have any order if both operands have the
same one. So lane 4 g + t reads 16 contiguous bytes of keys g and g + 8, where mma_bf16 expects
scattered pairs, and q is read in the same order:

    D = 64     lane t of key g    channels 8 t .. 8 t + 7, then 32 + 8 t .. 32 + 8 t + 7
               inner index        step 0: the first 4 of each lane, step 1: its last 4;
                                  steps 2, 3 likewise

The lane then has the scores of keys g and g + 8 for heads 2 t and 2 t + 1. The second product needs
keys 2 t, 2 t + 1, ... of head g: each 8 x 8 tile of P is transposed. Of the values, lane 4 g + t
reads keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9, channels 8 g .. 8 g + 7. mma_bf16 expects two keys of one
channel in a register: these are combined from the halves of two words. Rows g and g + 8 of tile j
of the result are channels 8 g + 2 j and 8 g + 2 j + 1, its columns 2 t and 2 t + 1 are heads.

A cache of codes (kv_codes.py) is read in the same way, and each code becomes a bf16 in a register.
16 bytes are 16 channels then: lane t of key g has channels 16 t .. 16 t + 15 of 64, and q is read
in that order; of the values, a lane has twice as many channels if D = 128. The lane that has the
scores of keys g and g + 8 multiplies them by the scales of these keys, and their weights by the
scales of the values.
"""

import functools

import numpy as np

from ..decoding.kv_cache import make_block_table
from ..primitives.codes import (
    BF16_UNIT,
    codes_to_bf16,
    interleave_codes,
    load_codes4,
    load_codes8,
    load_codes16,
)
from ..primitives.ptx import device, load1, load4
from ..primitives.reduce import FULL, NEG_INF, warp_max, warp_sum
from ..primitives.tensor_cores import exp2, fmax, mma_bf16, pack_bf16, transpose_pairs
from ..primitives.words import (
    load_words2,
    load_words4,
    load_words4_shared,
    load_words8,
    load_words8_shared,
)
from ..runtime.compiler import cuda, float32, int32, int64, uint32
from .flash_attention_bf16 import LOWEST, SLACK

NAN = np.float32(np.nan)
TILE = 16  # keys, on tensor cores
LOAD_CODES = {4: load_codes4, 8: load_codes8, 16: load_codes16}


# ----------------------------------------------------------------------------- without tensor cores
@functools.cache
def make_attend_plain(D, S, HEADS, LIVE, WARPS, WINDOWED=False):
    """Return attend as in make_attend_tensor, without tensor cores and codes.

    q is float32. weights (WARPS, HEADS, 32): of keys. LIVE is HEADS.
    A lane owns a key while scores are computed, then channels while values are summed.
    """
    entry_of, start_of = make_block_table(S, D)
    W = -(-D // 32)  # channels of a lane
    SIZE = HEADS * D

    @device
    def attend(shared, cache, pages, lo, hi, begin, scale):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        s = cuda.local.array(HEADS, float32)
        top = cuda.local.array(HEADS, float32)
        total = cuda.local.array(HEADS, float32)
        acc = cuda.local.array((HEADS, W), float32)
        k_4 = cuda.local.array(4, float32)
        for h in range(HEADS):
            top[h] = LOWEST
            total[h] = float32(0.0)
            for w in range(W):
                acc[h, w] = float32(0.0)
        n = lo + 32 * warp + lane
        entry = entry_of(pages, n if n < hi else hi - 1)
        worst = uint32(0)
        for n0 in range(lo + 32 * warp, hi, 32 * WARPS):
            n = n0 + lane if n0 + lane < hi else hi - 1
            here = entry
            worst = max(here, worst)
            entry = entry_of(pages, n + 32 * WARPS if n + 32 * WARPS < hi else hi - 1)
            base = start_of(here, n, pages)
            for h in range(HEADS):
                s[h] = float32(0.0)
            for d in range(0, D, 4):
                load4(k_4, cache.k, base + d)
                for h in range(HEADS):
                    for j in range(4):
                        s[h] += shared.q[h * D + d + j] * k_4[j]
            for h in range(HEADS):
                seen = n0 + lane < hi and (not WINDOWED or n0 + lane >= begin)
                score = s[h] * scale if seen else NEG_INF
                new = warp_max(score)
                new = new if new > top[h] else top[h]
                shrink = exp2(top[h] - new)
                weight = exp2(score - new)
                top[h] = new
                total[h] = total[h] * shrink + weight
                for w in range(W):
                    acc[h, w] *= shrink
                shared.weights[(warp * HEADS + h) * 32 + lane] = weight
            cuda.syncwarp()  # the weights of all 32 keys have been written
            for half in range(2):  # 16 keys each, which lie in one block
                m0 = n0 + 16 * half
                block = uint32(cuda.shfl_sync(FULL, int32(here), 16 * half))
                base = start_of(block, m0, pages)
                for i in range(16 if m0 + 16 < hi else hi - m0):
                    for w in range(W):
                        d = lane + 32 * w
                        value = load1(cache.v, base + i * D + d) if d < D else float32(0.0)
                        for h in range(HEADS):
                            acc[h, w] += (
                                shared.weights[(warp * HEADS + h) * 32 + 16 * half + i] * value
                            )
            cuda.syncwarp()  # and have been read
        for h in range(HEADS):
            row_total = warp_sum(total[h] if worst < pages.blocks else NAN)
            if lane == 0:
                shared.top[warp * HEADS + h] = top[h]
                shared.total[warp * HEADS + h] = row_total
            for w in range(W):
                if lane + 32 * w < D:
                    shared.acc[warp * SIZE + h * D + lane + 32 * w] = acc[h, w]

    return attend


# ----------------------------------------------------------------------------- on tensor cores
@functools.cache
def make_load_operands(D, HEADS):
    """Return load_q, load_k, load_v: operands of mma_bf16

    load_q(fq (HEADS / 8, D / 16, 2), q_s)      right operands: heads 0..7 and 8..15
    load_k(fk (D / 16, 4), k, start, last)      left operands: 16 keys from k[start] on
    load_v(fv (D / 16, 4), v, start, last)      left operands: 16 values from v[start] on, in tiles
                                                of 16 channels
    For keys after key `last` of the 16, that one is loaded again.
    """
    QUADS = max(D // 32, 1)  # reads of a lane per key
    WIDE = D >= 32  # a read is 8 elements; for D = 16 it is 4
    EACH = 8 if WIDE else 4
    VALUES = min(D // 8, 8)  # elements of a lane's read of v
    READS = D // (8 * VALUES)
    BLOCKS = HEADS // 8
    WORDS = 4 if WIDE else 2
    PAIRS = max(VALUES // 2, 1)

    @device
    def load_q(fq, q_s):
        lane = cuda.threadIdx.x & 31
        words = cuda.local.array(4, uint32)
        for c in range(QUADS):
            for b in range(BLOCKS):
                at = ((lane >> 2) + 8 * b) * D + 32 * c + EACH * (lane & 3)
                if WIDE:
                    load_words8_shared(words, q_s, at)
                else:
                    load_words4_shared(words, q_s, at)
                for i in range(WORDS):
                    fq[b, 2 * c + i // 2, i % 2] = words[i]

    @device
    def load_k(fk, k, start, last):
        lane = uint32(cuda.threadIdx.x & 31)
        words = cuda.local.array(4, uint32)
        for m in range(2):
            n = uint32(uint32(8 * m) + (lane >> uint32(2)))
            n = min(n, last)
            mine = start + int64(uint32(n * uint32(D) + uint32(EACH) * (lane & uint32(3))))
            for c in range(QUADS):
                at = mine + 32 * c
                if WIDE:
                    load_words8(words, k, at)
                else:
                    load_words4(words, k, at)
                for i in range(WORDS):
                    fk[2 * c + i // 2, 2 * (i % 2) + m] = words[i]

    @device
    def load_v(fv, v, start, last):
        lane = uint32(cuda.threadIdx.x & 31)
        even = cuda.local.array(4, uint32)
        odd = cuda.local.array(4, uint32)
        d = uint32(VALUES) * (lane >> uint32(2))
        for m in range(2):  # keys 2t, 2t + 1, then 2t + 8, 2t + 9: registers 0 and 1
            n = uint32(uint32(8 * m) + uint32(2) * (lane & uint32(3)))
            next_n = n + uint32(1) if n < last else last
            n = min(n, last)
            at_even = start + int64(uint32(uint32(n) * uint32(D) + d))
            at_odd = start + int64(uint32(uint32(next_n) * uint32(D) + d))
            for c in range(READS):
                if VALUES == 8:
                    load_words8(even, v, at_even + 64 * c)
                    load_words8(odd, v, at_odd + 64 * c)
                elif VALUES == 4:
                    load_words4(even, v, at_even + 64 * c)
                    load_words4(odd, v, at_odd + 64 * c)
                else:
                    load_words2(even, v, at_even + 64 * c)
                    load_words2(odd, v, at_odd + 64 * c)
                for i in range(PAIRS):
                    low = uint32(even[i] & uint32(0xFFFF)) | uint32(odd[i] << uint32(16))
                    high = uint32(even[i] >> uint32(16)) | uint32(odd[i] & uint32(0xFFFF0000))
                    fv[c * PAIRS + i, 2 * m] = uint32(low)
                    fv[c * PAIRS + i, 2 * m + 1] = uint32(high)

    return load_q, load_k, load_v


@functools.cache
def make_load_codes(D, HEADS):
    """Return load_q, load_k, load_v: as in make_load_operands, of a cache of codes; load_k and
    load_v give codes / BF16_UNIT"""
    # codes of a lane's read of a key, of a value
    EACH = min(D // 4, 16)
    VALUES = min(D // 8, 16)
    READS = D // (8 * VALUES)
    SPAN = 4 * EACH  # of the four lanes that read a key
    BLOCKS = HEADS // 8
    K_WORDS = EACH // 4
    V_WORDS = VALUES // 4
    load_of_k, load_of_v = LOAD_CODES[EACH], LOAD_CODES[VALUES]

    @device
    def load_q(fq, q_s):
        lane = cuda.threadIdx.x & 31
        words = cuda.local.array(2, uint32)
        for c in range(D // SPAN):
            for b in range(BLOCKS):
                at = ((lane >> 2) + 8 * b) * D + SPAN * c + EACH * (lane & 3)
                for j in range(K_WORDS):
                    load_words4_shared(words, q_s, at + 4 * j)
                    for i in range(2):
                        fq[b, K_WORDS * c + j, i] = words[i]

    @device
    def load_k(fk, k, start, last):
        lane = uint32(cuda.threadIdx.x & 31)
        words = cuda.local.array(K_WORDS, uint32)
        pairs = cuda.local.array(2, uint32)
        for m in range(2):
            n = uint32(uint32(8 * m) + (lane >> uint32(2)))
            n = min(n, last)
            mine = start + int64(uint32(n * uint32(D) + uint32(EACH) * (lane & uint32(3))))
            for c in range(D // SPAN):
                load_of_k(words, k, mine + SPAN * c)
                for j in range(K_WORDS):
                    codes_to_bf16(pairs, words[j], k)
                    for i in range(2):
                        fk[K_WORDS * c + j, 2 * i + m] = pairs[i]

    @device
    def load_v(fv, v, start, last):
        lane = uint32(cuda.threadIdx.x & 31)
        even = cuda.local.array(V_WORDS, uint32)
        odd = cuda.local.array(V_WORDS, uint32)
        both = cuda.local.array(2, uint32)
        pairs = cuda.local.array(2, uint32)
        d = uint32(VALUES) * (lane >> uint32(2))
        for m in range(2):
            n = uint32(uint32(8 * m) + uint32(2) * (lane & uint32(3)))
            next_n = n + uint32(1) if n < last else last
            n = min(n, last)
            at_even = start + int64(uint32(uint32(n) * uint32(D) + d))
            at_odd = start + int64(uint32(uint32(next_n) * uint32(D) + d))
            for c in range(READS):
                load_of_v(even, v, at_even + 8 * VALUES * c)
                load_of_v(odd, v, at_odd + 8 * VALUES * c)
                for j in range(V_WORDS):
                    both[0], both[1] = even[j], odd[j]
                    interleave_codes(both)
                    for i in range(2):
                        codes_to_bf16(pairs, both[i], v)
                        to = 2 * (V_WORDS * c + j) + i
                        fv[to, 2 * m] = pairs[0]
                        fv[to, 2 * m + 1] = pairs[1]

    return load_q, load_k, load_v


@functools.cache
def make_online_softmax(BLOCKS, TILES, WINDOWED):
    """Return hide_keys, add_scores: on a tile of 16 keys and 8 BLOCKS heads, transposed

    hide_keys(s, n0, begin, end)
        scores of keys from `end` on become -inf, and if WINDOWED, of those before `begin`; the tile
        begins at key n0
    add_scores(s, acc, top, total, scale)
        s becomes p; where a maximum grows by more than SLACK, top is updated and acc and total are
        rescaled
    s (BLOCKS, 4): the scores. acc (BLOCKS, TILES, 4). top, total (BLOCKS, 2): maxima of heads 2 t
    and 2 t + 1, and this lane's share of their sums. scale includes log2 e.
    """

    @device
    def hide_keys(s, n0, begin, end):
        if n0 + TILE > end or (WINDOWED and n0 < begin):
            n = int32(n0 + ((cuda.threadIdx.x & 31) >> 2))
            for b in range(BLOCKS):
                for i in range(4):
                    key = int32(n + 8 * (i // 2))
                    if key >= end or (WINDOWED and key < begin):
                        s[b, i] = NEG_INF

    @device
    def add_scores(s, acc, top, total, scale):
        new = cuda.local.array((BLOCKS, 2), float32)
        growth = float32(0.0)
        for b in range(BLOCKS):
            for e in range(2):
                new[b, e] = fmax(s[b, e], s[b, 2 + e])
        for i in range(2, 5):  # of all heads: a shuffle does not wait for another head's
            for b in range(BLOCKS):
                for e in range(2):
                    new[b, e] = fmax(new[b, e], cuda.shfl_xor_sync(FULL, new[b, e], 1 << i))
        for b in range(BLOCKS):
            for e in range(2):
                growth = fmax(growth, new[b, e] - top[b, e])
        if cuda.any_sync(FULL, growth * scale > SLACK):
            for b in range(BLOCKS):
                for e in range(2):
                    grows = (new[b, e] - top[b, e]) * scale > SLACK
                    x = new[b, e] if grows else top[b, e]
                    shrink = exp2((top[b, e] - x) * scale)
                    top[b, e] = x
                    total[b, e] *= shrink
                    for j in range(TILES):
                        acc[b, j, e] *= shrink
                        acc[b, j, 2 + e] *= shrink
        for b in range(BLOCKS):
            for e in range(2):
                shift = top[b, e] * scale
                for r in range(2):
                    p = exp2(s[b, 2 * r + e] * scale - shift)
                    s[b, 2 * r + e] = p
                    total[b, e] += p

    return hide_keys, add_scores


@functools.cache
def make_attend_tensor(D, S, HEADS, LIVE, WARPS, WINDOWED=False, CODES=False):
    """Return attend(shared, cache, pages, lo, hi, begin, scale): the loop over keys lo .. hi - 1.

    S: tokens of a block.
    HEADS: 8 or 16, of which the first LIVE are kept: acc (WARPS, LIVE, D), m and l (WARPS, LIVE).
    lo: a multiple of 16.
    begin: if WINDOWED, the first key that the query sees.
    q is bf16. CODES: k and v are codes, and scales their scales.
    """
    STRIDE = TILE * WARPS  # from a warp's tile to its next one
    UNIT = np.float32(BF16_UNIT)
    entry_of, start_of = make_block_table(S, D)
    STEPS = D // 16
    TILES = D // 16
    SIZE = LIVE * D
    VALUES = min(D // 8, 16 if CODES else 8)
    BLOCKS = HEADS // 8
    load_q, load_k, load_v = (make_load_codes if CODES else make_load_operands)(D, HEADS)
    hide_keys, add_scores = make_online_softmax(BLOCKS, TILES, WINDOWED)

    @device
    def load_scales(of_k, of_v, scales, start, last):
        """Of keys g and g + 8, and of their values."""
        for m in range(2):
            n = uint32(uint32(8 * m) + uint32((cuda.threadIdx.x & 31) >> 2))
            at = 2 * (start // D + int64(min(n, last)))
            of_k[m] = scales[at] * UNIT
            of_v[m] = scales[at + 1] * UNIT

    @device
    def store_result(shared, acc, top, total, scale, valid):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        for i in range(2, 5):
            for b in range(BLOCKS):
                for e in range(2):
                    total[b, e] += cuda.shfl_xor_sync(FULL, total[b, e], 1 << i)
        for b in range(BLOCKS):
            for e in range(2):
                h = 8 * b + 2 * (lane & 3) + e
                if h < LIVE:
                    if lane < 4:
                        shared.top[warp * LIVE + h] = top[b, e] * scale
                        shared.total[warp * LIVE + h] = total[b, e] if valid else NAN
                    for i in range(2 * TILES):
                        d = i // VALUES * (8 * VALUES) + VALUES * (lane >> 2) + i % VALUES
                        shared.acc[warp * SIZE + h * D + d] = acc[b, i // 2, 2 * (i % 2) + e]

    @device
    def attend(shared, cache, pages, lo, hi, begin, scale):
        fq = cuda.local.array((BLOCKS, STEPS, 2), uint32)
        fk = cuda.local.array((STEPS, 4), uint32)
        fv = cuda.local.array((TILES, 4), uint32)
        fp = cuda.local.array(2, uint32)
        s = cuda.local.array((BLOCKS, 4), float32)
        acc = cuda.local.array((BLOCKS, TILES, 4), float32)
        top = cuda.local.array((BLOCKS, 2), float32)
        total = cuda.local.array((BLOCKS, 2), float32)
        of_k = cuda.local.array(2, float32)
        of_v = cuda.local.array(2, float32)
        for b in range(BLOCKS):
            for e in range(2):
                top[b, e] = LOWEST
                total[b, e] = float32(0.0)
            for j in range(TILES):
                for i in range(4):
                    acc[b, j, i] = float32(0.0)
        n0 = int32(lo + TILE * (cuda.threadIdx.x >> 5))
        end = int32(hi)
        worst = entry_of(pages, n0 if n0 < end else int32(end - 1))
        entry = worst
        load_q(fq, shared.q)
        while n0 < end:
            after = int32(n0 + STRIDE)
            following = entry_of(pages, after if after < end else int32(end - 1))
            worst = max(entry, worst)
            start = start_of(entry, n0, pages)
            last = uint32(end - n0 - 1)
            load_k(fk, cache.k, start, last)
            load_v(fv, cache.v, start, last)
            if CODES:
                load_scales(of_k, of_v, cache.scales, start, last)
            # no instruction: the compiler does not move the loads of values behind the products
            # with keys
            cuda.syncwarp()
            for b in range(BLOCKS):
                for i in range(4):
                    s[b, i] = float32(0.0)
                for i in range(STEPS):
                    mma_bf16(s[b], fk[i], fq[b, i])
                if CODES:
                    for i in range(4):
                        s[b, i] *= of_k[i // 2]
            hide_keys(s, n0, begin, end)
            add_scores(s, acc, top, total, scale)
            for b in range(BLOCKS):
                if CODES:
                    for i in range(4):
                        s[b, i] *= of_v[i // 2]
                for r in range(2):
                    fp[r] = transpose_pairs(pack_bf16(s[b, 2 * r], s[b, 2 * r + 1]))
                for j in range(TILES):
                    mma_bf16(acc[b, j], fv[j], fp)
            n0, entry = after, following
        store_result(shared, acc, top, total, scale, worst < pages.blocks)

    return attend
