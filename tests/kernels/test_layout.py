"""swap_heads: the reference is NumPy's transpose; the kernel must give the same bits."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, assert_directional, normal, sentinels, to_host, to_kernel

from xtrain.kernels.layout import WARPS, swap_heads, swap_heads_ref

BF16 = ml_dtypes.bfloat16
# Any width; rows of whole 32-byte chunks, in float32 only or in both dtypes.
SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, WARPS + 1, 33), (2, 1, 4, 8), (3, 4, 1, 2)]
SHAPES += [(2, 3, 5, 16), (1, 4, 3, 48), (2, 5, 2, 24)]
SHAPES += [(2, 12, 1024, 64), (70000, 2, 3, 5), (1, 3, 500000, 1), (70000, 2, 3, 16)] if GPU else []


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape, dtype):
    x = normal(1, *shape).astype(dtype)
    y = swap_heads(to_kernel(x))
    assert to_host(y).dtype == dtype
    expected = np.ascontiguousarray(x.swapaxes(1, 2))
    assert np.array_equal(to_host(y), expected) and np.array_equal(swap_heads(x), expected)
    assert y.flags.c_contiguous and np.array_equal(to_host(swap_heads(y)), x)  # its own inverse


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_an_array_that_begins_anywhere(dtype):
    x = to_kernel(normal(1, 2 * 3 * 5 * 16 + 1).astype(dtype))[1:].reshape(2, 3, 5, 16)
    assert np.array_equal(to_host(swap_heads(x)), to_host(x).swapaxes(1, 2))


@pytest.mark.parametrize("D", [5, 8])
def test_parts_of_packed_arrays(D):
    """Heads 3 and 4 of 5: read from a larger array, then written into one; nothing else is written."""
    B, T, P = 2, 3, 5
    for to in (np.array, to_kernel):
        packed, gradient = to(normal(1, B, T, P, D)), to(np.full((B, T, P, D), 7, np.float32))
        y = swap_heads(packed[:, :, 3:])
        assert np.array_equal(to_host(y), to_host(packed)[:, :, 3:].swapaxes(1, 2))
        out = gradient[:, :, 3:]
        assert swap_heads(y, out) is out
        assert np.array_equal(to_host(gradient)[:, :, 3:], to_host(packed)[:, :, 3:])
        assert (to_host(gradient)[:, :, :3] == 7).all()


def test_the_bits_are_copied():
    """Including those of a NaN."""
    x = np.arange(0x7F80, 0x7F80 + 2 * 3 * 16, dtype=np.uint16).reshape(1, 2, 3, 16)
    y = to_host(swap_heads(to_kernel(x.view(BF16))))
    assert np.array_equal(y.view(np.uint16), x.swapaxes(1, 2))


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


@pytest.mark.parametrize("D", [7, 16])
def test_nothing_outside_the_output(monkeypatch, D):
    x = to_kernel(normal(1, 2, 3, 5, D))
    with sentinels(monkeypatch):
        swap_heads(x)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (0, 3, 4, 8)])
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
    with pytest.raises(ValueError, match=r"out has shape \(2, 3, 4, 5\), expected \(2, 4, 3, 5\)"):
        swap_heads(x, x)
    with pytest.raises(TypeError, match="out is bfloat16, expected float32"):
        swap_heads(x, x.swapaxes(1, 2).astype(BF16))
