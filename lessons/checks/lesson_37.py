"""Exercises of lesson 37: the loss of a reward model, the best policy near a reference, DPO, SimPO."""

import numpy as np

from .attempt import exercise

OVERFLOW = "inf or NaN: exp overflows. Use np.logaddexp(0, x), which is log(1 + exp(x)), and exp(-np.logaddexp(0, m)) for sigmoid(-m)."
LIMITED = "The loss of a pair far in the wrong order is -m, also for m = -2000: use np.logaddexp(0, -m), without a limit for m and without a small number in the logarithm."
CHANGED = "An input was changed: compute new arrays."


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def not_finite(got):
    return not np.isfinite(got).all()


def compare_slopes(e, name, got, want, mistakes):
    """Compare slopes, which may be very small: relative to the largest."""
    e.same(name, got, want, mistakes, rtol=1e-6, atol=1e-9 + 1e-7 * np.abs(want).max(initial=0))


# ----------------------------------------------------------------------------- the reward model
@exercise(
    "37.1", "reward_loss",
    first_step="m = chosen - rejected; the losses are np.logaddexp(0, -m).",
    hints={"ValueError": "chosen and rejected are (n,), one number per answer; return loss, d_chosen, d_rejected."},
    kernel=False,
)  # fmt: skip
def reward_loss(e):
    fixed = (
        ([1.0, 0.0, 2.5], [0.0, 0.5, 2.0]),
        ([0.3], [-0.4]),
        ([1000.0, -1000.0, 3.0], [-1000.0, 1000.0, 1.0]),
        ([5.0, 5.0], [5.0, 4.0]),
    )
    draw = lambda rng: tuple(2 * rng.normal(size=(2, int(rng.integers(3, 9)))))
    for chosen, rejected in e.cases(fixed, draw, times=3):
        chosen, rejected = np.array(chosen), np.array(rejected)
        given = chosen.copy(), rejected.copy()
        shown = f"n = {len(chosen)}, rewards up to {np.abs(chosen).max():.4g}"
        got = e.several(e.call(*given, case=shown), "loss", "d_chosen", "d_rejected")
        m, n = chosen - rejected, len(chosen)
        losses, s = np.logaddexp(0, -m), -sigmoid(-m)
        of = lambda x: np.array(float(x))
        e.need(np.shape(got[0]) != (n,) or n == 1, "loss has one number per pair: return their mean.")  # fmt: skip
        e.same("loss", got[0], of(losses.mean()), {
            OVERFLOW: not_finite,
            "This is the sum over the pairs: the loss is their mean.": of(losses.sum()),
            "The sign is wrong: a loss is -log sigmoid, which is positive.": of(-losses.mean()),
            "This is the loss of the pairs in the wrong order: chosen minus rejected.": of(np.logaddexp(0, m).mean()),
            "This is the mean of sigmoid(-m), the slope. The loss is -log sigmoid(m).": of(sigmoid(-m).mean()),
            "The logarithm is missing: this is -sigmoid.": of(-sigmoid(m).mean()),
            "This is the loss of the mean margin: take the loss of each pair first.": of(np.logaddexp(0, -m.mean())),
            "These are bits: the logarithm is the natural one.": of(losses.mean() / np.log(2)),
            LIMITED: lambda got: m.min() < -500 and 0 < got < losses.mean(),
        }, rtol=1e-7)  # fmt: skip
        mistakes = {
            OVERFLOW: not_finite,
            "The loss is a mean: divide the slopes by n, too.": s,
            "The sign is wrong: a larger reward of the chosen answer makes the loss smaller.": -s / n,
            "This is sigmoid(m): a pair in the right order pulls little, so the slope is -sigmoid(-m).": -sigmoid(m) / n,
            "This is the derivative of sigmoid, not of its logarithm.": -sigmoid(m) * sigmoid(-m) / n,
        }  # fmt: skip
        compare_slopes(e, "d_chosen", got[1], s / n, mistakes)
        compare_slopes(e, "d_rejected", got[2], -s / n, {
            "The rejected answer is pushed the same way as the chosen one: its slope has the other sign.": s / n,
            "The rejected answer has no slope here, but it is in the margin, too.": np.zeros(n),
        })  # fmt: skip
        e.need(np.array_equal(given[0], chosen) and np.array_equal(given[1], rejected), CHANGED)


