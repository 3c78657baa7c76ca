"""Attempts at the exercises of lesson 37: see test_attempts.py."""


# %% 37.1 RIGHT: one pair after the other
def reward_loss(chosen, rejected):
    losses, slopes = [], []
    for c, r in zip(chosen, rejected):
        if c > r:
            e = np.exp(r - c)
            losses.append(np.log1p(e))
            slopes.append(-e / (1 + e))
        else:
            e = np.exp(c - r)
            losses.append(r - c + np.log1p(e))
            slopes.append(-1 / (1 + e))
    slopes = np.array(slopes) / len(slopes)
    return sum(losses) / len(losses), slopes, -slopes


# %% 37.1 RIGHT: the hyperbolic tangent
def reward_loss(chosen, rejected):
    m = chosen - rejected
    loss = np.mean(np.maximum(-m, 0) + np.log1p(np.exp(-np.abs(m))))
    pull = (np.tanh(m / 2) - 1) / 2 / m.size
    return loss, pull, np.negative(pull)


# %% 37.1 WRONG: exp overflows
def reward_loss(chosen, rejected):
    p = 1 / (1 + np.exp(rejected - chosen))
    return -np.log(p).mean(), (p - 1) / len(p), (1 - p) / len(p)


# %% 37.1 WRONG: the derivative of sigmoid
def reward_loss(chosen, rejected):
    p = np.exp(-np.logaddexp(0, rejected - chosen))
    s = -p * (1 - p) / len(p)
    return np.logaddexp(0, rejected - chosen).mean(), s, -s


# %% 37.1 WRONG: the mean margin
def reward_loss(chosen, rejected):
    m = (chosen - rejected).mean()
    s = -np.exp(-np.logaddexp(0, m)) * np.ones(len(chosen)) / len(chosen)
    return np.logaddexp(0, -m), s, -s


# %% 37.1 WRONG: it is in the margin, too
def reward_loss(chosen, rejected):
    m = chosen - rejected
    s = -np.exp(-np.logaddexp(0, m)) / len(m)
    return np.logaddexp(0, -m).mean(), s, np.zeros(len(m))


# %% 37.1 WRONG: Return 3 things
def reward_loss(chosen, rejected):
    return np.logaddexp(0, rejected - chosen).mean()


# %% 37.2 RIGHT: logarithms
def best_policy(reference, rewards, beta):
    with np.errstate(divide="ignore"):
        z = np.log(reference) + rewards / beta
    z = np.exp(z - np.max(z))
    return z / z.sum()


# %% 37.2 RIGHT: minus infinity where the reference is 0
def best_policy(reference, rewards, beta):
    x = np.where(reference > 0, rewards / beta, -np.inf)
    w = reference * np.exp(x - x.max())
    return w / np.sum(w)


# %% 37.2 WRONG: The reference is missing
def best_policy(reference, rewards, beta):
    w = np.exp((rewards - rewards.max()) / beta)
    return w / w.sum()


# %% 37.2 WRONG: overflows, or becomes 0 everywhere
def best_policy(reference, rewards, beta):
    w = reference * np.exp((rewards - rewards.max()) / beta)
    return w / w.sum()


# %% 37.2 WRONG: a larger reward must get more
def best_policy(reference, rewards, beta):
    with np.errstate(divide="ignore"):
        z = np.log(reference) - rewards / beta
    z = np.exp(z - np.max(z))
    return z / z.sum()


# %% 37.2 WRONG: This is one answer
def best_policy(reference, rewards, beta):
    with np.errstate(divide="ignore"):
        return np.eye(len(reference))[np.argmax(np.log(reference) + rewards / beta)]


# %% 37.3 RIGHT: by a product with a pair
def dpo(now, reference, beta):
    pair = np.array([1.0, -1.0])
    m = beta * ((now - reference) @ pair)
    return np.logaddexp(0, -m), np.outer((np.tanh(m / 2) - 1) / 2 * beta, pair)


# %% 37.3 RIGHT: the ratio of the policy less that of the reference
def dpo(now, reference, beta):
    policy = now[:, 0] - now[:, 1]
    before = reference[:, 0] - reference[:, 1]
    x = beta * (policy - before)
    slopes = np.zeros(now.shape)
    slopes[:, 0] = -beta * np.exp(-np.logaddexp(0, x))
    slopes[:, 1] = -slopes[:, 0]
    return np.logaddexp(0, -x), slopes


# %% 37.3 WRONG: beta belongs inside
def dpo(now, reference, beta):
    m = (now - reference) @ np.array([1.0, -1.0])
    s = -beta * np.exp(-np.logaddexp(0, m))
    return beta * np.logaddexp(0, -m), np.stack([s, -s], 1)


# %% 37.3 WRONG: it is subtracted
def dpo(now, reference, beta):
    m = beta * (now + reference) @ np.array([1.0, -1.0])
    s = -beta * np.exp(-np.logaddexp(0, m))
    return np.logaddexp(0, -m), np.stack([s, -s], 1)


