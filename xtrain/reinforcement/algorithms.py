"""The algorithms of --algorithm, each made of three functions (surrogate.py). What is not said is as
in GRPO (grpo.py).

    grpo           advantages in the group by the deviation of the population, ratio of each token,
                   mean over all tokens
    grpo_paper     mean over the tokens of a completion, then over completions (Shao et al. 2024)
    dr_grpo        advantages are not divided; the sum of a completion is divided by --max-new-tokens
                   (Liu et al. 2025)
    bnpo           GRPO with the sample deviation: TRL's loss_type "bnpo"
    dapo           bnpo with clip-higher (1.28), no loss for completions that were cut off, and other prompts
                   in place of groups of equal rewards (Yu et al. 2025)
    gspo           the ratio is that of the completion, to the power 1 / length (Zheng et al. 2025)
    cispo          all tokens have a gradient: the ratio is a constant factor, at most 5 (MiniMax 2025)
    rloo           the baseline is the mean of the other completions, the ratio that of the completion;
                   --kl is subtracted from the reward (Ahmadian et al. 2024)
    reinforce++    advantages are normalised over all tokens of the step, without a baseline of the group;
                   --kl is subtracted from the rewards of the tokens that follow (Hu 2025)

All but grpo and reinforce++ have TRL's loss and gradient (version 1.16): tests/reinforcement/test_algorithms.py
compares them. Deviations divide by G - 1 there, so they do in these.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import FunctionError, UserError
from ..options import described, find_object, one_line
from ..tuning.own_functions import copied, numbers
from .grpo import GRPO, advantages_of, clipped
from .surrogate import Algorithm, Objective, Rewarded, Tokens


# ----------------------------------------------------------------------------- advantages
def by_sample_deviation(step: Rewarded) -> np.ndarray:
    """Return the advantages in the group, by the sample deviation."""
    return advantages_of(step.rewards, step.scale, ddof=1)


def centered(step: Rewarded) -> np.ndarray:
    """Return reward - mean of the group."""
    return advantages_of(step.rewards, scale=False)


def leave_one_out(step: Rewarded) -> np.ndarray:
    """Return reward - mean of the others of its group, 0 without others."""
    rewards = step.rewards - step.kl_penalty.sum(-1)
    n = np.isfinite(rewards).sum(1, keepdims=True)
    return advantages_of(rewards, scale=False) * n / np.maximum(n - 1, 1)


def over_the_step(step: Rewarded) -> np.ndarray:
    """Return what follows each token, normalised over all tokens of the step, (P, G, T)."""
    penalties_to_go = step.kl_penalty[..., ::-1].cumsum(-1)[..., ::-1]
    returns = np.where(step.counted, np.nan_to_num(step.rewards)[..., None] - penalties_to_go, 0)
    n = max(step.total(step.counted), 1)
    differences = np.where(step.counted, returns - step.total(returns) / n, 0)
    return differences / np.sqrt(max(step.total(differences**2) / n, 1e-8))


# ----------------------------------------------------------------------------- ratio and clipping
def of_sequence(tokens: Tokens) -> Objective:
    """Return the clipped loss with the geometric mean of a completion's ratios."""
    losses, slopes = clipped(np.exp(tokens.mean(tokens.now - tokens.then)), tokens)
    return Objective(losses, tokens.mean(slopes))


def of_product(tokens: Tokens) -> Objective:
    """Return the clipped loss with the product of a completion's ratios."""
    losses, slopes = clipped(np.exp(tokens.sum(tokens.now - tokens.then)), tokens)
    return Objective(losses, tokens.sum(slopes))


def weighted(tokens: Tokens) -> Objective:
    """Return -A min(r, 1 + eps) log pi, where min(r, 1 + eps) is a constant."""
    factors = -tokens.advantages * np.minimum(np.exp(tokens.now - tokens.then), 1 + tokens.clip[1])
    return Objective(factors * tokens.now, factors)


# ----------------------------------------------------------------------------- normalisation
def mean_over_completions(step: Rewarded) -> np.ndarray:
    """Return 1 / (length of the completion x number of completions): each weighs the same."""
    return 1 / (np.maximum(step.lengths, 1) * step.total(np.ones(step.rewards.shape)))


