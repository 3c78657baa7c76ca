"""Exercises of lesson 3: reductions and RMSNorm."""

import numpy as np

from xtrain.kernels.rmsnorm import rmsnorm_ref

from .attempt import exercise


def near(got, value):
    return np.isclose(got[0], value, 1e-4)


@exercise(
    "3.1", "warp_sums_kernel",
    first_step="every lane loads its own element into a variable v, or 0.0 past the end; then repeat v += (the v of another lane) five times.",
    hints={
        "CollectiveError": "All 32 lanes must call the shuffle with the mask FULL and a float32: lanes past the end contribute float32(0.0).",
        "DeadlockError": "A shuffle is for the whole warp: move it out of the guard, and let lanes past the end contribute 0.0.",
        "OutOfBoundsError": "Lanes past the end of x_n have no element: they contribute 0.0 to the sum. "
        "And sums_W has one element per block: sums_W[cuda.blockIdx.x].",
        "RaceError": "All 32 lanes write the same element of sums_W. Let only one write it: the lane with threadIdx.x == 0.",
    },
)  # fmt: skip
def warp_sums_kernel(e):
    for n in e.cases((32, 70, 5, 1), lambda rng: rng.integers(65, 200)):
        x, sums = e.normal(n), e.blank(-(-n // 32))
        trace = e.run(-(-n // 32), 32, sums, x, case=f"n = {n}", trace=True)
        padded = np.concatenate([np.asarray(x), np.zeros(-n % 32, np.float32)]).reshape(-1, 32)
        half, counted = padded[:, ::2].sum(1), padded
        for d in range(5):
            counted = counted + counted[:, np.arange(32) ^ d]
        e.same("sums", sums, padded.sum(1), {
            "Half of the elements are missing, those of odd lanes: the last step has width 1.": half,
            "Half of the elements are missing: the first step has width 16.": padded[:, :16].sum(1),
            "The distances are 16, 8, 4, 2, 1 lanes, each half of the previous one: with 0, 1, 2, 3, 4 a lane adds its own value, and others twice.":
                counted[:, 0],
            "Every element is counted twice: five steps are enough for 32 lanes (16, 8, 4, 2, 1).": 2 * padded.sum(1),
            "That is one element of each warp: add the value that the shuffle returns to v.": padded[:, 31],
            "The sum was added to the old content of sums_W, which is NaN here: add up in a variable, and write once.":
                lambda got: e.wrote(sums).all() and np.isnan(got).all(),
            "Only block 0 has written its sum: in every block, the lane with threadIdx.x == 0 writes it.":
                lambda got: len(got) > 1 and e.wrote(sums)[0] and not e.wrote(sums)[1:].any(),
        }, rtol=1e-4)  # fmt: skip
        e.need(
            len(trace.requests(e.name(x))) == len(padded),
            "The sums are correct, but one lane reads one element after the other. Let each lane load its own, all at the same moment, "
            "and use shuffles to combine them.",
        )


@exercise(
    "3.2", "block_sum_kernel",
    first_step="sum this thread's elements in a local variable; then warp_sum(...) gives the sum of the warp in all its lanes.",
    allow=("warp_sum",),
    hints={
        "RaceError": "One lane of each warp writes to `partial`, all threads wait, and then `partial` is read: cuda.syncthreads() in between. "
        "And only one thread writes the result.",
        "UninitializedError": "`partial` has 32 elements, but only as many are written as the block has warps, cuda.blockDim.x // 32. "
        "The other lanes contribute 0.0; and cuda.syncthreads() must come between the write and the read.",
        "DeadlockError": "All threads must call cuda.syncthreads() and warp_sum: do not put them inside an `if` that some threads skip.",
        "CollectiveError": "warp_sum is for whole warps: move it out of any `if lane == ...`.",
        "OutOfBoundsError": "Loop with `for i in range(tid, x_n.size, cuda.blockDim.x)`, which stops at the end of the array.",
    },
)  # fmt: skip
def block_sum_kernel(e):
    fixed = (256, 128), (1000, 128), (200, 96), (3, 32), (2100, 1024)
    for n, block in e.cases(fixed, lambda rng: (rng.integers(100, 700), 32 * rng.integers(2, 9))):
        x, total = e.normal(n), e.blank(1)
        trace = e.run(1, block, total, x, case=f"n = {n}", trace=True)
        sums = np.zeros(block, np.float32)  # per thread, added up by a tree that halves
        for i, v in enumerate(np.asarray(x)):
            sums[i % block] += v
        half = block // 2
        while half:
            sums[:half] += sums[half : 2 * half]
            half //= 2
        given, x = x, np.asarray(x)
        own = np.array([x[i::block].sum() for i in range(min(block, n))], np.float32)
        e.same("total", total, np.array([x.sum()]), {
            "That is the sum of the first warp alone: combine the sums of all warps through `partial`.":
                lambda got: block > 32 and (near(got, own[:32].sum()) or near(got, 32 * own[:32].sum())),
            "That is the sum of thread 0 alone: the threads' sums have to be added to each other, within the warp as well.":
                lambda got: near(got, own[0]) or near(got, own[::32].sum()),
            "Only the first elements were added, one per thread: each thread must continue in steps of blockDim.x.":
                x[:block].sum(keepdims=True) if n > block else np.empty(0),
            "Elements were added more than once: the step from one element of a thread to its next is the number of threads in the "
            "block, cuda.blockDim.x.": np.array([sum(x[i::32].sum() for i in range(block))]) if block > 32 else np.empty(0),
            "A tree that halves loses numbers when the block is not a power of 2: half of 3 is 1. Use warp_sum within a warp, and then "
            "for the warps' sums.": sums[:1],
            "The warps' sums are counted 32 times: after the barrier, each lane contributes the sum of ONE warp, partial[lane].":
                32 * x.sum(keepdims=True),
        }, rtol=1e-4)  # fmt: skip
        e.divided(trace, given, min(n, block))


@exercise(
    "3.3", "rmsnorm_kernel",
    first_step="each thread sums the squares of its own columns tid, tid + blockDim.x, ...; block_sum(acc, partial) adds the threads' sums.",
    allow=("block_sum", "warp_sum"),
    hints={
        "RaceError": "Only one thread writes rstd_N[n], and each y_NC[n, c] belongs to one thread.",
        "DeadlockError": "block_sum contains barriers, so all threads of the block must call it: not inside an `if` or a loop over columns.",
        "OutOfBoundsError": "A row has C columns, which need not be a multiple of the block: `for c in range(tid, C, cuda.blockDim.x)`.",
        "CollectiveError": "block_sum is for all threads of the block: move it out of any `if`.",
    },
)  # fmt: skip
def rmsnorm_kernel(e):
    eps = np.float32(1e-2)
    fixed = (
        (2, 64, 64, 1.0),
        (3, 100, 32, 1.0),
        (2, 7, 64, 1.0),
        (2, 40, 32, 0.02),
        (2, 40, 32, 1e4),
    )
    draw = lambda rng: (*rng.integers((2, 30), (5, 150)), 32 * rng.integers(1, 4), 1.0)
    for N, C, block, size in e.cases(fixed, draw):
        x, w = e.normal(N, C, mean=0.3 * size, scale=size), e.normal(C)
        y, rstd = e.blank(N, C), e.blank(N)
        trace = e.run(
            N, block, y, rstd, x, w, eps, case=f"{N} rows, {C} columns, x near {size:g}", trace=True
        )
        reads, threads = len(trace.of(e.name(x), write=False)), np.arange(C) % block
        x, w = np.asarray(x), np.asarray(w)
        want, want_rstd = rmsnorm_ref(x.astype(np.float64), w, float(eps))
        squares = np.square(x.astype(np.float64)).sum(1)
        as_rstd = lambda r: r.astype(np.float32)
        added = lambda got: 1 / np.square(got.astype(np.float64)) - squares / C
        e.same("rstd", rstd, want_rstd, {
            "The squares were summed but not divided by C: it is the root of the MEAN.": as_rstd(1 / np.sqrt(squares + eps)),
            "eps is missing under the root.": lambda got: size == 1 and np.abs(added(got)).max() < 3e-6,
            "Another number than the argument `eps` is added under the root.":
                lambda got: size == 1 and np.ptp(added(got)) < 1e-5 and not np.isclose(added(got)[0], eps, 1e-2),
            "eps belongs under the root, added to the mean.":
                lambda got: any(np.allclose(got, r, 1e-4) for r in (1 / (np.sqrt(squares / C) + eps), 1 / np.sqrt(squares / C) + eps)),
            "The root is missing.": as_rstd(1 / (squares / C + eps)),
            "Both the root and the reciprocal are missing: that is the mean of the squares plus eps, and rstd is 1 / sqrt of it.": as_rstd(squares / C + eps),
            "The numbers were summed, not their squares.":
                lambda got: np.allclose(got, 1 / np.sqrt(x.sum(1) / C + eps), 1e-4, equal_nan=True),
            "That is the sum of thread 0 alone: block_sum(acc, partial) adds up the threads of the block.":
                as_rstd(1 / np.sqrt(np.square(x[:, ::block]).sum(1) / C + eps)),
            "That is the sum of the first warp alone: block_sum(acc, partial) adds up all warps.":
                as_rstd(1 / np.sqrt(np.square(x[:, threads < 32]).sum(1) / C + eps)),
            "That is the root itself; rstd is 1 divided by it.": as_rstd(np.sqrt(squares / C + eps)),
            "Only the first columns were added, one per thread: a row is longer than the block.":
                as_rstd(1 / np.sqrt(np.square(x[:, :block]).sum(1) / C + eps)) if block < C else np.empty(0),
            "The step from one column of a thread to its next is the number of threads in the block, cuda.blockDim.x, not 64.":
                as_rstd(1 / np.sqrt(np.square(x[:, np.arange(C) % 64 < block]).sum(1) / C + eps)),
        }, rtol=1e-4)  # fmt: skip
        e.same("y", y, want, {
            "The weight w is missing.": x * want_rstd[:, None],
            "The row was not divided by its root mean square: rstd is missing in y.": x * w,
            "The weight belongs to the column: w_C[c].": x * want_rstd[:, None] * w[:N, None],
            f"The columns from {block} on were never written: this loop must also continue in steps of blockDim.x.":
                lambda got: block < C and np.isnan(got[:, block:]).all() and not np.isnan(got[:, :block]).any(),
        }, rtol=1e-4)  # fmt: skip
        e.need(
            reads <= 3 * N * C,
            "The values are correct, but threads read each other's columns: let each thread sum its own, c = tid, tid + blockDim.x, ..., "
            "and let block_sum do the rest.",
        )
