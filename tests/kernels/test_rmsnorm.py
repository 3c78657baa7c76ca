"""RMSNorm: the reference against calculus and PyTorch, the kernels against the reference."""

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

from xtrain.kernels import rmsnorm
from xtrain.kernels.primitives.rows import row_plan
from xtrain.kernels.rmsnorm import (
    rmsnorm_bwd,
    rmsnorm_bwd_ref,
    rmsnorm_fwd,
    rmsnorm_fwd_naive_kernel,
    rmsnorm_ref,
)
from xtrain.kernels.runtime.launch import empty, empty_like, launch

EPS = 1e-6
BF16 = ml_dtypes.bfloat16
# One column; one chunk; odd; more rows than a block holds; several chunks per thread; several warps per row.
SHAPES = [(1, 1), (2, 8), (3, 37), (5, 64), (5, 264), (2, 1032), (2, 1027)]
SHAPES += [(7, 4096), (8192, 768), (1, 20000), (3, 32768)] if GPU else []


def case(N, C, scale=1.0, dtype=np.float32):
    """-> x, w, dy, the old dw"""
    x, dy = normal(1, N, C, scale=scale), normal(3, N, C)
    return x.astype(dtype), normal(2, C), dy.astype(dtype), normal(4, C)


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (3, 37)])
def test_reference_against_calculus(shape):
    x, w, dy, _ = (a.astype(np.float64) for a in case(*shape))
    _, rstd = rmsnorm_ref(x, w, EPS)
    f = lambda x, w: float((rmsnorm_ref(x, w, EPS)[0] * dy).sum())
    assert_directional(f, (x, w), rmsnorm_bwd_ref(dy, x, w, rstd))


DTYPES = [  # of x; of y, dy, dx. In bf16 training the residual stream x stays float32
    (np.float32, np.float32),
    (BF16, BF16),
    (np.float32, BF16),
]


@pairwise({"shape": SHAPES, "scale": [1.0, 1e4], "x_dtype, dtype": DTYPES})
def test_forward_kernel(shape, scale, x_dtype, dtype):
    x, w, _, _ = case(*shape, scale, x_dtype)
    y, rstd = rmsnorm_fwd(to_kernel(x), to_kernel(w), EPS, np.dtype(dtype))
    assert to_host(y).dtype == dtype and to_host(rstd).dtype == np.float32
    (y64, rstd64), (y32, rstd32) = rmsnorm_ref(*double(x, w), EPS), rmsnorm_ref(*single(x, w), EPS)
    assert_as_good(y, y64, y32.astype(dtype), what="y")
    assert_as_good(rstd, rstd64, rstd32, what="rstd")


@pytest.mark.long
@pairwise({"shape": SHAPES, "skip": [False, True], "x_dtype, dtype": DTYPES})
def test_backward_kernel(shape, skip, x_dtype, dtype):
    check_backward(*shape, skip, x_dtype, dtype)


@pytest.mark.parametrize("shape", [(5, 16), (5, 776)])  # one warp per row; several
def test_backward_kernel_with_more_rows_than_blocks(shape, monkeypatch):
    monkeypatch.setattr(rmsnorm, "MULTIPROCESSORS", 1)
    monkeypatch.setattr(rmsnorm, "RESIDENT", 2)
    rmsnorm.make_bwd_kernel.cache_clear()
    check_backward(*shape, False, np.float32, np.float32)
    rmsnorm.make_bwd_kernel.cache_clear()


def check_backward(N, C, skip, x_dtype, dtype):
    x, w, dy, dw0 = case(N, C)
    x, dy = x.astype(x_dtype), dy.astype(dtype)
    s = normal(5, N, C).astype(dtype) if skip else np.zeros((N, C), dtype)
    rstd = rmsnorm_ref(*single(x, w), EPS)[1]
    dw = to_kernel(dw0)
    dx = rmsnorm_bwd(*map(to_kernel, (dy, x, w, rstd)), dw, to_kernel(s) if skip else None)
    assert to_host(dx).dtype == dtype
    dy64, x64, w64 = double(dy, x, w)
    dx64, dw64 = rmsnorm_bwd_ref(dy64, x64, w64, rmsnorm_ref(x64, w64, EPS)[1])
    dx32, dw32 = rmsnorm_bwd_ref(*single(dy, x, w), rstd)
    assert_as_good(dx, dx64 + s, (dx32 + s.astype(np.float32)).astype(dtype), what="dx", scale=1.0)
    assert_as_good(dw, dw64 + dw0, dw32 + dw0, what="dw", scale=1.0)


