"""Exercises of lesson 34: rounding to a format, the next scale, codes and counts in a kernel, codes in both orientations."""

import numpy as np

from xtrain.kernels.primitives.codes import E4M3, E5M2, nearest_codes
from xtrain.simulator import sim

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
               f"The result is {getattr(got, 'dtype', type(got).__name__)}: return the rounded numbers, an array of float. (Codes come in 34.3.)")  # fmt: skip
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


# ----------------------------------------------------------------------------- codes in a kernel
def codes_of(values, kind):
    """The codes of float32 numbers / scale, NaN and infinity as 0x7F; -0 as 0"""
    codes = nearest_codes(np.where(np.isfinite(values), values, np.nan), kind)
    return np.where(codes == 0x80, 0, codes).astype(np.uint8)


def plain(codes):
    """-0 as 0, both NaN as 0x7F"""
    codes = np.array(codes).view(np.ndarray)
    return np.where(codes == 0x80, 0, np.where(codes == 0xFF, 0x7F, codes)).astype(np.uint8)


def alternatives(x, scale, kind):
    """-> the codes of x / scale and of x (1 / scale), which may round differently; x with infinite quotients saturates"""
    with np.errstate(all="ignore"):
        quotients = x / scale, x * (np.float32(1) / scale)
    most = np.float32(448.0 if kind is E4M3 else 57344.0)
    return [codes_of(np.where(np.isfinite(x), np.clip(q, -most, most), np.nan).astype(np.float32), kind) for q in quotients]  # fmt: skip


def unchanged(e, given, values):
    for name, now, value in zip(("x", "scale"), given, values):
        e.need(np.array_equal(np.asarray(now).ravel(), np.ravel(value), equal_nan=True),
               f"{name} was changed: the kernel only reads it. The model goes on with these numbers.")  # fmt: skip


