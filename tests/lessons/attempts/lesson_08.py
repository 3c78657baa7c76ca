"""Attempts at the exercises of lesson 8: see test_attempts.py."""


# %% 8.1 WRONG: 1 of 32 threads wrote all
@cuda.jit
def adamw_kernel(w_n, m_n, v_n, g_n, lr, c1, root2, n_decay, beta1, beta2, eps, weight_decay):
    one = float32(1.0)
    if cuda.grid(1) == 0:
        for i in range(w_n.size):
            if i < n_decay:
                w_n[i] *= one - lr * weight_decay
            m_n[i] = beta1 * m_n[i] + (one - beta1) * g_n[i]
            v_n[i] = beta2 * v_n[i] + (one - beta2) * g_n[i] * g_n[i]
            w_n[i] -= lr * (m_n[i] / c1) / (math.sqrt(v_n[i]) / root2 + eps)


# %% 8.1 RIGHT: with convex combinations and corrected moments
@cuda.jit
def adamw_kernel(w_n, m_n, v_n, g_n, lr, c1, root2, n_decay, beta1, beta2, eps, weight_decay):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    one = float32(1.0)
    if i >= w_n.size:
        return
    m = m_n[i] = beta1 * m_n[i] + (one - beta1) * g_n[i]
    v = v_n[i] = beta2 * v_n[i] + (one - beta2) * g_n[i] ** 2
    w = w_n[i]
    decay = weight_decay * w if i < n_decay else float32(0.0)
    w_n[i] = w - lr * (m / c1 / (math.sqrt(v / (root2 * root2)) + eps) + decay)


# %% 8.2 RIGHT: the half cosine as a squared cosine
def learning_rate(step, steps, peak, warmup, min_ratio):
    if step + 1 <= warmup:
        return (step + 1) * peak / warmup
    span = steps - 1 - warmup
    x = (step - warmup) / span if span > 0 else 0.0
    return peak * (min_ratio + (1 - min_ratio) * math.cos(x * math.pi / 2) ** 2)


# %% 8.2 WRONG: The rate must never exceed the peak
def learning_rate(step, steps, peak, warmup, min_ratio):
    if step <= warmup and warmup:
        return peak * (step + 1) / warmup
    x = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * x)))


# %% 8.3 RIGHT: all arrays as one long vector
def clip_factor(gradients, limit):
    norm = np.linalg.norm(np.concatenate([g.ravel() for g in gradients]))
    return limit / norm if norm > limit else 1


# %% 8.3 WRONG: zero-size array
# the largest element as a common factor, against overflow
def clip_factor(gradients, limit):
    top = max(np.abs(g).max() for g in gradients)
    return min(1.0, limit / (top * math.sqrt(sum(((g / top) ** 2).sum() for g in gradients))))
