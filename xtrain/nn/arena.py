"""The arena in which all parameters of a model live.

    weights  [ embedding | layer 0 ... layer L-1 | head |  all norms ]    one float32 array
    grads    [ the same layout                                      ]    one more
               <---------- decayed -------------> <-- not ------->

Every Parameter is a view, so the optimizer is one kernel, the gradient norm one reduction, and
nothing has to be flattened. The order is that of the forward pass: backward fills the gradients
from the end.

zero_grad does not write zeros to the gradients of matrices, it only clears their flag
`grad_written`. The first gradient of a step is then written over the old contents, later ones are
added (tensor.py). This saves writing 4 bytes per parameter and reading them again. Reading
`parameter.grad` or `arena.grads` zero-fills what has not been written, so the gradient of a
parameter that backward did not reach is zero. Norm weights are few, and their kernels always add:
zero_grad writes their zeros at once.

sharded_arena.py has the one of ZeRO-3, which keeps a part of every layer.
"""

import math
from typing import Any

import numpy as np

from ..device import Array, to_device, zeros_on
from ..errors import UserError
from ..kernels.cast import BFLOAT16, cast_into
from ..kernels.runtime.launch import empty
from .tensor import Version

# floats: every parameter starts at a multiple of 256 bytes, for 16-byte loads and cuBLAS
ALIGN = 64


def arena_unit(world: int) -> int:
    """Return the number of floats of which the arena's regions and every bucket are multiples.

    It is ALIGN for 1, 2, 4, 8 and 16 ranks.
    """
    return math.lcm(ALIGN, 4 * world)


def view_of(array: Array, offset: int, shape: tuple[int, ...]) -> Array:
    """Return a part of a flat array in a shape."""
    return array[offset : offset + math.prod(shape)].reshape(shape)


class Arena:
    """Memory of all parameters: weights and grads, 1-D float32 arrays.

    Elements [0, n_decay) are decayed.

    parameters: modules.Parameter, all of them.
    weights: None while ZeRO-1 keeps each float32 weight on one rank only (parallel/zero.py): only
        the bf16 copy is complete.
    half: with bf16, a copy of the weights in bf16. AdamW writes it together with the weights; after
        any other change `refresh` updates it. Ops read matrices from it, and norm weights (which
        are few) always in float32.
    world: number of ranks among which both regions can be divided, in multiples of 16 bytes
        (ZeRO-1).
    size: number of elements, also where weights or grads have fewer.
    trainable: False: no gradients, and in bf16 float32 memory for the norms only; the data of
        matrices are then bf16.
    kind: device, bf16, world and trainable, as given.
    """

    def __init__(
        self,
        parameters: list[Any],
        device: str,
        bf16: bool = False,
        world: int = 1,
        trainable: bool = True,
    ):
        self.kind = (device, bf16, world, trainable)
        matrices = [p for p in parameters if p.decay]
        vectors = [p for p in parameters if not p.decay]
        offsets = []
        size = 0
        unit = arena_unit(world)
        for region in (matrices, vectors):
            for parameter in region:
                offsets.append(size)
                size += -(-math.prod(parameter.declared_shape) // ALIGN) * ALIGN
            size = -(-size // unit) * unit
        self.size = size
        self.parameters = matrices + vectors
        self.matrices = matrices
        self.n_decay = offsets[len(matrices)] if vectors else size
        self.trainable = trainable
        self.version = Version()
        self.half_version = -1
        self.all_written = True  # no gradient is unwritten
        only_half = bf16 and not trainable
        first = self.n_decay if only_half else 0  # offset at which weights begins
        self.weights = zeros_on(device, size - first, np.float32)
        self._grads: Any = zeros_on(device, size, np.float32) if trainable else None
        self.half = None
        if only_half:
            self.half = zeros_on(device, first, BFLOAT16)
        elif bf16:
            self.half = empty(self.weights, size, BFLOAT16)
        for parameter, offset in zip(self.parameters, offsets):
            shape = parameter.declared_shape
            parameter.offset = offset
            parameter.half = None
            if bf16 and parameter.decay:
                parameter.half = view_of(self.half, offset, shape)
            if only_half and parameter.decay:
                parameter._data = parameter.half
            else:
                parameter._data = view_of(self.weights, offset - first, shape)
            parameter._grad = view_of(self._grads, offset, shape) if trainable else None
            parameter.grad_written = True  # zeros
            parameter.version = self.version
            parameter.requires_grad &= trainable  # frozen parameters stay frozen
        # slices that no matrix covers: gaps, and behind all matrices the norms
        starts = [*(p.offset for p in matrices), size]
        ends = [0, *(p.offset + p.size for p in matrices)]
        self._not_matrices = [(a, b) for a, b in zip(ends, starts) if a < b]

    def __reduce__(self) -> Any:
        if self.weights is None:
            raise UserError("the weights are divided among the ranks (--zero): copy a checkpoint")
        return arena_of, (self.parameters, self.kind)  # copy.deepcopy and pickle

    @property
    def grads(self) -> Any:
        """Return all gradients, (size,) float32; None without gradients."""
        self.zero_unwritten_grads()
        return self._grads

    @grads.setter
    def grads(self, array: Array) -> None:
        """Copy the values; the array stays the same. (`arena.grads *= 2` also calls this.)"""
        self.need_grads()
        if array is not self._grads:
            self.grads[...] = array

    def need_grads(self) -> None:
        """Raise UserError if there are no gradients."""
        if not self.trainable:
            raise UserError("this model has no gradients: make it with trainable=True")

    def zero_unwritten_grads(self) -> None:
        """Zero the gradients not written since zero_grad, for code that keeps the array `grads`."""
        if not self.all_written:
            for parameter in self.matrices:
                parameter.zero_unwritten_grad()
            self.all_written = True

    def zero_grad(self) -> None:
        """Set all gradients to 0; those of matrices only by their flags (top of this file)."""
        self.need_grads()
        for a, b in self._not_matrices:
            self._grads[a:b].fill(0)
        for parameter in self.matrices:
            parameter.grad_written = False
        self.all_written = False

    def refresh(self) -> None:
        """Update the bf16 copy if anything but AdamW has changed the weights."""
        changed = self.trainable and self.half_version != self.version.count
        if self.half is not None and self.weights is not None and changed:
            # without a temporary array, which would fragment the memory pool
            cast_into(self.half, self.weights)
            self.half_version = self.version.count


def arena_of(parameters: list[Any], kind: tuple[Any, ...]) -> Arena:
    """Return a new arena of this kind, also on another device. The parameters keep their values;
    quantized ones stay."""
    kept = [(p, p.data) for p in parameters if p.quantized is None]
    arena = Arena([p for p, _ in kept], *kind)
    for parameter, values in kept:
        if isinstance(values, np.ndarray):  # of the CPU, maybe to another device
            values = to_device(values.astype(parameter.dtype, copy=False), kind[0])
        parameter.data = values
    return arena
