"""Compile a @cuda.jit kernel for given argument types, and cache the machine code on disk.

Numba compiles Python to PTX and machine code (a cubin), which takes from a tenth of a second to
several seconds per kernel. The machine code of xtrain's own kernels is cached in
$XTRAIN_CACHE/kernels. The cache key covers everything that the machine code depends on: the source
of all files below xtrain/kernels, the kernel's name and closure constants, the argument types, the
compute capability and the library versions. A second process, or a second rank, compiles nothing. A
cache file is written under a temporary name and then renamed, so many ranks may write it at the
same time.

Numba compiles one kernel at a time, so several are compiled in as many forked processes:
`start_compiling` returns at once, and a launch that needs one of them later waits for that one.
`compile_together` waits for all.

Kernels defined outside xtrain/kernels (in a lesson or a test) are compiled in each process: their
sources are not in the key.
"""

import concurrent.futures
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...blas import cores
from ...device import cache_folder, cupy
from .compiler import COMPILER, cuda, types

if COMPILER == "numba":
    from numba.cuda import api, dispatcher
    from numba.cuda.cudadrv import devices
elif COMPILER == "mlir":
    from numba_cuda_mlir import tools
    from numba_cuda_mlir.numba_cuda import dispatcher  # type: ignore[no-redef]

    from . import mlir_changes  # noqa: F401  before the first kernel is compiled

KERNELS_FOLDER = Path(__file__).parents[1]
PACKAGE = __package__.removesuffix(".runtime")  # xtrain.kernels
PARENT_SECONDS = 0.5  # between two looks whether the process that forked a compiler still runs
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


MachineCode = tuple[str, bytes]  # the kernel's name in it, the code


def load_function(
    kernel, signature: tuple, shared: int, code: MachineCode | None = None
) -> tuple[int, object]:
    """Compile `kernel` for the Numba types in `signature`, or load it from the cache.

    Returns the driver's function handle, and the module that must stay alive as long as the handle
    is used.
    shared: bytes of dynamic shared memory that it will be launched with.
    code: if it has been compiled already.
    Raises RuntimeError if the GPU does not have that much shared memory.
    """
    name, cubin = code or machine_code((kernel, signature))
    module = cupy().cuda.function.Module()
    module.load(cubin)
    function = module.get_function(name)
    if shared:  # the default limit is 48 KB, static arrays included
        allow_shared(function.ptr, shared, kernel)
    return function.ptr, module


def allow_shared(handle: int, shared: int, kernel) -> None:
    """Raise a kernel's limit of dynamic shared memory to `shared` bytes, besides its static arrays.

    handle: the driver's function handle. Raises RuntimeError if the GPU has less.
    """
    driver = cupy().cuda.driver
    try:
        driver.funcSetAttribute(handle, MAX_DYNAMIC_SHARED, shared)
    except driver.CUDADriverError as error:
        name = kernel.py_func.__name__
        raise RuntimeError(
            f"{name} needs {shared} bytes of shared memory, "
            f"but the driver rejected the request: {error}"
        ) from error


def _compile(kernel, signature):
    """Return the kernel's name in the machine code, and the machine code."""
    cuda.current_context()  # Numba compiles for CuPy's current device
    return _translate(kernel, signature)


def _translate(kernel, signature):
    if COMPILER == "mlir":
        # With link-time optimization, which numba-cuda uses by default, the machine code is that of
        # a whole program. A linker that gets PTX makes relocatable code: wgmma products wait for
        # each other, and a division calls a function.
        options = {**kernel.targetoptions, "lto": True}
        compiled = type(kernel)(kernel.py_func, targetoptions=options).compile(signature).metadata
        return compiled["func_name"], bytes(compiled["cubin"])
    kernel.compile(signature)
    compiled = kernel.overloads[signature]
    # numba-cuda 0.30 has no public function that returns the machine code.
    code = compiled._codelibrary.get_cubin()
    return compiled.entry_name, bytes(getattr(code, "code", code))


