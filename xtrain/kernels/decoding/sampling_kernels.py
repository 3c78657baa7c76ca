"""The kernels of sampling.py: sampling_search.py's top, then weigh, gather and draw; the end of a
decoding step.

What ends a row's work early: with temperature 0, k = 1, a NaN, or an infinite largest logit, the
largest key is the answer. With top-k, the histogram counts tokens, and the list has all of the
first k, of which `draw` sums the weights. Without, the histogram sums weights. Its bins show where
top-p ends (bin `cut`), so the total that top-p keeps is known up to that bin's weight, and the
drawn token is in one of very few bins, lo to hi. One list has the keys of all of these.
"""

import functools
import math

from ..primitives.last_block import arrive_last
from ..primitives.ptx import device, kernel, let_next_start, wait_for_previous
from ..runtime.compiler import cuda, float32, int32, int64, uint32
from .sampling_search import (
    KEY,
    LAST_KEY,
    WORD,
    Candidates,
    GatherShared,
    Row,
    Shared,
    Sizes,
    add_weight,
    is_finite,
    logit_of,
    make_search,
    sort_keys,
    token_of,
)

ONE = 1 << 40  # the weight of the first token
DISTANCE = 28  # ONE times e^-28 is less than one
FRACTION = 31  # bits of p and of a random number
PHILOX_M = (0xD2511F53, 0xCD9E8D57)  # multipliers and Weyl constants of the paper's philox4x32
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# What `weigh` tells `draw` of a row: bins, the running sums before two of them, and the sum of all
# weights.
LO = 0
HI = 1
CUT = 2
BEFORE_LO = 3
BEFORE_CUT = 4
TOTAL = 5
FIELDS = 6


# ----------------------------------------------------------------------------- numbers
@device
def weight_of(logit, top, inverse, least):
    """Return floor(2^40 exp((logit - top) / temperature)), 0 if that is less than `least`; inverse:
    1 / temperature"""
    w = int64(math.exp((logit - top) * inverse) * float32(ONE))
    return w if w >= least else int64(0)


@device
def scaled(total, fraction):
    """Return floor(total fraction / 2^31), for total < 2^62, fraction < 2^31"""
    low = total & ((1 << FRACTION) - 1)
    return (total >> FRACTION) * fraction + (low * fraction >> FRACTION)


@device
def end_of_top_p(total, p):
    """Return the goal of the last token that top-p keeps: the running sum exceeds it there first"""
    return max(scaled(total, int64(p * float32(1 << FRACTION))), int64(1)) - 1


@device
def random_fraction(seed, sequence, step):
    """Return 31 random bits: Philox 4x32-10 of the counter (step, 0, sequence), key seed. All in
    int64; products wrap around."""
    c0 = int64(step) & WORD
    c1 = int64(0)
    c2 = sequence & WORD
    c3 = sequence >> 32 & WORD
    k0 = seed & WORD
    k1 = seed >> 32 & WORD
    for _ in range(ROUNDS):
        a, b = c0 * PHILOX_M[0], c2 * PHILOX_M[1]
        c0 = (b >> 32 & WORD) ^ c1 ^ k0
        c1 = b & WORD
        c2 = (a >> 32 & WORD) ^ c3 ^ k1
        c3 = a & WORD
        k0, k1 = (k0 + PHILOX_W[0]) & WORD, (k1 + PHILOX_W[1]) & WORD
    return c0 >> 1


@device
def tokens_needed(temperature, top_k, K):
    """Return how many of the first tokens a row needs; 0: all"""
    need = max(min(int64(top_k), int64(K)), int64(0))
    return need if temperature > float32(0.0) else int64(1)


