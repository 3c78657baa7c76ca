"""Attention of a prefill: packed prompts of any lengths, each with its history in the cache.

    q, o: (N, H, D)    k, v: (R, G, S, D), a layer's cache    edges: (E,), E = A + 1, see kernels/decoding/padding.py

    Query i of sequence a has position h_a + i (h_a: its history) and sees the keys 0 .. h_a + i of cache row r_a:
               s = scale q k^T,   p = softmax(s),   o = p v                       the cache already holds the new keys

This is flash_attention.py's forward with three differences: a sequence begins at edges[a] instead of a T; its keys are in one
row of the cache, one head after another; and their number, h_a + i + 1, is known only on the device. Nothing is computed or
loaded for padding: a block whose queries lie beyond its sequence exits at once. Grouped-query attention: H / G query heads
read the same key head, which is never copied.

    bf16        tensor cores, with the tiles of flash_attention_table.py; D = 16, 32, 64, 128
    float32     flash_attention_fp32.py's products in shared memory; any D up to 128
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32

from ...device import Array
from ..decoding.kv_cache import check_cache, check_int32
from ..decoding.padding import check_lengths
from ..primitives.flat import on_16_bytes
from ..primitives.ptx import device, kernel, store1
from ..primitives.tensor_cores import wait_copies, warp_id
from ..primitives.tiles import (
    WIDTHS,
    make_add_product,
    make_copy,
    make_copy_two,
    make_fill,
    make_scores,
    make_store,
)
from ..runtime.launch import check, check_array, empty, launch, on_host
from . import flash_attention_fp32 as fp32
from .flash_attention import choose, shared_limit
from .flash_attention_bf16 import (
    LOG2E,
    LOWEST,
    fwd_shared_bytes,
    make_finish,
    make_hide_keys,
    make_softmax,
)
from .flash_attention_table import Tiles

NAN = np.float32(np.nan)


# ----------------------------------------------------------------------------- reference
def context_attention_ref(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, rows_A, scale):
    """The forward of this file's docstring in NumPy -> o (N, H, D) like q. Computes in q's dtype, at least in float32."""
    G, (_, H, D) = k_RGSD.shape[1], q_NHD.shape
    o_NHD, wide = np.zeros_like(q_NHD), np.result_type(q_NHD.dtype, np.float32)
    for a, row in enumerate(rows_A):
        first, last, past = edges_E[a], edges_E[a + 1], history_A[a]
        T, S = last - first, past + last - first
        q_GRTD = q_NHD[first:last].reshape(T, G, H // G, D).transpose(1, 2, 0, 3).astype(wide)
        k_G1SD, v_G1SD = (x[row, :, None, :S].astype(wide) for x in (k_RGSD, v_RGSD))
        s_GRTS = q_GRTD @ k_G1SD.swapaxes(2, 3) * wide.type(scale)
        s_GRTS = np.where(np.tri(T, S, past, dtype=bool), s_GRTS, wide.type(-np.inf))
        p_GRTS = np.exp(s_GRTS - s_GRTS.max(-1, keepdims=True, initial=-np.inf))
        o_GRTD = p_GRTS @ v_G1SD / p_GRTS.sum(-1, keepdims=True)
        o_NHD[first:last] = o_GRTD.transpose(2, 0, 1, 3).reshape(T, H, D)
    return o_NHD


# ----------------------------------------------------------------------------- checks of values that only the device knows
@device
def inside(past, T, row, R, S):
    """True if a sequence's history and new keys fit into the cache."""
    return past >= 0 and past <= S - T and row >= 0 and row < R


@device
def fill_nan(o, begin, T, h, H, D, t0, rows):
    """Set the block's rows of o to NaN: the sequence's history or row is invalid, and the caller must be able to notice."""
    for i in range(cuda.threadIdx.x, rows * D, cuda.blockDim.x):
        t = t0 + i // D
        if t < T:
            store1(o, ((begin + t) * H + h) * D + i % D, NAN)


