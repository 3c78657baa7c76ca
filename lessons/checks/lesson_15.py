"""Exercises of lesson 15: data parallel."""

import inspect
from collections import Counter
from itertools import pairwise

import numpy as np

from .attempt import Wrong, exercise


def double(a):
    return np.asarray(a).astype(np.float64)


# ----------------------------------------------------------------------------- 15.1
@exercise(
    "15.1", "share",
    first_step="which targets count? total(...) of their number on this rank is their number on all ranks.",
    kernel=False,
)  # fmt: skip
def share(e):
    for counts in e.cases(((3, 1, 1), (4, 4), (2, 0)), lambda rng: (1, *rng.integers(0, 5, 3))):
        N, R = 4, len(counts)
        w, x, t = double(e.normal(3)), double(e.normal(R, N, 3)), double(e.normal(R, N))
        for r, n in enumerate(counts):
            t[r, n:] = np.nan
        count = sum(counts)
        terms = [2 * (x[r, :n] @ w - t[r, :n]) @ x[r, :n] for r, n in enumerate(counts)]
        got = []
        for r, n in enumerate(counts):
            asked = []

            def total(value, asked=asked, n=n):
                asked.append(value)
                if np.size(value) == 1 and np.sum(value) == n:
                    return np.full(np.shape(value), count)[()]
                return value * R  # whatever it is, assume that the other ranks pass the same value

            e.case(f"{count} targets on {R} ranks, {n} of them on this rank")
            got.append(e.call(x[r].copy(), t[r].copy(), w.copy(), total))
            e.need(
                got[r] is not None and np.shape(got[r]) == (3,), "Return one array of shape (I,)."
            )
            e.need(len(asked) == 1, f"total was called {len(asked)} times: every rank must call it once, with its number of targets."
                   + (" Without it, a rank does not know how many targets the others have." if not asked else ""))  # fmt: skip
            e.need(np.size(asked[0]) == 1 and np.sum(asked[0]) == n,
                   f"total was called with {asked[0]}; this rank has {n} targets that are not NaN.")  # fmt: skip
        want = terms[0] / count
        with np.errstate(all="ignore"):
            e.same("share of rank 0", double(got[0]), want, {
                "The share is NaN: tokens without a target must not enter the sum. Select the valid ones first.": lambda g: np.isnan(g).any(),
                "The sum is divided by the number of this rank's targets. The share is of the WHOLE batch: divide by total(...).":
                    terms[0] / counts[0],
                "That is the mean over ranks of the ranks' means, which is right only if all ranks have the same number of targets.":
                    terms[0] / counts[0] / R,
                "The sum is not divided by the number of targets.": terms[0],
                "A token without a target is treated as if its target were 0: its error must not enter the sum. Select the valid ones first.":
                    2 * (x[0] @ w - np.nan_to_num(t[0])) @ x[0] / count,
                "The sign is wrong: the derivative of (x w - t)^2 is 2 (x w - t) x.": -want,
                "The factor 2 of the derivative of a square is missing.": want / 2,
                "There is an extra division by the number of ranks: the shares are added, not averaged.": want / R,
            }, rtol=1e-6)  # fmt: skip
        e.same("sum of the shares", sum(map(double, got)), sum(terms) / count, rtol=1e-6)


# ----------------------------------------------------------------------------- 15.2
BARRIER = "Put a barrier, `yield`, between the two halves: the other ranks' parts are final only after it."


