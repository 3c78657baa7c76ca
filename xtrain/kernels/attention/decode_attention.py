"""One new token per sequence, in one kernel: QK-norm, RoPE, append to the cache, attention.

    qkv: (B, P), P = (H + 2G) D    k, v: (R, G, S, D), a layer's cache    tables: (B, M)    o: (B, C), C = H D

Token b has position t = lengths[b]. Position p of its sequence is in block tables[b, p // S] of the cache, at offset p % S
(kernels/decoding/kv_cache.py); K and V are the keys and values of positions 0 .. t:
    q, k, v = heads of qkv[b];   q, k normed if there are weights, and rotated to position t   (qk_norm_rope.py)
    cache[tables[b, t // S], :, t % S] = k, v
    o = softmax(scale q K^T) V
With a window W > 0, the token sees only the last W keys, itself among them (key_bounds.py).
An entry with a length outside 0 .. M S - 1 is idle: nothing is appended, and o[b] = 0. If a block that it needs is not in
0 .. R - 1, o[b] = NaN, and nothing is read or written out of bounds.

A block reads every key and value of one key head once, for all H / G query heads that share it: grouped-query attention without
copies. (Groups of more than 16 heads, in float32 of more than 8, are read several times.) A single block would be slow for
a long context, and few rows would leave most of the GPU idle. So the keys of a row are split among up to 32 blocks
(flash-decoding, Dao et al. 2023). Each block writes m, l, acc of its keys to memory. The block that finishes last, which an
atomic counter determines, merges them in the order of the keys, so the result does not depend on the order of arrival:

    M = max m_i    o = sum_i exp(m_i - M) acc_i / sum_i exp(m_i - M) l_i

How the keys are split depends only on the row's length, which is read on the device: the same CUDA graph serves all lengths,
and a row's bits depend neither on the other rows nor on where its keys are, nor on S. A launch of few rows uses more warps per
block and shorter splits than one of many (choose), which changes the order of additions. (In batch-invariant mode
serving/paged_cache.py uses context_attention.py instead.)
The host knows only the largest possible number of splits, and starting a block that has nothing to do costs a microsecond. So
there are as many blocks as the GPU runs at a time. Each counts the splits of all rows (count_items), and takes items i, i + grid,
...: one split of one key head.
For every item a block computes its queries from qkv, which costs less than another kernel. The block of the last keys appends
the new key and value, then reads them back from the cache like all others. Keys and values of earlier tokens were written
long before: while the GEMM that produces qkv still runs, a block prefetches the first ones. Finding them takes two
dependent reads, the length and an entry of the table, so the blocks prefetch all tables before they know the lengths.

    bf16        tensor cores, compute capability 8.0 and up; also for a cache of codes (kv_codes.py)
    float32     without them                                  both in decode_attention_loops.py
Bytes moved: read 2 (t + 1) G D elements of the cache per token, 2 (t + 1) G (D + 4) bytes of codes; everything else is small.
"""

import functools
from dataclasses import dataclass

import numpy as np

from ...device import Array
from ..decoding.gemv_tensor_cores import MULTIPROCESSORS
from ..decoding.kv_cache import (
    check_block_size,
    check_block_tables,
    check_blocks,
    check_cache,
    check_int32,
    make_block_table,
)
from ..decoding.kv_codes import check_codes, read_sequence_ref, write_token_ref
from ..primitives.flat import on_16_bytes
from ..primitives.last_block import arrive_last, zero_counters
from ..primitives.ptx import device, kernel, let_next_start, prefetch, store1, wait_for_previous
from ..primitives.reduce import FULL
from ..primitives.tiles import WIDTHS
from ..qk_norm_rope import qk_norm_rope_ref, values_of
from ..rope import check_tables
from ..runtime.compiler import cuda, float32, int32, int64, types, uint32
from ..runtime.launch import (
    FLOATS,
    can_overlap,
    check,
    check_array,
    dtype_name,
    empty,
    launch,
    on_host,
)
from . import decode_attention_parts as parts
from .decode_attention_loops import make_attend_plain, make_attend_tensor
from .decode_attention_parts import LOG2E, MAX_SPLITS, quotient

