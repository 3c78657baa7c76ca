"""Exercises of lesson 36: what a verifying step accepts, the loop with a cache, prompt lookup, how many drafts pay, heads."""

import time

import numpy as np

from .attempt import exercise


def whole(e, name, got):
    """-> a list of whole numbers that was returned, as ints"""
    e.need(got is not None, f"Nothing is returned: end with `return` and the {name}.")
    e.need(
        isinstance(got, (list, tuple, np.ndarray)),
        f"The {name} is {type(got).__name__}, not a list of tokens.",
    )
    flat = list(got)
    good = all(np.ndim(t) == 0 and isinstance(t, (int, np.integer)) and not isinstance(t, (bool, np.bool_)) for t in flat)  # fmt: skip
    e.need(good, f"The {name} is {flat}: a list of tokens, which are whole numbers, is needed.")
    return [int(t) for t in flat]


def of_lists(e, name, got, want, mistakes):
    """Raises Wrong unless two lists of tokens are equal. mistakes: {message: the list of this mistake}"""
    if got == want:
        return
    text = next((text for text, other in mistakes.items() if got == other and other != want), "")
    raise e.wrong(f"{name} is {got}; expected {want}." + f"\n{text}" * bool(text))


def count(draft, drawn):
    n = 0
    while n < len(draft) and draft[n] == drawn[n]:
        n += 1
    return n


# ----------------------------------------------------------------------------- what is accepted
@exercise(
    "36.1", "accepted",
    first_step="compare draft[0] with drawn[0], draft[1] with drawn[1], ..., up to the first that differs.",
    hints={"IndexError": "drawn has one token more than draft: if all drafts are right, the answer gets the last one, too."},
    kernel=False,
)  # fmt: skip
def accepted(e):
    fixed = (
        ([3, 5, 7, 2, 4], [3, 5, 6, 7, 4, 1]),
        ([3, 5, 7], [3, 6, 7, 9]),
        ([3, 5], [3, 5, 8]),
        ([], [4]),
        ([2, 5, 7], [3, 5, 7, 9]),
        ([3, 5, 7, 1], [3, 5, 2, 1, 6]),
        ([6, 6, 6], [6, 6, 7, 6]),
        ([1, 2], [2, 9, 3]),
    )

    def draw(rng):
        drawn = rng.integers(0, 5, int(rng.integers(2, 8)))
        draft = np.where(rng.random(len(drawn) - 1) < 0.75, drawn[:-1], rng.integers(0, 5, len(drawn) - 1))  # fmt: skip
        return draft, drawn

    for draft, drawn in e.cases(fixed, draw, times=4):
        draft, drawn = list(draft), list(drawn)
        given = list(draft), list(drawn)
        got = whole(e, "list", e.call(*given, case=f"draft {draft}, drawn {drawn}"))
        n = count(draft, drawn)
        equal = [i for i, (a, b) in enumerate(zip(draft, drawn)) if a == b]
        set_ = [t for t in draft if t in drawn]
        of_lists(e, "the list", got, drawn[: n + 1], {
            "All drafts are right, so the row of the last one has a true token, too: drawn has one more.": draft if n == len(draft) > 0 else None,
            "The token that was drawn in place of the first wrong draft is true, too: n drafts and one more, drawn[: n + 1].": drawn[:n],
            "The first wrong draft was taken, instead of the token that was drawn there.": draft[: n + 1],
            "The first wrong draft was kept, and the drawn token after it.": [*draft[: n + 1], drawn[n]],
            "A draft behind a wrong one is not accepted, even if it equals the drawn token: its row has a wrong history.":
                [drawn[i] for i in equal] + [drawn[-1]] * (len(equal) == len(draft)),
            "Every draft that equals the drawn token was taken: stop at the first that differs.": [drawn[i] for i in equal] + drawn[-1:],
            "Everything behind the first wrong draft was drawn after a wrong token: it does not count.": drawn,
            "The last row follows a wrong draft here, so its token does not count: the one to add is drawn[n].": [*draft[:n], drawn[-1]],
            "A draft must equal the token at its own place, not any of those that were drawn.": set_ + drawn[len(set_) : len(set_) + 1],
            "Compare draft[i] with drawn[i]: drawn[0] was drawn after the last true token, in the place of draft[0].":
                drawn[: count(draft, drawn[1:]) + 1],
        })  # fmt: skip
        e.need(given == (draft, drawn), "draft or drawn was changed: the engine still needs them.")


