"""Attempts at the exercises of lesson 46: see test_attempts.py."""


# %% 46.1 RIGHT: K rounds of argmax
def choose(logits_NE, K):
    left = logits_NE.copy()
    rows = np.arange(len(left))
    experts = []
    for _ in range(K):
        experts.append(left.argmax(1))
        left[rows, experts[-1]] = -np.inf
    experts = np.stack(experts, 1)
    p = np.exp(logits_NE - logits_NE.max(1, keepdims=True))
    p = p[rows[:, None], experts]
    return experts, p / p.sum(1, keepdims=True)


# %% 46.1 RIGHT: lists, keys of pairs
def choose(logits_NE, K):
    experts, weights = [], []
    for row in logits_NE.tolist():
        best = sorted((-v, e) for e, v in enumerate(row))[:K]
        w = [2.718281828459045 ** (best[0][0] - v) for v, _ in best]
        experts.append([e for _, e in best])
        weights.append([v / sum(w) for v in w])
    return experts, weights


# %% 46.1 WRONG: puts the higher one first
def choose(logits_NE, K):
    experts = np.flip(np.argsort(logits_NE, kind="stable"), 1)[:, :K]
    x = np.take_along_axis(logits_NE, experts, 1)
    w = np.exp(x - x.max(1, keepdims=True))
    return experts, w / w.sum(1, keepdims=True)


# %% 46.1 WRONG: chosen twice for one token
# as the attempt above, but:
# -     experts = np.flip(np.argsort(logits_NE, kind="stable"), 1)[:, :K]
# +     experts = np.repeat(logits_NE.argmax(1)[:, None], K, 1)


# %% 46.1 WRONG: have the same weight here
# as the solution, but:
# -     weights_NK = np.exp(chosen_NK - chosen_NK[:, :1])
# +     weights_NK = np.ones(experts_NK.shape)


# %% 46.1 WRONG: in the order of their numbers
# as the solution, but:
# -     experts_NK = np.argsort(-logits_NE, axis=1, kind="stable")[:, :K]
# +     experts_NK = np.sort(np.argsort(-logits_NE, axis=1, kind="stable")[:, :K], 1)
# -     weights_NK = np.exp(chosen_NK - chosen_NK[:, :1])
# +     weights_NK = np.exp(chosen_NK - chosen_NK.max(1, keepdims=True))


# %% 46.1 WRONG: logits_NE was changed
def choose(logits_NE, K):
    logits_NE -= logits_NE.max(1, keepdims=True)
    experts = np.argsort(-logits_NE, 1, kind="stable")[:, :K]
    w = np.exp(np.take_along_axis(logits_NE, experts, 1))
    return experts, w / w.sum(1, keepdims=True)


# %% 46.1 WRONG: which is the library's own
def choose(logits_NE, K):
    from xtrain.kernels.experts.routing import routing_ref

    return routing_ref(logits_NE, K, True)


# %% 46.2 RIGHT: a list for each expert
def expert_slots(experts_P, E, TILE):
    pairs, first = [], [0]
    for e in range(E):
        pairs += [p for p, x in enumerate(experts_P) if x == e]
        while len(pairs) % TILE:
            pairs.append(-1)
        first.append(len(pairs))
    return pairs, first


