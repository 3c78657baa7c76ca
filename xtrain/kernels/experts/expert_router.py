"""The router of a few rows in one kernel, in inference: addition, norm, logits, choice of experts.

    h = x + delta   (N, C), the residual stream                                (residual.py)
    n = rmsnorm(h)  (N, C), in the dtype of the gate                           (rmsnorm.py)
    logits = n gate^T   (N, E), in float32      gate: (E, C)
    experts, weights    (N, K), of the K largest logits                        (routing.py)

These are three kernels in a model (the addition and the norm are one), and each takes 2 to 3 us
although it moves a few KB: in decoding one sequence that is as much as reading its experts. Here a
block computes WARPS logits of a row, a warp one of them. It computes h and n itself, which come
from L2, and the first block of a row writes them. The last block of a row that ends chooses
(primitives/last_block.py). A warp reads its row of the gate before it waits for the previous kernel.

Bytes moved: the gate once for each row, from L2 but for the first. A row's bits do not depend on
other rows; those of a sum are not those of the separate kernels.
"""

import functools

import numpy as np

from ...device import Array
from ..primitives.flat import on_16_bytes
from ..primitives.last_block import arrive_last, zero_counters
from ..primitives.ptx import (
    device,
    kernel,
    let_next_start,
    load4,
    store4,
    store4_shared,
    wait_for_previous,
)
from ..primitives.reduce import MAX_WARPS, block_sum, warp_sum
from ..primitives.words import load_words8, load_words8_shared, unpack8
from ..residual import residual_rmsnorm_ref
from ..rmsnorm import rmsnorm_ref
from ..runtime.compiler import cuda, float32, int32, int64, rsqrtf, uint16, uint32
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
from .expert_gemv import CHUNK, MOST_COLUMNS, MOST_ROWS, WIDE, WORDS
from .expert_order import MOST_EXPERTS
from .routing import MOST_CHOSEN, make_choose, routing_ref

BLOCK = 512
WARPS = BLOCK // 32  # logits of a block
VEC = 4  # columns of a thread at a time


# ----------------------------------------------------------------------------- reference
def expert_router_ref(x_NC, delta_NC, norm_w_C, gate_EC, eps, K, renormalized, bias_E=None):
    """Return h (N, C), n (N, C) in the dtype of the gate, experts (N, K), weights (N, K)."""
    if delta_NC is None:
        h_NC = x_NC
        n_NC, _ = rmsnorm_ref(x_NC, norm_w_C, eps)
    else:
        h_NC, n_NC, _ = residual_rmsnorm_ref(x_NC, wide(delta_NC), norm_w_C, eps)
    n_NC = n_NC.astype(gate_EC.dtype)
    logits_NE = wide(n_NC) @ wide(gate_EC).T
    return h_NC, n_NC, *routing_ref(logits_NE, K, renormalized, bias_E)


