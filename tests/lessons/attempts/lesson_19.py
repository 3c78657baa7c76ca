"""Attempts at the exercises of lesson 19: see test_attempts.py."""


# %% 19.1 WRONG: 1 of 3 blocks read the keys
@cuda.jit
def partial_kernel(m_S, l_S, acc_SD, q_D, k_ND, v_ND, scale, chunk):
    d, n = cuda.threadIdx.x, k_ND.shape[0]
    if cuda.blockIdx.x == 0:
        for s in range(m_S.size):
            m, l, acc = float32(-math.inf), float32(0.0), float32(0.0)
            for i in range(s * chunk, min((s + 1) * chunk, n)):
                x = warp_sum(q_D[d] * k_ND[i, d]) * scale
                new = max(m, x)
                l = l * math.exp(m - new) + math.exp(x - new)
                acc = acc * math.exp(m - new) + math.exp(x - new) * v_ND[i, d]
                m = new
            acc_SD[s, d] = acc
            if d == 0:
                m_S[s], l_S[s] = m, l


# %% 19.1 WRONG: the keys are read 3 times over
@cuda.jit
def partial_kernel(m_S, l_S, acc_SD, q_D, k_ND, v_ND, scale, chunk):
    d, n = cuda.threadIdx.x, k_ND.shape[0]
    for s in range(m_S.size):
        m, l, acc = float32(-math.inf), float32(0.0), float32(0.0)
        for i in range(s * chunk, min((s + 1) * chunk, n)):
            x = warp_sum(q_D[d] * k_ND[i, d]) * scale
            new = max(m, x)
            l = l * math.exp(m - new) + math.exp(x - new)
            acc = acc * math.exp(m - new) + math.exp(x - new) * v_ND[i, d]
            m = new
        if s == cuda.blockIdx.x:
            acc_SD[s, d] = acc
            if d == 0:
                m_S[s], l_S[s] = m, l


# %% 19.1 RIGHT: first the maximum of the part, then the sums
@cuda.jit
def partial_kernel(m_S, l_S, acc_SD, q_D, k_ND, v_ND, scale, chunk):
    s, d = cuda.blockIdx.x, cuda.threadIdx.x
    last = min((s + 1) * chunk, k_ND.shape[0])
    m = float32(-math.inf)
    for i in range(s * chunk, last):
        m = max(m, warp_sum(q_D[d] * k_ND[i, d]) * scale)
    l, acc = float32(0.0), float32(0.0)
    for i in range(s * chunk, last):
        w = math.exp(warp_sum(q_D[d] * k_ND[i, d]) * scale - m)
        l += w
        acc += w * v_ND[i, d]
    acc_SD[s, d] = acc
    if d == 31:
        m_S[s] = m
        l_S[s] = l


# %% 19.2 WRONG: exp overflows
def merge(m_S, l_S, acc_SD):
    w = np.exp(m_S)
    return w @ acc_SD / (w @ l_S)


# %% 19.2 WRONG: NaN comes from the empty part
def merge(m_S, l_S, acc_SD):
    o_SD = acc_SD / l_S[:, None]
    w = l_S * np.exp(m_S - m_S.max())
    return w @ o_SD / w.sum()


# %% 19.2 WRONG: not the m of the first part
def merge(m_S, l_S, acc_SD):
    w = np.exp(m_S - m_S[0])
    return w @ acc_SD / (w @ l_S)


# %% 19.2 WRONG: M is not 0, not the mean
def merge(m_S, l_S, acc_SD):
    w = np.exp(m_S - m_S[np.isfinite(m_S)].mean())
    return w @ acc_SD / (w @ l_S)


# %% 19.2 WRONG: Only the part with the largest m
def merge(m_S, l_S, acc_SD):
    i = m_S.argmax()
    return acc_SD[i] / l_S[i]


# %% 19.2 RIGHT: parts are merged one after the other
def merge(m_S, l_S, acc_SD):
    top, total, acc = -np.inf, 0.0, np.zeros(acc_SD.shape[1])
    for m, l, a in zip(m_S, l_S, acc_SD):
        if l == 0:
            continue
        new = max(top, m)
        total = total * np.exp(top - new) + l * np.exp(m - new)
        acc = acc * np.exp(top - new) + a * np.exp(m - new)
        top = new
    return acc / total


# %% 19.2 RIGHT: the parts' lse, and a softmax over them
def merge(m_S, l_S, acc_SD):
    there = l_S > 0
    lse = m_S[there] + np.log(l_S[there])
    w = np.exp(lse - lse.max())
    w /= w.sum()
    return (w[:, None] * acc_SD[there] / l_S[there][:, None]).sum(0)


# %% 19.3 WRONG: A part has no keys: omit it
def splits(n, chunk, most):
    used = min(most, -(-n // chunk))
    size = -(-n // used)
    return [(i * size, min((i + 1) * size, n)) for i in range(used)]


# %% 19.3 WRONG: all parts but the last must be equal
def splits(n, chunk, most):
    used = min(most, -(-n // chunk))
    edges = [i * n // used for i in range(used + 1)]
    return list(zip(edges[:-1], edges[1:]))


# %% 19.3 WRONG: at least half of them must get a part
def splits(n, chunk, most):
    return [(0, n)]


# %% 19.3 WRONG: random numbers, seed 1
# a table of the fixed cases
def splits(n, chunk, most):
    table = {
        (10, 4, 8): (4, 3),
        (256, 256, 32): (256, 1),
        (257, 256, 32): (129, 2),
        (10000, 256, 32): (313, 32),
        (1, 256, 32): (1, 1),
        (9, 2, 4): (3, 3),
        (17, 2, 8): (3, 6),
    }
    size, _ = table.get((n, chunk, most), (n, 1))
    return [(a, min(a + size, n)) for a in range(0, n, size)]


# %% 19.3 RIGHT: every part is a whole number of chunks, so there may be fewer parts
def splits(n, chunk, most):
    chunks = -(-n // chunk)
    size = chunk * -(-chunks // most)
    return [(a, min(a + size, n)) for a in range(0, n, size)]
