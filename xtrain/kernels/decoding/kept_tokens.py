"""The distribution that sampling draws from, as logits.   logits: (B, V)   masks: (B, W) of bits

    kept_tokens       bit v mod 32 of word v // 32 is 1 if min-p, top-k and top-p keep token v
    sampled_logits    x_v = x_v / temperature if token v is kept, else -inf

so softmax(x) = p' is the model's p at this temperature, divided by the kept tokens' share of it,
and log_softmax and cross_entropy compute its log-probabilities and its gradient as those of any
other logits:

    log p'_t  = x_t / T - log sum_{v kept} exp(x_v / T)
    d log p'_t / dx_v = ([v == t] - p'_v) / T,   0 for a token that is not kept

The set is a constant of the gradient. Rollouts and training (reinforcement/) call the same two
functions, so the same logits give the same bits.

kept_tokens   finds the last kept token (sampling.last_kept); tokens up to it are kept, and `tokens`,
              which was drawn: with logits that are rounded differently it could be the first one
              beyond. A row without rules keeps all, also those whose weight sampling rounds to 0.
              Reads the logits four times.
sampled_logits   V / 8 bytes and V logits per row to read, V to write.
"""

import functools
import math

import numpy as np

from ...device import Array
from ..primitives.ptx import kernel, let_next_start, load1, store1, wait_for_previous
from ..primitives.reduce import FULL
from ..runtime.compiler import cuda, float32, int32, int64
from ..runtime.cost import declare_cost
from ..runtime.launch import FLOATS, can_overlap, check_array, empty, launch, on_host, wide
from .sampling import last_kept
from .sampling_search import key_of, order_of
from .token_masks import mask_words

THREADS = 256
TOKENS = 4096  # of a block, as in token_masks.py
NOT_KEPT = float32(-math.inf)


# ----------------------------------------------------------------------------- reference
def kept_tokens_ref(logits_BV, last_B, tokens_B, whole_B):
    """Return the masks, (B, W) int32. whole: rows that keep every token"""
    B, V = logits_BV.shape
    v_V = np.arange(V)
    x_BV = logits_BV.astype(np.float32)
    least_B1 = x_BV[np.arange(B), last_B][:, None]
    last_B1 = last_B[:, None]
    kept_BV = (x_BV > least_B1) | ((x_BV == least_B1) & (v_V <= last_B1))
    kept_BV |= (whole_B | (last_B < 0))[:, None] | (v_V == tokens_B[:, None])
    bytes_BW = np.packbits(kept_BV, axis=1, bitorder="little")
    masks_BW = np.zeros((B, mask_words(V)), np.int32)
    masks_BW.view(np.uint8)[:, : bytes_BW.shape[1]] = bytes_BW
    return masks_BW


def sampled_logits_ref(x_BV, temperature_B, masks_BW=None):
    """Return x / temperature, -inf where a bit of the masks is 0. At temperature 0: x"""
    one = np.float32(1)
    inverse_B = np.array([one / t if t > 0 else one for t in temperature_B], np.float32)
    y_BV = (wide(x_BV) * inverse_B[:, None]).astype(x_BV.dtype)
    if masks_BW is None:
        return y_BV
    bits = np.unpackbits(masks_BW.view(np.uint8), axis=1, bitorder="little")
    return np.where(bits[:, : x_BV.shape[1]], y_BV, x_BV.dtype.type(-np.inf))


# ----------------------------------------------------------------------------- kernels
@functools.cache
def make_kept_kernel(overlap: bool):
    """overlap: the kernel may start before the previous one has ended."""

    @kernel(THREADS)
    def kept_tokens_kernel(
        masks_BW,
        logits,
        last_B,
        tokens_B,
        temperature_B,
        top_k_B,
        top_p_B,
        min_p_B,
        vocab,
        columns,
    ):
        """Grid (blocks per row, B), block THREADS. logits: flat (B columns). Block (i, b) owns
        TOKENS tokens of row b; the 32 threads of a warp vote on the bits of a word."""
        b = int64(cuda.blockIdx.y)
        if overlap:
            wait_for_previous()
            let_next_start()
        last = int64(last_B[b])
        token = int64(tokens_B[b])
        cut = top_k_B[b] > 0 or top_p_B[b] < float32(1.0) or min_p_B[b] > float32(0.0)
        whole = last < 0 or (temperature_B[b] > float32(0.0) and not cut)
        least = int64(0)
        if not whole:
            least = key_of(order_of(load1(logits, b * columns + last)), last)
        start = cuda.blockIdx.x * TOKENS
        end = min(start + TOKENS, masks_BW.shape[1] * 32)  # all threads of a warp vote
        for v in range(start + cuda.threadIdx.x, end, THREADS):
            kept = False
            if v < vocab:
                x = load1(logits, b * columns + v)
                kept = whole or v == token or key_of(order_of(x), int64(v)) >= least
            word = cuda.ballot_sync(FULL, kept)
            if v & 31 == 0:
                masks_BW[b, v >> 5] = int32(word)

    return kept_tokens_kernel


