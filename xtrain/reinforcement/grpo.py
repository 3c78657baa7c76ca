"""GRPO (Shao et al. 2024, DeepSeekMath): the advantages of a group, and the clipped loss over
log-probabilities.

    rollouts     every prompt gets G completions o, drawn from the policy pi_old; each has a reward R
    advantage    A = (R - mean of the group) / (standard deviation of the group + 1e-4),   the same for all tokens of o
    loss         r = exp(log pi(token) - log pi_old(token))
                 L = mean over all tokens of   -min(r A, clip(r, 1 - eps, 1 + eps) A) + beta KL
                 KL = exp(d) - d - 1,   d = log pi_ref(token) - log pi(token)            (Schulman's k3: never negative)
    derivative   dL / dlog pi = 1/N (-A r [not clipped] + beta (1 - exp(d)))

"Clipped" is a token whose r has left [1 - eps, 1 + eps] in the direction of its advantage: the min
takes the constant. As long as the weights are those that drew the tokens, r = 1 and the gradient is
that of REINFORCE with the group's mean as baseline. This holds exactly only if both computations of
log pi give the same bits (kernels/runtime/invariance.py).

Arrays are (B, T), one row per completion, computed in float64 on the host: a few numbers per token.
"""

from dataclasses import dataclass

import numpy as np

EPSILON = 1e-4


@dataclass(frozen=True)
class Surrogate:
    """The loss of some rows, its derivative by each log-probability, and sums over the counted
    tokens.

    ratio_error: the largest |r - 1|.
    kl: of the rollouts' policy to this one, k3.
    clipped, tokens: numbers of tokens.
    reference_kl: to the reference, k3; 0 without one.
    """

    loss: float
    dlogprobs: np.ndarray  # (B, T) float32, 0 where no token is counted
    ratio_error: float
    kl: float
    clipped: float
    tokens: float
    reference_kl: float


def advantages_of(rewards: np.ndarray, scale: bool = True) -> np.ndarray:
    """rewards (prompts, G) -> advantages, float32.
    scale: divide by the standard deviation of the group."""
    centered = rewards - rewards.mean(1, keepdims=True)
    if scale:
        centered = centered / (rewards.std(1, keepdims=True) + EPSILON)
    return centered.astype(np.float32)


def surrogate(
    logprobs: np.ndarray,
    rollout: np.ndarray,
    advantages: np.ndarray,
    counted: np.ndarray,
    inv_count: float,
    clip_ratio: float,
    kl: float = 0.0,
    reference: np.ndarray | None = None,
) -> Surrogate:
    """logprobs, rollout, reference (B, T): of each token by the weights now, when it was drawn, and
    by the reference.

    advantages (B, T).  counted (B, T) bool: which tokens belong to completions; values elsewhere
    are ignored.
    inv_count: 1 / number of these in the whole batch.  kl: beta.
    """
    now, then, A = (x[counted].astype(np.float64) for x in (logprobs, rollout, advantages))
    ratio = np.exp(now - then)
    free = ratio * A
    bound = np.clip(ratio, 1 - clip_ratio, 1 + clip_ratio) * A
    losses = -np.minimum(free, bound)
    slopes = np.where(free <= bound, -free, 0.0)
    reference_kl = 0.0
    if reference is not None:
        d = reference[counted].astype(np.float64) - now
        losses = losses + kl * (np.expm1(d) - d)
        slopes = slopes - kl * np.expm1(d)
        reference_kl = float((np.expm1(d) - d).sum())
    derivative = np.zeros(logprobs.shape, np.float32)
    derivative[counted] = inv_count * slopes
    drift = then - now
    return Surrogate(
        float(inv_count * losses.sum()),
        derivative,
        float(np.abs(ratio - 1).max(initial=0)),
        float((np.expm1(-drift) + drift).sum()),
        float((free > bound).sum()),
        float(len(now)),
        reference_kl,
    )
