"""Shadow memory: checks bounds, first writes and data races.

Every element has a key. For each key, the shadow of the memory keeps the last plain write, and the
reads and atomics since the last barrier, as (mark, site). A Mark is one thread between two of its
synchronizations. Two accesses by different threads are in order if
  - a block barrier lies between them: the epochs of their marks differ, or
  - they are lanes of one warp and a chain of syncwarp calls leads from one to the other: Mark.clock
    is compared with Thread.seen, vector clocks over the 32 lanes. Shuffles and votes do not order
    memory accesses (CUDA guide), or
  - the blocks differ and the second knows of the first by an atomic after a threadfence
    (releases.py).
Any other pair is a data race, unless both only read or both are atomics.
"""

import math
from operator import index as as_int

import numpy as np

from . import releases, unwritten
from .scalars import scalar_type, storing


class Mark:
    """A thread at one time. epoch: block barriers so far, clock: the thread's own synchronizations so far."""

    __slots__ = ("clock", "epoch", "thread")

    def __init__(self, thread, epoch, clock):
        self.thread, self.epoch, self.clock = thread, epoch, clock

    def next(self):
        """The thread's next mark: its later accesses are distinguishable from its earlier ones."""
        return Mark(self.thread, self.epoch, self.clock + 1)


def in_order(earlier: Mark, now: Mark) -> bool:
    """Is an access at `earlier` ordered before an access at `now`?"""
    a, b = earlier.thread, now.thread
    if a is b:
        return True
    if a.block is not b.block:
        return releases.known(earlier, now)
    if earlier.epoch != now.epoch:
        return True
    if a.warp == b.warp and b.seen is not None and b.seen[a.lane] >= earlier.clock:
        return True
    return b.known is not None and earlier.clock < b.known.get(a, 0)


class Memory:
    """The shadow of one range of memory: a global array with all its aliases, a shared array or a local array."""

    __slots__ = (
        "atomics", "base", "busy", "granule", "kind", "local", "old_atomics", "old_reads", "old_writes", "reads",
        "releases", "unread", "unset", "unwritten", "watched", "writes",
    )  # fmt: skip

    def __init__(self, kind: str, granule: int):
        self.kind, self.local = kind, kind == "local"  # "global" | "shared" | "local"
        self.granule = granule  # bytes per key
        self.base = 0  # global memory: the address of key 0
        # By threads of the running block, and by finished blocks.
        self.writes: dict = {}
        self.reads: dict = {}
        self.atomics: dict = {}
        self.old_writes: dict = {}
        self.old_reads: dict = {}
        self.old_atomics: dict = {}
        self.releases: dict = {}  # key of an atomic -> {block: Release}
        self.unset: dict = {}  # key -> the Unset that was stored there (unset.py)
        self.unread: dict = {}  # key -> (mark, read) of the last read before any write
        self.unwritten = None  # global memory: the keys that no kernel and no copy has written
        self.busy = None  # registers that a product in flight uses: see errors.in_use
        self.watched = False  # there are atomics, Unsets or finished blocks: check all dicts

    def end_of_block(self):
        """Move the records of the running block to those of the finished blocks."""
        self.old_writes.update(self.writes)
        releases.keep(self.old_reads, self.reads)
        releases.keep(self.old_atomics, self.atomics)
        for shadow in (self.writes, self.reads, self.atomics):
            shadow.clear()
        self.watched = bool(self.old_writes or self.old_reads or self.old_atomics)


def add_reader(shadow: dict, key, mark: Mark, site):
    """Record a read or an atomic: an access that may share its element with others of its kind. The record is one of

    (mark, site)                   the only access since the barrier
    (mark, site, {thread: ...})    several lanes of one warp
    (mark, site, mark, site)       threads of two warps: every write races with at least one of them
    """
    record = shadow.get(key)
    if record is None or record[0].epoch != mark.epoch:
        shadow[key] = (mark, site)
    elif len(record) == 4:
        pass
    elif record[0].thread.warp != mark.thread.warp:
        shadow[key] = (record[0], record[1], mark, site)
    elif len(record) == 3:
        record[2][mark.thread] = (mark, site)
    elif record[0].thread is mark.thread:
        shadow[key] = (mark, site)
    else:
        first = record[0].thread
        shadow[key] = (record[0], record[1], {first: record, mark.thread: (mark, site)})


def unordered(record, mark):
    """The (mark, site) in a record that nothing orders before `mark`, or None."""
    if record is None:
        return None
    for access in releases.accesses(record):
        if not in_order(access[0], mark):
            return access
    return None


