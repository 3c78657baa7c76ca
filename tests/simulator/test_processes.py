"""`run(..., processes=2)`: the results and the findings are those of one process, whatever the blocks do."""

import os
import threading

import numpy as np
import pytest
from numba import cuda, float32, int32

from xtrain import simulator
from xtrain.simulator import KernelError, check, run, simulate
from xtrain.simulator import processes as module
from xtrain.simulator.launch import Launch
from xtrain.simulator.thread import Dim3

BLOCKS, THREADS = 5, 64

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Tiny kernels run in several processes, too."""
    monkeypatch.setattr(module, "WORTH", 0.0)


def forked(kernel, *args) -> bool:
    """Run a kernel in 2 processes. Did it stay at that?"""
    launch = Launch(kernel, Dim3(BLOCKS, 1, 1), Dim3(THREADS, 1, 1), args, 0)
    launch.processes = 2
    with np.errstate(all="ignore"):
        launch.run()
    return launch.forked


@cuda.jit
def neighbours(y, x, count):
    """Independent blocks that read what their neighbours read."""
    tile = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    tile[t] = x[i]
    cuda.syncthreads()
    y[i] = tile[(t + 1) % THREADS] + x[(i + THREADS) % x.shape[0]]
    if t == 0:
        cuda.atomic.add(count, cuda.blockIdx.x, 3)


def test_independent_blocks_run_in_children():
    x = np.random.default_rng(0).random(BLOCKS * THREADS, np.float32)
    results = []
    for processes in (1, 2, 3, 9):
        y, count = simulator.empty(x.size, np.float32), np.arange(BLOCKS, dtype=np.int32)
        run(neighbours, BLOCKS, THREADS, y, x, count, processes=processes)
        results.append((y, count))
        run(copy, BLOCKS, THREADS, np.zeros_like(x), y)  # y counts as written
    for y, count in results[1:]:
        assert y.tobytes() == results[0][0].tobytes()
        assert count.tolist() == results[0][1].tolist() == [3 + i for i in range(BLOCKS)]
    assert forked(neighbours, np.zeros_like(x), x, np.zeros(BLOCKS, np.int32))


@cuda.jit
def copy(y, x):
    i = cuda.grid(1)
    y[i] = x[i]


def test_views_records_and_grids_with_two_axes():
    kind = np.dtype([("a", np.int16), ("b", np.float64)])

    @cuda.jit
    def kernel(records, columns, z):
        i, j = cuda.grid(2)
        if j == 0:
            records[i].b = records[i].a + i
        columns[j, i] += 1 + i
        z[i, j] = complex(i, j)

    def arguments():
        return np.ones(6, kind), np.ones((4, 6), np.int32).T[::-1].T, np.zeros((6, 4), np.complex64)

    one, two = arguments(), arguments()
    run(kernel, (3, 2), (2, 2), *one)
    run(kernel, (3, 2), (2, 2), *two, processes=2)
    for a, b in zip(one, two):
        assert a.tobytes() == b.tobytes()


@cuda.jit
def histogram(count, order, x):
    order[cuda.grid(1)] = cuda.atomic.add(count, 0, x[cuda.grid(1)])


@cuda.jit
def last_block(total, part, counter):
    last = cuda.shared.array(1, int32)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    part[b, t] = b + t
    cuda.threadfence()
    cuda.syncthreads()
    if t == 0:
        last[0] = cuda.atomic.add(counter, 0, 1) == cuda.gridDim.x - 1
        cuda.threadfence()
    cuda.syncthreads()
    if last[0] and t == 0:
        for i in range(part.shape[0]):
            for j in range(part.shape[1]):
                total[0] += part[i, j]


@cuda.jit
def grid_sync(total, part, counter):
    part[cuda.blockIdx.x, cuda.threadIdx.x] = 1
    cuda.cg.this_grid().sync()
    if cuda.grid(1) == 0:
        for i in range(part.shape[0]):
            total[0] += part[i, 0]


@cuda.jit
def flags(total, part, counter):
    """Each block waits for the one before."""
    b = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        while b and cuda.atomic.add(counter, b - 1, 0) == 0:
            pass
        part[b, 0] = cuda.atomic.add(total, 0, 1)
        cuda.atomic.exch(counter, b, 1)


@pytest.mark.parametrize("kernel", [last_block, grid_sync, flags], ids=lambda k: k.py_func.__name__)
def test_blocks_that_depend_on_each_other_run_in_one_process(kernel):
    def arguments():
        return np.zeros(1, np.int64), np.zeros((BLOCKS, THREADS), np.int64), np.zeros(BLOCKS, np.int32)  # fmt: skip

    one, two = arguments(), arguments()
    run(kernel, BLOCKS, THREADS, *one)
    assert not forked(kernel, *two) and one[0][0] > 0
    for a, b in zip(one, two):
        assert a.tobytes() == b.tobytes()


def test_the_order_of_atomics_is_that_of_one_process():
    x = np.random.default_rng(0).normal(size=BLOCKS * THREADS).astype(np.float32)
    one, two = ((np.zeros(1, np.float32), np.zeros_like(x), x) for _ in range(2))
    run(histogram, BLOCKS, THREADS, *one)
    assert not forked(histogram, *two)
    assert one[0].tobytes() == two[0].tobytes() and one[1].tobytes() == two[1].tobytes()


@cuda.jit
def wrong(y, x, how, at):
    tile = cuda.shared.array(THREADS, float32)
    t, b, i = cuda.threadIdx.x, cuda.blockIdx.x, cuda.grid(1)
    here = b >= at
    tile[t] = x[i]
    if not (here and how == 0):
        cuda.syncthreads()
    y[i] = tile[t ^ 1]
    if here and how == 1:
        y[i + 1] = 0
    if here and how == 2 and t < 3:
        y[b * THREADS + t + y.shape[0]] = 1
    if here and how == 3 and t % 32 < 16:
        cuda.syncwarp(0xFFFFFFFF)
    if here and how == 4:
        y[(at - 1) * THREADS] = 7
    if here and how == 5:
        y[i] += x[(i + THREADS) % x.shape[0]]
        x[i] = 1
    if here and how == 6 and t > 40:
        return
    if how == 6:
        cuda.syncthreads()
    if here and how == 7:
        y[i - x.shape[0]] = i // (b - b)
    if here and how == 8 and t == 0:
        raise ValueError("wrong")


@pytest.mark.parametrize("how", range(9))
@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_findings_are_those_of_one_process(how, at):
    found, arrays = [], []
    for processes in (1, 2, 3):
        x, y = np.ones(BLOCKS * THREADS, np.float32), np.zeros(BLOCKS * THREADS, np.float32)
        warnings: list = []
        try:
            run(wrong, BLOCKS, THREADS, y, x, how, at, warn=warnings.append, processes=processes)
        except KernelError as error:
            warnings.append(error)
        every = check(wrong, BLOCKS, THREADS, y.copy(), x.copy(), how, at, processes=processes)
        found.append([(str(w), w.sites, w.kind, w.count) for w in (*warnings, *every)])
        arrays.append((x.tobytes(), y.tobytes()))
    assert found[0] == found[1] == found[2] and arrays[0] == arrays[1] == arrays[2]
    assert found[0] or (how in (4, 5) and at == 4)


def test_what_kernels_print_is_in_the_order_of_the_blocks(capsys):
    @cuda.jit
    def kernel(y):
        if cuda.threadIdx.x == 0:
            print("block", cuda.blockIdx.x)
        y[cuda.grid(1)] = 1

    assert forked(kernel, np.zeros(BLOCKS * THREADS, np.float32))
    assert capsys.readouterr().out == "".join(f"block {i}\n" for i in range(BLOCKS))


def test_other_threads_of_the_program():
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        x = np.ones(BLOCKS * THREADS, np.float32)
        assert forked(copy, np.zeros_like(x), x)
    finally:
        done.set()
        other.join()


def test_launches_of_a_program():
    x, y = np.ones(BLOCKS * THREADS, np.float32), np.zeros(BLOCKS * THREADS, np.float32)
    with simulate(processes=2):
        copy[BLOCKS, THREADS](y, x)
    assert y.all()


@pytest.mark.parametrize("processes", [0, -1, 1.5, "2", None, True])
def test_the_number_of_processes(processes):
    with pytest.raises(ValueError, match="is not a positive integer"):
        run(copy, 1, 1, np.zeros(1), np.zeros(1), processes=processes)
    with (
        pytest.raises(ValueError, match="is not a positive integer"),
        simulate(processes=processes),
    ):
        pass


def test_systems_without_fork(monkeypatch):
    monkeypatch.delattr(os, "fork")
    run(copy, 1, 1, np.zeros(1), np.zeros(1), processes=1)
    with pytest.raises(ValueError, match=r"processes=2 needs os\.fork, .*: use processes=1"):
        run(copy, 1, 1, np.zeros(1), np.zeros(1), processes=2)
