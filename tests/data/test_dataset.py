"""prepare(): the cached corpus of a text, also after interruptions and damage."""

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from checks import SLOW, only_slow
from faults import KILL, FailingDisk, killed
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import in_parts

from xtrain import files
from xtrain.data import bigram, compressed, documents, pieces, stamps, text_files, tokenizing
from xtrain.data import dataset as data
from xtrain.data.dataset import prepare
from xtrain.data.shards import read_shard
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError

VOCAB = 400


def some_text(seed, words):
    rng = np.random.default_rng(seed)
    known = ["def", "return", "größe", "(x)", "=", "1", "\n    ", "for", "你好", "in"]
    return " ".join(known[i] for i in rng.integers(len(known), size=words))


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(some_text(i, 300), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def corpus(text_folder, tmp_path_factory):
    return prepare(text_folder, VOCAB, tmp_path_factory.mktemp("cache"))


def test_corpus_accounts_for_every_byte(corpus, text_folder):
    raw = b"".join(path.read_bytes() for path in sorted(text_folder.iterdir()))
    assert corpus.bytes == len(raw) == corpus.train_bytes + corpus.val_bytes
    assert (corpus.files, corpus.skipped, corpus.documents) == (40, 0, 40)
    assert corpus.split == "documents"
    for shards, tokens, size in (
        (corpus.train, corpus.train_tokens, corpus.train_bytes),
        (corpus.val, corpus.val_tokens, corpus.val_bytes),
    ):
        ids = np.concatenate([read_shard(path) for path in shards])
        assert len(ids) == tokens
        assert corpus.token_lengths[ids].sum() == size
        assert ids[-1] == corpus.tokenizer.eot_id
        documents = corpus.tokenizer.decode(ids).split(corpus.tokenizer.eot)[:-1]
        assert all(document.encode() in raw for document in documents)
    assert 0 < corpus.bigram_bpb < 8


def test_bits_per_byte(corpus):
    _, targets = corpus.val_batches(1, 2, 16)[0]
    size = sum(len(corpus.tokenizer.token_bytes[i]) for i in targets.flat if i)
    assert corpus.bits_per_byte(size * np.log(2), targets) == pytest.approx(1)


def entries(cache):
    """The names in a cache, without what is known of the files' stamps."""
    return sorted(name for name in os.listdir(cache) if name != stamps.FOLDER)


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_text_same_files(corpus, text_folder, tmp_path):
    again = prepare(text_folder, VOCAB, tmp_path)
    assert snapshot(again.folder) == snapshot(corpus.folder)
    assert again.folder.name == corpus.folder.name


def test_cache_is_used_and_changes_are_seen(tmp_path, monkeypatch):
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text(some_text(0, 1000), encoding="utf-8")
    first = prepare(text, VOCAB, cache)
    monkeypatch.setattr(data, "Tokenizing", None)  # a second call must not need it
    assert prepare(text, VOCAB, cache).folder == first.folder
    monkeypatch.undo()
    assert prepare(text, VOCAB + 1, cache).folder != first.folder
    text.write_text(some_text(1, 1000), encoding="utf-8")
    second = prepare(text, VOCAB, cache)
    assert second.sha256 != first.sha256 and second.folder != first.folder
    assert len(entries(cache)) == 3


@pytest.mark.parametrize(
    "name",
    [
        "corpus.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "train_000000.bin",
        "val_000000.bin",
    ],
)
@pytest.mark.parametrize(
    "damage",
    [
        lambda f: f.unlink(),
        lambda f: f.write_bytes(f.read_bytes()[:-5]),
        lambda f: f.write_bytes(f.read_bytes()[:-5] + b"12345"),
        lambda f: f.write_bytes(b"[]"),
        lambda f: flip(f, 200),
        lambda f: (f.unlink(), f.mkdir()),
    ],
)
def test_damaged_cache_is_rebuilt(corpus, text_folder, name, damage):
    before = snapshot(corpus.folder)
    damage(corpus.folder / name)
    prepare(text_folder, VOCAB, corpus.folder.parent)
    assert snapshot(corpus.folder) == before


def test_interrupted_tokenizing_leaves_nothing(text_folder, tmp_path):
    def interrupt(fraction, text):
        if text == "training the tokenizer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(text_folder, VOCAB, tmp_path, progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_leftovers_of_killed_processes_are_removed(text_folder, tmp_path):
    """Immediately, since a running process holds a lock on its folder; after a week if another run could continue it."""
    for name in ("dead", "alive", "useful", "old"):
        (tmp_path / f".tmp-{name}").mkdir()
    for name, age in (("useful", 0.9), ("old", 1.1)):
        folder = tmp_path / f".tmp-{name}"
        tokenizing.write_state(folder, {})
        os.utime(folder, (time.time() - age * tokenizing.KEEP_SECONDS,) * 2)
    with files.locked(tmp_path / ".tmp-alive"):
        folder = prepare(text_folder, VOCAB, tmp_path).folder
    assert entries(tmp_path) == [".tmp-alive", ".tmp-useful", folder.name]


def test_leftovers_where_nothing_can_be_locked(text_folder, tmp_path, monkeypatch):
    """Then the age of the folder decides."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    for name, age in (("old", 2 * files.STRAY_SECONDS), ("new", 0)):
        (tmp_path / f".tmp-{name}").mkdir()
        os.utime(tmp_path / f".tmp-{name}", (time.time() - age,) * 2)
    folder = prepare(text_folder, VOCAB, tmp_path).folder
    assert entries(tmp_path) == [".tmp-new", folder.name]


def test_a_work_folder_removed_before_it_is_locked(tmp_path, monkeypatch):
    """Another process may take it for that of a dead process: then a second folder is made."""
    make, made = tempfile.mkdtemp, []

    def removed_at_once(**more):
        made.append(make(**more))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(files.tempfile, "mkdtemp", removed_at_once)
    with files.work_folder(tmp_path) as folder:
        assert [str(folder)] == made[1:] and folder.is_dir()
        with pytest.raises(files.Busy), files.locked(folder):
            pass
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------------- kills
SMALL = {"ENCODE_BATCH": 2_000, "SHARD_TOKENS": 1_500, "COMMIT": 5_000}


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(tokenizing, name, value)


@pytest.fixture(scope="module")
def small_corpus(text_folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(tokenizing, name, value)
        return prepare(text_folder, VOCAB, tmp_path_factory.mktemp("small"))


@pytest.fixture
def tiny(monkeypatch):
    """Few writes, of every kind: several commits, shards and batches."""
    for name, value in {"ENCODE_BATCH": 800, "SHARD_TOKENS": 600, "COMMIT": 1_500}.items():
        monkeypatch.setattr(tokenizing, name, value)
    monkeypatch.setattr(text_files, "PART", 500)


@pytest.fixture
def tiny_text(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(9):
        (tmp_path / "text" / f"{i}.txt").write_text(some_text(i, 100), encoding="utf-8")
    return tmp_path / "text"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_killed_at_any_write(tiny, tiny_text, tmp_path, monkeypatch):
    """Of the tokens, the state, the stamps, and at every sync and rename: the next run continues, with the same bits.

    Without XTRAIN_SLOW at every second one.
    """
    whole, n, batches, killing = prepare(tiny_text, VOCAB, tmp_path / "whole"), 0, [], True
    encode, encoded = Tokenizer.encode_batch, []
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *a: encoded.append(1) or encode(*a))
    while killing:
        n += 1 if SLOW else 2
        cache = tmp_path / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        work = lambda cache=cache: prepare(tiny_text, VOCAB, cache)
        with pytest.MonkeyPatch.context() as patch:
            killing = killed(lambda n=n, cache=cache: FailingDisk(patch, cache, n, KILL), work)
        encoded.clear()
        again = work()
        batches.append(len(encoded))
        assert entries(cache) == [again.folder.name], n
        assert snapshot(again.folder) == snapshot(whole.folder), n
    assert n > 40 and batches == sorted(batches, reverse=True) and batches[-1] == 0
    assert len(set(batches)) >= 4, batches


def interrupted(text_folder, cache, fraction):
    """A run that is interrupted. -> its work folder"""

    def stop(done, text):
        if done > fraction:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(text_folder, VOCAB, cache, progress=stop)
    (folder,) = cache.iterdir()
    assert folder.name.startswith(".tmp-")
    return folder


DAMAGE = {
    "a shard": lambda folder: flip(folder / "train_000000.bin", 1500),
    "the last shard": lambda folder: flip(sorted(folder.glob("train*"))[-1], 1030),
    "a missing shard": lambda folder: (folder / "train_000001.bin").unlink(),
    "a short shard": lambda folder: os.truncate(folder / "train_000001.bin", 1500),
    "the tokenizer": lambda folder: flip(folder / "tokenizer.json", 300),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "the state": lambda folder: flip(folder / tokenizing.STATE, 30),
    "an empty state": lambda folder: (folder / tokenizing.STATE).write_text(""),
    "a state that is a list": lambda folder: (folder / tokenizing.STATE).write_text("[]"),
}


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("what", DAMAGE)
def test_what_a_killed_process_left_is_verified(small, small_corpus, text_folder, tmp_path, what):
    DAMAGE[what](interrupted(text_folder, tmp_path, 0.7))
    again = prepare(text_folder, VOCAB, tmp_path)
    assert entries(tmp_path) == [again.folder.name]
    assert snapshot(again.folder) == snapshot(small_corpus.folder)


def test_other_settings_start_again(small, corpus, text_folder, tmp_path, monkeypatch):
    interrupted(text_folder, tmp_path, 0.7)
    monkeypatch.undo()
    assert snapshot(prepare(text_folder, VOCAB, tmp_path).folder) == snapshot(corpus.folder)


def test_two_processes_at_once(corpus, text_folder, tmp_path):
    arguments = f"{str(text_folder)!r}, {VOCAB}, {str(tmp_path)!r}"
    code = f"from xtrain.data.dataset import prepare; prepare({arguments})"
    root = Path(__file__).resolve().parents[2]
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=root) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert entries(tmp_path) == [corpus.folder.name]
    assert snapshot(tmp_path / corpus.folder.name) == snapshot(corpus.folder)


def test_a_process_waits_for_another_one(corpus, text_folder, tmp_path, monkeypatch):
    """And then uses its result."""
    monkeypatch.setattr(tokenizing, "POLL_SECONDS", 0)
    work, told = tmp_path / f".tmp-{corpus.folder.name}", []
    work.mkdir()
    lock = files.locked(work)
    lock.__enter__()

    def progress(fraction, text):
        told.append(text)
        if told[-3:] == ["waiting for another process that tokenizes the same text"] * 3:
            shutil.copytree(corpus.folder, work, dirs_exist_ok=True)
            work.rename(tmp_path / corpus.folder.name)
            lock.__exit__(None, None, None)

    found = prepare(text_folder, VOCAB, tmp_path, progress=progress)
    assert entries(tmp_path) == [corpus.folder.name] and found.sha256 == corpus.sha256
    assert "training the tokenizer" not in told


def test_slower_process_uses_the_existing_entry(corpus, text_folder, tmp_path, monkeypatch):
    """Where folders cannot be locked, two processes may write the same text."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    rename = os.rename

    def another_was_faster(source, target):
        prepare(text_folder, VOCAB, tmp_path)
        rename(source, target)

    def once(source, target):
        monkeypatch.setattr(os, "rename", rename)
        another_was_faster(source, target)

    monkeypatch.setattr(os, "rename", once)
    late = prepare(text_folder, VOCAB, tmp_path)
    assert entries(tmp_path) == [late.folder.name]
    assert snapshot(late.folder) == snapshot(corpus.folder)


# ----------------------------------------------------------------------------- disks that fail
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_an_entry_that_cannot_be_read_is_kept(corpus, text_folder, tmp_path, code, with_tokenizer):
    """At whichever open or read of the cache the disk fails: one sentence, and nothing is deleted or written again."""
    entry = tmp_path / corpus.folder.name
    shutil.copytree(corpus.folder, entry)
    given = corpus.folder if with_tokenizer else None
    if with_tokenizer:
        entry = prepare(text_folder, VOCAB, tmp_path, given).folder
    before, n, failed = {p: p.stat().st_mtime_ns for p in entry.iterdir()}, 0, 0
    while True:
        n += 1
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, entry, n, code, "read")
            try:
                found = prepare(text_folder, VOCAB, tmp_path, given)
                found.loader(1, 16)
                found.val_batches(1, 1, 16)
            except UserError as error:
                failed += 1
                assert "cannot be read" in str(error) and "try again" in str(error)
                assert str(entry) in str(error) and "\n" not in str(error)
        assert {p: p.stat().st_mtime_ns for p in entry.iterdir()} == before, n
        if disk.count < n:
            break
    assert failed == n - 1 >= 6, (failed, n)


