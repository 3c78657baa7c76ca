"""Exercises of lesson 46: the choice of experts, slots by counting, places without atomics, the balance loss."""

import numpy as np

from xtrain.simulator import sim

from .attempt import exercise
from .lesson_27 import judged


class Arrays(tuple):
    """Arrays that equal others within rounding."""

    def __eq__(self, other):
        return isinstance(other, tuple) and len(self) == len(other) and all(map(alike, self, other))

    def __repr__(self):
        return f"({', '.join(str(np.asarray(x).round(4).tolist()) for x in self)})"

    __hash__ = None


def alike(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True)


def less_the_largest_of_all(x):
    with np.errstate(all="ignore"):
        p = np.exp(x - x.max())
        return p / p.sum(1, keepdims=True)


def softmax(x, axis=1):
    with np.errstate(all="ignore"):
        p = np.exp(x - x.max(axis, keepdims=True))
        return p / p.sum(axis, keepdims=True)


def overflowing(x):
    with np.errstate(all="ignore"):
        return np.exp(x) / np.exp(x).sum(1, keepdims=True)


def floats(e, name, x, shape):
    x = np.asarray(x)
    e.need(x.dtype.kind in "fiu", f"{name} holds {x.dtype}, not numbers.")
    e.need(x.shape == shape, f"{name} has shape {x.shape}; it must have shape {shape}.")
    return x.astype(np.float64)


# ----------------------------------------------------------------------------- 46.1
def stable(x, K):
    return np.argsort(-x, 1, kind="stable")[:, :K]


def chosen(x, K, order=stable, weights=softmax):
    experts = order(x, K)
    with np.errstate(all="ignore"):
        return Arrays((experts, weights(np.take_along_axis(x, experts, 1))))


def less_the_first(c):
    """Softmax that overflows if the first is not the largest."""
    w = np.exp(c - c[:, :1])
    return w / w.sum(1, keepdims=True)


def among_all(x, K):
    return Arrays((stable(x, K), np.take_along_axis(softmax(x), stable(x, K), 1)))


CHOOSE = {
    "Of equal logits the lower expert comes first: sorting from the smallest and reversing puts the higher one first.":
        lambda x, K: chosen(x, K, lambda x, K: np.argsort(x, 1, kind="stable")[:, ::-1][:, :K]),
    "Of equal logits the lower expert comes first: only a stable sort keeps their order, kind=\"stable\".":
        (lambda x, K: chosen(x, K, lambda x, K: np.argsort(-x, 1)[:, :K]), lambda x, K: chosen(x, K, lambda x, K: np.argsort(x, 1)[:, ::-1][:, :K])),
    "These are the K SMALLEST logits.": tuple(
        lambda x, K, w=w: chosen(x, K, lambda x, K: np.argsort(x, 1, kind="stable")[:, :K], w) for w in (softmax, less_the_first)),
    "The experts are in rising order of their logits: the largest comes first.": (
        lambda x, K: chosen(x, K, lambda x, K: stable(x, K)[:, ::-1]), lambda x, K: chosen(x, K, lambda x, K: np.argsort(x, 1, kind="stable")[:, -K:])),
    "The experts are in the order of their numbers: the one with the largest logit comes first.": lambda x, K: chosen(x, K, lambda x, K: np.sort(stable(x, K), 1)),
    "These are probabilities among ALL experts: softmax over the K chosen logits, so that the weights of a row add up to 1.": among_all,
    "The weights are the logits over their sum: softmax, with np.exp.": lambda x, K: chosen(x, K, weights=lambda c: c / c.sum(1, keepdims=True)),
    "These are the logits: return their softmax.": lambda x, K: chosen(x, K, weights=lambda c: c),
    "exp of a large logit is infinite: subtract the largest of the row first.":
        (lambda x, K: chosen(x, K, weights=overflowing), lambda x, K: Arrays((stable(x, K), np.take_along_axis(overflowing(x), stable(x, K), 1) / np.take_along_axis(overflowing(x), stable(x, K), 1).sum(1, keepdims=True)))),
    "The largest of ALL rows is subtracted: in a row far below it every exp is 0. Subtract the largest of each row.":
        lambda x, K: chosen(x, K, weights=less_the_largest_of_all),
    "The sum is that of a column: each ROW of weights adds up to 1, axis 1.": lambda x, K: chosen(x, K, weights=lambda c: np.exp(c - c[:, :1]) / np.exp(c - c[:, :1]).sum(0)),
    "The sum is that of all rows: each ROW of weights adds up to 1, sum(1, keepdims=True).": lambda x, K: chosen(x, K, weights=lambda c: np.exp(c - c[:, :1]) / np.exp(c - c[:, :1]).sum()),
    "All chosen experts have the same weight here: softmax of their logits.": lambda x, K: chosen(x, K, weights=lambda c: np.ones_like(c) / K),
}  # fmt: skip


