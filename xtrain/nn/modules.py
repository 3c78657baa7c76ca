"""Modules and their parameters, which live in one arena (arena.py).

For serving, a matrix may be stored as int8 or fp8 codes instead (`Parameter.quantized`, made by
quantized.py). It then has memory of its own, outside the arena, and only products can use it.

A Parameter may hold several tensors of the Hugging Face layout as blocks of its rows (q, k and v;
gate and up), and rows of padding after them (the vocabulary). `named_parameters()` yields each
tensor as a view under its Hugging Face name.
"""

import itertools
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..device import Array, free_cached, to_device
from ..errors import UserError
from ..kernels.cast import BFLOAT16
from ..kernels.quantize import Quantized
from . import functional as F
from .arena import Arena
from .fp8 import Fp8Layer, Fp8Scales
from .returned import check_returned
from .sharded_arena import Unit
from .tensor import Tensor

STD = 0.02  # of the initialisation of a model's matrices


class _ArenaTensor(Tensor):
    """A tensor whose values and gradient lie in an arena.

    Assigning to either copies values; the memory stays.
    """

    __slots__ = ("declared_shape", "offset", "unit")

    is_parameter = True
    offset: int  # of the first element in the arena; -1 before the arena is made
    declared_shape: tuple[int, ...]
    unit: Unit | None  # of sharded_arena.py (ZeRO-3), where it is one of its parameters

    @property
    def assigned_dtype(self) -> Any:
        """Return the dtype of values that are assigned: that of `data`, or of the master weights."""
        return self._data.dtype if self.unit is None else np.dtype(np.float32)

    def __setitem__(self, where: Any, value: Any) -> None:
        if self.unit is not None:
            raise UserError("with --zero 3 a parameter is assigned as a whole: parameter.data = x")
        super().__setitem__(where, value)

    @property
    def grad(self) -> Array | None:
        if self.unit is not None and self.unit.is_layer:
            raise UserError("with --zero 3 a layer's gradients are nowhere whole: use --zero 1")
        return super().grad

    @grad.setter
    def grad(self, array: Array | None) -> None:
        """Copy the values into the arena, which the optimizer reads; None: zeros."""
        if array is not None and array.shape != self.data.shape:
            raise ValueError(
                f"a parameter of shape {self.shape} cannot have a gradient of shape {array.shape}"
            )
        memory = self.grad
        if memory is not None and array is not memory:
            memory[...] = 0 if array is None else array
        elif memory is None and array is not None:
            raise UserError(
                "a parameter of a model with trainable=False has no memory for a gradient: make "
                "the model with trainable=True"
            )

    @property
    def data(self) -> Array:
        if isinstance(self._data, Quantized):
            raise UserError(
                f"a parameter of shape {self.declared_shape} is quantized to {self._data.kind}, so "
                "only products can use it: load the model again for anything else"
            )
        if self.offset < 0:
            raise UserError(
                f"a parameter of shape {self.declared_shape} has no memory: call "
                "model.renew_arena() after adding or replacing modules"
            )
        if self.unit is not None:
            self.unit.check_gathered()
        return self._data

    @data.setter
    def data(self, array: Array) -> None:
        """Copy the values into the arena; the parameter stays a view of it."""
        if self.unit is not None:
            self.unit.assign(self.offset, self.shape, array)
            return
        if array.shape != self.data.shape:  # self.data: is there memory?
            raise ValueError(
                f"a parameter of shape {self.shape} cannot hold data of shape {array.shape}"
            )
        if self.dtype == array.dtype == BFLOAT16:
            # copy bits, because NumPy and CuPy may not know the type
            self._data.view(np.uint16)[...] = array.view(np.uint16)
            self.version.count += 1
        else:
            self[...] = array


