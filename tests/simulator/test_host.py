"""Programs that use numba.cuda run unchanged under `simulate`: launches, device arrays, streams, events, signatures, ufuncs."""

import gc
import inspect
import linecache
import traceback

import numpy as np
import pytest
from numba import cuda, float32, guvectorize, int16, int32, vectorize

from xtrain.simulator import (
    KernelError,
    OutOfBoundsError,
    RaceError,
    dispatch,
    host,
    pytest_plugin,
    simulate,
)


@cuda.jit
def scale(y, x, factor):  # decorated before the simulator is active, as in a notebook
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] * factor


@cuda.jit
def fill(y, value):
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        y[i] = value


@pytest.fixture(autouse=True)
def simulated():
    with simulate():
        yield


def test_a_program_with_device_arrays_a_stream_and_events():
    x = np.arange(100, dtype=np.float32)
    stream, start, end = cuda.stream(), cuda.event(), cuda.event()
    start.record(stream)
    d_x = cuda.to_device(x, stream=stream)
    d_y = cuda.device_array_like(d_x)
    scale[4, 32, stream](d_y, d_x, 2)
    y = d_y.copy_to_host(stream=stream)
    end.record(stream)
    with stream.auto_synchronize():
        cuda.synchronize()
    np.testing.assert_array_equal(y, 2 * x)
    assert 0 < cuda.event_elapsed_time(start, end) < 60_000


def test_dynamic_shared_memory():
    @cuda.jit
    def reverse(x):
        tile = cuda.shared.array(0, float32)
        i = cuda.threadIdx.x
        tile[i] = x[i]
        cuda.syncthreads()
        x[i] = tile[cuda.blockDim.x - 1 - i]

    x = np.arange(64, dtype=np.float32)
    reverse[1, 64, 0, 64 * 4](x)
    np.testing.assert_array_equal(x, np.arange(64)[::-1])
    with pytest.raises(OutOfBoundsError, match="no dynamic shared memory"):
        reverse[1, 64](x)


def test_forall_covers_every_element():
    y = cuda.device_array(1000, np.int32)
    fill.forall(1000)(y, 7)
    assert (y.copy_to_host() == 7).all()
    fill.forall(0)(y, 8)
    assert (y.copy_to_host() == 7).all()


def test_host_arrays_are_copied_to_the_device_and_back():
    x, y = np.ones(8, np.float32), np.zeros(8, np.float32)
    scale[1, 8](y, x, 3)
    assert (y == 3).all()
    scale[1, 8](cuda.Out(y), cuda.In(x), 4)
    assert (y == 4).all()
    fill[1, 8](cuda.In(x), 9)  # changes the copy on the device alone
    assert (x == 1).all()


def test_what_out_does_not_write_is_not_zero():
    y = np.zeros(8, np.float32)
    scale[1, 4](cuda.Out(y), np.ones(4, np.float32), 1)
    assert (y[:4] == 1).all() and np.isnan(y[4:]).all()


def test_the_same_array_given_twice_is_two_copies_on_the_device():
    x = np.arange(8, dtype=np.float32)

    @cuda.jit
    def shift(y, x):
        i = cuda.threadIdx.x
        y[i] = x[(i + 1) % 8]

    shift[1, 8](x, x)  # copied back in the order of the arguments
    with pytest.raises(RaceError):
        d = cuda.to_device(x)
        shift[1, 8](d, d)


# ----------------------------------------------------------------------------- device arrays
def test_slices_are_views():
    d = cuda.to_device(np.arange(24, dtype=np.int32).reshape(4, 6))
    fill[1, 8](d[1:3, 2], 100)
    expected = np.arange(24).reshape(4, 6)
    expected[1:3, 2] = 100
    np.testing.assert_array_equal(d.copy_to_host(), expected)
    assert d[2, 2] == 100 and d[0].shape == (6,) and d[..., :2].shape == (4, 2)
    d[0] = np.arange(6) + 50
    d[3, :] = 1
    assert d.copy_to_host()[0, 5] == 55 and (d.copy_to_host()[3] == 1).all()
    assert d.reshape(24).shape == (24,) and d.ravel().is_c_contiguous()
    np.testing.assert_array_equal(d.T.copy_to_host(), d.copy_to_host().T)


def test_unwritten_memory_is_not_zero():
    assert np.isnan(cuda.device_array(3).copy_to_host()).all()
    assert (cuda.device_array(3, np.int32).copy_to_host() == 0x7F7F7F7F).all()


