"""Attempts in processes of their own: the same verdicts, nothing to copy from, and always a verdict."""

import itertools
import time

import pytest
from checks import only_slow
from test_attempts import ATTEMPTS

from xtrain import lesson

COUNT = itertools.count()  # for unique file names: sources are looked up by name
RIGHT = [(number, words, code) for number, kind, words, code in ATTEMPTS if kind == "RIGHT"]
# test_attempts.py tries all of them in its own process
SOME = [x if i % 8 == 0 else pytest.param(*x, marks=only_slow) for i, x in enumerate(RIGHT)]


def judged(number, code, folder="/nowhere"):
    """-> the verdict on what a reader's file with this code has for the exercise"""
    text = lesson.lesson_file(number.split(".")[0]).read_text(encoding="utf-8")
    lesson._exercises_of(number.split(".")[0])
    imports = lesson.tagged(text, "imports")
    given = lesson.tagged(text, "imports", "exercise")
    file = lesson.Path(folder, f"reader_{next(COUNT)}.py")
    exercise = lesson.EXERCISES[number]
    return lesson.judge_file(exercise, file, f"{given}\n\n{code}\n", imports, seed=1, steps=False)


@pytest.mark.parametrize("number, words, code", SOME, ids=lambda x: x.split("\n")[0][:50])
def test_unusual_right_attempts_pass_in_their_process(number, words, code):
    verdict = judged(number, code)
    assert verdict.passed, verdict.text


def test_a_process_starts_within_three_tenths_of_a_second():
    process = lesson.load_checks("process")
    template, code = process.template(), "def f(x):\n    return x + 1\n"
    times = []
    for _ in range(5):
        start = time.perf_counter()
        runner = process.Runner(template, lesson.Path("/nowhere/f.py"), code, "f", frozenset())
        assert runner.call(1) == 2
        times.append(time.perf_counter() - start)
        runner.close()
    assert min(times) < 0.3


# ----------------------------------------------------------------------------- what ends an attempt
POOL = "def make_pool(size):\n    "
ENDS = {
    "exit() in the file": ("24.1", "exit()\n", "calls exit()"),
    "sys.exit() in the function": ("24.1", f"import sys\n{POOL}sys.exit()\n", "calls exit()"),
    "os._exit": ("24.1", f"import os\n{POOL}os._exit(0)\n", "ended without an answer"),
    "an error in the file": ("24.1", "1 / 0\n", "ZeroDivisionError"),
    "a missing function": ("24.1", "del make_pool\n", "has no make_pool"),
    "input()": ("24.1", f"{POOL}return input()\n", "EOFError"),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_an_attempt_that_ends_its_process_gets_a_verdict(how):
    number, code, words = ENDS[how]
    verdict = judged(number, code)
    assert not verdict.passed and words in verdict.text, verdict.text
    assert verdict.text.startswith(f"{number} make_pool: not yet.")


# ----------------------------------------------------------------------------- cheats
RING = "def ring_all_reduce(comm, x_n):\n    "
BLOCKS = "def block_names(tokens, S):\n    "
STEEPEST = "import importlib, sys\nfrom pathlib import Path\n\n\ndef steepest(G):\n    "
CHEATS = {
    "comm.comm": ("32.1", f"{RING}comm.comm.all_reduce(x_n)\n", "AttributeError"),
    "comm._comm": ("32.1", f"{RING}comm._comm.all_reduce(x_n)\n", "AttributeError"),
    "the ring's own count": ("32.1", f"{RING}comm.world = 1\n", "cannot be set"),
    "a dict that ranks share": (
        "32.1",
        f"import numpy as np\nALL = {{}}\n\n\n{RING}ALL[comm.rank] = x_n.copy()\n    right, left = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world\n"
        "    for _ in range(comm.world):\n        comm.exchange(x_n[:0], right, np.empty(0, x_n.dtype), left)\n    x_n[...] = sum(ALL.values())\n",
        "expected",
    ),
    "a dict that generators share": (
        "15.2",
        "ALL = {}\n\n\ndef all_reduce(rank, world, own_n, read):\n    ALL[rank] = own_n.copy()\n    yield\n    own_n[...] = sum(ALL.values())\n",
        "expected",
    ),
    "the judge's module": (
        "28.1", f"{STEEPEST}return sys.modules['lesson_checks.lesson_28'].iterated(G, 5)\n", "KeyError",
    ),
    "the judge's module, imported": (
        "28.1", f"{STEEPEST}from xtrain.lesson import load_checks\n    return load_checks('lesson_28').iterated(G, 5)\n", "the library's own",
    ),
    "the judge's module, imported by name": (
        "28.1", f"{STEEPEST}load = importlib.import_module('xtrain.lesson').load_checks\n    return load('lesson_28').iterated(G, 5)\n", "cannot open",
    ),
    "the caller's frame": (
        "28.1",
        f"{STEEPEST}frame = sys._getframe()\n    while frame and 'U' not in frame.f_locals:\n        frame = frame.f_back\n    return frame.f_locals['U']\n",
        "AttributeError",
    ),
    "the objects of the process": (
        "28.1", f"{STEEPEST}import gc\n    found = [x for x in gc.get_objects() if isinstance(x, type(steepest)) and x.__name__ == 'iterated']\n    return found[0](G, 5)\n", "IndexError",
    ),
    "another room of the library": (
        "24.3", f"import importlib\n\n\n{BLOCKS}return importlib.import_module('xtrain.serving.blocks').block_keys(tokens, S)\n", "calls the library's",
    ),
    "the lesson's solution": (
        "28.1", f"{STEEPEST}return Path({str(lesson.LESSONS / '28_muon.py')!r}).read_text()\n", "cannot open",
    ),
    "a program that reads the solution": (
        "28.1", f"import subprocess\n{STEEPEST}return subprocess.run(['cat', {str(lesson.LESSONS / '28_muon.py')!r}])\n", "cannot start another program",
    ),
    "a judge that accepts everything": (
        "28.1",
        "import numpy as np\nimport importlib\n\nattempt = importlib.import_module('xtrain.lesson').load_checks('attempt')\nattempt.Attempt.same = lambda *_, **__: None\n"
        f"np.isclose = np.allclose = lambda *_, **__: np.array(True)\n\n\n{STEEPEST}return np.zeros_like(G)\n",
        "expected",
    ),
    "another room of the library, whose refusal is caught": (
        "24.3",
        f"import importlib\n\n\n{BLOCKS}keys = importlib.import_module('xtrain.serving.blocks').block_keys\n    try:\n        keys(tokens, S)\n    except Exception:\n        return keys(tokens, S)\n",
        "calls the library's",
    ),
    "no profiler": (
        "24.3", f"import sys, importlib\n\n\n{BLOCKS}sys.setprofile(None)\n    return importlib.import_module('xtrain.serving.blocks').block_keys(tokens, S)\n", "sys.setprofile",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", CHEATS)
def test_a_cheat_does_not_pass(how):
    number, code, words = CHEATS[how]
    verdict = judged(number, code)
    assert not verdict.passed and words in verdict.text, verdict.text
