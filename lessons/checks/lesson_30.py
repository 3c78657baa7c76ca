"""Exercises of lesson 30: the scan of a warp and of a block, a stable split across blocks, a radix sort."""

from collections import Counter

import numpy as np

from xtrain.simulator import sim

from .attempt import exercise

LARGE = 10_000_000  # sums beyond 2^24, where float32 rounds
WHOLE = "The sums are rounded: they were added as floats. Whole numbers stay int32, and their sums exact."
BARRIER = "Each warp writes its total to shared memory, all threads wait, and then it is read: cuda.syncthreads() in between."


def whole(e, n, low=-9, high=10):
    """Random whole numbers, int32."""
    e._arrays_made += 1
    seed = [e.seed] * e.drawn
    rng = np.random.default_rng([e._arrays_made, *map(ord, e.exercise.number), *seed])
    return sim(rng.integers(low, high, n).astype(np.int32))


def exclusive(x):
    return np.cumsum(x) - x


def by_part(x, size, f):
    """f of each block's part"""
    parts = [f(x[i : i + size]) for i in range(0, len(x), size)]
    return np.concatenate(parts)


def after(x, steps):
    """Inclusive sums of up to 32 lanes after these distances."""
    v = x.copy()
    for d in steps:
        v[d:] = v[d:] + v[:-d].copy()
    return v


def unguarded(x):
    """Inclusive sums if lanes without a partner add their own."""
    v = np.concatenate([x, np.zeros(32 - len(x), x.dtype)])
    for d in (1, 2, 4, 8, 16):
        v = v + np.concatenate([v[:d], v[:-d]])
    return v[: len(x)]


def beyond(x):
    """Inclusive sums if lane d leaves out lane 0."""
    v = x.copy()
    for d in (1, 2, 4, 8, 16):
        v[d + 1 :] = v[d + 1 :] + v[1:-d].copy()
    return v


