"""Sampling and log-probabilities as PyTorch ops: the functions below; see ops.py."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import elementwise as _elementwise
from ..kernels import linear_cross_entropy as _linear_cross_entropy
from ..kernels.decoding import logprobs as _logprobs
from ..kernels.decoding import sampling as _sampling
from ..kernels.gemm import linear_into
from ..kernels.runtime.launch import check, empty
from .ops import autocast, check_axes, check_shape, has_gradient, new_like, rows_of, wide
from .register import call, register_op


# ----------------------------------------------------------------------------- sampling
def _sample_fake(logits, *columns):
    check_shape("sample", "logits", logits, (None, None))
    return new_like(logits, logits.shape[0], torch.int32)


def _sample(logits, temperature, top_k, top_p, min_p, seed, sequence, step):
    ids = empty(logits, logits.shape[0], np.int32)
    columns = (temperature, top_k, top_p, seed, sequence, step)
    _sampling.sample(logits, ids, *columns, min_p_B=min_p)
    return ids


_sample_op = register_op(
    "xtrain::sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,"
    " Tensor seed, Tensor sequence, Tensor step) -> Tensor ids",
    _sample,
    fake=_sample_fake,
)


def sample(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seed: int | Tensor = 0,
    step: int | Tensor = 0,
    sequence: Tensor | None = None,
) -> Tensor:
    """Draw the next token of every row of logits (B, V), float32 or bf16 -> ids (B,) int32.

    temperature: 0 takes the most likely token. top_k: 0 keeps all. Each may be a tensor (B,).
    seed, sequence, step: a token depends on its own row's three numbers and logits only: count
        `step` up. sequence: None: 0 to B - 1.
    A row with NaN among its logits gives -1. Raises ValueError for a number out of range.
    """
    numbers: Any = (temperature, top_k, top_p, min_p)
    if not any(isinstance(x, Tensor) for x in numbers):
        _sampling.check_sampling(*numbers)
    check_axes("sample", "logits", logits, 1)
    B = logits.shape[0]
    if sequence is None:
        sequence = torch.arange(B, device=logits.device)

    def column(x, dtype):
        if isinstance(x, Tensor):
            check(
                x.shape in ((), (1,), (B,)),
                f"sample: an option has shape {tuple(x.shape)}, expected one number, or {B}",
            )
            return x.to(logits.device, dtype).expand(B)
        return torch.full((B,), x, dtype=dtype, device=logits.device)

    return call(
        _sample_op,
        logits,
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seed, torch.int64),
        column(sequence, torch.int64),
        column(step, torch.int32),
    )


# ----------------------------------------------------------------------------- log-probabilities
def _token_logprobs_fake(logits, tokens, top):
    check_shape("token_logprobs", "logits", logits, (None, None))
    check_shape("token_logprobs", "tokens", tokens, logits.shape[:1])
    best = (*tokens.shape, top)
    values = new_like(logits, tokens.shape, wide(logits)), new_like(logits, best, wide(logits))
    return values[0], new_like(logits, best, torch.int32), values[1]


_token_logprobs_op = register_op(
    "xtrain::token_logprobs(Tensor logits, Tensor tokens, int top)"
    " -> (Tensor logprobs, Tensor top_ids, Tensor top_logprobs)",
    _logprobs.token_logprobs,
    fake=_token_logprobs_fake,
)


def token_logprobs(logits: Tensor, tokens: Tensor, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return log softmax(logits) at the tokens (B,), the `top` most likely tokens (B, top) int32,
    and their log-probabilities (B, top).

    logits: (B, V) float32 or bf16, tokens: (B,) int32 or int64. top: at most 20.
    NaN for an id that is no token. Without gradients: see linear_logprobs.
    """
    return call(_token_logprobs_op, logits, tokens, top)


def _check_linear(x, weight, tokens):
    check_shape("linear_logprobs", "weight", weight, (None, x.shape[1]))
    check_shape("linear_logprobs", "tokens", tokens, x.shape[:1])


def _linear_logprobs_fake(x, weight, tokens, *options):
    _check_linear(x, weight, tokens)
    return new_like(x, tokens.shape, wide(x))


def _linear_logprobs(x, weight, tokens, want_dx, want_dweight, rows):
    _check_linear(x, weight, tokens)
    N = x.shape[0]
    sums = np.float64 if x.dtype == np.float64 else np.float32
    logprobs_N = empty(x, N, sums)
    step = _linear_cross_entropy.chunk_rows(N, rows or None)
    logits = empty(x, (min(step, N), weight.shape[0]), sums)
    for first in range(0, N, max(step, 1)):
        part = slice(first, min(first + step, N))
        chunk = linear_into(logits[: part.stop - first], x[part], weight)
        logprobs_N[part] = _logprobs.token_logprobs(chunk, tokens[part])[0]
    return logprobs_N


def _linear_logprobs_backward(dlogprobs, x, weight, tokens, want_dx, want_dweight, rows):
    """-logprob is the cross-entropy, with a factor per row. The logits are computed again."""
    factors_N = _elementwise.scale_fwd(dlogprobs, -1.0)
    sizes = (weight.shape[0], factors_N, want_dx, want_dweight, rows or None)
    _, dx, dweight = _linear_cross_entropy.linear_cross_entropy(
        x, weight, tokens, *sizes, dw_dtype=weight.dtype
    )
    return empty(x, 0) if dx is None else dx, empty(weight, 0) if dweight is None else dweight


_ARGUMENTS = "Tensor x, Tensor weight, Tensor tokens, bool want_dx, bool want_dweight, int rows"
_linear_logprobs_backward_op = register_op(
    f"xtrain::linear_logprobs_backward(Tensor dlogprobs, {_ARGUMENTS})"
    " -> (Tensor dx, Tensor dweight)",
    _linear_logprobs_backward,
    fake=lambda dlogprobs, x, weight, tokens, want_dx, want_dweight, rows: (
        new_like(x, x.shape if want_dx else 0),
        new_like(weight, weight.shape if want_dweight else 0),
    ),
)
_linear_logprobs_op = register_op(
    f"xtrain::linear_logprobs({_ARGUMENTS}) -> Tensor logprobs",
    _linear_logprobs,
    fake=_linear_logprobs_fake,
    backward=_linear_logprobs_backward_op,
)


def linear_logprobs(x: Tensor, weight: Tensor, tokens: Tensor, rows: int = 0) -> Tensor:
    """Return the log-probabilities of the tokens under the logits x weight^T, with gradients.

    x: (..., C), weight: (V, C), both float32 or both bf16; autocast converts. tokens: (...) int32
    or int64, all below V. The result is (...) float32. The logits exist for `rows` rows at a time;
    0: 2048.
    """
    check(rows >= 0, f"linear_logprobs: {rows} rows at a time, expected at least 1")
    check_axes("linear_logprobs", "x", x, 1)
    x, weight = autocast(x, weight)
    grad = torch.is_grad_enabled()
    wants = grad and has_gradient(x), grad and has_gradient(weight)
    found = call(_linear_logprobs_op, rows_of(x), weight, tokens.reshape(-1), *wants, rows)
    return found.view(tokens.shape)
