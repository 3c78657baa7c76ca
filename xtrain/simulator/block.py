"""A launch and its blocks: which thread runs, who waits for whom, what memory they share.

The threads of a block run one after the other, each up to the next place where it waits. When none
can run, those go on whose warp function has all its lanes, else all together if they stand at one
barrier. Else: a deadlock.
"""

import contextlib
import gc
import inspect
import math

import numpy as np

from . import errors
from .early import EarlyThread
from .engines import Engines
from .errors import CollectiveError, DeadlockError, KernelError, Site, UninitializedError
from .intrinsics import WARPGROUP, Waiting
from .memory import Mark, Memory, dense_array, extent, global_arrays, poisoned
from .scalars import Int32, typed
from .source import BLOCK_BARRIERS, translate
from .thread import Dim3, Thread
from .warp import run_collective

MAX_THREADS = 1024  # of a block, on every GPU; no more than MAX_Z of them along z
MAX_Z = 64
MAX_GRID_YZ = 65535  # blocks along y and along z; along x there may be 2**31 - 1
STATIC_SHARED = 48 * 1024  # bytes that cuda.shared.array(shape, dtype) may take in one block
SHARED = 227 * 1024  # bytes of shared memory a block can have in all; compute capability 9.0


def _known(dtype) -> bool:
    """Not an array of Python objects, of swapped bytes, of long double."""
    return dtype.isnative and dtype.char not in "OgG"


class Launch:
    """What all blocks of one launch share."""

    # Of the launch that ended last, and of those that may still run beside it: (name, base, granule, keys) of what they wrote;
    # their arguments, kept alive; first and last + 1 byte of tensors that their copies (kernels/_hopper.py) read or wrote -> did
    # they write?
    last = (), (), {}

    def __init__(self, kernel, grid: Dim3, block: Dim3, args, shared: int, overlap: bool = False):
        given = inspect.signature(kernel.py_func).bind(*args).arguments
        self.name = kernel.py_func.__name__
        for name, value in given.items():
            if isinstance(value, (list, dict, set, str)):
                kind = type(value).__name__
                raise KernelError(
                    f"{self.name}: {name} is a {kind}: a kernel takes arrays, numbers and tuples"
                )
            if isinstance(value, np.ndarray) and value.dtype.names:
                raise KernelError(f"{self.name}: {name} is a record array, those are not simulated")
            if isinstance(value, np.ndarray) and not _known(value.dtype):
                raise KernelError(
                    f"{self.name}: {name} is an array of {value.dtype}: Numba has none"
                )
        self.grid, self.block, self.dynamic, self.overlap = grid, block, int(shared), overlap
        self.before, self.given_before, self.copies_before = Launch.last
        self.needed = [extent(a) for a in self.given_before if isinstance(a, np.ndarray)] + [
            *self.copies_before
        ]
        self._check_size(shared)
        arrays = global_arrays([a for a in args if isinstance(a, np.ndarray)])
        self.memories = list(dict.fromkeys(a.memory for a in arrays))
        self.given, arrays = args, iter(arrays)
        self.args = [next(arrays) if isinstance(a, np.ndarray) else typed(a) for a in args]
        self.translated = translate(kernel.py_func)
        if self.translated.device_only is not None:
            raise self.translated.device_only
        x, y, z = map(int, block)
        self.positions = [Dim3(i, j, k) for k, j, i in np.ndindex(z, y, x)]
        self.epoch = 0  # counts the intervals between block barriers, over all blocks
        self.constants = {}
        self.stored = {}  # address of a tensor -> where copies of this launch have stored to it
        self.copies = {}
        self.hasty = False  # lets the next one start before it has waited: early.py

    def _check_size(self, shared):
        self.threads = math.prod(map(int, self.block))
        text = None
        if self.threads > MAX_THREADS:
            text = f"a block of {self.threads} threads, a GPU takes {MAX_THREADS}"
        elif self.block.z > MAX_Z:
            text = f"a block {self.block} of threads, a GPU takes {MAX_Z} along z"
        elif max(self.grid.y, self.grid.z) > MAX_GRID_YZ:
            text = f"a grid of {self.grid} blocks, a GPU takes {MAX_GRID_YZ} along y and z: count the long axis in x"
        elif self.dynamic > SHARED:
            text = f"{shared} bytes of shared memory, a block has {SHARED}"
        if text:
            raise KernelError(f"{self.name}: {text}")

    def run(self):
        x, y, z = map(int, self.grid)
        with _rare_collections():
            for k, j, i in np.ndindex(z, y, x):
                Block(self, Dim3(i, j, k)).run()
                for memory in self.memories:
                    memory.end_of_block()
        written = [
            (self.name, m.base, m.granule, {*m.old_writes, *m.old_atomics}) for m in self.memories
        ]
        given, copies = list(self.given), dict(self.copies)
        if self.hasty:
            written += self.before
            given += self.given_before
            copies = {**self.copies_before, **copies}
        Launch.last = written, given, copies

    def constant(self, values: np.ndarray):
        """The array in constant memory that a kernel sees for a NumPy array from outside."""
        if id(values) not in self.constants:
            self.constants[id(values)] = global_arrays([values])[0]
            self.constants[id(values)].writeable = False
        return self.constants[id(values)]

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch


