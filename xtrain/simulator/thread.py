"""One CUDA thread: the functions and attributes of `numba.cuda` that do not wait for other threads.

source.py rewrites a kernel so that `cuda.threadIdx.x` becomes `_t.threadIdx.x`,
`cuda.atomic.add(...)` becomes `_t.atomic_add(...)` and `a[i]` becomes `_t.load(a, i, site)`, where
_t is the running Thread. Each method has the name and the meaning of its function in numba.cuda.
"""

import contextlib
import functools
import itertools
import operator
import sys
from operator import index as as_int
from typing import Any

import numpy as np

from . import errors, releases
from .arrays import Array, Record, RecordArray, new_array, poison
from .memory import Mark, add_reader, share, unordered
from .names import NAMESPACES
from .scalars import Int32, UInt32, UInt64, dtype_of, unify
from .schedules import PAUSES
from .twins import TWINS, twin
from .unset import Unset, carries, plain

ATOMIC = "atomically changed"  # the verb in a report
LOADED = "atomically read"
FAILED = object()  # the result of a compare-and-swap that leaves the element as it is
MAX_TURNS = 100_000_000  # iterations of one while loop of one thread: less than a minute
CHECK_TURNS = 100_000  # iterations between two checks whether a loop still changes its variables
SPIN_TURNS = 100  # iterations of a loop that accesses memory before other threads run


