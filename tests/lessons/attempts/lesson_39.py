"""Attempts at the exercises of lesson 39: see test_attempts.py."""


# %% 39.1 RIGHT: a set that grows
def repeated_share(tokens, n):
    seen, again, total = set(), 0, 0
    for i in range(len(tokens) - n + 1):
        gram = tuple(tokens[i : i + n])
        again += gram in seen
        seen.add(gram)
        total += 1
    return again / max(total, 1)


# %% 39.1 RIGHT: zip of shifted lists, and a Counter
def repeated_share(tokens, n):
    from collections import Counter

    counts = Counter(zip(*(tokens[i:] for i in range(n))))
    total = sum(counts.values())
    return sum(c - 1 for c in counts.values()) / total if total else 0


# %% 39.1 RIGHT: np.unique over windows
def repeated_share(tokens, n):
    if len(tokens) < n:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(np.array(tokens), n)
    return 1 - len(np.unique(windows, axis=0)) / len(windows)


# %% 39.1 WRONG: Tokens are counted
def repeated_share(tokens, n):
    return 1 - len(set(tokens)) / len(tokens) if tokens else 0.0


# %% 39.1 WRONG: n-grams, not over all tokens
def repeated_share(tokens, n):
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return (len(grams) - len(set(grams))) / len(tokens) if tokens else 0.0


# %% 39.1 WRONG: This is their number
def repeated_share(tokens, n):
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(grams) - len(set(grams))


# %% 39.2 RIGHT: one hash function after the other
def signature(grams, a, b, prime):
    return np.array(
        [min((int(a[k]) * int(x) + int(b[k])) % prime for x in grams) for k in range(len(a))]
    )


# %% 39.2 RIGHT: the minimum grows gram by gram
def signature(grams, a, b, prime):
    best = np.full(a.shape, prime, np.int64)
    for x in grams:
        best = np.minimum(best, (a * x + b) % prime)
    return best


# %% 39.2 WRONG: the n-gram with the smallest value
def signature(grams, a, b, prime):
    values = (np.outer(a, grams) + b[:, None]) % prime
    return grams[values.argmin(axis=1)]


# %% 39.2 WRONG: The remainder is missing
def signature(grams, a, b, prime):
    return (np.outer(a, grams) + b[:, None]).min(axis=1)


# %% 39.2 WRONG: b was added after
def signature(grams, a, b, prime):
    return (np.outer(a, grams) % prime + b[:, None]).min(axis=1)


# %% 39.2 WRONG: one for each hash function
def signature(grams, a, b, prime):
    return (a[0] * grams + b[0]) % prime


# %% 39.3 RIGHT: a dict per band
def first_ones(signatures, bands):
    D, K = signatures.shape
    rows = K // bands
    tables = [{} for _ in range(bands)]
    kept = []
    for d in range(D):
        new = True
        for i, table in enumerate(tables):
            key = tuple(signatures[d, i * rows : (i + 1) * rows])
            if key in table:
                new = False
            table[key] = d
        if new:
            kept.append(d)
    return kept


# %% 39.3 RIGHT: all pairs, slowly
def first_ones(signatures, bands):
    cut = signatures.reshape(len(signatures), bands, -1)
    kept = []
    for d in range(len(cut)):
        if not (cut[:d] == cut[d]).all(axis=2).any():
            kept.append(d)
    return kept


# %% 39.3 WRONG: one is enough
def first_ones(signatures, bands):
    seen, kept = set(), []
    for d, row in enumerate(signatures):
        if tuple(row) not in seen:
            kept.append(d)
        seen.add(tuple(row))
    return kept


# %% 39.3 WRONG: Bands of a dropped document count
def first_ones(signatures, bands):
    cut = signatures.reshape(len(signatures), bands, -1)
    kept = []
    for d in range(len(cut)):
        if not any((cut[d] == cut[k]).all(axis=1).any() for k in kept):
            kept.append(d)
    return kept


# %% 39.3 WRONG: One equal number is not enough
def first_ones(signatures, bands):
    kept = []
    for d, row in enumerate(signatures):
        if not any((row == other).any() for other in signatures[:d]):
            kept.append(d)
    return kept


# %% 39.3 WRONG: keep the first
def first_ones(signatures, bands):
    cut = signatures.reshape(len(signatures), bands, -1)
    return [d for d in range(len(cut)) if not (cut[d + 1 :] == cut[d]).all(axis=2).any()]


# %% 39.4 RIGHT: with NumPy
def mixture(tokens, alpha, total):
    n = np.array(tokens, float)
    p = n**alpha / (n**alpha).sum()
    return p, p * total / n


# %% 39.4 RIGHT: a loop, relative to the largest
def mixture(tokens, alpha, total):
    most = max(tokens)
    w = [(n / most) ** alpha for n in tokens]
    p, epochs = [], []
    for n, x in zip(tokens, w):
        p.append(x / sum(w))
        epochs.append(total * p[-1] / n)
    return p, epochs


# %% 39.4 WRONG: p is the same for all
def mixture(tokens, alpha, total):
    p = [1 / len(tokens)] * len(tokens)
    return p, [x * total / n for x, n in zip(p, tokens)]


# %% 39.4 WRONG: the size is the base
def mixture(tokens, alpha, total):
    w = [n ** (1 / alpha) if alpha else 1 for n in tokens]
    p = [x / sum(w) for x in w]
    return p, [x * total / n for x, n in zip(p, tokens)]


# %% 39.4 WRONG: must be a list of numbers
def mixture(tokens, alpha, total):
    w = [n**alpha for n in tokens]
    return sum(w), sum(w) * total


# %% 39.1 WRONG: An n-gram has n tokens
def repeated_share(tokens, n):
    g = [tuple(tokens[i : i + n + 1]) for i in range(len(tokens) - n)]
    return 1 - len(set(g)) / len(g) if g else 0.0


# %% 39.1 WRONG: the first one counts, too
def repeated_share(tokens, n):
    g = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return (len(g) - len(set(g))) / (len(g) - 1) if len(g) > 1 else 0.0


# %% 39.2 WRONG: float64 has 53 bits
def signature(grams, a, b, prime):
    v = a[:, None].astype(float) * grams + b[:, None]
    return (v % prime).min(1).astype(np.int64)


# %% 39.3 WRONG: A key must tell numbers apart
def first_ones(signatures, bands):
    r = signatures.shape[1] // bands
    seen, kept = set(), []
    for d, row in enumerate(signatures):
        keys = {
            f"{i}" + "".join(str(int(v)) for v in row[i * r : (i + 1) * r]) for i in range(bands)
        }
        if not keys & seen:
            kept.append(d)
        seen |= keys
    return kept


# %% 39.3 WRONG: The order of a band
def first_ones(signatures, bands):
    r = signatures.shape[1] // bands
    seen, kept = set(), []
    for d, row in enumerate(signatures):
        keys = {(i, frozenset(row[i * r : (i + 1) * r].tolist())) for i in range(bands)}
        if not keys & seen:
            kept.append(d)
        seen |= keys
    return kept


# %% 39.3 RIGHT: np.unique
def first_ones(signatures, bands):
    D, K = signatures.shape
    keep = np.ones(D, bool)
    for part in np.hsplit(signatures, bands):
        _, first, back = np.unique(part, axis=0, return_index=True, return_inverse=True)
        keep &= first[back.ravel()] == np.arange(D)
    return np.nonzero(keep)[0].tolist()
