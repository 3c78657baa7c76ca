"""Padding kernels of lesson 17: from lengths to edges, and between padded and packed arrays.

The library packs prompts on the host and never pads them (xtrain/kernels/decoding/padding.py defines edges, A, N and E). What
stays here is what a model with padded inputs needs:

    offset (N,)            packed token n of sequence a is row n + offset[n] of the padded (A T, ...) array, because
                           a T + (n - edges[a]) = n + (a T - edges[a])

    padded, T = 4      a0 a1 a2 .  b0 .  .  .  c0 c1 .  .        lengths 3 1 2      edges 0 3 4 6
    packed             a0 a1 a2 b0 c0 c1                         offset  0 0 0  1  4 4

`remove` and `restore` convert between the two; fused with the transpose of heads, (A, H, T, D) <-> (N, H, D), the data is moved
once instead of twice. Bytes moved, remove: read and write N rows. Restore: read N rows, write A T.
"""

import functools

import numpy as np

from xtrain.device import Array
from xtrain.kernels.decoding.kv_cache import check_int32
from xtrain.kernels.decoding.padding import check_edges, check_lengths, sequence_of, sequence_of_ref
from xtrain.kernels.primitives.flat import on_16_bytes
from xtrain.kernels.primitives.ptx import kernel, load1, store1
from xtrain.kernels.primitives.reduce import FULL
from xtrain.kernels.primitives.words import load_words4, load_words8, store_words4, store_words8
from xtrain.kernels.runtime.compiler import cuda, float32, int32, int64, uint32
from xtrain.kernels.runtime.launch import FLOATS, check, check_array, empty, launch, on_host

BLOCK = 256  # threads
WARP = 32


# ----------------------------------------------------------------------------- references
def cumulative_lengths_ref(lengths_A):
    """cumulative_lengths in NumPy -> edges (A + 1,) int32"""
    return np.concatenate([[0], np.cumsum(lengths_A)]).astype(np.int32)


def padding_offsets_ref(edges_E, N, T):
    """padding_offsets in NumPy -> offset (N,) int32"""
    a_N = sequence_of_ref(edges_E, N)
    return (a_N * T - edges_E[a_N]).astype(np.int32)


def remove_padding_ref(x_AT, edges_E, N):
    """x: (A, T, ...) -> (N, ...)"""
    A, T = x_AT.shape[:2]
    return x_AT.reshape(A * T, *x_AT.shape[2:])[np.arange(N) + padding_offsets_ref(edges_E, N, T)]


def restore_padding_ref(x_N, edges_E, T):
    """x: (N, ...) -> (A, T, ...), zeros in the padding"""
    A, N = edges_E.size - 1, x_N.shape[0]
    y_AT = np.zeros((A * T, *x_N.shape[1:]), x_N.dtype)
    y_AT[np.arange(N) + padding_offsets_ref(edges_E, N, T)] = x_N
    return y_AT.reshape(A, T, *x_N.shape[1:])


# ----------------------------------------------------------------------------- kernels
@kernel(WARP)
def cumulative_lengths_kernel(edges_E, lengths_A):
    """Grid 1, block one warp: 32 lengths at a time, summed by shuffles, plus the sum so far."""
    lane, A, total = cuda.threadIdx.x, lengths_A.size, int32(0)
    if lane == 0:
        edges_E[0] = 0
    for first in range(0, A, WARP):
        a = first + lane
        v = lengths_A[a] if a < A else int32(0)
        for i in range(5):
            before = cuda.shfl_up_sync(FULL, v, 1 << i)
            if lane >= 1 << i:
                v = int32(v + before)
        if a < A:
            edges_E[a + 1] = int32(total + v)
        total = int32(total + cuda.shfl_sync(FULL, v, 31))


@kernel(BLOCK)
def padding_offsets_kernel(offset_N, edges_E, N, T):
    """Grid ceil(N / BLOCK), block BLOCK."""
    n = int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x
    if n < N:
        a = sequence_of(n, edges_E)
        offset_N[n] = int32(a * T - edges_E[a])


