"""The steps of decode_attention.py before and after the loop over the keys: compute the new heads,
merge partial results.

All shared memory is flat. HEADS: query heads of a block, of one key head. On tensor cores there are
8 or 16, and absent heads are zeros; partial results contain only those that exist.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...device import Array
from ..decoding.kv_cache import make_block_table
from ..decoding.kv_codes import make_store_codes
from ..primitives.ptx import (
    device,
    load1,
    load4,
    load4_shared,
    store1,
    store4,
    store4_shared,
)
from ..primitives.reduce import NEG_INF, warp_max, warp_sum
from ..primitives.tensor_cores import exp2
from ..runtime.compiler import cuda, float32, int32, int64, rsqrtf, uint32

LOG2E = float32(math.log2(math.e))
# keys of a split, about: four rounds of a warp, so that reading them outweighs its other work
CHUNK = 256
# the same if few key heads leave multiprocessors idle; shorter splits cost more in the merge than
# they save
FEW_CHUNK = 192
MAX_SPLITS = 32  # of a row's keys: one lane per split in the warp that merges them
AT_ONCE = 8  # partial results that a thread loads before it adds the first one


class Cache(NamedTuple):
    """A layer's keys and values, flat."""

    k: Array
    v: Array
    scales: Array  # of codes (kv_codes.py)


class Inputs(NamedTuple):
    """What the heads of the new tokens are computed from, flat."""

    qkv: Array
    q_w: Array  # of QK-norm
    k_w: Array
    cos: Array
    sin: Array
    eps: float


class Places(NamedTuple):
    """Where the heads of a token and a key head are."""

    query: int  # the first query head in qkv
    key: int
    value: int
    to: int  # the new key and value in the cache


class Shared(NamedTuple):
    """The shared memory of a block, flat."""

    q: Array  # (HEADS, D)
    acc: Array  # (WARPS, HEADS, D): results of the warps
    top: Array  # (WARPS, HEADS)
    total: Array
    weights: Array  # of keys or of splits
    last: Array  # one int32, for arrive_last


class Partials(NamedTuple):
    """The results of the splits in global memory, flat."""

    acc: Array
    top: Array
    total: Array
    counters: Array  # of the splits that have arrived