@contextlib.contextmanager
def _rare_collections():
    """Threads and records are many and stay for long: Python's collector would look at them again and again."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 50_000) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Block:
    def __init__(self, launch, position):
        self.launch, self.position = launch, position
        self.epoch = launch.next_epoch()
        self.shared = {}  # id of the Site of cuda.shared.array -> Array
        self.static_bytes = 0
        self.dynamic = None  # (Memory, bytes) once a kernel asks for it
        self._engines = None  # see engines.py
        # Epochs with a threadfence; element of an atomic -> what was learnt there: releases.py
        self.fenced, self.acquired = [], {}
        kind = EarlyThread if launch.overlap else Thread
        self.threads = [kind(self, i, at) for i, at in enumerate(launch.positions)]
        self.waited = False  # for the kernel before: early.py
        self.warps = [self.threads[i : i + 32] for i in range(0, len(self.threads), 32)]

    # ------------------------------------------------------------------------- scheduling
    def run(self):
        function, args = self.launch.translated.function, self.launch.args
        if self.launch.translated.waits:
            for thread in self.threads:
                thread.generator = function(thread, *args)
            ready = self.threads
            while ready:
                _go(ready, _resume)
                ready = self._answer()
        else:
            _go(self.threads, function, *args)
        if self.launch.overlap and not self.waited:
            raise KernelError(
                f"{self.launch.name}, block {self.position}: it may begin before the kernel before it has ended, and "
                "never calls wait_for_previous"
            )
        if self._engines is not None:
            self._engines.finish()
        for thread in self.threads:  # shadows keep marks, marks keep threads: no more than that
            thread.mark = thread.generator = None
        self.threads = self.warps = self.shared = self.dynamic = self._engines = None
        self.acquired = None

    engines_in_use = property(lambda self: self._engines is not None)

    @property
    def engines(self) -> Engines:
        if self._engines is None:
            self._engines = Engines(self)
        return self._engines

    def _answer(self):
        """-> the threads that may go on, their replies set. None of them: the block is done."""
        ready = []
        for warp in self.warps:
            waiting = [t for t in warp if t.request and _of_warp(t.request[0])]
            if waiting:
                ready += run_collective(warp, waiting)
        ready = ready or self._ask()
        if ready:
            return ready
        waiting = [t for t in self.threads if t.request]
        if waiting:
            self._barrier(waiting)
        return waiting

    def _ask(self):
        """-> the threads that what they wait for lets go on; copies complete when there are none."""
        asking = [t for t in self.threads if t.request and isinstance(t.request[0], Waiting)]
        while asking:
            ready = [t for t in asking if not t.request[0].collective and _guarded(t, _poll, t)]
            for first in sorted({t.index // WARPGROUP * WARPGROUP for t in asking}):
                group = self.threads[first : first + WARPGROUP]
                requests = [t.request for t in group]
                if all(r and isinstance(r[0], Waiting) and r[0].collective for r in requests):
                    ready += _guarded(group[0], _warpgroup, group)
            if ready or not self.engines.advance():
                return ready
        return []

    def _barrier(self, waiting):
        """All threads stand at the same call of the same barrier, come there along the same lines."""
        name, path = waiting[0].request[0], _path(waiting[0])
        if (
            name not in BLOCK_BARRIERS
            or len(waiting) < len(self.threads)
            or any(_path(t) != path for t in waiting)
        ):
            raise self._deadlock()
        votes = [_vote(t, vote) for t in waiting for vote in t.request[2]]
        reply = _REPLIES[name](votes)
        self.epoch = self.launch.next_epoch()
        for thread in waiting:
            thread.mark = Mark(thread, self.epoch, thread.mark.clock)
            thread.reply = reply
        if self.engines_in_use:
            self.engines.meet(waiting)

    def _deadlock(self):
        places, sites = {}, []
        for thread in self.threads:
            if thread.request is not None:
                name, site, args = thread.request
                masked = args and _of_warp(name)
                mask = f" with mask {int(args[0]):#x}" if masked and not callable(name) else ""
                calls = "".join(f", called at {line}" for line in _lines(thread)[-2::-1])
                place = f"wait in {site.what}{mask} at {site}{calls}"
            elif thread.left is not None and thread.left.function == self.launch.name:
                site, place = thread.left, f"have returned at {thread.left}"
            else:
                site, place = None, "have come to the end of the kernel"
            places.setdefault(place, []).append(thread)
            sites.append(site)
        groups = [
            f"    {len(group)} threads ({errors.ranges(t.index for t in group)}) {place}"
            for place, group in places.items()
        ]
        return DeadlockError(
            f"deadlock in {self.launch.name}, block {self.position}: its {len(self.threads)} threads do not all "
            "come to the same barrier or warp function\n"
            + "\n".join(groups)
            + (self.engines.report() if self.engines_in_use else ""),
            tuple(site for site in dict.fromkeys(sites) if site),
        )

    # ------------------------------------------------------------------------- shared memory
    def shared_array(self, thread, site, shape, dtype):
        """The array that the line `site` declares; shape (0,): over the block's dynamic shared memory."""
        if id(site) not in self.shared:
            new = (
                self._dynamic_array(dtype)
                if shape == (0,)
                else self._static_array(thread, site, shape, dtype)
            )
            self.shared[id(site)] = new
        return self.shared[id(site)]

    def _static_array(self, thread, site, shape, dtype):
        flat = poisoned(int(np.prod(shape)), dtype)
        self.static_bytes += flat.nbytes
        if self.static_bytes > STATIC_SHARED or self.static_bytes + self.launch.dynamic > SHARED:
            raise KernelError(
                f"too much shared memory {errors.where(thread, site)}: {self.static_bytes} bytes in arrays of fixed "
                f"shape up to {site}, and {self.launch.dynamic} dynamic; a block has {STATIC_SHARED} of the first "
                f"kind (then use cuda.shared.array(0, ...) and shared=) and {SHARED} in all",
                (site,),
            )
        return dense_array(Memory("shared", dtype.itemsize), flat, shape)

    def _dynamic_array(self, dtype):
        """All dynamic arrays of a block begin at the same byte."""
        if self.dynamic is None:
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
    if not isinstance(vote, np.integer):
        raise errors.no_integer(thread, thread.request[1], vote)
    return bool(vote)


