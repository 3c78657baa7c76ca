"""What a user's module returns must be a Tensor: no gradient flows through an array, and training
would go on without it."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..errors import UserError
from .mode import is_training
from .tensor import Tensor

METHODS = ("__call__", "attend", "hidden", "logits", "loss", "logprobs")  # that return a Tensor


def check_returned(kind: type) -> None:
    """Let the METHODS that a user's class of modules defines raise UserError in training, if they
    return an array of floating-point numbers, or nothing."""
    if kind.__module__.split(".")[0] == __name__.split(".")[0]:
        return
    for name in METHODS:
        method = vars(kind).get(name)
        if isinstance(method, FunctionType):
            setattr(kind, name, _checked(method))


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *inputs: Any, **options: Any) -> Any:
        result = method(self, *inputs, **options)
        if isinstance(result, Tensor) or not is_training():
            return result
        # other modules of the user's may expect anything else, such as a tuple of Tensors
        if result is None or getattr(getattr(result, "dtype", None), "kind", "") in ("f", "V"):
            name = type(self).__name__
            if method.__name__ != "__call__":
                name += f".{method.__name__}"
            raise UserError(
                f"{name} returned {type(result).__name__}, through which no gradient flows: "
                "compute with Tensors and the ops of xtrain.nn.functional, not with their `.data`, "
                "and return a Tensor (Tensor(x) for a constant array x)"
            )
        return result

    return call
