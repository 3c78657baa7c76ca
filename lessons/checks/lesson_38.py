"""Exercises of lesson 38: byte pair encoding, and bits per byte."""

from collections import Counter
from itertools import pairwise

import numpy as np

from .attempt import exercise
from .lesson_27 import judged

NO_TOKENS = (
    "A piece is bytes: iterating gives numbers. bytes([b]) is a byte string of one of them. "
    "(NoneType: is 38.1, `joined`, still to be written?)"
)


def single(piece):
    return [bytes([b]) for b in piece]


def join(tokens, pair, times=10**9, put=lambda a, b: [a + b]):
    """The right answer; at most so many times. put: what takes the place of a pair"""
    out, i = [], 0
    while i < len(tokens):
        if times and tuple(tokens[i : i + 2]) == tuple(pair):
            out += put(tokens[i], tokens[i + 1])
            i, times = i + 2, times - 1
        else:
            out.append(tokens[i])
            i += 1
    return out


def from_the_right(tokens, pair):
    a, b = pair
    turned = join([t[::-1] for t in reversed(tokens)], (b[::-1], a[::-1]))
    return [t[::-1] for t in reversed(turned)]


def with_overlaps(tokens, pair):
    """Joins, and keeps the right one for the next pair."""
    out = []
    for i, token in enumerate(tokens):
        if tuple(tokens[i : i + 2]) == tuple(pair):
            out.append(token + tokens[i + 1])
        elif i == 0 or tuple(tokens[i - 1 : i + 1]) != tuple(pair):
            out.append(token)
    return out


def keeps_the_right(tokens, pair):
    out = []
    for i, token in enumerate(tokens):
        out.append(token + tokens[i + 1] if tuple(tokens[i : i + 2]) == tuple(pair) else token)
    return out


def without_the_last(tokens, pair):
    """The loop ends before the last token."""
    out, i = [], 0
    while i < len(tokens) - 1:
        if (tokens[i], tokens[i + 1]) == tuple(pair):
            out.append(tokens[i] + tokens[i + 1])
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out


def as_text(tokens, pair):
    """Replaces the bytes of the pair wherever they are."""
    both = b"".join(pair)
    out, rest = [], b"".join(tokens)
    while rest:
        n = len(both) if rest.startswith(both) else 1
        out, rest = [*out, rest[:n]], rest[n:]
    return out


JOINED = {
    "Only the first occurrence is joined: join all of them.": lambda t, p: join(t, p, 1),
    "Occurrences are joined from the right: begin on the left, which matters when they overlap.": from_the_right,
    "A token takes part in one pair at most: after a pair go on by two.": (with_overlaps, keeps_the_right),
    "The last token is missing: it is not the left one of a pair, but it stays.": without_the_last,
    "The pair itself is in the list: one token, left + right, takes its place.": lambda t, p: join(t, p, put=lambda a, b: [a, b]),
    "The pair was removed: the token left + right takes its place.": lambda t, p: join(t, p, put=lambda a, b: []),
    "Tokens were split again: compare tokens, not the bytes of the whole list.": as_text,
    "The tokens of the pair may be next to each other in the other order: that is another pair.": lambda t, p: join(join(t, p), (p[1], p[0])),
}  # fmt: skip


def list_of_bytes(e, name, got):
    e.need(got is not None, f"Nothing is returned: end with `return` and the {name}.")
    e.need(isinstance(got, (list, tuple)), f"Return a list, got {type(got).__name__}.")
    other = next((x for x in got if not isinstance(x, (bytes, bytearray))), b"")
    e.need(
        isinstance(other, (bytes, bytearray)),
        f"A token is bytes, such as b'ab'; the list contains {other!r}.",
    )
    return [bytes(x) for x in got]


@exercise(
    "38.1", "joined",
    first_step="walk through the list with an index i: is tuple(tokens[i : i + 2]) the pair?",
    hints={"IndexError": "The last token has no right neighbour, and the list may be empty: tokens[i : i + 2] is shorter there, and not an error."},
    kernel=False,
)  # fmt: skip
def joined(e):
    split = lambda text: [t.encode() for t in text.split("|") if t]
    fixed = [
        ("a|b|a|b|c|a|b", "a|b"), ("a|a|a|a|a", "a|a"), ("a|b|c", "b|c"), ("", "a|b"), ("a", "a|a"), ("b|a|b|a", "a|b"),
        ("ab|ab|ab|c|ab", "ab|ab"), ("ab|c|a|bc|a|b|c", "ab|c"), ("a|b", "a|b"), ("aa|a|aa|a|a", "aa|a"), ("x|a|b", "b|a"),
    ]  # fmt: skip
    cases = [(split(t), tuple(split(p))) for t, p in fixed]
    for _ in range(12):
        names = [b"a", b"b", b"ab", b"aa"]
        tokens = [names[i] for i in e.rng.integers(0, 4, int(e.rng.integers(0, 12)))]
        cases.append((tokens, tuple(names[i] for i in e.rng.integers(0, 4, 2))))

    def read(got):
        return list_of_bytes(e, "new list", got)

    def other(arguments, want, got):
        if b"".join(got) != b"".join(want):
            return "The bytes of all tokens together must stay what they were."
        return "Each occurrence of the pair becomes one token, from left to right, and all others stay."

    described = [(f"tokens {t}, pair {p}", (t, p)) for t, p in cases]
    judged(e, described, read, join, JOINED, other, unchanged="the list of tokens")