def test_copies_keep_numba_s_rules():
    d = cuda.device_array((2, 3), np.float32)
    with pytest.raises(TypeError, match="incompatible dtype"):
        d.copy_to_device(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="incompatible shape"):
        d.copy_to_host(np.zeros((3, 2), np.float32))
    with pytest.raises(ValueError, match="ontiguous"):
        cuda.to_device(np.zeros((4, 4))[:, ::2])
    with pytest.raises(NotImplementedError, match="requires copying"):
        d[:, :2].ravel()
    with pytest.raises(NotImplementedError, match="integers and slices"):
        d[[0, 1]]
    d.copy_to_device(np.asfortranarray(np.ones((2, 3), np.float32)))
    assert (d.copy_to_host() == 1).all()
    with pytest.raises(TypeError):
        d + d  # NumPy's functions do not take device arrays


def test_managed_and_pinned_arrays():
    m, p = cuda.managed_array(4, np.float32), cuda.pinned_array(4, np.float32)
    m[:] = 1
    scale[1, 4](p, m, 2)
    assert (p == 2).all()
    fill[1, 4](m, 5)
    cuda.synchronize()
    assert (m == 5).all()
    with cuda.mapped(np.zeros(3)) as d:
        fill[1, 4](d, 6)
        assert (d.copy_to_host() == 6).all()


def test_cuda_array_interface():
    class Other:
        def __init__(self, d):
            self.__cuda_array_interface__ = d.__cuda_array_interface__

    d = cuda.to_device(np.arange(6, dtype=np.float32))
    fill[1, 2](Other(d[2:4]), 9)
    assert d.copy_to_host().tolist() == [0, 1, 9, 9, 4, 5]
    assert cuda.as_cuda_array(Other(d))[2] == 9
    foreign = Other(d)
    foreign.__cuda_array_interface__ = {**d.__cuda_array_interface__, "data": (4096, False)}
    with pytest.raises(ValueError, match="memory of a real GPU"):
        fill[1, 2](foreign, 9)


# ----------------------------------------------------------------------------- signatures
def test_a_declared_kernel_converts_its_numbers():
    @cuda.jit("void(float64[:], float32)")
    def third(y, x):
        y[0] = x

    y = np.zeros(1)
    third[1, 1](y, 1 / 3)
    assert y[0] == float(np.float32(1 / 3)) != 1 / 3
    with pytest.raises(TypeError, match="No matching definition for argument type"):
        third[1, 1](y, y)
    with pytest.raises(TypeError, match="No matching definition"):
        third[1, 1](np.zeros(1, np.int32), 1)


def test_one_of_several_declarations_is_chosen():
    @cuda.jit(["void(int32[:], int32)", "void(float64[:], float64)"])
    def put(y, x):
        y[0] = x / 2

    y, z = np.zeros(1), np.zeros(1, np.int32)
    put[1, 1](y, 3)
    put[1, 1](z, 3)
    assert y[0] == 1.5 and z[0] == 1
    with pytest.raises(TypeError, match="is not an integer"):
        put[1, 1](z, 3.5)


def test_a_declared_device_function_converts_its_result():
    @cuda.jit("float32(float32)", device=True)
    def tenth(x):
        return x * 0.1  # float64

    @cuda.jit
    def kernel(y, x):
        y[0] = tenth(x[0]) * 1e8

    y = np.zeros(1)
    kernel[1, 1](y, np.ones(1))
    assert y[0] == float(np.float32(0.1)) * 1e8


def test_a_device_function_cannot_be_launched():
    @cuda.jit(int32(int32), device=True)
    def twice(x):
        return 2 * x

    with pytest.raises(RuntimeError, match="device function"):
        twice[1, 1](3)


# ----------------------------------------------------------------------------- ufuncs
def test_vectorize_and_reduce():
    @vectorize(["float32(float32, float32)", "float64(float64, float64)"], target="cuda")
    def plus(a, b):
        return a + b

    x = np.arange(33, dtype=np.float32)
    np.testing.assert_array_equal(plus(x, x), 2 * x)
    np.testing.assert_array_equal(plus(cuda.to_device(x), cuda.to_device(x)).copy_to_host(), 2 * x)
    assert plus.reduce(x) == x.sum()


