"""A block: the scheduling of its threads, their barriers and their shared memory.

The threads of a block run one after the other, each up to the next place where it waits. When no
thread can run, the warps whose warp function has all its lanes resume; if there are none, all
threads resume together if they have reached the same barrier; if there are none, the threads that
wait in a loop for a change of memory run again.
"""

import numpy as np

from . import deadlocks, errors, observers, releases
from .arrays import dense_array, new_array, poisoned
from .early import EarlyThread
from .engines import Engines
from .errors import CollectiveError, DeadlockError, KernelError, Site, UninitializedError
from .intrinsics import WARPGROUP, Waiting
from .memory import Mark, Memory
from .releases import Sync
from .scalars import Int32
from .source import BLOCK_BARRIERS, GRID_SYNC, SPIN
from .thread import Thread
from .unset import plain
from .warp import run_collective

STATIC_SHARED = 48 * 1024  # bytes of cuda.shared.array(shape, dtype) in one block
# turns of the threads that wait in loops before other blocks run, although something changes
SPIN_ROUNDS = 50
# after these the other threads do not run on: an exception, such as that of a time limit, or a loop
# without end
ENDING = ("error", "deadlock")
SHARED = 227 * 1024  # bytes of shared memory per block in total; compute capability 9.0


class Block:
    """One block: its threads, its barriers and its shared memory."""

    def __init__(self, launch, position):
        self.launch, self.position = launch, position
        self.epoch = launch.next_epoch()
        self.shared: dict = {}  # id of the Site of cuda.shared.array -> Array
        self.static_bytes = 0
        self.dynamic: tuple[Memory, np.ndarray] | None = None  # created at the first use
        self._engines: Engines | None = None
        # releases.py: what all threads have acquired, what they have passed on at barriers, the
        # Syncs of the threads; has it released anything to other blocks?
        self.view: dict = {}
        self.sync: Sync | None = None
        self.syncs: list[Sync] = []
        self.releases = False
        kind: type[Thread] = EarlyThread if launch.overlap else Thread
        if launch.observers:
            kind = observers.observed(kind)
        self.threads = [kind(self, i, at) for i, at in enumerate(launch.positions)]
        self.waited = False  # for the previous kernel: early.py
        self.eager = False  # an intrinsic runs: unwritten values are reported when they are read
        self.running = self._run()
        self.at_grid = False  # all its threads wait in grid.sync()
        self.spun = None  # what _changed saw last
        self.progress = True  # something happened since the block was parked
        self.warps = [self.threads[i : i + 32] for i in range(0, len(self.threads), 32)]

    # ------------------------------------------------------------------------- scheduling
    def advance(self) -> bool:
        """Run until the block has ended (True) or until only another block can let it continue
        (False). Raises KernelError."""
        self.progress = False
        return next(self.running, True)

    def _run(self):
        function = self.launch.translated.function
        args = self.launch.args
        for observer in self.launch.observers:
            observer.begin(self)
        if self.launch.translated.waits:
            for thread in self.threads:
                thread.generator = function(thread, *args)
            ready = self.threads
            rounds = 0
            while ready:
                self._run_each(ready, _resume)
                ready = self._resumable()
                while self.at_grid:
                    yield False
                    ready = [t for t in self.threads if t.request]
                while not ready and (spinning := deadlocks.spinning(self)):
                    rounds += 1
                    if self._lets_others_run(spinning, rounds):
                        yield False
                    ready = spinning
                    for thread in ready:
                        thread.reply = True  # the loop continues
        else:
            self._run_each(self.threads, function, *args)
        if self.launch.overlap and not self.waited:
            raise KernelError(
                f"{self.launch.name}, block {self.position}: it may start before the previous "
                "kernel has ended, but it never calls wait_for_previous"
            )
        if self._engines is not None:
            self._engines.finish()
        for observer in self.launch.observers:
            observer.end(self)
        # Shadows keep marks and marks keep threads alive: free everything else.
        for thread in self.threads:
            del thread.mark, thread.generator
            thread.view = thread.sync = None
        del (
            self.threads,
            self.warps,
            self.shared,
            self.dynamic,
            self._engines,
            self.view,
            self.sync,
            self.syncs,
        )

    def _lets_others_run(self, spinning, rounds) -> bool:
        """Do other blocks run before the threads of this one that wait in loops?"""
        schedule = self.launch.schedule
        parks = schedule is not None and schedule.parks()
        return not self._changed(spinning) or rounds % SPIN_ROUNDS == 0 or parks

    def _run_each(self, threads, function, *args):
        """Run each thread up to the next place where it waits."""
        others = iter(self.launch._in_order(threads))
        try:
            try:
                for thread in others:
                    function(thread, *args)
            except Exception as error:
                _locate(thread, error)
                raise
        except KernelError as error:
            error.thread = thread.index
            # None: something else, or an asynchronous copy or a matrix product reads it
            if isinstance(error, UninitializedError):
                read = error.read
            else:
                read = None
            # Does one of the others write the element that was read too early? An observer sees
            # what they do anyway.
            if read is not None or (self.launch.observers and error.kind not in ENDING):
                collects = self.launch.collects
                self.launch.collects = True
                for other in others:
                    try:
                        _guarded(other, function, other, *args)
                    except KernelError as later:
                        if later.kind in ENDING:
                            break
                self.launch.collects = collects
            if read is None:
                raise
            found = _explained(error)
            found.thread = error.thread
            raise found.with_traceback(error.__traceback__) from None
        if self.launch.collects:
            for key, known in self.launch.found.items():
                if getattr(known, "read", None) is not None:
                    self.launch.found[key] = _explained(known)

    engines_in_use = property(lambda self: self._engines is not None)

    @property
    def engines(self) -> Engines:
        """The block's asynchronous engines (engines.py), created at the first use."""
        if self._engines is None:
            self._engines = Engines(self)
        return self._engines

    def _resumable(self):
        """Return the threads that may resume, with their replies set. An empty list: the block is
        done."""
        waiting = [t for t in self.threads if t.request]
        if {t.request[0] for t in waiting} <= BLOCK_BARRIERS:
            ready = []
        else:
            ready = self._resumable_at_once()
        if ready:
            self.progress = True
            return ready
        if waiting and self._barrier(waiting):
            self.progress = True
            return waiting
        return []

    def _resumable_at_once(self):
        """Return the threads that resume from warp functions and polled requests."""
        ready = []
        last = []
        self.eager = True
        for warp in self.warps:
            waiting = [t for t in warp if t.request and deadlocks.of_warp(t.request[0])]
            if waiting and getattr(waiting[0].request[0], "last", False):
                last.append((warp, waiting))
            elif waiting:
                ready += run_collective(warp, waiting)
        ready = ready or self._poll_waiting(copies=not last)
        for warp, waiting in last if not ready else ():
            ready += run_collective(warp, waiting)
        self.eager = False
        return ready

    def pass_grid(self):
        """All blocks have reached grid.sync(): the threads may resume."""
        self.at_grid = False
        self.progress = True
        self._meet([t for t in self.threads if t.request])

    def _changed(self, spinning) -> bool:
        """Has one of these threads made progress since the last call?"""
        states = self.launch.changes, [(t, t.state_at_spin) for t in spinning]
        changed = states != self.spun or any(t.state_at_spin[1] is None for t in spinning)
        self.spun = states
        self.progress = self.progress or changed
        return changed

    def _poll_waiting(self, copies):
        """Return the polled and warpgroup-wide requests that are satisfied. copies: if there are
        none, a copy completes first."""
        polling = [t for t in self.threads if t.request and isinstance(t.request[0], Waiting)]
        while polling:
            ready = [t for t in polling if not t.request[0].collective and _guarded(t, _poll, t)]
            for first in sorted({t.index // WARPGROUP * WARPGROUP for t in polling}):
                group = self.threads[first : first + WARPGROUP]
                requests = [t.request for t in group]
                if all(r and isinstance(r[0], Waiting) and r[0].collective for r in requests):
                    ready += _guarded(group[0], _warpgroup, group)
            if ready or not copies or not self.engines.advance():
                return ready
        return []

    def _barrier(self, waiting) -> bool:
        """Release the barrier. Returns False if threads wait in a loop, which they may leave later.

        Raises DeadlockError unless all threads wait at the same call with the same call stack.
        Threads that have exited count as arrived.
        """
        path = _path(waiting[0])
        name, *_ = waiting[0].request
        if name not in BLOCK_BARRIERS or not all(_is_at(t, path) for t in waiting):
            if any(t.request[0] == SPIN for t in waiting):
                return False
            raise self.deadlock()
        if len(waiting) < len(self.threads):
            site = waiting[0].request[1]
            self.launch.report("exited_threads", (site,), lambda: self.deadlock("exited_threads"))
        if name == GRID_SYNC:
            self._check_cooperative(waiting[0].request[1])
            # thread 0 tells the other blocks, after a barrier
            self.at_grid = self.threads[0].request is not None
            if not self.at_grid:
                raise self.deadlock()
            return False
        votes = [_vote(t, vote) for t in waiting for vote in t.request[2]]
        self._meet(waiting, _REPLIES[name](votes))
        return True

    def _check_cooperative(self, site):
        launch = self.launch
        if launch.cooperative is not None and launch.blocks > launch.cooperative:
            raise KernelError(
                f"{launch.name}: {launch.blocks} blocks meet at {site}, but {launch.cooperative} of "
                f"{launch.threads} threads are resident at once: launch at most as many as "
                "max_cooperative_grid_blocks says",
                (site,),
            )

    def _meet(self, threads, reply=None):
        """Let threads resume that wait at a barrier."""
        releases.barrier(self)
        self.epoch = self.launch.next_epoch()
        for thread in threads:
            thread.mark = Mark(thread, self.epoch, thread.mark.clock)
            thread.reply = reply
        if self.engines_in_use:
            self.engines.meet(threads)
        for observer in self.launch.observers:
            observer.meet(threads, *threads[0].request[:2])

    def deadlock(self, kind="deadlock") -> DeadlockError:
        """Return the report that says where each group of threads waits."""
        return deadlocks.report(self, kind)

    # ------------------------------------------------------------------------- shared memory
    def shared_array(self, thread, site, shape, dtype):
        """Return the array that the line `site` declares. Shape (0,): a view of the block's dynamic
        shared memory."""
        if id(site) not in self.shared:
            if shape == (0,):
                new = self._dynamic_array(dtype)
            else:
                new = self._static_array(thread, site, shape, dtype)
            self.shared[id(site)] = new
        return self.shared[id(site)]

    def _static_array(self, thread, site, shape, dtype):
        new = new_array("shared", shape, dtype, self.launch.translated.views)
        self.static_bytes += new.flat.nbytes
        if self.static_bytes > STATIC_SHARED or self.static_bytes + self.launch.dynamic > SHARED:
            raise KernelError(
                f"too much shared memory {errors.where(thread, site)}: {self.static_bytes} static "
                f"bytes up to {site} and {self.launch.dynamic} dynamic bytes; the limits are "
                f"{STATIC_SHARED} static bytes and {SHARED} in total: use dynamic shared memory, "
                "cuda.shared.array(0, ...) and shared=, for more",
                (site,),
            )
        return new

    def _dynamic_array(self, dtype):
        """All dynamic arrays of a block start at the same byte."""
        if self.dynamic is None:
            if self.launch.translated.views:
                granule = 1
            else:
                granule = self.launch.translated.granule or 1
            self.dynamic = Memory("shared", granule), poisoned(self.launch.dynamic, np.uint8)
        memory, raw = self.dynamic
        flat = raw[: len(raw) // dtype.itemsize * dtype.itemsize].view(dtype)
        return dense_array(memory, flat, (len(flat),))


_REPLIES = {
    "syncthreads": lambda votes: None,
    "syncthreads_or": lambda votes: Int32(any(votes)),
    "syncthreads_and": lambda votes: Int32(all(votes)),
    "syncthreads_count": lambda votes: Int32(sum(votes)),
}


def _vote(thread, vote) -> bool:
    site = thread.request[1]
    vote = plain(vote, site.what, site)
    if not isinstance(vote, np.integer):
        raise errors.no_integer(thread, thread.request[1], vote)
    return bool(vote)


# ----------------------------------------------------------------------------- one thread
def _explained(error):
    """Return an uninitialized read with the thread that writes the element later, without a barrier
    in between, if there is one."""
    by, memory, key, site, index = error.read
    later = memory.writes.get(key)
    explained = error
    if later is not None and later[0].thread is not by:
        explained = errors.uninitialized(by, memory, key, site, index, later)
        explained.count = error.count
    explained.read = None
    return explained


def _resume(thread):
    try:
        thread.request = thread.generator.send(thread.reply)
    except StopIteration:
        thread.request = None


def _poll(thread):
    waiting, site, args = thread.request
    thread.reply = None
    return waiting.function(thread, site, *args)


def _warpgroup(threads):
    """Run a function that the 128 threads of a warpgroup call together. Returns the threads."""
    heads = {(t.request[0], t.request[1]) for t in threads}
    if len(heads) > 1 or len(threads) < WARPGROUP:
        sites = tuple(sorted({site for _, site in heads}))
        raise CollectiveError(
            f"{sites[0].what} {errors.where(threads[0], sites[0])}: the 128 threads of a "
            "warpgroup must call the same function, but they wait at "
            f"{' and '.join(map(str, sites))}",
            sites,
        )
    ((head, site),) = heads
    replies = head.function(threads, [site] * len(threads), [t.request[2] for t in threads])
    for thread, reply in zip(threads, replies):
        thread.reply = reply
    for observer in threads[0].block.launch.observers:
        observer.meet(threads, site.called, site)
    return threads


def _guarded(thread, function, *args):
    """Call function(*args) for a thread that waits."""
    try:
        return function(*args)
    except Exception as error:
        _locate(thread, error)
        raise


def _locate(thread, error):
    """Raise a KernelError with the thread and the line for a Python exception in the kernel."""
    if isinstance(error, KernelError):
        return
    site = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_varnames[:1] == ("_t",):
            site = Site(code.co_filename, trace.tb_lineno, 0, code.co_name, "")
        trace = trace.tb_next
    if site is None:
        return
    kind = type(error).__name__
    place = errors.where(thread, site)
    text = str(error)
    if kind == "UnboundLocalError":
        text += ": the branch or loop that sets it was not taken; on a GPU its value is undefined"
    raise KernelError(f"{kind} {place}: {thread} at {site}: {text}", (site,)) from error


def _path(thread):
    return [(g.gi_code, g.gi_frame.f_lasti) for g in deadlocks.generators(thread)]


def _is_at(thread, path) -> bool:
    """_path(thread) == path"""
    generator = thread.generator
    for code, position in path:
        if (
            generator is None
            or generator.gi_frame.f_lasti != position
            or generator.gi_code is not code
        ):
            return False
        generator = generator.gi_yieldfrom
    return generator is None
