"""Exercises of lesson 10: correct timing, the busy share, a step that can be replayed."""

import itertools

import numpy as np

from .attempt import exercise
from .machine import Machine


def close(a, b, rtol=0.04):
    return bool(np.isclose(a, b, rtol=rtol))


@exercise(
    "10.1", "time_us",
    first_step="record an event before run() and one after it, synchronize, then take elapsed_us of the two. And what is special about the first call?",
    kernel=False,
)  # fmt: skip
def time_us(e):
    def machine(times, launch_us=10.0, compile_us=0.0, queued=0.0):
        m, turn = Machine(launch_us, compile_us), itertools.cycle(times)
        if queued:
            m.launch("something else", queued)
        return m, lambda: [m.launch(f"kernel {i}", t) for i, t in enumerate(next(turn))]

    def ask(case, want, repeats, **made):
        m, run = machine(**made)
        got = e.call(m, run, repeats, case=case)
        e.need(got is not None and np.ndim(got) == 0, f"Return one number; got {got!r}.")
        e.need(len(m.spans) > 0, "run() was never called.")
        return float(got), want

    got, want = ask("one kernel of 500 us, 1 repeat", 500, 1, times=[[500]], compile_us=300_000)
    e.same("the time", got, want, {
        "That is how long LAUNCHING takes. A launch does not wait for the kernel: use events, or synchronize before you read the clock.":
            lambda got: close(got, 10) or got == 300_010,
        "No time has passed between the two measurements: take one before run() and the other after it.": lambda got: got == 0,
        "That time comes from the real computer's clock. Use the machine's: machine.clock(), or its events.": lambda got: 0 < got < 1,
        "The time is negative: pass the earlier event to elapsed_us first.": lambda got: got < 0,
        "The first call compiles the kernel. Call run() a few times before measuring.": lambda got: got > 300_000,
        "The time includes runs that were still in the queue: synchronize after the warm-up, or use events, which are queued themselves.":
            lambda got: got > 900,
    }, rtol=0.04)  # fmt: skip
    times = [[500], [500], [40], [500], [500], [9000], [500]]
    got, want = ask(
        "one kernel of 500 us, 21 repeats, some of them disturbed", 500, 21, times=times
    )
    e.same("the time", got, want, {
        "This is the mean. One disturbed run in seven distorts it: take the median.": lambda got: 1400 < got < 2000,
        "This is the time of a single run: the smallest, the largest or the last. Take the median of all runs.": lambda got: got < 60 or close(got, 9000),
        "That is the sum over all repeats: time each run separately.": lambda got: got > 9500,
    }, rtol=0.04)  # fmt: skip
    got, want = ask("three kernels of 100, 200 and 300 us", 600, 5, times=[[100, 200, 300]])
    e.same("the time", got, want, rtol=0.04)
    got, want = ask(
        "a busy GPU: 8000 us of work are already queued", 500, 1, times=[[500]], queued=8000
    )
    e.same("the time", got, want, {
        "The time includes work that was queued earlier: use events, or synchronize before you start the clock.": lambda got: got > 2000,
    }, rtol=0.04)  # fmt: skip
    times = [int(t) for t in e.rng.integers(200, 2000, 3)]
    case = f"three kernels of {', '.join(map(str, times))} us"
    got, want = ask(case, sum(times), 3, times=[times])
    e.same("the time", got, want, rtol=0.04)


def walked(spans, back, less):
    """Wrong busy time: a span inside an earlier one moves `until` back (back), or adds a negative time (less)"""
    busy, until = 0, min(spans)[0]
    for start, end in sorted(spans):
        new = end - max(start, until)
        busy += new if less else max(0, new)
        until = end if back else max(until, end)
    return busy


