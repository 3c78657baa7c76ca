"""The asynchronous engines of compute capability 9.0: the copy engine, the tensor cores of a
warpgroup, and the mbarriers in shared memory that signal their completion.

Addressed shared memory (kernels/primitives/hopper.py) is tracked here in words of 4 bytes. Time is
a vector clock (Lamport 1978; Mattern 1989) with one entry per thread, one per warp for the products
that it waits for, and one per mbarrier. `known[t]` is what thread t knows of all entries: from a
block barrier, from syncwarp, or from an mbarrier at which threads arrived or copies completed. An
access is in order if its thread knows all earlier writes and reads of the same words, in whatever
order the simulator happens to run them. `fenced[t]` is the part of `known[t]` that the asynchronous
engines may see too: a thread's own stores enter it by fence.proxy.async ("Proxies" in the PTX
manual).

A copy completes only when no thread can run. What it writes is unknown to a thread until the thread
has waited for its mbarrier.
"""

import numpy as np

from . import releases
from .errors import AsyncError, OutOfBoundsError, RaceError, UninitializedError, where
from .memory import BASE
from .observers import READ, WRITE

PAGE = 256  # words; reads are looked up by page
MAX_BARRIERS = 64
NEVER = 2**30  # the time of a read that is still in flight


class Barrier:
    """An mbarrier: a phase ends when all threads have arrived and all expected bytes have been
    copied.

    maker: (thread, time) of its initialization.
    """

    def __init__(self, address, count, column, clocks, site, maker):
        self.address = address
        self.column = column
        self.site = site
        self.maker = maker
        self.count = self.pending = count
        self.bytes = self.phase = 0  # bytes still expected; phases completed
        self.fenced = False  # the copy engine sees its initial state
        self.gathered = np.zeros_like(clocks)  # what the arrived threads know, and have fenced
        self.released = [self.gathered]  # the same at the end of each phase; [0]: nothing yet
        self.seen: dict[int, int] = {}  # thread -> phases that it knows to be complete

    def __str__(self):
        return (
            f"mbarrier at byte {self.address - BASE}: phase {self.phase}, {self.pending} arrivals "
            f"and {self.bytes} bytes missing"
        )


