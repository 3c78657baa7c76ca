"""Device functions with a declared signature: Numba converts their arguments and their result to
the declared types.

@cuda.jit("float32(float32)", device=True)
def tenth(x): return x * 0.1        # computed in float64, and returned as float32
"""

import ast

from . import frontends
from .names import at
from .twins import twin


def device_call(rewriter, node, function):
    """Return the rewritten call of a @cuda.jit function, with the conversions that its signature
    declares."""
    declared = _signature(function)
    if declared is None:
        return rewriter.device_function(node, function.py_func)
    pairs = zip(node.args, declared.args)
    converted = [_converted(rewriter, argument, kind) for argument, kind in pairs]
    node.args[: len(converted)] = converted
    result = rewriter.device_function(node, function.py_func)
    return _converted(rewriter, result, declared.return_type)


def _signature(function):
    """Return the declared signature; None if there is none, or if there are several."""
    overloads = [*getattr(function, "overloads", {}).values()]
    if getattr(function, "_can_compile", True) or len(overloads) != 1:
        return None
    return getattr(overloads[0], "signature", None)


def _converted(rewriter, expression, kind):
    if not frontends.is_number(kind):
        return expression
    return at(
        ast.Call(rewriter.constant(twin(kind), expression, "cast"), [expression], []), expression
    )