# ----------------------------------------------------------------------------- float32
@functools.cache
def make_fp32_kernel(D: int):
    """-> the float32 kernel for heads of width D. Launch with fp32.THREADS threads."""
    sizes = fp32.tile_sizes(D)
    TILE, PAD, R, C, W = sizes.TILE, sizes.PAD, sizes.R, sizes.C, sizes.W
    TILE1, WIDTH, ROWS, LANES = TILE + 1, PAD - 1, fp32.ROWS, fp32.LANES
    dots, add_weighted, clear = fp32.make_products(D)
    add_scores, row_sum = fp32.make_add_scores(D, True), fp32.row_sum

    @device
    def load_tile(tile, x, base, stride, first, end):
        """tile = rows first, first + 1, ... of x (from base on, `stride` apart); zeros from row `end` and column D on"""
        for i in range(cuda.threadIdx.x, TILE * WIDTH, fp32.THREADS):
            r, d = i // WIDTH, i % WIDTH
            inside = first + r < end and d < D
            tile[r, d] = x[base + (first + r) * stride + d] if inside else float32(0.0)

    @kernel(fp32.THREADS)
    def context_attention_fp32_kernel(
        o, q, k, v, edges_E, history_A, rows_A, N, cache_rows, H, G, S, scale
    ):
        """Grid (ceil(longest / TILE), A H). q, o, k, v: flat."""
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        a, h, t0 = int64(cuda.blockIdx.y) // H, cuda.blockIdx.y % H, int64(cuda.blockIdx.x) * TILE
        begin, past, row = int64(edges_E[a]), int64(history_A[a]), int64(rows_A[a])
        T = int64(edges_E[a + 1]) - begin
        if t0 >= T or begin < 0 or N - begin < T:
            return
        if not inside(past, T, row, cache_rows, S):
            fill_nan(o, begin, T, h, H, D, t0, TILE)
            return
        head, stride = (begin * H + h) * D, H * D
        kv = (row * G + h // (H // G)) * S * D
        q_s = cuda.shared.array((TILE, PAD), float32)
        k_s = cuda.shared.array((TILE, PAD), float32)
        v_s = cuda.shared.array((TILE, PAD), float32)
        p_s = cuda.shared.array((TILE, TILE1), float32)
        s, acc = cuda.local.array((R, C), float32), cuda.local.array((R, W), float32)
        top, total = cuda.local.array(R, float32), cuda.local.array(R, float32)
        clear(acc)
        for i in range(R):
            top[i], total[i] = fp32.LOWEST, float32(0.0)
        load_tile(q_s, q, head, stride, t0, T)
        end = past + (t0 + TILE if t0 + TILE < T else T)  # end of the keys that the block sees
        for n0 in range(0, end, TILE):
            cuda.syncthreads()  # all warps have left the previous tile
            load_tile(k_s, k, kv, D, n0, end)
            load_tile(v_s, v, kv, D, n0, end)
            cuda.syncthreads()
            dots(s, q_s, k_s)
            add_scores(p_s, s, acc, top, total, t0 + past, n0, end, scale)
            cuda.syncwarp()  # a row of p is written and read by the same half of a warp
            add_weighted(acc, p_s, v_s)
        for i in range(R):
            t, row_total = t0 + y + ROWS * i, row_sum(total[i])
            for w in range(W):
                d = x + LANES * w
                if t < T and d < D:
                    o[head + t * stride + d] = acc[i, w] / row_total

    return context_attention_fp32_kernel


# ----------------------------------------------------------------------------- bf16
@functools.cache
def make_bf16_kernel(D: int, tiles: Tiles):
    """-> the bf16 kernel for heads of width D. Launch with 32 * tiles.warps threads and fwd_shared_bytes(D, tiles).

    tiles: of the kernel "fwd" in flash_attention_table.py. flash_attention_bf16.py explains each step.
    """
    BM, BN, WARPS, MIN_BLOCKS = tiles.BM, tiles.BN, tiles.warps, tiles.blocks
    Q_REGISTERS = tiles.q_in_registers
    THREADS, ROWS = 32 * WARPS, BM // WARPS
    MT, NT, ND, KS = ROWS // 16, BN // 8, D // 8, D // 16
    KV, STAGE = BM * D, 2 * BN * D  # Q is at 0; the stages of K and V are behind it
    copy_q, copy_kv = make_copy(D, BM, THREADS), make_copy_two(D, BN, THREADS)
    load_rows, scores_of, scores = make_scores(D, MT, NT)
    hide_keys, add_scores = make_hide_keys(MT, NT, True), make_softmax(MT, NT, ND)
    add_product, finish = make_add_product(D, MT, NT), make_finish(MT, ND)
    store_o, (clear, fill, _) = make_store(D, MT), make_fill(MT, ND)

    @kernel(THREADS, MIN_BLOCKS)
    def context_attention_bf16_kernel(
        o, q, k, v, edges_E, history_A, rows_A, N, cache_rows, H, G, S, scale
    ):
        """Grid (ceil(longest / BM), A H). q, o, k, v: flat."""
        smem = cuda.shared.array(0, uint16)
        warp, a, h = warp_id(), int64(cuda.blockIdx.y) // H, int64(cuda.blockIdx.y) % H
        begin, past, row = int64(edges_E[a]), int32(history_A[a]), int64(rows_A[a])
        T = int64(edges_E[a + 1]) - begin
        q0 = int32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * BM)
        if q0 >= T or begin < 0 or N - begin < T:
            return
        if not inside(int64(past), T, row, cache_rows, S):
            fill_nan(o, begin, T, h, H, D, q0, BM)
            return
        T = int32(T)
        # this warp's first row: in T, in smem
        w0, mine = int32(q0 + warp * ROWS), int32(warp * ROWS * D)
        head, stride = (begin * H + h) * D, int32(H * D)
        kv = (row * G + h // (H // G)) * S * D
        s, acc = cuda.local.array((MT, NT, 4), float32), cuda.local.array((MT, ND, 4), float32)
        top, total = cuda.local.array((MT, 2), float32), cuda.local.array((MT, 2), float32)
        fq = cuda.local.array((KS, MT, 4), uint32)
        clear(acc)
        fill(top, LOWEST)
        fill(total, float32(0.0))
        end = int32(past + (q0 + BM if q0 + BM < T else T))  # end of the keys that the block sees
        n0 = int32((end - 1) // BN * BN)  # tiles run from the diagonal down to key 0
        visible = int32(w0 + ROWS + past if w0 < T else 0)  # end of the keys that this warp sees
        copy_q(smem, 0, q, head + q0 * stride, stride, T - q0)
        copy_kv(smem, KV, k, kv + n0 * D, D, v, kv + n0 * D, D, end - n0)
        if Q_REGISTERS:
            wait_copies(0)
            cuda.syncthreads()
            load_rows(fq, smem, mine)
        now = int32(KV)
        while n0 >= 0:
            wait_copies(0)
            cuda.syncthreads()  # this tile has arrived; all warps have left the previous one
            other = int32(2 * KV + STAGE - now)
            if n0 > 0:
                to = kv + (n0 - BN) * D
                copy_kv(smem, other, k, to, D, v, to, D, BN)
            if n0 < visible:
                if Q_REGISTERS:
                    scores_of(s, fq, smem, now)
                else:
                    scores(s, smem, mine, now)
                hide_keys(s, w0, n0, end, past)
                add_scores(s, acc, top, total, scale * LOG2E)
                add_product(acc, s, smem, now + BN * D)
            n0, now = int32(n0 - BN), other
        finish(acc, top, total, scale * LOG2E, o, 0, 0)  # lse is not written
        store_o(acc, smem, mine, o, head + w0 * stride, stride, T - w0)

    return context_attention_bf16_kernel


# ----------------------------------------------------------------------------- launcher
def context_attention(
    q_NHD: Array,
    k_RGSD: Array,
    v_RGSD: Array,
    edges_E: Array,
    history_A: Array,
    rows_A: Array,
    longest: int,
    scale: float,
) -> Array:
    """Attention of packed prompts over the cache -> o (N, H, D) like q. Call kv_cache.append_kv first: it adds the new keys.

    q (N, H, D): float32 or bf16, like the cache k, v (R, G, S, D). edges (A + 1,), history (A,), rows (A,): int32. Sequence a
    has the queries edges[a] .. edges[a + 1] - 1, history[a] earlier tokens, and cache row rows[a]. longest: an upper bound of
    the new lengths. scale: factor of the scores. Raises ValueError or TypeError if shapes or dtypes do not match.

    Invalid values of history or rows raise ValueError on the CPU. On a GPU the host does not know them: the rows of o of that
    sequence become NaN, and invalid edges leave rows of o unwritten.
    """
    op = "context_attention"
    R, G, S, D = check_cache(op, k_RGSD, v_RGSD)
    check_array(op, "q", q_NHD, (None, None, D), (k_RGSD.dtype.name,))
    N, H, _ = q_NHD.shape
    A = rows_A.size
    for name, x, n in (("edges", edges_E, A + 1), ("history", history_A, A), ("rows", rows_A, A)):
        check_int32(op, name, x, n)
    check(H % G == 0, f"{op}: {H} query heads cannot share {G} key heads")
    if on_host(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, rows_A):
        _check_values(op, edges_E, history_A, rows_A, N, R, S, longest)
        return context_attention_ref(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, rows_A, scale)
    check(longest >= 0, f"{op}: longest is {longest}")
    longest = min(longest, N)  # more blocks would have no queries
    check(A * H < 2**16, f"{op}: {A} sequences of {H} heads in one launch, at most 65535 in all")
    o_NHD = empty(q_NHD, q_NHD.shape)
    flat = [x.reshape(-1) for x in (o_NHD, q_NHD, k_RGSD, v_RGSD)]
    arrays, scalars = (*flat, edges_E, history_A, rows_A), (N, R, H, G, S, np.float32(scale))
    if q_NHD.dtype == np.float32:
        check(D <= fp32.MAX_D, f"{op}: head dim {D}, the GPU kernel supports at most {fp32.MAX_D}")
        grid = (-(-longest // fp32.tile_rows(D)), A * H)
        launch(make_fp32_kernel(D), grid, fp32.THREADS, *arrays, *scalars)
    else:
        check(D in WIDTHS, f"{op}: head dim {D}, the GPU kernels for bf16 support {WIDTHS}")
        check(on_16_bytes(*flat), f"{op}: q and the caches must begin at multiples of 16 bytes")
        tiles = choose("fwd", D, longest, True, shared_limit(q_NHD))
        grid, shared = (-(-longest // tiles.BM), A * H), fwd_shared_bytes(D, tiles)
        bf16_kernel = make_bf16_kernel(D, tiles)
        launch(bf16_kernel, grid, 32 * tiles.warps, *arrays, *scalars, shared=shared)
    return o_NHD


def _check_values(op, edges_E, history_A, rows_A, N, R, S, longest):
    check_lengths(op, edges_E, N, longest)
    fits = (history_A >= 0).all() and (history_A + np.diff(edges_E) <= S).all()
    check(fits, f"{op}: history and new tokens do not fit the cache of {S} positions")
    check(((rows_A >= 0) & (rows_A < R)).all(), f"{op}: a row is not in 0 .. {R - 1}")
