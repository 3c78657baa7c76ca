"""Attempts at the exercises of lesson 28: see test_attempts.py."""


# %% 28.1 RIGHT: the polar factor through the eigenvalues of a Gram matrix
def steepest(G):
    if G.shape[0] > G.shape[1]:
        return steepest(G.T).T
    values, Q = np.linalg.eigh(G @ G.T)
    return -(Q / np.sqrt(values)) @ Q.T @ G


# %% 28.1 WRONG: only its largest singular value is 1
def steepest(G):
    return -G / np.linalg.norm(G, 2)


# %% 28.2 REMARK: would take longer than a training step
def newton_schulz(G, steps=5):
    a, b, c = QUINTIC
    U, s, Vt = np.linalg.svd(G, full_matrices=False)
    s = s / max(np.sqrt((s**2).sum()), 1e-7)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return (U * s) @ Vt


# %% 28.2 RIGHT: with the Gram matrix on the right for a wide G too
def newton_schulz(G, steps=5):
    a, b, c = QUINTIC
    X = G / max(np.linalg.norm(G), 1e-7)
    for _ in range(steps):
        A = X.T @ X
        X = a * X + X @ (b * A + c * A @ A)
    return X


# %% 28.2 WRONG: a zero gradient
# as the solution, but:
# -     X = G / max(np.linalg.norm(G), 1e-7)
# +     X = G / np.linalg.norm(G)


# %% 28.3 RIGHT: the weights of the mean written out
def muon_step(w, m, g, lr, mu, decay, orthogonalize):
    new = mu * m + (1 - mu) * g
    looked = mu * new + (1 - mu) * g
    rate = 0.2 * max(w.shape) ** 0.5
    return w - lr * (decay * w + rate * orthogonalize(looked)), new


# %% 28.3 WRONG: The running mean is not used
def muon_step(w, m, g, lr, mu, decay, orthogonalize):
    m = m + (1 - mu) * (g - m)
    scale = 0.2 * np.sqrt(max(w.shape))
    return w * (1 - lr * decay) - lr * scale * orthogonalize(g), m


# %% 28.4 RIGHT: the smaller of two curves
def wsd(step, steps, peak, warmup, fraction):
    n = int(fraction * steps)
    left = steps - 1 - step  # steps after this one
    up = (step + 1) / warmup if step < warmup else 1.0
    down = 1.0 if left >= n else 1 - ((n - left) / n) ** 0.5
    return peak * min(up, down) if step >= warmup else peak * up


# %% 28.4 WRONG: the last step does not reach 0
# as the solution, but:
# -     k = step - (steps - 1 - n)
# +     k = step - (steps - n)


# %% 28.4 WRONG: n is a whole number of steps
def wsd(step, steps, peak, warmup, fraction):
    if step < warmup:
        return peak * (step + 1) / warmup
    n = fraction * steps
    k = step + 1 - (steps - n)
    return peak * (1 - (k / n) ** 0.5) if k > 0 else peak


# %% 28.4 WRONG: not only of those after the warm-up
# as the attempt above, but:
# -     n = fraction * steps
# +     n = int(fraction * (steps - warmup))


# %% 28.4 WRONG: warmup may be 0
def wsd(step, steps, peak, warmup, fraction):
    n = int(fraction * steps)
    k = step + 1 - (steps - n)
    return peak * (1 - (k / n) ** 0.5) if k > 0 else peak * min(1, (step + 1) / warmup)


# %% 28.2 WRONG: for R > C the Gram matrix is (C, C), and smaller
def newton_schulz(G, steps=5):
    a, b, c = QUINTIC
    X = G / max(np.linalg.norm(G), 1e-7)
    for _ in range(steps):
        A = np.dot(X, X.T)
        X = a * X + np.dot(b * A + c * A.dot(A), X)
    return X


# %% 28.2 WRONG: not A * A or A**2
# as the solution, but:
# -         X = a * X + (b * A + c * A @ A) @ X
# +         X = a * X + (b * A + c * A**2) @ X


# %% 28.2 WRONG: x^3 and x^5 stand for
def newton_schulz(G, steps=5):
    a, b, c = QUINTIC
    X = G / max(np.linalg.norm(G), 1e-7)
    for _ in range(steps):
        X = a * X + b * X**3 + c * X**5
    return X


# %% 28.3 WRONG: the root of the number of elements
# as the solution, but:
# -     scale = 0.2 * np.sqrt(max(w.shape))
# +     scale = 0.2 * np.sqrt(w.size)
