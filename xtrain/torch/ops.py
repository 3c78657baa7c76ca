"""xtrain's kernels as PyTorch ops: what `xtrain.torch` exports.

Every op is registered by register.py: a forward op, its backward op, and the shapes of the results.
The functions below are what users call; they accept leading axes and call the ops. On CPU tensors
the NumPy references of xtrain/kernels run, which are deterministic and accept float64 too.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..kernels import cast as _cast
from ..kernels import embedding as _embedding
from ..kernels import qk_norm_rope as _qk_norm_rope
from ..kernels import residual as _residual
from ..kernels import rmsnorm as _rmsnorm
from ..kernels import rope as _rope
from ..kernels import silu_mul as _silu_mul
from ..kernels import swiglu as _swiglu
from ..kernels.runtime.launch import check, empty, empty_like, zeros
from .register import call, register_op


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the dtype of autocast, where it is enabled: as torch does with the
    operands of products."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype of sums and statistics: float64 if x is, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def new_like(like: Tensor, shape, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty contiguous tensor, for a fake implementation."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


# These take tensors, and arrays: launchers and fake implementations call them, so a wrong shape is
# an error under torch.compile and on the device "meta" too. Lengths may be torch's symbols.
def check_axes(op: str, name: str, x: Any, count: int) -> None:
    """Raise ValueError for a tensor with fewer axes than an op needs."""
    if len(x.shape) < count:
        axes = "1 axis" if count == 1 else f"{count} axes"
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected at least {axes}")


def check_shape(op: str, name: str, x: Any, shape: Sequence[Any]) -> None:
    """Raise ValueError for another shape; None allows any length."""

    def message():
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        return f"{op}: {name} has shape {tuple(x.shape)}, expected ({expected})"

    torch._check_value(len(x.shape) == len(shape), message)
    for m, n in zip(x.shape, shape):
        if n is not None:
            torch._check_value(m == n, message)


def has_gradient(x: Tensor) -> bool:
    """Return x.requires_grad, which for a batch of vmap is that of the tensor in it."""
    functorch = torch._C._functorch
    if not is_compiling():
        while not x.requires_grad and functorch.is_batchedtensor(x):
            x = functorch.get_unwrapped(x)
    return x.requires_grad


def rows_of(x: Any) -> Any:
    """Return (N, C) for a tensor or array x (..., C)."""
    if len(x.shape) == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _statistics(x):
    """Return an empty (N,) for x (..., C), for a fake implementation."""
    return new_like(x, math.prod(x.shape[:-1]), wide(x))


# ----------------------------------------------------------------------------- norms
# The launchers take rows, the ops any leading axes: a reshape of arrays costs less than one of
# tensors, which autograd records.
def _check_norm(op, x, weight):
    check_axes(op, "x", x, 1)
    check_shape(op, "weight", weight, x.shape[-1:])


def _rmsnorm_fake(x, weight, eps):
    _check_norm("rmsnorm", x, weight)
    return new_like(x, x.shape), _statistics(x)


def _rmsnorm_forward(x, weight, eps):
    _check_norm("rmsnorm", x, weight)
    y, rstd = _rmsnorm.rmsnorm_fwd(rows_of(x), weight, eps)
    return y.reshape(x.shape), rstd


def _rmsnorm_backward(dy, x, weight, rstd):
    dweight = empty_like(weight)
    dx = _rmsnorm.rmsnorm_bwd(rows_of(dy), rows_of(x), weight, rstd, dweight, add=False)
    return dx.reshape(x.shape), dweight


_rmsnorm_backward_op = register_op(
    "xtrain::rmsnorm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd)"
    " -> (Tensor dx, Tensor dweight)",
    _rmsnorm_backward,
)
_rmsnorm_op = register_op(
    "xtrain::rmsnorm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)",
    _rmsnorm_forward,
    fake=_rmsnorm_fake,
    backward=_rmsnorm_backward_op,
)


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) weight, like x, over the last axis.

    x: (..., C), weight: (C,), float32 or bf16, in any combination.
    """
    return call(_rmsnorm_op, x, weight, eps)[0]


