"""Every lesson: a gap gets a helpful answer, the solution passes, each typical mistake gets its own answer. And the tools."""

import errno
import html
import importlib.util
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xtrain import lesson
from xtrain.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "lessons").glob("[0-9][0-9]_*.py"))
NUMBERS = [str(int(p.name[:2])) for p in SOURCES]
path = ROOT / "lessons" / "tools" / "notebooks.py"
spec = importlib.util.spec_from_file_location("notebooks", path)
notebooks = importlib.util.module_from_spec(spec)
HAS_JUPYTEXT = importlib.util.find_spec("jupytext") is not None
spec.loader.exec_module(notebooks)
COUNT = itertools.count()  # for unique file names: sources are looked up by name
GAPS, SOLVED = ("imports", "exercise"), ("imports", "exercise", "solution")


def text_of(number):
    return lesson.lesson_file(number.split(".")[0]).read_text(encoding="utf-8")


def work(number, tags, change=lambda code: code):
    """-> a module with the cells of a lesson that have these tags; change: edits their text first"""
    return lesson.load(change(lesson.tagged(text_of(number), *tags)), f"attempt_{next(COUNT)}.py")


# ----------------------------------------------------------------------------- every exercise
@pytest.mark.parametrize("number", NUMBERS)
def test_gap_gets_a_helpful_answer_and_solution_passes(number):
    gaps, solved = work(number, GAPS), work(number, SOLVED)
    exercises = lesson._exercises_of(number)
    assert exercises
    for e in exercises:
        verdict = lesson.verdict(e.number, getattr(gaps, e.name))
        assert not verdict.passed and "YOUR CODE" in verdict.text, verdict.text
        assert len(verdict.text.splitlines()) >= 2, verdict.text
        verdict = lesson.verdict(e.number, getattr(solved, e.name))
        assert verdict.passed, verdict.text


