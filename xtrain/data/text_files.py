"""The text of one file, part by part: text and .jsonl, also packed as .gz or .zst.

No more than a few parts of a text are in memory. A long line of a .jsonl is read twice: first its
structure, in which a number takes the place of each long string, so that `json` can check it and
find the text; the number says where in the file the string begins, and the text is then decoded
from there, part by part. (A packed file cannot go back: there such a line is first copied to a
temporary file.) Only the numbers, short strings and brackets next to a text must fit in memory.
"""

import codecs
import errno
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ..errors import UserError
from ..json_files import listed, load_json
from .compressed import BadFile, NotText, is_packed, open_file

PART = 1 << 18  # bytes read at once, characters of a document given at once
LINE = 1 << 20  # bytes; a longer line of a .jsonl is read part by part
FIRST_LINES = 5  # that say whether a file holds JSON lines
LASTING = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ELOOP)  # errors of a file, not of a disk
# bytes; longer strings are not part of the structure of such a line: the name of the text's field
# is shorter
SHORT = 64


def with_end(parts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Mark the last of the parts of one document."""
    before = None
    for part in parts:
        if before is not None:
            yield before, False
        before = part
    if before is not None:
        yield before, True


def unreadable(error: OSError, path: Path | None = None) -> str:
    # an error while reading names no file
    if path is None:
        where = error.filename
    else:
        where = path
    return f"{where} cannot be read ({error.strerror or error}): check its permissions and the disk"


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open the file to read.

    Raises BadFile if it may not be read; UserError if reading failed and may succeed another time.
    """
    try:
        with open_file(path) as file:
            yield file
    except OSError as error:
        if error.errno in LASTING:
            raise BadFile(unreadable(error, path)) from None
        raise UserError(unreadable(error, path)) from None


def read_text(path: Path) -> Iterator[str]:
    """Yield the text of a file in blocks of PART bytes.

    Raises NotText, or another BadFile if it cannot be read.
    """
    with reading(path) as file:
        yield from decoded(iter(lambda: file.read(PART), b""), path)


def decoded(blocks: Iterable[bytes], where: Path | str, is_string: bool = False) -> Iterator[str]:
    """Decode the text.

    is_string: True if it is known to be text, so a NUL is a character
    """
    decoder = codecs.getincrementaldecoder("utf-8" if is_string else "utf-8-sig")()
    n = 0
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


def _raise_binary(where: Path | str, position: int) -> NoReturn:
    raise NotText(
        f"{where} is binary or UTF-16 (a NUL at byte {position}): give UTF-8 text"
    ) from None


def _raise_not_utf8(where: Path | str, position: int) -> NoReturn:
    raise NotText(f"{where} is not UTF-8 (byte {position}): convert it to UTF-8") from None


def _decode(raw: bytes, where: str) -> str:
    if b"\0" in raw:
        _raise_binary(where, raw.index(0))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _raise_not_utf8(where, error.start)


def read_jsonl(path: Path, key: str = "text") -> Iterator[tuple[str, bool]]:
    """Yield the field `key` of every line: (part, is it the last one).

    Raises BadFile, which names the line.
    """
    short = max(SHORT, sum(12 if ord(c) > 0xFFFF else 6 for c in key))  # all may be escaped
    with reading(path) as file:
        for number in itertools.count(1):
            raw = file.readline(LINE)
            where = f"{path} line {number}"
            long_line = None
            if not raw:
                return
            if len(raw) == LINE and not raw.endswith(b"\n"):
                long_line = _LongLine(_at_line(file, raw, is_packed(path)), where, short)
                raw = long_line.structure()
            line = _decode(raw, where).strip()
            text = _field(line, where, key) if line else None
            if text is not None:
                parts: Iterable[str] = (text[i : i + PART] for i in range(0, len(text), PART))
                if long_line is not None and len(text) > short:
                    parts = long_line.string(int(text))
                yield from with_end(_valid(part, where) for part in parts)
            if long_line is not None and long_line.file is not file:
                long_line.file.close()


def holds_json_lines(path: Path, key: str) -> bool:
    """Return True if the first lines of a file are JSON objects; a single one must have the field
    `key`. Raises BadFile."""
    with reading(path) as file:
        lines = [file.readline(LINE) for _ in range(FIRST_LINES)]
    objects: list[Any] = []
    for line in filter(None, map(bytes.strip, lines)):
        if len(line) >= LINE - 1:  # cut off
            return line.startswith(b'{"')
        try:
            objects.append(load_json(_decode(line, str(path))))
        except ValueError:  # it is not JSON, or not even text
            return False
    if not all(isinstance(found, dict) for found in objects):
        return False
    return len(objects) > 1 or (len(objects) == 1 and key in objects[0])


def _at_line(file: BinaryIO, raw: bytes, packed: bool) -> BinaryIO:
    """Return a file that can seek and stands at a line, of which `raw` has been read."""
    if not packed:
        file.seek(-len(raw), os.SEEK_CUR)
        return file
    copy: Any = tempfile.TemporaryFile()  # noqa: SIM115
    while raw:
        try:
            copy.write(raw)
        except OSError as error:
            raise UserError(
                f"a temporary file cannot be written in {tempfile.gettempdir()} "
                f"({error.strerror}): make room, or set TMPDIR to another folder"
            ) from None
        if raw.endswith(b"\n"):
            raw = b""
        else:
            raw = file.readline(PART)
    copy.seek(0)
    return copy


def _field(line: str, where: str, key: str) -> str | None:
    """Return the text of a line; None if its field is null, as a row without a value in a table."""
    try:
        record = load_json(line)
    except json.JSONDecodeError:
        _raise_not_json(where)
    except ValueError as error:
        raise BadFile(f"{where}: {error}: fix or remove the line") from None
    if not isinstance(record, dict):
        raise BadFile(f'{where} is not a JSON object: every line needs {{"{key}": "..."}}')
    text = record.get(key)
    if key in record and text is None:
        return None
    if not isinstance(text, str):
        name = json.dumps(key, ensure_ascii=False)
        if key in record:
            what = f"has a {name} that is not a string"
        else:
            what = f"has no {name}"
        others = [field for field in record if field != key]
        if others:
            choose = f"choose with --text-key from {listed(others)}"
        else:
            choose = "fix the line"
        raise BadFile(f"{where} {what}: {choose}")
    return text


def _raise_not_json(where: str) -> NoReturn:
    raise BadFile(f"{where} is not JSON: a .jsonl has one JSON object per line") from None


def _valid(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadFile(
            f"{where} has half a surrogate pair, which is not valid text: fix or remove the line"
        ) from None
    return text


# Parts of a line of JSON. A string is only cut between its characters, and not inside a surrogate
# pair.
OUTSIDE = re.compile(rb'[^"]*+')
# Not possessive, *+, which in Python 3.11.2 may end in the middle of an alternative that fails; the
# limit bounds its memory.
INSIDE = re.compile(
    rb"""(?: [^"\\\x00-\x1f]+
           | \\["\\/bfnrt]
           | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
           | \\u[dD][89abAB][0-9a-fA-F]{2}  # the first half of a pair, its second half, or something else
             (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?= [^\\] | \\[^u] | \\u[^dD] | \\u[dD][^c-fC-F] ))
         ){0,4096}""",
    re.VERBOSE,
)
PAIR = 12  # bytes of a surrogate pair: the longest escape sequence


class _LongLine:
    """The line of a .jsonl at which the file stands. Raises BadFile if it is not JSON in UTF-8."""

    def __init__(self, file: BinaryIO, where: str, short: int):
        """Read one line.

        short: bytes of the longest strings that stay in the structure
        """
        self.file = file
        self.where = where
        self.short = short
        self.begin = file.tell()
        self.buffer = b""
        self.at = 0  # position in the buffer
        self.ended = False

    def structure(self) -> bytes:
        """Return the line with a position in place of each longer string.

        The position in the file has short + 1 digits. The file is then at the next line.
        """
        self._seek(self.begin)
        line = bytearray()
        while True:
            for piece in self._match(OUTSIDE):
                line += piece
            if self.at == len(self.buffer):
                return bytes(line)
            position = self.file.tell() - len(self.buffer) + self.at
            size = 0
            kept = b""
            for piece in self._string():
                size += len(piece)
                if size <= self.short:
                    kept = kept + piece
                else:
                    kept = b"%0*d" % (self.short + 1, position)
            line += b'"' + kept + b'"'

    def string(self, position: int) -> Iterator[str]:
        """Yield the string at this position of the file, part by part.

        The file is then at the next line.
        """
        end = self.file.tell()
        self._seek(position)
        decoder = codecs.getincrementaldecoder("utf-8")()
        for piece in self._string():
            text = decoder.decode(piece)
            yield json.loads(f'"{text}"') if "\\" in text else text
        self.file.seek(end)

    def _string(self) -> Iterator[bytes]:
        """Yield the string that begins here, as it is in the file."""
        self.at += 1  # a quotation mark
        yield from self._match(INSIDE)
        if self.buffer[self.at : self.at + 1] != b'"':
            _raise_not_json(self.where)
        self.at += 1

    def _match(self, pattern: re.Pattern[bytes]) -> Iterator[bytes]:
        """Yield what matches from here on, in pieces."""
        while True:
            while (match := pattern.match(self.buffer, self.at)) and match[0]:
                self.at = match.end()
                yield match[0]
            # an escape sequence may be longer than what has been read of it
            if len(self.buffer) - self.at >= PAIR or not self._read():
                return

    def _seek(self, position: int) -> None:
        self.file.seek(position)
        self.buffer = b""
        self.at = 0
        self.ended = False
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self._read()

    def _read(self) -> bool:
        """Read the next part of the line, and return False if there was none."""
        part = b""
        if not self.ended:
            part = self.file.readline(PART)
        self.ended = not part or part.endswith(b"\n")
        read = self.file.tell() - self.begin
        if 0 in part:
            _raise_binary(self.where, read - len(part) + part.index(0))
        try:
            self.decoder.decode(part, final=self.ended)
        except UnicodeDecodeError as error:
            _raise_not_utf8(self.where, read - len(error.object) + error.start)
        self.buffer = self.buffer[self.at :] + part
        self.at = 0
        return bool(part)
