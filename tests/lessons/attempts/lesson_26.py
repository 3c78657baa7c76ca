"""Attempts at the exercises of lesson 26: see test_attempts.py."""


# %% 26.1 RIGHT: the sum of the advantages of each action
def policy_gradient(logits, actions, advantages):
    n = max(1, len(actions))
    w = np.exp(logits - np.max(logits))
    each = np.bincount(actions, advantages, minlength=len(logits))
    return (each - np.sum(advantages) * w / w.sum()) / n


# %% 26.2 RIGHT: one group after the other
def group_advantages(rewards):
    out = np.zeros(rewards.shape)
    for i, row in enumerate(rewards):
        d = row - row.mean()
        out[i] = d / (np.sqrt(d @ d / len(d)) + 1e-4)
    return out


# %% 26.3 RIGHT: by the sign of the advantage
def clipped(now, then, advantages, eps):
    r = np.exp(now - then)
    gone = np.where(advantages > 0, r > 1 + eps, r < 1 - eps)
    edge = np.where(advantages > 0, 1 + eps, 1 - eps)
    return -advantages * np.where(gone, edge, r), -advantages * r * ~gone


# %% 26.4 WRONG: NaN stands where no token is counted
def kl_to_reference(now, reference, counted):
    d = reference - now
    n = max(1, counted.sum())
    return ((np.exp(d) - d - 1) * counted).sum() / n, (1 - np.exp(d)) * counted / n


# %% 26.1 RIGHT: finite differences
def policy_gradient(logits, actions, advantages):
    if len(actions) == 0:
        return np.zeros(len(logits))

    def f(x):
        x = x - x.max()
        return np.mean(advantages * (x - np.log(np.exp(x).sum()))[actions])

    return np.array([(f(logits + s) - f(logits - s)) / 2e-5 for s in 1e-5 * np.eye(len(logits))])


# %% 26.1 WRONG: return its derivative by each of the V logits
def policy_gradient(logits, actions, advantages):
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return (advantages * np.log(p[actions])).mean()


# %% 26.1 WRONG: take the mean over the samples
def policy_gradient(logits, actions, advantages):
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return advantages[:, None] * (np.eye(len(p))[actions] - p)


# %% 26.1 WRONG: divided by the number of logits
def policy_gradient(logits, actions, advantages):
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return (advantages[:, None] * (np.eye(len(p))[actions] - p)).sum(0) / len(logits)


# %% 26.1 WRONG: use the advantages as they are given
def policy_gradient(logits, actions, advantages):
    p = np.exp(logits - logits.max())
    p /= p.sum()
    advantages = advantages - advantages.mean() if len(advantages) else advantages
    return (advantages[:, None] * (np.eye(len(p))[actions] - p)).sum(0) / max(len(actions), 1)


# %% 26.1 WRONG: do not sum to 1
def policy_gradient(logits, actions, advantages):
    p = np.exp(logits - logits.max())
    each = advantages[:, None] * (np.eye(len(p))[actions] - p)
    return each.sum(0) / max(len(actions), 1)


# %% 26.1 WRONG: multiplies its p, too
def policy_gradient(logits, actions, advantages):
    p = np.exp(logits - logits.max())
    p /= p.sum()
    each = advantages[:, None] * np.eye(len(p))[actions]
    return each.sum(0) / max(len(actions), 1) - p


# %% 26.1 WRONG: another constant or a limit changes the softmax
# as the solution, but:
# -     p = np.exp(logits - logits.max())
# +     p = np.exp(np.minimum(logits, 700))


# %% 26.2 RIGHT: transposed
def group_advantages(rewards):
    r = rewards.T
    return ((r - r.mean(0)) / (r.std(0) + 1e-4)).T


# %% 26.2 WRONG: add 1e-4
def group_advantages(rewards):
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1)


# %% 26.2 WRONG: the root of the SUM of squares
def group_advantages(rewards):
    d = rewards - rewards.mean(1, keepdims=True)
    return d / (np.sqrt((d**2).sum(1, keepdims=True)) + 1e-4)


# %% 26.2 WRONG: the mean of |reward - mean|
def group_advantages(rewards):
    d = rewards - rewards.mean(1, keepdims=True)
    return d / (np.abs(d).mean(1, keepdims=True) + 1e-4)


# %% 26.2 WRONG: Rounding may leave 1e-17
def group_advantages(rewards):
    return np.nan_to_num((rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True))


