"""All functions of libdevice, from one table: name -> what it computes. Numba's own list gives the
types of arguments and results.

A float function is computed in float64 and rounded to its result type, so `expf` and `fast_expf`
use the entry `exp`. The variants with a rounding mode (`fadd_rd`, `double2int_ru`: down, up, to
zero, to nearest) are computed exactly, as fractions.
"""

import functools
import math
import re
import statistics
from fractions import Fraction

import numpy as np

from .unset import carries


# ----------------------------------------------------------------------------- rounding
def _neighbours(x):
    """Return the floats around x, in order."""
    kind = type(x)
    return np.nextafter(x, kind(-math.inf)), x, np.nextafter(x, kind(math.inf))


def _even(x) -> bool:
    return not x.view(f"u{x.itemsize}") & 1


def rounded(value: Fraction, kind, mode: str):
    """Return a fraction as a float of this kind. mode: "rn" to nearest, "rd" down, "ru" up, "rz" to
    zero."""
    try:
        near = kind(float(value))
    except OverflowError:
        near = kind(math.copysign(math.inf, value))
    if not math.isfinite(near):
        largest = np.finfo(kind).max
        towards_zero = mode == "rz" or mode == ("rd" if value > 0 else "ru")
        fits = abs(value) <= Fraction(float(largest))
        if towards_zero or fits:
            return kind(math.copysign(largest, value))
        return near
    around = [x for x in _neighbours(near) if math.isfinite(x)]
    if mode == "rz":
        mode = "rd" if value > 0 else "ru"
    if mode == "rn":
        return min(around, key=lambda x: (abs(Fraction(float(x)) - value), not _even(x)))
    if mode == "rd":
        return max(x for x in around if Fraction(float(x)) <= value)
    return min((x for x in around if Fraction(float(x)) >= value), default=kind(math.inf))


def _directed(exact, plain, kind, mode):
    """Return a function of floats that is computed as `exact` of fractions, or as `plain` if a
    number is infinite, NaN or invalid."""

    def f(*args):
        try:
            value = exact(*(Fraction(float(a)) for a in args))
        except (ValueError, OverflowError, ZeroDivisionError):
            return plain(*args)
        if value:
            return rounded(value, kind, mode)
        return plain(*args)

    return f


def _directed_sqrt(kind, mode):
    def f(x):
        near = np.sqrt(x)
        if mode == "rn" or not (math.isfinite(near) and x > 0):
            return near
        around = _neighbours(near)
        value = Fraction(float(x))
        below = max(y for y in around if Fraction(float(y)) ** 2 <= value)
        above = min(y for y in around if Fraction(float(y)) ** 2 >= value)
        return {"rd": below, "rz": below, "ru": above}[mode]

    return f


def _whole(x, mode) -> int:
    """Return a finite float as an integer."""
    if mode == "rn":
        return round(float(x))
    if mode == "rz":
        return math.trunc(float(x))
    if mode == "rd":
        return math.floor(float(x))
    return math.ceil(float(x))


def _to_integer(bits, signed, mode):
    """Numbers that do not fit become the nearest that does, NaN becomes 0 (64 bits: the
    smallest)."""
    if signed:
        least, most = (-(1 << bits - 1), (1 << bits - 1) - 1)
    else:
        least, most = (0, (1 << bits) - 1)

    def f(x):
        if x != x:
            return 0 if bits == 32 else 1 << 63
        if math.isinf(x):
            return most if x > 0 else least
        return min(max(_whole(x, mode), least), most)

    return f


# ----------------------------------------------------------------------------- float functions
def _normcdfinv(p):
    if not 0 < p < 1:
        if not 0 <= p <= 1:
            return math.nan
        return math.copysign(math.inf, p - 0.5)
    return statistics.NormalDist().inv_cdf(p)


def _newton(y, error):
    """Improve a root of a function with the derivative 2 / sqrt(pi) exp(-y^2)."""
    for _ in range(4):
        y -= error(y) * math.sqrt(math.pi) / 2 * math.exp(y * y)
    return y


def _erfinv(x):
    if not -1 < x < 1:
        if abs(x) == 1:
            return math.copysign(math.inf, x)
        return math.nan
    if abs(x) > 0.9:
        return math.copysign(_erfcinv(1 - abs(x)), x)
    return _newton(_normcdfinv((1 + x) / 2) / math.sqrt(2), lambda y: math.erf(y) - x)


def _erfcinv(x):
    if not 0 < x < 2:
        return {0: math.inf, 2: -math.inf}.get(x, math.nan)
    if x > 1:
        if x > 1.5:
            return -_erfcinv(2 - x)
        return _erfinv(1 - x)
    return _newton(-_normcdfinv(x / 2) / math.sqrt(2), lambda y: x - math.erfc(y))


