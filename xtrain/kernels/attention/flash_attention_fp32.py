"""FlashAttention without tensor cores: float32, any head dim up to 256. Read this version of
flash_attention.py first.

    block      128 threads, (y, x) = (8, 16); it owns TILE rows (queries; keys in the dK, dV kernel)
               of one head
    tiles      TILE rows of up to four arrays in shared memory, each one column wider than needed:
               consecutive rows then begin in different banks, and 16 lanes that read one column of
               16 rows have no bank conflicts
    thread     rows y, y + 8, ... and columns x, x + 16, ... of every product; the 16 lanes of a row
               are half a warp

Heads of more than WIDE channels have no room for K and V at once: they take turns in one tile. There
are no backward kernels for them; gemm_attention.py computes their gradients.

Each product is a small matrix product from shared memory with its results in registers. Between the
two products of a tile, p (or ds) passes through shared memory, because the second product needs
whole rows of it.
"""

import functools
import math
from dataclasses import dataclass

from ..primitives.ptx import device, kernel
from ..primitives.reduce import FULL
from ..runtime.compiler import cuda, float32, int32, int64
from .key_bounds import make_first_key, make_last_query

ROWS = 8  # threads in y
LANES = 16  # threads in x
THREADS = ROWS * LANES
MAX_D = 256
WIDE = 128  # widest head of which K and V fit into shared memory together
NEG_INF = float32(-math.inf)
LOWEST = float32(-1e30)  # initial maximum; with -inf, -inf - -inf would be NaN


def tile_rows(D: int) -> int:
    """Return rows of a tile for heads of width D: four tiles and the weights must fit into 48 KB of
    shared memory; of heads wider than WIDE, two tiles."""
    return 32 if D <= 64 else 16


@dataclass(frozen=True)
class TileSizes:
    """The sizes of a block's tiles and of a thread's results."""

    TILE: int  # rows of a tile
    PAD: int  # its columns in shared memory, one more than it needs
    R: int  # rows of a TILE x TILE product per thread
    C: int  # its columns per thread
    W: int  # columns of a head per thread
    V_TILE: int  # rows of the tile of V; 1, which is not used, if K and V take turns


