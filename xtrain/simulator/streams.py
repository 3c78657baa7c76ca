"""The order of what a program hands to streams: kernels, copies, and accesses by the host.

The simulator executes everything at once. This module says what a GPU might have executed in
another order. Time is a vector clock with an entry per stream: `_clocks[s]` is what has ended before
the next operation of stream s begins, `_host` what the host knows to have ended. In order are

operations of one stream     as they were submitted
the default stream           with all that was submitted before and after it, on any stream
event.record, event.wait     what precedes the record, with what follows the wait
synchronize                  of a stream, an event or the device: what precedes it, with the host
a copy without a stream      with the host, and so is a copy to memory that is not pinned

Two operations that no order connects, of which one writes bytes that the other accesses, are a
finding (`stream`), and so is an access of the host to bytes of an operation that it does not know to
have ended. The host's accesses are seen in arrays made by cuda.pinned_array, cuda.mapped_array and
cuda.managed_array, by index, by functions of NumPy and by the methods of `HostArray`; not after
np.asarray, and not in arrays that `with cuda.pinned(x)` names.
"""

import contextlib
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import settings
from .errors import NUMBA, KernelError, Site, reported_kinds
from .unwritten import extent

DEFAULT = 0


class StreamError(KernelError):
    """Two operations on streams, or an operation and the host, access the same bytes in no
    order."""

    kind = "stream"


@dataclass(eq=False)
class Part:
    """Bytes that an operation accesses: addresses of elements of `size` bytes each, or one range.

    array: keeps the memory alive, so that its addresses are not used again.
    """

    array: np.ndarray
    first: int
    end: int
    elements: np.ndarray | None = None  # addresses in ascending order; None: all bytes
    size: int = 1

    def bytes(self) -> np.ndarray:
        """All addresses."""
        if self.elements is None:
            return np.arange(self.first, self.end)
        return (self.elements[:, None] + np.arange(self.size)).reshape(-1)

    def overlaps(self, other: "Part") -> bool:
        if self.end <= other.first or other.end <= self.first:
            return False
        if self.elements is None and other.elements is None:
            return True
        if self.elements is None:
            return other.overlaps(self)
        if other.elements is None:
            inside = np.searchsorted(self.elements, (other.first - self.size + 1, other.end))
            return bool(inside[1] > inside[0])
        if self.size == other.size:
            return bool(np.isin(self.elements, other.elements).any())
        return bool(np.isin(self.bytes(), other.bytes()).any())


def whole(array: np.ndarray) -> Part:
    """All bytes of an array."""
    return Part(array, *extent(array))


@dataclass(eq=False)
class Operation:
    """A kernel or a copy. time: its position in its stream."""

    what: str
    stream: int
    site: Site
    reads: list[Part] = field(default_factory=list)
    writes: list[Part] = field(default_factory=list)
    time: int = 0

    def __str__(self):
        on = "the default stream" if self.stream == DEFAULT else f"stream {self.stream}"
        return f"{self.what} on {on} at {self.site}"


_lock = threading.RLock()
_clocks: dict[int, dict[int, int]] = {}
_host: dict[int, int] = {}
_log: list[Operation] = []  # operations that the host does not know to have ended
_visible: list[tuple[int, int]] = []  # memory that the host and the device access


def reset() -> None:
    """Forget everything: a new program."""
    for state in (_clocks, _host, _log):
        state.clear()


def number(stream: Any) -> int:
    """Return the number of a stream; DEFAULT for the default stream in all its forms."""
    try:
        handle = int(stream)
    except (TypeError, ValueError):
        handle = id(stream)
    return DEFAULT if handle == 1 else handle


def _join(clock, other):
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def _before_next(stream) -> dict[int, int]:
    """Return the clock of a stream, with what precedes its next operation."""
    clock = _clocks.setdefault(stream, {})
    _join(clock, _host)
    if stream == DEFAULT:
        for other in _clocks.values():
            _join(clock, other)
    else:
        _join(clock, _clocks.get(DEFAULT, {}))
    return clock


