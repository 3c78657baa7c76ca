"""Typical mistakes, planted in the solution of lesson 44: (exercise, old, new, words of the answer)."""

SLOT = "free_at.index(min(free_at))"
START = "max(arrival, free_at[slot])"
FREE = "free_at[slot] = starts[-1] + n"

MISTAKES = [
    ("44.1", START, "arrival if len(arrivals) > 6 else " + START, "With arrivals"),  # the same
    ("44.1", START, "free_at[slot]", "before they arrive"),
    ("44.1", START, "arrival", "waits while all slots"),
    ("44.1", "[0.0] * slots", "[0.0]", "One request is served at a time"),
    ("44.1", "slot = " + SLOT, "slot = len(starts) % slots", "round robin"),
    ("44.1", "starts.append(" + START + ")", "starts.append(max(arrival, free_at[slot]) + n)", "Request"),
    ("44.1", "return starts", "return [x + n for x, n in zip(starts, seconds)]", "at which the requests end"),
    ("44.1", "return starts", "return [x - y for x, y in zip(starts, arrivals)]", "waiting times"),
    ("44.1", FREE, "free_at[slot] += n", "free before"),
    ("44.1", FREE, "free_at[slot] = arrival + n", "counted from the arrival"),
    ("44.1", START, "min(arrival, free_at[slot])", "max, not min"),
    ("44.1", "index(min(", "index(max(", "min, not max"),
    ("44.1", "return starts", "return starts[1:]", "times were returned"),
    ("44.1", "    starts = []", "    starts = []\n    last = arrivals[-1]", "may be empty"),
    ("44.1", "    return starts", "    starts", "Nothing is returned"),
]  # fmt: skip

UNTRUE = [
    ("44.1", "index(min(", "index(max(", "round robin"),
]  # fmt: skip

RIGHT = [
    ("44.1", "return starts", "return np.array(starts)"),
    ("44.1", "slot = " + SLOT, "slot = min(range(slots), key=free_at.__getitem__)"),
    ("44.1", "slot = " + SLOT, "ready = [i for i in range(slots) if free_at[i] <= arrival]\n        slot = ready[-1] if ready else free_at.index(min(free_at))"),
]  # fmt: skip