# %% 26.3 WRONG: compare with <=
def clipped(now, then, advantages, eps):
    r = np.exp(now - then)
    free, bound = r * advantages, np.clip(r, 1 - eps, 1 + eps) * advantages
    return -np.minimum(free, bound), np.where(free < bound, -free, 0.0)


# %% 26.3 WRONG: The logarithm is clipped
def clipped(now, then, advantages, eps):
    d = now - then
    free, bound = np.exp(d) * advantages, np.exp(np.clip(d, -eps, eps)) * advantages
    return -np.minimum(free, bound), np.where(free <= bound, -free, 0)


# %% 26.3 WRONG: divided by n
def clipped(now, then, advantages, eps):
    r = np.exp(now - then)
    free, bound = r * advantages, np.clip(r, 1 - eps, 1 + eps) * advantages
    return -np.minimum(free, bound), np.where(free <= bound, -free, 0.0) / len(now)


# %% 26.3 WRONG: below 1 - eps only if A is negative
def clipped(now, then, advantages, eps):
    r = np.exp(now - then)
    free, bound = r * advantages, np.clip(r, 1 - eps, 1 + eps) * advantages
    return -np.minimum(free, bound), np.where(r <= 1 + eps, -free, 0.0)


# %% 26.3 WRONG: the range is 1 - eps to 1 + eps
def clipped(now, then, advantages, eps):
    r = np.exp(now - then)
    free, bound = r * advantages, np.clip(r, -eps, eps) * advantages
    return -np.minimum(free, bound), np.where(free <= bound, -free, 0.0)


# %% 26.3 WRONG: The product is clipped
def clipped(now, then, advantages, eps):
    r = np.exp(now - then)
    free = r * advantages
    bound = np.clip(free, 1 - eps, 1 + eps)
    return -np.minimum(free, bound), np.where(free <= bound, -free, 0.0)


# %% 26.3 WRONG: it is an argument
def clipped(now, then, advantages, eps):
    r = np.exp(now - then)
    free, bound = r * advantages, np.clip(r, 0.8, 1.2) * advantages
    return -np.minimum(free, bound), np.where(free <= bound, -free, 0.0)


# %% 26.3 WRONG: A is missing
def clipped(now, then, advantages, eps):
    r = np.exp(now - then)
    free, bound = r * advantages, np.clip(r, 1 - eps, 1 + eps) * advantages
    return -np.minimum(free, bound), np.where(free <= bound, -r, 0.0)


# %% 26.3 WRONG: in this order
def clipped(now, then, advantages, eps):
    r = np.exp(now - then)
    free, bound = r * advantages, np.clip(r, 1 - eps, 1 + eps) * advantages
    return np.where(free <= bound, -free, 0.0), -np.minimum(free, bound)


# %% 26.4 WRONG: `counted` says which tokens count
def kl_to_reference(now, reference, counted):
    d = np.nan_to_num(reference - now)
    n = max(counted.sum(), 1)
    return (np.exp(d) - d - 1).sum() / n, (1 - np.exp(d)) / n


# %% 26.4 WRONG: `counted` says which tokens count
def kl_to_reference(now, reference, counted):
    d = reference - now
    n = max((~np.isnan(d)).sum(), 1)
    return np.nansum(np.exp(d) - d - 1) / n, np.nan_to_num(1 - np.exp(d)) / n


# %% 26.4 WRONG: divided by the counted tokens of the row
def kl_to_reference(now, reference, counted):
    d = np.where(counted, reference - now, 0.0)
    n = np.maximum(counted.sum(1, keepdims=True), 1)
    return (np.exp(d) - d - 1).sum() / max(counted.sum(), 1), (1 - np.exp(d)) / n


# %% 26.4 WRONG: weighted by its probability
def kl_to_reference(now, reference, counted):
    n = max(counted.sum(), 1)
    p, q = np.exp(now[counted]), reference[counted]
    slopes = np.zeros(now.shape)
    d = q - now[counted]
    slopes[counted] = p * (1 - np.exp(d)) / n
    return (p * (np.exp(d) - d - 1)).sum() / n, slopes


# %% 26.4 WRONG: the derivative of d^2 / 2
def kl_to_reference(now, reference, counted):
    n = max(counted.sum(), 1)
    d = np.where(counted, reference - now, 0.0)
    return ((np.exp(d) - d - 1) / n).sum(), -d / n
