"""FlashAttention-2 (Dao 2023): exact attention whose memory grows with T, not with T^2.

    q: (B, T, H, D)   k, v: (B, S, G, D)   o: (B, T, H, D)   lse: (B, H, T)

    forward    s = scale q k^T,  p = softmax(s),  o = p v

A tile of queries walks over tiles of keys, and neither s nor p is ever written to memory. The softmax is computed on
the way (Milakov & Gimelshein 2018): with the maximum m and the sum l of the tiles so far,

               m' = max(m, max_j s_j)
               l' = l exp(m - m') + sum_j exp(s_j - m')       acc' = acc exp(m - m') + sum_j exp(s_j - m') v_j

and in the end o = acc / l. Saved are o and lse = m + log l, one number per row: p = exp(s - lse) needs no second
softmax.

    backward   p is computed again, tile by tile: two products more, T^2 numbers less to keep.
               dv = p^T do      dp = do v^T
               ds = p (dp - delta)     delta_t = sum_s p_ts dp_ts = sum_s p_ts (do_t . v_s) = do_t . o_t
               dq = scale ds k  dk = scale ds^T q

delta, the softmax's sum over a whole row, is a dot product of two vectors that are at hand (the step that makes
backward by tiles possible). Grouped queries: H / G query heads share a key head, and its dk, dv are sums over them.

With `causal`, query t sees the keys s <= t + (S - T): S > T means that the first S - T keys are a past that all see.
Operations: 4 B H T S D forward, 2.5 times that backward, and half of it if causal.

    NumPy             the references below
    bf16              flash_attention_bf16.py, flash_attention_bf16_bwd.py: tensor cores, D = 16, 32, 64, 128
    float32           flash_attention_fp32.py: any D up to 128; also the version to read first

Nothing is added up by atomics: the same input gives the same bits.
"""

import functools

import numpy as np

from ..device import Array, cupy
from ..simulator import SimArray
from . import flash_attention_bf16 as bf16
from . import flash_attention_bf16_bwd as bf16_bwd
from . import flash_attention_fp32 as fp32
from ._launch import FLOATS, check, check_array, empty, launch, on_host
from ._tiles import WIDTHS
from .flash_attention_table import TABLE

SMALL = {  # for GPUs that give a block less shared memory than the table's choice needs; all fit 99 KB
    "fwd": (64, 64, 4, False, 2),
    "dq": (64, 32, 4, 2),
    "dkdv": (64, 32, 4, False, 1),
}
SHARED_BYTES = {
    "fwd": bf16.fwd_shared_bytes,
    "dq": bf16_bwd.dq_shared_bytes,
    "dkdv": bf16_bwd.dkdv_shared_bytes,
}


