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
split-K, and `linear` computes a fixed number of rows at a time. A quantized w is dequantized, in
the dtype of x, for the time of the product.
fp32 stays fp32: TF32 is not allowed. Tensor cores multiply bf16 operands and accumulate in fp32.
"""

import functools
import threading
from typing import Any

import numpy as np

from ..device import Array, cupy
from .bias import fill_rows
from .quantize import Quantized, dense
from .runtime.cost import product_cost
from .runtime.invariance import is_batch_invariant
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
# Rows of a product in batch-invariant mode. cuBLAS needs 256 for its full speed per row; a BLAS on
# a CPU is near it with 16, or with the largest of these numbers whose rows it computes alike
# (_fixed_rows_cpu).
FIXED_ROWS_GPU = 256
FIXED_ROWS_CPU = (16, 12, 8, 4, 2, 1)
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
        if launch_observers:
            name = "product " + " x ".join(map(str, (*batch_a, M, N, K)))
            cost = functools.partial(product_cost, out, a, b)
            show_launch(LaunchEvent(name, True, cost), functools.partial(_cublas, *arguments))
        else:
            _cublas(*arguments)
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


def _cublas(c, a, b, trans_a, trans_b, m, n, k, alpha, accumulate):
    """Set c (m, n) to alpha op(a) (m, k) op(b) (k, n), all column-major."""
    types = _element_types(c, a, b)
    context = _handle(cupy().cuda.runtime.getDevice())
    cublas = context.module
    handle = context.handle
    batch = c.shape[0] if c.ndim == 3 else 1
    nbytes = 0
    if not is_batch_invariant():
        nbytes = workspace_bytes(m, n, batch, context.multiprocessors)
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

    In batch-invariant mode in products of equal shape, the last one padded: a row's bits depend
    neither on N nor on its index. Rows that begin between multiples of ALIGNED bytes are copied,
    too: cuBLAS may choose its algorithm by the alignment.
    """
    if b_O is not None:
        fill_rows(y_NO, b_O)
        accumulate = True
    product = functools.partial(matmul, trans_b=True, alpha=alpha, accumulate=accumulate)
    if not is_batch_invariant():
        return product(y_NO, x_NI, w_OI)
    host = isinstance(x_NI, np.ndarray)
    R = _fixed_rows_cpu(*w_OI.shape, dtype_name(x_NI.dtype)) if host else FIXED_ROWS_GPU
    for n in range(0, len(x_NI), R):
        x_RI = x_NI[n : n + R]
        y_RO = y_NO[n : n + R]
        if len(x_RI) == R and (host or x_RI.data.ptr % ALIGNED == 0):
            product(y_RO, x_RI, w_OI)
            continue
        padded_x_RI = zeros(x_NI, (R, x_NI.shape[1]))
        padded_x_RI[: len(x_RI)] = x_RI
        if accumulate:  # what is added to must be numbers, in the padding too
            padded_y_RO = zeros(y_NO, (R, y_NO.shape[1]))
            padded_y_RO[: len(y_RO)] = y_RO
        else:
            padded_y_RO = empty(y_NO, (R, y_NO.shape[1]))
        product(padded_y_RO, padded_x_RI, w_OI)
        y_RO[...] = padded_y_RO[: len(y_RO)]
    return y_NO


@functools.cache
def _fixed_rows_cpu(O: int, I: int, dtype: str) -> int:  # noqa: E741
    """Return the largest of FIXED_ROWS_CPU for which all rows of x w^T are added in the same order.

    On this computer: a BLAS divides a product into tiles, and tiles at the edges may add in another
    order. OpenBLAS for Haswell computes 12 rows at a time and the 4 that remain of 16 in another
    way. The order
    depends on the shape alone, so rows that hold the same numbers show it.
    """
    random = np.random.default_rng(0)
    w_OI = np.resize(random.standard_normal(65537).astype(dtype), (O, I))
    rows_4I = random.standard_normal((4, I)).astype(dtype)
    for R in FIXED_ROWS_CPU:
        products = [np.matmul(np.tile(row_I, (R, 1)), w_OI.T) for row_I in rows_4I]
        if all((y_RO == y_RO[0]).all() for y_RO in products):
            return R
    raise AssertionError("a single row is equal to itself")


def linear_bwd_x(dy_NO: Array, w_OI: Array) -> Array:
    """Return dx (N, I) = dy w, for dy (N, O), w (O, I). Errors as in matmul."""
    _check_two("linear backward", dy_NO, w_OI)
    return matmul(empty(dy_NO, (dy_NO.shape[0], w_OI.shape[1])), dy_NO, w_OI)


def linear_bwd_w(dy_NO: Array, x_NI: Array, dw_OI: Array, add: bool = True) -> None:
    """Add dy^T x to dw (O, I), or set dw to it if not add; dy (N, O), x (N, I).

    Errors as in matmul.
    """
    matmul(dw_OI, dy_NO, x_NI, trans_a=True, accumulate=add)