# ----------------------------------------------------------------------------- training
def smallest(pairs):
    return min(pairs, key=lambda p: (-pairs[p], p))


def found(counts, n, weight=lambda count: count, pick=smallest, once=False, update=join, ends=1):
    """The right answer. weight: of a piece. pick: from the pairs. once: a pair counts once per piece. ends: least count"""
    pieces = {piece: single(piece) for piece in counts}
    merges = []
    while len(merges) < n:
        pairs = Counter()
        for piece, tokens in pieces.items():
            neighbours = list(pairwise(tokens))
            for pair in dict.fromkeys(neighbours) if once else neighbours:
                pairs[pair] += weight(counts[piece])
        if not pairs or max(pairs.values()) < ends:
            break
        merges.append(pick(pairs))
        pieces = {p: update(t, merges[-1]) for p, t in pieces.items()}
    return merges


def at_once(counts, n):
    """All pairs are counted once, at the beginning."""
    pairs = Counter()
    for piece, count in counts.items():
        for pair in pairwise(single(piece)):
            pairs[pair] += count
    return sorted(pairs, key=lambda p: (-pairs[p], p))[:n]


def across(counts, n):
    """Pairs across pieces count, too."""
    return found({b"".join(p for p in counts for _ in range(counts[p])): 1} if counts else {}, n)


def without_overlaps(counts, n):
    """a a a counts (a, a) once."""
    pieces, merges = {p: single(p) for p in counts}, []
    while len(merges) < n:
        pairs = Counter()
        for piece, t in pieces.items():
            for pair in set(pairwise(t)):
                pairs[pair] += counts[piece] * (len(t) - len(join(t, pair)))
        if not pairs:
            break
        merges.append(min(pairs, key=lambda p: (-pairs[p], p)))
        pieces = {p: join(t, merges[-1]) for p, t in pieces.items()}
    return merges


LEARN = {
    "A piece counts once here: its pairs occur as often as the piece does, counts[piece].": lambda c, n: found(c, n, weight=lambda count: 1),
    "Of equally frequent pairs take the SMALLEST: min with the key (-count, pair).":
        (lambda c, n: found(c, n, pick=lambda q: max(q, key=lambda p: (q[p], p))),
         lambda c, n: found(c, n, pick=lambda q: max(q, key=q.get)),
         lambda c, n: found(c, n, pick=lambda q: max(reversed(q), key=q.get))),
    "The RAREST pair is joined: take the most frequent one.": lambda c, n: found(c, n, pick=lambda q: min(q, key=lambda p: (q[p], p))),
    "A pair that occurs twice in a piece counts twice.": lambda c, n: found(c, n, once=True),
    "All merges are of single bytes: after each merge the pieces have other tokens, so join the pair in them and count again.": at_once,
    "Pairs that overlap count, each of them: three times a are two pairs (a, a).": without_overlaps,
    "Only neighbours inside a piece are pairs: count each piece by itself.": across,
    "A pair that occurs once is a pair, too: it ends only when there is none.": lambda c, n: found(c, n, ends=2),
    "There is one merge too many: at most n.": lambda c, n: found(c, n + 1),
    "There is one merge too few: at most n, and n if there are pairs.": lambda c, n: found(c, max(n - 1, 0)),
    "Only the first occurrence in each piece is joined.": lambda c, n: found(c, n, update=lambda t, p: join(t, p, 1)),
}  # fmt: skip


