"""Launches of Numba's dispatchers: `kernel[grid, block, stream, shared](...)` and
`kernel.forall(n)(...)` run in the simulator.

The functions here take the place of methods of numba.cuda.dispatcher (host.py), or of
numba-cuda-mlir's MLIRDispatcher, so `self` is Numba's object, which may be older than the
replacement.
"""

import __future__

import builtins
import contextlib
import dataclasses
import inspect
import itertools
import linecache
import math
import os
import sys
import warnings
import weakref

import numpy as np

from . import frontends, settings, streams
from .api import launched
from .device import BLOCKS_PER_MULTIPROCESSOR, DEVICE, THREADS_PER_BLOCK
from .device_array import DeviceArray, auto_device, host_view, is_cuda_array
from .errors import KernelError
from .observers import observe
from .source import freeze
from .stepper import Stepper
from .twins import twin

# launches that ended in a KernelError, for --cuda-report; None: not recorded, which is faster
failed: list[Stepper] | None = None
NO_MACHINE_CODE = "the simulator has no machine code"


class KernelWarning(UserWarning):
    """A finding that is defined on current GPUs, but rarely meant, such as a barrier that waits for
    threads that have exited."""


def _warn(finding):
    warnings.warn(str(finding), KernelWarning, stacklevel=4)  # the line that launches the kernel


