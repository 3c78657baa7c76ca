"""sampling.py: which tokens are kept, how often each is drawn, and that a row does not depend on the others."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, normal, planted_bugs, to_host, to_kernel, with_planted_bug
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain import simulator
from xtrain.kernels.decoding import sampling, sampling_kernels, sampling_search
from xtrain.kernels.decoding.sampling import (
    advance,
    check_sampling,
    kept_ref,
    philox_ref,
    random_fraction_ref,
    sample,
)
from xtrain.kernels.decoding.sampling_search import Sizes
from xtrain.kernels.primitives import last_block
from xtrain.kernels.primitives.ptx import kernel
from xtrain.simulator import KernelError, sim

BF16 = ml_dtypes.bfloat16


SMALL = Sizes(threads=32, batch=2, keys=32, room=128, sorters=32, blocks=16)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 64 tokens, 32 bins, lists of 32 keys, room for 128: a vocabulary of 200 has up to four blocks a row."""
    if not GPU:
        monkeypatch.setattr(sampling, "SIZES", SMALL)
        monkeypatch.setattr(sampling, "MAX_TOP_K", SMALL.keys)


def parameters(B, temperature=1.0, top_k=0, top_p=1.0, seed=7, sequence=None, step=0):
    full = lambda value, dtype: np.array(np.broadcast_to(value, B), dtype)
    sequence = np.arange(B) if sequence is None else sequence
    return [
        full(temperature, np.float32), full(top_k, np.int32), full(top_p, np.float32),
        full(seed, np.int64), full(sequence, np.int64), full(step, np.int32),
    ]  # fmt: skip


def draw(logits, put=to_kernel, vocab=None, min_p=None, **given_):
    ids, B = put(np.full(len(logits), -5, np.int32)), len(logits)
    min_p_B = None if min_p is None else put(np.array(np.broadcast_to(min_p, B), np.float32))
    sample(put(logits), ids, *map(put, parameters(B, **given_)), vocab, min_p_B=min_p_B)
    return to_host(ids).tolist()


# ----------------------------------------------------------------------------- random numbers
def test_philox_known_answers():
    """kat_vectors of the authors' library Random123, philox4x32 10"""
    full, ones = 0xFFFFFFFF, (0xFFFFFFFF,) * 2
    assert philox_ref((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox_ref((full,) * 4, ones) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox_ref(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@kernel(1)
def fractions_kernel(out, seed, sequence, step):
    for i in range(out.size):
        out[i] = sampling_kernels.random_fraction(seed[i], sequence[i], step[i])


def test_kernel_has_the_same_random_numbers():
    seeds = np.array([0, 1, -1, 2**40 + 3, -(2**63)], np.int64)
    sequences, steps = (
        np.array([0, 2**33, 5, -2, 7], np.int64),
        np.array([0, 1, 2, 3, 2**31 - 1], np.int32),
    )
    out = np.zeros(5, np.int64)
    simulator.run(fractions_kernel, 1, 1, out, seeds, sequences, steps)
    assert out.tolist() == [random_fraction_ref(*map(int, x)) for x in zip(seeds, sequences, steps)]


# ----------------------------------------------------------------------------- which tokens are kept
def definition(logits, temperature, top_k, top_p):
    """The definition in float64: sorted tokens, probabilities, the smallest set with at least p. -> ids, probabilities"""
    x = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(x)), key=lambda i: (-logits[i], i))[: top_k or len(x)]
    p = np.exp(x[order] - x[order[0]])
    p /= p.sum()
    count = (
        1
        if top_p == 0
        else next((i + 1 for i in range(len(p)) if p[: i + 1].sum() >= top_p), len(p))
    )
    return order[:count], p[:count] / p[:count].sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    "top_k, top_p", [(0, 1.0), (5, 1.0), (1, 1.0), (0, 0.9), (50, 0.5), (7, 0.01), (0, 0.999)]
)
def test_sets_are_exact(temperature, top_k, top_p):
    logits = normal(3, 300, scale=2.0)
    logits[100:120] = logits[50]  # ties
    ids, weights = kept_ref(logits, temperature, top_k, top_p)
    want, p = definition(logits, temperature, top_k, top_p)
    assert ids.tolist() == want
    np.testing.assert_allclose(weights / weights.sum(), p, rtol=1e-5, atol=1e-10)


