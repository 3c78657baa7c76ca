"""The arena of ZeRO-3 (Rajbhandari et al. 2020): every rank keeps its share of each layer.

    unit        the matrices of one layer; or what lies before, between or behind the layers
                (embedding, head); or all norms. A range [start, end) of the arena that the ranks
                divide evenly.
    master      (n,) float32, this rank's shares of all units, one after the other
    summed      (s,) float32, the same of the gradients of layers
    buffers     the matrices of the layers are views into two buffers, in turn: those of layer i into
                buffer i % 2. So a layer is whole only while it computes, and while the one before
                or behind it computes. Their gradients are views into two more.
                All other units have a buffer of their own and are always whole.

The views never change, only what the buffers hold: the model's code, and what an op saves for its
backward, is that of any other arena. parallel/gathering.py gathers a layer into its buffer and sums
its gradients over the ranks.

Bytes of a rank, with R ranks, N parameters in layers, M outside and n in the largest layer:

    fp32     16 N / R + 12 M / R + 8 M + 16 n
    bf16     16 N / R + 12 M / R + 6 M + 12 n
"""

import itertools
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import Array, is_gpu, to_device, to_numpy, zeros_on
from ..errors import UserError
from ..kernels.cast import BFLOAT16
from .arena import ALIGN, Arena, arena_unit, view_of
from .tensor import Version

BUFFERS = 2  # one for the layer that computes, one for the next


@dataclass(frozen=True)
class Share:
    """Which share of the weights is kept: that of a rank among `world`."""

    rank: int
    world: int


@dataclass(eq=False, repr=False)
class Buffer:
    """Memory of the units that use it, one at a time.

    weights: bf16, or float32 as those of norms always.
    grads: float32, of the same size.
    holds: the unit whose weights are there; None: of none.
    """

    weights: Array
    grads: Array
    holds: "Unit | None" = None


@dataclass(eq=False, repr=False)
class Unit:
    """A range [start, end) of the arena that is gathered as a whole.

    parameters: modules.Parameter, in the order of the arena.
    is_layer: whether it shares its buffer with other layers.
    own_start, own_end: this rank's share of the range.
    first: index of own_start in master and in the moments.
    weights, grads: (end - start,) views into the buffer.
    master: (own_end - own_start,) view of the arena's master.
    summed: the same of the sums over the ranks of the gradients; of a unit that is always whole,
        this rank's share of grads.
    has_sum: whether summed holds a gradient of this step.
    gaps: ranges of grads that no matrix covers.
    version: counts assignments.
    assigned: checksum of the tensors that were assigned. Each rank has kept its share of them, so no
        comparison of weights shows whether they were the same on all ranks.
    """

    start: int
    end: int
    parameters: list[Any]
    is_layer: bool
    own_start: int
    own_end: int
    first: int
    buffer: Buffer
    weights: Array
    grads: Array
    master: Array
    summed: Array
    gaps: list[tuple[int, int]]
    version: Version
    has_sum: bool = False
    assigned: int = 0

    def check_gathered(self) -> None:
        """Raise UserError unless the weights are whole on this rank."""
        if self.buffer.holds is not self:
            raise UserError(
                "with --zero 3 each rank has a share of a layer's weights, which are whole only "
                "while the layer computes: read a checkpoint, or use --zero 1"
            )

    def assign(self, offset: int, shape: tuple[int, ...], values: Array) -> None:
        """Copy this rank's share of the values of a tensor to the master weights.

        offset: of the tensor in the arena.
        """
        if values.shape != shape:
            raise ValueError(f"a parameter of shape {shape} cannot hold data of {values.shape}")
        copy_share(self.master, self.own_start, self.own_end, offset, values)
        whole = np.ascontiguousarray(to_numpy(values)).reshape(-1)
        self.assigned = zlib.crc32(whole.view(np.uint8).data, self.assigned)
        self.buffer.holds = None
        self.version.count += 1

    def share_of(self, offset: int, size: int) -> Array:
        """Return what this rank owns of the master weights of a tensor, maybe nothing."""
        a = min(max(self.own_start, offset), self.own_end)
        b = max(min(self.own_end, offset + size), a)
        return self.master[a - self.own_start : b - self.own_start]

    def begin_gradients(self) -> None:
        """Mark the gradients as not written: the buffer may hold those of another layer."""
        for a, b in self.gaps:
            self.grads[a:b].fill(0)
        for parameter in self.parameters:
            parameter.grad_written = not parameter.decay

    def zero_unwritten_grads(self) -> None:
        """Zero the gradients that backward has not reached."""
        for parameter in self.parameters:
            parameter.zero_unwritten_grad()


def copy_share(own_n: Array, own_start: int, own_end: int, offset: int, values: Array) -> None:
    """Copy from values, which begin at `offset`, what lies in [own_start, own_end), to own (n,)."""
    a = max(own_start, offset)
    b = min(own_end, offset + values.size)
    if a >= b:
        return
    piece = values.reshape(-1)[a - offset : b - offset]
    if is_gpu(own_n) and not is_gpu(piece):
        piece = to_device(piece, "gpu")
    own_n[a - own_start : b - own_start] = piece


