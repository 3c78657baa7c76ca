"""padding.py: the positions of packed tokens in the cache, against loops in plain Python."""

import numpy as np
import pytest
from checks import sentinels, to_host, to_kernel

from xtrain.kernels.decoding.padding import token_positions

LENGTHS = [(3, 1, 2), (1,), (0, 2, 0), (4, 4), (0,)]


def int32(values):
    return np.array(values, np.int32)


def edges_of(lengths):
    return int32(np.cumsum([0, *lengths]))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "history, rows", [(False, False), (True, False), (False, True), (True, True)]
)
def test_token_positions(lengths, history, rows):
    A, N = len(lengths), sum(lengths)
    pasts, places = int32(range(5, 5 + A)), int32(range(A)[::-1])
    want = [
        (places[a] if rows else a, (pasts[a] if history else 0) + i)
        for a in range(A)
        for i in range(lengths[a])
    ]
    for put in (to_kernel, np.array):
        given_ = (put(pasts) if history else None, put(places) if rows else None)
        got = token_positions(put(edges_of(lengths)), N, *given_)
        assert [tuple(x) for x in np.stack([to_host(g) for g in got], 1)] == want
        assert all(g.dtype == np.int32 for g in got)


def test_nothing_outside_the_outputs(monkeypatch):
    edges = to_kernel(edges_of((3, 1)))
    with sentinels(monkeypatch):
        token_positions(edges, 4)


def test_bad_input():
    edges = edges_of((3, 1))
    with pytest.raises(ValueError, match="3 packed tokens, the edges end at 4"):
        token_positions(edges, 3)
    with pytest.raises(ValueError, match="must begin at 0 and not decrease"):
        token_positions(int32([0, 3, 2]), 2)
    with pytest.raises(TypeError, match="edges is int64, expected int32"):
        token_positions(edges.astype(np.int64), 4)
    with pytest.raises(ValueError, match=r"history has shape \(1,\), expected \(2,\)"):
        token_positions(edges, 4, int32([0]))
    with pytest.raises(ValueError, match="4 packed tokens of no sequence"):
        token_positions(int32([0]), 4)


EDGES = [(0, 9, 4), (0, 3, 400), (-7, -3, 4), (5, 5, 5), (2**31 - 1, 0, -(2**31))]


@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_invalid_edges(edges):
    """A launch on a GPU does not check the values of edges: the kernel must stay within its arrays."""
    rows, _ = token_positions(to_kernel(int32(edges)), 4)
    assert set(to_host(rows)) <= {0, 1}
