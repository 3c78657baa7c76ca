"""Residual + RMSNorm: the reference against calculus and PyTorch, the kernels against it."""

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
    single,
    to_host,
    to_kernel,
)

from xtrain.kernels import residual
from xtrain.kernels.residual import (
    residual_rmsnorm_bwd,
    residual_rmsnorm_bwd_ref,
    residual_rmsnorm_fwd,
    residual_rmsnorm_ref,
)

EPS = 1e-6
BF16 = ml_dtypes.bfloat16
SHAPES = [(1, 1), (2, 8), (3, 37), (5, 64), (5, 264), (2, 1032), (2, 1027)]
SHAPES += [(7, 4096), (8192, 768), (1, 20000)] if GPU else []


def case(N, C, scale=1.0, dtype=np.float32):
    """-> x, r, w, dh, dy, the old dw"""
    scales = (scale, scale, 1.0, 1.0)
    x, r, dh, dy = (normal(i, N, C, scale=s).astype(dtype) for i, s in enumerate(scales))
    return x, r, normal(4, C), dh, dy, normal(5, C)


@pytest.mark.parametrize("used", [True, False])  # whether the residual stream uses h
@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (3, 37)])
def test_reference_against_calculus(shape, used):
    x, r, w, dh, dy, _ = double(*case(*shape))
    h, _, rstd = residual_rmsnorm_ref(x, r, w, EPS)

    def f(x, r, w):
        h, y, _ = residual_rmsnorm_ref(x, r, w, EPS)
        return float((y * dy).sum() + used * (h * dh).sum())

    dx, dw = residual_rmsnorm_bwd_ref(dh if used else None, dy, h, w, rstd)
    assert_directional(f, (x, r, w), (dx, dx, dw))


DTYPES = [  # of the residual stream x, h; of r, y, dy, dx
    (np.float32, np.float32),
    (BF16, BF16),
    (np.float32, BF16),
]


@pairwise({"shape": SHAPES, "scale": [1.0, 1e4], "stream, dtype": DTYPES})
def test_forward_kernel(shape, scale, stream, dtype):
    x, r, w, *_ = case(*shape, scale)
    x, r = x.astype(stream), r.astype(dtype)
    h, y, rstd = residual_rmsnorm_fwd(to_kernel(x), to_kernel(r), to_kernel(w), EPS)
    assert to_host(h).dtype == stream and to_host(y).dtype == dtype
    assert to_host(rstd).dtype == np.float32
    h64, y64, rstd64 = residual_rmsnorm_ref(*double(x, r, w), EPS)
    h32, y32, rstd32 = residual_rmsnorm_ref(*single(x, r, w), EPS)
    assert_as_good(h, h64, h32.astype(stream), what="h")
    assert_as_good(y, y64, y32.astype(dtype), what="y")
    assert_as_good(rstd, rstd64, rstd32, what="rstd")
    assert np.array_equal(to_host(h), h32.astype(stream))


@pytest.mark.parametrize("stream, dtype", DTYPES)
@pytest.mark.parametrize("few", [2, 3])
def test_few_rows_and_more(monkeypatch, few, stream, dtype):
    """Numbers of rows on both sides of FEW."""
    monkeypatch.setattr(residual, "FEW", few)
    test_forward_kernel((3, 264), 1.0, stream, dtype)


@pairwise(
    {
        "shape": [(1, 1), (3, 37), (5, 64)] + (SHAPES if GPU else []),
        "used": [True, False],
        "stream, dtype": DTYPES,
    }
)
def test_backward_kernel(shape, used, stream, dtype):
    h, _, w, dh, dy, dw0 = case(*shape)
    h, dh, dy = h.astype(stream), dh.astype(dtype), dy.astype(dtype)
    rstd = residual_rmsnorm_ref(*single(h), 0, w, EPS)[2]
    dw = to_kernel(dw0)
    dx = residual_rmsnorm_bwd(
        to_kernel(dh) if used else None, *map(to_kernel, (dy, h, w, rstd)), dw
    )
    dh64, dy64, h64, w64 = double(dh, dy, h, w)
    rstd64 = residual_rmsnorm_ref(h64, 0, w64, EPS)[2]
    exact = residual_rmsnorm_bwd_ref(dh64 if used else None, dy64, h64, w64, rstd64)
    dh32, dy32, h32 = single(dh, dy, h)
    reference = residual_rmsnorm_bwd_ref(dh32 if used else None, dy32, h32, w, rstd)
    assert_as_good(dx, exact[0], reference[0].astype(dtype), what="dx", scale=1.0)
    assert_as_good(dw, exact[1] + dw0, reference[1] + dw0, what="dw", scale=1.0)


