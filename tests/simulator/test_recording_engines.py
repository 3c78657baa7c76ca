"""A recording shows what the asynchronous engines do: copies, products, mbarriers, and the step at which two of them race."""

import itertools

import ml_dtypes
import numpy as np
from numba import cuda, float32

from xtrain.kernels.primitives.hopper import (
    acquire_map,
    along_rows,
    bar_sync,
    fence_proxy_async,
    load_floats,
    make_descriptor,
    make_wgmma,
    make_wgmma_wait,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    shared_base,
    store_shared,
    tma_load,
    tma_load_row,
    tma_store,
    tma_store_commit,
    tma_store_wait,
)
from xtrain.kernels.primitives.tma import tensor_maps
from xtrain.simulator import AsyncError, DeadlockError, KernelError, record, run, sim
from xtrain.simulator.observers import Observer, observe

SLOTS, SLICES, X_BYTES, W_BYTES = 2, 3, 64 * 64 * 2, 8 * 64 * 2
SLOT, SLOT_0 = X_BYTES + W_BYTES, 1024
SHARED = SLOT_0 + SLOTS * SLOT
FULL, FREE = 0, 8 * SLOTS
STEPS = along_rows(64, X_BYTES)
multiply, wait_for_product = make_wgmma(8, STEPS, STEPS, accumulate=True), make_wgmma_wait(8, 0)
describe = make_descriptor(X_BYTES)


