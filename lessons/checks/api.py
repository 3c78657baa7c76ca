"""The functions of `xtrain.lesson`: checks, arrays, sources, measurements, traces, figures, the reader's exercises."""

import contextlib
import importlib
import inspect
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xtrain import device, simulator
from xtrain.errors import UserError
from xtrain.files import cannot_write, write_whole
from xtrain.kernels.runtime.launch import empty, launch, zeros

from . import attempt, padding, process, records, row_products
from .attempt import EXERCISES, Verdict
from .machine import Machine
from .ranks import ProcessRank, run_ranks
from .reading import is_empty
from .running import Runner, Wrong, load, load_attempt
from .trace import Trace, owners, traced, tracing

__all__ = [
    "Machine", "ProcessRank", "Trace", "array", "check", "compare", "empty", "host", "launch", "load", "measure", "on_gpu", "owners",
    "padding", "record", "report", "row_products", "run_ranks", "source", "stepped", "table", "traced", "tracing", "yours", "zeros",
]  # fmt: skip

LESSONS = records.ROOT / "lessons"
WORK = Path("my_lessons")  # the reader's solutions; ignored by git
PASSED = "passed.txt"  # in this folder: the exercises that passed
TRACKS = {  # lessons/index.md shows the same
    "Kernels": (1, 2, 3, 4, 10, 11, 12, 13, 14, 23, 30, 31, 42, 43),
    "Training": (5, 6, 7, 8, 9, 38, 39, 40, 15, 16, 32, 25, 26, 37, 28, 34, 45, 46),
    "Serving": (17, 18, 19, 20, 21, 22, 24, 27, 44, 29, 41, 33, 35, 36),
}


def __getattr__(name: str) -> Any:
    """lesson.figures, which imports matplotlib: a check needs none, and a browser has none."""
    if name != "figures":
        raise AttributeError(f"xtrain.lesson has no {name}")
    return importlib.import_module(f"{__package__}.figures")


# ----------------------------------------------------------------------------- checks
def check(number: str, solution: Callable, seed: int | None = None) -> None:
    """Check an exercise ("1.1") and print the verdict. solution: the function that you wrote.

    seed: repeats the random case of an earlier check, which printed it.
    In a notebook, a kernel that is not right yet can be stepped through below the verdict.
    """
    said = verdict(number, solution, seed)
    print(said)
    with contextlib.suppress(UserError):  # the check counts, not the note
        note_passed(LESSONS / WORK, {number: said.passed})
    if said.stepper and not said.passed and "IPython" in sys.modules:
        from IPython.display import display

        display(said.stepper)