def tile_sizes(D: int) -> TileSizes:
    """Return the sizes for heads of width D"""
    TILE = tile_rows(D)
    W = -(-D // LANES)
    V_TILE = TILE if D <= WIDE else 1
    return TileSizes(TILE, LANES * W + 1, TILE // ROWS, TILE // LANES, W, V_TILE)


# ----------------------------------------------------------------------------- device functions
@device
def row_sum(v):
    """Return the sum of v over the 16 lanes that share a row"""
    for step in (8, 4, 2, 1):
        v += cuda.shfl_xor_sync(FULL, v, step)
    return v


@device
def row_max(v):
    """Return the maximum of v over the 16 lanes that share a row"""
    for step in (8, 4, 2, 1):
        other = cuda.shfl_xor_sync(FULL, v, step)
        v = v if v > other else other
    return v


@functools.cache
def make_load_store(D):
    """Return load_tile, store_row

    load_tile(tile, x_BTHD, b, t0, h)
        tile = rows t0, t0 + 1, ... of head h; zeros beyond the last position and column
    store_row(y_BTHD, b, t, h, row, factor)
        this thread's columns of y[b, t, h] = row (W,) times factor
    """
    sizes = tile_sizes(D)
    TILE = sizes.TILE
    WIDTH = sizes.PAD - 1
    W = sizes.W

    @device
    def load_tile(tile, x_BTHD, b, t0, h):
        for i in range(cuda.threadIdx.x, TILE * WIDTH, THREADS):
            r, d = i // WIDTH, i % WIDTH
            inside = t0 + r < x_BTHD.shape[1] and d < D
            tile[r, d] = x_BTHD[b, t0 + r, h, d] if inside else float32(0.0)

    @device
    def store_row(y_BTHD, b, t, h, row, factor):
        for w in range(W):
            d = cuda.threadIdx.x % LANES + LANES * w
            if t < y_BTHD.shape[1] and d < D:
                y_BTHD[b, t, h, d] = row[w] * factor

    return load_tile, store_row


@functools.cache
def make_products(D):
    """Return dots, add_weighted, clear: a thread's elements of the products of shared tiles.

    dots(s, a, b)              s (R, C) = a b^T
    add_weighted(acc, p, b)    acc (R, W) += p b
    clear(acc)                 acc (R, W) = 0
    """
    sizes = tile_sizes(D)
    TILE = sizes.TILE
    R = sizes.R
    C = sizes.C
    W = sizes.W

    @device
    def dots(s, a, b):
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        for i in range(R):
            for j in range(C):
                s[i, j] = float32(0.0)
        for d in range(D):
            for i in range(R):
                for j in range(C):
                    s[i, j] += a[y + ROWS * i, d] * b[x + LANES * j, d]

    @device
    def add_weighted(acc, p, b):
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        for n in range(TILE):
            for i in range(R):
                for w in range(W):
                    acc[i, w] += p[y + ROWS * i, n] * b[n, x + LANES * w]

    @device
    def clear(acc):
        for i in range(R):
            for w in range(W):
                acc[i, w] = float32(0.0)

    return dots, add_weighted, clear


# ----------------------------------------------------------------------------- forward
@functools.cache
def make_add_scores(D, CAUSAL, BOUNDED=False):
    """Return add_scores(p, s, acc, top, total, lo, first, n0, S, scale): one tile of the online
    softmax.

    Writes exp(s - top) to the shared tile p; acc, top and total are updated to the new maximum.
    first: the last key that row 0 of the tile sees. n0: the tile's first key. S: number of keys. lo
    (R,): the first key that each row sees, if BOUNDED.
    """
    sizes = tile_sizes(D)
    R = sizes.R
    C = sizes.C
    W = sizes.W

    @device
    def add_scores(p, s, acc, top, total, lo, first, n0, S, scale):
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        for i in range(R):
            row = y + ROWS * i
            new = top[i]
            for j in range(C):
                n = n0 + x + LANES * j
                hidden = n >= S or (CAUSAL and n > first + row) or (BOUNDED and n < lo[i])
                s[i, j] = NEG_INF if hidden else s[i, j] * scale
                new = new if new > s[i, j] else s[i, j]
            new = row_max(new)
            shrink = math.exp(top[i] - new)
            top[i] = new
            total[i] *= shrink
            for w in range(W):
                acc[i, w] *= shrink
            for j in range(C):
                weight = math.exp(s[i, j] - new)
                total[i] += weight
                p[row, x + LANES * j] = weight

    return add_scores


@functools.cache
def make_fwd_kernel(D: int, CAUSAL: bool, KIND: int = 0):
    """Return the forward kernel for heads of width D. KIND: of key_bounds.py. Launch with THREADS
    threads."""
    sizes = tile_sizes(D)
    TILE = sizes.TILE
    PAD = sizes.PAD
    R = sizes.R
    C = sizes.C
    W = sizes.W
    V_TILE = sizes.V_TILE
    TURNS = D > WIDE
    TILE1 = TILE + 1
    load_tile, store_row = make_load_store(D)
    dots, add_weighted, clear = make_products(D)
    add_scores = make_add_scores(D, CAUSAL, KIND != 0)
    first_key = make_first_key(KIND)

    @kernel(THREADS)
    def flash_attention_fp32_fwd_kernel(o_BTHD, lse_BHT, q_BTHD, k_BSGD, v_BSGD, first, scale):
        """Grid (ceil(T / TILE), B H)."""
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        T = q_BTHD.shape[1]
        H = q_BTHD.shape[2]
        S = k_BSGD.shape[1]
        G = k_BSGD.shape[2]
        b = int64(cuda.blockIdx.y) // H
        h = cuda.blockIdx.y % H
        g = h // (H // G)
        t0 = int64(cuda.blockIdx.x) * TILE
        past = S - T
        q = cuda.shared.array((TILE, PAD), float32)
        k = cuda.shared.array((TILE, PAD), float32)
        v = cuda.shared.array((V_TILE, PAD), float32)
        p = cuda.shared.array((TILE, TILE1), float32)
        s = cuda.local.array((R, C), float32)
        acc = cuda.local.array((R, W), float32)
        top = cuda.local.array(R, float32)
        total = cuda.local.array(R, float32)
        lo = cuda.local.array(R, int32)
        clear(acc)
        for i in range(R):
            top[i] = LOWEST
            total[i] = float32(0.0)
            lo[i] = first_key(first, b * T, min(t0 + y + ROWS * i, T - 1), past)
        load_tile(q, q_BTHD, b, t0, h)
        # end of the keys that the block sees
        end = t0 + TILE + past if CAUSAL and t0 + TILE < T else S
        for n0 in range(first_key(first, b * T, t0, past) // TILE * TILE, end, TILE):
            cuda.syncthreads()  # all warps have left the previous tile
            load_tile(k, k_BSGD, b, n0, g)
            if not TURNS:
                load_tile(v, v_BSGD, b, n0, g)
            cuda.syncthreads()
            dots(s, q, k)
            add_scores(p, s, acc, top, total, lo, t0 + past, n0, S, scale)
            if TURNS:
                cuda.syncthreads()  # all warps have read the keys
                load_tile(k, v_BSGD, b, n0, g)
                cuda.syncthreads()
                add_weighted(acc, p, k)
            else:
                cuda.syncwarp()  # a row of p is written and read by the same half of a warp
                add_weighted(acc, p, v)
        for i in range(R):
            t = t0 + y + ROWS * i
            row_total = row_sum(total[i])
            if x == 0 and t < T:
                lse_BHT[b, h, t] = top[i] + math.log(row_total)
            store_row(o_BTHD, b, t, h, acc[i], float32(1.0) / row_total)

    return flash_attention_fp32_fwd_kernel


# ----------------------------------------------------------------------------- backward
@functools.cache
def make_dq_kernel(D: int, CAUSAL: bool, KIND: int = 0):
    """Return the dQ kernel for heads of width D. Launch with THREADS threads."""
    sizes = tile_sizes(D)
    TILE = sizes.TILE
    PAD = sizes.PAD
    R = sizes.R
    C = sizes.C
    W = sizes.W
    TILE1 = TILE + 1
    load_tile, store_row = make_load_store(D)
    dots, add_weighted, clear = make_products(D)
    first_key = make_first_key(KIND)

    @kernel(THREADS)
    def flash_attention_fp32_dq_kernel(
        dq_BTHD, delta_BHT, do_BTHD, q_BTHD, k_BSGD, v_BSGD, o_BTHD, lse_BHT, first, scale
    ):
        """Grid (ceil(T / TILE), B H). Also writes delta = rowsum(dO O)."""
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        T = q_BTHD.shape[1]
        H = q_BTHD.shape[2]
        S = k_BSGD.shape[1]
        G = k_BSGD.shape[2]
        b = int64(cuda.blockIdx.y) // H
        h = cuda.blockIdx.y % H
        g = h // (H // G)
        t0 = int64(cuda.blockIdx.x) * TILE
        past = S - T
        q = cuda.shared.array((TILE, PAD), float32)
        do = cuda.shared.array((TILE, PAD), float32)
        k = cuda.shared.array((TILE, PAD), float32)
        v = cuda.shared.array((TILE, PAD), float32)
        ds = cuda.shared.array((TILE, TILE1), float32)
        s = cuda.local.array((R, C), float32)
        dp = cuda.local.array((R, C), float32)
        acc = cuda.local.array((R, W), float32)
        delta = cuda.local.array(R, float32)
        load_tile(q, q_BTHD, b, t0, h)
        load_tile(do, do_BTHD, b, t0, h)
        load_tile(k, o_BTHD, b, t0, h)  # o, until the keys are loaded
        cuda.syncthreads()
        clear(acc)
        for i in range(R):
            row = y + ROWS * i
            dot = float32(0.0)
            for w in range(W):
                dot += do[row, x + LANES * w] * k[row, x + LANES * w]
            delta[i] = row_sum(dot)
            if x == 0 and t0 + row < T:
                delta_BHT[b, h, t0 + row] = delta[i]
        end = t0 + TILE + past if CAUSAL and t0 + TILE < T else S
        for n0 in range(first_key(first, b * T, t0, past) // TILE * TILE, end, TILE):
            cuda.syncthreads()
            load_tile(k, k_BSGD, b, n0, g)
            load_tile(v, v_BSGD, b, n0, g)
            cuda.syncthreads()
            dots(s, q, k)
            dots(dp, do, v)
            for i in range(R):
                row = y + ROWS * i
                lo = first_key(first, b * T, min(t0 + row, T - 1), past)
                for j in range(C):
                    n = n0 + x + LANES * j
                    weight = float32(0.0)
                    seen = n >= lo and not (CAUSAL and n > t0 + row + past)
                    if n < S and t0 + row < T and seen:
                        weight = math.exp(s[i, j] * scale - lse_BHT[b, h, t0 + row])
                    ds[row, x + LANES * j] = weight * (dp[i, j] - delta[i])
            cuda.syncwarp()
            add_weighted(acc, ds, k)
        for i in range(R):
            store_row(dq_BTHD, b, t0 + y + ROWS * i, h, acc[i], scale)

    return flash_attention_fp32_dq_kernel


@functools.cache
def make_dkdv_kernel(D: int, CAUSAL: bool, KIND: int = 0):
    """Return the dK, dV kernel for heads of width D. Launch with THREADS threads."""
    sizes = tile_sizes(D)
    TILE = sizes.TILE
    PAD = sizes.PAD
    R = sizes.R
    C = sizes.C
    W = sizes.W
    TILE1 = TILE + 1
    load_tile, store_row = make_load_store(D)
    dots, add_weighted, clear = make_products(D)
    last_query = make_last_query(KIND)

    @kernel(THREADS)
    def flash_attention_fp32_dkdv_kernel(
        dk_BSGD, dv_BSGD, do_BTHD, q_BTHD, k_BSGD, v_BSGD, lse_BHT, delta_BHT, last, scale
    ):
        """Grid (ceil(S / TILE), B G). Rows are keys, columns are queries: s and dp are
        transposed."""
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        T = q_BTHD.shape[1]
        H = q_BTHD.shape[2]
        S = k_BSGD.shape[1]
        G = k_BSGD.shape[2]
        b = int64(cuda.blockIdx.y) // G
        g = cuda.blockIdx.y % G
        n0 = int64(cuda.blockIdx.x) * TILE
        past = S - T
        group = H // G
        q = cuda.shared.array((TILE, PAD), float32)
        do = cuda.shared.array((TILE, PAD), float32)
        k = cuda.shared.array((TILE, PAD), float32)
        v = cuda.shared.array((TILE, PAD), float32)
        p = cuda.shared.array((TILE, TILE1), float32)
        ds = cuda.shared.array((TILE, TILE1), float32)
        s = cuda.local.array((R, C), float32)
        dp = cuda.local.array((R, C), float32)
        dk = cuda.local.array((R, W), float32)
        dv = cuda.local.array((R, W), float32)
        clear(dk)
        clear(dv)
        load_tile(k, k_BSGD, b, n0, g)
        load_tile(v, v_BSGD, b, n0, g)
        # the first tile of queries that sees a key of this block
        first = (n0 - past) // TILE * TILE if CAUSAL and n0 > past else 0
        end = last_query(last, b * S, min(n0 + TILE, S) - 1, T, past) + 1
        for h in range(g * group, (g + 1) * group):
            for t0 in range(first, end, TILE):
                cuda.syncthreads()
                load_tile(q, q_BTHD, b, t0, h)
                load_tile(do, do_BTHD, b, t0, h)
                cuda.syncthreads()
                dots(s, k, q)
                dots(dp, v, do)
                for i in range(R):
                    row = y + ROWS * i
                    latest = last_query(last, b * S, min(n0 + row, S - 1), T, past)
                    for j in range(C):
                        t = t0 + x + LANES * j
                        weight = float32(0.0)
                        gradient = float32(0.0)
                        if t <= latest and not (CAUSAL and n0 + row > t + past):
                            weight = math.exp(s[i, j] * scale - lse_BHT[b, h, t])
                            gradient = weight * (dp[i, j] - delta_BHT[b, h, t])
                        p[row, x + LANES * j], ds[row, x + LANES * j] = weight, gradient
                cuda.syncwarp()
                add_weighted(dv, p, do)
                add_weighted(dk, ds, q)
        for i in range(R):
            store_row(dk_BSGD, b, n0 + y + ROWS * i, g, dk[i], scale)
            store_row(dv_BSGD, b, n0 + y + ROWS * i, g, dv[i], float32(1.0))

    return flash_attention_fp32_dkdv_kernel
