"""Embedding: the reference against calculus and PyTorch, the kernels against the reference."""

import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    assert_directional,
    normal,
    rng,
    sentinels,
    to_host,
    to_kernel,
)

from xtrain.kernels._launch import launch
from xtrain.kernels.embedding import (
    BLOCK,
    COLUMNS,
    QUEUE,
    ROWS,
    WARPS,
    embedding_bwd,
    embedding_bwd_naive_kernel,
    embedding_bwd_ref,
    embedding_fwd,
    embedding_ref,
)

SHAPES = [(1, 1, 1), (3, 8, 5), (WARPS + 1, 37, ROWS + 3), (70, COLUMNS + 1, 10)]  # N, C, V
SHAPES += [(7, 4096, 300), (8192, 768, 50304)] if GPU else []


def case(N, C, V):
    """ids, w, dx, dw before; a tenth of the ids are the same, as in text."""
    ids = rng(1, N).integers(0, V, N)
    ids[rng(2, N).random(N) < 0.1] = V // 2
    return ids, normal(3, V, C), normal(4, N, C), normal(5, V, C)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 8, 5), (40, 3, 7)])
def test_reference_against_calculus(shape):
    ids, w, dx, _ = case(*shape)
    w, dx = w.astype(np.float64), dx.astype(np.float64)
    f = lambda w: float((embedding_ref(ids, w) * dx).sum())
    assert_directional(f, (w,), (embedding_bwd_ref(dx, ids, shape[2]),))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16, np.int8])
def test_forward_kernel_copies_exactly(dtype):
    for N, C, V in SHAPES:
        ids, w, *_ = case(N, C, V)
        if np.iinfo(dtype).max >= V:
            got = embedding_fwd(to_kernel(ids.astype(dtype)), to_kernel(w))
            assert np.array_equal(to_host(got), w[ids])


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_kernel(shape):
    ids, _, dx, dw0 = case(*shape)
    dw = to_kernel(dw0)
    assert embedding_bwd(to_kernel(dx), to_kernel(ids), dw) is None
    exact = embedding_bwd_ref(dx.astype(np.float64), ids, shape[2]) + dw0
    assert_as_good(dw, exact, embedding_bwd_ref(dx, ids, shape[2]) + dw0, what="dw")
    untouched = np.setdiff1d(np.arange(shape[2]), ids)
    assert np.array_equal(to_host(dw)[untouched], dw0[untouched])


def test_backward_adds_in_the_order_of_n():
    """More matches than the queue holds, most of them one token: still the reference's bits."""
    N, C, V = 2 * QUEUE + 77, 3, 2 * ROWS
    ids, dx = rng(1).integers(0, V, N).astype(np.int32), normal(2, N, C, scale=100.0)
    ids[rng(2).random(N) < 0.8] = 5
    want = embedding_bwd_ref(dx, ids, V)
    zero = np.zeros((V, C), np.float32)
    assert not np.array_equal(want, embedding_bwd_ref(dx[::-1], ids[::-1], V))  # order matters
    for _ in range(2):
        dw = to_kernel(zero)
        embedding_bwd(to_kernel(dx), to_kernel(ids), dw)
        assert np.array_equal(to_host(dw), want)


def test_naive_kernel_agrees_bit_for_bit():
    ids, _, dx, dw0 = case(30, 9, 5)
    dw, naive = to_kernel(dw0), to_kernel(dw0)
    embedding_bwd(to_kernel(dx), to_kernel(ids), dw)
    grid = (5, -(-9 // BLOCK))
    launch(embedding_bwd_naive_kernel, grid, BLOCK, naive, to_kernel(dx), to_kernel(ids))
    assert np.array_equal(to_host(dw), to_host(naive))


@pytest.mark.parametrize("bad", [-1, ROWS - 3, ROWS, 1 << 40, -(1 << 32)])
def test_an_id_outside_the_table(bad):
    """The CPU says which; a kernel cannot, so it is loud in forward and harmless in backward."""
    V = ROWS - 3  # the last block owns rows past the end
    ids, w, dx, dw0 = case(6, 4, V)
    ids[2] = bad
    message = f"id {bad} at position 2 is outside the table of {V} rows"
    with pytest.raises(ValueError, match=message):
        embedding_fwd(ids, w)
    with pytest.raises(ValueError, match=message):
        embedding_bwd(dx, ids, dw0.copy())
    x = to_host(embedding_fwd(to_kernel(ids), to_kernel(w)))
    good = np.arange(6) != 2
    assert np.isnan(x[2]).all() and np.array_equal(x[good], w[ids[good]])
    dw, want = to_kernel(dw0), to_kernel(dw0)
    embedding_bwd(to_kernel(dx), to_kernel(ids), dw)
    embedding_bwd(to_kernel(dx[good]), to_kernel(ids[good]), want)
    assert np.array_equal(to_host(dw), to_host(want))


def test_nothing_outside_the_outputs(monkeypatch):
    ids, w, dx, _ = case(9, 5, 7)
    with sentinels(monkeypatch):
        embedding_fwd(to_kernel(ids), to_kernel(w))
    whole = to_kernel(np.full((7 + 4, 5), 7.0, np.float32))
    embedding_bwd(to_kernel(dx), to_kernel(ids), whole[2:-2])
    assert (to_host(whole)[:2] == 7).all() and (to_host(whole)[-2:] == 7).all()


def test_against_pytorch():
    ids, w, dx, _ = case(50, 6, 9)
    tw = torch.tensor(w, requires_grad=True)
    tx = torch.nn.functional.embedding(torch.tensor(ids), tw)
    tx.backward(torch.tensor(dx))
    dw = np.zeros_like(w)
    embedding_bwd(dx, ids, dw)
    assert np.array_equal(embedding_fwd(ids, w), tx.detach().numpy())
    np.testing.assert_allclose(dw, tw.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_no_ids():
    ids, w = to_kernel(np.zeros(0, np.int64)), to_kernel(normal(1, 5, 4))
    assert embedding_fwd(ids, w).shape == (0, 4)
    dw = to_kernel(np.ones((5, 4), np.float32))
    embedding_bwd(embedding_fwd(ids, w), ids, dw)
    assert (to_host(dw) == 1).all()


def test_bad_input():
    ids, w = np.zeros(3, np.int64), np.ones((5, 4), np.float32)
    with pytest.raises(ValueError, match="ids must hold whole numbers, got float32"):
        embedding_fwd(ids.astype(np.float32), w)
    with pytest.raises(ValueError, match=r"ids has shape \(1, 3\), expected \(any\)"):
        embedding_fwd(ids.reshape(1, 3), w)
    with pytest.raises(TypeError, match="w is int64"):
        embedding_fwd(ids, w.astype(np.int64))
    with pytest.raises(ValueError, match=r"dx has shape \(2, 4\), expected \(3, 4\)"):
        embedding_bwd(w[:2], ids, w)
    with pytest.raises(TypeError, match="one place"):
        embedding_fwd(to_kernel(ids), w)
