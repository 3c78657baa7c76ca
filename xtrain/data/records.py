"""The lines of a .jsonl file and the rows of a table as records with checked fields. What is wrong is
a UserError that names file and line."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..json_files import load_json, reading
from .columns import arrow_rows, parquet_rows
from .compressed import BadFile, open_file, suffix
from .sources import Sources

TABLES = {".parquet": parquet_rows, ".arrow": arrow_rows}


@dataclass(frozen=True)
class Record:
    """One line or row: its fields, read with checks. Each method raises UserError for a field that
    is missing or wrong."""

    path: Path
    line: int
    fields: dict[str, Any]
    unit: str = "line"

    @property
    def where(self) -> str:
        return f"{self.path} {self.unit} {self.line}"

    @property
    def non_null(self) -> set[str]:
        """The names of the fields that are not null."""
        return {name for name, value in self.fields.items() if value is not None}

    def without_nulls(self, value: Any) -> Any:
        """Return a value of this record. All rows of a table have the same fields inside a column:
        those that are null there are left out."""
        if self.unit != "row":
            return value
        if isinstance(value, list):
            return [self.without_nulls(x) for x in value]
        if isinstance(value, dict):
            return {name: self.without_nulls(x) for name, x in value.items() if x is not None}
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a non-empty string; with a default it may be missing, null, or empty."""
        value = self.fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise UserError(f'{self.where} has no field "{name}": add it, or remove the line')
        return self.check_text(value, f'"{name}"', may_be_empty=default is not None)

    def check_text(self, value: Any, name: str, may_be_empty: bool = False) -> str:
        """Return `value` if it is valid text.

        name: as the message says it
        """
        if not isinstance(value, str):
            raise UserError(
                f"{self.where}: {name} must be a string, not {type(value).__name__}: fix or remove "
                "the line"
            )
        if not (may_be_empty or value.strip()):
            raise UserError(f"{self.where}: {name} is empty: fill it in, or remove the line")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{self.where}: {name} has half a surrogate pair, which is not valid text: fix or "
                "remove the line"
            ) from None
        return value

    def texts(self, name: str, values: Any = None, least: int = 2) -> tuple[str, ...]:
        """Return a list of at least two different strings."""
        if values is None:
            values = self.fields.get(name)
        if not isinstance(values, list):
            raise UserError(f'{self.where} needs a list of strings in "{name}": add it')
        checked = tuple(self.check_text(x, f'"{name}" {i}') for i, x in enumerate(values, 1))
        if len(checked) < least:
            raise UserError(
                f'{self.where} has {len(checked)} in the list "{name}": give at least {least} to '
                "choose from"
            )
        return checked

    def index(self, name: str, n: int) -> int:
        """Return a whole number from 0 to n - 1."""
        value = self.fields.get(name)
        if value is None:
            raise UserError(f'{self.where} has no field "{name}": add it, or remove the line')
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value)  # HellaSwag on the Hugging Face Hub
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(
                f'{self.where}: "{name}" must be the index of a choice, 0 to {n - 1}, not {value!r}'
            )
        if not 0 <= value < n:
            raise UserError(
                f'{self.where}: "{name}" is {value}, but there are {n} choices: give 0 to {n - 1}'
            )
        return value


def record_files(names: Sequence[str | Path]) -> list[Path]:
    """Return the files that names, globs and folders match, in this order, each once. In a folder
    these are the .jsonl, .parquet and .arrow files. Raises UserError."""
    if not names:
        return []
    sources = Sources(names)
    files = [x.path for x in sources.find() if x.is_named or suffix(x.path) in (".jsonl", *TABLES)]
    if not files:
        raise UserError(f"{sources.name} has no .jsonl, .parquet or .arrow files: give some")
    return files


def short_name(names: Sequence[str | Path]) -> str:
    """Return the names of files and folders without their paths, and the splits that are read.
    Raises UserError."""
    sources = Sources(names)
    sources.find()
    return ", ".join(Path(name).name for name in names) + sources.splits


def records(path: Path) -> Iterator[Record]:
    """Yield the lines of a .jsonl, or the rows of a .parquet or .arrow. Raises UserError."""
    read = TABLES.get(suffix(path))
    if read is None:
        yield from json_records(path)
        return
    try:
        for number, row in enumerate(read(path), 1):
            yield Record(path, number, row, "row")
    except BadFile as error:
        raise UserError(str(error)) from None


def records_of(files: Sequence[str | Path]) -> Iterator[Record]:
    """Yield the records of .jsonl files, which may be globs. Raises UserError, also for a file
    without any."""
    for path in record_files(files):
        empty = True
        for record in records(path):
            empty = False
            yield record
        if empty:
            raise UserError(f"{path} has no records: give a file that is not empty")


def json_records(path: Path) -> Iterator[Record]:
    """Yield the lines of a .jsonl, also packed (.gz, .zst); empty ones are skipped."""
    with reading(path), open_file(path) as file:
        for number in itertools.count(1):
            raw = file.readline()
            where = f"{path} line {number}"
            if not raw:
                return
            try:
                line = decoded(raw).strip()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where} is not UTF-8 (byte {error.start}): convert it to UTF-8"
                ) from None
            if line:
                yield Record(path, number, _parsed(line, where))


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        fields = load_json(line)
    except json.JSONDecodeError:
        fields = None
    except ValueError as error:
        raise UserError(f"{where}: {error}: fix or remove the line") from None
    if not isinstance(fields, dict):
        raise UserError(f"{where} is not a JSON object: a .jsonl has one per line")
    return fields


def decoded(line: bytes) -> str:
    """Decode a line of UTF-8, without a byte order mark. Raises UnicodeDecodeError."""
    return line.decode().removeprefix("\ufeff")
