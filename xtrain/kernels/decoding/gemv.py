"""Matrix-vector products for a few rows at a time: y = x w^T, fused with a decoder's operations
before and after it.

    x: (N, K), N <= 8    w: (O, K), as Hugging Face stores it, or quantized
    y: (N, O)            b: (O,), optional

    add        x is first replaced by h = x + delta, the residual stream, which is a result too
    norm       h is RMS-normalized: h r nw,  r = 1 / sqrt(mean_k(h^2) + eps)       (rmsnorm.py)
               r is one number per row, so it can be applied at the end: y = r ((h nw) w^T). The
               kernels sum the squares of what they read for the product anyway, so there is no
               separate pass over x.
    bias       b is added to the product, in float32
    swiglu     w holds gate rows, then up rows, F each (swiglu.py):
               y_f = silu(x . w_f) (x . w_{F + f})

A decoding step reads every weight once and does little arithmetic with it: 2 N operations per
weight. So the memory must never be idle, and every fused kernel saves a gap between two kernels:

    bf16 weights   tensor cores: gemv_tensor_cores.py
    float32        plain arithmetic, one warp per row of w
    quantized      one byte or four bits per weight (quantize.py): the same two, by the dtype
                   that the codes stand for. With tensor cores up to 32 rows, where nothing precedes
                   the product: a GEMM would need a dequantized copy

Every block needs all of h, so every block computes it; each writes a part of it to memory.
Bytes moved: read w; x, y and delta are small.
"""

import functools

import numpy as np

from ...device import Array
from ..cast import cast_fwd
from ..four_bits import FOUR_BITS, chunks_of, make_load_values
from ..primitives.codes import codes_to_floats, load_codes16
from ..primitives.flat import on_16_bytes
from ..primitives.ptx import (
    device,
    kernel,
    let_next_start,
    load4,
    store1,
    store4,
    wait_for_previous,
)
from ..primitives.reduce import warp_sum
from ..quantize import check_quantized, dense, kind_of
from ..runtime.compiler import cuda, float32, int64, rsqrtf, uint32
from ..runtime.launch import FLOATS, can_overlap, check, check_array, empty, launch, on_host
from ..swiglu import sigmoid, silu_ref
from .gemv_operands import (
    MAX_ROWS,
    MAX_ROWS_QUANTIZED,
    TILE,
    Rows,
    Variant,
    Weights,
    chunk_columns,
    shared_bytes,
    staged,
)
from .gemv_tensor_cores import MULTIPROCESSORS, choose, make_tensor_kernel

BLOCK = 256
# Tiles of 16 rows of w that a block multiplies with what it has read of more than 8 rows of x.
# Every block reads all of x, so 2 halve that traffic: gate/up is 1.04 to 1.17 times as fast on an
# H100, with the same bits. Where each multiprocessor has at most one tile, 2 would leave half of
# them idle (2048 x 2048: 8 to 19 % longer), so such products keep 1.
ROW_TILES = 2


# ----------------------------------------------------------------------------- reference
def gemv_ref(x_NK, w_OK, norm_w_K=None, eps=0.0, delta_NK=None, swiglu=False, b_O=None):
    """gemv and add_norm_gemv in NumPy -> h (N, K), y (N, O), or (N, O / 2) with swiglu, in x's
    dtype, at least float32.

    Computes row by row: a BLAS sums a matrix-matrix product in another order than a matrix-vector
    product, and here a row's bits must not depend on the other rows.
    """
    wide = np.result_type(x_NK.dtype, np.float32)
    h = x_NK.astype(wide)
    w = w_OK.astype(wide, copy=False)
    h = h if delta_NK is None else h + delta_NK.astype(wide, copy=False)
    x = h
    if norm_w_K is not None:
        r_N = 1 / np.sqrt(np.einsum("nk,nk->n", x, x) / x.shape[1] + wide.type(eps))
        x = x * r_N[:, None] * norm_w_K
    y = np.stack([w @ row for row in x]) if len(x) else np.zeros((0, w.shape[0]), wide)
    y = y if b_O is None else y + b_O
    if swiglu:
        F = y.shape[1] // 2
        y = silu_ref(y[:, :F]) * y[:, F:]
    return h, y


