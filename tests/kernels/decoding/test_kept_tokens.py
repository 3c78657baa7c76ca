"""kept_tokens.py: the kernels equal the references, which equal the definition of sampling and float64."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from checks import GPU, normal, sentinels, to_host, to_kernel, with_planted_bug
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.decoding import kept_tokens as module
from xtrain.kernels.decoding import sampling
from xtrain.kernels.decoding.kept_tokens import kept_tokens, sampled_logits
from xtrain.kernels.decoding.sampling import Sampling, kept_ref, last_kept
from xtrain.kernels.decoding.sampling_search import Sizes
from xtrain.simulator import sim

BF16 = ml_dtypes.bfloat16
SMALL = Sizes(threads=32, batch=2, keys=32, room=128, sorters=32, blocks=16)
RULES = dict(  # every kind of row in one launch
    temperature=[0.0, 1.0, 0.5, 1.5, 1.0, 2.0, 1.0, 1.0, 0.05],
    top_k=[0, 1, 20, 0, 3, 32, 0, 0, 0],
    top_p=[1.0, 1.0, 0.7, 0.9, 1.0, 0.95, 1.0, 0.3, 1.0],
    min_p=[0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.2, 0.0, 0.0],
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """As in test_sampling.py: several blocks a row, short lists."""
    if not GPU:
        monkeypatch.setattr(sampling, "SIZES", SMALL)
        monkeypatch.setattr(sampling, "MAX_TOP_K", SMALL.keys)


def columns(rules, B):
    dtypes = (np.float32, np.int32, np.float32, np.float32)
    return [np.array(np.resize(x, B), t) for x, t in zip(rules.values(), dtypes)]


def bits(masks, vocab):
    return np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)


def both(logits, rules, tokens=-100, vocab=None, put=to_kernel):
    """-> kept (B, vocab) bool, the logits afterwards"""
    B, V = logits.shape
    vocab = vocab or V
    x = put(logits.copy())
    cols = [put(c) for c in columns(rules, B)]
    masks = kept_tokens(x, put(np.full(B, tokens, np.int32)), *cols, vocab)
    sampled_logits(x, cols[0], masks, vocab)
    return bits(to_host(masks), vocab), to_host(x)


# ----------------------------------------------------------------------------- the references
def test_the_kept_tokens_are_those_that_sampling_can_draw():
    logits = normal(1, 9, 200, scale=3.0)
    logits[:, 50:60] = logits[:, :1]  # ties
    kept, x = both(logits, RULES, put=np.array)
    for b, (t, *rules) in enumerate(zip(*columns(RULES, 9))):
        t = float(t)
        if t == 0:
            want = {int(logits[b].argmax())}
        elif b == 8:
            want = set(range(200))  # no rule: also tokens that sampling gives the weight 0
        else:
            ids, w = kept_ref(logits[b], t, *rules)
            want = set(ids[w > 0].tolist())
        assert set(np.flatnonzero(kept[b]).tolist()) == want
        scaled = logits[b] * (np.float32(1) / np.float32(t) if t else np.float32(1))
        assert np.array_equal(x[b], np.where(kept[b], scaled, np.float32(-np.inf)))


def test_the_drawn_token_is_kept():
    kept, _ = both(normal(1, 9, 200, scale=3.0), RULES, tokens=77, put=np.array)
    assert kept[:, 77].all()


# ----------------------------------------------------------------------------- the kernels
@pytest.mark.parametrize("V, dtype", [(5, np.float32), (130, BF16), (151936 if GPU else 230, np.float32)])  # fmt: skip
def test_kernels_equal_the_references(V, dtype):
    for scale in (3.0, 0.01):  # 0.01: no list of keys is short enough to sort
        logits = normal(V, 9, V, scale=scale).astype(dtype)
        found = both(logits, RULES, tokens=V // 2)
        want = both(logits, RULES, tokens=V // 2, put=np.array)
        for a, b in zip(found, want):
            np.testing.assert_array_equal(a, b)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_row(data):
    V = data.draw(st.integers(1, 150))
    value = st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, -0.0, -np.inf, np.inf, np.nan]))  # fmt: skip
    logits = np.array([data.draw(st.lists(value, min_size=V, max_size=V))], np.float32)
    rules = dict(
        temperature=data.draw(st.sampled_from([0.0, 0.1, 1.0, 3.0])),
        top_k=data.draw(st.integers(0, 32)),
        top_p=data.draw(st.sampled_from([0.05, 0.5, 0.99, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0])),
    )
    found, want = both(logits, rules), both(logits, rules, put=np.array)
    for a, b in zip(found, want):
        np.testing.assert_array_equal(a, b)


def test_the_division_into_blocks_does_not_matter(monkeypatch):
    logits = normal(9, 9, 151936 if GPU else 150)
    want = both(logits, RULES, put=np.array)[0]
    for changed in (dict(blocks=1), dict(blocks=64, batch=1)):
        monkeypatch.setattr(sampling, "SIZES", replace(sampling.SIZES, **changed))
        np.testing.assert_array_equal(both(logits, RULES)[0], want)


def test_padding_columns_and_what_follows_are_left_alone(monkeypatch):
    logits = normal(4, 9, 100)
    with sentinels(monkeypatch):
        x = to_kernel(logits.copy())
        cols = [to_kernel(c) for c in columns(RULES, 9)]
        masks = kept_tokens(x, to_kernel(np.full(9, 3, np.int32)), *cols, 70)
    assert masks.shape == (9, 3) and not bits(to_host(masks), 96)[:, 70:].any()
    sampled_logits(x, cols[0], masks, 70)
    assert np.array_equal(to_host(x)[:, 70:], logits[:, 70:])
    want = both(logits[:, :70].copy(), RULES, tokens=3, put=np.array)[1]
    assert np.array_equal(to_host(x)[:, :70], want)


@pytest.mark.skipif(GPU, reason="planted bugs are for the simulator")
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("make_kept_kernel", ">= least", "> least"),
        ("make_kept_kernel", "v == token or", ""),
        ("make_sampled_kernel", "int32(v & 31)", "int32(v & 15)"),
    ],
)
def test_planted_bugs_are_found(name, old, new):
    logits = normal(5, 9, 70, scale=3.0)
    want = both(logits, RULES, tokens=7, put=np.array)
    with with_planted_bug([module], name, old, new):
        found = both(logits, RULES, tokens=7, put=sim)
    assert not all(np.array_equal(a, b) for a, b in zip(found, want))


def test_bad_input():
    x, ints = normal(1, 2, 40), np.zeros(2, np.int32)
    cols = columns(RULES, 2)
    with pytest.raises(ValueError, match="vocabulary of 41, the logits have 40 columns"):
        kept_tokens(x, ints, *cols, 41)
    with pytest.raises(TypeError, match="top_k is float32, expected int32"):
        last_kept(x, cols[0], cols[2], *cols[2:], 40)
    with pytest.raises(ValueError, match="top_p 0"):
        last_kept(x, cols[0], cols[1], 0 * cols[2], cols[3], 40)
    with pytest.raises(ValueError, match=r"masks has shape \(2, 1\), expected \(2, 2\)"):
        sampled_logits(x, cols[0], np.zeros((2, 1), np.int32), 40)
    with pytest.raises(ValueError, match="top_p 2"):
        Sampling(top_p=2)
    assert not Sampling(0.7).truncates and Sampling(0.0).truncates and Sampling(top_k=3).truncates
