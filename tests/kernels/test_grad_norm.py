"""Gradient norm and clip factor: against PyTorch's clip_grad_norm_, kernel against reference."""

import itertools
import math

import numpy as np
import pytest
import torch
from checks import GPU, assert_as_good, normal, sentinels, to_host, to_kernel

from xtrain.kernels.grad_norm import grad_norm, norm_and_factor, sum_of_squares, sum_of_squares_ref
from xtrain.kernels.primitives.flat import BLOCK, TILE

SIZES = [0, 1, 5, TILE - 1, 2 * TILE + 3]
SIZES += [BLOCK * TILE + 1, 50_000_001] if GPU else []


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e15])
@pytest.mark.parametrize("n", SIZES)
def test_sum_of_squares_kernel(n, scale):
    x = normal(1, n, scale=scale, mean=0.3 * scale)
    got = sum_of_squares(to_kernel(x))
    assert got.dtype == np.float32
    exact = sum_of_squares_ref(x.astype(np.float64))
    assert_as_good(got, exact, sum_of_squares_ref(x), floor=1e-6, what="sum")


@pytest.mark.parametrize("place", [to_kernel, np.array])
@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_against_pytorch(place, max_norm):
    x = normal(1, 1000)
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (1, 399, 600)]
    for p, g in zip(parameters, np.split(x, [1, 400])):
        p.grad = torch.tensor(g)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    got = to_host(grad_norm(place(x), max_norm))
    np.testing.assert_allclose(got[0], norm.item(), rtol=1e-6)
    clipped = torch.cat([p.grad for p in parameters]).numpy()
    np.testing.assert_allclose(x * got[1], clipped, rtol=1e-6)


@pytest.mark.parametrize("place", [to_kernel, np.array])
def test_no_clipping_and_what_is_not_finite(place):
    x = normal(1, 10)
    norm = np.linalg.norm(x.astype(np.float64))
    for max_norm in (0, math.inf, 2 * norm):
        got = to_host(grad_norm(place(x), max_norm))
        assert got[1] == 1 and abs(got[0] / norm - 1) < 1e-6
    assert to_host(grad_norm(place(np.zeros(4, np.float32)), 1.0)).tolist() == [0, 1]
    assert to_host(grad_norm(place(x[:0]), 1.0)).tolist() == [0, 1]
    tiny = np.array([1e-6], np.float32)  # PyTorch divides by norm + 1e-6
    assert to_host(grad_norm(place(tiny), 1e-6))[1] == 0.5
    x[3] = np.nan
    assert np.isnan(
        to_host(grad_norm(place(x), 1.0))
    ).all()  # as in PyTorch: every weight becomes NaN
    x[3] = np.inf
    assert to_host(grad_norm(place(x), 1.0)).tolist() == [np.inf, 0]


@pytest.mark.parametrize("place", [to_kernel, np.array])
def test_parts_of_several_ranks(place):
    """The norm of an array from the sums of squares of its shards."""
    x = normal(1, 300)
    sums = np.concatenate([to_host(sum_of_squares(place(part))) for part in np.split(x, 3)])
    got = to_host(norm_and_factor(place(sums), 1.0))
    np.testing.assert_allclose(got, to_host(grad_norm(place(x), 1.0)), rtol=1e-6)


@pytest.mark.parametrize("place", [to_kernel, np.array])
def test_parts_of_one_rank(place):
    """One sum of several parts, of any sizes and addresses."""
    x = normal(1, 3 * TILE)
    whole, cuts = place(x), [0, 5, 5, TILE + 7, 3 * TILE]
    got = to_host(sum_of_squares(*(whole[a:b] for a, b in itertools.pairwise(cuts))))
    np.testing.assert_allclose(got, [np.square(x, dtype=np.float64).sum()], rtol=1e-6)
    assert to_host(sum_of_squares(whole[:0], whole[3:3])) == [0]


def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch):
    x = to_kernel(normal(1, 2 * TILE + 3))
    with sentinels(monkeypatch):
        first = grad_norm(x, 1.0)
        total = sum_of_squares(x)
    assert np.array_equal(to_host(first), to_host(grad_norm(x, 1.0)))
    assert np.array_equal(to_host(total), to_host(sum_of_squares(x)))


def test_a_slice_at_any_address_gives_the_same_bits():
    x = to_kernel(normal(1, TILE + 9))
    for first in (1, 4):
        assert np.array_equal(
            to_host(grad_norm(x[first:], 1.0)), to_host(grad_norm(x[first:].copy(), 1.0))
        )


def test_bad_input():
    x = np.ones(8, np.float32)
    with pytest.raises(ValueError, match=r"grads has shape \(2, 4\), expected \(any\)"):
        grad_norm(x.reshape(2, 4), 1.0)
    with pytest.raises(TypeError, match="x is int32"):
        sum_of_squares(x.astype(np.int32))
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm is"):
            grad_norm(x, bad)
    with pytest.raises(ValueError, match="not contiguous"):
        sum_of_squares(x[::2])
