"""One new token per sequence, in one kernel: QK-norm, RoPE, append to the cache, attention.

    qkv: (B, P), P = (H + 2G) D    k, v: (R, G, S, D), a layer's cache    o: (B, C), C = H D

Token b stands at position t = lengths[b] of cache row r = rows[b]:
    q, k, v = heads of qkv[b];   q, k normed if there are weights and turned to position t   (qk_norm_rope.py)
    cache[r, :, t] = k, v
    o = softmax(scale q cache_k[r, :, 0..t]^T) cache_v[r, :, 0..t]
A row with rows[b] < 0, or a length outside 0 .. S - 1, is idle: nothing is appended, and o[b] = 0.

A block reads every key and value of one key head once, for all H / G query heads that share it (grouped queries without
copies; in groups of more than 16 it does so twice or more). One block alone would take long over a long context, and few
rows would leave most of the GPU idle. So the keys of a row are split among up to 32 blocks (flash-decoding, Dao et
al. 2023). Each leaves m, l, acc of its keys in memory; the block that comes last, which an atomic counter tells, merges
them in the order of the keys, so that bits do not change with the order of arrival:

    M = max m_i    o = sum_i exp(m_i - M) acc_i / sum_i exp(m_i - M) l_i

How the keys are split depends on the length of the row alone, which is read on the device: the same graph serves all
lengths, and a row's bits do not depend on the other rows. Blocks without keys leave at once. A launch of few rows has more warps
a block than one of many (choose), which changes the order of additions, unless it is asked to be batch-invariant.
Every block computes its queries from qkv anew, which costs less than one more kernel. The block of the last keys appends
the new key and value, then reads them back from the cache like all others. Keys and values of earlier tokens were there
long before: while the product that makes qkv still runs, a block asks for them to come nearer.

    bf16        tensor cores, compute capability 8.0 and up
    float32     without them                                  both in _decode_attention_loops.py
Bytes moved: read 2 (t + 1) G D elements of the cache per token; all else is small.
"""

import functools
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int64, types, uint32

from ..device import Array, cupy
from ..simulator import SimArray
from . import _decode_attention_parts as parts
from ._decode_attention_loops import make_attend_plain, make_attend_tensor
from ._decode_attention_parts import LOG2E, MAX_SPLITS, arrive_last, quotient
from ._flat import on_16_bytes
from ._launch import can_overlap, check, check_array, empty, launch, on_host, zeros
from ._ptx import (
    device,
    kernel,
    let_next_start,
    prefetch,
    prefetch_run,
    store1,
    wait_for_previous,
)
from ._tiles import WIDTHS
from .kv_cache import check_cache, check_int32
from .qk_norm_rope import qk_norm_rope_ref, values_of
from .rope import check_tables

PREFETCHED = 512  # keys of a split, at most
FEW_HEADS = 16  # key heads of a launch that leave most multiprocessors idle
WIDE_BLOCK = 512  # accumulators of a warp with which 8 warps still fit registers


class Config(NamedTuple):
    """How a row's keys are divided; warps and chunk_keys change the order of additions, the others no bit."""

    warps: int = 4  # of a block; 4 for wide heads
    chunk_keys: int = parts.CHUNK  # of a split, at least
    ahead: bool = False  # a warp asks for its next keys before it deals with these
    runs: bool = False  # keys come nearer in one request, not line by line
    early: bool = True  # the next kernel may begin at once, not only when this one has waited
    at_once: int = parts.AT_ONCE  # partial results that a thread asks for before it adds them
    blocks: int = 0  # per multiprocessor, that the compiler must make room for
    sooner: bool = False  # with `ahead`: it asks for the first ones before it waits for the product


def choose(D: int, heads: int, key_heads: int) -> Config:
    """For heads of D channels, `heads` of a block; key_heads: of the launch. Measured on one H200 with bench/tune_decode.py.

    Few key heads take as long as one: many warps share its keys, and each has all that it can hold under way.
    Many keep memory busy whatever a warp does, and small blocks hide each other's waiting.
    """
    if key_heads <= FEW_HEADS and heads * D <= WIDE_BLOCK:
        return Config(8, parts.CHUNK, ahead=True, runs=True, at_once=16)
    return Config(chunk_keys=parts.CHUNK)


