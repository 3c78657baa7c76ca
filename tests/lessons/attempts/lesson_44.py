"""Attempts at the exercises of lesson 44: see test_attempts.py."""


# %% 44.1 RIGHT: a heap of the times at which slots become free
def start_times(arrivals, seconds, slots):
    import heapq

    free, starts = [0.0] * slots, []
    for a, s in zip(arrivals, seconds):
        starts.append(max(a, free[0]))
        heapq.heapreplace(free, starts[-1] + s)
    return starts


# %% 44.1 RIGHT: event simulation
def start_times(arrivals, seconds, slots):
    running, out = [], []
    for a, s in zip(arrivals, seconds):
        t = a
        if out:
            t = max(t, out[-1])
        while sum(e > t for e in running) >= slots:
            t = min(e for e in running if e > t)
        out.append(t)
        running.append(t + s)
    return out


# %% 44.1 WRONG: round robin
def start_times(arrivals, seconds, slots):
    out = []
    for i, a in enumerate(arrivals):
        if i < slots:
            out.append(a)
        else:
            out.append(max(a, out[i - slots] + seconds[i - slots]))
    return out
