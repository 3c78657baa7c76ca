"""padding.py: the positions of packed tokens in the cache, against loops in plain Python."""

import numpy as np
import pytest
from checks import int32, planted_bugs, sentinels, to_host, to_kernel, with_bug

from xtrain.kernels.decoding import padding
from xtrain.kernels.decoding.padding import token_positions
from xtrain.kernels.runtime.launch import launch

LENGTHS = [(3, 1, 2), (1,), (0, 2, 0), (4, 4), (0,)]


def edges_of(lengths):
    return int32(np.cumsum([0, *lengths]))


def tables_of(A, M):
    """-> (A, M) int32: every block once, in random order"""
    return int32(np.random.default_rng(3).permutation(A * M)).reshape(A, M)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("S", [3, 16])
def test_token_positions(lengths, S):
    A, N = len(lengths), sum(lengths)
    pasts, tables = int32(range(5, 5 + A)), tables_of(A, 5)
    positions = [(a, int(pasts[a]) + i) for a in range(A) for i in range(lengths[a])]
    want = [(tables[a, p // S], p % S, p) for a, p in positions]
    for put in (to_kernel, np.array):
        got = token_positions(put(edges_of(lengths)), N, put(pasts), put(tables), S)
        assert [tuple(x) for x in np.stack([to_host(g) for g in got], 1)] == want
        assert all(g.dtype == np.int32 for g in got)


def test_positions_beyond_the_table_have_no_block():
    """From M S on, and those of an idle sequence; entries of the table are passed on as they are."""
    tables, history = int32([[4, -7], [3, 3], [6, 5]]), int32([0, -1, 30])
    for put in (to_kernel, np.array):
        got = token_positions(put(int32([0, 18, 20, 24])), 24, put(history), put(tables), 16)
        blocks, _, positions = map(to_host, got)
        assert positions.tolist() == [*range(18), 0, 0, *range(30, 34)]
        assert blocks.tolist() == [*[4] * 16, -7, -7, -1, -1, 5, 5, -1, -1]


@planted_bugs
def test_planted_bugs_are_found():
    """A table that is off by one, or another sequence's."""
    args = edges_of((20, 1)), 21, int32([0, 5]), tables_of(2, 3), 16
    want = token_positions(*args)
    for new in ("tables_AM[a, p // S + 1]", "tables_AM[0, p // S]"):
        kernel = padding.token_positions_kernel.py_func
        scope = with_bug(kernel, "tables_AM[a, p // S]", new, dict(vars(padding)))
        got = [to_kernel(np.zeros(21, np.int32)) for _ in range(3)]
        arrays = [to_kernel(x) for x in (args[0], *args[2:4])]
        launch(scope["token_positions_kernel"], 1, padding.BLOCK, *got, *arrays, 21, 16)
        assert not np.array_equal(to_host(got[0]), want[0])


def test_nothing_outside_the_outputs(monkeypatch):
    args = [to_kernel(x) for x in (edges_of((3, 1)), int32([0, 0]), tables_of(2, 1))]
    with sentinels(monkeypatch):
        token_positions(args[0], 4, *args[1:], 16)


def test_bad_input():
    edges, rest = edges_of((3, 1)), (int32([0, 0]), tables_of(2, 3), 16)
    with pytest.raises(ValueError, match="3 packed tokens, the edges end at 4"):
        token_positions(edges, 3, *rest)
    with pytest.raises(ValueError, match="must begin at 0 and not decrease"):
        token_positions(int32([0, 3, 2]), 2, *rest)
    with pytest.raises(TypeError, match="edges is int64, expected int32"):
        token_positions(edges.astype(np.int64), 4, *rest)
    with pytest.raises(ValueError, match=r"history has shape \(1,\), expected \(2,\)"):
        token_positions(edges, 4, int32([0]), *rest[1:])
    with pytest.raises(ValueError, match=r"tables has shape \(3, 2\), expected \(2, any\)"):
        token_positions(edges, 4, rest[0], tables_of(3, 2), 16)
    with pytest.raises(TypeError, match="tables is int64, expected int32"):
        token_positions(edges, 4, rest[0], rest[1].astype(np.int64), 16)
    with pytest.raises(ValueError, match="2 tables of 3 blocks of 0 tokens: expected 1 to"):
        token_positions(edges, 4, *rest[:2], 0)
    with pytest.raises(ValueError, match="4 packed tokens of no sequence"):
        token_positions(int32([0]), 4, *rest)


EDGES = [(0, 9, 4), (0, 3, 400), (-7, -3, 4), (5, 5, 5), (2**31 - 1, 0, -(2**31))]


@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_invalid_edges(edges):
    """A launch on a GPU does not check the values of edges: the kernel must stay within its arrays."""
    args = [to_kernel(x) for x in (int32(edges), int32([0, 0]), int32([[0], [1]]))]
    blocks, *_ = token_positions(args[0], 4, *args[1:], 16)
    assert set(to_host(blocks)) <= {-1, 0, 1}
