"""Exercises of lesson 26: the policy gradient, advantages of a group, the clipped ratio, the KL to a reference."""

import numpy as np

from .attempt import exercise

EMPTY = "Without samples the mean of nothing is NaN: return zeros."
CHANGED = "An input was changed: compute new arrays."


def not_finite(got):
    return not np.isfinite(got).all()


@exercise(
    "26.1", "policy_gradient",
    first_step="compute p, the softmax of the logits. One sample contributes A (onehot(action) - p).",
    hints={"ValueError": "The shapes do not fit: logits (V,), actions and advantages (n,). onehot(action) - p has shape (V,) for each sample."},
    kernel=False,
)  # fmt: skip
def policy_gradient(e):
    rng = e.rng
    more = int(rng.integers(5, 9))
    sizes = ((4, 1, 1.0), (3, 7, 1.0), (more, 12, 2.0), (more, 6, 1000.0), (4, 0, 1.0))
    for V, n, spread in sizes:
        logits, advantages = spread * rng.normal(size=V), rng.normal(0.5, 2.0, n)
        logits[0] = max(logits[0], spread)
        if spread > 100:
            logits[:2] = logits.max() + [1000.0, 999.0]  # two probabilities that are not 0
        actions = rng.integers(0, V, n)
        if n > 1:
            actions[:2] = actions[0]  # one action occurs twice
        given = [logits.copy(), actions.copy(), advantages.copy()]
        got = e.call(*given, case=f"V = {V}, n = {n}, logits up to {np.abs(logits).max():.0f}")
        p = np.exp(logits - logits.max())
        p /= p.sum()
        rows = np.eye(V)[actions] - p
        mean = lambda x: x.sum(0) / max(n, 1)
        want = mean(advantages[:, None] * rows)
        once, weight = np.zeros(V), p[actions][:, None]
        once[actions] += advantages / max(n, 1)
        chosen = np.eye(V)[actions] * (1 - weight) * advantages[:, None]
        overflow = "exp of a large logit overflows: subtract the largest logit first."
        e.need(
            np.shape(got) != () or got is None,
            "This is one number, the value: return its derivative by each of the V logits, (V,).",
        )
        e.need(
            np.shape(got) != (n, V), "This has a row per sample: take the mean over the samples."
        )
        e.same("gradient", got, want, {
            (overflow if n else EMPTY): not_finite,
            "The sign is wrong: this goes downhill. A positive advantage must raise the logit of its action.": -want,
            "-p is missing: the derivative of log p by the logits is onehot - p.": mean(np.eye(V)[actions] * advantages[:, None]),
            "This is the sum over the samples: divide by n.": want * n,
            "An action that occurs twice counts once: g[actions] += x keeps one of the equal indices. Use np.add.at, a loop, or rows of np.eye(V).":
                once - p * mean(advantages),
            "Only the logit of the drawn action has a gradient here. All others enter p as well: they go down.": mean(chosen),
            "This is the derivative of p, not of log p: divide by the probability of the action.": mean(weight * advantages[:, None] * rows),
            "Each sample has its own advantage: multiply before you take the mean.": mean(advantages) * mean(rows),
            "Logits are not probabilities: subtract their softmax.": mean(advantages[:, None] * (np.eye(V)[actions] - logits)),
            "The advantages are missing: each sample counts the same here.": mean(rows),
            "This is divided by the number of logits: divide by n, the number of samples.": want * n / V,
            "The mean of the advantages is subtracted: use the advantages as they are given.": mean((advantages - mean(advantages))[:, None] * rows),
            "These probabilities do not sum to 1: divide exp by its sum.": mean(advantages[:, None] * (np.eye(V)[actions] - np.exp(logits - logits.max()))),
            "The advantage of a sample multiplies its p, too: subtract p from each onehot, before the product.": mean(np.eye(V)[actions] * advantages[:, None]) - p,
            "Right for small logits. With large ones, subtract the largest logit before exp; another constant or a limit changes the softmax.":
                lambda got: spread > 100,
        })  # fmt: skip
        e.need(all(map(np.array_equal, given, (logits, actions, advantages))), CHANGED)


def _more_than(got, centered, std):
    """Is it centered / (std + one more number)?"""
    more = np.where(centered == 0, np.nan, centered / got) - std
    return np.nanmin(more) > 1e-3 and np.nanmax(more) < 1.01 * np.nanmin(more)


