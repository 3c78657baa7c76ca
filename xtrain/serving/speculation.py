"""Speculative decoding that changes no token: drafts, how many pay, and which are accepted.

A step that decodes one sequence reads all weights for one token; for a few rows more it takes hardly
longer. So a drafter guesses the next tokens of a sequence, and one step verifies them (verifying.py):
its rows are the last token and the k drafted ones, and the sampler of plain decoding draws from the
logits of each.

    row          0      1      2      3
    token        last   d1     d2     d3         drafts: d1 d2 d3
    drawn        t1     t2     t3     t4         d1 = t1, d2 = t2, d3 != t3: t1 t2 t3 are accepted

t1 is the next token. If d1 = t1, row 1 has the history that plain decoding would have in the next
step, so t2 is the token that it would draw, and so on. The answer gets the drafts up to the first
that differs from the drawn token, and the drawn token in its place: 1 to k + 1 tokens. Random numbers
depend on seed, stream and number of the token only, so nothing is rejected at random, as with other
speculative sampling (Leviathan et al. 2023), and in batch-invariant mode, where a row has the same
bits in both steps, the answer is that of plain decoding, bit for bit. In the fast mode the logits may
differ in their last bits, as they do between two batches.

Keys and values of drafts that are not accepted stay behind the end of the sequence, where the next
step overwrites them: they count neither as cached nor as shared.

Prompt lookup (Saxena 2023) drafts what followed when the last tokens occurred before, in the prompt
or the answer: code that is edited, texts that are quoted.

How many tokens to draft is a matter of time. Let p_i be the probability that the drafts 1 .. i of a
sequence are right, estimated from how often its predictions were right so far. A step that verifies
m drafts of all sequences yields B + (sum of their p_i) tokens on average. The m most probable ones
are drafted for which this number, divided by the time of a step with so many rows, is largest; none
if a plain step yields more per second. The times are those measured while running. So a full batch,
whose steps take longer with more rows, drafts nothing.
"""

import collections
import time
from collections.abc import Sequence
from typing import Protocol

from .requests import Request
from .work import Arrived, VerifiedTokens

NGRAMS = (8, 4, 2)  # tokens that must have occurred before; the longest one is looked up first
INDEXED = 1024  # tokens of prompts in a step: a millisecond
LONGEST_MATCH = 8  # tokens that are compared: longer matches are as good
MOST_ROWS = 256  # of a verifying step: with more, products take longer for every row
MEMORY = 0.95  # what an observation counts for after the next one
TIMES = 8  # that are kept of each Timing
UNTIMED = 3  # of a kind of step
FORGOTTEN = 500  # results


