"""Judge a reader's solution: run it, compare the result, and say in one or two sentences what is wrong.

An exercise is a function that receives an Attempt and runs its cases:

    @exercise("1.1", "add_kernel", first_step="which element does this thread own?")
    def add_kernel(e):
        for n in (1, 32, 33, 100):
            a, b, y = e.normal(n), e.normal(n), e.blank(n)
            e.run(-(-n // 32), 32, y, a, b)
            e.same("y", y, a + b, {"y holds a - b: look at the sign": a - b})

The first error raises Wrong and ends the attempt. Checks run in this order: nothing written yet, a call into the
library, a KernelError of the simulator, a known mistake, a wrong value.
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

from .reading import GAP, LIBRARY, home_of, is_empty, library_name
from .trace import traced

SECONDS = 20  # time limit of an attempt; a solution takes at most two seconds

HINTS = {
    "RaceError": "Which thread may access this element, and is there a barrier between the two accesses?",
    "DeadlockError": "All threads of a block must reach the same barrier: do not put it inside an `if` that some threads skip, or after a `return` that some threads take.",
    "RaceError between blocks": "Blocks run in any order and cannot wait for each other: only one block may write an element.",
    "OutOfBoundsError": "The grid rarely matches the data exactly: threads past the end must do nothing.",
    "UninitializedError": "Shared and local memory are uninitialized until a thread writes them. Which thread writes this element, and is there a barrier before the read?",
    "CollectiveError": "A warp function needs full warps of 32 threads, and every lane in its mask must call it.",
}


class Wrong(Exception):
    """An error in an attempt. The message is written for the author of the attempt."""


@dataclass(frozen=True)
class Exercise:
    """number: "1.1"   name: the function that the reader writes   judge: runs the cases on an Attempt

    first_step: the hint shown while nothing is written. hints: override HINTS, by error name (see _hint).
    allow: names of library functions that may be called. kernel: whether the solution is a @cuda.jit kernel.
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
        """Wrap long lines at spaces; keep source lines as they are."""
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
    """Decorator that registers a judge in EXERCISES. See Exercise."""

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
    except Exception as error:  # raised by the check of the returned value, not by the attempt
        where = _line_of(error, attempt.work)
        text = str(
            attempt.wrong(
                f"{type(error).__name__} while checking the returned value: {error}{where}"
            )
        )
    else:
        cases = f"{attempt.cases} cases" if attempt.cases != 1 else "1 case"
        safe = ", no race, no out-of-bounds access" if exercise.kernel else ""
        return Verdict(True, f"{title}: correct. {cases}{safe}.")
    if GAP in attempt.source and not attempt.empty:
        text += f"\nThe line `# {GAP}` is still there: is this the finished attempt?"
    return Verdict(False, f"{title}: not yet.\n{textwrap.indent(text, '  ')}")


