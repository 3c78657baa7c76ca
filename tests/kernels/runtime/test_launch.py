"""Launches: the choice of the implementation, checks, scalars, strides, shared memory, the cache, very large arrays."""

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import select
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from checks import GPU, normal, to_host, to_kernel

from xtrain.device import cupy, to_device
from xtrain.kernels import cross_entropy as cross_entropy_
from xtrain.kernels import embedding, layout, qk_norm_rope, residual, rmsnorm, rope, softmax, swiglu
from xtrain.kernels.cast import BFLOAT16
from xtrain.kernels.cross_entropy import cross_entropy
from xtrain.kernels.embedding import embedding_bwd
from xtrain.kernels.qk_norm_rope import qk_norm_rope_bwd, qk_norm_rope_fwd
from xtrain.kernels.residual import residual_rmsnorm_fwd
from xtrain.kernels.rmsnorm import rmsnorm_bwd, rmsnorm_fwd, rmsnorm_fwd_naive_kernel
from xtrain.kernels.rope import rope_bwd, rope_fwd
from xtrain.kernels.runtime import compile as _compile
from xtrain.kernels.runtime import launch as _launch
from xtrain.kernels.runtime.compiler import COMPILER, cuda, float32, int64
from xtrain.kernels.runtime.launch import (
    check_array,
    check_ids,
    empty,
    empty_like,
    launch,
    note_launches,
    on_host,
    set_debug,
    struct_format,
    zeros,
)
from xtrain.kernels.swiglu import silu_bwd, silu_fwd, swiglu_bwd, swiglu_fwd
from xtrain.simulator import SimArray, sim


# ----------------------------------------------------------------------------- which implementation
def test_the_array_type_decides():
    x = np.ones(3, np.float32)
    assert on_host(x) and on_host(x, x.astype(np.int64))
    assert not on_host(sim(x)) and not on_host(to_kernel(x), to_kernel(x))


def test_a_mixture_is_refused_by_name():
    x = np.ones(3, np.float32)
    for mixture in ((x, sim(x)), (sim(x), x), (x, x, sim(x))):
        with pytest.raises(TypeError, match=r"on one device, got numpy\.ndarray, xtrain\.SimArray"):
            on_host(*mixture)
    with pytest.raises(TypeError, match=r"numpy\.float32"):
        on_host(x, np.float32(1))


@pytest.mark.gpu
def test_a_mixture_with_the_gpu():
    x = np.ones(3, np.float32)
    with pytest.raises(TypeError, match=r"on one device, got cupy\.ndarray, numpy\.ndarray"):
        on_host(x, to_device(x, "gpu"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BFLOAT16])
def test_unwritten_memory_is_poisoned_in_the_simulator(dtype):
    like = sim(np.ones(3, np.float32))
    assert np.isnan(np.asarray(empty(like, (2, 3), dtype)).astype(np.float32)).all()
    assert type(empty_like(like)) is SimArray


def test_unwritten_integers_are_poisoned_too():
    like = sim(np.ones(3, np.float32))
    assert (np.asarray(empty(like, 4, np.int32)) == 0x7F7F7F7F).all()
    assert empty(like, (0, 3), np.int64).shape == (0, 3)


@pytest.mark.parametrize("where", [np.asarray, sim, to_kernel])
def test_new_memory_lies_where_the_old_does(where):
    x = where(np.ones((2, 3), np.float32))
    assert type(empty(x, 5)) is type(zeros(x, (2, 2))) is type(empty_like(x)) is type(x)
    assert empty(x, 5).shape == (5,) and empty(x, 5).dtype == np.float32
    assert empty(x, (1, 2), np.int64).dtype == np.int64 and empty_like(x).shape == (2, 3)
    assert not to_host(zeros(x, (2, 2), np.int32)).any()


