"""The MLPs of a few rows' experts, in inference: only the chosen experts are read.

    x: (N, C)   experts, weights: (N, K)   gate_up: (E, 2F, C)   down: (E, C, F)   y: (N, C)

    a_nk = w_nk silu(gate_e x_n) (up_e x_n)        y_n = sum over k of down_e a_nk,   e = e_nk

A matrix-vector product takes as long as reading its matrix, so there is nothing to gain from an
order of rows (expert_order.py): each pair reads its expert itself, and experts that several rows
have chosen come from L2. In both kernels a warp computes one number, or in the first gate and up,
from rows of the matrices that it reads 16 bytes at a time, several accesses in flight. The second
adds all K products in one sum. Computed in float32; a is rounded to the dtype of x. A row's bits do
not depend on other rows, but they are not those of grouped_product.py: batch-invariant mode uses
that. Bytes moved: 3 K C F elements for each row, if no two rows share an expert.
"""

import functools

import numpy as np

from ...device import Array
from ..primitives.flat import on_16_bytes
from ..primitives.ptx import device, kernel, let_next_start, store1, wait_for_previous
from ..primitives.reduce import warp_sum
from ..primitives.words import load_words8, unpack8
from ..runtime.compiler import cuda, float32, int64, uint32
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
CHUNK = 8  # elements of a lane
WIDE = 32 * CHUNK  # elements of a warp at a time
IN_FLIGHT = 4  # accesses to each matrix before the first is used
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


@functools.cache
def make_gate_up_kernel(C, F, K, overlap):
    """Return the kernel that computes a.

    overlap: it waits for the previous kernel of the stream itself (runtime/overlap.py).
    """

    @kernel(BLOCK)
    def expert_gate_up_kernel(a, x, w, experts_P, weights_P):
        """Grid (ceil(F / WARPS), P), block BLOCK. a: flat (P F), x: flat (N C), w: flat (E 2F C)."""
        x_words = cuda.local.array((IN_FLIGHT, CHUNK), uint32)
        gate_words = cuda.local.array((IN_FLIGHT, CHUNK), uint32)
        up_words = cuda.local.array((IN_FLIGHT, CHUNK), uint32)
        if overlap:
            wait_for_previous()
            let_next_start()
        f = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        pair = cuda.blockIdx.y
        if f >= F:  # the same for the whole warp
            return
        row = int64(pair // K) * C
        gate_row = (int64(experts_P[pair]) * (2 * F) + f) * C
        up_row = gate_row + int64(F) * C
        gate = float32(0.0)
        up = float32(0.0)
        for first in range(CHUNK * cuda.laneid, C, IN_FLIGHT * WIDE):
            for s in range(IN_FLIGHT):  # unconditional loads, so that all are in flight at once
                c = first + s * WIDE if first + s * WIDE < C else first
                load_words8(x_words[s], x, row + c)
                load_words8(gate_words[s], w, gate_row + c)
                load_words8(up_words[s], w, up_row + c)
            for s in range(IN_FLIGHT):
                if first + s * WIDE < C:
                    gate = add_product(gate, x_words[s], gate_words[s], x, w)
                    up = add_product(up, x_words[s], up_words[s], x, w)
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


@functools.cache
def make_down_kernel(C, F, K, overlap):
    """Return the kernel that computes y. overlap: as in make_gate_up_kernel."""
    STEPS = -(-F // WIDE)  # of one of the K products
    ALL = K * STEPS

    @kernel(BLOCK)
    def expert_down_kernel(y, a, w, experts_P):
        """Grid (ceil(C / WARPS), N), block BLOCK. y: flat (N C), a: flat (N K F), w: flat (E C F)."""
        a_words = cuda.local.array((IN_FLIGHT, CHUNK), uint32)
        w_words = cuda.local.array((IN_FLIGHT, CHUNK), uint32)
        if overlap:
            wait_for_previous()
            let_next_start()
        c = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        n = int64(cuda.blockIdx.y)
        if c >= C:  # the same for the whole warp
            return
        acc = float32(0.0)
        for first in range(0, ALL, IN_FLIGHT):
            for s in range(IN_FLIGHT):  # unconditional loads, so that all are in flight at once
                step = first + s if first + s < ALL else ALL - 1
                pair = n * K + step // STEPS
                f = step % STEPS * WIDE + CHUNK * cuda.laneid
                f = f if f < F else 0
                load_words8(a_words[s], a, pair * F + f)
                load_words8(w_words[s], w, (int64(experts_P[pair]) * C + c) * F + f)
            for s in range(IN_FLIGHT):
                f = (first + s) % STEPS * WIDE + CHUNK * cuda.laneid
                if first + s < ALL and f < F:
                    acc = add_product(acc, a_words[s], w_words[s], a, w)
        acc = warp_sum(acc)
        if cuda.laneid == 0:
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
    return 0 < N <= MOST_ROWS and aligned and on_16_bytes(x_NC, down_RF)


def expert_gemv(
    x_NC: Array, weights_NK: Array, experts_NK: Array, gate_up_EGC: Array, down_ECF: Array
) -> Array:
    """Return y (N, C) in the dtype of x, gate_up (E, 2F, C) and down (E, C, F): float32 or bf16.

    experts: (N, K) int32, in [0, E), which is not checked on a GPU. weights: (N, K) float32. On a
    GPU N is 1 to 8, and C and F are multiples of 8. Raises ValueError otherwise.
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
    check(fits, f"{op}: {N} rows of {C} with {F}, supported are 1 to 8, of multiples of 8")
    K = experts_NK.shape[1]
    a_PF = empty(x_NC, (N * K, F))
    y_NC = empty(x_NC, (N, C))
    overlap = can_overlap(x_NC)
    a, y = a_PF.reshape(-1), y_NC.reshape(-1)
    experts_P, weights_P = experts_NK.reshape(-1), weights_NK.reshape(-1)
    up = make_gate_up_kernel(C, F, K, overlap)
    arrays = a, x_NC.reshape(-1), gate_up_EGC.reshape(-1), experts_P, weights_P
    launch(up, (-(-F // WARPS), N * K), BLOCK, *arrays, overlap=overlap)
    down = make_down_kernel(C, F, K, overlap)
    of_down = y, a, down_ECF.reshape(-1), experts_P
    launch(down, (-(-C // WARPS), N), BLOCK, *of_down, overlap=overlap)
    return y_NC
