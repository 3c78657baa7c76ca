"""Exercises of lesson 34: rounding to a format, the next scale, codes and counts in a kernel, codes in both orientations."""

import numpy as np

from .attempt import exercise
from .lesson_29 import CHANGED, by_hand

FORMATS = {
    "e4m3": (3, -6, 448.0),
    "e5m2": (2, -14, 57344.0),
    "bf16": (7, -126, float(np.uint32(0x7F7F0000).view(np.float32))),
}
INFINITE = 0x7F800000
F64 = np.float64


# ----------------------------------------------------------------------------- rounding to a format
def step_of(a, fraction, least):
    """The distance of the format's numbers around a >= 0, float64."""
    _, e = np.frexp(np.maximum(a, 2.0**least))
    return np.ldexp(1.0, e - 1 - fraction)


def rounded(v, fraction, least, most, how=np.rint):
    """v in the format; how: a / step -> a whole number"""
    v = np.asarray(v, F64)
    a = np.minimum(np.abs(v), most)
    step = step_of(a, fraction, least)
    return np.copysign(np.minimum(how(a / step) * step, most), v)


@exercise(
    "34.1", "round_to",
    first_step="a = np.minimum(np.abs(v), most). Between 2^e and 2^(e+1) the steps are 2^(e - fraction): how many steps is a, to the nearest?",
    hints={"OverflowError": "Infinity and NaN are no whole numbers: limit |v| to most first, and use np.rint, which works on arrays.",
           "ValueError": "v may have any shape: choose with np.where, not with `if`. And integers to negative powers are not allowed: 2.0**least."},
    kernel=False,
)  # fmt: skip
def round_to(e):
    by_hand(e)
    both = lambda x: np.concatenate([x, -np.asarray(x)]).astype(np.float32)
    fixed = np.random.default_rng(341)
    normal = fixed.normal(size=(4, 25)).astype(np.float32)

    def halves(fraction, least, most):
        """Numbers halfway between two of the format, subnormal, small and large ones."""
        powers = np.array([least, least + 1, 0, np.floor(np.log2(most)) - 1])
        odd = np.arange(2**fraction) + 0.5
        above = (2.0 ** powers[:, None] * (1 + odd / 2**fraction)).ravel()
        return both(np.concatenate([odd[: 2**fraction] * 2.0 ** (least - fraction), above]))

    def numbers(case, name):
        fraction, least, most = FORMATS[name]
        with np.errstate(over="ignore"):
            beyond = both([most, most * 1.01, most * 1.07, 3.4e38, np.inf])
        below = (normal * 2.0 ** (least - 1)).astype(np.float32)
        return {
            "normal numbers": normal,
            "numbers of the format": rounded(normal * 4, *FORMATS[name]).astype(np.float32),
            "numbers just below powers of two": both([0.99, 1.98, 3.999, 0.4999, 255.9]),
            "numbers below the smallest normal one": below,
            "numbers that become 0, and 0": both([0.0, 2.0 ** (least - fraction) * 0.49, 2.0 ** (least - fraction) * 0.5]),
            "numbers beyond the largest": beyond,
            "numbers halfway between two": halves(fraction, least, most),
            "numbers next to halfway": np.concatenate(
                [np.nextafter(halves(fraction, least, most), np.float32(x)) for x in (0, most)]
            ),
            "NaN next to a number": np.array([np.nan, 0.3], np.float32),
            "no numbers": np.zeros((0, 3), np.float32),
        }[case]  # fmt: skip

    order = [
        ("normal numbers", "e4m3"), ("normal numbers", "e5m2"), ("numbers next to halfway", "e4m3"),
        ("numbers next to halfway", "e5m2"), ("normal numbers", "bf16"), ("numbers of the format", "e5m2"),
        ("numbers just below powers of two", "e4m3"), ("numbers below the smallest normal one", "e4m3"),
        ("numbers below the smallest normal one", "e5m2"), ("numbers that become 0, and 0", "e5m2"),
        ("numbers beyond the largest", "e4m3"), ("numbers beyond the largest", "e5m2"), ("numbers beyond the largest", "bf16"),
        ("numbers halfway between two", "e4m3"), ("numbers halfway between two", "e5m2"),
        ("NaN next to a number", "e4m3"), ("no numbers", "e4m3"),
    ]  # fmt: skip

    def draw(rng):
        fraction, least = int(rng.integers(1, 11)), -int(rng.integers(3, 15))
        most = float((2 - 2.0**-fraction) * 2.0 ** rng.integers(3, 16))
        size = 2.0 ** rng.uniform(least - fraction - 3, np.log2(most) + 2, (5, 8))
        v = (rng.choice([-1, 1], size.shape) * size).astype(np.float32)
        return f"random numbers, a format of {fraction} bits of fraction", v, (fraction, least, most)  # fmt: skip

    cases = [(f"{case}, {name}", numbers(case, name), FORMATS[name]) for case, name in order]
    for case, v, form in e.cases(cases, draw, times=2):
        v, (fraction, least, most) = np.array(v, np.float32), form
        fraction, least = int(fraction), int(least)
        given = v.copy()
        got = e.call(given, fraction, least, most, case=f"{case}: round_to(v, {fraction}, {least}, {most:g}), shape {v.shape}")  # fmt: skip
        e.need(got is not None, "Nothing is returned: end with `return` and the numbers.")
        e.need(hasattr(got, "dtype") and np.asarray(got).dtype.kind == "f",
               f"The result is {getattr(got, 'dtype', type(got).__name__)}: return the rounded numbers, an array of float. (Codes come in lesson 45.)")  # fmt: skip
        want = rounded(v, *form)
        with np.errstate(all="ignore"):
            _judge_rounding(e, v, np.asarray(got), want, form)
        e.need(np.array_equal(given, v, equal_nan=True), CHANGED)


