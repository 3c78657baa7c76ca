"""The MLPs of a few rows' experts, in inference: only the chosen experts are read.

    x: (N, C)   experts, weights: (N, K)   gate_up: (E, 2F, C)   down: (E, C, F)   y: (N, C)

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

Computed in float32; a is rounded to the dtype of x. A row's bits do not depend on other rows, but
they are not those of grouped_product.py: batch-invariant mode uses that. Bytes moved: 3 K C F
elements for each row, if no two rows share an expert.
"""

import functools

import numpy as np

from ...device import Array
from ..primitives.flat import on_16_bytes
from ..primitives.ptx import device, kernel, let_next_start, store1, wait_for_previous
from ..primitives.reduce import warp_sum
from ..primitives.tensor_cores import opaque
from ..primitives.words import (
    load_words8,
    load_words8_shared,
    store_words8_shared,
    unpack8,
)
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
MOST_COLUMNS = 8192  # of x: 32 KB of float32 in shared memory
MOST_ROWS = 8  # with more, experts are shared often enough for a grouped product


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
def add_product(acc, x_words, w_words, x, w):
    """Return acc plus the product of 8 elements of x and of w, which are packed in words."""
    a = cuda.local.array(CHUNK, float32)
    b = cuda.local.array(CHUNK, float32)
    unpack8(a, x_words, x)
    unpack8(b, w_words, w)
    for j in range(CHUNK):
        acc += a[j] * b[j]
    return acc


@device
def load_or_zeros(words, x, row, i, n):
    """Set words to x[row + i : row + i + 8], or to zeros if i is not less than n."""
    if i < n:
        load_words8(words, x, row + i)
    else:
        for j in range(CHUNK):
            words[j] = uint32(0)


def in_flight(half: bool, matrices: int) -> int:
    """Return how many accesses to each of so many matrices a lane begins before the first is used.

    half: of bf16, of which 8 elements are 4 words.
    """
    return WORDS // (matrices * (4 if half else 8))


