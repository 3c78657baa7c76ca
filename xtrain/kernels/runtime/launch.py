"""The one place where arrays meet kernels: which implementation, is the input sound, start the kernel.

A launcher looks at its arrays and nothing else:

    NumPy     the reference that stands next to the kernel
    CuPy      the kernel, on CuPy's current device and stream
    SimArray  the same kernel, thread by thread, in xtrain.simulator

Numba's own dispatch costs about 100 us for four CuPy arrays: it wraps every array again and may wait for
its stream. Here a kernel is compiled once per signature by Numba and then started with the driver's
cuLaunchKernel, its parameters packed by hand: about 10 us. Numba passes an array as seven or more separate parameters:
meminfo, parent, size, itemsize, data pointer, shape..., strides... .
"""

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numba import from_dtype, types

from ... import simulator
from ...device import Array, array_module, cupy
from ...simulator import SimArray
from .compile import allow_shared, load_function
from .cost import Cost, kernel_cost
from .overlap import launch_overlapping

FLOATS = (
    "float32",
    "bfloat16",
)  # what the memory-bound kernels read and write; they compute in float32
_debug = False
_overlap = True


def set_debug(on: bool) -> None:
    """Wait for the GPU after every launch, so that an error names the kernel that made it. Slow."""
    global _debug
    _debug = on


# ----------------------------------------------------------------------------- which implementation
def on_host(*arrays: Array) -> bool:
    """True: all are plain NumPy, use the reference. False: all are CuPy or all are SimArray, use the kernel."""
    kind = type(arrays[0])
    for array in arrays:
        if type(array) is not kind:
            names = ", ".join(
                sorted({type(a).__module__.split(".")[0] + "." + type(a).__name__ for a in arrays})
            )
            raise TypeError(f"all arrays of one op must live in one place, got {names}")
    return kind is np.ndarray


def empty(like: Array, shape, dtype=None) -> Array:
    """Unwritten memory in the place where `like` lives. In the simulator it is filled with NaN (or 0x7F bytes)."""
    return _allocate(like, shape, like.dtype if dtype is None else np.dtype(dtype))


def _allocate(like, shape, dtype):
    if isinstance(like, SimArray):
        new = np.empty(shape, dtype).view(SimArray)
        new.fill(np.nan) if dtype.kind in "fV" else new.view(np.uint8).fill(0x7F)
        return new
    return array_module(like).empty(shape, dtype)


def empty_like(x: Array) -> Array:
    return empty(x, x.shape)


def zeros(like: Array, shape, dtype=None) -> Array:
    dtype = like.dtype if dtype is None else np.dtype(dtype)
    new = array_module(like).zeros(shape, dtype)
    return new.view(SimArray) if isinstance(like, SimArray) else new


def wide(x: Array) -> Array:
    """What a reference computes with: bf16 as float32, as in the kernels; NumPy's einsum has no bf16."""
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


# ----------------------------------------------------------------------------- is the input sound
def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_array(
    op: str, name: str, x: Array, shape: tuple, dtypes=("float32",), strided=False
) -> None:
    """Refuse what a kernel would read wrongly. In `shape`, None means any length.

    On the CPU float64 passes for float32 too: the references are dtype-agnostic, and finite differences need it.
    """
    if not hasattr(x, "shape"):
        raise TypeError(f"{op}: {name} must be an array, got {x!r}")
    fits = len(x.shape) == len(shape) and all(s is None or s == n for s, n in zip(shape, x.shape))
    if not fits:
        want = "(" + ", ".join("any" if s is None else str(s) for s in shape) + ")"
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {want}")
    wider = type(x) is np.ndarray and x.dtype == np.float64 and "float32" in dtypes
    if x.dtype.name not in dtypes and not wider:
        raise TypeError(f"{op}: {name} is {x.dtype}, expected {' or '.join(dtypes)}")
    if not (strided or x.flags.c_contiguous):
        raise ValueError(
            f"{op}: {name} with shape {tuple(x.shape)} is not contiguous: copy it first"
        )


def check_ids(op: str, name: str, ids: Array) -> None:
    check(ids.dtype.kind in "iu", f"{op}: {name} must hold whole numbers, got {ids.dtype}")


# ----------------------------------------------------------------------------- observers
@dataclass(frozen=True)
class LaunchEvent:
    """What an observer learns about a launch on the GPU.

    name: of the kernel's function, or "product M x N x K" for a matrix product by cuBLAS (is_product).
    cost: a function, so that nothing is computed for an observer that does not call it.
    """

    name: str
    is_product: bool
    cost: Callable[[], Cost]


LaunchObserver = Callable[[LaunchEvent, Callable[[], None]], None]
launch_observers: list[LaunchObserver] = []


@contextlib.contextmanager
def observe_launches(observer: LaunchObserver) -> Iterator[None]:
    """Inside, observer(event, start) is called for each kernel and each cuBLAS product, in place of the launch.

    The observer calls start() to launch; without that the launch does not happen. Of several observers the one that was
    registered last is called first, and its start() calls the one before.
    """
    launch_observers.append(observer)
    try:
        yield
    finally:
        launch_observers.remove(observer)