# ----------------------------------------------------------------------------- is the input sound
def test_check_array():
    x = np.ones((2, 3), np.float32)
    check_array("op", "x", x, (2, 3))
    check_array("op", "x", x, (None, 3))
    check_array("op", "x", x[:, ::2], (2, 2), strided=True)
    with pytest.raises(ValueError, match=r"^op: x has shape \(2, 3\), expected \(2, 4\)$"):
        check_array("op", "x", x, (2, 4))
    with pytest.raises(ValueError, match=r"^op: x has shape \(2, 3\), expected \(any, 3, 1\)$"):
        check_array("op", "x", x, (None, 3, 1))
    with pytest.raises(TypeError, match=r"^op: x is int32, expected float32$"):
        check_array("op", "x", x.astype(np.int32), (2, 3))
    with pytest.raises(TypeError, match=r"^op: x is int32, expected float32 or bfloat16$"):
        check_array("op", "x", x.astype(np.int32), (2, 3), ("float32", "bfloat16"))
    with pytest.raises(ValueError, match=r"^op: x with shape \(2, 2\) is not contiguous: copy it"):
        check_array("op", "x", x[:, ::2], (2, 2))


def test_float64_is_for_references_alone():
    x = np.ones(3)
    check_array("op", "x", x, (3,))
    with pytest.raises(TypeError, match="x is float64, expected float32"):
        check_array("op", "x", to_kernel(x), (3,))


def test_check_ids():
    check_ids("op", "ids", np.ones(3, np.uint8))
    for dtype in (np.float32, bool):
        with pytest.raises(ValueError, match=f"op: ids must be integers, got {np.dtype(dtype)}"):
            check_ids("op", "ids", np.ones(3, dtype))


