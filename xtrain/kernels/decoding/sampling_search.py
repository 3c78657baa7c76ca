"""Find a token by its rank, or by a running sum of weights, in a row that is too long to sort.

The tokens of a row are in order of their logits, the largest first; of equal ones the lower id
first. Three launches read the row, each with several blocks a row; a fourth needs one block a row.

top       the largest key. The block that finishes last merges what the blocks of a row have found.
weigh     a histogram over bins by the distance from the largest logit: weights, or counts. Integers
          are added atomically, so the sums are exact and do not depend on the order or on the
          division into blocks. The block that finishes last searches the running sum of the bins
          for the bins in which the wanted tokens lie.
gather    the keys of those bins, usually a few hundred, go to a list.
draw      one block sorts the list (bitonic sort, Batcher 1968) and searches its running sum. A list
          that is too long to sort (many equal logits) is first narrowed down: a histogram over the
          next bits of its keys, again and again; if even memory has no room for it, from the row
          itself.

key       a token's sort key, an int64: its logit in the upper bits, as an integer that grows with
          it; below, the largest possible id minus its id. Keys are distinct, and a larger key comes
          earlier, so "lower id first" needs no extra step. -1 is no token. A NaN sorts before
          everything else.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...device import Array
from ..primitives.last_block import arrive_last
from ..primitives.ptx import device, kernel, let_next_start, load1, wait_for_previous
from ..primitives.reduce import FULL
from ..runtime.compiler import cuda, float32, float_as_int, int32, int64, int_as_float, uint32
from ..runtime.launch import multiprocessors

ID = 31  # bits of a key that hold the id
LAST_ID = (1 << ID) - 1
LAST_KEY = (1 << 63) - 1
KEY = 63  # bits of a key
NAN_ORDER = (1 << 31) - 1  # larger than that of infinity
LOWEST_ORDER = -(1 << 31)  # smaller than that of -infinity
WORD = 0xFFFFFFFF
FAR = 1 << 62
INFINITY = float32(math.inf)


@dataclass(frozen=True)
class Sizes:
    """How the work on a row is divided. The results do not depend on it."""

    threads: int = 256  # of a block
    batch: int = 8  # logits that a thread loads before it uses the first one
    # that a block sorts, and bins of a histogram: at least the largest top-k; a power of two
    keys: int = 1024
    room: int = 8192  # keys of a row's list in memory
    blocks: int = 4  # per multiprocessor, as many as fit with 64 registers per thread
    sorters: int = 512  # threads of the block that sorts: each compares one pair

    def split(self, x: Array, rows: int, vocab: int) -> tuple[int, int]:
        """Return blocks per row, so that all rows keep all multiprocessors of the GPU of x busy,
        and tokens per block"""
        at_once = self.threads * self.batch
        blocks = max(self.blocks * multiprocessors(x) // rows, 1)
        length = -(-vocab // (blocks * at_once)) * at_once
        return -(-vocab // length), length

    def for_sorting(self) -> "Sizes":
        """Return the sizes in the block that sorts."""
        return replace(self, threads=self.sorters)


# ----------------------------------------------------------------------------- keys and weights
@device
def order_of(logit):
    """Return an int32 that grows with the logit; the largest for NaN"""
    bits = float_as_int(logit + float32(0.0))  # -0 becomes 0: they are equal
    order = bits if bits >= 0 else int32(bits ^ int32(0x7FFFFFFF))
    return order if logit == logit else int32(NAN_ORDER)


@device
def key_of(order, token):
    """Return the sort key of the token with this order_of, 0 <= key < 2^63"""
    return (int64(order) + int64(1 << 31)) << ID | (LAST_ID - token)


@device
def logit_of(key):
    """Return the logit of a key"""
    order = (key >> ID) - int64(1 << 31)
    return int_as_float(int32(order if order >= 0 else order ^ int64(0x7FFFFFFF)))


@device
def token_of(key):
    """Return the id of a key"""
    return int32(LAST_ID - (key & LAST_ID))


@device
def is_finite(x):
    """False for NaN and the infinities"""
    return x - x == float32(0.0)


# ----------------------------------------------------------------------------- functions of a block
@device
def put_in_order(x_s, pairs, step, size, then):
    """A bitonic merge of x_s[0 : 2 pairs]: order the elements `step` apart, then those half as far
    apart, ... down to 1.

    Runs of `size` alternate between descending and ascending. then: the distance of the accesses
    that follow. While step <= 32, a warp's 32 pairs stay within the same 64 elements, so only
    larger steps need a barrier of the block.
    """
    while step > 0:
        i = int64(cuda.threadIdx.x)
        while i < pairs:
            # unsigned: no code for negative indices
            at = uint32(2 * i - (i & (step - 1)))
            other = uint32(at + step)
            a, b = x_s[at], x_s[other]
            if (a < b) == (at & size == 0):
                x_s[at], x_s[other] = b, a
            i += cuda.blockDim.x
        after = step >> 1 if step > 1 else then
        if step > 32 or after > 32:
            cuda.syncthreads()
        else:
            cuda.syncwarp()
        step >>= 1


@device
def sort_keys(x_s, n):
    """Sort x_s[0:n] in descending order; beyond, up to a power of two, x_s must hold -1."""
    length = int64(2)
    size = int64(2)
    while length < n:
        length <<= 1
    while size < length:
        put_in_order(x_s, length >> 1, size >> 1, size, size)
        size <<= 1
    put_in_order(x_s, length >> 1, length >> 1, FAR, FAR)


@device
def block_max_key(v, scratch):
    """Return the maximum of v >= -1 over the block, in thread 0"""
    tid = cuda.threadIdx.x
    for step in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(FULL, v, step)
        v = max(v, other)
    if tid & 31 == 0:
        scratch[tid >> 5] = v
    cuda.syncthreads()
    if tid < 32:
        v = scratch[tid] if tid < cuda.blockDim.x >> 5 else int64(-1)
        for step in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(FULL, v, step)
            v = max(v, other)
    return v


@device
def running_sum(v, scratch):
    """Return the sum of v over the threads up to and including this one, and over all threads.
    scratch: 32 int64"""
    tid = cuda.threadIdx.x
    lane = cuda.threadIdx.x & 31
    for i in range(5):
        before = cuda.shfl_up_sync(FULL, v, 1 << i)
        if lane >= 1 << i:
            v += before
    cuda.syncthreads()  # the previous use of scratch is over
    if lane == 31:
        scratch[tid >> 5] = v
    cuda.syncthreads()
    total = int64(0)
    for warp in range(cuda.blockDim.x >> 5):
        if warp == tid >> 5:
            v += total
        total += scratch[warp]
    return v, total


@device
def add_weight(bins, i, w):
    """bins[0, i] and bins[1, i] hold the lower and upper 32 bits of a sum: shared memory has no
    faster 64-bit atomics."""
    low = w & WORD
    low += int64(cuda.atomic.add(bins, (0, i), uint32(low)))
    high = (w >> 32) + (low >> 32)
    if high > 0:
        cuda.atomic.add(bins, (1, i), uint32(high))


@device
def of_bin(bins, i):
    """Return the sum of bin i"""
    return int64(bins[1, i]) << 32 | int64(bins[0, i])


class Row(NamedTuple):
    """A row of logits."""

    logits: Array  # of all rows, flat
    first: int  # where the row begins
    V: int
    top: float  # the largest logit
    inverse: float  # 1 / temperature
    least: int  # see weight_of


class Candidates(NamedTuple):
    """A row's list of keys."""

    keys: Array  # of all rows, flat (B ROOM)
    b: int
    n: int  # how many there are, also those for which there was no room


