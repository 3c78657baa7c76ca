"""PTX's litmus tests, as far as a run with one schedule can decide them: simulator/releases.py.

A litmus test asks what a thread may read. Here the accesses whose order it asks for are weak, and the simulator must say that
nothing orders them, or accept them. Each runs with and without each of its fences, in one warp, in one block and between blocks.
"""

import itertools

import numpy as np
import pytest
from numba import cuda, int32, int64

from xtrain.kernels.primitives.ptx import (
    atomic_add_in_order,
    atomic_add_release,
    load_acquire,
)
from xtrain.simulator import check

# where the threads of a test are: (grid, block, threads between two of them), and which fences reach from one to the other
PLACES = {
    "warp": (1, 4, 1, {"block", "gpu"}),
    "block": (1, 97, 32, {"block", "gpu"}),
    "gpu": (4, 1, 1, {"gpu"}),
}


@cuda.jit(device=True)
def fence(kind):
    if kind == 1:
        cuda.threadfence_block()
    if kind == 2:
        cuda.threadfence()


FENCES = {"": 0, "block": 1, "gpu": 2}


@cuda.jit(device=True)
def wait(flags, i, until):
    while cuda.atomic.add(flags, i, 0) < until:
        pass


@cuda.jit(device=True)
def me(apart):
    """The number of this thread in the test; -1: none."""
    if cuda.grid(1) % apart:
        return -1
    return cuda.grid(1) // apart


@cuda.jit
def message_passing(x, o, flags, apart, fences):
    t = me(apart)
    if t == 0:
        x[0] = 1
        fence(fences[0])
        cuda.atomic.exch(flags, 0, 1)
    elif t == 1:
        wait(flags, 0, 1)
        fence(fences[1])
        o[0] = x[0]


@cuda.jit
def load_buffering(x, o, flags, apart, fences):
    """The read of thread 0 must not see what thread 1 writes later."""
    t = me(apart)
    if t == 0:
        o[0] = x[0]
        fence(fences[0])
        cuda.atomic.exch(flags, 0, 1)
    elif t == 1:
        wait(flags, 0, 1)
        fence(fences[1])
        x[0] = 1


@cuda.jit
def two_writes(x, o, flags, apart, fences):
    """2+2W: which of two writes remains?"""
    t = me(apart)
    if t == 0:
        x[0] = 1
        fence(fences[0])
        cuda.atomic.exch(flags, 0, 1)
    elif t == 1:
        wait(flags, 0, 1)
        fence(fences[1])
        x[0] = 2


@cuda.jit
def isa2(x, o, flags, apart, fences):
    """A message that a third thread passes on; one fence both acquires and releases there."""
    t = me(apart)
    if t == 0:
        x[0] = 1
        fence(fences[0])
        cuda.atomic.exch(flags, 0, 1)
    elif t == 1:
        wait(flags, 0, 1)
        fence(fences[1])
        cuda.atomic.exch(flags, 1, 1)
    elif t == 2:
        wait(flags, 1, 1)
        fence(fences[2])
        o[0] = x[0]


@cuda.jit
def chain_of_atomics(x, o, flags, apart, fences):
    """Thread 1 changes the flag in between, without a fence: the release reaches thread 2."""
    t = me(apart)
    if t == 0:
        x[0] = 1
        fence(fences[0])
        cuda.atomic.add(flags, 0, 1)
    elif t == 1:
        wait(flags, 0, 1)
        cuda.atomic.add(flags, 0, 1)
    elif t == 2:
        wait(flags, 0, 2)
        fence(fences[1])
        o[0] = x[0]


@cuda.jit
def independent_reads(x, o, flags, apart, fences):
    """IRIW: two writers, and two readers that look at them in different orders."""
    t = me(apart)
    if t == 0 or t == 1:
        x[t] = 1
        fence(fences[t])
        cuda.atomic.exch(flags, t, 1)
    elif t == 2 or t == 3:
        wait(flags, t - 2, 1)
        wait(flags, 3 - t, 1)
        fence(fences[t])  # one fence acquires both
        o[t] = x[t - 2] + x[3 - t]


@cuda.jit
def lock(x, o, flags, apart, fences):
    t = me(apart)
    if t == 0 or t == 1:
        while cuda.atomic.cas(flags, 0, 0, 1) != 0:
            pass
        fence(fences[1])
        x[0] += 1
        fence(fences[0])
        cuda.atomic.exch(flags, 0, 0)


