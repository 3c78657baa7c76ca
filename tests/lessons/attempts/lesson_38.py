"""Attempts at the exercises of lesson 38: see test_attempts.py."""


# %% 38.1 RIGHT: a stack of tokens, with a mark
def joined(tokens, pair):
    out, fresh = [], False
    for token in tokens:
        if out and not fresh and (out[-1], token) == pair:
            out[-1] = out[-1] + token
            fresh = True
        else:
            out.append(token)
            fresh = False
    return out


# %% 38.1 RIGHT: recursive
def joined(tokens, pair):
    if len(tokens) < 2:
        return list(tokens)
    if (tokens[0], tokens[1]) == pair:
        return [tokens[0] + tokens[1], *joined(tokens[2:], pair)]
    return [tokens[0], *joined(tokens[1:], pair)]


# %% 38.1 RIGHT: an iterator with an end
def joined(tokens, pair):
    left, right = pair
    work = iter([*tokens, None])
    out, now = [], next(work)
    while now is not None:
        after = next(work)
        if now == left and after == right:
            out.append(left + right)
            now = next(work)
        else:
            out.append(now)
            now = after
    return out


# %% 38.1 WRONG: Only the first occurrence
def joined(tokens, pair):
    for i in range(len(tokens) - 1):
        if (tokens[i], tokens[i + 1]) == pair:
            return tokens[:i] + [tokens[i] + tokens[i + 1]] + tokens[i + 2 :]
    return list(tokens)


# %% 38.1 WRONG: Tokens were split again
def joined(tokens, pair):
    left, right = pair
    text = b"".join(tokens)
    out, i = [], 0
    while i < len(text):
        n = len(left + right)
        if text[i : i + n] == left + right:
            out.append(left + right)
            i += n
        else:
            out.append(text[i : i + 1])
            i += 1
    return out


# %% 38.1 WRONG: from the right
def joined(tokens, pair):
    out, i = [], len(tokens) - 1
    while i >= 0:
        if i and (tokens[i - 1], tokens[i]) == pair:
            out.insert(0, tokens[i - 1] + tokens[i])
            i -= 2
        else:
            out.insert(0, tokens[i])
            i -= 1
    return out


# %% 38.1 RIGHT: a stack whose top is joined
def joined(tokens, pair):
    out = []
    for token in tokens:
        out.append(token)
        if len(out) > 1 and (out[-2], out[-1]) == pair:
            out[-2:] = [out[-2] + out[-1]]
    return out


# %% 38.1 WRONG: no right neighbour
def joined(tokens, pair):
    out, i = [], 0
    while i < len(tokens):
        if tokens[i] == pair[0] and tokens[i + 1] == pair[1]:
            out.append(pair[0] + pair[1])
            i += 1
        else:
            out.append(tokens[i])
        i += 1
    return out


# %% 38.2 RIGHT: counts of pairs are kept up to date
def learn(counts, n):
    words = [[[bytes([b]) for b in p], c] for p, c in counts.items()]
    merges = []
    for _ in range(n):
        total = {}
        for tokens, c in words:
            for i in range(len(tokens) - 1):
                pair = tokens[i], tokens[i + 1]
                total[pair] = total.get(pair, 0) + c
        if not total:
            return merges
        most = max(total.values())
        best = min(p for p, c in total.items() if c == most)
        merges.append(best)
        for word in words:
            tokens, i = word[0], 0
            while i < len(tokens) - 1:
                if (tokens[i], tokens[i + 1]) == best:
                    tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
                i += 1
    return merges


# %% 38.2 RIGHT: separators in one array of tokens
def learn(counts, n):
    text = []
    for piece, count in counts.items():
        text += [(bytes([b]), count) for b in piece] + [(None, 0)]
    merges = []
    while len(merges) < n:
        pairs = Counter()
        for (a, c), (b, _) in pairwise(text):
            if a is not None and b is not None:
                pairs[a, b] += c
        if not pairs:
            return merges
        best = sorted(pairs.items(), key=lambda x: (-x[1], x[0]))[0][0]
        merges.append(best)
        out, i = [], 0
        while i < len(text):
            if i + 1 < len(text) and (text[i][0], text[i + 1][0]) == best:
                out.append((best[0] + best[1], text[i][1]))
                i += 2
            else:
                out.append(text[i])
                i += 1
        text = out
    return merges


# %% 38.2 WRONG: All merges are of single bytes
def learn(counts, n):
    pairs = Counter()
    for piece, count in counts.items():
        for a, b in pairwise([bytes([x]) for x in piece]):
            pairs[a, b] += count
    return sorted(pairs, key=lambda p: (-pairs[p], p))[:n]


# %% 38.2 WRONG: take the SMALLEST
def learn(counts, n):
    words = {p: [bytes([b]) for b in p] for p in counts}
    merges = []
    while len(merges) < n:
        pairs = Counter()
        for p, tokens in words.items():
            for pair in pairwise(tokens):
                pairs[pair] += counts[p]
        if not pairs:
            break
        merges.append(pairs.most_common(1)[0][0])
        for p, tokens in words.items():
            i = 0
            while i < len(tokens) - 1:
                if (tokens[i], tokens[i + 1]) == merges[-1]:
                    tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
                i += 1
    return merges


