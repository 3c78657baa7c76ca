"""QK-norm + RoPE from packed QKV: the reference against its two ops, calculus and PyTorch; the kernels against it."""

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
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from xtrain.kernels import qk_norm_rope
from xtrain.kernels.primitives import heads as _heads
from xtrain.kernels.qk_norm_rope import (
    PARTIALS,
    WARPS,
    qk_norm_rope_bwd,
    qk_norm_rope_bwd_ref,
    qk_norm_rope_fwd,
    qk_norm_rope_ref,
    values_of,
)
from xtrain.kernels.rmsnorm import rmsnorm_bwd_ref, rmsnorm_fwd
from xtrain.kernels.rope import rope_bwd, rope_fwd, rope_tables

EPS = 1e-6
BF16 = ml_dtypes.bfloat16
SHAPES = [  # N, H, G, D, T: the kernels for any width, the kernels in use, with several query heads per key head
    (1, 1, 1, 2, 1),
    (4, 2, 1, 8, 2),
    (3, 3, 1, 6, 3),
    (2, 1, 1, 74, 2),
    (2, 3, 2, 32, 2),
    (3, 1, 1, 16, 3),
    (2, WARPS, 2, 32, 1),
    (3, 2, 2, 64, 3),
    (2, 3, 1, 64, 2),
    (2, 1, 1, 128, 2),
    (1, 2, 1, 256, 1),
]
SHAPES += [(8192, 12, 4, 64, 256), (PARTIALS + 5, 24, 24, 32, 100)] if GPU else []


def case(N, H, G, D, T, scale=1.0, dtype=np.float32):
    """-> qkv, q_w, k_w, cos, sin"""
    qkv = normal(1, N, (H + 2 * G) * D, scale=scale).astype(dtype)
    return qkv, normal(2, D), normal(3, D), *rope_tables(D, T, 10000.0)


def upstream(N, H, G, D, dtype=np.float32):
    """-> dqkv, to which attention has already written dv; dq, dk"""
    dqkv = normal(6, N, (H + 2 * G) * D).astype(dtype)
    return [dqkv, *(normal(i, N, heads, D).astype(dtype) for i, heads in ((4, H), (5, G)))]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2, 1), (4, 2, 1, 8, 2), (3, 3, 3, 6, 3)])
def test_reference_against_calculus(shape, norm):
    N, H, G, D, T = shape
    *inputs, cos, sin = case(*shape)
    inputs = double(*inputs) if norm else [inputs[0].astype(np.float64), None, None]
    (dqkv, *outputs), positions = upstream(N, H, G, D, np.float64), np.arange(N) % T
    dv = values_of(dqkv, H, G, D).copy()
    forward = lambda *inputs: qk_norm_rope_ref(*inputs, cos, sin, H, G, positions, EPS)

    def f(qkv, *weights):
        y = *forward(qkv, *weights)[:2], values_of(qkv, H, G, D)
        return sum(float((a * da).sum()) for a, da in zip(y, (*outputs, dv)))

    rstd = forward(*inputs)[2]
    dw = qk_norm_rope_bwd_ref(dqkv, *outputs, *inputs, rstd, cos, sin, positions)
    assert_directional(f, inputs, (dqkv, *dw))


def test_equals_rmsnorm_and_rope():
    N, H, G, D, T = 6, 4, 2, 8, 3
    qkv, q_w, k_w, cos, sin = case(N, H, G, D, T)
    q, k, v, rstd = qk_norm_rope_fwd(qkv, q_w, k_w, cos, sin, H, G, T, EPS)
    dqkv, dq, dk = upstream(N, H, G, D)
    dv = values_of(dqkv, H, G, D).copy()
    dq_w, dk_w = np.zeros(D, np.float32), np.zeros(D, np.float32)
    qk_norm_rope_bwd(dqkv, dq, dk, qkv, q_w, k_w, rstd, cos, sin, H, G, T, dq_w, dk_w)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    columns = {"q": (0, H), "k": (H, H + G), "v": (H + G, H + 2 * G)}
    part = {
        name: (qkv[:, a * D : b * D], dqkv[:, a * D : b * D]) for name, (a, b) in columns.items()
    }
    for y, dy, w, dw, name in ((q, dq, q_w, dq_w, "q"), (k, dk, k_w, dk_w, "k")):
        x, dx = (p.reshape(-1, D) for p in part[name])
        u, r = rmsnorm_fwd(np.ascontiguousarray(x), w, EPS)
        close(y, rope_fwd(u.reshape(y.shape), cos, sin, T=T))
        du = rope_bwd(dy, cos, sin, T=T).reshape(-1, D)
        expected_dx, expected_dw = rmsnorm_bwd_ref(du, x, w, r)
        close(dx, expected_dx)
        close(dw, expected_dw)
    assert np.shares_memory(v, qkv) and np.array_equal(v.reshape(N, -1), part["v"][0])
    assert np.array_equal(dv.reshape(N, -1), part["v"][1])


