"""The byte-bigram model against a loop over the bytes, and at its limits."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.data.bigram import PRIOR, bigram_bpb, count_bigrams


def byte_bigrams(documents):
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    return count_bigrams(b"".join(documents), starts)


def byte_bigram_bpb(train, val):
    return bigram_bpb(byte_bigrams([train]), byte_bigrams([val]))


def bigram_bpb_by_hand(train, val):
    """The model of `bigram_bpb`, one byte at a time."""
    pairs, before = Counter(pairwise(b"\0" + train)), Counter((b"\0" + train)[:-1])
    single, bits = Counter(train), 0.0
    for a, b in pairwise(b"\0" + val):
        unigram = (single[b] + 1) / (len(train) + 256)
        bits -= math.log2((pairs[a, b] + PRIOR * unigram) / (before[a] + PRIOR))
    return bits / len(val)


@given(st.binary(min_size=1), st.binary(min_size=1))
def test_bigram_against_a_loop(train, val):
    assert byte_bigram_bpb(train, val) == pytest.approx(bigram_bpb_by_hand(train, val), rel=1e-12)


@given(st.lists(st.binary(), min_size=1, max_size=5))
def test_bigrams_of_documents_add_up(documents):
    total = sum(byte_bigrams([raw]) for raw in documents)
    np.testing.assert_array_equal(byte_bigrams(documents), total)
    assert total.sum() == sum(map(len, documents))


@given(st.binary(min_size=1, max_size=20), st.integers(0, 20))
def test_the_rest_of_a_document(raw, n):
    before, rest = raw[:n], raw[n:]
    both = byte_bigrams([before]) + count_bigrams(rest, [], before[-1] if before else 0)
    np.testing.assert_array_equal(both, byte_bigrams([raw]))


def test_bigram_limits():
    rng = np.random.default_rng(0)
    noise = rng.integers(256, size=1_000_000, dtype=np.uint8).tobytes()
    assert byte_bigram_bpb(noise, noise[:1000]) == pytest.approx(8, abs=0.1)
    assert byte_bigram_bpb(b"ab" * 10_000, b"ab" * 100) < 0.01
    assert byte_bigram_bpb(b"ab" * 10_000, b"zz") > 8  # never seen, still finite