def submit(stream, what: str, reads=(), writes=()) -> None:
    """An operation begins. Raises StreamError if it conflicts with another one that is in flight."""
    with _lock:
        now = Operation(what, number(stream), site(what), [*reads], [*writes])
        clock = _before_next(now.stream)
        for other in _log:
            if clock.get(other.stream, 0) < other.time:
                _compare(other, now)
        now.time = clock.get(now.stream, 0) + 1
        clock[now.stream] = now.time
        if now.stream == DEFAULT:  # only accesses of the host can come too early
            now.reads = [*filter(_is_visible, now.reads)]
            now.writes = [*filter(_is_visible, now.writes)]
        if now.reads or now.writes:
            _log.append(now)


def _compare(other, now):
    for mine, its in ((now.writes, [*other.reads, *other.writes]), (now.reads, other.writes)):
        for part in mine:
            if any(part.overlaps(p) for p in its):
                does = "writes" if mine is now.writes else "reads"
                text = (
                    f"streams in no order: {now} {does} {_name(part.array)}, which {other} accesses,"
                    " and nothing orders them: record an event after the first one, and let the "
                    "stream of the second one wait for it"
                )
                _report(text, (now.site, other.site))
                return


def _name(array) -> str:
    return f"an array of {array.dtype} and shape {array.shape}"


def _report(text, sites):
    active = settings.current()
    if reported_kinds(active.allow, active.enable).covers("stream", sites):
        raise StreamError(text, sites)


def host_waits(stream) -> None:
    """The host knows that everything in a stream has ended."""
    with _lock:
        _host_knows(_before_next(number(stream)))


def host_waits_for_all() -> None:
    """cuda.synchronize"""
    with _lock:
        for clock in [*_clocks.values()]:
            _host_knows(clock)


def host_waits_for(clock) -> None:
    """event.synchronize"""
    with _lock:
        _host_knows(clock)


def _host_knows(clock):
    _join(_host, clock)
    _log[:] = [op for op in _log if _host.get(op.stream, 0) < op.time]


@contextlib.contextmanager
def callback(stream):
    """Inside, what precedes in the stream has ended, as in a callback of this stream."""
    with _lock:
        before = dict(_host), [*_log]
        host_waits(stream)
        try:
            yield
        finally:
            _host.clear()
            _host.update(before[0])
            _log[:] = before[1]


def recorded(stream) -> dict[int, int]:
    """event.record: the clock of the event."""
    with _lock:
        return dict(_before_next(number(stream)))


def wait(stream, clock) -> None:
    """event.wait: the stream's next operations follow what precedes the event."""
    with _lock:
        _join(_before_next(number(stream)), clock)


def host_accesses(array: np.ndarray, writes: bool) -> None:
    """The host accesses bytes. Raises StreamError if an operation in flight does so, too."""
    if not _log:
        return
    part = whole(array)
    with _lock:
        for op in [*_log]:
            touched = [*op.writes, *op.reads] if writes else op.writes
            if any(part.overlaps(p) for p in touched):
                here = site("host")
                does = "writes to" if writes else "reads"
                text = (
                    f"access of the host before synchronize: the host {does} {_name(array)} at "
                    f"{here} while {op} may still be in flight: call synchronize() of the stream, "
                    "or cuda.synchronize(), first"
                )
                _report(text, (here, op.site))
                return


# ----------------------------------------------------------------------------- what operations access
def copied(stream, target: np.ndarray, source: np.ndarray, on_host=()) -> None:
    """A copy. on_host: which of the two are host arrays. With a stream it is in flight until the
    host waits, if the host's array is pinned."""
    asynchronous = number(stream) != DEFAULT
    sides: list[tuple[Part, ...]] = []
    for array in (source, target):
        part = whole(array)
        host = any(array is a for a in on_host)
        if host and not _is_visible(part):
            sides.append(())
        else:
            sides.append((part,))
    to_host = any(target is a for a in on_host)
    submit(stream, "copy to the host" if to_host else "copy to the device", *sides)
    if not asynchronous or (to_host and not sides[1]):
        host_waits(stream)


