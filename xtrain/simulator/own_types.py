"""Types of numbers, arrays and signatures, as `numba.types` has them: for kernels that run without
Numba (own_cuda.py).

    float32(x)               the number as NumPy's float32
    float32[:], [:, ::1]     an array type: of any layout, contiguous in C order
    void(float32[:], int32)  a signature; the text "void(float32[:], int32)" means the same
"""

from typing import NamedTuple

import numpy as np

HOME = "numba_simulated"  # what the modules of these classes are called (frontends.py)


class Type:
    """A type. Two are equal if their names are."""

    __module__ = f"{HOME}.types"

    def __init__(self, name: str):
        self.name = name

    def __repr__(self):
        return self.name

    def __eq__(self, other):
        return type(self) is type(other) and self.name == other.name

    def __hash__(self):
        return hash(self.name)

    def __call__(self, *args):
        """With types: the signature of a function that returns this type."""
        return Signature(self, args)

    def __getitem__(self, axes) -> "Array":
        if not isinstance(axes, tuple):
            axes = (axes,)
        if not axes or not all(isinstance(axis, slice) for axis in axes):
            raise KeyError(f"{axes} is not the shape of an array type: write {self}[:, :]")
        layout = "A"
        if axes[0].step == 1:
            layout = "F"
        if axes[-1].step == 1:
            layout = "C"
        return Array(self, len(axes), layout)


class Signature(NamedTuple):
    """What a function returns and takes."""

    return_type: Type | None
    args: tuple

    def __str__(self):
        return f"({', '.join(map(str, self.args))}) -> {self.return_type}"


class Number(Type):
    """The type of a NumPy number."""

    __module__ = f"{HOME}.types"

    def __init__(self, name: str):
        super().__init__(name)
        self.dtype = np.dtype(name)
        self.bitwidth = 8 * self.dtype.itemsize

    def __call__(self, *args):
        if len(args) == 1 and not isinstance(args[0], Type):
            return self.dtype.type(args[0])
        return Signature(self, args)


class Integer(Number):
    __module__ = f"{HOME}.types"

    signed = property(lambda self: self.dtype.kind == "i")


class Float(Number):
    __module__ = f"{HOME}.types"


class Complex(Number):
    __module__ = f"{HOME}.types"


class Boolean(Type):
    __module__ = f"{HOME}.types"

    dtype = np.dtype(np.bool_)
    bitwidth = 1

    def __call__(self, *args):
        if len(args) == 1 and not isinstance(args[0], Type):
            return bool(args[0])
        return Signature(self, args)


class Record(Type):
    """The type of an element of a structured array."""

    __module__ = f"{HOME}.types"

    def __init__(self, dtype: np.dtype):
        super().__init__(f"Record({dtype})")
        self.dtype = dtype


class Array(Type):
    """An array type. layout: "C", "F", or "A" for any."""

    __module__ = f"{HOME}.types"

    def __init__(self, dtype: Type, ndim: int, layout: str, readonly: bool = False):
        super().__init__(f"array({dtype}, {ndim}d, {layout})")
        self.dtype = dtype
        self.ndim = ndim
        self.layout = layout


class Tuple(Type):
    """A tuple of values of these types."""

    __module__ = f"{HOME}.types"

    def __init__(self, types):
        self.types = tuple(types)
        super().__init__(f"Tuple({', '.join(map(str, self.types))})")


def UniTuple(dtype: Type, count: int) -> Tuple:
    """Return a tuple of `count` values of one type."""
    return Tuple([dtype] * count)


void = none = Type("none")
boolean = bool_ = b1 = Boolean("bool")
int8 = i1 = Integer("int8")
int16 = i2 = Integer("int16")
int32 = i4 = intc = Integer("int32")
int64 = i8 = intp = int_ = Integer("int64")
uint8 = u1 = Integer("uint8")
uint16 = u2 = Integer("uint16")
uint32 = u4 = uintc = Integer("uint32")
uint64 = u8 = uintp = uint = Integer("uint64")
float16 = f2 = Float("float16")
float32 = f4 = Float("float32")
float64 = f8 = double = float_ = Float("float64")
complex64 = c8 = Complex("complex64")
complex128 = c16 = Complex("complex128")

