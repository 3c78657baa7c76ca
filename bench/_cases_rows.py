"""Cases of bench_kernels.py: kernels over rows, heads, and rows of scores."""

import math

import cupy as cp
import numpy as np
from _cases import C, Case, D, H, N, Peer, T, V, case, converted, double, draw, functional, size

from xtrain.kernels import (
    cross_entropy,
    entropy,
    layout,
    qk_norm_rope,
    residual,
    rmsnorm,
    rope,
    softmax,
)
from xtrain.kernels.runtime.launch import launch

EPS = 1e-6
SCALE = 0.125
SOME = 2 * T  # rows
POSITIONS = np.arange(SOME) % T


# -------------------------------------------------------------------------- rmsnorm.py, residual.py
def torch_rmsnorm(x, w):
    return functional().rms_norm(x, (x.shape[-1],), w, EPS)


def torch_residual_rmsnorm(x, r, w):
    h = x + r
    return h, torch_rmsnorm(h, w)


@case
def rmsnorm_fwd(dtype):
    x = draw(dtype, N, C)
    w = draw(np.float32, C, seed=1)
    y = cp.empty_like(x)
    rstd = cp.empty(N, np.float32)
    naive = lambda: launch(
        rmsnorm.rmsnorm_fwd_naive_kernel, N, rmsnorm.BLOCK, y, rstd, x, w, np.float32(EPS)
    )
    return Case(
        2 * x.nbytes,
        lambda: rmsnorm.rmsnorm_fwd(x, w, EPS),
        want=lambda: rmsnorm.rmsnorm_ref(double(x), double(w), EPS),
        peer=Peer(torch_rmsnorm, (x, converted(w, dtype))),
        naive=naive if dtype == np.float32 else None,
    )


@case
def rmsnorm_bwd(dtype):
    x = draw(dtype, N, C)
    w = draw(np.float32, C, seed=1)
    dy = draw(dtype, N, C, seed=2)
    _, rstd = rmsnorm.rmsnorm_fwd(x, w, EPS)
    dw = cp.zeros(C, np.float32)

    def got():
        fresh = cp.zeros_like(dw)
        return rmsnorm.rmsnorm_bwd(dy, x, w, rstd, fresh), fresh

    return Case(
        3 * x.nbytes,
        lambda: rmsnorm.rmsnorm_bwd(dy, x, w, rstd, dw),
        got=got,
        want=lambda: rmsnorm.rmsnorm_bwd_ref(*map(double, (dy, x, w, rstd))),
        peer=Peer(torch_rmsnorm, (x, converted(w, dtype)), (dy,)),
    )


@case
def residual_rmsnorm_fwd(dtype):
    x = draw(dtype, N, C)
    r = draw(dtype, N, C, seed=1)
    w = draw(np.float32, C, seed=2)
    return Case(
        4 * x.nbytes,
        lambda: residual.residual_rmsnorm_fwd(x, r, w, EPS),
        want=lambda: residual.residual_rmsnorm_ref(double(x), double(r), double(w), EPS),
        peer=Peer(torch_residual_rmsnorm, (x, r, converted(w, dtype))),
    )


@case
def residual_rmsnorm_bwd(dtype):
    h = draw(dtype, N, C)
    w = draw(np.float32, C, seed=1)
    dy, dh = draw(dtype, N, C, seed=2), draw(dtype, N, C, seed=3)
    _, rstd = rmsnorm.rmsnorm_fwd(h, w, EPS)
    dw = cp.zeros(C, np.float32)

    def got():
        fresh = cp.zeros_like(dw)
        return residual.residual_rmsnorm_bwd(dh, dy, h, w, rstd, fresh), fresh

    return Case(
        4 * h.nbytes,
        lambda: residual.residual_rmsnorm_bwd(dh, dy, h, w, rstd, dw),
        got=got,
        want=lambda: residual.residual_rmsnorm_bwd_ref(*map(double, (dh, dy, h, w, rstd))),
        peer=Peer(
            torch_residual_rmsnorm, (h, draw(dtype, N, C, seed=4), converted(w, dtype)), (dh, dy)
        ),
    )