@pytest.mark.long
# On the CPU in float32 alone: the reference does not round to bf16, so it gives no bits to compare with.
@pytest.mark.parametrize(
    "place, dtype", [(to_kernel, np.float32), (to_kernel, BF16), (np.array, np.float32)]
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (2, 264), (1, 1032)] + (SHAPES if GPU else []))
def test_recomputed_y(shape, place, dtype):
    """dy becomes y with the bits of the forward pass; dx and dw are the same as without it."""
    x, r, w, _, dy, _ = (place(a) for a in case(*shape))
    r, dy = (place(to_host(a).astype(dtype)) for a in (r, dy))
    h, y, rstd = residual_rmsnorm_fwd(x, r, w, EPS)
    results, dws = [], [place(np.zeros(shape[1], np.float32)) for _ in range(2)]
    for recompute_y, dw in zip((False, True), dws):
        results.append(residual_rmsnorm_bwd(None, dy, h, w, rstd, dw, recompute_y))
        assert np.array_equal(to_host(dy), to_host(y)) == recompute_y
    assert np.array_equal(*map(to_host, results)) and np.array_equal(*map(to_host, dws))


def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch):
    x, r, w, dh, dy, dw0 = map(to_kernel, case(2, 264))
    with sentinels(monkeypatch):
        h, y, rstd = residual_rmsnorm_fwd(x, r, w, EPS)
        dw1 = dw0.copy()
        dx1 = residual_rmsnorm_bwd(dh, dy, h, w, rstd, dw1)
    dw2 = dw0.copy()
    dx2 = residual_rmsnorm_bwd(dh, dy, h, w, rstd, dw2)
    assert np.array_equal(to_host(dx1), to_host(dx2)) and np.array_equal(to_host(dw1), to_host(dw2))
    for first, second in zip((h, y, rstd), residual_rmsnorm_fwd(x, r, w, EPS)):
        assert np.array_equal(to_host(first), to_host(second))


def test_against_pytorch():
    x, r, w, dh, dy, _ = case(6, 40)
    tx, tr, tw = (torch.tensor(a, requires_grad=True) for a in (x, r, w))
    th = tx + tr
    ty = torch.nn.functional.rms_norm(th, (40,), tw, EPS)
    ((th * torch.tensor(dh)).sum() + (ty * torch.tensor(dy)).sum()).backward()
    h, y, rstd = residual_rmsnorm_fwd(x, r, w, EPS)
    dw = np.zeros_like(w)
    dx = residual_rmsnorm_bwd(dh, dy, h, w, rstd, dw)
    for ours, theirs in ((h, th), (y, ty), (dx, tx.grad), (dx, tr.grad), (dw, tw.grad)):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_no_rows():
    x, w = to_kernel(np.zeros((0, 8), np.float32)), to_kernel(np.ones(8, np.float32))
    h, y, rstd = residual_rmsnorm_fwd(x, x, w, EPS)
    assert h.shape == y.shape == (0, 8) and rstd.shape == (0,)
    dw = to_kernel(np.ones(8, np.float32))
    assert residual_rmsnorm_bwd(x, x, h, w, rstd, dw).shape == (0, 8)
    assert np.array_equal(to_host(dw), np.ones(8))


def test_bad_input():
    x, w = np.ones((2, 8), np.float32), np.ones(8, np.float32)
    with pytest.raises(ValueError, match=r"r has shape \(1, 8\), expected \(2, 8\)"):
        residual_rmsnorm_fwd(x, x[:1], w, EPS)
    with pytest.raises(ValueError, match=r"w has shape \(7,\), expected \(8\)"):
        residual_rmsnorm_fwd(x, x, w[:7], EPS)
    with pytest.raises(TypeError, match="x is int32"):
        residual_rmsnorm_fwd(x.astype(np.int32), x, w, EPS)
    with pytest.raises(ValueError, match="not contiguous"):
        residual_rmsnorm_fwd(x, np.ones((2, 16), np.float32)[:, ::2], w, EPS)
    with pytest.raises(TypeError, match="on one device"):
        residual_rmsnorm_fwd(to_kernel(x), x, w, EPS)