NAMED: dict[str, Type] = {n: t for n, t in globals().items() if isinstance(t, Type)}


def from_dtype(dtype) -> Type:
    """Return the type of the elements of an array."""
    dtype = np.dtype(dtype)
    if dtype.names is not None:
        return Record(dtype)
    if dtype.kind == "b":
        return boolean
    if dtype.name not in NAMED:
        raise NotImplementedError(f"{dtype} is not a type of numbers that a kernel can use")
    return NAMED[dtype.name]


def as_dtype(kind: Type) -> np.dtype:
    """Return the NumPy dtype of a type of numbers or records."""
    if isinstance(kind, (Number, Boolean, Record)):
        return kind.dtype
    raise NotImplementedError(f"{kind} cannot be represented as a NumPy dtype")


def typeof(value) -> Type:
    """Return the type of an argument of a kernel."""
    if value is None:
        return none
    if isinstance(value, bool):
        return boolean
    if isinstance(value, int):
        return int64 if value < 2**63 else uint64
    if isinstance(value, float) and not isinstance(value, np.generic):
        return float64
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return complex128
    if isinstance(value, tuple):
        return Tuple(map(typeof, value))
    if isinstance(value, np.generic):
        return from_dtype(value.dtype)
    if isinstance(value, np.ndarray):
        layout = "A"
        if value.flags.f_contiguous:
            layout = "F"
        if value.flags.c_contiguous:
            layout = "C"
        return Array(from_dtype(value.dtype), value.ndim, layout)
    raise ValueError(f"Cannot determine the type of {type(value)}")


def normalize_signature(declared) -> tuple[tuple, Type | None]:
    """Return (types of the arguments, type of the result or None) of a declared signature: a text,
    a Signature or a tuple of types."""
    if isinstance(declared, str):
        scope = {**NAMED, "Array": Array, "Tuple": Tuple, "UniTuple": UniTuple}
        declared = eval(declared, {"__builtins__": {}}, scope)
    if isinstance(declared, Signature):
        args, result = declared.args, declared.return_type
    elif isinstance(declared, Type):
        args, result = (declared,), None
    else:
        args, result = declared, None
    if not isinstance(args, tuple) or not all(isinstance(t, Type) for t in args):
        raise TypeError(f"invalid signature: {declared!r}: write void(float32[:], int32)")
    return args, result


def signature(return_type, *args) -> Signature:
    """Return the signature of a function."""
    return Signature(return_type, args)


# ----------------------------------------------------------------------------- conversions
SAME, PROMOTE, SAFE, UNSAFE = range(4)


def conversion(given: Type, declared: Type) -> int | None:
    """Return how a value of the type `given` becomes one of the type `declared`: SAME to UNSAFE, or
    None if it cannot."""
    if given == declared:
        return SAME
    if isinstance(given, Array) and isinstance(declared, Array):
        alike = (given.dtype, given.ndim) == (declared.dtype, declared.ndim)
        return SAFE if alike and declared.layout == "A" else None
    if isinstance(given, Tuple) and isinstance(declared, Tuple):
        if len(given.types) != len(declared.types):
            return None
        each = [conversion(*pair) for pair in zip(given.types, declared.types)]
        return None if None in each else max(n for n in each if n is not None)
    numbers = (Number, Boolean)
    if not isinstance(given, numbers) or not isinstance(declared, numbers):
        return None
    if isinstance(given, Complex) and not isinstance(declared, Complex):
        return None
    if not np.can_cast(given.dtype, declared.dtype, "safe"):
        return UNSAFE
    if given.dtype.kind == declared.dtype.kind:
        return PROMOTE
    return SAFE


def fitting(declared: list[tuple], given: tuple) -> tuple | None:
    """Return the declared types of arguments that fit those given best; None if there are none, or
    two that fit equally."""
    ranked = []
    for kinds in declared:
        each = [conversion(*pair) for pair in zip(given, kinds, strict=True)]
        if None not in each:
            ranked.append(([each.count(n) for n in (UNSAFE, SAFE, PROMOTE)], kinds))
    ranked.sort(key=lambda pair: pair[0])
    if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
        return None
    return ranked[0][1]