def mistakes(table="MISTAKES"):
    """-> the rows of one table of all files in tests/lessons/mistakes

    MISTAKES: (exercise, old, new, words in the answer)
    UNTRUE: (exercise, old, new, words that must not be in the answer)   RIGHT: (exercise, old, new), which passes
    """
    for path in sorted((ROOT / "tests" / "lessons" / "mistakes").glob("lesson_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield from getattr(module, table, ())


def planted(number, old, new, rename=()):
    """-> the verdict on a solution in which `old` is replaced by `new`, and then these parameters are renamed"""
    lesson._exercises_of(number.split(".")[0])
    name = lesson.EXERCISES[number].name

    def plant(code):
        head, last = code.rsplit(f"def {name}(", 1)
        assert old in last, f"the solution of {number} has changed: {old!r} is not in it"
        last = last.replace(old, new)
        for parameter in rename:
            last = re.sub(rf"\b{parameter}\b", f"{parameter}_", last)
        return f"{head}def {name}({last}"

    solution = getattr(work(number, SOLVED, plant), name)
    return lesson.verdict(number, solution, seed=1, steps=False)


# 18.1: tokens without a place leave most threads idle.  21.1: two lengths are exchanged, and the first steps stay the same
@pytest.mark.parametrize("number, seed", [("18.1", 47241), ("18.1", 47014), ("21.1", 1003)])
def test_the_solution_passes_with_these_random_numbers(number, seed):
    [exercise] = (e for e in lesson._exercises_of(number.split(".")[0]) if e.number == number)
    solved = work(number, SOLVED)
    verdict = lesson.verdict(number, getattr(solved, exercise.name), seed=seed, steps=False)
    assert verdict.passed, verdict.text


@pytest.mark.parametrize("number, old, new, words", list(mistakes()))
def test_typical_mistake_gets_its_own_answer(number, old, new, words):
    verdict = planted(number, old, new)
    assert not verdict.passed and words in verdict.text, verdict.text


@pytest.mark.parametrize("number, old, new, words", list(mistakes("UNTRUE")))
def test_the_answer_says_nothing_untrue(number, old, new, words):
    verdict = planted(number, old, new)
    assert not verdict.passed and words not in verdict.text, verdict.text


@pytest.mark.parametrize("number, old, new", list(mistakes("RIGHT")))
def test_another_solution_passes(number, old, new):
    verdict = planted(number, old, new)
    assert verdict.passed, verdict.text


TRACED = {  # words in the answer to a mistake that only the memory accesses show
    "2.1": "neighbouring threads must touch", "2.3": "move 16 bytes per thread", "3.1": "one lane reads one element",
    "4.1": "in every iteration of the loop", "4.2": "multiply from the tiles", "11.2": "read back from memory",
    "13.3": "several threads of a block",
}  # fmt: skip


@pytest.mark.parametrize("number", TRACED)
def test_traced_mistakes_are_found_with_other_parameter_names(number):
    mistake = next(m for m in mistakes() if m[0] == number and TRACED[number] in m[3])
    lesson._exercises_of(number.split(".")[0])
    solved = getattr(work(number, SOLVED), lesson.EXERCISES[number].name)
    verdict = planted(*mistake[:3], rename=inspect.signature(solved.py_func).parameters)
    assert not verdict.passed and TRACED[number] in verdict.text, verdict.text


@pytest.mark.parametrize("number", NUMBERS)
def test_at_least_three_mistakes_are_known(number):
    known = list(mistakes())
    for e in lesson._exercises_of(number):
        answers = {words for n, _, _, words in known if n == e.number}
        assert len(answers) >= 3, f"{e.number} has {len(answers)} in tests/lessons/mistakes"


# ----------------------------------------------------------------------------- refusals
PREFIX = "from numba import cuda\nfrom xtrain.kernels import elementwise\nfrom xtrain.kernels.primitives import reduce\n"
REFUSED = {
    "by name": "@cuda.jit\ndef add_kernel(y_n, a_n, b_n):\n    elementwise.add_chunks(y_n, a_n, b_n, 0, False)\n",
    "by another name": "mine = elementwise.add_chunks\n@cuda.jit\ndef add_kernel(y_n, a_n, b_n):\n    mine(y_n, a_n, b_n, 0, False)\n",
    "through a helper": "@cuda.jit(device=True)\ndef helper(v):\n    return reduce.warp_sum(v)\n"
    "@cuda.jit\ndef add_kernel(y_n, a_n, b_n):\n    helper(a_n[0])\n",
    "the kernel itself": "add_kernel = elementwise.add_naive_kernel\n",
    "a kernel of the lessons": "from xtrain import lesson\nadd_kernel = lesson.padding.cumulative_lengths_kernel\n",
    "by import": "@cuda.jit\ndef add_kernel(y_n, a_n, b_n):\n    from xtrain.kernels.elementwise import add_ref\n    y_n[0] = 1\n",
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_library_is_refused(how):
    module = lesson.load(PREFIX + REFUSED[how], f"refused_{how}.py")
    verdict = lesson.verdict("1.1", module.add_kernel)
    assert not verdict.passed and "the library's own" in verdict.text, verdict.text


def test_a_variable_may_have_the_name_of_a_library_function():
    code = "from xtrain.kernels.elementwise import add_ref\nfrom numba import cuda\n@cuda.jit\ndef add_kernel(y_n, a_n, b_n):\n    add_ref = cuda.grid(1)\n    y_n[add_ref] = 7\n"
    assert "the library's own" not in lesson.verdict("1.1", lesson.load(code, "own.py").add_kernel).text  # fmt: skip


def test_objects_that_are_not_kernels():
    code = "def add_kernel(y_n, a_n, b_n):\n    y_n[0] = a_n[0]\n"
    verdict = lesson.verdict("1.1", lesson.load(code, "plain.py").add_kernel)
    assert "write @cuda.jit above it" in verdict.text
    assert "must be a function" in lesson.verdict("1.1", 3).text
    code = "from numba import cuda\n@cuda.jit\ndef add_kernel(y_n):\n    y_n[0] = 1\n"
    verdict = lesson.verdict("1.1", lesson.load(code, "arguments.py").add_kernel)
    assert "called with 3 arguments" in verdict.text


def test_endless_loop_is_stopped(monkeypatch):
    monkeypatch.setattr(lesson.load_checks("running"), "SECONDS", 1)
    monkeypatch.setattr("xtrain.simulator.thread.MAX_TURNS", 10**12)  # or it stops first
    code = "from numba import cuda\n@cuda.jit\ndef add_kernel(y_n, a_n, b_n):\n    i = 0\n    while i < 1:\n        y_n[i] = 1\n"
    verdict = lesson.verdict("1.1", lesson.load(code, "endless.py").add_kernel)
    assert "did not end within 1 seconds" in verdict.text


def test_a_slow_search_is_told_to_compute(monkeypatch):
    monkeypatch.setattr(lesson.load_checks("running"), "SECONDS", 0.2)
    code = "\n    found = cuda.local.array(1, int32)\n    for k in range(12700):\n        found[0] = k\n"
    verdict = planted("45.1", "\n    i = cuda.grid(1)\n", f"{code}    i = cuda.grid(1)\n")
    assert "did not end within" in verdict.text and "compute the code from the bits" in verdict.text


def test_unknown_exercises():
    with pytest.raises(UserError, match="there is no lesson 99"):
        lesson.verdict("99.1", print)
    with pytest.raises(UserError, match=r"no exercise 1\.77: lesson 1 has 1\.1, 1\.2, 1\.3"):
        lesson.verdict("1.77", print)


# ----------------------------------------------------------------------------- the command line
def command(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "xtrain.lesson", *arguments], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip


def test_from_start_to_a_passed_check(tmp_path, monkeypatch, capsys):
    def called(*arguments):
        """-> exit code, output, errors of the command in this process"""
        code = lesson.main([*arguments])
        return code, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "my_lessons" / "01_threads.py"
    code, _, err = called("start", "1")
    assert code == 0 and mine.exists(), err
    assert mine.read_text().count("# YOUR CODE") == 3
    code, out, _ = called("check", "1")
    assert code == 1 and out.count("Nothing is written yet") == 3
    mine.write_text(mine.read_text() + lesson.tagged(text_of("1"), "solution"))
    done = command(tmp_path, "check", "1")
    assert done.returncode == 0 and done.stdout.count("correct") == 3, done.stdout + done.stderr
    assert (tmp_path / "my_lessons" / "passed.txt").read_text().split() == ["1.1", "1.2", "1.3"]
    _, shown, _ = called("list")
    assert re.search(r"^Kernels: 3 of \d+ exercises passed, \d+ hours$", shown, re.M)
    assert re.search(
        r"1  threads +75 min  \[x\] 1\.1  \[x\] 1\.2  \[x\] 1\.3   .*01_threads.py", shown
    )
    assert "[ ] 2.1" in shown
    code, out, _ = called("check", "1.2")
    assert code == 0 and out.startswith("1.2") and out.count("correct") == 1
    code, _, err = called("start", "1")
    assert code == 2 and "--force" in err
    mine.write_text("def broken(:\n")
    code, _, err = called("check", "1")
    assert code == 2 and "line 1" in err and "Traceback" not in err


def test_an_exercise_that_no_longer_passes_is_taken_off_the_list(tmp_path):
    api = lesson.load_checks("api")
    api.note_passed(tmp_path / "new", {"2.1": False})
    assert not (tmp_path / "new").exists()
    api.note_passed(tmp_path / "new", {"10.1": True, "2.1": True, "2.2": False})
    assert (tmp_path / "new" / "passed.txt").read_text() == "2.1\n10.1\n"
    api.note_passed(tmp_path / "new", {"2.1": False})
    assert api.passed(tmp_path / "new") == {"10.1"}


def test_a_check_in_a_notebook_is_noted(tmp_path, monkeypatch, capsys):
    api, solved = lesson.load_checks("api"), work("9", SOLVED)
    monkeypatch.setattr(api, "LESSONS", tmp_path)
    api.check("9.3", lambda gpu, launch: None)
    assert "not yet" in capsys.readouterr().out and api.passed(tmp_path / "my_lessons") == set()
    api.check("9.3", solved.queue_ends)
    assert "correct" in capsys.readouterr().out and api.passed(tmp_path / "my_lessons") == {"9.3"}
    (tmp_path / "my_lessons" / "passed.txt").unlink()
    (tmp_path / "my_lessons").rmdir()
    (tmp_path / "my_lessons").write_text("a file")
    api.check("9.3", solved.queue_ends)  # the answer comes, without a note
    assert "correct" in capsys.readouterr().out


def passing_file(folder):
    """A file that passes exercise 9.3. -> my_lessons"""
    mine = folder / "my_lessons"
    mine.mkdir()
    (mine / "09_batching.py").write_text(lesson.tagged(text_of("9"), *SOLVED))
    return mine


def test_start_and_check_from_inside_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(passing_file(tmp_path))
    assert lesson.main(["start", "1.1"]) == 0 and Path("01_threads.py").exists()
    assert (
        lesson.main(["check", "9.3"]) == 0 and "9.3 queue_ends: correct" in capsys.readouterr().out
    )
    assert Path("passed.txt").read_text() == "9.3\n" and not Path("my_lessons").exists()


def test_a_copy_stays_when_a_file_is_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lesson.main(["start", "1"]) == 0
    for number in (1, 2):
        Path("my_lessons/01_threads.py").write_text(f"work {number}\n")
        assert lesson.main(["start", "1", "--force"]) == 0
        assert Path(f"my_lessons/01_threads.backup{number}.py").read_text() == f"work {number}\n"
    assert "YOUR CODE" in Path("my_lessons/01_threads.py").read_text()


def test_next_and_hints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lesson.load_checks("api"), "LESSONS", lesson.LESSONS)
    assert lesson.main(["hint", "24.1", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Hint 2 of 2 for 24.1:\n`allocate` takes a block") and "<" not in said
    assert lesson.main(["hint", "24.1", "3"]) == 2 and "it has 2" in capsys.readouterr().err
    assert lesson.main(["hint", "24.9"]) == 2 and "lesson 24 has 24.1" in capsys.readouterr().err
    (tmp_path / "my_lessons").mkdir()
    (tmp_path / "my_lessons" / "passed.txt").write_text("1.1\n")
    assert lesson.main(["next"]) == 0
    assert re.match(r"\d+\.\d, in .*: python -m xtrain.lesson start \d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_exercise_has_a_hint(number):
    for e in lesson._exercises_of(number):
        assert lesson.hints(e.number), e.number
        assert not re.search(r"\$.*\\", "\n".join(lesson.hints(e.number))), (
            "LaTeX, which a terminal prints as it stands"
        )


def test_a_verdict_comes_although_it_cannot_be_saved(tmp_path, monkeypatch, capsys):
    mine = passing_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    (mine / "passed.txt").write_text("1.1\nbuy milk\n")  # a foreign line
    assert lesson.main(["check", "9.3"]) == 0 and "correct" in capsys.readouterr().out
    assert (mine / "passed.txt").read_text() == "1.1\n9.3\n"
    (mine / "passed.txt").unlink()
    (mine / "passed.txt").mkdir()  # cannot be written
    monkeypatch.setattr(lesson.load_checks("api"), "_files_of", lambda number: [])  # lesson missing
    assert lesson.main(["check", "9.3"]) == 0
    said = capsys.readouterr()
    assert "correct" in said.out and "The verdict is not saved" in said.err


def test_yours_is_the_solution_until_the_gap_is_filled():
    gap, solved = work("9", GAPS).queue_ends, work("9", SOLVED).queue_ends
    assert lesson.yours(gap, solved) is solved
    assert lesson.yours(solved, gap) is solved


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_a_solution_does_not_replace_the_readers_function(path):
    cells = lesson.cells(path.read_text(encoding="utf-8"))
    solutions = "\n".join(body for head, body in cells if '"solution"' in head)
    for e in lesson._exercises_of(str(int(path.name[:2]))):
        assert f"\n{e.name} = lesson.yours({e.name}, {e.name}_solution)" in solutions, e.number
        assert f"def {e.name}(" not in solutions


def test_my_lessons_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_lessons").write_text("a file\n")
    assert lesson.main(["start", "1"]) == 2
    mine = tmp_path / "my_lessons" / "01_threads.py"
    (tmp_path / "my_lessons").unlink()
    mine.mkdir(parents=True)
    assert lesson.main(["start", "1", "--force"]) == 2
    mine.rmdir()
    mine.write_text("my work\n")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert lesson.main(["start", "1", "--force"]) == 2
    assert mine.read_text() == "my work\n"
    error = capsys.readouterr().err
    assert error.count("01_threads.py cannot be written (") == 2 and error.count("\n") == 3
    assert "no space left to write" in error and "or start in another folder" in error


@pytest.mark.parametrize("words", [["list"], ["start", "1"], ["check", "1"]], ids=" ".join)
def test_an_installed_package_has_no_lessons(tmp_path, monkeypatch, capsys, words):
    monkeypatch.setattr(lesson, "CHECKS", tmp_path / "site-packages" / "lessons" / "checks")
    monkeypatch.delitem(sys.modules, lesson.PACKAGE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert lesson.main(words) == 2
    said = capsys.readouterr()
    assert "run this in a clone" in said.err and said.err.count("\n") == 1 and not said.out


def test_bad_lesson_numbers(tmp_path, capsys):
    assert lesson.main(["check", "1.7"]) == 2 and "lesson 1 has 1.1, 1.2" in capsys.readouterr().err
    assert lesson.main(["start", "77"]) == 2 and "there is no lesson 77" in capsys.readouterr().err
    assert lesson.main(["check", "x"]) == 2 and "there is no lesson x" in capsys.readouterr().err
    assert lesson.main(["start", "²"]) == 2 and "there is no lesson ²" in capsys.readouterr().err
    assert lesson.main(["check", "1", str(tmp_path / "a.py")]) == 2
    assert "start 1" in capsys.readouterr().err


def test_work_is_not_tracked():
    assert "my_lessons/" in (ROOT / ".gitignore").read_text().split()


# ----------------------------------------------------------------------------- pages and records
def test_the_index_links_every_lesson():
    index = (ROOT / "lessons" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", index, re.M)
    assert [n for n, _ in rows] == NUMBERS
    for number, title in rows:
        file = next((p for p in SOURCES if int(p.name[:2]) == int(number)), None)
        links = re.findall(r"\]\((.*?)\)", title)
        assert links == ([f"{file.stem}.ipynb"] if file else []), title


def test_the_index_shows_the_tracks_and_their_time():
    index = (ROOT / "lessons" / "index.md").read_text(encoding="utf-8")
    minutes = dict(re.findall(r"^\| (\d+) \| \[.*\| (\d+) \| [^|]*\|$", index, re.M))
    tracks = lesson.load_checks("api").TRACKS
    in_tracks = sorted(n for numbers in tracks.values() for n in numbers)
    assert in_tracks == sorted(map(int, NUMBERS)), (
        "every lesson is in one of TRACKS in checks/api.py"
    )
    for track, numbers in tracks.items():
        row = re.search(rf"^\| \*\*{track}\*\*: [^|]+ \| (.+) \| (\d+) \|$", index, re.M)
        linked = [int(n) for n in re.findall(r"\[(\d+)\]\(\d\d_\w+\.ipynb\)", row[1])]
        assert linked == list(numbers)
        assert int(row[2]) == round(sum(int(minutes[str(n)]) for n in numbers) / 60)
    for path in SOURCES:
        [stated] = re.findall(r"^# \*About (\d+) minutes", path.read_text(encoding="utf-8"), re.M)
        assert stated == minutes[str(int(path.name[:2]))], path.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_shape_of_a_lesson(path):
    text = path.read_text(encoding="utf-8")
    name = notebooks.repository()
    links = re.findall(r"^# (.*https://colab.*)$", text, re.M)
    wanted = [line for line in [notebooks.badge(name, path.stem)] if line]
    assert links == wanted, "the Colab badge: run lessons/tools/notebooks.py repository"
    assert f"https://github.com/{name} xtrain" in text, "the install cell"
    assert path.with_suffix(".ipynb").exists(), "run lessons/tools/notebooks.py"
    headings = re.findall(r"^# ## (.+)$", text, re.M)
    for wanted in (
        "Measure",
        "The library's kernel",
        "What did not help",
        "More exercises",
        "Sources",
    ):
        assert any(wanted in h for h in headings), f"no section {wanted!r}"
    assert 'tags=["install"]' in text and "<details><summary>Hint" in text
    broken = re.findall(r"^# [^\s*+\-|<#%\d].*\n# (?:[+*-] |\d+\. ).*$", text, re.M)
    assert not broken, f"Markdown renders the second line as a list: {broken}"
    install = [b for h, b in lesson.cells(text) if '"install"' in h]
    first = [b for h, b in lesson.cells(SOURCES[0].read_text(encoding="utf-8")) if '"install"' in h]
    assert install == first, "the install cell is the same in all lessons"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_no_line_of_code_is_wider_than_its_page(path):
    """At 1400 pixels a page shows about 100 columns of code."""
    code = [
        b for head, b in lesson.cells(path.read_text(encoding="utf-8")) if "markdown" not in head
    ]
    assert [line for line in "\n".join(code).splitlines() if len(line) > 100] == []


def test_outputs_of_a_cell_whose_digits_vary_are_not_compared(tmp_path):
    cell = '{"cell_type": "code", "source": "", "metadata": {"tags": [%s]}, "outputs": [{"output_type": "stream", "name": "stdout", "text": "%s"}]}'
    book = '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [%s, %s]}'
    pytest.importorskip("nbformat")
    path = tmp_path / "01_a.ipynb"
    path.write_text(book % (cell % ("", "0.5"), cell % ('"varies"', "0.5")))
    assert notebooks.printed(path) == ["0.5", ""]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_records_exist(path):
    for identity in re.findall(
        r"[\"'](bench_\w+/[^\"'{}]+)[\"']", path.read_text(encoding="utf-8")
    ):
        assert lesson.records.find(identity)["gpu"]


def test_record_ids():
    with pytest.raises(
        UserError,
        match=r"no record has the id 'bench_kernels/rmsnorm_fwd/fp8'.*bench_kernels/rmsnorm_fwd/",
    ):
        lesson.records.find("bench_kernels/rmsnorm_fwd/fp8")
    with pytest.raises(UserError, match="no records of 'nothing'"):
        lesson.records.find("nothing/a/b")


def test_a_star_in_a_record_id_stands_for_any_text():
    found = lesson.records.find("bench_server/poisson*/bf16")
    assert found["name"].startswith("poisson ") and found["dtype"] == "bf16"
    with pytest.raises(UserError, match="no record has the id 'bench_server/poisson\\*/fp8'"):
        lesson.records.find("bench_server/poisson*/fp8")


def test_records_that_are_compared_come_from_one_gpu(tmp_path, monkeypatch):
    """The newest of each would compare two GPUs: B=1 of the new one with B=32 of the old one."""
    lines = [
        ("old", "B=1", "2026-01-01"),
        ("old", "B=32", "2026-01-01"),
        ("old", "B=1", "2026-01-02"),
        ("new", "B=1", "2026-01-03"),
        ("new", "B=8", "2026-01-03"),
    ]
    rows = [dict(bench="bench_x", name="x", shape=s, dtype="bf16", gpu=g, date=d) for g, s, d in lines]  # fmt: skip
    (tmp_path / "bench_x.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    monkeypatch.setattr(lesson.records, "RESULTS", tmp_path)
    of = lambda *shapes: [
        (r["gpu"], r["date"][-1])
        for r in lesson.records.together([f"bench_x/x/{s}/bf16" for s in shapes])
    ]
    assert of("B=1", "B=32") == [("old", "2"), ("old", "1")]
    assert of("B=1", "B=8") == [("new", "3")] * 2
    assert of("B=1") == [("new", "3")]
    assert of("B=8", "B=32") == [("new", "3"), ("old", "1")], "no GPU has both"
    with pytest.raises(UserError, match="no record has the id"):
        of("B=1", "B=2")


def test_records_say_how_many_gpus():
    record = lambda name: {"name": name, "gpu": "H200", "date": "2026-01-01", "commit": "abc"}
    says = lambda *names: lesson.records.machine([record(name) for name in names]).split(" H200")[0]
    assert says("rmsnorm_fwd") == says("dim384, 1 GPU, one GPU") == "Measured on one"
    assert says("dim384, 4 GPU, flat", "dim384, 4 GPU, naive") == "Measured on 4"
    assert says("dim384, 2 GPU, flat", "dim384, 4 GPU, naive") == "Measured on up to 4"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with one kernel and one measurement of it, at the first commit."""
    git = lambda *a: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *a], cwd=tmp_path, check=True, capture_output=True, text=True).stdout  # fmt: skip
    kernel = tmp_path / "xtrain" / "kernels" / "square.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("def square_fwd(x):\n    return x * x\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    line = '{"bench": "bench_kernels", "name": "square_fwd", "shape": "N=1", "dtype": "fp32", "ms": 1, "gpu": "g", "date": "d", "commit": "COMMIT"}\n'
    (results / "bench_kernels.jsonl").write_text(
        line.replace("COMMIT", git("rev-parse", "--short", "HEAD").strip())
    )
    monkeypatch.setattr(lesson.records, "ROOT", tmp_path)
    monkeypatch.setattr(lesson.records, "RESULTS", results)
    return kernel, git, results


def test_record_older_than_its_kernel_is_noticed(repository):
    kernel, git, results = repository
    find = lambda: lesson.records.find("bench_kernels/square_fwd/fp32")
    assert lesson.records.changed_since(find()) is None
    kernel.write_text("def square_fwd(x):\n    return x ** 2\n")
    assert "xtrain/kernels/square.py has changed since square_fwd" in lesson.records.changed_since(
        find()
    )
    path = results / "bench_kernels.jsonl"
    path.write_text(re.sub('"commit": "[^"]*"', '"commit": "unknown"', path.read_text()))
    git("add", "-A")
    git("commit", "-qm", "measured, without a commit")
    assert lesson.records.changed_since(find()) is None
    kernel.write_text("def square_fwd(x):\n    return x + 0 * x\n")
    assert "has changed" in lesson.records.changed_since(find())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_a_notebook_shows_the_library_as_it_is(path):
    assert notebooks.old_source(path) is None


def test_a_notebook_that_shows_old_code_is_noticed(tmp_path):
    library = tmp_path / "xtrain" / "kernels" / "square.py"
    library.parent.mkdir(parents=True)
    library.write_text(
        '"""Squares.\n\n    y = x x\n"""\n\n\ndef square_ref(x):\n    return x * x\n'
    )
    cell = lambda source, *lines: {"cell_type": "code", "source": source, "outputs": [{"name": "stdout", "text": [line + "\n" for line in lines]}]}  # fmt: skip
    shown = ("# xtrain/kernels/square.py", "def square_ref(x):", "    return x * x")
    code = cell("lesson.source(square_ref)", *shown)
    loop = cell("ops = [square_ref]\nfor op in ops:\n    lesson.source(op)", *shown)
    doc, other = (
        cell("print(square.__doc__)", "Squares.", "", "    y = x x", ""),
        cell("print(3 * 3)", "9"),
    )
    notebook = tmp_path / "01_squares.ipynb"
    notebook.write_text(json.dumps({"cells": [code, doc, other]}))
    find = lambda: notebooks.old_source(notebook.with_suffix(".py"), tmp_path)
    assert find() is None
    library.write_text(library.read_text().replace("x * x", "x**2"))
    assert find() == "01_squares.ipynb shows code that the library no longer has:     return x * x"
    library.write_text(library.read_text().replace("x**2", "x * x").replace("y = x x", "y = x^2"))
    assert find() == "01_squares.ipynb shows code that the library no longer has:     y = x x"
    library.write_text(library.read_text().replace("y = x^2", "y = x x").replace("    return", "    x = +x\n    return"))  # fmt: skip
    assert find() == "01_squares.ipynb shows an outdated version of: def square_ref(x):"
    notebook.write_text(json.dumps({"cells": [loop]}))
    assert find() == "01_squares.ipynb shows an outdated version of: def square_ref(x):"
    library.write_text(library.read_text().replace("    x = +x\n", ""))
    library.rename(library.with_name("powers.py"))
    assert (
        find()
        == "01_squares.ipynb shows code of xtrain/kernels/square.py, which another file has now"
    )


def test_a_notebook_with_an_old_stepper_is_noticed(tmp_path):
    page = tmp_path / "xtrain" / "simulator" / "stepper.html"
    page.parent.mkdir(parents=True)
    page.write_text('<title>TITLE</title>\n<button id="to-error">\n')
    shown = html.escape(page.read_text().replace("TITLE", "square"))
    output = {"name": "display_data", "data": {"text/html": [f'<iframe srcdoc="{shown}">']}}
    cell = {"cell_type": "code", "source": "lesson.show(square)", "outputs": [output]}
    notebook = tmp_path / "01_squares.ipynb"
    notebook.write_text(json.dumps({"cells": [cell]}))
    find = lambda: notebooks.old_source(notebook.with_suffix(".py"), tmp_path)
    assert find() is None
    page.write_text(page.read_text() + "<button>\n")
    assert find() == "01_squares.ipynb holds an outdated stepper, without: <button>"


def test_one_command_names_a_fork(tmp_path):
    """`notebooks.py repository` names it in both files of a lesson, adds the badge, and changes nothing else."""
    for path in SOURCES[:2]:
        for suffix in (".py", ".ipynb"):
            text = path.with_suffix(suffix).read_text(encoding="utf-8")
            (tmp_path / path.with_suffix(suffix).name).write_text(text, encoding="utf-8")
    name, read = "me.too/my-xtrain", lambda: {p.name: p.read_text() for p in tmp_path.iterdir()}
    notebooks.name_repository(notebooks.PLACEHOLDER, tmp_path)
    before = read()
    assert not any("colab.research" in text for text in before.values()), "a dead badge"
    assert notebooks.name_repository(name, tmp_path) == sorted(before)
    named = read()
    for path in SOURCES[:2]:
        badge = (
            f"(https://colab.research.google.com/github/{name}/blob/main/lessons/{path.stem}.ipynb)"
        )
        cells = json.loads(named[f"{path.stem}.ipynb"])["cells"]
        head, line = "".join(cells[0]["source"]).split("\n\n")[:2]
        assert head.startswith("# ") and line == f"[![Open in Colab](colab.svg)]{badge}"
        assert named[path.name].count(badge) == 1
        assert f"https://github.com/{name} xtrain" in "".join(cells[1]["source"])
        assert named[path.name].count(name) == 2 and "OWNER" not in named[path.name]
        if (
            HAS_JUPYTEXT
        ):  # .ci/run runs this test a second time when it has installed the extra `docs`
            assert notebooks.out_of_step(tmp_path / path.name) is None
    assert notebooks.name_repository(name, tmp_path) == []
    assert notebooks.name_repository("an/other", tmp_path) == sorted(before)
    notebooks.name_repository(notebooks.PLACEHOLDER, tmp_path)
    assert read() == before


def test_the_name_of_a_fork_is_one_setting(tmp_path):
    settings = tmp_path / "mkdocs.yml"
    settings.write_text((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), encoding="utf-8")
    notebooks.set_repository("me/my-xtrain", settings)
    assert notebooks.repository(settings) == "me/my-xtrain"
    with pytest.raises(SystemExit, match="give it as OWNER/NAME"):
        notebooks.set_repository("https://github.com/me/my-xtrain", settings)


# ----------------------------------------------------------------------------- traces and figures
def test_trace_counts_sectors_and_banks():
    from numba import cuda, float32, int32

    from xtrain.simulator import sim

    @cuda.jit
    def strided_kernel(y_n, x_n, stride):
        tile = cuda.shared.array(1024, float32)
        t = cuda.threadIdx.x
        tile[t * stride] = x_n[t * stride]
        y_n[t] = tile[t * stride]

    x, y = sim(np.arange(1024, dtype=np.float32)), sim(np.zeros(32, np.float32))
    for stride, sectors, ways in ((1, 4, 1), (2, 8, 2), (8, 32, 8), (32, 32, 32), (31, 32, 1)):
        trace = lesson.traced(strided_kernel, 1, 32, y, x, int32(stride))
        read = trace.traffic("x_n")
        assert (read.requests, read.sectors, read.wanted) == (1, sectors, 128)
        assert trace.bank_conflicts("tile") == [ways, ways]
        assert trace.traffic("y_n", write=True).efficiency == 1.0


def test_trace_separates_two_reads_in_one_line():
    from numba import cuda

    from xtrain.simulator import sim

    @cuda.jit
    def sums_kernel(y_n, x_n):
        i = cuda.threadIdx.x
        y_n[i] = x_n[i] + x_n[i + 32] + x_n[i] * x_n[i]

    x, y = sim(np.ones(64, np.float32)), sim(np.zeros(32, np.float32))
    read = lesson.traced(sums_kernel, 1, 32, y, x).traffic("x_n")
    assert (read.requests, read.sectors, read.wanted) == (2, 8, 256)


def test_trace_sees_one_request_for_a_16_byte_load():
    from xtrain.kernels import elementwise
    from xtrain.simulator import sim

    a, b, y = (sim(np.ones(4096, np.float32)) for _ in range(3))
    trace = lesson.traced(elementwise.add_kernel, 1, elementwise.BLOCK, y, a, b, np.bool_(True))
    widths = {len([x for x in r if x.thread == r[0].thread]) for r in trace.requests("a_n")}
    assert widths == {4}
    assert trace.traffic("a_n").efficiency == 1.0


def test_names_in_the_roofline_are_next_to_their_points():
    points = {"norm": (0.5, 1.85e12), "adamw": (0.536, 2.19e12)}  # close to each other
    (axes,) = lesson.figures.roofline(points, 4e12, 67e12).axes
    names = {t.get_text(): t.get_window_extent() for t in axes.texts if t.get_text() in points}
    for name, (x, y) in points.items():
        height = axes.transData.transform((x, y / 1e12))[1]  # in pixels
        assert abs(height - (names[name].y0 + names[name].y1) / 2) < 3, name


def test_figures_are_drawn():
    f = lesson.figures
    made = [
        f.ownership(np.arange(12).reshape(3, 4)),
        f.timeline(
            {"a": [(0, 1, "x")]},
            "a title that is longer than one line of a figure on a phone can be",
        ),
        f.timeline({"a long name": [(0, 1, "a text that is longer than its span"), (1, 9, "x")]}),
        f.roofline({"copy": (0.1, 1e11)}, 4e12, 6e13),
        f.bars({"a": 1.0, "b": 2.0}, "GB/s", limit=("copy", 3.0)),
        f.tiles(8, 8, 12, 4, (1, 0), 1),
        f.butterfly([1, 2, 3, 4], (2, 1)),
        f.graph({"x": (0, 0), "y": (1, 0)}, [("x", "y")]),
        f.curves([1, 10], {"a": [1, 2]}, "x", "y"),
        f.stack(
            [("a", "(N,)", False), ("b", "(N,)", True), ("c", "(N,)", False)],
            repeat=(1, 2, "L times"),
        ),
        f.products([["=", ("x", 1, 1, "all"), ("y", 1, 2, 1)], [("z", 2, 1, 0), ("w", 1, 1, "1")]]),
        f.ring(4),
    ]
    assert all(figure.axes for figure in made)
    for figure in made:  # readable on a phone, where a figure is 350 pixels wide
        texts = [t for t in figure.findobj(f.plt.Text) if t.get_text() and t.get_visible()]
        assert figure.get_figwidth() <= 4.7 and min(t.get_fontsize() for t in texts) >= 9
        figure.draw_without_rendering()
        drawn = figure.get_tightbbox()  # in inches
        assert drawn.x0 > -0.01 and drawn.x1 < figure.get_figwidth() + 0.01


def test_the_picture_of_a_ring_ends_with_the_sum_everywhere():
    cells = lambda axes: [t.get_text() for t in axes.texts if "rank" not in t.get_text()]
    panels = {axes.get_title(): cells(axes) for axes in lesson.figures.ring(4).axes}
    assert panels["start"] == ["0"] * 4 + ["1"] * 4 + ["2"] * 4 + ["3"] * 4
    assert {c for c in panels["step 1"] if " " in c} == {"0 3", "0 1", "1 2", "2 3"}
    sums = [panels[f"step {i}"].count("sum") for i in range(1, 7)]
    # reduce-scatter: one chunk per rank at its end; then one more in each step
    assert sums == [0, 0, 4, 8, 12, 16]


def test_the_picture_of_top_p_marks_what_is_kept_and_what_is_drawn():
    f = lesson.figures
    (axes,) = f.nucleus([0.4, 0.3, 0.15, 0.1, 0.05], [1, 3, 4, 0, 2], 0.8, 0.6).axes
    colors = [f.plt.matplotlib.colors.to_hex(bar.get_facecolor()) for bar in axes.patches]
    assert colors == [f.COLORS[0], f.ACCENT, f.COLORS[0], f.PALE, f.PALE]
    np.testing.assert_allclose([bar.get_y() for bar in axes.patches], [0, 0.4, 0.7, 0.85, 0.95])


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_every_lesson_has_a_figure(path):
    assert "lesson.figures." in path.read_text(encoding="utf-8")
