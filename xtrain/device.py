"""Is there a GPU, and how does an array get there and back?

The device is the array type: NumPy arrays live on the CPU, CuPy arrays on the GPU. Nothing here keeps a
"current device" of its own; CuPy's current device and stream are the only ones.
"""

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .errors import UserError

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
Array = Any  # numpy.ndarray | cupy.ndarray | simulator.SimArray: CuPy is optional, so no name to write here


_replacement: Any = None  # for CuPy: see use_array_module


def cupy() -> Any:
    """The cupy module if it is installed and sees a GPU, else None. Inside use_array_module: that module."""
    return _usable_cupy() if _replacement is None else _replacement


@contextlib.contextmanager
def use_array_module(module: Any) -> Iterator[None]:
    """Inside, `module` stands for CuPy, whether there is a GPU or not: cupy() and array_module return it.

    The memory plan uses this with arrays that have no values. It must be undone in the order in which it was done, and
    holds for all threads.
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
        return cupy if cupy.cuda.runtime.getDeviceCount() > 0 else None
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or one that is too old
        return None


def cache_folder() -> Path:
    """$XTRAIN_CACHE, otherwise xtrain in $XDG_CACHE_HOME, otherwise ~/.cache/xtrain."""
    if folder := os.environ.get("XTRAIN_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "xtrain")


def gpu_available() -> bool:
    """Is there a GPU that CuPy can use?"""
    return cupy() is not None


def has_bf16() -> bool:
    """Do this GPU's instructions take bf16? From compute capability 8.0 on (Ampere); to be asked where there is a GPU."""
    return int(cupy().cuda.Device().compute_capability) >= 80


def resolve_device(device: str) -> str:
    """ "auto" | "cpu" | "gpu" -> "cpu" | "gpu". Raises UserError when a GPU is asked for and there is none."""
    if device == "auto":
        return "gpu" if gpu_available() else "cpu"
    if device not in ("cpu", "gpu"):
        raise UserError(f"device {device!r} is not known: choose auto, cpu or gpu")
    if device == "gpu" and not gpu_available():
        raise UserError(
            "no GPU can be used here: check that nvidia-smi lists one and that "
            "`pip install -e '.[gpu]'` was run in the checkout, or choose the cpu"
        )
    return device


def array_module(x: Array) -> ModuleType:
    """numpy or cupy: whichever made x."""
    return np if isinstance(x, np.ndarray) else cupy()


def is_gpu(x: Array) -> bool:
    """Is this array on the GPU? (True for the simulator's arrays, too.)"""
    return not isinstance(x, np.ndarray)


def as_array(x: Any) -> Array:
    """x if it is an array, else a NumPy array of it: NumPy turns arrays without axes into scalars on every occasion."""
    return x if hasattr(x, "strides") and not isinstance(x, np.generic) else np.asarray(x)


def to_device(x: np.ndarray, device: str) -> Array:
    """A copy on the GPU for "gpu", in the simulator for "sim"; x itself for "cpu"."""
    if device == "sim":
        from .simulator import sim

        return sim(x)
    return cupy().asarray(x) if device == "gpu" else x


def zeros_on(device: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
    """Zeros, made where they are to live."""
    if device == "gpu":
        return cupy().zeros(shape, dtype)
    return to_device(np.zeros(shape, dtype), device)


def to_numpy(x: Array) -> np.ndarray:
    """The values as a NumPy array; from the GPU this copies and waits for it."""
    return x if isinstance(x, np.ndarray) else x.get()


class HostCopies:
    """Copies of arrays in host memory of their own, made while the GPU goes on: whoever reads them waits for `event` first.

    The memory is taken once for each name (page-locked, for a GPU) and lent out again with the next copy of that name.
    """

    def __init__(self):
        self.memory: dict[str, np.ndarray] = {}
        self.from_gpu = False

    def __call__(self, name: str, x: Array) -> np.ndarray:
        """A copy of x as it is when everything asked of its device so far is done."""
        host = self.memory.get(name)
        if host is None or host.shape != x.shape or host.dtype != x.dtype:
            host = self.memory[name] = self._take(x)
        if isinstance(x, np.ndarray):
            host[...] = x
        else:
            x.get(out=host, blocking=False)
        return host

    def _take(self, x):
        if isinstance(x, np.ndarray):
            return np.empty_like(x)
        import cupyx

        self.from_gpu = True
        return cupyx.empty_pinned(x.shape, x.dtype)

    def event(self) -> Callable[[], None]:
        """-> a function that waits until all copies made so far have arrived; any thread may call it."""
        return (
            cupy().cuda.get_current_stream().record().synchronize if self.from_gpu else lambda: None
        )


def synchronize(device: str) -> None:
    """Wait until the GPU has done everything asked of it so far."""
    if device == "gpu":
        cupy().cuda.Device().synchronize()


def device_name(device: str) -> str:
    """The card's name, or "CPU (NumPy)"."""
    if device == "cpu":
        return "CPU (NumPy)"
    properties = cupy().cuda.runtime.getDeviceProperties(cupy().cuda.Device().id)
    return properties["name"].decode()


class PrivatePool:
    """A CuPy memory pool of its own, for a CUDA graph; counted by memory_peak_bytes while it lives.

    When the GPU is full, a pool gives its free blocks back and tries again. Once a graph knows their addresses (`keep`) that
    must not happen: then the default pool gives its own back, and if that is not enough, there is a MemoryError.
    """

    alive: weakref.WeakSet = weakref.WeakSet()

    def __init__(self):
        self.kept: list = []  # a list, since the pool holds it: if it held us, neither would ever go
        self.pool = cupy().cuda.MemoryPool(functools.partial(_take, self.kept))
        self.malloc, self.total_bytes = self.pool.malloc, self.pool.total_bytes
        self.free_all_blocks = self.pool.free_all_blocks
        weakref.finalize(self, self.pool.free_all_blocks)  # CuPy 14 leaves them on the GPU
        self.alive.add(self)

    def keep(self) -> None:
        """From now on no block goes back to the GPU while this lives."""
        self.kept.append(True)
        self.pool.set_limit(size=0)  # $CUPY_GPU_MEMORY_LIMIT: at a limit, too, blocks would go back


def _take(kept: list, size: int) -> Any:
    """Memory from the GPU itself, for a PrivatePool."""
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
        raise MemoryError(f"Out of memory allocating {size:,} bytes beside a CUDA graph") from error


def both_see(shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, Any]:
    """-> an array of host memory that the GPU can write (pinned and mapped), as the host and as kernels see it"""
    cp, dtype = cupy(), np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = cp.cuda.alloc_pinned_memory(nbytes)
    owned = cp.cuda.UnownedMemory(memory.ptr, nbytes, memory, cp.cuda.Device().id)
    here = np.frombuffer(memory, dtype, int(np.prod(shape))).reshape(shape)
    here[...] = 0
    return here, cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(owned, 0))


def free_cached(device: str) -> None:
    """Give memory that nothing uses back to the GPU. (The pool keeps it otherwise, for arrays to come.)"""
    if device == "gpu":
        cupy().get_default_memory_pool().free_all_blocks()


def memory_peak_bytes(device: str) -> int | None:
    """Bytes that our pools have taken from the GPU so far (they keep what is freed); None on the CPU."""
    if device == "cpu":
        return None
    pools = [cupy().get_default_memory_pool(), *PrivatePool.alive]
    return sum(pool.total_bytes() for pool in pools)
