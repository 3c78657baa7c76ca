"""Attempts at the exercises of lesson 25: see test_attempts.py."""


# %% 25.1 RIGHT: a copy whose untrained tokens are replaced
def inputs_and_targets(ids, trained):
    targets = ids.copy()
    targets[~trained] = IGNORE
    return ids[: len(ids) - 1], targets[1:]


# %% 25.2 RIGHT: pairs that belong to the same conversation, below the diagonal
def mask_and_positions(starts):
    T = len(starts)
    may_see = np.tril(np.equal.outer(starts, starts))
    return may_see, np.array([t - s for t, s in zip(range(T), starts)])


# %% 25.2 WRONG: the mask must be causal too
def mask_and_positions(starts):
    return np.equal.outer(starts, starts), np.arange(len(starts)) - starts


# %% 25.3 RIGHT: through the merged matrix
def lora_backward(dy, x, w, a, b, f):
    dw = dy.T @ x  # of the merged matrix w + f b a
    return dy @ (w + f * b @ a), f * b.T @ dw, f * dw @ a.T


# %% 25.1 WRONG: IGNORE is written into the inputs
def inputs_and_targets(ids, trained):
    targets = ids[1:]
    targets[~trained[1:]] = IGNORE
    return ids[:-1], targets


# %% 25.1 WRONG: Nothing is moved
def inputs_and_targets(ids, trained):
    return ids[:-1], np.where(trained, ids, IGNORE)[:-1]
