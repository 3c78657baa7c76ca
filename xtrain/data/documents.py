"""The documents of a text, and which of them are held out for validation.

**Documents.** A file is a document; so is a line of a .jsonl and a row of a .parquet.
"<|endoftext|>" inside a text also ends a document. Documents are read part by part, so the memory
does not depend on the length of a file. A line of a .jsonl and a row of a .parquet must fit in memory.

**Split.** A tenth of the text, at most 2 MB, is held out. Documents are drawn in the order of their
SHA-256 until the held-out text is large enough: the choice looks random, is the same everywhere, and
puts all copies of a document on one side. If a document, or the copies of a drawn one together, are
longer than the text to hold out, the end of the text is held out instead.
"""

import codecs
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
from typing import Any, NamedTuple, NoReturn

from ..errors import UserError
from .stamps import is_settled, stamp
from .tokenizer import END_OF_TEXT

VAL_FRACTION, VAL_BYTES = 10, 2_000_000  # held out: 1/10 of the text, at most 2 MB
PART = 1 << 18  # bytes read at once, characters of a document given at once
PARQUET_ROWS = 64  # decoded at once: a row may hold a megabyte


class _NotText(UserError):
    """The content of a file is not UTF-8 text."""


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
            _raise_unreadable(error)
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
            for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
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
            return _in_parts(_read_jsonl(path))
        if path.suffix == ".parquet":
            return _in_parts(_read_parquet(path))
        if path == self.root or path.suffix == ".txt":
            return _with_end(_read_text(path))
        try:
            text = _read_text(path)
            first = list(itertools.islice(text, 2))
            if len(first) < 2:
                return _with_end(first)
            for _ in text:  # only the whole file tells whether it is text
                pass
        except _NotText:
            self.skipped += 1
            return []
        return _with_end(_read_text(path))


def _with_end(parts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Mark the last of the parts of one document."""
    before = None
    for part in parts:
        if before is not None:
            yield before, False
        before = part
    if before is not None:
        yield before, True


def _in_parts(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    for text in texts:
        yield from _with_end(text[i : i + PART] for i in range(0, len(text), PART))


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


def _raise_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    where = error.filename if path is None else path  # an error while reading names no file
    raise UserError(
        f"{where} cannot be read ({error.strerror}): check its permissions and the disk"
    ) from None


def _read_text(path: Path) -> Iterator[str]:
    """The text of a file in blocks of PART bytes. Raises _NotText, or UserError if it cannot be read."""
    decoder, n = codecs.getincrementaldecoder("utf-8-sig")(), 0
    try:
        with open(path, "rb") as file:
            while True:
                block = file.read(PART)
                if 0 in block:
                    _raise_binary(path, n + block.index(0))
                n += len(block)
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    _raise_not_utf8(path, n - len(error.object) + error.start)
                if text:
                    yield text
                if not block:
                    return
    except OSError as error:
        _raise_unreadable(error, path)


def _raise_binary(where: Path | str, at: int) -> NoReturn:
    raise _NotText(f"{where} is binary (a NUL at byte {at}): give UTF-8 text") from None


def _raise_not_utf8(where: Path | str, at: int) -> NoReturn:
    raise _NotText(f"{where} is not UTF-8 (byte {at}): convert it to UTF-8") from None


def _decode(raw: bytes, where: str) -> str:
    if b"\0" in raw:
        _raise_binary(where, raw.index(0))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _raise_not_utf8(where, error.start)


def _read_jsonl(path: Path) -> Iterator[str]:
    try:
        with open(path, "rb") as lines:
            for number, raw in enumerate(lines, 1):
                line = _decode(raw, f"{path} line {number}").strip()
                if line:
                    yield _text_field(line, f"{path} line {number}")
    except OSError as error:
        _raise_unreadable(error, path)


def _text_field(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is not JSON: a .jsonl has one JSON object per line") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{where} has no text: every line needs {{"text": "..."}}')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where} has half a surrogate pair, which is not valid text: fix or remove the line"
        ) from None
    return text


def _read_parquet(path: Path) -> Iterator[str]:
    """The column text, as strings or as bytes in UTF-8. Rows without a value have no text."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path} is a .parquet file, which needs pyarrow: pip install pyarrow"
        ) from None
    try:
        # buffer_size: otherwise a row group's column is read whole
        with pyarrow.parquet.ParquetFile(path, buffer_size=PART) as file:
            columns = [field.type for field in file.schema_arrow if field.name == "text"]
            if len(columns) != 1:
                found = "no column" if not columns else f"{len(columns)} columns"
                raise UserError(
                    f"{path} has {found} named text: rename the one that holds the text"
                )
            if not _is_text_type(pyarrow, columns[0]):
                raise UserError(
                    f"{path}: the column text has the type {columns[0]}, which is not text: convert it to strings"
                )
            row = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if text is not None:
                        yield (
                            _decode(text, f"{path} row {row}") if isinstance(text, bytes) else text
                        )
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _is_text_type(pyarrow: Any, kind: Any) -> bool:
    """Strings or bytes in any of Arrow's layouts, or a column of missing values."""
    types = pyarrow.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        kind = kind.value_type
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")  # fmt: skip
    checks = (getattr(types, f"is_{name}", None) for name in names)  # older versions have no views
    return any(check is not None and check(kind) for check in checks)


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