FEW_HEADS = 16  # with at most so many key heads in a launch, most multiprocessors are idle
MANY_HEADS = 64  # with more, there are enough splits for all multiprocessors if they are longer
CODE_WIDTHS = tuple(D for D in WIDTHS if D >= 32)  # of heads, if the cache has codes
MOST_ROWS = 1024  # of a launch: a block keeps two numbers of each in shared memory


@dataclass(frozen=True)
class Config:
    """How a block processes its keys. `warps`, `keys` and `splits` change the order of additions, the others not the result."""

    warps: int  # of a block
    blocks: int  # per multiprocessor
    keys: int  # of a split, about
    splits: int  # of a row, at most
    prefetched: int  # keys of a split that a block prefetches before it loads the queries


def choose(D: int, group: int, half: bool, key_heads: int) -> Config:
    """-> the tuned configuration. Measured on one H200 with bench/tune_decode.py.

    D: width of a head. group: query heads that share a key head. half: bf16. key_heads: of the launch, over all rows. With few
    key heads, a launch takes as long as one block: so many warps share a split that each has one round of keys, as far as
    registers and shared memory permit. Many key heads keep the memory busy anyway: small blocks hide each other's latency, and
    long splits save merging.
    """
    heads = heads_of(half, group)
    if key_heads <= FEW_HEADS and min(heads, group) * D <= 512:
        splits = min(parts.MAX_SPLITS, MULTIPROCESSORS // key_heads)  # no block has two items
        return Config(12 if half else 8, 1, parts.FEW_CHUNK, splits, prefetched=512)
    blocks = 4 if heads * D <= 512 else 3 if heads * D <= 1024 else 2
    keys = parts.CHUNK if key_heads <= MANY_HEADS else 4 * parts.CHUNK
    return Config(4, blocks, keys, parts.MAX_SPLITS, prefetched=128)


# ----------------------------------------------------------------------------- reference
def decode_attention_ref(
    qkv_BP, k_RGSD, v_RGSD, lengths_B, tables_BM, cos_PR, sin_PR, q_w_D, k_w_D, eps, scale, window=0,
    scales_RGS2=None,
):  # fmt: skip
    """decode_attention in NumPy -> o (B, C). Appends to the caches in place. Computes in qkv's dtype, at least in float32."""
    R, G, S, D = k_RGSD.shape
    H = qkv_BP.shape[1] // D - 2 * G
    o_BHD = np.zeros((len(tables_BM), H, D), qkv_BP.dtype)
    live_B = np.flatnonzero((lengths_B >= 0) & (lengths_B < tables_BM.shape[1] * S))
    if not live_B.size:
        return o_BHD.reshape(-1, H * D)
    wide = np.result_type(qkv_BP.dtype, np.float32)
    qkv = qkv_BP[live_B].astype(wide)
    angles = cos_PR, sin_PR, H, G, lengths_B[live_B]
    q_NHD, k_NGD, _ = qk_norm_rope_ref(qkv, q_w_D, k_w_D, *angles, eps)
    v_NGD = values_of(qkv, H, G, D)
    for i, b in enumerate(live_B):
        t = lengths_B[b]
        blocks = tables_BM[b, : t // S + 1]
        if 0 <= blocks[-1] < R:
            new = (x[i].astype(qkv_BP.dtype) for x in (k_NGD, v_NGD))
            write_token_ref(k_RGSD, v_RGSD, scales_RGS2, blocks[-1], t % S, *new)
        if not ((blocks >= 0) & (blocks < R)).all():
            o_BHD[b] = np.nan
            continue
        q_GXD = q_NHD[i].reshape(G, H // G, D)
        read = read_sequence_ref(k_RGSD, v_RGSD, scales_RGS2, blocks, t + 1, wide)
        k_GSD, v_GSD = (x[:, -window:] for x in read)
        s_GXS = q_GXD @ k_GSD.swapaxes(1, 2) * wide.type(scale)
        p_GXS = np.exp(s_GXS - s_GXS.max(-1, keepdims=True))
        o_BHD[b] = (p_GXS @ v_GSD / p_GXS.sum(-1, keepdims=True)).reshape(H, D)
    return o_BHD.reshape(-1, H * D)


# ----------------------------------------------------------------------------- kernel
def heads_of(half: bool, group: int) -> int:
    """-> query heads of a block; on tensor cores some may be absent. half: bf16. group: query heads that share a key head"""
    return (16 if group > 8 else 8) if half else min(group, 8)


@functools.cache
def make_schedule(config, WINDOW):
    """-> key_range, count_items, row_of: which splits there are

    key_range(split, t) -> (lo, hi, used): a split has keys lo .. hi - 1 of 0 .. t; `used` splits have keys. With a window, they
    begin at the multiple of 16 before its first key
    count_items(first_s, t_s, sums_s, lengths_B, B, limit): t_s[b]: the position of row b's token, -1 if it is not in
    0 .. limit - 1; first_s[b]: the number of splits of all rows before b, first_s[B] of all. A row without a position counts as
    one split. sums_s: an int32 for each warp. Ends with a barrier.
    row_of(first_s, B, i) -> the row of split i
    """
    WARPS = config.warps
    THREADS = 32 * config.warps
    split_keys = parts.make_split_keys(config.keys, config.splits)

    @device
    def base_of(t):
        return int64(t + 1 - WINDOW) // 16 * 16 if WINDOW and t + 1 > WINDOW else int64(0)

    @device
    def key_range(split, t):
        base = base_of(t)
        keys, used = split_keys(t + 1 - base)
        lo = base + split * keys
        return lo, lo + keys if split + 1 < used else t + 1, used

    @device
    def used_by(t):
        return int32(split_keys(int64(t + 1) - base_of(t))[1]) if t >= 0 else int32(1)

    @device
    def count_items(first_s, t_s, sums_s, lengths_B, B, limit):
        tid = cuda.threadIdx.x
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        each = quotient(int64(B + THREADS - 1), int64(THREADS))
        low = tid * each if tid * each < B else int64(B)
        high = low + each if low + each < B else int64(B)
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
    """-> count_items, place_of, prefetch_tables, prefetch_keys

    place_of(item, first_s, t_s, B, G, M, R) -> (b, g, t, split, lo, hi, used, pages): a row and a key head, the position of the
    row's token, and a split of its keys; pages: where they are (decode_attention_loops.py)
    prefetch_tables(tables, count): the blocks share the work.  prefetch_keys(k, v, scales, tables, pages, lo, hi): the first ones
    """
    key_range, count_items, row_of = make_schedule(config, WINDOW)
    entry_of, start_of = make_block_table(S, D)
    THREADS = 32 * config.warps
    MOST = config.prefetched
    # numbers in 128 bytes
    LINE = 128 if CODES else 64 if half else 32
    ENTRIES = 32

    @device
    def place_of(item, first_s, t_s, B, G, M, R):
        number = quotient(item, int64(G))
        g = item - number * G
        b = row_of(first_s, B, number)
        split = number - first_s[b]
        t = int64(t_s[b])
        lo, hi, used = key_range(split, t if t >= 0 else int64(0))
        first = uint32(uint32(b) * uint32(M))
        head = uint32(uint32(g) * uint32(S * D))
        pages = first, uint32(R), uint32(uint32(G) * uint32(S * D)), head
        return int64(b), g, t, split, lo, hi, used, pages

    @device
    def prefetch_tables(tables, count):
        i = (int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x) * ENTRIES
        while i < count:
            prefetch(tables, i)
            i += int64(cuda.gridDim.x) * (THREADS * ENTRIES)

    @device
    def prefetch_keys(k, v, scales, tables, pages, lo, hi):
        first, R, stride, head = pages
        count = (hi - lo if hi - lo < MOST else int64(MOST)) * D
        for i in range(cuda.threadIdx.x * LINE, count, THREADS * LINE):
            n = lo + i // D
            at = start_of(entry_of(tables, first, n), n, R, stride, head) + i % D
            prefetch(k, at)
            prefetch(v, at)
            if CODES and n % 16 == 0:  # the scales of 16 keys are 128 bytes
                prefetch(scales, 2 * (at // D))

    return count_items, place_of, prefetch_tables, prefetch_keys


def make_combine(D, HEADS, WARPS):
    """-> combine(o, to, count, ...): merge the warps' results; with several splits, the last block merges those of all splits.

    Writes `count` heads to o, from o[to] on. index: number of the block's row and heads in the launch; it selects the counter
    and the partial results.
    """
    merge = parts.make_merge(D, HEADS, WARPS)
    gather = merge.gather
    finish = merge.finish
    merge_splits = merge.merge_splits
    store_partial = merge.store_partial
    SIZE = HEADS * D
    THREADS = 32 * WARPS

    @device
    def combine(
        o, to, count, acc_s, m_s, l_s, weight_s, last_s, partial, m_partial, l_partial, counters, index,
        split, splits, used,
    ):  # fmt: skip
        acc = cuda.local.array(4, float32)
        first = index * splits
        for j in range(4 * cuda.threadIdx.x, SIZE, 4 * THREADS):
            top, total = gather(acc, acc_s, m_s, l_s, j)
            if used > 1:
                store_partial(partial, m_partial, l_partial, first + split, j, acc, top, total)
            else:
                finish(o, to, count, j, acc, total)
        if used > 1 and arrive_last(counters, index, used, last_s):
            merge_splits(
                o, to, count, acc_s, l_s, weight_s, partial, m_partial, l_partial, first, used
            )

    return combine


@device
def wait_for_qkv(counters, i, target):
    """The previous kernel of the stream produces qkv."""
    wait_for_previous()


@dataclass(frozen=True)
class SharedSizes:
    """Elements of the arrays of shared memory that make_attend_items needs."""

    queries: int  # bf16 or float32
    acc: int
    rows: int  # of m_s and of l_s
    weights: int  # of keys (make_attend_plain), then of splits (merge_splits)


def shared_sizes(D: int, group: int, half: bool, config: Config) -> SharedSizes:
    """-> the sizes. group: H / G"""
    heads = heads_of(half, group)
    warps = config.warps
    live = min(heads, group)
    weights = (MAX_SPLITS if half else max(MAX_SPLITS, 32 * warps)) * live
    return SharedSizes(heads * D, warps * live * D, warps * live, weights)


def make_attend_items(D, S, GROUP, half, normalise, config, WINDOW=0, wait=None, CODES=False):
    """-> count_items, prefetch_tables, attend_items: the whole kernel, as device functions

    attend_items(o, ..., eps, scale, shared arrays, begin, step, items, waits, i, target): items begin, begin + step, ...
    wait: a device function; wait(waits, i, target) is called before the first item reads qkv, and after it has prefetched keys.
    None: qkv is there.  CODES: k and v are codes, in bf16 only, and scales their scales; otherwise scales is not used.
    """
    HEADS = heads_of(half, GROUP)
    WARPS = config.warps
    LIVE = min(HEADS, GROUP)  # heads whose results are kept
    CHUNKS = -(-GROUP // HEADS)
    THREADS = 32 * WARPS
    EARLY = wait is not None
    wait = wait or wait_for_qkv
    new_heads = parts.make_new_heads(D, GROUP, HEADS, WARPS, normalise, CODES)
    if half:
        attend = make_attend_tensor(D, S, HEADS, LIVE, WARPS, WINDOW > 0, CODES)
    else:
        attend = make_attend_plain(D, S, HEADS, LIVE, WARPS, WINDOW > 0)
    count_items, place_of, prefetch_tables, prefetch_keys = make_items(
        D, S, half, config, WINDOW, CODES
    )
    entry_of, start_of = make_block_table(S, D)
    combine = make_combine(D, LIVE, WARPS)

    @device
    def attend_items(
        o, partial, m_partial, l_partial, counters, k, v, scales, qkv, tables, q_w_D, k_w_D, cos, sin, B, G, M, R,
        splits, eps, scale, q_s, acc_s, weight_s, m_s, l_s, first_s, t_s, last_s, begin, step, items, waits, i, target,
    ):  # fmt: skip
        item = begin
        while item < items:  # a range would divide by step
            b, g, t, split, lo, hi, used, pages = place_of(item, first_s, t_s, B, G, M, R)
            own = entry_of(tables, pages[0], t if t >= 0 else int64(0))
            if EARLY:
                if t >= 0:
                    prefetch_keys(k, v, scales, tables, pages, lo, hi)
                if item == begin:
                    wait(waits, i, target)
            item += step
            out = (b * G + g) * GROUP * D
            if t < 0:
                for j in range(cuda.threadIdx.x, GROUP * D, THREADS):
                    store1(o, out + j, float32(0.0))
                continue
            _, blocks, stride, head = pages
            to = start_of(own, t, blocks, stride, head)
            x = b * (G * GROUP + 2 * G) * D  # the token's query heads, then its keys, its values
            key = x + (G * GROUP + g) * D
            value = x + (G * GROUP + G + g) * D
            for chunk in range(CHUNKS):
                owner = split == used - 1 and chunk == 0 and own < R
                h0 = chunk * HEADS
                new_heads(
                    q_s, k, v, scales, qkv, x + g * GROUP * D, key, value, to, owner, h0, q_w_D, k_w_D, cos, sin, t,
                    eps,
                )  # fmt: skip
                cuda.syncthreads()  # the queries, and the new key and value in the cache
                attend(
                    acc_s, m_s, l_s, weight_s, q_s, k, v, scales, tables, pages, lo, hi, t + 1 - WINDOW,
                    scale * LOG2E,
                )  # fmt: skip
                cuda.syncthreads()  # the results of all warps
                combine(
                    o, out + h0 * D, GROUP - h0, acc_s, m_s, l_s, weight_s, last_s, partial, m_partial, l_partial,
                    counters, (b * G + g) * CHUNKS + chunk, split, splits, used,
                )  # fmt: skip

    return count_items, prefetch_tables, attend_items


@functools.cache
def make_decode_kernel(D, S, GROUP, half, normalise, overlap, ready, config, WINDOW=0, CODES=False):
    """-> (kernel, heads of a partial result, passes over the keys of a group). Launch with 32 * config.warps threads.

    S: tokens of a block of the cache. GROUP: H / G. half: bf16. normalise: QK-norm. overlap: the kernel may start before the
    previous one has ended (see wait_for_previous in primitives/ptx.py). ready: lengths, tables and the cache may be read before
    that. CODES: see make_attend_items.
    """
    HEADS = heads_of(half, GROUP)
    WARPS = config.warps
    LIVE = min(HEADS, GROUP)
    CHUNKS = -(-GROUP // HEADS)
    sizes = shared_sizes(D, GROUP, half, config)
    QUERIES = sizes.queries
    SIZE = sizes.acc
    ROWS = sizes.rows
    WEIGHTS = sizes.weights
    element = types.uint16 if half else float32
    STARTS = MOST_ROWS + 1
    wait = wait_for_qkv if overlap and ready else None
    count_items, prefetch_tables, attend_items = make_attend_items(
        D, S, GROUP, half, normalise, config, WINDOW, wait, CODES
    )

    @kernel(32 * WARPS, config.blocks if half else 0)  # in float32 registers would spill
    def decode_attention_kernel(
        o, partial, m_partial, l_partial, counters, k, v, scales, qkv, lengths_B, tables, q_w_D, k_w_D, cos, sin,
        B, G, M, R, splits, eps, scale,
    ):  # fmt: skip
        """Grid: any number of blocks of 32 WARPS threads. All arrays flat. B: rows, at most MOST_ROWS.

        partial, m_partial, l_partial: acc, m, l of (B, G, CHUNKS, splits); counters (B G CHUNKS), zeros before and after.
        """
        # Numba aligns a shared array to its element size, but these two are read 16 bytes at a time
        q_s = cuda.shared.array(QUERIES, element, alignment=16)
        acc_s = cuda.shared.array(SIZE, float32, alignment=16)
        weight_s = cuda.shared.array(WEIGHTS, float32)
        m_s = cuda.shared.array(ROWS, float32)
        l_s = cuda.shared.array(ROWS, float32)
        first_s = cuda.shared.array(STARTS, int32)
        t_s = cuda.shared.array(STARTS, int32)
        sums_s = cuda.shared.array(WARPS, int32)
        last_s = cuda.shared.array(1, int32)
        if overlap:
            let_next_start()
            if not ready:
                wait_for_previous()
        prefetch_tables(tables, int64(B) * M)
        count_items(first_s, t_s, sums_s, lengths_B, B, M * S)
        begin = int64(cuda.blockIdx.x)
        items = int64(first_s[B]) * G
        if overlap and ready and begin >= items:
            wait_for_previous()
        attend_items(
            o, partial, m_partial, l_partial, counters, k, v, scales, qkv, tables, q_w_D, k_w_D, cos, sin, B, G, M,
            R, splits, eps, scale, q_s, acc_s, weight_s, m_s, l_s, first_s, t_s, last_s, begin,
            int64(cuda.gridDim.x), items, counters, 0, 0,
        )  # fmt: skip

    return decode_attention_kernel, LIVE, CHUNKS


# ----------------------------------------------------------------------------- launcher
def decode_attention(
    qkv_BP: Array,
    k_RGSD: Array,
    v_RGSD: Array,
    lengths_B: Array,
    tables_BM: Array,
    cos_PR: Array,
    sin_PR: Array,
    q_w_D: Array | None,
    k_w_D: Array | None,
    eps: float,
    scale: float,
    cache_ready: bool = False,
    window: int = 0,
    scales_RGS2: Array | None = None,
) -> Array:
    """Attention of one new token per sequence -> o (B, H D) like qkv. Appends the tokens' keys and values to the cache.

    qkv (B, (H + 2G) D) and the caches k, v (R, G, S, D): all float32 or all bf16. lengths (B,) and tables (B, M): int32, in
    device memory; the host does not read their values. Sequences may share blocks, but not the one that they append to. cos,
    sin (P, D/2) with P >= M S and the norm weights (D,), both or neither: float32. eps: of QK-norm. scale: factor of the scores.
    window: keys that a token sees, 0 for all.
    scales (R, G, S, 2): if given, k and v are uint8 codes and these their scales (kv_codes.py); on a GPU qkv is bf16 then, and D
    is at least 32.
    cache_ready: the previous kernel writes neither the cache nor lengths or tables, so they may be read before it ends.

    An entry with a length outside 0 .. M S - 1 is idle: o[b] = 0. If a block that it needs is not in 0 .. R - 1, this raises
    ValueError on the CPU; on a GPU the host does not know it, and o[b] becomes NaN. Raises ValueError or TypeError if shapes or
    dtypes do not match; on a GPU S must be a multiple of 16.
    """
    op = "decode_attention"
    given = (qkv_BP, k_RGSD, v_RGSD, lengths_B, tables_BM, cos_PR, sin_PR, q_w_D, k_w_D)
    codes = scales_RGS2 is not None
    weights = _check(op, *given, scales_RGS2)
    check(window >= 0, f"{op}: a window of {window} keys")
    (R, G, S, D), (B, P), M = k_RGSD.shape, qkv_BP.shape, tables_BM.shape[1]
    H = P // D - 2 * G
    if on_host(*given[:7], *weights, *([scales_RGS2] if codes else [])):
        lengths = np.where(lengths_B < M * S, lengths_B + 1, 0)
        check_blocks(op, tables_BM, lengths, R, S)
        return decode_attention_ref(*given, eps, scale, window, scales_RGS2)
    widths = CODE_WIDTHS if codes else WIDTHS
    check(D in widths, f"{op}: head dim {D}, the GPU kernels support {widths}")
    check_block_size(op, R, G, S, D)
    o_BC = empty(qkv_BP, (B, H * D))
    group = H // G
    half = qkv_BP.dtype != np.float32
    check(half or not codes, f"{op}: float32, the GPU kernel for codes is for bf16")
    flat = [x.reshape(-1) for x in (k_RGSD, v_RGSD)]
    check(on_16_bytes(*flat), f"{op}: the cache does not begin at a multiple of 16 bytes")
    config = choose(D, group, half, B * G)
    overlap = can_overlap(qkv_BP)
    splits = parts.splits_of(
        min(M * S, window + 15) if window else M * S, config.keys, config.splits
    )
    variant = D, S, group, half, bool(weights), overlap, cache_ready, config, window, codes
    decode_kernel, heads, chunks = make_decode_kernel(*variant)
    cos = cos_PR.reshape(-1)
    sin = sin_PR.reshape(-1)
    norms = weights or (cos, cos)  # a kernel argument must not be None
    flat.append(cos if scales_RGS2 is None else scales_RGS2.reshape(-1))
    for low in range(0, B, MOST_ROWS):
        rows = slice(low, min(low + MOST_ROWS, B))
        n = rows.stop - low
        count = n * G * chunks
        partials = (
            empty(qkv_BP, count * size * (splits if splits > 1 else 0), np.float32)
            for size in (heads * D, heads, heads)
        )
        arrays = (
            o_BC[rows].reshape(-1), *partials, zero_counters(qkv_BP, count, "decode_attention"), *flat,
            qkv_BP[rows].reshape(-1), lengths_B[rows], tables_BM[rows].reshape(-1), *norms, cos, sin,
        )  # fmt: skip
        scalars = n, G, M, R, splits, np.float32(eps), np.float32(scale)
        grid = min(n * G * splits, config.blocks * MULTIPROCESSORS)
        launch(decode_kernel, grid, 32 * config.warps, *arrays, *scalars, overlap=overlap)
    return o_BC


def _check(
    op, qkv_BP, k_RGSD, v_RGSD, lengths_B, tables_BM, cos_PR, sin_PR, q_w_D, k_w_D, scales_RGS2
):
    """Raise ValueError or TypeError if the arguments of decode_attention do not match -> the norm weights, () if None."""
    if scales_RGS2 is None:
        (_, G, S, D), dtypes = check_cache(op, k_RGSD, v_RGSD), (dtype_name(k_RGSD.dtype),)
    else:
        (_, G, S, D), dtypes = check_codes(op, k_RGSD, v_RGSD, scales_RGS2), FLOATS
    check_tables(op, cos_PR, sin_PR, D)
    check_array(op, "qkv", qkv_BP, (None, None), dtypes)
    B, P = qkv_BP.shape
    n = check_block_tables(op, tables_BM, B, S)
    known = cos_PR.shape[0]
    check(n <= known, f"{op}: cos and sin of {known} positions, the block tables hold {n} tokens")
    H = P // D - 2 * G
    check(
        P % D == 0 and H > 0 and H % G == 0,
        f"{op}: qkv of {P} columns does not fit heads of {D}, {G} of k",
    )
    check((q_w_D is None) == (k_w_D is None), f"{op}: give both norm weights or none")
    weights = () if q_w_D is None else (q_w_D, k_w_D)
    for w in weights:
        check_array(op, "norm weight", w, (D,))
    check_int32(op, "lengths", lengths_B, B)
    return weights
