"""PTX's litmus tests, as far as a run with one schedule can decide them: simulator/releases.py.

A litmus test asks what a thread may read. Here the accesses whose order it asks for are weak, and the simulator must say that
nothing orders them, or accept them. Each runs with and without each of its fences, in one warp, in one block and between blocks.
"""

import itertools

import numpy as np
import pytest
from numba import cuda, int32, int64

from xtrain.kernels.primitives.ptx import (
    atomic_add_acq_rel,
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
    """The last block by atomic_add_acq_rel, as in kernels/primitives/last_block.py."""

    @cuda.jit
    def kernel(x, o, counter):
        last = cuda.shared.array(1, int32)
        x[cuda.grid(1)] = 1
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            last[0] = atomic_add_acq_rel(counter, 0, int32(1)) == cuda.gridDim.x - 1
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


# ----------------------------------------------------------------------------- random programs
READ, WRITE, ATOMIC, FENCE, BLOCK_FENCE, RELEASE, ACQUIRE, BOTH = range(1, 9)
STEPS, ROUNDS, PROGRAMS = 4, 2, 60


@cuda.jit
def interpreter(x, o, flags, counter, code):
    """code[round, thread, step]: (operation, element). Element 0 or 1 of x; of flags or of counter for atomics."""
    t = cuda.grid(1)
    for r in range(ROUNDS):
        for i in range(STEPS):
            what, k = code[r, t, i, 0], code[r, t, i, 1]
            if what == READ:
                o[t] += x[k]
            elif what == WRITE:
                x[k] = 100 * r + 10 * t + i
            elif what == ATOMIC:
                cuda.atomic.add(flags, k, 1)
            elif what == FENCE:
                cuda.threadfence()
            elif what == BLOCK_FENCE:
                cuda.threadfence_block()
            elif what == RELEASE:
                atomic_add_release(counter, k, int64(1))
            elif what == ACQUIRE:
                load_acquire(counter, k)
            elif what == BOTH:
                atomic_add_acq_rel(flags, k, int32(1))
        cuda.syncthreads()


def unordered_conflict(code, blocks):
    """Do two weak accesses conflict that nothing orders? By the transitive closure of the rules in releases.py."""
    rounds, threads, steps, _ = code.shape
    size = threads // blocks
    events = [  # in the order in which they run
        (t // size, t, r, i, *map(int, code[r, t, i]))
        for b in range(blocks)
        for r in range(rounds)
        for t in range(b * size, (b + 1) * size)
        for i in range(steps)
    ]
    n = len(events)
    before = np.zeros((n, n), bool)
    for a, b in itertools.permutations(range(n), 2):
        (block, t, r, i, *_), (block2, t2, r2, i2, *_) = events[a], events[b]
        before[a, b] = (block == block2 and r < r2) or (t == t2 and (r, i) < (r2, i2))
    fences = [e for e in range(n) if events[e][4] in (FENCE, BLOCK_FENCE)]

    def reach(a, b):
        """Do the scopes of two fences or instructions include each other's thread?"""
        return events[a][0] == events[b][0] or BLOCK_FENCE not in (events[a][4], events[b][4])

    def chain(e):
        return {ATOMIC: "flags", BOTH: "flags", RELEASE: "counter", ACQUIRE: "counter"}.get(
            events[e][4]
        )

    pairs = [
        (x, y)
        for x, y in itertools.combinations(range(n), 2)
        if chain(x) and chain(x) == chain(y) and events[x][5] == events[y][5]
        if events[x][4] != ACQUIRE and events[x][1] != events[y][1]
    ]
    while True:
        size_before = before.sum()
        for x, y in pairs:
            own = [f for f in fences if before[f, x] and events[f][1] == events[x][1]]
            own += [x] * (events[x][4] in (RELEASE, BOTH))
            mine = [f for f in fences if before[y, f] and events[f][1] == events[y][1]]
            mine += [y] * (events[y][4] in (ACQUIRE, BOTH))
            edges = [*itertools.product(own, mine)]
            edges += itertools.product(
                [f for f in fences if before[f, x]], [f for f in fences if before[y, f]]
            )
            for a, b in edges:
                if reach(a, b):
                    before[a, b] = True
        for k in range(n):
            before |= before[:, k, None] & before[k]
        if before.sum() == size_before:
            break
    return any(
        events[a][5] == events[b][5] and events[a][1] != events[b][1] and not before[a, b]
        for a, b in itertools.combinations(range(n), 2)
        if {events[a][4], events[b][4]} <= {READ, WRITE} and WRITE in (events[a][4], events[b][4])
    )


def test_random_programs_have_findings_exactly_if_a_conflict_is_unordered():
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(PROGRAMS):
        blocks = int(rng.integers(1, 3))
        code = np.zeros((ROUNDS, 4, STEPS, 2), np.int32)
        code[..., 1] = rng.integers(0, 2, code.shape[:3])
        p = [3, 1, 1, 4, 4, 1, 1, 1, 1]
        code[..., 0] = rng.choice(9, code.shape[:3], p=np.array(p) / sum(p))
        arrays = np.zeros(2, np.int32), np.zeros(4, np.int32), np.zeros(2, np.int32)
        found = check(interpreter, blocks, 4 // blocks, *arrays, np.zeros(2, np.int64), code)
        expected = unordered_conflict(code, blocks)
        assert bool(found) == expected, (blocks, code.tolist(), [str(f) for f in found])
        outcomes.append(expected)
    assert 0.2 < np.mean(outcomes) < 0.8
