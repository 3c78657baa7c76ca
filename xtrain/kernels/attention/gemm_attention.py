"""Causal attention by matrix products (Vaswani et al. 2017), all heads of all sequences at once.

    q: (B, T, H, D)    k, v: (B, S, G, D)    o: (B, T, H, D)
    forward    s = q k^T / sqrt(D)        p = softmax(s), causal        o = p v
    backward   dv = p^T do    dp = do v^T    ds = softmax_bwd(dp, p)    dq = ds k    dk = ds^T q

Two strided-batched GEMMs around one softmax kernel; no loop over heads or sequences. The batch of
the GEMMs is (sequence, key head), B G of them: the H / G query heads that share a key head are
stacked as rows, so grouped-query attention costs nothing extra, and the GEMM sums dk and dv over
the group. One layout kernel converts between BTHD and BHTD; it reads v from a slice of a packed
array and writes dv to a slice of a packed gradient.

With a window or documents (key_bounds.py), the scores of hidden keys are set to -infinity before
the softmax. p is 0 there, so backward needs no mask.

Saved for backward: p, (B, H, T, S) floats, S / D times as many as q has. flash_attention.py
recomputes p instead.
"""

import functools

import numpy as np

from ...device import Array
from ..gemm import matmul
from ..layout import swap_heads
from ..primitives.ptx import kernel
from ..runtime.compiler import cuda, float32, int32, int64
from ..runtime.launch import check, check_array, empty, launch, on_host
from ..softmax import causal_softmax_bwd, causal_softmax_fwd
from .key_bounds import UNBOUNDED, KeyBounds, check_bounds, make_first_key

BLOCK = 256  # threads


# ----------------------------------------------------------------------------- hidden keys
@functools.cache
def make_hide_kernel(KIND: int):
    """Return the kernel that hides the keys before the first one of a query. KIND: of
    key_bounds.py."""
    first_key = make_first_key(KIND)

    @kernel(BLOCK)
    def hide_keys_kernel(s_NS, first, T, sequence_rows, past):
        """Grid N, block BLOCK. Block n owns a row of scores: query n % T of a head."""
        n = int64(cuda.blockIdx.x)
        sequence = n // sequence_rows
        end = first_key(first, sequence * T, int32(n % T), past)
        for s in range(cuda.threadIdx.x, end, BLOCK):
            s_NS[n, s] = float32(-np.inf)

    return hide_keys_kernel


def hide_keys(s_ARS: Array, bounds: KeyBounds, B: int, T: int) -> None:
    """Set the scores of keys before the first one of each query to -infinity, in place.

    s: (A, R, S) float32 of B sequences, row r is query r % T.
    """
    A, R, S = s_ARS.shape
    check_array("hide_keys", "s", s_ARS, (None,) * 3, ("float32", "float64"))
    if on_host(s_ARS):
        s_BNTS = s_ARS.reshape(B, -1, T, S)
        s_BNTS += np.where(bounds.hidden(T, S), -np.inf, 0).astype(s_ARS.dtype)[:, None]
    elif s_ARS.size:
        rows = s_ARS.reshape(A * R, S)
        scalars = np.int32(T), np.int32(A * R // B), np.int32(S - T)
        launch(make_hide_kernel(bounds.kind), A * R, BLOCK, rows, bounds.first(rows), *scalars)


# ----------------------------------------------------------------------------- attention


def _stack(x_BXTD, G):
    """(B, X, T, D) -> (B G, X/G T, D), a view"""
    B, X, T, D = x_BXTD.shape
    return x_BXTD.reshape(B * G, X // G * T, D)


def attention_fwd(
    q_BTHD: Array,
    k_BSGD: Array,
    v_BSGD: Array,
    scale: float,
    causal: bool = True,
    bounds: KeyBounds = UNBOUNDED,
) -> tuple[Array, tuple]:
    """Return o (B, T, H, D), and what attention_bwd needs.

    q (B, T, H, D), k, v (B, S, G, D): all float32 or all bf16, H % G == 0. scale: factor of the
    scores. bounds: which keys a causal query does not see. Raises ValueError or TypeError if shapes
    or dtypes do not match.
    """
    for name, x in (("q", q_BTHD), ("k", k_BSGD), ("v", v_BSGD)):
        check_array("attention", name, x, (None,) * 4, strided=True)
    B, T, H, D = q_BTHD.shape
    S, G = k_BSGD.shape[1:3]
    fits = k_BSGD.shape == v_BSGD.shape == (B, S, G, D) and G > 0 and H % G == 0
    shapes = f"q {q_BTHD.shape}, k {k_BSGD.shape}, v {v_BSGD.shape}"
    check(fits, f"attention: the shapes do not match: {shapes}")
    check(S >= T or not causal, f"attention: {T} causal queries need at least {T} keys, got {S}")
    check(S > 0 or T == 0, f"attention: {T} queries without keys")
    check_bounds("attention", bounds, B, T, S, causal)
    q_BHTD, k_BGSD, v_BGSD = map(swap_heads, (q_BTHD, k_BSGD, v_BSGD))
    q, k, v = (_stack(x, G) for x in (q_BHTD, k_BGSD, v_BGSD))
    p_ARS = matmul(empty(q, (*q.shape[:2], S)), q, k, trans_b=True)
    if bounds is not UNBOUNDED:
        hide_keys(p_ARS, bounds, B, T)
    p_ARS = causal_softmax_fwd(p_ARS, T, scale, causal)  # in place over the scores
    o = matmul(empty(q, q.shape), p_ARS, v)
    return swap_heads(o.reshape(q_BHTD.shape)), (q_BHTD, k_BGSD, v_BGSD, p_ARS)


def attention_bwd(
    do_BTHD: Array, saved: tuple, scale: float, causal: bool = True, dv_BSGD: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return dq (B, T, H, D), dk, dv (B, S, G, D).

    do: the gradient of o. saved: the second result of attention_fwd. dv_BSGD: if given, dv is
    written there, for example to a slice of a packed gradient.
    """
    T = do_BTHD.shape[1]
    *shared, p_ARS = saved
    G = shared[1].shape[1]
    do, q, k, v = (_stack(x, G) for x in (swap_heads(do_BTHD), *shared))
    dv = matmul(empty(v, v.shape), p_ARS, do, trans_a=True)
    dp_ARS = matmul(empty(p_ARS, p_ARS.shape), do, v, trans_b=True)
    ds_ARS = causal_softmax_bwd(dp_ARS, p_ARS, T, scale, causal)  # in place over dp
    dq = matmul(empty(q, q.shape), ds_ARS, k)
    dk = matmul(empty(k, k.shape), ds_ARS, q, trans_a=True)
    dq, dk, dv = (dx.reshape(x.shape) for dx, x in zip((dq, dk, dv), shared))
    return swap_heads(dq), swap_heads(dk), swap_heads(dv, dv_BSGD)
