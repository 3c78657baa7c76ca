"""Muon (Jordan et al. 2024): the update of a matrix is its momentum, orthogonalised.

B matrices of one shape, each (R, C)

    g = factor grad                              the clip factor of grad_norm.py
    m = m + (1 - mu) (g - m)                     running mean of g
    x = g + mu (m - g)                           Nesterov momentum
    x = x / max(|x|, eps)                        Frobenius norm: now no singular value is above 1
    five times:  A = x x^T    x = (a + b A + c A^2) x         Newton-Schulz
    w = w (1 - lr weight_decay) - lr 0.2 sqrt(max(R, C)) x

With x = U S V^T an iteration replaces each singular value s by a s + b s^3 + c s^5 and leaves U and
V as they are. The quintic of Jordan takes singular values from near 0 to between about 0.7 and 1.2
in five iterations, so x becomes about U V^T. If R > C, x (x^T x) is computed: the same polynomial
by smaller products. bf16 is enough on a GPU, because an error in x is only another direction of
nearly the same length; the sums of the norm, momentum and weights are float32.

Completing the square leaves three products, none of which adds to an old array, and two changes of
a diagonal:

    S = x x^T + b / 2c        a + b A + c A^2 = c S^2 + (a - b^2 / 4c) = P        x = P x

For B = b A + c A^2 and a x + B x an iteration would first copy A and x to the outputs of two
products (cuBLAS adds in place), and move 6 R C + 7 n^2 elements with n = min(R, C). This way it
moves 3 R C
+ 4 n^2. Operations: 4 n^2 max(R, C) + 2 n^3.

Scale: U V^T has the root mean square sqrt(1 / max(R, C)); times 0.2 sqrt(max(R, C)) it is 0.2,
about that of an AdamW update (Liu et al. 2025, "Muon is scalable for LLM training"). So one
learning rate and one weight decay serve both optimizers.

Matrices lie anywhere in the arena: offsets say where. They are gathered into x (B, R, C), so that
all of one shape are one strided batched product. A matrix is contiguous, so these kernels see R C
elements, whatever its shape.
A factor of NaN skips the step (skip_nonfinite.py): m, w and the copy stay unchanged.
Bytes moved besides the products, bf16: 14 per element to gather, 4 to divide by the norm, 12 to
update; AdamW's update moves 30. Sources: K. Jordan et al., "Muon: an optimizer for hidden layers in
neural networks" (2024), kellerjordan.github.io/posts/muon.
"""

import math

import numpy as np

from ..device import Array
from .gemm import matmul
from .primitives.flat import BLOCK, CHUNK, GAP, QUAD, STRIDE, load, on_16_bytes, store
from .primitives.ptx import kernel, load1, store1
from .primitives.reduce import MAX_WARPS, block_sum
from .runtime.compiler import cuda, float32, int64
from .runtime.cost import declare_cost
from .runtime.launch import FLOATS, check_array, empty, launch, on_host

