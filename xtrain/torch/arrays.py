"""torch's tensors as the arrays that launchers take, and back, without a copy.

    CPU tensor     NumPy array: a launcher runs its reference
                   SimArray inside `simulated()`: it runs its kernel in xtrain.simulator
    CUDA tensor    CuPy array: it runs its kernel, on torch's current stream of the tensor's GPU

On a GPU a launcher's `empty` and `zeros` allocate from torch: results are torch's memory, its
statistics count them, and in a CUDA graph they come from the graph's pool. What CuPy itself
allocates, for a copy of an array with an unusual layout, is torch's memory on side streams and in
graphs, where it must be, and that of CuPy's pool elsewhere.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..device import Array, cupy
from ..errors import UserError
from ..kernels.runtime import launch
from ..simulator import SimArray

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: BF16,
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
}
TORCH_DTYPES = {array: tensor for tensor, array in DTYPES.items()}

_in_simulator = False
MAX_ARRAYS = 1 << 13
LARGE = 256 << 20  # bytes: an array that a launcher needs for a while is freed while it runs

_arrays: dict[tuple, Any] = {}  # address, shape, ... -> CuPy's array, which does not own the memory
_streams: dict[tuple[int, int], Any] = {}  # (GPU, handle) -> CuPy's object for torch's stream


class NoMemory(RuntimeError):
    """A tensor has no memory of its own: it is sparse, or a batch of tensors inside vmap."""


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Run the kernels of CPU tensors in xtrain.simulator, in place of the references.

    It applies to all threads. Kernels that the simulator finds wrong raise its KernelError.
    """
    global _in_simulator
    before = _in_simulator
    _in_simulator = True
    try:
        yield
    finally:
        _in_simulator = before


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return NumPy's dtype. Raises TypeError if no kernel takes such tensors."""
    try:
        return DTYPES[dtype]
    except KeyError:
        raise TypeError(f"xtrain has no kernels for tensors of {dtype}: convert them") from None


# ----------------------------------------------------------------------------- on the CPU
def as_numpy(x: torch.Tensor) -> np.ndarray:
    """Return the array with the memory of a CPU tensor."""
    if x.device.type != "cpu":
        raise TypeError(f"all tensors of an op must be on one device, got one on {x.device}")
    dtype = numpy_dtype(x.dtype)
    x = x.detach()
    if dtype == BF16:
        x = x.view(torch.int16)
    # Not x.numpy(), after which fully_shard cannot free the storage of a parameter.
    array = np.from_dlpack(x).view(dtype)
    return array.view(SimArray) if _in_simulator else array


def from_numpy(a: np.ndarray) -> torch.Tensor:
    """Return the contiguous CPU tensor with the memory of an array, if that is contiguous."""
    a = a.view(np.ndarray) if a.flags.c_contiguous else a.copy().view(np.ndarray)
    if a.dtype == BF16:
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)


