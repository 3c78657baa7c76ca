"""Documents, and the split into training and validation."""

import errno
import gzip
import hashlib
import itertools
import json
import os
import sys
import sysconfig
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import in_parts, whole

from xtrain.data import columns, compressed, text_files
from xtrain.data import documents as module
from xtrain.data.documents import END_OF_TEXT, Documents, split, survey
from xtrain.data.sources import Sources
from xtrain.errors import UserError

DOCUMENTS = st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=60)


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def reasons(texts, whole_sentence=False):
    """Why files are left out, without the folder and what to do."""
    list(texts)
    found = [
        reason.removeprefix(f"{Path(path).parent}/") for path, reason in texts.left_out.items()
    ]
    return (
        found
        if whole_sentence
        else [
            reason.split(": give")[0].split(": convert")[0].split(": check")[0] for reason in found
        ]
    )


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
    assert whole(texts) == whole(texts) == ["1", "2", "3", "4", "5"]
    assert (texts.files, reasons(texts)) == (
        4,
        ["image.png is binary or UTF-16 (a NUL at byte 4)", "latin.py is not UTF-8 (byte 0)"],
    )


def test_links_to_folders_are_followed(tmp_path):
    write(tmp_path, {"big/b.txt": "2", "big/more/c.txt": "3", "data/a.txt": "1"})
    (tmp_path / "data/part").symlink_to(tmp_path / "big")
    (tmp_path / "data/twice").symlink_to("../big/more")  # already reached through part
    (tmp_path / "data/0").symlink_to("z")  # a link: read after the real folders
    write(tmp_path, {"data/z/d.txt": "4"})
    (tmp_path / "big/round").symlink_to(tmp_path / "data")
    (tmp_path / "big/self").symlink_to("self")
    (tmp_path / "data/gone").symlink_to("nowhere")
    assert whole(Documents(tmp_path / "data")) == ["1", "2", "3", "4"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only/link").symlink_to(tmp_path / "big/more")
    assert whole(Documents(tmp_path / "only")) == ["3"]


def test_text_is_kept_unchanged(tmp_path):
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfa\r\nb \xc3\xa9"})
    assert whole(Documents(tmp_path / "a.txt")) == ["a\r\nb é"]


def test_end_of_text_in_a_file_separates_documents(tmp_path):
    write(tmp_path, {"a.txt": "one<|endoftext|>two<|endoftext|>"})
    assert whole(Documents(tmp_path / "a.txt")) == ["one", "two"]


def test_standard_library(tmp_path, monkeypatch):
    write(tmp_path, {"os.py": "os", "json/a.py": "json", "latin.py": b"\xe9", "data.txt": "no"})
    write(tmp_path, {"site-packages/x.py": "no", "a/dist-packages/x.py": "no"})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    texts = Documents()
    assert whole(texts) == ["json", "os"]
    assert (texts.files, texts.left_out) == (2, {})  # Python's own tests have such files
    assert texts.name.startswith("Python 3")


def test_standard_library_is_there():
    paths = [source.path for source in Sources().find()]
    assert len(paths) > 100 and not any("site-packages" in path.parts for path in paths)


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("a.txt", b"a\0b", "a.txt is binary or UTF-16 (a NUL at byte 1): give UTF-8 text"),
        ("a.bin", b"\x7fELF\0", "a.bin is binary"),
        ("a.txt", b"ab\xff", "a.txt is not UTF-8 (byte 2): convert it to UTF-8"),
        ("a.txt", "né".encode("utf-16"), "a.txt is binary"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": 1}',
            'a.jsonl line 2 has a "text" that is not a string: fix the line',
        ),
        (
            "a.jsonl",
            b"[1]",
            'a.jsonl line 1 is not a JSON object: every line needs {"text": "..."}',
        ),
        ("a.jsonl", b'{"text": "a"', "a.jsonl line 1 is not JSON"),
        (
            "a.jsonl",
            b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "a.jsonl line 1: it is nested too deeply: fix or remove the line",
        ),
        (
            "a.jsonl",
            b'{"text": "a", "x": ' + b"1" * 200_000 + b"}",
            "a.jsonl line 1: a number has more than 100000 digits: fix or remove the line",
        ),
        ("a.jsonl", b"\xff", "a.jsonl line 1 is not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl line 1 has half a surrogate pair"),
    ],
)
@pytest.mark.parametrize("in_a_folder", [False, True])
def test_bad_file(tmp_path, name, content, sentence, in_a_folder):
    write(tmp_path, {name: content})
    write(tmp_path, {"b.txt": "good"})
    path = tmp_path if in_a_folder else [tmp_path / name, tmp_path / "b.txt"]
    texts = Documents(path)
    assert whole(texts) == whole(texts) == ["good"]
    (reason,) = texts.left_out.values()
    assert str(reason).startswith(f"{tmp_path}/{sentence}"), reason