# %% 37.3 WRONG: divided by the number of pairs
def dpo(now, reference, beta):
    m = beta * (now - reference) @ np.array([1.0, -1.0])
    s = -beta * np.exp(-np.logaddexp(0, m)) / len(m)
    return np.logaddexp(0, -m), np.stack([s, -s], 1)


# %% 37.3 WRONG: exp overflows
def dpo(now, reference, beta):
    m = beta * (now - reference) @ np.array([1.0, -1.0])
    p = 1 / (1 + np.exp(-m))
    return -np.log(p), np.stack([-beta * (1 - p), beta * (1 - p)], 1)


# %% 37.3 WRONG: was changed
def dpo(now, reference, beta):
    now -= reference
    m = beta * now @ np.array([1.0, -1.0])
    s = -beta * np.exp(-np.logaddexp(0, m))
    return np.logaddexp(0, -m), np.stack([s, -s], 1)


# %% 37.4 RIGHT: the reward of each answer
def simpo(now, tokens, beta, gamma):
    c, r = (beta * now / tokens).T
    m = c - r - gamma
    pull = beta * (1 - np.tanh(m / 2)) / 2
    return np.logaddexp(0, -m), np.column_stack([-pull / tokens[:, 0], pull / tokens[:, 1]])


# %% 37.4 WRONG: each has its own number
def simpo(now, tokens, beta, gamma):
    m = beta * (now[:, 0] - now[:, 1]) / tokens.sum(1) - gamma
    s = -beta * np.exp(-np.logaddexp(0, m)) / tokens.sum(1)
    return np.logaddexp(0, -m), np.stack([s, -s], 1)


# %% 37.4 WRONG: beta is missing
def simpo(now, tokens, beta, gamma):
    m = (now / tokens) @ np.array([1.0, -1.0]) - gamma
    s = -np.exp(-np.logaddexp(0, m))
    return np.logaddexp(0, -m), np.stack([s, -s], 1) / tokens


# %% 37.4 WRONG: the other sign
def simpo(now, tokens, beta, gamma):
    m = beta * (now / tokens) @ np.array([1.0, -1.0]) - gamma
    s = -beta * np.exp(-np.logaddexp(0, m))
    return np.logaddexp(0, -m), np.stack([s, s], 1) / tokens


# %% 37.4 WRONG: divided by the number of pairs
def simpo(now, tokens, beta, gamma):
    m = beta * (now / tokens) @ np.array([1.0, -1.0]) - gamma
    s = -beta * np.exp(-np.logaddexp(0, m)) / len(m)
    return np.logaddexp(0, -m), np.stack([s, -s], 1) / tokens


# %% 37.1 WRONG: without a small number in the logarithm
def reward_loss(chosen, rejected):
    m = chosen - rejected
    p = np.exp(-np.logaddexp(0, -m))
    return -np.mean(np.log(p + 1e-8)), (p - 1) / len(m), (1 - p) / len(m)


# %% 37.2 WRONG: no power of beta
def best_policy(reference, rewards, beta):
    keep = reference > 0
    z = np.where(keep, rewards, -np.inf)
    p = reference**beta * np.exp(z - z.max())
    return p / p.sum()


# %% 37.3 WRONG: differences of probabilities
def dpo(now, reference, beta):
    r = beta * (np.exp(now) - np.exp(reference))
    m = r[:, 0] - r[:, 1]
    s = -beta * np.exp(-np.logaddexp(0, m))
    return np.logaddexp(0, -m), np.stack([s, -s], 1)


# %% 37.3 WRONG: Rows and columns are exchanged
def dpo(now, reference, beta):
    r = beta * (now - reference)
    m = r[:, 0] - r[:, 1]
    s = -beta * np.exp(-np.logaddexp(0, m))
    return np.logaddexp(0, -m), np.stack([s, -s])


# %% 37.3 RIGHT: by softmax of two
def dpo(now, reference, beta):
    r = beta * (now - reference)
    lse = np.logaddexp(r[:, 0], r[:, 1])
    p = np.exp(r - lse[:, None])
    one = np.zeros_like(p)
    one[:, 0] = 1
    return lse - r[:, 0], beta * (p - one)


# %% 37.4 WRONG: inside of log sigmoid
def simpo(now, tokens, beta, gamma):
    r = beta * now / tokens
    m = r[:, 0] - r[:, 1]
    s = -beta * np.exp(-np.logaddexp(0, m))
    return np.logaddexp(0, -m) - gamma, np.stack([s, -s], 1) / tokens


# %% 37.4 WRONG: gamma is missing in the slopes
def simpo(now, tokens, beta, gamma):
    r = beta * now / tokens
    m = r[:, 0] - r[:, 1]
    s = -beta * np.exp(-np.logaddexp(0, m))
    return np.logaddexp(0, gamma - m), np.stack([s, -s], 1) / tokens