def kinds_of(kernel, place, fences):
    grid, block, apart, _ = PLACES[place]
    arrays = np.zeros(4, np.int32), np.zeros(4, np.int32), np.zeros(4, np.int32)
    fences = np.array([FENCES[f] for f in fences], np.int32)
    return {f.kind for f in check(kernel, grid, block, *arrays, apart, fences)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "kernel, fences",
    [
        (message_passing, 2), (load_buffering, 2), (two_writes, 2), (chain_of_atomics, 2),
        (lock, 2), (isa2, 3),
    ],
    ids=lambda k: getattr(k, "__name__", ""),
)  # fmt: skip
def test_every_fence_is_needed(kernel, fences, place):
    """A missing release is a race; a missing acquisition is one of its own kind."""
    reach = PLACES[place][3]
    for chosen in itertools.product(FENCES, repeat=fences):
        missing = [f not in reach for f in chosen]
        if missing[0] or any(missing[1:-1]):
            expected = {"race"}
        elif missing[-1]:
            expected = {"missing_acquire"}
        else:
            expected = set()
        assert kinds_of(kernel, place, chosen) == expected, chosen


@pytest.mark.parametrize("place", PLACES)
def test_independent_reads_of_independent_writes(place):
    for without in (None, 0, 1, 2, 3):
        fences = ["" if t == without else "gpu" for t in range(4)]
        expected = {None: set(), 0: {"race"}, 1: {"race"}}.get(without, {"missing_acquire"})
        assert kinds_of(independent_reads, place, fences) == expected


@cuda.jit
def store_buffering(x, o, flags, apart, fences):
    t = me(apart)
    if t == 0 or t == 1:
        x[t] = 1
        fence(fences[0])
        o[t] = x[1 - t]


@cuda.jit
def dekker(x, o, flags, apart, fences):
    """Store buffering with atomics: no conflict, whatever they read."""
    t = me(apart)
    if t == 0 or t == 1:
        cuda.atomic.exch(flags, t, 1)
        fence(fences[0])
        o[t] = cuda.atomic.add(flags, 1 - t, 0)


@cuda.jit
def coherence(x, o, flags, apart, fences):
    """Atomics on one element have one order, which every thread sees; a thread sees its own weak accesses in order."""
    t = me(apart)
    if t >= 0:
        cuda.atomic.add(flags, 0, 1)
        o[t] = cuda.atomic.cas(flags, 0, 99, 0)
        x[t] = 1
        x[t] = x[t] + 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FENCES)
def test_no_fence_makes_weak_accesses_atomic(place, kind):
    assert kinds_of(store_buffering, place, [kind]) == {"race"}
    assert kinds_of(dekker, place, [kind]) == kinds_of(coherence, place, [kind]) == set()


@cuda.jit
def failed_swap_as_release(x, o, flags, apart, fences):
    t = me(apart)
    if t == 0:
        x[0] = 1
        cuda.threadfence()
        cuda.atomic.cas(flags, 0, 7, 8)
    elif t == 1:
        cuda.atomic.add(flags, 0, 0)
        cuda.threadfence()
        o[0] = x[0]


@cuda.jit
def failed_swap_as_acquire(x, o, flags, apart, fences):
    t = me(apart)
    if t == 0:
        x[0] = 1
        cuda.threadfence()
        cuda.atomic.exch(flags, 0, 1)
    elif t == 1:
        while cuda.atomic.cas(flags, 0, 0, 0) == 0:
            pass
        cuda.threadfence()
        o[0] = x[0]
        flags[0] = 0  # it has observed the change of thread 0


@cuda.jit
def weak_flag(x, o, flags, apart, fences):
    t = me(apart)
    if t == 0:
        x[0] = 1
        cuda.threadfence()
        cuda.atomic.exch(flags, 0, 1)
    elif t == 1:
        cuda.threadfence()
        o[0] = flags[0]


@cuda.jit
def weak_write_ends_the_chain(x, o, flags, apart, fences):
    t = me(apart)
    if t == 0:
        x[0] = 1
        cuda.threadfence()
        cuda.atomic.exch(flags, 0, 1)
        flags[0] = 2
        cuda.threadfence()
        cuda.atomic.exch(flags, 1, 1)
    elif t == 1:
        wait(flags, 0, 2)
        o[0] = x[0]


