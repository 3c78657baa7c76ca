"""The experts of a few rows: the reference against grouped products, the kernels against the reference, planted bugs."""

import contextlib
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from checks import (
    GPU,
    assert_as_good,
    assert_bug_is_found,
    double,
    int32,
    normal,
    planted_bugs,
    rng,
    same_bytes,
    sentinels,
    to_host,
    to_kernel,
)

from xtrain.kernels.experts import expert_gemv as file
from xtrain.kernels.experts.expert_gemv import WIDE, expert_gemv, expert_gemv_ref
from xtrain.kernels.experts.expert_order import expert_order
from xtrain.kernels.experts.expert_rows import gather_rows, sum_rows
from xtrain.kernels.experts.expert_swiglu import expert_swiglu
from xtrain.kernels.experts.grouped_product import grouped_product

BF16 = ml_dtypes.bfloat16
SHAPES = [(1, 1, 1, 8, 8), (2, 2, 4, 24, 16), (1, 2, 3, 8, WIDE + 8), (1, 1, 2, WIDE + 8, 8)]
SHAPES += [(1, 22, 24, 8, 8)]  # several warps for a sum; the last has fewer steps than the others
SHAPES += [
    (8, 8, 32, 2048, 768),
    (1, 2, 16, 1024, 2048),
    (1, 2, 2, 512, 14336),
] * GPU  # N, K, E, C, F


def case(N, K, E, C, F, dtype=np.float32):
    """-> x, weights, experts, gate_up, down"""
    experts = np.argsort(rng(N, E).random((N, E)), 1)[:, :K]
    arrays = normal(1, N, C), normal(2, N, K), normal(3, E, 2 * F, C), normal(4, E, C, F)
    x, w, gate_up, down = arrays
    scale = np.float32((4 * C) ** -0.5)
    return x.astype(dtype), w, int32(experts), (gate_up * scale).astype(dtype), down.astype(dtype)


def test_reference_is_that_of_grouped_products():
    x, w, experts, gate_up, down = case(5, 2, 4, 6, 3, np.float64)
    order = expert_order(experts, 4)
    a = expert_swiglu(grouped_product(gather_rows(x, order), gate_up, order), w, order)
    want = sum_rows(grouped_product(a, down, order), order)
    np.testing.assert_allclose(expert_gemv(x, w, experts, gate_up, down), want, rtol=1e-12)


@contextlib.contextmanager
def fewer_in_flight():
    """With half of the registers for loads: a warp has several rounds at small shapes."""
    kernels = file.make_gate_up_kernel, file.make_down_kernel
    with mock.patch.object(file, "WORDS", 16):
        for make in kernels:
            make.cache_clear()
        yield
    for make in kernels:
        make.cache_clear()


def test_several_rounds():
    with fewer_in_flight():
        for shape in SHAPES[3:5]:
            check_kernels(shape, np.float32)


def check_kernels(shape, dtype):
    given = case(*shape, dtype)
    x, w, experts, gate_up, down = given
    y = expert_gemv(*map(to_kernel, given), weights_ready=True)
    single = [a.astype(np.float32) for a in (x, w, gate_up, down)]
    wide = double(*single)
    exact = expert_gemv_ref(*wide[:2], experts, *wide[2:])
    rounded = expert_gemv_ref(*single[:2], experts, *single[2:]).astype(dtype)
    # a is rounded to bf16, too
    assert_as_good(y, exact, rounded, floor=1e-6 if dtype == np.float32 else 4e-3, what="y")
    return to_host(y)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape, dtype):
    if GPU or dtype == np.float32 or shape[4] < WIDE:  # the widest rows once
        check_kernels(shape, dtype)


def test_a_row_does_not_depend_on_the_others_and_nothing_outside_is_written(monkeypatch):
    x, w, experts, gate_up, down = case(3, 2, 5, 8, 16, BF16)
    with sentinels(monkeypatch):
        y = to_host(expert_gemv(*map(to_kernel, (x, w, experts, gate_up, down))))
    for n in range(3):
        one = [a[n : n + 1].copy() for a in (x, w, experts)]
        assert same_bytes(y[n], to_host(expert_gemv(*map(to_kernel, (*one, gate_up, down))))[0])


def test_bad_input():
    x, w, experts, gate_up, down = map(to_kernel, case(2, 2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"gate_up has shape \(3, 8, 8\), expected \(3, 16, 8\)"):
        expert_gemv(x, w, experts, down, down)
    with pytest.raises(TypeError, match="down is bfloat16"):
        expert_gemv(x, w, experts, gate_up, to_kernel(to_host(down).astype(BF16)))
    many = map(to_kernel, case(9, 2, 3, 8, 8))
    with pytest.raises(
        ValueError, match="9 rows of 8 with 8, supported are 1 to 8, of multiples of 8, C to 8192"
    ):
        expert_gemv(*many)


@planted_bugs
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("make_gate_up_kernel", "int64(pair // K) * C, c", "int64(pair) * C, c"),
        ("make_gate_up_kernel", "* (2 * F) + f", "* F + f"),
        ("make_gate_up_kernel", "c, C)", "c, ALL)"),
        ("make_gate_up_kernel", "                cuda.syncthreads()", "                pass"),
        ("make_gate_up_kernel", "x_s, first + s * WIDE", "x_s, s * WIDE"),
        ("make_gate_up_kernel", "* weights_P[pair]", "* weights_P[0]"),
        ("make_down_kernel", "experts_P[n * K + step // STEPS]", "experts_P[n * K]"),
        ("make_down_kernel", "F if own < EACH and step < ALL else 0", "F if own < EACH else 0"),
        ("make_down_kernel", "F if own < EACH and step < ALL else 0", "F if step < ALL else 0"),
        ("make_down_kernel", "n, c, part * EACH)", "n, c, part)"),
        ("make_down_kernel", "range(1, PARTS)", "range(2, PARTS)"),
        ("make_down_kernel", "cuda.syncthreads()  # a of the steps", "pass  # a of the steps"),
        ("make_down_kernel", "cuda.syncthreads()  # a is in", "pass  # a is in"),
        ("make_down_kernel", "cuda.syncthreads()  # the sums", "pass  # the sums"),
        ("make_down_kernel", "if overlap and ready:\n            wait_for_previous()", "if overlap and ready:\n            pass"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(name, old, new):
    assert_bug_is_found(check_some_shapes, [file], name, old, new)


def check_some_shapes():
    for shape in SHAPES[1:3]:
        check_kernels(shape, np.float32)
    with fewer_in_flight():
        for shape in SHAPES[3:5]:
            check_kernels(shape, np.float32)
