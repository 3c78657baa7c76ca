"""What works beside the threads of a block, as on compute capability 9.0: the copy engine, the tensor cores of a warpgroup,
the barriers in shared memory that say when they are done.

Addressed shared memory (kernels/_hopper.py) is followed here, by words of 4 bytes. Time is a vector of numbers, one for every
thread, one for the products every warp waits for, one for every barrier (Lamport 1978; Mattern 1989). `known[t]` is what thread
t has learnt of all of them: by a block barrier, syncwarp, or an mbarrier that others arrived at or copies completed. An access
is in order if the thread knows the writes and reads before it, whatever the order in which they happen to run here. `fenced[t]`
is that part of it which the asynchronous engines may see too: a thread's own stores join it by fence.proxy.async ("Proxies").

A copy completes only when nobody else can go on. What it writes counts as unknown until its barrier was waited for.
"""

import numpy as np

from .errors import AsyncError, OutOfBoundsError, RaceError, UninitializedError, where

BASE = 1024  # the address of the first dynamic byte; a GPU keeps the bytes before for itself
PAGE = 256  # words; reads are looked up by page
MAX_BARRIERS = 64
NEVER = 2**30  # the time of a read that is under way


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self, address, count, column, clocks, site):
        self.address, self.count, self.pending, self.column, self.site = (
            address,
            count,
            count,
            column,
            site,
        )
        self.bytes = self.phase = 0  # bytes still expected; phases completed
        self.fenced = False  # its first state is known to the copy engine
        self.gathered = np.zeros_like(clocks)  # what those who arrived know, and have fenced
        self.released = [
            self.gathered
        ]  # the same at the end of each phase; before the first, nothing
        self.seen = {}  # thread -> phases that it knows to be complete

    def __str__(self):
        return f"mbarrier at byte {self.address - BASE}: phase {self.phase}, {self.pending} arrivals and {self.bytes} bytes missing"


