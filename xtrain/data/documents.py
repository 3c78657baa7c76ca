"""The documents of a text, and which of them are held out for validation.

**Documents.** A file is a document; so is a line of a .jsonl and a row of a .parquet or .arrow.
"<|endoftext|>" inside a text also ends a document. Documents are read part by part (text_files.py),
so the memory does not depend on their length.

**Files that are left out.** The first pass, the survey, finds out which files cannot be read to
their end as what they are. None of their documents is used, and later passes do not read them.

**Split.** A tenth of the text, at most 2 MB, is held out. Documents are drawn in the order of their
SHA-256 until the held-out text is large enough: the choice looks random, is the same everywhere,
and puts all copies of a document on one side. If a document, or the copies of a drawn one together,
are longer than the text to hold out, the end of the text is held out instead.
"""

import hashlib
import heapq
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..errors import UserError
from .compressed import BadFile
from .sources import Data, Source, Sources
from .stamps import is_settled, stamp
from .text_files import unreadable
from .tokenizer import END_OF_TEXT

# held out: 1/10 of the text, at most 2 MB
VAL_FRACTION = 10
VAL_BYTES = 2_000_000


class Documents:
    """The documents of files, part by part. Each `for` loop reads them again:

        for text, ends in Documents(data): ...      ends: is it the last part of its document?

    data: a file, a folder, a glob, or several; None: the source of the Python standard library
    (sources.py). key: the field of a .jsonl, or the column, that holds the text.

    files: how many have text.
    left_out: {path: the sentence that says why it is not used}. Both are known after `survey`, with
    which the first loop begins.
    """

    def __init__(self, data: Data = None, key: str = "text"):
        self.sources = Sources(data)
        self.key = key
        self.files = self.n_bytes = 0  # n_bytes: of the files, when they were listed
        self.left_out: dict[str, str] = {}
        self._used: list[Source] | None = None  # by the loops
        self.identity_read = ""  # identity() when the survey began
        self.settled = False  # would any later change show in identity()?

    @property
    def name(self) -> str:
        """The paths, shortened."""
        return self.sources.name

    def survey(self, tell: Callable[[int], None] = lambda characters: None) -> "Survey":
        """Read all documents once. Raises UserError.

        tell: called with the characters of each part
        """
        sources = self.sources.find()
        self.identity_read = self._identify(sources)
        surveying = Surveying()
        used = []
        self.files = 0
        self.left_out = {}
        for source in sources:
            try:
                self.files += surveying.add(_told(_separate(source.read(self.key)), tell))
                used.append(source)
            except BadFile as error:
                if not self.sources.own:  # Python's own tests have files in other encodings
                    self.left_out[str(source.path)] = str(error)
        self._used = used
        return surveying.survey()

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        if self._used is None:
            self.survey()
        for source in self._used or ():
            yield from _separate(source.read(self.key))

    def identity(self) -> str:
        """Return a hash of the names, sizes and times of all files, without reading them.

        Raises UserError.
        """
        return self._identify(self.sources.find())

    def _identify(self, sources: list[Source]) -> str:
        read_at = time.time()
        stamps = {}
        for source in sources:
            try:
                is_file = os.path.isfile(source.path)  # else a link to nothing, a socket
                if is_file:
                    stamps[str(source.path)] = stamp(source.path)
                else:
                    stamps[str(source.path)] = [0, 0, 0, 0]
            except OSError as error:
                raise UserError(unreadable(error)) from None
        self.n_bytes = sum(size for size, *_ in stamps.values())
        self.settled = is_settled(list(stamps.values()), read_at)
        content = json.dumps([self.sources.absolute_paths, self.key, stamps])  # ASCII
        return hashlib.sha256(content.encode()).hexdigest()


def _told(
    parts: Iterable[tuple[str, bool]], tell: Callable[[int], None]
) -> Iterator[tuple[str, bool]]:
    for text, ends in parts:
        tell(len(text))
        yield text, ends