def _check_residual(x, r, weight):
    _check_norm("residual_rmsnorm", x, weight)
    check_shape("residual_rmsnorm", "r", r, x.shape)


def _residual_fake(x, r, weight, eps):
    _check_residual(x, r, weight)
    return new_like(x, x.shape), new_like(r, x.shape), _statistics(x)


def _residual_forward(x, r, weight, eps):
    _check_residual(x, r, weight)
    h, y, rstd = _residual.residual_rmsnorm_fwd(rows_of(x), rows_of(r), weight, eps)
    return h.reshape(x.shape), y.reshape(r.shape), rstd


def _residual_backward(dh, dy, h, weight, rstd):
    dweight = empty_like(weight)
    if dh is not None:
        dh = rows_of(_cast.cast_fwd(dh, dy.dtype))
    rows = rows_of(dy), rows_of(h)
    dx = _residual.residual_rmsnorm_bwd(dh, *rows, weight, rstd, dweight, add=False)
    return dx.reshape(h.shape), dweight


_residual_backward_op = register_op(
    "xtrain::residual_rmsnorm_backward(Tensor? dh, Tensor dy, Tensor h, Tensor weight, Tensor rstd)"
    " -> (Tensor dx, Tensor dweight)",
    _residual_backward,
    fake=lambda dh, dy, h, weight, rstd: (new_like(dy, h.shape), new_like(weight, weight.shape)),
)
_residual_op = register_op(
    "xtrain::residual_rmsnorm(Tensor x, Tensor r, Tensor weight, float eps)"
    " -> (Tensor h, Tensor y, Tensor rstd)",
    _residual_forward,
    fake=_residual_fake,
    backward=_residual_backward_op,
    gradients={"r": "dx"},
)