@functools.cache
def make_gate_up_kernel(C, F, K, half, overlap):
    """Return the kernel that computes a.

    half: x and w are bf16.
    overlap: it waits for the previous kernel of the stream itself (runtime/overlap.py).
    """
    IN_FLIGHT = in_flight(half, 2)
    KIND = uint16 if half else float32
    ALL = -(-C // (IN_FLIGHT * WIDE)) * (IN_FLIGHT * WIDE)

    @kernel(BLOCK, RESIDENT)
    def expert_gate_up_kernel(a, x, w, experts_P, weights_P):
        """Grid (F / WARPS, P), block BLOCK. a: flat (P F), x: flat (N C), w: flat (E 2F C)."""
        x_s = cuda.shared.array(ALL, KIND)
        words = cuda.local.array(CHUNK, uint32)
        gate_words = cuda.local.array((IN_FLIGHT, CHUNK), uint32)
        up_words = cuda.local.array((IN_FLIGHT, CHUNK), uint32)
        if overlap:
            wait_for_previous()
            let_next_start()
        f = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        pair = cuda.blockIdx.y
        gate_row = (int64(experts_P[pair]) * (2 * F) + f) * C
        up_row = gate_row + int64(F) * C
        gate = float32(0.0)
        up = float32(0.0)
        for first in range(0, C, IN_FLIGHT * WIDE):
            for s in range(IN_FLIGHT):  # unconditional loads, so that all are in flight at once
                c = first + s * WIDE + CHUNK * cuda.laneid
                c = c if c < C else 0
                load_words8(gate_words[s], w, gate_row + c)
                load_words8(up_words[s], w, up_row + c)
            if first == 0:
                for c in range(CHUNK * cuda.threadIdx.x, opaque(ALL), CHUNK * BLOCK):
                    load_or_zeros(words, x, int64(pair // K) * C, c, C)
                    store_words8_shared(x_s, c, words)
                cuda.syncthreads()  # x is in shared memory
            for s in range(IN_FLIGHT):
                load_words8_shared(words, x_s, first + s * WIDE + CHUNK * cuda.laneid)
                gate = add_product(gate, words, gate_words[s], x, w)
                up = add_product(up, words, up_words[s], x, w)
        gate = warp_sum(gate)
        up = warp_sum(up)
        if cuda.laneid == 0:
            value = gate * sigmoid(gate) * up * weights_P[pair]
            store1(a, int64(pair) * F + f, value)

    declare_cost(
        expert_gate_up_kernel,
        nbytes=lambda a, x, w, experts_P, _: 2 * F * C * experts_P.size * w.itemsize,
        flops=lambda a, x, w, experts_P, _: 4.0 * F * C * experts_P.size,
    )
    return expert_gate_up_kernel


def warps_of_a_sum(steps: int, half: bool) -> int:
    """Return the number of warps that share the steps of a number of y: a power of 2."""
    warps = 1
    while warps < WARPS and steps > warps * in_flight(half, 1):
        warps *= 2
    return warps


@functools.cache
def make_down_kernel(C, F, K, half, overlap, ready):
    """Return the kernel that computes y.

    half, overlap: as in make_gate_up_kernel.
    ready: the previous kernel writes neither w nor experts, so they are read before it has ended.
    """
    STEPS = -(-F // WIDE)  # of one of the K products
    ALL = K * STEPS
    PARTS = warps_of_a_sum(ALL, half)
    EACH = -(-ALL // PARTS)
    IN_FLIGHT = min(EACH, in_flight(half, 1))
    COLUMNS = WARPS // PARTS  # of y, of a block
    STAGED = PARTS * IN_FLIGHT * WIDE  # elements of a in shared memory
    KIND = uint16 if half else float32

    @device
    def load_steps(w_words, w, experts_P, n, c, first):
        """Begin to read the steps first, first + 1, ... of row c."""
        for s in range(IN_FLIGHT):  # unconditional loads, so that all are in flight at once
            step = first + s if first + s < ALL else ALL - 1
            f = step % STEPS * WIDE + CHUNK * cuda.laneid
            f = f if f < F else 0
            expert = int64(experts_P[n * K + step // STEPS])
            load_words8(w_words[s], w, (expert * C + c) * F + f)

    @kernel(BLOCK, RESIDENT)
    def expert_down_kernel(y, a, w, experts_P):
        """Grid (C PARTS / WARPS, N), block BLOCK. y: flat (N C), a: flat (N K F), w: flat (E C F).

        PARTS neighbouring warps compute a number of y.
        """
        a_s = cuda.shared.array(STAGED, KIND)
        partial = cuda.shared.array(WARPS, float32)
        words = cuda.local.array(CHUNK, uint32)
        w_words = cuda.local.array((IN_FLIGHT, CHUNK), uint32)
        warp = cuda.threadIdx.x >> 5
        c = cuda.blockIdx.x * COLUMNS + warp // PARTS
        n = int64(cuda.blockIdx.y)
        part = warp % PARTS
        if overlap and not ready:
            wait_for_previous()
        load_steps(w_words, w, experts_P, n, c, part * EACH)
        if overlap and ready:
            wait_for_previous()
        if overlap:
            let_next_start()
        acc = float32(0.0)
        for i in range(0, EACH, IN_FLIGHT):
            if i > 0:
                load_steps(w_words, w, experts_P, n, c, part * EACH + i)
                cuda.syncthreads()  # a of the steps before has been read
            for slot in range(warp, opaque(PARTS * IN_FLIGHT), WARPS):
                own = i + slot % IN_FLIGHT  # of the EACH steps of a part
                step = slot // IN_FLIGHT * EACH + own
                f = step % STEPS * WIDE + CHUNK * cuda.laneid
                end = F if own < EACH and step < ALL else 0
                load_or_zeros(words, a, (n * K + step // STEPS) * F, f, end)
                store_words8_shared(a_s, slot * WIDE + CHUNK * cuda.laneid, words)
            cuda.syncthreads()  # a is in shared memory
            for s in range(IN_FLIGHT):
                at = (part * IN_FLIGHT + s) * WIDE + CHUNK * cuda.laneid
                load_words8_shared(words, a_s, at)
                acc = add_product(acc, words, w_words[s], a, w)
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
        nbytes=lambda y, a, w, experts_P: F * C * experts_P.size * w.itemsize,
        flops=lambda y, a, w, experts_P: 2.0 * F * C * experts_P.size,
    )
    return expert_down_kernel


# ----------------------------------------------------------------------------- launchers
def expert_gemv_fits(x_NC: Array, down_RF: Array) -> bool:
    """Return True if expert_gemv supports these rows and matrices (down: of any experts) on a GPU."""
    N, C = x_NC.shape
    aligned = C % CHUNK == 0 and down_RF.shape[-1] % CHUNK == 0
    return 0 < N <= MOST_ROWS and C <= MOST_COLUMNS and aligned and on_16_bytes(x_NC, down_RF)


def expert_gemv(
    x_NC: Array,
    weights_NK: Array,
    experts_NK: Array,
    gate_up_EGC: Array,
    down_ECF: Array,
    weights_ready: bool = False,
) -> Array:
    """Return y (N, C) in the dtype of x, gate_up (E, 2F, C) and down (E, C, F): float32 or bf16.

    experts: (N, K) int32, in [0, E), which is not checked on a GPU. weights: (N, K) float32. On a
    GPU N is 1 to 8, and C (at most 8192) and F are multiples of 8. Raises ValueError otherwise.
    weights_ready: no kernel that may still run writes down.
    """
    op = "expert_gemv"
    check_array(op, "x", x_NC, (None, None), FLOATS)
    N, C = x_NC.shape
    kinds = (dtype_name(x_NC.dtype),)
    check_array(op, "down", down_ECF, (None, C, None), kinds)
    E, _, F = down_ECF.shape
    check_array(op, "gate_up", gate_up_EGC, (E, 2 * F, C), kinds)
    check_array(op, "experts", experts_NK, (N, None), ("int32",))
    check_array(op, "weights", weights_NK, experts_NK.shape)
    if on_host(x_NC, weights_NK, experts_NK, gate_up_EGC, down_ECF):
        arrays = wide(x_NC), weights_NK, experts_NK, wide(gate_up_EGC), wide(down_ECF)
        return expert_gemv_ref(*arrays).astype(x_NC.dtype, copy=False)
    fits = expert_gemv_fits(x_NC, down_ECF) and on_16_bytes(gate_up_EGC)
    check(
        fits, f"{op}: {N} rows of {C} with {F}, supported are 1 to 8, of multiples of 8, C to 8192"
    )
    K = experts_NK.shape[1]
    a_PF = empty(x_NC, (N * K, F))
    y_NC = empty(x_NC, (N, C))
    overlap = can_overlap(x_NC)
    half = dtype_name(x_NC.dtype) == "bfloat16"
    a, y = a_PF.reshape(-1), y_NC.reshape(-1)
    experts_P, weights_P = experts_NK.reshape(-1), weights_NK.reshape(-1)
    up = make_gate_up_kernel(C, F, K, half, overlap)
    arrays = a, x_NC.reshape(-1), gate_up_EGC.reshape(-1), experts_P, weights_P
    launch(up, (F // WARPS, N * K), BLOCK, *arrays, overlap=overlap)
    down = make_down_kernel(C, F, K, half, overlap, weights_ready)
    of_down = y, a, down_ECF.reshape(-1), experts_P
    warps = C * warps_of_a_sum(K * -(-F // WIDE), half)
    launch(down, (warps // WARPS, N), BLOCK, *of_down, overlap=overlap)
    return y_NC
