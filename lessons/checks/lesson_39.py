"""Exercises of lesson 39: repetition, MinHash, bands, mixtures."""

from itertools import pairwise

import numpy as np

from .attempt import exercise
from .lesson_27 import judged
from .lesson_38 import Number


def one_number(e, got):
    e.need(got is not None, "Nothing is returned: end with `return` and the number.")
    e.need(np.ndim(got) == 0 and np.isreal(got), f"Return one number, got {got!r}.")
    return Number(got)


# ----------------------------------------------------------------------------- repetition
def grams(tokens, n):
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def share(f):
    """A mistake: f(n-grams) of a document that has some, else 0."""
    return lambda tokens, n: Number(f(g) if (g := grams(tokens, n)) else 0)


right_share = share(lambda g: 1 - len(set(g)) / len(g))
REPEATED = {
    "This is the share of different n-grams: those that occurred before are the rest.": share(lambda g: len(set(g)) / len(g)),
    "All n-grams of a kind that occurs twice are counted: the first of them has not occurred before.":
        share(lambda g: sum(g.count(x) > 1 for x in g) / len(g)),
    "This is the share of the kinds that repeat: count n-grams, over all n-grams.": share(lambda g: sum(g.count(x) > 1 for x in set(g)) / len(set(g))),
    "The last n-gram is missing: there are len(tokens) - n + 1.": lambda t, n: right_share(t[:-1], n),
    "Tokens are counted, not n-grams: a gram is a tuple of n neighbours.": lambda t, n: Number(1 - len(set(t)) / len(t) if t else 0),
    "The share is over the len(tokens) - n + 1 n-grams, not over all tokens: those at the end with fewer than n tokens are none.": lambda t, n: Number((len(grams(t, n)) - len(set(grams(t, n)))) / len(t) if len(t) >= n else 0),
    "This is their number: divide by the number of all n-grams.": share(lambda g: len(g) - len(set(g))),
    "An n-gram has n tokens: tokens[i : i + n].": lambda t, n: right_share(t, n + 1),
    "The order counts: an n-gram is a tuple, not a set.": share(lambda g: 1 - len(set(map(frozenset, g))) / len(g)),
    "Divide by the number of all n-grams: the first one counts, too.": lambda t, n: Number((len(g) - len(set(g))) / (len(g) - 1) if len(g := grams(t, n)) > 1 else 0),
    "The share is from 0 to 1, not in percent.": share(lambda g: 100 * (1 - len(set(g)) / len(g))),
    "An n-gram is compared with the one before it only: any earlier one counts.": share(lambda g: sum(a == b for a, b in pairwise(g)) / len(g)),
    "n-grams that do not overlap are counted: one begins at every token.": lambda t, n: Number(1 - len(set(g)) / len(g) if (g := grams(t, n)[::n]) else 0),
}  # fmt: skip


@exercise(
    "39.1", "repeated_share",
    first_step="make a list of all n-grams: tuples of tokens[i : i + n]. How many of them are different?",
    hints={
        "ZeroDivisionError": "A document of fewer than n tokens has no n-grams: return 0.0.",
        "TypeError": "A list cannot be in a set: make a tuple of it.",
    },
    kernel=False,
)  # fmt: skip
def repeated_share(e):
    fixed = [([1, 2, 3, 1, 2, 3, 1], 2), ([1, 1, 1, 1], 1), ([1, 2, 3], 2), ([1, 2], 3), ([], 1), ([4, 4, 4, 5, 4, 4], 2), ([7], 1), ([1, 2, 1, 2, 1], 3)]  # fmt: skip
    for _ in range(8):
        n, size = int(e.rng.integers(1, 4)), int(e.rng.integers(3, 16))
        fixed.append((e.rng.integers(0, 3, size).tolist(), n))
    cases = [(f"tokens {t}, n = {n}", (t, n)) for t, n in fixed]
    other = lambda *_: "All n-grams but the first of each kind, over all n-grams."
    judged(e, cases, lambda got: one_number(e, got), right_share, REPEATED, other)


