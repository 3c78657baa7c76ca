"""swap_heads: the reference is NumPy's transpose; the kernel must be equal to the bit."""

import numpy as np
import pytest
import torch
from checks import GPU, assert_directional, normal, sentinels, to_host, to_kernel

from xtrain.kernels.layout import WARPS, swap_heads, swap_heads_ref

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, WARPS + 1, 33), (2, 1, 4, 8), (3, 4, 1, 2)]
SHAPES += [(2, 12, 1024, 64), (70000, 2, 3, 5), (1, 3, 500000, 1)] if GPU else []


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape):
    x = normal(1, *shape)
    y = swap_heads(to_kernel(x))
    expected = np.ascontiguousarray(x.swapaxes(1, 2))
    assert np.array_equal(to_host(y), expected) and np.array_equal(swap_heads(x), expected)
    assert y.flags.c_contiguous and np.array_equal(to_host(swap_heads(y)), x)  # its own inverse


def test_reference_against_calculus():
    x, dy = normal(1, 2, 3, 4, 5, dtype=np.float64), normal(2, 2, 4, 3, 5, dtype=np.float64)
    assert_directional(lambda x: float((swap_heads_ref(x) * dy).sum()), (x,), (swap_heads(dy),))


def test_against_pytorch():
    x = normal(1, 2, 3, 4, 5)
    assert np.array_equal(swap_heads(x), torch.tensor(x).transpose(1, 2).contiguous().numpy())


@pytest.mark.parametrize("shape", [(2, 1, 3, 4), (2, 3, 1, 4)])
def test_the_result_is_never_a_view(shape):
    x = normal(1, *shape)
    assert not np.shares_memory(swap_heads(x), x)


def test_nothing_outside_the_output(monkeypatch):
    x = to_kernel(normal(1, 2, 3, 5, 7))
    with sentinels(monkeypatch):
        swap_heads(x)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_empty(shape):
    B, X, Y, D = shape
    assert swap_heads(to_kernel(np.zeros(shape, np.float32))).shape == (B, Y, X, D)


def test_bad_input():
    x = np.ones((2, 3, 4, 5), np.float32)
    with pytest.raises(
        ValueError, match=r"x has shape \(2, 3, 20\), expected \(any, any, any, any"
    ):
        swap_heads(x.reshape(2, 3, 20))
    with pytest.raises(TypeError, match="x is int64"):
        swap_heads(x.astype(np.int64))
    with pytest.raises(ValueError, match="not contiguous"):
        swap_heads(x.swapaxes(1, 2))