class Dim3:
    """A position or a size with three axes, as int32."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x, y, z):
        self.x = Int32(x)
        self.y = Int32(y)
        self.z = Int32(z)

    def __iter__(self):
        return iter((self.x, self.y, self.z))

    def __str__(self):
        return f"({self.x}, {self.y}, {self.z})"


class Thread:
    """One thread of one block.

    block: the running Block; index: position in the block; lane, warp: index % 32, index // 32
    mark: this thread since its last synchronization
    seen: the clocks that it knows of the lanes of its warp (memory.py); None before the first
    syncwarp
    view: what it has acquired; sync: its fences and pending acquisitions, or None (releases.py)
    atomic_on: the (memory, key) of its last atomic
    state_at_spin: (site of the loop, local variables) when it last let others run in a waiting loop
    generator, request, reply: the running kernel, what it waits for, and the result to send to it
    left: the Site of the return statement that ended it
    pauses: how often it has let others run before an atomic (schedules.py)
    state: a dict for simulated intrinsics, which keep state between calls in it
    """

    __slots__ = (
        "_state",
        "atomic_on",
        "block",
        "blockDim",
        "blockIdx",
        "generator",
        "gridDim",
        "index",
        "instruction",
        "lane",
        "laneid",
        "left",
        "mark",
        "pauses",
        "reply",
        "request",
        "seen",
        "state_at_spin",
        "sync",
        "threadIdx",
        "view",
        "warp",
    )  # fmt: skip
    warpsize = Int32(32)

    def __init__(self, block, index, position):
        self.block = block
        self.index = index
        self.threadIdx = position
        self.warp, self.lane = divmod(index, 32)
        self.laneid = Int32(self.lane)
        self.blockIdx = block.position
        self.blockDim = block.launch.block
        self.gridDim = block.launch.grid
        self.mark = Mark(self, block.epoch, 1)
        self.request: Any = None
        self.generator = self.reply = self.seen = self.left = self.sync = None
        self._state = self.state_at_spin = self.atomic_on = None
        self.pauses = 0
        self.view = releases.NOTHING
        self.instruction = ""  # the simulated intrinsic that is running

    def intrinsic(self, function, site, *args):
        """Call a simulated intrinsic. A value that was never written is reported where it reads
        it."""
        args = [plain(a, "an instruction", site) for a in args]
        self.block.eager = True
        self.instruction = function.__qualname__
        try:
            return function(self, site, *args)
        finally:
            self.block.eager = False
            self.instruction = ""

    @property
    def state(self) -> dict:
        """State of simulated intrinsics, created at the first use."""
        if self._state is None:
            self._state = {}
        return self._state

    def __str__(self):
        flat = self.blockDim.y == self.blockDim.z == 1
        if flat:
            return f"thread {self.index}"
        return f"thread {self.threadIdx}"

    def report(self, kind, sites, make):
        """Report a finding: see Launch.report."""
        self.block.launch.report(kind, sites, make)

    # ------------------------------------------------------------------------- overlapping kernels: early.py
    def wait_for_previous(self):
        """Simulate griddepcontrol.wait."""
        self.block.waited = True

    def let_next_start(self):
        """Simulate griddepcontrol.launch_dependents."""

    def note_copy(self, site, low, high, writes):
        """Record an asynchronous copy (kernels/primitives/hopper.py) that accesses a tensor in the
        bytes [low, high)."""
        copies = self.block.launch.copies
        copies[low, high] = writes or copies.get((low, high), False)

    # ------------------------------------------------------------------------- memory
    def load(self, a, index, site):
        """a[index]"""
        if type(a) is not Array:
            return self._element_of(a, index, site)
        k = a.locate(index)
        if k is None:
            k = a.row(index)
            if k is None:
                k = self._find(a, index, site)
            if type(k) is not int:  # a view
                return k
        if a.memory.local:  # no other thread has this memory
            read = None
            if k not in a.memory.writes:
                read = self._first(a, k, index, site)
        elif a.reader is self.mark and k in a.memory.writes:
            a.run[k] = site
            read = None
        elif a.dense:
            read = self._read(a, k + a.bias, index, site)
        else:
            read = None
            for key in a.keys(k):
                read = self._read(a, key, index, site) or read
        value = a.flat[k]
        if a.wrap is not None:
            value = a.wrap(value)
        if read is None:
            return value
        value = Unset(value, read)
        if self.block.eager:
            return value.use("an instruction", site)
        return value

    def load_2d(self, a, i, j, site):
        """a[i, j]: `load` with all that it calls for shared memory that is only read at the
        moment."""
        try:
            if a.reader is self.mark:
                y = as_int(i)
                x = as_int(j)
                n, m, row, column, start = a.plane
                if 0 <= y < n and 0 <= x < m:
                    k = start + y * row + x * column
                    if k in a.memory.writes:
                        a.run[k] = site
                        value = a.flat[k]
                        if a.wrap is None:
                            return value
                        return a.wrap(value)
        except (AttributeError, TypeError, ValueError):  # no array, no integers, not two axes
            pass
        return self.load(a, (i, j), site)

    def _element_of(self, a, index, site):
        """An element of a tuple or of an array of records, or a field of a record."""
        if isinstance(a, Array):
            if type(index) is str:
                return getattr(a, index)
            k = Array.locate(a, index)
            if k is None:
                k = self._find(a, index, site)
            if type(k) is int:
                return Record(a, k, site.what)
            return k
        if type(a) is Record:
            return self.load_field(a, index, site)
        if type(index) is Unset:
            index = index.use("an index", site)
        # a number has no such method
        if isinstance(a, tuple):
            return a[index]
        return a.locate(index)

    def load_field(self, record, name, site):
        """record.name"""
        a, k = record.place(name)
        if type(a) is RecordArray:
            return Record(a, k, f"{record._name}.{name}")
        if k is None:
            return a
        return self.load(a, k, site._replace(what=f"{record._name}.{name}"))

    def store_field(self, record, name, value, site):
        """record.name = value"""
        if type(record) is not Record:
            raise errors.KernelError(
                f"{site.what} = ... {errors.where(self, site)}: attributes other than the fields "
                "of a record are read-only",
                (site,),
            )
        a, k = record.place(name)
        site = site._replace(what=f"{record._name}.{name}")
        if k is None and isinstance(value, Array) and value.dims == a.dims:
            for i in np.ndindex(a.dims):
                self.store(a, i, self.load(value, i, site), site)
        else:
            self.store(a, slice(None) if k is None else k, value, site)

    def element(self, a):
        """A number with the type of a[i], without a read of memory."""
        if isinstance(a, RecordArray) or type(a) is Record:
            raise TypeError("its type depends on the field")
        if isinstance(a, tuple):
            return a[0]
        return (a.wrap or a.dtype.type)(1)

    def each(self, a, site):
        """for v in a"""
        if isinstance(a, Array):
            return (self.load(a, i, site) for i in range(a.dims[0]))
        return a

    def store(self, a, index, value, site):
        """a[index] = value"""
        if type(a) is Record:
            return self.store_field(a, index, value, site)
        if type(value) is Record:
            for key in value.all_keys():
                self._read(value._array, key, index, site)
            value = value.value()
        k = a.locate(index)
        if k is None:
            k = self._find(a, index, site, stores=True)
            if type(k) is not int:
                return self._store_view(k, value, site)
        if a.memory.local and a.writeable:
            a.memory.writes[k] = self.mark, site
        elif a.dense:
            self._write(a, k + a.bias, index, site, k, value)
        else:
            for key in a.keys(k):
                self._write(a, key, index, site, k, value)
        try:
            if a.convert is None:
                a.flat[k] = value
            else:
                a.flat[k] = a.convert(value)
        except TypeError:
            self._store_object(a, k, index, value, site)

    def _store_object(self, a, k, index, value, site):
        """Store something that is not a number."""
        memory = a.memory
        if isinstance(value, Array):
            raise errors.array_stored(self, site, index, value) from None
        if type(value) is not Unset:
            raise
        if memory.kind == "global" or self.block.eager:
            self.store(a, index, value.use("a store", site), site)
            return
        if a.convert is None:
            a.flat[k] = value.value
        else:
            a.flat[k] = a.convert(value.value)
        if memory.local:
            del memory.writes[k]
            memory.unset[k] = value
        else:
            memory.unset.update(dict.fromkeys(a.keys(k), value))
            memory.watched = True

    def _first(self, a, key, index, site):
        """A read of an element that this block has not written. Returns the read if no thread has
        written it, else None."""
        memory = a.memory
        if memory.busy and memory.local:
            raise errors.in_use(self, memory.busy, "reads", site, index)
        if key in memory.unset:
            return memory.unset[key].read
        if memory.kind == "global":
            if memory.unwritten is None or key not in memory.unwritten:
                return None
            if key in memory.old_writes or key in memory.old_atomics or key in memory.past_writes:
                return None
        if key in memory.atomics:
            return None
        read = self, memory, key, site, index
        earlier = memory.unread.get(key)
        if earlier is None or earlier[0].epoch != self.mark.epoch:
            memory.unread[key] = self.mark, read
        return read

    def _read(self, a, key, index, site):
        """Check and record a read. Returns None, or the read of a value that was never written
        (unset.py)."""
        memory, mark = a.memory, self.mark
        if memory.kind == "shared":
            if memory.note(a, key, mark, site):
                return None
            if memory.runs:
                memory.record_runs(mark)
        epoch = mark.epoch
        read = None
        record = memory.writes.get(key)
        if record is None:
            if memory.kind != "global" or memory.unwritten is not None:
                read = self._first(a, key, index, site)
        elif record[0] is not mark and record[0].epoch == epoch:
            self._order(memory, key, record, "wrote", "read", index, site)
        if memory.watched:
            self._order(memory, key, memory.old_writes.get(key), "wrote", "read", index, site)
            self._order_atomic(memory, key, "read", index, site)
            if key in memory.unset:
                read = memory.unset[key].read
        record = memory.reads.get(key)
        if record is None or record[0].epoch != epoch:
            memory.reads[key] = (mark, site)
        elif record[0] is not mark and len(record) != 4:
            share(memory.reads, key, record, mark, site)
        return read

    def _write(self, a, key, index, site, k, value):
        memory, mark = a.memory, self.mark
        epoch = memory.changed = mark.epoch
        if memory.runs:
            memory.record_runs(mark)
        write = memory.writes.get(key)
        read = memory.reads.get(key)
        if write is not None and write[0] is not mark and write[0].epoch == epoch:
            self._order(memory, key, write, "wrote", "wrote", index, site, (a, k, value))
        if read is not None and read[0].epoch == epoch and (read[0] is not mark or len(read) > 2):
            self._order(memory, key, read, "read", "wrote", index, site)
        if memory.watched:
            same = a, k, value
            write = memory.old_writes.get(key)
            self._order(memory, key, write, "wrote", "wrote", index, site, same)
            self._order(memory, key, memory.old_reads.get(key), "read", "wrote", index, site)
            self._order_atomic(memory, key, "wrote", index, site)
            for loads in (memory.loads, memory.old_loads):
                self._order(memory, key, loads.get(key), LOADED, "wrote", index, site)
            memory.releases.pop(key, None)
            memory.unset.pop(key, None)
        if not a.writeable:
            if memory.busy:
                raise errors.in_use(self, memory.busy, "writes", site, index)
            raise errors.read_only(self, site, index)
        memory.writes[key] = (mark, site)

    def _change(self, a, key, index, site, keys, **how):
        """Check and record an atomic. keys: those of its element. how: see releases.atomic."""
        memory = a.memory
        memory.changed = self.mark.epoch
        if memory.runs:
            memory.record_runs(self.mark)
        if key not in memory.writes or key in memory.unset:
            read = self._first(a, key, index, site)
            if read is not None:
                Unset(None, read).use("an atomic", site)
                memory.unset.pop(key, None)
        releases.atomic(self, memory, key, **how)
        self.atomic_on = memory, key
        writes = how.get("writes", True)
        does = ATOMIC if writes else LOADED
        for shadow in (memory.writes, memory.old_writes):
            self._order(memory, key, shadow.get(key), "wrote", does, index, site)
        last = memory.unordered_atomic(key, self.mark)
        if last is not None and last[2] != keys:
            self._race(memory, last[:2], ATOMIC, does, index, site)
        memory.watched = True
        if writes:
            for shadow in (memory.reads, memory.old_reads):
                self._order(memory, key, shadow.get(key), "read", does, index, site)
            if not a.writeable:
                raise errors.read_only(self, site, index)
            memory.atomics[key] = self.mark, site, keys
            memory.observers.pop(key, None)
        else:
            memory.observers.setdefault(key, {})[self] = self.mark
            add_reader(memory.loads, key, self.mark, site)

    def _order(self, memory, key, record, did, does, index, site, stored=None):
        """Report a race unless nothing or an ordered access is recorded. stored: the array, the
        position and the new value."""
        if record is None:
            return
        then = unordered(record, self.mark)
        if then is None:
            return
        early = None
        if did == "read" and does == "wrote":
            early = memory.unread.get(key)
        if early is not None and early[0] is then[0]:  # it read what is written only now
            make = functools.partial(errors.uninitialized, *early[1], (self.mark, site))
            return self.report("uninitialized", (then[1], site), make)
        self._race(memory, then, did, does, index, site, stored)

    def _order_atomic(self, memory, key, does, index, site):
        """Report a weak access that the last atomic does not happen before."""
        last = memory.unordered_atomic(key, self.mark)
        if last is not None:
            self._race(memory, last[:2], ATOMIC, does, index, site)

    def _race(self, memory, then, did, does, index, site, stored=None):
        kind = "race"
        if releases.is_pending(then[0], self):
            kind = "missing_acquire"
        elif {did, does} == {"read", ATOMIC}:
            kind = "plain_and_atomic"
        elif stored and _is_stored(*stored):
            kind = "same_value_race"
        args = memory.kind, then, did, self, does, site, index, kind
        self.report(kind, (then[1], site), functools.partial(errors.race, *args))

    def _find(self, a, index, site, stores=False):
        """The position of an element with an unusual index: literals and computed numbers below
        zero. Or the view of a row or a slice. For an index out of bounds, which is reported, the
        position of a spare element.
        """
        if isinstance(index, tuple):
            given = index
        else:
            given = (index,)
        if any(i is None for i in given):
            a, given = a.with_new_axes(given)
        rest = (slice(None),) * (a.ndim - len(given) + 1)
        sliced = any(isinstance(i, slice) or i is ... for i in given)
        axes = [j for i in given for j in (rest if i is ... else (i,))]
        for axis, (i, n) in enumerate(zip(axes, a.dims)):
            if isinstance(i, slice):
                continue
            if type(i) is Unset:
                i.use("an index", site)
                axes[axis] = i = 0
            operator.index(i)  # raises TypeError for a float
            if -n <= i < 0:
                if type(i) is not int:  # not a literal
                    make = functools.partial(errors.negative_index, self, index, i, n, site)
                    self.report("negative_index", (site,), make)
                axes[axis] = int(i) + n
        k = Array.locate(a, tuple(axes) if len(axes) != 1 else axes[0])
        if k is not None:
            return k
        if (sliced and len(axes) <= a.ndim) or len(axes) < a.ndim:
            with contextlib.suppress(IndexError):
                return a.sliced(tuple(axes))
        error = errors.out_of_bounds(self, a, tuple(axes) if len(given) > 1 else axes[0], site)
        if type(error) is not errors.OutOfBoundsError:
            raise error
        self.report("out_of_bounds", (site,), lambda: error)
        return poison(a) if not stores else None

    def _store_view(self, view, value, site):
        """a[2:5] = value. view: None if the index is out of bounds"""
        if isinstance(value, Array):
            raise errors.array_copied(self, site)
        for i in np.ndindex(view.dims if view is not None else (0,)):
            self.store(view, i, value, site)

    def shared_array(self, site, shape, dtype, **_):
        return self.block.shared_array(self, site, _shape(shape), dtype_of(dtype))

    def local_array(self, site, shape, dtype, **_):
        views = self.block.launch.translated.views
        return new_array("local", _shape(shape), dtype_of(dtype), views)

    def const_array_like(self, site, values):
        if isinstance(values, Array):
            return values
        return self.block.launch.constant(values)

    # ------------------------------------------------------------------------- atomics
    def _atomic(self, site, a, index, name, change, **how):
        """a[index] = change(a[index]) as one access, unless this is FAILED. Returns the old value.
        how: acquires, releases (releases.atomic)."""
        kinds = _ATOMIC_KINDS.get(name, _WHOLE)
        if a.dtype.name not in kinds:
            raise errors.atomic_kind(self, site, name, a, kinds)
        k = a.locate(index)
        if k is None:
            try:
                k = self._find(a, index, site)
            except TypeError:
                raise errors.out_of_bounds(self, a, index, site) from None
            if type(k) is not int:  # out of bounds
                return k
        old = a.flat[k]
        new = change(old)
        keys = a.keys(k)
        for key in keys:
            self._change(a, key, index, site, keys, writes=new is not FAILED, **how)
        if new is not FAILED:
            a.flat[k] = new
            self.block.launch.changes += bool(new != old)
        if a.wrap is None:
            return old
        return a.wrap(old)

    def strong_load(self, site, a, index, acquires=False):
        """a[index] as an atomic that only reads."""
        k = a.locate(index)
        if k is None:
            raise errors.out_of_bounds(self, a, index, site)
        keys = a.keys(k)
        for key in keys:
            self._change(a, key, index, site, keys, writes=False, acquires=acquires)
        if a.wrap is None:
            return a.flat[k]
        return a.wrap(a.flat[k])

    def atomic_cas(self, site, a, index, old, new):
        old, new = (a.dtype.type(plain(x, "an atomic", site)) for x in (old, new))
        return self._atomic(site, a, index, "cas", lambda now: new if now == old else FAILED)

    def atomic_compare_and_swap(self, site, a, old, new):
        return self.atomic_cas(site, a, 0, old, new)

    def threadfence(self):
        releases.fence(self, releases.GPU)

    threadfence_system = threadfence

    def threadfence_block(self):
        releases.fence(self)

    # ------------------------------------------------------------------------- positions
    def grid(self, ndim):
        """The thread's position in the grid: int64, or a tuple of ndim int64."""
        if ndim == 1:
            return np.int64(int(self.blockIdx.x) * int(self.blockDim.x) + int(self.threadIdx.x))
        axes = zip(self.blockIdx, self.blockDim, self.threadIdx)
        position = tuple(np.int64(b) * n + t for b, n, t in axes)[: int(ndim)]
        if ndim > 1:
            return position
        return position[0]

    def gridsize(self, ndim):
        size = tuple(np.int64(g) * n for g, n in zip(self.gridDim, self.blockDim))[: int(ndim)]
        return size if ndim > 1 else size[0]

    def lanemask_lt(self):
        return UInt32((1 << self.lane) - 1)

    # ------------------------------------------------------------------------- functions as values
    def apply(self, site, f, *args, **keywords):
        """Call a function that is a value: a generator, because the function may wait for other
        threads."""
        if getattr(f, "__self__", None) is self and f.__name__.partition("_")[0] in NAMESPACES:
            return f(site, *args, **keywords)  # cuda.atomic.add
        if hasattr(f, "py_func"):
            translated = self.block.launch.translate(f.py_func)
            result = translated.function(self, *args, **keywords)
            if translated.waits:
                result = yield from result
            return result
        return twin(f)(*args, **keywords)

    def ufunc(self, site, f, *args):
        """A NumPy function of arrays with an output array: f(x, out)."""
        *inputs, out = args
        for index in np.ndindex(out.dims):
            values = [self._broadcast(x, index, site) for x in inputs]
            self.store(out, index, f(*values), site)

    def _broadcast(self, x, index, site):
        if not isinstance(x, Array):
            return x
        index = index[len(index) - x.ndim :]
        return self.load(x, tuple(i if n > 1 else 0 for i, n in zip(index, x.dims)), site)

    def this_grid(self):
        """cuda.cg.this_grid(); source.py rewrites its sync()."""
        return self.block.launch.grid

    # ------------------------------------------------------------------------- arithmetic
    def selp(self, condition, a, b):
        if type(condition) is Unset:
            return Unset(_of(b), condition.read)
        return a if condition else b

    @carries
    def fma(self, a, b, c):
        """a * b + c, rounded once. In float32 the product is exact in float64 and only the addition
        is rounded twice."""
        scalar = functools.reduce(unify, map(type, (a, b, c)))
        return scalar(np.float64(a) * np.float64(b) + np.float64(c))

    @carries
    def cbrt(self, x):
        return np.cbrt(x)

    @carries
    def popc(self, x):
        return _integer(x)(_bits(x).bit_count())

    @carries
    def clz(self, x):
        return _integer(x)(8 * x.itemsize - _bits(x).bit_length())

    @carries
    def ffs(self, x):
        bits = _bits(x)
        return UInt32((bits & -bits).bit_length())

    @carries
    def brev(self, x):
        width = 64 if type(x) is UInt64 else 32
        bits = _bits(x) & (2**width - 1)
        return (UInt64 if width == 64 else UInt32)(int(f"{bits:0{width}b}"[::-1], 2))

    def nanosleep(self, ns):
        pass

    def pause(self, site):
        """Does the thread let others run now? For schedules.py."""
        schedule = self.block.launch.schedule
        if self.pauses == PAUSES or not schedule.pauses():
            return False
        self.pauses += 1
        self.state_at_spin = site, None
        return True

    def turns(self, site, waits, stores, only_waits):
        """A function that a while loop calls in each iteration.

        It returns True, or False where the thread lets others run first (SPIN): every SPIN_TURNS
        iterations of a loop that accesses memory (`waits`), every iteration if they all do the same
        (`only_waits`). Raises KernelError if the loop never ends. stores: the loop writes memory.
        """
        if only_waits:
            every = 1
        elif waits:
            every = SPIN_TURNS
        else:
            every = CHECK_TURNS

        def counted():
            left = MAX_TURNS
            if waits and self.block.launch.schedule is not None and self.pause(site):
                yield False
            while left > 0:
                turns = min(every, left)
                yield from itertools.repeat(True, turns - 1)
                left -= turns
                if stores:
                    state = None
                else:
                    state = _state_of(sys._getframe(1))
                if waits:
                    self.state_at_spin = site, state
                yield not waits
                if not waits and turns == CHECK_TURNS and state == _state_of(sys._getframe(1)):
                    raise errors.endless(self, site, MAX_TURNS - left + 1)
            raise errors.endless(self, site, MAX_TURNS + 1)

        return counted().__next__


