"""Reads of shared memory that nothing has written since the barrier are only noted (Memory.note): no race is missed by that."""

import numpy as np
import pytest
from numba import cuda, float32

from xtrain.simulator import (
    KernelError,
    OutOfBoundsError,
    RaceError,
    UninitializedError,
    check,
    memory,
    observe,
    observers,
    run,
)

T = 64


@cuda.jit
def read_then_write(y, how):
    """All threads read a row of a tile; then some write, in the same interval."""
    tile = cuda.shared.array((4, T), float32)
    t = cuda.threadIdx.x
    for i in range(4):
        tile[i, t] = i
    cuda.syncthreads()
    total = float32(0)
    for i in range(4):
        total += tile[i, t] + tile[i, (t + 1) % T]
    if how == 1:
        cuda.syncwarp()
    if how == 2:
        cuda.syncthreads()
    if how == 3:
        total += cuda.shfl_sync(0xFFFFFFFF, total, 0)
    if how == 4:
        tile = tile.T
        total += tile[t, 1]
        if t == 40:
            tile[40, 2] = 0
    elif how == 5:
        tile[2, t] += 1
    elif how == 6 and t == 0:
        cuda.atomic.add(tile, (2, 33), 1)
    else:
        tile[2, t] = total
    y[t] = total


def described(found):
    return [(str(f), f.kind, f.count) for f in found]


@pytest.mark.parametrize("how", [0, 1, 3, 4, 5, 6])
def test_a_write_after_noted_reads(how, monkeypatch):
    """The findings are those of a simulator that records every read."""
    noted = check(read_then_write, 1, T, np.zeros(T, np.float32), how)
    monkeypatch.setattr(memory, "MAX_RUNS", 0)
    recorded = check(read_then_write, 1, T, np.zeros(T, np.float32), how)
    assert described(noted) == described(recorded)
    assert noted and {f.kind for f in noted} <= {"race", "plain_and_atomic"}
    assert all("read" in str(f).splitlines()[0] for f in noted)


def test_a_barrier_orders_noted_reads():
    run(read_then_write, 1, T, np.zeros(T, np.float32), 2)


@cuda.jit
def views(y, wrong):
    """Two views of the dynamic shared memory, read in turn; thread 63 writes through a third."""
    every = cuda.shared.array(0, float32)
    left, right = every[:T], every[T:]
    t = cuda.threadIdx.x
    left[t], right[t] = t, 1
    cuda.syncthreads()
    for i in range(T):
        y[t] += left[i] * right[i]
    if wrong:
        if t == T - 1:
            every[T + 5] = 0
    else:
        cuda.syncthreads()
        every[T - 1 - t] = 0


def test_views_of_one_memory():
    y = np.zeros(T, np.float32)
    run(views, 1, T, y, False, shared=8 * T)
    assert (y == T * (T - 1) / 2).all()
    with pytest.raises(RaceError, match=r"thread 0 read right at .*, thread 63 wrote every\[69\]"):
        run(views, 1, T, y, True, shared=8 * T)


@cuda.jit
def reads(y, i, j):
    tile = cuda.shared.array((4, 4), float32)
    for k in range(3):
        tile[k, 0] = tile[k, 1] = 5
    cuda.syncthreads()
    y[0] = tile[0, 0] + tile[1, 0]
    y[1] = tile[i, j]


@pytest.mark.parametrize(
    "i, j, kind, text",
    [
        (2, 1, None, ""),
        (2, 2, UninitializedError, r"tile\[2, 2\]"),
        (4, 0, OutOfBoundsError, "axis 0: index 4 is past the end"),
        (0, 4, OutOfBoundsError, "axis 1: index 4 is past the end"),
        (-1, 0, OutOfBoundsError, "negative"),
        (0, -9, OutOfBoundsError, "axis 1: index -9 is negative"),
        (0, 1.0, KernelError, "cannot be interpreted as an integer"),
    ],
)
def test_what_follows_noted_reads_is_checked(i, j, kind, text):
    y = np.zeros(2, np.float32)
    if kind is None:
        run(reads, 1, 1, y, i, j)
        assert y.tolist() == [10, 5]
    else:
        with pytest.raises(kind, match=text):
            run(reads, 1, 1, y, i, j)


@cuda.jit
def waiting(y, flag):
    """Thread 1 reads the tile while it waits for thread 0, again and again."""
    tile = cuda.shared.array(2, float32)
    t = cuda.threadIdx.x
    tile[t] = 1
    cuda.syncthreads()
    for _ in range(100):
        y[t] += cuda.shfl_xor_sync(3, tile[1 - t], 1)
    if t == 1:
        tile[1] = 2


def test_many_runs_are_recorded(monkeypatch):
    monkeypatch.setattr(memory, "MAX_RUNS", 10)
    y = np.zeros(2, np.float32)
    with pytest.raises(RaceError, match=r"thread 0 read tile\[1\] .* thread 1 wrote it"):
        run(waiting, 1, 2, y, y, allow={"partial_warp"})
    assert y.tolist() == [100, 100]


def test_an_observer_sees_every_read():
    class Count(observers.Observer):
        reads = 0

        def access(self, thread, array, k, site, how, value):
            self.reads += how == observers.READ and array.memory.kind == "shared"

    with observe(Count()) as count:
        run(read_then_write, 1, T, np.zeros(T, np.float32), 2)
    assert count.reads == 8 * T
