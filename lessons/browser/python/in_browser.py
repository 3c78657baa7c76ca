"""What worker.js calls: run a program, judge a reader's file. Results are JSON."""

import json
import linecache
import os
import sys
import time
import traceback
from collections import deque
from pathlib import Path

from xtrain.simulator import frontends

frontends.load_all()  # from here on `from numba import cuda` finds the simulator's own

from xtrain import lesson  # noqa: E402
from xtrain.errors import UserError  # noqa: E402
from xtrain.simulator import KernelError, Stepper, observe, simulate  # noqa: E402

WORK = Path("/my_lessons")
PAGES = 8  # of the last launches of a program


class Launches(Stepper):
    """A recording of each launch, instead of the first one."""

    def __init__(self, of=(0, 0, 0)):
        super().__init__(of)
        self.earlier: deque[Stepper] = deque(maxlen=PAGES - 1)

    def begin(self, block):
        earlier = self.earlier
        launch = block.launch
        if self.launch not in (None, launch) and launch.repeats is not self.launch:
            done = Stepper()
            vars(done).update(vars(self))
            vars(self).update(vars(Stepper()))
            earlier.append(done)
        super().begin(block)  # which forgets everything if this is the launch in another order
        self.earlier = earlier

    def pages(self) -> list[dict]:
        """Return the kernel, the error and the HTML of each."""
        ran = [recording for recording in (*self.earlier, self) if recording.launch is not None]
        return [
            {
                "kernel": recording.launch.name,
                "error": str(recording.error or ""),
                "html": recording.page(),
            }
            for recording in ran
        ]


def run(code: str, file: str, options: str) -> str:
    """Run a program with simulate(**options). Return {ok, error, pages, seconds}."""
    recorded = Launches()
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
    done = {"ok": not error, "error": error, "pages": recorded.pages(), "seconds": seconds}
    return json.dumps(done)


def _traceback(error: BaseException, file: str) -> str:
    """Return the traceback from the program's own first line on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != file:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def check(number: str, text: str, stem: str, seed: int | None) -> str:
    """Judge the exercise `number` in a file's text, as `xtrain lesson check` does. Return {passed, text, page}."""
    judges = lesson.load_checks("api")
    file = WORK / f"{stem}.py"
    file.write_text(text, encoding="utf-8")
    page = WORK / f"{stem}_{number}.html"
    page.unlink(missing_ok=True)
    try:
        judges.read_attempt(file)
    except UserError as error:
        return json.dumps({"passed": False, "text": str(error), "page": ""})
    [exercise] = (e for e in judges._exercises_of(number.split(".")[0]) if e.number == number)
    said = judges.judge_file(exercise, file, text, seed=seed)
    html = page.read_text(encoding="utf-8") if page.exists() else ""
    words = str(said).removesuffix(f"\n  step by step: {page}")
    return json.dumps({"passed": said.passed, "text": words, "page": html})


sys.path.insert(0, str(WORK))
WORK.mkdir(exist_ok=True)
lesson.load_checks("api")  # takes a moment, which the first check need not wait for