@exercise(
    "38.2", "learn",
    first_step="make each piece a list of single bytes. Then count the pairs: pairwise(tokens), each as often as its piece occurs.",
    allow=("joined",),
    hints={
        "ValueError": "There may be no pair at all, when all pieces are one token: end then.",
        "KeyError": "A Counter begins at 0, a dict needs get(pair, 0).",
        "RuntimeError": "A dict must not get or lose keys in a loop over it.",
        "TypeError": NO_TOKENS,
        "IndexError": "There may be no pair at all, when all pieces are one token: end then.",
    },
    kernel=False,
)  # fmt: skip
def learn(e):
    fixed = [
        ({b"abababcab": 1}, 2), ({b" low": 5, b" lower": 2, b" new": 6, b" wide": 3}, 6), ({b"ab": 1, b"cd": 1}, 2), ({b"aaa": 3}, 3),
        ({b"a": 4}, 2), ({}, 3), ({b"abc": 2}, 9), ({b"xyxy": 2, b"zz": 3, b"qz": 1}, 3), ({b"ba": 2, b"ab": 2}, 1), ({b"ab": 3, b"bc": 4}, 0),
        ({b"aaaa": 2, b"ab": 5}, 3),
    ]  # fmt: skip
    for _ in range(10):
        pieces = {bytes(e.rng.choice(list(b"abc"), int(e.rng.integers(1, 7))).tolist()) for _ in range(5)}  # fmt: skip
        fixed.append(({p: int(e.rng.integers(1, 6)) for p in sorted(pieces)}, int(e.rng.integers(1, 7))))  # fmt: skip
    cases = [(f"counts {c}, n = {n}", (c, n)) for c, n in fixed]

    def read(got):
        e.need(got is not None, "Nothing is returned: end with `return` and the list of merges.")
        e.need(isinstance(got, (list, tuple)), f"Return a list of pairs, got {type(got).__name__}.")
        for pair in got:
            good = isinstance(pair, (tuple, list)) and len(pair) == 2
            e.need(good and all(isinstance(x, bytes) for x in pair),
                   f"A merge is a pair (left, right) of bytes, the two tokens that are joined; the list contains {pair!r}.")  # fmt: skip
        return [tuple(pair) for pair in got]

    def other(arguments, want, got):
        i = next((i for i, (x, y) in enumerate(zip(got, want)) if x != y), None)
        if i is None:
            return f"There are {len(want)} merges, {len(got)} were returned."
        return f"Merge {i} is {got[i]}, and {want[i]} occurs more often then, or as often and is smaller."

    judged(e, cases, read, found, LEARN, other)


# ----------------------------------------------------------------------------- encoding
def encoded(piece, merges, choose=min, times=10**9):
    """The right answer. choose: of the ranks"""
    rank = {tuple(pair): i for i, pair in enumerate(merges)}
    tokens = single(piece)
    for _ in range(min(times, len(tokens))):
        pairs = [pair for pair in pairwise(tokens) if pair in rank]
        if not pairs:
            break
        tokens = join(tokens, choose(pairs, key=rank.get))
    return tokens


def first_in_the_piece(piece, merges, times=10**9):
    known, tokens = {tuple(p) for p in merges}, single(piece)
    while True:
        pair = next((p for p in pairwise(tokens) if p in known), None)
        if pair is None:
            return tokens
        tokens = join(tokens, pair, times)


def longest(piece, merges):
    known, out = {a + b for a, b in merges} | set(single(bytes(range(256)))), []
    while piece:
        n = next(n for n in range(len(piece), 0, -1) if piece[:n] in known)
        out, piece = [*out, piece[:n]], piece[n:]
    return out


def in_order(piece, merges):
    tokens = single(piece)
    for pair in merges:
        tokens = join(tokens, pair)
    return tokens


ENCODE = {
    "This takes the longest token that fits: apply the merges in the order in which they were found.": longest,
    "The first pair in the PIECE is joined: join the one that is first in the LIST.":
        (first_in_the_piece, lambda p, m: first_in_the_piece(p, m, 1)),
    "The pair that is last in the list is joined first: min of the ranks, not max.": lambda p, m: encoded(p, m, max),
    "One pair is joined, then it ends: continue until no neighbours are a pair of the list.": lambda p, m: encoded(p, m, times=1),
    "No pair is joined.": lambda p, m: single(p),
    "The merges are applied from the last to the first.": lambda p, m: in_order(p, m[::-1]),
    "Only the first occurrence of each pair is joined.":
        lambda p, m: __import__("functools").reduce(lambda t, pair: join(t, pair, 1), m, single(p)),
}  # fmt: skip