def test_a_generated_kernel_has_a_source():
    text = "@cuda.jit\ndef put(x):\n    x[cuda.threadIdx.x // DIVISOR] = cuda.threadIdx.x\n"
    right, wrong = {"cuda": cuda, "DIVISOR": 1}, {"cuda": cuda, "DIVISOR": 2}
    exec(text, right)
    exec(text, wrong)
    x = np.zeros(4)
    right["put"][1, 4](x)
    assert x.tolist() == [0, 1, 2, 3]
    with pytest.raises(RaceError, match=r"x\[cuda.threadIdx.x // DIVISOR\] = cuda"):
        wrong["put"][1, 4](x)

    inner = 3
    exec("inner += 1\nassert inner == 4 and float32 is not None")  # the names of the caller
    assert inner == 3


def test_there_is_no_machine_code():
    @cuda.jit("void(float32[:])")
    def kernel(x):
        x[0] = 1

    with pytest.raises(NotImplementedError, match="has no machine code"):
        next(iter(kernel.overloads.values())).inspect_asm()


def test_guvectorize():
    product = guvectorize(["(f4[:,:], f4[:,:], f4[:,:])"], "(m,n),(n,p)->(m,p)", target="cuda")(
        _product
    )
    a, b = (
        np.arange(n, dtype=np.float32).reshape(2, *shape)
        for n, shape in ((12, (2, 3)), (24, (3, 4)))
    )
    np.testing.assert_array_equal(product(a, b), a @ b)


def _product(a, b, c):
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            c[i, j] = 0
            for k in range(a.shape[1]):
                c[i, j] += a[i, k] * b[k, j]


def test_reduction_object():
    @cuda.reduce
    def largest(a, b):
        return a if a > b else b

    x = np.random.default_rng(0).normal(size=100)
    assert largest(x, init=x[0]) == x.max()


# ----------------------------------------------------------------------------- findings
@cuda.jit
def racing(x):
    i = cuda.threadIdx.x
    x[i] = i
    x[0] = x[(i + 1) % 32]


def test_a_finding_is_raised_where_the_kernel_is_launched():
    with pytest.raises(RaceError) as found:
        racing[1, 32](cuda.to_device(np.zeros(32, np.float32)))
    lines = {site.line for site in found.value.sites}
    first = racing.py_func.__code__.co_firstlineno
    assert lines <= {first + 3, first + 4} and "x[0] = x[(i + 1) % 32]" in str(found.value)
    files = [frame.filename for frame in traceback.extract_tb(found.value.__traceback__)]
    assert files[-1] == __file__ == files[0]  # the launch, and the line of the kernel
    assert not any(f.endswith(("block.py", "thread.py")) for f in files)


