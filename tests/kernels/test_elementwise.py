"""Add and scale: the references against calculus and PyTorch, the kernels against them."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, assert_directional, normal, pairwise, sentinels, to_host, to_kernel

from xtrain.kernels.elementwise import (
    add_fwd,
    add_into,
    add_naive_kernel,
    add_ref,
    scale_fwd,
    scale_into,
    scale_ref,
)
from xtrain.kernels.primitives.flat import BLOCK, TILE
from xtrain.kernels.runtime.launch import launch

BF16 = ml_dtypes.bfloat16
SHAPES = [(), (1,), (2, 8), (3, 5, 7), (TILE + 1,), (0, 4)]
SHAPES += [(7, 4096), (8192, 768)] if GPU else []


def same_bits(got, want):
    got, want = to_host(got), np.asarray(want)
    same = got.dtype == want.dtype and got.shape == want.shape
    return same and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("shape", [(1,), (3, 5)])
def test_reference_against_calculus(shape):
    a, b, dy = (normal(i, *shape, dtype=np.float64) for i in range(3))
    assert_directional(lambda a, b: float((add_fwd(a, b) * dy).sum()), (a, b), (dy, dy))
    f = lambda x: float((scale_fwd(x, -1.7) * dy).sum())
    assert_directional(f, (a,), (scale_fwd(dy, -1.7),))


@pairwise({"shape": SHAPES, "scale": [1.0, 1e30], "dtype": [np.float32, BF16]})
def test_kernels_equal_the_references(shape, scale, dtype):
    """Kernel and reference round once, so the bits agree."""
    a, b = (normal(i, *shape, scale=scale).reshape(shape).astype(dtype) for i in range(2))
    factor = np.array([0.3], np.float32)
    total, scaled = (a.astype(np.float32) + b.astype(np.float32)).astype(dtype), scale_ref(a, 0.3)
    assert same_bits(add_fwd(to_kernel(a), to_kernel(b)), total)
    assert same_bits(scale_fwd(to_kernel(a), 0.3), scaled)
    for op, other, want in ((add_into, b, total), (scale_into, factor, scaled)):
        for place in (to_kernel, np.array):
            x = place(a)
            assert op(x, place(other)) is None
            assert same_bits(x, want)


def test_the_naive_kernel_adds_too():
    a, b = normal(1, BLOCK + 1), normal(2, BLOCK + 1)
    y = to_kernel(np.zeros_like(a))
    launch(add_naive_kernel, 2, BLOCK, y, to_kernel(a), to_kernel(b))
    assert np.array_equal(to_host(y), add_ref(a, b))


def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch):
    a, b = to_kernel(normal(1, TILE + 5)), to_kernel(normal(2, TILE + 5))
    with sentinels(monkeypatch):
        y, z = add_fwd(a, b), scale_fwd(a, 3.0)
    assert np.array_equal(to_host(y), to_host(add_fwd(a, b)))
    assert np.array_equal(to_host(z), to_host(scale_fwd(a, 3.0)))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("first", [0, 1, 3, 4, 8])
def test_in_place_on_a_slice_at_any_address(first, dtype):
    """A slice that is not 16-byte aligned gives correct results, and its neighbours are not written."""
    host = normal(1, 64).astype(dtype)
    for n in (1, 16, 21):
        whole, part = to_kernel(host), slice(first, first + n)
        add_into(whole[part], to_kernel(np.ones(n, dtype)))
        scale_into(whole[part], to_kernel(np.full(1, 0.3, np.float32)))
        want = host.copy()
        want[part] = scale_ref(want[part] + dtype(1), 0.3)
        assert same_bits(whole, want)


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
    with pytest.raises(TypeError, match="on one device"):
        add_fwd(to_kernel(a), a)