# ------------------------------------------------------------------------ several kernels at a time
# the machine code of jobs that are being compiled, or whose code could not be written
_running: dict[tuple, concurrent.futures.Future] = {}
_running_lock = threading.Lock()


def compile_together(jobs: Sequence[tuple]) -> tuple[dict[tuple, MachineCode], int]:
    """Return the machine code of each (kernel, signature), and how many were not in the cache.

    Those are compiled in several processes, one per core at most.
    """
    missing = start_compiling(jobs, fewest=2)
    return {job: machine_code(job) for job in jobs}, missing


def start_compiling(jobs: Sequence[tuple], fewest: int = 1) -> int:
    """Begin to compile each (kernel, signature) that is not in the cache, in other processes.
    Return how many these are.

    With one core, where processes cannot be forked, and for less than `fewest` jobs nothing begins:
    `machine_code` then compiles when it is called.
    """
    with _running_lock:
        paths = {job: _cache_path(*job) for job in jobs if job not in _running}
        missing = [job for job, path in paths.items() if not _read(path)]
        started = {}
        if len(missing) >= fewest:
            started = _compile_in_processes(missing)
        _running.update(started)
    for job, future in started.items():
        future.add_done_callback(functools.partial(_finish, job, paths[job]))
    return len(missing)


def machine_code(job: tuple) -> MachineCode:
    """Return the machine code of a (kernel, signature): from the cache, from the process or thread
    that is compiling it, or compiled here."""
    path = _cache_path(*job)
    with _running_lock:
        running = _running.get(job)
        if running is None:
            code = _read(path)
            if code:
                return code
            here = _running[job] = concurrent.futures.Future()
    if running is None:
        try:
            here.set_result(_compile(*job))
        except BaseException as error:
            if not here.done():  # others must not get Ctrl-C, which is for this thread
                here.set_exception(RuntimeError(f"{error!r} in another thread"))
            raise
        finally:
            _finish(job, path, here)
        return here.result()
    try:
        return running.result()
    except Exception as error:  # a kernel's, or that of a process: compiling here will show it
        text = f"kernels are compiled one at a time, which takes longer: {error}"
        warnings.warn(text, stacklevel=2)
        return _compile(*job)


def _finish(job: tuple, path: Path | None, future: concurrent.futures.Future) -> None:
    """Keep the result on disk, or in memory if it cannot be written."""
    if future.exception() is None and not _write(path, *future.result()):
        return
    with _running_lock:
        _running.pop(job, None)


def _compile_in_processes(jobs: Sequence[tuple]) -> dict[tuple, concurrent.futures.Future]:
    """Begin to compile jobs in forked processes, one per core at most. Return their results to
    come; none if there are no processes.

    Forked, because a kernel that is a closure cannot be sent to another process. A fork has a copy
    of every lock. No other thread may hold Numba's at that moment: the fork would wait for it
    forever.
    """
    daemon = multiprocessing.current_process().daemon  # such as a Pool's: may have no children
    if cores() <= 1 or daemon or "fork" not in multiprocessing.get_all_start_methods():
        return {}
    capability = cupy().cuda.Device().compute_capability  # "90"
    capability = int(capability[:-1]), int(capability[-1])
    fork = multiprocessing.get_context("fork")
    workers = concurrent.futures.ProcessPoolExecutor(
        min(cores(), len(jobs)), fork, _start_worker, (jobs, capability, os.getpid())
    )
    started: Any = workers._processes
    with warnings.catch_warnings(), dispatcher.global_compiler_lock:
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        try:  # the processes are forked in the first call of `submit`
            return {job: workers.submit(_compile_number, i) for i, job in enumerate(jobs)}
        except BaseException as error:
            for process in started.values():  # else they would wait for jobs, and the exit for them
                process.kill()
            if not isinstance(error, (OSError, concurrent.futures.BrokenExecutor)):
                raise
            return {}  # machine_code compiles
        finally:
            workers.shutdown(wait=False)  # they end when all is compiled


