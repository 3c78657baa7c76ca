"""Muon (Jordan et al. 2024): the update of a matrix is its momentum, orthogonalised.   B matrices of one shape, each (R, C)

    g = factor grad                              the clip factor of grad_norm.py
    m = m + (1 - mu) (g - m)                     running mean of g
    x = g + mu (m - g)                           Nesterov momentum
    x = x / max(|x|, eps)                        Frobenius norm: every singular value is now at most 1
    five times:  A = x x^T    x = a x + (b A + c A^2) x       Newton-Schulz
    w = w (1 - lr weight_decay) - lr 0.2 sqrt(max(R, C)) x

With x = U S V^T an iteration replaces each singular value s by a s + b s^3 + c s^5 and leaves U and V as they are. The quintic of
Jordan takes singular values from near 0 to between about 0.7 and 1.2 in five iterations, so x becomes about U V^T. If R > C,
x (x^T x) is computed: the same polynomial by smaller products. bf16 is enough on a GPU, because an error in x is only another
direction of nearly the same length; the sums of the norm, momentum and weights are float32.

Scale: U V^T has the root mean square sqrt(1 / max(R, C)); times 0.2 sqrt(max(R, C)) it is 0.2, about that of an AdamW update
(Liu et al. 2025, "Muon is scalable for LLM training"). So one learning rate and one weight decay serve both optimizers.

Matrices lie anywhere in the arena: `first` has the offset of each. They are gathered into x (B, R, C), so that all of one shape
are one strided batched product. A factor of NaN skips the step (skip_nonfinite.py): m, w and the copy stay unchanged.
Bytes moved besides the products, bf16: 14 per element to gather, 4 to divide by the norm, 12 to update.
Sources: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), kellerjordan.github.io/posts/muon.
"""

import math

import numpy as np
from numba import cuda, float32, int64

from ..device import Array
from .cast import BFLOAT16
from .gemm import matmul
from .primitives.ptx import kernel, load1, store1
from .primitives.reduce import MAX_WARPS, block_sum
from .runtime.launch import check_array, empty, launch, on_host

BLOCK = 256  # threads; one block a row of a matrix
QUINTIC = (3.4445, -4.7750, 2.0315)  # a, b, c: Jordan's
ITERATIONS = 5
EPS = 1e-7  # smallest norm that is divided by: a zero gradient stays zero
RMS = 0.2  # root mean square of the update of a full-rank matrix


# ----------------------------------------------------------------------------- reference
def momentum_ref(x_BRC, m_n, g_n, first_B, factor_1, mu):
    """x (B, R, C) = Nesterov momentum divided by its norm; updates m."""
    for x_RC, first in zip(x_BRC, first_B):
        at = slice(first, first + x_RC.size)
        g = g_n[at] * factor_1[0]
        m = m_n[at] + m_n.dtype.type(1 - mu) * (g - m_n[at])
        x = g + m_n.dtype.type(mu) * (m - g)
        x_RC[...] = (x / max(np.sqrt((x * x).sum()), x.dtype.type(EPS))).reshape(x_RC.shape)
        if factor_1[0] == factor_1[0]:
            m_n[at] = m


def muon_update_ref(w_n, x_BRC, first_B, factor_1, hyper_3, weight_decay, copy_n=None):
    """w = w (1 - lr weight_decay) - lr 0.2 sqrt(max(R, C)) x, and the copy."""
    if factor_1[0] != factor_1[0]:
        return
    lr = hyper_3[0]
    for x_RC, first in zip(x_BRC, first_B):
        at = slice(first, first + x_RC.size)
        step = lr * w_n.dtype.type(RMS * math.sqrt(max(x_RC.shape)))
        keep = 1 - lr * w_n.dtype.type(weight_decay)
        w_n[at] = w_n[at] * keep - step * x_RC.reshape(-1).astype(w_n.dtype)
        if copy_n is not None:
            copy_n[at] = w_n[at].astype(copy_n.dtype)


# ----------------------------------------------------------------------------- kernels
@kernel(BLOCK)
def momentum_kernel(x_n, squares_BR, C, m_n, g_n, first_B, factor_1, mu, rest):
    """Grid B R, block BLOCK. Block b R + r owns row r of matrix b. rest = 1 - mu. x_n: x, flat."""
    R = squares_BR.shape[1]
    b, r = int64(cuda.blockIdx.x) // R, int64(cuda.blockIdx.x) % R
    partial = cuda.shared.array(MAX_WARPS, float32)
    start, factor, acc = first_B[b] + r * C, factor_1[0], float32(0.0)
    for c in range(cuda.threadIdx.x, C, BLOCK):
        g, m = g_n[start + c] * factor, m_n[start + c]
        m += rest * (g - m)
        x = g + mu * (m - g)
        acc += x * x  # before x is rounded
        store1(x_n, (b * R + r) * C + c, x)
        if factor == factor:
            m_n[start + c] = m
    acc = block_sum(acc, partial)
    if cuda.threadIdx.x == 0:
        squares_BR[b, r] = acc


@kernel(BLOCK)
def normalize_kernel(x_n, squares_BR, C, eps):
    """Grid B R, block BLOCK. Every block adds its matrix's R sums in the same order: no atomics, the same bits."""
    R = squares_BR.shape[1]
    b, r = int64(cuda.blockIdx.x) // R, int64(cuda.blockIdx.x) % R
    partial = cuda.shared.array(MAX_WARPS, float32)
    acc = float32(0.0)
    for i in range(cuda.threadIdx.x, R, BLOCK):
        acc += squares_BR[b, i]
    norm = math.sqrt(block_sum(acc, partial))
    norm = eps if norm < eps else norm  # NaN stays NaN
    for c in range(cuda.threadIdx.x, C, BLOCK):
        i = (b * R + r) * C + c
        store1(x_n, i, load1(x_n, i) / norm)


