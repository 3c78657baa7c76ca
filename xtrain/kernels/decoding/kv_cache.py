"""The memory of a decoder: keys and values of all tokens so far, in one preallocated array, paged
(Kwon et al. 2023).

    kv_L2RGSD    layer, key or value, block, key head, offset, channel
                 S: tokens of a block, a multiple of 16
    k_RGSD = kv_L2RGSD[l, 0],  v_RGSD = kv_L2RGSD[l, 1]   what the kernels of layer l read and write
    tables_AM    int32: position p of sequence a is in block tables[a, p // S], at offset p % S

A sequence owns as many blocks as its tokens need, wherever they are: only its last block is partly
unused, where an array with a row of full length per sequence would mostly be empty. Sequences with
a common prefix share its full blocks; a block that is being written belongs to one sequence. M S
tokens fit into a table of M blocks.

    S = 4      sequence 0, 6 tokens     p0 p1 p2 p3 | p4 p5 .  .       tables[0] = 5 2 -
               sequence 1, 9 tokens     p0 p1 p2 p3 | p4 ... p7 | p8   tables[1] = 5 0 3
               the first 4 tokens are the same

Inside a block the layout favours reads, because a decoding step writes one position of every
(sequence, head) and reads all of
them: the thread block of one key head reads runs of S D contiguous elements, whole 128-byte lines.
With positions before heads (as the training kernels have it) it would read D elements and skip the
other heads'. An append would then be one run instead of G, but it touches one position in
thousands. A table costs 4 bytes per S keys: reading it takes no bandwidth, and the kernels of
attention read the entry of the next keys while they compute on these, so it takes no time either.

    append     k[block, g, offset] = new k of a token, v likewise; tokens may belong to any blocks

Bytes moved by append: read and write 2 N G D elements.
"""

import functools
from typing import NamedTuple

import numpy as np

from ...device import Array
from ..primitives.flat import flat_rows, on_16_bytes, row_step
from ..primitives.ptx import device, kernel, load1, store1
from ..primitives.words import load_words4, load_words8, store_words4, store_words8
from ..runtime.compiler import cuda, int64, uint32
from ..runtime.launch import FLOATS, check, check_array, dtype_name, launch, on_host, zeros

BLOCK = 256  # threads


# ----------------------------------------------------------------------------- the array
def kv_cache_bytes(L: int, R: int, G: int, S: int, D: int, dtype) -> int:
    """Return bytes of the array of empty_kv_cache"""
    return 2 * L * R * G * S * D * np.dtype(dtype).itemsize


def empty_kv_cache(like: Array, L: int, R: int, G: int, S: int, D: int, dtype) -> Array:
    """Return kv (L, 2, R, G, S, D), zeros, on the device of `like`.

    dtype: float32 or bfloat16. Raises ValueError if a size is not positive or the dtype is another.
    """
    sizes = dict(layers=L, blocks=R, heads=G, positions=S, channels=D)
    for name, n in sizes.items():
        check(n > 0, f"kv cache: {n} {name}, expected at least one")
    check(np.dtype(dtype).name in FLOATS, f"kv cache: {np.dtype(dtype)}, expected float32 or bf16")
    return zeros(like, (L, 2, R, G, S, D), dtype)


# ----------------------------------------------------------------------------- references
def append_kv_ref(k_RGSD, v_RGSD, k_NGD, v_NGD, blocks_N, offsets_N):
    """append_kv in NumPy, in place."""
    R, _, S, _ = k_RGSD.shape
    keep_N = (blocks_N >= 0) & (blocks_N < R) & (offsets_N >= 0) & (offsets_N < S)
    blocks, offsets = blocks_N[keep_N], offsets_N[keep_N]
    k_RGSD[blocks, :, offsets] = k_NGD[keep_N]
    v_RGSD[blocks, :, offsets] = v_NGD[keep_N]


