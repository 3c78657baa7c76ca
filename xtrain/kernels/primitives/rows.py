"""A row of C columns held in registers, read and written 16 bytes at a time.

    chunk        vec neighbouring columns: 8 if all arrays are bf16, else 4 (see words.py)
    W warps      share a row: one up to C = 1024 (shuffles sum the row), more beyond (which takes a
                 barrier)
    STEPS        chunks per thread, 32 columns at most. Thread t of a row owns chunks t,
                 t + 32 W, ...
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
from .words import WORD_OPS, elements_per_vector, pack4, store_words4_shared

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
    # (registers, x, first, c): registers[0:E] = x[first + c : + E] as float32, 0 beyond column C
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
    """Return the plan for rows of C columns. Raises ValueError above 32768 columns.

    warps: per block, as far as possible.
    columns: per thread at most; fewer for a kernel that keeps several rows in registers. At most 32
        warps share a row, so in a very wide row a thread has up to MAX_COLUMNS in any case.
    """
    widest = MAX_WARPS * 32 * MAX_COLUMNS
    if widest < C:
        raise ValueError(f"rows of {C} columns are too wide: at most {widest} are supported")
    chunks = -(-C // vec)
    W = min(-(-chunks // (32 * (columns // vec))), MAX_WARPS)
    R = warps if W == 1 else 1
    return RowPlan(W=W, STEPS=-(-chunks // (32 * W)), R=R, THREADS=32 * W * R)


def aligned_rows(C: int, *arrays: Array) -> bool:
    """Return True if every row of C columns starts at a multiple of 16 bytes in all arrays.

    For bf16 next to float32, multiples of 8 bytes are enough.
    """
    return C % elements_per_vector(*arrays) == 0 and on_16_bytes(*arrays)


def make_row_ops(
    C: int, vec: int, aligned: bool, warps: int = MIN_WARPS, columns: int = MAX_COLUMNS
) -> RowOps:
    """Return the plan and the device functions for rows of C columns.

    aligned: every row starts at a multiple of 16 bytes, see aligned_rows.
    warps, columns: as in row_plan.
    """
    plan = row_plan(C, vec, warps, columns)
    stride = 32 * plan.W * vec
    load, store, load_words = _make_accesses(C, vec, aligned, stride)
    row_and_column, total = make_sharing(vec, plan.W)
    add_rows, scratch = _make_add_rows(C, vec, plan, stride, store)
    return RowOps(
        **asdict(plan),
        STRIDE=stride,
        load=load,
        store=store,
        load_words=load_words,
        unpack=WORD_OPS[vec].unpack,
        total=total,
        row_and_column=row_and_column,
        add_rows=add_rows,
        SCRATCH=scratch,
    )


def _make_accesses(C, vec, aligned, stride):
    """Return load, store and load_words of RowOps."""
    FULL = C % stride == 0  # no chunk extends beyond the row
    load_vector = load8 if vec == 8 else load4
    store_vector = store8 if vec == 8 else store4
    load_vector_words = WORD_OPS[vec].load
    pack = WORD_OPS[vec].pack

    @device
    def load(registers, x, first, c):
        if not aligned:
            for j in range(vec):
                registers[j] = load1(x, first + c + j) if c + j < C else float32(0.0)
        elif not FULL and c >= C:
            for j in range(vec):
                registers[j] = float32(0.0)
        else:
            load_vector(registers, x, first + c)

    @device
    def store(x, first, c, registers):
        if not aligned:
            for j in range(vec):
                if c + j < C:
                    store1(x, first + c + j, registers[j])
        elif FULL or c < C:
            store_vector(x, first + c, registers)

    @device
    def load_words(words, x, first, c):
        if not aligned:
            registers = cuda.local.array(vec, float32)
            load(registers, x, first, c)
            pack(words, registers, x)
        elif not FULL and c >= C:
            for j in range(vec):
                words[j] = uint32(0)
        else:
            load_vector_words(words, x, first + c)

    return load, store, load_words


def make_sharing(vec: int, W: int):
    """Return row_and_column and total of RowOps, for rows that W warps share."""

    @device
    def row_and_column():
        tid = cuda.threadIdx.x
        if W == 1:
            return tid >> 5, (tid & 31) * vec
        return 0, tid * vec

    @device
    def total(v, scratch):
        if W == 1:
            return warp_sum(v)
        return block_sum(v, scratch)

    return row_and_column, total


def _make_add_rows(C, vec, plan, stride, store):
    """Return add_rows of RowOps, and the floats of shared memory that it needs."""
    STEPS = plan.STEPS
    R = plan.R
    THREADS = plan.THREADS
    STRIDE = stride
    WIDTH = STEPS * STRIDE

    @device
    def add_rows(out, first, sums_SC, scratch):
        if R == 1:
            for s in range(STEPS):
                store(out, first, cuda.threadIdx.x * vec + s * STRIDE, sums_SC[s])
        else:  # W = 1: a row is a warp
            tid = cuda.threadIdx.x
            words = cuda.local.array(4, uint32)
            start = (tid >> 5) * WIDTH + (tid & 31) * vec
            for s in range(STEPS):
                for e in range(0, vec, 4):
                    pack4(words, sums_SC[s, e : e + 4], scratch)
                    store_words4_shared(scratch, start + s * STRIDE + e, words)
            cuda.syncthreads()
            for c in range(tid, C, THREADS):
                acc = float32(0.0)
                for row in range(R):  # a fixed order: the same bits every run
                    acc += scratch[row * WIDTH + c]
                out[first + c] = acc

    return add_rows, max(R * WIDTH if R > 1 else 0, MAX_WARPS)
