"""Cases of bench_kernels.py: element-wise kernels, kernels over the arena, and the embedding."""

import cupy as cp
import cupyx
import numpy as np
from _cases import (
    DTYPES,
    PARAMETERS,
    C,
    Case,
    F,
    N,
    Peer,
    V,
    case,
    double,
    draw,
    functional,
    size,
    torch_type,
)

from xtrain.kernels import adamw as A
from xtrain.kernels import cast, elementwise, embedding, grad_norm, swiglu
from xtrain.kernels.primitives.flat import BLOCK
from xtrain.kernels.runtime.launch import launch


# -------------------------------------------------------------------------- elementwise.py, cast.py
@case
def add(dtype):
    a = draw(dtype, N, C)
    b = draw(dtype, N, C, seed=1)
    y = cp.empty_like(a)
    naive = lambda: launch(
        elementwise.add_naive_kernel,
        -(-a.size // BLOCK),
        BLOCK,
        *(x.reshape(-1) for x in (y, a, b)),
    )
    return Case(
        3 * a.nbytes,
        lambda: elementwise.add_fwd(a, b),
        want=lambda: (double(a) + double(b),),
        peer=Peer(lambda a, b: a + b, (a, b)),
        naive=naive if dtype == np.float32 else None,
    )


@case
def add_into(dtype):
    a = draw(dtype, N, C)
    b = draw(dtype, N, C, seed=1)
    before = a.copy()

    def got():
        elementwise.add_into(a, b)
        return (a.copy(),)

    return Case(
        3 * a.nbytes,
        lambda: elementwise.add_into(a, b),
        got=got,
        want=lambda: (double(before) + double(b),),
        peer=Peer(lambda a, b: a.add_(b), (before, b)),
    )


@case
def scale(dtype):
    x = draw(dtype, N, C)
    return Case(
        2 * x.nbytes,
        lambda: elementwise.scale_fwd(x, 0.3),
        want=lambda: (double(x) * 0.3,),
        peer=Peer(lambda x: x * 0.3, (x,)),
    )


@case
def cast_narrow(dtype):
    x = draw(np.float32, N, C)
    y = cp.empty(x.size, np.uint16)
    naive = (y, x.reshape(-1).view(np.uint32))
    return Case(
        6 * x.size,
        lambda: cast.cast_fwd(x, DTYPES["bf16"]),
        want=lambda: (double(x),),
        peer=Peer(lambda x: x.to(torch_type(DTYPES["bf16"])), (x,)),
        naive=lambda: launch(cast.narrow_naive_kernel, -(-x.size // BLOCK), BLOCK, *naive),
    )


@case
def cast_widen(dtype):
    x = draw(DTYPES["bf16"], N, C)
    return Case(
        6 * x.size,
        lambda: cast.cast_fwd(x, np.float32),
        want=lambda: (double(x),),
        peer=Peer(lambda x: x.to(torch_type(np.float32)), (x,)),
    )


# ----------------------------------------------------------------------------- swiglu.py
def torch_swiglu(gu):
    gate, up = gu.chunk(2, -1)
    return functional().silu(gate) * up


@case
def swiglu_fwd(dtype):
    gu = draw(dtype, N, 2 * F, scale=2.0)
    y = cp.empty((N, F), dtype)
    naive = lambda: launch(swiglu.swiglu_fwd_naive_kernel, (N, -(-F // BLOCK)), BLOCK, y, gu)
    return Case(
        size(gu, y),
        lambda: swiglu.swiglu_fwd(gu),
        want=lambda: (swiglu.swiglu_ref(double(gu)),),
        peer=Peer(torch_swiglu, (gu,)),
        naive=naive if dtype == np.float32 else None,
        shape=f"N={N} F={F}",
    )


@case
def swiglu_bwd(dtype):
    gu = draw(dtype, N, 2 * F, scale=2.0)
    dy = draw(dtype, N, F, seed=1)
    return Case(
        size(gu, dy, gu),
        lambda: swiglu.swiglu_bwd(dy, gu),
        want=lambda: (swiglu.swiglu_bwd_ref(double(dy), double(gu)),),
        peer=Peer(torch_swiglu, (gu,), (dy,)),
        shape=f"N={N} F={F}",
    )


@case
def swiglu_bwd_again(dtype):
    """Measure the variant that training uses: it also recomputes y."""
    gu = draw(dtype, N, 2 * F, scale=2.0)
    dy = draw(dtype, N, F, seed=1)
    work = dy.copy()

    def got():
        y = dy.copy()
        return swiglu.swiglu_bwd(y, gu, recompute_y=True), y

    return Case(
        size(gu, dy, gu, dy),
        lambda: swiglu.swiglu_bwd(work, gu, recompute_y=True),
        got=got,
        want=lambda: (
            swiglu.swiglu_bwd_ref(double(dy), double(gu)),
            swiglu.swiglu_ref(double(gu)),
        ),
        shape=f"N={N} F={F}",
    )


@case
def silu_fwd(dtype):
    x = draw(dtype, N, F, scale=2.0)
    return Case(
        2 * x.nbytes,
        lambda: swiglu.silu_fwd(x),
        want=lambda: (swiglu.silu_ref(double(x)),),
        peer=Peer(lambda x: functional().silu(x), (x,)),
        shape=f"N={N} F={F}",
    )


@case
def silu_bwd(dtype):
    x = draw(dtype, N, F, scale=2.0)
    dy = draw(dtype, N, F, seed=1)
    return Case(
        3 * x.nbytes,
        lambda: swiglu.silu_bwd(dy, x),
        want=lambda: (swiglu.silu_bwd_ref(double(dy), double(x)),),
        peer=Peer(lambda x: functional().silu(x), (x,), (dy,)),
        shape=f"N={N} F={F}",
    )


# ----------------------------------------------------------------------------- embedding.py
def ids_like_text():
    """Draw ids of which a tenth are the same token; the frequencies of the others decrease.

    As in text.
    """
    rng = np.random.default_rng(7)
    ids = rng.permutation(V)[(V ** rng.random(N) - 1).astype(np.int64)].astype(np.int32)
    ids[rng.random(N) < 0.1] = 11
    return ids


def ids_uniform():
    return np.random.default_rng(7).integers(0, V, N).astype(np.int32)


def embedding_fwd_case(dtype, ids):
    w = draw(dtype, V, C)
    on_gpu = cp.asarray(ids)
    rows = np.unique(ids).size
    return Case(
        (N + rows) * C * dtype.itemsize,  # a row that occurs is read once
        lambda: embedding.embedding_fwd(on_gpu, w),
        want=lambda: (double(w)[on_gpu],),
        peer=Peer(lambda ids, w: functional().embedding(ids, w), (on_gpu, w)),
        shape=f"N={N} C={C} V={V} rows={rows}",
    )


def embedding_bwd_case(dtype, ids, plan_too=False):
    """Measure the backward. The plan depends only on the ids and is made in the forward pass.

    plan_too: include it in the time, as in PyTorch.
    """
    dx = draw(dtype, N, C)
    dw = cp.zeros((V, C), np.float32)
    on_gpu = cp.asarray(ids)
    rows = np.unique(ids).size
    plan = None if plan_too else embedding.embedding_plan(on_gpu, V)

    def got():
        fresh = cp.ones((V, C), np.float32)
        embedding.embedding_bwd(dx, on_gpu, fresh, plan)
        return (fresh,)

    def want():
        total = cp.ones((V, C))
        cupyx.scatter_add(total, on_gpu, double(dx))
        return (total,)

    lookup = lambda ids, w: functional().embedding(ids, w)
    return Case(
        dx.nbytes + 2 * rows * C * 4,  # rows of dw are read and written
        lambda: embedding.embedding_bwd(dx, on_gpu, dw, plan),
        got=got,
        want=want,
        peer=Peer(lookup, (on_gpu, draw(dtype, V, C)), (dx,)) if plan_too else None,
        shape=f"N={N} C={C} V={V} rows={rows}",
    )


@case
def embedding_plan(dtype):
    ids = ids_uniform()
    on_gpu = cp.asarray(ids)

    def want():
        n = np.argsort(ids, kind="stable")
        edges = [np.searchsorted(ids[n], ids[n], side) for side in ("left", "right")]
        return (np.stack([n, ids[n], *edges], 1).astype(np.float64),)

    return Case(
        ids.nbytes + N * 16,
        lambda: embedding.embedding_plan(on_gpu, V),
        got=lambda: (embedding.embedding_plan(on_gpu, V).order_N4.astype(np.float32),),
        want=want,
        shape=f"N={N} V={V}",
    )


@case
def embedding_fwd(dtype):
    return embedding_fwd_case(dtype, ids_uniform())


@case
def embedding_fwd_text(dtype):
    return embedding_fwd_case(dtype, ids_like_text())


@case
def embedding_bwd(dtype):
    return embedding_bwd_case(dtype, ids_uniform())


@case
def embedding_bwd_text(dtype):
    return embedding_bwd_case(dtype, ids_like_text())


@case
def embedding_plan_and_bwd(dtype):
    return embedding_bwd_case(dtype, ids_uniform(), plan_too=True)


@case
def embedding_plan_and_bwd_text(dtype):
    return embedding_bwd_case(dtype, ids_like_text(), plan_too=True)


# --------------------------------------------------------------------------- adamw.py, grad_norm.py
def adamw_case(with_half, zero_grad):
    n = PARAMETERS
    w, g, m = (draw(np.float32, n, seed=s) for s in range(3))
    v = cp.square(draw(np.float32, n, seed=3))
    half = cp.empty(n, DTYPES["bf16"]) if with_half else None
    factor = cp.asarray([0.7], np.float32)
    hyper = cp.asarray(A.adamw_hyper(1e-3, 0.9, 0.95, 5))
    settings = (n // 2, 0.9, 0.95, 1e-8, 0.1)
    run = lambda: A.adamw(w, g, m, v, factor, hyper, *settings, half, zero_grad)
    some = slice(n // 2 - 3, n // 2 + 100_000)
    before = [x[some].copy() for x in (w, g, m, v)]

    def got():
        run()
        return tuple(x[some] for x in (w, m, v)) + ((half[some],) if with_half else ())

    def want():
        w64, g64, m64, v64 = map(double, before)
        A.adamw_ref(w64, g64, m64, v64, double(factor), double(hyper), 3, *settings[1:])
        return (w64, m64, v64) + ((w64,) if with_half else ())

    return Case(
        n * (28 + 2 * with_half + 4 * zero_grad),
        run,
        got=got,
        want=want,
        peer=None if with_half else Peer(torch_adamw, (w, g, m, v), eager=torch_fused_adamw()),
        shape=f"n={n}",
    )


def torch_adamw(w, g, m, v):
    """Written out for the compiler; the eager column uses torch.optim.AdamW(fused=True)."""
    w.mul_(1 - 1e-4)
    m.lerp_(g, 0.1)
    v.mul_(0.95).addcmul_(g, g, value=0.05)
    w.addcdiv_(m, (v / 0.2).sqrt_().add_(1e-8), value=-1e-3)


def torch_fused_adamw():
    made = {}

    def step(w, g, m, v):
        import torch

        if not made:
            w.grad = g
            made["optimizer"] = torch.optim.AdamW([w], lr=1e-3, fused=True, capturable=True)
        made["optimizer"].step()

    return step


@case
def adamw(dtype):
    return adamw_case(False, False)


@case
def adamw_with_copy_and_zeros(dtype):
    return adamw_case(True, True)


@case
def grad_norm_and_factor(dtype):
    g = draw(np.float32, PARAMETERS)

    def want():
        norm = cp.sqrt(cp.square(g).sum(dtype=np.float64))
        return (cp.stack([norm, 1 / (norm + 1e-6)]),)

    def clip(g):
        import torch

        norm = torch.linalg.vector_norm(g)
        return norm, (1 / (norm + 1e-6)).clamp(max=1)

    return Case(
        g.nbytes,
        lambda: grad_norm.grad_norm(g, 1.0),
        want=want,
        peer=Peer(clip, (g,)),
        shape=f"n={PARAMETERS}",
    )
