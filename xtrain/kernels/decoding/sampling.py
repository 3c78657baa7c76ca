"""From logits to the next token, without leaving the device.   logits: (B, V)   ids: (B,)

    order       tokens are sorted by their logits, the largest first; of equal ones the lower id
                first
    weights     w_i = exp((logit_i - logit_0) / temperature), relative to the first
    min-p       tokens with less than min_p times the first token's probability get the weight 0
    top-k       the first k tokens are kept (0: all)
    top-p       of those, token i is kept while the weights before it sum to less than p of the
                total: the smallest set with at least p of the probability (Holtzman et al. 2020).
                The first one is always kept.
    draw        a random number u in [0, 1): the first token at which the running sum exceeds u
                times the total
    greedy      temperature 0: the first token

The weights are integers: w_i = floor(2^40 exp(...)). Their sums are exact, so they do not depend on
the order in which threads add, on the GPU, or on how the vocabulary is divided, and a draw is one
exact comparison.

The order of the steps is vLLM's: bias and penalties (penalties.py), temperature, min-p, top-k,
top-p. transformers applies min-p last. That differs only next to top-p: min-p first leaves less for
top-p to cut.

On a GPU several blocks share a row, in three launches that each read the logits, before one that
draws (sampling_search.py). Bytes moved: 3 B V logits, of which the second and third read are from
L2 for few rows; greedy rows are read once.

Random numbers come from a counter, not from a state: Philox 4x32-10 (Salmon et al. 2011) turns
(step, sequence) into random bits under the key `seed`. So a token depends only on its own row's
seed, sequence number and step.
"""

from dataclasses import dataclass

import numpy as np

from ...device import Array
from ..primitives.last_block import zero_counters
from ..runtime.launch import FLOATS, can_overlap, check, check_array, empty, launch, on_host
from .sampling_kernels import (
    FIELDS,
    FRACTION,
    ONE,
    PHILOX_M,
    PHILOX_W,
    ROUNDS,
    make_advance_kernel,
    make_draw_kernel,
    make_gather_kernel,
    make_weigh_kernel,
)
from .sampling_search import Sizes, make_top_kernel

SIZES = Sizes()
MAX_TOP_K = SIZES.keys
MIN_TEMPERATURE = 1e-5  # 1 / temperature times a difference of logits must be a float32
COLUMNS = {"temperature": "float32", "top_k": "int32", "top_p": "float32", "min_p": "float32"}


