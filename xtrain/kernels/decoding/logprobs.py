"""Log-probabilities of tokens: of given ones, and of the most likely ones.   logits: (N, V)   targets: (N,)   results: float32

    m = max_v x_v     w_v = floor(2^44 exp(x_v - m) + 1/2)     rest = 2^-44 (sum_v w_v - 2^44)
    logprob_t = (x_t - m) - log1p(rest)

of the model's own logits, before temperature, bias and penalties, as OpenAI's and vLLM's. The largest token's weight is 2^44, so
`rest` is the sum over the others; a sum of floats that includes its 1 would lose the digits of a logprob near 0.

The sum of integers is exact: there is no order of summation. A row's bits depend on its logits alone, not on the number of rows
nor on how blocks share them, and every kernel that computes w with the same exp gets them too: m and the integer sum may come
from any division of the row. All float operations are float32: x - m, exp, times 2^44 (exact), + 1/2, the conversion of the sum
(rounded once), log1p, the last subtraction. Error against float64: at most 2 units in the last place, plus V 2^-45 if the most
likely token has all but a millionth of the probability.

The most likely tokens are found as in sampling_search.py: first the largest logit, then sum and histogram in one launch, and
only if alternatives are wanted a third launch that gathers the bins of the first n and a fourth that sorts them.
Bytes moved: 2 N V logits, with alternatives 3.
"""