def _state_of(frame):
    """The local variables of a thread. Numbers are compared by value, all else by identity."""
    values = []
    for name, x in frame.f_locals.items():
        same = isinstance(x, (np.generic, int, float))
        values.append(
            (name, type(x), x.tobytes() if isinstance(x, np.generic) else x if same else id(x))
        )
    return values


def _shape(shape) -> tuple[int, ...]:
    if isinstance(shape, tuple):
        return tuple(map(int, shape))
    return (int(shape),)


def _is_stored(a, k, value) -> bool:
    """Does the element already have the value that is about to be stored?"""
    try:
        new = a.dtype.type(value if a.convert is None else a.convert(value))
    except TypeError:  # an Unset
        return False
    return new.tobytes() == a.flat[k].tobytes()


def _of(x):
    return x.value if type(x) is Unset else x


def _bits(x) -> int:
    return int(operator.index(x)) & (256**x.itemsize - 1)


def _integer(x):
    if isinstance(x, np.integer):
        return type(x)
    return Int32


_ATOMICS = {
    "add": operator.add,
    "sub": operator.sub,
    "max": lambda old, value: value if value > old else old,  # NaN stays, and is not stored
    "min": lambda old, value: value if value < old else old,
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
    def atomic(self, site, a, index, value, **how):
        value = a.dtype.type(plain(value, "an atomic", site))
        return self._atomic(site, a, index, name, lambda old: change(old, value), **how)

    return atomic


for _name, _change in _ATOMICS.items():
    setattr(Thread, f"atomic_{_name}", _atomic_method(_name, _change))
