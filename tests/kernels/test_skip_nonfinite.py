"""Skipping a step: the kernel against its reference; AdamW then changes nothing."""

import itertools

import numpy as np
import pytest
from checks import normal, to_host, to_kernel

from xtrain.kernels.adamw import TILE, adamw, adamw_hyper
from xtrain.kernels.grad_norm import grad_norm
from xtrain.kernels.skip_nonfinite import skip_unless_finite

BAD = [np.nan, np.inf, -np.inf]


def decide(place, norm, losses, row, limit=3):
    """-> whether the step is skipped, the new number of consecutive bad steps"""
    factor, row = place(np.array([0.5], np.float32)), place(np.array([row], np.int32))
    skip_unless_finite(
        factor,
        row,
        place(np.atleast_1d(np.float32(norm))),
        place(np.array(losses, np.float32)),
        limit,
    )
    (factor,), (row,) = to_host(factor), to_host(row)
    assert np.isnan(factor) or factor == 0.5
    return bool(np.isnan(factor)), int(row)


@pytest.mark.parametrize("place", [np.array, to_kernel], ids=["reference", "kernel"])
def test_what_is_skipped(place):
    big = np.finfo(np.float32).max
    for good in ((1.0, [2.0]), (big, [-big, big]), (0.0, [0.0] * 5)):
        assert decide(place, *good, row=2) == (False, 0)
        assert decide(place, *good, row=3) == (True, 3), (
            "at the limit: the number stays, also after good steps"
        )
    for x in BAD:
        for norm, losses in ((x, [1.0]), (1.0, [x]), (1.0, [1.0, 2.0, x]), ([1.0, x], [1.0])):
            assert decide(place, norm, losses, row=0) == (True, 1)
            assert decide(place, norm, losses, row=2) == (True, 3)
            assert decide(place, norm, losses, row=3) == (True, 3)


@pytest.mark.parametrize("place", [np.array, to_kernel], ids=["reference", "kernel"])
@pytest.mark.parametrize("with_half, zero_grad", list(itertools.product([False, True], repeat=2)))
def test_adamw_skips(place, with_half, zero_grad):
    import ml_dtypes

    n = TILE + 5
    arrays = [place(normal(i, n)) for i in range(4)]
    half = place(normal(5, n).astype(ml_dtypes.bfloat16))
    before = [to_host(x).tobytes() for x in (*arrays, half)]
    hyper = place(adamw_hyper(1e-2, 0.9, 0.95, 3))
    adamw(
        *arrays, place(np.array([np.nan], np.float32)), hyper, n // 2, 0.9, 0.95, 1e-8, 0.1,
        half if with_half else None, zero_grad,
    )  # fmt: skip
    after = [to_host(x).tobytes() for x in (*arrays, half)]
    if zero_grad:
        assert not to_host(arrays[1]).any()
        before[1] = after[1]
    assert after == before


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_gradient_anywhere_is_seen(bad):
    for place in (np.array, to_kernel):
        for i in (0, 17, 999):
            g = normal(0, 1000)
            g[i] = bad
            stats = grad_norm(place(g), 1.0)
            row = place(np.zeros(1, np.int32))
            skip_unless_finite(stats[1:], row, stats[:1], place(np.ones(1, np.float32)), 3)
            assert np.isnan(to_host(stats)[1]) and to_host(row)[0] == 1


def test_refusals():
    one, row = np.ones(1, np.float32), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="limit is 0, expected 1 to 2147483647"):
        skip_unless_finite(one, row, one, one, 0)
    with pytest.raises(ValueError, match="factor has shape"):
        skip_unless_finite(np.ones(2, np.float32), row, one, one, 1)
    with pytest.raises(TypeError, match="consecutive is float32"):
        skip_unless_finite(one, one, one, one, 1)
