"""Attempts at the exercises of lesson 16: see test_attempts.py."""


# %% 16.1 RIGHT: sorted by size, and the list is edited as a copy
def take(free, size):
    for start, s in sorted(free, key=lambda block: (block[1], block[0])):
        if s >= size:
            new = list(free)
            i = new.index((start, s))
            new[i : i + 1] = [(start + size, s - size)] if s != size else []
            return start, new
    return None, free


# %% 16.1 WRONG: best fit takes the smallest one that fits
def take(free, size):
    for i, (start, s) in enumerate(free):
        if s >= size:
            rest = [(start + size, s - size)] if s > size else []
            return start, free[:i] + rest + free[i + 1 :]
    return None, free


# %% 16.2 RIGHT: by the set of all free elements
def give(free, start, size):
    elements = {e for at, s in [*free, (start, size)] for e in range(at, at + s)}
    starts = sorted(e for e in elements if e - 1 not in elements)
    ends = sorted(e for e in elements if e + 1 not in elements)
    return [(a, b - a + 1) for a, b in zip(starts, ends)]


# %% 16.2 WRONG: merge all three
def give(free, start, size):
    free = list(free)
    for at, s in free:
        if at + s == start:
            free.remove((at, s))
            return sorted([*free, (at, s + size)])
        if start + size == at:
            free.remove((at, s))
            return sorted([*free, (start, size + s)])
    return sorted([*free, (start, size)])


# %% 16.3 RIGHT: plays the step, layer by layer
def peak(kept, inputs, recompute):
    alive = most = 0
    for k, i in zip(kept, inputs):
        alive += i if recompute else k
        most = max(most, alive)
    for k, i in zip(kept[::-1], inputs[::-1]):
        most = max(most, alive + (k if recompute else 0))
        alive -= i if recompute else k
    return most