def _judge_rounding(e, v, got, want, form):
    fraction, least, most = form
    a = np.abs(v.astype(F64))
    other = lambda **change: rounded(v, **dict(zip(("fraction", "least", "most"), form), **change))
    outside, small = a > most, a < 2.0**least
    inside = ~outside & ~np.isnan(a)
    some = lambda mask: lambda got: mask.any() and ((got != want) & ~np.isnan(want))[mask].any() and np.array_equal(got[~mask], want[~mask], equal_nan=True)  # fmt: skip
    free = np.copysign(np.rint(a / step_of(np.where(np.isfinite(a), a, 1), fraction, least)) * step_of(np.where(np.isfinite(a), a, 1), fraction, least), v)  # fmt: skip
    unbounded = np.where(a > 0, a, 2.0**least)
    fine = np.copysign(np.rint(a / step_of(unbounded, fraction, -1000)) * step_of(unbounded, fraction, -1000), v)  # fmt: skip
    changed = lambda other: lambda got: v.size > 1 and (other != want).any() and np.array_equal(got, other, equal_nan=True)  # fmt: skip
    nearest_power = 2.0 ** (
        np.round(np.log2(np.maximum(np.minimum(a, most), 2.0**least))) - fraction
    )
    step = step_of(np.minimum(a, most), fraction, least)
    widest = step.max(where=~np.isnan(step), initial=0.0) or 1.0
    is_half = np.abs(a / step % 1 - 0.5) < 1e-6
    on_steps = lambda got: (np.abs(got - want) <= step).all() and (got / step % 1 == 0).all()
    nearest = lambda got: is_half.any() and np.array_equal(got[~is_half], want[~is_half]) and on_steps(got)  # fmt: skip
    e.same("numbers", got, want, {
        "NaN has become a number: it must stay NaN, so that a training that has broken down can be seen.":
            lambda got: np.isnan(v).any() and not np.isnan(got[np.isnan(v)]).any(),
        "Numbers that are not NaN have become NaN.": lambda got: (np.isnan(got) & ~np.isnan(v)).any() and not (~np.isfinite(v)).any(),
        "The sign is missing: np.copysign(result, v).": lambda got: (v < 0).any() and np.array_equal(got, np.abs(want), equal_nan=True),
        "Numbers beyond the largest one saturate: limit |v| to `most`, also for infinity.": some(outside),
        "Numbers below the smallest one have become 0: those above half of it are nearer to it.": changed(np.where(a < 2.0 ** (least - fraction), np.copysign(0.0, v), want)),
        "Rounded twice: these numbers were first rounded to halfway between two numbers of the format, and then to the even one. Round v itself.":
            lambda got: e.where.startswith("numbers next to halfway") and ((got != want) & (got != 0)).any() and (np.abs(got - want) <= step).all() and (got / step % 2 == 0)[got != want].all(),
        "Halfway between two numbers it is the even multiple that is taken: np.rint does so. floor(x + 0.5) does not.": nearest,
        "Cut off: take the NEAREST number of the format, np.rint(a / step).": changed(rounded(v, *form, how=np.floor)),
        "Rounded down: for negative numbers that is away from 0. Round |v| with np.rint.":
            changed(np.where(v < 0, -rounded(-v, *form, how=np.ceil), rounded(v, *form, how=np.floor))),
        "Rounded up: take the nearest number, np.rint(a / step).": changed(rounded(v, *form, how=np.ceil)),
        "Numbers below the smallest normal one have become 0: they are subnormal, multiples of 2^(least - fraction).":
            changed(np.where(small, np.copysign(0.0, v), want)),
        "Below the smallest normal number the steps stay as they are: take the exponent of max(a, 2^least).": changed(fine),
        "The subnormal steps are those of the smallest normal numbers, 2^(least - fraction).":
            some(a < 2.0 ** (least + 1)),
        "The exponent is rounded: it is that of the power of two BELOW the number, np.floor(np.log2(a)).":
            changed(np.clip(np.rint(v / nearest_power) * nearest_power, -most, most)),
        "The steps are twice too wide: np.frexp's e is one more than the exponent, the step is 2^(e - 1 - fraction).": changed(other(fraction=fraction - 1)),
        "The steps are half as wide as they should be. From 2^e to 2^(e+1) there are 2^fraction of them.": changed(other(fraction=fraction + 1)),
        "The steps are the same for all numbers: a float's steps grow with the number, 2^(e - fraction) from 2^e on.":
            changed(np.copysign(np.rint(a * 2.0**fraction) / 2.0**fraction, v)),
        "Limited to 448, the largest number of e4m3: `most` is a parameter.": lambda got: most > 448 and np.array_equal(got, np.clip(want, -448, 448), equal_nan=True),
        "float16 does not hold all these numbers: return float32 or float64.": lambda _: got.dtype == np.float16,
        "All numbers have the steps of the largest one: each has an exponent of its own.": changed(np.copysign(np.rint(np.minimum(a, most) / widest) * widest, v)),
        "Saturated too early: `most` itself is a number of the format.": lambda got: (np.abs(want) > 0.9 * most).any() and np.abs(got).max() < np.abs(want).max() and np.array_equal(got[np.abs(want) < 0.5 * most], want[np.abs(want) < 0.5 * most]),
        "Rounding went past `most`: limit |v| before it is rounded, or the result after it.": lambda got: (np.abs(got[inside]) > most).any(),
        "Nothing is rounded here.": lambda got: np.array_equal(got, v),
        "Saturating is missing: beyond the largest number there is none.": changed(free),
    }, rtol=0, atol=0)  # fmt: skip


