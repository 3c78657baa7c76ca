"""FlashAttention-2 (Dao 2023): exact attention whose memory grows with T, not with T^2.

    q: (B, T, H, D)   k, v: (B, S, G, D)   o: (B, T, H, D)   lse: (B, H, T)

    forward    s = scale q k^T,  p = softmax(s),  o = p v

A tile of queries walks over tiles of keys, and neither s nor p is ever written to memory. The softmax is computed on
the way (Milakov & Gimelshein 2018): with the maximum m and the sum l of the tiles so far,

               m' = max(m, max_j s_j)
               l' = l exp(m - m') + sum_j exp(s_j - m')       acc' = acc exp(m - m') + sum_j exp(s_j - m') v_j

and in the end o = acc / l. Saved are o and lse = m + log l, one number per row: p = exp(s - lse) needs no second
softmax.

    backward   p is computed again, tile by tile: more arithmetic, T^2 numbers less to keep and to move.
               dv = p^T do      dp = do v^T
               ds = p (dp - delta)     delta_t = sum_s p_ts dp_ts = sum_s p_ts (do_t . v_s) = do_t . o_t
               dq = scale ds k  dk = scale ds^T q

delta, the softmax's sum over a whole row, is a dot product of two vectors that are at hand (the step that makes
backward by tiles possible). Grouped queries: H / G query heads share a key head, and its dk, dv are sums over them.

With `causal`, query t sees the keys s <= t + (S - T): S > T means that the first S - T keys are a past that all see.
Operations: 4 B H T S D forward, 2.5 times that backward, and half of it if causal.

    NumPy             the references below
    bf16, 9.0         flash_attention_hopper.py and _flash_attention_hopper_*.py: wgmma and TMA, D = 64, 128
    bf16              flash_attention_bf16.py and _flash_attention_bf16_*.py: tensor cores, D = 16, 32, 64, 128;
                      the backward of many short, narrow heads: _flash_attention_bf16_whole.py
    float32           flash_attention_fp32.py: any D up to 128; also the version to read first

Nothing is added up by atomics: the same input gives the same bits.
"""

import functools

import numpy as np

from ...device import Array, cupy
from ...simulator import SimArray
from ..primitives.flat import flat_rows, on_16_bytes, row_step
from ..primitives.tensor_maps import mappable
from ..primitives.tiles import WIDTHS
from ..runtime.launch import FLOATS, check, check_array, empty, launch, on_host, wide
from . import flash_attention_bf16 as bf16
from . import flash_attention_bf16_bwd as bf16_bwd
from . import flash_attention_bf16_bwd_d128 as bf16_pairs
from . import flash_attention_bf16_bwd_whole as bf16_whole
from . import flash_attention_fp32 as fp32
from . import flash_attention_hopper as hopper
from . import flash_attention_hopper_bwd as hopper_bwd
from .flash_attention_table import TABLE

FEW_ROUNDS, LONG = 12, 2048  # see make_grid; measured on one H200
HOPPER = True  # the kernels for compute capability 9.0 where there is one, and in the simulator; False: mma.sync
MAX_GRID = 2**16 - 1  # blocks in y or z
SMALL = {  # where a block gets less shared memory than the table's choice needs; all fit the 99 KB of 8.6, 8.9, 12.0
    "fwd": (64, 64, 4, 2, False),
    "dq": (64, 32, 4, 2),
    "dkdv": (64, 32, 4, 1),
}


