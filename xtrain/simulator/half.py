"""cuda.fp16 and numba.cuda.bf16: 16-bit floats and their functions. Each computes in float64, or
exactly, and rounds once.

NumPy has float16, and no bfloat16: a BFloat16 is a float32 of which only the upper 16 bits are set.
In memory it is two bytes (BF16), as is ml_dtypes.bfloat16, which need not be installed.
"""

import math
import operator
import re
from fractions import Fraction

import numpy as np

from .unset import Unset, carries

BF16 = np.dtype("V2")
_FORMATS: dict = {}  # type -> digits, exponents of the smallest number and of the first that is too large
_ROUNDINGS = {"": round, "_rn": round, "_rz": math.trunc, "_rd": math.floor, "_ru": math.ceil}


def rounded(x, kind, how=round):
    """Return a number in a 16-bit format. how: round (to nearest, ties to even), math.trunc,
    math.floor or math.ceil."""
    if isinstance(x, np.integer):
        x = int(x)
    elif not isinstance(x, Fraction):
        x = float(x)
    if not x or x != x or abs(x) == math.inf:
        return float(x)
    digits, least, most = _FORMATS[kind]
    if isinstance(x, int):
        exponent = x.bit_length()
    else:
        exponent = math.frexp(x)[1]
    last = max(exponent - digits, least)
    if isinstance(x, float):
        scaled = math.ldexp(x, -last)
    else:
        scaled = Fraction(x) * Fraction(2) ** -last
    result = math.copysign(math.ldexp(how(scaled), last), x)
    if abs(result) < 2.0**most:
        return result
    away = how is round or how is (math.ceil if x > 0 else math.floor)
    return math.copysign(math.inf if away else 2.0**most - 2.0 ** (most - digits), x)


def wide(x):
    """x, a BFloat16 as a float32."""
    if type(x) is BFloat16:
        return np.float32(x)
    return x


def _operation(op, keeps):
    """keeps: two numbers of this type, or one and an integer of 8 bits, give this type. Otherwise
    it acts as a float32."""

    def is_kept(other):
        return keeps and (
            type(other) is BFloat16 or getattr(other, "base", None) in (np.int8, np.uint8)
        )

    def forward(self, other):
        if type(other) is Unset:
            return NotImplemented
        if is_kept(other):
            return BFloat16(op(np.float64(self), np.float64(other)))
        return op(np.float32(self), wide(other))

    def backward(self, other):
        if is_kept(other):
            return BFloat16(op(np.float64(other), np.float64(self)))
        return op(other, np.float32(self))

    return forward, backward


def _comparison(op):
    def compare(self, other):
        if type(other) is Unset:
            return NotImplemented
        return op(np.float32(self), wide(other))

    return compare


class BFloat16(np.float32):
    """A bfloat16 number, with the arithmetic of numba-cuda."""

    __slots__ = ()
    __array_ufunc__ = None  # NumPy's scalars then leave arithmetic to the methods below
    __hash__ = np.float32.__hash__

    def __new__(cls, x=0):
        """From a number, or from two bytes of memory."""
        if type(x) is np.void:
            return cls.of_bits(int.from_bytes(x.tobytes(), "little"))
        return super().__new__(cls, x if type(x) is cls else rounded(x, cls))

    @classmethod
    def of_bits(cls, bits):
        return super().__new__(cls, np.uint32(bits << 16).view(np.float32))

    @property
    def bits(self):
        return int(np.float32(self).view(np.uint32)) >> 16

    __neg__ = lambda self: BFloat16(-np.float32(self))  # type: ignore[return-value]
    __pos__ = lambda self: self
    __abs__ = lambda self: abs(np.float32(self))  # type: ignore[assignment, return-value]


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _keeps = _name in ("add", "sub", "mul", "truediv")
    _methods = _operation(getattr(operator, _name), _keeps)
    setattr(BFloat16, f"__{_name}__", _methods[0])
    setattr(BFloat16, f"__r{_name}__", _methods[1])
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(BFloat16, f"__{_name}__", _comparison(getattr(operator, _name)))

_FORMATS |= {np.float16: (11, -24, 16), BFloat16: (8, -133, 128)}


def stored(x) -> np.void:
    """Return a BFloat16 as its two bytes."""
    return np.void(BFloat16(x).bits.to_bytes(2, "little"))


# ----------------------------------------------------------------------------- functions
def _fma(a, b, c):
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    return Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)) or a * b + c


def _saturated(f):
    def call(*args):
        y = f(*args)
        if y == y:
            return min(max(0.0, y), 1.0)
        return 0.0

    return call


def _relu(*args):
    y = _fma(*args)
    return y if y != y else max(y, 0.0)


_FUNCTIONS = {
    "hadd": operator.add, "hsub": operator.sub, "hmul": operator.mul, "hdiv": operator.truediv,
    "hfma": _fma, "hneg": operator.neg, "habs": abs,
    "hsin": np.sin, "hcos": np.cos, "hlog": np.log, "hlog10": np.log10, "hlog2": np.log2, "htanh": np.tanh,
    "hexp": np.exp, "hexp10": lambda x: np.power(np.float64(10), x), "hexp2": np.exp2,
    "hfloor": np.floor, "hceil": np.ceil, "hsqrt": np.sqrt, "hrsqrt": lambda x: 1 / np.sqrt(x), "hrcp": lambda x: 1 / x,
    "hrint": np.rint, "htrunc": np.trunc, "hmax": np.fmax, "hmin": np.fmin, "hmax_nan": np.maximum, "hmin_nan": np.minimum,
    "htanh_approx": np.tanh, "hfma_relu": _relu,
}  # fmt: skip
for _name in ("hadd", "hsub", "hmul"):
    _FUNCTIONS[f"{_name}_rn"] = _FUNCTIONS[_name]
