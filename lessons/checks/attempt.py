"""Judge what a reader wrote: run it, compare it, and say in one or two sentences what is wrong.

An exercise is a function that gets an Attempt and puts it through its cases:

    @exercise("1.1", "add_kernel", first_step="which element is this thread's?")
    def add_kernel(e):
        for n in (1, 32, 33, 100):
            a, b, y = e.normal(n), e.normal(n), e.blank(n)
            e.run(-(-n // 32), 32, y, a, b)
            e.same("y", y, a + b, {"y holds a - b: look at the sign": a - b})

The first thing that is wrong raises Wrong and ends the attempt. The order in which things are looked at:
nothing written yet, a call into the library, a KernelError of the simulator, a known mistake, a wrong value.
"""

import contextlib
import inspect
import linecache
import re
import signal
import sys
import textwrap
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numba import cuda

from xtrain import simulator
from xtrain.simulator import KernelError, SimArray, sim
from xtrain.simulator.block import Launch
from xtrain.simulator.errors import Site
from xtrain.simulator.source import translate
from xtrain.simulator.thread import Thread

from .reading import GAP, home_of, is_empty, library_name
from .trace import traced

SECONDS = 20  # an attempt that takes longer never ends: a solution takes two at most

HINTS = {
    "RaceError": "Ask which thread may touch this element, and whether a barrier stands between the two accesses.",
    "DeadlockError": "All threads of a block must come to the same barrier: none inside an `if` that some skip, none after a `return` that some take.",
    "RaceError between blocks": "Blocks run in no order and cannot wait for each other: every element that is written belongs to one block.",
    "OutOfBoundsError": "A grid rarely fits the data exactly: threads past the end must do nothing.",
    "UninitializedError": "Shared and local memory hold garbage until somebody writes them. Who writes this element, and is there a barrier before the read?",
    "CollectiveError": "A warp function needs whole warps of 32 threads, and every lane that its mask names.",
}


class Wrong(Exception):
    """What is wrong with an attempt, in words for its author."""


@dataclass(frozen=True)
class Exercise:
    """number: "1.1"   name: of the function that the reader writes   judge: puts an Attempt through its cases

    first_step: what to ask oneself when nothing is written yet. hints: instead of HINTS, by name of the error (see _hint).
    allow: names of library functions that may be called. kernel: it is a @cuda.jit kernel.
    """

    number: str
    name: str
    judge: Callable
    first_step: str
    hints: dict[str, str]
    allow: frozenset[str]
    kernel: bool