@cuda.jit
def lost_update(x, o, flags, apart, fences):
    t = me(apart)
    if t == 0:
        cuda.atomic.add(flags, 0, 1)
    elif t == 1:
        flags[0] += 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "kernel, kinds",
    [
        (failed_swap_as_release, {"race"}),
        (failed_swap_as_acquire, set()),
        (weak_flag, {"plain_and_atomic"}),
        (weak_write_ends_the_chain, {"race"}),
        (lost_update, {"plain_and_atomic", "race"}),
    ],
    ids=lambda k: getattr(k, "__name__", ""),
)
def test_what_is_no_atomic(kernel, kinds, place):
    assert kinds_of(kernel, place, []) == kinds


def test_allowing_plain_reads_hides_no_lost_update():
    x = np.zeros(1, np.int32)
    found = check(lost_update, 1, 2, x, x, x.copy(), 1, x, allow={"plain_and_atomic"})
    assert [f.kind for f in found] == ["race"]


def test_atomics_of_two_widths():
    @cuda.jit
    def kernel(x, barrier):
        if cuda.threadIdx.x == 0:
            cuda.atomic.add(x, 0, 1)
        if barrier:
            cuda.syncthreads()
        if cuda.threadIdx.x == 1:
            cuda.atomic.add(x.view(np.uint32), 1, 1)

    (found,) = check(kernel, 1, 2, np.zeros(1, np.uint64), False)
    assert found.kind == "race" and "different widths" in str(found)
    assert check(kernel, 1, 2, np.zeros(1, np.uint64), True) == []


# ----------------------------------------------------------------------------- instructions that acquire or release
@cuda.jit
def instructions(x, o, counter, releases, acquires):
    """releases: "fence", "instruction", or "other": a fence of lane 1, and syncwarp. acquires: the same for block 1."""
    t = cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        x[t] = 1
        if (t == 0 and releases == 0) or (t == 1 and releases == 2):
            cuda.threadfence()
        cuda.syncwarp()
        if t == 0:
            if releases == 0:
                cuda.threadfence()
            if releases == 1:
                atomic_add_release(counter, 0, int64(1))
            else:
                cuda.atomic.add(counter, 0, 1)
    else:
        if t == 0:
            if acquires == 1:
                while load_acquire(counter, 0) == 0:
                    pass
            else:
                while cuda.atomic.add(counter, 0, 0) == 0:
                    pass
            if acquires == 0:
                cuda.threadfence()
        cuda.syncwarp()
        if t == 1:
            if acquires == 2:
                cuda.threadfence()
            o[0] = x[1]


@pytest.mark.parametrize("releases", range(3), ids=["fence", "instruction", "other"])
@pytest.mark.parametrize("acquires", range(3), ids=["fence", "instruction", "other"])
def test_an_instruction_orders_its_own_thread_only(releases, acquires):
    """Two fences order wherever they are; an instruction orders with a fence or an instruction in the threads of the atomics."""
    arrays = np.zeros(32, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64)
    found = {f.kind for f in check(instructions, 2, 32, *arrays, releases, acquires)}
    accepted = (releases, acquires) not in {(1, 2), (2, 1)}
    assert (found == set()) is accepted


def test_acquire_and_release_in_one_instruction():
    """The last block by atomic_add_in_order, as in kernels/primitives/last_block.py."""

    @cuda.jit
    def kernel(x, o, counter):
        last = cuda.shared.array(1, int32)
        x[cuda.grid(1)] = 1
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            last[0] = atomic_add_in_order(counter, 0, int32(1)) == cuda.gridDim.x - 1
        cuda.syncthreads()
        if last[0] and cuda.threadIdx.x == 1:
            for i in range(x.size):
                o[0] += x[i]

    o = np.zeros(1, np.int32)
    assert check(kernel, 3, 2, np.zeros(6, np.int32), o, np.zeros(1, np.int32)) == []
    assert o[0] == 6


def test_messages_say_what_to_do():
    def text(kernel, place, fences):
        grid, block, apart, _ = PLACES[place]
        arrays = np.zeros((3, 4), np.int32)
        fences = np.array([FENCES[f] for f in fences], np.int32)
        return str(check(kernel, grid, block, *arrays, apart, fences)[0])

    assert "no cuda.threadfence() precedes the atomic" in text(message_passing, "gpu", ["", "gpu"])
    late = text(message_passing, "block", ["gpu", ""])
    assert "call cuda.threadfence() between that atomic and this access" in late
    assert "barrier" not in late + text(message_passing, "block", ["", "gpu"])
    assert "read it by an atomic, too" in text(weak_flag, "block", [])
