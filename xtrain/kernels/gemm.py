"""Matrix products: cuBLAS on CuPy arrays, numpy.matmul on NumPy arrays. The one op that is not our own kernel.

    linear     y = x w^T           x: (N, I)   w: (O, I) as Hugging Face stores it   y: (N, O)
    backward   dx = dy w           dw += dy^T x  (beta = 1: the sum happens inside the GEMM; or =, beta = 0)

cuBLAS thinks in columns. A row-major (M, N) array *is* a column-major (N, M) one, so C = A B is asked for as
C^T = B^T A^T: swap the operands and nothing is ever transposed in memory. Strided batches serve attention.

The calls go through nvmath's bindings, because CuPy refuses its own cuBLAS while a CUDA graph is captured, and
with one explicit workspace: the algorithm, and so every bit of the result, is the same inside a graph and out. Only products
with few tiles are given it: there blocks share the work of one sum, whose parts must lie somewhere. With many tiles cuBLAS would
keep a counter in it, from which blocks take their next tile, and clear it before each product.
fp32 stays fp32: TF32 is not allowed here. bf16 operands are multiplied by tensor cores and added up in fp32.
"""

import functools
import threading

import numpy as np

from ..device import Array, cupy
from .runtime.cost import product_cost
from .runtime.launch import (
    FLOATS,
    LaunchEvent,
    check,
    check_array,
    empty,
    launch_observers,
    on_host,
    show_launch,
)

WORKSPACE = 32 << 20  # bytes; what NVIDIA recommends for sm_90, 8 times what older cards need
TILE = 128  # rows and columns of out that a block computes; cuBLAS's are mostly of this size
TYPES = {"float32": 0, "bfloat16": 14}  # cudaDataType
COMBINATIONS = [  # of out, a, b; sums are always float32
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float32", "bfloat16", "bfloat16"),  # weight gradients add up in float32
]
COMPUTE_32F, DEFAULT_ALGO = 68, -1  # cublasComputeType, cublasGemmAlgo
_one_at_a_time = threading.Lock()
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


def matmul(
    out: Array, a: Array, b: Array, *, trans_a=False, trans_b=False, alpha=1.0, accumulate=False
) -> Array:
    """out = alpha op(a) op(b), or out += with accumulate. -> out

    a: (M, K), or (K, M) with trans_a.  b: (K, N), or (N, K) with trans_b.  out: (M, N).  All three may have one more
    leading axis, the batch. Types: see COMBINATIONS; NumPy also takes float64. Rows must be contiguous, and out is neither
    a nor b. Raises ValueError when the shapes disagree, TypeError on other types.
    """
    (*batch_a, M, K), (*batch_b, K2, N) = _op_shape(a, trans_a), _op_shape(b, trans_b)
    fits = K == K2 and batch_a == batch_b and _op_shape(out, False) == (*batch_a, M, N)
    check(
        fits,
        f"matmul: op(a) {(*batch_a, M, K)} times op(b) {(*batch_b, K2, N)} does not give {out.shape}",
    )
    check(
        not any(x.dtype.kind in "biu" for x in (out, a, b)),
        f"matmul: {a.dtype} times {b.dtype} to {out.dtype}, expected floating-point numbers",
    )
    if a.dtype != b.dtype:
        raise _unsupported(out, a, b)
    if isinstance(out, np.ndarray):  # the simulator has no cuBLAS either
        a, b = (x.swapaxes(-1, -2) if t else x for x, t in ((a, trans_a), (b, trans_b)))
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
        on_host(out, a, b)  # refuses a mixture
        arguments = out, b, a, trans_b, trans_a, N, M, K, alpha, accumulate
        if launch_observers:
            name = "product " + " x ".join(map(str, (*batch_a, M, N, K)))
            cost = functools.partial(product_cost, out, a, b)
            show_launch(LaunchEvent(name, True, cost), functools.partial(_cublas, *arguments))
        else:
            _cublas(*arguments)
    return out


def _op_shape(x, trans):
    check(x.ndim in (2, 3), f"matmul: expected 2 or 3 axes, got shape {x.shape}")
    (rows, columns), (row, column) = x.shape[-2:], x.strides[-2:]
    in_line = column == x.itemsize or columns <= 1 or not x.size
    apart = row >= x.itemsize * columns or rows <= 1 or not x.size
    check(in_line, f"matmul: rows of an array with shape {x.shape} are not contiguous")
    check(apart, f"matmul: rows of an array with shape {x.shape} overlap or run backwards")
    return (*x.shape[:-2], columns, rows) if trans else x.shape


