"""Cross-entropy: the reference against calculus and PyTorch, the kernels against the reference."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    assert_directional,
    normal,
    pairwise,
    rng,
    sentinels,
    to_host,
    to_kernel,
)

from xtrain.kernels import cross_entropy as module
from xtrain.kernels.cross_entropy import (
    BLOCK,
    IGNORE,
    SUM_BLOCK,
    UNROLL,
    LossPlan,
    count_targets,
    cross_entropy,
    cross_entropy_naive_kernel,
    cross_entropy_ref,
    logits_gradient_ref,
    mean_loss,
    row_sum,
    shared_columns,
)
from xtrain.kernels.runtime.launch import empty, launch

BF16 = ml_dtypes.bfloat16
SHAPES = [(1, 1, 1), (2, 8, 8), (3, 37, 40), (4, BLOCK + 1, BLOCK + 7), (3, 600, 640)]  # N, V, P
SHAPES += [(2048, 50257, 50304), (7, 2000, 2048), (100, 151936, 151936)] if GPU else []


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Two warps in the simulator: a row is never wide enough for all threads of a block in use."""
    if not GPU:
        plans = {vec: replace(plan, threads=64) for vec, plan in module.PLANS.items()}
        monkeypatch.setattr(module, "PLANS", plans)
    yield monkeypatch


def case(N, V, P, scale=1.0, dtype=np.float32):
    """-> logits with arbitrary values in the padding, targets of which every third is ignored, inv_count"""
    logits = normal(1, N, P, scale=scale).astype(dtype)
    logits[:, V:] = 3e8
    targets = rng(2).integers(0, V, N)
    targets[2::3] = IGNORE
    return logits, targets, count_targets(targets)


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 5, 5), (7, 11, 16)])
def test_reference_against_calculus(shape):
    logits, targets, inv = case(*shape)
    x, V = logits.astype(np.float64), shape[1]
    f = lambda x: float(cross_entropy_ref(x, targets, V, inv, False)[0].sum() * inv[0])
    assert_directional(f, (x,), (cross_entropy_ref(x.copy(), targets, V, inv)[1],))


@pairwise({"shape": SHAPES, "scale": [1.0, 1e4], "dtype": [np.float32, BF16]})
def test_kernel(shape, scale, dtype):
    check_kernel(*shape, scale, dtype)


@pytest.mark.skipif(GPU, reason="where all tests have these blocks")
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_blocks_as_on_a_gpu(small_blocks, dtype):
    small_blocks.undo()
    check_kernel(3, BLOCK + 1, BLOCK + 7, 1.0, dtype)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_one_factor_per_row(dtype):
    """The gradient of sum(factor loss): factors of both signs, zeros, and one that is NaN in an ignored row."""
    factors = np.array([0.5, -2.0, np.nan, 0.0, 1.5], np.float32)
    check_kernel(5, 37, 40, 1.0, dtype, factors)
    logits, targets, _ = case(5, 37, 40)
    tx = torch.tensor(logits[:, :37], requires_grad=True)
    loss = torch.nn.functional.cross_entropy(tx, torch.tensor(targets), reduction="none")
    (loss[targets != IGNORE] * torch.tensor(factors[targets != IGNORE])).sum().backward()
    naive, out = to_kernel(logits), empty(to_kernel(logits), 5)
    args = out, naive, to_kernel(targets), to_kernel(factors), 37, True
    launch(cross_entropy_naive_kernel, 5, BLOCK, *args)
    gradients = cross_entropy(logits.copy(), targets, 37, factors)[1], to_host(naive)
    for gradient in gradients:
        np.testing.assert_allclose(gradient[:, :37], tx.grad.numpy(), rtol=1e-5, atol=1e-7)


