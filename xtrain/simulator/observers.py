"""Hooks that observe running kernels: traces of memory traffic, recordings for the stepper. Nothing
is patched.

with observe(MyObserver()):
    run(kernel, grid, block, *args)
"""

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from .arrays import Array
from .early import EarlyThread
from .errors import KernelError
from .thread import Thread

READ = "read"
WRITE = "write"
ATOMIC = "atomic"


class Observer:
    """Derive from it and override what you need."""

    def begin(self, block: Any) -> None:
        """A block is about to run. Blocks that wait for each other take turns."""

    def end(self, block: Any) -> None:
        """A block has ended."""

    def failed(self, block: Any, error: KernelError) -> None:
        """A block has ended the launch with this error. Its other threads have run on to where they
        wait."""

    def access(self, thread: Thread, array: Array, k: int, site: Any, how: str, value: Any) -> None:
        """thread is about to access element k of array.flat at `site`, before the access is
        checked.

        how: READ, WRITE or ATOMIC.  value: what it reads or stores; the name of the atomic.
        """

    def added(self, thread: Thread, array: Array, k: int, site: Any, old: Any, value: Any) -> None:
        """thread has added a value to element k of array.flat, which was `old`, by an atomic."""

    def finished(self, launch: Any) -> None:
        """All blocks of the launch have ended."""

    def meet(self, threads: Sequence[Thread], name: str, site: Any) -> None:
        """These threads leave a barrier or a function of their warp or warpgroup together."""

    def touched(
        self, thread: Thread, first: int, end: int, site: Any, how: str, engine: str
    ) -> None:
        """thread is about to access words first to end (of 4 bytes) of addressed shared memory,
        before the access is checked.

        how: READ or WRITE.
        engine: "" if the thread does it; "TMA" or "wgmma" for a part of the asynchronous copy or
        product that begins here and ends in `completed`.
        """

    def completed(
        self, block: Any, engine: str, thread: Thread | None, site: Any = None, barrier: Any = None
    ) -> None:
        """The oldest asynchronous access of a kind has ended: without a thread a copy to shared
        memory, whose bytes `barrier` counts; with one a copy from shared memory, for which this
        thread waits at `site`, or a product of the thread's warp.
        """

    def signalled(
        self, thread: Thread, barrier: Any, site: Any, arrivals: int, nbytes: int
    ) -> None:
        """A thread changes how many arrivals and bytes an mbarrier still expects: mbarrier_init,
        mbarrier_arrive_expect_tx, mbarrier_arrive."""

    def waited(self, thread: Thread, barrier: Any, site: Any, phase: int) -> None:
        """thread leaves its wait for this phase of an mbarrier. -1: the phase before the first."""


class _Observers(threading.local):
    def __init__(self):
        self.list: list[Observer] = []


_observers = _Observers()  # of each thread of the host


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Inside, the observer is called for every launch that this thread of the host begins in the
    simulator."""
    _observers.list.append(observer)
    try:
        yield observer
    finally:
        _observers.list.remove(observer)


def current() -> tuple[Observer, ...]:
    """Return the observers of a launch that begins now."""
    return tuple(_observers.list)


class _Observed:
    """The part of an observed thread that tells of its accesses."""

    __slots__ = ()
    block: Any

    def load(self, a, index, site):
        if type(a) is Array:
            k = a.locate(index)
            if k is not None:
                self._tell(a, k, site, READ, a.flat[k])
        return super().load(a, index, site)

    def load_2d(self, a, i, j, site):
        return self.load(a, (i, j), site)

    def store(self, a, index, value, site):
        if type(a) is Array:
            k = a.locate(index)
            if k is not None:
                self._tell(a, k, site, WRITE, value)
        return super().store(a, index, value, site)

    def load_registers(self, a, n, site):
        return [self.load(a, j, site) for j in range(n)]

    def store_registers(self, a, values, site):
        for j, value in enumerate(values):
            self.store(a, j, value, site)

    def load_elements(self, a, i, n, site):
        return [self.load(a, i + j, site) for j in range(n)]

    def store_elements(self, a, i, values, site):
        for j, value in enumerate(values):
            self.store(a, i + j, value, site)

    def _atomic(self, site, a, index, name, change, **how):
        k = a.locate(index)
        if k is not None:
            self._tell(a, k, site, ATOMIC, name)
        return super()._atomic(site, a, index, name, change, **how)

    def atomic_add(self, site, a, index, value, **how):
        old = super().atomic_add(site, a, index, value, **how)
        self._added(a, index, site, old, value)
        return old

    def atomic_sub(self, site, a, index, value, **how):
        old = super().atomic_sub(site, a, index, value, **how)
        self._added(a, index, site, old, -value)
        return old

    def _added(self, a, index, site, old, value):
        k = a.locate(index)
        if k is not None:
            for observer in self.block.launch.observers:
                observer.added(self, a, k, site, old, a.dtype.type(value))

    def _tell(self, a, k, site, how, value):
        for observer in self.block.launch.observers:
            observer.access(self, a, k, site, how, value)


class _ObservedThread(_Observed, Thread):
    __slots__ = ()


class _ObservedEarlyThread(_Observed, EarlyThread):
    __slots__ = ()
    after_wait = _ObservedThread


def observed(kind: type[Thread]) -> type[Thread]:
    """Return the class of threads of an observed launch. kind: Thread or EarlyThread."""
    if kind is EarlyThread:
        return _ObservedEarlyThread
    return _ObservedThread


def width(instruction, size):
    """Return how many elements an access moves: 4 for the intrinsic load4 of float32, else 1."""
    n = re.fullmatch(r"(?:load|store)(?:_words)?(\d+)", instruction)
    if n:
        return min(int(n[1]), 16 // size)
    return 1
