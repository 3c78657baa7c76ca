"""Shadow memory: checks bounds, first writes and data races.

Every element has a key. For each key, the shadow of the memory keeps the last plain write, and the
reads and atomics since the last barrier, as (mark, site). A Mark is one thread between two of its
synchronizations. Two accesses by different threads are in order if
  - a block barrier lies between them: the epochs of their marks differ, or
  - they are lanes of one warp and a chain of syncwarp calls leads from one to the other: Mark.clock
    is compared with Thread.seen, vector clocks over the 32 lanes. Shuffles and votes do not order
    memory accesses (CUDA guide), or
  - fences and atomics order them: releases.py, which has the whole model.
Any other pair is a data race, unless both only read or both are atomics of the same bytes.

Between two barriers, most shared memory is either written or read. While it is only read, each run
of reads by one thread is noted as {key: site}. The notes become records at the first write of the
same interval; without one, they are dropped at the barrier. So most reads need no record:
Array.reader is the short way of Thread.load.
"""

import numpy as np

from . import releases

BASE = (
    1024  # the address of the first dynamic byte of shared memory; a GPU reserves those before it
)
MAX_RUNS = 4096  # of one memory: threads that take turns in a waiting loop begin new ones forever


class Mark:
    """A thread at one time. epoch: block barriers so far, clock: the thread's own synchronizations
    so far."""

    __slots__ = ("clock", "epoch", "thread")

    def __init__(self, thread, epoch, clock):
        self.thread = thread
        self.epoch = epoch
        self.clock = clock

    def next(self):
        """Return the thread's next mark: its later accesses are distinguishable from its earlier
        ones."""
        return Mark(self.thread, self.epoch, self.clock + 1)


def in_order(earlier: Mark, now: Mark) -> bool:
    """Is an access at `earlier` ordered before an access at `now`?"""
    a, b = earlier.thread, now.thread
    if a is b:
        return True
    if a.block is b.block:
        if earlier.epoch != now.epoch:
            return True
        if a.warp == b.warp and b.seen is not None and b.seen[a.lane] >= earlier.clock:
            return True
    return releases.known(earlier, b)


