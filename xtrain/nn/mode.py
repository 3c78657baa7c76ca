"""How a thread's ops run: recorded or not, with the kernels of training or of inference."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple


class Mode(NamedTuple):
    """How a thread's ops run.

    on: they are recorded for backward.
    inference: they may choose kernels that training does not use.
    again: backward runs them once more, recorded (recompute.py), so they must compute now as then.
    """

    on: bool = True
    inference: bool = False
    again: bool = False


class _Thread(threading.local):
    mode = Mode()


_thread = _Thread()


def current_mode() -> Mode:
    """Return how this thread's ops run."""
    return _thread.mode


@contextlib.contextmanager
def in_mode(mode: Mode) -> Iterator[None]:
    """Inside, this thread's ops run in this mode, whatever is set outside."""
    before = _thread.mode
    _thread.mode = mode
    try:
        yield
    finally:
        _thread.mode = before


@contextlib.contextmanager
def recording(on: bool, again: bool = False) -> Iterator[None]:
    """Inside, this thread's ops are recorded for backward, or not. again: see Mode."""
    with in_mode(_thread.mode._replace(on=on, again=again)):
        yield


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Inside, no op of this thread is recorded: no graph, no saved arrays.

    Also a decorator: `@no_grad()`.
    """
    with recording(False):
        yield


@contextlib.contextmanager
def inference() -> Iterator[None]:
    """Do no_grad, and let ops choose kernels that training does not use.

    For few rows these are products at the speed of memory; their results may differ in the last
    bits. Inside, no parameter is written.
    """
    with in_mode(Mode(on=False, inference=True)):
        yield


def is_inference() -> bool:
    """Return True inside `inference` and where nothing is recorded."""
    return _thread.mode.inference and not _thread.mode.on


def is_training() -> bool:
    """Return True where a backward follows: ops are recorded, now or when it runs them again."""
    return _thread.mode.on or _thread.mode.again