class ShardedArena(Arena):
    """Memory of all parameters, of which layers are divided among the ranks: see this file.

    groups: (is it a layer?, its matrices), in the order of the forward pass.
    vectors: all other parameters.
    units: in the order of the arena, the norms last.
    size: of the arena, as if it were whole.
    refresh_whole: None, or what gathers the units that are always whole (parallel/gathering.py).
    """

    weights = None  # they are in no place as a whole
    half = None

    def __init__(
        self,
        groups: Iterable[tuple[bool, list[Any]]],
        vectors: list[Any],
        device: str,
        bf16: bool,
        share: Share,
    ):
        self.kind = (device, bf16, share.world, True)
        self.share = share
        self.trainable = True
        self.version = Version()
        self.half_version = -1
        self.all_written = True
        self.refresh_whole: Any = None
        matrices = [group for group in groups if group[1]]
        ranges = _ranges(matrices + ([(False, vectors)] if vectors else []), share.world)
        self.matrices = [p for _, parameters in matrices for p in parameters]
        self.parameters = [*self.matrices, *vectors]
        self.size = ranges[-1].end
        self.n_decay = ranges[-1].start if vectors else self.size
        self._make_memory(ranges, device, BFLOAT16 if bf16 else np.float32)

    def _make_memory(self, ranges, device, matrix_dtype):
        """Allocate everything, and make the units."""
        rank, world = self.share.rank, self.share.world
        new = lambda n, dtype: Buffer(zeros_on(device, n, dtype), zeros_on(device, n, np.float32))
        layers = [r.end - r.start for r in ranges if r.is_layer]
        in_turn = [new(max(layers[i::BUFFERS]), matrix_dtype) for i in range(BUFFERS) if layers[i:]]
        self.master = zeros_on(device, self.size // world, np.float32)
        self.summed = zeros_on(device, sum(layers) // world, np.float32)
        self._grads = self.summed
        self.units = []
        turn = itertools.cycle(in_turn)
        first = 0
        first_summed = 0
        for r in ranges:
            n = r.end - r.start
            n_own = n // world
            own = rank * n_own
            if r.is_layer:
                buffer = next(turn)
                summed = self.summed[first_summed : first_summed + n_own]
                first_summed += n_own
            else:
                buffer = new(n, matrix_dtype if r.parameters[0].decay else np.float32)
                summed = buffer.grads[own : own + n_own]
            unit = Unit(
                start=r.start,
                end=r.end,
                parameters=r.parameters,
                is_layer=r.is_layer,
                own_start=r.start + own,
                own_end=r.start + own + n_own,
                first=first,
                buffer=buffer,
                weights=buffer.weights[:n],
                grads=buffer.grads[:n],
                master=self.master[first : first + n_own],
                summed=summed,
                gaps=_gaps(r),
                version=self.version,
            )
            first += n_own
            self.units.append(unit)
            self._make_views(unit, r.offsets)
        self.layers = [unit for unit in self.units if unit.is_layer]
        self.whole = [unit for unit in self.units if not unit.is_layer]

    def _make_views(self, unit, offsets):
        for parameter, offset in zip(unit.parameters, offsets):
            shape = parameter.declared_shape
            at = offset - unit.start
            parameter.offset = offset
            parameter.unit = unit
            parameter._data = view_of(unit.weights, at, shape)
            parameter.half = parameter._data if parameter.dtype == BFLOAT16 else None
            parameter._grad = view_of(unit.grads, at, shape)
            parameter.grad_written = True  # zeros
            parameter.version = self.version

    def assigned(self) -> np.ndarray:
        """Return Unit.assigned of all units, which must be the same on all ranks."""
        return np.array([unit.assigned for unit in self.units], np.uint32)

    def zero_unwritten_grads(self) -> None:
        """Zero the gradients not written since zero_grad, of the units that are always whole."""
        if not self.all_written:
            for unit in self.whole:
                unit.zero_unwritten_grads()
            self.all_written = True

    def zero_grad(self) -> None:
        """Set all gradients to 0: those of matrices by their flags."""
        for unit in self.units:
            unit.has_sum = False
        for unit in self.whole:
            unit.begin_gradients()
        self.all_written = False

    def refresh(self) -> None:
        """Gather what is always whole, if anything but AdamW has changed the weights."""
        if self.half_version != self.version.count and self.refresh_whole is not None:
            self.refresh_whole()
            self.half_version = self.version.count


@dataclass(frozen=True)
class _Range:
    """A range [start, end) of the arena, for one unit. offsets: of its parameters, in the arena."""

    is_layer: bool
    parameters: list[Any]
    offsets: list[int]
    start: int
    end: int


def _ranges(groups, world):
    """Return the range of each group of parameters, which `world` ranks can divide."""
    multiple = arena_unit(world)
    ranges = []
    start = 0
    for is_layer, parameters in groups:
        offset = start
        offsets = []
        for parameter in parameters:
            offsets.append(offset)
            offset += -(-math.prod(parameter.declared_shape) // ALIGN) * ALIGN
        end = -(-offset // multiple) * multiple
        ranges.append(_Range(is_layer, parameters, offsets, start, end))
        start = end
    return ranges


def _gaps(r):
    """Return the slices of a range that no matrix covers, counted from its start."""
    covered = [
        (offset - r.start, offset - r.start + math.prod(p.declared_shape))
        for p, offset in zip(r.parameters, r.offsets)
        if p.decay
    ]
    ends = [0, *(b for _, b in covered)]
    starts = [*(a for a, _ in covered), r.end - r.start]
    return [(a, b) for a, b in zip(ends, starts) if a < b]


def groups_of_layers(matrices: list[Any], layer_of: dict[Any, int]) -> list[tuple[bool, list[Any]]]:
    """Return the matrices in runs of one layer, or of none: (is it a layer?, its matrices).

    layer_of: the layer of each matrix that is in one.
    """
    groups: list[tuple[bool, list[Any]]] = []
    last: Any = ()
    for p in matrices:
        layer = layer_of.get(p)
        if layer != last:
            groups.append((layer is not None, []))
        groups[-1][1].append(p)
        last = layer
    return groups
