"""Tensor maps: 128 bytes that describe a tensor to the copy engine (TMA), and the box of one copy.

The driver encodes them ("CUDA Driver API, Tensor Map Object Management": cuTensorMapEncodeTiled). A
map depends only on address, shape and strides, so each set of maps is created once and kept in
global memory. A captured graph refers to that address, so replaying it needs no work on the host.
"""

import ctypes
import functools
import math
import threading
from dataclasses import dataclass, replace

import numpy as np

from ...device import Array, address_of, cupy
from ...simulator import SimArray, sim
from ..runtime.instead import instead
from .hopper import MAP_WORDS, PANEL_ROW
from .hopper_simulated import simulated_map

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapInterleave,
# CUtensorMapFloatOOBfill
FLOAT32 = 7
BFLOAT16 = 9
SWIZZLE_NONE = 0
SWIZZLE_128 = 3
PROMOTE_256 = 3
NO_INTERLEAVE = 0
FILL_ZEROS = 0
MAX_CACHED = 1 << 14  # sets of maps that no graph uses

# (device, the maps' TensorMapSpecs) -> maps
_captured: dict = {}  # used by a graph: never removed
_evictable: dict = {}
# For both: a graph must refer to the maps that are kept, not to those of another thread.
_lock = threading.Lock()
# (device, stream, kernel name) -> two zeros; never removed, because graphs use their address
_counters: dict = {}


@dataclass(frozen=True)
class TensorMapSpec:
    """What a tensor map encodes. dims and strides from the innermost axis outwards."""

    address: int
    dims: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, of all axes but the innermost
    box: tuple[int, ...]  # elements of one copy
    itemsize: int  # of an element: 2 (bf16) or 4 (float32)


def check_device(x: Array, function: str) -> None:
    """Raise TypeError for an array of NumPy."""
    if type(x) is np.ndarray:
        raise TypeError(
            f"{function}: got an array of NumPy, expected one on a GPU: in the simulator, give "
            "xtrain.simulator.sim(x)"
        )


def mappable(x_BTHD: Array) -> Array:
    """Return x (B, T, H, D), or a contiguous copy if a tensor map cannot describe x.

    A map needs an address and strides that are multiples of 16 bytes, and contiguous heads.
    """
    steps = [s for s, n in zip(x_BTHD.strides, x_BTHD.shape) if n > 1]
    aligned = isinstance(x_BTHD, SimArray) or address_of(x_BTHD) % 16 == 0
    aligned = aligned and all(s > 0 and s % 16 == 0 and s < 2**40 for s in steps[:-1])
    if aligned and x_BTHD.strides[3] == x_BTHD.itemsize:
        return x_BTHD
    return x_BTHD.copy()


def tensor_maps(*boxes: tuple[Array, int]) -> Array:
    """Return the tensor maps of several arrays, (16 words each,) uint64, on their device.

    boxes: pairs of x (B, T, H, D), bf16 or float32, and the rows per box, or of a float32 matrix
        and the columns per box. A box of x is 128 bytes wide.
    Raises RuntimeError if the driver rejects a map, and TypeError for arrays of NumPy.
    """
    first = boxes[0][0]
    if isinstance(first, SimArray):
        described = [_spec(x, size) for x, size in boxes]
        words = [simulated_map(s.address, s.dims, s.strides, s.box, s.itemsize) for s in described]
        return np.array(words, np.uint64).reshape(-1).view(SimArray)
    check_device(first, "tensor_maps")
    if first.device.id < 0:  # not a real device: the memory plan counts bytes
        return cupy().empty(MAP_WORDS * len(boxes), np.uint64)
    device = first.device.id
    specs = tuple(_spec(x, size) for x, size in boxes)
    if instead.derive is None:
        return _maps(device, specs)
    move = lambda addresses: _maps(
        device, tuple(replace(s, address=a) for s, a in zip(specs, addresses))
    )
    n = MAP_WORDS * len(boxes)
    return instead.derive(move, [s.address for s in specs], n, np.dtype(np.uint64))


