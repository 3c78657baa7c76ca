"""Add and scale: the references against calculus and PyTorch, the kernels against them."""

import numpy as np
import pytest
import torch
from checks import GPU, assert_directional, normal, sentinels, to_host, to_kernel

from xtrain.kernels.elementwise import TILE, add_fwd, add_into, scale_fwd, scale_into

SHAPES = [(), (1,), (2, 8), (3, 5, 7), (TILE + 1,), (0, 4)]
SHAPES += [(7, 4096), (8192, 768)] if GPU else []


@pytest.mark.parametrize("shape", [(1,), (3, 5)])
def test_reference_against_calculus(shape):
    a, b, dy = (normal(i, *shape, dtype=np.float64) for i in range(3))
    assert_directional(lambda a, b: float((add_fwd(a, b) * dy).sum()), (a, b), (dy, dy))
    f = lambda x: float((scale_fwd(x, -1.7) * dy).sum())
    assert_directional(f, (a,), (scale_fwd(dy, -1.7),))


@pytest.mark.parametrize("scale", [1.0, 1e30])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_references(shape, scale):
    """One rounding each, so the bits agree."""
    a, b = (normal(i, *shape, scale=scale).reshape(shape) for i in range(2))
    factor = np.float32(0.3)
    assert np.array_equal(to_host(add_fwd(to_kernel(a), to_kernel(b))), a + b)
    assert np.array_equal(to_host(scale_fwd(to_kernel(a), 0.3)), a * factor)
    for op, other, want in (
        (add_into, b, a + b),
        (scale_into, factor.reshape(1), a * factor),
    ):
        for place in (to_kernel, np.array):
            x = place(a)
            assert op(x, place(other)) is None
            assert np.array_equal(to_host(x), want)


def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch):
    a, b = to_kernel(normal(1, TILE + 5)), to_kernel(normal(2, TILE + 5))
    with sentinels(monkeypatch):
        y, z = add_fwd(a, b), scale_fwd(a, 3.0)
    assert np.array_equal(to_host(y), to_host(add_fwd(a, b)))
    assert np.array_equal(to_host(z), to_host(scale_fwd(a, 3.0)))


def test_in_place_touches_nothing_else():
    whole = to_kernel(normal(1, 40))
    before = to_host(whole).copy()
    add_into(whole[8:24], to_kernel(np.ones(16, np.float32)))
    scale_into(whole[24:32], to_kernel(np.zeros(1, np.float32)))
    after = to_host(whole)
    assert np.array_equal(after[8:24], before[8:24] + 1) and not after[24:32].any()
    assert np.array_equal(after[:8], before[:8]) and np.array_equal(after[32:], before[32:])


def test_against_pytorch():
    a, b = normal(1, 3, 5), normal(2, 3, 5)
    ta, tb = torch.tensor(a), torch.tensor(b)
    np.testing.assert_allclose(add_fwd(a, b), (ta + tb).numpy(), rtol=1e-7)
    np.testing.assert_allclose(scale_fwd(a, 0.3), (ta * 0.3).numpy(), rtol=1e-7)


def test_bad_input():
    a = np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"add: b has shape \(8,\), expected \(2, 8\)"):
        add_fwd(a, a[0])
    with pytest.raises(TypeError, match="add_into: b is int32"):
        add_into(a, a.astype(np.int32))
    with pytest.raises(ValueError, match=r"scale: x .* not contiguous"):
        scale_fwd(a[:, ::2], 2.0)
    with pytest.raises(ValueError, match=r"factor has shape \(2,\), expected \(1\)"):
        scale_into(a, np.ones(2, np.float32))
    with pytest.raises(TypeError, match="one place"):
        add_fwd(to_kernel(a), a)
