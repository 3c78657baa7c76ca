"""Run one target on many inputs and report the result.

A target gets an input from hypothesis. It may work, or refuse the input with a message (Refused);
anything else is a finding: another exception, more than LIMIT seconds, a crash of the interpreter.
Targets run in a separate process, so that a crash is reported too.
"""

import collections
import faulthandler
import json
import multiprocessing
import resource
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

LIMIT = 20.0  # seconds for one input
STUCK = 3  # times LIMIT, then the process is killed: a loop in a C library blocks Python's alarm
MEMORY = 6 << 30  # bytes beyond the address space in use: larger allocations raise MemoryError


class Refused(Exception):
    """The target refused the input with a message."""


class Hang(BaseException):
    """Not an Exception: the code under test must not catch it."""


class _OutOfTime(BaseException):
    pass


@dataclass(frozen=True)
class Target:
    """call(input, folder) returns or raises Refused. folder: initially empty, used by this target alone."""

    strategy: SearchStrategy
    call: Callable[[Any, Path], None]


@dataclass
class Result:
    """The result of one target. sentences: number of different messages, without numbers and names."""

    target: str
    inputs: int = 0
    worked: int = 0
    refused: int = 0
    seconds: float = 0.0
    sentences: int = 0
    finding: str | None = None
    input: str | None = None


def fuzz(
    name: str,
    make: Callable[[], Target],
    inputs: int,
    start: int,
    folder: Path,
    seconds: float = 1e9,
    limit: float | None = None,
) -> Result:
    """Run the target that make() returns, in a child process.

    start: the seed. seconds: start no input after this time. limit: seconds for one input; None: LIMIT.
    """
    limit = LIMIT if limit is None else limit
    note = folder / "last_input.txt"
    queue = multiprocessing.get_context("fork").SimpleQueue()
    arguments = (name, make, inputs, start, folder, seconds, limit, note, queue)
    worker = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
    worker.start()
    result, known, since = None, None, time.monotonic()
    while result is None and (worker.is_alive() or not queue.empty()):
        if not queue.empty():
            result = Result(**queue.get())
            break
        time.sleep(0.02)
        now = note.stat().st_mtime_ns if note.exists() else None
        if now != known:
            known, since = now, time.monotonic()
        elif now is not None and time.monotonic() - since > STUCK * limit:
            worker.kill()
            result = Result(name, finding="Hang: not even a signal ends it", input=note.read_text())
    worker.join()
    if result is None:
        ended = signal.Signals(-worker.exitcode).name if worker.exitcode < 0 else worker.exitcode
        last = note.read_text() if note.exists() else "none"
        result = Result(name, finding=f"the interpreter ended with {ended}", input=last)
    return result


def _work(name, make, inputs, start, folder, seconds, limit, note, queue):
    _limit_memory()
    faulthandler.disable()  # the exit is reported below; pytest's dump would only confuse
    target, result = make(), Result(name)
    said: collections.Counter[str] = collections.Counter()
    begun = None  # time of the first input: on a busy machine Hypothesis needs seconds before it
    signal.signal(signal.SIGALRM, _too_long(limit))

    @seed(start)
    @settings(
        max_examples=inputs, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink], print_blob=False,
        report_multiple_bugs=False,
    )  # fmt: skip
    @given(target.strategy)
    def one(value):
        nonlocal begun
        begun = begun or time.monotonic()
        if time.monotonic() - begun > seconds:
            raise _OutOfTime
        note.write_text(repr(value))
        result.inputs += 1
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            target.call(value, folder)
            result.worked += 1
        except Refused as refused:
            result.refused += 1
            said[" ".join(w for w in str(refused).split() if w.isalpha())] += 1
        # BaseException: a panic in a Rust library is not an Exception
        except BaseException:
            result.input = repr(value)
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    try:
        one()
    except _OutOfTime:
        pass
    except BaseException as error:
        result.finding = _short(error)
    result.seconds = round(time.monotonic() - begun, 1) if begun else 0.0
    result.sentences = len(said)
    queue.put(asdict(result))


def _limit_memory():
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    sizes = Path("/proc/self/statm")  # a GPU's driver reserves terabytes of addresses
    used = int(sizes.read_text().split()[0]) * resource.getpagesize() if sizes.exists() else 0
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))


def _too_long(limit):
    def hang(number, frame):
        raise Hang(f"more than {limit:g} s")

    return hang


def _short(error):
    if isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "xtrain" in f.filename or "fuzzing" in f.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}: {str(error)[:300]} ({where})"


def record(path: Path, result: Result, **more: Any) -> None:
    """Append the result as one JSON line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"bench": "fuzz", **asdict(result), **more}) + "\n")
