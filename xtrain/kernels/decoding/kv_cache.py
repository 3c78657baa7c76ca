"""The memory of a decoder: keys and values of all tokens so far, in one preallocated array.

    kv_L2RGSD    layer, key or value, row, key head, position, channel      S: capacity of a row, in tokens
    k_RGSD = kv_L2RGSD[l, 0],  v_RGSD = kv_L2RGSD[l, 1]                     what the kernels of layer l read and write

A row belongs to one sequence at a time. The layout favours reads, because a decoding step writes one position of every
(row, head) and reads all of them: the block of one key head of one row reads S D contiguous elements, whole 128-byte lines of
memory pages that are already open. With positions before heads (RSGD, as the training kernels have it) it would read D
elements and skip the other heads'. An append would then be one run instead of G, but it touches one position in thousands.

    append     k[row, g, position] = new k of a token, v likewise; tokens may belong to any rows, in any order

Bytes moved by append: read and write 2 N G D elements.
"""

import functools

import numpy as np
from numba import cuda, int64, uint32

from ...device import Array
from ..primitives.flat import flat_rows, on_16_bytes, row_step
from ..primitives.ptx import kernel, load1, store1
from ..primitives.words import load_words4, load_words8, store_words4, store_words8
from ..runtime.launch import FLOATS, check, check_array, launch, on_host, zeros

BLOCK = 256  # threads


# ----------------------------------------------------------------------------- the array
def kv_cache_bytes(L: int, R: int, G: int, S: int, D: int, dtype) -> int:
    """-> bytes of the array of empty_kv_cache"""
    return 2 * L * R * G * S * D * np.dtype(dtype).itemsize


def empty_kv_cache(like: Array, L: int, R: int, G: int, S: int, D: int, dtype) -> Array:
    """-> kv (L, 2, R, G, S, D), zeros, on the device of `like`.

    dtype: float32 or bfloat16. Raises ValueError if a size is not positive or the dtype is another.
    """
    sizes = dict(layers=L, rows=R, heads=G, positions=S, channels=D)
    for name, n in sizes.items():
        check(n > 0, f"kv cache: {n} {name}, expected at least one")
    check(np.dtype(dtype).name in FLOATS, f"kv cache: {np.dtype(dtype)}, expected float32 or bf16")
    return zeros(like, (L, 2, R, G, S, D), dtype)


# ----------------------------------------------------------------------------- references
def append_kv_ref(k_RGSD, v_RGSD, k_NGD, v_NGD, rows_N, positions_N):
    """append_kv in NumPy, in place."""
    R, _, S, _ = k_RGSD.shape
    keep_N = (rows_N >= 0) & (rows_N < R) & (positions_N >= 0) & (positions_N < S)
    rows, positions = rows_N[keep_N], positions_N[keep_N]
    k_RGSD[rows, :, positions] = k_NGD[keep_N]
    v_RGSD[rows, :, positions] = v_NGD[keep_N]


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def append_kv_naive_kernel(k_RGSD, v_RGSD, k_NGD, v_NGD, rows_N, positions_N):
    """Grid (N, G), block BLOCK. A block copies one head of one token, each thread one element at a time. float32."""
    n, g = cuda.blockIdx.x, cuda.blockIdx.y
    row, p, D = rows_N[n], positions_N[n], k_NGD.shape[2]
    if row >= 0 and row < k_RGSD.shape[0] and p >= 0 and p < k_RGSD.shape[2]:
        for d in range(cuda.threadIdx.x, D, BLOCK):
            k_RGSD[row, g, p, d] = k_NGD[n, g, d]
            v_RGSD[row, g, p, d] = v_NGD[n, g, d]


