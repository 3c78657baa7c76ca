"""SwiGLU and SiLU: the references against calculus and PyTorch, the kernels against them."""

import numpy as np
import pytest
import torch
from checks import GPU, assert_as_good, assert_directional, normal, sentinels, to_host, to_kernel

from xtrain.kernels.swiglu import (
    TILE,
    silu_bwd,
    silu_bwd_ref,
    silu_fwd,
    silu_ref,
    swiglu_bwd,
    swiglu_bwd_ref,
    swiglu_fwd,
    swiglu_ref,
)

SHAPES = [(1, 1), (2, 8), (3, 37), (2, 2 * TILE + 1)]  # (N, F)
SHAPES += [(7, 4096), (8192, 2048)] if GPU else []
EXTREMES = [0.0, -0.0, 1e-30, -1e-30, 20, -20, 87, -87, 89, -89, 104, -104, 1e4, -1e4, 3e38, -3e38]


def double(*arrays):
    return [a.astype(np.float64) for a in arrays]


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (3, 37)])
def test_reference_against_calculus(shape):
    N, F = shape
    gu, dy = double(normal(1, N, 2 * F), normal(2, N, F))
    f = lambda gu: float((swiglu_ref(gu) * dy).sum())
    assert_directional(f, (gu,), (swiglu_bwd_ref(dy, gu),))
    x = double(normal(3, N, F))[0]
    f = lambda x: float((silu_ref(x) * dy).sum())
    assert_directional(f, (x,), (silu_bwd_ref(dy, x),))


@pytest.mark.parametrize("scale", [1.0, 50.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_kernels(shape, scale):
    N, F = shape
    gu, dy = normal(1, N, 2 * F, scale=scale), normal(2, N, F)
    gu64, dy64 = double(gu, dy)
    assert_as_good(swiglu_fwd(to_kernel(gu)), swiglu_ref(gu64), swiglu_ref(gu), what="y")
    got = swiglu_bwd(to_kernel(dy), to_kernel(gu))
    assert_as_good(got, swiglu_bwd_ref(dy64, gu64), swiglu_bwd_ref(dy, gu), what="dgu")


@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (TILE + 1,), (0, 4)])
def test_silu_kernels(shape):
    x, dy = normal(1, *shape, scale=4.0), normal(2, *shape)
    x64, dy64 = double(x, dy)
    assert_as_good(silu_fwd(to_kernel(x)), silu_ref(x64), silu_ref(x), what="y")
    got = silu_bwd(to_kernel(dy), to_kernel(x))
    assert_as_good(got, silu_bwd_ref(dy64, x64), silu_bwd_ref(dy, x), what="dx")


@pytest.mark.parametrize("place", [to_kernel, np.array])
def test_extreme_gates(place):
    """No overflow, no NaN, and small results to full relative precision."""
    x = np.array(EXTREMES, np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        y, slope = silu_fwd(place(x)), silu_bwd(place(np.ones_like(x)), place(x))
    exact = silu_ref(x.astype(np.float64))
    exact_slope = silu_bwd_ref(np.ones(x.size), x.astype(np.float64))
    np.testing.assert_allclose(to_host(y), exact, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(to_host(slope), exact_slope, rtol=1e-5, atol=1e-37)


def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch):
    gu, dy = to_kernel(normal(1, 2, 2 * (TILE + 1))), to_kernel(normal(2, 2, TILE + 1))
    with sentinels(monkeypatch):
        y, dgu = swiglu_fwd(gu), swiglu_bwd(dy, gu)
        z, dx = silu_fwd(gu), silu_bwd(gu, gu)
    assert np.array_equal(to_host(y), to_host(swiglu_fwd(gu)))
    assert np.array_equal(to_host(dgu), to_host(swiglu_bwd(dy, gu)))
    assert np.array_equal(to_host(z), to_host(silu_fwd(gu)))
    assert np.array_equal(to_host(dx), to_host(silu_bwd(gu, gu)))


def test_against_pytorch():
    N, F = 5, 40
    gu, dy = normal(1, N, 2 * F, scale=3.0), normal(2, N, F)
    tgu = torch.tensor(gu, requires_grad=True)
    ty = torch.nn.functional.silu(tgu[:, :F]) * tgu[:, F:]
    ty.backward(torch.tensor(dy))
    x = gu[:, :F].copy()
    tx = torch.tensor(x, requires_grad=True)
    tz = torch.nn.functional.silu(tx)
    tz.backward(torch.tensor(dy))
    for ours, theirs in (
        (swiglu_fwd(gu), ty),
        (swiglu_bwd(dy, gu), tgu.grad),
        (silu_fwd(x), tz),
        (silu_bwd(dy, x), tx.grad),
    ):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_no_rows():
    gu, dy = to_kernel(np.zeros((0, 8), np.float32)), to_kernel(np.zeros((0, 4), np.float32))
    assert swiglu_fwd(gu).shape == (0, 4) and swiglu_bwd(dy, gu).shape == (0, 8)


def test_bad_input():
    gu = np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match="gu has 7 columns"):
        swiglu_fwd(np.ones((2, 7), np.float32))
    with pytest.raises(ValueError, match=r"gu has shape \(2, 8\), expected \(2, 6\)"):
        swiglu_bwd(np.ones((2, 3), np.float32), gu)
    with pytest.raises(TypeError, match="gu is int32"):
        swiglu_fwd(gu.astype(np.int32))
    with pytest.raises(ValueError, match=r"dy has shape \(2, 4\), expected \(2, 8\)"):
        silu_bwd(gu[:, :4], gu)
    with pytest.raises(TypeError, match="one place"):
        silu_bwd(to_kernel(gu), gu)
