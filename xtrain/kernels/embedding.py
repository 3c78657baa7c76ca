"""Embedding: look up rows of a table.   ids: (N,) integers in [0, V)   w: (V, C)   x: (N, C)

    forward    x[n] = w[ids[n]]
    backward   x = P w with P[n, v] = 1 if ids[n] == v else 0, so dw = P^T dx:
               dw[v] = sum of dx[n] over the n with ids[n] == v

Nothing is saved but the ids. Bytes moved, forward: read N rows, write N rows. Backward: read dx,
read and write the rows of dw that occur.

The sum in the backward is the difficulty: thousands of positions may hold the same token. Atomic
additions from N blocks would be short to write, but float addition is not associative and atomics
come in any order: other bits every run. Here a block owns ROWS rows and COLUMNS columns of dw. It
searches the ids from the first to the last for its rows and adds what it finds in that order, so
every sum is in the order of n. Each block reads all ids, mostly from the L2 cache; dx is read once.
"""

import math

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ..device import Array
from ._launch import check_array, check_ids, empty, launch, on_host
from ._reduce import FULL

BLOCK = 256
WARPS = BLOCK // 32  # rows of one forward block
NAN = float32(math.nan)

COLUMNS = 128  # columns, and threads, of a backward block: 384, 768 and 1024 are multiples
ROWS = 64  # vocabulary rows of a backward block: 64 x 128 sums are 32 KB of shared memory
SCAN_WARPS = COLUMNS // 32
IDS = 4  # ids that a lane looks at before the warps meet: four loads in flight
SCAN = COLUMNS * IDS  # ids per round
QUEUE = 2 * SCAN  # matches waiting to be added; together with the sums under 48 KB
AHEAD = 16  # rows of dx under way before the first is added: a frequent token waits once per 16


# ----------------------------------------------------------------------------- reference
def embedding_ref(ids_N, w_VC):
    return w_VC[ids_N]


def embedding_bwd_ref(dx_NC, ids_N, V):
    """-> dw (V, C)"""
    dw_VC = np.zeros((V, dx_NC.shape[1]), dx_NC.dtype)
    np.add.at(dw_VC, ids_N, dx_NC)  # in the order of n
    return dw_VC


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def embedding_fwd_kernel(x_NC, ids_N, w_VC):
    """Grid ceil(N / WARPS), block BLOCK. A warp copies a row; an id outside the table gives NaN."""
    n = int64(cuda.blockIdx.x) * WARPS + cuda.threadIdx.x // 32
    if n >= x_NC.shape[0]:
        return
    v = int64(ids_N[n])
    known = v >= 0 and v < w_VC.shape[0]
    for c in range(cuda.threadIdx.x % 32, x_NC.shape[1], 32):
        x_NC[n, c] = w_VC[v, c] if known else NAN


@cuda.jit
def embedding_bwd_naive_kernel(dw_VC, dx_NC, ids_N):
    """Grid (V, ceil(C / BLOCK)), block BLOCK. A thread per element of dw: V C N steps."""
    v = int64(cuda.blockIdx.x)
    c = cuda.blockIdx.y * BLOCK + cuda.threadIdx.x
    if c < dw_VC.shape[1]:
        acc = float32(0.0)
        for n in range(ids_N.size):
            if int64(ids_N[n]) == v:
                acc += dx_NC[n, c]
        dw_VC[v, c] += acc


@cuda.jit(device=True)
def add_matches(acc, dx_NC, queue_n, queue_row, length, c):
    """Add column c of the queued rows of dx to this thread's sums, in order, AHEAD at a time."""
    value = cuda.local.array(AHEAD, float32)
    if c < dx_NC.shape[1]:
        for first in range(0, length, AHEAD):
            for k in range(AHEAD):  # without a condition, so that all loads are under way at once
                i = first + k if first + k < length else length - 1
                value[k] = dx_NC[int64(queue_n[i]), c]
            for k in range(AHEAD):
                if first + k < length:
                    acc[queue_row[first + k], cuda.threadIdx.x] += value[k]