def check_kernel(N, V, P, scale, dtype, factors=None):
    logits, targets, inv = case(N, V, P, scale, dtype)
    inv = inv if factors is None else factors
    given = to_kernel(logits)
    loss, dlogits = cross_entropy(given, to_kernel(targets), V, to_kernel(inv))
    assert dlogits is given  # in place
    exact = cross_entropy_ref(logits.astype(np.float64), targets, V, inv)
    loss32, dlogits32 = cross_entropy_ref(logits.astype(np.float32), targets, V, inv)
    loss, dlogits = to_host(loss), to_host(dlogits)
    assert loss.dtype == np.float32 and dlogits.dtype == dtype
    assert_as_good(loss, exact[0], loss32, what="loss")
    assert_as_good(dlogits, exact[1], dlogits32.astype(dtype), what="dlogits")
    assert (dlogits[:, V:] == 0).all()  # padding
    assert (dlogits[targets == IGNORE] == 0).all() and (loss[targets == IGNORE] == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("in_shared, in_registers", [(0, 1), (1, 1), (9, 1), (1, 2)])
def test_rows_of_several_rounds(in_shared, in_registers, dtype, monkeypatch):
    """A row of four rounds of a small block and a rest: so many rounds fit into shared memory, so many into registers."""
    vec = 16 // np.dtype(dtype).itemsize
    step = UNROLL * 32 * vec
    V = 4 * step + 45
    plan = LossPlan(threads=32, blocks_per_sm=2, register_rounds=in_registers)
    monkeypatch.setattr(module, "PLANS", {4: plan, 8: plan})
    monkeypatch.setattr(module, "shared_bytes", lambda *_: in_shared * UNROLL * 32 * 16 + 200)
    shared = shared_columns(V, vec, plan, module.shared_bytes())
    assert shared.columns == min(in_shared, 4 - in_registers) * step
    assert shared.nbytes == (shared.columns + -(-45 // vec) * vec) // vec * 16
    check_kernel(2, V, V + 43, 1.0, dtype)
    check_kernel(2, V - 3 * step, V + 43, 1.0, dtype)  # a lot of padding
    check_kernel(2, 2 * step, 2 * step, 1.0, dtype)  # no rest


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.uint8])
def test_dtypes_of_targets(dtype):
    logits, _, inv = case(5, 37, 40)
    targets = np.array([0, 36, 5, 7, 1], dtype)
    loss, _ = cross_entropy(*map(to_kernel, (logits, targets)), 37, to_kernel(inv))
    expected = cross_entropy(logits, targets.astype(np.int64), 37, inv)[0]
    np.testing.assert_allclose(to_host(loss), expected, rtol=1e-6)


def test_naive_kernel():
    logits, targets, inv = case(4, 37, 40)
    given, loss = to_kernel(logits), empty(to_kernel(logits), 4)
    args = loss, given, to_kernel(targets), to_kernel(inv), 37, True
    launch(cross_entropy_naive_kernel, 4, BLOCK, *args)
    exact = cross_entropy_ref(logits.astype(np.float64), targets, 37, inv)
    for k, e, r in zip((loss, given), exact, cross_entropy_ref(logits, targets, 37, inv)):
        assert_as_good(k, e, r)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rows_that_begin_anywhere(dtype):
    """A slice of a larger array, not 16-byte aligned: the same bits as from a copy."""
    logits, targets, inv = case(3, 37, 40, dtype=dtype)
    whole = to_kernel(np.concatenate([np.zeros(1, dtype), logits.ravel()]))
    targets, inv = to_kernel(targets), to_kernel(inv)
    given = whole[1:].reshape(3, 40), to_kernel(logits)
    results = [cross_entropy(x, targets, 37, inv) for x in given]
    for a, b in zip(*results):
        assert np.array_equal(to_host(a), to_host(b))


def test_without_gradient_the_logits_stay():
    logits, targets, inv = case(5, 37, 40)
    for to in (np.array, to_kernel):
        given = to(logits)
        loss, gradient = cross_entropy(given, to(targets), 37, None, with_gradient=False)
        assert gradient is None and np.array_equal(to_host(given), logits)
        assert np.array_equal(
            to_host(loss), to_host(cross_entropy(given, to(targets), 37, to(inv))[0])
        )


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_logsumexp(shape, dtype):
    """Of every row, also of ignored ones; and it changes no bit of loss and gradient."""
    logits, targets, inv = case(*shape, dtype=dtype)
    wanted = torch.tensor(logits[:, : shape[1]].astype(np.float64)).logsumexp(1).numpy()
    for to in (np.array, to_kernel):
        plain = cross_entropy(to(logits), to(targets), shape[1], to(inv))
        for gradient in (True, False):
            lse = to(np.full(shape[0], np.nan, np.float32))
            given = to(logits), to(targets), shape[1], to(inv), gradient
            found = cross_entropy(*given, lse_N=lse)
            np.testing.assert_allclose(to_host(lse), wanted, rtol=1e-6, atol=1e-6)
            for a, b in zip(found, plain) if gradient else [(found[0], plain[0])]:
                assert np.array_equal(to_host(a), to_host(b))


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_gradient_from_logsumexp(shape):
    """In float64 it is PyTorch's, with one factor for all rows and with one per row, and cross_entropy_ref's."""
    N, V, _ = shape
    logits, targets, inv = case(*shape)
    x = logits.astype(np.float64)
    for factors in (inv.astype(np.float64), normal(3, N).astype(np.float64)):
        tx = torch.tensor(x[:, :V], requires_grad=True)
        how = dict(reduction="none", ignore_index=IGNORE)
        loss = torch.nn.functional.cross_entropy(tx, torch.tensor(targets), **how)
        (loss * torch.tensor(factors)).sum().backward()
        lse = np.empty(N)
        _, expected = cross_entropy_ref(x.copy(), targets, V, factors, True, lse)
        found = logits_gradient_ref(x, targets, lse, V, factors)
        np.testing.assert_allclose(found[:, :V], tx.grad.numpy(), rtol=1e-12, atol=1e-16)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-16)
        assert (found[:, V:] == 0).all()