def fail_everywhere(text, tmp_path, where, sentence, *fault):
    """prepare() with a disk that fails at the first, the second, ... access below `where`, and again without.

    sentence: what must be said.  -> the number of accesses, of runs that resumed, of accesses whose failure was harmless
    """
    whole, encode = prepare(text, VOCAB, tmp_path / "whole"), Tokenizer.encode_batch
    accesses, resumed, harmless, batches, disk = 0, 0, 0, [], None
    while disk is None or disk.count >= accesses:
        accesses += 1
        cache, encoded = tmp_path / "cache", []
        shutil.rmtree(cache, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, where, accesses, *fault)
            try:
                prepare(text, VOCAB, cache)
            except UserError as error:
                assert re.search(sentence, str(error)) and "\n" not in str(error), accesses
                assert os.strerror(fault[0]) in str(error), accesses
            else:  # a folder that already exists, or a stamp, which only saves time
                harmless += disk.count >= accesses
        with pytest.MonkeyPatch.context() as patch:
            count = lambda *a, into=encoded: into.append(1) or encode(*a)
            patch.setattr(Tokenizer, "encode_batch", count)
            again = prepare(text, VOCAB, cache)
        batches.append(len(encoded))
        resumed += 0 < len(encoded) < max(batches)
        assert entries(cache) == [again.folder.name], accesses
        assert snapshot(again.folder) == snapshot(whole.folder), accesses
    return accesses - 1, resumed, harmless


