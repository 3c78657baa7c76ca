"""FlashAttention-2 (Dao 2023): exact attention whose memory grows with T, not with T^2.

    q: (B, T, H, D)   k, v: (B, S, G, D)   o: (B, T, H, D)   lse: (B, H, T)

    forward    s = scale q k^T,  p = softmax(s),  o = p v

A tile of queries loops over tiles of keys; s and p are never written to global memory. The softmax
is computed online (Milakov & Gimelshein 2018): with the maximum m and the sum l over the tiles so
far,

               m' = max(m, max_j s_j)
               l' = l exp(m - m') + sum_j exp(s_j - m')
               acc' = acc exp(m - m') + sum_j exp(s_j - m') v_j

and at the end o = acc / l. Saved for backward: o and lse = m + log l, one number per row. Then p =
exp(s - lse) needs no second softmax.

    backward   p is recomputed tile by tile: more arithmetic, but T^2 fewer numbers to store.
               dv = p^T do      dp = do v^T
               ds = p (dp - delta)
               delta_t = sum_s p_ts dp_ts = sum_s p_ts (do_t . v_s) = do_t . o_t
               dq = scale ds k  dk = scale ds^T q

delta is a sum over a whole row of the softmax, but it equals the dot product of two saved vectors.
This step makes a backward in tiles possible. Grouped-query attention: H / G query heads share a key
head; its dk and dv are sums over them.

With `causal`, query t sees the keys s <= t + (S - T): if S > T, the first S - T keys are a past
that all queries see. key_bounds.py has what else may hide a key: a sliding window, or several
documents in a row.
Operations: 4 B H T S D forward, 2.5 times that backward; half of it if causal.

    NumPy                      the references below
    bf16, capability 9.0       flash_attention_hopper.py and its parts: wgmma and TMA, D = 64, 128
    bf16                       flash_attention_bf16.py, flash_attention_bf16_bwd*.py: mma.sync,
                               D = 16, 32, 64, 128, 256
    float32                    flash_attention_fp32.py: any D up to 256; the version to read first

No sum uses atomics: the same input gives the same bits.
"""

from collections.abc import Callable

import numpy as np

from ...device import Array
from ...simulator import SimArray
from ..primitives.flat import flat_rows, on_16_bytes, row_step
from ..primitives.tiles import WIDTHS
from ..primitives.tma import mappable
from ..runtime.invariance import is_batch_invariant
from ..runtime.launch import (
    FLOATS,
    check,
    check_array,
    dtype_name,
    empty,
    gpu_attribute,
    launch,
    multiprocessors,
    on_host,
    shared_limit,
    wide,
)
from . import flash_attention_bf16 as bf16
from . import flash_attention_bf16_bwd as bf16_bwd
from . import flash_attention_bf16_bwd_d128 as bf16_bwd_d128
from . import flash_attention_fp32 as fp32
from . import flash_attention_hopper as hopper
from . import flash_attention_hopper_bwd as hopper_bwd
from . import gemm_attention
from .flash_attention_hopper import Gpu
from .flash_attention_table import TABLE, Tiles
from .key_bounds import UNBOUNDED, KeyBounds, check_bounds

# see make_grid; measured on one H200
FEW_ROUNDS = 12
LONG = 2048
# True: use the wgmma kernels on capability 9.0 and in the simulator. False: always mma.sync.
HOPPER = True
# In batch-invariant mode the mma.sync forward has the tiles for so many queries, whatever T is, as
# context_attention.py, which serves: the number of keys of a tile decides the bits.
# flash_attention_hopper_table.py has the same for wgmma.
INVARIANT_T = 2048
# Queries and keys of a tile on the CPU, in that mode; TILE_S is a multiple of TILE_T.
TILE_T = 16
TILE_S = 64
MAX_GRID = 2**16 - 1  # blocks in y or z
LOWEST = -1e30  # initial maximum on the CPU; with -inf, -inf - -inf would be NaN
# used if the table's tiles need more shared memory than a block gets; all fit the 99 KB of 8.6,
# 8.9, 12.0
SMALL = {
    "fwd": Tiles(BM=64, BN=64, warps=4, blocks=2),
    "dq": Tiles(BM=64, BN=32, warps=4, blocks=2),
    "dkdv": Tiles(BM=32, BN=64, warps=4, blocks=1),
}
SMALL_WIDE = {  # of heads of 256
    "fwd": Tiles(BM=64, BN=32, warps=4, blocks=1),
    "dq": Tiles(BM=64, BN=16, warps=4, blocks=1),
    "dkdv": Tiles(BM=16, BN=32, warps=4, blocks=1),
}