# ----------------------------------------------------------------------------- the loop
V = 9


def next_token(history, seed):
    """The token after these, from a made-up model and seed. Never 0."""
    return 1 + int(np.random.default_rng([seed, len(history), *history[-3:]]).integers(V - 1))


class Model:
    """A made-up model with a cache, which notes what is wrong in a call.

    ends: numbers of tokens that are END
    """

    def __init__(self, e, prompt, new, seed, ends):
        self.e = e
        self.prompt = list(prompt)
        self.new = new
        self.seed = seed
        self.ends = ends
        self.places = len(prompt) + new - 1
        self.cache: list[int] = []
        self.rows = []
        self.true = list(prompt)
        while len(self.true) < len(prompt) + new and (len(self.true) == len(prompt) or self.true[-1]):  # fmt: skip
            self.true.append(self.draw(self.true))

    def draw(self, history):
        return 0 if len(history) in self.ends else next_token(history, self.seed)

    @property
    def answer(self):
        return self.true[len(self.prompt) :]

    def step(self, start, rows):
        e = self.e
        rows = whole(e, "argument `rows` of step", rows)
        e.need(isinstance(start, (int, np.integer)), f"step got start = {start!r}: a position, a whole number.")  # fmt: skip
        e.need(
            len(self.rows) <= 2 * self.new + 2,
            f"step was called {len(self.rows)} times for an answer of {self.new} tokens: a step without a right draft still yields a token, the drawn one.",
        )
        e.need(rows, "step got no rows: it has at least the last token, which has no keys yet.")
        if not self.rows:
            first = start == 0 and rows == self.prompt
            e.need(first, f"The first call is step({start}, {rows}): it is step(0, prompt), which computes the keys of the whole prompt.")  # fmt: skip
        here = f"step({start}, {rows})"
        e.need(
            start <= len(self.cache),
            f"{here}: position {len(self.cache)} has no keys yet. The last token that was drawn has none: it is the first row, at position len(tokens) - 1.",
        )
        e.need(start >= 0, f"{here}: positions begin at 0.")
        wrong = [i for i in range(min(start, len(self.true))) if self.cache[i] != self.true[i]]
        e.need(
            not wrong,
            f"{here}: the cache holds {self.cache[:start]} before it. "
            + (f"Position {wrong[0]} has the keys of the rejected draft {self.cache[wrong[0]]}, where the token {self.true[wrong[0]]} was drawn: begin there, and write over it." if wrong else ""),
        )  # fmt: skip
        e.need(
            start + len(rows) <= self.places,
            f"{here} writes to position {start + len(rows) - 1}, and the cache has {self.places}. A step yields one token more than it accepts: with `left` "
            "tokens to go at most left - 1 drafts are of use.",
        )
        e.need(
            start < len(self.true) and (not self.rows or rows[0] == self.true[start]),
            f"{here}: the first row is the last token of the answer so far, which has no keys yet; here that is {self.true[min(start, len(self.true) - 1)]}.",
        )
        self.rows.append((start, rows))
        self.cache[start:] = rows
        return [self.draw(self.cache[: start + i + 1]) for i in range(len(rows))]