# ----------------------------------------------------------------------------- MinHash
@exercise(
    "39.2", "signature",
    first_step="for one k: (a[k] * grams + b[k]) % prime are the values of all n-grams. Which of them is kept?",
    kernel=False,
)  # fmt: skip
def signature(e):
    fixed = [
        (np.array([5]), np.array([1, 3]), np.array([0, 2]), 11),
        (np.array([2, 7, 10]), np.array([1, 3, 5, 10]), np.array([0, 2, 9, 10]), 11),
        (np.array([2**31 - 2, 5, 12345678]), np.array([2**31 - 2, 2]), np.array([2**31 - 2, 7]), 2**31 - 1),
    ]  # fmt: skip

    def draw(rng):
        prime, K = 2**31 - 1, int(rng.integers(2, 6))
        x = np.sort(rng.integers(0, prime, int(rng.integers(1, 9))))
        return x, *rng.integers(1, prime, (2, K)), prime

    for x, a, b, prime in e.cases(fixed, draw, times=3):
        x, a, b = (np.array(v, np.int64) for v in (x, a, b))
        values = (a[:, None] * x[None, :] + b[:, None]) % prime
        where = f"grams {x.tolist()}, a {a.tolist()}, b {b.tolist()}, prime {prime}"
        got = e.call(x.copy(), a.copy(), b.copy(), prime, case=where)
        e.need(got is not None, "Nothing is returned: end with `return` and the signature.")
        got = np.asarray(got)
        e.need(got.shape == a.shape, f"Return {len(a)} numbers, one for each hash function, got shape {got.shape}.")  # fmt: skip
        at = a[:, None] * x[None, :] + b[:, None]
        mistakes = {
            "This is the largest value: take the smallest.": values.max(1),
            "The smallest before `% prime` was taken: first % prime, then the smallest.": at.min(1) % prime,
            "The remainder is missing: % prime.": at.min(1),
            "b is missing: a[k] * x + b[k].": ((a[:, None] * x) % prime).min(1),
            "b was added after the remainder: (a[k] * x + b[k]) % prime.": ((a[:, None] * x) % prime + b[:, None]).min(1),
            "This is the n-gram with the smallest value: return the value.": x[values.argmin(1)],
            "This is the place of the smallest value: return the value.": values.argmin(1),
            "The product does not fit into 32 bits: compute in int64.": ((at.astype(np.int32)) % np.int32(min(prime, 2**31 - 1))).min(1),
            "float64 has 53 bits, the product up to 62: compute in int64.": ((a[:, None].astype(float) * x + b[:, None]) % prime).min(1),
            "a and b are exchanged.": ((b[:, None] * x + a[:, None]) % prime).min(1),
        }  # fmt: skip
        e.same("the signature", got.astype(np.float64), values.min(1).astype(np.float64), mistakes, rtol=0, atol=0.5)  # fmt: skip


# ----------------------------------------------------------------------------- bands
def first_of(rows, bands, numbered=True, only_kept=False, parts=np.split, every=any, back=None):
    """The right answer. back: only so many documents before it count"""
    seen, kept = [], []
    for d, row in enumerate(rows):
        keys = [((i if numbered else 0), *p.tolist()) for i, p in enumerate(parts(row, bands))]
        known = set().union(*seen[-back:] if back else seen)
        new = not every(key in known for key in keys)
        if new:
            kept.append(d)
        seen.append(set(keys) if new or not only_kept else set())
    return kept


def last_ones(rows, bands):
    return sorted(len(rows) - 1 - i for i in first_of(rows[::-1], bands))