# ----------------------------------------------------------------------------- the best policy
def best(reference, rewards, beta):
    possible = reference > 0
    p = np.zeros(len(reference))
    scores = rewards[possible] / beta
    p[possible] = reference[possible] * np.exp(scores - scores.max())
    return p / p.sum()


@exercise(
    "37.2", "best_policy",
    first_step="the best policy is proportional to reference * exp(rewards / beta).",
    hints={"ValueError": "reference and rewards are (V,), and so is the policy.",
           "ZeroDivisionError": "beta is positive: divide the rewards by it."},
    kernel=False,
)  # fmt: skip
def best_policy(e):
    fixed = (
        ([0.25, 0.25, 0.5], [1.0, 2.0, 0.0], 1.0),
        ([0.7, 0.2, 0.1], [0.0, 1.0, 3.0], 0.5),
        ([0.7, 0.2, 0.1], [0.0, 1.0, 3.0], 4.0),
        ([0.4, 0.6, 0.0], [1.0, 0.0, 2.0], 1.0),
        ([0.5, 0.5, 0.0], [1.0, 0.0, 9.0], 0.001),
        ([0.3, 0.3, 0.4], [-1000.0, -1001.0, -1002.0], 1.0),
    )

    def draw(rng):
        V = int(rng.integers(3, 8))
        return rng.dirichlet(np.ones(V)), 2 * rng.normal(size=V), float(rng.uniform(0.3, 3.0))

    for reference, rewards, beta in e.cases(fixed, draw, times=3):
        reference, rewards = np.array(reference), np.array(rewards)
        given = reference.copy(), rewards.copy()
        shown = f"reference {reference.round(2)}, rewards {rewards.round(2)}, beta {beta:g}"
        got = e.call(*given, beta, case=shown)
        with np.errstate(all="ignore"):
            want = best(reference, rewards, beta)
            not_one = lambda got: abs(np.sum(got) - 1) > 1e-6
            uniform = np.exp((rewards - rewards.max()) / beta)
            possible = np.where(reference > 0, rewards, -np.inf)
            powers = reference**beta * np.exp(possible - possible.max())
            e.same("policy", got, want, {
                "NaN: exp of a large reward / beta overflows, or becomes 0 everywhere. Subtract the largest reward first, and the largest "
                "among the answers that the reference has.": not_finite,
                "This does not sum to 1: divide by the sum, Z.": lambda got: np.allclose(got, np.sum(got) * want) and not_one(got),
                "The reference is missing: the policy is proportional to reference * exp(rewards / beta).": uniform / uniform.sum(),
                "The rewards are multiplied by beta: a small beta must make them count MORE.": best(reference, rewards, 1 / beta),
                "beta is missing: divide the rewards by it.": best(reference, rewards, 1.0),
                "beta belongs to the rewards alone: the reference is no power of beta.": powers / powers.sum(),
                "The sign is wrong: a larger reward must get more probability.": best(reference, -rewards, beta),
                "The largest reward belongs to an answer that the reference never gives: subtract the largest of the others.":
                    lambda got: not np.any(got) and np.size(got) > 0,
                "This is one answer. With a positive beta all answers of the reference keep some probability.":
                    lambda got: np.max(got) == 1 and want.max() < 0.999,
            })  # fmt: skip
        e.need(np.array_equal(given[0], reference) and np.array_equal(given[1], rewards), CHANGED)


# ----------------------------------------------------------------------------- DPO and SimPO
PAIR = np.array([1.0, -1.0])


def pair_of(e, got):
    losses, slopes = e.several(got, "losses", "slopes")
    e.need(np.ndim(losses) != 0, "losses is one number: return one for each pair, (n,).")
    return losses, slopes


