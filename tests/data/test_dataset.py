"""Shards, the cache and the batches."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain import files
from xtrain.data import dataset as data
from xtrain.data.dataset import Loader, prepare, read_shard, val_batches, write_shard
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


def shard(folder, tokens, vocab_size=50_000, name="a.bin"):
    write_shard(folder / name, np.asarray(tokens), vocab_size)
    return folder / name


# --- shards ---


@pytest.mark.parametrize(
    "vocab_size, magic, version, dtype",
    [(50257, 20240520, 1, "<u2"), (65536, 20240520, 1, "<u2"), (65537, 20240801, 7, "<u4")],
)
def test_shard_bytes_are_those_of_llm_c(tmp_path, vocab_size, magic, version, dtype):
    tokens = [1, 2, vocab_size - 1]
    path = shard(tmp_path, tokens, vocab_size)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, 3
    assert path.read_bytes() == header.tobytes() + np.array(tokens, dtype).tobytes()
    assert read_shard(path, vocab_size).tolist() == tokens
    assert isinstance(read_shard(path), np.memmap)
    assert os.listdir(tmp_path) == ["a.bin"]


def damaged(path, at, value):
    words = np.frombuffer(path.read_bytes()[:1024], "<i4").copy()
    words[at] = value
    path.write_bytes(words.tobytes() + path.read_bytes()[1024:])


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_bytes(b""), "too short to be a token shard"),
        (lambda path: damaged(path, 0, 7), "is not a token shard (magic number 7)"),
        (lambda path: damaged(path, 1, 2), "unknown version 2"),
        (lambda path: damaged(path, 2, 0), "0 tokens need"),
        (lambda path: damaged(path, 2, -1), "-1 tokens need"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            "has 1029 bytes, 3 tokens need 1030",
        ),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 1031 bytes"),
        (lambda path: shard(path.parent, [1, 10, 2]), "has the id 10, the tokenizer has 10 tokens"),
    ],
)
def test_bad_shard(tmp_path, damage, sentence):
    path = shard(tmp_path, [1, 2, 3])
    damage(path)
    with pytest.raises(UserError) as error:
        read_shard(path, 10)
    assert sentence in str(error.value) and str(path) in str(error.value)


@given(st.binary(max_size=1100))
def test_any_bytes_are_a_shard_or_a_user_error(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "fuzz.bin"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"fuzz\.bin"):
        read_shard(path)


def test_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        shard(tmp_path, [1, 2, 3])
    assert os.listdir(tmp_path) == []


# --- prepare ---


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
def test_damaged_cache_is_made_anew(corpus, text_folder, name, damage):
    before = snapshot(corpus.folder)
    damage(corpus.folder / name)
    prepare(text_folder, VOCAB, corpus.folder.parent)
    assert snapshot(corpus.folder) == before


def test_interrupted_tokenising_leaves_nothing(text_folder, tmp_path):
    def interrupt(fraction, text):
        if text == "training the tokenizer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(text_folder, VOCAB, tmp_path, progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_leftovers_of_killed_processes_are_removed(text_folder, tmp_path):
    """At once: a living process holds a lock on its folder."""
    for name in ("dead", "alive"):
        (tmp_path / f".tmp-{name}").mkdir()
    with files.locked(tmp_path / ".tmp-alive"):
        folder = prepare(text_folder, VOCAB, tmp_path).folder
    assert sorted(os.listdir(tmp_path)) == [".tmp-alive", folder.name]


def test_leftovers_where_nothing_can_be_locked(text_folder, tmp_path, monkeypatch):
    """Then age decides."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    for name, age in (("old", 2 * files.STRAY_SECONDS), ("new", 0)):
        (tmp_path / f".tmp-{name}").mkdir()
        os.utime(tmp_path / f".tmp-{name}", (time.time() - age,) * 2)
    folder = prepare(text_folder, VOCAB, tmp_path).folder
    assert sorted(os.listdir(tmp_path)) == [".tmp-new", folder.name]


