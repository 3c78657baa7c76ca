"""Run what a reader wrote: read its source, call it, run its kernel. This module holds no answers.

A Runner has the function in this process, as in a notebook. process.Runner has it in a separate process, as
`xtrain.lesson check` does; both have the same methods. An Attempt (attempt.py) compares what they return.
"""

import contextlib
import inspect
import linecache
import signal
import sys
import textwrap
import threading
import traceback
import tracemalloc
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xtrain import simulator
from xtrain.simulator import KernelError, Stepper, observe
from xtrain.simulator.errors import Site
from xtrain.simulator.launch import previous
from xtrain.simulator.observers import ATOMIC, READ, WRITE, Observer
from xtrain.simulator.source import translate

from .reading import (
    LIBRARY,
    cast_constants,
    home_of,
    is_empty,
    library_name,
    unwritten_helper,
)
from .trace import Access, tracing

SECONDS = 20  # time limit of an attempt; a solution takes at most three seconds


class Wrong(Exception):
    """An error in an attempt. The message is written for the author of the attempt."""


@dataclass(frozen=True)
class Facts:
    """What the source of an attempt shows before it runs.

    kind: the name of its type. source: None if there is none. kernel: is it a @cuda.jit kernel? of_library: a name of
    the library that it uses, or "". unwritten: a function that it calls and that still has its gap, or "".
    """

    kind: str
    function: bool
    source: str | None = None
    empty: bool = False
    kernel: bool = False
    of_library: str = ""
    parameters: tuple[str, ...] = ()
    unwritten: str = ""


@dataclass(frozen=True)
class Ran:
    """What a kernel did. By parameter, in the shape of its array:

    wrote: was the element written? writers (..., 4): block and thread that wrote it last; -1: none did
    wide, atomics: [(site, line)] where float64 becomes float32, and of atomic additions of floats
    global_atomics: how many atomics on global memory. accesses: of a Trace, if it was requested
    """

    wrote: dict[str, np.ndarray]
    writers: dict[str, np.ndarray]
    wide: list[tuple[str, str]]
    atomics: list[tuple[str, str]]
    global_atomics: int
    accesses: list[Access] | None


