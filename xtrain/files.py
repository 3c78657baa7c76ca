"""Files that survive a kill, a full disk and a power cut.

A file is either complete or absent, and it is on the disk before anything depends on it.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import UserError

# where folders cannot be locked: a work folder unchanged for this long counts as left by a dead process
STRAY_SECONDS = 3600
FULL = {errno.ENOSPC, errno.EDQUOT}  # a full disk: freeing space fixes it, so a run continues


class DiskFull(UserError):
    """The disk is full."""


def cannot_write(path: Path, error: OSError, instead: str = "choose another --out") -> UserError:
    """The UserError for an OSError while writing path; DiskFull if the disk is full.

    instead: what the user can do, other than to free space.
    """
    if error.errno in FULL:
        return DiskFull(f"no space left to write {path}: make room or {instead}")
    return UserError(f"{path} cannot be written ({error.strerror or error}): {instead}")


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk. Raises OSError."""
    if os.name == "nt" and path.is_dir():  # Windows cannot sync a folder
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """sync() every file in a folder, then the folder. Raises OSError."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new one. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """BLAKE2b of a file's content, 128 bits, hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class Busy(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder against other processes. -> is it locked? Raises Busy if another process holds the lock.

    The lock (flock) is on the folder itself and leaves no file; the kernel releases it when the
    process ends. Where flock is not supported (Windows, some network disks) the folder is not locked.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    descriptor, is_locked = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy from None
        except OSError:
            is_locked = False
        yield is_locked
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end unless the caller has renamed it.

    Work folders of killed processes are removed first.
    """
    for stray in parent.glob(".tmp-*"):
        _remove_if_dead(stray)
    with contextlib.ExitStack() as stack:
        folder = None
        while folder is None:
            folder = _own_folder(parent, stack)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _own_folder(parent: Path, stack: contextlib.ExitStack) -> Path | None:
    """Make and lock a folder; the stack releases the lock. None if another process has removed it."""
    folder = Path(tempfile.mkdtemp(prefix=".tmp-", dir=parent))
    with contextlib.suppress(Busy, FileNotFoundError):
        stack.enter_context(locked(folder))
        if folder.exists():
            return folder
    return None  # another process removed it before it was locked, as left by a dead process


def _remove_if_dead(stray: Path) -> None:
    # OSError: another process has just removed it
    with contextlib.suppress(Busy, OSError), locked(stray) as is_locked:
        if is_locked or time.time() - stray.stat().st_mtime > STRAY_SECONDS:
            shutil.rmtree(stray, ignore_errors=True)


class Journal:
    """An append-only file. Text that does not fit on a full disk is kept and written with the next."""

    def __init__(self, path: Path):
        self.path, self.pending = path, b""
        self.size = path.stat().st_size if path.exists() else 0  # bytes written to the file

    def write(self, text: str) -> bool:
        """Append text. -> is all of it in the file? Raises UserError for any error but a full disk."""
        self.pending += text.encode()
        return self.flush()

    def flush(self) -> bool:
        """Write the pending text. -> is all of it in the file? Raises UserError as write() does."""
        if not self.pending:
            return True
        try:
            self._append()
        except OSError as error:
            if error.errno not in FULL:
                raise cannot_write(self.path, error) from error
            return False
        self.size, self.pending = self.size + len(self.pending), b""
        return True

    def _append(self) -> None:
        with open(self.path, "ab", buffering=0) as file:
            # another program may have truncated or extended it
            self.size = os.fstat(file.fileno()).st_size
            rest = memoryview(self.pending)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(self.size)  # half a line must not look like a complete one
                raise