@functools.cache
def make_move_kernel(H, D, restore, heads, each):
    """-> the kernel. restore: padded from packed, otherwise packed from padded. heads: padded is (A, H, T, D), else (A, T, H D).

    each: contiguous elements per thread, 16 bytes, or 1 element if heads do not begin at multiples of 16 bytes.
    """

    @kernel(BLOCK)
    def move_padding_kernel(y, x, edges_E, N, T):
        """Grid (rows of y, ceil(H D / each / BLOCK)), block BLOCK. x, y: flat; a row is a token, packed or padded.

        Invalid edges give zeros: nothing is read beyond the N packed tokens, or the T tokens of a padded sequence.
        """
        words = cuda.local.array(4, uint32)
        row, c = int64(cuda.blockIdx.x), (cuda.blockIdx.y * BLOCK + cuda.threadIdx.x) * each
        if restore:
            a, t = row // T, row % T
            n = edges_E[a] + t
            real = n < edges_E[a + 1] and n >= 0 and n < N
        else:
            a, n = sequence_of(row, edges_E), row
            t = n - edges_E[a]
            real = t >= 0 and t < T
        if c < H * D:
            packed = n * (H * D) + c
            padded = ((a * H + c // D) * T + t) * D + c % D if heads else (a * T + t) * (H * D) + c
            source, to = (packed, padded) if restore else (padded, packed)
            if each == 1:
                store1(y, to, load1(x, source) if real else float32(0.0))
            else:
                for j in range(4):
                    words[j] = uint32(0)
                if each == 8:
                    if real:
                        load_words8(words, x, source)
                    store_words8(y, to, words)
                else:
                    if real:
                        load_words4(words, x, source)
                    store_words4(y, to, words)

    return move_padding_kernel


# ----------------------------------------------------------------------------- launchers
def cumulative_lengths(lengths_A: Array) -> Array:
    """lengths (A,) int32, none negative -> edges (A + 1,) int32. Raises TypeError for another dtype."""
    check_int32("cumulative_lengths", "lengths", lengths_A, lengths_A.size)
    if on_host(lengths_A):
        check((lengths_A >= 0).all(), f"cumulative_lengths: a length is {lengths_A.min(initial=0)}")
        return cumulative_lengths_ref(lengths_A)
    edges_E = empty(lengths_A, lengths_A.size + 1)
    launch(cumulative_lengths_kernel, 1, WARP, edges_E, lengths_A)
    return edges_E


def padding_offsets(edges_E: Array, N: int, T: int) -> Array:
    """-> offset (N,) int32: packed token n is row n + offset[n] of the padded array, whose sequences have T tokens."""
    check_edges("padding_offsets", edges_E, N, T)
    if on_host(edges_E):
        check_lengths("padding_offsets", edges_E, N, T)
        return padding_offsets_ref(edges_E, N, T)
    offset_N = empty(edges_E, N)
    launch(padding_offsets_kernel, -(-N // BLOCK), BLOCK, offset_N, edges_E, N, T)
    return offset_N


def remove_padding(x_AT: Array, edges_E: Array, N: int) -> Array:
    """x (A, T, ...) float32 or bf16 -> (N, ...), the N = edges[-1] tokens without the padding."""
    check_array("remove_padding", "x", x_AT, (None, None, *x_AT.shape[2:]), FLOATS)
    T = x_AT.shape[1]
    A = check_edges("remove_padding", edges_E, N, T)
    check_array("remove_padding", "x", x_AT, (A, *x_AT.shape[1:]), FLOATS)
    if on_host(x_AT, edges_E):
        check_lengths("remove_padding", edges_E, N, T)
        return remove_padding_ref(x_AT, edges_E, N)
    y_N = empty(x_AT, (N, *x_AT.shape[2:]))
    _move(y_N, x_AT, edges_E, N, N, T, 1, _product(x_AT.shape[2:]), False, False)
    return y_N


def restore_padding(x_N: Array, edges_E: Array, T: int) -> Array:
    """x (N, ...) float32 or bf16 -> (A, T, ...), zeros beyond the end of each sequence. T: at least the longest."""
    check_array("restore_padding", "x", x_N, (None, *x_N.shape[1:]), FLOATS)
    A = check_edges("restore_padding", edges_E, x_N.shape[0], T)
    if on_host(x_N, edges_E):
        check_lengths("restore_padding", edges_E, x_N.shape[0], T)
        return restore_padding_ref(x_N, edges_E, T)
    y_AT = empty(x_N, (A, T, *x_N.shape[1:]))
    rows = x_N.shape[0]
    _move(y_AT, x_N, edges_E, A * T, rows, T, 1, _product(x_N.shape[1:]), True, False)
    return y_AT


def remove_padding_heads(x_AHTD: Array, edges_E: Array, N: int) -> Array:
    """x (A, H, T, D) float32 or bf16 -> (N, H, D): the padding removed and the heads swapped back, in one pass."""
    check_array("remove_padding_heads", "x", x_AHTD, (None,) * 4, FLOATS)
    _, H, T, D = x_AHTD.shape
    A = check_edges("remove_padding_heads", edges_E, N, T)
    check_array("remove_padding_heads", "x", x_AHTD, (A, H, T, D), FLOATS)
    if on_host(x_AHTD, edges_E):
        check_lengths("remove_padding_heads", edges_E, N, T)
        return remove_padding_ref(np.ascontiguousarray(x_AHTD.swapaxes(1, 2)), edges_E, N)
    y_NHD = empty(x_AHTD, (N, H, D))
    _move(y_NHD, x_AHTD, edges_E, N, N, T, H, D, False, True)
    return y_NHD


def restore_padding_heads(x_NHD: Array, edges_E: Array, T: int) -> Array:
    """x (N, H, D) float32 or bf16 -> (A, H, T, D), zeros beyond the end of each sequence."""
    check_array("restore_padding_heads", "x", x_NHD, (None, None, None), FLOATS)
    N, H, D = x_NHD.shape
    A = check_edges("restore_padding_heads", edges_E, N, T)
    if on_host(x_NHD, edges_E):
        check_lengths("restore_padding_heads", edges_E, N, T)
        return np.ascontiguousarray(restore_padding_ref(x_NHD, edges_E, T).swapaxes(1, 2))
    y_AHTD = empty(x_NHD, (A, H, T, D))
    _move(y_AHTD, x_NHD, edges_E, A * T, N, T, H, D, True, True)
    return y_AHTD


def _move(y, x, edges_E, rows, N, T, H, D, restore, heads):
    flat, each = (y.reshape(-1), x.reshape(-1)), 16 // y.itemsize
    each = each if D % each == 0 and on_16_bytes(*flat) else 1
    move_kernel = make_move_kernel(H, D, restore, heads, each)
    launch(move_kernel, (rows, -(-H * D // (each * BLOCK))), BLOCK, *flat, edges_E, N, T)


def _product(shape):
    return int(np.prod(shape, dtype=np.int64))
