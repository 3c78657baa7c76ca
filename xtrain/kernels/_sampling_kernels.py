"""The kernels of sampling.py: two rounds of top-k, then the draw; and what happens when the list of the largest is too short.

    place    of a token in the order: one whole number, its logit in the upper bits (as a number that grows with it), what is
             missing from its id to the largest possible one below. Places are all different, and larger is earlier, so "lower id
             first" needs no further care. -1 is nobody. A NaN comes before everybody.
    first    a block per segment of the vocabulary sorts the places of its segment (bitonic sort, Batcher 1968) and leaves
             the first K of them. Greedy rows need one, and sort nothing.
    second   a block per row merges those lists: of two lists in falling order, the larger of list i and of the other's K - 1 - i
             are the K largest of both, and half a bitonic sort puts them in order. Then weights, their running sum, the draw.

Without top-k the list holds only the first of all tokens. The draw and the end of top-p fall into it nearly always; where
not, `pick` looks for the place in the whole vocabulary: by distance from the largest logit, then 8 bits of the place at a time.
"""

import functools
import math

from numba import cuda, float32, int32, int64
from numba.cuda.libdevice import float_as_int, int_as_float

from ._ptx import device, kernel, let_next_start, load1, wait_for_previous
from ._reduce import FULL

ONE = 1 << 40  # the weight of the first token
FRACTION = 31  # bits of p and of a random number
ID = 31  # bits of a place that tell the id
LAST_ID = (1 << ID) - 1
NAN_ORDER = (1 << 31) - 1  # beyond infinity
PHILOX_M = (0xD2511F53, 0xCD9E8D57)  # multipliers and Weyl constants of the paper's philox4x32
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
BINS = 256
INFINITY = float32(math.inf)
STEEP = float32(8.0)  # bins per factor e


# ----------------------------------------------------------------------------- numbers
@device
def place_of(logit, token):
    """0 <= place < 2^63"""
    bits = int64(float_as_int(logit + float32(0.0)))  # -0 becomes 0: they are equal
    order = bits if bits >= 0 else bits ^ int64(0x7FFFFFFF)
    if logit != logit:
        order = int64(NAN_ORDER)
    return (order + int64(1 << 31)) << ID | (LAST_ID - token)


@device
def logit_of(place):
    order = (place >> ID) - int64(1 << 31)
    return int_as_float(int32(order if order >= 0 else order ^ int64(0x7FFFFFFF)))


@device
def token_of(place):
    return int32(LAST_ID - (place & LAST_ID))


@device
def weight_of(logit, top, inverse):
    return int64(math.exp((logit - top) * inverse) * float32(ONE))


@device
def scaled(total, fraction):
    """floor(total fraction / 2^31), total < 2^62, fraction < 2^31"""
    low = total & LAST_ID
    return (total >> FRACTION) * fraction + (low * fraction >> FRACTION)


@device
def random_fraction(seed, sequence, step):
    """31 random bits: Philox 4x32-10 of the counter (step, 0, sequence), key seed. int64 throughout; products wrap."""
    c0, c1 = int64(step) & WORD, int64(0)
    c2, c3 = sequence & WORD, sequence >> 32 & WORD
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(ROUNDS):
        a, b = c0 * PHILOX_M[0], c2 * PHILOX_M[1]
        c0, c1 = (b >> 32 & WORD) ^ c1 ^ k0, b & WORD
        c2, c3 = (a >> 32 & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + PHILOX_W[0]) & WORD, (k1 + PHILOX_W[1]) & WORD
    return c0 >> 1


@device
def wanted(temperature, top_k, K):
    """How many of the first tokens a row needs, and the power of two that holds them"""
    need = int64(top_k) if top_k > 0 and top_k < K else int64(K)
    if temperature <= float32(0.0):
        need = int64(1)
    width = int64(1)
    while width < need:
        width *= 2
    return need, width


# ----------------------------------------------------------------------------- of a block
@device
def exchange(x_s, i, other, falling):
    """Puts x_s[i] and x_s[other], i < other, in order."""
    a, b = x_s[i], x_s[other]
    if (a < b) == falling:
        x_s[i], x_s[other] = b, a


@device
def block_max_place(v, scratch):
    """The largest v >= -1, in thread 0"""
    tid = cuda.threadIdx.x
    for step in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(FULL, v, step)
        v = v if v > other else other
    if tid & 31 == 0:
        scratch[tid >> 5] = v
    cuda.syncthreads()
    if tid < 32:
        v = scratch[tid] if tid < cuda.blockDim.x >> 5 else int64(-1)
        for step in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(FULL, v, step)
            v = v if v > other else other
    return v


