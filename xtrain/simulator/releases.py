"""The memory model: which accesses are in order. It is PTX's, for what Numba compiles to.

An access is weak (a[i], a[i] = v) or atomic (cuda.atomic.*: relaxed, at GPU scope, in shared and in
global memory). Two accesses to an element conflict if they are by different threads, at least one
writes and at least one is weak; or if both are atomic, but of different widths. A conflict is a
finding unless one access happens before the other. Happens-before is the transitive closure of:

program order         in one thread.
block barrier         syncthreads and its votes: what any thread of the block did before it, or what
                      happens before that, happens before all that follows it. It is no fence.
syncwarp              the same for the lanes that meet in it; bar.sync for the warps that meet.
grid.sync()           the same for the grid. So is the end of a kernel.
release and acquire   X, an atomic by one thread, changes an element, and Y, an atomic by another
                      one, reads this change, or that of a later atomic (a chain of atomics). Then
                      what precedes the release happens before what follows the acquisition.
    release           a fence in the thread of X before X; or X itself is a releasing instruction.
    acquisition       a fence in the thread of Y after Y; or Y itself is an acquiring instruction.
    scope             threadfence and threadfence_system are fences for all blocks,
                      threadfence_block for the threads of its block. Both fences must include the
                      other thread.
order of fences       every fence is sequentially consistent (membar is fence.sc). So the fence of
                      the release may be in any thread, if it happens before X, and that of the
                      acquisition too, if Y happens before it: a fence, a barrier, the atomic of
                      thread 0. This holds for two fences, not for an instruction and a fence.
observation           an atomic that reads a change by another one happens after it, with what
                      follows, without any fence; not so what precedes the other one.

No order: shuffles, votes and match_* of a warp, activemask, nanosleep; an atomic by itself; a weak
read of a flag. A compare-and-swap that fails is an atomic read: it acquires and releases nothing. A
weak write to an element ends its chain of atomics.

So an acquisition is pending until a fence. Accesses that only a pending acquisition would order are
the finding `missing_acquire`. A lock needs both fences:

    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    cuda.threadfence()                          acquires
    total[0] += v
    cuda.threadfence()                          releases
    cuda.atomic.exch(lock, 0, 0)

and so does the last block that merges what all have written (CUDA guide, Memory Fence Functions):

    partial[b, tid] = ...
    cuda.threadfence()                          or in thread 0, after the barrier
    cuda.syncthreads()
    if tid == 0:
        s[0] = cuda.atomic.add(counter, 0, 1)
        cuda.threadfence()                      or in all threads, after the barrier
    cuda.syncthreads()
    if s[0] == cuda.gridDim.x - 1:
        ... = partial[...]

An atomic reads the last change. What atomics alone may show on a GPU
(store buffering, load buffering, IRIW: old values, in different orders for different threads) is
not shown; the accesses that depend on such an outcome are compared as above.

Not recognized, so taken for a race: an order of fences in which Y reaches the fence of the
acquisition through a releasing instruction, or a fence of narrower scope, of a third thread.

A view is what happens before a thread's next access: {thread: its accesses before this clock,
block: its accesses before this epoch}. Views are never changed, so they are shared. The order
within a block by barriers and syncwarp is not in them: memory.in_order.
"""

from typing import NamedTuple

GPU = None  # the domain of threadfence; that of threadfence_block is the thread's Block
NOTHING: dict = {}


class Released(NamedTuple):
    """What the chain of atomics on an element has released in one domain, as views."""

    here: dict  # by fences in the threads of the atomics, and by instructions
    by_fences: dict  # by all fences that happen before one of the atomics
    by_instructions: dict


NOT_RELEASED = Released(NOTHING, NOTHING, NOTHING)


class Sync:
    """The fences and atomics of a thread, or what the barriers of a block have passed on of them. A
    dict per domain."""

    __slots__ = ("changed", "fenced", "hint", "passed", "passed_pending", "pending", "polled")

    def __init__(self):
        self.fenced = {}  # the view at the thread's last fence: its next atomics release it
        self.passed = {}  # the same for all fences that happen before: released to fences only
        self.pending = {}  # what its next fence acquires
        self.passed_pending = {}  # the same for a fence of another thread that happens after
        self.hint = NOTHING  # all that is pending somewhere: for missing_acquire
        self.polled = {}  # what its last atomic has read
        self.changed = False  # since it was last passed on


def join(a: dict, b: dict) -> dict:
    """Return the view of all that is in `a` or in `b`."""
    if not b or a is b:
        return a
    if len(a) < len(b):
        a, b = b, a
    new = None
    for key, value in b.items():
        if a.get(key, 0) < value:
            if new is None:
                new = dict(a)
            new[key] = value
    return new or a


def has(view, mark) -> bool:
    """Is an access at `mark` in this view?"""
    thread = mark.thread
    return mark.clock < view.get(thread, 0) or mark.epoch < view.get(thread.block, 0)


def known(mark, thread) -> bool:
    """Does an access at `mark` happen before the thread's next one, by releases and acquisitions?"""
    return has(thread.view, mark) or has(thread.block.view, mark)


def is_pending(mark, thread) -> bool:
    """Would it, if the thread had called threadfence?"""
    return any(
        has(view, mark)
        for sync in (thread.sync, thread.block.sync)
        if sync is not None
        for view in (sync.hint, *sync.pending.values())
    )


