"""Is a file the one that was read before? Its size, times and inode say so without reading it.

A stamp is stored only if the file was left alone for GRANULARITY seconds before it was read: a
later change then has another time, also on file systems that store whole seconds. The time of the
last change of the inode (ctime) cannot be set by a program, so a change that restores the time of
the last modification is seen. What a disk changes by itself is not: --verify-data reads everything.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ..files import write_whole

GRANULARITY = 2.0  # seconds; FAT has the coarsest times
FOLDER = "stamps"  # in the cache


def stamp(path: str | Path) -> list[int]:
    """Return [bytes, modification time, change time (both in ns), inode]. Raises OSError."""
    about = os.stat(path)
    return [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]


def is_settled(stamps: list[list[int]], read_at: float) -> bool:
    """Return True if any later change will show in these stamps.

    read_at: when the files began to be read, from time.time()
    """
    newest = max((max(modified, changed) for _, modified, changed, _ in stamps), default=0)
    return newest < (read_at - GRANULARITY) * 1e9


def load(cache: Path, name: str) -> dict[str, Any]:
    """Return what `save` stored under a name, {} if there is nothing: then read the files."""
    try:
        content = json.loads((cache / FOLDER / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


def save(cache: Path, name: str, content: dict[str, Any]) -> None:
    """Store facts about files with their stamps.

    If the cache cannot be written, the files are only read again.
    """
    with contextlib.suppress(OSError):
        (cache / FOLDER).mkdir(parents=True, exist_ok=True)
        write_whole(cache / FOLDER / f"{name}.json", json.dumps(content).encode())
