"""The numbers in a simulated kernel: they have the types that Numba gives them on the GPU.

Python's own numbers do not appear in a kernel: NumPy would treat them as "weak" and keep float32 *
0.5 in float32, but Numba computes in float64. Literals, constants and shapes become int64 or
float64.

    int64, float32, float64, bool    NumPy's scalars, whose arithmetic is the same as Numba's
    the other integers               the classes below, because Numba computes in 64 bits: int32 * int32 is int64

Numba's rules for two operands: integers give int64, or uint64 if both are unsigned; float32 stays
float32 with float32, bool, int8, int16 and uint8, and becomes float64 with every other type; `/` of
integers gives float64. tests/simulator/test_simulator_types.py compares these rules with Numba's
type inference.
"""

import contextlib
import functools
import operator
from operator import index as as_int

import numpy as np

from . import errors, frontends, half
from .half import BF16, BFloat16
from .unset import Unset, carried

FLOATS = (np.floating, float)
NUMBERS = (np.generic, bool)


# ----------------------------------------------------------------------------- integers
_NOT_INTEGERS = (np.inexact, float, Unset)


def _float_type(integer, other):
    if isinstance(other, np.complexfloating):
        return np.complex128
    if type(other) is np.float32 and integer.in_float32:
        return np.float32
    return np.float64


_ZERO = np.int64(0)
_NARROW: set = set()  # the classes below of less than 64 bits


def _int64(x):
    """np.int64(x), which takes a microsecond for an instance of a subclass."""
    if type(x) is np.int64:
        return x
    if type(x) in _NARROW:
        return _ZERO + as_int(x)
    return np.int64(x)


def _arithmetic(op):
    if op is operator.truediv:
        wide = np.float64
    else:
        wide = _int64

    def forward(self, other):
        if type(other) is np.int64 and type(self) in _NARROW:
            return op(as_int(self), other)
        if isinstance(other, _NOT_INTEGERS):
            if type(other) is Unset or type(other) is BFloat16:
                return NotImplemented
            return op(_float_type(self, other)(self), other)
        if self.unsigned and getattr(other, "unsigned", False):
            return _unsigned(op(np.uint64(self), np.uint64(other)))
        return op(wide(self), wide(other))

    def backward(self, other):
        if type(other) is np.int64 and type(self) in _NARROW:
            return op(other, as_int(self))
        if isinstance(other, _NOT_INTEGERS):
            return op(other, _float_type(self, other)(self))
        return op(wide(other), wide(self))  # `forward` handles two operands of these classes

    return forward, backward


def _shift(op):
    """Return a shift and its reflected form. The left operand determines the type."""

    def forward(self, other):
        if type(other) is Unset:
            return NotImplemented
        if self.unsigned:
            return UInt64(op(np.uint64(self), np.uint64(other)))
        return op(_int64(self), _int64(other))

    def backward(self, other):
        return op(_int64(other), _int64(self))

    return forward, backward


def _comparison(op):
    def compare(self, other):
        result = op(as_int(self), other)
        if result is True:
            return np.True_
        if result is False:
            return np.False_
        return result

    return compare


def _unary(op):
    """Computed in the operand's own width; the result has 64 bits."""

    def apply(self):
        value = op(self.base(self))
        if self.unsigned:
            return UInt64(value)
        return np.int64(value)

    return apply


def _unsigned(x):
    if type(x) is np.uint64:
        return UInt64(x)
    return x


def _integer_methods():
    methods = {
        "__slots__": (),
        "__array_ufunc__": None,  # NumPy's scalars then leave mixed arithmetic to these methods
        "__hash__": lambda self: hash(int(self)),
        # abs of the smallest value is the value itself
        "__abs__": lambda self: type(self)(abs(self.base(self))),
    }
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
        op = getattr(operator, name + "_" * (name in ("and", "or")))
        methods[f"__{name}__"], methods[f"__r{name}__"] = _arithmetic(op)
    for name in ("lshift", "rshift"):
        methods[f"__{name}__"], methods[f"__r{name}__"] = _shift(getattr(operator, name))
    for name in ("lt", "le", "eq", "ne", "gt", "ge"):
        methods[f"__{name}__"] = _comparison(getattr(operator, name))
    for name in ("neg", "pos", "invert"):
        methods[f"__{name}__"] = _unary(getattr(operator, name))
    return methods


