"""Tensor maps: 128 bytes that tell the copy engine (TMA) where a tensor lies, and what box of it a copy takes.

The driver encodes them ("CUDA Driver API, Tensor Map Object Management": cuTensorMapEncodeTiled). A map depends on address,
shape and strides alone, so each set of maps is made once and kept in global memory; a captured graph keeps its address, and
replaying it costs the host nothing.
"""

import ctypes
import functools
import math

import numpy as np

from ...device import Array, cupy
from ...simulator import SimArray
from ..runtime.launch import empty, zeros
from .hopper import MAP_WORDS, PANEL
from .hopper_simulated import simulated_map

# CUtensorMap...
FLOAT32, BFLOAT16, SWIZZLE_NONE, SWIZZLE_128, PROMOTE_256, NO_INTERLEAVE, FILL_ZEROS = (
    7,
    9,
    0,
    3,
    3,
    0,
    0,
)
MAX_CACHED = 1 << 14  # kept of those that no graph holds

_captured: dict = {}  # (device, what is mapped) -> maps, in use by a graph: kept for ever
_evictable: dict = {}
_counters: dict = {}  # (device, stream, kernel) -> two zeros. Kept: graphs know their address


def mappable(x_BTHD: Array) -> Array:
    """x, or a contiguous copy of it if a tensor map cannot describe it: addresses and strides are multiples of 16 bytes, and a
    head's elements are side by side.
    """
    address = 0 if isinstance(x_BTHD, SimArray) else x_BTHD.data.ptr
    steps = [s for s, n in zip(x_BTHD.strides, x_BTHD.shape) if n > 1]
    aligned = address % 16 == 0 and all(s > 0 and s % 16 == 0 and s < 2**40 for s in steps[:-1])
    return x_BTHD if aligned and x_BTHD.strides[3] == x_BTHD.itemsize else x_BTHD.copy()


def tensor_maps(*boxes: tuple[Array, int]) -> Array:
    """One after the other, as uint64, 16 words each, the maps of: (x (B, T, H, D) in bf16, rows per box), (a matrix in
    float32, columns per box).
    """
    first = boxes[0][0]
    if isinstance(first, SimArray):
        words = [simulated_map(*_described(x, rows)) for x, rows in boxes]
        return np.array(words, np.uint64).reshape(-1).view(SimArray)
    if first.device.id < 0:  # no device: memory.py counts bytes
        return empty(first, (MAP_WORDS * len(boxes),), np.uint64)
    described = tuple(_described(x, rows) for x, rows in boxes)
    key = first.device.id, described
    capturing = cupy().cuda.get_current_stream().is_capturing()
    maps = _captured.get(key)
    if maps is None:
        maps = _evictable.get(key)
        if maps is None:
            if len(_evictable) >= MAX_CACHED and not capturing:
                cupy().cuda.Device().synchronize()  # nobody reads them any more
                _evictable.clear()
            maps = _evictable[key] = upload(b"".join(_encode(*one) for one in described))
        if capturing:
            _captured[key] = _evictable.pop(key)
    return maps


def tensors_of(maps: Array) -> list[tuple]:
    """-> [(dims from the innermost out, bytes)] of what tensor_maps made these maps for."""
    for (_, described), found in (*_captured.items(), *_evictable.items()):
        if found.data.ptr == maps.data.ptr:
            each = ((dims, 2 if len(dims) == 4 else 4) for _, dims, _, _ in described)
            return [(dims, size * math.prod(dims)) for dims, size in each]
    raise ValueError("an array that tensor_maps has not made")


def _described(x, size):
    """-> address, dims from the innermost out, strides of all but the innermost in bytes, box

    Strides grow from one axis to the next, as the driver's manual asks: columns, heads, rows, sequences.
    """
    simulated = isinstance(x, SimArray)
    address = x.__array_interface__["data"][0] if simulated else x.data.ptr
    if x.ndim == 2:
        return address, x.shape[::-1], x.strides[:1], (size, 1)
    B, T, H, D = x.shape
    batch, row, head, _ = x.strides
    dense = 2 * D  # the stride of an axis of one element says nothing
    strides = tuple(s if n > 1 else dense for s, n in ((head, H), (row, T), (batch, B)))
    return address, (D, H, T, B), strides, (PANEL, 1, size, 1)


@functools.cache
def _encoder():
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, number, ctypes.c_uint, *[pointer] * 5, *[number] * 4]
    return function


def _encode(address, dims, strides, box) -> bytes:
    buffer = ctypes.create_string_buffer(128 + 64)
    aligned = -(-ctypes.addressof(buffer) // 64) * 64  # the driver asks for it
    longs = lambda values: (ctypes.c_uint64 * len(values))(*values)
    ints = lambda values: (ctypes.c_uint32 * len(values))(*values)
    rank = len(dims)
    kind, swizzle = (BFLOAT16, SWIZZLE_128) if rank == 4 else (FLOAT32, SWIZZLE_NONE)
    status = _encoder()(
        aligned, kind, rank, address, longs(dims), longs(strides), ints(box), ints((1,) * rank),
        NO_INTERLEAVE, swizzle, PROMOTE_256, FILL_ZEROS,
    )  # fmt: skip
    if status:
        raise RuntimeError(
            f"the driver refuses a tensor map of dims {dims}, strides {strides} bytes, box {box} at {address:#x}: "
            f"CUDA error {status}"
        )
    return ctypes.string_at(aligned, 128)


def upload(content: bytes) -> Array:
    """In memory of its own, past any pool and any capture: it is there when this returns."""
    gpu = cupy().cuda
    memory = gpu.MemoryPointer(gpu.Memory(len(content)), 0)
    maps = cupy().ndarray((len(content) // 8,), np.uint64, memory)
    stream = gpu.Stream(non_blocking=True)
    source = ctypes.create_string_buffer(content, len(content))
    kind = gpu.runtime.memcpyHostToDevice
    gpu.runtime.memcpyAsync(maps.data.ptr, ctypes.addressof(source), len(content), kind, stream.ptr)
    stream.synchronize()
    return maps


def tile_counter(maps: Array, name: str) -> Array:
    """Two zeros beside `maps` for the kernels launched or captured on this stream, by name; each launch leaves them so.
    (Kernels of different names may run at the same time.)
    """
    if isinstance(maps, SimArray) or maps.device.id < 0:
        return zeros(maps, (2,), np.int32)
    stream = cupy().cuda.get_current_stream()
    key = maps.device.id, stream.ptr, name
    if key not in _counters:
        content = bytes(8)
        _counters[key] = upload(content).view(np.int32)
    return _counters[key]
