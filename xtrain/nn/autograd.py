"""Define-by-run autograd: running an op records it, backward() walks the records once, last to first.

    y = SomeFunction.apply(x, w)      forward runs; a Node remembers the function, its saved arrays and its inputs
    loss.backward()                   for every node, newest first: call backward, hand each gradient to its input

Two rules that a reader meets everywhere:
- the gradient of an *activation* is new memory, added up by the engine when the activation was used twice;
- the gradient of a *leaf* (a parameter, or a tensor that the user made) is added into `leaf.grad` by the op itself,
  inside its kernel or GEMM, so that parameters never need a second buffer. `ctx.grad_buffer(i)` is that memory.

Saved arrays and gradients are dropped as soon as they have been used.
"""

import contextlib
import heapq
import itertools
import zlib
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..device import Array, array_module, as_array, to_numpy
from ..kernels.elementwise import add_fwd, add_into
from ..kernels.runtime.launch import zeros
from .observers import observed, op_observers

_recording = True
_clock = itertools.count()


@contextlib.contextmanager
def no_grad():
    """Inside, nothing is recorded: no graph, no saved arrays."""
    global _recording
    before, _recording = _recording, False
    try:
        yield
    finally:
        _recording = before


class Tensor:
    """An array (NumPy: CPU, CuPy: GPU), its gradient, and the node that made it.

    data, grad: arrays of one shape; grad is None until backward reaches a leaf. Only leaves keep their gradient.
    """

    __slots__ = ("__weakref__", "_data", "grad", "index", "node", "requires_grad", "version")

    def __init__(self, data: Any, requires_grad: bool = False):
        if isinstance(data, Tensor):
            raise TypeError("a Tensor was given where an array is expected: use .detach()")
        self._data = as_array(data)
        if self._data.dtype.kind not in ("fV" if requires_grad else "fViub"):  # V: bfloat16
            kind = self._data.dtype
            raise TypeError(f"a Tensor holds numbers, with a gradient only floating point: {kind}")
        self.grad: Array | None = None
        self.requires_grad = requires_grad
        self.node: Node | None = None  # None: a leaf
        self.index = 0  # which output of the node this is
        self.version = Version()

    @property
    def data(self) -> Array:
        return self._data

    @data.setter
    def data(self, array: Array) -> None:  # also reached by `t.data += 1`
        if array.shape != self._data.shape:
            raise ValueError(f"a tensor of shape {self.shape} cannot hold {array.shape}")
        self._data = array
        self.version.count += 1

    def __setitem__(self, where, value) -> None:
        self._data[where] = value
        self.version.count += 1

    on_gradient = None  # a leaf may have a function: it is called with the leaf after each addition to its gradient
    blank = False  # a Parameter's gradient may count as zero whatever is in its memory: see nn.py
    value = property(lambda self: self._data)  # what ops compute with
    shape = property(lambda self: self._data.shape)
    dtype = property(lambda self: self._data.dtype)
    ndim = property(lambda self: self._data.ndim)
    size = property(lambda self: self._data.size)
    __len__ = lambda self: len(self._data)

    def numpy(self) -> np.ndarray:
        """The values on the host (from a GPU: a copy, and a wait for it)."""
        return to_numpy(self._data)

    def item(self) -> float:
        """The value of a tensor with one element, as a Python number."""
        return self.numpy().item()

    __float__ = item

    def detach(self) -> "Tensor":
        """The same array without its history."""
        return Tensor(self._data)

    def backward(self, gradient: Array | None = None) -> None:
        backward(self, gradient)

    def __repr__(self) -> str:
        made = f", made by {self.node.function.__name__}" if self.node else ""
        return f"Tensor({self._data!r}{made})"