def _erfcx(x):
    if x < 25:
        return math.exp(x * x) * math.erfc(x)
    term = 1.0
    total = 0.0
    for k in range(1, 12):
        total += term
        term *= -(2 * k - 1) / (2 * x * x)
    return total / (x * math.sqrt(math.pi))


def _jn(n, x):
    """Bessel's integral, by the trapezoidal rule, which is exact to rounding for a periodic
    function."""
    if not math.isfinite(x):
        return math.nan if x != x else 0.0
    t = (np.arange(points := int(abs(x) + abs(n)) + 60) + 0.5) * np.pi / points
    return float(np.mean(np.cos(int(n) * t - x * np.sin(t))))


@functools.cache
def _nodes():
    return np.polynomial.legendre.leggauss(400)


def _integral(f, a, b):
    x, w = _nodes()
    return float((b - a) / 2 * np.sum(w * f((b - a) / 2 * x + (a + b) / 2)))


def _yn(n, x):
    """Schlaefli's integral for Y_0 and Y_1; upwards recurrence for the others."""
    if x <= 0 or not math.isfinite(x):
        if x == 0:
            return -math.inf
        if x == math.inf:
            return 0.0
        return math.nan
    if n > 1:
        below = _yn(0, x)
        y = _yn(1, x)
        for k in range(1, int(n)):
            below, y = y, 2 * k / x * y - below
        return y
    n = int(n)
    sign = 1 - 2 * (n & 1)
    wave = _integral(lambda t: np.sin(x * np.sin(t) - n * t), 0, math.pi)
    end = math.asinh(745 / x)
    tail = _integral(
        lambda t: (np.exp(n * t) + sign * np.exp(-n * t)) * np.exp(-x * np.sinh(t)), 0, end
    )
    return (wave - tail) / math.pi


def _of_pi(f):
    """f(pi x), with x reduced first."""
    return lambda x: f(math.pi * math.remainder(x, 2)) if math.isfinite(x) else math.nan


def _sinpi(x):
    r = math.remainder(x, 2)
    if r in (0, 1, -1):
        return math.copysign(0.0, x)
    return math.sin(math.pi * r)


def _cospi(x):
    r = abs(math.remainder(x, 2))
    if r == 0.5:
        return 0.0
    return math.cos(math.pi * r)


def _round_away(x):
    if abs(x) < 2**52:
        return math.copysign(math.floor(abs(x) + 0.5), x)
    return x


def _remquo(x, y):
    q = round(Fraction(x) / Fraction(y))
    return math.remainder(x, y), int(math.copysign(abs(q) & 7, q))


def _logb(x):
    if x == 0:
        return -math.inf
    if math.isinf(x):
        return math.inf
    return float(math.frexp(x)[1] - 1)


def _ilogb(x):
    special = {0: -(2**31)}.get(x, 2**31 - 1 if math.isinf(x) else -(2**31))
    if math.isfinite(x) and x != 0:
        return int(_logb(x))
    return special


def _modf(x):
    fraction, whole = math.modf(x)
    return fraction, whole


def _numpy(name):
    f = getattr(np, name)
    return lambda *args: f(*map(np.float64, args))


_FLOATS = {
    **{
        name: getattr(math, name)
        for name in ["acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh", "erf", "erfc", "exp", "expm1", "fabs", "floor", "fmod", "hypot", "ldexp", "lgamma", "log", "log10", "log1p", "log2", "pow", "remainder", "sin", "sinh", "sqrt", "tan", "tanh"]
    },
    "cbrt": _numpy("cbrt"), "exp2": lambda x: 2.0**x, "exp10": lambda x: 10.0**x, "rint": _numpy("rint"),
    "nearbyint": _numpy("rint"), "trunc": _numpy("trunc"), "round": _round_away, "tgamma": math.gamma,
    "rsqrt": lambda x: 1 / math.sqrt(x) if x != 0 else math.copysign(math.inf, x),
    "rcbrt": lambda x: 1 / np.cbrt(np.float64(x)), "fdim": lambda x, y: max(x - y, 0.0) if x == x and y == y else math.nan,
    "fmax": _numpy("fmax"), "fmin": _numpy("fmin"), "fdividef": lambda x, y: np.float64(x) / np.float64(y),
    "saturate": lambda x: min(max(x, 0.0), 1.0) if x == x else 0.0, "logb": _logb, "ilogb": _ilogb,
    "powi": lambda x, n: x ** int(n), "scalbn": lambda x, n: math.ldexp(x, int(n)),
    "sinpi": _sinpi, "cospi": _cospi, "sincos": lambda x: (math.sin(x), math.cos(x)),
    "sincospi": lambda x: (_sinpi(x), _cospi(x)), "frexp": math.frexp, "modf": _modf, "remquo": _remquo,
    "erfinv": _erfinv, "erfcinv": _erfcinv, "erfcx": _erfcx, "normcdfinv": _normcdfinv,
    "normcdf": lambda x: 0.5 * math.erfc(-x / math.sqrt(2)),
    "j0": lambda x: _jn(0, x), "j1": lambda x: _jn(1, x), "jn": _jn,
    "y0": lambda x: _yn(0, x), "y1": lambda x: _yn(1, x), "yn": _yn,
    "llrint": lambda x: _to_integer(64, True, "rn")(x), "llround": lambda x: _to_integer(64, True, "rn")(_round_away(x)),
    "finite": math.isfinite, "isfinited": math.isfinite, "isinf": math.isinf, "isinfd": math.isinf,
    "isnan": math.isnan, "isnand": math.isnan, "signbit": lambda x: math.copysign(1, x) < 0,
    "signbitd": lambda x: math.copysign(1, x) < 0,
}  # fmt: skip