# -------------------------------------------------------------- rope.py, qk_norm_rope.py, layout.py
def tables():
    return tuple(map(cp.asarray, rope.rope_tables(D, T, 10000.0)))


def torch_rotate(x, cos, sin):
    """Rotate the heads of x (N, heads, D)."""
    import torch

    x1, x2 = x.reshape(-1, T, *x.shape[1:]).float().chunk(2, -1)
    c = cos[:, None]
    s = sin[:, None]
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1).reshape(x.shape).to(x.dtype)


def torch_qk_norm_rope(qkv, q_w, k_w, cos, sin):
    """Return q and k; v, the last third, stays a view, as in xtrain."""
    q, k, _ = (part.reshape(-1, H, D) for part in qkv.chunk(3, -1))
    return tuple(torch_rotate(torch_rmsnorm(x, w), cos, sin) for x, w in ((q, q_w), (k, k_w)))


def heads(dtype):
    qkv = draw(dtype, N, 3 * C)
    cos_sin = tables()
    w = draw(np.float32, D, seed=1), draw(np.float32, D, seed=2)
    return qkv, w, cos_sin


def first_rows(*arrays):
    """Return the first rows in float64 on the host, where the references of rope.py run."""
    return [cp.asnumpy(double(x[:SOME] if x.shape[0] == N else x)) for x in arrays]


@case
def qk_norm_rope_fwd(dtype):
    qkv, w, cos_sin = heads(dtype)
    run = lambda: qk_norm_rope.qk_norm_rope_fwd(qkv, *w, *cos_sin, H, H, T, EPS)
    reference = lambda: qk_norm_rope.qk_norm_rope_ref(
        *first_rows(qkv, *w, *cos_sin), H, H, POSITIONS, EPS
    )
    return Case(
        2 * qkv.nbytes * 2 // 3,
        run,
        got=lambda: tuple(run()[i][:SOME] for i in (0, 1, 3)),
        want=reference,
        peer=Peer(torch_qk_norm_rope, (qkv, *(converted(x, dtype) for x in w), *cos_sin)),
        shape=f"N={N} H=G={H} D={D} T={T}",
    )


@case
def qk_norm_rope_bwd(dtype):
    qkv, w, cos_sin = heads(dtype)
    dq, dk = (draw(dtype, N, H, D, seed=s) for s in (3, 4))
    dqkv = cp.zeros_like(qkv)  # the columns of v stay 0
    rstd = qk_norm_rope.qk_norm_rope_fwd(qkv, *w, *cos_sin, H, H, T, EPS)[3]
    dw = cp.zeros((2, D), np.float32)

    def run(rows=N, dw=dw):
        arrays = (x[:rows] for x in (dqkv, dq, dk, qkv))
        qk_norm_rope.qk_norm_rope_bwd(*arrays, *w, rstd[:rows], *cos_sin, H, H, T, *dw)
        return dqkv[:rows]

    def got():
        fresh = cp.zeros_like(dw)
        return run(SOME, fresh), *fresh

    def reference():
        into, *inputs = first_rows(cp.zeros_like(qkv), dq, dk, qkv, *w, rstd, *cos_sin)
        return into, *qk_norm_rope.qk_norm_rope_bwd_ref(into, *inputs, POSITIONS)

    return Case(
        size(dq, dk) + 2 * qkv.nbytes * 2 // 3,
        run,
        got=got,
        want=reference,
        peer=Peer(torch_qk_norm_rope, (qkv, *(converted(x, dtype) for x in w), *cos_sin), (dq, dk)),
        shape=f"N={N} H=G={H} D={D} T={T}",
    )


@case
def rope_fwd(dtype):
    x = draw(dtype, N, H, D)
    cos_sin = tables()
    return Case(
        2 * x.nbytes,
        lambda: rope.rope_fwd(x, *cos_sin, T=T),
        got=lambda: (rope.rope_fwd(x, *cos_sin, T=T)[:SOME],),
        want=lambda: (rope.rope_ref(*first_rows(x, *cos_sin), POSITIONS),),
        peer=Peer(torch_rotate, (x, *cos_sin)),
        shape=f"N={N} H={H} D={D} T={T}",
    )


