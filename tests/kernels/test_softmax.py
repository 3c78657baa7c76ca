"""Causal softmax: the reference against calculus and PyTorch, the kernels against the reference."""

import numpy as np
import pytest
import torch
from checks import GPU, assert_as_good, assert_directional, normal, to_host, to_kernel

from xtrain.kernels.softmax import (
    BLOCK,
    NARROW,
    WARPS,
    causal_softmax_bwd,
    causal_softmax_bwd_ref,
    causal_softmax_fwd,
    causal_softmax_ref,
)

SHAPES = [  # A, rep, T, S
    (1, 1, 1, 1),
    (2, 1, 5, 5),
    (1, 2, 3, 40),
    (1, 3, WARPS, WARPS + 2),
    (1, 1, 2, BLOCK + 1),
    (1, 1, 2, NARROW + 3),
    (1, 3, 5, 8),  # from here on rows are whole chunks of 8 keys
    (1, 2, 3, 264),
    (1, 1, 2, NARROW + 8),
]
SHAPES += (
    [(24, 2, 256, 256), (2, 1, 1500, 1500), (1, 2, 64, 5000), (1, 1, 8, 16384), (1, 1, 8, 20000)]
    if GPU
    else []
)


def case(A, rep, T, S, mean=0.3, scale=1.0):
    """-> scores, dp, with large values where the mask is: they must not be read"""
    s, dp = (normal(i, A, rep * T, S, mean=mean, scale=scale) for i in (1, 2))
    hidden = np.broadcast_to(~np.tri(T, S, S - T, dtype=bool), (A, rep, T, S)).reshape(s.shape)
    return np.where(hidden, np.float32(3e8), s), np.where(hidden, np.float32(-3e8), dp), hidden


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 4, 4), (1, 2, 3, 7)])
def test_reference_against_calculus(shape, causal):
    A, rep, T, S = shape
    s, dp = (normal(i, A, rep * T, S, dtype=np.float64) for i in (1, 2))
    f = lambda s: float((causal_softmax_ref(s.copy(), T, 0.7, causal) * dp).sum())
    p = causal_softmax_ref(s.copy(), T, 0.7, causal)
    assert_directional(f, (s,), (causal_softmax_bwd_ref(dp.copy(), p, T, 0.7, causal),))


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_kernel(shape, scale):
    T = shape[2]
    s, _, hidden = case(*shape, scale=scale)
    given = to_kernel(s)
    p = causal_softmax_fwd(given, T, 0.3)
    assert p is given  # in place
    exact = causal_softmax_ref(s.astype(np.float64), T, 0.3)
    assert_as_good(p, exact, causal_softmax_ref(s.copy(), T, 0.3))
    assert (to_host(p)[hidden] == 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_kernel(shape):
    T = shape[2]
    s, dp, hidden = case(*shape)
    p = causal_softmax_ref(s.copy(), T, 0.3)
    given = to_kernel(dp)
    ds = causal_softmax_bwd(given, to_kernel(p), T, 0.3)
    assert ds is given
    p64 = causal_softmax_ref(s.astype(np.float64), T, 0.3)
    exact = causal_softmax_bwd_ref(dp.astype(np.float64), p64, T, 0.3)
    assert_as_good(ds, exact, causal_softmax_bwd_ref(dp.copy(), p, T, 0.3))
    assert (to_host(ds)[hidden] == 0).all()


@pytest.mark.parametrize("S", [3, 24, NARROW + 1, NARROW + 8])
def test_kernels_without_the_mask(S):
    s, dp = normal(1, 2, 4, S), normal(2, 2, 4, S)
    p = causal_softmax_fwd(to_kernel(s), 4, 0.3, causal=False)
    ds = causal_softmax_bwd(to_kernel(dp), to_kernel(to_host(p)), 4, 0.3, causal=False)
    s64, dp64 = s.astype(np.float64), dp.astype(np.float64)
    p64, p32 = (causal_softmax_ref(x, 4, 0.3, False) for x in (s64, s))
    assert_as_good(p, p64, p32)
    exact = causal_softmax_bwd_ref(dp64, p64, 4, 0.3, False)
    assert_as_good(ds, exact, causal_softmax_bwd_ref(dp, p32, 4, 0.3, False))


@pytest.mark.parametrize("S", [6, 16, NARROW + 1, NARROW + 8])
def test_values_that_would_overflow(S):
    s = np.full((1, 2, S), -1e30, np.float32)
    s[0, 1, :2] = 1e30
    for to in (np.array, to_kernel):
        p = to_host(causal_softmax_fwd(to(s), 2, 1.0))
        assert (
            np.allclose(p[0, 0, : S - 1], 1 / (S - 1))
            and (p[0, 1] == [0.5] * 2 + [0] * (S - 2)).all()
        )


@pytest.mark.parametrize("S", [9, 16, NARROW + 1, NARROW + 8])
def test_nothing_outside_and_the_same_bits_twice(S):
    pad, shape = 64, (1, 6, S)
    s, dp = normal(1, *shape), normal(2, *shape)
    results = []
    for _ in range(2):
        buffers = []
        for x in (s, dp):
            edge = np.full(pad, 777, np.float32)
            buffers.append(to_kernel(np.concatenate([edge, x.ravel(), edge])))
        inner = [b[pad:-pad].reshape(shape) for b in buffers]
        p = causal_softmax_fwd(inner[0], 3, 0.3)
        causal_softmax_bwd(inner[1], p, 3, 0.3)
        results.append([to_host(b) for b in buffers])
        for b in results[-1]:
            assert (b[:pad] == 777).all() and (b[-pad:] == 777).all()
    for first, second in zip(*results):
        assert np.array_equal(first, second)


def test_against_pytorch():
    A, rep, T, S = 2, 2, 5, 8
    s, dp = normal(1, A, rep * T, S), normal(2, A, rep * T, S)
    ts = torch.tensor(s, requires_grad=True)
    seen = torch.ones(T, S, dtype=torch.bool).tril(S - T).repeat(rep, 1)
    tp = torch.softmax((ts * 0.3).masked_fill(~seen, -torch.inf), -1)
    tp.backward(torch.tensor(dp))
    p = causal_softmax_fwd(s, T, 0.3)
    ds = causal_softmax_bwd(dp, p, T, 0.3)
    np.testing.assert_allclose(p, tp.detach().numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(ds, ts.grad.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4)])