def by_longest(step: Rewarded) -> np.ndarray:
    """Return 1 / (--max-new-tokens x number of completions)."""
    n = step.total(np.ones(step.rewards.shape))
    return np.full(step.rewards.shape, 1 / (step.max_new_tokens * n))


BNPO = replace(GRPO, advantages=by_sample_deviation)
GRPO_PAPER = replace(BNPO, weights=mean_over_completions)
DR_GRPO = replace(GRPO, advantages=centered, weights=by_longest)
DAPO = replace(
    BNPO, options={"clip_ratio_high": 0.28, "mask_truncated": True, "dynamic_sampling": 3}
)
GSPO = replace(
    GRPO_PAPER, objective=of_sequence, options={"clip_ratio": 3e-4, "clip_ratio_high": 4e-4}
)
CISPO = replace(BNPO, objective=weighted, options={"clip_ratio_high": 4.0})
RLOO = Algorithm(leave_one_out, of_product, mean_over_completions, kl="reward")
REINFORCE_PLUS_PLUS = replace(GRPO, advantages=over_the_step, kl="reward")

ALGORITHMS = {
    "grpo": GRPO,
    "grpo_paper": GRPO_PAPER,
    "dr_grpo": DR_GRPO,
    "bnpo": BNPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce++": REINFORCE_PLUS_PLUS,
}


def find_algorithm(name: str) -> Algorithm:
    """Return one of ALGORITHMS, or the Algorithm MODULE:NAME. Raises UserError."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    names = ", ".join(ALGORITHMS)
    if ":" not in name:
        raise UserError(
            f"--algorithm {name!r} is not known: choose from {names}, or give MODULE:NAME"
        )
    found = find_object("--algorithm", name, "my_algorithm:ALGORITHM")
    if not isinstance(found, Algorithm):
        raise UserError(
            f"--algorithm {name} is not an xtrain.reinforcement.surrogate.Algorithm: name one, or "
            f"choose from {names}"
        )
    return checked(found, name)


def checked(algorithm: Algorithm, name: str) -> Algorithm:
    """Return a user's algorithm with functions that raise FunctionError where its own fail, or return
    arrays of another shape or numbers that are not finite.   name: for the message."""

    def call(field: str, argument: Any) -> Any:
        try:
            return getattr(algorithm, field)(copied(argument))
        except (Exception, SystemExit) as error:
            raise failure(field, f"raised {described(error)}") from error

    def failure(field: str, what: str) -> FunctionError:
        return FunctionError(f"--algorithm {name}: {field} {what}: fix the function")

    def array(field: str, x: Any, *shapes: tuple[int, ...]) -> np.ndarray:
        return numbers(x, shapes, lambda what: failure(field, what))

    def of_step(field: str, step: Rewarded, *shapes: tuple[int, ...]) -> np.ndarray:
        x = array(field, call(field, step), *shapes)
        with np.errstate(over="ignore"):
            if not np.isfinite(x.astype(np.float32)).all():
                raise failure(field, "returned numbers that are not finite in float32")
        return x

    def advantages(step: Rewarded) -> np.ndarray:
        return of_step("advantages", step, step.rewards.shape, step.counted.shape)

    def weights(step: Rewarded) -> np.ndarray:
        return of_step("weights", step, step.rewards.shape)

    def objective(tokens: Tokens) -> Objective:
        found = call("objective", tokens)
        if not (isinstance(found, tuple) and len(found) == len(Objective._fields)):
            raise failure("objective", f"returned {one_line(repr(found))}, not an Objective")
        objective = Objective(*(array("objective", x, tokens.now.shape) for x in found))
        with np.errstate(over="ignore"):
            ratios = np.exp(np.abs(tokens.now - tokens.then))
        if np.isfinite(ratios).all() and not np.isfinite(objective).all():
            raise failure("objective", "returned numbers that are not finite")
        return objective

    if algorithm.kl not in ("loss", "reward"):
        raise UserError(f"--algorithm {name}: kl is {algorithm.kl!r}: choose 'loss' or 'reward'")
    return replace(algorithm, advantages=advantages, objective=objective, weights=weights)