def transformers_set(logits, temperature, top_k, top_p):
    from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = torch.tensor(logits)[None]
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warper in warpers:
        scores = warper(None, scores)
    return set(torch.isfinite(scores[0]).nonzero().ravel().tolist())


@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(0.7, 20, 1.0), (1.0, 0, 0.8), (1.3, 30, 0.6)]
)
def test_sets_are_those_of_transformers(temperature, top_k, top_p):
    logits = normal(4, 200, scale=2.0)
    assert set(kept_ref(logits, temperature, top_k, top_p)[0]) == transformers_set(
        logits, temperature, top_k, top_p
    )


@pytest.mark.parametrize("min_p, top_p", [(0.05, 1.0), (0.3, 1.0), (1.0, 1.0), (0.02, 0.8)])
def test_min_p_keeps_the_tokens_of_the_definition(min_p, top_p):
    """Those with min_p times the largest probability; then top-p of what they have, as in vLLM."""
    logits, temperature = normal(6, 200, scale=2.0), 1.3
    p = np.exp(logits.astype(np.float64) / temperature)
    order = np.argsort(-p, kind="stable")
    want = [i for i in order if p[i] >= min_p * p.max()]
    share = np.cumsum(p[want]) / p[want].sum()
    want = want[: int(np.searchsorted(share, top_p)) + 1] if top_p < 1 else want
    ids, weights = kept_ref(logits, temperature, 0, top_p, min_p)
    assert ids[weights > 0].tolist() == want
    if top_p == 1:
        from transformers.generation import MinPLogitsWarper

        scores = MinPLogitsWarper(min_p)(None, torch.tensor(logits)[None] / temperature)
        assert set(want) == set(torch.isfinite(scores[0]).nonzero().ravel().tolist())


# ----------------------------------------------------------------------------- the kernels draw the same
MIXED = dict(  # every kind of row in one launch
    temperature=[0.0, 1.0, 0.5, 1.5, 1.0, 2.0, 1.0, 1.0],
    top_k=[0, 1, 20, 0, 3, 32, 0, 0],
    top_p=[1.0, 1.0, 0.7, 0.9, 1.0, 0.95, 1.0, 0.3],
)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("V", [5, 64, 200, *([2049, 32000, 151936] if GPU else [])])
def test_kernel_draws_what_the_reference_draws(V, dtype):
    logits = normal(V, 8, V, scale=3.0).astype(dtype)
    for step in range(2):
        assert draw(logits, step=step, **MIXED) == draw(logits, np.array, step=step, **MIXED)


@pytest.mark.parametrize("scale", [3.0, 0.01])
@pytest.mark.parametrize("blocks, threads, batch", [(1, 32, 2), (64, 32, 1), (5, 32, 3)])
def test_the_division_into_blocks_does_not_matter(monkeypatch, blocks, threads, batch, scale):
    """scale 0.01: no list of keys is short enough to sort. On a GPU: also sizes that are not those in use."""
    V = 151936 if GPU else 230
    changed = dict(blocks=blocks, batch=batch) | ({} if GPU else dict(threads=threads))
    logits = normal(9, 8, V, scale=scale)
    want = draw(logits, np.array, min_p=[0, 0, 0.1, 0, 0, 0, 0.5, 0], **MIXED)
    monkeypatch.setattr(sampling, "SIZES", replace(sampling.SIZES, **changed))
    assert draw(logits, min_p=[0, 0, 0.1, 0, 0, 0, 0.5, 0], **MIXED) == want
    assert draw(logits[5:6], **{k: x[5:6] for k, x in MIXED.items()}, sequence=[5]) == want[5:6]


