"""A launch: its arguments as the kernel sees them, its blocks, and what it leaves for the next one.

A block in which nothing changes any more is parked, and the next block starts. When all blocks are
parked and none makes progress, it is a deadlock.
"""

import contextlib
import functools
import gc
import inspect
import math
import threading
import time
import types
from collections.abc import Sequence

import numpy as np

from . import errors, observers, performance, processes
from .arrays import Record, global_arrays
from .block import SHARED, Block
from .errors import KernelError
from .progress import FIRST, Progress
from .scalars import typed, watching
from .schedules import Schedule
from .source import translate
from .thread import Dim3
from .unwritten import extent

MAX_THREADS = 1024  # per block, on every GPU
MAX_Z = 64  # threads of a block along z
MAX_GRID_YZ = 65535  # blocks along y and along z; the limit along x is 2**31 - 1


def _is_supported(dtype) -> bool:
    """False for Python objects, swapped bytes and long double."""
    return dtype.isnative and dtype.char not in "OgG"


class _Previous(threading.local):
    """Facts about the previous launch by this thread of the host, and the launches that may still
    overlap with it.

    last: (name, base, granule, keys) of what they wrote; their arguments, which stay alive here; and
    a dict (first byte, end) -> "was it written?" of the tensors that their asynchronous copies
    (kernels/primitives/hopper.py) accessed.
    """

    last: tuple[Sequence, Sequence, dict] = (), (), {}


previous = _Previous()


