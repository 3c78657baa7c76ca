"""The kernels of sampling.py: two rounds of top-k, then the draw; without top-k, a search in the whole vocabulary.

key      a token's sort key, an int64: its logit in the upper bits, as an integer that grows with it; below, the largest
         possible id minus its id. Keys are distinct, and a larger key comes earlier, so "lower id first" needs no extra step.
         -1 is no token. A NaN sorts before everything else.
first    a block per segment of the vocabulary sorts lists of k keys (bitonic sort, Batcher 1968), k a power of two, and
         merges them until one is left. Of two descending lists, the larger of key i of one and key k - 1 - i of the other
         are the k largest of both, and half a bitonic sort puts them in order. Rows without top-k need only the first
         token, and sort nothing.
second   a block per row merges those lists in the same way, as many at a time as shared memory holds.
draw     with top-k, the running sum over the list. Without, tokens are put into bins by their distance from the largest
         logit. The bin in which the end of top-p, or the draw, lies is gathered and sorted like a list; if it holds more
         tokens than a list, it is divided into bins by the next bits of the key.
"""

import functools
import math

from numba import cuda, float32, int32, int64, uint32
from numba.cuda.libdevice import float_as_int, int_as_float

from ..primitives.ptx import device, kernel, let_next_start, load1, wait_for_previous
from ..primitives.reduce import FULL

ONE = 1 << 40  # the weight of the first token
FRACTION = 31  # bits of p and of a random number
ID = 31  # bits of a key that hold the id
LAST_ID = (1 << ID) - 1
NAN_ORDER = (1 << 31) - 1  # larger than that of infinity
PHILOX_M = (0xD2511F53, 0xCD9E8D57)  # multipliers and Weyl constants of the paper's philox4x32
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
INFINITY = float32(math.inf)
DISTANCE = 32  # factors of e that the bins span; ONE times e^-28 is less than one
BATCH = 6  # logits that a thread loads before it uses the first one
KEY = 63  # bits of a key
FAR = 1 << 62


# ----------------------------------------------------------------------------- numbers
@device
def sort_key_of(logit, token):
    """-> the token's sort key, 0 <= key < 2^63"""
    bits = int64(float_as_int(logit + float32(0.0)))  # -0 becomes 0: they are equal
    order = bits if bits >= 0 else bits ^ int64(0x7FFFFFFF)
    if logit != logit:
        order = int64(NAN_ORDER)
    return (order + int64(1 << 31)) << ID | (LAST_ID - token)


@device
def logit_of(key):
    """-> the logit of a key"""
    order = (key >> ID) - int64(1 << 31)
    return int_as_float(int32(order if order >= 0 else order ^ int64(0x7FFFFFFF)))


@device
def token_of(key):
    """-> the id of a key"""
    return int32(LAST_ID - (key & LAST_ID))


@device
def weight_of(logit, top, inverse):
    """-> floor(2^40 exp((logit - top) / temperature)); inverse: 1 / temperature"""
    return int64(math.exp((logit - top) * inverse) * float32(ONE))


@device
def scaled(total, fraction):
    """-> floor(total fraction / 2^31), for total < 2^62, fraction < 2^31"""
    low = total & LAST_ID
    return (total >> FRACTION) * fraction + (low * fraction >> FRACTION)


@device
def random_fraction(seed, sequence, step):
    """-> 31 random bits: Philox 4x32-10 of the counter (step, 0, sequence), key seed. All in int64; products wrap around."""
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
def list_size(temperature, top_k, K):
    """-> need, bits: how many of the first tokens a row needs (0: all), and log2 of the smallest power of two not below it"""
    need, bits = max(min(int64(top_k), int64(K)), int64(0)), int64(0)
    if temperature <= float32(0.0):
        need = int64(1)
    while int64(1) << bits < need:
        bits += 1
    return need, bits