def test_a_target_that_does_not_exist():
    logits, targets, inv = case(6, 37, 40)
    for bad in (37, 39, 40, -1, -99, 2**40):
        targets[4] = bad
        with pytest.raises(ValueError, match=rf"target {bad} in row 4 is neither in \[0, 37\)"):
            cross_entropy(logits.copy(), targets, 37, inv)
        # Where a check would have to synchronize, the row is NaN and the others are correct.
        results = [cross_entropy(*map(to_kernel, (logits, targets)), 37, to_kernel(inv))]
        results += [cross_entropy_ref(logits.copy(), targets, 37, inv)]
        for loss, gradient in results:
            loss, gradient = to_host(loss), to_host(gradient)
            assert np.array_equal(np.isnan(loss), np.arange(6) == 4)
            assert np.isnan(gradient[4, :37]).all() and (gradient[4, 37:] == 0).all()
            assert not np.isnan(np.delete(gradient, 4, 0)).any()


def test_counting_unsigned_targets():
    targets = np.array([0, 36, 5, 7, 1], np.uint16)
    assert to_host(count_targets(to_kernel(targets)))[0] == np.float32(0.2)


@pytest.mark.parametrize("P", [3, 8])
def test_large_logits_and_ignored_infinities(P):
    logits = np.full((2, P), np.nan, np.float32)
    logits[:, :3] = [[1e30, -1e30, 1e30], [np.inf, np.nan, 0.0]]
    targets = np.array([0, IGNORE])
    for to in (np.array, to_kernel):
        loss, gradient = cross_entropy(to(logits), to(targets), 3, to(np.ones(1, np.float32)))
        np.testing.assert_allclose(to_host(loss), [np.log(2), 0], rtol=1e-6)
        expected = [[-0.5, 0, 0.5], [0, 0, 0]]
        np.testing.assert_allclose(to_host(gradient)[:, :3], expected, atol=1e-7)
        assert (to_host(gradient)[:, 3:] == 0).all()


def test_micro_batches_add_up():
    """Two halves with the inv_count of the whole batch give the gradient and the loss of the whole batch."""
    logits, targets, inv = case(8, 21, 24)
    whole_loss, whole = cross_entropy(logits.copy(), targets, 21, inv)
    halves = [
        cross_entropy(logits[h].copy(), targets[h], 21, inv) for h in np.split(np.arange(8), 2)
    ]
    np.testing.assert_allclose(np.concatenate([g for _, g in halves]), whole, rtol=1e-6)
    total = sum(mean_loss(loss, inv)[0] for loss, _ in halves)
    np.testing.assert_allclose(total, mean_loss(whole_loss, inv)[0], rtol=1e-6)


@pytest.mark.parametrize("N", [1, 5, SUM_BLOCK + 3] + ([100_000] if GPU else []))
def test_sums(N):
    x = normal(3, N)
    exact, scale = x.astype(np.float64).sum(keepdims=True), np.array([0.37], np.float32)
    assert_as_good(row_sum(to_kernel(x)), exact, row_sum(x))
    assert_as_good(mean_loss(*map(to_kernel, (x, scale))), exact * scale, mean_loss(x, scale))
    assert np.array_equal(to_host(row_sum(to_kernel(x))), to_host(row_sum(to_kernel(x))))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("N", [1, 5, SUM_BLOCK + 3] + ([100_000] if GPU else []))
