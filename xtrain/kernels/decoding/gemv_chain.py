"""Matrix-vector products for a few rows at a time with the bits of the separate ops: gemv.py for
batch-invariant mode, for bf16 weights on a GPU.

    x: (N, K), N <= 8    w: (O, K) bf16    y: (N, O)

    add        h = x + delta, the residual stream                              (residual.py)
    norm       x is replaced by n = h (r norm_w) in bf16                       (rmsnorm.py)
    product    y = x w^T                                                       (gemm.py)
    swiglu     y = silu(gate) up, from gate and up in y's dtype                (swiglu.py)

A training step runs these ops one after the other. Here one kernel runs them with the same
operations in the same order on the same roundings, so its rows are those of training, bit for bit:

    norm       The sum of squares of a row has the order of rows.py: 32 W threads own chunks of 4
               columns, add their squares chunk by chunk, and block_sum adds the threads. Here a
               warp does the work of warp v of row n, for one pair (n, v) after another.
    product    A matrix product by cuBLAS without a workspace is one chain of mma.m16n8k16 per
               element: the sum starts at 0, and each 16 columns of K add to it, in order. (Compared
               at 25 shapes, 1 to 8192 rows, on an H200.) So is the product here: mma_bf16
               multiplies 16 rows of w with 8 rows of x, and a warp walks along all of K.
    swiglu     gate and up are rounded to y's dtype first, because training writes them.

A bias is not supported: to a result in bf16 cuBLAS adds b in another way than to the float32 sum
(the bits differ at 9 of 10 shapes, on an H200).

A chain cannot be divided: K / 16 products that wait for each other are a lower bound of the time.
So its warp does nothing else: it multiplies, and loads the operands of the next half of a piece of
w at the same time. Other warps of the block copy the pieces, 16 rows for each chain by `columns`,
into a ring of `stages` pieces in shared memory. (The instructions for the copies, between those of
a chain, would take longer than the products.) With swiglu a warp has two chains: 16 rows of gate
and 16 of up. A block has one barrier per piece: the next piece has arrived, and the current one has
been read, so that its place in the ring is free. The copies run ahead, also into the next tile. The
first ones start before the kernel waits for its input (wait_for_previous in primitives/ptx.py), if
the weights are known to be ready.

Every block needs all of x, in bf16, in shared memory: all warps compute the norm; without a norm,
those that do not copy w copy x. The blocks share the work of writing h.
Bytes moved: read w; x, y and delta are small.
"""

import functools

import numpy as np

from ...device import Array, cupy
from .. import row_bits
from ..gemm import has_row_bits, is_capturing, product_key, product_versions
from ..primitives.flat import on_16_bytes
from ..primitives.ptx import kernel, let_next_start, wait_for_previous
from ..primitives.reduce import MAX_WARPS
from ..primitives.rows import MAX_COLUMNS, row_plan
from ..residual import residual_rmsnorm_ref
from ..rmsnorm import rmsnorm_ref
from ..runtime.compile import sources_digest
from ..runtime.compiler import cuda, float32, int64, uint16
from ..runtime.launch import (
    FLOATS,
    can_overlap,
    check,
    check_array,
    dtype_name,
    empty,
    launch,
    on_host,
    shared_limit,
    wide,
)
from ..swiglu import swiglu_ref
from .gemv_chain_parts import (
    COPYING,
    MAX_CHAINS,
    PAD,
    THREADS,
    VEC,
    WARPS,
    Config,
    Copy,
    Variant,
    Weights,
    make_product,
    make_stage_copy,
    make_stage_norm,
    piece_size,
)
from .gemv_operands import MAX_ROWS, TILE, Rows, Share
from .gemv_tensor_cores import MULTIPROCESSORS

