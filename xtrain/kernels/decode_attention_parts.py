"""What surrounds the loop over the keys in decode_attention.py: new heads in, partial results together.

All shared memory is flat. HEADS: query heads of a block, those of one key head or 16 of them.
"""

import functools
import math
from types import SimpleNamespace

from numba import cuda, float32, int32, int64
from numba.cuda.libdevice import rsqrtf

from ._ptx import device, load1, store1
from ._reduce import NEG_INF, warp_max, warp_sum
from ._tensor_cores import exp2

LOG2E = float32(math.log2(math.e))
CHUNK = 128  # keys of a split, at least; so many that asking for them takes longer than the rest of the block's work
MAX_SPLITS = 32  # of a row's keys: lanes of the warp that merges them


def splits_of(S: int) -> int:
    """How many blocks share the keys of a head when a row holds S tokens"""
    return min(MAX_SPLITS, -(-S // CHUNK))


@functools.cache
def make_split_keys(CHUNK):
    """-> split_keys(n): keys of one split in a row of n. It depends on n alone, and so do all bits of the result."""

    @device
    def split_keys(n):
        used = (n + CHUNK - 1) // CHUNK
        used = used if used < MAX_SPLITS else int64(MAX_SPLITS)
        return ((n + used - 1) // used + 15) // 16 * 16

    return split_keys


@functools.cache
def make_turn_head(D, NORMALISE):
    """-> turn_head(out, to, x, first, w_D, cos, sin, p, eps): a warp norms the head at x[first], turns it to position p,
    and writes it to out[to]. cos, sin: flat.
    """
    R = D // 2
    PLANES = -(-R // 32)  # of a lane

    @device
    def turn_head(out, to, x, first, w_D, cos, sin, p, eps):
        lane, rstd = cuda.threadIdx.x & 31, float32(1.0)
        x1, x2 = cuda.local.array(PLANES, float32), cuda.local.array(PLANES, float32)
        acc = float32(0.0)
        for i in range(PLANES):
            r = lane + 32 * i
            x1[i] = load1(x, first + r) if r < R else float32(0.0)
            x2[i] = load1(x, first + r + R) if r < R else float32(0.0)
            acc += x1[i] * x1[i] + x2[i] * x2[i]
        if NORMALISE:
            rstd = rsqrtf(warp_sum(acc) * float32(1 / D) + eps)
        for i in range(PLANES):
            r = lane + 32 * i
            if r < R:
                if NORMALISE:
                    x1[i] *= rstd * w_D[r]
                    x2[i] *= rstd * w_D[r + R]
                c, s = cos[p * R + r], sin[p * R + r]
                store1(out, to + r, x1[i] * c - x2[i] * s)
                store1(out, to + r + R, x2[i] * c + x1[i] * s)

    return turn_head


@functools.cache
def make_new_heads(D, GROUP, HEADS, WARPS, NORMALISE):
    """-> new_heads(q_s, k, v, qkv, ...): the block's queries into shared memory; the new key and value into the cache.

    qkv[x]: the first query head of the key head; absent heads of q_s become zeros. owner: this block appends, at k[at], v[at];
    key, value: where they begin in qkv.
    """
    turn_head = make_turn_head(D, NORMALISE)

    @device
    def new_heads(q_s, k, v, qkv, x, key, value, at, owner, h0, q_w_D, k_w_D, cos, sin, p, eps):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        for i in range(warp, HEADS, WARPS):
            if h0 + i < GROUP:
                turn_head(q_s, i * D, qkv, x + (h0 + i) * D, q_w_D, cos, sin, p, eps)
            else:
                for d in range(lane, D, 32):
                    store1(q_s, i * D + d, float32(0.0))
        if owner:
            if warp == WARPS - 1:
                turn_head(k, at, qkv, key, k_w_D, cos, sin, p, eps)
            if warp == WARPS - 2:
                for d in range(lane, D, 32):
                    store1(v, at + d, load1(qkv, value + d))

    return new_heads


@functools.cache
def make_merge(D, HEADS, WARPS):
    """Partial softmax results: m, the largest score (times log2 e), l, the sum of exp2(score - m), and acc, the sum of
    exp2(score - m) v. Two of them are one with M = max m: factors exp2(m - M), added up in a fixed order.

    merge_warps(acc_s, m_s, l_s)                     those of the warps, into those of warp 0
    put(part, m_part, l_part, i, acc_s, m_s, l_s)    as number i into global memory
    merge_splits(acc_s, m_s, l_s, part, m_part, l_part, first, used)    numbers first, first + 1, ... back
    finish(o, to, acc_s, l_s, count)                 o[to + h D + d] = acc / l for `count` heads
    """
    THREADS, SIZE = 32 * WARPS, HEADS * D

    @device
    def merge_warps(acc_s, m_s, l_s):
        """Between two barriers of the caller; an element's sum is formed by its one thread."""
        tid = cuda.threadIdx.x
        for i in range(tid, SIZE, THREADS):
            h, top, acc = i // D, m_s[i // D], float32(0.0)
            for w in range(1, WARPS):
                top = top if top > m_s[w * HEADS + h] else m_s[w * HEADS + h]
            for w in range(WARPS):
                acc += acc_s[w * SIZE + i] * exp2(m_s[w * HEADS + h] - top)
            acc_s[i] = acc
        cuda.syncthreads()  # everybody has read m
        if tid < HEADS:
            top, total = m_s[tid], float32(0.0)
            for w in range(1, WARPS):
                top = top if top > m_s[w * HEADS + tid] else m_s[w * HEADS + tid]
            for w in range(WARPS):
                total += l_s[w * HEADS + tid] * exp2(m_s[w * HEADS + tid] - top)
            m_s[tid], l_s[tid] = top, total
        cuda.syncthreads()

    @device
    def put(part, m_part, l_part, i, acc_s, m_s, l_s):
        tid = cuda.threadIdx.x
        for j in range(tid, SIZE, THREADS):
            part[i * SIZE + j] = acc_s[j]
        if tid < HEADS:
            m_part[i * HEADS + tid], l_part[i * HEADS + tid] = m_s[tid], l_s[tid]

    @device
    def merge_splits(acc_s, m_s, l_s, weight_s, part, m_part, l_part, first, used):
        """weight_s: MAX_SPLITS HEADS floats. The caller's barrier is before; the last one is here."""
        tid, warp, lane = cuda.threadIdx.x, cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        for h in range(warp, HEADS, WARPS):  # a lane per split
            i = (first + lane) * HEADS + h
            m = m_part[i] if lane < used else NEG_INF
            weight = exp2(m - warp_max(m))
            total = warp_sum(l_part[i] * weight if lane < used else float32(0.0))
            weight_s[lane * HEADS + h] = weight
            if lane == 0:
                l_s[h] = total
        cuda.syncthreads()
        for j in range(tid, SIZE, THREADS):
            acc = float32(0.0)
            for s in range(used):  # always in this order: same bits every run
                acc += part[(first + s) * SIZE + j] * weight_s[s * HEADS + j // D]
            acc_s[j] = acc
        cuda.syncthreads()

    @device
    def finish(o, to, acc_s, l_s, count):
        for i in range(cuda.threadIdx.x, SIZE, THREADS):
            if i // D < count:
                store1(o, to + i, acc_s[i] / l_s[i // D])

    return SimpleNamespace(
        merge_warps=merge_warps, put=put, merge_splits=merge_splits, finish=finish
    )


@device
def arrive_last(counters, i, used):
    """A barrier for the block. -> is it the last of `used` blocks to come here? Then it sees what the others wrote."""
    last = cuda.shared.array(1, int32)
    cuda.syncthreads()  # the block's writes come before thread 0's fence
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        last[0] = int32(cuda.atomic.add(counters, i, 1) == used - 1)
        if last[0]:
            cuda.atomic.exch(counters, i, 0)  # for the next launch
            cuda.threadfence()
    cuda.syncthreads()
    return last[0] != 0
