"""Attempts at the exercises of lesson 15: see test_attempts.py."""


# %% 15.1 RIGHT: a loop over the tokens
def share(x_NI, t_N, w_I, total):
    rows = [(x, t) for x, t in zip(x_NI, t_N) if t == t]
    n = total(len(rows))
    return sum([2 * (x @ w_I - t) * x / n for x, t in rows], np.zeros(len(w_I)))


# %% 15.1 WRONG: The share is of the WHOLE batch
def share(x_NI, t_N, w_I, total):
    valid = ~np.isnan(t_N)
    total(valid.sum())
    x = x_NI[valid]
    return 2 * (x @ w_I - t_N[valid]) @ x / max(1, valid.sum())


# %% 15.2 RIGHT: the parts are visited from the last rank down, by np.split
def all_reduce(me, world, own_n, read):
    size = own_n.size // world
    parts = np.split(own_n, world)
    for r in reversed(range(world)):
        if r != me:
            parts[me][:] = parts[me] + read(r, me * size, me * size + size)
    yield
    for r in range(world):
        if r != me:
            parts[r][:] = read(r, r * size, r * size + size)


# %% 15.2 WRONG: does not have the same bits
def all_reduce(me, world, own_n, read):
    others = [read(r, 0, own_n.size) for r in range(world) if r != me]
    yield
    for x in others:
        own_n += x


# %% 15.3 RIGHT: the last addition to each bucket
def schedule(order, spans, buckets):
    ready = [[] for _ in order]
    for i, (a, b) in enumerate(buckets):
        inside = {n for n, (p, q) in spans.items() if max(a, p) < min(b, q)}
        ready[max(k for k, n in enumerate(order) if n in inside)].append(i)
    return ready


# %% 15.3 WRONG: belongs to every bucket that holds part of it
def schedule(order, spans, buckets):
    ready = [[] for _ in order]
    for i, (a, b) in enumerate(buckets):
        inside = {n for n, (p, q) in spans.items() if a <= p < b}
        ready[max(k for k, n in enumerate(order) if n in inside or not inside)].append(i)
    return ready
