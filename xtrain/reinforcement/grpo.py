"""GRPO (Shao et al. 2024, DeepSeekMath): the advantages of a group, the clipped loss over
log-probabilities, and the mean over tokens.

    rollouts     every prompt gets G completions o, drawn from the policy pi_old; each has a reward R
    advantage    A = (R - mean of the group) / (standard deviation of the group + 1e-4),   the same for all tokens of o
    loss         r = exp(log pi(token) - log pi_old(token))
                 L = mean over all tokens of   -min(r A, clip(r, 1 - eps, 1 + eps) A) + beta KL        (surrogate.py)
    derivative   dL / dlog pi = 1/N (-A r [not clipped] + ...)

"Clipped" is a token whose r has left [1 - eps, 1 + eps] in the direction of its advantage: the min
takes the constant. As long as the weights are those that drew the tokens, r = 1 and the gradient is
that of REINFORCE with the group's mean as baseline. This holds exactly only if both computations of
log pi give the same bits (kernels/runtime/invariance.py).

Where this differs:

                 here                       the paper                          TRL 1.16
    deviation    divides by G               (not said)                         divides by G - 1: at G = 8 its advantages
                                                                               are 0.935 of these
    mean         over all tokens            over the tokens of a completion,   as here (loss_type "dapo", its default);
                 of the step                then over completions              as the paper ("grpo")
    beta         0                          0.04                               0

The paper's mean is `--algorithm grpo_paper`, with TRL's deviation; algorithms.py has more.
"""

import numpy as np

from .surrogate import Algorithm, Objective, Rewarded, Tokens

EPSILON = 1e-4


def advantages_of(rewards: np.ndarray, scale: bool = True, ddof: int = 0) -> np.ndarray:
    """rewards (P, G), NaN where there is none -> advantages, 0 there.
    scale: divide by the standard deviation of the group.
    ddof: its sum is divided by (number of rewards - ddof)."""
    known = np.isfinite(rewards)
    n = known.sum(1, keepdims=True)
    mean = np.where(known, rewards, 0).sum(1, keepdims=True) / np.maximum(n, 1)
    centered = np.where(known, rewards - mean, 0)
    if scale:
        variance = (centered**2).sum(1, keepdims=True) / np.maximum(n - ddof, 1)
        centered = centered / (np.sqrt(variance) + EPSILON)
    return centered


def of_group(step: Rewarded) -> np.ndarray:
    """Return the advantages in the group, by the deviation of the population."""
    return advantages_of(step.rewards, step.scale)


def clipped(ratio: np.ndarray, tokens: Tokens) -> Objective:
    """Return -min(r A, clip(r) A) of each token, and its derivative by log r."""
    low, high = tokens.clip
    free = ratio * tokens.advantages
    bound = np.clip(ratio, 1 - low, 1 + high) * tokens.advantages
    return Objective(-np.minimum(free, bound), np.where(free <= bound, -free, 0.0))


def of_tokens(tokens: Tokens) -> Objective:
    """Return the clipped loss with the ratio of each token."""
    return clipped(np.exp(tokens.now - tokens.then), tokens)


def mean_over_tokens(step: Rewarded) -> np.ndarray:
    """Return 1 / number of tokens of the step."""
    return np.full(step.rewards.shape, 1 / max(step.total(step.lengths), 1))


GRPO = Algorithm(of_group, of_tokens, mean_over_tokens)