@cuda.jit
def embedding_bwd_kernel(dw_VC, dx_NC, ids_N):
    """Grid (ceil(V / ROWS), ceil(C / COLUMNS)), block COLUMNS. A thread owns column c of ROWS rows.

    A warp looks at SCAN / SCAN_WARPS neighbouring ids. Ballots say which of them are ours; counting
    the bits before its own gives every match its place in the queue, so the queue is in the order
    of n. Ids outside the table match no row, or one past the end that is never stored.
    """
    acc = cuda.shared.array((ROWS, COLUMNS), float32)  # column tid is touched by thread tid alone
    queue_n = cuda.shared.array(QUEUE, int32)
    queue_row = cuda.shared.array(QUEUE, int32)
    counts = cuda.shared.array(SCAN_WARPS, int32)
    row = cuda.local.array(IDS, int32)
    ballot = cuda.local.array(IDS, uint32)
    tid = cuda.threadIdx.x
    lane, warp = tid % 32, tid // 32
    v0 = int64(cuda.blockIdx.x) * ROWS
    c = cuda.blockIdx.y * COLUMNS + tid
    N, V = ids_N.size, dw_VC.shape[0]
    for r in range(ROWS):
        acc[r, tid] = float32(0.0)
    length = 0  # of the queue; the same in all threads
    for n0 in range(0, N, SCAN):
        n = n0 + warp * (32 * IDS) + lane  # then n + 32, n + 64, ...
        found = 0
        for k in range(IDS):
            r = int64(ids_N[n + 32 * k]) - v0 if n + 32 * k < N else int64(-1)
            row[k] = r if r >= 0 and r < ROWS else -1
        for k in range(IDS):
            ballot[k] = cuda.ballot_sync(FULL, row[k] >= 0)
            found += cuda.popc(ballot[k])
        if lane == 0:
            counts[warp] = found
        cuda.syncthreads()  # all counts are there
        place = length
        for w in range(SCAN_WARPS):
            if w < warp:
                place += counts[w]
            length += counts[w]
        for k in range(IDS):
            if row[k] >= 0:
                before = place + cuda.popc(ballot[k] & uint32((1 << lane) - 1))
                queue_n[before] = n + 32 * k
                queue_row[before] = row[k]
            place += cuda.popc(ballot[k])
        cuda.syncthreads()  # the queue is written, the counts are read
        if length > QUEUE - SCAN:
            add_matches(acc, dx_NC, queue_n, queue_row, length, c)
            length = 0  # it is written again after the next round's first barrier only
    add_matches(acc, dx_NC, queue_n, queue_row, length, c)
    for r in range(ROWS):  # a row without matches holds zeros: dw is neither read nor written
        if v0 + r < V and c < dw_VC.shape[1] and acc[r, tid] != float32(0.0):
            dw_VC[v0 + r, c] += acc[r, tid]


# ----------------------------------------------------------------------------- launchers
def embedding_fwd(ids_N: Array, w_VC: Array) -> Array:
    """ids (N,) of any integer type, w (V, C) float32 -> x (N, C).

    An id outside [0, V): ValueError on the CPU; a row of NaN on the GPU (looking costs a copy).
    """
    check_array("embedding", "w", w_VC, (None, None))
    host = _check_ids(ids_N, w_VC.shape[0], w_VC)
    if host:
        return embedding_ref(ids_N, w_VC)
    N, C = ids_N.size, w_VC.shape[1]
    x_NC = empty(w_VC, (N, C))
    launch(embedding_fwd_kernel, -(-N // WARPS), BLOCK, x_NC, ids_N, w_VC)
    return x_NC


def embedding_bwd(dx_NC: Array, ids_N: Array, dw_VC: Array) -> None:
    """dx (N, C), ids (N,). Adds dw to dw_VC (V, C). Same bits every run.

    Rows whose id does not occur are left alone. An id outside [0, V): ValueError on the CPU; on the
    GPU it adds nothing.
    """
    V, C = dw_VC.shape
    check_array("embedding backward", "dw", dw_VC, (V, C))
    check_array("embedding backward", "dx", dx_NC, (ids_N.size, C))
    if _check_ids(ids_N, V, dx_NC, dw_VC):
        dw_VC += embedding_bwd_ref(dx_NC, ids_N, V)
        return
    grid = (-(-V // ROWS), -(-C // COLUMNS))
    launch(embedding_bwd_kernel, grid, COLUMNS, dw_VC, dx_NC, ids_N)


def _check_ids(ids_N, V, *others):
    """-> True: all on the host, and every id was looked at."""
    check_ids("embedding", "ids", ids_N)
    check_array("embedding", "ids", ids_N, (None,), (ids_N.dtype.name,))
    if not on_host(ids_N, *others):
        return False
    outside = np.flatnonzero((ids_N < 0) | (ids_N >= V))
    if outside.size:
        n = int(outside[0])
        raise ValueError(
            f"embedding: id {ids_N[n]} at position {n} is outside the table of {V} rows"
        )
    return True
