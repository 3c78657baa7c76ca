"""The simulator on three kernels, compared with Numba's own: CUDA threads per second.

    python bench/bench_simulator.py [--repeat 10] [--processes 2]

Each simulator runs the kernels in a process of its own; Numba's looks for no mistakes. value: CUDA
threads per second of CPU time, of the fastest launch, because other work on the machine changes the
wall time. In the rows with several processes it is the CPU time of the parent and an equal share of
that of the children: the wall time if each has a core of its own. Their peer is one process in the
same run; wall_ratio compares the wall times (`load`: of the machine).
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time

import numba
import numpy as np
from _records import append
from numba import cuda, float32

TILE = 16
DEPTH = 64
THREADS = 256
EACH = 4
BLOCKS = 16
PEER_BLOCKS = 2  # Numba's simulator is slow
SHAPES = {
    "tiled product": f"(16 blocks, {DEPTH}) x ({DEPTH}, 16), tiles of 16 x 16",
    "reduction": "256 threads a block, 4 elements each, in shared memory",
    "saxpy": "256 threads a block",
}


@cuda.jit
def product(c, a, b):
    """Shared memory in two dimensions: each thread reads 2 * DEPTH elements of it."""
    a_tile = cuda.shared.array((TILE, TILE), float32)
    b_tile = cuda.shared.array((TILE, TILE), float32)
    row, column = cuda.grid(2)
    i, j = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for k in range(a.shape[1] // TILE):
        a_tile[i, j] = a[row, k * TILE + j]
        b_tile[i, j] = b[k * TILE + i, column]
        cuda.syncthreads()
        for n in range(TILE):
            total += a_tile[i, n] * b_tile[n, j]
        cuda.syncthreads()
    c[row, column] = total


@cuda.jit
def reduction(sums, x):
    """Sum by a tree in shared memory: ten barriers between reads and writes."""
    scratch = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        total += x[i]
    scratch[t] = total
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if t < half:
            scratch[t] += scratch[t + half]
        cuda.syncthreads()
        half //= 2
    if t == 0:
        sums[cuda.blockIdx.x] = scratch[0]


@cuda.jit
def saxpy(y, x, a):
    """Global memory alone."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = a * x[i]


def launches(blocks: int) -> dict:
    """Return {name: (kernel, grid, block, arguments, what the first argument must become)}."""
    rng = np.random.default_rng(0)
    numbers = lambda *shape: rng.integers(-4, 5, shape).astype(np.float32)  # sums are exact
    a = numbers(TILE * blocks, DEPTH)
    b = numbers(DEPTH, TILE)
    x = numbers(EACH * blocks * THREADS)
    y = np.zeros(blocks * THREADS, np.float32)
    sums = x.reshape(EACH, blocks, THREADS).sum((0, 2))
    short = x[: y.size]
    return {
        "tiled product": (product, (blocks, 1), (TILE, TILE), (np.zeros_like(a @ b), a, b), a @ b),
        "reduction": (reduction, blocks, THREADS, (np.zeros_like(sums), x), sums),
        "saxpy": (saxpy, blocks, THREADS, (y, short, np.float32(2)), 2 * short),
    }


def cpu_seconds(processes: int) -> float:
    """Return the CPU time of this process, and an equal share of that of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + (children.ru_utime + children.ru_stime) / processes


def measure(blocks: int, repeat: int, processes: int) -> dict:
    """Return {name: {processes: (CPU seconds on the longest path, wall seconds)}}.

    The times are those of the fastest launch, started by this process.
    """
    found: dict = {}
    for name, (kernel, grid, block, args, right) in launches(blocks).items():
        times: dict = {n: [] for n in {1, processes}}
        for n in sorted(times) * repeat:
            args[0][...] = 0
            before = cpu_seconds(n)
            wall = time.perf_counter()
            if numba.config.ENABLE_CUDASIM:
                kernel[grid, block](*args)
            else:
                from xtrain import simulator

                simulator.run(kernel, grid, block, *args, processes=n)
            times[n].append((cpu_seconds(n) - before, time.perf_counter() - wall))
            np.testing.assert_array_equal(args[0], right, err_msg=name)
        found[name] = {n: [min(column) for column in zip(*lines)] for n, lines in times.items()}
    return found


def in_a_process(blocks: int, repeat: int, processes: int = 1, **environment) -> dict:
    """Return the output of `measure` in a new process."""
    numbers = map(str, (blocks, repeat, processes))
    command = [sys.executable, __file__, "--measure", *numbers]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=-1).stdout)


def record(name: str, threads: int, seconds: float, peer: str, peer_value: float, **more) -> None:
    """Append one line to results/bench_simulator.jsonl, and print it."""
    value = threads / seconds
    line = {
        "bench": "bench_simulator",
        "name": name,
        "shape": SHAPES[name.partition(",")[0]],
        "dtype": "fp32",
        "ms": round(1e3 * seconds, 3),
        "value": round(value),
        "unit": "threads/s",
        "peer": peer,
        "peer_value": round(peer_value),
        "ratio": round(value / peer_value, 3),
        "peak_gb": None,
        "threads": threads,
        **more,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
        },
    }
    append(line)
    print(f"{name}: {value:,.0f} threads/s, {line['ratio']} x {peer} ({peer_value:,.0f})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--measure", nargs=3, type=int, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.measure:
        print(json.dumps(measure(*o.measure)))
        return 0
    peers = in_a_process(PEER_BLOCKS, 2, NUMBA_ENABLE_CUDASIM="1")
    ours = in_a_process(BLOCKS, o.repeat, o.processes)
    threads = BLOCKS * THREADS
    for name in SHAPES:
        peer = PEER_BLOCKS * THREADS / peers[name]["1"][0]
        record(name, threads, ours[name]["1"][0], "Numba's simulator", peer)
        if o.processes > 1:
            (one, one_wall), (more, more_wall) = (ours[name][str(n)] for n in (1, o.processes))
            wall = round(one_wall / more_wall, 3)
            several = f"{name}, {o.processes} processes"
            record(several, threads, more, "1 process", threads / one, wall_ratio=wall)
    return 0


if __name__ == "__main__":
    sys.exit(main())
