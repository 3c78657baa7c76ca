"""Attempts at the exercises of lesson 44: see test_attempts.py."""


# %% 44.1 RIGHT: a heap of the times at which slots become free
def start_times(arrivals, seconds, slots):
    import heapq

    free, starts = [0.0] * slots, []
    for a, s in zip(arrivals, seconds):
        starts.append(max(a, free[0]))
        heapq.heapreplace(free, starts[-1] + s)
    return starts
