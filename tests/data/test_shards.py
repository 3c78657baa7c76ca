"""Token shards: the bytes of llm.c, and every kind of damage."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_shards import shard

from xtrain.data.shards import read_shard
from xtrain.errors import UserError


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
