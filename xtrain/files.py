"""Files that survive a kill, a full disk and a power cut: whole or not there, and on the disk before anybody relies on them."""

import contextlib
import errno
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .config import UserError

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


# ----------------------------------------------------------------------------- standard output
UNREAD = 141  # what a shell says of a program that wrote to a pipe without a reader: 128 + SIGPIPE


class Output:
    """Standard output for a run, which does not depend on it: what a full disk or a closed pipe refuses is dropped."""

    def __init__(self):
        self.refused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)  # the one of now: somebody may redirect it

    def write(self, text: str) -> int:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        known = text.encode(encoding, "replace").decode(encoding)  # ? for what it does not know
        self._try(lambda: sys.stdout.write(known))
        return len(text)

    def flush(self) -> None:
        self._try(lambda: sys.stdout.flush())

    def _try(self, call):
        if sys.stdout is not None:
            try:
                call()
            except (OSError, ValueError):  # ValueError: it is closed
                self.refused = True

    def end(self) -> None:
        """Let nothing of what was refused be tried again at the end of the program, where it would be an error."""
        if self.refused:
            _discard_output()


def command_line(main: Callable[[], int]) -> int:
    """main() -> the exit code of the program: 130 for Ctrl-C, UNREAD when nobody reads its output (`| head`), 1 when that
    has no room."""
    _open_streams()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as __init__.py left it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code = main()
        except SystemExit as stop:  # --help
            code = stop.code
        sys.stdout.flush()
        if not code:  # all is done: a signal while Python and MPI end must not make it a failure
            for name in {"SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"} & set(dir(signal)):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        return code
    except KeyboardInterrupt:
        print("\nxtrain: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in {errno.EPIPE, errno.EIO, *FULL}:
            raise
        _discard_output()
        if error.errno == errno.EPIPE:
            return UNREAD
        print(f"xtrain: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _open_streams():
    """Streams that are closed (<&-, >&-) lead nowhere; those without Unicode show ? instead of ending us."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif name != "stderr" and hasattr(stream, "reconfigure"):  # stderr shows \\u65e5 by itself
            stream.reconfigure(errors="replace")


def _discard_output():
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
