"""What users of xtrain's Python interface call."""

import inspect

from xtrain.nn import functional as F
from xtrain.nn.autograd import Function

# the Functions of values that exist, of ops whose result may be computed later
DEFERRED = {"linear": F.Linear, "swiglu": F.SwiGLU, "geglu": F.SwiGLU, "logits": F.Linear}


def public_ops():
    """Return {name: (function, the Function that it applies)} of nn/functional.py."""
    ops = {}
    for name, function in vars(F).items():
        if not inspect.isfunction(function) or function.__module__ != F.__name__:
            continue
        used = [vars(F).get(other) for other in function.__code__.co_names]
        functions = [x for x in used if is_op(x)]
        ops[name] = function, DEFERRED.get(name) or functions[0]
    return ops


def is_op(x):
    return isinstance(x, type) and issubclass(x, Function) and x is not Function
