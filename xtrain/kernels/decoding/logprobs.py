"""Log-probabilities of tokens: of given ones, and of the most likely ones.

    logits: (B, V)   tokens: (B,)   results: float32

    m = max_v x_v     w_v = floor(2^44 exp(x_v - m) + 1/2)     rest = 2^-44 (sum_v w_v - 2^44)
    logprob_t = (x_t - m) - log1p(rest)

of the model's own logits, before temperature, bias and penalties, as in OpenAI's interface. The
largest token's weight is 2^44, so `rest` is the sum over the others; a sum of floats that includes
its 1 would lose the digits of a logprob near 0.

The sum of integers is exact: it has no order. A row's bits depend on its logits alone, not on the
number of rows nor on how blocks share them. All float operations are float32: x - m, exp, times
2^44 (exact), + 1/2, the conversion of the sum (rounded once), log1p, the last subtraction. Error
against float64: at most 2 units in the last place, plus V 2^-45 if the most likely token has all
but a millionth of the probability.

The most likely tokens are found as in sampling_search.py: first the largest logit, then sum and
histogram in one launch, and only if alternatives are wanted a third launch that gathers the bins of
the first `top` and a fourth that sorts them. Bytes moved: 2 B V logits, with alternatives 3.
"""

import functools
import math

import numpy as np

from ...device import Array
from ..primitives.last_block import arrive_last, zero_counters
from ..primitives.ptx import device, kernel, let_next_start, load1, wait_for_previous
from ..runtime.compiler import cuda, float32, int32, int64, uint32
from ..runtime.launch import FLOATS, can_overlap, check, check_array, empty, launch, on_host, wide
from .sampling_search import (
    KEY,
    LAST_KEY,
    Candidates,
    GatherShared,
    Row,
    Shared,
    Sizes,
    add_weight,
    is_finite,
    logit_of,
    make_search,
    make_top_kernel,
    sort_keys,
    token_of,
)

SIZES = Sizes()
MAX_TOP = 20  # alternatives per row, as OpenAI's limit
MAX_VOCAB = 1 << 19  # the sum of all weights is less than 2^63
ONE = 1 << 44  # the weight of the most likely token
DISTANCE = 128  # factors of e that the bins span; tokens beyond are in the last one
NAN = float32(math.nan)


# ----------------------------------------------------------------------------- reference
def token_logprobs_ref(logits_BV, tokens_B, top):
    """token_logprobs in NumPy, with the same roundings; in float64 if the logits are"""
    x_BV = wide(logits_BV)
    real = x_BV.dtype.type
    B, V = x_BV.shape
    rows_B = np.arange(len(x_BV))
    m_B = x_BV.max(1)
    fine_B = np.isfinite(m_B)
    with np.errstate(invalid="ignore"):
        w_BV = np.exp(x_BV - m_B[:, None]) * real(ONE) + real(0.5)
    sum_B = np.where(fine_B[:, None], w_BV, 0).astype(np.int64).sum(1)
    log_total_B = np.log1p((np.maximum(sum_B - ONE, 0)).astype(real) * real(1 / ONE))
    order_BV = np.zeros((B, 0), np.int64)
    if top:  # of equal ones the lower id first
        order_BV = np.argsort(-x_BV, axis=1, kind="stable")[:, :top]
    top_BT = np.full((B, top), -1, np.int32)
    top_BT[fine_B, :V] = order_BV[fine_B]

    def logprobs(ids_B):
        valid_B = fine_B & (ids_B >= 0) & (ids_B < V)
        with np.errstate(invalid="ignore"):
            out_B = (x_BV[rows_B, np.where(valid_B, ids_B, 0)] - m_B) - log_total_B
        return np.where(valid_B, out_B, real(np.nan))

    values_BT = np.empty((B, top), real)
    for i in range(top):
        values_BT[:, i] = logprobs(top_BT[:, i])
    return logprobs(tokens_B), top_BT, values_BT


# ----------------------------------------------------------------------------- kernels
@device
def weight_of(logit, top, inverse, least):
    """Return floor(2^44 exp(logit - top) + 1/2). inverse and least: those of sampling, 1 and 0
    here."""
    return int64(math.exp(logit - top) * float32(ONE) + float32(0.5))


