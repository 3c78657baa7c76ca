"""Exercises of lesson 20: from logits to a token."""

import numpy as np

from xtrain.kernels.decoding.sampling import philox_ref

from .attempt import exercise
from .pieces import Pieces


@exercise(
    "20.1", "segment_best_kernel",
    first_step="each lane loops over its elements of the segment and keeps the best value AND its id; five shuffle steps then compare such pairs.",
    hints={
        "CollectiveError": "All 32 lanes must execute the shuffle, outside any `if`; value and id must each keep one type: int32(...) for ids.",
        "DeadlockError": "All 32 lanes must execute the shuffle: move it outside any `if`.",
        "OutOfBoundsError": "The last segment may be shorter: its ids run from 64 * b to min(64 * b + 64, V) - 1.",
        "RaceError": "Only one lane writes the result of the segment.",
    },
)  # fmt: skip
def segment_best_kernel(e):
    fixed = (64, False), (310, False), (130, True), (5, True)
    for V, ties in e.cases(fixed, lambda rng: (rng.integers(65, 400), rng.random() < 0.5)):
        x = e.normal(V, mean=-3.0)
        if ties:
            x[...] = np.minimum(np.round(np.asarray(x)), -1)
            x[3::16] = -0.5  # the best value: in two lanes, twice in each
            x[67:68] = -1  # in the second segment the lower lane has the higher id
        S = -(-V // 64)
        value, ids = e.blank(S), e.blank(S, dtype=np.int32)
        case = f"V = {V}" + (", many equal logits" if ties else "")
        trace = e.run(S, 32, ids, value, x, case=case, trace=True)
        given, x = x, np.asarray(x)
        parts = [x[i : i + 64] for i in range(0, V, 64)]
        half = [np.flatnonzero(np.arange(len(p)) % 32 < 16) for p in parts]  # lanes 0 to 15
        want = np.array([p.argmax() + 64 * i for i, p in enumerate(parts)], np.int32)
        best = np.array([p.max() for p in parts])
        behind = [64 * i + 32 * int(p[32] > p[0]) for i, p in enumerate(parts) if len(p) > 32]
        e.same("value", value, best, {
            "All logits of a segment are negative here, and a 0 has won: start with minus infinity.":
                lambda got: ((got == 0) & (best < 0)).any(),
            "Only half of the lanes were combined: five shuffle steps are needed, 16, 8, 4, 2 and 1.": np.array([p[i].max() for p, i in zip(parts, half)]),
            "Each lane read only one element: a segment has 64, so a lane has two.": np.array([p[:32].max() for p in parts]),
        })  # fmt: skip
        e.same("ids", ids, want, {
            "The id does not move with its value: shuffle the id too, and replace both together.":
                lambda got: not ties and np.array_equal(got[: len(behind)], behind),
            "Among equal logits the LOWER id wins, in each lane's own loop and in every comparison.":
                lambda got: all(0 <= i < V and x[i] == x[j] for i, j in zip(got, want)),
            "This is the index within the segment: add the start of the segment.": np.array([p.argmax() for p in parts], np.int32) if S > 1 else np.empty(0),
        })  # fmt: skip
        # a lane may read 16 bytes, so that 16 lanes read a segment
        e.divided(trace, given, sum(min(len(p), 32) for p in parts), share=4)


def best_of(x, k, segment, kept):
    """The best k ids if each segment passes on only `kept` candidates."""
    parts = [
        a + np.argsort(-x[a : a + segment], kind="stable")[:kept] for a in range(0, len(x), segment)
    ]
    ids = np.concatenate(parts)
    return ids[np.argsort(-x[ids], kind="stable")[:k]]


@exercise(
    "20.2", "top_k",
    first_step="first pass: np.argsort of each segment of `segment` logits, keep k ids. Second pass: the best k of all ids that were kept.",
    kernel=False,
)  # fmt: skip
def top_k(e):
    fixed = (
        (10, 3, 4, False, 0),
        (23, 5, 5, False, 0),
        (12, 4, 4, False, -1),
        (14, 4, 5, False, 1),
        (12, 4, 5, True, 0),
        (6, 2, 8, False, 0),
        (9, 4, 2, False, 0),
    )
    draw = lambda rng: (*rng.integers((20, 2, 5), (60, 6, 12)), rng.random() < 0.5, 0)
    for V, k, segment, ties, grows in e.cases(fixed, draw, times=4):
        x = np.asarray(e.normal(V))
        x = np.round(x) if ties else np.sort(grows * x) * grows if grows else x
        trend = {0: "", 1: ", in ascending order", -1: ", in descending order"}[grows]
        how = "logits_V[first : first + segment]"
        got = e.call(
            Pieces(x, segment, "logits", how, chosen=k * -(-V // segment)),
            k,
            segment,
            case=f"{V} logits, k = {k}, segments of {segment}"
            + (", many equal" if ties else trend),
        )
        starts = range(0, V, segment)
        kept = np.concatenate(
            [a + np.argsort(-x[a : a + segment], kind="stable")[:k] for a in starts]
        )
        want = np.argsort(-x, kind="stable")[:k]
        e.need(
            got is not None, "Nothing is returned: return the ids of the best k, the best first."
        )
        got = np.asarray(got)
        e.need(got.shape == (k,), f"Return {k} ids; here are {got.size}.")
        e.same("the ids", got, want, {
            "These are the smallest logits: sort by -x.": np.argsort(x, kind="stable")[:k],
            "The second pass chose the smallest of all candidates: sort by -x there too.":
                kept[np.argsort(x[kept], kind="stable")[:k]],
            "These are indices within a segment: add the start of the segment.": lambda got: set(got) <= set(range(segment)) and not set(want) <= set(range(segment)),
            "These are logits: return their ids.": x[want],
            "These are indices into the list of candidates: return the ids at those indices.": 
                lambda got: any(np.array_equal(got, np.argsort(-x[c], kind="stable")[:k]) for c in (kept, np.sort(kept))),
            "The last segment is missing: it may be shorter than the others.":
                lambda got: V % segment and set(want) & set(range(V // segment * segment, V)) and max(got) < V // segment * segment,
            "The ids are right, but not sorted: return the best first.": lambda got: set(got) == set(want) and not ties,
            "Among equal logits the lower id comes first: use kind='stable'.": lambda got: ties and np.array_equal(x[got], x[want]),
            "One of the best k is missing: a single segment may contain all of them, so each segment must pass on k.":
                lambda got: any(set(got) == set(best_of(x, k, segment, m)) for m in range(1, k)),
        })  # fmt: skip


@exercise(
    "20.3", "choose",
    hints={
        "IndexError": "The draw ran past the end, or no token is left. u is a share of the weights that are KEPT; k = 0 keeps all tokens; handle "
        "temperature 0 before dividing by it.",
    },
    first_step="compute the weights exp((x - largest) / temperature), the largest first. Apply top-k, then top-p, then draw with the running sum.",
    kernel=False,
)  # fmt: skip
def choose(e):
    x = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15]))  # ids in order: 1 3 4 0 2
    cases = (
        (1.0, 0, 1.0, 0.0, 1, "The first token in the order is the one with the largest weight, not the one with the lowest id."),
        (1.0, 0, 1.0, 0.45, 3, "The running sum is 0.4, 0.7, 0.85, 0.95, 1: choose the first token whose running sum EXCEEDS u."),
        (1.0, 0, 0.5, 0.9, 3, "With p = 0.5: id 1 has 0.4, which is not enough, so id 3 stays too: the token that crosses p belongs to the set."),
        (1.0, 2, 1.0, 0.9, 3, "With k = 2 only ids 1 and 3 stay, and u is a share of THEIR total weight."),
        (1.0, 1, 1.0, 0.99, 1, "With k = 1 only the best token stays."),
        (1.0, 0, 0.3, 0.99, 1, "With p = 0.3 the first token alone is enough; it always stays."),
        (1.0, 0, 1.0, 0.96, 2, "The running sum is 0.4, 0.7, 0.85, 0.95, 1: choose the first token whose running sum exceeds u."),
        (0.5, 0, 1.0, 0.6, 3, "Temperature 0.5 sharpens the distribution, because the logits are DIVIDED by it: 0.56, 0.32, 0.08, 0.04, 0.01."),
        (1.0, 3, 0.8, 0.95, 3, "Apply top-k first, then top-p to the rest: k = 3 leaves 0.85, and ids 1 and 3 reach a share of 0.8 of it."),
        (0.0, 0, 1.0, 0.99, 1, "Temperature 0 means the most likely token: do not divide by zero."),
    )  # fmt: skip
    for temperature, k, p, u, want, why in cases:
        case = f"probabilities 0.1 0.4 0.05 0.3 0.15, temperature {temperature:g}, k = {k}, p = {p:g}, u = {u:g}"
        got = e.call(x.copy(), temperature, k, p, u, case=case)
        e.need(got is not None and np.ndim(got) == 0, "Return one id.")
        e.need(int(got) == want, f"It chose {int(got)}; expected {want}.\n{why}")
    got = e.call(
        np.zeros(4),
        1.0,
        0,
        1.0,
        0.5,
        case="four equal logits, temperature 1, k = 0, p = 1, u = 0.5",
    )
    e.need(
        int(got) == 2,
        f"It chose {int(got)}; expected 2.\nThe running sum is 0.25, 0.5, 0.75, 1, and the sum at id 1 does not EXCEED u.",
    )
    got = e.call(
        x + 800,
        1.0,
        0,
        1.0,
        0.45,
        case="probabilities 0.1 0.4 0.05 0.3 0.15, 800 added to all logits, u = 0.45",
    )
    e.need(
        int(got) == 3,
        f"It chose {int(got)}; expected 3.\nexp overflows: subtract the largest logit first.",
    )
    for _ in range(25):
        V = int(e.rng.integers(3, 9))
        x, temperature = e.rng.normal(size=V), float(e.rng.uniform(0.5, 2))
        k, p, u = int(e.rng.integers(0, V)), float(e.rng.uniform(0.3, 1)), float(e.rng.random())
        w = sorted(((np.exp(z / temperature), i) for i, z in enumerate(x)), reverse=True)
        w = w[: k or V]
        stay, total = [], sum(a for a, _ in w)
        for a, i in w:  # as long as those before it have less than p
            if sum(b for b, _ in stay) < p * total:
                stay.append((a, i))
        sums = np.cumsum([a for a, _ in stay]) / sum(a for a, _ in stay)
        if np.abs(sums - u).min() < 1e-6:
            continue  # decided by rounding
        case = f"logits {x.round(3).tolist()}, temperature {temperature:.3f}, k = {k}, p = {p:.3f}, u = {u:.3f}"
        got = e.call(x.copy(), temperature, k, p, u, case=case)
        want = stay[int(np.argmax(sums > u))][1]
        e.need(
            int(got) == want,
            f"It chose {int(got)}; expected {want}.\nThe ids that stay are {[i for _, i in stay]}, with the running sum {sums.round(3).tolist()}.",
        )


@exercise(
    "20.4", "philox",
    first_step="in one round, a = M0 * c0 and b = M1 * c2 are 64-bit products. Their upper and lower halves are mixed into the new words.",
    kernel=False,
)  # fmt: skip
def philox(e):
    fixed = (
        ((1, 2, 3, 4), (5, 6)),
        ((0, 0, 0, 0), (0, 0)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2),
    )
    draw = lambda rng: (tuple(rng.integers(0, 2**32, 4)), tuple(rng.integers(0, 2**32, 2)))
    for counter, key in e.cases(fixed, draw):
        got = e.call(counter, key, case=f"counter {counter}, key {key}")
        want = philox_ref(counter, key)
        e.need(isinstance(got, (tuple, list)) and len(got) == 4, "Return four words.")
        got = tuple(got)
        kinds = [type(w).__name__ for w in got if not isinstance(w, int)]
        whole = all(isinstance(w, (int, np.integer)) for w in got)
        got = tuple(map(int, got)) if whole else got
        e.need(
            whole and (got == want or not kinds or kinds[0] == "uint64"),
            f"A word is {kinds and kinds[0]}: compute with Python's integers. The products need 64 bits without a sign, and of NumPy's integers only "
            "uint64 holds them.",
        )
        e.need(
            all(0 <= w < 2**32 for w in got),
            "A word is outside 0 .. 2^32 - 1: reduce products and keys with & 0xFFFFFFFF.",
        )
        if got == want:
            continue
        e.need(
            got != (want[2], want[3], want[0], want[1]),
            "The two halves of the result are swapped: b gives the first two words, a the last two.",
        )
        e.need(
            got != _variant(counter, key, 10, M=(0xCD9E8D57, 0xD2511F53)),
            "The multipliers are swapped: a = M0 * c0, b = M1 * c2.",
        )
        e.need(
            got != _variant(counter, key, 10, crossed=True),
            "a and b are swapped: compute the first two words from b, the last two from a.",
        )
        for rounds, said in ((9, "nine"), (11, "eleven")):
            e.need(
                got != _variant(counter, key, rounds), f"These are {said} rounds; Philox has ten."
            )
        e.need(
            got != _variant(counter, key, 10, early=True),
            "The key was changed before the first round: it changes AFTER each round.",
        )
        e.need(
            got != _variant(counter, key, 10, fixed=True),
            "The key stays the same: add W0 and W1 to it after each round.",
        )
        first = tuple(f"{w:#x}" for w in want)
        raise e.wrong(f"It returns {tuple(hex(w) for w in got)}; expected {first}.")


def _variant(
    counter, key, rounds, early=False, fixed=False, M=(0xD2511F53, 0xCD9E8D57), crossed=False
):
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        if early:
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        a, b = M[0] * c0, M[1] * c2
        a, b = (b, a) if crossed else (a, b)
        c0, c1 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF
        c2, c3 = (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        if not early and not fixed:
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3