def yours(mine: Callable, solution: Callable) -> Callable:
    """Your function, once its gap is filled; until then the solution, so that the cells below it run."""
    function = getattr(mine, "py_func", mine)
    try:
        unwritten = is_empty(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return mine
    return solution if unwritten else mine


def verdict(
    number: str, solution: Callable, seed: int | None = None, steps: bool = True
) -> Verdict:
    """Judge as check() does, without printing. Raises UserError if there is no such exercise.

    steps: record the run to step through it, which takes two thirds of the time
    """
    lesson = number.split(".")[0]
    _exercises_of(lesson)
    if number not in EXERCISES:
        raise UserError(f"there is no exercise {number}: lesson {lesson} has {_names(lesson)}")
    exercise = EXERCISES[number]
    return attempt.judge(exercise, Runner(solution, exercise.name, exercise.allow), seed, steps)


def _exercises_of(lesson: str) -> list[attempt.Exercise]:
    """The exercises of one lesson, in order. Its module is imported on first use."""
    try:
        importlib.import_module(f"{__package__}.lesson_{int(lesson):02d}")
    except (ImportError, ValueError):
        raise UserError(
            f"there is no lesson {lesson} with exercises: see lessons/index.md for the list"
        ) from None
    mine = [e for e in EXERCISES.values() if e.number.split(".")[0] == str(int(lesson))]
    return sorted(mine, key=lambda e: int(e.number.split(".")[1]))


def _names(lesson: str) -> str:
    return ", ".join(e.number for e in _exercises_of(lesson))


# ----------------------------------------------------------------------------- where arrays live
def on_gpu() -> bool:
    """Do kernels run on a GPU (else in the simulator)?"""
    return device.gpu_available()


def array(x: Any) -> device.Array:
    """A copy of x on the GPU if there is one, else in the simulator."""
    x = np.asarray(x, order="C")
    return device.to_device(x, "gpu") if on_gpu() else simulator.sim(x)


def host(x: device.Array) -> np.ndarray:
    """A copy of x as a plain NumPy array."""
    return np.array(device.to_numpy(x)).view(np.ndarray)


# ----------------------------------------------------------------------------- sources
def source(thing: Any, part: str | None = None) -> None:
    """Print the source of a function, kernel or module of the library.

    part: print only from the first line that contains this text to the next blank line. Raises
    UserError if no line contains it.
    """
    thing = inspect.unwrap(getattr(thing, "py_func", thing))
    text = inspect.cleandoc("\n" + inspect.getsource(thing))
    if part is not None:
        lines = text.splitlines()
        starts = [i for i, line in enumerate(lines) if part in line]
        if not starts:
            raise UserError(f"{thing.__name__} has no line with {part!r}")
        end = next((i for i in range(starts[0], len(lines)) if not lines[i].strip()), len(lines))
        text = "\n".join(lines[starts[0] : end])
    file = Path(inspect.getsourcefile(thing) or "")
    where = file.relative_to(records.ROOT) if file.is_relative_to(records.ROOT) else file.name
    print(f"# {where}\n{text}")


# ----------------------------------------------------------------------------- measurements
def record(identity: str) -> dict[str, Any]:
    """One measurement of bench/results by its id, "bench_kernels/rmsnorm_fwd/fp32": see records.py."""
    return records.find(identity)


def table(identities: list[str], columns: dict[str, str | Callable]) -> None:
    """Print records of one GPU, where there is one with all of them, as a table.

    columns: {heading: field of the record, or a function of the record}.
    """
    found = records.together(identities)
    cells = [["", *columns]]
    for r in found:
        values = [c(r) if callable(c) else r.get(c) for c in columns.values()]
        cells.append([f"{r['name']} {r['dtype']}", *map(_cell, values)])
    widths = [max(map(len, column)) for column in zip(*cells)]
    for first, *rest in cells:
        print(first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:])), sep="   ")
    print(
        records.machine(found) + f" Shape: {', '.join(dict.fromkeys(r['shape'] for r in found))}."
    )


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def measure(
    variants: dict[str, Callable], nbytes: int = 0, flops: int = 0, runs: int = 20
) -> dict[str, float]:
    """Time functions that launch kernels on a GPU. -> {name: milliseconds}, also printed with the speed.

    nbytes: the least that must be read and written. flops: operations. The time is the median between
    CUDA events, after three warm-up runs. Without a GPU nothing is timed and {} is returned: the
    simulator's times mean nothing.
    """
    if not on_gpu():
        print("No GPU here, so nothing is timed.")
        return {}
    cupy: Any = device.cupy()
    times: dict[str, float] = {}
    for name, run in variants.items():
        for _ in range(3):
            run()
        spans = []
        for _ in range(runs):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            run()
            end.record()
            end.synchronize()
            spans.append(cupy.cuda.get_elapsed_time(begin, end))
        ms = times[name] = float(np.median(spans))
        speeds = f"   {nbytes / ms / 1e6:8.0f} GB/s" if nbytes else ""
        speeds += f"   {flops / ms / 1e9:8.2f} TFLOP/s" if flops else ""
        print(f"{name:<24} {ms:8.3f} ms{speeds}")
    return times