# ----------------------------------------------------------------------------- integer functions
def _unsigned(x, bits=32) -> int:
    return int(x) & (1 << bits) - 1


def _low24(x) -> int:
    return (int(x) & 0xFFFFFF ^ 0x800000) - 0x800000


def _byte_perm(x, y, s):
    data = (_unsigned(x) | _unsigned(y) << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(data[s >> 4 * i & 7] for i in range(4)), "little")


def _reversed(bits):
    return lambda x: int(f"{_unsigned(x, bits):0{bits}b}"[::-1], 2)


def _bits_of(kind, of):
    return lambda x: kind(x).view(of)


_INTEGERS = {
    "abs": abs, "llabs": abs, "max": max, "min": min, "llmax": max, "llmin": min,
    "umax": lambda a, b: max(_unsigned(a), _unsigned(b)), "umin": lambda a, b: min(_unsigned(a), _unsigned(b)),
    "ullmax": lambda a, b: max(_unsigned(a, 64), _unsigned(b, 64)), "ullmin": lambda a, b: min(_unsigned(a, 64), _unsigned(b, 64)),
    "brev": _reversed(32), "brevll": _reversed(64), "byte_perm": lambda x, y, s: _byte_perm(x, y, _unsigned(s)),
    "clz": lambda x: 32 - _unsigned(x).bit_length(), "clzll": lambda x: 64 - _unsigned(x, 64).bit_length(),
    "ffs": lambda x: (int(x) & -int(x)).bit_length(), "ffsll": lambda x: (int(x) & -int(x)).bit_length(),
    "popc": lambda x: _unsigned(x).bit_count(), "popcll": lambda x: _unsigned(x, 64).bit_count(),
    "hadd": lambda a, b: a + b >> 1, "rhadd": lambda a, b: a + b + 1 >> 1,
    "uhadd": lambda a, b: _unsigned(a) + _unsigned(b) >> 1, "urhadd": lambda a, b: _unsigned(a) + _unsigned(b) + 1 >> 1,
    "mul24": lambda a, b: _low24(a) * _low24(b), "umul24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "mulhi": lambda a, b: a * b >> 32, "umulhi": lambda a, b: _unsigned(a) * _unsigned(b) >> 32,
    "mul64hi": lambda a, b: a * b >> 64, "umul64hi": lambda a, b: _unsigned(a, 64) * _unsigned(b, 64) >> 64,
    "sad": lambda x, y, z: abs(x - y) + z, "usad": lambda x, y, z: abs(_unsigned(x) - _unsigned(y)) + z,
}  # fmt: skip
_BITS = {
    "float_as_int": _bits_of(np.float32, np.int32), "int_as_float": _bits_of(np.int32, np.float32),
    "double_as_longlong": _bits_of(np.float64, np.int64), "longlong_as_double": _bits_of(np.int64, np.float64),
    "double2hiint": lambda x: int(x.view(np.int64)) >> 32, "double2loint": lambda x: int(x.view(np.int64)),
    "hiloint2double": lambda high, low: np.uint64(_unsigned(high) << 32 | _unsigned(low)).view(np.float64),
    "float2half_rn": lambda x: np.float16(x).view(np.int16), "half2float": lambda x: np.float32(x.view(np.float16)),
    "nextafter": np.nextafter, "nextafterf": np.nextafter, "frsqrt_rn": lambda x: 1 / np.sqrt(np.float64(x)),
}  # fmt: skip
_WIDTHS = {"int": (32, True), "uint": (32, False), "ll": (64, True), "ull": (64, False)}
_KINDS = {"float": np.float32, "double": np.float64, "f": np.float32, "d": np.float64}
_OPERATIONS = {
    "add": (lambda a, b: a + b,) * 2,
    "sub": (lambda a, b: a - b,) * 2,
    "mul": (lambda a, b: a * b,) * 2,
    "div": (lambda a, b: a / b,) * 2,
    "rcp": (lambda a: 1 / a, lambda a: type(a)(1) / a),
    "ma": (lambda a, b, c: a * b + c,) * 2,
}


