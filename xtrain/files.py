"""Files that survive a kill, a full disk and a power cut: whole or not there, and on the disk before anybody relies on them."""

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

STRAY_SECONDS = 3600  # where folders cannot be locked: one untouched for so long is nobody's
FULL = {errno.ENOSPC, errno.EDQUOT}  # no room: freeing some mends it, so a run goes on


class DiskFull(UserError):
    """There is no room to write what had to be written."""


def cannot_write(path: Path, error: OSError, instead: str = "choose another --out") -> UserError:
    if error.errno in FULL:
        return DiskFull(f"no space left to write {path}: make room or {instead}")
    return UserError(f"{path} cannot be written ({error.strerror or error}): {instead}")


def sync(path: Path) -> None:
    """Wait until a file, or the list of names that a folder is, is on the disk. Raises OSError."""
    if os.name == "nt" and path.is_dir():  # Windows has no such call for folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """The same for every file in a folder, and then the folder."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file; whoever looks sees the old content or the new one. Raises OSError."""
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
    """Nobody else can lock the folder meanwhile; a process that dies lets go. -> is it locked? Raises Busy.

    The lock is the kernel's (flock) on the folder itself: it leaves no file. Where there is none (Windows, some network
    disks) the folder is not locked.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    descriptor, sure = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy from None
        except OSError:
            sure = False
        yield sure
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, to be renamed or else removed at the end; before, those of killed processes are removed."""
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


def _own_folder(parent, stack):
    folder = Path(tempfile.mkdtemp(prefix=".tmp-", dir=parent))
    with contextlib.suppress(Busy, FileNotFoundError):
        stack.enter_context(locked(folder))
        if folder.exists():
            return folder
    return None  # another process found it before it was locked, and took it for a dead one's


def _remove_if_dead(stray):
    with contextlib.suppress(Busy, OSError), locked(stray) as sure:  # another process may be faster
        if sure or time.time() - stray.stat().st_mtime > STRAY_SECONDS:
            shutil.rmtree(stray, ignore_errors=True)


class Journal:
    """A file that only grows. What a full disk refuses is kept, and written together with the next."""

    def __init__(self, path: Path):
        self.path, self.waiting = path, b""
        self.size = (
            path.stat().st_size if path.exists() else 0
        )  # bytes that are in the file for certain

    def write(self, text: str) -> bool:
        """-> did it all get into the file? Raises UserError on anything but a full disk."""
        self.waiting += text.encode()
        return self.flush()

    def flush(self) -> bool:
        if not self.waiting:
            return True
        try:
            self._append()
        except OSError as error:
            if error.errno not in FULL:
                raise cannot_write(self.path, error) from error
            return False
        self.size, self.waiting = self.size + len(self.waiting), b""
        return True

    def _append(self):
        with open(self.path, "ab", buffering=0) as file:
            self.size = os.fstat(file.fileno()).st_size  # somebody may have cut it, or added to it
            rest = memoryview(self.waiting)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(self.size)  # half a line would be taken for a whole one
                raise
