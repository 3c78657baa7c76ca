"""Losses and softmax as PyTorch ops: the functions below; see ops.py."""

import math

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from ..kernels import cross_entropy as _cross_entropy
from ..kernels import elementwise as _elementwise
from ..kernels import linear_cross_entropy as _linear_cross_entropy
from ..kernels import softmax as _softmax
from ..kernels.runtime.launch import check, empty, empty_like
from .ops import autocast, check_axes, check_shape, has_gradient, new_like, rows_of, wide
from .register import call, register_op


# ----------------------------------------------------------------------------- linear cross-entropy
def _check_linear(x, weight, targets):
    check_shape("linear_cross_entropy", "weight", weight, (None, x.shape[1]))
    check_shape("linear_cross_entropy", "targets", targets, x.shape[:1])


def _linear_fake(x, weight, targets, inv_count, want_dx, want_dweight, rows):
    _check_linear(x, weight, targets)
    dx = new_like(x, x.shape if want_dx else 0)
    return new_like(x, (), wide(x)), dx, new_like(weight, weight.shape if want_dweight else 0)


def _linear_forward(x, weight, targets, inv_count, want_dx, want_dweight, rows):
    _check_linear(x, weight, targets)
    if inv_count is None:
        inv_count = _cross_entropy.count_targets(targets)
    if not rows:
        rows = max(_linear_cross_entropy.ROWS, x.shape[1] if want_dweight else 0)
    sizes = (weight.shape[0], inv_count, want_dx, want_dweight, rows)
    loss_N, dx, dweight = _linear_cross_entropy.linear_cross_entropy(
        x, weight, targets, *sizes, dw_dtype=weight.dtype
    )
    loss = _cross_entropy.mean_loss(loss_N, inv_count).reshape(())
    if dx is None:
        dx = empty(x, 0)
    if dweight is None:
        dweight = empty(weight, 0)
    return loss, dx, dweight


_scale_into_op = register_op(
    "xtrain::scale_into(Tensor(a!) x, Tensor factor) -> ()",
    _elementwise.scale_into,
)


def _multiply(gradient, factor):
    """Multiply in place, because it is large; torch.compile, which traces with a subclass, decides
    itself, and transforms of torch.func may have several factors. On a GPU the factor 1 costs
    nothing."""
    if type(gradient) is not Tensor or _are_functorch_transforms_active():
        return gradient * factor
    if not gradient.is_cuda:
        return gradient.mul_(factor)
    _scale_into_op(gradient, factor.float())
    return gradient


def _linear_backward(dloss, x_gradient, weight_gradient):
    """The gradients that the forward has computed are those for the factor 1."""
    return {"x": _multiply(x_gradient, dloss), "weight": _multiply(weight_gradient, dloss)}


_linear_op = register_op(
    "xtrain::linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, Tensor? inv_count,"
    " bool want_dx, bool want_dweight, int rows)"
    " -> (Tensor loss, Tensor x_gradient, Tensor weight_gradient)",
    _linear_forward,
    fake=_linear_fake,
    backward=_linear_backward,
)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    count: Tensor | float | None = None,
    rows: int = 0,
) -> Tensor:
    """Return the cross-entropy of x weight^T and the targets, without the logits in memory.

    x: (..., C), weight: (V, C), both float32 or both bf16; under autocast they are converted.
    targets: (...) integers below V; those that are -100 do not count.
    count: the loss is the sum over the targets divided by it; None: by the number of targets.
    rows: rows of logits that exist at a time; 0: 2048, with a gradient of weight C if that is more:
        its float32 sums take more memory, and are read and written for every so many rows.
    The forward computes the gradients, too, and backward multiplies them by the gradient of the
    loss, in place: a second backward through the same loss raises an error.
    A target outside the vocabulary raises ValueError on the CPU; on a GPU the loss is NaN.
    """
    x, weight = autocast(x, weight)
    grad = torch.is_grad_enabled()
    wants = grad and has_gradient(x), grad and has_gradient(weight)
    check_axes("linear_cross_entropy", "x", x, 1)
    arguments = (rows_of(x), weight, targets.reshape(-1), inverse(count, x))
    return call(_linear_op, *arguments, *wants, rows)[0]


