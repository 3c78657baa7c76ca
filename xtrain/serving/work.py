"""What a step computes, from the scheduler to the runner, and what has been computed, on the way
back."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .requests import Request, TokenLogprobs


@dataclass(frozen=True)
class Limits:
    """What the scheduler may use.

    max_batch: slots, the entries of the decode batch.
    max_seq_len: tokens of a sequence.
    n_blocks, block_tokens: blocks of the KV cache, and tokens of a block.
    prefill_tokens: prompt tokens in one forward pass.
    prefill_interval: while sequences decode, steps between two admissions.
    reuse_prefix: share blocks between sequences that begin with the same tokens.
    run_ahead: a step is launched before the tokens of the previous one arrive.
    trained_length: prompts of more tokens have RoPE angles of their own and share nothing; None: no
    prompt has.
    pass_flops: floating-point operations of a prefill pass while other sequences decode.
    token_flops, past_flops: those of one token, about, and of each token before it.
    """

    max_batch: int
    max_seq_len: int
    n_blocks: int
    block_tokens: int
    prefill_tokens: int
    prefill_interval: int = 1
    reuse_prefix: bool = True
    run_ahead: bool = False
    trained_length: int | None = None
    pass_flops: float = math.inf
    token_flops: int = 1
    past_flops: int = 0


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

    def add_scored(self, chunk: PrefillChunk, end: int) -> None:
        """Note the positions of a chunk whose logits are scored. end: rows of the pass up to the
        chunk's last one."""
        scores = chunk.request.scores
        if scores is None:
            return
        positions = scores.scored_positions(chunk.start, len(chunk.tokens))
        if not positions:
            return
        first = len(self.rows) - len(self.drawing)
        rows = slice(first, first + len(positions))
        self.rows += range(end - len(positions), end)
        self.scored.append(ScoredChunk(chunk.request, positions[0], rows))
        chunk.request.in_flight += 1


@dataclass
class Work:
    """What one step computes, in this order.

    copies: copied blocks, before anything is written to them.
    decoding: requests that get their next token; `grown`: those of them with new last blocks.
    drafts: tokens that are verified for each of `decoding`, after its last one; empty: a plain step.
    """

    copies: list[BlockCopy] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    prefill: Prefill | None = None


def graph_size(b: int, max_batch: int) -> int:
    """Return the entries of the CUDA graph that serves b sequences: a power of two up to 8, then a
    multiple of 8.

    Entries without a sequence are idle.
    """
    size = 1 << (b - 1).bit_length() if b <= 8 else -(-b // 8) * 8
    return min(size, max_batch)


# ------------------------------------------------------------------------- what has been computed
@dataclass(frozen=True)
class NewTokens:
    """One token for each request; below 0: the logits were NaN.

    size: rows of the decoding step that drew them; 0: of a prefill.
    """

    requests: list[Request]
    tokens: list[int]
    logprobs: Iterable[TokenLogprobs | None]
    size: int = 0


@dataclass(frozen=True)
class VerifiedTokens:
    """The tokens that a verifying step has drawn for each request: after its last token, and after
    each of its drafts. size: rows of the step."""

    requests: list[Request]
    drafts: list[list[int]]
    drawn: list[list[int]]
    logprobs: list[list[TokenLogprobs | None]]
    size: int


@dataclass(frozen=True)
class NewScores:
    """Log-probabilities for chunks of requests, in the rows of `arrays` (Scores.take)."""

    chunks: list[ScoredChunk]
    arrays: Sequence[Any]
    size: int = 0


Arrived = NewTokens | VerifiedTokens | NewScores