class GatherShared(NamedTuple):
    """The shared memory of `gather`."""

    keys: Array  # K
    count: Array
    base: Array


class Shared(NamedTuple):
    """The shared memory of `collect` and `narrow`."""

    keys: Array  # K
    bins: Array  # (2, K)
    count: Array
    scratch: Array
    place: Array  # 3


@dataclass(frozen=True)
class SearchOps:
    """The device functions of make_search. values: a register array, EACH neighbouring elements per
    thread."""

    EACH: int  # elements of a list, or bins, per thread
    load_batch: Callable
    bin_of: Callable
    clear_bins: Callable
    add_bins: Callable
    load_bins: Callable
    total_of: Callable
    find: Callable
    gather: Callable
    collect: Callable
    narrow: Callable
    weigh_list: Callable


@functools.cache
def make_search(sizes: Sizes, distance: int, weight_of: Callable) -> SearchOps:
    """Return the functions that depend on the sizes.

    distance: factors of e that the bins span; the last bin holds everything beyond.
    weight_of(logit, top, inverse, least) -> int64. top: the row's largest logit, inverse: 1 /
    temperature.
    """
    THREADS = sizes.threads
    BATCH = sizes.batch
    K = sizes.keys
    ROOM = sizes.room
    EACH = K // THREADS
    BITS = K.bit_length() - 1
    STEEP = float32((K - 1) / distance)

    @device
    def load_batch(x, logits, first, token, end):
        """x[j] = the logit of token + j THREADS, -inf from `end` on; all loads are in flight before
        one is used."""
        for j in range(BATCH):
            t = token + j * THREADS
            x[j] = load1(logits, first + t) if t < end else -INFINITY

    @device
    def bin_of(logit, top, inverse):
        """Return the bin of a logit. A smaller logit never gets an earlier bin: rounding is
        monotonic."""
        scaled = (top - logit) * inverse * STEEP
        return int64(scaled) if scaled < float32(K - 1) else int64(K - 1)

    @device
    def clear_bins(bins_s):
        for i in range(cuda.threadIdx.x, K, THREADS):
            bins_s[0, i] = bins_s[1, i] = uint32(0)

    @device
    def add_bins(bins, first, bins_s):
        """bins[first + i] += bins_s[i], atomically"""
        for i in range(cuda.threadIdx.x, K, THREADS):
            v = of_bin(bins_s, i)
            if v > 0:
                cuda.atomic.add(bins, first + i, v)

    @device
    def load_bins(values, bins, first):
        for j in range(EACH):
            values[j] = bins[first + cuda.threadIdx.x * EACH + j]

    @device
    def total_of(values, scratch):
        """Return the sum of the values of all threads"""
        mine = int64(0)
        for j in range(EACH):
            mine += values[j]
        _, total = running_sum(mine, scratch)
        return total

    @device
    def find(values, goal, scratch, place_s):
        """Return i, before, value: the running sum of the values exceeds `goal` at element i; it is
        `before` in front of it"""
        mine = int64(0)
        for j in range(EACH):
            mine += values[j]
        end, _ = running_sum(mine, scratch)
        before = end - mine
        for j in range(EACH):
            if before <= goal and goal < before + values[j]:
                place_s[0] = cuda.threadIdx.x * EACH + j
                place_s[1] = before
                place_s[2] = values[j]
            before += values[j]
        cuda.syncthreads()
        i = place_s[0]
        before = place_s[1]
        value = place_s[2]
        cuda.syncthreads()
        return i, before, value

    @device
    def gather(shared, candidates, counts_B, b, row, start, end, lo, hi, cut):
        """Append the keys of the tokens start .. end - 1 in the bins lo to hi, or cut, to a list.

        counts_B[b]: how many there are; only those that fit into ROOM are written.
        """
        keys_s = shared.keys
        count_s = shared.count
        base_s = shared.base
        tid = cuda.threadIdx.x
        if tid == 0:
            count_s[0] = 0
        cuda.syncthreads()
        x = cuda.local.array(BATCH, float32)
        for token in range(start + tid, end, BATCH * THREADS):
            load_batch(x, row.logits, row.first, token, end)
            for j in range(BATCH):
                bin = bin_of(x[j], row.top, row.inverse)
                t = token + j * THREADS
                if ((lo <= bin and bin <= hi) or bin == cut) and t < end:
                    key = key_of(order_of(x[j]), t)
                    i = int64(cuda.atomic.add(count_s, 0, 1))
                    if i < K:
                        keys_s[i] = key
                    else:
                        i = int64(cuda.atomic.add(counts_B, b, 1))
                        if i < ROOM:
                            candidates[b * ROOM + i] = key
        cuda.syncthreads()
        n = min(int64(count_s[0]), int64(K))
        if tid == 0:
            base_s[0] = cuda.atomic.add(counts_B, b, int32(n))
        cuda.syncthreads()
        for i in range(tid, n, THREADS):
            at = int64(base_s[0]) + i
            if at < ROOM:
                candidates[b * ROOM + at] = keys_s[i]

    @device
    def collect(shared, candidates, row, lo, hi, low, high, lower, unit):
        """Return how many keys from low to high are in the bins lo to hi.

        shared.keys: these keys in any order, -1 beyond. If there are more than K, some are missing.
        If the row's list has no room for its candidates, the row is read.
        shared.bins: the weights (unit: the counts) of those with the same (high - key) >> lower.
        """
        keys_s = shared.keys
        bins_s = shared.bins
        count_s = shared.count
        n = candidates.n
        tid = cuda.threadIdx.x
        clear_bins(bins_s)
        for i in range(tid, K, THREADS):
            keys_s[i] = int64(-1)
        if tid == 0:
            count_s[0] = 0
        cuda.syncthreads()
        keys = cuda.local.array(BATCH, int64)
        items = n if n <= ROOM else row.V
        for at in range(tid, items, BATCH * THREADS):
            for j in range(BATCH):
                i = at + j * THREADS
                keys[j] = int64(-1)
                if i < items and n <= ROOM:
                    keys[j] = candidates.keys[candidates.b * ROOM + i]
                elif i < items:
                    keys[j] = key_of(order_of(load1(row.logits, row.first + i)), i)
            for j in range(BATCH):
                if low <= keys[j] and keys[j] <= high:
                    logit = logit_of(keys[j])
                    bin = bin_of(logit, row.top, row.inverse)
                    if lo <= bin and bin <= hi:
                        i = int64(cuda.atomic.add(count_s, 0, 1))
                        if i < K:
                            keys_s[i] = keys[j]
                        w = int64(1)
                        if not unit:
                            w = weight_of(logit, row.top, row.inverse, row.least)
                        if w > 0:
                            add_weight(bins_s, (high - keys[j]) >> lower, w)
        cuda.syncthreads()
        return int64(count_s[0])

    @device
    def narrow(shared, candidates, row, lo, hi, goal, unit):
        """Find at most K neighbouring keys of the bins lo to hi, and sort them into shared.keys.

        The running sum of their weights (unit: their counts), which begins with bin lo, exceeds
        `goal` at one of them. Returns the sum before the first of them.
        """
        low = int64(0)
        high = int64(LAST_KEY)
        lower = int64(KEY - BITS)
        size = int64(K + 1)
        before = int64(0)
        values = cuda.local.array(EACH, int64)
        while size > K:
            size = collect(shared, candidates, row, lo, hi, low, high, lower, unit)
            for j in range(EACH):
                values[j] = of_bin(shared.bins, cuda.threadIdx.x * EACH + j)
            if size > K:
                digit, skipped, _ = find(values, goal - before, shared.scratch, shared.place)
                before += skipped
                high -= digit << lower
                low = high - (int64(1) << lower) + 1
                lower = max(lower - BITS, int64(0))
        sort_keys(shared.keys, size)
        return before

    @device
    def weigh_list(values, keys_s, limit, row, lo, hi):
        """Weigh the sorted keys; 0 from element `limit` on and outside of the bins lo to hi."""
        for j in range(EACH):
            i = cuda.threadIdx.x * EACH + j
            values[j] = int64(0)
            key = keys_s[i]
            if key >= 0 and i < limit:
                logit = logit_of(key)
                bin = bin_of(logit, row.top, row.inverse)
                if lo <= bin and bin <= hi:
                    values[j] = weight_of(logit, row.top, row.inverse, row.least)

    return SearchOps(
        EACH=EACH,
        load_batch=load_batch,
        bin_of=bin_of,
        clear_bins=clear_bins,
        add_bins=add_bins,
        load_bins=load_bins,
        total_of=total_of,
        find=find,
        gather=gather,
        collect=collect,
        narrow=narrow,
        weigh_list=weigh_list,
    )