# ----------------------------------------------------------------------------- the kernels
@functools.cache
def make_weigh_kernel(sizes: Sizes, filtered: bool, overlap: bool, last: bool = False):
    """Return the kernel of the second launch. filtered: there is a min_p. overlap: it may start
    before the previous one has ended. last: search the last token that is kept, draw none."""
    THREADS = sizes.threads
    BATCH = sizes.batch
    K = sizes.keys
    ops = make_search(sizes, DISTANCE, weight_of)
    EACH = ops.EACH
    load_batch = ops.load_batch
    bin_of = ops.bin_of
    clear_bins = ops.clear_bins
    add_bins = ops.add_bins
    load_bins = ops.load_bins
    total_of = ops.total_of
    find = ops.find

    @device
    def choose_bins(state, values, scratch, place_s, need, fraction, p):
        """state = the fields of this file's list, from the histogram of a row"""
        total = total_of(values, scratch)
        lo = before_lo = before_cut = int64(0)
        if need > 0:
            hi = int64(K - 2)  # fewer tokens than top-k have a weight: all of them
            if need <= total:
                hi, _, _ = find(values, need - 1, scratch, place_s)
            cut = hi
        else:
            # what the kept tokens weigh: from, to
            cut = int64(-1)
            least = total
            greatest = total
            if last or p < float32(1.0):
                goal = end_of_top_p(total, p)
                cut, before_cut, weight = find(values, goal, scratch, place_s)
                least = goal + 1
                greatest = before_cut + weight
            lo, before_lo, _ = find(values, scaled(least, fraction), scratch, place_s)
            hi, _, _ = find(values, scaled(greatest, fraction), scratch, place_s)
        if cuda.threadIdx.x == 0:
            state[LO] = lo
            state[HI] = hi
            state[CUT] = cut
            state[BEFORE_LO] = before_lo
            state[BEFORE_CUT] = before_cut
            state[TOTAL] = total

    @kernel(THREADS, sizes.blocks)
    def sample_weigh_kernel(
        ids_B,
        state_BF,
        bins,
        counters,
        logits,
        top_B,
        temperature_B,
        top_k_B,
        top_p_B,
        min_p_B,
        seed_B,
        sequence_B,
        step_B,
        length,
        V,
        columns,
    ):
        """Grid (blocks per row, B), block THREADS. bins: flat (B K) int64, zeros before. Others as
        in top_key_kernel."""
        bins_s = cuda.shared.array((2, K), uint32)
        x = cuda.local.array(BATCH, float32)
        scratch = cuda.shared.array(32, int64)
        place_s = cuda.shared.array(3, int64)
        last_s = cuda.shared.array(1, int32)
        tid = cuda.threadIdx.x
        b = int64(cuda.blockIdx.y)
        start = int64(cuda.blockIdx.x) * length
        clear_bins(bins_s)
        if overlap:
            wait_for_previous()
            let_next_start()
        top = logit_of(top_B[b])
        need = tokens_needed(temperature_B[b], top_k_B[b], K)
        if need == 1 or not is_finite(top):
            if start == 0 and tid == 0:  # of infinite logits, the first one is taken
                ids_B[b] = token_of(top_B[b]) if top == top else int32(-1)
            return
        inverse = float32(1.0) / temperature_B[b]
        least = int64(0)
        if filtered:
            least = int64(min_p_B[b] * float32(ONE))
        cuda.syncthreads()
        end = min(start + length, V)
        for token in range(start + tid, end, BATCH * THREADS):
            load_batch(x, logits, b * columns, token, end)
            for j in range(BATCH):
                bin = bin_of(x[j], top, inverse)
                w = int64(bin < K - 1)
                if need == 0:
                    w = weight_of(x[j], top, inverse, least)
                if w > 0:
                    add_weight(bins_s, bin, w)
        cuda.syncthreads()
        add_bins(bins, b * K, bins_s)
        if arrive_last(counters, b, cuda.gridDim.x, last_s):
            values = cuda.local.array(EACH, int64)
            load_bins(values, bins, b * K)
            fraction = int64(0)
            if not last:
                fraction = random_fraction(seed_B[b], sequence_B[b], step_B[b])
            choose_bins(state_BF[b], values, scratch, place_s, need, fraction, top_p_B[b])

    return sample_weigh_kernel


@functools.cache
def make_gather_kernel(sizes: Sizes, overlap: bool):
    """Return the kernel of the third launch. overlap: see make_weigh_kernel"""
    THREADS = sizes.threads
    K = sizes.keys
    gather = make_search(sizes, DISTANCE, weight_of).gather

    @kernel(THREADS, sizes.blocks)
    def sample_gather_kernel(
        candidates, counts_B, logits, state_BF, top_B, temperature_B, top_k_B, length, V, columns
    ):
        """Grid (blocks per row, B), block THREADS. candidates: flat (B ROOM) int64; counts_B: zeros
        before."""
        keys_s = cuda.shared.array(K, int64)
        count_s = cuda.shared.array(1, int32)
        base_s = cuda.shared.array(1, int32)
        b = int64(cuda.blockIdx.y)
        start = int64(cuda.blockIdx.x) * length
        if overlap:
            wait_for_previous()
            let_next_start()
        top = logit_of(top_B[b])
        if tokens_needed(temperature_B[b], top_k_B[b], K) == 1 or not is_finite(top):
            return
        row = Row(logits, b * columns, V, top, float32(1.0) / temperature_B[b], int64(0))
        shared = GatherShared(keys_s, count_s, base_s)
        end = min(start + length, V)
        lo = state_BF[b, LO]
        hi = state_BF[b, HI]
        gather(shared, candidates, counts_B, b, row, start, end, lo, hi, state_BF[b, CUT])

    return sample_gather_kernel