@functools.cache
def make_score_kernel(sizes: Sizes, overlap: bool):
    """Return the kernel of the second launch. overlap: it may start before the previous one has
    ended."""
    THREADS = sizes.threads
    BATCH = sizes.batch
    K = sizes.keys
    ops = make_search(sizes, DISTANCE, weight_of)
    EACH = ops.EACH
    load_batch = ops.load_batch
    bin_of = ops.bin_of
    clear_bins = ops.clear_bins
    add_bins = ops.add_bins
    load_bins = ops.load_bins
    total_of = ops.total_of
    find = ops.find

    @kernel(THREADS, sizes.blocks)
    def score_kernel(
        logprobs_B,
        log_total_B,
        last_bin_B,
        sums,
        bins,
        counters,
        logits,
        tokens_B,
        top_B,
        n,
        length,
        V,
        columns,
    ):
        """Grid (blocks per row, B), block THREADS. sums: flat (B gridDim.x). n: alternatives.

        log_total_B: log1p(rest), last_bin_B: the bin of the last alternative; for the launches that
        follow.
        """
        bins_s = cuda.shared.array((2, K), uint32)
        x = cuda.local.array(BATCH, float32)
        scratch = cuda.shared.array(32, int64)
        place_s = cuda.shared.array(3, int64)
        last_s = cuda.shared.array(1, int32)
        values = cuda.local.array(EACH, int64)
        tid = cuda.threadIdx.x
        row = int64(cuda.blockIdx.y)
        s = int64(cuda.blockIdx.x)
        clear_bins(bins_s)
        if overlap:
            wait_for_previous()
            let_next_start()
        need = min(int64(n), V)
        top = logit_of(top_B[row])
        if not is_finite(top):
            if s == 0 and tid == 0:
                logprobs_B[row] = NAN
            return
        cuda.syncthreads()
        for j in range(EACH):
            values[j] = int64(0)
        start, first = s * length, row * columns
        end = min(start + length, V)
        for token in range(start + tid, end, BATCH * THREADS):
            load_batch(x, logits, first, token, end)
            for j in range(BATCH):
                values[0] += weight_of(x[j], top, float32(1.0), int64(0))
                if need > 0 and token + j * THREADS < end:
                    add_weight(bins_s, bin_of(x[j], top, float32(1.0)), int64(1))
        total = total_of(values, scratch)  # has barriers, so bins_s is complete
        if tid == 0:
            sums[row * cuda.gridDim.x + s] = total
        if need > 0:
            add_bins(bins, row * K, bins_s)
        if arrive_last(counters, row, cuda.gridDim.x, last_s):
            values[0] = int64(0)
            for i in range(tid, cuda.gridDim.x, THREADS):
                values[0] += sums[row * cuda.gridDim.x + i]
            total = total_of(values, scratch)
            if tid == 0:
                log_total = math.log1p(float32(total - ONE) * float32(1.0 / ONE))
                token = int64(tokens_B[row])
                logprob = NAN
                if token >= 0 and token < V:
                    logprob = (load1(logits, first + token) - top) - log_total
                logprobs_B[row], log_total_B[row] = logprob, log_total
            if need > 0:
                load_bins(values, bins, row * K)
                bin, _, _ = find(values, need - 1, scratch, place_s)
                if tid == 0:
                    last_bin_B[row] = bin

    return score_kernel


@functools.cache
def make_gather_kernel(sizes: Sizes, overlap: bool):
    """Return the kernel of the third launch. overlap: see make_score_kernel"""
    THREADS = sizes.threads
    K = sizes.keys
    gather = make_search(sizes, DISTANCE, weight_of).gather

    @kernel(THREADS, sizes.blocks)
    def top_gather_kernel(candidates, counts_B, logits, last_bin_B, top_B, length, V, columns):
        """Grid (blocks per row, B), block THREADS. candidates: flat (B ROOM) int64; counts_B: zeros
        before."""
        keys_s = cuda.shared.array(K, int64)
        count_s = cuda.shared.array(1, int32)
        base_s = cuda.shared.array(1, int32)
        row = int64(cuda.blockIdx.y)
        start = int64(cuda.blockIdx.x) * length
        if overlap:
            wait_for_previous()
            let_next_start()
        top = logit_of(top_B[row])
        if not is_finite(top):
            return
        of_row = Row(logits, row * columns, V, top, float32(1.0), int64(0))
        shared = GatherShared(keys_s, count_s, base_s)
        end = min(start + length, V)
        last = last_bin_B[row]
        gather(shared, candidates, counts_B, row, of_row, start, end, int64(0), last, int64(-1))

    return top_gather_kernel


