"""Exercises of lesson 41: codes of 4 bits, groups, GPTQ, AWQ."""

import numpy as np

from .attempt import exercise
from .lesson_27 import judged
from .lesson_38 import Number


def array_of(e, name, got, shape, kinds="iu"):
    e.need(got is not None, f"Nothing is returned: end with `return` and the {name}.")
    got = np.asarray(got)
    e.need(got.shape == shape, f"{name} must have the shape {shape}, got {got.shape}.")
    e.need(got.dtype.kind in kinds, f"{name} must be whole numbers (int8), got {got.dtype}.")
    return got


def alike(e, name, got, want, mistakes):
    """Raises Wrong unless all codes are equal. mistakes: {message: codes}"""
    as_float = {text: np.asarray(x).astype(np.float64) for text, x in mistakes.items()}
    e.same(name, np.asarray(got).astype(np.float64), want.astype(np.float64), as_float, 0, 0.5)


# ----------------------------------------------------------------------------- unpacking
def halves(low, high):
    codes = np.empty((len(low), 2 * low.shape[1]), np.int64)
    codes[:, ::2], codes[:, 1::2] = low, high
    return codes


@exercise(
    "41.1", "unpack",
    first_step="packed & 15 are the lower four bits of each byte, from 0 to 15. Which numbers do 8 to 15 stand for?",
    hints={
        "OverflowError": "A uint8 holds no negative numbers: convert to int8 first.",
        "ValueError": "The result has twice as many columns: codes[:, ::2] and codes[:, 1::2].",
    },
    kernel=False,
)  # fmt: skip
def unpack(e):
    fixed = [np.array([[227, 120, 15]]), np.arange(256).reshape(8, 32), np.array([[136], [8], [128]])]  # fmt: skip
    draw = lambda rng: rng.integers(0, 256, (int(rng.integers(1, 4)), int(rng.integers(1, 6))))
    for packed in e.cases(fixed, draw):
        packed = np.array(packed, np.uint8)
        got = e.call(packed.copy(), case=f"packed {packed.tolist()}" if packed.size < 20 else "all 256 bytes")  # fmt: skip
        got = array_of(e, "codes", got, (len(packed), 2 * packed.shape[1]))
        low, high = packed.astype(np.int64) & 15, packed.astype(np.int64) >> 4
        sign = lambda x: np.where(x > 7, x - 16, x)
        mistakes = {
            "The codes are from -8 to 7: 8 to 15 stand for negative numbers, 16 less.": halves(low, high),
            "In uint8 a negative number wraps around: make the codes int8.": halves(sign(low), sign(high)) % 256,
            "The lower four bits are the FIRST of the two codes.": halves(sign(high), sign(low)),
            "Code 2 b and code 2 b + 1 are next to each other: codes[:, ::2] and codes[:, 1::2].": np.concatenate([sign(low), sign(high)], 1),
            "8 is -8 in two's complement, not 8 - 15: subtract 16.": halves(np.where(low > 7, low - 15, low), np.where(high > 7, high - 15, high)),
            "8 is already negative: from 8 on subtract 16.": halves(np.where(low > 8, low - 16, low), np.where(high > 8, high - 16, high)),
            "These codes have an offset of 8: two's complement has none.": halves(low - 8, high - 8),
            "The upper four bits must be shifted down: packed >> 4.": halves(sign(low), sign((packed & 240).astype(np.int8))),
            "The highest bit is no sign with a size: in two's complement 8 to 15 stand for 16 less.": halves(np.where(low > 7, 8 - low, low), np.where(high > 7, 8 - high, high)),
        }  # fmt: skip
        alike(e, "codes", got, halves(sign(low), sign(high)), mistakes)


# ----------------------------------------------------------------------------- groups
def grouped(w, group, most, scale_of=lambda g, most: np.abs(g).max(2, keepdims=True) / most, how=np.rint):  # fmt: skip
    """-> codes, scale"""
    g = w.astype(np.float32).reshape(len(w), -1, group)
    scale = scale_of(g, most)
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    return how(g / scale).reshape(w.shape), scale[:, :, 0]


