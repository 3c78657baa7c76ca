"""One new token per sequence, in one kernel: QK-norm, RoPE, append to the cache, attention.

qkv: (B, P), P = (H + 2G) D    k, v: (R, G, S, D), a layer's cache    o: (B, C), C = H D

Token b stands at position t = lengths[b] of cache row r = rows[b]:
    q, k, v = heads of qkv[b];   q, k normed if there are weights and turned to position t   (qk_norm_rope.py)
    cache[r, :, t] = k, v
    o = softmax(scale q cache_k[r, :, 0..t]^T) cache_v[r, :, 0..t]
A row with rows[b] < 0, or a length outside 0 .. S - 1, is idle: nothing is appended, and o[b] = 0.
"""

import numpy as np

from ..device import Array
from ._launch import check, check_array, on_host
from .kv_cache import check_cache, check_int32
from .qk_norm_rope import qk_norm_rope_ref
from .rope import check_tables


# ----------------------------------------------------------------------------- reference
def decode_attention_ref(
    qkv_BP, k_RGSD, v_RGSD, lengths_B, rows_B, cos_PR, sin_PR, q_w_D, k_w_D, eps, scale
):
    """-> o (B, C). Appends to the caches in place. Computes in qkv's type, or float32 for bf16."""
    G, S, D = k_RGSD.shape[1:]
    H = qkv_BP.shape[1] // D - 2 * G
    o_BHD = np.zeros((len(rows_B), H, D), qkv_BP.dtype)
    live_B = np.flatnonzero((rows_B >= 0) & (lengths_B >= 0) & (lengths_B < S))
    if not live_B.size:
        return o_BHD.reshape(-1, H * D)
    wide = np.result_type(qkv_BP.dtype, np.float32)
    qkv = qkv_BP[live_B].astype(wide)
    tables = cos_PR, sin_PR, H, G, lengths_B[live_B]
    q_NHD, k_NGD, v_NGD, _ = qk_norm_rope_ref(qkv, q_w_D, k_w_D, *tables, eps)
    for i, b in enumerate(live_B):
        row, t = rows_B[b], lengths_B[b]
        k_RGSD[row, :, t], v_RGSD[row, :, t] = k_NGD[i], v_NGD[i]
        q_GXD = q_NHD[i].reshape(G, H // G, D)
        k_GSD, v_GSD = (x[row, :, : t + 1].astype(wide) for x in (k_RGSD, v_RGSD))
        s_GXS = q_GXD @ k_GSD.swapaxes(1, 2) * wide.type(scale)
        p_GXS = np.exp(s_GXS - s_GXS.max(-1, keepdims=True))
        o_BHD[b] = (p_GXS @ v_GSD / p_GXS.sum(-1, keepdims=True)).reshape(H, D)
    return o_BHD.reshape(-1, H * D)


# ----------------------------------------------------------------------------- launcher
def decode_attention(
    qkv_BP: Array,
    k_RGSD: Array,
    v_RGSD: Array,
    lengths_B: Array,
    rows_B: Array,
    cos_PR: Array,
    sin_PR: Array,
    q_w_D: Array | None,
    k_w_D: Array | None,
    eps: float,
    scale: float,
) -> Array:
    """-> o (B, H D) like qkv; keys and values of the B new tokens are appended to the cache.

    qkv, caches float32 or all bf16; lengths, rows (B,) int32, in the memory of the device: nothing here depends on their
    values. cos, sin (P, D/2), P >= S, and the norm weights (D,), both or none, float32. No two tokens may share a row.
    """
    op = "decode_attention"
    R, G, S, D = check_cache(op, k_RGSD, v_RGSD)
    check_tables(op, cos_PR, sin_PR, D)
    check(cos_PR.shape[0] >= S, f"{op}: tables of {cos_PR.shape[0]} positions, the cache has {S}")
    check_array(op, "qkv", qkv_BP, (None, None), (k_RGSD.dtype.name,))
    B, P = qkv_BP.shape
    H = P // D - 2 * G
    check(P % D == 0 and H > 0 and H % G == 0, f"{op}: qkv of {P} columns, heads of {D}, {G} of k")
    check((q_w_D is None) == (k_w_D is None), f"{op}: give both norm weights or none")
    weights = () if q_w_D is None else (q_w_D, k_w_D)
    for w in weights:
        check_array(op, "norm weight", w, (D,))
    check_int32(op, "lengths", lengths_B, B)
    check_int32(op, "rows", rows_B, B)
    tables = (lengths_B, rows_B, cos_PR, sin_PR)
    if on_host(qkv_BP, k_RGSD, v_RGSD, *tables, *weights):
        check((rows_B < R).all(), f"{op}: row {rows_B.max(initial=0)}, the cache has {R}")
        return decode_attention_ref(qkv_BP, k_RGSD, v_RGSD, *tables, q_w_D, k_w_D, eps, scale)
    raise NotImplementedError
