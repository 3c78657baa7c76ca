"""Attempts at the exercises of lesson 24: see test_attempts.py."""


# %% 24.1 RIGHT: a dictionary of the blocks in use
def make_pool(size):
    used = {}

    def allocate():
        for block in range(size):
            if block not in used:
                used[block] = 1
                return block

    def share(block):
        used[block] += 1

    def release(block):
        used[block] -= 1
        used[block] or used.pop(block)

    return allocate, share, release


# %% 24.1 WRONG: it is free only when all
def make_pool(size):
    free = set(range(size))
    return (lambda: free.pop() if free else None), (lambda block: None), free.add


# %% 24.2 RIGHT: block by block
@cuda.jit
def paged_attention_kernel(o, q, k_RSD, v_RSD, table, n, scale):
    d, S = cuda.threadIdx.x, k_RSD.shape[1]
    m, l, acc = float32(-1e30), float32(0.0), float32(0.0)
    for i in range((n + S - 1) // S):
        block = table[i]
        for s in range(min(S, n - i * S)):
            x = warp_sum(q[d] * k_RSD[block, s, d]) * scale
            if x > m:
                l *= math.exp(m - x)
                acc *= math.exp(m - x)
                m = x
            w = math.exp(x - m)
            l += w
            acc += w * v_RSD[block, s, d]
    o[d] = acc / l


# %% 24.2 WRONG: Divide the work
@cuda.jit
def paged_attention_kernel(o, q, k_RSD, v_RSD, table, n, scale):
    d, S = cuda.threadIdx.x, k_RSD.shape[1]
    out = cuda.shared.array(32, float32)
    m, l, acc = float32(-math.inf), float32(0.0), float32(0.0)
    for p in range(n):
        x = warp_sum(q[d] * k_RSD[table[p // S], p % S, d]) * scale
        new = max(m, x)
        l = l * math.exp(m - new) + math.exp(x - new)
        acc = acc * math.exp(m - new) + math.exp(x - new) * v_RSD[table[p // S], p % S, d]
        m = new
    out[d] = acc / l
    cuda.syncthreads()
    if d == 0:
        for i in range(32):
            o[i] = out[i]


# %% 24.3 RIGHT: the tokens themselves are the name
def block_names(tokens, S):
    return [tuple(tokens[: i * S]) for i in range(1, len(tokens) // S + 1)]


# %% 24.4 RIGHT: the shared block is replaced before the token has its place
def next_place(table, count, n, S, allocate, copy):
    offset = n % S
    if offset and count[table[-1]] > 1:
        old = table.pop()
        count[old] -= 1
        table.append(allocate())
        copy(table[-1], old)
    if not offset:
        table += [allocate()]
    return table[n // S], offset


# %% 24.1 WRONG: write `nonlocal` above it
def make_pool(size):
    count = [0] * size
    in_use = 0

    def allocate():
        if in_use == size:  # noqa: F823
            return None
        in_use += 1
        block = count.index(0)
        count[block] = 1
        return block

    def share(block):
        count[block] += 1

    def release(block):
        count[block] -= 1

    return allocate, share, release


# %% 24.3 WRONG: bytes() takes numbers below 256 only
def block_names(tokens, S):
    return [bytes(tokens[: i + S]) for i in range(0, len(tokens) - S + 1, S)]


# %% 24.3 WRONG: two tokens must not look like another two
def block_names(tokens, S):
    names, name = [], 1
    for i, token in enumerate(tokens):
        name = name * 1000 + token
        if i % S == S - 1:
            names.append(name)
    return names


# %% 24.4 WRONG: a block with a wrong count is never free again
# as the solution, but:
# -         table.append(allocate())
# +         table.append(allocate())
# +         count[table[-1]] += 1
