"""Judge a reader's solution: run it, compare the result, and say in one or two sentences what is wrong.

An exercise is a function that receives an Attempt and runs its cases:

    @exercise("1.1", "add_kernel", first_step="which element does this thread own?")
    def add_kernel(e):
        for n in (1, 32, 33, 100):
            a, b, y = e.normal(n), e.normal(n), e.blank(n)
            e.run(-(-n // 32), 32, y, a, b)
            e.same("y", y, a + b, {"y holds a - b: look at the sign": a - b})

The first error raises Wrong and ends the attempt. Checks run in this order: nothing written yet, a call into the
library, a KernelError of the simulator, a known mistake, a wrong value, few threads that do the work of many, and after
all cases float64 values and atomic additions of floats. Attempt.cases adds a random case, which no table can know.
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
from xtrain.simulator import KernelError, SimArray, Stepper, observe, sim
from xtrain.simulator.block import previous
from xtrain.simulator.errors import Site
from xtrain.simulator.observers import ATOMIC, READ, WRITE, Observer
from xtrain.simulator.source import translate

from .reading import (
    GAP,
    LIBRARY,
    cast_constants,
    divergent_barrier,
    home_of,
    is_empty,
    library_name,
    without_comments,
)
from .trace import traced

SECONDS = 20  # time limit of an attempt; a solution takes at most three seconds

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
    each: how many elements of an output one thread is meant to write, see Attempt.settle.
    """

    number: str
    name: str
    judge: Callable
    first_step: str
    hints: dict[str, str]
    allow: frozenset[str]
    kernel: bool
    each: int = 1


@dataclass(frozen=True)
class Verdict:
    """stepper: the run of the reader's kernel to step through: of the last case, or of the one that failed."""

    passed: bool
    text: str
    stepper: Stepper | None = field(default=None, compare=False)

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


def exercise(number: str, name: str, first_step: str, hints=None, allow=(), kernel=True, each=1):
    """Decorator that registers a judge in EXERCISES. See Exercise."""

    def enter(judge):
        EXERCISES[number] = Exercise(
            number, name, judge, first_step, dict(hints or {}), frozenset(allow), kernel, each
        )
        return judge

    return enter


def judge(exercise: Exercise, work, seed: int | None = None, steps: bool = True) -> Verdict:
    """Judge what the reader wrote.

    work: the reader's function
    seed: of the random case; None: another one in every run
    steps: record the run to step through it, which takes two thirds of the time
    """
    title = f"{exercise.number} {exercise.name}"
    if seed is None:
        seed = int(np.random.default_rng().integers(100_000))
    attempt = Attempt(exercise, work, seed, steps)
    try:
        attempt.look()
        with _time_limit(), _noted(attempt.work) as attempt.notes:
            exercise.judge(attempt)
            attempt.settle()
        attempt.narrow()
        attempt.order()
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
        cases = f"{attempt.count} cases" if attempt.count != 1 else "1 case"
        safe = ", no race, no out-of-bounds access" if exercise.kernel else ""
        remarks = "".join(f"\n  {remark}" for remark in attempt.remarks)
        return Verdict(True, f"{title}: correct. {cases}{safe}.{remarks}", attempt.stepper)
    if attempt.drawn:
        text += (
            f'\nThe same numbers again: lesson.check("{exercise.number}", {exercise.name}, seed={seed}), or '
            f"`python -m xtrain.lesson check {exercise.number} --seed {seed}`."
        )
    if GAP in attempt.source and not attempt.empty:
        text += f"\nThe line `# {GAP}` is still there: is this the finished attempt?"
    return Verdict(False, f"{title}: not yet.\n{textwrap.indent(text, '  ')}", attempt.stepper)


