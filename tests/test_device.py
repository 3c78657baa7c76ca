"""Finding the device, and moving arrays to it and back."""

import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from xtrain import UserError, device
from xtrain.simulator import SimArray


def test_resolve_device():
    here = "gpu" if device.gpu_available() else "cpu"
    assert device.resolve_device("auto") == here and device.resolve_device("cpu") == "cpu"
    for wrong in ("tpu", "", "GPU"):
        with pytest.raises(
            UserError, match=f"device '{wrong}' is not known: choose auto, cpu or gpu"
        ):
            device.resolve_device(wrong)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(device, "gpu_available", lambda: False)
    assert device.resolve_device("auto") == "cpu"
    for name in ("gpu", "cuda"):
        with pytest.raises(
            UserError, match=r"no usable GPU.*nvidia-smi.*pip install -e '.\[gpu\]'.*cpu"
        ):
            device.resolve_device(name)


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it fails
    device._usable_cupy.cache_clear()
    try:
        assert device.cupy() is None and not device.gpu_available()
    finally:
        device._usable_cupy.cache_clear()


def test_weights_that_do_not_fit_are_refused_before_they_are_written(monkeypatch):
    """Linux grants more memory than it has: np.zeros does not fail."""
    monkeypatch.setattr(device, "free_memory", lambda: 100 << 20)
    assert device.zeros_on("cpu", 20 << 20, np.float32).nbytes == 80 << 20
    for shape in (30 << 20, (3, 10 << 20)):
        with pytest.raises(MemoryError, match=r"Unable to allocate 0\.13 GB, 0\.10 GB are free"):
            device.zeros_on("cpu", shape, np.float32)
    monkeypatch.setattr(device, "free_memory", lambda: None)
    device.zeros_on("cpu", 30 << 20, np.float32)


def test_the_cpu():
    x = np.arange(3)
    assert device.to_device(x, "cpu") is x and device.to_numpy(x) is x
    assert device.array_module(x) is np and not device.is_gpu(x)
    assert device.device_name("cpu") == "CPU (NumPy)" and device.memory_peak_bytes("cpu") is None
    device.synchronize("cpu")


def test_the_simulator():
    x = np.arange(3.0)
    there = device.to_device(x, "sim")
    assert type(there) is SimArray and not np.shares_memory(x, there)
    assert device.array_module(there) is np and not device.is_gpu(there)


def test_scalars_become_arrays():
    x = np.ones(3)
    assert device.as_array(x) is x
    for value in (np.float32(2), 2.0, [2.0], np.ones(3).sum()):
        assert isinstance(device.as_array(value), np.ndarray)
    assert device.as_array(np.float32(2)).dtype == np.float32


@pytest.mark.gpu
def test_the_gpu():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    there = device.to_device(x, "gpu")
    assert device.is_gpu(there) and device.array_module(there) is device.cupy()
    assert device.as_array(there) is there
    assert np.array_equal(device.to_numpy(there), x)
    device.synchronize("gpu")
    assert device.memory_peak_bytes("gpu") >= x.nbytes and device.device_name("gpu")


def test_copies_in_host_memory():
    """They do not change with the array, and the buffer of a name is reused."""
    copies = device.HostCopies()
    x = np.arange(5, dtype=np.float32)
    first = copies("a", x)
    copies.event()()
    x += 1
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert copies("a", x) is first and first.tolist() == [1, 2, 3, 4, 5]
    assert copies("b", x) is not first
    assert copies("a", np.zeros(3, np.int32)).shape == (3,)


def test_copies_from_a_gpu(monkeypatch):
    """Page-locked memory, an asynchronous copy, and an event after it on the same stream. (With a fake CuPy.)"""
    asked = []

    class OnGpu:
        shape, dtype = (4,), np.dtype(np.float32)

        def get(self, out, blocking):
            asked.append(("copy", blocking))
            out[...] = 7

    class Event:
        def synchronize(self):
            asked.append("wait")

    def pinned(shape, dtype):
        asked.append("page-locked")
        return np.empty(shape, dtype)

    stream = SimpleNamespace(record=lambda: asked.append("event") or Event())
    fake = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setattr(device, "cupy", lambda: fake)
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=pinned))
    copies = device.HostCopies()
    for _ in range(2):
        x = copies("w", OnGpu())
        wait = copies.event()
    wait()
    assert x.tolist() == [7] * 4
    assert asked == ["page-locked", ("copy", False), "event", ("copy", False), "event", "wait"]


# ----------------------------------------------------------------------------- the pool of a CUDA graph
class Full(Exception):
    status = device.OUT_OF_MEMORY


def test_a_full_gpu_frees_no_block_of_a_graph(monkeypatch):
    """When the GPU is full, CuPy's pool frees its unused blocks and tries again. A graph's pool must not."""
    calls, room = [], [100]

    def allocate(size):
        if size > room[0]:
            raise Full
        return size

    def default_frees():
        calls.append("the default pool frees")
        room[0] += 50

    class Pool:
        total_bytes = None

        def __init__(self, allocator):
            self.allocator = allocator

        def malloc(self, size):
            try:
                return self.allocator(size)
            except Full:
                self.free_all_blocks()
                return self.allocator(size)

        def free_all_blocks(self):
            calls.append("the pool frees")
            room[0] += 50

        def set_limit(self, size):
            assert size == 0

    cuda = SimpleNamespace(
        MemoryPool=Pool, Memory=allocate, MemoryPointer=lambda memory, offset: memory,
        runtime=SimpleNamespace(CUDARuntimeError=Full),
    )  # fmt: skip
    default = SimpleNamespace(free_all_blocks=default_frees)
    fake = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: default)
    monkeypatch.setattr(device, "cupy", lambda: fake)
    pool = device.PrivatePool()
    assert pool.malloc(100) == 100 and pool.malloc(150) == 150
    assert calls == ["the pool frees"]
    pool.keep()
    assert pool.malloc(200) == 200 and calls[1:] == ["the default pool frees"]
    with pytest.raises(
        MemoryError, match="Out of memory allocating 1,000 bytes next to a CUDA graph"
    ):
        pool.malloc(1000)
    assert calls[2:] == ["the default pool frees"]
    gone = weakref.ref(pool)
    del pool
    assert gone() is None, "no other reference exists"
