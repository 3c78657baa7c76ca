"""Attempts at the exercises of lesson 5: see test_attempts.py."""


# %% 5.1 RIGHT: sums of outer products, one row at a time
def linear_bwd(dy_NO, x_NI, w_OI):
    dx = np.stack([sum(d * w for d, w in zip(dy, w_OI)) for dy in dy_NO])
    dw = sum(np.outer(dy, x) for dy, x in zip(dy_NO, x_NI))
    return dx, dw


# %% 5.2 RIGHT: the Jacobian of each row, as a matrix
def rmsnorm_bwd(dy_NC, x_NC, w_C, rstd_N):
    dx = []
    for dy, x, r in zip(dy_NC, x_NC, rstd_N):
        J = r * np.eye(len(x)) - r**3 * np.outer(x, x) / len(x)
        dx.append((dy * w_C) @ J)
    return np.array(dx), np.einsum("nc,nc,n->c", dy_NC, x_NC, rstd_N)


# %% 5.2 WRONG: The mean is taken over the whole array
def rmsnorm_bwd(dy_NC, x_NC, w_C, rstd_N):
    xhat = x_NC * rstd_N[:, None]
    g = dy_NC * w_C
    return rstd_N[:, None] * (g - xhat * (g * xhat).mean()), (dy_NC * xhat).sum(0)


# %% 5.3 RIGHT: the smaller of two expressions for the same number
def gradient_error(f, x, gradient, v, step):
    up, down = f(x + v * step), f(x - v * step)
    should = np.vdot(gradient, v)
    slope = 0.5 / step * (up - down)
    return float(np.abs(slope - should) / np.maximum(np.abs(slope), np.abs(should)))


# %% 5.3 WRONG: too many indices
# the error for arrays of two axes only
def gradient_error(f, x, gradient, v, step):
    numeric = (f(x + step * v) - f(x - step * v)) / (2 * step)
    analytic = sum(gradient[i, j] * v[i, j] for i in range(4) for j in range(5))
    return abs(numeric - analytic) / max(abs(numeric), abs(analytic))


# %% 5.4 WRONG: Divide the work
@cuda.jit
def rmsnorm_bwd_dx_kernel(dx_NC, dy_NC, x_NC, w_C, rstd_N):
    partial = cuda.shared.array(32, float32)
    n, tid = cuda.blockIdx.x, cuda.threadIdx.x
    C, rstd = x_NC.shape[1], rstd_N[n]
    acc = float32(0.0)
    for c in range(tid, C, cuda.blockDim.x):
        acc += dy_NC[n, c] * w_C[c] * x_NC[n, c] * rstd
    mean = block_sum(acc, partial) / float32(C)
    if tid == 0:
        for c in range(C):
            dx_NC[n, c] = rstd * (dy_NC[n, c] * w_C[c] - x_NC[n, c] * rstd * mean)


# %% 5.4 RIGHT: the constant part of the second term is computed once
@cuda.jit
def rmsnorm_bwd_dx_kernel(dx_NC, dy_NC, x_NC, w_C, rstd_N):
    partial = cuda.shared.array(32, float32)
    n, tid = cuda.blockIdx.x, cuda.threadIdx.x
    C, r = x_NC.shape[1], rstd_N[n]
    acc = float32(0.0)
    c = tid
    while c < C:
        acc += dy_NC[n, c] * w_C[c] * x_NC[n, c]
        c += cuda.blockDim.x
    k = block_sum(acc, partial) * r * r * r / float32(C)
    for c in range(tid, C, cuda.blockDim.x):
        dx_NC[n, c] = r * dy_NC[n, c] * w_C[c] - k * x_NC[n, c]
