"""One CUDA thread: the functions and attributes of `numba.cuda` that do not wait for other threads.

source.py rewrites a kernel so that `cuda.threadIdx.x` becomes `_t.threadIdx.x`,
`cuda.atomic.add(...)` becomes `_t.atomic_add(...)` and `a[i]` becomes `_t.load(a, i, site)`, where _t
is the running Thread. Each method has the name and the meaning of its function in numba.cuda.
"""

import contextlib
import functools
import itertools
import math
import operator
from typing import Any

import numpy as np

from . import errors, releases
from .memory import Array, Mark, Memory, add_reader, dense_array, poisoned, unordered
from .scalars import TWINS, Int32, UInt32, UInt64, dtype_of, unify

ATOMIC = "atomically changed"  # the verb in a report
MAX_TURNS = 1_000_000  # iterations of one while loop of one thread: a second or two


class Dim3:
    """A position or a size with three axes, as int32."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x, y, z):
        self.x, self.y, self.z = Int32(x), Int32(y), Int32(z)

    def __iter__(self):
        return iter((self.x, self.y, self.z))

    def __str__(self):
        return f"({self.x}, {self.y}, {self.z})"


class Thread:
    """One thread of one block.

    block: the running Block; index: position in the block; lane, warp: index % 32, index // 32
    mark: this thread since its last synchronization; fences: its marks after a threadfence (releases.py)
    seen: the clocks that it knows of the lanes of its warp (memory.py); None before the first syncwarp
    generator, request, reply: the running kernel, what it waits for, and the result to send to it
    left: the Site of the return statement that ended it
    state: a dict for simulated intrinsics, which keep state between calls in it
    """

    __slots__ = (
        "_state", "block", "blockDim", "blockIdx", "fences", "generator", "gridDim", "index", "lane",
        "laneid", "left", "mark", "reply", "request", "seen", "threadIdx", "warp",
    )  # fmt: skip
    warpsize = Int32(32)

    def __init__(self, block, index, position):
        self.block, self.index, self.threadIdx = block, index, position
        self.warp, self.lane = divmod(index, 32)
        self.laneid = Int32(self.lane)
        self.blockIdx = block.position
        self.blockDim, self.gridDim = block.launch.block, block.launch.grid
        self.mark = Mark(self, block.epoch, 1)
        self.request: Any = None
        self.generator = self.reply = self.seen = self.left = None
        self._state, self.fences = None, ()

    @property
    def state(self) -> dict:
        """State of simulated intrinsics, created at the first use."""
        if self._state is None:
            self._state = {}
        return self._state

    def __str__(self):
        flat = self.blockDim.y == self.blockDim.z == 1
        return f"thread {self.index}" if flat else f"thread {self.threadIdx}"

    # ------------------------------------------------------------------------- memory
    def load(self, a, index, site):
        """a[index]"""
        if type(a) is not Array and isinstance(a, tuple):
            return a[index]
        k = a.locate(index)
        if k is None:
            return self._view(a, index, site)
        memory = a.memory
        if memory.local and k in memory.writes:
            pass  # no other thread has this memory
        elif a.span == 1:
            self._read(a, k + a.bias, index, site)
        else:
            for key in a.keys(k):
                self._read(a, key, index, site)
        value = a.flat[k]
        return value if a.wrap is None else a.wrap(value)

    def element(self, a):
        """A number with the type of a[i], without a read of memory."""
        return a[0] if isinstance(a, tuple) else (a.wrap or a.dtype.type)(1)

    def each(self, a, site):
        """for v in a"""
        return (self.load(a, i, site) for i in range(a.dims[0])) if type(a) is Array else a

    def store(self, a, index, value, site):
        """a[index] = value"""
        k = a.locate(index)
        if k is None:
            return self._store_view(a, index, value, site)
        if a.memory.local and a.writeable:
            a.memory.writes[k] = self.mark, site
        elif a.span == 1:
            self._write(a, k + a.bias, index, site)
        else:
            for key in a.keys(k):
                self._write(a, key, index, site)
        try:
            a.flat[k] = value if a.convert is None else a.convert(value)
        except TypeError:
            if isinstance(value, Array):
                raise errors.array_stored(self, site, index, value) from None
            raise

    def _read(self, a, key, index, site):
        memory, mark = a.memory, self.mark
        epoch = mark.epoch
        record = memory.writes.get(key)
        if record is None:
            if memory.busy and memory.local:
                raise errors.in_use(self, memory.busy, "reads", site, index)
            if memory.kind != "global" and key not in memory.atomics:
                raise errors.uninitialized(self, memory, key, site, index)
        elif record[0] is not mark and record[0].epoch == epoch:
            self._order(memory, record, "wrote", "read", index, site)
        if memory.watched:
            self._order(memory, memory.old_writes.get(key), "wrote", "read", index, site)
            self._order(memory, memory.atomics.get(key), ATOMIC, "read", index, site)
            self._order(memory, memory.old_atomics.get(key), ATOMIC, "read", index, site)
        record = memory.reads.get(key)
        if record is None or record[0].epoch != epoch:
            memory.reads[key] = (mark, site)
        elif record[0] is not mark and len(record) != 4:
            add_reader(memory.reads, key, mark, site)

    def _write(self, a, key, index, site):
        memory, mark = a.memory, self.mark
        epoch = mark.epoch
        write, read = memory.writes.get(key), memory.reads.get(key)
        if write is not None and write[0] is not mark and write[0].epoch == epoch:
            self._order(memory, write, "wrote", "wrote", index, site)
        if read is not None and read[0].epoch == epoch and (read[0] is not mark or len(read) > 2):
            self._order(memory, read, "read", "wrote", index, site)
        if memory.watched:
            self._order(memory, memory.old_writes.get(key), "wrote", "wrote", index, site)
            self._order(memory, memory.old_reads.get(key), "read", "wrote", index, site)
            self._order(memory, memory.atomics.get(key), ATOMIC, "wrote", index, site)
            self._order(memory, memory.old_atomics.get(key), ATOMIC, "wrote", index, site)
        if not a.writeable:
            if memory.busy:
                raise errors.in_use(self, memory.busy, "writes", site, index)
            raise errors.read_only(self, site, index)
        memory.writes[key] = (mark, site)

    def _change(self, a, key, index, site):
        """Check and record an atomic."""
        memory = a.memory
        if memory.kind != "global" and key not in memory.writes and key not in memory.atomics:
            raise errors.uninitialized(self, memory, key, site, index)
        releases.acquire(self.mark, memory, key)
        for shadow, did in (
            (memory.writes, "wrote"), (memory.reads, "read"),
            (memory.old_writes, "wrote"), (memory.old_reads, "read"),
        ):  # fmt: skip
            self._order(memory, shadow.get(key), did, ATOMIC, index, site)
        if not a.writeable:
            raise errors.read_only(self, site, index)
        memory.watched = True
        add_reader(memory.atomics, key, releases.release(self, memory, key), site)

    def _order(self, memory, record, did, does, index, site):
        if record is not None:
            then = unordered(record, self.mark)
            if then is not None:
                raise errors.race(memory.kind, then, did, self, does, site, index)

    def _view(self, a, index, site):
        """The view of a row or a slice. Raises OutOfBoundsError for any other index."""
        index = index if isinstance(index, tuple) else (index,)
        rest = (slice(None),) * (a.ndim - len(index) + 1)
        sliced = any(isinstance(i, slice) or i is ... for i in index)
        index = tuple(j for i in index for j in (rest if i is ... else (i,)))
        for i in index:
            if not isinstance(i, slice):
                operator.index(i)  # raises TypeError for a float
        if (sliced and len(index) <= a.ndim) or len(index) < a.ndim:
            with contextlib.suppress(IndexError):
                return a.view(index)
        raise errors.out_of_bounds(self, a, index, site)

    def _store_view(self, a, index, value, site):
        """a[2:5] = value"""
        view = self._view(a, index, site)
        if isinstance(value, Array):
            raise errors.array_copied(self, site)
        for i in np.ndindex(view.dims):
            self.store(view, i, value, site)

    def shared_array(self, site, shape, dtype, **_):
        return self.block.shared_array(self, site, _shape(shape), dtype_of(dtype))

    def local_array(self, site, shape, dtype, **_):
        flat = poisoned(math.prod(_shape(shape)), dtype_of(dtype))
        return dense_array(Memory("local", flat.itemsize), flat, _shape(shape))

    def const_array_like(self, site, values):
        return values if isinstance(values, Array) else self.block.launch.constant(values)

    # ------------------------------------------------------------------------- atomics
    def _atomic(self, site, a, index, name, change):
        """a[index] = change(a[index]) as one access. Returns the old value."""
        kinds = _ATOMIC_KINDS.get(name, _WHOLE)
        if a.dtype.name not in kinds:
            raise errors.atomic_kind(self, site, name, a, kinds)
        k = a.locate(index)
        if k is None:
            raise errors.out_of_bounds(self, a, index, site)
        for key in a.keys(k):
            self._change(a, key, index, site)
        old = a.flat[k]
        a.flat[k] = change(old)
        return old if a.wrap is None else a.wrap(old)

    def atomic_cas(self, site, a, index, old, new):
        old, new = a.dtype.type(old), a.dtype.type(new)
        return self._atomic(site, a, index, "cas", lambda now: new if now == old else now)

    def atomic_compare_and_swap(self, site, a, old, new):
        return self.atomic_cas(site, a, 0, old, new)

    def threadfence(self):
        releases.fence(self)

    threadfence_system = threadfence

    def threadfence_block(self):
        pass

    # ------------------------------------------------------------------------- positions
    def grid(self, ndim):
        """The thread's position in the grid: int64, or a tuple of ndim int64."""
        axes = zip(self.blockIdx, self.blockDim, self.threadIdx)
        position = tuple(np.int64(b) * n + t for b, n, t in axes)[: int(ndim)]
        return position if ndim > 1 else position[0]

    def gridsize(self, ndim):
        size = tuple(np.int64(g) * n for g, n in zip(self.gridDim, self.blockDim))[: int(ndim)]
        return size if ndim > 1 else size[0]

    def lanemask_lt(self):
        return UInt32((1 << self.lane) - 1)

    # ------------------------------------------------------------------------- arithmetic
    def selp(self, condition, a, b):
        return a if condition else b

    def fma(self, a, b, c):
        """a * b + c, rounded once. In float32 the product is exact in float64 and only the addition is rounded twice."""
        scalar = functools.reduce(unify, map(type, (a, b, c)))
        return scalar(np.float64(a) * np.float64(b) + np.float64(c))

    def cbrt(self, x):
        return np.cbrt(x)

    def popc(self, x):
        return _integer(x)(_bits(x).bit_count())

    def clz(self, x):
        return _integer(x)(8 * x.itemsize - _bits(x).bit_length())

    def ffs(self, x):
        bits = _bits(x)
        return UInt32((bits & -bits).bit_length())

    def brev(self, x):
        width = 64 if type(x) is UInt64 else 32
        bits = _bits(x) & (2**width - 1)
        return (UInt64 if width == 64 else UInt32)(int(f"{bits:0{width}b}"[::-1], 2))

    def nanosleep(self, ns):
        pass

    def turns(self, site):
        """A function that a while loop calls in each iteration. It returns True, and raises KernelError after MAX_TURNS."""

        def counted():
            yield from itertools.repeat(True, MAX_TURNS)
            raise errors.endless(self, site, MAX_TURNS + 1)

        return counted().__next__


