"""Entropy of a softmax, without a gradient.   logits: (N, P)   entropy: (N,) float32, in nats

    p_v = exp(x_v - m) / s,   m = max_v x_v,   s = sum_v exp(x_v - m)
    H   = -sum_v p_v log p_v = log s - sum_v exp(x_v - m) (x_v - m) / s

for masks and measurements of reinforcement learning. A logit of -inf is a token that cannot be drawn: its
term is 0. Columns from vocab_size on are padding. Sums in float32, in a fixed order.
Bytes moved: the logits are read twice, 2 N P elements, the second time mostly from L2.
"""

import math

import numpy as np

from ..device import Array
from .primitives.ptx import kernel, load1
from .primitives.reduce import MAX_WARPS, block_max, block_sum
from .runtime.compiler import cuda, float32, int64
from .runtime.launch import FLOATS, check, check_array, empty, launch, on_host, wide
from .softmax import LOWEST

BLOCK = 512  # one block per row: a vocabulary is long, and there are many rows


# ----------------------------------------------------------------------------- reference
def entropy_ref(logits_NP, vocab_size):
    """Return the entropies (N,), in float64 if the logits are."""
    x_NV = wide(logits_NP)[:, :vocab_size]
    x_NV = x_NV - x_NV.max(1, keepdims=True)
    e_NV = np.exp(x_NV)
    s_N = e_NV.sum(1)
    return np.log(s_N) - (e_NV * np.where(e_NV > 0, x_NV, 0)).sum(1) / s_N


# ----------------------------------------------------------------------------- kernel
@kernel(BLOCK)
def entropy_kernel(entropy_N, logits, vocab_size, columns):
    """Grid N, block BLOCK. logits: flat (N columns). Block n owns row n."""
    n = int64(cuda.blockIdx.x)
    tid = cuda.threadIdx.x
    partial = cuda.shared.array(MAX_WARPS, float32)
    first = n * columns
    m = LOWEST
    for v in range(tid, vocab_size, BLOCK):
        x = load1(logits, first + v)
        m = x if x > m else m
    m = block_max(m, partial)
    total = float32(0.0)
    weighted = float32(0.0)
    for v in range(tid, vocab_size, BLOCK):
        x = load1(logits, first + v) - m
        e = math.exp(x)
        total += e
        if e > float32(0.0):  # -inf times 0 would be NaN
            weighted += e * x
    total = block_sum(total, partial)
    weighted = block_sum(weighted, partial)
    if tid == 0:
        entropy_N[n] = math.log(total) - weighted / total


# ----------------------------------------------------------------------------- launcher
def entropy(logits_NP: Array, vocab_size: int) -> Array:
    """Return the entropy of each row's softmax, (N,) float32, in nats.

    logits (N, P): float32 or bf16. Raises ValueError or TypeError for another shape or dtype.
    """
    check_array("entropy", "logits", logits_NP, (None, None), FLOATS)
    N, P = logits_NP.shape
    check(
        0 < vocab_size <= P, f"entropy: a vocabulary of {vocab_size}, the logits have {P} columns"
    )
    if on_host(logits_NP):
        return entropy_ref(logits_NP, vocab_size)
    entropy_N = empty(logits_NP, N, np.float32)
    if N:
        launch(entropy_kernel, N, BLOCK, entropy_N, logits_NP.reshape(-1), vocab_size, P)
    return entropy_N
