"""Exercises of lesson 29: int8 codes by row, the numbers of e4m3 codes and back, a product with codes."""

import re

import numpy as np

from xtrain.simulator import sim

from .attempt import exercise
from .reading import named_types

CHANGED = "An input was changed: compute new arrays."


def numbers_of(fraction_bits: int, bias: int) -> np.ndarray:
    """The numbers of all 256 codes of a format without infinities or NaN, float64. (ml_dtypes has no build for a browser.)"""
    codes = np.arange(256)
    parts = 1 << fraction_bits
    exponent = (codes & 127) // parts
    fraction = codes % parts / parts
    size = np.where(exponent > 0, 1 + fraction, fraction) * 2.0 ** (np.maximum(exponent, 1) - bias)
    return np.where(codes < 128, size, -size)


TABLE = numbers_of(3, 7)  # e4m3: code -> number
TABLE[[127, 255]] = np.nan
E5M2 = numbers_of(2, 15)
E5M2[[124, 252]] = np.inf, -np.inf
E5M2[[125, 126, 127, 253, 254, 255]] = np.nan


def nearest_code(a) -> np.ndarray:
    """The e4m3 code nearest to each a, from 0 to 448; halfway between two the even one."""
    lower = np.searchsorted(TABLE[:127], a, "right") - 1
    upper = np.minimum(lower + 1, 126)
    below, above = a - TABLE[lower], TABLE[upper] - a
    return np.where((above < below) | ((above == below) & (lower % 2 == 1)), upper, lower)


@exercise(
    "29.1", "quantize_rows",
    first_step="the largest absolute value of each row, np.abs(w).max(axis=1), divided by 127, is its scale.",
    hints={"ValueError": "The shapes do not fit: to divide row o by scale o, make the scales a column, scales[:, None]."},
    kernel=False,
)  # fmt: skip
def quantize_rows(e):
    plain = lambda rng, O, K: rng.normal(size=(O, K)).astype(np.float32)
    fixed = np.random.default_rng(29)
    negative = np.array([[-5.0, 1.0, 2.0], [0.5, -1.27, 0.003]], np.float32)
    zero, large, outlier = plain(fixed, 3, 5), plain(fixed, 3, 6), plain(fixed, 2, 40)
    zero[1] = 0
    large *= np.array([[1e30], [1.0], [1e-30]], np.float32)
    outlier[0, 7] = -90.0
    cases = (
        ("3 x 4 normal weights", plain(fixed, 3, 4)),
        ("two rows, the largest weights are negative", negative),
        ("a row of zeros", zero),
        ("rows near 1e30, 1 and 1e-30", large),
        ("an outlier in row 0", outlier),
        ("one weight per row", plain(fixed, 4, 1)),
    )
    draw = lambda rng: ("random weights", plain(rng, *rng.integers(2, 9, 2)) * rng.uniform(0.1, 9))
    for case, w in e.cases(cases, draw):
        w = np.array(w, np.float32)
        given = w.copy()
        codes, scales = e.several(e.call(given, case=case), "codes", "scales")
        wide = w.astype(np.float64)
        largest = np.abs(wide).max(1)
        empty = largest == 0
        e.need(
            np.shape(scales) != (len(w), 1),
            "scales has shape (O, 1): return one number per row, shape (O,).",
        )
        scales = np.asarray(scales)
        if empty.any() and scales.shape == largest.shape:
            ok = np.isfinite(scales[empty]) & (scales[empty] > 0)
            e.need(
                ok.all(),
                "The scale of a row of zeros is 0, and 0 / 0 is NaN: take any number above 0 there.",
            )
        kept = lambda x: np.where(empty, scales, x) if scales.shape == largest.shape else x
        many, spread = len(w) > 1, wide.max(1) - wide.min(1)
        columns = np.abs(wide).max(0) / 127
        e.same("scales", scales, kept(largest / 127), {
            "This is the scale of the whole matrix in every row: take the largest of each row, axis=1.":
                np.full(len(w), largest.max() / 127) if many else np.empty(0),
            "These are scales of columns: a row is axis=1.": columns if len(columns) == len(w) else np.empty(0),
            "The largest value is taken, not the largest absolute value: of -5 and 2 it is -5 that counts. Use np.abs(w).": wide.max(1) / 127,
            "Divided by 128: then the largest weight gets code 128, which int8 does not have. The largest code is 127.": kept(largest / 128),
            "Divided by 255: that is for codes without a sign. The codes go from -127 to 127.": kept(largest / 255),
            "This is (max - min) / 255, the scale of codes with an offset. Here 0 must stay 0: largest |w| / 127.": spread / 255,
            "This is the inverse of the scale: a weight is code x scale.":
                lambda got: np.allclose(got[~empty] * largest[~empty], 127, 1e-4),
            "Not divided by 127: the scale is one step, so that the largest weight gets code 127.": kept(largest),
            "The scale of a row is too large: nothing is added to it, and it has no least value. Only a row of zeros needs another one.":
                lambda got: (got >= kept(largest / 127) * (1 - 1e-6)).all(),
        }, atol=0)  # fmt: skip
        e.need(codes is not None and np.shape(codes) == w.shape,
               f"codes has shape {np.shape(codes)}; there is one code per weight, shape {w.shape}.")  # fmt: skip
        codes = np.asarray(codes)
        e.need(
            codes.dtype == np.int8,
            f"codes has dtype {codes.dtype}: one byte each, .astype(np.int8).",
        )
        ratio = wide / np.where(empty, 1, largest / 127)[:, None]
        near = np.abs(np.abs(ratio % 1) - 0.5) < 1e-3  # halves may go either way
        want = np.where(near & (np.abs(codes - ratio) < 0.51), codes, np.rint(ratio))
        within = lambda x: ((x > -1e-3) & (x < 1 + 1e-3)).all()
        e.same("codes", codes.astype(float), want, {
            "The fractions were cut off: 2.9 becomes 2. Round to the nearest code with np.rint before astype(np.int8).": 
                lambda got: within(np.abs(ratio) - np.abs(got)),
            "Rounded down: np.floor makes every weight smaller. Round to the nearest, np.rint.": lambda got: within(ratio - got),
            "Rounded up: np.ceil makes every weight larger. Round to the nearest, np.rint.": lambda got: within(got - ratio),
            "These are the absolute values: the codes keep the sign of the weight.": np.abs(want),
            "A code is -128. The codes go from -127 to 127, and int8 has no 128: it would become -128.":
                lambda got: (got == -128).any(),
        })  # fmt: skip
        e.need(np.array_equal(given, w), CHANGED)