@exercise(
    "26.2", "group_advantages",
    first_step="a row is a group: subtract its mean from each reward.",
    hints={"ValueError": "mean(1) and std(1) have shape (P,), which does not fit (P, G): keepdims=True makes them (P, 1)."},
    kernel=False,
)  # fmt: skip
def group_advantages(e):
    rng = e.rng
    some, many = int(rng.integers(2, 5)), int(rng.integers(5, 9))
    shapes = ((some, many, ""), (3, 3, ""), (3, 3, "equal"), (some, many, "large"), (0, 4, "empty"))
    for P, G, kind in shapes:
        # deviations from 1.5 to 4, so that the 1e-4 does not matter, and variances differ from them
        rewards = rng.normal(size=(P, G))
        rewards -= rewards.mean(1, keepdims=True)
        rewards *= rng.uniform(1.5, 4.0, (P, 1)) / rewards.std(1, keepdims=True)
        rewards += rng.normal(1.0, 2.0, (P, 1))
        if kind == "equal":
            rewards[1:] = [[0.75], [0.1]]  # the mean of three times 0.1 is not 0.1
        rewards += 1e8 * (kind == "large")
        given = rewards.copy()
        note = {"equal": ", two groups have equal rewards", "large": ", rewards near 1e8"}
        got = e.call(given, case=f"{P} groups of {G}{note.get(kind, '')}")
        mean, std = rewards.mean(1, keepdims=True), rewards.std(1, keepdims=True) + 1e-4
        centered = rewards - mean
        others = (rewards.sum(1, keepdims=True) - rewards) / (G - 1)
        mistakes = {
            "The sign is wrong: a reward above the mean has a positive advantage.": -centered / std,
            "Divide by the standard deviation of the group.": centered,
            "This is divided by the variance: take the standard deviation.": centered / (std - 1e-4 + 1e-12) ** 2,
            "This is not centred: subtract the mean of the group from each reward.": rewards / std,
            "This divides by n - 1 (ddof=1): here the standard deviation is np.std's, of the group itself.": centered / (std * (G / (G - 1)) ** 0.5),
            "The mean of the OTHER rewards is subtracted. That is a good baseline, too, but here the mean has all of the group.":
                (rewards - others) / std,
            "This is divided by the root of the SUM of squares: the deviation is the root of their mean.": centered / (std * G**0.5),
            "This is divided by the mean of |reward - mean|: the standard deviation is the root of the mean of the squares.":
                centered / (np.abs(centered).mean(1, keepdims=True) + 1e-4),
            "The number next to the deviation is too large: add 1e-4.": lambda got: _more_than(got, centered, std),
        }  # fmt: skip
        if P:
            whole = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            mistakes |= {
                "Mean and deviation are those of the whole batch: each prompt has its own.": whole,
                "The mean is that of the whole batch: each prompt has its own.": (rewards - rewards.mean()) / std,
                "The deviation is that of the whole batch: each prompt has its own.": centered / (rewards.std() + 1e-4),
                "This is the mean over the prompts (axis 0): a group is a row, axis 1.":
                    (rewards - rewards.mean(0)) / (rewards.std(0) + 1e-4),
            }  # fmt: skip
        if kind == "equal":
            mistakes = {
                "0 / 0: all rewards of a group are equal, so the deviation is 0. Add a small number, 1e-4, to it.": not_finite,
                "All rewards of a group are equal: none is better than the mean, so the advantages are 0. (Rounding may leave 1e-17 in place of 0: add 1e-4 before you divide.)":
                    lambda got: np.abs(got[1:]).max() > 1e-6,
                **mistakes,
            }  # fmt: skip
        if kind == "large":
            mistakes["Right for small rewards. With large ones the rounding errors are as large as the differences: stay in float64, and subtract "
                     "the mean before you square."] = lambda got: True  # fmt: skip
        if not P and isinstance(got, np.ndarray) and not got.size:
            continue  # np.array of an empty list has shape (0,)
        # the small number next to the deviation may be any
        e.same("advantages", got, centered / std, mistakes, rtol=1e-3, atol=1e-6)
        e.need(np.array_equal(given, rewards), CHANGED)


def _fits(got, want):
    return got.shape == want.shape and np.allclose(got, want, 1e-5, 1e-6)


