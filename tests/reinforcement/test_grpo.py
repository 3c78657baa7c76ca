"""GRPO's loss, derivative and gradient against PyTorch, on fixed rollouts."""

import numpy as np
import torch
import twins
from checks import rng

from xtrain.nn import functional as F
from xtrain.reinforcement.grpo import EPSILON, advantages_of, of_tokens
from xtrain.reinforcement.surrogate import surrogate


def torch_loss(now, then, advantages, counted, clip, kl, reference):
    """The formula of the paper, on tensors (B, T)."""
    ratio = torch.exp(now - then)
    gain = torch.min(ratio * advantages, torch.clamp(ratio, 1 - clip, 1 + clip) * advantages)
    d = reference - now
    per_token = -gain + kl * (torch.exp(d) - d - 1)
    return per_token[counted].sum() / counted.sum()


def rollouts(B=4, T=7):
    """-> log-probabilities when drawn, of a reference, advantages, which are counted"""
    draw = rng(1)
    then, reference = (draw.normal(-2, 0.5, (B, T)) for _ in range(2))
    advantages = np.repeat(draw.normal(size=(B, 1)), T, 1)
    return then, reference, advantages, draw.random((B, T)) < 0.7


def test_loss_and_derivative_are_those_of_pytorch():
    then, reference, advantages, counted = rollouts()
    now = then + rng(2).normal(0, 0.3, then.shape)  # some ratios leave [0.8, 1.2] on each side
    now[~counted] = np.nan
    given = torch.tensor(np.nan_to_num(now), requires_grad=True)
    rest = (torch.tensor(x) for x in (then, advantages, counted))
    theirs = torch_loss(given, *rest, 0.2, 0.1, torch.tensor(reference))
    theirs.backward()
    weights = np.full(len(now), 1 / counted.sum())
    found = surrogate(of_tokens, now, then, advantages, counted, weights, (0.2, 0.2), 0.1, reference)  # fmt: skip
    assert abs(found.loss - theirs.item()) < 1e-12
    np.testing.assert_allclose(found.dlogprobs, given.grad.numpy(), rtol=1e-6, atol=1e-9)
    ratio = np.exp(now - then)[counted]
    left = np.where(advantages[counted] > 0, ratio > 1.2, ratio < 0.8)
    assert 2 < found.clipped == left.sum() < found.tokens == counted.sum()
    assert found.ratio_error == np.abs(ratio - 1).max()


def test_the_same_log_probabilities_give_exactly_one_and_zero():
    then, _, advantages, counted = (x.astype(np.float32) for x in rollouts())
    counted = counted.astype(bool)
    weights = np.full(len(then), 0.25)
    found = surrogate(of_tokens, then, then, advantages, counted, weights, (0.2, 0.2))
    assert found.ratio_error == 0 and found.kl == 0 and found.clipped == 0
    assert np.array_equal(found.dlogprobs[counted], -0.25 * advantages[counted])  # REINFORCE
    other = np.nextafter(then, np.float32(0))
    found = surrogate(of_tokens, other, then, advantages, counted, weights, (0.2, 0.2))
    assert found.ratio_error > 0 and found.kl > 0  # one bit is noticed


def test_advantages():
    rewards = np.array([[1.0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]])
    assert not advantages_of(rewards)[1].any()
    np.testing.assert_allclose(advantages_of(rewards)[0], [0.5 / (0.5 + EPSILON)] * np.array([1, -1, -1, 1]), rtol=1e-6)  # fmt: skip
    assert advantages_of(rewards, scale=False)[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    some = np.array([[1.0, np.nan, 0, np.nan], [np.nan] * 4])
    assert advantages_of(some, scale=False).tolist() == [[0.5, 0, -0.5, 0], [0] * 4]
    sample = np.std(rewards[0], ddof=1)
    np.testing.assert_allclose(advantages_of(rewards, ddof=1)[0, 0], 0.5 / (sample + EPSILON))


def test_the_gradient_of_every_parameter_is_that_of_pytorch():
    config = twins.small(qk_norm=False)
    model = twins.random_model(config, device="cpu")
    ids, targets = (x.astype(np.int32) for x in twins.batch(config, 4, 7))
    _, reference, advantages, _ = rollouts()
    counted = targets != -100
    logprobs = model.logprobs(ids, targets)
    assert np.array_equal(np.isnan(logprobs.data), ~counted)
    then = np.nan_to_num(logprobs.data) + rng(3).normal(0, 0.2, ids.shape)
    weights = np.full(len(ids), 1 / counted.sum())
    found = surrogate(of_tokens, logprobs.data, then, advantages, counted, weights, (0.2, 0.2), 0.05, reference)  # fmt: skip
    assert found.clipped > 0
    F.with_gradient(logprobs, found.loss, found.dlogprobs).backward()
    other = twins.twin(model)
    logits = other(torch.tensor(ids).long()).logits
    chosen = torch.tensor(np.where(counted, targets, 0)).long()[..., None]
    now = torch.log_softmax(logits, -1).gather(-1, chosen)[..., 0]
    rest = (torch.tensor(x) for x in (then, advantages, counted))
    theirs = torch_loss(now, *rest, 0.2, 0.05, torch.tensor(reference))
    theirs.backward()
    assert abs(found.loss - theirs.item()) < 1e-5
    ours = twins.gradients(model)
    for name, parameter in other.named_parameters():
        np.testing.assert_allclose(ours[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-5)
