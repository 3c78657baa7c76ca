"""Launch kernels on arrays: choose the implementation, check the inputs, launch the kernel.

The array type alone decides which implementation a launcher uses:

    NumPy     the reference next to the kernel
    CuPy      the kernel, on CuPy's current device and stream
    SimArray  the same kernel, thread by thread, in xtrain.simulator

Every launcher checks its arguments first (check_array): another shape raises ValueError, another
dtype TypeError. Its docstring names only what else it raises.

Numba's own dispatch takes about 100 us for four CuPy arrays: it wraps every array again and may
synchronize with its stream. Here Numba compiles a kernel once per signature, and the driver's
cuLaunchKernel launches it with parameters packed by hand, in about 10 us. Numba's calling
convention passes an array as seven or more separate parameters: meminfo, parent, size, itemsize,
data pointer, shape..., strides... . That of numba-cuda-mlir: allocation, data pointer, offset,
shape..., strides in elements... .
"""

import contextlib
import ctypes
import functools
import math
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import simulator
from ...device import Array, array_module, cupy
from ...simulator import SimArray
from .compile import (
    MachineCode,
    allow_shared,
    compile_together,
    load_function,
    start_compiling,
)
from .compiler import COMPILER, from_dtype, types
from .cost import Cost, kernel_cost
from .instead import Number, instead
from .invariance import is_batch_invariant
from .overlap import launch_overlapping, launch_resident, overlapping

# dtypes that the memory-bound kernels read and write; they compute in float32
FLOATS = ("float32", "bfloat16")
RESIDENT_IN_SIMULATOR = 3  # blocks that wait for each other run so many at a time
_debug = False
_overlap = True


def set_debug(on: bool) -> None:
    """Synchronize with the GPU after every launch, so that an error names its kernel. Slow."""
    global _debug
    _debug = on


# ----------------------------------------------------------------------------- which implementation
def on_host(*arrays: Array) -> bool:
    """Return True if all arrays are NumPy arrays: use the reference.

    False if all are CuPy or all are SimArray: use the kernel. Raises TypeError for a mixture.
    """
    kind = type(arrays[0])
    for array in arrays:
        if type(array) is not kind:
            types_of = {f"{type(a).__module__.split('.')[0]}.{type(a).__name__}" for a in arrays}
            names = ", ".join(sorted(types_of))
            raise TypeError(f"all arrays of an op must be on one device, got {names}")
    return kind is np.ndarray


def empty(like: Array, shape, dtype=None) -> Array:
    """Return an uninitialized array on the device of `like`, with its dtype by default.

    The simulator fills it with NaN (integers: 0x7F bytes), so that reading it before writing shows.
    """
    return _allocate(like, shape, like.dtype if dtype is None else np.dtype(dtype))


def _allocate(like, shape, dtype):
    if not isinstance(like, SimArray):
        if instead.allocate is not None:
            return instead.allocate(shape, dtype)
        return array_module(like).empty(shape, dtype)
    new = np.empty(shape, dtype).view(SimArray)
    if dtype.kind in "fV":
        new.fill(np.nan)
    else:
        new.view(np.uint8).fill(0x7F)
    return new


def empty_like(x: Array) -> Array:
    """Return an uninitialized contiguous array with the shape, dtype and device of x."""
    return empty(x, x.shape)


def zeros(like: Array, shape, dtype=None) -> Array:
    """Return an array of zeros on the device of `like`, with its dtype by default."""
    dtype = like.dtype if dtype is None else np.dtype(dtype)
    if instead.allocate is not None and not isinstance(like, np.ndarray):
        new = instead.allocate(shape, dtype)
        new.data.memset_async(0, new.nbytes)
        return new
    new = array_module(like).zeros(shape, dtype)
    return new.view(SimArray) if isinstance(like, SimArray) else new


def wide(x: Array) -> Array:
    """Return x for a reference: bf16 becomes float32, as in the kernels.

    NumPy's einsum has no bf16.
    """
    if dtype_name(x.dtype) == "bfloat16":
        return x.astype(np.float32)
    return x


