"""Exercises of lesson 19: decode attention with split keys."""

import itertools

import numpy as np

from .attempt import exercise


def parts_of(q, k, v, scale, chunk):
    """-> m (S,), l (S,), acc (S, D)"""
    m, total, acc = [], [], []
    for i in range(0, len(k), chunk):
        s = k[i : i + chunk] @ q * scale
        p = np.exp(s - s.max())
        m.append(s.max())
        total.append(p.sum())
        acc.append(p @ v[i : i + chunk])
    return np.array(m), np.array(total), np.array(acc)


def unshrunk(q, k, v, scale, chunk):
    """-> l (S,), acc (S, D) if the running sums are never multiplied by exp(old m - new m)"""
    total, acc = [], []
    for i in range(0, len(k), chunk):
        s = k[i : i + chunk] @ q * scale
        p = np.exp(s - np.maximum.accumulate(s))
        total.append(p.sum())
        acc.append(p @ v[i : i + chunk])
    return np.array(total), np.array(acc)


@exercise(
    "19.1", "partial_kernel",
    first_step="lane d holds channel d of the query. For each key of this block, the score is warp_sum(q k) * scale, the same in all lanes.",
    allow=("warp_sum",),
    hints={
        "CollectiveError": "All 32 lanes must call warp_sum, once per key: move it outside any `if` that depends on the lane.",
        "DeadlockError": "All 32 lanes must call warp_sum: all lanes loop over the same keys.",
        "OutOfBoundsError": "The last block has fewer keys: stop at k_ND.shape[0].",
        "RaceError": "One lane writes m and l; lane d writes acc[s, d].",
    },
)  # fmt: skip
def partial_kernel(e):
    fixed = (4, 4, 1.0), (10, 4, 1.0), (7, 3, 8.0)
    for n, chunk, big in e.cases(fixed, lambda rng: (*rng.integers((8, 2), (20, 6)), 1.0)):
        q, k, v = e.normal(32, scale=big), e.normal(n, 32, scale=big), e.normal(n, 32)
        S = -(-n // chunk)
        m, total, acc = e.blank(S), e.blank(S), e.blank(S, 32)
        scale = np.float32(0.18)
        case = f"{n} keys, {chunk} per block" + (", scores up to a hundred" if big > 1 else "")
        trace = e.run(S, 32, m, total, acc, q, k, v, scale, np.int64(chunk), case=case, trace=True)
        reads = trace.of(e.name(k), write=False)
        blocks = {x.block[0] for x in reads}
        wide = [np.asarray(a).astype(np.float64) for a in (q, k, v)]
        want = parts_of(*wide, float(scale), chunk)
        scores = wide[1] @ wide[0] * float(scale)
        grown = unshrunk(*wide, float(scale), chunk)
        alone = wide[0][0] * wide[1][:, 0] * float(scale)
        first = lambda x: np.array([x[i : i + chunk].max() for i in range(0, n, chunk)])
        e.same("m", m, want[0], {
            "The scores are not scaled: multiply them by scale.": want[0] / float(scale),
            "This is the product of one channel: the score is the sum over all 32 lanes, warp_sum(q k).": first(alone),
            "Every block has the maximum over all keys: a block must use only its own keys.": lambda got: S > 1 and np.allclose(got, scores.max(), 1e-4),
            "m is the largest score, and some scores here are negative: start with minus infinity.": np.maximum(want[0], 0),
            "This is the last score of the block: m is the largest.": scores[[min(i + chunk, n) - 1 for i in range(0, n, chunk)]],
        }, rtol=1e-4)  # fmt: skip
        raw = np.array([np.exp(scores[i : i + chunk]).sum() for i in range(0, n, chunk)])
        e.same("l", total, want[1], {
            "When a larger score appears, the running l must be multiplied by exp(old m - new m).":
                grown[0],
            "The first key of each part is missing: block s starts with key s * chunk.":
                np.array([np.exp(scores[i + 1 : i + chunk + 1] - scores[i + 1 : i + chunk + 1].max(initial=-1e30)).sum()
                          for i in range(0, n, chunk)]),
            "Subtract m before exp.": raw,
        }, rtol=1e-3)  # fmt: skip
        e.same("acc", acc, want[2], {
            "acc was divided by l: leave the division to the merge, which needs both.": want[2] / want[1][:, None],
            "When a larger score appears, acc must be multiplied by exp(old m - new m), like l.": grown[1],
            "Only lane 0 wrote its channel: every lane d writes acc[s, d], outside the `if`.":
                lambda got: np.isnan(got[:, 1:]).all() and not np.isnan(got[:, 0]).any(),
            "acc is the sum of the weights times the VALUES, v[i, d].": parts_of(wide[0], wide[1], wide[1], float(scale), chunk)[2],
        }, rtol=1e-3, atol=1e-5)  # fmt: skip
        e.need(
            len(blocks) == S,
            f"The values are right, but {len(blocks)} of {S} blocks read the keys, and the others do nothing. The point of splitting the "
            "keys is that all blocks work at the same time: block s computes part s, and no other.",
        )
        times = len(reads) // k.size
        e.need(
            all(x.index // 32 // chunk == x.block[0] for x in reads),
            f"The values are right, but the keys are read {times} times over: block s must read only the keys of part s.",
        )
        e.need(
            len({(x.index, x.thread) for x in reads}) == k.size,
            f"The values are right, but the keys are read {times} times over: several lanes read the same number. Lane d reads channel d of a key, and "
            "warp_sum adds the 32 products.",
        )
        if times > 1:
            e.remark(
                f"Each key is read {times} times. With a running maximum, and sums that are multiplied by exp(old m - new m), once is enough."
            )


@exercise(
    "19.2", "merge",
    first_step="M is the largest m. Both l and acc of part i are multiplied by exp(m_i - M).",
    kernel=False,
)  # fmt: skip
def merge(e):
    fixed = (4, 4, 1.0), (8, 4, 1.0), (9, 4, 1.0), (12, 3, 5000.0)
    for n, chunk, big in e.cases(fixed, lambda rng: (*rng.integers((8, 2), (20, 6)), 1.0)):
        q, k, v = (
            np.asarray(e.normal(*s, scale=b)).astype(np.float64)
            for s, b in (((3,), 1.0), ((n, 3), big), ((n, 3), 1.0))
        )
        m, total, acc = parts_of(q, k, v, 1.0, chunk)
        empty = len(m) > 2
        if empty:  # a part without keys, last or first
            at = 0 if big > 1 else len(m)
            m, total, acc = (
                np.insert(a, at, x, 0) for a, x in ((m, -np.inf), (total, 0), (acc, 0))
            )
        case = (
            f"{n} keys in parts of {chunk}"
            + (", and an empty part (m = -inf, l = 0)" if empty else "")
            + (", large scores" if big > 1 else "")
        )
        with np.errstate(all="ignore"):
            got = e.call(m.copy(), total.copy(), acc.copy(), case=case)
        s = k @ q
        p = np.exp(s - s.max())
        want = p @ v / p.sum()
        share = np.exp(m - m.max())
        with np.errstate(all="ignore"):
            mean = np.nanmean(acc / total[:, None], 0)
        e.same("o", got, want, {
            "This is the mean of the parts. A part with larger scores must count more: weight it by exp(m_i - M).": mean if len(m) > 1 else np.empty(0),
            "l was not rescaled: multiply both sums by exp(m_i - M).": (share[:, None] * acc).sum(0) / total.sum() if len(m) > 1 else np.empty(0),
            "acc was not rescaled: multiply both sums by exp(m_i - M).": acc.sum(0) / (share * total).sum() if len(m) > 1 else np.empty(0),
            "Only the part with the largest m is used: the others count too, with the factor exp(m_i - M).":
                acc[m.argmax()] / total[m.argmax()] if len(m) > 1 else np.empty(0),
            "Divide by the sum of the rescaled l.": (share[:, None] * acc).sum(0) if len(m) > 1 else acc[0],
            "Neither sum was rescaled: multiply both acc and l of part i by exp(m_i - M).": acc.sum(0) / total.sum() if len(m) > 1 else np.empty(0),
            "The parts are weighted by exp(m_i - M) alone: the weight of part i is exp(m_i - M) l_i.":
                (share[:, None] * acc / total[:, None]).sum(0) / share.sum() if len(m) == 2 else np.empty(0),
            "The exponent is m_i - M, not M - m_i: the part with the largest score has factor 1, the others less.":
                (acc / share[:, None]).sum(0) / (total / share).sum() if len(m) == 2 else np.empty(0),
            "The NaN comes from the empty part. If M is the largest m, exp(-inf - M) is 0; but 0 / 0 is NaN: sum over the parts first, "
            "then divide once at the end.":
                lambda got: empty and big == 1 and np.isnan(got).any(),
            "exp overflows: subtract the largest m first, which is that of any part. M is not 0, not the mean, and not the m of the first part, which "
            "may be empty (m = -inf).": lambda got: big > 1 and not np.isfinite(got).all(),
        }, rtol=1e-6)  # fmt: skip


@exercise(
    "19.3", "splits",
    first_step="how many parts are there? As many as there are chunks, but at most `most`. Then make the parts equal; the last may be shorter.",
    kernel=False,
)  # fmt: skip
def splits(e):
    fixed = (
        (10, 4, 8),
        (256, 256, 32),
        (257, 256, 32),
        (10000, 256, 32),
        (1, 256, 32),
        (9, 2, 4),
        (17, 2, 8),
    )
    draw = lambda rng: tuple(rng.integers((1000, 2, 5), (5000, 200, 40)))
    for n, chunk, most in e.cases(fixed, draw, times=5):
        got = e.call(
            n,
            chunk,
            most,
            case=f"{n} keys, one part per {chunk} keys (rounded up), at most {most} parts",
        )
        e.need(
            isinstance(got, list) and all(isinstance(x, tuple) and len(x) == 2 for x in got),
            "Return a list of pairs (begin, end).",
        )
        used = min(most, -(-n // chunk))
        flat = [x for pair in got for x in pair]
        e.need(all(a < b for a, b in got), f"A part has no keys: omit it. The parts are {got}.")
        e.need(
            flat and flat[0] == 0 and flat[-1] == n,
            f"The parts go from {flat[0] if flat else '-'} to {flat[-1] if flat else '-'}; they must cover all keys from 0 to {n}.",
        )
        e.need(
            all(a[1] == b[0] for a, b in itertools.pairwise(got)),
            "The parts overlap or leave a gap: each part begins where the previous one ends.",
        )
        e.need(len(got) <= most, f"There are {len(got)} parts; at most {most} are allowed.")
        e.need(
            len(got) <= used,
            f"There are {len(got)} parts for {n} keys; at most {used} are allowed, one per {chunk} keys (rounded up).",
        )
        e.need(
            2 * len(got) >= used,
            f"There are only {len(got)} parts where {used} blocks could work: at least half of them must get a part.",
        )
        sizes = [b - a for a, b in got]
        e.need(
            max(sizes) - min(sizes[:-1] or sizes) == 0,
            f"The parts have {sizes[:5]} keys: all parts but the last must be equal.",
        )
