"""The cost of handing a vector over between resident blocks: two ways to wait.

    python bench/bench_handover.py [--columns 576 1536 2048] [--rounds 2000]

In every round each block writes its share of a vector and then needs all of it: the hand-over
between two stages of a decoding step in one kernel (lesson 33), without the products.

    counter     the block writes, meets at a barrier, and one thread adds to a counter with release
                semantics. One thread of each block polls the counter with acquiring loads; a
                barrier; then the threads load the vector
    sealed      each element is a word of 8 bytes: 4 bytes of data and the number of the round, its
                seal. A thread polls the words that it needs until their seals are those of the
                round: no counter, no fence, no second load. A word is written and read as a whole
                ("Memory Consistency Model" in the PTX manual)

Both compute the same numbers, which are checked. `value` is microseconds per round; the rest of a
round (a sum over the vector, which both share) is measured by `alone`: the same loop without other
blocks.
"""

import functools
from dataclasses import dataclass

import numpy as np
import tyro

from xtrain.kernels.primitives.intrinsics import GLOBAL, intrinsic
from xtrain.kernels.primitives.ptx import atomic_add_release, device, kernel, load_acquire
from xtrain.kernels.primitives.reduce import FULL
from xtrain.kernels.runtime.compiler import cuda, int32, int64
from xtrain.kernels.runtime.launch import launch
from xtrain.simulator import simulates

BLOCK = 256
WARPS = 8
PRIME = 65521  # all numbers are smaller, so sums fit


@dataclass
class Options:
    columns: tuple[int, ...] = (576, 1536, 2048)  # of the vector
    rounds: int = 2000  # of a launch
    runs: int = 9  # launches that are timed
    keep: bool = True  # append to bench/results


@intrinsic(value=int64)
def store_word(code, x, i, value):
    """Set x[i], int64 in global memory, as one access ("st", .relaxed)."""
    text = "st.relaxed.gpu.global.u64 [$0], $1;"
    code.asm(text, None, [code.address(x, i, GLOBAL), value], memory=True)


@intrinsic(returns=int64)
def load_word(code, x, i):
    """Return x[i], int64 in global memory, as one access past the L1 cache ("ld", .relaxed)."""
    text = "ld.relaxed.gpu.global.u64 $0, [$1];"
    return code.asm(text, int64, [code.address(x, i, GLOBAL)], memory=True)


@simulates(store_word)
def _simulated_store(thread, site, x, i, value):
    return thread.atomic_exch(site, x, i, value)


@simulates(load_word)
def _simulated_load(thread, site, x, i):
    return thread.strong_load(site, x, i)


@device
def total(v, partial):
    """Return the sum of v over the block, in every thread."""
    lane = cuda.threadIdx.x & 31
    warp = cuda.threadIdx.x >> 5
    for offset in (16, 8, 4, 2, 1):
        v += cuda.shfl_xor_sync(FULL, v, offset)
    if lane == 0:
        partial[warp] = v
    cuda.syncthreads()
    v = int32(0)
    for w in range(WARPS):
        v += partial[w]
    return v


@device
def next_value(sum_, c):
    return (sum_ + int32(7) * c + int32(1)) % int32(PRIME)


@functools.cache
def make_counter_kernel(C, blocks):
    """Return the kernel whose blocks wait at a counter. C: columns."""

    @kernel(BLOCK, 1)
    def counter_kernel(x, counter_1, rounds):
        """Grid `blocks`, block BLOCK. x: (2, C) int32, flat; round r reads row r % 2."""
        partial = cuda.shared.array(WARPS, int32)
        tid = cuda.threadIdx.x
        for r in range(rounds):
            acc = int32(0)
            here = (r & 1) * C
            there = (1 - (r & 1)) * C
            for c in range(tid, C, BLOCK):
                acc += x[here + c]
            sum_ = total(acc, partial)
            for c in range(cuda.blockIdx.x + tid * blocks, C, BLOCK * blocks):
                x[there + c] = next_value(sum_, int32(c))
            cuda.syncthreads()  # all threads have written
            if tid == 0:
                atomic_add_release(counter_1, 0, int64(1))
                while load_acquire(counter_1, 0) < int64(r + 1) * blocks:
                    pass
            cuda.syncthreads()

    return counter_kernel


