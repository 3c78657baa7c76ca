"""Exercises of lesson 23: Hopper's wgmma and TMA."""

import ml_dtypes
import numpy as np

from xtrain.kernels.primitives import tensor_maps

from .attempt import exercise

BYTES = 64 * 64 * 2


@exercise(
    "23.1", "warpgroup_kernel",
    first_step="thread 0 initializes the barrier; then cuda.syncthreads(); then thread 0 expects 2 * TILE_BYTES bytes and starts two copies.",
    allow=(
        "shared_base", "mbarrier_init", "mbarrier_init_fence", "mbarrier_arrive_expect_tx", "mbarrier_arrive", "mbarrier_wait", "acquire_map", "tma_load",
        "begin_product", "wait_for_product", "describe",
    ),
    hints={
        "AsyncError": "Keep the order of the table: cuda.syncthreads() between initializing the barrier and waiting at it, acquire_map before tma_load, mbarrier_wait(base, 0) before using the tiles, wait_for_product(acc) before using acc.",
        "DeadlockError": "The phase of a barrier completes when everything it expects has arrived: one arrival (mbarrier_arrive_expect_tx, by thread 0 only) and the "
        "bytes of BOTH tiles, 2 * TILE_BYTES. All 128 threads must call begin_product.",
        "CollectiveError": "All 128 threads must call begin_product and wait_for_product: move them outside any `if`.",
        "UninitializedError": "Data is read before it has arrived: the tiles are complete after mbarrier_wait(base, 0), acc after wait_for_product(acc). "
        "All 128 threads must call begin_product.",
        "UninitializedError in shared memory": "The tiles are at base + Q and base + K, and are complete after mbarrier_wait(base, 0).",
        "RaceError": "Only one thread may initialize the barrier and start the copies: if thread == 0. Put a cuda.syncthreads() between initializing "
        "the barrier and waiting at it.",
        "RaceError in global memory": "Each element of s must be written by one thread: row 16 * w + g + 8 * (i // 2), column 8 * j + 2 * t + i % 2, with "
        "w = thread // 32, g = thread % 32 // 4, t = thread % 4.",
        "OutOfBoundsError": "s is (64, 64): row 16 * w + g + 8 * (i // 2), column 8 * j + 2 * t + i % 2, with w = thread // 32, g = thread % 32 // 4, t = "
        "thread % 4; acc has 32 elements. The product takes descriptors: describe(base + Q).",
    },
)  # fmt: skip
def warpgroup_kernel(e):
    for case in e.cases(("q, k (64, 64)",), lambda rng: "q, k (64, 64), random numbers"):
        q, k = (e.normal(1, 64, 1, 64, dtype=ml_dtypes.bfloat16) for _ in range(2))
        s = e.blank(64, 64)
        e.run(1, 128, s, tensor_maps((q, 64), (k, 64)), shared=1024 + 2 * BYTES, case=case)
        a, b = (np.asarray(x).astype(np.float64).reshape(64, 64) for x in (q, k))
        w, g, t = (
            x[:, None, None]
            for x in (np.arange(128) // 32, np.arange(128) % 32 // 4, np.arange(128) % 4)
        )
        j, i = np.arange(8)[None, :, None], np.arange(4)[None, None, :]
        crossed = np.empty((64, 64))
        crossed[16 * w + g + 8 * (i % 2), 8 * j + 2 * t + i // 2] = (a @ b.T)[
            16 * w + g + 8 * (i // 2), 8 * j + 2 * t + i % 2
        ]
        n = 8 * i + j
        turned = np.empty((64, 64))
        turned[16 * w + g + 8 * (i // 2), 8 * j + 2 * t + i % 2] = (a @ b.T)[
            16 * w + g + 8 * (n % 4 // 2), 8 * (n // 4) + 2 * t + n % 2
        ]
        e.same("s", s, a @ b.T, {
            "The 4 numbers of one group of columns are adjacent in acc: acc[4 * j + i], not acc[8 * i + j].": turned,
            "This is k q^T: the first descriptor is the left operand, q.": b @ a.T,
            "This is q q^T: the second descriptor is k's, describe(base + K).": a @ a.T,
            "This is k k^T: the first descriptor is q's, describe(base + Q).": b @ b.T,
            "acc[1] and acc[2] are swapped: acc[4 * j + 1] is one column further, acc[4 * j + 2] is 8 rows further.": crossed,
            "Only the rows of the first warp are written: warp w = thread // 32 has rows 16 * w to 16 * w + 15.":
                lambda got: np.isnan(got[16:]).all() and np.allclose(got[:16], (a @ b.T)[:16], 1e-3, 1e-3),
        }, rtol=1e-3, atol=1e-3)  # fmt: skip


@exercise(
    "23.2", "finish_time",
    first_step="keep two lists: the end times of the loads and of the computations. Tile i needs a free buffer: computation i - stages must have ended.",
    hints={"IndexError": "Tile 0 has no predecessor: loaded and done are empty, and i - stages is negative."},
    kernel=False,
)  # fmt: skip
def finish_time(e):
    fixed = (
        (3, 2.0, 3.0, 1),
        (3, 2.0, 3.0, 2),
        (4, 3.0, 1.0, 2),
        (5, 1.0, 2.0, 3),
        (1, 2.0, 3.0, 4),
    )
    draw = lambda rng: (rng.integers(5, 12), *rng.uniform(0.5, 4, 2).round(2), rng.integers(1, 5))
    for tiles, load, compute, stages in e.cases(fixed, draw, times=5):
        got = e.call(
            tiles,
            load,
            compute,
            stages,
            case=f"{tiles} tiles, load {load:g}, compute {compute:g}, {stages} buffers",
        )
        loaded, done = [], []
        for i in range(tiles):
            begin = max(loaded[-1] if loaded else 0, done[i - stages] if i >= stages else 0)
            loaded.append(begin + load)
            done.append(max(loaded[i], done[-1] if done else 0) + compute)
        if got is not None and np.ndim(got) == 0 and np.isclose(float(got), done[-1]):
            continue
        e.need(
            got is not None and np.ndim(got) == 0,
            "Return one number, the time at which the last computation ends.",
        )
        say = f"It returns {got:g}; expected {done[-1]:g}."
        side, free = [], []  # if loads overlap each other; if computations overlap each other
        for i in range(tiles):
            side.append(
                max((side[i - stages] if i >= stages else 0) + load, side[-1] if side else 0)
                + compute
            )
            free.append(
                max(loaded[i - 1] if i else 0, free[i - stages] if i >= stages else 0)
                + load
                + compute
            )
        if np.isclose(got, side[-1]) and not np.isclose(got, tiles * (load + compute)):
            say += " Loads run one after another: load i starts when load i - 1 has ended."
        elif np.isclose(got, free[-1]) and not np.isclose(got, tiles * (load + compute)):
            say += " Computations run one after another: computation i starts when computation i - 1 has ended."
        elif np.isclose(got, tiles * (load + compute)):
            say += " This runs everything in sequence. With several buffers the next tile is loaded while this one is computed."
        elif np.isclose(got, tiles * max(load, compute)):
            say += " The first load cannot overlap with anything: there is nothing to compute yet."
        elif np.isclose(got, load + tiles * compute) or np.isclose(got, tiles * load + compute):
            say += " A load needs a free buffer: tile i waits until the computation of tile i - stages has ended."
        raise e.wrong(say)