def _integer(name, base, in_float32=False):
    """Return a subclass of a NumPy integer with Numba's arithmetic. in_float32: Numba converts it
    to float32 next to a float32."""
    unsigned = issubclass(base, np.unsignedinteger)
    more = {"unsigned": unsigned, "in_float32": in_float32, "base": base, "__module__": __name__}
    return type(name, (base,), _integer_methods() | more)  # NumPy allows no second base class


Int8 = _integer("Int8", np.int8, in_float32=True)
Int16 = _integer("Int16", np.int16, in_float32=True)
Int32 = _integer("Int32", np.int32)
UInt8 = _integer("UInt8", np.uint8, in_float32=True)
UInt16 = _integer("UInt16", np.uint16)
UInt32 = _integer("UInt32", np.uint32)
UInt64 = _integer("UInt64", np.uint64)
_NARROW.update((Int8, Int16, Int32, UInt8, UInt16, UInt32))

# The class of a value loaded from memory of this dtype, or made by a cast to it.
_SCALARS = {
    np.dtype(np.bool_): np.bool_,
    np.dtype(np.int8): Int8,
    np.dtype(np.int16): Int16,
    np.dtype(np.int32): Int32,
    np.dtype(np.int64): np.int64,
    np.dtype(np.uint8): UInt8,
    np.dtype(np.uint16): UInt16,
    np.dtype(np.uint32): UInt32,
    np.dtype(np.uint64): UInt64,
    BF16: BFloat16,
}


_INTEGERS = (Int8, Int16, Int32, UInt8, UInt16, UInt32, UInt64)


@functools.cache  # NumPy composes the name of a dtype each time that it is asked
def dtype_of(kind) -> np.dtype:
    """Return the dtype of a Numba type, a NumPy scalar class or a cast of this module."""
    if frontends.is_type(kind):
        if kind.name.endswith("bfloat16"):  # numba-cuda's, which NumPy does not know
            return BF16
        return frontends.of(kind).as_dtype(kind)
    dtype = np.dtype(kind if isinstance(kind, type) else getattr(kind, "dtype", kind))
    if dtype.name == "bfloat16":
        return BF16
    return dtype


def scalar_type(dtype) -> type:
    """Return the class of the values of a dtype."""
    dtype = dtype_of(dtype)
    return _SCALARS.get(dtype, dtype.type)


@functools.cache
def cast(dtype: np.dtype):
    """float32(x), int32(x) ... as a kernel calls them: integers wrap around, floats are rounded or
    truncated.

    The function's attributes `scalar` and `dtype` are the class and the dtype of its results.
    """
    scalar = scalar_type(dtype)
    if dtype.kind in "iu":
        convert = _to_integer(scalar)
    else:

        def convert(x):
            if type(x) is scalar:
                return x
            try:
                if type(x) is not Unset:
                    return scalar(x)
                return carried(scalar, x)
            except TypeError:
                return carried(scalar, x)

    vars(convert).update(scalar=scalar, dtype=dtype)
    return convert


def _report(kind, text):
    """Report a KernelError of arithmetic in the thread that runs."""
    here = errors.caller()
    if here is not None:
        thread, site = here
        make = functools.partial(errors.numeric, thread, site, kind, text)
        thread.block.launch.report(kind, (site,), make)


watched: list = []  # the kinds reported in running launches whose check costs time


@contextlib.contextmanager
def watching(reported):
    """Check for overflow of integers in this context if it is one of the kinds to report."""
    kinds = {"integer_overflow", "int16_overflow"} & reported
    watched.extend(kinds)
    try:
        yield
    finally:
        for kind in kinds:
            watched.remove(kind)


