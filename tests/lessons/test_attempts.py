"""Attempts at the exercises as a reader would write them: wrong ones get the reason, unusual right ones pass.

The files in attempts/ are cells. The first line of a cell says what the judge must answer:

    # %% 1.1 WRONG: words of the answer
    # %% 1.1 RIGHT: what is unusual about it
    # %% 1.1 REMARK: words of a remark on a correct attempt

They see the imports and the given functions of their lesson, as in my_lessons/.

An attempt that is close to the solution, or to the last attempt written in full, is written as its differences:

    # as the solution, but:
    # -             if first + j <= t:
    # +             if j <= t:
"""

import itertools
import re
from pathlib import Path

import pytest

from xtrain import lesson

FOLDER = Path(__file__).parent / "attempts"
COUNT = itertools.count()  # for unique file names: sources are looked up by name
DIFFERENCES = re.compile(r"^# as the (solution|attempt above), but:\n", re.M)
HEAD = re.compile(r"(\d+\.\d+) (WRONG|RIGHT|REMARK): (.+)")


def attempts():
    """Yield (exercise, kind, words, code) of every cell."""
    in_full = {}
    for path in sorted(FOLDER.glob("lesson_*.py")):
        for header, code in lesson.cells(path.read_text(encoding="utf-8")):
            number, kind, words = HEAD.fullmatch(header).groups()
            base = DIFFERENCES.search(code)
            if base is None:
                in_full[number] = code
            else:
                text = solution(number) if base[1] == "solution" else in_full[number]
                code = with_differences(text, code[base.end() :])
            yield number, kind, words, code


def solution(number):
    """Return the cell with the solution of an exercise."""
    lesson._exercises_of(number.split(".")[0])
    definition = f"def {lesson.EXERCISES[number].name}("
    text = lesson.lesson_file(number.split(".")[0]).read_text(encoding="utf-8")
    cells = lesson.cells(text)
    plain = [lesson.plain_solution(code) for tags, code in cells if '"solution"' in tags]
    return next(code for code in plain[::-1] if definition in code)


def with_differences(code, differences):
    """Replace each run of `# -` lines in the code by the `# +` lines that follow it."""
    code = f"\n{code}\n"
    for old, new in re.findall(r"((?:^# -.*\n)+)((?:^# \+.*\n)*)", differences + "\n", re.M):
        old = "\n" + re.sub(r"^# - ?", "", old, flags=re.M)
        assert code.count(old) == 1, f"not once in the code that the differences refer to: {old}"
        code = code.replace(old, "\n" + re.sub(r"^# \+ ?", "", new, flags=re.M))
    return code.strip("\n")


ATTEMPTS = list(attempts())


@pytest.mark.parametrize("number, kind, words, code", ATTEMPTS, ids=lambda x: x.split("\n")[0][:50])
def test_attempt(number, kind, words, code):
    file = lesson.lesson_file(number.split(".")[0])
    given = lesson.tagged(file.read_text(encoding="utf-8"), "imports", "exercise")
    module = lesson.load(f"{given}\n\n{code}\n", f"reader_{next(COUNT)}.py")
    lesson._exercises_of(number.split(".")[0])
    work = getattr(module, lesson.EXERCISES[number].name)
    verdict = lesson.verdict(number, work, seed=1, steps=False)
    assert verdict.passed == (kind != "WRONG"), verdict.text
    assert kind == "RIGHT" or words in verdict.text, verdict.text


def test_every_lesson_has_attempts():
    tried = {number.split(".")[0] for number, *_ in ATTEMPTS}
    assert tried == {str(int(p.name[:2])) for p in lesson.lesson_files()}
    assert len(ATTEMPTS) >= 60


def seen(verdict):
    return re.search(r"seed=(\d+)", verdict.text)


def test_a_table_of_the_fixed_cases_fails_and_its_seed_repeats_the_numbers():
    code = next(
        code for number, _, words, code in ATTEMPTS if (number, words) == ("1.1", "expected")
    )
    module = lesson.load(f"from numba import cuda\n\n\n{code}\n", f"reader_{next(COUNT)}.py")
    lesson._exercises_of("1")
    first, other = (lesson.verdict("1.1", module.add_kernel) for _ in "ab")
    seed = int(seen(first)[1])
    assert f"random numbers, seed {seed}" in first.text
    assert "python -m xtrain.lesson check 1.1 --seed" in first.text
    assert lesson.verdict("1.1", module.add_kernel, seed) == first
    assert lesson.verdict("1.1", module.add_kernel, seed + 1).text != first.text
    assert not other.passed