@functools.cache
def make_sealed_kernel(C, blocks):
    """Return the kernel whose blocks wait for the words of the vector. C: columns."""
    EACH = -(-C // BLOCK)

    @kernel(BLOCK, 1)
    def sealed_kernel(words, rounds):
        """Grid `blocks`, block BLOCK.

        words: (2, C) int64, flat: seal and data; round r reads row r % 2.
        """
        partial = cuda.shared.array(WARPS, int32)
        tid = cuda.threadIdx.x
        mine = cuda.local.array(EACH, int64)
        for r in range(rounds):
            acc = int32(0)
            here = (r & 1) * C
            there = (1 - (r & 1)) * C
            missing = True
            while missing:  # all loads are issued before the first is looked at
                missing = False
                for e in range(EACH):
                    c = tid + e * BLOCK
                    mine[e] = load_word(words, here + (c if c < C else C - 1))
                for e in range(EACH):
                    missing |= (mine[e] >> 32) != r
            for e in range(EACH):
                acc += int32(mine[e]) if tid + e * BLOCK < C else int32(0)
            sum_ = total(acc, partial)
            for c in range(cuda.blockIdx.x + tid * blocks, C, BLOCK * blocks):
                store_word(words, there + c, int64(r + 1) << 32 | int64(next_value(sum_, int32(c))))
            cuda.syncthreads()  # the partial sums have been read

    return sealed_kernel


def expected(C: int, rounds: int) -> np.ndarray:
    """Return the vector after all rounds"""
    x = np.ones(C, np.int64)
    c = np.arange(C)
    for _ in range(rounds):
        x = (x.sum() + 7 * c + 1) % PRIME
    return x


def run_counter(to_array, C, blocks, rounds):
    """Return start(), vector()"""
    x = to_array(np.ones(2 * C, np.int32))
    counter_1 = to_array(np.zeros(1, np.int64))

    def start():
        x[...] = 1
        counter_1[...] = 0
        launch(make_counter_kernel(C, blocks), blocks, BLOCK, x, counter_1, rounds, resident=True)

    return start, lambda: x.reshape(2, C)[rounds % 2]


def run_sealed(to_array, C, blocks, rounds):
    """Return start(), vector()"""
    # a block that writes nothing is not waited for: its words may be overwritten, and it polls
    # forever
    if blocks > C:
        raise ValueError(
            f"{C} columns for {blocks} blocks: give at least one column for each block"
        )
    first = np.concatenate([np.ones(C, np.int64), np.full(C, -1, np.int64)])  # seals 0 and -1
    words, fresh = to_array(first), to_array(first)

    def start():
        words[...] = fresh
        launch(make_sealed_kernel(C, blocks), blocks, BLOCK, words, rounds, resident=True)

    return start, lambda: words.reshape(2, C)[rounds % 2] & 0xFFFFFFFF


VARIANTS = {"counter": run_counter, "sealed": run_sealed}


def main(o: Options) -> None:
    import cupy as cp
    from _timing import record

    multiprocessors = cp.cuda.Device().attributes["MultiProcessorCount"]
    for C in o.columns:
        medians: dict[str, float] = {}
        for blocks in (1, multiprocessors):
            for name, make in VARIANTS.items():
                start, vector = make(cp.asarray, C, blocks, o.rounds)
                times = []
                for _ in range(o.runs + 1):
                    begin, end = cp.cuda.Event(), cp.cuda.Event()
                    begin.record()
                    start()
                    end.record()
                    end.synchronize()
                    times.append(1e3 * cp.cuda.get_elapsed_time(begin, end) / o.rounds)
                assert np.array_equal(cp.asnumpy(vector()), expected(C, o.rounds)), name
                us = float(np.median(times[1:]))
                spread = np.ptp(times[1:])
                what = name if blocks > 1 else f"{name}, alone"
                medians[what] = us
                print(f"C={C} {what}: {us:.3f} us a round (spread {spread:.3f})", flush=True)
        if o.keep:
            for name in VARIANTS:
                if name == "sealed":
                    peer = dict(peer="counter", peer_value=medians["counter"])
                else:
                    peer = {}
                record(
                    "bench_handover",
                    name,
                    shape=f"C={C} blocks={multiprocessors}",
                    dtype="int32",
                    ms=medians[name] / 1e3,
                    value=medians[name],
                    unit="us",
                    alone_us=round(medians[f"{name}, alone"], 3),
                    **peer,
                )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
