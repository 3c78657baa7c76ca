"""A technical term that a lesson uses is explained there or before: the glossary says where."""

import re
from pathlib import Path

import pytest

from xtrain import lesson

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
INDEX = (LESSONS / "index.md").read_text(encoding="utf-8")
START = {1, 2, 3}  # of all tracks
NEAR = 200  # characters
# terms that also have an ordinary meaning in these lessons
COMMON = {
    "acquire", "activation", "attention", "bank", "barrier", "block", "bucket", "collective", "draft", "embedding", "fence", "grid", "head",
    "in flight", "kernel", "lane", "latency", "launch", "leaf", "occupancy", "rank", "reference", "register", "release", "saturate", "scale",     "spill", "stream", "tile", "token", "vocabulary", "world",
}  # fmt: skip


def glossary():
    """Yield each term with the lessons that explain it."""
    text = (LESSONS / "glossary.md").read_text(encoding="utf-8")
    for names, _, more in re.findall(r"^\| ([^|\n]+) \| ([^\n]+) \| ([^|\n]+) \|$", text, re.M):
        homes = {int(n) for n in re.findall(r"\((\d\d)_\w+\.ipynb\)", more)}
        for term in re.split(r", (?![^(]*\))", names):
            if homes:
                yield re.sub(r" \(.*\)", "", term), homes


def earlier(number):
    """Return the lessons that a lesson builds on, directly or not."""
    needs = {int(n): need for n, need in re.findall(r"^\| (\d+) \| [^|]+ \|([^|]*)\|", INDEX, re.M)}
    found = set(START)
    todo = [number]
    while todo:
        for n in map(int, re.findall(r"\d+", needs[todo.pop()])):
            if n not in found:
                found.add(n)
                todo.append(n)
    return found


def prose_of(path):
    cells = lesson.cells(path.read_text(encoding="utf-8"))
    texts = [re.sub(r"^# ?", "", body, flags=re.M) for head, body in cells if "markdown" in head]
    text = "\n".join(texts).partition("## Sources")[0]
    return " ".join(re.sub(r"`[^`\n]*/[^`\n]*`", "", text).split())  # no names of files


PROSE = {int(path.name[:2]): prose_of(path) for path in lesson.lesson_files()}
EARLIER = {number: earlier(number) for number in PROSE}


def first_use(term, number):
    """Return the text around a term's first use in a lesson, or ""."""
    text = PROSE[number]
    found = re.search(rf"(?<![\w-]){re.escape(term)}(s|es)?(?![\w-])", text, re.I)
    return text[max(0, found.start() - NEAR) : found.end() + NEAR] if found else ""


def explains(number, term, homes):
    """Return whether a lesson explains a term, or says at its first use which lesson does."""
    text = first_use(term, number)
    named = [rf"\blessons? (\d+,? (and )?)*{home}\b|\({home:02d}_" for home in homes]
    return number in homes or any(re.search(name, text, re.I) for name in named)


@pytest.mark.parametrize("term, homes", list(glossary()))
def test_a_term_is_explained_before_it_is_used(term, homes):
    if term in COMMON:
        return
    for number in PROSE:
        text = first_use(term, number)
        known = any(explains(n, term, homes) for n in {number, *EARLIER[number]} & set(PROSE))
        assert known or not text, (
            f"lesson {number}: explain {term}, or name lesson {min(homes)}: ...{text}"
        )


def test_common_words_are_terms_of_the_glossary():
    assert COMMON - {term for term, _ in glossary()} == set()
