"""From tokens to text, one token at a time: only whole characters, no special tokens, and an end at
a stop string."""

import codecs
from collections.abc import Iterable

from ..data.tokenizer import Tokenizer


def text_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return what a token adds to a text, b"" for special and unknown ids."""
    if token < tokenizer.vocab_size and token not in tokenizer.special_ids:
        return tokenizer.token_bytes[token]
    return b""


class TextStream:
    """The text of one sequence while its tokens arrive.

    A token may end inside a character, and a text may end with the start of a stop string. Both are
    held back until the following tokens decide.

    minimum: tokens in which no stop string ends.
    text: everything returned so far.  stopped: a stop string was found; it is not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = (), minimum: int = 0):
        self.tokenizer = tokenizer
        self.stop = [s for s in stop if s]
        self.minimum = minimum
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""
        self.held_back = ""
        self.stopped = False

    def feed(self, *tokens: int) -> str:
        """Return the text that is certain after these tokens, often empty. Special and unknown ids
        add nothing. With stop strings give one token at a time."""
        self.minimum -= len(tokens)
        new = self.decoder.decode(b"".join([text_bytes(self.tokenizer, t) for t in tokens]))
        if self.stop:
            return self._release(new)
        self.text += new
        return new

    def finish(self) -> str:
        """End the text: no token follows. -> the rest; the bytes of an unfinished character become
        U+FFFD"""
        return self._release(self.decoder.decode(b"", final=True), at_the_end=True)

    def _release(self, new: str, at_the_end: bool = False) -> str:
        if self.stopped:
            return ""
        self.held_back += new
        ends = [self.held_back.find(s) for s in self.stop if s in self.held_back]
        if ends and self.minimum < 0:
            self.stopped = True
            ready = self.held_back[: min(ends)]
            self.held_back = ""
        else:
            keep = 0 if at_the_end else self._could_become_a_stop()
            cut = len(self.held_back) - keep
            ready = self.held_back[:cut]
            self.held_back = self.held_back[cut:]
        self.text += ready
        return ready

    def _could_become_a_stop(self) -> int:
        """Return the number of characters at the end that are the start of a stop string."""
        text = self.held_back
        longest = min(len(text), max((len(s) - 1 for s in self.stop), default=0))
        sizes = range(longest, 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self.stop)), 0)
