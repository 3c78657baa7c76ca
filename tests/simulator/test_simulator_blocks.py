"""Accesses of two blocks that the simulator accepts as ordered, and accesses that it reports: simulator/releases.py."""

import sys

import numpy as np
import pytest
from numba import cuda, int32, int64

from xtrain.kernels.primitives.ptx import atomic_add_release, load_acquire
from xtrain.simulator import DeadlockError, RaceError, run


def last_block(before="", behind="", acquire="cuda.threadfence()", threads="tid == 0", after=""):
    """A kernel's source: each block writes its part, the last block adds them up.

    before, behind: code around the barrier. acquire: after the atomic; after: in all threads, before the second barrier.
    """
    return f"""
@cuda.jit
def kernel(out, part, counter):
    last = cuda.shared.array(1, int32)
    b, tid = cuda.blockIdx.x, cuda.threadIdx.x
    {before.partition("|")[0]}
    part[b, tid] = 1
    {before.partition("|")[2]}
    cuda.syncthreads()
    if {threads}:
        {behind}
        last[0] = cuda.atomic.add(counter, 0, 1) == cuda.gridDim.x - 1
        {acquire}
    {after}
    cuda.syncthreads()
    if last[0] and tid == 1:
        counter[0] = 0
        out[0] = 0
        for i in range(cuda.gridDim.x):
            for t in range(cuda.blockDim.x):
                out[0] += part[i, t]
"""


def run_source(defined, source, grid, block, *args):
    run(defined("kernel", source), grid, block, *args)


@pytest.fixture
def defined(tmp_path):
    """A function that compiles a kernel from its source and stores the source where inspect finds it."""

    def define(name, source):
        file = tmp_path / "kernel.py"
        file.write_text(source)
        exec(compile(source, str(file), "exec"), scope := {"cuda": cuda, "int32": int32})
        return scope[name]

    return define


def outputs(blocks=3, threads=64):
    return np.zeros(1, np.int32), np.zeros((blocks, threads), np.int32), np.zeros(1, np.int32)


FENCE = "cuda.threadfence()"


@pytest.mark.parametrize(
    "words",
    [
        dict(before=f"|{FENCE}"),  # each thread's fence, the barrier, one thread's atomic
        dict(behind=FENCE),
        dict(before=f"|{FENCE}", behind=FENCE),
        dict(behind=FENCE, acquire="", after=f"cuda.syncthreads(); {FENCE}"),  # in every thread
    ],
)
def test_a_fence_before_or_behind_the_barrier(defined, words):
    out, part, counter = outputs()
    run_source(defined, last_block(**words), 3, 64, out, part, counter)
    assert out[0] == 3 * 64 and counter[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        dict(),
        dict(before=FENCE),  # before the access that it should release
        dict(before=f"|if tid != 5: {FENCE}"),
        dict(before=f"|if tid == 0: {FENCE}"),  # no fence follows the other threads' writes
        dict(after=FENCE),
        dict(behind=f"{FENCE}; part[b, 0] = 2"),
        dict(behind=FENCE, acquire=""),  # a barrier is not a fence
        dict(behind=FENCE, acquire="cuda.threadfence_block()"),
        dict(behind=FENCE, acquire="", after=f"if tid == 1: {FENCE}"),  # too early
    ],
)
def test_a_fence_that_does_not_cover_what_is_read(defined, words):
    with pytest.raises(RaceError, match="between blocks"):
        run_source(defined, last_block(**words), 3, 64, *outputs())


