"""The bias of a linear layer: reference against calculus, kernels against the reference and PyTorch, planted bugs."""

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

from xtrain.kernels import bias
from xtrain.kernels.bias import bias_bwd, bias_bwd_ref, fill_rows, fill_rows_ref
from xtrain.kernels.gemm import linear_fwd
from xtrain.kernels.primitives import column_sums
from xtrain.kernels.runtime.launch import empty

BF16 = ml_dtypes.bfloat16
# One column; odd; whole chunks; more columns than a block; more rows than a block reads at a time, and than it has in flight.
SHAPES = [(1, 1), (3, 37), (5, 64), (2, 2056), (150, 17), (300, 9)]
SHAPES += [(8192, 4608), (70001, 40)] if GPU else []
both = pytest.mark.parametrize("dtype", [np.float32, BF16])


def test_reference_against_calculus():
    dy, b = normal(1, 4, 7, dtype=np.float64), normal(2, 7, dtype=np.float64)

    def f(b):
        y = np.empty_like(dy)
        fill_rows_ref(y, b)
        return float((y * dy).sum())

    assert_directional(f, (b,), (bias_bwd_ref(dy),))


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_is_the_bias(shape, dtype):
    b = normal(1, shape[1])
    for put in (to_kernel, np.array):
        y = empty(put(b), shape, dtype)
        fill_rows(y, put(b))
        assert np.array_equal(to_host(y), np.broadcast_to(b.astype(dtype), shape))


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_is_added(shape, dtype):
    dy, before = normal(1, *shape).astype(dtype), normal(2, shape[1])
    db = to_kernel(before)
    bias_bwd(to_kernel(dy), db)
    exact = bias_bwd_ref(dy.astype(np.float64)) + before
    single = bias_bwd_ref(dy.astype(np.float32)) + before
    assert_as_good(db, exact, single, what="db", scale=float(np.abs(dy.astype(np.float64)).sum(0).max()))  # fmt: skip
    again, here = to_kernel(before), before.copy()
    bias_bwd(to_kernel(dy), again)
    bias_bwd(dy, here)
    assert np.array_equal(to_host(again), to_host(db))
    np.testing.assert_allclose(here, exact, rtol=1e-4, atol=1e-4)


@both
def test_nothing_outside_the_rows(monkeypatch, dtype):
    b = to_kernel(normal(1, 37))
    with sentinels(monkeypatch):
        fill_rows(empty(b, (5, 37), dtype), b)


@both
def test_rows_and_gradients_that_begin_anywhere(dtype):
    """Not aligned to 16 bytes, and rows with gaps between them: the same bits."""
    dy = normal(1, 9, 48).astype(dtype)
    apart, b = to_kernel(dy)[:, 8:24], to_kernel(normal(2, 17))[1:]
    ours, copied = to_kernel(np.zeros(16, np.float32)), to_kernel(np.zeros(16, np.float32))
    bias_bwd(apart, ours)
    bias_bwd(apart.copy(), copied)
    assert np.array_equal(to_host(ours), to_host(copied))
    y = empty(b, 9 * 16 + 1, dtype)[1:].reshape(9, 16)
    fill_rows(y, b)
    assert np.array_equal(to_host(y), np.broadcast_to(to_host(b).astype(dtype), (9, 16)))


def test_against_pytorch():
    x, w, b, dy = normal(1, 6, 10), normal(2, 7, 10), normal(3, 7), normal(4, 6, 7)
    tb = torch.tensor(b, requires_grad=True)
    ty = torch.nn.functional.linear(torch.tensor(x), torch.tensor(w), tb)
    ty.backward(torch.tensor(dy))
    y = linear_fwd(to_kernel(x), to_kernel(w), b_O=to_kernel(b))
    np.testing.assert_allclose(to_host(y), ty.detach().numpy(), rtol=1e-5, atol=1e-5)
    db = to_kernel(np.zeros(7, np.float32))
    bias_bwd(to_kernel(dy), db)
    np.testing.assert_allclose(to_host(db), tb.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_no_rows_and_bad_input():
    b = to_kernel(normal(1, 3))
    fill_rows(empty(b, (0, 3)), b)
    bias_bwd(empty(b, (0, 3)), b)
    assert np.array_equal(to_host(b), normal(1, 3))
    with pytest.raises(ValueError, match=r"b has shape \(3,\), expected \(4\)"):
        fill_rows(empty(b, (2, 4)), b)
    with pytest.raises(ValueError, match=r"db has shape \(3,\), expected \(4\)"):
        bias_bwd(empty(b, (2, 4)), b)
    with pytest.raises(TypeError, match="float64"):
        fill_rows(to_kernel(np.zeros((2, 3))), b)


@planted_bugs
@pytest.mark.parametrize(
    "module, name, old, new",
    [
        (bias, "make_fill_rows_kernel", "if n < N:", "if n <= N:"),
        (bias, "make_fill_rows_kernel", "load(b, b_O, o, gap", "load(b, b_O, n, gap"),
        (bias, "make_fill_rows_kernel", "n * O + O, b", "n * O + O + 1, b"),
        (column_sums, "make_add_column_sums_kernel", "        cuda.syncthreads()\n", ""),
        (column_sums, "make_add_column_sums_kernel", "q if q < P else p", "q"),
        (column_sums, "make_add_column_sums_kernel", "< P else float32(0.0)", "<= P else float32(0.0)"),
        (column_sums, "make_add_column_sums_kernel", "step = COLUMNS", "step = 8"),
        (column_sums, "make_add_column_sums_kernel", "int64(q if q < P else p) * C + c", "int64(q if q < P else p) * C"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(module, name, old, new):
    assert_bug_is_found(check_both, [module, bias, column_sums], name, old, new)


def check_both():
    b, dy = to_kernel(normal(1, 37)), to_kernel(normal(2, 150, 37).astype(BF16))
    y, db = empty(b, (4, 37)), to_kernel(np.zeros(37, np.float32))
    fill_rows(y, b)
    bias_bwd(dy, db)
    exact = bias_bwd_ref(to_host(dy).astype(np.float64))
    assert np.array_equal(to_host(y), np.tile(to_host(b), (4, 1)))
    assert np.allclose(to_host(db), exact, atol=1e-4)
