"""Exercises of lesson 1: a thread, a block, a grid."""

import numpy as np

from .attempt import exercise

GRID_RACE = "Two blocks compute the same elements. threadIdx.x starts at 0 again in every block: which number tells the blocks apart?"


REVERSE_EARLY = "Another thread writes that element, perhaps later. After the write to `tile` all threads must wait: cuda.syncthreads()."
REVERSE_SHORT = (
    "In the last, shorter block, part of `tile` is never written. "
    "The mirror image of t is m - 1 - t, where m is the number of elements in this block."
)


@exercise(
    "1.1", "add_kernel",
    first_step="write one line that computes i, the index of this thread in the whole grid, from blockIdx, blockDim and threadIdx.",
    hints={
        "RaceError": "Several threads of one block write the same element: a thread computes only its own i, without a loop.",
        "RaceError between blocks": GRID_RACE,
        "OutOfBoundsError below 0": "Thread i needs only a[i] and b[i], nothing before them.",
        "OutOfBoundsError": "The last block has more threads than there are elements left. "
        "Threads whose i is not below y_n.size must do nothing.",
    },
)  # fmt: skip
def add_kernel(e):
    fixed = (5, 8), (32, 32), (100, 32), (20, 8), (1, 32)
    for n, block in e.cases(fixed, lambda rng: (rng.integers(101, 150), 8 * rng.integers(1, 9))):
        a, b, y = e.normal(n), e.normal(n), e.blank(n)
        e.run(-(-n // block), block, y, a, b, case=f"n = {n}")
        gap, wrote = np.isnan(np.asarray(y)), e.wrote(y)
        first = np.arange(n) < block
        e.same("y", y, a + b, {
            "Only the first block did its work: i must continue where the previous block ended, blockDim.x elements further.":
                lambda got: n > block and gap[~first].all() and not gap[first].any(),
            "Every block starts too early or too late: the stride from block to block is blockDim.x, "
            "the number of threads in a block; gridDim.x is the number of blocks.":
                lambda got: n > block and gap.any() and not gap.all(),
            "That is the product, not the sum.": np.asarray(a * b),
            "That is a - b.": np.asarray(a - b),
            "That is a alone: b was not added.": np.asarray(a),
            "Nothing was written: the last line is y_n[i] = ..., with the index and without `return`.":
                lambda got: not wrote.any() and n > 1,
            "The guard stops one element early: i may be as large as n - 1, so the condition is i < n.":
                lambda got: not wrote[-1] and wrote[:-1].all(),
            "That is y + ... : y holds NaN before you write it, so assign it with = and not +=.":
                lambda got: wrote.all() and gap.all(),
        })  # fmt: skip


@exercise(
    "1.2", "add_bias_kernel",
    first_step="compute two indices for this thread: row r from the .y parts of blockIdx, blockDim and threadIdx, column c from the .x parts.",
    hints={
        "OutOfBoundsError": "Both axes need a guard: `if r < R and c < C`. And in y_RC[r, c] the row comes first.",
        "RaceError": "Two threads have the same (r, c): each axis needs its own blockIdx * blockDim + threadIdx.",
    },
)  # fmt: skip
def add_bias_kernel(e):
    fixed = (
        (2, 3, (4, 4)),
        (5, 9, (4, 2)),
        (9, 5, (8, 4)),
        (1, 1, (2, 2)),
        (4, 4, (2, 2)),
    )
    draw = lambda rng: (*rng.integers(3, 14, 2), tuple(rng.integers(2, 7, 2)))
    for R, C, block in e.cases(fixed, draw):
        x, bias, y = e.normal(R, C), e.normal(C), e.blank(R, C)
        grid = -(-C // block[0]), -(-R // block[1])
        e.run(grid, block, y, x, bias, case=f"{R} rows, {C} columns")
        bias, x, wrote = np.asarray(bias), np.asarray(x), e.wrote(y)
        wrong = {
            "The bias of the row was added: bias_C has one number per column.":
                x + bias[:R, None] if R <= C else np.empty(0),
            "Only some of the elements were written: is r computed from the .y parts, and c from the .x parts?":
                lambda got: max(grid) > 1 and wrote.any() and not wrote.all(),
            "y was written with += : it holds NaN before you write it, so assign it with =.":
                lambda got: wrote.all() and np.isnan(got).all(),
            "That is x alone: the bias is missing.": x,
        }  # fmt: skip
        e.same("y", y, x + bias, wrong)


@exercise(
    "1.3", "reverse_kernel",
    first_step="every thread copies its own element into `tile`; then all threads wait; then every thread reads another thread's element.",
    hints={
        "RaceError": "The element that you read is written by another thread, perhaps later. "
        "Between `tile[...] = ` and the read all threads must wait: cuda.syncthreads().",
        "RaceError between blocks": "Two blocks write the same elements: block b starts at element 32 * b.",
        "DeadlockError": "Some threads never reach this barrier, because it is inside an `if` or after a `return`. "
        "Every thread of the block has to reach the same cuda.syncthreads().",
        "OutOfBoundsError": "A block has m = n - first elements left, but never more than 32: "
        "only threads below m read and write, and the mirror image of t is m - 1 - t.",
    },
)  # fmt: skip
def reverse_kernel(e):
    for n in e.cases((32, 64, 40, 5), lambda rng: rng.integers(34, 120)):
        x, y = e.normal(n), e.blank(n)
        unwritten = REVERSE_EARLY if n % 32 == 0 else REVERSE_SHORT
        hints = {"UninitializedError": unwritten}
        trace = e.run(-(-n // 32), 32, y, x, case=f"n = {n}", hints=hints, trace=True)
        x = np.asarray(x)
        pieces = [x[i : i + 32] for i in range(0, n, 32)]
        e.same("y", y, np.concatenate([p[::-1] for p in pieces]), {
            "That is x itself: nothing is reversed.": x,
            "The whole array was reversed, but every block should reverse only its own 32 elements.":
                x[::-1] if n > 32 else np.empty(0),
            "Off by one: the mirror image of element 0 is the last element of the block, so it is m - 1 - t.":
                np.concatenate([np.roll(p[::-1], 1) for p in pieces]),
        })  # fmt: skip
        e.need(
            bool(trace.of(write=False, kind="shared")),
            "y is correct, but does not come from `tile`: go through shared memory here, because later lessons need it.",
        )
        e.need(
            e.exchanged(trace),
            "y is correct, but every thread reads back from `tile` what it wrote itself, so the threads do not exchange anything and no "
            "barrier is needed. Let thread t write its own element, x_n[first + t], and read an element that another thread wrote.",
        )
