"""runtime/overlap.py: the arguments of the driver call, and the rules that overlapping kernels must obey."""

import functools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from checks import normal, to_host, to_kernel

from xtrain import simulator
from xtrain.kernels.cast import cast_fwd
from xtrain.kernels.decoding.gemv import gemv
from xtrain.kernels.primitives.ptx import let_next_start, wait_for_previous
from xtrain.kernels.runtime import launch as _launch
from xtrain.kernels.runtime import overlap as _overlap
from xtrain.kernels.runtime.compiler import cuda, float32
from xtrain.simulator import KernelError, RaceError, sim

BF16 = ml_dtypes.bfloat16


def test_the_driver_gets_what_it_expects(monkeypatch):
    """cuda.bindings replaced by plain objects: the launch, and an error of the driver as an exception."""
    seen, status = [], [0]

    def launch(config, function, parameters, extra):
        seen.append((vars(config), function, parameters, extra))
        return (status[0],)

    class Failed(RuntimeError):
        pass

    driver = SimpleNamespace(CUlaunchConfig=SimpleNamespace, cuLaunchKernelEx=launch)
    cuda_driver = SimpleNamespace(driver=SimpleNamespace(CUDADriverError=Failed))
    monkeypatch.setattr(_overlap, "_driver", lambda: (driver, "overlapping", "waiting"))
    monkeypatch.setattr(_overlap, "cupy", lambda: SimpleNamespace(cuda=cuda_driver))
    for start in (_overlap.launch_overlapping, _overlap.launch_resident):
        start(11, (2, 3, 4), (32, 5, 6), 7, 0xABC, 99)
    for (config, *rest), attribute in zip(seen, ("overlapping", "waiting"), strict=True):
        assert rest == [11, 99, 0]
        assert config == {
            "gridDimX": 2, "gridDimY": 3, "gridDimZ": 4, "blockDimX": 32, "blockDimY": 5, "blockDimZ": 6,
            "sharedMemBytes": 7, "hStream": 0xABC, "numAttrs": 1, "attrs": [attribute],
        }  # fmt: skip
    status[0] = 1
    with pytest.raises(Failed):
        _overlap.launch_overlapping(11, (2, 3, 4), (32, 5, 6), 7, 0xABC, 99)


def test_the_attributes_of_the_driver():
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings comes with numba-cuda")
    _, overlapping, waiting = _overlap._driver()
    assert int(overlapping.id) == 6
    assert overlapping.value.programmaticStreamSerializationAllowed == 1
    assert int(waiting.id) == 2 and waiting.value.cooperative == 1


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


# ----------------------------------------------------------------------------- what the simulator looks for
def kernels():
    """-> a kernel that writes x, and one that may overlap with it; `wait` tells where it waits"""

    @cuda.jit
    def first(x):
        x[cuda.threadIdx.x] = float32(1.0)

    @functools.cache
    def second(wait, store):
        @cuda.jit
        def overlapping(y, x, w):
            i = cuda.threadIdx.x
            if wait == 0:
                wait_for_previous()
            value = w[i]
            if wait == 1:
                wait_for_previous()
            value += x[i]
            if store and wait == 3:
                y[i] = value
            if wait == 2 or wait == 3:
                wait_for_previous()
            y[i] = value

        return overlapping

    return first, second


def run_both(wait, store=False, other=False):
    """other: the first kernel does not write what the second one reads."""
    first, second = kernels()
    x, w, y = (sim(np.zeros(32, np.float32)) for _ in range(3))
    simulator.run(first, 1, 32, y if other else x)
    simulator.run(second(wait, store), 1, 32, y, x, w, overlap=True)


@pytest.mark.parametrize("wait", [0, 1])
def test_waiting_in_time(wait):
    run_both(wait)


def test_reading_too_early():
    with pytest.raises(
        RaceError, match=r"race between kernels in overlapping.*reads x\[0\].*which first writes"
    ):
        run_both(2)
    run_both(2, other=True)


def test_writing_too_early():
    with pytest.raises(
        RaceError, match=r"writes y\[0\].*may still need.*not called wait_for_previous"
    ):
        run_both(3, store=True, other=True)


def test_writing_what_the_kernel_before_was_not_given():
    @cuda.jit
    def early(y, x):
        y[cuda.threadIdx.x] = float32(1.0)
        wait_for_previous()
        y[cuda.threadIdx.x] += x[cuda.threadIdx.x]

    x, y = (sim(np.zeros(32, np.float32)) for _ in range(2))
    simulator.run(kernels()[0], 1, 32, x)
    simulator.run(early, 1, 32, y, x, overlap=True)
    assert (np.asarray(y) == 2).all()


@pytest.mark.parametrize("hasty", [True, False])
def test_letting_the_next_start_before_waiting(hasty):
    """Then the kernel may start while the one before the previous still runs, and the rules hold for that one, too."""

    @cuda.jit
    def between(z):
        if hasty:
            let_next_start()
        wait_for_previous()
        let_next_start()
        z[cuda.threadIdx.x] = float32(1.0)

    first, second = kernels()
    x, w, y, z = (sim(np.zeros(32, np.float32)) for _ in range(4))

    def run_three(wait, store):
        simulator.run(first, 1, 32, x)
        simulator.run(between, 1, 32, z, overlap=True)
        simulator.run(second(wait, store), 1, 32, y, x, w, overlap=True)

    run_three(1, False)
    if not hasty:
        return run_three(2, False)
    with pytest.raises(RaceError, match=r"reads x\[0\].*which first writes"):
        run_three(2, False)


def test_never_waiting():
    @cuda.jit
    def hasty(x):
        if x[0] > float32(1.0):
            wait_for_previous()

    with pytest.raises(KernelError, match=r"hasty.*never calls wait_for_previous"):
        simulator.run(hasty, 1, 32, sim(np.zeros(1, np.float32)), overlap=True)


def test_weights_that_are_not_ready():
    """gemv's precondition, violated: the previous kernel wrote the weights."""
    x, w = sim(normal(1, 1, 64).astype(BF16)), sim(normal(2, 16, 64))
    w = cast_fwd(w, BF16)
    with pytest.raises(
        RaceError, match=r"called by gemv_tensor_kernel.*which narrow_kernel writes"
    ):
        gemv(x, w, weights_ready=True)
    w = cast_fwd(sim(normal(2, 16, 64)), BF16)
    gemv(x, w)
