"""SwiGLU and GeGLU of two arrays: the reference against calculus and PyTorch, the kernels against it."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    assert_directional,
    normal,
    pairwise,
    sentinels,
    to_host,
    to_kernel,
)

from xtrain.kernels.primitives.flat import TILE
from xtrain.kernels.silu_mul import silu_mul_bwd, silu_mul_bwd_ref, silu_mul_fwd, silu_mul_ref

BF16 = ml_dtypes.bfloat16
SHAPES = [(1,), (3, 5, 7), (TILE + 1,), (0, 4)] + ([(8192, 2048)] if GPU else [])


def arrays(*shape, scale=1.0):
    return normal(1, *shape, scale=scale), normal(2, *shape), normal(3, *shape)


@pytest.mark.parametrize("gelu", [False, True])
def test_reference_against_calculus(gelu):
    gate, up, dy = (a.astype(np.float64) for a in arrays(3, 7))
    f = lambda gate, up: float((silu_mul_ref(gate, up, gelu) * dy).sum())
    assert_directional(f, (gate, up), silu_mul_bwd_ref(dy, gate, up, gelu))


@pairwise(
    {"shape": SHAPES, "scale": [1.0, 50.0], "dtype": [np.float32, BF16], "gelu": [False, True]}
)
def test_kernels(shape, scale, dtype, gelu):
    rounded = [a.astype(dtype) for a in arrays(*shape, scale=scale)]
    single, double = ([a.astype(kind) for a in rounded] for kind in (np.float32, np.float64))
    gate, up, dy = map(to_kernel, rounded)
    ours = silu_mul_fwd(gate, up, gelu), *silu_mul_bwd(dy, gate, up, gelu)
    both = lambda g, u, d: (silu_mul_ref(g, u, gelu), *silu_mul_bwd_ref(d, g, u, gelu))
    for mine, exact, reference in zip(ours, both(*double), both(*single)):
        assert to_host(mine).dtype == dtype
        assert_as_good(mine, exact, reference.astype(dtype))


def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch):
    gate, up, dy = map(to_kernel, arrays(2, 33))
    with sentinels(monkeypatch):
        first = silu_mul_fwd(gate, up), *silu_mul_bwd(dy, gate, up)
    second = silu_mul_fwd(gate, up), *silu_mul_bwd(dy, gate, up)
    assert all(np.array_equal(to_host(a), to_host(b)) for a, b in zip(first, second))


@pytest.mark.parametrize("gelu", [False, True])
def test_against_pytorch(gelu):
    gate, up, dy = arrays(5, 40, scale=3.0)
    leaves = [torch.tensor(a, requires_grad=True) for a in (gate, up)]
    functional = torch.nn.functional
    activated = (
        functional.gelu(leaves[0], approximate="tanh") if gelu else functional.silu(leaves[0])
    )
    y = activated * leaves[1]
    y.backward(torch.tensor(dy))
    ours = silu_mul_fwd(gate, up, gelu), *silu_mul_bwd(dy, gate, up, gelu)
    for mine, theirs in zip(ours, (y, *(leaf.grad for leaf in leaves))):
        np.testing.assert_allclose(mine, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_bad_input():
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"up has shape \(2, 3\), expected \(2, 4\)"):
        silu_mul_fwd(x, x[:, :3])
    with pytest.raises(TypeError, match="dy is float64, expected float32"):
        silu_mul_bwd(to_kernel(x.astype(np.float64)), to_kernel(x), to_kernel(x))
    with pytest.raises(TypeError, match="on one device"):
        silu_mul_fwd(to_kernel(x), x)
