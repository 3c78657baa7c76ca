"""prepare(): the cached corpus of a text, also after interruptions and damage."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from xtrain import files
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
        ids = np.concatenate([read_shard(path, corpus.vocab_size) for path in shards])
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
    monkeypatch.setattr(data, "_build", None)  # a second call must not need it
    assert prepare(text, VOCAB, cache).folder == first.folder
    monkeypatch.undo()
    assert prepare(text, VOCAB + 1, cache).folder != first.folder
    text.write_text(some_text(1, 1000), encoding="utf-8")
    second = prepare(text, VOCAB, cache)
    assert second.sha256 != first.sha256 and second.folder != first.folder
    assert len(os.listdir(cache)) == 3


@pytest.mark.parametrize(
    "name", ["corpus.json", "tokenizer.json", "train_000000.bin", "val_000000.bin"]
)
@pytest.mark.parametrize(
    "damage",
    [
        lambda f: f.unlink(),
        lambda f: f.write_bytes(f.read_bytes()[:-5]),
        lambda f: f.write_bytes(f.read_bytes()[:-5] + b"12345"),
        lambda f: f.write_bytes(b"[]"),
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
    """Immediately: a running process holds a lock on its folder."""
    for name in ("dead", "alive"):
        (tmp_path / f".tmp-{name}").mkdir()
    with files.locked(tmp_path / ".tmp-alive"):
        folder = prepare(text_folder, VOCAB, tmp_path).folder
    assert sorted(os.listdir(tmp_path)) == [".tmp-alive", folder.name]


def test_leftovers_where_nothing_can_be_locked(text_folder, tmp_path, monkeypatch):
    """Then the age of the folder decides."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    for name, age in (("old", 2 * files.STRAY_SECONDS), ("new", 0)):
        (tmp_path / f".tmp-{name}").mkdir()
        os.utime(tmp_path / f".tmp-{name}", (time.time() - age,) * 2)
    folder = prepare(text_folder, VOCAB, tmp_path).folder
    assert sorted(os.listdir(tmp_path)) == [".tmp-new", folder.name]


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


KILLED = """
import sys, threading
from xtrain import files
from xtrain.data import dataset as data
data.ENCODE_BATCH, data.SHARD_TOKENS = 20_000, 5_000
def hold(fraction, text):
    if fraction > float(sys.argv[3]):
        print("here", flush=True)
        threading.Event().wait()
data.prepare(sys.argv[1], int(sys.argv[2]), sys.argv[4], progress=hold)
"""


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.6])
def test_killed_while_tokenizing(corpus, text_folder, tmp_path, fraction):
    """SIGKILL while the tokenizer is trained, after the first shards, and later: the next run starts cleanly."""
    arguments = [sys.executable, "-c", KILLED, text_folder, VOCAB, fraction, tmp_path]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen([str(a) for a in arguments], cwd=root, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"here\n"
    process.kill()
    process.communicate()
    assert [name[:5] for name in os.listdir(tmp_path)] == [".tmp-"]
    again = prepare(text_folder, VOCAB, tmp_path)
    assert os.listdir(tmp_path) == [again.folder.name]
    assert snapshot(again.folder) == snapshot(corpus.folder)


def test_two_processes_at_once(corpus, text_folder, tmp_path):
    arguments = f"{str(text_folder)!r}, {VOCAB}, {str(tmp_path)!r}"
    code = f"from xtrain.data.dataset import prepare; prepare({arguments})"
    root = Path(__file__).resolve().parents[2]
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=root) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert os.listdir(tmp_path) == [corpus.folder.name]
    assert snapshot(tmp_path / corpus.folder.name) == snapshot(corpus.folder)


def test_slower_process_uses_the_existing_entry(corpus, text_folder, tmp_path, monkeypatch):
    rename = os.rename

    def another_was_faster(source, target):
        prepare(text_folder, VOCAB, tmp_path)
        rename(source, target)

    def once(source, target):
        monkeypatch.setattr(os, "rename", rename)
        another_was_faster(source, target)

    monkeypatch.setattr(os, "rename", once)
    late = prepare(text_folder, VOCAB, tmp_path)
    assert os.listdir(tmp_path) == [late.folder.name]
    assert snapshot(late.folder) == snapshot(corpus.folder)


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
    monkeypatch.setattr(data, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(data, "ENCODE_BATCH", 5000)
    monkeypatch.setattr(data, "ENCODE_CHUNK", 100_000)
    many = prepare(text_folder, VOCAB, tmp_path)
    assert len(many.train) > 3 and many.train_tokens == corpus.train_tokens
    ids = np.concatenate([read_shard(path) for path in many.train])
    np.testing.assert_array_equal(ids, read_shard(corpus.train[0]))


def test_sample_is_spread_over_the_text(monkeypatch):
    monkeypatch.setattr(data, "SAMPLE_BYTES", 20_000)
    monkeypatch.setattr(data, "SAMPLE_CHUNK", 100)
    texts = [f"{i:06d}\n" * 1000 for i in range(40)]
    sample = list(data._sample(texts, data.survey(texts)))
    assert sum(map(len, sample)) == pytest.approx(20_000 * 0.9, rel=0.1)
    assert len({chunk[:6] for chunk in sample}) == 36


def test_progress_rises_to_one(text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "ENCODE_BATCH", 5000)
    seen = []
    prepare(text_folder, VOCAB, tmp_path, progress=lambda fraction, text: seen.append(fraction))
    assert seen[0] == 0 and seen[-1] == 1 and seen == sorted(seen) and len(seen) > 5


@pytest.mark.parametrize(
    "files, sentence",
    [
        ({}, "has no text (files that are not text: 0)"),
        ({"a.txt": b""}, "has no text"),
        ({"a.png": b"\0", "b.png": b"\xff"}, "has no text (files that are not text: 2)"),
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
    assert not (tmp_path / "cache").exists() or os.listdir(tmp_path / "cache") == []


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