def test_a_null_has_no_text_and_a_number_may_be_long(tmp_path):
    """As a row of a table without a value: the other lines of the file count."""
    long = '{"text": null, "rest": "' + "x" * text_files.LINE + '"}'
    lines = [
        '{"text": "one"}',
        '{"text": null}',
        long,
        '{"text": "two", "x": ' + "1" * 10_000 + "}",
    ]
    texts = Documents(write(tmp_path, {"a.jsonl": "\n".join(lines)}))
    assert whole(texts) == ["one", "two"] and not texts.left_out


JSON_LINES = '{"text": "one"}\n\n{"text": "two"}\n'


@pytest.mark.parametrize(
    "content, documents",
    [
        (JSON_LINES, ["one", "two"]),
        ("\ufeff" + JSON_LINES, ["one", "two"]),
        ('{"text": "' + "x" * text_files.LINE + '"}', ["x" * text_files.LINE]),
        ('{"text": "one"}', ["one"]),
        ('{"version": 1}', ['{"version": 1}']),  # a file of settings
        ("{}\nx = 1\n", ["{}\nx = 1\n"]),
        ("[1]\n[2]\n", ["[1]\n[2]\n"]),
        ("", []),
    ],
)
@pytest.mark.parametrize("name", ["stdin-0.txt", "a.json", "a.json.gz"])
def test_what_a_named_file_holds_decides(tmp_path, name, content, documents):
    """Such as the copy of standard input. In a folder, the suffix decides: it may be source code."""
    raw = content.encode()
    write(tmp_path, {name: gzip.compress(raw) if name.endswith(".gz") else raw})
    assert whole(Documents(tmp_path / name)) == documents
    if content:
        assert whole(Documents(tmp_path)) == [content.removeprefix("\ufeff")]


def test_json_lines_without_the_field_are_not_trained_as_they_are(tmp_path):
    write(tmp_path, {"a.txt": '{"body": "one"}\n{"body": "two"}\n'})
    texts = Documents(tmp_path / "a.txt")
    assert whole(texts) == []
    (reason,) = texts.left_out.values()
    assert 'line 1 has no "text": choose with --text-key from body' in reason
    assert whole(Documents(tmp_path / "a.txt", "body")) == ["one", "two"]


@pytest.mark.parametrize("name", ["missing", "x" * 5000, "a\0b"])
def test_missing_path(tmp_path, name):
    with pytest.raises(UserError, match="does not exist: give a file, a folder or a glob"):
        whole(Documents(tmp_path / name))


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a"])
def test_unreadable(tmp_path, monkeypatch, name):
    """What may not be read is left out. A disk that fails may work another time: then training would use a different text."""

    def refuse(path, *more):
        raise OSError(code, os.strerror(code), str(path))

    write(tmp_path, {name: "text"})
    monkeypatch.setattr(compressed, "open", refuse, raising=False)
    code, texts = errno.EACCES, Documents(tmp_path)
    assert whole(texts) == []
    assert reasons(texts) == [f"{name} cannot be read (Permission denied)"]
    code = errno.EIO
    with pytest.raises(UserError, match=rf"{name} cannot be read \(Input/output error\)"):
        whole(Documents(tmp_path))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["one", None, "two"], "id": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert whole(Documents(tmp_path)) == ["one", "two"]
    parquet.write_table(table.drop_columns("text"), tmp_path / "a.parquet")
    expected = "a.parquet has no column named text: choose with --text-key from id"
    assert reasons(Documents(tmp_path), whole_sentence=True) == [expected]
    write(tmp_path, {"a.parquet": b"PAR1 no"})
    assert "a.parquet cannot be read as parquet" in reasons(Documents(tmp_path))[0]


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path, {"a.parquet": b"PAR1"})
    with pytest.raises(UserError, match="needs pyarrow: pip install pyarrow"):
        whole(Documents(tmp_path))


def test_jsonl_line_may_be_huge(tmp_path):
    write(tmp_path, {"a.jsonl": json.dumps({"text": "x" * 5_000_000})})
    assert [len(text) for text in whole(Documents(tmp_path))] == [5_000_000]