def cooperative_blocks(block) -> int:
    """Return how many blocks of this shape are resident at once on the simulated device."""
    if isinstance(block, tuple):
        threads = math.prod(block)
    else:
        threads = block
    each = min(BLOCKS_PER_MULTIPROCESSOR, DEVICE.MAX_THREADS_PER_MULTI_PROCESSOR // max(threads, 1))
    return DEVICE.MULTIPROCESSOR_COUNT * each


class Overload:
    """A signature of a kernel or of a device function, where Numba has the compiled code."""

    objectmode = False
    entry_point = None

    def __init__(self, frontend, argtypes, return_type):
        self.argtypes = argtypes
        self.signature = frontend.signature(return_type or frontend.types.void, *argtypes)

    def max_cooperative_grid_blocks(self, blockdim, dynsmemsize=0) -> int:
        """Return how many blocks are resident at once on the simulated device, by its limits of
        blocks and threads."""
        return cooperative_blocks(blockdim)

    def __getattr__(self, name):
        if name.startswith(("inspect_", "get_", "library", "regs_")):
            raise NotImplementedError(f"{name}: {NO_MACHINE_CODE}")
        raise AttributeError(name)


# ----------------------------------------------------------------------------- methods of numba.cuda.dispatcher
def compile(self, sig, **options):
    """CUDADispatcher.compile: remembers the signature."""
    frontend = frontends.of(self)
    argtypes, return_type = frontend.normalize_signature(sig)
    freeze(self.py_func)
    return self.overloads.setdefault(argtypes, Overload(frontend, argtypes, return_type))


def compile_device(self, args, return_type=None):
    """CUDADispatcher.compile_device"""
    freeze(self.py_func)
    return self.overloads.setdefault(args, Overload(frontends.of(self), args, return_type))


def enable_caching(self):
    """CUDADispatcher.enable_caching: there is no compiled code to keep."""


def configure(self, griddim, blockdim, stream=None, sharedmem=None, cluster=None):
    """MLIRDispatcher.configure: kernel[griddim, blockdim, stream, sharedmem, cluster]"""
    if cluster is not None and np.prod(cluster) != 1:
        raise NotImplementedError(f"a launch in clusters of {cluster} blocks is not simulated")
    grid, block = frontends.of(self).normalize_dimensions(griddim, blockdim)
    return Configured(self, grid, block, stream or 0, sharedmem or 0)


def forall(self, *args):
    """ForAll.__call__: chooses the block, as Numba's driver does."""
    if self.ntasks == 0:
        return
    block = self.thread_per_block or THREADS_PER_BLOCK
    self.dispatcher[-(-self.ntasks // block), block, self.stream, self.sharedmem](*args)


def launch(self, *args):
    """_LaunchConfiguration.__call__: run the kernel. A KernelError is raised from the line that
    launches it."""
    __tracebackhide__ = True  # in pytest's reports
    kernel = self.dispatcher
    options = self.dispatcher.targetoptions
    if options.get("device"):
        raise RuntimeError("Cannot compile a device function as a kernel")
    frontend = frontends.of(kernel)
    argtypes = _declared(frontend, kernel, args)
    copies_back: list = []
    for extension in reversed(kernel.extensions or ()):
        pairs = [
            extension.prepare_args(frontend.typeof(a), a, stream=self.stream, retr=copies_back)
            for a in args
        ]
        args = [value for _, value in pairs]
    stream = self.stream
    prepared = [_prepare(a, copies_back, stream) for a in args]
    if argtypes is not None:
        prepared = [_cast(value, kind) for value, kind in zip(prepared, argtypes)]
    stepper = None
    if failed is not None:
        stepper = Stepper()
    try:
        with contextlib.nullcontext() if stepper is None else observe(stepper):
            shared = self.sharedmem
            grid = self.griddim
            block = self.blockdim
            most = cooperative_blocks(block)
            more = dict(
                shared=shared, warn=_warn, cooperative=most, **settings.current().keywords()
            )
            streams.launched(stream, launched(kernel, grid, block, *prepared, **more))
    except KernelError as error:
        if failed is not None and stepper is not None:
            stepper.error = error
            failed.append(stepper)
        if options.get("debug") and _raised(error) is not None:
            raise _raised(error) from None
        raise error.with_traceback(_own_frames(error.__traceback__)) from error.__cause__
    finally:
        for copy in copies_back:
            copy()


@dataclasses.dataclass
class Configured:
    """A kernel with its launch configuration, where numba-cuda-mlir has an object of compiled
    code."""

    dispatcher: object
    griddim: tuple[int, ...]
    blockdim: tuple[int, ...]
    stream: object
    sharedmem: int

    __call__ = launch


# ----------------------------------------------------------------------------- generated code
_exec = builtins.exec
_numbers = itertools.count()
_FUTURES = __future__.annotations.compiler_flag


def exec_with_source(source, globals=None, locals=None, **more):
    """builtins.exec, which keeps the text: the simulator reads a kernel's source, also if a program
    generates the kernel."""
    caller = sys._getframe(1)
    if globals is None:
        globals = caller.f_globals
        if locals is None:
            # from Python 3.13 on, the f_locals of a function write to its variables, which exec
            # does not
            copied = caller.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info >= (3, 13)
            if copied:
                locals = dict(caller.f_locals)
            else:
                locals = caller.f_locals
    if isinstance(source, str):
        file = f"<generated code {next(_numbers)}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        futures = caller.f_code.co_flags & _FUTURES
        source = builtins.compile(source, file, "exec", futures, dont_inherit=True)
        _forget_with(source, file)
    _exec(source, globals, locals, **more)


def _forget_with(code, file):
    """Drop the text with the last function that was defined in it; at once if there is none."""
    functions = [c for c in code.co_consts if inspect.iscode(c)]
    left = len(functions)

    def forget():
        nonlocal left
        left -= 1
        if left <= 0:
            linecache.cache.pop(file, None)

    for function in functions or [code]:
        weakref.finalize(function, forget).atexit = False


# ----------------------------------------------------------------------------- arguments
def _declared(frontend, dispatcher, args):
    """Return the declared argument types that a launch uses; None if the kernel was declared
    without."""
    if dispatcher._can_compile:
        return None
    given = tuple(_type_of(frontend, a) for a in args)
    chosen = frontend.fitting(dispatcher, given)
    if chosen is None:  # none, or two that are equally good
        kinds = ", ".join(map(str, given))
        raise TypeError(f"No matching definition for argument type(s) {kinds}")
    return chosen


def _type_of(frontend, a):
    """Return the Numba type of an argument."""
    _, a = _hint(a)
    if is_cuda_array(a):
        a = auto_device(a)[0]
    if isinstance(a, DeviceArray):
        return a.type_in(frontend)
    return frontend.typeof(a)


def _hint(value):
    """Return ("in", "out" or "in and out", the array) of cuda.In(x), cuda.Out(x), cuda.InOut(x) and
    x."""
    for f in frontends.known():
        if isinstance(value, f.ArgHint):
            if isinstance(value, f.In):
                return "in", value.value
            return "out" if type(value) is f.Out else "in and out", value.value
    return "in and out", value


def _prepare(value, copies_back, stream):
    """Return an argument as `run` takes it. copies_back: functions to call after the kernel, for
    arrays of the host, which are copied in this stream."""
    kind, value = _hint(value)
    if isinstance(value, tuple):
        values = [_prepare(v, copies_back, stream) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*values)
        return tuple(values)
    if is_cuda_array(value):
        return host_view(value)
    if not isinstance(value, np.ndarray):
        if isinstance(value, np.void) and kind == "in":
            return value.copy()
        return value
    device, _ = auto_device(value, stream, copy=kind != "out")
    if kind != "in" and value.flags.writeable:
        copies_back.append(lambda: device.copy_to_host(value, stream))
    return device.array


def _cast(value, kind):
    """Return a number as the type that the signature declares."""
    if not frontends.is_number(kind):
        return value
    if frontends.is_integer(kind) and isinstance(value, (float, np.floating)):
        raise TypeError(f"the signature declares {kind}, and {value!r} is not an integer")
    return twin(kind)(value)


# ----------------------------------------------------------------------------- errors
_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _own_frames(trace):
    """Return a traceback without the frames of the simulator: the launch, then the lines of the
    kernel."""
    frames = []
    while trace is not None:
        if os.path.dirname(os.path.abspath(trace.tb_frame.f_code.co_filename)) != _FOLDER:
            frames.append(trace)
        trace = trace.tb_next
    for frame, following in zip(frames, [*frames[1:], None]):
        frame.tb_next = following
    return frames[0] if frames else None


def _raised(error):
    """Return the Python exception that a kernel with debug=True raised, worded as Numba does it;
    None if there is none."""
    cause = error.__cause__
    raised = None
    if cause is not None:
        trace = cause.__traceback__
    else:
        trace = None
    while trace is not None:
        thread = trace.tb_frame.f_locals.get("_t")
        code = trace.tb_frame.f_code
        if thread is not None:
            place = (
                f"In function {code.co_name!r}, file {os.path.abspath(code.co_filename)}, line "
                f"{trace.tb_lineno}"
            )
            position = f"tid={[*map(int, thread.threadIdx)]} ctaid={[*map(int, thread.blockIdx)]}"
            raised = type(cause)(f"{place}, {position}: {cause}")
        trace = trace.tb_next
    return raised