def _report_overflow(x, size):
    """Report a number that does not fit a signed type: once, if both kinds are reported."""
    here = errors.caller()
    kind = "integer_overflow"
    if here is None or kind not in here[0].block.launch.reported:
        kind = "int16_overflow"
        if size != "int16" or 0 <= x < 2**16:  # 16 bits may be meant as they are
            return
    _report(kind, f"{x} converted to {size}, which it does not fit,")


def _to_integer(scalar):
    """Return a conversion to an integer type as a GPU does it, which reports floats that do not
    fit."""
    least, most = np.iinfo(scalar).min, np.iinfo(scalar).max
    signed = least < 0
    size = f"{'' if signed else 'u'}int{8 * np.dtype(scalar).itemsize}"

    def convert(x):
        if type(x) is scalar:
            return x
        if isinstance(x, FLOATS):
            if least <= x <= most:
                return scalar(int(x))
            if x != x:
                _report("float_to_integer", f"NaN converted to {size}")
                return scalar(0)
            if least - 1 < x < most + 1:  # its fraction is dropped
                return scalar(int(x))
            _report("float_to_integer", f"{x} converted to {size}, which it does not fit,")
            return scalar(least if x < 0 else most)
        if type(x) is Unset:
            return Unset(scalar(0) if isinstance(x.value, FLOATS) else scalar(x.value), x.read)
        try:
            y = scalar(x)
        except OverflowError:  # a large Python integer wraps around
            return scalar(np.uint64(x & 2**64 - 1))
        if signed and watched and y != x:
            _report_overflow(x, size)
        return y

    return convert


def storing(dtype: np.dtype):
    """Return what converts a value before it is stored to an array of this dtype; None if NumPy
    does. The result is a NumPy scalar."""
    if dtype.kind == "b":
        return _to_bool
    if dtype == BF16:
        return _to_bf16
    if dtype.kind not in "iu":
        return None
    kind = dtype.type
    convert = cast(dtype)
    kinds = {"integer_overflow"} if dtype.kind == "i" else set()
    if dtype == np.int16:
        kinds.add("int16_overflow")

    def store(x):
        if isinstance(x, FLOATS) or (watched and not kinds.isdisjoint(watched)):
            return kind(plain_value(convert(x)))
        return kind(x)

    return store


def plain_value(x):
    """x, or a TypeError for an Unset, which the caller handles."""
    if type(x) is Unset:
        raise TypeError("unset")
    return x


def _to_bool(x):
    return np.bool_(plain_value(x))


def _to_bf16(x):
    return half.stored(plain_value(x))


def typed(value):
    """Return a constant or a kernel argument with the type Numba infers for it; other objects
    unchanged."""
    if isinstance(value, (bool, np.bool_)):
        return np.bool_(value)
    if isinstance(value, np.generic):
        return scalar_type(value.dtype)(value)
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return np.int64(value)
        return UInt64(value)
    if isinstance(value, float):
        return np.float64(value)
    if isinstance(value, tuple):
        values = map(typed, value)
        if hasattr(value, "_fields"):
            return type(value)(*values)
        return tuple(values)
    return value


@functools.cache
def unify(a: type, b: type) -> type:
    """Return the common type of min, of max, or of the two sides of a conditional."""
    return scalar_type(np.result_type(a, b))


def promote(x, like):
    """x as one side of a conditional whose other side has the type of `like`. Arrays and tuples are
    unchanged."""
    if type(x) is type(like) or not (isinstance(x, NUMBERS) and isinstance(like, NUMBERS)):
        return x
    kinds: tuple[type, type] = type(x), type(like)
    return unify(*kinds)(x)


_BOOL = np.bool_


def number(x):
    """x as an operand of + - * / // % << >>: a bool becomes the Int8 0 or 1, next to which float32
    stays float32."""
    if type(x) is _BOOL or type(x) is bool:
        return Int8(x)
    return x


def promote_if_known(x, like):
    """promote(x, like()), or x if like() raises: the other side of the conditional may have no
    value (an unset name, 2 ** -1)."""
    try:
        return promote(x, like())
    except Exception:
        return x
