"""Attempts at the exercises of lesson 7: see test_attempts.py."""


# %% 7.1 RIGHT: as a complex number times a complex number
@cuda.jit
def rope_kernel(y_NHD, x_NHD, cos_TR, sin_TR, T):
    n, h, r = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    R = x_NHD.shape[2] // 2
    t = n - n // T * T
    re, im = x_NHD[n, h, r], x_NHD[n, h, R + r]
    c, s = cos_TR[t, r], sin_TR[t, r]
    y_NHD[n, h, R + r] = re * s + im * c
    y_NHD[n, h, r] = re * c - im * s


# %% 7.1 WRONG: Divide the work
@cuda.jit
def rope_kernel(y_NHD, x_NHD, cos_TR, sin_TR, T):
    n, h = cuda.blockIdx.x, cuda.blockIdx.y
    R = cos_TR.shape[1]
    if cuda.threadIdx.x == 0 and h == 0 and n % T == 0:
        for m in range(n, n + T):
            for g in range(y_NHD.shape[1]):
                for r in range(R):
                    a, b = x_NHD[m, g, r], x_NHD[m, g, r + R]
                    c, s = cos_TR[m % T, r], sin_TR[m % T, r]
                    y_NHD[m, g, r] = a * c - b * s
                    y_NHD[m, g, r + R] = b * c + a * s


# %% 7.2 RIGHT: the online softmax of lesson 13 in each thread
@cuda.jit
def causal_softmax_kernel(p_TS, s_TS, scale):
    partial = cuda.shared.array(32, float32)
    t, tid = cuda.blockIdx.x, cuda.threadIdx.x
    S = s_TS.shape[1]
    top, total = float32(-1e30), float32(0.0)
    for s in range(tid, t + 1, cuda.blockDim.x):
        x = scale * s_TS[t, s]
        new = max(top, x)
        total = total * math.exp(top - new) + math.exp(x - new)
        top = new
    all_top = block_max(top, partial)
    total = block_sum(total * math.exp(top - all_top), partial)
    for s in range(tid, S, cuda.blockDim.x):
        x = math.exp(scale * s_TS[t, s] - all_top) / total if s <= t else float32(0.0)
        p_TS[t, s] = x


# %% 7.2 WRONG: Divide the work
@cuda.jit
def causal_softmax_kernel(p_TS, s_TS, scale):
    t, S = cuda.blockIdx.x, s_TS.shape[1]
    if cuda.threadIdx.x == 0:
        top, total = float32(-math.inf), float32(0.0)
        for s in range(t + 1):
            top = max(top, scale * s_TS[t, s])
        for s in range(t + 1):
            total += math.exp(scale * s_TS[t, s] - top)
        for s in range(S):
            p_TS[t, s] = math.exp(scale * s_TS[t, s] - top) / total if s <= t else float32(0.0)


# %% 7.3 RIGHT: only the rows that count are computed
def cross_entropy(logits_NV, targets_N):
    gradient = np.zeros_like(logits_NV)
    rows = [n for n, t in enumerate(targets_N) if t >= 0]
    loss = 0.0
    for n in rows:
        x = logits_NV[n] - np.max(logits_NV[n])
        lse = np.logaddexp.reduce(x)
        loss += (lse - x[targets_N[n]]) / len(rows)
        gradient[n] = np.exp(x - lse)
        gradient[n, targets_N[n]] -= 1
    return loss, gradient / len(rows)


# %% 7.3 WRONG: exp or log has overflowed
def cross_entropy(logits_NV, targets_N):
    p = np.exp(logits_NV) / np.exp(logits_NV).sum(1, keepdims=True)
    counted = targets_N >= 0
    n = np.flatnonzero(counted)
    loss = -np.log(p[n, targets_N[n]]).mean()
    p[n, targets_N[n]] -= 1
    return loss, p * counted[:, None] / len(n)
