"""Attempts at the exercises of lesson 36: see test_attempts.py."""


# %% 36.1 RIGHT: with zip and a break
def accepted(draft, drawn):
    out = []
    for guess, token in zip([*draft, None], drawn):
        out.append(token)
        if guess != token:
            break
    return out


# %% 36.1 RIGHT: with NumPy
def accepted(draft, drawn):
    equal = np.array(draft, int) == np.array(drawn[:-1], int)
    return drawn[: int(np.cumprod(equal).sum()) + 1]


# %% 36.1 RIGHT: recursion
def accepted(draft, drawn):
    if not draft or draft[0] != drawn[0]:
        return drawn[:1]
    return drawn[:1] + accepted(draft[1:], drawn[1:])


# %% 36.1 RIGHT: the longest common start
def accepted(draft, drawn):
    n = max(i for i in range(len(draft) + 1) if draft[:i] == drawn[:i])
    return [*draft[:n], drawn[n]]


# %% 36.1 WRONG: even if it equals the drawn token
def accepted(draft, drawn):
    return [d for d, t in zip(draft, drawn) if d == t] + (
        [drawn[-1]] if draft == drawn[:-1] else []
    )


# %% 36.1 WRONG: The first wrong draft was kept
def accepted(draft, drawn):
    n = 0
    while n < len(draft) and draft[n] == drawn[n]:
        n += 1
    return [*draft[: n + 1], drawn[n]]


# %% 36.1 WRONG: All drafts are right, so the row of the last one
def accepted(draft, drawn):
    for n in range(len(draft)):
        if draft[n] != drawn[n]:
            return drawn[: n + 1]
    return draft


# %% 36.1 WRONG: a list of tokens, which are whole numbers
def accepted(draft, drawn):
    return [d == t for d, t in zip(draft, drawn)]


# %% 36.1 WRONG: is int, not a list of tokens
def accepted(draft, drawn):
    n = 0
    while n < len(draft) and draft[n] == drawn[n]:
        n += 1
    return n


# %% 36.1 WRONG: was changed
def accepted(draft, drawn):
    out = []
    while draft and draft[0] == drawn[0]:
        out.append(draft.pop(0))
        drawn.pop(0)
    return [*out, drawn[0]]


# %% 36.2 RIGHT: the answer by itself, and a for loop over the drawn tokens
def generate(prompt, new, step, guess, end):
    answer = [step(0, prompt)[-1]]
    while answer[-1] != end and len(answer) < new:
        draft = guess(prompt + answer)
        draft = draft[: max(0, new - len(answer) - 1)]
        rows = [answer[-1]] + draft
        drawn = step(len(prompt) + len(answer) - 1, rows)
        for i in range(len(rows)):
            answer.append(drawn[i])
            if drawn[i] == end or i == len(draft) or draft[i] != drawn[i]:
                break
    return answer


# %% 36.2 RIGHT: the end is cut off afterwards
def generate(prompt, new, step, guess, end):
    answer = step(0, prompt)[-1:]
    while end not in answer and len(answer) < new:
        draft = guess(prompt + answer)[: new - len(answer) - 1]
        drawn = step(len(prompt) + len(answer) - 1, answer[-1:] + draft)
        n = next((i for i in range(len(draft)) if draft[i] != drawn[i]), len(draft))
        answer += drawn[: n + 1]
    return answer[: answer.index(end) + 1] if end in answer else answer


# %% 36.2 RIGHT: a draft that stops at its first end
def generate(prompt, new, step, guess, end):
    tokens = prompt + [step(0, prompt)[-1]]
    stop = len(prompt) + new
    while len(tokens) < stop and tokens[-1] != end:
        draft = guess(tokens)[: stop - len(tokens) - 1]
        if end in draft:
            draft = draft[: draft.index(end)]
        drawn = step(len(tokens) - 1, [tokens[-1], *draft])
        n = 0
        while n < len(draft) and draft[n] == drawn[n]:
            n += 1
        tokens = tokens + drawn[: n + 1]
    return tokens[len(prompt) :]