@dataclass
class Attempt:
    """One solution being judged. The methods below are all that an exercise needs."""

    exercise: Exercise
    work: Callable
    seed: int = 0  # of the random case
    steps: bool = True  # record the run to step through it
    count: int = 0  # cases so far
    where: str = ""  # the current case: "n = 33, grid 2, block 32"
    source: str = ""
    empty: bool = False
    notes: "Notes" = field(default_factory=lambda: Notes())
    remarks: list = field(default_factory=list)  # on a correct solution
    names: dict = field(default_factory=dict)  # id of an argument -> its name in the reader's code
    stepper: Stepper | None = None  # of the kernel that ran last
    written: list = field(default_factory=list)  # written by kernels in this case, see block.previous
    launched: tuple = ()  # blocks, threads and arrays of the kernel that ran last, until settle() has looked
    _arrays_made: int = 0
    _rng: np.random.Generator | None = None

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
        for site in self.notes.wide:
            if site.file == mine:
                line = linecache.getline(site.file, site.line).strip()
                raise Wrong(
                    f"The values are right, but the value converted to float32 at {site} was computed in float64:\n    {line}\n"
                    "A literal such as 0.5, an integer, or a quotient of integers turns the whole expression into float64: "
                    "write float32(0.5), float32(C)."
                )

    def order(self):
        """Raises Wrong if the values are right but floats were added by atomics."""
        for site in self.notes.atomics:
            line = linecache.getline(site.file, site.line).strip()
            raise Wrong(
                f"The values are right, but floats are added by an atomic at {site}:\n    {line}\n"
                "Its threads come in any order, and float additions round: the last bits differ from run to run. "
                "Add in a fixed order, each thread its own numbers, and then combine the threads' sums."
            )

    def settle(self):
        """Raises Wrong if few threads did the work of many in the kernel that ran last, although its values are right."""
        (grid, threads, arrays), self.launched = self.launched or (0, 0, {}), ()
        for name, a in arrays.items():
            writers = [self.notes.writers[x] for x in _addresses(a).flat if x in self.notes.writers]
            due, busy = min(-(-len(writers) // self.exercise.each), threads), set(writers)
            blocks = len({block for block, _ in busy})
            self.need(
                2 * len(busy) >= due,
                f"The values are right, but {len(busy)} of {threads} threads"
                + f", in {blocks} of {grid} blocks," * (grid > 1)
                + f" wrote all {len(writers)} elements of {name}. Divide the work: every thread computes its own part, and all of them at the same time.",
            )

    @property
    def code(self) -> str:
        """The source without comments and docstrings, to look for names in."""
        return without_comments(self.source)

    # ------------------------------------------------------------------------- inputs
    def cases(self, fixed, draw, times=1):
        """The fixed cases, and then the random ones of this run: draw(rng), several times where they are cheap."""
        yield from fixed
        self.settle()  # before an error would name the seed
        for _ in range(times):
            yield _plain(draw(self.rng))

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers that differ from run to run. From the first use on, an error names the seed that repeats them."""
        if self._rng is None:
            self._rng = np.random.default_rng([self.seed, *map(ord, self.exercise.number)])
        return self._rng

    drawn = property(lambda self: self._rng is not None)

    def normal(self, *shape, mean=0.3, scale=1.0, dtype=np.float32) -> SimArray:
        """Random numbers, different in every call, the same in every attempt; in the random case from its seed.
        By default their mean is not zero.
        """
        self._arrays_made += 1
        seed = [self.seed] * self.drawn
        random = np.random.default_rng([self._arrays_made, *map(ord, self.exercise.number), *seed])
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
        self.stepper = Stepper() if self.steps else None
        self.notes.writers.clear()
        try:
            run = traced if trace else simulator.run
            with observe(self.stepper) if self.steps else contextlib.nullcontext():
                result = run(self.work, grid, block, *args, shared=shared)
        except KernelError as error:
            hint = self._barrier_hint(error) or _hint(
                error, (hints or {}, self.exercise.hints, HINTS)
            )
            raise self.wrong(f"{error}" + (f"\n{hint}" if hint else "")) from None
        self.written += previous.last[0]
        blocks, threads = (int(np.prod(x)) for x in (grid, block))
        arrays = {n: a for n, a in zip(parameters, args) if isinstance(a, np.ndarray)}
        self.launched = blocks, blocks * threads, arrays
        return result

    def _barrier_hint(self, error):
        """The hint for data that another thread has not written yet, if only some threads reach a barrier; else None."""
        if not isinstance(error, (simulator.RaceError, simulator.UninitializedError)):
            return None
        line = divergent_barrier(self.source)
        return line and (
            f"There is a barrier, but not all threads reach it:\n    {line}\n"
            "Threads that skip it do not wait. Move it out of there, so that every thread reaches it."
        )

    def name(self, a) -> str:
        """The parameter name of this argument in the kernel that ran last; a trace uses these names."""
        return self.names[id(a)]

    def wrote(self, a) -> np.ndarray:
        """Which elements of `a` the kernels of this case have written: bool array of the shape of a."""
        address = _addresses(a)
        done = np.zeros(a.shape, bool)
        for _, base, granule, keys in self.written:
            done |= np.isin((address - base) // granule, list(keys)) & (address >= base)
        return done

    def exchanged(self, trace) -> bool:
        """Whether a thread has read an element of shared memory that another thread wrote."""
        writer = {}
        for x in trace.of(kind="shared"):
            place = x.array, x.block, x.index
            if x.write:
                writer[place] = x.thread
            elif writer.get(place) != x.thread:
                return True
        return False

    def remark(self, text: str):
        """Tell the author of a correct solution something about it, once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def divided(self, trace, a, threads, share=2):
        """Raises Wrong if one thread does the work of many, or every thread does all of it.

        threads: how many should read `a`; more than 1 / share of them must
        """
        reads = trace.of(self.name(a), write=False)
        busy = len({(r.block, r.thread) for r in reads})
        self.need(
            share * busy > threads,
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
        self.settle()
        self.count += 1
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
        where = self.where + f" (random numbers, seed {self.seed})" * self.drawn
        return Wrong(f"With {where}:\n{textwrap.indent(text, '  ')}" if self.where else text)

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
    (("truth value of an array",), "An array of several elements is neither true nor false: choose with np.where, ask whether it `is None`, or use .any() or .all()."),
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


@dataclass
class Notes(Observer):
    """What the kernels of an attempt did.

    wide: the Sites where float64 becomes float32. atomics: those of atomic additions of floats.
    writers: address in global memory -> (block, thread) of the last write there
    """

    wide: list = field(default_factory=list)
    atomics: list = field(default_factory=list)
    writers: dict = field(default_factory=dict)

    def access(self, thread, array, k, site, how, value):
        if how == READ:
            return
        if how == WRITE and _computed(value) and array.dtype == np.float32 and site not in self.wide:  # fmt: skip
            self.wide.append(site)
        if how == ATOMIC and array.dtype.kind == "f" and value in ("add", "sub"):
            self.atomics += [site] * (site not in self.atomics)
        if array.memory.kind == "global":
            address = array.memory.base + (array.bias + k * array.span) * array.memory.granule
            self.writers[address] = tuple(map(int, thread.blockIdx)), thread.index


def _computed(value):
    """Is it the float64 of a computation? 0.0 and -math.inf are constants, which the compiler turns into float32."""
    return type(value) is np.float64 and value != 0 and np.isfinite(value)


@contextlib.contextmanager
def _noted(work):
    """-> Notes, which the kernels that run in this context fill."""
    notes, scope, casts = Notes(), {}, {}

    def noted_cast(x):
        if _computed(x):
            frame = sys._getframe(1)
            site = Site(frame.f_code.co_filename, frame.f_lineno, 0, frame.f_code.co_name, "")
            line = linecache.getline(site.file, site.line)
            if site not in notes.wide and float(x) not in cast_constants(line):
                notes.wide.append(site)
        return np.float32(x)

    noted_cast.scalar, noted_cast.dtype = np.float32, np.dtype(np.float32)
    if hasattr(work, "py_func"):
        with contextlib.suppress(KernelError):  # reported when the kernel runs
            scope = translate(work.py_func).function.__globals__
        casts = {k: f for k, f in scope.items() if getattr(f, "scalar", None) is np.float32}
    scope.update(dict.fromkeys(casts, noted_cast))
    try:
        with observe(notes):
            yield notes
    finally:
        scope.update(casts)


def _plain(x):
    """NumPy's numbers as Python's, arrays as lists, also in a tuple."""
    return (
        tuple(map(_plain, x)) if isinstance(x, tuple) else x.tolist() if hasattr(x, "tolist") else x
    )


def _addresses(a) -> np.ndarray:
    """The address of every element of an array, in its shape."""
    offset = (
        np.tensordot(np.array(a.strides), np.indices(a.shape), 1) if a.ndim else np.zeros((), int)
    )
    return a.__array_interface__["data"][0] + offset.astype(np.int64)


@contextlib.contextmanager
def _time_limit():
    """Raises TimeoutError after SECONDS of CPU time (other programs must not shorten it), if the system has such a timer
    and this is the main thread.
    """
    if (
        not hasattr(signal, "SIGVTALRM")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def stop(number, frame):
        raise TimeoutError(
            f"It did not end within {SECONDS} seconds: is there a loop whose condition never changes?"
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _line_of(error, work):
    """ " (in `y = x / 0`)": the innermost line of the traceback in the reader's file."""
    file = getattr(getattr(work, "__code__", None), "co_filename", None)
    lines = [f.line for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" (in `{lines[-1].strip()}`)" if lines and lines[-1] else ""
