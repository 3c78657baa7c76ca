"""Exercise of lesson 44: a queue."""

import numpy as np

from .attempt import exercise
from .lesson_27 import judged


def served(arrivals, seconds, slots, choose=min, begin=max, free=lambda start, n, arrival, was: start + n):  # fmt: skip
    """The right answer. choose: the slot.  begin: of arrival and the slot's time.  free: when the slot is free again"""
    free_at, starts = [0.0] * slots, []
    for arrival, n in zip(arrivals, seconds):
        slot = free_at.index(choose(free_at))
        was = free_at[slot]
        starts.append(begin(arrival, was))
        free_at[slot] = free(starts[-1], n, arrival, was)
    return starts


def in_turns(arrivals, seconds, slots):
    free_at, starts = [0.0] * slots, []
    for i, (arrival, n) in enumerate(zip(arrivals, seconds)):
        starts.append(max(arrival, free_at[i % slots]))
        free_at[i % slots] = starts[-1] + n
    return starts


def in_batches(arrivals, seconds, slots):
    starts, now = [], 0.0
    pairs = list(zip(arrivals, seconds))
    for group in (pairs[i : i + slots] for i in range(0, len(pairs), slots)):
        begin = [max(now, arrival) for arrival, _ in group]
        starts += begin
        now = max(a + n for a, (_, n) in zip(begin, group))
    return starts


def shortest_first(arrivals, seconds, slots):
    """Of those that wait, the shortest is served next."""
    free_at = [0.0] * slots
    starts = [0.0] * len(arrivals)
    left = set(range(len(arrivals)))
    while left:
        now = max(min(free_at), min(arrivals[i] for i in left))
        chosen = min((i for i in left if arrivals[i] <= now), key=lambda i: (seconds[i], i))
        slot = free_at.index(min(free_at))
        starts[chosen], free_at[slot] = now, now + seconds[chosen]
        left.remove(chosen)
    return starts


QUEUE = {
    "Requests start before they arrive: the start is the later of two times, the arrival and the time at which a slot is free.":
        lambda a, s, c: served([0.0] * len(a), s, c),
    "These are the arrivals: a request waits while all slots are occupied.": lambda a, s, c: list(a),
    "One request is served at a time: there may be several slots, and the next request takes the one that is free FIRST (min, not max).":
        lambda a, s, c: served(a, s, 1),
    "Request i takes slot i % slots (round robin), though another slot may be free earlier: take the one that is free first.": in_turns,
    "This is static batching: a slot is free as soon as its own request has ended.": in_batches,
    "The shortest request is served first: serve them in the order of arrival.": shortest_first,
    "These are the times at which the requests end: return when they start.": lambda a, s, c: [x + n for x, n in zip(served(a, s, c), s)],
    "These are the waiting times: return when the requests start, not how long they wait.":
        lambda a, s, c: [x - y for x, y in zip(served(a, s, c), a)],
    "A slot is free `seconds` after its request STARTED; here the time is added to the time at which the slot was free before.":
        lambda a, s, c: served(a, s, c, free=lambda start, n, arrival, was: was + n),
    "A slot is free `seconds` after its request STARTED; here the time is counted from the arrival.":
        lambda a, s, c: served(a, s, c, free=lambda start, n, arrival, was: arrival + n),
    "The start is the LATER of arrival and free slot: max, not min.": lambda a, s, c: served(a, s, c, begin=min),
}  # fmt: skip


class Times(list):
    """Times that are equal within rounding."""

    def __eq__(self, other):
        same_size = isinstance(other, list) and len(self) == len(other)
        return same_size and bool(np.allclose(self, other, rtol=1e-9, atol=1e-9))

    __hash__ = None


def why_queue(arguments, want, got):
    arrivals, seconds, slots = arguments
    if len(got) != len(want):
        return f"There are {len(want)} requests, {len(got)} times were returned."
    i = next(i for i, (x, y) in enumerate(zip(got, want)) if abs(x - y) > 1e-9)
    if got[i] < arrivals[i]:
        return f"Request {i} starts at {got[i]:g} s, before it arrives at {arrivals[i]:g} s."
    running = sum(x <= got[i] < x + n for x, n in zip(got[:i], seconds))
    if got[i] < want[i] and running >= slots:
        return f"Request {i} starts at {got[i]:g} s, when all {slots} slots are occupied by earlier requests."
    if got[i] > want[i]:
        return f"Request {i} waits until {got[i]:g} s, but has arrived, and a slot is free, at {want[i]:g} s."
    return f"Request {i} must start at {want[i]:g} s: when it has arrived and one of {slots} slots is free."


@exercise(
    "44.1", "start_times",
    first_step="keep the time from which each slot is free, as in 21.1. A request starts at the later of two times: which?",
    hints={
        "IndexError": "The lists may be empty, and there may be more slots than requests.",
        "ValueError": "The lists may be empty, and there may be more slots than requests.",
    },
    kernel=False,
)  # fmt: skip
def start_times(e):
    fixed = [
        ([0, 2.5, 5, 7.5], [2, 2, 2, 2], 1), ([0, 0.5, 1, 7.5], [2, 2, 2, 2], 1), ([0, 0, 0, 0], [3, 1, 2, 1], 2),
        ([0, 1, 2, 3, 4, 5], [9, 1, 1, 1, 1, 1], 2), ([5, 5], [1, 1], 1), ([1, 2, 3], [4, 4, 4], 8), ([], [], 3), ([4], [1], 1),
        ([0, 0.1, 0.2, 0.3, 9], [5, 4, 1, 2, 1], 2), ([0, 1, 20, 20.5, 21], [3, 3, 3, 1, 1], 1), ([0, 0, 1, 2], [2, 0, 2, 2], 2),
    ]  # fmt: skip
    rng = e.rng
    for _ in range(8):
        n, slots = int(rng.integers(7, 12)), int(rng.integers(1, 4))
        arrivals = np.cumsum(rng.exponential(1 / slots, n)).round(2).tolist()
        fixed.append((arrivals, rng.exponential(1.0, n).round(2).tolist(), slots))
    cases = [(f"arrivals {a}, seconds {s}, {c} slots", (a, s, c)) for a, s, c in fixed]

    def read(result):
        e.need(result is not None, "Nothing is returned: return the list of start times.")
        e.need(
            isinstance(result, (list, tuple, np.ndarray))
            and np.ndim(result) == 1
            and all(np.isreal(x) for x in result),
            "Return one time per request, as a list of numbers.",
        )
        return Times(map(float, result))

    judged(e, cases, read, served, QUEUE, why_queue)