class Parameter(_ArenaTensor):
    """A trainable tensor. Its shape is fixed; it gets memory when its model makes the arena.

    shape: in memory.
    parts: {suffix of the Hugging Face name: rows}, from the top; further rows are padding. None:
        all rows, under the name "weight".
    std: of the normal initialisation; None: ones.
    decay: whether weight decay applies.
    requires_grad: may be set to False at any time: no gradient is computed then, and AdamW does not
        update the parameter.
    on_gradient: None, or a function that is called with the parameter after each contribution to
        its gradient (parallel/ddp.py).
    quantized: None, or what stands in place of the weights, which are then no longer there.
    fp8: None, or what makes the codes of its products in fp8 training (nn/fp8.py).
    """

    __slots__ = ("_quantized", "decay", "fp8", "half", "on_gradient", "parts", "std")

    def __init__(
        self, shape: tuple[int, ...], std: float | None, parts: dict[str, int] | None = None
    ):
        super().__init__(np.empty(0, np.float32), requires_grad=True)
        if not isinstance(shape, tuple) or not shape:
            raise UserError(
                "a Parameter needs a shape of at least one axis, (1,) for a single number: set its "
                "values later, by `parameter.data = array`"
            )
        self.offset = -1
        self.unit = None
        self.declared_shape = shape
        self.std = std
        self.decay = len(shape) > 1
        self.parts = parts or {"weight": shape[0]}
        if sum(self.parts.values()) > shape[0]:
            raise UserError(f"{self.parts} are more rows than a parameter of shape {shape} has")
        self.half: Array | None = None  # in bf16 training: the copy that forward and backward use
        self.on_gradient = None
        self.fp8: Fp8Layer | None = None
        self._quantized: Quantized | None = None

    def __getstate__(self) -> Any:
        """Leave out what belongs to an arena and a run; `arena_of` makes it in a copy."""
        state: Any = super().__getstate__()
        left_out = dict.fromkeys(("_grad", "half", "fp8", "on_gradient", "unit"))
        return None, state[1] | left_out | {"grad_written": False}

    @property
    def quantized(self) -> Quantized | None:
        """Return the codes of a matrix that is quantized for serving, else None (nn/quantized.py).

        Assigning them frees the weights.
        """
        return self._quantized

    @quantized.setter
    def quantized(self, codes: Quantized) -> None:
        # the codes take the place of the weights: the parameter is no view of an arena any more
        self._quantized = codes
        self._data = codes
        self.half = None
        self.offset = -1
        self.requires_grad = False

    @property
    def value(self) -> Any:
        """Return what ops compute with: codes, the bf16 copy if there is one, or the weights."""
        if self._quantized is not None:
            return self._quantized
        if self.unit is not None:
            self.unit.check_gathered()
        return self.data if self.half is None else self.half


class _Part(_ArenaTensor):
    """One Hugging Face tensor inside a Parameter: views of its data and gradient."""

    __slots__ = ("parameter",)

    def __init__(self, parameter, rows):
        self.parameter = parameter
        self.unit = parameter.unit
        self.offset = parameter.offset
        data = parameter.data if parameter.unit is None else parameter._data
        if self.offset >= 0:
            self.offset += rows.start * math.prod(parameter.declared_shape[1:])
        self.declared_shape = data[rows].shape
        super().__init__(data[rows], parameter.requires_grad)
        self._grad = None
        if parameter._grad is not None:
            self._grad = parameter._grad[rows]
        self.version = parameter.version

    def __reduce__(self) -> Any:
        return Tensor, (self.data, self.requires_grad)  # a copy shares no memory

    def zero_unwritten_grad(self) -> None:
        self.parameter.zero_unwritten_grad()  # all rows: the flag belongs to the Parameter

    def grad_target(self) -> tuple[Array, bool]:
        self.zero_unwritten_grad()
        return self._grad, True

    @property
    def on_gradient(self) -> Callable[[Any], None] | None:
        hook = self.parameter.on_gradient
        if hook is None:
            return None
        return lambda part: hook(part.parameter)

    @on_gradient.setter
    def on_gradient(self, function: Callable[[Any], None] | None) -> None:
        self.parameter.on_gradient = function

    @property
    def requires_grad(self) -> bool:
        return self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != self.parameter.requires_grad:
            raise UserError(
                "this is a view of a Parameter, which may hold several: freeze with "
                "`for name, parameter in model.storage(): parameter.requires_grad = False`"
            )