@pairwise({"shape": SHAPES, "scale": [1.0, 1e4], "dtype": [np.float32, BF16]})
def test_forward_kernel(shape, scale, dtype):
    N, H, G, _, T = shape
    arrays = case(*shape, scale, dtype)
    got = qk_norm_rope_fwd(*map(to_kernel, arrays), H, G, T, EPS)
    p = np.arange(N) % T
    exact = qk_norm_rope_ref(*double(*arrays), H, G, p, EPS)
    reference = qk_norm_rope_ref(*single(*arrays), H, G, p, EPS)
    assert np.array_equal(to_host(got[2]), values_of(arrays[0], *shape[1:4]))
    for name, k, e, r in zip(("q", "k", "rstd"), (*got[:2], got[3]), exact, reference):
        kind = np.float32 if name == "rstd" else dtype
        assert to_host(k).dtype == kind
        assert_as_good(k, e, r.astype(kind), what=name)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_kernel(shape, dtype):
    check_backward(*shape, dtype)


@pytest.mark.parametrize("shape", [(7, 2, 1, 8, 7), (5, 5, 3, 6, 2), (19, 2, 1, 32, 5)])
def test_backward_kernel_with_more_tokens_than_blocks(shape, monkeypatch):
    monkeypatch.setattr(qk_norm_rope, "PARTIALS", 2)
    monkeypatch.setattr(qk_norm_rope, "MULTIPROCESSORS", 1)
    monkeypatch.setattr(qk_norm_rope, "BWD_THREADS", 32)
    monkeypatch.setattr(qk_norm_rope, "RESIDENT", {4: 1, 8: 1})
    qk_norm_rope.make_bwd_kernel.cache_clear()
    check_backward(*shape, np.float32)
    qk_norm_rope.make_bwd_kernel.cache_clear()


def test_backward_kernel_with_heads_in_several_blocks(monkeypatch):
    monkeypatch.setattr(_heads, "MAX_THREADS", 32)
    monkeypatch.setattr(_heads, "SPLIT_THREADS", 16)
    for make in (qk_norm_rope.make_fwd_kernel, qk_norm_rope.make_bwd_kernel):
        make.cache_clear()
    # Blocks of 4 heads: q | q | k k k v | v v.
    test_forward_kernel((3, 8, 3, 32, 3), 1.0, np.float32)
    check_backward(3, 8, 3, 32, 3, np.float32)
    for make in (qk_norm_rope.make_fwd_kernel, qk_norm_rope.make_bwd_kernel):
        make.cache_clear()


@pytest.mark.parametrize("D", [6, 32])  # the kernels for any width, the kernels in use
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_bf16_weights_and_gradients_that_are_set(D, dtype):
    """The bits that float32 weights give, and of the sums from zero, rounded once."""
    N, H, G, T = 3, 2, 1, 3
    qkv, *weights, cos, sin = case(N, H, G, D, T, dtype=dtype)
    weights = [w.astype(BF16) for w in weights]
    outputs = upstream(N, H, G, D, dtype)
    for place in (np.array, to_kernel):
        tables = [place(t) for t in (cos, sin)]
        results = []
        for kind in (np.float32, BF16):
            q_w, k_w = [place(w.astype(kind)) for w in weights]
            *qkv_parts, rstd = qk_norm_rope_fwd(place(qkv), q_w, k_w, *tables, H, G, T, EPS)
            dqkv, dq, dk = map(place, outputs)
            start = 0 if kind == np.float32 else np.nan
            sums = [place(np.full(D, start).astype(kind)) for _ in range(2)]
            norm = (place(qkv), q_w, k_w, rstd)
            add = kind == np.float32
            qk_norm_rope_bwd(dqkv, dq, dk, *norm, *tables, H, G, T, *sums, add=add)
            results.append([*map(to_host, (*qkv_parts, rstd, dqkv, *sums))])
        for expected, found in zip(*results, strict=True):
            assert np.array_equal(expected.astype(found.dtype), found)


