"""One Function per loss and log-probability: as in functions.py."""

from collections.abc import Callable, Iterator

import numpy as np

from ..device import Array
from ..kernels import cast as _cast
from ..kernels import cross_entropy as _cross_entropy
from ..kernels import distillation as _distillation
from ..kernels import elementwise as _elementwise
from ..kernels import entropy as _entropy
from ..kernels import gemm as _gemm
from ..kernels import linear_cross_entropy as _linear_cross_entropy
from ..kernels.decoding import kept_tokens as _kept_tokens
from ..kernels.decoding import logprobs as _logprobs
from ..kernels.decoding.sampling import UNCHANGED, Sampling
from ..kernels.runtime.launch import empty
from .autograd import Context, Function, is_unit
from .functions import wide_dtype


class CrossEntropy(Function):
    """(The kernel overwrites the logits with their gradient: it gets a copy.)"""

    @staticmethod
    def forward(ctx, logits_NP, targets_N, vocab_size, inv_count_1):
        loss_N, dlogits_NP = _cross_entropy.cross_entropy(
            logits_NP.copy(), targets_N, vocab_size, inv_count_1, with_gradient=ctx.needs_grad[0]
        )
        ctx.save(dlogits_NP)
        return _cross_entropy.mean_loss(loss_N, inv_count_1).reshape(())

    @staticmethod
    def backward(ctx, dloss):
        (dlogits_NP,) = ctx.saved
        if not is_unit(dloss):
            _elementwise.scale_into(dlogits_NP, dloss.reshape(1))
        return dlogits_NP


class LinearCrossEntropy(Function):
    """The logits exist for a few rows at a time. The forward also computes the gradients."""

    @staticmethod
    def forward(ctx, x_NC, w_PC, targets_N, vocab_size, inv_count_1, rows=None):
        want_dx, want_dw = ctx.needs_grad[:2]
        loss_N, dx_NC, dw_PC = _linear_cross_entropy.linear_cross_entropy(
            x_NC, w_PC, targets_N, vocab_size, inv_count_1, want_dx, want_dw, rows
        )
        ctx.save(dx_NC, dw_PC, w_PC)
        return _cross_entropy.mean_loss(loss_N, inv_count_1).reshape(())

    @staticmethod
    def backward(ctx, dloss):
        return saved_gradients(ctx, dloss)


def saved_gradients(ctx: Context, dloss: Array) -> tuple[Array | None, Array | None]:
    """Return the gradients that forward has computed, dx and dw, times dloss."""
    dx_NC, dw_PC, w_PC = ctx.saved
    if not is_unit(dloss):
        for gradient in (dx_NC, dw_PC):
            if gradient is not None:
                _elementwise.scale_into(gradient, dloss.reshape(1))
    return dx_NC, head_gradient(ctx, w_PC, dw_PC)


class LinearDistillation(Function):
    """As LinearCrossEntropy, with a teacher (kernels/distillation.py)."""

    @staticmethod
    def forward(
        ctx, x_NC, w_PC, targets_N, ids_NK, teacher_NK, vocab_size, inv_count_1, weight, reverse
    ):
        def loss_of(d_RP, part, loss_R, gradient):
            teacher = ids_NK[part], teacher_NK[part]
            options = vocab_size, inv_count_1, weight, reverse, gradient, loss_R
            _distillation.distillation(d_RP, targets_N[part], *teacher, *options)

        want = ctx.needs_grad[:2]
        loss_N, dx_NC, dw_PC = _linear_cross_entropy.linear_cross_entropy(
            x_NC, w_PC, targets_N, vocab_size, inv_count_1, *want, loss_of=loss_of
        )
        ctx.save(dx_NC, dw_PC, w_PC)
        return _cross_entropy.mean_loss(loss_N, inv_count_1).reshape(())

    @staticmethod
    def backward(ctx, dloss):
        return saved_gradients(ctx, dloss)


def head_gradient(ctx: Context, w_PC: Array, dw_PC: Array | None) -> Array | None:
    """Write or add dw, float32 or None, where the gradient of argument 1 goes.

    Return that memory.
    """
    if dw_PC is None:
        return None
    target_PC, add = ctx.grad_target(1, w_PC)
    dw_PC = _cast.cast_fwd(dw_PC, target_PC.dtype)
    if add:
        _elementwise.add_into(target_PC, dw_PC)
    else:
        target_PC[...] = dw_PC
    return target_PC


