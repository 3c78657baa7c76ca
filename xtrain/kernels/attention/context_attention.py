"""Attention of a prefill: packed prompts of any lengths, each with its history in the cache.

    q, o: (N, H, D)    k, v: (R, G, S, D), a layer's cache
    edges: (E,), E = A + 1, see kernels/decoding/padding.py

    Query i of sequence a has position h_a + i (h_a: its history) and sees the keys 0 .. h_a + i of
    its sequence:
        s = scale q k^T,   p = softmax(s),   o = p v      (the cache already holds the new keys)
    With a window W > 0 it sees only the last W of them, itself included (key_bounds.py).
    Key p is in block tables[a, p // S] of the cache, at offset p % S
    (kernels/decoding/kv_cache.py).

This is flash_attention.py's forward with three differences: a sequence begins at edges[a] instead
of a T; its keys are in blocks of the cache, one head after another; and their number, h_a + i + 1,
is known only on the device. A tile of keys that lies in one block needs one entry of the table,
which is loaded a tile ahead; otherwise each row of the tile looks up its own. Nothing is computed
or loaded for padding: a thread block whose queries lie beyond its sequence exits at once.
Grouped-query
attention: H / G query heads read the same key head, which is never copied.

The bits of a query's row depend only on its sequence up to itself: tiles of keys begin at multiples
of their size, and that size depends only on D. So neither the other sequences, nor S and the
blocks, nor where a prompt is cut into two prefills matter. In batch-invariant mode the forward of
training computes the same bits: flash_attention.py's kernels add in the same order. A sequence with
a negative history is idle: o = 0.

    bf16        tensor cores, with the tiles of flash_attention_table.py; D = 16, 32, 64, 128, 256
                compute capability 9.0, D = 64 or 128 and S a multiple of 64 (in batch-invariant
                mode any S): flash_attention_hopper.py's kernel, and the bits of the training
                forward where its tiles have as many keys
    float32     flash_attention_fp32.py's products in shared memory; any D up to 256
"""

import functools

import numpy as np

from ...device import Array
from ..decoding.kv_cache import (
    Pages,
    check_block_size,
    check_block_tables,
    check_blocks,
    check_cache,
    check_int32,
    gather_sequence_ref,
    make_block_table,
)
from ..decoding.padding import check_lengths
from ..primitives.flat import on_16_bytes
from ..primitives.ptx import device, kernel, store1
from ..primitives.tensor_cores import cp_async16, cp_async_commit, cp_async_wait, opaque, warp_id
from ..primitives.tiles import (
    CHUNK,
    WIDTHS,
    make_add_product,
    make_chunk_offset,
    make_copy,
    make_copy_two,
    make_fill,
    make_scores,
    make_store,
)
from ..runtime.compiler import cuda, float32, int32, int64, uint16, uint32
from ..runtime.invariance import is_batch_invariant
from ..runtime.launch import (
    check,
    check_array,
    dtype_name,
    empty,
    launch,
    on_host,
    shared_limit,
)
from . import flash_attention_fp32 as fp32
from .flash_attention import (
    INVARIANT_T,
    choose,
    gpu_of,
    tiled_attention_ref,
    use_hopper,
)
from .flash_attention_bf16 import (
    LOG2E,
    LOWEST,
    fwd_shared_bytes,
    make_finish,
    make_hide_early,
    make_hide_keys,
    make_softmax,
)
from .flash_attention_hopper import paged_forward
from .flash_attention_table import Tiles
from .key_bounds import KeyBounds, make_first_key

NAN = np.float32(np.nan)
# The kernel for compute capability 9.0 is the faster one for blocks of a multiple of this many
# tokens; smaller ones are many copies. In batch-invariant mode it is used for all.
HOPPER_BLOCK = 64


