"""What replaces a function or a type in a simulated kernel: TWINS, with the arithmetic of
scalars.py."""

import builtins
import functools
import math
import operator

import numpy as np

from . import frontends, half, libdevice, vectors
from .half import BFloat16
from .scalars import (
    _INTEGERS,
    FLOATS,
    Int8,
    Int16,
    Int32,
    UInt64,
    _report,
    cast,
    dtype_of,
    number,
    typed,
    unify,
)
from .unset import Unset, carried, carries


# ----------------------------------------------------------------------------- builtins
def _select(better):
    """min or max. A number is preferred to NaN, as in the GPU's fminf and fmaxf."""

    def of_two(a, b):
        if type(a) is Unset or type(b) is Unset:
            raise TypeError
        if better(b, a) or a != a:
            chosen = b
        else:
            chosen = a
        kinds: tuple[type, type] = type(a), type(b)
        if kinds[0] is kinds[1]:
            return chosen
        return unify(*kinds)(chosen)

    def select(*args):
        args = args if len(args) > 1 else args[0]
        try:
            return functools.reduce(of_two, args)
        except TypeError:
            return carried(select, *args)

    return select


def power(a, b):
    """a ** b; float32 to an integer power stays float32."""
    if type(a) is BFloat16:
        a = np.float32(a)
    else:
        a = number(a)
    if type(a) is np.float32 and isinstance(b, np.integer):
        b = int(b)
    return a**b


def _range(*args):
    if {*map(type, args)} == _INT64:
        kind = np.int64
    elif all(isinstance(a, (Int8, Int16, Int32)) for a in args):
        kind = Int32
    else:
        if any(getattr(a, "unsigned", False) for a in args):
            kind = UInt64
        else:
            kind = np.int64
    try:
        numbers = range(*map(int, args))
    except TypeError:
        if Unset not in {*map(type, args)}:
            raise
        return _range(*(a.use("a loop's range") if type(a) is Unset else a for a in args))
    if numbers.step > 0 and numbers.start >= 0 and numbers.stop <= SMALL:
        return _SMALL[kind][numbers.start : max(numbers.stop, 0) : numbers.step]
    return map(kind, numbers)


_INT64 = {np.int64}
SMALL = 1024
_SMALL = {kind: [*map(kind, range(SMALL))] for kind in (np.int64, Int32, UInt64)}  # made once


def _int(x):
    if isinstance(x, np.integer):
        return x
    return cast(np.dtype(np.int64))(x)


@carries
def _float(x):
    if isinstance(x, np.floating):
        return x
    return np.float64(x)


def _isinstance(x, kinds):
    """isinstance with the types of Python, NumPy and Numba; in a kernel, int and float are
    functions."""
    if isinstance(kinds, tuple):
        return any(_isinstance(x, kind) for kind in kinds)
    x = x.value if type(x) is Unset else x
    if hasattr(kinds, "scalar"):
        return type(x) is kinds.scalar
    return isinstance(x, {_int: np.integer, _float: np.floating}.get(kinds, kinds))


def floor_divide(a, b):
    """a // b, which reports a division of integers by zero; the result is then -1, all bits set."""
    if type(b) is Unset or b or isinstance(a, FLOATS) or isinstance(b, FLOATS):
        return a // b
    _report("division_by_zero", f"integer division by zero, {a} // 0,")
    return ~(a // type(b)(1) * 0)


def modulo(a, b):
    """a % b, which reports integers divided by zero."""
    if type(b) is Unset or b or isinstance(a, FLOATS) or isinstance(b, FLOATS):
        return a % b
    _report("division_by_zero", f"integer division by zero, {a} % 0,")
    return a % type(b)(1)


def _shifted(op, sign):
    def shift(a, b):
        if type(b) is not Unset and not 0 <= b < 64:
            _report("shift", f"shift beyond the width, {a} {sign} {b},")
        return op(a, b)

    return shift


shift_left = _shifted(operator.lshift, "<<")
shift_right = _shifted(operator.rshift, ">>")


@carries
def _round(x, digits=None):
    if digits is None:
        return np.int64(np.rint(float(x)))
    return type(x)(round(float(x), int(digits)))


# ----------------------------------------------------------------------------- math, libdevice
_NUMPY_NAMES = {"pow": "power", "fabs": "abs"} | {
    "a" + f: "arc" + f for f in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "tan2")
}


