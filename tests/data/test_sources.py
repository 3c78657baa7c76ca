"""Which files --data names, and standard input."""

import io
import os
from pathlib import Path

import pytest
from parts import whole

from xtrain.data import sources
from xtrain.data.documents import Documents
from xtrain.data.records import record_files
from xtrain.data.sources import Sources, from_standard_input
from xtrain.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Each file holds its name."""
    for name in ("a.txt", "b.txt", "c.md", "in/d.txt", "in/deep/e.txt", "in/.hidden.txt", "x[1].txt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "data, expected",
    [
        ("a.txt", ["a.txt"]),
        (Path("a.txt"), ["a.txt"]),
        (["b.txt", "a.txt"], ["b.txt", "a.txt"]),  # as they are given
        (["b.txt", ".", "a.txt"], ["b.txt", "a.txt", "c.md", "in/d.txt", "in/deep/e.txt", "x[1].txt"]),
        (["in", "in/deep"], ["in/d.txt", "in/deep/e.txt"]),
        (["in/deep", "in"], ["in/deep/e.txt", "in/d.txt"]),
        ("*.txt", ["a.txt", "b.txt", "x[1].txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "in/d.txt", "in/deep/e.txt", "x[1].txt"]),
        ("in/**", ["in/d.txt", "in/deep/e.txt"]),
        ("i?", ["in/d.txt", "in/deep/e.txt"]),
        (["*.txt", "a*", "[cb].*"], ["a.txt", "b.txt", "x[1].txt", "c.md"]),
        ("x[1].txt", ["x[1].txt"]),  # a file of this name comes before the pattern
        (["link", "in"], ["in/d.txt", "in/deep/e.txt"]),  # the same folder twice
        (["also-a", "a.txt"], ["a.txt"]),
    ],
)  # fmt: skip
def test_order_and_duplicates(folder, data, expected):
    (folder / "link").symlink_to("in")
    (folder / "also-a").symlink_to("a.txt")
    assert whole(Documents(data)) == expected
    assert Documents(data).identity() == Documents(data).identity()


@pytest.mark.parametrize(
    "data, sentence",
    [
        ("gone.txt", "gone.txt does not exist: give a file, a folder or a glob"),
        (["a.txt", "gone"], "gone does not exist"),
        ("*.zip", "no file matches *.zip: check the pattern"),
        ("[a]/x", "no file matches [a]/x"),
        (["a.txt", "a\0b"], "does not exist"),
    ],
)
def test_what_is_not_there(folder, data, sentence):
    with pytest.raises(UserError) as error:
        Sources(data).find()
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_the_name(folder):
    assert Sources("a.txt").name == "a.txt"
    assert Sources(["a.txt", "in"]).name == "a.txt, in"
    assert Sources([f"{i}.txt" for i in range(9)]).name == "0.txt, 1.txt, 2.txt and 6 more"


def test_files_of_records(folder):
    assert record_files(["b.txt", "*.txt"]) == [Path(x) for x in ("b.txt", "a.txt", "x[1].txt")]
    with pytest.raises(UserError, match=r"in has no \.jsonl, \.parquet or \.arrow files"):
        record_files(["in"])
    assert record_files([]) == []


# --- standard input ---
def test_standard_input_is_a_file_of_its_content(tmp_path):
    text = "some text é\n".encode() * 300_000
    (first, copy, last) = from_standard_input(["a", "-", "b"], tmp_path / "cache", io.BytesIO(text))
    assert (first, last) == ("a", "b") and Path(copy).read_bytes() == text
    about = os.stat(copy)
    assert from_standard_input(["-"], tmp_path / "cache", io.BytesIO(text)) == (copy,)
    assert os.stat(copy).st_mtime_ns == about.st_mtime_ns  # known: it is not read again
    other = from_standard_input(["-"], tmp_path / "cache", io.BytesIO(text + b"."))
    assert other != (copy,)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    os.truncate(copy, 10)
    assert from_standard_input(["-"], tmp_path / "cache", io.BytesIO(text)) == (copy,)
    assert Path(copy).read_bytes() == text
    assert from_standard_input(["a"], tmp_path / "none", None) == ("a",)


class Broken(io.BytesIO):
    def read(self, size=-1):
        raise OSError(5, "Input/output error")


def test_standard_input_that_cannot_be_read_or_copied(tmp_path):
    terminal = io.BytesIO(b"")
    terminal.isatty = lambda: True
    with pytest.raises(UserError, match="--data - reads standard input, which is a terminal: pipe"):
        from_standard_input(["-"], tmp_path, terminal)
    with pytest.raises(UserError, match=r"cannot be copied to .* \(Input/output error\): make room, or set XTRAIN_CACHE"):  # fmt: skip
        from_standard_input(["-"], tmp_path, Broken())
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be copied to .*file"):
        from_standard_input(["-"], tmp_path / "file", io.BytesIO(b"text"))


def test_what_killed_processes_left_of_standard_input(tmp_path):
    for name, age in (("stdin-1.part", 2 * sources.STRAY_SECONDS), ("stdin-2.part", 5)):
        (tmp_path / name).write_text("cut off")
        then = os.stat(tmp_path / name).st_mtime - age
        os.utime(tmp_path / name, (then, then))
    from_standard_input(["-"], tmp_path, io.BytesIO(b"text"))
    assert sorted(path.name[:7] for path in tmp_path.iterdir()) == ["stdin-2", "stdin-9"]