def check_backward(N, H, G, D, T, dtype):
    qkv, q_w, k_w, cos, sin = case(N, H, G, D, T, dtype=dtype)
    outputs, before, p = upstream(N, H, G, D, dtype), normal(7, D), np.arange(N) % T
    rstd = qk_norm_rope_ref(*single(qkv), q_w, k_w, cos, sin, H, G, p, EPS)[2]
    dq_w, dk_w = to_kernel(before), to_kernel(before)
    inputs = (*outputs, qkv, q_w, k_w, rstd, cos, sin)
    dqkv, *rest = map(to_kernel, inputs)
    qk_norm_rope_bwd(dqkv, *rest, H, G, T, dq_w, dk_w)
    inputs64, inputs32 = double(*outputs, qkv, q_w, k_w), single(*inputs)
    rstd64 = qk_norm_rope_ref(*inputs64[3:], cos, sin, H, G, p, EPS)[2]
    exact = qk_norm_rope_bwd_ref(*inputs64, rstd64, cos, sin, p)
    reference = qk_norm_rope_bwd_ref(*inputs32, p)
    assert np.array_equal(values_of(to_host(dqkv), H, G, D), values_of(outputs[0], H, G, D))
    assert_as_good(dqkv, inputs64[0], inputs32[0].astype(dtype), what="dqkv")
    for name, k, e, r in zip(("dq_w", "dk_w"), (dq_w, dk_w), exact, reference):
        assert_as_good(k, e + before, r + before, what=name)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rows_that_begin_anywhere(dtype):
    """Arrays that are not 16-byte aligned use the kernels for any width: as accurate as from a copy."""
    N, H, G, D, T = 3, 2, 1, 32, 3
    qkv, *rest = case(N, H, G, D, T, dtype=dtype)
    whole = to_kernel(np.concatenate([np.zeros(1, dtype), qkv.ravel()]))
    rest, tolerance = [to_kernel(a) for a in rest], 2e-6 if dtype is np.float32 else 2e-2
    for given, copy in zip(*(
        qk_norm_rope_fwd(x, *rest, H, G, T, EPS) for x in (whole[1:].reshape(N, -1), to_kernel(qkv))
    )):  # fmt: skip
        given, copy = single(to_host(given), to_host(copy))
        np.testing.assert_allclose(given, copy, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(1, 1, 1, 2, 1), (4, 3, 1, 6, 2), (2, 9, 3, 32, 2)])
def test_without_norm(shape):
    N, H, G, D, T = shape
    qkv, _, _, cos, sin = case(*shape)
    outputs = upstream(N, H, G, D)
    x = qkv.reshape(N, H + 2 * G, D)
    for to in (np.array, to_kernel):
        c, s = to(cos), to(sin)
        q, k, v, rstd = qk_norm_rope_fwd(to(qkv), None, None, c, s, H, G, T, EPS)
        assert rstd is None and np.array_equal(to_host(v), x[:, H + G :])
        both = np.concatenate([to_host(q), to_host(k)], 1)
        np.testing.assert_allclose(both, rope_fwd(x[:, : H + G].copy(), cos, sin, T=T), atol=1e-6)
        dqkv, *rest = map(to, (*outputs, qkv))
        qk_norm_rope_bwd(dqkv, *rest, None, None, None, c, s, H, G, T, None, None)
        expected = [
            rope_bwd(outputs[1], cos, sin, T=T),
            rope_bwd(outputs[2], cos, sin, T=T),
            values_of(outputs[0], H, G, D),
        ]
        expected = np.concatenate(expected, 1).reshape(qkv.shape)
        np.testing.assert_allclose(to_host(dqkv), expected, atol=1e-6)


