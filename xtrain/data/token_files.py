"""Files that hold tokens already: the .bin shards of llm.c (shards.py) and of nanoGPT, which are
uint16 without a header.

    files = of(Sources(data))                    [] if it is text
    tokens = TokenFiles(files, tokenizer, ...)    checked; the tokens stay where they are

Only the tokenizer knows what the tokens mean, so it must be given: --tokenizer. Every id is checked
against its vocabulary. (nanoGPT keeps its own vocabularies in meta.pkl. A pickle can run any
program, so it is not read.)

A file with "val" in its name is validation text: val.bin, fineweb_val_000000.bin. Without one, the
end of the last file is.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..errors import UserError
from . import stamps
from .compressed import BadFile
from .shards import MAGICS, Span, span_of
from .sources import Source, Sources
from .text_files import reading
from .tokenizer import Tokenizer

SUFFIX = ".bin"
PICKLES = (".pkl", ".pickle")
VALIDATION = re.compile(r"(^|[._-])val(id|idation)?([._-]|$)")
LLM_C = range(20240000, 20300000)  # magic numbers of llm.c: dates
# held out of the last file: 1/10 of the tokens, at most VAL_TOKENS
VAL_FRACTION = 10
VAL_TOKENS = 500_000
BLOCK = 1 << 22  # tokens read at once


def of(sources: Sources) -> list[Source]:
    """Return the files of --data if they hold tokens, [] if they hold text.

    Raises UserError if some hold the one, some the other. In a folder of texts, a .bin is a file
    that is not text.
    """
    files = []
    if not sources.own:
        files = sources.find()
    tokens = [source for source in files if source.path.suffix == SUFFIX]
    text = [source for source in files if source.path.suffix not in (SUFFIX, *PICKLES)]
    if tokens and text:
        named = [source for source in tokens if source.is_named]
        if named:
            raise UserError(
                f"{named[0].path} holds tokens, {text[0].path} does not: give either tokens or "
                "text with --data"
            )
        return []
    return files if tokens else []


class TokenFiles:
    """Tokens in files, divided into training and validation. Facts sum over the files in use."""

    def __init__(
        self,
        sources: list[Source],
        tokenizer: Tokenizer,
        cache: Path,
        tell: Callable[[float], None] = lambda fraction: None,
        verify: bool = False,
    ):
        """Find the tokens of the files, and hold out some for validation.

        cache: files that it says are unchanged are not read again, unless verify
        tell: called with the share that is read

        Raises UserError if there are too few tokens.
        """
        self.tokenizer = tokenizer
        self.cache = cache
        self.tell = tell
        self.verify = verify
        self.left_out: list[str] = []
        self._known: dict[Span, tuple[str, int, int]] = {}
        self.train: list[Span] = []
        self.val: list[Span] = []
        self.done = 0
        self.total = sum(_size(source.path) for source in sources)
        for source in sources:
            try:
                span = _span(source.path)
                self._facts(span)
                (self.val if VALIDATION.search(source.path.stem) else self.train).append(span)
            except BadFile as error:
                self.left_out.append(str(error))
        self.files = len(self.train) + len(self.val)
        self.split = "tail"
        if self.train and self.val:
            self.split = "files"
        if self.files and self.split == "tail":
            # of val.bin alone, too
            self.train = [*self.train, *self.val]
            self.val = []
            self._hold_out()

    def _hold_out(self) -> None:
        """Hold out the end of the last file for validation.

        All of the file, if others are left and it is no longer than that.
        """
        n_tokens = max(1, min(sum(span.n for span in self.train) // VAL_FRACTION, VAL_TOKENS))
        last = self.train.pop()
        n = last.n - n_tokens
        if n > 0:
            self.train.append(Span(last.path, last.dtype, last.offset, n))
        elif not self.train:
            raise UserError(f"{last.path} has {last.n} tokens, too few to hold some out")
        offset = last.offset + max(0, n) * np.dtype(last.dtype).itemsize
        self.val = [Span(last.path, last.dtype, offset, min(n_tokens, last.n))]

    def summary(self) -> dict[str, int | str]:
        """Return facts that a Corpus has, under their names there."""
        sides = {"train": self.train, "val": self.val}
        facts = {name: [self._facts(span) for span in spans] for name, spans in sides.items()}
        whole = hashlib.sha256()
        for name, value in facts.items():
            whole.update(f"{name} {[sha256 for sha256, *_ in value]}".encode())
        sums = {
            name: [sum(ends for _, ends, _ in value), sum(n for _, _, n in value)]
            for name, value in facts.items()
        }
        return {
            "sha256": whole.hexdigest(),
            "documents": max(1, sums["train"][0] + sums["val"][0]),
            "bytes": sums["train"][1] + sums["val"][1],
            "train_bytes": sums["train"][1],
            "val_bytes": sums["val"][1],
            "train_tokens": sum(span.n for span in self.train),
            "val_tokens": sum(span.n for span in self.val),
        }

    def _facts(self, span: Span) -> tuple[str, int, int]:
        """Return SHA-256 of the tokens, ends of text among them, and bytes of their text.

        Raises BadFile.
        """
        if span not in self._known:
            self._known[span] = self._checked(span)
        return self._known[span]

    def _checked(self, span: Span) -> tuple[str, int, int]:
        tokenizer = self.tokenizer
        path = os.fsencode(span.path.resolve())
        which = f" {span.dtype} {span.offset} {span.n} {tokenizer.sha256} {tokenizer.eot_id}"
        name = f"tokens-{hashlib.sha256(path + which.encode()).hexdigest()[:16]}"
        stored = {}
        if not self.verify:
            stored = stamps.load(self.cache, name)
        read_at = time.time()
        with reading(span.path):
            now = stamps.stamp(span.path)
        if stored.get("stamp") == now:
            return stored["sha256"], stored["documents"], stored["bytes"]
        facts = self._read(span)
        if stamps.is_settled([now], read_at):
            checked = dict(zip(("sha256", "documents", "bytes"), facts))
            stamps.save(self.cache, name, {"stamp": now, **checked})
        return facts

    def _read(self, span: Span) -> tuple[str, int, int]:
        V = self.tokenizer.vocab_size
        digest = hashlib.sha256()
        counts_V = np.zeros(V, np.int64)
        with reading(span.path) as file:
            file.seek(span.offset)
            for start in range(0, span.n, BLOCK):
                n = min(BLOCK, span.n - start)
                raw = file.read(n * np.dtype(span.dtype).itemsize)
                tokens = np.frombuffer(raw, span.dtype)
                if len(tokens) < n:
                    raise BadFile(
                        f"{span.path} became shorter while it was being read: start again"
                    )
                if (largest := int(tokens.max())) >= V:
                    raise BadFile(
                        f"{span.path} has the id {largest}, the tokenizer has {V} tokens: give the "
                        "tokenizer that made the file with --tokenizer"
                    )
                digest.update(raw)
                counts_V += np.bincount(tokens, minlength=V)
                self.done += len(raw)
                self.tell(min(1.0, self.done / max(1, self.total)))
        ends = counts_V[self.tokenizer.eot_id]
        return digest.hexdigest(), int(ends), int(counts_V @ self.tokenizer.token_lengths)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reading says why
        return 0


def _span(path: Path) -> Span:
    """Return the tokens of a file. Raises BadFile."""
    if path.suffix in PICKLES:
        raise BadFile(
            f"{path} is a pickle, which can run any program: it is not read, --tokenizer has the "
            "vocabulary"
        )
    with reading(path) as file:
        head = file.read(8)
        size = path.stat().st_size
    magic = int.from_bytes(head[:4], "little")
    if magic in MAGICS:
        try:
            return span_of(path, "copy or write it again")
        except UserError as error:
            raise BadFile(str(error)) from None
    if magic in LLM_C or head.startswith(b"PK\3\4"):
        what = "of PyTorch"
        if magic in LLM_C:
            what = f"of llm.c with the magic number {magic}"
        raise BadFile(f"{path} is a file {what}, which holds no tokens: leave it out")
    if not size or size % 2:
        raise BadFile(
            f"{path} has {size} bytes: without llm.c's header it must be tokens of two bytes, as "
            "nanoGPT writes them"
        )
    return Span(path, "<u2", 0, size // 2)
