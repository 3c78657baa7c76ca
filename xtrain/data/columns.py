"""The text in a column of a file, or its rows: .parquet, and .arrow, in which the library `datasets`
saves.

A few rows are decoded at a time, but each value whole: in a .parquet it takes about five times its
size in memory. A .arrow is mapped from the disk.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..json_files import listed
from .compressed import BadFile
from .text_files import PART, decoded, with_end

# decoded at once, at most and on average
PARQUET_ROWS = 64
PARQUET_BYTES = 4 << 20
FILE_MAGIC = b"ARROW1"  # of a .arrow that is a file, not a stream


def read_parquet(path: Path, key: str = "text") -> Iterator[tuple[str, bool]]:
    """Yield the column `key`, strings or bytes in UTF-8: (part, is it the last one).

    Rows without a value have no text. Raises BadFile; UserError without pyarrow.
    """
    with _pyarrow(path) as pyarrow:
        parquet = importlib.import_module("pyarrow.parquet")
        # buffer_size: otherwise a row group's column is read whole
        with parquet.ParquetFile(path, buffer_size=PART) as file:
            _check_column(pyarrow, path, file.schema_arrow, key)
            yield from _texts(_batches(file, key), path)


def read_arrow(path: Path, key: str = "text") -> Iterator[tuple[str, bool]]:
    """Yield the column as read_parquet does, from an .arrow stream (of `datasets`) or file."""
    with _pyarrow(path) as pyarrow, _arrow(pyarrow, path) as (schema, batches):
        _check_column(pyarrow, path, schema, key)
        column = schema.get_field_index(key)
        yield from _texts((batch.column(column) for batch in batches), path)


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .parquet, with Python's values. Raises BadFile; UserError without
    pyarrow."""
    with _pyarrow(path):
        parquet = importlib.import_module("pyarrow.parquet")
        with parquet.ParquetFile(path, buffer_size=PART) as file:
            for batch in file.iter_batches(PARQUET_ROWS, use_threads=False):
                yield from batch.to_pylist()


def arrow_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an .arrow as parquet_rows does."""
    with _pyarrow(path) as pyarrow, _arrow(pyarrow, path) as (_, batches):
        for batch in batches:
            yield from batch.to_pylist()


@contextmanager
def _arrow(pyarrow: Any, path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Open an .arrow stream or file: its schema and batches."""
    with open(path, "rb") as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
    with pyarrow.memory_map(str(path)) as mapped:
        if is_file:
            reader = pyarrow.ipc.open_file(mapped)
            yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
        else:
            reader = pyarrow.ipc.open_stream(mapped)
            yield reader.schema, iter(reader)


@contextmanager
def _pyarrow(path: Path) -> Iterator[Any]:
    """Import the package; its errors become BadFile."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            f"{path} is a {path.suffix} file, which needs pyarrow: pip install pyarrow"
        ) from None
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise BadFile(
            f"{path} cannot be read as {path.suffix[1:]}: {str(error).splitlines()[0]}"
        ) from None


def _check_column(pyarrow: Any, path: Path, schema: Any, key: str) -> None:
    columns = [field.type for field in schema if field.name == key]
    if len(columns) != 1:
        count = "no column"
        if columns:
            count = f"{len(columns)} columns"
        raise BadFile(
            f"{path} has {count} named {key}: choose with --text-key from {listed(schema.names)}"
        )
    if not _is_text_type(pyarrow, columns[0]):
        raise BadFile(
            f"{path}: the column {key} has the type {columns[0]}, which is not text: convert it to "
            "strings, or choose another with --text-key"
        )


def _texts(columns: Iterator[Any], path: Path) -> Iterator[tuple[str, bool]]:
    row = 0
    for values in columns:
        values = getattr(values, "dictionary_decode", lambda values=values: values)()
        is_string = "string" in str(values.type)
        for value in values:
            row += 1
            if value.is_valid:
                raw = memoryview(value.as_buffer())
                blocks = (bytes(raw[i : i + PART]) for i in range(0, len(raw), PART))
                yield from with_end(decoded(blocks, f"{path} row {row}", is_string))


def _batches(file: Any, key: str) -> Iterator[Any]:
    """Yield the column a few rows at a time: PARQUET_BYTES on average."""
    for i in range(file.num_row_groups):
        group = file.metadata.row_group(i)
        columns = map(group.column, range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == key)
        rows = max(1, min(PARQUET_ROWS, PARQUET_BYTES * group.num_rows // max(1, size)))
        for batch in file.iter_batches(rows, row_groups=[i], columns=[key], use_threads=False):
            yield batch.column(0)


def _is_text_type(pyarrow: Any, kind: Any) -> bool:
    """Return True for strings or bytes in any of Arrow's layouts, or missing values only."""
    types = pyarrow.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        kind = kind.value_type
    names = (
        "string",
        "large_string",
        "string_view",
        "binary",
        "large_binary",
        "binary_view",
        "null",
    )
    checks = (getattr(types, f"is_{name}", None) for name in names)  # older versions have no views
    return any(check is not None and check(kind) for check in checks)
