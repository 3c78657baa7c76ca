"""The memory of a decoder: keys and values of all tokens so far, in one preallocated array.

    kv_L2RGSD    layer, key or value, row, key head, position, channel      S: capacity of a row, in tokens
    k_RGSD = kv_L2RGSD[l, 0],  v_RGSD = kv_L2RGSD[l, 1]                     what the kernels of layer l get

A row belongs to one sequence at a time. Which layout? A decode step writes one position of every (row, head) and reads
all of them, so reading decides: the block that deals with one key head of one row walks through S D neighbouring
elements, whole 128-byte lines of memory pages that it has open already. With positions outside heads (RSGD, as the
training kernels have it) it would read D elements and jump over the other heads'; appending would be one run instead
of G, but that is one position of thousands.

    append     k[row, g, position] = new k of a token, v likewise; tokens may belong to any rows, in any order
    repeat_kv  the lesson's first version of grouped-query attention: every head copied for each of its queries.
               The attention kernels never do that; they read a head once for all of its queries.

Bytes moved by append: read and write 2 N G D elements.
"""

import functools

import numpy as np
from numba import cuda, int64, uint32

from ...device import Array
from ..primitives.flat import flat_rows, on_16_bytes, row_step
from ..primitives.ptx import kernel, load1, store1
from ..primitives.words import load_words4, load_words8, store_words4, store_words8
from ..runtime.launch import FLOATS, check, check_array, empty, launch, on_host, zeros

BLOCK = 256  # threads


# ----------------------------------------------------------------------------- the array
def kv_cache_bytes(L: int, R: int, G: int, S: int, D: int, dtype) -> int:
    """Exactly what empty_kv_cache takes."""
    return 2 * L * R * G * S * D * np.dtype(dtype).itemsize


def empty_kv_cache(like: Array, L: int, R: int, G: int, S: int, D: int, dtype) -> Array:
    """-> kv (L, 2, R, G, S, D), zeros, where `like` lives. dtype: float32 or bfloat16. ValueError for no space at all."""
    sizes = dict(layers=L, rows=R, heads=G, positions=S, channels=D)
    for name, n in sizes.items():
        check(n > 0, f"kv cache: {n} {name}, expected at least one")
    check(np.dtype(dtype).name in FLOATS, f"kv cache: {np.dtype(dtype)}, expected float32 or bf16")
    return zeros(like, (L, 2, R, G, S, D), dtype)


# ----------------------------------------------------------------------------- references
def append_kv_ref(k_RGSD, v_RGSD, k_NGD, v_NGD, rows_N, positions_N):
    """In place. Tokens without a row, or beyond the capacity, are left out."""
    R, _, S, _ = k_RGSD.shape
    keep_N = (rows_N >= 0) & (rows_N < R) & (positions_N >= 0) & (positions_N < S)
    rows, positions = rows_N[keep_N], positions_N[keep_N]
    k_RGSD[rows, :, positions] = k_NGD[keep_N]
    v_RGSD[rows, :, positions] = v_NGD[keep_N]


def repeat_kv_ref(x_RGSD, repeats):
    """-> (R, G repeats, S, D): heads 0, 0, ..., 1, 1, ..."""
    return np.repeat(x_RGSD, repeats, axis=1)


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def append_kv_naive_kernel(k_RGSD, v_RGSD, k_NGD, v_NGD, rows_N, positions_N):
    """Grid (N, G), block BLOCK. A block copies one head of one token, a thread an element. float32."""
    n, g = cuda.blockIdx.x, cuda.blockIdx.y
    row, p, D = rows_N[n], positions_N[n], k_NGD.shape[2]
    if row >= 0 and row < k_RGSD.shape[0] and p >= 0 and p < k_RGSD.shape[2]:
        for d in range(cuda.threadIdx.x, D, BLOCK):
            k_RGSD[row, g, p, d] = k_NGD[n, g, d]
            v_RGSD[row, g, p, d] = v_NGD[n, g, d]


