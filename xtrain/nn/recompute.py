"""Activation checkpointing (Chen et al. 2016): backward recomputes activations.

    y = recompute(f, x)        the same y as f(x), and the same gradients, bit for bit

    forward    f runs without recording: arrays that its ops would have saved are freed at once,
               only x is kept
    backward   f runs again on x, recorded this time; backward runs through that recording and
               returns dx

The parameters that f uses need no special treatment. The recorded run finds them as leaves, so each
op adds to their gradients once, in the same order as without checkpointing.

Numbers that a decoder saves per token and layer (C: width, F: MLP width, H query and key heads):

    none        8 C + 2 F; without FlashAttention 9 C + 2 F + H T, and at T = 1024 the last term is
                the largest
    attention   6 C + 2 F: without q, k and what attention saves
    block       2 C: the residual stream and the branch output that still has to be added to it

(The results of the norms and of SwiGLU are never saved: backward recomputes them in its kernels.)

Less memory costs time: one more forward of the recomputed part, at most a third of a step (forward
1, backward 2).
"""

import functools
from collections.abc import Callable
from typing import Any

from ..device import Array
from ..kernels.runtime.invariance import batch_invariant, is_batch_invariant
from .autograd import Function
from .mode import recording
from .router_losses import RouterLosses, router_losses
from .tensor import Tensor, as_tuple


def recompute(f: Callable[..., Any], *inputs: Tensor) -> Any:
    """Return f(*inputs), a Tensor or a tuple; backward computes its activations again.

    f must give the same bits again: no randomness, and nothing it reads may change before backward
    (backward checks that for the inputs). If no input needs a gradient, f runs as usual, because no
    gradient would reach its backward.
    """
    if not any(x.requires_grad for x in inputs):
        return f(*inputs)
    losses = router_losses()
    if losses is None:
        return Recompute.apply(f, *inputs)
    counts: list[Array] = []
    again = functools.partial(_with_terms, f, losses, counts)
    results = as_tuple(Recompute.apply(again, *inputs))
    losses.counts += counts  # of the run that has ended: backward's run adds nothing
    n = len(results) - (len(counts) if losses.has_terms() else 0)
    losses.terms += results[n:]
    return results[0] if n == 1 else results[:n]


def _with_terms(f, losses, counts, *inputs):
    """Return what f returns, then the terms of the loss that it collects, one for each of counts."""
    own = RouterLosses(losses.balance, losses.z)
    with own.collected():
        out = as_tuple(f(*inputs))
    counts += own.counts
    return (*out, *own.terms)


class Recompute(Function):
    """f without recording; backward records f and runs backward through the recording."""

    @staticmethod
    def forward(ctx, f, *arrays):
        ctx.save(f, is_batch_invariant(), *arrays)
        with recording(False, again=True):
            out = f(*map(Tensor, arrays))
        if isinstance(out, tuple):
            return tuple(y.data for y in out)
        return out.data

    @staticmethod
    def backward(ctx, *gradients):
        f, invariant, *arrays = ctx.saved
        caught: list[Array | None] = []
        with recording(True), batch_invariant(invariant):
            inputs = [Tensor(x, needed) for x, needed in zip(arrays, ctx.needs_grad[1:])]
            out = f(*Catch.apply(caught, *inputs))
            start = Start.apply(gradients, *as_tuple(out))
        del inputs, out  # what no op has saved is freed before backward starts
        start.backward(start.data)
        return None, *caught


class Catch(Function):
    """x -> x. Its backward runs last in the recording: it appends the inputs' gradients to a list.

    (As gradients of leaves they would be copied: one more pass over memory.)
    """

    @staticmethod
    def forward(ctx, caught, *arrays):
        ctx.save(caught)
        return arrays

    @staticmethod
    def backward(ctx, *gradients):
        ctx.saved[0].extend(gradients)
        return (None,) * (1 + len(gradients))


class Start(Function):
    """The end of the recording, where backward starts: passes each output its known gradient."""

    @staticmethod
    def forward(ctx, gradients, *outputs):
        ctx.save(*gradients)
        return next(g for g in gradients if g is not None)  # an array of any shape will do

    @staticmethod
    def backward(ctx, _):
        return None, *ctx.saved
