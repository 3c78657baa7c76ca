"""Token shards: the bytes of llm.c, and every kind of damage."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_shards import shard

from xtrain.data.shards import ShardWriter, read_shard
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
    assert read_shard(path).tolist() == tokens
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
    ],
)
def test_bad_shard(tmp_path, damage, sentence):
    path = shard(tmp_path, [1, 2, 3])
    damage(path)
    with pytest.raises(UserError) as error:
        read_shard(path)
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


@pytest.mark.parametrize(
    "tokens, vocab_size, sentence",
    [
        ([1, 70_000], 65_536, "cannot hold the id 70000, the vocabulary has 65536 tokens"),
        ([65_536], 65_536, "cannot hold the id 65536"),
        ([1, 300], 300, "cannot hold the id 300"),
        ([1, -1], 300, "cannot hold the id -1"),
        ([1, 1 << 32], 1 << 40, "cannot hold the id 4294967296"),
        ([1.5], 300, "cannot hold an array of float64 of shape (1,)"),
        ([[1, 2]], 300, "cannot hold an array of int64 of shape (1, 2)"),
        ([True], 300, "cannot hold an array of bool"),
        (np.array([], np.int64), 300, "cannot hold 0 tokens"),
    ],
)
def test_tokens_that_a_shard_cannot_hold(tmp_path, tokens, vocab_size, sentence):
    """They would wrap around to other tokens."""
    with pytest.raises(UserError) as error:
        shard(tmp_path, tokens, vocab_size)
    assert sentence in str(error.value) and "a.bin cannot" in str(error.value)
    assert os.listdir(tmp_path) == []
    writer = ShardWriter(tmp_path / "b.bin", vocab_size)
    if np.size(tokens):
        with pytest.raises(UserError, match=r"b\.bin cannot hold"):
            writer.append(np.asarray(tokens))
    writer.close()


def test_more_tokens_than_the_header_can_count(tmp_path):
    tokens = np.broadcast_to(np.uint16(1), (1 << 31,))
    with pytest.raises(UserError, match="cannot hold 2147483648 tokens"):
        shard(tmp_path, tokens)


@pytest.mark.parametrize("vocab_size", [300, 100_000])
@pytest.mark.parametrize("sizes", [[3], [1, 2], [2, 0, 1]])
def test_appended_tokens(tmp_path, sizes, vocab_size):
    """In parts, or continued after a kill, the bytes are those of write_shard."""
    expected = shard(tmp_path, [1, 299, 2], vocab_size).read_bytes()
    parts = np.split(np.array([1, 299, 2]), np.cumsum(sizes)[:-1])
    writer = ShardWriter(tmp_path / "b.bin", vocab_size)
    for part in parts:
        writer.append(part)
        writer.sync()
        tokens, digest = writer.tokens, writer.digest
        with open(writer.path, "ab") as file:
            file.write(b"what a killed process wrote later")
        writer.close()
        writer = ShardWriter(tmp_path / "b.bin", vocab_size, resume_at=tokens)
        assert (writer.tokens, writer.digest) == (tokens, digest)
    writer.finish()
    assert (tmp_path / "b.bin").read_bytes() == expected


def test_a_shard_that_lost_its_end(tmp_path):
    path = shard(tmp_path, [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-1])
    writer = ShardWriter(path, 300, resume_at=3)
    assert writer.tokens == 2
    writer.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("n", [1, 2])
def test_a_shard_that_cannot_be_read_at_the_moment(tmp_path, monkeypatch, code, n):
    path = shard(tmp_path, [1, 2, 3])
    opened = []

    def fails(file, *more, **others):
        opened.append(file)
        if str(file) == str(path) and len(opened) == n:
            raise OSError(code, os.strerror(code))
        return real(file, *more, **others)

    real = open
    monkeypatch.setattr("builtins.open", fails)
    with pytest.raises(UserError, match=r"cannot be read \(.*\): fix that, then try again"):
        read_shard(path)