# ----------------------------------------------------------------------------- the GPU
@functools.cache
def gpu_attribute(device: int, name: str) -> int:
    """Return one of CuPy's Device.attributes of the GPU with this number."""
    return cupy().cuda.Device(device).attributes[name]


def multiprocessors(x: Array) -> int:
    """Return the multiprocessors of the GPU that holds x; 1 in the simulator."""
    if isinstance(x, SimArray):
        return 1
    return gpu_attribute(x.device.id, "MultiProcessorCount")


def shared_limit(x: Array) -> int:
    """Return the bytes of shared memory that a block may use on the GPU that holds x."""
    if isinstance(x, SimArray):
        return 227 * 1024
    return gpu_attribute(x.device.id, "MaxSharedMemoryPerBlockOptin")


# ----------------------------------------------------------------------------- checks of the inputs
@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """Return dtype.name, which takes NumPy several microseconds: as long as a launch."""
    return dtype.name


def check(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`."""
    if not condition:
        raise ValueError(message)


def check_array(
    op: str, name: str, x: Array, shape: tuple, dtypes=("float32",), strided=False
) -> None:
    """Check one argument of a launcher.

    shape: None allows any length.
    strided: allows a non-contiguous array.
    On the CPU float64 is accepted where float32 is: the references are dtype-agnostic, and finite
    differences need it. Raises ValueError for another shape or a non-contiguous array, TypeError
    for another dtype.
    """
    if not hasattr(x, "shape"):
        raise TypeError(f"{op}: {name} must be an array, got {x!r}")
    if x.shape != shape and not _fits(x.shape, shape):
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected ({expected})")
    kind = dtype_name(x.dtype)
    if kind not in dtypes:
        wider = type(x) is np.ndarray and kind == "float64" and "float32" in dtypes
        if not wider:
            raise TypeError(f"{op}: {name} is {x.dtype}, expected {' or '.join(dtypes)}")
    if not (strided or x.flags.c_contiguous):
        raise ValueError(
            f"{op}: {name} with shape {tuple(x.shape)} is not contiguous: copy it first"
        )


def _fits(shape, expected):
    if len(shape) != len(expected):
        return False
    return all(n is None or m == n for m, n in zip(shape, expected))


def check_ids(op: str, name: str, ids: Array) -> None:
    """Raise ValueError unless the dtype of `ids` is an integer type."""
    check(ids.dtype.kind in "iu", f"{op}: {name} must be integers, got {ids.dtype}")


# ----------------------------------------------------------------------------- observers
@dataclass(frozen=True)
class LaunchEvent:
    """A launch on the GPU, as passed to observers."""

    name: str  # of the kernel's function, or "product M x N x K"
    is_product: bool  # a matrix product by cuBLAS
    cost: Callable[
        [], Cost
    ]  # a function: nothing is computed for an observer that does not call it


LaunchObserver = Callable[[LaunchEvent, Callable[[], None]], None]
launch_observers: list[LaunchObserver] = []


@contextlib.contextmanager
def observe_launches(observer: LaunchObserver) -> Iterator[None]:
    """Call observer(event, start) for each kernel and each cuBLAS product, in place of the launch.

    The observer calls start() to launch; without that the launch does not happen. If there are
    several observers, the one registered last is called first, and its start() calls the previous
    one.
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


# ----------------------------------------------------------- what is launched, without launching it
@dataclass(frozen=True)
class Specialization:
    """A kernel for arguments of certain types, which is compiled once."""

    kernel: Any
    types: tuple  # Numba's
    layout: str  # of the parameters, for the struct module
    shared: int  # bytes of dynamic shared memory


class _Notes(threading.local):
    specializations: "dict[tuple, Specialization] | None" = None  # None: launches run


_notes = _Notes()


@contextlib.contextmanager
def note_launches() -> Iterator[dict[tuple, Specialization]]:
    """Run no kernel that this thread launches; yield a dict of what they need compiled.

    Kernels that have been compiled are left out. What CuPy computes does run, on arrays that no
    kernel has written.
    """
    before = _notes.specializations
    _notes.specializations = {}
    try:
        yield _notes.specializations
    finally:
        _notes.specializations = before


def start_compiling_noted(noted: dict[tuple, Specialization]) -> int:
    """Begin to compile what note_launches has noted on a GPU. A launch that needs one of these
    kernels waits for that one only. Returns how many were not in the cache on disk."""
    return start_compiling([(s.kernel, s.types) for s in noted.values()])


def compile_noted(noted: dict[tuple, Specialization]) -> int:
    """Compile what note_launches has noted on a GPU, several kernels at a time.

    Returns how many were not in the cache on disk.
    """
    code, compiled = compile_together([(s.kernel, s.types) for s in noted.values()])
    for key, s in noted.items():
        _plans.setdefault(key, _LaunchPlan(s, code[s.kernel, s.types]))
    return compiled


# ----------------------------------------------------------------------------- launches
def resident_blocks(kernel, block: int, *args, shared: int = 0) -> int:
    """Return how many blocks of such a launch run at the same time.

    That is multiprocessors times the occupancy of the compiled kernel. In the simulator:
    RESIDENT_IN_SIMULATOR.
    1 while launches are noted and the kernel is not compiled.
    args: of the types of the launch; their sizes do not matter.
    """
    converted = kernel_arguments(args)
    if SimArray in map(type, converted):
        return RESIDENT_IN_SIMULATOR
    driver = cupy().cuda.driver
    plan = _prepare(kernel, converted, shared)[0]
    if plan is None:
        return 1
    occupancy = driver.occupancyMaxActiveBlocksPerMultiprocessor(plan.function, block, shared)
    return occupancy * gpu_attribute(cupy().cuda.runtime.getDevice(), "MultiProcessorCount")


def launch(
    kernel, grid, block, *args, shared: int = 0, overlap: bool = False, resident: bool = False
) -> None:
    """Run a @cuda.jit kernel on `grid` blocks of `block` threads.

    grid, block: each an int or a tuple of up to three. An empty grid launches nothing.
    args: arrays of one kind, then scalars. A Python int is passed as int64, a Python float as
        float32.
    shared: bytes of dynamic shared memory.
    overlap: the kernel may start before the previous kernel of the stream has finished. It must
        call wait_for_previous (primitives/ptx.py).
    resident: the blocks wait for each other, so all of them must run at the same time; without
        overlap.
    Raises TypeError for a float64 scalar, ValueError for more blocks than can be resident,
    RuntimeError if the driver rejects the launch.
    """
    converted = kernel_arguments(args)
    grid = _dim3(grid)
    block = _dim3(block)
    if 0 in grid:
        return
    if instead.launch is not None:
        instead.launch(kernel, grid, block, converted, shared, overlap, resident)
        return
    if resident and _notes.specializations is None:
        limit = resident_blocks(kernel, math.prod(block), *args, shared=shared)
        blocks = math.prod(grid)
        check(
            blocks <= limit,
            f"{kernel.py_func.__name__}: its {blocks} blocks wait for each other, but only {limit} "
            "run at the same time: launch at most so many",
        )
    if SimArray in map(type, converted):
        if _notes.specializations is None:
            at_most = RESIDENT_IN_SIMULATOR if resident else None
            simulator.run(
                kernel, grid, block, *converted, shared=shared, overlap=overlap, resident=at_most
            )
        else:
            special = _specialization(kernel, converted, shared)
            _notes.specializations[kernel, special.types] = special
    elif launch_observers:
        cost = functools.partial(kernel_cost, kernel, converted)
        options = shared, overlap, resident
        start = functools.partial(_launch_gpu, kernel, grid, block, converted, *options)
        show_launch(LaunchEvent(kernel.py_func.__name__, False, cost), start)
    else:
        _launch_gpu(kernel, grid, block, converted, shared, overlap, resident)


def kernel_arguments(args: Sequence) -> list:
    """Return args with Python's numbers as NumPy's. Raises TypeError for a float64 scalar."""
    return [_SCALARS[type(a)](a) if type(a) in _SCALARS else a for a in args]


def as_float32(x: Any) -> Any:
    """Return a number as a float32, for a kernel's argument.

    What stands for a number while launches are recorded stays as it is.
    """
    return x if isinstance(x, Number) else np.float32(x)


def set_overlap(on: bool) -> None:
    """Allow kernels to overlap (the default), or run each after the previous one has finished.

    The results are the same.
    """
    global _overlap
    _overlap = on


def can_overlap(x: Array) -> bool:
    """Return True if kernels may overlap on the GPU of x. Needs compute capability 9.0.

    The simulator accepts it and runs them in order.
    """
    return _overlap and (isinstance(x, SimArray) or int(x.device.compute_capability) >= 90)


def _refuse_float64(_):
    raise TypeError("a kernel got a float64 scalar: kernels compute in float32, pass np.float32")


_SCALARS: dict[type, Callable] = {
    int: np.int64,
    float: np.float32,
    bool: np.bool_,
    np.float64: _refuse_float64,
}


def _dim3(n) -> tuple[int, int, int]:
    if isinstance(n, int):
        return (n, 1, 1)
    return (*n, 1, 1)[:3]


_parameter_buffer_lock = threading.Lock()
_plans: dict = {}  # (kernel, device, dtype and layout of every argument) -> _LaunchPlan


class _Parameters:
    """The buffer from which the driver reads a kernel's parameters, 8 bytes each.

    The table of pointers to them never changes.
    """

    def __init__(self, layout: str):
        self.struct = struct.Struct("<" + layout)
        n = self.struct.size // 8
        self.words = (ctypes.c_uint64 * max(n, 1))()
        base = ctypes.addressof(self.words)
        self.table = (ctypes.c_void_p * max(n, 1))(*(base + 8 * i for i in range(n)))
        self.pointers = ctypes.addressof(self.table)

    def pack(self, values: Sequence) -> None:
        """Write all values."""
        self.struct.pack_into(self.words, 0, *values)


class _LaunchPlan:
    """A compiled kernel and its parameters, which every launch packs."""

    def __init__(self, s: Specialization, code: MachineCode | None = None):
        self.function, self.module = load_function(s.kernel, s.types, s.shared, code)
        self.shared = s.shared
        self.layout = s.layout
        self.parameters = _Parameters(s.layout)


def _specialization(kernel, args, shared) -> Specialization:
    layout = "".join(struct_format(a) for a in args)
    return Specialization(kernel, tuple(map(numba_type, args)), layout, shared)


def _prepare(kernel, args, shared):
    """Return the plan of a launch on the GPU and the values of its parameters.

    The plan is None while launches are noted.
    """
    kinds: list = [kernel, cupy().cuda.runtime.getDevice()]
    values: list = []
    for a in args:
        if isinstance(a, np.generic):
            kinds.append(a.dtype.char)
            values.append(a)
        else:
            shape = a.shape
            # a._c_contiguous: a.flags would build an object each time
            kinds += (a.dtype.char, len(shape), a._c_contiguous)
            if COMPILER == "numba":
                values += (0, 0, a.size, a.itemsize, a.data.ptr, *shape, *a.strides)
            else:
                strides = [stride // a.itemsize for stride in a.strides]
                values += (a.data.ptr, a.data.ptr, 0, *shape, *strides)
    key = tuple(kinds)
    plan = _plans.get(key)
    if plan is None:
        special = _specialization(kernel, args, shared)
        if _notes.specializations is not None:
            _notes.specializations[key] = special
            return None, values
        plan = _plans.setdefault(key, _LaunchPlan(special))  # another thread may have been faster
    if _notes.specializations is None and shared > plan.shared:
        allow_shared(plan.function, shared, kernel)
        plan.shared = shared
    return plan, values


def _launch_gpu(kernel, grid, block, args, shared, overlap, resident=False):
    plan, values = _prepare(kernel, args, shared)
    if _notes.specializations is not None:
        return
    gpu = cupy().cuda
    stream = gpu.get_current_stream().ptr
    try:
        with _parameter_buffer_lock:  # all threads share the buffer
            plan.parameters.pack(values)
            pointers = plan.parameters.pointers
            if resident:
                launch_resident(plan.function, grid, block, shared, stream, pointers)
            elif overlap:
                launch_overlapping(plan.function, grid, block, shared, stream, pointers)
            else:
                gpu.driver.launchKernel(plan.function, *grid, *block, shared, stream, pointers, 0)
    except gpu.driver.CUDADriverError as error:
        raise RuntimeError(
            f"the driver rejected the launch of {kernel.py_func.__name__}: {error}"
        ) from error
    if _debug:
        try:
            gpu.Device().synchronize()
        except Exception as error:
            raise RuntimeError(f"{kernel.py_func.__name__} failed on the GPU: {error}") from error


class PreparedLaunch:
    """A launch that is repeated: its parameters are packed, and its arrays may move.

    args: as kernel_arguments returns them. Two threads must not use it at a time.
    words: the parameters, 8 bytes each. addresses: which words are addresses of arrays. scalars:
        the word of each scalar.
    start(stream) launches the kernel with what the words are then.
    """

    def __init__(
        self, kernel, grid: tuple, block: tuple, args: Sequence, shared: int, overlap: bool
    ):
        plan, values = _prepare(kernel, args, shared)
        self.name = kernel.py_func.__name__
        self.parameters = _Parameters(plan.layout)
        self.parameters.pack(values)
        self.words = self.parameters.words
        self.addresses, self.scalars = _movable_words(args)
        function = plan.function
        pointers = self.parameters.pointers
        if overlap:
            self.start = overlapping(function, grid, block, shared, pointers)
        else:
            launch_kernel = cupy().cuda.driver.launchKernel
            self.start = lambda stream: launch_kernel(
                function, *grid, *block, shared, stream, pointers, 0
            )


def _movable_words(args) -> tuple[list[int], list[int]]:
    """Return which of the parameters' words are addresses of arrays, and which are scalars.

    See _prepare.
    """
    addresses: list[int] = []
    scalars: list[int] = []
    first = 0
    for a in args:
        if isinstance(a, np.generic):
            scalars.append(first)
            first += 1
            continue
        addresses += (first + 4,) if COMPILER == "numba" else (first, first + 1)
        first += _ARRAY_VALUES + 2 * a.ndim
    return addresses, scalars


def mode() -> tuple[bool, bool] | None:
    """Return what a launcher decides by, besides its arguments and the GPU.

    None if launches must not be repeated without `launch`: they are observed or noted, or each is
    followed by a synchronization.
    """
    if launch_observers or _debug or _notes.specializations is not None:
        return None
    return _overlap, is_batch_invariant()


_STRUCT_FORMATS = dict(zip("fd?iIlqLQ", ("f4x", "d", "?7x", "i4x", "I4x", "q", "q", "Q", "Q")))
_ARRAY_VALUES = 5 if COMPILER == "numba" else 3  # of an array, besides its shape and strides


def struct_format(a) -> str:
    """Return the format of one kernel argument for the struct module, each value in 8 bytes."""
    if isinstance(a, np.generic):
        return _STRUCT_FORMATS[a.dtype.char]
    return "q" * (_ARRAY_VALUES + 2 * a.ndim)


def numba_type(a):
    """Return the Numba type of a kernel argument.

    A bfloat16 array is passed as uint16, see primitives/ptx.py.
    """
    if isinstance(a, np.generic):
        return from_dtype(a.dtype)
    is_bf16 = dtype_name(a.dtype) == "bfloat16"
    element = types.uint16 if is_bf16 else from_dtype(a.dtype)
    return types.Array(element, a.ndim, "C" if a.flags.c_contiguous else "A")
