"""A run of n elements, 8 neighbours per thread, read and written 16 bytes at a time.

An element-wise kernel does not care about shape: a contiguous array of any shape is one run. A memory-bound kernel is
fast when enough bytes are under way at once, so a thread asks for 8 elements (one 16-byte access in bf16, two in
float32), STEPS times, before it computes anything.

    chunk     8 neighbouring elements
    tile      what a block owns: STEPS x BLOCK chunks. Thread t owns chunks t, t + BLOCK, ... of it

    elements  0..7   8..15  ...  2040..2047 | 2048..2055 ...
    thread      0      1            255     |     0

A 16-byte access needs an address that is a multiple of 16. An array that begins elsewhere (a slice of the arena, a row
of odd width) and the last few elements of a run are read and written one by one: slower, and right.
"""

from numba import cuda, float32, int64, uint32

from ..device import Array
from ._launch import launch
from ._ptx import device, load1, load8, store1, store8

BLOCK = 256
EACH = 8  # elements of a chunk
STEPS = 2  # chunks of a thread: at copy speed 25 KB per multiprocessor must be under way, all the time
STRIDE = BLOCK * EACH  # between the chunks of a thread
TILE = STEPS * STRIDE


# ----------------------------------------------------------------------------- in a kernel
@device
def first_element():
    """Of this thread's first chunk."""
    return int64(cuda.blockIdx.x) * TILE + cuda.threadIdx.x * EACH


@device
def load(registers, x, i, end, aligned):
    """registers[0:8] = x[i : i + 8] as float32, zeros from `end` on. aligned: x[i] lies on 16 bytes."""
    if aligned and i + EACH <= end:
        load8(registers, x, i)
    else:
        for j in range(EACH):
            registers[j] = load1(x, i + j) if i + j < end else float32(0.0)


@device
def store(x, i, end, registers, aligned):
    """x[i : i + 8] = registers[0:8]; nothing is written from `end` on."""
    if aligned and i + EACH <= end:
        store8(x, i, registers)
    else:
        for j in range(EACH):
            if i + j < end:
                store1(x, i + j, registers[j])


def make_place(C: int):
    """-> place(), the row and the first column of this thread's chunk when the rows of a matrix are C wide.

    Every row begins with a new chunk, so a thread never sees two rows. C is a constant of the kernel: a division by it
    is a multiplication.
    """
    CHUNKS = -(-C // EACH)

    @device
    def place():
        k = uint32(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x)
        n = k // uint32(CHUNKS)
        return int64(n), int64(k - n * uint32(CHUNKS)) * EACH

    return place


# ----------------------------------------------------------------------------- in a launcher
def on_16_bytes(*arrays: Array) -> bool:
    """Do all arrays begin at an address that is a multiple of 16?"""
    return all(_address(a) % 16 == 0 for a in arrays)


def _address(a):
    return a.ctypes.data if hasattr(a, "ctypes") else a.data.ptr


def launch_flat(kernel, *arrays: Array, others: tuple = ()) -> None:
    """kernel(runs of n elements..., others..., aligned) on ceil(n / TILE) blocks. Contiguous arrays: these are views."""
    runs = [a.reshape(-1) for a in arrays]
    launch(kernel, -(-runs[0].size // TILE), BLOCK, *runs, *others, on_16_bytes(*runs))


def chunks_of_rows(N: int, C: int) -> int:
    """The grid for N rows in chunks as make_place numbers them."""
    return -(-N * -(-C // EACH) // BLOCK)
