"""Caches of device memory that threads share: maps and counters. What maps hold: attention/test_flash_attention_hopper.py"""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from xtrain.kernels.primitives import last_block, tma


class Uploaded(np.ndarray):
    """Memory of a GPU."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which everything is being captured. -> an array on it"""
    stream = SimpleNamespace(ptr=1, is_capturing=lambda: True)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))

    def upload(content):
        time.sleep(0.02)  # other threads run now
        return np.frombuffer(content, np.uint64).copy().view(Uploaded)

    for module in (tma, last_block):
        monkeypatch.setattr(module, "cupy", lambda: cupy)
        monkeypatch.setattr(module, "upload", upload)
        monkeypatch.setattr(module, "_counters", {})
    for name in ("_captured", "_evictable"):
        monkeypatch.setattr(tma, name, {})
    monkeypatch.setattr(tma, "_encode", lambda spec: bytes(128))
    monkeypatch.setattr(tma, "_spec", lambda x, size: size)
    return SimpleNamespace(device=SimpleNamespace(id=0))


def in_threads(work):
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda _: work(), range(8)))


def test_maps_in_a_graph_are_those_that_are_kept(gpu):
    """Threads that capture the same array get one set of maps, which is never freed."""
    found = in_threads(lambda: tma.tensor_maps((gpu, 64)))
    (kept,) = tma._captured.values()
    assert all(maps is kept for maps in found) and not tma._evictable


def test_counters_in_a_graph_are_those_that_are_kept(gpu):
    for work, kept in (
        (lambda: tma.tile_counter(gpu, "kernel"), tma._counters),
        (lambda: last_block.zero_counters(gpu, 9, "kernel"), last_block._counters),
    ):
        found = in_threads(work)
        assert len(kept) == 1 and all(zeros is found[0] for zeros in found) and not found[0].any()


def test_arrays_of_numpy_are_refused():
    """The simulator takes SimArrays, the GPU CuPy's arrays."""
    x = np.ones((1, 64, 1, 64), np.float32)
    message = r"^{}: got an array of NumPy, expected one on a GPU: in the simulator, give"
    with pytest.raises(TypeError, match=message.format("tensor_maps")):
        tma.tensor_maps((x, 64))
    with pytest.raises(TypeError, match=message.format("zero_counters")):
        last_block.zero_counters(x, 1, "kernel")
