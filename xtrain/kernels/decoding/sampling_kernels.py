"""The kernels of sampling.py: two rounds of top-k, then the draw; without top-k, a search in the whole vocabulary.

place    of a token in the order: one whole number, its logit in the upper bits (as a number that grows with it), what is
         missing from its id to the largest possible one below. Places are all different, and larger is earlier, so "lower id
         first" needs no further care. -1 is nobody. A NaN comes before everybody.
first    a block per segment of the vocabulary sorts lists of k places (bitonic sort, Batcher 1968), k a power of two, and
         merges them until one is left. Of two lists in falling order, the larger of place i and of the other's place
         k - 1 - i are the k largest of both, and half a bitonic sort puts them in order. Rows without top-k need only
         the first of all, and sort nothing.
second   a block per row merges those lists in the same way, as many at a time as shared memory holds.
draw     with top-k, the running sum over the list. Without, tokens fall into bins by their distance from the largest
         logit. The bin in which the end of top-p, or the draw, falls is gathered and sorted like a list; should it hold
         more tokens than a list, the next bits of the place are bins in turn.
"""

import functools
import math

from numba import cuda, float32, int32, int64, uint32
from numba.cuda.libdevice import float_as_int, int_as_float

from ..primitives.ptx import device, kernel, let_next_start, load1, wait_for_previous
from ..primitives.reduce import FULL

ONE = 1 << 40  # the weight of the first token
FRACTION = 31  # bits of p and of a random number
ID = 31  # bits of a place that tell the id
LAST_ID = (1 << ID) - 1
NAN_ORDER = (1 << 31) - 1  # beyond infinity
PHILOX_M = (0xD2511F53, 0xCD9E8D57)  # multipliers and Weyl constants of the paper's philox4x32
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
INFINITY = float32(math.inf)
DISTANCE = 32  # factors of e that the bins span; ONE times e^-28 is less than one
BATCH = 6  # logits that a thread asks for before it looks at the first
PLACE = 63  # bits of a place
FAR = 1 << 62


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
    """How many of the first tokens a row needs, 0: all; and the bits of the power of two that holds so many"""
    need, bits = max(min(int64(top_k), int64(K)), int64(0)), int64(0)
    if temperature <= float32(0.0):
        need = int64(1)
    while int64(1) << bits < need:
        bits += 1
    return need, bits


# ----------------------------------------------------------------------------- of a block
@device
def put_in_order(x_s, pairs, step, size, then):
    """A bitonic merge: of x_s[0 : 2 pairs] those `step` apart are put in order, then those half as far, ... down to 1.

    Runs of `size` fall and rise in turn. then: how far from its pair a thread will look afterwards. A warp's 32 pairs
    lie in 64 neighbours while step <= 32, always the same ones, so only longer ways need the whole block to wait.
    """
    while step > 0:
        i = int64(cuda.threadIdx.x)
        while i < pairs:
            # unsigned: no code for indices that count from the end
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
def sort_lists(x_s, length, bits):
    """x_s[0:length], a power of two, becomes lists of 2^bits, each in falling order."""
    size = int64(2)
    while size < int64(1) << bits:
        put_in_order(x_s, length >> 1, size >> 1, size, size)
        size <<= 1
    put_in_order(x_s, length >> 1, (int64(1) << bits) >> 1, FAR, FAR)


@device
def merge_halves(x_s, lists, bits):
    """Of `lists` lists in falling order, a power of two, the 2^bits largest come first."""
    last = (int64(1) << bits) - 1
    while lists > 1:
        lists >>= 1
        half, i = lists << bits, int64(cuda.threadIdx.x)
        while i < half:
            other = x_s[uint32(half + (i ^ last))]  # list by list, from its end
            if other > x_s[uint32(i)]:
                x_s[uint32(i)] = other
            i += cuda.blockDim.x
        cuda.syncthreads()
        put_in_order(x_s, half >> 1, (last + 1) >> 1, FAR, FAR)


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
    """-> the sum of v over the threads up to and with this one, and over all. scratch: 32 int64 that nobody uses."""
    tid, lane = cuda.threadIdx.x, cuda.threadIdx.x & 31
    for i in range(5):
        before = cuda.shfl_up_sync(FULL, v, 1 << i)
        if lane >= 1 << i:
            v += before
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
    EACH = SEGMENT // THREADS

    @kernel(THREADS)
    def sample_segment_kernel(lists, logits, temperature_B, top_k_B, V, columns):
        """Grid (segments, B), block THREADS. lists: flat (B segments K) int64; logits: flat (B columns), V of them tokens."""
        places, scratch = cuda.shared.array(SEGMENT, int64), cuda.shared.array(32, int64)
        tid, b = cuda.threadIdx.x, int64(cuda.blockIdx.y)
        first = int64(cuda.blockIdx.x) * SEGMENT
        out = (b * cuda.gridDim.x + cuda.blockIdx.x) * K
        if overlap and not ready:
            wait_for_previous()
        _, bits = wanted(temperature_B[b], top_k_B[b], K)
        if overlap:
            if ready:
                wait_for_previous()
            let_next_start()
        x, best = cuda.local.array(EACH, float32), int64(-1)
        for j in range(EACH):  # all under way before one is used
            token = first + j * THREADS + tid
            x[j] = load1(logits, b * columns + token) if token < V else float32(0.0)
        for j in range(EACH):
            token, place = first + j * THREADS + tid, int64(-1)
            if token < V:
                place = place_of(x[j], token)
            best = best if best > place else place
            places[j * THREADS + tid] = place
        if bits == 0:
            best = block_max_place(best, scratch)
            if tid == 0:
                lists[out] = best
            return
        cuda.syncthreads()
        sort_lists(places, int64(SEGMENT), bits)
        merge_halves(places, int64(SEGMENT) >> bits, bits)
        for i in range(tid, int64(1) << bits, THREADS):
            lists[out + i] = places[i]

    return sample_segment_kernel, THREADS