@dataclass
class Attempt:
    """One solution being judged. The methods below are all that an exercise needs."""

    exercise: Exercise
    work: Callable
    cases: int = 0
    where: str = ""  # the current case: "n = 33, grid 2, block 32"
    source: str = ""
    empty: bool = False
    wide: list = field(default_factory=list)  # the Sites where float64 becomes float32
    names: dict = field(default_factory=dict)  # id of an argument -> its name in the reader's code
    written: list = field(default_factory=list)  # written by kernels in this case, see Launch.last
    _seed: int = field(default=0)

    # ------------------------------------------------------------------------- before it runs
    def look(self):
        """Raises Wrong if the gap is still empty or the library does the work."""
        name = self.exercise.name
        function = getattr(self.work, "py_func", self.work)
        if not isinstance(function, types.FunctionType):
            raise Wrong(f"{name} must be a function, not a {type(self.work).__name__}.")
        try:
            self.source = textwrap.dedent(inspect.getsource(function))
        except OSError:
            raise Wrong(
                f"{name} has no source code: define it in a cell or a file, not in a string."
            ) from None
        self.empty = is_empty(self.source)
        if self.empty:
            raise Wrong(
                f"Nothing is written yet: fill the gap `# {GAP}`.\nFirst step: {self.exercise.first_step}"
            )
        if self.exercise.kernel and not hasattr(self.work, "py_func"):
            raise Wrong(f"{name} is a plain Python function: write @cuda.jit above it.")
        found = library_name(function, self.exercise.allow)
        if home_of(function).split(".")[0] in LIBRARY:
            found = home_of(function)
        if found:
            raise Wrong(
                f"{name} uses {found}, which is the library's own: write it yourself here.\n"
                + f"(Allowed here: {', '.join(sorted(self.exercise.allow))}.)\n"
                * bool(self.exercise.allow)
                + "You can compare with the library afterwards: the end of the lesson shows its source."
            )

    def narrow(self):
        """Raises Wrong if the values are right but the kernel computes in float64."""
        mine = getattr(self.work, "py_func", self.work).__code__.co_filename
        for site in self.wide:
            if site.file == mine:
                line = linecache.getline(site.file, site.line).strip()
                raise Wrong(
                    f"The values are right, but the value converted to float32 at {site} was computed in float64:\n    {line}\n"
                    "A literal such as 0.5, an integer, or a quotient of integers turns the whole expression into float64: "
                    "write float32(0.5), float32(C)."
                )

    # ------------------------------------------------------------------------- inputs
    def normal(self, *shape, mean=0.3, scale=1.0, dtype=np.float32) -> SimArray:
        """Random numbers, different in every call, the same in every attempt. By default their mean is not zero."""
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
        """Run the reader's kernel in the simulator. case: description of the case, in addition to grid and block.

        hints: by error name (see _hint), for this case only; they precede those of the exercise. trace: return the
        memory accesses, a Trace.
        """
        self.case(f"{case}, grid {grid}, block {block}".lstrip(", "))
        parameters = list(inspect.signature(self.work.py_func).parameters)
        if len(parameters) != len(args):
            raise Wrong(
                f"{self.exercise.name} is called with {len(args)} arguments: do not change the parameters of the function."
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
        """The parameter name of this argument in the kernel that ran last; a trace uses these names."""
        return self.names[id(a)]

    def wrote(self, a) -> np.ndarray:
        """Which elements of `a` the kernels of this case have written: bool array of the shape of a."""
        offset = np.tensordot(np.array(a.strides), np.indices(a.shape), 1) if a.ndim else 0
        address = a.__array_interface__["data"][0] + offset
        done = np.zeros(a.shape, bool)
        for _, base, granule, keys in self.written:
            done |= np.isin((address - base) // granule, list(keys)) & (address >= base)
        return done

    def divided(self, trace, a, threads):
        """Raises Wrong if one thread does the work of many, or every thread does all of it. threads: how many should read `a`"""
        reads = trace.of(self.name(a), write=False)
        busy = len({(r.block, r.thread) for r in reads})
        self.need(
            2 * busy > threads,
            f"The values are right, but {busy} of {threads} threads read {self.name(a)}: all of them must share the work.",
        )
        self.need(
            len(reads) <= 3 * a.size,
            f"The values are right, but {self.name(a)} is read {len(reads) // a.size} times over: each thread must read only its own part, "
            "and then the partial results are combined.",
        )

    def call(self, *args, case="", **options):
        """-> the return value of the reader's Python function."""
        if case:
            self.case(case)
        return self.ask(self.work, *args, **options)

    def ask(self, function, *args, **options):
        """-> the return value of a function that the reader wrote, or that the reader's function returned."""
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
        """Start a new case."""
        self.cases += 1
        self.where, self.written = where, []

    # ------------------------------------------------------------------------- compare
    def several(self, got, *names) -> tuple:
        """Check that the reader's function returned one value per name. -> the values"""
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
        """Raises Wrong unless |got - want| <= atol + rtol |want| for every element.

        mistakes: {message: the array that this mistake gives, or a function of got -> bool}
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
            f"{name} has shape {got.shape}; it must have shape {want.shape}.",
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
NUMBER = "In this line a number stands where an array is needed: is there one index too many?"
WHOLE = "A kernel computes with single elements: every array needs its index, as in y_n[i]."
ADVICE = (  # the advice for an error whose message contains all these words
    (("'Dim3'",), "cuda.blockIdx, blockDim and threadIdx have three parts each: write cuda.blockIdx.x."),
    (("'list' object",), "A kernel can use numbers and arrays, but not lists: put a few numbers into a cuda.local.array(n, float32)."),
    (("object has no attribute 'locate'",), NUMBER),
    (("object is not subscriptable",), NUMBER),
    (("does not support item",), NUMBER),
    (("'Array'", "unsupported operand"), WHOLE),
    (("'Array'", "not iterable"), WHOLE),
    (("is not callable",), "A number is called like a function: remove the () after it."),
    (("cannot be interpreted as an integer",), "An index must be an integer: divide with //, not with /."),
    (("lanes hold float", "int64"), "A sum that starts with the integer 0 does not keep one type: start it with float32(0.0)."),
    (("zero-size array",), "An empty array has no maximum: a slice is empty here. Check its start and end."),
    (("positional argument",), "This call has too few or too many arguments: the lesson says which arguments the function takes, and in which order."),
    (
        ("converted to uint16, which it does not fit",),
        "The bits were added and stored as an integer: load1(x, i) converts bf16 bits to a number, and store1(y, i, v) converts it back.",
    ),
    (
        ("converted to uint32, which it does not fit",),
        "A register that gets a number does not hold a pair of bf16 numbers: fill it with pack_bf16(x, y).",
    ),
    (("is not 16-byte aligned",), "A 16-byte access must start at a multiple of 16 bytes: 8 elements of bf16, 4 of float32."),
)  # fmt: skip


def _hint(error, levels):
    """-> the hint for an error from the first level (a dict by error name) that has one.

    "RaceError between blocks" and "RaceError in shared memory" (global, local) come before "RaceError",
    "OutOfBoundsError below 0" before "OutOfBoundsError".
    """
    kind, text = type(error).__name__, str(error)
    for words, advice in ADVICE:
        if all(w in text for w in words):
            return advice
    if (name := re.search(r"name '(\w+)' is not defined", text)) and hasattr(cuda, name[1]):
        return f"{name[1]} is an attribute of cuda: write cuda.{name[1]}."
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
    """Raises Wrong if a library function that the exercise does not allow is called, directly or indirectly."""
    before = sys.getprofile()

    def watch(frame, event, argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("xtrain.kernels"):
            name = frame.f_code.co_name
            if name not in exercise.allow:
                sys.setprofile(before)
                raise Wrong(f"{exercise.name} calls the library's {name}: write it yourself here.")

    # an allowed function may call any other; look() has already checked the names
    if exercise.allow:
        yield
        return
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def _wide_values(work):
    """-> a list that collects the Site of every float64 value stored in a float32 array or passed to float32(...)."""
    sites, store, scope, casts = [], Thread.store, {}, {}

    def computed(value):  # 0.0 and -math.inf are constants, which the compiler turns into float32
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
        with contextlib.suppress(KernelError):  # reported when the kernel runs
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
    """Raises TimeoutError after SECONDS, if the system has SIGALRM and this is the main thread."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise TimeoutError(
            f"It did not end within {SECONDS} seconds: is there a loop whose condition never changes?"
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _line_of(error, work):
    """ " (in `y = x / 0`)": the innermost line of the traceback in the reader's file."""
    file = getattr(getattr(work, "__code__", None), "co_filename", None)
    lines = [f.line for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" (in `{lines[-1].strip()}`)" if lines and lines[-1] else ""