def test_simulate_takes_kinds_of_findings():
    @cuda.jit
    def same_place(x):
        x[0] = cuda.threadIdx.x * (2**31 // 31)

    x = np.zeros(1, np.int32)
    with pytest.raises(RaceError):
        same_place[1, 32](x)
    with simulate(allow=["race"]):
        same_place[1, 32](x)
        overflow = pytest.warns(UserWarning, match="2216757312 converted to int32")
        with simulate(enable=["integer_overflow"]), overflow:
            same_place[1, 33](x)
        same_place[1, 33](x)
    with pytest.raises(RaceError):
        same_place[1, 32](x)
    with pytest.raises(ValueError, match="'rase' is not a kind of finding"), simulate(["rase"]):
        pass


def test_an_exception_of_a_kernel_with_debug_keeps_its_type():
    def body(x):
        if x[cuda.grid(1)] < 0:
            raise ValueError("negative")

    x = np.array([1.0, 1.0, -1.0])
    with pytest.raises(
        ValueError,
        match=r"In function 'body', file .*test_host.py, line \d+, tid=\[2, 0, 0\] ctaid=\[0, 0, 0\]: negative",
    ):
        cuda.jit(body, debug=True, opt=False)[1, 3](x)
    with pytest.raises(KernelError, match="ValueError"):
        cuda.jit(body)[1, 3](x)


# ----------------------------------------------------------------------------- putting it in place
def test_the_device_answers():
    assert (
        cuda.is_available()
        and cuda.is_float16_supported()
        and len(cuda.gpus) == 1
        and cuda.cuda_error() is None
    )
    device = cuda.get_current_device()
    assert device.compute_capability == (9, 0) and device.MAX_THREADS_PER_BLOCK == 1024
    free, total = cuda.current_context().get_memory_info()
    held = cuda.device_array(2**20, np.uint8)
    assert total > free >= cuda.current_context().get_memory_info().free + held.nbytes


def test_every_name_is_restored():
    @simulate()
    def inner():
        return cuda.is_available()

    assert inner() and cuda.is_available()  # the fixture's is still active
    host.stop()
    try:
        assert not host._originals
        replaced = [
            (owner, name)
            for owner, names in host.REPLACED.items()
            for name, new in names.items()
            if hasattr(owner, name) and getattr(owner, name) is new and callable(new)
        ]
        assert replaced == []
        assert isinstance(cuda.cuda_error(), (str, type(None)))
    finally:
        host.start()


def test_no_name_of_the_list_is_unknown_to_numba():
    """Each name that is replaced exists: a new Numba that renames one is noticed here."""
    host.stop()
    try:
        missing = [
            f"{getattr(owner, '__name__', owner)}.{name}"
            for owner, names in host.REPLACED.items()
            for name in names
            if not hasattr(owner, name)
        ]
    finally:
        host.start()
    assert {*missing} <= {  # numba-cuda's alone
        "numba.cuda.cudadrv.driver._to_core_stream", "numba.cuda.is_bfloat16_supported", "numba.cuda.is_fp8_supported",
    }  # fmt: skip


def test_vectorize_with_a_scalar_argument():
    with simulate():

        @vectorize(["float32(float32, float32)"], target="cuda")
        def scaled(a, b):
            return a * b

        assert scaled(np.ones(9, np.float32), np.float32(3)).tolist() == [3.0] * 9


@cuda.jit
def increment(y, x):
    i = cuda.grid(1)
    y[i] = x[i] + 1


def test_unwritten_elements_of_a_device_array():
    with simulate():
        x, y = cuda.device_array(8), cuda.device_array_like(np.zeros(8))
        with pytest.raises(KernelError, match="uninitialized") as found:
            increment[1, 8](y, x)
        assert found.value.kind == "unwritten_global"
        x[:4] = 1
        x[4:].copy_to_device(np.ones(4))
        increment[1, 8](y, x)
        increment[1, 8](x, y)  # the first launch has written y
        assert x.copy_to_host().tolist() == [3.0] * 8
    with simulate(allow={"unwritten_global"}):
        increment[1, 8](y, cuda.device_array(8))


@cuda.jit
def shifted(y, x, n):
    i = int16(cuda.grid(1) * n)
    y[cuda.grid(1)] = x[i]


def test_indices_that_fail_a_test_under_pytest():
    """int16 drops bits, and 40,000 becomes negative: with the kinds of the plugin these are errors."""
    y, x = np.zeros(2, np.int32), np.zeros(2**16, np.int32)
    with pytest.warns(dispatch.KernelWarning, match="negative index"):
        shifted[1, 2](y, x, 40000)
    shifted[1, 2](y, x, 2**16 + 1)
    strict = {"enable": pytest_plugin.STRICT, "raised": pytest_plugin.STRICT}
    with simulate(**strict):
        for n, kind in ((40000, "negative_index"), (2**16 + 1, "int16_overflow")):
            with pytest.raises(KernelError) as found:
                shifted[1, 2](y, x, n)
            assert found.value.kind == kind
        shifted[1, 2](y, x, 300)
    with simulate(**strict), simulate(allow=pytest_plugin.STRICT):
        shifted[1, 2](y, x, 40000)
    with pytest.raises(ValueError, match="'rase' is not a kind"), simulate(raised=["rase"]):
        pass


def test_generated_code_is_forgotten_with_its_functions():
    def kept():
        return sum(file.startswith("<generated code") for file in linecache.cache)

    gc.collect()  # what earlier tests have left
    before = kept()
    scope = {}
    for n in range(50):
        exec(f"x = {n}", scope)
        exec(f"def f():\n    return {n}", scope)
    assert kept() == before + 1 and "return 49" in inspect.getsource(scope["f"])
    del scope
    gc.collect()  # a function and its globals refer to each other
    assert kept() == before


@cuda.jit
def meets(x):
    cuda.cg.this_grid().sync()
    x[cuda.grid(1)] = 1


def test_a_cooperative_grid_larger_than_the_device():
    most = cuda.get_current_device().MULTIPROCESSOR_COUNT * 2048 // 1024
    x = np.zeros(1024 * (most + 1), np.int8)
    meets[most, 1024](x)
    with pytest.raises(KernelError, match=f"{most + 1} blocks meet at .* but {most} of 1024"):
        meets[most + 1, 1024](x)
