"""Residual addition and RMSNorm whose result is fp8 codes.

x, r: (N, C)   w: (C,)   h: (N, C)   codes: (N, C), (C, N)

    h = x + r              residual.py; without r: h is x
    y = rmsnorm(h) w
    y ~ codes x scale      fp8.py

Only a product reads y, so y is never written, in bf16 or otherwise. Backward needs h and rstd
(residual_rmsnorm_bwd) and, for the product's weight gradient, the transposed codes. The codes are
those of y in float32: y is rounded once, not to bf16 first.

Bytes of a number, with x in float32 and r in bf16:   x 4 + r 2 + h 4 + codes 2 = 12
two kernels, residual_rmsnorm_fwd and fp8:            x 4 + r 2 + h 4 + y 2 + y 2 + codes 2 = 16

A row is needed whole before its first code, and 16 rows or more before a transposed store: 16
neighbouring bytes of a column. So a block owns ROWS whole rows. W warps hold a row in registers
from the load of x to the codes, as in rows.py, and put its codes in shared memory; when all rows
are there, threads transpose 4 x 4 bytes at a time and write 16 bytes of each of 4 columns. With 32
rows 2 lanes write 32 neighbouring bytes of a column, a sector of memory. Rows in shared memory are
one word longer than C, an odd number: the 16 words that 16 lanes read in one row and those of the
other 16 lanes, 16 rows below, are in different banks.
"""

import functools

import numpy as np

from ..device import Array
from .fp8 import (
    TILE,
    Fp8,
    Slot,
    add_notes,
    check_type,
    encode_on_gpu,
    encode_on_host,
    make_encode4,
    start_notes,
    store_transposed,
)
from .primitives.codes import store_codes4
from .primitives.flat import on_16_bytes
from .primitives.ptx import kernel
from .primitives.reduce import MAX_WARPS, warp_sum
from .primitives.rows import make_row_ops
from .residual import residual_rmsnorm_ref
from .rmsnorm import rmsnorm_ref
from .runtime.compiler import cuda, float32, int32, int64, rsqrtf, uint32
from .runtime.cost import declare_cost, distinct_bytes
from .runtime.launch import FLOATS, check, check_array, empty, empty_like, launch, on_host, wide

WARPS = 16  # of a block at most, or those of one row if they are more
# Warps per multiprocessor, for up to 24 columns per thread (80 registers) and beyond (128). With
# this limit ptxas issues all loads of a row before it uses the first; without a limit it takes 72
# registers, and some loads wait for the first sums.
RESIDENT = 24
RESIDENT_WIDE = 16
VEC = 4  # neighbouring columns of a thread: 16 bytes of float32, a word of codes
# Columns. Up to WIDE a block owns 32 rows: their codes take 98 KB of shared memory, and a block may
# have 99 KiB (Ada), 227 KiB (Hopper). Beyond it owns 16: up to 6272 columns on Ada, WIDEST on
# Hopper.
WIDE = 3072
WIDEST = 14336


def rows_of_a_block(C: int) -> int:
    """Return how many rows of C columns fit in a block's shared memory, as codes."""
    return 32 if C <= WIDE else 16


