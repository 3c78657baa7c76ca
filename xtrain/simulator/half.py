"""cuda.fp16: functions of float16 numbers. They compute in float64 and round once."""

import operator

import numpy as np

from .unset import carries

_FUNCTIONS = {
    "hadd": operator.add, "hsub": operator.sub, "hmul": operator.mul, "hdiv": operator.truediv,
    "hfma": lambda a, b, c: a * b + c, "hneg": operator.neg, "habs": abs,
    "hsin": np.sin, "hcos": np.cos, "hlog": np.log, "hlog10": np.log10, "hlog2": np.log2,
    "hexp": np.exp, "hexp10": lambda x: np.power(np.float64(10), x), "hexp2": np.exp2,
    "hfloor": np.floor, "hceil": np.ceil, "hsqrt": np.sqrt, "hrsqrt": lambda x: 1 / np.sqrt(x), "hrcp": lambda x: 1 / x,
    "hrint": np.rint, "htrunc": np.trunc, "hmax": np.fmax, "hmin": np.fmin,
}  # fmt: skip
_COMPARISONS = {
    "heq": operator.eq, "hne": operator.ne, "hge": operator.ge, "hgt": operator.gt, "hle": operator.le, "hlt": operator.lt,
}  # fmt: skip


def _rounded(f, kind):
    return carries(lambda *args: kind(f(*map(np.float64, map(np.float16, args)))))


def table(frontend) -> dict:
    """Function of cuda.fp16 -> what the simulator calls in its place."""
    fp16, found = getattr(frontend.cuda, "fp16", None), {}
    for functions, kind in ((_FUNCTIONS, np.float16), (_COMPARISONS, np.bool_)):
        for name, f in functions.items():
            if hasattr(fp16, name):
                found[getattr(fp16, name)] = _rounded(f, kind)
    return found


def named(function):
    """What stands for a function of numba-cuda's module numba.cuda.fp16, whose names are __hadd and so on; None for others."""
    if not str(getattr(function, "__module__", None)).endswith("cuda._internal.cuda_fp16"):
        return None
    name = function.__name__.strip("_")
    if name in _FUNCTIONS:
        return _rounded(_FUNCTIONS[name], np.float16)
    return _rounded(_COMPARISONS[name], np.bool_) if name in _COMPARISONS else None