def test_no_rows(shape):
    for to in (np.array, to_kernel):
        s, dp = to(np.zeros(shape, np.float32)), to(np.zeros(shape, np.float32))
        assert causal_softmax_fwd(s, 4, 1.0).shape == shape
        assert causal_softmax_bwd(dp, s, 4, 1.0).shape == shape


def test_bad_input():
    s = np.ones((2, 6, 4), np.float32)
    with pytest.raises(ValueError, match="6 rows are not whole query heads of T = 4"):
        causal_softmax_fwd(s, 4, 1.0)
    with pytest.raises(ValueError, match="6 causal positions need at least 6 keys, got 4"):
        causal_softmax_fwd(s, 6, 1.0)
    with pytest.raises(ValueError, match=r"dp has shape \(2, 6, 3\), expected \(2, 6, 4\)"):
        causal_softmax_bwd(np.ones((2, 6, 3), np.float32), s, 3, 1.0)
    with pytest.raises(TypeError, match="s is float16"):
        causal_softmax_fwd(s.astype(np.float16), 3, 1.0)
    with pytest.raises(ValueError, match="not contiguous"):
        causal_softmax_fwd(s.swapaxes(0, 1), 2, 1.0)


@pytest.mark.parametrize("S", [9, 16, NARROW + 1])
def test_results_in_arrays_of_their_own(S):
    s, dp = normal(1, 1, 6, S), normal(2, 1, 6, S)
    for to in (np.array, to_kernel):
        kept, given = to(s), to(dp)
        p, ds = to(np.full_like(s, np.nan)), to(np.full_like(s, np.nan))
        assert causal_softmax_fwd(kept, 3, 0.3, p_ARS=p) is p
        assert causal_softmax_bwd(given, p, 3, 0.3, ds_ARS=ds) is ds
        assert np.array_equal(to_host(kept), s) and np.array_equal(to_host(given), dp)
        expected = causal_softmax_fwd(to(s), 3, 0.3)
        assert np.array_equal(to_host(p), to_host(expected))
        assert np.array_equal(to_host(ds), to_host(causal_softmax_bwd(to(dp), expected, 3, 0.3)))
    with pytest.raises(ValueError, match=r"p has shape \(1, 6\), expected \(1, 6, "):
        causal_softmax_fwd(s, 3, 0.3, p_ARS=np.empty((1, 6), np.float32))