class Engines:
    """The asynchronous engines of one block, and the vector clocks that order their accesses."""

    def __init__(self, block):
        self.block = block
        self.threads = len(block.threads)
        size = block.launch.dynamic // 4 * 4
        self.bytes = np.full(size, 0x7F, np.uint8)
        columns = self.threads + len(block.warps) + MAX_BARRIERS
        # [0]: known, [1]: fenced; one row per thread
        self.clocks = np.zeros((2, self.threads, columns), np.int32)
        self.clocks[0, range(self.threads), range(self.threads)] = 1
        words = size // 4
        self.writer = np.full(words, -1, np.int32)
        self.when = np.zeros(words, np.int32)
        self.engine_wrote = np.zeros(words, bool)
        self.write_site = np.zeros(words, np.int32)
        self.sites: list = []
        self.site_numbers: dict = {}
        self.readers: dict = {}  # page -> {(first word, end, column): [time, site]}
        # Which 16 bytes of which tensor a copy has written where: tensor and plane, row, column /
        # 8, swizzle.
        self.tags = np.full((4, size // 16), -1, np.int64)
        self.planes: dict = {}
        self.planes_of: dict = {}  # the reverse
        self.barriers: dict[int, Barrier] = {}
        self.copies: list[tuple] = []  # in flight: (barrier, its phase, bytes, site)
        self.groups: list[list] = [[] for _ in block.warps]  # products in flight, per warp
        self.committed, self.completed = [0] * len(self.groups), [0] * len(self.groups)
        # number of a bar.sync -> (threads that have arrived, threads that may pass)
        self.named: dict = {}
        self.registers: dict = {}

    def tell(self, hook, *facts):
        """Call this method of the observers."""
        for observer in self.block.launch.observers:
            getattr(observer, hook)(*facts)

    # ------------------------------------------------------------------------- vector clocks
    known = property(lambda self: self.clocks[0])
    fenced = property(lambda self: self.clocks[1])

    def tick(self, thread):
        """Advance the thread's own entry of its clock."""
        self.clocks[0, thread.index, thread.index] += 1

    def meet(self, threads):
        """Merge the clocks of threads that synchronize: syncthreads, syncwarp, bar.sync."""
        rows = [t.index for t in threads]
        self.clocks[:, rows] = self.clocks[:, rows].max(axis=1, keepdims=True)
        self.clocks[0, rows, rows] += 1

    def fence(self, thread):
        """fence.proxy.async: the engines see what the thread knows now."""
        self.clocks[1, thread.index] = self.clocks[0, thread.index]
        self.tick(thread)

    # ------------------------------------------------------------------------- shared memory
    def span(self, thread, address, nbytes, site, align=4):
        """Return the words [first, end) of nbytes at an address. Raises OutOfBoundsError or
        AsyncError."""
        first = int(address) - BASE
        if first < 0 or first + nbytes > len(self.bytes):
            raise OutOfBoundsError(
                f"out of bounds {where(thread, site)}: {thread} uses bytes {first} to "
                f"{first + nbytes} of shared memory at {site}, but the block has {len(self.bytes)}",
                (site,),
                thread=thread.index,
            )
        if first % align:
            raise self.error(thread, site, f"byte {first} is not a multiple of {align}")
        return first // 4, -(-(first + nbytes) // 4)

    def error(self, thread, site, text, *others):
        """Return an AsyncError that names the function called at `site`; others: earlier sites."""
        text = f"{site.what} {where(thread, site)}: {thread} at {site}: {text}"
        return AsyncError(text, (*others, site), thread=thread.index)

    def _number(self, site):
        if site not in self.site_numbers:
            self.site_numbers[site] = len(self.sites)
            self.sites.append(site)
        return self.site_numbers[site]

    def _check_writes(self, thread, first, end, clocks, site, does, engine):
        """Raise an error unless `clocks` know the last writes to these words."""
        if end - first <= 2 and not engine and self._writes_known(first, end, clocks[0]):
            return
        words = slice(first, end)
        writer, when = self.writer[words], self.when[words]
        late = (writer >= 0) & (clocks[0][writer] < when)
        if late.any():
            k = np.flatnonzero(late)[0]
            old = self.sites[self.write_site[words][k]]
            byte = 4 * int(np.arange(len(self.writer))[words][k])
            if self.engine_wrote[words][k]:
                text = (
                    f"{does} byte {byte} while the copy started at {old} may be in flight: wait "
                    "for its barrier"
                )
                raise self.error(thread, site, text, old)
            raise RaceError(
                f"data race {where(thread, site)}: {thread} {does} byte {byte} of shared memory "
                f"at {site}, thread {int(writer[k])} wrote it at {old}, and nothing orders the "
                "two accesses",
                (old, site),
                thread=thread.index,
            )
        if engine:
            hidden = (writer >= 0) & ~self.engine_wrote[words] & (clocks[1][writer] < when)
            if hidden.any():
                k = np.flatnonzero(hidden)[0]
                old = self.sites[self.write_site[words][k]]
                text = (
                    f"an asynchronous engine {does} what threads wrote at {old}: call "
                    "fence_proxy_async in between"
                )
                raise self.error(thread, site, text, old)

    def _writes_known(self, first, end, known):
        """Return the first check of _check_writes for a word or two, without array operations."""
        for k in range(first, end):
            writer = self.writer[k]
            if writer >= 0 and known[writer] < self.when[k]:
                return False
        return True

    def read(self, thread, first, end, clocks, site, engine, record=None):
        """Check and record a read. Returns its record, a list [time, site].

        clocks: (known, fenced) of the reader. engine: "", "TMA" or "wgmma". record: (column, time)
        of the read; default: the thread now.
        """
        self.tell("touched", thread, first, end, site, READ, engine)
        words = slice(first, end)
        if self.writer[words].min() < 0:
            unwritten = np.flatnonzero(self.writer[words] < 0)
            raise UninitializedError(
                f"uninitialized read {where(thread, site)}: {thread} reads byte "
                f"{4 * (first + int(unwritten[0]))} of shared memory at {site}, which no thread "
                "has written",
                (site,),
                thread=thread.index,
            )
        self._check_writes(thread, first, end, clocks, site, "reads", engine)
        column, time = record or (thread.index, int(self.known[thread.index, thread.index]))
        mark = [time, site]
        for page in range(first // PAGE, (end - 1) // PAGE + 1):
            self.readers.setdefault(page, {})[first, end, column] = mark
        return mark

    def write(self, thread, first, end, clocks, site, engine=None):
        """Check and record a write. engine: (column, time) of the completion of an asynchronous
        copy; None: an ordinary store."""
        self.tell("touched", thread, first, end, site, WRITE, "TMA" if engine else "")
        words = slice(first, end)
        self._check_writes(thread, first, end, clocks, site, "overwrites", engine is not None)
        for page in range(first // PAGE, (end - 1) // PAGE + 1):
            marks = self.readers.get(page, {})
            for key, (time, old) in list(marks.items()):
                low, high, column = key
                if low >= end or high <= first:
                    continue
                if clocks[0][column] < time:
                    text = (
                        f"overwrites bytes {4 * max(low, first)} to {4 * min(high, end)} of shared "
                        f"memory, which {old.what} at {old} may still be reading"
                    )
                    raise self.error(thread, site, text, old)
                # The write covers the whole read within this page: later writes are ordered by this
                # one.
                if first <= max(low, page * PAGE) and min(high, (page + 1) * PAGE) <= end:
                    del marks[key]
        own = thread.index, int(self.known[thread.index, thread.index])
        self.writer[words], self.when[words] = engine or own
        self.engine_wrote[words] = engine is not None
        self.write_site[words] = self._number(site)
        self.tags[:, first // 4 : -(-end // 4)] = -1

    # ------------------------------------------------------------------------- mbarriers
    def make_barrier(self, thread, site, address, count):
        """mbarrier.init"""
        first, end = self.span(thread, address, 8, site, 8)
        self.write(thread, first, end, self.clocks[:, thread.index], site)
        column = self.threads + len(self.groups) + len(self.barriers)
        if len(self.barriers) == MAX_BARRIERS:
            raise self.error(thread, site, f"more than {MAX_BARRIERS} mbarriers are not simulated")
        maker = thread.index, int(self.known[thread.index, thread.index])
        barrier = Barrier(int(address), int(count), column, self.clocks[:, 0], site, maker)
        self.barriers[int(address)] = barrier
        self.tell("signalled", thread, barrier, site, barrier.count, 0)

    def show_barriers(self, thread):
        """fence.mbarrier_init: make the thread's mbarriers visible to the copy engine."""
        for barrier in self.barriers.values():
            if barrier.maker[0] == thread.index:
                barrier.fenced = True

    def barrier(self, thread, site, address, engine=False):
        """Return the mbarrier at an address. Raises AsyncError if the thread (or the copy engine)
        may not use it yet."""
        barrier = self.barriers.get(int(address))
        if barrier is None:
            raise self.error(thread, site, f"there is no mbarrier at byte {int(address) - BASE}")
        column, time = barrier.maker
        if self.known[thread.index, column] < time:
            text = (
                f"thread {column} initialized this mbarrier at {barrier.site}, and nothing orders "
                "the two accesses"
            )
            raise self.error(thread, site, text, barrier.site)
        if engine and not barrier.fenced:
            text = (
                f"the copy engine does not see the mbarrier initialized at {barrier.site}: call "
                "mbarrier_init_fence after it"
            )
            raise self.error(thread, site, text, barrier.site)
        return barrier

    def arrive(self, thread, site, address, nbytes=0):
        """mbarrier.arrive, with .expect_tx for nbytes."""
        barrier = self.barrier(thread, site, address)
        if barrier.pending == 0:
            text = (
                f"more than {barrier.count} arrivals in one phase, while {barrier.bytes} bytes are "
                "missing"
            )
            raise self.error(thread, site, text, barrier.site)
        barrier.gathered = np.maximum(barrier.gathered, self.clocks[:, thread.index])
        barrier.pending -= 1
        barrier.bytes += int(nbytes)
        self.tell("signalled", thread, barrier, site, -1, int(nbytes))
        self.tick(thread)
        self._end_phase(barrier)

    def _end_phase(self, barrier):
        if barrier.pending or barrier.bytes:
            return
        for other, phase, _, site in self.copies:
            if other is barrier and phase == barrier.phase:
                text = (
                    "a phase of its mbarrier ends before the copy: pass more bytes to "
                    "mbarrier_arrive_expect_tx"
                )
                raise self.error(self.block.threads[0], site, text, barrier.site)
        barrier.phase += 1
        barrier.pending = barrier.count
        barrier.released.append(barrier.gathered.copy())
        barrier.released[-1][0, barrier.column] = barrier.phase

    def try_wait(self, thread, site, address, parity):
        """mbarrier.try_wait.parity. Returns True if the phase is complete; the thread then knows
        what the barrier released."""
        barrier = self.barrier(thread, site, address)
        if int(parity) not in (0, 1):
            raise self.error(thread, site, f"a parity is 0 or 1, not {parity}")
        if barrier.phase & 1 == int(parity):
            return False
        # The wait could have passed at the end of the first phase of this parity: the thread knows
        # no more than that.
        seen = barrier.seen.get(thread.index, 0)
        seen += seen & 1 == int(parity)
        barrier.seen[thread.index] = seen
        own = self.clocks[:, thread.index]
        np.maximum(own, barrier.released[seen], out=own)
        self.tell("waited", thread, barrier, site, seen - 1)
        return True

    # ------------------------------------------------------------------------- copies
    def begin_copy(self, thread, site, address, data, barrier, tag=None):
        """Start an asynchronous copy of `data` to `address`. tag: (4, 16-byte chunks), what the
        bytes are (self.tags)."""
        first, end = self.span(thread, address, len(data), site, 16)
        barrier = self.barrier(thread, site, barrier, engine=True)
        complete = barrier.column, barrier.phase + 1
        self.write(thread, first, end, self.clocks[:, thread.index], site, complete)
        self.bytes[4 * first : 4 * end] = data
        if tag is not None:
            self.tags[:, first // 4 : end // 4] = tag
        self.copies.append((barrier, barrier.phase, len(data), site))

    def advance(self):
        """Complete the oldest copy. Returns False if there is none."""
        if not self.copies:
            return False
        barrier, _, nbytes, _ = self.copies.pop(0)
        barrier.bytes -= nbytes
        self.tell("completed", self.block, "TMA", None, None, barrier)
        self._end_phase(barrier)
        return True

    def begin_store(self, thread, site, address, nbytes):
        """Start an asynchronous store. Returns the bytes at `address`, which it reads until
        tma_store_wait."""
        first, end = self.span(thread, address, nbytes, site, 16)
        clocks = self.clocks[:, thread.index]
        mark = self.read(thread, first, end, clocks, site, "TMA", (thread.index, NEVER))
        thread.state.setdefault("stores", []).append(mark)
        return self.bytes[4 * first : 4 * end].copy()

    def tma_store_commit(self, thread):
        """cp.async.bulk.commit_group"""
        thread.state.setdefault("store groups", []).append(thread.state.pop("stores", []))

    def tma_store_wait(self, thread, site):
        """cp.async.bulk.wait_group.read 0: the stores have read their shared memory."""
        for group in thread.state.pop("store groups", ()):
            for mark in group:
                mark[0] = int(self.known[thread.index, thread.index])
                self.tell("completed", self.block, "TMA", thread, site)

    def plane(self, *key):
        """Return a number for a tensor and the plane that a copy reads of it."""
        number = self.planes.setdefault(key, len(self.planes))
        self.planes_of[number] = key
        return number

    # ------------------------------------------------------------------------- bar.sync
    def arrive_named(self, thread, site, number, count):
        """bar.sync. Returns True if the thread may pass; the scheduler polls until all `count`
        threads have arrived."""
        number = int(number)
        count = int(count)
        if not 0 < number < 16 or count % 32 or not 0 < count <= self.threads:
            text = (
                f"bar.sync {number}, {count}: the number must be 1 to 15, the count whole warps of "
                "this block"
            )
            raise self.error(thread, site, text)
        arrived, released = self.named.setdefault(number, ([], set()))
        if thread in released:
            released.remove(thread)
            return True
        if thread not in arrived:
            arrived.append(thread)
        if len(arrived) < count:
            return False
        self.meet(arrived)
        releases.meet(arrived)
        self.tell("meet", arrived, "bar_sync", site)
        released.update(t for t in arrived if t is not thread)
        arrived.clear()
        return True

    # ------------------------------------------------------------------------- end of the block
    def finish(self):
        """Raise AsyncError if anything is still in flight when the block ends."""
        for barrier, _, _, site in self.copies:
            text = f"still in flight when the block ends; {barrier}"
            raise self.error(self.block.threads[0], site, text)
        for thread in self.block.threads:
            reads = [m for m in thread.state.get("stores", ())]
            reads += [m for group in thread.state.get("store groups", ()) for m in group]
            if reads:
                text = (
                    "the block ends while the copy reads its shared memory: call tma_store_commit "
                    "and tma_store_wait"
                )
                raise self.error(thread, reads[0][1], text)
        for group, first in zip(self.groups, self.block.threads[::32]):
            if group:
                text = "the block ends without waiting for the product (wgmma.wait_group)"
                raise self.error(first, group[0].site, text)

    def report(self):
        """For a deadlock: the mbarriers that are in use or still miss something."""
        used = (b for b in self.barriers.values() if b.pending != b.count or b.bytes or b.phase)
        return [f"    {b}" for b in used]