def splits_of(S: int, keys: int, most: int) -> int:
    """Return the number of splits of a row of S tokens, at most `most`. keys: of a split, about"""
    return max(1, min(most, (S + keys // 2) // keys))


@device
def count_earlier(previous, b, t):
    """Return how many tokens right before that of row b are in the launch, too. t: its position.

    previous: the row of the token before that of each row; outside 0 .. B - 1: none.
    """
    n = int32(0)
    row = int32(previous[b])
    while row >= 0 and row < previous.size and n < t:
        n = int32(n + 1)
        row = int32(previous[row])
    return n


@device
def earlier_row(previous, b, n):
    """Return the row of the token n positions before that of row b."""
    row = int32(b)
    for _ in range(n):
        row = int32(previous[row])
    return row


@device
def quotient(a, b):
    """a // b for 0 <= a < 2^32, 0 < b < 2^32: a 64-bit division takes several times as long."""
    return int64(uint32(a) // uint32(b))


@functools.cache
def make_split_keys(CHUNK, MOST=MAX_SPLITS):
    """Return split_keys(n) -> (keys, used): `used` splits of a row of n tokens have keys; the last
    one has the rest, at most about half as many more. This depends only on n, and so do all bits of
    the result."""

    @device
    def split_keys(n):
        used = (n + CHUNK // 2) // CHUNK
        used = max(min(used, int64(MOST)), int64(1))
        keys = quotient(n, used) // 16 * 16
        return max(keys, int64(16)), used

    return split_keys


@functools.cache
def make_rope_pairs(D, NORMALISE):
    """Return load_pairs, load_angles, turn, rotate, store_pairs, PLANES: QK-norm and RoPE of a head
    that a warp holds.

    A lane holds PLANES pairs (x_r, x_{r + R}), r = lane, lane + 32, ... below R = D / 2.
    load_pairs(x1, x2, x, first)                 the head that begins at x[first]
    load_angles(c, s, cos, sin, p)               cosines and sines of position p; cos, sin: flat
    turn(y1, y2, x1, x2, w_D, c, s, eps)         y1, y2 = the head, normed and rotated
    rotate(out, to, x1, x2, w_D, c, s, eps)      writes it to out[to], ...
    store_pairs(out, to, x1, x2)                 writes the head unchanged
    """
    R = D // 2
    PLANES = -(-R // 32)

    @device
    def load_pairs(x1, x2, x, first):
        for i in range(PLANES):
            r = (cuda.threadIdx.x & 31) + 32 * i
            x1[i] = float32(0.0)
            x2[i] = float32(0.0)
            if r < R:
                x1[i] = load1(x, first + r)
                x2[i] = load1(x, first + r + R)

    @device
    def load_angles(c, s, cos, sin, p):
        for i in range(PLANES):
            r = (cuda.threadIdx.x & 31) + 32 * i
            c[i] = float32(0.0)
            s[i] = float32(0.0)
            if r < R:
                c[i], s[i] = cos[p * R + r], sin[p * R + r]

    @device
    def store_pairs(out, to, x1, x2):
        for i in range(PLANES):
            r = (cuda.threadIdx.x & 31) + 32 * i
            if r < R:
                store1(out, to + r, x1[i])
                store1(out, to + r + R, x2[i])

    @device
    def turn(y1, y2, x1, x2, w_D, c, s, eps):
        acc = float32(0.0)
        rstd = float32(1.0)
        if NORMALISE:
            for i in range(PLANES):
                acc += x1[i] * x1[i] + x2[i] * x2[i]
            rstd = rsqrtf(warp_sum(acc) * float32(1 / D) + eps)
        for i in range(PLANES):
            r = (cuda.threadIdx.x & 31) + 32 * i
            u1, u2 = x1[i], x2[i]
            if NORMALISE and r < R:
                u1 *= rstd * w_D[r]
                u2 *= rstd * w_D[r + R]
            y1[i], y2[i] = u1 * c[i] - u2 * s[i], u2 * c[i] + u1 * s[i]

    @device
    def rotate(out, to, x1, x2, w_D, c, s, eps):
        y1 = cuda.local.array(PLANES, float32)
        y2 = cuda.local.array(PLANES, float32)
        turn(y1, y2, x1, x2, w_D, c, s, eps)
        store_pairs(out, to, y1, y2)

    return load_pairs, load_angles, turn, rotate, store_pairs, PLANES


@functools.cache
def make_new_heads(D, GROUP, HEADS, WARPS, NORMALISE, CODES=False):
    """Return new_heads(q_s, cache, inputs, places, p, h0, owner).

    It writes the block's queries from head h0 on to shared memory, absent heads as zeros, and if
    this block is the owner, the new key and value to the cache. p: the position of the token.
    A warp loads all its heads before it uses the first one.
    CODES: the cache has codes, and scales their scales (kv_codes.py).
    """
    load_pairs, load_angles, turn, rotate, store_pairs, PLANES = make_rope_pairs(D, NORMALISE)
    store_codes = make_store_codes(D)
    EACH = -(-HEADS // WARPS)
    FULL_CHUNKS = GROUP % HEADS == 0

    @device
    def new_heads(q_s, cache, inputs, places, p, h0, owner):
        warp = cuda.threadIdx.x >> 5
        eps = inputs.eps
        at = places.to
        x1 = cuda.local.array((EACH, PLANES), float32)
        x2 = cuda.local.array((EACH, PLANES), float32)
        new1 = cuda.local.array(PLANES, float32)
        new2 = cuda.local.array(PLANES, float32)
        c = cuda.local.array(PLANES, float32)
        s = cuda.local.array(PLANES, float32)
        load_angles(c, s, inputs.cos, inputs.sin, p)
        for j in range(EACH):
            h = h0 + warp + j * WARPS
            h = h if h < GROUP else GROUP - 1  # also if there are more warps than heads
            load_pairs(x1[j], x2[j], inputs.qkv, places.query + h * D)
        if owner and warp >= WARPS - 2:
            place = places.key if warp == WARPS - 1 else places.value
            load_pairs(new1, new2, inputs.qkv, place)
        for j in range(EACH):
            if not FULL_CHUNKS and h0 + warp + j * WARPS >= GROUP:
                for i in range(PLANES):
                    x1[j, i] = float32(0.0)
                    x2[j, i] = float32(0.0)
            if warp + j * WARPS < HEADS:
                rotate(q_s, (warp + j * WARPS) * D, x1[j], x2[j], inputs.q_w, c, s, eps)
        if owner and warp == WARPS - 1:
            if CODES:
                turn(new1, new2, new1, new2, inputs.k_w, c, s, eps)
                store_codes(cache.k, at, cache.scales, 2 * (at // D), new1, new2)
            else:
                rotate(cache.k, at, new1, new2, inputs.k_w, c, s, eps)
        if owner and warp == WARPS - 2:
            if CODES:
                store_codes(cache.v, at, cache.scales, 2 * (at // D) + 1, new1, new2)
            else:
                store_pairs(cache.v, at, new1, new2)

    return new_heads


@functools.cache
def make_related_heads(D, S, GROUP, WARPS, NORMALISE, CODES=False):
    """Return related_heads(cache, inputs, pages, batch, item).

    It writes those of the item's keys to the cache whose tokens are in the launch, and their values:
    the row's own, and those of the rows before it in the sequence. Other blocks write the same bits.
    """
    load_pairs, load_angles, turn, _, _, PLANES = make_rope_pairs(D, NORMALISE)
    store_codes = make_store_codes(D)
    entry_of, start_of = make_block_table(S, D)
    R = D // 2

    @device
    def store_head(x, scales, at, is_value, x1, x2):
        if CODES:
            store_codes(x, at, scales, 2 * (at // D) + is_value, x1, x2)
        else:
            for i in range(PLANES):
                r = (cuda.threadIdx.x & 31) + 32 * i
                if r < R:
                    store1(x, at + r, x1[i])  # simulate: allow race, same_value_race because equal
                    at2 = at + r + R
                    store1(x, at2, x2[i])  # simulate: allow race, same_value_race because equal

    @device
    def related_heads(cache, inputs, pages, batch, item):
        x1 = cuda.local.array(PLANES, float32)
        x2 = cuda.local.array(PLANES, float32)
        c = cuda.local.array(PLANES, float32)
        s = cuda.local.array(PLANES, float32)
        width = int64(batch.G) * (GROUP + 2)  # heads of a row
        lo = max(item.t - count_earlier(batch.previous, item.b, item.t), item.lo)
        for i in range(cuda.threadIdx.x >> 5, 2 * (item.hi - lo), WARPS):
            p = int64(lo + i // 2)
            is_value = i % 2
            entry = entry_of(pages, p)
            at = start_of(entry, p, pages)
            row = earlier_row(batch.previous, item.b, int32(item.t - p))
            head = width * row + int64(batch.G) * (GROUP + is_value) + item.g
            load_pairs(x1, x2, inputs.qkv, head * D)
            load_angles(c, s, inputs.cos, inputs.sin, p)
            if not is_value:
                turn(x1, x2, x1, x2, inputs.k_w, c, s, inputs.eps)
            if entry < pages.blocks and is_value:
                store_head(cache.v, cache.scales, at, 1, x1, x2)
            elif entry < pages.blocks:
                store_head(cache.k, cache.scales, at, 0, x1, x2)

    return related_heads


@dataclass(frozen=True)
class Merge:
    """Device functions on partial softmax results.

    A partial result is m, the largest score (times log2 e), l, the sum of exp2(score - m), and
    acc, the sum of exp2(score - m) v. Several are merged with M = max m and factors exp2(m - M),
    summed in a fixed order. A thread owns 4 consecutive elements j .. j + 3 of acc, of one head.

    gather(acc, shared, j) -> m, l               merges the results of all warps
    store_partial(partials, i, j, acc, m, l)     writes them as partial result i to global memory
    finish(o, to, count, j, acc, l)              o[to + j] = acc / l, in the first `count` heads
    merge_splits                                 see make_merge_splits
    """

    gather: Callable
    store_partial: Callable
    finish: Callable
    merge_splits: Callable


@functools.cache
def make_merge(D: int, HEADS: int, WARPS: int) -> Merge:
    """Return the functions for blocks of HEADS heads of width D and WARPS warps."""
    SIZE = HEADS * D

    @device
    def gather(acc, shared, j):
        m_s = shared.top
        h = j // D
        values = cuda.local.array(4, float32)
        top = m_s[h]
        total = float32(0.0)
        for w in range(1, WARPS):
            top = top if top > m_s[w * HEADS + h] else m_s[w * HEADS + h]
        for e in range(4):
            acc[e] = float32(0.0)
        for w in range(WARPS):
            weight = exp2(m_s[w * HEADS + h] - top)
            total += shared.total[w * HEADS + h] * weight
            load4_shared(values, shared.acc, w * SIZE + j)
            for e in range(4):
                acc[e] += values[e] * weight
        return top, total

    @device
    def store_partial(partials, i, j, acc, top, total):
        store4(partials.acc, i * SIZE + j, acc)
        if j % D == 0:
            partials.top[i * HEADS + j // D] = top
            partials.total[i * HEADS + j // D] = total

    @device
    def finish(o, to, count, j, acc, total):
        if j // D < count:
            for e in range(4):
                acc[e] /= total
            store4(o, to + j, acc)

    merge_splits = make_merge_splits(D, HEADS, WARPS, finish)
    return Merge(gather, store_partial, finish, merge_splits)


@functools.cache
def make_weigh(HEADS, WARPS):
    """Return weigh(shared, partials, first, used).

    shared.weights: the weights of the splits (MAX_SPLITS, HEADS), 0 from `used` on.
    shared.total: the weighted sums of their l.
    """
    EACH = -(-HEADS // WARPS)

    @device
    def weigh(shared, partials, first, used):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        m = cuda.local.array(EACH, float32)
        total = cuda.local.array(EACH, float32)
        for j in range(EACH):  # a lane per split
            h = warp + j * WARPS
            i = (first + lane) * HEADS + h
            exists = lane < used and h < HEADS
            m[j] = partials.top[i] if exists else NEG_INF
            total[j] = partials.total[i] if exists else float32(0.0)
        for j in range(EACH):
            h = warp + j * WARPS
            if h < HEADS:
                weight = exp2(m[j] - warp_max(m[j]))
                shared.weights[lane * HEADS + h] = weight
                row_total = warp_sum(total[j] * weight)
                if lane == 0:
                    shared.total[h] = row_total

    return weigh


@functools.cache
def make_merge_splits(D, HEADS, WARPS, finish):
    """Return merge_splits(o, to, count, shared, partials, first, used).

    It merges the partial results first .. first + used - 1 and writes `count` heads of o.
    """
    THREADS = 32 * WARPS
    SIZE = HEADS * D
    weigh = make_weigh(HEADS, WARPS)
    ONCE = SIZE <= 4 * THREADS
    QUADS = min(SIZE // 4, THREADS)
    SHARES = min(THREADS // QUADS, WARPS)  # acc_s has room for WARPS

    @device
    def load_partials(values, partial, first, s, end, j):
        """Load results s .. s + AT_ONCE - 1; from `end` on, the last one again."""
        for i in range(AT_ONCE):
            split = s + i if s + i < end else end - 1
            load4(values[i], partial, (first + split) * SIZE + j)

    @device
    def merge_splits(o, to, count, shared, partials, first, used):
        """Merge. The caller has synchronized the block.

        If there are more threads than quadruples of acc, SHARES threads divide the splits of a
        quadruple among themselves.
        """
        tid = cuda.threadIdx.x
        share, quad = tid // QUADS, tid % QUADS
        each = (used + SHARES - 1) // SHARES
        begin = share * each
        end = min(begin + each, used)
        values = cuda.local.array((AT_ONCE, 4), float32)
        acc = cuda.local.array(4, float32)
        if ONCE and begin < end:  # in flight together with the loads of weigh
            load_partials(values, partials.acc, first, begin, end, 4 * quad)
        weigh(shared, partials, first, used)
        cuda.syncthreads()
        for j in range(4 * quad, SIZE, 4 * THREADS):
            for e in range(4):
                acc[e] = float32(0.0)
            for s in range(begin, end, AT_ONCE):
                if not ONCE or s > begin:
                    load_partials(values, partials.acc, first, s, end, j)
                for i in range(AT_ONCE):  # always in this order: same bits every run
                    split = s + i if s + i < end else end - 1
                    weight = shared.weights[split * HEADS + j // D]
                    weight = weight if s + i < end else float32(0.0)
                    for e in range(4):
                        acc[e] += values[i, e] * weight
            if SHARES == 1:
                finish(o, to, count, j, acc, shared.total[j // D])
            elif 0 < share < SHARES:
                store4_shared(shared.acc, share * SIZE + j, acc)
        if SHARES > 1:
            cuda.syncthreads()
            if share == 0:
                for i in range(1, SHARES):
                    load4_shared(values[0], shared.acc, i * SIZE + 4 * quad)
                    for e in range(4):
                        acc[e] += values[0, e]
                finish(o, to, count, 4 * quad, acc, shared.total[4 * quad // D])

    return merge_splits
