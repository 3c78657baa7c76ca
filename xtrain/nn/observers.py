"""Observe a step while it runs: which op computes, and for which layer.

    def observer(op):           a context manager: entered before the op, left after it, when
        ...                     op.outputs is set

    with observe_ops(observer):
        model.loss(ids, targets).backward()

The profiler, the memory plan and the search for non-finite numbers are such observers. autograd.py
calls them around every forward and backward of a Function, the model around every layer. Without
observers that costs one `if`.

The second hook, where kernels and cuBLAS products are launched, is `observe_launches` in
kernels/runtime/launch.py.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from .tensor import as_tuple


@dataclass
class Op:
    """One call: the forward or the backward of a Function, or the forward of a layer.

    name: of the Function; "" for a layer.
    way: "forward" or "backward".
    layer: "layer 3"; "" outside the layers.
    inputs: the arguments of forward; the gradients that backward receives, then what forward saved.
        Of
        a layer: arrays.
    outputs: what the call returned, () before.
    """

    name: str
    way: str
    layer: str
    inputs: tuple = ()
    outputs: tuple = ()


OpObserver = Callable[[Op], AbstractContextManager]
op_observers: list[OpObserver] = []


class _Computing(threading.local):
    """The layer that each thread is computing."""

    layer = ""


_computing = _Computing()


@contextlib.contextmanager
def observe_ops(observer: OpObserver) -> Iterator[None]:
    """Surround every op and every layer, of all threads, by the context manager observer(op)."""
    op_observers.append(observer)
    try:
        yield
    finally:
        op_observers.remove(observer)


# ----------------------------------------------------------------- what autograd and the model call
def observed(function: Any, way: str, ctx: Any, args: Sequence[Any]) -> Any:
    """Return function.forward(ctx, *args) or function.backward(ctx, *args), with the observers.

    The layer of a backward is that of its forward. So an op that backward recomputes (recompute.py)
    belongs to the same layer both times.
    """
    if way == "forward":
        ctx.layer = _computing.layer
        inputs = tuple(args)
    else:
        inputs = (*args, *(x for x in ctx.saved if x is not None))
    # without a layer: forward may have run unobserved
    op = Op(function.__name__, way, getattr(ctx, "layer", ""), inputs)
    with _announced(op):
        out = getattr(function, way)(ctx, *args)
        op.outputs = as_tuple(out)
    return out


def in_layer(i: int, f: Callable[..., Any], *inputs: Any) -> Any:
    """Return f(*inputs), announced to the observers as the forward of layer i.

    f takes and returns Tensors.
    """
    if not op_observers:
        return f(*inputs)
    op = Op("", "forward", f"layer {i}", tuple(x.data for x in inputs))
    with _announced(op):
        out = f(*inputs)
        op.outputs = tuple(y.data for y in as_tuple(out))
    return out


@contextlib.contextmanager
def _announced(op):
    outer, _computing.layer = _computing.layer, op.layer
    try:
        with contextlib.ExitStack() as stack:
            for observer in list(op_observers):
                stack.enter_context(observer(op))
            yield
    finally:
        _computing.layer = outer