def residual_rmsnorm(
    x: Tensor, r: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return h = x + r in the dtype of x, and rmsnorm(h, weight) in that of r, in one pass.

    x, r: (..., C), weight: (C,), float32 or bf16.
    """
    h, y, _ = call(_residual_op, x, r, weight, eps)
    return h, y


# ----------------------------------------------------------------------------- SwiGLU, GeGLU
def _name(gelu):
    return "geglu" if gelu else "swiglu"


def _silu_mul_fake(gate, up, gelu):
    check_shape(_name(gelu), "up", up, gate.shape)
    return new_like(gate, gate.shape)


def _silu_mul_forward(gate, up, gelu):
    check_shape(_name(gelu), "up", up, gate.shape)
    return _silu_mul.silu_mul_fwd(gate, up, gelu)


def _check_packed(gu, gelu):
    check_axes(_name(gelu), "gate", gu, 1)
    columns = gu.shape[-1]
    torch._check_value(
        columns % 2 == 0,
        lambda: f"{_name(gelu)}: gate has {columns} columns, expected gate and up of equal width",
    )


def _swiglu_fake(gu, gelu):
    _check_packed(gu, gelu)
    return new_like(gu, (*gu.shape[:-1], gu.shape[-1] // 2))


def _swiglu_forward(gu, gelu):
    _check_packed(gu, gelu)
    y = _swiglu.swiglu_fwd(rows_of(gu), gelu)
    return y.reshape(*gu.shape[:-1], y.shape[1])


def _swiglu_backward(dy, gu, gelu):
    return _swiglu.swiglu_bwd(rows_of(dy), rows_of(gu), gelu=gelu).reshape(gu.shape)


_silu_mul_backward_op = register_op(
    "xtrain::silu_mul_backward(Tensor dy, Tensor gate, Tensor up, bool gelu)"
    " -> (Tensor dgate, Tensor dup)",
    _silu_mul.silu_mul_bwd,
)
_silu_mul_op = register_op(
    "xtrain::silu_mul(Tensor gate, Tensor up, bool gelu) -> Tensor y",
    _silu_mul_forward,
    fake=_silu_mul_fake,
    backward=_silu_mul_backward_op,
)
_swiglu_backward_op = register_op(
    "xtrain::swiglu_backward(Tensor dy, Tensor gu, bool gelu) -> Tensor dgu", _swiglu_backward
)
_swiglu_op = register_op(
    "xtrain::swiglu(Tensor gu, bool gelu) -> Tensor y",
    _swiglu_forward,
    fake=_swiglu_fake,
    backward=_swiglu_backward_op,
)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return silu(gate) up.

    gate, up: the same shape and dtype, float32 or bf16. Without up: gate is (..., 2F), gate in its
    first F columns and up in the others.
    """
    if up is not None:
        return call(_silu_mul_op, gate, up, False)
    return call(_swiglu_op, gate, False)


def geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return gelu(gate) up, the GELU with tanh. Arguments as in swiglu."""
    if up is not None:
        return call(_silu_mul_op, gate, up, True)
    return call(_swiglu_op, gate, True)


# ----------------------------------------------------------------------------- RoPE
def _check_tables(op, D, N, cos, sin, positions, T):
    """Raise ValueError for tables and positions that do not fit N tokens with heads of D."""
    torch._check_value(D % 2 == 0, lambda: f"{op}: heads of {D} channels, expected an even number")
    check_shape(op, "cos", cos, (None, D // 2))
    check_shape(op, "sin", sin, cos.shape)
    if positions is not None:
        check_shape(op, "positions", positions, (N,))
    else:
        P = cos.shape[0]
        torch._check_value(T <= P, lambda: f"{op}: T = {T} positions, the tables hold {P}")


def _rope_fake(x, cos, sin, positions, T):
    _check_tables("rope", x.shape[-1], math.prod(x.shape[:-2]), cos, sin, positions, T)
    return new_like(x, x.shape)


def _rope_forward(x, cos, sin, positions, T):
    _check_tables("rope", x.shape[-1], math.prod(x.shape[:-2]), cos, sin, positions, T)
    return _rotate(_rope.rope_fwd, x, cos, sin, positions, T)


def _rotate(launcher, x, cos, sin, positions, T):
    heads = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return launcher(heads, cos, sin, positions, T).reshape(x.shape)


_ROPE = "Tensor cos, Tensor sin, Tensor? positions, int T"
_rope_backward_op = register_op(
    f"xtrain::rope_backward(Tensor dy, {_ROPE}) -> Tensor dx",
    functools.partial(_rotate, _rope.rope_bwd),
    fake=lambda dy, *tables: new_like(dy, dy.shape),
)
_rope_op = register_op(
    f"xtrain::rope(Tensor x, {_ROPE}) -> Tensor y",
    _rope_forward,
    fake=_rope_fake,
    backward=_rope_backward_op,
)


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    """Rotate the heads of x (..., T, H, D), float32 or bf16, the pairs (x_r, x_{r + D/2}).

    cos, sin: (P, D / 2) float32, one row per position.
    positions: (..., T), any integers below P; None: 0 to T - 1 in each sequence.
    A position outside the tables raises ValueError on the CPU; on a GPU the result is NaN.
    """
    check_axes("rope", "x", x, 3)
    T = x.shape[-3]
    if positions is not None:
        positions = positions.reshape(-1)
    return call(_rope_op, x, cos, sin, positions, T)


def _check_qk(qkv, q_weight, k_weight, cos, sin, positions, H, G, T):
    op = "qk_norm_rope"
    check_shape(op, "cos", cos, (None, None))
    D = 2 * cos.shape[1]
    check_shape(op, "qkv", qkv, (None, (H + 2 * G) * D))
    _check_tables(op, D, qkv.shape[0], cos, sin, positions, T)
    check((q_weight is None) == (k_weight is None), f"{op}: give both norm weights or none")
    if q_weight is not None:
        check_shape(op, "q_weight", q_weight, (D,))
        check_shape(op, "k_weight", k_weight, (D,))


def _qk_norm_rope_forward(qkv, q_weight, k_weight, cos, sin, positions, H, G, T, eps):
    _check_qk(qkv, q_weight, k_weight, cos, sin, positions, H, G, T)
    arguments = (qkv, q_weight, k_weight, cos, sin, H, G, T, eps, positions)
    q, k, values, rstd = _qk_norm_rope.qk_norm_rope_fwd(*arguments)
    v = empty(qkv, values.shape)  # a result of an op is no part of an argument
    v[...] = values
    if rstd is None:
        rstd = empty(qkv, 0, np.float32)
    return q, k, v, rstd


def _qk_norm_rope_backward(dq, dk, dv, qkv, q_weight, k_weight, rstd, cos, sin, positions, H, G, T):
    dqkv = empty(qkv, qkv.shape)
    _qk_norm_rope.values_of(dqkv, H, G, 2 * cos.shape[1])[...] = dv
    norm = (q_weight, k_weight, None if q_weight is None else rstd)
    sums = [None if w is None else empty_like(w) for w in (q_weight, k_weight)]
    _qk_norm_rope.qk_norm_rope_bwd(
        dqkv, dq, dk, qkv, *norm, cos, sin, H, G, T, *sums, positions, add=False
    )
    return dqkv, *[empty(qkv, 0) if dw is None else dw for dw in sums]


_QK = "Tensor qkv, Tensor? q_weight, Tensor? k_weight"
_QK_TABLES = "Tensor cos, Tensor sin, Tensor? positions, int H, int G, int T"
_qk_norm_rope_backward_op = register_op(
    f"xtrain::qk_norm_rope_backward(Tensor dq, Tensor dk, Tensor dv, {_QK}, Tensor rstd,"
    f" {_QK_TABLES}) -> (Tensor dqkv, Tensor dq_weight, Tensor dk_weight)",
    _qk_norm_rope_backward,
    fake=lambda dq, dk, dv, qkv, q_weight, k_weight, *others: (
        new_like(qkv, qkv.shape),
        _weight_or_nothing(qkv, q_weight),
        _weight_or_nothing(qkv, k_weight),
    ),
)


def _weight_or_nothing(qkv, weight):
    return new_like(qkv, 0) if weight is None else new_like(weight, weight.shape)


def _qk_norm_rope_fake(qkv, q_weight, k_weight, cos, sin, positions, H, G, T, eps):
    _check_qk(qkv, q_weight, k_weight, cos, sin, positions, H, G, T)
    N = qkv.shape[0]
    D = 2 * cos.shape[1]
    heads = [new_like(qkv, (N, n, D)) for n in (H, G, G)]
    statistics = 0 if q_weight is None else (N, H + G)
    return *heads, new_like(qkv, statistics, wide(qkv))


_qk_norm_rope_op = register_op(
    f"xtrain::qk_norm_rope({_QK}, {_QK_TABLES}, float eps)"
    " -> (Tensor q, Tensor k, Tensor v, Tensor rstd)",
    _qk_norm_rope_forward,
    fake=_qk_norm_rope_fake,
    backward=_qk_norm_rope_backward_op,
)


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    eps: float = 1e-6,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the packed product qkv (..., T, (H + 2G) D), normalise q and k per head, rotate them.

    Returns q (..., T, H, D) and k, v (..., T, G, D), like qkv.
    q_weight, k_weight: (D,) float32 or bf16, both None: no norm.
    cos, sin, positions: as in rope. heads, kv_heads: H and G.
    """
    check_axes("qk_norm_rope", "qkv", qkv, 2)
    *outer, T, _ = qkv.shape
    if positions is not None:
        positions = positions.reshape(-1)
    tables = (cos, sin, positions, heads, kv_heads, T, eps)
    q, k, v, _ = call(_qk_norm_rope_op, rows_of(qkv), q_weight, k_weight, *tables)
    return tuple(x.view(*outer, T, *x.shape[1:]) for x in (q, k, v))


def _check_norm_rope(x, weight, cos, sin, positions, T):
    D = x.shape[-1]
    check_shape("norm_rope", "weight", weight, (D,))
    _check_tables("norm_rope", D, math.prod(x.shape[:-2]), cos, sin, positions, T)


def _norm_rope_fake(x, weight, cos, sin, positions, T, eps):
    _check_norm_rope(x, weight, cos, sin, positions, T)
    statistics = new_like(x, (math.prod(x.shape[:-2]), x.shape[-2]), wide(x))
    return new_like(x, x.shape), statistics


def _norm_rope_forward(x, weight, cos, sin, positions, T, eps):
    """The heads of one tensor are the query heads of a packed product without keys."""
    _check_norm_rope(x, weight, cos, sin, positions, T)
    H, D = x.shape[-2:]
    rows = x.reshape(math.prod(x.shape[:-2]), H * D)
    arguments = (rows, weight, weight, cos, sin, H, 0, T, eps, positions)
    found = _qk_norm_rope.qk_norm_rope_fwd(*arguments)
    return found[0].reshape(x.shape), found[3]


def _norm_rope_backward(dy, x, weight, rstd, cos, sin, positions, T):
    H, D = x.shape[-2:]
    N = math.prod(x.shape[:-2])
    dx = empty(x, (N, H * D))
    dweight = empty_like(weight)
    gradients = (dx, dy.reshape(N, H, D), empty(x, (N, 0, D)))
    norm = (x.reshape(N, H * D), weight, weight, rstd)
    sums = (dweight, empty_like(weight))  # the second: of the keys, of which there are none
    _qk_norm_rope.qk_norm_rope_bwd(
        *gradients, *norm, cos, sin, H, 0, T, *sums, positions, add=False
    )
    return dx.reshape(x.shape), dweight


_norm_rope_backward_op = register_op(
    f"xtrain::norm_rope_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, {_ROPE})"
    " -> (Tensor dx, Tensor dweight)",
    _norm_rope_backward,
)
_norm_rope_op = register_op(
    f"xtrain::norm_rope(Tensor x, Tensor weight, {_ROPE}, float eps) -> (Tensor y, Tensor rstd)",
    _norm_rope_forward,
    fake=_norm_rope_fake,
    backward=_norm_rope_backward_op,
)


def norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    positions: Tensor | None = None,
) -> Tensor:
    """Return rope(rmsnorm(x, weight, eps), cos, sin, positions) in one pass, for x (..., T, H, D).

    weight: (D,) float32 or bf16. The rest as in rope.
    """
    check_axes("norm_rope", "x", x, 3)
    T = x.shape[-3]
    if positions is not None:
        positions = positions.reshape(-1)
    return call(_norm_rope_op, x, weight, cos, sin, positions, T, eps)[0]


# ----------------------------------------------------------------------------- embedding
def _embedding_fake(ids, weight):
    check_shape("embedding", "weight", weight, (None, None))
    return new_like(weight, (ids.shape[0], weight.shape[1]))


def _embedding_forward(ids, weight):
    check_shape("embedding", "weight", weight, (None, None))
    return _embedding.embedding_fwd(ids, weight)


def _embedding_backward(dy, ids, weight):
    dweight = zeros(dy, weight.shape, weight.dtype)
    _embedding.embedding_bwd(dy, ids, dweight)
    return dweight


_embedding_backward_op = register_op(
    "xtrain::embedding_backward(Tensor dy, Tensor ids, Tensor weight) -> Tensor dweight",
    _embedding_backward,
)
_embedding_op = register_op(
    "xtrain::embedding(Tensor ids, Tensor weight) -> Tensor y",
    _embedding_forward,
    fake=_embedding_fake,
    backward=_embedding_backward_op,
)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of weight (V, C), float32 or bf16, for ids (...): (..., C).

    An id outside the table raises ValueError on the CPU; on a GPU its row is NaN.
    """
    return call(_embedding_op, ids.reshape(-1), weight).view(*ids.shape, weight.shape[1])