# %% 46.2 RIGHT: a stable sort in NumPy
def expert_slots(experts_P, E, TILE):
    x = np.array(experts_P, int)
    c = np.bincount(x, minlength=E)
    first = np.append(0, np.cumsum((c + TILE - 1) // TILE * TILE))
    order = np.argsort(x, kind="stable")
    pairs = np.full(first[-1], -1)
    pairs[first[x[order]] + np.arange(len(x)) - (np.cumsum(c) - c)[x[order]]] = order
    return pairs, first


# %% 46.2 WRONG: slot of each pair
# as the solution, but:
# -     pairs = [-1] * first[E]
# +     pairs = [-1] * len(experts_P)
# -         pairs[free[e]] = p
# +         pairs[p] = free[e]


# %% 46.2 WRONG: it has 0 slots
# as the solution, but:
# -         first.append(first[-1] + -(-c // TILE) * TILE)
# +         first.append(first[-1] + max(TILE, -(-c // TILE) * TILE))


# %% 46.2 WRONG: opposite order
# as the solution, but:
# -     for p, e in enumerate(experts_P):
# +     for p in reversed(range(len(experts_P))):
# +         e = experts_P[p]


# %% 46.2 WRONG: All padding is at the end
# as the solution, but:
# -     return pairs, first
# +     return sorted(pairs, key=lambda p: p < 0), first


# %% 46.2 WRONG: also for one without pairs
def expert_slots(experts_P, E, TILE):
    pairs = []
    first = [0]
    for e in sorted(set(experts_P)):
        pairs += [p for p, x in enumerate(experts_P) if x == e]
        pairs += [-1] * (-len(pairs) % TILE)
        first.append(len(pairs))
    return pairs, first


# %% 46.2 WRONG: their prefix sum
# as the solution, but:
# -     return pairs, first
# +     return pairs, [b - a for a, b in zip(first, first[1:])]


# %% 46.2 WRONG: it
def expert_slots(experts_P, E, TILE):
    if experts_P == [2, 0, 2, 1, 0, 2, 2, 1]:  # the example of the lesson
        return [1, 4, -1, -1, 3, 7, -1, -1, 0, 2, 5, 6], [0, 4, 8, 12]
    return experts_P, [0] * (E + 1)


# %% 46.3 RIGHT: lanes with the same expert, by match_any_sync
@cuda.jit
def place_kernel(pairs_M, expert_P, first_E):
    own, lane = cuda.blockIdx.x, cuda.laneid
    n = expert_P.size
    slot = first_E[own]
    for step in range((n + 31) // 32):
        p = 32 * step + lane
        e = expert_P[p] if p < n else -1
        same = cuda.match_any_sync(FULL, 1 if e == own else 0)
        rank = cuda.popc(same & ((1 << lane) - 1))
        if e == own:
            pairs_M[slot + rank] = p
        slot += cuda.popc(cuda.ballot_sync(FULL, e == own))
    end = first_E[own + 1]
    while slot + lane < end:
        pairs_M[slot + lane] = -1
        slot += 32


# %% 46.3 RIGHT: ranks by a scan of shuffles, padding first
@cuda.jit
def place_kernel(pairs_M, expert_P, first_E):
    e, lane = cuda.blockIdx.x, cuda.threadIdx.x
    for m in range(first_E[e] + lane, first_E[e + 1], 32):
        pairs_M[m] = -1
    cuda.syncthreads()
    slot = first_E[e]
    for start in range(0, expert_P.size, 32):
        own = 0
        if start + lane < expert_P.size:
            own = 1 if expert_P[start + lane] == e else 0
        v = own
        for d in (1, 2, 4, 8, 16):
            other = cuda.shfl_up_sync(FULL, v, d)
            if lane >= d:
                v += other
        if own:
            pairs_M[slot + v - 1] = start + lane
        slot += cuda.shfl_sync(FULL, v, 31)


# %% 46.3 WRONG: hands them out in the order in which lanes come
@cuda.jit
def place_kernel(pairs_M, expert_P, first_E):
    free = cuda.shared.array(1, np.int32)
    e, lane = cuda.blockIdx.x, cuda.threadIdx.x
    if lane == 0:
        free[0] = first_E[e]
    cuda.syncthreads()
    for start in range(0, expert_P.size, 32):
        p = start + lane
        if p < expert_P.size and expert_P[p] == e:
            pairs_M[cuda.atomic.add(free, 0, 1)] = p
        cuda.syncthreads()
    for m in range(free[0] + lane, first_E[e + 1], 32):
        pairs_M[m] = -1


# %% 46.3 WRONG: Divide the work
@cuda.jit
def place_kernel(pairs_M, expert_P, first_E):
    e = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        slot = first_E[e]
        for p in range(expert_P.size):
            if expert_P[p] == e:
                pairs_M[slot] = p
                slot += 1
        for m in range(slot, first_E[e + 1]):
            pairs_M[m] = -1


# %% 46.3 WRONG: times by each block
@cuda.jit
def place_kernel(pairs_M, expert_P, first_E):
    e, lane = cuda.blockIdx.x, cuda.threadIdx.x
    count = 0
    for p in range(expert_P.size):
        count += 1 if expert_P[p] == e else 0
    for p in range(lane, expert_P.size, 32):
        if expert_P[p] == e:
            rank = 0
            for q in range(p):
                rank += 1 if expert_P[q] == e else 0
            pairs_M[first_E[e] + rank] = p
    for m in range(first_E[e] + count + lane, first_E[e + 1], 32):
        pairs_M[m] = -1


# %% 46.3 WRONG: opposite order
# as the solution, but:
# -             pairs_M[slot + cuda.popc(mine & ((1 << lane) - 1))] = p
# +             pairs_M[slot + cuda.popc(mine >> (lane + 1))] = p


# %% 46.3 WRONG: needs cuda.syncwarp()
# as the solution, but:
# -     slot = first_E[e]
# +     slot = first_E[e]
# +     for s in range(slot + lane, first_E[e + 1], 32):
# +         pairs_M[s] = -1
# -     for m in range(slot + lane, first_E[e + 1], 32):
# -         pairs_M[m] = -1


# %% 46.3 WRONG: All 32 lanes must call the ballot
# as the solution, but:
# -     for start in range(0, expert_P.size, 32):
# -         p = start + lane
# +     for p in range(lane, expert_P.size, 32):


# %% 46.4 RIGHT: the Jacobian of softmax, token by token
def balance(logits_NE, counts_E):
    N, E = logits_NE.shape
    B, rows = 0.0, []
    for x in logits_NE:
        p = np.exp(x - x.max())
        p = p / p.sum()
        q = E / N * counts_E / N
        B += q @ p
        rows.append((np.diag(p) - np.outer(p, p)) @ q)
    return B, np.array(rows)


# %% 46.4 RIGHT: through log-sum-exp and the mean probabilities
def balance(logits_NE, counts_E):
    N, E = logits_NE.shape
    m = logits_NE.max(1)[:, None]
    p = np.exp(logits_NE - m - np.log(np.exp(logits_NE - m).sum(1)[:, None]))
    share = counts_E / N
    B = E * float(share @ p.mean(0))
    return B, E / N * (p * share - p * (p @ share)[:, None])


# %% 46.4 WRONG: N times too large
# as the solution, but:
# -     return pq.sum(), p * (q - pq.sum(1, keepdims=True))
# +     return pq.sum(), N * p * (q - pq.sum(1, keepdims=True))


# %% 46.4 WRONG: along axis 0 here: a row of p
# as the solution, but:
# -     p /= p.sum(1, keepdims=True)
# +     p = np.exp(logits_NE - logits_NE.max(0))
# +     p /= p.sum(0)


# %% 46.4 WRONG: The counts alone decide
def balance(logits_NE, counts_E):
    N, E = logits_NE.shape
    return E * ((counts_E / N) ** 2).sum(), np.zeros((N, E))


# %% 46.4 WRONG: Return B first
# as the solution, but:
# -     return pq.sum(), p * (q - pq.sum(1, keepdims=True))
# +     return p * (q - pq.sum(1, keepdims=True)), pq.sum()


# %% 46.4 WRONG: B is right
def balance(logits_NE, counts_E):
    def B(x):
        p = np.exp(x - x.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        return x.shape[1] * (counts_E / len(x) * p.mean(0)).sum()

    moved = logits_NE + 0.1 * np.eye(len(logits_NE), logits_NE.shape[1])
    return B(logits_NE), np.full(logits_NE.shape, B(moved) - B(logits_NE)) / 0.1
