"""Arrays that a user's function of NumPy arrays gets and returns: a loss of preferences, an algorithm
of reinforcement learning."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import FunctionError
from ..options import one_line


def copied(arguments: Any) -> Any:
    """Return a dataclass with copies of its arrays, which the function may change in place."""
    fields = vars(arguments).items()
    return replace(arguments, **{n: x.copy() for n, x in fields if isinstance(x, np.ndarray)})


def numbers(
    found: Any, shapes: tuple[tuple[int, ...], ...], failed: Callable[[str], FunctionError]
) -> np.ndarray:
    """Return what a function has returned, in float64.

    shapes: one of which it must have.
    failed: makes the error of what it did.
    """
    try:
        x = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        raise failed(f"returned {one_line(repr(found))}, not an array of numbers") from None
    if x.shape not in shapes:
        expected = " or ".join(map(str, shapes))
        raise failed(f"returned an array of shape {x.shape}, not {expected}")
    return x
