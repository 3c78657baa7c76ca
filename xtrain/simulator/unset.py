"""Values that depend on memory that was never written.

As in Valgrind's memcheck, such a value may be copied and computed with: kernels load elements that
they do not use, for instance threads past the end of a tile. It is reported when it matters: when
it reaches a store to global memory, an atomic, a branch, an index, a warp function or an intrinsic.
"""

import operator

from . import errors


class Unset:
    """A number that depends on memory that was never written. value: a number of the right type;
    read: the read that made it, the first arguments of errors.uninitialized.
    """

    __slots__ = ("read", "value")
    __array_ufunc__ = None  # NumPy's scalars then leave arithmetic to the methods below
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value, read):
        self.value, self.read = value, read

    def __bool__(self):
        return bool(self.use("a branch"))

    def use(self, what, site=None):
        """Report that the value reaches `what`, and return the number."""
        here = errors.caller()
        if here:
            thread = here[0]
        else:
            thread = self.read[0]
        place = site or (here[1] if here else self.read[3])
        if self.read[1].kind == "global":
            kind = "unwritten_global"
        else:
            kind = "uninitialized"
        thread.block.launch.report(
            kind,
            (self.read[3], place),
            lambda: errors.uninitialized(*self.read, use=(what, place)),
        )
        return self.value

    real = property(lambda self: Unset(self.value.real, self.read))
    imag = property(lambda self: Unset(self.value.imag, self.read))


def plain(x, what, site=None):
    """x itself, or the number in an Unset, which is reported."""
    if type(x) is Unset:
        return x.use(what, site)
    return x


def _value(x):
    return x.value if type(x) is Unset else x


def carried(function, *args):
    """function(*args) as an Unset if one of the arguments is one; otherwise raises the TypeError
    that is being handled."""
    for x in args:
        if type(x) is Unset:
            return Unset(function(*map(_value, args)), x.read)
    raise


def carries(function):
    """Decorator: the result of an Unset argument is Unset."""

    def call(*args):
        try:
            return function(*args)
        except TypeError:
            return carried(function, *args)

    return call


def _binary(op):
    def forward(self, other):
        return Unset(op(self.value, _value(other)), self.read)

    def backward(self, other):
        return Unset(op(other, self.value), self.read)

    return forward, backward


def _unary(op):
    return lambda self: Unset(op(self.value), self.read)


for _name in [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
]:
    _op = getattr(operator, _name + "_" * (_name in ("and", "or")))
    _methods = _binary(_op)
    setattr(Unset, f"__{_name}__", _methods[0])
    setattr(Unset, f"__r{_name}__", _methods[1])
for _name in ["lt", "le", "eq", "ne", "gt", "ge"]:
    setattr(Unset, f"__{_name}__", _binary(getattr(operator, _name))[0])
for _name in ["neg", "pos", "invert", "abs"]:
    setattr(Unset, f"__{_name}__", _unary(getattr(operator, _name)))
