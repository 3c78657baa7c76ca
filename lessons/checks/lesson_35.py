"""Exercises of lesson 35: a product and an attention in two schedules with one order, the causes of other bits, a check."""

import math

import numpy as np

from xtrain.simulator import run, sim

from .attempt import exercise
from .row_products import PRODUCTS, adding_kernel

CHUNK = D = 16
F = np.float32
ZERO = F(0.0)


def same_bits(e, name, got, each, right, causes):
    """Raises Wrong unless all numbers are those of each(right), although they are close.

    causes: {message: functions f, of which each(f) is what this mistake gives}
    """
    got, want = np.asarray(got), each(right)
    if np.array_equal(got, want):
        return
    at = tuple(int(i) for i in np.argwhere(got != want)[0])
    place = f"{name}[{', '.join(map(str, at))}]"
    shown = f"{place} is right to rounding, but has other bits: {got[at]:.9g} instead of {want[at]:.9g} ({(got != want).sum()} of {got.size} elements)."
    cause = "Its additions have another order, or other terms, than the docstring says."
    for text, orders in causes.items():
        if any(np.array_equal(got, each(order)) for order in orders):
            cause = text
            break
    raise e.wrong(f"{shown}\n{cause}")


# ----------------------------------------------------------------------------- the product
def chain(terms, total=ZERO):
    """The sum of float32 numbers, one after the other."""
    for v in terms:
        total = total + v
    return total


def chunks_of(terms, size=CHUNK):
    return [chain(terms[i : i + size]) for i in range(0, len(terms), size)]


def butterfly(lanes):
    lanes = np.array([*lanes, *[0.0] * (32 - len(lanes))], np.float32)
    for step in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[np.arange(32) ^ step]
    return lanes[0]


def by_lanes(chunks):
    """Each lane adds its chunks of all passes."""
    return [chain(chunks[lane::32]) for lane in range(32)]


def strided(terms):
    return [chain(terms[lane::32]) for lane in range(32)]


def pairwise(values):
    values = list(values) + [F(0.0)] * (2 ** max(len(values) - 1, 0).bit_length() - len(values))
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2])]
    return values[0]


