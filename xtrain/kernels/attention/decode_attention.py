"""One new token per sequence, in one kernel: QK-norm, RoPE, append to the cache, attention.

    qkv: (B, P), P = (H + 2G) D    k, v: (R, G, S, D), a layer's cache    tables: (B, M)
    o: (B, C), C = H D

Token b has position t = lengths[b]. Position p of its sequence is in block tables[b, p // S] of the
cache, at offset p % S (kernels/decoding/kv_cache.py); K and V are the keys and values of positions
0 .. t:
    q, k, v = heads of qkv[b];   q, k normed if there are weights, and rotated to position t
                                 (qk_norm_rope.py)
    cache[tables[b, t // S], :, t % S] = k, v
    o = softmax(scale q K^T) V
With a window W > 0, the token sees only the last W keys, itself among them (key_bounds.py).
An entry with a length outside 0 .. M S - 1 is idle: nothing is appended, and o[b] = 0. If a block
that it needs is not in 0 .. R - 1, o[b] = NaN, and nothing is read or written out of bounds.

A block reads every key and value of one key head once, for all H / G query heads that share it:
grouped-query attention without copies. (Groups of more than 16 heads, in float32 of more than 8,
are read several times; with heads of 256 those of more than 8, in float32 of more than 4.) A single
block would be slow for a long context, and few rows would leave most of the GPU idle. So the keys
of a row are split among up to 32 blocks (flash-decoding, Dao et al. 2023). Each block writes m, l,
acc of its keys to memory. The block that finishes last, which an atomic counter determines, merges
them in the order of the keys, so the result does not depend on the order of arrival:

    M = max m_i    o = sum_i exp(m_i - M) acc_i / sum_i exp(m_i - M) l_i

How the keys are split depends only on the row's length, which is read on the device: the same CUDA
graph serves all lengths, and a row's bits depend neither on the other rows nor on where its keys
are, nor on S. A launch of few rows uses more warps per block and shorter splits than one of many
(choose), which changes the order of additions. In batch-invariant mode exact_decode_attention.py
adds in the order of training instead, where it fits (fits_exactly). The host knows only the largest
possible number of splits, and starting a block that has nothing to do costs a microsecond. So there
are as many blocks as the GPU runs at a time. Each counts the splits of all rows (count_items), and
takes items i, i + grid, ...: one split of one key head. An idle entry has none, so all blocks have
about as much to do. For every item a block computes its queries from qkv, which costs less than
another kernel. The block of the last keys appends the new key and value, then reads them back from
the cache like all others. Keys and values of earlier tokens were written long before: while the GEMM
that produces qkv still runs, a block prefetches the first ones.
Finding them takes two dependent reads, the length and an entry of the table, so the blocks prefetch
all tables before they know the lengths.

Rows may be successive tokens of one sequence (speculative decoding): `previous` names the row of the
token before, with the same table. Then a block computes the keys and values of all rows that its
split has, and writes them to the cache. Several blocks write the same bits to the same place, and each
reads what it has written itself, so none waits for another.

    bf16        tensor cores, compute capability 8.0 and up; also for a cache of codes (kv_codes.py)
    float32     without them                                  both in decode_attention_loops.py
Bytes moved: read 2 (t + 1) G D elements of the cache per token, 2 (t + 1) G (D + 4) bytes of codes;
everything else is small.
"""

import functools
from dataclasses import dataclass

import numpy as np