@pytest.mark.parametrize("D", [8, 32])
def test_given_positions(D):
    """A packed batch: tokens of sequences of different lengths, each with its position."""
    N, H, G = 5, 2, 1
    qkv, q_w, k_w, cos, sin = case(N, H, G, D, 9)
    outputs, positions = upstream(N, H, G, D), np.array([0, 1, 2, 0, 8], np.int32)
    for to in (np.array, to_kernel):
        arrays, p = [to(a) for a in (qkv, q_w, k_w, cos, sin)], to(positions)
        q, _, _, rstd = qk_norm_rope_fwd(*arrays, H, G, 0, EPS, p)
        dw = [to(np.zeros(D, np.float32)) for _ in range(2)]
        dqkv, *rest = map(to, outputs)
        qk_norm_rope_bwd(dqkv, *rest, *arrays[:3], rstd, *arrays[3:], H, G, 0, *dw, p)
        for n, at in enumerate(positions):
            one = [qkv[n : n + 1], q_w, k_w, cos[at : at + 1], sin[at : at + 1]]
            alone = qk_norm_rope_fwd(*one, H, G, 1, EPS)
            np.testing.assert_allclose(to_host(q)[n], alone[0][0], atol=1e-5)
            expected, *row = [d[n : n + 1].copy() for d in outputs]
            unused = np.zeros(D, np.float32), np.zeros(D, np.float32)
            qk_norm_rope_bwd(expected, *row, *one[:3], alone[3], *one[3:], H, G, 1, *unused)
            np.testing.assert_allclose(to_host(dqkv)[n], expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("D", [8, 10, 32])
def test_positions_outside_the_tables_on_a_gpu(D):
    """Only the kernel can check them: it reads nothing outside the tables, and q, k and their gradients are NaN."""
    N, H, G = 4, 2, 1
    qkv, q_w, k_w, cos, sin = case(N, H, G, D, 9)
    outputs, inside = upstream(N, H, G, D), np.array([True, False, False, True])
    results = []
    for positions in ([8, 9, -1, 0], [8, 0, 0, 0]):
        arrays, p = (
            [to_kernel(a) for a in (qkv, q_w, k_w, cos, sin)],
            to_kernel(np.int32(positions)),
        )
        q, k, _, rstd = qk_norm_rope_fwd(*arrays, H, G, 0, EPS, p)
        dw = [to_kernel(np.zeros(D, np.float32)) for _ in range(2)]
        dqkv, *rest = map(to_kernel, outputs)
        qk_norm_rope_bwd(dqkv, *rest, *arrays[:3], rstd, *arrays[3:], H, G, 0, *dw, p)
        results.append([to_host(x) for x in (q, k, dqkv[:, : (H + G) * D].reshape(N, -1, D))])
    for got, want in zip(*results):
        assert np.array_equal(got[inside], want[inside])
        assert np.isnan(got[~inside]).all()


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", [(3, 7, 2, 10, 3), (3, 4, 2, 16, 3)])
def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch, shape, dtype):
    N, H, G, D, T = shape
    qkv, q_w, k_w, cos, sin = map(to_kernel, case(N, H, G, D, T, dtype=dtype))
    results = []
    for _ in range(2):
        dqkv, dq, dk = (to_kernel(d) for d in upstream(N, H, G, D, dtype))
        dq_w, dk_w = to_kernel(normal(7, D)), to_kernel(normal(8, D))
        with sentinels(monkeypatch):
            q, k, v, rstd = qk_norm_rope_fwd(qkv, q_w, k_w, cos, sin, H, G, T, EPS)
            qk_norm_rope_bwd(dqkv, dq, dk, qkv, q_w, k_w, rstd, cos, sin, H, G, T, dq_w, dk_w)
        results.append([to_host(a) for a in (q, k, v, rstd, dqkv, dq_w, dk_w)])
    assert all(np.array_equal(a, b) for a, b in zip(*results))


def test_against_pytorch():
    B, T, H, G, D = 2, 5, 4, 2, 16
    N = B * T
    qkv, q_w, k_w, cos, sin = case(N, H, G, D, T)
    outputs = upstream(N, H, G, D)
    tqkv, tq_w, tk_w = (torch.tensor(a, requires_grad=True) for a in (qkv, q_w, k_w))
    tq, tk, tv = tqkv.view(B, T, -1, D).split([H, G, G], dim=2)
    tq, tk = (torch.nn.functional.rms_norm(x, (D,), w, EPS) for x, w in ((tq, tq_w), (tk, tk_w)))
    tables = [torch.tensor(np.concatenate([t, t], 1))[None] for t in (cos, sin)]
    ty = (*apply_rotary_pos_emb(tq, tk, *tables, unsqueeze_dim=2), tv)
    dqkv, *dqk = outputs
    dy = *dqk, values_of(dqkv, H, G, D).copy()
    sum((y * torch.tensor(d).view(y.shape)).sum() for y, d in zip(ty, dy)).backward()
    *y, rstd = qk_norm_rope_fwd(qkv, q_w, k_w, cos, sin, H, G, T, EPS)
    dw = [np.zeros(D, np.float32) for _ in range(2)]
    qk_norm_rope_bwd(dqkv, *dqk, qkv, q_w, k_w, rstd, cos, sin, H, G, T, *dw)
    pairs = [*zip(y, ty), (dqkv, tqkv.grad), (dw[0], tq_w.grad), (dw[1], tk_w.grad)]
    for ours, theirs in pairs:
        theirs = theirs.detach().numpy().reshape(ours.shape)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("D", [8, 16])