def meet(threads) -> None:
    """Order what these threads have done before what they do next: a barrier of a part of a block."""
    view = NOTHING
    for thread in threads:
        view = join(join(view, thread.view), {thread: thread.mark.clock + 1})
    for thread in threads:
        thread.view = view
        thread.mark = thread.mark.next()


def _sync(thread) -> Sync:
    if thread.sync is None:
        thread.sync = Sync()
        thread.block.syncs.append(thread.sync)
    thread.sync.changed = True
    return thread.sync


def _everything(thread) -> dict:
    """Return the view of what happens before now. The thread gets a new mark."""
    thread.mark = thread.mark.next()
    block = thread.block
    view = {thread: thread.mark.clock, block: thread.mark.epoch}
    if thread.seen is not None:
        for mate in block.warps[thread.warp]:
            if mate is not thread:
                view[mate] = thread.seen[mate.lane] + 1
    return join(join(view, thread.view), block.view)


def fence(thread, *wider):
    """threadfence_block; with GPU, threadfence."""
    sync = _sync(thread)
    shared = thread.block.sync
    domains = thread.block, *wider
    for domain in domains:
        thread.view = join(thread.view, sync.pending.pop(domain, NOTHING))
        thread.view = join(thread.view, sync.passed_pending.pop(domain, NOTHING))
        if shared is not None:
            thread.view = join(thread.view, shared.passed_pending.get(domain, NOTHING))
    view = _everything(thread)
    for domain in domains:
        sync.fenced[domain] = sync.passed[domain] = view
    thread.block.releases = thread.block.releases or bool(wider)


def atomic(thread, memory, key, writes=True, acquires=False, releases=False):
    """An atomic on an element. writes: False if it only reads. acquires, releases: is it such an
    instruction?"""
    block = thread.block
    element = memory.releases.get(key)
    if element is not None:
        _read(thread, element, acquires)
    silent = thread.sync is None and block.sync is None and not releases
    if silent or not writes:
        return
    own = _sync(thread)
    now = NOTHING
    if releases:
        now = _everything(thread)
        block.releases = True
    for domain in (block, GPU):
        by_fences = own.passed.get(domain, NOTHING)
        if block.sync is not None:
            by_fences = join(by_fences, block.sync.passed.get(domain, NOTHING))
        if now or by_fences:
            element = memory.releases.setdefault(key, {})
            old = element.get(domain, NOT_RELEASED)
            element[domain] = Released(
                join(join(old.here, own.fenced.get(domain, NOTHING)), now),
                join(old.by_fences, by_fences),
                join(old.by_instructions, now),
            )


def _read(thread, element, acquires):
    for domain in (thread.block, GPU):
        if domain not in element:
            continue
        released = element[domain]
        if acquires:
            thread.view = join(thread.view, released.here)
        sync = _sync(thread)
        if sync.polled.get(domain) is not released:
            sync.polled[domain] = released
            new = join(released.by_fences, released.by_instructions)
            sync.pending[domain] = join(sync.pending.get(domain, NOTHING), new)
            before = sync.passed_pending.get(domain, NOTHING)
            sync.passed_pending[domain] = join(before, released.by_fences)


def _pass_on(to, sync):
    """What a barrier passes on of a thread's Sync."""
    for domain, view in sync.passed.items():
        to.passed[domain] = join(to.passed.get(domain, NOTHING), view)
    for domain, view in sync.passed_pending.items():
        to.passed_pending[domain] = join(to.passed_pending.get(domain, NOTHING), view)
    for view in (sync.hint, *sync.pending.values()):
        to.hint = join(to.hint, view)


def barrier(block):
    """All threads of the block meet."""
    if not block.syncs:
        return
    if block.sync is None:
        block.sync = Sync()
    for sync in block.syncs:
        if sync.changed:
            _pass_on(block.sync, sync)
            sync.passed = {}
            sync.passed_pending = {}
            sync.hint = NOTHING
            sync.changed = False
    for thread in block.threads:
        block.view = join(block.view, thread.view)
        thread.view = NOTHING


def share(lanes):
    """Lanes meet in syncwarp."""
    if not any(t.sync or t.view for t in lanes):
        return
    view = NOTHING
    passed = Sync()
    for thread in lanes:
        view = join(view, thread.view)
        if thread.sync is not None:
            _pass_on(passed, thread.sync)
    for thread in lanes:
        thread.view = view
        sync = _sync(thread)
        sync.passed, sync.passed_pending = dict(passed.passed), dict(passed.passed_pending)
        sync.hint = passed.hint


def keep(old: dict, new: dict):
    """Add the reads of a finished block to those of earlier blocks.

    For each element, one read that later blocks cannot acquire is enough, because every later write
    races with it. A block without a fence releases nothing.
    """
    fenced = new and next(iter(new.values()))[0].thread.block.releases
    if not fenced:
        old.update(new)
        return
    for key, record in new.items():
        before = old.get(key)
        if before is None:
            old[key] = record
        elif before[0].thread.block.releases:
            if len(before) != 3:
                before = old[key] = *before[:2], _by_thread(before)
            before[2].update(_by_thread(record))


def _by_thread(record):
    return {access[0].thread: access for access in accesses(record)}


def accesses(record):
    """Return the (mark, site) pairs in a record of reads; memory.add_reader describes its
    layout."""
    if len(record) == 3:
        return record[2].values()
    if len(record) == 4:
        return (record[:2], record[2:])
    return (record,)
