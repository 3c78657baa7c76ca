"""Streams: work in no order, and the host before synchronize. Each mistake has a twin that is right."""

import contextlib

import numpy as np
import pytest
from numba import cuda

from xtrain.simulator import StreamError, simulate


@cuda.jit
def scale(y, x, factor):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] * factor


@cuda.jit
def fill(y, value):
    y[cuda.grid(1)] = value


@pytest.fixture(autouse=True)
def simulated():
    with simulate():
        yield


def pinned(n=8):
    h = cuda.pinned_array(n, np.float32)
    h[:] = np.arange(n)
    return h


def is_wrong(words: str):
    """The context of a mistake; "" for a twin."""
    if not words:
        return contextlib.nullcontext()
    return pytest.raises(StreamError, match=words)


READS = {
    "index": lambda h: h[3],
    "slice": lambda h: h[2:5].copy(),
    "function": lambda h: np.concatenate([h, h]),
    "ufunc": lambda h: h + 1,
    "sum": lambda h: h.sum(),
    "list": lambda h: h.tolist(),
    "loop": lambda h: [*h],
}


WAITS = ["no", "stream", "device", "event", "context", "auto", "query", "default"]
COPIES = [*((read, "no") for read in READS), *(("index", waits) for waits in WAITS[1:])]


@pytest.mark.parametrize(("read", "waits"), COPIES)
def test_the_host_reads_a_copy(read, waits):
    stream = cuda.stream()
    h = pinned()
    d = cuda.to_device(np.ones(8, np.float32))
    with stream.auto_synchronize() if waits == "auto" else contextlib.nullcontext():
        d.copy_to_host(h, stream=stream)
    event = cuda.event()
    event.record(stream)
    ways = {
        "stream": stream.synchronize,
        "device": cuda.synchronize,
        "event": event.synchronize,
        "context": cuda.current_context().synchronize,
        "query": event.query,
        "default": d.copy_to_host,  # waits for all streams
    }
    ways.get(waits, int)()
    with is_wrong("the host reads" * (waits == "no")):
        READS[read](h)


@pytest.mark.parametrize("wrong", [True, False])
def test_the_host_changes_what_a_copy_reads(wrong):
    stream, h = cuda.stream(), pinned()
    d = cuda.to_device(h, stream=stream)
    assert h[0] == 0  # both only read
    if not wrong:
        stream.synchronize()
    with is_wrong("the host writes to an array of float32.*copy to the device on stream" * wrong):
        h[0] = 5
    del d


@pytest.mark.parametrize("new", ["managed_array", "mapped_array"])
@pytest.mark.parametrize("wrong", [True, False])
def test_the_host_reads_what_a_kernel_writes(new, wrong):
    m = getattr(cuda, new)(8, np.float32)
    fill[1, 8](m, 3)
    if not wrong:
        cuda.synchronize()
    with is_wrong("the host reads .*kernel fill on the default stream" * wrong):
        assert m[0] == 3


def test_the_host_may_read_what_the_kernel_does_not_write():
    m = cuda.managed_array(8, np.float32)
    m[:] = 1
    fill[1, 4](m, 3)  # elements 0 to 3
    assert m[5] == 1 and (m[4:] == 1).all()
    with is_wrong("the host reads"):
        m[3:].copy()


def test_arrays_of_the_host_that_are_not_pinned_are_copied_at_once():
    stream = cuda.stream()
    y = np.zeros(8, np.float32)
    x = np.ones(8, np.float32)
    scale[1, 8, stream](y, x, 2)
    assert (y == 2).all()
    assert (cuda.to_device(x, stream=stream).copy_to_host(stream=stream) == 1).all()
    h = pinned()
    scale[1, 8, stream](h, cuda.In(x), 2)
    with is_wrong("the host reads"):
        h[0]


ORDERS = ["none", "event", "stream", "device", "default", "same stream", "other elements"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("second", ["kernel", "copy", "write"])
def test_work_on_two_streams(order, second):
    first = cuda.stream()
    other = cuda.stream()
    event = cuda.event()
    d, out = cuda.to_device(np.ones(8, np.float32)), cuda.device_array(8, np.float32)
    if order == "default":
        first = 0
    if order == "same stream":
        other = first
    fill[1, 4, first](d[4:] if order == "other elements" else d, 2)
    if order == "event":
        event.record(first)
        event.wait(other)
    elif order == "stream":
        first.synchronize()
    elif order == "device":
        cuda.synchronize()
    part = d[:4]
    with is_wrong("(reads|writes) an array.*which kernel fill on stream" * (order == "none")):
        if second == "kernel":
            scale[1, 4, other](out, part, 3)
        elif second == "copy":
            part.copy_to_host(stream=other)
        else:
            fill[1, 4, other](part, 3)


def test_two_streams_may_read_the_same():
    d = cuda.to_device(np.ones(8, np.float32))
    for _ in range(2):
        scale[1, 8, cuda.stream()](cuda.device_array(8, np.float32), d, 3)


def test_an_event_that_was_recorded_too_early():
    first = cuda.stream()
    other = cuda.stream()
    event = cuda.event()
    d = cuda.to_device(np.ones(8, np.float32))
    event.record(first)
    fill[1, 8, first](d, 2)
    event.wait(other)
    with is_wrong("writes an array"):
        fill[1, 8, other](d, 3)


def test_a_callback_knows_what_precedes_it():
    stream = cuda.stream()
    h = pinned()
    seen = []
    cuda.to_device(np.ones(8, np.float32)).copy_to_host(h, stream=stream)
    stream.add_callback(lambda *_: seen.append(h[0]))
    assert seen == [1]
    with is_wrong("the host reads"):
        h[0]


def test_memory_that_is_used_again_is_new():
    """The log keeps arrays of operations in flight alive, so that their addresses are theirs."""
    for _ in range(20):
        d = cuda.device_array(1000, np.float32)
        fill[1, 8, cuda.stream()](d, 1)
        del d


def test_a_finding_names_both_lines_and_can_be_allowed():
    stream, h = cuda.stream(), pinned()
    cuda.to_device(np.ones(8, np.float32)).copy_to_host(h, stream=stream)
    with is_wrong("access of the host before synchronize") as found:
        h[0]
    lines = [site.line for site in found.value.sites]
    assert lines[0] - lines[1] == 2 and found.value.kind == "stream"
    h[0]  # simulate: allow stream because the test waits elsewhere
    with simulate(allow=["stream"]):
        assert h[0] == 1