class Array:
    """An array as a kernel sees it. Its shape is typed; Thread.load and Thread.store check and record its elements."""

    __slots__ = (
        "bias", "convert", "dims", "dtype", "flat", "memory", "ndim", "span", "start", "steps", "wrap", "writeable",
    )  # fmt: skip

    def __init__(self, memory, flat, dims, steps, start=0, bias=0, writeable=True):
        self.memory, self.flat, self.dtype, self.writeable = memory, flat, flat.dtype, writeable
        self.dims, self.steps, self.start = dims, steps, start  # in elements of flat
        self.ndim = len(dims)
        self.bias = bias  # key of flat[0]
        self.span = self.dtype.itemsize // memory.granule  # keys per element
        scalar = scalar_type(self.dtype)
        self.wrap = None if scalar is self.dtype.type else scalar  # what a loaded value becomes
        self.convert = storing(self.dtype)  # before a store

    def _like(self, dims, steps, start):
        new = Array.__new__(Array)
        for name in ("memory", "flat", "dtype", "writeable", "bias", "span", "wrap", "convert"):
            setattr(new, name, getattr(self, name))
        new.dims, new.steps, new.start, new.ndim = dims, steps, start, len(dims)
        return new

    shape = property(lambda self: tuple(map(np.int64, self.dims)))
    strides = property(lambda self: tuple(np.int64(s * self.dtype.itemsize) for s in self.steps))
    size = property(lambda self: np.int64(math.prod(self.dims)))
    T = property(lambda self: self._like(self.dims[::-1], self.steps[::-1], self.start))

    def __len__(self):
        return self.dims[0]

    def keys(self, k):
        """The keys of the element flat[k]."""
        first = self.bias + k * self.span
        return range(first, first + self.span)

    def view(self, index):
        """array[index] with slices or with fewer indices than axes."""
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (self.ndim - len(index))
        dims, steps, start = [], [], self.start
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
        """The position of the element in flat. None: there is no such element, or the index is a slice."""
        try:
            if type(index) is not tuple:
                i = as_int(index)
                if self.ndim == 1 and 0 <= i < self.dims[0]:
                    return self.start + i * self.steps[0]
                return None
            if self.ndim == 2:
                i, j = index
                i, j = as_int(i), as_int(j)
                n, m = self.dims
                if 0 <= i < n and 0 <= j < m:
                    n, m = self.steps
                    return self.start + i * n + j * m
                return None
            if self.ndim == 3:
                h, i, j = index
                h, i, j = as_int(h), as_int(i), as_int(j)
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


# ----------------------------------------------------------------------------- making arrays
class _Bytes:
    """Raw memory for np.asarray. Keeps the arrays alive that own it."""

    def __init__(self, address, size, owners):
        self.owners = owners
        self.__array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def extent(a):
    """The addresses of the first byte of an array and of the byte after its last."""
    low = high = a.__array_interface__["data"][0]
    if a.size == 0:
        return low, low
    for n, stride in zip(a.shape, a.strides):
        low, high = low + min(0, (n - 1) * stride), high + max(0, (n - 1) * stride)
    return low, high + a.itemsize


def global_arrays(arrays: list) -> list[Array]:
    """The kernel's array arguments. Arguments that overlap share one Memory, so their accesses are compared."""
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
    for base, _, members in groups:
        granule = 0
        for i in members:
            granule = math.gcd(granule, arrays[i].itemsize, extents[i][0] - base)
        memory = Memory("global", granule)
        memory.base = base
        memory.unwritten = unwritten.of(arrays[members[0]], base, granule)
        for i in members:
            result[i] = _global_array(memory, arrays[i], extents[i], base)
    return result


def _global_array(memory, a, extent, base):
    low, high = extent
    if any(stride % a.itemsize for stride, n in zip(a.strides, a.shape) if n > 1):
        raise ValueError(f"array of {a.dtype} with strides {a.strides}: not whole elements")
    raw = np.asarray(_Bytes(low, high - low, a)) if high > low else np.empty(0, np.uint8)
    start = (a.__array_interface__["data"][0] - low) // a.itemsize
    steps = tuple(stride // a.itemsize for stride in a.strides)
    bias = (low - base) // memory.granule
    # Numba has no bfloat16: a kernel sees its bits, here as on the GPU (kernels/primitives/ptx.py).
    dtype = np.uint16 if a.dtype.name == "bfloat16" else a.dtype
    return Array(memory, raw.view(dtype), a.shape, steps, start, bias, a.flags.writeable)


def dense_array(memory, flat, shape) -> Array:
    """A C-contiguous array over all of flat."""
    steps = [1]
    for n in shape[:0:-1]:
        steps.insert(0, steps[0] * n)
    return Array(memory, flat, shape, tuple(steps[: len(shape)]))


def poisoned(size, dtype) -> np.ndarray:
    """Unwritten memory: NaN, or bytes 0x7F."""
    flat = np.empty(size, dtype)
    if flat.dtype.kind == "f":
        flat.fill(np.nan)
    else:
        flat.view(np.uint8).fill(0x7F)
    return flat


def poison(a):
    """The number that a read of `a` out of bounds returns where the run continues after the report."""
    value = poisoned(1, a.dtype)[0]
    return value if a.wrap is None else a.wrap(value)
