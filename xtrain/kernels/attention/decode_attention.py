"""One new token per sequence, in one kernel: QK-norm, RoPE, append to the cache, attention.

    qkv: (B, P), P = (H + 2G) D    k, v: (R, G, S, D), a layer's cache    tables: (B, M)    o: (B, C), C = H D

Token b has position t = lengths[b]. Position p of its sequence is in block tables[b, p // S] of the cache, at offset p % S
(kernels/decoding/kv_cache.py); K and V are the keys and values of positions 0 .. t:
    q, k, v = heads of qkv[b];   q, k normed if there are weights, and rotated to position t   (qk_norm_rope.py)
    cache[tables[b, t // S], :, t % S] = k, v
    o = softmax(scale q K^T) V
An entry with a length outside 0 .. M S - 1 is idle: nothing is appended, and o[b] = 0. If a block that it needs is not in
0 .. R - 1, o[b] = NaN, and nothing is read or written out of bounds.

A block reads every key and value of one key head once, for all H / G query heads that share it: grouped-query attention without
copies. (Groups of more than 16 heads, in float32 of more than 8, are read several times.) A single block would be slow for
a long context, and few rows would leave most of the GPU idle. So the keys of a row are split among up to 32 blocks
(flash-decoding, Dao et al. 2023). Each block writes m, l, acc of its keys to memory. The block that finishes last, which an
atomic counter determines, merges them in the order of the keys, so the result does not depend on the order of arrival:

    M = max m_i    o = sum_i exp(m_i - M) acc_i / sum_i exp(m_i - M) l_i

How the keys are split depends only on the row's length, which is read on the device: the same CUDA graph serves all lengths,
and a row's bits depend neither on the other rows nor on where its keys are, nor on S. Blocks without keys exit at once. A
launch of few rows uses more warps per block and shorter splits than one of many (choose), which changes the order of
additions, unless batch_invariant is set.
Every block computes its queries from qkv itself, which costs less than another kernel. The block of the last keys appends
the new key and value, then reads them back from the cache like all others. Keys and values of earlier tokens were written
long before: while the GEMM that produces qkv still runs, a block prefetches them. Finding the first keys takes two dependent
reads, the length and an entry of the table, so all blocks prefetch the table before they know the length.

    bf16        tensor cores, compute capability 8.0 and up
    float32     without them                                  both in decode_attention_loops.py
Bytes moved: read 2 (t + 1) G D elements of the cache per token; everything else is small.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numba import cuda, float32, int64, types, uint32

from ...device import Array, cupy
from ...simulator import SimArray
from ..decoding.kv_cache import (
    check_block_size,
    check_block_tables,
    check_blocks,
    check_cache,
    check_int32,
    gather_sequence_ref,
    make_block_table,
)
from ..primitives.flat import on_16_bytes
from ..primitives.ptx import device, kernel, let_next_start, prefetch, store1, wait_for_previous
from ..primitives.tensor_maps import upload
from ..primitives.tiles import WIDTHS
from ..qk_norm_rope import qk_norm_rope_ref, values_of
from ..rope import check_tables
from ..runtime.launch import can_overlap, check, check_array, empty, launch, on_host, zeros
from . import decode_attention_parts as parts
from .decode_attention_loops import make_attend_plain, make_attend_tensor
from .decode_attention_parts import LOG2E, MAX_SPLITS, arrive_last, quotient

PREFETCHED = 512  # keys of a split, at most
FEW_HEADS = 16  # with at most so many key heads in a launch, most multiprocessors are idle
WIDE_BLOCK = 512  # accumulators of a warp with which 8 warps still fit into the registers


@dataclass(frozen=True)
class Config:
    """How a block processes its keys. `warps` and `keys` change the order of additions; `ahead` does not change the result."""

    warps: int  # of a block
    ahead: bool  # load the next keys while computing on these, the first ones before qkv is ready
    keys: int  # of a split, at least


def choose(D: int, heads: int, key_heads: int) -> Config:
    """-> the tuned configuration. Measured on one H200 with bench/tune_decode.py.

    D: width of a head. heads: query heads of a block. key_heads: of the launch, over all rows. With few key heads, a launch
    takes as long as one block: so many warps share a split that each has one round of keys. Many key heads keep the memory
    busy anyway, and small blocks hide each other's latency.
    """
    few = key_heads <= FEW_HEADS and heads * D <= WIDE_BLOCK
    if few:
        return Config(warps=12, ahead=False, keys=parts.FEW_CHUNK)
    return Config(warps=4, ahead=False, keys=parts.CHUNK)


# ----------------------------------------------------------------------------- reference
def decode_attention_ref(
    qkv_BP, k_RGSD, v_RGSD, lengths_B, tables_BM, cos_PR, sin_PR, q_w_D, k_w_D, eps, scale
):
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
            k_RGSD[blocks[-1], :, t % S], v_RGSD[blocks[-1], :, t % S] = k_NGD[i], v_NGD[i]
        if not ((blocks >= 0) & (blocks < R)).all():
            o_BHD[b] = np.nan
            continue
        q_GXD = q_NHD[i].reshape(G, H // G, D)
        k_GSD, v_GSD = (
            gather_sequence_ref(x, blocks, t + 1).astype(wide) for x in (k_RGSD, v_RGSD)
        )
        s_GXS = q_GXD @ k_GSD.swapaxes(1, 2) * wide.type(scale)
        p_GXS = np.exp(s_GXS - s_GXS.max(-1, keepdims=True))
        o_BHD[b] = (p_GXS @ v_GSD / p_GXS.sum(-1, keepdims=True)).reshape(H, D)
    return o_BHD.reshape(-1, H * D)


# ----------------------------------------------------------------------------- kernel
def heads_of(half: bool, group: int) -> int:
    """-> query heads of a block. half: bf16. group: query heads that share a key head"""
    return 16 if half and group > 8 else 8


def make_begin(D, S, half, overlap, ready, config, load_first):
    """-> key_range, begin

    key_range(split, n) -> (lo, hi, used): a split has keys lo .. hi - 1 of n; `used` splits have keys
    begin(next_k, next_v, k, v, lengths_B, tables, M, R, G) -> (t, pages, own, live): waits until qkv is ready. t: position of
    the block's token; pages: where the keys of its sequence are (decode_attention_loops.py); own: the table's entry for t;
    live: False if the sequence is idle. While it waits, a block prefetches its first keys and values, and with config.ahead
    each warp loads its first ones into registers (load_first).
    """
    LINE, MOST = 64 if half else 32, PREFETCHED * D  # elements
    ENTRIES = 32  # of a table, in a line of 128 bytes
    THREADS, AHEAD = 32 * config.warps, config.ahead
    split_keys = parts.make_split_keys(config.keys)
    entry_of, start_of = make_block_table(S, D)

    @device
    def key_range(split, n):
        keys = split_keys(n)
        lo, used = split * keys, quotient(n + keys - 1, keys)
        return lo, lo + keys if lo + keys < n else n, used

    @device
    def prefetch_keys(next_k, next_v, k, v, pages, t):
        tables, first, R, stride, head = pages
        lo, hi, _ = key_range(int64(cuda.blockIdx.x), t + 1)
        if AHEAD:  # the new key is not in the cache yet
            load_first(next_k, next_v, k, v, pages, lo, hi if hi < t else t)
        count = (hi - lo) * D
        count = count if count < MOST else int64(MOST)
        for i in range(cuda.threadIdx.x * LINE, count, THREADS * LINE):
            n = lo + i // D
            at = start_of(entry_of(tables, first, n), n, R, stride, head) + i % D
            prefetch(k, at)
            prefetch(v, at)

    @device
    def begin(next_k, next_v, k, v, lengths_B, tables, M, R, G):
        g, b = uint32(cuda.blockIdx.y), int64(cuda.blockIdx.z)
        first = uint32(uint32(b) * uint32(M))
        stride, head = uint32(uint32(G) * uint32(S * D)), uint32(g * uint32(S * D))
        pages = tables, first, uint32(R), stride, head
        if overlap:
            let_next_start()
            if not ready:
                wait_for_previous()
        for i in range(cuda.threadIdx.x * ENTRIES, M, THREADS * ENTRIES):
            prefetch(tables, uint32(first + uint32(i)))
        t = int64(lengths_B[b])
        live, own = t >= 0 and t < M * S, uint32(0)
        if live:
            own = entry_of(tables, first, t)
        if overlap and ready:
            if live:
                prefetch_keys(next_k, next_v, k, v, pages, t)
            wait_for_previous()
        return t, pages, own, live

    return key_range, begin


def make_combine(D, HEADS, WARPS):
    """-> combine(o, to, count, ...): merge the warps' results; with several splits, the last block merges those of all splits.

    Writes `count` heads to o, from o[to] on. index: number of the block's row and heads in the launch; it selects the counter
    and the partial results.
    """
    merge = parts.make_merge(D, HEADS, WARPS)
    gather, finish, merge_splits = merge.gather, merge.finish, merge.merge_splits
    store_partial = merge.store_partial
    SIZE, THREADS = HEADS * D, 32 * WARPS

    @device
    def combine(
        o, to, count, acc_s, m_s, l_s, weight_s, partial, m_partial, l_partial, counters, index,
        split, splits, used,
    ):  # fmt: skip
        acc, first = cuda.local.array(4, float32), index * splits
        for j in range(4 * cuda.threadIdx.x, SIZE, 4 * THREADS):
            top, total = gather(acc, acc_s, m_s, l_s, j)
            if used > 1:
                store_partial(partial, m_partial, l_partial, first + split, j, acc, top, total)
            else:
                finish(o, to, count, j, acc, total)
        if used > 1 and arrive_last(counters, index, used):
            merge_splits(
                o, to, count, acc_s, l_s, weight_s, partial, m_partial, l_partial, first, used
            )

    return combine


@functools.cache
def make_decode_kernel(D, S, GROUP, half, normalise, overlap, ready, config):
    """-> (kernel, query heads of a block, passes over the keys of a group). Launch with 32 * config.warps threads.

    S: tokens of a block of the cache. GROUP: H / G. half: bf16. normalise: QK-norm. overlap: the kernel may start before the
    previous one has ended (see wait_for_previous in primitives/ptx.py). ready: lengths, tables and the cache may be read before
    that.
    """
    HEADS, WARPS = heads_of(half, GROUP), config.warps
    AHEAD = config.ahead and half and overlap and ready  # the first keys are loaded early
    CHUNKS, THREADS = -(-GROUP // HEADS), 32 * WARPS
    QUERIES, SIZE, ROWS = HEADS * D, WARPS * HEADS * D, WARPS * HEADS
    WEIGHTS, KEYS, VALUES = MAX_SPLITS * HEADS, (2, D // 16, 2), (D // 8, 2)
    element = types.uint16 if half else float32
    new_heads = parts.make_new_heads(D, GROUP, HEADS, WARPS, normalise)
    load_first, attend = (make_attend_tensor if half else make_attend_plain)(
        D, S, HEADS, WARPS, config.ahead
    )
    key_range, begin = make_begin(D, S, half, overlap, ready, config, load_first)
    start_of = make_block_table(S, D)[1]
    combine = make_combine(D, HEADS, WARPS)

    @kernel(THREADS)
    def decode_attention_kernel(
        o, partial, m_partial, l_partial, counters, k, v, qkv, lengths_B, tables, q_w_D, k_w_D, cos, sin,
        G, M, R, eps, scale,
    ):  # fmt: skip
        """Grid (splits, G, B), block THREADS. All arrays flat.

        partial, m_partial, l_partial: acc, m, l of (B, G, CHUNKS, splits); counters (B G CHUNKS), zeros before and after.
        """
        # Numba aligns a shared array to its element size, but these two are read 16 bytes at a time
        q_s = cuda.shared.array(QUERIES, element, alignment=16)
        acc_s = cuda.shared.array(SIZE, float32, alignment=16)
        weight_s = cuda.shared.array(WEIGHTS, float32)
        m_s, l_s = cuda.shared.array(ROWS, float32), cuda.shared.array(ROWS, float32)
        next_k, next_v = cuda.local.array(KEYS, uint32), cuda.local.array(VALUES, uint32)
        split, splits = int64(cuda.blockIdx.x), int64(cuda.gridDim.x)
        g, b = int64(cuda.blockIdx.y), int64(cuda.blockIdx.z)
        out = (b * G + g) * GROUP * D
        t, pages, own, live = begin(next_k, next_v, k, v, lengths_B, tables, M, R, G)
        if not live:
            for i in range(cuda.threadIdx.x, GROUP * D if split == 0 else 0, THREADS):
                store1(o, out + i, float32(0.0))
            return
        lo, hi, used = key_range(split, t + 1)
        if split >= used:
            return
        x = b * (G * GROUP + 2 * G) * D  # the token's query heads, then its keys, its values
        key, value = x + (G * GROUP + g) * D, x + (G * GROUP + G + g) * D
        to = start_of(own, t, *pages[2:])
        for chunk in range(CHUNKS):
            owner, h0 = split == used - 1 and chunk == 0 and own < R, chunk * HEADS
            new_heads(
                q_s, k, v, qkv, x + g * GROUP * D, key, value, to, owner, h0, q_w_D, k_w_D, cos, sin, t, eps,
            )  # fmt: skip
            cuda.syncthreads()  # the queries, and the new key and value in the cache
            ahead = next_k, next_v, t if AHEAD and chunk == 0 else lo
            attend(acc_s, m_s, l_s, q_s, *ahead, k, v, pages, lo, hi, scale * LOG2E)
            cuda.syncthreads()
            combine(
                o, out + h0 * D, GROUP - h0, acc_s, m_s, l_s, weight_s, partial, m_partial, l_partial,
                counters, (b * G + g) * CHUNKS + chunk, split, splits, used,
            )  # fmt: skip
            if CHUNKS > 1:
                cuda.syncthreads()  # all warps have finished with shared memory

    return decode_attention_kernel, HEADS, CHUNKS


# ----------------------------------------------------------------------------- launcher
# (device, stream of the launch or the capture, size) -> zeros; every launch restores the zeros. Never freed, because CUDA graphs
# keep the address, and outside of any memory pool: in a graph's pool, an earlier graph of that pool could write to the memory.
_counters: dict = {}


def _zero_counters(like, n):
    if isinstance(like, SimArray):
        return zeros(like, n, np.int32)
    n = max(1 << (n - 1).bit_length(), 1 << 12)
    key = like.device.id, cupy().cuda.get_current_stream().ptr, n
    if key not in _counters:
        _counters[key] = upload(bytes(4 * n)).view(np.int32)
    return _counters[key]


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
    batch_invariant: bool = False,
) -> Array:
    """Attention of one new token per sequence -> o (B, H D) like qkv. Appends the tokens' keys and values to the cache.

    qkv (B, (H + 2G) D) and the caches k, v (R, G, S, D): all float32 or all bf16. lengths (B,) and tables (B, M): int32, in
    device memory; the host does not read their values. Sequences may share blocks, but not the one that they append to. cos,
    sin (P, D/2) with P >= M S and the norm weights (D,), both or neither: float32. eps: of QK-norm. scale: factor of the scores.
    cache_ready: the previous kernel writes neither the cache nor lengths or tables, so they may be read before it ends.
    batch_invariant: a row's bits do not depend on the number of rows; otherwise they may differ between few rows and many.

    An entry with a length outside 0 .. M S - 1 is idle: o[b] = 0. If a block that it needs is not in 0 .. R - 1, this raises
    ValueError on the CPU; on a GPU the host does not know it, and o[b] becomes NaN. Raises ValueError or TypeError if shapes or
    dtypes do not match; on a GPU S must be a multiple of 16.
    """
    op = "decode_attention"
    given = (qkv_BP, k_RGSD, v_RGSD, lengths_B, tables_BM, cos_PR, sin_PR, q_w_D, k_w_D)
    weights = _check(op, *given)
    (R, G, S, D), (B, P), M = k_RGSD.shape, qkv_BP.shape, tables_BM.shape[1]
    H = P // D - 2 * G
    if on_host(*given[:7], *weights):
        lengths = np.where(lengths_B < M * S, lengths_B + 1, 0)
        check_blocks(op, tables_BM, lengths, R, S)
        return decode_attention_ref(*given, eps, scale)
    check(D in WIDTHS, f"{op}: head dim {D}, the GPU kernels support {WIDTHS}")
    check_block_size(op, R, G, S, D)
    check(max(B, G) < 2**16, f"{op}: {B} rows of {G} heads in one launch, at most 65535 of each")
    o_BC, group, half = empty(qkv_BP, (B, H * D)), H // G, qkv_BP.dtype != np.float32
    flat = [x.reshape(-1) for x in (k_RGSD, v_RGSD, qkv_BP)]
    check(on_16_bytes(*flat[:2]), f"{op}: the cache does not begin at a multiple of 16 bytes")
    config = choose(D, heads_of(half, group), G if batch_invariant else B * G)
    overlap, splits = can_overlap(qkv_BP), parts.splits_of(M * S, config.keys)
    variant = D, S, group, half, bool(weights), overlap, cache_ready, config
    decode_kernel, heads, chunks = make_decode_kernel(*variant)
    blocks = B * G * chunks
    partial, m_partial, l_partial = (
        empty(qkv_BP, n * (splits if splits > 1 else 0), np.float32)
        for n in (blocks * heads * D, blocks * heads, blocks * heads)
    )
    counters = _zero_counters(qkv_BP, blocks)
    cos, sin = cos_PR.reshape(-1), sin_PR.reshape(-1)
    norms = weights or (cos, cos)  # a kernel argument must not be None
    arrays = (
        o_BC.reshape(-1),
        partial,
        m_partial,
        l_partial,
        counters,
        *flat,
        lengths_B,
        tables_BM.reshape(-1),
        *norms,
    )
    scalars = (G, M, R, np.float32(eps), np.float32(scale))
    grid, threads = (splits, G, B), 32 * config.warps
    launch(decode_kernel, grid, threads, *arrays, cos, sin, *scalars, overlap=overlap)
    return o_BC


def _check(op, qkv_BP, k_RGSD, v_RGSD, lengths_B, tables_BM, cos_PR, sin_PR, q_w_D, k_w_D):
    """Raise ValueError or TypeError if the arguments of decode_attention do not match -> the norm weights, () if None."""
    _, G, S, D = check_cache(op, k_RGSD, v_RGSD)
    check_tables(op, cos_PR, sin_PR, D)
    check_array(op, "qkv", qkv_BP, (None, None), (k_RGSD.dtype.name,))
    B, P = qkv_BP.shape
    n, known = check_block_tables(op, tables_BM, B, S), cos_PR.shape[0]
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
