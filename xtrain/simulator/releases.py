"""Order between blocks: the "last block done" pattern of the CUDA guide (Memory Fence Functions).

    partial[b, tid] = ...
    cuda.threadfence()                                  here, or in thread 0 after the barrier
    cuda.syncthreads()
    if tid == 0:
        s[0] = cuda.atomic.add(counter, 0, 1)           releases
    cuda.syncthreads()
    if s[0] == cuda.gridDim.x - 1:                      acquires: all other blocks released before
        ... = partial[...]

An atomic releases the accesses that precede a fence which the atomic follows: a fence in the same
thread, or in any thread of the same block before a barrier. A fence is preceded by the accesses of
its thread, and by the accesses of its block before the last barrier. Another block acquires them by
an atomic on the same element: they are then ordered for the thread of that atomic, and for all
threads of that block after their next barrier.

The order is transitive: what a block has acquired before a fence is released with its own accesses
(cumulativity in PTX).

Within a block, threads pass accesses on in the same way: what precedes a fence of a thread
(threadfence or threadfence_block) is released by its next atomics, and acquired by every thread of
the block whose atomic on the same element comes later. So the accesses that a lock protects are in
order:

    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    total[0] += v
    cuda.threadfence()
    cuda.atomic.exch(lock, 0, 0)

Within a warp, syncwarp is such a barrier: what a lane did before it precedes the later fences and
atomics of the lanes that it met, and what one of these has acquired before it is acquired for them
all after it.

A fence in one thread, a barrier and the atomic in another thread are enough, because threadfence is
sequentially consistent (fence.sc in PTX): all fences have one order, and the observed atomic
determines it for this pair.
"""


class Release:
    """What the atomics of one block on one element have released."""

    __slots__ = ("atomics", "clocks", "epoch", "last", "passed", "passed_clocks")

    def __init__(self):
        self.epoch = 0  # all accesses of the block before this epoch are released
        self.last = 0  # epoch of the last atomic: it follows the fences of earlier epochs
        self.clocks = {}  # thread -> clock of its last fence: its earlier accesses are released
        self.atomics = set()  # the marks of the atomics
        # what this block has acquired itself: other block -> its accesses before this epoch; its
        # thread -> before this clock
        self.passed, self.passed_clocks = {}, {}

    def add(self, mark):
        """Add an atomic at `mark`."""
        thread = mark.thread
        fenced = mark.thread.block.fenced
        self.last = mark.epoch
        self.atomics.add(mark)
        known = [e for e in fenced[-2:] if e < mark.epoch]
        if thread.fences:
            self.clocks[thread] = thread.fences[-1].clock
            known.append(thread.fences[-1].epoch)
        _raise(self.clocks, _of_mates(thread))
        self.epoch = max(self.epoch, *known, 0)
        for releases, epoch, threads in thread.block.acquired.values():
            fenced_later = any(clock < self.clocks.get(t, 0) for t, clock in threads.items())
            if epoch < self.epoch or fenced_later:
                for block, release in releases.items():
                    _raise(self.passed, {block: release.epoch})
                    _raise(self.passed, release.passed)
                    _raise(self.passed_clocks, release.clocks)
                    _raise(self.passed_clocks, release.passed_clocks)

    def passes_on(self, mark) -> bool:
        """Is an access of another block at `mark` released with those of this block?"""
        clock = self.passed_clocks.get(mark.thread, 0)
        return mark.epoch < self.passed.get(mark.thread.block, 0) or mark.clock < clock

    def covers(self, mark) -> bool:
        """Is an access of this block at `mark` released?"""
        return (
            mark.epoch < self.epoch
            or mark in self.atomics
            or mark.clock < self.clocks.get(mark.thread, 0)
            or any(f.epoch < self.last and mark.clock < f.clock for f in mark.thread.fences)
        )


def fence(thread):
    """threadfence: give the thread a new mark, which the fence precedes. The last fence of each
    epoch is kept."""
    fence_block(thread)
    thread.seen_at_fence = thread.seen
    epoch, fenced = thread.mark.epoch, thread.block.fenced
    if not fenced or fenced[-1] != epoch:
        fenced.append(epoch)
    if thread.fences and thread.fences[-1].epoch == epoch:
        thread.fences = thread.fences[:-1]
    thread.fences = (*thread.fences, thread.mark)


