"""Routing to experts and the router's losses: references against calculus and PyTorch, kernels against references."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    assert_bug_is_found,
    assert_directional,
    double,
    int32,
    normal,
    planted_bugs,
    same_bytes,
    sentinels,
    to_host,
    to_kernel,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.experts import routing as file
from xtrain.kernels.experts.routing import (
    WARPS,
    router_loss,
    router_loss_bwd,
    router_loss_bwd_ref,
    router_loss_ref,
    routing,
    routing_bwd,
    routing_bwd_ref,
    routing_ref,
)

BF16 = ml_dtypes.bfloat16
SHAPES = [(1, 1, 1), (3, 4, 2), (WARPS + 1, 37, 5), (2, 130, 8)] + [(5000, 128, 8)] * GPU  # N, E, K
RENORMALIZED = pytest.mark.parametrize("renormalized", [False, True], ids=["plain", "renormalized"])


def counts_of(experts, E):
    return int32(np.bincount(experts.reshape(-1), minlength=E))


@RENORMALIZED
def test_reference_against_pytorch_and_calculus(renormalized):
    x, dw = normal(1, 6, 7, scale=2.0, dtype=np.float64), normal(2, 6, 3, dtype=np.float64)
    experts, weights = routing(x, 3, renormalized)
    p, chosen = torch.softmax(torch.tensor(x), -1).topk(3)
    want = p / p.sum(-1, keepdim=True) if renormalized else p
    assert np.array_equal(experts, chosen.numpy())
    np.testing.assert_allclose(weights, want.numpy(), rtol=1e-12)
    f = lambda x: float((routing_ref(x, 3, renormalized)[1] * dw).sum())
    assert_directional(f, (x,), (routing_bwd_ref(dw, x, experts, weights, renormalized),))


def test_the_losses_against_pytorch_and_calculus():
    """For one layer load_balancing_loss_func of transformers, and the mean of the squared log-sum-exp."""
    x = normal(1, 9, 5, scale=2.0, dtype=np.float64)
    counts = counts_of(routing(x, 2)[0], 5)
    theirs = torch.tensor(x, requires_grad=True)
    p = torch.softmax(theirs, -1)
    chosen = torch.nn.functional.one_hot(p.topk(2).indices, 5).double().mean(0)  # (K, E)
    loss = 0.3 * 5 * (chosen * p.mean(0)).sum()
    (loss + 0.2 * torch.logsumexp(theirs, -1).square().mean()).backward()
    assert router_loss(x, counts, 0.3, 0.0)[0] == pytest.approx(loss.item(), rel=1e-6)
    d = router_loss_bwd(np.ones(1), x, counts, 0.3, 0.2)
    np.testing.assert_allclose(d, theirs.grad.numpy(), rtol=1e-5, atol=1e-9)
    f = lambda x: 0.7 * float(router_loss_ref(x, counts, 0.3, 0.2)[0])
    assert_directional(f, (x,), (router_loss_bwd_ref(0.7, x, counts, 0.3, 0.2),))


@RENORMALIZED
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape, dtype, renormalized):
    check_kernels(*shape, dtype, renormalized)


@settings(max_examples=3 if GPU else 10)
@given(st.integers(1, 20), st.integers(1, 70), st.integers(1, 9), st.booleans())
def test_kernels_for_any_shape(N, E, K, renormalized):
    check_kernels(N, E, min(K, E), np.float32, renormalized)


@pytest.mark.parametrize("convert", [np.asarray, to_kernel], ids=["reference", "kernel"])
def test_weights_of_experts_without_any_probability_are_zeros(convert):
    """A bias chooses two experts whose probabilities are 0 in float32."""
    x = convert(np.float32([[0, 200, 0, 0], [1, 2, 3, 4]]))
    experts, weights = routing(x, 2, True, convert(np.float32([2, 0, 2, 0])))
    assert to_host(experts).tolist() == [[0, 2], [2, 0]]
    assert to_host(weights)[0].tolist() == [0, 0]
    np.testing.assert_allclose(to_host(weights)[1, 1], 1 / (1 + np.exp(2)), rtol=1e-6)
    dw = convert(np.ones((2, 2), np.float32))
    dx = to_host(routing_bwd(dw, x, experts, weights, True))
    assert dx[0].tolist() == [0, 0, 0, 0]


def check_kernels(N, E, K, dtype, renormalized):
    x, dw = normal(1, N, E, scale=2.0).astype(dtype), normal(2, N, K)
    given_x, wide_x = to_kernel(x), x.astype(np.float32)
    x64, dw64 = double(wide_x, dw)
    want, exact = routing_ref(x64, K, renormalized)
    experts, weights = routing(given_x, K, renormalized)
    assert np.array_equal(to_host(experts), want)
    assert_as_good(weights, exact, routing_ref(wide_x, K, renormalized)[1], what="weights")
    back = want, exact, renormalized
    dx = routing_bwd(to_kernel(dw), given_x, experts, weights, renormalized)
    assert to_host(dx).dtype == dtype
    exact = routing_bwd_ref(dw64, x64, *back)
    single = routing_bwd_ref(dw, wide_x, want, to_host(weights), renormalized).astype(dtype)
    assert_as_good(dx, exact, single, what="dx", scale=1)
    counts = counts_of(want, E)
    loss = router_loss(given_x, to_kernel(counts), 0.3, 0.2)
    single = router_loss_ref(wide_x, counts, 0.3, 0.2)
    assert_as_good(loss, router_loss_ref(x64, counts, 0.3, 0.2), single, what="loss")
    half = np.full(1, 0.5, np.float32)
    dx = router_loss_bwd(to_kernel(half), given_x, to_kernel(counts), 0.3, 0.2)
    exact = router_loss_bwd_ref(0.5, x64, counts, 0.3, 0.2)
    single = router_loss_bwd_ref(half, wide_x, counts, 0.3, 0.2).astype(dtype)
    assert_as_good(dx, exact, single, what="dx of the loss", scale=1e-1)


@pytest.mark.parametrize("to", [np.array, to_kernel], ids=["reference", "kernel"])
def test_ties_and_values_that_are_not_numbers(to):
    """Of equal scores the lower expert; NaN is the lowest score, and makes the weights NaN."""
    x = np.zeros((5, 40), np.float32)
    x[1, 33] = x[1, 3] = x[1, 39] = 1
    x[2], x[3, 2] = -np.inf, np.nan
    x[4], x[4, 7] = np.nan, 1
    with np.errstate(invalid="ignore"):
        experts, weights = (to_host(a) for a in routing(to(x), 3, True))
    assert experts.tolist() == [[0, 1, 2], [3, 33, 39], [0, 1, 2], [0, 1, 3], [7, 0, 1]]
    assert np.isnan(weights[2:]).all() and np.allclose(weights[:2], 1 / 3)


@pytest.mark.parametrize("to", [np.array, to_kernel], ids=["reference", "kernel"])
def test_the_bias_chooses_but_does_not_weight(to):
    x = np.log(np.float32([[0.5, 0.25, 0.15, 0.1]]))
    bias = np.float32([-0.4, 0, 0, 0.1])
    experts, weights = (to_host(a) for a in routing(to(x), 2, False, to(bias)))
    assert experts.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[0.25, 0.1]], rtol=1e-6)


def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch):
    x, dw = to_kernel(normal(1, 9, 33)), to_kernel(normal(2, 9, 4))
    half, results = to_kernel(np.full(1, 0.5, np.float32)), []
    for _ in range(2):
        with sentinels(monkeypatch):
            experts, weights = routing(x, 4)
            dx = routing_bwd(dw, x, experts, weights)
            counts = to_kernel(counts_of(to_host(experts), 33))
            more = router_loss(x, counts, 0.1, 0.1), router_loss_bwd(half, x, counts, 0.1, 0.1)
        results.append([to_host(a) for a in (experts, weights, dx, *more)])
    assert all(same_bytes(*pair) for pair in zip(*results))


def test_bad_input():
    x = normal(1, 2, 4)
    with pytest.raises(ValueError, match="5 of 4 experts for each token, 1 to 4 are supported"):
        routing(x, 5)
    with pytest.raises(ValueError, match="1025 experts, 1 to 1024 are supported"):
        routing(normal(1, 1, 1025), 2)
    with pytest.raises(TypeError, match="logits is int64"):
        routing(np.ones((2, 4), np.int64), 2)
    with pytest.raises(ValueError, match=r"counts has shape \(3,\), expected \(4\)"):
        router_loss(x, int32([1, 2, 1]), 0.1, 0.1)


@planted_bugs
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("make_softmax", "if e < E else NEG_INF", "if e <= E else NEG_INF"),
        ("make_softmax", "if cuda.laneid + 32 * s < E else float32(0.0)", "if cuda.laneid + 32 * s <= E else float32(1.0)"),
        ("make_choose", "other_expert < expert", "other_expert > expert"),
        ("make_choose", "free &= ~", "free |= "),
        ("make_choose", "or expert == NONE", "or False"),
        ("make_choose", "score if score == score else NEG_INF", "score"),
        ("make_choose", "own_p / total", "own_p"),
        ("make_choose", "or total == float32(0.0)", ""),
        ("make_routing_bwd_kernel", "u * (g - dot)", "u * g"),
        ("make_routing_bwd_kernel", "if not renormalized", "if renormalized"),
        ("make_router_loss_kernel", "lse * lse * z", "lse * z"),
        ("make_router_loss_bwd_kernel", "float32(2.0) * lse * z", "lse * z"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(name, old, new):
    assert_bug_is_found(check_most, [file], name, old, new)


def check_most():
    for renormalized in (False, True):
        check_kernels(3, 37, 4, np.float32, renormalized)
    test_ties_and_values_that_are_not_numbers(to_kernel)
    test_weights_of_experts_without_any_probability_are_zeros(to_kernel)
