"""Exercises of lesson 40: a power law, the best size, likelihoods of options, paired differences."""

import numpy as np

from .attempt import exercise
from .lesson_27 import judged


class Numbers(tuple):
    """Numbers that equal others within rounding."""

    def __eq__(self, other):
        same = isinstance(other, tuple) and len(self) == len(other)
        return same and bool(np.allclose(self, other, rtol=1e-5, atol=1e-15, equal_nan=True))

    def __repr__(self):
        return f"({', '.join(f'{x:.7g}' for x in self)})"

    __hash__ = None


def two(e, got, *names):
    values = e.several(got, *names)
    for name, x in zip(names, values):
        e.need(np.ndim(x) == 0 and np.isreal(x), f"{name} must be one number, got {x!r}.")
    return Numbers(float(x) for x in values)


# ----------------------------------------------------------------------------- the power law
def line(x, y, floor, u=np.log, v=np.log, back=np.exp, sign=-1, swap=False):
    slope, intercept = np.polyfit(u(np.array(x, float)), v(np.array(y) - floor), 1)
    found = (back(intercept), sign * slope)
    return Numbers(found[::-1] if swap else found)


def neighbours(x, y, floor):
    u, v = np.log(x), np.log(np.array(y) - floor)
    slope = np.mean(np.diff(v) / np.diff(u))
    return Numbers((np.exp(v.mean() - slope * u.mean()), -slope))


FIT = {
    "The floor is missing: the line goes through log(y - floor).": lambda x, y, f: line(x, y, 0),
    "b is minus the slope: y falls when x grows.": lambda x, y, f: line(x, y, f, sign=1),
    "a is exp(intercept): the intercept is its logarithm.": lambda x, y, f: line(x, y, f, back=float),
    "x is not in the logarithm: the line is over log(x).": lambda x, y, f: line(x, y, f, u=np.asarray),
    "y - floor is not in the logarithm.": (lambda x, y, f: line(x, y, f, v=np.asarray), lambda x, y, f: line(x, y, f, v=np.asarray, back=float)),
    "Return a first, then b.": lambda x, y, f: line(x, y, f, swap=True),
    "The logarithm of y minus the floor is not the logarithm of y - floor.": lambda x, y, f: line(x, y, 0, v=lambda y: np.log(y) - f),
    "log10 and exp do not fit together: 10**intercept, or the natural logarithm.": lambda x, y, f: line(x, y, f, u=np.log10, v=np.log10),
    "log2 and exp do not fit together: 2**intercept, or the natural logarithm.": lambda x, y, f: line(x, y, f, u=np.log2, v=np.log2),
    "x and y are exchanged: the line is log(y - floor) over log(x).":
        lambda x, y, f: Numbers((np.exp((p := np.polyfit(np.log(np.array(y) - f), np.log(x), 1))[1]), -p[0])),
    "This is the mean slope between neighbours: the least-squares line takes all points together.": neighbours,
    "This is the line through the first and the last point: use all of them.":
        lambda x, y, f: line([x[0], x[-1]], [y[0], y[-1]], f),
}  # fmt: skip


@exercise(
    "40.1", "fit_power",
    first_step="log(y - floor) = log(a) - b log(x) is a line over log(x). np.polyfit(..., ..., 1) gives its slope and intercept.",
    hints={"TypeError": "x and y are lists: np.array(y) - floor."},
    kernel=False,
)  # fmt: skip
def fit_power(e):
    fixed = [([1, 4], [0.8, 0.4], 0.0), ([1, 4], [1.8, 1.4], 1.0), ([10, 100, 1000], [3.0, 2.1, 1.8], 1.5), ([1, 2, 4, 8], [9.0, 5.2, 2.9, 2.1], 1.0)]  # fmt: skip
    for _ in range(3):
        x = np.cumprod(e.rng.uniform(1.5, 3, 5)).round(1)
        a, b, floor = e.rng.uniform((1, 0.2, 0.5), (5, 0.8, 2.0))
        y = floor + a / x**b * np.exp(0.05 * e.rng.normal(size=5))
        fixed.append((x.tolist(), y.round(3).tolist(), round(float(floor), 2) - 0.1))
    cases = [(f"x {x}, y {y}, floor {f}", (x, y, f)) for x, y, f in fixed]
    other = lambda *_: (
        "a is exp(intercept) and b minus the slope of the line through log(y - floor) over log(x)."
    )
    judged(e, cases, lambda got: two(e, got, "a", "b"), line, FIT, other)


