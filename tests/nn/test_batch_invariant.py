"""`with xtrain.batch_invariant()` in training: the same rows whatever the batch, and correct gradients."""

import numpy as np
import pytest
from checks import rng, to_host
from twins import batch, gradients, random_model, small

import xtrain
from xtrain import batch_invariant
from xtrain.kernels import gemm
from xtrain.kernels.runtime.invariance import is_batch_invariant
from xtrain.nn import functional as F
from xtrain.nn.autograd import Tensor

CONFIGS = {
    "qwen3": small(head_dim=16),
    "mixture": small(head_dim=16, n_experts=4, experts_per_token=2),
    "llama, tied": small(head_dim=16, dim=100, qk_norm=False, tie_embeddings=True),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def step(model, ids, targets, forward=True, backward=True):
    """-> loss and gradients; the forward and the backward in the mode or not"""
    model.zero_grad()
    with batch_invariant(forward):
        loss = model.loss(ids, targets)
    with batch_invariant(backward):
        loss.backward()
    return to_host(loss.data).copy(), gradients(model)


@every_config
def test_gradients_are_those_without_the_mode(config):
    model = random_model(config)
    ids, targets = batch(config, 3, 40)
    expected, exact = step(model, ids, targets, False, False)
    for backward in (False, True):
        loss, got = step(model, ids, targets, True, backward)
        assert abs(loss - expected) <= 1e-5
        for name in exact:
            scale = np.abs(exact[name]).max()
            assert np.abs(got[name] - exact[name]).max() <= 2e-5 * scale, (name, backward)


@every_config
@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_what_backward_recomputes_has_the_bits_of_the_mode(config, recompute):
    """Also where backward runs outside."""
    model = random_model(config)
    ids, targets = batch(config, 2, 20)
    for backward in (True, False):
        model.recompute = "none"
        loss, gradients = step(model, ids, targets, True, backward)
        model.recompute = recompute
        again, got = step(model, ids, targets, True, backward)
        assert again == loss
        for name, gradient in gradients.items():
            assert np.array_equal(got[name], gradient), (name, backward)


@every_config
def test_a_row_does_not_depend_on_the_batch(config):
    """Nor on what follows it, nor on whether gradients are recorded."""
    model = random_model(config)
    ids, _ = batch(config, 5, 40)
    with batch_invariant():
        whole = to_host(model(ids).data)
        for rows, T in ((slice(2, 3), 40), (slice(1, 4), 17), (slice(4, 5), 1)):
            assert np.array_equal(to_host(model(ids[rows, :T]).data), whole[rows, :T])
        with xtrain.no_grad():
            assert np.array_equal(to_host(model(ids).data), whole)


def test_the_loss_has_the_bits_of_the_mode():
    """The head is computed in chunks of rows inside `loss`, too."""
    config = small(head_dim=16, dim=100)
    model = random_model(config)
    ids, targets = batch(config, 3, 30)
    inv_count = model._to_device(np.ones(1, np.float32))
    with batch_invariant(), xtrain.no_grad():
        losses = [
            to_host(model.loss(ids[b : b + 1, :T], targets[b : b + 1, :T], inv_count).data)
            for b, T in ((0, 30), (1, 30), (2, 30))
        ]
        logits_BTP = model.logits(model.hidden(ids)).data.reshape(3, 30, -1)
        for b in range(3):
            row = Tensor(logits_BTP[b].copy())
            alone = F.cross_entropy(row, model._to_device(targets[b]), config.vocab_size, inv_count)
            assert to_host(alone.data) == losses[b]


def test_the_mode_ends_and_nests():
    w, x = (np.float32(rng(i).standard_normal((n, 300))) for i, n in ((1, 50), (2, 37)))
    assert not is_batch_invariant()
    with batch_invariant():
        inside = gemm.linear_fwd(x, w)
        with batch_invariant(False):  # does not switch it off
            assert is_batch_invariant()
            assert np.array_equal(gemm.linear_fwd(x, w), inside)
        assert is_batch_invariant()
    assert not is_batch_invariant()
    with pytest.raises(KeyError), batch_invariant():
        raise KeyError
    assert not is_batch_invariant()