# ----------------------------------------------------------------------------- showing what happens
def report(run: Callable, *arguments: Any, **options: Any) -> None:
    """Call run(*arguments, **options) and print its KernelError without a traceback."""
    try:
        run(*arguments, **options)
    except simulator.KernelError as error:
        print(Verdict(False, f"{type(error).__name__}: {error}"))
    else:
        print("no error was reported")


def stepped(
    kernel: Any, grid: Any, block: Any, *args: Any, shared: int = 0, of: tuple[int, ...] = (0, 0, 0)
) -> simulator.Stepper:
    """Run a kernel in the simulator and step through one of its blocks: in a notebook, or as a page with .save("FILE.html").

    of: the position of the block. A KernelError is shown where it happens.
    """
    return simulator.record(kernel, grid, block, *args, shared=shared, of=of)


def compare(name: str, got: Any, want: Any) -> None:
    """Print the largest difference between two arrays."""
    got, want = host(got).astype(np.float64), host(want).astype(np.float64)
    error = np.abs(got - want)
    print(f"{name}: largest difference {error.max():.1e} (values up to {np.abs(want).max():.3g})")


# ----------------------------------------------------------------------------- the files of a lesson
def lesson_files() -> list[Path]:
    """The files of all lessons, in order. Raises UserError in an installed package, which has no lessons."""
    found = sorted(LESSONS.glob("[0-9][0-9]_*.py"))
    if not found:
        raise UserError(
            "the lessons are in xtrain's repository, not in the installed package: run this in a clone"
        )
    return found


def lesson_file(lesson: str) -> Path:
    """The file of a lesson by its number. Raises UserError if there is none."""
    files = lesson_files()
    found = [f for f in files if lesson.isdecimal() and f.name.startswith(f"{int(lesson):02d}_")]
    if not found:
        raise UserError(
            f"there is no lesson {lesson} in {LESSONS}: `python -m xtrain.lesson list` shows all lessons"
        )
    return found[0]


def cells(text: str) -> list[tuple[str, str]]:
    """[(header, source)] of a jupytext percent file; the header is the text after `# %%`."""
    fields = re.split(r"^# %%(.*)\n", text, flags=re.M)[1:]
    return [(h.strip(), body.strip("\n")) for h, body in zip(fields[::2], fields[1::2])]


def tagged(text: str, *tags: str) -> str:
    """The code of all cells with one of these tags. Solutions have the names of the exercises."""
    chosen = [plain_solution(b) for h, b in cells(text) if any(f'"{t}"' in h for t in tags)]
    return "\n\n\n".join(chosen) + "\n"


def plain_solution(code: str) -> str:
    """The code of a solution's cell, in which the function has the name of the exercise: add_kernel, not
    add_kernel_solution.
    """
    calls = r"^(\w+) = lesson\.yours\(.*\)$"
    names = re.findall(calls, code, re.M)
    code = re.sub(rf"\n*{calls}", "", code, flags=re.M)
    for name in names:
        code = re.sub(rf"\b{name}_solution\b", name, code)
    return code


def work_folder() -> Path:
    """The folder of the reader's files: my_lessons, also from inside it."""
    return Path() if Path.cwd().name == WORK.name else WORK


def start(lesson: str, folder: Path | None = None, force: bool = False) -> Path:
    """Write a lesson's exercises, with their gaps, to `folder`. -> the file.

    lesson: "1", or one of its exercises, "1.2". folder: default work_folder()
    force: overwrite an existing file, of which a copy stays; otherwise that raises UserError.
    """
    folder = work_folder() if folder is None else folder
    lesson = lesson.partition(".")[0]
    path = lesson_file(lesson)
    mine = folder / path.name
    if os.path.exists(mine) and not force:
        raise UserError(
            f"{mine} exists: continue there, or give --force to overwrite it; a copy stays"
        )
    text = head(path) + tagged(path.read_text(encoding="utf-8"), "imports", "exercise")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if mine.is_file():
            write_whole(_free_name(mine), mine.read_bytes())
        write_whole(
            mine, text.encode()
        )  # atomic: --force on a full disk must not lose the old file
    except OSError as error:
        raise cannot_write(mine, error, "start in another folder") from error
    return mine