# --- long lines of a .jsonl ---
PIECES = ["a", "é", "😀", "\\n", '\\"', "\\\\", "\\/", "\\u00e9", "\\ud83d\\ude00", "\\ud83d", "\\ude00", "\\u12", "\\x", "\n", "\x01", '"', "ab" * 40]  # fmt: skip
STRINGS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
FIELDS = st.tuples(
    st.sampled_from(["text", "\\u0074ext", "id", "x" * 70]), STRINGS | st.integers(0, 9)
)
SPACE = st.sampled_from(["", " ", "\t", "\ufeff"])


@st.composite
def lines(draw):
    """A line that is often JSON, and often not."""
    quoted = lambda x: f'"{x}"' if isinstance(x, str) else str(x)
    fields = [
        f"{draw(SPACE)}{quoted(k)}: {quoted(x)}" for k, x in draw(st.lists(FIELDS, max_size=3))
    ]
    line = f"{draw(SPACE)}{{{', '.join(fields)}}}"
    raw = bytearray(line.encode())
    for at in draw(st.lists(st.integers(0, 200), max_size=1)):
        raw[at % len(raw)] = draw(st.sampled_from(b'"\\{}\0\xff \n'))
    return bytes(raw)


def read_lines(path):
    """-> the texts, or the error"""
    try:
        return whole(text_files.read_jsonl(path))
    except UserError as error:
        return str(error)


@settings(max_examples=600, deadline=None)
@given(
    st.lists(lines(), min_size=1, max_size=3),
    st.integers(1, 30),
    st.integers(24, 40),
    st.booleans(),
)
def test_long_lines_are_read_as_short_ones(tmp_path_factory, raw, part, short, ends):
    """Texts and errors; only of several errors in a line may another one be named."""
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(b"\n".join(raw) + b"\n" * ends)
    expected = read_lines(path)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("PART", part), ("SHORT", short), ("LINE", 2)):
            patch.setattr(text_files, name, value)
        found = read_lines(path)
    if isinstance(expected, list):
        assert found == expected
    else:
        assert isinstance(found, str) and found.split(" is ")[0].split(" has ")[0] in expected


def test_long_lines_with_errors(tmp_path):
    """The line and the byte are named."""
    good, half = "x" * 3_000_000, "\\ud83d"
    for text, sentence in {
        good + "\0": "line 2 is binary or UTF-16 (a NUL at byte 3000010)",
        good + "\xff": "line 2 is not UTF-8 (byte 3000010)",
        good + "\xc3": "line 2 is not UTF-8 (byte 3000010)",
        good + "\\x": "line 2 is not JSON",
        good + "\x01": "line 2 is not JSON",
        good + half: "line 2 has half a surrogate pair",
        half + good: "line 2 has half a surrogate pair",
        good + '", "text": 1, "x": "': 'line 2 has a "text" that is not a string',
        good + '"} {"': "line 2 is not JSON",
    }.items():
        raw = b'{"text": "1"}\n{"text": "' + text.encode("latin-1") + b'"}\n{"text": "3"}'
        write(tmp_path, {"a.jsonl": raw})
        assert sentence in read_lines(tmp_path / "a.jsonl"), sentence
    last = f'{{"text": "no", "other": "{good}", "n": [1], "text": "2{good}"}}'
    write(tmp_path, {"a.jsonl": f'{{"text": "1"}}\n{last}\n\n{{"text": "3"}}'})
    assert whole(Documents(tmp_path)) == ["1", "2" + good, "3"]


@pytest.mark.parametrize("piece", ["no line break ", "\\n\\u00e9\\ud83d\\ude00", "é😀"])
def test_memory_of_one_huge_line(tmp_path, piece):
    """A few parts, whatever the line; also of what stands next to the text."""
    path, n = tmp_path / "a.jsonl", 16_000_000 // len(piece.encode())
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"before": "')
        for field in ("text", "after"):
            file.writelines(itertools.repeat(piece, n))
            file.write(f'", "{field}": "')
        file.write('"}\n')
    tracemalloc.start()
    try:
        texts = Documents(path)
        found = texts.survey()
        size = sum(len(part.raw) for part in split(texts, found))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == found.n_bytes == n * len(json.loads(f'"{piece}"').encode())
    assert peak < 8_000_000, peak


# --- split ---


