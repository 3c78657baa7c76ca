"""The MLPs of a few rows' experts, in inference: only the chosen experts are read.

    x: (N, C)   experts, weights: (N, K)   gate_up: (E, 2F, C)   down: (E, C, F)   y: (N, C)
    gate_up, down: arrays, or codes of one byte or of four bits (quantize.py)

    a_nk = w_nk silu(gate_e x_n) (up_e x_n)        y_n = sum over k of down_e a_nk,   e = e_nk

A matrix-vector product takes as long as reading its matrix, so there is nothing to gain from an
order of rows (expert_order.py): each pair reads its expert itself, and experts that several rows
have chosen come from L2. A warp reads rows of the matrices 16 bytes at a time. Memory delivers at
full speed only if some 40 KB of each multiprocessor are in flight, so a kernel keeps everything in
flight that its registers hold, and that is all of it for one row of a small model. What the rows are
multiplied with, x or a, is in shared memory, with zeros beyond its end.

    gate and up   a warp computes one number of a from a row of gate and one of up
    down          a number of y is the sum over the steps, of 256 columns each, of all K products.
                  So many warps share the steps that each has few; their sums are added in order

The second kernel reads its matrices before it waits for the first: the experts are known since
then. (The first waits for the previous kernel, which chose them, before it lets the second start.)

Codes are unpacked in registers, just before they are multiplied. Their 16 bytes are 16 columns, or
32 in four groups of 8 (four_bits.py), so lanes read x at distances where they would meet in the banks
of shared memory: there it has gaps. The scale of a group multiplies the product of 8 columns, that of
a row of gate and up their sum, that of a row of down each of its terms, for they are of K experts.

Computed in float32; a is rounded to the dtype of x. A row's bits do not depend on other rows, but
they are not those of grouped_product.py: batch-invariant mode uses that. Bytes moved: 3 K C F
elements for each row, if no two rows share an expert.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...device import Array
from ..four_bits import CHUNK as FOUR_BITS_CHUNK
from ..four_bits import (
    FOUR_BITS,
    chunks_of,
    int4_group_scale,
    make_unpack,
    nf4_group_scale,
)
from ..primitives.codes import codes_to_floats, load_codes16
from ..primitives.flat import on_16_bytes
from ..primitives.ptx import device, kernel, let_next_start, store1, wait_for_previous
from ..primitives.reduce import warp_sum
from ..primitives.tensor_cores import high_bf16, low_bf16, opaque
from ..primitives.words import (
    load_words8,
    load_words8_shared,
    store_words8_shared,
    unpack8,
)
from ..quantize import Quantized, check_quantized, dense, kind_of
from ..runtime.compiler import cuda, float32, int64, uint16, uint32
from ..runtime.cost import declare_cost
from ..runtime.launch import (
    FLOATS,
    can_overlap,
    check,
    check_array,
    dtype_name,
    empty,
    launch,
    on_host,
    wide,
)
from ..swiglu import sigmoid, swiglu_ref

BLOCK = 256
WARPS = BLOCK // 32
RESIDENT = 4  # blocks of a multiprocessor: 64 registers, and 32 warps whose loads are in flight
CHUNK = 8  # elements of a lane; C and F are multiples of it, and so of WARPS
WIDE = 32 * CHUNK  # elements of a warp at a time
WORDS = 32  # registers of a thread for elements that are in flight
MOST_COLUMNS = 8192  # of x: float32 in shared memory takes 32 KB, 45 KB with gaps
MOST_ROWS = 8  # with more, experts are shared often enough for a grouped product
MOST_ROWS_QUANTIZED = 8 * MOST_ROWS  # of codes a grouped product needs a dequantized copy
# The time of a pair here, that of an expert with tokens in grouped products being 1; and the time of
# the kernels around those products, in elements of matrices. Measured on one H200 with Mixtral's,
# Qwen3-30B-A3B's and smaller experts.
PAIR = {"": 1.0, "int8": 0.25, "fp8": 0.3, "int4": 0.25, "nf4": 0.3}
AROUND = 64e6
AROUND_QUANTIZED = 40e6
MOST_STAGED = 40 << 10  # bytes of a in shared memory


# ----------------------------------------------------------------------------- reference
def expert_gemv_ref(x_NC, weights_NK, experts_NK, gate_up_EGC, down_ECF):
    """Return y (N, C)."""
    y_NC = np.zeros_like(x_NC)
    for n, k in np.ndindex(experts_NK.shape):
        e = experts_NK[n, k]
        a_1F = swiglu_ref((gate_up_EGC[e] @ x_NC[n])[None]) * weights_NK[n, k]
        y_NC[n] += down_ECF[e] @ a_1F[0]
    return y_NC


# ----------------------------------------------------------------------------- kernels
@device
def load_or_zeros(words, x, row, i, n):
    """Set words to x[row + i : row + i + 8], or to zeros if i is not less than n."""
    if i < n:
        load_words8(words, x, row + i)
    else:
        for j in range(CHUNK):
            words[j] = uint32(0)


@dataclass(frozen=True)
class Access:
    """What a lane reads of a row of w at a time.

    kind: of the codes, "" of an array.
    columns: that the lane then has.
    blocks: of 8 columns that are multiplied together: a part.
    words: registers.
    run: columns of x after which there is a gap in shared memory, of `gap` elements.
    """

    kind: str
    columns: int
    blocks: int
    words: int
    run: int
    gap: int

    @property
    def wide(self) -> int:
        """Return the columns of a warp."""
        return 32 * self.columns

    @property
    def parts(self) -> int:
        return self.columns // (CHUNK * self.blocks)

    @property
    def staged(self) -> int:
        """Return the elements in shared memory for the columns of a warp."""
        return self.wide // self.run * (self.run + self.gap)

    def row(self, K: int) -> int:
        """Return the columns of a row of w, K and padding."""
        return chunks_of(K) * self.run if self.kind in FOUR_BITS else K

    def nbytes(self, rows: int, K: int, itemsize: int) -> int:
        """Return the bytes of rows of w."""
        if self.kind in FOUR_BITS:
            return rows * (chunks_of(K) * (self.run // 2 + 2) + 4)
        return rows * (K * itemsize + 4 * (self.kind != ""))


@functools.cache
def access_of(kind: str, half: bool) -> Access:
    """Return how a matrix is read. half: x, and an array w, is bf16, of which 8 are 4 words."""
    if kind in FOUR_BITS:  # the fifth word: the bits of the group
        return Access(kind, columns=32, blocks=1, words=5, run=FOUR_BITS_CHUNK, gap=32)
    if kind:
        return Access(kind, columns=16, blocks=2, words=4, run=64, gap=8)
    return Access(kind, columns=CHUNK, blocks=1, words=4 if half else 8, run=CHUNK, gap=0)


def in_flight(access: Access, matrices: int) -> int:
    """Return how many accesses to each of so many matrices a lane begins before the first is
    used."""
    return WORDS // (matrices * access.words)


class Matrices(NamedTuple):
    """The matrices of all experts. All arrays are flat."""

    w: Array
    scale: Array  # of rows of codes
    groups: Array  # of codes of four bits: the scales of their groups


@functools.cache
def make_reader(access: Access, K: int):
    """Return load, load_x, add_part and place, by which a lane multiplies rows of K columns.

    load(words, matrices, row, c)
        begin to read the columns from c, counted with the padding, on of a row of w
    load_x(x_words, x_s, c, part)
        read the columns of x that a part of an access at c is multiplied with
    add_part(acc, x_words, words, part, matrices, x) -> acc plus that product
    place(k)
        where column k of x is in shared memory
    """
    FOUR = access.kind in FOUR_BITS
    CODES = access.kind != ""  # numba-cuda-mlir knows no truth of a text
    NF4 = access.kind == "nf4"
    BLOCKS = access.blocks
    RUN = access.run
    RUN_BITS = RUN.bit_length() - 1
    GAP = access.gap
    COLUMNS = access.row(K)
    PART = CHUNK * BLOCKS
    unpack_four = make_unpack(NF4)

    @device
    def load(words, matrices, row, c):
        if FOUR:
            load_codes16(words, matrices.w, (row * COLUMNS + c) >> 1)
            group = int64(c >> RUN_BITS) * matrices.scale.size + row
            words[4] = uint32(matrices.groups[group])
        elif CODES:
            load_codes16(words, matrices.w, row * K + c)
        else:
            load_words8(words, matrices.w, row * K + c)

    @device
    def place(k):
        return k + (k >> RUN_BITS) * GAP

    @device
    def load_x(x_words, x_s, c, part):
        at = place(c)
        if FOUR:  # 32 columns of codes are 8 of each quarter of their group
            at = (c >> RUN_BITS) * (RUN + GAP) + ((c & (RUN - 1)) >> 2) + 32 * part
        for h in range(BLOCKS):
            load_words8_shared(x_words[h], x_s, at + CHUNK * h)

    @device
    def unpack_part(values, words, part, matrices):
        if FOUR:
            pairs = cuda.local.array(4, uint32)
            unpack_four(pairs, words[part], words[4])
            for j in range(4):
                values[2 * j] = low_bf16(pairs[j])
                values[2 * j + 1] = high_bf16(pairs[j])
        elif CODES:
            codes_to_floats(values, words, matrices.w)
        else:
            unpack8(values, words, matrices.w)

    @device
    def add_part(acc, x_words, words, part, matrices, x):
        a = cuda.local.array(CHUNK, float32)
        b = cuda.local.array(PART, float32)
        unpack_part(b, words, part, matrices)
        total = float32(0.0) if FOUR else acc
        for h in range(BLOCKS):
            unpack8(a, x_words[h], x)
            for j in range(CHUNK):
                total += a[j] * b[CHUNK * h + j]
        if FOUR:
            group = words[4]
            scale = nf4_group_scale(group, part // 2) if NF4 else int4_group_scale(group)
            total = acc + total * scale
        return total

    return load, load_x, add_part, place


@functools.cache
def make_gate_up_kernel(C, F, K, half, overlap, kind=""):
    """Return the kernel that computes a.

    half: x, and w if it is an array, is bf16.
    overlap: it waits for the previous kernel of the stream itself (runtime/overlap.py).
    kind: of the codes of w, "" of an array.
    """
    access = access_of(kind, half)
    EACH = access.columns
    WIDTH = access.wide
    PARTS = access.parts
    BLOCKS = access.blocks
    CODES = kind != ""
    COLUMNS = access.row(C)
    IN_FLIGHT = min(in_flight(access, 2), -(-COLUMNS // WIDTH))
    KIND = uint16 if half else float32
    ALL = -(-COLUMNS // (IN_FLIGHT * WIDTH)) * (IN_FLIGHT * WIDTH)
    STAGED = ALL // WIDTH * access.staged
    LOADED = max(access.words, 8)
    load, load_x, add_part, place = make_reader(access, C)

    @kernel(BLOCK, RESIDENT)
    def expert_gate_up_kernel(a, x, w, scale, groups, experts_P, weights_P):
        """Grid (F / WARPS, P), block BLOCK. a: flat (P F), x: flat (N C), w: flat (E 2F C)."""
        x_s = cuda.shared.array(STAGED, KIND)
        words = cuda.local.array(CHUNK, uint32)
        x_words = cuda.local.array((BLOCKS, CHUNK), uint32)
        gate_words = cuda.local.array((IN_FLIGHT, LOADED), uint32)
        up_words = cuda.local.array((IN_FLIGHT, LOADED), uint32)
        matrices = Matrices(w, scale, groups)
        if overlap:
            wait_for_previous()
            let_next_start()
        f = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        pair = cuda.blockIdx.y
        gate_row = int64(experts_P[pair]) * (2 * F) + f
        up_row = gate_row + int64(F)
        gate = float32(0.0)
        up = float32(0.0)
        for first in range(0, COLUMNS, IN_FLIGHT * WIDTH):
            for s in range(IN_FLIGHT):  # unconditional loads, so that all are in flight at once
                c = first + s * WIDTH + EACH * cuda.laneid
                c = c if c < COLUMNS else 0
                load(gate_words[s], matrices, gate_row, c)
                load(up_words[s], matrices, up_row, c)
            if first == 0:
                for c in range(CHUNK * cuda.threadIdx.x, opaque(ALL), CHUNK * BLOCK):
                    load_or_zeros(words, x, int64(pair // K) * C, c, C)
                    store_words8_shared(x_s, place(c), words)
                cuda.syncthreads()  # x is in shared memory
            for s in range(IN_FLIGHT):
                for part in range(PARTS):
                    load_x(x_words, x_s, first + s * WIDTH + EACH * cuda.laneid, part)
                    gate = add_part(gate, x_words, gate_words[s], part, matrices, x)
                    up = add_part(up, x_words, up_words[s], part, matrices, x)
        gate = warp_sum(gate)
        up = warp_sum(up)
        if cuda.laneid == 0:
            if CODES:
                gate *= scale[gate_row]
                up *= scale[up_row]
            value = gate * sigmoid(gate) * up * weights_P[pair]
            store1(a, int64(pair) * F + f, value)

    declare_cost(
        expert_gate_up_kernel,
        nbytes=lambda a, x, w, scale, groups, experts_P, _: access.nbytes(
            2 * F * experts_P.size, C, w.itemsize
        ),
        flops=lambda a, x, w, scale, groups, experts_P, _: 4.0 * F * C * experts_P.size,
    )
    return expert_gate_up_kernel


@dataclass(frozen=True)
class Steps:
    """How warps share the steps of a number of y: the accesses to the K rows of down.

    row: steps of one row.
    warps: of a number of y, a power of 2.
    each: steps of a warp.
    in_flight: of them that are in flight.
    """

    row: int
    warps: int
    each: int
    in_flight: int


@functools.cache
def steps_of(access: Access, F: int, K: int, half: bool) -> Steps:
    """Return the steps of K rows of F columns. half: a is bf16."""
    row = -(-access.row(F) // access.wide)
    most = WORDS // (access.words + (access.kind != ""))  # and the scale of the row
    warps = 1
    while warps < WARPS and K * row > warps * most:
        warps *= 2
    each = -(-K * row // warps)
    room = MOST_STAGED // (warps * access.staged * (2 if half else 4))
    return Steps(row, warps, each, min(each, most, room))


@functools.cache
def make_down_kernel(C, F, K, half, overlap, ready, kind=""):
    """Return the kernel that computes y.

    half, overlap, kind: as in make_gate_up_kernel.
    ready: the previous kernel writes neither w nor experts, so they are read before it has ended.
    """
    access = access_of(kind, half)
    EACH_LANE = access.columns
    WIDTH = access.wide
    ACCESS_PARTS = access.parts
    BLOCKS = access.blocks
    CODES = kind != ""
    ROW = access.row(F)
    steps = steps_of(access, F, K, half)
    STEPS = steps.row  # of one of the K products
    ALL = K * STEPS
    PARTS = steps.warps
    EACH = steps.each
    IN_FLIGHT = steps.in_flight
    COLUMNS = WARPS // PARTS  # of y, of a block
    STAGED = PARTS * IN_FLIGHT * access.staged  # elements of a in shared memory
    KIND = uint16 if half else float32
    TURNS = WIDTH // WIDE  # of a warp that copies WIDTH columns of a
    LOADED = max(access.words, 8)
    load, load_x, add_part, place = make_reader(access, F)

    @device
    def load_steps(w_words, scales, matrices, experts_P, n, c, first):
        """Begin to read the steps first, first + 1, ... of row c."""
        for s in range(IN_FLIGHT):  # unconditional loads, so that all are in flight at once
            step = first + s if first + s < ALL else ALL - 1
            f = step % STEPS * WIDTH + EACH_LANE * cuda.laneid
            f = f if f < ROW else 0
            row = int64(experts_P[n * K + step // STEPS]) * C + c
            load(w_words[s], matrices, row, f)
            if CODES:
                scales[s] = matrices.scale[row]

    @kernel(BLOCK, RESIDENT)
    def expert_down_kernel(y, a, w, scale, groups, experts_P):
        """Grid (C PARTS / WARPS, N), block BLOCK. y: flat (N C), a: flat (N K F), w: flat (E C F).

        PARTS neighbouring warps compute a number of y.
        """
        a_s = cuda.shared.array(STAGED, KIND)
        partial = cuda.shared.array(WARPS, float32)
        words = cuda.local.array(CHUNK, uint32)
        a_words = cuda.local.array((BLOCKS, CHUNK), uint32)
        w_words = cuda.local.array((IN_FLIGHT, LOADED), uint32)
        scales = cuda.local.array(IN_FLIGHT, float32)
        matrices = Matrices(w, scale, groups)
        warp = cuda.threadIdx.x >> 5
        c = cuda.blockIdx.x * COLUMNS + warp // PARTS
        n = int64(cuda.blockIdx.y)
        part = warp % PARTS
        if overlap and not ready:
            wait_for_previous()
        load_steps(w_words, scales, matrices, experts_P, n, c, part * EACH)
        if overlap and ready:
            wait_for_previous()
        if overlap:
            let_next_start()
        acc = float32(0.0)
        for i in range(0, EACH, IN_FLIGHT):
            if i > 0:
                load_steps(w_words, scales, matrices, experts_P, n, c, part * EACH + i)
                cuda.syncthreads()  # a of the steps before has been read
            for slot in range(warp, opaque(PARTS * IN_FLIGHT), WARPS):
                own = i + slot % IN_FLIGHT  # of the EACH steps of a part
                step = slot // IN_FLIGHT * EACH + own
                end = F if own < EACH and step < ALL else 0
                for j in range(TURNS):
                    k = WIDE * j + CHUNK * cuda.laneid
                    f = step % STEPS * WIDTH + k
                    load_or_zeros(words, a, (n * K + step // STEPS) * F, f, end)
                    store_words8_shared(a_s, place(slot * WIDTH + k), words)
            cuda.syncthreads()  # a is in shared memory
            for s in range(IN_FLIGHT):
                at = (part * IN_FLIGHT + s) * WIDTH + EACH_LANE * cuda.laneid
                total = float32(0.0) if CODES else acc
                for q in range(ACCESS_PARTS):
                    load_x(a_words, a_s, at, q)
                    total = add_part(total, a_words, w_words[s], q, matrices, a)
                acc = acc + total * scales[s] if CODES else total
        acc = warp_sum(acc)
        if cuda.laneid == 0:
            partial[warp] = acc
        cuda.syncthreads()  # the sums of all warps are written
        if cuda.laneid == 0 and part == 0:
            for p in range(1, PARTS):
                acc += partial[warp + p]
            store1(y, n * C + c, acc)

    declare_cost(
        expert_down_kernel,
        nbytes=lambda y, a, w, scale, groups, experts_P: access.nbytes(
            C * experts_P.size, F, w.itemsize
        ),
        flops=lambda y, a, w, scale, groups, experts_P: 2.0 * F * C * experts_P.size,
    )
    return expert_down_kernel


# ----------------------------------------------------------------------------- launchers
def _most_rows(kind: str) -> int:
    return MOST_ROWS_QUANTIZED if kind else MOST_ROWS


def _unit(kind: str) -> int:
    """Return the number of which C and F must be multiples."""
    return 16 if kind and kind not in FOUR_BITS else CHUNK


def expert_gemv_fits(x_NC: Array, down_RF: Array | Quantized) -> bool:
    """Return True if expert_gemv supports these rows and matrices (down: of any experts) on a GPU."""
    N, C = x_NC.shape
    kind = kind_of(down_RF)
    aligned = C % _unit(kind) == 0 and down_RF.shape[-1] % _unit(kind) == 0
    few = 0 < N <= _most_rows(kind) and C <= MOST_COLUMNS
    stored = down_RF.codes_OK if isinstance(down_RF, Quantized) else down_RF
    return few and aligned and on_16_bytes(x_NC, stored)


def expert_gemv_pays(rows: int, K: int, E: int, elements: int, kind: str = "") -> bool:
    """Return True if so many rows take less time here than as grouped products.

    Here each pair reads its expert, there each expert that some row has chosen is read once: as many
    as are expected if all choices are equally likely. elements: of an expert's matrices.
    """
    pairs = rows * K
    chosen = E * (1 - (1 - K / E) ** rows)  # the K experts of a row are different
    around = AROUND_QUANTIZED if kind else AROUND
    return PAIR[kind] * pairs <= chosen + around / elements


def expert_gemv(
    x_NC: Array,
    weights_NK: Array,
    experts_NK: Array,
    gate_up_EGC: Array | Quantized,
    down_ECF: Array | Quantized,
    weights_ready: bool = False,
) -> Array:
    """Return y (N, C) in the dtype of x, gate_up (E, 2F, C) and down (E, C, F): float32 or bf16.

    gate_up, down: or codes of one kind, (E 2F, C) and (E C, F).
    experts: (N, K) int32, in [0, E), which is not checked on a GPU. weights: (N, K) float32. On a
    GPU N is 1 to 8, with codes to 64, and C (at most 8192) and F are multiples of 8, with codes of
    one byte of 16. Raises ValueError otherwise.
    weights_ready: no kernel that may still run writes down.
    """
    op = "expert_gemv"
    check_array(op, "x", x_NC, (None, None), FLOATS)
    N, C = x_NC.shape
    E, gate_up_arrays, down_arrays = _check_matrices(op, gate_up_EGC, down_ECF, C, x_NC.dtype)
    check_array(op, "experts", experts_NK, (N, None), ("int32",))
    check_array(op, "weights", weights_NK, experts_NK.shape)
    if on_host(x_NC, weights_NK, experts_NK, *gate_up_arrays, *down_arrays):
        matrices = (wide(dense(w, np.float32)) for w in (gate_up_EGC, down_ECF))
        of_experts = (w.reshape(E, -1, w.shape[-1]) for w in matrices)
        y_NC = expert_gemv_ref(wide(x_NC), weights_NK, experts_NK, *of_experts)
        return y_NC.astype(x_NC.dtype, copy=False)
    kind = kind_of(down_ECF)
    F = down_ECF.shape[-1]
    check(
        expert_gemv_fits(x_NC, down_ECF) and on_16_bytes(gate_up_arrays[0]),
        f"{op}: {N} rows of {C} with {F}, supported are 1 to {_most_rows(kind)}, of multiples of "
        f"{_unit(kind)}, C to {MOST_COLUMNS}",
    )
    K = experts_NK.shape[1]
    a_PF = empty(x_NC, (N * K, F))
    y_NC = empty(x_NC, (N, C))
    overlap = can_overlap(x_NC)
    half = dtype_name(x_NC.dtype) == "bfloat16"
    a, y = a_PF.reshape(-1), y_NC.reshape(-1)
    experts_P, weights_P = experts_NK.reshape(-1), weights_NK.reshape(-1)
    unused = weights_P, experts_P  # in place of scales and groups
    flat = lambda arrays: [*(array.reshape(-1) for array in arrays), *unused][:3]
    up_kernel = make_gate_up_kernel(C, F, K, half, overlap, kind)
    of_up = a, x_NC.reshape(-1), *flat(gate_up_arrays), experts_P, weights_P
    launch(up_kernel, (F // WARPS, N * K), BLOCK, *of_up, overlap=overlap)
    down_kernel = make_down_kernel(C, F, K, half, overlap, weights_ready, kind)
    warps = C * steps_of(access_of(kind, half), F, K, half).warps
    of_down = y, a, *flat(down_arrays), experts_P
    launch(down_kernel, (warps // WARPS, N), BLOCK, *of_down, overlap=overlap)
    return y_NC


def _check_matrices(op, gate_up, down, C, dtype):
    """Check the matrices of all experts. Return E, the arrays of gate_up and those of down."""
    kinds = kind_of(gate_up), kind_of(down)
    check(kinds[0] == kinds[1], f"{op}: gate_up of kind {kinds[0]!r}, down of {kinds[1]!r}")
    F = down.shape[-1]
    if not kinds[0]:
        check_array(op, "down", down, (None, C, None), (dtype_name(dtype),))
        E = down.shape[0]
        check_array(op, "gate_up", gate_up, (E, 2 * F, C), (dtype_name(dtype),))
        return E, (gate_up,), (down,)
    check_quantized(op, gate_up, C)
    check_quantized(op, down)
    E = down.shape[0] // C
    rows = gate_up.shape[0], down.shape[0]
    expected = E * 2 * F, E * C
    check(
        rows == expected, f"{op}: gate_up and down have {rows} rows of codes, expected {expected}"
    )
    for w in (gate_up, down):
        same = dtype_name(w.dtype) == dtype_name(dtype)
        check(same, f"{op}: codes of {w.dtype}, x is {dtype}")
    return E, gate_up.arrays, down.arrays