SCALES = {
    "One scale per row: each group has its own.": lambda g, most: np.broadcast_to(np.abs(g).max((1, 2), keepdims=True) / most, (*g.shape[:2], 1)),
    "The largest |w| must become most: divide by it.": lambda g, most: np.abs(g).max(2, keepdims=True),
    "The largest w is not the largest |w|: negative weights count, too.": lambda g, most: g.max(2, keepdims=True) / most,
    "The scale divides by most, not by most + 1.": lambda g, most: np.abs(g).max(2, keepdims=True) / (most + 1),
    "The scale is the largest |w| over most, not the range over it.": lambda g, most: (g.max(2, keepdims=True) - g.min(2, keepdims=True)) / (2 * most),
    "A group has neighbouring weights of a row: w.reshape(R, C // group, group).":
        lambda g, most: np.abs(g.reshape(len(g), g.shape[2], -1)).max(1)[:, :, None] / most,
    "This is the mean of |w|, not its maximum.": lambda g, most: np.abs(g).mean(2, keepdims=True) / most,
}  # fmt: skip


@exercise(
    "41.2", "quantize",
    first_step="w.reshape(len(w), -1, group) has the groups as its last axis. What is the largest |w| of each?",
    hints={"ValueError": "The groups are (R, C / group, group), the scales before the division (R, C / group, 1): keepdims=True."},
    kernel=False,
)  # fmt: skip
def quantize(e):
    fixed = [
        ([[0.7, -0.23, 0.1, 0.37]], 4, 7), ([[0.7, -0.23, 0.1, 0.37], [3.0, -3.5, 0.25, 0.0]], 2, 7), ([[0.0, 0.0, 1.0, -0.4]], 2, 7),
        ([[-2.0, 0.5, 0.3, 1.0, 4.0, -0.1]], 3, 3),
    ]  # fmt: skip

    def draw(rng):
        group, many = int(rng.integers(2, 5)), int(rng.integers(2, 4))
        return rng.normal(size=(int(rng.integers(1, 4)), group * many)).round(3), group, int(rng.choice([3, 7]))  # fmt: skip

    for w, group, most in e.cases(fixed, draw, times=3):
        w = np.array(w, np.float32)
        exact = grouped(w, group, most, how=np.asarray)[0]
        if np.any(np.abs(np.abs(exact) % 1 - 0.5) < 1e-4):
            continue  # halfway between two codes
        got = e.call(w.copy(), group, most, case=f"w {w.tolist()}, group {group}, most {most}")
        codes, scale = e.several(got, "codes", "scale")
        shape = (len(w), w.shape[1] // group)
        scale = np.asarray(scale)
        e.need(scale.shape == shape, f"scale must have the shape {shape}, one per group, got {scale.shape}.")  # fmt: skip
        want, right = grouped(w, group, most)
        empty = ~w.reshape(len(w), -1, group).any(2)
        e.need(np.all(scale[empty] == 1), f"The scale of a group of zeros is 1, here it is {scale[empty].tolist()[:1]}.")  # fmt: skip
        wrong = {text: grouped(w, group, most, f)[1] for text, f in SCALES.items()}
        wrong["The scale is the value of a step, not the number of steps: max |w| / most."] = (
            1 / right
        )
        e.same("scale", scale.astype(np.float64), right, wrong, rtol=1e-5, atol=1e-9)
        e.need(np.asarray(codes).dtype.kind in "iu", f"codes must be whole numbers (int8), got {np.asarray(codes).dtype}.")  # fmt: skip
        codes = array_of(e, "codes", codes, w.shape)
        mistakes = {
            "Rounded toward 0: int() and astype cut off. np.rint rounds to the nearest.": grouped(w, group, most, how=np.trunc)[0],
            "Rounded down: np.rint rounds to the nearest.": grouped(w, group, most, how=np.floor)[0],
            "The sign is missing: codes go from -most to most.": np.abs(want),
            "Adding 0.5 and cutting off rounds negative numbers up: np.rint.": grouped(w, group, most, how=lambda x: np.trunc(x + 0.5))[0],
        }  # fmt: skip
        alike(e, "codes", codes, want, mistakes)


# ----------------------------------------------------------------------------- GPTQ
def corrected(w, x, scale, most, damp, factor=lambda H: np.linalg.cholesky(np.linalg.inv(H)).T, sign=1, ridge=lambda H, damp: damp * np.diag(H).mean(), own=lambda U, j: U[j, j], behind=lambda n, j: n, limit_error=True):  # fmt: skip
    w, s = w.astype(np.float64), scale[:, 0].astype(np.float64)
    H = x.T.astype(np.float64) @ x
    H += ridge(H, damp) * np.eye(len(H))
    U, codes = factor(H), np.empty(w.shape)
    for j in range(w.shape[1]):
        nearest = np.rint(w[:, j] / s)
        codes[:, j] = np.clip(nearest, -most, most)
        e = (w[:, j] - (codes[:, j] if limit_error else nearest) * s) / own(U, j)
        end = behind(w.shape[1], j)
        w[:, j + 1 : end] -= sign * e[:, None] * U[j, j + 1 : end]
    return codes


GPTQ = {
    "No weight is corrected: w[:, j + 1 :] gets the formula's correction after each column. (Is U the UPPER triangle? NumPy returns the lower one.)":
        dict(sign=0),
    "The correction has the wrong sign: it is subtracted.": dict(sign=-1),
    "U comes from the INVERSE of H: cholesky(inv(H)).T.": dict(factor=lambda H: np.linalg.cholesky(H).T),
    "This is H^-1 itself: its Cholesky factor has, in row j, the correction for the weights that are still free.": dict(factor=np.linalg.inv),
    "Divide by U[j, j].": dict(own=lambda U, j: 1.0),
    "Only the next column is corrected: all columns behind j.": dict(behind=lambda n, j: j + 2),
    "damp is missing on the diagonal of H.": dict(ridge=lambda H, damp: 0.0),
    "damp is multiplied by the mean of H's diagonal.": dict(ridge=lambda H, damp: damp),
    "The mean is that of H's diagonal, not of all its elements.": dict(ridge=lambda H, damp: damp * H.mean()),
    "e is divided by U[j, j] once, not twice.": dict(own=lambda U, j: U[j, j] ** 2),
    "The error is that of the limited code: what was cut off at most is wrong as well.": dict(limit_error=False),
}  # fmt: skip


@exercise(
    "41.3", "gptq",
    first_step="H = x.T @ x, with damp times the mean of its diagonal added to the diagonal. U = np.linalg.cholesky(np.linalg.inv(H)).T.",
    hints={
        "ValueError": "H is x.T @ x, one row and one column per column of w: (C, C).",
        "LinAlgError": "H is singular: add damp * np.diag(H).mean() to its diagonal before the inverse.",
        "UFuncOutputCastingError": "Corrections are fractions: copy w to float64 first.",
        "_UFuncOutputCastingError": "Corrections are fractions: copy w to float64 first.",
    },
    kernel=False,
)  # fmt: skip
def gptq(e):
    rng = np.random.default_rng(41)
    pair = rng.normal(size=(6, 1)).round(2)
    fixed = [
        ([[0.6, 0.4]], np.repeat(pair, 2, 1), [[1.0]], 7, 0.01), ([[0.4, 0.4], [2.6, -0.4]], np.repeat(pair, 2, 1), [[1.0], [1.0]], 7, 0.01),
        ([[0.4, 0.3, 0.45]], np.repeat(pair, 3, 1) + 0.1 * rng.normal(size=(6, 3)), [[1.0]], 7, 0.1), ([[9.0, 0.3]], np.repeat(pair, 2, 1), [[1.0]], 3, 0.01),
    ]  # fmt: skip

    def draw(rng):
        C, most = int(rng.integers(4, 8)), int(rng.choice([3, 7]))
        w = rng.normal(size=(4, C))
        x = rng.normal(size=(20, 2)) @ rng.normal(size=(2, C)) + 0.5 * rng.normal(size=(20, C))
        return (
            w,
            3 * x,
            np.abs(w).max(1, keepdims=True) / most,
            most,
            float(rng.choice([0.05, 0.2])),
        )

    cases = []
    for w, x, scale, most, damp in [*fixed, *(draw(e.rng) for _ in range(8))]:
        w, x, scale = (np.array(v, np.float64) for v in (w, x, scale))
        nudged = [corrected(w * (1 + d), x, scale, most, damp) for d in (1e-9, -1e-9)]
        if not np.array_equal(*nudged):
            continue  # halfway between two codes
        shown = f"w {w.tolist()}, scale {scale.ravel().tolist()}" if w.size < 5 else f"w {w.shape}"
        where = f"{shown}, x {x.shape}, most {most}, damp {damp}"
        cases.append((where, (w, x, scale, most, damp)))

    def read(got):
        e.need(got is not None, "Nothing is returned: end with `return` and the codes.")
        got = np.asarray(got)
        e.need(got.dtype.kind in "iu", f"codes must be whole numbers (int8), got {got.dtype}.")
        return Codes(got.astype(np.int64).tolist())

    def other(arguments, want, got):
        if np.shape(got) != np.shape(want):
            return f"codes must have the shape {np.shape(want)}, got {np.shape(got)}."
        if np.abs(got).max() > arguments[3]:
            return f"A code is beyond {arguments[3]}: limit it to -most ... most."
        return "Column after column: round, and correct all columns behind it with the formula."

    right = lambda *arguments: Codes(corrected(*arguments).astype(np.int64).tolist())
    wrong = {text: lambda *a, o=options: Codes(corrected(*a, **o).astype(np.int64).tolist()) for text, options in GPTQ.items()}  # fmt: skip
    judged(e, cases, read, right, wrong, other, unchanged="w")


class Codes(list):
    """A matrix of codes, shown in one line."""


# ----------------------------------------------------------------------------- AWQ
def rounded(w, most):
    scale = np.maximum(np.abs(w).max(1, keepdims=True), 1e-30) / most
    return np.rint(w / scale) * scale


def errors_of(w, x, powers, most, size=lambda x: np.abs(x).mean(0), back=True, output=True):
    found = []
    for p in powers:
        c = size(x) ** p
        difference = rounded(w * c, most) / (c if back else 1) - w
        found.append(((x @ difference.T) ** 2).sum() if output else (difference**2).sum())
    return np.array(found)


@exercise(
    "41.4", "best_power",
    first_step="for one p: c = np.abs(x).mean(axis=0) ** p, the weights nearest(w * c, most) / c, and the error of x @ weights.T.",
    kernel=False,
)  # fmt: skip
def best_power(e):
    powers = [0.0, 0.25, 0.5, 0.75, 1.0]

    def draw(rng):
        R, C = 6, 8
        w = rng.normal(size=(R, C))
        sizes = np.exp(rng.normal(size=C) * float(rng.choice([0.3, 1.0, 1.6])))
        x = rng.normal(size=(30, C)) * sizes + float(rng.choice([0, 0.5]))
        return w, x, rng.permutation(powers).tolist(), int(rng.choice([3, 7]))

    rng = np.random.default_rng(4)
    cases = []
    while len(cases) < 14:
        w, x, order, most = draw(rng if len(cases) < 6 else e.rng)
        best = np.sort(errors_of(w, x, order, most))
        if best[1] > 1.02 * best[0]:  # or two powers are about equally good
            cases.append(
                (f"w {w.shape}, x {x.shape}, powers {order}, most {most}", (w, x, order, most))
            )

    def read(got):
        e.need(got is not None, "Nothing is returned: end with `return` and the power.")
        e.need(np.ndim(got) == 0 and np.isreal(got), f"Return one power, got {got!r}.")
        return Number(got)

    def by(choose=np.argmin, what=lambda powers, i, found: powers[i], **options):
        def power(w, x, powers, most):
            found = errors_of(w, x, powers, most, **options)
            return Number(what(powers, int(choose(found)), found))

        return power

    mistakes = {
        "This is the power with the LARGEST error.": by(np.argmax),
        "This is the index in the list: return the power.": by(what=lambda powers, i, found: i),
        "This is the error: return the power that has it.": by(what=lambda powers, i, found: found[i]),
        "The error is that of y: the difference of the weights, multiplied by x. Here it is that of the weights.": by(output=False),
        "Divide by c after the rounding: the weights are nearest(w * c, most) / c.": by(back=False),
        "c is the mean of |x|, not its maximum.": by(size=lambda x: np.abs(x).max(0)),
        "The mean is over the rows, axis 0: one number for each channel.": by(size=lambda x: np.abs(x).mean()),
        "c is the mean of |x|, not |mean of x|.": by(size=lambda x: np.abs(x.mean(0))),
        "c is a power of the size of the inputs x, not of the weights.": lambda w, x, powers, most: by(size=lambda _: np.abs(w).mean(0))(w, x, powers, most),
        "The weights are multiplied by c and divided by it after rounding, not the other way round.": by(size=lambda x: 1 / np.abs(x).mean(0)),
    }  # fmt: skip
    other = lambda *_: (
        "The error is the sum of the squares of all elements of x (weights - w)^T; the smallest counts."
    )
    judged(e, cases, read, by(), mistakes, other)