def head(path: Path) -> str:
    """The first lines of the reader's file of a lesson."""
    number = int(path.stem[:2])
    return (
        f'"""Exercises of {path.stem}: fill every gap, then run  python -m xtrain.lesson check {number}\n\n'
        f'The lesson: lessons/{path.stem}.ipynb, or its page on the site."""\n\n'
    )


def _free_name(file: Path) -> Path:
    """01_threads.backup1.py, or with the first number that is free."""
    names = (file.with_name(f"{file.stem}.backup{i}.py") for i in itertools.count(1))
    return next(name for name in names if not name.exists())


def check_file(
    lesson: str, file: Path | None = None, seed: int | None = None
) -> Iterator[tuple[str, Verdict]]:
    """Check the exercises of a lesson ("1"), or one of them ("1.2"), in the reader's file. Yields (number, verdict).

    seed: see check.

    A kernel that ran can be stepped through: a page per exercise next to the file, my_lessons/01_threads_1.1.html.
    """
    if process.can_fork():
        process.template()  # before the answers are imported
    lesson, _, one = lesson.partition(".")
    exercises = [e for e in _exercises_of(lesson) if not one or e.number.split(".")[1] == one]
    if not exercises:
        raise UserError(
            f"there is no exercise {lesson}.{one}: lesson {lesson} has {_names(lesson)}"
        )
    if file is None:
        file = work_folder() / lesson_file(lesson).name
    if not file.exists():
        raise UserError(
            f"{file} does not exist: run `python -m xtrain.lesson start {lesson}` to create it"
        )
    text = read_attempt(file)
    given = [tagged(f.read_text(encoding="utf-8"), "imports") for f in _files_of(lesson)]
    for e in exercises:
        yield e.number, judge_file(e, file.resolve(), text, "".join(given), seed)


def _files_of(lesson: str) -> list[Path]:
    """The file of a lesson; none if it is missing, which costs an attempt no verdict."""
    return sorted(LESSONS.glob(f"{int(lesson):02d}_*.py"))


def read_attempt(file: Path) -> str:
    """The text of a reader's file. Raises UserError if it is not Python."""
    try:
        text = file.read_text(encoding="utf-8")
        compile(text, str(file), "exec")
    except (OSError, ValueError, SyntaxError) as error:
        at = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(
            f"{file} cannot be read as Python: {type(error).__name__}{at}: {error}"
        ) from None
    return text


def judge_file(
    e: attempt.Exercise,
    file: Path,
    text: str,
    given: str = "",
    seed: int | None = None,
    steps: bool = True,
) -> Verdict:
    """Judge what `file`, with this text, has for an exercise, in a separate process (in this one without os.fork).

    given: the imports of the lesson, which the processes of all attempts share. seed, steps: see verdict
    """
    with contextlib.ExitStack() as stack:
        try:
            runner: Runner | process.Runner
            if process.can_fork():
                process.template().prepare(given)
                runner = process.Runner(process.template(), file, text, e.name, e.allow)
                stack.callback(runner.close)
            else:
                runner = load_attempt(text, str(file), e.name, e.allow)
            said = attempt.judge(e, runner, seed, steps)
        except Exception as error:  # while the file was loaded
            why = (
                str(error)
                if isinstance(error, Wrong)
                else f"{file} raises {type(error).__name__}: {error}"
            )
            said = Verdict(False, f"{e.number} {e.name}: not yet.\n  {why}")
        return _with_page(e, said, file) if steps else said


def passed(folder: Path | None = None) -> set[str]:
    """The numbers of the exercises that passed their last check, as noted in `folder`. Other lines of the note are ignored."""
    folder = work_folder() if folder is None else folder
    try:
        words = (folder / PASSED).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return set()
    return {word for word in words if re.fullmatch(r"[0-9]+\.[0-9]+", word)}