def check_losses(e, got, margins, more):
    right = np.logaddexp(0, -margins)
    e.same("losses", got, right, {
        OVERFLOW: not_finite,
        **more,
        "The sign is wrong: a loss is -log sigmoid, which is positive.": -right,
        "The pair is in the wrong order: column 0 was chosen, the margin is column 0 minus column 1.": np.logaddexp(0, margins),
        "This is sigmoid(-margin), without the logarithm.": sigmoid(-margins),
    }, rtol=1e-7)  # fmt: skip


@exercise(
    "37.3", "dpo",
    first_step="rewards = beta * (now - reference), and the margin is column 0 minus column 1.",
    hints={"ValueError": "now and reference are (n, 2), the losses (n,), the slopes (n, 2): np.stack([a, b], 1).",
           "IndexError": "now[:, 0] are the chosen answers, now[:, 1] the rejected ones."},
    kernel=False,
)  # fmt: skip
def dpo(e):
    fixed = (
        ([[-10.0, -12.0], [-8.0, -3.0]], [[-11.0, -11.0], [-8.0, -4.0]], 0.5),
        ([[-2.0, -5.0]], [[-2.0, -5.0]], 0.1),
        ([[-1.0, -9000.0], [-9000.0, -1.0]], [[-5.0, -5.0], [-5.0, -5.0]], 1.0),
        ([[-30.0, -40.0], [-7.0, -9.0], [-4.0, -2.0]], [[-28.0, -45.0], [-7.0, -8.0], [-6.0, -2.5]], 2.0),
    )  # fmt: skip

    def draw(rng):
        n = int(rng.integers(2, 7))
        now = -20 * rng.random((n, 2))
        return now, now + rng.normal(size=(n, 2)), float(rng.uniform(0.2, 2.0))

    for now, reference, beta in e.cases(fixed, draw, times=3):
        now, reference = np.array(now), np.array(reference)
        given = now.copy(), reference.copy()
        shown = f"n = {len(now)}, log-probabilities down to {now.min():.4g}, beta {beta:g}"
        losses, slopes = pair_of(e, e.call(*given, beta, case=shown))
        ratios = (now - reference) @ PAIR
        margins = beta * ratios
        loss = lambda m: np.logaddexp(0, -m)
        check_losses(e, losses, margins, {
            "The reference is missing: the reward is beta (log pi - log ref).": loss(beta * (now @ PAIR)),
            "beta is missing: the reward is beta (log pi - log ref).": loss(ratios),
            "These are differences of probabilities: now and reference are logarithms, subtract them as they are.":
                loss(beta * ((np.exp(now) - np.exp(reference)) @ PAIR)),
            "beta is a factor once, not twice.": loss(beta * margins),
            "The reference is added: it is subtracted.": loss(beta * ((now + reference) @ PAIR)),
            "These are beta times the losses of the ratios: beta belongs inside, in the reward.": beta * loss(ratios),
            "The margin is divided by beta: multiply.": loss(ratios / beta),
        })  # fmt: skip
        s = -sigmoid(-margins)[:, None] * PAIR
        compare_slopes(e, "slopes", slopes, beta * s, {
            OVERFLOW: not_finite,
            "The factor beta is missing: the margin is beta times the log-probabilities, so the slopes are, too.": s,
            "The sign is wrong: a more likely chosen answer makes the loss smaller.": -beta * s,
            "Both answers have the same slope here: that of the rejected one has the other sign.": beta * np.abs(s) * np.array([-1.0, -1.0]),
            "The rejected answer has no slope here, but it is in the margin, too.": beta * s * np.array([1.0, 0.0]),
            "Rows and columns are exchanged: a row per pair, np.stack([...], 1).": lambda got: np.allclose(got, beta * s.T) if len(s) == 2 else False,
            "This is sigmoid(margin): a pair in the right order pulls little. The slope is -beta sigmoid(-margin).": -beta * sigmoid(margins)[:, None] * PAIR,
            "The slopes are divided by the number of pairs: each is that of its own loss.": beta * s / len(now),
        })  # fmt: skip
        e.need(np.array_equal(given[0], now) and np.array_equal(given[1], reference), CHANGED)