# --------------------------------------------------------------------- kernels without tensor cores
@cuda.jit
def gemv_naive_kernel(y_NO, x_NK, w_OK):
    """Grid (ceil(O / BLOCK), N), block BLOCK. One thread per element of y: neighbouring threads
    read different rows of w."""
    o = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
    n = cuda.blockIdx.y
    if o < w_OK.shape[0]:
        acc = float32(0.0)
        for k in range(w_OK.shape[1]):
            acc += x_NK[n, k] * w_OK[o, k]
        y_NO[n, o] = acc


def make_multiply_row(N, K, NORM, ADD, SWIGLU, BIAS, QUANTIZED):
    """Return multiply_row(y, rows, weights, o, eps): column o of y, by one warp, for any dtypes.

    A warp reads a row of w (two with swiglu), 16 bytes per lane, and all rows of x: 4 columns, or
    16 if w is quantized, 32 with codes of four bits. QUANTIZED: the kind of w.
    """
    M = 2 if SWIGLU else 1
    FOUR = QUANTIZED in FOUR_BITS
    CODES = QUANTIZED != ""  # numba-cuda-mlir knows no truth of a text
    E = 4
    if QUANTIZED:
        E = 32 if FOUR else 16
    CHUNKS = chunks_of(K)
    COLUMNS = 128 * CHUNKS if FOUR else K
    load_values = make_load_values(QUANTIZED == "nf4")

    @device
    def multiply_row(y, rows, weights, o, eps):
        w = weights.w
        F = weights.F
        lane = cuda.threadIdx.x & 31
        x_4 = cuda.local.array(4, float32)
        w_ME = cuda.local.array((M, E), float32)
        acc_NM = cuda.local.array((N, M), float32)
        squares = cuda.local.array(N, float32)
        nw_4 = cuda.local.array(4, float32)
        delta_4 = cuda.local.array(4, float32)
        words = cuda.local.array(4, uint32)
        for n in range(N):
            squares[n] = float32(0.0)
            for m in range(M):
                acc_NM[n, m] = float32(0.0)
        for first in range(E * lane, COLUMNS, 32 * E):
            for m in range(M):
                if FOUR:
                    i = ((o + m * F) * COLUMNS + first) // 2
                    load_values(w_ME[m], w, weights.groups, i, first // 128, o + m * F, M * F)
                elif CODES:
                    load_codes16(words, w, (o + m * F) * K + first)
                    codes_to_floats(w_ME[m], words, w)
                else:
                    load4(w_ME[m], w, (o + m * F) * K + first)
            for e in range(0, E, 4):
                k = first + e
                if FOUR:  # its columns are those of load_values
                    k = first // 128 * 128 + e // 8 * 32 + first % 128 // 4 + e % 8
                    if k >= K:
                        continue
                if NORM:
                    load4(nw_4, rows.norm_w, k)
                for n in range(N):
                    load4(x_4, rows.x, n * K + k)
                    if ADD:
                        load4(delta_4, rows.delta, n * K + k)
                        for j in range(4):
                            x_4[j] += delta_4[j]
                        if k // 128 % F == o:  # the warps share the work of writing h
                            store4(rows.h, n * K + k, x_4)
                    for j in range(4):
                        if NORM:
                            squares[n] += x_4[j] * x_4[j]
                            x_4[j] *= nw_4[j]
                        for m in range(M):
                            acc_NM[n, m] += x_4[j] * w_ME[m, e + j]
        for n in range(N):
            r = float32(1.0)
            if NORM:
                r = rsqrtf(warp_sum(squares[n]) * float32(1 / K) + eps)
            value = warp_sum(acc_NM[n, 0]) * r
            if CODES:
                value *= weights.scale[o]
            if BIAS:
                value += weights.b[o]
            if SWIGLU:
                up = warp_sum(acc_NM[n, 1]) * r
                if CODES:
                    up *= weights.scale[F + o]
                if BIAS:
                    up += weights.b[F + o]
                value *= sigmoid(value) * up
            if lane == 0:
                store1(y, n * F + o, value)

    return multiply_row


@functools.cache
def make_plain_kernel(N, K, NORM, ADD, SWIGLU, BIAS, QUANTIZED, overlap):
    """Return the kernel without tensor cores, for any dtypes."""
    multiply_row = make_multiply_row(N, K, NORM, ADD, SWIGLU, BIAS, QUANTIZED)

    @kernel(BLOCK)
    def gemv_plain_kernel(y, h, x, delta, w, norm_w, scale, groups, b, F, eps):
        """Grid ceil(F / 8), block BLOCK: 8 warps. All arrays flat. F: columns of y.
        scale, groups: of the rows of quantized weights."""
        o = int64(cuda.blockIdx.x) * 8 + (cuda.threadIdx.x >> 5)
        if overlap:
            wait_for_previous()
            let_next_start()
        if o < F:
            multiply_row(y, Rows(x, delta, h, norm_w, N), Weights(w, scale, groups, b, F), o, eps)

    return gemv_plain_kernel


# ----------------------------------------------------------------------------- launchers
def gemv_fits(N: int, K: int, dtype, quantized: str = "", fused: bool = False) -> bool:
    """Return True if gemv supports N rows and weights of width K and this dtype on a GPU.

    fused: also add_norm_gemv.  quantized: the kind of codes, which stand for this dtype.
    """
    return 0 < N <= _most_rows(dtype, quantized, fused) and K % _unit(dtype, quantized) == 0


def _most_rows(dtype, quantized, fused):
    if fused or not quantized or np.dtype(dtype) == np.float32:
        return MAX_ROWS
    return MAX_ROWS_QUANTIZED


def _unit(dtype, quantized):
    """Return the number of which K must be a multiple for weights of this dtype"""
    if quantized in FOUR_BITS:
        return 8
    if np.dtype(dtype) == np.float32:
        return 16 if quantized else 4
    return chunk_columns(quantized)


def gemv(
    x_NK: Array, w_OK: Array, dtype=None, weights_ready: bool = False, b_O: Array | None = None
) -> Array:
    """Return y (N, O) = x w^T + b.

    x (N, K), w (O, K): float32 or bf16, w also quantized. b (O,): float32. dtype: of y; by default
    w's. A row's bits do not depend on other rows.
    weights_ready: the previous kernel does not write w, so it may be read before that kernel ends.
    On a GPU, gemv_fits says which N and K are supported. Raises ValueError or TypeError if shapes
    or dtypes do not match.
    """
    return _checked("gemv", x_NK, None, None, w_OK, 0.0, False, weights_ready, dtype, b_O)[1]


def add_norm_gemv(
    x_NK: Array,
    delta_NK: Array | None,
    norm_w_K: Array,
    w_OK: Array,
    eps: float,
    swiglu: bool = False,
    weights_ready: bool = False,
    dtype=None,
    b_O: Array | None = None,
) -> tuple[Array, Array]:
    """Return h (N, K) = x + delta in x's dtype, y (N, O) = rmsnorm(h) w^T + b, or (N, O / 2) with
    swiglu; see this file's docstring.

    delta (N, K): float32 or bf16, rounded to bf16 if w is; None: h is x. norm_w (K,): float32.
    weights_ready: the previous kernel writes neither w nor norm_w. Otherwise as gemv.
    """
    return _checked(
        "add_norm_gemv", x_NK, delta_NK, norm_w_K, w_OK, eps, swiglu, weights_ready, dtype, b_O
    )


def _checked(op, x_NK, delta_NK, norm_w_K, w_OK, eps, swiglu, weights_ready, dtype, b_O):
    check_array(op, "x", x_NK, (None, None), FLOATS)
    N, K = x_NK.shape
    quantized = kind_of(w_OK)
    if quantized:
        check_quantized(op, w_OK, K)
    else:
        check_array(op, "w", w_OK, (None, K), FLOATS)
    check(
        not swiglu or w_OK.shape[0] % 2 == 0,
        f"{op}: swiglu of {w_OK.shape[0]} rows of w, expected an even number",
    )
    shape = (N, w_OK.shape[0] // 2 if swiglu else w_OK.shape[0])
    optional = [x for x in (delta_NK, norm_w_K, b_O) if x is not None]
    if norm_w_K is not None:
        check_array(op, "norm_w", norm_w_K, (K,))
    if delta_NK is not None:
        check_array(op, "delta", delta_NK, (N, K), FLOATS)
    if b_O is not None:
        check_array(op, "b", b_O, (w_OK.shape[0],))
    dtype = np.dtype(dtype or w_OK.dtype)
    stored = w_OK.arrays if quantized else (w_OK,)
    if on_host(x_NK, *stored, *optional):
        h, y = gemv_ref(x_NK, dense(w_OK, np.float32), norm_w_K, eps, delta_NK, swiglu, b_O)
        return x_NK if delta_NK is None else h.astype(x_NK.dtype), y.astype(dtype, copy=False)
    fused = norm_w_K is not None or swiglu
    unit = _unit(w_OK.dtype, quantized)
    most = _most_rows(w_OK.dtype, quantized, fused)
    fits = gemv_fits(N, K, w_OK.dtype, quantized, fused)
    check(fits, f"{op}: {N} rows of {K}, the GPU supports 1 to {most} of a multiple of {unit}")
    h_NK = x_NK if delta_NK is None else empty(x_NK, x_NK.shape)
    y = empty(x_NK, shape, dtype)
    _launch(y, h_NK, x_NK, delta_NK, norm_w_K, w_OK, eps, swiglu, weights_ready, b_O=b_O)
    return h_NK, y


def _launch(
    y, h_NK, x_NK, delta_NK, norm_w_K, w_OK, eps, swiglu, weights_ready, config=None, b_O=None
):
    N, K = x_NK.shape
    F = y.shape[1]
    overlap = can_overlap(x_NK)
    norm, add = norm_w_K is not None, delta_NK is not None
    # must not be None
    delta, norm_w = (x_NK if a is None else a for a in (delta_NK, norm_w_K))
    if add and w_OK.dtype != np.float32:
        delta = cast_fwd(delta, w_OK.dtype)  # usually it is already
    quantized = kind_of(w_OK)
    w = w_OK.codes_OK if quantized else w_OK
    groups = -(-N // MAX_ROWS)
    if groups > 1:
        x_NK = cast_fwd(x_NK, w_OK.dtype)  # usually it is already
    arrays = [a.reshape(-1) for a in (y, h_NK, x_NK, delta, w, norm_w)]
    check(on_16_bytes(*arrays[1:]), "gemv: arrays must begin at multiples of 16 bytes")
    eps = np.float32(eps)
    bias = b_O is not None
    unused = arrays[-1]
    arrays.append(w_OK.scale_O if quantized else unused)
    arrays.append(w_OK.groups_CO.reshape(-1) if quantized in FOUR_BITS else unused)
    arrays.append(b_O if bias else unused)
    if w_OK.dtype == np.float32:
        plain_kernel = make_plain_kernel(N, K, norm, add, swiglu, bias, quantized, overlap)
        return launch(plain_kernel, -(-F // 8), BLOCK, *arrays, F, eps, overlap=overlap)
    config = config or choose(K, F, swiglu, norm, quantized)
    # with 16 warps there is no room for more sums
    several = groups > 1 and config.warps <= 8 and F > TILE * MULTIPROCESSORS
    several = several and quantized not in FOUR_BITS  # a chunk's sums are in registers, too
    row_tiles = ROW_TILES if several else 1
    tiles = -(-F // (row_tiles * TILE))
    grid = min(tiles, config.blocks * MULTIPROCESSORS)
    variant = Variant(
        norm=norm,
        add=add,
        half=x_NK.dtype != np.float32 and not norm,
        swiglu=swiglu,
        bias=bias,
        overlap=overlap,
        ready=weights_ready,
        once=tiles == grid and config.warps * config.chunks * chunk_columns(quantized) >= K,
        staged=groups == 1 and staged(K, config, quantized),
        quantized=quantized,
        groups=groups,
        tiles=row_tiles,
    )
    tensor_kernel = make_tensor_kernel(K, variant, config)
    shared = shared_bytes(N, K, quantized) if variant.staged else 0
    block = 32 * config.warps
    launch(tensor_kernel, grid, block, *arrays, N, F, eps, shared=shared, overlap=overlap)
