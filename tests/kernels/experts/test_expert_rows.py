"""Rows in the order of experts: gather, sum and weighted SwiGLU; references against calculus, kernels against them."""

import ml_dtypes
import numpy as np
import pytest
from checks import (
    GPU,
    assert_as_good,
    assert_bug_is_found,
    assert_directional,
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
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.experts import expert_order, expert_rows, expert_swiglu
from xtrain.kernels.experts.expert_order import ExpertOrder, expert_order_ref
from xtrain.kernels.experts.expert_rows import gather_rows, gather_rows_ref, sum_rows, sum_rows_ref
from xtrain.kernels.experts.expert_swiglu import WIDE

BF16 = ml_dtypes.bfloat16
TILE = 128 if GPU else 8  # slots
SHAPES = [(1, 1, 2, 1), (9, 2, 5, 8), (4, 3, 3, 37), (2, 2, 2, WIDE + 8)]  # N, K, E, C or F
SHAPES += [(5000, 8, 128, 768)] * GPU


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Fewer slots: the simulator runs every thread."""
    files = (expert_order, expert_rows, expert_swiglu)
    makers = [m for file in files for m in vars(file).values() if hasattr(m, "cache_clear")]
    with pytest.MonkeyPatch.context() as patch:
        for file in files:
            patch.setattr(file, "TILE", TILE)
        for maker in makers:
            maker.cache_clear()
        yield
    for maker in makers:
        maker.cache_clear()


def order_of(N, K, E, seed=0):
    scores = rng(seed, N, K, E).random((N, E))
    return expert_order_ref(int32(np.argsort(-scores, 1)[:, :K]).reshape(N, K), E)


def on_device(order):
    return ExpertOrder(*map(to_kernel, order))


def used_rows(order):
    """-> which slots are in tiles of experts: only they are written"""
    return np.repeat(order.experts_T >= 0, TILE)


def test_references_against_calculus():
    order = order_of(5, 2, 3)
    x, dy = normal(1, 5, 4, dtype=np.float64), normal(2, order.pairs_M.size, 4, dtype=np.float64)
    f = lambda x: float((gather_rows_ref(x, order.pairs_M, 2) * dy).sum())
    dy[order.pairs_M < 0] = 7  # of padding: it reaches nothing
    assert_directional(f, (x,), (sum_rows_ref(dy, order.slots_NK),))
    gu, w = normal(3, order.pairs_M.size, 6, dtype=np.float64), normal(4, 5, 2, dtype=np.float64)
    g = normal(5, order.pairs_M.size, 3, dtype=np.float64)
    swiglu = lambda gu, w: expert_swiglu.expert_swiglu_ref(gu, w, order.pairs_M)
    f = lambda gu, w: float((swiglu(gu, w) * g).sum())
    dgu, dw, y = expert_swiglu.expert_swiglu_bwd_ref(g, gu, w, order.pairs_M)
    assert_directional(f, (gu, w), (dgu, dw))
    assert np.array_equal(y, swiglu(gu, w))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape, dtype):
    check_rows(*shape, dtype)
    check_swiglu(*shape, dtype)


@settings(max_examples=3 if GPU else 5)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(3, 9), st.integers(1, 70))
def test_kernels_for_any_shape(N, K, E, C):
    check_rows(N, K, E, C, np.float32)
    check_swiglu(N, K, E, C, np.float32)


def check_rows(N, K, E, C, dtype):
    order = order_of(N, K, E)
    used = used_rows(order)
    x = normal(1, N, C).astype(dtype)
    y = to_host(gather_rows(to_kernel(x), on_device(order)))
    assert same_bytes(y[used], gather_rows(x, order)[used])
    y = normal(2, order.pairs_M.size, C).astype(dtype)
    y[order.pairs_M < 0] = np.nan  # never read
    x = to_host(sum_rows(to_kernel(y), on_device(order)))
    assert same_bytes(x, sum_rows(y, order))


def check_swiglu(N, K, E, F, dtype):
    order = order_of(N, K, E)
    used, M = used_rows(order), order.pairs_M.size
    gu = normal(1, M, 2 * F, scale=2.0).astype(dtype)
    w = normal(2, N, K)
    g = normal(3, M, F)
    gu[order.pairs_M < 0] = g[order.pairs_M < 0] = 0  # as the products leave it
    g = g.astype(dtype)
    at = on_device(order)
    y = expert_swiglu.expert_swiglu(to_kernel(gu), to_kernel(w), at)
    wide = gu.astype(np.float32), w, order.pairs_M
    exact = expert_swiglu.expert_swiglu_ref(*double(*wide[:2]), order.pairs_M)
    single = expert_swiglu.expert_swiglu_ref(*wide).astype(dtype)
    assert_as_good(to_host(y)[used], exact[used], single[used], floor=4e-7, what="y")
    given = to_kernel(g)
    dgu, dw = expert_swiglu.expert_swiglu_bwd(given, to_kernel(gu), to_kernel(w), at)
    assert same_bytes(to_host(given)[used], to_host(y)[used]), "y again, the same bits"
    exact = expert_swiglu.expert_swiglu_bwd_ref(
        *double(g.astype(np.float32), *wide[:2]), order.pairs_M
    )
    single = expert_swiglu.expert_swiglu_bwd_ref(g.astype(np.float32), *wide)
    rounded = single[0].astype(dtype)
    assert_as_good(to_host(dgu)[used], exact[0][used], rounded[used], floor=4e-7, what="dgu")
    assert_as_good(dw, exact[1], single[1], floor=4e-7, what="dw", scale=F**0.5)


def test_nothing_outside_the_outputs(monkeypatch):
    order = on_device(order_of(5, 2, 3))
    w = to_kernel(normal(1, 5, 2))
    with sentinels(monkeypatch):
        y = gather_rows(to_kernel(normal(1, 5, 6)), order)
    with sentinels(monkeypatch):
        sum_rows(y, order)
    with sentinels(monkeypatch):
        a = expert_swiglu.expert_swiglu(y, w, order)
    with sentinels(monkeypatch):
        expert_swiglu.expert_swiglu_bwd(a, y, w, order)


def test_a_pair_without_a_slot_is_nan():
    order = order_of(3, 2, 4)
    order.slots_NK[1, 1] = -1
    y = to_kernel(normal(1, order.pairs_M.size, 5))
    x = to_host(sum_rows(y, on_device(order)))
    assert np.isnan(x[1]).all() and not np.isnan(x[[0, 2]]).any()


def test_bad_input():
    order = order_of(3, 2, 4)
    M = order.pairs_M.size
    with pytest.raises(ValueError, match=r"x has shape \(2, 5\), expected \(3, any\)"):
        gather_rows(normal(1, 2, 5), order)
    with pytest.raises(ValueError, match=rf"y has shape \(6, 5\), expected \({M}, any\)"):
        sum_rows(normal(1, 6, 5), order)
    with pytest.raises(ValueError, match="gu has 5 columns, expected gate and up of equal width"):
        expert_swiglu.expert_swiglu(normal(1, M, 5), normal(1, 3, 2), order)
    with pytest.raises(ValueError, match=r"weights has shape \(3, 1\), expected \(3, 2\)"):
        expert_swiglu.expert_swiglu(normal(1, M, 6), normal(1, 3, 1), order)


@planted_bugs
@pytest.mark.parametrize(
    "file, name, old, new",
    [
        (expert_rows, "make_gather_rows_kernel", "int64(pair // K)", "int64(pair)"),
        (expert_rows, "make_gather_rows_kernel", "if pair < 0:", "if pair < -1:"),
        (expert_rows, "make_gather_rows_kernel", "experts_T[m // TILE] < 0", "experts_T[m // TILE] < 1"),
        (expert_rows, "make_sum_rows_kernel", "row[j] if k == 0 else acc[j] + row[j]", "row[j]"),
        (expert_rows, "make_sum_rows_kernel", "slot = slots_NK[n, k]", "slot = slots_NK[n, 0] + k"),
        (expert_swiglu, "make_expert_swiglu_kernel", "if pair >= 0 else float32(0.0)", "if pair >= 0 else float32(np.nan)"),
        (expert_swiglu, "make_expert_swiglu_kernel", "(BODY, F, WIDE)", "(BODY, F - CHUNK, WIDE)"),
        (expert_swiglu, "make_expert_swiglu_bwd_kernel", "dw += d[j] * a", "dw = d[j] * a"),
        (expert_swiglu, "make_expert_swiglu_bwd_kernel", "dw = warp_sum(dw)", "dw = dw"),
        (expert_swiglu, "make_expert_swiglu_bwd_kernel", "d[j] = a * w", "d[j] = a"),
        (expert_swiglu, "make_expert_swiglu_bwd_kernel", "weights_P[pair] if", "weights_P[pair // 2] if"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(file, name, old, new):
    assert_bug_is_found(check_some_shapes, [file], name, old, new)


def check_some_shapes():
    for shape in SHAPES[1:3]:
        check_rows(*shape, np.float32)
        check_swiglu(*shape, np.float32)
