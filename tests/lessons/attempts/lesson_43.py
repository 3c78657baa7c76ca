"""Attempts at the exercises of lesson 43: see test_attempts.py."""


# %% 43.1 RIGHT: a very negative number, and the mask once
def softmax_program(program_id, load, store, C, BLOCK):
    c = np.arange(BLOCK)
    inside = c < C
    at = program_id() * C + c
    x = load(at, inside, -3e38)
    e = np.where(inside, np.exp(x - np.max(x)), 0)
    store(at, e / np.sum(e), inside)


# %% 43.1 RIGHT: through the logarithm
def softmax_program(program_id, load, store, C, BLOCK):
    c = np.arange(BLOCK)
    row = program_id() * C
    x = load(row + c, c < C, -np.inf).astype(np.float64)
    m = x.max()
    lse = m + np.log(np.exp(x - m).sum())
    store(row + c, np.exp(x - lse), c < C)


# %% 43.1 WRONG: are in the sum
def softmax_program(program_id, load, store, C, BLOCK):
    c = np.arange(BLOCK)
    x = load(program_id() * C + c, c < C, 0)
    x = np.exp(x - x.max())
    store(program_id() * C + c, x / x.sum(), c < C)


# %% 43.1 WRONG: The maximum is missing
def softmax_program(program_id, load, store, C, BLOCK):
    c = np.arange(BLOCK)
    x = np.exp(load(program_id() * C + c, c < C, -np.inf))
    store(program_id() * C + c, x / x.sum(), c < C)


# %% 43.1 WRONG: one for each element of the block
def softmax_program(program_id, load, store, C, BLOCK):
    for c in range(C):
        x = load(program_id() * C + c, True, 0)
        store(program_id() * C + c, np.exp(x), True)


# %% 43.1 RIGHT: other is NaN, which nanmax and nansum leave out
def softmax_program(program_id, load, store, C, BLOCK):
    c = np.arange(BLOCK)
    x = load(program_id() * C + c, c < C, np.nan)
    e = np.exp(x - np.nanmax(x))
    store(program_id() * C + c, e / np.nansum(e), c < C)


# %% 43.1 WRONG: larger than every element of this row
# as the solution, but:
# -     x = load(program_id() * C + c, c < C, -np.inf)
# +     x = load(program_id() * C + c, c < C, -1e9)


# %% 43.1 WRONG: Only NaN was stored
# as the solution, but:
# -     e = np.exp(x - x.max())
# +     e = np.exp(x - np.abs(x).max())


# %% 43.1 WRONG: Element 2 of the row was never loaded
# as the solution, but:
# -     x = load(program_id() * C + c, c < C, -np.inf)
# +     x = load(program_id() * C + c, c < C - 1, -np.inf)


# %% 43.1 WRONG: Element 0 of the row was never stored
# as the solution, but:
# -     store(program_id() * C + c, e / e.sum(), c < C)
# +     store(program_id() * C + c, e / e.sum(), program_id() * C + c < C)


# %% 43.1 WRONG: the values must be 4 numbers
# as the solution, but:
# -     store(program_id() * C + c, e / e.sum(), c < C)
# +     store(program_id() * C + c, (e / e.sum())[:C], c < C)


# %% 43.1 WRONG: too few or too many arguments
# as the solution, but:
# -     x = load(program_id() * C + c, c < C, -np.inf)
# +     x = load(program_id(0) * C + c, c < C, -np.inf)


# %% 43.1 WRONG: row r begins at offset r * C
# as the solution, but:
# -     x = load(program_id() * C + c, c < C, -np.inf)
# +     x = load((program_id(), c), c < C, -np.inf)


# %% 43.2 RIGHT: flatten first
def offset(i, shape, stride):
    def flat(x):
        return [x] if isinstance(x, int) else [z for y in x for z in flat(y)]

    total = 0
    for s, d in zip(flat(shape), flat(stride)):
        i, c = divmod(i, s)
        total += c * d
    return total


