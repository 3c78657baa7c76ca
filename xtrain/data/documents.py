"""The documents of a text, and which of them are held out for validation.

**Documents.** A file is a document; so is a line of a .jsonl and a row of a .parquet.
"<|endoftext|>" inside a text also ends a document. Documents are read part by part (text_files.py),
so the memory does not depend on their length.

**Split.** A tenth of the text, at most 2 MB, is held out. Documents are drawn in the order of their
SHA-256 until the held-out text is large enough: the choice looks random, is the same everywhere, and
puts all copies of a document on one side. If a document, or the copies of a drawn one together, are
longer than the text to hold out, the end of the text is held out instead.
"""

import hashlib
import heapq
import itertools
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from .stamps import is_settled, stamp
from .text_files import (
    NotText,
    raise_unreadable,
    read_jsonl,
    read_parquet,
    read_text,
    with_end,
)
from .tokenizer import END_OF_TEXT

VAL_FRACTION, VAL_BYTES = 10, 2_000_000  # held out: 1/10 of the text, at most 2 MB


class Documents:
    """The documents of a file or folder, part by part. Each `for` loop reads them again:

        for text, ends in Documents(data): ...      ends: is it the last part of its document?

    data None: the source of the Python standard library. Folders are read recursively in sorted
    order, without names that begin with a dot; links to folders are followed, and no folder is read
    twice. Files in a folder that are not text are counted in `skipped`. UserError is raised for a
    .txt, .jsonl or .parquet file that is not valid, for a file given by name that is not text, and
    for a file that cannot be read.
    """

    def __init__(self, data: str | Path | None = None):
        self.own_source = data is None
        self.root = Path(sysconfig.get_path("stdlib") if data is None else data)
        self.name = (
            f"Python {sys.version.split()[0]} standard library" if data is None else str(data)
        )
        self.files = self.skipped = self.n_bytes = 0  # n_bytes: of the files, when they were listed
        self.identity_read = ""  # identity() when the last `for` loop began
        self.settled = False  # would any later change show in identity()?

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        self.files = self.skipped = 0
        paths = self._paths()
        self.identity_read = self._identify(paths)
        for path in paths:
            found = False
            for part in _separate(self._read(path)):
                found = True
                yield part
            self.files += found

    def identity(self) -> str:
        """A hash of the names, sizes and times of all files; it costs no reading. Raises UserError."""
        return self._identify(self._paths())

    def _identify(self, paths: list[Path]) -> str:
        read_at = time.time()
        try:
            stamps = [stamp(path) for path in paths]
        except OSError as error:
            raise_unreadable(error)
        self.n_bytes = sum(size for size, *_ in stamps)
        self.settled = is_settled(stamps, read_at)
        names = [path.relative_to(self.root).as_posix() for path in paths]
        content = json.dumps([os.path.abspath(self.root), names, stamps])  # ASCII
        return hashlib.sha256(content.encode()).hexdigest()

    def _paths(self) -> list[Path]:
        if os.path.isfile(self.root):
            return [self.root]
        if not os.path.isdir(self.root):
            hint = (
                "give a text with --data"
                if self.own_source
                else "give a text file or a folder of them"
            )
            exists = "\0" not in str(self.root) and os.path.exists(self.root)
            what = "is neither a file nor a folder" if exists else "does not exist"
            raise UserError(f"{self.root} {what}: {hint}")
        found = [path for path in self._walk() if os.path.isfile(path)]
        if self.own_source:
            found = [path for path in found if path.suffix == ".py"]
        return sorted(found, key=lambda path: path.relative_to(self.root).as_posix())

    def _walk(self) -> Iterator[Path]:
        unwanted = ("site-packages", "dist-packages", "__pycache__") if self.own_source else ()
        wanted = lambda name: name not in unwanted and not name.startswith(".")
        roots, seen = [self.root], set()
        for root in roots:  # grows inside the loop: linked folders are walked after real ones
            for folder, folders, names in os.walk(root, onerror=raise_unreadable):
                real = os.path.realpath(folder)
                if real in seen:  # two links to one folder, or a cycle
                    folders.clear()
                    continue
                seen.add(real)
                folders[:] = sorted(filter(wanted, folders))  # the same on every machine
                if not self.own_source:
                    roots += filter(os.path.islink, [Path(folder, name) for name in folders])
                yield from (Path(folder, name) for name in names if not name.startswith("."))

    def _read(self, path: Path) -> Iterable[tuple[str, bool]]:
        if path.suffix == ".jsonl":
            return read_jsonl(path)
        if path.suffix == ".parquet":
            return read_parquet(path)
        if path == self.root or path.suffix == ".txt":
            return with_end(read_text(path))
        try:
            text = read_text(path)
            first = list(itertools.islice(text, 2))
            if len(first) < 2:
                return with_end(first)
            for _ in text:  # only the whole file tells whether it is text
                pass
        except NotText:
            self.skipped += 1
            return []
        return with_end(read_text(path))


