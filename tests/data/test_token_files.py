"""Tokens in .bin files, as llm.c and nanoGPT write them."""

import math
import pickle

import numpy as np
import pytest

from xtrain.data import stamps, token_files
from xtrain.data.dataset import prepare
from xtrain.data.shards import read_shard
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError

V = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train(["the cat sat on the mat and the dog ran away " * 50], V).save(folder)
    return folder


def llm_c(path, tokens, magic=20240520, version=1, dtype="<u2"):
    """As llm.c's dev/data/data_common.py writes it: 256 int32, then the tokens."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens).astype(dtype).tobytes())


def nano_gpt(path, tokens):
    """As nanoGPT's prepare.py writes it."""
    np.array(tokens, dtype=np.uint16).tofile(path)


def some_tokens(tokenizer, n, seed=0):
    ids = np.random.default_rng(seed).integers(0, Tokenizer.load(tokenizer).vocab_size, n)
    ids[::100] = Tokenizer.load(tokenizer).eot_id
    return ids


@pytest.mark.parametrize("write", [llm_c, nano_gpt])
def test_training_and_validation_files(tmp_path, tokenizer, write):
    known = Tokenizer.load(tokenizer)
    parts = [some_tokens(tokenizer, n, n) for n in (700, 300, 400)]
    for name, tokens in zip(("fine_train_000001.bin", "fine_train_000002.bin", "fine_val_000000.bin"), parts):  # fmt: skip
        write(tmp_path / name, tokens)
    corpus = prepare(str(tmp_path / "*.bin"), cache_dir=tmp_path / "cache", tokenizer=tokenizer)
    for spans, expected in ((corpus.train, parts[:2]), (corpus.val, parts[2:])):
        for span, tokens in zip(spans, expected, strict=True):
            np.testing.assert_array_equal(read_shard(span), tokens)
    every = np.concatenate(parts)
    text = b"".join(known.token_bytes[i] for i in every if i != known.eot_id)
    assert (corpus.files, corpus.split, corpus.bigram_bpb) == (3, "files", None)
    assert (corpus.train_tokens, corpus.val_tokens) == (1000, 400)
    assert corpus.bytes == len(text) == corpus.train_bytes + corpus.val_bytes
    assert corpus.documents == np.count_nonzero(every == known.eot_id)
    ids, targets = corpus.loader(2, 16).next_batch()
    assert ids.shape == targets.shape == (2, 16) and (ids[:, 1:] == targets[:, :-1]).all()
    ((ids, targets),) = corpus.val_batches(1, 2, 16)
    np.testing.assert_array_equal(ids[0], parts[2][:16])
    nats = 100.0
    bytes_of_targets = sum(len(known.token_bytes[i]) for i in targets.flat if i != known.eot_id)
    assert corpus.bits_per_byte(nats, targets) == nats / math.log(2) / bytes_of_targets


def test_wide_tokens(tmp_path, tokenizer):
    """llm.c's shards for Llama 3."""
    tokens = some_tokens(tokenizer, 500)
    llm_c(tmp_path / "a_train.bin", tokens, 20240801, 7, "<u4")
    corpus = prepare(tmp_path / "a_train.bin", cache_dir=tmp_path / "cache", tokenizer=tokenizer)
    np.testing.assert_array_equal(read_shard(corpus.train[0]), tokens[:450])


def test_the_end_is_held_out_without_a_validation_file(tmp_path, tokenizer, monkeypatch):
    read = lambda spans: np.concatenate([read_shard(span) for span in spans])
    first, last = some_tokens(tokenizer, 900, 1), some_tokens(tokenizer, 100, 2)
    nano_gpt(tmp_path / "1.bin", first)
    nano_gpt(tmp_path / "2.bin", last)
    corpus = prepare(tmp_path / "1.bin", cache_dir=tmp_path / "c", tokenizer=tokenizer)
    np.testing.assert_array_equal(read(corpus.train), first[:810])
    np.testing.assert_array_equal(read(corpus.val), first[810:])
    both = [tmp_path / "1.bin", tmp_path / "2.bin"]
    corpus = prepare(both, cache_dir=tmp_path / "c", tokenizer=tokenizer)
    np.testing.assert_array_equal(read(corpus.train), first)  # the last file is just long enough
    np.testing.assert_array_equal(read(corpus.val), last)
    nano_gpt(tmp_path / "val.bin", first)  # alone, it is trained on
    corpus = prepare(tmp_path / "val.bin", cache_dir=tmp_path / "c", tokenizer=tokenizer)
    np.testing.assert_array_equal(read(corpus.train), first[:810])
    monkeypatch.setattr(token_files, "VAL_TOKENS", 30)
    corpus = prepare(both, cache_dir=tmp_path / "c", tokenizer=tokenizer)
    np.testing.assert_array_equal(read(corpus.train), np.concatenate([first, last[:70]]))
    np.testing.assert_array_equal(read(corpus.val), last[70:])


def test_a_folder_of_shards(tmp_path, tokenizer):
    """A folder with nothing else is read as tokens; with text in it, as text."""
    (tmp_path / "data").mkdir()
    llm_c(tmp_path / "data/a_train_0.bin", some_tokens(tokenizer, 500))
    llm_c(tmp_path / "data/a_val_0.bin", some_tokens(tokenizer, 100))
    assert prepare(tmp_path / "data", cache_dir=tmp_path / "c", tokenizer=tokenizer).val_tokens == 100  # fmt: skip
    (tmp_path / "data/readme.md").write_text("some text " * 100)
    corpus = prepare(tmp_path / "data", cache_dir=tmp_path / "c", tokenizer=tokenizer)
    assert corpus.bytes == 1000 and [x.split(" is ")[0] for x in corpus.left_out] == [
        str(tmp_path / "data" / name) for name in ("a_train_0.bin", "a_val_0.bin")
    ]