def _maps(device, specs):
    """Return the array of these maps, which is made once."""
    key = device, specs
    capturing = cupy().cuda.get_current_stream().is_capturing()
    with _lock:
        maps = _captured.get(key)
        if maps is None:
            maps = _evictable.get(key)
        if maps is None:
            if len(_evictable) >= MAX_CACHED and not capturing:
                cupy().cuda.Device().synchronize()  # after this no kernel reads them
                _evictable.clear()
            maps = _evictable[key] = upload(b"".join(_encode(spec) for spec in specs))
        if capturing and key in _evictable:
            _captured[key] = _evictable.pop(key)
    return maps


def tensors_of(maps: Array) -> list[tuple]:
    """Return [(dims from the innermost axis outwards, bytes)] of the tensors of these maps.

    Raises ValueError if `maps` does not come from tensor_maps.
    """
    with _lock:
        kept_maps = (*_captured.items(), *_evictable.items())
    for (_, specs), kept in kept_maps:
        if kept.data.ptr == maps.data.ptr:
            return [(s.dims, s.itemsize * math.prod(s.dims)) for s in specs]
    raise ValueError("this array does not come from tensor_maps")


def _spec(x, size) -> TensorMapSpec:
    """Return the description of the map of x.

    size: rows per box of x (B, T, H, D), or columns per box of a matrix.
    Strides increase from one axis to the next, as the driver's manual requires: columns, heads,
    rows, sequences.
    """
    address = address_of(x)
    if x.ndim == 2:
        return TensorMapSpec(address, x.shape[::-1], x.strides[:1], (size, 1), x.itemsize)
    B, T, H, D = x.shape
    batch, row, head, _ = x.strides
    dense = x.itemsize * D  # the stride of an axis with one element is arbitrary
    strides = tuple(s if n > 1 else dense for s, n in ((head, H), (row, T), (batch, B)))
    box = PANEL_ROW // x.itemsize, 1, size, 1
    return TensorMapSpec(address, (D, H, T, B), strides, box, x.itemsize)


@functools.cache
def _encoder():
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, number, ctypes.c_uint, *[pointer] * 5, *[number] * 4]
    return function


def _encode(spec: TensorMapSpec) -> bytes:
    """Return the 128 bytes of the map. Raises RuntimeError if the driver rejects it."""
    buffer = ctypes.create_string_buffer(128 + 64)
    aligned = -(-ctypes.addressof(buffer) // 64) * 64  # the alignment that the driver requires
    longs = lambda values: (ctypes.c_uint64 * len(values))(*values)
    ints = lambda values: (ctypes.c_uint32 * len(values))(*values)
    rank = len(spec.dims)
    kind = {2: BFLOAT16, 4: FLOAT32}[spec.itemsize]
    swizzle = {4: SWIZZLE_128, 2: SWIZZLE_NONE}[rank]
    layout = (longs(spec.dims), longs(spec.strides), ints(spec.box), ints((1,) * rank))
    modes = (NO_INTERLEAVE, swizzle, PROMOTE_256, FILL_ZEROS)
    status = _encoder()(aligned, kind, rank, spec.address, *layout, *modes)
    if status:
        raise RuntimeError(
            f"the driver rejected a tensor map of dims {spec.dims}, strides {spec.strides} bytes, "
            f"box {spec.box} at {spec.address:#x}: CUDA error {status}"
        )
    return ctypes.string_at(aligned, 128)


def upload(content: bytes) -> Array:
    """Copy bytes to the GPU and return them as uint64.

    Uses no memory pool and no captured stream; the copy has finished on return.
    """
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
    """Return two zeros, int32, on the device of `maps`.

    They are for the kernels called `name` that are launched or captured on this stream. A kernel
    must reset them to zero. Kernels with different names may run at the same time, so each name has
    its own pair.
    """
    if isinstance(maps, SimArray):
        return sim(np.zeros(2, np.int32))
    if maps.device.id < 0:
        return cupy().zeros(2, np.int32)
    device = maps.device.id
    if instead.derive is None:
        return _counter(device, name)
    return instead.derive(lambda _: _counter(device, name), [], 2, np.dtype(np.int32))


def _counter(device, name):
    stream = cupy().cuda.get_current_stream()
    key = device, stream.ptr, name
    if key not in _counters:
        _counters.setdefault(key, upload(bytes(8)).view(np.int32))
    return _counters[key]
