"""A recording restores the order of a GPU: lanes in lockstep, intervals between barriers, the place of an error."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda, float32

from xtrain.kernels.primitives.ptx import atomic_add_release
from xtrain.kernels.rmsnorm import rmsnorm_fwd
from xtrain.simulator import KernelError, RaceError, Stepper, UninitializedError, record, run, sim
from xtrain.simulator.observers import Observer, observe


@cuda.jit(device=True)
def sum_of_run(x, first, n):
    total = float32(0.0)
    for i in range(n):
        total += x[first + i]
    return total


@cuda.jit
def runs_kernel(y, x, lengths):
    """Every lane sums a run of another length, twice: nested loops whose inner trip count differs."""
    t = cuda.threadIdx.x
    for k in range(2):
        y[k, t] = sum_of_run(x, t, lengths[t])


@cuda.jit
def block_sum_kernel(y, x):
    s = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    cuda.syncthreads()
    step = 32
    while step > 0:
        if t < step:
            s[t] += s[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        y[0] = s[0]


@cuda.jit
def neighbour_kernel(y, x):
    s = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    cuda.syncthreads()
    s[t] = s[(t + 1) % 64]
    y[t] = s[t]


@cuda.jit
def half_wait_kernel(y, x):
    t = cuda.threadIdx.x
    y[t] = x[t]
    if t < 10:
        cuda.syncthreads()


def ones(*shape):
    return sim(np.ones(shape, np.float32))


def lines(recording):
    """[(time, warp, how, lanes)] of a recording"""
    return [(s.time, s.warp, s.event.how, len(s.lanes)) for s in recording.steps()]


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_lanes_meet_again_after_loops_of_different_lengths(lengths):
    n = len(lengths)
    x, y = ones(n + 4), sim(np.zeros((2, n), np.float32))
    recording = record(runs_kernel, 1, n, y, x, sim(np.array(lengths, np.int32)))
    assert recording.error is None
    for w in range(-(-n // 32)):
        mine = lengths[32 * w : 32 * w + 32]
        each = [len(mine), *(sum(m > i for m in mine) for i in range(max(mine))), len(mine)]
        assert [lanes for _, warp, _, lanes in lines(recording) if warp == w] == each * 2
    np.testing.assert_array_equal(y, [lengths, lengths])


def test_every_thread_has_its_own_order():
    recording = record(block_sum_kernel, 1, 64, ones(1), ones(64))
    for thread, events in enumerate(recording.events):
        mine = [
            (s.event.how, lane[1])
            for s in recording.steps()
            for lane in s.lanes
            if lane[0] == thread
        ]
        assert mine == [(e.how, e.elements) for e in events]  # fmt: skip


def test_warps_leave_a_barrier_together():
    recording = record(block_sum_kernel, 1, 64, ones(1), ones(64))
    met = [(s.time, s.warp) for s in recording.steps() if s.event.how == "syncthreads"]
    times = [time for time, _ in met]
    assert len(met) == 14 and times[::2] == times[1::2] and len(set(times)) == 7
    first = times[0]
    assert [(how, n) for time, _, how, n in lines(recording) if time > first][:3] == [("read", 32)] * 2 + [("write", 32)]  # fmt: skip
    assert recording.steps()[-1].lanes == [(0, [0], [np.float32(64.0)])]


def test_a_race_keeps_the_accesses_of_both_threads():
    recording = record(neighbour_kernel, 1, 64, ones(64), ones(64))
    assert isinstance(recording.error, RaceError | UninitializedError)
    thread = recording.error.thread
    last = recording.events[thread][-1]
    assert recording.arrays[last.array].name == "s"
    others = [e for t, events in enumerate(recording.events) if t != thread for e in events if e.array == last.array]  # fmt: skip
    assert last.how == "write"
    assert {e.how for e in others if last.elements[0] in e.elements} == {"read"}
    assert all(recording.events)  # the threads after the one with the error ran too


def test_a_deadlock_shows_who_waits():
    recording = record(half_wait_kernel, 1, 64, ones(64), ones(64))
    waits = [s for s in recording.steps() if s.event.how == "waits"]
    assert [lane[0] for s in waits for lane in s.lanes] == list(range(10))
    assert all("syncthreads" in text for text in recording.ended[:10])
    assert not any(recording.ended[10:])


@cuda.jit
def late_kernel(y, x):
    i = cuda.grid(1)
    y[i] = x[i]
    if cuda.blockIdx.x == 2:
        y[i + 64] = x[i]


def test_which_block_is_recorded():
    at = lambda recording: tuple(map(int, recording.position))
    y, x = ones(256), ones(256)
    assert at(record(late_kernel, 3, 64, y, x)) == (0, 0, 0)
    assert at(record(late_kernel, 3, 64, y, x, of=(1,))) == (1, 0, 0)
    failed = record(late_kernel, 3, 64, ones(192), x)  # block 2 writes past the end
    assert failed.error is not None and at(failed) == (2, 0, 0)
    assert failed.events[0][-1].elements == [128]  # the failing access has no element


def test_16_byte_accesses_and_bf16():
    rng = np.random.default_rng(0)
    x = sim(rng.standard_normal((1, 64)).astype(ml_dtypes.bfloat16))
    recording = Stepper()
    with observe(recording):
        rmsnorm_fwd(x, sim(np.ones(64, ml_dtypes.bfloat16)), 1e-6)
    reads = [e for events in recording.events for e in events if e.array >= 0 and recording.arrays[e.array].name == "x"]  # fmt: skip
    assert {len(e.elements) for e in reads} == {8}
    assert reads[0].values == list(np.asarray(x[0, :8], np.float32))


@cuda.jit(device=True)
def fill(tile, t):
    tile[t] = float32(1.0)


@cuda.jit
def two_tiles_kernel(y):
    a, b = cuda.shared.array(32, float32), cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    fill(a, t)
    fill(b, t)
    y[t] = a[t] + b[t]


def test_shared_arrays_have_the_names_of_the_kernel():
    recording = record(two_tiles_kernel, 1, 32, ones(32))
    assert [place.name for place in recording.arrays] == ["a", "b", "y"]


def test_an_observer_changes_nothing():
    class Count(Observer):
        n = 0

        def access(self, thread, array, k, site, how, value):
            self.n += 1

    results = []
    for observers in (0, 2):
        y, x = sim(np.zeros(1, np.float32)), sim(np.arange(64, dtype=np.float32))
        counts = [Count() for _ in range(observers)]
        with observe(counts[0] if counts else Count()), observe(counts[-1] if counts else Count()):
            run(block_sum_kernel, 1, 64, y, x)
        results.append(y[0])
        assert len({c.n for c in counts}) <= 1
    assert results == [2016.0, 2016.0]
    with pytest.raises(KernelError), observe(Count()):
        run(neighbour_kernel, 1, 64, ones(64), ones(64))


def test_a_long_recording_is_cut(monkeypatch):
    monkeypatch.setattr("xtrain.simulator.recording.MOST_EVENTS", 100)
    recording = record(block_sum_kernel, 1, 64, ones(1), ones(64))
    assert recording.cut and sum(map(len, recording.events)) == 100
    assert not record(late_kernel, 1, 32, ones(256), ones(256)).cut


POINT = np.dtype([("n", np.int32), ("x", np.float32)])


@cuda.jit
def adds_to_a_record(r, points):
    r.n += 1
    points[cuda.threadIdx.x].x = r.n


def test_a_kernel_of_records_is_recorded():
    record_of_one = np.zeros(1, POINT)[0]
    points = np.zeros(1, POINT)
    recording = record(adds_to_a_record, 1, 1, record_of_one, points)
    assert recording.error is None and record_of_one["n"] == points["x"][0] == 1


@cuda.jit
def releases_a_count(count):
    atomic_add_release(count, 0, 2)


def test_a_releasing_atomic_is_recorded():
    count = np.zeros(1, np.int64)
    recording = record(releases_a_count, 1, 3, count)
    assert recording.error is None and count[0] == 6
    assert [[e.how for e in events] for events in recording.events] == [["atomic"]] * 3