def test_a_row_has_as_many_blocks_as_the_gpu_can_run(monkeypatch):
    """At least one, at most one per `threads * batch` tokens; together they cover the vocabulary."""
    monkeypatch.setattr(sampling_search, "multiprocessors", lambda x: 132)
    sizes = Sizes()
    for rows, vocab in (
        (1, 151936),
        (8, 151936),
        (64, 151936),
        (256, 151936),
        (256, 50304),
        (9, 3),
    ):
        blocks, length = sizes.split(None, rows, vocab)
        assert (blocks - 1) * length < vocab <= blocks * length and length % 2048 == 0
        assert blocks == 1 or rows * blocks <= 4 * 132
    assert sizes.split(None, 1, 151936)[0] == 75 and sizes.split(None, 256, 151936)[0] == 2


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_row(data):
    V, B = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 3))
    values = st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, -0.0, 1.0, -np.inf]))
    logits = np.array(
        data.draw(st.lists(st.lists(values, min_size=V, max_size=V), min_size=B, max_size=B)),
        np.float32,
    )
    given_ = dict(
        temperature=data.draw(st.sampled_from([0.0, 0.1, 1.0, 3.0])),
        top_k=data.draw(st.integers(0, 32)),
        top_p=data.draw(st.sampled_from([0.05, 0.5, 0.99, 1.0])),
        seed=data.draw(st.integers(-(2**63), 2**63 - 1)),
        step=data.draw(st.integers(0, 2**31 - 1)),
        min_p=data.draw(st.sampled_from([None, 0.0, 0.01, 0.5, 1.0])),
    )
    assert draw(logits, **given_) == draw(logits, np.array, **given_)


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_a_draw_beyond_the_list(top_p):
    """Equal logits: most of the probability, and the end of top-p, lie outside the list of candidates."""
    V = 5 * sampling.MAX_TOP_K
    logits = np.zeros((6, V), np.float32)
    logits[3:] = normal(1, V, scale=0.01)
    ids = draw(logits, top_p=top_p)
    assert ids == draw(logits, np.array, top_p=top_p) and max(ids[:3]) >= sampling.MAX_TOP_K


def test_ties_go_to_the_lower_id():
    logits = np.zeros((3, 200), np.float32)
    logits[1, 150], logits[1, 70] = 2.0, 2.0
    logits[2, 199] = 1.0
    assert draw(logits, temperature=0.0) == [0, 70, 199]
    kept = set(draw(np.zeros((8, 200), np.float32), top_k=4))
    assert kept <= {0, 1, 2, 3} and len(kept) > 1


def test_not_a_number_and_infinity():
    logits = np.zeros((6, 100), np.float32)
    logits[0, 80] = np.nan
    logits[1, [90, 40]] = np.inf
    logits[2] = -np.inf
    logits[3, 1:] = -np.inf
    logits[4, 3], logits[4, 5] = np.nan, np.inf
    logits[5, 99] = -np.nan
    for put in (to_kernel, np.array):
        for given_ in (dict(temperature=0.0), dict(), dict(top_k=3), dict(top_p=0.5)):
            assert draw(logits, put, **given_) == [-1, 40, 0, 0, -1, -1]


def test_padding_is_ignored():
    logits = normal(1, 2, 128)
    logits[:, 100:] = np.nan
    for put in (to_kernel, np.array):
        assert all(0 <= i < 100 for i in draw(logits, put, vocab=100))
        assert draw(logits, put, vocab=100) == draw(logits[:, :100].copy(), put)


def test_a_row_does_not_depend_on_the_others():
    logits = normal(5, 4, 100, scale=2.0)
    together = draw(logits, sequence=[3, 9, 4, 1])
    for b, sequence in enumerate([3, 9, 4, 1]):
        assert draw(logits[b : b + 1], sequence=[sequence]) == together[b : b + 1]
    assert draw(logits[::-1].copy(), sequence=[1, 4, 9, 3]) == together[::-1]


def test_seed_sequence_and_step_matter():
    logits = np.zeros((1, 200), np.float32)
    base = draw(logits)
    for change in (dict(seed=8), dict(sequence=[1]), dict(step=1)):
        assert draw(logits, **change) != base
    assert draw(logits) == base


# ----------------------------------------------------------------------------- how often
def chi_square(counts, p):
    """-> (statistic - degrees of freedom) / standard deviation"""
    expected, freedom = p * counts.sum(), len(p) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.long
@pytest.mark.parametrize(
    "by, temperature, top_k, top_p",
    [("step", 1.0, 0, 1.0), ("sequence", 0.7, 8, 1.0), ("seed", 1.0, 0, 0.9)],
)
def test_frequencies(by, temperature, top_k, top_p):
    """20000 draws of the reference, which the kernels equal; the kernels alone on a GPU."""
    logits, n = normal(2, 12), 20000
    ids, p = definition(logits, temperature, top_k, top_p)
    runs = dict(
        step=0, sequence=np.zeros(n), seed=5, temperature=temperature, top_k=top_k, top_p=top_p
    )
    runs[by] = np.arange(n)
    tokens = draw(np.tile(logits, (n, 1)), to_kernel if GPU else np.array, **runs)
    counts = np.bincount(tokens, minlength=12)
    assert counts[ids].sum() == n and chi_square(counts[ids], p) < 4