# ----------------------------------------------------------------------------- the best size
def size(C, A, alpha, B, beta, ratio=lambda A, alpha, B, beta: alpha * A / (beta * B), six=6, power=lambda alpha, beta: beta):  # fmt: skip
    N = ratio(A, alpha, B, beta) ** (1 / (alpha + beta))
    N *= (C / six) ** (power(alpha, beta) / (alpha + beta))
    return Numbers((N, C / (6 * N)))


SIZE = {
    "The exponent of C / 6 is beta / (alpha + beta): the size grows fast if MORE TOKENS help much.":
        lambda *x: size(*x, power=lambda alpha, beta: alpha),
    "The exponents alpha and beta are missing in the first factor: alpha A over beta B.": lambda *x: size(*x, ratio=lambda A, a, B, b: A / B),
    "The exponent of the first factor is missing: 1 / (alpha + beta).": lambda C, A, a, B, b: size(C, A, a, B, b, ratio=lambda *_: (a * A / (b * B)) ** (a + b)),
    "The first factor is upside down: alpha A over beta B.": lambda *x: size(*x, ratio=lambda A, a, B, b: b * B / (a * A)),
    "C is 6 N D: the 6 is missing under C.": lambda *x: size(*x, six=1),
    "D follows from C = 6 N D: C / (6 N).": lambda *x: Numbers((size(*x)[0], x[0] / size(*x)[0])),
    "Return N first, then D.": lambda *x: Numbers(size(*x)[::-1]),
    "This is the same number of parameters as of tokens: their ratio follows from the constants.": lambda *x: Numbers(((x[0] / 6) ** 0.5,) * 2),
    "20 tokens per parameter is the result for other constants: use the formula.": lambda *x: Numbers(((x[0] / 120) ** 0.5, 20 * (x[0] / 120) ** 0.5)),
}  # fmt: skip


@exercise(
    "40.2", "best_size",
    first_step="ratio = alpha * A / (beta * B). N is ratio ** (1 / (alpha + beta)), times which power of C / 6?",
    kernel=False,
)  # fmt: skip
def best_size(e):
    fixed = [(1e19, 406.4, 0.34, 410.7, 0.28), (6e6, 2.0, 0.5, 2.0, 0.5), (6e6, 1.0, 0.4, 3.0, 0.2), (1e21, 500.0, 0.3, 300.0, 0.35)]  # fmt: skip
    for _ in range(3):
        A, B = e.rng.uniform(100, 500, 2).round(1).tolist()
        alpha, beta = e.rng.uniform(0.2, 0.6, 2).round(2).tolist()
        fixed.append((float(f"{10 ** e.rng.uniform(15, 22):.2e}"), A, alpha, B, beta))
    cases = [(f"C {c:g}, A {A}, alpha {a}, B {B}, beta {b}", (c, A, a, B, b)) for c, A, a, B, b in fixed]  # fmt: skip

    def other(arguments, want, got):
        C = arguments[0]
        if not np.isclose(6 * got[0] * got[1], C, rtol=1e-4):
            return f"6 N D is {6 * got[0] * got[1]:.3g}, and must be C."
        return "At the best N, alpha A / N**alpha equals beta B / D**beta."

    judged(e, cases, lambda got: two(e, got, "N", "D"), size, SIZE, other)


# ----------------------------------------------------------------------------- likelihoods
def best(options, rules=(sum, lambda x: sum(x) / len(x)), pick=lambda x: x.index(max(x))):
    return Numbers(pick([rule(x) for x in options]) for rule in rules)


mean = lambda x: sum(x) / len(x)
CHOOSE = {
    "Of equally good options take the first.": lambda x: best(x, pick=lambda s: len(s) - 1 - s[::-1].index(max(s))),
    "This is the LEAST likely option: log-probabilities are negative, and the largest is the best.": lambda x: best(x, pick=lambda s: s.index(min(s))),
    "Both are chosen by the sum: by_mean divides by the number of tokens.": lambda x: best(x, (sum, sum)),
    "Both are chosen by the mean: by_sum adds them.": lambda x: best(x, (mean, mean)),
    "Return by_sum first, then by_mean.": lambda x: best(x, (mean, sum)),
    "A mean of probabilities is not the mean of log-probabilities.": lambda x: best(x, (sum, lambda y: mean(np.exp(y).tolist()))),
    "These are the values: return the indices of the options.": lambda x: Numbers((max(map(sum, x)), max(map(mean, x)))),
    "Only the first token of each option counts here: add all of them.": lambda x: best(x, (lambda y: y[0], lambda y: y[0])),
    "Absolute values: the largest log-probability is the one closest to 0.": lambda x: best(x, (lambda y: -sum(y), lambda y: -mean(y))),
}  # fmt: skip