def make_ring(wait_full=True, early=False, expected=SLOT):
    """-> a kernel: y (64, 8) = x w^T by slices of 64 columns. Thread 128 copies, the others multiply.

    wait_full: wait for the copies. early: give a slot back before the product has read it. expected: bytes of a slot.
    """
    WAIT_FULL, EARLY, EXPECTED = wait_full, early, expected

    @cuda.jit
    def ring_kernel(y, maps):
        acc = cuda.local.array(4, float32)
        base, thread = shared_base(), cuda.threadIdx.x
        if thread == 0:
            for slot in range(SLOTS):
                mbarrier_init(base + FULL + 8 * slot, 1)
                mbarrier_init(base + FREE + 8 * slot, 4)
            mbarrier_init_fence()
        cuda.syncthreads()
        if thread == 128:
            acquire_map(maps, 0)
            acquire_map(maps, 1)
            for i in range(SLICES):
                slot = i % SLOTS
                full, x = base + FULL + 8 * slot, base + SLOT_0 + SLOT * slot
                mbarrier_wait(base + FREE + 8 * slot, (i // SLOTS + 1) % 2)
                mbarrier_arrive_expect_tx(full, EXPECTED)
                tma_load(x, maps, 0, full, 64 * i, 0, 0, 0)
                tma_load(x + X_BYTES, maps, 1, full, 64 * i, 0, 0, 0)
        elif thread < 128:
            for j in range(4):
                acc[j] = float32(0.0)
            for i in range(SLICES):
                slot = i % SLOTS
                x = base + SLOT_0 + SLOT * slot
                if WAIT_FULL:
                    mbarrier_wait(base + FULL + 8 * slot, i // SLOTS % 2)
                multiply(acc, describe(x), describe(x + X_BYTES))
                if EARLY:
                    mbarrier_arrive(base + FREE + 8 * slot)
                wait_for_product(acc)
                if not EARLY:
                    mbarrier_arrive(base + FREE + 8 * slot)
            row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
            for j in range(4):
                y[row + 8 * (j // 2), column + j % 2] = acc[j]

    return ring_kernel


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def ring(**planted):
    """-> a recording of the ring kernel, x, w, y"""
    x, w = (sim(normal(rows, 1, rows, 1, 64 * SLICES)) for rows in (64, 8))
    y = sim(np.zeros((64, 8), np.float32))
    recording = record(make_ring(**planted), 1, 160, y, tensor_maps((x, 64), (w, 8)), shared=SHARED)
    return recording, x[0, :, 0], w[0, :, 0], y


def of(recording, how, engine=""):
    """The steps of this kind."""
    return [s for s in recording.steps() if (s.event.how, s.event.engine) == (how, engine)]


def nbytes(step):
    """-> the first byte and the end of the shared memory that a step touches, which is contiguous"""
    words = sorted(step.event.elements)
    assert words == list(range(words[0], words[-1] + 1))
    return 4 * words[0], 4 * words[-1] + 4


SLOT_BYTES = [(SLOT_0 + SLOT * (i % SLOTS), SLOT_0 + SLOT * (i % SLOTS + 1)) for i in range(SLICES)]


def test_copies_and_products_have_their_bytes():
    recording, x, w, y = ring()
    assert recording.error is None
    np.testing.assert_allclose(y, x.astype(np.float32) @ w.astype(np.float32).T, atol=1e-4)
    copies = of(recording, "write", "TMA")
    assert [[thread for thread, *_ in s.lanes] for s in copies] == [[128]] * 2 * SLICES
    pairs = zip(map(nbytes, copies[::2]), map(nbytes, copies[1::2]))
    assert [(x[0], w[1]) for x, w in pairs if x[1] == w[0]] == SLOT_BYTES
    products = of(recording, "read", "wgmma")
    assert [nbytes(s) for s in products] == [b for b in SLOT_BYTES for _ in range(4)]
    assert [s.warp for s in products] == [0, 1, 2, 3] * SLICES
    assert all(len(s.lanes) == 32 for s in products)
    assert [place.kind for place in recording.arrays] == ["bytes", "global"]


def test_every_access_ends_once_and_in_order():
    recording, *_ = ring()
    steps = recording.steps()
    begun = {s.event: s.time for s in steps if s.event.elements and s.event.engine}
    ends = {access: s.time for s in steps for access in s.event.ended}
    assert len(begun) == 2 * SLICES + 4 * SLICES and begun.keys() == ends.keys()
    assert all(begun[access] < ends[access] for access in begun)
    endings = [s for s in steps if s.event.ended]
    assert {s.warp for s in endings} == {-1} and not any(s.lanes for s in endings)
    for s in (
        endings
    ):  # a slot's product begins after its copies have ended, its next copy after the product
        for access in s.event.ended:
            words = {*access.elements}
            kind = {"TMA": "wgmma", "wgmma": "TMA"}[access.engine]
            later = [t for e, t in begun.items() if e.engine == kind and words & {*e.elements} and t > begun[access]]  # fmt: skip
            assert all(t > s.time for t in later)


def test_a_copy_is_in_flight_while_a_product_reads_the_other_slot():
    recording, *_ = ring()
    steps = recording.steps()
    ends = {access: s.time for s in steps for access in s.event.ended}
    flights = [(s.event, s.time, ends[s.event]) for s in steps if s.event in ends]
    together = [
        (a, b) for (a, t, u), (b, v, w) in itertools.product(flights, flights)
        if (a.engine, b.engine) == ("TMA", "wgmma") and t < w and v < u
    ]  # fmt: skip
    assert together and not any({*a.elements} & {*b.elements} for a, b in together)


def test_waits_have_their_phase_and_come_after_what_completes_it():
    recording, *_ = ring()
    steps = recording.steps()
    waits = [s for s in steps if s.event.phase is not None]
    assert [(s.event.mbarrier[0], s.event.phase, len(s.lanes)) for s in waits if s.warp == 4] == [
        (FREE, -1, 1), (FREE + 8, -1, 1), (FREE, 0, 1),
    ]  # fmt: skip
    assert [(s.event.mbarrier[0], s.event.phase, len(s.lanes)) for s in waits if s.warp == 0] == [
        (FULL, 0, 32), (FULL + 8, 0, 32), (FULL, 1, 32),
    ]  # fmt: skip
    state = {}  # byte -> [arrivals of a phase, arrivals and bytes missing, phases complete]
    for s in steps:
        if s.event.phase is not None:
            assert state[s.event.mbarrier[0]][3] > s.event.phase
        elif s.event.mbarrier:
            byte, arrivals, more = s.event.mbarrier
            now = state.setdefault(byte, [arrivals, 0, 0, 0])
            now[1], now[2] = now[1] + arrivals, now[2] + more
            if now[1] == now[2] == 0:
                now[1], now[3] = now[0], now[3] + 1
    assert {byte: phases for byte, (*_, phases) in state.items()} == {0: 2, 8: 1, 16: 2, 24: 1}


def test_a_slot_overwritten_while_a_product_reads_it():
    recording, *_ = ring(early=True)
    error = recording.error
    assert isinstance(error, AsyncError) and error.thread == 128
    last = recording.events[128][-1]
    assert (last.how, last.engine, 4 * last.elements[0]) == ("write", "TMA", SLOT_0)
    product = of(recording, "read", "wgmma")[0]
    assert error.sites == (product.event.site, last.site)
    assert not any(product.event in s.event.ended for s in recording.steps())  # it is in flight
    assert of(recording, "write", "TMA")[-1].time > product.time


def test_a_product_of_a_slot_that_a_copy_still_writes():
    recording, *_ = ring(wait_full=False)
    assert isinstance(recording.error, AsyncError | KernelError) and recording.error.thread == 0
    assert recording.events[0][-1].engine == "wgmma"
    products = of(recording, "read", "wgmma")
    assert [len(s.lanes) for s in products] == [32] * 4  # all lanes of the warpgroup


def test_a_wait_for_bytes_that_do_not_come():
    recording, *_ = ring(expected=SLOT + 16)
    assert isinstance(recording.error, DeadlockError)
    waits = [s for s in recording.steps() if s.event.how == "waits"]
    assert sum(len(s.lanes) for s in waits) == 129


@cuda.jit
def row_kernel(y, maps):
    """Thread 0 copies a row of 32 numbers; each thread reads two of them, thread 1 without waiting."""
    pair = cuda.local.array(2, float32)
    base, t = shared_base(), cuda.threadIdx.x
    if t == 0:
        mbarrier_init(base, 1)
        mbarrier_init_fence()
    cuda.syncthreads()
    if t == 0:
        acquire_map(maps, 0)
        mbarrier_arrive_expect_tx(base, 128)
        tma_load_row(base + 128, maps, 0, base, 0, 0)
    if t != y.size:  # y has 16 elements, or one: then thread 1 does not wait
        mbarrier_wait(base, 0)
    load_floats(pair, base + 128 + 8 * t)
    if y.size > 1:
        y[t] = pair[0] + pair[1]


def test_a_thread_reads_what_a_copy_has_brought():
    x = sim(np.arange(32, dtype=np.float32).reshape(1, 32))
    y = sim(np.zeros(16, np.float32))
    recording = record(row_kernel, 1, 16, y, tensor_maps((x, 32)), shared=256)
    assert recording.error is None
    np.testing.assert_array_equal(y, np.arange(1, 64, 4))
    (read,) = of(recording, "read")
    assert [elements for _, elements, _ in read.lanes] == [[32 + 2 * t, 33 + 2 * t] for t in range(16)]  # fmt: skip
    (ending,) = of(recording, "TMA ends", "TMA")
    assert ending.time < read.time


def early_row_read():
    """-> a recording in which thread 1 reads a row that a copy still writes"""
    x, y = sim(np.zeros((1, 32), np.float32)), sim(np.zeros(1, np.float32))
    return record(row_kernel, 1, 16, y, tensor_maps((x, 32)), shared=256)


def test_a_thread_reads_before_the_copy_has_ended():
    recording = early_row_read()
    assert isinstance(recording.error, AsyncError) and recording.error.thread == 1
    (copy,) = of(recording, "write", "TMA")
    last = recording.events[1][-1]
    assert (last.how, last.engine, last.elements) == ("read", "", [34, 35])
    assert recording.error.sites == (copy.event.site, last.site)
    assert not of(recording, "TMA ends", "TMA")


@cuda.jit
def out_kernel(maps):
    """64 threads write a tile of 8 rows of 64 zeros. Thread 0 copies it to global memory."""
    base, t = shared_base(), cuda.threadIdx.x
    for i in range(4):
        store_shared(base + 4 * (t + 64 * i), 0)
    fence_proxy_async()
    bar_sync(1, 64)
    if t == 0:
        acquire_map(maps, 0)
        tma_store(maps, 0, base, 0, 0, 0, 0)
        tma_store_commit()
        tma_store_wait()


def test_a_copy_to_global_memory_reads_until_its_thread_has_waited():
    y = sim(normal(0, 1, 8, 1, 64))
    recording = record(out_kernel, 1, 64, tensor_maps((y, 8)), shared=1024)
    assert recording.error is None and not y.any()
    (copy,), (ending,) = of(recording, "read", "TMA"), of(recording, "tma_store_wait")
    assert nbytes(copy) == (0, 1024)
    assert ending.event.ended == [copy.event] and ending.lanes[0][0] == 0
    meeting = of(recording, "bar_sync")
    assert [(s.warp, len(s.lanes)) for s in meeting] == [(0, 32), (1, 32)]
    assert len({s.time for s in meeting}) == 1
    assert max(s.time for s in of(recording, "write")) < meeting[0].time < copy.time < ending.time


def test_a_recording_that_is_cut_has_no_ends_of_what_it_does_not_show(monkeypatch):
    monkeypatch.setattr("xtrain.simulator.recording.MOST_EVENTS", 150)
    recording, *_ = ring()
    shown = {s.event for s in recording.steps()}
    assert recording.cut and {a for s in recording.steps() for a in s.event.ended} <= shown


def test_observers_change_no_result():
    x, w = (sim(normal(rows, 1, rows, 1, 64 * SLICES)) for rows in (64, 8))
    results = []
    for observers in (0, 2):
        y = sim(np.zeros((64, 8), np.float32))
        with observe(Observer()):
            for _ in range(observers):
                run(make_ring(), 1, 160, y, tensor_maps((x, 64), (w, 8)), shared=SHARED)
        run(make_ring(), 1, 160, y, tensor_maps((x, 64), (w, 8)), shared=SHARED)
        results.append(y.copy())
    np.testing.assert_array_equal(*results)