# %% 36.2 WRONG: has the keys of the rejected draft
def generate(prompt, new, step, guess, end):
    tokens, cached = [*prompt, step(0, prompt)[-1]], len(prompt)
    while len(tokens) < len(prompt) + new and tokens[-1] != end:
        draft = guess(tokens)[: len(prompt) + new - len(tokens) - 1]
        drawn = step(cached, [tokens[-1], *draft])
        cached += 1 + len(draft)
        n = 0
        while n < len(draft) and draft[n] == drawn[n]:
            n += 1
        tokens += drawn[: n + 1]
        if end in tokens[len(prompt) :]:
            tokens = tokens[: tokens.index(end, len(prompt)) + 1]
    return tokens[len(prompt) :]


# %% 36.2 WRONG: the rows of a step are the last token AND the drafts
def generate(prompt, new, step, guess, end):
    answer = [step(0, prompt)[-1]]
    while len(answer) < new and answer[-1] != end:
        answer.append(step(len(prompt) + len(answer) - 1, [answer[-1]])[0])
    return answer


# %% 36.2 WRONG: accept all drafts up to the first wrong one
def generate(prompt, new, step, guess, end):
    answer = [step(0, prompt)[-1]]
    while len(answer) < new and answer[-1] != end:
        draft = guess(prompt + answer)[: new - len(answer) - 1]
        drawn = step(len(prompt) + len(answer) - 1, [answer[-1], *draft])
        if draft == drawn[:-1]:
            answer += drawn
        else:
            answer.append(drawn[0])
        if end in answer:
            answer = answer[: answer.index(end) + 1]
    return answer


# %% 36.2 WRONG: before the first token was drawn
def generate(prompt, new, step, guess, end):
    answer = []
    while len(answer) < new:
        draft = guess(prompt + answer)
        answer += step(len(prompt) + len(answer), draft)
    return answer


# %% 36.2 WRONG: The first call is step
def generate(prompt, new, step, guess, end):
    step(0, prompt[:-1])
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new:
        tokens += step(len(tokens) - 1, [tokens[-1]])
    return tokens[len(prompt) :]


# %% 36.2 WRONG: is str, not a list of tokens
def generate(prompt, new, step, guess, end):
    return " ".join(map(str, prompt))


# %% 36.2 WRONG: The answer is too short
def generate(prompt, new, step, guess, end):
    tokens = [*prompt, step(0, prompt)[-1]]
    for _ in range(2):
        if len(tokens) < len(prompt) + new:
            draft = guess(tokens)[: len(prompt) + new - len(tokens) - 1]
            drawn = step(len(tokens) - 1, [tokens[-1], *draft])
            n = 0
            while n < len(draft) and draft[n] == drawn[n]:
                n += 1
            tokens += drawn[: n + 1]
    return tokens[len(prompt) :]


# %% 36.2 WRONG: prompt was changed
def generate(prompt, new, step, guess, end):
    n_prompt = len(prompt)
    prompt.append(step(0, list(prompt))[-1])
    while len(prompt) < n_prompt + new and prompt[-1] != end:
        draft = guess(prompt)[: n_prompt + new - len(prompt) - 1]
        drawn = step(len(prompt) - 1, [prompt[-1], *draft])
        for d, t in zip([*draft, None], drawn):
            prompt.append(t)
            if d != t or t == end:
                break
    return prompt[n_prompt:]


# %% 36.2 WRONG: the first row is the last token of the answer so far
def generate(prompt, new, step, guess, end):
    tokens = [*prompt, step(0, prompt)[-1]]
    while len(tokens) < len(prompt) + new:
        draft = guess(tokens)[: len(prompt) + new - len(tokens) - 1]
        drawn = step(len(tokens) - 1, [*draft, tokens[-1]])
        tokens.append(drawn[0])
    return tokens[len(prompt) :]