def equal_parts(terms):
    size = -(-len(terms) // 32)
    return chain(chunks_of(terms, size))


WALK = "the sum of chunk c begins at 0, and y adds the sums of chunks 0, 1, 2, ... in this order."
ORDERS = {  # what each mistake adds up
    "The sums of the chunks are added by a butterfly of shuffles, which is another tree: y adds the sum of lane 0, then lane 1, and so on, with "
    "cuda.shfl_sync(FULL, part, l).": (
        lambda t: butterfly(by_lanes(chunks_of(t))),
        lambda t: chain([butterfly(chunks_of(t)[i : i + 32]) for i in range(0, -(-len(t) // CHUNK), 32)]),
        lambda t: pairwise(chunks_of(t)),
    ),
    "Lane l has columns l, l + 32, ... here. Its chunk is 16 neighbouring columns, from 16 l on: " + WALK: (
        lambda t: butterfly(strided(t)), lambda t: chain(strided(t)),
    ),
    "There are no chunks here, K is one chain: " + WALK: (lambda t: chain(t),),
    "Each lane adds its chunks of all passes first, and then the lanes are added. The chunks of the first pass come before those of the second: add "
    "the 32 lanes after each pass.": (lambda t: chain(by_lanes(chunks_of(t))),),
    "The chunks are added from the last to the first.": (lambda t: chain(chunks_of(t)[::-1]),),
    "The columns of a chunk are added from the last to the first.": (
        lambda t: chain(chain(t[i : i + CHUNK][::-1]) for i in range(0, len(t), CHUNK)),
    ),
    "A lane has ceil(K / 32) columns here, so the chunks depend on K: a chunk has 16 columns, whatever K is.": (equal_parts,),
    "A chunk has 32 columns here: it has 16.": (lambda t: chain(chunks_of(t, 32)),),
    "A chunk has 8 columns here: it has 16.": (lambda t: chain(chunks_of(t, 8)),),
    "This sum is in float64. It is closer to the exact one, and has other bits: every addition is one of float32 numbers.": (
        lambda t: sum(map(float, t)), lambda t: sum(map(float, chunks_of(t))),
    ),
}  # fmt: skip


@exercise(
    "35.1", "few_rows_kernel",
    first_step="lane l sums one chunk: its columns begin at first + 16 l, where first = 0, 512, 1024, ...",
    hints={
        "RaceError in shared memory": "A lane reads sums that others write: cuda.syncthreads() after they are written, and again before the next pass overwrites them. A sum that "
        "several lanes add to must be added by one of them, in order.",
        "RaceError": "Only lane 0 writes y[n, o].",
        "RaceError between blocks": "Two blocks write the same element: block (o, n) has y[n, o]; o is cuda.blockIdx.x, n is cuda.blockIdx.y.",
        "OutOfBoundsError": "The last chunk may be shorter, and lanes may have none: columns end before K. Block (o, n): o is cuda.blockIdx.x, n is cuda.blockIdx.y.",
        "CollectiveError": "All 32 lanes must call the shuffle, also those without columns: their sum is 0.",
        "DeadlockError": "All 32 lanes must reach the barrier or the shuffle, also those without columns: their sum is 0.",
        "UninitializedError": "Shared memory holds anything at first: a lane without columns writes the sum 0, or is not read.",
    },
)  # fmt: skip
def few_rows_kernel(e):
    fixed = (1, 3, 16), (2, 3, 100), (1, 2, 256), (2, 1, 1100)
    draw = lambda rng: rng.integers((1, 1, 520), (2, 3, 700))
    for N, O, K in e.cases(fixed, draw):
        x = e.normal(N, K)
        w = e.normal(O, K)
        y = e.blank(N, O)
        trace = e.run((O, N), 32, y, x, w, case=f"N = {N}, O = {O}, K = {K}", trace=True)
        x_, w_ = np.asarray(x), np.asarray(w)
        terms = x_[:, None] * w_  # (N, O, K)
        each = lambda f, terms=terms: np.array([[f(list(t)) for t in row] for row in terms], np.float32)  # fmt: skip
        wide = x_.astype(np.float64) @ w_.astype(np.float64).T
        part = lambda end, x_=x_, w_=w_: x_[:, :end] @ w_[:, :end].T
        e.same("y", y, wide, {
            "Only the first 512 columns are in the sum: lanes continue with the next 512, for first in range(0, K, 512).": part(512) if K > 512 else np.empty(0),
            "Only the chunk of lane 0 is in the sum: get the sums of the other lanes, with cuda.shfl_sync(FULL, part, l).":
                lambda got, x_=x_, w_=w_: K > CHUNK and np.allclose(got, sum(x_[:, i : i + CHUNK] @ w_[:, i : i + CHUNK].T for i in range(0, K, 512)), 1e-4, 1e-4),
            "The last, shorter chunk is missing: its columns end at K.": part(K // CHUNK * CHUNK) if K % CHUNK else np.empty(0),
            "This is 32 times the sum: every lane adds all chunks, but only once each.": 32 * wide,
            "The last lane is missing: there are 32, l = 0, ..., 31.":
                lambda got, x_=x_, w_=w_: K > 496 and np.allclose(got, sum(x_[:, i : i + 496] @ w_[:, i : i + 496].T for i in range(0, K, 512)), 1e-4, 1e-4),
            "Sums of an earlier pass are added again: a chunk's sum begins at 0 in every pass.":
                lambda got: K > 512 and np.isfinite(got).all() and np.allclose(each(lambda t: sum(chain(t[c * 16 + p * 512 : c * 16 + p * 512 + 16]) for c in range(32) for q in range(-(-K // 512)) for p in range(q + 1))), got, 1e-3, 1e-3),
        }, rtol=1e-4, atol=1e-3)  # fmt: skip
        same_bits(e, "y", y, each, lambda t: chain(chunks_of(t)), ORDERS)
        _together(e, trace, x, N, O, K)
        e.settle()


def _together(e, trace, x, N, O, K):
    """Raises Wrong unless the lanes of a warp share the work."""
    reads = trace.of(e.name(x), write=False)
    e.need(
        len(reads) <= N * O * K,
        f"The bits are right, but every number of x is read {len(reads) / (N * O * K):.0f} times in a block: a lane reads its own chunk only.",
    )
    lanes = len({(r.block, r.thread) for r in reads})
    due = N * O * min(32, -(-K // CHUNK))
    e.need(
        2 * lanes > due,
        f"The bits are right, but {lanes} of {due} lanes that have a chunk read x: the lanes sum different chunks at the same time.",
    )
    shared = [r for r in trace.of(kind="shared", write=False)]
    busiest = max((sum(r.thread == t for r in shared) for t in {r.thread for r in shared}), default=0)  # fmt: skip
    e.need(
        K < 128 or busiest < N * O * K // 4,
        "The bits are right, but one lane adds all the products while the others wait: each lane sums its own chunk, and only the sums of the chunks are "
        "added by one lane.",
    )


# ----------------------------------------------------------------------------- attention
def exp(v):
    """As the simulator computes it for a float32."""
    return F(math.exp(v))


def sums(q, k, v):
    """m, l, acc (D,) of some keys as chunk_sums computes them."""
    score = [chain(q * key) * F(0.25) for key in k]
    m = max(score)
    p = [exp(s - m) for s in score]
    return m, chain(p), np.array([chain(F(a) * b for a, b in zip(p, column)) for column in v.T], np.float32)  # fmt: skip


def parts_of(q, k, v, length, size=CHUNK):
    return [sums(q, k[i : min(i + size, length)], v[i : min(i + size, length)]) for i in range(0, length, size)]  # fmt: skip


def merged(parts, divide=True):
    """-> o (D,)"""
    m, l, acc = parts[0]
    for m_c, l_c, acc_c in parts[1:]:
        new = max(m, m_c)
        keep, add = exp(m - new), exp(m_c - new)
        l = l * keep + l_c * add
        acc = acc * keep + acc_c * add
        m = new
    return acc / l if divide else acc


def at_once(parts):
    """Relative to the largest maximum."""
    M = max(m for m, _, _ in parts)
    shares = [exp(m - M) for m, _, _ in parts]
    l = chain(s * part[1] for s, part in zip(shares, parts))
    return chain((s * part[2] for s, part in zip(shares, parts)), np.zeros(D, np.float32)) / l


def in_pairs(parts):
    """A tree of merges: chunks 0 and 1, 2 and 3, ..."""
    parts = list(parts)
    while len(parts) > 1:
        pairs = []
        for i in range(0, len(parts), 2):
            if i + 1 == len(parts):
                pairs.append(parts[i])
                continue
            (m, l, acc), (m_c, l_c, acc_c) = parts[i : i + 2]
            new = max(m, m_c)
            keep, add = exp(m - new), exp(m_c - new)
            pairs.append((new, l * keep + l_c * add, acc * keep + acc_c * add))
        parts = pairs
    return parts[0][2] / parts[0][1]


def normalised(parts):
    """Outputs that are divided by l in every step."""
    m = parts[0][0]
    l = parts[0][1]
    o = parts[0][2] / parts[0][1]
    for m_c, l_c, acc_c in parts[1:]:
        new = max(m, m_c)
        keep, add = l * exp(m - new), l_c * exp(m_c - new)
        l = keep + add
        o = (o * keep + acc_c / l_c * add) / l
        m = new
    return o


def online(q, k, v, length):
    """A walk with a running maximum: no sums of chunks."""
    m = F(-np.inf)
    l = F(0.0)
    acc = np.zeros(D, np.float32)
    for first in range(0, length, CHUNK):
        keys = slice(first, min(first + CHUNK, length))
        score = [chain(q * key) * F(0.25) for key in k[keys]]
        new = max(m, max(score))
        keep = exp(m - new)
        l = l * keep
        acc = acc * keep
        m = new
        p = [exp(s - new) for s in score]
        l_c, acc_c = chain(p), np.array([chain(F(a) * b for a, b in zip(p, c)) for c in v[keys].T])
        l, acc = l + l_c, acc + acc_c
    return acc / l


def one_by_one(q, k, v, length):
    """The online softmax of single keys."""
    return merged([(chain(q * key) * F(0.25), F(1.0), np.asarray(value)) for key, value in zip(k[:length], v[:length])])  # fmt: skip


def short_first(q, k, v, length):
    head = (length - 1) % CHUNK + 1
    return [sums(q, k[:head], v[:head]), *parts_of(q, k[head:], v[head:], length - head)]


ATTEND_HINTS = {
    "RaceError between blocks": "Two blocks write the same row of o: block b has sequence b = cuda.blockIdx.x.",
    "OutOfBoundsError": "Block b has sequence b = cuda.blockIdx.x, thread d channel d = cuda.threadIdx.x. A sequence has ceil(length / 16) chunks.",
    "UninitializedError": "m, l and acc begin with chunk 0.",
}


def batch(e, lengths):
    B, S = len(lengths), -(-max(lengths) // CHUNK) * CHUNK
    q = e.normal(B, D, mean=0.1)
    k, v = e.normal(B, S, D), e.normal(B, S, D)
    k *= np.linspace(0.5, 3, S, dtype=np.float32)[
        :, None
    ]  # maxima rise: otherwise other orders have the same bits
    return q, k, v, sim(np.array(lengths, np.int32))


def lengths_drawn(rng):
    return tuple(int(n) for n in rng.integers(1, 90, 3))


CASES = ((5,), (32,), (16, 40), (64, 3, 17), (81, 48))
LIKE = {
    "The result has the order of lesson 19, relative to the largest maximum of all chunks: a block that walks does not know it. Merge one chunk after the "
    "other.": [at_once],
    "The chunks are merged in pairs: merge chunk 1 to chunk 0, then chunk 2 to the result, and so on.": [in_pairs],
    "The chunks are merged from the last to the first.": [lambda parts: merged(parts[::-1])],
    "After chunk 0 the chunks are merged from the last to the first.": [lambda parts: merged([parts[0], *parts[:0:-1]])],
    "acc * (1 / l) is rounded twice: divide, acc / l.": [lambda parts: merged(parts, divide=False) * (F(1.0) / merged([(m, l, l) for m, l, _ in parts], divide=False))],
    "The outputs are divided by l in every step: keep acc undivided, and divide once at the end.": [normalised],
}  # fmt: skip


WALKS = {
    "The exponentials are relative to the running maximum. A block that has this chunk alone does not know it: each chunk has its own maximum, as "
    "chunk_sums computes it.": [lambda p, q, k, v, n: online(q, k, v, n)],
    "Every key is merged by itself: a chunk of 16 keys has its own sums, and these are merged.": [lambda p, q, k, v, n: one_by_one(q, k, v, n)],
    "The shorter chunk comes first here: chunks begin at multiples of 16, and the last one may be shorter.": [lambda p, q, k, v, n: merged(short_first(q, k, v, n))],
    "A chunk has 8 keys here: it has 16.": [lambda p, q, k, v, n: merged(parts_of(q, k, v, n, 8))],
}  # fmt: skip


@exercise(
    "35.2", "merge_kernel",
    first_step="b = cuda.blockIdx.x, d = cuda.threadIdx.x; m, l, acc = m_BC[b, 0], l_BC[b, 0], acc_BCD[b, 0, d].",
    hints=ATTEND_HINTS | {"RaceError": "Thread d writes o[b, d] alone, and m and l are in registers: m_BC, l_BC and acc_BCD are inputs."},
)  # fmt: skip
def merge_kernel(e):
    for lengths in e.cases(CASES, lengths_drawn):
        q, k, v, length = batch(e, lengths)
        B, C = len(lengths), k.shape[1] // CHUNK
        m = e.blank(B, C)
        l = e.blank(B, C)
        acc = e.blank(B, C, D)
        o = e.blank(B, D)
        for a in (m, l, acc):
            a.fill(3.0)  # what chunks that do not exist hold
        parts = [parts_of(*map(np.asarray, (q[b], k[b], v[b])), n) for b, n in enumerate(lengths)]
        for b in range(B):
            for c, (m_c, l_c, acc_c) in enumerate(parts[b]):
                m[b, c] = m_c
                l[b, c] = l_c
                acc[b, c] = acc_c
        given = [np.array(a) for a in (m, l, acc)]
        e.run(B, D, o, m, l, acc, length, case=f"lengths {tuple(lengths)}")
        each = lambda f, parts=parts: np.array([f(p) for p in parts], np.float32)
        stale = [[(given[0][b, c], given[1][b, c], given[2][b, c]) for c in range(C)] for b in range(B)]  # fmt: skip
        want = each(merged)
        e.same("o", o, want, {
            "Chunks that the sequence does not have were merged: it has ceil(length / 16).": np.array([merged(p) for p in stale]),
            "Only chunk 0 is in the result.": each(lambda p: merged(p[:1])) if C > 1 else np.empty(0),
            "The last chunk is missing: a sequence has ceil(length / 16) chunks, and the last may be shorter.":
                each(lambda p: merged(p[:-1] if len(p) > 1 else p)) if C > 1 else np.empty(0),
            "The last, shorter chunk is missing: length // 16 rounds down.":
                np.array([merged(p[: max(1, n // CHUNK)]) for p, n in zip(parts, lengths)]) if any(n % CHUNK for n in lengths) else np.empty(0),
            "The first chunk is in the result twice: the loop begins with chunk 1.": each(lambda p: merged([p[0], *p])),
            "NaN: a difference of infinities. m begins as that of chunk 0.": lambda got: np.isnan(got).any() and e.wrote(o).all(),
            "Thread d writes channel d: every thread writes o[b, d].": lambda got: not e.wrote(o)[:, 1:].any(),
        } | {text: each(f) for text, f in MERGES.items()}, rtol=1e-4, atol=1e-5)  # fmt: skip
        same_bits(e, "o", o, each, merged, LIKE)
        changed = [name for name, a, b in zip(("m", "l", "acc"), given, (m, l, acc)) if not np.array_equal(a, np.asarray(b))]  # fmt: skip
        e.need(not changed, f"{' and '.join(changed)} were overwritten: they are inputs.")


def _old_maximum(parts):
    m, l, acc = parts[0]
    for m_c, l_c, acc_c in parts[1:]:
        new = max(m, m_c)
        keep, add = exp(m - new), exp(m_c - new)
        l, acc = l * keep + l_c * add, acc * keep + acc_c * add
    return acc / l


def _swapped(parts):
    m, l, acc = parts[0]
    for m_c, l_c, acc_c in parts[1:]:
        new = max(m, m_c)
        keep, add = exp(new - m), exp(new - m_c)
        l = l * keep + l_c * add
        acc = acc * keep + acc_c * add
        m = new
    return acc / l


def _unshrunk(parts, which):
    """The merge if these sums (words of l, acc, l_c, acc_c) are not multiplied by their factor."""
    factor = lambda name, x: F(1.0) if name in which.split() else x
    m, l, acc = parts[0]
    for m_c, l_c, acc_c in parts[1:]:
        new = max(m, m_c)
        keep, add = exp(m - new), exp(m_c - new)
        l = l * factor("l", keep) + l_c * factor("l_c", add)
        acc = acc * factor("acc", keep) + acc_c * factor("acc_c", add)
        m = new
    return acc / l


MERGES = {  # of 35.2 and 35.3
    "The division by l is missing at the end: o = acc / l.": lambda p: merged(p, divide=False),
    "m is not the maximum afterwards: set m = new after each chunk.": _old_maximum,
    "l is not multiplied by exp(m - m'), as acc is.": lambda p: _unshrunk(p, "l"),
    "acc is not multiplied by exp(m - m'), as l is.": lambda p: _unshrunk(p, "acc"),
    "A new chunk's sums are not multiplied by exp(m_c - m').": lambda p: _unshrunk(p, "l_c acc_c"),
    "l_c is not multiplied by exp(m_c - m'), as acc_c is.": lambda p: _unshrunk(p, "l_c"),
    "acc_c is not multiplied by exp(m_c - m'), as l_c is.": lambda p: _unshrunk(p, "acc_c"),
    "The chunks have different maxima: multiply both sums by exp(m - m') and exp(m_c - m').": lambda p: sum(a for _, _, a in p) / sum(b for _, b, _ in p),
    "The signs are the wrong way round, or the factors exchanged: the larger maximum has the factor 1, the other one exp(smaller - larger).": _swapped,
}  # fmt: skip


@exercise(
    "35.3", "walk_kernel",
    first_step="m, l, acc = chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], 0, min(CHUNK, length_B[b])) are those of chunk 0.",
    hints=ATTEND_HINTS | {
        "DeadlockError": "chunk_sums has barriers: all threads of the block call it, equally often.",
        "RaceError": "Thread d writes o[b, d] alone, once, at the end.",
        "OutOfBoundsError": "The last chunk ends at the sequence's length: min(first + CHUNK, length_B[b]). A chunk has at most 16 keys.",
        "UninitializedError": "A chunk has at least one key and at most 16: first < last <= first + CHUNK. Is first a multiple of 16 below the length?",
    },
)  # fmt: skip
def walk_kernel(e):
    for lengths in e.cases(CASES, lengths_drawn):
        q, k, v, length = batch(e, lengths)
        B = len(lengths)
        for b, n in enumerate(lengths):  # keys that the sequence does not have
            k[b, n:] = 2.0
            v[b, n:] = 5.0
        o = e.blank(B, D)
        rows = [tuple(map(np.asarray, (q[b], k[b], v[b]))) for b in range(B)]
        parts = [parts_of(*row, n) for row, n in zip(rows, lengths)]
        trace = e.run(B, D, o, q, k, v, length, case=f"lengths {tuple(lengths)}", trace=True)
        each = lambda f, parts=parts: np.array([f(p) for p in parts], np.float32)
        of_keys = lambda f, rows=rows, lengths=lengths: np.array([f(*row, n) for row, n in zip(rows, lengths)], np.float32)  # fmt: skip
        want = each(merged)
        e.same("o", o, want, {
            "Keys beyond the length are in the result: the last chunk ends at length_B[b].": of_keys(lambda q, k, v, n: merged(parts_of(q, k, v, -(-n // CHUNK) * CHUNK))),
            "The block walks to the end of k, not to the sequence's length.": of_keys(lambda q, k, v, n: merged(parts_of(q, k, v, len(k)))),
            "Only chunk 0 is in the result: continue with first = 16, 32, ... below the length.": each(lambda p: merged(p[:1])),
            "The last, shorter chunk is missing: continue while first < length.":
                of_keys(lambda q, k, v, n: merged(parts_of(q, k, v, n)[: max(1, n // CHUNK)])) if any(n % CHUNK for n in lengths) else np.empty(0),
            "The first chunk is in the result twice: the loop begins with first = 16.": each(lambda p: merged([p[0], *p])),
            "All blocks use sequence 0: b is cuda.blockIdx.x.": lambda got: B > 1 and np.allclose(got[0], want[0], 1e-4) and np.allclose(got[1], merged(parts_of(*rows[0], lengths[1])), 1e-3, 1e-4),
            "NaN: a difference of infinities. m begins as that of chunk 0.": lambda got: np.isnan(got).any() and e.wrote(o).all(),
        } | {text: each(f) for text, f in MERGES.items()}, rtol=1e-4, atol=1e-5)  # fmt: skip
        attended = lambda f, rows=rows, lengths=lengths, parts=parts: np.array([f(p, *row, n) for p, row, n in zip(parts, rows, lengths)], np.float32)  # fmt: skip
        of_parts = {
            text: [lambda p, *_, f=f: f(p) for f in orders] for text, orders in LIKE.items()
        }
        same_bits(e, "o", o, attended, lambda p, *_: merged(p), of_parts | WALKS)
        times = len(trace.of(e.name(k), write=False)) / (sum(lengths) * D)
        cause = "each chunk is computed once, in one pass, and the loop begins with first = 16."
        if times > D / 2:
            cause = "every thread computes all scores. Thread t computes one, and the block shares them, as in chunk_sums."
        e.need(
            times <= 1.5,
            f"The bits are right, but the keys are read {times:.0f} times over: {cause}",
        )


# ----------------------------------------------------------------------------- the seven products
ANSWERS = ("row", "threads", "parts", "kernel", "tile", "numbers")
TRUE = dict(per_thread="row", added="threads", filled="parts", split="row", tuned="kernel", tiled="tile", scaled="numbers")  # fmt: skip
LOOK = {  # where to look, without the answer
    "per_thread": "One thread adds one element. Its loop is over K; what does N change, besides the number of blocks?",
    "added": "32 threads add to one element. What says which of them comes first?",
    "filled": "Compute `parts` for N = 1, 2 and 8.",
    "split": "K is in parts here. Does their number depend on N? In which order are they added?",
    "tuned": "What runs for N = 3, and what for N = 4? Write down the additions of one element in both.",
    "tiled": "A block has four rows. Which additions has row 4 of 5 rows, and which has row 4 of 8?",
    "scaled": "What is `scale` for a row alone, and what if another row has a larger number?",
}


def difference(name):
    """A sentence with the bits of a row in two batches, or ""."""
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(8, 64)).astype(np.float32), rng.normal(size=(6, 64)).astype(np.float32)

    def product(x_NK):
        y = sim(np.zeros((len(x_NK), len(w)), np.float32))
        PRODUCTS[name](y, sim(x_NK), sim(w))
        return np.array(y)

    whole = product(x)
    for n in range(8):
        alone = product(x[n : n + 1])[0]
        for o in np.flatnonzero(alone != whole[n])[:1]:
            return f"Row {n} of random numbers has y[{o}] = {alone[o]:.9g} alone and {whole[n, o]:.9g} among 8 rows."
    return ""


def two_orders():
    """A sentence with the bits of an element for two orders of the threads."""
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(1, 64)).astype(np.float32), rng.normal(size=(6, 64)).astype(np.float32)
    found = []
    for seed in (None, 1):
        y = sim(np.zeros((1, 6), np.float32))
        run(adding_kernel, (6, 1), 32, y, sim(x), sim(w), seed=seed)
        found.append(np.array(y))
    o = np.flatnonzero(found[0] != found[1])[0]
    one, other = (y[0, o] for y in found)
    return f"y[{o}] of a row is {one:.9g} if the threads come in one order, and {other:.9g} in another one."


@exercise(
    "35.4", "causes",
    first_step='return {"per_thread": ..., "added": ..., ...} with one of the six answers for each of the seven.',
    kernel=False,
)  # fmt: skip
def causes(e):
    got = e.call(case="the seven products")
    e.need(got is not None, "Nothing is returned: end with `return` and a dict.")
    e.need(isinstance(got, dict), f"A {type(got).__name__} is returned: return a dict, name: answer.")  # fmt: skip
    missing = [name for name in TRUE if name not in got]
    e.need(not missing, f"There is no answer for {', '.join(missing)}.")
    other = [name for name in got if name not in TRUE]
    e.need(not other, f"{other[:1]} is none of the seven names: {', '.join(TRUE)}.")
    for name, true in TRUE.items():
        answer = got[name]
        e.need(answer in ANSWERS, f"{name}: {answer!r} is no answer. Choose from {', '.join(map(repr, ANSWERS))}.")  # fmt: skip
        if answer == true:
            continue
        why = ""
        if answer == "row":
            why = two_orders() if true == "threads" else difference(name)
        raise e.wrong("\n".join(filter(None, [f"{name}: {answer!r} is not it.", why, LOOK[name]])))


# ----------------------------------------------------------------------------- the check
def ulp(y):
    """The next float32 numbers."""
    return np.nextafter(y, np.float32(np.inf), dtype=np.float32)


class Product:
    """x w^T by rows, with the same bits in every call; `change` may alter the result. Counts its calls and rows."""

    def __init__(self, e, w, change):
        self.e = e
        self.w = w
        self.change = change
        self.calls = 0
        self.sizes = []

    def __call__(self, x):
        x = np.asarray(x)
        e, K = self.e, self.w.shape[1]
        e.need(x.ndim == 2 and x.shape[1] == K, f"product got an array of shape {x.shape}: it takes rows, (n, {K}), such as x_NK[n : n + 1].")  # fmt: skip
        e.need(len(x) > 0, "product got no rows: it takes at least one.")
        self.calls += 1
        self.sizes.append(len(x))
        y = (x.astype(np.float64)[:, None] * self.w).sum(2).astype(np.float32)
        return np.ascontiguousarray(self.change(self, x, y), np.float32)


def at(rows, n, change=ulp):
    """Change these rows in products of n rows."""

    def changed(product, x, y):
        if len(x) == n:
            y = y.copy()
            y[rows] = change(y[rows])
        return y

    return changed


def from_row(first):
    """Rows first, first + 1, ... of every product have other bits."""

    def changed(product, x, y):
        y = y.copy()
        y[first:] = ulp(y[first:])
        return y

    return changed


def numbers(product, x, y):
    scale = np.abs(x).max()
    return ((x / scale).astype(np.float64)[:, None] * product.w).sum(2).astype(np.float32) * scale


def restless(product, x, y):
    for _ in range(product.calls):
        y = ulp(y)
    return y


def not_a_number(product, x, y):
    y = y.copy()
    y[:, 0] = np.nan
    return y


def signed(product, x, y):
    y = y.copy()
    y[:, 0] = -0.0 if len(x) == 2 else 0.0
    return y


unchanged = lambda product, x, y: y
SAME, OTHER = True, False
PLANTED = (  # rows, what the product does, the answer, what a wrong answer overlooks
    ("one order", 5, unchanged, SAME, "All rows have the same bits in all products here."),
    ("one row", 1, unchanged, SAME, "With one row there is nothing to differ."),
    ("another order for 2 rows or more", 6, lambda p, x, y: ulp(y) if len(x) > 1 else y, OTHER,
     "Rows have other bits alone than among others here, in the last place. Compare with each row alone, x_NK[n : n + 1], and compare bits, not with a tolerance "
     "(np.allclose)."),
    ("another order for exactly 3 rows", 5, at(slice(None), 3), OTHER, "The bits differ in the product of 3 rows only: try every number of rows, 1, ..., N."),
    ("another order for all N rows", 6, at(slice(None), 6), OTHER, "The bits differ in the product of all 6 rows only: n goes up to N."),
    ("another order in row 3 of 4", 6, at(slice(3, None), 4), OTHER, "The bits of row 3 differ in the product of 4 rows only: compare all rows, not only the first."),
    ("another order from row 4 on", 7, from_row(4), OTHER,
     "Row 4 has the same bits in every product that has it, and other bits alone, where it is row 0: compare with each row alone, x_NK[n : n + 1]."),
    ("other bits in one element", 5, at((slice(2, 3), slice(1, 2)), 5), OTHER, "One element of one row differs: compare all rows and all columns, and not sums of a row, which hide it."),
    ("a scale of all rows", 6, numbers, OTHER, "The bits of a row depend on the numbers in the others here."),
    ("other bits in every call", 3, restless, OTHER,
     "This product gives other bits in every call. Call it again for the first n rows, also for n = 1, instead of comparing a result with itself."),
    ("NaN in every row", 4, not_a_number, SAME, "Every row has a NaN, always with the same bits: NaN == NaN is False, so compare the bits, y.view(np.int32)."),
    ("-0.0 in a product of 2 rows", 3, signed, OTHER, "A 0.0 alone is -0.0 in the product of 2 rows: they are equal as numbers, and have other bits. Compare y.view(np.int32)."),
)  # fmt: skip


@exercise(
    "35.5", "row_invariant",
    first_step="alone = [product(x_NK[n : n + 1])[0] for n in range(len(x_NK))] are the bits to compare with.",
    kernel=False,
)  # fmt: skip
def row_invariant(e):
    def draw(rng):
        N = int(rng.integers(4, 9))
        n = int(rng.integers(2, N + 1))
        row = int(rng.integers(0, n))
        what = f"another order in row {row} of {n}, with {N} rows to try"
        same = rng.random() < 0.3
        if same:
            return "one order", N, unchanged, SAME, PLANTED[0][4]
        return what, N, at(slice(row, row + 1), n), OTHER, f"The bits of row {row} differ in the product of {n} rows."  # fmt: skip

    for what, N, change, answer, why in e.cases(PLANTED, draw, times=3):
        x, w = np.asarray(e.normal(N, 12)), np.asarray(e.normal(3, 12)).astype(np.float64)
        given, product = x.copy(), Product(e, w, change)
        got = e.call(
            lambda x, product=product: product(x), given, case=f"{N} rows, a product with {what}"
        )
        e.need(got is not None, "Nothing is returned: end with `return` and True or False.")
        e.need(
            isinstance(got, (bool, np.bool_)),
            f"A {type(got).__name__} is returned: return one True or False, as from np.array_equal.",
        )
        e.need(np.array_equal(given, x), "x_NK was changed.")
        e.need(product.calls, "product was not called: its bits can only be found by calling it.")
        e.need(
            bool(got) == answer,
            f"{bool(got)} is returned; expected {answer}.\n{why}",
        )
        if answer == SAME and N > 1:
            missing = sorted(set(range(1, N + 1)) - set(product.sizes))
            e.need(
                not missing,
                f"True is returned, but no product of n rows was tried for n = {', '.join(map(str, missing))}: for n in range(1, N + 1).",
            )