def fence_block(thread):
    """threadfence_block: a fence for the threads of the block only."""
    thread.mark = thread.mark.next()
    thread.fenced_at = thread.mark.clock


def _of_mates(thread) -> dict:
    """{lane of the thread's warp: clock}: by syncwarp, what the lane did before this clock precedes
    the thread's last threadfence, or a threadfence of the lane that precedes the thread's next
    atomic.
    """
    found = {}
    for mate in thread.block.warps[thread.warp] if thread.seen else ():
        clocks = [f.clock for f in mate.fences if f.clock <= thread.seen[mate.lane]]
        if thread.seen_at_fence:
            clocks.append(thread.seen_at_fence[mate.lane] + 1)
        if clocks and mate is not thread:
            found[mate] = max(clocks)
    return found


def acquire(mark, memory, key):
    """An atomic acquires what earlier blocks and other threads of its block have released on its
    element."""
    thread = mark.thread
    handed = thread.block.handed.get((memory, key))
    if handed is not None:
        _merge(thread, handed)
    releases = memory.releases.get(key)
    if releases is not None:
        acquired = mark.thread.block.acquired
        if (memory, key) not in acquired:
            acquired[memory, key] = releases, mark.epoch, {}
        acquired[memory, key][2].setdefault(mark.thread, mark.clock)


def release(thread, memory, key):
    """An atomic releases the accesses of its block. Returns a mark that no other access of the
    thread has."""
    block = thread.block
    if thread.fenced_at:
        handed = block.handed.setdefault((memory, key), {})
        _raise(handed, thread.known or {})
        _raise(handed, _of_mates(thread))
        handed[thread] = thread.fenced_at
        thread.mark = thread.mark.next()  # its later accesses are not released
    if not block.fenced:
        return thread.mark
    releases = memory.releases.setdefault(key, {})
    if block not in releases:
        releases[block] = Release()
    mark = thread.mark.next()
    thread.mark = mark.next()
    releases[block].add(mark)
    return mark


def share(lanes):
    """syncwarp: each lane knows what one of them has acquired from threads of its block."""
    for clocks in [t.known for t in lanes if t.known]:
        for thread in lanes:
            _merge(thread, clocks)


def _merge(thread, clocks):
    """The thread knows these clocks from now on."""
    if thread.known is None:
        thread.known = {}
    _raise(thread.known, clocks)


def _raise(old, new):
    """old[key] = the larger of old[key] and new[key]."""
    for key, value in new.items():
        if old.get(key, 0) < value:
            old[key] = value


def known(earlier, now) -> bool:
    """Has the thread of the mark `now` acquired the access of another block at `earlier`?"""
    thread = now.thread
    seen = now.thread.seen
    for releases, epoch, threads in thread.block.acquired.values():
        by_warp = seen is not None and any(
            t.warp == thread.warp and clock <= seen[t.lane] for t, clock in threads.items()
        )
        if thread not in threads and epoch >= now.epoch and not by_warp:
            continue
        release = releases.get(earlier.thread.block)
        if release is not None and release.covers(earlier):
            return True
        if any(r.passes_on(earlier) for r in releases.values()):
            return True
    return False


def keep(old: dict, new: dict):
    """Add the reads or atomics of a finished block to those of earlier blocks.

    For each element, one access that later blocks cannot acquire is enough, because every later
    write races with it. A block without a fence releases nothing.
    """
    fenced = new and next(iter(new.values()))[0].thread.block.fenced
    if not fenced:
        old.update(new)
        return
    for key, record in new.items():
        before = old.get(key)
        if before is None:
            old[key] = record
        elif before[0].thread.block.fenced:
            if len(before) != 3:
                before = old[key] = *before[:2], _by_thread(before)
            before[2].update(_by_thread(record))


def _by_thread(record):
    return {access[0].thread: access for access in accesses(record)}


def accesses(record):
    """The (mark, site) pairs in a record of reads or atomics; memory.add_reader describes its
    layout."""
    if len(record) == 3:
        return record[2].values()
    if len(record) == 4:
        return (record[:2], record[2:])
    return (record,)