@pytest.mark.parametrize(
    "code, stays",
    [
        (errno.ENOSPC, True),
        pytest.param(errno.EDQUOT, False, marks=only_slow),
        (errno.EIO, False),
    ],
)
def test_a_failure_of_any_write(tiny, tiny_text, tmp_path, code, stays):
    """Literally every one fails once. One sentence; the next run continues and ends with the same bits."""
    sentence = r"cannot be written \(.*make room"
    fault = code, "write", stays
    n, resumed, harmless = fail_everywhere(
        tiny_text, tmp_path, tmp_path / "cache", sentence, *fault
    )
    # stamps, which only save time, are written if the text was settled: on a slow machine
    assert n >= 40 and resumed >= 15 and harmless <= 8, (n, resumed, harmless)


@pytest.mark.parametrize("where", ["text", "cache"])
def test_a_failure_of_any_read(tiny, tiny_text, tmp_path, where):
    """Literally every open and every read fails once."""
    sentence = r"cannot be (read|written) \("
    fault = errno.EIO, "read"
    n, resumed, harmless = fail_everywhere(tiny_text, tmp_path, tmp_path / where, sentence, *fault)
    # reads without which a run goes on: 4 with Python 3.11, 6 with 3.12
    assert n >= 60 and resumed >= 10 and harmless <= 8, (n, resumed, harmless)


