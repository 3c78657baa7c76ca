"""Head and loss in chunks of rows: the same as all rows at once, and the gradients arrive once and whole."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, assert_as_good, assert_directional, normal, rng, to_host, to_kernel

from xtrain import ModelConfig, Transformer
from xtrain.device import to_device
from xtrain.kernels import gemm
from xtrain.kernels import linear_cross_entropy as module
from xtrain.kernels.cross_entropy import IGNORE, count_targets, mean_loss
from xtrain.kernels.decoding.logprobs import token_logprobs
from xtrain.kernels.decoding.sampling import Sampling, kept_ref
from xtrain.kernels.linear_cross_entropy import (
    ROWS,
    UNIT,
    chunk_rows,
    linear_cross_entropy,
    linear_cross_entropy_ref,
)
from xtrain.nn import functional as F
from xtrain.nn.autograd import Tensor, no_grad
from xtrain.nn.loss_functions import linear_kept_tokens
from xtrain.training.memory_plan import plan, planning, saved_bytes

DEVICE = "gpu" if GPU else "cpu"
BF16 = ml_dtypes.bfloat16
SIZES = [(1, 3, 5, 8), (7, 8, 37, 40), (66, 2, 3, 4)]  # N, C, V, P
SIZES += [(5000, 96, 5000, 5120)] if GPU else []
SHAPE = dict(
    vocab_size=61, dim=16, n_layers=1, n_heads=2, head_dim=8, hidden_dim=24, max_seq_len=64
)


def case(N, C, V, P, dtype=np.float32):
    """-> x, w with zeros in the padding, targets of which every third is ignored, inv_count"""
    x, w = normal(1, N, C).astype(dtype), normal(2, P, C, scale=0.5).astype(dtype)
    w[V:] = 0
    targets = rng(3).integers(0, V, N)
    targets[2::3] = IGNORE
    return x, w, targets, count_targets(targets)


# ----------------------------------------------------------------------------- the launcher
@pytest.mark.long
@pytest.mark.parametrize(
    "size, rows", [(s, r) for s in SIZES for r in (3, 64, None) if GPU or s[0] < 64 or r == 64]
)
def test_chunks_against_all_rows_at_once(size, rows):
    x, w, targets, inv = case(*size)
    V = size[2]
    if GPU and size[0] > 1000 and rows == 3:
        rows *= 1000
    exact = linear_cross_entropy_ref(x.astype(np.float64), w.astype(np.float64), targets, V, inv)
    once = linear_cross_entropy_ref(x, w, targets, V, inv)
    for to in (np.array, to_kernel):
        got = linear_cross_entropy(*map(to, (x, w, targets)), V, to(inv), rows=rows)
        for what, g, e, o in zip(("loss", "dx", "dw"), got, exact, once):
            assert to_host(g).dtype == np.float32
            assert_as_good(g, e, o, floor=1e-6, what=f"{what}, {rows} rows")
        assert not to_host(got[2])[V:].any()  # padding


@pytest.mark.parametrize("N, rows", [(150, 64), (150, None)] if GPU else [(11, 4), (9, None)])
def test_a_bf16_gradient_is_rounded_once(N, rows):
    """Of three chunks it has the bits of the float32 sum, rounded. The other results are the same."""
    x, w, targets, inv = case(N, 8, 37, 40, BF16)
    for to in (np.array, to_kernel):
        results = []
        for dtype in (None, BF16):
            arguments = (*map(to, (x, w, targets)), 37, to(inv))
            found = linear_cross_entropy(*arguments, rows=rows, dw_dtype=dtype)
            results.append([to_host(a) for a in found])
        (loss, dx, dw), (loss_2, dx_2, dw_2) = results
        assert np.array_equal(loss, loss_2) and np.array_equal(dx, dx_2)
        assert dw.dtype == np.float32 and dw_2.dtype == BF16
        if rows:
            assert np.array_equal(dw_2, dw.astype(BF16))
        else:  # the product rounds; cuBLAS adds in another order, and may round partial sums
            assert np.linalg.norm(dw_2.astype(np.float32) - dw) < 2**-8 * np.linalg.norm(dw)


def test_log_probabilities_and_their_gradients():
    """In chunks and at once, with the bits of the engine; sum(factor logprob) against PyTorch. Every third is ignored."""
    x, w, targets, _ = case(70, 8, 37, 40)
    factors = normal(4, 70)
    tx, tw = (torch.tensor(a, requires_grad=True) for a in (x, w))
    counted = targets != IGNORE
    theirs = torch.log_softmax(tx @ tw[:37].T, 1)[np.flatnonzero(counted), targets[counted]]
    (theirs * torch.tensor(factors[counted])).sum().backward()
    for rows in (64, None):
        ox, ow = (Tensor(to_device(a, DEVICE), requires_grad=True) for a in (x, w))
        entropies = to_device(np.zeros(70, np.float32), DEVICE)
        logprobs = F.linear_logprobs(ox, ow, to_device(targets, DEVICE), 37, rows, entropies_N=entropies)  # fmt: skip
        found = to_host(logprobs.data)
        exact = torch.distributions.Categorical(logits=(tx @ tw[:37].T).detach()).entropy()
        np.testing.assert_allclose(to_host(entropies), exact.numpy(), rtol=1e-5)
        assert np.array_equal(np.isnan(found), ~counted)
        np.testing.assert_allclose(found[counted], theirs.detach().numpy(), rtol=1e-5, atol=1e-6)
        logprobs.backward(to_device(factors, DEVICE))
        for ours, other in ((ox, tx), (ow, tw)):
            np.testing.assert_allclose(to_host(ours.grad), other.grad.numpy(), rtol=1e-4, atol=1e-5)
    logits = gemm.linear_fwd(to_device(x, DEVICE), to_device(w, DEVICE))
    engine = token_logprobs(logits, to_device(targets, DEVICE), 2, 37)[0]
    assert np.array_equal(found[counted], to_host(engine)[counted])


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.7), Sampling(1.3, 5), Sampling(0.8, 0, 0.6), Sampling(1.5, 9, 0.9, 0.05)],
)
def test_log_probabilities_of_the_sampled_distribution(sampling):
    """Against PyTorch and finite differences in float64: softmax of logits / T over the kept tokens, a constant.

    1 / T is rounded to float32."""
    x, w, _, _ = case(12, 8, 37, 40)
    x, w, factors = (a.astype(np.float64) for a in (4 * x, w, normal(4, 12)))
    logits = x @ w[:37].T
    kept = np.zeros((12, 37), bool)
    for n in range(12):
        ids, weights = kept_ref(logits[n], *vars(sampling).values())
        kept[n, ids[weights > 0]] = True
    targets = np.array([rng(n).choice(np.flatnonzero(kept[n])) for n in range(12)])
    targets[5] = IGNORE
    counted = targets != IGNORE
    tx, tw = (torch.tensor(a, requires_grad=True) for a in (x, w))
    scaled = (tx @ tw[:37].T / sampling.temperature).masked_fill(~torch.tensor(kept), -torch.inf)
    theirs = torch.log_softmax(scaled, 1)[np.flatnonzero(counted), targets[counted]]
    (theirs * torch.tensor(factors[counted])).sum().backward()
    for rows in (5, None):
        ox, ow = (Tensor(a, requires_grad=True) for a in (x, w))
        logprobs = F.linear_logprobs(ox, ow, targets, 37, rows, sampling)
        assert np.array_equal(np.isnan(logprobs.data), ~counted)
        np.testing.assert_allclose(logprobs.data[counted], theirs.detach().numpy(), rtol=1e-5)
        logprobs.backward(factors)
        for ours, other in ((ox, tx), (ow, tw)):
            np.testing.assert_allclose(ours.grad, other.grad.numpy(), rtol=1e-5, atol=1e-7)
    masks = linear_kept_tokens(x, w, targets, 37, sampling)
    total = lambda x, w: float(
        np.nansum(F.linear_logprobs(Tensor(x), Tensor(w), targets, 37, 5, sampling, masks).data * factors)
    )  # fmt: skip
    assert_directional(total, (x, w), (ox.grad, ow.grad))
    other = linear_kept_tokens(x[::-1].copy(), w, targets, 37, sampling)  # other tokens are kept
    found = F.linear_logprobs(Tensor(x), Tensor(w), targets, 37, 5, sampling, other).data
    assert sampling == Sampling(0.7) or not np.allclose(found[counted], theirs.detach().numpy())


@pytest.mark.gpu
def test_bf16():
    """As good as all rows at once in float32 from the same rounded inputs, but for what bf16 logits and d cost."""
    x, w, targets, inv = case(3000, 256, 20000, 20096, BF16)
    w = (w.astype(np.float32) / 8).astype(BF16)  # logits of order 1: a bf16 of 16 errs by 0.03
    wide = x.astype(np.float32), w.astype(np.float32)
    loss, dx, dw = linear_cross_entropy_ref(*wide, targets, 20000, inv)
    given = *map(to_kernel, (x, w, targets)), 20000, to_kernel(inv)
    off = lambda a, b: np.linalg.norm(to_host(a).astype(np.float32) - b) / np.linalg.norm(b)
    for rows in (1000, 3000):
        got = linear_cross_entropy(*given, rows=rows)
        assert [a.dtype.name for a in got] == ["float32", "bfloat16", "float32"]
        assert off(got[0], loss) < 2e-3 and off(got[1], dx) < 1e-2 and off(got[2], dw) < 1e-2


@pytest.mark.parametrize("N", [1, 63, 64, 2048, 2049, 5000, 8192, 100_000])
@pytest.mark.parametrize("rows", [1, 64, 100, None])
def test_chunks_are_few_and_equal(N, rows):
    step, most = chunk_rows(N, rows), rows or ROWS
    assert 1 <= step <= most
    assert -(-N // step) == -(-N // most) or most < UNIT  # as few as can be
    assert step % UNIT == 0 or step == most
    assert chunk_rows(8192) == 2048 and chunk_rows(0) == 0


def test_without_rows():
    x, w, targets, inv = case(0, 4, 5, 8)
    for to in (np.array, to_kernel):
        loss, dx, dw = linear_cross_entropy(*map(to, (x, w, targets)), 5, to(inv))
        assert loss.shape == (0,) and dx.shape == (0, 4)
        assert dw.shape == (8, 4) and not to_host(dw).any()


def test_only_what_is_wanted():
    x, w, targets, inv = case(9, 8, 5, 8)
    both = linear_cross_entropy(x, w, targets, 5, inv, rows=4)
    for dx, dw in ((True, False), (False, True), (False, False)):
        got = linear_cross_entropy(x, w, targets, 5, inv if dx or dw else None, dx, dw, rows=4)
        for part, want, whole in zip(got, (True, dx, dw), both):
            assert np.array_equal(part, whole) if want else part is None


def test_bad_input():
    x, w, targets, inv = case(9, 8, 5, 8)
    with pytest.raises(ValueError, match=r"w has shape \(8, 7\), expected \(any, 8\)"):
        linear_cross_entropy(x, w[:, :7].copy(), targets, 5, inv)
    with pytest.raises(ValueError, match="0 rows at a time, expected at least 1"):
        linear_cross_entropy(x, w, targets, 5, inv, rows=0)
    with pytest.raises(ValueError, match=r"x has shape \(72,\), expected \(any, any\)"):
        linear_cross_entropy(x.ravel(), w, targets, 5, inv)
    with pytest.raises(ValueError, match=r"targets have shape \(8,\), expected \(9,\)"):
        linear_cross_entropy(x, w, targets[:8], 5, inv)
    with pytest.raises(ValueError, match="vocabulary 9"):
        linear_cross_entropy(x, w, targets, 9, inv)
    targets[7] = 6
    with pytest.raises(ValueError, match=r"target 6 in row 7 is neither in \[0, 5\)"):
        linear_cross_entropy(x, w, targets, 5, inv, rows=4)
    loss, dx, _ = linear_cross_entropy(*map(to_kernel, (x, w, targets)), 5, to_kernel(inv), rows=4)
    wrong = np.arange(9) == 7  # where looking would mean waiting, this row is NaN
    assert np.array_equal(np.isnan(to_host(loss)), wrong)
    assert np.array_equal(np.isnan(to_host(dx)).all(1), wrong)


# ----------------------------------------------------------------------------- the op
def op(rows, factor=None, again=1, upstream=None):
    """-> loss, gradients of x and w"""
    x, w, targets, inv = (to_device(a, DEVICE) for a in case(10, 8, 37, 40))
    x, w = (Tensor(a.copy(), requires_grad=True) for a in (x, w))
    given = targets, 37, inv
    for _ in range(again):
        if rows == "apart":
            loss = F.cross_entropy(F.linear(x, w), *given)
        else:
            loss = F.linear_cross_entropy(x, w, *given, rows)
        (loss if factor is None else loss * factor).backward(upstream)
    return [to_host(a) for a in (loss.data, x.grad, w.grad)]


@pytest.mark.parametrize("more", [{}, dict(factor=-2.5), dict(again=3)], ids=str)
def test_the_op_is_that_of_head_and_loss_apart(more):
    for rows in (3, 10):
        for got, want in zip(op(rows, **more), op("apart", **more)):
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-7 * np.abs(want).max())


def test_a_gradient_from_above():
    once, twice = op(3), op(3, upstream=to_device(np.array(2, np.float32), DEVICE))
    for a, b in zip(once[1:], twice[1:]):
        assert np.array_equal(2 * a, b)


def test_the_same_bits_every_time():
    assert all(np.array_equal(a, b) for a, b in zip(op(3), op(3)))


def test_without_recording_there_is_no_gradient(monkeypatch):
    x, w, targets, inv = case(10, 8, 37, 40)
    x, w = (Tensor(a, requires_grad=True) for a in (x, w))
    products = []
    count = lambda *a, **k: products.append(a) or matmul(*a, **k)
    matmul = module.matmul
    for place in (module, gemm):  # gradients, logits
        monkeypatch.setattr(place, "matmul", count)
    with no_grad():
        loss = F.linear_cross_entropy(x, w, targets, 37, inv, 5)
    assert len(products) == 2 and loss.node is None  # the logits of two chunks, nothing else
    recorded = F.linear_cross_entropy(x, w, targets, 37, inv, 5)
    assert len(products) == 8 and recorded.item() == loss.item()


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_one_side_frozen(frozen):
    x, w, targets, inv = case(10, 8, 37, 40)
    x, w = (Tensor(a, requires_grad=name != frozen) for name, a in (("x", x), ("w", w)))
    F.linear_cross_entropy(x, w, targets, 37, inv, 4).backward()
    whole = op(4)
    for tensor, gradient in ((x, whole[1]), (w, whole[2])):
        if tensor.requires_grad:
            np.testing.assert_allclose(tensor.grad, gradient, rtol=1e-5, atol=1e-8)
        else:
            assert tensor.grad is None


def test_a_weight_that_was_computed():
    """Not a leaf: its gradient goes on to what it was made from."""
    x, w, targets, inv = case(10, 8, 37, 40)
    half = Tensor(w / 2, requires_grad=True)
    F.linear_cross_entropy(Tensor(x), half * 2.0, targets, 37, inv, 4).backward()
    np.testing.assert_allclose(half.grad, 2 * op(4)[2], rtol=1e-5, atol=1e-8)


# ----------------------------------------------------------------------------- in a model
def model_and_batch(monkeypatch, rows, **more):
    monkeypatch.setattr(module, "ROWS", rows)
    config = ModelConfig(**SHAPE, **more)
    ids, targets = rng(4).integers(0, 61, (2, 3, 50)).astype(np.int32)
    targets[:, ::7] = IGNORE
    return Transformer(config, device=DEVICE), ids, targets


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_chunks(monkeypatch, tied):
    """The loss is that of the model's own logits; gradients agree with those of one chunk, over two micro-batches."""
    results = []
    for rows in (7, 1000):
        model, ids, targets = model_and_batch(monkeypatch, rows, tie_embeddings=tied)
        loss = model.loss(ids, targets)
        logits = to_host(model(ids).data).reshape(-1, 61).astype(np.float64)
        counts = targets.reshape(-1) != IGNORE
        top = np.log(np.exp(logits).sum(1))[counts]
        want = (top - logits[counts, targets.reshape(-1)[counts]]).mean()
        assert loss.item() == pytest.approx(want, rel=1e-5)
        for _ in range(2):
            model.loss(ids, targets).backward()
        results.append(to_host(model.arena.grads))
    error = np.linalg.norm(results[0] - results[1]) / np.linalg.norm(results[1])
    assert error < 2e-6 and results[1].any()


