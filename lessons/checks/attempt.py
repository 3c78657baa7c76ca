"""Judge a reader's solution: run it, compare the result, and say in one or two sentences what is wrong.

An exercise is a function that receives an Attempt and runs its cases:

    @exercise("1.1", "add_kernel", first_step="which element does this thread own?")
    def add_kernel(e):
        for n in (1, 32, 33, 100):
            a, b, y = e.normal(n), e.normal(n), e.blank(n)
            e.run(-(-n // 32), 32, y, a, b)
            e.same("y", y, a + b, {"y holds a - b: look at the sign": a - b})

An Attempt compares; its runner (running.py) reads and runs what the reader wrote, in this process or in another one.

The first error raises Wrong and ends the attempt. Checks run in this order: nothing written yet, a call into the
library, a KernelError of the simulator, a known mistake, a wrong value, few threads that do the work of many, and after
all cases float64 values and atomic additions of floats. Attempt.cases adds a random case, which no table can know.
"""

import contextlib
import re
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numba import cuda

from xtrain import simulator
from xtrain.simulator import KernelError, SimArray, sim

from .reading import GAP, divergent_barrier, without_comments
from .running import Facts, Ran, Runner, Wrong, addresses, time_limit
from .trace import Trace

HINTS = {
    "RaceError": "Which thread may access this element, and is there a barrier between the two accesses?",
    "DeadlockError": "All threads of a block must reach the same barrier: do not put it inside an `if` that some threads skip, or after a `return` that some threads take.",
    "RaceError between blocks": "Blocks run in any order and cannot wait for each other: only one block may write an element.",
    "OutOfBoundsError": "The grid rarely matches the data exactly: threads past the end must do nothing.",
    "UninitializedError": "Shared and local memory are uninitialized until a thread writes them. Which thread writes this element, and is there a barrier before the read?",
    "CollectiveError": "A warp function needs full warps of 32 threads, and every lane in its mask must call it.",
}


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
    stepper: simulator.Stepper | None = field(default=None, compare=False)

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


def judge(
    exercise: Exercise, runner: Runner, seed: int | None = None, steps: bool = True
) -> Verdict:
    """Judge what the reader wrote.

    runner: has the reader's function
    seed: of the random case; None: another one in every run
    steps: record the run to step through it, which takes two thirds of the time
    """
    title = f"{exercise.number} {exercise.name}"
    if seed is None:
        seed = int(np.random.default_rng().integers(100_000))
    attempt = Attempt(exercise, runner, seed, steps)
    try:
        with time_limit():
            attempt.look()
            exercise.judge(attempt)
            attempt.settle()
        attempt.narrow()
        attempt.order()
    except (Wrong, TimeoutError) as wrong:
        text = str(wrong)
    except Exception as error:  # raised by the check of the returned value, not by the attempt
        where = runner.line_of(error)
        text = str(
            attempt.wrong(
                f"{type(error).__name__} while checking the returned value: {error}{where}"
            )
        )
    else:
        cases = f"{attempt.count} cases" if attempt.count != 1 else "1 case"
        safe = ", no race, no out-of-bounds access" if exercise.kernel else ""
        remarks = "".join(f"\n  {remark}" for remark in attempt.remarks)
        return Verdict(True, f"{title}: correct. {cases}{safe}.{remarks}", runner.stepper)
    if attempt.drawn:
        text += (
            f'\nThe same random numbers, seed {seed}, again: lesson.check("{exercise.number}", {exercise.name}, seed={seed}), or '
            f"`python -m xtrain.lesson check {exercise.number} --seed {seed}`."
        )
    if GAP in attempt.source and not attempt.facts.empty:
        text += f"\nThe line `# {GAP}` is still there: is this the finished attempt?"
    return Verdict(False, f"{title}: not yet.\n{textwrap.indent(text, '  ')}", runner.stepper)


