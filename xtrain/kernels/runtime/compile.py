"""From a @cuda.jit kernel and argument types to a function that the driver can start, with a cache on disk.

Numba compiles Python to PTX and machine code (a cubin): a tenth of a second to several seconds a kernel. The machine code
of xtrain's own kernels is kept in $XTRAIN_CACHE/kernels, under a key made of everything that it depends on: the source of all
kernel files, the kernel's name and closure constants, the argument types, the card, the versions. So a second process, or
the second rank, compiles nothing. A file is written beside its place and renamed: many ranks may do so at once.

Kernels defined elsewhere (a lesson, a test) are compiled anew in each process: nobody watches their sources.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import sys
from pathlib import Path

import numpy as np
from numba import cuda, types

from ...device import cache_folder, cupy

KERNELS = Path(__file__).parents[1]
PACKAGE = __package__.removesuffix(".runtime")  # xtrain.kernels
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def load_function(kernel, signature: tuple, shared: int) -> tuple[int, object]:
    """-> (driver handle of the kernel compiled for these Numba types, what must stay alive with it).

    shared: bytes of dynamic shared memory it will be started with.
    """
    path = _cache_path(kernel, signature)
    found = None if path is None else _read(path)
    name, cubin = found or _compile(kernel, signature)
    if path is not None and found is None:
        _write(path, name, cubin)
    module = cupy().cuda.function.Module()
    module.load(cubin)
    function = module.get_function(name)
    if shared:  # without asking every kernel gets 48 KB, its static arrays included
        allow_shared(function.ptr, shared, kernel)
    return function.ptr, module


def allow_shared(handle: int, shared: int, kernel) -> None:
    """Let a kernel use so many bytes of dynamic shared memory beside its static arrays.

    Raises RuntimeError when the card has less.
    """
    driver = cupy().cuda.driver
    try:
        driver.funcSetAttribute(handle, MAX_DYNAMIC_SHARED, shared)
    except driver.CUDADriverError as error:
        name = kernel.py_func.__name__
        raise RuntimeError(
            f"{name} needs {shared} bytes of shared memory, the GPU refuses: {error}"
        ) from error


def _compile(kernel, signature):
    """-> (name in the machine code, machine code)"""
    cuda.current_context()  # Numba compiles for the device that CuPy has current
    kernel.compile(signature)
    compiled = kernel.overloads[signature]
    code = (
        compiled._codelibrary.get_cubin()
    )  # numba-cuda 0.30 has no public way to the machine code
    return compiled.entry_name, bytes(getattr(code, "code", code))


# ----------------------------------------------------------------------------- the cache on disk
def _cache_path(kernel, signature) -> Path | None:
    identity = _identity(kernel.py_func)
    if identity is None:
        return None
    device = cupy().cuda.Device()
    parts = (_sources(), identity, signature, sorted(map(str, kernel.targetoptions.items())))
    key = hashlib.sha256(
        repr((*parts, device.compute_capability, _versions())).encode()
    ).hexdigest()
    return cache_folder() / "kernels" / f"{kernel.py_func.__name__}-{key[:32]}.cubin"


@functools.cache
def _sources() -> str:
    """A digest of all kernel files: a device function may come from any of them."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _versions() -> tuple:
    names = ("numba", "numba-cuda", "llvmlite")
    return tuple((name, importlib.metadata.version(name)) for name in names), sys.version_info[:2]


def _identity(function) -> tuple | None:
    """Module, name and closure of a kernel or device function of this package; None for any other."""
    if not function.__module__.startswith(f"{PACKAGE}."):
        return None
    constants = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        value = cell.cell_contents
        if hasattr(value, "py_func"):
            value = _identity(value.py_func)
        elif not isinstance(value, (int, float, str, tuple, np.generic, types.Type, type(None))):
            value = (
                None if not _is_plain_function(value) else (value.__module__, value.__qualname__)
            )
        if value is None and cell.cell_contents is not None:
            return None  # something whose value cannot be written down
        constants.append((name, repr(value)))
    return function.__module__, function.__qualname__, tuple(constants)


def _is_plain_function(value):
    return hasattr(value, "__qualname__") and str(getattr(value, "__module__", "")).startswith(
        PACKAGE
    )


def _read(path):
    """-> (name, machine code), or None when there is none or it is not whole."""
    try:
        checksum, name, cubin = path.read_bytes().split(b"\n", 2)
    except (OSError, ValueError):
        return None
    if hashlib.sha256(name + cubin).hexdigest().encode() != checksum:
        return None
    return name.decode(), cubin


def _write(path, name, cubin):
    content = (
        hashlib.sha256(name.encode() + cubin).hexdigest().encode()
        + b"\n"
        + name.encode()
        + b"\n"
        + cubin
    )
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:  # a full or read-only disk: the next process compiles again
        with contextlib.suppress(OSError):
            temporary.unlink()
