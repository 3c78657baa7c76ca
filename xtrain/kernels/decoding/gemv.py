"""Matrix-vector products for a few rows at a time: y = x w^T, fused with a decoder's operations before and after it.

    x: (N, K), N <= 8    w: (O, K), as Hugging Face stores it    y: (N, O)

    norm       x is first RMS-normalized: x r nw,  r = 1 / sqrt(mean_k(x^2) + eps)       (rmsnorm.py)
               r is one number per row, so it can be applied at the end: y = r ((x nw) w^T). The kernels sum the squares of
               what they read for the product anyway, so there is no separate pass over x.
    swiglu     w holds gate rows, then up rows, F each: y_f = silu(x . w_f) (x . w_{F + f})   (swiglu.py)
    residual   y += residual, which may be y itself

A decoding step reads every weight once and does little arithmetic with it: 2 N operations per weight. So the memory must never
be idle, and every fused kernel saves a gap between two kernels:

    bf16 weights   tensor cores: gemv_tensor_cores.py
    float32        plain arithmetic, one warp per row of w

Bytes moved: read w; x, y and residual are small.
"""

import functools

import numpy as np
from numba import cuda, float32, int64
from numba.cuda.libdevice import rsqrtf

from ...device import Array
from ..primitives.flat import on_16_bytes
from ..primitives.ptx import kernel, let_next_start, load1, load4, store1, wait_for_previous
from ..primitives.reduce import warp_sum
from ..runtime.launch import FLOATS, can_overlap, check, check_array, empty, launch, on_host
from ..swiglu import sigmoid, silu_ref
from .gemv_tensor_cores import (
    CHUNK,
    MAX_ROWS,
    MULTIPROCESSORS,
    TILE,
    Variant,
    choose,
    make_tensor_kernel,
    shared_bytes,
    staged,
)

BLOCK = 256
LINE = 64  # bf16 of a line of the L2 cache


# ----------------------------------------------------------------------------- reference
def gemv_ref(x_NK, w_OK, norm_w_K=None, eps=0.0, residual_NO=None, swiglu=False):
    """gemv in NumPy -> y (N, O), or (N, O / 2) with swiglu, in x's dtype, at least float32.

    Computes row by row: a BLAS sums a matrix-matrix product in another order than a matrix-vector product, and here a row's
    bits must not depend on the other rows.
    """
    wide = np.result_type(x_NK.dtype, np.float32)
    x, w = x_NK.astype(wide), w_OK.astype(wide, copy=False)
    if norm_w_K is not None:
        r_N = 1 / np.sqrt(np.einsum("nk,nk->n", x, x) / x.shape[1] + wide.type(eps))
        x = x * r_N[:, None] * norm_w_K
    y = np.stack([w @ row for row in x]) if len(x) else np.zeros((0, w.shape[0]), wide)
    if swiglu:
        F = y.shape[1] // 2
        y = silu_ref(y[:, :F]) * y[:, F:]
    return y if residual_NO is None else y + residual_NO.astype(wide, copy=False)


# ----------------------------------------------------------------------------- kernels without tensor cores
@cuda.jit
def gemv_naive_kernel(y_NO, x_NK, w_OK):
    """Grid (ceil(O / BLOCK), N), block BLOCK. One thread per element of y: neighbouring threads read different rows of w."""
    o, n = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x, cuda.blockIdx.y
    if o < w_OK.shape[0]:
        acc = float32(0.0)
        for k in range(w_OK.shape[1]):
            acc += x_NK[n, k] * w_OK[o, k]
        y_NO[n, o] = acc


@functools.cache
def make_plain_kernel(N, K, NORM, SWIGLU, RESIDUAL, overlap):
    """-> the kernel without tensor cores, for any dtypes.

    A warp reads a row of w (two with swiglu), 4 columns per lane, and all rows of x.
    """
    M = 2 if SWIGLU else 1

    @kernel(BLOCK)
    def gemv_plain_kernel(y, x, w, norm_w, residual, F, eps):
        """Grid ceil(F / 8), block BLOCK: 8 warps. All arrays flat. F: columns of y."""
        lane, o = cuda.threadIdx.x & 31, int64(cuda.blockIdx.x) * 8 + (cuda.threadIdx.x >> 5)
        x_4, w_M4 = cuda.local.array(4, float32), cuda.local.array((M, 4), float32)
        acc_NM, squares = cuda.local.array((N, M), float32), cuda.local.array(N, float32)
        nw_4 = cuda.local.array(4, float32)
        if overlap:
            wait_for_previous()
            let_next_start()
        if o >= F:
            return
        for n in range(N):
            squares[n] = float32(0.0)
            for m in range(M):
                acc_NM[n, m] = float32(0.0)
        for k in range(4 * lane, K, 128):
            for m in range(M):
                load4(w_M4[m], w, (o + m * F) * K + k)
            if NORM:
                load4(nw_4, norm_w, k)
            for n in range(N):
                load4(x_4, x, n * K + k)
                for j in range(4):
                    if NORM:
                        squares[n] += x_4[j] * x_4[j]
                        x_4[j] *= nw_4[j]
                    for m in range(M):
                        acc_NM[n, m] += x_4[j] * w_M4[m, j]
        for n in range(N):
            r = float32(1.0)
            if NORM:
                r = rsqrtf(warp_sum(squares[n]) * float32(1 / K) + eps)
            value = warp_sum(acc_NM[n, 0]) * r
            if SWIGLU:
                value *= sigmoid(value) * (warp_sum(acc_NM[n, 1]) * r)
            if lane == 0:
                if RESIDUAL:
                    value += load1(residual, n * F + o)
                store1(y, n * F + o, value)

    return gemv_plain_kernel


