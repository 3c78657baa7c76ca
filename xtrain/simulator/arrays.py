"""The arrays in a simulated kernel: views of memory.py's Memory, of numbers or of records."""

import functools
import math
from operator import index as as_int

import numpy as np

from . import errors, unwritten
from .half import BF16
from .memory import Memory, _Bytes
from .scalars import dtype_of, scalar_type, storing
from .unwritten import extent


class Array:
    """An array as a kernel sees it. Its shape is typed; Thread.load and Thread.store check and
    record its elements."""

    __slots__ = (
        "bias", "convert", "dense", "dims", "dtype", "flat", "memory", "ndim", "plane", "reader", "run", "span", "start",
        "steps", "stride", "wrap", "writeable",
    )  # fmt: skip

    def __init__(self, memory, flat, dims, steps, start=0, bias=0, writeable=True, stride=None):
        self.memory = memory
        self.flat = flat
        self.dtype = flat.dtype
        self.writeable = writeable
        # in elements of flat
        self.dims = dims
        self.steps = steps
        self.start = start
        self.ndim = len(dims)
        self.plane = (*dims, *steps, start)  # for locate
        self.bias = bias  # key of flat[0]
        self.span = self.dtype.itemsize // memory.granule  # keys per element
        self.stride = stride or self.span  # keys from flat[k] to flat[k + 1]
        self.dense = self.span == self.stride == 1  # in shared memory, k is then the key of flat[k]
        self.reader = self.run = None  # the mark whose reads are noted, and the notes: Memory.note
        scalar = scalar_type(self.dtype)
        # what a loaded value becomes
        self.wrap = None
        if scalar is not self.dtype.type:
            self.wrap = scalar
        self.convert = storing(self.dtype)  # before a store

    def _like(self, dims, steps, start):
        new = type(self).__new__(type(self))
        new.memory, new.flat = self.memory, self.flat
        new.dtype, new.writeable = self.dtype, self.writeable
        new.bias = self.bias
        new.span = self.span
        new.stride = self.stride
        new.dense = self.dense
        new.wrap, new.convert = self.wrap, self.convert
        new.dims = dims
        new.steps = steps
        new.start = start
        new.ndim = len(dims)
        new.plane = (*dims, *steps, start)
        new.reader = new.run = None
        return new

    shape = property(lambda self: tuple(map(np.int64, self.dims)))
    strides = property(lambda self: tuple(np.int64(s * self._bytes) for s in self.steps))
    _bytes = property(lambda self: self.stride * self.memory.granule)
    itemsize = property(lambda self: np.int64(self.dtype.itemsize))
    nbytes = property(lambda self: np.int64(self.dtype.itemsize * math.prod(self.dims)))
    size = property(lambda self: np.int64(math.prod(self.dims)))
    T = property(lambda self: self._like(self.dims[::-1], self.steps[::-1], self.start))
    real = property(lambda self: self._part(0))
    imag = property(lambda self: self._part(1))

    def __len__(self):
        return self.dims[0]

    def keys(self, k):
        """Return the keys of the element flat[k]."""
        first = self.bias + k * self.stride
        return range(first, first + self.span)

    # What a kernel may call.
    def transpose(self):
        return self.T

    def reshape(self, *shape):
        if len(shape) == 1 and isinstance(shape[0], tuple):
            shape = shape[0]
        dims = [int(n) for n in shape]
        size = math.prod(self.dims)
        if dims.count(-1) == 1:
            known = -math.prod(dims)
            dims[dims.index(-1)] = size // known if known else 0
        if math.prod(dims) != size or min(dims, default=0) < 0:
            raise ValueError(
                f"an array of shape {self.dims} cannot have the shape {tuple(map(int, shape))}"
            )
        if size and any(
            s != w for n, s, w in zip(self.dims, self.steps, c_steps(self.dims)) if n > 1
        ):
            raise ValueError("reshape and ravel need a C-contiguous array")
        return self._like(tuple(dims), c_steps(dims), self.start)

    def ravel(self):
        return self.reshape(math.prod(self.dims))

    def sum(self):
        thread, site = errors.caller()
        total = {"i": np.int64, "u": np.uint64}.get(self.dtype.kind, self.dtype.type)(0)
        for i in np.ndindex(self.dims):
            total = total + thread.load(self, i, site._replace(what="sum()"))
        return total

    def view(self, kind):
        """Return the same bytes as another dtype. The last axis is contiguous if the element size
        changes."""
        new = dtype_of(kind)
        old = self.dtype
        size, before = new.itemsize, old.itemsize
        if self.stride != self.span or new.itemsize % self.memory.granule:
            raise ValueError(f"a view of {new} of an array of {old} is not simulated")
        dims = [*self.dims]
        steps = [*self.steps]
        start = self.start
        if size != before:
            if not dims or steps[-1] != 1 or (dims[-1] * before) % size or start * before % size:
                raise ValueError(
                    f"a view of {new} of an array of {old} and shape {self.dims}: the last axis "
                    "must fit"
                )
            if any(n * before % size for n in steps[:-1]):
                raise ValueError(
                    f"a view of {new} of an array of {old}: a row is not whole elements"
                )
            dims[-1] = dims[-1] * before // size
            steps = [n * before // size for n in steps[:-1]] + [1]
            start = start * before // size
        flat = self.flat.view(np.uint8)
        flat = flat[: len(flat) // size * size].view(new)
        self.memory.local = False
        return make_array(
            self.memory, flat, tuple(dims), tuple(steps), start, self.bias, self.writeable
        )

    def _part(self, i):
        """Return the real or imaginary parts."""
        if self.dtype.kind != "c":
            if i:
                raise AttributeError(f"an array of {self.dtype} has no imaginary part")
            return self
        flat = self.flat.view(self.flat.real.dtype)
        steps = tuple(2 * n for n in self.steps)
        return Array(
            self.memory, flat, self.dims, steps, 2 * self.start + i, self.bias, self.writeable
        )

    def row(self, index):
        """array[index] with one number, if there are several axes. None: the index is something
        else, or out of bounds."""
        try:
            i = as_int(index)
        except TypeError:
            return None
        if self.ndim < 2 or not 0 <= i < self.dims[0]:
            return None
        return self._like(self.dims[1:], self.steps[1:], self.start + i * self.steps[0])

    def with_new_axes(self, index):
        """An axis of length 1 for each None in the index -> (the view, its index)."""
        rest = list(zip(self.dims, self.steps))
        after = sum(i is not None and i is not ... for i in index)
        axes = []
        for i in index:
            if i is None:
                axes.append((slice(None), (1, 0)))
            elif i is ...:
                axes += [(slice(None), rest.pop(0)) for _ in range(len(rest) - after)]
            elif rest:
                axes.append((i, rest.pop(0)))
                after -= 1
        shape = [axis for _, axis in axes] + rest
        view = self._like(tuple(n for n, _ in shape), tuple(s for _, s in shape), self.start)
        return view, tuple(i for i, _ in axes)

    def sliced(self, index):
        """array[index] with slices or with fewer indices than axes."""
        if not isinstance(index, tuple):
            index = (index,)
        index += (slice(None),) * (self.ndim - len(index))
        dims = []
        steps = []
        start = self.start
        for i, n, step in zip(index, self.dims, self.steps):
            if isinstance(i, slice):
                first, last, stride = i.indices(n)
                start += first * step
                dims.append(len(range(first, last, stride)))
                steps.append(step * stride)
            else:
                i = as_int(i)
                if not 0 <= i < n:
                    raise IndexError(i)
                start += i * step
        return self._like(tuple(dims), tuple(steps), start)

    def locate(self, index):
        """Return the position of the element in flat. None: there is no such element, or the index
        is a slice."""
        try:
            if type(index) is not tuple:
                i = as_int(index)
                if self.ndim == 1 and 0 <= i < self.dims[0]:
                    return self.start + i * self.steps[0]
                return None
            if self.ndim == 2:
                i, j = index
                i = as_int(i)
                j = as_int(j)
                n, m, row, column, start = self.plane
                if 0 <= i < n and 0 <= j < m:
                    return start + i * row + j * column
                return None
            if self.ndim == 3:
                h, i, j = index
                h = as_int(h)
                i = as_int(i)
                j = as_int(j)
                k, n, m = self.dims
                if 0 <= h < k and 0 <= i < n and 0 <= j < m:
                    k, n, m = self.steps
                    return self.start + h * k + i * n + j * m
                return None
            if len(index) != self.ndim:
                return None
            k = self.start
            for i, n, step in zip(index, self.dims, self.steps):
                i = as_int(i)
                if not 0 <= i < n:
                    return None
                k += i * step
            return k
        except (TypeError, ValueError):  # a slice, or the wrong number of indices
            return None


class RecordArray(Array):
    """An array with a structured dtype. Its elements are Records, references to memory; a.name is
    the array of one field."""

    __slots__ = ("fields",)

    def locate(self, index):
        """Not a number: Thread.load takes the long way."""
        return None

    def field(self, name):
        """Return the array of one field: same shape, same memory. A field that is an array itself
        has no such array."""
        offset = self.dtype.fields[name][1]
        bias = self.bias + offset // self.memory.granule
        args = self.memory, self.flat[name], self.dims, self.steps, self.start, bias
        return make_array(*args, self.writeable, self.stride)

    def __getattr__(self, name):
        if name in (self.dtype.names or ()) and self.dtype.fields[name][0].subdtype is None:
            return self.field(name)
        raise AttributeError(f"an array of {self.dtype} has no {name}")


class Record:
    """One element of a RecordArray: a reference, as in Numba. Its fields are read and written in
    memory."""

    __slots__ = ("_array", "_at", "_name")

    def __init__(self, array, at, name="record"):
        self._array = array
        self._at = at
        self._name = name

    def place(self, name):
        """Return where a field is: (array, index), or (array, None) for a field that is an array
        itself."""
        a, k = self._array, self._at
        if not isinstance(name, str):
            name = a.dtype.names[name]
        dtype, offset = a.dtype.fields[name][:2]
        if dtype.subdtype is None:
            column = a.field(name)
            return column._like((len(a.flat),), (1,), 0), k
        flat = a.flat[name][k]
        bias = a.bias + k * a.stride + offset // a.memory.granule
        dims = flat.shape
        return make_array(
            a.memory, flat.reshape(-1), dims, c_steps(dims), 0, bias, a.writeable
        ), None

    def all_keys(self):
        return self._array.keys(self._at)

    def value(self):
        return self._array.flat[self._at]

    def __getattr__(self, name):
        here = errors.caller()
        if name.startswith("__") or name not in self._array.dtype.names or here is None:
            raise AttributeError(f"a record of {self._array.dtype} has no {name}")
        thread, site = here
        return thread.load_field(self, name, site)


# ----------------------------------------------------------------------------- making arrays


def global_arrays(arrays: list, bytewise=False) -> list[Array]:
    """Return the kernel's array arguments. Arguments that overlap share one Memory, so their
    accesses are compared. bytewise: a key per byte, because the kernel may view the bytes as
    another dtype."""
    extents = [extent(a) for a in arrays]
    result: list = [None] * len(arrays)
    groups: list = []  # [low, high, indices]
    for i in sorted(range(len(arrays)), key=lambda i: extents[i]):
        low, high = extents[i]
        if groups and low < groups[-1][1]:
            groups[-1][1] = max(groups[-1][1], high)
            groups[-1][2].append(i)
        else:
            groups.append([low, high, [i]])
    for base, end, members in groups:
        granule = 0
        for i in members:
            granule = math.gcd(granule, grain(arrays[i].dtype), extents[i][0] - base)
        granule = 1 if bytewise else granule
        memory = Memory("global", granule)
        memory.base = base
        memory.nbytes = end - base
        memory.unwritten = unwritten.of(arrays[members[0]], base, granule)
        for i in members:
            result[i] = _global_array(memory, arrays[i], extents[i], base)
    return result


def is_bits(a) -> bool:
    """Does a kernel see this bfloat16 array as uint16? Launchers pass their arrays so
    (kernels/primitives/ptx.py)."""
    return a.dtype.name == "bfloat16" and getattr(a, "bf16_as_bits", False)


def _global_array(memory, a, extent, base):
    low, high = extent
    if any(stride % a.itemsize for stride, n in zip(a.strides, a.shape) if n > 1):
        raise ValueError(f"array of {a.dtype} with strides {a.strides}: not whole elements")
    if high > low:
        raw = np.asarray(_Bytes(low, high - low, a))
    else:
        raw = np.empty(0, np.uint8)
    start = (a.__array_interface__["data"][0] - low) // a.itemsize
    steps = tuple(stride // a.itemsize for stride in a.strides)
    bias = (low - base) // memory.granule
    if is_bits(a):
        dtype = np.uint16
    else:
        dtype = dtype_of(a.dtype)
    return make_array(memory, raw.view(dtype), a.shape, steps, start, bias, a.flags.writeable)


def make_array(memory, flat, *facts) -> Array:
    """Return an Array or a RecordArray: see Array.__init__."""
    return (RecordArray if flat.dtype.names else Array)(memory, flat, *facts)


def grain(dtype) -> int:
    """Bytes per key: divides the size and the place of everything that a kernel can access by
    itself in an element."""
    if dtype.kind == "c":
        return dtype.itemsize // 2
    if dtype.subdtype is not None:
        return grain(dtype.subdtype[0])
    if dtype.names is None:
        return dtype.itemsize
    parts = [n for kind, at, *_ in dtype.fields.values() for n in (grain(kind), at)]
    return math.gcd(dtype.itemsize, *parts)


def c_steps(shape) -> tuple:
    """Return the steps of a C-contiguous array of this shape, in elements."""
    steps = [1]
    for n in shape[:0:-1]:
        steps.insert(0, steps[0] * n)
    return tuple(steps[: len(shape)])


def new_array(kind, shape, dtype, bytewise=False) -> Array:
    """Return an unwritten shared or local array."""
    first = _first_array(kind, shape, dtype, bytewise)
    new = first._like(first.dims, first.steps, 0)
    new.memory = Memory(kind, first.memory.granule)
    new.flat = first.flat.copy()
    new.memory.local = first.memory.local
    return new


@functools.lru_cache(maxsize=256)
def _first_array(kind, shape, dtype, bytewise):
    """Never seen by a kernel: every thread's array is made after this one, which takes half the
    time."""
    flat = poisoned(math.prod(shape), dtype)
    memory = Memory(kind, 1 if bytewise else grain(dtype))
    memory.local = memory.local and memory.granule == dtype.itemsize
    return dense_array(memory, flat, shape)


def dense_array(memory, flat, shape) -> Array:
    """Return a C-contiguous array over all of flat."""
    return make_array(memory, flat, shape, c_steps(shape))


def poisoned(size, dtype) -> np.ndarray:
    """Unwritten memory: NaN, or bytes 0x7F."""
    flat = np.empty(size, dtype)
    if flat.dtype.kind == "f":
        flat.fill(np.nan)
    elif dtype_of(flat.dtype) == BF16:
        flat.view(np.uint16).fill(0x7FFF)
    else:
        flat.view(np.uint8).fill(0x7F)
    return flat


def poison(a):
    """Return the number that a read of `a` out of bounds returns where the run continues after the
    report."""
    if a.dtype.names:
        return Record(new_array("local", (1,), a.dtype), 0)
    value = poisoned(1, a.dtype)[0]
    if a.wrap is None:
        return value
    return a.wrap(value)