_jobs: list = []  # in a worker process


def _start_worker(jobs, capability, parent):
    """Prepare a forked process, in which CUDA does not work."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    gc.disable()  # nothing of CuPy may be freed here
    _jobs[:] = jobs
    compile_for(capability)


def compile_for(capability):
    """Compile in this process for a compute capability, (9, 0), without CUDA, which would only be
    asked for it."""
    if COMPILER == "mlir":
        tools._cached_cc = capability
        return
    device = SimpleNamespace(compute_capability=capability)
    context = SimpleNamespace(device=device)
    devices.get_context = api.current_context = lambda *_: context
    dispatcher._Kernel.bind = lambda kernel: None  # would load the machine code


def _end_with(parent):
    """End this process when the one that has started it is gone, however that ended: it would wait
    for jobs forever, with the files of that process open, the GPU's among them."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)


def _compile_number(i):
    return _translate(*_jobs[i])


# ----------------------------------------------------------------------------- the cache on disk
def _cache_path(kernel, signature) -> Path | None:
    """Return the cache file of this kernel and signature; None for a kernel that is not cached."""
    identity = _identity(kernel.py_func)
    if identity is None:
        return None
    device = cupy().cuda.Device()
    # mlir has a function among the options, and changes `chip`, which the compute capability
    # decides, when it compiles
    options = kernel.targetoptions.items()
    options = sorted(str(o) for o in options if o[0] != "chip" and not callable(o[1]))
    kernel_parts = (sources_digest(), identity, signature, options)
    parts = (*kernel_parts, device.compute_capability, _versions())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    return cache_folder() / "kernels" / f"{kernel.py_func.__name__}-{key[:32]}.cubin"


@functools.cache
def sources_digest() -> str:
    """Return a digest of all kernel files, in which a kernel may use any device function."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS_FOLDER.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _versions() -> tuple:
    names = ("numba", "numba-cuda", "llvmlite") if COMPILER == "numba" else ("numba-cuda-mlir",)
    return tuple((name, importlib.metadata.version(name)) for name in names), sys.version_info[:2]


def _identity(function) -> tuple | None:
    """Return module, name and closure of a kernel or device function of xtrain.kernels.

    None for a function of another package, and for a closure that holds a value without a stable
    text form.
    """
    if not function.__module__.startswith(f"{PACKAGE}."):
        return None
    constants = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        value = cell.cell_contents
        if hasattr(value, "py_func"):
            value = _identity(value.py_func)
        elif _is_plain_function(value):
            value = (value.__module__, value.__qualname__)
        elif not isinstance(value, (int, float, str, tuple, np.generic, types.Type, type(None))):
            value = None
        if value is None and cell.cell_contents is not None:
            return None
        constants.append((name, repr(value)))
    return function.__module__, function.__qualname__, tuple(constants)


def _is_plain_function(value):
    module = str(getattr(value, "__module__", ""))
    return hasattr(value, "__qualname__") and module.startswith(PACKAGE)


def _read(path: Path | None) -> MachineCode | None:
    """Return the kernel's name and machine code; None if there is no such file or it is damaged."""
    if path is None:
        return None
    try:
        checksum, name, cubin = path.read_bytes().split(b"\n", 2)
    except (OSError, ValueError):
        return None
    if hashlib.sha256(name + cubin).hexdigest().encode() != checksum:
        return None
    return name.decode(), cubin


def _write(path: Path | None, name: str, cubin: bytes) -> bool:
    """Return False if there is no file to write, or the disk is full or read-only."""
    if path is None:
        return False
    checksum = hashlib.sha256(name.encode() + cubin).hexdigest()
    content = b"\n".join((checksum.encode(), name.encode(), cubin))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True