FIRST = {
    "All bands must be equal here: one is enough.": (lambda x, b: first_of(x, b, every=all), lambda x, b: first_of(x, 1)),
    "Equal numbers in DIFFERENT bands mean nothing: the number of the band belongs to the key.": lambda x, b: first_of(x, b, numbered=False),
    "Bands of a dropped document count, too: add its keys before you go on.": lambda x, b: first_of(x, b, only_kept=True),
    "The last document of each kind is kept: keep the first.": last_ones,
    "These are the documents that are dropped.": lambda x, b: [i for i in range(len(x)) if i not in first_of(x, b)],
    "A document is compared with the one before it only: any earlier one counts.": lambda x, b: first_of(x, b, back=1),
    "A band has the K // bands NEIGHBOURING numbers from i * (K // bands) on, not every so many.":
        lambda x, b: first_of(x, b, parts=lambda row, n: [row[i::n] for i in range(n)]),
    "`bands` is the number of bands, not the numbers in one.": lambda x, b: first_of(x, b, parts=lambda row, n: np.split(row, len(row) // n)),
    "One equal number is not enough: all numbers of a band must be equal.": lambda x, b: first_of(x, b, parts=lambda row, n: np.split(row, len(row))),
    "Nothing is dropped: a key that was seen before means a duplicate. (An array in a set is compared by identity: make a tuple of it.)":
        lambda x, b: list(range(len(x))),
    "A key must tell numbers apart: 1, 23 and 12, 3 are written with the same digits. Make a tuple of them.":
        lambda x, b: first_of(x, b, parts=lambda row, n: [np.array([int("".join(map(str, p.tolist())))]) for p in np.split(row, n)]),
    "The order of a band's numbers counts: 1, 2 and 2, 1 are different. Make a tuple of them, not a set.":
        (lambda x, b: first_of(x, b, parts=lambda row, n: [np.unique(p) for p in np.split(row, n)]), lambda x, b: first_of(x, b, parts=lambda row, n: [np.sort(p) for p in np.split(row, n)])),
    "Different numbers may have the same sum: a key needs all of them.": lambda x, b: first_of(x, b, parts=lambda row, n: [p.sum(keepdims=True) for p in np.split(row, n)]),
    "Only the first band is looked at.": lambda x, b: first_of(x, b, parts=lambda row, n: np.split(row, n)[:1]),
}  # fmt: skip


@exercise(
    "39.3", "first_ones",
    first_step="for each document the keys of its bands: (i, *numbers of band i). Was one of them seen before?",
    hints={"TypeError": "An array or a list cannot be in a set: make a tuple of its numbers."},
    kernel=False,
)  # fmt: skip
def first_ones(e):
    fixed = [
        ([[1, 2, 3, 4], [1, 2, 9, 9], [5, 5, 5, 5]], 2), ([[1, 2, 3, 4], [3, 4, 1, 2]], 2), ([[1, 2, 3, 4], [1, 2, 7, 7], [0, 0, 7, 7]], 2),
        ([[1, 1, 2, 2]] * 3, 2), ([[1, 2, 3, 4], [1, 9, 3, 8]], 2), ([[1, 2, 3, 4, 5, 6], [0, 0, 0, 4, 5, 6], [1, 2, 0, 0, 5, 6]], 2),
        ([[1, 2, 3], [9, 2, 8], [7, 7, 7]], 3), ([[1, 2, 3, 4], [1, 2, 3, 5]], 1), ([[1, 2], [3, 4], [1, 5]], 2), ([[4, 4]], 2),
        ([[1, 23, 5, 6], [12, 3, 7, 8]], 2), ([[1, 2, 5, 6], [2, 1, 7, 8]], 2),
    ]  # fmt: skip
    for _ in range(8):
        bands, rows = int(e.rng.integers(1, 4)), int(e.rng.integers(1, 4))
        fixed.append((e.rng.integers(0, 3, (8, bands * rows)).tolist(), bands))
    cases = [(f"signatures {x}, {b} bands", (np.array(x, np.int64), b)) for x, b in fixed]

    def read(got):
        e.need(got is not None, "Nothing is returned: end with `return` and the list of indices.")
        e.need(np.ndim(got) == 1 and all(isinstance(x, (int, np.integer)) for x in got),
               f"Return a list of indices, whole numbers, got {got!r}.")  # fmt: skip
        return [int(x) for x in got]

    def other(arguments, want, got):
        if sorted(got) == want:
            return "The indices must be ascending."
        d = min(set(got) ^ set(want))
        if d in got:
            return f"Document {d} has a band whose numbers are those of the same band of an earlier document."
        return f"No band of document {d} has the numbers of the same band of an earlier document."

    judged(e, cases, read, first_of, FIRST, other)


# ----------------------------------------------------------------------------- mixtures
class Lists(tuple):
    """p and epochs, equal to others within rounding."""

    def __eq__(self, other):
        return isinstance(other, tuple) and all(len(x) == len(y) and np.allclose(x, y, rtol=1e-6) for x, y in zip(self, other))  # fmt: skip

    __hash__ = None


def mixed(tokens, alpha, total, power=lambda n, alpha: n**alpha, epochs=lambda p, total, n, all_: p * total / n):  # fmt: skip
    w = [power(n, alpha) for n in tokens]
    p = [x / sum(w) for x in w]
    return Lists((p, [epochs(x, total, n, sum(tokens)) for x, n in zip(p, tokens)]))


MIXTURE = {
    "p is in proportion to the sizes themselves: use size ** alpha.": lambda t, a, n: mixed(t, 1, n),
    "p is the same for all sources: use size ** alpha.": lambda t, a, n: mixed(t, 0, n),
    "alpha is a power, not a factor: size ** alpha.": lambda t, a, n: mixed(t, a, n, power=lambda x, alpha: alpha * x),
    "This is alpha ** size: the size is the base.": lambda t, a, n: mixed(t, a, n, power=lambda x, alpha: x ** (1 / alpha) if alpha else 1),
    "The sum of p must be 1: divide by the sum of all powers.": lambda t, a, n: Lists(([x**a for x in t], [x**a * n / x for x in t])),
    "Divide by the sum of the powers, not by the sum of the sizes.":
        lambda t, a, n: Lists(([x**a / sum(t) for x in t], [x**a / sum(t) * n / x for x in t])),
    "These are the tokens of each source: its epochs are the tokens over its size.": lambda t, a, n: mixed(t, a, n, epochs=lambda p, total, x, s: p * total),
    "Epochs are over the size of the source, not of all sources together.": lambda t, a, n: mixed(t, a, n, epochs=lambda p, total, x, s: p * total / s),
    "The share of the source is missing in its epochs: it gives p * total tokens.": lambda t, a, n: mixed(t, a, n, epochs=lambda p, total, x, s: total / x),
    "Epochs are upside down: tokens that are read, over the size.": lambda t, a, n: mixed(t, a, n, epochs=lambda p, total, x, s: x / (p * total)),
    "Epochs need not be whole numbers.":
        (lambda t, a, n: mixed(t, a, n, epochs=lambda p, total, x, s: p * total // x), lambda t, a, n: mixed(t, a, n, epochs=lambda p, total, x, s: round(p * total / x))),
}  # fmt: skip


@exercise(
    "39.4", "mixture",
    first_step="powers = [n**alpha for n in tokens]. Which share of their sum is each?",
    kernel=False,
)  # fmt: skip
def mixture(e):
    fixed = [([24000, 2400], 0.5, 115200), ([100, 300], 1, 1000), ([100, 300], 0, 1000), ([50], 0.3, 200), ([10, 20, 70], 0.7, 500)]  # fmt: skip
    for _ in range(4):
        sizes = e.rng.integers(10, 1000, int(e.rng.integers(2, 5))).tolist()
        fixed.append((sizes, round(float(e.rng.uniform(0.2, 0.9)), 2), int(e.rng.integers(500, 5000))))  # fmt: skip
    cases = [(f"tokens {t}, alpha {a}, total {n}", (t, a, n)) for t, a, n in fixed]

    def read(got):
        p, epochs = e.several(got, "p", "epochs")
        for name, x in (("p", p), ("epochs", epochs)):
            e.need(np.ndim(x) == 1 and all(np.isreal(y) for y in x), f"{name} must be a list of numbers, got {x!r}.")  # fmt: skip
        return Lists(([float(x) for x in p], [float(x) for x in epochs]))

    def other(arguments, want, got):
        if not np.allclose(got[0], want[0]) if len(got[0]) == len(want[0]) else True:
            return "p: size ** alpha over the sum of all size ** alpha."
        return "epochs: p * total tokens are read of a source, over its size."

    judged(e, cases, read, mixed, MIXTURE, other)
