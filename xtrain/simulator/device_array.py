"""Simulated device memory: what cuda.to_device, cuda.device_array and cuda.managed_array return
while `simulate` is active.

A DeviceArray holds a NumPy array. It has the methods and the limits of Numba's DeviceNDArray: no
arithmetic on the host, no arrays as indices, copies of contiguous arrays only. Unwritten memory
holds NaN or bytes 0x7F, so a program that relies on zeros gets wrong results here too.
"""

import math
import weakref

import numpy as np

from . import frontends, settings, streams
from .memory import _Bytes
from .unwritten import extent, mark_unwritten, mark_written

_allocations: dict[int, int] = {}  # address -> end of every live allocation


def array_core(a: np.ndarray) -> np.ndarray:
    """Return the view of an array without the repetitions along its broadcast axes."""
    if a.size:
        return a[(*(0 if s == 0 else slice(None) for s in a.strides), ...)]
    return a


def prepare_shape_strides_dtype(shape, strides, dtype, order) -> tuple:
    """Shape, strides in bytes and dtype of a new array. order: "C" or "F", if no strides are
    given."""
    dtype = np.dtype(dtype)
    if isinstance(shape, int):
        shape = (shape,)
    if isinstance(strides, int):
        return shape, (strides,), dtype
    if strides:
        return shape, strides, dtype
    if order not in ("C", "F"):
        raise ValueError("must be either C/F order")
    lengths = shape if order == "F" else shape[::-1]
    steps = [dtype.itemsize * math.prod(lengths[:axis]) for axis in range(len(shape))]
    return shape, tuple(steps if order == "F" else steps[::-1]), dtype


def check_array_compatibility(first, second):
    """Raise TypeError or ValueError unless one array can be copied to the other."""
    a, b = first.squeeze(), second.squeeze()
    if first.dtype != second.dtype:
        raise TypeError(f"incompatible dtype: {first.dtype} vs. {second.dtype}")
    if a.shape != b.shape:
        raise ValueError(f"incompatible shape: {first.shape} vs. {second.shape}")
    if first.size and a.strides != b.strides:
        raise ValueError(f"incompatible strides: {first.strides} vs. {second.strides}")


def sentry_contiguous(a):
    """Raise ValueError unless the memory of an array is one region."""
    core = array_core(a)
    if not core.flags.c_contiguous and not core.flags.f_contiguous:
        raise ValueError(
            "Array contains non-contiguous buffer and cannot be transferred as a single memory "
            "region. Please ensure contiguous buffer with numpy .ascontiguousarray()"
        )


def allocate(size: int) -> np.ndarray:
    """New memory, as uint8."""
    raw = np.empty(size, np.uint8)
    address = raw.__array_interface__["data"][0]
    _allocations[address] = address + size
    weakref.finalize(raw, _allocations.pop, address, None)
    return raw


def allocated() -> int:
    """Bytes of device memory in use."""
    return sum(end - address for address, end in _allocations.items())


def _new(shape, dtype, strides=None, order="C") -> np.ndarray:
    """Return an unwritten array in new memory."""
    shape, strides, dtype = prepare_shape_strides_dtype(shape, strides, dtype, order)
    if dtype.hasobject:
        raise TypeError(f"an array of {dtype} cannot be on the device")
    if math.prod(shape):
        last = sum(s * (n - 1) for s, n in zip(strides, shape))
    else:
        last = -dtype.itemsize
    raw = allocate(last + dtype.itemsize)
    a = np.ndarray(shape, dtype, raw, strides=strides)
    if dtype.kind == "f":
        a.fill(np.nan)
    else:
        raw.fill(0x7F)
    return a


def _visible(shape, dtype, strides, order) -> np.ndarray:
    """Return an unwritten array in new memory that the host and the device access."""
    a = _new(shape, dtype, strides, order)
    owner = a
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    streams.make_visible(owner)
    weakref.finalize(owner, streams.forget, extent(owner)[0])
    return a


class DeviceMemory:
    """Bytes of device memory: the `gpu_data` of an array, the result of Context.memalloc."""

    __cuda_memory__ = True

    def __init__(self, raw: np.ndarray):
        self.raw = raw
        self.size = raw.size

    def __int__(self):
        return self.raw.__array_interface__["data"][0]

    device_ctypes_pointer = property(lambda self: self)
    value = property(__int__)

    def view(self, start, stop=None):
        return DeviceMemory(self.raw[start:stop])

    def free(self):
        """Python frees it with the last reference."""


