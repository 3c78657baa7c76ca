"""Define-by-run autograd: running an op records it, backward() walks the records, last to first.

    y = SomeFunction.apply(x, w)    forward runs; a Node keeps the function, saved arrays, inputs
    loss.backward()                 for every node, newest first: call its backward, pass each
                                    gradient to its input

Two rules:
- The gradient of an *activation* is new memory. The engine adds the gradients of an activation that
  was used twice.
- The gradient of a *leaf* (a parameter, or a tensor that the user made) accumulates: the first one
  is written, later ones are added. The op does both inside its kernel or GEMM, so a parameter needs
  no second buffer: see `ctx.grad_target`.

Saved arrays and gradients are freed as soon as they have been used.
"""

import heapq
import itertools
import zlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..device import Array, array_module, as_array
from ..kernels.elementwise import add_fwd, add_into
from ..kernels.runtime.launch import empty, zeros
from .mode import current_mode, is_inference
from .mode import inference as inference  # these three are also imported from here
from .mode import no_grad as no_grad
from .mode import recording as recording
from .observers import observed, op_observers
from .tensor import Tensor, as_tuple, ops

_clock = itertools.count()


class Function:
    """One differentiable op. Subclasses define two static methods on arrays, never Tensors:

        forward(ctx, *arrays_and_options) -> array or tuple of arrays
        backward(ctx, *gradients) -> gradient or tuple, one per argument of forward; None where an
                                     argument has none

    A gradient passed to backward is None when nothing used that output.
    """

    full_precision = False  # True: parameters come in float32 even where they have a bf16 copy

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run forward on the arguments' arrays. Record a Node if any of them needs a gradient."""
        ctx = Context(args)
        kind = "data" if cls.full_precision else "value"
        values = [getattr(a, kind) if isinstance(a, Tensor) else a for a in args]
        if op_observers:
            out = observed(cls, "forward", ctx, values)
        else:
            out = cls.forward(ctx, *values)
        outputs = [Tensor(o) for o in as_tuple(out)]
        node = None
        if any(ctx.needs_grad):
            node = Node(cls, ctx, args, len(outputs))
        for i, tensor in enumerate(outputs):
            tensor.requires_grad = node is not None
            tensor.node = node
            tensor.index = i
        return tuple(outputs) if isinstance(out, tuple) else outputs[0]

    # with `**_`, type checkers accept any other arguments in a derived class
    @staticmethod
    def forward(ctx: "Context", *args: Any, **_: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def backward(ctx: "Context", *gradients: Any, **_: Any) -> Any:
        raise NotImplementedError


class Edge:
    """Where the gradient of one argument goes: to a leaf, or to output `index` of its node.

    An edge does not hold the array of an activation: activations that no op saved are freed during
    the forward pass.
    """

    __slots__ = ("index", "leaf", "node", "shape")

    def __init__(self, tensor: Tensor):
        self.leaf = tensor if tensor.node is None else None
        self.node = tensor.node
        self.index = tensor.index
        self.shape = tensor.shape


class Context:
    """What forward saves for backward."""

    # layer: see observers.py
    # first_written: leaves whose memory backward was given to write to, not to add to
    # parameters: in inference, which arguments are parameters
    __slots__ = ("edges", "first_written", "layer", "needs_grad", "parameters", "saved")

    def __init__(self, args: Sequence[Any]):
        on = current_mode().on
        if is_inference():
            self.parameters = [getattr(a, "is_parameter", False) for a in args]
        self.needs_grad = [on and isinstance(a, Tensor) and a.requires_grad for a in args]
        self.edges = [Edge(a) if needed else None for a, needed in zip(args, self.needs_grad)]
        self.saved: tuple[Any, ...] = ()
        self.first_written: list[Tensor] = []

    def save(self, *arrays: Any) -> None:
        """Keep these (arrays and options) until backward."""
        self.saved = arrays

    def grad_target(self, i: int, like: Array) -> tuple[Array, bool]:
        """Return (memory for the gradient of argument i, add).

        Write the gradient there, or with `add` add it to the contents, and return the memory from
        backward.

        like: the argument's value.
        """
        edge = self.edges[i]
        if edge is None or edge.leaf is None:
            return empty(like, like.shape), False
        target, add = edge.leaf.grad_target()
        if not add:
            self.first_written.append(edge.leaf)
        return target, add

    def grad_buffer(self, i: int, like: Array) -> Array:
        """Return grad_target for an op that can only add: zeros where nothing was written yet."""
        target, add = self.grad_target(i, like)
        if not add:
            target.fill(0)
        return target


class Node:
    """A recorded call."""

    __slots__ = ("ctx", "fingerprints", "function", "n_outputs", "order", "versions")

    def __init__(self, function: type[Function], ctx: Context, args: Sequence[Any], n_outputs: int):
        self.function = function
        self.ctx = ctx
        self.n_outputs = n_outputs
        # a node depends only on earlier ones, so this is a topological order
        self.order = next(_clock)
        saved = {id(a) for a in ctx.saved}
        kept = [a for a in args if isinstance(a, Tensor) and {id(a._data), id(a.value)} & saved]
        self.versions = [(t.version, t.version.count, t.shape) for t in kept]
        self.fingerprints = [_fingerprint(a) for a in ctx.saved]

    def __reduce__(self) -> Any:
        raise TypeError("a computed Tensor cannot be copied or pickled: use .detach()")

    def check_untouched(self) -> None:
        """Raise RuntimeError if an array saved by forward has been changed since."""
        changed = [shape for version, count, shape in self.versions if version.count != count]
        for array, fingerprint in zip(self.ctx.saved, self.fingerprints):
            if _fingerprint(array) != fingerprint:
                changed.append(array.shape)
        if changed:
            raise RuntimeError(
                f"an array of shape {changed[0]} that {self.function.__name__} saved was changed "
                "in place "
                "before backward: change a copy, or call backward first"
            )


def _fingerprint(array):
    """Return a checksum over a NumPy array: over all of up to 1024 elements, else over 64.

    It detects `x.data[...] = y`, which no counter sees. On a GPU it would synchronize, so only the
    counters are used there.
    """
    if type(array) is not np.ndarray or array.size == 0 or not array.flags.c_contiguous:
        return None
    flat = array.reshape(-1)
    return zlib.crc32((flat if flat.size <= 1024 else flat[:: flat.size // 64]).tobytes())


def backward(root: Tensor, gradient: Array | None = None) -> None:
    """Add d root / d leaf to `.grad` of every leaf that root was computed from.

    gradient: of the final loss with respect to root, same shape; optional if root has one element.
    Raises RuntimeError when the graph was used already, ValueError on a gradient of the wrong
    shape.
    """
    if root.node is None:
        raise RuntimeError("backward needs a tensor computed from one with requires_grad=True")
    if gradient is None:
        if root.size != 1:
            raise ValueError(f"backward of shape {root.shape} needs a gradient")
        gradient = _unit(root.data)
    elif (gradient := as_array(gradient)).shape != root.shape:
        raise ValueError(f"the gradient has shape {gradient.shape}, the tensor {root.shape}")
    # node -> the gradients of its outputs, for every node that was reached
    gradients = {root.node: [None] * root.node.n_outputs}
    gradients[root.node][root.index] = gradient
    queue = [(-root.node.order, root.node)]
    while queue:
        _, node = heapq.heappop(queue)  # the newest: every node that used its outputs has run
        for edge, dx in _call_backward(node, gradients.pop(node)):
            if edge.leaf is not None:
                _add_to_leaf(edge.leaf, dx)
                continue
            if edge.node not in gradients:
                gradients[edge.node] = [None] * edge.node.n_outputs
                heapq.heappush(queue, (-edge.node.order, edge.node))
            slots = gradients[edge.node]
            i = edge.index
            if slots[i] is None:
                slots[i] = dx
            else:
                slots[i] = as_array(add_fwd(slots[i], dx))


ops["backward"] = backward
_units: WeakKeyDictionary = WeakKeyDictionary()  # by array module: the memory plan's is temporary


def _unit(like):
    """Return the gradient 1, always the same array: ops skip multiplying by it (is_unit)."""
    units = _units.setdefault(array_module(like), {})
    key = type(like), like.shape, like.dtype, str(like.device)
    if key not in units:
        units[key] = zeros(like, like.shape)
        units[key][...] = 1
    return units[key]


def is_unit(gradient: Array) -> bool:
    """Return True if backward() starts from this array. Compares identities, not values."""
    return any(gradient is unit for units in _units.values() for unit in units.values())


def _call_backward(node, gradients):
    """Return (edge, gradient) of every argument that has one. Frees what the node had saved."""
    name = node.function.__name__
    if node.ctx is None:
        raise RuntimeError(
            f"backward was called twice through {name}: its saved arrays are freed, run forward "
            "again"
        )
    node.check_untouched()
    ctx, f = node.ctx, node.function
    try:
        if op_observers:
            result = observed(f, "backward", ctx, gradients)
        else:
            result = f.backward(ctx, *gradients)
    except BaseException:
        for leaf in ctx.first_written:  # their memory may still hold old gradients
            leaf.grad_written = False
        raise
    node.ctx = None
    result = as_tuple(result)
    if len(result) > len(ctx.edges) or any(ctx.needs_grad[len(result) :]):
        raise ValueError(f"{name} returned {len(result)} gradients for {len(ctx.edges)} arguments")
    found = [(e, as_array(dx)) for e, dx in zip(ctx.edges, result) if e and dx is not None]
    for edge, dx in found:
        if dx.shape != edge.shape:
            where = f"argument {ctx.edges.index(edge)} of shape {edge.shape}"
            raise ValueError(f"{name} returned a gradient of shape {dx.shape} for {where}")
    return found


def _add_to_leaf(leaf, dx):
    if dx is not leaf._grad:  # otherwise the op has put it there itself
        dtype = (leaf.data if leaf._grad is None else leaf._grad).dtype
        if dx.dtype != dtype:
            raise TypeError(f"a gradient has type {dx.dtype}, the tensor's gradients are {dtype}")
        target, add = leaf.grad_target()
        if add:
            add_into(target, dx if dx.flags.c_contiguous else dx.copy())
        else:
            target[...] = dx
    if leaf.on_gradient is not None:
        leaf.on_gradient(leaf)
