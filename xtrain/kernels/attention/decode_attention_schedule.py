"""The items of decode_attention.py: which splits of which rows exist, and where their keys are."""

import functools
from typing import NamedTuple

from ...device import Array
from ..decoding.kv_cache import make_block_table
from ..primitives.ptx import device, prefetch
from ..primitives.reduce import FULL
from ..runtime.compiler import cuda, int32, int64, uint32
from .decode_attention_parts import make_split_keys, quotient


class Batch(NamedTuple):
    """The rows of a launch and the blocks of their tokens."""

    tables: Array  # (B, M), flat
    previous: Array  # row of the token before that of each row, if it is in the launch
    B: int
    G: int
    M: int
    R: int  # blocks of the cache


class Schedule(NamedTuple):
    """Which splits there are: tables of all rows in shared memory."""

    first: Array  # (B + 1,): the splits of all rows before b, at last of all
    t: Array  # (B,): the position of row b's token, -1 if it has none


class Item(NamedTuple):
    """What a block computes at a time: one split of the keys of one key head."""

    b: int
    g: int
    t: int  # position of the row's token
    split: int
    lo: int  # the keys lo .. hi - 1
    hi: int
    splits: int  # of the row that have keys
    first: int  # of Pages (kv_cache.py)
    stride: int
    head: int


@functools.cache
def make_schedule(config, WINDOW):
    """Return key_range, count_items, row_of: which splits there are.

    key_range(split, t) -> (lo, hi, used)
        a split has keys lo .. hi - 1 of 0 .. t; `used` splits have keys
        With a window, they begin at the multiple of 16 before its first key.
    count_items(schedule, sums_s, lengths_B, B, limit)
        fill the schedule; a row's token is at 0 .. limit - 1, a row without one has no splits
        sums_s: an int32 for each warp. Ends with a barrier.
    row_of(first_s, B, i)
        the row of split i
    """
    WARPS = config.warps
    THREADS = 32 * config.warps
    split_keys = make_split_keys(config.keys, config.splits)

    @device
    def base_of(t):
        if WINDOW and t + 1 > WINDOW:
            return int64(t + 1 - WINDOW) // 16 * 16
        return int64(0)

    @device
    def key_range(split, t):
        base = base_of(t)
        keys, used = split_keys(t + 1 - base)
        lo = base + split * keys
        return lo, lo + keys if split + 1 < used else t + 1, used

    @device
    def used_by(t):
        if t < 0:
            return int32(0)
        return int32(split_keys(int64(t + 1) - base_of(t))[1])

    @device
    def count_items(schedule, sums_s, lengths_B, B, limit):
        first_s = schedule.first
        t_s = schedule.t
        tid = cuda.threadIdx.x
        lane = tid & 31
        warp = tid >> 5
        each = quotient(int64(B + THREADS - 1), int64(THREADS))
        low = min(tid * each, int64(B))
        high = min(low + each, int64(B))
        mine = int32(0)
        for b in range(low, high):
            t = int32(lengths_B[b])
            t_s[b] = t if t >= 0 and t < limit else int32(-1)
            mine += used_by(t_s[b])
        before = mine  # of this lane and the lower ones
        for i in range(5):
            other = cuda.shfl_up_sync(FULL, before, 1 << i)
            before += other if lane >= 1 << i else int32(0)
        if lane == 31:
            sums_s[warp] = before
        cuda.syncthreads()  # the sums of all warps
        before -= mine
        for w in range(WARPS):
            before += sums_s[w] if w < warp else int32(0)
        for b in range(low, high):
            first_s[b] = before
            before += used_by(t_s[b])
        if tid == THREADS - 1:
            first_s[B] = before
        cuda.syncthreads()  # the table of all rows

    @device
    def row_of(first_s, B, i):
        low = int32(0)
        high = int32(B)
        while high - low > 1:
            middle = int32((low + high) >> 1)
            if first_s[middle] <= i:
                low = middle
            else:
                high = middle
        return low

    return key_range, count_items, row_of


def make_items(D, S, half, config, WINDOW, CODES=False):
    """Return count_items, place_of, prefetch_tables, prefetch_keys.

    place_of(number, schedule, batch)              the Item of this number
    prefetch_tables(tables, count)                 the blocks share the work
    prefetch_keys(cache, pages, lo, hi)            the first keys lo, lo + 1, ...
    """
    key_range, count_items, row_of = make_schedule(config, WINDOW)
    entry_of, start_of = make_block_table(S, D)
    THREADS = 32 * config.warps
    MOST = config.prefetched
    LINE = 64 if half else 32  # numbers in 128 bytes
    if CODES:
        LINE = 128
    ENTRIES = 32

    @device
    def place_of(number, schedule, batch):
        G = batch.G
        row_split = quotient(number, int64(G))
        g = number - row_split * G
        b = row_of(schedule.first, batch.B, row_split)
        split = row_split - schedule.first[b]
        t = int64(schedule.t[b])
        lo, hi, splits = key_range(split, t)
        first = uint32(uint32(b) * uint32(batch.M))
        stride = uint32(uint32(G) * uint32(S * D))
        head = uint32(uint32(g) * uint32(S * D))
        return Item(int64(b), g, t, split, lo, hi, splits, first, stride, head)

    @device
    def prefetch_tables(tables, count):
        i = (int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x) * ENTRIES
        while i < count:
            prefetch(tables, i)
            i += int64(cuda.gridDim.x) * (THREADS * ENTRIES)

    @device
    def prefetch_keys(cache, pages, lo, hi):
        count = min(hi - lo, int64(MOST)) * D
        for i in range(cuda.threadIdx.x * LINE, count, THREADS * LINE):
            n = lo + i // D
            at = start_of(entry_of(pages, n), n, pages) + i % D
            prefetch(cache.k, at)
            prefetch(cache.v, at)
            if CODES and n % 16 == 0:  # the scales of 16 keys are 128 bytes
                prefetch(cache.scales, 2 * (at // D))

    return count_items, place_of, prefetch_tables, prefetch_keys