@case
def swap_heads(dtype):
    x = draw(dtype, N // T, T, H, D)
    return Case(
        2 * x.nbytes,
        lambda: layout.swap_heads(x),
        want=lambda: (double(x).transpose(0, 2, 1, 3),),
        peer=Peer(lambda x: x.transpose(1, 2).contiguous(), (x,)),
        shape=f"B={N // T} T={T} H={H} D={D}",
    )


# --------------------------------------------------------------------- softmax.py, cross_entropy.py, entropy.py
def torch_causal_softmax(s):
    import torch

    visible = torch.ones(T, T, dtype=torch.bool, device=s.device).tril()
    return torch.softmax((s * SCALE).masked_fill(~visible, -math.inf), -1)


@case
def softmax_fwd(dtype):
    s = draw(dtype, 4 * H, T, T, scale=3.0)
    work = s.copy()

    def got():
        return (softmax.causal_softmax_fwd(s.copy(), T, SCALE),)

    def want():
        hidden = cp.asarray(~np.tri(T, dtype=bool))
        x = cp.where(hidden, -np.inf, double(s) * SCALE)
        x = cp.exp(x - x.max(-1, keepdims=True))
        return (x / x.sum(-1, keepdims=True),)

    return Case(
        s.nbytes * 3 // 2,  # reads the visible half, writes everything
        lambda: softmax.causal_softmax_fwd(work, T, SCALE),
        got=got,
        want=want,
        peer=Peer(torch_causal_softmax, (s,)),
        shape=f"heads={4 * H} T={T}",
    )


@case
def softmax_bwd(dtype):
    p = softmax.causal_softmax_fwd(draw(dtype, 4 * H, T, T, scale=3.0), T, SCALE)
    dp = draw(dtype, 4 * H, T, T, seed=1)
    work = dp.copy()

    def want():
        p64, dp64 = double(p), double(dp)
        return (SCALE * p64 * (dp64 - (p64 * dp64).sum(-1, keepdims=True)),)

    return Case(
        p.nbytes * 2,
        lambda: softmax.causal_softmax_bwd(work, p, T, SCALE),
        got=lambda: (softmax.causal_softmax_bwd(dp.copy(), p, T, SCALE),),
        want=want,
        peer=Peer(torch_causal_softmax, (draw(dtype, 4 * H, T, T, scale=3.0),), (dp,)),
        shape=f"heads={4 * H} T={T}",
    )


@case
def cross_entropy_both(dtype):
    logits = draw(dtype, N, V, scale=2.0)
    targets = cp.asarray(np.random.default_rng(1).integers(0, V, N))
    inverse = cross_entropy.count_targets(targets)
    rows = slice(0, N, N // 16)
    first = logits[rows].copy()

    def got():
        loss, gradient = cross_entropy.cross_entropy(logits, targets, V, inverse)
        return loss[rows], gradient[rows].copy()

    def want():
        x = double(first)
        return cross_entropy.cross_entropy_ref(x, targets[rows], V, double(inverse))

    def loss(logits, targets):
        return functional().cross_entropy(logits.float(), targets)

    return Case(
        2 * logits.nbytes,
        lambda: cross_entropy.cross_entropy(logits, targets, V, inverse),
        got=got,
        want=want,
        peer=Peer(loss, (logits, targets), ()),
        shape=f"N={N} V={V}",
    )


@case
def entropy_fwd(dtype):
    logits = draw(dtype, N, V, scale=2.0)
    rows = slice(0, N, N // 16)

    def peer(logits):
        logprobs = functional().log_softmax(logits.float(), -1)
        return -(logprobs.exp() * logprobs).sum(-1)

    return Case(
        logits.nbytes,
        lambda: entropy.entropy(logits, V),
        got=lambda: (entropy.entropy(logits, V)[rows],),
        want=lambda: (entropy.entropy_ref(double(logits[rows]), V),),
        peer=Peer(peer, (logits,)),
        shape=f"N={N} V={V}",
    )