# Columns of a piece of w: the widest of which enough fit in the ring; K is a multiple. Wide pieces
# need few barriers.
COLUMNS = (256, 128, 64, 32)
WIDTH_UNIT = COLUMNS[-1]
RING = 72 << 10  # bytes; about 40 KB in flight keep the memory of an H200 busy
MIN_STAGES = 4
FEW_STAGES = 3  # if x leaves no more room
MAX_K = MAX_WARPS * 32 * MAX_COLUMNS  # of row_plan
CHECKED_ROWS = (1, 3, MAX_ROWS)  # of a check
# Elements of w in a product without a norm before it; cuBLAS is as fast from here on, and faster
# with 8 rows (bench_exact.py, one H200: 2048 x 2048 takes 5.4 to 7.2 us here, 6.1 there).
MOST_WITHOUT_NORM = 4 << 20


# ----------------------------------------------------------------------------- reference
def gemv_chain_ref(x_NK, w_OK, norm_w_K=None, eps=0.0, delta_NK=None, swiglu=False, dtype=None):
    """Return h (N, K), y (N, O), or (N, O / 2) with swiglu: the separate ops, each rounded.

    dtype: of y; None: as w.
    """
    dtype = np.dtype(dtype or w_OK.dtype)
    h_NK = x_NK
    n_NK = x_NK
    if delta_NK is not None:
        h_NK, n_NK, _ = residual_rmsnorm_ref(wide(x_NK), wide(delta_NK), norm_w_K, eps)
    elif norm_w_K is not None:
        n_NK, _ = rmsnorm_ref(wide(x_NK), norm_w_K, eps)
    y_NO = wide(n_NK.astype(w_OK.dtype)) @ wide(w_OK).T
    y_NO = y_NO.astype(dtype)
    if swiglu:
        y_NO = swiglu_ref(wide(y_NO)).astype(dtype)
    return h_NK.astype(x_NK.dtype, copy=False), y_NO


# ----------------------------------------------------------------------------- kernel
@functools.cache
def make_chain_kernel(K: int, variant: Variant, config: Config):
    """Return the kernel for weights of K columns.

    Launch it with THREADS threads and shared_bytes(N, K, variant.parts, config) of shared memory.
    """
    NORM = variant.norm
    overlap = variant.overlap
    ready = variant.ready
    X = config.stages * piece_size(config, variant.parts)
    plan = row_plan(K, VEC)
    STEPS = plan.STEPS if NORM else 1
    SUMS = MAX_ROWS * plan.W if NORM else 4
    fill_ring, product = make_product(K, variant, config, X)
    stage_copy = make_stage_copy(K, X)
    load_norm_w, stage_norm = make_stage_norm(K, variant, X)

    @kernel(THREADS)
    def gemv_chain_kernel(y, h, x, delta, w, norm_w, N, F, eps):
        """Warp p of block q computes tiles q + p grid, q + (p + chains) grid, ... Arrays are flat.

        F: columns of y.
        """
        smem = cuda.shared.array(0, uint16)
        partial = cuda.shared.array(SUMS, float32)
        w_SE = cuda.local.array((STEPS, VEC), float32)
        rows = Rows(x, delta, h, norm_w, N)
        weights = Weights(w, F)
        share = Share(int64(cuda.blockIdx.x), int64(cuda.gridDim.x))
        warp = cuda.threadIdx.x >> 5
        copy = Copy(int64(0), int64(0), int64(0))
        if overlap:
            let_next_start()
        if overlap and not ready:
            wait_for_previous()
        if warp >= WARPS - COPYING:
            copy = fill_ring(smem, weights, share)
        if NORM:
            load_norm_w(w_SE, norm_w, warp)
        if overlap and ready:
            wait_for_previous()
        if NORM:
            stage_norm(smem, partial, rows, w_SE, share, eps)
        else:
            stage_copy(smem, rows)
        product(y, smem, rows, weights, share, copy)

    return gemv_chain_kernel


# ----------------------------------------------------------------------------- launchers
def shared_bytes(N: int, K: int, parts: int, config: Config) -> int:
    """Return the bytes of dynamic shared memory of a block, for N rows of x."""
    return 2 * (config.stages * piece_size(config, parts) + N * (K + PAD))