def _separate(parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """End documents at END_OF_TEXT too, and leave out the empty ones. The last part of a document may be empty."""
    rest, begun = "", False
    for text, ends in parts:
        *whole, rest = (rest + text).split(END_OF_TEXT)
        for document in whole:
            if document or begun:
                yield document, True
            begun = False
        if ends:
            if rest or begun:
                yield rest, True
            rest, begun = "", False
            continue
        kept = next(n for n in range(len(END_OF_TEXT), -1, -1) if rest.endswith(END_OF_TEXT[:n]))
        given, rest = rest[: len(rest) - kept], rest[len(rest) - kept :]
        if given:
            yield given, False
            begun = True


# --- train and validation ---


@dataclass
class Survey:
    """The result of one pass over a text, from which the text is identified and split."""

    documents: int = 0
    n_bytes: int = 0
    sha256: str = ""  # of the SHA-256 of each document, in order
    longest: int = 0  # bytes of the longest document
    # The first documents in the order of their hash, VAL_BYTES or a little more: hash -> bytes, with all copies.
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
        """The hashes of the validation documents; empty unless by_document."""
        drawn: set[bytes] = set()
        size = 0
        for digest in sorted(self.first):
            if size < self.held_out:
                drawn.add(digest)
                size += self.first[digest]
        longest = max(self.longest, max((self.first[digest] for digest in drawn), default=0))
        return drawn if longest <= self.held_out else set()


def survey(documents: Iterable[tuple[str, bool]]) -> Survey:
    """Read all documents once. documents: parts, as from Documents."""
    found, whole, document, size = Survey(), hashlib.sha256(), hashlib.sha256(), 0
    heap: list[int] = []  # the negated hashes in found.first: the largest comes first
    first_bytes = 0  # the sum of the sizes in found.first
    for text, ends in documents:
        raw = text.encode()
        document.update(raw)
        size += len(raw)
        if not ends:
            continue
        digest = document.digest()
        whole.update(digest)
        found.documents += 1
        found.n_bytes += size
        found.longest = max(found.longest, size)
        key = digest[:12]
        if key not in found.first:
            heapq.heappush(heap, -int.from_bytes(key))
        found.first[key] = found.first.get(key, 0) + size
        first_bytes += size
        # what comes after VAL_BYTES is never drawn
        while first_bytes - found.first[last := (-heap[0]).to_bytes(12)] >= VAL_BYTES:
            first_bytes -= found.first.pop(last)
            heapq.heappop(heap)
        document, size = hashlib.sha256(), 0
    found.sha256 = whole.hexdigest()
    return found


class Part(NamedTuple):
    """A part of a document, in training or validation text."""

    text: str
    raw: bytes  # the same in UTF-8
    ends: bool  # is it the last part of its document?
    held_out: bool


def split(documents: Iterable[tuple[str, bool]], found: Survey) -> Iterator[Part]:
    """Training and validation text, in the order of the documents. The module's docstring states the rule.

    found: the survey of the same documents. Raises UserError at the end if they have changed since.
    """
    whole = hashlib.sha256()
    yield from (_drawn if found.by_document else _tail)(documents, found, whole)
    if whole.hexdigest() != found.sha256:
        raise _changed()


def _changed() -> UserError:
    return UserError("the text changed while it was being read: start again")


def _drawn(documents: Iterable[tuple[str, bool]], found: Survey, whole: Any) -> Iterator[Part]:
    drawn, texts, size = found.validation_hashes(), [], 0
    for text, ends in documents:
        texts.append(text)
        size += len(text)
        if size > found.longest:  # in characters, which are not more than the bytes
            raise _changed()
        if ends:
            raw = "".join(texts).encode()
            digest = hashlib.sha256(raw).digest()
            whole.update(digest)
            yield Part("".join(texts), raw, True, digest[:12] in drawn)
            texts, size = [], 0


def _tail(documents: Iterable[tuple[str, bool]], found: Survey, whole: Any) -> Iterator[Part]:
    document, begun = hashlib.sha256(), False
    to_come = found.n_bytes - found.held_out  # bytes of training text that are still to come
    for text, ends in documents:
        raw = text.encode()
        document.update(raw)
        if 0 <= to_come < len(raw):
            at = to_come
            while raw[at] & 0xC0 == 0x80:  # inside a character: move back to its first byte
                at -= 1
            if at or begun:
                yield Part(raw[:at].decode(), raw[:at], True, False)
            yield Part(raw[at:].decode(), raw[at:], ends, True)
            to_come = -1
        else:
            yield Part(text, raw, ends, to_come < 0)
            to_come -= len(raw) if to_come > 0 else 0
        begun = not ends
        if ends:
            whole.update(document.digest())
            document = hashlib.sha256()
