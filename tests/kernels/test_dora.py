"""DoRA: references against calculus and PyTorch, kernels against the references, planted bugs."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    assert_bug_is_found,
    assert_directional,
    normal,
    planted_bugs,
    sentinels,
    to_host,
    to_kernel,
)

from xtrain.kernels import dora
from xtrain.kernels.dora import (
    inverse_norms,
    inverse_norms_ref,
    scale_columns,
    scale_columns_bwd,
    scale_columns_bwd_ref,
    scale_columns_ref,
)

BF16 = ml_dtypes.bfloat16
SHAPES = [(1, 1), (3, 37), (5, 64), (2, 2056), (70, 17)]
SHAPES += [(8192, 4608), (70001, 40)] if GPU else []
both = pytest.mark.parametrize("dtype", [np.float32, BF16])


def norms(O, r, dtype=np.float32):  # noqa: E741
    """w (O, 9), a, b, and the arguments of inverse_norms."""
    w, a, b = (normal(i, *s, dtype=dtype) for i, s in enumerate([(O, 9), (r, 9), (O, r)]))
    return w, a, b, ((w * w).sum(1), a @ w.T, a @ a.T @ b.T, b)


def test_references_against_calculus():
    z, (m, c, bias) = normal(0, 4, 7, dtype=np.float64), normal(1, 3, 7, dtype=np.float64)
    dy = normal(9, 4, 7, dtype=np.float64)
    f = lambda z, m: float((scale_columns_ref(z, m, c, bias) * dy).sum())
    assert_directional(f, (z, m), scale_columns_bwd_ref(dy, z, m, c))


def test_the_norms_are_those_of_the_matrix():
    for O, r in ((1, 1), (5, 3), (300, 16)):  # noqa: E741
        w, a, b, arguments = norms(O, r)
        exact = 1 / np.linalg.norm(w.astype(np.float64) + 1.7 * b.astype(np.float64) @ a, axis=1)
        for put in (to_kernel, np.array):
            c = put(np.zeros(O, np.float32))
            inverse_norms(c, *map(put, arguments), 1.7)
            np.testing.assert_allclose(to_host(c), exact, rtol=3e-5)
    zero = np.zeros((1, 1), np.float32)
    assert np.isfinite(inverse_norms_ref(zero[0], zero, zero, zero, 1.0)).all()


@both
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_against_the_references(shape, biased, dtype):
    dy, z = (normal(i, *shape).astype(dtype) for i in range(2))
    m, c, before = (normal(i, shape[1]) for i in range(2, 5))
    vectors = [m, c, before] if biased else [m, c]
    exact = scale_columns_ref(z.astype(np.float64), *vectors)
    here = scale_columns(z, *vectors)
    assert_as_good(scale_columns(to_kernel(z), *map(to_kernel, vectors)), exact, here, what="y")
    dm, dm_here = to_kernel(before), before.copy()
    dz = scale_columns_bwd(*map(to_kernel, (dy, z, m, c)), dm)
    dz_here = scale_columns_bwd(dy, z, m, c, dm_here)
    exact_dz, exact_dm = scale_columns_bwd_ref(*(x.astype(np.float64) for x in (dy, z, m, c)))
    assert_as_good(dz, exact_dz, dz_here, what="dz")
    np.testing.assert_allclose(to_host(dm), exact_dm + before, rtol=1e-4, atol=1e-3)
    again = to_kernel(before)
    scale_columns_bwd(*map(to_kernel, (dy, z, m, c)), again)
    assert np.array_equal(to_host(again), to_host(dm))


@both
def test_nothing_outside_the_outputs(monkeypatch, dtype):
    z, vectors = to_kernel(normal(1, 5, 37).astype(dtype)), [to_kernel(normal(i, 37)) for i in range(3)]  # fmt: skip
    with sentinels(monkeypatch):
        scale_columns(z, *vectors)
        scale_columns_bwd(z, z, *vectors)


def test_against_pytorch():
    w, a, b, arguments = norms(6, 2)
    x = normal(5, 4, 9)
    dy = normal(6, 4, 6)
    m = normal(7, 6)
    tx, tm = torch.tensor(x, requires_grad=True), torch.tensor(m, requires_grad=True)
    v = torch.tensor(w + 1.7 * b @ a)
    ty = torch.nn.functional.linear(tx, v * (tm / v.norm(dim=1))[:, None])
    ty.backward(torch.tensor(dy))
    c = np.zeros(6, np.float32)
    dm = np.zeros(6, np.float32)
    z = x @ v.numpy().T
    inverse_norms(c, *arguments, 1.7)
    np.testing.assert_allclose(scale_columns(z, m, c), ty.detach().numpy(), rtol=1e-4, atol=1e-5)
    dz = scale_columns_bwd(dy, z, m, c, dm)
    np.testing.assert_allclose(dm, tm.grad.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dz @ v.numpy(), tx.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_no_rows_and_bad_input():
    m = to_kernel(normal(1, 3))
    assert scale_columns(to_kernel(np.zeros((0, 3), np.float32)), m, m).shape == (0, 3)
    with pytest.raises(ValueError, match=r"m, c or bias has shape \(3,\), expected \(4\)"):
        scale_columns(to_kernel(normal(1, 2, 4)), m, m)
    with pytest.raises(TypeError, match="float64"):
        scale_columns(to_kernel(np.zeros((2, 3))), m, m)
    with pytest.raises(ValueError, match=r"p has shape \(2, 4\), expected \(2, 3\)"):
        wrong = to_kernel(normal(1, 2, 4))
        inverse_norms(m, m, wrong, wrong, to_kernel(normal(1, 3, 2)), 1.0)


@planted_bugs
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("make_scale_columns_kernel", "if n < N:", "if n <= N:"),
        ("make_scale_columns_kernel", "load(c, c_O", "load(c, m_O"),
        ("make_scale_columns_bwd_kernel", "store(terms, first, gap, end, x", "store(terms, first, gap, end, d"),
        ("make_scale_columns_bwd_kernel", "end = n * O + O", "end = n * O + O + 1"),
        ("inverse_norms_kernel", "float32(2.0) * p", "p"),
        ("inverse_norms_kernel", "if o < c_O.shape[0]:", "if o <= c_O.shape[0]:"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(name, old, new):
    assert_bug_is_found(check_all_kernels, [dora], name, old, new)


def check_all_kernels():
    _, _, _, arguments = norms(37, 3)
    z = normal(1, 4, 37)
    m = normal(2, 37)
    dm = np.zeros(37, np.float32)
    c, dm_kernel = to_kernel(dm.copy()), to_kernel(dm.copy())
    dora.inverse_norms(c, *map(to_kernel, arguments), 1.7)
    c_here = inverse_norms_ref(*arguments, np.float32(1.7))
    y = dora.scale_columns(to_kernel(z), to_kernel(m), c)
    dz = dora.scale_columns_bwd(to_kernel(z), to_kernel(z), to_kernel(m), c, dm_kernel)
    dz_here, dm_here = scale_columns_bwd_ref(z, z, m, c_here)
    for a, b in ((y, scale_columns_ref(z, m, c_here)), (dz, dz_here), (dm_kernel, dm_here)):
        assert np.allclose(to_host(a), b, rtol=1e-3, atol=1e-4)
