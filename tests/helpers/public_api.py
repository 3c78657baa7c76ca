"""What users of xtrain's Python interface call."""

import inspect

from xtrain.nn import functional as F
from xtrain.nn.autograd import Function


def public_ops():
    """-> {name: (function, the Function that it applies)} of nn/functional.py"""
    functions = [f for f in vars(F).values() if inspect.isfunction(f)]
    names = {f: [vars(F).get(name) for name in f.__code__.co_names] for f in functions}
    classes = {f: [c for c in found if is_op(c)] for f, found in names.items()}
    return {f.__name__: (f, found[0]) for f, found in classes.items() if found}


def is_op(x):
    return isinstance(x, type) and issubclass(x, Function) and x is not Function