# ----------------------------------------------------------------------------- kernel
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
def make_router_kernel(E, C, K, renormalized, biased, added, half, overlap, ready):
    """Return the kernel for a gate of E rows of C columns, which chooses K experts.

    biased: with bias_E. added: delta is added to x first. half: the gate, n and delta are bf16.
    overlap: it waits for the previous kernel of the stream itself (runtime/overlap.py).
    ready: the previous kernel does not write the gate, which is read before that kernel has ended.
    """
    read, choose, STEPS = make_choose(E, K, renormalized, biased)
    KIND = uint16 if half else float32
    ALL = -(-C // WIDE) * WIDE  # columns of n in shared memory, with zeros beyond the last
    WIDE_STEPS = ALL // WIDE
    IN_FLIGHT = min(WIDE_STEPS, WORDS // (4 if half else 8))
    OWN = -(-C // (VEC * BLOCK))  # chunks of a thread
    INVERSE = 1 / C
    BLOCKS = -(-E // WARPS)  # of a row

    @kernel(BLOCK)
    def expert_router_kernel(
        experts_NK, weights_NK, n_row, h, logits, x, delta, norm_w, gate, bias_E, counters, eps
    ):
        """Grid (BLOCKS, N), block BLOCK. n_row, h, x, delta: flat (N C), gate: flat (E C), logits:
        flat (N E).
        """
        n_s = cuda.shared.array(ALL, KIND)
        partial = cuda.shared.array(MAX_WARPS, float32)
        last_s = cuda.shared.array(1, int32)
        h_OV = cuda.local.array((OWN, VEC), float32)
        four = cuda.local.array(VEC, float32)
        words = cuda.local.array(CHUNK, uint32)
        gate_words = cuda.local.array((IN_FLIGHT, CHUNK), uint32)
        p_S = cuda.local.array(STEPS, float32)
        tid = cuda.threadIdx.x
        row = int64(cuda.blockIdx.y)
        e = cuda.blockIdx.x * WARPS + (tid >> 5)
        gate_row = int64(e if e < E else E - 1) * C
        if overlap and not ready:
            wait_for_previous()
        for s in range(IN_FLIGHT):  # unconditional loads, so that all are in flight at once
            c = s * WIDE + CHUNK * cuda.laneid
            load_words8(gate_words[s], gate, gate_row + (c if c < C else 0))
        if overlap and ready:
            wait_for_previous()
        if overlap:
            let_next_start()
        squares = float32(0.0)
        for o in range(OWN):
            c = VEC * (tid + o * BLOCK)
            for j in range(VEC):
                h_OV[o, j] = float32(0.0)
            if c < C:
                load4(h_OV[o], x, row * C + c)
                if added:
                    load4(four, delta, row * C + c)
                    for j in range(VEC):
                        h_OV[o, j] += four[j]
                    if cuda.blockIdx.x == 0:
                        store4(h, row * C + c, h_OV[o])
            for j in range(VEC):
                squares += h_OV[o, j] * h_OV[o, j]
        rstd = rsqrtf(block_sum(squares, partial) * float32(INVERSE) + eps)
        for o in range(OWN):
            c = VEC * (tid + o * BLOCK)
            if c < C:
                load4(four, norm_w, c)
                for j in range(VEC):
                    h_OV[o, j] *= rstd * four[j]
                store4_shared(n_s, c, h_OV[o])
                if cuda.blockIdx.x == 0:
                    store4(n_row, row * C + c, h_OV[o])
        for c in range(C + tid, ALL, BLOCK):
            n_s[c] = KIND(0)
        cuda.syncthreads()  # n is in shared memory
        acc = float32(0.0)
        for first in range(0, WIDE_STEPS, IN_FLIGHT):
            for s in range(IN_FLIGHT):
                c = (first + s) * WIDE + CHUNK * cuda.laneid
                if first > 0:
                    load_words8(gate_words[s], gate, gate_row + (c if c < C else 0))
            for s in range(IN_FLIGHT):
                if first + s < WIDE_STEPS:
                    c = (first + s) * WIDE + CHUNK * cuda.laneid
                    load_words8_shared(words, n_s, c)
                    acc = add_product(acc, words, gate_words[s], gate, gate)
        acc = warp_sum(acc)
        if cuda.laneid == 0 and e < E:
            logits[row * E + e] = acc
        if arrive_last(counters, row, BLOCKS, last_s) and tid < 32:
            read(p_S, logits, row)
            choose(experts_NK, weights_NK, row, p_S, bias_E)

    return expert_router_kernel


# ----------------------------------------------------------------------------- launcher
def expert_router_fits(x_NC: Array, gate_EC: Array, K: int) -> bool:
    """Return True if expert_router supports these rows and this gate on a GPU."""
    N, C = x_NC.shape
    E = gate_EC.shape[0]
    few = 0 < N <= MOST_ROWS and C <= MOST_COLUMNS and C % CHUNK == 0
    chosen = 0 < K <= min(E, MOST_CHOSEN) and E <= MOST_EXPERTS
    return few and chosen and on_16_bytes(x_NC, gate_EC)


def expert_router(
    x_NC: Array,
    delta_NC: Array | None,
    norm_w_C: Array,
    gate_EC: Array,
    eps: float,
    K: int,
    renormalized: bool = False,
    bias_E: Array | None = None,
    weights_ready: bool = False,
) -> tuple[Array, Array, Array, Array]:
    """Return h (N, C) float32, n (N, C), experts (N, K) int32, weights (N, K) float32.

    x (N, C): float32. gate (E, C): float32 or bf16. delta (N, C): in the dtype of the gate; None: h
    is x. norm_w (C,), bias (E,): float32, see routing.py.
    weights_ready: no kernel that may still run writes the gate.
    On a GPU, expert_router_fits says what is supported. Raises ValueError or TypeError if shapes or
    dtypes do not match.
    """
    op = "expert_router"
    check_array(op, "x", x_NC, (None, None))
    N, C = x_NC.shape
    check_array(op, "gate", gate_EC, (None, C), FLOATS)
    E = gate_EC.shape[0]
    check_array(op, "norm_w", norm_w_C, (C,))
    if delta_NC is not None:
        check_array(op, "delta", delta_NC, (N, C), (dtype_name(gate_EC.dtype),))
    if bias_E is not None:
        check_array(op, "bias", bias_E, (E,))
    optional = [a for a in (delta_NC, bias_E) if a is not None]
    options = eps, K, renormalized, bias_E
    if on_host(x_NC, norm_w_C, gate_EC, *optional):
        return expert_router_ref(x_NC, delta_NC, norm_w_C, gate_EC, *options)
    fits = expert_router_fits(x_NC, gate_EC, K) and on_16_bytes(norm_w_C, *optional[:1])
    check(fits, f"{op}: {N} rows of {C} and {K} of {E} experts are not supported")
    added = delta_NC is not None
    biased = bias_E is not None
    h_NC = empty(x_NC, (N, C)) if added else x_NC
    n_NC = empty(x_NC, (N, C), gate_EC.dtype)
    logits_N = empty(x_NC, N * E)
    experts_NK = empty(x_NC, (N, K), np.int32)
    weights_NK = empty(x_NC, (N, K), np.float32)
    half = dtype_name(gate_EC.dtype) == "bfloat16"
    overlap = can_overlap(x_NC)
    router_kernel = make_router_kernel(
        *(E, C, K, bool(renormalized), biased, added, half, overlap, weights_ready)
    )
    blocks = -(-E // WARPS)
    # a kernel argument cannot be None
    delta, bias = (weights_NK if a is None else a for a in (delta_NC, bias_E))
    flat = (a.reshape(-1) for a in (n_NC, h_NC, logits_N, x_NC, delta, norm_w_C, gate_EC, bias))
    counters = zero_counters(x_NC, N, "expert_router")
    arrays = experts_NK, weights_NK, *flat, counters, np.float32(eps)
    launch(router_kernel, (blocks, N), BLOCK, *arrays, overlap=overlap)
    return h_NC, n_NC, experts_NK, weights_NK
