"""_overlap.py: what the driver is handed. The layout is that of CUlaunchConfig in CUDA 13's cuda.h, on 64 bits."""

import ctypes

import numpy as np
import pytest
from checks import normal, to_host, to_kernel

from xtrain.kernels import _launch, _overlap
from xtrain.kernels.gemv import gemv


def test_the_driver_gets_what_it_expects(monkeypatch):
    seen = {}

    def start(config, function, parameters, extra):
        raw = ctypes.string_at(ctypes.addressof(config._obj), 56)
        numbers, (stream, attributes, count) = (
            np.frombuffer(raw, np.uint32, 7),
            np.frombuffer(raw[32:], np.uint64),
        )
        attribute = np.frombuffer(ctypes.string_at(int(attributes), 72), np.int32)
        seen.update(numbers=numbers.tolist(), stream=int(stream), count=int(count) & 0xFFFFFFFF)
        seen.update(kind=attribute[0], value=attribute[2], rest=(function, parameters, extra))
        return 0

    attribute = _overlap._Attribute(_overlap.PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    monkeypatch.setattr(_overlap, "_driver", lambda: (start, attribute))
    _overlap.launch_overlapping(11, (2, 3, 4), (32, 5, 6), 7, 0xABC, 99)
    assert seen["numbers"] == [2, 3, 4, 32, 5, 6, 7]
    assert (seen["stream"], seen["count"]) == (0xABC, 1)
    assert (seen["kind"], seen["value"], seen["rest"]) == (6, 1, (11, 99, None))
    assert ctypes.sizeof(_overlap._Config) == 56 and ctypes.sizeof(_overlap._Attribute) == 72


@pytest.mark.parametrize("ready", [False, True])
def test_the_same_bits_without_overlap(ready):
    x, w = to_kernel(normal(1, 2, 64)), to_kernel(normal(2, 20, 64))
    with_overlap = to_host(gemv(x, w, weights_ready=ready))
    _launch.set_overlap(False)
    try:
        assert not _launch.can_overlap(x)
        assert np.array_equal(to_host(gemv(x, w, weights_ready=ready)), with_overlap)
    finally:
        _launch.set_overlap(True)