@exercise(
    "26.3", "clipped",
    first_step="ratio = np.exp(now - then). Then the two products: with the ratio, and with the clipped ratio (np.clip).",
    kernel=False,
)  # fmt: skip
def clipped(e):
    rng = e.rng
    for kind, n in (("", 6), ("", 20), ("small", 8), ("empty", 0)):
        eps = float(rng.uniform(0.1, 0.3))
        ratio = np.exp(rng.normal(0.0, 0.6, n))
        A = rng.normal(0.0, 2.0, n)
        if n:  # inside, above and below, with either sign
            ratio[:6] = 1.02, 0.97, 1.5, 1.6, 0.5, 0.6
            A[:6] = np.abs(A[:6]) * [1, -1, 1, -1, 1, -1] + [1, -1, 1, -1, 1, -1]
        then = rng.normal(-2.0, 0.5, n) - 1000.0 * (kind == "small")
        now = then + np.log(ratio)
        ratio = np.exp(now - then)
        given = [now.copy(), then.copy(), A.copy()]
        note = ", log-probabilities near -1000" * (kind == "small")
        got = e.call(*given, eps, case=f"n = {n}, eps = {eps:.2f}{note}")
        losses, slopes = e.several(got, "losses", "slopes")
        for name, values in (("losses", losses), ("slopes", slopes)):
            e.need(
                np.ndim(values) == 1 or n == 0,
                f"{name} must hold one number per token, (n,): take no mean or sum.",
            )
        free, bound = ratio * A, np.clip(ratio, 1 - eps, 1 + eps) * A
        inverse = A / ratio
        want, above = -np.minimum(free, bound), np.minimum(ratio, 1 + eps) * A
        e.same("losses", losses, want, {
            "The probabilities are so small that exp gives 0: take exp of the difference, not a quotient of two exp.": not_finite,
            "The sign is wrong: a loss is minus what is to grow.": -want,
            "This is the larger of the two: the loss is minus the SMALLER product, so that leaving the range gains nothing.":
                -np.maximum(free, bound),
            "Nothing is clipped: compare with the product of the clipped ratio.": -free,
            "Always the clipped product: where the ratio left the range against its advantage, the smaller product is the unclipped one.": -bound,
            "The ratio is upside down: it is pi(now) / pi(then).": -np.minimum(inverse, np.clip(1 / ratio, 1 - eps, 1 + eps) * A),
            "This is the logarithm of the ratio: take exp of the difference.":
                -np.minimum((now - then) * A, np.clip(now - then, 1 - eps, 1 + eps) * A),
            "The lower bound is missing: a negative advantage must stop to count at 1 - eps.": -np.minimum(free, above),
            "The smaller RATIO is not the smaller product: multiply by A before you take the minimum.":
                -np.minimum(ratio, np.clip(ratio, 1 - eps, 1 + eps)) * A,
            "The logarithm is clipped: clip the ratio, between 1 - eps and 1 + eps.": -np.minimum(free, np.exp(np.clip(now - then, -eps, eps)) * A),
            "The ratio is clipped between -eps and eps: the range is 1 - eps to 1 + eps.": -np.minimum(free, np.clip(ratio, -eps, eps) * A),
            "The product is clipped: clip the ratio, and then multiply by A.": -np.minimum(free, np.clip(free, 1 - eps, 1 + eps)),
            "eps is fixed to 0.2 here: it is an argument.": -np.minimum(free, np.clip(ratio, 0.8, 1.2) * A),
            "These are the slopes: return losses, slopes, in this order.": np.where(free <= bound, -free, 0.0),
        })  # fmt: skip
        kept, inside = free <= bound, np.abs(ratio - 1) <= eps
        slope = np.where(kept, -free, 0.0)
        e.same("slopes", slopes, slope, {
            "Where the loss is clipped it is constant: its slope is 0.": -free,
            "The ratio may be outside the range and the token still count: the slope is 0 only where the CLIPPED product is the smaller one.":
                np.where(inside, -free, 0.0),
            "This is the slope by the ratio. By the log-probability it is times the ratio, because d ratio / d now = ratio.": np.where(kept, -A, 0.0),
            "The sign is wrong: it is the slope of the LOSS.": -slope,
            "The other tokens: the slope is 0 where the clipped product is the smaller one, and -ratio A elsewhere.": np.where(kept, 0.0, -free),
            "This is the derivative by `then`, or the ratio is upside down.": np.where(kept, -inverse, 0.0),
            "A constant has slope 0: where the loss is clipped, it does not depend on now.": want,
            "Within the range the two products are equal, and the slope is that of the unclipped one: compare with <=.": np.where(free < bound, -free, 0.0),
            "These are divided by n: every token has its own loss, and this is the slope of that one.": slope / max(n, 1),
            "Above 1 + eps the slope is 0 only if A is positive, below 1 - eps only if A is negative.":
                lambda got: any(_fits(got, np.where(keep, -free, 0.0)) for keep in (ratio <= 1 + eps, ratio >= 1 - eps)),
            "A is missing: the slope of -ratio A is -ratio A.": np.where(kept, -ratio, 0.0),
        })  # fmt: skip
        e.need(all(map(np.array_equal, given, (now, then, A))), CHANGED)


