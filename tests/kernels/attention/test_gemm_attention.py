"""GEMM attention against a naive float64 attention, finite differences and PyTorch."""

import numpy as np
import pytest
import torch
from checks import GPU, assert_as_good, assert_directional, normal, to_host, to_kernel

from xtrain.kernels.attention.flash_attention import flash_attention_bwd_ref, flash_attention_ref
from xtrain.kernels.attention.gemm_attention import attention_bwd, attention_fwd
from xtrain.kernels.attention.key_bounds import UNBOUNDED, KeyBounds, document_bounds
from xtrain.nn import functional as F
from xtrain.nn.tensor import Tensor

# B, T, S, H, G, D: one token, odd lengths, more keys than queries, grouped queries of every kind
SHAPES = [
    (1, 1, 1, 1, 1, 2), (2, 3, 3, 2, 2, 4), (2, 5, 5, 4, 2, 6), (1, 7, 7, 3, 1, 8), (2, 1, 6, 4, 2, 4), (3, 4, 9, 6, 3, 2),
]  # fmt: skip
LARGE = [(4, 256, 256, 12, 12, 32), (2, 129, 300, 8, 2, 64), (1, 1, 1500, 4, 1, 128)] if GPU else []
NUMPY = [*SHAPES, (2, 33, 33, 4, 2, 16), (2, 33, 40, 4, 1, 16)]


def case(B, T, S, H, G, D, dtype=np.float32):
    shapes = (B, T, H, D), (B, S, G, D), (B, S, G, D), (B, T, H, D)
    return [normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]  # q, k, v, do


def naive(q, k, v, scale, causal):
    """One line per step; query head h uses key head h // (H / G)."""
    T, H, S, G = *q.shape[1:3], *k.shape[1:3]
    k, v = (np.repeat(x, H // G, axis=2) for x in (k, v))
    s = np.einsum("bthd,bshd->bhts", q, k) * scale
    if causal:
        t, past = np.arange(T)[:, None], S - T
        s = np.where(np.arange(S) <= t + past, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", p, v)


def gradients(q, k, v, do, scale, causal, bounds=UNBOUNDED):
    o, saved = attention_fwd(q, k, v, scale, causal, bounds)
    return o, *attention_bwd(do, saved, scale, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", NUMPY)
def test_reference_against_the_naive_one(shape, causal):
    q, k, v, _ = case(*shape, dtype=np.float64)
    o, _ = attention_fwd(q, k, v, 0.3, causal)
    np.testing.assert_allclose(o, naive(q, k, v, 0.3, causal), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", NUMPY)
def test_reference_against_calculus(shape, causal):
    """The left side differentiates the naive forward: it uses nothing of the library."""
    q, k, v, do = case(*shape, dtype=np.float64)
    f = lambda q, k, v: float((naive(q, k, v, 0.3, causal) * do).sum())
    assert_directional(f, (q, k, v), gradients(q, k, v, do, 0.3, causal)[1:])


@pytest.mark.long
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_kernels(shape, causal):
    arrays = case(*shape)
    scale = shape[-1] ** -0.5
    got = gradients(*map(to_kernel, arrays), scale, causal)
    exact = gradients(*(a.astype(np.float64) for a in arrays), scale, causal)
    for name, g, e, r in zip(
        ("o", "dq", "dk", "dv"), got, exact, gradients(*arrays, scale, causal)
    ):
        assert_as_good(g, e, r, floor=5e-7, what=name)


@pytest.mark.parametrize("window", [1, 4, "documents"])
def test_hidden_keys(window):
    """A window with more keys than queries, and documents: those of the reference of FlashAttention."""
    documents = window == "documents"
    B, T, S = (2, 7, 7) if documents else (2, 5, 9)
    bounds_of = lambda place: KeyBounds(window)
    if documents:
        starts = np.array([[0, 0, 2, 2, 2, 5, 5], [0, 0, 0, 0, 0, 0, 6]], np.int32)
        bounds_of = lambda place: document_bounds(place(starts))[0]
    arrays = case(B, T, S, 4, 2, 6)
    q, k, v, do = (a.astype(np.float64) for a in arrays)
    o, lse = flash_attention_ref(q, k, v, 0.4, True, bounds_of(np.array))
    exact = o, *flash_attention_bwd_ref(do, q, k, v, o, lse, 0.4, True, bounds_of(np.array))
    plain = gradients(*arrays, 0.4, True, bounds_of(np.array))
    got = gradients(*map(to_kernel, arrays), 0.4, True, bounds_of(to_kernel))
    for name, g, e, r in zip(("o", "dq", "dk", "dv"), got, exact, plain):
        assert_as_good(g, e, r, floor=5e-7, what=name)


def test_wide_heads_with_a_window_use_it():
    """Heads of 130: FlashAttention has no backward kernels for more than 128."""
    q, k, v, _ = (Tensor(to_kernel(a)) for a in case(1, 4, 4, 2, 1, 130))
    found = F.attention(q, k, v, 0.1, True, KeyBounds(2)).data
    q, k, v = (x.numpy() for x in (q, k, v))
    np.testing.assert_allclose(
        to_host(found), flash_attention_ref(q, k, v, 0.1, True, KeyBounds(2))[0], atol=1e-6
    )


def test_the_same_bits_twice():
    arrays = [to_kernel(a) for a in case(2, 5, 5, 4, 2, 6)]
    for a, b in zip(gradients(*arrays, 0.4, True), gradients(*arrays, 0.4, True)):
        assert np.array_equal(to_host(a), to_host(b))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", NUMPY)
def test_against_pytorch(shape, causal):
    arrays = case(*shape)
    T, S = shape[1:3]
    q, k, v = (torch.tensor(a).transpose(1, 2).requires_grad_() for a in arrays[:3])
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T) if causal else None
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    o.backward(torch.tensor(arrays[3]).transpose(1, 2))
    ours = gradients(*arrays, shape[-1] ** -0.5, causal)
    for name, mine, theirs in zip(("o", "dq", "dk", "dv"), ours, (o, q.grad, k.grad, v.grad)):
        theirs = theirs.detach().transpose(1, 2).numpy()
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6, err_msg=name)


def test_a_query_sees_no_later_key():
    q, k, v, _ = case(2, 6, 6, 4, 2, 4)
    before, _ = attention_fwd(q, k, v, 0.5)
    k[:, 4:], v[:, 4:] = 100, -7
    after, _ = attention_fwd(q, k, v, 0.5)
    assert np.array_equal(before[:, :4], after[:, :4]) and not np.allclose(before, after)


def test_batched_equals_looped():
    arrays = case(4, 9, 9, 6, 3, 8)
    together = gradients(*arrays, 0.3, True)
    for b in range(4):
        alone = gradients(*(a[b : b + 1] for a in arrays), 0.3, True)
        for x, y in zip(together, alone):
            np.testing.assert_allclose(x[b : b + 1], y, rtol=1e-5, atol=1e-6)


def test_large_scores_stay_finite():
    q, k, v, do = case(1, 5, 5, 2, 1, 4)
    results = gradients(
        to_kernel(q * 1e3), to_kernel(k * 1e3), to_kernel(v), to_kernel(do), 1.0, True
    )
    assert all(np.isfinite(to_host(x)).all() for x in results)


# ----------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "q, k, v",
    [
        ((2, 3, 4, 8), (2, 3, 3, 8), (2, 3, 3, 8)),  # 4 query heads, 3 key heads
        ((2, 3, 4, 8), (2, 3, 2, 6), (2, 3, 2, 6)),  # another head width
        ((2, 3, 4, 8), (1, 3, 2, 8), (1, 3, 2, 8)),  # another batch
        ((2, 3, 4, 8), (2, 3, 2, 8), (2, 4, 2, 8)),  # k and v differ
        ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8)),  # no key heads
    ],
)
def test_shapes_that_do_not_match(q, k, v):
    with pytest.raises(ValueError, match=r"the shapes do not match") as error:
        attention_fwd(*(np.zeros(s, np.float32) for s in (q, k, v)), 1.0)
    assert all(str(shape) in str(error.value) for shape in (q, k, v))