def _float_of(args):
    """float32 if there is a float32 and Numba would convert the other arguments to it, else
    float64."""
    kinds = {np.float32 if type(a) is BFloat16 else type(a) for a in args}
    if kinds == {np.float32}:
        return np.float32
    small = all(k in (np.float32, np.bool_) or getattr(k, "in_float32", False) for k in kinds)
    if small and np.float32 in kinds:
        return np.float32
    return np.float64


def _float_function(name, f):
    """Return f computed in float64 and rounded to the type that Numba gives the result."""
    fallback = getattr(np, _NUMPY_NAMES.get(name, name), lambda *args: math.nan)

    def call(*args):
        try:
            y = f(*args)
        except TypeError:
            return carried(call, *args)
        except (ValueError, OverflowError, ZeroDivisionError):  # a GPU returns NaN or infinity
            y = fallback(*map(np.float64, args))
        return _float_of(args)(y)

    return call


_FUNCTIONS = (
    "exp exp2 expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh "
    "acosh atanh erf erfc gamma lgamma fabs floor ceil pow atan2 copysign fmod remainder hypot "
    "degrees radians"
)

# A function that a kernel calls -> the function that the simulator calls in its place.
TWINS: dict = {
    builtins.min: _select(operator.lt),
    builtins.max: _select(operator.gt),
    builtins.pow: power,
    builtins.divmod: lambda a, b: (a // b, a % b),
    builtins.range: _range,
    builtins.len: lambda x: np.int64(len(x)),
    builtins.int: _int,
    builtins.isinstance: _isinstance,
    builtins.float: _float,
    builtins.complex: carries(lambda *args: np.complex128(complex(*args))),
    builtins.bool: np.bool_,
    builtins.round: _round,
    builtins.enumerate: lambda x, first=0: ((np.int64(i), v) for i, v in enumerate(x, int(first))),
    math.ldexp: carries(lambda x, n: np.ldexp(half.wide(x), int(n))),
    math.isnan: carries(lambda x: np.bool_(math.isnan(x))),
    math.isinf: carries(lambda x: np.bool_(math.isinf(x))),
    math.isfinite: carries(lambda x: np.bool_(math.isfinite(x))),
}
TWINS |= {
    getattr(math, name): _float_function(name, getattr(math, name)) for name in _FUNCTIONS.split()
}
TWINS[np.sum] = lambda a: a.sum()
# Numba returns a float.
TWINS[math.trunc] = _float_function("trunc", lambda x: np.trunc(np.float64(x)))


def _with_bf16(f, of_bf16):
    return lambda *args: of_bf16(*args) if type(args[0]) is BFloat16 else f(*args)


for _f, _name in half.MATH_OF_BF16.items():
    TWINS[_f] = _with_bf16(TWINS[_f], half.of_bf16(_name))
_learned: set[str] = set()


def learn():
    """Add the functions of the packages that the program has imported to TWINS."""
    for frontend in frontends.known():
        if frontend.package not in _learned:
            _learned.add(frontend.package)
            TWINS.update(half.table(frontend))
            TWINS.update(vectors.table(frontend, cast))
            TWINS.update(libdevice.table(frontend, cast))


@functools.cache
def _ufunc(f):
    """Return a NumPy function of numbers. The integers of this module are NumPy's while it
    computes."""

    def call(*args):
        args = [x.base(x) if isinstance(x, _INTEGERS) else half.wide(x) for x in args]
        return typed(f(*args))

    return carries(call)


def twin(obj):
    """Return what replaces obj in a simulated kernel; obj itself if it needs no replacement."""
    if frontends.is_type(obj) or (isinstance(obj, type) and issubclass(obj, np.generic)):
        return TWINS.get(obj) or cast(dtype_of(obj))
    if isinstance(obj, np.ufunc):
        return _ufunc(obj)
    try:
        if obj in TWINS:
            return TWINS[obj]
        return half.named(obj, cast) or typed(obj)
    except TypeError:  # not hashable
        return obj
