"""The reader's kernels, step by step: pages next to the reader's file, and a stepper for a notebook."""

import re

import pytest
from numba import cuda, float32

from xtrain import lesson, simulator

WRONG = {
    "if i < y_n.size:": "if i <= y_n.size:",  # out of bounds
    "a_n[i] + b_n[i]": "a_n[i] - b_n[i]",  # a wrong value
}


def solved(path, old="", new=""):
    """Write lesson 1's exercises with their solutions, one of them changed."""
    api = lesson.load_checks("api")
    text = api.tagged(api.lesson_file("1").read_text(encoding="utf-8"), "imports", "solution")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


@pytest.mark.parametrize("old", ["", *WRONG], ids=["right", "bounds", "value"])
def test_the_command_writes_a_page_for_each_kernel(tmp_path, capsys, old):
    file = solved(tmp_path / "01_threads.py", old, WRONG.get(old, ""))
    code = lesson.main(["check", "1", str(file)])
    text = capsys.readouterr().out
    pages = sorted(tmp_path.glob("*.html"))
    assert [p.name for p in pages][:2] == ["01_threads_1.1.html", "01_threads_1.2.html"]
    assert all(str(p) in "".join(text.split()) for p in pages)
    assert code == (1 if old else 0)
    error = re.search(r'"error":(null|\{"text":"[^"]*)', pages[0].read_text(encoding="utf-8"))[1]
    assert ("out of bounds" in error) == ("<=" in WRONG.get(old, ""))


def test_an_attempt_that_never_ran_has_no_page(tmp_path, capsys):
    file = tmp_path / "01_threads.py"
    file.write_text("def add_kernel(y_n, a_n, b_n):\n    pass\n", encoding="utf-8")
    assert lesson.main(["check", "1.1", str(file)]) == 1
    assert not list(tmp_path.glob("*.html"))


def test_a_page_that_cannot_be_written_costs_no_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = solved(tmp_path / "01_threads.py")
    (tmp_path / "01_threads_1.1.html").mkdir()
    assert lesson.main(["check", "1.1", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1.1 add_kernel: correct" in said and "01_threads_1.1.html cannot be written" in said


@cuda.jit
def mirror_kernel(y, x):
    s = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    y[t] = s[31 - t]


def test_a_kernel_is_stepped_through():
    x = simulator.sim([1.0] * 32)
    found = lesson.stepped(mirror_kernel, 1, 32, x.copy(), x)
    assert isinstance(found.error, simulator.KernelError)
    assert "iframe" in found._repr_html_()
    assert "mirror_kernel, block (0, 0, 0)" in repr(found)