# ----------------------------------------------------------------------------- one thread
def _go(threads, function, *args):
    """Each of them goes on to where it waits."""
    others = iter(threads)
    try:
        for thread in others:
            _guarded(thread, function, thread, *args)
    except UninitializedError as error:
        if error.read is None:  # bytes that a copy or a matrix product reads
            raise
        for thread in others:  # does one of them write what was read too early?
            with contextlib.suppress(Exception):
                _guarded(thread, function, thread, *args)
        _, memory, key, *_ = error.read
        found = errors.uninitialized(*error.read, later=memory.writes.get(key))
        raise found.with_traceback(error.__traceback__) from None


def _resume(thread):
    thread.request = None
    with contextlib.suppress(StopIteration):
        thread.request = thread.generator.send(thread.reply)


def _of_warp(name) -> bool:
    return name not in BLOCK_BARRIERS and not isinstance(name, Waiting)


def _poll(thread):
    asked, site, args = thread.request
    thread.reply = None
    return asked.function(thread, site, *args)


def _warpgroup(threads):
    """A function that 128 threads call together. -> those threads"""
    heads = {(t.request[0], t.request[1]) for t in threads}
    if len(heads) > 1 or len(threads) < WARPGROUP:
        sites = tuple(sorted({site for _, site in heads}))
        raise CollectiveError(
            f"{sites[0].what} {errors.where(threads[0], sites[0])}: the 128 threads of a warpgroup must call the same "
            f"function: they stand at {' and '.join(map(str, sites))}",
            sites,
        )
    ((head, site),) = heads
    replies = head.function(threads, [site] * len(threads), [t.request[2] for t in threads])
    for thread, reply in zip(threads, replies):
        thread.reply = reply
    return threads


def _guarded(thread, function, *args):
    """A Python exception in a kernel becomes a KernelError with place and thread."""
    try:
        return function(*args)
    except KernelError:
        raise
    except Exception as error:
        site, trace = None, error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_varnames[:1] == ("_t",):
                site = Site(code.co_filename, trace.tb_lineno, 0, code.co_name, "")
            trace = trace.tb_next
        if site is None:
            raise
        kind, place = type(error).__name__, errors.where(thread, site)
        text = str(error)
        if kind == "UnboundLocalError":
            text += (
                ": the branch or loop that sets it was not taken, and a GPU goes on with any value"
            )
        raise KernelError(f"{kind} {place}: {thread} at {site}: {text}", (site,)) from error


def _generators(thread):
    """The kernel's generator, then those of the device functions it is in."""
    generator = thread.generator
    while generator is not None:
        yield generator
        generator = generator.gi_yieldfrom


def _path(thread):
    return [(g.gi_code, g.gi_frame.f_lasti) for g in _generators(thread)]


def _lines(thread):
    """Where each of them stands."""
    sites = (
        Site(g.gi_code.co_filename, g.gi_frame.f_lineno, 0, "", "") for g in _generators(thread)
    )
    return [str(site) for site in sites]
