"""A row of C columns held in registers, read and written 16 bytes at a time.

    chunk        vec neighbouring columns: 8 if all arrays are bf16, else 4 (see words.py)
    W warps      share a row: one up to C = 1024 (shuffles sum the row), more beyond (which takes a barrier)
    STEPS        chunks per thread, 32 columns at most. Thread t of a row owns chunks t, t + 32 W, ...
    R rows       per block, so that a block has enough warps

    columns      0..7   8..15  ...  248..255 | 256..263 ...        (bf16, W = 1)
    thread         0     1            31    |     0

A width that is not a multiple of vec misaligns rows, so their chunks are read element by element,
which is slower.
C is a compile-time constant, so all loops over a row are unrolled and its columns stay in
registers.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from ...device import Array
from ..runtime.compiler import cuda, float32, uint32
from .flat import on_16_bytes
from .ptx import device, load1, load4, load8, store1, store4, store8
from .reduce import MAX_WARPS, block_sum, warp_sum
from .words import (
    elements_per_vector,
    load_words4,
    load_words8,
    pack4,
    pack8,
    store_words4_shared,
    unpack4,
    unpack8,
)

MAX_COLUMNS = 32  # of a thread
MIN_WARPS = 4  # per block


@dataclass(frozen=True)
class RowPlan:
    """How threads share a row, see the file's docstring."""

    W: int  # warps per row
    STEPS: int  # chunks per thread
    R: int  # rows per block
    THREADS: int  # per block


@dataclass(frozen=True)
class RowOps(RowPlan):
    """The plan of make_row_ops and its device functions. E = vec.

    A thread's columns of a row begin at column c.
    """

    STRIDE: int  # columns between two chunks of a thread
    # (registers, x, first, c): registers[0:E] = x[first + c : + E] as float32; zeros beyond column
    # C
    load: Callable
    # (x, first, c, registers): the reverse of load; nothing is written beyond column C
    store: Callable
    # (words, x, first, c): load as up to E packed words (words.py), to be unpacked later
    load_words: Callable
    unpack: Callable  # (registers, words, x): words -> float32, by the dtype of x
    total: Callable  # (v, scratch) -> the sum of v over the threads of one row, in each of them
    row_and_column: Callable  # () -> row within the block, first column of this thread
    # (out, first, sums_SC, scratch): out[first + c] = sum of sums_SC over the block's R rows.
    # scratch: SCRATCH floats of shared memory, aligned to 16 bytes; may be that of total, since one
    # of the two needs none
    add_rows: Callable
    SCRATCH: int


@dataclass(frozen=True)
class RowKernel:
    """A compiled variant of a kernel over rows, and what its launcher needs to choose the grid."""

    kernel: Callable
    plan: RowPlan
    blocks_per_sm: int = 1  # resident blocks that the kernel's registers allow


def row_plan(C: int, vec: int, warps: int = MIN_WARPS, columns: int = MAX_COLUMNS) -> RowPlan:
    """The plan for rows of C columns.

    warps: per block, as far as possible. columns: per thread at most; fewer for a kernel that keeps
    several rows in registers. At most 32 warps share a row, so in a very wide row a thread has up
    to MAX_COLUMNS in any case.
    Raises ValueError above 32768 columns.
    """
    widest = MAX_WARPS * 32 * MAX_COLUMNS
    if widest < C:
        raise ValueError(f"rows of {C} columns are too wide: at most {widest} are supported")
    chunks = -(-C // vec)
    W = min(-(-chunks // (32 * (columns // vec))), MAX_WARPS)
    R = warps if W == 1 else 1
    return RowPlan(W=W, STEPS=-(-chunks // (32 * W)), R=R, THREADS=32 * W * R)


def aligned_rows(C: int, *arrays: Array) -> bool:
    """Does every row of C columns start at a multiple of 16 bytes, in all arrays? (8 for bf16 next
    to float32.)
    """
    return C % elements_per_vector(*arrays) == 0 and on_16_bytes(*arrays)


def make_row_ops(
    C: int, vec: int, aligned: bool, warps: int = MIN_WARPS, columns: int = MAX_COLUMNS
) -> RowOps:
    """Return the plan and the device functions for rows of C columns.

    aligned: every row starts at a multiple of 16 bytes, see aligned_rows. warps, columns: as in
    row_plan.
    """
    plan = row_plan(C, vec, warps, columns)
    W = plan.W
    R = plan.R
    STEPS = plan.STEPS
    THREADS = plan.THREADS
    STRIDE = 32 * W * vec  # between the chunks of a thread
    WIDTH = STEPS * STRIDE
    SCRATCH = max(R * WIDTH, MAX_WARPS) if R > 1 else MAX_WARPS
    FULL = C % STRIDE == 0  # no chunk extends beyond the row

    @device
    def load(registers, x, first, c):
        if not aligned:
            for j in range(vec):
                registers[j] = load1(x, first + c + j) if c + j < C else float32(0.0)
        elif not FULL and c >= C:
            for j in range(vec):
                registers[j] = float32(0.0)
        elif vec == 8:
            load8(registers, x, first + c)
        else:
            load4(registers, x, first + c)

    @device
    def store(x, first, c, registers):
        if not aligned:
            for j in range(vec):
                if c + j < C:
                    store1(x, first + c + j, registers[j])
        elif FULL or c < C:
            if vec == 8:
                store8(x, first + c, registers)
            else:
                store4(x, first + c, registers)

    @device
    def load_words(words, x, first, c):
        if not aligned:
            registers = cuda.local.array(vec, float32)
            load(registers, x, first, c)
            if vec == 8:
                pack8(words, registers, x)
            else:
                pack4(words, registers, x)
        elif not FULL and c >= C:
            for j in range(vec):
                words[j] = uint32(0)
        elif vec == 8:
            load_words8(words, x, first + c)
        else:
            load_words4(words, x, first + c)

    @device
    def unpack(registers, words, x):
        if vec == 8:
            unpack8(registers, words, x)
        else:
            unpack4(registers, words, x)

    @device
    def total(v, scratch):
        if W == 1:
            return warp_sum(v)
        return block_sum(v, scratch)

    @device
    def row_and_column():
        tid = cuda.threadIdx.x
        if W == 1:
            return tid >> 5, (tid & 31) * vec
        return 0, tid * vec

    @device
    def add_rows(out, first, sums_SC, scratch):
        if R == 1:
            for s in range(STEPS):
                store(out, first, cuda.threadIdx.x * vec + s * STRIDE, sums_SC[s])
        else:  # W = 1: a row is a warp
            tid = cuda.threadIdx.x
            words = cuda.local.array(4, uint32)
            at = (tid >> 5) * WIDTH + (tid & 31) * vec
            for s in range(STEPS):
                for e in range(0, vec, 4):
                    pack4(words, sums_SC[s, e : e + 4], scratch)
                    store_words4_shared(scratch, at + s * STRIDE + e, words)
            cuda.syncthreads()
            for c in range(tid, C, THREADS):
                acc = float32(0.0)
                for row in range(R):  # a fixed order: the same bits every run
                    acc += scratch[row * WIDTH + c]
                out[first + c] = acc

    return RowOps(
        **asdict(plan),
        STRIDE=STRIDE,
        load=load,
        store=store,
        load_words=load_words,
        unpack=unpack,
        total=total,
        row_and_column=row_and_column,
        add_rows=add_rows,
        SCRATCH=SCRATCH,
    )