from ...device import Array
from ..decoding.gemv_tensor_cores import MULTIPROCESSORS
from ..decoding.kv_cache import (
    Pages,
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
from ..primitives.ptx import device, kernel, let_next_start, store1, wait_for_previous
from ..primitives.tiles import WIDTHS
from ..qk_norm_rope import qk_norm_rope_ref, values_of
from ..rope import check_tables
from ..runtime.compiler import cuda, float32, int32, int64, types, uint32
from ..runtime.invariance import is_batch_invariant
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
from .decode_attention_parts import (
    LOG2E,
    MAX_SPLITS,
    Cache,
    Inputs,
    Partials,
    Places,
    Shared,
)
from .decode_attention_schedule import Batch, Schedule, make_items
from .exact_decode_attention import exact_decode_attention
from .flash_attention import use_hopper

FEW_HEADS = 16  # with at most so many key heads in a launch, most multiprocessors are idle
MANY_HEADS = 64  # with more, there are enough splits for all multiprocessors if they are longer
CODE_WIDTHS = tuple(D for D in WIDTHS if D >= 32)  # of heads, if the cache has codes
MOST_ROWS = 1024  # of a launch: a block keeps two numbers of each in shared memory


@dataclass(frozen=True)
class Config:
    """How a block processes its keys. `warps`, `keys` and `splits` change the order of additions,
    the others not the result."""

    warps: int  # of a block
    blocks: int  # per multiprocessor
    keys: int  # of a split, about
    splits: int  # of a row, at most
    prefetched: int  # keys of a split that a block prefetches before it loads the queries


def choose(D: int, group: int, half: bool, key_heads: int) -> Config:
    """Return the tuned configuration. Measured on one H200 with bench/tune_decode.py.

    D: width of a head. group: query heads that share a key head. half: bf16. key_heads: of the
    launch, over all rows. With few key heads, a launch takes as long as one block: so many warps
    share a split that each has one round of keys, as far as registers and shared memory permit.
    Many key heads keep the memory busy anyway: small blocks hide each other's latency, and long
    splits save merging.
    """
    heads = heads_of(half, group, D)
    if key_heads <= FEW_HEADS and min(heads, group) * D <= 512:
        splits = min(parts.MAX_SPLITS, MULTIPROCESSORS // key_heads)  # no block has two items
        return Config(12 if half else 8, 1, parts.FEW_CHUNK, splits, prefetched=512)
    blocks = 2
    if heads * D <= 1024:
        blocks = 4 if heads * D <= 512 else 3
    keys = parts.CHUNK if key_heads <= MANY_HEADS else 4 * parts.CHUNK
    return Config(4, blocks, keys, parts.MAX_SPLITS, prefetched=128)


# ----------------------------------------------------------------------------- reference
def decode_attention_ref(
    qkv_BP,
    k_RGSD,
    v_RGSD,
    lengths_B,
    tables_BM,
    cos_PR,
    sin_PR,
    q_w_D,
    k_w_D,
    eps,
    scale,
    window=0,
    scales_RGS2=None,
):
    """decode_attention in NumPy -> o (B, C), whatever rows belong together. Appends to the caches in
    place. Computes in qkv's dtype, at least in float32."""
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
        block = tables_BM[b, t // S]
        if 0 <= block < R:
            new = (x[i].astype(qkv_BP.dtype) for x in (k_NGD, v_NGD))
            write_token_ref(k_RGSD, v_RGSD, scales_RGS2, block, t % S, *new)
    for i, b in enumerate(live_B):
        t = lengths_B[b]
        blocks = tables_BM[b, : t // S + 1]
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
def heads_of(half: bool, group: int, D: int) -> int:
    """Return the query heads of a block; on tensor cores some may be absent.

    half: bf16.
    group: query heads that share a key head.
    D: width of a head. The results of all warps must fit into 48 KB of shared memory.
    """
    wide = D > 128
    if half:
        return 16 if group > 8 and not wide else 8
    return min(group, 4 if wide else 8)


def make_combine(D, HEADS, WARPS):
    """Return combine(o, to, count, shared, partials, index, split, splits, used).

    It merges the results of the warps; the last of several splits merges those of all splits.
    Writes `count` heads to o, from o[to] on.
    index: number of the block's row and heads in the launch; selects the counter and the partials.
    splits: for which there is room.  used: that have keys.
    """
    merge = parts.make_merge(D, HEADS, WARPS)
    gather = merge.gather
    finish = merge.finish
    store_partial = merge.store_partial
    merge_splits = merge.merge_splits
    SIZE = HEADS * D
    THREADS = 32 * WARPS

    @device
    def combine(o, to, count, shared, partials, index, split, splits, used):
        acc = cuda.local.array(4, float32)
        first = index * splits
        for j in range(4 * cuda.threadIdx.x, SIZE, 4 * THREADS):
            top, total = gather(acc, shared, j)
            if used > 1:
                store_partial(partials, first + split, j, acc, top, total)
            else:
                finish(o, to, count, j, acc, total)
        if used > 1 and arrive_last(partials.counters, index, used, shared.last):
            merge_splits(o, to, count, shared, partials, first, used)

    return combine


@functools.cache
def make_decode_kernel(
    D, S, GROUP, half, normalise, overlap, ready, config, WINDOW=0, CODES=False, RELATED=False
):
    """Return the kernel, the heads of a partial result, the passes over the keys of a group.

    S: tokens of a block of the cache.
    GROUP: H / G.
    half: bf16.
    normalise: QK-norm.
    overlap: the kernel may start before the previous one has ended (wait_for_previous in
    primitives/ptx.py).
    ready: lengths, tables and the cache may be read before that.
    CODES: k and v are codes, in bf16 only, and scales their scales; otherwise scales is not used.
    RELATED: rows may be successive tokens of one sequence.
    """
    HEADS = heads_of(half, GROUP, D)
    LIVE = min(HEADS, GROUP)  # heads whose results are kept
    CHUNKS = -(-GROUP // HEADS)
    WARPS = config.warps
    THREADS = 32 * WARPS
    QUERIES = HEADS * D
    SIZE = WARPS * LIVE * D
    ROWS = WARPS * LIVE
    # of keys (make_attend_plain), then of splits (merge_splits)
    WEIGHTS = (MAX_SPLITS if half else max(MAX_SPLITS, THREADS)) * LIVE
    STARTS = MOST_ROWS + 1
    element = types.uint16 if half else float32
    early = overlap and ready  # keys are prefetched before qkv is there
    new_heads = parts.make_new_heads(D, GROUP, HEADS, WARPS, normalise, CODES)
    related_heads = parts.make_related_heads(D, S, GROUP, WARPS, normalise, CODES)
    if half:
        attend = make_attend_tensor(D, S, HEADS, LIVE, WARPS, WINDOW > 0, CODES)
    else:
        attend = make_attend_plain(D, S, HEADS, LIVE, WARPS, WINDOW > 0)
    items = make_items(D, S, half, config, WINDOW, CODES)
    count_items, place_of, prefetch_tables, prefetch_keys = items
    entry_of, start_of = make_block_table(S, D)
    combine = make_combine(D, LIVE, WARPS)

    @device
    def attend_items(o, partials, cache, inputs, batch, shared, schedule, splits, scale):
        G = batch.G
        blocks = int64(cuda.gridDim.x)
        begin = int64(cuda.blockIdx.x)
        end = int64(schedule.first[batch.B]) * G
        if early and begin >= end:
            wait_for_previous()
        number = begin
        while number < end:  # a range would divide by the number of blocks
            item = place_of(number, schedule, batch)
            b = item.b
            g = item.g
            t = item.t
            pages = Pages(batch.tables, item.first, uint32(batch.R), item.stride, item.head)
            own = entry_of(pages, t)
            if early:
                prefetch_keys(cache, pages, item.lo, item.hi)
                if number == begin:
                    wait_for_previous()  # it produces qkv
            number += blocks
            out = (b * G + g) * GROUP * D
            x = b * (G * GROUP + 2 * G) * D  # the token's query heads, then its keys, its values
            places = Places(
                query=x + g * GROUP * D,
                key=x + (G * GROUP + g) * D,
                value=x + (G * GROUP + G + g) * D,
                to=start_of(own, t, pages),
            )
            for chunk in range(CHUNKS):
                owner = item.split == item.splits - 1 and chunk == 0 and own < batch.R
                h0 = chunk * HEADS
                new_heads(shared.q, cache, inputs, places, t, h0, owner and not RELATED)
                if RELATED and chunk == 0:
                    related_heads(cache, inputs, pages, batch, item)
                cuda.syncthreads()  # the queries, and the new key and value in the cache
                attend(shared, cache, pages, item.lo, item.hi, t + 1 - WINDOW, scale * LOG2E)
                cuda.syncthreads()  # the results of all warps
                index = (b * G + g) * CHUNKS + chunk
                to = out + h0 * D
                count = GROUP - h0
                combine(o, to, count, shared, partials, index, item.split, splits, item.splits)
        width = G * GROUP * D
        row = begin
        while row < batch.B:
            if schedule.t[row] < 0:  # idle
                for j in range(cuda.threadIdx.x, width, THREADS):
                    store1(o, row * width + j, float32(0.0))
            row += blocks

    @kernel(THREADS, config.blocks if half else 0)  # in float32 registers would spill
    def decode_attention_kernel(
        o,
        partial,
        m_partial,
        l_partial,
        counters,
        k,
        v,
        scales,
        qkv,
        lengths_B,
        tables,
        previous_B,
        q_w_D,
        k_w_D,
        cos,
        sin,
        B,
        G,
        M,
        R,
        splits,
        eps,
        scale,
    ):
        """Compute items p, p + grid, ... with block p of any number. All arrays flat.

        B: rows, at most MOST_ROWS.
        partial, m_partial, l_partial: acc, m, l of (B, G, CHUNKS, splits).
        counters: (B G CHUNKS), zeros before and after.
        """
        # Numba aligns a shared array to its element size; these two are read 16 bytes at a time
        q_s = cuda.shared.array(QUERIES, element, alignment=16)
        acc_s = cuda.shared.array(SIZE, float32, alignment=16)
        weight_s = cuda.shared.array(WEIGHTS, float32)
        m_s = cuda.shared.array(ROWS, float32)
        l_s = cuda.shared.array(ROWS, float32)
        first_s = cuda.shared.array(STARTS, int32)
        t_s = cuda.shared.array(STARTS, int32)
        sums_s = cuda.shared.array(WARPS, int32)
        last_s = cuda.shared.array(1, int32)
        partials = Partials(partial, m_partial, l_partial, counters)
        cache = Cache(k, v, scales)
        inputs = Inputs(qkv, q_w_D, k_w_D, cos, sin, eps)
        batch = Batch(tables, previous_B, B, G, M, R)
        shared = Shared(q_s, acc_s, m_s, l_s, weight_s, last_s)
        schedule = Schedule(first_s, t_s)
        if overlap:
            let_next_start()
            if not ready:
                wait_for_previous()
        prefetch_tables(tables, int64(B) * M)
        count_items(schedule, sums_s, lengths_B, B, M * S)
        attend_items(o, partials, cache, inputs, batch, shared, schedule, splits, scale)

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
    previous_B: Array | None = None,
) -> Array:
    """Append one token per sequence to the cache and return its attention, o (B, H D) like qkv.

    qkv (B, (H + 2G) D) and the caches k, v (R, G, S, D): all float32 or all bf16. lengths (B,) and
    tables (B, M): int32, in device memory; the host does not read their values. Sequences may share
    blocks, but not the one that they append to. cos, sin (P, D/2) with P >= M S and the norm
    weights (D,), both or neither: float32. eps: of QK-norm. scale: factor of the scores.
    window: keys that a token sees, 0 for all.
    scales (R, G, S, 2): if given, k and v are uint8 codes and these their scales (kv_codes.py); on
    a GPU qkv is bf16 then, and D is at least 32.
    previous (B,) int32: the row of the token before that of each row, of a sequence of which several
    tokens are in the launch, one position after the other, with the same blocks; -1: it is in the
    cache. None: all are. At most MOST_ROWS rows then.
    cache_ready: the previous kernel writes neither the cache nor lengths or tables, so they may be
    read before it ends.

    An entry with a length outside 0 .. M S - 1 is idle: o[b] = 0. If a block that it needs is not
    in 0 .. R - 1, this raises ValueError on the CPU; on a GPU the host does not know it, and o[b]
    becomes NaN. Raises ValueError or TypeError if shapes or dtypes do not match; on a GPU S must be
    a multiple of 16.
    """
    op = "decode_attention"
    arguments = (qkv_BP, k_RGSD, v_RGSD, lengths_B, tables_BM, cos_PR, sin_PR, q_w_D, k_w_D)
    codes = scales_RGS2 is not None
    weights = _check(op, *arguments, scales_RGS2)
    check(window >= 0, f"{op}: a window of {window} keys")
    R, G, S, D = k_RGSD.shape
    B, P = qkv_BP.shape
    if previous_B is not None:
        check_int32(op, "previous", previous_B, B)
        check(B <= MOST_ROWS, f"{op}: {B} rows of related tokens, expected at most {MOST_ROWS}")
    M = tables_BM.shape[1]
    H = P // D - 2 * G
    if on_host(*arguments[:7], *weights, *([scales_RGS2] if codes else [])):
        lengths = np.where(lengths_B < M * S, lengths_B + 1, 0)
        check_blocks(op, tables_BM, lengths, R, S)
        return decode_attention_ref(*arguments, eps, scale, window, scales_RGS2)
    _check_for_gpu(op, qkv_BP, k_RGSD, v_RGSD, codes)
    o_BC = empty(qkv_BP, (B, H * D))
    cos = cos_PR.reshape(-1)
    sin = sin_PR.reshape(-1)
    if is_batch_invariant():
        check(not codes and fits_exactly(qkv_BP, D), f"{op}: no kernel in batch-invariant mode")
        inputs = qkv_BP, k_RGSD, v_RGSD, lengths_B, tables_BM, cos, sin, weights
        return exact_decode_attention(o_BC, *inputs, eps, scale, cache_ready, window, previous_B)
    group = H // G
    half = qkv_BP.dtype != np.float32
    config = choose(D, group, half, B * G)
    overlap = can_overlap(qkv_BP)
    seen = min(M * S, window + 15) if window else M * S
    splits = parts.splits_of(seen, config.keys, config.splits)
    variant = D, S, group, half, bool(weights), overlap, cache_ready, config, window, codes
    decode_kernel, heads, chunks = make_decode_kernel(*variant, previous_B is not None)
    norms = weights or (cos, cos)  # a kernel argument must not be None
    scales = cos if scales_RGS2 is None else scales_RGS2.reshape(-1)
    cache = k_RGSD.reshape(-1), v_RGSD.reshape(-1), scales
    for low in range(0, B, MOST_ROWS):
        rows = slice(low, min(low + MOST_ROWS, B))
        n = rows.stop - low
        count = n * G * chunks
        room = count * heads * splits if splits > 1 else 0
        partials = (empty(qkv_BP, room * width, np.float32) for width in (D, 1, 1))
        arrays = (
            o_BC[rows].reshape(-1),
            *partials,
            zero_counters(qkv_BP, count, "decode_attention"),
            *cache,
            qkv_BP[rows].reshape(-1),
            lengths_B[rows],
            tables_BM[rows].reshape(-1),
            lengths_B[rows] if previous_B is None else previous_B,
            *norms,
            cos,
            sin,
        )
        scalars = n, G, M, R, splits, np.float32(eps), np.float32(scale)
        grid = min(n * G * splits, config.blocks * MULTIPROCESSORS)
        launch(decode_kernel, grid, 32 * config.warps, *arrays, *scalars, overlap=overlap)
    return o_BC


def fits_exactly(qkv_BP: Array, D: int) -> bool:
    """Return whether decode_attention has a kernel with the bits of training's forward, for heads
    of width D: where training uses wgmma."""
    B, P = qkv_BP.shape
    return not on_host(qkv_BP) and use_hopper(qkv_BP.reshape(B, 1, P // D, D))


def _check_for_gpu(op, qkv_BP, k_RGSD, v_RGSD, codes):
    D = k_RGSD.shape[3]
    widths = CODE_WIDTHS if codes else WIDTHS
    check(D in widths, f"{op}: head dim {D}, the GPU kernels support {widths}")
    check_block_size(op, *k_RGSD.shape)
    half = qkv_BP.dtype != np.float32
    check(half or not codes, f"{op}: float32, the GPU kernel for codes is for bf16")
    aligned = on_16_bytes(k_RGSD.reshape(-1), v_RGSD.reshape(-1))
    check(aligned, f"{op}: the cache does not begin at a multiple of 16 bytes")


def _check(
    op, qkv_BP, k_RGSD, v_RGSD, lengths_B, tables_BM, cos_PR, sin_PR, q_w_D, k_w_D, scales_RGS2
):
    """Raise ValueError or TypeError if the arguments of decode_attention do not match -> the norm
    weights, () if None."""
    if scales_RGS2 is None:
        _, G, S, D = check_cache(op, k_RGSD, v_RGSD)
        dtypes = (dtype_name(k_RGSD.dtype),)
    else:
        _, G, S, D = check_codes(op, k_RGSD, v_RGSD, scales_RGS2)
        dtypes = FLOATS
    check_tables(op, cos_PR, sin_PR, D)
    check_array(op, "qkv", qkv_BP, (None, None), dtypes)
    B, P = qkv_BP.shape
    n = check_block_tables(op, tables_BM, B, S)
    P_cos = cos_PR.shape[0]
    check(n <= P_cos, f"{op}: cos and sin of {P_cos} positions, the block tables hold {n} tokens")
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