def test_count(N, dtype):
    targets = rng(4).integers(-3, 3, N).astype(dtype)
    targets[targets < 0] = IGNORE
    count = (targets >= 0).sum()
    expected = np.float32(1) / np.float32(count) if count else np.float32(0)
    for got in (count_targets(targets), count_targets(to_kernel(targets))):
        assert to_host(got).dtype == np.float32 and to_host(got)[0] == expected


def test_without_a_single_target_loss_and_gradient_are_zero():
    logits, targets = normal(1, 3, 8), np.full(3, IGNORE)
    for to in (np.array, to_kernel):
        inv = count_targets(to(targets))
        loss, gradient = cross_entropy(to(logits), to(targets), 8, inv)
        assert to_host(inv)[0] == 0 and to_host(mean_loss(loss, inv))[0] == 0
        assert (to_host(gradient) == 0).all()


def test_no_rows():
    for to in (np.array, to_kernel):
        logits, targets = to(np.zeros((0, 8), np.float32)), to(np.zeros(0, np.int64))
        inv = count_targets(targets)
        loss, gradient = cross_entropy(logits, targets, 8, inv)
        assert to_host(inv)[0] == 0 and loss.shape == (0,) and gradient.shape == (0, 8)
        assert to_host(row_sum(loss))[0] == 0


def test_nothing_outside_and_the_same_bits_twice(monkeypatch):
    logits, targets, inv = case(4, 37, 40)
    pad, results = 64, []
    for _ in range(2):
        edge = np.full(pad, 777, np.float32)
        buffer = to_kernel(np.concatenate([edge, logits.ravel(), edge]))
        with sentinels(monkeypatch):
            inner, count = buffer[pad:-pad].reshape(4, 40), to_kernel(inv)
            loss, _ = cross_entropy(inner, to_kernel(targets), 37, count)
            mean_loss(loss, count)
            count_targets(to_kernel(targets))
        results.append((to_host(loss), to_host(buffer)))
        assert (results[-1][1][:pad] == 777).all() and (results[-1][1][-pad:] == 777).all()
    assert all(np.array_equal(a, b) for a, b in zip(*results))


def test_against_pytorch():
    logits, targets, inv = case(7, 37, 40)
    tx = torch.tensor(logits[:, :37], requires_grad=True)
    theirs = torch.nn.functional.cross_entropy(tx, torch.tensor(targets), ignore_index=-100)
    theirs.backward()
    loss, gradient = cross_entropy(logits, targets, 37, inv)
    np.testing.assert_allclose(mean_loss(loss, inv)[0], theirs.item(), rtol=1e-6)
    np.testing.assert_allclose(gradient[:, :37], tx.grad.numpy(), rtol=1e-5, atol=1e-8)


def test_bad_input():
    logits, targets, inv = case(4, 37, 40)
    with pytest.raises(ValueError, match=r"vocabulary 41, logits \(4, 40\)"):
        cross_entropy(logits, targets, 41, inv)
    with pytest.raises(ValueError, match=r"targets have shape \(3,\), expected \(4,\)"):
        cross_entropy(logits, targets[:3], 37, inv)
    with pytest.raises(ValueError, match="targets must be integers, got float64"):
        cross_entropy(logits, targets.astype(np.float64), 37, inv)
    with pytest.raises(ValueError, match="the gradient needs inv_count"):
        cross_entropy(logits, targets, 37, None)
    with pytest.raises(ValueError, match=r"inv_count has shape \(2,\), expected \(1\)"):
        cross_entropy(logits, targets, 37, np.ones(2, np.float32))
    with pytest.raises(TypeError, match="logits is float16"):
        cross_entropy(np.ones((4, 40), np.float16), targets, 37, inv)
    with pytest.raises(ValueError, match=r"lse has shape \(2,\), expected \(4\)"):
        cross_entropy(logits, targets, 37, inv, lse_N=np.ones(2, np.float32))
    with pytest.raises(TypeError, match="on one device"):
        cross_entropy(to_kernel(logits), targets, 37, to_kernel(inv))
