"""Attempts at the exercises of lesson 41: see test_attempts.py."""


# %% 41.1 RIGHT: shifts of int8
def unpack(packed):
    signed = packed.view(np.int8)
    low = (signed << 4) >> 4
    high = signed >> 4
    return np.stack([low, high], axis=2).reshape(len(packed), -1)


# %% 41.1 RIGHT: a table of 256 pairs
def unpack(packed):
    number = lambda n: n if n < 8 else n - 16
    pairs = np.array([[number(b % 16), number(b // 16)] for b in range(256)], np.int8)
    return pairs[packed].reshape(len(packed), -1)


# %% 41.1 WRONG: next to each other
def unpack(packed):
    both = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.int8)
    return np.where(both > 7, both - 16, both)


# %% 41.1 WRONG: an offset of 8
def unpack(packed):
    low, high = (packed & 15).astype(np.int8) - 8, (packed >> 4).astype(np.int8) - 8
    return np.stack([low, high], 2).reshape(len(packed), -1)


# %% 41.1 WRONG: must have the shape
def unpack(packed):
    return np.array([packed & 15, packed >> 4]).astype(np.int8)


# %% 41.2 RIGHT: a loop over groups
def quantize(w, group, most):
    R, C = w.shape
    codes, scales = np.zeros((R, C), np.int8), np.ones((R, C // group), np.float32)
    for g in range(C // group):
        part = w[:, g * group : (g + 1) * group]
        s = np.abs(part).max(axis=1) / most
        s[s == 0] = 1
        scales[:, g] = s
        codes[:, g * group : (g + 1) * group] = np.rint(part / s[:, None])
    return codes, scales


# %% 41.2 RIGHT: repeat the scales
def quantize(w, group, most):
    s = np.maximum.reduceat(np.abs(w), np.arange(0, w.shape[1], group), axis=1) / np.float32(most)
    s = np.where(s == 0, np.float32(1), s)
    return np.rint(w / np.repeat(s, group, axis=1)).astype(np.int8), s


# %% 41.2 WRONG: one per group
def quantize(w, group, most):
    s = np.abs(w).max(axis=1, keepdims=True) / most
    return np.rint(w / s).astype(np.int8), s


# %% 41.2 WRONG: not the range over it
def quantize(w, group, most):
    g = w.reshape(len(w), -1, group)
    s = (g.max(2, keepdims=True) - g.min(2, keepdims=True)) / (2 * most)
    s = np.where(s > 0, s, 1)
    return np.rint(g / s).astype(np.int8).reshape(w.shape), s[:, :, 0]


# %% 41.2 WRONG: the number of steps
def quantize(w, group, most):
    g = w.reshape(len(w), -1, group)
    m = np.abs(g).max(2, keepdims=True)
    s = np.where(m > 0, most / np.where(m > 0, m, 1), 1)
    return np.rint(g * s).astype(np.int8).reshape(w.shape), s[:, :, 0]


# %% 41.3 RIGHT: the inverse is reduced column by column
def gptq(w, x, scale, most, damp):
    w = np.array(w, np.float64)
    H = x.T @ x
    H = H + damp * np.mean(np.diagonal(H)) * np.eye(len(H))
    inverse = np.linalg.inv(H)
    codes = np.zeros(w.shape, np.int8)
    for j in range(w.shape[1]):
        q = np.clip(np.rint(w[:, j] / scale[:, 0]), -most, most)
        codes[:, j] = q
        wrong = (w[:, j] - q * scale[:, 0]) / inverse[0, 0]
        w[:, j + 1 :] -= np.outer(wrong, inverse[0, 1:])
        inverse = inverse[1:, 1:] - np.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
    return codes


# %% 41.3 RIGHT: row by row
def gptq(w, x, scale, most, damp):
    H = x.T @ x
    H[np.diag_indices(len(H))] += damp * H.trace() / len(H)
    L = np.linalg.cholesky(np.linalg.inv(H))
    out = []
    for row, s in zip(np.array(w, float), scale.ravel()):
        row = row.copy()
        q = []
        for j in range(len(row)):
            q.append(max(-most, min(most, round(row[j] / s))))
            row[j + 1 :] -= (row[j] - q[-1] * s) / L[j, j] * L[j + 1 :, j]
        out.append(q)
    return np.array(out, np.int8)


# %% 41.3 WRONG: No weight is corrected
def gptq(w, x, scale, most, damp):
    return np.clip(np.rint(w / scale), -most, most).astype(np.int8)


# %% 41.3 WRONG: This is H^-1 itself
def gptq(w, x, scale, most, damp):
    w, s = w.astype(np.float64), scale[:, 0]
    H = x.T @ x
    H += damp * np.diag(H).mean() * np.eye(len(H))
    U = np.linalg.inv(H)
    codes = np.empty(w.shape, np.int8)
    for j in range(w.shape[1]):
        codes[:, j] = np.clip(np.rint(w[:, j] / s), -most, most)
        e = (w[:, j] - codes[:, j] * s) / U[j, j]
        w[:, j + 1 :] -= e[:, None] * U[j, j + 1 :]
    return codes


# %% 41.3 WRONG: all columns behind j
# as the attempt above, but:
# -     U = np.linalg.inv(H)
# +     U = np.linalg.cholesky(np.linalg.inv(H)).T
# -         w[:, j + 1 :] -= e[:, None] * U[j, j + 1 :]
# +         w[:, j + 1 : j + 2] -= e[:, None] * U[j, j + 1 : j + 2]


# %% 41.4 RIGHT: min with a key
def best_power(w, x, powers, most):
    size = np.mean(np.abs(x), axis=0)

    def error(p):
        c = size**p
        return np.linalg.norm(x @ w.T - (x / c) @ nearest(w * c, most).T)

    return min(powers, key=error)


# %% 41.4 RIGHT: with H
def best_power(w, x, powers, most):
    H, size, best = x.T @ x, np.abs(x).mean(0), (np.inf, None)
    for p in powers:
        d = nearest(w * size**p, most) * size**-p - w
        best = min(best, (np.sum((d @ H) * d), p))
    return best[1]


# %% 41.4 WRONG: multiplied by x
def best_power(w, x, powers, most):
    size = np.abs(x).mean(0)
    return min(powers, key=lambda p: ((nearest(w * size**p, most) / size**p - w) ** 2).sum())


# %% 41.4 WRONG: not its maximum
def best_power(w, x, powers, most):
    size = np.abs(x).max(0)
    return min(
        powers, key=lambda p: ((x @ (nearest(w * size**p, most) / size**p - w).T) ** 2).sum()
    )


# %% 41.4 WRONG: return the power
def best_power(w, x, powers, most):
    size = np.abs(x).mean(0)
    e = [((x @ (nearest(w * size**p, most) / size**p - w).T) ** 2).sum() for p in powers]
    return e.index(min(e))


# %% 41.1 WRONG: shifted down
def unpack(packed):
    c = np.empty((len(packed), 2 * packed.shape[1]), np.int8)
    c[:, ::2] = packed & 15
    c[:, 1::2] = (packed & 240).astype(np.int8)
    c[c > 7] -= 16
    return c


# %% 41.1 WRONG: no sign with a size
def unpack(packed):
    c = np.empty((len(packed), 2 * packed.shape[1]), np.int8)
    c[:, ::2] = packed & 15
    c[:, 1::2] = packed >> 4
    return np.where(c > 7, 8 - c, c)


# %% 41.2 WRONG: rounds negative numbers up
def quantize(w, group, most):
    g = w.reshape(len(w), -1, group)
    s = np.abs(g).max(2, keepdims=True) / most
    s = np.where(s > 0, s, 1)
    return (g / s + 0.5).astype(np.int8).reshape(w.shape), s[..., 0].astype(np.float32)


# %% 41.2 WRONG: neighbouring weights of a row
def quantize(w, group, most):
    g = w.reshape(len(w), group, -1)
    s = np.abs(g).max(1, keepdims=True) / most
    s = np.where(s > 0, s, 1)
    return np.rint(g / s).astype(np.int8).reshape(w.shape), s[:, 0].astype(np.float32)


# %% 41.3 WRONG: that of the limited code
def gptq(w, x, scale, most, damp):
    w = w.astype(float).copy()
    H = x.T @ x
    H += damp * np.diag(H).mean() * np.eye(len(H))
    U = np.linalg.cholesky(np.linalg.inv(H)).T
    c = np.zeros(w.shape, np.int8)
    for j in range(w.shape[1]):
        r = np.rint(w[:, j] / scale[:, 0])
        c[:, j] = np.clip(r, -most, most)
        e = (w[:, j] - r * scale[:, 0]) / U[j, j]
        w[:, j + 1 :] -= e[:, None] * U[j, j + 1 :]
    return c


# %% 41.3 WRONG: w was changed
def gptq(w, x, scale, most, damp):
    H = x.T @ x
    H += damp * np.diag(H).mean() * np.eye(len(H))
    U = np.linalg.cholesky(np.linalg.inv(H)).T
    c = np.zeros(w.shape, np.int8)
    for j in range(w.shape[1]):
        c[:, j] = np.clip(np.rint(w[:, j] / scale[:, 0]), -most, most)
        e = (w[:, j] - c[:, j] * scale[:, 0]) / U[j, j]
        w[:, j + 1 :] -= e[:, None] * U[j, j + 1 :]
    return c


# %% 41.3 RIGHT: least squares on the free weights
def gptq(w, x, scale, most, damp):
    w = np.array(w, float)
    H = x.T @ x
    H = H + np.eye(len(H)) * damp * np.diag(H).mean()
    out = np.zeros(w.shape, np.int8)
    C = w.shape[1]
    for j in range(C):
        s = scale[:, 0]
        q = np.clip(np.round(w[:, j] / s), -most, most)
        out[:, j] = q
        e = q * s - w[:, j]
        f = np.arange(j + 1, C)
        if len(f):
            w[:, f] -= np.outer(e, np.linalg.solve(H[np.ix_(f, f)], H[f, j]))
    return out


# %% 41.4 WRONG: not of the weights
def best_power(w, x, powers, most):
    m = np.mean(np.abs(w), 0)
    errs = []
    for p in powers:
        c = m**p
        d = nearest(w * c, most) / c - w
        errs.append(((x @ d.T) ** 2).sum())
    return powers[int(np.argmin(errs))]


# %% 41.4 WRONG: not |mean of x|
def best_power(w, x, powers, most):
    m = np.abs(np.mean(x, 0))
    errs = []
    for p in powers:
        c = m**p
        d = nearest(w * c, most) / c - w
        errs.append(((x @ d.T) ** 2).sum())
    return powers[int(np.argmin(errs))]
