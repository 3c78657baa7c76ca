"""AdamW over the arena, gradient clipping and the learning-rate schedule.

One kernel updates every parameter of the model; what changes from step to step (learning rate, bias corrections, clip
factor) reaches it in device arrays, so that a captured step can be replayed.
"""

import math

import numpy as np

from .config import UserError
from .device import Array, to_device
from .kernels._launch import zeros
from .kernels.adamw import adamw, adamw_hyper
from .kernels.grad_norm import grad_norm
from .model import Transformer


class AdamW:
    """AdamW (Loshchilov & Hutter 2019): decoupled weight decay on matrices, none on norms.

    owned: [(start, end), ...], the parts of the arena that are updated here; None: all of it. (ZeRO-1 in ddp.py.)
    m, v: the moments of the owned parts, one after the other.  t: steps done.  lr may be changed between steps.
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
        self.model, self.arena = model, model.arena
        self.lr, self.betas, self.eps, self.weight_decay, self.t = lr, betas, eps, weight_decay, 0
        weights = self.arena.weights
        self.owned = [(0, weights.size)] if owned is None else owned
        n = sum(end - start for start, end in self.owned)
        self.m, self.v = zeros(weights, n), zeros(weights, n)
        self._one = to_device(np.ones(1, np.float32), model.device)

    def step(self, factor_1: Array | None = None) -> None:
        """Update every parameter from its gradient, multiplied by factor_1 (a (1,) device array; see clip)."""
        self.apply(to_device(self.advance(), self.model.device), factor_1)

    def advance(self) -> np.ndarray:
        """The host's part of a step: count it. -> the numbers that the kernel needs this time, (3,) float32."""
        self.t += 1
        a = self.arena
        a.refresh()  # if weights were given since the last step: a captured one does not look
        a.half_version += a.half_version == a.version.count  # the kernel writes the bf16 copy too
        a.version.count += 1
        return adamw_hyper(self.lr, *self.betas, self.t)

    def apply(self, hyper_3: Array, factor_1: Array | None = None) -> None:
        """The device's part: one launch, nothing on the host. It can be captured in a CUDA graph."""
        first = 0
        for start, end in self.owned:
            self.update(start, end, first, hyper_3, self._one if factor_1 is None else factor_1)
            first += end - start

    def weights(self, start: int, end: int, first: int) -> Array:
        """The float32 weights of an owned part."""
        return self.arena.weights[start:end]

    def update(self, start: int, end: int, first: int, hyper_3: Array, factor_1: Array) -> None:
        """One owned part, elements [start, end) of the arena; its moments begin at `first`."""
        a, n = self.arena, end - start
        m, v = self.m[first : first + n], self.v[first : first + n]
        adamw(
            self.weights(start, end, first), a.grads[start:end], m, v, factor_1, hyper_3, min(max(a.n_decay - start, 0), n),
            *self.betas, self.eps, self.weight_decay, None if a.half is None else a.half[start:end],
        )  # fmt: skip

    def zero_grad(self) -> None:
        """All gradients of the arena = 0."""
        self.model.zero_grad()


def clip(model: Transformer, max_norm: float) -> tuple[Array, Array]:
    """-> (global gradient norm, factor that brings it down to max_norm), (1,) arrays on the device.

    Nothing is scaled here: hand the factor to AdamW.step. max_norm 0 means no clipping.
    """
    stats = grad_norm(model.arena.grads, max_norm)
    return stats[:1], stats[1:]


def learning_rate(step: int, steps: int, peak: float, warmup: int, min_ratio: float) -> float:
    """Linear warm-up over `warmup` steps, then half a cosine down to min_ratio * peak at the last. step counts from 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