class Module:
    """A tree of modules and parameters, which are found by walking the attributes in the order they
    were set, also those in lists, tuples and dicts."""

    arena: Arena  # of the whole model, in its outermost module
    fp8: Fp8Scales | None = None  # of a model in fp8 training

    def __init_subclass__(cls) -> None:
        check_returned(cls)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Compute the forward pass, and return a Tensor. Derived classes define it."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")

    def modules(self, prefix: str = "") -> Iterator[tuple[str, "Module"]]:
        """Yield (name, module), this one first, depth first.

        The names end in a dot, but for the first: "".
        """
        yield prefix, self
        for name, value in vars(self).items():
            for path, item in _items(name, value):
                if isinstance(item, Module):
                    yield from item.modules(f"{prefix}{path}.")

    def storage(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (name of the module, Parameter as it is in memory), depth first.

        A shared one only once.
        """
        seen = set()
        for path, parameter in self._storage(""):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield path, parameter

    def _storage(self, prefix):
        for name, value in vars(self).items():
            for path, item in _items(name, value):
                if isinstance(item, Module):
                    yield from item._storage(f"{prefix}{path}.")
                elif isinstance(item, Parameter):
                    yield (prefix if item is value else f"{prefix}{path}."), item

    def places(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Yield (Hugging Face name, offset in the arena, shape) of each tensor."""
        for prefix, p in self.storage():
            width = math.prod(p.declared_shape[1:])
            row = 0
            for suffix, rows in p.parts.items():
                yield prefix + suffix, p.offset + row * width, (rows, *p.declared_shape[1:])
                row += rows

    def views(self, array: Array) -> Iterator[tuple[str, Array]]:
        """Yield (Hugging Face name, view) into an array like the arena: weights, moments, ..."""
        for name, start, shape in self.places():
            yield name, array[start : start + math.prod(shape)].reshape(shape)

    def named_parameters(self) -> Iterator[tuple[str, "_ArenaTensor"]]:
        """Yield (Hugging Face name, tensor).

        Its data and grad have the Hugging Face shape and are views into the arena.
        """
        for prefix, parameter in self.storage():
            row = 0
            for suffix, rows in parameter.parts.items():
                yield prefix + suffix, _Part(parameter, slice(row, row + rows))
                row += rows

    def make_arena(
        self,
        device: str,
        seed: int | None,
        bf16: bool = False,
        world: int = 1,
        trainable: bool = True,
    ) -> Arena:
        """Allocate all parameters and initialise them.

        Every tensor has a separate random stream, seeded with `seed` and its Hugging Face name, so
        the values depend neither on packing nor on padding nor on the order of the layers.

        seed: None: they stay zero, for weights that will be loaded.
        """
        if any(p.quantized is not None for _, p in self.storage()):
            raise UserError(
                "a model with quantized weights cannot get a new arena: replace or add modules "
                "first, then quantize"
            )
        names = [prefix + suffix for prefix, p in self.storage() for suffix in p.parts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(
                f"two parameters are called {twice[0]}: give one of them another name, "
                f"parts={{name: rows}}"
            )
        arena = self.new_arena(device, bf16, world, trainable)
        if seed is None:
            return arena
        std = {prefix + suffix: p.std for prefix, p in self.storage() for suffix in p.parts}
        for name, tensor in self.named_parameters():
            if std[name] is None:
                values = np.ones(tensor.shape, np.float32)
            else:
                stream = np.random.default_rng([seed, zlib.crc32(name.encode())])
                values = stream.standard_normal(tensor.shape, dtype=np.float32)
                values *= np.float32(std[name])
            tensor.data = to_device(values.astype(tensor.assigned_dtype, copy=False), device)
        free_cached(device)  # free the temporaries before other arrays are allocated between them
        return arena

    def new_arena(self, device: str, bf16: bool, world: int, trainable: bool) -> Arena:
        """Return an arena of this kind with the memory of all parameters."""
        return Arena([p for _, p in self.storage()], device, bf16, world, trainable)

    def renew_arena(self, seed: int | None = None) -> None:
        """Make a new arena for all parameters, in self.arena.

        Call it after replacing or adding modules, and before making the optimizer. Parameters that
        had values keep them, new ones are initialised as in a new model with this seed (None: 0).
        """
        kept = [(p, p.data) for _, p in self.storage() if p.offset >= 0]
        self.arena = self.make_arena(self.arena.kind[0], seed or 0, *self.arena.kind[1:])
        for parameter, values in kept:
            parameter.data = values

    def __repr__(self) -> str:
        """Return the tree of modules, each with the number of its parameters and its own shapes.
        Equal neighbours appear once."""
        return "\n".join(_tree(self))

    def zero_grad(self) -> None:
        """Set all gradients to 0. Call it before the first backward of each step, which adds.
        Raises UserError if the model was made with trainable=False."""
        self.arena.zero_grad()


def _items(name, value):
    """Yield (path, item) of an attribute: the value, or the items of a list, tuple or dict."""
    if isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _items(f"{name}.{key}", item)
    else:
        yield name, value


def _tree(module):
    """Return lines: the module with its own tensors, then, indented, those of its modules."""
    tensors: Counter[str] = Counter()  # those of experts differ in a number
    children = []
    for attribute, value in vars(module).items():
        for path, item in _items(attribute, value):
            if isinstance(item, Parameter):
                for suffix, rows in item.parts.items():
                    name = re.sub(r"\.\d+\.", ".N.", path if suffix == "weight" else suffix)
                    tensors[f"{name} {(rows, *item.declared_shape[1:])}"] += 1
            elif isinstance(item, Module):
                children.append((path, _tree(item)))
    stored = [p for _, p in module.storage()]
    total = sum(sum(p.parts.values()) * math.prod(p.declared_shape[1:]) for p in stored)
    shown = (f"{n} x {line}" if n > 1 else line for line, n in tensors.items())
    lines = [", ".join([f"{type(module).__name__}: {total:,}", *shown])]
    for lines_of_child, group in itertools.groupby(children, key=lambda child: child[1]):
        paths = [path for path, _ in group]
        names = ", ".join(paths)
        if len(paths) > 2 or (paths[1:] and paths[-1][-1].isdigit()):
            names = f"{paths[0]} to {paths[-1]}"
        times = f"{len(paths)} x " if paths[1:] else ""
        lines.append(f"    {names}: {times}{lines_of_child[0]}")
        lines += [f"    {line}" for line in lines_of_child[1:]]
    return lines


class Embedding(Module):
    """(V, C) table. Rows from vocab_size up to padded_size are zero and stay zero."""

    def __init__(self, vocab_size: int, padded_size: int, dim: int, std: float):
        self.weight = Parameter((padded_size, dim), std, {"weight": vocab_size})

    def __call__(self, ids_N: Array) -> Tensor:
        return F.embedding(ids_N, self.weight)


class Linear(Module):
    """y = x w^T, or with bias y = x w^T + b, where b starts at 0.

    parts: {Hugging Face name: output features} if several matrices are packed. These names replace
    that of the module: the part "q_proj.weight" of `self_attn.qkv` is the parameter
    `self_attn.q_proj.weight`, and its bias `self_attn.q_proj.bias`.
    """

    bias: Parameter | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        std: float,
        parts: dict[str, int] | None = None,
        bias: bool = False,
    ):
        self.weight = Parameter((out_features, in_features), std, parts)
        if bias:
            rows = {_bias_of(name): n for name, n in self.weight.parts.items()}
            self.bias = Parameter((out_features,), 0.0, rows)

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self.weight, None, self.bias)

    def _storage(self, prefix):
        packed = "weight" not in self.weight.parts
        for path, parameter in super()._storage(prefix):
            if packed and (parameter is self.weight or parameter is self.bias):
                path = prefix[: prefix[:-1].rfind(".") + 1]  # without this module's own name
            yield path, parameter


def _bias_of(name):
    """Return the name of the bias that belongs to a weight."""
    return f"{name.removesuffix('weight')}bias"


class RMSNorm(Module):
    """The norm over the last axis of (N, C)."""

    def __init__(self, dim: int, eps: float):
        self.weight = Parameter((dim,), None)
        self.eps = eps

    def __call__(self, x_NC: Tensor) -> Tensor:
        return F.rmsnorm(x_NC, self.weight, self.eps)