def run_on_cpu(launcher: Callable, tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Call a launcher with arrays in place of the CPU tensors; return its arrays as tensors."""
    arguments = convert(tensors, as_numpy)
    inputs = [a for a in flattened(arguments) if isinstance(a, np.ndarray)]
    results = []
    for a in as_list(launcher(*arguments)):
        array = np.asanyarray(a)
        shares = any(np.may_share_memory(array, x) for x in inputs)
        results.append(from_numpy(array.copy() if shares else array))
    return results


# ----------------------------------------------------------------------------- on a GPU
def as_cupy(x: torch.Tensor) -> Array:
    """Return CuPy's array with the memory of a CUDA tensor, which must live as long as it is used.

    The arrays are kept: a program uses the same addresses again and again.
    """
    dense = x.is_contiguous()
    key = (x.data_ptr(), x.shape, x.dtype, x.get_device(), None if dense else x.stride())
    array = _arrays.get(key)
    if array is None:
        if len(_arrays) >= MAX_ARRAYS:
            _arrays.clear()
        array = _arrays[key] = _new_array(x, dense)
    return array


def _new_array(x: torch.Tensor, dense: bool, owner: torch.Tensor | None = None) -> Array:
    """Return the array with the memory of x. owner: lives as long as the array and its parts."""
    gpu = cupy()
    dtype = numpy_dtype(x.dtype)
    size = dtype.itemsize
    if dense:
        strides = None
        nbytes = x.numel() * size
    else:
        strides = tuple(size * n for n in x.stride())
        nbytes = size * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())))
    memory = gpu.cuda.UnownedMemory(x.data_ptr(), nbytes, owner, x.get_device())
    return gpu.ndarray(tuple(x.shape), dtype, gpu.cuda.MemoryPointer(memory, 0), strides)


class TorchMemory:
    """Memory of torch for what a launcher allocates, and the tensors of its results."""

    def __init__(self, device: torch.device):
        self.device = device
        self.blocks: dict[int, torch.Tensor] = {}  # address -> the tensor that begins there
        # those that are freed with the last array in them, not at the launcher's end
        self.large: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def allocate(self, shape: Any, dtype: np.dtype) -> Array:
        """Return an uninitialized array: for `empty` of kernels/runtime/launch.py."""
        block = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=self.device)
        if block.nbytes >= LARGE:
            self.large[block.data_ptr()] = block
            return _new_array(block, True, block)
        self.blocks[block.data_ptr()] = block
        return as_cupy(block)

    def malloc(self, nbytes: int) -> Any:
        """Return CuPy's pointer to nbytes new bytes, which it owns: an allocator of CuPy."""
        block = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        address = block.data_ptr()
        self.blocks[address] = block
        cuda = cupy().cuda
        memory = cuda.UnownedMemory(address, nbytes, block, self.device.index)
        return cuda.MemoryPointer(memory, 0)

    def tensor(self, a: Array) -> torch.Tensor:
        """Return the tensor with the memory of CuPy's contiguous array a; else that of a copy."""
        if not a.size:  # all empty blocks have the address 0
            return torch.empty(a.shape, dtype=TORCH_DTYPES[a.dtype], device=self.device)
        address = a.data.mem.ptr
        block = self.blocks.get(address)
        if block is None:
            block = self.large.get(address)
        if block is None or not a.flags.c_contiguous:  # an argument of the op, or a part of one
            copy = self.allocate(a.shape, a.dtype)
            copy[...] = a
            return self.tensor(copy)
        dtype = TORCH_DTYPES[a.dtype]
        shape = a.shape
        first = (a.data.ptr - a.data.mem.ptr) // a.itemsize
        if block.dtype == dtype and block.numel() == a.size:
            return block if block.shape == shape else block.resize_(shape)  # no view of it
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        new = torch.empty(0, dtype=dtype, device=self.device)
        return new.set_(block.untyped_storage(), first, shape, strides)


def run_on_gpu(launcher: Callable, arguments: Sequence[Any], index: int) -> list[torch.Tensor]:
    """Do run_launcher on the GPU with this index, in few microseconds: see `call`."""
    gpu = cupy()
    if gpu is None:
        raise UserError(
            "xtrain's kernels need CuPy for CUDA tensors, and it is missing or finds no GPU: "
            "run `pip install -e '.[gpu]'` (gpu12 for CUDA 12), then `xtrain doctor`"
        )
    cuda = gpu.cuda
    memory = TorchMemory(cuda_device(index))
    handle = torch._C._cuda_getCurrentRawStream(index)  # a third of current_stream's time
    capturing = torch.cuda.is_current_stream_capturing()
    before = launch.instead.allocate
    launch.instead.allocate = memory.allocate
    try:
        if (
            not capturing
            and cuda.runtime.getDevice() == index
            and cuda.get_current_stream().ptr == handle
        ):
            return _results(memory, launcher, arguments)
        with on_stream(index, handle, capturing), cuda.using_allocator(memory.malloc):
            return _results(memory, launcher, arguments)
    finally:
        launch.instead.allocate = before


@contextlib.contextmanager
def on_stream(index: int, handle: int, capturing: bool) -> Iterator[None]:
    """Make a stream of torch CuPy's current one, which may capture a graph."""
    cuda = cupy().cuda
    stream = _streams.get((index, handle))
    if stream is None:
        stream = _streams[index, handle] = cuda.ExternalStream(handle, index)
    with cuda.Device(index), stream, _allocations_while_capturing(capturing):
        yield


def _results(memory, launcher, arguments):
    results = launcher(*convert(arguments, as_array))
    return [memory.tensor(a) for a in as_list(results)]


@functools.cache
def cuda_device(index: int) -> torch.device:
    """Return torch's name of a GPU."""
    return torch.device("cuda", index)


@contextlib.contextmanager
def _allocations_while_capturing(capturing: bool) -> Iterator[None]:
    """While a CUDA graph is captured, allow what is no part of it: loading a kernel, and memory
    for what kernels keep. torch's capture forbids both, but in this mode."""
    if not capturing:
        yield
        return
    from cuda.bindings import driver

    exchange = driver.cuThreadExchangeStreamCaptureMode
    _, before = exchange(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        exchange(before)


def run_launcher(launcher: Callable, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Call a launcher with arrays in place of tensors; return its arrays as tensors."""
    for x in flattened(arguments):
        if isinstance(x, torch.Tensor) and x.is_cuda:
            return run_on_gpu(launcher, arguments, x.get_device())
    return run_on_cpu(launcher, arguments)


def as_array(x: torch.Tensor) -> Array:
    """Return the array with the memory of a tensor."""
    return as_cupy(x) if x.is_cuda else as_numpy(x)


# ----------------------------------------------------------------------------- lists of arguments
def convert(arguments: Sequence[Any], change: Callable) -> list:
    """Return the arguments of an op with change(tensor) for each tensor, also inside lists."""
    changed = []
    for a in arguments:
        if isinstance(a, torch.Tensor):
            changed.append(change(a))
        elif isinstance(a, (list, tuple)):
            changed.append(convert(a, change))
        else:
            changed.append(a)
    return changed


def flattened(arguments: Sequence[Any]) -> Iterator[Any]:
    """Yield the arguments of an op, and those inside lists."""
    for a in arguments:
        if isinstance(a, (list, tuple)):
            yield from flattened(a)
        else:
            yield a


def as_list(results: Any) -> list:
    """Return what a launcher returned, an array, several or none, as a list."""
    if results is None:
        return []
    return list(results) if isinstance(results, (list, tuple)) else [results]
