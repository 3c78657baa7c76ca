"""What an algorithm of reinforcement learning is: three functions, and the loss that they make.

    advantages   rewards of completions       -> how much better each one is than expected
    objective    log-probabilities of tokens  -> loss of each token, and its derivative
    weights      lengths of completions       -> the weight of each token in the sum

    loss         L = sum over tokens of  weight (loss of the token + beta KL),   KL = exp(d) - d - 1,
                 d = log pi_ref(token) - log pi(token)            (Schulman's k3: never negative)
    derivative   dL / dlog pi = weight (derivative of the token + beta (1 - exp(d)))

grpo.py has the three of GRPO, algorithms.py those of others.

All arrays are float64 on the host: a few numbers per token. P prompts have G completions each; B = P G,
and T is the longest. Which tokens count is a mask: a completion may have none, and the functions divide
by no length that is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Rewarded:
    """The completions of a step, on this rank.

    rewards: (P, G), NaN where there is none.
    counted: (P, G, T) bool, the tokens that are trained.
    kl_penalty: (P, G, T), beta (log pi_old - log pi_ref) of these tokens, 0 elsewhere. All zeros
        unless the algorithm subtracts it from the rewards.
    scale: --scale-rewards.
    max_new_tokens: of a completion.
    sum_ranks: the sum of a number over all ranks; every rank must call it.
    """

    rewards: np.ndarray
    counted: np.ndarray
    kl_penalty: np.ndarray
    scale: bool = True
    max_new_tokens: int = 1
    sum_ranks: Callable[[float], float] = float

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens that are trained, (P, G)."""
        return self.counted.sum(-1)

    def total(self, x: Any) -> float:
        """Return the sum of an array over all ranks."""
        return self.sum_ranks(float(np.sum(x)))


@dataclass(frozen=True)
class Tokens:
    """The n counted tokens of some completions: at least one. Every array is (n,).

    now, then: the log-probability now, and when the token was drawn.
    advantages: of the token.
    row: the completion that the token belongs to.
    clip: the ratio is clipped to [1 - clip[0], 1 + clip[1]].
    entropies: of the distribution of the token, in nats; None unless Algorithm.entropies.
    """

    now: np.ndarray
    then: np.ndarray
    advantages: np.ndarray
    row: np.ndarray
    clip: tuple[float, float]
    entropies: np.ndarray | None = None

    def sum(self, x: np.ndarray) -> np.ndarray:
        """Return the sum of x over each completion, at every token of it."""
        return np.bincount(self.row, x)[self.row]

    def mean(self, x: np.ndarray) -> np.ndarray:
        """Return the mean of x over each completion, at every token of it."""
        return self.sum(x) / np.bincount(self.row)[self.row]


class Objective(NamedTuple):
    """Of each token, (n,): the loss, and the derivative of the whole loss by its log-probability,
    both without the weight."""

    losses: np.ndarray
    slopes: np.ndarray


@dataclass(frozen=True)
class Algorithm:
    """How rewards change the log-probabilities of the tokens that were drawn.

    advantages: (P, G), one for each completion, or (P, G, T). A completion without a reward has no
        counted token, so its advantage may be anything finite.
    objective: is given tokens of some completions, never a part of one.
    weights: (P, G), the same for all tokens of a completion.
    kl: --kl is a term of the loss, or is subtracted from the rewards (Rewarded.kl_penalty).
    entropies: does the objective read Tokens.entropies? Computing them reads the logits once more.
    options: the values of options of the command that are not given.
    """

    advantages: Callable[[Rewarded], np.ndarray]
    objective: Callable[[Tokens], Objective]
    weights: Callable[[Rewarded], np.ndarray]
    kl: Literal["loss", "reward"] = "loss"
    entropies: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Surrogate:
    """The loss of some rows, its derivative by each log-probability, and sums over the counted
    tokens.

    ratio_error: the largest |r - 1|.
    kl: of the rollouts' policy to this one, k3.
    clipped: the tokens with an advantage whose derivative is 0.
    tokens: all of them.
    reference_kl: to the reference, k3; 0 without one.
    """

    loss: float
    dlogprobs: np.ndarray  # (B, T) float32, 0 where no token is counted
    ratio_error: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    tokens: float = 0.0
    reference_kl: float = 0.0


def surrogate(
    objective: Callable[[Tokens], Objective],
    logprobs: np.ndarray,
    rollout: np.ndarray,
    advantages: np.ndarray,
    counted: np.ndarray,
    weights: np.ndarray,
    clip: tuple[float, float],
    kl: float = 0.0,
    reference: np.ndarray | None = None,
    entropies: np.ndarray | None = None,
) -> Surrogate:
    """logprobs, rollout, reference (B, T): of each token by the weights now, when it was drawn, and
    by the reference; the last may be None.

    advantages, entropies (B, T); the last may be None.
    counted (B, T) bool: which tokens are trained; values elsewhere are ignored.
    weights (B,): of each token of a completion, in the whole batch.
    kl: beta, of a term of the loss.
    """
    derivative = np.zeros(logprobs.shape, np.float32)
    if not counted.any():
        return Surrogate(0.0, derivative)
    flat = lambda x: x[counted].astype(np.float64)
    now = flat(logprobs)
    then = flat(rollout)
    row = np.nonzero(counted)[0]
    tokens = Tokens(now, then, flat(advantages), row, clip)
    if entropies is not None:
        tokens = replace(tokens, entropies=flat(entropies))
    losses, slopes = objective(tokens)
    clipped = (slopes == 0) & (tokens.advantages != 0)
    reference_kl = 0.0
    if reference is not None:
        d = flat(reference) - now
        losses = losses + kl * (np.expm1(d) - d)
        slopes = slopes - kl * np.expm1(d)
        reference_kl = float((np.expm1(d) - d).sum())
    weight = weights[row].astype(np.float64)
    derivative[counted] = weight * slopes
    drift = then - now
    return Surrogate(
        float((weight * losses).sum()),
        derivative,
        float(np.abs(np.exp(now - then) - 1).max()),
        float((np.expm1(-drift) + drift).sum()),
        float(clipped.sum()),
        float(len(now)),
        reference_kl,
    )