@exercise(
    "40.3", "choose",
    first_step="sums = [sum(x) for x in options]. Which index has the largest?",
    hints={"ValueError": "The options have different lengths, so they are no rectangular array: use lists."},
    kernel=False,
)  # fmt: skip
def choose(e):
    fixed = [
        [[-1.5], [-0.75, -0.75, -0.75]], [[-2.0, -2.0], [-4.0]], [[-1.0], [-1.0]], [[-3.0, -0.5], [-0.25, -0.25, -0.25], [-5.0]],
        [[-0.5, -4.0], [-1.0, -1.0]], [[-7.0]], [[-1.0, -1.0], [-2.0], [-0.5, -1.5]],
    ]  # fmt: skip
    for _ in range(8):
        sizes = e.rng.integers(1, 5, int(e.rng.integers(2, 5)))
        fixed.append([(-e.rng.integers(1, 16, n) / 4).tolist() for n in sizes])
    cases = [(f"options {x}", (x,)) for x in fixed]
    other = lambda *_: (
        "by_sum: the option with the largest sum. by_mean: the one with the largest sum over its number of tokens."
    )
    judged(e, cases, lambda got: two(e, got, "by_sum", "by_mean"), best, CHOOSE, other)


# ----------------------------------------------------------------------------- comparing
def paired(a, b, error=lambda a, b, d, n: d.std(ddof=1) / np.sqrt(n), sign=1):
    a, b = np.array(a, float), np.array(b, float)
    return Numbers(((a - b).mean() * sign, error(a, b, a - b, len(a))))


COMPARE = {
    "The errors of the two shares are combined, as if the questions were different ones: take the deviation of the differences.":
        (lambda a, b: paired(a, b, lambda a, b, d, n: np.sqrt((a.var(ddof=1) + b.var(ddof=1)) / n)),
         lambda a, b: paired(a, b, lambda a, b, d, n: np.sqrt((a.var() + b.var()) / n))),
    "This is the difference of the two errors: take the deviation of the differences.":
        lambda a, b: paired(a, b, lambda a, b, d, n: abs(a.std(ddof=1) - b.std(ddof=1)) / np.sqrt(n)),
    "n - 1 belongs into the deviation alone: divide it by the root of n.": lambda a, b: paired(a, b, lambda a, b, d, n: d.std(ddof=1) / np.sqrt(n - 1)),
    "These are two standard errors: return one.": lambda a, b: paired(a, b, lambda a, b, d, n: 2 * d.std(ddof=1) / np.sqrt(n)),
    "n - 1 belongs into the denominator of the deviation: std(ddof=1).": lambda a, b: paired(a, b, lambda a, b, d, n: d.std() / np.sqrt(n)),
    "This is the deviation of one question: divide by the root of n.": lambda a, b: paired(a, b, lambda a, b, d, n: d.std(ddof=1)),
    "Divide by the root of n, not by n.": lambda a, b: paired(a, b, lambda a, b, d, n: d.std(ddof=1) / n),
    "This is the variance over n: the error is its root.": lambda a, b: paired(a, b, lambda a, b, d, n: d.var(ddof=1) / n),
    "The difference is a - b, not b - a.": lambda a, b: paired(a, b, sign=-1),
    "The differences lost their signs: a - b may be -1.": lambda a, b: Numbers((np.abs(np.array(a) - b).mean(), np.abs(np.array(a) - b).std(ddof=1) / np.sqrt(len(a)))),
    "This is the sum of the differences: divide by n.": lambda a, b: Numbers((sum(a) - sum(b), paired(a, b)[1])),
    "The error is that of the first model alone.": lambda a, b: paired(a, b, lambda a, b, d, n: a.std(ddof=1) / np.sqrt(n)),
}  # fmt: skip


@exercise(
    "40.4", "compare",
    first_step="d = np.array(a) - np.array(b): +1, 0 or -1 for each question.",
    hints={"TypeError": "a and b are lists: np.array(a) - np.array(b)."},
    kernel=False,
)  # fmt: skip
def compare(e):
    fixed = [([1, 1, 1, 0], [1, 0, 1, 0]), ([1, 0], [0, 1]), ([1, 1, 0], [1, 1, 0]), ([0, 0, 1, 0, 1, 1], [1, 0, 1, 1, 1, 0])]  # fmt: skip
    for _ in range(4):
        n = int(e.rng.integers(5, 20))
        fixed.append(((e.rng.random(n) < 0.7).astype(int).tolist(), (e.rng.random(n) < 0.5).astype(int).tolist()))  # fmt: skip
    cases = [(f"a {a}, b {b}", (a, b)) for a, b in fixed]
    other = lambda *_: "The mean of d = a - b, and d.std(ddof=1) / sqrt(n)."
    judged(e, cases, lambda got: two(e, got, "difference", "error"), paired, COMPARE, other)
