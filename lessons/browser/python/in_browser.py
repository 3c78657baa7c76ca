"""What worker.js calls: run a program, judge a reader's file. Results are JSON."""

import contextlib
import json
import linecache
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

from xtrain.simulator import frontends

frontends.load_all()  # from here on `from numba import cuda` finds the simulator's own

from traced import LastLaunch  # noqa: E402

from xtrain import lesson  # noqa: E402
from xtrain.errors import UserError  # noqa: E402
from xtrain.simulator import KernelError, observe, simulate  # noqa: E402

WORK = Path("/my_lessons")


@contextlib.contextmanager
def alone():
    """Undo, for the program that comes next, what one changes for all. Show what it has printed without an end of line."""
    streams = sys.stdout, sys.stderr
    most_calls = sys.getrecursionlimit()
    try:
        with np.errstate(), np.printoptions(), warnings.catch_warnings():
            yield
    finally:
        sys.setrecursionlimit(most_calls)
        sys.stdout, sys.stderr = streams
        for stream in streams:
            with contextlib.suppress(ValueError):  # the program has closed it
                stream.flush()


@alone()
def run(code: str, file: str, options: str) -> str:
    """Run a program with simulate(**options). Return {ok, error, page, seconds}. page: of its last launch, or ""."""
    recorded = LastLaunch()
    begin = time.perf_counter()
    error = ""
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    os.chdir(WORK)
    try:
        program = compile(code, file, "exec")
        with simulate(**json.loads(options)), observe(recorded):
            exec(program, {"__name__": "__main__", "__file__": file})
    except KernelError as finding:
        error = f"{type(finding).__name__}: {finding}"
    except SystemExit:
        pass
    except BaseException as raised:
        error = _traceback(raised, file)
    seconds = time.perf_counter() - begin
    page = ""
    if recorded.launch is not None:
        page = recorded.page()
    return json.dumps({"ok": not error, "error": error, "page": page, "seconds": seconds})


def _traceback(error: BaseException, file: str) -> str:
    """Return the traceback from the program's own first line on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != file:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


@alone()
def check(number: str, text: str, stem: str, seed: int | None) -> str:
    """Judge the exercise `number` in a file's text, as `xtrain lesson check` does. Return {passed, text, page}.

    passed: None if the file is not Python: there is no verdict.
    """
    judges = lesson.load_checks("api")
    file = WORK / f"{stem}.py"
    file.write_text(text, encoding="utf-8")
    page = WORK / f"{stem}_{number}.html"
    page.unlink(missing_ok=True)
    try:
        judges.read_attempt(file)
    except UserError as error:
        return json.dumps({"passed": None, "text": str(error), "page": ""})
    [exercise] = (e for e in judges._exercises_of(number.split(".")[0]) if e.number == number)
    said = judges.judge_file(exercise, file, text, seed=seed)
    html = page.read_text(encoding="utf-8") if page.exists() else ""
    words = str(said).removesuffix(f"\n  step by step: {page}")
    return json.dumps({"passed": said.passed, "text": words, "page": html})


sys.path.insert(0, str(WORK))
WORK.mkdir(exist_ok=True)
lesson.load_checks("api")  # takes a moment, which the first check need not wait for