@exercise(
    "26.4", "kl_to_reference",
    first_step="select the tokens that count, d = reference[counted] - now[counted]. The value is the mean of exp(d) - d - 1.",
    kernel=False,
)  # fmt: skip
def kl_to_reference(e):
    rng = e.rng
    more = int(rng.integers(2, 5))
    for kind, B, T in (("", 2, 3), ("some", more, 6), ("small", 3, 5), ("none", 2, 4)):
        now, reference = (rng.normal(-2.0, 0.6, (B, T)) for _ in range(2))
        counted = np.ones((B, T), bool)
        if kind in ("some", "small"):
            counted = rng.random((B, T)) < 0.6
            counted[0], counted[1] = np.arange(T) > 0, np.arange(T) == 1
        if kind == "small":
            now, reference = now - 1000, reference - 1000
        counted &= kind != "none"
        n, d = int(counted.sum()), np.where(counted, reference - now, 0.0)
        empty = ~counted & (rng.random((B, T)) < 0.5)
        if not counted.all():
            empty[0, 0], empty[1, 0] = True, False  # NaN may stand there, or a number
        now, reference = (np.where(empty, np.nan, x) for x in (now, reference))
        filled = ~empty
        given = [now.copy(), reference.copy(), counted.copy()]
        note = ", log-probabilities near -1000" * (kind == "small")
        got = e.call(*given, case=f"B = {B}, T = {T}, {n} of {B * T} tokens counted{note}")
        value, slopes = e.several(got, "value", "slopes")
        e.need(np.ndim(value) == 0, "value must be one number: the mean over the counted tokens.")
        each = np.exp(d) - d - 1
        mean = lambda x: np.where(counted, x, 0.0).sum() / max(n, 1)
        lengths = np.maximum(counted.sum(1), 1)
        unsafe = {
            "some": "NaN stands where no token is counted, and 0 times NaN is NaN: select the counted tokens with x[counted], or use np.where.",
            "small": "The probabilities are so small that exp gives 0: take exp of the difference, not a quotient of two exp.",
            "none": "No token is counted, and the mean of nothing is NaN: return 0 and zeros.",
        }.get(kind, "This is not a finite number.")  # fmt: skip
        want = mean(each)
        by_nan = reference[filled] - now[filled]
        by_nan = (np.exp(by_nan) - by_nan - 1).sum()
        e.same("value", value, want, {
            unsafe: not_finite,
            "d has the wrong sign: it is log pi(reference) - log pi(now). The tokens were drawn from pi(now).": mean(np.exp(-d) + d - 1),
            "This is the mean of -d (k1), which may be negative: exp(d) - 1 is missing.": mean(-d),
            "This is the mean of d^2 / 2 (k2), which is biased: take exp(d) - d - 1.": mean(d * d / 2),
            "-1 is missing: for d = 0 the value must be 0.": want + 1,
            "-d is missing: exp(d) - 1 alone has mean 0.": mean(np.exp(d) - 1),
            "This divides by all tokens: divide by the number of counted ones.": want * n / (B * T),
            "This is the sum: divide by the number of counted tokens.": want * n,
            "This is a mean of the means of rows, in which a token of a short row weighs more: take the mean over all counted tokens.":
                (np.where(counted, each, 0.0).sum(1) / lengths).mean(),
            "The sign is wrong: the value is never negative.": -want,
            "A number may stand where no token is counted: `counted` says which tokens count, not NaN.":
                lambda got: any(np.isclose(got, by_nan / max(k, 1)) for k in (n, filled.sum())),
            "Each token is weighted by its probability. The mean is over tokens that were drawn, so the likely ones are more often among them already.":
                mean(np.exp(np.where(counted, now, 0.0)) * each),
        })  # fmt: skip
        slope = np.where(counted, (1 - np.exp(d)) / max(n, 1), 0.0)
        e.same("slopes", slopes, slope, {
            unsafe: not_finite,
            "The sign is wrong, or this is the derivative by reference: d falls when now rises.": -slope,
            "1 / n is missing: value is a mean, and each of its n terms counts 1 / n.": slope * n,
            "This divides by all tokens: each counted one counts 1 / n, with n the number of counted tokens.": slope * n / (B * T),
            "exp(d) is missing: this is the derivative of -d alone.": np.where(counted, 1 / max(n, 1), 0.0),
            "The 1 is missing: -d has a derivative, too.": np.where(counted, -np.exp(d) / max(n, 1), 0.0),
            "A token that is not counted must have the slope 0.": lambda got: np.any(got[~counted] != 0),
            "This is divided by the counted tokens of the row: value is a mean over all of them.": slope * n / lengths[:, None],
            "This is divided by the counted tokens of the row, and by the rows: value is a mean over all counted tokens.": slope * n / lengths[:, None] / B,
            "This is the derivative of d^2 / 2: that of exp(d) - d - 1 is needed.": -np.where(counted, d, 0.0) / max(n, 1),
        })  # fmt: skip
        e.need(all(np.array_equal(a, b, equal_nan=a.dtype != bool) for a, b in zip(given, (now, reference, counted))), CHANGED)  # fmt: skip