def wrong_size(path, tokens):
    llm_c(path, tokens)
    path.write_bytes(path.read_bytes()[:-2])


BAD = {
    "the end is missing": (wrong_size, "has 2022 bytes, 500 tokens need 2024: copy or write it again"),
    "another version": (lambda p, t: llm_c(p, t, version=2), "is a token shard of unknown version 2"),
    "a model of llm.c": (lambda p, t: llm_c(p, t, 20240326, 3), "is a file of llm.c with the magic number 20240326, which holds no tokens"),
    "a model of PyTorch": (lambda p, t: p.write_bytes(b"PK\3\4" + bytes(96)), "is a file of PyTorch, which holds no tokens"),
    "an odd number of bytes": (lambda p, t: p.write_bytes(b"abc"), "has 3 bytes: without llm.c's header it must be tokens of two bytes"),
    "empty": (lambda p, t: p.write_bytes(b""), "has 0 bytes"),
    "another tokenizer": (lambda p, t: nano_gpt(p, [*t, 50256]), "has the id 50256, the tokenizer has"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file(tmp_path, tokenizer, what):
    """Alone it ends the command; among others it is left out, unless strict."""
    make, sentence = BAD[what]
    make(tmp_path / "bad.bin", some_tokens(tokenizer, 500))
    cache = {"cache_dir": tmp_path / "cache", "tokenizer": tokenizer}
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "bad.bin", **cache)
    assert str(error.value).startswith(f"{tmp_path / 'bad.bin'} {sentence}")
    nano_gpt(tmp_path / "good.bin", some_tokens(tokenizer, 500))
    corpus = prepare([tmp_path / "bad.bin", tmp_path / "good.bin"], **cache)
    assert corpus.left_out == (str(error.value),) and corpus.train_tokens == 450
    with pytest.raises(UserError) as strict:
        prepare([tmp_path / "bad.bin", tmp_path / "good.bin"], **cache, strict=True)
    assert str(strict.value) == f"{error.value}; without --strict-data it is left out"


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle was read')",)


def test_a_pickle_is_not_read(tmp_path, tokenizer):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    nano_gpt(tmp_path / "train.bin", some_tokens(tokenizer, 500))
    nano_gpt(tmp_path / "val.bin", some_tokens(tokenizer, 100))
    corpus = prepare(str(tmp_path / "*"), cache_dir=tmp_path.parent / "c", tokenizer=tokenizer)
    assert (corpus.train_tokens, corpus.val_tokens) == (500, 100)
    (reason,) = corpus.left_out
    assert "meta.pkl is a pickle, which can run any program: it is not read" in reason


def test_what_must_be_given(tmp_path, tokenizer):
    nano_gpt(tmp_path / "train.bin", [1, 2, 3])
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "train.bin", cache_dir=tmp_path / "c")
    assert "train.bin holds tokens, not text: give the tokenizer that made them with --tokenizer FOLDER" in str(error.value)  # fmt: skip
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"train\.bin holds tokens, .*a\.txt does not: give either"):
        prepare([tmp_path / "a.txt", tmp_path / "train.bin"], tokenizer=tokenizer)
    nano_gpt(tmp_path / "one.bin", [1])
    with pytest.raises(UserError, match="has 1 tokens, too few to hold some out"):
        prepare(tmp_path / "one.bin", cache_dir=tmp_path / "c", tokenizer=tokenizer)


def test_changes_are_seen_and_the_rest_is_not_read_again(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(stamps, "GRANULARITY", -10)
    names, read = ["a_train_0.bin", "a_train_1.bin", "a_val_0.bin"], []
    for i, name in enumerate(names):
        llm_c(tmp_path / name, some_tokens(tokenizer, 500, i))
    again = lambda **more: prepare(str(tmp_path / "*.bin"), cache_dir=tmp_path / "c", tokenizer=tokenizer, **more)  # fmt: skip
    first, whole = again(), token_files.TokenFiles._read
    monkeypatch.setattr(token_files.TokenFiles, "_read", lambda self, span: read.append(span.path.name) or whole(self, span))  # fmt: skip
    assert again().sha256 == first.sha256 and read == []
    assert again(verify=True).sha256 == first.sha256 and read == names
    tokens = some_tokens(tokenizer, 500, 1)
    tokens[7] ^= 1
    llm_c(tmp_path / names[1], tokens)
    read.clear()
    assert again().sha256 != first.sha256 and read == [names[1]]


def test_the_hash_knows_which_tokens_are_held_out(tmp_path, tokenizer):
    a, b = some_tokens(tokenizer, 500, 1), some_tokens(tokenizer, 500, 2)
    found = set()
    for names in (("train.bin", "val.bin"), ("val.bin", "train.bin"), ("1.bin", "2.bin")):
        folder = tmp_path / names[0]
        folder.mkdir()
        nano_gpt(folder / names[0], a)
        nano_gpt(folder / names[1], b)
        found.add(prepare(folder, cache_dir=tmp_path / "c", tokenizer=tokenizer).sha256)
    assert len(found) == 3