# ----------------------------------------------------------------------------- the next scale
@exercise(
    "34.2", "next_scale",
    first_step="good = [m for m in maxima if 0 < m < np.inf]. Is there none? Then the scale stays.",
    hints={"ValueError": "max() of an empty list: there may be no maximum that counts. Then return `scale`.",
           "ZeroDivisionError": "Divide by `most`, not by a maximum: that may be 0.",
           "IndexError": "The list may be empty: then return `scale`."},
    kernel=False,
)  # fmt: skip
def next_scale(e):
    nan, inf = np.nan, np.inf
    fixed = (
        ([7.0], 1.0, 448.0, 2.0),
        ([6.0, 26.0, 3.0, 8.0], 0.25, 448.0, 2.0),
        ([1.5, 0.25], 8.0, 57344.0, 1.0),
        ([], 0.03125, 448.0, 2.0),
        ([0.0], 0.5, 448.0, 2.0),
        ([0.0, 0.0, 3.0, 0.0], 0.5, 448.0, 2.0),
        ([nan], 0.5, 57344.0, 2.0),
        ([inf, nan], 0.125, 448.0, 2.0),
        ([2.0, inf, 5.0], 1.0, 448.0, 2.0),
        ([6.0, nan, 5.0], 1.0, 448.0, 2.0),
        ([nan, 5.0, 6.0], 1.0, 448.0, 2.0),
        ([1e-40], 1.0, 448.0, 2.0),
        ([3e38], 1.0, 448.0, 2.0),
        ([1e-30, 1e-20], 1.0, 57344.0, 4.0),
        ([100.0], 1e-6, 448.0, 2.0),
    )

    def draw(rng):
        m = 2.0 ** rng.uniform(-30, 30, int(rng.integers(2, 9)))
        m[rng.random(m.size) < 0.3] = rng.choice([0.0, nan, inf])
        return m.astype(np.float32), float(rng.uniform(0.1, 2)), float(rng.choice([448.0, 57344.0])), float(rng.choice([1.0, 2.0, 4.0]))  # fmt: skip

    for maxima, scale, most, room in e.cases(fixed, draw, times=3):
        maxima = [np.float32(m) for m in maxima]
        given = list(maxima)
        shown = f"maxima [{', '.join(f'{m:g}' for m in maxima)}], scale {scale:g}, most {most:g}, room {room:g}"
        got = e.call(given, scale, most, room, case=shown)
        e.need(got is not None, "Nothing is returned: end with `return` and the scale.")
        e.need(np.size(got) == 1, f"The result has {np.size(got)} numbers: one scale.")
        got = np.asarray(got).reshape(()).astype(float)
        good = [float(m) for m in maxima if 0 < m < inf]
        want = max(room * max(good) / most, 2.0**-126) if good else scale
        floor = bool(good) and room * max(good) / most < 2.0**-126
        odd = len(good) < len(maxima)
        way = lambda value: value if np.isfinite(value) and value != want else np.empty(0)
        e.need(not np.isnan(got), "The scale is NaN"
               + (": a maximum that is NaN does not count. A comparison with NaN is false, so `0 < m < np.inf` leaves it out, and max() alone does not."
                  if odd else "."))  # fmt: skip
        e.need(got != 0 or want == 0, "The scale is 0, and x / 0 is infinite or NaN"
               + (": a maximum of 0 does not count." if not floor else ": it is at least 2.0**-126."))  # fmt: skip
        e.need(not np.isinf(got), "The scale is infinite: " + ("an infinite maximum does not count." if odd else
               "room x maximum is too large for float32. Multiply by room / most instead, or compute in float."))  # fmt: skip
        e.same("scale", got, np.asarray(want), {
            "The scale is at least 2.0**-126: 1 / scale must stay finite.": lambda got, want=want: floor and got < want,
            "The scale is too large here: the lower limit is 2.0**-126 and no more, and nothing is added to the scale.": lambda got: floor,
            "No maximum counts here, neither 0 nor infinity nor NaN, so the scale stays what it was.": lambda got: not good,
            "The room is missing: numbers may grow from one step to the next.": way(max(good) / most) if good and room != 1 else np.empty(0),
            "The room makes the scale larger, so that more fits: multiply by it.": way(max(good) / room / most) if good and room != 1 else np.empty(0),
            "This is the inverse of the scale: a number is code x scale.": lambda got: good and np.isclose(got * room * max(good), most, 1e-4),
            "This is the inverse of the scale, except for the room: a number is code x scale.": lambda got: good and np.isclose(got * max(good), room * most, 1e-4),
            "The room is taken as 2: it is a parameter.": way(2 * max(good) / most) if good else np.empty(0),
            "Divided by 448, the largest number of e4m3: divide by `most`.": way(room * max(good) / 448) if good else np.empty(0),
            "The sum of the maxima is taken: the largest of them counts.": way(room * sum(good) / most) if len(good) > 1 else np.empty(0),
            "Not divided by `most`: a scale of 1 stands for numbers up to `most`.": way(room * max(good)) if good else np.empty(0),
            "The LAST maximum is taken: the largest of them counts.": way(room * good[-1] / most) if good else np.empty(0),
            "The FIRST maximum is taken: the largest of them counts.": way(room * good[0] / most) if good else np.empty(0),
            "The smallest maximum is taken: the largest of them counts.": way(room * min(good) / most) if good else np.empty(0),
            "The mean of the maxima is taken: the largest of them counts.": lambda got: len(good) > 1 and any(
                np.isclose(got, room * sum(good) / n / most, 1e-4) for n in (len(good), len(maxima))),
            "One maximum that does not count has hidden the others: leave out only those that are 0, infinite or NaN.":
                lambda got, scale=scale: good and odd and np.isclose(got, scale),
            "The old scale takes part: it counts only if there is no maximum.": lambda got, scale=scale: good and (
                np.isclose(got, scale) or np.isclose(got, scale * want) or np.isclose(got, max(scale, want)) or np.isclose(got, (scale + want) / 2)),
        }, rtol=1e-5, atol=0)  # fmt: skip
        e.need(len(given) == len(maxima) and np.array_equal(given, maxima, equal_nan=True), CHANGED)