@exercise(
    "10.2", "busy_share",
    first_step="sort by start, then go through the spans with `until`, the time up to which everything has been counted: what does each span add?",
    kernel=False,
)  # fmt: skip
def busy_share(e):
    cases = {
        "sequential, with gaps": [(0, 10), (20, 25), (30, 40)],
        "starts late": [(1000, 1010), (1020, 1030)],
        "two spans overlap": [(0, 10), (5, 15), (25, 30)],
        "one span inside another": [(0, 100), (10, 20), (60, 90), (110, 120)],
        "in any order": [(50, 60), (0, 10), (20, 30), (25, 32)],
        "always busy": [(3, 7), (7, 9)],
        "the last to start is not the last to end": [(0, 10), (20, 100), (30, 40)],
    }
    draw = lambda rng: (
        "random spans",
        [(a, a + n) for a, n in rng.integers(1, 40, (8, 2)).tolist()],
    )
    for case, spans in e.cases(cases.items(), draw, times=5):
        got = e.call(list(spans), case=f"{case}: {spans}")
        e.need(got is not None and np.ndim(got) == 0, f"Return one number; got {got!r}.")
        first, last = min(s for s, _ in spans), max(t for _, t in spans)
        slots = np.zeros(last, bool)
        for s, t in spans:
            slots[s:t] = True
        want = slots.sum() / (last - first)
        total = sum(t - s for s, t in spans)
        back, less = (
            np.float64(walked(spans, *how) / (last - first))
            for how in ((True, False), (False, True))
        )
        e.same("the share", float(got), want, {
            "Time during which two kernels run is counted twice: add only the part of each span after `until`.":
                np.float64(total / (last - first)),
            "That is the busy time, not its share of the time from the first start to the last end.": np.float64(slots.sum()),
            "The time before the first kernel is counted as idle: begin at the first start.": np.float64(slots.sum() / last),
            "That is a percentage: return a share from 0 to 1.": np.float64(100 * want),
            "That is the idle share.": np.float64(1 - want) if want < 1 else np.empty(0),
            "The interval ends at the LATEST end, which need not be the end of the span that starts last.":
                np.float64(slots.sum() / (max(spans)[1] - first)) if max(spans)[1] < last else np.empty(0),
            "The spans come in any order: sort them by start first.": lambda got: case == "in any order",
            "A span that ends inside an earlier one must not move `until` back: take the later of the two.": back,
            "A span that ends inside an earlier one adds zero, not a negative time: max(0, ...).": less,
        }, rtol=1e-9)  # fmt: skip


@exercise(
    "10.3", "sgd_kernel",
    first_step="one element per thread, w = w - lr g. Where does lr come from if the launch arguments never change?",
    hints={
        "OutOfBoundsError": "lr_1 has a single element, lr_1[0], which all threads read; and threads past the end of w do nothing.",
        "RaceError": "Thread i owns w[i]: i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x.",
    },
)  # fmt: skip
def sgd_kernel(e):
    fixed = (64, 32), (70, 16), (5, 32)
    for n, block in e.cases(fixed, lambda rng: (rng.integers(33, 100), 8 * rng.integers(1, 5))):
        w, g = e.normal(n), e.normal(n)
        lr = e.blank(1)
        now = np.asarray(w).astype(np.float64)
        for rate in (0.5, float(e.rng.uniform(0.1, 0.9)) if e.drawn else 0.125):
            lr[0] = rate
            e.run(-(-n // block), block, w, g, lr, case=f"n = {n}, lr = {rate}")
            before, g64 = now, np.asarray(g).astype(np.float64)
            now = before - rate * g64
            e.same("w", w, now, {
                "The sign is wrong: step against the gradient.": before + rate * g64,
                "lr is missing.": before - g64,
                "The rate of this step is not the one in lr_1[0]: read it from there in every run, do not hard-code a number.":
                    lambda got: np.ptp((before - got) / g64) < 1e-3 and not np.allclose(got, before),
                "The last element was left out: the guard is i < w_n.size.": lambda got: np.allclose(got[:-1], now[:-1]) and not e.wrote(w)[-1],
                "Only the update was written: subtract it from w.": -rate * g64,
                "w is unchanged.": before,
            }, rtol=1e-5)  # fmt: skip