@functools.cache
def make_list_kernel(sizes: Sizes, overlap: bool):
    """Return the kernel of the fourth launch, of sizes.sorters threads. overlap: see
    make_score_kernel"""
    K = sizes.keys
    ops = make_search(sizes.for_sorting(), DISTANCE, weight_of)
    collect = ops.collect
    narrow = ops.narrow
    THREADS = sizes.sorters

    @kernel(sizes.sorters)
    def top_list_kernel(
        ids_BT, values_BT, candidates, counts_B, logits, last_bin_B, log_total_B, top_B, V, columns
    ):
        """Grid B. Writes every element of ids_BT and values_BT; -1 and NaN where there is no
        alternative."""
        keys_s = cuda.shared.array(K, int64)
        bins_s = cuda.shared.array((2, K), uint32)
        scratch = cuda.shared.array(32, int64)
        place_s = cuda.shared.array(3, int64)
        count_s = cuda.shared.array(1, int32)
        tid = cuda.threadIdx.x
        row = int64(cuda.blockIdx.x)
        n = ids_BT.shape[1]
        if overlap:
            wait_for_previous()
            let_next_start()
        need = min(int64(n), V)
        top = logit_of(top_B[row])
        if not is_finite(top):
            need = int64(0)
        for i in range(tid, n, THREADS):
            if i >= need:
                ids_BT[row, i] = int32(-1)
                values_BT[row, i] = NAN
        if need <= 0:
            return
        listed = Candidates(candidates, row, int64(counts_B[row]))
        of_row = Row(logits, row * columns, V, top, float32(1.0), int64(0))
        shared = Shared(keys_s, bins_s, count_s, scratch, place_s)
        last = last_bin_B[row]
        low = int64(0)
        if listed.n > K:  # find the last of the first `need` keys
            before = narrow(shared, listed, of_row, int64(0), last, need - 1, True)
            low = keys_s[need - 1 - before]
            cuda.syncthreads()  # the list is read before it is overwritten
        high = int64(LAST_KEY)
        size = collect(shared, listed, of_row, int64(0), int64(K), low, high, int64(KEY), True)
        sort_keys(keys_s, size)
        for i in range(tid, need, THREADS):
            ids_BT[row, i] = token_of(keys_s[i])
            values_BT[row, i] = (logit_of(keys_s[i]) - top) - log_total_B[row]

    return top_list_kernel


# ----------------------------------------------------------------------------- launchers
def token_logprobs(
    logits_BV: Array, tokens_B: Array, top: int = 0, vocab: int | None = None
) -> tuple[Array, Array, Array]:
    """Return log-probability of each row's token (B,), the `top` most likely tokens (B, top), and
    their log-probabilities (B, top).

    logits (B, V): float32 or bf16. tokens (B,): int32 or int64. vocab: number of tokens, by default
    V; further columns are padding. Log-probabilities are float32, the most likely tokens int32, in
    order, of equal ones the lower id first; beyond the vocabulary -1 and NaN. NaN is also the
    result for an id that is no token; a row whose largest logit is NaN or infinite has only NaN and
    -1. Raises ValueError or TypeError if shapes or dtypes do not match or top > 20.
    """
    op = "token_logprobs"
    check_array(op, "logits", logits_BV, (None, None), FLOATS)
    B, V = logits_BV.shape
    vocab = V if vocab is None else vocab
    check(0 < vocab <= V, f"{op}: a vocabulary of {vocab}, the logits have {V} columns")
    check(vocab < MAX_VOCAB, f"{op}: a vocabulary of {vocab}, at most {MAX_VOCAB - 1}")
    check(0 <= top <= MAX_TOP, f"{op}: top {top}, expected 0 to {MAX_TOP}")
    check_array(op, "tokens", tokens_B, (B,), ("int32", "int64"))
    if on_host(logits_BV, tokens_B):
        return token_logprobs_ref(logits_BV[:, :vocab], tokens_B, top)
    check(B < 2**16, f"{op}: {B} rows in one launch, at most 65535")
    new = lambda shape, dtype: empty(logits_BV, shape, dtype)
    logprobs_B, log_total_B, last_bin_B = (new(B, t) for t in (np.float32, np.float32, np.int64))
    ids_BT = new((B, top), np.int32)
    values_BT = new((B, top), np.float32)
    if B == 0:
        return logprobs_B, ids_BT, values_BT
    logits = logits_BV.reshape(-1)
    overlap = can_overlap(logits_BV)
    K = SIZES.keys
    blocks, length = SIZES.split(logits_BV, B, vocab)
    top_B, tops, sums = (new(B * m, np.int64) for m in (1, blocks, blocks))
    bins = new(B * K, np.int64)
    counts_B = new(B, np.int32)
    counters = zero_counters(logits, B, "logprobs")
    sizes = (vocab, V)

    def run(make, grid, threads, *arguments):
        launch(make(SIZES, overlap), grid, threads, *arguments, *sizes, overlap=overlap)

    grid = (blocks, B), SIZES.threads
    run(make_top_kernel, *grid, top_B, bins, counts_B, tops, counters, logits, length)
    run(
        make_score_kernel,
        *grid,
        logprobs_B,
        log_total_B,
        last_bin_B,
        sums,
        bins,
        counters,
        logits,
        tokens_B,
        top_B,
        top,
        length,
    )
    if top:
        candidates = new(B * SIZES.room, np.int64)
        run(make_gather_kernel, *grid, candidates, counts_B, logits, last_bin_B, top_B, length)
        arguments = (
            ids_BT,
            values_BT,
            candidates,
            counts_B,
            logits,
            last_bin_B,
            log_total_B,
            top_B,
        )
        run(make_list_kernel, B, SIZES.sorters, *arguments)
    return logprobs_B, ids_BT, values_BT
