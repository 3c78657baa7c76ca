"""From tokens, one at a time, to text: whole characters only, no special tokens, and an end at a stop string."""

import codecs
from collections.abc import Iterable

from ..data.tokenizer import Tokenizer


class TextStream:
    """The text of one sequence while its tokens arrive.

    A token may end inside a character, and a text may end with what could become a stop string: both are held back until
    it is clear. `text` is all that was given out; `stopped` says that a stop string came (it is not part of the text).
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = ()):
        self.tokenizer, self.stop = tokenizer, [s for s in stop if s]
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text, self.held, self.stopped = "", "", False

    def feed(self, token: int) -> str:
        """-> the text that has become certain with this token, often none"""
        known = token < self.tokenizer.vocab_size and token not in self.tokenizer.special_ids
        return self._give(self.decoder.decode(self.tokenizer.token_bytes[token] if known else b""))

    def finish(self) -> str:
        """No token follows. -> the rest; bytes of an unfinished character become U+FFFD"""
        return self._give(self.decoder.decode(b"", final=True), at_the_end=True)

    def _give(self, piece: str, at_the_end: bool = False) -> str:
        if self.stopped:
            return ""
        self.held += piece
        places = [self.held.find(s) for s in self.stop if s in self.held]
        if places:
            self.stopped, ready, self.held = True, self.held[: min(places)], ""
        else:
            keep = 0 if at_the_end else self._could_become_a_stop()
            cut = len(self.held) - keep
            ready, self.held = self.held[:cut], self.held[cut:]
        self.text += ready
        return ready

    def _could_become_a_stop(self) -> int:
        """How many characters at the end are the beginning of a stop string"""
        most = min(len(self.held), max((len(s) - 1 for s in self.stop), default=0))
        sizes = range(most, 0, -1)
        return next((n for n in sizes if any(s.startswith(self.held[-n:]) for s in self.stop)), 0)