def test_neighbouring_steps_are_independent():
    """Pairs of one step and the next, over 16 halves of equal probability."""
    n = 8000
    bits = [random_fraction_ref(1, 2, step) >> 27 for step in range(n)]
    pairs = np.bincount([16 * a + b for a, b in zip(bits[::2], bits[1::2])], minlength=256)
    assert abs(chi_square(pairs, np.full(256, 1 / 256))) < 4


# ----------------------------------------------------------------------------- the end of a step, planted bugs, bad input
def test_advance():
    arrays = [np.array(x, np.int32) for x in ([3, 4, 5], [0, 7, 1], [2, -1, 0])]
    for put in (to_kernel, np.array):
        lengths, steps, rows = map(put, arrays)
        advance(lengths, steps, rows)
        assert to_host(lengths).tolist() == [4, 4, 6] and to_host(steps).tolist() == [1, 7, 2]


def test_advance_copies_the_ids_to_one_of_two_rows():
    start = [np.array(x, np.int32) for x in ([3, 4, 5], [0, 7, 1], [2, -1, 0])]
    for put in (to_kernel, np.array):
        lengths, steps, rows = map(put, start)
        host_ids = put(np.full((2, 5), 99, np.int32))
        for ids in ([7, 8, 9], [17, 18, 19]):
            advance(lengths, steps, rows, put(np.array(ids, np.int32)), host_ids)
        assert to_host(host_ids).tolist() == [[7, 99, 19, 99, 99], [17, 99, 9, 99, 99]]
        assert to_host(lengths).tolist() == [5, 4, 7]
        with pytest.raises(ValueError, match="host_ids has 2 columns, expected at least 3"):
            advance(lengths, steps, rows, rows, put(np.zeros((2, 2), np.int32)))
        with pytest.raises(ValueError, match="host_ids is given without ids"):
            advance(lengths, steps, rows, host_ids_2L=host_ids)


SEARCH, KERNELS, LAST = sampling_search, sampling_kernels, last_block
BARRIER = "cuda.syncthreads()\n"
RACES = [
    (SEARCH, "running_sum", "    " + BARRIER + "    total", "    total", {}),
    (SEARCH, "put_in_order", "step > 32 or after > 32", "step > 64 or after > 64", dict(top_k=100)),
    (SEARCH, "put_in_order", "cuda.syncwarp()", "pass", dict(top_k=20)),
    (SEARCH, "add_weight", "int64(cuda.atomic.add(bins, (0, i), uint32(low)))", "int64(bins[0, i])\n    bins[0, i] = 1", {}),
    (SEARCH, "make_search", BARRIER + "        i = place_s", "pass\n        i = place_s", {}),
    (SEARCH, "make_search", "count_s[0] = 0\n        " + BARRIER + "        x =", "count_s[0] = 0\n        x =", {}),
    (SEARCH, "make_search", "cuda.atomic.add(bins, first + i, v)", "bins[first + i] += v", {}),
    (SEARCH, "make_top_kernel", "arrive_last(counters, b, blocks, last_s)", "s == blocks - 1", {}),
    (KERNELS, "make_weigh_kernel", "arrive_last(counters, b, cuda.gridDim.x, last_s)", "cuda.blockIdx.x == 0", {}),
    (KERNELS, "make_weigh_kernel", BARRIER + "        add_bins", "pass\n        add_bins", {}),
    (LAST, "arrive_last", "atomic_add_acq_rel(counters, i, int32(1))", "cuda.atomic.add(counters, i, 1)", {}),
]  # fmt: skip