class Runner:
    """work: what the reader's file or cell has under the exercise's name. allow: see attempt.Exercise."""

    def __init__(self, work: Any, name: str, allow: frozenset[str] = frozenset()):
        self.work, self.name, self.allow = work, name, allow
        self.refused: list[Wrong] = []  # calls into the library
        self.stepper: Stepper | None = None  # of the kernel that ran last

    def of_rank(self, rank: int) -> "Runner":
        """The runner of a rank. Here all ranks are threads of this process."""
        return self

    def facts(self) -> Facts:
        function = getattr(self.work, "py_func", self.work)
        kind = type(self.work).__name__
        if not isinstance(function, types.FunctionType):
            return Facts(kind, False)
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except OSError:
            return Facts(kind, True)
        library = library_name(function, self.allow) or ""
        if home_of(function).split(".")[0] in LIBRARY:
            library = home_of(function)
        parameters = tuple(inspect.signature(function).parameters)
        kernel = hasattr(self.work, "py_func")
        unwritten = unwritten_helper(function)
        return Facts(kind, True, source, is_empty(source), kernel, library, parameters, unwritten)

    def read(self, question: Callable) -> Any:
        """-> question(the reader's function). question: a function of a module without answers."""
        return question(self.work)

    def call(self, *args, **options) -> Any:
        with self.guarded():
            return self.work(*args, **options)

    def call_measured(self, *args, **options) -> tuple[Any, int]:
        """-> what call returns, and the most bytes in use at once during the call."""
        tracemalloc.start()
        try:
            return self.call(*args, **options), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    @contextlib.contextmanager
    def guarded(self):
        """Call functions of the reader in this context. Raises Wrong for a call into the library and for exit()."""
        file = getattr(getattr(self.work, "__code__", None), "co_filename", None)
        try:
            with _watched(self, file), np.errstate(all="ignore"):
                yield
            if self.refused:  # the reader's code has caught it
                raise self.refused[0]
        except SystemExit:
            raise Wrong(f"{self.name} calls exit(): end a function with `return`.") from None

    def line_of(self, error) -> str:
        """ " (in `y = x / 0`)": the innermost line of the traceback in the reader's file."""
        file = getattr(getattr(self.work, "__code__", None), "co_filename", None)
        lines = [f.line for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        return f" (in `{lines[-1].strip()}`)" if lines and lines[-1] else ""

    def run(self, grid, block, args: tuple, shared: int, trace: bool, steps: bool) -> Ran:
        """Run the reader's kernel in the simulator. Arrays change in place. Raises KernelError.

        trace: record the accesses to memory. steps: record the run to step through it
        """
        self.stepper = Stepper() if steps else None
        accesses: list[Access] | None = None
        with contextlib.ExitStack() as contexts:
            notes = contexts.enter_context(_noted(self.work))
            if self.stepper is not None:
                contexts.enter_context(observe(self.stepper))
            if trace:
                accesses = contexts.enter_context(tracing()).accesses
            simulator.run(self.work, grid, block, *args, shared=shared)
        names = inspect.signature(self.work.py_func).parameters
        arrays = {n: a for n, a in zip(names, args) if isinstance(a, np.ndarray)}
        file = self.work.py_func.__code__.co_filename
        return Ran(
            {name: _written(a) for name, a in arrays.items()},
            {name: notes.writers_of(a) for name, a in arrays.items()},
            [_shown(site) for site in notes.wide if site.file == file],
            [_shown(site) for site in notes.atomics],
            notes.global_atomics,
            accesses,
        )


def load(code: str, file: str) -> types.ModuleType:
    """Run code as a new module. file: its name in error reports, which also show its lines."""
    module = types.ModuleType(Path(file).stem)
    module.__file__ = file
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    exec(compile(code, file, "exec"), module.__dict__)
    return module


def load_attempt(text: str, file: str, name: str, allow: frozenset[str]) -> Runner:
    """Run the text of a reader's file. -> the runner of its function. Raises Wrong if there is none, and errors of the file."""
    try:
        module = load(text, file)
    except SystemExit:
        raise Wrong(f"{file} calls exit(): remove it, or nothing of the file is checked.") from None
    if not hasattr(module, name):
        raise Wrong(f"{file} has no {name}.")
    return Runner(getattr(module, name), name, allow)


def _shown(site: Site) -> tuple[str, str]:
    return str(site), linecache.getline(site.file, site.line).strip()


def addresses(a: np.ndarray) -> np.ndarray:
    """The address of every element of an array, in its shape."""
    offset = np.zeros((), int)
    if a.ndim:
        offset = np.tensordot(np.array(a.strides), np.indices(a.shape), 1)
    return a.__array_interface__["data"][0] + offset.astype(np.int64)


def _written(a: np.ndarray) -> np.ndarray:
    """Which elements of `a` the kernel that ran last has written: bool array of the shape of a."""
    at = addresses(a)
    done = np.zeros(a.shape, bool)
    for _, base, granule, keys in previous.last[0]:
        done |= np.isin((at - base) // granule, list(keys)) & (at >= base)
    return done


# ----------------------------------------------------------------------------- watching it
@contextlib.contextmanager
def _watched(runner: Runner, file: str | None):
    """Raises Wrong if a library function that the exercise does not allow is called, directly or indirectly.

    An allowed function may call any other: then only calls from the reader's file count.
    """
    before = sys.getprofile()
    allow = runner.allow

    def watch(frame, event, argument):
        if event != "call" or frame.f_code.co_name in allow:
            return
        home = frame.f_globals.get("__name__", "")
        if not home.startswith("xtrain.") or home.startswith(("xtrain.simulator", "xtrain.lesson")):
            return
        if allow and (frame.f_back is None or frame.f_back.f_code.co_filename != file):
            return
        called = frame.f_code.co_name
        refusal = f"{runner.name} calls the library's {called}: write it yourself here."
        runner.refused.append(Wrong(refusal))
        raise runner.refused[0]  # which ends the watching

    set_profile(watch)
    try:
        yield
    finally:
        set_profile(before)


def set_profile(function):
    """sys.setprofile. process.py refuses it to all other functions."""
    sys.setprofile(function)


@dataclass
class Notes(Observer):
    """What a kernel did.

    wide: the Sites where float64 becomes float32. atomics: those of atomic additions of floats.
    writers: address in global memory -> (block, thread) of the last write there
    """

    wide: list = field(default_factory=list)
    atomics: list = field(default_factory=list)
    writers: dict = field(default_factory=dict)
    global_atomics: int = 0

    def access(self, thread, array, k, site, how, value):
        if how == READ:
            return
        if (
            how == WRITE
            and _computed(value)
            and array.dtype == np.float32
            and site not in self.wide
        ):
            self.wide.append(site)
        if how == ATOMIC and array.dtype.kind == "f" and value in ("add", "sub"):
            self.atomics += [site] * (site not in self.atomics)
        if array.memory.kind == "global":
            self.global_atomics += how == ATOMIC
            address = array.memory.base + (array.bias + k * array.span) * array.memory.granule
            self.writers[address] = *map(int, thread.blockIdx), thread.index

    def writers_of(self, a: np.ndarray) -> np.ndarray:
        """Block and thread that wrote each element last: (*a.shape, 4) int64, -1 where none did."""
        at = addresses(a)
        of = [self.writers.get(x, (-1, -1, -1, -1)) for x in at.flat]
        return np.array(of, np.int64).reshape(*at.shape, 4)


def _computed(value):
    """Is it the float64 of a computation? 0.0 and -math.inf are constants, which the compiler turns into float32."""
    return type(value) is np.float64 and value != 0 and np.isfinite(value)


@contextlib.contextmanager
def _noted(work):
    """-> Notes, which the kernels that run in this context fill."""
    notes = Notes()
    scope = {}
    casts = {}

    def noted_cast(x):
        if _computed(x):
            frame = sys._getframe(1)
            site = Site(frame.f_code.co_filename, frame.f_lineno, 0, frame.f_code.co_name, "")
            line = linecache.getline(site.file, site.line)
            if site not in notes.wide and float(x) not in cast_constants(line):
                notes.wide.append(site)
        return np.float32(x)

    noted_cast.scalar, noted_cast.dtype = np.float32, np.dtype(np.float32)
    with contextlib.suppress(KernelError):  # reported when the kernel runs
        scope = translate(work.py_func).function.__globals__
    casts = {k: f for k, f in scope.items() if getattr(f, "scalar", None) is np.float32}
    scope.update(dict.fromkeys(casts, noted_cast))
    try:
        with observe(notes):
            yield notes
    finally:
        scope.update(casts)


@contextlib.contextmanager
def time_limit():
    """Raises TimeoutError after SECONDS of CPU time (other programs must not shorten it), if the system has such a timer
    and this is the main thread.
    """
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def stop(number, frame):
        raise TimeoutError(
            f"It did not end within {SECONDS} seconds: is there a loop whose condition never changes, or far more work than is needed?"
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