def choose(N: int, K: int, F: int, swiglu: bool, shared: int) -> Config | None:
    """Return the configuration for N rows of K columns and F columns of y.

    None if `shared` bytes do not hold x and the ring. A multiprocessor has one block: one tile if
    they are few, else up to 4 chains. One chain alone reads w more slowly than memory delivers it.
    """
    tiles = -(-F // TILE)
    parts = 2 if swiglu else 1
    chains = 1
    while chains * parts < MAX_CHAINS and tiles > chains * MULTIPROCESSORS:
        chains *= 2
    room = shared - 4 * MAX_ROWS * MAX_WARPS - 2 * N * (K + PAD)
    few = None
    for columns in COLUMNS:
        if K % columns or columns * parts > COLUMNS[0]:  # more operands would spill registers
            continue
        piece = 2 * piece_size(Config(chains, columns, 1), parts)
        stages = min(RING, room) // piece
        if stages >= MIN_STAGES:
            pieces = -(-tiles // (chains * MULTIPROCESSORS)) * (K // columns)
            return Config(chains, columns, min(stages, max(pieces, FEW_STAGES)))
        if stages == FEW_STAGES:
            few = few or Config(chains, columns, stages)
    return few


def chain_fits(x_NK: Array, w_OK: Array, swiglu: bool = False) -> bool:
    """Return True if chain_gemv and chain_add_norm_gemv support these rows and weights on a GPU.

    w must be bf16 and not quantized, N at most 8, K a multiple of 32 for which x fits in shared
    memory.
    """
    N, K = x_NK.shape
    if type(x_NK) is np.ndarray or not isinstance(w_OK, type(x_NK)):
        return False
    if not (0 < N <= MAX_ROWS and 0 < K <= MAX_K and K % WIDTH_UNIT == 0 and w_OK.shape[0] > 0):
        return False
    if dtype_name(w_OK.dtype) != "bfloat16":
        return False
    F = w_OK.shape[0] // (2 if swiglu else 1)
    return choose(N, K, F, swiglu, shared_limit(x_NK)) is not None


_answers: dict[tuple, bool] = {}


def chain_pays(x_NK: Array, w_OK: Array, dtype=None, norm=False, swiglu: bool = False) -> bool:
    """Return True if the kernels here have the bits of gemm.linear_fwd and are usually faster.

    The bits are checked once for each shape and dtype (row_bits.py); while a CUDA graph is
    captured, only a known answer counts. dtype: of y, by default w's. norm: the product follows one.
    """
    if not (norm or w_OK.shape[0] * w_OK.shape[1] < MOST_WITHOUT_NORM):
        return False
    if not chain_fits(x_NK, w_OK, swiglu):
        return False
    dtype = np.dtype(dtype or w_OK.dtype)
    key = (w_OK.shape, dtype, cupy().cuda.runtime.getDevice())
    if key not in _answers:
        if is_capturing():
            return False
        x = empty(x_NK, (1, w_OK.shape[1]), w_OK.dtype)
        y = empty(x_NK, (1, w_OK.shape[0]), dtype)

        def compute(y, x, w):
            y[...] = chain_gemv(x, w, dtype)

        check = functools.partial(has_row_bits, compute, y, x, w_OK, CHECKED_ROWS)
        question = product_key("chain", y, x, w_OK, sources_digest())
        _answers[key] = row_bits.known(question, product_versions(), check)
    return _answers[key]


def chain_gemv(x_NK: Array, w_OK: Array, dtype=None, weights_ready: bool = False) -> Array:
    """Return y (N, O) = x w^T: the bits of gemm.linear_fwd in batch-invariant mode.

    x (N, K), w (O, K): bf16. dtype: of y, float32 or bf16; by default w's.
    weights_ready: the previous kernel does not write w, so it may be read before that kernel ends.
    On a GPU, chain_fits says what is supported. Raises ValueError or TypeError if shapes or dtypes
    do not match.
    """
    check_array("chain_gemv", "x", x_NK, (None, None), ("bfloat16",))
    return _checked("chain_gemv", x_NK, None, None, w_OK, 0.0, False, weights_ready, dtype)[1]


def chain_add_norm_gemv(
    x_NK: Array,
    delta_NK: Array | None,
    norm_w_K: Array,
    w_OK: Array,
    eps: float,
    swiglu: bool = False,
    weights_ready: bool = False,
    dtype=None,
) -> tuple[Array, Array]:
    """Return h (N, K) = x + delta, y (N, O) = rmsnorm(h) w^T, or (N, O / 2) with swiglu.

    The bits of residual_rmsnorm_fwd (of rmsnorm_fwd without delta), gemm.linear_fwd and swiglu_fwd
    in batch-invariant mode.
    x (N, K): float32. delta (N, K): bf16; None: h is x. norm_w (K,): float32.
    weights_ready: the previous kernel writes neither w nor norm_w. Otherwise as chain_gemv.
    """
    check_array("chain_add_norm_gemv", "x", x_NK, (None, None))
    check_array("chain_add_norm_gemv", "norm_w", norm_w_K, (x_NK.shape[1],))
    return _checked(
        "chain_add_norm_gemv",
        *(x_NK, delta_NK, norm_w_K, w_OK, eps, swiglu, weights_ready, dtype),
    )


def _checked(op, x_NK, delta_NK, norm_w_K, w_OK, eps, swiglu, weights_ready, dtype):
    N, K = x_NK.shape
    check_array(op, "w", w_OK, (None, K), ("bfloat16",))
    O = w_OK.shape[0]  # noqa: E741
    check(not swiglu or O % 2 == 0, f"{op}: swiglu of {O} rows of w, expected an even number")
    if delta_NK is not None:
        check_array(op, "delta", delta_NK, (N, K), ("bfloat16",))
    dtype = np.dtype(dtype or w_OK.dtype)
    check(dtype_name(dtype) in FLOATS, f"{op}: y in {dtype}, expected {' or '.join(FLOATS)}")
    optional = [a for a in (delta_NK, norm_w_K) if a is not None]
    if on_host(x_NK, w_OK, *optional):
        return gemv_chain_ref(x_NK, w_OK, norm_w_K, eps, delta_NK, swiglu, dtype)
    check(
        chain_fits(x_NK, w_OK, swiglu),
        f"{op}: {N} rows of {K}, the GPU supports 1 to {MAX_ROWS} of a multiple of {WIDTH_UNIT} "
        "that fits in shared memory",
    )
    h_NK = x_NK if delta_NK is None else empty(x_NK, x_NK.shape)
    y = empty(x_NK, (N, O // 2 if swiglu else O), dtype)
    _launch(y, h_NK, x_NK, delta_NK, norm_w_K, w_OK, eps, swiglu, weights_ready)
    return h_NK, y


def _launch(y, h_NK, x_NK, delta_NK, norm_w_K, w_OK, eps, swiglu, weights_ready, config=None):
    N, K = x_NK.shape
    F = y.shape[1]
    config = config or choose(N, K, F, swiglu, shared_limit(x_NK))
    variant = Variant(
        norm=norm_w_K is not None,
        add=delta_NK is not None,
        swiglu=swiglu,
        half=y.dtype != np.float32,
        overlap=can_overlap(x_NK),
        ready=weights_ready,
    )
    # an argument must not be None
    delta_NK, norm_w_K = (x_NK if a is None else a for a in (delta_NK, norm_w_K))
    arrays = [a.reshape(-1) for a in (y, h_NK, x_NK, delta_NK, w_OK, norm_w_K)]
    check(on_16_bytes(*arrays[1:6]), "gemv_chain: arrays must begin at multiples of 16 bytes")
    chain_kernel = make_chain_kernel(K, variant, config)
    grid = min(-(-F // TILE), MULTIPROCESSORS)
    shared = shared_bytes(N, K, variant.parts, config)
    options = dict(shared=shared, overlap=variant.overlap)
    launch(chain_kernel, grid, THREADS, *arrays, N, F, np.float32(eps), **options)