# ----------------------------------------------------------------------------- references
def _by_group(x_BTHD, G):
    """(B, T, H, D) -> (B, G, H / G, T, D): query heads beside the key head they use"""
    B, T, H, D = x_BTHD.shape
    return x_BTHD.reshape(B, T, G, H // G, D).transpose(0, 2, 3, 1, 4)


def _by_head(x_BGRTD):
    """The way back"""
    B, G, R, T, D = x_BGRTD.shape
    return np.ascontiguousarray(x_BGRTD.transpose(0, 3, 1, 2, 4)).reshape(B, T, G * R, D)


def _scores(q_BGRTD, k_BG1SD, scale, causal):
    T, S = q_BGRTD.shape[3], k_BG1SD.shape[3]
    s = q_BGRTD @ k_BG1SD.swapaxes(3, 4) * q_BGRTD.dtype.type(scale)
    return np.where(np.tri(T, S, S - T, dtype=bool), s, -np.inf).astype(s.dtype) if causal else s


def flash_attention_ref(q_BTHD, k_BSGD, v_BSGD, scale, causal=True):
    """-> o (B, T, H, D), lse (B, H, T)"""
    B, T, H, _ = q_BTHD.shape
    q, k, v = (_by_group(x, k_BSGD.shape[2]) for x in (q_BTHD, k_BSGD, v_BSGD))
    s = _scores(q, k, scale, causal)
    top = s.max(-1, keepdims=True, initial=-np.inf)
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

    float32 or bf16. Each of q, k and v may be a part of a packed array (B, T, P): positions may lie further apart
    than H D elements. Raises ValueError or TypeError when shapes or types do not belong together.
    """
    _check("flash_attention", q_BTHD, k_BSGD, v_BSGD, scale, causal)
    if on_host(q_BTHD, k_BSGD, v_BSGD):
        o_BTHD, lse_BHT = flash_attention_ref(*map(wide, (q_BTHD, k_BSGD, v_BSGD)), scale, causal)
        return o_BTHD.astype(q_BTHD.dtype), lse_BHT
    B, T, H, D = q_BTHD.shape
    o_BTHD, lse_BHT = empty(q_BTHD, (B, T, H, D)), empty(q_BTHD, (B, H, T), np.float32)
    scale = np.float32(scale)
    if q_BTHD.dtype == np.float32:
        fwd_kernel, grid = fp32.make_fwd_kernel(D, causal), (-(-T // fp32.tile_rows(D)), B * H)
        launch(fwd_kernel, grid, fp32.THREADS, o_BTHD, lse_BHT, q_BTHD, k_BSGD, v_BSGD, scale)
    elif use_hopper(q_BTHD):
        inputs = map(mappable, (q_BTHD, k_BSGD, v_BSGD))
        hopper.forward(o_BTHD, lse_BHT, *inputs, scale, causal, _gpu(q_BTHD))
    else:
        q, k, v, sizes = flat_inputs(q_BTHD, k_BSGD, v_BSGD)
        outputs = o_BTHD.reshape(-1), lse_BHT.reshape(-1)
        _launch_bf16("fwd", causal, q_BTHD.shape, k_BSGD.shape, *outputs, q, k, v, *sizes, scale)
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
) -> tuple[Array, Array, Array]:
    """-> dq (B, T, H, D), dk, dv (B, S, G, D). o and lse are what the forward returned.

    dv_BSGD: where dv is written and then returned, of any layout: a part of a packed gradient. None: it is new, as dq and
    dk always are. Nothing between its rows is touched.
    """
    op = "flash_attention backward"
    _check(op, q_BTHD, k_BSGD, v_BSGD, scale, causal)
    B, T, H, D = q_BTHD.shape
    S, G = k_BSGD.shape[1:3]
    for name, x in (("do", do_BTHD), ("o", o_BTHD)):
        check_array(op, name, x, (B, T, H, D), (q_BTHD.dtype.name,))
    check_array(op, "lse", lse_BHT, (B, H, T))
    inputs = (do_BTHD, q_BTHD, k_BSGD, v_BSGD)
    if dv_BSGD is not None:
        check_array(op, "dv", dv_BSGD, (B, S, G, D), (q_BTHD.dtype.name,), strided=True)
    if on_host(*inputs, o_BTHD, lse_BHT, *([] if dv_BSGD is None else [dv_BSGD])):
        gradients = flash_attention_bwd_ref(*map(wide, (*inputs, o_BTHD)), lse_BHT, scale, causal)
        dq, dk, dv = (x.astype(q_BTHD.dtype) for x in gradients)
        return dq, dk, _written(dv, dv_BSGD)
    half = q_BTHD.dtype != np.float32
    direct = dv_BSGD is not None and (in_place(dv_BSGD) if half else True)
    dq, dk = empty(q_BTHD, (B, T, H, D)), empty(k_BSGD, (B, S, G, D))
    dv = dv_BSGD if direct else empty(k_BSGD, (B, S, G, D))
    compute = _bwd_hopper if use_hopper(q_BTHD) else _bwd_bf16 if half else _bwd_fp32
    compute(dq, dk, dv, *inputs, o_BTHD, lse_BHT, np.float32(scale), causal)
    return dq, dk, dv if direct else _written(dv, dv_BSGD)


def _written(x, there):
    """x, if it is not wanted anywhere else"""
    if there is None:
        return x
    there[...] = x
    return there


def _bwd_hopper(dq, dk, dv, do, q, k, v, o, lse_BHT, scale, causal):
    inputs = map(mappable, (do, q, k, v))
    o = _rows(o)[0].reshape(o.shape)
    hopper_bwd.backward((dq, dk, dv), *inputs, o, lse_BHT, scale, causal, _gpu(q))


def _bwd_fp32(dq, dk, dv, do, q, k, v, o, lse_BHT, scale, causal):
    (B, T, H, D), (S, G) = q.shape, k.shape[1:3]
    delta, rows, block = empty(lse_BHT, (B, H, T)), fp32.tile_rows(D), fp32.THREADS
    dq_kernel, dkdv_kernel = fp32.make_dq_kernel(D, causal), fp32.make_dkdv_kernel(D, causal)
    grid_q, grid_k = (-(-T // rows), B * H), (-(-S // rows), B * G)
    launch(dq_kernel, grid_q, block, dq, delta, do, q, k, v, o, lse_BHT, scale)
    launch(dkdv_kernel, grid_k, block, dk, dv, do, q, k, v, lse_BHT, delta, scale)


def _bwd_bf16(dq, dk, dv, do, q, k, v, o, lse_BHT, scale, causal):
    shapes, whole = (q.shape, k.shape), choose_whole(q.shape, k.shape, q)
    q, k, v, sizes = flat_inputs(q, k, v)
    (do, _), (o, _), (dv, dv_row), lse = _rows(do), _rows(o), _rows(dv), lse_BHT.reshape(-1)
    if whole is not None:
        B, _, G, D = shapes[1]
        kernel, shared = make_kernel("whole", D, causal, whole)
        args = dq.reshape(-1), dk.reshape(-1), dv, do, q, k, v, o, lse, *sizes
        launch(kernel, (G, B), whole[0], *args, np.int32(dv_row), scale, shared=shared)
        return
    delta = empty(lse_BHT, lse_BHT.shape).reshape(-1)
    args = dq.reshape(-1), delta, do, q, k, v, o, lse, *sizes, scale
    _launch_bf16("dq", causal, *shapes, *args)
    args = dk.reshape(-1), dv, do, q, k, v, lse, delta, *sizes, np.int32(dv_row), scale
    _launch_bf16("dkdv", causal, *shapes, *args)


def _launch_bf16(kind, causal, q_shape, k_shape, *args):
    config = choose(kind, q_shape[3], q_shape[1], causal, shared_limit(args[0]))
    kernel, shared = make_kernel(kind, q_shape[3], causal, config)
    grid = make_grid(kind, config, causal, q_shape, k_shape, *_gpu(args[0]))
    launch(kernel, grid, 32 * config[2], *args, shared=shared)


def make_grid(
    kind: str,
    config: tuple,
    causal: bool,
    q_shape: tuple,
    k_shape: tuple,
    multiprocessors: int,
    l2: int,
) -> tuple[int, int, int]:
    """-> (heads side by side, blocks per head, how often); why: see flash_attention_bf16.py

    One head, unless blocks are unequal and either few, so that the end takes a large part of the time, or long, so that
    they use a cache line often while they have it. Then as many as read at most twice what the second-level cache
    holds: they walk through their keys in step.
    """
    B, T, H, D = q_shape
    S, G = k_shape[1:3]
    if kind == "dkdv":  # a key head reads Q and dO of its query heads
        heads, rows, read = B * G, S, 4 * T * D * (H // G)
    else:  # a query head reads K and V, and shares them
        heads, rows, read = B * H, T, 4 * S * D // (H // G)
    tiles = -(-rows // config[0])
    rounds = heads * tiles / (multiprocessors * config[3])
    if not causal or (rounds > FEW_ROUNDS and rows < LONG):
        return 1, tiles, heads
    times = -(-heads // max(1, 2 * l2 // max(read, 1)))
    side = -(-heads // max(times, 1))  # all turns alike, but for a few heads of the last
    return side, tiles, times


# ----------------------------------------------------------------------------- which kernel
def make_kernel(kind: str, D: int, causal: bool, config: tuple) -> tuple:
    """-> (the bf16 kernel, bytes of shared memory). kind: "fwd", "dq", "dkdv" (config: _flash_attention_table.py), "whole" """
    make, shared_bytes = _maker(kind, D)
    return make(D, causal, config), shared_bytes(D, config)


def _maker(kind, D):
    if kind == "fwd":
        return bf16.make_fwd_kernel, bf16.fwd_shared_bytes
    if kind == "whole":
        return bf16_whole.make_whole_kernel, bf16_whole.whole_shared_bytes
    if kind == "dq":
        return bf16_bwd.make_dq_kernel, bf16_bwd.dq_shared_bytes
    if D == 128:
        return bf16_pairs.make_pairs_kernel, bf16_pairs.pairs_shared_bytes
    return bf16_bwd.make_dkdv_kernel, bf16_bwd.dkdv_shared_bytes


def choose(kind: str, D: int, T: int, causal: bool, shared: int) -> tuple:
    """The tuned tiles for heads of D and T queries, on a GPU with `shared` bytes for a block."""
    rows = TABLE[kind, D, causal]
    config = next(config for longest, config in rows if longest is None or longest >= T)
    return config if _maker(kind, D)[1](D, config) <= shared else SMALL[kind]


def choose_whole(q_shape: tuple, k_shape: tuple, x: Array) -> tuple | None:
    """The configuration of the backward in which a block holds all keys of a head, on the GPU of x. None: not for these: heads
    too wide, too many or too few keys, or so few key heads that half of the multiprocessors would have none."""
    (B, T, _, D), (_, S, G, _) = q_shape, k_shape
    config, keys = bf16_whole.CONFIG, bf16_whole.CONFIG[0]
    fits = D in bf16_whole.WIDTHS and bf16_whole.FEWEST <= S <= keys and 0 < T <= keys
    if not fits or bf16_whole.whole_shared_bytes(D, config) > shared_limit(x):
        return None
    return config if multiprocessors(x) <= 2 * B * G else None


def use_hopper(q_BTHD: Array) -> bool:
    """Are these queries for the kernels of compute capability 9.0, and no other?"""
    if not HOPPER or q_BTHD.dtype == np.float32 or q_BTHD.shape[3] not in hopper.WIDTHS:
        return False
    here = isinstance(q_BTHD, SimArray) or str(q_BTHD.device.compute_capability) == "90"
    return here and q_BTHD.size > 0


def _gpu(x):
    return multiprocessors(x), l2_bytes(x)


def shared_limit(x: Array) -> int:
    """Bytes of shared memory that a block may have where x lives."""
    if isinstance(x, SimArray):
        return 227 * 1024
    return _gpu_attribute(x.device.id, "MaxSharedMemoryPerBlockOptin")


def multiprocessors(x: Array) -> int:
    return 1 if isinstance(x, SimArray) else _gpu_attribute(x.device.id, "MultiProcessorCount")


def l2_bytes(x: Array) -> int:
    """Bytes of second-level cache beside x. In the simulator few, so that a few heads already take turns."""
    return 1536 if isinstance(x, SimArray) else _gpu_attribute(x.device.id, "L2CacheSize")


@functools.cache
def _gpu_attribute(device: int, name: str) -> int:
    return cupy().cuda.Device(device).attributes[name]


# ----------------------------------------------------------------------------- what goes in
def _check(op, q_BTHD, k_BSGD, v_BSGD, scale, causal):
    check_array(op, "q", q_BTHD, (None,) * 4, FLOATS, strided=True)
    B, T, H, D = q_BTHD.shape
    dtype = q_BTHD.dtype.name
    check_array(op, "k", k_BSGD, (B, None, None, D), (dtype,), strided=True)
    S, G = k_BSGD.shape[1:3]
    check_array(op, "v", v_BSGD, (B, S, G, D), (dtype,), strided=True)
    shapes = f"q {tuple(q_BTHD.shape)}, k {tuple(k_BSGD.shape)}"
    check(G > 0 and H % G == 0, f"{op}: {H} query heads cannot share {G} key heads: {shapes}")
    check(S >= T or not causal, f"{op}: {T} causal queries need at least {T} keys: {shapes}")
    check(S > 0 or T == 0, f"{op}: queries without keys: {shapes}")
    check(scale > 0, f"{op}: scale must be positive, got {scale}")
    if not on_host(q_BTHD, k_BSGD, v_BSGD):
        half = dtype == "bfloat16"
        widths = WIDTHS if half else range(1, fp32.MAX_D + 1)
        wanted = f"one of {WIDTHS}" if half else f"at most {fp32.MAX_D}"
        check(D in widths, f"{op}: head dim {D}, but {dtype} needs {wanted}: {shapes}")
        check(B * H <= MAX_GRID, f"{op}: {B * H} heads in one launch, at most {MAX_GRID}: {shapes}")
        most = 64 * MAX_GRID  # no bf16 tile has fewer rows
        check(max(T, S) <= most, f"{op}: more than {most} positions: {shapes}")


def in_place(x_BTHD: Array) -> bool:
    """Can the tensor-core kernels read and write x where it is? They copy 16 bytes at a time, out of rows of whole heads."""
    step = row_step(x_BTHD) if x_BTHD.ndim == 4 else None
    return step is not None and step * x_BTHD.itemsize % 16 == 0 and on_16_bytes(x_BTHD)


def _rows(x_BTHD):
    """-> (flat array from the first element on, elements from one position to the next); a copy only if it must be"""
    x_BTHD = x_BTHD if in_place(x_BTHD) else x_BTHD.copy()
    return flat_rows(x_BTHD), row_step(x_BTHD)


def flat_inputs(q_BTHD: Array, k_BSGD: Array, v_BSGD: Array) -> tuple:
    """-> q, k, v as flat arrays, and the integers that all tensor-core kernels take"""
    flat, steps = zip(*map(_rows, (q_BTHD, k_BSGD, v_BSGD)))
    T, H = q_BTHD.shape[1:3]
    S, G = k_BSGD.shape[1:3]
    return *flat, [np.int32(n) for n in (T, S, H, H // G, *steps)]