def inverse(count: Tensor | float | None, x: Tensor) -> Tensor | None:
    """Return 1 / count, (1,) float32, on the device of x. Raises ValueError for 0, or a vector."""
    if count is None:
        return None
    if isinstance(count, Tensor):
        check(count.numel() == 1, f"count has shape {tuple(count.shape)}, expected one number")
        return (1 / count.to(x.device, torch.float32)).reshape(1)
    check(count != 0, "count is 0, and the loss is divided by it")
    return torch.full((1,), 1 / count, dtype=torch.float32, device=x.device)


# ----------------------------------------------------------------------------- cross-entropy
def _cross_entropy_fake(logits, targets, inv_count):
    check_shape("cross_entropy", "targets", targets, logits.shape[:1])
    return new_like(logits, (), wide(logits)), new_like(logits, logits.shape)


def _cross_entropy_forward(logits, targets, inv_count):
    check_shape("cross_entropy", "targets", targets, logits.shape[:1])
    if inv_count is None:
        inv_count = _cross_entropy.count_targets(targets)
    gradient = empty_like(logits)  # in memory of torch
    gradient[...] = logits  # which the kernel overwrites
    loss_N, gradient = _cross_entropy.cross_entropy(gradient, targets, logits.shape[1], inv_count)
    return _cross_entropy.mean_loss(loss_N, inv_count).reshape(()), gradient


_cross_entropy_op = register_op(
    "xtrain::cross_entropy(Tensor logits, Tensor targets, Tensor? inv_count)"
    " -> (Tensor loss, Tensor gradient)",
    _cross_entropy_forward,
    fake=_cross_entropy_fake,
    backward=lambda dloss, gradient: {"logits": _multiply(gradient, dloss)},
)


def cross_entropy(logits: Tensor, targets: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Return the cross-entropy of logits (..., V), float32 or bf16, and targets (...), a scalar.

    targets, count, backward: as in linear_cross_entropy, which needs less memory.
    """
    check_axes("cross_entropy", "logits", logits, 1)
    inv_count = inverse(count, logits)
    return call(_cross_entropy_op, rows_of(logits), targets.reshape(-1), inv_count)[0]


# ----------------------------------------------------------------------------- softmax
def _softmax_fake(s, T, scale, causal):
    S = s.shape[2]
    if causal:
        message = f"softmax: {T} causal positions need at least {T} keys, got {S}"
        torch._check_value(S >= T, lambda: message)
    return new_like(s, s.shape)


def _softmax_forward(s, T, scale, causal):
    return _softmax.causal_softmax_fwd(s, T, scale, causal, empty_like(s))


def _softmax_backward(dp, p, T, scale, causal):
    return _softmax.causal_softmax_bwd(dp, p, T, scale, causal, empty_like(dp))


_softmax_backward_op = register_op(
    "xtrain::softmax_backward(Tensor dp, Tensor p, int T, float scale, bool causal) -> Tensor ds",
    _softmax_backward,
    fake=lambda dp, p, T, scale, causal: new_like(p, p.shape),
)
_softmax_op = register_op(
    "xtrain::softmax(Tensor s, int T, float scale, bool causal) -> Tensor p",
    _softmax_forward,
    fake=_softmax_fake,
    backward=_softmax_backward_op,
)


def softmax(s: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """Return softmax(scale s) over the last axis of s (..., T, S), float32.

    causal: row t of the T rows sees the columns up to t + S - T.
    """
    check_axes("softmax", "s", s, 2)
    T, S = s.shape[-2:]
    return call(_softmax_op, s.reshape(math.prod(s.shape[:-2]), T, S), T, scale, causal).view(
        s.shape
    )
