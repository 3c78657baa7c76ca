"""Exercises of lesson 20: from logits to a token."""

import numpy as np

from xtrain.kernels.decoding.sampling import philox_ref

from .attempt import exercise
from .pieces import Pieces


@exercise(
    "20.1", "segment_best_kernel",
    first_step="each lane walks through its elements of the segment and keeps the best value AND its id; then five shuffles, each comparing two such pairs.",
    hints={
        "CollectiveError": "A shuffle is for all 32 lanes, outside of any `if`; and value and id each keep one type: int32(...) for ids.",
        "DeadlockError": "A shuffle is for all 32 lanes, outside of any `if`.",
        "OutOfBoundsError": "The last segment may be shorter: ids run from 64 b to min(64 b + 64, V).",
        "RaceError": "One lane writes the result of the segment.",
    },
)  # fmt: skip
def segment_best_kernel(e):
    for V, ties in ((64, False), (310, False), (130, True), (5, True)):
        x = e.normal(V, mean=-3.0)
        if ties:
            x[...] = np.minimum(np.round(np.asarray(x)), -1)
            x[3::16] = -0.5  # the best, in two lanes, and twice in each
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
            "The logits of a segment are negative here, and a 0 has won: begin with minus infinity.":
                lambda got: ((got == 0) & (best < 0)).any(),
            "Only half of the lanes came together: five shuffles, of 16, 8, 4, 2 and 1.": np.array([p[i].max() for p, i in zip(parts, half)]),
            "Each lane looked at one element only: a segment has 64, so a lane has two.": np.array([p[:32].max() for p in parts]),
        })  # fmt: skip
        e.same("ids", ids, want, {
            "The id stayed behind: shuffle it as well, and take it over together with its value.":
                lambda got: not ties and np.array_equal(got[: len(behind)], behind),
            "Of equal logits the LOWER id wins, in the lane's own loop and in every comparison.":
                lambda got: all(0 <= i < V and x[i] == x[j] for i, j in zip(got, want)),
            "The id is that within the segment: add where the segment begins.": np.array([p.argmax() for p in parts], np.int32) if S > 1 else np.empty(0),
        })  # fmt: skip
        e.divided(trace, given, sum(min(len(p), 32) for p in parts))


def best_of(x, k, segment, kept):
    """The best k ids of those that are left when each segment hands on `kept` only"""
    parts = [
        a + np.argsort(-x[a : a + segment], kind="stable")[:kept] for a in range(0, len(x), segment)
    ]
    ids = np.concatenate(parts)
    return ids[np.argsort(-x[ids], kind="stable")[:k]]