# %% 36.2 WRONG: `end` belongs to the answer
def generate(prompt, new, step, guess, end):
    tokens = [*prompt, step(0, prompt)[-1]]
    while len(tokens) < len(prompt) + new and end not in tokens:
        draft = guess(tokens)[: len(prompt) + new - len(tokens) - 1]
        drawn = step(len(tokens) - 1, [tokens[-1], *draft])
        for d, t in zip([*draft, None], drawn):
            tokens.append(t)
            if d != t or t == end:
                break
    return [t for t in tokens[len(prompt) :] if t != end]


# %% 36.3 RIGHT: nested functions with a class
class Lookup:
    def __init__(self, n):
        self.n, self.tokens, self.places = n, [], {}

    def append(self, token):
        key = (
            tuple(self.tokens[len(self.tokens) - self.n :]) if len(self.tokens) >= self.n else None
        )
        if key is not None:
            self.places[key] = len(self.tokens)
        self.tokens.append(token)

    def draft(self, k):
        start = self.places.get(tuple(self.tokens[-self.n :]))
        if start is None:
            return []
        period = self.tokens[start:]
        return [period[j % len(period)] for j in range(k)]


def make_lookup(n):
    lookup = Lookup(n)
    return lookup.append, lookup.draft


# %% 36.3 RIGHT: the text grows while the draft is made
def make_lookup(n):
    tokens, after = [], {}

    def append(token):
        tokens.append(token)
        if len(tokens) > n:
            after[tuple(tokens[-n - 1 : -1])] = len(tokens) - 1

    def draft(k):
        i = after.get(tuple(tokens[-n:]), -1)
        if i < 0:
            return []
        longer = tokens[i:]
        while len(longer) < k:
            longer = longer + longer
        return longer[:k]

    return append, draft


# %% 36.3 RIGHT: nested dicts, and a list of all places
from collections import defaultdict, deque


def make_lookup(n):
    recent, tokens, places = deque(maxlen=n), [], defaultdict(list)

    def append(token):
        if len(recent) == n:
            places[tuple(recent)].append(len(tokens))
        tokens.append(token)
        recent.append(token)

    def draft(k):
        found = places.get(tuple(recent), [])
        out = []
        if found:
            for j in range(k):
                at = found[-1] + j
                out += [tokens[at]] if at < len(tokens) else [out[at - len(tokens)]]
        return out

    return append, draft


# %% 36.3 RIGHT: the index is kept by nonlocal variables
def make_lookup(n):
    tokens = ()
    size, after = 0, {}
    store = []

    def append(token):
        nonlocal size, tokens
        if size >= n:
            after[tokens] = size
        store.append(token)
        size += 1
        tokens = (*tokens, token)[-n:]

    def draft(k):
        if tokens not in after:
            return []
        i, out = after[tokens], []
        while len(out) < k:
            out.append((store[i : i + 1] or [None])[0] if i < size else out[i - size])
            i += 1
        return out

    return append, draft


# %% 36.3 WRONG: it searches all tokens
def make_lookup(n):
    tokens = []

    def draft(k):
        for i in range(len(tokens) - 1, n - 1, -1):
            if tokens[i - n : i] == tokens[-n:]:
                out = list(tokens[i:])
                while len(out) < k:
                    out += out
                return out[:k]
        return []

    return tokens.append, draft


# %% 36.3 WRONG: the FIRST occurrence
def make_lookup(n):
    tokens, after = [], {}

    def append(token):
        key = tuple(tokens[-n:])
        if len(key) == n and key not in after:
            after[key] = len(tokens)
        tokens.append(token)

    def draft(k):
        i = after.get(tuple(tokens[-n:]))
        if i is None:
            return []
        out = tokens[i : i + k]
        while len(out) < k:
            out = (out + tokens[i:])[:k]
        return out

    return append, draft


