"""Addition, norm, router and choice of experts in one kernel: against the separate ops, planted bugs."""

import ml_dtypes
import numpy as np
import pytest
from checks import (
    GPU,
    assert_as_good,
    assert_bug_is_found,
    double,
    normal,
    planted_bugs,
    same_bytes,
    sentinels,
    to_host,
    to_kernel,
)

from xtrain.kernels.experts import expert_router as file
from xtrain.kernels.experts.expert_gemv import WIDE
from xtrain.kernels.experts.expert_router import WARPS, expert_router, expert_router_ref
from xtrain.kernels.experts.routing import routing_ref
from xtrain.kernels.residual import residual_rmsnorm_ref

BF16 = ml_dtypes.bfloat16
EPS = 1e-6
SHAPES = [(2, 8, 3, 1), (1, WIDE + 8, WARPS + 1, 4)]  # N, C, E, K
SHAPES += [(8, 2048, 128, 8), (1, 1024, 16, 2), (3, 8192, 64, 32)] * GPU


def case(N, C, E, K, dtype, added=True):
    x = normal(1, N, C)
    delta = normal(2, N, C).astype(dtype) if added else None
    gate = (normal(4, E, C) * np.float32(C**-0.5)).astype(dtype)
    return x, delta, normal(3, C, mean=1.0), gate


def run(arrays, *options, bias=None):
    given = (None if a is None else to_kernel(a) for a in arrays)
    bias = None if bias is None else to_kernel(bias)
    found = expert_router(*given, EPS, *options, bias, weights_ready=True)
    return [to_host(a) for a in found]


def test_reference_is_that_of_the_separate_ops():
    x, delta, w, gate = double(*case(5, 6, 4, 2, np.float32))
    h, n, experts, weights = expert_router_ref(x, delta, w, gate, EPS, 2, True)
    want_h, want_n, _ = residual_rmsnorm_ref(x, delta, w, EPS)
    want = routing_ref(want_n @ gate.T, 2, True)
    for got, exact in zip((h, n, experts, weights), (want_h, want_n, *want), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-12)


def check(shape, dtype, renormalized=True, added=True, biased=False):
    N, C, E, K = shape
    x, delta, w, gate = case(N, C, E, K, dtype, added)
    bias = normal(5, E, scale=0.1) if biased else None
    h, n, experts, weights = run((x, delta, w, gate), K, renormalized, bias=bias)
    wide = double(*(np.float32(a) for a in (x, x if delta is None else delta, w, gate)))
    given = wide[0], None if delta is None else wide[1], *wide[2:]
    exact = expert_router_ref(*given, EPS, K, renormalized, bias)
    single = expert_router_ref(x, delta, w, gate, EPS, K, renormalized, bias)
    assert_as_good(h, exact[0], single[0], what="h")
    assert_as_good(n, exact[1], single[1], floor=1e-6 if dtype == np.float32 else 4e-3, what="n")
    # the choice from the n that was written: rounding may change the order of close logits
    again = routing_ref(np.float64(n) @ wide[3].T, K, renormalized, bias)
    assert np.array_equal(experts, again[0])
    np.testing.assert_allclose(weights, again[1], rtol=2e-5)
    return h, n, experts, weights


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape, dtype):
    check(shape, dtype)


def test_options():
    check(SHAPES[0], BF16, renormalized=False, added=False)
    check(SHAPES[0], np.float32, biased=True)


def test_a_row_does_not_depend_on_the_others_and_nothing_outside_is_written(monkeypatch):
    x, delta, w, gate = case(3, 16, 5, 2, BF16)
    with sentinels(monkeypatch):
        whole = run((x, delta, w, gate), 2, True)
    one = run((x[1:2].copy(), delta[1:2].copy(), w, gate), 2, True)
    assert all(same_bytes(a[1:2], b) for a, b in zip(whole, one, strict=True))


def test_bad_input():
    x, delta, w, gate = map(to_kernel, case(9, 8, 3, 1, np.float32))
    with pytest.raises(ValueError, match="9 rows of 8 and 1 of 3 experts are not supported"):
        expert_router(x, delta, w, gate, EPS, 1)
    with pytest.raises(TypeError, match="delta is float32"):
        expert_router(x, delta, w, to_kernel(to_host(gate).astype(BF16)), EPS, 1)


@planted_bugs
@pytest.mark.parametrize(
    "old, new",
    [
        ("e if e < E else E - 1", "e"),
        ("if overlap and ready:\n            wait_for_previous()", "if overlap and ready:\n            pass"),
        ("h_OV[o, j] += four[j]", "h_OV[o, j] = four[j]"),
        ("rstd * four[j]", "rstd"),
        ("n_s[c] = KIND(0)", "pass"),
        ("cuda.syncthreads()  # n is", "pass  # n is"),
        ("if first + s < WIDE_STEPS:", "if first + s < WIDE_STEPS - 1:"),
        ("logits[row * E + e] = acc", "logits[e] = acc"),
        ("arrive_last(counters, row, BLOCKS, last_s)", "(cuda.blockIdx.x == 0)"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(old, new):
    assert_bug_is_found(check_some_shapes, [file], "make_router_kernel", old, new)


def check_some_shapes():
    for shape in SHAPES[:2]:
        check(shape, np.float32)
