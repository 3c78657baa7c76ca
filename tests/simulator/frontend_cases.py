"""A program under test, for numba and for numba-cuda-mlir: `FRONTEND=numba pytest --simulate-cuda frontend_cases.py`."""

import importlib
import math
import os

import numpy as np
import pytest

FRONTEND = os.environ["FRONTEND"]
cuda = importlib.import_module(f"{FRONTEND}.cuda")
types = importlib.import_module(f"{FRONTEND}.types")
float32, int32, syncthreads = types.float32, types.int32, cuda.syncthreads
BLOCK = 32


@cuda.jit(device=True)
def half(x):
    return x / float32(2)


@cuda.jit("int32(int32)", device=True)
def successor(n):
    return n + 1


@cuda.jit
def smooth(y, x):
    tile = cuda.shared.array(BLOCK, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    syncthreads()
    y[i] = half(tile[i] + tile[(i + 1) % BLOCK])


@cuda.jit
def smooth_without_barrier(y, x):
    tile = cuda.shared.array(BLOCK, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    y[i] = half(tile[i] + tile[(i + 1) % BLOCK])


@cuda.jit("void(int32[:], int32)")
def count(x, bins):
    i = cuda.grid(1)
    if i < 96:
        cuda.atomic.add(x, i % bins, successor(0))


@cuda.jit
def reverse(x):
    tile = cuda.shared.array(0, float32)
    tile[cuda.threadIdx.x] = x[cuda.threadIdx.x]
    cuda.syncthreads()
    x[cuda.threadIdx.x] = tile[cuda.blockDim.x - 1 - cuda.threadIdx.x]


@cuda.jit
def names(x):
    """What the simulator finds by name, by type or by identity."""
    i = cuda.grid(1)
    numbers = cuda.local.array(2, int32)
    numbers[0] = cuda.shfl_xor_sync(0xFFFFFFFF, i, 1)
    numbers[1] = cuda.popc(int32(7)) + cuda.warpsize
    numbers[1] += cuda.clz(int32(1)) + cuda.ffs(int32(4)) + cuda.brev(int32(0))
    numbers[1] += cuda.selp(i < 0, 1, int32(cuda.fma(1.0, 2.0, -2.0) + cuda.cbrt(0.0)))
    cuda.threadfence()
    pair = cuda.float32x2(float32(1), float32(4))
    x[i] = cuda.libdevice.rsqrtf(pair.y) + math.exp(float32(0)) + numbers[0] + numbers[1]


def test_device_arrays_a_stream_and_an_event():
    x = np.arange(BLOCK, dtype=np.float32)
    stream, event = cuda.stream(), cuda.event()
    d_x, d_y = cuda.to_device(x, stream=stream), cuda.device_array(BLOCK, np.float32)
    smooth[1, BLOCK, stream](d_y, d_x)
    event.record(stream)
    cuda.synchronize()
    np.testing.assert_array_equal(d_y.copy_to_host(), (x + np.roll(x, -1)) / 2)
    assert d_y[:4].shape == (4,) and cuda.is_available()


def test_a_missing_barrier_is_found():
    with pytest.raises(Exception, match=r"thread 0 reads tile\[1\]") as raised:
        smooth_without_barrier[1, BLOCK](cuda.device_array(BLOCK, np.float32), np.zeros(BLOCK))
    assert type(raised.value).__name__ == "UninitializedError"


def test_declared_signatures_atomics_and_forall():
    x = np.zeros(3, np.int32)
    count[2, 64](x, 3)
    assert x.tolist() == [32, 32, 32]
    count.forall(96)(x, np.int64(3))
    assert x.tolist() == [64, 64, 64]
    with pytest.raises(TypeError, match="No matching definition for argument type"):
        count[1, 1](x)


def test_host_arrays_and_dynamic_shared_memory():
    x = np.arange(64, dtype=np.float32)
    reverse[1, 64, 0, 64 * 4](x)
    reverse[1, 64, 0, 64 * 4](cuda.In(x))
    assert x.tolist() == list(range(64))[::-1]


def test_names():
    x = cuda.to_device(np.zeros(32))
    names[1, 32](x)
    assert x.copy_to_host().tolist() == [(i ^ 1) + 70.5 for i in range(32)]


def test_reduce():
    total = cuda.reduce(lambda a, b: a + b)
    assert total(np.arange(200.0)) == 19900