def guess_of(kind, model, k, rng):
    """A function that guesses k tokens. kind: right, wrong, half, mixed, none"""

    def guess(tokens):
        tokens = whole(model.e, "argument of guess", tokens)
        e, at = model.e, len(tokens)
        ended = 0 in model.answer and at > len(model.true)
        e.need(
            not ended, f"guess got {tokens}, although `end`, 0, was drawn: the answer ends there."
        )
        first = at == len(model.prompt) + 1 and tokens[-1] != model.true[at - 1]
        e.need(not first, f"guess got {tokens}: the first token of the answer is the one drawn after the LAST row of the prompt, step(0, prompt)[-1].")  # fmt: skip
        e.need(
            tokens == model.true[:at],
            f"guess got {tokens}; all tokens so far are {model.true[: max(at, len(model.prompt))]}: prompt and answer.",
        )
        e.need(at > len(model.prompt), "guess was called before the first token was drawn: give it prompt and answer.")  # fmt: skip
        right = [*model.true[at:], *[1] * k][:k]
        n = {"right": k, "wrong": 0, "half": k // 2, "mixed": int(rng.integers(0, k + 1)), "none": 0}[kind]  # fmt: skip
        other = [(t + 1) % V for t in right]
        return [] if kind == "none" else right[:n] + other[n : n + 1] + right[n + 1 :]

    return guess


def fewest_steps(model, guess):
    """How many steps the loop needs."""
    tokens, steps = list(model.true[: len(model.prompt) + 1]), 1
    while len(tokens) < len(model.true):
        left = len(model.prompt) + model.new - len(tokens)
        draft = guess(tokens)[: left - 1]
        n = count(draft, model.true[len(tokens) :][: len(draft)]) if draft else 0
        tokens = model.true[: len(tokens) + n + 1]
        steps += 1
    return steps


@exercise(
    "36.2", "generate",
    first_step="tokens = [*prompt, step(0, prompt)[-1]]: the first step computes the prompt, and the token after its last row is the first of the answer.",
    hints={"IndexError": "step returns one token for each row, and a draft may be empty.",
           "TypeError": "tokens, rows and drafts are lists: [tokens[-1], *draft]."},
    kernel=False,
)  # fmt: skip
def generate(e):
    fixed = (
        ("none", 4, 6, ()),
        ("right", 3, 9, ()),
        ("wrong", 3, 6, ()),
        ("half", 4, 11, ()),
        ("right", 8, 5, ()),  # longer than the answer
        ("right", 2, 1, ()),  # the first token is the last
        ("right", 4, 12, (9,)),  # an end among accepted drafts
        ("none", 4, 8, (6,)),
        ("half", 4, 9, (4,)),  # the first token ends it
        ("right", 3, 8, (10,)),
    )
    draw = lambda rng: ("mixed", int(rng.integers(1, 7)), int(rng.integers(4, 20)), (int(rng.integers(5, 30)),))  # fmt: skip
    for kind, k, new, ends in e.cases(fixed, draw, times=4):
        rng = np.random.default_rng(new)
        prompt = [int(t) for t in rng.integers(1, V, 4)]
        ends = tuple(int(n) for n in ends)
        model = Model(e, prompt, new, int(rng.integers(100)), ends)
        of_kind = "mixed" if kind == "mixed" else kind
        guess = guess_of(of_kind, model, k, np.random.default_rng(k))
        given = list(prompt)
        text = {"none": "no drafts", "right": f"{k} drafts, always right", "wrong": f"{k} drafts, the first one wrong",
                "half": f"{k} drafts, half of them right", "mixed": f"{k} drafts, some right"}[kind]  # fmt: skip
        case = f"prompt {prompt}, new = {new}, {text}" + f", the answer {model.answer}" * (model.true[-1] == 0)  # fmt: skip
        got = e.call(given, new, lambda start, rows, model=model: model.step(start, rows), lambda tokens, guess=guess: guess(tokens), 0, case=case)  # fmt: skip
        got = whole(e, "answer", got)
        e.need(model.rows, "step was not called.")
        true = model.answer
        more = got[: len(true)] == true
        of_lists(e, "the answer", got, true, {
            "The prompt was returned, too: the answer begins behind it.": prompt + true,
            "Tokens behind `end` are in the answer: drop them.": got if more and 0 in true and len(got) > len(true) else [],
            "The answer is too long: a step may yield more tokens than are left.": got if more and len(got) > len(true) else [],
            "`end` belongs to the answer, as its last token.": true[:-1] if 0 in true else [],
            "The answer is too short: continue until it has `new` tokens, or `end`.": got if got == true[: len(got)] else [],
        })  # fmt: skip
        e.need(given == prompt, "prompt was changed: begin with a copy, [*prompt].")
        if kind == "mixed":
            continue
        steps, fewest = len(model.rows), fewest_steps(model, guess)
        e.need(
            steps >= fewest or kind == "none",
            f"The answer is right, but {steps} steps cannot have verified it.",
        )
        why = "accept all drafts up to the first wrong one, and the token that was drawn in its place."
        if max(len(rows) for _, rows in model.rows[1:] or [(0, [0])]) == 1:
            why = "the rows of a step are the last token AND the drafts."
        e.need(
            steps <= fewest, f"The answer is right, in {steps} steps; {fewest} are enough: {why}"
        )


# ----------------------------------------------------------------------------- prompt lookup
def looked_up(tokens, n, k, first=False, second=False, stop=False):
    """The draft, or that of a mistake."""
    gram = tokens[-n:]
    places = [i for i in range(n, len(tokens)) if tokens[i - n : i] == gram]
    if len(tokens) < n or not places:
        return []
    i = places[0] if first else places[-1]
    i += second
    out = []
    for j in range(i, i + k):
        if j >= len(tokens) and (stop or j - len(tokens) >= len(out)):
            break
        out.append(tokens[j] if j < len(tokens) else out[j - len(tokens)])
    return out


@exercise(
    "36.3", "make_lookup",
    first_step="tokens = [] and after = {}; append enters the last n tokens, tuple(tokens[-n:]), before it appends the next one.",
    hints={
        "IndexError": "Behind the last token the draft continues with itself: position len(tokens) + j is the draft's own token j. And the last n tokens must not find "
        "themselves, behind which is nothing: they enter the index when the next token arrives.",
        "TypeError": "A key of a dict is a tuple: tuple(tokens[-n:]).",
        "KeyError": "An n-gram that did not occur before has no entry: after.get(...) is None, and the draft is [].",
    },
    kernel=False,
)  # fmt: skip
def make_lookup(e):
    fixed = (
        (2, [1, 2, 3, 4, 1, 2], 3),
        (2, [1, 2, 3, 1, 2, 3, 1, 2], 7),
        (1, [5, 6, 5, 7, 5], 2),
        (3, [1, 2, 3, 9, 2, 3], 4),
        (2, [4, 4, 4], 5),
        (2, [1], 3),
        (1, [], 2),
        (3, [7, 8, 7, 8, 7, 8, 7], 6),
        (2, [1, 2, 3, 1, 2, 4, 5, 1, 2], 0),
    )

    def draw(rng):
        return int(rng.integers(1, 4)), [int(t) for t in rng.integers(0, 4, int(rng.integers(5, 40)))], int(rng.integers(1, 9))  # fmt: skip

    for n, tokens, k in e.cases(fixed, draw, times=4):
        tokens = [int(t) for t in tokens]
        functions = e.several(e.call(n, case=f"n = {n}, tokens {tokens}, k = {k}"), "append", "draft")  # fmt: skip
        e.need(all(map(callable, functions)), "append and draft must be functions.")
        append, draft = functions
        for i in range(len(tokens) + 1):
            so_far = tokens[:i]
            e.where = f"n = {n}, tokens {so_far}, draft({k})"
            for again in range(2 if i == len(tokens) else 1):
                answer = e.ask(draft, k)
                e.need(answer is not None, "draft returns nothing: it returns a list, and make_lookup returns append, draft in this order.")  # fmt: skip
                got = whole(e, "draft", answer)
                if again:
                    e.where += " for the second time"
                want = looked_up(so_far, n, k)
                of_lists(e, "the draft", got, want, {
                    "The sequence is empty at first: each call of make_lookup needs its own list and dict.": got if not so_far else None,
                    "The draft was other before: only append adds tokens to the sequence and to the index.": got if again else None,
                    "The last n tokens occurred before. At the very end they must not find themselves, where nothing follows: they enter the index when the next token arrives.":
                        [] if len(so_far) >= n else None,
                    "This is what followed the FIRST occurrence: the latest one counts, so later entries replace earlier ones.": looked_up(so_far, n, k, first=True),
                    "The draft ends where the tokens end: continue with the draft itself, k tokens in all.": looked_up(so_far, n, k, stop=True),
                    "The first token that followed is missing: it is the token right after the n-gram.": looked_up(so_far, n, k, second=True),
                    "The n-gram itself was drafted: begin with the token after it.": (looked_up(so_far, n, k + n) and [*so_far[-n:], *looked_up(so_far, n, k)])[:k],
                    "This is the draft of n + 1 tokens: compare n.": looked_up(so_far, n + 1, k),
                    "Only one token was drafted: k tokens.": looked_up(so_far, n, 1) if k > 1 else None,
                    "One token too many was drafted.": looked_up(so_far, n, k + 1),
                    "The last n tokens did not occur before, in this order: the draft is [].": got if not want and k else None,
                })  # fmt: skip
            if i < len(tokens):
                e.ask(append, tokens[i])
    _in_constant_time(e)


LONG = 3000  # tokens, without any repetition


def _in_constant_time(e):
    """Raises Wrong if a draft takes time that grows with the sequence. What a search takes is measured, too."""
    append, draft = e.several(e.call(2, case=f"n = 2, {LONG} different tokens"), "append", "draft")
    for t in range(50):
        e.ask(append, t)
    short = _seconds(lambda: e.ask(draft, 3))
    for t in range(50, LONG):
        e.ask(append, t)
    long = _seconds(lambda: e.ask(draft, 3))
    search = _seconds(lambda: looked_up(list(range(LONG)), 2, 3))
    e.need(
        long - short < search / 2,
        f"The drafts are right, but after {LONG} tokens a draft takes {1e6 * (long - short):.0f} µs longer than after 50: it searches all tokens. Keep a dict from "
        "each n-gram to the position after it.",
    )


def _seconds(function):
    """The time of the fastest of some calls."""
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


# ----------------------------------------------------------------------------- how many drafts
def expected(p, k):
    return float(sum(p**i for i in range(k + 1)))


def number(e, name, got):
    e.need(got is not None, f"Nothing is returned: end with `return` and the {name}.")
    e.need(np.ndim(got) == 0 and isinstance(got, (int, float, np.number)), f"The {name} is {got!r}: one number is needed.")  # fmt: skip
    return np.array(float(got))


@exercise(
    "36.4", "expected_tokens",
    first_step="one token is certain; the second one comes with probability p, the third with p p.",
    hints={"ZeroDivisionError": "At p = 1 the closed form is 0 / 0: the sum has k + 1 terms of 1."},
    kernel=False,
)  # fmt: skip
def expected_tokens(e):
    fixed = (0.7, 3), (0.5, 1), (0.5, 0), (0.8, 4), (1.0, 5), (0.0, 3), (0.3, 7)
    draw = lambda rng: (float(rng.random()), int(rng.integers(1, 20)))
    for p, k in e.cases(fixed, draw, times=4):
        got = number(e, "number of tokens", e.call(p, k, case=f"p = {p:g}, k = {k}"))
        own = lambda f: np.array(float(f))
        e.same("tokens", got, own(expected(p, k)), {
            "NaN: at p = 1 the closed form is 0 / 0. The sum has k + 1 terms of 1.": lambda got: np.isnan(got).any(),
            "The token that is drawn in any case is missing: it comes with probability 1, also if no draft is right.": own(expected(p, k) - 1),
            "A draft counts only if those before it are right, too: the i-th one with p^i, not with p.": own(1 + k * p),
            "The last draft is missing: k drafts and one token more are k + 1 terms.": own(expected(p, k - 1)) if k else np.empty(0),
            "There is one term too many: p^0 to p^k.": own(expected(p, k + 1)),
            "This is the mean without an end, 1 / (1 - p): a step has k drafts.": own(1 / (1 - p)) if p < 1 else np.empty(0),
            "This is the probability that all drafts are right. It asks for the number of tokens, on average.": own(p**k),
            "This is the number of tokens if all drafts are right or none: a part of them may be right.": own(1 + k * p**k),
            "p is the chance of a right draft; this takes it as that of a wrong one.": own(expected(1 - p, k)),
        })  # fmt: skip


def best(p, seconds, tokens=expected, last=False):
    """-> the number of drafts with the most tokens per second, or that of a mistake"""
    speeds = [tokens(p, k) / t for k, t in enumerate(seconds)]
    ks = [k for k, s in enumerate(speeds) if s == max(speeds)]
    return ks[-1] if last else ks[0]


@exercise(
    "36.5", "best_length",
    first_step="tokens per second with k drafts are expected_tokens(p, k) / seconds[k], for every k.",
    hints={"IndexError": "k runs over the indices of seconds: for k, t in enumerate(seconds).",
           "ValueError": "seconds has at least one entry: k = 0 is always possible."},
    kernel=False,
)  # fmt: skip
def best_length(e):
    fixed = (
        (0.7, [1.0, 1.0, 1.0, 1.0]),
        (0.5, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]),
        (0.2, [1.0, 1.3, 1.6]),
        (0.9, [2.0, 2.0, 2.1, 2.2, 4.4, 4.5]),
        (0.0, [1.0, 1.0, 1.0]),
        (1.0, [3.0, 3.5, 4.0, 4.5]),
        (0.6, [0.004]),
        (0.8, [0.5, 0.9, 0.95, 1.0, 1.05, 1.1]),
        (1.0, [1.0, 2.0, 3.0]),
    )

    def draw(rng):
        seconds = np.cumsum(rng.random(int(rng.integers(3, 12))) * 0.3) + 0.7
        return float(rng.random()), [float(t) for t in seconds]

    for p, seconds in e.cases(fixed, draw, times=4):
        seconds = [float(t) for t in seconds]
        shown = [round(t, 3) for t in seconds]
        given = list(seconds)
        got = e.several(e.call(p, given, case=f"p = {p:g}, seconds {shown}"), "k", "speedup")
        k = best(p, seconds)
        speedup = expected(p, k) / seconds[k] * seconds[0]
        e.need(np.ndim(got[0]) == 0 and float(got[0]) == int(got[0]), f"k is {got[0]!r}: a whole number of drafts.")  # fmt: skip
        mine, rate = int(got[0]), number(e, "speedup", got[1])
        e.need(0 <= mine < len(seconds), f"k is {mine}, and the times are of k = 0, ..., {len(seconds) - 1}.")  # fmt: skip
        if mine != k:
            raise e.wrong(f"k is {mine}; expected {k}.\n{_why(mine, p, seconds)}")
        own = lambda f: np.array(float(f))
        e.same("speedup", rate, own(speedup), {
            "This is tokens per second: divide by that of k = 0.": own(expected(p, k) / seconds[k]),
            "This is the tokens of a step: the step also takes seconds[k] / seconds[0] times as long.": own(expected(p, k)),
            "The speedup is upside down: speed with drafts over speed without.": own(1 / speedup),
            "This is the ratio of the times.": own(seconds[0] / seconds[k]),
            "A draft counts only if those before it are right: p^i, not p for each.": own((1 + k * p) / seconds[k] * seconds[0]),
            "This is how much faster it is, without the 1: 1.0 means the same speed.": own(speedup - 1),
        })  # fmt: skip
        e.need(given == seconds, "seconds was changed.")