def show_launch(event: LaunchEvent, start: Callable[[], None]) -> None:
    """Pass a launch to the observers; start() performs it."""
    for observer in launch_observers:
        start = functools.partial(observer, event, start)
    start()


# ----------------------------------------------------------------------------- start the kernel
def launch(kernel, grid, block, *args, shared: int = 0, overlap: bool = False) -> None:
    """Run a @cuda.jit kernel on `grid` blocks of `block` threads (ints or tuples of up to three).

    args: arrays of one kind, then scalars. A Python int travels as int64, a Python float as float32.
    shared: bytes of dynamic shared memory. An empty grid launches nothing.
    overlap: the kernel may begin before the one before it has ended; it must call wait_for_previous (_ptx.py).
    """
    converted = [_scalar(a) for a in args]
    grid, block = _dim3(grid), _dim3(block)
    if 0 in grid:
        return
    if any(isinstance(a, SimArray) for a in converted):
        simulator.run(kernel, grid, block, *converted, shared=shared, overlap=overlap)
    elif launch_observers:
        cost = functools.partial(kernel_cost, kernel, converted)
        start = functools.partial(_launch_gpu, kernel, grid, block, converted, shared, overlap)
        show_launch(LaunchEvent(kernel.py_func.__name__, False, cost), start)
    else:
        _launch_gpu(kernel, grid, block, converted, shared, overlap)


def set_overlap(on: bool) -> None:
    """Off: every kernel waits until the one before has ended, whatever its launcher says. The bits stay the same."""
    global _overlap
    _overlap = on


def can_overlap(x: Array) -> bool:
    """May kernels overlap on the GPU where x lives? In the simulator they may: it runs one after the other."""
    return _overlap and (isinstance(x, SimArray) or int(x.device.compute_capability) >= 90)


_SCALARS = {int: np.int64, float: np.float32, bool: np.bool_}


def _scalar(a):
    if isinstance(a, np.float64):
        raise TypeError("a float64 scalar for a kernel: kernels compute in float32, use np.float32")
    to = _SCALARS.get(type(a))
    return to(a) if to else a


def _dim3(n) -> tuple[int, int, int]:
    return (n, 1, 1) if isinstance(n, int) else (*n, 1, 1)[:3]


_one_at_a_time = threading.Lock()
_plans: dict = {}  # (kernel, device, kind of every argument) -> _Plan


class _Plan:
    """A compiled kernel and the memory in which its parameters are handed over: 8 bytes each."""

    def __init__(self, kernel, args, shared):
        self.function, self.module = load_function(kernel, tuple(map(numba_type, args)), shared)
        self.shared = shared
        layout = "".join(_slots(a) for a in args)
        self.struct = struct.Struct("<" + layout)
        self.buffer = ctypes.create_string_buffer(max(self.struct.size, 8))
        base, n = ctypes.addressof(self.buffer), self.struct.size // 8
        self.table = (ctypes.c_void_p * max(n, 1))(*(base + 8 * i for i in range(n)))
        self.pointers = ctypes.addressof(self.table)


def _launch_gpu(kernel, grid, block, args, shared, overlap):
    gpu = cupy().cuda
    key, values = [kernel, gpu.runtime.getDevice()], []
    for a in args:
        if isinstance(a, np.generic):
            key.append(a.dtype.char)
            values.append(a)
        else:
            shape = a.shape
            key += (a.dtype.char, len(shape), a._c_contiguous)  # a.flags makes an object each time
            values += (0, 0, a.size, a.itemsize, a.data.ptr, *shape, *a.strides)
    key = tuple(key)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _Plan(kernel, args, shared)
    if shared > plan.shared:
        allow_shared(plan.function, shared, kernel)
        plan.shared = shared
    stream = gpu.get_current_stream().ptr
    try:
        with _one_at_a_time:  # other threads use the same buffer
            plan.struct.pack_into(plan.buffer, 0, *values)
            if overlap:
                launch_overlapping(plan.function, grid, block, shared, stream, plan.pointers)
            else:
                gpu.driver.launchKernel(
                    plan.function, *grid, *block, shared, stream, plan.pointers, 0
                )
    except gpu.driver.CUDADriverError as error:
        raise RuntimeError(
            f"the driver refused to start {kernel.py_func.__name__}: {error}"
        ) from error
    if _debug:
        try:
            gpu.Device().synchronize()
        except Exception as error:
            raise RuntimeError(f"{kernel.py_func.__name__} failed on the GPU: {error}") from error


def _slots(a):
    """struct's format of one argument, every value in 8 bytes."""
    if not isinstance(a, np.generic):
        return "q" * (5 + 2 * a.ndim)
    formats = {
        "f": "f4x",
        "d": "d",
        "?": "?7x",
        "i": "i4x",
        "I": "I4x",
        "l": "q",
        "q": "q",
        "L": "Q",
        "Q": "Q",
    }
    return formats[a.dtype.char]


def numba_type(a):
    """The Numba type of an argument. bfloat16 arrays reach kernels as uint16; see _ptx.py."""
    if isinstance(a, np.generic):
        return from_dtype(a.dtype)
    element = types.uint16 if a.dtype.name == "bfloat16" else from_dtype(a.dtype)
    return types.Array(element, a.ndim, "C" if a.flags.c_contiguous else "A")