def by_hand(e):
    """Raises Wrong if the attempt leaves the bits to a library's e4m3."""
    e.need(
        not re.search(r"ml_dtypes|float8_e", " ".join([e.code, *e.read(named_types)])),
        "This leaves the work to a library's e4m3 type: take the bits apart yourself.",
    )


@exercise(
    "29.2", "decode",
    first_step="bits = codes.astype(int); the exponent is (bits >> 3) & 15, the fraction bits & 7, the sign bits >> 7.",
    hints={"TypeError": "Bits can only be shifted in whole numbers: bits = codes.astype(int).",
           "ValueError": "Integers to negative powers are not allowed: write 2.0 ** (e - 7). And codes may have any shape: choose with np.where, not with `if`."},
    kernel=False,
)  # fmt: skip
def decode(e):
    by_hand(e)
    bits = np.arange(256)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    sign = np.where(bits >> 7 == 1, -1.0, 1.0)

    def reading(bias=7, below=-6, one=0.0, least=1, parts=8):
        """The numbers of all codes if they are read in another way."""
        normal = (1 + fraction / parts) * 2.0 ** (exponent - bias)
        value = np.where(exponent >= least, normal, (one + fraction / parts) * 2.0**below)
        return sign * np.where((exponent == 15) & (fraction == 7), np.nan, value)

    full = sign * np.where((exponent == 15) & (fraction == 7), 480.0, np.abs(TABLE))
    every = bits.astype(np.uint8)
    fixed = (every, every[0x38:0x40], np.zeros((0,), np.uint8), every[::-1][:96].reshape(8, 12))
    draw = lambda rng: rng.integers(0, 256, rng.integers(3, 9, 2), dtype=np.uint8)
    for codes in e.cases(fixed, draw):
        codes = np.array(codes, np.uint8)
        given = codes.copy()
        many = codes.size > 20
        got = e.call(given, case=f"{'all 256' if codes.size == 256 else codes.size} codes, shape {codes.shape}")  # fmt: skip
        at = codes.astype(int)
        if hasattr(got, "shape") and np.shape(got) == codes.shape and codes.size:
            high = exponent[at] == 15
            lost = ~np.isfinite(np.asarray(got, float)) & high & (fraction[at] < 7)
            e.need(not lost.any(),
                   "Codes with e = 15 have become infinite or NaN, as in fp16. e4m3 has no infinity, and only m = 7 is NaN: the others are 256 to 448.")  # fmt: skip
        e.same("values", got, TABLE[at], {
            "This is 480: with e = 15, m = 7 is NaN.": full[at],
            "uint8 has wrapped around: 3 - 7 is 252 there. Begin with codes.astype(int).":
                lambda got, at=at: many and (np.abs(np.nan_to_num(got, posinf=1e30)) > 1e9).any(),
            "The bias of the exponent is 7, not 8.": lambda got, at=at: many and any(
                np.allclose(got, reading(bias=8, below=b)[at], equal_nan=True) for b in (-6, -7)),
            "0xFF is NaN as well as 0x7F: the sign does not matter.": lambda got, at=at: many and np.array_equal(
                got, np.where(at == 255, -480.0, TABLE[at]), equal_nan=True),
            "The bias of the exponent is 7, not 15.": reading(bias=15)[at],
            "Codes with e = 0 are subnormal: m / 8 x 2^-6, without the 1.": reading(least=0)[at],
            "Subnormal numbers have the exponent -6, as e = 1 has: they continue the same steps down to 0.": reading(below=-7)[at],
            "Codes with e = 0 are subnormal: without the 1 before the fraction.": reading(one=1.0)[at],
            "Codes with e = 0 have become 0: they are subnormal numbers, m / 8 x 2^-6.":
                np.where(exponent == 0, 0.0, TABLE)[at],
            "The sign is missing: the highest bit means minus.": np.abs(TABLE)[at],
            "The fraction has 3 bits: it counts eighths.": lambda got, at=at: many and any(
                np.allclose(got, reading(parts=p)[at], equal_nan=True) for p in (4, 7, 16)),
            "This is e5m2, with 5 bits of exponent and 2 of fraction: e4m3 has 4 and 3.": E5M2[at],
        })  # fmt: skip
        e.need(np.array_equal(given, codes), CHANGED)