# ----------------------------------------------------------------------------- references
def _by_group(x_BTHD, G):
    """(B, T, H, D) -> (B, G, H / G, T, D): query heads grouped by the key head that they use"""
    B, T, H, D = x_BTHD.shape
    return x_BTHD.reshape(B, T, G, H // G, D).transpose(0, 2, 3, 1, 4)


def _by_head(x_BGRTD):
    """(B, G, H / G, T, D) -> (B, T, H, D)"""
    B, G, R, T, D = x_BGRTD.shape
    return np.ascontiguousarray(x_BGRTD.transpose(0, 3, 1, 2, 4)).reshape(B, T, G * R, D)


def _scores(q_BGRTD, k_BG1SD, scale, causal, bounds):
    T, S = q_BGRTD.shape[3], k_BG1SD.shape[3]
    s = q_BGRTD @ k_BG1SD.swapaxes(3, 4) * q_BGRTD.dtype.type(scale)
    if not causal:
        return s
    hidden_BTS = ~np.tri(T, S, S - T, dtype=bool) | bounds.hidden(T, S)
    return np.where(hidden_BTS[:, None, None], -np.inf, s).astype(s.dtype)


def flash_attention_ref(q_BTHD, k_BSGD, v_BSGD, scale, causal=True, bounds=UNBOUNDED):
    """The forward of this file's docstring in NumPy, in the dtype of the inputs -> o (B, T, H, D),
    lse (B, H, T)"""
    B, T, H, _ = q_BTHD.shape
    q, k, v = (_by_group(x, k_BSGD.shape[2]) for x in (q_BTHD, k_BSGD, v_BSGD))
    s = _scores(q, k, scale, causal, bounds)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return _by_head(p @ v / total), (top + np.log(total)).reshape(B, H, T)


def tiled_attention_ref(q_THD, k_GSD, v_GSD, scale, past, first_T=None):
    """Causal attention of one sequence in tiles, query t at position past + t -> o (T, H, D), lse
    (H, T)

    first_T: the first key that each query sees; None: 0.
    Tiles begin at multiples of their size, and every product has the same shape. So all operations
    on a row are given by its
    position: its bits depend neither on T nor on `past`, nor on the keys after it.
    """
    T, H, D = q_THD.shape
    # first: of the tiles of queries
    G = len(k_GSD)
    end = past + T
    first = past // TILE_T
    # tiles of queries, of keys
    A = -(-end // TILE_T) - first
    B = -(-end // TILE_S)
    q_GRAXD = np.zeros((G, H // G, A, TILE_T, D), q_THD.dtype)
    rows = slice(past - first * TILE_T, end - first * TILE_T)
    q_GRAXD.reshape(G, H // G, -1, D)[:, :, rows] = q_THD.reshape(T, G, -1, D).transpose(1, 2, 0, 3)
    k_GBSD, v_GBSD = np.zeros((2, G, 1, 1, B, TILE_S, D), q_THD.dtype)
    for tiles, x_GSD in ((k_GBSD, k_GSD), (v_GBSD, v_GSD)):
        tiles.reshape(G, -1, D)[:, :end] = x_GSD[:, :end]
    first_AX1 = np.zeros((A, TILE_T, 1), np.int64)
    if first_T is not None:
        first_AX1.reshape(-1)[rows] = first_T
    position_AX1 = np.arange(first * TILE_T, (first + A) * TILE_T).reshape(A, TILE_T, 1)
    acc = np.zeros_like(q_GRAXD)
    top = np.full_like(acc[..., :1], LOWEST)
    total = np.zeros_like(acc[..., :1])
    for b in range(B):
        a = max(b * TILE_S // TILE_T - first, 0)  # the queries before see none of these keys
        s = q_GRAXD[:, :, a:] @ k_GBSD[:, :, :, b].swapaxes(-1, -2) * q_THD.dtype.type(scale)
        key_S = np.arange(b * TILE_S, (b + 1) * TILE_S)
        s[:, :, (position_AX1[a:] < key_S) | (key_S < first_AX1[a:])] = -np.inf
        new = np.maximum(top[:, :, a:], s.max(-1, keepdims=True))
        shrink = np.exp(top[:, :, a:] - new)
        p = np.exp(s - new)
        top[:, :, a:] = new
        total[:, :, a:] = total[:, :, a:] * shrink + p.sum(-1, keepdims=True)
        acc[:, :, a:] = acc[:, :, a:] * shrink + p @ v_GBSD[:, :, :, b]
    join = lambda x: x.reshape(H, A * TILE_T, -1)[:, rows]
    return join(acc / total).swapaxes(0, 1), join(top + np.log(total))[..., 0]


def flash_attention_bwd_ref(
    do_BTHD, q_BTHD, k_BSGD, v_BSGD, o_BTHD, lse_BHT, scale, causal=True, bounds=UNBOUNDED
):
    """The backward of this file's docstring in NumPy -> dq (B, T, H, D), dk, dv (B, S, G, D)"""
    G = k_BSGD.shape[2]
    do, q, k, v, o = (_by_group(x, G) for x in (do_BTHD, q_BTHD, k_BSGD, v_BSGD, o_BTHD))
    p = np.exp(_scores(q, k, scale, causal, bounds) - lse_BHT.reshape(q.shape[:-1])[..., None])
    delta = (do * o).sum(-1, keepdims=True)
    ds = p * (do @ v.swapaxes(3, 4) - delta) * q.dtype.type(scale)
    dk, dv = ds.swapaxes(3, 4) @ q, p.swapaxes(3, 4) @ do
    return _by_head(ds @ k), *(_by_head(x.sum(2, keepdims=True)) for x in (dk, dv))


# ----------------------------------------------------------------------------- launchers
def flash_attention_fwd(
    q_BTHD: Array,
    k_BSGD: Array,
    v_BSGD: Array,
    scale: float,
    causal: bool = True,
    bounds: KeyBounds = UNBOUNDED,
) -> tuple[Array, Array]:
    """Attention of q (B, T, H, D) over k, v (B, S, G, D) -> o (B, T, H, D) like q, lse (B, H, T)
    float32.

    q, k, v: all float32 or all bf16. Each may be a slice of a packed array (B, T, P), so positions
    may be more than H D elements apart. scale: factor of the scores, > 0. bounds: a sliding window
    or documents; then `causal` must be True. Raises ValueError or TypeError if shapes or dtypes do
    not match.
    """
    _check("flash_attention", q_BTHD, k_BSGD, v_BSGD, scale, causal, bounds)
    B, T, H, D = q_BTHD.shape
    S = k_BSGD.shape[1]
    if on_host(q_BTHD, k_BSGD, v_BSGD):
        q, k, v = map(wide, (q_BTHD, k_BSGD, v_BSGD))
        if not (causal and is_batch_invariant()):
            o_BTHD, lse_BHT = flash_attention_ref(q, k, v, scale, causal, bounds)
            return o_BTHD.astype(q_BTHD.dtype), lse_BHT
        o_BTHD = empty(q_BTHD, q_BTHD.shape)
        lse_BHT = empty(q, (len(q), *q.shape[2:0:-1]))
        for b, (k_SGD, v_SGD) in enumerate(zip(k, v)):
            keys = k_SGD.swapaxes(0, 1), v_SGD.swapaxes(0, 1)
            first_T = None if bounds is UNBOUNDED else bounds.first_key(b, T, S)
            o_BTHD[b], lse_BHT[b] = tiled_attention_ref(q[b], *keys, scale, S - T, first_T)
        return o_BTHD, lse_BHT
    o_BTHD = empty(q_BTHD, (B, T, H, D))
    lse_BHT = empty(q_BTHD, (B, H, T), np.float32)
    factor = np.float32(scale)
    if q_BTHD.dtype == np.float32:
        fwd_kernel = fp32.make_fwd_kernel(D, causal, bounds.kind)
        grid = -(-T // fp32.tile_rows(D)), B * H
        arrays = o_BTHD, lse_BHT, q_BTHD, k_BSGD, v_BSGD, bounds.first(lse_BHT)
        launch(fwd_kernel, grid, fp32.THREADS, *arrays, factor)
    elif use_hopper(q_BTHD):
        q, k, v = map(mappable, (q_BTHD, k_BSGD, v_BSGD))
        hopper.forward(o_BTHD, lse_BHT, q, k, v, scale, causal, gpu_of(q_BTHD), bounds)
    else:
        q, k, v, sizes = flat_inputs(q_BTHD, k_BSGD, v_BSGD)
        o = o_BTHD.reshape(-1)
        lse = lse_BHT.reshape(-1)
        args = o, lse, q, k, v, bounds.first(lse), *sizes, factor
        _launch_bf16("fwd", causal, bounds.kind, q_BTHD.shape, k_BSGD.shape, *args)
    return o_BTHD, lse_BHT


def flash_attention_bwd(
    do_BTHD: Array,
    q_BTHD: Array,
    k_BSGD: Array,
    v_BSGD: Array,
    o_BTHD: Array,
    lse_BHT: Array,
    scale: float,
    causal: bool = True,
    dv_BSGD: Array | None = None,
    bounds: KeyBounds = UNBOUNDED,
) -> tuple[Array, Array, Array]:
    """The gradients of flash_attention_fwd -> dq (B, T, H, D), dk, dv (B, S, G, D), in q's dtype.

    do: the gradient of o. o, lse: what the forward returned. bounds: those of the forward. dv_BSGD:
    if given, dv is written there and it is returned; any strides, so it may be a slice of a packed
    gradient (elements between its rows are left alone). If None, dv is a new array, as dq and dk
    always are. Raises ValueError or TypeError if shapes or dtypes do not match.
    """
    op = "flash_attention backward"
    _check(op, q_BTHD, k_BSGD, v_BSGD, scale, causal, bounds)
    B, T, H, D = q_BTHD.shape
    S, G = k_BSGD.shape[1:3]
    for name, x in (("do", do_BTHD), ("o", o_BTHD)):
        check_array(op, name, x, (B, T, H, D), (dtype_name(q_BTHD.dtype),))
    check_array(op, "lse", lse_BHT, (B, H, T))
    inputs = (do_BTHD, q_BTHD, k_BSGD, v_BSGD)
    if dv_BSGD is not None:
        check_array(op, "dv", dv_BSGD, (B, S, G, D), (dtype_name(q_BTHD.dtype),), strided=True)
    optional = [] if dv_BSGD is None else [dv_BSGD]
    if on_host(*inputs, o_BTHD, lse_BHT, *optional):
        do, q, k, v, o = map(wide, (*inputs, o_BTHD))
        gradients = flash_attention_bwd_ref(do, q, k, v, o, lse_BHT, scale, causal, bounds)
        dq, dk, dv = (x.astype(q_BTHD.dtype) for x in gradients)
        return dq, dk, _copy_into(dv_BSGD, dv)
    half = q_BTHD.dtype != np.float32
    direct = dv_BSGD is not None and (not half or in_place(dv_BSGD))  # the kernel can write there
    dq = empty(q_BTHD, (B, T, H, D))
    dk = empty(k_BSGD, (B, S, G, D))
    dv = dv_BSGD if direct else empty(k_BSGD, (B, S, G, D))
    if use_hopper(q_BTHD):
        compute = _bwd_hopper
    else:
        compute = _bwd_bf16 if half else _bwd_fp32
    compute(dq, dk, dv, *inputs, o_BTHD, lse_BHT, np.float32(scale), causal, bounds)
    return dq, dk, dv if direct else _copy_into(dv_BSGD, dv)


def _copy_into(out, x):
    """Return out, filled with x; x itself if out is None"""
    if out is None:
        return x
    out[...] = x
    return out


def _bwd_hopper(dq, dk, dv, do, q, k, v, o, lse_BHT, scale, causal, bounds):
    do, q, k, v = map(mappable, (do, q, k, v))
    o = _rows(o)[0].reshape(o.shape)
    hopper_bwd.backward((dq, dk, dv), do, q, k, v, o, lse_BHT, scale, causal, gpu_of(q), bounds)


def _bwd_fp32(dq, dk, dv, do, q, k, v, o, lse_BHT, scale, causal, bounds):
    if not fits(q):
        _, saved = gemm_attention.attention_fwd(q, k, v, scale, causal, bounds)
        dq[...], dk[...], _ = gemm_attention.attention_bwd(do, saved, scale, causal, dv)
        return
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    delta = empty(lse_BHT, (B, H, T))
    rows = fp32.tile_rows(D)
    block = fp32.THREADS
    variant = D, causal, bounds.kind
    dq_kernel = fp32.make_dq_kernel(*variant)
    dkdv_kernel = fp32.make_dkdv_kernel(*variant)
    first = bounds.first(lse_BHT)
    last = bounds.last(lse_BHT)
    grid_q, grid_k = (-(-T // rows), B * H), (-(-S // rows), B * G)
    launch(dq_kernel, grid_q, block, dq, delta, do, q, k, v, o, lse_BHT, first, scale)
    launch(dkdv_kernel, grid_k, block, dk, dv, do, q, k, v, lse_BHT, delta, last, scale)


def _bwd_bf16(dq, dk, dv, do, q, k, v, o, lse_BHT, scale, causal, bounds):
    shapes = q.shape, k.shape
    q, k, v, sizes = flat_inputs(q, k, v)
    do, _ = _rows(do)
    o, _ = _rows(o)
    dv, dv_row = _rows(dv)
    lse = lse_BHT.reshape(-1)
    delta = empty(lse_BHT, lse_BHT.shape).reshape(-1)
    args = dq.reshape(-1), delta, do, q, k, v, o, lse, bounds.first(lse), *sizes, scale
    _launch_bf16("dq", causal, bounds.kind, *shapes, *args)
    args = dk.reshape(-1), dv, do, q, k, v, lse, delta, bounds.last(lse), *sizes
    _launch_bf16("dkdv", causal, bounds.kind, *shapes, *args, np.int32(dv_row), scale)


def _launch_bf16(kind, causal, key_bounds, q_shape, k_shape, *args):
    T = INVARIANT_T if kind == "fwd" and is_batch_invariant() else q_shape[1]
    tiles = choose(kind, q_shape[3], T, causal, shared_limit(args[0]))
    kernel, shared = make_kernel(kind, q_shape[3], causal, tiles, key_bounds)
    grid = make_grid(kind, tiles, causal, q_shape, k_shape, gpu_of(args[0]))
    launch(kernel, grid, 32 * tiles.warps, *args, shared=shared)


def make_grid(
    kind: str, tiles: Tiles, causal: bool, q_shape: tuple, k_shape: tuple, gpu: Gpu
) -> tuple[int, int, int]:
    """The grid of a bf16 kernel -> (heads in x, blocks per head in y, rounds in z): rounds * heads
    in x cover all heads.

    The GPU starts blocks in the order x, y, z, so heads in x advance through their tiles together:
    see flash_attention_bf16.py. One head in x, unless blocks are unequal (causal) and either few,
    so that the last round takes a large share of the time, or long, so that they reuse cache lines.
    Then as many heads as read at most twice the size of the L2 cache.
    """
    B, T, H, D = q_shape
    S, G = k_shape[1:3]
    if kind == "dkdv":  # a key head reads Q and dO of its query heads
        heads = B * G
        rows = S
        own = tiles.BN
        read = 4 * T * D * (H // G)
    else:  # a query head reads K and V, and shares them with its group
        heads = B * H
        rows = T
        own = tiles.BM
        read = 4 * S * D // (H // G)
    blocks = -(-rows // own)
    rounds = heads * blocks / (gpu.multiprocessors * tiles.blocks)
    if not causal or (rounds > FEW_ROUNDS and rows < LONG):
        return 1, blocks, heads
    times = -(-heads // max(1, 2 * gpu.l2_bytes // max(read, 1)))
    # all rounds have the same number of heads, except for the last
    side = -(-heads // max(times, 1))
    return side, blocks, times


# ----------------------------------------------------------------------------- which kernel
def make_kernel(kind: str, D: int, causal: bool, tiles: Tiles, key_bounds: int = 0) -> tuple:
    """Return (the bf16 kernel, bytes of shared memory). kind: "fwd", "dq" or "dkdv"."""
    make, shared_bytes = _factory(kind, D)
    variant = (key_bounds,) if key_bounds else ()
    return make(D, causal, tiles, *variant), shared_bytes(D, tiles)


def _factory(kind: str, D: int) -> tuple[Callable, Callable]:
    """Return (function that makes the kernel, function that returns its bytes of shared memory)"""
    if kind == "fwd":
        return bf16.make_fwd_kernel, bf16.fwd_shared_bytes
    if kind == "dq":
        return bf16_bwd.make_dq_kernel, bf16_bwd.dq_shared_bytes
    if D >= 128:
        return bf16_bwd_d128.make_dkdv_d128_kernel, bf16_bwd_d128.dkdv_d128_shared_bytes
    return bf16_bwd.make_dkdv_kernel, bf16_bwd.dkdv_shared_bytes


def choose(kind: str, D: int, T: int, causal: bool, shared: int) -> Tiles:
    """Return the tuned tiles for heads of width D and T queries. shared: bytes of shared memory
    that a block may use."""
    rows = TABLE[kind, D, causal].items()
    tiles = next(tiles for longest, tiles in rows if longest is None or longest >= T)
    return tiles if _factory(kind, D)[1](D, tiles) <= shared else small_tiles(kind, D)


def small_tiles(kind: str, D: int) -> Tiles:
    """Return tiles for heads of width D that need at most 99 KB of shared memory."""
    return SMALL_WIDE[kind] if D > 128 else SMALL[kind]


def use_hopper(q_BTHD: Array) -> bool:
    """Return True if these queries are computed by the wgmma kernels: bf16, D = 64 or 128,
    capability 9.0 or the simulator."""
    if not HOPPER or q_BTHD.dtype == np.float32 or q_BTHD.shape[3] not in hopper.WIDTHS:
        return False
    capable = isinstance(q_BTHD, SimArray) or str(q_BTHD.device.compute_capability) == "90"
    return capable and q_BTHD.size > 0


def gpu_of(x: Array) -> Gpu:
    """Return the GPU that holds x."""
    return Gpu(multiprocessors(x), l2_bytes(x))


def l2_bytes(x: Array) -> int:
    """Bytes of L2 cache of the GPU that holds x. Small in the simulator, so that a few heads need
    several rounds."""
    return 1536 if isinstance(x, SimArray) else gpu_attribute(x.device.id, "L2CacheSize")


# ----------------------------------------------------------------- checks and layouts of the inputs
def _check(op, q_BTHD, k_BSGD, v_BSGD, scale, causal, bounds):
    check_array(op, "q", q_BTHD, (None,) * 4, FLOATS, strided=True)
    B, T, H, D = q_BTHD.shape
    dtype = dtype_name(q_BTHD.dtype)
    check_array(op, "k", k_BSGD, (B, None, None, D), (dtype,), strided=True)
    S, G = k_BSGD.shape[1:3]
    check_array(op, "v", v_BSGD, (B, S, G, D), (dtype,), strided=True)
    shapes = f"q {tuple(q_BTHD.shape)}, k {tuple(k_BSGD.shape)}"
    check(G > 0 and H % G == 0, f"{op}: {H} query heads cannot share {G} key heads: {shapes}")
    check(S >= T or not causal, f"{op}: {T} causal queries need at least {T} keys: {shapes}")
    check(S > 0 or T == 0, f"{op}: {T} queries without keys: {shapes}")
    check_bounds(op, bounds, B, T, S, causal)
    check(scale > 0, f"{op}: scale must be positive, got {scale}")
    if not on_host(q_BTHD, k_BSGD, v_BSGD):
        half = dtype == "bfloat16"
        widths = WIDTHS if half else range(1, fp32.MAX_D + 1)
        expected = f"one of {WIDTHS}" if half else f"at most {fp32.MAX_D}"
        check(D in widths, f"{op}: head dim {D}, but {dtype} needs {expected}: {shapes}")
        check(B * H <= MAX_GRID, f"{op}: {B * H} heads in one launch, at most {MAX_GRID}: {shapes}")
        most = 64 * MAX_GRID  # no bf16 tile has fewer rows
        check(max(T, S) <= most, f"{op}: more than {most} positions: {shapes}")


def fits(q_BTHD: Array) -> bool:
    """Return True if forward and backward kernels, or on the CPU the references, support float32
    heads of this width."""
    return on_host(q_BTHD) or q_BTHD.shape[3] <= fp32.WIDE


def in_place(x_BTHD: Array) -> bool:
    """Return True if the tensor-core kernels can read and write x without a copy of it.

    They copy 16 bytes at a time, so every position must begin at a multiple of 16 bytes and hold
    its heads without gaps.
    """
    step = row_step(x_BTHD) if x_BTHD.ndim == 4 else None
    return step is not None and step * x_BTHD.itemsize % 16 == 0 and on_16_bytes(x_BTHD)


def _rows(x_BTHD):
    """Return (flat array that begins at the first element, elements between positions); copies x
    only if in_place(x) is False"""
    x_BTHD = x_BTHD if in_place(x_BTHD) else x_BTHD.copy()
    return flat_rows(x_BTHD), row_step(x_BTHD)


def flat_inputs(q_BTHD: Array, k_BSGD: Array, v_BSGD: Array) -> tuple:
    """Return q, k, v as flat arrays, and the list of int32 scalars of every bf16 kernel: T, S, H, H
    / G, row steps of q, k, v"""
    flat, steps = zip(*map(_rows, (q_BTHD, k_BSGD, v_BSGD)))
    T, H = q_BTHD.shape[1:3]
    S, G = k_BSGD.shape[1:3]
    return *flat, [np.int32(n) for n in (T, S, H, H // G, *steps)]
