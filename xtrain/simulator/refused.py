"""Rejects kernels that Python can run but Numba cannot compile.

Only what both numba and numba-cuda reject is rejected here;
tests/simulator/test_simulator_refused.py compares with them.
"""

import ast
import builtins
import enum
import math
import types

import numpy as np

from . import frontends
from .errors import KernelError
from .names import DYNAMIC, assignments, parameters

LISTS = "a list does not compile: use cuda.local.array(n, float32) for a few numbers"
CASES = "a case with a pattern does not compile: use a number or a name"
SYNTAX = {
    ast.ListComp: LISTS,
    ast.GeneratorExp: "a generator expression does not compile: write a loop",
    ast.SetComp: "a set does not compile",
    ast.Set: "a set does not compile",
    ast.DictComp: "a dict does not compile",
    ast.Dict: "a dict does not compile",
    ast.Try: "try does not compile: a GPU cannot catch exceptions",
    ast.With: "with does not compile",
    ast.JoinedStr: "an f-string does not compile",
    ast.ClassDef: "a class does not compile",
    ast.Delete: "del does not compile",
    ast.Global: "a kernel cannot assign to a global: globals are constants when Numba compiles",
    ast.Nonlocal: "a kernel cannot assign to a variable of the enclosing function",
    ast.Import: "an import does not compile: write it at the top of the file",
    ast.MatchSequence: CASES,
    ast.MatchMapping: CASES,
    ast.MatchClass: CASES,
    ast.ImportFrom: "an import does not compile: write it at the top of the file",
}
# NumPy's functions of numbers that Numba does not have on a GPU. Some of those that it has compute
# in float64.
_NUMPY = """
abs absolute add array cbrt ceil clip copysign divmod dot empty exp exp2 expm1 fabs float_power
floor floor_divide fmod full isfinite isinf ldexp log1p logaddexp max min mod multiply negative ones
pow power reciprocal remainder rint sign signbit sqrt square subtract trunc where zeros
"""
_BUILTINS = (
    "all any bin callable chr dict getattr hash hex id list map repr reversed set sorted str"
)
# math.nextafter and math.exp2 are in numba-cuda
_MATH = "cbrt comb dist factorial fsum gcd isclose isqrt lcm perm prod ulp"
_UNKNOWN = {id(getattr(builtins, name)) for name in _BUILTINS.split()}
_UNKNOWN |= {id(getattr(math, name)) for name in _MATH.split() if hasattr(math, name)}
_ARRAYS = ("shared_array", "local_array")


def check(rewriter, definition):
    """Raise KernelError for what Numba does not compile.

    Returns None, or the KernelError to raise if the function is launched as a kernel: it is valid
    as a device function only.
    """
    sizes = _Sizes(rewriter, definition)
    device_only = None
    inner: set[ast.AST] = set()
    for outer in _functions(definition):
        inner.update(n for n in ast.walk(outer) if n is not outer)
    for node in (n for statement in definition.body for n in ast.walk(statement)):
        if isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Store):
            raise rewriter.error(node, "a, *b = ... does not compile: name each element")
        if isinstance(node, ast.NamedExpr) and not isinstance(node.value, ast.Name):
            text = f"{ast.unparse(node)} does not compile: assign in a line of its own"
            raise rewriter.error(node, text)
        if type(node) in SYNTAX:
            raise rewriter.error(node, SYNTAX[type(node)])
        if isinstance(node, (ast.Assign, ast.Subscript)) and isinstance(node.value, ast.List):
            raise rewriter.error(node, LISTS)
        if node in inner:  # in a nested function, which has its own names
            continue
        if isinstance(node, ast.Call) and _is_array_function(rewriter, node):
            inner.add(node.func)
        if isinstance(node, ast.Attribute):
            _check_attribute(rewriter, node)
        if isinstance(node, ast.Name) and id(rewriter.static(node)) in _UNKNOWN:
            raise rewriter.error(node, f"Numba has no {node.id} on a GPU")
        if isinstance(node, ast.Return) and not _nothing(node.value):
            text = "a kernel cannot return a value: write the result to an array"
            device_only = device_only or rewriter.error(node, text)
        if isinstance(node, ast.Call) and rewriter.cuda_name(node.func) in _ARRAYS:
            device_only = device_only or sizes.check(node)
    return device_only


def _is_array_function(rewriter, call):
    """np.sin(x, out), which Numba has for some functions of arrays."""
    function = rewriter.static(call.func)
    if not isinstance(function, np.ufunc) or len(call.args) != function.nin + 1:
        return False
    return any(f.writes_to_array(function) for f in frontends.known())