@exercise(
    "29.3", "encode",
    first_step="a = np.minimum(np.abs(v), 448). Between 2^e and 2^(e+1) the steps are 2^(e - 3): how many steps is a, to the nearest?",
    hints={"OverflowError": "Infinity has no exponent: limit |v| to 448 first.",
           "ValueError": "v may have any shape: choose with np.where, not with `if`.",
           "IndexError": "This index is beyond the table: there are 127 codes from 0 to 448. Limit |v| to 448 first."},
    kernel=False,
)  # fmt: skip
def encode(e):
    by_hand(e)
    numbers = TABLE[:127]
    halves = (numbers[1:] + numbers[:-1]) / 2
    both = lambda x: np.concatenate([x, -x]).astype(np.float32)
    beyond = both(np.array([449, 463.9, 464, 480, 1e6, np.inf]))
    random = np.random.default_rng(293).normal(size=(4, 30)).astype(np.float32)
    fixed = (
        ("numbers that have a code", both(numbers)),
        ("normal numbers", random),
        ("numbers just below powers of two", both(np.array([0.99, 1.97, 15.8, 0.0155, 0.0077, 252]))),
        ("numbers below 2^-6", random * np.float32(0.01)),
        ("numbers above 448", beyond),
        ("numbers halfway between two codes", both(halves)),
        ("numbers next to halfway", both(np.concatenate([np.nextafter(np.float32(halves), np.float32(x)) for x in (0, 448)]))),
        ("no numbers", np.zeros((0,), np.float32)),
    )  # fmt: skip

    def draw(rng):
        size = 2.0 ** rng.uniform(-9, 9, (5, 8))
        return "random numbers", (rng.choice([-1, 1], size.shape) * size).astype(np.float32)

    def codes_of(a):
        return nearest_code(np.minimum(a, 448).astype(np.float64))

    for case, v in e.cases(fixed, draw):
        v = np.array(v, np.float32)
        given = v.copy()
        got = e.call(given, case=f"{case}, shape {v.shape}")
        e.need(got is not None, "Nothing is returned: end with `return` and the codes.")
        e.need(np.shape(got) == v.shape, f"The codes have shape {np.shape(got)}; v has {v.shape}.")
        got = np.asarray(got)
        e.need(
            got.dtype == np.uint8, f"The codes have dtype {got.dtype}: one byte each, .astype(np.uint8)."
        )  # fmt: skip
        a, minus = np.abs(v.astype(np.float64)), np.signbit(v)
        want = codes_of(a) + 128 * minus
        got = np.where((got & 127 == 0) & (want & 127 == 0), want, got)  # -0 is 0
        below = np.searchsorted(numbers, np.minimum(a, 448), "right") - 1
        up = np.minimum(np.searchsorted(halves, a, "right"), 126)
        down = np.searchsorted(halves, a, "left")
        signed = lambda codes, minus=minus: codes + 128 * minus
        limited = np.clip(a, 2.0**-6, 448)
        carried = np.rint(limited / 2.0 ** (np.frexp(limited)[1] - 4)) == 16
        outside = a > 448
        e.same("codes", got.astype(float), want.astype(float), {
            "The sign is missing: a negative number has the highest bit set.": lambda got: (got % 128 == want % 128).all(),
            "Numbers above 448 must saturate: 0x7E is 448, and the next code, 0x7F, is NaN. Limit |v| to 448.":
                lambda got: outside.any() and (got != want)[outside].any() and not (got != want)[~outside].any(),
            "Halfway between two numbers the one with the even code is taken: np.rint rounds halves to even.":
                lambda got: ((got == signed(up)) | (got == signed(down)) | (got == want)).all(),
            "Rounded twice: these numbers were first rounded to halfway between two codes, and then to the even one. Round v itself, in float32 or wider.":
                lambda got, case=case: case.endswith("next to halfway") and (abs(got - want) <= 1).all() and (got % 2 == 0)[got != want].all(),
            "Numbers above 240 have become 240. Of the codes with e = 15 only m = 7 is NaN: the largest number is 448, code 0x7E.":
                lambda got: (got % 128 == np.minimum(want % 128, 119)).all(),
            "Rounded toward 0: take the NEAREST number that has a code.": lambda got: (got % 128 == below).all(),
            "Numbers below 2^-6 have become 0: they are subnormal, multiples of 2^-9.":
                lambda got: ((got == want) | ((a < 2.0**-6) & (got.astype(int) & 127 == 0))).all(),
            "0 has the code 0, but np.frexp(0) is (0, 0): take the exponent of max(a, 2^-6).":
                lambda got: (got == want)[a > 0].all() and (a > 0).any(),
            "Below 2^-6 the steps stay 2^-9: the exponent is never smaller than -6.":
                lambda got: (a < 2.0**-6).any() and (got == want)[a >= 2.0**-6].all(),
            "Where the fraction rounds up to 8/8 the exponent must grow by 1: ADD the fraction to the exponent's bits, do not OR it.":
                lambda got: carried.any() and (got == want)[~carried].all(),
            "Each code is 8 too small or too large: the exponent's bits are e + 7, and n counts from 8 in every interval.":
                lambda got: np.isin((got - want)[a >= 2.0**-6], (-8, 8, 248, -248)).all() and (a >= 2.0**-6).any(),
        })  # fmt: skip
        e.need(np.array_equal(given, v), CHANGED)


