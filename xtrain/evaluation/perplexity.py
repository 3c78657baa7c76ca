"""Perplexity of a text that is longer than the context, in overlapping windows.

    ppl = exp(-1/n sum_i log p(x_i | the tokens before it in its window))
    bits per byte = -1/bytes sum_i log2 p(x_i | ...)

As the guide "Perplexity of fixed-length models" of transformers: a window begins every `stride`
tokens, has `context` tokens, and only those tokens count that no earlier window had. A smaller
stride gives each token more context and costs more. Nothing precedes the first token of the text,
so it does not count; if stride = context, neither does the first one of each window. Each token has
the same weight, where the guide's loop gives a window with n tokens the weight n - 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..data.tokenizer import Tokenizer
from .scorer import Tokens


@dataclass(frozen=True)
class Window:
    """Tokens, of which the continuation is scored; n_bytes: of the text, that it covers."""

    tokens: Tokens
    n_bytes: int


def windows(ids: list[int], context: int, stride: int) -> Iterator[Tokens]:
    """Divide a text's tokens, at least 2.  1 <= stride <= context, 2 <= context"""
    scored = 1
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        first = max(scored, begin + 1)
        if first < end:
            yield Tokens(ids[begin:first], ids[first:end])
        scored = end
        if end == len(ids):
            return


def byte_windows(
    text: str, ids: list[int], tokenizer: Tokenizer, context: int, stride: int
) -> list[Window]:
    """Return the windows of a text with the bytes that their scored tokens cover.

    Together they are the bytes of the text without those of tokens that are not scored; special
    tokens have none.
    """
    lengths = tokenizer.token_lengths.copy()
    lengths[list(tokenizer.special_ids)] = 0
    parts = [Window(t, int(lengths[t.continuation].sum())) for t in windows(ids, context, stride)]
    # A tokenizer may put a space in front of a text, which is not in it, and special tokens may
    # stand in the text itself.
    unscored = len(text.encode()) - int(lengths[np.array(ids)].sum())
    parts[0] = Window(parts[0].tokens, parts[0].n_bytes + unscored)
    return parts
