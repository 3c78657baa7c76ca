"""Read small JSON files that any program may have written: every error is a UserError that names
the file."""

import collections
import contextlib
import decimal
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError
from .files import restore

MAX_JSON_BYTES = 16 << 20  # the safetensors header of a model with 100 B parameters has 0.2 MB
MAX_DIGITS = 100_000  # of a number: their conversion takes quadratic time
LONGEST = 160  # characters of one item in a message


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file. Raises UserError."""
    with reading(path), open(path, "rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise UserError(
            f"{path} is larger than {MAX_JSON_BYTES >> 20} MB: it is damaged or the wrong file"
        )
    return parse_json(text, path)


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file, {} if there is no file. Raises UserError."""
    if path.is_file():
        return read_json(path)
    return {}


def check_pointer(text: bytes, path: Path) -> None:
    """Raises UserError if path is what git leaves in place of a large file. text: with which it
    begins."""
    if text.startswith(b"version https://git-lfs"):
        raise UserError(
            f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its "
            "folder, or download it again"
        )


def load_json(text: str, **options: Any) -> Any:
    """Return json.loads(text), also of numbers that have more digits than int() accepts.

    Raises ValueError, which says what is wrong, if it is not JSON or cannot be read.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=_whole_number, **options)


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(decimal.Decimal(digits))


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in text, read from path. Raises UserError, also for a key that occurs
    twice."""
    check_pointer(text, path)
    try:
        value = load_json(text.decode(), object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise UserError(f"{path} is damaged: its JSON is not valid ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it must hold a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raises ValueError for a key that occurs twice: readers would
    disagree about its value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        duplicate = next(name for name, n in counts.items() if n > 1)
        raise ValueError(f"{listed([duplicate])} occurs twice")
    return content


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, an OSError becomes a UserError that names path."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def is_folder(path: Path) -> bool:
    """Return path.is_dir(), after restoring a folder whose export was killed. Raises UserError if
    permissions or the length of the name prevent the check."""
    with reading(path):
        if not os.path.lexists(path):
            restore(path)
        return path.is_dir()


def listed(items: list[str], most: int = 10) -> str:
    """Return a list for a message: `most` items, each cut to LONGEST characters.

    Names from a file may be long or contain line breaks.
    """
    short = [repr(item)[1:-1] for item in items[:most]]
    shown = ", ".join(s if len(s) <= LONGEST else s[: LONGEST - 3] + "..." for s in short)
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")
