"""AdamW and Muon over the arena, gradient clipping and the learning-rate schedule.

One kernel updates every parameter of the model. What changes from step to step (learning rate, bias corrections, clip
factor) is passed in device arrays, so that a captured step can be replayed.
"""

import math
from typing import Any

import numpy as np

from ..device import Array, to_device
from ..errors import UserError
from ..kernels.adamw import adamw, adamw_hyper
from ..kernels.cast import BFLOAT16
from ..kernels.grad_norm import grad_norm
from ..kernels.muon import momentum, muon_update, orthogonalize
from ..kernels.runtime.launch import empty, zeros
from .model import Transformer
from .modules import ALIGN, Parameter


class AdamW:
    """AdamW (Loshchilov & Hutter 2019): decoupled weight decay on matrices, none on norms. Frozen parameters, those with
    requires_grad False, do not change.

    To write another optimizer, derive a class and override `update`, which gets one slice of the arena at a time. Its state in m
    and v is saved in checkpoints. lessons/howto/change_the_model.md has Lion and a small Muon.

    owned: [(start, end), ...], the slices of the arena that are updated here; None: all of it. (ZeRO-1: parallel/zero.py.)
    m, v: the moments of the owned slices, concatenated.  t: number of steps so far.  lr may be changed between steps.
    Raises UserError when a value is out of range, a parameter is not in the model's arena, or the model has no gradients.
    """

    def __init__(
        self,
        model: Transformer,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        owned: list[tuple[int, int]] | None = None,
    ):
        for name, ok in (
            ("lr", 0 <= lr < math.inf),
            ("betas", all(0 <= b < 1 for b in betas)),
            ("eps", eps > 0),
            ("weight_decay", weight_decay >= 0),
        ):
            if not ok:
                raise UserError(f"AdamW: {name} is out of range")
        self.model, self.arena, device = model, model.arena, model.arena.kind[0]
        self.arena.need_grads()
        if any(p.version is not self.arena.version for _, p in model.storage()):
            raise UserError(
                "a parameter is not in the model's arena: call model.renew_arena() after replacing modules, then make AdamW"
            )
        self.lr, self.betas, self.eps, self.weight_decay, self.t = lr, betas, eps, weight_decay, 0
        weights = self.arena.weights
        self.owned = [(0, weights.size)] if owned is None else owned
        n = sum(end - start for start, end in self.owned)
        self.m, self.v = zeros(weights, n), zeros(weights, n)
        self._one = to_device(np.ones(1, np.float32), device)

    def step(self, factor_1: Array | None = None) -> None:
        """Update every parameter from its gradient, multiplied by factor_1 (a (1,) device array; see clip)."""
        self.apply(to_device(self.advance(), self.arena.kind[0]), factor_1)

    def advance(self) -> np.ndarray:
        """The host's part of a step: count it. -> the kernel's numbers for this step, (3,) float32: see `update`."""
        self.t += 1
        a = self.arena
        if self.model.arena is not a:
            raise UserError("the model's arena was replaced after AdamW was made: make AdamW last")
        a.refresh()  # in case weights were assigned since the last step: a captured step does not check
        a.half_version += a.half_version == a.version.count  # the kernel writes the bf16 copy too
        a.version.count += 1
        return adamw_hyper(self.lr, *self.betas, self.t)

    def apply(self, hyper_3: Array, factor_1: Array | None = None) -> None:
        """The device's part: one launch and no work on the host, so it can be captured in a CUDA graph."""
        first = 0
        for start, end in self.owned:
            self.update_trained(start, end, first, hyper_3, factor_1)
            first += end - start

    def excludes(self, parameter: Parameter) -> bool:
        """Whether `update` must leave this parameter unchanged."""
        return not parameter.requires_grad

    def update_trained(
        self, start: int, end: int, first: int, hyper_3: Array, factor_1: Array | None
    ) -> None:
        """`update` of [start, end) without the excluded parameters: one call if there are none."""
        factor_1 = self._one if factor_1 is None else factor_1
        excluded = [p for _, p in self.model.storage() if self.excludes(p)]
        at = start
        for p in sorted(excluded, key=lambda p: p.offset):
            if p.offset >= end:
                break
            if at < p.offset:
                self.update(at, p.offset, first + at - start, hyper_3, factor_1)
            at = max(at, p.offset + -(-p.size // ALIGN) * ALIGN)
        if at < end:
            self.update(at, end, first + at - start, hyper_3, factor_1)

    def weights(self, start: int, end: int, first: int) -> Array:
        """The float32 weights of an owned slice, whose moments begin at `first`."""
        return self.arena.weights[start:end]

    def update(self, start: int, end: int, first: int, hyper_3: Array, factor_1: Array) -> None:
        """Update elements [start, end) of the arena; their moments begin at `first`.

        hyper_3: [lr, 1 - beta1^t, sqrt(1 - beta2^t)].  factor_1: multiplies the gradient (clipping); if it is NaN, nothing
        changes. Both are on the device.
        """
        a, n = self.arena, end - start
        m, v = self.m[first : first + n], self.v[first : first + n]
        adamw(
            self.weights(start, end, first), a.grads[start:end], m, v, factor_1, hyper_3, min(max(a.n_decay - start, 0), n),
            *self.betas, self.eps, self.weight_decay, None if a.half is None else a.half[start:end],
        )  # fmt: skip

    def zero_grad(self) -> None:
        """All gradients of the arena = 0."""
        self.model.zero_grad()


class Muon(AdamW):
    """Muon (kernels/muon.py) for the matrices of the blocks, AdamW for everything else: embedding, head, norms, biases.

    Packed storage is taken apart: q, k, v, gate and up are orthogonalised each as its own matrix. Each is a map of its own, with
    its own output space; orthogonalised together, their rows would be forced to be orthogonal to each other, and the update of a
    tensor would depend on what it is packed with. Matrices of one shape, of all layers, are one batch.
    Learning rate and weight decay are shared with AdamW: the update has about the size of AdamW's.
    LoRA's factors stay with AdamW: only their product changes the model, and orthogonal factors do not make it orthogonal.
    Newton-Schulz computes in bf16 on a GPU, in float32 on a CPU. The momentum is in m; v of these matrices stays zero.

    momentum: weight of the old mean.  Other options: those of AdamW. Raises UserError if no matrix is left for Muon.
    Freeze parameters before making it.
    """

    def __init__(self, model: Transformer, lr: float, momentum: float = 0.95, **options: Any):
        super().__init__(model, lr, **options)
        if not 0 <= momentum < 1:
            raise UserError("Muon: momentum is out of range")
        if self.owned != [(0, self.m.size)]:
            raise UserError("Muon needs whole matrices: use AdamW where the state is divided")
        self.momentum = momentum
        self.matrices = {
            p for name, p in model.storage() if "layers." in name and self._is_matrix(p)
        }
        shapes: dict[tuple[int, int], list[int]] = {}  # (rows, columns) -> offsets in the arena
        for p in self.matrices:
            row, columns = 0, p.declared_shape[1]
            for rows in p.parts.values():
                shapes.setdefault((rows, columns), []).append(p.offset + row * columns)
                row += rows
        if not shapes:
            raise UserError(
                "Muon found no trainable matrix in the model's blocks (LoRA's stay with AdamW): use AdamW"
            )
        device = self.arena.kind[0]
        self.batches = [  # in the order of the arena: the same on all ranks
            (shape, to_device(np.array(sorted(firsts), np.int64), device))
            for shape, firsts in sorted(shapes.items())
        ]

    @staticmethod
    def _is_matrix(p):
        lora = any("lora" in name for name in p.parts)
        return len(p.declared_shape) == 2 and p.requires_grad and not lora

    def excludes(self, parameter: Parameter) -> bool:
        """The matrices of Muon too."""
        return super().excludes(parameter) or parameter in self.matrices

    def advance(self) -> np.ndarray:
        """As AdamW.advance."""
        if not all(p.requires_grad for p in self.matrices):
            raise UserError("a matrix was frozen after Muon was made: make Muon last")
        return super().advance()

    def apply(self, hyper_3: Array, factor_1: Array | None = None) -> None:
        """As AdamW.apply: no work on the host."""
        super().apply(hyper_3, factor_1)
        factor_1 = self._one if factor_1 is None else factor_1
        arena, dtype = self.arena, np.float32 if self.arena.kind[0] == "cpu" else BFLOAT16
        for shape, first_B in self.batches:
            x_BRC = empty(self.m, (len(first_B), *shape), dtype)
            momentum(x_BRC, self.m, arena.grads, first_B, factor_1, self.momentum)
            x_BRC = orthogonalize(x_BRC)
            muon_update(
                arena.weights, x_BRC, first_B, factor_1, hyper_3, self.weight_decay, arena.half
            )


def clip(model: Transformer, max_norm: float) -> tuple[Array, Array]:
    """-> (global gradient norm, factor that scales it down to max_norm), (1,) arrays on the device.

    Nothing is scaled here: pass the factor to AdamW.step. max_norm 0 means no clipping. Raises UserError without gradients.
    """
    model.arena.need_grads()
    stats = grad_norm(model.arena.grads, max_norm)
    return stats[:1], stats[1:]


def learning_rate(step: int, steps: int, peak: float, warmup: int, min_ratio: float) -> float:
    """Linear warm-up over `warmup` steps, then half a cosine down to min_ratio * peak at the last step. step counts from 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