class Launch:
    """One launch of a kernel: what all its blocks share."""

    def __init__(
        self,
        kernel,
        grid: Dim3,
        block: Dim3,
        args,
        shared: int,
        overlap=False,
        reported=None,
        collects=False,
        schedule: Schedule | None = None,
    ):
        """reported: the kinds of findings to report, see errors.reported_kinds. collects: continue
        after a finding.
        schedule: the order of blocks and threads; None: by their numbers."""
        self.schedule = schedule
        self.repeats: Launch | None = None  # a launch that has run in another order
        self.keeps_warnings = False  # collect those
        self.returned: Dim3 | None = None  # a block that has ended, while the others meet
        self.raised: frozenset[str] = frozenset()  # but not these
        self.cooperative: int | None = None  # the most blocks of a grid that meets
        self.processes = 1  # for the blocks: processes.py
        self.forked = False  # blocks ran in several processes
        self.reported = errors.reported_kinds() if reported is None else reported
        self.collects = collects
        self.resident: int | None = None  # blocks that run at a time; None: all that wait
        self.found: dict = {}  # (kind, sites) -> KernelError
        self.changes = 0  # atomics that changed memory
        self.name = kernel.py_func.__name__
        self._check_arguments(kernel.py_func, args)
        self.grid = grid
        self.block = block
        self.dynamic = int(shared)
        self.overlap = overlap
        self.previous = previous.last
        self.previous_writes, self.previous_args, self.previous_copies = self.previous
        self.previous_extents = [
            *map(extent, _arrays_in(self.previous_args)),
            *self.previous_copies,
        ]
        self._check_size(shared)
        self.translate = functools.partial(translate, pauses=schedule is not None)
        self.translated = self.translate(kernel.py_func)
        if self.translated.device_only is not None:
            raise self.translated.device_only
        self.records: list = []  # (a record that was given, the array that stands for it)
        args = [_without_records(a, self.records) for a in args]
        arrays = global_arrays(_arrays_in(args), self.translated.views)
        self.memories = list(dict.fromkeys(a.memory for a in arrays))
        self.given = args
        remaining = iter(arrays)
        self.args = [_simulated(a, remaining) for a in args]
        x, y, z = map(int, block)
        self.positions = [Dim3(i, j, k) for k, j, i in np.ndindex(z, y, x)]
        self.epoch = 0  # counts the intervals between block barriers, over all blocks
        self.constants: dict = {}  # id of a NumPy array -> its copy in constant memory
        self.stored: dict = {}  # address of a tensor -> where copies of this launch stored to it
        # (first byte, end) of a tensor -> did a copy of this launch write it?
        self.copies: dict = {}
        self.observers = observers.current()
        if performance.KINDS & self.reported.asked:
            self.observers += (performance.Performance(self.reported.asked),)
        self.let_next_early = False  # it called let_next_start before it waited itself: early.py

    def _check_arguments(self, function, args):
        for name, value in inspect.signature(function).bind(*args).arguments.items():
            if isinstance(value, (list, dict, set, str)):
                kind = type(value).__name__
                raise KernelError(
                    f"{self.name}: {name} is a {kind}: a kernel takes arrays, numbers and tuples"
                )
            if isinstance(value, types.FunctionType):
                raise KernelError(
                    f"{self.name}: {name} is a Python function: decorate it with "
                    "@cuda.jit(device=True)"
                )
            if isinstance(value, np.ndarray) and not _is_supported(value.dtype):
                raise KernelError(
                    f"{self.name}: {name} is an array of {value.dtype}, which Numba does not "
                    "support"
                )

    def _check_size(self, shared):
        self.threads = math.prod(map(int, self.block))
        text = None
        if self.threads > MAX_THREADS:
            text = f"a block of {self.threads} threads: the limit is {MAX_THREADS}"
        elif self.block.z > MAX_Z:
            text = f"a block of {self.block} threads: the limit is {MAX_Z} along z"
        elif max(self.grid.y, self.grid.z) > MAX_GRID_YZ:
            text = (
                f"a grid of {self.grid} blocks: the limit is {MAX_GRID_YZ} along y and z; use x "
                "for the long axis"
            )
        elif self.dynamic > SHARED:
            text = f"{shared} bytes of dynamic shared memory: the limit is {SHARED} per block"
        if text:
            raise KernelError(f"{self.name}: {text}")

    def report(self, kind, sites, make):
        """Raise make(), a KernelError; or keep it and continue. Findings of one kind at the same
        places are counted."""
        if not self.reported.covers(kind, sites):
            return
        warns = errors.KINDS[kind].severity == "warning" and kind not in self.raised
        if not (self.collects or (self.keeps_warnings and warns)):
            raise make()
        finding = self.found.get((kind, sites))
        if finding is None:
            self.found[kind, sites] = make()
        else:
            finding.count += 1

    def findings(self, run=None) -> list[KernelError]:
        """Run all blocks and return the findings. After one that leaves no sensible way to
        continue, it is the last. run: instead of self.run"""
        try:
            (run or self.run)()
        except KernelError as error:
            self.found.setdefault((error.kind, error.sites), error)
        return [*self.found.values()]

    def run(self):
        """Run all blocks and record what they wrote, for the next launch."""
        try:
            with _rare_collections(), watching(self.reported):
                self._run_blocks()
        finally:
            for record, array in self.records:
                if record.flags.writeable:
                    for name in record.dtype.names:
                        record[name] = array[name]
        for memory in self.memories:
            if memory.unwritten is not None:
                memory.unwritten.remove(memory.written)
        written = [(self.name, m.base, m.granule, m.written) for m in self.memories]
        arguments = list(self.given)
        copies = dict(self.copies)
        if self.let_next_early:
            written += self.previous_writes
            arguments += self.previous_args
            copies = {**self.previous_copies, **copies}
        previous.last = written, arguments, copies
        for observer in self.observers:
            observer.finished(self)

    def _run_blocks(self):
        x, y, z = map(int, self.grid)
        self.blocks = self.not_started = x * y * z
        positions = iter(self._in_order(np.ndindex(z, y, x)))
        start = time.perf_counter()
        parked: list[Block] = self._start(next(positions), [])
        seconds = time.perf_counter() - start
        progress = Progress(self.name, self.blocks)
        if self.processes > 1 and seconds * (self.blocks - 1) > processes.WORTH:
            alone = parked or self.found or self.copies or self.overlap or self.observers
            alone = alone or self.schedule
            expected = seconds * (self.blocks - 1) / self.processes
            if not alone and expected > FIRST:
                progress.tell(1, expected)
            if not alone and processes.run_in_children(self, [*np.ndindex(z, y, x)][1:]):
                self.forked = True
                return
        for at in positions:
            parked = self._start(at, parked)
            progress.ended(self.blocks - self.not_started - len(parked))
        while parked:
            parked = self._turn(parked)
            progress.ended(self.blocks - self.not_started - len(parked))

    def _start(self, position, parked) -> list:
        """Run the next block, if need be after others have ended -> the blocks that are parked."""
        while self.resident is not None and len(parked) >= self.resident:
            parked = self._turn(parked)
        self.not_started -= 1
        before = self.changes
        left = self._advance(self.block_at(position))
        if self.changes != before:  # a wait for too few arrivals ends here, before the others
            parked = [b for waiting in parked for b in self._advance(waiting)]
        return parked + left

    def _turn(self, parked) -> list:
        """Run each of these blocks until it ends or is parked -> those that are parked.
        DeadlockError if nothing changes."""
        before = self.changes
        waiting = []
        progress = False
        for block in self._in_order(parked):
            waiting += self._advance(block)
            progress = progress or block.progress
        at_grid = all(block.at_grid for block in waiting)
        if at_grid and len(waiting) == self.blocks:
            for memory in self.memories:
                memory.all_in_order()
            for block in waiting:
                block.pass_grid()
        elif len(waiting) == len(parked) and not progress and self.changes == before:
            if at_grid and not self.not_started:
                here = {tuple(block.position) for block in waiting}
                positions = (Dim3(*p[::-1]) for p in np.ndindex(*map(int, (*self.grid,)[::-1])))
                self.returned = next(p for p in positions if tuple(p) not in here)
            error = parked[0].deadlock()
            self._tell(parked[0], error)
            raise error
        return waiting

    def _in_order(self, items):
        """Blocks or threads in the order in which they run."""
        if self.schedule is None:
            return items
        return self.schedule.order(items)

    def given_arrays(self) -> list[np.ndarray]:
        """Return the arrays among its arguments."""
        return _arrays_in(self.given)

    def last_change(self, array, index) -> tuple[str, tuple]:
        """Return the name of an argument in the kernel, and the Site of the last change of an
        element by a kernel."""
        address = array[(*index, None)].__array_interface__["data"][0]
        names = [*inspect.signature(self.translated.function).parameters][1:]
        name = next((n for n, a in zip(names, self.given) if a is array), "an argument")
        for memory in self.memories:
            key = (address - memory.base) // memory.granule
            last = memory.old_atomics.get(key) or memory.old_writes.get(key)
            if last is not None:
                return name, (last[1],)
        return name, ()

    def block_at(self, position) -> "Block":
        """Return the block at a position (z, y, x) of the grid."""
        return Block(self, Dim3(*position[::-1]))

    def _advance(self, block) -> list:
        """Run a block until it ends or is parked. Returns [block] if it is parked."""
        try:
            done = block.advance()
        except KernelError as error:
            self._tell(block, error)
            raise
        for memory in self.memories:
            memory.end_of_block()
        return [] if done else [block]

    def _tell(self, block, error):
        for observer in self.observers:
            observer.failed(block, error)

    def constant(self, values: np.ndarray):
        """Return the array in constant memory that stands for a global NumPy array."""
        if id(values) not in self.constants:
            self.constants[id(values)] = global_arrays([values])[0]
            self.constants[id(values)].writeable = False
        return self.constants[id(values)]

    def next_epoch(self) -> int:
        """Begin the next interval between block barriers and return its number."""
        self.epoch += 1
        return self.epoch


def _arrays_in(args) -> list:
    """Return the arrays among the arguments of a kernel, also those in tuples."""
    arrays = []
    for a in args:
        if isinstance(a, np.ndarray):
            arrays.append(a)
        elif isinstance(a, tuple):
            arrays += _arrays_in(a)
    return arrays


def _without_records(value, records):
    """Return an argument with an array without axes for each record. Adds (record, array) to
    `records`."""
    if isinstance(value, np.void) and value.dtype.names:
        records.append((value, np.array(value, value.dtype)))
        return records[-1][1]
    if isinstance(value, tuple):
        values = [_without_records(v, records) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*values)
        return tuple(values)
    return value


def _simulated(value, arrays):
    """Return an argument as the kernel sees it. arrays: an iterator over the Arrays that stand for
    _arrays_in."""
    if isinstance(value, np.ndarray):
        array = next(arrays)
        if value.ndim == 0 and value.dtype.names:
            return Record(array, 0)
        return array
    if isinstance(value, tuple):
        values = [_simulated(v, arrays) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*values)
        return tuple(values)
    return typed(value)


@contextlib.contextmanager
def _rare_collections():
    """Raise the threshold of Python's garbage collector: there are many threads and records, and
    they live long."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 50_000) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