import functools
import math

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ...device import Array
from ..primitives.last_block import arrive_last, zero_counters
from ..primitives.ptx import device, kernel, let_next_start, load1, wait_for_previous
from ..runtime.launch import FLOATS, can_overlap, check, check_array, empty, launch, on_host, wide
from .sampling_search import (
    KEY,
    LAST_KEY,
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
def logprobs_ref(logits_NV, targets_N):
    """-> logprob of each target (N,), float32. NaN for a target that is no token, or if the largest logit is not finite."""
    x_NV, N = wide(logits_NV).astype(np.float32), len(targets_N)
    m_N = x_NV.max(1)
    with np.errstate(invalid="ignore"):
        w_NV = np.exp(x_NV - m_N[:, None]) * np.float32(ONE) + np.float32(0.5)
    fine_N = np.isfinite(m_N)
    sum_N = np.where(fine_N[:, None], w_NV, 0).astype(np.int64).sum(1)
    rest_N = (sum_N - ONE).astype(np.float32) * np.float32(1 / ONE)
    valid_N = fine_N & (targets_N >= 0) & (targets_N < x_NV.shape[1])
    x_N = x_NV[np.arange(N), np.where(valid_N, targets_N, 0)]
    out_N = np.full(N, np.nan, np.float32)
    out_N[valid_N] = ((x_N - m_N)[valid_N]) - np.log1p(rest_N[valid_N])
    return out_N


def top_ids_ref(logits_NV, n):
    """-> ids of the n most likely tokens (N, n), of equal ones the lower id first; -1 beyond the vocabulary"""
    order_NV = np.argsort(-wide(logits_NV).astype(np.float32), axis=1, kind="stable")[:, :n]
    return np.pad(order_NV, [(0, 0), (0, n - order_NV.shape[1])], constant_values=-1)


# ----------------------------------------------------------------------------- kernels
@device
def weight_of(logit, top, inverse, least):
    """-> floor(2^44 exp(logit - top) + 1/2). inverse and least: those of sampling, 1 and 0 here."""
    return int64(math.exp(logit - top) * float32(ONE) + float32(0.5))


@functools.cache
def make_score_kernel(sizes: Sizes, some: bool, overlap: bool):
    """-> the kernel of the second launch. some: see make_top_kernel. overlap: it may start before the previous one has ended."""
    THREADS, BATCH, K = sizes.threads, sizes.batch, sizes.keys
    ops = make_search(sizes, DISTANCE, weight_of)
    EACH, load_batch, bin_of, clear_bins = ops.EACH, ops.load_batch, ops.bin_of, ops.clear_bins
    add_bins, load_bins, total_of, find = ops.add_bins, ops.load_bins, ops.total_of, ops.find

    @kernel(THREADS, sizes.blocks)
    def score_kernel(
        logprobs_N, log_total_N, last_bin_N, sums, bins, counters, logits, targets_N, top_N, wanted_N, n, length, V, columns
    ):  # fmt: skip
        """Grid (blocks per row, N), block THREADS. sums: flat (N gridDim.x). n: alternatives, at most wanted_N if `some`.

        log_total_N: log1p(rest), last_bin_N: the bin of the last alternative; for the launches that follow.
        """
        bins_s, x = cuda.shared.array((2, K), uint32), cuda.local.array(BATCH, float32)
        scratch, found = cuda.shared.array(32, int64), cuda.shared.array(3, int64)
        values = cuda.local.array(EACH, int64)
        tid, row, s = cuda.threadIdx.x, int64(cuda.blockIdx.y), int64(cuda.blockIdx.x)
        clear_bins(bins_s)
        if overlap:
            wait_for_previous()
            let_next_start()
        need = min(int64(n), V)
        if some:
            need = min(need, int64(wanted_N[row]))
        top = NAN
        if need >= 0:
            top = logit_of(top_N[row])
        if not is_finite(top):
            if s == 0 and tid == 0:
                logprobs_N[row] = NAN
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
        if arrive_last(counters, row, cuda.gridDim.x):
            values[0] = int64(0)
            for i in range(tid, cuda.gridDim.x, THREADS):
                values[0] += sums[row * cuda.gridDim.x + i]
            total = total_of(values, scratch)
            if tid == 0:
                log_total = math.log1p(float32(total - ONE) * float32(1.0 / ONE))
                target, logprob = int64(targets_N[row]), NAN
                if target >= 0 and target < V:
                    logprob = (load1(logits, first + target) - top) - log_total
                logprobs_N[row], log_total_N[row] = logprob, log_total
            if need > 0:
                load_bins(values, bins, row * K)
                bin, _, _ = find(values, need - 1, scratch, found)
                if tid == 0:
                    last_bin_N[row] = bin

    return score_kernel


@functools.cache
def make_gather_kernel(sizes: Sizes, some: bool, overlap: bool):
    """-> the kernel of the third launch. some, overlap: see make_score_kernel"""
    THREADS, K, gather = sizes.threads, sizes.keys, make_search(sizes, DISTANCE, weight_of).gather

    @kernel(THREADS, sizes.blocks)
    def top_gather_kernel(
        candidates, counts_N, logits, last_bin_N, top_N, wanted_N, length, V, columns
    ):
        """Grid (blocks per row, N), block THREADS. candidates: flat (N ROOM) int64; counts_N: zeros before."""
        keys_s, count_s = cuda.shared.array(K, int64), cuda.shared.array(1, int32)
        base_s = cuda.shared.array(1, int32)
        row, start = int64(cuda.blockIdx.y), int64(cuda.blockIdx.x) * length
        if overlap:
            wait_for_previous()
            let_next_start()
        if some and wanted_N[row] <= 0:
            return
        top = logit_of(top_N[row])
        if not is_finite(top):
            return
        gather(
            keys_s, count_s, base_s, candidates, counts_N, row, logits, row * columns, start, min(start + length, V), top,
            float32(1.0), int64(0), last_bin_N[row], int64(-1),
        )  # fmt: skip

    return top_gather_kernel


@functools.cache
def make_list_kernel(sizes: Sizes, some: bool, overlap: bool):
    """-> the kernel of the fourth launch, of sizes.sorters threads. some, overlap: see make_score_kernel"""
    K, ops = sizes.keys, make_search(sizes.for_sorting(), DISTANCE, weight_of)
    collect, narrow, THREADS = ops.collect, ops.narrow, sizes.sorters

    @kernel(sizes.sorters)
    def top_list_kernel(
        ids_Nn, top_logprobs_Nn, candidates, counts_N, logits, last_bin_N, log_total_N, top_N, wanted_N, V, columns
    ):  # fmt: skip
        """Grid N. Writes every element of ids_Nn and top_logprobs_Nn; -1 and NaN where there is no alternative."""
        keys_s, bins_s = cuda.shared.array(K, int64), cuda.shared.array((2, K), uint32)
        scratch, found = cuda.shared.array(32, int64), cuda.shared.array(3, int64)
        count_s, tid, row = cuda.shared.array(1, int32), cuda.threadIdx.x, int64(cuda.blockIdx.x)
        n = ids_Nn.shape[1]
        if overlap:
            wait_for_previous()
            let_next_start()
        need, top, one = min(int64(n), V), NAN, float32(1.0)
        if some:
            need = min(need, int64(wanted_N[row]))
        if need > 0:
            top = logit_of(top_N[row])
        if not is_finite(top):
            need = int64(0)
        for i in range(tid, n, THREADS):
            if i >= need:
                ids_Nn[row, i], top_logprobs_Nn[row, i] = int32(-1), NAN
        if need <= 0:
            return
        size, last, low, first = int64(counts_N[row]), last_bin_N[row], int64(0), row * columns
        if size > K:  # find the last of the first `need` keys
            before = narrow(
                keys_s, bins_s, count_s, scratch, found, candidates, size, row, logits, first, V, top, one, int64(0),
                int64(0), last, need - 1, True,
            )  # fmt: skip
            low = keys_s[need - 1 - before]
            cuda.syncthreads()  # the list is read before it is overwritten
        listed = collect(
            keys_s, bins_s, count_s, candidates, size, row, logits, first, V, top, one, int64(0), int64(0), int64(K), low,
            int64(LAST_KEY), int64(KEY), True,
        )  # fmt: skip
        sort_keys(keys_s, listed)
        for i in range(tid, need, THREADS):
            ids_Nn[row, i] = token_of(keys_s[i])
            top_logprobs_Nn[row, i] = (logit_of(keys_s[i]) - top) - log_total_N[row]

    return top_list_kernel


# ----------------------------------------------------------------------------- launchers
def logprobs_of(logits_NV: Array, targets_N: Array, vocab: int | None = None) -> Array:
    """-> log-probability of each row's target (N,), float32. Arguments and errors as in top_logprobs."""
    return top_logprobs(logits_NV, targets_N, 0, vocab)[0]


def top_logprobs(
    logits_NV: Array,
    targets_N: Array,
    n: int,
    vocab: int | None = None,
    wanted_N: Array | None = None,
) -> tuple[Array, Array, Array]:
    """-> logprobs of the targets (N,), ids (N, n) of each row's n most likely tokens, and their logprobs (N, n), in order.

    logits (N, V): float32 or bf16. targets (N,): int32 or int64. vocab: number of tokens, by default V; further columns are
    padding. wanted (N,), int32: n of each row, at most n; a row with -1 is not read. What is not wanted is NaN, its id -1.
    NaN is also the logprob of a target that is no token, and all logprobs of a row whose largest logit is not finite.
    Logprobs are float32, ids int32. Raises ValueError or TypeError if shapes or dtypes do not match or n > 20.
    """
    op = "top_logprobs"
    check_array(op, "logits", logits_NV, (None, None), FLOATS)
    N, V = logits_NV.shape
    vocab = V if vocab is None else vocab
    check(0 < vocab <= V, f"{op}: a vocabulary of {vocab}, the logits have {V} columns")
    check(vocab < MAX_VOCAB, f"{op}: a vocabulary of {vocab}, at most {MAX_VOCAB - 1}")
    check(0 <= n <= MAX_TOP, f"{op}: {n} alternatives, expected 0 to {MAX_TOP}")
    check_array(op, "targets", targets_N, (N,), ("int32", "int64"))
    if wanted_N is not None:
        check_array(op, "wanted", wanted_N, (N,), ("int32",))
    some, wanted = wanted_N is not None, targets_N if wanted_N is None else wanted_N
    if on_host(logits_NV, targets_N, wanted):
        return _on_host(logits_NV[:, :vocab], targets_N, n, wanted_N)
    check(N < 2**16, f"{op}: {N} rows in one launch, at most 65535")
    logits, overlap = logits_NV.reshape(-1), can_overlap(logits_NV)
    K, (blocks, length) = SIZES.keys, SIZES.split(logits_NV, max(N, 1), vocab)
    new = lambda shape, dtype: empty(logits_NV, shape, dtype)
    logprobs_N, log_total_N, last_bin_N = (new(N, t) for t in (np.float32, np.float32, np.int64))
    ids_Nn, top_logprobs_Nn = new((N, n), np.int32), new((N, n), np.float32)
    top_N, tops, sums = (new(N * m, np.int64) for m in (1, blocks, blocks))
    bins, counts_N = new(N * K, np.int64), new(N, np.int32)
    counters, variant, sizes = (
        zero_counters(logits, N, "logprobs"),
        (SIZES, some, overlap),
        (vocab, V),
    )
    run = lambda make, grid, threads, *args: launch(
        make(*variant), grid, threads, *args, *sizes, overlap=overlap
    )
    grid = (blocks, N), SIZES.threads
    run(make_top_kernel, *grid, top_N, bins, counts_N, tops, counters, logits, wanted, length)
    run(
        make_score_kernel, *grid, logprobs_N, log_total_N, last_bin_N, sums, bins, counters, logits, targets_N, top_N,
        wanted, n, length,
    )  # fmt: skip
    if n:
        candidates = new(N * SIZES.room, np.int64)
        run(
            make_gather_kernel,
            *grid,
            candidates,
            counts_N,
            logits,
            last_bin_N,
            top_N,
            wanted,
            length,
        )
        run(
            make_list_kernel, N, SIZES.sorters, ids_Nn, top_logprobs_Nn, candidates, counts_N, logits, last_bin_N,
            log_total_N, top_N, wanted,
        )  # fmt: skip
    return logprobs_N, ids_Nn, top_logprobs_Nn


def _on_host(logits_NV, targets_N, n, wanted_N):
    logprobs_N, ids_Nn = logprobs_ref(logits_NV, targets_N), top_ids_ref(logits_NV, n)
    limit_N = np.full(len(targets_N), n) if wanted_N is None else wanted_N
    logprobs_N[limit_N < 0] = np.nan
    finite_N = np.isfinite(wide(logits_NV).astype(np.float32).max(1))
    ids_Nn[(np.arange(n) >= limit_N[:, None]) | ~finite_N[:, None]] = -1
    tops = [logprobs_ref(logits_NV, ids_Nn[:, i]) for i in range(n)]
    top_logprobs_Nn = np.stack(tops, 1) if n else np.empty((len(targets_N), 0), np.float32)
    return logprobs_N, ids_Nn.astype(np.int32), top_logprobs_Nn