TILE = STRIDE  # elements of a block: one chunk per thread, as in adamw.py
PARTIALS = 256  # sums of squares per matrix, at most: the next kernel adds one per thread
QUINTIC = (3.4445, -4.7750, 2.0315)  # a, b, c: Jordan's
ITERATIONS = 5
EPS = 1e-7  # smallest norm that is divided by: a zero gradient stays zero
RMS = 0.2  # root mean square of the update of a full-rank matrix


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the operations of `orthogonalize` on one matrix."""
    n, wide = sorted((rows, columns))
    return ITERATIONS * (4 * n * n * wide + 2 * n**3)


# ----------------------------------------------------------------------------- reference
def momentum_ref(x_BRC, m_n, g_n, state_B, arena_B, factor_1, mu):
    """Set x (B, R, C) to Nesterov momentum divided by its norm, and update m."""
    for x_RC, state, arena in zip(x_BRC, state_B, arena_B):
        m = m_n[state : state + x_RC.size]  # a view
        g = g_n[arena : arena + x_RC.size] * factor_1[0]
        new_m = m + m.dtype.type(1 - mu) * (g - m)
        x = g + m.dtype.type(mu) * (new_m - g)
        x_RC[...] = (x / max(np.sqrt((x * x).sum()), x.dtype.type(EPS))).reshape(x_RC.shape)
        if factor_1[0] == factor_1[0]:
            m[...] = new_m


def orthogonalize_ref(x_BRC):
    """Return the result of Newton-Schulz as written at the top, in the dtype of x."""
    a, b, c = QUINTIC
    if x_BRC.shape[1] > x_BRC.shape[2]:
        return np.ascontiguousarray(orthogonalize_ref(x_BRC.swapaxes(1, 2)).swapaxes(1, 2))
    for _ in range(ITERATIONS):
        A_BRR = x_BRC @ x_BRC.swapaxes(1, 2)
        x_BRC = a * x_BRC + (b * A_BRR + c * A_BRR @ A_BRR) @ x_BRC
    return x_BRC


def muon_update_ref(w_n, x_BRC, weight_B, arena_B, factor_1, hyper_3, weight_decay, copy_n=None):
    """Set w to w (1 - lr weight_decay) - lr 0.2 sqrt(max(R, C)) x, and the copy to w."""
    if factor_1[0] != factor_1[0]:
        return
    lr = hyper_3[0]
    for x_RC, weight, arena in zip(x_BRC, weight_B, arena_B):
        w = w_n[weight : weight + x_RC.size]  # a view
        step = lr * w.dtype.type(RMS * math.sqrt(max(x_RC.shape)))
        keep = 1 - lr * w.dtype.type(weight_decay)
        w[...] = w * keep - step * x_RC.reshape(-1).astype(w.dtype)
        if copy_n is not None:
            copy_n[arena : arena + x_RC.size] = w.astype(copy_n.dtype)


# ----------------------------------------------------------------------------- kernels
@kernel(BLOCK)
def momentum_kernel(x_n, squares_BP, m_n, g_n, state_B, arena_B, factor_1, size, mu, rest, aligned):
    """Grid B P, block BLOCK.

    Block b P + p owns tiles p, p + P, ... of matrix b, of `size` elements. rest = 1 - mu.
    """
    P = squares_BP.shape[1]
    b = int64(cuda.blockIdx.x) // P
    p = int64(cuda.blockIdx.x) % P
    partial = cuda.shared.array(MAX_WARPS, float32)
    g = cuda.local.array(CHUNK, float32)
    m = cuda.local.array(CHUNK, float32)
    state = state_B[b]
    arena = arena_B[b]
    factor = factor_1[0]
    acc = float32(0.0)
    aligned = aligned and (state | arena | size) % QUAD == 0
    for tile in range(p * TILE, size, P * TILE):
        i = tile + cuda.threadIdx.x * QUAD
        vectorized = aligned and i + GAP + QUAD <= size
        load(g, g_n, arena + i, GAP, arena + size, vectorized)  # zeros beyond the end
        load(m, m_n, state + i, GAP, state + size, vectorized)
        for j in range(CHUNK):
            g[j] *= factor
            m[j] += rest * (g[j] - m[j])
            g[j] += mu * (m[j] - g[j])  # from here on x
            acc += g[j] * g[j]  # before x is rounded
        store(x_n, b * size + i, GAP, (b + 1) * size, g, vectorized)
        if factor == factor:
            store(m_n, state + i, GAP, state + size, m, vectorized)
    acc = block_sum(acc, partial)
    if cuda.threadIdx.x == 0:
        squares_BP[b, p] = acc


@kernel(BLOCK)
def normalize_kernel(x_n, squares_BP, size, tiles, eps, aligned):
    """Grid B tiles, block BLOCK.

    Every block adds its matrix's P sums in the same order: no atomics, the same bits.
    """
    b = int64(cuda.blockIdx.x) // tiles
    t = int64(cuda.blockIdx.x) % tiles
    partial = cuda.shared.array(MAX_WARPS, float32)
    x = cuda.local.array(CHUNK, float32)
    start, end = b * size, (b + 1) * size
    i = start + t * TILE + cuda.threadIdx.x * QUAD
    vectorized = aligned and size % QUAD == 0 and i + GAP + QUAD <= end
    load(x, x_n, i, GAP, end, vectorized)
    acc = float32(0.0)
    for p in range(cuda.threadIdx.x, squares_BP.shape[1], BLOCK):
        acc += squares_BP[b, p]
    norm = math.sqrt(block_sum(acc, partial))
    norm = eps if norm < eps else norm  # NaN stays NaN
    for j in range(CHUNK):
        x[j] /= norm
    store(x_n, i, GAP, end, x, vectorized)


@kernel(BLOCK)
def add_to_diagonal_kernel(A_n, rows, n, value):
    """Grid ceil(rows / BLOCK), block BLOCK.

    Thread r adds to the diagonal in row r of all n x n matrices.
    """
    r = int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x
    if r < rows:
        i = r * n + r % n
        store1(A_n, i, load1(A_n, i) + value)


@kernel(BLOCK)
def muon_update_kernel(
    w_n,
    copy_n,
    x_n,
    weight_B,
    arena_B,
    factor_1,
    hyper_3,
    size,
    tiles,
    scale,
    weight_decay,
    with_copy,
    aligned,
):
    """Grid B tiles, block BLOCK. Block b tiles + t owns tile t of matrix b, of `size` elements.

    copy_n may be unused.
    """
    b = int64(cuda.blockIdx.x) // tiles
    t = int64(cuda.blockIdx.x) % tiles
    w = cuda.local.array(CHUNK, float32)
    x = cuda.local.array(CHUNK, float32)
    weight = weight_B[b]
    arena = arena_B[b]
    i = t * TILE + cuda.threadIdx.x * QUAD
    aligned = aligned and (weight | arena | size) % QUAD == 0
    vectorized = aligned and i + GAP + QUAD <= size
    load(w, w_n, weight + i, GAP, weight + size, vectorized)
    load(x, x_n, b * size + i, GAP, (b + 1) * size, vectorized)
    lr = hyper_3[0]
    factor = factor_1[0]
    keep = float32(1.0) - lr * weight_decay
    step = lr * scale
    for j in range(CHUNK):
        w[j] = w[j] * keep - step * x[j]
    # False for NaN. The test is here and not at the top, where all loads would wait for it.
    if factor == factor:
        store(w_n, weight + i, GAP, weight + size, w, vectorized)
        if with_copy:
            store(copy_n, arena + i, GAP, arena + size, w, vectorized)


# Weights, moments and gradients are the whole arena, of which a launch touches as many elements as
# x has.
declare_cost(momentum_kernel, nbytes=lambda x, squares, *_: x.nbytes + squares.nbytes + 12 * x.size)
declare_cost(normalize_kernel, nbytes=lambda x, squares, *_: 2 * x.nbytes + squares.nbytes)
declare_cost(add_to_diagonal_kernel, nbytes=lambda A, rows, *_: 2 * int(rows) * A.itemsize)


def _update_bytes(w, copy, x, *others):
    with_copy = others[-2]
    return x.nbytes + x.size * (10 if with_copy else 8)


declare_cost(muon_update_kernel, nbytes=_update_bytes)


# ----------------------------------------------------------------------------- launchers
def momentum(
    x_BRC: Array,
    m_n: Array,
    g_n: Array,
    state_B: Array,
    arena_B: Array,
    factor_1: Array,
    mu: float,
) -> None:
    """Set x (B, R, C) to the Nesterov momentum of B matrices, each divided by its norm.

    x: float32 or bf16.
    m: momentum, float32, is updated.
    g: gradients, float32.
    state, arena: (B,) int64, offset of each matrix in m, and in g.
    factor: (1,) float32, multiplies g.
    """
    offsets = {"state": state_B, "arena": arena_B}
    _check("momentum", x_BRC, factor_1, offsets, {"m": m_n, "g": g_n})
    if on_host(x_BRC, m_n, g_n, state_B, arena_B, factor_1):
        momentum_ref(x_BRC, m_n, g_n, state_B, arena_B, factor_1, mu)
        return
    x_n = x_BRC.reshape(-1)
    B = x_BRC.shape[0]
    size = x_n.size // B
    tiles = -(-size // TILE)
    squares_BP = empty(m_n, (B, min(tiles, PARTIALS)), np.float32)
    arrays = (x_n, squares_BP, m_n, g_n, state_B, arena_B, factor_1)
    aligned = on_16_bytes(x_n, m_n, g_n)
    scalars = (size, np.float32(mu), np.float32(1 - mu), aligned)
    launch(momentum_kernel, squares_BP.size, BLOCK, *arrays, *scalars)
    eps = np.float32(EPS)
    launch(normalize_kernel, B * tiles, BLOCK, x_n, squares_BP, size, tiles, eps, aligned)


def orthogonalize(x_BRC: Array) -> Array:
    """Return about U V^T of each matrix of x (B, R, C), the same shape and dtype.

    The norms are at most 1. May overwrite x.
    """
    check_array("orthogonalize", "x", x_BRC, (None, None, None), FLOATS)
    if on_host(x_BRC):
        return orthogonalize_ref(x_BRC)
    B, R, C = x_BRC.shape
    n = min(R, C)
    a, b, c = QUINTIC
    y_BRC = empty(x_BRC, x_BRC.shape)
    S_Bnn = empty(x_BRC, (B, n, n))
    P_Bnn = empty(x_BRC, (B, n, n))
    for _ in range(ITERATIONS):
        matmul(S_Bnn, x_BRC, x_BRC, trans_a=R > C, trans_b=R <= C)
        _add_to_diagonal(S_Bnn, b / (2 * c))
        matmul(P_Bnn, S_Bnn, S_Bnn, alpha=c)
        _add_to_diagonal(P_Bnn, a - b * b / (4 * c))
        factors = (x_BRC, P_Bnn) if R > C else (P_Bnn, x_BRC)
        matmul(y_BRC, *factors)
        x_BRC, y_BRC = y_BRC, x_BRC
    return x_BRC


def _add_to_diagonal(A_Bnn, value):
    B, n, _ = A_Bnn.shape
    rows = B * n
    blocks = -(-rows // BLOCK)
    launch(add_to_diagonal_kernel, blocks, BLOCK, A_Bnn.reshape(-1), rows, n, np.float32(value))


def muon_update(
    w_n: Array,
    x_BRC: Array,
    weight_B: Array,
    arena_B: Array,
    factor_1: Array,
    hyper_3: Array,
    weight_decay: float,
    copy_n: Array | None = None,
) -> None:
    """Decay B matrices of w, float32, and subtract the scaled update x (B, R, C).

    weight, arena: (B,) int64, offset of each matrix in w, and in copy.
    factor: (1,), NaN to skip.
    hyper: (3,) float32: the learning rate is hyper[0].
    copy: bf16, becomes the new w.
    """
    _check("muon", x_BRC, factor_1, {"weight": weight_B, "arena": arena_B}, {"w": w_n})
    check_array("muon", "hyper", hyper_3, (3,))
    if copy_n is not None:
        check_array("muon", "copy", copy_n, (None,), ("bfloat16",))
    if on_host(w_n, x_BRC, weight_B, arena_B, factor_1, hyper_3):
        muon_update_ref(w_n, x_BRC, weight_B, arena_B, factor_1, hyper_3, weight_decay, copy_n)
        return
    x_n = x_BRC.reshape(-1)
    B, R, C = x_BRC.shape
    tiles = -(-R * C // TILE)
    scale = np.float32(RMS * math.sqrt(max(R, C)))
    copy = w_n if copy_n is None else copy_n  # a kernel argument cannot be None
    arrays = (w_n, copy, x_n, weight_B, arena_B, factor_1, hyper_3)
    options = (copy_n is not None, on_16_bytes(w_n, copy, x_n))
    scalars = (R * C, tiles, scale, np.float32(weight_decay), *options)
    launch(muon_update_kernel, B * tiles, BLOCK, *arrays, *scalars)


def _check(op, x_BRC, factor_1, offsets, vectors):
    check_array(op, "x", x_BRC, (None, None, None), FLOATS)
    check_array(op, "factor", factor_1, (1,))
    for name, offset_B in offsets.items():
        check_array(op, name, offset_B, (x_BRC.shape[0],), ("int64",))
    for name, x_n in vectors.items():
        check_array(op, name, x_n, (None,))
