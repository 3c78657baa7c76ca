"""Exercises of lesson 2: memory. The judges check the values first, then the memory traffic."""

import numpy as np

from .attempt import exercise


def coalesced(e, trace, a, write):
    """Raise Wrong if the warps' accesses to an array move many more bytes than they use."""
    array = e.name(a)
    t = trace.traffic(array, write)
    e.need(
        t.efficiency > 0.8,
        f"The values are correct, but {array} moves {t.moved:,} bytes and uses {t.wanted:,} of them "
        f"({t.efficiency:.0%}): neighbouring threads must touch neighbouring elements at the same moment.",
    )


@exercise(
    "2.1", "copy_kernel",
    first_step="a loop `for i in range(first, y_n.size, step)`: where does this thread start, and how far away is its next element?",
    hints={
        "RaceError": "Two threads copy the same element. The step of the loop is the total number of threads: "
        "cuda.gridDim.x * cuda.blockDim.x.",
        "OutOfBoundsError": "The loop must end at y_n.size: `range(first, y_n.size, step)` does.",
    },
)  # fmt: skip
def copy_kernel(e):
    fixed = (1000, 2, 64), (500, 3, 32), (7, 1, 32), (129, 4, 32), (0, 2, 32)
    draw = lambda rng: (rng.integers(200, 400), rng.integers(1, 4), 32 * rng.integers(1, 3))
    for n, grid, block in e.cases(fixed, draw):
        x, y = e.normal(n), e.blank(n)
        trace = e.run(grid, block, y, x, case=f"n = {n}", trace=True)
        want, wrote, all_threads = np.asarray(x), e.wrote(y), grid * block
        e.same("y", y, want, {
            "Every thread copied one element and stopped, but there are more elements than threads: loop until y_n.size.":
                lambda got: n > all_threads and wrote[:all_threads].all() and not wrote[all_threads:].any(),
            "The loop ends before the last element: it goes up to y_n.size, range(first, y_n.size, step).":
                lambda got: wrote[:-1].all() and not wrote[-1],
            "The step is too large: some elements are copied by no thread. The step is the total number of threads, "
            "cuda.gridDim.x * cuda.blockDim.x.": lambda got: wrote[:all_threads].all() and not wrote.all(),
        })  # fmt: skip
        if (n, grid) in ((1000, 2), (500, 3)):
            e.settle()
            coalesced(e, trace, x, False)
            coalesced(e, trace, y, True)


@exercise(
    "2.2",
    "transpose_kernel",
    first_step="read `tile[ty, tx]` with tx along a row of x, wait, and write with tx along a row of y: which element of the tile is that?",
    hints={
        "RaceError": "The element of the tile that you write to y was written to the tile by another thread. Put cuda.syncthreads() "
        "between the write to the tile and the read, outside both guards, so that every thread reaches it.",
        "UninitializedError": "This element of the tile has not been written when you read it: either the barrier is missing, "
        "or the second half still uses the guard of the first (y is (C, R), its axes are swapped).",
        "DeadlockError": "Put cuda.syncthreads() outside both guards, so that every thread reaches it.",
        "OutOfBoundsError": "y has C rows and R columns. "
        "Block (bx, by) of x writes block (by, bx) of y: its rows start at bx * 16, its columns at by * 16.",
    },
)
def transpose_kernel(e):
    fixed = (16, 16), (32, 16), (5, 19), (16, 48)
    for R, C in e.cases(fixed, lambda rng: rng.integers(17, 40, 2)):
        x, y = e.normal(R, C), e.blank(C, R)
        grid = -(-C // 16), -(-R // 16)
        trace = e.run(grid, (16, 16), y, x, case=f"x ({R}, {C})", trace=True)
        want, wrote = np.asarray(x).T, e.wrote(y)
        local = want.copy()
        for c in range(0, C, 16):
            for r in range(0, R, 16):
                part = want[c : c + 16, r : r + 16]
                local[c : c + 16, r : r + 16] = part.T if part.shape == (16, 16) else part
        e.same("y", y, want, {
            "The tiles are in the right places, but they are not transposed within: read tile[tx, ty].": local,
            "Part of y was never written. Block (bx, by) of x writes block (by, bx) of y: "
            "its rows start at bx * 16, its columns at by * 16.": lambda got: wrote[:16, :16].all() and not wrote.all(),
        })  # fmt: skip
        if (R, C) != (16, 48):
            continue  # of the others, parts of the tiles are past the edge
        e.need(
            len(trace.of(kind="shared")) > 0,
            "This works without shared memory, so either the reads or the writes are not coalesced: use the tile.",
        )
        coalesced(e, trace, x, False)
        coalesced(e, trace, y, True)
        ways = max(trace.bank_conflicts())
        e.need(
            ways <= 2,
            f"Correct and coalesced, but {ways} lanes of a warp access the same bank of shared memory: add one column to the tile, "
            "cuda.shared.array((16, 17), float32).",
        )


@exercise(
    "2.3", "copy4_kernel",
    first_step="this thread owns elements i, i + 1, i + 2, i + 3, where i is 4 times its index in the grid.",
    allow=("load4", "store4"), each=4,
    hints={
        "OutOfBoundsError": "The last group of 4 may extend past the end: use load4 and store4 only if i + 4 <= y_n.size, "
        "and copy the remaining elements one by one.",
        "UninitializedError": "`registers` is read before it is filled: load4(registers, x_n, i) fills it.",
        "KernelError": "A 16-byte access must start at a multiple of 4 elements: i is 4 times the index of the thread.",
        "RaceError": "Two threads write the same element. A thread owns 4 elements, so multiply its index by 4.",
    },
)  # fmt: skip
def copy4_kernel(e):
    fixed = (200, 32), (130, 64), (3, 64), (512, 64), (1, 64)
    for n, block in e.cases(fixed, lambda rng: (rng.integers(140, 300), 32 * rng.integers(1, 3))):
        x, y = e.normal(n), e.blank(n)
        trace = e.run(-(-n // (4 * block)), block, y, x, case=f"n = {n}", trace=True)
        t, wrote = trace.traffic(e.name(x)), e.wrote(y)
        tail = np.array(x)
        tail[n // 4 * 4 :] = np.nan
        e.same("y", y, np.asarray(x), {
            "The last, incomplete group of 4 is missing: copy it element by element.": tail,
            "Only every fourth element, or a quarter of them, was copied: each thread owns 4 neighbouring elements.":
                lambda got: wrote.any() and n % 4 == 0 and not wrote.reshape(-1, 4).all(1).any(),
            "Only the first block did its work: the next block starts 4 * blockDim.x elements further.":
                lambda got: n > 4 * block and wrote[: 4 * block].all() and not wrote[4 * block :].any(),
        })  # fmt: skip
        if (n, block) == (512, 64):
            e.need(
                t.requests != 8 or t.wanted > x.nbytes,
                "The values are correct, but the loop copies a whole group of 4: the condition is i + 4 <= y_n.size.",
            )
            e.need(
                t.requests == 4,
                f"The values are correct, but a warp reads x with {t.requests} instructions where 4 are enough: "
                "load4 and store4 move 16 bytes per thread at once.",
            )
