"""What a step computes, from the scheduler to the runner, and what has been computed, on the way
back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .requests import Request, TokenLogprobs


@dataclass(frozen=True)
class BlockCopy:
    """Copy the first n_tokens tokens of block sources[i] to block targets[i]."""

    targets: list[int]
    sources: list[int]
    n_tokens: int


@dataclass(frozen=True)
class PrefillChunk:
    """The next tokens of a request's sequence; `start` tokens before them are in the cache."""

    request: Request
    start: int
    tokens: list[int]


@dataclass(frozen=True)
class ScoredChunk:
    """Positions `position`, `position` + 1, ... of a request's sequence, whose next tokens are
    scored.

    rows: their places among the rows of the pass that are scored.
    """

    request: Request
    position: int
    rows: slice


@dataclass
class Prefill:
    """One forward pass over prompt tokens.

    rows: the tokens of the pass whose logits are needed: one for each request in `drawing`, then
    those of `scored`.
    drawing: requests that get their first token, a group of equal prompts together.
    copy: the last blocks of such prompts, if they are not full.
    """

    chunks: list[PrefillChunk]
    rows: list[int] = field(default_factory=list)
    drawing: list[Request] = field(default_factory=list)
    scored: list[ScoredChunk] = field(default_factory=list)
    copy: BlockCopy | None = None


@dataclass
class Work:
    """What one step computes, in this order.

    copies: copied blocks, before anything is written to them.
    decoding: requests that get their next token; `grown`: those of them with a new last block.
    """

    copies: list[BlockCopy] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    prefill: Prefill | None = None


# ------------------------------------------------------------------------- what has been computed
@dataclass(frozen=True)
class NewTokens:
    """One token for each request; below 0: the logits were NaN."""

    requests: list[Request]
    tokens: list[int]
    logprobs: Iterable[TokenLogprobs | None]


@dataclass(frozen=True)
class NewScores:
    """Log-probabilities for chunks of requests, in the rows of `arrays` (Scores.take)."""

    chunks: list[ScoredChunk]
    arrays: Sequence[Any]