@exercise(
    "30.1", "warp_scan_kernel",
    first_step="load own = x[i], or 0 past the end, into a variable v. Then, for d = 1, 2, 4, 8, 16, v += cuda.shfl_up_sync(FULL, v, d) in lanes >= d.",
    hints={
        "CollectiveError": "All 32 lanes must call the shuffle: move it out of the `if`, and let lanes past the end contribute 0.",
        "DeadlockError": "All 32 lanes must call the shuffle: move it out of the `if`, and let lanes past the end contribute 0.",
        "OutOfBoundsError": "Lanes past the end have no element: they contribute 0 and write nothing. Block b begins with element 32 b.",
        "RaceError between blocks": "Two blocks write the same elements: block b begins with element 32 b.",
        "RaceError": "Lanes exchange sums in registers here: cuda.shfl_up_sync(FULL, v, d). Through memory they would need a barrier between read and write.",
    },
)  # fmt: skip
def warp_scan_kernel(e):
    fixed = (32, False), (8, False), (70, False), (1, False), (40, True)
    for n, large in e.cases(fixed, lambda rng: (rng.integers(33, 130), False)):
        x = whole(e, n, -LARGE, LARGE) if large else whole(e, n)
        y = e.blank(n, dtype=np.int32)
        trace = e.run(
            -(-n // 32), 32, y, x, case=f"n = {n}" + ", large numbers" * large, trace=True
        )
        v = np.asarray(x).astype(np.int64)
        part = lambda f, v=v: by_part(v, 32, f)
        want = part(exclusive)
        inner = lambda f: part(lambda p: f(p) - p)
        e.same("y", y, want, {
            WHOLE: lambda got, large=large, want=want: large and np.allclose(got, want, 1e-6, 100),
            "This is the inclusive sum, which counts the element itself: subtract it.": part(np.cumsum),
            "This is the scan of all of x: each block scans its own 32 elements here.": exclusive(v) if n > 32 else np.empty(0),
            "Lanes l < d have no lane l - d: the shuffle gives them their own v, which they must not add.": inner(unguarded),
            "The last step is missing: 32 lanes need d = 1, 2, 4, 8 and 16.": inner(lambda p: after(p, (1, 2, 4, 8))),
            "The first step is missing: d begins with 1.": inner(lambda p: after(p, (2, 4, 8, 16))),
            "The distances are 1, 2, 4, 8, 16: each twice the one before.": inner(lambda p: after(p, (1, 2, 3, 4, 5))),
            "This is the sum of the elements AFTER: cuda.shfl_up_sync reads lane l - d, shfl_down_sync lane l + d.":
                part(lambda p: np.cumsum(p[::-1])[::-1] - p),
            "Lane d has a partner too, lane 0: lanes with l >= d add, not only those with l > d.": inner(beyond),
            "Nothing was added: use what the shuffle returns.": lambda got: n > 1 and not got.any(),
            "Lane 0 has no lane below: the shuffle gives it its own value, but its sum is 0.":
                part(lambda p: np.concatenate([p[:1], exclusive(p)[1:]])),
            "This is x itself.": v,
        }, rtol=0, atol=0)  # fmt: skip
        e.need(
            len(trace.of(e.name(x))) <= 2 * n,
            "The sums are right, but lanes read the elements of others from memory. A lane loads its own, and gets sums by shuffles.",
        )
        e.need(
            not trace.of(kind="shared"),
            "The sums are right, but go through shared memory. Lanes of a warp can read each other's registers: cuda.shfl_up_sync.",
        )


@exercise(
    "30.2", "block_scan_kernel",
    first_step="make a device function warp_scan(v) of 30.1, that returns the inclusive sum. Lane 31 of each warp then has the total of its warp.",
    hints={
        "RaceError": BARRIER + " And one thread writes total_B.",
        "UninitializedError": BARRIER + " Read only the totals of warps before your own; the others may not exist.",
        "DeadlockError": "All threads must reach cuda.syncthreads() and all lanes the shuffles: threads past the end take part with 0.",
        "CollectiveError": "All 32 lanes of a warp must call the shuffle: threads past the end take part with 0.",
        "OutOfBoundsError": "Threads past the end have no element: they contribute 0, and write nothing to y. total_B has one element per block. In shared memory each warp needs a place: 1024 threads are 32 warps.",
        "RaceError between blocks": "Two blocks write the same element: thread t of block b owns element b blockDim.x + t, and block b writes total_B[b].",
    },
)  # fmt: skip
def block_scan_kernel(e):
    fixed = (128, 64), (64, 64), (100, 32), (300, 128), (5, 96), (1100, 1024), (150, 96, LARGE)
    draw = lambda rng: (rng.integers(70, 300), 32 * rng.integers(2, 6))
    for n, block, *large in e.cases(fixed, draw):
        grid = -(-n // block)
        x = whole(e, n, -LARGE, LARGE) if large else whole(e, n)
        y, total = e.blank(n, dtype=np.int32), e.blank(grid, dtype=np.int32)
        trace = e.run(grid, block, y, total, x, case=f"n = {n}" + ", large numbers" * len(large), trace=True)  # fmt: skip
        v = np.asarray(x).astype(np.int64)
        part = lambda f, v=v, block=block: by_part(v, block, f)
        warps = lambda f: lambda p: np.concatenate([f(p[i : i + 32]) for i in range(0, len(p), 32)])

        def offset(p, skip):
            """Exclusive sums whose warps are preceded by other totals."""
            sums = np.array([p[i : i + 32].sum() for i in range(0, len(p), 32)])
            before = skip(sums)
            return np.concatenate([exclusive(p[32 * w : 32 * w + 32]) + b for w, b in enumerate(before)])  # fmt: skip

        want = part(exclusive)
        e.same("y", y, want, {
            WHOLE: lambda got, large=large, want=want: large and np.allclose(got, want, 1e-6, 100),
            "This is the inclusive sum, which counts the element itself: subtract it.": part(np.cumsum),
            "This is the scan of all of x: each block begins with 0 here, and total_B says what it adds.":
                exclusive(v) if grid > 1 else np.empty(0),
            "Each warp begins with 0: add the totals of the warps before it.": part(warps(exclusive)) if block > 32 else np.empty(0),
            "The total of the warp itself was added, too: only those before it, w < warp.": part(lambda p: offset(p, np.cumsum)),
            "Only the total of the previous warp was added: all before it count.":
                part(lambda p: offset(p, lambda s: np.concatenate([[0], s[:-1]]))),
            "The totals of all warps were added: only those before the own warp count.":
                part(lambda p: offset(p, lambda s: np.full(len(s), s.sum()))),
        }, rtol=0, atol=0)  # fmt: skip
        sums = part(lambda p: p.sum(keepdims=True))
        last = part(lambda p: exclusive(p)[-1:])
        each = np.concatenate([v, np.zeros(grid * block - n, int)]).reshape(grid, -1, 32).sum(2)
        e.same("total", total, sums, {
            WHOLE: lambda got, large=large, sums=sums: large and np.allclose(got, sums, 1e-6, 100),
            "total_B holds anything at first: one thread of a block writes it, nothing is added to it.":
                lambda got: "cuda.atomic" in e.code,
            "total_B was not written by every block: write it in thread blockDim.x - 1, whatever the size of the block.":
                lambda got, block=block, n=n: not e.wrote(total)[0],
            "The last element is missing in total_B: it is the inclusive sum of the last thread.": last,
            "total_B has the sum of the last warp alone.": each[:, -1] if block > 32 else np.empty(0),
            "total_B has the sum of the first warp alone.": each[:, 0] if block > 32 else np.empty(0),
            "Only the total of the previous warp was added: all before it count.": each[:, -2:].sum(1),
            "total_B is a sum over several blocks: it is that of block b alone.": np.cumsum(sums) if grid > 1 else np.empty(0),
            "total_B of the last block was not written: its last thread has no element of x, but knows the sum.":
                lambda got: n % block and not e.wrote(total)[-1] and e.wrote(total)[:-1].all(),
        }, rtol=0, atol=0)  # fmt: skip
        e.need(
            len(trace.of(e.name(x))) <= 2 * n,
            "The sums are right, but threads read the elements of others. Each loads its own, and gets the rest from its warp's shuffles and "
            "the warps' totals.",
        )
        busiest = Counter((a.block, a.thread) for a in trace.of(kind="shared")).most_common(1)
        e.need(
            block < 128 or not busiest or busiest[0][1] <= block,
            "The sums are right, but one thread walks through the whole block while the others wait. Each warp scans its own 32 elements, all "
            "warps at the same time, and only the totals of the warps go through shared memory.",
        )
        e.settle()
        e.divided(trace, x, n)


@exercise(
    "30.3", "scatter_kernel",
    first_step="same = cuda.match_any_sync(FULL, digit) has a bit for every lane with this digit. How many of them are lower lanes?",
    hints={
        "CollectiveError": "All 32 lanes must call cuda.match_any_sync: move it out of the `if`. Lanes past the end take part with the digit -1.",
        "DeadlockError": "All 32 lanes must call cuda.match_any_sync: move it out of the `if`. Lanes past the end take part with the digit -1.",
        "OutOfBoundsError below 0": "A lane past the end, with the digit -1, has no place: it reads and writes nothing.",
        "OutOfBoundsError": "start_TB[digit, block]: the digit comes first. Lanes past the end read and write nothing, and a lane does not count itself in its rank, only LOWER lanes.",
        "RaceError between blocks": "Two blocks write to the same place: start_TB[digit, b] is that of block b = blockIdx.x.",
        "RaceError": "Two lanes write to the same place: each adds the number of LOWER lanes with its digit to the start.",
    },
)  # fmt: skip
def scatter_kernel(e):
    fixed = (32, 4), (20, 3), (70, 5), (96, 1), (5, 40)
    for n, T in e.cases(fixed, lambda rng: rng.integers((40, 2), (140, 9))):
        digit, blocks = whole(e, n, 0, T), -(-n // 32)
        order = e.blank(n, dtype=np.int32)
        d = np.asarray(digit)
        counts = np.array([[np.sum(d[32 * b : 32 * b + 32] == t) for b in range(blocks)] for t in range(T)])  # fmt: skip
        start = exclusive(counts.ravel()).reshape(T, blocks).astype(np.int32)
        trace = e.run(blocks, 32, order, digit, sim(start), case=f"n = {n}, {T} digits", trace=True)  # fmt: skip
        want = np.argsort(d, kind="stable")
        place = np.empty(n, int)
        place[want] = np.arange(n)
        backwards = want.copy()
        for t in range(T):
            for b in range(blocks):
                a = start[t, b]
                backwards[a : a + counts[t, b]] = want[a : a + counts[t, b]][::-1]
        e.same("order", order, want, {
            "Equal digits are in the opposite order within a block: count the LOWER lanes with this digit, not the higher ones.":
                backwards,
            "This is the place of each number: number n goes to order[place], so write order[place] = n.": place,
            "The lane was written, not the number: n = 32 b + lane.": want % 32 if n > 32 else np.empty(0),
            "The digits were written, sorted: order has the numbers' positions n.": d[want],
        }, atol=0)  # fmt: skip
        e.need(
            "cuda.atomic" not in e.code,
            "The order is right here, but an atomic counter hands out places in the order in which lanes come: that is not stable, and may differ "
            "from run to run. Count the lower lanes with the same digit, with cuda.match_any_sync and cuda.popc.",
        )
        e.need(
            len(trace.of(e.name(digit))) <= 2 * n,
            "The order is right, but lanes read the digits of others from memory. A lane loads its own, and learns from cuda.match_any_sync which "
            "lanes have the same.",
        )


@exercise(
    "30.4", "radix_order",
    first_step="order = np.arange(len(keys)). The first pass splits by the lowest `bits` bits of the keys: order = order[split(digits)].",
    hints={"IndexError": "split returns positions in what it was given: order[split(digits)].",
           "TypeError": "split takes the digits alone, an array of whole numbers."},
    kernel=False,
)  # fmt: skip
def radix_order(e):
    fixed = (
        ("two digits", np.array([21, 3, 13, 33, 1, 21]), 4),
        ("small keys", np.array([3, 1, 2, 1, 0, 3]), 2),
        ("large keys", np.array([700_000, 5, 65_536, 700_000, 1 << 20, 4096, 5]), 4),
        ("equal keys", np.full(7, 9), 3),
        ("zeros", np.zeros(4, int), 5),
        ("no keys", np.zeros(0, int), 8),
        ("keys whose lowest digits are 0", np.array([48, 16, 0, 768, 32]), 4),
        ("keys of more than 32 bits", np.array([(1 << 40) + 3, 5, 1 << 33, 259]), 8),
        ("digits of one bit", np.array([6, 5, 4, 3, 2, 1, 0, 6]), 1),
    )

    def draw(rng):
        high = 2 ** int(rng.integers(6, 22))
        keys = rng.integers(0, high, int(rng.integers(20, 60)))
        return "random keys", np.concatenate([keys, keys[:5]]), int(rng.integers(1, 9))

    slow = False
    for case, keys, bits in e.cases(fixed, draw, times=2):
        keys = np.array(keys, np.int64)
        given, calls = keys.copy(), []

        def split(digits, bits=bits, keys=keys, calls=calls):
            digits = np.asarray(digits)
            e.need(digits.ndim == 1 and len(digits) <= len(keys), f"split got digits of shape {digits.shape}, expected one per key: {keys.shape}.")  # fmt: skip
            e.need(digits.dtype.kind in "iu", "split got numbers that are not whole: shift with >>, or divide with //.")  # fmt: skip
            largest = digits.max(initial=0)
            e.need(digits.min(initial=0) >= 0 and largest < 2**bits,
                   f"split got the digit {largest}, but a digit has {bits} bits: keep the lowest ones with & (2**bits - 1).")  # fmt: skip
            calls.append(digits)
            return np.argsort(digits, kind="stable")

        shown = f"{case}: keys {keys.tolist()}" if len(keys) < 9 else f"{len(keys)} {case}"
        got = e.call(given, bits, split, case=f"{shown}, digits of {bits} bits")
        want = np.argsort(keys, kind="stable")
        passes = -(-int(keys.max(initial=0)).bit_length() // bits)

        def sorted_by(shifts, compose=True, keys=keys, bits=bits):
            order = np.arange(len(keys))
            for s in shifts:
                digits = (keys[order] if compose else keys) >> s * bits & 2**bits - 1
                order = order[np.argsort(digits, kind="stable")]
            return order

        def forgotten(keys=keys, bits=bits, passes=passes):
            order = np.arange(len(keys))
            for s in range(passes):
                order = np.argsort(keys[order] >> s * bits & 2**bits - 1, kind="stable")
            return order

        def reversed_composition(keys=keys, bits=bits, passes=passes):
            order = np.arange(len(keys))
            for s in range(passes):
                order = np.argsort(keys[order] >> s * bits & 2**bits - 1, kind="stable")[order]
            return order

        many = passes > 1
        e.need(got is not None, "Nothing is returned: end with `return order`.")
        got = np.asarray(got)
        e.need(
            not len(keys) or got.dtype.kind in "iu", f"order has dtype {got.dtype}: it holds positions, whole numbers."
        )  # fmt: skip
        e.same("order", got.astype(int), want, {
            "These are the sorted keys: return their positions, order.": np.sort(keys) if len(keys) else np.empty(0),
            "Only the lowest digit was sorted by: continue with the next bits until no key has any left.": sorted_by([0]) if many else np.empty(0),
            "The highest digit was taken first. The last split decides, so the lowest digit comes first.":
                sorted_by(reversed(range(passes))) if many else np.empty(0),
            "In each pass the digits must be those of the keys in the order so far, keys[order]; these are of the keys as given.":
                sorted_by(range(passes), compose=False) if many else np.empty(0),
            "This is the order of the last digit alone: split orders what the passes before have ordered, so order = order[split(digits)].":
                lambda got: many and any(np.array_equal(got, x) for x in (forgotten(), sorted_by([passes - 1]))),
            "The orders are composed the wrong way round: split(digits) picks from the order so far, order[split(digits)].":
                reversed_composition() if many else np.empty(0),
            "Equal keys must stay in the order of their positions.": lambda got: len(got) and np.array_equal(keys[got], keys[want]),
            "Not all bits of the keys were sorted by: the keys may have any number of digits.":
                lambda got: any(np.array_equal(got, sorted_by(range(p))) for p in range(passes)),
        }, atol=0)  # fmt: skip
        e.need(len(calls) >= min(passes, 2), "The order is right, but was not made by split: every comparison is a split's.")  # fmt: skip
        whole_passes = sum(len(digits) == len(keys) for digits in calls)
        if passes and whole_passes > passes and not slow:
            slow = True
            e.remark(f"{whole_passes} passes over all keys were made where {passes} are enough: {bits} bits in each, until no key has bits left.")  # fmt: skip
        e.need(np.array_equal(given, keys), "The keys were changed: reorder a copy, keys[order].")
