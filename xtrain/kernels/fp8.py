"""Matrices of training as fp8 codes: one byte per number, one float32 scale per matrix.

x: (N, K)   codes: (N, K), (K, N)

    x ~ codes x scale
    code = round(x / scale), to the nearest e4m3 or e5m2
    scale = 2 max|x| / Q

e4m3 (Q = 448, steps of 1/8 to 1/16 of a number, normal numbers from 2^-6 on) is for activations and
weights, e5m2 (Q = 57344, steps of 1/4 to 1/8, normal from 2^-14) for gradients, whose sizes differ
more. quantize.py says what the bits of an e4m3 mean; an e5m2 is the upper byte of a float16.
Numbers above scale x Q become the largest code, and are counted; infinity and NaN become NaN, and
are counted, so that the loss or the gradient norm shows them.

Both orientations. The products of a linear layer y = x w^T are x w^T, dy w and dy^T x. Hopper's fp8
instructions want both operands with the summed axis contiguous: rows of x and w, then rows of dy
and of w^T, then rows of dy^T and x^T. So every matrix is needed as codes and as transposed codes,
and one kernel writes both while it reads the matrix once.

The scale comes before the numbers. A kernel that writes codes cannot know the largest number that
it will meet. So each matrix takes the scale of the step before, with a factor 2 for its growth, and
each step notes the largest for the next: an integer maximum of float bits, which does not depend on
the order. ("Delayed scaling" in NVIDIA's Transformer Engine.) Without a step before (`current`), a
first pass takes the maximum; the result is as if the scale had been known.

Fusion. A matrix that only products read is never written in bf16: the kernel computes the values
itself from what it reads.

    source         reads              values                                 bytes, read + written
    array          x (N, K)           x                                      2 + 2 per number
    swiglu         gate, up (N, 2F)   y = silu(gate) up  (N, F)              4 + 2 per value
    swiglu_bwd     dy, gate, up       d(gate, up)  (N, 2F), see swiglu.py    3 + 2 per value
    cross_entropy  logits (N, P), l   (exp(logits - l) - onehot) inv_count   2 + 2 per logit

cross_entropy: the gradient of the loss. Its pass over the logits before, 2 bytes per logit, has
given l, the logsumexp of each row (cross_entropy.py): 6 bytes per logit, 8 if that pass wrote the
gradient in bf16 over the logits. fp8_norm.py: residual addition and RMSNorm. A result that
something else reads too stays bf16, and its codes are one more pass: attention's output (its
backward needs sum(dO O)), the gradient that RMSNorm's backward writes (it is that of the residual
stream, too). Codes written where it is computed would save the pass's read, 2 of the pass's 4 bytes
per number.

    numbers, by hand   x = (3, -0.4, 7), the largest of the step before was 7:
                       scale = 14 / 448 = 0.03125,  x / scale = (96, -12.8, 224),
                       codes of e4m3 (96, -13, 224), so x' = (3, -0.40625, 7)
                       the next step's x = (20, 1): 20 / 0.03125 = 640 > 448 is clamped to 14 and
                       counted; the scale after it is 40 / 448 = 0.0893

A block owns a tile of 128 x 128. A thread reads 8 neighbouring numbers (16 bytes), writes 8 codes,
and puts the same 8 bytes in shared memory, in rows of 33 words: then 4 x 4 bytes at a time are
transposed in registers, and a thread writes 16 bytes of each of 4 columns. 4 lanes cover 64
neighbouring bytes of a column.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..device import Array
from .cross_entropy import IGNORE, check_targets_on_host, logits_gradient_ref
from .primitives.codes import (
    E4M3,
    E5M2,
    e4m3_codes4,
    e5m2_codes4,
    nearest_codes,
    store_codes8,
    store_codes16,
    transpose_codes,
)
from .primitives.flat import on_16_bytes
from .primitives.ptx import device, kernel
from .primitives.reduce import MAX_WARPS, block_max
from .primitives.tensor_cores import exp2
from .primitives.words import load_words8, unpack8
from .runtime.compiler import cuda, float32, float_as_int, int32, int64, int_as_float, uint32
from .runtime.cost import declare_cost, distinct_bytes
from .runtime.launch import check, check_array, check_ids, empty, launch, on_host, wide
from .softmax import LOG2E
from .swiglu import sigmoid, swiglu_bwd_ref, swiglu_ref

DTYPES = {"e4m3": E4M3, "e5m2": E5M2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
ROOM = 2.0  # scale Q / the largest number of the step before
LEAST_SCALE = 2.0**-126  # so that 1 / scale is finite
TILE = 128  # rows and columns
BLOCK = 256
EACH = 8  # numbers of a thread in a row: one 16-byte access
PAIRS = EACH // 2  # words of 8 bf16
ROWS = BLOCK // (TILE // EACH)  # that the block reads at a time
STEPS = TILE // ROWS
# of a row in shared memory: one more, so that neighbouring rows begin in neighbouring banks
WORDS = TILE // 4 + 1
INFINITE = 0x7F800000  # bits of infinity; NaN has more, a number fewer
INF = float32(math.inf)
NAN = float32(math.nan)


class Operand(NamedTuple):
    """A matrix of a product: codes (R, K), the summed axis last; value = code scale_1[0]."""

    codes: Array  # uint8
    scale_1: Array
    kind: str  # "e4m3" or "e5m2"

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes


@dataclass(frozen=True, eq=False)
class Fp8:
    """A matrix (N, K) as codes in both orientations. scale_1: (1,) float32, on the device."""

    codes_NK: Array
    codes_KN: Array
    scale_1: Array
    kind: str

    @property
    def rows(self) -> Operand:
        """The matrix, for products that sum over its columns."""
        return Operand(self.codes_NK, self.scale_1, self.kind)

    @property
    def columns(self) -> Operand:
        """Its transpose, for products that sum over its rows."""
        return Operand(self.codes_KN, self.scale_1, self.kind)


@dataclass(frozen=True, eq=False)
class Slot:
    """What is known of a matrix from step to step, on the device."""

    scale_1: Array  # float32
    largest_1: Array  # int32, the bits of the largest |x| since the last update; 0: none
    counts_2: Array  # int64, numbers clamped, numbers not finite since then; one for a whole model
    kind: str

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.scale_1, self.largest_1, self.counts_2


def check_type(op: str, x: Any, kind: type) -> None:
    """Raise TypeError if x is not of this type."""
    if not isinstance(x, kind):
        raise TypeError(f"{op}: expected {kind.__name__}, got {type(x).__name__}")


# ----------------------------------------------------------------------------- reference
def encode_ref(x, scale, kind):
    """Return the codes (uint8) of x float32, the bits of max|x| (int32), and two counts.

    The counts are those of clamped numbers and of numbers that are not finite.
    """
    size = np.abs(x)
    finite = size < np.inf
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x * (np.float32(1) / np.float32(scale))
    clamped = finite & (np.abs(scaled) > LARGEST[kind])
    codes = nearest_codes(np.where(finite, scaled, np.float32(np.nan)), DTYPES[kind])
    largest = np.where(finite, size, np.float32(np.inf)).max(initial=0).astype(np.float32)
    return codes, largest.view(np.int32), (int(clamped.sum()), int((~finite).sum()))


def next_scale_ref(largest_S, scale_S, factor_S):
    """Return the scales of the next step; without a finite largest above 0 the scale stays.

    largest: bits of the largest, int32.
    """
    is_finite = (largest_S > 0) & (largest_S < INFINITE)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.maximum(largest_S.view(np.float32) * factor_S, np.float32(LEAST_SCALE))
    return np.where(is_finite, scale, scale_S).astype(np.float32)


def decode(x: Operand) -> np.ndarray:
    """Return the numbers (R, K) float32 that a matrix on the host, or in the simulator, stands for.

    Raises TypeError.
    """
    check_type("fp8", x, Operand)
    codes = np.asarray(x.codes).view(DTYPES[x.kind]).astype(np.float32)
    return codes * np.asarray(x.scale_1)[0]


# --------------------------------------------------------- what every kernel that writes codes does
@functools.cache
def make_encode4(kind: str):
    """Return the device function that encodes 4 numbers, and notes what it meets."""
    codes4 = e4m3_codes4 if kind == "e4m3" else e5m2_codes4
    Q = LARGEST[kind]

    @device
    def encode4(v, inverse, largest, counts):
        """Return the word of codes of v[0:4] inverse; v is overwritten.

        inverse: 1 / scale.
        largest[0]: float32, the largest size so far, infinity for what is not finite.
        counts[0:2]: int32, clamped, not finite.
        """
        for j in range(4):
            size = abs(v[j])
            scaled = v[j] * inverse
            if size < INF:
                counts[0] += int32(abs(scaled) > float32(Q))
            else:
                size = INF
                scaled = NAN
                counts[1] += int32(1)
            largest[0] = size if size > largest[0] else largest[0]
            v[j] = scaled
        return codes4(v[0], v[1], v[2], v[3])

    return encode4


@device
def start_notes(largest, counts):
    """Start the notes of a thread that has encoded nothing yet."""
    largest[0] = float32(0.0)
    counts[0] = int32(0)
    counts[1] = int32(0)


@device
def add_notes(largest_1, counts_2, largest, counts, partial, count):
    """Add a block's notes to the slot's.

    partial: MAX_WARPS floats of shared memory.
    count: add the counts too.
    """
    block_largest = block_max(largest[0], partial)
    if cuda.threadIdx.x == 0:
        cuda.atomic.max(largest_1, 0, float_as_int(block_largest))
    if count and counts[0]:
        cuda.atomic.add(counts_2, 0, int64(counts[0]))
    if count and counts[1]:
        cuda.atomic.add(counts_2, 1, int64(counts[1]))


@device
def store_transposed(columns, first, N, tile, word, words):
    """Store 4 columns of 16 rows, which are in shared memory as rows of `words` words.

    columns[first + j N : + 16] = byte j of tile[word], tile[word + words], ...
    """
    four = cuda.local.array(4, uint32)
    out = cuda.local.array((4, 4), uint32)
    for i in range(4):
        for j in range(4):
            four[j] = tile[uint32(word + (4 * i + j) * words)]
        transpose_codes(four)
        for j in range(4):
            out[j, i] = four[j]
    for j in range(4):
        store_codes16(columns, first + j * N, out[j])


# ----------------------------------------------------------------------------- kernels
@device
def logits_gradient(v, first, target, lse, vocab_size, inv_count):
    """Replace EACH neighbouring logits v of a row by their gradient.

    first: column of the first, int32. target: int64.
    """
    factor = inv_count if target >= 0 and target < vocab_size else NAN
    for j in range(EACH):
        v[j] = exp2((v[j] - lse) * float32(LOG2E)) * factor
    used = int32(vocab_size) - first if target != IGNORE else int32(0)
    hit = int32(target) - first
    # few threads: padding, an ignored row, the target
    if used < EACH or (hit >= 0 and hit < EACH):
        for j in range(EACH):
            v[j] -= inv_count if int32(j) == hit else float32(0.0)
            v[j] = v[j] if int32(j) < used else float32(0.0)


@device
def swiglu_values(v):
    """Replace gate v[0] and up v[1] by y, in v[0]."""
    for j in range(EACH):
        gate = v[0, j]
        v[0, j] = gate * sigmoid(gate) * v[1, j]


@device
def swiglu_gradients(v, d):
    """Replace gate v[0] and up v[1] by their gradients; d: dy. See swiglu.py."""
    for j in range(EACH):
        gate = v[0, j]
        up = v[1, j]
        sig = sigmoid(gate)
        silu = gate * sig
        v[0, j] = d[j] * up * (sig + silu * (float32(1.0) - sig))
        v[1, j] = d[j] * silu


@functools.cache
def make_fp8_kernel(source: str, kind: str, write: bool):
    """Return the kernel for these values. write False: it only takes the maximum."""
    LOSS = source == "cross_entropy"
    BACKWARD = source == "swiglu_bwd"
    SWIGLU = source in ("swiglu", "swiglu_bwd")
    PARTS = 2 if BACKWARD else 1  # tiles that a block writes
    AHEAD = 2 if SWIGLU else 4  # rows that a thread loads before it uses the first
    encode4 = make_encode4(kind)
    SHARED = PARTS * TILE * WORDS

    @kernel(BLOCK, 4)
    def fp8_kernel(
        codes, columns, a, b, targets, inv_count_1, scale_1, largest_1, counts_2, N, K, vocab_size
    ):
        """Grid (K / TILE, N / TILE), block BLOCK. All arrays are flat.

        array: a = x (N K).
        swiglu: a = gate and up (N 2K).
        swiglu_bwd: a the same, b = dy (N K).
        cross_entropy: a = logits (N K), b = lse (N), targets (N). Only this source uses targets,
        inv_count and vocab_size. codes: (N K), columns: (K N); of swiglu_bwd (N 2K) and (2K N),
        gate first.
        """
        tile = cuda.shared.array(SHARED, uint32)
        partial = cuda.shared.array(MAX_WARPS, float32)
        first_W = cuda.local.array((AHEAD, PAIRS), uint32)
        second_W = cuda.local.array((AHEAD, PAIRS), uint32)
        third_W = cuda.local.array((AHEAD, PAIRS), uint32)
        v = cuda.local.array((2, EACH), float32)
        d = cuda.local.array(EACH, float32)
        lse = cuda.local.array(AHEAD, float32)
        target = cuda.local.array(AHEAD, int64)
        words = cuda.local.array(2, uint32)
        largest = cuda.local.array(1, float32)
        counts = cuda.local.array(2, int32)
        start_notes(largest, counts)
        tid = cuda.threadIdx.x
        column = tid % (TILE // EACH) * EACH
        row = tid // (TILE // EACH)
        n0 = int64(cuda.blockIdx.y) * TILE
        k0 = int64(cuda.blockIdx.x) * TILE
        inverse = float32(1.0) / scale_1[0]
        inv_count = inv_count_1[0]
        width = 2 * K if SWIGLU else K
        for s in range(0, STEPS, AHEAD):
            for i in range(AHEAD):
                n = n0 + (s + i) * ROWS + row
                load_words8(first_W[i], a, n * width + k0 + column)
                if SWIGLU:
                    load_words8(second_W[i], a, n * width + K + k0 + column)
                if BACKWARD:
                    load_words8(third_W[i], b, n * K + k0 + column)
                if LOSS:
                    lse[i] = b[uint32(n)]
                    target[i] = int64(targets[uint32(n)])
            cuda.syncwarp()  # keeps the compiler from moving the loads behind the arithmetic
            for i in range(AHEAD):
                r = (s + i) * ROWS + row
                unpack8(v[0], first_W[i], a)
                if LOSS:
                    first = int32(k0) + column
                    logits_gradient(v[0], first, target[i], lse[i], vocab_size, inv_count)
                if SWIGLU:
                    unpack8(v[1], second_W[i], a)
                    if BACKWARD:
                        unpack8(d, third_W[i], b)
                        swiglu_gradients(v, d)
                    else:
                        swiglu_values(v)
                for p in range(PARTS):
                    for j in range(2):
                        words[j] = encode4(v[p, 4 * j : 4 * j + 4], inverse, largest, counts)
                        if write:
                            tile[uint32((p * TILE + r) * WORDS + column // 4 + j)] = words[j]
                    if write:
                        store_codes8(codes, (n0 + r) * (PARTS * K) + p * K + k0 + column, words)
        # a barrier: the tile is full
        add_notes(largest_1, counts_2, largest, counts, partial, write)
        if write:
            lane = tid % 32
            warp = tid // 32
            # 16 rows, 4 columns
            piece = lane % 4 + warp % 2 * 4
            word = lane // 4 + warp // 2 * 8
            for p in range(PARTS):
                start = (p * K + k0 + word * 4) * N + n0 + piece * 16
                tile_word = (p * TILE + piece * 16) * WORDS + word
                store_transposed(columns, start, N, tile, tile_word, WORDS)

    def nbytes(codes, columns, a, b, targets, *_):
        total = distinct_bytes(a, b)
        if LOSS:
            total += targets.nbytes
        if write:
            total += codes.nbytes + columns.nbytes
        return total

    declare_cost(fp8_kernel, nbytes=nbytes)
    return fp8_kernel


@device
def next_scale(bits, scale, factor):
    """Return the next scale; without a finite number above 0 the scale stays.

    bits: of the largest number.
    """
    if int32(0) < bits < int32(INFINITE):
        scale = int_as_float(bits) * factor
        scale = scale if scale > float32(LEAST_SCALE) else float32(LEAST_SCALE)
    return scale


@cuda.jit
def first_scale_kernel(new_1, scale_1, largest_1, factor):
    """Grid 1, block 1. new_1 = the scale for the largest so far."""
    new_1[0] = next_scale(largest_1[0], scale_1[0], factor)


@kernel(BLOCK)
def update_scales_kernel(scale_S, largest_RS, factor_S, counts_K, last_K):
    """Grid ceil(max(S, K) / BLOCK), block BLOCK. One thread per matrix, and per count.

    largest is flat.
    """
    s = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
    S = scale_S.size
    if s < S:
        bits = int32(0)
        for i in range(s, largest_RS.size, S):  # of each rank
            bits = largest_RS[i] if largest_RS[i] > bits else bits
            largest_RS[i] = 0
        scale_S[s] = next_scale(bits, scale_S[s], factor_S[s])
    if s < counts_K.size:
        last_K[s] = counts_K[s]
        counts_K[s] = 0


# ----------------------------------------------------------------------------- launchers
def scale_factor(kind: str) -> np.float32:
    """Return scale / largest."""
    return np.float32(ROOM / LARGEST[kind])


def fp8(x_NK: Array, slot: Slot, current: bool = False) -> Fp8:
    """Return the codes of x (N, K) bf16, by the slot's scale. N and K: multiples of TILE.

    current: by the scale for x itself.
    Notes the largest |x| in the slot, and counts.
    """
    check_array("fp8", "x", x_NK, (None, None), ("bfloat16",))
    return _tiles("array", x_NK.shape, x_NK.shape[1], slot, current, x_NK, x_NK)


def fp8_swiglu(gu_N2F: Array, slot: Slot, current: bool = False) -> Fp8:
    """Return the codes of silu(gate) up (N, F), as fp8 does; gu: (N, 2F) bf16, gate before up."""
    check_array("fp8 swiglu", "gu", gu_N2F, (None, None), ("bfloat16",))
    N, F2 = gu_N2F.shape
    return _tiles("swiglu", (N, F2 // 2), F2 // 2, slot, current, gu_N2F, gu_N2F)


def fp8_swiglu_bwd(dy_NF: Array, gu_N2F: Array, slot: Slot, current: bool = False) -> Fp8:
    """Return the codes of d(gate, up) (N, 2F), as fp8 does; dy: (N, F), gu: (N, 2F) bf16."""
    check_array("fp8 swiglu backward", "dy", dy_NF, (None, None), ("bfloat16",))
    N, F = dy_NF.shape
    check_array("fp8 swiglu backward", "gu", gu_N2F, (N, 2 * F), ("bfloat16",))
    return _tiles("swiglu_bwd", (N, 2 * F), F, slot, current, gu_N2F, dy_NF)


def fp8_cross_entropy(
    logits_NP: Array,
    targets_N: Array,
    lse_N: Array,
    vocab_size: int,
    inv_count_1: Array,
    slot: Slot,
    current: bool = False,
) -> Fp8:
    """Return the codes of the gradient (N, P) that cross_entropy gives, as fp8 does.

    logits: (N, P >= vocab_size) bf16. targets: (N,) integers, as in cross_entropy.
    lse: (N,), the logsumexp of each row. inv_count: (1,) float32.
    """
    op = "fp8 cross_entropy"
    check_array(op, "logits", logits_NP, (None, None), ("bfloat16",))
    N, P = logits_NP.shape
    check_array(op, "targets", targets_N, (N,), (str(targets_N.dtype),))
    check_ids(op, "targets", targets_N)
    check_array(op, "lse", lse_N, (N,))
    check_array(op, "inv_count", inv_count_1, (1,))
    check(0 < vocab_size <= P, f"{op}: vocabulary {vocab_size}, logits {logits_NP.shape}")
    loss = targets_N, inv_count_1, vocab_size
    return _tiles("cross_entropy", (N, P), P, slot, current, logits_NP, lse_N, *loss)


def _tiles(source, shape, width, slot, current, a, b, targets=None, inv_count_1=None, vocab_size=0):
    """Return the codes of a matrix of this shape. width: columns of the grid's tiles."""
    check_type("fp8", slot, Slot)
    check(
        shape[0] % TILE == 0 and width % TILE == 0,
        f"fp8: a matrix of {shape[0]} x {width}, expected multiples of {TILE} rows and columns",
    )
    # a kernel argument cannot be None
    loss = (a, slot.scale_1) if targets is None else (targets, inv_count_1)
    if on_host(a, b, *loss, *slot.arrays):
        x = wide(a)
        if source == "swiglu":
            x = swiglu_ref(x)
        elif source == "swiglu_bwd":
            x = swiglu_bwd_ref(wide(b), x)
        elif source == "cross_entropy":
            check_targets_on_host(targets, vocab_size)
            x = logits_gradient_ref(x, targets, b, vocab_size, inv_count_1)
        return encode_on_host(x, slot, current)
    matrices = (a,) if source == "cross_entropy" else (a, b)
    check(
        on_16_bytes(*matrices),
        "fp8: an address is not a multiple of 16 bytes: copy the matrix first",
    )
    grid = (width // TILE, shape[0] // TILE)
    flat = [x.reshape(-1) for x in (a, b, *loss)]

    def start(write, codes, columns, scale_1):
        state = scale_1, slot.largest_1, slot.counts_2
        arguments = (codes, columns, *flat, *state, shape[0], width, vocab_size)
        launch(make_fp8_kernel(source, slot.kind, write), grid, BLOCK, *arguments)

    return encode_on_gpu(shape, slot, current, start)


def encode_on_host(x_NK: np.ndarray, slot: Slot, current: bool) -> Fp8:
    """Return the codes of x float32, as the kernels give them."""
    kind = slot.kind
    scale_1 = slot.scale_1
    slot.largest_1[0] = max(slot.largest_1[0], encode_ref(x_NK, scale_1[0], kind)[1])
    if current:
        scale_1 = next_scale_ref(slot.largest_1, scale_1, scale_factor(kind))
    codes_NK, _, counts = encode_ref(x_NK, scale_1[0], kind)
    slot.counts_2[...] += np.array(counts)
    return Fp8(codes_NK, np.ascontiguousarray(codes_NK.T), scale_1, kind)


def encode_on_gpu(
    shape: tuple[int, int], slot: Slot, current: bool, start: Callable[..., None]
) -> Fp8:
    """Return the codes of a matrix of this shape, as its kernel writes them.

    start(write, codes, columns, scale_1) launches the kernel; codes and columns are flat.
    write False: to take the maximum only.
    """
    scale_1 = slot.scale_1
    codes_NK = empty(scale_1, shape, np.uint8)
    codes_KN = empty(scale_1, shape[::-1], np.uint8)
    flat = codes_NK.reshape(-1), codes_KN.reshape(-1)
    if current:
        start(False, *flat, scale_1)
        scale_1 = empty(scale_1, 1)
        factor = scale_factor(slot.kind)
        launch(first_scale_kernel, 1, 1, scale_1, slot.scale_1, slot.largest_1, factor)
    start(True, *flat, scale_1)
    return Fp8(codes_NK, codes_KN, scale_1, slot.kind)


def update_scales(
    scale_S: Array, largest_RS: Array, factor_S: Array, counts_K: Array, last_K: Array
) -> None:
    """Compute the next scale of every matrix at the end of a step.

    last = counts; largest and counts = 0. A matrix whose largest was 0 or not finite keeps its
    scale.
    scale, factor: float32, counts, last: int64.
    largest: (R S,) int32, what each of R ranks noted, one after the other: the largest of all
    decides.
    """
    S = scale_S.size
    K = counts_K.size
    op = "update_scales"
    check_array(op, "scale", scale_S, (None,))
    check_array(op, "largest", largest_RS, (None,), ("int32",))
    check_array(op, "factor", factor_S, (S,))
    check_array(op, "counts", counts_K, (None,), ("int64",))
    check_array(op, "last", last_K, (K,), ("int64",))
    check(
        largest_RS.size > 0 and largest_RS.size % S == 0,
        f"update_scales: {largest_RS.size} numbers in largest, expected a multiple of {S}",
    )
    arrays = (scale_S, largest_RS, factor_S, counts_K, last_K)
    if on_host(*arrays):
        scale_S[...] = next_scale_ref(largest_RS.reshape(-1, S).max(0), scale_S, factor_S)
        last_K[...] = counts_K
        largest_RS[...] = 0
        counts_K[...] = 0
        return
    launch(update_scales_kernel, -(-max(S, K) // BLOCK), BLOCK, *arrays)
