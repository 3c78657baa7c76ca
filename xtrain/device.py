"""Find the GPU, and move arrays to it and back.

The device is the array type: NumPy arrays live on the CPU, CuPy arrays on the GPU. Nothing here
keeps a separate "current device"; CuPy's current device and stream are the only ones.
"""

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .errors import UserError
from .machine import free_memory
from .option_words import own_word

LARGE = 1 << 26  # bytes: below this, memory that is missing is noticed elsewhere
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
# numpy.ndarray | cupy.ndarray | simulator.SimArray: CuPy is optional, so an annotation cannot name
# its type
Array = Any


_replacement: Any = None  # for CuPy: see use_array_module


def cupy() -> Any:
    """Return the cupy module if it is installed and sees a GPU, else None. Inside use_array_module:
    that module."""
    if _replacement is None:
        return _usable_cupy()
    return _replacement


@contextlib.contextmanager
def use_array_module(module: Any) -> Iterator[None]:
    """Inside, cupy() and array_module return `module` instead of CuPy, with or without a GPU.

    The memory plan uses this with arrays that have no values. It applies to all threads, and nested
    uses must end in reverse order.
    """
    global _replacement
    before, _replacement = _replacement, module
    try:
        yield
    finally:
        _replacement = before


@functools.cache
def _usable_cupy() -> ModuleType | None:
    try:
        import cupy
    except ImportError:
        return None
    try:
        if cupy.cuda.runtime.getDeviceCount() > 0:
            return cupy
        return None
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or one that is too old
        return None


