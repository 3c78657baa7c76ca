"""logprobs.py: log_softmax of tokens and the most likely ones, with bits that depend on the row alone."""

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, normal, planted_bugs, sentinels, to_host, to_kernel, with_planted_bug
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.decoding import logprobs, sampling_search
from xtrain.kernels.decoding.logprobs import MAX_TOP, token_logprobs
from xtrain.kernels.decoding.sampling_search import Sizes
from xtrain.kernels.primitives import last_block
from xtrain.simulator import KernelError, sim

BF16 = ml_dtypes.bfloat16
SMALL = Sizes(threads=32, batch=2, keys=32, room=128, sorters=32, blocks=16)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 64 tokens, 32 bins, lists of 32 keys, room for 128: a vocabulary of 200 has up to four blocks a row."""
    if not GPU:
        monkeypatch.setattr(logprobs, "SIZES", SMALL)


def score(logits, tokens, top=0, vocab=None, put=to_kernel):
    results = token_logprobs(put(logits), put(np.asarray(tokens, np.int32)), top, vocab)
    return tuple(map(to_host, results))


def assert_same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def assert_close(found, want):
    """The same ids; logprobs within a few units in the last place: exp and log1p have other last bits than NumPy's."""
    np.testing.assert_array_equal(found[1], want[1])
    for a, b in ((found[0], want[0]), (found[2], want[2])):
        np.testing.assert_allclose(a, b, rtol=5e-7, atol=1e-7)


# ----------------------------------------------------------------------------- the reference is log_softmax
@pytest.mark.parametrize("put", [np.array, to_kernel])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_equals_log_softmax_of_torch(dtype, scale, put):
    logits = normal(1, 6, 151936 if GPU else 230, scale=scale).astype(dtype)
    exact = torch.log_softmax(torch.tensor(logits.astype(np.float64)), 1)
    tokens = exact[:, [0, 7, 229]].argmax(1).numpy() * 3
    chosen, ids, values = score(logits, tokens, 5, put=put)
    want, want_ids = exact.topk(5)
    rows, limit = torch.arange(6)[:, None], 2e-6 if GPU else 3e-7
    error = lambda x, y: np.abs(x - y.numpy()) / np.maximum(np.abs(y.numpy()), 1e-5)
    assert error(chosen[:, None], exact[rows, torch.tensor(tokens)[:, None]]).max() < limit
    assert error(values, want).max() < limit
    if dtype == np.float32:
        assert ids.tolist() == want_ids.tolist()
    assert chosen.dtype == values.dtype == np.float32 and ids.dtype == np.int32


def test_a_logprob_near_0_keeps_its_digits():
    """Where float32's sum of exp is 1, and its log 0."""
    logits = np.zeros((1, 50), np.float32)
    logits[0, 3] = 19.0
    exact = -np.log1p(49 * np.exp(-19.0))
    for put in (np.array, to_kernel):
        assert score(logits, [3], put=put)[0][0] == pytest.approx(exact, rel=1e-5)


