"""Preference losses: DPO, IPO, SimPO, ORPO and KTO, as functions of log-probabilities.

An answer y to a prompt x has log p(y|x), the sum over its n tokens, and log ref(y|x) of a frozen
reference. r = beta (log p - log ref) is its reward; sigma is the sigmoid; c chosen, r rejected.

    dpo     -log sigma(r_c - r_r)                                    Rafailov et al. 2023
    ipo     (d - 1 / (2 beta))^2,  d = (log p - log ref) / n of c, less that of r    Azar et al. 2023
    simpo   -log sigma(beta log p_c / n_c - beta log p_r / n_r - gamma)              Meng et al. 2024
    orpo    -log p_c / n_c - beta log sigma(o_c - o_r),  o = log(P / (1 - P)),  P = p^(1/n)
                                                                     Hong et al. 2024
    kto     w (1 - sigma(s (r - beta z))),  s = 1 for a desirable answer, -1 for another
            z = max(0, mean of log p(y'|x) - log ref(y'|x)), y' the answer to another prompt
                                                                     Ethayarajh et al. 2024

dpo and simpo with --label-smoothing e: the loss of the pair times 1 - e, plus e times the loss of
the pair in the other order (cDPO, Mitchell 2023). The mean over the tokens in ipo is not in its
paper; its authors use it (TRL's documentation). The first part of orpo is the mean over the tokens
of an answer, as in its paper; TRL takes the mean over all tokens of a batch, the prompts among
them.

A loss of your own is such a function, --loss MODULE:FUNCTION. It gets Answers and the options, and
returns Losses: of each row, with the derivative by each log-probability. All in float64 on the
host: a few numbers per answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

PAIR = np.array([1.0, -1.0])  # chosen less rejected: x_B2 @ PAIR
LEAST = 1e-9  # -log P of orpo, at least: the odds of P = 1 are infinite


@dataclass(frozen=True)
class Answers:
    """The answers of a batch. One row each: a pair, chosen and rejected, K = 2; of kto one answer,
    K = 1.

    logprobs: (B, K) float64, of the answers, sums over their tokens.
    reference: (B, K), the same of the reference; zeros if the loss needs none.
    tokens: (B, K), of the answers.
    desirable: (B,) bool, of kto.
    kl: z of kto, a constant.
    """

    logprobs: np.ndarray
    reference: np.ndarray
    tokens: np.ndarray
    desirable: Any = None
    kl: float = 0.0


@dataclass(frozen=True)
class Losses:
    """losses: (B,).  slopes: (B, K), the derivative of each by its log-probabilities.
    rewards: (B, K), to be shown."""

    losses: np.ndarray
    slopes: np.ndarray
    rewards: np.ndarray


Loss = Callable[[Answers, Any], Losses]


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0, -x))


def logistic(margins_B: np.ndarray, smoothing: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return -log sigma(margin), with label smoothing, and its derivative by the margin."""
    right = np.logaddexp(0, -margins_B)
    wrong = np.logaddexp(0, margins_B)
    losses = (1 - smoothing) * right + smoothing * wrong
    return losses, smoothing - sigmoid(-margins_B)


def dpo(x: Answers, options: Any) -> Losses:
    """Return the loss of Direct Preference Optimization."""
    rewards = options.beta * (x.logprobs - x.reference)
    losses, slopes = logistic(rewards @ PAIR, options.label_smoothing)
    return Losses(losses, options.beta * slopes[:, None] * PAIR, rewards)


def ipo(x: Answers, options: Any) -> Losses:
    """Return the loss of Identity Preference Optimization."""
    ratios = x.logprobs - x.reference
    errors = (ratios / x.tokens) @ PAIR - 1 / (2 * options.beta)
    return Losses(errors**2, 2 * errors[:, None] * PAIR / x.tokens, options.beta * ratios)


def simpo(x: Answers, options: Any) -> Losses:
    """Return the loss of Simple Preference Optimization."""
    rewards = options.beta * x.logprobs / x.tokens
    margins = rewards @ PAIR - options.target_margin
    losses, slopes = logistic(margins, options.label_smoothing)
    return Losses(losses, options.beta * slopes[:, None] * PAIR / x.tokens, rewards)


def orpo(x: Answers, options: Any) -> Losses:
    """Return the loss of Odds Ratio Preference Optimization."""
    means = np.minimum(x.logprobs / x.tokens, -LEAST)
    rest = -np.expm1(means)  # 1 - P
    losses, slopes = logistic((means - np.log(rest)) @ PAIR)
    by_mean = options.beta * slopes[:, None] * PAIR / rest
    by_mean[:, 0] -= 1
    return Losses(options.beta * losses - means[:, 0], by_mean / x.tokens, options.beta * means)


def kto(x: Answers, options: Any) -> Losses:
    """Return the loss of Kahneman-Tversky Optimization."""
    rewards = options.beta * (x.logprobs - x.reference)
    sign = np.where(x.desirable, 1.0, -1.0)
    weight = np.where(x.desirable, options.desirable_weight, options.undesirable_weight)
    value = sigmoid(sign * (rewards[:, 0] - options.beta * x.kl))
    slopes = -weight * sign * options.beta * value * (1 - value)
    return Losses(weight * (1 - value), slopes[:, None], rewards)


LOSSES: dict[str, Loss] = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo, "kto": kto}
WITHOUT_REFERENCE = ("simpo", "orpo")
SMOOTHED = ("dpo", "simpo")  # those that read label_smoothing