# ----------------------------------------------------------------------------- launchers
def gemv_fits(N: int, K: int, dtype) -> bool:
    """True if gemv supports N rows and weights of width K and this dtype on a GPU."""
    return 0 < N <= MAX_ROWS and K % _unit(dtype) == 0


def _unit(dtype):
    """-> the number of which K must be a multiple for weights of this dtype"""
    return 4 if np.dtype(dtype) == np.float32 else CHUNK


def gemv(
    x_NK: Array,
    w_OK: Array,
    norm_w_K: Array | None = None,
    eps: float = 0.0,
    residual_NO: Array | None = None,
    swiglu: bool = False,
    dtype=None,
    out: Array | None = None,
    weights_ready: bool = False,
    next_w: Array | None = None,
) -> Array:
    """-> y (N, O) = x w^T, or (N, O / 2) with swiglu; this file's docstring defines the fused operations.

    x (N, K), w (O, K), residual and out (shape of y): float32 or bf16; norm_w (K,): float32. dtype: of y; by default
    residual's, else w's. out: where y is written; it may be residual, but not x. A row's bits do not depend on other rows.
    weights_ready: the previous kernel writes neither w nor norm_w, so they may be read before it ends.
    next_w: weights, flat, that a later kernel will read; on a GPU they are prefetched into the L2 cache.
    On a GPU, N <= MAX_ROWS, and K is a multiple of 32 (of 4 for float32 weights). Raises ValueError or TypeError if shapes or
    dtypes do not match.
    """
    check_array("gemv", "x", x_NK, (None, None), FLOATS)
    N, K = x_NK.shape
    check_array("gemv", "w", w_OK, (None, K), FLOATS)
    check(
        not swiglu or w_OK.shape[0] % 2 == 0,
        f"gemv: swiglu of {w_OK.shape[0]} rows of w, expected an even number",
    )
    shape = (N, w_OK.shape[0] // 2 if swiglu else w_OK.shape[0])
    given = [x for x in (norm_w_K, residual_NO, out, next_w) if x is not None]
    if norm_w_K is not None:
        check_array("gemv", "norm_w", norm_w_K, (K,))
    if residual_NO is not None:
        check_array("gemv", "residual", residual_NO, shape, FLOATS)
    if next_w is not None:
        check_array("gemv", "next_w", next_w, (None,), FLOATS)
    dtype = np.dtype(dtype or (w_OK if residual_NO is None else residual_NO).dtype)
    if out is not None:
        check_array("gemv", "out", out, shape, (dtype.name,))
    if on_host(x_NK, w_OK, *given):
        y = gemv_ref(x_NK, w_OK, norm_w_K, eps, residual_NO, swiglu).astype(dtype, copy=False)
        if out is None:
            return y
        out[...] = y
        return out
    unit, fits = _unit(w_OK.dtype), gemv_fits(N, K, w_OK.dtype)
    check(fits, f"gemv: {N} rows of {K}, the GPU supports 1 to {MAX_ROWS} of a multiple of {unit}")
    y = empty(x_NK, shape, dtype) if out is None else out
    _launch(y, x_NK, w_OK, norm_w_K, eps, residual_NO, swiglu, weights_ready, None, next_w)
    return y


def _launch(
    y, x_NK, w_OK, norm_w_K, eps, residual_NO, swiglu, weights_ready, config=None, next_w=None
):
    (N, K), F, overlap = x_NK.shape, y.shape[1], can_overlap(x_NK)
    # must not be None
    norm_w, residual = (x_NK if a is None else a for a in (norm_w_K, residual_NO))
    arrays = [a.reshape(-1) for a in (y, x_NK, w_OK, norm_w, residual)]
    check(on_16_bytes(*arrays[1:4]), "gemv: x, w and norm_w must begin at multiples of 16 bytes")
    eps = np.float32(eps)
    if w_OK.dtype == np.float32:
        fused = norm_w_K is not None, swiglu, residual_NO is not None
        plain_kernel = make_plain_kernel(N, K, *fused, overlap)
        return launch(plain_kernel, -(-F // 8), BLOCK, *arrays, F, eps, overlap=overlap)
    half = x_NK.dtype != np.float32 and norm_w_K is None
    config = config or choose(K, F, swiglu, norm_w_K is not None)
    tiles = -(-F // TILE)
    grid = min(tiles, config.blocks * MULTIPROCESSORS)
    once = tiles == grid and config.warps * config.chunks * CHUNK >= K
    next_w = arrays[2][:0] if next_w is None else next_w[: next_w.size // 8 * 8]
    check(on_16_bytes(next_w), "gemv: next_w must begin at a multiple of 16 bytes")
    share = -(-next_w.size // (grid * LINE)) * LINE
    variant = Variant(
        norm=norm_w_K is not None,
        half=half,
        swiglu=swiglu,
        residual=residual_NO is not None,
        overlap=overlap,
        ready=weights_ready,
        once=once,
        staged=staged(K, config),
        follow=next_w.size > 0,
    )
    tensor_kernel = make_tensor_kernel(K, variant, config)
    shared, numbers = shared_bytes(N, K) if variant.staged else 0, (N, F, share, eps)
    block, arrays = 32 * config.warps, (*arrays, next_w)
    launch(tensor_kernel, grid, block, *arrays, *numbers, shared=shared, overlap=overlap)