@exercise(
    "46.1", "choose",
    first_step="experts_NK = np.argsort(-logits_NE, axis=1, kind=\"stable\")[:, :K]. Why stable, and why the minus?",
    hints={"ValueError": "A sum along axis 1 has shape (N,): keepdims=True makes it (N, 1), which divides each row."},
    kernel=False,
)  # fmt: skip
def choose(e):
    tied = np.random.default_rng(461).integers(0, 4, (3, 64)).astype(float)
    fixed = [([[1, 3, 0, 2], [2, 2, 2, 0]], 2), ([[0.5, -1, 0.5, 4]], 3), (tied, 4), ([[1000, 999, -1000], [-800, -799, -800]], 2), ([[5, 5]], 1), ([[3, 1, 3, 3]], 4)]  # fmt: skip
    for _ in range(3):
        N, E = int(e.rng.integers(2, 4)), int(e.rng.integers(4, 8))
        fixed.append((e.rng.integers(-6, 7, (N, E)) / 2, int(e.rng.integers(2, 4))))
    cases = []
    for x, K in fixed:
        x = np.array(x, float)
        shown = x.tolist() if x.size < 30 else "3 rows of 64 with many equal ones"
        cases.append((f"logits {shown}, K = {K}", (x, K)))
    shapes = iter([(len(x), K) for _, (x, K) in cases])

    def read(got):
        shape = next(shapes)
        experts, weights = e.several(got, "experts", "weights")
        experts = np.asarray(experts)
        if experts.dtype.kind == "f" and np.asarray(weights).dtype.kind in "iu":
            raise e.wrong("Return the experts first, then the weights.")
        e.need(experts.dtype.kind in "iu", f"experts holds {experts.dtype}: the experts are whole numbers.")  # fmt: skip
        return Arrays((floats(e, "experts", experts, shape), floats(e, "weights", weights, shape)))

    def other(arguments, want, got):
        if alike(got[0], want[0]):
            return "The experts are right. The weights are softmax over the chosen logits of a row."
        rows = np.sort(got[0], 1)
        if (rows[:, 1:] == rows[:, :-1]).any():
            return "An expert is chosen twice for one token: the K experts of a row are different ones."
        if alike(rows, np.sort(want[0], 1)):
            return "The right experts in the wrong order: falling logits, of equal ones the lower expert first."
        return "The K largest logits of each ROW, of equal ones the lower expert first."

    judged(e, cases, read, chosen, CHOOSE, other, unchanged="logits_NE")