class DeviceArray:
    """An array in simulated device memory. Indexing it gives views, and copies single elements to
    the host."""

    __cuda_memory__ = True
    __cuda_ndarray__ = True

    def __init__(self, shape, strides, dtype, stream=0, gpu_data=None):
        if gpu_data is None:
            self.array = _new(shape, dtype, strides)
        else:
            self.array = np.ndarray(shape, dtype, gpu_data.raw, strides=strides)
        self.stream = stream

    @classmethod
    def of(cls, array: np.ndarray, stream=0) -> "DeviceArray":
        """Return the device array that is a view of simulated memory."""
        new = cls.__new__(cls)
        new.array, new.stream = array, stream
        return new

    shape = property(lambda self: self.array.shape)
    strides = property(lambda self: self.array.strides)
    dtype = property(lambda self: self.array.dtype)
    ndim = property(lambda self: self.array.ndim)
    size = property(lambda self: self.array.size)
    nbytes = property(lambda self: self.array.nbytes)
    flags = property(lambda self: self.array.flags)
    T = property(lambda self: self.transpose())
    device_ctypes_pointer = property(lambda self: self.gpu_data)

    @property
    def gpu_data(self) -> DeviceMemory:
        low, high = extent(self.array)
        if low == high:
            return DeviceMemory(np.empty(0, np.uint8))
        return DeviceMemory(np.asarray(_Bytes(low, high - low, self.array)))

    @property
    def alloc_size(self) -> int:
        low, high = extent(self.array)
        return high - low

    @property
    def __cuda_array_interface__(self) -> dict:
        a = self.array
        return {
            "shape": a.shape,
            "strides": None if a.flags.c_contiguous else a.strides,
            "data": (a.__array_interface__["data"][0] if a.size else 0, False),
            "typestr": a.dtype.str,
            "stream": int(self.stream) if self.stream != 0 else None,
            "version": 3,
        }

    @property
    def _numba_type_(self):
        return self.type_in(frontends.first())

    def type_in(self, frontend):
        """Return the array's type in numba or in numba-cuda-mlir."""
        dtype = frontend.from_dtype(self.dtype)
        if self.ndim == 0 and self.dtype.names is not None:
            return dtype
        dense = 0 not in self.strides
        if dense and self.is_c_contiguous():
            layout = "C"
        elif dense and self.is_f_contiguous():
            layout = "F"
        else:
            layout = "A"
        return frontend.types.Array(dtype, self.ndim, layout)

    def __array__(self, dtype=None, copy=None):
        return self.copy_to_host().astype(dtype or self.dtype, copy=False)

    def __len__(self):
        return self.shape[0]

    def __repr__(self):
        return f"<simulated device array, shape {self.shape}, {self.dtype}>"

    def is_c_contiguous(self):
        return self.flags.c_contiguous

    def is_f_contiguous(self):
        return self.flags.f_contiguous

    def bind(self, stream=0):
        return DeviceArray.of(self.array, stream)

    def as_cuda_arg(self):
        return self.gpu_data

    def get_ipc_handle(self):
        raise NotImplementedError("memory of the simulator cannot be shared with other processes")

    # ------------------------------------------------------------------------- copies
    def copy_to_host(self, ary=None, stream=0):
        """Return the array as a NumPy array; `ary`, if given, receives it."""
        if any(s < 0 for s in self.strides):
            raise NotImplementedError(
                f"D->H copy not implemented for negative strides: {self.strides}"
            )
        if ary is None:
            ary = np.empty_like(self.array, subok=False)
        else:
            check_array_compatibility(self.array, ary)
        target = plain(ary)
        streams.copied(stream or self.stream, target, self.array, [target])
        np.copyto(target, self.array)
        return ary

    def copy_to_device(self, ary, stream=0):
        """Copy a NumPy array or a device array to this one."""
        source = host_view(ary)
        if source.size == 0:
            return
        sentry_contiguous(self.array)
        ours = array_core(self.array)
        theirs = array_core(source)
        if source is ary:  # on the host: any layout
            theirs = np.array(
                theirs, order="C" if ours.flags.c_contiguous else "F", subok=True, copy=None
            )
        else:
            sentry_contiguous(source)
        check_array_compatibility(ours, theirs)
        theirs = plain(theirs)
        streams.copied(stream or self.stream, ours, theirs, [theirs] if source is ary else ())
        np.copyto(ours, theirs.reshape(ours.shape))
        mark_written(self.array)

    def __getitem__(self, item):
        return self.getitem(item)

    def getitem(self, item, stream=0):
        view = self._at(item)
        if view.ndim == 0 and self.dtype.names is None and not _has_ellipsis(item):
            element = np.empty_like(view)
            streams.copied(stream or self.stream, element, view, [element])
            return view[()]
        return DeviceArray.of(view, stream or self.stream)

    def __setitem__(self, item, value):
        self.setitem(item, value)

    def setitem(self, item, value, stream=0):
        left = self._at(item)
        right = np.asarray(host_view(value))
        if right.ndim > left.ndim:
            raise ValueError(f"Can't assign {right.ndim}-D array to {left.ndim}-D self")
        for axis, (n, m) in enumerate(zip(left.shape[::-1], right.shape[::-1]), 1):
            if m not in (1, n):
                raise ValueError(
                    f"Can't copy sequence with size {m} to array axis {left.ndim - axis} with "
                    f"dimension {n}"
                )
        on_host = () if right is host_view(value) is not value else [right]
        streams.copied(stream, left, right, on_host)
        left[...] = right
        mark_written(left)

    def _at(self, item) -> np.ndarray:
        """Return the view of an index: integers, slices, ellipses, names of fields."""
        if isinstance(item, str):  # of a record
            return self.array[item]
        if isinstance(item, tuple):
            items = item
        else:
            items = (item,)
        if not all(isinstance(i, (int, np.integer, slice)) or i is ... for i in items):
            raise NotImplementedError(
                f"a device array takes integers and slices as index, not {item!r}"
            )
        return self.array[items if _has_ellipsis(items) else (*items, ...)]

    # ------------------------------------------------------------------------- views
    def reshape(self, *shape, order="C"):
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = shape[0]
        return self._view(self.array.reshape(shape, order=order))

    def ravel(self, order="C", stream=0):
        return self._view(self.array.ravel(order))

    def squeeze(self, axis=None, stream=0):
        return self._view(self.array.squeeze(axis))

    def view(self, dtype):
        return self._view(self.array.view(dtype))

    def _view(self, array):
        if array.size and not np.may_share_memory(array, self.array):
            raise NotImplementedError("operation requires copying")
        return DeviceArray.of(array, self.stream)

    def transpose(self, axes=None):
        """Return a transposed copy, as in Numba."""
        if axes and tuple(axes) == tuple(range(self.ndim)):
            return self
        if self.ndim != 2:
            raise NotImplementedError("transposing a non-2D DeviceNDArray isn't supported")
        if axes is not None and {*axes} != {0, 1}:
            raise ValueError(f"invalid axes list {axes!r}")
        new = device_array(self.shape[::-1], self.dtype, stream=self.stream)
        new.array[...] = self.array.T
        mark_written(new.array)
        return new

    def split(self, section, stream=0):
        """Views of `section` elements each; the last one may have fewer."""
        if self.ndim != 1:
            raise ValueError("only support 1d array")
        if self.strides[0] != self.dtype.itemsize:
            raise ValueError("only support unit stride")
        for first in range(0, self.size, section):
            yield DeviceArray.of(self.array[first : first + section], stream or self.stream)


