"""Repeated launches (xtrain/torch/launches.py), with a driver that runs packed parameters in the simulator."""

import contextlib
import ctypes
import threading
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch_cases import CASES, random, with_gradients

import xtrain.torch as xt
from xtrain import device, simulator
from xtrain.kernels import gemm as _gemm
from xtrain.kernels.elementwise import scale_fwd
from xtrain.kernels.gemm import linear_into
from xtrain.kernels.primitives import last_block as _last_block
from xtrain.kernels.primitives import tma as _tma
from xtrain.kernels.primitives.hopper_simulated import simulated_map
from xtrain.kernels.runtime import launch as _launch
from xtrain.kernels.runtime import overlap as _overlap
from xtrain.kernels.runtime.compiler import COMPILER, cuda, float32, types
from xtrain.kernels.runtime.invariance import batch_invariant
from xtrain.kernels.runtime.launch import empty, empty_like, launch, zeros
from xtrain.simulator import SimArray
from xtrain.torch import launches as _launches

STREAM = 7


@cuda.jit
def add_one_kernel(y, x):
    y[cuda.threadIdx.x] = x[cuda.threadIdx.x] + float32(1.0)


# of torch_cases; attention has a separate test
REPEATED = [
    "rmsnorm",
    "residual_rmsnorm",
    "swiglu",
    "swiglu_packed",
    "rope",
    "rope_positions",
    "norm_rope",
    "qk_norm_rope",
    "qk_rope",
    "embedding",
    "cross_entropy",
    "softmax",
    "linear_cross_entropy",
    "linear_cross_entropy_count",
    "linear_logprobs",
]
FIRST = 5 if COMPILER == "numba" else 3  # word of an array's shape


class Driver:
    """cuLaunchKernel and memset for memory of the CPU; a handle is the index of a kernel and its types."""

    def __init__(self):
        self.kernels = []
        self.started = []
        self.idle = False  # starts nothing
        self.delay = 0.0  # seconds before the parameters are read

    def load_function(self, kernel, signature, shared, code=None):
        self.kernels.append((kernel, signature))
        return len(self.kernels) - 1, None

    def launch(self, handle, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        assert stream == STREAM
        kernel, signature = self.kernels[handle]
        self.started.append(kernel.py_func.__name__)
        words = iter((ctypes.c_void_p * 200).from_address(pointers))
        if self.idle:
            return
        time.sleep(self.delay)  # other threads run, as CuPy lets them
        args = [self.argument(kind, words) for kind in signature]
        simulator.run(kernel, (gx, gy, gz), (bx, by, bz), *args, shared=shared)

    def launch_with(self, config, handle, pointers, extra):
        sizes = [
            getattr(config, f"{what}Dim{axis}") for what in ("grid", "block") for axis in "XYZ"
        ]
        self.launch(handle, *sizes, config.sharedMemBytes, config.hStream, pointers, extra)
        return (0,)

    def memset(self, address, value, nbytes, stream):
        assert stream == STREAM
        ctypes.memset(address, value, nbytes)

    def memcpy(self, target, source, nbytes, kind, stream):
        assert (kind, stream) == (3, STREAM)
        ctypes.memmove(target, source, nbytes)

    def memcpy2d(self, target, pitch, source, source_pitch, width, rows, kind, stream):
        for i in range(rows):
            self.memcpy(target + i * pitch, source + i * source_pitch, width, kind, stream)

    def gemm(self, handle, trans_a, trans_b, m, n, k, alpha, a, *layout_and_b):
        """gemm_ex: all column-major, so in rows it is c^T = op(b)^T op(a)^T."""
        a_type, a_lead, b, b_type, b_lead, beta, c, c_type, c_lead, *_ = layout_and_b
        self.started.append("product")
        if self.idle:
            return

        def rows(address, kind, lead, count, width):
            dtype = {code: np.dtype(name) for name, code in _gemm.TYPES.items()}[kind]
            memory = (ctypes.c_char * (lead * count * dtype.itemsize)).from_address(address)
            return np.ndarray((count, lead), dtype, memory)[:, :width]

        read = lambda x: np.frombuffer(ctypes.string_at(x, 4), np.float32)[0]
        a = rows(a, a_type, a_lead, *((m, k) if trans_a else (k, m)))
        b = rows(b, b_type, b_lead, *((k, n) if trans_b else (n, k)))
        c = rows(c, c_type, c_lead, n, m)
        options = dict(trans_a=bool(trans_b), trans_b=bool(trans_a), alpha=float(read(alpha)))
        _gemm.matmul(c, b, a, **options, accumulate=bool(read(beta)))

    def argument(self, kind, words):
        """Read one argument from the parameters."""
        from numba.np.numpy_support import as_dtype

        if not isinstance(kind, types.Array):
            dtype = as_dtype(kind)
            return dtype.type(
                np.frombuffer(ctypes.string_at(next(words), dtype.itemsize), dtype)[0]
            )
        read = lambda n: [ctypes.c_int64.from_address(next(words)).value for _ in range(n)]
        head = read(FIRST)
        address = head[4] if COMPILER == "numba" else head[1]
        shape = read(kind.ndim)
        strides = read(kind.ndim)
        dtype = np.dtype(as_dtype(kind.dtype))
        if COMPILER != "numba":
            strides = [n * dtype.itemsize for n in strides]
        if dtype == np.uint16:
            dtype = np.dtype(ml_dtypes.bfloat16)
        nbytes = (
            dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides)) if all(shape) else 0
        )
        memory = (ctypes.c_char * nbytes).from_address(address)
        return np.ndarray(shape, dtype, memory, 0, strides).view(SimArray)