def test_a_folder_taken_for_a_dead_one(tmp_path, monkeypatch):
    """Another process may find it before it is locked: then there is another."""
    make, made = tempfile.mkdtemp, []

    def taken_at_once(**more):
        made.append(make(**more))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(files.tempfile, "mkdtemp", taken_at_once)
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
def test_killed_while_tokenising(corpus, text_folder, tmp_path, fraction):
    """SIGKILL while the tokenizer is trained, after the first shards, and later: the next one starts cleanly."""
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


def test_slower_process_takes_what_is_there(corpus, text_folder, tmp_path, monkeypatch):
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
    corpus.tokenizer.save(tmp_path / "mine")  # the same tokens, and by now a chat template
    (tmp_path / "mine" / "chat_template.jinja").write_text("{{ messages }}")
    again = prepare(text_folder, VOCAB, tmp_path, tokenizer=tmp_path / "mine")
    again.tokenizer.save(tmp_path / "saved")
    assert again.folder == other.folder and (tmp_path / "saved" / "chat_template.jinja").is_file()
    with pytest.raises(UserError, match="there is no tokenizer at"):
        prepare(text_folder, VOCAB, tmp_path, tokenizer=tmp_path / "nothing")


def test_many_shards(text_folder, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(data, "ENCODE_BATCH", 5000)
    monkeypatch.setattr(data, "ENCODE_PIECE", 100_000)
    parts = prepare(text_folder, VOCAB, tmp_path)
    assert len(parts.train) > 3 and parts.train_tokens == corpus.train_tokens
    ids = np.concatenate([read_shard(path) for path in parts.train])
    np.testing.assert_array_equal(ids, read_shard(corpus.train[0]))


def test_sample_is_spread_over_the_text(monkeypatch):
    monkeypatch.setattr(data, "SAMPLE_BYTES", 20_000)
    monkeypatch.setattr(data, "SAMPLE_PIECE", 100)
    texts = [f"{i:06d}\n" * 1000 for i in range(40)]
    sample = list(data._sample(texts, data.survey(texts)))
    assert sum(map(len, sample)) == pytest.approx(20_000 * 0.9, rel=0.1)
    assert len({piece[:6] for piece in sample}) == 36


def test_progress_rises_to_one(text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "ENCODE_BATCH", 5000)
    seen = []
    prepare(text_folder, VOCAB, tmp_path, progress=lambda fraction, text: seen.append(fraction))
    assert seen[0] == 0 and seen[-1] == 1 and seen == sorted(seen) and len(seen) > 5


@pytest.mark.parametrize(
    "files, sentence",
    [
        ({}, "has no text (files that are no text: 0)"),
        ({"a.txt": b""}, "has no text"),
        ({"a.png": b"\0", "b.png": b"\xff"}, "has no text (files that are no text: 2)"),
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


# --- batches ---


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three shards in which a token says where it is: shard s holds 10000 s + position."""
    folder = tmp_path_factory.mktemp("shards")
    sizes = (100, 37, 5)
    return [shard(folder, 10_000 * s + np.arange(n), name=f"{s}.bin") for s, n in enumerate(sizes)]


SIZES = np.array([100, 37, 5])


@given(T=st.integers(1, 99), B=st.integers(1, 7), seed=st.integers(-5, 5))
def test_windows_are_whole_and_shifted_by_one(shards, T, B, seed):
    loader = Loader(shards, B, T, seed)
    for _ in range(5):
        ids, targets = loader.next_batch()
        assert ids.shape == targets.shape == (B, T) and ids.dtype == targets.dtype == np.int32
        np.testing.assert_array_equal(ids[:, 1:], targets[:, :-1])
        s, position = ids // 10_000, ids % 10_000
        np.testing.assert_array_equal(targets, 10_000 * s + (position + 1) % SIZES[s])


@given(T=st.integers(1, 40), seed=st.integers(0, 5))
def test_epoch_sees_every_window_once(shards, T, seed):
    loader = Loader(shards, 1, T, seed)
    epochs = []
    for _ in range(2):
        ids = np.concatenate([loader.next_batch()[0].ravel() for _ in range(loader.windows)])
        assert len(set(ids)) == len(ids) == T * sum(n // T for n in SIZES if n > T)
        epochs.append(ids.tolist())
    assert loader.epoch == 2
    if loader.windows > 10:
        assert epochs[0] != epochs[1]


def test_every_token_is_seen(shards):
    loader = Loader(shards[:1], 1, 60)  # one window of 60 in 100 tokens
    assert len({i for _ in range(50) for i in loader.next_batch()[0].flat}) == 100


@given(
    T=st.integers(1, 40),
    world=st.integers(1, 4),
    rows=st.integers(1, 3),
    seed=st.integers(0, 3),
)
@settings(max_examples=50)
def test_ranks_together_take_the_batch(shards, T, world, rows, seed):
    B = world * rows
    alone = Loader(shards, B, T, seed)
    ranks = [Loader(shards, B, T, seed, rank, world) for rank in range(world)]
    for _ in range(4):
        ids, targets = alone.next_batch()
        parts = [rank.next_batch() for rank in ranks]
        np.testing.assert_array_equal(ids, np.concatenate([part[0] for part in parts]))
        np.testing.assert_array_equal(targets, np.concatenate([part[1] for part in parts]))
    assert {rank.position for rank in ranks} == {alone.position}


@given(steps=st.integers(0, 60), B=st.integers(1, 5), seed=st.integers(0, 3))
@settings(max_examples=50)
def test_restored_position_gives_the_following_batches(shards, steps, B, seed):
    loader, other = Loader(shards, B, 16, seed), Loader(shards, B, 16, seed)
    for _ in range(steps):
        loader.next_batch()
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    for _ in range(3):
        for mine, theirs in zip(loader.next_batch(), other.next_batch()):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"seed": 1}, "was saved with seed 1, this run has 0"),
        ({"seq_len": 8}, "was saved with seq_len 8, this run has 16"),
        ({"windows": 3}, "was saved with windows 3"),
        ({"position": -1}, "position -1 is no number of sequences"),
        ({"position": "x"}, "position 'x' is no number of sequences"),
    ],
)
def test_state_of_another_run(shards, change, sentence):
    loader = Loader(shards, 2, 16)
    with pytest.raises(UserError) as error:
        loader.load_state_dict(loader.state_dict() | change)
    assert sentence in str(error.value)


def test_bad_loader(shards):
    with pytest.raises(UserError, match="the training text has 100 tokens, a window needs 101"):
        Loader(shards, 1, 100)
    with pytest.raises(UserError, match="--batch 5 is not a multiple of the 2 ranks"):
        Loader(shards, 5, 4, world=2)
    windows = Loader(shards, 1, 4).windows
    Loader(shards, 1000 * windows, 4)
    sentence = rf"--batch {1001 * windows} is 1,001 times the text, which has {windows} windows"
    with pytest.raises(UserError, match=sentence):
        Loader(shards, 1001 * windows, 4)
    with pytest.raises(UserError, match="has the id 99, the tokenizer has 50 tokens"):
        Loader(shards, 1, 4, vocab_size=50)
    with pytest.raises(UserError, match="the validation text has 100 tokens, a window needs 101"):
        val_batches(shards[:1], 1, 1, 100)


@given(n=st.integers(1, 5), B=st.integers(1, 6), T=st.integers(1, 99))
def test_val_batches(shards, n, B, T):
    batches = val_batches(shards[:1], n, B, T)
    ids = np.concatenate([ids for ids, _ in batches])
    assert ids.dtype == np.int32 and len(ids) == min(n * B, 99 // T)
    assert all(len(rows) == B for rows, _ in batches[:-1])
    assert len(set(ids.flat)) == ids.size and ids.ravel().tolist() == sorted(ids.flat)
    for rows, targets in batches:
        np.testing.assert_array_equal(targets, rows + 1)


def test_corpus_batches(corpus):
    ids, targets = corpus.loader(4, 32, seed=1).next_batch()
    assert ids.shape == (4, 32) and max(ids.max(), targets.max()) < corpus.vocab_size
    first, second = corpus.val_batches(2, 3, 16), corpus.val_batches(2, 3, 16)
    np.testing.assert_array_equal(first, second)
    assert isinstance(corpus.tokenizer, Tokenizer)