@settings(deadline=None)
@given(DOCUMENTS, st.integers(1, 40), st.integers(1, 40))
def test_split_loses_nothing(documents, n, other):
    found = survey(in_parts(documents, n))
    assert found == survey(in_parts(documents, other))
    pieces = list(split(in_parts(documents, n), found))
    assert "".join(piece.text for piece in pieces) == "".join(documents)
    assert all(piece.text.encode() == piece.raw for piece in pieces)
    held_out = sum(len(piece.raw) for piece in pieces if piece.held_out)
    # The last drawn document may almost double it; a cut moves back by less than a character.
    assert found.held_out <= held_out < 2 * found.held_out + 3
    sides = lambda pieces: [
        whole((p.text, p.ends) for p in pieces if p.held_out == side) for side in (False, True)
    ]
    assert sides(pieces) == sides(list(split(in_parts(documents, other), found)))


@settings(deadline=None)
@given(DOCUMENTS, st.randoms())
def test_split_by_document(documents, random):
    documents = documents * 12  # all copies of a document are on one side
    found = survey(in_parts(documents))
    if not found.by_document:
        return
    sides = {(p.text, p.held_out) for p in split(in_parts(documents), found)}
    assert len(sides) == len(set(documents))
    random.shuffle(documents)
    again = split(in_parts(documents), survey(in_parts(documents)))
    assert sides == {(p.text, p.held_out) for p in again}


@settings(deadline=None)
@given(DOCUMENTS, st.integers(1, 60), st.integers(1, 10))
def test_survey_keeps_only_what_may_be_drawn(documents, most, fraction):
    """The documents that are drawn are the first in the order of all hashes, although few are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "VAL_BYTES", most)
        patch.setattr(module, "VAL_FRACTION", fraction)
        found = survey(in_parts(documents))
        sizes = {}
        for text in documents:
            key = hashlib.sha256(text.encode()).digest()[:12]
            sizes[key] = sizes.get(key, 0) + len(text.encode())
        drawn, size = set(), 0
        for key in sorted(sizes):
            if size < found.held_out:
                drawn.add(key)
                size += sizes[key]
        longest = max([found.longest, *(sizes[key] for key in drawn)])
        assert found.validation_hashes() == (drawn if longest <= found.held_out else set())
        last = max(found.first)
        assert sum(found.first.values()) - found.first[last] < most


def test_split_of_one_document_is_its_tail():
    split_of = lambda text: list(split(in_parts([text], 7), survey(in_parts([text], 7))))
    for text, n_train in (("é" * 100, 90), ("é" * 101, 91)):
        parts = split_of(text)
        train, val = (whole((p.text, p.ends) for p in parts if p.held_out == v) for v in (0, 1))
        assert list(map(len, train)) == [n_train] and list(map(len, val)) == [len(text) - n_train]


@pytest.mark.parametrize("n", [1, 2, 9, 10, 50, 1000])
def test_a_cut_between_parts_ends_the_training_document(n):
    text = "abcdefghij" * 10
    parts = list(split(in_parts([text], n), survey(in_parts([text], n))))
    assert whole((p.text, p.ends) for p in parts if not p.held_out) == [text[:90]]
    assert whole((p.text, p.ends) for p in parts if p.held_out) == [text[90:]]


@pytest.mark.parametrize(
    "before, after", [(["one"] * 30, ["two"] * 30), (["one"] * 30, ["x" * 90])]
)
def test_split_notices_a_change(before, after):
    with pytest.raises(UserError, match="changed while it was being read"):
        list(split(in_parts(after), survey(in_parts(before))))


def test_survey_identifies_a_text():
    texts = (["ab"], ["a", "b"], ["b", "a"], ["abc"])
    hashes = {survey(in_parts(text)).sha256 for text in texts}
    assert len(hashes) == 4
    assert survey(in_parts(["é", "b"])).n_bytes == 3


# --- parts ---


@settings(deadline=None)
@given(st.text("ab<|endoftxé", max_size=60), st.integers(1, 20))
def test_documents_do_not_depend_on_the_parts(text, n):
    text = text.replace("ab", END_OF_TEXT)
    expected = [document for document in text.split(END_OF_TEXT) if document]
    assert whole(module._separate(in_parts([text], n))) == expected


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode), st.integers(1, 9))
def test_blocks_of_a_file(tmp_path_factory, raw, n):
    """Text and errors are those of the whole file."""
    path = tmp_path_factory.getbasetemp() / "blocks.txt"
    path.write_bytes(raw)
    try:
        expected = text_files._decode(raw, str(path))
    except UserError as error:
        expected = str(error)
        if b"\0" in raw:  # or what is wrong before it
            expected = "is "
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "PART", n)
        try:
            found = "".join(text_files.read_text(path))
        except UserError as error:
            assert expected in str(error) or raw[:3] == b"\xef\xbb\xbf"
            return
    assert found == expected


def test_a_large_file_that_is_not_text_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PART", 10)
    write(tmp_path, {"a.md": b"text " * 10 + b"\xff", "b.md": "text " * 10, "c.md": "é"})
    texts = Documents(tmp_path)
    assert whole(texts) == ["text " * 10, "é"]
    assert (texts.files, reasons(texts)) == (2, ["a.md is not UTF-8 (byte 50)"])


def test_memory_of_one_huge_file(tmp_path):
    """A few blocks, whatever the file."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"no line break " * 4_000_000)
    tracemalloc.start()
    try:
        texts = Documents(path)
        found = texts.survey()
        n = sum(len(part.raw) for part in split(texts, found))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n == found.n_bytes == 56_000_000
    assert peak < 8_000_000, peak


