"""padding.py: packed and padded tokens, against loops in plain Python."""

import ml_dtypes
import numpy as np
import pytest
from checks import normal, sentinels, to_host, to_kernel
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain import simulator
from xtrain.kernels.decoding import padding
from xtrain.kernels.decoding.padding import (
    cumulative_lengths,
    padding_offsets,
    remove_padding,
    remove_padding_heads,
    restore_padding,
    restore_padding_heads,
    token_places,
)
from xtrain.simulator import KernelError, sim

BF16 = ml_dtypes.bfloat16
LENGTHS = [(3, 1, 2), (1,), (0, 2, 0), (4, 4), (0,)]


def int32(values):
    return np.array(values, np.int32)


def edges_of(lengths):
    return int32(np.cumsum([0, *lengths]))


@pytest.mark.parametrize("lengths", [*LENGTHS, (), range(70), range(32)], ids=str)
def test_cumulative_lengths(monkeypatch, lengths):
    with sentinels(monkeypatch):
        edges = cumulative_lengths(to_kernel(int32(list(lengths))))
    assert to_host(edges).tolist() == edges_of(lengths).tolist() and edges.dtype == np.int32
    assert cumulative_lengths(int32(list(lengths))).tolist() == edges_of(lengths).tolist()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "history, rows", [(False, False), (True, False), (False, True), (True, True)]
)
def test_token_places(lengths, history, rows):
    A, N = len(lengths), sum(lengths)
    pasts, places = int32(range(5, 5 + A)), int32(range(A)[::-1])
    want = [
        (places[a] if rows else a, (pasts[a] if history else 0) + i)
        for a in range(A)
        for i in range(lengths[a])
    ]
    for put in (to_kernel, np.array):
        given_ = (put(pasts) if history else None, put(places) if rows else None)
        got = token_places(put(edges_of(lengths)), N, *given_)
        assert [tuple(x) for x in np.stack([to_host(g) for g in got], 1)] == want
        assert all(g.dtype == np.int32 for g in got)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_padding_offsets(lengths):
    T, want = max(lengths) + 1, []
    for a, length in enumerate(lengths):
        want += [a * T + i - len(want) - i for i in range(length)][:1] * length
    for put in (to_kernel, np.array):
        assert to_host(padding_offsets(put(edges_of(lengths)), sum(lengths), T)).tolist() == want


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (2, 3), (3, 90), (2, 8), (1, 16)]),
    st.sampled_from([np.float32, BF16]),
    st.integers(0, 2),
)
def test_remove_and_restore(lengths, heads, dtype, more):
    (H, D), T = heads, max(lengths) + more
    A, N, edges = len(lengths), sum(lengths), edges_of(lengths)
    packed = normal(1, N, H, D).astype(dtype)
    padded = np.zeros((A, T, H, D), dtype)
    for a in range(A):
        padded[a, : lengths[a]] = packed[edges[a] : edges[a + 1]]
    noise = padded.copy()  # what stands in the padding must not matter
    for a in range(A):
        noise[a, lengths[a] :] = np.nan
    swapped = noise.swapaxes(1, 2).copy()
    for put in (to_kernel, np.array):
        e, p = put(edges), put(packed)
        pairs = (
            (restore_padding(p, e, T), padded),
            (remove_padding(put(noise), e, N), packed),
            (restore_padding_heads(p, e, T), padded.swapaxes(1, 2)),
            (remove_padding_heads(put(swapped), e, N), packed),
        )
        for got, want in pairs:
            assert got.dtype == dtype and np.array_equal(to_host(got), want)


def test_nothing_outside_the_outputs(monkeypatch):
    edges, x = to_kernel(edges_of((3, 1))), to_kernel(normal(1, 4, 2, 5))
    with sentinels(monkeypatch):
        padded = restore_padding_heads(x, edges, 3)
        remove_padding_heads(padded, edges, 4)
        token_places(edges, 4)
        padding_offsets(edges, 4, 3)


def test_a_shuffle_in_a_branch_is_found():
    """A planted bug: only the lanes that have a length take part in the sum."""

    @padding.kernel(32)
    def broken(edges_E, lengths_A):
        a = padding.cuda.threadIdx.x
        if a < lengths_A.size:
            edges_E[a] = padding.cuda.shfl_up_sync(0xFFFFFFFF, lengths_A[a], 1)

    with pytest.raises(KernelError, match="broken"):
        simulator.run(broken, 1, 32, sim(int32([0] * 5)), sim(int32([1] * 5)))


def test_bad_input():
    edges, x = edges_of((3, 1)), normal(1, 4, 2)
    with pytest.raises(ValueError, match="3 packed tokens, the edges end at 4"):
        token_places(edges, 3)
    with pytest.raises(ValueError, match="a sequence of 3 tokens, where 2 are the most"):
        restore_padding(x, edges, 2)
    with pytest.raises(ValueError, match="must begin at 0 and not fall"):
        token_places(int32([0, 3, 2]), 2)
    with pytest.raises(ValueError, match="a length is -1"):
        cumulative_lengths(int32([2, -1]))
    with pytest.raises(TypeError, match="edges is int64, expected int32"):
        token_places(edges.astype(np.int64), 4)
    with pytest.raises(ValueError, match=r"history has shape \(1,\), expected \(2,\)"):
        token_places(edges, 4, int32([0]))
    with pytest.raises(TypeError, match="x is int32"):
        restore_padding(x.astype(np.int32), edges, 3)
    with pytest.raises(ValueError, match="x has shape"):
        remove_padding(normal(1, 3, 4, 2), edges, 4)
    with pytest.raises(ValueError, match="4 packed tokens of no sequence"):
        token_places(int32([0]), 4)
    with pytest.raises(ValueError, match="expected 0 to 2147483647 tokens"):
        remove_padding(to_kernel(normal(1, 2, 3)), to_kernel(edges), -1)
    with pytest.raises(ValueError, match="2 sequences of -1"):
        restore_padding(to_kernel(x), to_kernel(edges), -1)


EDGES = [(0, 9, 4), (0, 3, 400), (-7, -3, 4), (5, 5, 5), (2**31 - 1, 0, -(2**31))]


@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_edges_that_are_none(edges):
    """On a GPU nobody looks at their values beforehand: zeros come out, and nothing is read beyond an array."""
    edges, x = to_kernel(int32(edges)), normal(1, 2, 3, 4)
    for array in (x, x[:, :, :3].copy()):  # 16 bytes at a time, and one number
        remove_padding(to_kernel(array), edges, 4)
        remove_padding_heads(to_kernel(array[:, None].copy()), edges, 4)
        for T in (0, 2, 3):
            restore_padding(to_kernel(array[0]), edges, T)
            restore_padding_heads(to_kernel(array), edges, T)
    rows, _ = token_places(edges, 4)
    assert set(to_host(rows)) <= {0, 1}
