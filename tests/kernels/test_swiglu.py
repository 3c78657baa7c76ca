"""SwiGLU, GeGLU and SiLU: the references against calculus and PyTorch, the kernels against them."""

import functools

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    assert_directional,
    double,
    normal,
    pairwise,
    sentinels,
    to_host,
    to_kernel,
)

from xtrain.kernels.primitives.flat import BLOCK, CHUNK, TILE
from xtrain.kernels.runtime.launch import launch
from xtrain.kernels.swiglu import (
    sigmoid_ref,
    silu_bwd,
    silu_bwd_ref,
    silu_fwd,
    silu_ref,
    swiglu_bwd,
    swiglu_bwd_ref,
    swiglu_fwd,
    swiglu_fwd_naive_kernel,
    swiglu_ref,
)

BF16 = ml_dtypes.bfloat16
# One column; one chunk; odd widths, one of them in two blocks; several rows per block.
SHAPES = [(1, 1), (2, 8), (3, 37), (2, BLOCK * CHUNK + 1), (5, 72)]  # (N, F)
SHAPES += [(7, 4096), (8192, 2048)] if GPU else []
EXTREMES = [0.0, -0.0, 1e-30, -1e-30, 20, -20, 87, -87, 89, -89, 104, -104, 1e4, -1e4, 3e38, -3e38]


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (3, 37)])
def test_reference_against_calculus(shape):
    N, F = shape
    gu, dy = double(normal(1, N, 2 * F), normal(2, N, F))
    for gelu in (False, True):
        f = lambda gu, gelu=gelu: float((swiglu_ref(gu, gelu) * dy).sum())
        assert_directional(f, (gu,), (swiglu_bwd_ref(dy, gu, gelu=gelu),))
    x = double(normal(3, N, F))[0]
    f = lambda x: float((silu_ref(x) * dy).sum())
    assert_directional(f, (x,), (silu_bwd_ref(dy, x),))


def check(op, ref, dtype, what, *inputs):
    """op in dtype is as accurate as ref in float32, rounded to dtype."""
    inputs = [x.astype(dtype) for x in inputs]
    wide = [x.astype(np.float32) for x in inputs]
    got = op(*map(to_kernel, inputs))
    assert to_host(got).dtype == dtype
    assert_as_good(got, ref(*double(*inputs)), ref(*wide).astype(dtype), what=what)


GELU = [False, True]


@pairwise({"shape": SHAPES, "scale": [1.0, 50.0], "dtype": [np.float32, BF16], "gelu": GELU})
def test_swiglu_kernels(shape, scale, dtype, gelu):
    N, F = shape
    gu, dy = normal(1, N, 2 * F, scale=scale), normal(2, N, F)
    forward, backward, ref, bwd_ref = (
        functools.partial(op, gelu=gelu)
        for op in (swiglu_fwd, swiglu_bwd, swiglu_ref, swiglu_bwd_ref)
    )
    check(forward, ref, dtype, "y", gu)
    check(backward, bwd_ref, dtype, "dgu", dy, gu)


@pairwise(
    {"shape": SHAPES, "place": [to_kernel, np.array], "dtype": [np.float32, BF16], "gelu": GELU}
)
def test_recomputed_y(shape, place, dtype, gelu):
    """dy becomes y with the bits of the forward pass; dgu is the same as without it."""
    N, F = shape
    gu, dy = (place(normal(i, N, k * F, scale=3.0).astype(dtype)) for i, k in ((1, 2), (2, 1)))
    expected, y = swiglu_bwd(dy, gu, gelu=gelu), swiglu_fwd(gu, gelu)
    dgu = swiglu_bwd(dy, gu, recompute_y=True, gelu=gelu)
    assert np.array_equal(to_host(dgu), to_host(expected))
    assert np.array_equal(to_host(dy), to_host(y))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (TILE + 1,), (0, 4)])
def test_silu_kernels(shape, dtype):
    x, dy = normal(1, *shape, scale=4.0), normal(2, *shape)
    check(silu_fwd, silu_ref, dtype, "y", x)
    check(silu_bwd, silu_bwd_ref, dtype, "dx", dy, x)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rows_that_begin_anywhere(dtype):
    """Rows of a larger array, not 16-byte aligned: the same bits as from a copy."""
    whole, dys = normal(1, 3 * 32 + 1).astype(dtype), normal(2, 3 * 16 + 1).astype(dtype)
    gu, dy = (to_kernel(a)[1:].reshape(3, -1) for a in (whole, dys))
    same = lambda a, b: np.array_equal(to_host(a), to_host(b))
    assert same(swiglu_fwd(gu), swiglu_fwd(gu.copy()))
    assert same(swiglu_bwd(dy, gu), swiglu_bwd(dy.copy(), gu.copy()))
    assert same(silu_bwd(gu, gu), silu_bwd(gu.copy(), gu.copy()))


def test_the_naive_kernel():
    gu = normal(1, 2, 2 * (BLOCK + 1))
    y = to_kernel(np.zeros((2, BLOCK + 1), np.float32))
    launch(swiglu_fwd_naive_kernel, (2, 2), BLOCK, y, to_kernel(gu))
    np.testing.assert_array_equal(to_host(y), to_host(swiglu_fwd(to_kernel(gu))))


def test_the_reference_in_float32():
    """As accurate as a sigmoid that is written to avoid overflow, and without a warning."""
    x = np.concatenate([normal(1, 1000, scale=s) for s in (0.1, 3, 30, 1000)])
    with np.errstate(all="raise", under="ignore"):
        got = sigmoid_ref(x)
    e = np.exp(-np.abs(x.astype(np.float64)))
    exact = np.where(x >= 0, 1, e) / (1 + e)
    assert (np.abs(got - exact) <= 3e-7 * exact + 1e-37).all()


@pytest.mark.parametrize("place", [to_kernel, np.array])
def test_extreme_gates(place):
    """No overflow, no NaN, and small results to full relative precision down to 1e-36."""
    x = np.array(EXTREMES, np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        y, slope = silu_fwd(place(x)), silu_bwd(place(np.ones_like(x)), place(x))
    exact = silu_ref(x.astype(np.float64))
    exact_slope = silu_bwd_ref(np.ones(x.size), x.astype(np.float64))
    np.testing.assert_allclose(to_host(y), exact, rtol=1e-5, atol=1e-36)
    np.testing.assert_allclose(to_host(slope), exact_slope, rtol=1e-5, atol=1e-36)


def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch):
    F = BLOCK * CHUNK + 1
    gu, dy = to_kernel(normal(1, 2, 2 * F)), to_kernel(normal(2, 2, F))
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
    tgg = torch.tensor(gu, dtype=torch.float64, requires_grad=True)  # 1 + tanh loses digits
    tw = torch.nn.functional.gelu(tgg[:, :F], approximate="tanh") * tgg[:, F:]
    tw.backward(torch.tensor(dy, dtype=torch.float64))
    for ours, theirs in (
        (swiglu_fwd(gu, gelu=True), tw),
        (swiglu_bwd(dy, gu, gelu=True), tgg.grad),
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
    with pytest.raises(TypeError, match="on one device"):
        silu_bwd(to_kernel(gu), gu)
