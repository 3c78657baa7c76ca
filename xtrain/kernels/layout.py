"""Swap the two middle axes of four: (B, T, H, D) <-> (B, H, T, D), with one kernel.

    forward    y[b, j, i, d] = x[b, i, j, d]
    backward   the same op on dy: the swap is its own inverse

Matrix products over heads need the rows of one head to be contiguous; everything else keeps BTHD,
where splitting heads is a view. Rows of D numbers are moved as a unit, so reads and writes are both
coalesced.
Bytes moved: read x, write y. The numbers are float32 or bf16; their bits are copied.
"""

import functools

import numpy as np

from ..device import Array
from .primitives.flat import flat_rows, on_16_bytes, row_step
from .primitives.ptx import kernel
from .primitives.words import WORD_OPS, elements_per_vector
from .runtime.compiler import cuda, int64, uint32
from .runtime.launch import FLOATS, check, check_array, dtype_name, empty, launch, on_host

WARPS = 8  # of the plain kernel: rows of D numbers per block, one warp each
MAX_GRID_Y = 65535  # the hardware's limit
BLOCK = 256  # of the kernel in use: one thread per 16 bytes


# ----------------------------------------------------------------------------- reference
def swap_heads_ref(x_BXYD, out_BYXD=None):
    """Return y (B, Y, X, D): a copy, or out, which is overwritten."""
    if out_BYXD is None:
        return np.swapaxes(x_BXYD, 1, 2).copy()
    out_BYXD[...] = np.swapaxes(x_BXYD, 1, 2)
    return out_BYXD


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def swap_heads_plain_kernel(y_BYXD, x_BXYD):
    """Grid (B X, ceil(Y / WARPS)), block (32, WARPS).

    A warp copies row (b, i, j) of D numbers, for any D.
    """
    row = int64(cuda.blockIdx.x)
    lane = cuda.threadIdx.x
    _, X, Y, D = x_BXYD.shape
    b = row // X
    i = row % X
    j = cuda.blockIdx.y * WARPS + cuda.threadIdx.y
    if j < Y:
        for d in range(lane, D, 32):
            y_BYXD[b, j, i, d] = x_BXYD[b, i, j, d]


@functools.cache
def make_swap_kernel(D, vec):
    """Return the kernel in use: 16 bytes, `vec` numbers, at a time.

    D is a constant, so that dividing by it is cheap.
    """
    CHUNKS = D // vec  # of a row
    load_words = WORD_OPS[vec].load
    store_words = WORD_OPS[vec].store

    @kernel(BLOCK)
    def swap_heads_kernel(y, x, X, Y, x_row, y_row, chunks):
        """Grid ceil(chunks / BLOCK), block BLOCK. A thread copies one chunk of x.

        x, y: flat. x_row, y_row: distance in elements between consecutive indices of axis 1.
        """
        k = uint32(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x)
        if k < chunks:
            words = cuda.local.array(4, uint32)
            # row (b, i, j) of x
            row = k // uint32(CHUNKS)
            chunk = k % uint32(CHUNKS)
            bi = row // uint32(Y)
            j = row % uint32(Y)
            b = bi // uint32(X)
            i = bi % uint32(X)
            load_words(words, x, int64(bi) * x_row + j * D + chunk * vec)
            store_words(y, (int64(b) * Y + j) * y_row + i * D + chunk * vec, words)

    return swap_heads_kernel


# ----------------------------------------------------------------------------- launcher
def swap_heads(x_BXYD: Array, out_BYXD: Array | None = None) -> Array:
    """Return y (B, Y, X, D) for x (B, X, Y, D), float32 or bf16; never a view of x.

    Both may be slices of packed arrays.
    out: the array for y, which is then returned; None: a new contiguous array.
    """
    check_array("swap_heads", "x", x_BXYD, (None,) * 4, FLOATS, strided=True)
    B, X, Y, D = x_BXYD.shape
    shape = (B, Y, X, D)
    if out_BYXD is not None:
        check_array("swap_heads", "out", out_BYXD, shape, (dtype_name(x_BXYD.dtype),), strided=True)
    if on_host(x_BXYD, x_BXYD if out_BYXD is None else out_BYXD):
        return swap_heads_ref(x_BXYD, out_BYXD)
    y_BYXD = empty(x_BXYD, shape) if out_BYXD is None else out_BYXD
    vec = elements_per_vector(x_BXYD)
    steps = (row_step(x_BXYD), row_step(y_BYXD))
    vectorized = D % vec == 0 and all(step is not None and step % vec == 0 for step in steps)
    if vectorized and on_16_bytes(x_BXYD, y_BYXD) and 0 < x_BXYD.size < 2**31 * vec:
        chunks = x_BXYD.size // vec
        y = flat_rows(y_BYXD)
        x = flat_rows(x_BXYD)
        swap_kernel = make_swap_kernel(D, vec)
        launch(swap_kernel, -(-chunks // BLOCK), BLOCK, y, x, X, Y, *steps, chunks)
    else:
        tiles = -(-Y // WARPS)
        check(
            tiles <= MAX_GRID_Y, f"swap_heads: axis 2 of {x_BXYD.shape} is too long for one launch"
        )
        launch(swap_heads_plain_kernel, (B * X, tiles), (32, WARPS), y_BYXD, x_BXYD)
    return y_BYXD