def _shape(shape) -> tuple[int, ...]:
    return tuple(map(int, shape)) if isinstance(shape, tuple) else (int(shape),)


def _bits(x) -> int:
    return int(x) & (256**x.itemsize - 1)


def _integer(x):
    return type(x) if isinstance(x, np.integer) else Int32


_ATOMICS = {
    "add": operator.add,
    "sub": operator.sub,
    "max": TWINS[max],
    "min": TWINS[min],
    "nanmax": TWINS[max],
    "nanmin": TWINS[min],
    "and_": operator.and_,
    "or_": operator.or_,
    "xor": operator.xor,
    "exch": lambda old, value: value,
    "inc": lambda old, top: old + type(old)(1) if old < top else type(old)(0),
    "dec": lambda old, top: old - type(old)(1) if 0 < old <= top else top,
}


# The dtypes for which Numba has each atomic; _WHOLE for the ones that are not listed.
_ATOMIC_KINDS: dict[str, tuple[str, ...]] = dict.fromkeys(("inc", "dec"), ("uint32", "uint64"))
_WHOLE = ("int32", "int64", "uint32", "uint64")
_ATOMIC_KINDS |= dict.fromkeys(
    ("add", "sub", "max", "min", "nanmax", "nanmin"), (*_WHOLE, "float32", "float64")
)


def _atomic_method(name, change):
    def atomic(self, site, a, index, value):
        value = a.dtype.type(value)
        return self._atomic(site, a, index, name, lambda old: change(old, value))

    return atomic


for _name, _change in _ATOMICS.items():
    setattr(Thread, f"atomic_{_name}", _atomic_method(_name, _change))
