"""Matrix products: cuBLAS for CuPy arrays, numpy.matmul for NumPy arrays.

The only op without a kernel in this library.

    linear     y = x w^T           x: (N, I)   w: (O, I) as Hugging Face stores it, or quantized
                                   (quantize.py)   y: (N, O)
               y = x w^T + b       b: (O,)     the product is added to rows of b (beta = 1), see
                                   bias.py
    backward   dx = dy w           dw += dy^T x  (beta = 1: the GEMM adds; or =, with beta = 0)

cuBLAS is column-major. A row-major (M, N) array *is* a column-major (N, M) array, so C = A B is
computed as C^T = B^T A^T: the operands are swapped and nothing is transposed in memory. Attention
uses strided batches.

The calls go through nvmath's bindings, because CuPy does not allow its own cuBLAS calls while a
CUDA graph is captured, and use an explicit workspace: then the algorithm, and so every bit of the
result, is the same inside a graph and outside. Each stream has its own, because products of two
streams may run at the same time; a graph uses that of the stream on which it was captured. Only
products with few tiles get one: there several blocks share one sum (split-K) and need memory for
its terms. With many tiles cuBLAS would keep a counter in it, from which blocks take their next
tile, and clear it before each product. In batch-invariant mode no product gets it, so there is no
split-K, and a row's bits do not depend on the number of rows: where a check has shown this for all
rows at once (row_bits.py), `linear` is one product, elsewhere it computes a fixed number of rows at
a time. A quantized w is dequantized, in the dtype of x, for the time of the product.
fp32 stays fp32: TF32 is not allowed. Tensor cores multiply bf16 operands and accumulate in fp32.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ..device import Array, cupy, to_device
from . import row_bits
from .bias import fill_rows
from .cast import cast_fwd
from .quantize import Quantized, dense
from .runtime.cost import product_cost
from .runtime.instead import instead
from .runtime.invariance import invariance, is_batch_invariant
from .runtime.launch import (
    FLOATS,
    LaunchEvent,
    check_array,
    dtype_name,
    empty,
    launch_observers,
    on_host,
    show_launch,
    zeros,
)

WORKSPACE = 32 << 20  # bytes; NVIDIA's recommendation for sm_90, 8 times that for older GPUs
TILE = 128  # rows and columns of out per block; most of cuBLAS's tiles have this size
TYPES = {"float32": 0, "bfloat16": 14}  # cudaDataType
COMBINATIONS = [  # dtypes of out, a, b; sums are always float32
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float32", "bfloat16", "bfloat16"),  # weight gradients accumulate in float32
]
# Rows of a product in batch-invariant mode where the check fails; a product with more rows is
# divided. cuBLAS needs 256 for its full speed per row.
FIXED_ROWS_GPU = 256
# The same on a CPU: the largest of the first numbers whose rows a BLAS computes alike, and larger
# multiples of it whose rows have the same bits (_exact_rows_cpu).
FIXED_ROWS_CPU = (16, 12, 8, 4, 2, 1)
MULTIPLES_CPU = (32, 8)
CHECKED_ELEMENTS = 1 << 28  # of the product that a check on a GPU computes, at most
CHECKED_ELEMENTS_CPU = 1 << 24
ALIGNED = 256  # bytes; every allocation on a GPU begins at such a multiple
# cublasComputeType, cublasGemmAlgo
COMPUTE_32F = 68
DEFAULT_ALGO = -1
_handle_lock = threading.Lock()  # for handles and workspaces
_ONE = np.ones(1, np.float32)
_ZERO = np.zeros(1, np.float32)


def matmul(
    out: Array, a: Array, b: Array, *, trans_a=False, trans_b=False, alpha=1.0, accumulate=False
) -> Array:
    """Set out to alpha op(a) op(b), or add it to out with accumulate. Returns out.

    a: (M, K), or (K, M) with trans_a.
    b: (K, N), or (N, K) with trans_b.
    out: (M, N).
    All three may have one more leading axis, the batch. dtypes: see COMBINATIONS; NumPy arrays may
    also be float64. Rows must be contiguous, and out must not overlap a or b. Raises ValueError if
    the shapes do not match, TypeError for other dtypes.
    """
    *batch_a, M, K = _op_shape(a, trans_a)
    *batch_b, K2, N = _op_shape(b, trans_b)
    if K != K2 or batch_a != batch_b or _op_shape(out, False) != (*batch_a, M, N):
        shapes = f"op(a) {(*batch_a, M, K)} times op(b) {(*batch_b, K2, N)}"
        raise ValueError(f"matmul: {shapes} does not give {out.shape}")
    if any(x.dtype.kind in "biu" for x in (out, a, b)):
        kinds = f"{a.dtype} times {b.dtype} to {out.dtype}"
        raise ValueError(f"matmul: {kinds}, expected floating-point numbers")
    if a.dtype != b.dtype:
        raise _unsupported(out, a, b)
    if isinstance(out, np.ndarray):  # includes the simulator, which has no cuBLAS
        if trans_a:
            a = a.swapaxes(-1, -2)
        if trans_b:
            b = b.swapaxes(-1, -2)
        if accumulate:
            product = np.matmul(a, b)
            out += product if alpha == 1.0 else product * out.dtype.type(alpha)
        else:
            np.matmul(a, b, out=out)
            if alpha != 1.0:
                out *= out.dtype.type(alpha)
    elif out.size and not K:
        if not accumulate:
            out.fill(0)
    elif out.size:
        on_host(out, a, b)  # raises TypeError for a mixture of devices
        arguments = out, b, a, trans_b, trans_a, N, M, K, alpha, accumulate
        if instead.product is not None:
            instead.product(*arguments)
        elif launch_observers:
            name = "product " + " x ".join(map(str, (*batch_a, M, N, K)))
            cost = functools.partial(product_cost, out, a, b)
            show_launch(
                LaunchEvent(name, True, cost), functools.partial(cublas_product, *arguments)
            )
        else:
            cublas_product(*arguments)
    return out


def _op_shape(x, trans):
    """Return the shape of op(x). Raises ValueError if its rows are not contiguous or overlap."""
    shape = x.shape
    size = x.itemsize
    if len(shape) not in (2, 3):
        raise ValueError(f"matmul: expected 2 or 3 axes, got shape {shape}")
    rows, columns = shape[-2:]
    row, column = x.strides[-2:]
    if column != size and columns > 1 and x.size:
        raise ValueError(f"matmul: rows of an array with shape {shape} are not contiguous")
    if row < size * columns and rows > 1 and x.size:
        raise ValueError(f"matmul: rows of an array with shape {shape} overlap or run backwards")
    return (*shape[:-2], columns, rows) if trans else shape


class _CublasContext:
    """cuBLAS on one GPU."""

    def __init__(self, device: int):
        from nvmath.bindings import cublas

        self.module = cublas
        self.handle = cublas.create()
        self.multiprocessors = cupy().cuda.Device(device).attributes["MultiProcessorCount"]
        # stream -> CuPy's MemoryPointer; kept, because graphs use its address
        self.workspaces: dict[int, Any] = {}

    def workspace(self, stream: int) -> int:
        """Return the address of WORKSPACE bytes that only the products of one stream use."""
        if stream not in self.workspaces:
            # not from the pool of a graph, in which an earlier graph may write to the memory
            pool = cupy().get_default_memory_pool()
            self.workspaces[stream] = pool.malloc(WORKSPACE)
        return self.workspaces[stream].ptr


_contexts: dict[int, _CublasContext] = {}


def _handle(device: int) -> _CublasContext:
    if device not in _contexts:
        with _handle_lock:
            if device not in _contexts:
                _contexts[device] = _CublasContext(device)
    return _contexts[device]


def release_workspace(stream: int) -> None:
    """Free what the products of a stream have used.

    Neither the stream nor a graph captured on it is used again.
    """
    with _handle_lock:
        for context in _contexts.values():
            context.workspaces.pop(stream, None)


def cublas_product(c, a, b, trans_a, trans_b, m, n, k, alpha, accumulate, stream=None):
    """Set c (m, n) to alpha op(a) (m, k) op(b) (k, n), all column-major.

    stream: the driver's handle; None: CuPy's current stream.
    """
    types = _element_types(c, a, b)
    context = _handle(cupy().cuda.runtime.getDevice())
    cublas = context.module
    handle = context.handle
    batch = c.shape[0] if c.ndim == 3 else 1
    nbytes = 0
    if not is_batch_invariant():
        nbytes = workspace_bytes(m, n, batch, context.multiprocessors)
    if stream is None:
        stream = cupy().cuda.get_current_stream().ptr
    alpha = _ONE if alpha == 1.0 else np.full(1, alpha, np.float32)
    beta = _ONE if accumulate else _ZERO
    operands = []
    for x, kind in zip((a, b, c), (types[1], types[2], types[0])):
        batch_stride = (x.strides[0] // x.itemsize,) if c.ndim == 3 else ()
        operands.append((x.data.ptr, kind, _lead(x), *batch_stride))
    a, b, out = operands
    sizes = (int(trans_a), int(trans_b), m, n, k)
    arguments = (handle, *sizes, alpha.ctypes.data, *a, *b, beta.ctypes.data, *out)
    with _handle_lock:  # other threads use the same handle
        cublas.set_stream(handle, stream)  # this resets the workspace
        cublas.set_workspace(handle, context.workspace(stream), nbytes)
        if c.ndim == 2:
            cublas.gemm_ex(*arguments, COMPUTE_32F, DEFAULT_ALGO)
        else:
            cublas.gemm_strided_batched_ex(*arguments, batch, COMPUTE_32F, DEFAULT_ALGO)


def workspace_bytes(m: int, n: int, batch: int, multiprocessors: int) -> int:
    """Return the bytes of workspace for `batch` products of m x n.

    All of it if there are fewer tiles than multiprocessors, else 0.
    """
    tiles = batch * -(-m // TILE) * -(-n // TILE)
    return WORKSPACE if tiles < multiprocessors else 0


def _element_types(c, a, b):
    """Return cuBLAS's codes of the three dtypes.

    Raises TypeError for a combination that is not in COMBINATIONS.
    """
    names = tuple(dtype_name(x.dtype) for x in (c, a, b))
    if names not in COMBINATIONS:
        raise _unsupported(c, a, b)
    return [TYPES[name] for name in names]


def _unsupported(out, a, b):
    hint = "cast one of them with astype or functional.cast"
    if np.float64 in (out.dtype, a.dtype, b.dtype):
        hint = "float64 comes from NumPy scalars such as np.sqrt(2): use Python numbers or astype"
    return TypeError(
        f"matmul: {a.dtype} times {b.dtype} into {out.dtype} is not supported ({hint})"
    )


def _lead(x):
    """Return the distance in elements between consecutive rows, cuBLAS's leading dimension."""
    return max(x.strides[-2] // x.itemsize, x.shape[-1], 1)


def _check_two(op, x, w):
    check_array(op, "x", x, (None, None), FLOATS, strided=True)
    check_array(op, "w", w, (None, None), FLOATS, strided=True)


def linear_fwd(x_NI: Array, w_OI: Array | Quantized, dtype=None, b_O: Array | None = None) -> Array:
    """Return y (N, O) = x w^T + b in `dtype`, by default that of x.

    x: (N, I), w: (O, I), b: (O,). Errors as in matmul.
    """
    w_OI = dense(w_OI, x_NI.dtype)
    _check_two("linear", x_NI, w_OI)
    return linear_into(empty(x_NI, (x_NI.shape[0], w_OI.shape[0]), dtype), x_NI, w_OI, b_O)


def linear_into(
    y_NO: Array, x_NI: Array, w_OI: Array, b_O: Array | None = None, alpha=1.0, accumulate=False
) -> Array:
    """Set y (N, O) to x w^T + b and return it. Errors as in matmul.

    x: (N, I), w: (O, I), b: (O,) float32 or None. Without b: y = alpha x w^T, or y += ... with
    accumulate.

    In batch-invariant mode a row's bits depend neither on N nor on its index. Rows that begin
    between multiples of ALIGNED bytes are copied: cuBLAS may choose its algorithm by the alignment.
    """
    if b_O is not None:
        fill_rows(y_NO, b_O)
        accumulate = True
    product = functools.partial(matmul, trans_b=True, alpha=alpha, accumulate=accumulate)
    if not is_batch_invariant():
        return product(y_NO, x_NI, w_OI)
    N, I = x_NI.shape  # noqa: E741
    O = len(w_OI)  # noqa: E741
    if isinstance(x_NI, np.ndarray):
        sizes = _exact_rows_cpu(O, I, dtype_name(x_NI.dtype))
    else:
        sizes = (FIXED_ROWS_GPU,)
        if N and x_NI.data.ptr % ALIGNED:
            x_NI = x_NI.copy()
        if N and _whole_has_row_bits(y_NO, x_NI, w_OI, accumulate):
            return product(y_NO, x_NI, w_OI)
    n = 0
    while n < N:
        R = next((size for size in sizes if size <= N - n), sizes[-1])
        _part_of_product(product, y_NO[n : n + R], x_NI[n : n + R], w_OI, R, accumulate)
        n += R
    return y_NO


def _part_of_product(product, y_RO, x_RI, w_OI, R, accumulate):
    """Compute a product of R rows, padded if there are fewer."""
    host = isinstance(x_RI, np.ndarray)
    if len(x_RI) == R and (host or x_RI.data.ptr % ALIGNED == 0):
        product(y_RO, x_RI, w_OI)
        return
    padded_x_RI = zeros(x_RI, (R, x_RI.shape[1]))
    padded_x_RI[: len(x_RI)] = x_RI
    if accumulate:  # what is added to must be numbers, in the padding too
        padded_y_RO = zeros(y_RO, (R, y_RO.shape[1]))
        padded_y_RO[: len(y_RO)] = y_RO
    else:
        padded_y_RO = empty(y_RO, (R, y_RO.shape[1]))
    product(padded_y_RO, padded_x_RI, w_OI)
    y_RO[...] = padded_y_RO[: len(y_RO)]


# ----------------------------------------------- which products give a row the same bits on a GPU
def product_key(kind: str, y_NO: Array, x_NI: Array, w_OI: Array, *options) -> tuple:
    """Return the key of a product for row_bits.py: what decides how cuBLAS computes it, but for
    the number of rows."""
    O, I = w_OI.shape  # noqa: E741
    dtypes = [dtype_name(x.dtype) for x in (y_NO, x_NI, w_OI)]
    leads = [_lead(y_NO) - O, _lead(x_NI) - I, _lead(w_OI) - I]
    return (kind, O, I, *dtypes, *leads, *options, _gpu_name(cupy().cuda.runtime.getDevice()))


@functools.cache
def _gpu_name(device: int) -> str:
    return str(cupy().cuda.runtime.getDeviceProperties(device)["name"].decode())


def product_versions() -> tuple:
    """Return the versions of cuBLAS and the driver."""
    return _versions_on(cupy().cuda.runtime.getDevice())


@functools.cache
def _versions_on(device: int) -> tuple:
    context = _handle(device)
    return context.module.get_version(context.handle), cupy().cuda.runtime.driverGetVersion()


def _whole_has_row_bits(y_NO: Array, x_NI: Array, w_OI: Array, accumulate: bool) -> bool:
    """Return whether the product of all rows at once has the bits of the division.

    The answer is False while a CUDA graph is captured, unless it is known: a check would be
    captured. The division has the same bits in any case.
    """
    arrays = (y_NO, x_NI, w_OI)
    shape = w_OI.shape, accumulate, cupy().cuda.runtime.getDevice()
    quick = (*shape, *((x.dtype, x.strides[0]) for x in arrays))  # a key that costs little time
    if quick not in _whole_answers:
        if is_capturing():
            return False
        compute = lambda y, x, w: matmul(y, x, w, trans_b=True, accumulate=accumulate)
        check = functools.partial(has_row_bits, compute, *arrays)
        key = product_key("whole", *arrays, accumulate)
        _whole_answers[quick] = row_bits.known(key, product_versions(), check)
    return _whole_answers[quick]


_whole_answers: dict[tuple, bool] = {}


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    stream = cupy().cuda.get_current_stream()
    return bool(cupy().cuda.runtime.streamIsCapturing(stream.ptr))


def has_row_bits(
    compute: Callable[[Array, Array, Array], Any],
    y_NO: Array,
    x_NI: Array,
    w_OI: Array,
    numbers_of_rows: tuple[int, ...] = row_bits.ROWS,
) -> bool:
    """Return whether compute(y, x, w) has, for these numbers of rows, the bits of the division.

    y, x, w: arrays like those of the product; random ones of the same dtypes are computed with.
    Returns False if there is not enough memory to find out.
    """
    O, I = w_OI.shape  # noqa: E741
    rows = tuple(n for n in numbers_of_rows if n * O <= CHECKED_ELEMENTS)
    pool = cupy().get_default_memory_pool()  # not that of a graph, which would keep the memory
    try:
        with cupy().cuda.using_allocator(pool.malloc):
            random = lambda n, like: cast_fwd(
                to_device(row_bits.test_matrix(n, I), "gpu"), like.dtype
            )
            x = _with_lead(random(max(rows), x_NI), _lead(x_NI))
            w = _with_lead(random(O, w_OI), _lead(w_OI))

            def run(n, compute):
                y = _with_lead(zeros(y_NO, (n, O)), _lead(y_NO))
                compute(y, x[:n], w)
                return y

            def divided(y, x, w):
                whole = FIXED_ROWS_GPU
                for first in range(0, len(x), whole):
                    part = slice(first, first + whole)
                    product = lambda y, x, w: matmul(y, x, w, trans_b=True)
                    _part_of_product(product, y[part], x[part], w, whole, False)

            with invariance(True):
                return row_bits.agree(
                    functools.partial(run, compute=compute),
                    functools.partial(run, compute=divided),
                    _equal_bits,
                    rows,
                )
    except cupy().cuda.memory.OutOfMemoryError:
        return False
    finally:
        pool.free_all_blocks()


def _with_lead(x_NK, lead):
    """Return x with `lead` elements from one row to the next."""
    N, K = x_NK.shape
    if lead == K:
        return x_NK
    wide = zeros(x_NK, (N, lead))
    wide[:, :K] = x_NK
    return wide[:, :K]


def _equal_bits(a, b):
    bits = np.dtype(f"u{a.itemsize}")
    return bool((a.view(bits) == b.view(bits)).all())


# ------------------------------------------------------------------------ the same on a CPU
@functools.cache
def _exact_rows_cpu(O: int, I: int, dtype: str) -> tuple[int, ...]:  # noqa: E741
    """Return numbers of rows, in descending order, for which all rows of x w^T have the same bits.

    On this computer: a BLAS divides a product into tiles, and tiles at the edges may add in another
    order. OpenBLAS for Haswell computes 12 rows at a time and the 4 that remain of 16 in another
    way. The order depends on the shape alone, so rows that hold the same numbers show it.
    """
    random = np.random.default_rng(0)
    w_OI = np.resize(random.standard_normal(65537).astype(dtype), (O, I))
    rows_4I = random.standard_normal((4, I)).astype(dtype)

    def products(R):
        return [np.matmul(np.tile(row_I, (R, 1)), w_OI.T) for row_I in rows_4I]

    for smallest in FIXED_ROWS_CPU:
        of_smallest = products(smallest)
        if all((y_RO == y_RO[0]).all() for y_RO in of_smallest):
            break
    larger = [smallest * multiple for multiple in MULTIPLES_CPU]
    larger = [R for R in larger if R * O <= CHECKED_ELEMENTS_CPU]
    same = [
        R
        for R in larger
        if all((a_RO == b_RO[0]).all() for a_RO, b_RO in zip(products(R), of_smallest))
    ]
    return (*same, smallest)


def linear_bwd_x(dy_NO: Array, w_OI: Array | Quantized) -> Array:
    """Return dx (N, I) = dy w, for dy (N, O), w (O, I). Errors as in matmul."""
    w_OI = dense(w_OI, dy_NO.dtype)
    _check_two("linear backward", dy_NO, w_OI)
    return matmul(empty(dy_NO, (dy_NO.shape[0], w_OI.shape[1])), dy_NO, w_OI)


def linear_bwd_w(dy_NO: Array, x_NI: Array, dw_OI: Array, add: bool = True) -> None:
    """Add dy^T x to dw (O, I), or set dw to it if not add; dy (N, O), x (N, I).

    Errors as in matmul.
    """
    matmul(dw_OI, dy_NO, x_NI, trans_a=True, accumulate=add)