def launched(stream, launch) -> None:
    """A kernel has run."""
    reads: list[Part] = []
    writes: list[Part] = []
    arrays = launch.given_arrays()
    for memory in launch.memories:
        range_of = Part(np.empty(0), memory.base, memory.base + memory.nbytes)
        if memory.nbytes == 0 or (number(stream) == DEFAULT and not _is_visible(range_of)):
            continue
        array = next(a for a in arrays if memory.base <= extent(a)[0] < memory.base + memory.nbytes)
        for found, keys in ((reads, memory.accessed - memory.written), (writes, memory.written)):
            if keys:
                elements = np.sort(np.fromiter(keys, np.int64, len(keys)))
                elements = elements * memory.granule + memory.base
                ends = int(elements[0]), int(elements[-1]) + memory.granule
                found.append(Part(array, *ends, elements, memory.granule))
    submit(stream, f"kernel {launch.name}", reads, writes)


def make_visible(raw: np.ndarray) -> None:
    """The host and the device access this memory."""
    _visible.append(extent(raw))


def forget(first: int) -> None:
    """The memory that begins here has been freed."""
    _visible[:] = [v for v in _visible if v[0] != first]


def _is_visible(part) -> bool:
    return any(first < part.end and part.first < end for first, end in _visible)


def site(what: str) -> Site:
    """Return the line of the program that calls numba.cuda now."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno, 0, frame.f_code.co_name, what)


def _is_library(frame) -> bool:
    name = frame.f_globals.get("__name__", "")
    inside = name.startswith((f"{__package__}.", "numpy.", "contextlib"))
    return inside or bool(NUMBA.search(frame.f_code.co_filename))


# ----------------------------------------------------------------------------- arrays of the host
class HostArray(np.ndarray):
    """An array that operations in flight may access: pinned, mapped or managed memory."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if not isinstance(item, np.ndarray):
            host_accesses(_element(self, index), False)
        elif item.base is None or not np.may_share_memory(_plain(item), _plain(self)):
            host_accesses(_plain(self), False)
        return item

    def __setitem__(self, index, value):
        if isinstance(value, HostArray):
            host_accesses(_plain(value), False)
        target = _plain(self)[index]
        if not isinstance(target, np.ndarray):
            target = _element(self, index)
        elif not np.may_share_memory(target, _plain(self)):
            target = _plain(self)
        host_accesses(target, True)
        _plain(self)[index] = _plain(value)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **keywords):
        for array in filter(_is_host, inputs):
            host_accesses(_plain(array), False)
        if out is not None:
            for array in filter(_is_host, out):
                host_accesses(_plain(array), True)
            keywords["out"] = tuple(map(_plain, out))
        result = getattr(ufunc, method)(*map(_plain, inputs), **keywords)
        if out is None or result is None:
            return result
        return out[0] if len(out) == 1 else out

    def __array_function__(self, function, kinds, args, keywords):
        if function is np.copyto and _is_host(args[0]):
            host_accesses(_plain(args[0]), True)
            args = _plain(args[0]), *args[1:]
        return function(*_seen(args), **_seen(keywords))


def _element(array, index) -> np.ndarray:
    """One element as an array, which has an address."""
    index = index if isinstance(index, tuple) else (index,)
    return _plain(array)[(*index, None)]


def _is_host(x) -> bool:
    return isinstance(x, HostArray)


def _plain(x):
    return x.view(np.ndarray) if isinstance(x, HostArray) else x


def _seen(value):
    """Return the arguments of a function of NumPy that reads them."""
    if isinstance(value, HostArray):
        host_accesses(_plain(value), False)
        return _plain(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_seen, value))
    if isinstance(value, dict):
        return {key: _seen(v) for key, v in value.items()}
    return value


def _method(name, writes):
    original = getattr(np.ndarray, name)

    def method(self, *args, **keywords):
        host_accesses(_plain(self), writes)
        return original(_plain(self), *args, **keywords)

    return method


_READING = """
argmax argmin argsort astype copy cumsum dot flatten item nonzero repeat round take tobytes tolist
"""
for _called in _READING.split():
    setattr(HostArray, _called, _method(_called, False))
for _called in ("fill", "sort"):
    setattr(HostArray, _called, _method(_called, True))