def _functions(definition):
    nested = (ast.FunctionDef, ast.Lambda)
    return [n for n in ast.walk(definition) if isinstance(n, nested) and n is not definition]


def _nothing(value):
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _check_attribute(rewriter, node):
    owner = rewriter.static(node.value)
    text = ast.unparse(node)
    if owner is math and id(rewriter.static(node)) in _UNKNOWN:
        raise rewriter.error(node, f"Numba has no {text} on a GPU")
    if owner is DYNAMIC and node.attr == "astype":
        raise rewriter.error(node, f"{text} does not compile: convert a number by float32(...)")
    if owner is np and node.attr in _NUMPY.split():
        hint = ""
        if node.attr in ("abs", "absolute"):
            hint = ": write abs"
        elif hasattr(math, node.attr):
            hint = f": write math.{node.attr}"
        raise rewriter.error(node, f"Numba has no {text} on a GPU{hint}")
    if isinstance(owner, (types.ModuleType, tuple, enum.Enum, enum.EnumMeta)):
        return
    if isinstance(owner, type):
        kind = owner
    else:
        kind = type(owner)
    roots = (*frontends.PACKAGES, frontends.OWN, "numpy", "builtins", "ml_dtypes")
    if kind.__module__.partition(".")[0] not in roots:
        name = ast.unparse(node.value)
        raise rewriter.error(
            node,
            f"Numba cannot read attributes of {name}, a Python object ({kind.__name__}): assign "
            f"{text} to a name outside the kernel",
        )


class _Sizes:
    """Is the shape of a shared or local array a compile-time constant for Numba? TILE is, TILE + 1
    is not."""

    def __init__(self, rewriter, definition):
        self.rewriter = rewriter
        self.parameters = parameters(definition)
        self.values = assignments(definition)

    def check(self, call):
        """Raise KernelError if the shape is not a constant.

        Returns None, or the KernelError to raise if the function is launched as a kernel: the shape
        depends on a parameter, which is constant only if a kernel calls the function with a
        constant.
        """
        shapes = [k.value for k in call.keywords if k.arg == "shape"] + call.args[:1]
        given: set[str] = set()
        if all(self.known(shape, given) for shape in shapes):
            if given:
                return self._error(call, given.pop())
            return None
        raise self._error(call, ast.unparse(shapes[0]))

    def _error(self, call, what) -> KernelError:
        text = (
            f"the shape of {ast.unparse(call.func)} must be a compile-time constant, and {what} is "
            "not"
        )
        hint = "a literal, or a name defined outside the kernel, such as TILE1 = TILE + 1"
        return self.rewriter.error(call, f"{text}: use {hint}")

    def known(self, node, given, looking=()):
        """Is the expression a compile-time constant? Adds the parameters that it depends on to
        `given`.

        looking: local names whose assignments are being checked.
        """
        if isinstance(node, ast.Constant):
            return type(node.value) is int
        if isinstance(node, ast.Tuple):
            return all(self.known(e, given, looking) for e in node.elts)
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):  # Python folds expressions of literals
            leaves = (ast.Name, ast.Attribute, ast.Call)
            literal = not any(isinstance(n, leaves) for n in ast.walk(node))
            return literal and isinstance(_folded(node), (int, tuple))
        if isinstance(node, ast.IfExp):
            return all(self.known(side, given, looking) for side in (node.body, node.orelse))
        if isinstance(node, ast.Attribute):
            return node.attr == "ndim"
        if isinstance(node, ast.Subscript):
            constant = not any(isinstance(n, ast.Name) for n in ast.walk(node.slice))
            return isinstance(self.rewriter.static(node.value), tuple) and constant
        if isinstance(node, ast.Call):  # of a nested function, which Numba inlines
            return isinstance(node.func, ast.Name) and node.func.id in self.rewriter.locals
        return isinstance(node, ast.Name) and self._known_name(node, given, looking)

    def _known_name(self, node, given, looking):
        name = node.id
        if name not in self.rewriter.locals:
            return isinstance(self.rewriter.static(node), (int, np.integer, tuple))
        if name in looking:
            return True
        values = self.values.get(name, ())
        if name in self.parameters and not values:
            given.add(name)
            return True
        return all(self.known(v, given, (*looking, name)) for v in values)


def _folded(node):
    try:
        return eval(compile(ast.Expression(node), "", "eval"), {})
    except Exception:
        return None
