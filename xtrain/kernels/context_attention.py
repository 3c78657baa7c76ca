"""Attention of a prefill: packed prompts of any lengths, each in front of what it has in the cache already.

    q, o: (N, H, D)    k, v: (R, G, S, D), a layer's cache    edges: (E,), E = A + 1, see padding.py

    Query i of sequence a stands at position h_a + i (h_a: its history) and sees the keys 0 .. h_a + i of row r_a:
               s = scale q k^T,   p = softmax(s),   o = p v                       the new keys are in the cache before

It is flash_attention.py's forward with three differences: a sequence begins at edges[a] instead of a T, its keys lie
in a row of the cache, one head behind the other, and there are h_a + i + 1 of them, a number that only the device
knows. Nothing is computed or loaded for padding: a block whose queries lie beyond its sequence leaves at once.
Grouped queries: H / G query heads read the same key head, never a copy.
"""

import numpy as np

from ..device import Array
from ._launch import check, check_array, on_host
from .kv_cache import check_cache, check_int32


# ----------------------------------------------------------------------------- reference
def context_attention_ref(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, rows_A, scale):
    """-> o (N, H, D); computes in q's type, or float32 for bf16"""
    G, H = k_RGSD.shape[1], q_NHD.shape[1]
    o_NHD, wide = np.zeros_like(q_NHD), np.result_type(q_NHD.dtype, np.float32)
    for a, row in enumerate(rows_A):
        first, last, past = edges_E[a], edges_E[a + 1], history_A[a]
        T, S = last - first, past + last - first
        q_GRTD = q_NHD[first:last].reshape(T, G, H // G, -1).transpose(1, 2, 0, 3).astype(wide)
        k_G1SD, v_G1SD = (x[row, :, None, :S].astype(wide) for x in (k_RGSD, v_RGSD))
        s_GRTS = q_GRTD @ k_G1SD.swapaxes(2, 3) * wide.type(scale)
        s_GRTS = np.where(np.tri(T, S, past, dtype=bool), s_GRTS, wide.type(-np.inf))
        p_GRTS = np.exp(s_GRTS - s_GRTS.max(-1, keepdims=True, initial=-np.inf))
        o_GRTD = p_GRTS @ v_G1SD / p_GRTS.sum(-1, keepdims=True)
        o_NHD[first:last] = o_GRTD.transpose(2, 0, 1, 3).reshape(T, H, -1)
    return o_NHD


# ----------------------------------------------------------------------------- launcher
def context_attention(
    q_NHD: Array,
    k_RGSD: Array,
    v_RGSD: Array,
    edges_E: Array,
    history_A: Array,
    rows_A: Array,
    longest: int,
    scale: float,
) -> Array:
    """-> o (N, H, D) like q. The cache holds the new keys already (kv_cache.append_kv).

    q float32 or bf16 like the cache. edges, history, rows: int32. longest: at least the longest new length.
    Raises ValueError or TypeError for what does not fit; on the CPU also for a history beyond the cache.
    """
    op = "context_attention"
    R, G, S, D = check_cache(op, k_RGSD, v_RGSD)
    check_array(op, "q", q_NHD, (None, None, D), (k_RGSD.dtype.name,))
    N, H, _ = q_NHD.shape
    A = rows_A.size
    for name, x, n in (("edges", edges_E, A + 1), ("history", history_A, A), ("rows", rows_A, A)):
        check_int32(op, name, x, n)
    check(H % G == 0, f"{op}: {H} query heads cannot share {G} key heads")
    if on_host(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, rows_A):
        _check_places(op, edges_E, history_A, rows_A, N, R, S, longest)
        return context_attention_ref(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, rows_A, scale)
    raise NotImplementedError


def _check_places(op, edges_E, history_A, rows_A, N, R, S, longest):
    lengths_A = np.diff(edges_E)
    check(edges_E[-1] == N, f"{op}: {N} queries, the edges end at {edges_E[-1]}")
    check((lengths_A <= longest).all(), f"{op}: a sequence is longer than longest = {longest}")
    fits = (history_A >= 0).all() and (history_A + lengths_A <= S).all()
    check(fits, f"{op}: history and new tokens do not fit the cache of {S} positions")
    check(((rows_A >= 0) & (rows_A < R)).all(), f"{op}: a row is not in 0 .. {R - 1}")