def test_naive_kernel():
    x, w, _, _ = case(3, 300)
    given, weights = to_kernel(x), to_kernel(w)
    y, rstd = empty_like(given), empty(given, 3)
    launch(rmsnorm_fwd_naive_kernel, 3, rmsnorm.BLOCK, y, rstd, given, weights, np.float32(EPS))
    assert_as_good(y, rmsnorm_ref(*double(x, w), EPS)[0], rmsnorm_ref(x, w, EPS)[0])


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rows_that_begin_anywhere(dtype):
    """Rows of a larger array, not 16-byte aligned: the same bits as from a copy."""
    x, dy = (to_kernel(normal(i, 3 * 264 + 1).astype(dtype))[1:].reshape(3, 264) for i in (1, 2))
    w, rstd, dw1, dw2 = (to_kernel(normal(i, n)) for i, n in ((3, 264), (4, 3), (5, 264), (5, 264)))
    same = lambda a, b: np.array_equal(to_host(a), to_host(b))
    assert same(rmsnorm_fwd(x, w, EPS)[0], rmsnorm_fwd(x.copy(), w, EPS)[0])
    assert same(rmsnorm_bwd(dy, x, w, rstd, dw1), rmsnorm_bwd(dy.copy(), x.copy(), w, rstd, dw2))
    assert same(dw1, dw2)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch, dtype):
    x, w, dy, dw0 = map(to_kernel, case(3, 264, dtype=dtype))
    with sentinels(monkeypatch):
        y, rstd = rmsnorm_fwd(x, w, EPS)
        dx = rmsnorm_bwd(dy, x, w, rstd, dw0.copy())
    dw1, dw2 = dw0.copy(), dw0.copy()
    dx1, dx2 = rmsnorm_bwd(dy, x, w, rstd, dw1), rmsnorm_bwd(dy, x, w, rstd, dw2)
    assert np.array_equal(to_host(dx), to_host(dx1)) and np.array_equal(to_host(dx1), to_host(dx2))
    assert np.array_equal(to_host(dw1), to_host(dw2))
    assert np.array_equal(to_host(y), to_host(rmsnorm_fwd(x, w, EPS)[0]))


@pytest.mark.parametrize("N", [0, 5])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_dw_that_is_set(N, dtype):
    """The bits of the sum from zero, rounded once; what dw was before does not matter."""
    x, w, dy, _ = case(N, 37, dtype=dtype)
    for place in (np.array, to_kernel):
        inputs = [place(a) for a in (dy, x, w, np.ones(N, np.float32))]
        zero, dw = place(np.zeros(37, np.float32)), place(np.full(37, np.nan, dtype))
        dx = rmsnorm_bwd(*inputs, zero)
        assert np.array_equal(to_host(dx), to_host(rmsnorm_bwd(*inputs, dw, add=False)))
        assert np.array_equal(to_host(dw), to_host(zero).astype(dtype))
    with pytest.raises(TypeError, match="dw is bfloat16"):
        rmsnorm_bwd(dy, x, w, np.ones(N, np.float32), np.zeros(37, BF16))


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
    with pytest.raises(TypeError, match="on one device"):
        rmsnorm_fwd(to_kernel(x), w, EPS)
    with pytest.raises(TypeError, match="dy is int32, expected float32 or bfloat16"):
        rmsnorm_bwd(x.astype(np.int32), x, w, w[:2], w)
    for rows in (np.ones((2, 0), np.float32), to_kernel(np.ones((2, 0), np.float32))):
        with pytest.raises(ValueError, match="rows of 0 columns have no mean"):
            rmsnorm_fwd(rows, rows[0], EPS)
        with pytest.raises(ValueError, match="rows of 0 columns have no mean"):
            rmsnorm_bwd(rows, rows, rows[0], rows[:, :0].sum(1), rows[0])
    with pytest.raises(ValueError, match="32776 columns are too wide: at most 32768 are supported"):
        rmsnorm_fwd(*(to_kernel(np.ones(s, np.float32)) for s in ((1, 32776), 32776)), EPS)


@pytest.mark.parametrize("each", [4, 8])
@pytest.mark.parametrize("columns", [24, 32])
def test_row_plans_cover_the_row_and_fit_a_block(columns, each):
    for C in [*range(1, 2000, 7), 4096, 20000, 24577, 32768]:
        plan = row_plan(C, each, 8, columns)
        assert plan.THREADS <= 1024 and plan.STEPS * each <= 32
        assert 32 * plan.W * plan.STEPS * each >= C
        assert (8 if plan.W == 1 else 1) == plan.R
