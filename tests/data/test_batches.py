"""Batches: every window once an epoch, the same for any number of ranks, resumable."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_shards import shard

from xtrain.data.batches import Loader, val_batches
from xtrain.errors import UserError


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three shards whose tokens give their own place: token p of shard s is 10000 s + p."""
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
def test_ranks_together_read_the_batch(shards, T, world, rows, seed):
    B = world * rows
    alone = Loader(shards, B, T, seed)
    ranks = [Loader(shards, B, T, seed, rank, world) for rank in range(world)]
    for _ in range(4):
        ids, targets = alone.next_batch()
        batches = [rank.next_batch() for rank in ranks]
        np.testing.assert_array_equal(ids, np.concatenate([batch[0] for batch in batches]))
        np.testing.assert_array_equal(targets, np.concatenate([batch[1] for batch in batches]))
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
        ({"position": -1}, "position -1 is not a number of sequences"),
        ({"position": "x"}, "position 'x' is not a number of sequences"),
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