# ----------------------------------------------------------------------------- references
def _by_group(x_BTHD, G):
    """(B, T, H, D) -> (B, G, H / G, T, D): query heads beside the key head they use"""
    B, T, H, D = x_BTHD.shape
    return x_BTHD.reshape(B, T, G, H // G, D).transpose(0, 2, 3, 1, 4)


def _by_head(x_BGRTD):
    """The way back"""
    B, G, R, T, D = x_BGRTD.shape
    return x_BGRTD.transpose(0, 3, 1, 2, 4).reshape(B, T, G * R, D)


def _scores(q_BGRTD, k_BG1SD, scale, causal):
    T, S = q_BGRTD.shape[3], k_BG1SD.shape[3]
    s = q_BGRTD @ k_BG1SD.swapaxes(3, 4) * q_BGRTD.dtype.type(scale)
    return np.where(np.tri(T, S, S - T, dtype=bool), s, -np.inf).astype(s.dtype) if causal else s


def flash_attention_ref(q_BTHD, k_BSGD, v_BSGD, scale, causal=True):
    """-> o (B, T, H, D), lse (B, H, T)"""
    B, T, H, _ = q_BTHD.shape
    q, k, v = (_by_group(x, k_BSGD.shape[2]) for x in (q_BTHD, k_BSGD, v_BSGD))
    s = _scores(q, k, scale, causal)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return _by_head(p @ v / total), (top + np.log(total)).reshape(B, H, T)


def flash_attention_bwd_ref(do_BTHD, q_BTHD, k_BSGD, v_BSGD, o_BTHD, lse_BHT, scale, causal=True):
    """-> dq (B, T, H, D), dk, dv (B, S, G, D)"""
    G = k_BSGD.shape[2]
    do, q, k, v, o = (_by_group(x, G) for x in (do_BTHD, q_BTHD, k_BSGD, v_BSGD, o_BTHD))
    p = np.exp(_scores(q, k, scale, causal) - lse_BHT.reshape(q.shape[:-1])[..., None])
    delta = (do * o).sum(-1, keepdims=True)
    ds = p * (do @ v.swapaxes(3, 4) - delta) * q.dtype.type(scale)
    dk, dv = ds.swapaxes(3, 4) @ q, p.swapaxes(3, 4) @ do
    return _by_head(ds @ k), *(_by_head(x.sum(2, keepdims=True)) for x in (dk, dv))


# ----------------------------------------------------------------------------- launchers
def flash_attention_fwd(
    q_BTHD: Array, k_BSGD: Array, v_BSGD: Array, scale: float, causal: bool = True
) -> tuple[Array, Array]:
    """-> o (B, T, H, D) like q, lse (B, H, T) float32.

    float32 or bf16. q, k and v may be parts of one packed array (B, T, P): positions may lie further apart than
    H D elements. Raises ValueError or TypeError when shapes or types do not belong together.
    """
    B, T, H, D, S, G = _check("flash_attention", q_BTHD, k_BSGD, v_BSGD, scale, causal)
    if on_host(q_BTHD, k_BSGD, v_BSGD):
        o_BTHD, lse_BHT = flash_attention_ref(*map(_wide, (q_BTHD, k_BSGD, v_BSGD)), scale, causal)
        return o_BTHD.astype(q_BTHD.dtype), lse_BHT
    o_BTHD, lse_BHT = empty(q_BTHD, (B, T, H, D)), empty(q_BTHD, (B, H, T), np.float32)
    scale = np.float32(scale)
    if q_BTHD.dtype == np.float32:
        grid = -(-T // fp32.tile_rows(D)), B * H
        fwd_kernel = fp32.make_fwd_kernel(D, causal)
        launch(fwd_kernel, grid, fp32.THREADS, o_BTHD, lse_BHT, q_BTHD, k_BSGD, v_BSGD, scale)
        return o_BTHD, lse_BHT
    config = choose("fwd", D, T, causal, shared_limit(q_BTHD))
    q, k, v, sizes = _flat_inputs(q_BTHD, k_BSGD, v_BSGD)
    launch(
        bf16.make_fwd_kernel(D, causal, config), (-(-T // config[0]), B * H), 32 * config[2],
        o_BTHD.reshape(-1), lse_BHT.reshape(-1), q, k, v, *sizes, scale,
        shared=bf16.fwd_shared_bytes(D, config),
    )  # fmt: skip
    return o_BTHD, lse_BHT


def flash_attention_bwd(
    do_BTHD: Array, q_BTHD: Array, k_BSGD: Array, v_BSGD: Array, o_BTHD: Array, lse_BHT: Array,
    scale: float, causal: bool = True,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """-> dq (B, T, H, D), dk, dv (B, S, G, D), all new. o and lse are what the forward returned."""
    op = "flash_attention backward"
    B, T, H, D, S, G = _check(op, q_BTHD, k_BSGD, v_BSGD, scale, causal)
    for name, x in (("do", do_BTHD), ("o", o_BTHD)):
        check_array(op, name, x, (B, T, H, D), (q_BTHD.dtype.name,))
    check_array(op, "lse", lse_BHT, (B, H, T))
    if on_host(do_BTHD, q_BTHD, k_BSGD, v_BSGD, o_BTHD, lse_BHT):
        wide = map(_wide, (do_BTHD, q_BTHD, k_BSGD, v_BSGD, o_BTHD))
        gradients = flash_attention_bwd_ref(*wide, lse_BHT, scale, causal)
        return tuple(x.astype(q_BTHD.dtype) for x in gradients)
    dq_BTHD = empty(q_BTHD, (B, T, H, D))
    dk_BSGD, dv_BSGD = empty(k_BSGD, (B, S, G, D)), empty(k_BSGD, (B, S, G, D))
    delta_BHT, scale = empty(lse_BHT, (B, H, T)), np.float32(scale)
    inputs = do_BTHD, q_BTHD, k_BSGD, v_BSGD
    if q_BTHD.dtype == np.float32:
        rows = fp32.tile_rows(D)
        dq_kernel, dkdv_kernel = fp32.make_dq_kernel(D, causal), fp32.make_dkdv_kernel(D, causal)
        launch(
            dq_kernel, (-(-T // rows), B * H), fp32.THREADS,
            dq_BTHD, delta_BHT, *inputs, o_BTHD, lse_BHT, scale,
        )  # fmt: skip
        launch(
            dkdv_kernel, (-(-S // rows), B * G), fp32.THREADS,
            dk_BSGD, dv_BSGD, *inputs, lse_BHT, delta_BHT, scale,
        )  # fmt: skip
    else:
        _bwd_bf16(dq_BTHD, dk_BSGD, dv_BSGD, delta_BHT, *inputs, o_BTHD, lse_BHT, scale, causal)
    return dq_BTHD, dk_BSGD, dv_BSGD


def _bwd_bf16(dq, dk, dv, delta, do, q_BTHD, k_BSGD, v_BSGD, o, lse, scale, causal):
    B, T, H, D = q_BTHD.shape
    S, G = k_BSGD.shape[1:3]
    q, k, v, sizes = _flat_inputs(q_BTHD, k_BSGD, v_BSGD)
    dq, dk, dv, delta, do, o, lse = (x.reshape(-1) for x in (dq, dk, dv, delta, do, o, lse))
    config = choose("dq", D, T, causal, shared_limit(q))
    launch(
        bf16_bwd.make_dq_kernel(D, causal, config), (-(-T // config[0]), B * H), 32 * config[2],
        dq, delta, do, q, k, v, o, lse, *sizes, scale,
        shared=bf16_bwd.dq_shared_bytes(D, config),
    )  # fmt: skip
    config = choose("dkdv", D, T, causal, shared_limit(q))
    launch(
        bf16_bwd.make_dkdv_kernel(D, causal, config), (-(-S // config[0]), B * G), 32 * config[2],
        dk, dv, do, q, k, v, lse, delta, *sizes, scale,
        shared=bf16_bwd.dkdv_shared_bytes(D, config),
    )  # fmt: skip


def choose(kind: str, D: int, T: int, causal: bool, shared: int) -> tuple:
    """The tuned tiles of the kernel `kind` for heads of D and T queries, on a GPU with `shared` bytes per block."""
    rows = TABLE[kind, D, causal]
    config = next(config for longest, config in rows if longest is None or T <= longest)
    return config if SHARED_BYTES[kind](D, config) <= shared else SMALL[kind]


def shared_limit(x: Array) -> int:
    """Bytes of shared memory that a block may have where x lives."""
    return 227 * 1024 if isinstance(x, SimArray) else _gpu_shared_limit(x.device.id)


@functools.cache
def _gpu_shared_limit(device: int) -> int:
    return cupy().cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]


# ----------------------------------------------------------------------------- helpers
def _wide(x):
    """The references compute bf16 in float32."""
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


def _check(op, q_BTHD, k_BSGD, v_BSGD, scale, causal):
    check_array(op, "q", q_BTHD, (None,) * 4, FLOATS, strided=True)
    B, T, H, D = q_BTHD.shape
    dtype = (q_BTHD.dtype.name,)
    check_array(op, "k", k_BSGD, (B, None, None, D), dtype, strided=True)
    S, G = k_BSGD.shape[1:3]
    check_array(op, "v", v_BSGD, (B, S, G, D), dtype, strided=True)
    shapes = f"q {tuple(q_BTHD.shape)}, k {tuple(k_BSGD.shape)}"
    check(G > 0 and H % G == 0, f"{op}: {H} query heads cannot share {G} key heads: {shapes}")
    check(B * H < 2**16, f"{op}: {B * H} heads in one launch, at most 65535: {shapes}")
    check(S >= T or not causal, f"{op}: {T} causal queries need at least {T} keys: {shapes}")
    check(S > 0 or T == 0, f"{op}: queries without keys: {shapes}")
    check(scale > 0, f"{op}: scale must be positive, got {scale}")
    if not on_host(q_BTHD, k_BSGD, v_BSGD):
        good = 0 < D <= fp32.MAX_D if dtype == ("float32",) else D in WIDTHS
        wanted = f"{dtype[0]} needs " + (f"1 to {fp32.MAX_D}" if dtype == ("float32",) else str(WIDTHS))
        check(good, f"{op}: head dim {D}: {wanted}")
    return B, T, H, D, S, G


def _flat_inputs(q_BTHD, k_BSGD, v_BSGD):
    """-> q, k, v as flat arrays and the integers that all tensor-core kernels take"""
    (q, q_row), (k, k_row), (v, v_row) = map(_flat, (q_BTHD, k_BSGD, v_BSGD))
    if k_row != v_row:
        (k, k_row), (v, _) = (_flat(x.copy()) for x in (k_BSGD, v_BSGD))
    T, H = q_BTHD.shape[1:3]
    S, G = k_BSGD.shape[1:3]
    return q, k, v, [np.int32(n) for n in (T, S, H, H // G, q_row, k_row)]


def _flat(x_BTHD):
    """-> (flat array from the first element on, elements from one position to the next)

    Copies only if heads are not side by side, or rows not evenly spaced and 16-byte aligned.
    """
    B, T, H, D = x_BTHD.shape
    size = x_BTHD.itemsize
    row = x_BTHD.strides[1] // size
    even = x_BTHD.strides == (T * row * size, row * size, D * size, size)
    address = 0 if isinstance(x_BTHD, SimArray) else x_BTHD.data.ptr
    if x_BTHD.flags.c_contiguous and address % 16 == 0:
        return x_BTHD.reshape(-1), H * D
    if not even or row * size % 16 or address % 16 or x_BTHD.size == 0:
        return x_BTHD.copy().reshape(-1), H * D
    tricks = (np if isinstance(x_BTHD, SimArray) else cupy()).lib.stride_tricks
    more = {"subok": True} if isinstance(x_BTHD, SimArray) else {}
    return tricks.as_strided(x_BTHD, ((B * T - 1) * row + H * D,), (size,), **more), row