# ----------------------------------------------------------------------------- start a kernel
@cuda.jit
def scalars_kernel(out, number, count, flag, small):
    """Grid 1, block 4."""
    tid = cuda.threadIdx.x
    value = number
    if tid == 1:
        value = float32(count // int64(1 << 30))
    elif tid == 2:
        value = float32(1.0) if flag else float32(2.0)
    elif tid == 3:
        value = float32(small)
    out[tid] = value


@pytest.mark.parametrize("flag", [True, False, np.bool_(True)])
def test_scalars(flag):
    """A Python int is passed as int64 (it may exceed 2^31), a float as float32, a bool as one byte."""
    out = to_kernel(np.zeros(4, np.float32))
    launch(scalars_kernel, 1, 4, out, -0.1, 5 << 30, flag, np.int32(-7))
    assert to_host(out).tolist() == [np.float32(-0.1), 5, 1 if flag else 2, -7]


def test_a_float64_scalar_is_refused():
    with pytest.raises(TypeError, match=r"np\.float32"):
        launch(scalars_kernel, 1, 4, to_kernel(np.zeros(4, np.float32)), np.float64(1), 1, True, 1)


@cuda.jit
def copy_kernel(y, x):
    """Grid (rows, slabs), block columns."""
    b, i, j = cuda.blockIdx.y, cuda.blockIdx.x, cuda.threadIdx.x
    y[b, i, j] = x[b, i, j]


VIEWS = {
    "whole": lambda x: x,
    "every second row": lambda x: x[:, ::2],
    "columns": lambda x: x[..., 1:4],
    "transposed": lambda x: x.transpose(2, 0, 1),
    "backwards": lambda x: x[::-1, :, ::-1],
    "one element": lambda x: x[1:2, 2:3, 3:4],
}


@pytest.mark.parametrize("target", ["contiguous", "view"])
@pytest.mark.parametrize("name", VIEWS)
def test_strides(name, target):
    values = normal(0, 3, 4, 5)
    x = VIEWS[name](to_kernel(values))
    B, I, J = x.shape  # noqa: E741
    y = to_kernel(np.full((B, I + 1, J), -1, np.float32))
    y = y[:, :I] if target == "view" else to_kernel(np.full((B, I, J), -1, np.float32))
    launch(copy_kernel, (I, B), J, y, x)
    assert np.array_equal(to_host(y), VIEWS[name](values))


@pytest.mark.parametrize("grid", [0, (0, 3), (3, 0), (2, 2, 0)])
def test_an_empty_grid_launches_nothing(grid):
    y = to_kernel(np.full((1, 1, 1), -1, np.float32))
    launch(copy_kernel, grid, 1, y, y)
    assert to_host(y).item() == -1


@cuda.jit
def reverse_kernel(y, x):
    """Grid 1, block any. Dynamic shared memory: n floats."""
    n, tid = x.size, cuda.threadIdx.x
    held = cuda.shared.array(0, float32)
    for i in range(tid, n, cuda.blockDim.x):
        held[i] = x[i]
    cuda.syncthreads()
    for i in range(tid, n, cuda.blockDim.x):
        y[i] = held[n - 1 - i]


@pytest.mark.parametrize("kilobytes", [1, 52, *([90, 2] if GPU else [])])
def test_dynamic_shared_memory(kilobytes):
    """Up to 48 KB is the default; for more, the launcher raises the limit."""
    x = np.arange(kilobytes * 256, dtype=np.float32)
    y = to_kernel(np.zeros_like(x))
    launch(reverse_kernel, 1, 64, y, to_kernel(x), shared=x.nbytes)
    assert np.array_equal(to_host(y), x[::-1])


@pytest.mark.parametrize("shared", [0, 1, 45312, 60000])
def test_the_driver_is_asked_for_all_dynamic_shared_memory(monkeypatch, shared):
    """Also below 48 KB: the default limit covers dynamic and static arrays together."""
    asked, function = [], SimpleNamespace(ptr=7)
    module = SimpleNamespace(load=lambda cubin: None, get_function=lambda name: function)
    driver = SimpleNamespace(funcSetAttribute=lambda *a: asked.append(a), CUDADriverError=OSError)
    cuda_ = SimpleNamespace(function=SimpleNamespace(Module=lambda: module), driver=driver)
    monkeypatch.setattr(_compile, "cupy", lambda: SimpleNamespace(cuda=cuda_))
    monkeypatch.setattr(_compile, "_cache_path", lambda kernel, signature: None)
    monkeypatch.setattr(_compile, "_compile", lambda kernel, signature: ("k", b""))
    monkeypatch.setattr(_compile, "_running", {})
    assert _compile.load_function(None, (), shared) == (7, module)
    assert asked == ([(7, _compile.MAX_DYNAMIC_SHARED, shared)] if shared else [])


@pytest.fixture
def compiling(monkeypatch):
    """A fake compiler and driver. -> the kernels compiled so far"""
    compiled, function = [], SimpleNamespace(ptr=7)
    module = SimpleNamespace(load=lambda cubin: None, get_function=lambda name: function)
    function_ = SimpleNamespace(Module=lambda: module)
    gpu = SimpleNamespace(cuda=SimpleNamespace(function=function_))
    monkeypatch.setattr(_compile, "cupy", lambda: gpu)
    monkeypatch.setattr(_compile, "_running", {})
    compile_ = lambda kernel, signature: compiled.append(kernel) or ("name", b"code")
    monkeypatch.setattr(_compile, "_compile", compile_)
    return compiled


def test_machine_code_is_kept_and_a_damaged_file_replaced(monkeypatch, tmp_path, compiling):
    path = tmp_path / "kernels" / "k.cubin"
    monkeypatch.setattr(_compile, "_cache_path", lambda kernel, signature: path)
    for damage, expected in ((None, 1), (None, 1), (b"damaged", 2), (None, 2)):
        if damage:
            path.write_bytes(damage)
        _compile.load_function("k", (), 0)
        assert len(compiling) == expected
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("where", ["no folder", "unreadable", "read-only"])
def test_a_cache_folder_that_cannot_be_used(monkeypatch, tmp_path, compiling, where):
    """The kernel is compiled once in each process; there is no error."""
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / ("file" if where == "no folder" else "kernels") / "k.cubin"
    monkeypatch.setattr(_compile, "_cache_path", lambda kernel, signature: path)

    def refuse(*_, **__):
        raise PermissionError

    if where == "unreadable":  # simulated: root can read everything
        for call in ("exists", "read_bytes", "write_bytes", "unlink"):
            monkeypatch.setattr(_compile.Path, call, refuse)
    elif where == "read-only":
        path.parent.mkdir()
        for call in ("write_bytes", "unlink"):
            monkeypatch.setattr(_compile.Path, call, refuse)
    _compile.load_function("k", (), 0)
    _compile.load_function("k", (), 0)
    assert compiling == ["k"]


def make_constant_kernel(value):
    @cuda.jit
    def constant_kernel(x):
        x[0] = value

    return constant_kernel


@pytest.fixture
def compilers(monkeypatch, tmp_path):
    """Four cores, and a fake compiler. -> jobs for compile_together: three kernels that are closures, so cannot be pickled"""
    device = SimpleNamespace(compute_capability="90")
    gpu = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device))
    monkeypatch.setattr(_compile, "cupy", lambda: gpu)
    monkeypatch.setattr(_compile, "cores", lambda: 4)
    monkeypatch.setattr(_compile.cuda, "current_context", lambda: None)
    if COMPILER == "mlir":
        monkeypatch.setattr(_compile.tools, "_cached_cc", "of this process")
        known = lambda: _compile.tools._cached_cc
    else:
        here = SimpleNamespace(device=SimpleNamespace(compute_capability="of this process"))
        monkeypatch.setattr(_compile.devices, "get_context", lambda: here)
        known = lambda: _compile.devices.get_context().device.compute_capability
    value = lambda kernel: kernel.py_func.__closure__[0].cell_contents
    path = lambda kernel, signature: tmp_path / f"{value(kernel)}.cubin"
    monkeypatch.setattr(_compile, "_cache_path", path)

    def translate(kernel, signature):
        time.sleep(0.2)  # so that no worker takes two
        return f"{value(kernel)} {os.getpid()}", repr((signature, known())).encode()

    monkeypatch.setattr(_compile, "_translate", translate)
    return [(make_constant_kernel(i), (i,)) for i in range(3)]


