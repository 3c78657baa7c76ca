"""Hooks for what looks on while kernels run: traces of memory traffic, recordings for the stepper. Nothing is patched.

with observe(MyObserver()):
    run(kernel, grid, block, *args)
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from .early import EarlyThread
from .errors import KernelError
from .memory import Array
from .thread import Thread

READ, WRITE, ATOMIC = "read", "write", "atomic"


class Observer:
    """Derive from it and override what you need."""

    def begin(self, block: Any) -> None:
        """A block is about to run. Blocks that wait for each other take turns."""

    def end(self, block: Any) -> None:
        """A block has ended."""

    def failed(self, block: Any, error: KernelError) -> None:
        """A block has ended the launch with this error. Its other threads have run on to where they wait."""

    def access(self, thread: Thread, array: Array, k: int, site: Any, how: str, value: Any) -> None:
        """thread is about to access element k of array.flat at `site`, before the access is checked.

        how: READ, WRITE or ATOMIC.  value: what it reads or stores; the name of the atomic.
        """

    def meet(self, threads: Sequence[Thread], name: str, site: Any) -> None:
        """These threads leave a barrier or a warp function together."""


_observers: list[Observer] = []


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Inside, the observer is called for every launch that begins in the simulator."""
    _observers.append(observer)
    try:
        yield observer
    finally:
        _observers.remove(observer)


def current() -> tuple[Observer, ...]:
    """The observers of a launch that begins now."""
    return tuple(_observers)


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
        k = a.locate(index)
        if k is not None:
            self._tell(a, k, site, WRITE, value)
        return super().store(a, index, value, site)

    def _atomic(self, site, a, index, name, change):
        k = a.locate(index)
        if k is not None:
            self._tell(a, k, site, ATOMIC, name)
        return super()._atomic(site, a, index, name, change)

    def _tell(self, a, k, site, how, value):
        for observer in self.block.launch.observers:
            observer.access(self, a, k, site, how, value)


class _ObservedThread(_Observed, Thread):
    __slots__ = ()


class _ObservedEarlyThread(_Observed, EarlyThread):
    __slots__ = ()
    after_wait = _ObservedThread


def observed(kind: type[Thread]) -> type[Thread]:
    """The class of threads of an observed launch. kind: Thread or EarlyThread"""
    return _ObservedEarlyThread if kind is EarlyThread else _ObservedThread