@exercise(
    "37.4", "simpo",
    first_step="rewards = beta * now / tokens; the margin is column 0 minus column 1, less gamma.",
    hints={"ValueError": "now and tokens are (n, 2), the losses (n,), the slopes (n, 2)."},
    kernel=False,
)  # fmt: skip
def simpo(e):
    fixed = (
        ([[-10.0, -12.0], [-8.0, -3.0]], [[5, 4], [2, 3]], 1.5, 0.5),
        ([[-4.0, -4.0]], [[2, 8]], 1.0, 0.0),
        ([[-1.0, -90000.0], [-90000.0, -1.0]], [[1, 10], [10, 1]], 2.0, 1.0),
        ([[-30.0, -40.0], [-7.0, -9.0], [-4.0, -2.0]], [[20, 30], [3, 3], [1, 2]], 2.5, 1.4),
    )

    def draw(rng):
        n = int(rng.integers(2, 7))
        tokens = rng.integers(1, 20, (n, 2))
        tokens[0] = 3, 7
        now = -tokens * rng.uniform(0.2, 2.0, (n, 2))
        return now, tokens, float(rng.uniform(0.5, 3.0)), float(rng.uniform(0.3, 1.5))

    for now, tokens, beta, gamma in e.cases(fixed, draw, times=3):
        now, tokens = np.array(now), np.array(tokens)
        given = now.copy(), tokens.copy()
        shown = f"tokens {tokens.tolist()}, beta {beta:g}, gamma {gamma:g}"
        losses, slopes = pair_of(e, e.call(*given, beta, gamma, case=shown))
        margins = beta * (now / tokens) @ PAIR - gamma
        loss = lambda m: np.logaddexp(0, -m)
        check_losses(e, losses, margins, {
            "gamma is missing: it is subtracted from the margin.": loss(margins + gamma),
            "gamma is added: the chosen answer must win BY gamma, so it is subtracted.": loss(margins + 2 * gamma),
            "gamma is multiplied by beta: it is subtracted from the difference of the rewards.": loss(margins + gamma - beta * gamma),
            "The tokens are missing: these are sums of log-probabilities, divide each by the number of its tokens.": loss(beta * (now @ PAIR) - gamma),
            "Both sums are divided by the tokens of both answers: each has its own number.": loss(beta * (now @ PAIR) / tokens.sum(1) - gamma),
            "gamma belongs into the margin, inside of log sigmoid.": loss(margins + gamma) - gamma,
            "Multiplied by the tokens: divide each sum by the number of its tokens.": loss(beta * (now * tokens) @ PAIR - gamma),
            "The division cuts off: / instead of //.": loss(beta * (now // tokens) @ PAIR - gamma),
            "beta is missing: the reward is beta log pi / n.": loss((now / tokens) @ PAIR - gamma),
        })  # fmt: skip
        s = -beta * sigmoid(-margins)[:, None] * PAIR
        compare_slopes(e, "slopes", slopes, s / tokens, {
            OVERFLOW: not_finite,
            "These are the slopes by the means: divide each by the number of its tokens.": s,
            "gamma is missing in the slopes: the margin has it, as in the losses.": -beta * sigmoid(-margins - gamma)[:, None] * PAIR / tokens,
            "The rejected answer has no slope here, but it is in the margin, too.": s / tokens * np.array([1.0, 0.0]),
            "The factor beta is missing.": s / tokens / beta,
            "The sign is wrong: a more likely chosen answer makes the loss smaller.": -s / tokens,
            "Both answers have the same slope here: that of the rejected one has the other sign.": -np.abs(s / tokens),
            "The slopes are divided by the tokens of the other answer.": s / tokens[:, ::-1],
            "The slopes are divided by the number of pairs: each is that of its own loss.": s / tokens / len(now),
        })  # fmt: skip
        e.need(np.array_equal(given[0], now) and np.array_equal(given[1], tokens), CHANGED)