# %% 36.3 WRONG: The draft ends where the tokens end
def make_lookup(n):
    tokens, after = [], {}

    def append(token):
        if len(tokens) >= n:
            after[tuple(tokens[-n:])] = len(tokens)
        tokens.append(token)

    def draft(k):
        i = after.get(tuple(tokens[-n:]))
        return [] if i is None else tokens[i : i + k]

    return append, draft


# %% 36.3 WRONG: the next token arrives
# as the attempt above, but:
# -         if len(tokens) >= n:
# -             after[tuple(tokens[-n:])] = len(tokens)
# -         tokens.append(token)
# +         tokens.append(token)
# +         if len(tokens) >= n:
# +             after[tuple(tokens[-n:])] = len(tokens)


# %% 36.3 WRONG: The n-gram itself was drafted
# as the attempt above, but:
# -             after[tuple(tokens[-n:])] = len(tokens)
# +             after[tuple(tokens[-n:])] = len(tokens) - n
# -         return [] if i is None else tokens[i : i + k]
# +         out = [] if i is None else tokens[i:]
# +         while out and len(out) < k:
# +             out = out + out[n:]
# +         return out[:k]


# %% 36.3 WRONG: Only one token was drafted
# as the attempt above, but:
# -         return [] if i is None else tokens[i : i + k]
# +         return [] if i is None else [tokens[i]]


# %% 36.3 WRONG: One token too many was drafted
# as the attempt above, but:
# -         return [] if i is None else tokens[i : i + k]
# +         return [] if i is None else (tokens[i:] * (k + 1))[: k + 1]


# %% 36.3 WRONG: The last n tokens occurred before
# as the attempt above, but:
# -         if len(tokens) >= n:
# -             after[tuple(tokens[-n:])] = len(tokens)
# +         if len(tokens) >= n + 1:
# +             after[tuple(tokens[-n - 1 :])] = len(tokens)
# -         i = after.get(tuple(tokens[-n:]))
# -         return [] if i is None else tokens[i : i + k]
# +         i = after.get(tuple(tokens[-n - 1 :]))
# +         return [] if i is None else (tokens[i:] * k)[:k]


# %% 36.3 WRONG: Nothing is returned. Return 2 things
# as the attempt above, but:
# -     return append, draft
# +     append, draft


# %% 36.3 WRONG: must be functions
# as the attempt above, but:
# -     return append, draft
# +     return tokens, after


# %% 36.3 WRONG: write `nonlocal` above it
def make_lookup(n):
    tokens, last = [], ()

    def append(token):
        tokens.append(token)
        last = (*last, token)[-n:]  # noqa: F823

    def draft(k):
        return []

    return append, draft


# %% 36.3 WRONG: A key of a dict is a tuple
def make_lookup(n):
    tokens, after = [], {}

    def append(token):
        after[tokens[-n:]] = len(tokens)
        tokens.append(token)

    def draft(k):
        return []

    return append, draft


# %% 36.3 WRONG: An n-gram that did not occur before has no entry
# as the solution, but:
# -         i = after.get(tuple(tokens[-n:]))
# +         i = after[tuple(tokens[-n:])]


# %% 36.3 WRONG: for the second time
def make_lookup(n):
    tokens, after = [], {}

    def append(token):
        if len(tokens) >= n:
            after[tuple(tokens[-n:])] = len(tokens)
        tokens.append(token)

    def draft(k):
        i = after.pop(tuple(tokens[-n:]), None)
        if i is None:
            return []
        return [(tokens[i:])[j % (len(tokens) - i)] for j in range(k)]

    return append, draft


# %% 36.3 WRONG: calls the library's
import importlib


def make_lookup(n):
    history = importlib.import_module("xtrain.serving.speculation").History([])
    return history.append, history.predict


# %% 36.4 RIGHT: the closed form, with p = 1
def expected_tokens(p, k):
    return k + 1 if p == 1 else (1 - p ** (k + 1)) / (1 - p)


# %% 36.4 RIGHT: by Horner's rule
def expected_tokens(p, k):
    e = 1.0
    for _ in range(k):
        e = 1 + p * e
    return e


