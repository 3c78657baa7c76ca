"""Muon: kernels in the simulator against the reference, the optimizer against torch.optim.Muon."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import assert_as_good, normal, to_host, to_kernel
from runs import run

from xtrain import ModelConfig, Transformer, UserError
from xtrain.kernels import muon
from xtrain.nn.optim import AdamW, Muon

TINY = ModelConfig(
    vocab_size=50, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, hidden_dim=24, max_seq_len=16
)  # fmt: skip


# offsets in the state (m, and w with ZeRO-1 in bf16) and in the arena, which may lie in any order
PLACES = {(5, 7): ([64, 3], [110, 75]), (8, 12): ([100, 0], [4, 104]), (50, 128): ([16], [32])}


@pytest.mark.parametrize("factor", [0.5, np.nan])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", list(PLACES))
def test_kernels(shape, dtype, factor, monkeypatch):
    """Odd offsets; whole 16-byte words; several tiles, of which a block sums two."""
    monkeypatch.setattr(muon, "PARTIALS", 2)
    size, n = math.prod(shape), max(200, 64 + math.prod(shape))
    if size > 1000 and (np.isnan(factor) or dtype == np.float32):
        pytest.skip("many elements once")
    state, arena = (np.array(x, np.int64) for x in PLACES[shape])
    m, g, w = (normal(i, n) for i in range(3))
    factor, hyper = np.full(1, factor, np.float32), np.array([0.1, 1, 1], np.float32)
    copy = w.astype(ml_dtypes.bfloat16)

    def steps(put, wide):
        arrays = [
            put(x.astype(wide) if x.dtype == np.float32 else x) for x in (m, g, w, factor, hyper)
        ]
        x = put(np.zeros((len(state), *shape), wide if wide == np.float64 else dtype))
        (mine, grads, weights, f, h), half = arrays, put(copy)
        offsets = put(state), put(arena)
        functions = (muon.momentum, muon.muon_update)
        if wide == np.float64:
            functions = (muon.momentum_ref, muon.muon_update_ref)
        functions[0](x, mine, grads, *offsets, f, 0.95)
        functions[1](weights, x, *offsets, f, h, 0.1, half)
        return [np.array(to_host(a)) for a in (x, mine, weights, half)]

    kernel = steps(to_kernel, np.float32)
    want, single = steps(np.copy, np.float64), steps(np.copy, np.float32)
    if np.isnan(factor[0]):  # skipped: nothing changes
        for got, old in zip(kernel[1:], (m, w, copy)):
            assert np.array_equal(got, old)
        return
    for what, got, exact, rounded in zip(("x", "m", "w"), kernel, want, single):
        assert_as_good(got, exact.astype(np.float64), rounded, what=what)
    for a, b in zip(state, arena):
        assert np.array_equal(kernel[3][b : b + size], kernel[2][a : a + size].astype(copy.dtype))
    for offsets, pairs in ((state, ((1, m), (2, w))), (arena, ((3, copy),))):
        untouched = np.ones(n, bool)
        for first in offsets:
            untouched[first : first + size] = False
        for i, old in pairs:
            assert np.array_equal(kernel[i][untouched], old[untouched])


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 6, 20), (1, 20, 6), (1, 1, 3)])
def test_newton_schulz_with_the_square_completed(shape):
    """The launched form against the polynomial as it is written, in float64."""
    x = normal(0, *shape, mean=0.1)
    x /= np.linalg.norm(x, axis=(1, 2), keepdims=True)
    want = muon.orthogonalize_ref(x.astype(np.float64))
    got = muon.orthogonalize(to_kernel(x))
    np.testing.assert_allclose(to_host(got), want, atol=1e-5)
    half = muon.orthogonalize(to_kernel(x.astype(ml_dtypes.bfloat16)))
    assert half.dtype == ml_dtypes.bfloat16
    error = np.linalg.norm(to_host(half).astype(np.float64) - want) / np.linalg.norm(want)
    assert error < 0.05


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 6, 20), (2, 20, 6)])
def test_singular_values_become_about_one(shape):
    x = normal(0, *shape)
    x /= np.linalg.norm(x, axis=(1, 2), keepdims=True)
    u, _, v = np.linalg.svd(x, full_matrices=False)
    y = muon.orthogonalize(x.copy())
    s = u.swapaxes(1, 2) @ y @ v.swapaxes(1, 2)
    diagonal = np.diagonal(s, axis1=1, axis2=2)
    assert diagonal.min() > 0.3 and diagonal.max() < 1.3
    assert np.abs(s - diagonal[:, :, None] * np.eye(s.shape[1])).max() < 1e-4


def test_against_pytorch(monkeypatch):
    """torch.optim.Muon rounds to bf16: here it may not."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    model = Transformer(TINY)
    theirs = {n: torch.tensor(p.data.copy()) for n, p in model.named_parameters()}
    inside = [n for n, p in theirs.items() if "layers." in n and p.ndim == 2]
    groups = [
        dict(
            params=[p for n, p in theirs.items() if n not in inside and (p.ndim == 2) is d],
            weight_decay=w,
        )
        for d, w in ((True, 0.1), (False, 0.0))
    ]
    references = [
        torch.optim.Muon(
            [theirs[n] for n in inside], 1e-2, 0.1, 0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, 1e-2, betas=(0.9, 0.95), eps=1e-8),
    ]
    ours = Muon(model, 1e-2)
    for step in range(5):
        for i, (name, p) in enumerate(model.named_parameters()):
            p.grad[...] = normal([step, i], *p.shape)
            theirs[name].grad = torch.tensor(p.grad.copy())
        for optimizer in (ours, *references):
            optimizer.step()
    assert len(inside) == 14
    for name, p in model.named_parameters():
        difference = np.abs(p.data - theirs[name].numpy()).max()
        assert difference <= 1e-5, f"{name}: {difference}"
    assert not AdamW(model, 1e-2).m.any() and ours.m.any()


def test_frozen_blocks_are_refused():
    model = Transformer(TINY)
    optimizer = Muon(model, 1e-2)
    for name, p in model.storage():
        p.requires_grad = "layers." not in name
    with pytest.raises(UserError, match="make Muon last"):
        optimizer.step()
    with pytest.raises(UserError, match="no trainable matrix"):
        Muon(model, 1e-2)


def test_a_resumed_run_is_the_same_and_another_optimizer_is_refused(tmp_path):
    run(tmp_path / "a", steps=6, optimizer="muon", save_every=3)
    run(tmp_path / "b", steps=6, optimizer="muon", save_every=3, stop_at=3)
    with pytest.raises(UserError, match="optimizer was muon, is adamw"):
        run(tmp_path / "b", steps=6, save_every=3, resume=True)
    run(tmp_path / "b", steps=6, optimizer="muon", save_every=3, resume=True)
    for name in ("model", "optimizer"):
        a, b = (
            tmp_path / x / f"run/checkpoints/step-000006/{name}.safetensors" for x in ("a", "b")
        )
        assert a.read_bytes() == b.read_bytes()