# ----------------------------------------------------------------------------- second round
@functools.cache
def make_merge_lists(K):
    """-> merge_lists(held, scratch, lists, first, segments, bits): held[0 : 2^bits] = the largest of all, in falling order

    held has room for 2 K places; beyond those 2^bits it is left as it happens to be.
    """

    @device
    def merge_lists(held, scratch, lists, first, segments, bits):
        tid, last = cuda.threadIdx.x, (int64(1) << bits) - 1
        if bits == 0:
            best = int64(-1)
            s = int64(tid)
            while s < segments:
                place = lists[first + s * K]
                best = best if best > place else place
                s += K
            best = block_max_place(best, scratch)
            if tid == 0:
                held[0] = best
            cuda.syncthreads()
            return
        side_by_side = int64(2 * K) >> bits
        for s in range(0, segments, side_by_side):
            for j in range(2):
                i = tid + j * K
                mine, at, place = s + (i >> bits), i & last, int64(-1)
                if mine < segments:
                    place = lists[first + mine * K + (at if s == 0 else last - at)]
                if s == 0 or place > held[i]:
                    held[i] = place
            cuda.syncthreads()
            if s > 0:
                put_in_order(held, K, (last + 1) >> 1, FAR, FAR)
        while side_by_side >> 1 >= segments:
            side_by_side >>= 1
        merge_halves(held, side_by_side, bits)

    return merge_lists


# ----------------------------------------------------------------------------- the draw
@device
def whose(goal, end, mine, what, found):
    """The one thread whose part of a running sum holds goal tells all what it stands for, and the sum before it."""
    if end - mine <= goal and goal < end:
        found[0], found[1] = what, end - mine
    cuda.syncthreads()
    what, before = found[0], found[1]
    cuda.syncthreads()
    return what, before


@device
def add_weight(bins, i, w):
    """bins[0, i] are the lower, bins[1, i] the upper 32 bits of a sum: shared memory adds no more bits at once."""
    low = w & WORD
    low += int64(cuda.atomic.add(bins, (0, i), uint32(low)))
    high = (w >> 32) + (low >> 32)
    if high > 0:
        cuda.atomic.add(bins, (1, i), uint32(high))


@device
def of_bin(bins, i):
    return int64(bins[1, i]) << 32 | int64(bins[0, i])


@device
def load_batch(x, logits, first, token, V):
    """x[j] = the logit of token + j blockDim, -inf behind the last; all are under way before one is used."""
    for j in range(BATCH):
        there = token + j * cuda.blockDim.x
        x[j] = load1(logits, first + there) if there < V else -INFINITY


