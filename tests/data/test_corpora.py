"""Texts of every kind: a bad one ends the command with one sentence and exit code 2, and leaves no files."""

import errno
import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from runs import DATA, checkpoints, metrics

from xtrain.data import compressed, dataset, pieces, stamps, text_files, tokenizing
from xtrain.data.dataset import prepare
from xtrain.data.shards import ShardWriter, read_shard
from xtrain.data.tokenizer import Tokenizer
from xtrain.generate import main as generate
from xtrain.train import main

WORDS = "the quick brown fox jumps over the lazy dog and runs away. "


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    return tmp_path / "cache"


def start(text, tmp_path, *more):
    small = [
        "--preset=tiny",
        "--vocab-size=300",
        "--steps=2",
        "--batch=2",
        "--seq-len=16",
        "--eval-batches=1",
    ]
    paths = text if isinstance(text, list) else [text]
    where = [
        "--data",
        *map(str, paths),
        "--out",
        str(tmp_path / "runs"),
        "--name=run",
        "--device=cpu",
    ]
    return main([*small, *where, "--sample-tokens=2", *more])


def a_file(name, content):
    def make(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return make


def a_folder(**files):
    def make(folder):
        for name, content in files.items():
            (folder / name.replace("_dot_", ".")).write_bytes(content)
        return folder

    return make


def a_pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def a_broken_link(folder):
    (folder / "link.txt").symlink_to(folder / "gone.txt")
    return folder / "link.txt"


BAD = {
    "empty": (a_file("a.txt", b""), "has no text"),
    "only a byte order mark": (a_file("a.txt", b"\xef\xbb\xbf"), "has no text"),
    "one byte": (a_file("a.txt", b"a"), "the text has 1 bytes, too few to hold some out"),
    "one token": (a_file("a.txt", b"aa"), "tokens, a window needs 17"),
    "a few tokens": (a_file("a.txt", b"some words "), "tokens, a window needs 17"),
    "held-out text too short": (a_file("a.txt", WORDS.encode() * 2), "the validation text has"),
    "only ends of text": (a_file("a.txt", b"<|endoftext|>" * 9), "has no text"),
    "binary": (a_file("a.txt", b"text\0text"), "is binary or UTF-16 (a NUL at byte 4): give UTF-8 text"),
    "a picture": (a_file("a.png", b"\x89PNG\r\n\x1a\n\0\0"), "is binary"),
    "UTF-16": (a_file("a.txt", WORDS.encode("utf-16")), "is binary or UTF-16"),
    "Latin-1": (a_file("a.txt", "größe".encode("latin-1")), "is not UTF-8 (byte 2): convert it to UTF-8"),
    "half a character": (a_file("a.txt", "größe".encode()[:3]), "is not UTF-8 (byte 2)"),
    "not JSON": (a_file("a.jsonl", b"{]"), "a.jsonl line 1 is not JSON"),
    "an empty folder": (a_folder(), "has no text: give other --data"),
    "a folder of empty files": (a_folder(a_dot_txt=b"", b_dot_txt=b""), "has no text"),
    "a folder of other things": (a_folder(a_dot_png=b"\0", b_dot_bin=b"\xff"), "has no text: give other --data (2 files are left out; "),
    "a pipe": (a_pipe, "is neither a file nor a folder"),
    "a device": (lambda folder: "/dev/zero", "is neither a file nor a folder"),
    "a broken link": (a_broken_link, "does not exist"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_text(tmp_path, cache, capsys, name):
    make, sentence = BAD[name]
    if name in ("a pipe", "a device") and not hasattr(os, "mkfifo"):
        # Windows has neither
        pytest.skip("not on this system")
    assert start(make(tmp_path / "text"), tmp_path) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and "Traceback" not in error, error
    assert not (tmp_path / "runs").exists()
    assert not cache.exists() or not [p for p in cache.iterdir() if p.name.startswith(".")]


def refuse(*_, **__):
    raise PermissionError(13, "Permission denied", "secret")


@pytest.mark.parametrize("owner, name", [(compressed, "open"), (os, "scandir")])
def test_unreadable(tmp_path, monkeypatch, capsys, owner, name):
    """A file or a folder without read permission. (Simulated, because root may read everything.)"""
    (tmp_path / "text" / "a.txt").write_text(WORDS * 99)
    monkeypatch.setattr(owner, name, refuse, raising=False)
    assert start(tmp_path / "text", tmp_path) == 2
    error = capsys.readouterr().err
    assert "cannot be read (Permission denied)" in error and error.count("\n") == 1, error


@pytest.mark.parametrize("letters", [2, 26])
def test_one_huge_line(tmp_path, letters):
    """Without a space or a line break: there is nowhere to cut, and no word occurs twice."""
    codes = np.random.default_rng(0).integers(97, 97 + letters, 300_000)
    text = codes.astype(np.uint8).tobytes().decode()
    (tmp_path / "text" / "a.txt").write_text(text)
    assert start(tmp_path / "text", tmp_path) == 0
    assert checkpoints(tmp_path / "runs" / "run") == ["step-000002"]


def test_good_files_among_others(tmp_path, capsys):
    text = tmp_path / "text"
    (text / "a.txt").write_text(WORDS * 99)
    (text / "b.png").write_bytes(b"\x89PNG\0")
    (text / "c.md").write_bytes(b"\xff")
    (text / "d.md").symlink_to(text / "gone")
    os.mkfifo(text / "pipe")
    assert start(text, tmp_path) == 0
    said = capsys.readouterr().out
    assert "in 1 file" in said and "files left out: 4\n" in said
    for name, reason in {
        "b.png": "is binary or UTF-16 (a NUL at byte 4)",
        "c.md": "is not UTF-8 (byte 0)",
        "d.md": "does not exist",
        "pipe": "is not a regular file",
    }.items():
        assert said.count(f"  {text / name} {reason}") == 1, name
    assert not (tmp_path / "runs" / "run" / "left_out.txt").exists()


def test_a_long_list_is_in_a_file(tmp_path, capsys):
    """Each file once, on the terminal the first ones; of the next start, which leaves out fewer, no old list stays."""
    text = tmp_path / "text"
    (text / "z.txt").write_text(WORDS * 99)
    for i in range(7):
        (text / f"{i}.jsonl").write_text('{"text": "fine"}\n{"body": 1}')
    assert start(text, tmp_path, "--stop-at=1") == 0
    listed = tmp_path / "runs" / "run" / "left_out.txt"
    reasons = listed.read_text().splitlines()
    line = '{} line 2 has no "text": choose with --text-key from body'
    assert reasons == [line.format(text / f"{i}.jsonl") for i in range(7)]
    said = capsys.readouterr().out
    assert f"files left out: 7, all in {listed}\n" in said
    assert [said.count(reason) for reason in reasons] == [1] * 5 + [0] * 2
    for i in range(6):
        (text / f"{i}.jsonl").unlink()
    assert start(text, tmp_path, "--resume") == 0  # the text is the same
    assert "files left out: 1\n" in capsys.readouterr().out and not listed.exists()


@pytest.mark.parametrize("known", [False, True])
def test_strict_data(tmp_path, cache, capsys, monkeypatch, known):
    """The first file that would be left out ends the command, also if the text is known from an earlier run."""
    monkeypatch.setattr(stamps, "GRANULARITY", -10)
    text = tmp_path / "text"
    (text / "a.txt").write_text(WORDS * 99)
    (text / "b.txt").write_bytes(b"\xff")
    (text / "c.txt").write_bytes(b"\0")
    if known:
        assert start(text, tmp_path) == 0
    capsys.readouterr()
    assert start(text, tmp_path / "strict", "--strict-data") == 2
    assert capsys.readouterr().err == (
        f"xtrain.train: {text / 'b.txt'} is not UTF-8 (byte 0): convert it to UTF-8 (and 1 more); without --strict-data it is left out\n"
    )
    (text / "b.txt").unlink()
    (text / "c.txt").unlink()
    assert start(text, tmp_path / "strict", "--strict-data") == 0


def test_several_paths_and_a_key(tmp_path, capsys):
    text = tmp_path / "text"
    lines = [json.dumps({"text": "not this", "body": f"{i} {WORDS}"}) for i in range(200)]
    (text / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[:100]).encode()))
    (text / "b.jsonl").write_text("\n".join(lines[100:]))
    (text / "c.txt").write_text("not this either")
    paths = [text / "b.jsonl", text / "*.gz", text / "a.jsonl.gz"]
    assert start(paths, tmp_path, "--text-key", "body") == 0
    n = sum(len(json.loads(line)["body"].encode()) for line in lines)
    said = capsys.readouterr().out
    assert f"{n / 1e3:.1f} kB in 2 files" in said and "left out" not in said
    stored = json.loads((tmp_path / "runs/run/config.json").read_text())
    assert stored["train"]["data"] == list(map(str, paths))
    assert stored["train"]["text_key"] == "body" and stored["data"]["bytes"] == n


def test_standard_input(tmp_path, monkeypatch, capsys):
    """The text of standard input is that of a file; to resume, it is not needed again, and another one is noticed."""
    give = lambda text: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    text = (DATA / "grammar.txt").read_bytes()
    (tmp_path / "text" / "a.txt").write_bytes(text)
    give(text)
    assert start("-", tmp_path, "--stop-at=1") == 0
    assert start(tmp_path / "text" / "a.txt", tmp_path / "file", "--stop-at=1") == 0
    stored = [json.loads((tmp_path / f / "run/config.json").read_text()) for f in ("runs", "file/runs")]  # fmt: skip
    assert stored[0]["data"]["sha256"] == stored[1]["data"]["sha256"]
    small = ["--out", str(tmp_path / "runs"), "--name=run", "--resume", "--stop-at=2"]
    give(b"")
    assert main(small) == 0  # from the copy
    assert metrics(tmp_path / "runs" / "run")[-1]["step"] == 2
    give(text.replace(b"a", b"b", 1))
    assert main([*small, "--data", "-"]) == 2
    assert "the text is not the same (sha256 was " in capsys.readouterr().err
    give(b"")
    assert start("-", tmp_path / "empty") == 2
    assert "has no text" in capsys.readouterr().err


def test_options_of_an_earlier_version(tmp_path):
    """Its config.json has one path as a string, or null."""
    path = tmp_path / "text" / "a.txt"
    path.write_bytes((DATA / "grammar.txt").read_bytes())
    assert start(path, tmp_path, "--stop-at=1") == 0
    config = tmp_path / "runs" / "run" / "config.json"
    stored = json.loads(config.read_text())
    stored["train"]["data"] = str(path)
    del stored["train"]["text_key"], stored["train"]["strict_data"]
    config.write_text(json.dumps(stored))
    assert main(["--out", str(tmp_path / "runs"), "--name=run", "--resume"]) == 0
    assert json.loads(config.read_text())["train"]["data"] == [str(path)]


def test_tokens(tmp_path, capsys):
    """A run on tokens has a tokenizer: samples, the report and generate are those of a run on text. It resumes alone."""
    tokenizer, text = tmp_path / "tokenizer", (DATA / "grammar.txt").read_text()
    Tokenizer.train([text], 300).save(tokenizer)
    ids = Tokenizer.load(tokenizer).encode(text)
    for name, part in (("train.bin", ids[:-2000]), ("val.bin", ids[-2000:])):
        np.array(part, np.uint16).tofile(tmp_path / "text" / name)
    tokens = tmp_path / "text" / "*.bin"
    assert start(tokens, tmp_path) == 2
    assert "holds tokens, not text: give the tokenizer" in capsys.readouterr().err
    assert start(tokens, tmp_path, "--tokenizer", str(tokenizer), "--stop-at=1") == 0
    run = tmp_path / "runs" / "run"
    assert main(["--out", str(tmp_path / "runs"), "--name=run", "--resume"]) == 0
    assert metrics(run)[-1]["step"] == 2
    assert "val_bpb" in metrics(run)[-1] or any("val_bpb" in line for line in metrics(run))
    assert (run / "report.html").stat().st_size > 10_000
    assert generate(["--model", str(run), "--max-new-tokens=5", "--device=cpu", "the"]) == 0
    capsys.readouterr()
    ids[5] ^= 1
    np.array(ids[:-2000], np.uint16).tofile(tmp_path / "text" / "train.bin")
    assert main(["--out", str(tmp_path / "runs"), "--name=run", "--resume", "--steps=3", "--allow-change", "steps"]) == 2  # fmt: skip
    assert "the text is not the same (sha256 was " in capsys.readouterr().err


WRONG = {
    "an empty path": (["--data", ""], "--data is empty: give a path, or omit the option"),
    "no path": (["--data"], "--data has no value: give one, or omit the option"),
    "twice": (["--data", "{}", "--steps=2", "--data={}"], "--data is given twice: give all values after the first one"),
    "an empty key": (["--data", "x", "--text-key", ""], "--text-key is empty: give the name of a field or column"),
    "a glob without files": (["--data", "{}/*.zip"], "no file matches {}/*.zip: check the pattern"),
    "one of two is missing": (["--data", "{}", "{}/gone.txt"], "gone.txt does not exist: give a file, a folder or a glob"),
    "another word for the key": (["--data", "{}", "--text-colum", "x"], "there is no option --text-colum: did you mean --text-key?"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_command_lines(tmp_path, capsys, what):
    """Exit code 2, and one sentence."""
    arguments, sentence = WRONG[what]
    fill = lambda text: text.replace("{}", str(tmp_path / "text"))
    (tmp_path / "text" / "a.txt").write_text(WORDS)
    code = main([*map(fill, arguments), "--device=cpu", "--out", str(tmp_path / "runs")])
    error = capsys.readouterr().err
    assert code == 2 and fill(sentence) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


KILLED = """
import sys
from xtrain.data import dataset, pieces, text_files, tokenizing
tokenizing.ENCODE_BATCH, tokenizing.COMMIT, text_files.PART, pieces.PIECE = 20_000, 20_000, 5000, 1000
tell = lambda fraction, text: print(f"{fraction:.2f} {text}", flush=True)
dataset.prepare([sys.argv[1], sys.argv[2]], 300, sys.argv[3], progress=tell)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="not on this system")
def test_killed_while_it_tokenizes_packed_files(tmp_path, monkeypatch):
    """By SIGKILL, in a process of its own: the next one continues, and ends with the bits of one that was not killed."""
    text, root = tmp_path / "text", Path(__file__).resolve().parents[2]
    lines = [json.dumps({"text": f"{i} {WORDS * 3}"}).encode() for i in range(2000)]
    (text / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines[:1000])))
    (text / "b.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(lines[1000:])))
    (text / "c.jsonl.gz").write_bytes((text / "a.jsonl.gz").read_bytes()[:-9])  # cut off
    arguments = [text / "*.gz", text / "b.jsonl.zst"]

    def go(cache, until=1.0):
        command = [sys.executable, "-c", KILLED, *map(str, arguments), str(tmp_path / cache)]
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        said = []
        for line in process.stdout:
            said.append(line)
            if until < float(line.split()[0]) < 1:
                process.kill()
        return said, process.wait()

    whole, code = go("whole")
    assert code == 0 and any(re.search(r"tokenizing, \d+\.\d MB/s", line) for line in whole)
    assert not any("already tokenized" in line for line in whole)
    _, code = go("cache", until=0.6)
    assert code == -signal.SIGKILL
    (left,) = (path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".tmp-"))
    assert (left / tokenizing.STATE).is_file()
    said, code = go("cache")
    assert code == 0 and any("reading what is already tokenized" in line for line in said)
    entries = [next(p for p in (tmp_path / c).iterdir() if p.name != stamps.FOLDER) for c in ("whole", "cache")]  # fmt: skip
    read = lambda entry: {p.name: p.read_bytes() for p in entry.iterdir()}
    assert read(entries[0]) == read(entries[1]) and entries[0].name == entries[1].name


def test_changed_since_it_was_tokenized(tmp_path, capsys):
    """A run does not resume with another text, not even of the same length; a new run reads the new text."""
    path = tmp_path / "text" / "a.txt"
    path.write_bytes((DATA / "grammar.txt").read_bytes())
    assert start(path, tmp_path, "--stop-at=1") == 0
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    assert start(path, tmp_path, "--resume") == 2
    assert "the text is not the same (sha256 was " in capsys.readouterr().err
    assert start(path, tmp_path, "--resume", "--allow-change", "data", "tokenizer") == 0
    assert metrics(tmp_path / "runs" / "run")[-1]["step"] == 2


@pytest.mark.parametrize("damage", ["header", "tail", "token"])
def test_damaged_shards_are_rebuilt(tmp_path, cache, capsys, damage):
    path = tmp_path / "text" / "a.txt"
    path.write_bytes((DATA / "grammar.txt").read_bytes())
    shard = prepare(path, 300).train[0]
    good = shard.read_bytes()
    bad = {
        "header": b"\0" * 1024 + good[1024:],
        "tail": good[:-3],
        "token": good[:2000] + bytes([good[2000] ^ 1]) + good[2001:],  # valid, but different
    }
    shard.write_bytes(bad[damage])
    assert start(path, tmp_path) == 0
    assert shard.read_bytes() == good and len(read_shard(shard)) > 1000
    assert sorted({*os.listdir(cache)} - {stamps.FOLDER}) == [shard.parent.name]


def test_a_full_disk_ends_the_command(tmp_path, cache, monkeypatch, capsys):
    """With one sentence; the next run continues, and ends like one that was not interrupted."""
    text = tmp_path / "text" / "a.txt"
    text.write_bytes((DATA / "grammar.txt").read_bytes())
    monkeypatch.setattr(tokenizing, "ENCODE_BATCH", 10_000)
    monkeypatch.setattr(tokenizing, "COMMIT", 10_000)
    monkeypatch.setattr(text_files, "PART", 500)
    monkeypatch.setattr(pieces, "PIECE", 100)
    append, calls, fails_at = ShardWriter.append, [], None

    def full(self, tokens):
        calls.append(len(tokens))
        if len(calls) == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(self, tokens)

    monkeypatch.setattr(ShardWriter, "append", full)
    whole = prepare(text, 300, tmp_path / "whole")
    n, fails_at = len(calls), 4
    assert n > 6
    calls.clear()
    assert start(text, tmp_path) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error and "is kept for the next run" in error
    assert error.count("\n") == 1 and not (tmp_path / "runs").exists()
    assert start(text, tmp_path) == 0
    (entry,) = (path for path in cache.iterdir() if path.name != stamps.FOLDER)
    assert {p.name: p.read_bytes() for p in entry.iterdir()} == {
        p.name: p.read_bytes() for p in whole.folder.iterdir()
    }
    assert len(calls) == n + 1, "only the batch that failed is encoded again"


def test_verify_data(tmp_path, cache, monkeypatch):
    """A bit that a disk has changed by itself, without a change of any time."""
    monkeypatch.setattr(stamps, "GRANULARITY", -10)
    monkeypatch.setattr(dataset, "ALWAYS_READ", 1000)
    path = tmp_path / "text" / "a.txt"
    path.write_bytes((DATA / "grammar.txt").read_bytes())
    shard = prepare(path, 300).train[0]
    good, stamp, before = shard.read_bytes(), stamps.stamp, stamps.stamp(shard)
    monkeypatch.setattr(stamps, "stamp", lambda p: before if Path(p) == shard else stamp(p))
    shard.write_bytes(good[:2000] + bytes([good[2000] ^ 1]) + good[2001:])
    assert start(path, tmp_path) == 0 and shard.read_bytes() != good
    assert start(path, tmp_path / "second", "--verify-data") == 0 and shard.read_bytes() == good


# VmHWM: the peak of this process (ru_maxrss begins with that of the process that started it)
MEMORY = """
import sys
from xtrain.data.dataset import prepare
peak = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
before = peak()
corpus = prepare(sys.argv[1], 400, sys.argv[2])
print(peak() - before, corpus.train_tokens)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_of_one_huge_document(tmp_path):
    """One line of 12 MB: encoded as a whole it took 53 bytes of memory per byte, 640 MB."""
    random = np.random.default_rng(0)
    words = ["word", "größe", "x1", "tokens,", "(and", "more)", "你好", "don't"]
    text = " ".join(words[i] for i in random.integers(len(words), size=1 << 18))
    with open(tmp_path / "text" / "a.txt", "w", encoding="utf-8") as file:
        for _ in range(8):
            file.write(text + " ")
    command = [sys.executable, "-c", MEMORY, tmp_path / "text", tmp_path / "cache"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kilobytes, tokens = map(int, done.stdout.split())
    assert kilobytes < 350_000 and tokens > 1_500_000, (kilobytes, tokens)