def _computation(name):
    """Return (function, its numbers): what computes the libdevice function of this name. numbers:
    "float", "int" or "numpy", what the function takes: Python's floats, Python's integers or
    NumPy's scalars."""
    if name in _BITS:
        return _BITS[name], "numpy"
    if name in _INTEGERS:
        return _INTEGERS[name], "int"
    if match := re.fullmatch(r"(float|double)2(int|uint|ll|ull)_(r.)", name):
        return _to_integer(*_WIDTHS[match[2]], match[3]), "float"
    if match := re.fullmatch(r"(int|uint|ll|ull)2(float|double)_(r.)", name):
        bits, signed = _WIDTHS[match[1]]
        kind = _KINDS[match[2]]
        mode = match[3]
        return lambda x: rounded(
            Fraction(int(x) if signed else _unsigned(x, bits)), kind, mode
        ), "int"
    if match := re.fullmatch(r"double2float_(r.)", name):
        return _directed(lambda x: x, np.float32, np.float32, match[1]), "numpy"
    if match := re.fullmatch(r"(f|d)sqrt_(r.)", name):
        return _directed_sqrt(_KINDS[match[1]], match[2]), "numpy"
    if match := re.fullmatch(r"fma(f?)(?:_(r.))?", name):
        if match[1]:
            kind = np.float32
        else:
            kind = np.float64
        return _directed(*_OPERATIONS["ma"], kind, match[2] or "rn"), "numpy"
    if match := re.fullmatch(r"(f|d)(add|sub|mul|div|rcp)_(r.)", name):
        exact, plain = _OPERATIONS[match[2]]  # IEEE 754 rounds one operation to nearest
        directed = _directed(exact, plain, _KINDS[match[1]], match[3])
        return plain if match[3] == "rn" else directed, "numpy"
    stem = name.removeprefix("fast_")
    return _FLOATS[stem if stem in _FLOATS else stem.removesuffix("f")], "float"


def table(frontend, cast):
    """Yield (function of cuda.libdevice, what the simulator calls in its place) for all of them.
    cast: scalars.cast."""
    for full, (returns, parameters) in frontend.libdevice_functions.items():
        name = full.removeprefix("__nv_")
        arguments = [p.ty for p in parameters if not p.is_ptr]
        results = []
        if str(returns) != "none":
            results = [returns]
        results += [p.ty for p in parameters if p.is_ptr]
        casts = [[cast(np.dtype(str(t))) for t in types] for types in (arguments, results)]
        function = carries(_typed(*_computation(name), *casts))
        for module in frontend.libdevices:
            yield getattr(module, name), function


def _typed(f, numbers, arguments, results):
    """f with converted arguments and results."""
    if numbers == "numpy":
        plain = [g.dtype.type for g in arguments]
    else:
        plain = [int if numbers == "int" or g.dtype.kind == "i" else float for g in arguments]
    fallback = getattr(np, _FALLBACK.get(f, ""), None)

    def call(*args):
        args = [p(g(x)) for p, g, x in zip(plain, arguments, args, strict=True)]
        try:
            value = f(*args)
        except (ValueError, OverflowError, ZeroDivisionError):  # a GPU returns NaN or infinity
            if fallback:
                value = fallback(*map(np.float64, args))
            else:
                value = math.nan
        if len(results) > 1:
            return tuple(_result(r, v) for r, v in zip(results, value))
        return _result(results[0], value)

    return call


def _result(convert, value):
    if issubclass(convert.scalar, np.integer):
        bits = 8 * convert.dtype.itemsize
        value = _unsigned(value, bits)
        return convert.scalar(value - (value >> bits - 1 << bits))
    return convert.scalar(value)


_FALLBACK = {
    getattr(math, name): {"pow": "power"}.get(name, ("arc" + name[1:]) if name[0] == "a" else name)
    for name in ["acos", "acosh", "asin", "asinh", "atanh", "cosh", "exp", "expm1", "fmod", "log", "log10", "log1p", "log2", "pow", "sinh", "sqrt", "ldexp"]
} | {_FLOATS["exp2"]: "exp2", math.gamma: "exp", math.lgamma: "abs"}  # fmt: skip