@functools.cache
def make_search(K):
    """K: length of a list, bins and threads of the block. -> weigh, look_closer"""
    BITS, STEEP = K.bit_length() - 1, float32(K / DISTANCE)

    @device
    def bin_of(logit, top, inverse):
        """Never falls while the logit falls: rounding keeps the order."""
        distance = (top - logit) * inverse * STEEP
        return int64(distance) if distance < float32(K - 1) else int64(K - 1)

    @device
    def weigh(bins, logits, first, V, top, inverse):
        """-> the weight of all tokens in this thread's bin"""
        tid = cuda.threadIdx.x
        bins[0, tid] = bins[1, tid] = uint32(0)
        cuda.syncthreads()
        x = cuda.local.array(BATCH, float32)
        for token in range(tid, V, BATCH * K):
            load_batch(x, logits, first, token, V)
            for j in range(BATCH):
                w = weight_of(x[j], top, inverse)
                if w > 0:
                    add_weight(bins, bin_of(x[j], top, inverse), w)
        cuda.syncthreads()
        return of_bin(bins, tid)

    @device
    def look_closer(
        held, bins, count, scratch, found, logits, first, V, top, inverse, chosen, before, goal
    ):
        """The running sum exceeds goal within the bin `chosen`, which begins at `before`. -> the place, the sum before it"""
        tid = cuda.threadIdx.x
        x, prefix, shift, n = cuda.local.array(BATCH, float32), int64(0), int64(PLACE), int64(K + 1)
        while n > K:
            lower = max(shift - BITS, int64(0))
            digits = (int64(1) << (shift - lower)) - 1
            held[tid], bins[0, tid], bins[1, tid] = int64(-1), uint32(0), uint32(0)
            if tid == 0:
                count[0] = 0
            cuda.syncthreads()
            for token in range(tid, V, BATCH * K):
                load_batch(x, logits, first, token, V)
                for j in range(BATCH):
                    if bin_of(x[j], top, inverse) == chosen:
                        place = place_of(x[j], token + j * K)
                        if place >> shift == prefix:
                            i = cuda.atomic.add(count, 0, 1)
                            if i < K:
                                held[i] = place
                            digit = digits - (place >> lower & digits)
                            add_weight(bins, digit, weight_of(x[j], top, inverse))
            cuda.syncthreads()
            n = int64(count[0])
            if n > K:
                mine = of_bin(bins, tid)
                end, _ = running_sum(mine, scratch)
                digit, more = whose(goal - before, end, mine, int64(tid), found)
                before += more
                prefix, shift = prefix << (shift - lower) | (digits - digit), lower
        bits = int64(1)
        while int64(1) << bits < n:
            bits += 1
        sort_lists(held, int64(1) << bits, bits)
        place, mine = held[tid], int64(0)
        if place >= 0:
            mine = weight_of(logit_of(place), top, inverse)
        end, _ = running_sum(mine, scratch)
        return whose(goal, end + before, mine, place, found)

    return weigh, look_closer


@functools.cache
def make_draw_kernel(K, overlap, ready):
    """K: the longest list, a power of two from 32 to 1024, and the threads of a block. ready: as in the first round"""
    ROOM, merge_lists, (weigh, look_closer) = 2 * K, make_merge_lists(K), make_search(K)

    @kernel(K)
    def sample_draw_kernel(
        ids_B, lists, logits, temperature_B, top_k_B, top_p_B, seed_B, sequence_B, step_B, segments, V, columns
    ):  # fmt: skip
        """Grid B, block K."""
        held, scratch = cuda.shared.array(ROOM, int64), cuda.shared.array(32, int64)
        bins, found = cuda.shared.array((2, K), uint32), cuda.shared.array(2, int64)
        count = cuda.shared.array(1, int32)
        tid, b = cuda.threadIdx.x, int64(cuda.blockIdx.x)
        if overlap and not ready:
            wait_for_previous()
        need, bits = wanted(temperature_B[b], top_k_B[b], K)
        if overlap:
            if ready:
                wait_for_previous()
            let_next_start()
        merge_lists(held, scratch, lists, b * segments * K, segments, bits)
        top = logit_of(held[0])
        # of infinite logits the first is as good as any
        if need == 1 or top != top or top == INFINITY or top == -INFINITY:
            if tid == 0:
                ids_B[b] = token_of(held[0]) if top == top else int32(-1)
            return
        fraction, p = random_fraction(seed_B[b], sequence_B[b], step_B[b]), top_p_B[b]
        inverse, first = float32(1.0) / temperature_B[b], b * columns
        what, mine = int64(tid), int64(0)
        if need == 0:
            mine = weigh(bins, logits, first, V, top, inverse)
        elif tid < need and held[tid] >= 0:
            what = held[tid]
            mine = weight_of(logit_of(what), top, inverse)
        end, kept = running_sum(mine, scratch)
        draws = p >= float32(1.0)  # else the last token that stays is looked for first
        goal = max(scaled(kept, int64(p * float32(1 << FRACTION))), int64(1)) - 1
        while True:
            if draws:
                goal = scaled(kept, fraction)
            place, before = whose(goal, end, mine, what, found)
            if need == 0:
                place, before = look_closer(
                    held, bins, count, scratch, found, logits, first, V, top, inverse, place, before, goal
                )  # fmt: skip
            if draws:
                break
            kept, draws = before + weight_of(logit_of(place), top, inverse), True
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
