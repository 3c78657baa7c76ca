"""The launches of an op, recorded once and repeated with new addresses.

A launcher in xtrain/kernels chooses its kernels, grids and scalars by shapes, strides, dtypes and
alignment; it does not read values. So what it does for inputs that agree in these is a list, which
is recorded once: memory to allocate, to clear, to copy, products by cuBLAS, kernels with their
packed parameters. To repeat it, the addresses of this call's tensors and its floats are written
into the parameters. The GPU does the same, and the host much less.

The list is recorded by running the launcher with placeholders, arrays that have a layout and no
memory. A launcher that does anything else with an array than look at its layout, allocate with
`empty` and `zeros`, multiply and launch (a decision by values, say) fails there with an error
before anything has run, and is called as usual from then on. So is one that needs LARGE bytes for a
while: it frees them while it runs, and its kernels take longer than the host. A float that a
launcher does anything else with than give it to a kernel belongs to the layout: each value is
recorded. Tensor maps, which contain addresses, are made once for each set of addresses.
"""

import copy
import ctypes
import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..device import cupy
from ..kernels.gemm import cublas_product
from ..kernels.runtime import launch
from ..kernels.runtime.instead import Number
from .arrays import (
    LARGE,
    TORCH_DTYPES,
    NoMemory,
    as_list,
    cuda_device,
    numpy_dtype,
    on_stream,
    run_launcher,
)

ALIGNMENT = 16  # bytes: what a launcher may ask of an address
SHIFT = 44  # the placeholder of array n has the address (n + 1) << SHIFT
BLOCK = 512  # bytes: what torch rounds allocations up to
MAX_KNOWN = 1 << 12  # signatures of an op
MAX_VALUES = 64  # of the floats of one signature


