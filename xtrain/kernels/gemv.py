"""Matrix-vector products for a few rows at a time: y = x w^T, with what stands before and after it in a decoder.

    x: (N, K), N <= 8    w: (O, K), as Hugging Face stores it    y: (N, O)

    norm       x is first RMS-normalised: x r nw,  r = 1 / sqrt(mean_k(x^2) + eps)       (rmsnorm.py)
               r is one number per row, so it can wait: y = r ((x nw) w^T). The kernels add up the squares of what
               they read for the product anyway, and nobody passes over x twice.
    swiglu     w holds gate rows, then up rows, F each: y_f = silu(x . w_f) (x . w_{F + f})   (swiglu.py)
    residual   y += residual, which may be y itself

A decoding step reads every weight once and does next to nothing with it: 2 N operations a weight.
"""

import numpy as np

from ..device import Array
from ._launch import FLOATS, check, check_array, on_host
from .swiglu import silu_ref

MAX_ROWS = 8


# ----------------------------------------------------------------------------- reference
def gemv_ref(x_NK, w_OK, norm_w_K=None, eps=0.0, residual_NO=None, swiglu=False):
    """-> y (N, O), or (N, O / 2) with swiglu, in x's type and not below float32.

    Row by row: a BLAS adds up a matrix in another order than a vector, and here a row must not feel its neighbours.
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


# ----------------------------------------------------------------------------- launchers
def gemv_fits(N: int, K: int, dtype) -> bool:
    """Can gemv multiply N rows with K-wide weights of this dtype on a GPU?"""
    return 0 < N <= MAX_ROWS and K % 32 == 0 and np.dtype(dtype).name in FLOATS


def gemv(
    x_NK: Array,
    w_OK: Array,
    norm_w_K: Array | None = None,
    eps: float = 0.0,
    residual_NO: Array | None = None,
    swiglu: bool = False,
    dtype=None,
    out: Array | None = None,
) -> Array:
    """-> y (N, O) = x w^T, or (N, O / 2) with swiglu; see the file's docstring.

    x, w, residual, out: float32 or bf16; norm_w float32. y has dtype, else residual's type, else w's.
    Every row's bits are independent of the other rows. On a GPU N is at most MAX_ROWS and K a multiple of 32.
    """
    check_array("gemv", "x", x_NK, (None, None), FLOATS)
    N, K = x_NK.shape
    check_array("gemv", "w", w_OK, (None, K), FLOATS)
    check(not swiglu or w_OK.shape[0] % 2 == 0, f"gemv: swiglu of {w_OK.shape[0]} rows of w")
    shape = (N, w_OK.shape[0] // 2 if swiglu else w_OK.shape[0])
    given = [x for x in (norm_w_K, residual_NO, out) if x is not None]
    if norm_w_K is not None:
        check_array("gemv", "norm_w", norm_w_K, (K,))
    if residual_NO is not None:
        check_array("gemv", "residual", residual_NO, shape, FLOATS)
    dtype = np.dtype(dtype or (w_OK if residual_NO is None else residual_NO).dtype)
    if out is not None:
        check_array("gemv", "out", out, shape, (dtype.name,))
    if on_host(x_NK, w_OK, *given):
        y = gemv_ref(x_NK, w_OK, norm_w_K, eps, residual_NO, swiglu).astype(dtype, copy=False)
        if out is None:
            return y
        out[...] = y
        return out
    raise NotImplementedError