@cuda.jit
def earlier_readers(x, o, counter, left_out):
    """The last block writes what all other blocks have read; block `left_out` does not release its read."""
    b = cuda.blockIdx.x
    last = cuda.gridDim.x - 1
    if b < last:
        o[b] = x[0]
        if b != left_out:
            cuda.threadfence()
            cuda.atomic.add(counter, 0, 1)
    elif cuda.atomic.add(counter, 0, 1) >= 1:
        cuda.threadfence()
        x[0] = 5


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_later_blocks_read_does_not_hide_an_earlier_one(left_out):
    x, o, counter = np.ones(1, np.int32), np.zeros(3, np.int32), np.zeros(1, np.int32)
    with pytest.raises(RaceError, match=rf"block \({left_out}, 0, 0\) thread 0 read x\[0\]"):
        run(earlier_readers, 4, 1, x, o, counter, left_out)
    run(earlier_readers, 4, 1, x, o, counter, 9)
    assert x[0] == 5


@cuda.jit
def two_counters(x, o, counter):
    """Blocks 0 and 1 release on different elements; block 2 acquires on one of them."""
    b = cuda.blockIdx.x
    if b < 2:
        o[b] = x[0]
        cuda.threadfence()
        cuda.atomic.add(counter, b, 1)
    elif cuda.atomic.add(counter, 1, 1) == 1:
        cuda.threadfence()
        x[0] = 5


def test_each_publication_is_known_by_itself():
    with pytest.raises(RaceError, match=r"block \(0, 0, 0\) thread 0 read x\[0\]"):
        run(two_counters, 3, 1, np.ones(1, np.int32), np.zeros(3, np.int32), np.zeros(2, np.int32))


@cuda.jit
def every_thread_publishes(counter):
    cuda.threadfence()
    cuda.atomic.add(counter, 0, 1)


def test_many_publications_take_time_in_proportion():
    """The cost grows linearly with the blocks. Counted in calls, which do not depend on the machine."""

    def calls(blocks):
        counter, events = np.zeros(1, np.int32), []
        sys.setprofile(lambda frame, event, argument: events.append(None))
        try:
            run(every_thread_publishes, blocks, 32, counter)
        finally:
            sys.setprofile(None)
        assert counter[0] == 32 * blocks
        return len(events)

    calls(1)
    assert calls(32) < 5 * calls(8)


# ----------------------------------------------------------------------------- blocks that wait for counters
def make_stages(in_order=True, barrier=True):
    """-> a kernel whose blocks wait for each other three times, at counters; `o` sums what all have written."""

    @cuda.jit
    def stages_kernel(x, o, counters, arrivals):
        i, n, tid = cuda.blockIdx.x, cuda.gridDim.x, cuda.threadIdx.x
        for stage in range(3):
            x[stage, i, tid] = stage + i + tid
            if barrier:
                cuda.syncthreads()
            if tid == 0:
                if in_order:
                    atomic_add_release(counters, stage, np.int64(1))
                else:
                    cuda.atomic.add(counters, stage, 1)
                while load_acquire(counters, stage) < arrivals:
                    pass
            cuda.syncthreads()
            if stage == 2:
                for s in range(3):  # what others wrote two counters ago, too
                    for b in range(n):
                        o[i, tid] += x[s, b, tid]

    return stages_kernel


def run_stages(kernel, arrivals, **options):
    o, counters = np.zeros((3, 32)), np.zeros(3, np.int64)
    run(kernel, 3, 32, np.zeros((3, 3, 32)), o, counters, np.int64(arrivals), **options)
    return o


def test_blocks_wait_for_counters():
    expected = [[18 + 9 * tid for tid in range(32)]] * 3
    for resident in (None, 3):
        assert run_stages(make_stages(), 3, resident=resident).tolist() == expected


@pytest.mark.parametrize(
    "kernel, arrivals",
    [(make_stages(in_order=False), 3), (make_stages(barrier=False), 3), (make_stages(), 2)],
    ids=["no fence", "no barrier", "one arrival too few"],
)
def test_a_wait_that_orders_too_little_is_a_race(kernel, arrivals):
    with pytest.raises(RaceError, match=r"x\["):
        run_stages(kernel, arrivals)


def test_an_arrival_too_many_is_a_deadlock():
    with pytest.raises(DeadlockError, match=r"while load_acquire\(counters, stage\) < arrivals"):
        run_stages(make_stages(), 4)