class Engines:
    def __init__(self, block):
        self.block, self.threads = block, len(block.threads)
        size = block.launch.dynamic // 4 * 4
        self.bytes = np.full(size, 0x7F, np.uint8)
        columns = self.threads + len(block.warps) + MAX_BARRIERS
        # [0]: known, [1]: fenced; one row per thread
        self.clocks = np.zeros((2, self.threads, columns), np.int32)
        self.clocks[0, range(self.threads), range(self.threads)] = 1
        words = size // 4
        self.writer, self.when = np.full(words, -1, np.int32), np.zeros(words, np.int32)
        self.engine_wrote = np.zeros(words, bool)
        self.write_site = np.zeros(words, np.int32)
        self.sites, self.site_numbers = [], {}
        self.readers = {}  # page -> {(first word, end, column): [time, site]}
        # which 16 bytes of which tensor a copy has put where: tensor and plane, row, column / 8, swizzle
        self.tags = np.full((4, size // 16), -1, np.int64)
        self.planes = {}
        self.barriers, self.copies = {}, []  # copies: (barrier, its phase, bytes, site)
        self.groups = [[] for _ in block.warps]  # products under way, as each warp knows
        self.committed, self.completed = [0] * len(self.groups), [0] * len(self.groups)
        self.named = {}  # number of a bar.sync -> {thread: its turn}
        self.registers = {}

    # ------------------------------------------------------------------------- who knows what
    known = property(lambda self: self.clocks[0])
    fenced = property(lambda self: self.clocks[1])

    def tick(self, thread):
        self.clocks[0, thread.index, thread.index] += 1

    def meet(self, threads):
        """All learn what each knows: syncthreads, syncwarp, bar.sync."""
        rows = [t.index for t in threads]
        self.clocks[:, rows] = self.clocks[:, rows].max(axis=1, keepdims=True)
        self.clocks[0, rows, rows] += 1

    def fence(self, thread):
        self.clocks[1, thread.index] = self.clocks[0, thread.index]
        self.tick(thread)

    # ------------------------------------------------------------------------- shared memory
    def span(self, thread, address, nbytes, site, align=4):
        """-> first word, end"""
        first = int(address) - BASE
        if first < 0 or first + nbytes > len(self.bytes):
            raise OutOfBoundsError(
                f"shared memory {where(thread, site)}: {thread} at {site}: bytes {first} to {first + nbytes} of "
                f"{len(self.bytes)}",
                (site,),
            )
        if first % align:
            raise self.error(thread, site, f"byte {first} is not a multiple of {align}")
        return first // 4, -(-(first + nbytes) // 4)

    def error(self, thread, site, text, *others):
        return AsyncError(
            f"{site.what} {where(thread, site)}: {thread} at {site}: {text}", (*others, site)
        )

    def _number(self, site):
        if site not in self.site_numbers:
            self.site_numbers[site] = len(self.sites)
            self.sites.append(site)
        return self.site_numbers[site]

    def _check_writes(self, thread, first, end, clocks, site, does, engine):
        """The last writes to these words come before what `thread` does now."""
        if end - first <= 2 and not engine and self._settled(first, end, clocks[0]):
            return
        words = slice(first, end)
        writer, when = self.writer[words], self.when[words]
        late = (writer >= 0) & (clocks[0][writer] < when)
        if late.any():
            k = np.flatnonzero(late)[0]
            old = self.sites[self.write_site[words][k]]
            byte = 4 * int(np.arange(len(self.writer))[words][k])
            if self.engine_wrote[words][k]:
                text = f"{does} byte {byte} while the copy begun at {old} may be on its way: wait for its barrier"
                raise self.error(thread, site, text, old)
            raise RaceError(
                f"race {where(thread, site)}: {thread} {does} byte {byte} of shared memory at {site}, thread "
                f"{int(writer[k])} wrote it at {old}, with nothing between that orders them",
                (old, site),
            )
        if engine:
            hidden = (writer >= 0) & ~self.engine_wrote[words] & (clocks[1][writer] < when)
            if hidden.any():
                k = np.flatnonzero(hidden)[0]
                old = self.sites[self.write_site[words][k]]
                text = (
                    f"an engine {does} what threads wrote at {old}: fence_async must stand between"
                )
                raise self.error(thread, site, text, old)

    def _settled(self, first, end, known):
        """The same for a word or two, without arrays."""
        for k in range(first, end):
            writer = self.writer[k]
            if writer >= 0 and known[writer] < self.when[k]:
                return False
        return True

    def read(self, thread, first, end, clocks, site, engine, record=None):
        """clocks: (known, fenced) of who reads. record: (column, time) of the read; default: the thread now."""
        words = slice(first, end)
        if self.writer[words].min() < 0:
            unwritten = np.flatnonzero(self.writer[words] < 0)
            raise UninitializedError(
                f"uninitialised read {where(thread, site)}: {thread} reads byte {4 * (first + int(unwritten[0]))} of "
                f"shared memory at {site}, which nobody has written",
                (site,),
            )
        self._check_writes(thread, first, end, clocks, site, "reads", engine)
        column, time = record or (thread.index, int(self.known[thread.index, thread.index]))
        mark = [time, site]
        for page in range(first // PAGE, (end - 1) // PAGE + 1):
            self.readers.setdefault(page, {})[first, end, column] = mark
        return mark

    def write(self, thread, first, end, clocks, site, engine=None):
        """engine: (column, time) at which a copy is known to be complete; None: the thread writes by itself."""
        words = slice(first, end)
        self._check_writes(thread, first, end, clocks, site, "overwrites", engine is not None)
        for page in range(first // PAGE, (end - 1) // PAGE + 1):
            marks = self.readers.get(page)
            for key, (time, old) in list(marks.items()) if marks else ():
                low, high, column = key
                if low >= end or high <= first:
                    continue
                if clocks[0][column] < time:
                    text = (
                        f"overwrites bytes {4 * max(low, first)} to {4 * min(high, end)} of shared memory, which {old.what} "
                        f"at {old} may still be reading"
                    )
                    raise self.error(thread, site, text, old)
                if (
                    first <= max(low, page * PAGE) and min(high, (page + 1) * PAGE) <= end
                ):  # done with
                    del marks[key]
        own = thread.index, int(self.known[thread.index, thread.index])
        self.writer[words], self.when[words] = engine or own
        self.engine_wrote[words] = engine is not None
        self.write_site[words] = self._number(site)
        self.tags[:, first // 4 : -(-end // 4)] = -1

    # ------------------------------------------------------------------------- barriers in memory
    def make_barrier(self, thread, site, address, count):
        first, end = self.span(thread, address, 8, site, 8)
        self.write(thread, first, end, self.clocks[:, thread.index], site)
        column = self.threads + len(self.groups) + len(self.barriers)
        if len(self.barriers) == MAX_BARRIERS:
            raise self.error(thread, site, f"more than {MAX_BARRIERS} mbarriers are not simulated")
        made = Barrier(int(address), int(count), column, self.clocks[:, 0], site)
        made.maker = thread.index, int(self.known[thread.index, thread.index])
        self.barriers[int(address)] = made

    def show_barriers(self, thread):
        for barrier in self.barriers.values():
            if barrier.maker[0] == thread.index:
                barrier.fenced = True

    def barrier(self, thread, site, address, engine=False):
        barrier = self.barriers.get(int(address))
        if barrier is None:
            raise self.error(thread, site, f"there is no mbarrier at byte {int(address) - BASE}")
        column, time = barrier.maker
        if self.known[thread.index, column] < time:
            text = f"thread {column} made this mbarrier at {barrier.site}, with nothing between that orders them"
            raise self.error(thread, site, text, barrier.site)
        if engine and not barrier.fenced:
            text = f"the copy engine has not seen the mbarrier made at {barrier.site}: mbar_init_fence must follow it"
            raise self.error(thread, site, text, barrier.site)
        return barrier

    def arrive(self, thread, site, address, nbytes=0):
        barrier = self.barrier(thread, site, address)
        if barrier.pending == 0:
            text = f"more than {barrier.count} arrivals in one phase, while {barrier.bytes} bytes are missing"
            raise self.error(thread, site, text, barrier.site)
        barrier.gathered = np.maximum(barrier.gathered, self.clocks[:, thread.index])
        barrier.pending -= 1
        barrier.bytes += int(nbytes)
        self.tick(thread)
        self._end_phase(barrier)

    def _end_phase(self, barrier):
        if barrier.pending or barrier.bytes:
            return
        for other, phase, _, site in self.copies:
            if other is barrier and phase == barrier.phase:
                text = (
                    "a phase of its barrier ends before it does: mbar_expect was told too few bytes"
                )
                raise self.error(self.block.threads[0], site, text, barrier.site)
        barrier.phase += 1
        barrier.pending = barrier.count
        barrier.released.append(barrier.gathered.copy())
        barrier.released[-1][0, barrier.column] = barrier.phase

    def try_wait(self, thread, site, address, parity):
        barrier = self.barrier(thread, site, address)
        if int(parity) not in (0, 1):
            raise self.error(thread, site, f"a parity is 0 or 1, not {parity}")
        if barrier.phase & 1 == int(parity):
            return False
        # It may have passed as soon as the first phase of this parity was over: no more than that is known.
        seen = barrier.seen.get(thread.index, 0)
        seen += seen & 1 == int(parity)
        barrier.seen[thread.index] = seen
        own = self.clocks[:, thread.index]
        np.maximum(own, barrier.released[seen], out=own)
        return True

    # ------------------------------------------------------------------------- copies
    def begin_copy(self, thread, site, address, data, barrier, tag=None):
        """data: bytes that a copy brings to `address`. tag: (4, 16-byte pieces), what they are"""
        first, end = self.span(thread, address, len(data), site, 16)
        barrier = self.barrier(thread, site, barrier, engine=True)
        complete = barrier.column, barrier.phase + 1
        self.write(thread, first, end, self.clocks[:, thread.index], site, complete)
        self.bytes[4 * first : 4 * end] = data
        if tag is not None:
            self.tags[:, first // 4 : end // 4] = tag
        self.copies.append((barrier, barrier.phase, len(data), site))

    def advance(self):
        """One copy completes. -> was there one?"""
        if not self.copies:
            return False
        barrier, _, nbytes, _ = self.copies.pop(0)
        barrier.bytes -= nbytes
        self._end_phase(barrier)
        return True

    def begin_store(self, thread, site, address, nbytes):
        """-> the bytes that a copy reads from `address` until wait_stores"""
        first, end = self.span(thread, address, nbytes, site, 16)
        clocks = self.clocks[:, thread.index]
        mark = self.read(thread, first, end, clocks, site, True, (thread.index, NEVER))
        thread.state.setdefault("stores", []).append(mark)
        return self.bytes[4 * first : 4 * end].copy()

    def commit_stores(self, thread):
        thread.state.setdefault("store groups", []).append(thread.state.pop("stores", []))

    def wait_stores(self, thread):
        for group in thread.state.pop("store groups", ()):
            for mark in group:
                mark[0] = int(self.known[thread.index, thread.index])

    def plane(self, *key):
        """A number for a tensor and the plane of it that a copy reads."""
        return self.planes.setdefault(key, len(self.planes))

    # ------------------------------------------------------------------------- bar.sync
    def arrive_named(self, thread, site, number, count):
        """-> may it go on? Counted in turns; a thread asks again until all have come."""
        number, count = int(number), int(count)
        if not 0 < number < 16 or count % 32 or not 0 < count <= self.threads:
            text = f"bar.sync {number}, {count}: 1 to 15, and whole warps of this block"
            raise self.error(thread, site, text)
        here, passed = self.named.setdefault(number, ([], set()))
        if thread in passed:
            passed.remove(thread)
            return True
        if thread not in here:
            here.append(thread)
        if len(here) < count:
            return False
        self.meet(here)
        passed.update(t for t in here if t is not thread)
        here.clear()
        return True

    # ------------------------------------------------------------------------- the end
    def finish(self):
        for barrier, _, _, site in self.copies:
            text = f"still under way when the block ends; {barrier}"
            raise self.error(self.block.threads[0], site, text)
        for thread in self.block.threads:
            left = [m for m in thread.state.get("stores", ())]
            left += [m for group in thread.state.get("store groups", ()) for m in group]
            if left:
                text = "the block ends while the copy reads its shared memory: commit_stores, wait_stores"
                raise self.error(thread, left[0][1], text)
        for group, first in zip(self.groups, self.block.threads[::32]):
            if group:
                raise self.error(
                    first, group[0].site, "the product was never waited for (wgmma.wait_group)"
                )

    def report(self):
        """For a deadlock: the barriers that miss something."""
        lines = [
            f"    {b}" for b in self.barriers.values() if b.pending != b.count or b.bytes or b.phase
        ]
        return "\n" + "\n".join(lines) if lines else ""