def rows_at_a_time(W: int) -> int:
    """Return how many rows of W warps each a block computes at the same time.

    A power of two, so that it divides rows_of_a_block.
    """
    return 1 << (max(WARPS // W, 1).bit_length() - 1)


# ----------------------------------------------------------------------------- kernel
@functools.cache
def make_fp8_norm_kernel(C: int, kind: str, add: bool, write: bool):
    """Return the kernel and its block size. add: h = x + r, else h is x.

    write False: it only takes the maximum.
    """
    ops = make_row_ops(C, VEC, True)
    load = ops.load
    store = ops.store
    load_words = ops.load_words
    unpack = ops.unpack
    W = ops.W
    STEPS = ops.STEPS
    STRIDE = ops.STRIDE
    FULL = C % STRIDE == 0
    INVERSE = 1 / C
    GROUPS = rows_at_a_time(W)
    THREADS = 32 * W * GROUPS
    ROWS = rows_of_a_block(C)
    WORDS = C // 4 + 1
    PIECES = ROWS // 16
    encode4 = make_encode4(kind)
    warps = RESIDENT if STEPS * VEC <= 24 else RESIDENT_WIDE

    @kernel(THREADS, max(32 * warps // THREADS, 1))
    def fp8_norm_kernel(codes, columns, h, rstd_N, x, r, w_C, scale_1, largest_1, counts_2, N, eps):
        """Grid N / ROWS, block THREADS.

        All arrays are flat: codes, h, x, r (N C), columns (C N).
        """
        tile = cuda.shared.array(0, uint32)  # (ROWS, WORDS)
        partial = cuda.shared.array(MAX_WARPS, float32)
        h_SE = cuda.local.array((STEPS, VEC), float32)
        r_SW = cuda.local.array((STEPS, VEC), uint32)
        v = cuda.local.array(VEC, float32)
        word = cuda.local.array(1, uint32)
        largest = cuda.local.array(1, float32)
        counts = cuda.local.array(2, int32)
        start_notes(largest, counts)
        tid = cuda.threadIdx.x
        group = tid // (32 * W)
        column = tid % (32 * W) * VEC
        n0 = int64(cuda.blockIdx.x) * ROWS
        inverse = float32(1.0) / scale_1[0]
        for first in range(0, ROWS, GROUPS):
            row = first + group
            n = n0 + row
            for s in range(STEPS):
                load(h_SE[s], x, n * C, column + s * STRIDE)
                if add:
                    load_words(r_SW[s], r, n * C, column + s * STRIDE)
            cuda.syncwarp()  # keeps the compiler from moving the loads behind the arithmetic
            acc = float32(0.0)
            for s in range(STEPS):
                if add:
                    unpack(v, r_SW[s], r)
                    for j in range(VEC):
                        h_SE[s, j] += v[j]
                    if write:
                        store(h, n * C, column + s * STRIDE, h_SE[s])
                for j in range(VEC):
                    acc += h_SE[s, j] * h_SE[s, j]
            acc = warp_sum(acc)
            if W > 1:  # the other warps of the row
                cuda.syncthreads()  # the sums of the rows before have been read
                if tid % 32 == 0:
                    partial[tid // 32] = acc
                cuda.syncthreads()
                acc = float32(0.0)
                for i in range(W):
                    acc += partial[group * W + i]
            rstd = rsqrtf(acc * float32(INVERSE) + eps)
            if write and column == 0:
                rstd_N[n] = rstd  # saved for backward
            for s in range(STEPS):
                load(v, w_C, 0, column + s * STRIDE)
                for j in range(VEC):
                    h_SE[s, j] *= rstd * v[j]
            for s in range(STEPS):
                c = column + s * STRIDE
                if FULL or c < C:
                    word[0] = encode4(h_SE[s], inverse, largest, counts)
                    if write:
                        tile[uint32(row * WORDS + c // 4)] = word[0]
                        store_codes4(codes, n * C + c, word)
        # a barrier: the tile is full
        add_notes(largest_1, counts_2, largest, counts, partial, write)
        if write:
            for i in range(tid, PIECES * (C // 4), THREADS):
                # 16 rows, 4 columns
                piece = i % PIECES
                column4 = i // PIECES
                start = int64(column4 * 4) * N + n0 + piece * 16
                store_transposed(columns, start, N, tile, piece * 16 * WORDS + column4, WORDS)

    def nbytes(codes, columns, h, rstd_N, x, r, w_C, *_):
        total = distinct_bytes(x, r, w_C)
        if write:
            total += codes.nbytes + columns.nbytes + rstd_N.nbytes
        if write and add:
            total += h.nbytes
        return total

    declare_cost(fp8_norm_kernel, nbytes=nbytes)
    return fp8_norm_kernel, THREADS


# ----------------------------------------------------------------------------- launcher
def fp8_norm(
    x_NC: Array, r_NC: Array | None, w_C: Array, eps: float, slot: Slot, current: bool = False
) -> tuple[Array, Fp8, Array]:
    """Return h = x + r in the dtype of x, the codes of rmsnorm(h) w, and rstd (N,) float32.

    x, r: (N, C), w: (C,), float32 or bf16. r None: h is x itself. N and C: multiples of TILE, C at
    most WIDEST.
    slot, current: as in fp8.fp8.
    """
    op = "fp8 norm"
    check_type(op, slot, Slot)
    check_array(op, "x", x_NC, (None, None), FLOATS)
    N, C = x_NC.shape
    if r_NC is not None:
        check_array(op, "r", r_NC, (N, C), FLOATS)
    check_array(op, "w", w_C, (C,), FLOATS)
    check(
        N % TILE == 0 and C % TILE == 0 and 0 < C <= WIDEST,
        f"{op}: x is {N} x {C}, expected multiples of {TILE} rows and columns, "
        f"at most {WIDEST} columns",
    )
    add = r_NC is not None
    r = x_NC if r_NC is None else r_NC  # a kernel argument cannot be None
    if on_host(x_NC, r, w_C, *slot.arrays):
        h = wide(x_NC)
        if add:
            h, y, rstd_N = residual_rmsnorm_ref(h, wide(r), wide(w_C), eps)
        else:
            y, rstd_N = rmsnorm_ref(h, wide(w_C), eps)
        return h.astype(x_NC.dtype, copy=False), encode_on_host(y, slot, current), rstd_N
    check(
        on_16_bytes(x_NC, r, w_C),
        f"{op}: an address is not a multiple of 16 bytes: copy x, r and w first",
    )
    h_NC = empty_like(x_NC) if add else x_NC
    rstd_N = empty(x_NC, N, np.float32)
    h, x, r = (a.reshape(-1) for a in (h_NC, x_NC, r))
    rows = rows_of_a_block(C)
    shared = rows * (C // 4 + 1) * 4

    def start(write, codes, columns, scale_1):
        norm_kernel, threads = make_fp8_norm_kernel(C, slot.kind, add, write)
        state = (scale_1, slot.largest_1, slot.counts_2)
        arguments = (codes, columns, h, rstd_N, x, r, w_C, *state, N, np.float32(eps))
        launch(norm_kernel, N // rows, threads, *arguments, shared=shared)

    return h_NC, encode_on_gpu((N, C), slot, current, start), rstd_N