# ----------------------------------------------------------------------------- the first launch
@functools.cache
def make_top_kernel(sizes: Sizes, overlap: bool):
    """Return the kernel `top`. overlap: it may start before the previous one has ended."""
    THREADS = sizes.threads
    BATCH = sizes.batch
    K = sizes.keys

    @kernel(THREADS, sizes.blocks)
    def top_key_kernel(top_B, bins, counts_B, tops, counters, logits, length, V, columns):
        """Grid (blocks per row, B), block THREADS. Block s of a row reads its tokens s length .. (s
        + 1) length - 1.

        top_B: the largest key; bins, flat (B K), and counts_B: zeros for the launches that follow.
        tops: flat (B gridDim.x).
        logits: flat (B columns), V of them tokens.
        """
        scratch = cuda.shared.array(32, int64)
        last_s = cuda.shared.array(1, int32)
        x = cuda.local.array(BATCH, float32)
        tid = cuda.threadIdx.x
        s = int64(cuda.blockIdx.x)
        b = int64(cuda.blockIdx.y)
        blocks = int64(cuda.gridDim.x)
        if overlap:
            wait_for_previous()
            let_next_start()
        for i in range(s * THREADS + tid, K, blocks * THREADS):
            bins[b * K + i] = int64(0)
        if s == 0 and tid == 0:
            counts_B[b] = 0
        end = min((s + 1) * length, V)
        best = int32(LOWEST_ORDER)
        chosen = int64(-1)
        for token in range(s * length + tid, end, BATCH * THREADS):
            for j in range(BATCH):  # all loads are in flight before the first one is used
                t = token + j * THREADS
                x[j] = load1(logits, b * columns + t) if t < end else -INFINITY
            for j in range(BATCH):
                order = order_of(x[j])
                t = token + j * THREADS
                if order > best and t < end:
                    best, chosen = order, t
        key = int64(-1)
        if chosen >= 0:
            key = key_of(best, chosen)
        key = block_max_key(key, scratch)
        if tid == 0:
            tops[b * blocks + s] = key
        if arrive_last(counters, b, blocks, last_s):
            key = int64(-1)
            for i in range(tid, blocks, THREADS):
                key = max(key, tops[b * blocks + i])
            key = block_max_key(key, scratch)
            if tid == 0:
                top_B[b] = key

    return top_key_kernel