def test_kernels_are_compiled_in_several_processes(compilers):
    code, compiled = _compile.compile_together(compilers)
    names = [code[job][0].split() for job in compilers]
    assert compiled == 3 and [name for name, _ in names] == ["0", "1", "2"]
    assert len({process for _, process in names} - {str(os.getpid())}) == 3
    assert [code[job][1] for job in compilers] == [b"((%d,), (9, 0))" % i for i in range(3)]
    more = (make_constant_kernel(3), (3,))
    again, compiled = _compile.compile_together([*compilers, more])
    assert compiled == 1 and again.items() > code.items()


def test_a_launch_waits_for_its_own_kernel_only(monkeypatch, compilers, tmp_path):
    """Each kernel is compiled once, in another process: the last one when a file appears."""
    go, translate = tmp_path / "go", _compile._translate

    def waits(kernel, signature):
        while signature == (2,) and not go.exists():
            time.sleep(0.01)
        return translate(kernel, signature)

    monkeypatch.setattr(_compile, "_translate", waits)
    monkeypatch.setattr(_compile, "_compile", None)  # not here
    assert _compile.start_compiling(compilers) == 3
    assert _compile.start_compiling(compilers) == 0
    first, second, last = compilers
    early = [_compile.machine_code(job) for job in (first, second)]
    assert not _compile._running[last].done()
    go.touch()
    codes = [*early, _compile.machine_code(last)]
    assert len({name.split()[1] for name, _ in codes} - {str(os.getpid())}) == 3
    assert _compile.compile_together(compilers) == (dict(zip(compilers, codes)), 0)