def count_accepted(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many of the drafted tokens are the drawn ones, up to the first that is not."""
    n = 0
    for token, other in zip(draft, drawn):
        if token != other:
            break
        n += 1
    return n


class Drafter(Protocol):
    """Guesses the next tokens of sequences, none of whose tokens are in flight when it drafts."""

    def seconds(self, n: int) -> float:
        """Return the time that drafting n tokens for all sequences takes."""

    def prepare(self, requests: list[Request]) -> None:
        """Do what takes long, a little at a time: called before `chances` in every step."""

    def chances(self, request: Request, n: int) -> list[float]:
        """Return the probabilities p_1, ..., p_i, i <= n: the first 1, ..., i tokens that it would
        draft are all right. Empty: it would draft none. If the newest token is in flight, they are
        those of drafts after it."""

    def draft(self, requests: list[Request], lengths: list[int]) -> list[list[int]]:
        """Return the next tokens of each request, at most as many as `lengths` says."""


# ------------------------------------------------------------------------- prompt lookup
class Rate:
    """How often something was right, recent cases counting more; prior: before the first."""

    def __init__(self, prior: float = 0.5) -> None:
        self.right = 2 * prior
        self.all = 2.0

    def note(self, right: bool) -> None:
        self.right = MEMORY * self.right + right
        self.all = MEMORY * self.all + 1

    @property
    def value(self) -> float:
        return self.right / self.all


class History:
    """The tokens of a sequence, and where each n-gram occurred last: what follows it is predicted.

    indexed: tokens whose n-grams are known; before it is all, nothing is predicted.
    rates: of predictions, by the number of tokens that matched.
    """

    def __init__(self, prompt: Sequence[int]):
        self.tokens = list(prompt)
        self.n_prompt = len(prompt)
        self.rates = [Rate() for _ in range(LONGEST_MATCH + 1)]
        # n-gram -> position of the token after it. The newest n-gram is missing: nothing follows.
        self.after: dict[tuple[int, ...], int] = {}
        self.indexed = 0
        self.position = 0
        self.matched = 0

    def index(self, most: int) -> int:
        """Index the next tokens, at most so many. Return how many."""
        tokens = self.tokens
        start = self.indexed
        end = min(start + most, len(tokens))
        for n in NGRAMS:
            first = max(start, n)
            if first < end:
                grams = zip(*[tokens[first - n + i : end - n + i] for i in range(n)])
                self.after.update(zip(grams, range(first, end)))
        self.indexed = end
        if end == len(tokens):
            self._find()
        return end - start

    def append(self, token: int) -> None:
        """Append a token, and note whether it was predicted."""
        tokens = self.tokens
        if self.position:
            self.rates[self.matched].note(tokens[self.position] == token)
        tokens.append(token)
        if self.indexed == len(tokens) - 1:
            self.index(1)

    def _find(self) -> None:
        """Set `position` of the predicted token, 0 if there is none, and how many tokens before it
        are the last ones."""
        tokens = self.tokens
        self.position = self.matched = 0
        for n in NGRAMS:
            position = self.after.get(tuple(tokens[-n:]), 0)
            if position:
                before = tokens[max(0, position - LONGEST_MATCH) : position]
                while n < len(before) and before[-n - 1] == tokens[-n - 1]:
                    n += 1
                self.position = position
                self.matched = n
                return

    def chances(self, n: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ..., n predicted tokens are all right."""
        out: list[float] = []
        p = 1.0
        for i in range(n if self.position else 0):
            p *= self.rates[min(self.matched + i, LONGEST_MATCH)].value
            out.append(p)
        return out

    def predict(self, n: int) -> list[int]:
        """Return the next n tokens if what followed the last ones follows again."""
        tokens = self.tokens
        out: list[int] = []
        for i in range(self.position, self.position + n if self.position else 0):
            out.append(tokens[i] if i < len(tokens) else out[i - len(tokens)])
        return out


class PromptLookup:
    """Drafts what followed the last tokens when they occurred before."""

    def seconds(self, n: int) -> float:
        return 0.0

    def prepare(self, requests: list[Request]) -> None:
        left = INDEXED
        for request in requests:
            left -= self._history(request).index(left)

    def chances(self, request: Request, n: int) -> list[float]:
        ahead = request.in_flight  # must have been predicted, too
        return self._history(request).chances(n + ahead)[ahead:]

    def draft(self, requests: list[Request], lengths: list[int]) -> list[list[int]]:
        return [self._history(r).predict(n) if n else [] for r, n in zip(requests, lengths)]

    @staticmethod
    def _history(request: Request) -> History:
        """Return the request's history, up to its last token that has arrived."""
        history = request.history
        if history is None:
            history = request.history = History(request.prompt)
        for token in request.completion[len(history.tokens) - history.n_prompt :]:
            history.append(token)
        return history


# ------------------------------------------------------------------------- how many tokens
class Timing:
    """The seconds that something takes: the least of the last TIMES cases, None before the first.

    The UNTIMED first ones, which compile and capture, do not count.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def note(self, seconds: float) -> None:
        self.times.append(seconds)
        del self.times[UNTIMED:-TIMES]

    def forget(self) -> None:
        """Begin again, without first cases that do not count."""
        del self.times[UNTIMED:]

    @property
    def seconds(self) -> float | None:
        return min(self.times[UNTIMED:], default=None)


class StepTimes:
    """The Timing of steps by kind (verifying?) and size: the time between two results.

    A time is known until FORGOTTEN other results have come; then such a step is tried again.
    """

    def __init__(self) -> None:
        self.of: dict[tuple[bool, int], Timing] = collections.defaultdict(Timing)
        self.noted: dict[tuple[bool, int], int] = {}  # number of the newest result
        self.results = 0
        self.last = 0.0

    def arrived(self, verifying: bool, size: int, now: float) -> None:
        """Note that the results of a step of this kind have arrived. size: 0 for a prefill."""
        self.results += 1
        if size:
            kind = verifying, size
            timing = self.of[kind]
            if self.results - self.noted.get(kind, 0) > FORGOTTEN:
                timing.forget()
            timing.note(now - self.last)
            self.noted[kind] = self.results
        self.last = now

    def seconds(self, verifying: bool, size: int) -> float | None:
        """Return the time of a step; None if it is not known."""
        kind = verifying, size
        if self.results - self.noted.get(kind, 0) > FORGOTTEN:
            return None
        return self.of[kind].seconds


class Speculation:
    """Chooses how many tokens each sequence drafts.

    most: of a sequence, at most.
    drafts: sequences that have drafted so far, counted in each step.
    drafted_tokens, accepted_tokens: that they have drafted, and those of them that answers have got.
    """

    def __init__(self, drafter: Drafter, most: int):
        self.drafter = drafter
        self.most = most
        self.times = StepTimes()
        self.drafts = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def figures(self) -> dict[str, int]:
        """Return what has been drafted so far, by name."""
        names = ("drafts", "drafted_tokens", "accepted_tokens")
        return {name: getattr(self, name) for name in names}

    def note_arrival(self, new: Arrived) -> None:
        """Note results of a step, when they have arrived; `accepted_tokens` counts those that an
        answer gets (Scheduler.take)."""
        verified = isinstance(new, VerifiedTokens)
        self.times.arrived(verified, new.size, time.perf_counter())
        if isinstance(new, VerifiedTokens):
            self.drafts += sum(map(bool, new.drafts))
            self.drafted_tokens += sum(map(len, new.drafts))

    def draft(self, requests: list[Request], lengths: list[int]) -> list[list[int]]:
        """Return the drafts of a step; an empty list: none."""
        if not any(lengths):
            return []
        start = time.perf_counter()
        drafts = self.drafter.draft(requests, lengths)
        self.times.last += time.perf_counter() - start  # the step's time is without it
        return drafts if any(drafts) else []

    def lengths(self, requests: list[Request], size: int) -> list[int]:
        """Return how many tokens each request drafts in the next step.

        size: entries of a plain step. For requests whose newest token is in flight, the answer says
        whether it pays to wait for it.
        """
        lengths = [0] * len(requests)
        drafts: list[tuple[float, int]] = []  # p_i, number of the request
        self.drafter.prepare(requests)
        for number, request in enumerate(requests):
            room = request.room - len(request.completion) - request.in_flight - 1
            if request.constraint is None and room > 0:
                n = min(room, self.most)
                drafts += [(p, number) for p in self.drafter.chances(request, n)]
        if not drafts:
            return lengths
        drafts.sort(key=lambda draft: -draft[0])  # stable: those of a request stay in order
        drafts = drafts[: max(0, MOST_ROWS - len(requests))]
        for _, number in drafts[: self._count(drafts, len(requests), size)]:
            lengths[number] += 1
        return lengths

    def _count(self, drafts: list[tuple[float, int]], B: int, size: int) -> int:
        """Return how many of the drafts, the most probable first, give most tokens per second."""
        seconds = self.times.seconds(False, size)
        if seconds is None:  # measure it first
            return 0
        best = 0
        fastest = B / seconds
        rows = 0
        tokens = float(B)
        depth = [0] * B
        deepest = 0
        for n, (p, number) in enumerate(drafts, 1):
            tokens += p
            depth[number] += 1
            deepest = max(deepest, depth[number])
            if verifying_size(B + n) != rows:
                rows = verifying_size(B + n)
                # unless it is known, it takes as long as one with fewer rows
                seconds = self.times.seconds(True, rows) or seconds
            speed = tokens / (seconds + self.drafter.seconds(deepest))
            if speed > fastest:
                fastest = speed
                best = n
        return best


def verifying_size(rows: int) -> int:
    """Return the rows of the CUDA graph that verifies so many: a power of two. Others are idle."""
    return 1 << (rows - 1).bit_length()