@functools.cache
def make_append_kernel(G, D, each, aligned):
    """-> the kernel. each: contiguous elements per thread, 16 bytes. aligned: heads begin at multiples of 16 bytes"""
    CHUNKS = -(-D // each)  # of a head

    @kernel(BLOCK)
    def append_kv_kernel(k_cache, v_cache, k, v, rows_N, positions_N, N, R, S, k_row, v_row):
        """Grid ceil(N G CHUNKS / BLOCK), block BLOCK. All arrays flat; k_row, v_row: elements between tokens of k, v."""
        i = uint32(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x)
        head, d = i // uint32(CHUNKS), int64(i % uint32(CHUNKS)) * each
        n, g = int64(head // uint32(G)), int64(head % uint32(G))
        if n >= N:
            return
        row, p = int64(rows_N[n]), int64(positions_N[n])
        if row < 0 or row >= R or p < 0 or p >= S:
            return
        to = ((row * G + g) * S + p) * D + d
        at_k, at_v = n * k_row + g * D + d, n * v_row + g * D + d
        if aligned:
            words, more = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
            if each == 8:
                load_words8(words, k, at_k)
                load_words8(more, v, at_v)
                store_words8(k_cache, to, words)
                store_words8(v_cache, to, more)
            else:
                load_words4(words, k, at_k)
                load_words4(more, v, at_v)
                store_words4(k_cache, to, words)
                store_words4(v_cache, to, more)
        else:
            for j in range(each):
                if d + j < D:
                    store1(k_cache, to + j, load1(k, at_k + j))
                    store1(v_cache, to + j, load1(v, at_v + j))

    return append_kv_kernel


# ----------------------------------------------------------------------------- launchers
def append_kv(
    k_RGSD: Array, v_RGSD: Array, k_NGD: Array, v_NGD: Array, rows_N: Array, positions_N: Array
) -> None:
    """Write keys and values of N tokens to the cache, token n at position positions_N[n] of row rows_N[n].

    Caches (R, G, S, D) and new keys and values (N, G, D): all float32 or all bf16; the new ones may be slices of packed arrays.
    rows, positions (N,): int32. A token whose row is not in 0 .. R - 1, or whose position is not in 0 .. S - 1, is skipped. Two
    tokens must not have the same row and position. Raises ValueError or TypeError if shapes or dtypes do not match.
    """
    R, G, S, D = check_cache("append_kv", k_RGSD, v_RGSD)
    N, dtypes = k_NGD.shape[0], (k_RGSD.dtype.name,)
    for name, x in (("k", k_NGD), ("v", v_NGD)):
        check_array("append_kv", name, x, (N, G, D), dtypes, strided=True)
    check_int32("append_kv", "rows", rows_N, N)
    check_int32("append_kv", "positions", positions_N, N)
    arrays = (k_RGSD, v_RGSD, k_NGD, v_NGD)
    if on_host(*arrays, rows_N, positions_N):
        return append_kv_ref(*arrays, rows_N, positions_N)
    copied = [x if row_step(x) is not None else x.copy() for x in arrays]
    flat, steps = [flat_rows(x) for x in copied], [row_step(x) for x in copied[2:]]
    each = 16 // k_RGSD.itemsize
    aligned = all(n % each == 0 for n in (D, *steps)) and on_16_bytes(*flat)
    append_kernel = make_append_kernel(G, D, each, aligned)
    grid = -(-N * G * -(-D // each) // BLOCK)
    launch(append_kernel, grid, BLOCK, *flat, rows_N, positions_N, N, R, S, *steps)


# ----------------------------------------------------------------------------- checks that the kernels of a cache share
def check_cache(op: str, k_RGSD: Array, v_RGSD: Array) -> tuple[int, int, int, int]:
    """-> R, G, S, D. Raises ValueError or TypeError if these are not the keys and values of one layer."""
    check_array(op, "k cache", k_RGSD, (None,) * 4, FLOATS)
    check_array(op, "v cache", v_RGSD, k_RGSD.shape, (k_RGSD.dtype.name,))
    check(k_RGSD.size > 0, f"{op}: a cache of shape {tuple(k_RGSD.shape)} is empty")
    return k_RGSD.shape


def check_int32(op: str, name: str, x: Array, n: int) -> None:
    """Raise ValueError or TypeError if x is not an int32 array of shape (n,)."""
    check(x.shape == (n,), f"{op}: {name} has shape {tuple(x.shape)}, expected ({n},)")
    if x.dtype != np.int32:
        raise TypeError(f"{op}: {name} is {x.dtype}, expected int32")
