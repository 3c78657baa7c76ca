"""Look on from outside while a step runs: who is computing, which kernels are started.

Profiler ranges, the kernel table and the memory plan all need to know that, and none of it may cost
anything while nobody looks. So the engine has no hooks: for the time of a `with` block, functions
are swapped for ones that take notes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from ..kernels import gemm
from ..kernels.runtime import launch as _launch
from .autograd import Function
from .model import Transformer

Note = Callable[[str, str, str], AbstractContextManager]
Look = Callable[[str, str, str, tuple, tuple], None]


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name is `value` inside."""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


@contextlib.contextmanager
def watch_ops(model: Transformer, note: Note, look: Look | None = None) -> Iterator[None]:
    """Inside, note(op, way, layer) is entered around every op and every layer of the model.

    op: the Function's name; for a layer "".  way: "forward" or "backward".  layer: "layer 3", outside of layers "".
    look(op, way, layer, arrays, results): called after an op with what it was given (and had saved) and what it gives.
    """
    names = {id(layer): f"layer {i}" for i, layer in enumerate(model.model.layers)}
    owners: dict[int, str] = {}  # id of an op's context -> its layer: how backward knows
    inside = [""]

    def layer_call(call, self, *args, **more):
        inside.append(names.get(id(self), inside[-1]))
        with note("", "forward", inside[-1]):
            out = call(self, *args, **more)
        inside.pop()
        return out

    def op_call(cls, way, call, ctx, *args):
        if way == "forward":
            owners[id(ctx)] = inside[-1]
        layer = owners.get(id(ctx), "")
        given = args if way == "forward" or look is None else (*args, *ctx.saved)
        inside.append(layer)  # also for the ops that a backward runs again: recompute.py
        with note(cls.__name__, way, layer):
            out = call(ctx, *args)
        inside.pop()
        if look is not None:
            look(cls.__name__, way, layer, given, out if isinstance(out, tuple) else (out,))
        return out

    with contextlib.ExitStack() as stack:
        for cls in _every(Function):
            for way in {"forward", "backward"} & set(vars(cls)):
                noted = functools.partial(op_call, cls, way, getattr(cls, way))
                stack.enter_context(swapped(cls, way, staticmethod(noted)))
        calls = {block: block.__call__ for block in map(type, model.model.layers)}
        for block, call in calls.items():
            stack.enter_context(swapped(block, "__call__", _method(layer_call, call)))
        yield


def _method(around, call):
    return lambda self, *args, **more: around(call, self, *args, **more)


def _every(cls):
    """All classes derived from cls."""
    for derived in cls.__subclasses__():
        yield derived
        yield from _every(derived)


@contextlib.contextmanager
def watch_launches(kernel: Callable[..., Any], product: Callable[..., Any]) -> Iterator[None]:
    """Inside, kernel(start, kernel, arguments) and product(start, c, a, b) replace each launch on the
    GPU and each cuBLAS call c = a b; start() does what would have been done."""
    launch, multiply = _launch._launch_gpu, gemm._cublas

    def launch_watched(jitted, grid, block, args, *rest):
        kernel(lambda: launch(jitted, grid, block, args, *rest), jitted, args)

    def multiply_watched(c, a, b, *rest):
        product(lambda: multiply(c, a, b, *rest), c, b, a)  # column-major: operands come swapped

    with (
        swapped(_launch, "_launch_gpu", launch_watched),
        swapped(gemm, "_cublas", multiply_watched),
    ):
        yield
