"""Exercises of lesson 31: resident blocks, active lanes, a private histogram, a timeline of three engines."""

import numpy as np

from xtrain.simulator import sim

from .attempt import exercise

CARDS = {
    "T4": dict(warps=32, blocks=16, registers=65536, shared=64 * 1024, reserved=0),
    "A100": dict(warps=64, blocks=32, registers=65536, shared=164 * 1024, reserved=1024),
    "RTX 4090": dict(warps=48, blocks=24, registers=65536, shared=100 * 1024, reserved=1024),
    "H100": dict(warps=64, blocks=32, registers=65536, shared=228 * 1024, reserved=1024),
}


def limits(threads, registers, shared, card, unit=8, quarter=True, up=True, reserved=True):
    """The four limits: warps, blocks, registers, shared memory."""
    warps = -(-threads // 32) if up else max(1, threads // 32)
    registers = -(-registers // unit) * unit
    fit = 4 * (card["registers"] // 4 // (32 * registers)) if quarter else card["registers"] // (32 * registers)  # fmt: skip
    nbytes = shared + (card["reserved"] if reserved else 0)
    return [
        card["warps"] // warps,
        card["blocks"],
        fit // warps,
        card["shared"] // nbytes if nbytes else 999,
    ]


@exercise(
    "31.1", "resident_blocks",
    first_step="how many warps has a block, -(-threads // 32)? Then one line for each of the four limits, and the least of them.",
    hints={"ZeroDivisionError": "A block may use no shared memory, and a T4 reserves none: then it is no limit.",
           "KeyError": "A card has warps, blocks, registers, shared and reserved."},
    kernel=False,
)  # fmt: skip
def resident_blocks(e):
    fixed = (
        ("H100", 256, 24, 0),
        ("H100", 128, 168, 0),
        ("A100", 32, 32, 0),
        ("A100", 32, 96, 0),
        ("H100", 48, 40, 0),
        ("H100", 128, 33, 0),
        ("RTX 4090", 256, 64, 32 * 1024),
        ("H100", 128, 64, 57 * 1024),
        ("H100", 160, 96, 0),
        ("T4", 64, 32, 0),
        ("T4", 1024, 64, 48 * 1024),
        ("H100", 1024, 128, 0),
    )

    def draw(rng):
        name = list(CARDS)[int(rng.integers(4))]
        return name, *(int(x) for x in (rng.integers(1, 513), rng.integers(16, 200), 1024 * rng.integers(0, 40)))  # fmt: skip

    for name, threads, registers, shared in e.cases(fixed, draw, times=5):
        card, given = dict(CARDS[name]), (threads, registers, shared)
        got = e.call(*given, card, case=f"{name}, {threads} threads, {registers} registers, {shared} bytes of shared memory")  # fmt: skip
        four = limits(*given, card)
        least = lambda **other: np.array(min(limits(*given, card, **other)))
        warps = -(-threads // 32)
        fit = card["registers"] // 4 // (256 * -(-registers // 8))  # warps in a quarter
        quarters = [min(*four[:2], n, four[3]) for n in (4 * (fit // warps), fit // -(-warps // 4))]
        without = lambda i: np.array(min(x for j, x in enumerate(four) if j != i))
        e.need(got is not None, "Nothing is returned: end with `return` and a number.")
        e.need(
            np.ndim(got) == 0 and got == int(got), f"{got} is not a whole number: only whole blocks are resident."
        )  # fmt: skip
        e.same("blocks", np.array(float(got)), np.array(float(min(four))), {
            "Cards differ: take every limit from `card`, such as card[\"warps\"].":
                lambda got: "card[" not in e.code and "card.get" not in e.code,
            "A block whose warps do not fit is not resident: the answer may be 0.": lambda got, four=four: min(four) == 0 and got == 1,
            "A block of 48 threads has 2 warps: round threads / 32 up.": least(up=False),
            "Registers are given in multiples of 8: round up first.": least(unit=1),
            "A warp's registers must fit into a quarter of the multiprocessor: count warps in a quarter, times 4.": least(quarter=False),
            "The shared memory that is reserved for each block is missing.": least(reserved=False),
            "The warps of a block may be in different quarters: count the warps that fit into all four, and divide by the warps of a block at the end.":
                lambda got, quarters=quarters: got in quarters,
            "The limit of the number of blocks is missing.": without(1),
            "The limit by warps is missing.": without(0),
            "The limit by registers is missing.": without(2),
            "The limit by shared memory is missing.": without(3),
            "The least of the four limits counts, not the largest.": np.array(max(four)),
            "This is the number of warps: return blocks.": np.array(min(four) * -(-threads // 32)),
        })  # fmt: skip


@exercise(
    "31.2", "active_lanes",
    first_step="trips[i : i + 32].max() is how often the warp that begins with thread i executes the body.",
    hints={"ZeroDivisionError": "If no thread runs the body, return 0.0.",
           "ValueError": "The last warp may have fewer than 32 threads, so trips cannot always be reshaped to (-1, 32)."},
    kernel=False,
)  # fmt: skip
def active_lanes(e):
    fixed = (
        ("64 equal threads", np.full(64, 5)),
        ("one busy thread in a warp", np.array([0] * 31 + [9])),
        ("two warps, one of them short", np.array([4] * 32 + [1] * 32)),
        ("uneven warps", np.array([1] * 16 + [3] * 16 + [0] * 31 + [20])),
        ("40 threads: the last warp has 8", np.array([2] * 32 + [6] * 8)),
        ("no work", np.zeros(32, int)),
        ("no threads", np.zeros(0, int)),
    )
    draw = lambda rng: ("random trips", rng.integers(0, 50, int(rng.integers(70, 200))))
    for case, trips in e.cases(fixed, draw):
        trips = np.array(trips, np.int64)
        got = e.call(trips.copy(), case=f"{case}, n = {len(trips)}")
        warps = [trips[i : i + 32] for i in range(0, len(trips), 32)]
        most = np.array([w.max() for w in warps] or [0])
        total = max(most.sum(), 1)
        busy = [w.sum() / w.max() for w in warps if w.max()]
        want = np.array(trips.sum() / total)
        e.same("lanes", got, want, {
            "NaN: nothing is executed here. Return 0.0.": lambda got: np.isnan(got).any(),
            "This is the mean over warps: a warp that executes the body more often counts more. Divide the sums.": np.array(np.mean(busy or [0])),
            "The busiest thread of each WARP counts, 32 threads in a row, not that of all threads.":
                np.array(trips.sum() / max(trips.max(initial=0) * max(len(warps), 1), 1)),
            "All trips are divided by the trips of ONE thread, the busiest: add up the busiest thread of every warp.":
                np.array(trips.sum() / max(trips.max(initial=0), 1)) if len(warps) > 1 else np.empty(0),
            "A short warp was counted as if it had 32 threads: add up the trips that there are.":
                np.array(trips.mean() * 32 * len(warps) / total) if len(trips) % 32 else np.empty(0),
            "This is rounded to a whole number: divide with /, not //.":
                lambda got, want=want: want % 1 and got == np.floor(want),
            "This is a share: multiply by 32, or do not divide by 32.": np.array(trips.sum() / total / 32),
            "This counts lanes that run the body at all: count them in each execution.":
                np.array(np.mean([np.count_nonzero(w) for w in warps] or [0])),
            "The last, short warp is missing.": np.array(
                sum(w.sum() for w in warps if len(w) == 32) / max(sum(w.max() for w in warps if len(w) == 32), 1)),
        })  # fmt: skip


WAIT = "Set all counters to 0, wait, count, wait, and only then read them: two cuda.syncthreads()."


@exercise(
    "31.3", "histogram_kernel",
    first_step="mine = cuda.shared.array(64, int32); thread t sets mine[t] = 0, and then all threads wait.",
    hints={
        "RaceError in shared memory": WAIT + " Threads count with cuda.atomic.add: += of two threads loses one.",
        "RaceError": "Threads and blocks add to the same counters: use cuda.atomic.add.",
        "RaceError between blocks": "Blocks add to the same counters of count_T: use cuda.atomic.add.",
        "UninitializedError": "Shared memory holds anything at first: set every counter to 0, and wait before the first count.",
        "DeadlockError": "All threads must reach cuda.syncthreads(): keep it out of loops and of `if`.",
        "OutOfBoundsError": "A block has 64 threads and count_T has T counters: thread t writes only if t < T. And n < digit_n.size.",
    },
)  # fmt: skip
def histogram_kernel(e):
    fixed = (64, 4, 1), (200, 10, 4), (300, 64, 2), (5, 3, 2), (0, 5, 1), (130, 1, 3)
    for n, T, grid in e.cases(fixed, lambda rng: rng.integers((100, 2, 1), (400, 40, 4))):
        rng = e.rng if e.drawn else np.random.default_rng(n)
        digits = rng.integers(0, T, n).astype(np.intp)  # 32 bits in a browser
        before = np.arange(T) * 3 + 1
        count = sim(before.astype(np.int32))
        digit = sim(digits.astype(np.int32))
        trace = e.run(grid, 64, count, digit, case=f"n = {n}, T = {T}", trace=True)
        atomics = e.ran.global_atomics
        own = np.bincount(digits, minlength=T)
        once = np.bincount(digits[: 64 * grid], minlength=T)
        e.same("count", count, before + own, {
            "The counters had other numbers before: add to them.": own,
            "Each thread has counted one digit, but the grid is smaller than the digits: continue in steps of cuda.gridsize(1).":
                before + once if n > 64 * grid else np.empty(0),
            "Every block has counted all digits: block and thread begin with cuda.grid(1), and step by cuda.gridsize(1).":
                before + own * grid if grid > 1 else np.empty(0),
            "Every thread has counted all digits: begin with cuda.grid(1), and step by cuda.gridsize(1).": before + own * grid * 64,
            "Nothing was added to count_T.": before,
        }, atol=0)  # fmt: skip
        e.need(
            atomics <= T * grid,
            f"The counts are right, with {atomics} atomic additions to global memory; one per counter and block is enough, "
            f"{T * grid} here. Count in shared memory first.",
        )
        reads = trace.of(e.name(digit), write=False)
        e.need(
            len(reads) <= n,
            f"The counts are right, but the {n} digits are read {len(reads)} times: each thread reads its own digits only, from cuda.grid(1) in steps "
            "of cuda.gridsize(1), and counts them with an atomic in shared memory.",
        )
        busy = len({a.block for a in reads})
        e.need(
            busy >= min(grid, -(-n // 64)),
            f"The counts are right, but {busy} of {grid} blocks read digits: begin with cuda.grid(1), and step by cuda.gridsize(1).",
        )
        if n:
            e.divided(trace, digit, min(n, 64 * grid))


@exercise(
    "31.4", "overlap",
    first_step="keep three numbers, when each engine is free, all 0 at first. A part begins when its engine is free and the part before it has ended.",
    kernel=False,
)  # fmt: skip
def overlap(e):
    fixed = (
        [(2, 3, 1)],
        [(2, 3, 1), (2, 3, 1)],
        [(5, 1, 1), (5, 1, 1), (5, 1, 1)],
        [(1, 1, 6), (1, 1, 6)],
        [(1, 4, 2), (3, 0, 1), (2, 2, 2)],
        [],
    )
    draw = lambda rng: [tuple(map(int, row)) for row in rng.integers(0, 9, (int(rng.integers(3, 7)), 3))]  # fmt: skip
    drawn = lambda rng: (draw(rng),)
    for case in e.cases([(f,) for f in fixed], drawn, times=3):
        chunks = [tuple(c) for c in case[0]]
        got = e.call(list(chunks), case=f"chunks {chunks}")
        e.need(got is not None, "Nothing is returned: end with `return` and a list with three pairs per chunk.")  # fmt: skip
        try:
            times = np.array(got, float).reshape(len(got), 3, 2)
        except (ValueError, TypeError):
            raise e.wrong("Return a list with three pairs (begin, end) per chunk.") from None
        e.need(len(got) == len(chunks), f"There are {len(got)} chunks in the result and {len(chunks)} were given.")  # fmt: skip

        def plan(chain=True, engines=True, serial=False, chunks=chunks):
            free, out, end = [0, 0, 0], [], 0
            for chunk in chunks:
                ready = end if serial else 0
                for k, duration in enumerate(chunk):
                    begin = max(ready if chain else 0, free[k] if engines else 0)
                    end = begin + duration
                    free[k] = end
                    ready = end
                    out.append((begin, end))
            return np.array(out, float).reshape(-1, 3, 2)

        want = plan()
        lengths = times[..., 1] - times[..., 0]
        e.need(not chunks or np.allclose(lengths, np.array(chunks, float)),
               "A part has another duration than its chunk says: pairs are (begin, end), not (begin, duration).")  # fmt: skip
        e.same("spans", times, want, {
            "Chunk after chunk: nothing overlaps. The copy in of the next chunk begins as soon as its engine is free.": plan(serial=True),
            "An engine does two things at a time here: it must be free before it begins.": plan(engines=False),
            "A part begins before the part before it has ended: data must be there before it is used.": plan(chain=False),
            "The chunks are in another order than they were given.": lambda got: np.allclose(got[::-1], want),
            "A part does not wait for its engine: it begins at the later of two times, when its engine is free and when the part before it has ended.":
                lambda got: (got[:, 1:] < want[:, 1:]).any() and np.allclose(got[:, 0], want[:, 0]),
            "Everything begins later than necessary.": lambda got: (got >= want).all(),
        })  # fmt: skip