def cache_folder() -> Path:
    """Return $XTRAIN_CACHE, else xtrain in $XDG_CACHE_HOME, else ~/.cache/xtrain."""
    if folder := os.environ.get("XTRAIN_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "xtrain")


def gpu_available() -> bool:
    """Return True if there is a GPU that CuPy can use."""
    return cupy() is not None


def has_bf16() -> bool:
    """Return True if this GPU supports bf16 instructions (compute capability 8.0, Ampere, or
    higher). Needs a GPU."""
    return int(cupy().cuda.Device().compute_capability) >= 80


def has_fp8() -> bool:
    """Return True if this GPU has fp8 products (compute capability 8.9, Ada, or higher). Needs a
    GPU."""
    return int(cupy().cuda.Device().compute_capability) >= 89


def resolve_device(device: str) -> str:
    """ "auto" | "cpu" | "gpu" or "cuda" -> "cpu" | "gpu". Raises UserError for a GPU that cannot be
    used."""
    device = own_word("device", device)
    if device == "auto":
        return "gpu" if gpu_available() else "cpu"
    if device not in ("cpu", "gpu"):
        raise UserError(f"device {device!r} is not known: choose auto, cpu or gpu")
    if device == "gpu" and not gpu_available():
        raise UserError(
            "no usable GPU was found: check that nvidia-smi lists one and that "
            "`pip install -e '.[gpu]'` was run in the checkout, or choose the device cpu"
        )
    return device


def array_module(x: Array) -> ModuleType:
    """Return the module of the array x: numpy or cupy."""
    if isinstance(x, np.ndarray):
        return np
    return cupy()


def is_gpu(x: Array) -> bool:
    """Is this array on the GPU? False for the simulator's arrays, which are NumPy arrays."""
    return not isinstance(x, np.ndarray)


def as_array(x: Any) -> Array:
    """Return x if it is an array, else np.asarray(x): NumPy operations turn 0-d arrays into
    scalars."""
    if hasattr(x, "strides") and not isinstance(x, np.generic):
        return x
    return np.asarray(x)


def to_device(x: np.ndarray, device: str) -> Array:
    """x copied to the GPU ("gpu") or the simulator ("sim"); x itself for "cpu"."""
    if device == "sim":
        from .simulator import sim

        return sim(x)
    if device == "gpu":
        return cupy().asarray(x)
    return x


def zeros_on(device: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
    """Zeros, allocated on the device: "cpu", "gpu" or "sim". Raises MemoryError."""
    if device == "gpu":
        return cupy().zeros(shape, dtype)
    nbytes = math.prod(np.atleast_1d(shape).tolist()) * np.dtype(dtype).itemsize
    if nbytes > LARGE:
        # Linux grants memory that it does not have, and kills a process that writes to it
        free = free_memory()
        if free is not None and nbytes > free:
            raise MemoryError(
                f"Unable to allocate {nbytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
            )
    return to_device(np.zeros(shape, dtype), device)


def to_numpy(x: Array) -> np.ndarray:
    """Return the values as a NumPy array. From the GPU this copies, and waits for the GPU."""
    if isinstance(x, np.ndarray):
        return x
    return x.get()


class HostCopies:
    """Asynchronous copies of arrays to host memory: wait for `event` before reading them.

    Each name has one buffer (page-locked for a GPU), which the next copy of that name overwrites.
    """

    def __init__(self) -> None:
        self.memory: dict[str, np.ndarray] = {}
        self.from_gpu = False

    def __call__(self, name: str, x: Array) -> np.ndarray:
        """Copy x after all work queued on its device so far. -> the host buffer"""
        host = self.memory.get(name)
        if host is None or host.shape != x.shape or host.dtype != x.dtype:
            host = self.memory[name] = self._allocate(x)
        if isinstance(x, np.ndarray):
            host[...] = x
        else:
            x.get(out=host, blocking=False)
        return host

    def _allocate(self, x: Array) -> np.ndarray:
        if isinstance(x, np.ndarray):
            return np.empty_like(x)
        import cupyx

        self.from_gpu = True
        return cupyx.empty_pinned(x.shape, x.dtype)

    def event(self) -> Callable[[], None]:
        """Return a function that waits until all copies so far are complete; any thread may call
        it."""
        if self.from_gpu:
            return cupy().cuda.get_current_stream().record().synchronize
        return lambda: None


def synchronize(device: str) -> None:
    """Wait until the GPU has finished all queued work."""
    if device == "gpu":
        cupy().cuda.Device().synchronize()


def device_name(device: str) -> str:
    """Return the card's name, or "CPU (NumPy)"."""
    if device == "cpu":
        return "CPU (NumPy)"
    properties = cupy().cuda.runtime.getDeviceProperties(cupy().cuda.Device().id)
    return properties["name"].decode()


class PrivatePool:
    """A CuPy memory pool for one CUDA graph; memory_peak_bytes counts it while it exists.

    When the GPU is full, a CuPy pool frees its unused blocks and tries again. Once a graph holds
    the addresses of the blocks (`keep`) that must not happen: then the default pool frees its
    blocks, and if that is not enough, MemoryError is raised.
    """

    alive: weakref.WeakSet = weakref.WeakSet()

    def __init__(self) -> None:
        # a list shared with the pool: a reference to self would be a cycle that is never freed
        self.kept: list[bool] = []
        self.pool = cupy().cuda.MemoryPool(functools.partial(_allocate, self.kept))
        self.malloc = self.pool.malloc
        self.total_bytes = self.pool.total_bytes
        self.free_all_blocks = self.pool.free_all_blocks
        weakref.finalize(self, self.pool.free_all_blocks)  # CuPy 14 leaves them on the GPU
        self.alive.add(self)

    def keep(self) -> None:
        """From now on no block is returned to the GPU while this pool exists."""
        self.kept.append(True)
        # with a limit ($CUPY_GPU_MEMORY_LIMIT) the pool would return blocks too
        self.pool.set_limit(size=0)


def _allocate(kept: list[bool], size: int) -> Any:
    """Allocate `size` bytes from the driver, for a PrivatePool. kept: not empty after
    PrivatePool.keep."""
    gpu = cupy().cuda
    new = lambda: gpu.MemoryPointer(gpu.Memory(size), 0)
    try:
        return new()
    except gpu.runtime.CUDARuntimeError as error:
        if not kept or error.status != OUT_OF_MEMORY:
            raise
    free_cached("gpu")
    try:
        return new()
    except gpu.runtime.CUDARuntimeError as error:
        raise MemoryError(
            f"Out of memory allocating {size:,} bytes next to a CUDA graph"
        ) from error


def mapped_array(shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, Any]:
    """An array in pinned and mapped host memory, zero-filled. -> as NumPy array, as CuPy array for
    kernels"""
    cp = cupy()
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = cp.cuda.alloc_pinned_memory(nbytes)
    owned = cp.cuda.UnownedMemory(memory.ptr, nbytes, memory, cp.cuda.Device().id)
    here = np.frombuffer(memory, dtype, int(np.prod(shape))).reshape(shape)
    here[...] = 0
    return here, cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(owned, 0))


def address_of(a: Array) -> int:
    """Return the address of the first element."""
    return a.ctypes.data if hasattr(a, "ctypes") else a.data.ptr


def free_cached(device: str) -> None:
    """Return the unused blocks of the memory pool to the GPU."""
    if device == "gpu":
        cupy().get_default_memory_pool().free_all_blocks()


def memory_peak_bytes(device: str) -> int | None:
    """Bytes that the memory pools have allocated on the GPU (they keep freed blocks); None on the
    CPU."""
    if device == "cpu":
        return None
    pools = [cupy().get_default_memory_pool(), *PrivatePool.alive]
    return sum(pool.total_bytes() for pool in pools)
