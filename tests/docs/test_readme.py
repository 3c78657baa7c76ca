"""The README's numbers agree with bench/results, and its example runs."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "lessons/howto/install.md"


def test_tables_come_from_the_records():
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_examples_run(tmp_path):
    """In order: later blocks use variables of earlier ones."""
    example = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my-model" / "model.safetensors").exists()


@pytest.mark.parametrize("page", sorted(p.name for p in ROOT.glob("*.md")))
def test_relative_links(page):
    """mkdocs checks the links of the pages in lessons/."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_source_distribution_is_the_repository():
    """Setuptools adds its own files, xtrain/ and some of the tests; MANIFEST.in names the rest."""
    files = []
    if shutil.which("git") is not None:
        # safe.directory: the clone may belong to another user
        git = ["git", "-c", "safe.directory=*", "ls-files"]
        files = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if "setup.cfg" not in files:
        # an unpacked distribution has no list of files to compare with
        pytest.skip("needs a git clone, which lists the repository's files")
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    named = [p for what, *rest in lines if what in ("graft", "include") for p in rest]
    named += ["xtrain", "LICENSE", "setup.cfg", "pyproject.toml", "MANIFEST.in", ".gitignore"]
    named_by = lambda f: any(f.match(name) or f.parts[0] == name for name in named)
    assert [str(f) for f in map(Path, files) if not named_by(f)] == []


def setup(section):
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser[section]


def test_the_oldest_versions_are_those_that_pip_takes():
    """For all dependencies of the package, and for the libraries that its tests compare with."""
    row = re.search(r"^\| the oldest.*?\| (.*) \|$", INSTALL.read_text("utf-8"), re.M)[1]
    said = {n.lower(): v for n, v in re.findall(r"([\w-]+) ([\d.]+)(?=[,;]|$)", row)}
    find = lambda text: dict(re.findall(r"^([\w-]+)>=([\d.]+)", text, re.M))
    needed = find(setup("options")["install_requires"])
    known = needed | find(setup("options.extras_require")["test"])
    numbers = lambda version: re.sub(r"(\.0)+$", "", version)
    assert needed.keys() <= said.keys() <= known.keys()
    assert {n: numbers(v) for n, v in said.items()} == {n: numbers(known[n]) for n in said}


def test_every_extra_is_named():
    text = INSTALL.read_text(encoding="utf-8")
    extras = setup("options.extras_require")
    assert [e for e in extras if not re.search(rf"`{e}`|\[(\w+,)*{e}(,\w+)*\]", text)] == []