def test_no_rows(D):
    H, G = 2, 1
    arrays = case(0, H, G, D, 4)
    for to in (np.array, to_kernel):
        given = [to(a) for a in arrays]
        q, k, v, rstd = qk_norm_rope_fwd(*given, H, G, 4, EPS)
        assert q.shape == (0, H, D) and k.shape == v.shape == (0, G, D) and rstd.shape == (0, 3)
        dw = [to(np.ones(D, np.float32)) for _ in range(2)]
        qk_norm_rope_bwd(to(arrays[0]), q, k, *given[:3], rstd, *given[3:], H, G, 4, *dw)
        assert all((to_host(d) == 1).all() for d in dw)


def test_bad_input():
    N, H, G, D, T = 4, 2, 1, 8, 2
    qkv, q_w, k_w, cos, sin = case(N, H, G, D, T)
    fwd = lambda *arrays, T=T, **more: qk_norm_rope_fwd(*arrays, H, G, T, EPS, **more)
    with pytest.raises(ValueError, match=r"qkv has shape \(4, 31\), expected \(any, 32\)"):
        fwd(qkv[:, :31].copy(), q_w, k_w, cos, sin)
    with pytest.raises(ValueError, match=r"k_w has shape \(7,\), expected \(8\)"):
        fwd(qkv, q_w, k_w[:7], cos, sin)
    with pytest.raises(ValueError, match="both norm weights or none"):
        fwd(qkv, q_w, None, cos, sin)
    with pytest.raises(ValueError, match="T = 3 positions, the tables hold 2"):
        fwd(qkv, q_w, k_w, cos, sin, T=3)
    with pytest.raises(ValueError, match="positions 0 to 2, the tables hold 0 to 1"):
        fwd(qkv, q_w, k_w, cos, sin, positions_N=np.array([0, 1, 2, 0]))
    with pytest.raises(ValueError, match="head width 258, expected 2 to 256"):
        qk_norm_rope_fwd(*case(1, 1, 1, 258, 1), 1, 1, 1, EPS)
    with pytest.raises(ValueError, match="head width 0, expected 2 to 256"):
        qk_norm_rope_fwd(*case(1, 1, 1, 0, 1), 2**31, 1, 1, EPS)
    with pytest.raises(ValueError, match="10 query heads and -1 key heads, expected at least one"):
        qk_norm_rope_fwd(qkv, q_w, k_w, cos, sin, 10, -1, T, EPS)
    with pytest.raises(ValueError, match=r"cos has shape \(8,\), expected \(any, any\)"):
        fwd(qkv, q_w, k_w, cos.ravel(), sin)
    with pytest.raises(TypeError, match="qkv is float16"):
        fwd(qkv.astype(np.float16), q_w, k_w, cos, sin)
    with pytest.raises(TypeError, match="on one device"):
        fwd(to_kernel(qkv), q_w, k_w, to_kernel(cos), to_kernel(sin))
    dqkv, dq, dk = upstream(N, H, G, D)
    rstd, dw = fwd(qkv, q_w, k_w, cos, sin)[3], np.zeros(D, np.float32)
    with pytest.raises(ValueError, match=r"dk has shape \(4, 2, 8\), expected \(4, 1, 8\)"):
        qk_norm_rope_bwd(dqkv, dq, dq, qkv, q_w, k_w, rstd, cos, sin, H, G, T, dw, dw)
    with pytest.raises(ValueError, match=r"dqkv has shape \(3, 32\), expected \(4, 32\)"):
        qk_norm_rope_bwd(dqkv[:3], dq, dk, qkv, q_w, k_w, rstd, cos, sin, H, G, T, dw, dw)
