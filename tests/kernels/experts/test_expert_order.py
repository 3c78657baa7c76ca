"""The order of rows by expert: the reference against its definition, the kernels against the reference bit for bit."""

import numpy as np
import pytest
from checks import (
    GPU,
    assert_bug_is_found,
    int32,
    planted_bugs,
    rng,
    sentinels,
    to_host,
    to_kernel,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.experts import expert_order as file
from xtrain.kernels.experts.expert_order import (
    BLOCK_PAIRS,
    MOST_EXPERTS,
    TILE,
    expert_order,
    expert_order_ref,
    slots_of,
)


def drawn(N, K, E, seed=0):
    """-> experts (N, K), different ones in a row; the first half of the experts gets most tokens"""
    scores = rng(seed, N, K, E).random((N, E)) + (np.arange(E) < E // 2)
    return int32(np.argsort(-scores, 1)[:, :K]).reshape(N, K)


def check_definition(order, experts, E):
    """What the docstring of ExpertOrder says, without a sort."""
    pairs, slots, tiles, first, counts = order
    P = experts.size
    assert pairs.size == slots_of(*experts.shape, E) and tiles.size * TILE == pairs.size
    assert first[0] == 0 and (first % TILE == 0).all() and first[-1] <= pairs.size
    assert np.array_equal(pairs[slots.reshape(-1)], np.arange(P))
    assert (pairs >= 0).sum() == P
    for e in range(E):
        own = np.flatnonzero(experts.reshape(-1) == e)
        assert counts[e] == own.size and 0 <= first[e + 1] - first[e] - own.size < TILE
        assert np.array_equal(pairs[first[e] : first[e] + own.size], own)
        assert (tiles[first[e] // TILE : first[e + 1] // TILE] == e).all()
    assert (tiles[first[-1] // TILE :] == -1).all()


@pytest.mark.parametrize("N, K, E", [(0, 2, 4), (1, 1, 1), (7, 2, 5), (300, 3, 8), (2, 4, 64)])
def test_reference_is_its_definition(N, K, E):
    experts = drawn(N, K, E)
    check_definition(expert_order(experts, E), experts, E)


def run(experts, E):
    """-> do the kernels agree with the reference?"""
    got = map(to_host, expert_order(to_kernel(experts), E))
    want = expert_order_ref(experts, E)
    return all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


CASES = {
    "experts without tokens": drawn(9, 2, 40),
    "all tokens to one expert": np.full((200, 1), 3, np.int32),
    "one token": drawn(1, 2, 4),
    "several blocks and tiles": drawn(BLOCK_PAIRS - 1, 2, 5),
    "a whole tile": np.repeat(int32([0, 2]), TILE).reshape(-1, 1),
    "no token": np.zeros((0, 2), np.int32),
}
if GPU:
    CASES["training"] = drawn(32768, 8, 128)
    CASES["most experts"] = drawn(5000, 8, MOST_EXPERTS)


@pytest.mark.parametrize("name", CASES)
def test_kernels(name):
    experts = CASES[name]
    assert run(experts, max(8, int(experts.max(initial=0)) + 1))


@settings(max_examples=3 if GPU else 10)
@given(st.integers(1, 400), st.integers(1, 4), st.integers(4, 70), st.integers(0, 9))
def test_kernels_for_any_shape(N, K, E, seed):
    experts = int32(rng(seed).integers(0, E, (N, K)))  # a pair may come twice here
    assert run(experts, E)


def test_nothing_outside_the_outputs(monkeypatch):
    with sentinels(monkeypatch):
        expert_order(to_kernel(drawn(130, 2, 5)), 5)


def test_an_expert_that_does_not_exist():
    experts = drawn(6, 2, 4)
    experts[2, 1] = 4
    with pytest.raises(ValueError, match=r"expert \[4\] is not one of 4"):
        expert_order(experts, 4)
    order = [to_host(a) for a in expert_order(to_kernel(experts), 4)]
    assert order[1][2, 1] == -1 and (order[0] >= 0).sum() == 11 and order[4].sum() == 11


def test_bad_input():
    with pytest.raises(ValueError, match="1025 experts, 1 to 1024 are supported"):
        expert_order(drawn(2, 1, 4), 1025)
    with pytest.raises(TypeError, match="experts is int64"):
        expert_order(drawn(2, 1, 4).astype(np.int64), 4)


@planted_bugs
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("make_count_kernel", "counts[e] = 0", "counts[e] = counts[e]"),
        ("make_count_kernel", "pairs_M[m] = -1", "pass"),
        ("make_count_kernel", "cuda.syncthreads()  # all pairs are counted", "pass"),
        ("make_count_kernel", "p < expert_P.size else", "p <= expert_P.size else"),
        ("make_scan_kernel", "total + (inclusive - count)", "total + inclusive"),
        ("make_scan_kernel", "(total + (TILE - 1)) // TILE * TILE", "total"),
        ("make_scan_kernel", "(total + (TILE - 1)) // TILE * TILE", "(total + TILE) // TILE * TILE"),
        ("make_scan_kernel", "first[middle] <= t * TILE", "first[middle] < t * TILE"),
        ("make_scan_kernel", "cuda.syncthreads()  # the first slots are known", "pass"),
        ("make_scan_kernel", "low if t * TILE < first[E] else -1", "low"),
        ("make_place_kernel", "slot = first_E[e] + before_EB[e, block]", "slot = first_E[e]"),
        ("make_place_kernel", "slot += count", "slot += 1"),
        ("make_place_kernel", "cuda.syncthreads()  # the counts are the warps' next slots", "pass"),
        ("make_place_kernel", "if experts[k] >= 0:\n                pairs_M", "if p < expert_P.size:\n                pairs_M"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(name, old, new):
    if old.startswith("(total"):
        old = f"first[e] = {old}"
        new = f"first[e] = {new}"
    assert_bug_is_found(check_some_cases, [file], name, old, new)


def check_some_cases():
    many = drawn(BLOCK_PAIRS + 100, 1, 8)
    many[5] = 9  # does not exist
    assert run(CASES["a whole tile"], 8)
    assert run(drawn(700, 2, 5), 5)
    assert (to_host(expert_order(to_kernel(many), 8)[0]) >= 0).sum() == many.size - 1