class Version:
    """Counts in-place changes. All parameters of one arena share one: an optimizer step changes them all."""

    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Function:
    """One differentiable op. Subclasses give two static methods over arrays, never Tensors:

        forward(ctx, *arrays_and_options) -> array or tuple of arrays
        backward(ctx, *gradients)         -> gradient or tuple, one per argument of forward; None where there is none

    A gradient passed to backward is None when nothing used that output.
    """

    full_precision = False  # True: parameters come in float32 even where they have a bf16 copy

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run forward on the arguments' arrays and, if any of them needs a gradient, record a Node."""
        ctx = Context(args)
        kind = "data" if cls.full_precision else "value"
        values = [getattr(a, kind) if isinstance(a, Tensor) else a for a in args]
        out = observed(cls, "forward", ctx, values) if op_observers else cls.forward(ctx, *values)
        outputs = [Tensor(o) for o in (out if isinstance(out, tuple) else (out,))]
        node = Node(cls, ctx, args, len(outputs)) if any(ctx.needs_grad) else None
        for i, tensor in enumerate(outputs):
            tensor.requires_grad, tensor.node, tensor.index = node is not None, node, i
        return tuple(outputs) if isinstance(out, tuple) else outputs[0]

    @staticmethod
    def forward(ctx: "Context", *args: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def backward(ctx: "Context", *gradients: Any) -> Any:
        raise NotImplementedError


class Edge:
    """Where the gradient of one argument goes: to a leaf, or to output `index` of the node that made it.

    An edge does not hold the array of an activation: what no op saved is freed during the forward pass.
    """

    __slots__ = ("index", "leaf", "node", "shape")

    def __init__(self, tensor):
        self.leaf = tensor if tensor.node is None else None
        self.node, self.index, self.shape = tensor.node, tensor.index, tensor.shape


class Context:
    """What forward leaves for backward."""

    __slots__ = ("edges", "layer", "needs_grad", "saved")  # layer: see observers.py

    def __init__(self, args):
        self.needs_grad = [_recording and isinstance(a, Tensor) and a.requires_grad for a in args]
        self.edges = [Edge(a) if needed else None for a, needed in zip(args, self.needs_grad)]
        self.saved: tuple = ()

    def save(self, *arrays: Any) -> None:
        """Keep these (arrays and options) until backward."""
        self.saved = arrays

    def grad_buffer(self, i: int, like: Array) -> Array | None:
        """Memory to *add* the gradient of argument i into (to be returned from backward). `like`: its value."""
        edge = self.edges[i]
        if edge is None or edge.leaf is None:
            return zeros(like, like.shape)
        if edge.leaf.grad is None:
            edge.leaf.grad = zeros(like, like.shape)
        return edge.leaf.grad


class Node:
    """A recorded call."""

    __slots__ = ("ctx", "fingerprints", "function", "n_outputs", "order", "versions")

    def __init__(self, function, ctx, args, n_outputs):
        self.function, self.ctx, self.n_outputs = function, ctx, n_outputs
        # a node depends on earlier ones only: a topological order for free
        self.order = next(_clock)
        saved = {id(a) for a in ctx.saved}
        kept = [a for a in args if isinstance(a, Tensor) and {id(a.data), id(a.value)} & saved]
        self.versions = [(t.version, t.version.count, t.shape) for t in kept]
        self.fingerprints = [_fingerprint(a) for a in ctx.saved]

    def check_untouched(self) -> None:
        """Raises RuntimeError when an array saved by forward has been changed since."""
        changed = [shape for version, count, shape in self.versions if version.count != count]
        for array, fingerprint in zip(self.ctx.saved, self.fingerprints):
            if _fingerprint(array) != fingerprint:
                changed.append(array.shape)
        if changed:
            raise RuntimeError(
                f"an array of shape {changed[0]} that {self.function.__name__} saved was changed in place "
                "before backward: change a copy, or call backward first"
            )


def _fingerprint(array):
    """A checksum over a NumPy array: over all of it up to 1024 elements, else over 64 of them.

    It catches `x.data[...] = y`, which no counter sees. On a GPU it would mean waiting: there only counters watch.
    """
    if type(array) is not np.ndarray or array.size == 0 or not array.flags.c_contiguous:
        return None
    flat = array.reshape(-1)
    return zlib.crc32((flat if flat.size <= 1024 else flat[:: flat.size // 64]).tobytes())


def backward(root: Tensor, gradient: Array | None = None) -> None:
    """Add d root / d leaf to `.grad` of every leaf that root was computed from.

    gradient: of the final loss with respect to root, same shape; may be left out when root has one element.
    Raises RuntimeError when the graph was used already, ValueError on a gradient of the wrong shape.
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
        _, node = heapq.heappop(queue)  # the newest: everything that used its outputs has been done
        for edge, dx in _call_backward(node, gradients.pop(node)):
            if edge.leaf is not None:
                _add_to_leaf(edge.leaf, dx)
                continue
            if edge.node not in gradients:
                gradients[edge.node] = [None] * edge.node.n_outputs
                heapq.heappush(queue, (-edge.node.order, edge.node))
            slots, i = gradients[edge.node], edge.index
            slots[i] = dx if slots[i] is None else as_array(add_fwd(slots[i], dx))


_units: WeakKeyDictionary = WeakKeyDictionary()  # by array module: the memory plan's is temporary


def _unit(like):
    """The gradient 1, always the same array: an op may skip a multiplication by it (see is_unit)."""
    units = _units.setdefault(array_module(like), {})
    key = type(like), like.shape, like.dtype, str(like.device)
    if key not in units:
        units[key] = zeros(like, like.shape)
        units[key][...] = 1
    return units[key]


def is_unit(gradient: Array) -> bool:
    """True if this is the array that backward() starts from. Compares identities, not values."""
    return any(gradient is unit for units in _units.values() for unit in units.values())


def _call_backward(node, gradients):
    """-> (edge, gradient) of every argument that has one. Frees what the node had saved."""
    name = node.function.__name__
    if node.ctx is None:
        raise RuntimeError(
            f"backward was called twice through {name}: its saved arrays are gone, run forward again"
        )
    node.check_untouched()
    ctx, f = node.ctx, node.function
    result = (
        observed(f, "backward", ctx, gradients) if op_observers else f.backward(ctx, *gradients)
    )
    node.ctx = None
    result = result if isinstance(result, tuple) else (result,)
    if len(result) > len(ctx.edges) or any(ctx.needs_grad[len(result) :]):
        raise ValueError(f"{name} gave {len(result)} gradients for {len(ctx.edges)} arguments")
    found = [(e, as_array(dx)) for e, dx in zip(ctx.edges, result) if e and dx is not None]
    for edge, dx in found:
        if dx.shape != edge.shape:
            where = f"argument {ctx.edges.index(edge)} of shape {edge.shape}"
            raise ValueError(f"{name} gave a gradient of shape {dx.shape} for {where}")
    return found


def _add_to_leaf(leaf, dx):
    if dx is not leaf.grad:  # otherwise the op has added it there itself
        leaf.grad = zeros(leaf.data, leaf.shape) if leaf.grad is None else leaf.grad
        add_into(leaf.grad, dx if dx.flags.c_contiguous else dx.copy())
    if leaf.on_gradient is not None:
        leaf.on_gradient(leaf)