class SharedArray(streams.HostArray):
    """An array that the host and the device access: managed and mapped memory."""

    __cuda_memory__ = True
    __cuda_ndarray__ = True
    stream = 0
    gpu_data = DeviceArray.gpu_data
    alloc_size = DeviceArray.alloc_size
    device_ctypes_pointer = DeviceArray.device_ctypes_pointer
    __cuda_array_interface__ = DeviceArray.__cuda_array_interface__
    copy_to_host = DeviceArray.copy_to_host
    copy_to_device = DeviceArray.copy_to_device
    array = property(lambda self: self.view(np.ndarray))


class PinnedArray(streams.HostArray):
    """An array of the host that copies in flight may access."""


def plain(a):
    """Return the same memory as a NumPy array whose accesses are not seen."""
    return a.view(np.ndarray) if isinstance(a, streams.HostArray) else a


def _has_ellipsis(item) -> bool:
    return any(i is ... for i in (item if isinstance(item, tuple) else (item,)))


def host_view(a):
    """Return the NumPy array in which a device array is simulated; any other object unchanged."""
    if isinstance(a, (DeviceArray, SharedArray)):
        return a.array
    if is_cuda_array(a):
        return as_cuda_array(a).array
    return a


# ----------------------------------------------------------------------------- functions of numba.cuda
def device_array(shape, dtype=np.float64, strides=None, order="C", stream=0):
    """cuda.device_array"""
    new = _new(shape, dtype, strides, order)
    if settings.current().tracks_unwritten:
        mark_unwritten(new)
    return DeviceArray.of(new, stream)