class LinearLogprobs(Function):
    """The bits are those of the engine (kernels/decoding/logprobs.py) if the logits are
    (kernels/runtime/invariance.py).

    The logits exist for a few rows at a time. Backward computes them again: -logprob is the
    cross-entropy, with a factor per row. With `sampling`, of the logits of the distribution that
    tokens are drawn from (kernels/decoding/kept_tokens.py); the kept tokens are a constant, which
    the two passes share: they may differ in the precision of the logits.
    """

    @staticmethod
    def forward(
        ctx,
        x_NC,
        w_PC,
        targets_N,
        vocab_size,
        rows=None,
        sampling=UNCHANGED,
        kept_NW=None,
        entropies_N=None,
    ):
        N = x_NC.shape[0]
        logprobs_N = empty(x_NC, N, wide_dtype(x_NC))
        new = sampling.truncates and kept_NW is None
        if new:
            kept_NW = empty(x_NC, (N, _kept_tokens.mask_words(vocab_size)), np.int32)
        change_logits = change_to_sampled(sampling, kept_NW, vocab_size)
        for part, logits in logits_of_parts(x_NC, w_PC, rows):
            if new:
                kept_NW[part] = kept_of(logits, targets_N[part], sampling, vocab_size)
            change_logits(logits, part)
            if entropies_N is not None:
                entropies_N[part] = _entropy.entropy(logits, vocab_size)
            logprobs_N[part], *_ = _logprobs.token_logprobs(logits, targets_N[part], 0, vocab_size)
        ctx.save(x_NC, w_PC, targets_N, vocab_size, rows, sampling, change_logits)
        return logprobs_N

    @staticmethod
    def backward(ctx, dlogprobs_N):
        x_NC, w_PC, targets_N, vocab_size, rows, sampling, change_logits = ctx.saved
        factors_N = _elementwise.scale_fwd(dlogprobs_N, -1.0 / (sampling.temperature or 1.0))
        _, dx_NC, dw_PC = _linear_cross_entropy.linear_cross_entropy(
            x_NC,
            w_PC,
            targets_N,
            vocab_size,
            factors_N,
            *ctx.needs_grad[:2],
            rows,
            change_logits,
        )
        return dx_NC, head_gradient(ctx, w_PC, dw_PC)


def logits_of_parts(x_NC: Array, w_PC: Array, rows: int | None) -> Iterator[tuple[slice, Array]]:
    """Yield some rows of x and their logits, which the caller may overwrite. rows: at most."""
    N = x_NC.shape[0]
    step = _linear_cross_entropy.chunk_rows(N, rows)
    for first in range(0, N, max(step, 1)):
        part = slice(first, min(first + step, N))
        yield part, _gemm.linear_fwd(x_NC[part], w_PC, wide_dtype(x_NC))


def kept_of(logits: Array, targets: Array, sampling: Sampling, vocab_size: int) -> Array:
    """Return the masks of the tokens that sampling keeps in these rows, and of the targets."""
    columns = sampling.columns(logits, len(targets))
    return _kept_tokens.kept_tokens(logits, targets, *columns, vocab_size)


def linear_kept_tokens(
    x_NC: Array, w_PC: Array, targets_N: Array, vocab_size: int, sampling: Sampling
) -> Array:
    """Return kept_of for the logits x w^T, (N, W) int32."""
    parts = logits_of_parts(x_NC, w_PC, None)
    kept_NW = empty(x_NC, (x_NC.shape[0], _kept_tokens.mask_words(vocab_size)), np.int32)
    for part, logits in parts:
        kept_NW[part] = kept_of(logits, targets_N[part], sampling, vocab_size)
    return kept_NW


def linear_top_logprobs(x_NC: Array, w_PC: Array, vocab_size: int, top: int) -> tuple[Array, Array]:
    """Return the `top` most likely tokens of the logits x w^T, (N, top) int32, and their
    log-probabilities, (N, top) float32."""
    N = x_NC.shape[0]
    ids_NK = empty(x_NC, (N, top), np.int32)
    logprobs_NK = empty(x_NC, (N, top), wide_dtype(x_NC))
    none_N = empty(x_NC, N, np.int32)
    none_N.fill(-1)
    for part, logits in logits_of_parts(x_NC, w_PC, None):
        tops = _logprobs.token_logprobs(logits, none_N[part], top, vocab_size)
        _, ids_NK[part], logprobs_NK[part] = tops
    return ids_NK, logprobs_NK


def change_to_sampled(
    sampling: Sampling, kept_NW: Array | None, vocab_size: int
) -> Callable[[Array, slice], None]:
    """Return a function that changes the logits of some rows to those that are sampled from."""

    def change(logits: Array, part: slice) -> None:
        if sampling == UNCHANGED:
            return
        kept = None if kept_NW is None else kept_NW[part]
        temperature_N, *_ = sampling.columns(logits, len(logits))
        _kept_tokens.sampled_logits(logits, temperature_N, kept, vocab_size)

    return change


class WithGradient(Function):
    @staticmethod
    def forward(ctx, x, value, dx):
        ctx.save(dx)
        loss = empty(x, 1, wide_dtype(x))
        loss.fill(value)
        return loss.reshape(())

    @staticmethod
    def backward(ctx, dloss):
        (dx,) = ctx.saved
        if not is_unit(dloss):
            _elementwise.scale_into(dx, dloss.reshape(1))
        return dx