# ----------------------------------------------------------------------------- what is not read again
class Reads:
    """The files that digest() and the reader of texts have opened."""

    def __init__(self, monkeypatch):
        self.files = []
        for owner in (files, compressed):
            monkeypatch.setattr(owner, "open", self.open, raising=False)

    def open(self, path, *args, **more):
        self.files.append(Path(path).name)
        return open(path, *args, **more)

    def of(self, call):
        self.files = []
        call()
        return sorted(set(self.files))


@pytest.fixture
def settled(monkeypatch):
    """As if all files had been left alone for a while before they were read."""
    monkeypatch.setattr(stamps, "GRANULARITY", -10)
    monkeypatch.setattr(data, "ALWAYS_READ", 1000)


def test_an_unchanged_text_is_not_read_again(settled, tmp_path, monkeypatch):
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text(some_text(0, 5000), encoding="utf-8")
    first = prepare(text, VOCAB, cache)
    reads = Reads(monkeypatch)
    again = lambda **more: prepare(text, VOCAB, cache, **more)
    small = sorted(path.name for path in first.folder.iterdir() if path.stat().st_size <= 1000)
    assert small and "train_000000.bin" not in small
    assert reads.of(again) == [name for name in small if name != tokenizing.STATE]
    found = again()
    assert (found.files, found.skipped, found.bytes) == (1, 0, first.bytes)
    assert {"a.txt", "train_000000.bin", "tokenizer.json"} <= {*reads.of(lambda: again(verify=True))}  # fmt: skip
    assert "a.txt" not in reads.of(again)
    os.utime(text)
    assert "a.txt" in reads.of(again) and "a.txt" not in reads.of(again)
    (tmp_path / "b.txt").write_text("more")
    assert "a.txt" in reads.of(lambda: prepare(tmp_path / "a.txt", VOCAB + 1, cache))