@functools.cache
def make_draw_kernel(sizes: Sizes, filtered: bool, overlap: bool, last: bool = False):
    """Return the kernel of the fourth launch, of sizes.sorters threads. filtered, overlap, last:
    see make_weigh_kernel"""
    K = sizes.keys
    ops = make_search(sizes.for_sorting(), DISTANCE, weight_of)
    EACH = ops.EACH
    collect = ops.collect
    narrow = ops.narrow
    weigh_list = ops.weigh_list
    total_of = ops.total_of
    find = ops.find

    @kernel(sizes.sorters)
    def sample_draw_kernel(
        ids_B,
        candidates,
        counts_B,
        logits,
        state_BF,
        top_B,
        temperature_B,
        top_k_B,
        top_p_B,
        min_p_B,
        seed_B,
        sequence_B,
        step_B,
        V,
        columns,
    ):
        """Grid B. candidates, counts_B: the row's list."""
        keys_s = cuda.shared.array(K, int64)
        bins_s = cuda.shared.array((2, K), uint32)
        scratch = cuda.shared.array(32, int64)
        place_s = cuda.shared.array(3, int64)
        count_s = cuda.shared.array(1, int32)
        values = cuda.local.array(EACH, int64)
        b = int64(cuda.blockIdx.x)
        if overlap:
            wait_for_previous()
            let_next_start()
        top = logit_of(top_B[b])
        need = tokens_needed(temperature_B[b], top_k_B[b], K)
        if need == 1 or not is_finite(top):
            return
        inverse = float32(1.0) / temperature_B[b]
        least = int64(0)
        if filtered:
            least = int64(min_p_B[b] * float32(ONE))
        row = Row(logits, b * columns, V, top, inverse, least)
        shared = Shared(keys_s, bins_s, count_s, scratch, place_s)
        lo = state_BF[b, LO]
        hi = state_BF[b, HI]
        cut = state_BF[b, CUT]
        kept = state_BF[b, TOTAL]
        listed = Candidates(candidates, b, int64(counts_B[b]))
        low = int64(0)
        sortable = listed.n <= K
        limit = int64(K)
        if need > 0:
            limit = need
            if not sortable:  # the first `need` keys are: find the last of them
                before = narrow(shared, listed, row, lo, hi, need - 1, True)
                low = keys_s[need - 1 - before]
                sortable = True
                cuda.syncthreads()  # the list is read before it is overwritten
        if sortable:
            high = int64(LAST_KEY)
            size = collect(shared, listed, row, int64(0), int64(K), low, high, int64(KEY), True)
            sort_keys(keys_s, size)
        if need > 0:
            weigh_list(values, keys_s, limit, row, lo, hi)
            kept = total_of(values, scratch)
        p = top_p_B[b]
        fraction = int64(0)
        draws = False  # the last token that top-p keeps is searched first, if one is cut off
        if not last:
            fraction = random_fraction(seed_B[b], sequence_B[b], step_B[b])
            draws = p >= float32(1.0)
        goal = end_of_top_p(kept, p)
        before = state_BF[b, BEFORE_CUT]
        begin = cut
        end = cut
        while True:
            if draws:
                goal = scaled(kept, fraction)
                before = state_BF[b, BEFORE_LO]
            if draws or need > 0:
                begin, end = lo, hi
            if not sortable:
                before += narrow(shared, listed, row, begin, end, goal - before, False)
            weigh_list(values, keys_s, limit, row, begin, end)
            i, skipped, weight = find(values, goal - before, scratch, place_s)
            if last or draws:
                break
            kept = before + skipped + weight
            draws = True
        if cuda.threadIdx.x == 0:
            ids_B[b] = token_of(keys_s[i])

    return sample_draw_kernel


# ----------------------------------------------------------------------------- the end of a step
@functools.cache
def make_advance_kernel(overlap, copies):
    """Return the kernel of sampling.advance. copies: also copy the ids to host_ids"""

    @kernel(32)
    def advance_kernel(lengths_B, step_B, rows_B, ids_B, host_ids_2L):
        """Grid ceil(B / 32), block 32."""
        b = int64(cuda.blockIdx.x) * 32 + cuda.threadIdx.x
        if overlap:
            wait_for_previous()
            let_next_start()
        if b < rows_B.size and rows_B[b] >= 0:
            if copies:
                host_ids_2L[step_B[b] & 1, b] = ids_B[b]
            lengths_B[b] += 1
            step_B[b] += 1

    return advance_kernel
