"""Codes of four bits for a matrix: a scale for every group of columns, and one per row.

w: (O, K)    chunk: 128 columns, the last one filled up with zeros

    int4   a group is a chunk. Its 16 values lie in equal steps from its smallest to its largest
           weight, 0 among them:
               s = (max(w, 0) - min(w, 0)) / 15     z = round(-min(w, 0) / s)
               c = round(w / s) + z                 w' = (c - z) s
    nf4    a group is 64 columns. Its values are 16 levels l_c in -1 ... 1, such that each is equally
           frequent for normal weights (QLoRA, Dettmers et al. 2023):
               s = max |w|                          w' = l_c s, of the level nearest to w / s

Scales need memory too, so they are codes themselves (QLoRA's double quantization): the row has one
in float32, S, and the 16 bits of a chunk are

    int4   s / S as a float of 4 bits of exponent and 8 of fraction, upper bits; z, 4 bits.
           S = max s
    nf4    s / S as a whole number 1 ... 255 for each of the two groups, the first in the lower byte.
           S = max s / 255
That is 4.125 bits a weight, and 32 a row. Codes are computed with the scale as it is stored, so
rounding s costs nothing but a slightly wider step. Products of a code's value and s / S are exact
in float32.

A group of int4 whose weights are whole multiples of a step already keeps that step, even if they need
fewer than 16 values of it: s is then (max - min) / n for one n = 8 ... 14. So a matrix that has been
rounded elsewhere, such as that of a GPTQ folder, gets the same codes again. n is taken where the
squared error is less than 1 / GRID of that of 15, which no other weights reach.

With a zero point, because weights of 128 columns are rarely symmetric enough: it costs 4 bits of
128 x 4. Rounding SmolLM2-135M, perplexity rises by 32 % with it and by 63 % with codes -7 ... 7 and
no zero point, in nf4 by 29 %. Narrower ranges, with the smallest squared error of a group, are worse
than whole ones: 40 %. nn/rounding.py chooses ranges and codes by a text.

    by hand, int4   w = (-0.5, 0.27, 1)    s = 0.1    z = 5    c = (0, 8 (2.7 + 5), 15)
                    w' = (-0.5, 0.3, 1)

Layout. codes: (O, 64 chunks) bytes. Tensor cores take 32 columns of a row at a time from four
lanes, 8 from each (decoding/gemv_operands.py). So that a lane's 16 bytes are what it multiplies,
word 4 t + q of a chunk's 16 has columns 32 q + 8 t ... + 7: all four lanes are in the same group at
each step. Inside a word, nibble j has column 2 j and nibble 4 + j column 2 j + 1 (int4: a pair for
a register is unpacked by one mask, primitives/codes.py), or nibble j column j (nf4).
groups: (chunks, O) uint16. The 16 rows of a tile are neighbours, 32 bytes.

Bytes moved: quantize reads w three times (twice from the cache, if the row fits). Dequantize: 0.5 +
2 per weight in bf16.
"""

import functools

import numpy as np

from ..device import Array
from .cast import BFLOAT16
from .primitives.codes import (
    BF16_UNIT,
    NF4_LEVELS,
    int4_to_bf16,
    int4_zeros,
    load_codes16,
    nf4_to_bf16,
    nibbles,
)
from .primitives.ptx import device, kernel, load1, store1, store8
from .primitives.reduce import FULL, MAX_WARPS, block_max
from .primitives.tensor_cores import high_bf16, low_bf16
from .runtime.compiler import (
    cuda,
    float32,
    float_as_int,
    int32,
    int64,
    int_as_float,
    uint16,
    uint32,
)
from .runtime.launch import empty, launch, on_host, wide

FOUR_BITS = ("int4", "nf4")
CHUNK = 128  # columns
GROUP = {"int4": 128, "nf4": 64}
BLOCK = 256
OWNERS = 16  # threads of a chunk, 8 columns each
LEAST_SCALE = np.float32(2.0**-126)
GRID = 16.0  # how many times smaller an error must be for another number of steps than 15
FEW = 16
OFF_GRID = 1e-3  # error of a weight, in squared steps, from which on they are tried
UNIT = 2.0**112  # of s / S in int4, whose bits are those of a float32 from bit 15 on
ROUND = 1.5 * 2.0**23  # as in quantize.py
ORDER = {"int4": [0, 4, 1, 5, 2, 6, 3, 7], "nf4": [*range(8)]}  # column of a word -> nibble
# rank of a level -> code; midpoint between levels of neighbouring ranks
NF4_RANKS = np.argsort(NF4_LEVELS, kind="stable").astype(np.uint8)
_SORTED = NF4_LEVELS[NF4_RANKS]
NF4_MIDPOINTS = (_SORTED[1:] + _SORTED[:-1]) / np.float32(2)
_PACKED_RANKS = [sum(int(c) << 4 * j for j, c in enumerate(NF4_RANKS[i : i + 8])) for i in (0, 8)]