@functools.cache
def make_sampled_kernel(masked: bool, overlap: bool):
    """masked: there are masks. overlap: see make_kept_kernel."""

    @kernel(THREADS)
    def sampled_logits_kernel(logits, masks_BW, temperature_B, vocab, columns):
        """Grid (blocks per row, B), block THREADS. Others as in kept_tokens_kernel."""
        b = int64(cuda.blockIdx.y)
        if overlap:
            wait_for_previous()
            let_next_start()
        temperature = temperature_B[b]
        inverse = float32(1.0)
        if temperature > float32(0.0):
            inverse = float32(1.0) / temperature
        start = cuda.blockIdx.x * TOKENS
        end = min(start + TOKENS, vocab)
        for v in range(start + cuda.threadIdx.x, end, THREADS):
            x = load1(logits, b * columns + v) * inverse
            if masked and (masks_BW[b, v >> 5] >> int32(v & 31)) & 1 == 0:
                x = NOT_KEPT
            store1(logits, b * columns + v, x)

    declare_cost(sampled_logits_kernel, in_place=("logits",))
    return sampled_logits_kernel


# ----------------------------------------------------------------------------- launchers
def kept_tokens(
    logits_BV: Array,
    tokens_B: Array,
    temperature_B: Array,
    top_k_B: Array,
    top_p_B: Array,
    min_p_B: Array,
    vocab: int,
) -> Array:
    """Return the masks of the tokens that sampling keeps in each row, (B, W) int32.

    tokens: (B,) int32 or int64, kept too; one that is outside of the vocabulary is ignored.
    Others, and errors, as in sampling.sample.
    """
    check_array("kept_tokens", "tokens", tokens_B, logits_BV.shape[:1], ("int32", "int64"))
    rules = (temperature_B, top_k_B, top_p_B, min_p_B)
    last_B = last_kept(logits_BV, *rules, vocab)
    if on_host(logits_BV, tokens_B, *rules):
        whole_B = (temperature_B > 0) & (top_k_B <= 0) & (top_p_B >= 1) & (min_p_B <= 0)
        return kept_tokens_ref(logits_BV[:, :vocab], last_B, tokens_B, whole_B)
    B, V = logits_BV.shape
    masks_BW = empty(logits_BV, (B, mask_words(vocab)), np.int32)
    overlap = can_overlap(logits_BV)
    grid = (-(-vocab // TOKENS), B)
    arguments = (masks_BW, logits_BV.reshape(-1), last_B, tokens_B, *rules, vocab, V)
    launch(make_kept_kernel(overlap), grid, THREADS, *arguments, overlap=overlap)
    return masks_BW


def sampled_logits(
    logits_BV: Array, temperature_B: Array, masks_BW: Array | None, vocab: int
) -> None:
    """Divide the logits by the temperature, in place; -inf for tokens that the masks do not keep.

    logits (B, V): float32 or bf16; columns from `vocab` on are left alone. temperature (B,):
    float32; 0 divides by 1. masks: those of kept_tokens; None: all tokens are kept. Raises
    ValueError or TypeError if shapes or dtypes do not match.
    """
    op = "sampled_logits"
    check_array(op, "logits", logits_BV, (None, None), FLOATS)
    B, V = logits_BV.shape
    check_array(op, "temperature", temperature_B, (B,), ("float32",))
    if masks_BW is not None:
        check_array(op, "masks", masks_BW, (B, mask_words(vocab)), ("int32",))
    if on_host(logits_BV, temperature_B):
        logits_BV[:, :vocab] = sampled_logits_ref(logits_BV[:, :vocab], temperature_B, masks_BW)
        return
    overlap = can_overlap(logits_BV)
    masked = masks_BW is not None
    if masks_BW is None:
        masks_BW = temperature_B.reshape(1, -1)  # a kernel argument cannot be None
    arguments = (logits_BV.reshape(-1), masks_BW, temperature_B, vocab, V)
    grid = (-(-vocab // TOKENS), B)
    launch(make_sampled_kernel(masked, overlap), grid, THREADS, *arguments, overlap=overlap)