# %% 43.2 RIGHT: first mode and the rest
def offset(i, shape, stride):
    if isinstance(shape, int):
        return i * stride
    if len(shape) == 0:
        return 0
    n = 1
    stack = [shape[0]]
    while stack:
        top = stack.pop()
        if isinstance(top, int):
            n *= top
        else:
            stack += top
    return offset(i % n, shape[0], stride[0]) + offset(i // n, shape[1:], stride[1:])


# %% 43.2 WRONG: The LAST mode
def offset(i, shape, stride):
    def flat(x):
        return [x] if isinstance(x, int) else [z for y in x for z in flat(y)]

    total = 0
    for s, d in zip(flat(shape)[::-1], flat(stride)[::-1]):
        i, c = divmod(i, s)
        total += c * d
    return total


# %% 43.2 WRONG: use the strides
def offset(i, shape, stride):
    return i


# %% 43.2 WRONG: A mode may be a tuple
def offset(i, shape, stride):
    if isinstance(shape, int):
        return i * stride
    total = 0
    for s, d in zip(shape, stride):
        while not isinstance(d, int):
            d = d[0]
        total += i % size(s) * d
        i //= size(s)
    return total


# %% 43.2 WRONG: at any depth
def offset(i, shape, stride):
    if isinstance(shape, int):
        return i * stride
    total = 0
    for s, d in zip(shape, stride):
        if isinstance(s, int):
            total += i % s * d
        else:
            j = i % size(s)
            for inner, step in zip(s, d):
                total += j % inner * step
                j //= inner
        i //= size(s)
    return total


# %% 43.2 WRONG: any number of modes
def offset(i, shape, stride):
    if isinstance(shape, int):
        return i * stride
    n = size(shape[0])
    return offset(i % n, shape[0], stride[0]) + offset(i // n, shape[1], stride[1])


# %% 43.2 WRONG: of the first mode only
# as the solution, but:
# -     return total
# +         return total


# %% 43.2 WRONG: The coordinate of a mode
# as the solution, but:
# -         total += offset(i % size(s), s, d)
# +         total += offset(i, s, d)


# %% 43.2 WRONG: These are the coordinates
# as the solution, but:
# -         return i * stride
# +         return i


# %% 43.3 RIGHT: its own offset
def owned(thread, threads, values):
    def flat(x):
        return [x] if isinstance(x, int) else [z for y in x for z in flat(y)]

    def at(i, layout):
        total = 0
        for s, d in zip(flat(layout[0]), flat(layout[1])):
            total += i % s * d
            i //= s
        return total

    n = int(np.prod(flat(values[0])))
    return [at(thread, threads) + at(v, values) for v in range(n)]


# %% 43.3 WRONG: The offset of the thread is missing
# as the attempt above, but:
# -     return [at(thread, threads) + at(v, values) for v in range(n)]
# +     return [at(v, values) for v in range(n)]


# %% 43.3 WRONG: one thread is asked for
# as the attempt above, but:
# -     return [at(thread, threads) + at(v, values) for v in range(n)]
# +     many = int(np.prod(flat(threads[0])))
# +     return [at(t, threads) + at(v, values) for t in range(many) for v in range(n)]


# %% 43.3 WRONG: exchanged
# as the attempt above, but:
# -     n = int(np.prod(flat(values[0])))
# -     return [at(thread, threads) + at(v, values) for v in range(n)]
# +     n = int(np.prod(flat(threads[0])))
# +     return [at(thread, values) + at(v, threads) for v in range(n)]


# %% 43.3 WRONG: threads and values are exchanged
# as the attempt above, but:
# -     return [at(thread, threads) + at(v, values) for v in range(n)]
# +     return [at(thread, values) + at(v, threads) for v in range(n)]


# %% 43.3 WRONG: A tuple stands here
# as the attempt above, but:
# -     n = int(np.prod(flat(values[0])))
# +     n = values[0]


# %% 43.3 WRONG: There are size(values[0]) values
# as the attempt above, but:
# -     n = int(np.prod(flat(values[0])))
# +     n = int(np.prod(flat(threads[0])))


# %% 43.3 WRONG: calls offset, which is not written yet
def owned(thread, threads, values):
    return [offset(thread, *threads) + offset(v, *values) for v in range(size(values[0]))]