@dataclass(frozen=True)
class Verdict:
    passed: bool
    text: str

    def __str__(self):
        """Long lines broken at spaces, lines of source left alone."""
        lines = []
        for line in self.text.splitlines():
            indent = line[: len(line) - len(line.lstrip())]
            if len(indent) < 8:
                lines += textwrap.wrap(
                    line,
                    92,
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            else:
                lines.append(line)
        return "\n".join(lines)


EXERCISES: dict[str, Exercise] = {}


def exercise(number: str, name: str, first_step: str, hints=None, allow=(), kernel=True):
    """Decorator: enter a judge in EXERCISES. See Exercise."""

    def enter(judge):
        EXERCISES[number] = Exercise(
            number, name, judge, first_step, dict(hints or {}), frozenset(allow), kernel
        )
        return judge

    return enter


def judge(exercise: Exercise, work) -> Verdict:
    """work: the function that the reader wrote."""
    title = f"{exercise.number} {exercise.name}"
    attempt = Attempt(exercise, work)
    try:
        attempt.look()
        with _time_limit(), _wide_values(attempt.work) as attempt.wide:
            exercise.judge(attempt)
        attempt.narrow()
    except (Wrong, TimeoutError) as wrong:
        text = str(wrong)
    except Exception as error:  # not by the attempt itself, but by what it handed back
        where = _line_of(error, attempt.work)
        text = str(
            attempt.wrong(
                f"{type(error).__name__} in the check of what you returned: {error}{where}"
            )
        )
    else:
        cases = f"{attempt.cases} cases" if attempt.cases != 1 else "1 case"
        safe = ", no race, no access out of bounds" if exercise.kernel else ""
        return Verdict(True, f"{title}: correct. {cases}{safe}.")
    if GAP in attempt.source and not attempt.empty:
        text += f"\nThe line `# {GAP}` is still there: is this the finished attempt?"
    return Verdict(False, f"{title}: not yet.\n{textwrap.indent(text, '  ')}")


@dataclass
class Attempt:
    """One function under examination. The methods below are all that an exercise needs."""

    exercise: Exercise
    work: Callable
    cases: int = 0
    where: str = ""  # of the case that is running: "n = 33, grid 2, block 32"
    source: str = ""
    empty: bool = False
    wide: list = field(default_factory=list)  # where float64 becomes float32: Site
    names: dict = field(default_factory=dict)  # id of an argument -> the reader's name for it
    written: list = field(default_factory=list)  # by kernels, in this case: see Launch.last
    _seed: int = field(default=0)

    # ------------------------------------------------------------------------- before it runs
    def look(self):
        """Raises Wrong when the gap is still empty or the library does the work."""
        name = self.exercise.name
        function = getattr(self.work, "py_func", self.work)
        if not isinstance(function, types.FunctionType):
            raise Wrong(f"{name} must be a function, this is a {type(self.work).__name__}.")
        try:
            self.source = textwrap.dedent(inspect.getsource(function))
        except OSError:
            raise Wrong(
                f"There is no source for {name}: define it in a cell or a file, not in a string."
            ) from None
        self.empty = is_empty(self.source)
        if self.empty:
            raise Wrong(
                f"Nothing is written yet: fill the gap `# {GAP}`.\nFirst step: {self.exercise.first_step}"
            )
        if self.exercise.kernel and not hasattr(self.work, "py_func"):
            raise Wrong(f"{name} is a plain Python function: write @cuda.jit above it.")
        found = library_name(function, self.exercise.allow)
        if home_of(function).split(".")[0] == "xtrain":
            found = home_of(function)
        if found:
            raise Wrong(
                f"{name} uses {found}, which is the library's own: here you write it yourself.\n"
                + f"(Allowed here: {', '.join(sorted(self.exercise.allow))}.)\n"
                * bool(self.exercise.allow)
                + "Compare with the library afterwards; the end of the lesson shows its source."
            )

    def narrow(self):
        """Raises Wrong when the values are right, but a kernel computes in float64."""
        mine = getattr(self.work, "py_func", self.work).__code__.co_filename
        for site in self.wide:
            if site.file == mine:
                line = linecache.getline(site.file, site.line).strip()
                raise Wrong(
                    f"The values are right, but what becomes float32 at {site} was computed in float64:\n    {line}\n"
                    "A literal such as 0.5, an integer and a quotient of integers make float64 of what they are combined "
                    "with: write float32(0.5), float32(C)."
                )

    # ------------------------------------------------------------------------- inputs
    def normal(self, *shape, mean=0.3, scale=1.0, dtype=np.float32) -> SimArray:
        """Random numbers, others at each call, the same at each attempt. Their mean is not zero."""
        self._seed += 1
        random = np.random.default_rng([self._seed, *map(ord, self.exercise.number)])
        return sim((random.standard_normal(shape) * scale + mean).astype(dtype))

    def blank(self, *shape, dtype=np.float32) -> SimArray:
        """Memory for an output, filled with NaN (integers: with bytes 0x7F)."""
        new = sim(np.empty(shape, dtype))
        if new.dtype.kind == "f":
            new.fill(np.nan)
        else:
            new.view(np.uint8).fill(0x7F)
        return new

    # ------------------------------------------------------------------------- run it
    def run(self, grid, block, *args, shared=0, case="", hints=None, trace=False):
        """The reader's kernel in the simulator. case: what to say of it beside grid and block.

        hints: by name of the error (see _hint), for this case; before those of the exercise. trace: return its
        accesses, a Trace.
        """
        self.case(f"{case}, grid {grid}, block {block}".lstrip(", "))
        parameters = list(inspect.signature(self.work.py_func).parameters)
        if len(parameters) != len(args):
            raise Wrong(
                f"{self.exercise.name} is called with {len(args)} arguments: keep the first line as it was given."
            )
        self.names = {id(a): name for name, a in zip(parameters, args)}
        try:
            run = traced if trace else simulator.run
            result = run(self.work, grid, block, *args, shared=shared)
        except KernelError as error:
            hint = _hint(error, (hints or {}, self.exercise.hints, HINTS))
            raise self.wrong(f"{error}" + (f"\n{hint}" if hint else "")) from None
        self.written += Launch.last[0]
        return result

    def name(self, a) -> str:
        """What the reader calls this argument of the kernel that ran last: a trace knows arrays by that."""
        return self.names[id(a)]

    def wrote(self, a) -> np.ndarray:
        """Which elements of `a` this case's kernels have written. bool, shape of a."""
        offset = np.tensordot(np.array(a.strides), np.indices(a.shape), 1) if a.ndim else 0
        address = a.__array_interface__["data"][0] + offset
        done = np.zeros(a.shape, bool)
        for _, base, granule, keys in self.written:
            done |= np.isin((address - base) // granule, list(keys)) & (address >= base)
        return done

    def divided(self, trace, a, threads):
        """Wrong when one thread does the work of many, or each does all. threads: for how many `a` has elements"""
        reads = trace.of(self.name(a), write=False)
        busy = len({(r.block, r.thread) for r in reads})
        self.need(
            2 * busy > threads,
            f"The values are right, but {busy} of {threads} threads read {self.name(a)}: all of them share the work.",
        )
        self.need(
            len(reads) <= 3 * a.size,
            f"The values are right, but {self.name(a)} is read {len(reads) // a.size} times as a whole: each thread reads its own part, "
            "and what the threads have is brought together.",
        )

    def call(self, *args, case="", **options):
        """-> what the reader's Python function returns."""
        if case:
            self.case(case)
        return self.ask(self.work, *args, **options)

    def ask(self, function, *args, **options):
        """-> what a function returns that the reader wrote, or that came back from one."""
        try:
            with _watched(self.exercise), np.errstate(all="ignore"):
                return function(*args, **options)
        except Wrong:
            raise
        except Exception as error:
            hint = _hint(error, [self.exercise.hints])
            raise self.wrong(
                f"{type(error).__name__}: {error}{_line_of(error, self.work)}"
                + (f"\n{hint}" if hint else "")
            ) from None

    def case(self, where: str):
        """A new case begins."""
        self.cases += 1
        self.where, self.written = where, []

    # ------------------------------------------------------------------------- compare
    def several(self, got, *names) -> tuple:
        """What the reader's function has returned, as many things as there are names."""
        want = f"Return {len(names)} things: `return {', '.join(names)}`."
        self.need(got is not None, f"Nothing is returned. {want}")
        self.need(
            isinstance(got, (tuple, list)),
            f"One thing is returned, of type {type(got).__name__}. {want}",
        )
        self.need(len(got) == len(names), f"{len(got)} things are returned. {want}")
        return tuple(got)

    def wrong(self, text: str) -> Wrong:
        return Wrong(f"With {self.where}:\n{textwrap.indent(text, '  ')}" if self.where else text)

    def need(self, ok: bool, text: str):
        if not ok:
            raise self.wrong(text)

    def same(self, name: str, got, want, mistakes=None, rtol=1e-5, atol=1e-6):
        """got equals want, element by element, to |got - want| <= atol + rtol |want|.

        mistakes: {what to say: the array that this mistake would give, or a function of got -> bool}
        """
        kept = got if self.written and isinstance(got, SimArray) else None
        got, want = self._arrays(name, got, want)
        fits = np.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
        if fits.all():
            return
        for text, sign in (mistakes or {}).items():
            if _looks_like(sign, got, rtol, atol):
                raise self.wrong(f"{self._first(name, got, want, fits, kept)}\n{text}")
        raise self.wrong(self._first(name, got, want, fits, kept))

    def _arrays(self, name, got, want):
        self.need(got is not None, f"Nothing is returned: end with `return {name}`.")
        self.need(
            hasattr(got, "shape") or np.isscalar(got),
            f"{name} is {type(got).__name__}, not an array.",
        )
        got, want = np.asarray(got), np.asarray(want)
        self.need(
            got.shape == want.shape,
            f"{name} has shape {got.shape}, it must have shape {want.shape}.",
        )
        return got, want

    def _first(self, name, got, want, fits, kept):
        at = tuple(int(i) for i in np.argwhere(~fits)[0])
        index = f"[{', '.join(map(str, at))}]" if at else ""
        value = got[at]
        nothing = kept is not None and not self.wrote(kept)[at]
        many = f"{int((~fits).sum())} of {fits.size} elements differ" if fits.size > 1 else ""
        is_ = "was never written" if nothing else f"is {value:.7g}"
        return f"{name}{index} {is_}; expected {want[at]:.7g}." + (f" ({many})" if many else "")


# ----------------------------------------------------------------------------- helpers
NUMBER = "In this line a number stands where an array is needed: has it an index too many?"
WHOLE = "A kernel computes with single elements: every array needs its index, as in y_n[i]."
ADVICE = (  # what is said of an error that has all these words
    (("'Dim3'",), "cuda.blockIdx, blockDim and threadIdx have three parts each: write cuda.blockIdx.x."),
    (("'list' object",), "A kernel has numbers and arrays, no lists: a few numbers go into cuda.local.array(n, float32)."),
    (("object has no attribute 'locate'",), NUMBER),
    (("object is not subscriptable",), NUMBER),
    (("does not support item",), NUMBER),
    (("'Array'", "unsupported operand"), WHOLE),
    (("'Array'", "not iterable"), WHOLE),
    (("is not callable",), "A number is called as if it were a function: leave the () after it away."),
    (("cannot be interpreted as an integer",), "An index is an integer: a quotient by / is not, one by // is."),
    (("lanes hold float", "int64"), "A sum that begins with the integer 0 has no one type: it begins with float32(0.0)."),
    (("zero-size array",), "An empty array has no maximum: here a slice holds nothing at all. Look at its ends."),
    (("positional argument",), "This call has too few or too many arguments: the lesson says what the function takes, and in which order."),
    (("is not 16-byte aligned",), "Accesses of 16 bytes begin at multiples of 16 bytes: 8 elements of bf16, 4 of float32."),
)  # fmt: skip


def _hint(error, levels):
    """The first that fits in the first of the levels, dicts by name of the error.

    "RaceError between blocks" and "RaceError in shared memory" (global, local) come before "RaceError",
    "OutOfBoundsError below 0" before "OutOfBoundsError".
    """
    kind, text = type(error).__name__, str(error)
    for words, advice in ADVICE:
        if all(w in text for w in words):
            return advice
    if (name := re.search(r"name '(\w+)' is not defined", text)) and hasattr(cuda, name[1]):
        return f"It belongs to cuda: write cuda.{name[1]}."
    kinds = [f"{kind} between blocks"] * text.startswith("data race between blocks")
    kinds += [f"{kind} below 0"] * ("is negative" in text)
    kinds += [
        f"{kind} in {memory}" for memory in re.findall(r"(?:shared|local|global) memory", text)
    ]
    return next((known[k] for known in levels for k in (*kinds, kind) if k in known), None)


def _looks_like(sign, got, rtol, atol):
    if callable(sign):
        return bool(sign(got))
    sign = np.asarray(sign)
    return sign.shape == got.shape and np.allclose(got, sign, rtol, atol, equal_nan=True)


@contextlib.contextmanager
def _watched(exercise):
    """Raises Wrong when a library function that the exercise does not allow runs, however it was reached."""
    before = sys.getprofile()

    def watch(frame, event, argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("xtrain.kernels"):
            name = frame.f_code.co_name
            if name not in exercise.allow:
                sys.setprofile(before)
                raise Wrong(
                    f"{exercise.name} ends up in the library's {name}: here you write it yourself."
                )

    if (
        exercise.allow
    ):  # what an allowed function calls is its own business; the names were looked at
        yield
        return
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def _wide_values(work):
    """-> a list that gets the Site of every float64 that a float32 array takes, or float32(...), while inside."""
    sites, store, scope, casts = [], Thread.store, {}, {}

    def computed(value):  # 0.0 and -math.inf are constants, of which the compiler makes float32
        return type(value) is np.float64 and value != 0 and np.isfinite(value)

    def noted_store(self, a, index, value, site):
        if computed(value) and a.dtype == np.float32 and site not in sites:
            sites.append(site)
        return store(self, a, index, value, site)

    def noted_cast(x):
        if computed(x):
            frame = sys._getframe(1)
            site = Site(frame.f_code.co_filename, frame.f_lineno, 0, frame.f_code.co_name, "")
            if site not in sites:
                sites.append(site)
        return np.float32(x)

    noted_cast.scalar, noted_cast.dtype = np.float32, np.dtype(np.float32)
    if hasattr(work, "py_func"):
        with contextlib.suppress(KernelError):  # is reported when the kernel runs
            scope = translate(work.py_func).function.__globals__
        casts = {k: f for k, f in scope.items() if getattr(f, "scalar", None) is np.float32}
    Thread.store = noted_store
    scope.update(dict.fromkeys(casts, noted_cast))
    try:
        yield sites
    finally:
        Thread.store = store
        scope.update(casts)


@contextlib.contextmanager
def _time_limit():
    """Raises TimeoutError after SECONDS, where the system has an alarm and this is the main thread."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise TimeoutError(
            f"it did not end within {SECONDS} seconds: a loop whose condition never changes?"
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _line_of(error, work):
    """ " (in `y = x / 0`)": the innermost line in the file of the reader's work."""
    file = getattr(getattr(work, "__code__", None), "co_filename", None)
    lines = [f.line for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" (in `{lines[-1].strip()}`)" if lines and lines[-1] else ""
