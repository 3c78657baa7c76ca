"""The KV cache in one byte per number: e4m3 codes, and a float32 scale for each key and each value
of a head.

    append     s = max_d |x_d| / 448      code_d = e4m3(x_d / s)
               x: the key or the value of a token, of one head
    read       x'_d = s code_d
               quantize.py says what the codes are, and how far x' is from x: 2.6 % (RMS)

    k, v (R, G, S, D): the codes, as in kv_cache.py
    scales (R, G, S, 2): [..., 0] of k, [..., 1] of v

A decoding step reads all keys and values of all sequences: with many or long sequences these are
most of its bytes. Codes are about half of them: a head of 128 channels has 2 (128 + 4) bytes per
token, in bf16 512. The copy of one layer that prefill reads (below) is also in memory; with 28
layers of such heads the same memory holds 1.8 times as many tokens.

The scale belongs to one token and one head. So it is known when the token is computed, it never
changes, and a token has the same codes in every sequence that shares its block. Attention
multiplies by it once per token and not once per number: a scale is a factor of a whole dot product,
and of a whole term of the sum over the values:

    q . k'_n = s_n (q . code_n)          o = sum_n p_n v'_n = sum_n (p_n s_n) code_n

decode_attention.py reads the codes so. Prefill computes many products with each key, and its
kernels expect bf16: it reads a copy, of one layer at a time, of the blocks that it needs
(dequantize_blocks).

e4m3 and not int8: in most models a few channels of the keys are much larger than the others (KIVI,
Liu et al. 2024). The error of a float is relative to its own number, that of int8 to the largest
number of the row.

A key or value that is not finite has the scale NaN, and everything computed from it becomes NaN;
without codes an infinite number may reach only some heads or channels.

Bytes moved: append reads 4 N G D (keys and values in bf16) and writes 2 N G (D + 4).
dequantize_blocks reads 2 G S (D + 4) per block and writes 4 G S D.
"""

import functools

import numpy as np

from ...device import Array
from ..primitives.codes import codes_to_floats, load_codes16
from ..primitives.flat import flat_rows, on_16_bytes, row_step
from ..primitives.ptx import device, kernel, load1, store8
from ..primitives.reduce import warp_max
from ..primitives.tensor_cores import fmax, high_bf16, low_bf16, pack_bf16
from ..quantize import LARGEST, LEAST_SCALE, dequantize_ref, quantize_ref, to_e4m3
from ..runtime.compiler import cuda, float32, int64, uint32
from ..runtime.launch import FLOATS, check, check_array, dtype_name, launch, on_host, zeros
from .kv_cache import check_int32, gather_sequence_ref

BLOCK = 128  # threads
WARPS = BLOCK // 32
EACH = 16  # codes of a thread: one 16-byte access
INFINITY = np.float32(np.inf)
NAN = np.float32(np.nan)


# ----------------------------------------------------------------------------- the arrays
def kv_codes_bytes(L: int, R: int, G: int, S: int, D: int) -> int:
    """Return bytes of the arrays of empty_kv_codes"""
    return 2 * L * R * G * S * (D + 4)


def empty_kv_codes(like: Array, L: int, R: int, G: int, S: int, D: int) -> tuple[Array, Array]:
    """Return codes (L, 2, R, G, S, D) uint8, scales (L, R, G, S, 2) float32, zeros, on the device
    of `like`

    Raises ValueError if a size is not positive.
    """
    for name, n in dict(layers=L, blocks=R, heads=G, positions=S, channels=D).items():
        check(n > 0, f"kv cache: {n} {name}, expected at least one")
    return zeros(like, (L, 2, R, G, S, D), np.uint8), zeros(like, (L, R, G, S, 2), np.float32)