# %% 36.4 RIGHT: the number of tokens times its probability
def expected_tokens(p, k):
    return sum((i + 1) * p**i * (1 - p) for i in range(k)) + (k + 1) * p**k


# %% 36.4 RIGHT: with NumPy
def expected_tokens(p, k):
    return np.polyval(np.ones(k + 1), p)


# %% 36.4 WRONG: the mean without an end
def expected_tokens(p, k):
    return 1 / (1 - p) if p < 1 else float(k + 1)


# %% 36.4 WRONG: a part of them may be right
def expected_tokens(p, k):
    return 1 + k * p**k


# %% 36.4 WRONG: this takes it as that of a wrong one
def expected_tokens(p, k):
    return float(sum((1 - p) ** i for i in range(k + 1)))


# %% 36.4 WRONG: There is one term too many
def expected_tokens(p, k):
    return float(sum(p**i for i in range(k + 2)))


# %% 36.4 WRONG: one number is needed
def expected_tokens(p, k):
    return [p**i for i in range(k + 1)]


# %% 36.4 WRONG: at p = 1 the closed form is 0 / 0
def expected_tokens(p, k):
    return np.divide(1 - p ** (k + 1), 1 - p)


# %% 36.5 RIGHT: with NumPy
def best_length(p, seconds):
    tokens = np.cumsum(p ** np.arange(len(seconds)))
    speed = tokens / np.array(seconds)
    return int(speed.argmax()), float(speed.max() / speed[0])


# %% 36.5 RIGHT: a loop that keeps the best
def best_length(p, seconds):
    best, most, tokens, power = 0, 1 / seconds[0], 1.0, 1.0
    for k in range(1, len(seconds)):
        power *= p
        tokens += power
        if tokens / seconds[k] > most:
            best, most = k, tokens / seconds[k]
    return best, most * seconds[0]


# %% 36.5 RIGHT: max with a key
def best_length(p, seconds):
    speed = lambda k: expected_tokens(p, k) / seconds[k]
    k = max(range(len(seconds)), key=speed)
    return k, speed(k) / speed(0)


def expected_tokens(p, k):
    return sum(p**i for i in range(k + 1))


# %% 36.5 WRONG: k = 0, no drafts, is also possible
def best_length(p, seconds):
    speed = [sum(p**i for i in range(k + 1)) / t for k, t in enumerate(seconds)]
    k = 1 + int(np.argmax(speed[1:])) if len(speed) > 1 else 0
    return k, speed[k] / speed[0]


# %% 36.5 WRONG: return the smallest
def best_length(p, seconds):
    k, most = 0, 0
    for i, t in enumerate(seconds):
        speed = sum(p**j for j in range(i + 1)) / t
        if speed >= most:
            k, most = i, speed
    return k, most * seconds[0]


# %% 36.5 WRONG: This is the tokens of a step
def best_length(p, seconds):
    speed = [sum(p**i for i in range(k + 1)) / t for k, t in enumerate(seconds)]
    k = speed.index(max(speed))
    return k, sum(p**i for i in range(k + 1))


# %% 36.5 WRONG: without the 1
def best_length(p, seconds):
    speed = [sum(p**i for i in range(k + 1)) / t for k, t in enumerate(seconds)]
    return speed.index(max(speed)), max(speed) / speed[0] - 1


# %% 36.5 WRONG: the shortest step
def best_length(p, seconds):
    k = seconds.index(min(seconds))
    return k, sum(p**i for i in range(k + 1)) * seconds[0] / seconds[k]


# %% 36.5 WRONG: p^i, not p for each
def best_length(p, seconds):
    speed = [(1 + k * p) / t for k, t in enumerate(seconds)]
    return speed.index(max(speed)), max(speed) / speed[0]


# %% 36.5 WRONG: This is the ratio of the times
def best_length(p, seconds):
    speed = [sum(p**i for i in range(k + 1)) / t for k, t in enumerate(seconds)]
    k = speed.index(max(speed))
    return k, seconds[0] / seconds[k]