# ----------------------------------------------------------------------------- functions of a block
@device
def put_in_order(x_s, pairs, step, size, then):
    """A bitonic merge of x_s[0 : 2 pairs]: order the elements `step` apart, then those half as far apart, ... down to 1.

    Runs of `size` alternate between descending and ascending. then: the distance of the accesses that follow. While
    step <= 32, a warp's 32 pairs stay within the same 64 elements, so only larger steps need a barrier of the block.
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
def sort_lists(x_s, length, bits):
    """Sort x_s[0:length], length a power of two, into lists of 2^bits, each in descending order."""
    size = int64(2)
    while size < int64(1) << bits:
        put_in_order(x_s, length >> 1, size >> 1, size, size)
        size <<= 1
    put_in_order(x_s, length >> 1, (int64(1) << bits) >> 1, FAR, FAR)


@device
def merge_halves(x_s, lists, bits):
    """Merge `lists` descending lists, a power of two: the 2^bits largest keys become the first list."""
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
def block_max_key(v, scratch):
    """-> the maximum of v >= -1 over the block, in thread 0"""
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
    """-> the sum of v over the threads up to and including this one, and over all threads. scratch: 32 unused int64"""
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
    """-> (the kernel of the first round, its threads).

    K: the longest list, at most SEGMENT; both powers of two. overlap: the kernel may start before the previous one has ended.
    ready: temperature and top_k may be read before that.
    """
    THREADS = min(max(SEGMENT // 2, 32), 512)
    EACH = SEGMENT // THREADS

    @kernel(THREADS)
    def sample_segment_kernel(lists, logits, temperature_B, top_k_B, V, columns):
        """Grid (segments, B), block THREADS. lists: flat (B segments K) int64; logits: flat (B columns), V of them tokens."""
        keys, scratch = cuda.shared.array(SEGMENT, int64), cuda.shared.array(32, int64)
        tid, b = cuda.threadIdx.x, int64(cuda.blockIdx.y)
        first = int64(cuda.blockIdx.x) * SEGMENT
        out = (b * cuda.gridDim.x + cuda.blockIdx.x) * K
        if overlap and not ready:
            wait_for_previous()
        _, bits = list_size(temperature_B[b], top_k_B[b], K)
        if overlap:
            if ready:
                wait_for_previous()
            let_next_start()
        x, best = cuda.local.array(EACH, float32), int64(-1)
        for j in range(EACH):  # all loads are in flight before the first one is used
            token = first + j * THREADS + tid
            x[j] = load1(logits, b * columns + token) if token < V else float32(0.0)
        for j in range(EACH):
            token, key = first + j * THREADS + tid, int64(-1)
            if token < V:
                key = sort_key_of(x[j], token)
            best = best if best > key else key
            keys[j * THREADS + tid] = key
        if bits == 0:
            best = block_max_key(best, scratch)
            if tid == 0:
                lists[out] = best
            return
        cuda.syncthreads()
        sort_lists(keys, int64(SEGMENT), bits)
        merge_halves(keys, int64(SEGMENT) >> bits, bits)
        for i in range(tid, int64(1) << bits, THREADS):
            lists[out + i] = keys[i]

    return sample_segment_kernel, THREADS


# ----------------------------------------------------------------------------- second round
@functools.cache
def make_merge_lists(K):
    """-> merge_lists(candidates_s, scratch, lists, first, segments, bits): merge all segments' lists.

    candidates_s[0 : 2^bits] = the largest keys of all, descending. It has room for 2 K keys; elements from 2^bits on are
    unspecified afterwards.
    """

    @device
    def merge_lists(candidates_s, scratch, lists, first, segments, bits):
        tid, last = cuda.threadIdx.x, (int64(1) << bits) - 1
        if bits == 0:
            best = int64(-1)
            s = int64(tid)
            while s < segments:
                key = lists[first + s * K]
                best = best if best > key else key
                s += K
            best = block_max_key(best, scratch)
            if tid == 0:
                candidates_s[0] = best
            cuda.syncthreads()
            return
        side_by_side = int64(2 * K) >> bits
        for s in range(0, segments, side_by_side):
            for j in range(2):
                i = tid + j * K
                mine, at, key = s + (i >> bits), i & last, int64(-1)
                if mine < segments:
                    key = lists[first + mine * K + (at if s == 0 else last - at)]
                if s == 0 or key > candidates_s[i]:
                    candidates_s[i] = key
            cuda.syncthreads()
            if s > 0:
                put_in_order(candidates_s, K, (last + 1) >> 1, FAR, FAR)
        while side_by_side >> 1 >= segments:
            side_by_side >>= 1
        merge_halves(candidates_s, side_by_side, bits)

    return merge_lists


# ----------------------------------------------------------------------------- the draw
@device
def find_owner(goal, end, mine, what, found):
    """-> `what` of the thread find_owner interval end - mine <= goal < end of a running sum contains goal, and end - mine."""
    if end - mine <= goal and goal < end:
        found[0], found[1] = what, end - mine
    cuda.syncthreads()
    what, before = found[0], found[1]
    cuda.syncthreads()
    return what, before


@device
def add_weight(bins, i, w):
    """bins[0, i] and bins[1, i] hold the lower and upper 32 bits of a sum: shared memory has no faster 64-bit atomics."""
    low = w & WORD
    low += int64(cuda.atomic.add(bins, (0, i), uint32(low)))
    high = (w >> 32) + (low >> 32)
    if high > 0:
        cuda.atomic.add(bins, (1, i), uint32(high))


@device
def of_bin(bins, i):
    """-> the sum of bin i"""
    return int64(bins[1, i]) << 32 | int64(bins[0, i])


@device
def load_batch(x, logits, first, token, V):
    """x[j] = the logit of token + j blockDim, -inf beyond the last token; all loads are in flight before one is used."""
    for j in range(BATCH):
        t = token + j * cuda.blockDim.x
        x[j] = load1(logits, first + t) if t < V else -INFINITY


@functools.cache
def make_search(K):
    """-> weigh_bins, search_bin: the search without top-k. K: length of a list, bins, and threads of the block"""
    BITS, STEEP = K.bit_length() - 1, float32(K / DISTANCE)

    @device
    def bin_of(logit, top, inverse):
        """-> the bin of a logit. A smaller logit never gets an earlier bin: rounding is monotonic."""
        distance = (top - logit) * inverse * STEEP
        return int64(distance) if distance < float32(K - 1) else int64(K - 1)

    @device
    def weigh_bins(bins, logits, first, V, top, inverse):
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
    def search_bin(
        candidates_s,
        bins,
        count,
        scratch,
        found,
        logits,
        first,
        V,
        top,
        inverse,
        chosen,
        before,
        goal,
    ):
        """-> the key of the token at which the running sum exceeds goal, and the sum before it.

        The token is in bin `chosen`, which begins at the sum `before`.
        """
        tid = cuda.threadIdx.x
        x, prefix, shift, n = cuda.local.array(BATCH, float32), int64(0), int64(KEY), int64(K + 1)
        while n > K:
            lower = max(shift - BITS, int64(0))
            digits = (int64(1) << (shift - lower)) - 1
            candidates_s[tid], bins[0, tid], bins[1, tid] = int64(-1), uint32(0), uint32(0)
            if tid == 0:
                count[0] = 0
            cuda.syncthreads()
            for token in range(tid, V, BATCH * K):
                load_batch(x, logits, first, token, V)
                for j in range(BATCH):
                    if bin_of(x[j], top, inverse) == chosen:
                        key = sort_key_of(x[j], token + j * K)
                        if key >> shift == prefix:
                            i = cuda.atomic.add(count, 0, 1)
                            if i < K:
                                candidates_s[i] = key
                            digit = digits - (key >> lower & digits)
                            add_weight(bins, digit, weight_of(x[j], top, inverse))
            cuda.syncthreads()
            n = int64(count[0])
            if n > K:
                mine = of_bin(bins, tid)
                end, _ = running_sum(mine, scratch)
                digit, more = find_owner(goal - before, end, mine, int64(tid), found)
                before += more
                prefix, shift = prefix << (shift - lower) | (digits - digit), lower
        bits = int64(1)
        while int64(1) << bits < n:
            bits += 1
        sort_lists(candidates_s, int64(1) << bits, bits)
        key, mine = candidates_s[tid], int64(0)
        if key >= 0:
            mine = weight_of(logit_of(key), top, inverse)
        end, _ = running_sum(mine, scratch)
        return find_owner(goal, end + before, mine, key, found)

    return weigh_bins, search_bin


@functools.cache
def make_draw_kernel(K, overlap, ready):
    """-> the kernel of the second round and the draw. Launch with K threads.

    K: the longest list, a power of two from 32 to 1024. overlap, ready: see make_segment_kernel
    """
    ROOM, merge_lists, (weigh_bins, search_bin) = 2 * K, make_merge_lists(K), make_search(K)

    @kernel(K)
    def sample_draw_kernel(
        ids_B, lists, logits, temperature_B, top_k_B, top_p_B, seed_B, sequence_B, step_B, segments, V, columns
    ):  # fmt: skip
        """Grid B, block K."""
        candidates_s, scratch = cuda.shared.array(ROOM, int64), cuda.shared.array(32, int64)
        bins, found = cuda.shared.array((2, K), uint32), cuda.shared.array(2, int64)
        count = cuda.shared.array(1, int32)
        tid, b = cuda.threadIdx.x, int64(cuda.blockIdx.x)
        if overlap and not ready:
            wait_for_previous()
        need, bits = list_size(temperature_B[b], top_k_B[b], K)
        if overlap:
            if ready:
                wait_for_previous()
            let_next_start()
        merge_lists(candidates_s, scratch, lists, b * segments * K, segments, bits)
        top = logit_of(candidates_s[0])
        # of infinite logits, the first one is taken
        if need == 1 or top != top or top == INFINITY or top == -INFINITY:
            if tid == 0:
                ids_B[b] = token_of(candidates_s[0]) if top == top else int32(-1)
            return
        fraction, p = random_fraction(seed_B[b], sequence_B[b], step_B[b]), top_p_B[b]
        inverse, first = float32(1.0) / temperature_B[b], b * columns
        what, mine = int64(tid), int64(0)
        if need == 0:
            mine = weigh_bins(bins, logits, first, V, top, inverse)
        elif tid < need and candidates_s[tid] >= 0:
            what = candidates_s[tid]
            mine = weight_of(logit_of(what), top, inverse)
        end, kept = running_sum(mine, scratch)
        draws = p >= float32(1.0)  # otherwise the last token that top-p keeps is searched first
        goal = max(scaled(kept, int64(p * float32(1 << FRACTION))), int64(1)) - 1
        while True:
            if draws:
                goal = scaled(kept, fraction)
            key, before = find_owner(goal, end, mine, what, found)
            if need == 0:
                key, before = search_bin(
                    candidates_s, bins, count, scratch, found, logits, first, V, top, inverse, key, before, goal
                )  # fmt: skip
            if draws:
                break
            kept, draws = before + weight_of(logit_of(key), top, inverse), True
        if tid == 0:
            ids_B[b] = token_of(key)

    return sample_draw_kernel


# ----------------------------------------------------------------------------- the end of a step
@functools.cache
def make_advance_kernel(overlap, copies):
    """-> the kernel of sampling.advance. copies: also copy the ids to host_ids"""

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