@pytest.mark.parametrize("tied", [False, True])
def test_hooks_see_the_whole_gradient_once(monkeypatch, tied):
    """What data parallelism relies on: one call per use of a parameter, when its share is complete."""
    model, ids, targets = model_and_batch(monkeypatch, 7, tie_embeddings=tied)
    head, seen = model._head(), []
    head.on_gradient = lambda p: seen.append(to_host(p.grad).copy())
    loss = model.loss(ids, targets)
    assert not seen and not to_host(model.arena.grads).any()  # forward leaves all gradients alone
    loss.backward()
    assert len(seen) == 1 + tied  # a tied table is used by the embedding too
    assert np.array_equal(seen[-1], to_host(head.grad))
    if tied:
        assert not np.array_equal(seen[0], seen[1])


@pytest.mark.parametrize("tied", [False, True])
def test_recompute_in_chunks(monkeypatch, tied):
    grads = []
    for mode in ("none", "attention", "block"):
        model, ids, targets = model_and_batch(monkeypatch, 7, tie_embeddings=tied)
        model.recompute = mode
        model.loss(ids, targets).backward()
        grads.append(to_host(model.arena.grads).tobytes())
    assert len(set(grads)) == 1


def test_logits_never_exist_as_a_whole(monkeypatch):
    """In training they take the memory of a chunk, and none of it is kept; calling the model still gives all of them."""
    monkeypatch.setattr(module, "ROWS", 64)
    config = ModelConfig(**(SHAPE | {"vocab_size": 5000}))
    p = plan(config, 32, 50)
    assert p.kinds["logits"] == 64 * config.padded_vocab_size * 4
    assert "logits" not in p.kept
    with planning(config.padded_vocab_size) as meter:
        ghost = Transformer(config, None, "gpu")
        whole = ghost(np.zeros((32, 50), np.int32))
        assert whole.shape == (32, 50, 5000) and meter.live > whole.data.nbytes


def test_what_is_kept():
    x, w, targets, inv = case(10, 8, 37, 40)
    made = Tensor(x, requires_grad=True) * 1.0
    loss = F.linear_cross_entropy(made, Tensor(w, requires_grad=True), targets, 37, inv, 4)
    assert saved_bytes(loss) == x.nbytes + w.nbytes  # the two gradients
    assert loss.item() == mean_loss(linear_cross_entropy(x, w, targets, 37, inv)[0], inv)[0]