@exercise(
    "29.4", "gemv_int8_kernel",
    first_step="which row o has this warp? Lane l adds x[k] * codes[o, k] for k = l, l + 32, ... in a float32.",
    allow=("warp_sum",),
    hints={
        "OutOfBoundsError": "The last block may have a warp without a row, and K need not be a multiple of 32: `if o < y_O.size`, `range(lane, x_K.size, 32)`.",
        "RaceError": "All lanes write y[o]. Only lane 0 of each warp does.",
        "RaceError between blocks": "Two blocks write the same rows: block b has rows 2 b and 2 b + 1.",
        "CollectiveError": "All 32 lanes of a warp must call warp_sum: move it out of `if lane == 0` and of the loop.",
        "DeadlockError": "All 32 lanes of a warp must call warp_sum: move it out of `if lane == 0` and of the loop.",
    },
)  # fmt: skip
def gemv_int8_kernel(e):
    fixed = (4, 64, 1.0), (5, 70, 1.0), (3, 7, 1.0), (1, 32, 1000.0), (4, 256, 1.0)
    for O, K, big in e.cases(fixed, lambda rng: (*rng.integers((3, 33), (9, 150)), 1.0)):
        x, y, scale = e.normal(K, scale=big), e.blank(O), e.normal(O, mean=2.0, scale=0.3)
        codes = sim(np.clip(np.round(np.asarray(e.normal(O, K, scale=50.0))), -127, 127).astype(np.int8))  # fmt: skip
        codes[:, 0] = -127
        case = f"O = {O}, K = {K}" + (", large x" if big > 1 else "")
        trace = e.run(-(-O // 2), 64, y, x, codes, scale, case=case, trace=True)
        c, s, v = (np.asarray(a).astype(np.float64) for a in (codes, scale, x))
        want = s * (c @ v)
        atol = 1e-5 * (s * (np.abs(c) @ np.abs(v))).max()
        blocks = np.arange(O) // 2
        e.same("y", y, want, {
            "The scale of the row is missing: multiply the sum by scale_O[o].": c @ v,
            "The scale was applied twice: to every product, and to the sum.": s * want,
            "This is the scale of another row: row o has scale_O[o].": s[blocks] * (c @ v) if O > 1 else np.empty(0),
            "This is the part of lane 0: add up the lanes' sums with warp_sum.": s * (c[:, ::32] @ v[::32]) if K > 1 else np.empty(0),
            "Only the first 32 columns were multiplied: every lane continues in steps of 32.": s * (c[:, :32] @ v[:32]) if K > 32 else np.empty(0),
            "The columns past the last multiple of 32 are missing: K may be any number, range(lane, K, 32).":
                s * (c[:, : K // 32 * 32] @ v[: K // 32 * 32]) if K > 32 and K % 32 else np.empty(0),
            "A row's warp has read every other 32 columns: lanes count from 0 in each warp, threadIdx.x % 32, and step by 32.":
                s * (np.where(np.arange(K) // 32 % 2 == np.arange(O)[:, None] % 2, c, 0) @ v) if K > 32 else np.empty(0),
            "The products were cut to whole numbers: the sum is a float32.": lambda got: np.allclose(
                got, s * np.trunc(c * v).sum(1), 1e-3, 1e-3 * s.max()),
            "The codes were read as numbers without sign, 0 to 255: they are int8, and float32(code) keeps the sign.": s * ((c % 256) @ v),
            "Every product is counted 32 times: a lane begins with its own column, range(lane, K, 32).": 32 * want,
            "Only even rows were written: each of the two warps has its own row, threadIdx.x // 32.":
                lambda got: O > 1 and e.wrote(y)[::2].all() and not e.wrote(y)[1::2].any(),
            "Only the first two rows were written: block b continues with row 2 b.":
                lambda got: O > 2 and e.wrote(y)[:2].all() and not e.wrote(y)[2:].any(),
        }, rtol=1e-4, atol=atol)  # fmt: skip
        e.divided(trace, codes, O * min(32, K) // 4)
        if K == 256:
            e.need(
                trace.traffic(e.name(codes), write=False).efficiency > 0.2,
                "The values are right, but every lane reads a piece of the row, far from its neighbour's: one instruction of a warp needs 8 sectors "
                "of 32 bytes instead of one. Lane l reads columns l, l + 32, l + 64, ...",
            )
        if len(trace.of(e.name(scale))) > 32 * O:
            e.remark("The scale can leave the sum: one multiplication per row, not one per weight.")
