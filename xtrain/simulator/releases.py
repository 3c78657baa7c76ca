"""What a block may know of another one: the "last block done" pattern of the CUDA guide (Memory Fence Functions).

    partial[b, tid] = ...
    cuda.threadfence()                                  here, or in thread 0 behind the barrier
    cuda.syncthreads()
    if tid == 0:
        s[0] = cuda.atomic.add(counter, 0, 1)           publishes
    cuda.syncthreads()
    if s[0] == cuda.gridDim.x - 1:                      the others have published before: they are known
        ... = partial[...]

An atomic publishes what stands before a fence that it knows: a fence of its own thread, or of any thread of its block before
a barrier. Before a fence stands what its thread has done, and what its block had done at the barrier before. Another block
knows it as soon as it has done an atomic on the same element; that is, the thread which did it, and all behind a barrier.

A fence in one thread, a barrier and then the atomic in another one are enough because threadfence is sequentially consistent
(fence.sc of PTX), so there is one order of all fences; the atomic that is seen settles it for this pair.
"""


class Release:
    """What one block's atomics on one element have published."""

    __slots__ = ("atomics", "clocks", "epoch", "last")

    def __init__(self):
        self.epoch = 0  # all that the block did before this epoch
        self.last = 0  # epoch of the last atomic: it knows the fences of those before
        self.clocks = {}  # what a thread did before its own fence, by that fence's clock
        self.atomics = set()  # the marks of these atomics

    def add(self, mark):
        thread, fenced = mark.thread, mark.thread.block.fenced
        self.last = mark.epoch
        self.atomics.add(mark)
        known = [e for e in fenced[-2:] if e < mark.epoch]
        if thread.fences:
            self.clocks[thread] = thread.fences[-1].clock
            known.append(thread.fences[-1].epoch)
        self.epoch = max(self.epoch, *known, 0)

    def covers(self, mark) -> bool:
        return (
            mark.epoch < self.epoch
            or mark in self.atomics
            or mark.clock < self.clocks.get(mark.thread, 0)
            or any(f.epoch < self.last and mark.clock < f.clock for f in mark.thread.fences)
        )


def fence(thread):
    """thread.mark is a new one, which the fence stands before. Of each epoch the last fence is kept."""
    thread.mark = thread.mark.next()
    epoch, fenced = thread.mark.epoch, thread.block.fenced
    if not fenced or fenced[-1] != epoch:
        fenced.append(epoch)
    if thread.fences and thread.fences[-1].epoch == epoch:
        thread.fences = thread.fences[:-1]
    thread.fences = (*thread.fences, thread.mark)


def acquire(mark, memory, key):
    """An atomic learns what earlier blocks have published there."""
    releases = memory.releases.get(key)
    if releases is not None:
        acquired = mark.thread.block.acquired
        if (memory, key) not in acquired:
            acquired[memory, key] = releases, mark.epoch, set()
        acquired[memory, key][2].add(mark.thread)


def publish(thread, memory, key):
    """An atomic publishes what its block has done. -> the mark of this atomic and nothing else"""
    block = thread.block
    if not block.fenced:
        return thread.mark
    releases = memory.releases.setdefault(key, {})
    if block not in releases:
        releases[block] = Release()
    mark = thread.mark.next()
    thread.mark = mark.next()
    releases[block].add(mark)
    return mark


def known(earlier, now) -> bool:
    """Does the thread of the mark `now` know what another block did at `earlier`?"""
    for releases, epoch, threads in now.thread.block.acquired.values():
        release = releases.get(earlier.thread.block)
        learnt = now.thread in threads or epoch < now.epoch
        if learnt and release is not None and release.covers(earlier):
            return True
    return False


def keep(old: dict, new: dict):
    """Add the reads or atomics of a block that is done to those of earlier ones.

    One that no later block can know is enough: whoever writes races with it. A block without a fence publishes nothing.
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
    """The (mark, site) in a record of reads or atomics; memory.add_reader says what it looks like."""
    if len(record) == 3:
        return record[2].values()
    return (record[:2], record[2:]) if len(record) == 4 else (record,)
