"""The norm of all gradients and the factor that clips it (Pascanu et al. 2013).   g: (n,)

    norm = sqrt(sum_i g_i^2)        factor = min(1, max_norm / (norm + 1e-6))

g stays unchanged: the optimizer multiplies it by the factor while reading it, which saves a pass
over g.
Both numbers stay on the device, so a step needs no copy to the host and can be captured in a graph.

The sum has two stages: P blocks compute one partial sum each, then one block adds the P partial
sums. P depends only on n, so the same n gives the same order of additions and the same bits in
every run. A thread adds n / (8 P BLOCK) numbers into each of eight accumulators and the rest is a
tree, so the error grows slowly with n.
If the gradients are sharded over ranks, norm_and_factor takes the sums of squares of all shards.
Bytes moved: read g once.
"""

import functools
import math

import numpy as np

from ..device import Array
from .primitives.flat import (
    BLOCK,
    CHUNK,
    GAP,
    QUAD,
    STEPS,
    STRIDE,
    TILE,
    can_vectorize,
    load,
    on_16_bytes,
)
from .primitives.ptx import kernel
from .primitives.reduce import MAX_WARPS, block_sum
from .runtime.compiler import cuda, float32, int64
from .runtime.launch import check, check_array, empty, launch, on_host

PARTIALS = 1056  # 8 blocks on each of an H200's 132 multiprocessors: full occupancy
INF = float32(math.inf)


# ----------------------------------------------------------------------------- reference
def sum_of_squares_ref(x_n):
    """Return the sum of squares, (1,)."""
    return np.square(x_n).sum(keepdims=True)  # NumPy sums pairwise: also a tree


def norm_and_factor_ref(sums_P, max_norm):
    """Return (2,): norm, factor."""
    norm = np.sqrt(sums_P.sum())
    factor = 1
    if 0 < max_norm < math.inf:
        ratio = sums_P.dtype.type(max_norm) / (norm + sums_P.dtype.type(1e-6))
        factor = 1 if ratio > 1 else ratio  # NaN stays NaN
    return np.array([norm, factor], sums_P.dtype)


# ----------------------------------------------------------------------------- kernels
@kernel(BLOCK)
def sum_of_squares_kernel(partial_P, x_n, aligned):
    """Grid P, block BLOCK. Block p sums tiles p, p + P, ... of TILE elements."""
    tid = cuda.threadIdx.x
    n = x_n.size
    partial = cuda.shared.array(MAX_WARPS, float32)
    x = cuda.local.array((STEPS, CHUNK), float32)
    acc = cuda.local.array(CHUNK, float32)
    for j in range(CHUNK):
        acc[j] = float32(0.0)
    for tile in range(int64(cuda.blockIdx.x) * TILE, n, int64(cuda.gridDim.x) * TILE):
        first = tile + tid * QUAD
        vectorized = can_vectorize(first, n, aligned)
        for s in range(STEPS):  # load gives zeros beyond the end
            load(x[s], x_n, first + s * STRIDE, GAP, n, vectorized)
        for s in range(STEPS):
            for j in range(CHUNK):
                acc[j] += x[s, j] * x[s, j]
    total = float32(0.0)
    for j in range(CHUNK):
        total += acc[j]
    total = block_sum(total, partial)
    if tid == 0:
        partial_P[cuda.blockIdx.x] = total


@cuda.jit
def sum_kernel(total_1, partial_P):
    """Grid 1, block BLOCK. total_1[0] = the sum of partial_P."""
    shared = cuda.shared.array(MAX_WARPS, float32)
    acc = float32(0.0)
    for p in range(cuda.threadIdx.x, partial_P.size, BLOCK):
        acc += partial_P[p]
    total = block_sum(acc, shared)
    if cuda.threadIdx.x == 0:
        total_1[0] = total


@cuda.jit
def norm_and_factor_kernel(stats_2, sums_P, max_norm):
    """Grid 1, block BLOCK. stats_2 = norm, factor. An infinite max_norm means no clipping."""
    shared = cuda.shared.array(MAX_WARPS, float32)
    acc = float32(0.0)
    for p in range(cuda.threadIdx.x, sums_P.size, BLOCK):
        acc += sums_P[p]
    norm = math.sqrt(block_sum(acc, shared))
    if cuda.threadIdx.x == 0:
        ratio = max_norm / (norm + float32(1e-6)) if max_norm < INF else float32(1.0)
        stats_2[0] = norm
        stats_2[1] = float32(1.0) if ratio > float32(1.0) else ratio  # NaN stays NaN


# ----------------------------------------------------------------------------- launchers
def sum_of_squares(*parts: Array) -> Array:
    """Return the sum of squares of all parts, (1,) float32, on their device.

    parts: (n,) float32, n >= 0. The same bits in every run.
    """
    for x_n in parts:
        check_array("sum_of_squares", "x", x_n, (None,))
    if on_host(*parts):
        return functools.reduce(np.add, map(sum_of_squares_ref, parts))
    total_1 = empty(parts[0], 1)
    launch(sum_kernel, 1, BLOCK, total_1, _partial_sums(*parts))
    return total_1


def norm_and_factor(sums_P: Array, max_norm: float) -> Array:
    """Return (2,): the norm of all shards, and the factor that clips it.

    sums: (P,) float32, the sums of squares of P shards.
    max_norm: 0 or infinite means no clipping: factor 1.
    Raises ValueError for a negative max_norm or NaN.
    """
    check_array("norm_and_factor", "sums", sums_P, (None,))
    check(max_norm >= 0, f"grad_norm: max_norm is {max_norm}, expected 0 (no clipping) or more")
    if on_host(sums_P):
        return norm_and_factor_ref(sums_P, max_norm)
    stats_2 = empty(sums_P, 2)
    limit = np.float32(max_norm if max_norm > 0 else math.inf)
    launch(norm_and_factor_kernel, 1, BLOCK, stats_2, sums_P, limit)
    return stats_2


def grad_norm(grads_n: Array, max_norm: float) -> Array:
    """Return (2,): norm and factor of grads (n,) float32, which stay unchanged.

    See norm_and_factor.
    """
    check_array("grad_norm", "grads", grads_n, (None,))
    if on_host(grads_n):
        return norm_and_factor(sum_of_squares_ref(grads_n), max_norm)
    return norm_and_factor(_partial_sums(grads_n), max_norm)


def _partial_sums(*parts):
    """Return (P,): the sums of the blocks for all parts."""
    counts = [min(PARTIALS, -(-x_n.size // TILE)) for x_n in parts]
    partial_P = empty(parts[0], sum(counts))
    first = 0
    for x_n, P in zip(parts, counts):
        launch(sum_of_squares_kernel, P, BLOCK, partial_P[first : first + P], x_n, on_16_bytes(x_n))
        first += P
    return partial_P