@functools.cache
def _handle(device):
    """-> (nvmath's cuBLAS module, a handle for this GPU, its workspace, number of multiprocessors)"""
    from nvmath.bindings import cublas

    handle = cublas.create()
    workspace = cupy().cuda.alloc(WORKSPACE)
    return cublas, handle, workspace, cupy().cuda.Device(device).attributes["MultiProcessorCount"]


def _cublas(c, a, b, trans_a, trans_b, m, n, k, alpha, accumulate):
    """Column-major: c (m, n) = alpha op(a) (m, k) op(b) (k, n)."""
    types = _element_types(c, a, b)
    cublas, handle, workspace, multiprocessors = _handle(cupy().cuda.runtime.getDevice())
    nbytes = workspace_bytes(m, n, c.shape[0] if c.ndim == 3 else 1, multiprocessors)
    stream = cupy().cuda.get_current_stream().ptr
    alpha = _ONE if alpha == 1.0 else np.full(1, alpha, np.float32)
    beta = _ONE if accumulate else _ZERO
    operands = []
    for x, kind in zip((a, b, c), (types[1], types[2], types[0])):
        batch = (x.strides[0] // x.itemsize,) if c.ndim == 3 else ()
        operands.append((x.data.ptr, kind, _lead(x), *batch))
    a, b, out = operands
    arguments = (
        handle,
        int(trans_a),
        int(trans_b),
        m,
        n,
        k,
        alpha.ctypes.data,
        *a,
        *b,
        beta.ctypes.data,
        *out,
    )
    with _one_at_a_time:  # other threads use the same handle
        cublas.set_stream(handle, stream)  # this resets the workspace
        cublas.set_workspace(handle, workspace.ptr, nbytes)
        if c.ndim == 2:
            cublas.gemm_ex(*arguments, COMPUTE_32F, DEFAULT_ALGO)
        else:
            cublas.gemm_strided_batched_ex(*arguments, c.shape[0], COMPUTE_32F, DEFAULT_ALGO)


def workspace_bytes(m: int, n: int, batch: int, multiprocessors: int) -> int:
    """What `batch` products of m x n are given: all of it if they have fewer tiles than there are multiprocessors, else none."""
    tiles = batch * -(-m // TILE) * -(-n // TILE)
    return WORKSPACE if tiles < multiprocessors else 0


def _element_types(c, a, b):
    """cuBLAS's names of the three types. Raises TypeError on a combination that we do not use."""
    names = tuple(x.dtype.name for x in (c, a, b))
    if names not in COMBINATIONS:
        raise _unsupported(c, a, b)
    return [TYPES[name] for name in names]


def _unsupported(out, a, b):
    hint = "cast one of them, by astype or functional.cast"
    if np.float64 in (out.dtype, a.dtype, b.dtype):
        hint = (
            "float64 comes from NumPy scalars such as np.sqrt(2): use Python's numbers, or astype"
        )
    return TypeError(
        f"matmul: {a.dtype} times {b.dtype} into {out.dtype} is not supported ({hint})"
    )


def _lead(x):
    """Elements from one row to the next (cuBLAS's leading dimension)."""
    return max(x.strides[-2] // x.itemsize, x.shape[-1], 1)


def _check_two(op, x, w):
    for name, array in (("x", x), ("w", w)):
        check_array(op, name, array, (None, None), FLOATS, strided=True)


def linear_fwd(x_NI: Array, w_OI: Array, dtype=None) -> Array:
    """-> y (N, O) = x w^T, like x or in dtype"""
    _check_two("linear", x_NI, w_OI)
    return matmul(empty(x_NI, (x_NI.shape[0], w_OI.shape[0]), dtype), x_NI, w_OI, trans_b=True)


def linear_bwd_x(dy_NO: Array, w_OI: Array) -> Array:
    """-> dx (N, I) = dy w"""
    _check_two("linear backward", dy_NO, w_OI)
    return matmul(empty(dy_NO, (dy_NO.shape[0], w_OI.shape[1])), dy_NO, w_OI)


def linear_bwd_w(dy_NO: Array, x_NI: Array, dw_OI: Array, add: bool = True) -> None:
    """dw += dy^T x, or = without add"""
    matmul(dw_OI, dy_NO, x_NI, trans_a=True, accumulate=add)