def _why(k, p, seconds):
    """The likely cause of a wrong k."""
    times = list(seconds)
    causes = {
        "If several k are best, return the smallest.": best(p, times, last=True),
        "k = 0, no drafts, is also possible: one token in seconds[0].": 1 + best(p, times[1:], lambda p, k: expected(p, k + 1)) if len(times) > 1 else None,
        "This k has the most tokens, but its step takes longer: tokens per second count.": len(times) - 1,
        "This k has the shortest step, but fewer tokens: tokens per second count.": times.index(min(times)),
        "A step with k drafts has k + 1 terms: the token that is drawn in any case counts, too.": best(p, times, lambda p, k: expected(p, k) - 1),
        "A draft counts only if those before it are right: p^i, not p for each.": best(p, times, lambda p, k: 1 + k * p),
    }  # fmt: skip
    return next((text for text, other in causes.items() if other == k), "Tokens per second with k drafts: expected_tokens(p, k) / seconds[k].")  # fmt: skip


# ----------------------------------------------------------------------------- heads
def ahead(targets, k, fill=-100):
    out = np.full_like(targets, fill)
    out[:, : max(targets.shape[1] - k, 0)] = targets[:, k:]
    return out


@exercise(
    "36.6", "head_targets",
    first_step="column t of the result is column t + k of targets.",
    hints={"ValueError": "the columns on both sides must be as many: T - k of them have a target."},
    kernel=False,
)  # fmt: skip
def head_targets(e):
    fixed = (
        (np.arange(1, 13).reshape(2, 6), 1),
        (np.arange(1, 13).reshape(2, 6), 2),
        (np.array([[5, -100, 7, 8, 9]]), 2),
        (np.array([[3, 4, 5], [6, 7, 8]]), 3),
        (np.array([[3, 4]]), 5),
    )

    def draw(rng):
        targets = rng.integers(0, 50, (int(rng.integers(1, 4)), int(rng.integers(2, 9))))
        targets[rng.random(targets.shape) < 0.2] = -100
        return targets, int(rng.integers(1, 6))

    for targets, k in e.cases(fixed, draw, times=4):
        targets = np.array(targets, np.int64)
        given = targets.copy()
        got = e.call(given, k, case=f"targets {targets.tolist()}, k = {k}")
        e.need(got is not None, "Nothing is returned: end with `return` and the array.")
        e.same("the targets", np.asarray(got), ahead(targets, k), {
            "Head k predicts the token k places AFTER the next one: targets[:, k:], not targets[:, k - 1 :].": ahead(targets, k - 1),
            "This is one place too far: targets[:, k:].": ahead(targets, k + 1),
            "These are tokens before the position: shift to the left.": ahead(targets[:, ::-1], k)[:, ::-1],
            "Where the row ends there is no token: -100, not the first ones again.": np.roll(targets, -k, axis=1),
            "Where the row ends there is no token to train on: -100. 0 is a token.": ahead(targets, k, 0),
            "Where the row ends nothing is trained: -100, not -1.": ahead(targets, k, -1),
            "Where the row ends there is no token: -100, not the first ones of the next row.": lambda got, targets=targets, k=k: len(targets) > 1 and k < targets.shape[1] and np.array_equal(got.reshape(-1)[: targets.size - k], targets.reshape(-1)[k:]),
            "-100 of a position itself says nothing of the token k places later: only targets[:, k:] counts.": np.where(targets == -100, -100, ahead(targets, k)),
            "Rows are texts of their own: shift the columns, not the rows.": ahead(targets.T, k).T,
        })  # fmt: skip
        e.need(
            np.array_equal(given, targets), "targets was changed: the other heads need them, too."
        )