for _name in ("hadd", "hsub", "hmul", "hfma"):
    _FUNCTIONS[f"{_name}_sat"] = _saturated(_FUNCTIONS[_name])
_COMPARISONS = {
    "heq": operator.eq, "hne": lambda a, b: a < b or a > b,  # false for NaN
    "hge": operator.ge, "hgt": operator.gt, "hle": operator.le, "hlt": operator.lt,
}  # fmt: skip
_TESTS = _COMPARISONS | {"hisnan": lambda x: x != x}
for _name, _f in _COMPARISONS.items():
    _TESTS[f"{_name}u"] = lambda a, b, f=_f: a != a or b != b or f(a, b)  # true for NaN
NAMES = sorted(_FUNCTIONS | _TESTS)  # of the functions in cuda.fp16
# math.exp and others have a bfloat16 result. The rest of math converts to float32.
_MATH = "trunc ceil floor sqrt log log10 cos sin tanh exp exp2"
MATH_OF_BF16 = {getattr(math, name): "h" + name for name in _MATH.split()}


def _rounds(f, kind):
    def call(*args):
        y = f(*(np.float64(kind(x)) for x in args))
        return kind(rounded(y, kind))

    return carries(call)


def _tests(f, kind):
    return carries(lambda *args: np.bool_(f(*(np.float64(kind(x)) for x in args))))


def of_bf16(name):
    """Return a function of BFloat16 numbers, such as "hexp"."""
    return _rounds(_FUNCTIONS[name], BFloat16)


def _function(name, kind, cast):
    if name in _FUNCTIONS:
        return _rounds(_FUNCTIONS[name], kind)
    if name in _TESTS:
        return _tests(_TESTS[name], kind)
    if name == "hisinf":
        sign = cast(np.dtype(np.int32))
        return carries(lambda x: sign(math.isinf(kind(x)) * (1 if x > 0 else -1)))
    return _conversion(name, kind, cast)


# ----------------------------------------------------------------------------- conversions
_TYPES = {
    "float": np.float32, "double": np.float64, "char": np.int8, "short": np.int16, "int": np.int32, "ll": np.int64,
    "uchar": np.uint8, "ushort": np.uint16, "uint": np.uint32, "ull": np.uint64,
}  # fmt: skip


def _conversion(name, kind, cast):
    """int2bfloat16_rd, half2float, bfloat16_as_short, ...; None for other names."""
    own = "bfloat16"
    if kind is np.float16:
        own = "half"
    if match := re.fullmatch(rf"(\w+)2{own}(_r[nzdu])?", name):
        convert = cast(np.dtype(_TYPES[match[1]]))
        how = _ROUNDINGS[match[2] or ""]
        return carries(lambda x: kind(rounded(convert(x), kind, how)))
    if match := re.fullmatch(rf"{own}2(float|double|u?(?:char|short|int|ll))(_r[nzdu])?", name):
        result = cast(np.dtype(_TYPES[match[1]]))
        how = _WHOLE[match[2] or ""]
        return carries(lambda x: result(how(np.float64(kind(x)))))
    if match := re.fullmatch(rf"{own}_as_(u?short)", name):
        dtype = np.dtype(_TYPES[match[1]])
        return carries(lambda x: cast(dtype)(_bits(kind(x)).view(dtype)))
    if match := re.fullmatch(rf"(u?short)_as_{own}", name):
        return carries(lambda x: _of_bits(int(x) & 0xFFFF, kind))
    return None


_WHOLE = {
    "": lambda x: x, "_rn": np.rint, "_rz": np.trunc, "_rd": np.floor, "_ru": np.ceil,
}  # fmt: skip


def _bits(x):
    if type(x) is BFloat16:
        return np.uint16(x.bits)
    return x.view(np.uint16)


def _of_bits(bits, kind):
    if kind is BFloat16:
        return BFloat16.of_bits(bits)
    return np.uint16(bits).view(np.float16)


# ----------------------------------------------------------------------------- what a kernel names
def table(frontend) -> dict:
    """Function of Numba's own cuda.fp16 -> what the simulator calls in its place."""
    fp16 = getattr(frontend.cuda, "fp16", None)
    names = [name for name in NAMES if hasattr(fp16, name)]
    return {getattr(fp16, name): _function(name, np.float16, None) for name in names}


def named(function, cast):
    """Return what stands for a function of numba-cuda's modules fp16 and bf16, whose names are
    __hadd and so on; None for others."""
    module = str(getattr(function, "__module__", None)).rpartition(".")[2]
    kind = {"cuda_fp16": np.float16, "cuda_bf16": BFloat16}.get(module)
    return kind and _function(function.__name__.strip("_"), kind, cast)
