"""Calls of a user's function: one after the other or, of an `async def`, all at the same time; their
time limit, and what is said when one fails.

A call is interrupted by a signal (SIGALRM), which also reaches a regular expression that backtracks
without end, a sleep and a wait for another process. Not interrupted are code in C that checks no
signals, and a function that catches every exception in a call of another one that does so, too.
Without that signal (Windows), and elsewhere than on the main thread, there is no limit. A function
that sets an alarm replaces it.

Threads and processes that a call has started may never end: then they end with the program
(cli.py). A call cannot move the program to another folder, nor leave behind a copy of it (os.fork).
"""

import asyncio
import contextlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..cli import expect_hanging_threads
from ..errors import FunctionError
from ..options import described, find_function
from ..training.preemption import StopNow

TICK = 0.2  # seconds between two looks at the clock
GRACE = 1.0  # seconds that calls at the same time may take to end after their limit


class CallError(FunctionError):
    """A call that failed: the message names the function and the prompt."""


class TooLong(BaseException):
    """The call has reached its time limit. (Not an Exception: a user's function may catch those.)"""


class Interrupted(BaseException):
    """The run must stop and cannot wait for the call."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call.   where: file and line of what it is about."""

    where: str
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """seconds: that a call may take; 0: no limit.   overdue: must the run stop at once?"""

    seconds: float = 0.0
    overdue: Callable[[], bool] = lambda: False


class UserFunction:
    """The function MODULE:FUNCTION that an option names. Modules in the current folder are found
    too. Raises UserError if there is no such function.

    kind: what messages call it.   option, example: for the message.
    """

    kind = "function"
    option = ""
    example = ""

    def __init__(self, name: str):
        self.name = name
        self.function = find_function(self.option, name, self.example)
        call = getattr(self.function, "__call__", None)  # noqa: B004 (of an object, it may be async)
        self.is_async = any(map(inspect.iscoroutinefunction, (self.function, call)))

    def results(self, calls: Sequence[Call], limits: Limits) -> Iterator[Any]:
        """Yield what each call returns, or its CallError. Raises Interrupted."""
        expect_hanging_threads()
        if self.is_async:
            yield from self._together(calls, limits)
        else:
            for call in calls:
                yield self._alone(call, limits)

    def failure(self, what: str, where: str) -> CallError:
        """Return the error of a call. what: it did."""
        return CallError(f"the {self.kind} {self.name} {what} for {where}: fix the function")

    def _alone(self, call: Call, limits: Limits) -> Any:
        try:
            with contained(limits):
                return whole(self.function(*call.arguments, **call.named))
        except BaseException as error:  # asyncio.CancelledError does not derive from Exception
            return self._failed(error, call, limits)

    def _together(self, calls: Sequence[Call], limits: Limits) -> list[Any]:
        async def guarded(call: Call) -> Any:
            try:
                return whole(await self.function(*call.arguments, **call.named))
            except BaseException as error:
                return self._failed(error, call, limits)

        async def limited(call: Call) -> Any:
            task = asyncio.ensure_future(guarded(call))
            done, _ = await asyncio.wait([task], timeout=limits.seconds or None)
            if done:
                return task.result()
            task.cancel()
            return self._failed(TooLong(), call, limits)

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*map(limited, calls))

        later = Limits(limits.seconds and limits.seconds + GRACE, limits.overdue)
        try:
            with contained(later):  # a call that does not await
                return run_all(all_of_them)
        except TooLong as error:
            return [self._failed(error, call, limits) for call in calls]

    def _failed(self, error: BaseException, call: Call, limits: Limits) -> CallError:
        """Return the error of a call. Raises Interrupted, and Ctrl-C, instead of those."""
        if isinstance(error, Interrupted) or is_ctrl_c(error):
            raise error
        if isinstance(error, TooLong):
            what = f"took more than {limits.seconds:g} s (--reward-timeout)"
        elif isinstance(error, SystemExit):
            what = f"called sys.exit({error.code!r})"
        else:
            what = f"raised {described(error)}"
        failure = self.failure(what, call.where)
        failure.__cause__ = error
        return failure


def run_all(calls: Callable[[], Coroutine[Any, Any, list[Any]]]) -> list[Any]:
    """Return what asyncio.run returns; in a notebook, where a loop is running, in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(calls())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(calls())).result()


def whole(found: Any) -> Any:
    """Return what a call has returned; a generator or a map computes when it is read."""
    if isinstance(found, Iterator):
        return list(found)
    return found


def is_ctrl_c(error: BaseException) -> bool:
    """Return True for a KeyboardInterrupt that is a signal, not the function's own."""
    by_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, StopNow) or (by_default and isinstance(error, KeyboardInterrupt))


@contextlib.contextmanager
def contained(limits: Limits) -> Iterator[None]:
    """Limit the time inside; afterwards, return to the current folder. Another process that leaves
    this ends."""
    process = os.getpid()
    folder = None
    with contextlib.suppress(OSError):  # it may be gone
        folder = os.getcwd()
    try:
        with time_limit(limits):
            yield
    except SystemExit as stop:
        if os.getpid() != process:  # the status that the function's own wait expects
            os._exit(stop.code if isinstance(stop.code, int) else stop.code is not None)
        raise
    finally:
        if os.getpid() != process:
            os._exit(1)
        if folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(folder)


@contextlib.contextmanager
def time_limit(limits: Limits) -> Iterator[None]:
    """Raise TooLong inside when the time is over, Interrupted once overdue() is true. If it is
    caught there, the next one is raised twice, the second time where the first one is caught."""
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return
    start = time.monotonic()
    inside = True
    raised = False
    trace_before = sys.gettrace()

    def tick(number, frame):
        if inside and limits.seconds and time.monotonic() - start >= limits.seconds:
            interrupt(TooLong, frame)
        if inside and limits.overdue():
            interrupt(Interrupted, frame)

    def interrupt(kind, frame):
        nonlocal raised

        def at_next_line(frame, event, argument):
            if event == "line":
                raise kind
            return at_next_line

        if raised:  # and caught: raise again at the next line of the function, which handles it
            while frame is not None and frame.f_code.co_filename != __file__:
                frame.f_trace = at_next_line
                frame = frame.f_back
            sys.settrace(lambda *_: None)
        raised = True
        raise kind

    handler = signal.signal(signal.SIGALRM, tick)
    before, interval = signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    try:
        try:
            yield
        finally:
            inside = False
    finally:  # also if a tick has come before that statement; the next one is TICK later
        inside = False
        if raised:
            sys.settrace(trace_before)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before:  # another timer was running
            left = max(before - (time.monotonic() - start), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
