"""Forget activations and compute them again in backward (Chen et al. 2016): less memory for more time.

    y = recompute(f, x)        the same y as f(x), and the same gradients, bit for bit

    forward    f runs unrecorded: what its ops would have kept is freed at once, only x stays
    backward   f runs again on x, recorded now; backward goes through that recording, and dx goes on from there

The parameters that f uses need no care: the recorded run finds them as leaves, so each op adds to their gradients
once, in the order in which it would have done without all this.

What a decoder keeps of every token in every layer (numbers; C the width, F that of the MLP, H heads, as many for keys):

    nothing forgotten   8 C + 2 F; without FlashAttention 9 C + 2 F and H T more, which at T = 1024 is most of it
    attention           6 C + 2 F: q, k and what attention saved are gone
    block               2 C: the residual stream, and what the last block still has to add to it

(The results of the norms and of SwiGLU are never kept: their backward makes them again on its way.)

The price is one more forward of the forgotten part, at most a third of a step (forward 1, backward 2).
"""

from collections.abc import Callable
from typing import Any

from ..device import Array
from .autograd import Function, no_grad, recording
from .tensor import Tensor


def recompute(f: Callable[..., Any], *inputs: Tensor) -> Any:
    """f(*inputs), a Tensor or a tuple of them, whose activations are computed again in backward.

    f must give the same bits again: no randomness, and nothing it reads may change before backward (of the inputs
    backward checks that). Inputs without a gradient: f runs as usual, for then nobody could start its backward.
    """
    if not any(x.requires_grad for x in inputs):
        return f(*inputs)
    return Recompute.apply(f, *inputs)


class Recompute(Function):
    @staticmethod
    def forward(ctx, f, *arrays):
        ctx.save(f, *arrays)
        with no_grad():
            out = f(*map(Tensor, arrays))
        return tuple(y.data for y in out) if isinstance(out, tuple) else out.data

    @staticmethod
    def backward(ctx, *gradients):
        f, *arrays = ctx.saved
        caught: list[Array | None] = []
        with recording(True):
            inputs = [Tensor(x, needed) for x, needed in zip(arrays, ctx.needs_grad[1:])]
            out = f(*Catch.apply(caught, *inputs))
            start = Start.apply(gradients, *(out if isinstance(out, tuple) else (out,)))
        del inputs, out  # what no op saved is freed before backward begins
        start.backward(start.data)
        return None, *caught


class Catch(Function):
    """x -> x. Its backward comes last of the recording and keeps the gradients of the inputs in a list.

    (Leaves would add them to zeros: one more pass, and -0 would become 0.)
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
    """The end of the recording, where its backward starts: hands each output the gradient that is known already."""

    @staticmethod
    def forward(ctx, gradients, *outputs):
        ctx.save(*gradients)
        return next(g for g in gradients if g is not None)  # an array of any shape will do

    @staticmethod
    def backward(ctx, _):
        return None, *ctx.saved