def chunks_of(K: int) -> int:
    """Return the number of chunks of K columns."""
    return -(-K // CHUNK)


# ----------------------------------------------------------------------------- reference
def pack_ref(codes_OK: np.ndarray, kind: str) -> np.ndarray:
    """Return codes (O, K), uint8 below 16, K a multiple of CHUNK, as bytes (O, K / 2)."""
    O, K = codes_OK.shape  # noqa: E741
    words = codes_OK.reshape(O, K // CHUNK, 4, 4, 8).swapaxes(2, 3)  # q, t -> t, q
    shifts = 4 * np.array(ORDER[kind], np.uint32)
    words = (words.astype(np.uint32) << shifts).sum(-1, dtype=np.uint32)
    return words.reshape(O, K // 8).view(np.uint8)


def unpack_ref(bytes_OB: np.ndarray, kind: str) -> np.ndarray:
    """Return the codes (O, 2 B) uint8 of bytes (O, B): what `pack_ref` was given."""
    O, B = bytes_OB.shape  # noqa: E741
    words = np.ascontiguousarray(bytes_OB).view(np.uint32)
    codes = nibbles(words)[..., ORDER[kind]]
    return codes.reshape(O, 2 * B // CHUNK, 4, 4, 8).swapaxes(2, 3).reshape(O, 2 * B)


def quantize_four_ref(w_OK, kind):
    """Return codes (O, 64 chunks), groups (chunks, O), scales (O,) float32.

    A scale is not finite where the row holds NaN or infinity.
    """
    w = wide(w_OK).astype(np.float32, copy=False)
    O, K = w.shape  # noqa: E741
    chunks = chunks_of(K)
    w = np.pad(w, ((0, 0), (0, chunks * CHUNK - K)))
    w = w.reshape(O, chunks * CHUNK // GROUP[kind], GROUP[kind])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if kind == "int4":
            low = np.minimum(w.min(axis=2, initial=0), 0)
            half = np.float32(0.5)  # w may cover more than the largest float32
            s = (half * np.maximum(w.max(axis=2, initial=0), 0) - half * low) / np.float32(15) * 2
            s = _steps(w, s)
            scale_O = np.maximum(s.max(axis=1, initial=0), LEAST_SCALE)
            bits = _float12(s / scale_O[:, None])
            s = (bits << 15).view(np.float32) * np.float32(UNIT) * scale_O[:, None]
            zero = np.clip(np.rint(-low / s), 0, 15)
            codes = np.clip(np.rint(w / s[:, :, None]) + zero[:, :, None], 0, 15)
            groups = bits << 4 | zero.astype(np.uint32)
        else:
            s = np.abs(w).max(axis=2, initial=0)
            scale_O = np.maximum(s.max(axis=1, initial=0) / np.float32(255), LEAST_SCALE)
            part = np.clip(np.rint(s / scale_O[:, None]), 1, 255)
            scaled = w / (part * scale_O[:, None])[:, :, None]
            codes = NF4_RANKS[np.searchsorted(NF4_MIDPOINTS, scaled)]
            part = part.astype(np.uint32)
            groups = part[:, ::2] | part[:, 1::2] << 8
        codes = pack_ref(codes.astype(np.uint8).reshape(O, chunks * CHUNK), kind)
    return codes, np.ascontiguousarray(groups.T).astype(np.uint16), scale_O


def _steps(w, s):
    """Return the step of each group (O, groups): s, 15 of which are its range, or that of a grid."""

    def error(w, step, s):
        multiple = w / step[:, None]
        return ((multiple - np.rint(multiple)) ** 2).sum(axis=1) * (step / s) ** 2

    rows = w.reshape(-1, w.shape[2])
    found = s.reshape(-1).copy()
    of_15 = error(rows, found, found)
    limit = np.where(of_15 > np.float32(OFF_GRID * CHUNK), of_15 / np.float32(GRID), 0)
    for n in range(14, 7, -1):
        step = s.reshape(-1) * np.float32(15 / n)
        # few columns suffice to see that nearly all groups are on no grid
        left = np.flatnonzero(error(rows[:, :FEW], step, s.reshape(-1)) < limit)
        left = left[error(rows[left], step[left], s.reshape(-1)[left]) < limit[left]]
        found[left] = step[left]
        limit[left] = 0
    return found.reshape(s.shape)


def _float12(x):
    """Return the bits of the nearest float of 4 and 8 bits, at least 1."""
    bits = (x * np.float32(1 / UNIT)).astype(np.float32).view(np.uint32)
    return np.maximum((bits + np.uint32(0x3FFF) + (bits >> 15 & 1)) >> 15, 1)


def values_ref(codes_OB, groups_CO, kind):
    """Return (O, CHUNK chunks) float32: what the codes stand for, divided by the row's scale."""
    codes = unpack_ref(codes_OB, kind)
    groups = groups_CO.T.astype(np.uint32)
    if kind == "int4":
        zero = np.repeat((groups & 15).astype(np.float32), CHUNK, axis=1)
        s = ((groups >> 4) << 15).view(np.float32) * np.float32(UNIT)
        return (codes - zero) * np.repeat(s, CHUNK, axis=1)
    s = np.stack([groups & 255, groups >> 8], axis=2).reshape(len(codes), 2 * len(groups_CO))
    return NF4_LEVELS[codes] * np.repeat(s.astype(np.float32), 64, axis=1)


def dequantize_four_ref(codes_OB, groups_CO, scale_O, K, kind, dtype):
    """Return the matrix (O, K) that the codes stand for, in dtype.

    It is computed in dtype, at least float32.
    """
    computed = np.float32
    if np.dtype(dtype) != BFLOAT16:
        computed = np.result_type(np.float32, dtype)
    w = values_ref(codes_OB, groups_CO, kind)[:, :K].astype(computed, copy=False)
    return (w * scale_O[:, None].astype(computed)).astype(dtype, copy=False)


def grid_of(codes) -> tuple[np.ndarray, np.ndarray]:
    """Return step (O, K) float32 and zero (O, K), 0 in nf4, of each weight's group.

    codes: kernels.quantize.FourBits on the host.
    """
    groups = codes.groups_CO.T.astype(np.uint32)
    if codes.kind == "int4":
        step = ((groups >> 4) << 15).view(np.float32) * np.float32(UNIT)
        zero = (groups & 15).astype(np.float32)
    else:
        step = np.stack([groups & 255, groups >> 8], axis=2).reshape(len(groups), -1)
        zero = np.zeros(step.shape, np.float32)
    step = step.astype(np.float32) * codes.scale_O[:, None]
    step, zero = (np.repeat(x, GROUP[codes.kind], axis=1)[:, : codes.K] for x in (step, zero))
    return step, zero


def nearest_on_grid(w, step, zero, kind: str) -> np.ndarray:
    """Return the values of codes that are nearest to w, all arrays of one shape."""
    scaled = w / step
    if kind == "int4":
        return (np.clip(np.rint(scaled) + zero, 0, 15) - zero) * step
    ranks = np.searchsorted(NF4_MIDPOINTS, scaled)
    return NF4_LEVELS[NF4_RANKS[ranks]] * step


# ----------------------------------------------------------------------------- kernels
@device
def rounded(v):
    """Return the whole number nearest to v, |v| < 2^22, ties to even."""
    return float_as_int(v + float32(ROUND)) - float_as_int(float32(ROUND))


@device
def clamped(i, low, high):
    """Return i, limited to low ... high."""
    i = i if i > low else low
    return i if i < high else high


@device
def int4_group_scale(group):
    """Return s / S from the 16 bits of a chunk, times the unit of int4_to_bf16."""
    return int_as_float(int32(group >> uint32(4)) << int32(15)) * float32(UNIT * BF16_UNIT)


@device
def nf4_group_scale(group, half):
    """Return s / S of a half of the chunk."""
    return float32(int32(group >> uint32(8 * half)) & int32(255))


@functools.cache
def make_unpack(NF4):
    """Return unpack(pairs (4,), word, group): the 8 columns of a word as pairs of bf16.

    group: the 16 bits of the chunk.
    """

    @device
    def unpack(pairs, word, group):
        if NF4:
            nf4_to_bf16(pairs, word)
        else:
            int4_to_bf16(pairs, word, int4_zeros(group & uint32(15)))

    return unpack


@functools.cache
def make_load_values(NF4):
    """Return load_values(values (32,), codes, groups, i, c, o, rows).

    values[8 q + j] = w[o, 128 c + 32 q + 8 t + j] / S; i: of the 16 bytes of (c, t).
    """
    unpack = make_unpack(NF4)

    @device
    def load_values(values, codes, groups, i, c, o, rows):
        words = cuda.local.array(4, uint32)
        pairs = cuda.local.array(4, uint32)
        load_codes16(words, codes, i)
        group = uint32(groups[int64(c) * rows + o])
        for q in range(4):
            scale = nf4_group_scale(group, q // 2) if NF4 else int4_group_scale(group)
            unpack(pairs, words[q], group)
            for j in range(4):
                values[8 * q + 2 * j] = low_bf16(pairs[j]) * scale
                values[8 * q + 2 * j + 1] = high_bf16(pairs[j]) * scale

    return load_values


@functools.cache
def make_quantize_four_kernel(kind: str):
    """Return the kernel that writes codes of this kind."""
    NF4 = kind == "nf4"
    WIDTH = OWNERS // 2 if NF4 else OWNERS  # threads of a group
    CHUNKS = BLOCK // OWNERS  # of a block at a time
    PER_ROW = 255 if NF4 else 1
    MIDPOINTS = tuple(float(x) for x in NF4_MIDPOINTS)
    FIRST, SECOND = _PACKED_RANKS
    SHIFTS = tuple(4 * nibble for nibble in ORDER[kind])

    @device
    def load_group(w_8, w, o, c, K):
        """Load this thread's 8 columns of a chunk. Return the smallest and the largest value of its
        group, 0 included; nf4: minus the largest absolute value, and that."""
        least, most = float32(0.0), float32(0.0)
        for j in range(8):
            k = c * CHUNK + 8 * (cuda.threadIdx.x % OWNERS) + j
            w_8[j] = float32(0.0)
            if k < K:
                w_8[j] = load1(w, o * K + k)
            v = w_8[j] if w_8[j] == w_8[j] else int_as_float(int32(0x7F800000))
            if NF4:
                v = abs(v)
            least = v if v < least else least
            most = v if v > most else most
        step = WIDTH // 2
        while step > 0:
            other = cuda.shfl_xor_sync(FULL, least, step)
            least = other if other < least else least
            other = cuda.shfl_xor_sync(FULL, most, step)
            most = other if other > most else most
            step //= 2
        return least, most

    @device
    def grid_error(w_8, step):
        """Return the sum over the group of squared distances to multiples of step, in steps."""
        total = float32(0.0)
        for j in range(8):
            multiple = w_8[j] / step
            off = multiple - float32(rounded(multiple))
            total += off * off
        lanes = WIDTH // 2
        while lanes > 0:
            total += cuda.shfl_xor_sync(FULL, total, lanes)
            lanes //= 2
        return total

    @device
    def group_scale(w_8, least, most):
        if NF4:
            return most
        half = float32(0.5)  # the difference may be more than the largest float32
        s = (half * most - half * least) / float32(15.0) * float32(2.0)
        limit = grid_error(w_8, s)
        limit = limit / float32(GRID) if limit > float32(OFF_GRID * CHUNK) else float32(0.0)
        found = s
        for n in range(14, 7, -1):
            step = s * (float32(15.0) / float32(n))
            stretch = step / s
            if grid_error(w_8, step) * (stretch * stretch) < limit:
                found = step
                limit = float32(0.0)
        return found

    @device
    def int4_codes(codes_8, w_8, least, relative, row_scale):
        """Set codes_8, return the bits of the group"""
        bits = float_as_int(relative * float32(1 / UNIT))
        bits = (bits + int32(0x3FFF) + ((bits >> int32(15)) & int32(1))) >> int32(15)
        bits = bits if bits > int32(1) else int32(1)
        s = int_as_float(bits << int32(15)) * float32(UNIT) * row_scale
        zero = clamped(rounded(-least / s), int32(0), int32(15))
        for j in range(8):
            codes_8[j] = clamped(rounded(w_8[j] / s) + zero, int32(0), int32(15))
        return bits << int32(4) | zero

    @device
    def nf4_codes(codes_8, w_8, relative, row_scale):
        part = clamped(rounded(relative), int32(1), int32(255))
        s = float32(part) * row_scale
        for j in range(8):
            rank = int32(0)
            v = w_8[j] / s
            for i in range(15):
                rank += int32(v > float32(MIDPOINTS[i]))
            ranks = int64(FIRST) if rank < int32(8) else int64(SECOND)
            codes_8[j] = int32((ranks >> int64(4 * (rank & int32(7)))) & int64(15))
        return part

    @kernel(BLOCK)
    def quantize_four_kernel(codes, groups, scale_O, w, K, rows):
        """Grid O, block BLOCK. Block o owns row o, 16 threads a chunk at a time.

        codes: the words, uint32; codes, groups, w: flat; w: float32 or bf16.
        """
        o = int64(cuda.blockIdx.x)
        tid = cuda.threadIdx.x
        partial = cuda.shared.array(MAX_WARPS, float32)
        w_8 = cuda.local.array(8, float32)
        codes_8 = cuda.local.array(8, int32)
        chunks = (K + CHUNK - 1) // CHUNK
        steps = (chunks + CHUNKS - 1) // CHUNKS  # the same for all threads: they shuffle
        largest = float32(0.0)
        for step in range(steps):
            least, most = load_group(w_8, w, o, step * CHUNKS + tid // OWNERS, K)
            s = group_scale(w_8, least, most)
            largest = s if s > largest else largest
        row_scale = block_max(largest, partial) / float32(PER_ROW)
        row_scale = row_scale if row_scale > LEAST_SCALE else LEAST_SCALE
        if tid == 0:
            scale_O[o] = row_scale
        for step in range(steps):
            c = step * CHUNKS + tid // OWNERS
            least, most = load_group(w_8, w, o, c, K)
            relative = group_scale(w_8, least, most) / row_scale
            if NF4:
                bits = nf4_codes(codes_8, w_8, relative, row_scale)
                bits |= cuda.shfl_xor_sync(FULL, bits, WIDTH) << int32(8)
            else:
                bits = int4_codes(codes_8, w_8, least, relative, row_scale)
            word = uint32(0)
            for j in range(8):
                word |= uint32(codes_8[j]) << uint32(SHIFTS[j])
            if c < chunks:
                owner = tid % OWNERS  # columns 8 owner ..., so q is owner / 4, t is owner % 4
                codes[(o * chunks + c) * OWNERS + 4 * (owner % 4) + owner // 4] = word
                if owner == 0:
                    groups[int64(c) * rows + o] = uint16(bits)

    return quantize_four_kernel


@functools.cache
def make_is_used(USED: bool):
    """Return is_used(counts, row, each): False if the group of a row, `each` rows, has no count.

    Without USED it is always True.
    """

    @device
    def is_used(counts, row, each):
        return not USED or counts[row // each] > 0

    return is_used


@functools.cache
def make_dequantize_four_kernel(kind: str, USED: bool = False):
    """Return the kernel that writes rows of the matrix. USED: as in make_is_used."""
    load_values = make_load_values(kind == "nf4")
    is_used = make_is_used(USED)

    @kernel(BLOCK)
    def dequantize_four_kernel(w, codes, groups, scale_O, K, rows, counts, each):
        """Grid ceil(4 chunks O / BLOCK), block BLOCK. A thread owns 16 bytes of codes, 32 columns.

        w, codes, scale_O: of the rows that are written. groups: from their first on; `rows` apart
        are those of the next chunk. w, codes, groups: flat.
        """
        values = cuda.local.array(32, float32)
        chunks = (K + CHUNK - 1) // CHUNK
        i = int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x
        o = i // (4 * chunks)
        if o < scale_O.size and is_used(counts, o, each):
            c = (i - o * 4 * chunks) // 4
            load_values(values, codes, groups, 16 * i, c, o, rows)
            scale = scale_O[o]
            for j in range(32):
                values[j] *= scale
            for q in range(4):
                k = c * CHUNK + 32 * q + 8 * (i & 3)
                if K % 8 == 0:
                    if k < K:
                        store8(w, o * K + k, values[8 * q : 8 * q + 8])
                else:
                    for j in range(8):
                        if k + j < K:
                            store1(w, o * K + k + j, values[8 * q + j])

    return dequantize_four_kernel


# ----------------------------------------------------------------------------- launchers
def quantize_four(w_OK: Array, kind: str) -> tuple[Array, Array, Array]:
    """Return codes (O, 64 chunks) uint8, groups (chunks, O) uint16, scales (O,) float32."""
    if on_host(w_OK):
        return quantize_four_ref(w_OK, kind)
    O, K = w_OK.shape  # noqa: E741
    chunks = chunks_of(K)
    codes_OB = empty(w_OK, (O, CHUNK // 2 * chunks), np.uint8)
    groups_CO = empty(w_OK, (chunks, O), np.uint16)
    scale_O = empty(w_OK, O, np.float32)
    words = codes_OB.view(np.uint32).reshape(-1)
    arrays = words, groups_CO.reshape(-1), scale_O, w_OK.reshape(-1)
    launch(make_quantize_four_kernel(kind), O, BLOCK, *arrays, K, O)
    return codes_OB, groups_CO, scale_O
