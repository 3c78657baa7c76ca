"""The documents of a text, and which of them are held out for validation.

**Documents.** A file is a document; so is a line of a .jsonl and a row of a .parquet.
"<|endoftext|>" inside a text also ends a document.

**Split.** A tenth of the text, at most 2 MB, is held out. If no document is longer than that,
documents are drawn in the order of their SHA-256 until the held-out text is large enough: the
choice looks random, is the same everywhere, and puts all copies of a document on one side.
Otherwise the end of the text is held out.
"""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ..errors import UserError
from .tokenizer import END_OF_TEXT

VAL_FRACTION, VAL_BYTES = 10, 2_000_000  # held out: 1/10 of the text, at most 2 MB


class Documents:
    """The documents of a file or folder. Each `for` loop reads them again.

    data None: the source of the Python standard library. Folders are read recursively in sorted
    order, without names that begin with a dot; links to folders are followed, and no folder is read
    twice. Files in a folder that are not text are counted in `skipped`. UserError is raised for a
    .txt, .jsonl or .parquet file that is not valid, for a file given by name that is not text, and
    for a file that cannot be read. A .txt must fit in memory, a .jsonl need not.
    """

    def __init__(self, data: str | Path | None = None):
        self.own_source = data is None
        self.root = Path(sysconfig.get_path("stdlib") if data is None else data)
        self.name = (
            f"Python {sys.version.split()[0]} standard library" if data is None else str(data)
        )
        self.files = self.skipped = 0

    def __iter__(self) -> Iterator[str]:
        self.files = self.skipped = 0
        for path in self._paths():
            found = False
            for text in self._read(path):
                found = True
                yield from filter(None, text.split(END_OF_TEXT))
            self.files += found

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

    def _read(self, path: Path) -> Iterable[str]:
        if path.suffix == ".jsonl":
            return _read_jsonl(path)
        if path.suffix == ".parquet":
            return _read_parquet(path)
        raw = _read_bytes(path)
        try:
            return [_decode(raw, path)]
        except UserError:
            if path == self.root or path.suffix == ".txt":
                raise
            self.skipped += 1
            return []


def _raise_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    where = error.filename if path is None else path  # an error while reading names no file
    raise UserError(f"{where} cannot be read ({error.strerror}): check its permissions") from None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _raise_unreadable(error, path)


def _decode(raw: bytes, where: Path | str) -> str:
    if b"\0" in raw:
        raise UserError(f"{where} is binary (a NUL at byte {raw.index(0)}): give UTF-8 text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 (byte {error.start}): convert it to UTF-8") from None


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
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path} is a .parquet file, which needs pyarrow: pip install pyarrow"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise UserError(
                    f"{path} has no column named text: rename the one that holds the text"
                )
            for batch in file.iter_batches(columns=["text"]):
                for text in batch.column(0).to_pylist():
                    if isinstance(text, str):
                        yield text
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None


# --- train and validation ---


@dataclass
class Survey:
    """The result of one pass over a text, from which the text is identified and split."""

    documents: int = 0
    n_bytes: int = 0
    sha256: str = ""  # of the SHA-256 of each document, in order
    # hash of a document -> its bytes; copies of a document are added up
    sizes: dict[bytes, int] = field(default_factory=dict)

    @property
    def held_out(self) -> int:
        """Bytes wanted for validation."""
        return max(1, min(self.n_bytes // VAL_FRACTION, VAL_BYTES))

    @property
    def by_document(self) -> bool:
        """True if whole documents are held out, False if the end of the text is."""
        return max(self.sizes.values(), default=0) <= self.held_out

    def validation_hashes(self) -> set[bytes]:
        """The hashes of the validation documents; empty unless by_document."""
        drawn: set[bytes] = set()
        size = 0
        for digest in sorted(self.sizes) if self.by_document else []:
            if size < self.held_out:
                drawn.add(digest)
                size += self.sizes[digest]
        return drawn


def survey(documents: Iterable[str]) -> Survey:
    """Read all documents once."""
    found, whole = Survey(), hashlib.sha256()
    for text in documents:
        raw = text.encode()
        digest = hashlib.sha256(raw).digest()
        whole.update(digest)
        found.documents += 1
        found.n_bytes += len(raw)
        found.sizes[digest[:12]] = found.sizes.get(digest[:12], 0) + len(raw)
    found.sha256 = whole.hexdigest()
    return found


def split(documents: Iterable[str], found: Survey) -> Iterator[tuple[str, bytes, bool]]:
    """Yield (text, the same in UTF-8, is it validation). The module's docstring states the rule.

    found: the survey of the same documents. Raises UserError at the end if they have changed since.
    """
    drawn = found.validation_hashes()
    cut = found.n_bytes if found.by_document else found.n_bytes - found.held_out
    position, whole = 0, hashlib.sha256()
    for text in documents:
        raw = text.encode()
        digest = hashlib.sha256(raw).digest()
        whole.update(digest)
        here = cut - position
        position += len(raw)
        if not 0 < here < len(raw):
            yield text, raw, here <= 0 or digest[:12] in drawn
            continue
        while raw[here] & 0xC0 == 0x80:  # inside a character: move back to its first byte
            here -= 1
        for half, is_val in ((raw[:here], False), (raw[here:], True)):
            if half:
                yield half.decode(), half, is_val
    if whole.hexdigest() != found.sha256:
        raise UserError("the text changed while it was being read: start again")


def chunks(text: str, limit: int) -> Iterator[str]:
    """Cut into chunks of at most `limit` characters, after a line or before a space where possible."""
    start = 0
    while len(text) - start > limit:
        end = start + limit
        at = text.rfind("\n", start, end) + 1 or text.rfind(" ", start + 1, end)
        end = at if at > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]