# ----------------------------------------------------------------------------- reference
def context_attention_ref(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, tables_AM, scale, window=0):
    """The forward of this file's docstring in NumPy -> o (N, H, D) like q. Computes in q's dtype,
    at least in float32."""
    G = k_RGSD.shape[1]
    _, H, D = q_NHD.shape
    o_NHD = np.zeros_like(q_NHD)
    wide = np.result_type(q_NHD.dtype, np.float32)
    for a, table_M in enumerate(tables_AM):
        first = edges_E[a]
        last = edges_E[a + 1]
        past = history_A[a]
        if past < 0:
            continue
        T = last - first
        n = past + last - first
        bounds = KeyBounds(window)
        k_GSD, v_GSD = (gather_sequence_ref(x, table_M, n).astype(wide) for x in (k_RGSD, v_RGSD))
        if is_batch_invariant():
            q_THD = q_NHD[first:last].astype(wide)
            first_T = bounds.first_key(0, T, n) if window else None
            o_NHD[first:last] = tiled_attention_ref(q_THD, k_GSD, v_GSD, scale, past, first_T)[0]
            continue
        q_GRTD = q_NHD[first:last].reshape(T, G, H // G, D).transpose(1, 2, 0, 3).astype(wide)
        s_GRTS = q_GRTD @ k_GSD[:, None].swapaxes(2, 3) * wide.type(scale)
        seen_TS = np.tri(T, n, past, dtype=bool) & ~bounds.hidden(T, n)[0]
        s_GRTS = np.where(seen_TS, s_GRTS, wide.type(-np.inf))
        p_GRTS = np.exp(s_GRTS - s_GRTS.max(-1, keepdims=True, initial=-np.inf))
        o_GRTD = p_GRTS @ v_GSD[:, None] / p_GRTS.sum(-1, keepdims=True)
        o_NHD[first:last] = o_GRTD.transpose(2, 0, 1, 3).reshape(T, H, D)
    return o_NHD


# ------------------------------------------------------ checks of values that only the device knows
@device
def fill_invalid(o, begin, T, h, H, D, t0, rows, past):
    """The thread block's rows of o for an invalid history: 0 if it is negative, for an idle
    sequence, else NaN, so that the caller notices."""
    value = float32(0.0) if past < 0 else NAN
    for i in range(cuda.threadIdx.x, rows * D, cuda.blockDim.x):
        t = t0 + i // D
        if t < T:
            store1(o, ((begin + t) * H + h) * D + i % D, value)


# ----------------------------------------------------------------------------- float32
@functools.cache
def make_fp32_kernel(D: int, S: int, WINDOW: int = 0):
    """Return the float32 kernel for heads of width D and blocks of S tokens. Launch with
    fp32.THREADS threads."""
    entry_of, start_of = make_block_table(S, D)
    sizes = fp32.tile_sizes(D)
    TILE = sizes.TILE
    PAD = sizes.PAD
    R = sizes.R
    C = sizes.C
    W = sizes.W
    V_TILE = sizes.V_TILE
    TURNS = D > fp32.WIDE
    TILE1 = TILE + 1
    WIDTH = PAD - 1
    ROWS = fp32.ROWS
    LANES = fp32.LANES
    LOWEST = fp32.LOWEST  # mlir 0.6 does not compile a float of another module
    dots, add_weighted, clear = fp32.make_products(D)
    add_scores = fp32.make_add_scores(D, True, WINDOW > 0)
    row_sum = fp32.row_sum
    first_key = make_first_key(WINDOW)

    @device
    def load_queries(tile, q, base, stride, first, end):
        """tile = rows first, first + 1, ... of q (from base on, `stride` apart); zeros from row
        `end` and column D on"""
        for i in range(cuda.threadIdx.x, TILE * WIDTH, fp32.THREADS):
            r, d = i // WIDTH, i % WIDTH
            inside = first + r < end and d < D
            tile[r, d] = q[base + (first + r) * stride + d] if inside else float32(0.0)

    @device
    def load_rows(tile, x, pages, n0, end):
        """A tile of keys or values n0, n0 + 1, ...; zeros from key `end` on -> the largest entry of
        the table that was used"""
        worst = entry_of(pages, n0)
        start = start_of(worst, n0, pages)
        for i in range(cuda.threadIdx.x, TILE * WIDTH, fp32.THREADS):
            r, d = i // WIDTH, i % WIDTH
            value = float32(0.0)
            if n0 + r < end and d < D:
                at = start + r * D + d
                if S % TILE != 0:  # the tile may lie in several blocks
                    entry = entry_of(pages, n0 + r)
                    at = start_of(entry, n0 + r, pages) + d
                    worst = max(entry, worst)
                value = x[at]
            tile[r, d] = value
        return worst

    @kernel(fp32.THREADS)
    def context_attention_fp32_kernel(
        o, q, k, v, edges_E, history_A, tables, N, cache_blocks, M, H, G, GSD, scale
    ):
        """Grid (ceil(longest / TILE), A H). q, o, k, v, tables: flat. cache_blocks: R; M: blocks of
        a table."""
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        a = int64(cuda.blockIdx.y) // H
        h = cuda.blockIdx.y % H
        t0 = int64(cuda.blockIdx.x) * TILE
        begin = int64(edges_E[a])
        past = int64(history_A[a])
        T = int64(edges_E[a + 1]) - begin
        if t0 >= T or begin < 0 or N - begin < T:
            return
        if past < 0 or past > M * S - T:
            fill_invalid(o, begin, T, h, H, D, t0, TILE, past)
            return
        head = (begin * H + h) * D
        stride = H * D
        pages = Pages(tables, a * M, cache_blocks, GSD, h // (H // G) * S * D)
        worst = uint32(0)
        q_s = cuda.shared.array((TILE, PAD), float32)
        k_s = cuda.shared.array((TILE, PAD), float32)
        v_s = cuda.shared.array((V_TILE, PAD), float32)
        p_s = cuda.shared.array((TILE, TILE1), float32)
        s = cuda.local.array((R, C), float32)
        acc = cuda.local.array((R, W), float32)
        top = cuda.local.array(R, float32)
        total = cuda.local.array(R, float32)
        lo = cuda.local.array(R, int32)
        clear(acc)
        for i in range(R):
            top[i] = LOWEST
            total[i] = float32(0.0)
            lo[i] = first_key(edges_E, 0, t0 + y + ROWS * i, past)
        load_queries(q_s, q, head, stride, t0, T)
        end = past + min(t0 + TILE, T)  # end of the keys that the block sees
        for n0 in range(first_key(edges_E, 0, t0, past) // TILE * TILE, end, TILE):
            cuda.syncthreads()  # all warps have left the previous tile
            used = load_rows(k_s, k, pages, n0, end)
            worst = max(used, worst)
            if not TURNS:
                load_rows(v_s, v, pages, n0, end)
            cuda.syncthreads()
            dots(s, q_s, k_s)
            add_scores(p_s, s, acc, top, total, lo, t0 + past, n0, end, scale)
            if TURNS:
                cuda.syncthreads()  # all warps have read the keys
                load_rows(k_s, v, pages, n0, end)
                cuda.syncthreads()
                add_weighted(acc, p_s, k_s)
            else:
                cuda.syncwarp()  # a row of p is written and read by the same half of a warp
                add_weighted(acc, p_s, v_s)
        if cuda.syncthreads_or(int32(worst >= cache_blocks)):  # o becomes NaN
            for i in range(R):
                total[i] = NAN
        for i in range(R):
            t = t0 + y + ROWS * i
            factor = float32(1.0) / row_sum(total[i])
            for w in range(W):
                d = x + LANES * w
                if t < T and d < D:
                    o[head + t * stride + d] = acc[i, w] * factor

    return context_attention_fp32_kernel


# ----------------------------------------------------------------------------- bf16
@functools.cache
def make_copy_keys(D, S, BN, THREADS):
    """Return entry_for, copy_keys: a thread block starts to copy BN keys and their values from the
    cache into a stage at smem[to].

    entry_for(pages, n0) -> entry
        the table's entry for key n0, if every tile lies in one block; else 0
    copy_keys(smem, to, k, v, entry, pages, n0, valid) -> True if this thread used an entry that is
    no block
    n0: a multiple of BN. Keys from n0 + valid on become zeros. pages: of the cache.
    """
    entry_of, start_of = make_block_table(S, D)
    ONE_BLOCK = S % BN == 0
    copy_kv = make_copy_two(D, BN, THREADS)
    chunk_offset = make_chunk_offset(D)
    CHUNKS = D // CHUNK

    @device
    def entry_for(pages, n0):
        if ONE_BLOCK:
            return entry_of(pages, n0)
        return uint32(0)

    @device
    def copy_keys(smem, to, k, v, entry, pages, n0, valid):
        if ONE_BLOCK:
            start = start_of(entry, n0, pages)
            copy_kv(smem, to, k, start, D, v, start, D, valid)
            return entry >= pages.blocks
        worst = uint32(0)
        for i in range(cuda.threadIdx.x, BN * CHUNKS, THREADS):
            row, chunk = i // CHUNKS, i % CHUNKS
            inside = row < valid
            mine = entry_of(pages, n0 + (row if inside else 0))
            worst = max(mine, worst)
            source = start_of(mine, n0 + row, pages) + chunk * CHUNK
            at = to + chunk_offset(row, chunk)
            cp_async16(smem, at, k, source, inside)
            cp_async16(smem, at + BN * D, v, source, inside)
        cp_async_commit()
        return worst >= pages.blocks

    return entry_for, copy_keys


@functools.cache
def make_bf16_kernel(D: int, S: int, tiles: Tiles, WINDOW: int = 0):
    """Return the bf16 kernel for heads of width D. Launch with 32 * tiles.warps threads and
    fwd_shared_bytes(D, tiles).

    S: tokens of a block of the cache. tiles: of the kernel "fwd" in flash_attention_table.py.
    flash_attention_bf16.py explains each step.
    """
    BM = tiles.BM
    BN = tiles.BN
    WARPS = tiles.warps
    MIN_BLOCKS = tiles.blocks
    Q_REGISTERS = tiles.q_in_registers
    THREADS = 32 * WARPS
    ROWS = BM // WARPS
    MT = ROWS // 16
    NT = BN // 8
    ND = D // 8
    KS = D // 16
    # Q is at 0; the stages of K and V are behind it
    KV = BM * D
    STAGE = 2 * BN * D
    copy_q = make_copy(D, BM, THREADS)
    entry_for, copy_keys = make_copy_keys(D, S, BN, THREADS)
    load_rows, scores_of, scores = make_scores(D, MT, NT)
    hide_keys = make_hide_keys(MT, NT, True)
    add_scores = make_softmax(MT, NT, ND)
    first_key = make_first_key(WINDOW)
    first_keys, hide_early = make_hide_early(MT, NT, WINDOW)
    add_product = make_add_product(D, MT, NT)
    finish = make_finish(MT, ND)
    store_o = make_store(D, MT)
    clear, fill, _ = make_fill(MT, ND)

    @kernel(THREADS, MIN_BLOCKS)
    def context_attention_bf16_kernel(
        o, q, k, v, edges_E, history_A, tables, N, R, M, H, G, GSD, scale
    ):
        """Grid (ceil(longest / BM), A H). All arrays flat. M: blocks of a table. GSD: elements of a
        block."""
        smem = cuda.shared.array(0, uint16)
        warp = warp_id()
        a = int64(cuda.blockIdx.y) // H
        h = int64(cuda.blockIdx.y) % H
        begin = int64(edges_E[a])
        past = int32(history_A[a])
        T = int64(edges_E[a + 1]) - begin
        q0 = int32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * BM)
        if q0 >= T or begin < 0 or N - begin < T:
            return
        if past < 0 or past > M * S - T:
            fill_invalid(o, begin, T, h, H, D, q0, BM, past)
            return
        T = int32(T)
        # this warp's first row: in T, in smem
        w0 = int32(q0 + warp * ROWS)
        mine = int32(warp * ROWS * D)
        head = (begin * H + h) * D
        stride = int32(H * D)
        key_head = uint32(h // (H // G) * (S * D))
        pages = Pages(tables, uint32(a * M), uint32(R), uint32(GSD), key_head)
        s = cuda.local.array((MT, NT, 4), float32)
        acc = cuda.local.array((MT, ND, 4), float32)
        top = cuda.local.array((MT, 2), float32)
        total = cuda.local.array((MT, 2), float32)
        fq = cuda.local.array((KS, MT, 4), uint32)
        lo = cuda.local.array((MT, 2), int32)
        clear(acc)
        fill(top, LOWEST)
        fill(total, float32(0.0))
        end = int32(past + (q0 + BM if q0 + BM < T else T))  # end of the keys that the block sees
        n0 = int32((end - 1) // BN * BN)  # tiles run from the diagonal down to the first key
        begin = first_key(edges_E, 0, q0, past)
        max_lo = first_keys(lo, edges_E, 0, w0, T, past)
        visible = int32(w0 + ROWS + past if w0 < T else 0)  # end of the keys that this warp sees
        copy_q(smem, 0, q, head + q0 * stride, stride, T - q0)
        entry = entry_for(pages, n0)
        invalid = copy_keys(smem, KV, k, v, entry, pages, n0, end - n0)
        if Q_REGISTERS:
            cp_async_wait(0)
            cuda.syncthreads()
            load_rows(fq, smem, mine)
        now = int32(KV)
        while n0 + BN > begin:
            entry = entry_for(pages, n0 - BN if n0 > 0 else 0)  # arrives during the wait
            cp_async_wait(0)
            cuda.syncthreads()  # this tile has arrived; all warps have left the previous one
            other = int32(2 * KV + STAGE - now)
            if n0 > begin:
                next0 = int32(n0 - BN)
                if copy_keys(smem, other, k, v, entry, pages, next0, BN):
                    invalid = True
            if n0 < visible:
                if Q_REGISTERS:
                    scores_of(s, fq, smem, now)
                else:
                    scores(s, smem, mine, now)
                # opaque: otherwise its limits are computed, and spilled, before the loop
                hide_keys(s, opaque(w0), n0, end, past)
                hide_early(s, lo, max_lo, n0)
                add_scores(s, acc, top, total, scale * LOG2E)
                add_product(acc, s, smem, now + BN * D)
            n0 = int32(n0 - BN)
            now = other
        if cuda.syncthreads_or(int32(invalid)):  # o becomes NaN
            fill(total, NAN)
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
    tables_AM: Array,
    longest: int,
    scale: float,
    window: int = 0,
) -> Array:
    """Attention of packed prompts over the cache -> o (N, H, D) like q. Call kv_cache.append_kv
    first: it adds the new keys.

    q (N, H, D): float32 or bf16, like the cache k, v (R, G, S, D). edges (A + 1,), history (A,),
    tables (A, M): int32. Sequence a has the queries edges[a] .. edges[a + 1] - 1, history[a]
    earlier tokens, and the blocks tables[a]. longest: an upper bound of the new lengths. scale:
    factor of the scores. window: keys that a query sees, 0 for all. Raises ValueError or TypeError
    if shapes or dtypes do not match; on a GPU S must be a multiple of 16.

    Rows of a sequence with a negative history, an idle one, become 0. Invalid values of history or
    tables raise ValueError on the CPU. On a GPU the host does not know them: with a history that is
    too long all rows of o of that sequence become NaN, with an invalid block those whose keys lie
    in it, and possibly others of the sequence; nothing is read or written out of bounds. Invalid
    edges leave rows of o unwritten.
    """
    op = "context_attention"
    R, G, S, D = check_cache(op, k_RGSD, v_RGSD)
    check_array(op, "q", q_NHD, (None, None, D), (dtype_name(k_RGSD.dtype),))
    N, H, _ = q_NHD.shape
    A = history_A.size
    for name, x, n in (("edges", edges_E, A + 1), ("history", history_A, A)):
        check_int32(op, name, x, n)
    capacity = check_block_tables(op, tables_AM, A, S)
    check(H % G == 0, f"{op}: {H} query heads cannot share {G} key heads")
    check(window >= 0, f"{op}: a window of {window} keys")
    where = edges_E, history_A, tables_AM
    if on_host(q_NHD, k_RGSD, v_RGSD, *where):
        check_lengths(op, edges_E, N, longest)
        lengths_A = np.where(history_A < 0, 0, history_A + np.diff(edges_E))
        check(
            bool((lengths_A <= capacity).all()),
            f"{op}: history and new tokens do not fit the tables of {capacity} tokens",
        )
        check_blocks(op, tables_AM, lengths_A, R, S)
        return context_attention_ref(q_NHD, k_RGSD, v_RGSD, *where, scale, window)
    check_block_size(op, R, G, S, D)
    check(longest >= 0, f"{op}: longest is {longest}")
    longest = min(longest, N)  # more blocks would have no queries
    check(A * H < 2**16, f"{op}: {A} sequences of {H} heads in one launch, at most 65535 in all")
    o_NHD = empty(q_NHD, q_NHD.shape)
    flat = [x.reshape(-1) for x in (o_NHD, q_NHD, k_RGSD, v_RGSD)]
    arrays = (*flat, edges_E, history_A, tables_AM.reshape(-1))
    M = tables_AM.shape[1]
    scalars = (N, R, M, H, G, G * S * D, np.float32(scale))
    if q_NHD.dtype == np.float32:
        check(D <= fp32.MAX_D, f"{op}: head dim {D}, the GPU kernel supports at most {fp32.MAX_D}")
        grid = (-(-longest // fp32.tile_rows(D)), A * H)
        launch(make_fp32_kernel(D, S, window), grid, fp32.THREADS, *arrays, *scalars)
    else:
        check(D in WIDTHS, f"{op}: head dim {D}, the GPU kernels for bf16 support {WIDTHS}")
        check(on_16_bytes(*flat), f"{op}: q and the caches must begin at multiples of 16 bytes")
        if use_hopper(q_NHD[None]) and (S % HOPPER_BLOCK == 0 or is_batch_invariant()):
            arrays = q_NHD, k_RGSD, v_RGSD, *where
            paged_forward(o_NHD, *arrays, longest, scale, gpu_of(q_NHD), window)
            return o_NHD
        tiles = choose("fwd", D, INVARIANT_T, True, shared_limit(q_NHD))
        grid = (-(-longest // tiles.BM), A * H)
        shared = fwd_shared_bytes(D, tiles)
        bf16_kernel = make_bf16_kernel(D, S, tiles, window)
        launch(bf16_kernel, grid, 32 * tiles.warps, *arrays, *scalars, shared=shared)
    return o_NHD
