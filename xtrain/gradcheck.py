"""Is a backward right? Finite differences against autograd, in float64 on NumPy arrays.

    L(inputs) = sum of <c, output> over the outputs, c random. For a random direction v of one input x:
    (L(x + e v) - L(x - e v)) / 2e  =  <dL/dx, v> + O(e^2)

Left: the forward pass, twice. Right: the gradient from backward(). One number checks a whole gradient, because a wrong
element anywhere changes <dL/dx, v> for almost every v. e = 1e-5 balances the error e^2 of the formula against
the rounding 1e-16 / e of the subtraction; both stay under 1e-9 of the result.

    python -m xtrain.gradcheck              every op of functional.py and whole models
    python -m xtrain.gradcheck rmsnorm add  these

An op of your own, in three lines:

    from xtrain.gradcheck import check
    errors = check(MyOp.apply, [x, w])      # float64 arrays -> one relative error per input
    assert max(errors) < 1e-6
"""

import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from . import functional as F
from .autograd import Function, Tensor, no_grad
from .config import ModelConfig, UserError
from .kernels.cross_entropy import IGNORE, count_targets
from .kernels.rope import rope_tables
from .model import Transformer
from .nn import Module, Parameter

STEP = 1e-5  # e, relative to the size of an input
TOLERANCE = 1e-6
FLAT = 1e-4  # slopes below this share of the output count as zero: rounding alone makes 1e-11
EXAMPLES = 25  # shapes per op


# ----------------------------------------------------------------------------- one function
class _Inner(Function):
    """(outputs..., c...) -> sum of <c, output>: one number out of any outputs."""

    @staticmethod
    def forward(ctx, *outputs_and_c):
        n = len(outputs_and_c) // 2
        ctx.save(*outputs_and_c[n:])
        return np.array(sum(np.vdot(c, y) for y, c in zip(outputs_and_c, ctx.saved)))

    @staticmethod
    def backward(ctx, dL):
        return ctx.saved  # dL is 1: backward starts here


def check(
    f: Callable[..., Any], inputs: list[np.ndarray], seed: int = 0, step: float = STEP
) -> list[float]:
    """f(*tensors) -> Tensor or tuple of Tensors. inputs: float64 arrays. -> the relative error for each input.

    f is called several times with the same values and must give the same result. Backward must *add* to the
    gradient of an input: it starts from random numbers here.
    """
    rng = np.random.default_rng(seed)
    tensors = [Tensor(x.copy(), requires_grad=True) for x in inputs]
    outputs = _as_tuple(f(*tensors))
    weights = [np.asarray(rng.standard_normal(y.shape)).astype(y.dtype) for y in outputs]
    size = np.sqrt(sum(np.square(c * y.data).sum() for y, c in zip(outputs, weights)))
    before = [rng.standard_normal(x.shape) for x in inputs]
    for tensor, gradient in zip(tensors, before):
        tensor.grad = gradient.copy()
    _Inner.apply(*outputs, *weights).backward()
    gradients = [tensor.grad - gradient for tensor, gradient in zip(tensors, before)]

    def outputs_at(i, moved):
        with no_grad():
            values = [moved if j == i else x.copy() for j, x in enumerate(inputs)]
            return [y.data for y in _as_tuple(f(*map(Tensor, values)))]

    errors = []
    for i, x in enumerate(inputs):
        v = rng.standard_normal(x.shape) * (np.sqrt(np.square(x).mean()) or 1.0)
        up, down = outputs_at(i, x + step * v), outputs_at(i, x - step * v)
        numeric = [c * (y1 - y0) / (2 * step) for c, y1, y0 in zip(weights, up, down)]
        errors.append(_relative(numeric, [gradients[i] * v], FLAT * size))
    return errors


def _relative(numeric, analytic, floor):
    """The difference of two sums, relative to the size of what is added up."""
    difference = abs(sum(t.sum() for t in numeric) - sum(t.sum() for t in analytic))
    norms = [np.sqrt(sum(np.square(t).sum() for t in terms)) for terms in (numeric, analytic)]
    error = float(difference / max(*norms, floor, 1e-300))
    return np.inf if np.isnan(error) else error


def _as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


# ----------------------------------------------------------------------------- every op
# What a shape is drawn from: 1, odd, larger than a block of a kernel (or of a reference: 67 x 1030 logits).
SIZES = {
    "N": (1, 2, 5, 67), "C": (1, 2, 7, 300), "I": (1, 3, 33), "O": (1, 2, 65), "V": (1, 2, 37, 1030),
    "F": (1, 3, 257), "B": (1, 2, 3), "T": (1, 2, 5, 33), "past": (0, 3), "G": (1, 2, 3), "rep": (1, 2, 3),
    "R": (1, 2, 17), "pad": (0, 1, 5), "norm": (True, False), "given": (False, True), "causal": (True, False),
    "tied": (False, True),
}  # fmt: skip


class Draw(SimpleNamespace):
    """The sizes that were drawn, as attributes; and what ops need beside their differentiable inputs."""

    D = property(lambda self: 2 * self.R)  # head width
    H = property(lambda self: self.G * self.rep)  # query heads
    S = property(lambda self: self.T + self.past)  # keys
    BT = property(lambda self: self.B * self.T)

    def ids(self, n, below):
        return np.random.default_rng(n).integers(below, size=n)

    def targets(self, n, below):
        ids = self.ids(n, below)
        return np.where(ids % 3 == 0, IGNORE, ids)

    def rotary(self):
        """-> cos, sin, positions of all rows or None"""
        positions = self.ids(self.BT, self.T) if self.given else None
        return *rope_tables(self.D, self.T, 100.0), positions

    @functools.cached_property
    def model(self):
        shape = dict(vocab_size=11, dim=6, n_layers=2, n_heads=self.H, n_kv_heads=self.G)
        more = dict(head_dim=4, hidden_dim=5, max_seq_len=8)
        return Transformer(
            ModelConfig(**shape, **more, qk_norm=self.norm, tie_embeddings=self.tied)
        )


def _cross_entropy(d, logits):
    targets = d.targets(d.N, d.V)
    return F.cross_entropy(logits, targets, d.V, count_targets(targets))


def _qk_norm_rope(d, qkv, q_w=None, k_w=None):
    cos, sin, positions = d.rotary()
    return F.qk_norm_rope(qkv, q_w, k_w, cos, sin, d.H, d.G, d.T, 1e-6, positions)


def _rope(d, x):
    cos, sin, positions = d.rotary()
    return F.rope(x, cos, sin, positions, d.T)


def slots(module: Module, prefix: str = "") -> Iterator[tuple[str, Module, str]]:
    """(name, module, attribute) of every Parameter below."""
    for name, value in vars(module).items():
        if isinstance(value, Parameter):
            yield prefix + name, module, name
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(c for c in children if isinstance(c, Module)):
            yield from slots(
                child, f"{prefix}{name}.{i}." if child is not value else f"{prefix}{name}."
            )


def _transformer(d, **weights):
    """The loss with other tensors in the place of the parameters: in float64, which the arena is not."""
    before = [(module, attribute, getattr(module, attribute)) for _, module, attribute in d.places]
    for (_, module, attribute), weight in zip(d.places, weights.values()):
        setattr(module, attribute, weight)
    ids = d.ids(d.B * 5, 11).reshape(d.B, 5)
    loss = d.model.loss(ids, d.targets(ids.size, 11).reshape(ids.shape))
    for module, attribute, parameter in before:
        setattr(module, attribute, parameter)
    return loss
