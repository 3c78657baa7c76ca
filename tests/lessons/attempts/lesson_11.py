"""Attempts at the exercises of lesson 11: see test_attempts.py."""


# %% 11.1 RIGHT: with sets and dictionaries of what is in registers
def bytes_before_after(kernels, sizes, kept):
    before = after = 0
    here = set()
    for reads, writes in kernels:
        before += sum(map(sizes.get, reads)) + sum(map(sizes.get, writes))
        after += sum(sizes[a] for a in set(reads) - here)
        here |= set(reads) | set(writes)
        after += sum(sizes[a] for a in writes if a in kept)
    return [before, after]


# %% 11.2 WRONG: Divide the work
@cuda.jit
def residual_rmsnorm_kernel(h_NC, y_NC, rstd_N, x_NC, r_NC, w_C, eps):
    n, C = cuda.blockIdx.x, x_NC.shape[1]
    if cuda.threadIdx.x == 0:
        h = cuda.local.array(128, float32)
        total = float32(0.0)
        for c in range(C):
            h[c] = x_NC[n, c] + r_NC[n, c]
            h_NC[n, c] = h[c]
            total += h[c] * h[c]
        rstd = float32(1.0) / math.sqrt(total / float32(C) + eps)
        rstd_N[n] = rstd
        for c in range(C):
            y_NC[n, c] = h[c] * rstd * w_C[c]


# %% 11.2 RIGHT: every thread writes the same way, the last one writes rstd
@cuda.jit
def residual_rmsnorm_kernel(h_NC, y_NC, rstd_N, x_NC, r_NC, w_C, eps):
    partial = cuda.shared.array(32, float32)
    n, c, C = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    h = r_NC[n, c] + x_NC[n, c]
    rstd = math.pow(block_sum(h * h / float32(C), partial) + eps, float32(-0.5))
    y_NC[n, c] = (w_C[c] * rstd) * h
    h_NC[n, c] = h
    if c == C - 1:
        rstd_N[n] = rstd


# %% 11.3 WRONG: overflows for a large gate
@cuda.jit
def swiglu_kernel(y_NF, gu_N2F):
    n, f = cuda.blockIdx.x, cuda.blockIdx.y * 32 + cuda.threadIdx.x
    F = y_NF.shape[1]
    if f < F:
        e = math.exp(gu_N2F[n, f])
        y_NF[n, f] = gu_N2F[n, f] * e / (float32(1.0) + e) * gu_N2F[n, F + f]


# %% 11.3 RIGHT: the sigmoid as a hyperbolic tangent
@cuda.jit
def swiglu_kernel(y_NF, gu_N2F):
    n, f = cuda.blockIdx.x, cuda.blockIdx.y * 32 + cuda.threadIdx.x
    F, half = y_NF.shape[1], float32(0.5)
    if f < F:
        g = gu_N2F[n, f]
        y_NF[n, f] = g * gu_N2F[n, f + F] * (half + half * math.tanh(half * g))


# %% 11.4 RIGHT: one row at a time, although more are allowed
def head_loss(x_NC, w_VC, targets_N, rows):
    N = len(x_NC)
    loss, dx, dw = 0.0, np.zeros(x_NC.shape), np.zeros(w_VC.shape)
    for n in range(N):
        z = w_VC @ x_NC[n]
        lse = np.logaddexp.reduce(z)
        loss += (lse - z[targets_N[n]]) / N
        d = np.exp(z - lse)
        d[targets_N[n]] -= 1
        dx[n] = d @ w_VC / N
        dw += np.outer(d, x_NC[n]) / N
    return loss, dx, dw


# %% 11.4 WRONG: MB were in use at once
def head_loss(x_NC, w_VC, targets_N, rows):
    N = len(x_NC)
    z = x_NC @ w_VC.T
    z -= z.max(1, keepdims=True)
    n = np.arange(N)
    lse = np.log(np.exp(z).sum(1))
    d = np.exp(z - lse[:, None])
    loss = (lse - z[n, targets_N]).mean()
    d[n, targets_N] -= 1
    return loss, d @ w_VC / N, d.T @ x_NC / N