# --- parquet columns ---


def parquet(tmp_path, column, name="a.parquet"):
    pyarrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.table({"text": column(pyarrow)}), tmp_path / name)
    return tmp_path / name


TEXT_COLUMNS = {
    "string": lambda a: a.array(["é", None, "b"]),
    "large_string": lambda a: a.array(["é", None, "b"], a.large_string()),
    "string_view": lambda a: a.array(["é", None, "b"], a.string_view()),
    "binary": lambda a: a.array(["é".encode(), None, b"b"]),
    "large_binary": lambda a: a.array(["é".encode(), None, b"b"], a.large_binary()),
    "binary_view": lambda a: a.array(["é".encode(), None, b"b"], a.binary_view()),
    "dictionary": lambda a: a.array(["é", None, "b"]).dictionary_encode(),
    "dictionary of binary": lambda a: a.array(["é".encode(), None, b"b"]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", TEXT_COLUMNS)
def test_parquet_columns_of_text(tmp_path, kind):
    path = parquet(tmp_path, TEXT_COLUMNS[kind])
    assert whole(Documents(path)) == ["é", "b"]


OTHER_COLUMNS = {
    "list": (lambda a: a.array([["a"], ["b"]]), "list<"),
    "numbers": (lambda a: a.array([1, 2]), "int64"),
    "floats": (lambda a: a.array([1.0]), "double"),
    "bool": (lambda a: a.array([True]), "bool"),
    "struct": (lambda a: a.array([{"text": "a"}]), "struct<"),
    "fixed size": (lambda a: a.array([b"ab"], a.binary(2)), "fixed_size_binary[2]"),
    "dictionary of numbers": (lambda a: a.array([1, 1]).dictionary_encode(), "int64"),
}


@pytest.mark.parametrize("kind", OTHER_COLUMNS)
def test_parquet_columns_of_something_else(tmp_path, kind):
    make, name = OTHER_COLUMNS[kind]
    (reason,) = reasons(Documents(parquet(tmp_path, make)))
    assert reason.startswith(f"a.parquet: the column text has the type {name}")


def test_parquet_bytes_that_are_not_text(tmp_path):
    path = parquet(tmp_path, lambda a: a.array([b"a", None, b"\xff"]))
    assert reasons(Documents(path)) == ["a.parquet row 3 is not UTF-8 (byte 0)"]


def test_parquet_columns_of_the_same_name(tmp_path):
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"])
    writer.write_table(table, tmp_path / "a.parquet")
    assert "a.parquet has 2 columns named text" in reasons(Documents(tmp_path))[0]


def test_parquet_without_values(tmp_path):
    assert whole(Documents(parquet(tmp_path, lambda a: a.nulls(3)))) == []


def test_parquet_strings_are_kept_unchanged(tmp_path):
    """A NUL, and what would be a byte order mark in a file; in bytes a NUL means that they are not text."""
    texts = ["a\0b", "\ufeffc"]
    assert whole(Documents(parquet(tmp_path, lambda a: a.array(texts)))) == texts
    path = parquet(tmp_path, lambda a: a.array([b"a", b"a\0b"]))
    assert reasons(Documents(path)) == ["a.parquet row 2 is binary or UTF-16 (a NUL at byte 1)"]


def test_large_rows_of_a_parquet_are_decoded_one_by_one(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    large, small = ([f"{i} {'é' * n}" for i in range(200 if n == 1 else 6)] for n in (3_000_000, 1))
    for texts, rows in ((large, 1), (small, 64)):
        path = parquet(tmp_path, lambda a, texts=texts: a.array(texts))
        with pyarrow.parquet.ParquetFile(path) as file:
            assert {len(batch) for batch in columns._batches(file, "text")} >= {rows}
            assert max(len(batch) for batch in columns._batches(file, "text")) == rows
        parts = list(Documents(path))
        assert whole(parts) == texts and max(len(text) for text, _ in parts) <= text_files.PART