def encode(spec):
    """The 128 bytes of a tensor map in the simulator."""
    words = simulated_map(spec.address, spec.dims, spec.strides, spec.box, spec.itemsize)
    return np.array(words, np.uint64).tobytes()


class Uploaded:
    """An array with these bytes."""

    def __init__(self, content):
        self.memory = np.frombuffer(bytearray(content), np.uint8)
        self.data = SimpleNamespace(ptr=self.memory.ctypes.data)

    def view(self, dtype):
        return self


@pytest.fixture
def driver(monkeypatch):
    """Tensors of the CPU count as those of GPU 0, an H200, of which nothing but the driver exists."""
    driver = Driver()
    card = SimpleNamespace(id=0, compute_capability="90")
    card.attributes = dict(
        MultiProcessorCount=132, L2CacheSize=60 << 20, MaxSharedMemoryPerBlockOptin=227 << 10,
        MaxSharedMemoryPerMultiprocessor=228 << 10,
    )  # fmt: skip
    runtime = SimpleNamespace(getDevice=lambda: 0, memsetAsync=driver.memset)
    runtime.memcpyAsync = driver.memcpy
    runtime.memcpy2DAsync = driver.memcpy2d
    runtime.memcpyDeviceToDevice = 3
    cuda = SimpleNamespace(
        Device=lambda _: card,
        driver=SimpleNamespace(launchKernel=driver.launch),
        runtime=runtime,
        get_current_stream=lambda: SimpleNamespace(ptr=STREAM, is_capturing=lambda: False),
    )
    monkeypatch.setattr(_launch, "load_function", driver.load_function)
    monkeypatch.setattr(_launch, "_plans", {})
    bindings = SimpleNamespace(CUlaunchConfig=SimpleNamespace, cuLaunchKernelEx=driver.launch_with)
    monkeypatch.setattr(_overlap, "_driver", lambda: (bindings, "overlapping", "waiting"))
    context = _gemm._CublasContext.__new__(_gemm._CublasContext)
    context.module = SimpleNamespace(
        set_stream=lambda handle, stream: None,
        set_workspace=lambda handle, address, nbytes: None,
        gemm_ex=driver.gemm,
    )
    context.handle = None
    context.multiprocessors = 132
    context.workspaces = {STREAM: SimpleNamespace(ptr=0)}
    monkeypatch.setattr(_gemm, "_handle", lambda device: context)
    for name in ("_captured", "_evictable", "_counters"):
        monkeypatch.setattr(_tma, name, {})
    monkeypatch.setattr(_tma, "_encode", encode)
    monkeypatch.setattr(_tma, "upload", Uploaded)
    monkeypatch.setattr(_last_block, "upload", Uploaded)
    monkeypatch.setattr(_last_block, "_counters", {})
    monkeypatch.setattr(_launches, "on_stream", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(_launches, "current_device", lambda: 0)
    monkeypatch.setattr(_launches, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(_launches, "cuda_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    with device.use_array_module(SimpleNamespace(cuda=cuda)):
        yield driver


def check_repetition(driver, monkeypatch, op, make):
    """The launches recorded for some inputs give the launcher's bits for others, at other addresses."""
    monkeypatch.setattr(_launches, "run_launcher", None)  # nothing goes the usual way
    recorded = make()
    driver.idle = True
    with_gradients(op, recorded)
    started = list(driver.started)
    compiled = len(driver.kernels)
    for x in recorded:
        if isinstance(x, torch.Tensor):
            x.data.zero_()
    driver.idle = False
    driver.started.clear()
    inputs = make()
    found = with_gradients(op, inputs)
    assert driver.started == started and started and len(driver.kernels) == compiled
    monkeypatch.undo()
    with xt.simulated():
        expected = with_gradients(op, inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name, dtype", [(n, dtype) for n in REPEATED for dtype in CASES[n].dtypes])
def test_the_bits_of_the_launcher(name, dtype, driver, monkeypatch):
    case = CASES[name]
    check_repetition(driver, monkeypatch, case.op, lambda: case.make(4, dtype))


def test_attention_with_tensor_maps(driver, monkeypatch):
    """Maps are made for each set of addresses, a counter once."""
    shapes = (1, 2, 2, 64), (1, 2, 1, 64), (1, 2, 1, 64)
    make = lambda: [random(i, *shape).bfloat16().requires_grad_() for i, shape in enumerate(shapes)]
    check_repetition(driver, monkeypatch, xt.attention, make)


def test_another_layout_is_recorded_anew(driver, monkeypatch):
    """Other strides, alignment, integers and modes give other launches; the same tensor twice is not recorded."""
    recorded = []
    usual = []

    def launcher(x, y, factor):
        recorded.append((x.strides, x.ctypes.data % 16, factor, _launch.mode()))
        return empty_like(y)

    monkeypatch.setattr(_launches, "run_launcher", lambda *_: usual.append(1))
    run = _launches.Repeatable(launcher, frozenset([0]))
    x = torch.ones(8, 8)
    y = torch.ones(8, 8)
    flat = torch.ones(80)
    for arguments in (
        (x, y, 2),
        (x + 1, y, 2),
        (x, y, 3),
        (x.t(), y, 3),
        (flat[1:65].view(8, 8), y, 3),
    ):
        run(arguments)
    plain = (True, False)
    dense = (32, 4)
    expected = [
        (dense, 0, 2, plain),
        (dense, 0, 3, plain),
        ((4, 32), 0, 3, plain),
        (dense, 4, 3, plain),
    ]
    assert recorded == expected
    with batch_invariant():
        run((x, y, 2))
    assert recorded == [*expected, (dense, 0, 2, (True, True))] and not usual
    run((y, y, 2))
    with _launch.observe_launches(lambda event, start: start()):
        run((x, y, 2))
    monkeypatch.setattr(_launches, "current_device", lambda: 1)
    run((x, y, 2))
    assert len(usual) == 3


def test_parts_of_arrays(driver):
    def launcher(x):
        y = zeros(x, (2, 16))
        launch(add_one_kernel, 1, 8, y[1:].reshape(-1)[8:], x[4:12])
        y[:1][:, 2:5] = x[1:4].reshape(1, 3)
        return y.reshape(32)

    run = _launches.Repeatable(launcher, frozenset())
    run([torch.zeros(16)])
    x = torch.arange(16.0)
    (y,) = run([x])
    expected = torch.cat((torch.zeros(2), x[1:4], torch.zeros(19), x[4:12] + 1))
    assert torch.equal(y, expected)


def test_another_float_is_not_recorded_anew(driver, monkeypatch):
    """Unless the launcher does something else with it than give it to a kernel."""
    recorded = []

    def launcher(x, first, factor, second):
        recorded.append(1)
        return scale_fwd(scale_fwd(x, second), first)

    def doubled(x, factor):
        recorded.append(factor)
        return scale_fwd(x, 2 * factor)

    x = torch.ones(8)
    run = _launches.Repeatable(launcher, frozenset())
    values = [run([x, a, None, b])[0][0].item() for a, b in ((2.0, 3.0), (5.0, 3.0), (0.5, 1e39))]
    assert values == [6, 15, float("inf")] and len(recorded) == 1
    assert run([x, 2, None, 3.0])[0][0] == 6 and len(recorded) == 2  # an integer
    run = _launches.Repeatable(doubled, frozenset())
    values = [run([x, a])[0][0].item() for a in (2.0, 3.0, 2.0)]
    assert values == [4, 6, 4] and recorded[3:] == [2.0, 3.0]
    usual = []
    monkeypatch.setattr(_launches, "run_launcher", lambda *_: usual.append(1))
    for i in range(_launches.MAX_VALUES + 9):
        run([x, float(i)])
    assert len(recorded) == 5 + _launches.MAX_VALUES - 1 and len(usual) == 8


def test_the_factor_of_a_product_is_recorded_by_value(driver, monkeypatch):
    def launcher(x, factor):
        return linear_into(empty_like(x), x, x.reshape(x.shape), alpha=factor)

    monkeypatch.setattr(_launches, "run_launcher", None)
    x = torch.eye(4)
    run = _launches.Repeatable(launcher, frozenset())
    assert [run([x, a])[0].trace().item() for a in (2.0, 3.0, 2.0)] == [8, 12, 8]


def test_rows_that_overlap_are_copied_as_usual(driver, monkeypatch):
    """CUDA copies no rows that are fewer bytes apart than they have."""
    usual = []
    monkeypatch.setattr(_launches, "run_launcher", lambda *_: usual.append(1))

    def launcher(x):
        y = empty_like(x)
        y[...] = x
        return y

    run = _launches.Repeatable(launcher, frozenset([0]))
    run([torch.ones(4, 8)[:, :6]])
    assert not usual
    run([torch.ones(8).expand(4, 8)])
    assert usual


def test_what_depends_on_addresses_is_made_once(driver, monkeypatch):
    """For each set of addresses; always while a graph is captured, so that its maker knows of the graph."""
    made = []

    def make(addresses):
        made.append(addresses)
        return Uploaded(np.full(8, len(made), np.float32).tobytes())

    def launcher(x):
        derived = _launch.instead.derive(make, [x.ctypes.data], 8, np.dtype(np.float32))
        y = empty_like(x)
        launch(add_one_kernel, 1, 8, y, derived)
        return y

    run = _launches.Repeatable(launcher, frozenset())
    a, b = torch.zeros(8), torch.zeros(8)
    values = [run([x])[0][0].item() for x in (a, b, a)]
    assert values == [2, 3, 2] and made == [(a.data_ptr(),), (b.data_ptr(),)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run([a])[0][0] == 4 and len(made) == 3


def test_threads_do_not_share_parameters(driver):
    def launcher(x):
        y = empty_like(x)
        launch(add_one_kernel, 1, 8, y, x)
        return y

    run = _launches.Repeatable(launcher, frozenset())
    run([torch.zeros(8)])
    driver.delay = 1e-2
    found = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: run([torch.full((8,), float(i))])[0]}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        all(torch.equal(y, torch.full((8,), i + 1.0)) for i, y in found.items()) and len(found) == 4
    )


def test_what_cannot_be_recorded_runs_as_usual(driver, monkeypatch):
    """Copies, products, tensor maps, values, arrays of the launcher's own, large ones for a while: nothing has started,
    and the launcher is called."""
    usual = []
    monkeypatch.setattr(_launches, "LARGE", 1 << 10)
    monkeypatch.setattr(
        _launches, "run_launcher", lambda launcher, given: usual.append(launcher) or [given[0]]
    )
    own = np.zeros(4, np.float32)
    x = torch.ones(4, 2, 8)
    for launcher in (
        lambda x: x.copy(),
        lambda x: empty_like(x)[:, :, 1:].__setitem__(..., x[:, :, 1:]),
        lambda x: x.data.ptr,
        lambda x: x if x.reshape(-1)[0] > 0 else empty_like(x),
        lambda x: empty_like(x) if x else x,
        lambda x: x,
        lambda x: empty_like(x)[1:],
        lambda x: (y := empty_like(x), y),
        lambda x: np.asarray(x),
        lambda x: launch(add_one_kernel, 1, 32, empty_like(x), own),
        lambda x: launch(add_one_kernel, 1, 32, empty_like(x), x, resident=True),
        lambda x: launch(add_one_kernel, 1, 32, empty(x, 256), x) or empty_like(x),
    ):
        run = _launches.Repeatable(launcher, frozenset())
        run([x])
        run([x])
        assert usual == [launcher, launcher]
        usual.clear()
    assert not driver.started
    assert _launch.instead.launch is None