# %% 38.2 WRONG: A piece counts once here
# as the attempt above, but:
# -                 pairs[pair] += counts[p]
# +                 pairs[pair] += 1
# -         merges.append(pairs.most_common(1)[0][0])
# +         merges.append(min(pairs, key=lambda pair: (-pairs[pair], pair)))


# %% 38.2 WRONG: Only neighbours inside a piece
def learn(counts, n):
    tokens = [bytes([b]) for p, c in counts.items() for b in p * c]
    merges = []
    while len(merges) < n:
        pairs = Counter(pairwise(tokens))
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        i = 0
        while i < len(tokens) - 1:
            if (tokens[i], tokens[i + 1]) == best:
                tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
            i += 1
    return merges


# %% 38.2 WRONG: A piece is bytes: iterating gives numbers
def learn(counts, n):
    pairs = Counter()
    for piece, count in counts.items():
        for a, b in pairwise(piece):
            pairs[a + b""] += count
    return list(pairs)[:n]


# %% 38.3 RIGHT: all merges in their order
def encode(piece, merges):
    tokens = [piece[i : i + 1] for i in range(len(piece))]
    for left, right in merges:
        i = 0
        while i + 1 < len(tokens):
            if tokens[i] == left and tokens[i + 1] == right:
                tokens[i : i + 2] = [left + right]
            i += 1
    return tokens


# %% 38.3 RIGHT: one pair at a time, the first of the lowest rank
def encode(piece, merges):
    rank = {p: i for i, p in enumerate(merges)}
    tokens = [bytes([b]) for b in piece]
    while len(tokens) > 1:
        ranks = [rank.get(p, len(merges)) for p in pairwise(tokens)]
        best = min(ranks)
        if best == len(merges):
            break
        i = ranks.index(best)
        tokens = [*tokens[:i], tokens[i] + tokens[i + 1], *tokens[i + 2 :]]
    return tokens


# %% 38.3 RIGHT: recursive
def encode(piece, merges):
    def work(tokens):
        found = [merges.index(p) for p in pairwise(tokens) if p in merges]
        if not found:
            return tokens
        left, right = merges[min(found)]
        i = next(i for i, p in enumerate(pairwise(tokens)) if p == (left, right))
        return work((*tokens[:i], left + right, *tokens[i + 2 :]))

    return list(work(tuple(bytes([b]) for b in piece)))


# %% 38.3 WRONG: the longest token that fits
def encode(piece, merges):
    known = {a + b for a, b in merges}
    out, i = [], 0
    while i < len(piece):
        n = max([k for k in range(1, len(piece) - i + 1) if piece[i : i + k] in known], default=1)
        out.append(piece[i : i + n])
        i += n
    return out


# %% 38.3 WRONG: from the last to the first
def encode(piece, merges):
    tokens = [bytes([b]) for b in piece]
    for left, right in reversed(merges):
        i = 0
        while i + 1 < len(tokens):
            if tokens[i] == left and tokens[i + 1] == right:
                tokens[i : i + 2] = [left + right]
            i += 1
    return tokens


# %% 38.3 WRONG: A token is bytes
def encode(piece, merges):
    ids = {bytes([b]): b for b in range(256)}
    return [ids[bytes([b])] for b in piece]


# %% 38.3 WRONG: The first pair in the PIECE
def encode(piece, merges):
    tokens = [bytes([b]) for b in piece]
    i = 0
    while i + 1 < len(tokens):
        if (tokens[i], tokens[i + 1]) in merges:
            tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
            i = 0
        else:
            i += 1
    return tokens


# %% 38.4 RIGHT: with the math module's logarithm
def bits_per_byte(loss, tokens, nbytes):
    import math

    return tokens * loss / (nbytes * math.log(2))


# %% 38.4 RIGHT: through the perplexity
def bits_per_byte(loss, tokens, nbytes):
    return np.log2(np.exp(loss)) * tokens / nbytes


# %% 38.4 WRONG: These are nats
def bits_per_byte(loss, tokens, nbytes):
    return loss * tokens / nbytes


# %% 38.4 WRONG: base e
def bits_per_byte(loss, tokens, nbytes):
    return loss * tokens / np.log10(2) / nbytes


# %% 38.4 WRONG: perplexity
def bits_per_byte(loss, tokens, nbytes):
    return 2 ** (loss * tokens / np.log(2) / nbytes)


# %% 38.4 WRONG: Return one number
def bits_per_byte(loss, tokens, nbytes):
    return loss / np.log(2), tokens / nbytes


# %% 38.1 WRONG: list of tokens was changed
def joined(tokens, pair):
    i = 0
    while i < len(tokens) - 1:
        if (tokens[i], tokens[i + 1]) == pair:
            tokens[i : i + 2] = [pair[0] + pair[1]]
        i += 1
    return tokens


# %% 38.4 WRONG: 1.44 is rounded
def bits_per_byte(loss, tokens, nbytes):
    return 1.44 * loss * tokens / nbytes


# %% 38.4 WRONG: its own logarithm is not needed
def bits_per_byte(loss, tokens, nbytes):
    return np.log2(loss) * tokens / nbytes