def test_fewer_keys_than_causal_queries():
    q, k = np.zeros((1, 3, 2, 4), np.float32), np.zeros((1, 2, 2, 4), np.float32)
    with pytest.raises(ValueError, match="3 causal queries need at least 3 keys, got 2"):
        attention_fwd(q, k, k, 1.0)
    assert attention_fwd(q, k, k, 1.0, causal=False)[0].shape == q.shape


@pytest.mark.parametrize("dtype", [np.float16, np.int32])
def test_other_dtypes(dtype):
    arrays = [a.astype(dtype) for a in case(1, 2, 2, 2, 2, 4)[:3]]
    with pytest.raises(TypeError, match=f"is {np.dtype(dtype)}, expected float32"):
        attention_fwd(*arrays, 1.0)
    with pytest.raises(TypeError, match=f"is {np.dtype(dtype)}, expected float32"):
        attention_fwd(*map(to_kernel, arrays), 1.0)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4, 2, 6), (2, 0, 3, 4, 2, 6), (2, 0, 0, 4, 2, 6), (2, 2, 3, 4, 2, 0), (2, 2, 3, 0, 2, 6)])  # fmt: skip
def test_nothing_to_attend_to_or_with(shape):
    """Axes of length 0 keep their shapes, forward and backward; queries without keys are refused."""
    q, k, v, do = case(*shape)
    got = gradients(q, k, v, do, 1.0, True)
    assert [x.shape for x in got] == [q.shape, q.shape, k.shape, v.shape]
    q, k, v, do = case(2, 3, 0, 4, 2, 6)
    with pytest.raises(ValueError, match="3 queries without keys"):
        attention_fwd(q, k, v, 1.0, causal=False)