# ----------------------------------------------------------------------------- reference
def decode_attention_ref(
    qkv_BP, k_RGSD, v_RGSD, lengths_B, rows_B, cos_PR, sin_PR, q_w_D, k_w_D, eps, scale
):
    """-> o (B, C). Appends to the caches in place. Computes in qkv's type, or float32 for bf16."""
    G, S, D = k_RGSD.shape[1:]
    H = qkv_BP.shape[1] // D - 2 * G
    o_BHD = np.zeros((len(rows_B), H, D), qkv_BP.dtype)
    live_B = np.flatnonzero((rows_B >= 0) & (lengths_B >= 0) & (lengths_B < S))
    if not live_B.size:
        return o_BHD.reshape(-1, H * D)
    wide = np.result_type(qkv_BP.dtype, np.float32)
    qkv = qkv_BP[live_B].astype(wide)
    tables = cos_PR, sin_PR, H, G, lengths_B[live_B]
    q_NHD, k_NGD, _ = qk_norm_rope_ref(qkv, q_w_D, k_w_D, *tables, eps)
    v_NGD = values_of(qkv, H, G, D)
    for i, b in enumerate(live_B):
        row, t = rows_B[b], lengths_B[b]
        k_RGSD[row, :, t], v_RGSD[row, :, t] = k_NGD[i], v_NGD[i]
        q_GXD = q_NHD[i].reshape(G, H // G, D)
        k_GSD, v_GSD = (x[row, :, : t + 1].astype(wide) for x in (k_RGSD, v_RGSD))
        s_GXS = q_GXD @ k_GSD.swapaxes(1, 2) * wide.type(scale)
        p_GXS = np.exp(s_GXS - s_GXS.max(-1, keepdims=True))
        o_BHD[b] = (p_GXS @ v_GSD / p_GXS.sum(-1, keepdims=True)).reshape(H, D)
    return o_BHD.reshape(-1, H * D)


# ----------------------------------------------------------------------------- kernel
def heads_of(half: bool, group: int) -> int:
    """Query heads of a block"""
    return 16 if half and group > 8 else 8


@functools.cache
def make_prefetch_keys(D, half, chunk_keys, THREADS, runs):
    """-> prefetch_keys(k, v, base, split, n): a block asks for its first keys and values, of n in all"""
    split_keys = parts.make_split_keys(chunk_keys)
    PIECE = 16 * D  # elements: 16 keys
    LINE, MOST = 64 if half else 32, PREFETCHED * D  # elements

    @device
    def prefetch_keys(k, v, base, split, n):
        keys = split_keys(n)
        first = base + split * keys * D
        count = (n - split * keys if n - split * keys < keys else keys) * D
        count = count if count < MOST else int64(MOST)
        if runs:
            for i in range(cuda.threadIdx.x * PIECE, count, THREADS * PIECE):
                size = count - i if count - i < PIECE else int64(PIECE)
                prefetch_run(k, first + i, size)
                prefetch_run(v, first + i, size)
            return
        for i in range(cuda.threadIdx.x * LINE, count, THREADS * LINE):
            prefetch(k, first + i)
            prefetch(v, first + i)

    return prefetch_keys


@functools.cache
def make_decode_kernel(D, GROUP, half, normalise, overlap, ready, config):
    """GROUP: H / G. half: bf16. overlap: see wait_for_previous in _ptx.py. ready: lengths, rows and the cache may be read
    before it.
    """
    HEADS = heads_of(half, GROUP)
    WARPS, chunk_keys, ahead, runs, early, at_once, BLOCKS, sooner = config
    sooner = sooner and ahead and overlap and ready and half
    KEYS, VALUES = (2, max(D // 16, 1), 2), (D // 8, 2)  # registers of a warp's first keys
    CHUNKS, THREADS = -(-GROUP // HEADS), 32 * WARPS
    QUERIES, SIZE, ROWS = HEADS * D, WARPS * HEADS * D, WARPS * HEADS
    WEIGHTS = MAX_SPLITS * HEADS
    element = types.uint16 if half else float32
    new_heads = parts.make_new_heads(D, GROUP, HEADS, WARPS, normalise)
    ask, attend = (make_attend_tensor if half else make_attend_plain)(D, HEADS, WARPS, ahead)
    merge = parts.make_merge(D, HEADS, WARPS, at_once)
    split_keys = parts.make_split_keys(chunk_keys)
    prefetch_keys = make_prefetch_keys(D, half, chunk_keys, THREADS, runs)
    merge_warps, put, merge_splits = merge.merge_warps, merge.put, merge.merge_splits
    finish = merge.finish

    @kernel(THREADS, BLOCKS)
    def decode_attention_kernel(
        o, part, m_part, l_part, counters, k, v, qkv, lengths_B, rows_B, q_w_D, k_w_D, cos, sin,
        G, S, eps, scale,
    ):  # fmt: skip
        """Grid (splits, G, B), block THREADS. All arrays flat.

        part, m_part, l_part: acc, m, l of (B, G, CHUNKS, splits); counters (B G CHUNKS), zeros before and after.
        """
        q_s = cuda.shared.array(QUERIES, element)
        acc_s, weight_s = cuda.shared.array(SIZE, float32), cuda.shared.array(WEIGHTS, float32)
        m_s, l_s = cuda.shared.array(ROWS, float32), cuda.shared.array(ROWS, float32)
        split, splits = int64(cuda.blockIdx.x), int64(cuda.gridDim.x)
        g, b = int64(cuda.blockIdx.y), int64(cuda.blockIdx.z)
        out = (b * G + g) * GROUP * D
        next_k, next_v = cuda.local.array(KEYS, uint32), cuda.local.array(VALUES, uint32)
        if overlap and early:
            let_next_start()
        if overlap and not ready:
            wait_for_previous()
            if not early:
                let_next_start()
        t, row = int64(lengths_B[b]), int64(rows_B[b])
        live = row >= 0 and t >= 0 and t < S
        if overlap and ready:
            if live:
                if sooner:  # the new key is not there yet
                    old, keys = (row * G + g) * S * D, split_keys(t + 1)
                    lo = split * keys
                    ask(next_k, next_v, k, v, old, lo, lo + keys if lo + keys < t else t)
                prefetch_keys(k, v, (row * G + g) * S * D, split, t + 1)
            wait_for_previous()
            if not early:
                let_next_start()
        if not live:
            if split == 0:
                for i in range(cuda.threadIdx.x, GROUP * D, THREADS):
                    store1(o, out + i, float32(0.0))
            return
        keys = split_keys(t + 1)
        lo, used = split * keys, quotient(t + keys, keys)
        if split >= used:
            return
        hi = lo + keys if lo + keys < t + 1 else t + 1
        base = (row * G + g) * S * D
        x = (
            b * (G * GROUP + 2 * G) * D
        )  # where the token's query heads begin, then its keys, its values
        key, value = x + (G * GROUP + g) * D, x + (G * GROUP + G + g) * D
        for chunk in range(CHUNKS):
            owner, h0 = split == used - 1 and chunk == 0, chunk * HEADS
            new_heads(
                q_s, k, v, qkv, x + g * GROUP * D, key, value, base + t * D, owner, h0, q_w_D,
                k_w_D, cos, sin, t, eps,
            )  # fmt: skip
            cuda.syncthreads()  # the queries, and the new key and value in the cache
            asked = t if sooner and chunk == 0 else lo
            keys_of = next_k, next_v, asked, k, v
            attend(acc_s, m_s, l_s, q_s, *keys_of, base, lo, hi, scale * LOG2E)
            cuda.syncthreads()
            merge_warps(acc_s, m_s, l_s)
            last = True
            if used > 1:
                place = (b * G + g) * CHUNKS + chunk
                put(part, m_part, l_part, place * splits + split, acc_s, m_s, l_s)
                last = arrive_last(counters, place, used)
                if last:
                    first = place * splits
                    merge_splits(acc_s, m_s, l_s, weight_s, part, m_part, l_part, first, used)
            if last:
                finish(o, out + h0 * D, acc_s, l_s, GROUP - h0)
            if CHUNKS > 1:
                cuda.syncthreads()  # everybody has left shared memory

    return decode_attention_kernel, HEADS, CHUNKS


# ----------------------------------------------------------------------------- launcher
_counters: dict = {}  # (device, stream, size) -> zeros: a launch leaves them as it found them. Kept: graphs know their address


def _zero_counters(like, n):
    if isinstance(like, SimArray):
        return zeros(like, n, np.int32)
    n = max(1 << (n - 1).bit_length(), 1 << 12)
    key = like.device.id, cupy().cuda.get_current_stream().ptr, n
    if key not in _counters:
        _counters[key] = zeros(like, n, np.int32)
    return _counters[key]


def decode_attention(
    qkv_BP: Array,
    k_RGSD: Array,
    v_RGSD: Array,
    lengths_B: Array,
    rows_B: Array,
    cos_PR: Array,
    sin_PR: Array,
    q_w_D: Array | None,
    k_w_D: Array | None,
    eps: float,
    scale: float,
    cache_ready: bool = False,
    batch_invariant: bool = False,
) -> Array:
    """-> o (B, H D) like qkv; keys and values of the B new tokens are appended to the cache.

    qkv, caches float32 or all bf16; lengths, rows (B,) int32, in the memory of the device: nothing here depends on their
    values. cos, sin (P, D/2), P >= S, and the norm weights (D,), both or none, float32. No two tokens may share a row.
    cache_ready: the kernel launched last writes neither the cache nor lengths, rows; reading them may begin before it ends.
    batch_invariant: a row gets the bits that it gets alone. Otherwise they may differ between few rows and many.
    """
    op = "decode_attention"
    R, G, S, D = check_cache(op, k_RGSD, v_RGSD)
    check_tables(op, cos_PR, sin_PR, D)
    check(cos_PR.shape[0] >= S, f"{op}: tables of {cos_PR.shape[0]} positions, the cache has {S}")
    check_array(op, "qkv", qkv_BP, (None, None), (k_RGSD.dtype.name,))
    B, P = qkv_BP.shape
    H = P // D - 2 * G
    check(P % D == 0 and H > 0 and H % G == 0, f"{op}: qkv of {P} columns, heads of {D}, {G} of k")
    check((q_w_D is None) == (k_w_D is None), f"{op}: give both norm weights or none")
    weights = () if q_w_D is None else (q_w_D, k_w_D)
    for w in weights:
        check_array(op, "norm weight", w, (D,))
    check_int32(op, "lengths", lengths_B, B)
    check_int32(op, "rows", rows_B, B)
    tables = (lengths_B, rows_B, cos_PR, sin_PR)
    if on_host(qkv_BP, k_RGSD, v_RGSD, *tables, *weights):
        check((rows_B < R).all(), f"{op}: row {rows_B.max(initial=0)}, the cache has {R}")
        return decode_attention_ref(qkv_BP, k_RGSD, v_RGSD, *tables, q_w_D, k_w_D, eps, scale)
    check(D in WIDTHS, f"{op}: head dim {D}, the GPU kernels have {WIDTHS}")
    check(max(B, G) < 2**16, f"{op}: {B} rows of {G} heads in one launch, at most 65535 of each")
    o_BC, group, half = empty(qkv_BP, (B, H * D)), H // G, qkv_BP.dtype != np.float32
    flat = [x.reshape(-1) for x in (k_RGSD, v_RGSD, qkv_BP)]
    check(on_16_bytes(*flat[:2]), f"{op}: the cache does not begin at a multiple of 16 bytes")
    rows = 1 if batch_invariant else B
    config = choose(D, heads_of(half, group), rows * G)
    overlap = can_overlap(qkv_BP)
    splits = parts.splits_of(S, config.chunk_keys)
    variant = D, group, half, bool(weights), overlap, cache_ready, config
    decode_kernel, heads, chunks = make_decode_kernel(*variant)
    blocks = B * G * chunks
    part, m_part, l_part = (
        empty(qkv_BP, n * (splits if splits > 1 else 0), np.float32)
        for n in (blocks * heads * D, blocks * heads, blocks * heads)
    )
    counters = _zero_counters(qkv_BP, blocks)
    cos, sin = cos_PR.reshape(-1), sin_PR.reshape(-1)
    norms = weights or (cos, cos)  # a kernel takes no None
    arrays = (o_BC.reshape(-1), part, m_part, l_part, counters, *flat, lengths_B, rows_B, *norms)
    scalars = (G, S, np.float32(eps), np.float32(scale))
    grid = (splits, G, B)
    threads = 32 * config.warps
    launch(decode_kernel, grid, threads, *arrays, cos, sin, *scalars, overlap=overlap)
    return o_BC