def note_passed(folder: Path, results: dict[str, bool]) -> None:
    """Note which exercises passed. Nothing is written as long as none has. Raises UserError if it cannot be written."""
    before = passed(folder)
    now = (before | {n for n, ok in results.items() if ok}) - {
        n for n, ok in results.items() if not ok
    }
    if now == before:
        return
    order = sorted(now, key=lambda n: [int(x) for x in n.split(".")])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / PASSED, "".join(f"{n}\n" for n in order).encode())
    except OSError as error:
        raise cannot_write(folder / PASSED, error, "work in another folder") from error


def _with_page(e: attempt.Exercise, verdict: Verdict, file: Path) -> Verdict:
    """Write the page of the verdict's stepper, and name it in the verdict. One that cannot be written costs no verdict."""
    if verdict.stepper is None:
        return verdict
    page = file.with_name(f"{file.stem}_{e.number}.html")
    said = f"step by step: {page}"
    try:
        write_whole(page, verdict.stepper.page().encode())
    except OSError as error:
        said = str(cannot_write(page, error, "check a file in another folder"))
    except Wrong:  # its process has ended
        return verdict
    return replace(verdict, text=f"{verdict.text}\n  {said}")


# ----------------------------------------------------------------------------- the way through the lessons
def hints(number: str) -> list[str]:
    """The hints of an exercise ("1.2"), the first of which says least. Raises UserError if there is no such exercise."""
    lesson = number.partition(".")[0]
    names = {e.number: e.name for e in _exercises_of(lesson)}
    if number not in names:
        raise UserError(f"there is no exercise {number}: lesson {lesson} has {_names(lesson)}")
    here, found = False, []
    for header, body in cells(lesson_file(lesson).read_text(encoding="utf-8")):
        if '"exercise"' in header and any(f"def {name}(" in body for name in names.values()):
            here = f"def {names[number]}(" in body
        if here:
            found += re.findall(
                r"<summary>Hint.*?</summary>\n(.*?)^# </details>", body, re.M | re.S
            )
    return [re.sub(r"^# ?", "", text, flags=re.M).strip() for text in found]


def next_exercise() -> str | None:
    """The first exercise, in the order of the tracks, that has not passed yet; None: all have."""
    done = passed() | passed(LESSONS / WORK)
    numbers = (e.number for track in TRACKS.values() for n in track for e in _exercises_of(str(n)))
    return next((n for n in numbers if n not in done), None)


def minutes() -> dict[int, int]:
    """How long each lesson takes, as lessons/index.md says."""
    index = (LESSONS / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| \[.*\| (\d+) \| [^|]*\|$", index, re.M)
    return {int(number): int(time) for number, time in rows}


def overview() -> list[str]:
    """One line per track and lesson: its minutes, which exercises passed their last check (here, or in a notebook), and your
    file.
    """
    done, lines = passed() | passed(LESSONS / WORK), []
    files = {int(path.name[:2]): path for path in lesson_files()}
    times = minutes()
    for track, numbers in TRACKS.items():
        own = [e.number for n in numbers for e in _exercises_of(str(n))]
        hours = sum(times.get(n, 0) for n in numbers) / 60
        lines.append(
            f"{track}: {len(done & set(own))} of {len(own)} exercises passed, {hours:.0f} hours"
        )
        for n in numbers:
            if n not in files:
                continue
            mine = work_folder() / files[n].name
            status = f"   {mine}" if mine.exists() else ""
            marks = "  ".join(
                f"[{'x' if e.number in done else ' '}] {e.number}" for e in _exercises_of(str(n))
            )
            name = files[n].stem[3:].replace("_", " ")
            lines.append(f"  {n:>2}  {name:<17} {times.get(n, 0):>3} min  {marks}{status}")
    return lines
