"""AdamW and Muon over the arena, a moving average, gradient clipping, learning-rate schedules.

One kernel updates every parameter of the model. What changes from step to step (learning rate, bias
corrections, clip factor) is passed in device arrays, so that a captured step can be replayed.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import Array, to_device
from ..errors import UserError
from ..kernels.adamw import adamw, adamw_hyper
from ..kernels.cast import BFLOAT16
from ..kernels.grad_norm import grad_norm
from ..kernels.moving_average import averaging_rest, moving_average
from ..kernels.muon import momentum, muon_update, orthogonalize
from ..kernels.runtime.launch import empty, zeros
from .arena import ALIGN
from .model import Transformer
from .modules import Module, Parameter
from .sharded_arena import copy_share
from .tensor import Tensor


@dataclass(frozen=True)
class Group:
    """A parameter group: what its parameters have of their own.

    rate: its learning rate, as a multiple of the optimizer's.
    decay: (weight decay of all its parameters,); (): the optimizer's, of its matrices.
    """

    rate: float
    decay: tuple[float, ...]


class AdamW:
    """AdamW (Loshchilov & Hutter 2019): decoupled weight decay on matrices, none on norms.

    Frozen parameters, those with requires_grad False, do not change. To write another optimizer,
    derive a class and override `update`, which gets one slice of the arena at a time. Its state in
    m and v is saved in checkpoints. lessons/howto/change_the_model.md has Lion and a small Muon.

    Raises UserError when a value is out of range, a parameter is not in the model's arena, or the
    model has no gradients.

    owned: [(start, end), ...], the slices of the arena that are updated here; None: all of it.
        (ZeRO-1: parallel/zero.py.)
    m, v: the moments of the owned slices, concatenated.
    t: number of steps so far.
    lr: may be changed between steps.
    groups: [{"params": [...], "lr": 1e-4, "weight_decay": 0.0}, ...], with other values for some
        parameters, of model.storage() or model.named_parameters(); lr or weight_decay may be
        missing. A group's lr stays the same multiple of `lr` when that changes. Each parameter in
        a group is updated by a launch of its own.
    ema_decay: 0, or the decay of a moving average of the weights (kernels/moving_average.py).
    ema: that average of the owned slices, float32, concatenated like m; None without. Skipped steps
        do not change it.
    """

    def __init__(
        self,
        model: Transformer,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        owned: list[tuple[int, int]] | None = None,
        ema_decay: float = 0.0,
        groups: Iterable[dict[str, Any]] = (),
    ):
        if not isinstance(model, Module):
            raise UserError(
                f"an optimizer needs the model itself, got {type(model).__name__}: give parameter "
                "groups with groups=[{'params': [...], 'lr': ...}]"
            )
        for name, ok in (
            ("lr", 0 <= lr < math.inf),
            ("betas", all(0 <= b < 1 for b in betas)),
            ("eps", eps > 0),
            ("weight_decay", weight_decay >= 0),
            ("ema_decay", 0 <= ema_decay < 1),
        ):
            if not ok:
                raise UserError(f"AdamW: {name} is out of range")
        self.model = model
        self.arena = model.arena
        device = model.arena.kind[0]
        self.arena.need_grads()
        if any(p.version is not self.arena.version for _, p in model.storage()):
            raise UserError(
                "a parameter is not in the model's arena: call model.renew_arena() after replacing "
                "modules, then make AdamW"
            )
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.t = 0
        like = self.arena.grads
        self.owned = [(0, like.size)] if owned is None else owned
        n = sum(end - start for start, end in self.owned)
        self.m = zeros(like, n)
        self.v = zeros(like, n)
        self.ema_decay = ema_decay
        self.ema: Array | None = zeros(like, n) if ema_decay else None
        self._one = to_device(np.ones(1, np.float32), device)
        self.group_of = groups_of(model, groups, lr)  # of each parameter that is in one
        self.groups = list(dict.fromkeys(self.group_of.values()))
        if type(self).update is not AdamW.update and any(group.decay for group in self.groups):
            raise UserError(
                f"{type(self).__name__}.update decides the weight decay: leave weight_decay out of "
                "the groups"
            )
        self.hyper_of: dict[Group, Array] = {}  # in this step

    def step(self, factor_1: Array | None = None) -> None:
        """Update every parameter from its gradient, multiplied by factor_1.

        factor_1: a (1,) device array, see clip.
        """
        self.apply(to_device(self.advance(), self.arena.kind[0]), factor_1)

    def advance(self) -> np.ndarray:
        """Count the step on the host. Return the kernels' numbers for it, float32.

        They are (3,), see `update`, then three for each group, and with a moving average a last
        one, see `apply`.
        """
        a = self.arena
        if self.model.arena is not a:
            raise UserError("the model's arena was replaced after AdamW was made: make AdamW last")
        # in case weights were assigned since the last step: a captured step does not check
        a.refresh()
        a.half_version += a.half_version == a.version.count  # the kernel writes the bf16 copy too
        a.version.count += 1
        if self.t == 0:
            self.start_average()
        self.t += 1
        rates = [self.lr, *(self.lr * group.rate for group in self.groups)]
        hyper = [adamw_hyper(rate, *self.betas, self.t) for rate in rates]
        if self.ema is not None:
            hyper.append(np.array([averaging_rest(self.ema_decay, self.t - 1)], np.float32))
        return np.concatenate(hyper)

    @property
    def hyper_size(self) -> int:
        """Return how many numbers `advance` returns."""
        return 3 + 3 * len(self.groups) + (self.ema is not None)

    def start_average(self) -> None:
        """Set the moving average, if there is one, to the weights, before the first step."""
        if self.ema is not None:
            for start, end, first in self.owned_at():
                self.ema[first : first + end - start] = self.weights(start, end, first)

    def apply(self, hyper: Array, factor_1: Array | None = None) -> None:
        """Update on the device: no work on the host, so it can be captured in a CUDA graph.

        In fp8 training also compute the scales of the next step.

        hyper: `advance()`, on the device; the last number is 1 - decay of the moving average in
            this step, if there is one.
        """
        if factor_1 is None:
            factor_1 = self._one
        self.hyper_of = {x: hyper[3 + 3 * i : 6 + 3 * i] for i, x in enumerate(self.groups)}
        self.update_owned(hyper[:3], factor_1)
        if self.ema is not None:
            for start, end, first in self.owned_at():
                e_n = self.ema[first : first + end - start]
                moving_average(e_n, self.weights(start, end, first), factor_1, hyper[-1:])
        if self.model.fp8 is not None:
            self.model.fp8.update()

    def owned_at(self) -> Iterator[tuple[int, int, int]]:
        """Return (start, end, first) of each owned slice.

        first: the index of its start in m, v and ema.
        """
        first = 0
        for start, end in self.owned:
            yield start, end, first
            first += end - start

    def update_owned(self, hyper_3: Array, factor_1: Array) -> None:
        """Update the owned slices: one launch each if nothing is excluded or in a group."""
        excluded = self.excluded()
        for start, end, first in self.owned_at():
            self.update_trained(start, end, first, hyper_3, factor_1, excluded)

    def excludes(self, parameter: Parameter) -> bool:
        """Return whether `update` must leave this parameter unchanged."""
        return not parameter.requires_grad

    def excluded(self) -> list[Parameter]:
        """Return the parameters that `update` must leave unchanged, and those in groups.

        They are in the arena's order.
        """
        parameters = [p for _, p in self.model.storage() if p in self.group_of or self.excludes(p)]
        return sorted(parameters, key=lambda p: p.offset)

    def update_trained(
        self,
        start: int,
        end: int,
        first: int,
        hyper_3: Array,
        factor_1: Array,
        excluded: list[Parameter],
    ) -> None:
        """Call `update` for [start, end) without the excluded, and for each parameter in a group.

        If there are none, call it once.
        """
        at = start
        for p in excluded:
            if p.offset >= end:
                break
            if at < p.offset:
                self.update(at, p.offset, first + at - start, hyper_3, factor_1)
            at = max(at, p.offset + -(-p.size // ALIGN) * ALIGN)
            a = max(start, p.offset)
            b = min(end, p.offset + p.size)
            if a < b and p in self.group_of and not self.excludes(p):
                group = self.group_of[p]
                at_first = first + a - start
                self.update(a, b, at_first, self.hyper_of[group], factor_1, *group.decay)
        if at < end:
            self.update(at, end, first + at - start, hyper_3, factor_1)

    def weights(self, start: int, end: int, first: int) -> Array:
        """Return the float32 weights of an owned slice, whose moments begin at `first`."""
        array, as_moments = self.owned_weights()
        at = first if as_moments else start
        return array[at : at + end - start]

    def owned_weights(self) -> tuple[Array, bool]:
        """Return the float32 weights of the owned slices, and whether they are concatenated.

        Concatenated like m, or as in the arena.
        """
        return self.arena.weights, False

    def gradients(self, start: int, end: int, first: int) -> Array:
        """Return the gradients of a part of an owned slice, whose moments begin at `first`."""
        return self.arena.grads[start:end]

    def assign_state(self, name: str, start: int, values_n: np.ndarray) -> None:
        """Set m, v or ema of what is owned of [start, start + n) of the arena. name: of the
        array."""
        own = getattr(self, name)
        for own_start, own_end, first in self.owned_at():
            copy_share(
                own[first : first + own_end - own_start], own_start, own_end, start, values_n
            )

    def update(
        self,
        start: int,
        end: int,
        first: int,
        hyper_3: Array,
        factor_1: Array,
        weight_decay: float | None = None,
    ) -> None:
        """Update elements [start, end) of the arena; their moments begin at `first`.

        hyper_3: [lr, 1 - beta1^t, sqrt(1 - beta2^t)], on the device.
        factor_1: multiplies the gradient (clipping), on the device; if it is NaN, nothing changes.
        weight_decay: a group's, of all its elements; None: the optimizer's, of matrices.
        """
        a = self.arena
        n = end - start
        n_decay = n
        if weight_decay is None:
            weight_decay = self.weight_decay
            n_decay = min(max(a.n_decay - start, 0), n)
        half = None
        if a.half is not None:
            half = a.half[start:end]
        adamw(
            self.weights(start, end, first),
            self.gradients(start, end, first),
            self.m[first : first + n],
            self.v[first : first + n],
            factor_1,
            hyper_3,
            n_decay,
            *self.betas,
            self.eps,
            weight_decay,
            half,
        )

    def zero_grad(self) -> None:
        """Set all gradients of the arena to 0."""
        self.model.zero_grad()


class Muon(AdamW):
    """Muon (kernels/muon.py) for the matrices of the blocks, AdamW for everything else.

    Packed storage is taken apart: q, k, v, gate and up are orthogonalised each as its own matrix.
    Each is a map of its own, with its own output space; orthogonalised together, their rows would
    be forced to be orthogonal to each other, and the update of a tensor would depend on what it is
    packed with. Matrices of one shape, of all layers, are one batch.
    Learning rate and weight decay are shared with AdamW: the update has about the size of AdamW's.
    LoRA's factors stay with AdamW: only their product changes the model, and orthogonal factors do
    not make it orthogonal.
    Newton-Schulz computes in bf16 on a GPU, in float32 on a CPU. The momentum is in m; v of these
    matrices stays zero.
    Raises UserError if no matrix is left for Muon. Freeze parameters before making it.

    momentum: weight of the old mean.
    Other options: those of AdamW; with `owned`, which must not divide a matrix, those inside are
    updated.
    """

    def __init__(self, model: Transformer, lr: float, momentum: float = 0.95, **options: Any):
        super().__init__(model, lr=lr, **options)
        if not 0 <= momentum < 1:
            raise UserError("Muon: momentum is out of range")
        self.momentum = momentum
        self.matrices = muon_matrices(model)
        if not self.matrices:
            raise UserError(
                "Muon found no trainable matrix in the model's blocks (LoRA's stay with AdamW): "
                "use AdamW"
            )
        if self.matrices & self.group_of.keys():
            raise UserError(
                "Muon updates the matrices of the blocks with one learning rate and weight decay: "
                "leave them out of the groups"
            )
        # (rows, columns) -> of each matrix its offsets in the arena and in the owned slices
        shapes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for p in self.matrices:
            for offset, rows, columns in parts_of(p):
                for start, end, first in self.owned_at():
                    if start <= offset < end:
                        at = offset, first + offset - start
                        shapes.setdefault((rows, columns), []).append(at)
        on_device = lambda offsets: to_device(np.array(offsets, np.int64), self.arena.kind[0])
        self.batches = [  # in the order of the arena: the same on all ranks
            (shape, *(on_device(column) for column in zip(*sorted(offsets))))
            for shape, offsets in sorted(shapes.items())
        ]

    def excludes(self, parameter: Parameter) -> bool:
        """Return True for the matrices of Muon, too."""
        return super().excludes(parameter) or parameter in self.matrices

    def advance(self) -> np.ndarray:
        """Do AdamW.advance."""
        if not all(p.requires_grad for p in self.matrices):
            raise UserError("a matrix was frozen after Muon was made: make Muon last")
        return super().advance()

    def update_owned(self, hyper_3: Array, factor_1: Array) -> None:
        """Update the matrices, then do AdamW.update_owned."""
        arena = self.arena
        dtype = np.float32 if self.arena.kind[0] == "cpu" else BFLOAT16
        for shape, arena_B, state_B in self.batches:
            x_BRC = empty(self.m, (arena_B.size, *shape), dtype)
            momentum(x_BRC, self.m, arena.grads, state_B, arena_B, factor_1, self.momentum)
            x_BRC = orthogonalize(x_BRC)
            w_n, as_moments = self.owned_weights()
            weight_B = state_B if as_moments else arena_B
            offsets = (weight_B, arena_B)
            muon_update(w_n, x_BRC, *offsets, factor_1, hyper_3, self.weight_decay, arena.half)
        super().update_owned(hyper_3, factor_1)


def groups_of(model: Module, groups: Iterable[dict[str, Any]], lr: float) -> dict[Parameter, Group]:
    """Return the group of each parameter that is in one. Raises UserError. See AdamW."""
    group_of: dict[Parameter, Group] = {}
    stored = {p for _, p in model.storage()}
    for options in groups:
        if not {"params"} <= options.keys() <= {"params", "lr", "weight_decay"}:
            raise UserError(
                f"a parameter group has {', '.join(options)}: give params, and lr or weight_decay"
            )
        params = options["params"]
        numbers = [options[name] for name in ("lr", "weight_decay") if name in options]
        if not all(0 <= x < math.inf for x in numbers):
            raise UserError("a parameter group: lr or weight_decay is out of range")
        rate = 1.0
        if "lr" in options:
            if not lr:
                raise UserError("a group's lr is a multiple of the optimizer's: give one above 0")
            rate = options["lr"] / lr
        group = Group(rate, tuple(options[x] for x in ("weight_decay",) if x in options))
        rows: dict[Parameter, int] = {}  # that the group has of each
        for x in [params] if isinstance(params, Tensor) else params:
            tensor = x[1] if isinstance(x, tuple) else x  # (name, tensor)
            parameter = getattr(tensor, "parameter", tensor)  # that holds it
            if not isinstance(parameter, Parameter) or parameter not in stored:
                raise UserError(
                    f"a parameter group holds {type(tensor).__name__}: give tensors of "
                    "model.storage() or model.named_parameters()"
                )
            rows[parameter] = rows.get(parameter, 0) + tensor.shape[0]
        for parameter, n in rows.items():
            if n < sum(parameter.parts.values()):
                raise UserError(
                    f"{', '.join(parameter.parts)} are one parameter: give all to one group"
                )
            if parameter in group_of:
                raise UserError(f"{', '.join(parameter.parts)}: a parameter is in two groups")
            group_of[parameter] = group
    return group_of


OPTIMIZERS: dict[str, type[AdamW]] = {"adamw": AdamW, "muon": Muon}  # --optimizer


def muon_matrices(model: Transformer) -> set[Parameter]:
    """Return the parameters that Muon updates.

    These are the trainable matrices of the blocks, but not LoRA's factors.
    """
    return {
        p
        for name, p in model.storage()
        if "layers." in name
        and len(p.declared_shape) == 2
        and p.requires_grad
        and not any("lora" in part for part in p.parts)
    }


def parts_of(parameter: Parameter) -> list[tuple[int, int, int]]:
    """Return (offset in the arena, rows, columns) of each matrix packed in a parameter."""
    matrices = []
    columns = parameter.declared_shape[1]
    row = 0
    for rows in parameter.parts.values():
        matrices.append((parameter.offset + row * columns, rows, columns))
        row += rows
    return matrices


def clip(model: Transformer, max_norm: float) -> tuple[Array, Array]:
    """Return (global gradient norm, factor that scales it to max_norm), (1,) device arrays.

    Nothing is scaled here: pass the factor to AdamW.step. Raises UserError without gradients.

    max_norm: 0: no clipping.
    """
    model.arena.need_grads()
    stats = grad_norm(model.arena.grads, max_norm)
    return stats[:1], stats[1:]


@dataclass(frozen=True)
class Decay:
    """How the learning rate decays.

    A fraction less than 1 is WSD: warm-up, stable, decay (Hu et al. 2024, MiniCPM). Up to the decay
    nothing depends on the number of steps, so one long run has a checkpoint from which a run of any
    length can be finished. Hägele et al. 2024 ("Scaling laws and compute-optimal training beyond
    fixed training durations") find a fifth of the steps and 1 - sqrt to reach cosine's loss.

    fraction: of all steps, the last ones, in which it decays; 1: all steps after the warm-up.
    """

    fraction: float = 1.0
    shape: str = "cosine"


DECAY_SHAPES: dict[str, Callable[[float], float]] = {  # progress of the decay, 0 to 1 -> 1 to 0
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "linear": lambda progress: 1 - progress,
}
COSINE = Decay()


def learning_rate(
    step: int, steps: int, peak: float, warmup: int, min_ratio: float, decay: Decay = COSINE
) -> float:
    """Return the rate of a step: a linear warm-up, then down to min_ratio * peak as `decay` says.

    step: counts from 0.
    warmup: its number of steps. The last step has min_ratio * peak.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    last = steps - 1
    if decay.fraction < 1:
        start = max(warmup, last - math.floor(decay.fraction * steps))
    else:
        start = warmup
    progress = min(1.0, max(0.0, (step - start) / max(1, last - start)))
    return peak * (min_ratio + (1 - min_ratio) * DECAY_SHAPES[decay.shape](progress))
