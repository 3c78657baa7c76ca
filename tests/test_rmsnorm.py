"""RMSNorm: the reference against calculus and PyTorch, the kernels against the reference."""

import numpy as np
import pytest
import torch
from checks import GPU, assert_as_good, assert_directional, normal, sentinels, to_host, to_kernel

from xtrain.kernels.rmsnorm import (
    rmsnorm_bwd,
    rmsnorm_bwd_ref,
    rmsnorm_fwd,
    rmsnorm_ref,
)

EPS = 1e-6
# one column; one chunk; odd; more rows than a block holds; several chunks per thread; several warps per row
SHAPES = [(1, 1), (2, 8), (3, 37), (5, 64), (5, 264), (2, 1032), (2, 1027)]
SHAPES += [(7, 4096), (8192, 768), (1, 20000), (3, 32768)] if GPU else []


def case(N, C, scale=1.0):
    return (
        normal(1, N, C, scale=scale),
        normal(2, C),
        normal(3, N, C),
        normal(4, C),
    )  # x, w, dy, dw before


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (3, 37)])
def test_reference_against_calculus(shape):
    x, w, dy, _ = (a.astype(np.float64) for a in case(*shape))
    _, rstd = rmsnorm_ref(x, w, EPS)
    f = lambda x, w: float((rmsnorm_ref(x, w, EPS)[0] * dy).sum())
    assert_directional(f, (x, w), rmsnorm_bwd_ref(dy, x, w, rstd))


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_kernel(shape, scale):
    x, w, _, _ = case(*shape, scale)
    got = rmsnorm_fwd(to_kernel(x), to_kernel(w), EPS)
    exact = rmsnorm_ref(x.astype(np.float64), w.astype(np.float64), EPS)
    for name, k, e, r in zip(("y", "rstd"), got, exact, rmsnorm_ref(x, w, EPS)):
        assert_as_good(k, e, r, what=name)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_kernel(shape, skip):
    x, w, dy, dw0 = case(*shape)
    s = normal(5, *shape) if skip else None
    rstd = rmsnorm_ref(x, w, EPS)[1]
    dw = to_kernel(dw0)
    dx = rmsnorm_bwd(*map(to_kernel, (dy, x, w, rstd)), dw, to_kernel(s) if skip else None)
    x64, w64, dy64 = (a.astype(np.float64) for a in (x, w, dy))
    rstd64 = rmsnorm_ref(x64, w64, EPS)[1]
    for name, k, e, r in zip(
        ("dx", "dw"),
        (dx, dw),
        rmsnorm_bwd_ref(dy64, x64, w64, rstd64),
        rmsnorm_bwd_ref(dy, x, w, rstd),
    ):
        extra = (s if skip else 0) if name == "dx" else dw0
        assert_as_good(k, e + extra, r + extra, what=name, scale=1.0)


def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch):
    x, w, dy, dw0 = map(to_kernel, case(5, 264))
    with sentinels(monkeypatch):
        y, rstd = rmsnorm_fwd(x, w, EPS)
        dx = rmsnorm_bwd(dy, x, w, rstd, dw0.copy())
    dw1, dw2 = dw0.copy(), dw0.copy()
    dx1, dx2 = rmsnorm_bwd(dy, x, w, rstd, dw1), rmsnorm_bwd(dy, x, w, rstd, dw2)
    assert np.array_equal(to_host(dx), to_host(dx1)) and np.array_equal(to_host(dx1), to_host(dx2))
    assert np.array_equal(to_host(dw1), to_host(dw2))
    assert np.array_equal(to_host(y), to_host(rmsnorm_fwd(x, w, EPS)[0]))


def test_against_pytorch():
    x, w, dy, _ = case(6, 40)
    tx, tw = (torch.tensor(a, requires_grad=True) for a in (x, w))
    ty = torch.nn.functional.rms_norm(tx, (40,), tw, EPS)
    ty.backward(torch.tensor(dy))
    y, rstd = rmsnorm_fwd(x, w, EPS)
    dw = np.zeros_like(w)
    dx = rmsnorm_bwd(dy, x, w, rstd, dw)
    for ours, theirs in ((y, ty), (dx, tx.grad), (dw, tw.grad)):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_no_rows():
    y, rstd = rmsnorm_fwd(
        to_kernel(np.zeros((0, 8), np.float32)), to_kernel(np.ones(8, np.float32)), EPS
    )
    assert y.shape == (0, 8) and rstd.shape == (0,)


def test_bad_input():
    x, w = np.ones((2, 8), np.float32), np.ones(8, np.float32)
    with pytest.raises(ValueError, match=r"w has shape \(7,\), expected \(8\)"):
        rmsnorm_fwd(x, w[:7], EPS)
    with pytest.raises(TypeError, match="x is int32"):
        rmsnorm_fwd(x.astype(np.int32), w, EPS)
    with pytest.raises(ValueError, match="not contiguous"):
        rmsnorm_fwd(np.ones((2, 16), np.float32)[:, ::2], w, EPS)
    with pytest.raises(TypeError, match="one place"):
        rmsnorm_fwd(to_kernel(x), w, EPS)
