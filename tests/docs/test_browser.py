"""The lessons in a browser: the files that the site serves, the judges in Pyodide, and a page in Chromium.

Needs npm, once with the network; Node.js for the verdicts, and Chromium for the page.
"""

import functools
import gzip
import http.server
import importlib.util
import io
import json
import re
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from xtrain import lesson
from xtrain.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("browser_hook", ROOT / "lessons/tools/browser.py")
hook = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hook)
LESSONS = sorted((ROOT / "lessons").glob("[0-9][0-9]_*.py"))
MEGABYTES = 15  # of the first load, compressed: what a reader waits for


@pytest.fixture(scope="module")
def made():
    """The files that the site's build makes: their content by path."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")  # Pyodide and NumPy come from its registry
    try:
        return hook.site_files()
    except UserError as error:
        pytest.skip(str(error))  # no network, and nothing in the cache


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    """The files in a folder site/browser, as the site has them."""
    folder = tmp_path_factory.mktemp("site") / "browser"
    for name, content in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for pattern in ("*.js", "*.css"):
        for path in hook.SOURCE.glob(pattern):
            shutil.copy(path, folder)
    return folder


# ----------------------------------------------------------------------------- the files
def test_the_first_load_is_small(made):
    """Servers compress text and WebAssembly; archives are compressed already."""
    size = sum(len(gzip.compress(content, 6)) for content in made.values())
    assert size < MEGABYTES * 1e6, f"{size / 1e6:.1f} MB"


def test_nothing_is_loaded_from_another_origin():
    """The checksums are in the lock, and no address of a registry."""
    lock = json.loads((hook.SOURCE / "package-lock.json").read_text(encoding="utf-8"))
    packages = {name: about for name, about in lock["packages"].items() if name}
    assert len(packages) > 10
    assert all(about["integrity"].startswith("sha512-") for about in packages.values())
    assert not any("resolved" in about for about in packages.values())
    for path in hook.SOURCE.rglob("*.*"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"https?://(?!(localhost|127\.0\.0\.1|www\.w3\.org/2000/svg))", text
        ), path.name


def test_a_second_build_needs_no_npm(made, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert hook.packages().is_dir()


def test_without_npm_one_sentence_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="needs npm.*install Node.js, or.*XTRAIN_BROWSER=false"):
        hook.packages()


def test_packages_that_cannot_be_fetched(tmp_path, monkeypatch):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho no such host >&2\nexit 1\n", encoding="utf-8")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    for _ in range(2):  # what an interrupted call has left is not taken for the packages
        with pytest.raises(UserError, match="no such host.*try again"):
            hook.packages()


# ----------------------------------------------------------------------------- the exercises of a page
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_pieces_of_a_page_are_the_file_of_the_command_line(path, tmp_path):
    pieces = hook.pieces(path.read_text(encoding="utf-8"), int(path.stem[:2]))
    judges = lesson.load_checks("api")
    text = judges.head(path) + "\n\n\n".join(piece["text"] for piece in pieces) + "\n"
    assert text == judges.start(path.stem[:2], tmp_path).read_text(encoding="utf-8")
    numbers = [piece["number"] for piece in pieces if piece["number"]]
    assert numbers == [e.number for e in judges._exercises_of(path.stem[:2])]


def test_exercises_that_run_elsewhere_exist():
    judges = lesson.load_checks("api")
    for number in hook.ELSEWHERE:
        assert number in [e.number for e in judges._exercises_of(number.split(".")[0])]


def test_every_exercise_of_a_page_is_marked():
    cell = '<div class="jp-Cell celltag_exercise" id="cell-id=cell-{}">'
    html = hook.with_editors("".join(map(cell.format, "abc")), LESSONS[0])
    assert re.findall(r'data-piece="(\d)" id="cell-id=cell-(.)"', html) == [("1", "a"), ("2", "b"), ("3", "c")]  # fmt: skip


# ----------------------------------------------------------------------------- the verdicts
CASES = [  # exercise, old, new: a typical mistake, planted in the solution
    ("1.3", "    cuda.syncthreads()\n", ""),
    ("2.2", "tile[tx, ty]", "tile[ty, tx]"),
    ("3.2", "cuda.blockDim.x):", "32):"),
    ("5.3", "f(x - step * v)", "f(x)"),
    ("6.1", "dy * b.data", "dy * a.data"),
    ("8.2", "0.5 * (1 + ", "(1 + "),
    ("16.3", "inputs[: i + 1]", "inputs[:i]"),
    ("21.4", '("replace")', '("ignore")'),
    ("30.1", "range(5)", "range(4)"),
    ("46.1", "np.argsort(-logits_NE", "np.argsort(logits_NE"),
]


def attempts():
    """Yield (exercise, text of the reader's file): the solution, and the same with a mistake."""
    judges = lesson.load_checks("api")
    for number, old, new in CASES:
        path = judges.lesson_file(number.split(".")[0])
        right = judges.tagged(path.read_text(encoding="utf-8"), "imports", "exercise", "solution")
        [exercise] = [e for e in judges._exercises_of(number.split(".")[0]) if e.number == number]
        head, body = right.rsplit(f"def {exercise.name}(", 1)
        assert old in body, f"the solution of {number} has changed: {old!r} is not in it"
        yield exercise, path.stem, right
        yield exercise, path.stem, f"{head}def {exercise.name}({body.replace(old, new, 1)}"


def test_the_verdicts_are_those_of_the_command_line(folder, tmp_path):
    if shutil.which("node") is None:
        pytest.skip("needs Node.js")  # runs Pyodide without a browser
    judges = lesson.load_checks("api")
    given = list(attempts())
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([(e.number, text, stem, 1) for e, stem, text in given]))
    program = ROOT / "tests/helpers/verdicts.mjs"
    done = subprocess.run(["node", program, folder, cases], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = json.loads(done.stdout)
    for i, ((e, stem, text), verdict) in enumerate(zip(given, verdicts, strict=True)):
        file = Path(f"/my_lessons/{stem}.py")
        imports = judges.tagged(judges.lesson_file(stem[:2]).read_text(encoding="utf-8"), "imports")
        said = judges.judge_file(e, file, text, imports, seed=1, steps=False)
        assert verdict["text"] == str(said)
        assert verdict["passed"] == said.passed == (i % 2 == 0), str(said)
        assert bool(verdict["page"]) == e.kernel