# ----------------------------------------------------------------------------- 46.2
def up(c, TILE):
    return -(-c // TILE) * TILE


def slots(experts, E, TILE, size=up, padding=-1, backwards=False):
    counts = [experts.count(e) for e in range(E)]
    first = [0]
    for c in counts:
        first.append(first[-1] + size(c, TILE))
    pairs = [padding] * first[E]
    for x in range(E):
        mine = [p for p, y in enumerate(experts) if y == x]
        pairs[first[x] : first[x] + len(mine)] = mine[::-1] if backwards else mine
    return pairs, first


def changed(change):
    return lambda *arguments: change(*slots(*arguments))


def slot_of_pair(experts, E, TILE):
    pairs, first = slots(experts, E, TILE)
    return [pairs.index(p) for p in range(len(experts))], first


SLOTS = {
    "Nothing is padded: the first slot of an expert is a multiple of TILE.": lambda x, E, T: slots(x, E, T, size=lambda c, T: c),
    "An expert with exactly TILE pairs, or without any, has a whole tile of padding too many: -(-c // TILE) * TILE rounds up.":
        (lambda x, E, T: slots(x, E, T, size=lambda c, T: (c // T + 1) * T), lambda x, E, T: slots(x, E, T, size=lambda c, T: up(c + 1, T))),
    "An expert without pairs has a tile here: it has 0 slots.": lambda x, E, T: slots(x, E, T, size=lambda c, T: up(max(c, 1), T)),
    "The last pairs of an expert have no slot: round the counts UP to a multiple of TILE.": lambda x, E, T: slots(x, E, T, size=lambda c, T: c // T * T),
    "Padding is -1: 0 is a pair.": lambda x, E, T: slots(x, E, T, padding=0),
    "Padding is -1, a number in every slot.": lambda x, E, T: slots(x, E, T, padding=None),
    "The pairs of an expert are in the opposite order.": lambda x, E, T: slots(x, E, T, backwards=True),
    "The end is missing in first: E + 1 numbers.": changed(lambda pairs, first: (pairs, first[:-1])),
    "This is the inclusive sum: first begins with 0, and an expert begins after those before it.":
        (changed(lambda pairs, first: (pairs, first[1:])), changed(lambda pairs, first: (pairs, first[1:] + first[-1:]))),
    "first was changed while the pairs were placed: count up in a copy, list(first).":
        lambda x, E, T: (slots(x, E, T)[0], [f + x.count(i) for i, f in enumerate(slots(x, E, T)[1])]),
    "This is the slot of each pair: pairs has the pair in each slot, pairs[slot] = p.": slot_of_pair,
    "These are the experts: pairs has the number of the pair.": lambda x, E, T: ([x[p] if p >= 0 else -1 for p in slots(x, E, T)[0]], slots(x, E, T)[1]),
    "These are the tokens, for K = 2: pairs has the number of the pair.": changed(lambda pairs, first: ([p // 2 for p in pairs], first)),
    "All padding is at the end: it belongs behind the pairs of each expert, so that the next one begins at its first slot.":
        changed(lambda pairs, first: (sorted(pairs, key=lambda p: p < 0), first)),
    "Return pairs first, then first.": changed(lambda pairs, first: (first, pairs)),
    "These are the counts, rounded up: first is their prefix sum.": changed(lambda pairs, first: (pairs, np.diff(first).tolist())),
    "first counts tiles here: the first SLOT of each expert.": lambda x, E, T: (slots(x, E, T)[0], [f // T for f in slots(x, E, T)[1]]),
}  # fmt: skip


@exercise(
    "46.2", "expert_slots",
    first_step="counts = [0] * E, and counts[e] += 1 for each e of experts_P. How many slots do c pairs need?",
    hints={
        "IndexError": "pairs has first[E] slots, the counts rounded up and added; counts and first have a number for every expert, also for one without pairs.",
        "KeyError": "An expert may have no pair: give every expert a count, [0] * E.",
        "TypeError": "experts_P is a list, E and TILE are whole numbers; round up with //, not with /.",
    },
    kernel=False,
)  # fmt: skip
def expert_slots(e):
    fixed = [([2, 0, 2, 1, 0, 2, 2, 1], 3, 4), ([0, 0, 3, 3, 3], 4, 2), ([1] * 4, 3, 4), ([1, 0], 2, 1), ([], 2, 4), ([2, 2, 0, 2], 5, 3)]  # fmt: skip
    for _ in range(3):
        E = int(e.rng.integers(3, 6))
        experts = e.rng.integers(0, E, int(e.rng.integers(5, 14))).tolist()
        fixed.append((experts, E, int(e.rng.integers(2, 5))))
    cases = [(f"experts {x}, E = {E}, TILE = {T}", (x, E, T)) for x, E, T in fixed]

    def numbers(name, x):
        e.need(x is not None and np.ndim(x) == 1, f"{name} must be a list of numbers, got {x!r}.")
        x = list(x)
        for v in x:
            whole = v is None or isinstance(v, (int, np.integer))
            e.need(whole, f"{name} holds {v!r}, which is not a whole number." + " Divide with //." * isinstance(v, float))  # fmt: skip
        return [None if v is None else int(v) for v in x]

    def read(got):
        pairs, first = e.several(got, "pairs", "first")
        return numbers("pairs", pairs), numbers("first", first)

    def other(arguments, want, got):
        if len(got[1]) != len(want[1]):
            return f"first has {len(got[1])} numbers and must have E + 1 = {len(want[1])}: one for each expert, also for one without pairs, and the end."
        if got[1] != want[1]:
            return "Count the pairs of each expert, round each count up to a multiple of TILE, and add: first[e] is the sum of those before e."
        return "first is right. Pair p, in order, goes to the next free slot of its expert; all other slots are -1."

    judged(e, cases, read, slots, SLOTS, other, unchanged="experts_P")


# ----------------------------------------------------------------------------- 46.3
@exercise(
    "46.3", "place_kernel",
    first_step="slot = first_E[cuda.blockIdx.x]. A loop over the pairs, 32 at a time, that all lanes run: which lanes have a pair of this expert?",
    each=4,
    hints={
        "CollectiveError": "All 32 lanes must call the ballot: move it out of the `if`. A lane past the end votes False.",
        "DeadlockError": "All 32 lanes must call the ballot, equally often: loop over `start`, not over this lane's own pairs. A lane past the end votes False.",
        "OutOfBoundsError": "A lane past the end has no pair: ask p < expert_P.size before expert_P[p]. Count only LOWER lanes, without the lane itself, and write no padding from first_E[e + 1] on.",
        "RaceError between blocks": "Two blocks write the same slot: block e has the slots from first_E[e] to first_E[e + 1] - 1, and writes pairs of expert e alone.",
        "RaceError": "Two lanes write the same slot: each adds the number of LOWER lanes of the ballot, mine & ((1 << lane) - 1). Then every lane adds the number of ALL lanes of the ballot to the slot, and padding begins there. Padding that is written before the pairs needs cuda.syncwarp() after it.",
    },
)  # fmt: skip
def place_kernel(e):
    fixed = (
        ([2, 0, 2, 1, 0, 2, 2, 1], 3, 4),
        ([1] * 70, 3, 8),  # all to one expert, two without
        (np.arange(64) % 5, 5, 64),  # more padding than lanes
        (np.arange(100) * 7 % 11 % 4, 4, 8),
        ([3] * 8 + [0] * 8, 4, 8),  # no padding
    )

    def draw(rng):
        E = int(rng.integers(3, 6))
        return rng.integers(0, E, int(rng.integers(70, 120))), E, int(2 ** rng.integers(2, 5))

    for experts, E, TILE in e.cases(fixed, draw):
        experts = [int(x) for x in experts]
        want, first = (np.array(x) for x in slots(experts, E, TILE))
        pairs = e.blank(len(want), dtype=np.int32)
        given = sim(np.array(experts, np.int32)), sim(first.astype(np.int32))
        shown = f"{len(experts)} pairs, E = {E}, TILE = {TILE}"
        trace = e.run(E, 32, pairs, *given, case=shown, trace=True)
        backwards = np.array(slots(experts, E, TILE, backwards=True)[0])
        padding = want < 0
        got = np.array(pairs).view(np.ndarray)
        written = e.wrote(pairs)
        lanes = np.where(padding, -1, want % 32)
        whole = len(experts) // 32 * 32  # pairs in complete groups of a warp
        e.same("pairs", pairs, want, {
            "Padding is missing: the slots after the last pair of an expert, up to first_E[e + 1], get -1.":
                lambda x, w=written, p=padding, g=got, t=want: not w[p].any() and (g == t)[~p].all(),
            "Padding may be more than 32 slots: each lane writes every 32nd slot of it, in a loop.":
                lambda x, w=written, g=got, t=want: not w.all() and (g == t)[w].all() and w[t >= 0].all(),
            "Padding is -1.": lambda x, w=written, p=padding, g=got, t=want: w.all() and (g == t)[~p].all(),
            "The pairs of an expert are in the opposite order in each 32: count the LOWER lanes.": lambda x, g=got, b=backwards: len(b) < 33 and np.array_equal(g, b),
            "The lane was written, not the pair: p = start + lane.": lambda x, g=got, t=lanes: len(experts) > 32 and np.array_equal(g, t),
            "The expert was written, not the pair.": lambda x, g=got, t=want: np.array_equal(g[t >= 0], np.array(experts)[t[t >= 0]]),
            "Only the first 32 pairs were placed: a loop takes the others, 32 at a time.":
                lambda x, g=got, t=want: len(experts) > 32 and (g == t)[(t >= 0) & (t < 32)].all() and not np.isin(g, np.arange(32, len(experts))).any(),
            "The last pairs are missing, where fewer than 32 are left: the loop ends at expert_P.size, and lanes past it vote False.":
                lambda x, w=written, g=got, t=want, n=whole: w.all() and (g == t)[(t >= 0) & (t < n)].all() and (g[t >= n] == -1).all(),
        }, atol=0)  # fmt: skip
        e.need(
            "cuda.atomic" not in e.code,
            "The slots are right here, but an atomic counter hands them out in the order in which lanes come, which may differ from run to run. "
            "Count the lower lanes of the ballot.",
        )
        reads = len(trace.of(e.name(given[0]), write=False))
        e.need(
            reads <= E * (len(experts) + 32),
            f"The slots are right, but expert_P is read {reads / (E * len(experts)):.1f} times by each block. A lane loads its own pair once, and learns from "
            "cuda.ballot_sync which others belong to the expert.",
        )


# ----------------------------------------------------------------------------- 46.4
def balanced(
    x, counts, p_of=softmax, q_of=lambda c, N, E: E * c / N**2, inner=True, outer=True, scale=1
):
    N, E = x.shape
    with np.errstate(all="ignore"):
        p = p_of(x)
        q = q_of(counts.astype(float), N, E)
        d = q - (p * q).sum(1, keepdims=True) * inner
        return Arrays(((p * q).sum(), (p if outer else np.ones_like(p)) * d * scale))


def gradient(change):
    """The right B with another gradient."""
    return lambda x, counts: Arrays((balanced(x, counts)[0], change(x, counts)))


def columns(x, counts):
    N, E = x.shape
    p, q = softmax(x), E * counts / N**2
    return p * (q - (p * q).sum(0))


BALANCE = {
    "This is the gradient with respect to the probabilities: softmax lies between them and the logits.": gradient(lambda x, c: np.broadcast_to(x.shape[1] * c / len(x) ** 2, x.shape)),
    "The sum over j is missing in the gradient: p (q - sum_j q_j p_j). One probability can only grow if others fall.": lambda x, c: balanced(x, c, inner=False),
    "The factor p is missing in the gradient.": lambda x, c: balanced(x, c, outer=False),
    "The factor E is missing.": lambda x, c: balanced(x, c, q_of=lambda c, N, E: c / N**2),
    "1 / N is missing once: the counts are divided by N, and the sum of p over the tokens by N, too.": lambda x, c: balanced(x, c, q_of=lambda c, N, E: E * c / N),
    "The counts are divided by N, not by their sum, which is N K.": lambda x, c: balanced(x, c, q_of=lambda c, N, E: E * c / c.sum() / N),
    "The gradient has the opposite sign.": lambda x, c: balanced(x, c, scale=-1),
    "The gradient is N times too large: 1 / N of the mean belongs to it.": lambda x, c: balanced(x, c, scale=len(x)),
    "The gradient is N times too small: N**2 was divided twice.": lambda x, c: balanced(x, c, scale=1 / len(x)),
    "exp of a large logit is infinite: subtract the largest of the row first.": lambda x, c: balanced(x, c, p_of=overflowing),
    "The largest of ALL rows is subtracted: in a row far below it every exp is 0. Subtract the largest of each row.":
        lambda x, c: balanced(x, c, p_of=less_the_largest_of_all),
    "The tokens are counted here by their largest logit: take counts_E, in which a token has K experts.":
        lambda x, c: balanced(x, np.bincount(x.argmax(1), minlength=x.shape[1])),
    "All of B is subtracted in the gradient: take the sum of the token's own row, sum(1, keepdims=True).":
        gradient(lambda x, c: softmax(x) * (x.shape[1] * c / len(x) ** 2 - balanced(x, c)[0])),
    "Softmax is along axis 0 here: a row of p adds up to 1, over the experts.": lambda x, c: balanced(x, c, p_of=lambda x: softmax(x, 0)),
    "The sum over j is along axis 0 here: it is over the experts of a token.": gradient(columns),
    "These are logits where probabilities belong: p is their softmax.": lambda x, c: balanced(x, c, p_of=lambda x: x),
    "The counts alone decide here, not the probabilities: then nothing has a gradient.":
        lambda x, c: Arrays((x.shape[1] * (c / len(x) * c / len(x)).sum(), np.zeros(x.shape))),
}  # fmt: skip


@exercise(
    "46.4", "balance",
    first_step="p is softmax of each row, q = E * counts_E / N**2. B is the sum of p * q.",
    hints={"ValueError": "A sum along axis 1 has shape (N,): keepdims=True makes it (N, 1)."},
    kernel=False,
)  # fmt: skip
def balance(e):
    fixed = [
        (np.log([[0.8, 0.2], [0.8, 0.2]]), [2, 0]), (np.log([[0.8, 0.2], [0.2, 0.8]]), [1, 1]), ([[0, 0, 0, 0]], [1, 0, 1, 0]),
        ([[1, 0, -1], [0, 2, 0], [1, 1, 1]], [4, 2, 0]), ([[1000, 999, 0], [-1000, 0, -999]], [1, 1, 0]),
    ]  # fmt: skip
    for _ in range(3):
        N, E = int(e.rng.integers(3, 6)), int(e.rng.integers(3, 6))
        counts = np.bincount(e.rng.integers(0, E, 2 * N).astype(np.intp), minlength=E)
        fixed.append((e.rng.normal(size=(N, E)).round(1), counts))
    cases = [(f"logits {np.round(x, 3).tolist()}, counts {list(map(int, c))}", (np.array(x, float), np.array(c))) for x, c in fixed]  # fmt: skip
    shapes = iter([x.shape for _, (x, _) in cases])

    def read(got):
        shape = next(shapes)
        B, d = e.several(got, "B", "gradient")
        if np.shape(B) == shape and np.ndim(d) == 0:
            raise e.wrong("Return B first, then the gradient.")
        e.need(np.ndim(B) == 0, f"B must be one number, got shape {np.shape(B)}: sum over tokens and experts.")  # fmt: skip
        return Arrays((floats(e, "B", B, ()), floats(e, "the gradient", d, shape)))

    def other(arguments, want, got):
        if alike(got[0], want[0]):
            return "B is right. Its gradient: with q = E * counts / N**2, p * (q - the row's sum of p * q)."
        return "B is E times the sum over the experts of counts / N times the mean of p over the tokens."

    judged(e, cases, read, balanced, BALANCE, other, unchanged="logits_NE")
