"""Translations of the simulator that tests share.

The simulator translates a kernel and its device functions once for each function object. Tests make the same functions again
and again, with the same constants: for a planted bug, for a shape. The translation depends on the code and on the values of
the names in it, so functions that agree in both share one. A changed function, and each one that calls it, gets its own.
"""

import types
from numbers import Number

import numpy as np

from xtrain.simulator import signatures, source
from xtrain.simulator.intrinsics import INTRINSICS

MOST = 4000
_shared: dict[tuple, source.Translated] = {}
_translate = source._translate


class _Unknown(Exception):
    """A value that may change."""


def share() -> None:
    """Let all kernels of this process share translations."""
    source._translate = _shared_translation


def _shared_translation(function, pauses):
    try:
        key = pauses, *_key(function, pauses)
        found = _shared.get(key)
    except (_Unknown, TypeError):  # TypeError: a value that has no hash
        return _translate(function, pauses)
    if found is None:
        if len(_shared) >= MOST:
            _shared.clear()
        found = _shared[key] = _translate(function, pauses)
    return found


def _key(function, pauses):
    code = function.__code__
    names = set(_names(code))
    values = {n: function.__globals__[n] for n in names if n in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        values[name] = cell.cell_contents
    given = {"": function.__defaults__, **(function.__kwdefaults__ or {})}
    known = [
        tuple((n, _fingerprint(value, names, pauses)) for n, value in sorted(part.items()))
        for part in (values, given)
    ]
    return code.co_filename, function.__module__, code, *known


def _names(code):
    """The names of globals and attributes in a code object and in the functions that it makes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _fingerprint(value, names, pauses):
    """What a translation sees of a value: equal for values that it cannot tell apart."""
    home = getattr(value, "__module__", None) or getattr(value, "__name__", None) or ""
    if home.startswith("numba") or (home and value in INTRINSICS):
        return value
    if hasattr(value, "py_func"):
        if signatures._signature(value) is not None:
            return value
        translated = source.translate(value.py_func, pauses)
        if translated is None:  # recursion
            raise _Unknown
        return translated.function
    if isinstance(value, types.ModuleType):
        found = {n: getattr(value, n) for n in names if hasattr(value, n)}
        inside = ((n, x) for n, x in sorted(found.items()) if x is not value)
        return value, tuple((n, _fingerprint(x, names, pauses)) for n, x in inside)
    if isinstance(value, tuple):
        return type(value), tuple(_fingerprint(x, names, pauses) for x in value)
    if isinstance(value, (Number, np.generic)):
        return type(value), repr(value)
    return type(value), value
