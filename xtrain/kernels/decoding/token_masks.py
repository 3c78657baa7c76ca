"""Masks of allowed tokens, for answers that must have a form: a JSON schema, a grammar.

    logits: (B, V), changed in place      masks: (R, W) of bits, W = ceil(vocab / 32)

    x_v = -inf   unless bit v mod 32 of word v // 32 is 1

The mask is the first change of the model's logits, before bias and penalties (penalties.py) and
before sampling, which gives -inf the weight 0. It is not undone, so log-probabilities are those
among the allowed tokens, as in vLLM; OpenAI does not say.

The host makes the masks (serving/constraints.py), one bit for each token, and copies them to fixed
addresses. A row belongs to a slot of the decode batch; rows of the logits without one end at once.
Bytes moved: V / 8 per row to read, and at most V logits to write.
"""

import functools
import math

import numpy as np

from ...device import Array
from ..primitives.ptx import kernel, let_next_start, store1, wait_for_previous
from ..runtime.compiler import cuda, float32, int32, int64
from ..runtime.launch import FLOATS, can_overlap, check, check_array, launch, on_host

THREADS = 256
TOKENS = 4096  # of a block: 16 stores a thread; a vocabulary of 150,000 has 37 blocks for each row
NOT_ALLOWED = float32(-math.inf)


def mask_words(vocab: int) -> int:
    """Return W, the 32-bit words of the mask of a vocabulary."""
    return -(-vocab // 32)


# ----------------------------------------------------------------------------- reference
def mask_logits_ref(x_BV, masks_BW):
    """-inf where a bit is 0. The masks have a bit for each of the V columns, and more"""
    bits = np.unpackbits(masks_BW.view(np.uint8), axis=1, bitorder="little")
    return np.where(bits[:, : x_BV.shape[1]], x_BV, x_BV.dtype.type(-np.inf))


# ----------------------------------------------------------------------------- kernel
@functools.cache
def make_mask_kernel(overlap: bool):
    """overlap: the kernel may start before the previous one has ended."""

    @kernel(THREADS)
    def mask_logits_kernel(logits, masks_RW, slots_B, vocab, columns):
        """Grid (blocks per row, B), block THREADS. logits: flat (B columns). Block (i, b) owns
        TOKENS columns of row b; neighbouring threads write neighbouring columns."""
        b = int64(cuda.blockIdx.y)
        if overlap:
            wait_for_previous()
            let_next_start()
        r = int64(slots_B[b])
        if r < 0:
            return
        start = cuda.blockIdx.x * TOKENS
        end = min(start + TOKENS, vocab)
        for v in range(start + cuda.threadIdx.x, end, THREADS):
            if (masks_RW[r, v >> 5] >> int32(v & 31)) & 1 == 0:  # a warp reads one word
                store1(logits, b * columns + v, NOT_ALLOWED)

    return mask_logits_kernel


# ----------------------------------------------------------------------------- launcher
def mask_logits(logits_BV: Array, masks_RW: Array, slots_B: Array, vocab: int) -> None:
    """Set the logits of row b to -inf, in place, for tokens that row slots[b] of the masks does not
    allow; a row with slots[b] < 0 is left alone.

    logits (B, V): float32 or bf16; columns from `vocab` on are left alone. masks (R, W): int32, of
    at least `vocab` bits. slots (B,): int32. Raises ValueError or TypeError if shapes or dtypes do
    not match.
    """
    check_array("mask_logits", "logits", logits_BV, (None, None), FLOATS)
    check_array("mask_logits", "masks", masks_RW, (None, None), ("int32",))
    check_array("mask_logits", "slots", slots_B, logits_BV.shape[:1], ("int32",))
    B, V = logits_BV.shape
    check(0 < vocab <= V, f"mask_logits: a vocabulary of {vocab}, the logits have {V} columns")
    W = masks_RW.shape[1]
    words = mask_words(vocab)
    check(words <= W, f"mask_logits: masks of {W} words, expected at least {words}")
    if on_host(logits_BV, masks_RW, slots_B):
        rows = np.flatnonzero(slots_B >= 0)
        logits_BV[rows, :vocab] = mask_logits_ref(logits_BV[rows, :vocab], masks_RW[slots_B[rows]])
        return
    overlap = can_overlap(logits_BV)
    grid = (-(-vocab // TOKENS), B)
    arguments = (logits_BV.reshape(-1), masks_RW, slots_B, vocab, V)
    launch(make_mask_kernel(overlap), grid, THREADS, *arguments, overlap=overlap)
