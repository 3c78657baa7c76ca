"""Packed files, made by gzip and zstandard: the same bytes, in bounded memory; what is wrong with a damaged one."""

import gzip
import io
import itertools
import json
import random
import sys
import tracemalloc

import pytest
import zstandard
from parts import whole

from xtrain.data import compressed, text_files
from xtrain.data.compressed import BadFile, open_file, suffix
from xtrain.data.documents import Documents, split
from xtrain.errors import UserError

PACK = {".gz": gzip.compress, ".zst": zstandard.compress}
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a frame of .zst that holds no data
kinds = pytest.mark.parametrize("kind", PACK)


def a_text(seed=0, lines=2000):
    words = random.Random(seed)
    return "".join(f"line {i} {words.random()} é😀\n" for i in range(lines)).encode()


@kinds
def test_the_bytes_that_were_packed(tmp_path, kind):
    raw, pack, path = a_text(), PACK[kind], tmp_path / f"a.txt{kind}"
    between = b"\0" * 700 if kind == ".gz" else SKIPPABLE
    path.write_bytes(pack(raw) + pack(b"") + pack(b"more") + between)
    with open_file(path) as file:
        assert file.read() == raw + b"more"
    with open_file(path) as file:
        assert b"".join(iter(lambda: file.readline(100), b"")) == raw + b"more"


def test_frames_that_are_streamed(tmp_path):
    """Without the content's size, which zstd writes when it knows it, and with a checksum."""
    raw, path = a_text(), tmp_path / "a.zst"
    with (
        open(path, "wb") as file,
        zstandard.ZstdCompressor(write_checksum=True).stream_writer(file) as writer,
    ):
        for i in range(0, len(raw), 777):
            writer.write(raw[i : i + 777])
    with open_file(path) as file:
        assert file.read() == raw


@kinds
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a", "a.jsonl"])
def test_a_packed_text_is_the_text(tmp_path, kind, name):
    raw = a_text()
    if name == "a.jsonl":
        raw = b"".join(json.dumps({"text": line.decode()}).encode() + b"\n" for line in raw.splitlines())  # fmt: skip
    (tmp_path / name).write_bytes(raw)
    expected = whole(Documents(tmp_path / name))
    (tmp_path / (name + kind)).write_bytes(PACK[kind](raw))
    assert whole(Documents(tmp_path / (name + kind))) == expected and sum(map(len, expected)) > 9999
    assert suffix(tmp_path / (name + kind)) == (tmp_path / name).suffix


@kinds
def test_every_cut_is_one_bad_file(tmp_path, kind):
    """Wherever the file ends, none of its text is used and the sentence names it; the other file is."""
    packed, path = PACK[kind](b"some text " * 9), tmp_path / f"a.txt{kind}"
    (tmp_path / "b.txt").write_text("good")
    for n in range(1, len(packed)):
        path.write_bytes(packed[:n])
        texts = Documents(tmp_path)
        assert whole(texts) == ["good"], n
        assert list(texts.left_out) == [str(path)]
        assert texts.left_out[str(path)] == f"{path} is cut off: its end is missing, copy or pack it again"  # fmt: skip


@kinds
def test_every_changed_byte_of_the_content_is_seen(tmp_path, kind):
    raw = a_text(lines=20)
    packed = gzip.compress(raw) if kind == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress(raw)  # fmt: skip
    path = tmp_path / f"a{kind}"
    for at in range(len(packed) // 4, len(packed), 7):
        path.write_bytes(packed[:at] + bytes([packed[at] ^ 0x10]) + packed[at + 1 :])
        with pytest.raises(BadFile, match=r"a\.(gz|zst) is (cut off|damaged or no)"), open_file(path) as file:  # fmt: skip
            file.read()


@kinds
@pytest.mark.parametrize(
    "content", [b"hello world", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff" * 99]
)
def test_something_else_with_the_name(tmp_path, kind, content):
    path = tmp_path / f"a.txt{kind}"
    path.write_bytes(content)
    texts = Documents([path])
    assert whole(texts) == [] and len(texts.left_out) == 1
    path.write_bytes(PACK[kind](b"text") + content)
    texts = Documents([path])
    assert whole(texts) == [] and len(texts.left_out) == 1


@kinds
def test_a_long_line_of_a_packed_jsonl(tmp_path, kind, monkeypatch):
    """It is read twice, as in a file that is not packed; the lines around it stay."""
    monkeypatch.setattr(text_files, "LINE", 100)
    monkeypatch.setattr(text_files, "PART", 64)
    texts = ["1", "é\n😀" * 400, "3", "x" * 700, "5"]
    lines = [json.dumps({"id": "i" * 90, "text": text, "n": [1, 2]}) for text in texts]
    path = tmp_path / f"a.jsonl{kind}"
    path.write_bytes(PACK[kind]("\n".join(lines).encode()))
    assert whole(Documents(path)) == texts
    path.write_bytes(PACK[kind]("\n".join([*lines, lines[1][:-1]]).encode()))
    found = Documents(path)
    assert whole(found) == [] and "a.jsonl" + kind + " line 6 is not JSON" in found.left_out[str(path)]  # fmt: skip


@kinds
def test_memory_of_a_packed_file(tmp_path, kind):
    """Of one that grows a thousandfold: 48 MB of one letter, in one line of a .jsonl."""
    path = tmp_path / f"a.jsonl{kind}"
    raw = b'{"text": "' + b"a" * 48_000_000 + b'"}\n'
    path.write_bytes(PACK[kind](raw))
    assert path.stat().st_size < 100_000
    del raw
    tracemalloc.start()
    try:
        texts = Documents(path)
        found = texts.survey()
        n = sum(len(part.raw) for part in itertools.islice(split(texts, found), 10**9))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n == 48_000_000 and peak < 36_000_000, peak


def test_without_the_package(tmp_path, monkeypatch):
    for name in ("zstandard", "compression"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"text"))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(UserError) as error:
        whole(Documents(tmp_path))
    assert str(error.value).endswith("a.txt.zst is a .zst file, which needs zstandard before Python 3.14: pip install zstandard")  # fmt: skip
    assert not isinstance(
        error.value, BadFile
    )  # pip fixes it: the text is not trained without the file


def test_the_module_of_python_3_14(tmp_path, monkeypatch):
    """compression.zstd decompresses one frame with the methods of zlib. A module with that interface is enough."""

    class Module:
        ZstdError = zstandard.ZstdError

        @staticmethod
        def ZstdDecompressor():
            return zstandard.ZstdDecompressor().decompressobj()

    package = type(sys)("compression")
    package.zstd = Module
    monkeypatch.setitem(sys.modules, "compression", package)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.zst").write_bytes(zstandard.compress(b"text") * 2)
    with open_file(tmp_path / "a.zst") as file:
        assert file.read() == b"texttext"


def test_closing(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text"))
    with open_file(tmp_path / "a.gz") as file:
        raw = file.raw
        assert isinstance(file, io.BufferedReader) and isinstance(raw, compressed._Unpacked)
    assert raw.file.closed