class Memory:
    """The shadow of one range of memory: a global array with all its aliases, a shared array or a
    local array."""

    __slots__ = (
        "atomics", "base", "busy", "changed", "granule", "kind", "loads", "local", "nbytes", "observers", "old_atomics", "old_loads",
        "old_reads", "old_writes", "past_reads", "past_writes", "reading", "reads", "releases", "runs", "unread", "unset", "unwritten",
        "watched", "writes",
    )  # fmt: skip

    def __init__(self, kind: str, granule: int):
        self.kind = kind  # "global" | "shared" | "local"
        # one key per element and one thread: Thread.load and store take a short way
        self.local = kind == "local"
        self.granule = granule  # bytes per key
        self.base = 0  # global memory: the address of key 0, and its size
        self.nbytes = 0
        # By threads of the running block, and by finished blocks.
        self.writes: dict = {}
        self.reads: dict = {}
        self.atomics: dict = {}  # key -> (mark, site, keys of the element) of the last one
        self.loads: dict = {}  # atomics that only read
        self.old_writes: dict = {}
        self.old_reads: dict = {}
        self.old_atomics: dict = {}
        self.old_loads: dict = {}
        self.observers: dict = {}  # key -> {thread: mark} of loads since the last atomic
        # keys read and written before all blocks met, or by blocks of other processes
        self.past_reads: set = set()
        self.past_writes: set = set()
        self.releases: dict = {}  # key of an atomic -> {domain: Released}: releases.py
        self.unset: dict = {}  # key -> the Unset that was stored there (unset.py)
        self.unread: dict = {}  # key -> (mark, read) of the last read before any write
        self.unwritten = None  # global memory: the keys that no kernel and no copy has written
        self.busy = None  # registers that a product in flight uses: see errors.in_use
        self.watched = False  # there are atomics, Unsets or finished blocks: check all dicts
        # Shared memory.
        self.runs: list = []  # (mark, {key: site}): reads that have no record yet
        self.reading: list = []  # the Arrays through which the thread of the last run reads
        self.changed = 0  # the epoch of the last write or atomic

    def note(self, a, key, mark, site) -> bool:
        """Note a read, if nothing has been written in this epoch. Later reads by this thread may
        take the short way."""
        if self.changed == mark.epoch or self.watched or not a.dense or key not in self.writes:
            return False
        if self.runs and self.runs[-1][0].epoch != mark.epoch:
            self.runs.clear()
        if not self.runs or self.runs[-1][0] is not mark:
            if len(self.runs) == MAX_RUNS:
                return False
            self.interrupt()
            self.runs.append((mark, {}))
        a.reader = mark
        a.run = self.runs[-1][1]
        a.run[key] = site
        self.reading.append(a)
        return True

    def interrupt(self):
        """End the run of reads: the next read takes the long way."""
        for a in self.reading:
            a.reader = a.run = None
        self.reading.clear()

    def record_runs(self, mark):
        """Record the reads that were noted in this epoch."""
        self.interrupt()
        for reader, run in self.runs:
            if reader.epoch == mark.epoch:
                for key, site in run.items():
                    add_reader(self.reads, key, reader, site)
        self.runs.clear()

    def all_in_order(self):
        """All blocks have met: their accesses precede everything that comes."""
        self.past_writes.update(self.old_writes, self.old_atomics)
        self.past_reads.update(self.old_reads, self.old_loads)
        for shadow in (self.old_writes, self.old_reads, self.old_atomics, self.old_loads):
            shadow.clear()

    @property
    def written(self) -> set:
        """The keys that finished blocks have written."""
        return {*self.old_writes, *self.old_atomics, *self.past_writes}

    @property
    def accessed(self) -> set:
        """The keys that finished blocks have read or written."""
        return {*self.old_reads, *self.old_loads, *self.past_reads, *self.written}

    def bytes_up_to(self, keys) -> np.ndarray:
        """Return the bytes of global memory up to the last of some sorted keys, a row for each
        key."""
        size = 0
        if len(keys):
            size = (int(keys[-1]) + 1) * self.granule
        if size:
            raw = np.asarray(_Bytes(self.base, size, None))
        else:
            raw = np.empty(0, np.uint8)
        return raw.reshape(-1, self.granule)

    def end_of_block(self):
        """Move the records of the running block to those of the finished blocks."""
        self.old_writes.update(self.writes)
        self.old_atomics.update(self.atomics)
        releases.keep(self.old_reads, self.reads)
        releases.keep(self.old_loads, self.loads)
        for shadow in (self.writes, self.reads, self.atomics, self.loads):
            shadow.clear()
        self.watched = bool(self.old_writes or self.old_reads or self.old_atomics or self.old_loads)

    def unordered_atomic(self, key, mark):
        """Return the (mark, site, keys) of the last atomic that changed this element, if nothing
        orders it before `mark`. All earlier ones happen before the last one."""
        last = self.atomics.get(key) or self.old_atomics.get(key)
        if last is None or in_order(last[0], mark):
            return None
        if any(in_order(load, mark) for load in self.observers.get(key, {}).values()):
            return None
        return last


def add_reader(shadow: dict, key, mark: Mark, site):
    """Record a read: an access that may share its element with others of its kind. The record is
    one of

    (mark, site)                   the only access since the barrier
    (mark, site, {thread: ...})    several lanes of one warp
    (mark, site, mark, site)       threads of two warps: every write races with at least one of them
    """
    record = shadow.get(key)
    if record is None or record[0].epoch != mark.epoch:
        shadow[key] = (mark, site)
    elif len(record) != 4:
        share(shadow, key, record, mark, site)


def share(shadow, key, record, mark, site):
    """Add a reader to a record of the same epoch."""
    thread = mark.thread
    first = record[0].thread
    if first.warp != thread.warp:
        shadow[key] = (record[0], record[1], mark, site)
    elif len(record) == 3:
        record[2][thread] = (mark, site)
    elif first is thread:
        shadow[key] = (mark, site)
    else:
        shadow[key] = (record[0], record[1], {first: record, thread: (mark, site)})


def unordered(record, mark):
    """Return the (mark, site) in a record that nothing orders before `mark`, or None."""
    if record is None:
        return None
    for access in releases.accesses(record):
        if not in_order(access[0], mark):
            return access
    return None


class _Bytes:
    """Raw memory for np.asarray. Keeps the arrays alive that own it."""

    def __init__(self, address, size, owners):
        self.owners = owners
        self.__array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip
