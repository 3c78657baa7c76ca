"""A row of C columns held in registers, read and written 16 bytes at a time.

    chunk        8 neighbouring columns: one 16-byte access in bf16, two in float32
    W warps      share a row: one up to C = 1024 (then a shuffle adds up the row), more beyond (then a barrier)
    STEPS        chunks per thread, at most 4: 32 registers. Thread t of a row owns chunks t, t + 32 W, ...
    R rows       per block, so that a block has at least 4 warps

    columns      0..7   8..15  ...  248..255 | 256..263 ...        (W = 1)
    thread         0      1            31    |     0

A width that is no multiple of 8 would misalign every second row, so its chunks are read element by element: slower, and
right. C is known when a kernel is compiled, so all loops over a row are unrolled and its columns stay in registers.
"""

from types import SimpleNamespace

from numba import cuda, float32

from ._ptx import device, load1, load8, store1, store8
from ._reduce import MAX_WARPS, block_sum, warp_sum

COLUMNS = 8  # of a chunk
MAX_STEPS = 4
MIN_WARPS = 4  # per block


def row_plan(C: int) -> SimpleNamespace:
    """How threads share a row of C columns: see the file's docstring. Raises ValueError above 32768 columns."""
    chunks = -(-C // COLUMNS)
    W = -(-chunks // (32 * MAX_STEPS))
    if W > MAX_WARPS:
        raise ValueError(
            f"rows of {C} columns are too wide: {MAX_WARPS * 32 * MAX_STEPS * COLUMNS} at most"
        )
    R = -(-MIN_WARPS // W) if W == 1 else 1
    return SimpleNamespace(W=W, STEPS=-(-chunks // (32 * W)), R=R, THREADS=32 * W * R)


def make_row_ops(C: int) -> SimpleNamespace:
    """-> the plan and four device functions for rows of C columns:

    load(registers, x, first, c)    registers[0:8] = x[first + c : + 8] as float32; zeros beyond column C
    store(x, first, c, registers)   the other way; nothing is written beyond column C
    total(v, partial)               sum of v over the threads of one row, in each of them
    place()                         -> (row within the block, first column of this thread)
    """
    plan = row_plan(C)
    W, ALIGNED = plan.W, C % COLUMNS == 0

    @device
    def load(registers, x, first, c):
        if ALIGNED and c < C:
            load8(registers, x, first + c)
        else:
            for j in range(COLUMNS):
                registers[j] = load1(x, first + c + j) if c + j < C else float32(0.0)

    @device
    def store(x, first, c, registers):
        if ALIGNED:
            if c < C:
                store8(x, first + c, registers)
        else:
            for j in range(COLUMNS):
                if c + j < C:
                    store1(x, first + c + j, registers[j])

    @device
    def total(v, partial):
        if W == 1:
            return warp_sum(v)
        return block_sum(v, partial)

    @device
    def place():
        tid = cuda.threadIdx.x
        return tid // (32 * W), tid % (32 * W) * COLUMNS

    return SimpleNamespace(
        **vars(plan), load=load, store=store, total=total, place=place, STRIDE=32 * W * COLUMNS
    )
