"""Documents, and the split into training and validation."""

import json
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.data.documents import Documents, chunks, split, survey
from xtrain.errors import UserError

DOCUMENTS = st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=60)


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


# --- reading ---


def test_folder_is_read_in_sorted_order(tmp_path):
    write(
        tmp_path,
        {"b.md": "2", "a/z.txt": "1", "c.py": "3", "d.jsonl": '{"text": "4"}\n\n{"text": "5"}'},
    )
    write(
        tmp_path,
        {".hidden": "no", ".git/x.txt": "no", "image.png": b"\x89PNG\0", "latin.py": b"\xe9"},
    )
    texts = Documents(tmp_path)
    assert list(texts) == list(texts) == ["1", "2", "3", "4", "5"]
    assert (texts.files, texts.skipped) == (4, 2)


def test_links_to_folders_are_followed(tmp_path):
    write(tmp_path, {"big/b.txt": "2", "big/more/c.txt": "3", "data/a.txt": "1"})
    (tmp_path / "data/part").symlink_to(tmp_path / "big")
    (tmp_path / "data/twice").symlink_to("../big/more")  # already reached through part
    (tmp_path / "data/0").symlink_to("z")  # a link: read after the real folders
    write(tmp_path, {"data/z/d.txt": "4"})
    (tmp_path / "big/round").symlink_to(tmp_path / "data")
    (tmp_path / "big/self").symlink_to("self")
    (tmp_path / "data/gone").symlink_to("nowhere")
    assert list(Documents(tmp_path / "data")) == ["1", "2", "3", "4"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only/link").symlink_to(tmp_path / "big/more")
    assert list(Documents(tmp_path / "only")) == ["3"]


def test_text_is_kept_unchanged(tmp_path):
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfa\r\nb \xc3\xa9"})
    assert list(Documents(tmp_path / "a.txt")) == ["a\r\nb é"]


def test_end_of_text_in_a_file_separates_documents(tmp_path):
    write(tmp_path, {"a.txt": "one<|endoftext|>two<|endoftext|>"})
    assert list(Documents(tmp_path / "a.txt")) == ["one", "two"]


def test_standard_library(tmp_path, monkeypatch):
    write(tmp_path, {"os.py": "os", "json/a.py": "json", "latin.py": b"\xe9", "data.txt": "no"})
    write(tmp_path, {"site-packages/x.py": "no", "a/dist-packages/x.py": "no"})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    texts = Documents()
    assert list(texts) == ["json", "os"]
    assert (texts.files, texts.skipped) == (2, 1)
    assert texts.name.startswith("Python 3")


def test_standard_library_is_there():
    paths = Documents()._paths()
    assert len(paths) > 100 and not any("site-packages" in path.parts for path in paths)


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("a.txt", b"a\0b", "a.txt is binary (a NUL at byte 1): give UTF-8 text"),
        ("a.bin", b"\x7fELF\0", "a.bin is binary"),
        ("a.txt", b"ab\xff", "a.txt is not UTF-8 (byte 2): convert it to UTF-8"),
        ("a.txt", "né".encode("utf-16"), "a.txt is binary"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 1}', "a.jsonl line 2 has no text"),
        ("a.jsonl", b"[1]", "a.jsonl line 1 has no text"),
        ("a.jsonl", b'{"text": "a"', "a.jsonl line 1 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl line 1 is not JSON"),
        ("a.jsonl", b"\xff", "a.jsonl line 1 is not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl line 1 has half a surrogate pair"),
    ],
)
@pytest.mark.parametrize("in_a_folder", [False, True])
def test_bad_file(tmp_path, name, content, sentence, in_a_folder):
    write(tmp_path, {name: content})
    if in_a_folder and name == "a.bin":
        assert list(Documents(tmp_path)) == []
        return
    with pytest.raises(UserError) as error:
        list(Documents(tmp_path if in_a_folder else tmp_path / name))
    assert sentence in str(error.value)


@pytest.mark.parametrize("name", ["missing", "x" * 5000, "a\0b"])
def test_missing_path(tmp_path, name):
    with pytest.raises(UserError, match="does not exist: give a text file"):
        list(Documents(tmp_path / name))


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a"])
def test_unreadable(tmp_path, monkeypatch, name):
    """The file may be text: without it, training would use a different text."""

    def refuse(*args):
        raise PermissionError(13, "Permission denied", str(tmp_path / name))

    write(tmp_path, {name: "text"})
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=rf"{name} cannot be read \(Permission denied\)"):
        list(Documents(tmp_path))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["one", None, "two"], "id": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert list(Documents(tmp_path)) == ["one", "two"]
    parquet.write_table(table.drop_columns("text"), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has no column named text"):
        list(Documents(tmp_path))
    write(tmp_path, {"a.parquet": b"PAR1 no"})
    with pytest.raises(UserError, match="cannot be read as parquet"):
        list(Documents(tmp_path))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path, {"a.parquet": b"PAR1"})
    with pytest.raises(UserError, match="needs pyarrow: pip install pyarrow"):
        list(Documents(tmp_path))


def test_jsonl_line_may_be_huge(tmp_path):
    write(tmp_path, {"a.jsonl": json.dumps({"text": "x" * 5_000_000})})
    assert [len(text) for text in Documents(tmp_path)] == [5_000_000]


# --- split ---


@given(DOCUMENTS)
def test_split_loses_nothing(documents):
    found = survey(documents)
    pieces = list(split(documents, found))
    assert "".join(text for text, _, _ in pieces) == "".join(documents)
    assert all(text.encode() == raw for text, raw, _ in pieces)
    held_out = sum(len(raw) for _, raw, val in pieces if val)
    # The last drawn document may almost double it; a cut moves back by less than a character.
    assert found.held_out <= held_out < 2 * found.held_out + 3
    assert pieces == list(split(documents, found))


@given(DOCUMENTS, st.randoms())
def test_split_by_document(documents, random):
    documents = documents * 12  # all copies of a document are on one side
    found = survey(documents)
    if not found.by_document:
        return
    sides = {(text, val) for text, _, val in split(documents, found)}
    assert len(sides) == len(set(documents))
    random.shuffle(documents)
    assert sides == {(text, val) for text, _, val in split(documents, survey(documents))}


def test_split_of_one_document_is_its_tail():
    text = "é" * 100
    (first, _, a), (second, _, b) = split([text], survey([text]))
    assert (len(first), a, len(second), b) == (90, False, 10, True)
    (first, _, _), (second, _, _) = split(["é" * 101], survey(["é" * 101]))
    assert len(first) + len(second) == 101


def test_split_notices_a_change():
    with pytest.raises(UserError, match="changed while it was being read"):
        list(split(["one", "two", "four"], survey(["one", "two", "three"])))


def test_survey_identifies_a_text():
    hashes = {survey(texts).sha256 for texts in (["ab"], ["a", "b"], ["b", "a"], ["abc"])}
    assert len(hashes) == 4
    assert survey(["é", "b"]).n_bytes == 3


@given(st.text(), st.integers(1, 20))
def test_chunks(text, limit):
    cut = list(chunks(text, limit))
    assert "".join(cut) == text
    assert all(0 < len(chunk) <= limit for chunk in cut) or text == ""


def test_chunks_are_cut_after_lines_and_before_words():
    assert list(chunks("ab\ncd ef", 5)) == ["ab\n", "cd ef"]
    assert list(chunks("ab cd ef", 5)) == ["ab", " cd", " ef"]
    assert len(list(chunks("x" * 10_000_000, 1000))) == 10_000  # one huge line: linear time