@dataclass
class Attempt:
    """One solution being judged. The methods below are all that an exercise needs."""

    exercise: Exercise
    first_runner: Runner
    seed: int = 0  # of the random case
    steps: bool = True  # record the run to step through it
    count: int = 0  # cases so far
    where: str = ""  # the current case: "n = 33, grid 2, block 32"
    facts: Facts = field(default_factory=lambda: Facts("function", True))
    remarks: list = field(default_factory=list)  # on a correct solution
    names: dict = field(default_factory=dict)  # id of an argument -> its name in the reader's code
    ran: Ran | None = None  # what the kernel did that ran last
    launched: tuple = ()  # blocks, threads and arrays of the kernel that ran last, until settle() has looked
    _written: list = field(default_factory=list)  # addresses that kernels of this case wrote
    _writers: dict = field(
        default_factory=dict
    )  # address -> block and thread of the kernel that ran last
    _wide: list = field(default_factory=list)
    _atomics: list = field(default_factory=list)
    _arrays_made: int = 0
    in_random_case: bool = False
    _rng: np.random.Generator | None = None
    _of_rank: threading.local = field(default_factory=threading.local)

    @property
    def runner(self) -> Runner:
        """The runner; inside on_rank that of this thread's rank."""
        return getattr(self._of_rank, "runner", self.first_runner)

    @contextlib.contextmanager
    def on_rank(self, rank: int):
        """In this context this thread calls the reader's function as the rank."""
        self._of_rank.runner = self.first_runner.of_rank(rank)
        try:
            yield
        finally:
            del self._of_rank.runner

    # ------------------------------------------------------------------------- before it runs
    def look(self):
        """Raises Wrong if the gap is still empty or the library does the work."""
        name = self.exercise.name
        self.facts = facts = self.runner.facts()
        if not facts.function:
            raise Wrong(f"{name} must be a function, not a {facts.kind}.")
        if facts.source is None:
            raise Wrong(
                f"{name} has no source code: define it in a cell or a file, not in a string."
            )
        if facts.empty:
            raise Wrong(
                f"Nothing is written yet: fill the gap `# {GAP}`.\nFirst step: {self.exercise.first_step}"
            )
        if facts.unwritten:
            raise Wrong(
                f"{name} calls {facts.unwritten}, which is not written yet: fill its gap first."
            )
        if self.exercise.kernel and not facts.kernel:
            raise Wrong(f"{name} is a plain Python function: write @cuda.jit above it.")
        if facts.of_library:
            raise Wrong(
                f"{name} uses {facts.of_library}, which is the library's own: write it yourself here.\n"
                + f"(Allowed here: {', '.join(sorted(self.exercise.allow))}.)\n"
                * bool(self.exercise.allow)
                + "You can compare with the library afterwards: the end of the lesson shows its source."
            )

    def narrow(self):
        """Raises Wrong if the values are right but the kernel computes in float64."""
        for site, line in self._wide:
            raise Wrong(
                f"The values are right, but the value converted to float32 at {site} was computed in float64:\n    {line}\n"
                "A literal such as 0.5, an integer, or a quotient of integers turns the whole expression into float64: "
                "write float32(0.5), float32(C)."
            )

    def order(self):
        """Raises Wrong if the values are right but floats were added by atomics."""
        for site, line in self._atomics:
            raise Wrong(
                f"The values are right, but floats are added by an atomic at {site}:\n    {line}\n"
                "Its threads come in any order, and float additions round: the last bits differ from run to run. "
                "Add in a fixed order, each thread its own numbers, and then combine the threads' sums."
            )

    def settle(self):
        """Raises Wrong if few threads did the work of many in the kernel that ran last, although its values are right."""
        (grid, threads, arrays), self.launched = self.launched or (0, 0, {}), ()
        for name, a in arrays.items():
            writers = [self._writers[x] for x in addresses(a).flat if x in self._writers]
            due, busy = min(-(-len(writers) // self.exercise.each), threads), set(writers)
            blocks = len({writer[:3] for writer in busy})
            self.need(
                2 * len(busy) >= due,
                f"The values are right, but {len(busy)} of {threads} threads"
                + f", in {blocks} of {grid} blocks," * (grid > 1)
                + f" wrote all {len(writers)} elements of {name}. Divide the work: every thread computes its own part, and all of them at the same time.",
            )

    @property
    def source(self) -> str:
        return self.facts.source or ""

    @property
    def code(self) -> str:
        """The source without comments and docstrings, to look for names in."""
        return without_comments(self.source)

    def read(self, question: Callable):
        """-> question(the reader's function), asked where the function is. question: of a module without answers."""
        return self.runner.read(question)

    # ------------------------------------------------------------------------- inputs
    def cases(self, fixed, draw, times=1):
        """The fixed cases, and then the random ones of this run: draw(rng), several times where they are cheap."""
        yield from fixed
        self.settle()  # before an error would name the seed
        self.in_random_case = True
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
        parameters = self.facts.parameters
        if len(parameters) != len(args):
            raise Wrong(
                f"{self.exercise.name} is called with {len(args)} arguments: do not change the parameters of the function."
            )
        self.names = {id(a): name for name, a in zip(parameters, args)}
        try:
            self.ran = self.runner.run(grid, block, args, shared, trace, self.steps)
        except KernelError as error:
            hint = self._barrier_hint(error) or _hint(
                error, (hints or {}, self.exercise.hints, HINTS)
            )
            raise self.wrong(f"{error}" + (f"\n{hint}" if hint else "")) from None
        arrays = {n: a for n, a in zip(parameters, args) if isinstance(a, np.ndarray)}
        self._note(self.ran, arrays)
        blocks, threads = (int(np.prod(x)) for x in (grid, block))
        self.launched = blocks, blocks * threads, arrays
        return Trace(self.ran.accesses) if trace else None

    def _note(self, ran: Ran, arrays: dict[str, np.ndarray]):
        """Keep what a kernel did by the addresses of its arrays: a check may look at a part of one."""
        self._wide += ran.wide
        self._atomics += ran.atomics
        self._writers = {}
        for name, a in arrays.items():
            at = addresses(a)
            self._written.append(at[ran.wrote[name]])
            writers = ran.writers[name].reshape(-1, 4).tolist()
            self._writers |= {x: tuple(w) for x, w in zip(at.flat, writers) if w[3] >= 0}

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
        return np.isin(addresses(a), np.concatenate([np.empty(0, np.int64), *self._written]))

    def writer(self, a, *index) -> tuple[tuple[int, ...], int]:
        """Block and thread of the kernel that ran last that wrote a[index]."""
        *block, thread = self._writers[int(addresses(a)[index])]
        return tuple(block), thread

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
        return self._told(self.runner.call, *args, **options)

    def call_measured(self, *args, case="", **options):
        """-> what call returns, and the most bytes that were in use at once during the call."""
        if case:
            self.case(case)
        return self._told(self.runner.call_measured, *args, **options)

    def ask(self, function, *args, **options):
        """-> the return value of a function that the reader's function returned."""
        with self.runner.guarded():
            return self._told(function, *args, **options)

    def _told(self, function, *args, **options):
        """-> function(*args, **options). Raises Wrong with the reader's error."""
        try:
            return function(*args, **options)
        except Wrong:
            raise
        except Exception as error:
            hint = _hint(error, [self.exercise.hints])
            raise self.wrong(
                f"{type(error).__name__}: {error}{self.runner.line_of(error)}"
                + (f"\n{hint}" if hint else "")
            ) from None

    def case(self, where: str):
        """Start a new case."""
        self.settle()
        self.count += 1
        self.where = where
        self._written = []

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
        where = self.where + f" (random numbers, seed {self.seed})" * self.in_random_case
        return Wrong(f"With {where}:\n{textwrap.indent(text, '  ')}" if self.where else text)

    def need(self, ok: bool, text: str):
        if not ok:
            raise self.wrong(text)

    def same(self, name: str, got, want, mistakes=None, rtol=1e-5, atol=1e-6):
        """Raises Wrong unless |got - want| <= atol + rtol |want| for every element.

        mistakes: {message: the array that this mistake gives, or a function of got -> bool}
        """
        kept = got if self._written and isinstance(got, SimArray) else None
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
NUMBER = "In this line a number stands where an array is needed, or a tuple: is there one index too many, or is the case of a number missing?"
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
    (("'tuple' object is not callable",), "A tuple is called like a function: take one of its elements, or pass it to a function."),
    (("is not callable",), "A number is called like a function: remove the () after it."),
    (("'tuple' object cannot be interpreted",), "A tuple stands here where an integer is needed: take one of its elements, or the number of elements."),
    (("cannot be interpreted as an integer",), "An index must be an integer: divide with //, not with /."),
    (("lanes hold float", "int64"), "A sum that starts with the integer 0 does not keep one type: start it with float32(0.0)."),
    (
        ("cannot access local variable",),
        "A function that assigns a name has a variable of its own of this name: write `nonlocal` above it for a variable of the enclosing "
        "function, or give it a value first.",
    ),
    (("zero-size array",), "An empty array has no maximum: a slice is empty here. Check its start and end."),
    (("positional argument",), "This call has too few or too many arguments: the lesson says which arguments the function takes, and in which order. *pair passes the elements of a pair one by one."),
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
    if text.startswith("TimeoutError"):  # in a kernel
        kind = "TimeoutError"
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


def _plain(x):
    """NumPy's numbers as Python's, arrays as lists, also in a tuple."""
    return (
        tuple(map(_plain, x)) if isinstance(x, tuple) else x.tolist() if hasattr(x, "tolist") else x
    )