# ----------------------------------------------------------------------------- reference
def philox_ref(counter: tuple, key: tuple) -> tuple[int, int, int, int]:
    """Philox 4x32-10: counter of four 32-bit words, key of two -> four random 32-bit words"""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = PHILOX_M[0] * c0, PHILOX_M[1] * c2
        c0 = (b >> 32) ^ c1 ^ k0
        c1 = b & 0xFFFFFFFF
        c2 = (a >> 32) ^ c3 ^ k1
        c3 = a & 0xFFFFFFFF
        k0 = (k0 + PHILOX_W[0]) & 0xFFFFFFFF
        k1 = (k1 + PHILOX_W[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_fraction_ref(seed: int, sequence: int, step: int) -> int:
    """Return 31 random bits of one step of one sequence"""
    split = lambda x: (x & 0xFFFFFFFF, x >> 32 & 0xFFFFFFFF)
    return philox_ref((step & 0xFFFFFFFF, 0, *split(sequence)), split(seed))[0] >> 1


def kept_ref(logits_V, temperature, top_k, top_p, min_p=0.0):
    """Return ids of the tokens that top-k and top-p keep, sorted, and their weights, int64"""
    logits_V = np.asarray(logits_V, np.float32)
    order = np.argsort(-logits_V, kind="stable")  # of equal ones the lower id first
    if top_k:
        order = order[:top_k]
    x = (logits_V[order] - logits_V[order[0]]) * (np.float32(1) / np.float32(temperature))
    w = (np.exp(x) * np.float32(ONE)).astype(np.int64)
    w[w < int(np.float32(min_p) * np.float32(ONE))] = 0
    if top_p < 1:
        limit = scaled_ref(int(w.sum()), int(np.float32(top_p) * np.float32(1 << FRACTION)))
        keep = np.cumsum(w) - w < max(limit, 1)
        order, w = order[keep], w[keep]
    return order, w


def scaled_ref(total, fraction):
    """Return floor(total fraction / 2^31), in integers of any size"""
    return total * fraction >> FRACTION


def sample_ref(logits_V, temperature, top_k, top_p, seed, sequence, step, min_p=0.0):
    """`sample` of one row in NumPy -> the id of the next token; -1 if a logit is NaN"""
    logits_V = np.asarray(logits_V, np.float32)
    if np.isnan(logits_V).any():
        return -1
    if temperature <= 0 or np.isinf(logits_V.max()):
        return int(np.argmax(logits_V))
    ids, w = kept_ref(logits_V, temperature, top_k, top_p, min_p)
    goal = scaled_ref(int(w.sum()), random_fraction_ref(seed, sequence, step))
    return int(ids[np.searchsorted(np.cumsum(w), goal, side="right")])


def last_kept_ref(logits_V, temperature, top_k, top_p, min_p=0.0):
    """`last_kept` of one row in NumPy -> the id; -1 if a logit is NaN"""
    logits_V = np.asarray(logits_V, np.float32)
    if np.isnan(logits_V).any():
        return -1
    if temperature <= 0 or np.isinf(logits_V.max()):
        return int(np.argmax(logits_V))
    ids, w = kept_ref(logits_V, temperature, top_k, top_p, min_p)
    return int(ids[w > 0][-1])


# ----------------------------------------------------------------------------- launchers
@dataclass(frozen=True)
class Sampling:
    """From which distribution tokens are drawn, one for all rows: see the top of this file.

    Raises ValueError for values that `sample` does not support.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def truncates(self) -> bool:
        """False if every token is kept."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def columns(self, like: Array, B: int) -> tuple[Array, Array, Array, Array]:
        """Return temperature, top_k, top_p and min_p of B rows, on the device of `like`."""
        new = []
        for name, dtype in COLUMNS.items():
            column = empty(like, B, np.dtype(dtype))
            column.fill(getattr(self, name))
            new.append(column)
        temperature_B, top_k_B, top_p_B, min_p_B = new
        return temperature_B, top_k_B, top_p_B, min_p_B


def check_sampling(temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> None:
    """Raise ValueError for parameters that `sample` does not support. Call this for each request:
    kernels cannot raise."""
    fits = temperature == 0 or MIN_TEMPERATURE <= temperature < float("inf")
    what = f"0 (greedy), or a finite number of at least {MIN_TEMPERATURE}"
    check(fits, f"temperature {temperature}: expected {what}")
    check(0 <= top_k <= MAX_TOP_K, f"top_k {top_k}: expected 0 (off) to {MAX_TOP_K}")
    check(0 < top_p <= 1, f"top_p {top_p}: expected more than 0 and at most 1 (off)")
    check(0 <= min_p <= 1, f"min_p {min_p}: expected 0 (off) to 1")


UNCHANGED = Sampling()  # the model's own distribution


def sample(
    logits_BV: Array,
    ids_B: Array,
    temperature_B: Array,
    top_k_B: Array,
    top_p_B: Array,
    seed_B: Array,
    sequence_B: Array,
    step_B: Array,
    vocab: int | None = None,
    min_p_B: Array | None = None,
) -> None:
    """Write the next token of every row to ids_B (int32); -1 for a row that has a NaN among its
    logits.

    logits (B, V): float32 or bf16. vocab: number of tokens, by default V; further columns are
    padding. temperature, top_p,
    min_p: float32; top_k, step: int32; seed, sequence: int64; all (B,), with any mix of values that
    check_sampling allows. Raises ValueError or TypeError if shapes or dtypes do not match.
    """
    check_array("sample", "logits", logits_BV, (None, None), FLOATS)
    B, V = logits_BV.shape
    vocab = V if vocab is None else vocab
    check(0 < vocab <= V, f"sample: a vocabulary of {vocab}, the logits have {V} columns")
    parameters = dict(
        ids=(ids_B, "int32"),
        temperature=(temperature_B, "float32"),
        top_k=(top_k_B, "int32"),
        top_p=(top_p_B, "float32"),
        min_p=(top_p_B if min_p_B is None else min_p_B, "float32"),
        seed=(seed_B, "int64"),
        sequence=(sequence_B, "int64"),
        step=(step_B, "int32"),
    )
    for name, (x, dtype) in parameters.items():
        check_array("sample", name, x, (B,), (dtype,))
    arrays = [x for x, _ in parameters.values()]  # without min_p, another array takes its place
    if on_host(logits_BV, *arrays):
        for b in range(B):
            columns = temperature_B, top_k_B, top_p_B, seed_B, sequence_B, step_B
            min_p = 0.0 if min_p_B is None else min_p_B[b]
            temperature, top_k, top_p, *numbers = (x[b].item() for x in columns)
            check_sampling(temperature, top_k, top_p, min_p)
            rules = temperature, top_k, top_p, *numbers, min_p
            ids_B[b] = sample_ref(logits_BV[b, :vocab], *rules)
        return
    _launch(logits_BV, ids_B, arrays[1:], vocab, min_p_B is not None, False)


def last_kept(
    logits_BV: Array,
    temperature_B: Array,
    top_k_B: Array,
    top_p_B: Array,
    min_p_B: Array,
    vocab: int,
) -> Array:
    """Return the last token, in the order of `sample`, that min-p, top-k and top-p keep, (B,)
    int32: the kept tokens are this one and those before it. The first one at temperature 0; -1 for
    a row that has a NaN among its logits.

    Arguments and errors as in `sample`.
    """
    check_array("last_kept", "logits", logits_BV, (None, None), FLOATS)
    B, V = logits_BV.shape
    check(0 < vocab <= V, f"last_kept: a vocabulary of {vocab}, the logits have {V} columns")
    rules = (temperature_B, top_k_B, top_p_B, min_p_B)
    for x, (name, dtype) in zip(rules, COLUMNS.items()):
        check_array("last_kept", name, x, (B,), (dtype,))
    last_B = empty(logits_BV, B, np.int32)
    if on_host(logits_BV, *rules):
        for b in range(B):
            row_rules = [x[b].item() for x in rules]
            check_sampling(*row_rules)
            last_B[b] = last_kept_ref(logits_BV[b, :vocab], *row_rules)
        return last_B
    unused = [top_k_B] * 3  # in place of seed, sequence and step
    _launch(logits_BV, last_B, [*rules, *unused], vocab, True, True)
    return last_B


def _launch(
    logits_BV: Array, ids_B: Array, columns: list[Array], vocab: int, filtered: bool, last: bool
) -> None:
    """Launch the four kernels. columns: from temperature to step, as the kernels have them.
    filtered, last: see make_weigh_kernel."""
    B, V = logits_BV.shape
    check(B < 2**16, f"sample: {B} rows in one launch, at most 65535")
    temperature_B = columns[0]
    top_k_B = columns[1]
    logits = logits_BV.reshape(-1)
    overlap = can_overlap(logits_BV)
    K = SIZES.keys
    blocks, length = SIZES.split(logits_BV, B, vocab)
    new = lambda shape, dtype=np.int64: empty(logits_BV, shape, dtype)
    top_B = new(B)
    tops = new(B * blocks)
    bins = new(B * K)
    counts_B = new(B, np.int32)
    state_BF = new((B, FIELDS))
    candidates = new(B * SIZES.room)
    counters = zero_counters(logits_BV, B, "sample")
    variant = (SIZES, filtered, overlap, last)
    work = (top_B, *columns)
    sizes = (length, vocab, V)
    run = lambda kernel, *args: launch(kernel, (blocks, B), SIZES.threads, *args, overlap=overlap)
    top = make_top_kernel(SIZES, overlap)
    run(top, top_B, bins, counts_B, tops, counters, logits, *sizes)
    run(make_weigh_kernel(*variant), ids_B, state_BF, bins, counters, logits, *work, *sizes)
    gather = make_gather_kernel(SIZES, overlap)
    run(gather, candidates, counts_B, logits, state_BF, top_B, temperature_B, top_k_B, *sizes)
    arguments = (ids_B, candidates, counts_B, logits, state_BF, *work, vocab, V)
    launch(make_draw_kernel(*variant), B, SIZES.sorters, *arguments, overlap=overlap)


def advance(
    lengths_B: Array,
    step_B: Array,
    rows_B: Array,
    ids_B: Array | None = None,
    host_ids_2L: Array | None = None,
) -> None:
    """The end of a decoding step: lengths += 1 and step += 1 where rows >= 0.

    lengths, step, rows, ids (B,), host_ids (2, L) with L >= B: int32. If host_ids is given,
    host_ids[step % 2, b] = ids[b] is written first. host_ids may be in memory that host and GPU
    share (device.mapped_array); then no copy separates two steps.
    """
    for name, x in (("lengths", lengths_B), ("step", step_B), ("rows", rows_B)):
        check_array("advance", name, x, (rows_B.size,), ("int32",))
    check(host_ids_2L is None or ids_B is not None, "advance: host_ids is given without ids")
    if host_ids_2L is not None:
        check_array("advance", "ids", ids_B, (rows_B.size,), ("int32",))
        check_array("advance", "host_ids", host_ids_2L, (2, None), ("int32",))
        L = host_ids_2L.shape[1]
        B = rows_B.size
        check(L >= B, f"advance: host_ids has {L} columns, expected at least {B}")
    if on_host(lengths_B, step_B, rows_B):
        live = np.flatnonzero(rows_B >= 0)
        if host_ids_2L is not None and ids_B is not None:
            host_ids_2L[step_B[live] % 2, live] = ids_B[live]
        lengths_B[live] += 1
        step_B[live] += 1
        return
    overlap = can_overlap(rows_B)
    arrays = (lengths_B, step_B, rows_B)
    copies = host_ids_2L is not None
    ids = (ids_B, host_ids_2L) if copies else (rows_B, rows_B.reshape(1, -1))  # must not be None
    advance_kernel = make_advance_kernel(overlap, copies)
    launch(advance_kernel, -(-rows_B.size // 32), 32, *arrays, *ids, overlap=overlap)
