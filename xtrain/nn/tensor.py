"""Tensor: an array, its gradient, and the node of the graph that made it.

The gradient of a leaf accumulates. The rule is in `Tensor.grad_target`: the first gradient is
written, later ones are added.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ..device import Array, as_array, to_numpy
from ..kernels.runtime.launch import empty

# What the methods of Tensor call: "backward" is set by autograd.py, "reshape", "add" and "scale" by
# functional.py. Both import this file, so it cannot import them.
ops: dict[str, Callable[..., Any]] = {}


def as_tuple(x: Any) -> tuple[Any, ...]:
    """Return x, or (x,) if it is no tuple."""
    return x if isinstance(x, tuple) else (x,)


class Version:
    """Counts in-place changes. All parameters of an arena share one, as a step changes them all."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count: int = 0


class Tensor:
    """An array (NumPy: CPU, CuPy: GPU), its gradient, and the node that made it.

    data, grad: arrays of one shape. grad is None until backward reaches a leaf. Only leaves keep
        their gradient.
    grad_written: whether the memory of the gradient holds a gradient. If not, its contents are
        arbitrary and count as zero: the next gradient is written over them, and reading `.grad`
        fills them with zeros. Only Parameters have such memory (modules.py).
    on_gradient: of a Parameter, a function that is called with it after each contribution to its
        gradient; else None.
    """

    __slots__ = (
        "__weakref__",
        "_data",
        "_grad",
        "grad_written",
        "index",
        "node",
        "requires_grad",
        "version",
    )

    on_gradient: Callable[[Any], None] | None = None
    is_parameter = False

    def __init__(self, data: Any, requires_grad: bool = False):
        if isinstance(data, Tensor):
            raise TypeError("a Tensor was given where an array is expected: use .detach()")
        self._data = as_array(data)
        if self._data.dtype.kind not in ("fV" if requires_grad else "fViub"):  # V: bfloat16
            kind = self._data.dtype
            raise TypeError(
                "a Tensor holds numbers, and floating-point numbers if it has a gradient: got "
                f"{kind}"
            )
        self._grad: Array | None = None
        self.grad_written: bool = False
        self.requires_grad: bool = requires_grad
        self.node: Any = None  # of autograd.py; None: a leaf
        self.index: int = 0  # which output of the node this is
        self.version: Version = Version()

    @property
    def data(self) -> Array:
        """Return the values. Another array of the same shape can be assigned."""
        return self._data

    @data.setter
    def data(self, array: Array) -> None:  # also reached by `t.data += 1`
        if array.shape != self._data.shape:
            raise ValueError(f"a tensor of shape {self.shape} cannot hold {array.shape}")
        self._data = array
        self.version.count += 1

    def __setitem__(self, where: Any, value: Any) -> None:
        self._data[where] = value
        self.version.count += 1

    # ------------------------------------------------------------------------- the gradient
    @property
    def grad(self) -> Array | None:
        """Return the gradient; None before backward. Zero-fills memory that is not written yet."""
        self.zero_unwritten_grad()
        return self._grad

    @grad.setter
    def grad(self, array: Array | None) -> None:
        self._grad = array
        self.grad_written = array is not None

    def zero_unwritten_grad(self) -> None:
        """Fill the memory of the gradient with zeros if no gradient has been written to it."""
        if self._grad is not None and not self.grad_written:
            self._grad.fill(0)
            self.grad_written = True

    def grad_target(self) -> tuple[Array, bool]:
        """Return (memory, add) of a leaf.

        The caller writes a gradient into the memory, or if `add`, adds it to the contents.
        """
        add = self.grad_written
        self.grad_written = True
        if self._grad is None:
            self._grad = empty(self._data, self.shape)
        return self._grad, add

    def backward(self, gradient: Array | None = None) -> None:
        """Add d self / d leaf to `.grad` of every leaf that this depends on: autograd.backward."""
        ops["backward"](self, gradient)

    # ------------------------------------------------------------------------- as an array
    @property
    def value(self) -> Array:
        """Return what ops compute with: the data, or in bf16 training a Parameter's copy of it."""
        return self._data

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the axes."""
        return self._data.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of data: float32, bfloat16 (ml_dtypes) or float64.

        Without gradient also of integers.
        """
        return self._data.dtype

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return self._data.ndim

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self._data.size

    def __len__(self) -> int:
        return len(self._data)

    def numpy(self) -> np.ndarray:
        """Return the values on the host (from a GPU: a copy, and a wait for it)."""
        return to_numpy(self.data)

    def item(self) -> float:
        """Return the value of a tensor with one element, as a Python number."""
        return self.numpy().item()

    __float__ = item

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __index__(self) -> int:
        return operator.index(self.numpy())

    def __lt__(self, number: Any) -> bool:
        return self.item() < number

    def __le__(self, number: Any) -> bool:
        return self.item() <= number

    def __gt__(self, number: Any) -> bool:
        return self.item() > number

    def __ge__(self, number: Any) -> bool:
        return self.item() >= number

    def __format__(self, spec: str) -> str:
        if self.ndim:
            return super().__format__(spec)
        return format(self.item(), spec)

    def detach(self) -> Tensor:
        """Return the same array without its history."""
        return Tensor(self._data)

    __array_ufunc__ = None  # NumPy leaves `array + tensor` to Tensor

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        # a conversion would lose the gradient silently
        raise TypeError("a Tensor is not an array: use .data or .numpy(), or pass it to an op")

    def __dlpack__(self, **options: Any) -> Any:
        """Share the memory: torch.from_dlpack(parameter), numpy.from_dlpack(parameter).

        A model in bf16 does not notice values that are written there: assign `parameter.data`.
        """
        if self.node is not None:
            raise BufferError("a computed Tensor would lose its gradient: use .detach()")
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()

    # ------------------------------------------------- operators, each one op of functional.py
    def reshape(self, *shape: Any) -> Tensor:
        """Return the same numbers in another shape, a view: reshape(2, -1) or reshape((2, -1))."""
        return ops["reshape"](self, shape[0] if isinstance(shape[0], tuple) else shape)

    def __add__(self, other: Any) -> Tensor:
        if isinstance(other, (int, float)) and other == 0:  # sum() begins with it
            return self
        if not hasattr(other, "shape"):
            raise TypeError(
                f"only a Tensor or array of its shape can be added to a Tensor, not {other!r}"
            )
        return ops["add"](self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return self + -1.0 * other

    def __mul__(self, factor: Any) -> Tensor:
        if isinstance(factor, Tensor) or np.ndim(factor):
            raise TypeError(
                "a Tensor can only be multiplied by a number: write a Function for other products"
            )
        return ops["scale"](self, float(factor))

    __rmul__ = __mul__

    def __neg__(self) -> Tensor:
        return self * -1.0

    def __truediv__(self, number: float) -> Tensor:
        return self * (1.0 / number)

    def __repr__(self) -> str:
        kind = "Parameter" if self.is_parameter else "Tensor"
        how = ""
        if self.node:
            how = f", made by {self.node.function.__name__}"
        elif self.requires_grad:
            how = ", requires_grad=True"
        return f"{kind}({self._data!r}{how})"
