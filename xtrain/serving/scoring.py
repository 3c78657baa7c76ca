"""Log-probabilities of given texts, without sampling: what evaluation and reinforcement learning
need (Engine.logprobs).

A sequence is computed like a prompt: with others in one pass, in chunks, with the shared blocks of
a common beginning. Position p has the logits of token p + 1, so the last token is not computed, and
nothing is reused from position first - 1 on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# Rows of logits at a time: 1024 x 151,936 in bf16 are 311 MB. Elsewhere the vocabulary is read from
# the cache of a core.
LOGIT_ROWS = {"gpu": 1024, "cpu": 128, "sim": 128}


@dataclass
class Scores:
    """Log-probabilities of the tokens first, first + 1, ... of a sequence, given all earlier ones.

    tokens      the whole sequence
    logprobs    float32 (n,): log_softmax of the model's logits, at each of the n tokens; NaN where
                the logits are NaN
    top         for each of the n tokens, the most likely ones in its place with their
                log-probabilities, in order
    """

    tokens: list[int]
    first: int
    n_top: int
    logprobs: np.ndarray = field(init=False)
    top: list[list[tuple[int, float]]] = field(init=False)
    n_scored: int = field(init=False, default=0)  # how many of the n

    def __post_init__(self) -> None:
        n = len(self.tokens) - self.first
        self.logprobs = np.full(n, np.nan, np.float32)
        self.top = [[] for _ in range(n)]

    @property
    def total(self) -> float:
        """Return the sum: the log-probability of all the tokens together."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def complete(self) -> bool:
        return self.n_scored == len(self.logprobs)

    def scored_positions(self, start: int, n: int) -> range:
        """Return those of the positions start .. start + n - 1 whose logits are scored."""
        return range(max(start, self.first - 1), start + n)

    def take(self, position: int, arrays: Sequence[np.ndarray], rows: slice) -> None:
        """Take over what token_logprobs returned for positions `position` and following ones.
        Positions come in order; after a preemption they come again."""
        i = position + 1 - self.first
        n = rows.stop - rows.start
        chosen_W, ids_WT, values_WT = (x[rows] for x in arrays)
        self.logprobs[i : i + n] = chosen_W
        for j in range(n if self.n_top else 0):
            pairs = zip(ids_WT[j, : self.n_top].tolist(), values_WT[j, : self.n_top].tolist())
            self.top[i + j] = [(token, x) for token, x in pairs if token >= 0]
        self.n_scored = i + n
