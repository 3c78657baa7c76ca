"""How a thread accesses memory: each element is checked for bounds, first writes and races.

`a[i]` in a kernel is `_t.load(a, i, site)`, and `a[i] = v` is `_t.store(a, i, v, site)`; memory.py
has the rules, arrays.py the arrays.
"""

import contextlib
import functools
import operator
from operator import index as as_int

import numpy as np

from . import errors, releases
from .arrays import Array, Record, RecordArray, new_array, poison
from .memory import add_reader, share, unordered
from .scalars import Int32, UInt32, dtype_of
from .unset import Unset

ATOMIC = "atomically changed"  # the verb in a report
LOADED = "atomically read"
_PLAIN = {int, np.int64, Int32, UInt32}  # the usual types of an index


class Accesses:
    """The loads and stores of a Thread, which has its attributes."""

    __slots__ = ()

    def load(self, a, index, site):
        """a[index]"""
        if type(a) is not Array:
            return self._element_of(a, index, site)
        k = None
        if a.ndim == 1 and type(index) in _PLAIN:  # as a.locate does, without the call
            i = as_int(index)
            n, step, start = a.plane
            if 0 <= i < n:
                k = start + i * step
        else:
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
        """a[i, j]: `load` with all that it calls for local memory and for shared memory that is
        only read at the moment."""
        try:
            local = a.memory.local
            if local or a.reader is self.mark:
                y = as_int(i)
                x = as_int(j)
                n, m, row, column, start = a.plane
                if 0 <= y < n and 0 <= x < m:
                    k = start + y * row + x * column
                    if k in a.memory.writes:
                        if not local:
                            a.run[k] = site
                        value = a.flat[k]
                        if a.wrap is None:
                            return value
                        return a.wrap(value)
        except (AttributeError, TypeError, ValueError):  # no array, no integers, not two axes
            pass
        return self.load(a, (i, j), site)

    def load_registers(self, a, n, site):
        """Return a[0], a[1], ..., a[n - 1] for an intrinsic: `load` of each, at once if this thread
        has written them all."""
        if _is_row_of_registers(a, n):
            keys = range(a.start, a.start + n)
            if all(map(a.memory.writes.__contains__, keys)):
                return a.flat[a.start : a.start + n].copy()
        return [self.load(a, j, site) for j in range(n)]

    def load_elements(self, a, i, n, site):
        """Return a[i], ..., a[i + n - 1] for an intrinsic: `load` of each, with one look at the
        array."""
        first = _first_of_elements(a, i, n)
        if first is None or not self.block.eager:
            return [self.load(a, i + j, site) for j in range(n)]
        writes = a.memory.writes
        for k in range(first, first + n):
            if a.reader is self.mark and k in writes:
                a.run[k] = site
            else:
                read = self._read(a, k + a.bias, k - a.start, site)
                if read is not None:
                    Unset(a.flat[k], read).use("an instruction", site)
        return a.flat[first : first + n].copy()

    def _element_of(self, a, index, site):
        """Return an element of a tuple or of an array of records, or a field of a record."""
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
        """Return a number with the type of a[i], without a read of memory."""
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
        if type(a) is Array and a.ndim == 1 and type(index) in _PLAIN:  # see load
            i = as_int(index)
            n, step, start = a.plane
            k = None
            if 0 <= i < n:
                k = start + i * step
        else:
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

    def store_registers(self, a, values, site):
        """Set a[0], a[1], ... for an intrinsic: `store` of each value of an array, at once where
        its numbers need no conversion."""
        n = len(values)
        if _is_row_of_registers(a, n) and a.writeable and a.dtype == values.dtype:
            keys = range(a.start, a.start + n)
            a.memory.writes.update(dict.fromkeys(keys, (self.mark, site)))
            a.flat[a.start : a.start + n] = values
            return
        for j, value in enumerate(values):
            self.store(a, j, value, site)

    def store_elements(self, a, i, values, site):
        """Set a[i], a[i + 1], ... for an intrinsic: `store` of each value of an array, with one
        look at the array."""
        n = len(values)
        first = _first_of_elements(a, i, n)
        if first is None or a.dtype != values.dtype:
            for j, value in enumerate(values):
                self.store(a, i + j, value, site)
            return
        for k, value in enumerate(values, first):
            self._write(a, k + a.bias, k - a.start, site, k, value)
            a.flat[k] = value

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
        """Return the position of an element with an unusual index: literals and computed numbers
        below zero. Or the view of a row or a slice. For an index out of bounds, which is reported,
        the position of a spare element."""
        if isinstance(index, tuple):
            indices = index
        else:
            indices = (index,)
        if any(i is None for i in indices):
            a, indices = a.with_new_axes(indices)
        whole_axes = (slice(None),) * (a.ndim - len(indices) + 1)
        sliced = any(isinstance(i, slice) or i is ... for i in indices)
        axes = [j for i in indices for j in (whole_axes if i is ... else (i,))]
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
        error = errors.out_of_bounds(self, a, tuple(axes) if len(indices) > 1 else axes[0], site)
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


def _is_row_of_registers(a, n) -> bool:
    """Are a[0], ..., a[n - 1] numbers side by side in memory that no other thread has?"""
    return (
        type(a) is Array
        and a.memory.local
        and a.ndim == 1
        and n <= a.dims[0]
        and a.steps[0] == 1
        and a.dtype.kind in "iuf"
    )


def _first_of_elements(a, i, n):
    """Return the position of a[i] in a.flat if a[i], ..., a[i + n - 1] are numbers side by side in
    memory of several threads, else None."""
    if (
        type(a) is Array
        and a.dense
        and not a.memory.local
        and a.ndim == 1
        and a.steps[0] == 1
        and 0 <= i <= a.dims[0] - n
        and a.dtype.kind in "iuf"
    ):
        return a.start + int(i)
    return None


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