def test_a_block_too_many_to_be_resident():
    with pytest.raises(DeadlockError, match="1 of 3 blocks have not started: 2 are resident"):
        run_stages(make_stages(), 3, resident=2)


# ----------------------------------------------------------------------------- syncwarp in the place of a barrier
def make_message(meet="after the write", fence="lane 0", met=True, chain=False):
    """Block 0 writes x, block 1 reads it; with `chain` block 2 does, which waits for block 1.

    meet: where the lanes of block 0 call syncwarp: "after the write", "before it", "before the atomic", "after it" or "".
    fence: "lane 0" after that, "all" before that, or "block": threadfence_block.  met: the reading lanes call syncwarp.
    """
    reader, all_fence, lane_0, of_block = (
        1 + chain,
        fence == "all",
        fence == "lane 0",
        fence == "block",
    )
    early, written, late, last = (
        meet == m for m in ("before it", "after the write", "before the atomic", "after it")
    )

    @cuda.jit
    def kernel(o, x, flags):
        t, block = cuda.threadIdx.x, cuda.blockIdx.x
        if block == 0:
            if early:
                cuda.syncwarp()
            x[t] = t
            if all_fence:
                cuda.threadfence()
            if written:
                cuda.syncwarp()
            if t == 0 and lane_0:
                cuda.threadfence()
            if t == 0 and of_block:
                cuda.threadfence_block()
            if late:
                cuda.syncwarp()
            if t == 0:
                cuda.atomic.add(flags, 0, 1)
            if last:
                cuda.syncwarp()
        else:
            if t == 0:
                while cuda.atomic.add(flags, block - 1, 0) == 0:
                    pass
                cuda.threadfence()
            if met:
                cuda.syncwarp()
            if block < reader:
                if t == 7:  # another lane than the one that waited
                    cuda.threadfence()
                    cuda.atomic.add(flags, block, 1)
            elif block == reader:
                o[t] = x[t]

    return kernel


def read_message(kernel, blocks=2):
    o, x = np.zeros((2, 32), np.int32)
    run(kernel, blocks, 32, o, x, np.zeros(3, np.int32))
    return o.tolist()


@pytest.mark.parametrize("fence", ["lane 0", "all"])
def test_syncwarp_and_a_fence_pass_on_what_a_warp_wrote(fence):
    assert read_message(make_message(fence=fence)) == [*range(32)]
    assert read_message(make_message(fence=fence, chain=True), 3) == [*range(32)]


@pytest.mark.parametrize(
    "wrong",
    [dict(meet=m) for m in ("", "before it", "before the atomic", "after it")]
    + [dict(fence=""), dict(fence="block"), dict(met=False), dict(met=False, chain=True)],
    ids=str,
)
def test_syncwarp_elsewhere_passes_nothing_on(wrong):
    with pytest.raises(RaceError, match=r"wrote x\["):
        read_message(make_message(**wrong), 2 + wrong.get("chain", False))


@pytest.mark.parametrize("sent, received", [(True, True), (False, True), (True, False)])
def test_a_counter_of_a_warp(sent, received):
    """Acquire and release in one lane: the message between two blocks, and between two warps of a block."""

    @cuda.jit
    def kernel(o, x, flag):
        t = cuda.threadIdx.x % 32
        if cuda.grid(1) < 32:
            x[t] = t
            if sent:
                cuda.syncwarp()
            if t == 0:
                atomic_add_release(flag, 0, int64(1))
        else:
            if t == 0:
                while load_acquire(flag, 0) == 0:
                    pass
            if received:
                cuda.syncwarp()
            o[t] = x[t]

    for grid, block in ((2, 32), (1, 64)):
        o, x = np.zeros((2, 32), np.int32)
        arguments = kernel, grid, block, o, x, np.zeros(1, np.int64)
        if sent and received:
            run(*arguments)
            assert o.tolist() == [*range(32)]
        else:
            with pytest.raises(RaceError, match=r"wrote x\["):
                run(*arguments)
