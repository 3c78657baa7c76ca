"""FlashAttention without tensor cores: float32, any head dim up to 128. The maths of flash_attention.py, to be read.

    block      128 threads, (y, x) = (8, 16); it owns TILE rows (queries, in the dK, dV kernel keys) of one head
    tiles      TILE rows of up to four arrays in shared memory, one column wider than needed: rows then begin in
               different banks, and 16 lanes that read one column of 16 rows do not wait for each other
    thread     rows y, y + 8, ... and columns x, x + 16, ... of every product; the 16 lanes of a row are half a warp

Each product is a small matrix product out of shared memory with its results in registers. Between the two products of
a tile, p (or ds) goes through shared memory, since the second one needs whole rows of it.
"""

import functools
import math
from types import SimpleNamespace

from numba import cuda, float32, int64

from ._ptx import device, kernel
from ._reduce import FULL

ROWS, LANES = 8, 16  # threads: y, x
THREADS = ROWS * LANES
MAX_D = 128
NEG_INF = float32(-math.inf)
LOWEST = float32(-1e30)  # the first maximum; with -inf, -inf - -inf would be NaN


def tile_rows(D: int) -> int:
    """Four tiles and the weights must fit 48 KB of shared memory."""
    return 32 if D <= 64 else 16


@functools.cache
def make_ops(D):
    """Constants and device functions for heads of D columns:

    load_tile(tile, x_BTHD, b, t0, h)       rows t0, t0 + 1, ... of head h; zeros beyond the last position and column
    dots(s, a, b)                           s (R, C) = this thread's part of a b^T
    weighted(acc, p, b)                     acc (R, W) += this thread's part of p b
    row_sum(v), row_max(v)                  over the 16 lanes that share a row
    """
    TILE, W = tile_rows(D), -(-D // LANES)
    R, C, WIDTH = TILE // ROWS, TILE // LANES, LANES * W

    @device
    def load_tile(tile, x_BTHD, b, t0, h):
        for i in range(cuda.threadIdx.x, TILE * WIDTH, THREADS):
            r, d = i // WIDTH, i % WIDTH
            inside = t0 + r < x_BTHD.shape[1] and d < D
            tile[r, d] = x_BTHD[b, t0 + r, h, d] if inside else float32(0.0)

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
    def weighted(acc, p, b):
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        for n in range(TILE):
            for i in range(R):
                for w in range(W):
                    acc[i, w] += p[y + ROWS * i, n] * b[n, x + LANES * w]

    @device
    def row_sum(v):
        for step in (8, 4, 2, 1):
            v += cuda.shfl_xor_sync(FULL, v, step)
        return v

    @device
    def row_max(v):
        for step in (8, 4, 2, 1):
            v = max(v, cuda.shfl_xor_sync(FULL, v, step))
        return v

    @device
    def store_rows(y_BTHD, b, t0, h, acc, i, factor):
        """Row i of this thread"""
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        t = t0 + y + ROWS * i
        for w in range(W):
            if t < y_BTHD.shape[1] and x + LANES * w < D:
                y_BTHD[b, t, h, x + LANES * w] = acc[i, w] * factor

    return SimpleNamespace(
        TILE=TILE, PAD=WIDTH + 1, R=R, C=C, W=W, load_tile=load_tile, dots=dots, weighted=weighted,
        row_sum=row_sum, row_max=row_max, store_rows=store_rows,
    )  # fmt: skip


@functools.cache
def make_fwd_kernel(D, CAUSAL):
    ops = make_ops(D)
    TILE, PAD, R, C, W = ops.TILE, ops.PAD, ops.R, ops.C, ops.W
    load_tile, dots, weighted, store_rows = ops.load_tile, ops.dots, ops.weighted, ops.store_rows
    row_sum, row_max, TILE1 = ops.row_sum, ops.row_max, ops.TILE + 1

    @kernel(THREADS)
    def flash_attention_fp32_fwd_kernel(o_BTHD, lse_BHT, q_BTHD, k_BSGD, v_BSGD, scale):
        """Grid (ceil(T / TILE), B H)."""
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        T, H, S, G = q_BTHD.shape[1], q_BTHD.shape[2], k_BSGD.shape[1], k_BSGD.shape[2]
        b, h = int64(cuda.blockIdx.y) // H, cuda.blockIdx.y % H
        t0, past = int64(cuda.blockIdx.x) * TILE, S - T
        q, k = cuda.shared.array((TILE, PAD), float32), cuda.shared.array((TILE, PAD), float32)
        v = cuda.shared.array((TILE, PAD), float32)
        p = cuda.shared.array((TILE, TILE1), float32)
        s, acc = cuda.local.array((R, C), float32), cuda.local.array((R, W), float32)
        top, total = cuda.local.array(R, float32), cuda.local.array(R, float32)
        for i in range(R):
            top[i], total[i] = LOWEST, float32(0.0)
            for w in range(W):
                acc[i, w] = float32(0.0)
        load_tile(q, q_BTHD, b, t0, h)
        end = min(t0 + TILE + past, S) if CAUSAL else S
        for n0 in range(0, end, TILE):
            cuda.syncthreads()  # everybody has left the tile before
            load_tile(k, k_BSGD, b, n0, h // (H // G))
            load_tile(v, v_BSGD, b, n0, h // (H // G))
            cuda.syncthreads()
            dots(s, q, k)
            for i in range(R):
                row, new = y + ROWS * i, top[i]
                for j in range(C):
                    n = n0 + x + LANES * j
                    hidden = n >= S or (CAUSAL and n > t0 + row + past)
                    s[i, j] = NEG_INF if hidden else s[i, j] * scale
                    new = max(new, s[i, j])
                new = row_max(new)
                shrink = math.exp(top[i] - new)  # the sums so far, relative to the new maximum
                top[i] = new
                total[i] *= shrink
                for w in range(W):
                    acc[i, w] *= shrink
                for j in range(C):
                    weight = math.exp(s[i, j] - new)
                    total[i] += weight
                    p[row, x + LANES * j] = weight
            cuda.syncwarp()  # a row of p is written and read by the same half of a warp
            weighted(acc, p, v)
        for i in range(R):
            t, sum_i = t0 + y + ROWS * i, row_sum(total[i])
            if x == 0 and t < T:
                lse_BHT[b, h, t] = top[i] + math.log(sum_i)
            store_rows(o_BTHD, b, t0, h, acc, i, float32(1.0) / sum_i)

    return flash_attention_fp32_fwd_kernel


@functools.cache
def make_dq_kernel(D, CAUSAL):
    ops = make_ops(D)
    TILE, PAD, R, C, W = ops.TILE, ops.PAD, ops.R, ops.C, ops.W
    load_tile, dots, weighted, store_rows = ops.load_tile, ops.dots, ops.weighted, ops.store_rows
    row_sum, TILE1 = ops.row_sum, ops.TILE + 1

    @kernel(THREADS)
    def flash_attention_fp32_dq_kernel(
        dq_BTHD, delta_BHT, do_BTHD, q_BTHD, k_BSGD, v_BSGD, o_BTHD, lse_BHT, scale
    ):
        """Grid (ceil(T / TILE), B H). Writes delta = rowsum(dO O) too."""
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        T, H, S, G = q_BTHD.shape[1], q_BTHD.shape[2], k_BSGD.shape[1], k_BSGD.shape[2]
        b, h = int64(cuda.blockIdx.y) // H, cuda.blockIdx.y % H
        t0, past = int64(cuda.blockIdx.x) * TILE, S - T
        q, do = cuda.shared.array((TILE, PAD), float32), cuda.shared.array((TILE, PAD), float32)
        k = cuda.shared.array((TILE, PAD), float32)
        v = cuda.shared.array((TILE, PAD), float32)
        ds = cuda.shared.array((TILE, TILE1), float32)
        s, dp = cuda.local.array((R, C), float32), cuda.local.array((R, C), float32)
        acc, delta = cuda.local.array((R, W), float32), cuda.local.array(R, float32)
        lse = cuda.local.array(R, float32)
        load_tile(q, q_BTHD, b, t0, h)
        load_tile(do, do_BTHD, b, t0, h)
        load_tile(k, o_BTHD, b, t0, h)  # o, for a moment
        cuda.syncthreads()
        for i in range(R):
            row, dot = y + ROWS * i, float32(0.0)
            for w in range(W):
                acc[i, w] = float32(0.0)
                dot += do[row, x + LANES * w] * k[row, x + LANES * w]
            delta[i], lse[i] = row_sum(dot), float32(0.0)
            if t0 + row < T:
                lse[i] = lse_BHT[b, h, t0 + row]
                if x == 0:
                    delta_BHT[b, h, t0 + row] = delta[i]
        end = min(t0 + TILE + past, S) if CAUSAL else S
        for n0 in range(0, end, TILE):
            cuda.syncthreads()
            load_tile(k, k_BSGD, b, n0, h // (H // G))
            load_tile(v, v_BSGD, b, n0, h // (H // G))
            cuda.syncthreads()
            dots(s, q, k)
            dots(dp, do, v)
            for i in range(R):
                row = y + ROWS * i
                for j in range(C):
                    n = n0 + x + LANES * j
                    hidden = n >= S or (CAUSAL and n > t0 + row + past)
                    weight = float32(0.0) if hidden else math.exp(s[i, j] * scale - lse[i])
                    ds[row, x + LANES * j] = weight * (dp[i, j] - delta[i])
            cuda.syncwarp()
            weighted(acc, ds, k)
        for i in range(R):
            store_rows(dq_BTHD, b, t0, h, acc, i, scale)

    return flash_attention_fp32_dq_kernel


@functools.cache
def make_dkdv_kernel(D, CAUSAL):
    ops = make_ops(D)
    TILE, PAD, R, C, W = ops.TILE, ops.PAD, ops.R, ops.C, ops.W
    load_tile, dots, weighted, store_rows = ops.load_tile, ops.dots, ops.weighted, ops.store_rows
    TILE1 = ops.TILE + 1

    @kernel(THREADS)
    def flash_attention_fp32_dkdv_kernel(
        dk_BSGD, dv_BSGD, do_BTHD, q_BTHD, k_BSGD, v_BSGD, lse_BHT, delta_BHT, scale
    ):
        """Grid (ceil(S / TILE), B G). Rows are keys, columns queries: s and dp are transposed here."""
        y, x = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        T, H, S, G = q_BTHD.shape[1], q_BTHD.shape[2], k_BSGD.shape[1], k_BSGD.shape[2]
        b, g = int64(cuda.blockIdx.y) // G, cuda.blockIdx.y % G
        n0, past, group = int64(cuda.blockIdx.x) * TILE, S - T, H // G
        q, do = cuda.shared.array((TILE, PAD), float32), cuda.shared.array((TILE, PAD), float32)
        k = cuda.shared.array((TILE, PAD), float32)
        v = cuda.shared.array((TILE, PAD), float32)
        p = cuda.shared.array((TILE, TILE1), float32)
        ds = cuda.shared.array((TILE, TILE1), float32)
        s, dp = cuda.local.array((R, C), float32), cuda.local.array((R, C), float32)
        dk, dv = cuda.local.array((R, W), float32), cuda.local.array((R, W), float32)
        for i in range(R):
            for w in range(W):
                dk[i, w], dv[i, w] = float32(0.0), float32(0.0)
        load_tile(k, k_BSGD, b, n0, g)
        load_tile(v, v_BSGD, b, n0, g)
        first = max(n0 - past, 0) // TILE * TILE if CAUSAL else 0  # earlier queries see none of these keys
        for h in range(g * group, (g + 1) * group):
            for t0 in range(first, T, TILE):
                cuda.syncthreads()
                load_tile(q, q_BTHD, b, t0, h)
                load_tile(do, do_BTHD, b, t0, h)
                cuda.syncthreads()
                dots(s, k, q)
                dots(dp, v, do)
                for i in range(R):
                    row = y + ROWS * i
                    for j in range(C):
                        column = x + LANES * j
                        t, weight, ds_ij = t0 + column, float32(0.0), float32(0.0)
                        if t < T and not (CAUSAL and n0 + row > t + past):
                            weight = math.exp(s[i, j] * scale - lse_BHT[b, h, t])
                            ds_ij = weight * (dp[i, j] - delta_BHT[b, h, t])
                        p[row, column], ds[row, column] = weight, ds_ij
                cuda.syncwarp()
                weighted(dv, p, do)
                weighted(dk, ds, q)
        for i in range(R):
            store_rows(dk_BSGD, b, n0, g, dk, i, scale)
            store_rows(dv_BSGD, b, n0, g, dv, i, float32(1.0))

    return flash_attention_fp32_dkdv_kernel
