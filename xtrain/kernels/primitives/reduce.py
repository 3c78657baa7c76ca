"""Sums and maxima over a warp (32 threads) and over a block.

A warp needs no shared memory, a block one float per warp. A butterfly of exclusive-or shuffles
leaves the result in every lane. The order of the additions is fixed, so the same input gives the
same bits. Every thread of the warp or block must call these functions: no thread may return before
them, and a block must be a whole number of warps.
"""

import math

from ..runtime.compiler import cuda, float32

FULL = 0xFFFFFFFF  # all 32 lanes take part
MAX_WARPS = 32  # a block has at most 1024 threads
NEG_INF = float32(-math.inf)


@cuda.jit(device=True)
def warp_sum(v):
    """Return the sum of v over the 32 lanes, in every lane."""
    for step in (16, 8, 4, 2, 1):
        v += cuda.shfl_xor_sync(FULL, v, step)
    return v


@cuda.jit(device=True)
def warp_max(v):
    """Return the maximum of v over the 32 lanes, in every lane."""
    for step in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(FULL, v, step)
        v = v if v > other else other
    return v


@cuda.jit(device=True)
def block_sum(v, partial):
    """Return the sum of v over the block, in every thread.

    partial: MAX_WARPS floats of shared memory.
    """
    tid = cuda.threadIdx.x
    lane = tid % 32
    warp = tid // 32
    v = warp_sum(v)
    cuda.syncthreads()  # the previous use of `partial` is over
    if lane == 0:
        partial[warp] = v
    cuda.syncthreads()  # every warp's sum is written
    v = partial[lane] if lane < cuda.blockDim.x // 32 else float32(0.0)
    return warp_sum(v)


@cuda.jit(device=True)
def block_max(v, partial):
    """Return the maximum of v over the block, in every thread.

    partial: MAX_WARPS floats of shared memory.
    """
    tid = cuda.threadIdx.x
    lane = tid % 32
    warp = tid // 32
    v = warp_max(v)
    cuda.syncthreads()  # the previous use of `partial` is over
    if lane == 0:
        partial[warp] = v
    cuda.syncthreads()  # every warp's maximum is written
    v = partial[lane] if lane < cuda.blockDim.x // 32 else NEG_INF
    return warp_max(v)
