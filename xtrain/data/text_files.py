"""The text of one file, part by part: .txt, .jsonl, .parquet.

No more than a few parts of a text are in memory. A long line of a .jsonl is read twice: first its structure, in which a
number takes the place of each long string, so that `json` can check it and find the text; the number says where in the
file the string begins, and the text is then decoded from there, part by part. Only the numbers, short strings and
brackets next to a text must fit in memory. The values of a .parquet must: pyarrow decodes each whole, which takes
about five times its size.
"""

import codecs
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ..errors import UserError

PART = 1 << 18  # bytes read at once, characters of a document given at once
LINE = 1 << 20  # bytes; a longer line of a .jsonl is read part by part
SHORT = 64  # bytes; longer strings are not part of the structure of such a line, so none is the name "text"
PARQUET_ROWS, PARQUET_BYTES = 64, 4 << 20  # decoded at once, at most and on average


class NotText(UserError):
    """The content of a file is not UTF-8 text."""


def with_end(parts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Mark the last of the parts of one document."""
    before = None
    for part in parts:
        if before is not None:
            yield before, False
        before = part
    if before is not None:
        yield before, True


def raise_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    where = error.filename if path is None else path  # an error while reading names no file
    raise UserError(
        f"{where} cannot be read ({error.strerror}): check its permissions and the disk"
    ) from None


def read_text(path: Path) -> Iterator[str]:
    """The text of a file in blocks of PART bytes. Raises NotText, or UserError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            yield from _decoded(iter(lambda: file.read(PART), b""), path)
    except OSError as error:
        raise_unreadable(error, path)


def _decoded(blocks: Iterable[bytes], where: Path | str, is_string: bool = False) -> Iterator[str]:
    """is_string: known to be text, so a NUL is a character, too."""
    decoder, n = codecs.getincrementaldecoder("utf-8" if is_string else "utf-8-sig")(), 0
    for block in itertools.chain(blocks, [b""]):
        if 0 in block and not is_string:
            _raise_binary(where, n + block.index(0))
        n += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            _raise_not_utf8(where, n - len(error.object) + error.start)
        if text:
            yield text


def _raise_binary(where: Path | str, at: int) -> NoReturn:
    raise NotText(f"{where} is binary (a NUL at byte {at}): give UTF-8 text") from None


def _raise_not_utf8(where: Path | str, at: int) -> NoReturn:
    raise NotText(f"{where} is not UTF-8 (byte {at}): convert it to UTF-8") from None


def _decode(raw: bytes, where: str) -> str:
    if b"\0" in raw:
        _raise_binary(where, raw.index(0))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _raise_not_utf8(where, error.start)


def read_jsonl(path: Path) -> Iterator[tuple[str, bool]]:
    """The field text of every line, part by part; is it the last part? Raises UserError, which names the line."""
    try:
        with open(path, "rb") as file:
            for number in itertools.count(1):
                raw, where, long_line = file.readline(LINE), f"{path} line {number}", None
                if not raw:
                    return
                if len(raw) == LINE and not raw.endswith(b"\n"):
                    file.seek(-LINE, os.SEEK_CUR)
                    long_line = _LongLine(file, where)
                    raw = long_line.structure()
                line = _decode(raw, where).strip()
                if line:
                    text = _text_field(line, where)
                    parts: Iterable[str] = (text[i : i + PART] for i in range(0, len(text), PART))
                    if long_line is not None and len(text) > SHORT:
                        parts = long_line.string(int(text))
                    yield from with_end(_valid(part, where) for part in parts)
    except OSError as error:
        raise_unreadable(error, path)


def _text_field(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        _raise_not_json(where)
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{where} has no text: every line needs {{"text": "..."}}')
    return text


def _raise_not_json(where: str) -> NoReturn:
    raise UserError(f"{where} is not JSON: a .jsonl has one JSON object per line") from None


def _valid(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where} has half a surrogate pair, which is not valid text: fix or remove the line"
        ) from None
    return text


# Parts of a line of JSON. A string is only cut between its characters, and not inside a surrogate pair.
OUTSIDE = re.compile(rb'[^"]*+')
INSIDE = re.compile(
    rb"""(?: [^"\\\x00-\x1f]++
           | \\["\\/bfnrt]
           | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
           | \\u[dD][89abAB][0-9a-fA-F]{2}  # the first half of a pair, its second half, or something else
             (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?= [^\\] | \\[^u] | \\u[^dD] | \\u[dD][^c-fC-F] ))
         )*+""",
    re.VERBOSE,
)
PAIR = 12  # bytes of a surrogate pair: the longest escape sequence


class _LongLine:
    """A line of a .jsonl that begins where the file is now. Raises UserError if it is not JSON in UTF-8."""

    def __init__(self, file: BinaryIO, where: str):
        self.file, self.where, self.begin = file, where, file.tell()
        self.buffer, self.at, self.ended = b"", 0, False  # at: where in the buffer

    def structure(self) -> bytes:
        """The line with the position in the file, SHORT + 1 digits, in place of each longer string.

        The file is then at the next line.
        """
        self._seek(self.begin)
        found = bytearray()
        while True:
            for piece in self._match(OUTSIDE):
                found += piece
            if self.at == len(self.buffer):
                return bytes(found)
            position, size, kept = self.file.tell() - len(self.buffer) + self.at, 0, b""
            for piece in self._string():
                size += len(piece)
                kept = kept + piece if size <= SHORT else b"%0*d" % (SHORT + 1, position)
            found += b'"' + kept + b'"'

    def string(self, position: int) -> Iterator[str]:
        """The string at this position of the file, part by part. The file is then at the next line."""
        end = self.file.tell()
        self._seek(position)
        decoder = codecs.getincrementaldecoder("utf-8")()
        for piece in self._string():
            text = decoder.decode(piece)
            yield json.loads(f'"{text}"') if "\\" in text else text
        self.file.seek(end)

    def _string(self) -> Iterator[bytes]:
        """The string that begins here, as it is in the file."""
        self.at += 1  # a quotation mark
        yield from self._match(INSIDE)
        if self.buffer[self.at : self.at + 1] != b'"':
            _raise_not_json(self.where)
        self.at += 1

    def _match(self, pattern: re.Pattern[bytes]) -> Iterator[bytes]:
        """What matches from here on, in pieces."""
        while True:
            if found := pattern.match(self.buffer, self.at):  # always, perhaps nothing
                self.at = found.end()
                if found[0]:
                    yield found[0]
            # an escape sequence may be longer than what has been read of it
            if len(self.buffer) - self.at >= PAIR or not self._read():
                return

    def _seek(self, position: int) -> None:
        self.file.seek(position)
        self.buffer, self.at, self.ended = b"", 0, False
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self._read()

    def _read(self) -> bool:
        """Read the next part of the line. -> was there one?"""
        part = b"" if self.ended else self.file.readline(PART)
        self.ended = not part or part.endswith(b"\n")
        read = self.file.tell() - self.begin
        if 0 in part:
            _raise_binary(self.where, read - len(part) + part.index(0))
        try:
            self.decoder.decode(part, final=self.ended)
        except UnicodeDecodeError as error:
            _raise_not_utf8(self.where, read - len(error.object) + error.start)
        self.buffer, self.at = self.buffer[self.at :] + part, 0
        return bool(part)


def read_parquet(path: Path) -> Iterator[tuple[str, bool]]:
    """The column text, strings or bytes in UTF-8, part by part; is it the last part? Rows without a value have no text."""
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
            for values in _batches(file):
                is_string = "string" in str(values.type)
                for value in values:
                    row += 1
                    if value.is_valid:
                        raw = memoryview(value.as_buffer())
                        blocks = (bytes(raw[i : i + PART]) for i in range(0, len(raw), PART))
                        yield from with_end(_decoded(blocks, f"{path} row {row}", is_string))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _batches(file: Any) -> Iterator[Any]:
    """The column text, a few rows at a time: PARQUET_BYTES on average."""
    for i in range(file.num_row_groups):
        group = file.metadata.row_group(i)
        columns = map(group.column, range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == "text")
        rows = max(1, min(PARQUET_ROWS, PARQUET_BYTES * group.num_rows // max(1, size)))
        for batch in file.iter_batches(rows, row_groups=[i], columns=["text"], use_threads=False):
            values = batch.column(0)
            yield getattr(values, "dictionary_decode", lambda values=values: values)()


def _is_text_type(pyarrow: Any, kind: Any) -> bool:
    """Strings or bytes in any of Arrow's layouts, or a column of missing values."""
    types = pyarrow.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        kind = kind.value_type
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")  # fmt: skip
    checks = (getattr(types, f"is_{name}", None) for name in names)  # older versions have no views
    return any(check is not None and check(kind) for check in checks)