# ----------------------------------------------------------------------------- the kernels compute the same
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("V", [1, 3, 64, 65, 230])
def test_kernel_equals_reference(V, dtype):
    logits = normal(2, 5, V, scale=4.0).astype(dtype)
    tokens = [0, V - 1, V // 2, -1, V]
    for top in (0, 1, 7, MAX_TOP):
        found = score(logits, tokens, top)
        assert_close(found, score(logits, tokens, top, put=np.array))
        assert np.isnan(found[0][3:]).all() and (found[1][:, V:] == -1).all()


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_row(data):
    """Ties, infinities, NaN, any number of alternatives."""
    logit = st.one_of(
        st.sampled_from([0.0, 0.0, 1.0, -1.0, -0.0, np.inf, -np.inf, np.nan]),
        st.floats(-40, 40, width=32),
    )
    V = data.draw(st.integers(1, 150))
    row = np.array(data.draw(st.lists(logit, min_size=V, max_size=V)), np.float32)
    few = np.float32([0, 1])[np.arange(V) % 2]  # long lists of equal logits
    logits = np.stack([row, np.where(np.isfinite(row), row, 0.5), few])
    tokens, top = [data.draw(st.integers(-1, V)) for _ in range(3)], data.draw(st.integers(0, 20))
    assert_close(score(logits, tokens, top), score(logits, tokens, top, put=np.array))


def test_rows_do_not_depend_on_other_rows_or_blocks(monkeypatch):
    V = 151936 if GPU else 300
    logits, tokens = normal(3, 8, V, scale=2.0), np.arange(8) * 3
    logits[3] = 1.0  # its list of equal keys is too long for a block
    want = score(logits, tokens, 5)
    for changed in (dict(blocks=1), dict(blocks=64, batch=1)):
        monkeypatch.setattr(logprobs, "SIZES", replace(logprobs.SIZES, **changed))
        assert_same_bits(score(logits, tokens, 5), want)
        for b in (0, 3, 7):
            assert_same_bits(
                score(logits[b : b + 1], tokens[b : b + 1], 5), [x[b : b + 1] for x in want]
            )


def test_padding_columns_are_not_tokens(monkeypatch):
    logits = normal(4, 3, 200)
    logits[:, 150:] = 100.0
    want = score(logits[:, :150].copy(), [1, 2, 149], 4)
    assert_same_bits(score(logits, [1, 2, 149], 4, vocab=150), want)
    with sentinels(monkeypatch):
        assert_same_bits(score(logits, [1, 2, 149], 4, vocab=150), want)


def test_nan_and_infinite_rows():
    logits = np.zeros((4, 70), np.float32)
    logits[0, 5], logits[1, 5], logits[2, :], logits[3, 1:] = np.nan, np.inf, -np.inf, -np.inf
    for put in (np.array, to_kernel):
        chosen, ids, values = score(logits, [5, 5, 5, 5], 2, put=put)
        assert np.isnan(chosen[:3]).all() and np.isnan(values[:3]).all() and (ids[:3] == -1).all()
        assert (
            chosen[3] == -np.inf
            and ids[3].tolist() == [0, 1]
            and values[3].tolist() == [0, -np.inf]
        )


def test_bad_input():
    logits, tokens = np.zeros((2, 5), np.float32), np.zeros(2, np.int32)
    for arguments, message in (
        ((logits, tokens, 21), "top 21, expected 0 to 20"),
        ((logits, tokens, 0, 6), "vocabulary of 6"),
        ((logits, tokens[:1]), r"expected \(2\)"),
        ((logits, tokens.astype(np.float32)), "expected int32"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            token_logprobs(*arguments)
    assert [x.shape for x in token_logprobs(logits[:0], tokens[:0], 3)] == [(0,), (0, 3), (0, 3)]


# ----------------------------------------------------------------------------- planted bugs
BARRIER = "cuda.syncthreads()\n"
BUGS = [
    (last_block, "arrive_last", "atomic_add_acq_rel(counters, i, int32(1))", "cuda.atomic.add(counters, i, 1)"),
    (last_block, "arrive_last", "    cuda.syncthreads()  # the block's writes come before thread 0's addition\n", ""),
    (last_block, "arrive_last", "            cuda.atomic.exch(counters, i, 0)", "            pass"),
    (logprobs, "make_score_kernel", "arrive_last(counters, row, cuda.gridDim.x, last_s)", "s == 0"),
    (logprobs, "make_score_kernel", "min(start + length, V)", "min(start + length - 1, V)"),
    (logprobs, "make_score_kernel", BARRIER + "        for j", "pass\n        for j"),
    (logprobs, "make_gather_kernel", "min(start + length, V)", "min(start + length - 1, V)"),
    (logprobs, "make_list_kernel", "cuda.syncthreads()  # the list", "pass  # the list"),
    (logprobs, "make_list_kernel", "low = keys_s[need - 1 - before]", "low = int64(0)"),
]  # fmt: skip


@pytest.mark.long
@planted_bugs
@pytest.mark.parametrize("module, name, old, new", BUGS)
def test_planted_bugs_are_found(monkeypatch, module, name, old, new):
    """The simulator reports them, or a result is wrong."""
    monkeypatch.setattr(logprobs, "SIZES", replace(SMALL, threads=64, sorters=64, keys=64))
    kept = sim(np.zeros(4, np.int32))  # as on a GPU, where the counters outlive a launch
    monkeypatch.setattr(logprobs, "zero_counters", lambda *_: kept)
    score_twice()
    planted = with_planted_bug([module, sampling_search, logprobs], name, old, new)
    with planted, pytest.raises((KernelError, AssertionError)):
        score_twice.__wrapped__()


@functools.cache  # the kernels without bugs run once
def score_twice():
    logits = normal(5, 4, 400, scale=2.0)
    logits[:, 63::64] += 4.0  # the last token of a block is likely
    logits[2], logits[2, [7, 100, 300]] = 1.0, 1.5
    tokens = [0, 127, 399, 5]
    want = score(logits, tokens, 5, put=np.array)
    for _ in range(2):
        assert_close(score(logits, tokens, 5, put=lambda x: sim(np.array(x))), want)