@exercise(
    "38.3", "encode",
    first_step="rank = {pair: i for i, pair in enumerate(merges)}, tokens = [bytes([b]) for b in piece]. Which of its neighbours are in rank?",
    allow=("joined",),
    hints={
        "ValueError": "No neighbours may be a pair of the list: then the piece is done.",
        "KeyError": "Most pairs of neighbours are not in the list: look with `in`.",
        "TypeError": NO_TOKENS,
    },
    kernel=False,
)  # fmt: skip
def encode(e):
    walk = found({b" walk": 9, b" walked": 5, b" talks": 4, b" talked": 4, b" he": 3}, 20)
    pairs = lambda text: [tuple(x.encode() for x in p.split("+")) for p in text.split()]
    fixed = [
        (b" walked", walk), (b" talk", walk), (b"", walk), (b"a", walk), ("é🙂".encode(), walk), (b" walks", []), (b"abc", pairs("b+c a+b")),
        (b"abc", pairs("a+b b+c")), (b"aaaaa", pairs("a+a aa+a")), (b"abcd", pairs("c+d b+c a+b ab+cd")), (b"abab", pairs("a+b ab+ab")),
        (b"bcabc", pairs("b+c a+bc")), (b"abcb", pairs("b+c c+b a+b")),
    ]  # fmt: skip
    while len(fixed) < 26:
        text = lambda n: bytes(e.rng.choice(list(b"abc"), n).tolist())
        merges = found(
            {text(int(e.rng.integers(2, 7))): int(e.rng.integers(1, 6)) for _ in range(5)}, 8
        )
        piece = text(int(e.rng.integers(0, 10)))
        if in_order(piece, merges) == encoded(piece, merges):  # or one token has two pairs
            fixed.append((piece, merges))
    cases = [(f"piece {p}, merges {m}", (p, m)) for p, m in fixed]

    def read(got):
        return list_of_bytes(e, "list of tokens", got)

    def other(arguments, want, got):
        if b"".join(got) != arguments[0]:
            return "The tokens together must be the bytes of the piece."
        return "Of all neighbours that are a pair of the list, join the pair that is first in the list; again, until there is none."

    judged(e, cases, read, encoded, ENCODE, other)


# ----------------------------------------------------------------------------- bits per byte
class Number(float):
    """A number that equals another one within rounding."""

    def __eq__(self, other):
        close = isinstance(other, float) and np.isclose(float(self), float(other), rtol=1e-6)
        return bool(close)

    __hash__ = None


BITS = {
    "These are nats: one nat is 1 / ln 2 bits.": lambda x, t, b: Number(x * t / b),
    "Divide by ln 2: a bit is smaller than a nat, so there are more of them.": lambda x, t, b: Number(x * t * np.log(2) / b),
    "These are bits per token: times the tokens, over the bytes.": lambda x, t, b: Number(x / np.log(2)),
    "Tokens and bytes are exchanged: all bits, x tokens, over the bytes.": lambda x, t, b: Number(x / np.log(2) * b / t),
    "This is the perplexity per byte: the bits are its logarithm.": (lambda x, t, b: Number(np.exp(x * t / b)), lambda x, t, b: Number(2 ** (x * t / np.log(2) / b))),
    "These are the bits of the whole text: divide by its bytes.": lambda x, t, b: Number(x * t / np.log(2)),
    "The loss is in nats, of base e, so the logarithm of 2 is the natural one: np.log(2).": lambda x, t, b: Number(x * t / np.log10(2) / b),
    "1.44 is rounded: divide by np.log(2).": (lambda x, t, b: Number(1.44 * x * t / b), lambda x, t, b: Number(1.443 * x * t / b), lambda x, t, b: Number(x * t / 0.693 / b), lambda x, t, b: Number(x * t / 0.69 / b)),
    "nbytes are bytes already, and the result is bits for each of them: there is no 8.": (lambda x, t, b: Number(x * t / np.log(2) / b / 8), lambda x, t, b: Number(x * t / np.log(2) / b * 8)),
    "A loss in nats becomes bits by a division by ln 2: its own logarithm is not needed.": lambda x, t, b: Number(np.log2(x) * t / b if x else -np.inf),
}  # fmt: skip


@exercise(
    "38.4", "bits_per_byte",
    first_step="the loss of all tokens together, in nats: loss * tokens. And in bits?",
    kernel=False,
)  # fmt: skip
def bits_per_byte(e):
    fixed = [(2.0, 100, 400), (np.log(256), 50, 50), (0.0, 3, 9), (3.5, 1000, 4200)]
    for _ in range(3):
        tokens = int(e.rng.integers(10, 1000))
        fixed.append((float(e.rng.uniform(0.5, 6)), tokens, tokens * int(e.rng.integers(2, 6))))
    cases = [(f"loss {x:.4f}, {t} tokens, {b} bytes", (x, t, b)) for x, t, b in fixed]
    right = lambda x, t, b: Number(x * t / np.log(2) / b)

    def read(got):
        e.need(got is not None, "Nothing is returned: end with `return` and the number.")
        e.need(np.ndim(got) == 0 and np.isreal(got), f"Return one number, got {got!r}.")
        return Number(got)

    judged(e, cases, read, right, BITS, lambda *_: "Bits of all tokens over the bytes of the text.")