@exercise(
    "34.3", "encode_kernel",
    first_step="i = cuda.grid(1), if i < x_n.size: a = abs(x_n[i] / scale_1[0]). Round it as e5m2_code does, with 20 bits dropped.",
    allow=("e5m2_code",),
    hints={
        "OutOfBoundsError": "The last block has threads past the end: `if i < x_n.size`.",
        "TimeoutError": "A search through the 127 codes gives the right one, but takes a hundred steps for each element: compute the code from the bits, as e5m2_code does.",
        "RaceError": "Several threads write counts or largest: cuda.atomic.add(counts_2, 0, 1) and cuda.atomic.max(largest_1, 0, bits).",
        "RaceError between blocks": "Several threads write the same element. Thread i writes codes[i] alone; counts and largest need cuda.atomic.add and cuda.atomic.max.",
    },
)  # fmt: skip
def encode_kernel(e):
    fixed = np.random.default_rng(343)
    normal = lambda n, s=1.0: (s * fixed.normal(size=n)).astype(np.float32)
    every = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    half = (every[1:] + every[:-1]) / 2
    near = np.concatenate([np.nextafter(half, np.float32(side)) for side in (0, 448)])
    sign = lambda x: np.concatenate([x, -x])
    inf, nan = np.inf, np.nan
    cases = (
        ("normal numbers", normal(100), 1.0),
        ("numbers that have a code", sign(every), 1.0),
        ("numbers below 2^-6", normal(70, 0.004), 1.0),
        ("a scale of 1/64", normal(64), 1 / 64),
        ("a scale of 2", sign(every[40:100]), 2.0),
        ("numbers halfway between two", sign(half), 1.0),
        ("numbers next to halfway", sign(near), 1.0),
        ("some beyond 448", np.array([448, 449, -460, -470, 464, 465, 480, -500, 1e6, -3e38, 1, -2], np.float32), 1.0),
        ("large numbers, the scale is tiny", np.array([1e30, -3e38, 2.0**-117, -(2.0**-120)], np.float32), 2.0**-126),
        ("infinity and NaN", np.array([1, inf, -inf, nan, -2, 500, nan], np.float32), 1.0),
        ("NaN alone in the second block", np.append(normal(64), np.float32(nan)), 1.0),
        ("zeros", np.zeros(33, np.float32), 0.5),
        ("one number", np.array([-0.4], np.float32), 0.03125),
        ("the largest is negative", np.array([1, -5, 2], np.float32), 1.0),
    )  # fmt: skip

    def draw(rng):
        x = rng.normal(size=int(rng.integers(65, 150))) * 2.0 ** rng.integers(-8, 10)
        x[rng.random(x.size) < 0.05] = inf
        return "random numbers", x, float(rng.uniform(0.1, 3))

    for case, x, scale in e.cases(cases, draw):
        x, scale = np.array(x, np.float32), np.float32(scale)
        codes, largest = e.blank(x.size, dtype=np.uint8), sim(np.zeros(1, np.int32))
        given = sim(x.copy()), sim(np.array([scale]))
        before = np.array([3, 10], np.int64)  # of other matrices
        counts = sim(before.copy())
        e.run(-(-x.size // 64), 64, codes, largest, counts, *given, case=f"{case}, n = {x.size}, scale {scale:g}")  # fmt: skip
        with np.errstate(all="ignore"):
            _judge_codes(e, codes, x, scale)
            _judge_largest(e, int(largest[0]), x, scale)
            _judge_counts(e, np.asarray(counts) - before, x, scale)
        unchanged(e, given, (x, scale))


def _judge_codes(e, codes, x, scale):
    unwritten = ~e.wrote(codes)
    if unwritten.any():
        e.need(False, f"codes[{int(np.flatnonzero(unwritten)[0])}] was never written. Thread i has element i = cuda.grid(1).")  # fmt: skip
    first, second = alternatives(x, scale, E4M3)
    got = plain(codes)
    want = np.where(got == second, second, first)
    v = (x / scale).astype(np.float32)
    a, finite = np.abs(v).astype(F64), np.isfinite(x)
    table = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(F64)
    halves = (table[1:] + table[:-1]) / 2
    limited = np.minimum(np.where(finite, a, 0), 448)
    signed = lambda c: np.where(finite, c + 0x80 * ((v < 0) & (c > 0)), 0x7F).astype(int)
    below = signed(np.searchsorted(table, limited, "right") - 1)
    above = signed(np.searchsorted(table, limited, "left"))
    up = signed(np.minimum(np.searchsorted(halves, limited, "right"), 126))
    down = signed(np.searchsorted(halves, limited, "left"))
    small, outside = limited < 2.0**-6, finite & (a > 448)
    wrong = got.astype(int) != want
    only = lambda mask: (wrong & mask).any() and not (wrong & ~mask).any()
    other = lambda y: alternatives(x, np.float32(y), E4M3)[0]
    no_rint = np.where(a < 2.0**-6, 0, first)
    e.same("codes", got.astype(float), want.astype(float), {
        "Infinity has become the largest number, 448: then nobody sees that something is wrong. Both infinities become NaN, code 0x7F.":
            lambda got: only(np.isinf(x)) and (got[np.isinf(x)] % 128 == 0x7E).all(),
        "NaN has become a number: its code is 0x7F.": lambda got: only(np.isnan(x)),
        "Infinity and NaN get the code 0x7F: `abs(x_n[i]) < float32(np.inf)` is false for both.": lambda got: only(~finite),
        "x is finite, but x / scale is not: it is beyond 448 and saturates. Ask whether x itself is finite.": lambda got: only(finite & ~np.isfinite(v)),
        "Numbers beyond 448 must saturate at code 0x7E: 0x7F is NaN, and more would run into the sign.": lambda got: only(outside) or only(outside | (limited >= 448)),
        "Numbers that are not negative have the sign: only a negative number has the highest bit set.": lambda got: (got % 128 == want % 128).all() and (got[wrong] > 0x80).all(),
        "The negative of a code is not the code of the negative number: set the highest bit, code | 0x80.": lambda got: (got[v > 0] == want[v > 0]).all() and (got == np.where(v < 0, -(want.astype(int) % 128) % 256, want)).all(),
        "The sign is missing: a negative number has the highest bit set, code | 0x80.": lambda got: (got % 128 == want % 128).all(),
        "The scale is missing: the code is that of x / scale.": lambda got: scale != 1 and (got == plain(other(1.0))).all(),
        "Multiplied by the scale: the code is that of x / scale.": lambda got: scale != 1 and (got == other(1 / scale)).all(),
        "Cut off: add half of what is dropped before the shift, so that it rounds to the NEAREST.": lambda got: (got == below).all() or (got == np.where(small, want, below)).all(),
        "Halfway between two numbers the even code is taken: add 0x7FFFF and the lowest bit that is kept, (bits >> 20) & 1.":
            lambda got: ((got == up) | (got == down) | (got == want)).all(),
        "Rounded up: half of the 20 bits that are dropped is 0x80000, so add one less, 0x7FFFF, and the lowest bit that is kept.":
            lambda got: (got == above).all() or (got == np.where(small, want, above)).all(),
        "Numbers below 2^-6 have become 0: they are subnormal, multiples of 2^-9.": lambda got: (got % 128 == no_rint % 128)[small].all() and only(small),
        "Below 2^-6 the steps stay 2^-9: there the bits of a are no code. Adding 16384.0 rounds to such a step, and the lowest bits of the sum count them.": lambda got: only(small),
        "Each code is too large or too small by whole exponents: float32 counts from -127, e4m3 from -7, so subtract 120 << 3.":
            lambda got: ((got.astype(int) - want)[finite & ~small & ~outside] % 8 == 0).all(),
        "This is e5m2: e4m3 keeps 3 bits of fraction, so 20 bits are dropped.": lambda got: (got == codes_of(np.where(finite, v, np.nan), E5M2)).mean() > 0.9,
    }, rtol=0, atol=0)  # fmt: skip


def _judge_largest(e, got, x, scale):
    size = np.abs(x)
    bits = lambda value: int(np.float32(value).view(np.int32))
    finite = size[np.isfinite(size)]
    want = INFINITE if finite.size < x.size else bits(size.max())
    if got == want or (want == INFINITE and got > INFINITE):  # the bits of a NaN are larger
        return
    value = np.int32(got).view(np.float32)
    why = "cuda.atomic.max(largest_1, 0, float_as_int(abs(x_n[i]))) by every thread."
    if got == 0:
        why = "It was not noted at all. " + why
    elif want == INFINITE and finite.size and got == bits(finite.max()):
        why = "A number that is not finite is lost: then largest is infinite, 0x7F800000, so that the scale of the next step does not follow it."
    elif finite.size and got == bits(np.minimum(finite.max(), np.float32(448) * scale)):
        why = "It is that of the numbers after they were limited to 448: the next scale needs the largest of x itself."
    elif scale != 1 and finite.size and np.isclose(value, finite.max() / scale, 1e-5):
        why = "It is that of x / scale: the next scale needs the largest of x itself."
    elif finite.size and np.isclose(value, min(finite.max() / scale, np.float32(448))):
        why = "It is that of the scaled, limited numbers: the next scale needs the largest of x itself."
    elif x.max() > 0 and got == bits(x.max()):
        why = "It is the largest x, not the largest |x|: take abs."
    elif finite.size and got == int(finite.max()):
        why = "It is the number itself, cut to an integer. Its bits are needed: float_as_int(abs(x_n[i]))."
    elif got < 0:
        why = "These are bits with a sign: take abs before float_as_int."
    raise e.wrong(f"largest[0] is {got:#x}, the bits of {value:g}; expected {want:#x}, the bits of {np.int32(want).view(np.float32):g}. {why}")  # fmt: skip


def _judge_counts(e, got, x, scale):
    finite = np.isfinite(x)
    v = np.abs(x[finite] / scale)
    clamped, bad = int((v > 448).sum()), int((~finite).sum())
    if tuple(got) == (clamped, bad):
        return
    why = "counts[0] counts finite x with |x / scale| > 448, counts[1] those that are not finite. Add to what is there: cuda.atomic.add(counts_2, 0, 1)."
    if (got < 0).any():
        why = "The counts were overwritten: they count for all matrices of a model. " + why
    elif tuple(got) == (0, 0):
        why = "Nothing was counted. " + why
    elif tuple(got) == (bad, clamped):
        why = "The two are exchanged: counts[0] is for numbers that saturate."
    elif tuple(got) == (clamped + bad, bad) or tuple(got) == (
        clamped + int(np.isinf(x).sum()),
        bad,
    ):
        why = "A number that is not finite does not saturate as well: it is counted once, in counts[1]."
    elif tuple(got) == (int((v >= 448).sum()), bad):
        why = "448 itself has a code and does not saturate: count numbers beyond it, > 448."
    elif got[0] == clamped and got[1] == int(np.isinf(x).sum()):
        why = "NaN is not finite either, but it is not counted."
    elif got[0] == clamped and got[1] == int(np.isnan(x).sum()):
        why = "Infinity is not finite either, but it is not counted."
    elif got[1] == bad and got[0] in ((x[finite] / scale > 448).sum(), (x[finite] / scale < -448).sum()):  # fmt: skip
        why = "Those of one sign are missing: take |x / scale|."
    elif tuple(got) == (int((v > 464).sum()), bad) or tuple(got) == (int((v >= 464).sum()), bad):
        why = "Numbers from 448 to 464 are counted, too: they are beyond 448, though 448 is the nearest number."
    elif got[1] == bad and got[0] == int((np.isfinite(x / scale) & finite & (np.abs(x / scale) > 448)).sum()):  # fmt: skip
        why = "x is finite where only x / scale overflows: that saturates, and is counted in counts[0]."
    raise e.wrong(f"counts grew by {got.tolist()}; expected {[clamped, bad]}. {why}")


# ----------------------------------------------------------------------------- both orientations
SEVERAL = "One thread writes an element of codes_NK and of codes_KN. Block (i, j) has columns from 32 i and rows from 32 j on."


@exercise(
    "34.4", "both_kernel",
    first_step="tile = cuda.shared.array((32, 36), uint8). A loop over the rows of the tile writes codes_NK and the tile; then a barrier; then a loop over its columns.",
    allow=("e5m2_code",),
    each=4,
    hints={
        "OutOfBoundsError": "The last tiles reach past N or K: n0 + r < N and k0 + x < K when rows are written; k0 + c < K and n0 + x < N when columns are. In the grid, x counts tiles of columns (K), y tiles of rows (N).",
        "RaceError in shared memory": "A thread reads from the tile what another one writes, and no barrier lies between: cuda.syncthreads() after the tile is complete.",
        "RaceError between blocks": f"Two blocks write the same element. {SEVERAL}",
        "RaceError": f"Two threads write the same element. {SEVERAL}",
        "DeadlockError": "All threads must reach the barrier: take cuda.syncthreads() out of the `if` and out of the loop, and do not `return` before it.",
        "UninitializedError": "The tile is read before it is complete: cuda.syncthreads() after all threads have written. Or it was never written at this place: tile[row, column], all 32 rows, in steps of 8, where n0 + r < N and k0 + x < K.",
    },
)  # fmt: skip
def both_kernel(e):
    fixed = (
        ("one tile", 32, 32, 1.0, 1.0),
        ("ragged edges", 40, 70, 1.0, 1.0),
        ("two tiles", 64, 32, 1.0, 0.25),
        ("fewer rows than a block has", 5, 33, 1.0, 2.0),
        ("one row", 1, 50, 1.0, 1.0),
        ("one column", 45, 1, 1.0, 1.0),
        ("large and small numbers", 32, 40, 1e6, 1.0),
        ("numbers of 1e-5", 33, 32, 1e-5, 2.0**-20),
    )
    draw = lambda rng: ("random numbers", *map(int, rng.integers(20, 65, 2)), float(rng.uniform(0.1, 9)), float(rng.uniform(0.1, 2)))  # fmt: skip
    for case, N, K, size, scale in e.cases(fixed, draw):
        x, scale = e.normal(N, K, mean=0.0, scale=size), np.float32(scale)
        plain_x, scale_1 = np.array(x), sim(np.array([scale]))
        codes, columns = e.blank(N, K, dtype=np.uint8), e.blank(K, N, dtype=np.uint8)
        grid = -(-K // 32), -(-N // 32)
        trace = e.run(grid, (32, 8), codes, columns, x, scale_1, case=f"{case}, N = {N}, K = {K}, scale {scale:g}", trace=True)  # fmt: skip
        first, second = alternatives(plain_x, scale, E5M2)
        for name, array, turned in (("codes_NK", codes, False), ("codes_KN", columns, True)):
            got, want = plain(array), np.where(plain(codes) == second, second, first)
            want = want.T if turned else want
            _judge_orientation(e, name, array, got, want, plain_x, scale, turned)
        unchanged(e, (x, scale_1), (plain_x, scale))
        _judge_accesses(e, trace, (x, codes, columns), N, K)


def _judge_orientation(e, name, array, got, want, x, scale, turned):
    written = e.wrote(array)
    if not written.any():
        raise e.wrong(f"{name} was never written." + " The transposed codes come from the tile, after a barrier." * turned)  # fmt: skip
    if not written.all():
        axis = 1 if turned else 0  # of the rows n
        rows = written.any(1 - axis)
        at = tuple(map(int, np.argwhere(~written)[0]))
        why = "The tile has 32 rows and the block 8 rows of threads: every thread goes on in steps of 8."
        if rows.size > 8 and not rows.all() and not rows[8:32].any():
            why += f" Only rows {int(np.flatnonzero(rows)[0])} to {int(np.flatnonzero(rows)[-1])} were written."
        elif written.shape[1 - axis] > 32 and not written.any(axis)[32:].any():
            why = "Only the first 32 columns were written: block (i, j) begins at column 32 i."
        elif rows.all() and not written.any(axis).all():
            why = "Whole columns are missing: blockIdx.x counts tiles of columns (K), blockIdx.y tiles of rows (N)."
        elif rows.size > 32 and not rows[32:].any():
            why = "Only the first 32 rows were written: block (i, j) begins at row 32 j."
        raise e.wrong(f"{name}[{at[0]}, {at[1]}] was never written ({int((~written).sum())} of {written.size} elements). {why}")  # fmt: skip
    y = x.T if turned else x
    codes = lambda values: plain(codes_of(np.clip(values, -57344, 57344).astype(np.float32), E5M2))
    tiles_kept = np.zeros_like(want)
    if turned:  # each tile is in its place, but not transposed in itself
        rows = want.T
        for n in range(0, rows.shape[0], 32):
            for k in range(0, rows.shape[1], 32):
                part = rows[n : n + 32, k : k + 32]
                h, w = part.shape
                if h == w:
                    tiles_kept[k : k + w, n : n + h] = part
    flat = want.T.reshape(want.shape) if turned else want
    e.same(name, got.astype(float), want.astype(float), {
        "The tile is not transposed: write tile[r, x], and read tile[x, c].": lambda got: turned and want.shape[0] > 1 and (got == tiles_kept)[tiles_kept > 0].all() and tiles_kept.any(),
        "These are the codes in the order of codes_NK: codes_KN[k, n] is the code of x[n, k].": lambda got: turned and min(want.shape) > 1 and np.array_equal(got, flat),
        "The scale is missing: the code is that of x / scale.": lambda got: scale != 1 and np.array_equal(got, codes(y)),
        "Multiplied by the scale: the code is that of x / scale.": lambda got: scale != 1 and np.array_equal(got, codes(y * scale)),
        "These are not codes, but numbers cut to whole ones: e5m2_code(x / scale).": lambda got: np.mean(got == plain(((y / scale).astype(np.int64) % 256).astype(np.uint8))) > 0.9,
    }, rtol=0, atol=0)  # fmt: skip


def _judge_accesses(e, trace, arrays, N, K):
    x, codes, columns = (e.name(a) for a in arrays)
    reads = len(trace.of(x, write=False))
    e.need(
        reads <= N * K,
        f"The values are right, but {x} is read {reads / (N * K):.3g} times over, and each number is rounded as often. Read it once: the transposed "
        "codes come from the tile in shared memory.",
    )
    back = len(trace.of(codes, write=False))
    e.need(
        not back,
        f"The values are right, but {codes} is read back from global memory: the transposed codes come from the tile in shared memory.",
    )
    if N < 32 or K < 32:
        return
    for name, write, width in ((x, False, 4), (codes, True, 1), (columns, True, 1)):
        requests = trace.requests(name, write)
        # 32 neighbours lie in one sector per 32 bytes, and in one more where they are not aligned
        most = max(len({a.index * a.bytes // 32 for a in r}) for r in requests)
        e.need(
            most <= width + 2,
            f"The values are right, but one instruction of a warp {'writes' if write else 'reads'} {most} sectors of {name}: the 32 threads of one "
            "threadIdx.y must touch 32 neighbours of a row. For codes_KN that is along n, so threadIdx.x is the row of the tile there.",
        )
    ways = max(trace.bank_conflicts(), default=1)
    if ways > 2:
        e.remark(
            f"A warp's access to the tile takes {ways} passes, because its bytes lie in few banks. With 36 bytes per row it takes one."
        )