@device
def running_sum(v, scratch):
    """-> the sum of v over the threads up to and with this one, and over all. scratch: 32 int64."""
    tid, lane = cuda.threadIdx.x, cuda.threadIdx.x & 31
    for i in range(5):
        before = cuda.shfl_up_sync(FULL, v, 1 << i)
        if lane >= 1 << i:
            v += before
    cuda.syncthreads()  # scratch is free
    if lane == 31:
        scratch[tid >> 5] = v
    cuda.syncthreads()
    total = int64(0)
    for warp in range(cuda.blockDim.x >> 5):
        if warp == tid >> 5:
            v += total
        total += scratch[warp]
    return v, total


# ----------------------------------------------------------------------------- first round
@functools.cache
def make_segment_kernel(SEGMENT, K, overlap, ready):
    """K: the longest list, at most SEGMENT; both powers of two. ready: the rows' parameters may be read before the wait."""
    THREADS = min(max(SEGMENT // 2, 32), 512)

    @kernel(THREADS)
    def sample_segment_kernel(lists, logits, temperature_B, top_k_B, V, columns):
        """Grid (segments, B), block THREADS. lists: flat (B segments K) int64; logits: flat (B columns), V of them tokens."""
        places, scratch = cuda.shared.array(SEGMENT, int64), cuda.shared.array(32, int64)
        tid, b = cuda.threadIdx.x, int64(cuda.blockIdx.y)
        first = int64(cuda.blockIdx.x) * SEGMENT
        out = (b * cuda.gridDim.x + cuda.blockIdx.x) * K
        if overlap and not ready:
            wait_for_previous()
        _, width = wanted(temperature_B[b], top_k_B[b], K)
        if overlap:
            if ready:
                wait_for_previous()
            let_next_start()
        best = int64(-1)
        for i in range(tid, SEGMENT, THREADS):
            token, place = first + i, int64(-1)
            if token < V:
                place = place_of(load1(logits, b * columns + token), token)
            best = best if best > place else place
            places[i] = place
        if width == 1:
            best = block_max_place(best, scratch)
            if tid == 0:
                lists[out] = best
            return
        cuda.syncthreads()
        size = 2
        while size <= SEGMENT:
            step = size >> 1
            while step > 0:
                for i in range(tid, SEGMENT // 2, THREADS):
                    at = 2 * i - (i & (step - 1))
                    exchange(places, at, at + step, at & size == 0)
                cuda.syncthreads()
                step >>= 1
            size <<= 1
        for i in range(tid, width, THREADS):
            lists[out + i] = places[i]

    return sample_segment_kernel, THREADS


# ----------------------------------------------------------------------------- second round
@functools.cache
def make_merge_lists(K):
    """-> merge_lists(best, scratch, lists, first, segments, width): best[0:width] = the largest of all, in falling order"""

    @device
    def merge_lists(best, scratch, lists, first, segments, width):
        tid = cuda.threadIdx.x
        coming = int64(-1)
        if width == 1:
            for s in range(tid, segments, K):
                place = lists[first + s * K]
                coming = coming if coming > place else place
            coming = block_max_place(coming, scratch)
            segments = int64(1)
        if tid < width:
            best[tid] = lists[first + tid] if width > 1 else coming
            if segments > 1:
                coming = lists[first + K + width - 1 - tid]
        for s in range(1, segments):
            now = coming
            if tid < width and s + 1 < segments:  # under way while this one is merged
                coming = lists[first + (s + 1) * K + width - 1 - tid]
            if tid < width and now > best[tid]:
                best[tid] = now
            cuda.syncthreads()
            step = width >> 1
            while step > 0:
                if tid < width >> 1:
                    at = 2 * tid - (tid & (step - 1))
                    exchange(best, at, at + step, True)
                cuda.syncthreads()
                step >>= 1
        cuda.syncthreads()

    return merge_lists


@device
def find_bin(bins, goal, found):
    """The first bin at which the running sum exceeds goal: found[0] = it, found[1] = the sum before. Warp 0 looks."""
    lane = cuda.threadIdx.x & 31
    cuda.syncthreads()  # the bins are full
    if cuda.threadIdx.x < 32:
        mine = int64(0)
        for i in range(BINS // 32):
            mine += bins[lane * (BINS // 32) + i]
        end = mine
        for i in range(5):
            before = cuda.shfl_up_sync(FULL, end, 1 << i)
            if lane >= 1 << i:
                end += before
        start = end - mine
        if start <= goal and goal < end:
            i = int64(lane) * (BINS // 32)
            while start + bins[i] <= goal:
                start += bins[i]
                i += 1
            found[0], found[1] = i, start
    cuda.syncthreads()


@device
def bin_of(logit, top, inverse):
    """Falls with the logit, and never rises: rounding keeps the order."""
    distance = (top - logit) * inverse * STEEP
    return int64(distance) if distance < float32(BINS - 1) else int64(BINS - 1)


@device
def pick(logits, first, V, top, inverse, goal, bins, found):
    """-> the place at which the running sum over the whole vocabulary exceeds goal, and the sum before it"""
    tid, threads = cuda.threadIdx.x, cuda.blockDim.x
    before, chosen, prefix = int64(0), int64(0), int64(0)
    for digit in range(-1, 8):
        shift = 56 - 8 * digit
        for i in range(tid, BINS, threads):
            bins[i] = 0
        cuda.syncthreads()
        for token in range(tid, V, threads):
            logit = load1(logits, first + token)
            there = bin_of(logit, top, inverse)
            if digit < 0:
                cuda.atomic.add(bins, there, weight_of(logit, top, inverse))
            elif there == chosen:
                place = place_of(logit, token)
                if digit == 0 or place >> (shift + 8) == prefix:
                    there = BINS - 1 - (place >> shift & (BINS - 1))
                    cuda.atomic.add(bins, there, weight_of(logit, top, inverse))
        find_bin(bins, goal - before, found)
        before += found[1]
        if digit < 0:
            chosen = found[0]
        else:
            prefix = prefix << 8 | (BINS - 1 - found[0])
    return prefix, before


@functools.cache
def make_draw_kernel(K, overlap, ready):
    """K: the longest list, a power of two from 32 to 1024, and the threads of a block. ready: as in the first round"""
    merge_lists = make_merge_lists(K)

    @kernel(K)
    def sample_draw_kernel(
        ids_B, lists, logits, temperature_B, top_k_B, top_p_B, seed_B, sequence_B, step_B, segments, V, columns
    ):  # fmt: skip
        """Grid B, block K."""
        best, scratch = cuda.shared.array(K, int64), cuda.shared.array(32, int64)
        bins, found = cuda.shared.array(BINS, int64), cuda.shared.array(2, int64)
        tid, b = cuda.threadIdx.x, int64(cuda.blockIdx.x)
        if overlap and not ready:
            wait_for_previous()
        need, width = wanted(temperature_B[b], top_k_B[b], K)
        if overlap:
            if ready:
                wait_for_previous()
            let_next_start()
        merge_lists(best, scratch, lists, b * segments * K, segments, width)
        top = logit_of(best[0])
        if top != top:
            if tid == 0:
                ids_B[b] = -1
            return
        if (
            need == 1 or top == INFINITY or top == -INFINITY
        ):  # of infinite logits the first is as good as any
            if tid == 0:
                ids_B[b] = token_of(best[0])
            return
        inverse, mine = float32(1.0) / temperature_B[b], int64(0)
        if tid < need and best[tid] >= 0:
            mine = weight_of(logit_of(best[tid]), top, inverse)
        end, listed = running_sum(mine, scratch)
        total = listed
        if top_k_B[b] <= 0:
            mass = int64(0)
            for token in range(tid, V, K):
                mass += weight_of(load1(logits, b * columns + token), top, inverse)
            _, total = running_sum(mass, scratch)
        kept = total
        if top_p_B[b] < float32(1.0):
            limit = scaled(total, int64(top_p_B[b] * float32(1 << FRACTION)))
            limit = limit if limit > 1 else int64(1)
            if limit <= listed:
                if end - mine < limit and limit <= end:
                    found[0] = end  # of the last token that stays
                cuda.syncthreads()
                kept = found[0]
                cuda.syncthreads()
            else:
                place, before = pick(logits, b * columns, V, top, inverse, limit - 1, bins, found)
                kept = before + weight_of(logit_of(place), top, inverse)
        goal = scaled(kept, random_fraction(seed_B[b], sequence_B[b], step_B[b]))
        if goal < listed:
            if end - mine <= goal and goal < end:
                ids_B[b] = token_of(best[tid])
        else:
            place, _ = pick(logits, b * columns, V, top, inverse, goal, bins, found)
            if tid == 0:
                ids_B[b] = token_of(place)

    return sample_draw_kernel


# ----------------------------------------------------------------------------- the end of a step
@functools.cache
def make_advance_kernel(overlap, post):
    """post: also write the ids where the host can read them."""

    @kernel(32)
    def advance_kernel(lengths_B, step_B, rows_B, ids_B, mail_2L):
        """Grid ceil(B / 32), block 32."""
        b = int64(cuda.blockIdx.x) * 32 + cuda.threadIdx.x
        if overlap:
            wait_for_previous()
            let_next_start()
        if b < rows_B.size and rows_B[b] >= 0:
            if post:
                mail_2L[step_B[b] & 1, b] = ids_B[b]
            lengths_B[b] += 1
            step_B[b] += 1

    return advance_kernel