def changed(path, restore_time):
    about = path.stat()
    raw = path.read_bytes()
    path.write_bytes(raw[:2000] + bytes([raw[2000] ^ 1]) + raw[2001:])
    if restore_time:
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.parametrize("restore_time", [False, True])
def test_changes_are_seen_without_reading(settled, tmp_path, restore_time):
    """Also if the time of the last modification is restored."""
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("abc " * 2000, encoding="utf-8")
    first = prepare(text, VOCAB, cache)
    good = snapshot(first.folder)
    time.sleep(0.02)  # the clock of file times ticks every few milliseconds
    changed(first.train[0], restore_time)
    prepare(text, VOCAB, cache)
    assert snapshot(first.folder) == good
    changed(text, restore_time)
    assert prepare(text, VOCAB, cache).sha256 != first.sha256


def test_a_disk_that_changes_a_bit_by_itself(settled, tmp_path, monkeypatch):
    """Without a change of any time, only verify finds it."""
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("abc " * 2000, encoding="utf-8")
    first = prepare(text, VOCAB, cache)
    good, stamp = snapshot(first.folder), stamps.stamp
    times = {path: stamp(path) for path in (text, *first.folder.iterdir())}
    for module in (stamps, documents):
        monkeypatch.setattr(module, "stamp", lambda path: times.get(path) or stamp(path))
    changed(first.train[0], False)
    prepare(text, VOCAB, cache)
    assert snapshot(first.folder) != good
    prepare(text, VOCAB, cache, verify=True)
    assert snapshot(first.folder) == good
    changed(text, False)
    assert prepare(text, VOCAB, cache).sha256 == first.sha256
    assert prepare(text, VOCAB, cache, verify=True).sha256 != first.sha256


def test_files_that_have_just_been_written_are_read_again(tmp_path, monkeypatch):
    """A later change might have the same time."""
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("abc " * 2000, encoding="utf-8")
    prepare(text, VOCAB, cache)
    assert "a.txt" in Reads(monkeypatch).of(lambda: prepare(text, VOCAB, cache))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"identity": 1}', b"\xff"])
def test_damaged_stamps_are_not_used(settled, tmp_path, content):
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("abc " * 2000, encoding="utf-8")
    first = prepare(text, VOCAB, cache)
    for path in (cache / stamps.FOLDER).iterdir():
        path.write_bytes(content)
    assert prepare(text, VOCAB, cache).train == first.train


def test_a_cache_that_is_only_readable(settled, corpus, text_folder, tmp_path, monkeypatch):
    shutil.copytree(corpus.folder, tmp_path / corpus.folder.name)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(stamps, "write_whole", refuse)
    assert prepare(text_folder, VOCAB, tmp_path).sha256 == corpus.sha256


# ----------------------------------------------------------------------------- what the files hold
@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("aé \n。", min_size=1, max_size=60), min_size=2, max_size=8),
    n=st.integers(1, 30),
    batch=st.integers(1, 50),
    shard=st.integers(1, 40),
)
def test_tokens_and_bigrams_are_those_of_the_documents(corpus, tmp_path_factory, texts, n, batch, shard):  # fmt: skip
    """However the documents arrive, and however they are batched."""
    tok, folder = corpus.tokenizer, Path(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()))
    found = documents.survey(in_parts(texts))
    expected = {False: [], True: []}
    raws = {False: [], True: []}
    for part in documents.split(in_parts(texts), found):
        expected[part.held_out] += [*tok.encode(part.text), tok.eot_id]
        raws[part.held_out].append(part.raw)
    if not raws[False]:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "ENCODE_BATCH", batch)
        patch.setattr(tokenizing, "SHARD_TOKENS", shard)
        patch.setattr(tokenizing, "COMMIT", 1)
        patch.setattr(pieces, "PIECE", 5)
        with tokenizing.Tokenizing(folder, tok, None, lambda *_: None) as work:
            work(list(in_parts(texts, n)), found)
    state = tokenizing.read_state(folder)
    for held_out, name in ((False, "train"), (True, "val")):
        shards = [read_shard(folder / file) for file in state[name]]
        assert all(len(tokens) == shard for tokens in shards[:-1])
        assert np.concatenate(shards).tolist() == expected[held_out]
    count = lambda documents: sum(bigram.count_bigrams(raw, [0]) for raw in documents)
    both = [count(raws[side]) for side in (False, True)]
    assert state["bigram_bpb"] == bigram.bigram_bpb(*both)