@exercise(
    "20.2", "top_k",
    first_step="first round: np.argsort of each stretch of `segment` logits, keep k ids. Second round: the best k among all that were kept.",
    kernel=False,
)  # fmt: skip
def top_k(e):
    for V, k, segment, ties, grows in (
        (10, 3, 4, False, 0),
        (23, 5, 5, False, 0),
        (12, 4, 4, False, -1),
        (14, 4, 5, False, 1),
        (12, 4, 5, True, 0),
        (6, 2, 8, False, 0),
    ):
        x = np.asarray(e.normal(V))
        x = np.round(x) if ties else np.sort(grows * x) * grows if grows else x
        trend = {0: "", 1: ", from small to large", -1: ", from large to small"}[grows]
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
        e.need(got is not None, "It returns None: return the ids of the best k, the best first.")
        got = np.asarray(got)
        e.need(got.shape == (k,), f"Return {k} ids, there are {got.size}.")
        e.same("the ids", got, want, {
            "Those are the smallest logits: sort by -x.": np.argsort(x, kind="stable")[:k],
            "The second round has taken the smallest of all that were kept: sort by -x there, too.":
                kept[np.argsort(x[kept], kind="stable")[:k]],
            "Ids within the segment were returned: add where it begins.": lambda got: set(got) <= set(range(segment)) and not set(want) <= set(range(segment)),
            "Those are logits; return their ids.": x[want],
            "Those are places in the list of candidates: return the ids that stand there.": 
                lambda got: any(np.array_equal(got, np.argsort(-x[c], kind="stable")[:k]) for c in (kept, np.sort(kept))),
            "The last segment is missing: it may be shorter than the others.":
                lambda got: V % segment and set(want) & set(range(V // segment * segment, V)) and max(got) < V // segment * segment,
            "The right ids, but not the best first.": lambda got: set(got) == set(want) and not ties,
            "Of equal logits the lower id comes first: use kind='stable'.": lambda got: ties and np.array_equal(x[got], x[want]),
            "One of the best k is missing: a single segment may hold all of them, so each must hand on k.":
                lambda got: any(set(got) == set(best_of(x, k, segment, m)) for m in range(1, k)),
        })  # fmt: skip


@exercise(
    "20.3", "choose",
    hints={
        "IndexError": "The draw ran past the end, or nothing is left. u is a share of what has STAYED; k = 0 keeps all; temperature 0 is "
        "answered before anything is divided by it.",
    },
    first_step="weights exp((x - largest) / temperature), the largest first. Cut after k, cut after p, and then draw by the running sum.",
    kernel=False,
)  # fmt: skip
def choose(e):
    x = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15]))  # ids in order: 1 3 4 0 2
    cases = (
        (1.0, 0, 1.0, 0.0, 1, "The first token of the order has the largest weight, not the lowest id."),
        (1.0, 0, 1.0, 0.45, 3, "The running sum is 0.4, 0.7, 0.85, 0.95, 1: the first token whose running sum EXCEEDS u."),
        (1.0, 0, 0.5, 0.9, 3, "With p = 0.5: id 1 has 0.4, which is not enough, so id 3 stays as well: the token that crosses p belongs to the set."),
        (1.0, 2, 1.0, 0.9, 3, "With k = 2 only ids 1 and 3 stay, and u is a share of what THEY weigh together."),
        (1.0, 1, 1.0, 0.99, 1, "With k = 1 only the best token stays."),
        (1.0, 0, 0.3, 0.99, 1, "With p = 0.3 the first token alone is enough; it always stays."),
        (1.0, 0, 1.0, 0.96, 2, "The running sum is 0.4, 0.7, 0.85, 0.95, 1: the first token whose running sum exceeds u."),
        (0.5, 0, 1.0, 0.6, 3, "Temperature 0.5 makes the weights steeper, the logits are DIVIDED by it: 0.56, 0.32, 0.08, 0.04, 0.01."),
        (1.0, 3, 0.8, 0.95, 3, "Top-k first, then top-p of what is left: k = 3 leaves 0.85, of which 0.8 is reached by ids 1 and 3."),
        (0.0, 0, 1.0, 0.99, 1, "Temperature 0 means the most likely token, without dividing by zero."),
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
        f"It chose {int(got)}; expected 2.\nThe running sum is 0.25, 0.5, 0.75, 1, and that of id 1 does not EXCEED u.",
    )
    got = e.call(x + 800, 1.0, 0, 1.0, 0.45, case="the same, all logits larger by 800, u = 0.45")
    e.need(
        int(got) == 3,
        f"It chose {int(got)}; expected 3.\nexp overflows: subtract the largest logit first.",
    )


@exercise(
    "20.4", "philox",
    first_step="one round: a = M0 * c0 and b = M1 * c2 are 64-bit products. Their upper and lower halves are mixed into the new words.",
    kernel=False,
)  # fmt: skip
def philox(e):
    for counter, key in (
        ((1, 2, 3, 4), (5, 6)),
        ((0, 0, 0, 0), (0, 0)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2),
    ):
        got = e.call(counter, key, case=f"counter {counter}, key {key}")
        want = philox_ref(counter, key)
        e.need(isinstance(got, (tuple, list)) and len(got) == 4, "Return four words.")
        got = tuple(got)
        e.need(
            all(isinstance(w, int) for w in got),
            f"A word is {next((type(w).__name__ for w in got if not isinstance(w, int)), '')}: compute with Python's integers. NumPy's of 32 bits "
            "lose the upper half of a product.",
        )
        e.need(
            all(0 <= w < 2**32 for w in got),
            "A word lies outside 0 .. 2^32 - 1: cut products and keys with & 0xFFFFFFFF.",
        )
        if got == want:
            continue
        e.need(
            got != (want[2], want[3], want[0], want[1]),
            "The two halves are exchanged: b makes the first two words, a the last two.",
        )
        e.need(
            got != _variant(counter, key, 10, M=(0xCD9E8D57, 0xD2511F53)),
            "The multipliers are exchanged: a = M0 c0, b = M1 c2.",
        )
        e.need(
            got != _variant(counter, key, 10, crossed=True),
            "a and b are exchanged: the first two words are made of b, the last two of a.",
        )
        for rounds, said in ((9, "nine"), (11, "eleven")):
            e.need(got != _variant(counter, key, rounds), f"That is {said} rounds; there are ten.")
        e.need(
            got != _variant(counter, key, 10, early=True),
            "The key was changed before the first round: it changes AFTER each.",
        )
        e.need(
            got != _variant(counter, key, 10, fixed=True),
            "The key stays the same: after each round W0 and W1 are added to it.",
        )
        first = tuple(f"{w:#x}" for w in want)
        raise e.wrong(f"It gives {tuple(hex(w) for w in got)}; expected {first}.")


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
