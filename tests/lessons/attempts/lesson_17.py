"""Attempts at the exercises of lesson 17: see test_attempts.py."""


# %% 17.1 RIGHT: sums in shared memory
@cuda.jit
def edges_kernel(edges_E, lengths_A):
    s = cuda.shared.array(32, int32)
    a = cuda.threadIdx.x
    s[a] = lengths_A[a] if a < lengths_A.size else 0
    cuda.syncthreads()
    total = 0
    for i in range(a + 1):
        total += s[i]
    if a < lengths_A.size:
        edges_E[a + 1] = total
    if a == 31:
        edges_E[0] = 0


# %% 17.1 WRONG: Divide the work
@cuda.jit
def edges_kernel(edges_E, lengths_A):
    s = cuda.shared.array(32, int32)
    a, A = cuda.threadIdx.x, lengths_A.size
    s[a] = lengths_A[a] if a < A else 0
    cuda.syncthreads()
    if a == 0:
        total = 0
        edges_E[0] = 0
        for i in range(A):
            total += s[i]
            edges_E[i + 1] = total


# %% 17.2 RIGHT: searches from the last sequence down
@cuda.jit
def remove_padding_kernel(y_NC, x_ATC, edges_E):
    n = cuda.blockIdx.x
    a = edges_E.size - 2
    while edges_E[a] > n:
        a -= 1
    for c in range(cuda.threadIdx.x, y_NC.shape[1], 32):
        y_NC[n, c] = x_ATC[a, n - edges_E[a], c]


# %% 17.2 WRONG: Divide the work
@cuda.jit
def remove_padding_kernel(y_NC, x_ATC, edges_E):
    n = cuda.blockIdx.x
    a = 0
    while edges_E[a + 1] <= n:
        a += 1
    if cuda.threadIdx.x == 0:
        for c in range(y_NC.shape[1]):
            y_NC[n, c] = x_ATC[a, n - edges_E[a], c]


# %% 17.3 WRONG: exp overflows
def context_attention(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, rows_A, scale):
    o_NHD = np.zeros_like(q_NHD)
    each = q_NHD.shape[1] // k_RGSD.shape[1]
    for a, row in enumerate(rows_A):
        for n in range(edges_E[a], edges_E[a + 1]):
            seen = history_A[a] + n - edges_E[a] + 1
            for h in range(q_NHD.shape[1]):
                w = np.exp(k_RGSD[row, h // each, :seen] @ q_NHD[n, h] * scale)
                o_NHD[n, h] = w @ v_RGSD[row, h // each, :seen] / w.sum()
    return o_NHD


# %% 17.3 RIGHT: all queries of a sequence at once, with a mask
def context_attention(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, rows_A, scale):
    o_NHD = np.zeros_like(q_NHD)
    each = q_NHD.shape[1] // k_RGSD.shape[1]
    for a, row in enumerate(rows_A):
        own = slice(edges_E[a], edges_E[a + 1])
        T = edges_E[a + 1] - edges_E[a]
        S = history_A[a] + T
        k, v = (np.repeat(x[row, :, :S], each, 0) for x in (k_RGSD, v_RGSD))
        s = np.einsum("nhd,hsd->hns", q_NHD[own], k) * scale
        s[:, np.arange(S)[None] > history_A[a] + np.arange(T)[:, None]] = -np.inf
        p = np.exp(s - s.max(2, keepdims=True)) if T else s
        o_NHD[own] = np.einsum("hns,hsd->nhd", p / p.sum(2, keepdims=True), v)
    return o_NHD