def _separate(parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """End documents at END_OF_TEXT, too, and leave out empty ones.

    The last part of a document may be empty.
    """
    tail = ""
    begun = False
    for text, ends in parts:
        *whole, tail = (tail + text).split(END_OF_TEXT)
        for document in whole:
            if document or begun:
                yield document, True
            begun = False
        if ends:
            if tail or begun:
                yield tail, True
            tail = ""
            begun = False
            continue
        kept = next(n for n in range(len(END_OF_TEXT), -1, -1) if tail.endswith(END_OF_TEXT[:n]))
        ready, tail = tail[: len(tail) - kept], tail[len(tail) - kept :]
        if ready:
            yield ready, False
            begun = True


# --- train and validation ---


@dataclass
class Survey:
    """The result of one pass over a text, from which the text is identified and split."""

    documents: int = 0
    n_bytes: int = 0
    sha256: str = ""  # of the SHA-256 of each document, in order
    longest: int = 0  # bytes of the longest document
    # The first documents in the order of their hash, VAL_BYTES or a little more: hash -> bytes,
    # with all copies.
    first: dict[bytes, int] = field(default_factory=dict)

    @property
    def held_out(self) -> int:
        """Bytes wanted for validation."""
        return max(1, min(self.n_bytes // VAL_FRACTION, VAL_BYTES))

    @property
    def by_document(self) -> bool:
        """True if whole documents are held out, False if the end of the text is."""
        return bool(self.validation_hashes())

    def validation_hashes(self) -> set[bytes]:
        """Return the hashes of the validation documents; empty unless by_document."""
        drawn: set[bytes] = set()
        size = 0
        for digest in sorted(self.first):
            if size < self.held_out:
                drawn.add(digest)
                size += self.first[digest]
        longest = max(self.longest, max((self.first[digest] for digest in drawn), default=0))
        if longest <= self.held_out:
            return drawn
        return set()


class Surveying:
    """A survey, file by file."""

    def __init__(self) -> None:
        self.total = Survey()
        self.whole = hashlib.sha256()
        self.first = _First()

    def add(self, documents: Iterable[tuple[str, bool]]) -> bool:
        """Read the parts of a file and return True if it has a document.

        Nothing of the file is added if reading fails.
        """
        total = Survey()
        whole = self.whole.copy()
        first = _First()
        document = hashlib.sha256()
        size = 0
        for text, ends in documents:
            raw = text.encode()
            document.update(raw)
            size += len(raw)
            if not ends:
                continue
            digest = document.digest()
            whole.update(digest)
            total.documents += 1
            total.n_bytes += size
            total.longest = max(total.longest, size)
            first.add(digest[:12], size)
            document = hashlib.sha256()
            size = 0
        self.whole = whole
        self.total.documents += total.documents
        self.total.n_bytes += total.n_bytes
        self.total.longest = max(self.total.longest, total.longest)
        for key, n_bytes in first.sizes.items():
            self.first.add(key, n_bytes)
        return total.documents > 0

    def survey(self) -> Survey:
        """Return the survey of what has been read so far."""
        return replace(self.total, sha256=self.whole.hexdigest(), first=dict(self.first.sizes))


class _First:
    """The first documents in the order of their hash. What comes after VAL_BYTES of them is never
    drawn, and dropped.

    So it may be dropped in each file, before the files are added: what comes after VAL_BYTES of one
    does in all together, too.
    """

    def __init__(self) -> None:
        self.sizes: dict[bytes, int] = {}  # of all copies
        self.heap: list[int] = []  # the negated hashes: the largest comes first
        self.n_bytes = 0

    def add(self, key: bytes, size: int) -> None:
        if key not in self.sizes:
            heapq.heappush(self.heap, -int.from_bytes(key))
        self.sizes[key] = self.sizes.get(key, 0) + size
        self.n_bytes += size
        while self.n_bytes - self.sizes[last := (-self.heap[0]).to_bytes(12)] >= VAL_BYTES:
            self.n_bytes -= self.sizes.pop(last)
            heapq.heappop(self.heap)


def survey(documents: Iterable[tuple[str, bool]]) -> Survey:
    """Read all documents once. documents: parts, as from Documents."""
    surveying = Surveying()
    surveying.add(documents)
    return surveying.survey()


class Part(NamedTuple):
    """A part of a document, in training or validation text."""

    text: str
    raw: bytes  # the same in UTF-8
    ends: bool  # is it the last part of its document?
    held_out: bool


def split(documents: Iterable[tuple[str, bool]], survey: Survey) -> Iterator[Part]:
    """Yield training and validation text, in the order of the documents.

    survey: of the same documents

    The module's docstring states the rule. Raises UserError at the end if the documents have
    changed since the survey.
    """
    whole = hashlib.sha256()
    yield from (_drawn if survey.by_document else _tail)(documents, survey, whole)
    if whole.hexdigest() != survey.sha256:
        raise _changed()


def _changed() -> UserError:
    return UserError("the text changed while it was being read: start again")


def _drawn(documents: Iterable[tuple[str, bool]], survey: Survey, whole: Any) -> Iterator[Part]:
    drawn = survey.validation_hashes()
    texts = []
    size = 0
    for text, ends in documents:
        texts.append(text)
        size += len(text)
        if size > survey.longest:  # in characters, which are not more than the bytes
            raise _changed()
        if ends:
            raw = "".join(texts).encode()
            digest = hashlib.sha256(raw).digest()
            whole.update(digest)
            yield Part("".join(texts), raw, True, digest[:12] in drawn)
            texts = []
            size = 0


def _tail(documents: Iterable[tuple[str, bool]], survey: Survey, whole: Any) -> Iterator[Part]:
    document = hashlib.sha256()
    begun = False
    to_come = survey.n_bytes - survey.held_out  # bytes of training text that are still to come
    for text, ends in documents:
        raw = text.encode()
        document.update(raw)
        if 0 <= to_come < len(raw):
            start = to_come
            while raw[start] & 0xC0 == 0x80:  # inside a character: move back to its first byte
                start -= 1
            if start or begun:
                yield Part(raw[:start].decode(), raw[:start], True, False)
            yield Part(raw[start:].decode(), raw[start:], ends, True)
            to_come = -1
        else:
            yield Part(text, raw, ends, to_come < 0)
            to_come -= len(raw) if to_come > 0 else 0
        begun = not ends
        if ends:
            whole.update(document.digest())
            document = hashlib.sha256()