def test_given_tokenizer(corpus, text_folder, tmp_path):
    other = prepare(text_folder, VOCAB, tmp_path, tokenizer=corpus.folder / "tokenizer.json")
    assert other.tokenizer.sha256 == corpus.tokenizer.sha256
    assert other.train[0].read_bytes() == corpus.train[0].read_bytes()
    corpus.tokenizer.save(tmp_path / "mine")  # the same tokens, with a chat template
    (tmp_path / "mine" / "chat_template.jinja").write_text("{{ messages }}")
    again = prepare(text_folder, VOCAB, tmp_path, tokenizer=tmp_path / "mine")
    again.tokenizer.save(tmp_path / "saved")
    assert again.folder == other.folder and (tmp_path / "saved" / "chat_template.jinja").is_file()
    with pytest.raises(UserError, match="there is no tokenizer at"):
        prepare(text_folder, VOCAB, tmp_path, tokenizer=tmp_path / "nothing")


def test_many_shards(text_folder, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(tokenizing, "ENCODE_BATCH", 5000)
    many = prepare(text_folder, VOCAB, tmp_path)
    assert len(many.train) > 3 and many.train_tokens == corpus.train_tokens
    ids = np.concatenate([read_shard(path) for path in many.train])
    np.testing.assert_array_equal(ids, read_shard(corpus.train[0]))


def test_sample_is_spread_over_the_text(monkeypatch):
    monkeypatch.setattr(data, "SAMPLE_BYTES", 20_000)
    monkeypatch.setattr(data, "SAMPLE_CHUNK", 100)
    texts = [f"{i:06d}\n" * 1000 for i in range(40)]
    sample = list(data._sample(list(in_parts(texts)), documents.survey(in_parts(texts))))
    assert sum(map(len, sample)) == pytest.approx(20_000 * 0.9, rel=0.1)
    assert len({chunk[:6] for chunk in sample}) == 36


def test_progress_rises_to_one(text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "ENCODE_BATCH", 5000)
    seen = []
    told = []
    progress = lambda fraction, text: (seen.append(fraction), told.append(text))
    prepare(text_folder, VOCAB, tmp_path, progress=progress)
    assert seen[0] == 0 and seen[-1] == 1 and seen == sorted(seen) and len(seen) > 5
    assert any(re.fullmatch(r"tokenizing, \d+\.\d MB/s", text) for text in told)


@pytest.mark.parametrize(
    "files, sentence",
    [
        ({}, "has no text: give other --data"),
        ({"a.txt": b""}, "has no text"),
        (
            {"a.png": b"\0", "b.png": b"\xff"},
            "has no text: give other --data (2 files are left out; ",
        ),
        ({"a.txt": b"a"}, "the text has 1 bytes, too few to hold some out"),
        ({"a.txt": "é".encode()}, "the text has 2 bytes, too few to hold some out"),
    ],
)
def test_bad_text(tmp_path, files, sentence):
    (tmp_path / "text").mkdir()
    for name, content in files.items():
        (tmp_path / "text" / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "text", VOCAB, tmp_path / "cache")
    assert sentence in str(error.value)
    assert not (tmp_path / "cache").exists() or entries(tmp_path / "cache") == []


def test_cache_that_cannot_be_written(text_folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the cache folder .* cannot be written .*XTRAIN_CACHE"):
        prepare(text_folder, VOCAB, tmp_path / "file")


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("XTRAIN_CACHE", "here")
    monkeypatch.setenv("XDG_CACHE_HOME", "there")
    assert data.cache_folder() == Path("here")
    monkeypatch.delenv("XTRAIN_CACHE")
    assert data.cache_folder() == Path("there", "xtrain")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.cache_folder() == Path(os.path.expanduser("~"), ".cache", "xtrain")


def test_corpus_batches(corpus):
    ids, targets = corpus.loader(4, 32, seed=1).next_batch()
    assert ids.shape == (4, 32) and max(ids.max(), targets.max()) < corpus.vocab_size
    first, second = corpus.val_batches(2, 3, 16), corpus.val_batches(2, 3, 16)
    np.testing.assert_array_equal(first, second)
    assert isinstance(corpus.tokenizer, Tokenizer)
