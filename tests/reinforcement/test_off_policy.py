"""The bias of gradients whose completions come from other weights, exactly: a table of logits, all completions are enumerated."""

import itertools

import numpy as np
import pytest
from checks import rng

from xtrain.reinforcement.grpo import GRPO
from xtrain.reinforcement.surrogate import surrogate

V = 4
NEVER = (1 - 1e-9, 1e9)  # clips nothing


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def bias_of(T, lag, clip):
    """The relative error of the expected gradient, and the mean KL of a token.   lag: deviation of the logits' change."""
    texts = np.array(list(itertools.product(range(V), repeat=T)))
    # the logits of a token depend on all tokens before it: rows of a table
    state = np.array([[sum((x + 1) * (V + 1) ** i for i, x in enumerate(s[:t])) for t in range(T)] for s in texts])  # fmt: skip
    theta = rng(0).normal(size=(state.max() + 1, V))
    old = theta - lag * rng(1).normal(size=theta.shape)
    now, then = (log_softmax(x)[state, texts] for x in (theta, old))
    rewards = rng(2).integers(0, 2, len(texts)).astype(float)
    advantages = np.repeat((rewards - np.exp(now.sum(1)) @ rewards)[:, None], T, 1)

    def gradient(drawn):
        probability = np.exp(drawn.sum(1))
        found = surrogate(GRPO.objective, now, drawn, advantages, np.ones(texts.shape, bool), probability, clip)  # fmt: skip
        slopes = found.dlogprobs.astype(float)
        table = np.zeros_like(theta)
        np.add.at(table, (state, texts), slopes)
        return table - np.exp(log_softmax(theta)) * table.sum(1, keepdims=True)

    exact = gradient(now)
    error = np.linalg.norm(gradient(then) - exact) / np.linalg.norm(exact)
    drift = now - then
    kl = np.exp(then.sum(1)) @ (np.expm1(drift) - drift).mean(1)
    return error, kl


def test_the_ratio_corrects_for_a_token_alone():
    """Completions of one token have no bias, unless the ratio is clipped; longer ones have that of the tokens before."""
    assert bias_of(1, 0.3, NEVER)[0] < 1e-6 < bias_of(1, 0.3, (0.2, 0.2))[0]
    assert bias_of(3, 0.0, (0.2, 0.2)) == (0.0, 0.0)


@pytest.mark.parametrize("clip, largest", [(NEVER, 0.2), ((0.2, 0.2), 0.5)], ids=["unclipped", "clipped"])  # fmt: skip
def test_the_bias_grows_with_the_distance_of_the_policies(clip, largest):
    """It is about proportional to the lag: a KL of 1e-4 to 1e-3 a token is an error of some per cent."""
    errors, kls = zip(*(bias_of(4, lag, clip) for lag in (0.01, 0.03, 0.1)))
    assert 0.003 < errors[0] < errors[1] < errors[2] < largest
    assert errors[1] < 0.06 and 1e-4 < kls[1] < 1e-3 and kls[0] < kls[1] < kls[2] < 1e-2