@functools.cache
def make_append_kernel(G, D, each, aligned):
    """`each` neighbouring elements per thread, 16 bytes of them. aligned: heads begin at a multiple of 16 bytes."""
    CHUNKS = -(-D // each)  # of a head

    @kernel(BLOCK)
    def append_kv_kernel(k_cache, v_cache, k, v, rows_N, positions_N, N, R, S, k_row, v_row):
        """Grid ceil(N G CHUNKS / BLOCK), block BLOCK. All arrays flat; k_row, v_row: elements from one token to the next."""
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


@cuda.jit
def repeat_kv_kernel(y, x, repeats, head):
    """Grid (ceil(head / BLOCK), R G repeats), block BLOCK. x, y: flat; head: S D elements. Copies x's head i // repeats."""
    i = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
    to = int64(cuda.blockIdx.y)
    if i < head:
        store1(y, to * head + i, load1(x, to // repeats * head + i))


# ----------------------------------------------------------------------------- launchers
def append_kv(
    k_RGSD: Array, v_RGSD: Array, k_NGD: Array, v_NGD: Array, rows_N: Array, positions_N: Array
) -> None:
    """Writes keys and values of N tokens into the cache, token n at position positions_N[n] of row rows_N[n] (int32).

    All four float32 or all bf16; k and v may be parts of packed arrays. A token whose row is not in 0 .. R - 1, or whose
    position is not in 0 .. S - 1, is left out. No two tokens may have the same place.
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
    arrays = [x if row_step(x) is not None else x.copy() for x in arrays]
    flat, each, steps = (
        [flat_rows(x) for x in arrays],
        16 // k_RGSD.itemsize,
        [row_step(x) for x in arrays[2:]],
    )
    whole = all(n % each == 0 for n in (D, *steps))
    append_kernel = make_append_kernel(G, D, each, whole and on_16_bytes(*flat))
    grid = -(-N * G * -(-D // each) // BLOCK)
    launch(append_kernel, grid, BLOCK, *flat, rows_N, positions_N, N, R, S, *steps)


def repeat_kv(x_RGSD: Array, repeats: int) -> Array:
    """x (R, G, S, D) float32 or bf16 -> (R, G repeats, S, D), each head `repeats` times in a row."""
    check_array("repeat_kv", "x", x_RGSD, (None,) * 4, FLOATS)
    check(repeats > 0, f"repeat_kv: {repeats} repeats, expected at least one")
    R, G, S, D = x_RGSD.shape
    check(R * G * repeats < 2**16, f"repeat_kv: {R * G * repeats} heads, at most 65535")
    if on_host(x_RGSD):
        return repeat_kv_ref(x_RGSD, repeats)
    y = empty(x_RGSD, (R, G * repeats, S, D))
    grid = (-(-S * D // BLOCK), R * G * repeats)
    launch(repeat_kv_kernel, grid, BLOCK, y.reshape(-1), x_RGSD.reshape(-1), repeats, S * D)
    return y


# ----------------------------------------------------------------------------- checks that its readers share
def check_cache(op: str, k_RGSD: Array, v_RGSD: Array) -> tuple[int, int, int, int]:
    """-> R, G, S, D. Raises ValueError or TypeError when these are not the two halves of a layer."""
    check_array(op, "k cache", k_RGSD, (None,) * 4, FLOATS)
    check_array(op, "v cache", v_RGSD, k_RGSD.shape, (k_RGSD.dtype.name,))
    check(k_RGSD.size > 0, f"{op}: a cache of shape {tuple(k_RGSD.shape)} holds nothing")
    return k_RGSD.shape


def check_int32(op: str, name: str, x: Array, n: int) -> None:
    check(x.shape == (n,), f"{op}: {name} has shape {tuple(x.shape)}, expected ({n},)")
    if x.dtype != np.int32:
        raise TypeError(f"{op}: {name} is {x.dtype}, expected int32")