def gather_sequence_ref(x_RGSD, table_M, n: int):
    """Return (G, n, D): the first n positions of a sequence, in NumPy. table: its blocks"""
    G, S, D = x_RGSD.shape[1:]
    return x_RGSD[table_M[: -(-n // S)]].swapaxes(0, 1).reshape(G, -1, D)[:, :n]


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def append_kv_naive_kernel(k_RGSD, v_RGSD, k_NGD, v_NGD, blocks_N, offsets_N):
    """Grid (N, G), block BLOCK. A block copies one head of one token, each thread one element at a
    time. float32."""
    n, g = cuda.blockIdx.x, cuda.blockIdx.y
    block = blocks_N[n]
    p = offsets_N[n]
    D = k_NGD.shape[2]
    if block >= 0 and block < k_RGSD.shape[0] and p >= 0 and p < k_RGSD.shape[2]:
        for d in range(cuda.threadIdx.x, D, BLOCK):
            k_RGSD[block, g, p, d] = k_NGD[n, g, d]
            v_RGSD[block, g, p, d] = v_NGD[n, g, d]


class Pages(NamedTuple):
    """Where the keys of a sequence and a key head are."""

    tables: Array  # block tables of all sequences, flat
    first: int  # where the sequence's table begins
    blocks: int  # R
    stride: int  # elements of a block
    head: int  # offset of the key head in a block, g S D


@functools.cache
def make_block_table(S, D):
    """Return entry_of, start_of: how a kernel finds the keys of a position.

    entry_of(pages, p)            the entry of the sequence's table for position p
    start_of(entry, p, pages)     the index of the first element of position p in a flat cache
    All but that index is computed in 32 bits. A caller asks for the entry early, since it arrives
    late, and for the start when it needs it. For an entry that is not in 0 .. R - 1 the start lies
    in the last block, so nothing is read out of bounds; the caller compares entry with R, as
    uint32.
    """

    @device
    def entry_of(pages, p):
        return uint32(pages.tables[uint32(uint32(pages.first) + uint32(p) // uint32(S))])

    @device
    def start_of(entry, p, pages):
        last = uint32(uint32(pages.blocks) - uint32(1))
        block = min(entry, last)
        within = uint32(uint32(pages.head) + uint32(uint32(p) % uint32(S)) * uint32(D))
        return int64(block) * int64(uint32(pages.stride)) + int64(within)

    return entry_of, start_of


@functools.cache
def make_append_kernel(G, D, each, aligned):
    """Return the kernel. each: contiguous elements per thread, 16 bytes. aligned: heads begin at
    multiples of 16 bytes"""
    CHUNKS = -(-D // each)  # of a head

    @kernel(BLOCK)
    def append_kv_kernel(k_cache, v_cache, k, v, blocks_N, offsets_N, N, R, S, k_row, v_row):
        """Grid ceil(N G CHUNKS / BLOCK), block BLOCK. All arrays flat; k_row, v_row: elements
        between tokens of k, v."""
        i = uint32(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x)
        head = i // uint32(CHUNKS)
        d = int64(i % uint32(CHUNKS)) * each
        n = int64(head // uint32(G))
        g = int64(head % uint32(G))
        if n >= N:
            return
        block = int64(blocks_N[n])
        p = int64(offsets_N[n])
        if block < 0 or block >= R or p < 0 or p >= S:
            return
        to = ((block * G + g) * S + p) * D + d
        at_k, at_v = n * k_row + g * D + d, n * v_row + g * D + d
        if aligned:
            words = cuda.local.array(4, uint32)
            v_words = cuda.local.array(4, uint32)
            if each == 8:
                load_words8(words, k, at_k)
                load_words8(v_words, v, at_v)
                store_words8(k_cache, to, words)
                store_words8(v_cache, to, v_words)
            else:
                load_words4(words, k, at_k)
                load_words4(v_words, v, at_v)
                store_words4(k_cache, to, words)
                store_words4(v_cache, to, v_words)
        else:
            for j in range(each):
                if d + j < D:
                    store1(k_cache, to + j, load1(k, at_k + j))
                    store1(v_cache, to + j, load1(v, at_v + j))

    return append_kv_kernel


# ----------------------------------------------------------------------------- launchers
def append_kv(
    k_RGSD: Array, v_RGSD: Array, k_NGD: Array, v_NGD: Array, blocks_N: Array, offsets_N: Array
) -> None:
    """Write keys and values of N tokens to the cache, token n at offset offsets_N[n] of block
    blocks_N[n] (see padding.py).

    Caches (R, G, S, D) and new keys and values (N, G, D): all float32 or all bf16; the new ones may
    be slices of packed arrays. blocks, offsets (N,): int32. A token whose block is not in 0 .. R -
    1, or whose offset is not in 0 .. S - 1, is skipped. Two tokens must not have the same block and
    offset. Raises ValueError or TypeError if shapes or dtypes do not match.
    """
    R, G, S, D = check_cache("append_kv", k_RGSD, v_RGSD)
    N = k_NGD.shape[0]
    dtypes = (dtype_name(k_RGSD.dtype),)
    for name, x in (("k", k_NGD), ("v", v_NGD)):
        check_array("append_kv", name, x, (N, G, D), dtypes, strided=True)
    check_int32("append_kv", "blocks", blocks_N, N)
    check_int32("append_kv", "offsets", offsets_N, N)
    arrays = (k_RGSD, v_RGSD, k_NGD, v_NGD)
    if on_host(*arrays, blocks_N, offsets_N):
        return append_kv_ref(*arrays, blocks_N, offsets_N)
    copied = [x if row_step(x) is not None else x.copy() for x in arrays]
    flat = [flat_rows(x) for x in copied]
    steps = [row_step(x) for x in copied[2:]]
    each = 16 // k_RGSD.itemsize
    aligned = all(n % each == 0 for n in (D, *steps)) and on_16_bytes(*flat)
    append_kernel = make_append_kernel(G, D, each, aligned)
    grid = -(-N * G * -(-D // each) // BLOCK)
    launch(append_kernel, grid, BLOCK, *flat, blocks_N, offsets_N, N, R, S, *steps)


# --------------------------------------------------------- checks that the kernels of a cache share
def check_cache(op: str, k_RGSD: Array, v_RGSD: Array) -> tuple[int, int, int, int]:
    """Return R, G, S, D. Raises ValueError or TypeError if these are not the keys and values of one
    layer."""
    check_array(op, "k cache", k_RGSD, (None,) * 4, FLOATS)
    check_array(op, "v cache", v_RGSD, k_RGSD.shape, (dtype_name(k_RGSD.dtype),))
    check(k_RGSD.size > 0, f"{op}: a cache of shape {tuple(k_RGSD.shape)} is empty")
    return k_RGSD.shape


def check_int32(op: str, name: str, x: Array, n: int) -> None:
    """Raise ValueError or TypeError if x is not an int32 array of shape (n,)."""
    check(x.shape == (n,), f"{op}: {name} has shape {tuple(x.shape)}, expected ({n},)")
    if x.dtype != np.int32:
        raise TypeError(f"{op}: {name} is {x.dtype}, expected int32")


def check_block_tables(op: str, tables_AM: Array, A: int, S: int) -> int:
    """Raise ValueError or TypeError if these are not the tables of A sequences, of blocks of S
    tokens -> tokens of a table."""
    check_array(op, "tables", tables_AM, (A, None), ("int32",))
    M = tables_AM.shape[1]
    fits = M > 0 and S > 0 and max(A * M, M * S) < 2**31
    check(
        fits,
        f"{op}: {A} tables of {M} blocks of {S} tokens: "
        f"expected 1 to {2**31 - 1} entries and tokens",
    )
    return M * S


def check_block_size(op: str, R: int, G: int, S: int, D: int) -> None:
    """Raise ValueError if the GPU kernels of attention do not support blocks of G S D elements."""
    check(S % 16 == 0, f"{op}: blocks of {S} tokens, the GPU kernels need a multiple of 16")
    fits = R < 2**31 and G * S * D < 2**31
    check(fits, f"{op}: {R} blocks of {G * S * D} elements, at most {2**31 - 1} of each")


def check_blocks(op: str, tables_AM: np.ndarray, lengths_A: np.ndarray, R: int, S: int) -> None:
    """Raise ValueError if one of the blocks that hold lengths_A[a] tokens of sequence a is not in 0
    .. R - 1.

    Only for arrays on the host: reading the values from a GPU would wait for it.
    """
    needed = np.arange(tables_AM.shape[1]) * S < lengths_A[:, None]
    blocks = tables_AM[needed]
    wrong = blocks[(blocks < 0) | (blocks >= R)]
    check(not wrong.size, f"{op}: a table names block {wrong[:1].sum()}, the cache has {R} blocks")
