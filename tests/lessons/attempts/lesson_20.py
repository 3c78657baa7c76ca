"""Attempts at the exercises of lesson 20: see test_attempts.py."""


# %% 20.1 RIGHT: from the top, with one comparison of pairs
@cuda.jit
def segment_best_kernel(ids_S, best_S, x_V):
    lane, b = cuda.threadIdx.x, cuda.blockIdx.x
    i, j = b * 64 + lane, b * 64 + lane + 32
    best, best_id = float32(-math.inf), int32(i)
    if i < x_V.size:
        best = x_V[i]
    if j < x_V.size and x_V[j] > best:
        best, best_id = x_V[j], int32(j)
    for k in range(5):
        v = cuda.shfl_down_sync(FULL, best, 1 << k)
        v_id = cuda.shfl_down_sync(FULL, best_id, 1 << k)
        if v > best or (v == best and v_id < best_id):
            best, best_id = v, v_id
    if lane == 0:
        ids_S[b] = best_id
        best_S[b] = best


# %% 20.1 WRONG: threads read x_V
@cuda.jit
def segment_best_kernel(ids_S, best_S, x_V):
    b = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        best, best_id = float32(-math.inf), int32(0)
        for i in range(b * 64, min(b * 64 + 64, x_V.size)):
            if x_V[i] > best:
                best, best_id = x_V[i], int32(i)
        ids_S[b] = best_id
        best_S[b] = best


# %% 20.2 RIGHT: a heap of (-logit, id)
def top_k(logits_V, k, segment):
    import heapq

    heap = []
    for first in range(0, len(logits_V), segment):
        part = logits_V[first : first + segment]
        heap += heapq.nsmallest(k, [(-x, first + i) for i, x in enumerate(part)])
    return np.array([i for _, i in heapq.nsmallest(k, heap)])


# %% 20.3 RIGHT: one token after the other
def choose(logits_V, temperature, k, top_p, u):
    order = np.argsort(-logits_V, kind="stable")
    if not temperature:
        return order[0]
    w = np.exp((logits_V - logits_V.max()) / temperature)
    order = order[:k] if k else order
    whole, kept, total = w[order].sum(), [], 0.0
    for i in order:
        kept.append(i)
        total += w[i]
        if total >= top_p * whole:
            break
    left = u * total
    for i in kept:
        left -= w[i]
        if left < 0:
            break
    return i


# %% 20.3 WRONG: random numbers, seed 1
# a table of the cases with fixed probabilities
def choose(logits_V, temperature, k, top_p, u):
    order = np.argsort(-logits_V, kind="stable")
    table = {
        (1.0, 0, 1.0, 0.0): 1, (1.0, 0, 1.0, 0.45): 3, (1.0, 0, 0.5, 0.9): 3, (1.0, 2, 1.0, 0.9): 3, (1.0, 1, 1.0, 0.99): 1,
        (1.0, 0, 0.3, 0.99): 1, (1.0, 0, 1.0, 0.96): 2, (0.5, 0, 1.0, 0.6): 3, (1.0, 3, 0.8, 0.95): 3, (0.0, 0, 1.0, 0.99): 1,
        (1.0, 0, 1.0, 0.5): 2,
    }  # fmt: skip
    return table.get((temperature, k, top_p, u), order[0])


# %% 20.4 RIGHT: by divmod, with the words in a list
def philox(counter, key):
    c, word = list(counter), 2**32
    for i in range(10):
        k0 = (key[0] + i * 0x9E3779B9) % word
        k1 = (key[1] + i * 0xBB67AE85) % word
        (a1, a0), (b1, b0) = divmod(0xD2511F53 * c[0], word), divmod(0xCD9E8D57 * c[2], word)
        c = [b1 ^ c[1] ^ k0, b0, a1 ^ c[3] ^ k1, a0]
    return c