# ----------------------------------------------------------------------------- references
def kv_codes_ref(x):
    """Return codes (..., D), scales (...) of keys or values (..., D), in NumPy"""
    rows = x.reshape(-1, x.shape[-1]).astype(np.float32)
    rows = np.where(np.isfinite(rows).all(1, keepdims=True), rows, NAN)
    codes, scales = quantize_ref(rows, "fp8")
    codes = np.where(np.isnan(scales)[:, None], np.uint8(0), codes)
    return codes.reshape(x.shape), scales.reshape(x.shape[:-1])


def kv_values_ref(codes, scales, dtype):
    """Return the keys or values (..., D) that codes (..., D) and scales (...) stand for, in
    NumPy"""
    rows = dequantize_ref(codes.reshape(-1, codes.shape[-1]), scales.reshape(-1), dtype)
    return rows.reshape(codes.shape)


def append_codes_ref(k_RGSD, v_RGSD, scales_RGS2, k_NGD, v_NGD, blocks_N, offsets_N):
    """append_codes in NumPy, in place."""
    R, _, S, _ = k_RGSD.shape
    keep_N = (blocks_N >= 0) & (blocks_N < R) & (offsets_N >= 0) & (offsets_N < S)
    blocks, offsets = blocks_N[keep_N], offsets_N[keep_N]
    for i, (cache, new) in enumerate(((k_RGSD, k_NGD), (v_RGSD, v_NGD))):
        cache[blocks, :, offsets], scales_RGS2[blocks, :, offsets, i] = kv_codes_ref(new[keep_N])


def write_token_ref(k_RGSD, v_RGSD, scales_RGS2, block, offset, k_GD, v_GD):
    """Write the key and the value of one token to the cache, in place: as they are if scales is
    None, else as codes."""
    for i, (cache, x_GD) in enumerate(((k_RGSD, k_GD), (v_RGSD, v_GD))):
        if scales_RGS2 is None:
            cache[block, :, offset] = x_GD
        else:
            cache[block, :, offset], scales_RGS2[block, :, offset, i] = kv_codes_ref(x_GD)


def read_sequence_ref(k_RGSD, v_RGSD, scales_RGS2, table_M, n: int, dtype):
    """Return k, v (G, n, D) of the first n positions of a sequence, in dtype"""
    k_GSD, v_GSD = (gather_sequence_ref(x, table_M, n) for x in (k_RGSD, v_RGSD))
    if scales_RGS2 is None:
        return k_GSD.astype(dtype), v_GSD.astype(dtype)
    scales_GSX = gather_sequence_ref(scales_RGS2, table_M, n)
    return tuple(kv_values_ref(x, scales_GSX[..., i], dtype) for i, x in enumerate((k_GSD, v_GSD)))


# ----------------------------------------------------------------------------- kernels
@device
def magnitude(x):
    """|x|, infinity for NaN: a maximum would lose it"""
    return abs(x) if x == x else float32(INFINITY)