# %% 36.5 WRONG: seconds was changed
def best_length(p, seconds):
    for k in range(len(seconds)):
        seconds[k] = sum(p**i for i in range(k + 1)) / seconds[k]
    k = seconds.index(max(seconds))
    return k, seconds[k] / seconds[0]


# %% 36.5 WRONG: and the times are of k = 0
def best_length(p, seconds):
    speed = [sum(p**i for i in range(k + 1)) / t for k, t in enumerate(seconds)]
    return 1 + speed.index(max(speed)), max(speed) / speed[0]


# %% 36.5 WRONG: a whole number of drafts
def best_length(p, seconds):
    speed = [sum(p**i for i in range(k + 1)) / t for k, t in enumerate(seconds)]
    return max(speed), max(speed) / speed[0]


# %% 36.6 RIGHT: one number at a time
def head_targets(targets, k):
    B, T = targets.shape
    return np.array([[row[t + k] if t + k < T else -100 for t in range(T)] for row in targets])


# %% 36.6 WRONG: not the first ones again
def head_targets(targets, k):
    return np.roll(targets, -k, axis=1)


# %% 36.6 WRONG: one place too far
def head_targets(targets, k):
    out = np.full_like(targets, -100)
    for t in range(targets.shape[1] - k - 1):
        out[:, t] = targets[:, t + k + 1]
    return out


# %% 36.6 WRONG: targets was changed
def head_targets(targets, k):
    for t in range(targets.shape[1]):
        targets[:, t] = targets[:, t + k] if t + k < targets.shape[1] else -100
    return targets


# %% 36.1 WRONG: stop at the first that differs
def accepted(draft, drawn):
    return [b for a, b in zip(draft, drawn) if a == b] + [drawn[-1]]


# %% 36.3 RIGHT: the distance of the repetition
def make_lookup(n):
    sequence, after = [], {}

    def append(token):
        if len(sequence) >= n:
            after[tuple(sequence[-n:])] = len(sequence)
        sequence.append(token)

    def draft(k):
        start = after.get(tuple(sequence[-n:]))
        if start is None:
            return []
        distance = len(sequence) - start
        return [sequence[start + j % distance] for j in range(k)]

    return append, draft


# %% 36.3 WRONG: each call of make_lookup needs its own
# as the attempt above, but:
# - def make_lookup(n):
# -     sequence, after = [], {}
# + sequence, after = [], {}
# +
# +
# + def make_lookup(n):


# %% 36.3 WRONG: append, draft in this order
# as the attempt above, but:
# -     return append, draft
# +     return draft, append


# %% 36.3 WRONG: did not occur before, in this order
# as the attempt above, but:
# -             after[tuple(sequence[-n:])] = len(sequence)
# +             after[sum(sequence[-n:])] = len(sequence)
# -         start = after.get(tuple(sequence[-n:]))
# +         start = after.get(sum(sequence[-n:]))


# %% 36.3 WRONG: only append adds tokens
# as the attempt above, but:
# -         distance = len(sequence) - start
# -         return [sequence[start + j % distance] for j in range(k)]
# +         for j in range(k):
# +             append(sequence[start + j])
# +         return sequence[-k:] if k else []


# %% 36.6 WRONG: the first ones of the next row
def head_targets(targets, k):
    shifted = np.roll(targets.reshape(-1), -k).reshape(targets.shape)
    shifted[-1, -k:] = -100
    return shifted


# %% 36.6 WRONG: says nothing of the token
def head_targets(targets, k):
    shifted = np.full_like(targets, -100)
    shifted[:, :-k] = targets[:, k:]
    return np.where(targets == -100, -100, shifted)


# %% 36.6 WRONG: not -1
def head_targets(targets, k):
    return np.pad(targets, ((0, 0), (0, k)), constant_values=-1)[:, k:]
