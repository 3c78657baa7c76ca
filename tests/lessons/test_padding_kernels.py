"""The padding kernels of lesson 17 (lessons/checks/padding.py): packed and padded tokens, against loops in plain Python."""

import ml_dtypes
import numpy as np
import pytest
from checks import int32, normal, sentinels, to_host, to_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from offline import CARDS, CARDS_BF16, compiled, nvvm, signatures

from xtrain import lesson, simulator
from xtrain.simulator import KernelError, sim

__all__ = ["nvvm"]
padding = lesson.load_checks("padding")
cumulative_lengths, padding_offsets = padding.cumulative_lengths, padding.padding_offsets
remove_padding, remove_padding_heads = padding.remove_padding, padding.remove_padding_heads
restore_padding, restore_padding_heads = padding.restore_padding, padding.restore_padding_heads
BF16 = ml_dtypes.bfloat16
LENGTHS = [(3, 1, 2), (1,), (0, 2, 0), (4, 4), (0,)]


def edges_of(lengths):
    return int32(np.cumsum([0, *lengths]))


@pytest.mark.parametrize("lengths", [*LENGTHS, (), range(70), range(32)], ids=str)
def test_cumulative_lengths(monkeypatch, lengths):
    with sentinels(monkeypatch):
        edges = cumulative_lengths(to_kernel(int32(list(lengths))))
    assert to_host(edges).tolist() == edges_of(lengths).tolist() and edges.dtype == np.int32
    assert cumulative_lengths(int32(list(lengths))).tolist() == edges_of(lengths).tolist()


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
    with pytest.raises(ValueError, match="a sequence of 3 tokens, expected at most 2"):
        restore_padding(x, edges, 2)
    with pytest.raises(ValueError, match="a length is -1"):
        cumulative_lengths(int32([2, -1]))
    with pytest.raises(TypeError, match="x is int32"):
        restore_padding(x.astype(np.int32), edges, 3)
    with pytest.raises(ValueError, match="x has shape"):
        remove_padding(normal(1, 3, 4, 2), edges, 4)
    with pytest.raises(ValueError, match="expected 0 to 2147483647 tokens"):
        remove_padding(to_kernel(normal(1, 2, 3)), to_kernel(edges), -1)
    with pytest.raises(ValueError, match="2 sequences of -1"):
        restore_padding(to_kernel(x), to_kernel(edges), -1)


EDGES = [(0, 9, 4), (0, 3, 400), (-7, -3, 4), (5, 5, 5), (2**31 - 1, 0, -(2**31))]


@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_invalid_edges(edges):
    """A launch on a GPU does not check the values of edges: the results are zeros, and nothing is read out of bounds."""
    edges, x = to_kernel(int32(edges)), normal(1, 2, 3, 4)
    for array in (x, x[:, :, :3].copy()):  # 16 bytes at a time, and one element
        remove_padding(to_kernel(array), edges, 4)
        remove_padding_heads(to_kernel(array[:, None].copy()), edges, 4)
        for T in (0, 2, 3):
            restore_padding(to_kernel(array[0]), edges, T)
            restore_padding_heads(to_kernel(array), edges, T)


def launch_all(dtype):
    tokens = sim(np.ones((2, 2, 6), dtype))
    edges = cumulative_lengths(sim(int32([1, 1])))
    padding_offsets(edges, 2, 2)
    for packed in (tokens, sim(np.ones((2, 2, 8), dtype))):
        padded = restore_padding_heads(packed, edges, 2)
        remove_padding_heads(padded, edges, 2)
        remove_padding(restore_padding(packed, edges, 2), edges, 2)


@pytest.mark.parametrize("dtype, cards", [(np.float32, CARDS), (BF16, CARDS_BF16)])
def test_kernels_compile(monkeypatch, nvvm, dtype, cards):
    found = signatures(monkeypatch, lambda: launch_all(dtype))
    assert len({kernel.py_func.__name__ for kernel, _ in found}) == 3
    for kernel, signature in found:
        compiled(monkeypatch, kernel, signature, cards)