@kernel(BLOCK)
def muon_update_kernel(
    w_n, copy_n, x_n, R, C, first_B, factor_1, hyper_3, scale, weight_decay, with_copy
):
    """Grid B R, block BLOCK. Block b R + r owns row r of matrix b. copy_n is unused without a copy."""
    b, r = int64(cuda.blockIdx.x) // R, int64(cuda.blockIdx.x) % R
    start, lr, factor = first_B[b] + r * C, hyper_3[0], factor_1[0]
    keep, step = float32(1.0) - lr * weight_decay, lr * scale
    if factor == factor:
        for c in range(cuda.threadIdx.x, C, BLOCK):
            w = w_n[start + c] * keep - step * load1(x_n, (b * R + r) * C + c)
            w_n[start + c] = w
            if with_copy:
                store1(copy_n, start + c, w)


# ----------------------------------------------------------------------------- launchers
def momentum(
    x_BRC: Array, m_n: Array, g_n: Array, first_B: Array, factor_1: Array, mu: float
) -> None:
    """x (B, R, C) float32 or bf16 = Nesterov momentum of B matrices, each divided by its norm. Updates m (n,) float32.

    g (n,) float32: gradients.  first (B,) int64: offset of each matrix in m and g.  factor (1,) float32 multiplies g.
    Raises ValueError or TypeError for other shapes or dtypes.
    """
    _check("momentum", x_BRC, first_B, factor_1, m=m_n, g=g_n)
    if on_host(x_BRC, m_n, g_n, first_B, factor_1):
        momentum_ref(x_BRC, m_n, g_n, first_B, factor_1, mu)
        return
    B, R, C = x_BRC.shape
    squares_BR = empty(m_n, (B, R), np.float32)
    x_n, constants = x_BRC.reshape(-1), (np.float32(mu), np.float32(1 - mu))
    launch(
        momentum_kernel, B * R, BLOCK, x_n, squares_BR, C, m_n, g_n, first_B, factor_1, *constants
    )
    launch(normalize_kernel, B * R, BLOCK, x_n, squares_BR, C, np.float32(EPS))


def orthogonalize(x_BRC: Array) -> Array:
    """x (B, R, C), norms at most 1 -> about U V^T of each matrix, the same shape and dtype. Overwrites x."""
    _, R, C = x_BRC.shape
    n, (a, b, c), y_BRC = min(R, C), QUINTIC, empty(x_BRC, x_BRC.shape, x_BRC.dtype)
    A_Bnn, P_Bnn = (empty(x_BRC, (len(x_BRC), n, n), x_BRC.dtype) for _ in range(2))
    for _ in range(ITERATIONS):
        matmul(A_Bnn, x_BRC, x_BRC, trans_a=R > C, trans_b=R <= C)
        _copy(P_Bnn, A_Bnn)
        matmul(P_Bnn, A_Bnn, A_Bnn, alpha=c, accumulate=b)
        _copy(y_BRC, x_BRC)
        matmul(y_BRC, *((x_BRC, P_Bnn) if R > C else (P_Bnn, x_BRC)), accumulate=a)
        x_BRC, y_BRC = y_BRC, x_BRC
    return x_BRC


def muon_update(
    w_n: Array,
    x_BRC: Array,
    first_B: Array,
    factor_1: Array,
    hyper_3: Array,
    weight_decay: float,
    copy_n: Array | None = None,
) -> None:
    """w (n,) float32: decay of B matrices, then minus the scaled update x (B, R, C). copy (n,) bf16: becomes the new w.

    first (B,) int64: offset of each matrix.  factor (1,): NaN to skip.  hyper (3,) float32: the learning rate is hyper[0].
    Raises ValueError or TypeError for other shapes or dtypes.
    """
    _check("muon", x_BRC, first_B, factor_1, w=w_n)
    check_array("muon", "hyper", hyper_3, (3,))
    if copy_n is not None:
        check_array("muon", "copy", copy_n, w_n.shape, ("bfloat16",))
    if on_host(w_n, x_BRC, first_B, factor_1, hyper_3):
        muon_update_ref(w_n, x_BRC, first_B, factor_1, hyper_3, weight_decay, copy_n)
        return
    B, R, C = x_BRC.shape
    scale = np.float32(RMS * math.sqrt(max(R, C)))
    copy, arrays = (
        w_n if copy_n is None else copy_n,
        (x_BRC.reshape(-1), R, C, first_B, factor_1, hyper_3),
    )
    launch(
        muon_update_kernel, B * R, BLOCK, w_n, copy, *arrays, scale, np.float32(weight_decay),
        copy_n is not None,
    )  # fmt: skip


def _check(op, x_BRC, first_B, factor_1, **flat):
    check_array(op, "x", x_BRC, (None, None, None), ("float32", "bfloat16"))
    check_array(op, "first", first_B, (x_BRC.shape[0],), ("int64",))
    check_array(op, "factor", factor_1, (1,))
    for name, array in flat.items():
        check_array(op, name, array, (None,))


def _copy(to, x):
    """CuPy may not know bf16: copy bits."""
    if x.dtype == BFLOAT16:
        to, x = to.view(np.uint16), x.view(np.uint16)
    to[...] = x
