"""Launched passes whose results the host reads later."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ..device import Array, is_gpu, mapped_array, to_numpy
from .requests import Request, TokenLogprobs
from .work import NewScores, NewTokens, ScoredChunk


@dataclass(frozen=True)
class TokensInFlight:
    """A launched pass that draws a token for each request.

    logprobs: the results of token_logprobs, valid after wait_for_ids; empty if no request asks for
    them.
    rows: the rows of the requests in these arrays.
    size: of the decoding step; 0: a prefill.
    """

    requests: list[Request]
    wait_for_ids: Callable[[], list[int]]
    logprobs: list[np.ndarray]
    rows: list[int]
    size: int = 0

    def wait(self) -> NewTokens:
        """Wait for the tokens."""
        ids = self.wait_for_ids()
        return NewTokens(self.requests, ids, self._token_logprobs(), self.size)

    def _token_logprobs(self) -> Iterable[TokenLogprobs | None]:
        """Return what the Completion of each request says about its token; None if it was not asked
        for."""
        if not self.logprobs:
            return itertools.repeat(None)
        counts = [r.logprobs for r in self.requests]
        longest = max([n for n in counts if n is not None])
        chosen, top_ids, top_values = self.logprobs
        own = chosen[self.rows].tolist()
        if longest == 0:
            return [None if n is None else (x, []) for n, x in zip(counts, own)]
        ids = top_ids[self.rows, :longest].tolist()
        values = top_values[self.rows, :longest].tolist()
        pairs = lambda ids, values: [(t, x) for t, x in zip(ids, values) if t >= 0]
        rows = zip(counts, own, ids, values)
        return [None if n is None else (x, pairs(t[:n], v[:n])) for n, x, t, v in rows]


@dataclass(frozen=True)
class ScoresInFlight:
    """A launched pass whose log-probabilities the host has not read yet.

    pieces: the results of token_logprobs, for some rows each.
    """

    chunks: list[ScoredChunk]
    pieces: list[list[np.ndarray]]
    wait_for_all: Callable[[], None]

    def wait(self) -> NewScores:
        """Wait for the log-probabilities."""
        self.wait_for_all()
        return NewScores(self.chunks, [np.concatenate(arrays) for arrays in zip(*self.pieces)])


def to_host_later(x: Array) -> np.ndarray:
    """Return an array in host memory that has the values of x when the kernels launched so far, and
    the copy, have ended."""
    if not is_gpu(x):
        return to_numpy(x)
    host, host_gpu = mapped_array(x.shape, x.dtype)
    host_gpu[...] = x
    return host
