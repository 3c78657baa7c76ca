"""Typical mistakes, planted in the solutions of lesson 31: (exercise, old, new, words of the answer)."""

BY_REGISTERS = '4 * (card["registers"] // 4 // (32 * registers)) // warps'
SUM = "trips.sum() / executed if executed else 0.0"
COUNT = "cuda.atomic.add(mine, digit_n[n], 1)"
LOOP = "range(cuda.grid(1), digit_n.size, cuda.gridsize(1))"
BEGIN = "max(ready, free[engine])"
PART = "-(-digit_n.size // cuda.gridDim.x)"
CHUNKS = (
    f"range(cuda.blockIdx.x * {PART} + t, min(cuda.blockIdx.x * {PART} + {PART}, digit_n.size), 64)"
)

MISTAKES = [
    ("31.1", "-(-threads // 32)", "max(1, threads // 32)", "round threads / 32 up"),
    ("31.1", "    registers = -(-registers // 8) * 8\n", "", "multiples of 8"),
    ("31.1", BY_REGISTERS, 'card["registers"] // (32 * registers) // warps', "a quarter"),
    ("31.1", 'shared + card["reserved"]', "shared", "reserved for each block"),
    ("31.1", 'by_warps, card["blocks"], ', "by_warps, ", "number of blocks is missing"),
    ("31.1", "min(by_warps, ", "min(", "limit by warps is missing"),
    ("31.1", "by_registers, by_shared)", "by_shared)", "limit by registers is missing"),
    ("31.1", ", by_shared)", ")", "limit by shared memory is missing"),
    ("31.1", "return min", "return max", "not the largest"),
    ("31.1", "return min(", "return warps * min(", "the number of warps"),
    ("31.1", ' if bytes_ else card["blocks"]', "", "a T4 reserves none"),
    ("31.2", SUM, "trips.sum() / executed / 32 if executed else 0.0", "This is a share"),
    ("31.2", SUM, "trips.sum() / executed", "Return 0.0"),
    ("31.2", SUM, "trips.sum() / (max(trips.max(initial=0), 1) * max(-(-len(trips) // 32), 1))", "of each WARP"),
    ("31.2", SUM, "np.mean([trips[i : i + 32].sum() / max(trips[i : i + 32].max(), 1) for i in range(0, len(trips), 32) if trips[i : i + 32].max()] or [0])", "the mean over warps"),
    ("31.2", "    executed", "    trips = trips[: len(trips) // 32 * 32]\n    executed", "short warp is missing"),
    ("31.2", "    executed", "    trips.reshape(-1, 32)\n    executed", "cannot always be reshaped"),
    ("31.3", COUNT, "mine[digit_n[n]] += 1", "loses one"),
    ("31.3", COUNT, "cuda.atomic.add(count_T, digit_n[n], 1)", "Count in shared memory first"),
    ("31.3", LOOP, "range(cuda.grid(1), min(digit_n.size, cuda.gridsize(1)), cuda.gridsize(1))", "smaller than the digits"),
    ("31.3", LOOP, "range(t, digit_n.size, 64)", "Every block has counted all"),
    ("31.3", LOOP, "range(digit_n.size)", "Every thread has counted all"),
    ("31.3", "    mine[t] = 0\n", "", "set every counter to 0"),
    ("31.3", "    cuda.syncthreads()  # all counters are 0\n", "", "wait before the first count"),
    ("31.3", "    cuda.syncthreads()  # everything is counted\n", "", "two cuda.syncthreads()"),
    ("31.3", "cuda.atomic.add(count_T, t, mine[t])", "count_T[t] += mine[t]", "Blocks add to the same counters"),
    ("31.3", "if t < count_T.size:", "if True:", "only if t < T"),
    ("31.4", BEGIN, "ready", "two things at a time"),
    ("31.4", BEGIN, "free[engine]", "before it is used"),
    ("31.4", "ready, parts = 0, []", "ready, parts = max(free), []", "nothing overlaps"),
    ("31.4", "(begin, ready)", "(begin, duration)", "not (begin, duration)"),
    ("31.4", BEGIN, f"{BEGIN} + 1", "later than necessary"),
    ("31.1", "4 * (card[\"registers\"] // 4 // (32 * registers)) // warps", "card[\"registers\"] // 4 // (32 * registers) // -(-warps // 4)", "count the warps that fit into all four"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("31.1", "-(-threads // 32)", "(threads + 31) // 32"),
    ("31.2", SUM, "float(trips.sum()) / max(executed, 1)"),
    ("31.3", "if t < count_T.size:", "if t < count_T.size and mine[t] > 0:"),
    ("31.4", BEGIN, "ready if ready > free[engine] else free[engine]"),
    ("31.3", "range(cuda.grid(1), digit_n.size, cuda.gridsize(1))", CHUNKS),
]  # fmt: skip