@functools.cache
def make_store_codes(D):
    """Return store_codes(codes, to, scales, at, x1, x2): a warp writes a row as codes to codes[to],
    ..., and its scale to scales[at].

    A lane holds the pairs (x_r, x_{r + R}), r = lane, lane + 32, ... below R = D / 2, and zeros
    from there on. They are rounded to bf16 first, as in prefill: values get identical codes in
    both, keys may differ in the last bit of a bf16.
    """
    R = D // 2
    PLANES = -(-R // 32)
    Q = LARGEST["fp8"]
    LEAST = LEAST_SCALE

    @device
    def store_codes(codes, to, scales, at, x1, x2):
        lane = cuda.threadIdx.x & 31
        largest = float32(0.0)
        for i in range(PLANES):
            pair = pack_bf16(x1[i], x2[i])
            x1[i] = low_bf16(pair)
            x2[i] = high_bf16(pair)
            largest = fmax(largest, fmax(magnitude(x1[i]), magnitude(x2[i])))
        scale = fmax(warp_max(largest) / float32(Q), float32(LEAST))
        finite = scale < float32(INFINITY)
        if lane == 0:
            scales[at] = scale if finite else float32(NAN)
        for i in range(PLANES):
            r = lane + 32 * i
            if r < R:
                codes[to + r] = to_e4m3(x1[i] / scale if finite else float32(0.0))
                codes[to + r + R] = to_e4m3(x2[i] / scale if finite else float32(0.0))

    return store_codes


@functools.cache
def make_append_codes_kernel(D):
    """Return the kernel for heads of D channels"""
    store_codes = make_store_codes(D)
    R = D // 2
    PLANES = -(-R // 32)

    @device
    def copy_row(codes, to, scales, at, x, first):
        x1 = cuda.local.array(PLANES, float32)
        x2 = cuda.local.array(PLANES, float32)
        for i in range(PLANES):
            r = (cuda.threadIdx.x & 31) + 32 * i
            x1[i] = float32(0.0)
            x2[i] = float32(0.0)
            if r < R:
                x1[i] = load1(x, first + r)
                x2[i] = load1(x, first + r + R)
        store_codes(codes, to, scales, at, x1, x2)

    @kernel(BLOCK)
    def append_codes_kernel(
        k_codes, v_codes, scales, k, v, blocks_N, offsets_N, N, G, R, S, k_row, v_row
    ):
        """Grid ceil(N G / WARPS), block BLOCK. A warp owns a head of a token. Arrays flat; k_row,
        v_row: as in kv_cache.py."""
        head = int64(cuda.blockIdx.x) * WARPS + (cuda.threadIdx.x >> 5)
        n, g = head // G, head % G
        if n >= N:
            return
        block = int64(blocks_N[n])
        p = int64(offsets_N[n])
        if block < 0 or block >= R or p < 0 or p >= S:
            return
        row = (block * G + g) * S + p
        copy_row(k_codes, row * D, scales, 2 * row, k, n * k_row + g * D)
        copy_row(v_codes, row * D, scales, 2 * row + 1, v, n * v_row + g * D)

    return append_codes_kernel


@functools.cache
def make_dequantize_blocks_kernel(D):
    """Return the kernel for heads of D channels"""

    @device
    def expand(out, codes, at, scale):
        words = cuda.local.array(4, uint32)
        values = cuda.local.array(EACH, float32)
        load_codes16(words, codes, at)
        codes_to_floats(values, words, codes)
        for j in range(EACH):
            values[j] *= scale
        store8(out, at, values[:8])
        store8(out, at + 8, values[8:])

    @kernel(BLOCK)
    def dequantize_blocks_kernel(k_out, v_out, k_codes, v_codes, scales, blocks_U, R, size):
        """Grid (U, ceil(size / (EACH BLOCK))), block BLOCK. size: numbers of a block, G S D. All
        arrays flat."""
        block = int64(blocks_U[cuda.blockIdx.x])
        i = EACH * (int64(cuda.blockIdx.y) * BLOCK + cuda.threadIdx.x)
        if block < 0 or block >= R or i >= size:
            return
        at = block * size + i
        row = at // D
        expand(k_out, k_codes, at, scales[2 * row])
        expand(v_out, v_codes, at, scales[2 * row + 1])

    return dequantize_blocks_kernel


# ----------------------------------------------------------------------------- launchers
def append_codes(
    k_codes_RGSD: Array,
    v_codes_RGSD: Array,
    scales_RGS2: Array,
    k_NGD: Array,
    v_NGD: Array,
    blocks_N: Array,
    offsets_N: Array,
) -> None:
    """Write keys and values of N tokens to the cache, as kv_cache.append_kv does, in codes.

    Codes (R, G, S, D): uint8, scales (R, G, S, 2): float32. New keys and values (N, G, D): both
    float32 or both bf16; they may be slices of packed arrays. blocks, offsets (N,): int32. A token
    whose block or offset does not exist is skipped. Two tokens must not have the same block and
    offset. On a GPU they are bf16, and D is even. Raises ValueError or TypeError if shapes or
    dtypes do not match.
    """
    op = "append_codes"
    R, G, S, D = check_codes(op, k_codes_RGSD, v_codes_RGSD, scales_RGS2)
    N = k_NGD.shape[0]
    check_array(op, "k", k_NGD, (N, G, D), FLOATS, strided=True)
    check_array(op, "v", v_NGD, (N, G, D), (dtype_name(k_NGD.dtype),), strided=True)
    check_int32(op, "blocks", blocks_N, N)
    check_int32(op, "offsets", offsets_N, N)
    arrays = (k_codes_RGSD, v_codes_RGSD, scales_RGS2, k_NGD, v_NGD, blocks_N, offsets_N)
    if on_host(*arrays):
        return append_codes_ref(*arrays)
    check(k_NGD.dtype != np.float32, f"{op}: float32, the GPU kernel is for bf16")
    check(D % 2 == 0, f"{op}: heads of {D} channels, the GPU kernel needs an even number")
    new = [x if row_step(x) is not None else x.copy() for x in (k_NGD, v_NGD)]
    flat = [x.reshape(-1) for x in arrays[:3]] + [flat_rows(x) for x in new]
    launch(
        make_append_codes_kernel(D),
        -(-N * G // WARPS),
        BLOCK,
        *flat,
        blocks_N,
        offsets_N,
        N,
        G,
        R,
        S,
        *map(row_step, new),
    )


def dequantize_blocks(
    k_codes_RGSD: Array,
    v_codes_RGSD: Array,
    scales_RGS2: Array,
    blocks_U: Array,
    k_out_RGSD: Array,
    v_out_RGSD: Array,
) -> None:
    """Write the keys and values of some blocks to the same blocks of k_out and v_out, float32 or
    bf16, both the same.

    blocks (U,): int32, distinct; one that is not in 0 .. R - 1 is skipped. On a GPU D must be a
    multiple of 16. Raises ValueError or TypeError if shapes or dtypes do not match.
    """
    op = "dequantize_blocks"
    R, G, S, D = check_codes(op, k_codes_RGSD, v_codes_RGSD, scales_RGS2)
    check_array(op, "k out", k_out_RGSD, (R, G, S, D), FLOATS)
    check_array(op, "v out", v_out_RGSD, (R, G, S, D), (dtype_name(k_out_RGSD.dtype),))
    check_int32(op, "blocks", blocks_U, blocks_U.size)
    arrays = (k_out_RGSD, v_out_RGSD, k_codes_RGSD, v_codes_RGSD, scales_RGS2)
    if on_host(*arrays, blocks_U):
        some = blocks_U[(blocks_U >= 0) & (blocks_U < R)]
        for i, (out, codes) in enumerate(((k_out_RGSD, k_codes_RGSD), (v_out_RGSD, v_codes_RGSD))):
            out[some] = kv_values_ref(codes[some], scales_RGS2[some, ..., i], out.dtype)
        return
    flat = [x.reshape(-1) for x in arrays]
    size = G * S * D
    fits = D % EACH == 0 and on_16_bytes(*flat)
    check(fits, f"{op}: heads of {D} channels, the GPU kernel needs a multiple of {EACH}, aligned")
    grid = (blocks_U.size, -(-size // (EACH * BLOCK)))
    launch(make_dequantize_blocks_kernel(D), grid, BLOCK, *flat, blocks_U, R, size)


def check_codes(
    op: str, k_codes_RGSD: Array, v_codes_RGSD: Array, scales_RGS2: Array
) -> tuple[int, int, int, int]:
    """Return R, G, S, D. Raises ValueError or TypeError if these are not the codes and scales of
    one layer."""
    check_array(op, "k codes", k_codes_RGSD, (None,) * 4, ("uint8",))
    check_array(op, "v codes", v_codes_RGSD, k_codes_RGSD.shape, ("uint8",))
    check_array(op, "scales", scales_RGS2, (*k_codes_RGSD.shape[:3], 2))
    check(k_codes_RGSD.size > 0, f"{op}: a cache of shape {tuple(k_codes_RGSD.shape)} is empty")
    return k_codes_RGSD.shape