class Placeholder:
    """An array in place of the n-th tensor of a recording: a layout, and no memory."""

    __array__ = None  # NumPy must not wrap it
    __iter__ = None
    __eq__ = None  # type: ignore[assignment]

    def __init__(self, recording: "Recording", address: int, shape: tuple, dtype, strides=None):
        self.recording = recording
        self.address = address
        self.shape = shape
        self.dtype = dtype
        dense = tuple(dtype.itemsize * n for n in _dense(shape))
        self.strides = dense if strides is None else strides
        self.ndim = len(shape)
        self.size = math.prod(shape)
        self.itemsize = dtype.itemsize
        self.nbytes = self.size * self.itemsize
        steps = zip(self.strides, dense, shape)
        self._c_contiguous = not self.size or all(s == d for s, d, n in steps if n > 1)
        self.flags = SimpleNamespace(c_contiguous=self._c_contiguous)
        self.device = recording.device
        self.ctypes = SimpleNamespace(data=address)  # for primitives.flat.address_of
        self.data = SimpleNamespace(memset_async=self._clear)  # no ptr: nothing else may read it

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError("a placeholder has no value")

    def reshape(self, *shape: Any) -> "Placeholder":
        """Return the same contiguous elements in another shape."""
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        if -1 in shape:
            others = -math.prod(shape)
            shape = tuple(self.size // others if n == -1 else n for n in shape)
        if not self._c_contiguous or math.prod(shape) != self.size:
            raise TypeError("reshape would copy")
        return Placeholder(self.recording, self.address, shape, self.dtype)

    def __getitem__(self, where: Any) -> "Placeholder":
        """Return a part of the elements: slices with step 1, one per axis from the first."""
        address = self.address
        shape = list(self.shape)
        for axis, part in enumerate(where if isinstance(where, tuple) else (where,)):
            if not isinstance(part, slice):
                raise TypeError("only slices can be recorded")
            first, end, step = part.indices(shape[axis])
            if step != 1:
                raise TypeError("only slices with step 1 can be recorded")
            shape[axis] = max(end - first, 0)
            address += first * self.strides[axis]
        return Placeholder(self.recording, address, tuple(shape), self.dtype, self.strides)

    def __setitem__(self, where: Any, value: "Placeholder") -> None:
        """Record that elements are copied from another array. Rows may be further apart."""
        target = self if where is ... else self[where]
        same = target.dtype == value.dtype and target.shape == value.shape
        if not (same and self.ndim and target._has_dense_rows() and value._has_dense_rows()):
            raise TypeError("only copies of arrays with dense rows can be recorded")
        self.recording.steps.append(_Copy(target, value))

    def _has_dense_rows(self):
        row = Placeholder(self.recording, 0, self.shape[1:], self.dtype, self.strides[1:])
        return row._c_contiguous

    def _clear(self, value, nbytes):
        """Record what `zeros` does."""
        if value != 0 or nbytes != self.nbytes:
            raise TypeError("only zeros can be recorded")
        self.recording.steps.append(_Clear(self))


def _dense(shape):
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _split(address: int) -> tuple[int, int]:
    """Return which array a placeholder's address belongs to, and the bytes from its beginning."""
    return (address >> SHIFT) - 1, address & (1 << SHIFT) - 1


class _Clear:
    """Set an array to zero."""

    def __init__(self, array: Placeholder):
        self.name = "memset"
        self.place, self.offset = _split(array.address)
        self.nbytes = array.nbytes
        self.memset = cupy().cuda.runtime.memsetAsync

    def __call__(self, addresses: list[int], numbers: list[float], stream: int) -> None:
        if self.nbytes:
            self.memset(addresses[self.place] + self.offset, 0, self.nbytes, stream)


class _Copy:
    """Set an array to another. Both have contiguous rows."""

    def __init__(self, array: Placeholder, source: Placeholder):
        self.name = "memcpy"
        self.place, self.offset = _split(array.address)
        self.source, self.source_offset = _split(source.address)
        self.nbytes = array.nbytes
        runtime = cupy().cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        if array._c_contiguous and source._c_contiguous:
            copy_bytes = runtime.memcpyAsync
            self.start = lambda to, of, stream: copy_bytes(to, of, array.nbytes, kind, stream)
            return
        copy_rows = runtime.memcpy2DAsync
        rows = array.shape[0]
        pitch = array.strides[0]
        source_pitch = source.strides[0]
        if source_pitch < array.nbytes // max(rows, 1):  # an expanded tensor; CUDA refuses it
            raise TypeError("only copies of rows that do not overlap can be recorded")
        self.start = lambda to, of, stream: copy_rows(
            to, pitch, of, source_pitch, array.nbytes // rows, rows, kind, stream
        )

    def __call__(self, addresses: list[int], numbers: list[float], stream: int) -> None:
        if self.nbytes:
            target = addresses[self.place] + self.offset
            self.start(target, addresses[self.source] + self.source_offset, stream)


class _Launch:
    """Launch a kernel."""

    def __init__(self, kernel, grid, block, args, shared, overlap):
        prepared = launch.PreparedLaunch(
            kernel, grid, block, [_located(a) for a in args], shared, overlap
        )
        self.name = prepared.name
        self.prepared = prepared  # owns the memory of the parameters
        self.words = prepared.words
        self.start = prepared.start
        self.moving = [(i, *_split(self.words[i])) for i in prepared.addresses]
        scalars = [a for a in args if isinstance(a, (np.generic, Number))]
        # ctypes's floats in the parameters, and which float of the call each becomes
        self.numbers = [
            (ctypes.c_float.from_buffer(self.words, 8 * i), a.n)
            for i, a in zip(prepared.scalars, scalars)
            if isinstance(a, Number)
        ]

    def __call__(self, addresses: list[int], numbers: list[float], stream: int) -> None:
        words = self.words
        for i, place, offset in self.moving:
            words[i] = addresses[place] + offset
        for word, n in self.numbers:
            word.value = numbers[n]
        self.start(stream)


class _Product:
    """Compute a product by cuBLAS."""

    def __init__(self, index: int, c: Placeholder, a: Placeholder, b: Placeholder, *options: Any):
        if any(isinstance(option, Number) for option in options):
            raise TypeError("the factor of a product has no value while launches are recorded")
        self.name = "a product"
        self.index = index
        self.operands = [_located(x) for x in (c, a, b)]
        self.places = [_split(x.address) for x in (c, a, b)]
        self.compute: Callable = functools.partial(cublas_product, *self.operands, *options)

    def __call__(self, addresses: list[int], numbers: list[float], stream: int) -> None:
        for x, (place, offset) in zip(self.operands, self.places):
            x.data.ptr = addresses[place] + offset
        if torch.cuda.is_current_stream_capturing():
            with on_stream(self.index, stream, True):
                self.compute()
        else:
            self.compute(stream=stream)


def _located(a):
    """Return a placeholder with the address of an array of CuPy; a scalar as it is."""
    if isinstance(a, np.generic):
        return a
    if isinstance(a, Number):
        return np.float32(0)
    if not isinstance(a, Placeholder):
        raise TypeError(f"a kernel reads an array that is not the op's own: {type(a).__name__}")
    located = copy.copy(a)
    located.data = SimpleNamespace(ptr=a.address)
    return located


class _Block:
    """Memory that is allocated in every repetition."""

    def __init__(self, shape: tuple, dtype: np.dtype):
        self.shape = shape
        self.dtype = dtype


class _Derived:
    """An array that depends on addresses and the stream, as tensor maps do. It is made once."""

    def __init__(self, make: Callable, addresses: list[int]):
        self.make = make
        self.sources = [_split(a) for a in addresses]
        self.kept: dict[tuple, Any] = {}

    def address(self, addresses: list[int], stream: int, index: int, capturing: bool) -> int:
        """Return its address. A graph must be known to whatever keeps the array."""
        key = (stream, *[addresses[place] + offset for place, offset in self.sources])
        array = self.kept.get(key)
        if array is None or capturing:
            with on_stream(index, stream, capturing):
                array = self.make(key[1:])
            if len(self.kept) >= MAX_KNOWN:
                self.kept.clear()
            self.kept[key] = array
        return array.data.ptr


class Recording:
    """What a launcher does with placeholders, on the GPU with this index."""

    def __init__(self, index: int):
        self.device = cupy().cuda.Device(index)
        self.count = 0  # of arrays
        self.made: dict[int, _Block | _Derived] = {}  # array -> where it comes from, but for inputs
        self.steps: list[_Clear | _Copy | _Launch | _Product] = []

    def input(self, x: torch.Tensor) -> Placeholder:
        """Return the placeholder of the next argument."""
        dtype = numpy_dtype(x.dtype)
        strides = tuple(dtype.itemsize * n for n in x.stride())
        return self._next(x.data_ptr() % ALIGNMENT, tuple(x.shape), dtype, strides)

    def allocate(self, shape: Any, dtype: np.dtype) -> Placeholder:
        """Record that memory is allocated."""
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        self.made[self.count] = _Block(shape, dtype)
        return self._next(0, shape, dtype)

    def derive(self, make: Callable, addresses: list[int], n: int, dtype: np.dtype) -> Placeholder:
        """Record that make(addresses) is a kernel's argument."""
        self.made[self.count] = _Derived(make, addresses)
        return self._next(0, (n,), dtype)

    def launch(self, kernel, grid, block, args, shared, overlap, resident) -> None:
        """Record a launch."""
        if resident:
            raise TypeError("launches of resident blocks are not repeated")
        self.steps.append(_Launch(kernel, grid, block, args, shared, overlap))

    def product(self, c: Placeholder, a: Placeholder, b: Placeholder, *options: Any) -> None:
        """Record a product."""
        self.steps.append(_Product(self.device.id, c, a, b, *options))

    def _next(self, residue, *layout):
        self.count += 1
        return Placeholder(self, (self.count << SHIFT) + residue, *layout)


class Launches:
    """Everything that an op does for inputs with one layout."""

    def __init__(self, recording: Recording, results: list):
        self.lock = threading.Lock()  # of the parameters
        self.steps = recording.steps
        self.device = cuda_device(recording.device.id)
        self.index = recording.device.id
        inputs = recording.count - len(recording.made)
        self.results: list[int] = []  # in made
        for a in results:
            place, offset = _split(a.address)
            block = recording.made.get(place)
            if not isinstance(block, _Block) or place - inputs in self.results:
                raise TypeError("a result is an argument, or returned twice")
            if offset or a.size != math.prod(block.shape) or a.dtype != block.dtype:
                raise TypeError("a result is a part of an array")
            block.shape = a.shape
            self.results.append(place - inputs)
        self.made: list[Any] = []  # in order: (shape, strides, dtype), offset in scratch, _Derived
        self.scratch = 0  # bytes
        for i, made in enumerate(recording.made.values()):
            if isinstance(made, _Derived):
                self.made.append(made)
            elif i in self.results:
                self.made.append((made.shape, _dense(made.shape), TORCH_DTYPES[made.dtype]))
            else:
                nbytes = math.prod(made.shape) * made.dtype.itemsize
                if nbytes >= LARGE:
                    raise TypeError("the launcher frees so large an array before it has ended")
                self.made.append(self.scratch)
                self.scratch += -(-nbytes // BLOCK) * BLOCK
        self.derives = any(isinstance(made, _Derived) for made in self.made)

    def repeat(self, addresses: list[int], numbers: list[float], stream: int) -> list[torch.Tensor]:
        """Do it for inputs at these addresses and for these floats, and return the results."""
        device = self.device
        capturing = self.derives and torch.cuda.is_current_stream_capturing()
        first = 0
        if self.scratch:
            scratch = torch.empty_strided((self.scratch,), (1,), dtype=torch.uint8, device=device)
            first = scratch.data_ptr()
        blocks: list[Any] = []
        for made in self.made:
            block = None
            if type(made) is tuple:
                shape, strides, dtype = made
                block = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                address = block.data_ptr()
            elif type(made) is int:
                address = first + made
            else:
                address = made.address(addresses, stream, self.index, capturing)
            blocks.append(block)
            addresses.append(address)
        with self.lock:
            for step in self.steps:
                try:
                    step(addresses, numbers, stream)
                except Exception as error:
                    raise RuntimeError(
                        f"the driver rejected the launch of {step.name}: {error}"
                    ) from error
        return [blocks[i] for i in self.results]


def record(launcher: Callable, arguments: Sequence[Any], index: int) -> Launches | None:
    """Record what a launcher does with arguments of this layout on a GPU, without doing it.

    arguments: tensors; floats are what they are, Numbers are different in each repetition.
    None if it cannot be recorded: run_launcher does the work then, or says what is wrong.
    """
    instead = launch.instead
    before = instead.allocate, instead.launch, instead.product, instead.derive
    try:
        recording = Recording(index)
        given = [recording.input(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        instead.allocate = recording.allocate
        instead.launch = recording.launch
        instead.product = recording.product
        instead.derive = recording.derive
        return Launches(recording, as_list(launcher(*given)))
    except Exception:
        return None
    finally:
        instead.allocate, instead.launch, instead.product, instead.derive = before


class _ByValue:
    """The launches of a launcher that does more with its floats than give them to kernels.

    None once there are more than MAX_VALUES floats, which come from a schedule and never return.
    """

    def __init__(self):
        self.recorded: dict[tuple[float, ...], Launches | None] = {}


class Repeatable:
    """A launcher of an op that changes none of its arguments and has no lists of tensors.

    strided: indices of the arguments that the launcher takes as they are; of others it gets
    contiguous, aligned copies.
    """

    def __init__(self, launcher: Callable, strided: frozenset[int]):
        self.launcher = launcher
        self.strided = strided
        self.known: dict[tuple, Launches | _ByValue | None] = {}

    def __call__(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Return the launcher's results for tensors in place of arrays."""
        given = list(arguments)
        mode = launch.mode()
        layout: list[Any] = [mode]
        addresses = []
        numbers = []
        index = -1
        for i, a in enumerate(arguments):
            if not isinstance(a, torch.Tensor):
                if type(a) is float:
                    numbers.append(a)
                    a = float
                layout.append(a)
                continue
            try:
                address = a.data_ptr()
            except RuntimeError:
                raise NoMemory("a tensor has no memory of its own") from None
            if i in self.strided:
                if a.is_neg():  # a view, its numbers have the other sign in memory
                    a = given[i] = a.resolve_neg()
                    address = a.data_ptr()
                layout += (a.stride(), address % ALIGNMENT)
            elif address % ALIGNMENT or not a.is_contiguous():
                a = given[i] = aligned(a)
                address = a.data_ptr()
            addresses.append(address - address % ALIGNMENT)
            index = a.get_device()
            layout += (a.shape, a.dtype, index)
        alone = len(set(addresses)) == len(addresses)  # a launcher may compare addresses
        if index >= 0 and alone and mode is not None and current_device() == index:
            launches = self._launches(tuple(layout), numbers, given, index)
            if launches is not None:
                return launches.repeat(addresses, numbers, current_stream(index))
        return run_launcher(self.launcher, given)

    def _launches(self, layout, numbers, given, index):
        """Return the launches of these arguments; None: they are not repeated."""
        try:
            found = self.known[layout]
            return found.recorded[tuple(numbers)] if type(found) is _ByValue else found
        except KeyError:
            pass
        if torch.cuda.is_current_stream_capturing():  # no kernel can be loaded now
            return None
        if any(isinstance(a, torch.Tensor) and a.get_device() != index for a in given):
            return None  # run_launcher says that this is wrong
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        values = self.known.get(layout)
        if values is None:
            found = self.known[layout] = record(self.launcher, _with_numbers(given), index)
            if found is not None or not numbers:
                return found
            values = _ByValue()
        found = record(self.launcher, given, index)
        values.recorded[tuple(numbers)] = found
        self.known[layout] = values if len(values.recorded) <= MAX_VALUES else None
        return found


def _with_numbers(arguments):
    """Return the arguments with Numbers in place of floats."""
    n = itertools.count()
    return [Number(next(n)) if type(a) is float else a for a in arguments]


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose address is a multiple of 16: kernels that read so much at
    once compute the same bits from any tensor."""
    x = x.resolve_neg().contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def current_device() -> int:
    """Return the index of the current GPU."""
    return torch._C._cuda_getDevice()


def current_stream(index: int) -> int:
    """Return the handle of torch's current stream of a GPU, in a third of current_stream's time."""
    return torch._C._cuda_getCurrentRawStream(index)