@pytest.mark.long
@planted_bugs
@pytest.mark.parametrize("module, name, old, new, given_", RACES)
def test_races_are_found(monkeypatch, module, name, old, new, given_):
    monkeypatch.setattr(sampling, "SIZES", replace(SMALL, threads=64, sorters=64, keys=128))
    logits = np.zeros((2, 400), np.float32)
    logits[:, 0] = 8.0  # the others are in one bin, which belongs to another warp than thread 0
    modules = [module, SEARCH, KERNELS, sampling]
    with (
        with_planted_bug(modules, name, old, new),
        pytest.raises(KernelError, match=r"race|uninitialized"),
    ):
        draw(logits, sim, **{"top_p": 0.99, **given_})


WRONG = [
    (LAST, "arrive_last", "            cuda.atomic.exch(counters, i, 0)", "            pass"),
    (SEARCH, "make_top_kernel", "min((s + 1) * length, V)", "min((s + 1) * length - 1, V)"),
    (KERNELS, "make_weigh_kernel", "end = min(start + length, V)", "end = min(start + length + 1, V)"),
    (KERNELS, "make_gather_kernel", "min(start + length, V)", "min(start + length - 1, V)"),
    (SEARCH, "make_search", "if at < ROOM:", "if True:"),
    (SEARCH, "make_search", "before += skipped\n                high", "high"),
]  # fmt: skip


@pytest.mark.long
@planted_bugs
@pytest.mark.parametrize("module, name, old, new", WRONG)
def test_wrong_results_are_found(monkeypatch, module, name, old, new):
    """Mistakes that are no race: the rows of this test must notice each of them."""
    monkeypatch.setattr(sampling, "SIZES", replace(SMALL, blocks=24 * 8))  # several per row
    rows = lambda scale: normal(5, 6, 300, scale=scale)
    logits = np.concatenate([rows(3.0), rows(0.3), rows(0.01), np.zeros((6, 300), np.float32)])
    logits[:6, ::64] += 2.0  # the first and the last token of a block are likely
    logits[:6, 63::64] += 2.0
    logits[12, 63] = 3.0
    logits[23, 128:] = -50.0  # as many candidates as the list has room for
    rules = dict(
        top_k=np.tile([0, 0, 0, 20, 7, 0], 4), top_p=np.tile([1, 0.9, 0.5, 1, 0.8, 0.3], 4)
    )
    steps = range(2)
    want = [draw(logits, np.array, step=step, **rules) for step in steps]
    put = lambda x: sim(np.array(x))
    kept = sim(np.zeros(len(logits), np.int32))  # as on a GPU, where the counters outlive a launch
    monkeypatch.setattr(sampling, "zero_counters", lambda *_: kept)
    planted = with_planted_bug([module, SEARCH, KERNELS, sampling], name, old, new)
    with planted, pytest.raises((KernelError, AssertionError)):
        for step in steps:
            assert draw(logits, put, step=step, **rules) == want[step]


def test_bad_input():
    for bad in (
        (-1, 0, 1),
        (1e-9, 0, 1),
        (np.inf, 0, 1),
        (np.nan, 0, 1),
        (1, -1, 1),
        (1, 4096, 1),
        (1, 0, 0),
        (1, 0, 1.5),
        (1, 0, 1, -0.1),
        (1, 0, 1, 1.1),
        (1, 0, 1, np.nan),
    ):
        with pytest.raises(ValueError, match="expected"):
            check_sampling(*bad)
    check_sampling(0, 0, 1)
    check_sampling(0.7, sampling.MAX_TOP_K, 0.5)
    logits, ids = normal(1, 2, 10), np.zeros(2, np.int32)
    good = parameters(2)
    with pytest.raises(ValueError, match="vocabulary of 11, the logits have 10 columns"):
        sample(logits, ids, *good, vocab=11)
    with pytest.raises(TypeError, match="seed is float64, expected int64"):
        sample(logits, ids, *good[:3], good[3].astype(np.float64), *good[4:])
    with pytest.raises(TypeError, match="ids is int64"):
        sample(logits, ids.astype(np.int64), *good)
    with pytest.raises(ValueError, match=r"top_p has shape \(1,\), expected \(2\)"):
        sample(logits, ids, good[0], good[1], good[2][:1], *good[3:])
    for bad in ((0.1, -3, 1.0), (1e-9, 0, 1.0), (1.0, 0, 7.0)):  # not checked on a GPU
        with pytest.raises(ValueError, match="expected"):
            sample(logits, ids, *parameters(2, *bad))
    with pytest.raises(TypeError, match="on one device"):
        sample(to_kernel(logits), ids, *good)