@exercise(
    "15.2", "all_reduce",
    first_step="which part of the array does this rank sum for all ranks? It reads that part from every other rank.",
    kernel=False,
)  # fmt: skip
def all_reduce(e):
    draw = lambda rng: (world := rng.integers(2, 6), world * rng.integers(1, 5))
    for world, n in e.cases(((2, 4), (4, 8), (3, 9), (1, 3)), draw):
        given = [np.asarray(e.normal(n)).copy() for _ in range(world)]
        arrays, moved = [x.copy() for x in given], Counter()
        e.case(f"{world} ranks, {n} elements")

        def reader(me, arrays=arrays, moved=moved):
            def read(rank, a, b):
                e.need(
                    rank in range(world), f"There is no rank {rank}: ranks are 0 to {world - 1}."
                )
                e.need(0 <= a <= b <= n, f"read({rank}, {a}, {b}): the arrays have {n} elements.")
                if rank != me:
                    moved[me] += b - a
                return arrays[rank][a:b].copy()

            read.__qualname__ = "read"
            return read

        ranks = []
        for me in range(world):
            with e.on_rank(me):
                ranks.append(e.call(me, world, arrays[me], reader(me)))
        run(e, ranks)
        want, parts = (
            sum(map(double, given)),
            [slice(n // world * r, n // world * (r + 1)) for r in range(world)],
        )
        for me in range(world):
            stale, alone = want.copy(), double(given[me])
            for r, p in enumerate(parts):
                stale[p] = want[p] if r <= me else given[r][p]
            alone[parts[me]] = want[parts[me]]
            mine, others = parts[me], np.ones(n, bool)
            others[mine] = False
            added = want + np.where(others, double(given[me]), 0)
            e.same(f"array of rank {me}", arrays[me], want, {
                f"The parts owned by later ranks were copied before they were summed. {BARRIER}": stale,
                "Only this rank's own part is a sum: in the second half, copy the other parts from their owners.": alone,
                "In the second half, copy the other ranks' sums with own_n[...] = ...; do not add them to this rank's own numbers.": added,
                "The array is unchanged: add and copy in place, own_n[...] = ...": given[me],
                "That is the mean: return the sum.": want / world,
                "That is the sum without this rank's own array.": want - given[me],
                "The owner's own numbers are in the sum twice: add only the parts of the OTHER ranks to its own.":
                    lambda got, me=me, mine=mine: me == 0 and np.allclose(got[mine], (want + given[0])[mine], 1e-5, 1e-5),
                "Each rank's own part was read. In the first half, read the SAME part from every rank: the one that this rank owns.":
                    lambda got, mine=mine: np.allclose(got[mine], sum(double(given[r][p]) for r, p in enumerate(parts)), 1e-5, 1e-5),
                "In the second half, store what you read from a rank in that rank's part of the array, not in this rank's own.":
                    lambda got, me=me, mine=mine, others=others: np.array_equal(got[others], given[me][others])
                    and any(np.allclose(got[mine], want[p], 1e-5, 1e-5) for p in parts),
            }, rtol=1e-5, atol=1e-5)  # fmt: skip
        for me in range(1, world):
            e.need(np.array_equal(arrays[me].view(np.uint32), arrays[0].view(np.uint32)),
                   f"The sums are right, but rank {me} does not have the same bits as rank 0: they added in different orders. Let each element "
                   "be summed by one rank, its owner, and copied by the others.")  # fmt: skip
        least = 2 * (world - 1) * (n // world)
        e.need(moved[0] <= least, f"The sums are right, but rank 0 reads {moved[0]} elements where {least} are enough: in each half it needs one part "
               f"of {n // world} from each neighbour.")  # fmt: skip


def run(e, ranks):
    """Run the ranks from barrier to barrier, one after the other"""
    for rank in ranks:
        e.need(
            inspect.isgenerator(rank),
            "The function has no `yield`, so there is no barrier. " + BARRIER,
        )
    waiting = list(enumerate(ranks))
    while waiting:
        there = []
        for me, rank in waiting:
            try:
                next(rank)
                there.append((me, rank))
            except StopIteration:
                pass
            except Wrong:
                raise
            except Exception as error:
                raise e.wrong(f"on rank {me}: {type(error).__name__}: {error}") from None
        if there and len(there) < len(waiting):
            gone = next(me for me, rank in waiting if (me, rank) not in there)
            raise e.wrong(f"Rank {there[0][0]} waits at a barrier that rank {gone} never reaches: all ranks must pass the same number of barriers. "
                          "Do not put `yield` inside a loop or an `if` that differs between ranks.")  # fmt: skip
        waiting = there


# ----------------------------------------------------------------------------- 15.3
def ready(order, spans, buckets, overlaps, final):
    """schedule, with a given rule for what lies in a bucket and for when a gradient is final"""
    left, gone, leaves = Counter(order), set(), []
    for name in order:
        left[name] -= 1
        now = []
        for i, bucket in enumerate(buckets):
            inside = [n for n, span in spans.items() if overlaps(span, bucket)]
            if i not in gone and final(left, order, inside):
                now.append(i)
        gone.update(now)
        leaves.append(now)
    return leaves


def common(span, bucket):
    return span[0] < bucket[1] and bucket[0] < span[1]


def touching(span, bucket):
    return span[0] <= bucket[1] and bucket[0] <= span[1]


def whole(span, bucket):
    return bucket[0] <= span[0] and span[1] <= bucket[1]


def starts_in(span, bucket):
    return bucket[0] <= span[0] < bucket[1]


def last(left, order, names):
    return all(left[n] == 0 for n in names)


def any_last(left, order, names):
    return any(left[n] == 0 for n in names)


def first(left, order, names):
    return all(left[n] < order.count(n) for n in names)


CASES = {
    "three parameters, one bucket each": (["c", "b", "a"], {"a": (0, 4), "b": (4, 8), "c": (8, 12)}, [(8, 12), (4, 8), (0, 4)]),
    "two parameters in one bucket": (["c", "b", "a"], {"a": (0, 4), "b": (4, 8), "c": (8, 12)}, [(4, 12), (0, 4)]),
    "a parameter in two buckets": (["b", "a"], {"a": (0, 8), "b": (8, 10)}, [(6, 10), (0, 6)]),
    "a parameter in three buckets": (["b", "a"], {"a": (0, 10), "b": (10, 12)}, [(8, 12), (4, 8), (0, 4)]),
    "a parameter that is used twice": (["a", "c", "b", "a"], {"a": (0, 4), "b": (4, 8), "c": (8, 12)}, [(8, 12), (4, 8), (0, 4)]),
}  # fmt: skip


@exercise(
    "15.3", "schedule",
    first_step="how many additions to each parameter remain? After each one, look for the buckets whose parameters have none left.",
    kernel=False,
)  # fmt: skip
def schedule(e):

    def draw(rng):
        names, edges = list("abcdef"), np.cumsum([0, *rng.integers(1, 9, 6)]).tolist()
        cuts = [
            0,
            *sorted(rng.choice(np.arange(1, edges[-1]), 3, replace=False).tolist()),
            edges[-1],
        ]
        order = [str(n) for n in rng.permutation([*names, *rng.choice(names, 2)])]
        buckets = list(pairwise(cuts))[::-1]
        return "random parameters", (order, dict(zip(names, pairwise(edges))), buckets)

    for case, (order, spans, buckets) in e.cases(CASES.items(), draw, times=5):
        got = e.call(list(order), dict(spans), list(buckets), case=case)
        e.need(
            isinstance(got, list) and len(got) == len(order),
            f"Return a list with one entry for each of the {len(order)} additions.",
        )
        e.need(
            all(isinstance(x, (list, tuple, set)) for x in got),
            "Each entry is the list of buckets that become ready, [] if none.",
        )
        flat = [i for x in got for i in x]
        e.need(all(isinstance(i, (int, np.integer)) and 0 <= i < len(buckets) for i in flat),
               f"You return {got}: identify a bucket by its number, 0 to {len(buckets) - 1} here.")  # fmt: skip
        got = [sorted(x) for x in got]
        want = ready(order, spans, buckets, common, last)
        if got == want:
            continue
        sent = Counter(i for x in got for i in x)
        said = f"order {order}, buckets {buckets}: you return {got}, expected {want}."
        mistakes = {
            "A parameter that lies only partly in a bucket also counts: its other part is in the next one.":
                ready(order, spans, buckets, whole, last),
            "A parameter belongs to every bucket that holds part of it, not only to the one where it begins.":
                ready(order, spans, buckets, starts_in, last),
            "(a, b) excludes b: a parameter that only touches a bucket does not lie in it.": ready(order, spans, buckets, touching, last),
            "A bucket was reported as soon as one of its parameters was final: all of them must be final.": ready(order, spans, buckets, common, any_last),
            "A parameter that is used twice receives two additions: it is final after the second.": ready(order, spans, buckets, common, first),
        }  # fmt: skip
        for text, sign in mistakes.items():
            e.need(got != sign, f"{said}\n{text}")
        e.need(
            max(sent.values(), default=0) <= 1,
            f"{said}\nReport each bucket once: remember which ones you have reported.",
        )
        e.need(len(sent) == len(buckets), f"{said}\nSome bucket is never reported.")
        raise e.wrong(said)