def test_threads_compile_a_kernel_once(monkeypatch, compiling, tmp_path):
    monkeypatch.setattr(_compile, "_cache_path", lambda kernel, signature: tmp_path / "k.cubin")
    slow = lambda kernel, signature: (time.sleep(0.1), compiling.append(kernel), ("k", b""))[-1]
    monkeypatch.setattr(_compile, "_compile", slow)
    threads = [threading.Thread(target=_compile.machine_code, args=(("k", ()),)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiling == ["k"] and not _compile._running


def test_ctrl_c_is_for_one_thread(monkeypatch, compiling, tmp_path):
    """One that waits for the interrupted one compiles the kernel itself."""
    monkeypatch.setattr(_compile, "_cache_path", lambda kernel, signature: tmp_path / "k.cubin")
    compile_, main = _compile._compile, threading.get_ident()
    waits = lambda: thread.submit(_compile.machine_code, ("k", ()))

    def interrupted(kernel, signature):
        if threading.get_ident() == main:
            found.append(waits())
            while not _compile._running["k", ()]._condition._waiters:
                time.sleep(0.01)
            raise KeyboardInterrupt
        return compile_(kernel, signature)

    found = []
    monkeypatch.setattr(_compile, "_compile", interrupted)
    with (
        ThreadPoolExecutor(1) as thread,
        pytest.warns(UserWarning, match=r"KeyboardInterrupt\(\) in another"),
    ):
        with pytest.raises(KeyboardInterrupt):
            _compile.machine_code(("k", ()))
        assert found[0].result() == ("name", b"code") and compiling == ["k"]


@pytest.mark.parametrize("how", ["it raises", "it dies"])
def test_a_compiler_process_that_fails(monkeypatch, compilers, how):
    """This process then compiles, and says so; a kernel's own error is raised here."""
    here, translate = os.getpid(), _compile._translate

    def fails(kernel, signature):
        if os.getpid() != here:
            time.sleep(0.5)  # until this process asks for the code: it does not ask what has ended
            os._exit(1) if how == "it dies" else 1 / 0
        return translate(kernel, signature)

    monkeypatch.setattr(_compile, "_translate", fails)
    with pytest.warns(UserWarning, match="kernels are compiled one at a time, which takes longer"):
        code, compiled = _compile.compile_together(compilers)
    assert compiled == 3
    assert {name.split()[1] for name, _ in code.values()} == {str(here)}


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def test_a_process_that_may_not_have_children(monkeypatch, compilers):
    """A worker of multiprocessing.Pool compiles here."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    code, compiled = _compile.compile_together(compilers)
    assert compiled == 3 and {name.split()[1] for name, _ in code.values()} == {str(os.getpid())}


@needs_fork
def test_no_compiler_stays_if_a_fork_fails(monkeypatch, compilers):
    """The first one would wait for jobs, and the exit of this process for it."""
    fork, pids = os.fork, []

    def fails():
        if pids:
            raise OSError("no memory")
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", fails)
    _, compiled = _compile.compile_together(compilers)
    assert compiled == 3
    ended = []
    for process in [p for p in multiprocessing.active_children() if p.pid in pids]:
        process.join(10)
        ended.append(process.exitcode is not None)
        process.kill()
    assert pids and all(ended)


@needs_fork
def test_no_compiler_stays_if_its_process_is_killed(monkeypatch, compilers):
    """Neither one that compiles nor one that waits for jobs."""
    read, write = os.pipe()

    def translate(kernel, signature):
        os.write(write, b"x")
        time.sleep(60 * signature[0])
        return "k", b""

    monkeypatch.setattr(_compile, "_translate", translate)
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            _compile.start_compiling(compilers)
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(write)
    for _ in compilers:  # all have begun
        os.read(read, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    ended, _, _ = select.select([read], [], [], 10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    assert ended and not os.read(read, 1)  # no process has the other end
    os.close(read)


def test_noted_launches_do_not_run(monkeypatch):
    """In this thread; another thread launches as always."""
    x = sim(np.zeros(3, np.float32))
    kernel, other = make_constant_kernel(5), sim(np.zeros(3, np.float32))
    with note_launches() as found:
        launch(kernel, 1, 1, x)
        launch(kernel, 2, 1, x)
        launch(kernel, 0, 1, x.astype(np.int32))  # an empty grid
        thread = threading.Thread(target=launch, args=(kernel, 1, 1, other))
        thread.start()
        thread.join()
    (special,) = found.values()
    assert (
        special.kernel is kernel
        and len(special.types) == 1
        and special.layout == "q" * len(struct_format(x))
    )
    assert x[0] == 0 and other[0] == 5
    launch(kernel, 1, 1, x)
    assert x[0] == 5


ROOMS = sorted(
    {p.parent.relative_to(_compile.KERNELS_FOLDER) for p in _compile.KERNELS_FOLDER.rglob("*.py")}
)


@pytest.fixture
def cache_path(monkeypatch, tmp_path):
    """-> cache_path(): the cache file of a kernel, with the kernel sources in a copy below tmp_path / "kernels"."""
    folder = shutil.copytree(_compile.KERNELS_FOLDER, tmp_path / "kernels")
    device = SimpleNamespace(compute_capability="90")
    gpu = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device))
    monkeypatch.setattr(_compile, "KERNELS_FOLDER", folder)
    monkeypatch.setattr(_compile, "cupy", lambda: gpu)
    monkeypatch.setattr(_compile, "_versions", lambda: ())
    kernel = SimpleNamespace(py_func=rmsnorm_fwd_naive_kernel.py_func, targetoptions={})

    def path():
        _compile.sources_digest.cache_clear()
        return _compile._cache_path(kernel, ())

    yield path
    _compile.sources_digest.cache_clear()


def test_the_rooms_of_the_kernels():
    names = {str(room) for room in ROOMS}
    assert names == {".", "attention", "decoding", "experts", "primitives", "runtime"}


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_changed_source_file_changes_the_cache_key(cache_path, tmp_path, room):
    """In every room: a kernel may use a device function from any of them."""
    before = cache_path()
    assert before is not None and before == cache_path()
    file = next(
        p for p in sorted((tmp_path / "kernels" / room).glob("*.py")) if p.stem != "__init__"
    )
    source = file.read_bytes()
    file.write_bytes(source + b"\n")
    assert cache_path() != before
    file.write_bytes(source)
    assert cache_path() == before
    (file.parent / "new.py").write_bytes(b"x = 1\n")
    assert cache_path() != before


def test_kernels_of_the_factories_have_a_cache_key():
    """Their closures hold only what has a stable text form; a plan in a closure would disable the cache."""
    makers = (
        rmsnorm.make_fwd_kernel(64, 8, True),
        rmsnorm.make_bwd_kernel(64, 8, True, True, True, True),
        residual.make_fwd_kernel(64, 4, True),
        rope.make_rope_kernel(2, 32, 8, True),
        qk_norm_rope.make_fwd_kernel(2, 1, 32, 8, True, True),
        qk_norm_rope.make_bwd_kernel(2, 1, 32, 8, True, True, True),
    )
    kernels = [
        *(made.kernel for made in makers),
        cross_entropy_.make_cross_entropy_kernel(8, True, cross_entropy_.PLANS[8]),
        embedding.make_fwd_kernel(64, True),
        embedding.make_bwd_kernel(64, True),
        embedding.make_join_kernel(64, True, True),
        embedding.make_split_kernel(32),
        embedding.make_sort_kernel(32),
        swiglu.make_swiglu_fwd_kernel(64, True),
        swiglu.make_swiglu_bwd_kernel(64, True, True),
        softmax.make_fwd_kernel(1, 2, 4),
        softmax.make_bwd_kernel(1, 2, 4),
        layout.make_swap_kernel(64, 8),
    ]
    for kernel in kernels:
        assert _compile._identity(kernel.py_func) is not None, kernel.py_func.__name__


def test_threads_do_not_share_arguments(monkeypatch):
    """Threads launch one kernel: each launch reads the arguments that its own thread has written. All run the code that is kept:
    a graph may refer to it."""
    started, loaded, used, second = [], itertools.count(), set(), threading.Event()

    def load(*_):
        number = next(loaded)
        if number:
            second.set()
        second.wait(10)  # until two threads load at the same time
        return number, None

    def start(function, *rest):
        address = ctypes.c_void_p.from_address(rest[-2]).value  # of the first argument
        time.sleep(1e-3)  # lets the other thread run
        started.append((ctypes.c_int64.from_address(address).value, rest[0]))
        used.add(function)

    gpu = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0), get_current_stream=lambda: SimpleNamespace(ptr=0),
        driver=SimpleNamespace(launchKernel=start, CUDADriverError=OSError),
    )  # fmt: skip
    monkeypatch.setattr(_launch, "cupy", lambda: SimpleNamespace(cuda=gpu))
    monkeypatch.setattr(_launch, "load_function", load)
    kernel = type("Kernel", (), {"py_func": lambda: None})()
    one = lambda n: _launch._launch_gpu(kernel, (n, 1, 1), (1, 1, 1), (np.int64(n),), 0, False)
    threads = [threading.Thread(target=one, args=(n,)) for n in range(1, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(started) == [(n, n) for n in range(1, 30)]
    assert len(used) == 1 and next(loaded) > 1


# ----------------------------------------------------------------------------- on the GPU
@pytest.mark.gpu
def test_a_signature_is_compiled_once():
    a, b = (to_device(normal(i, 3, 4, 5), "gpu") for i in (0, 1))
    launch(copy_kernel, (4, 3), 5, a, b)
    compiled, functions = len(copy_kernel.overloads), len(_launch._plans)
    launch(copy_kernel, (2, 1), 3, b, a)
    launch(copy_kernel, (2, 1), 3, b[:1], a[:1])  # other sizes, still contiguous
    assert (len(copy_kernel.overloads), len(_launch._plans)) == (compiled, functions)
    launch(copy_kernel, (4, 3), 5, a.astype(np.float64), b)
    assert len(_launch._plans) == functions + 1


@pytest.mark.gpu
def test_the_current_stream_is_used_and_can_be_captured():
    x, y = to_device(normal(0, 1, 4, 5), "gpu"), to_device(np.zeros((1, 4, 5), np.float32), "gpu")
    launch(copy_kernel, (4, 1), 5, y, x)  # compiled before the capture
    y.fill(0)
    cupy().cuda.Device().synchronize()
    stream = cupy().cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        launch(copy_kernel, (4, 1), 5, y, x)
        graph = stream.end_capture()
        assert not to_host(y).any()  # recorded, not run
        graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(to_host(y), to_host(x))


@pytest.mark.gpu
def test_debug_waits_after_every_launch():
    x, y = to_device(normal(0, 1, 4, 5), "gpu"), to_device(np.zeros((1, 4, 5), np.float32), "gpu")
    set_debug(True)
    try:
        launch(copy_kernel, (4, 1), 5, y, x)
    finally:
        set_debug(False)
    assert np.array_equal(to_host(y), to_host(x))


@pytest.mark.gpu
def test_a_launch_that_the_driver_refuses_names_the_kernel():
    x = to_device(normal(0, 1, 4, 5), "gpu")
    with pytest.raises(RuntimeError, match="copy_kernel"):
        launch(copy_kernel, 1, 2048, x, x)  # a block has at most 1024 threads


@pytest.fixture
def beyond():
    """2^31 + 2^17 floats, 8.6 GB: all 0.5 but the last 2^17, which are random. Indices of 32 bits would wrap."""
    free = cupy().cuda.runtime.memGetInfo()[0]
    if free < 28 << 30:
        # Indices beyond 2^31 need three arrays of that length.
        pytest.skip(f"needs 28 GB of free GPU memory, there are {free >> 30}")
    base = cupy().full(2**31 + 2**17, 0.5, np.float32)
    base[-(2**17) :] = to_device(normal(0, 2**17), "gpu")
    yield base
    del base
    cupy().get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
@pytest.mark.parametrize("C", [1024, 4096])  # one warp per row, one block per row
def test_rmsnorm_beyond_2_31_elements(beyond, C):
    from xtrain.kernels.rmsnorm import rmsnorm_fwd, rmsnorm_ref

    x, w = beyond.reshape(-1, C), normal(1, C)
    y, rstd = rmsnorm_fwd(x, to_device(w, "gpu"), 1e-6)
    N = x.shape[0]
    rows = np.array([0, 1, N // 2, 2**31 // C - 1, 2**31 // C, N - 2, N - 1])
    want_y, want_rstd = rmsnorm_ref(to_host(x[rows]), w, 1e-6)
    np.testing.assert_allclose(to_host(y[rows]), want_y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(to_host(rstd[rows]), want_rstd, rtol=1e-5)


@pytest.mark.gpu
def test_embedding_beyond_2_31_elements(beyond):
    from xtrain.kernels.embedding import embedding_bwd, embedding_fwd

    w, C = beyond.reshape(-1, 1024), 1024
    V = w.shape[0]
    ids = np.array([V - 1, 0, 2**21, 2**21 - 1, V - 1, V - 2])
    there = to_device(ids, "gpu")
    assert np.array_equal(to_host(embedding_fwd(there, w)), to_host(w[there]))
    dx = normal(2, ids.size, C)
    dw = cupy().zeros_like(w)
    embedding_bwd(to_device(dx, "gpu"), there, dw)
    want = {V - 1: dx[0] + dx[4], 0: dx[1], 2**21: dx[2], 2**21 - 1: dx[3], V - 2: dx[5], V - 3: 0 * dx[0], 1: 0 * dx[0]}  # fmt: skip
    for row, gradient in want.items():
        np.testing.assert_allclose(to_host(dw[row]), gradient, rtol=1e-6)
    assert float(cupy().abs(dw).sum(dtype=np.float64)) == pytest.approx(
        sum(np.abs(g).sum(dtype=np.float64) for g in want.values()), rel=1e-5
    )


@pytest.mark.gpu
def test_cross_entropy_beyond_2_31_elements(beyond):
    from xtrain.kernels.cross_entropy import cross_entropy, cross_entropy_ref

    P = 2**17
    logits = beyond.reshape(-1, P)
    N, V = logits.shape[0], P - 5
    targets = np.arange(N) % V
    inv_count = np.array([0.25], np.float32)
    rows = np.array([0, N - 2, N - 1])
    want_loss, want = cross_entropy_ref(to_host(logits[rows]), targets[rows], V, inv_count)
    arrays = to_device(targets, "gpu"), V, to_device(inv_count, "gpu")
    loss, gradient = cross_entropy(logits, *arrays)
    np.testing.assert_allclose(to_host(loss[rows]), want_loss, rtol=1e-5)
    np.testing.assert_allclose(to_host(gradient[rows]), want, rtol=1e-4, atol=1e-9)


def _qk_norm_bwd(w, rstd, rope, ids):
    def call(qkv, *d):
        dqkv = np.zeros_like(qkv)
        sums = w[:4] * 0, w[4:] * 0
        qk_norm_rope_bwd(
            dqkv, *d, qkv, w[:4], w[4:], rstd[:, None] * w[:3], *rope, 2, 1, 3, *sums, ids
        )
        return dqkv, *(x.astype(qkv.dtype) for x in sums)

    return call


def test_bf16_on_the_cpu():
    """NumPy's einsum does not support bf16: the references compute in float32 and round once, as the kernels do."""
    half = lambda i, *shape: normal(i, *shape).astype(BFLOAT16)
    rope = normal(8, 5, 2), normal(9, 5, 2)
    w, rstd, targets, inv = (
        normal(1, 8),
        normal(2, 3) ** 2,
        np.array([1, 0, 4]),
        np.ones(1, np.float32),
    )
    ids = np.arange(3)

    def swiglu_again(dy, gu):
        return swiglu_bwd(dy, gu, recompute_y=True), dy

    def table_gradient(dx):
        dw = np.zeros((2, 2), np.float32)
        embedding_bwd(dx, np.ones(3000, int), dw)
        return dx, dw

    cases = {
        "rmsnorm": (lambda x: rmsnorm_fwd(x, w, 1e-6), (half(3, 3, 8),)),
        "rmsnorm backward": (lambda dy, x: rmsnorm_bwd(dy, x, w, rstd, w * 0), (half(3, 3, 8), half(4, 3, 8))),
        "residual": (lambda x, r: residual_rmsnorm_fwd(x, r, w, 1e-6), (half(3, 3, 8), half(4, 3, 8))),
        "cross entropy": (lambda x: cross_entropy(x, targets, 5, inv), (half(3, 3, 8),)),
        "qk norm": (lambda x: qk_norm_rope_fwd(x, w[:4], w[4:], *rope, 2, 1, 3, 1e-6, ids), (half(3, 3, 16),)),
        "rope": (lambda x: rope_fwd(x, *rope, ids), (half(3, 3, 2, 4),)),
        "rope backward": (lambda dy: rope_bwd(dy, *rope, ids), (half(3, 3, 2, 4),)),
        "swiglu": (swiglu_fwd, (half(3, 3, 8),)),
        "swiglu backward": (swiglu_again, (half(3, 3, 4), half(4, 3, 8))),
        "silu": (silu_fwd, (half(3, 3, 8),)),
        "silu backward": (silu_bwd, (half(3, 3, 8), half(4, 3, 8))),
        "embedding backward": (table_gradient, (np.ones((3000, 2), BFLOAT16),)),
        "qk norm backward": (_qk_norm_bwd(w, rstd, rope, ids), (half(3, 3, 16), half(4, 3, 2, 4), half(5, 3, 1, 4))),
    }  # fmt: skip
    for name, (call, given) in cases.items():
        want, got = call(*(x.astype(np.float32) for x in given)), call(*(x.copy() for x in given))
        want, got = (x if isinstance(x, tuple) else (x,) for x in (want, got))
        assert any(g.dtype == BFLOAT16 for g in got), name
        for w_, g in zip(want, got):
            assert np.array_equal(w_.astype(g.dtype), g), name
    assert rmsnorm_fwd(half(3, 3, 8), w, 1e-6, np.float32)[0].dtype == np.float32