def pinned_array(shape, dtype=np.float64, strides=None, order="C"):
    """cuda.pinned_array"""
    return _visible(shape, dtype, strides, order).view(PinnedArray)


def mapped_array(
    shape, dtype=np.float64, strides=None, order="C", stream=0, portable=False, wc=False
):
    """cuda.mapped_array"""
    return _visible(shape, dtype, strides, order).view(SharedArray)


def managed_array(shape, dtype=np.float64, strides=None, order="C", stream=0, attach_global=True):
    """cuda.managed_array"""
    return _visible(shape, dtype, strides, order).view(SharedArray)


def device_array_like(ary, stream=0):
    """cuda.device_array_like"""
    return device_array(**_layout(ary), stream=stream)


def pinned_array_like(ary):
    """cuda.pinned_array_like"""
    return pinned_array(**_layout(ary))


def mapped_array_like(ary, stream=0, portable=False, wc=False):
    """cuda.mapped_array_like"""
    return mapped_array(**_layout(ary))


def _layout(ary) -> dict:
    """Shape, dtype and strides of a new array whose axes lie in memory in the order of those of
    `ary`."""
    a = host_view(ary)
    if not isinstance(a, np.ndarray):
        a = np.broadcast_to(np.empty((), a.dtype), a.shape)
    strides = np.empty_like(a, subok=False).strides
    return {"shape": a.shape, "dtype": a.dtype, "strides": strides}


def to_device(obj, stream=0, copy=True, to=None):
    """cuda.to_device"""
    if to is None:
        return auto_device(obj, stream, copy)[0]
    if copy:
        to.copy_to_device(obj, stream)
    return to


def auto_device(obj, stream=0, copy=True, user_explicit=False):
    """Return (a device array, is it new?)."""
    if isinstance(obj, (DeviceArray, SharedArray)):
        return obj, False
    if is_cuda_array(obj):
        return as_cuda_array(obj), False
    a = plain(np.array(obj, copy=None, subok=True))
    sentry_contiguous(a)
    new = from_array_like(a, stream)
    if copy:
        streams.copied(stream, new.array, a, [a])
        np.copyto(array_core(new.array), array_core(a))
    return new, True


def from_array_like(ary, stream=0, gpu_data=None):
    """Return an unwritten device array with the shape and the strides of `ary`."""
    return DeviceArray(ary.shape, ary.strides, ary.dtype, stream, gpu_data)


def from_record_like(rec, stream=0, gpu_data=None):
    """Return an unwritten record on the device."""
    return DeviceArray((), (), rec.dtype, stream, gpu_data)


def is_cuda_array(obj) -> bool:
    """cuda.is_cuda_array"""
    return hasattr(obj, "__cuda_array_interface__")


def as_cuda_array(obj, sync=True):
    """cuda.as_cuda_array"""
    if not is_cuda_array(obj):
        raise TypeError("*obj* doesn't implement the cuda array interface.")
    return from_cuda_array_interface(obj.__cuda_array_interface__, obj, sync)


def from_cuda_array_interface(desc, owner=None, sync=True):
    """cuda.from_cuda_array_interface. The memory must be the simulator's: another library's is on a
    real GPU."""
    if desc.get("mask") is not None:
        raise NotImplementedError("Masked arrays are not supported")
    shape, strides, dtype = prepare_shape_strides_dtype(
        desc["shape"], desc.get("strides"), np.dtype(desc["typestr"]), "C"
    )
    address = desc["data"][0]
    if sync and desc.get("stream"):
        streams.host_waits(desc["stream"])
    size = math.prod(shape) and sum(s * (n - 1) for s, n in zip(strides, shape)) + dtype.itemsize
    if size and not any(
        low <= address and address + size <= end for low, end in _allocations.items()
    ):
        raise ValueError(
            "the array is in the memory of a real GPU, which the simulator does not read: copy it "
            "to the host first"
        )
    if size:
        raw = np.asarray(_Bytes(address, size, owner))
    else:
        raw = np.empty(0, np.uint8)
    return DeviceArray.of(np.ndarray(shape, dtype, raw, strides=strides))
