"""Vectorized access to n contiguous elements, or to the rows of a matrix.

A thread owns 8 elements and moves them in two 16-byte accesses. An element-wise kernel does not
depend on the shape: a contiguous array is n elements, whatever its shape. Three units make such a
kernel as fast as a copy:

    quad     4 neighbouring elements: one access of 16 bytes in float32, of 8 in bf16. Neighbouring
             threads own neighbouring quads, so a warp writes whole 32-byte sectors. With two
             adjacent quads per thread each store would write half sectors: in float32 9 % (scale)
             to 21 % (silu) slower on an H200 at N = 32768, C = 768.
    chunk    what a thread holds in 8 registers: two quads, `gap` elements apart
    tile     what a block owns: STEPS chunks per thread, all loaded before the first computation.
             About 25 KB per multiprocessor must be in flight at any time.

    elements   0..3  4..7  ...  1020..1023 | 1024..1027  ...                 (gap = 1024)
    thread       0     1           255     |      0

A 16-byte access needs an address that is a multiple of 16. An array with another start address (a
slice of the arena, a row of odd width), and the end of an array, are read and written element by
element, which is slower.
"""

import math

import numpy as np

from ...device import Array, address_of, cupy
from ...simulator import SimArray
from ..runtime.compiler import cuda, float32, int64, uint32
from ..runtime.launch import launch
from .ptx import device, load1, load4, store1, store4

BLOCK = 256
QUAD = 4
CHUNK = 2 * QUAD  # elements of a chunk
STEPS = 2  # chunks of a thread
GAP = BLOCK * QUAD  # between the quads of a chunk, where the array is not split into rows
STRIDE = BLOCK * CHUNK  # between the chunks of a thread
TILE = STEPS * STRIDE
SPAN = TILE - GAP + QUAD  # from a thread's first element to the end of its last


# ----------------------------------------------------------------------------- in a kernel
@device
def load(registers, x, i, gap, end, vectorized):
    """Set registers[0:8] to x[i : i + 4] and x[i + gap : i + gap + 4] as float32, 0 from `end` on.

    vectorized: both quads end before `end`, and x is 16-byte aligned. Pass a constant, so that the
    compiler removes the branch: a bf16 is widened in the branch that loads it, so loads in separate
    branches would wait for each other.
    """
    if vectorized:
        load4(registers[0:QUAD], x, i)
        load4(registers[QUAD:CHUNK], x, i + gap)
    else:
        for j in range(QUAD):
            registers[j] = load1(x, i + j) if i + j < end else float32(0.0)
        for j in range(QUAD):
            registers[QUAD + j] = load1(x, i + gap + j) if i + gap + j < end else float32(0.0)


@device
def store(x, i, gap, end, registers, vectorized):
    """Write registers[0:8] to x[i : i + 4] and x[i + gap : i + gap + 4], nothing from `end` on."""
    if vectorized:
        store4(x, i, registers[0:QUAD])
        store4(x, i + gap, registers[QUAD:CHUNK])
    else:
        for j in range(QUAD):
            if i + j < end:
                store1(x, i + j, registers[j])
        for j in range(QUAD):
            if i + gap + j < end:
                store1(x, i + gap + j, registers[QUAD + j])


@device
def position(i, gap, j):
    """Return the index of registers[j] of a chunk."""
    return i + j if j < QUAD else i + gap + (j - QUAD)


@device
def first_element():
    """Return the index of the first element of this thread's first chunk."""
    return int64(cuda.blockIdx.x) * TILE + cuda.threadIdx.x * QUAD


@device
def can_vectorize(first, n, aligned):
    """Return True if all chunks of this thread end before element n, and addresses are aligned."""
    return aligned and first + SPAN <= n


def make_row_and_column(C: int):
    """Return row_and_column(), gap, for rows of C columns.

    row_and_column() -> row and first column of this thread's chunk. The quads of a chunk are half a
    row apart, so a chunk lies in one row. C is a compile-time constant: the compiler replaces the
    division by a multiplication.
    """
    GAP = row_gap(C)
    CHUNKS = GAP // QUAD  # of a row

    @device
    def row_and_column():
        k = uint32(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x)
        n = k // uint32(CHUNKS)
        return int64(n), int64(k - n * uint32(CHUNKS)) * QUAD

    return row_and_column, GAP


# ----------------------------------------------------------------------------- in a launcher
def row_gap(C: int) -> int:
    """Return the elements between the two quads of a chunk: half a row, in whole quads."""
    return -(-C // CHUNK) * QUAD


def blocks_for_rows(N: int, C: int) -> int:
    """Return the number of blocks for N rows of C columns, numbered as in make_row_and_column."""
    return -(-N * row_gap(C) // (QUAD * BLOCK))


def on_16_bytes(*arrays: Array) -> bool:
    """Return True if the start address of every array is a multiple of 16."""
    return all(address_of(a) % 16 == 0 for a in arrays)


def same_place(a: Array, b: Array) -> bool:
    """Return True if a and b, which have the same shape, are views of the same elements."""
    return address_of(a) == address_of(b) and a.strides == b.strides


def row_step(x: Array) -> int | None:
    """Return the distance in elements between consecutive rows of x (..., X, D).

    A row is X D elements. None if the rows are not contiguous, not evenly spaced, or overlap. More
    than X D if x is a slice of the columns of a packed array.
    """
    *outer, X, D = x.shape
    if x.flags.c_contiguous:
        return X * D
    size = x.itemsize
    step = X * D * x.itemsize
    rows = 1
    if (D > 1 and x.strides[-1] != size) or (X > 1 and x.strides[-2] != D * size):
        return None
    for n, stride in zip(reversed(outer), reversed(x.strides[:-2])):
        if n > 1:
            if stride != rows * step and (rows > 1 or stride < step or stride % size):
                return None
            if rows == 1:
                step = stride
            rows *= n
    return step // size


def flat_rows(x: Array) -> Array:
    """Return a flat view of x, whose row_step is not None, from its first element to its last."""
    if x.flags.c_contiguous:
        return x.reshape(-1)
    *outer, X, D = x.shape
    length = (math.prod(outer) - 1) * row_step(x) + X * D
    shape_and_strides = (length,), (x.itemsize,)
    if isinstance(x, SimArray):
        return np.lib.stride_tricks.as_strided(x, *shape_and_strides, subok=True)
    return cupy().lib.stride_tricks.as_strided(x, *shape_and_strides)


def can_vectorize_rows(C: int, *arrays: Array) -> bool:
    """Return True if every chunk of rows of C columns is two whole, 16-byte aligned quads."""
    return C % CHUNK == 0 and on_16_bytes(*arrays)


def launch_flat(kernel, *arrays: Array, others: tuple = ()) -> None:
    """Launch kernel(arrays..., others..., aligned) on ceil(n / TILE) blocks.

    arrays: contiguous, n elements each; the kernel gets flat views. others: scalars and small
    arrays.
    """
    runs = [a.reshape(-1) for a in arrays]
    launch(kernel, -(-runs[0].size // TILE), BLOCK, *runs, *others, on_16_bytes(*runs))
